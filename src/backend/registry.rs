//! The backends that are compiled in.

use super::{Backend, Threads};
use crate::cpu::CpuBackend;
use crate::error::Result;
use crate::log::Logger;
use crate::reference::ReferenceBackend;

/// Which backend a context runs on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Target {
    /// The CPU, with this many threads of Folio's own on the CPUs that the process had when the library was loaded.
    Cpu {
        /// Threads, the caller's among them. 0: one for each of the CPUs.
        num_threads: u32,
    },
    /// The float64 oracle on the calling thread.
    Reference,
    /// The CUDA device with this ordinal.
    Cuda {
        /// Device ordinal as the driver counts.
        ordinal: i32,
    },
}

/// Opens a backend, which says to `logger` what it chose later on.
pub fn open(target: Target, logger: Logger) -> Result<Box<dyn Backend>> {
    match target {
        Target::Reference => Ok(Box::new(ReferenceBackend)),
        Target::Cpu { num_threads } => {
            let cpus = None;
            open_cpu(&Threads::Own { num_threads, cpus }, &logger)
        }
        Target::Cuda { ordinal } => open_cuda(ordinal, logger),
    }
}

/// Opens the CPU on some threads. Says to `logger` where they get in each other's way.
pub fn open_cpu(threads: &Threads, logger: &Logger) -> Result<Box<dyn Backend>> {
    Ok(Box::new(CpuBackend::on_threads(threads, logger)?))
}

#[cfg(feature = "cuda")]
fn open_cuda(ordinal: i32, logger: Logger) -> Result<Box<dyn Backend>> {
    Ok(Box::new(crate::cuda::backend::CudaBackend::new(
        ordinal, logger,
    )?))
}

#[cfg(not(feature = "cuda"))]
fn open_cuda(_: i32, _: Logger) -> Result<Box<dyn Backend>> {
    Err(crate::error::Error::Unsupported(
        "device_type: this build of Folio has no CUDA backend; use FOLIO_DEVICE_CPU".into(),
    ))
}

/// CUDA devices; 0 where there is no driver.
#[cfg(feature = "cuda")]
pub fn cuda_device_count() -> u32 {
    crate::cuda::driver::device_count()
}

/// CUDA devices; this build drives none.
#[cfg(not(feature = "cuda"))]
pub fn cuda_device_count() -> u32 {
    0
}
