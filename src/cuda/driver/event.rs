//! Events: how `plan` learns that the device has read a staging buffer, without waiting for the stream.
#![allow(unsafe_code)]

use std::sync::Arc;

use cudarc::driver::sys;

use super::context::{Context, Current, handle};
use crate::backend::Stream;
use crate::error::Result;

/// `CUDA_ERROR_NOT_READY`: the answer of a query, not a failure.
const NOT_READY: u32 = 600;

/// An event without timing.
#[derive(Debug)]
pub struct Event {
    context: Arc<Context>,
    raw: sys::CUevent,
}

// SAFETY: event handles may be used from every thread; the driver locks.
unsafe impl Send for Event {}
// SAFETY: as above.
unsafe impl Sync for Event {}

impl Event {
    /// Creates an event that counts as reached until it is first recorded.
    pub fn new(context: &Arc<Context>) -> Result<Event> {
        let current = context.enter()?;
        let mut raw = std::ptr::null_mut();
        let flags = sys::CUevent_flags::CU_EVENT_DISABLE_TIMING as u32;
        // SAFETY: `raw` is writable.
        let code = unsafe { (current.driver().symbols().cuEventCreate)(&mut raw, flags) };
        current.driver().check("cuEventCreate", code)?;
        Ok(Event {
            context: Arc::clone(context),
            raw,
        })
    }

    /// Marks the end of what `stream` holds now.
    pub fn record(&self, current: &Current<'_>, stream: Stream) -> Result<()> {
        // SAFETY: the event is ours and of the current context; the stream is the caller's.
        let code = unsafe { (current.driver().symbols().cuEventRecord)(self.raw, handle(stream)) };
        current.driver().check("cuEventRecord", code)
    }

    /// Whether the device has passed the mark.
    pub fn is_reached(&self, current: &Current<'_>) -> Result<bool> {
        // SAFETY: the event is ours.
        match unsafe { (current.driver().symbols().cuEventQuery)(self.raw) } {
            NOT_READY => Ok(false),
            code => current.driver().check("cuEventQuery", code).map(|()| true),
        }
    }

    /// Waits on the host until the device has passed the mark.
    pub fn wait(&self, current: &Current<'_>) -> Result<()> {
        // SAFETY: the event is ours.
        let code = unsafe { (current.driver().symbols().cuEventSynchronize)(self.raw) };
        current.driver().check("cuEventSynchronize", code)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if let Ok(current) = self.context.enter() {
            // SAFETY: the handle is used nowhere else. The driver frees it once a pending record is done.
            unsafe { (current.driver().symbols().cuEventDestroy_v2)(self.raw) };
        }
    }
}
