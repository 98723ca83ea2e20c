//! Contexts and devices.

use super::error::folio_error;
use super::guard_value::guard_value;
use super::handle::{self, Object};
use super::sized::{self, Input};
use super::status::folio_status;
use crate::api::{Context, Stream, Target, cuda_device_count};
use crate::error::{Error, Result};
use crate::log::{Level, Logger, Sink};
use std::ffi::{CString, c_char, c_void};
use std::sync::Arc;

/// Host memory (DLPack's kDLCPU).
pub const FOLIO_DEVICE_CPU: i32 = 1;
/// Memory of a CUDA device (kDLCUDA).
pub const FOLIO_DEVICE_CUDA: i32 = 2;
/// Page-locked host memory (kDLCUDAHost); treated as host memory, but for what folio_kv_copy says.
pub const FOLIO_DEVICE_CUDA_HOST: i32 = 3;

/// A device and what belongs to it: threads, modules, the log callback. Made by
/// folio_context_create; handles made from it keep it alive, so it may be destroyed before them.
pub struct folio_context {
    _opaque: [u8; 0],
}

/// Compute in float64, one key after the other: the oracle that Folio's own tests compare with. CPU only.
pub const FOLIO_CONTEXT_REFERENCE: u32 = 1;

/// Messages about failures that no status reports.
pub const FOLIO_LOG_ERROR: i32 = 1;
/// Also messages about what works less well than it could.
pub const FOLIO_LOG_WARNING: i32 = 2;
/// Also messages about what was chosen.
pub const FOLIO_LOG_INFO: i32 = 3;

/// Receives a message on the thread that called Folio, with no lock held. `message` is valid during the
/// call. It must not call Folio and must not throw.
pub type folio_log_fn =
    Option<unsafe extern "C" fn(user: *mut c_void, level: i32, message: *const c_char)>;

/// What a context is made from.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct folio_context_desc {
    /// sizeof(folio_context_desc).
    pub struct_size: u32,
    /// FOLIO_CONTEXT_…
    pub flags: u32,
    /// FOLIO_DEVICE_CPU or FOLIO_DEVICE_CUDA.
    pub device_type: i32,
    /// Device ordinal; 0 for the CPU.
    pub device_id: i32,
    /// CPU: threads that compute, the caller's among them, at most 1024; 0 or 1: only the calling thread. The
    /// others are started here and sleep between calls. CUDA and FOLIO_CONTEXT_REFERENCE: 0.
    pub num_threads: u32,
    /// The most talkative level that reaches `log`: FOLIO_LOG_…; 0 where log is NULL.
    pub log_level: i32,
    /// NULL for no messages.
    pub log: folio_log_fn,
    /// Passed to `log`.
    pub log_user: *mut c_void,
}

const _: () = assert!(size_of::<folio_context_desc>() == 40);

// SAFETY: repr(C), two u32 first, no padding (asserted by size); a function pointer is nullable.
unsafe impl Input for folio_context_desc {
    const NAME: &'static str = "folio_context_desc";
    const FIRST_SIZE: usize = 40;
    const FLAGS: u32 = FOLIO_CONTEXT_REFERENCE;
    type Parsed = (Target, Logger);

    unsafe fn parse(&self) -> Result<(Target, Logger)> {
        Ok((target(self)?, logger(self)?))
    }
}

impl Object for folio_context {
    type Value = Context;
    const PARAMETER: &'static str = "ctx";
    const NAME: &'static str = "folio_context";
}

/// The caller's callback and its argument.
struct Callback {
    log: unsafe extern "C" fn(*mut c_void, i32, *const c_char),
    user: *mut c_void,
}

// SAFETY: the header asks for a callback that may be called from any thread that calls Folio.
unsafe impl Send for Callback {}
// SAFETY: as above.
unsafe impl Sync for Callback {}

impl Callback {
    fn call(&self, level: Level, message: &str) {
        let Ok(message) = CString::new(message) else {
            return;
        };
        // SAFETY: the caller's function, with the caller's argument and a string that outlives the call.
        unsafe { (self.log)(self.user, level as i32, message.as_ptr()) }
    }
}

/// The number of devices of a type: 1 for FOLIO_DEVICE_CPU, the driver's count for FOLIO_DEVICE_CUDA, 0
/// where there is no driver and for other numbers. Never fails. For FOLIO_DEVICE_CUDA it opens and initialises
/// the driver; a context is opened by folio_context_create only.
///
/// Any thread, any time.
#[unsafe(no_mangle)]
pub extern "C" fn folio_device_count(device_type: i32) -> u32 {
    guard_value(0, || match device_type {
        FOLIO_DEVICE_CPU => 1,
        FOLIO_DEVICE_CUDA => cuda_device_count(),
        _ => 0,
    })
}

