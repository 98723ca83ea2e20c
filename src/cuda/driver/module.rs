//! Loaded images and their kernels. Loading copies code to the device and may allocate there, so it
//! happens when a handle is created and never in `plan` or `run`.
#![allow(unsafe_code)]

use std::ffi::CString;
use std::sync::Arc;

use cudarc::driver::sys;

use super::context::{Context, Current};
use crate::error::{Error, Result};

/// An image in one context.
#[derive(Debug)]
pub struct Module {
    context: Arc<Context>,
    raw: sys::CUmodule,
}

// SAFETY: module handles may be used from every thread; the driver locks.
unsafe impl Send for Module {}
// SAFETY: as above.
unsafe impl Sync for Module {}

impl Module {
    /// Loads a cubin, or PTX text with the zero that ends it, which the driver compiles. The driver copies
    /// what it is given.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`]; [`Error::DriverTooOld`] for PTX of a newer compiler than the driver knows;
    /// [`Error::Driver`] when the image does not fit device or driver otherwise.
    pub fn load(context: &Arc<Context>, image: &[u8]) -> Result<Arc<Module>> {
        if !image.starts_with(b"\x7fELF") && !image.ends_with(b"\0") {
            let neither = "a kernel image is neither an ELF file nor PTX text that a zero ends";
            return Err(Error::Internal(neither.into()));
        }
        let current = context.enter()?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: `raw` is writable. The driver finds the end of a cubin from its ELF headers, which the
        // compiler wrote and a checksum protected on the way here, and the end of PTX by its zero.
        let code = unsafe {
            (current.driver().symbols().cuModuleLoadData)(&mut raw, image.as_ptr().cast())
        };
        current.driver().check("cuModuleLoadData", code)?;
        Ok(Arc::new(Module {
            context: Arc::clone(context),
            raw,
        }))
    }

    /// Finds a kernel and allows it `shared_bytes` of dynamic shared memory.
    pub fn function(self: &Arc<Module>, symbol: &str, shared_bytes: u32) -> Result<Function> {
        let name = CString::new(symbol)
            .map_err(|_| Error::Internal(format!("kernel symbol {symbol:?} holds a zero byte")))?;
        let current = self.context.enter()?;
        let driver = current.driver();
        let mut raw = std::ptr::null_mut();
        // SAFETY: `raw` is writable, the module is loaded and the name ends with a zero.
        let code =
            unsafe { (driver.symbols().cuModuleGetFunction)(&mut raw, self.raw, name.as_ptr()) };
        driver.check(&format!("cuModuleGetFunction({symbol})"), code)?;
        let function = Function {
            module: Arc::clone(self),
            raw,
            name,
            shared_bytes,
        };
        function.allow_shared_bytes(&current)?;
        Ok(function)
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        if let Ok(current) = self.context.enter() {
            // SAFETY: every `Function` holds this module, so none is left.
            unsafe { (current.driver().symbols().cuModuleUnload)(self.raw) };
        }
    }
}

/// Dynamic shared memory that a kernel may have without an attribute.
const DEFAULT_SHARED_BYTES: u32 = 48 << 10;

/// A kernel that can be launched.
#[derive(Debug, Clone)]
pub struct Function {
    module: Arc<Module>,
    pub(super) raw: sys::CUfunction,
    name: CString,
    shared_bytes: u32,
}

// SAFETY: function handles may be used from every thread; the driver locks.
unsafe impl Send for Function {}
// SAFETY: as above.
unsafe impl Sync for Function {}

impl Function {
    /// The kernel's symbol.
    pub fn name(&self) -> &str {
        self.name.to_str().unwrap_or_default()
    }

    /// Dynamic shared memory of every launch, in bytes.
    pub fn shared_bytes(&self) -> u32 {
        self.shared_bytes
    }

    /// The context that the kernel runs in.
    pub fn context(&self) -> &Arc<Context> {
        &self.module.context
    }

    /// How many blocks of `threads` threads run on one multiprocessor at a time.
    pub fn blocks_per_sm(&self, current: &Current<'_>, threads: u32) -> Result<u32> {
        let mut blocks = 0;
        // SAFETY: `blocks` is writable and the function is loaded.
        let code = unsafe {
            (current
                .driver()
                .symbols()
                .cuOccupancyMaxActiveBlocksPerMultiprocessor)(
                &mut blocks,
                self.raw,
                threads as i32,
                self.shared_bytes as usize,
            )
        };
        current
            .driver()
            .check("cuOccupancyMaxActiveBlocksPerMultiprocessor", code)?;
        Ok(blocks.max(0) as u32)
    }

    /// Above 48 KiB a kernel must be told once. Asking for less is free, so every kernel is told.
    fn allow_shared_bytes(&self, current: &Current<'_>) -> Result<()> {
        let limit = current.context().device().shared_bytes_per_block;
        if self.shared_bytes > limit {
            return Err(Error::Unsupported(format!(
                "kernel {} needs {} bytes of shared memory; this device has {limit} for a block",
                self.name(),
                self.shared_bytes
            )));
        }
        use sys::CUfunction_attribute as A;
        self.set(
            current,
            A::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
            self.shared_bytes as i32,
        )?;
        if self.shared_bytes <= DEFAULT_SHARED_BYTES {
            return Ok(());
        }
        // A preference, in percent: without it the driver may leave room for one block where two fit.
        self.set(
            current,
            A::CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT,
            100,
        )
    }

    fn set(
        &self,
        current: &Current<'_>,
        attribute: sys::CUfunction_attribute,
        value: i32,
    ) -> Result<()> {
        // SAFETY: the function is loaded, and the driver checks the value.
        let code = unsafe {
            (current.driver().symbols().cuFuncSetAttribute)(self.raw, attribute as u32, value)
        };
        current.driver().check("cuFuncSetAttribute", code)
    }
}
