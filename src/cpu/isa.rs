//! The instruction sets, and one table of kernels for each. Nothing else in the backend depends on the
//! instruction set but `x86`.
#![allow(unsafe_code)]

use crate::cpu::kernels::bf16_split::Split;
use crate::cpu::kernels::nontemporal_copy::CopyPast;
use crate::cpu::kernels::product::{Asking, Panel, Product};
use crate::cpu::kernels::rows::{
    Dot, Of, Quantise, Queries, Rows, Stage, Store, Streamed, leave_queries,
};
use crate::cpu::kernels::simd::{Bf16, E4m3, E5m2, Element, F16, F32, Portable, Simd, Task};
use crate::cpu::kernels::softmax::Softmax;
use crate::cpu::kernels::transpose::Transpose;
use crate::cpu::x86::vendor::amd_family;
use crate::dtype::DType;
use std::marker::PhantomData;
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
        Isa::Amx => available(Isa::Avx512Bf16) && crate::cpu::x86::amx::is_available(),
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
    static AVX2: Kernels = Kernels::of::<crate::cpu::x86::avx2::Avx2>();
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
static AVX512: Kernels = Kernels::of::<crate::cpu::x86::avx512::Avx512>()
    .with_bf16(&[(1, crate::cpu::x86::bf16_rows::SPLIT)]);

/// Cold decode on a Zen 5, two threads: asking for lines into the first level instead of the second takes 0.90 to 0.98
/// of the time in bf16 and fp32 and 0.69 to 0.88 in fp16, warm decode 0.90 to 0.92. On a Zen 4 it takes 1.6 of it, and on
/// an Emerald Rapids as long.
#[cfg(folio_avx512)]
fn avx512_bf16() -> &'static Kernels {
    static FAR: Kernels = Kernels::of::<crate::cpu::x86::avx512::Avx512>()
        .with_bf16(&[(1, crate::cpu::x86::bf16_rows::PAIRS)]);
    static NEAR: Kernels = Kernels {
        few: FewRows::all::<crate::cpu::x86::avx512::Avx512Near>(),
        ..Kernels::of::<crate::cpu::x86::avx512::Avx512>()
    }
    .with_bf16(&[(1, crate::cpu::x86::bf16_rows::PAIRS_NEAR)]);
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
static AMX: Kernels = Kernels::of::<crate::cpu::x86::avx512::Avx512>().with_bf16(&[
    (1, crate::cpu::x86::bf16_rows::SPLIT),
    (2, crate::cpu::x86::amx_rows::TILES),
]);

#[cfg(not(target_arch = "x86_64"))]
fn kernels(_: Isa) -> &'static Kernels {
    &PORTABLE
}

static PORTABLE: Kernels = Kernels::of::<Portable>();

/// A kernel: its arguments behind a pointer. Calling it needs the instruction set, and what the
/// arguments' fields say of their pointers.
type Kernel<A, R = ()> = unsafe fn(&A) -> R;

/// The kernels for few query rows over rows of one type.
#[derive(Clone, Copy)]
pub struct FewRows {
    /// Puts query rows into the order that `dot` reads.
    pub queries: Kernel<Queries>,
    pub dot: Kernel<Dot>,
    /// `accumulate` with weights that may be rounded to the values' type, and sums that have room for a
    /// multiple of 32.
    pub weigh: Kernel<Product<Streamed>>,
    /// They run on AMX, and need what [`FewRows::tiles`] gives.
    pub on_tiles: bool,
}

impl FewRows {
    const fn of<S: Simd, E: Element>() -> FewRows {
        FewRows {
            queries: leave_queries,
            dot: typed::<S, E, Dot>,
            weigh: typed::<S, E, Product<Streamed>>,
            on_tiles: false,
        }
    }

    const fn all<S: Simd>() -> [FewRows; 5] {
        [
            FewRows::of::<S, F32>(),
            FewRows::of::<S, F16>(),
            FewRows::of::<S, Bf16>(),
            FewRows::of::<S, E4m3>(),
            FewRows::of::<S, E5m2>(),
        ]
    }

    /// What a thread has to hold while it calls the kernels for `rows` query rows.
    #[cfg(folio_avx512)]
    pub fn tiles(&self, rows: usize) -> Option<crate::cpu::x86::amx::RowTiles> {
        // SAFETY: only the table for AMX has such kernels.
        self.on_tiles
            .then(|| unsafe { crate::cpu::x86::amx::RowTiles::new(rows) })
    }

    #[cfg(not(folio_avx512))]
    pub fn tiles(&self, _: usize) -> Option<()> {
        None
    }
}

