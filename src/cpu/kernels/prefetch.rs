//! Prefetch of one cache line. A prefetch is a hint: it never faults, and does nothing elsewhere than on x86-64 and
//! AArch64.
#![allow(unsafe_code)]

/// Bytes of a cache line.
pub const LINE: usize = 64;

/// The cache level that a line is fetched into.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Level {
    First,
    Second,
}

/// Prefetches the line at an address, which may be any.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
pub fn prefetch_line(address: *const u8, level: Level) {
    use std::arch::x86_64::{_MM_HINT_T0, _MM_HINT_T1, _mm_prefetch};
    // SAFETY: a prefetch accepts any address.
    unsafe {
        match level {
            Level::First => _mm_prefetch::<_MM_HINT_T0>(address.cast()),
            Level::Second => _mm_prefetch::<_MM_HINT_T1>(address.cast()),
        }
    }
}

/// Prefetches the line at an address, which may be any.
#[cfg(target_arch = "aarch64")]
#[inline(always)]
pub fn prefetch_line(address: *const u8, level: Level) {
    use std::arch::asm;
    // SAFETY: a prefetch accepts any address.
    unsafe {
        match level {
            Level::First => {
                asm!("prfm pldl1keep, [{0}]", in(reg) address, options(readonly, nostack, preserves_flags))
            }
            Level::Second => {
                asm!("prfm pldl2keep, [{0}]", in(reg) address, options(readonly, nostack, preserves_flags))
            }
        }
    }
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
#[inline(always)]
pub fn prefetch_line(_: *const u8, _: Level) {}
