//! `folio_prefill`: any number of query rows per request, over a paged cache or ragged K and V.

use super::args::folio_attention_args;
use super::batch::{folio_batch, folio_workspace, folio_workspace_info, workspace, write_info};
use super::context::folio_context;
use super::desc::folio_prefill_desc;
use super::error::{folio_error, folio_status};
use super::handle::{self, Handle, Object};
use super::sized;
use crate::api::{Attention, Stream};
use crate::error::{Error, Result};
use crate::problem::AttentionDesc;
use std::ffi::{CString, c_char, c_void};

/// Prefill attention: FlashInfer's BatchPrefillWithPagedKVCacheWrapper and
/// BatchPrefillWithRaggedKVCacheWrapper. One handle serves every batch within its desc, and one plan
/// every layer of a step.
pub struct folio_prefill(Handle<AttentionHandle>);

/// What is behind a decode or a prefill handle.
pub(super) struct AttentionHandle {
    pub attention: Attention,
    kernel: CString,
}

impl AttentionHandle {
    /// # Safety
    /// As [`handle::create`]; `ctx` is NULL or alive.
    pub unsafe fn create<O: Object<Value = AttentionHandle>>(
        ctx: *const folio_context,
        out: *mut *mut O,
        err: *mut folio_error,
        desc: impl FnOnce() -> Result<AttentionDesc>,
    ) -> folio_status {
        // SAFETY: the caller's promise.
        unsafe {
            handle::create(out, err, || {
                let ctx = ctx.as_ref().ok_or_else(|| {
                    Error::InvalidArgument("ctx: NULL is not accepted; a handle is".into())
                })?;
                let attention = Attention::new(ctx.handle().value(), desc()?)?;
                let kernel = CString::new(attention.kernel()).unwrap_or_default();
                Ok(AttentionHandle { attention, kernel })
            })
        }
    }

    /// # Safety
    /// `object` is NULL or alive.
    pub unsafe fn kernel<O: Object<Value = AttentionHandle>>(object: *const O) -> *const c_char {
        // SAFETY: the caller's promise.
        unsafe { object.as_ref() }.map_or(std::ptr::null(), |object| {
            object.handle().value().kernel.as_ptr()
        })
    }
}

impl From<Handle<AttentionHandle>> for folio_prefill {
    fn from(handle: Handle<AttentionHandle>) -> Self {
        folio_prefill(handle)
    }
}

impl Object for folio_prefill {
    type Value = AttentionHandle;
    const NAME: &'static str = "prefill";
    fn handle(&self) -> &Handle<AttentionHandle> {
        &self.0
    }
    fn handle_mut(&mut self) -> &mut Handle<AttentionHandle> {
        &mut self.0
    }
}

/// Picks the code for a problem; slow, once. Also the capability query: UNSUPPORTED says why not.
///
/// @param ctx the device
/// @param desc types, shapes and maxima
/// @param out receives the handle; destroy it with folio_prefill_destroy
/// @param err report of a failure, or NULL
/// @return FOLIO_OK, or INVALID_ARGUMENT, DTYPE, UNSUPPORTED, COMPILE, OUT_OF_MEMORY, DRIVER
///
/// # Safety
/// `ctx` is alive, `desc` points to as many bytes as its struct_size says, `out` to a pointer. Any
/// thread, concurrently with other uses of `ctx`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn folio_prefill_create(
    ctx: *const folio_context,
    desc: *const folio_prefill_desc,
    out: *mut *mut folio_prefill,
    err: *mut folio_error,
) -> folio_status {
    // SAFETY: the documented promises of the caller.
    unsafe { AttentionHandle::create(ctx, out, err, || sized::read(desc)?.parse()) }
}

