//! AMX bf16 products: permission, tile configuration, and instructions on the blocks of `kernels::bf16_block`.
//! Inline assembly, because the intrinsics are not stable.
#![allow(unsafe_code)]
#![allow(
    clippy::incompatible_msrv,
    reason = "compiled under folio_avx512 only, by compilers that have these intrinsics"
)]

use std::arch::asm;
use std::arch::x86_64::*;
use std::sync::OnceLock;

/// Six no-ops after every tile load and product. A core decodes six instructions per clock, so at most one tile
/// instruction is among them. Where the sibling thread is busy, two tile instructions in one clock cost up to twice
/// as much: loads take 31 clocks instead of 21, products 37 instead of 22. Where it is idle they take 8 and 16, and
/// the no-ops cost nothing. Stores need none. (Emerald Rapids.)
macro_rules! spacing {
    () => {
        ".rept 6\nnop\n.endr"
    };
}

/// Bytes from row to row of A, and of a full tile.
const A_STRIDE: usize = 64;

/// Bytes from row to row of B and of C.
const C_STRIDE: usize = 128;

/// Whether the processor has AMX bf16, the operating system saves tiles, and this process may use them. The
/// permission is requested once per process, and may be refused.
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

/// Rows of a tile, and bytes of a row.
type TileShape = (u8, u8);

/// Configures the tiles of this thread.
///
/// # Safety
/// [`is_available`] must have returned true.
unsafe fn configure(shapes: [TileShape; 8]) {
    #[repr(align(64))]
    struct Config([u8; 64]);
    let mut config = Config([0; 64]);
    config.0[0] = 1;
    for (tile, (rows, bytes)) in shapes.into_iter().enumerate() {
        config.0[16 + 2 * tile] = bytes;
        config.0[48 + tile] = rows;
    }
    // SAFETY: the caller's promise; palette 1 has eight tiles of up to 16 rows of 64 bytes.
    unsafe { asm!("ldtilecfg [{}]", in(reg) config.0.as_ptr(), options(nostack, readonly)) };
}

/// Releases the tiles of this thread.
fn release() {
    // SAFETY: called by the owners of tiles, which exist only where AMX does.
    unsafe { asm!("tilerelease", options(nostack)) };
}

/// The tiles of this thread, configured for blocks until this is dropped. They hold A, B and C from call to call; no
/// other code uses tiles meanwhile.
pub struct Tiles(());

impl Tiles {
    /// Configures eight tiles of 16 rows of 64 bytes.
    ///
    /// # Safety
    /// [`is_available`] must have returned true.
    pub unsafe fn new() -> Tiles {
        // SAFETY: the caller's promise.
        unsafe { configure([(16, 64); 8]) };
        Tiles(())
    }

    /// `C = 0`.
    ///
    /// # Safety
    /// This thread's tiles must be configured, which `self` stands for.
    #[inline(always)]
    pub unsafe fn zero(&self) {
        // SAFETY: the caller's promise.
        unsafe {
            asm!(
                "tilezero tmm0",
                "tilezero tmm1",
                "tilezero tmm2",
                "tilezero tmm3",
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                options(nostack, nomem, preserves_flags)
            );
        }
    }

    /// Reads C.
    ///
    /// # Safety
    /// `c` must be a block of f32.
    #[inline(always)]
    pub unsafe fn load(&self, c: *const f32) {
        // SAFETY: the tiles are configured; the caller promises the block.
        unsafe {
            asm!(
                "tileloadd tmm0, [{c} + {ld}*1]",
                spacing!(),
                "tileloadd tmm1, [{c} + {ld}*1 + 64]",
                spacing!(),
                "tileloadd tmm2, [{c} + {ld}*1 + 2048]",
                spacing!(),
                "tileloadd tmm3, [{c} + {ld}*1 + 2112]",
                spacing!(),
                c = in(reg) c,
                ld = in(reg) C_STRIDE,
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                options(nostack, readonly, preserves_flags)
            );
        }
    }

