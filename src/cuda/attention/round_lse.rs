//! An lse in 16 bits: the attention kernels write it to the workspace as fp32, and a launch after them rounds it to the
//! caller's tensor.
#![allow(unsafe_code)]

use crate::backend::Stream;
use crate::cuda::compiler::loader::Loader;
use crate::cuda::driver::{Context, Current, Function, Launch, blocks_of};
use crate::cuda::kernels::Row;
use crate::cuda::kernels::keyless::ROUND_LSE;
use crate::cuda::kernels::waits_for_prerequisites;
use crate::cuda::lse_params::RoundLseParams;
use crate::cuda::params::{AttentionParams, dtype_code};
use crate::dtype::DType;
use crate::error::Result;
use crate::problem::{AttentionArgs, AttentionDesc, Checked};

/// Lanes of a warp, which takes a query row.
const WARP: u32 = 32;

/// The kernel for one problem.
#[derive(Debug)]
pub struct RoundLse {
    row: &'static Row,
    function: Function,
    desc: AttentionDesc,
    /// The device starts a kernel while the one before it drains.
    dependent: bool,
}

impl RoundLse {
    /// Loads the kernel.
    ///
    /// # Errors
    /// As [`Loader::find`].
    pub fn load(loader: &Loader, context: &Context, desc: &AttentionDesc) -> Result<RoundLse> {
        let cc = context.device().compute_capability;
        let (row, function) =
            loader.find(ROUND_LSE.candidates(cc), || ROUND_LSE.unsupported(cc))?;
        Ok(RoundLse {
            row,
            function,
            desc: *desc,
            dependent: waits_for_prerequisites(cc),
        })
    }

    /// Bytes of the lse of the largest batch.
    pub fn bytes(desc: &AttentionDesc) -> usize {
        let rows = (desc.max_num_tokens as usize).saturating_mul(size_of::<f32>());
        rows.saturating_mul(desc.num_qo_heads as usize)
    }

    /// What the kernel is to do for a run whose lse is in 16 bits: `params` take the room at `at` instead, of which the
    /// kernel reads the rows.
    pub fn redirect(
        &self,
        args: &Checked<AttentionArgs>,
        at: u64,
        params: &mut AttentionParams,
    ) -> Option<RoundLseParams> {
        let lse = args.lse.filter(|lse| lse.dtype() != DType::F32)?;
        params.num_tokens = params.num_tokens.min(self.desc.max_num_tokens);
        params.lse = at;
        params.lse_stride_token = self.desc.num_qo_heads.into();
        params.lse_stride_head = 1;
        Some(RoundLseParams {
            qo_indptr: params.plan.qo_indptr,
            counts: params.plan.counts,
            from: at,
            to: lse.address() as u64,
            stride_token: lse.stride(0),
            stride_head: lse.stride(1),
            num_tokens: params.num_tokens,
            num_heads: self.desc.num_qo_heads,
            dtype: dtype_code(lse.dtype()),
            reserved: 0,
        })
    }

    /// Enqueues the kernel for at most `num_rows` query rows.
    pub fn launch(
        &self,
        current: &Current<'_>,
        round: &RoundLseParams,
        num_rows: u64,
        stream: Stream,
    ) -> Result<()> {
        let rows_of_block = u64::from(self.row.threads / WARP);
        let launch = Launch {
            grid: [
                blocks_of("qo_indptr", num_rows.div_ceil(rows_of_block))?,
                1,
                1,
            ],
            threads: self.row.threads,
            cluster: 1,
            dependent: self.dependent,
            stream,
        };
        // SAFETY: the kernel takes a `FolioRoundLseParams`; it reads what the run before it wrote and writes the caller's
        // tensor, whose extents `api` checked.
        unsafe { launch.enqueue(current, &self.function, round, &[]) }
    }
}
