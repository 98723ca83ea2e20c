//! The MLA context handle: attention of new tokens over themselves, and chunk by chunk over the cached context of their
//! requests, in bounded memory. It is made of operators that every backend has: attention with keys in two parts, the
//! gather of latent records, the up-projection, and merges. Parts are summed up in fp32 and rounded once.
//!
//! Where the context of all requests is cut is decided in `plan::ContextChunks`. A chunk is attended by the rows of those
//! requests only that have tokens in it. One exception: a captured graph launches the same work for every plan, so there
//! all rows attend as many chunks as any batch has.

mod args;
mod desc;
mod memory;

use super::attention::{Attention, check_workspace};
use super::batch::{self, BatchInput, Scratch};
use super::mla_cache::{checked_gather, mla_gather};
use super::projection::up_project;
use super::{Context, merge};
use crate::backend::{Stream, Tables, Workspace, WorkspaceInfo};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::log::Level;
use crate::plan::ContextChunks;
use crate::problem::{
    AttentionArgs, AttentionDesc, Batch, Checked, ChunkRows, CopyWeightsArgs, HostBatch, Mask,
    MergeArgs, MlaContextArgs, MlaContextDesc, MlaGatherArgs, RecordPages, Unpacking,
    UpProjectArgs,
};
use crate::tensor::{Device, Tensor};
use desc::Problems;
use memory::{Buffers, Memory, Parts};
use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// One problem on one context, with its current plan.
///
/// `plan` needs exclusive access. Runs of one plan share its workspace: on CUDA they are on one stream, or on streams that
/// the host orders, and the steps of one run are not mixed with those of another.
pub struct MlaContext {
    context: Context,
    desc: MlaContextDesc,
    batch: AttentionDesc,
    /// New tokens over themselves: where no request has context, straight to the output.
    alone: Attention,
    /// The same as the first part of a sum.
    first: Attention,
    /// New tokens over a chunk. It is planned anew for every chunk of every run.
    chunk: Mutex<Attention>,
    tables: Box<dyn Tables>,
    memory: Memory,
    chunks: ContextChunks,
    scratch: Scratch,
    cuts: Vec<Cut>,
    most_chunks: usize,
    planned: Option<Planned>,
}

/// What a run needs of the plan.
#[derive(Debug, Clone, Copy)]
struct Planned {
    workspace: Workspace,
    buffers: Buffers,
    pages: RecordPages,
    num_tokens: i64,
}

/// A chunk: some neighbouring requests, their query rows, and the rows of unpacked context. Its tables start at `table`:
/// the offsets of the query rows and of the context rows, and the first context token of each request.
#[derive(Debug, Clone)]
struct Cut {
    requests: Range<usize>,
    tokens: Range<i64>,
    rows: i64,
    table: usize,
}

impl MlaContext {
    /// Picks the code for a problem. What may be derived and is 0 is filled in.
    ///
    /// # Errors
    /// As [`Attention::new`].
    pub fn new(context: &Context, desc: MlaContextDesc) -> Result<MlaContext> {
        let problems = Problems::of(desc)?;
        let (desc, most_chunks) = (problems.desc, problems.most_chunks);
        let alone = Attention::new(context, problems.new_tokens)?;
        let first = Attention::new(
            context,
            AttentionDesc {
                o_dtype: DType::F32,
                ..problems.new_tokens
            },
        )?;
        let chunk = Attention::new(context, problems.chunk)?;
        let tables = context.backend().tables(most_numbers(&desc, most_chunks))?;
        let parts = Parts {
            new_tokens: larger(&alone.workspace(), &first.workspace()),
            chunk: chunk.workspace(),
            tables: tables.workspace(),
        };
        let mut cuts = Vec::new();
        cuts.try_reserve_exact(most_chunks).map_err(|_| {
            Error::OutOfMemory(format!(
                "max_chunk_tokens: no memory for {most_chunks} chunks; a larger chunk is accepted"
            ))
        })?;
        context.log(
            Level::Info,
            format_args!("MlaContext: kernel {}", chunk.kernel()),
        );
        Ok(MlaContext {
            context: context.clone(),
            memory: Memory::new(&desc, &parts, context.device()),
            chunks: ContextChunks::for_batches(
                desc.max_batch_size as usize,
                desc.max_chunk_tokens,
            )?,
            scratch: Scratch::for_desc(&problems.batch)?,
            batch: problems.batch,
            desc,
            alone,
            first,
            chunk: Mutex::new(chunk),
            tables,
            cuts,
            most_chunks,
            planned: None,
        })
    }