/// One row of the table. Arrays are indexed by [`crate::dtype::DType`], of which the five floats come first.
pub struct Kernels {
    /// Columns of a panel's strip: what `product` handles in one pass, and a multiple of 16.
    pub strip: usize,
    few: [FewRows; 5],
    /// Better ones for bf16: each from so many rows on, in ascending order.
    bf16: &'static [(usize, FewRows)],
    pub accumulate: [Kernel<Product<Rows>>; 5],
    pub stage: [Kernel<Stage, bool>; 5],
    pub split: [Kernel<Split, bool>; 5],
    pub store: [Kernel<Store>; 5],
    /// From fp32, fp16 and bf16.
    pub quantise: [Kernel<Quantise>; 3],
    pub product: Kernel<Product<Panel>>,
    pub asking_product: Kernel<Product<Asking>>,
    pub copy_past: Kernel<CopyPast>,
    pub transpose: Kernel<Transpose>,
    pub softmax: Kernel<Softmax>,
}

impl Kernels {
    const fn of<S: Simd>() -> Kernels {
        Kernels {
            strip: if S::STRIP * S::LANES < 16 {
                16
            } else {
                S::STRIP * S::LANES
            },
            few: FewRows::all::<S>(),
            bf16: &[],
            accumulate: [
                typed::<S, F32, Product<Rows>>,
                typed::<S, F16, Product<Rows>>,
                typed::<S, Bf16, Product<Rows>>,
                typed::<S, E4m3, Product<Rows>>,
                typed::<S, E5m2, Product<Rows>>,
            ],
            stage: [
                typed::<S, F32, Stage>,
                typed::<S, F16, Stage>,
                typed::<S, Bf16, Stage>,
                typed::<S, E4m3, Stage>,
                typed::<S, E5m2, Stage>,
            ],
            split: [
                typed::<S, F32, Split>,
                typed::<S, F16, Split>,
                typed::<S, Bf16, Split>,
                typed::<S, E4m3, Split>,
                typed::<S, E5m2, Split>,
            ],
            store: [
                typed::<S, F32, Store>,
                typed::<S, F16, Store>,
                typed::<S, Bf16, Store>,
                typed::<S, E4m3, Store>,
                typed::<S, E5m2, Store>,
            ],
            quantise: [
                typed::<S, F32, Quantise>,
                typed::<S, F16, Quantise>,
                typed::<S, Bf16, Quantise>,
            ],
            product: typed::<S, F32, Product<Panel>>,
            asking_product: typed::<S, F32, Product<Asking>>,
            copy_past: plain::<S, CopyPast>,
            transpose: plain::<S, Transpose>,
            softmax: plain::<S, Softmax>,
        }
    }

    #[cfg(folio_avx512)]
    const fn with_bf16(mut self, bf16: &'static [(usize, FewRows)]) -> Kernels {
        self.bf16 = bf16;
        self
    }

    /// The kernels for `rows` query rows, few enough, over keys and values of a type.
    pub fn few(&self, dtype: DType, rows: usize) -> FewRows {
        let better = self.bf16.iter().rev().find(|(least, _)| *least <= rows);
        match better {
            Some((_, kernels)) if dtype == DType::BF16 => *kernels,
            _ => self.few[dtype as usize],
        }
    }
}

/// # Safety
/// As [`Kernel`].
unsafe fn typed<S: Simd, E: Element, A: Copy>(args: &A) -> <Of<E, A> as Task>::Output
where
    Of<E, A>: Task,
{
    // SAFETY: the caller's promise.
    unsafe { S::vectorize(&Of::<E, A>(*args, PhantomData)) }
}

/// # Safety
/// As [`Kernel`].
unsafe fn plain<S: Simd, A: Task>(args: &A) -> A::Output {
    // SAFETY: the caller's promise.
    unsafe { S::vectorize(args) }
}

/// Calls `test` with every instruction set that this machine has.
#[cfg(test)]
pub fn for_each_isa(test: impl FnMut(Isa)) {
    let available = Isa::ALL.into_iter().filter(|isa| isa.is_available());
    available.for_each(test);
}

#[cfg(test)]
impl Isa {
    /// Runs a test's own task.
    pub fn run_task<T: Task>(self, task: &T) -> T::Output {
        assert!(self.is_available());
        // SAFETY: just asserted; the test's pointers are its own.
        unsafe {
            match self {
                #[cfg(target_arch = "x86_64")]
                Isa::Avx2 => crate::cpu::x86::avx2::Avx2::vectorize(task),
                #[cfg(folio_avx512)]
                Isa::Avx512 | Isa::Avx512Bf16 | Isa::Amx => {
                    crate::cpu::x86::avx512::Avx512::vectorize(task)
                }
                _ => Portable::vectorize(task),
            }
        }
    }
}
