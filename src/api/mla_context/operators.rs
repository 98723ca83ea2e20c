//! What an MLA context handle is made of, and where its current plan has it: the attention handles of new tokens and of
//! chunks, the tables of the chunks, and the memory of all of them.

use super::cuts::{Cut, CutTables, Cuts, NO_KEYS, ZERO};
use super::desc::Problems;
use super::memory::{Buffers, Memory, on_host};
use crate::api::Context;
use crate::api::attention::Attention;
use crate::api::batch::BatchInput;
use crate::backend::{Stream, Tables, Workspace};
use crate::error::Result;
use crate::problem::{Checked, CopyWeightsArgs, HostBatch, MlaContextDesc, RecordPages};
use crate::tensor::Tensor;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The parts of a handle.
pub(super) struct Operators {
    pub context: Context,
    pub desc: MlaContextDesc,
    /// New tokens over themselves.
    pub alone: Attention,
    /// New tokens over themselves and over the last chunk at once, where a kernel does that.
    pub with_last_chunk: Option<WithLastChunk>,
    /// New tokens over a chunk. A chunk alone is planned with the batch, one of several anew for every run.
    pub chunk: Mutex<Attention>,
    pub tables: Box<dyn Tables>,
    pub memory: Memory,
    pub cuts: Cuts,
}

/// Attention over new tokens and a chunk.
pub(super) struct WithLastChunk {
    pub attention: Attention,
    /// What tokens of the chunk are counted in.
    pub step: u32,
}

impl WithLastChunk {
    /// `alone`: the handle of new tokens over themselves, whose kernel says whether it does more.
    pub fn of(
        context: &Context,
        problems: &Problems,
        alone: &Attention,
    ) -> Result<Option<WithLastChunk>> {
        let Some(step) = alone
            .context_step()
            .filter(|&step| can_count(&problems.desc, step))
        else {
            return Ok(None);
        };
        let attention = Attention::new(context, problems.with_last_chunk(step))?;
        Ok((attention.context_step() == Some(step)).then_some(WithLastChunk { attention, step }))
    }
}

/// Whether int32 numbers reach over a chunk whose requests take whole steps, and the new tokens.
fn can_count(desc: &MlaContextDesc, step: u32) -> bool {
    let [requests, step, chunk, new, longest] = [
        desc.max_batch_size,
        step,
        desc.max_chunk_tokens,
        desc.max_num_tokens,
        desc.max_kv_len,
    ]
    .map(u64::from);
    (requests * step + chunk + new).max(longest + step) <= i32::MAX as u64
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

    /// Whether chunks are added to a sum: the last one is not, where it is attended with the new tokens.
    pub fn has_sum(&self) -> bool {
        self.cuts.list().len() > usize::from(self.with_last_chunk.is_some())
    }

    /// The offsets of no request.
    pub fn zero(&self, planned: &Planned) -> Result<Tensor> {
        self.memory.table(self.numbers(planned), ZERO, 1)
    }

    /// Where the tokens of each request are in the last chunk.
    pub fn last_chunk_indptr(&self, planned: &Planned) -> Result<Tensor> {
        let (first, count) = self.cuts.last_chunk_indptr();
        self.memory.table(self.numbers(planned), first, count)
    }

    /// Plans new tokens together with the last chunk.
    pub fn plan_with_last_chunk(
        &mut self,
        batch: &HostBatch<'_>,
        workspace: &Workspace,
        stream: Stream,
    ) -> Result<()> {
        let Some(with_last_chunk) = &mut self.with_last_chunk else {
            return Ok(());
        };
        let kv_indptr = self.cuts.keys_with_last_chunk(batch, with_last_chunk.step);
        let input = BatchInput {
            qo_indptr: Some(on_host(batch.qo_indptr)?),
            kv_indptr: Some(on_host(kv_indptr)?),
            ..BatchInput::default()
        };
        let part = workspace.part(self.memory.with_last_chunk);
        let attention = &mut with_last_chunk.attention;
        let info = attention.workspace();
        let bytes = (info.device_bytes, info.host_bytes);
        attention.plan(&input, &part, bytes, stream)
    }

    /// Makes the lse of rows that of no keys.
    pub fn clear(&self, planned: &Planned, lse: Tensor, stream: Stream) -> Result<()> {
        let shape = [0, 1].map(|dim| lse.extent(dim));
        let numbers = self.numbers(planned);
        let copy = CopyWeightsArgs {
            source: self.memory.repeated(numbers, NO_KEYS, shape)?,
            target: lse.insert_dim(0),
        };
        let backend = self.context.backend();
        backend.copy_weights(&Checked::new(copy), stream)
    }

    /// Where the numbers of the tables are.
    fn numbers(&self, planned: &Planned) -> usize {
        let tables = planned.workspace.part(self.memory.tables);
        self.tables.address(&tables)
    }

    /// Plans attention over a chunk: by what the host knows where it is alone, else in stream order.
    pub fn plan_chunk(
        &self,
        planned: &Planned,
        cut: &Cut,
        stream: Stream,
    ) -> Result<MutexGuard<'_, Attention>> {
        let (qo_indptr, kv_indptr) = match self.cuts.on_host() {
            Some((qo_indptr, kv_indptr)) => (on_host(qo_indptr)?, on_host(kv_indptr)?),
            None => {
                let tables = self.tables(planned, cut)?;
                (tables.qo_indptr, tables.kv_indptr)
            }
        };
        let batch = BatchInput {
            qo_indptr: Some(qo_indptr),
            kv_indptr: Some(kv_indptr),
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
