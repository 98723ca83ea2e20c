//! What all attention handles share: the flags of their descs, and the bodies of their functions. A handle's
//! own file holds its desc and its signatures, each of which calls one function of this file.

use super::context::folio_context;
use super::error::folio_error;
use super::guard::guard_value;
use super::handle::{self, Object};
use super::sized::{self, Input};
use super::status::folio_status;
use super::workspace::{folio_workspace, folio_workspace_info, workspace as memory, write_info};
use crate::api::{Attention, BatchInput, Stream};
use crate::problem::{AttentionArgs, AttentionDesc};
use std::ffi::{CString, c_char, c_void};

/// Runs may be captured in a CUDA graph, and planned again for the same graph: see @ref attention. No effect on
/// the CPU, whose calls are complete when they return.
pub const FOLIO_PLAN_GRAPH: u32 = 1;
/// A request's result does not depend on the other requests of its batch, to the bit.
pub const FOLIO_PLAN_BATCH_INVARIANT: u32 = 2;

/// What is behind every attention handle.
pub(super) struct AttentionHandle {
    attention: Attention,
    /// The kernel's name, as C reads it.
    kernel: CString,
}

impl AttentionHandle {
    fn new(attention: Attention) -> AttentionHandle {
        AttentionHandle {
            kernel: CString::new(attention.kernel()).unwrap_or_default(),
            attention,
        }
    }
}

/// # Safety
/// `ctx` as in [`handle::shared`], `desc` as in [`sized::parse`], `out` and `err` as in [`handle::create`].
pub(super) unsafe fn create<O, D>(
    ctx: *const folio_context,
    desc: *const D,
    out: *mut *mut O,
    err: *mut folio_error,
) -> folio_status
where
    O: Object<Value = AttentionHandle>,
    D: Input<Parsed = AttentionDesc>,
{
    // SAFETY: the caller's promises.
    unsafe {
        handle::create_from(ctx, out, err, |ctx| {
            Attention::new(ctx, sized::parse(desc)?).map(AttentionHandle::new)
        })
    }
}

/// # Safety
/// `object` and `err` as in [`handle::shared`], `out` as in [`write_info`].
pub(super) unsafe fn workspace<O: Object<Value = AttentionHandle>>(
    object: *const O,
    out: *mut folio_workspace_info,
    err: *mut folio_error,
) -> folio_status {
    // SAFETY: the caller's promises.
    unsafe { handle::shared(object, err, |h| write_info(out, &h.attention.workspace())) }
}

/// # Safety
/// `object` and `err` as in [`handle::exclusive`], `batch` and `ws` as in [`sized::parse`].
pub(super) unsafe fn plan<O, B>(
    object: *mut O,
    batch: *const B,
    ws: *const folio_workspace,
    stream: *mut c_void,
    err: *mut folio_error,
) -> folio_status
where
    O: Object<Value = AttentionHandle>,
    B: Input<Parsed = BatchInput>,
{
    // SAFETY: the caller's promises.
    unsafe {
        handle::exclusive(object, err, |h| {
            let batch = sized::parse(batch)?;
            let (ws, bytes) = memory(ws)?;
            h.attention
                .plan(&batch, &ws, bytes, Stream(stream as usize))
        })
    }
}

/// # Safety
/// `object` and `err` as in [`handle::shared`], `args` as in [`sized::parse`].
pub(super) unsafe fn run<O, A>(
    object: *const O,
    args: *const A,
    stream: *mut c_void,
    err: *mut folio_error,
) -> folio_status
where
    O: Object<Value = AttentionHandle>,
    A: Input<Parsed = AttentionArgs>,
{
    // SAFETY: the caller's promises.
    unsafe {
        handle::shared(object, err, |h| {
            h.attention
                .run(&sized::parse(args)?, Stream(stream as usize))
        })
    }
}

/// The kernel's name; NULL for a NULL handle.
///
/// # Safety
/// `object` as in [`handle::value`].
pub(super) unsafe fn kernel<O: Object<Value = AttentionHandle>>(object: *const O) -> *const c_char {
    guard_value(std::ptr::null(), || {
        // SAFETY: the caller's promise.
        let handle = unsafe { handle::value(object) };
        handle.map_or(std::ptr::null(), |handle| handle.kernel.as_ptr())
    })
}

/// `value`, or what 0 stands for.
pub(super) fn or(value: u32, default: u32) -> u32 {
    if value == 0 { default } else { value }
}
