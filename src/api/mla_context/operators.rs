//! What an MLA context handle is made of, and where its current plan has it: the attention handles of new tokens and of
//! chunks, the tables of the chunks, and the memory of all of them.

use super::cuts::{Cut, CutTables, Cuts};
use super::memory::{Buffers, Memory};
use crate::api::Context;
use crate::api::attention::Attention;
use crate::api::batch::BatchInput;
use crate::backend::{Stream, Tables, Workspace};
use crate::error::Result;
use crate::problem::{MlaContextDesc, RecordPages};
use crate::tensor::Tensor;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The parts of a handle.
pub(super) struct Operators {
    pub context: Context,
    pub desc: MlaContextDesc,
    /// New tokens over themselves: where no request has context, straight to the output.
    pub alone: Attention,
    /// The same as the first part of a sum.
    pub first: Attention,
    /// New tokens over a chunk. A chunk alone is planned with the batch, one of several anew for every run.
    pub chunk: Mutex<Attention>,
    pub tables: Box<dyn Tables>,
    pub memory: Memory,
    pub cuts: Cuts,
}

/// What a run needs of the plan.
#[derive(Debug, Clone, Copy)]
pub(super) struct Planned {
    pub workspace: Workspace,
    pub buffers: Buffers,
    pub pages: RecordPages,
    pub num_tokens: i64,
}

impl Operators {
    /// The tables of a chunk.
    pub fn tables(&self, planned: &Planned, cut: &Cut) -> Result<CutTables> {
        cut.tables(&self.memory, self.numbers(planned))
    }

    /// The offsets of no request.
    pub fn zero(&self, planned: &Planned) -> Result<Tensor> {
        self.memory.table(self.numbers(planned), 0, 1)
    }

    /// Where the numbers of the tables are.
    fn numbers(&self, planned: &Planned) -> usize {
        let tables = planned.workspace.part(self.memory.tables);
        self.tables.address(&tables)
    }

    /// Plans attention over a chunk. Where lengths are on a device this is all in stream order.
    pub fn plan_chunk(
        &self,
        planned: &Planned,
        cut: &Cut,
        stream: Stream,
    ) -> Result<MutexGuard<'_, Attention>> {
        let tables = self.tables(planned, cut)?;
        let batch = BatchInput {
            qo_indptr: Some(tables.qo_indptr),
            kv_indptr: Some(tables.kv_indptr),
            ..BatchInput::default()
        };
        let part = planned.workspace.part(self.memory.chunk);
        let mut chunk = self.planned_chunk();
        let info = chunk.workspace();
        let bytes = (info.device_bytes, info.host_bytes);
        chunk.plan(&batch, &part, bytes, stream)?;
        Ok(chunk)
    }

    /// Attention over the chunk that was planned last.
    pub fn planned_chunk(&self) -> MutexGuard<'_, Attention> {
        self.chunk.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
