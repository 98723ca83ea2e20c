//! Asking for memory that will be read soon. A hint: it never faults, and elsewhere than on x86-64 it is
//! nothing.
//!
//! Into the first-level cache: fp16 decode read 16.5 GB/s with that hint and 13.2 with the second-level
//! one, in the same run.
#![allow(unsafe_code)]

use super::rows::Rows;

/// Asks for `bytes` from the start of each row.
pub fn rows(rows: &Rows, bytes: usize) {
    for j in 0..rows.count {
        // SAFETY: `offsets` holds `count` elements; the address is only formed, not read.
        let row = rows
            .base
            .wrapping_offset(unsafe { *rows.offsets.add(j) } as isize);
        for line in (0..bytes).step_by(64) {
            hint(row.wrapping_add(line));
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[inline(always)]
fn hint(address: *const u8) {
    use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
    // SAFETY: a prefetch accepts any address.
    unsafe { _mm_prefetch::<_MM_HINT_T0>(address.cast()) };
}

#[cfg(not(target_arch = "x86_64"))]
#[inline(always)]
fn hint(_: *const u8) {}