    /// Reads A.
    ///
    /// # Safety
    /// `a` must be a block of bf16.
    #[inline(always)]
    pub unsafe fn load_a(&self, a: *const u16) {
        // SAFETY: the tiles are configured; the caller promises the block.
        unsafe {
            asm!(
                "tileloadd tmm4, [{a} + {ld}*1]",
                spacing!(),
                "tileloadd tmm5, [{a} + {ld}*1 + 1024]",
                spacing!(),
                a = in(reg) a,
                ld = in(reg) A_STRIDE,
                out("tmm4") _, out("tmm5") _,
                options(nostack, readonly, preserves_flags)
            );
        }
    }

    /// Reads B.
    ///
    /// # Safety
    /// `b` must be a block of bf16.
    #[inline(always)]
    pub unsafe fn load_b(&self, b: *const u16) {
        // SAFETY: the tiles are configured; the caller promises the block.
        unsafe {
            asm!(
                "tileloadd tmm6, [{b} + {ld}*1]",
                spacing!(),
                "tileloadd tmm7, [{b} + {ld}*1 + 64]",
                spacing!(),
                b = in(reg) b,
                ld = in(reg) C_STRIDE,
                out("tmm6") _, out("tmm7") _,
                options(nostack, readonly, preserves_flags)
            );
        }
    }

    /// `C += A · B` over a depth of 32.
    ///
    /// # Safety
    /// This thread's tiles must be configured, which `self` stands for.
    #[inline(always)]
    pub unsafe fn multiply(&self) {
        // SAFETY: the caller's promise.
        unsafe {
            asm!(
                "tdpbf16ps tmm0, tmm4, tmm6",
                spacing!(),
                "tdpbf16ps tmm1, tmm4, tmm7",
                spacing!(),
                "tdpbf16ps tmm2, tmm5, tmm6",
                spacing!(),
                "tdpbf16ps tmm3, tmm5, tmm7",
                spacing!(),
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                options(nostack, nomem, preserves_flags)
            );
        }
    }

    /// Writes C.
    ///
    /// # Safety
    /// `c` must have room for a block of f32.
    #[inline(always)]
    pub unsafe fn store(&self, c: *mut f32) {
        // SAFETY: the tiles are configured; the caller promises the room.
        unsafe {
            asm!(
                "tilestored [{c} + {ld}*1], tmm0",
                "tilestored [{c} + {ld}*1 + 64], tmm1",
                "tilestored [{c} + {ld}*1 + 2048], tmm2",
                "tilestored [{c} + {ld}*1 + 2112], tmm3",
                c = in(reg) c,
                ld = in(reg) C_STRIDE,
                options(nostack, preserves_flags)
            );
        }
    }
}

impl Drop for Tiles {
    fn drop(&mut self) {
        release();
    }
}

/// Instructions on the tiles of this thread for few query rows, as `amx_rows` uses them. Tiles 0 and 1 hold the
/// scores of 16 keys each, 2 and 3 hold 16 rows of 64 bytes of keys or values, 4 holds queries, 5 weights, and 6 and
/// 7 sums of 16 columns.
pub struct RowTiles;

impl RowTiles {
    /// Most query rows per product with values: a tile holds two rows of sums for each.
    pub const WEIGHTED: usize = 8;

    /// Configures the tiles of this thread for 1 to 16 query rows.
    ///
    /// # Safety
    /// [`is_available`] must have returned true.
    pub unsafe fn configure(rows: usize) {
        let weighted = 2 * RowTiles::WEIGHTED.min(rows) as u8;
        let (scores, cache, sums) = ((16, 4 * rows as u8), (16, 64), (weighted, 64));
        // SAFETY: the caller's promise.
        unsafe { configure([scores, scores, cache, cache, scores, sums, sums, sums]) };
    }

    /// Releases the tiles of this thread.
    ///
    /// # Safety
    /// [`RowTiles::configure`] must have been called on this thread.
    pub unsafe fn release() {
        release();
    }

    /// Clears both tiles of scores.
    ///
    /// # Safety
    /// This and all below: this thread's tiles must be configured by [`RowTiles::configure`].
    #[inline(always)]
    pub unsafe fn zero_scores() {
        // SAFETY: the caller's promise.
        unsafe {
            asm!(
                "tilezero tmm0",
                "tilezero tmm1",
                out("tmm0") _, out("tmm1") _,
                options(nostack, nomem, preserves_flags)
            );
        }
    }

