//! The instruction sets: which of them this machine has, which is the best, and the table of kernels of each.
//! Besides this file only `attention::many_rows_bf16` and `attention::pack` name an instruction set: their blocks
//! exist on AMX and AVX512-BF16 alone.
#![cfg_attr(test, allow(unsafe_code))]

use super::kernels::simd::Portable;
use super::kernels::table::Kernels;
use super::x86::vendor::amd_family;
use crate::dtype::DType;
#[cfg(folio_avx512)]
use std::sync::LazyLock;

/// The instruction sets that kernels are compiled for, weakest first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Isa {
    /// The instructions that the target of the compiler guarantees.
    Portable,
    /// NEON, which every AArch64 processor has.
    Neon,
    /// AVX2, FMA and F16C.
    Avx2,
    /// AVX-512 F, BW, DQ and VL. This and AMX need a library built with Rust 1.89 or later.
    Avx512,
    /// AVX-512 with BF16.
    Avx512Bf16,
    /// The same, and AMX with bf16 products.
    Amx,
}

impl Isa {
    /// All of them, weakest first.
    pub const ALL: [Isa; 6] = [
        Isa::Portable,
        Isa::Neon,
        Isa::Avx2,
        Isa::Avx512,
        Isa::Avx512Bf16,
        Isa::Amx,
    ];

    /// Whether this processor has it. For AMX also whether the operating system lets this process use it.
    pub fn is_available(self) -> bool {
        available(self)
    }

    /// The fastest that is available.
    pub fn best() -> Isa {
        let mut all = Isa::ALL.into_iter().rev();
        all.find(|isa| isa.is_available() && isa.pays())
            .unwrap_or(Isa::Portable)
    }

    /// Whether it is faster than the weaker ones. bf16 products of AVX512-BF16 take twice as long as f32 products on
    /// processors of Intel, and half as long on those of AMD.
    fn pays(self) -> bool {
        self != Isa::Avx512Bf16 || amd_family().is_some()
    }

    /// The unit that multiplies blocks of bf16 for queries of a type, if there is one.
    pub(super) fn matrix(self, q_dtype: DType) -> Option<Matrix> {
        match self {
            Isa::Amx => Some(Matrix::Amx),
            Isa::Avx512Bf16 if q_dtype == DType::BF16 => Some(Matrix::Pairs),
            _ => None,
        }
    }

    /// Name of the kernels, as handles report it.
    pub fn name(self) -> &'static str {
        match self {
            Isa::Portable => "cpu/portable",
            Isa::Neon => "cpu/neon",
            Isa::Avx2 => "cpu/avx2",
            Isa::Avx512 => "cpu/avx512",
            Isa::Avx512Bf16 => "cpu/avx512-bf16",
            Isa::Amx => "cpu/amx-bf16",
        }
    }

    /// The vector kernels; AMX adds matrix kernels of its own.
    pub(super) fn kernels(self) -> &'static Kernels {
        kernels(self)
    }
}

/// A unit that multiplies blocks of bf16.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Matrix {
    /// AMX tiles; numbers of other types are split into bf16 parts.
    Amx,
    /// AVX512-BF16 vectors, by pairs of numbers.
    Pairs,
}

#[cfg(target_arch = "x86_64")]
fn available(isa: Isa) -> bool {
    match isa {
        Isa::Portable => true,
        Isa::Neon => false,
        Isa::Avx2 => {
            is_x86_feature_detected!("avx2")
                && is_x86_feature_detected!("fma")
                && is_x86_feature_detected!("f16c")
        }
        #[cfg(folio_avx512)]
        Isa::Avx512 => {
            available(Isa::Avx2)
                && is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512dq")
                && is_x86_feature_detected!("avx512vl")
        }
        #[cfg(folio_avx512)]
        Isa::Avx512Bf16 => available(Isa::Avx512) && is_x86_feature_detected!("avx512bf16"),
        #[cfg(folio_avx512)]
        Isa::Amx => available(Isa::Avx512Bf16) && super::x86::amx::is_available(),
        #[cfg(not(folio_avx512))]
        Isa::Avx512 | Isa::Avx512Bf16 | Isa::Amx => false,
    }
}