/// The memory that every plan within the desc can do with.
///
/// @param prefill the handle
/// @param out struct_size set by the caller; receives the sizes
/// @param err report of a failure, or NULL
/// @return FOLIO_OK, or INVALID_ARGUMENT, INVALID_STRUCT_SIZE
///
/// # Safety
/// `prefill` is alive, `out` points to as many bytes as its struct_size says. Concurrent use is fine.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn folio_prefill_workspace(
    prefill: *const folio_prefill,
    out: *mut folio_workspace_info,
    err: *mut folio_error,
) -> folio_status {
    // SAFETY: the documented promises of the caller.
    unsafe { handle::shared(prefill, err, |h| write_info(out, &h.attention.workspace())) }
}

/// Takes over a step's batch: microseconds, once per step. Never synchronises. On failure the previous
/// plan stays in force.
///
/// @param prefill the handle
/// @param batch lengths and page table; qo_indptr is required
/// @param ws memory as folio_prefill_workspace asks; NULL where it asks for none
/// @param stream CUDA: the stream that later runs use or wait for; CPU: NULL
/// @param err report of a failure, or NULL
/// @return FOLIO_OK, or INVALID_ARGUMENT, SHAPE, DTYPE, DEVICE_MISMATCH, WORKSPACE_TOO_SMALL, CAPTURE,
///         UNSUPPORTED, DRIVER
///
/// # Safety
/// `prefill` is alive and in no other call; the structs are readable, and the tensors' memory too.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn folio_prefill_plan(
    prefill: *mut folio_prefill,
    batch: *const folio_batch,
    ws: *const folio_workspace,
    stream: *mut c_void,
    err: *mut folio_error,
) -> folio_status {
    // SAFETY: the documented promises of the caller.
    unsafe {
        handle::exclusive(prefill, err, |h| {
            let batch = sized::read(batch)?.parse()?;
            let (ws, bytes) = workspace(ws)?;
            h.attention
                .plan(&batch, &ws, bytes, Stream(stream as usize))
        })
    }
}

/// Computes attention for the planned batch: once per layer. Allocates nothing, synchronises nothing.
/// On the CPU the outputs are complete on return; on CUDA they are when the stream gets there.
///
/// @param prefill the handle
/// @param args tensors and parameters
/// @param stream CUDA stream, or NULL on the CPU
/// @param err report of a failure, or NULL
/// @return FOLIO_OK, or NOT_PLANNED, INVALID_ARGUMENT, SHAPE, DTYPE, DEVICE_MISMATCH, CAPTURE,
///         UNSUPPORTED, DRIVER; then no output was touched
///
/// # Safety
/// `prefill` is alive and not being planned; the structs are readable, and the tensors' memory as the
/// fields say. Concurrent runs are fine with different outputs; on CUDA on
/// one stream, or on streams that the host orders: parts of split rows meet in the workspace.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn folio_prefill_run(
    prefill: *const folio_prefill,
    args: *const folio_attention_args,
    stream: *mut c_void,
    err: *mut folio_error,
) -> folio_status {
    // SAFETY: the documented promises of the caller.
    unsafe {
        handle::shared(prefill, err, |h| {
            let args = sized::read(args)?.parse()?;
            h.attention.run(&args, Stream(stream as usize))
        })
    }
}

/// Name of the kernel that create picked, e.g. "cpu/avx512"; NULL for a NULL handle. It lives as long
/// as the handle.
///
/// # Safety
/// `prefill` is NULL or alive. Concurrent use is fine.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn folio_prefill_kernel(prefill: *const folio_prefill) -> *const c_char {
    // SAFETY: the documented promise of the caller.
    unsafe { AttentionHandle::kernel(prefill) }
}

/// Ends a handle without waiting; NULL is fine. On CUDA its runs may still be on the device, and graphs that
/// captured them may be replayed, while the workspace and the context stay.
///
/// # Safety
/// `prefill` is NULL or came from folio_prefill_create and is not used afterwards.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn folio_prefill_destroy(prefill: *mut folio_prefill) {
    // SAFETY: the documented promise of the caller.
    unsafe { handle::destroy(prefill) }
}
