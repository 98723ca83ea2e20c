//! Tables of numbers that an operator of several parts derives from a batch on the host, and that its parts read where
//! their tensors are.
#![allow(unsafe_code)]

use super::stream::Stream;
use super::workspace::{Workspace, WorkspaceInfo};
use crate::error::Result;

/// The tables of one handle.
pub trait Tables: Send + Sync {
    /// The memory that they need.
    fn workspace(&self) -> WorkspaceInfo;

    /// Where the first number is for whoever reads them.
    fn address(&self, workspace: &Workspace) -> usize;

    /// Lets `fill` write the numbers, which are there in stream order. What it leaves out is anything.
    fn write(
        &mut self,
        workspace: &Workspace,
        stream: Stream,
        fill: &mut dyn FnMut(&mut [i32]),
    ) -> Result<()>;
}

/// Tables that are read on the host: they are written in place.
#[derive(Debug)]
pub struct HostTables {
    count: usize,
}

impl HostTables {
    /// So many numbers.
    pub fn new(count: usize) -> HostTables {
        HostTables { count }
    }
}

impl Tables for HostTables {
    fn workspace(&self) -> WorkspaceInfo {
        WorkspaceInfo {
            device_bytes: 0,
            host_bytes: self.count.saturating_mul(size_of::<i32>()),
            alignment: align_of::<i32>(),
        }
    }

    fn address(&self, workspace: &Workspace) -> usize {
        workspace.host
    }

    fn write(
        &mut self,
        workspace: &Workspace,
        _: Stream,
        fill: &mut dyn FnMut(&mut [i32]),
    ) -> Result<()> {
        if self.count > 0 {
            // SAFETY: `api` checked that the workspace has the size and alignment that `workspace` asks for; it is the
            // plan's alone, and any bytes are numbers.
            fill(unsafe { std::slice::from_raw_parts_mut(workspace.host as *mut i32, self.count) });
        }
        Ok(())
    }
}
