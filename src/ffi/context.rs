//! Contexts and devices.

use super::error::folio_error;
use super::guard_value::guard_value;
use super::handle::{self, Object};
use super::sized::{self, Input};
use super::status::folio_status;
use crate::api::{Context, CpuSet, HostThreads, Stream, Target, Tasks, Threads, cuda_device_count};
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

/// One task of a folio_parallel_for_fn.
pub type folio_task_fn = Option<unsafe extern "C" fn(task_data: *mut c_void, index: u32)>;

/// Runs tasks on threads of the host's: OpenMP, TBB, folly, a pool of its own. It calls `task(task_data, index)` for every
/// index below num_tasks, each exactly once, and returns when all of these calls have returned. They may be made by any
/// threads, that of the caller included, in any order, at the same time or one after the other: no task waits for another
/// one. There are at most num_threads tasks of one call, and one call at a time of a context; small work is done without
/// one.
///
/// A task does not throw, and what fails in it is reported by the function that needed it. parallel_for must not throw
/// either. Until it returns, the thread that called it must not call a function of this context or of its handles. A
/// thread that takes up other work of the host's while it waits does (TBB: this_task_arena::isolate prevents it).
///
/// If an index was left out, called twice or is none, or if the context was called within the call, the function that
/// needed the threads answers FOLIO_ERR_INTERNAL; its outputs may then be written in part. Calls of a task that are made
/// after parallel_for has returned do nothing, while the context or a handle of it exists.
pub type folio_parallel_for_fn = Option<
    unsafe extern "C" fn(
        user: *mut c_void,
        num_tasks: u32,
        task: folio_task_fn,
        task_data: *mut c_void,
    ),
>;

/// What a context is made from.
///
/// Threads of a CPU context. Either Folio starts its own, and the caller's computes with them; or the host's compute
/// (parallel_for). Folio's own are bound to their CPUs, to all of them together, and sleep between calls; the caller's
/// stays where the host has put it. CPUs are those of `cpus`, or those that the process's main thread had when the library
/// was loaded. They are not those of the creating thread, as OpenMP binds its threads to one CPU each. If the host binds
/// its main thread before it loads Folio, it should pass `cpus`.
///
/// If num_threads is larger than the number of CPUs that these threads and the creating one have together, a warning says
/// so to `log`, and only as many threads compute. Results follow from num_threads in any case.
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
    /// CPU: threads that compute, the caller's among them, at most 1024. 0: one for each of the CPUs; in a struct of 40
    /// bytes, that of 0.1.0: 1. 1: only the calling thread. With parallel_for: threads of the host's that work at a time, 1
    /// or more. CUDA and FOLIO_CONTEXT_REFERENCE: 0.
    pub num_threads: u32,
    /// The most talkative level that reaches `log`: FOLIO_LOG_…; 0 where log is NULL.
    pub log_level: i32,
    /// NULL for no messages.
    pub log: folio_log_fn,
    /// Passed to `log`.
    pub log_user: *mut c_void,
    /// CPU: `[num_cpus]` the CPUs of Folio's own threads, by the numbers that Linux gives them, each once; read during the
    /// call. A CPU that is not there, or that the process may not use, is refused; so is a list on other systems. NULL:
    /// those of the process when the library was loaded. CUDA, FOLIO_CONTEXT_REFERENCE and parallel_for: NULL.
    pub cpus: *const u32,
    /// CPU: what runs Folio's work on threads of the host's, for as long as the context or a handle of it exists; NULL:
    /// Folio has its own. CUDA and FOLIO_CONTEXT_REFERENCE: NULL.
    pub parallel_for: folio_parallel_for_fn,
    /// Passed to `parallel_for`; NULL without it.
    pub parallel_for_user: *mut c_void,
    /// CPUs in the list; 0 where it is NULL.
    pub num_cpus: u32,
    /// 0.
    pub reserved: u32,
}

const _: () = assert!(size_of::<folio_context_desc>() == 72);

/// The size of the struct in 0.1.0, where a `num_threads` of 0 was the calling thread alone.
const FIRST_SIZE: usize = 40;

// SAFETY: repr(C), two u32 first, no padding (asserted by size); a function pointer is nullable.
unsafe impl Input for folio_context_desc {
    const NAME: &'static str = "folio_context_desc";
    const FIRST_SIZE: usize = FIRST_SIZE;
    const FLAGS: u32 = FOLIO_CONTEXT_REFERENCE;
    type Parsed = (Wanted, Logger);

    unsafe fn parse(&self) -> Result<(Wanted, Logger)> {
        sized::reserved("folio_context_desc.reserved", self.reserved)?;
        let target = target(self)?;
        let wanted = match target {
            // SAFETY: the caller's promise.
            Target::Cpu { num_threads } => Wanted::Cpu(unsafe { threads(self, num_threads) }?),
            Target::Reference | Target::Cuda { .. } => {
                without_threads(self)?;
                Wanted::Other(target)
            }
        };
        Ok((wanted, logger(self)?))
    }
}

