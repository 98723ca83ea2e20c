//! The instruction sets: which of them this machine has, which is the best, and the row of kernels of each. This is
//! where the kernels meet the instruction sets; the walk by blocks of bf16 alone names one itself.
#![cfg_attr(test, allow(unsafe_code))]

use super::kernels::simd::Portable;
use super::kernels::table::Kernels;
use super::x86::vendor::amd_family;
use crate::dtype::DType;
#[cfg(folio_avx512)]
use std::sync::LazyLock;

/// What the kernels are compiled for, weakest first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Isa {
    /// What the compiler's target guarantees.
    Portable,
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
    pub const ALL: [Isa; 5] = [
        Isa::Portable,
        Isa::Avx2,
        Isa::Avx512,
        Isa::Avx512Bf16,
        Isa::Amx,
    ];

    /// Whether this processor has it, and for AMX whether the kernel lets this process use it.
    pub fn is_available(self) -> bool {
        available(self)
    }

    /// The best that is available.
    pub fn best() -> Isa {
        let mut all = Isa::ALL.into_iter().rev();
        all.find(|isa| isa.is_available() && isa.pays())
            .unwrap_or(Isa::Portable)
    }

    /// Whether it is faster than the ones before it. Products of AVX512-BF16 are half as fast as those of f32 on Intel's
    /// processors, and twice as fast on AMD's.
    fn pays(self) -> bool {
        self != Isa::Avx512Bf16 || amd_family().is_some()
    }

    /// What multiplies blocks of bf16 numbers for queries of a type, if something does.
    pub(super) fn matrix(self, q_dtype: DType) -> Option<Matrix> {
        match self {
            Isa::Amx => Some(Matrix::Amx),
            Isa::Avx512Bf16 if q_dtype == DType::BF16 => Some(Matrix::Pairs),
            _ => None,
        }
    }

    /// Name of a kernel row.
    pub fn name(self) -> &'static str {
        match self {
            Isa::Portable => "cpu/portable",
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

/// What multiplies blocks of bf16 numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Matrix {
    /// Tiles; numbers of other types are sums of bf16 numbers.
    Amx,
    /// Vectors, by pairs.
    Pairs,
}

#[cfg(target_arch = "x86_64")]
fn available(isa: Isa) -> bool {
    match isa {
        Isa::Portable => true,
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

#[cfg(not(target_arch = "x86_64"))]
fn available(isa: Isa) -> bool {
    isa == Isa::Portable
}

#[cfg(target_arch = "x86_64")]
fn kernels(isa: Isa) -> &'static Kernels {
    static AVX2: Kernels = Kernels::of::<super::x86::avx2::Avx2>();
    match isa {
        Isa::Portable => &PORTABLE,
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

/// Cold decode on a Zen 5, two threads: asking for lines into the first level instead of the second takes 0.90 to 0.98
/// of the time in bf16 and fp32 and 0.69 to 0.88 in fp16, warm decode 0.90 to 0.92. On a Zen 4 it takes 1.6 of it, and on
/// an Emerald Rapids as long.
#[cfg(folio_avx512)]
fn avx512_bf16() -> &'static Kernels {
    static FAR: Kernels =
        Kernels::of::<super::x86::avx512::Avx512>().with_bf16(&[(1, super::x86::bf16_rows::PAIRS)]);
    static NEAR: Kernels = Kernels::of::<super::x86::avx512::Avx512>()
        .with_few_rows_of::<super::x86::avx512::Avx512Near>()
        .with_bf16(&[(1, super::x86::bf16_rows::PAIRS_NEAR)]);
    // Under a hypervisor the processor's name takes microseconds.
    static PICKED: LazyLock<&Kernels> = LazyLock::new(|| match amd_family() {
        Some(26..) => &NEAR,
        _ => &FAR,
    });
    *PICKED
}

/// Warm decode of 512 keys, two threads of a quiet Emerald Rapids, in µs: one row takes 30 on vectors and on
/// tiles (57 and 70 where a neighbour uses the core), two rows 45 and 31, three 62 and 34; on tiles four take 37
/// and eight 49.
#[cfg(folio_avx512)]
static AMX: Kernels = Kernels::of::<super::x86::avx512::Avx512>().with_bf16(&[
    (1, super::x86::bf16_rows::SPLIT),
    (2, super::x86::amx_rows::TILES),
]);

#[cfg(not(target_arch = "x86_64"))]
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
