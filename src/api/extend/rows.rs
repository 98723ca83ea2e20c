//! Which rows of the outputs are the batch's, for the merge in a graph: it is launched for the rows of the largest batch,
//! and those beyond the present one keep what they hold.
#![allow(unsafe_code)]

use crate::api::Context;
use crate::backend::{Stream, Tables, Workspace, WorkspaceInfo};
use crate::dtype::DType;
use crate::error::Result;
use crate::tensor::{Device, Tensor};

/// A byte per row, in the workspace.
pub(super) struct BatchRows {
    tables: Box<dyn Tables>,
    device: Device,
    count: usize,
}

impl BatchRows {
    /// Of batches of up to `count` rows.
    pub fn new(context: &Context, count: u32) -> Result<BatchRows> {
        let count = count as usize;
        Ok(BatchRows {
            tables: context.backend().tables(count.div_ceil(4))?,
            device: context.device(),
            count,
        })
    }

    pub fn workspace(&self) -> WorkspaceInfo {
        self.tables.workspace()
    }

    /// Marks the first `num_tokens` rows; the marks, `[count]` bytes.
    pub fn mark(
        &mut self,
        num_tokens: usize,
        workspace: &Workspace,
        at: Workspace,
        stream: Stream,
    ) -> Result<Tensor> {
        let workspace = workspace.part(at);
        self.tables.write(&workspace, stream, &mut |numbers| {
            for (first, four) in (0..).step_by(4).zip(numbers) {
                let mark = |row: usize| u8::from(first + row < num_tokens);
                *four = i32::from_ne_bytes([0, 1, 2, 3].map(mark));
            }
        })?;
        let data = self.tables.address(&workspace) as *mut u8;
        // SAFETY: the tables have a number for every four rows, and are the plan's.
        unsafe {
            Tensor::new(
                "workspace",
                data,
                self.device,
                DType::U8,
                &[self.count as i64],
                None,
            )
        }
    }
}
