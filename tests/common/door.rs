//! The two doors into the library: the Rust API and the C functions. A suite that is written once walks
//! through both; `c_door` is the other one. Inputs are the API's own plain structs; errors are compared by kind and message.

use super::c_door::CDoor;
use folio::api::{self, BatchInput, SharedPrefixes};
use folio::api::{Stream, Target, Workspace, WorkspaceInfo};
use folio::cpu::{CpuBackend, Isa};
use folio::error::Result;
use folio::log::Logger;
use folio::problem::{
    AbsorbQArgs, AbsorbWeightsArgs, AppendArgs, AttentionArgs, AttentionDesc, BatchLengthsArgs,
    BlockTableArgs, CopyArgs, CpCorrectArgs, CpReorderArgs, DraftKvIndicesArgs, GatherArgs,
    KvIndicesArgs, MergeArgs, MergeStatesArgs, MergeVarlenArgs, MlaAppendArgs, MlaContextArgs,
    MlaContextDesc, MlaGatherArgs, ProjectOArgs, RopeAppendArgs, SlotMappingArgs, TreeMaskArgs,
    UpProjectArgs,
};

/// A way into the library.
pub trait Door: Sync {
    fn name(&self) -> &'static str;
    fn open(&self, target: Target) -> Result<Box<dyn Session>>;
}

/// A context.
pub trait Session: Send + Sync {
    fn attention(&self, desc: AttentionDesc) -> Result<Box<dyn Handle>>;
    fn append(&self, input: &AppendArgs, stream: Stream) -> Result<()>;
    fn copy(&self, input: &CopyArgs, stream: Stream) -> Result<()>;
    fn gather(&self, input: &GatherArgs, stream: Stream) -> Result<()>;
    fn merge(&self, input: &MergeArgs, stream: Stream) -> Result<()>;
    fn merge_states(&self, input: &MergeStatesArgs, stream: Stream) -> Result<()>;
    fn merge_varlen(&self, input: &MergeVarlenArgs, stream: Stream) -> Result<()>;
    fn absorb_weights(&self, input: &AbsorbWeightsArgs, stream: Stream) -> Result<()>;
    fn absorb_q(&self, input: &AbsorbQArgs, stream: Stream) -> Result<()>;
    fn project_o(&self, input: &ProjectOArgs, stream: Stream) -> Result<()>;
    fn up_project(&self, input: &UpProjectArgs, stream: Stream) -> Result<()>;
    fn mla_append(&self, input: &MlaAppendArgs, stream: Stream) -> Result<()>;
    fn mla_gather(&self, input: &MlaGatherArgs, stream: Stream) -> Result<()>;
    fn mla_context(&self, desc: MlaContextDesc) -> Result<Box<dyn ContextHandle>>;
    fn cascade(&self, desc: AttentionDesc) -> Result<Box<dyn CascadeHandle>>;
    fn cp_reorder(&self, input: &CpReorderArgs, stream: Stream) -> Result<()>;
    fn cp_correct(&self, input: &CpCorrectArgs, stream: Stream) -> Result<()>;
    fn tree_mask(&self, input: &TreeMaskArgs, stream: Stream) -> Result<()>;
    fn batch_lengths(&self, input: &BatchLengthsArgs, stream: Stream) -> Result<()>;
    fn kv_indices(&self, input: &KvIndicesArgs, stream: Stream) -> Result<()>;
    fn block_table(&self, input: &BlockTableArgs, stream: Stream) -> Result<()>;
    fn slot_mapping(&self, input: &SlotMappingArgs, stream: Stream) -> Result<()>;
    fn draft_kv_indices(&self, input: &DraftKvIndicesArgs, stream: Stream) -> Result<()>;
    fn rope_append(&self, input: &RopeAppendArgs, stream: Stream) -> Result<()>;
}

/// A decode or prefill handle.
pub trait Handle: Send + Sync {
    fn workspace(&self) -> Result<WorkspaceInfo>;
    fn plan(
        &mut self,
        batch: &BatchInput,
        workspace: &Workspace,
        workspace_bytes: (usize, usize),
        stream: Stream,
    ) -> Result<()>;
    fn run(&self, args: &AttentionArgs, stream: Stream) -> Result<()>;
    /// Decode alone.
    fn append_run(
        &self,
        append: &RopeAppendArgs,
        args: &AttentionArgs,
        stream: Stream,
    ) -> Result<()>;
}