    /// The checked desc, derived values included.
    pub fn desc(&self) -> &MlaContextDesc {
        &self.desc
    }

    /// Name of the kernel for new tokens.
    pub fn kernel(&self) -> &str {
        self.alone.kernel()
    }

    /// Memory that suffices for every batch within the desc.
    pub fn workspace(&self) -> WorkspaceInfo {
        self.memory.info()
    }

    /// Takes over a batch: `kv_len` counts the context and the new tokens. Page ids stay where they are until the last
    /// run of the plan. A refused batch leaves the previous plan in force.
    ///
    /// # Errors
    /// What is wrong with the batch or the workspace.
    pub fn plan(
        &mut self,
        input: &BatchInput,
        workspace: &Workspace,
        workspace_bytes: (usize, usize),
        stream: Stream,
    ) -> Result<()> {
        self.context.check_stream(stream)?;
        check_workspace(&self.memory.info(), workspace, workspace_bytes)?;
        let device = self.context.device();
        let batch = match batch::check(input, &self.batch, device, &mut self.scratch)? {
            Batch::Host(batch) => batch,
            Batch::Device(_) => {
                return Err(Error::Unsupported(
                    "kv_len: lengths on a device are not supported; host tensors are".into(),
                ));
            }
        };
        check_contexts(&batch, &self.desc)?;
        check_page_ids(input, device)?;
        let tables = self.memory.part(workspace, self.memory.tables);
        let numbers = self.tables.address(&tables);
        let indptr = self
            .memory
            .table(numbers, PAGE_INDPTR, batch.batch_size() + 1)?;
        let planned = Planned {
            workspace: *workspace,
            buffers: self.memory.buffers(&self.desc, workspace)?,
            pages: record_pages(input, indptr)?,
            num_tokens: batch.num_tokens() as i64,
        };
        // From here on only the device can fail, and then there is no plan.
        self.planned = None;
        let contexts = (0..batch.batch_size()).map(|b| batch.kv_len[b] as u32 - batch.qo_len(b));
        self.chunks.cut(contexts);
        cut(
            &mut self.cuts,
            &self.chunks,
            &batch,
            self.desc.graph.then_some(self.most_chunks),
        );
        let (chunks, cuts) = (&self.chunks, &self.cuts);
        let indptr = input.kv_indptr.as_ref().and_then(Tensor::as_i32);
        self.tables.write(&tables, stream, &mut |numbers| {
            write_tables(numbers, chunks, cuts, &batch, indptr);
        })?;
        let itself = BatchInput {
            qo_indptr: input.qo_indptr,
            kv_indptr: input.qo_indptr,
            ..BatchInput::default()
        };
        let part = self.memory.part(workspace, self.memory.new_tokens);
        let new_tokens = match self.cuts.is_empty() {
            true => &mut self.alone,
            false => &mut self.first,
        };
        let info = new_tokens.workspace();
        let bytes = (info.device_bytes, info.host_bytes);
        new_tokens.plan(&itself, &part, bytes, stream)?;
        self.planned = Some(planned);
        self.rehearse(stream)
    }

    /// Plans every chunk once, where that is done on the host: what runs need grows here.
    fn rehearse(&mut self, stream: Stream) -> Result<()> {
        if self.context.device() != Device::Cpu {
            return Ok(());
        }
        let Some(planned) = &self.planned else {
            return Ok(());
        };
        self.cuts
            .iter()
            .try_for_each(|cut| self.plan_chunk(planned, cut, stream).map(drop))
    }

    /// The number of chunks of the current plan.
    ///
    /// # Errors
    /// [`Error::NotPlanned`].
    pub fn num_chunks(&self) -> Result<usize> {
        self.planned()?;
        Ok(self.cuts.len())
    }

    /// Context tokens of a chunk: rows that gather writes and attend reads.
    ///
    /// # Errors
    /// [`Error::NotPlanned`], and where there is no such chunk.
    pub fn chunk_tokens(&self, chunk: usize) -> Result<i64> {
        Ok(self.cut(chunk)?.rows)
    }

