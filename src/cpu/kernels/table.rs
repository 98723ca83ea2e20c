//! The table of kernels: which function computes what, for one instruction set. Kernels that are written once fill
//! most of it; `x86` adds what an instruction set has of its own, as [`FewRows`]. No instruction set is named here:
//! `isa` makes a table for each and picks one.
#![allow(unsafe_code)]

use super::bf16_split::Split;
use super::convert::{Quantise, Stage, Store};
use super::dot::{Dot, PrepareQueries, keep_queries};
use super::nontemporal_copy::NontemporalCopy;
use super::packed::{Divide, FromChannels, Largest, Pack, Parts, ToChannels, Unpack};
use super::prefetch_rows::RowsWithPrefetch;
use super::product::{Panel, PanelWithPrefetch, Product};
use super::rows::Rows;
use super::simd::{Bf16, E4m3, E5m2, Element, F16, F32, Simd, Task, Typed};
use super::softmax::Softmax;
use super::transpose::Transpose;
use crate::dtype::DType;
use std::marker::PhantomData;

/// A kernel, called with a pointer to its arguments. The processor must have the instruction set, and the pointers
/// in the arguments must be valid as their fields say.
type Kernel<A, R = ()> = unsafe fn(&A) -> R;

/// The kernels for few query rows over rows of one type.
#[derive(Clone, Copy)]
pub struct FewRows {
    /// Reorders query rows as `dot` reads them.
    pub queries: Kernel<PrepareQueries>,
    pub dot: Kernel<Dot>,
    /// `accumulate` with prefetch. Weights may be rounded to the type of the values, and sums have room for a
    /// multiple of 32 columns.
    pub weighted_sum: Kernel<Product<RowsWithPrefetch>>,
    /// Widest rows of queries, keys and values that the kernels take.
    pub max_dim: usize,
    /// The setup of a thread that [`FewRows::prepare_thread`] does.
    pub setup: Option<ThreadSetup>,
}

impl FewRows {
    const fn of<S: Simd, E: Element>() -> FewRows {
        FewRows {
            queries: keep_queries,
            dot: typed::<S, E, Dot>,
            weighted_sum: typed::<S, E, Product<RowsWithPrefetch>>,
            max_dim: usize::MAX,
            setup: None,
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

    /// Prepares this thread for the kernels over `rows` query rows, until the result is dropped.
    pub fn prepare_thread(&self, rows: usize) -> Option<PreparedThread> {
        let setup = self.setup?;
        // SAFETY: a table with a setup is handed out only where its instruction set is available.
        unsafe { (setup.configure)(rows) };
        Some(PreparedThread(setup))
    }
}

/// The setup of a thread before it calls kernels, and what undoes it. AMX has tiles to configure.
#[derive(Clone, Copy)]
pub struct ThreadSetup {
    /// Takes the number of query rows.
    pub configure: unsafe fn(usize),
    pub release: unsafe fn(),
}

/// A thread that [`FewRows::prepare_thread`] has prepared.
pub struct PreparedThread(ThreadSetup);

impl Drop for PreparedThread {
    fn drop(&mut self) {
        // SAFETY: `configure` was called when this was made.
        unsafe { (self.0.release)() };
    }
}

/// The kernels of one instruction set. Arrays are indexed by [`crate::dtype::DType`], of which the five floats come
/// first.
pub struct Kernels {
    /// Columns of a strip of a panel: what `product` takes in one pass, a multiple of 16.
    pub strip: usize,
    few: [FewRows; 5],
    /// Better kernels for few query rows over bf16, each from so many rows on, in ascending order.
    bf16: &'static [(usize, FewRows)],
    pub accumulate: [Kernel<Product<Rows>>; 5],
    pub stage: [Kernel<Stage, bool>; 5],
    pub split: [Kernel<Split, bool>; 5],
    pub store: [Kernel<Store>; 5],
    /// From fp32, fp16 and bf16.
    pub quantise: [Kernel<Quantise>; 3],
    pub parts: Kernel<Parts>,
    pub unpack: Kernel<Unpack>,
    pub pack: Kernel<Pack>,
    pub from_channels: Kernel<FromChannels>,
    pub to_channels: Kernel<ToChannels>,
    pub divide: Kernel<Divide>,
    pub largest: Kernel<Largest, f32>,
    pub product: Kernel<Product<Panel>>,
    pub product_with_prefetch: Kernel<Product<PanelWithPrefetch>>,
    pub nontemporal_copy: Kernel<NontemporalCopy>,
    pub transpose: Kernel<Transpose>,
    pub softmax: Kernel<Softmax>,
}

impl Kernels {
    pub const fn of<S: Simd>() -> Kernels {
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
            parts: plain::<S, Parts>,
            unpack: plain::<S, Unpack>,
            pack: plain::<S, Pack>,
            from_channels: plain::<S, FromChannels>,
            to_channels: plain::<S, ToChannels>,
            divide: plain::<S, Divide>,
            largest: plain::<S, Largest>,
            product: typed::<S, F32, Product<Panel>>,
            product_with_prefetch: typed::<S, F32, Product<PanelWithPrefetch>>,
            nontemporal_copy: plain::<S, NontemporalCopy>,
            transpose: plain::<S, Transpose>,
            softmax: plain::<S, Softmax>,
        }
    }

    /// The same with the kernels for few query rows of another vector type.
    #[cfg(folio_avx512)]
    pub const fn with_few_rows_of<S: Simd>(mut self) -> Kernels {
        self.few = FewRows::all::<S>();
        self
    }

    /// The same with better kernels for few query rows over bf16: each from so many rows on, in ascending order.
    #[cfg(folio_avx512)]
    pub const fn with_bf16(mut self, bf16: &'static [(usize, FewRows)]) -> Kernels {
        self.bf16 = bf16;
        self
    }

    /// The kernels for `rows` query rows, at most `FEW_ROWS` of `attention::shape`, over keys and values of a type
    /// and at most `dim` elements.
    pub fn few(&self, dtype: DType, rows: usize, dim: usize) -> FewRows {
        let fits = |(least, kernels): &&(usize, FewRows)| *least <= rows && dim <= kernels.max_dim;
        match self.bf16.iter().rev().find(fits) {
            Some((_, kernels)) if dtype == DType::BF16 => *kernels,
            _ => self.few[dtype as usize],
        }
    }
}

/// # Safety
/// As [`Kernel`].
unsafe fn typed<S: Simd, E: Element, A: Copy>(args: &A) -> <Typed<E, A> as Task>::Output
where
    Typed<E, A>: Task,
{
    // SAFETY: the caller's promise.
    unsafe { S::vectorize(&Typed::<E, A>(*args, PhantomData)) }
}

/// # Safety
/// As [`Kernel`].
unsafe fn plain<S: Simd, A: Task>(args: &A) -> A::Output {
    // SAFETY: the caller's promise.
    unsafe { S::vectorize(args) }
}