/// A cascade handle.
pub trait CascadeHandle: Send + Sync {
    fn workspace(&self) -> Result<WorkspaceInfo>;
    fn plan(
        &mut self,
        batch: &BatchInput,
        prefixes: &SharedPrefixes<'_>,
        workspace: &Workspace,
        workspace_bytes: (usize, usize),
        stream: Stream,
    ) -> Result<()>;
    fn run(&self, args: &AttentionArgs, stream: Stream) -> Result<()>;
    fn shares(&self) -> Result<bool>;
}

/// An MLA context handle.
pub trait ContextHandle: Send + Sync {
    fn workspace(&self) -> Result<WorkspaceInfo>;
    fn plan(
        &mut self,
        batch: &BatchInput,
        workspace: &Workspace,
        workspace_bytes: (usize, usize),
        stream: Stream,
    ) -> Result<()>;
    fn num_chunks(&self) -> Result<usize>;
    fn chunk_tokens(&self, chunk: usize) -> Result<i64>;
    fn run(&self, args: &MlaContextArgs, stream: Stream) -> Result<()>;
    fn new_tokens(&self, args: &MlaContextArgs, stream: Stream) -> Result<()>;
    fn gather(&self, chunk: usize, args: &MlaContextArgs, stream: Stream) -> Result<()>;
    fn attend(&self, chunk: usize, args: &MlaContextArgs, stream: Stream) -> Result<()>;
}

/// Every door.
pub const DOORS: [&dyn Door; 2] = [&RustDoor, &CDoor];

/// `folio::api`.
pub struct RustDoor;

impl Door for RustDoor {
    fn name(&self) -> &'static str {
        "rust"
    }

    fn open(&self, target: Target) -> Result<Box<dyn Session>> {
        Ok(Box::new(context(target)?))
    }
}

/// A context, on the CPU with the instruction set that `FOLIO_TEST_ISA` names where that is set: `.ci/test-rows`
/// runs the suites once more on those that are not this machine's best. (The library knows no such
/// variable, so the C door is always on the best one.)
pub fn context(target: Target) -> Result<api::Context> {
    match (target, chosen_isa()) {
        (Target::Cpu { num_threads }, Some(isa)) => {
            let backend = CpuBackend::with_isa(num_threads, isa)?;
            Ok(api::Context::with_backend(
                Box::new(backend),
                Logger::silent(),
            ))
        }
        _ => api::Context::new(target, Logger::silent()),
    }
}

/// The instruction set whose kernels are called `cpu/$FOLIO_TEST_ISA`.
pub fn chosen_isa() -> Option<Isa> {
    let name = std::env::var("FOLIO_TEST_ISA").ok()?;
    let named = |isa: &Isa| isa.name() == format!("cpu/{name}");
    let found = Isa::ALL.into_iter().find(named);
    Some(found.unwrap_or_else(|| panic!("FOLIO_TEST_ISA: no instruction set is called {name}")))
}

impl Session for api::Context {
    fn attention(&self, desc: AttentionDesc) -> Result<Box<dyn Handle>> {
        Ok(Box::new(api::Attention::new(self, desc)?))
    }

    fn append(&self, input: &AppendArgs, stream: Stream) -> Result<()> {
        api::append(self, input, stream)
    }

    fn copy(&self, input: &CopyArgs, stream: Stream) -> Result<()> {
        api::copy(self, input, stream)
    }

    fn gather(&self, input: &GatherArgs, stream: Stream) -> Result<()> {
        api::gather(self, input, stream)
    }

    fn merge(&self, input: &MergeArgs, stream: Stream) -> Result<()> {
        api::merge(self, input, stream)
    }

    fn merge_states(&self, input: &MergeStatesArgs, stream: Stream) -> Result<()> {
        api::merge_states(self, input, stream)
    }

    fn merge_varlen(&self, input: &MergeVarlenArgs, stream: Stream) -> Result<()> {
        api::merge_varlen(self, input, stream)
    }

    fn absorb_weights(&self, input: &AbsorbWeightsArgs, stream: Stream) -> Result<()> {
        api::absorb_weights(self, input, stream)
    }

    fn absorb_q(&self, input: &AbsorbQArgs, stream: Stream) -> Result<()> {
        api::absorb_q(self, input, stream)
    }

    fn project_o(&self, input: &ProjectOArgs, stream: Stream) -> Result<()> {
        api::project_o(self, input, stream)
    }

    fn up_project(&self, input: &UpProjectArgs, stream: Stream) -> Result<()> {
        api::up_project(self, input, stream)
    }

    fn mla_append(&self, input: &MlaAppendArgs, stream: Stream) -> Result<()> {
        api::mla_append(self, input, stream)
    }

    fn mla_gather(&self, input: &MlaGatherArgs, stream: Stream) -> Result<()> {
        api::mla_gather(self, input, stream)
    }

