//! Attention on one device: picking the code for a problem, and the handle that plans and runs it.

use super::refusal::refused;
use super::stream::Stream;
use crate::error::Result;
use crate::problem::{AttentionArgs, AttentionDesc, Batch, Checked, Tiling, WorkList};

/// Attention operators.
pub trait AttentionOps {
    /// Looks up the code for a problem of an attention handle.
    ///
    /// # Errors
    /// `Unsupported` where there is none.
    fn attention(&self, _desc: &AttentionDesc) -> Result<Box<dyn Attention>> {
        refused("attention")
    }
}

/// Memory that a plan needs, for every batch within the desc's maxima.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct WorkspaceInfo {
    /// Bytes of device memory (0 on the CPU).
    pub device_bytes: usize,
    /// Bytes of host memory (pinned, for CUDA).
    pub host_bytes: usize,
    /// Alignment of both.
    pub alignment: usize,
}

/// The caller's memory, at least as large as [`WorkspaceInfo`] says and aligned; checked.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Workspace {
    /// Address of device memory, or 0.
    pub device: usize,
    /// Address of host memory.
    pub host: usize,
}

/// One attention problem on one device: the code that was picked, and the current plan.
pub trait Attention: Send + Sync {
    /// Name of the first choice: the kernel that plans are cut for, and that every run takes but those that
    /// ask for a feature that it lacks. Such a run takes another kernel, and the first with its reason is
    /// told in the log.
    fn kernel(&self) -> &str;

    /// How to cut the work.
    fn tiling(&self) -> Tiling;

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
}
