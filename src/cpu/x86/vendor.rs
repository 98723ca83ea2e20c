//! The maker and family of the processor, for differences that no feature bit shows.
#![allow(unsafe_code)]

/// The family of an AMD processor: 25 (Zen 3 and 4), 26 (Zen 5).
#[cfg(target_arch = "x86_64")]
pub fn amd_family() -> Option<u32> {
    let [(_, vendor), (signature, _)] = [0, 1].map(|number| {
        #[allow(unused_unsafe, reason = "unsafe in Rust 1.88, safe in later ones")]
        // SAFETY: every x86-64 processor has CPUID with these leaves.
        let leaf = unsafe { std::arch::x86_64::__cpuid(number) };
        (leaf.eax, [leaf.ebx, leaf.edx, leaf.ecx])
    });
    let is_amd = vendor.map(u32::to_le_bytes).as_flattened() == b"AuthenticAMD";
    let (base, extended) = (signature >> 8 & 0xf, signature >> 20 & 0xff);
    is_amd.then_some(if base == 0xf { base + extended } else { base })
}

#[cfg(not(target_arch = "x86_64"))]
pub fn amd_family() -> Option<u32> {
    None
}
