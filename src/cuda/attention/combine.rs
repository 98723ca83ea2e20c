//! The launch that puts the partial results of split rows together, after the kernel that computed them.
#![allow(unsafe_code)]

use crate::backend::Stream;
use crate::cuda::compiler::loader::Loader;
use crate::cuda::driver::{Context, Current, Function, Launch, blocks_of};
use crate::cuda::kernels::Row;
use crate::cuda::kernels::keyless::COMBINE;
use crate::cuda::params::{AttentionParams, CombineParams, dtype_code};
use crate::error::Result;
use crate::problem::AttentionDesc;

/// Blocks of the combine kernel for each multiprocessor, unless there are more split rows: more than run at a time, since
/// blocks of a short list end early, and no more, since each begins with loads that wait for one another.
const BLOCKS_PER_MULTIPROCESSOR: usize = 8;

/// Columns of a head that a block takes at a time, as the kernel's.
const COLUMNS: u32 = 256;

/// The kernel for one problem.
#[derive(Debug)]
pub struct Combine {
    row: &'static Row,
    function: Function,
    desc: AttentionDesc,
    /// The device starts a kernel while the one before it drains.
    dependent: bool,
    most_blocks: usize,
}

impl Combine {
    /// Loads the kernel.
    ///
    /// # Errors
    /// As [`Loader::find`].
    pub fn load(loader: &Loader, context: &Context, desc: &AttentionDesc) -> Result<Combine> {
        let cc = context.device().compute_capability;
        let (row, function) = loader.find(COMBINE.candidates(cc), || COMBINE.unsupported(cc))?;
        Ok(Combine {
            row,
            function,
            desc: *desc,
            dependent: cc >= (9, 0),
            most_blocks: BLOCKS_PER_MULTIPROCESSOR * context.device().sm_count as usize,
        })
    }

    /// Enqueues the kernel for at most `num_combines` split rows of a run.
    pub fn launch(
        &self,
        current: &Current<'_>,
        params: &AttentionParams,
        num_combines: usize,
        stream: Stream,
    ) -> Result<()> {
        let blocks_of_row = self.most_blocks.div_ceil(num_combines) as u32;
        let shares = self.desc.num_qo_heads * self.desc.head_dim_vo.div_ceil(COLUMNS);
        let blocks_of_row = blocks_of_row.min(shares);
        let combine = CombineParams {
            plan: params.plan,
            o: params.o,
            lse: params.lse,
            lse_stride_token: params.lse_stride_token,
            lse_stride_head: params.lse_stride_head,
            sinks: params.sinks,
            v_scales: params.v_scales,
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
        };
        let blocks = num_combines as u64 * u64::from(blocks_of_row);
        let launch = Launch {
            grid: [blocks_of("qo_indptr and kv_len", blocks)?, 1, 1],
            threads: self.row.threads,
            cluster: 1,
            dependent: self.dependent,
            stream,
        };
        // SAFETY: the kernel takes a `FolioCombineParams`; its addresses are those of the run before it.
        unsafe { launch.enqueue(current, &self.function, &combine, &[]) }
    }
}