/// What a desc asks for.
pub(super) enum Wanted {
    Cpu(Threads),
    Other(Target),
}

impl Wanted {
    fn open(&self, logger: Logger) -> Result<Context> {
        match self {
            Wanted::Cpu(threads) => Context::on_threads(threads, logger),
            Wanted::Other(target) => Context::new(*target, logger),
        }
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
            sized::parse(desc).and_then(|(wanted, logger)| wanted.open(logger))
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
            num_threads: match desc.struct_size as usize {
                FIRST_SIZE => desc.num_threads.max(1),
                _ => desc.num_threads,
            },
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

/// The threads of a CPU context.
///
/// # Safety
/// `desc.cpus` is NULL or points to `num_cpus` numbers.
unsafe fn threads(desc: &folio_context_desc, num_threads: u32) -> Result<Threads> {
    // SAFETY: the caller's promise.
    let cpus = unsafe { cpus(desc) }?;
    let Some(parallel_for) = desc.parallel_for else {
        without_user(desc)?;
        return Ok(Threads::Own { num_threads, cpus });
    };
    if cpus.is_some() {
        return Err(Error::InvalidArgument(
            "cpus: a list is not accepted with parallel_for, whose threads the host binds; NULL is"
                .into(),
        ));
    }
    let user = desc.parallel_for_user;
    let host = Arc::new(Host { parallel_for, user });
    Ok(Threads::Host { num_threads, host })
}

/// # Safety
/// `desc.cpus` is NULL or points to `num_cpus` numbers.
unsafe fn cpus(desc: &folio_context_desc) -> Result<Option<Box<CpuSet>>> {
    if desc.cpus.is_null() {
        return match desc.num_cpus {
            0 => Ok(None),
            count => Err(Error::InvalidArgument(format!(
                "num_cpus: {count} is not accepted without cpus; 0 is"
            ))),
        };
    }
    if !desc.cpus.is_aligned() {
        return Err(Error::InvalidArgument(format!(
            "cpus: {:p} is not accepted; an address that is a multiple of 4 is",
            desc.cpus
        )));
    }
    // SAFETY: the caller's promise.
    let list = unsafe { std::slice::from_raw_parts(desc.cpus, desc.num_cpus as usize) };
    Ok(Some(Box::new(CpuSet::of(list)?)))
}

/// Refuses what only a CPU context has.
fn without_threads(desc: &folio_context_desc) -> Result<()> {
    let fields = [
        ("cpus", desc.cpus.is_null(), "NULL"),
        ("num_cpus", desc.num_cpus == 0, "0"),
        ("parallel_for", desc.parallel_for.is_none(), "NULL"),
    ];
    match fields.iter().find(|(_, is_default, _)| !is_default) {
        None => without_user(desc),
        Some((name, _, default)) => Err(Error::InvalidArgument(format!(
            "{name}: a value is accepted for FOLIO_DEVICE_CPU without FOLIO_CONTEXT_REFERENCE only; {default} is here"
        ))),
    }
}

/// Refuses an argument for a function that there is not.
fn without_user(desc: &folio_context_desc) -> Result<()> {
    if desc.parallel_for_user.is_null() {
        return Ok(());
    }
    Err(Error::InvalidArgument(format!(
        "parallel_for_user: {:p} is not accepted without parallel_for; NULL is",
        desc.parallel_for_user
    )))
}

/// The caller's threads.
#[derive(Debug)]
struct Host {
    parallel_for: unsafe extern "C" fn(*mut c_void, u32, folio_task_fn, *mut c_void),
    user: *mut c_void,
}

// SAFETY: the header asks for a function that may be called from any thread that calls Folio.
unsafe impl Send for Host {}
// SAFETY: as above.
unsafe impl Sync for Host {}

impl HostThreads for Host {
    fn parallel_for(&self, num_tasks: u32, tasks: &Arc<dyn Tasks>) {
        let data = std::ptr::from_ref(tasks).cast_mut().cast();
        // SAFETY: the caller's function, with the caller's argument, and a task with its data.
        unsafe { (self.parallel_for)(self.user, num_tasks, Some(run_task), data) }
    }
}

/// # Safety
/// `tasks` is what [`Host::parallel_for`] was given: the pool's own, which lives as long as the context and its handles.
unsafe extern "C" fn run_task(tasks: *mut c_void, index: u32) {
    // SAFETY: the promise. The clone outlives a context that ends while the task does.
    let tasks = unsafe { Arc::clone(&*tasks.cast::<Arc<dyn Tasks>>()) };
    tasks.run(index);
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
