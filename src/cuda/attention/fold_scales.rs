//! Scales that a run finds in device memory and the attention kernels have no parameter for: a launch before them folds
//! those of q into the factors of k, and the divisor of o into the factors of v.
#![allow(unsafe_code)]

use crate::backend::Stream;
use crate::cuda::compiler::loader::Loader;
use crate::cuda::driver::{Context, Current, Function, Launch, blocks_of};
use crate::cuda::kernels::Row;
use crate::cuda::kernels::keyless::FOLD_SCALES;
use crate::cuda::params::{
    AttentionParams, K_SCALES_OF_REQUESTS, V_SCALES_OF_REQUESTS, address, are_of_requests,
};
use crate::cuda::scales_params::{FoldScalesParams, RowScales};
use crate::error::Result;
use crate::problem::{AttentionArgs, AttentionDesc, Checked, Kind};

/// The kernel for one problem.
#[derive(Debug)]
pub struct FoldScales {
    row: &'static Row,
    function: Function,
    desc: AttentionDesc,
}

impl FoldScales {
    /// Loads the kernel.
    ///
    /// # Errors
    /// As [`Loader::find`].
    pub fn load(loader: &Loader, context: &Context, desc: &AttentionDesc) -> Result<FoldScales> {
        let cc = context.device().compute_capability;
        let find = || FOLD_SCALES.unsupported(cc);
        let (row, function) = loader.find(FOLD_SCALES.candidates(cc), find)?;
        Ok(FoldScales {
            row,
            function,
            desc: *desc,
        })
    }

    /// Bytes of the factors of k and v, each for every head of every request.
    pub fn bytes(desc: &AttentionDesc) -> usize {
        match desc.kind {
            Kind::Mla => 0,
            Kind::Decode | Kind::Prefill => 2 * factor_bytes(desc, desc.max_batch_size),
        }
    }

    /// What the kernel is to do for a run whose scales are not read where they lie: it writes to `at`, and `params` take
    /// what it wrote.
    pub fn fold(
        &self,
        args: &Checked<AttentionArgs>,
        at: u64,
        params: &mut AttentionParams,
    ) -> Option<FoldScalesParams> {
        if args.q_scales.is_none() && args.o_scales.is_none() {
            return None;
        }
        let scales = args.row_scales(self.desc.kv_format);
        let mut all = scales.into_iter().flatten();
        let of_requests = all.find(are_of_requests);
        let num_requests = of_requests.map_or(1, |scales| scales.extent(0) as u32);
        let [q, k, v] = scales.map(RowScales::of);
        let fold = FoldScalesParams {
            q,
            k,
            v,
            o: address(args.o_scales),
            k_out: at,
            v_out: at + factor_bytes(&self.desc, num_requests) as u64,
            num_kv_heads: self.desc.num_kv_heads,
            num_requests,
        };
        (params.k_scales, params.v_scales) = (fold.k_out, fold.v_out);
        (params.k_scales_stride, params.v_scales_stride) = (1, 1);
        if of_requests.is_some() {
            params.flags |= K_SCALES_OF_REQUESTS | V_SCALES_OF_REQUESTS;
        }
        Some(fold)
    }

    /// Enqueues the kernel.
    pub fn launch(
        &self,
        current: &Current<'_>,
        fold: &FoldScalesParams,
        stream: Stream,
    ) -> Result<()> {
        let factors = u64::from(fold.num_requests) * u64::from(fold.num_kv_heads);
        let blocks = factors.div_ceil(self.row.threads.into());
        let launch = Launch {
            grid: [blocks_of("k_scales", blocks)?, 1, 1],
            threads: self.row.threads,
            cluster: 1,
            dependent: false,
            stream,
        };
        // SAFETY: the kernel takes a `FolioFoldScalesParams`; its inputs are the caller's tensors, which `api` checked, and
        // the workspace has room for the factors.
        unsafe { launch.enqueue(current, &self.function, fold, &[]) }
    }
}

/// Bytes of the factors of k, or of v, of so many requests.
fn factor_bytes(desc: &AttentionDesc, num_requests: u32) -> usize {
    let bytes_of_request = desc.num_kv_heads as usize * size_of::<f32>();
    bytes_of_request.saturating_mul(num_requests as usize)
}
