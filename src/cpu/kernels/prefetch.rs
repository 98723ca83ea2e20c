//! Prefetch of one cache line. A prefetch is a hint: it never faults, and elsewhere than on x86-64 it does nothing.
#![allow(unsafe_code)]

/// Bytes of a cache line.
pub const LINE: usize = 64;

/// Which cache lines are asked into.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Level {
    First,
    Second,
}

/// Asks for the line at an address, which may be any.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
pub fn hint(address: *const u8, level: Level) {
    use std::arch::x86_64::{_MM_HINT_T0, _MM_HINT_T1, _mm_prefetch};
    // SAFETY: a prefetch accepts any address.
    unsafe {
        match level {
            Level::First => _mm_prefetch::<_MM_HINT_T0>(address.cast()),
            Level::Second => _mm_prefetch::<_MM_HINT_T1>(address.cast()),
        }
    }
}

#[cfg(not(target_arch = "x86_64"))]
#[inline(always)]
pub fn hint(_: *const u8, _: Level) {}