    /// Everything: new tokens, and every chunk. Rows of the outputs beyond the batch keep what they hold, but for plans
    /// of a graph.
    ///
    /// # Errors
    /// What is wrong with the arguments; then no output was touched.
    pub fn run(&self, args: &MlaContextArgs, stream: Stream) -> Result<()> {
        let run = self.start(args, 0, stream)?;
        if self.desc.in_steps {
            return Err(Error::InvalidArgument(
                "run: it is not accepted with FOLIO_MLA_CONTEXT_STEPS; the steps are".into(),
            ));
        }
        // All of a run's gathers may be refused: before anything is written.
        for cut in &self.cuts {
            checked_gather(
                &run.gather_args(cut, &run.chunk_rows(cut))?,
                self.context.device(),
            )?;
        }
        run.new_tokens()?;
        for cut in &self.cuts {
            let rows = run.chunk_rows(cut);
            run.gather(cut, &rows)?;
            run.unpack(&rows)?;
            run.attend(cut, &rows)?;
        }
        run.finish()
    }

    /// The first step: new tokens over themselves. Without chunks it is the last one too.
    ///
    /// # Errors
    /// As [`MlaContext::run`].
    pub fn new_tokens(&self, args: &MlaContextArgs, stream: Stream) -> Result<()> {
        let run = self.start_step(args, 0, stream)?;
        run.new_tokens()
    }

    /// A chunk's step before the caller's products: its records to `latent` and `rope`.
    ///
    /// # Errors
    /// As [`MlaContext::run`].
    pub fn gather(&self, chunk: usize, args: &MlaContextArgs, stream: Stream) -> Result<()> {
        let cut = self.cut(chunk)?;
        let run = self.start_step(args, cut.rows, stream)?;
        run.gather(cut, &run.chunk_rows(cut))
    }

    /// A chunk's step after them. That of the last chunk writes the output.
    ///
    /// # Errors
    /// As [`MlaContext::run`].
    pub fn attend(&self, chunk: usize, args: &MlaContextArgs, stream: Stream) -> Result<()> {
        let cut = self.cut(chunk)?;
        let run = self.start_step(args, cut.rows, stream)?;
        run.attend(cut, &run.chunk_rows(cut))?;
        if chunk + 1 == self.cuts.len() {
            return run.finish();
        }
        Ok(())
    }

    fn planned(&self) -> Result<&Planned> {
        self.planned.as_ref().ok_or_else(|| {
            Error::NotPlanned("run: there is no plan yet; a successful plan is needed first".into())
        })
    }

    fn cut(&self, chunk: usize) -> Result<&Cut> {
        self.planned()?;
        self.cuts.get(chunk).ok_or_else(|| {
            Error::InvalidArgument(format!(
                "chunk: {chunk} is not accepted; a number below {} is",
                self.cuts.len()
            ))
        })
    }

    fn tables(&self, planned: &Planned, cut: &Cut) -> Result<CutTables> {
        let tables = self.memory.part(&planned.workspace, self.memory.tables);
        let numbers = self.tables.address(&tables);
        let count = cut.requests.len();
        let table = |first, count| self.memory.table(numbers, cut.table + first, count);
        Ok(CutTables {
            qo_indptr: table(0, count + 1)?,
            kv_indptr: table(count + 1, count + 1)?,
            starts: table(2 * count + 2, count)?,
        })
    }

    /// The offsets of no request.
    fn zero(&self, planned: &Planned) -> Result<Tensor> {
        let tables = self.memory.part(&planned.workspace, self.memory.tables);
        self.memory.table(self.tables.address(&tables), 0, 1)
    }

    /// Plans attention over a chunk. Where lengths are on a device this is all in stream order.
    fn plan_chunk(
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
        let part = self.memory.part(&planned.workspace, self.memory.chunk);
        let mut chunk = self.chunk.lock().unwrap_or_else(PoisonError::into_inner);
        let info = chunk.workspace();
        let bytes = (info.device_bytes, info.host_bytes);
        chunk.plan(&batch, &part, bytes, stream)?;
        Ok(chunk)
    }

