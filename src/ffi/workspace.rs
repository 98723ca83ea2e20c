//! The memory of a plan: what a handle asks for, and what the caller gives.

use super::sized::{self, Input};
use crate::api::{Workspace, WorkspaceInfo};
use crate::error::{Error, Result};
use std::ffi::c_void;

/// Memory that a handle needs for any batch within its desc. Nothing has to be zeroed.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct folio_workspace_info {
    /// sizeof(folio_workspace_info) of the caller.
    pub struct_size: u32,
    /// 0.
    pub reserved: u32,
    /// Bytes of device memory; 0 on the CPU.
    pub device_bytes: u64,
    /// Bytes of host memory. For CUDA it should be page-locked (cudaHostAlloc): out of other memory the driver
    /// copies before it returns, and may wait for the stream.
    pub host_bytes: u64,
    /// Alignment in bytes of both addresses.
    pub alignment: u64,
}

/// The caller's memory for a plan. It belongs to the handle from plan until the next plan, or until the
/// handle is destroyed and its last run has finished. The next plan may bring other memory, unless a graph
/// has been captured.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct folio_workspace {
    /// sizeof(folio_workspace).
    pub struct_size: u32,
    /// 0.
    pub flags: u32,
    /// Device memory, or NULL where device_bytes of folio_workspace_info is 0.
    pub device: *mut c_void,
    /// Bytes of it.
    pub device_bytes: u64,
    /// Host memory, or NULL where host_bytes of folio_workspace_info is 0.
    pub host: *mut c_void,
    /// Bytes of it.
    pub host_bytes: u64,
}

const _: () = assert!(size_of::<folio_workspace_info>() == 32);
const _: () = assert!(size_of::<folio_workspace>() == 40);

// SAFETY: repr(C), two u32 first, integers and pointers only, no padding (asserted by size).
unsafe impl Input for folio_workspace {
    const NAME: &'static str = "folio_workspace";
    const FIRST_SIZE: usize = 40;
    const FLAGS: u32 = 0;
    /// Addresses, and the bytes of device and host memory.
    type Parsed = (Workspace, (usize, usize));

    unsafe fn parse(&self) -> Result<Self::Parsed> {
        let addresses = Workspace {
            device: self.device as usize,
            host: self.host as usize,
        };
        let sizes = (
            addressable("device_bytes", self.device_bytes)?,
            addressable("host_bytes", self.host_bytes)?,
        );
        Ok((addresses, sizes))
    }
}

fn addressable(name: &str, bytes: u64) -> Result<usize> {
    usize::try_from(bytes).map_err(|_| {
        Error::InvalidArgument(format!("{name}: {bytes} is more than can be addressed"))
    })
}

/// A workspace as addresses and sizes. NULL stands for no memory.
///
/// # Safety
/// `workspace` is NULL or as [`sized::read`] asks.
pub(super) unsafe fn workspace(
    workspace: *const folio_workspace,
) -> Result<(Workspace, (usize, usize))> {
    if workspace.is_null() {
        return Ok((Workspace::default(), (0, 0)));
    }
    // SAFETY: the caller's promise.
    unsafe { sized::parse(workspace) }
}

/// Answers a workspace query.
///
/// # Safety
/// `out` is NULL or as [`sized::write`] asks.
pub(super) unsafe fn write_info(
    out: *mut folio_workspace_info,
    info: &WorkspaceInfo,
) -> Result<()> {
    let value = folio_workspace_info {
        struct_size: 0,
        reserved: 0,
        device_bytes: info.device_bytes as u64,
        host_bytes: info.host_bytes as u64,
        alignment: info.alignment as u64,
    };
    // SAFETY: the caller's promise; the struct is repr(C) and has no padding.
    unsafe { sized::write("folio_workspace_info", out, value, 32) }
}
