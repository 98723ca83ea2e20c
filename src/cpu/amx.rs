//! AMX bf16 products: permission, tile configuration, packing, and the 32 × 32 block that everything is
//! made of. Inline assembly, because the intrinsics are not stable.
//!
//! Operands: A is row-major bf16; B is "VNNI", strips of 32 columns in which row `k / 2` holds the pairs
//! (b[k][c], b[k + 1][c]), 128 bytes in all; C is row-major f32. Depths and columns are padded with zeros
//! to multiples of 32, rows with anything to multiples of 32.
#![allow(unsafe_code)]
#![allow(
    clippy::incompatible_msrv,
    reason = "compiled under folio_avx512 only, by compilers that have these intrinsics"
)]

use super::rows::Rows;
use std::arch::asm;
use std::arch::x86_64::*;
use std::sync::OnceLock;

/// Rows, columns and depth come in multiples of this.
pub const UNIT: usize = 32;

/// Whether the processor has AMX bf16, the operating system saves tiles, and this process may use them.
/// The permission is asked for once per process, and may be refused.
pub fn is_available() -> bool {
    static AVAILABLE: OnceLock<bool> = OnceLock::new();
    *AVAILABLE.get_or_init(|| {
        is_x86_feature_detected!("avx512bf16") && has_tiles() && saves_tiles() && permitted()
    })
}

/// CPUID leaf 7: bf16 products (bit 22) and tiles (bit 24).
fn has_tiles() -> bool {
    const WANTED: u32 = 1 << 22 | 1 << 24;
    #[allow(unused_unsafe, reason = "unsafe in Rust 1.89, safe in later ones")]
    // SAFETY: every x86-64 processor has CPUID, and AVX-512 was detected, so leaf 7 exists.
    let leaf = unsafe { __cpuid_count(7, 0) };
    leaf.edx & WANTED == WANTED
}

/// XCR0 bits 17 and 18: the operating system saves tile configuration and data.
fn saves_tiles() -> bool {
    const WANTED: u64 = 1 << 17 | 1 << 18;
    // SAFETY: AVX-512 was detected, so XGETBV exists and is enabled.
    let enabled = unsafe { enabled_state() };
    enabled & WANTED == WANTED
}

#[target_feature(enable = "xsave")]
fn enabled_state() -> u64 {
    // SAFETY: register 0 always exists.
    unsafe { _xgetbv(0) }
}

#[cfg(target_os = "linux")]
fn permitted() -> bool {
    const ARCH_REQ_XCOMP_PERM: libc::c_long = 0x1023;
    const XFEATURE_XTILEDATA: libc::c_long = 18;
    // SAFETY: the call takes two numbers and touches no memory of ours.
    let refused = unsafe {
        libc::syscall(
            libc::SYS_arch_prctl,
            ARCH_REQ_XCOMP_PERM,
            XFEATURE_XTILEDATA,
        )
    };
    refused == 0
}

#[cfg(not(target_os = "linux"))]
fn permitted() -> bool {
    false
}

/// This thread's tiles, configured; dropping it gives them back.
pub struct Tiles(());

impl Tiles {
    /// Eight tiles of 16 rows of 64 bytes.
    ///
    /// # Safety
    /// [`is_available`] must have said yes.
    pub unsafe fn new() -> Tiles {
        #[repr(align(64))]
        struct Config([u8; 64]);
        let mut config = Config([0; 64]);
        config.0[0] = 1;
        for tile in 0..8 {
            config.0[16 + 2 * tile] = 64;
            config.0[48 + tile] = 16;
        }
        // SAFETY: the caller's promise; palette 1 has these tiles.
        unsafe { asm!("ldtilecfg [{}]", in(reg) config.0.as_ptr(), options(nostack, readonly)) };
        Tiles(())
    }

