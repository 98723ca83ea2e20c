//! The workspace of a handle that is made of others: each has a part of it.

use crate::backend::{Workspace, WorkspaceInfo};
use crate::plan::PARTS_ALIGNMENT;

/// Places a part behind the others; its offsets. A size that saturates stays the largest: nobody can bring that much.
pub(super) fn place(all: &mut WorkspaceInfo, part: &WorkspaceInfo) -> Workspace {
    let after = |end: &mut usize, bytes: usize| {
        let start = *end;
        let end_of_part = start.saturating_add(bytes);
        *end = end_of_part
            .checked_next_multiple_of(PARTS_ALIGNMENT)
            .unwrap_or(usize::MAX);
        start
    };
    all.alignment = all.alignment.max(part.alignment);
    Workspace {
        device: after(&mut all.device_bytes, part.device_bytes),
        host: after(&mut all.host_bytes, part.host_bytes),
    }
}

/// A part of the caller's workspace, by its offsets.
pub(super) fn part(workspace: &Workspace, at: Workspace) -> Workspace {
    Workspace {
        device: workspace.device.wrapping_add(at.device),
        host: workspace.host.wrapping_add(at.host),
    }
}
