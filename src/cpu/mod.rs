//! The CPU backend. It shares nothing with the oracle (`crate::reference`) but the problem types.
//!
//! `attention` walks the work items of a plan, `cache` writes and reads caches, `merge` merges attention states,
//! `projection` computes products per head. Their kernels are written once over a vector type (`kernels`) and compiled
//! per instruction set (`isa`, `x86`, `arm`), which is chosen at run time. `threads` runs them.
#![cfg_attr(
    not(folio_avx512),
    allow(dead_code, reason = "what only the walk by blocks of bf16 needs")
)]

#[cfg(target_arch = "aarch64")]
mod arm;
mod attention;
mod cache;
mod context_parallel;
mod isa;
mod kernels;
mod merge;
mod projection;
mod threads;
mod tree;
mod x86;

pub use isa::Isa;

use crate::backend::{
    Attention, AttentionOps, Backend, CacheOps, IndexOps, MergeOps, ProjectionOps, Stream, Threads,
    TreeOps,
};
use crate::error::{Error, Result};
use crate::log::Logger;
use crate::problem::{
    AppendArgs, AttentionDesc, Checked, CopyArgs, CopyWeightsArgs, CpCorrectArgs, CpReorderArgs,
    GatherArgs, LatentRecords, MergeArgs, MergeStatesArgs, MergeVarlenArgs, MlaAppendArgs,
    MlaGatherArgs, ProjectArgs, RopeAppendArgs, TreeMaskArgs,
};
use crate::tensor::Device;
use attention::handle::CpuAttention;
use std::sync::Arc;

/// The operators of [`Backend`] on the CPU, on threads of its own or of the host's.
#[derive(Debug)]
pub struct CpuBackend {
    pool: Arc<threads::Pool>,
    isa: Isa,
    projection: projection::Projection,
}

impl CpuBackend {
    /// A backend with `num_threads` threads of its own, on the best instruction set.
    pub fn new(num_threads: u32) -> Result<CpuBackend> {
        CpuBackend::with_isa(num_threads, Isa::best())
    }

    /// As [`CpuBackend::new`], on an instruction set of the caller's choice.
    ///
    /// # Errors
    /// `Unsupported` where this machine does not have it.
    pub fn with_isa(num_threads: u32, isa: Isa) -> Result<CpuBackend> {
        if !isa.is_available() {
            return Err(Error::Unsupported(format!(
                "isa: {isa:?} is not available on this machine; {:?} is",
                Isa::best()
            )));
        }
        let cpus = None;
        let threads = Threads::Own { num_threads, cpus };
        CpuBackend::of(&threads, isa, &Logger::silent())
    }

    /// A backend on threads of the caller's choice, on the best instruction set. Says to `logger` where they are more
    /// than their CPUs.
    pub fn on_threads(threads: &Threads, logger: &Logger) -> Result<CpuBackend> {
        CpuBackend::of(threads, Isa::best(), logger)
    }

    fn of(threads: &Threads, isa: Isa, logger: &Logger) -> Result<CpuBackend> {
        let pool = Arc::new(threads::Pool::new(threads, logger)?);
        let projection = projection::Projection::new(pool.num_threads());
        Ok(CpuBackend {
            pool,
            isa,
            projection,
        })
    }
}

impl Backend for CpuBackend {
    fn device(&self) -> Device {
        Device::Cpu
    }
}

impl AttentionOps for CpuBackend {
    fn attention(&self, desc: &AttentionDesc) -> Result<Box<dyn Attention>> {
        let pool = Arc::clone(&self.pool);
        let attention = CpuAttention::new(pool, self.isa, desc)?;
        Ok(Box::new(attention))
    }
}

impl CacheOps for CpuBackend {
    fn append(&self, args: &Checked<AppendArgs>, _: Stream) -> Result<()> {
        cache::append::append(&self.pool, self.isa.kernels(), args)
    }

    fn copy(&self, args: &Checked<CopyArgs>, _: Stream) -> Result<()> {
        cache::copy::copy(&self.pool, self.isa.kernels(), args)
    }

    fn gather(&self, args: &Checked<GatherArgs>, _: Stream) -> Result<()> {
        cache::gather::gather(&self.pool, self.isa.kernels(), args)
    }

    fn rope_append(&self, args: &Checked<RopeAppendArgs>, _: Stream) -> Result<()> {
        cache::rope_append::append(&self.pool, self.isa.kernels(), args)
    }

    fn mla_append(&self, args: &Checked<MlaAppendArgs<LatentRecords>>, _: Stream) -> Result<()> {
        cache::mla_append::append(&self.pool, self.isa.kernels(), args)
    }

    fn mla_gather(&self, args: &Checked<MlaGatherArgs<LatentRecords>>, _: Stream) -> Result<()> {
        cache::mla_gather::gather(&self.pool, self.isa.kernels(), args)
    }

    fn cp_reorder(&self, args: &Checked<CpReorderArgs>, _: Stream) -> Result<()> {
        context_parallel::reorder(&self.pool, args)
    }
}

impl IndexOps for CpuBackend {}

impl MergeOps for CpuBackend {
    fn cp_correct(&self, args: &Checked<CpCorrectArgs>, _: Stream) -> Result<()> {
        context_parallel::correct(&self.pool, self.isa.kernels(), args);
        Ok(())
    }

    fn merge(&self, args: &Checked<MergeArgs>, _: Stream) -> Result<()> {
        merge::merge(&self.pool, self.isa.kernels(), args);
        Ok(())
    }

    fn merge_varlen(&self, args: &Checked<MergeVarlenArgs>, _: Stream) -> Result<()> {
        merge::merge_varlen(&self.pool, self.isa.kernels(), args)
    }

    fn merge_states(&self, args: &Checked<MergeStatesArgs>, _: Stream) -> Result<()> {
        merge::merge_states(&self.pool, self.isa.kernels(), args);
        Ok(())
    }
}

impl ProjectionOps for CpuBackend {
    fn project(&self, args: &Checked<ProjectArgs>, _: Stream) -> Result<()> {
        self.projection
            .project(&self.pool, self.isa.kernels(), args);
        Ok(())
    }

    fn copy_weights(&self, args: &Checked<CopyWeightsArgs>, _: Stream) -> Result<()> {
        projection::copy_weights(&self.pool, args);
        Ok(())
    }
}

impl TreeOps for CpuBackend {
    fn tree_mask(&self, args: &Checked<TreeMaskArgs>, _: Stream) -> Result<()> {
        tree::mask(&self.pool, args)
    }
}
