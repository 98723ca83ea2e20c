//! Scales that a run finds in device memory and the attention kernels have no parameter for: a launch before them folds
//! those of q into the factors of k, and the divisor of o into the factors of v.
#![allow(unsafe_code)]

use crate::backend::Stream;
use crate::cuda::compiler::loader::Loader;
use crate::cuda::driver::{Context, Current, Function, Launch, blocks_of};
use crate::cuda::kernels::Row;
use crate::cuda::kernels::keyless::FOLD_SCALES;
use crate::cuda::params::{AttentionParams, address};
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

    /// Bytes of the factors of k and v.
    pub fn bytes(desc: &AttentionDesc) -> usize {
        match desc.kind {
            Kind::Mla => 0,
            Kind::Decode | Kind::Prefill => 2 * factor_bytes(desc),
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
        let [q, k, v] = args.row_scales(self.desc.kv_format).map(RowScales::of);
        let fold = FoldScalesParams {
            q,
            k,
            v,
            o: address(args.o_scales),
            k_out: at,
            v_out: at + factor_bytes(&self.desc) as u64,
            num_kv_heads: self.desc.num_kv_heads,
            reserved: 0,
        };
        (params.k_scales, params.v_scales) = (fold.k_out, fold.v_out);
        (params.k_scales_stride, params.v_scales_stride) = (1, 1);
        Some(fold)
    }

    /// Enqueues the kernel.
    pub fn launch(
        &self,
        current: &Current<'_>,
        fold: &FoldScalesParams,
        stream: Stream,
    ) -> Result<()> {
        let blocks = u64::from(fold.num_kv_heads.div_ceil(self.row.threads));
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

/// Bytes of the factors of k, or of v.
fn factor_bytes(desc: &AttentionDesc) -> usize {
    desc.num_kv_heads as usize * size_of::<f32>()
}