    /// Adds the products of 32 elements of `q`, in 16 rows of pairs that are `ldq` bytes apart, with those of 16
    /// keys at `a` and 16 keys at `b`.
    ///
    /// # Safety
    /// The rows must be readable.
    #[inline(always)]
    pub unsafe fn add_scores(
        q: *const u32,
        ldq: usize,
        a: *const u8,
        lda: usize,
        b: *const u8,
        ldb: usize,
    ) {
        // SAFETY: the caller's promises.
        unsafe {
            asm!(
                "tileloadd tmm4, [{q} + {ldq}*1]",
                spacing!(),
                "tileloadd tmm2, [{a} + {lda}*1]",
                spacing!(),
                "tdpbf16ps tmm0, tmm2, tmm4",
                spacing!(),
                "tileloadd tmm3, [{b} + {ldb}*1]",
                spacing!(),
                "tdpbf16ps tmm1, tmm3, tmm4",
                spacing!(),
                q = in(reg) q,
                ldq = in(reg) ldq,
                a = in(reg) a,
                lda = in(reg) lda,
                b = in(reg) b,
                ldb = in(reg) ldb,
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _, out("tmm4") _,
                options(nostack, readonly, preserves_flags)
            );
        }
    }

    /// Writes the scores: 32 rows, 64 bytes apart, with a float per query row.
    ///
    /// # Safety
    /// `s` must have room.
    #[inline(always)]
    pub unsafe fn store_scores(s: *mut f32) {
        // SAFETY: the caller's promises.
        unsafe {
            asm!(
                "tilestored [{s} + {ld}*1], tmm0",
                "tilestored [{s} + {ld}*1 + 1024], tmm1",
                s = in(reg) s,
                ld = in(reg) A_STRIDE,
                options(nostack, preserves_flags)
            );
        }
    }

    /// Clears both tiles of sums.
    ///
    /// # Safety
    /// The caller's promise to `zero_scores`.
    #[inline(always)]
    pub unsafe fn zero_sums() {
        // SAFETY: the caller's promise.
        unsafe {
            asm!(
                "tilezero tmm6",
                "tilezero tmm7",
                out("tmm6") _, out("tmm7") _,
                options(nostack, nomem, preserves_flags)
            );
        }
    }

    /// Adds 16 weighted values. `p` holds rows of 16 pairs of weights, 64 bytes apart, two per query row. 32 columns
    /// of the values lie at `a` and 32 at `b`, `ld` bytes from one value to the next.
    ///
    /// # Safety
    /// The rows must be readable.
    #[inline(always)]
    pub unsafe fn add_values(p: *const u32, a: *const u8, b: *const u8, ld: usize) {
        // SAFETY: the caller's promises.
        unsafe {
            asm!(
                "tileloadd tmm5, [{p} + {ldp}*1]",
                spacing!(),
                "tileloadd tmm2, [{a} + {ld}*1]",
                spacing!(),
                "tdpbf16ps tmm6, tmm5, tmm2",
                spacing!(),
                "tileloadd tmm3, [{b} + {ld}*1]",
                spacing!(),
                "tdpbf16ps tmm7, tmm5, tmm3",
                spacing!(),
                p = in(reg) p,
                ldp = in(reg) A_STRIDE,
                a = in(reg) a,
                b = in(reg) b,
                ld = in(reg) ld,
                out("tmm2") _, out("tmm3") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                options(nostack, readonly, preserves_flags)
            );
        }
    }

    /// Writes the sums: two rows of 16 floats per query row, 64 bytes apart, first those of the columns at `a` and
    /// 1024 bytes later those at `b`.
    ///
    /// # Safety
    /// `sums` must have room.
    #[inline(always)]
    pub unsafe fn store_sums(sums: *mut f32) {
        // SAFETY: the caller's promises.
        unsafe {
            asm!(
                "tilestored [{sums} + {ld}*1], tmm6",
                "tilestored [{sums} + {ld}*1 + 1024], tmm7",
                sums = in(reg) sums,
                ld = in(reg) A_STRIDE,
                options(nostack, preserves_flags)
            );
        }
    }
}
