//! The operators' kernels, each loaded at its first use, and their launch. What they compute is said in
//! the operators' own files.
#![allow(unsafe_code)]

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use crate::backend::Stream;
use crate::cuda::compiler::loader::Loader;
use crate::cuda::driver::{Context, Current, Function, Launch};
use crate::cuda::kernels::{self, Op, Query, Row, Types};
use crate::error::{Error, Result};

/// Kernels of the operators on one device.
#[derive(Debug)]
pub struct Kernels {
    loader: Arc<Loader>,
    context: Arc<Context>,
    loaded: Mutex<HashMap<(Op, Types), Kernel>>,
}

type Kernel = (&'static Row, Function);

impl Kernels {
    /// Loads nothing yet.
    pub fn new(loader: &Arc<Loader>, context: &Arc<Context>) -> Kernels {
        Kernels {
            loader: Arc::clone(loader),
            context: Arc::clone(context),
            loaded: Mutex::default(),
        }
    }

    /// Enqueues the kernel of an operator.
    pub(super) fn enqueue<P: Copy>(
        &self,
        key: (Op, Types),
        params: &P,
        blocks: u32,
        stream: Stream,
    ) -> Result<()> {
        let current = self.context.enter()?;
        current.check_stream(stream)?;
        let (row, function) = self.kernel(&current, key, stream)?;
        let launch = Launch {
            grid: [blocks, 1, 1],
            threads: row.shape.threads,
            cluster: 1,
            dependent: false,
            stream,
        };
        // SAFETY: `P` is the parameter of the operator's kernel; the addresses are the caller's tensors,
        // whose extents `api` checked.
        unsafe { launch.enqueue(&current, &function, params, &[]) }
    }

    /// Loading a module is not possible while a stream is captured, so the first call may not be.
    fn kernel(
        &self,
        current: &Current<'_>,
        (op, types): (Op, Types),
        stream: Stream,
    ) -> Result<Kernel> {
        let mut loaded = self.loaded.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((row, function)) = loaded.get(&(op, types)) {
            return Ok((row, function.clone()));
        }
        if current.is_capturing(stream)? {
            return Err(Error::Capture(format!(
                "{}: its first call on a device loads code and is not accepted while the stream is captured; a call before the capture is",
                op.name()
            )));
        }
        let load = |op| self.loader.find(query(op, types, current), |_| true);
        // Which of the merges a call takes is not the caller's concern: the first loads both.
        if let Some(other) = other_merge(op) {
            loaded.insert((other, types), load(other)?);
        }
        let kernel = load(op)?;
        loaded.insert((op, types), kernel.clone());
        Ok(kernel)
    }
}

fn query(op: Op, types: Types, current: &Current<'_>) -> Query {
    Query {
        op,
        compute_capability: current.context().device().compute_capability,
        types,
        head_dim_qk: 0,
        head_dim_vo: 0,
    }
}

/// Threads of a block of the kernel.
pub(super) fn kernel_threads(op: Op, types: Types) -> u32 {
    let row = kernels::table()
        .iter()
        .find(|row| row.op == op && row.types == types);
    row.map_or(1, |row| row.shape.threads)
}

fn other_merge(op: Op) -> Option<Op> {
    match op {
        Op::MergeState => Some(Op::MergeStates),
        Op::MergeStates => Some(Op::MergeState),
        _ => None,
    }
}
