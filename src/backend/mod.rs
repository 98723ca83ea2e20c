//! What a backend is: the trait that `cpu` and `cuda` implement and that `api` calls. Arguments are
//! already checked; a backend refuses only what it cannot do.

mod registry;

pub use registry::{Target, cuda_device_count, open};

use crate::error::Result;
use crate::problem::{
    AppendArgs, AttentionArgs, AttentionDesc, Batch, Checked, MergeArgs, MergeStatesArgs, Tiling,
    WorkList,
};
use crate::tensor::Device;

/// A CUDA stream handle as the caller gave it (0 is the legacy default stream); 0 on the CPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Stream(pub usize);

/// Operators on one device.
pub trait Backend: Send + Sync + std::fmt::Debug {
    /// The device that tensors must live on.
    fn device(&self) -> Device;

    /// Looks up the code for a problem.
    fn attention(&self, desc: &AttentionDesc) -> Result<Box<dyn Attention>>;

    /// Writes new tokens to a paged cache.
    fn append(&self, args: &Checked<AppendArgs>, stream: Stream) -> Result<()>;

    /// Merges two attention states.
    fn merge(&self, args: &Checked<MergeArgs>, stream: Stream) -> Result<()>;

    /// Merges n attention states.
    fn merge_states(&self, args: &Checked<MergeStatesArgs>, stream: Stream) -> Result<()>;
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