#[cfg(target_arch = "aarch64")]
fn available(isa: Isa) -> bool {
    matches!(isa, Isa::Portable | Isa::Neon)
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
fn available(isa: Isa) -> bool {
    isa == Isa::Portable
}

#[cfg(target_arch = "x86_64")]
fn kernels(isa: Isa) -> &'static Kernels {
    static AVX2: Kernels = Kernels::of::<super::x86::avx2::Avx2>();
    match isa {
        Isa::Portable | Isa::Neon => &PORTABLE,
        Isa::Avx2 => &AVX2,
        #[cfg(folio_avx512)]
        Isa::Avx512 => &AVX512,
        #[cfg(folio_avx512)]
        Isa::Avx512Bf16 => avx512_bf16(),
        #[cfg(folio_avx512)]
        Isa::Amx => &AMX,
        #[cfg(not(folio_avx512))]
        Isa::Avx512 | Isa::Avx512Bf16 | Isa::Amx => &AVX2,
    }
}

#[cfg(folio_avx512)]
static AVX512: Kernels =
    Kernels::of::<super::x86::avx512::Avx512>().with_bf16(&[(1, super::x86::bf16_rows::SPLIT)]);

/// Prefetch into the first-level cache, against prefetch into the second, in cold decode with two threads: on a Zen
/// 5 it takes 0.90 to 0.98 of the time in bf16 and fp32, 0.69 to 0.88 in fp16, and 0.90 to 0.92 in warm decode. On a
/// Zen 4 it takes 1.6 of the time, and on an Emerald Rapids as long.
#[cfg(folio_avx512)]
fn avx512_bf16() -> &'static Kernels {
    static PREFETCH_L2: Kernels =
        Kernels::of::<super::x86::avx512::Avx512>().with_bf16(&[(1, super::x86::bf16_rows::PAIRS)]);
    static PREFETCH_L1: Kernels = Kernels::of::<super::x86::avx512::Avx512>()
        .with_few_rows_of::<super::x86::avx512::Avx512PrefetchL1>()
        .with_bf16(&[(1, super::x86::bf16_rows::PAIRS_PREFETCH_L1)]);
    // Reading the name of the processor takes microseconds under a hypervisor.
    static PICKED: LazyLock<&Kernels> = LazyLock::new(|| match amd_family() {
        Some(26..) => &PREFETCH_L1,
        _ => &PREFETCH_L2,
    });
    *PICKED
}

/// Warm decode of 512 keys with two threads of a quiet Emerald Rapids, in µs on vectors and on tiles: one query row
/// takes 30 and 30 (57 and 70 where another process uses the core), two rows 45 and 31, three rows 62 and 34. Four
/// rows take 37 on tiles, and eight 49. So tiles begin at two rows.
#[cfg(folio_avx512)]
static AMX: Kernels = Kernels::of::<super::x86::avx512::Avx512>().with_bf16(&[
    (1, super::x86::bf16_rows::SPLIT),
    (2, super::x86::amx_rows::TILES),
]);

#[cfg(target_arch = "aarch64")]
fn kernels(isa: Isa) -> &'static Kernels {
    static NEON: Kernels = Kernels::of::<super::arm::neon::Neon>();
    match isa {
        Isa::Neon => &NEON,
        _ => &PORTABLE,
    }
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
fn kernels(_: Isa) -> &'static Kernels {
    &PORTABLE
}

static PORTABLE: Kernels = Kernels::of::<Portable>();

/// Calls `test` with every instruction set that this machine has.
#[cfg(test)]
pub fn for_each_isa(test: impl FnMut(Isa)) {
    let available = Isa::ALL.into_iter().filter(|isa| isa.is_available());
    available.for_each(test);
}

#[cfg(test)]
impl Isa {
    /// Runs a test's own task.
    pub fn run_task<T: super::kernels::simd::Task>(self, task: &T) -> T::Output {
        assert!(self.is_available());
        use super::kernels::simd::Simd;
        // SAFETY: just asserted; the test's pointers are its own.
        unsafe {
            match self {
                #[cfg(target_arch = "aarch64")]
                Isa::Neon => super::arm::neon::Neon::vectorize(task),
                #[cfg(target_arch = "x86_64")]
                Isa::Avx2 => super::x86::avx2::Avx2::vectorize(task),
                #[cfg(folio_avx512)]
                Isa::Avx512 | Isa::Avx512Bf16 | Isa::Amx => {
                    super::x86::avx512::Avx512::vectorize(task)
                }
                _ => Portable::vectorize(task),
            }
        }
    }
}
