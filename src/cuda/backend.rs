//! The CUDA backend: what `api` gets for a device.

use std::sync::Arc;

use super::attention::mixed::Mixed;
use super::compiler::loader::Loader;
use super::driver::{Context, Driver};
use super::ops::append::Append;
use super::ops::append_stored::AppendStored;
use super::ops::context_parallel::ContextParallel;
use super::ops::copy::Copy;
use super::ops::gather::Gather;
use super::ops::index::Index;
use super::ops::merge::Merges;
use super::ops::mla_append::MlaAppend;
use super::ops::mla_gather::MlaGather;
use super::ops::projection::Projections;
use super::ops::rope_append::RopeAppend;
use super::ops::tree_mask::TreeMask;
use super::plan::tables::DeviceTables;
use crate::backend::{
    Attention, AttentionOps, Backend, CacheOps, IndexOps, MergeOps, ProjectionOps, Stream, Tables,
    TreeOps,
};
use crate::dtype::DType;
use crate::error::Result;
use crate::log::Logger;
use crate::problem::{
    AppendArgs, AttentionDesc, BatchLengthsArgs, BlockTableArgs, CacheForm, Checked, CopyArgs,
    CopyWeightsArgs, CpCorrectArgs, CpReorderArgs, DraftKvIndicesArgs, GatherArgs, KvIndicesArgs,
    LatentRecords, MergeArgs, MergeStatesArgs, MergeVarlenArgs, MlaAppendArgs, MlaGatherArgs,
    ProjectArgs, RopeAppendArgs, SlotMappingArgs, TreeMaskArgs,
};
use crate::tensor::{Device, Tensor};

/// Operators on one CUDA device.
#[derive(Debug)]
pub struct CudaBackend {
    context: Arc<Context>,
    loader: Arc<Loader>,
    append: Append,
    append_stored: AppendStored,
    copy: Copy,
    gather: Gather,
    rope_append: RopeAppend,
    merges: Merges,
    projections: Projections,
    mla_append: MlaAppend,
    mla_gather: MlaGather,
    context_parallel: ContextParallel,
    tree_mask: TreeMask,
    index: Index,
}

impl CudaBackend {
    /// Retains the primary context of a device. Messages about later choices go to `logger`.
    ///
    /// # Errors
    /// See [`Driver::get`] and [`Context::retain`].
    pub fn new(ordinal: i32, logger: Logger) -> Result<CudaBackend> {
        let context = Context::retain(Driver::get()?, ordinal)?;
        let loader = Arc::new(Loader::new(&context, logger)?);
        Ok(CudaBackend {
            append: Append::new(&loader, &context),
            append_stored: AppendStored::new(&loader, &context),
            copy: Copy::new(&loader, &context),
            gather: Gather::new(&loader, &context),
            rope_append: RopeAppend::new(&loader, &context),
            merges: Merges::new(&loader, &context),
            projections: Projections::new(&loader, &context),
            mla_append: MlaAppend::new(&loader, &context),
            mla_gather: MlaGather::new(&loader, &context),
            context_parallel: ContextParallel::new(&loader, &context),
            tree_mask: TreeMask::new(&loader, &context),
            index: Index::new(&loader, &context),
            context,
            loader,
        })
    }
}

impl Backend for CudaBackend {
    fn device(&self) -> Device {
        Device::Cuda(self.context.device().ordinal)
    }
}

impl AttentionOps for CudaBackend {
    fn attention(&self, desc: &AttentionDesc) -> Result<Box<dyn Attention>> {
        Mixed::load(&self.loader, &self.context, desc)
    }

    fn tables(&self, count: usize) -> Result<Box<dyn Tables>> {
        Ok(Box::new(DeviceTables::new(&self.context, count)?))
    }
}

impl CacheOps for CudaBackend {
    fn append(&self, args: &Checked<AppendArgs>, stream: Stream) -> Result<()> {
        match args.form {
            CacheForm::Plain => self.append.run(args, stream),
            _ => self.append_stored.run(args, stream),
        }
    }

    fn copy(&self, args: &Checked<CopyArgs>, stream: Stream) -> Result<()> {
        self.copy.run(args, stream)
    }

    fn gather(&self, args: &Checked<GatherArgs>, stream: Stream) -> Result<()> {
        self.gather.run(args, stream)
    }

    fn rope_append(&self, args: &Checked<RopeAppendArgs>, stream: Stream) -> Result<()> {
        self.rope_append.run(args, stream)
    }

    fn mla_append(
        &self,
        args: &Checked<MlaAppendArgs<LatentRecords>>,
        stream: Stream,
    ) -> Result<()> {
        self.mla_append.run(args, stream)
    }

    fn mla_gather(
        &self,
        args: &Checked<MlaGatherArgs<LatentRecords>>,
        stream: Stream,
    ) -> Result<()> {
        self.mla_gather.run(args, stream)
    }

    fn cp_reorder(&self, args: &Checked<CpReorderArgs>, stream: Stream) -> Result<()> {
        self.context_parallel.reorder(args, stream)
    }
}

impl IndexOps for CudaBackend {
    fn batch_lengths(&self, args: &Checked<BatchLengthsArgs>, stream: Stream) -> Result<()> {
        self.index.batch_lengths(args, stream)
    }

    fn kv_indices(&self, args: &Checked<KvIndicesArgs>, stream: Stream) -> Result<()> {
        self.index.kv_indices(args, stream)
    }

    fn block_table(&self, args: &Checked<BlockTableArgs>, stream: Stream) -> Result<()> {
        self.index.block_table(args, stream)
    }

    fn slot_mapping(&self, args: &Checked<SlotMappingArgs>, stream: Stream) -> Result<()> {
        self.index.slot_mapping(args, stream)
    }

    fn draft_kv_indices(&self, args: &Checked<DraftKvIndicesArgs>, stream: Stream) -> Result<()> {
        self.index.draft_kv_indices(args, stream)
    }
}

impl MergeOps for CudaBackend {
    fn cp_correct(&self, args: &Checked<CpCorrectArgs>, stream: Stream) -> Result<()> {
        self.context_parallel.correct(args, stream)
    }

    fn prepare_merges(&self, states: DType) -> Result<()> {
        self.merges.prepare(states)
    }

    fn merge(&self, args: &Checked<MergeArgs>, stream: Stream) -> Result<()> {
        self.merges.merge(args, stream)
    }

    fn merge_states(&self, args: &Checked<MergeStatesArgs>, stream: Stream) -> Result<()> {
        self.merges.merge_states(args, stream)
    }

    fn merge_varlen(&self, args: &Checked<MergeVarlenArgs>, stream: Stream) -> Result<()> {
        self.merges.merge_varlen(args, stream)
    }
}

impl ProjectionOps for CudaBackend {
    fn project(&self, args: &Checked<ProjectArgs>, stream: Stream) -> Result<()> {
        self.projections.project(args, stream)
    }

    fn project_pair(
        &self,
        products: &[Checked<ProjectArgs>; 2],
        existing_tokens: Option<&Tensor>,
        stream: Stream,
    ) -> Result<()> {
        self.projections
            .project_pair(products, existing_tokens, stream)
    }

    fn copy_weights(&self, args: &Checked<CopyWeightsArgs>, stream: Stream) -> Result<()> {
        self.projections.copy_weights(args, stream)
    }
}

impl TreeOps for CudaBackend {
    fn tree_mask(&self, args: &Checked<TreeMaskArgs>, stream: Stream) -> Result<()> {
        self.tree_mask.run(args, stream)
    }
}
