//! A context: one backend on one device, and where its messages go.

use crate::backend::{Backend, Stream, Target, Threads, open, open_cpu};
use crate::error::{Error, Result};
use crate::log::{Level, Logger};
use crate::tensor::Device;
use std::sync::Arc;

/// Shared by every handle that was made from it; the last one to go closes the backend.
#[derive(Debug, Clone)]
pub struct Context {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    backend: Box<dyn Backend>,
    logger: Logger,
}

impl Context {
    /// Opens a backend.
    pub fn new(target: Target, logger: Logger) -> Result<Context> {
        let backend = open(target, logger.clone())?;
        Ok(Context::opened(backend, logger))
    }

    /// Opens the CPU on threads of the caller's choice.
    pub fn on_threads(threads: &Threads, logger: Logger) -> Result<Context> {
        let backend = open_cpu(threads, &logger)?;
        Ok(Context::opened(backend, logger))
    }

    fn opened(backend: Box<dyn Backend>, logger: Logger) -> Context {
        let context = Context::with_backend(backend, logger);
        context.log(
            Level::Info,
            format_args!("context: {:?}", context.backend()),
        );
        context
    }

    /// A context around a backend of the caller's.
    pub fn with_backend(backend: Box<dyn Backend>, logger: Logger) -> Context {
        Context {
            inner: Arc::new(Inner { backend, logger }),
        }
    }

    /// The device that tensors must live on.
    pub fn device(&self) -> Device {
        self.inner.backend.device()
    }

    pub(super) fn backend(&self) -> &dyn Backend {
        self.inner.backend.as_ref()
    }

    /// The CPU has no streams: work is done when a call returns.
    pub(super) fn check_stream(&self, stream: Stream) -> Result<()> {
        if self.device() != Device::Cpu || stream == Stream::default() {
            return Ok(());
        }
        Err(Error::DeviceMismatch(format!(
            "stream: {:#x} is not accepted on the CPU; NULL is",
            stream.0
        )))
    }

    pub(super) fn log(&self, level: Level, message: std::fmt::Arguments<'_>) {
        self.inner.logger.log(level, message);
    }
}
