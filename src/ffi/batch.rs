//! A step's batch, and workspaces.

use super::sized::{self, Input, reserved};
use super::types::{folio_tensor, tensor};
use crate::api::{BatchInput, Workspace, WorkspaceInfo};
use crate::error::{Error, Result};
use std::ffi::c_void;

/// One step's lengths and page table. Index tensors are contiguous int32; block_table's rows may be
/// apart. The page table comes in one of these forms:
///
/// | form | fields |
/// |---|---|
/// | CSR | kv_indptr in pages, kv_indices, and last_page_len or kv_len |
/// | token slots | CSR with page_size 1: kv_indptr in tokens, kv_indices |
/// | block table | block_table, kv_len |
/// | ragged | kv_indptr in tokens (prefill with FOLIO_KV_RAGGED) |
///
/// Lengths (qo_indptr, kv_indptr, last_page_len, kv_len) are all on the host, or all on the context's
/// device; page ids (kv_indices, block_table) on either. Host tensors are only read during plan; device
/// tensors must stay as they are until the last run of the plan has finished.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct folio_batch {
    /// sizeof(folio_batch).
    pub struct_size: u32,
    /// 0.
    pub flags: u32,
    /// Query rows of every request where qo_indptr is NULL (decode only); 0: 1.
    pub qo_len: u32,
    /// 0.
    pub reserved: u32,
    /// `[batch_size + 1]` query-row offsets from 0; decode accepts NULL.
    pub qo_indptr: *const folio_tensor,
    /// `[batch_size + 1]` offsets from 0 into kv_indices, or into ragged K and V.
    pub kv_indptr: *const folio_tensor,
    /// `[num_pages]` page ids, 0 or more.
    pub kv_indices: *const folio_tensor,
    /// `[batch_size]` tokens in the last page, 1 to page_size; not read for requests without pages.
    pub last_page_len: *const folio_tensor,
    /// `[batch_size]` keys per request, those of this step included; 0 or more.
    pub kv_len: *const folio_tensor,
    /// `[batch_size, max_pages_per_request]` page ids; only those that kv_len needs are read.
    pub block_table: *const folio_tensor,
}

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
    /// Bytes of host memory; pinned, for CUDA.
    pub host_bytes: u64,
    /// Alignment in bytes of both.
    pub alignment: u64,
}

/// The caller's memory for a plan. It belongs to the handle from plan until the next plan, or until the
/// handle is destroyed and its last run has finished.
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

const _: () = assert!(size_of::<folio_batch>() == 64);
const _: () = assert!(size_of::<folio_workspace_info>() == 32);
const _: () = assert!(size_of::<folio_workspace>() == 40);

// SAFETY: repr(C), two u32 first, integers and pointers only, no padding (asserted by size).
unsafe impl Input for folio_batch {
    const NAME: &'static str = "folio_batch";
    const FIRST_SIZE: usize = 64;
    const FLAGS: u32 = 0;
}

// SAFETY: as above.
unsafe impl Input for folio_workspace {
    const NAME: &'static str = "folio_workspace";
    const FIRST_SIZE: usize = 40;
    const FLAGS: u32 = 0;
}

impl folio_batch {
    /// # Safety
    /// Every tensor as in [`tensor`].
    pub(super) unsafe fn parse(&self) -> Result<BatchInput> {
        reserved("folio_batch.reserved", self.reserved)?;
        // SAFETY: the caller's promise.
        unsafe {
            Ok(BatchInput {
                qo_indptr: tensor("qo_indptr", self.qo_indptr)?,
                qo_len: self.qo_len,
                kv_indptr: tensor("kv_indptr", self.kv_indptr)?,
                kv_indices: tensor("kv_indices", self.kv_indices)?,
                last_page_len: tensor("last_page_len", self.last_page_len)?,
                kv_len: tensor("kv_len", self.kv_len)?,
                block_table: tensor("block_table", self.block_table)?,
            })
        }
    }
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
    let given = unsafe { sized::read(workspace) }?;
    let bytes = |name: &str, bytes: u64| {
        usize::try_from(bytes).map_err(|_| {
            Error::InvalidArgument(format!("{name}: {bytes} is more than can be addressed"))
        })
    };
    let addresses = Workspace {
        device: given.device as usize,
        host: given.host as usize,
    };
    let sizes = (
        bytes("device_bytes", given.device_bytes)?,
        bytes("host_bytes", given.host_bytes)?,
    );
    Ok((addresses, sizes))
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