    fn start_step(&self, args: &MlaContextArgs, rows: i64, stream: Stream) -> Result<Run<'_>> {
        if !self.desc.in_steps {
            return Err(Error::InvalidArgument(
                "handle: a step is not accepted without FOLIO_MLA_CONTEXT_STEPS; run is".into(),
            ));
        }
        self.start(args, rows, stream)
    }

    fn start(&self, args: &MlaContextArgs, rows: i64, stream: Stream) -> Result<Run<'_>> {
        let planned = self.planned()?;
        self.context.check_stream(stream)?;
        let sizes = (planned.num_tokens, rows);
        let args = args::check(args, &self.desc, sizes, self.context.device())?;
        // A graph's rows are those of every later plan.
        let tokens = match self.desc.graph {
            true => common_rows(&args).min(self.desc.max_num_tokens.into()),
            false => planned.num_tokens,
        };
        let run = Run {
            handle: self,
            planned,
            args,
            tokens,
            stream,
        };
        run.check_cache()?;
        Ok(run)
    }
}

/// One run, or a step of one.
struct Run<'a> {
    handle: &'a MlaContext,
    planned: &'a Planned,
    args: MlaContextArgs,
    /// Rows of the sum.
    tokens: i64,
    stream: Stream,
}

impl Run<'_> {
    fn new_tokens(&self) -> Result<()> {
        let args = &self.args;
        let alone = self.handle.cuts.is_empty();
        let (attention, o, lse) = match alone {
            true => (&self.handle.alone, args.o, args.lse),
            false => (&self.handle.first, self.sum(), Some(self.sum_lse())),
        };
        let attend = AttentionArgs {
            k_rope: Some(args.k_rope),
            lse,
            lse_base: args.lse_base,
            sm_scale: args.sm_scale,
            ..AttentionArgs::new(args.q, args.k_nope, args.v, o)
        };
        attention.run(&attend, self.stream)
    }

    /// Outputs so far: the caller's, where they are fp32.
    fn sum(&self) -> Tensor {
        match self.args.o.dtype() {
            DType::F32 => self.args.o,
            _ => self.planned.buffers.sum_o,
        }
    }

    fn sum_lse(&self) -> Tensor {
        self.args.lse.unwrap_or(self.planned.buffers.sum_lse)
    }

    /// A chunk's rows: the caller's, or the workspace's.
    fn chunk_rows(&self, cut: &Cut) -> ChunkRows {
        let rows = match self.args.unpacking {
            Unpacking::Caller(rows) => rows,
            Unpacking::Weights(_) => {
                let buffers = &self.planned.buffers;
                ChunkRows {
                    latent: buffers.latent,
                    rope: buffers.rope,
                    k_nope: buffers.k_nope,
                    v: buffers.v,
                }
            }
        };
        let of_chunk = |rows: Tensor| rows.narrow(0, 0, cut.rows);
        ChunkRows {
            latent: of_chunk(rows.latent),
            rope: of_chunk(rows.rope),
            k_nope: of_chunk(rows.k_nope),
            v: of_chunk(rows.v),
        }
    }

    fn gather(&self, cut: &Cut, rows: &ChunkRows) -> Result<()> {
        let gather = self.gather_args(cut, rows)?;
        mla_gather(&self.handle.context, &gather, self.stream)
    }

    fn gather_args(&self, cut: &Cut, rows: &ChunkRows) -> Result<MlaGatherArgs> {
        let tables = self.handle.tables(self.planned, cut)?;
        Ok(MlaGatherArgs {
            cache: self.args.cache,
            dst: rows.latent,
            dst_rope: Some(rows.rope),
            cu_seq_lens: tables.kv_indptr,
            seq_starts: Some(tables.starts),
            pages: self.pages(&cut.requests),
            k_scale: self.args.k_scale,
        })
    }

    /// Checks the cache of a run, whether or not there is something to gather.
    fn check_cache(&self) -> Result<()> {
        let (handle, buffers) = (self.handle, &self.planned.buffers);
        let nothing = MlaGatherArgs {
            cache: self.args.cache,
            dst: buffers.latent.narrow(0, 0, 0),
            dst_rope: Some(buffers.rope.narrow(0, 0, 0)),
            cu_seq_lens: handle.zero(self.planned)?,
            seq_starts: None,
            pages: self.pages(&(0..0)),
            k_scale: self.args.k_scale,
        };
        checked_gather(&nothing, handle.context.device()).map(drop)
    }

    /// The page ids of some requests.
    fn pages(&self, requests: &Range<usize>) -> RecordPages {
        let (first, count) = (requests.start as i64, requests.len() as i64);
        match self.planned.pages {
            RecordPages::Table(table) => RecordPages::Table(table.narrow(0, first, count)),
            RecordPages::Csr { indptr, indices } => RecordPages::Csr {
                indptr: indptr.narrow(0, first, count + 1),
                indices,
            },
        }
    }

    fn unpack(&self, rows: &ChunkRows) -> Result<()> {
        let Unpacking::Weights(weights) = self.args.unpacking else {
            return Ok(());
        };
        let project = UpProjectArgs {
            kv_c: rows.latent,
            w_uk: Some(weights.w_uk),
            w_uv: Some(weights.w_uv),
            k_nope: Some(rows.k_nope),
            v: Some(rows.v),
        };
        up_project(&self.handle.context, &project, self.stream)
    }

    /// Attention over a chunk, added to the sum.
    fn attend(&self, cut: &Cut, rows: &ChunkRows) -> Result<()> {
        let tokens = match self.handle.desc.graph {
            true => 0..self.tokens,
            false => cut.tokens.clone(),
        };
        let of_chunk = |rows: Tensor| rows.narrow(0, tokens.start, tokens.end - tokens.start);
        let buffers = &self.planned.buffers;
        let count = tokens.end - tokens.start;
        let (part_o, part_lse) = (
            buffers.part_o.narrow(0, 0, count),
            buffers.part_lse.narrow(0, 0, count),
        );
        let attend = AttentionArgs {
            k_rope: Some(rows.rope),
            lse: Some(part_lse),
            lse_base: self.args.lse_base,
            sm_scale: self.args.sm_scale,
            mask: Mask::Full,
            ..AttentionArgs::new(of_chunk(self.args.q), rows.k_nope, rows.v, part_o)
        };
        self.attend_part(cut, &attend)?;
        let (sum_o, sum_lse) = (of_chunk(self.sum()), of_chunk(self.sum_lse()));
        let add = MergeArgs {
            v_a: sum_o,
            s_a: sum_lse,
            v_b: part_o,
            s_b: part_lse,
            v_out: sum_o,
            s_out: Some(sum_lse),
            mask: None,
            lse_base: self.args.lse_base,
        };
        merge(&self.handle.context, &add, self.stream)
    }

    /// Attention over a chunk alone.
    fn attend_part(&self, cut: &Cut, args: &AttentionArgs) -> Result<()> {
        let chunk = self.handle.plan_chunk(self.planned, cut, self.stream)?;
        chunk.run(args, self.stream)
    }

    /// Rounds the sum to the output.
    fn finish(&self) -> Result<()> {
        if self.handle.cuts.is_empty() || self.args.o.dtype() == DType::F32 {
            return Ok(());
        }
        let rows = |tensor: Tensor| tensor.narrow(0, 0, self.tokens);
        let copy = CopyWeightsArgs {
            source: rows(self.sum()),
            target: rows(self.args.o),
        };
        let backend = self.handle.context.backend();
        backend.copy_weights(&Checked::new(copy), self.stream)
    }
}

