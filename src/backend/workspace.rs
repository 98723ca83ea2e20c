//! The memory of a plan: what a handle needs, what the caller gives, and the parts of it of a handle that is made of others.

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

impl WorkspaceInfo {
    /// Places a part behind the others; its offsets. A size that saturates stays the largest: nobody can bring that much.
    pub fn place(&mut self, part: &WorkspaceInfo) -> Workspace {
        self.alignment = self.alignment.max(part.alignment);
        let alignment = self.alignment;
        let after = |end: &mut usize, bytes: usize| {
            let start = *end;
            let end_of_part = start.saturating_add(bytes);
            *end = end_of_part
                .checked_next_multiple_of(alignment)
                .unwrap_or(usize::MAX);
            start
        };
        Workspace {
            device: after(&mut self.device_bytes, part.device_bytes),
            host: after(&mut self.host_bytes, part.host_bytes),
        }
    }
}

impl Workspace {
    /// A part of it, by its offsets.
    pub fn part(&self, at: Workspace) -> Workspace {
        Workspace {
            device: self.device.wrapping_add(at.device),
            host: self.host.wrapping_add(at.host),
        }
    }
}
