//! The launch that puts the partial results of split rows together, after the kernel that computed them.
#![allow(unsafe_code)]

use crate::backend::Stream;
use crate::cuda::compiler::loader::Loader;
use crate::cuda::driver::{Context, Current, Function, Launch, blocks_of};
use crate::cuda::kernels::Row;
use crate::cuda::kernels::attention::MOST_HEAD_DIM;
use crate::cuda::kernels::keyless::{
    COMBINE, COMBINE_INVARIANT, COMBINE_LATENT, COMBINE_SUMS, COMBINE_WIDE, Keyless,
};
use crate::cuda::kernels::waits_for_prerequisites;
use crate::cuda::params::{
    AttentionParams, CombineParams, SumParams, V_SCALES_OF_REQUESTS, dtype_code,
};
use crate::error::Result;
use crate::problem::{AttentionDesc, Kind, Sum};

/// Blocks of the combine kernel for each multiprocessor, unless it is known that more rows are split: more than run at a time, since
/// blocks of a short list end early, and no more, since each begins with loads that wait for one another. In a graph most often
/// few rows of its largest batch are split, and 8192 blocks without one take 14 µs on an H200.
const BLOCKS_PER_MULTIPROCESSOR: usize = 8;

/// `HEADS_AT_A_TIME` of `combine.cu`: of more heads, of all split rows together, a warp takes all parts of one.
const HEADS_AT_A_TIME: usize = 1024;

/// Columns of a head that a warp of `combine_latent.cu` takes.
const LATENT_CHUNK: u32 = 128;

/// Blocks of `combine_latent.cu` that a multiprocessor runs at a time. They share the split rows that there are, so that
/// no block begins after others have ended: each begins with loads that wait for one another.
const LATENT_BLOCKS_PER_MULTIPROCESSOR: usize = 4;

/// How many rows of a run are split.
#[derive(Debug, Clone, Copy)]
pub enum SplitRows {
    /// So many, as the host counted them.
    Exactly(usize),
    /// No more: only the device knows how many, or it changes under a graph.
    UpTo(usize),
}

impl SplitRows {
    /// The most there can be.
    pub fn most(self) -> usize {
        match self {
            SplitRows::Exactly(rows) | SplitRows::UpTo(rows) => rows,
        }
    }
}

/// The kernel for one problem.
#[derive(Debug)]
pub struct Combine {
    row: &'static Row,
    function: Function,
    /// For runs that go on from a sum, where a kernel does.
    of_sums: Option<Function>,
    desc: AttentionDesc,
    /// How a row's parts are shared may depend on how many rows are split.
    by_rows: bool,
    /// The device starts a kernel while the one before it drains.
    dependent: bool,
    sm_count: usize,
}

impl Combine {
    /// Loads the kernel; `adds`: the one for sums as well.
    ///
    /// # Errors
    /// As [`Loader::find`].
    pub fn load(
        loader: &Loader,
        context: &Context,
        desc: &AttentionDesc,
        adds: bool,
    ) -> Result<Combine> {
        let cc = context.device().compute_capability;
        let kernel = match desc.kind {
            Kind::Mla => &COMBINE_LATENT,
            _ if desc.head_dim_vo > MOST_HEAD_DIM => &COMBINE_WIDE,
            _ if desc.batch_invariant => &COMBINE_INVARIANT,
            Kind::Decode | Kind::Prefill => &COMBINE,
        };
        let find = |kernel: &'static Keyless| {
            loader.find(kernel.candidates(cc), || kernel.unsupported(cc))
        };
        let (row, function) = find(kernel)?;
        let of_sums = adds.then(|| find(&COMBINE_SUMS)).transpose()?;
        Ok(Combine {
            row,
            function,
            of_sums: of_sums.map(|(_, function)| function),
            desc: *desc,
            by_rows: std::ptr::eq(kernel, &COMBINE),
            dependent: waits_for_prerequisites(cc),
            sm_count: context.device().sm_count as usize,
        })
    }

    /// Blocks of the grid, and how many of them share the heads of a row; 0 where the kernel deals rows itself.
    fn blocks(&self, split: SplitRows) -> (u64, u32) {
        let heads = self.desc.num_qo_heads;
        match self.desc.kind {
            Kind::Decode | Kind::Prefill => {
                let most = BLOCKS_PER_MULTIPROCESSOR * self.sm_count;
                let of_row = (most.div_ceil(split.most()) as u32).min(heads);
                let rows = match split {
                    SplitRows::Exactly(rows) => rows,
                    SplitRows::UpTo(rows) => rows.min(most),
                };
                (rows as u64 * u64::from(of_row), of_row)
            }
            Kind::Mla => {
                let chunks = heads * self.desc.head_dim_vo.div_ceil(LATENT_CHUNK);
                let most = LATENT_BLOCKS_PER_MULTIPROCESSOR * self.sm_count;
                let units = split.most() as u64 * u64::from(chunks);
                (units.min(most as u64), 0)
            }
        }
    }

    /// Threads of a block. Where a warp takes all parts of a head, a row has no work for more warps than it has heads: 6818 rows of 2
    /// heads took 29 µs on an H200 by blocks of eight warps.
    fn threads(&self, split: SplitRows) -> u32 {
        const WARP: u32 = 32;
        let heads = self.desc.num_qo_heads;
        let have_many = |rows: usize| rows.saturating_mul(heads as usize) > HEADS_AT_A_TIME;
        match split {
            SplitRows::Exactly(rows) if self.by_rows && have_many(rows) => {
                self.row.threads.min(WARP.saturating_mul(heads))
            }
            _ => self.row.threads,
        }
    }

    /// Enqueues the kernel for the split rows of a run, and what these came to before.
    pub fn launch(
        &self,
        current: &Current<'_>,
        (params, sum): (&AttentionParams, Option<&Sum>),
        split: SplitRows,
        stream: Stream,
    ) -> Result<()> {
        let (blocks, blocks_of_row) = self.blocks(split);
        let combine = CombineParams {
            plan: params.plan,
            o: params.o,
            lse: params.lse,
            lse_stride_token: params.lse_stride_token,
            lse_stride_head: params.lse_stride_head,
            sinks: params.sinks,
            v_scales: match params.flags & V_SCALES_OF_REQUESTS {
                0 => params.v_scales,
                // They are in the parts.
                _ => 0,
            },
            v_scale: params.v_scale,
            o_scale: params.o_scale,
            v_scales_stride: params.v_scales_stride,
            flags: params.flags,
            num_qo_heads: self.desc.num_qo_heads,
            group_size: self.desc.group_size(),
            head_dim_vo: self.desc.head_dim_vo,
            o_dtype: dtype_code(self.desc.o_dtype),
            blocks_of_row,
            num_tokens: params.num_tokens,
            sum: SumParams::new(sum),
        };
        let launch = Launch {
            grid: [blocks_of("qo_indptr and kv_len", blocks)?, 1, 1],
            threads: self.threads(split),
            cluster: 1,
            dependent: self.dependent,
            stream,
        };
        let function = match (&self.of_sums, sum) {
            (Some(of_sums), Some(_)) => of_sums,
            _ => &self.function,
        };
        // SAFETY: the kernel takes a `FolioCombineParams`; its addresses are those of the run before it.
        unsafe { launch.enqueue(current, function, &combine, &[]) }
    }
}
