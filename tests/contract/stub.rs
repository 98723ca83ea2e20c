//! A backend that computes nothing: what the API layer promises over any backend is tested over it.

use folio::api::{Context, Stream, Workspace, WorkspaceInfo};
use folio::backend::{
    Attention, AttentionOps, Backend, CacheOps, IndexOps, MergeOps, ProjectionOps, TreeOps,
};
use folio::error::{Error, Result};
use folio::log::Logger;
use folio::problem::*;
use folio::tensor::Device;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};

/// Of one device. Its plans need `workspace` and fail on demand.
#[derive(Debug, Clone)]
pub struct Stub {
    pub device: Device,
    pub workspace: WorkspaceInfo,
    pub fails: Arc<AtomicBool>,
}

impl Stub {
    /// One that needs no memory.
    pub fn new(device: Device) -> Stub {
        Stub {
            device,
            workspace: WorkspaceInfo::default(),
            fails: Arc::default(),
        }
    }

    pub fn context(self) -> Context {
        Context::with_backend(Box::new(self), Logger::silent())
    }
}

impl Backend for Stub {
    fn device(&self) -> Device {
        self.device
    }
}

impl IndexOps for Stub {}

impl AttentionOps for Stub {
    fn attention(&self, _: &AttentionDesc) -> Result<Box<dyn Attention>> {
        Ok(Box::new(self.clone()))
    }
}

impl CacheOps for Stub {}

impl MergeOps for Stub {}

impl ProjectionOps for Stub {}

impl TreeOps for Stub {}

impl Attention for Stub {
    fn kernel(&self) -> &str {
        "stub"
    }

    fn tiling(&self) -> Tiling {
        Tiling {
            q_tile: 16,
            q_parts: 1,
            kv_unit: 16,
            unit_bytes: u32::MAX,
            max_splits: 4,
            max_shares: 0,
            tail: TailCosts::NO_TAIL,
            takes_shares: false,
            least_gain: 0,
            rows_of_unit: 0,
            invariant_chunk: 64,
            combine_units: 0,
            own_key_bytes: 0,
            workers: Workers::ONE,
        }
    }

    fn workspace(&self) -> WorkspaceInfo {
        self.workspace
    }

    fn plan(&mut self, _: &Batch<'_>, _: &WorkList, _: &Workspace, _: Stream) -> Result<()> {
        match self.fails.load(SeqCst) {
            true => Err(Error::Driver("plan: the stub was told to fail".into())),
            false => Ok(()),
        }
    }

    fn run(&self, _: &Checked<AttentionArgs>, _: Stream) -> Result<()> {
        Ok(())
    }
}
