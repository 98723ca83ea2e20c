//! Kernels of an operator, each loaded at its first use, and their launch. What they compute, and by which
//! key they are found, is said in the operators' own files.
#![allow(unsafe_code)]

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::backend::Stream;
use crate::cuda::compiler::loader::Loader;
use crate::cuda::driver::{Context, Current, Function, Launch};
use crate::cuda::kernels::Row;
use crate::error::{Error, Result};

/// A kernel that can be launched.
#[derive(Debug)]
pub struct Kernel {
    row: &'static Row,
    function: Function,
}

impl Kernel {
    /// Takes what a loader found.
    pub fn new<R: AsRef<Row>>((row, function): (&'static R, Function)) -> Kernel {
        let row = row.as_ref();
        Kernel { row, function }
    }

    /// Threads of a block.
    pub fn threads(&self) -> u32 {
        self.row.threads
    }

    /// Enqueues so many blocks.
    ///
    /// # Safety
    /// `P` must be the kernel's parameter, and every address in it valid until the kernel has run.
    pub unsafe fn enqueue<P: Copy>(
        &self,
        current: &Current<'_>,
        params: &P,
        blocks: u32,
        stream: Stream,
    ) -> Result<()> {
        let launch = Launch {
            grid: [blocks, 1, 1],
            threads: self.row.threads,
            cluster: 1,
            dependent: false,
            stream,
        };
        // SAFETY: the caller's promise.
        unsafe { launch.enqueue(current, &self.function, params, &[]) }
    }
}

/// What is loaded of one operator on one device, by the operator's key.
#[derive(Debug)]
pub struct Kernels<K, V> {
    /// Named in messages.
    operator: &'static str,
    loader: Arc<Loader>,
    context: Arc<Context>,
    loaded: Mutex<HashMap<K, Arc<V>>>,
}

impl<K: Copy + Eq + Hash, V> Kernels<K, V> {
    /// Loads nothing yet.
    pub fn new(operator: &'static str, loader: &Arc<Loader>, context: &Arc<Context>) -> Self {
        Kernels {
            operator,
            loader: Arc::clone(loader),
            context: Arc::clone(context),
            loaded: Mutex::default(),
        }
    }

    /// Makes the device's context current, and refuses streams of another.
    pub fn enter(&self, stream: Stream) -> Result<Current<'_>> {
        let current = self.context.enter()?;
        current.check_stream(stream)?;
        Ok(current)
    }

    /// The kernels of a key; `load` finds them at the first use, given the device's compute capability.
    /// Loading a module is not possible while a stream is captured, so the first use may not be.
    pub fn get(
        &self,
        current: &Current<'_>,
        key: K,
        stream: Stream,
        load: impl FnOnce(&Loader, (u32, u32)) -> Result<V>,
    ) -> Result<Arc<V>> {
        if let Some(kernels) = self.loaded().get(&key) {
            return Ok(Arc::clone(kernels));
        }
        if current.is_capturing(stream)? {
            return Err(Error::Capture(format!(
                "{}: its first call on a device loads code and is not accepted while the stream is captured; a call before the capture is",
                self.operator
            )));
        }
        self.load(key, load)
    }

    /// The same where no stream is captured: a handle that is being created makes its later runs calls that can be.
    pub fn prepare(
        &self,
        key: K,
        load: impl FnOnce(&Loader, (u32, u32)) -> Result<V>,
    ) -> Result<()> {
        let _current = self.context.enter()?;
        self.load(key, load).map(|_| ())
    }

    fn loaded(&self) -> MutexGuard<'_, HashMap<K, Arc<V>>> {
        self.loaded.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn load(&self, key: K, load: impl FnOnce(&Loader, (u32, u32)) -> Result<V>) -> Result<Arc<V>> {
        let mut loaded = self.loaded();
        if let Some(kernels) = loaded.get(&key) {
            return Ok(Arc::clone(kernels));
        }
        let kernels = Arc::new(load(
            &self.loader,
            self.context.device().compute_capability,
        )?);
        loaded.insert(key, Arc::clone(&kernels));
        Ok(kernels)
    }
}
