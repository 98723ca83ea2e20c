//! The CUDA backend: what `api` gets for a device.

use std::sync::Arc;

use super::attention::CudaAttention;
use super::attention_kernel::AttentionKernel;
use super::context::Context;
use super::driver::Driver;
use super::loader::Loader;
use super::operators::Operators;
use super::sm90_decode::Sm90Decode;
use super::sm90_prefill::Sm90Prefill;
use crate::backend::{Attention, Backend, Stream};
use crate::error::Result;
use crate::log::Logger;
use crate::problem::{AppendArgs, AttentionDesc, Checked, MergeArgs, MergeStatesArgs};
use crate::tensor::Device;

/// Operators on one CUDA device.
#[derive(Debug)]
pub struct CudaBackend {
    context: Arc<Context>,
    loader: Loader,
    operators: Operators,
}

impl CudaBackend {
    /// Retains the primary context of a device. Messages about later choices go to `logger`.
    ///
    /// # Errors
    /// See [`Driver::get`] and [`Context::retain`].
    pub fn new(ordinal: i32, logger: Logger) -> Result<CudaBackend> {
        let context = Context::retain(Driver::get()?, ordinal)?;
        Ok(CudaBackend {
            loader: Loader::new(&context, logger)?,
            context,
            operators: Operators::default(),
        })
    }

    /// The Hopper kernel for a problem, where there is one: few rows are decode's, many prefill's.
    fn hopper_kernel(&self, desc: &AttentionDesc) -> Result<Option<Box<dyn AttentionKernel>>> {
        if let Some(kernel) = Sm90Decode::load(&self.loader, &self.context, desc)? {
            return Ok(Some(Box::new(kernel)));
        }
        let kernel = Sm90Prefill::load(&self.loader, &self.context, desc)?;
        Ok(kernel.map(|kernel| Box::new(kernel) as Box<dyn AttentionKernel>))
    }
}

impl Backend for CudaBackend {
    fn device(&self) -> Device {
        Device::Cuda(self.context.device().ordinal)
    }

    fn attention(&self, desc: &AttentionDesc) -> Result<Box<dyn Attention>> {
        let special = self.hopper_kernel(desc)?;
        let attention = CudaAttention::new(&self.loader, &self.context, desc, special)?;
        Ok(Box::new(attention))
    }

    fn append(&self, args: &Checked<AppendArgs>, stream: Stream) -> Result<()> {
        self.operators
            .append(&self.loader, &self.context, args, stream)
    }

    fn merge(&self, args: &Checked<MergeArgs>, stream: Stream) -> Result<()> {
        self.operators
            .merge(&self.loader, &self.context, args, stream)
    }

    fn merge_states(&self, args: &Checked<MergeStatesArgs>, stream: Stream) -> Result<()> {
        self.operators
            .merge_states(&self.loader, &self.context, args, stream)
    }
}
