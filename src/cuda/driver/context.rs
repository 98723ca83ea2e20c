//! A device's primary context: the one that the CUDA runtime, and so the host's framework, uses. Folio
//! makes it current only inside its own calls and then restores what the host had. Streams are the
//! host's; here they are only asked whose they are and whether they are being captured.
#![allow(unsafe_code)]

use std::marker::PhantomData;
use std::sync::Arc;

use cudarc::driver::sys;

use super::library::{DeviceInfo, Driver};
use crate::backend::Stream;
use crate::error::{Error, Result};

/// A retained primary context.
#[derive(Debug)]
pub struct Context {
    driver: Driver,
    device: DeviceInfo,
    raw: sys::CUcontext,
}

// SAFETY: a context handle may be used from every thread; the driver locks.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

impl Context {
    /// Retains the primary context of a device until the last clone is dropped.
    pub fn retain(driver: Driver, ordinal: i32) -> Result<Arc<Context>> {
        let device = driver.device(ordinal)?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: `raw` is writable, and the device came from the driver.
        let code = unsafe { (driver.symbols().cuDevicePrimaryCtxRetain)(&mut raw, device.handle) };
        driver.check("cuDevicePrimaryCtxRetain", code)?;
        Ok(Arc::new(Context {
            driver,
            device,
            raw,
        }))
    }

    /// The driver.
    pub fn driver(&self) -> Driver {
        self.driver
    }

    /// The device.
    pub fn device(&self) -> &DeviceInfo {
        &self.device
    }

    /// Makes the context current on this thread until the guard is dropped.
    pub fn enter(&self) -> Result<Current<'_>> {
        // SAFETY: `raw` is retained for as long as `self`.
        let code = unsafe { (self.driver.symbols().cuCtxPushCurrent_v2)(self.raw) };
        self.driver.check("cuCtxPushCurrent", code)?;
        Ok(Current {
            context: self,
            this_thread: PhantomData,
        })
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: balances `retain`. An error can only mean that the driver has shut down already, at
        // the end of the process; there is nobody left to tell.
        unsafe { (self.driver.symbols().cuDevicePrimaryCtxRelease_v2)(self.device.handle) };
    }
}

/// Proof that a [`Context`] is current on this thread. Dropping it restores the host's context.
#[derive(Debug)]
pub struct Current<'a> {
    context: &'a Context,
    this_thread: PhantomData<*const ()>,
}

impl Current<'_> {
    /// The driver.
    pub fn driver(&self) -> Driver {
        self.context.driver
    }

    /// The context.
    pub fn context(&self) -> &Context {
        self.context
    }

    /// Refuses a stream of another context: work on it would run on another device, or beside our
    /// modules.
    ///
    /// # Errors
    /// [`Error::DeviceMismatch`] for another context, [`Error::Driver`] for a handle the driver refuses.
    pub fn check_stream(&self, stream: Stream) -> Result<()> {
        if is_default(stream) {
            return Ok(());
        }
        let mut owner = std::ptr::null_mut();
        // SAFETY: `owner` is writable; that the handle is a stream is the caller's promise (the
        // driver detects most that are not).
        let code = unsafe { (self.driver().symbols().cuStreamGetCtx)(handle(stream), &mut owner) };
        self.driver().check("cuStreamGetCtx", code)?;
        if owner != self.context.raw {
            return Err(Error::DeviceMismatch(format!(
                "stream {:#x} belongs to another CUDA context; the primary context of cuda:{} is accepted",
                stream.0, self.context.device.ordinal
            )));
        }
        Ok(())
    }

    /// Whether the stream is being captured into a graph.
    pub fn is_capturing(&self, stream: Stream) -> Result<bool> {
        // The legacy default stream can never be captured, and asking about it fails while another
        // stream is (CUDA_ERROR_STREAM_CAPTURE_IMPLICIT).
        if stream.0 <= LEGACY {
            return Ok(false);
        }
        let mut status = 0u32;
        // SAFETY: `status` is writable; the handle is a stream by the caller's promise.
        let code =
            unsafe { (self.driver().symbols().cuStreamIsCapturing)(handle(stream), &mut status) };
        self.driver().check("cuStreamIsCapturing", code)?;
        Ok(status != sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE as u32)
    }

    /// Where kernels find page-locked host memory. It is the same address but for memory that was registered on some
    /// systems, and for memory that the host only writes (`CU_MEMHOSTALLOC_WRITECOMBINED`).
    ///
    /// # Errors
    /// [`Error::DeviceMismatch`] for memory that the driver has not page-locked.
    pub fn device_address(&self, name: &str, host: usize) -> Result<u64> {
        let attribute = sys::CUpointer_attribute::CU_POINTER_ATTRIBUTE_DEVICE_POINTER as u32;
        let mut address: sys::CUdeviceptr = 0;
        // SAFETY: `address` is writable and of the type that the attribute has; the driver reads no memory at `host`.
        let code = unsafe {
            let found = (&raw mut address).cast();
            (self.driver().symbols().cuPointerGetAttribute)(found, attribute, host as u64)
        };
        if code == CUDA_ERROR_INVALID_VALUE {
            return Err(Error::DeviceMismatch(format!(
                "{name}: address {host:#x} is not accepted as FOLIO_DEVICE_CUDA_HOST; memory that cuda:{} reaches, by cuMemHostAlloc or cuMemHostRegister, is",
                self.context.device.ordinal
            )));
        }
        self.driver().check("cuPointerGetAttribute", code)?;
        Ok(address)
    }

    /// Waits on the host for everything on the stream.
    pub fn synchronize(&self, stream: Stream) -> Result<()> {
        // SAFETY: the handle is a stream by the caller's promise.
        let code = unsafe { (self.driver().symbols().cuStreamSynchronize)(handle(stream)) };
        self.driver().check("cuStreamSynchronize", code)
    }

    /// Copies `source` to device memory in stream order. Pageable memory is staged by the driver before
    /// the call returns; page-locked memory is read later.
    ///
    /// # Safety
    /// `destination` must be device memory of `source.len()` bytes, and a page-locked `source` must stay
    /// as it is until the copy has run.
    pub unsafe fn upload(&self, destination: u64, source: &[u8], stream: Stream) -> Result<()> {
        if source.is_empty() {
            return Ok(());
        }
        // SAFETY: the source is readable for its length; the rest is the caller's promise.
        let code = unsafe {
            (self.driver().symbols().cuMemcpyHtoDAsync_v2)(
                destination,
                source.as_ptr().cast(),
                source.len(),
                handle(stream),
            )
        };
        self.driver().check("cuMemcpyHtoDAsync", code)
    }
}

impl Drop for Current<'_> {
    fn drop(&mut self) {
        let mut popped = std::ptr::null_mut();
        // SAFETY: balances the push of `enter`, on the same thread since the guard is not `Send`.
        unsafe { (self.driver().symbols().cuCtxPopCurrent_v2)(&mut popped) };
    }
}

/// The driver's answer about memory that it does not know.
const CUDA_ERROR_INVALID_VALUE: u32 = 1;

/// `CU_STREAM_LEGACY`; NULL means the same stream.
const LEGACY: usize = 1;
/// `CU_STREAM_PER_THREAD`.
const PER_THREAD: usize = 2;

/// Default streams have no context of their own: they mean the current one, which is ours.
fn is_default(stream: Stream) -> bool {
    stream.0 <= PER_THREAD
}

/// The driver's handle of a stream.
pub(super) fn handle(stream: Stream) -> sys::CUstream {
    stream.0 as sys::CUstream
}