/// Opens a device.
///
/// @param desc what to open
/// @param out receives the context; destroy it with folio_context_destroy
/// @param err report of a failure, or NULL
/// @return FOLIO_OK, or INVALID_ARGUMENT, UNSUPPORTED, NO_DEVICE, NO_DRIVER, DRIVER_TOO_OLD,
///         OUT_OF_MEMORY, DRIVER
///
/// # Safety
/// `desc` points to as many bytes as its struct_size says, `out` to a pointer. Any thread.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn folio_context_create(
    desc: *const folio_context_desc,
    out: *mut *mut folio_context,
    err: *mut folio_error,
) -> folio_status {
    // SAFETY: the documented promises of the caller.
    unsafe {
        handle::create(out, err, || {
            sized::parse(desc).and_then(|(target, logger)| Context::new(target, logger))
        })
    }
}

/// Ends the caller's hold on a context; NULL is fine. Handles made from it stay usable. On CUDA the kernels are
/// unloaded with the last of them: what was launched or captured must be done by then.
///
/// # Safety
/// `ctx` is NULL or came from folio_context_create and is not used afterwards.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn folio_context_destroy(ctx: *mut folio_context) {
    // SAFETY: the documented promise of the caller.
    unsafe { handle::destroy(ctx) }
}

/// One call of an operator that has no handle of its own.
///
/// # Safety
/// `ctx` as in [`handle::shared`], `args` as in [`sized::parse`], `err` as in `guard`.
pub(super) unsafe fn operate<A: Input>(
    ctx: *const folio_context,
    args: *const A,
    stream: *mut c_void,
    err: *mut folio_error,
    operator: fn(&Context, &A::Parsed, Stream) -> Result<()>,
) -> folio_status {
    // SAFETY: the caller's promises.
    unsafe {
        handle::shared(ctx, err, |ctx| {
            operator(ctx, &sized::parse(args)?, Stream(stream as usize))
        })
    }
}

fn target(desc: &folio_context_desc) -> Result<Target> {
    let reference = desc.flags & FOLIO_CONTEXT_REFERENCE != 0;
    match desc.device_type {
        FOLIO_DEVICE_CPU if desc.device_id != 0 => Err(Error::NoDevice(format!(
            "device_id: {} is not accepted for FOLIO_DEVICE_CPU; 0 is",
            desc.device_id
        ))),
        FOLIO_DEVICE_CPU if reference && desc.num_threads != 0 => {
            Err(Error::InvalidArgument(format!(
                "num_threads: {} is not accepted with FOLIO_CONTEXT_REFERENCE; 0 is",
                desc.num_threads
            )))
        }
        FOLIO_DEVICE_CPU if reference => Ok(Target::Reference),
        FOLIO_DEVICE_CPU => Ok(Target::Cpu {
            num_threads: desc.num_threads,
        }),
        FOLIO_DEVICE_CUDA if reference => Err(Error::Unsupported(
            "flags: FOLIO_CONTEXT_REFERENCE is not supported with FOLIO_DEVICE_CUDA; FOLIO_DEVICE_CPU is".into(),
        )),
        FOLIO_DEVICE_CUDA if desc.num_threads != 0 => Err(Error::InvalidArgument(format!(
            "num_threads: {} is not accepted for FOLIO_DEVICE_CUDA; 0 is",
            desc.num_threads
        ))),
        FOLIO_DEVICE_CUDA => Ok(Target::Cuda {
            ordinal: desc.device_id,
        }),
        other => Err(Error::InvalidArgument(format!(
            "device_type: {other} is not accepted; FOLIO_DEVICE_CPU (1) or FOLIO_DEVICE_CUDA (2) is"
        ))),
    }
}

fn logger(desc: &folio_context_desc) -> Result<Logger> {
    let Some(log) = desc.log else {
        return match desc.log_level {
            0 => Ok(Logger::silent()),
            level => Err(Error::InvalidArgument(format!(
                "log_level: {level} is not accepted without log; 0 is"
            ))),
        };
    };
    let level = match desc.log_level {
        FOLIO_LOG_ERROR => Level::Error,
        FOLIO_LOG_WARNING => Level::Warning,
        FOLIO_LOG_INFO => Level::Info,
        other => {
            return Err(Error::InvalidArgument(format!(
                "log_level: {other} is not accepted; FOLIO_LOG_ERROR (1) to FOLIO_LOG_INFO (3) is"
            )));
        }
    };
    let callback = Callback {
        log,
        user: desc.log_user,
    };
    let sink: Sink = Arc::new(move |level, message| callback.call(level, message));
    Ok(Logger::new(sink, level))
}