/// The tables of a chunk as tensors.
struct CutTables {
    qo_indptr: Tensor,
    kv_indptr: Tensor,
    starts: Tensor,
}

/// Rows that queries and outputs have.
fn common_rows(args: &MlaContextArgs) -> i64 {
    let rows = args.q.extent(0).min(args.o.extent(0));
    args.lse.map_or(rows, |lse| rows.min(lse.extent(0)))
}

/// Where the offsets of the page table are among the numbers, behind a zero.
const PAGE_INDPTR: usize = 1;

/// Numbers in a chunk's tables.
fn numbers_of(requests: usize) -> usize {
    3 * requests + 2
}

/// The most numbers in all tables: those of the page table, and of every chunk. Neighbouring chunks share at most one
/// request; those of a graph all have all requests.
fn most_numbers(desc: &MlaContextDesc, most_chunks: usize) -> usize {
    let requests = desc.max_batch_size as usize;
    let of_chunks = match desc.graph {
        true => most_chunks.saturating_mul(numbers_of(requests)),
        false => most_chunks
            .saturating_mul(numbers_of(1))
            .saturating_add(3 * requests),
    };
    of_chunks.saturating_add(PAGE_INDPTR + requests + 1)
}

/// Lists the chunks of a batch; of a graph, as many as any batch has.
fn cut(cuts: &mut Vec<Cut>, chunks: &ContextChunks, batch: &HostBatch<'_>, graph: Option<usize>) {
    cuts.clear();
    let batch_size = batch.batch_size();
    let mut table = PAGE_INDPTR + batch_size + 1;
    for chunk in 0..graph.unwrap_or(chunks.count()) {
        let (requests, rows) = match graph {
            Some(_) => (0..batch_size, chunks.size()),
            None => (chunks.requests(chunk), chunks.tokens(chunk)),
        };
        let [first, end] = [requests.start, requests.end].map(|b| batch.qo_indptr[b].into());
        cuts.push(Cut {
            tokens: first..end,
            rows: rows.into(),
            table,
            requests: requests.clone(),
        });
        table += numbers_of(requests.len());
    }
}

