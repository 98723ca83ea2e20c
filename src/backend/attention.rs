//! Attention on one device: picking the code for a problem, and the handle that plans and runs it.

use super::Backend;
use super::refusal::refused;
use super::stream::Stream;
use super::tables::{HostTables, Tables};
use super::workspace::{Workspace, WorkspaceInfo};
use crate::error::Result;
use crate::problem::{
    AttentionArgs, AttentionDesc, Batch, Checked, Earlier, HostBatch, RopeAppendArgs, Tiling,
    WorkList,
};

/// Attention operators.
pub trait AttentionOps {
    /// Looks up the code for a problem of an attention handle.
    ///
    /// # Errors
    /// `Unsupported` where there is none.
    fn attention(&self, _desc: &AttentionDesc) -> Result<Box<dyn Attention>> {
        refused("attention")
    }

    /// Tables of up to `count` numbers for handles that attention is a part of. Those of a backend on the host are read
    /// where they are written.
    ///
    /// # Errors
    /// What the backend's device answers.
    fn tables(&self, count: usize) -> Result<Box<dyn Tables>> {
        Ok(Box::new(HostTables::new(count)))
    }
}

/// One attention problem on one device: the code that was picked, and the current plan.
pub trait Attention: Send + Sync {
    /// Name of the first choice: the kernel that plans are cut for, and that every run takes but those that
    /// ask for a feature that it lacks. Such a run takes another kernel, and the first with its reason is
    /// told in the log.
    fn kernel(&self) -> &str;

    /// How to cut the work.
    fn tiling(&self) -> Tiling;

    /// How to cut a batch that the host knows.
    fn tiling_of(&self, _batch: &HostBatch<'_>) -> Tiling {
        self.tiling()
    }

    /// Memory for every plan within the desc.
    fn workspace(&self) -> WorkspaceInfo;

    /// Takes over a batch. `work` is the cut of a host batch, and empty for a device batch. Afterwards
    /// nothing of `batch` on the host is referred to.
    fn plan(
        &mut self,
        batch: &Batch<'_>,
        work: &WorkList,
        workspace: &Workspace,
        stream: Stream,
    ) -> Result<()>;

    /// Computes with the current plan.
    fn run(&self, args: &Checked<AttentionArgs>, stream: Stream) -> Result<()>;

    /// Computes as if rows saw earlier keys too. A row that is not in the plan, or sees no key, keeps what it has where the outputs
    /// are the sum itself. Sinks are not accepted. False where the kernel that takes the run cannot: then nothing was done.
    fn run_after(
        &self,
        _args: &Checked<AttentionArgs>,
        _earlier: &Earlier,
        _stream: Stream,
    ) -> Result<bool> {
        Ok(false)
    }

    /// Keys of a step of the kernel that plans are cut for, where it takes a context. A plan for such runs counts each request's
    /// context in whole steps.
    fn context_step(&self) -> Option<u32> {
        None
    }

    /// Puts new tokens into the cache, and computes with them. Kernels that can do both do.
    fn append_run(
        &self,
        append: &Append<'_>,
        args: &Checked<AttentionArgs>,
        stream: Stream,
    ) -> Result<()> {
        append.enqueue(stream)?;
        self.run(args, stream)
    }
}

/// New tokens that a run attends to, and the backend that can put them into the cache by an operator of its own.
#[derive(Clone, Copy)]
pub struct Append<'a> {
    /// What the operator takes.
    pub args: &'a Checked<RopeAppendArgs>,
    /// The operator's backend.
    pub backend: &'a dyn Backend,
}

impl Append<'_> {
    /// Enqueues the operator.
    ///
    /// # Errors
    /// What the backend's device answers.
    pub fn enqueue(&self, stream: Stream) -> Result<()> {
        self.backend.rope_append(self.args, stream)
    }
}
