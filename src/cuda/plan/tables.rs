//! Tables of numbers in device memory, copied there from the page-locked half of the workspace.
#![allow(unsafe_code)]

use std::sync::Arc;

use super::staging::{BUFFERS, Ring};
use crate::backend::{Stream, Tables, Workspace, WorkspaceInfo};
use crate::cuda::driver::Context;
use crate::error::{Error, Result};
use crate::plan::PARTS_ALIGNMENT;

/// The tables of one handle.
pub struct DeviceTables {
    context: Arc<Context>,
    ring: Ring,
    bytes: usize,
}

impl DeviceTables {
    /// So many numbers.
    pub fn new(context: &Arc<Context>, count: usize) -> Result<DeviceTables> {
        Ok(DeviceTables {
            context: Arc::clone(context),
            ring: Ring::new(context)?,
            bytes: count.saturating_mul(size_of::<i32>()),
        })
    }
}

impl Tables for DeviceTables {
    fn workspace(&self) -> WorkspaceInfo {
        WorkspaceInfo {
            device_bytes: self.bytes,
            host_bytes: self.bytes.saturating_mul(BUFFERS),
            alignment: PARTS_ALIGNMENT,
        }
    }

    fn address(&self, workspace: &Workspace) -> usize {
        workspace.device
    }

    fn write(
        &mut self,
        workspace: &Workspace,
        stream: Stream,
        fill: &mut dyn FnMut(&mut [i32]),
    ) -> Result<()> {
        let current = self.context.enter()?;
        current.check_stream(stream)?;
        if current.is_capturing(stream)? {
            return Err(Error::Capture(
                "plan: lengths in host memory are not accepted while the stream is captured; a plan before it is"
                    .into(),
            ));
        }
        let fill = |bytes: &mut [u8]| {
            // SAFETY: buffers are whole numbers long and begin on multiples of them; any bytes are numbers.
            let (_, numbers, _) = unsafe { bytes.align_to_mut::<i32>() };
            fill(numbers);
            Ok(())
        };
        // SAFETY: `api` checked that the workspace has the size that `workspace` asks for; the host keeps it for as
        // long as the plan.
        unsafe {
            self.ring.upload(
                &current,
                (workspace.host, self.bytes),
                (workspace.device as u64, self.bytes),
                stream,
                fill,
            )
        }
    }
}