/// Writes the tables of a plan: the page offsets, and those of every chunk.
fn write_tables(
    numbers: &mut [i32],
    chunks: &ContextChunks,
    cuts: &[Cut],
    batch: &HostBatch<'_>,
    page_indptr: Option<&[i32]>,
) {
    numbers[0] = 0;
    if let Some(indptr) = page_indptr {
        numbers[PAGE_INDPTR..][..indptr.len()].copy_from_slice(indptr);
    }
    for (chunk, cut) in cuts.iter().enumerate() {
        let count = cut.requests.len();
        let table = &mut numbers[cut.table..][..numbers_of(count)];
        let (qo_indptr, rest) = table.split_at_mut(count + 1);
        let (kv_indptr, starts) = rest.split_at_mut(count + 1);
        let first = batch.qo_indptr[cut.requests.start];
        (qo_indptr[0], kv_indptr[0]) = (0, 0);
        for (i, b) in cut.requests.clone().enumerate() {
            let piece = chunks.piece(chunk, b);
            qo_indptr[i + 1] = batch.qo_indptr[b + 1] - first;
            kv_indptr[i + 1] = kv_indptr[i] + piece.len as i32;
            starts[i] = piece.start as i32;
        }
    }
}

/// Every request has at least as many tokens as are new; a graph's batch has as many requests as any.
fn check_contexts(batch: &HostBatch<'_>, desc: &MlaContextDesc) -> Result<()> {
    let batch_size = batch.batch_size();
    if desc.graph && batch_size != desc.max_batch_size as usize {
        return Err(Error::InvalidArgument(format!(
            "kv_len: batch size {batch_size} is not accepted with FOLIO_PLAN_GRAPH; max_batch_size ({}) is, with requests of no tokens",
            desc.max_batch_size
        )));
    }
    let short = (0..batch_size).find(|&b| (batch.kv_len[b] as u32) < batch.qo_len(b));
    match short {
        None => Ok(()),
        Some(b) => Err(Error::InvalidArgument(format!(
            "kv_len[{b}]: {} is not accepted; {}, the new tokens of the request, or more is",
            batch.kv_len[b],
            batch.qo_len(b)
        ))),
    }
}

/// Runs read page ids where the caller has them.
fn check_page_ids(input: &BatchInput, device: Device) -> Result<()> {
    for (name, ids) in [
        ("block_table", input.block_table),
        ("kv_indices", input.kv_indices),
    ] {
        if let Some(ids) = ids.filter(|ids| ids.device() != device) {
            return Err(Error::DeviceMismatch(format!(
                "{name}: the tensor is on {}, the context on {device}",
                ids.device()
            )));
        }
    }
    Ok(())
}

/// Page ids as the caller states them, whose offsets are among the tables.
fn record_pages(input: &BatchInput, indptr: Tensor) -> Result<RecordPages> {
    match (input.block_table, input.kv_indices) {
        (Some(table), _) => Ok(RecordPages::Table(table)),
        (None, Some(indices)) => Ok(RecordPages::Csr { indptr, indices }),
        (None, None) => Err(Error::Internal("a checked batch has no page ids".into())),
    }
}

fn larger(a: &WorkspaceInfo, b: &WorkspaceInfo) -> WorkspaceInfo {
    WorkspaceInfo {
        device_bytes: a.device_bytes.max(b.device_bytes),
        host_bytes: a.host_bytes.max(b.host_bytes),
        alignment: a.alignment.max(b.alignment),
    }
}
