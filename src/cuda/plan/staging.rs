//! The page-locked half of a workspace as a ring of buffers. `plan` writes into one while the device may
//! still be copying others, so planning step N + 1 while step N runs is well defined; it waits only when
//! every buffer is still in flight.
#![allow(unsafe_code)]

use std::sync::Arc;

use crate::backend::Stream;
use crate::cuda::driver::{Context, Current, Event};
use crate::error::Result;

/// Buffers of a ring: one being written, one queued, one being copied.
pub const BUFFERS: usize = 3;

/// Which buffer is next, and when each is free again.
#[derive(Debug)]
pub struct Ring {
    free: [Event; BUFFERS],
    next: usize,
}

impl Ring {
    /// All buffers are free.
    pub fn new(context: &Arc<Context>) -> Result<Ring> {
        Ok(Ring {
            free: [
                Event::new(context)?,
                Event::new(context)?,
                Event::new(context)?,
            ],
            next: 0,
        })
    }

    /// Lets `fill` write the next buffer of `bytes` bytes at `host + index · stride`, and copies it to
    /// `device` in stream order.
    ///
    /// # Errors
    /// [`Error::Driver`](crate::error::Error::Driver). Then nothing was copied, unless the context is lost.
    ///
    /// # Safety
    /// `host` must be valid for writing [`BUFFERS`] buffers of `stride` bytes, `stride` at least `bytes`,
    /// and stay valid, and untouched by others, until the device has run the copy; `device` must be
    /// device memory of `bytes` bytes.
    pub unsafe fn upload(
        &mut self,
        current: &Current<'_>,
        (host, stride): (usize, usize),
        (device, bytes): (u64, usize),
        stream: Stream,
        fill: impl FnOnce(&mut [u8]) -> Result<()>,
    ) -> Result<()> {
        let free = &self.free[self.next];
        if !free.is_reached(current)? {
            free.wait(current)?;
        }
        let start = (host + self.next * stride) as *mut u8;
        // SAFETY: the caller's promise; the event says that the device reads this buffer no more.
        let buffer = unsafe { std::slice::from_raw_parts_mut(start, bytes) };
        fill(buffer)?;
        // SAFETY: the buffer is written again only after the event recorded below.
        unsafe { current.upload(device, buffer, stream)? };
        // The copy cannot be taken back, so its plan stands. Without an event the buffer is free once the
        // stream has been waited for.
        let recorded = free.record(current, stream);
        self.next = (self.next + 1) % BUFFERS;
        recorded.or_else(|_| current.synchronize(stream))
    }
}
