//! `folio_decode`: few query rows per request over a paged cache.

use super::args::folio_attention_args;
use super::batch::{folio_batch, folio_workspace, folio_workspace_info, workspace, write_info};
use super::context::folio_context;
use super::desc::folio_decode_desc;
use super::error::{folio_error, folio_status};
use super::handle::{self, Handle, Object};
use super::prefill::AttentionHandle;
use super::sized;
use crate::api::Stream;
use std::ffi::{c_char, c_void};

/// Decode attention: FlashInfer's BatchDecodeWithPagedKVCacheWrapper. One handle serves every batch
/// within its desc, and one plan every layer of a step. Multi-token decode (speculative verify) is
/// decode with max_qo_len above 1, its tree given as a custom mask.
pub struct folio_decode(Handle<AttentionHandle>);

impl From<Handle<AttentionHandle>> for folio_decode {
    fn from(handle: Handle<AttentionHandle>) -> Self {
        folio_decode(handle)
    }
}

impl Object for folio_decode {
    type Value = AttentionHandle;
    const NAME: &'static str = "decode";
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
/// @param out receives the handle; destroy it with folio_decode_destroy
/// @param err report of a failure, or NULL
/// @return FOLIO_OK, or INVALID_ARGUMENT, DTYPE, UNSUPPORTED, COMPILE, OUT_OF_MEMORY, DRIVER
///
/// # Safety
/// `ctx` is alive, `desc` points to as many bytes as its struct_size says, `out` to a pointer. Any
/// thread, concurrently with other uses of `ctx`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn folio_decode_create(
    ctx: *const folio_context,
    desc: *const folio_decode_desc,
    out: *mut *mut folio_decode,
    err: *mut folio_error,
) -> folio_status {
    // SAFETY: the documented promises of the caller.
    unsafe { AttentionHandle::create(ctx, out, err, || sized::read(desc)?.parse()) }
}

/// The memory that every plan within the desc can do with.
///
/// @param decode the handle
/// @param out struct_size set by the caller; receives the sizes
/// @param err report of a failure, or NULL
/// @return FOLIO_OK, or INVALID_ARGUMENT, INVALID_STRUCT_SIZE
///
/// # Safety
/// `decode` is alive, `out` points to as many bytes as its struct_size says. Concurrent use is fine.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn folio_decode_workspace(
    decode: *const folio_decode,
    out: *mut folio_workspace_info,
    err: *mut folio_error,
) -> folio_status {
    // SAFETY: the documented promises of the caller.
    unsafe { handle::shared(decode, err, |h| write_info(out, &h.attention.workspace())) }
}

/// Takes over a step's batch: microseconds, once per step. Never synchronises. On failure the previous
/// plan stays in force.
///
/// @param decode the handle
/// @param batch lengths and page table
/// @param ws memory as folio_decode_workspace asks; NULL where it asks for none
/// @param stream CUDA: the stream that later runs use or wait for; CPU: NULL
/// @param err report of a failure, or NULL
/// @return FOLIO_OK, or INVALID_ARGUMENT, SHAPE, DTYPE, DEVICE_MISMATCH, WORKSPACE_TOO_SMALL, CAPTURE,
///         UNSUPPORTED, DRIVER
///
/// # Safety
/// `decode` is alive and in no other call; the structs are readable, and the tensors' memory too.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn folio_decode_plan(
    decode: *mut folio_decode,
    batch: *const folio_batch,
    ws: *const folio_workspace,
    stream: *mut c_void,
    err: *mut folio_error,
) -> folio_status {
    // SAFETY: the documented promises of the caller.
    unsafe {
        handle::exclusive(decode, err, |h| {
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
/// @param decode the handle
/// @param args tensors and parameters
/// @param stream CUDA stream, or NULL on the CPU
/// @param err report of a failure, or NULL
/// @return FOLIO_OK, or NOT_PLANNED, INVALID_ARGUMENT, SHAPE, DTYPE, DEVICE_MISMATCH, CAPTURE,
///         UNSUPPORTED, DRIVER; then no output was touched
///
/// # Safety
/// `decode` is alive and not being planned; the structs are readable, and the tensors' memory as the
/// fields say. Concurrent runs are fine with different outputs; on CUDA on
/// one stream, or on streams that the host orders: parts of split rows meet in the workspace.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn folio_decode_run(
    decode: *const folio_decode,
    args: *const folio_attention_args,
    stream: *mut c_void,
    err: *mut folio_error,
) -> folio_status {
    // SAFETY: the documented promises of the caller.
    unsafe {
        handle::shared(decode, err, |h| {
            let args = sized::read(args)?.parse()?;
            h.attention.run(&args, Stream(stream as usize))
        })
    }
}

/// Name of the kernel that create picked, e.g. "cpu/avx512"; NULL for a NULL handle. It lives as long
/// as the handle.
///
/// # Safety
/// `decode` is NULL or alive. Concurrent use is fine.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn folio_decode_kernel(decode: *const folio_decode) -> *const c_char {
    // SAFETY: the documented promise of the caller.
    unsafe { AttentionHandle::kernel(decode) }
}

/// Ends a handle without waiting; NULL is fine. On CUDA its runs may still be on the device, and graphs that
/// captured them may be replayed, while the workspace and the context stay.
///
/// # Safety
/// `decode` is NULL or came from folio_decode_create and is not used afterwards.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn folio_decode_destroy(decode: *mut folio_decode) {
    // SAFETY: the documented promise of the caller.
    unsafe { handle::destroy(decode) }
}
