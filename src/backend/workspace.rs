//! The memory of a plan: what a handle needs, and what the caller gives.

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
