//! The kernel of an operator that has one for every problem, loaded at its first use, and its launch.
#![allow(unsafe_code)]

use std::sync::Arc;

use super::kernels::{Kernel, Kernels};
use crate::backend::Stream;
use crate::cuda::compiler::loader::Loader;
use crate::cuda::driver::{Context, Current, blocks_of};
use crate::cuda::kernels::keyless::Keyless;
use crate::error::Result;

const WARP: u32 = 32;

/// How many workers a launch has.
#[derive(Debug, Clone, Copy)]
pub enum Workers {
    /// Thread blocks.
    Blocks(u64),
    /// Warps, in as many blocks as they fill.
    Warps(u64),
}

/// A kernel on one device.
#[derive(Debug)]
pub struct KeylessKernel {
    table: &'static Keyless,
    kernels: Kernels<(), Kernel>,
}

impl KeylessKernel {
    /// Loads nothing yet. Messages name the operator.
    pub fn new(
        operator: &'static str,
        table: &'static Keyless,
        loader: &Arc<Loader>,
        context: &Arc<Context>,
    ) -> KeylessKernel {
        KeylessKernel {
            table,
            kernels: Kernels::new(operator, loader, context),
        }
    }

    /// As [`Kernels::enter`].
    pub fn enter(&self, stream: Stream) -> Result<Current<'_>> {
        self.kernels.enter(stream)
    }

    /// Enqueues so many workers. `field` is what a refusal of too many names.
    ///
    /// # Safety
    /// As [`Kernel::enqueue`].
    pub unsafe fn enqueue<P: Copy>(
        &self,
        params: &P,
        (field, workers): (&str, Workers),
        stream: Stream,
    ) -> Result<()> {
        let current = self.enter(stream)?;
        let kernel = self.kernels.get(&current, (), stream, |loader, cc| {
            let found = loader.find(self.table.candidates(cc), || self.table.unsupported(cc));
            found.map(Kernel::new)
        })?;
        let blocks = match workers {
            Workers::Blocks(blocks) => blocks,
            Workers::Warps(warps) => warps.div_ceil((kernel.threads() / WARP).into()),
        };
        // SAFETY: the caller's promise.
        unsafe { kernel.enqueue(&current, params, blocks_of(field, blocks)?, stream) }
    }
}