    /// `C = A · B`, or `C += A · B`, for 32 rows and columns and `steps` times 32 of depth. `lda` and
    /// `ldc` are in bytes.
    ///
    /// # Safety
    /// The operands must be as this file's opening comment says.
    #[inline]
    #[expect(
        clippy::too_many_arguments,
        reason = "three operands and their strides"
    )]
    pub unsafe fn block(
        &self,
        a: *const u16,
        lda: usize,
        b: *const u16,
        c: *mut f32,
        ldc: usize,
        steps: usize,
        add: bool,
    ) {
        // SAFETY: the tiles are configured; the caller promises the operands.
        unsafe {
            let (a_low, c_low) = (a.byte_add(16 * lda), c.byte_add(16 * ldc));
            asm!(
                "test {add}, {add}",
                "jz 2f",
                "tileloadd tmm0, [{c} + {ldc}*1]",
                "tileloadd tmm1, [{c} + {ldc}*1 + 64]",
                "tileloadd tmm2, [{c_low} + {ldc}*1]",
                "tileloadd tmm3, [{c_low} + {ldc}*1 + 64]",
                "jmp 3f",
                "2:",
                "tilezero tmm0",
                "tilezero tmm1",
                "tilezero tmm2",
                "tilezero tmm3",
                "3:",
                "tileloadd tmm4, [{a} + {lda}*1]",
                "tileloadd tmm6, [{b} + {ldb}*1]",
                "tileloadd tmm7, [{b} + {ldb}*1 + 64]",
                "tileloadd tmm5, [{a_low} + {lda}*1]",
                "tdpbf16ps tmm0, tmm4, tmm6",
                "tdpbf16ps tmm1, tmm4, tmm7",
                "tdpbf16ps tmm2, tmm5, tmm6",
                "tdpbf16ps tmm3, tmm5, tmm7",
                "add {a}, 64",
                "add {a_low}, 64",
                "add {b}, 2048",
                "dec {steps}",
                "jnz 3b",
                "tilestored [{c} + {ldc}*1], tmm0",
                "tilestored [{c} + {ldc}*1 + 64], tmm1",
                "tilestored [{c_low} + {ldc}*1], tmm2",
                "tilestored [{c_low} + {ldc}*1 + 64], tmm3",
                add = in(reg) usize::from(add),
                a = inout(reg) a => _,
                a_low = inout(reg) a_low => _,
                b = inout(reg) b => _,
                c = in(reg) c,
                c_low = in(reg) c_low,
                lda = in(reg) lda,
                ldb = in(reg) 128usize,
                ldc = in(reg) ldc,
                steps = inout(reg) steps => _,
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                options(nostack)
            );
        }
    }
}

impl Drop for Tiles {
    fn drop(&mut self) {
        // SAFETY: a `Tiles` exists only where AMX does.
        unsafe { asm!("tilerelease", options(nostack)) };
    }
}

/// Packs bf16 rows as B over the depth of rows (values), `columns` of them in strips of 32, each strip
/// `strip` elements apart. Every 32 rows are taken in the order 0, 16, 1, 17, …, which is that of the
/// weights; missing rows become zero. Returns whether every element is finite.
///
/// # Safety
/// Needs AVX-512 F, BW and VL, rows of `columns` elements (a multiple of 8), and room at `dst`.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
pub unsafe fn interleave(rows: &Rows, columns: usize, dst: *mut u16, strip: usize) -> bool {
    let exponent = _mm512_set1_epi16(0x7f80);
    // SAFETY: the arrays are 64 bytes long.
    let (left, right) = unsafe {
        (
            _mm512_loadu_si512(LEFT.as_ptr().cast()),
            _mm512_loadu_si512(RIGHT.as_ptr().cast()),
        )
    };
    let mut special = 0;
    for first in (0..rows.count).step_by(UNIT) {
        for pair in 0..UNIT / 2 {
            let j = first + pair;
            for c in (0..columns).step_by(UNIT) {
                // SAFETY: rows and columns are within what the caller promised.
                unsafe {
                    let a = elements(rows, j, c, columns);
                    let b = elements(rows, j + UNIT / 2, c, columns);
                    for x in [a, b] {
                        let bits = _mm512_and_si512(x, exponent);
                        special |= _mm512_cmpeq_epi16_mask(bits, exponent);
                    }
                    let at = dst.add(c / UNIT * strip + (first + 2 * pair) * UNIT);
                    _mm512_storeu_si512(at.cast(), _mm512_permutex2var_epi16(a, left, b));
                    _mm512_storeu_si512(
                        at.add(UNIT).cast(),
                        _mm512_permutex2var_epi16(a, right, b),
                    );
                }
            }
        }
    }
    special == 0
}

/// Elements of a and, from 32 on, of b, that make the first and the last 16 pairs.
const LEFT: [u16; UNIT] = pairs_from(0);
const RIGHT: [u16; UNIT] = pairs_from(16);

const fn pairs_from(first: u16) -> [u16; UNIT] {
    let mut order = [0; UNIT];
    let mut i = 0;
    while i < UNIT {
        order[i] = first + i as u16 / 2 + (i as u16 % 2) * 32;
        i += 1;
    }
    order
}

/// 32 elements of a row; zeros beyond the rows and columns.
///
/// # Safety
/// As for [`interleave`].
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn elements(rows: &Rows, j: usize, c: usize, columns: usize) -> __m512i {
    if j >= rows.count {
        return _mm512_setzero_si512();
    }
    let mask = u32::MAX >> (UNIT - UNIT.min(columns - c));
    // SAFETY: the masked elements are within the row.
    unsafe { _mm512_maskz_loadu_epi16(mask, rows.at_row(j).add(2 * c).cast()) }
}