    fn mla_context(&self, desc: MlaContextDesc) -> Result<Box<dyn ContextHandle>> {
        Ok(Box::new(api::MlaContext::new(self, desc)?))
    }

    fn cascade(&self, desc: AttentionDesc) -> Result<Box<dyn CascadeHandle>> {
        Ok(Box::new(api::Cascade::new(self, desc)?))
    }

    fn cp_reorder(&self, input: &CpReorderArgs, stream: Stream) -> Result<()> {
        api::cp_reorder(self, input, stream)
    }

    fn cp_correct(&self, input: &CpCorrectArgs, stream: Stream) -> Result<()> {
        api::cp_correct(self, input, stream)
    }

    fn tree_mask(&self, input: &TreeMaskArgs, stream: Stream) -> Result<()> {
        api::tree_mask(self, input, stream)
    }

    fn batch_lengths(&self, input: &BatchLengthsArgs, stream: Stream) -> Result<()> {
        api::batch_lengths(self, input, stream)
    }

    fn kv_indices(&self, input: &KvIndicesArgs, stream: Stream) -> Result<()> {
        api::kv_indices(self, input, stream)
    }

    fn block_table(&self, input: &BlockTableArgs, stream: Stream) -> Result<()> {
        api::block_table(self, input, stream)
    }

    fn slot_mapping(&self, input: &SlotMappingArgs, stream: Stream) -> Result<()> {
        api::slot_mapping(self, input, stream)
    }

    fn draft_kv_indices(&self, input: &DraftKvIndicesArgs, stream: Stream) -> Result<()> {
        api::draft_kv_indices(self, input, stream)
    }

    fn rope_append(&self, input: &RopeAppendArgs, stream: Stream) -> Result<()> {
        api::rope_append(self, input, stream)
    }
}

impl CascadeHandle for api::Cascade {
    fn workspace(&self) -> Result<WorkspaceInfo> {
        Ok(api::Cascade::workspace(self))
    }

    fn plan(
        &mut self,
        batch: &BatchInput,
        prefixes: &SharedPrefixes<'_>,
        workspace: &Workspace,
        workspace_bytes: (usize, usize),
        stream: Stream,
    ) -> Result<()> {
        api::Cascade::plan(self, batch, prefixes, workspace, workspace_bytes, stream)
    }

    fn run(&self, args: &AttentionArgs, stream: Stream) -> Result<()> {
        api::Cascade::run(self, args, stream)
    }

    fn shares(&self) -> Result<bool> {
        api::Cascade::shares(self)
    }
}

impl Handle for api::Attention {
    fn workspace(&self) -> Result<WorkspaceInfo> {
        Ok(api::Attention::workspace(self))
    }

    fn plan(
        &mut self,
        batch: &BatchInput,
        workspace: &Workspace,
        workspace_bytes: (usize, usize),
        stream: Stream,
    ) -> Result<()> {
        api::Attention::plan(self, batch, workspace, workspace_bytes, stream)
    }

    fn append_run(
        &self,
        append: &RopeAppendArgs,
        args: &AttentionArgs,
        stream: Stream,
    ) -> Result<()> {
        api::Attention::append_run(self, append, args, stream)
    }

    fn run(&self, args: &AttentionArgs, stream: Stream) -> Result<()> {
        api::Attention::run(self, args, stream)
    }
}

impl ContextHandle for api::MlaContext {
    fn workspace(&self) -> Result<WorkspaceInfo> {
        Ok(api::MlaContext::workspace(self))
    }

    fn plan(
        &mut self,
        batch: &BatchInput,
        workspace: &Workspace,
        workspace_bytes: (usize, usize),
        stream: Stream,
    ) -> Result<()> {
        api::MlaContext::plan(self, batch, workspace, workspace_bytes, stream)
    }

    fn num_chunks(&self) -> Result<usize> {
        api::MlaContext::num_chunks(self)
    }

    fn chunk_tokens(&self, chunk: usize) -> Result<i64> {
        api::MlaContext::chunk_tokens(self, chunk)
    }

    fn run(&self, args: &MlaContextArgs, stream: Stream) -> Result<()> {
        api::MlaContext::run(self, args, stream)
    }

    fn new_tokens(&self, args: &MlaContextArgs, stream: Stream) -> Result<()> {
        api::MlaContext::new_tokens(self, args, stream)
    }

    fn gather(&self, chunk: usize, args: &MlaContextArgs, stream: Stream) -> Result<()> {
        api::MlaContext::gather(self, chunk, args, stream)
    }

    fn attend(&self, chunk: usize, args: &MlaContextArgs, stream: Stream) -> Result<()> {
        api::MlaContext::attend(self, chunk, args, stream)
    }
}
