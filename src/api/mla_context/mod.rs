//! The MLA context handle: attention of new tokens over themselves, and chunk by chunk over the cached context of their
//! requests, in bounded memory. It is made of operators that every backend has: attention with keys in two parts, the
//! gather of latent records, the up-projection, and merges where a kernel does not add to a sum itself. Chunks are summed up in
//! fp32; the new tokens come last, and with them the output is rounded. Where a kernel can, the last chunk is attended with them,
//! and no other sum is needed for it.
//!
//! This file is the handle: what it creates, plans and offers. A chunk is attended by the rows of those requests only that
//! have tokens in it. A captured graph launches as many chunks as any batch has; those that a plan does not have are of no rows.

mod args;
mod contexts;
mod cuts;
mod desc;
mod memory;
mod operators;
mod run;

use super::Context;
use super::attention::{Attention, check_workspace};
use super::batch::{self, BatchInput, Scratch};
use crate::backend::{Stream, Workspace, WorkspaceInfo};
use crate::error::{Error, Result};
use crate::log::Level;
use crate::problem::{AttentionDesc, Batch, MlaContextArgs, MlaContextDesc, Pages};
use crate::tensor::Device;
use contexts::{check_contexts, check_page_ids, record_pages};
use cuts::{Cut, Cuts, PAGE_INDPTR, most_numbers};
use desc::Problems;
use memory::{Memory, Parts};
use operators::{Operators, Planned, WithLastChunk};
use run::Run;
use std::sync::Mutex;

/// One problem on one context, with its current plan.
///
/// `plan` needs exclusive access. Runs of one plan share its workspace: on CUDA they are on one stream, or on streams that
/// the host orders, and the steps of one run are not mixed with those of another.
pub struct MlaContext {
    operators: Operators,
    batch: AttentionDesc,
    scratch: Scratch,
    planned: Option<Planned>,
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
        let with_last_chunk = WithLastChunk::of(context, &problems, &alone)?;
        let chunk = Attention::new(context, problems.chunk)?;
        let tables = context.backend().tables(most_numbers(&desc, most_chunks))?;
        let parts = Parts {
            new_tokens: alone.workspace(),
            with_last_chunk: with_last_chunk
                .as_ref()
                .map_or_else(WorkspaceInfo::default, |both| both.attention.workspace()),
            chunk: chunk.workspace(),
            tables: tables.workspace(),
        };
        let cuts = Cuts::new(&desc, most_chunks, context.device())?;
        context.log(
            Level::Info,
            format_args!("MlaContext: kernel {}", chunk.kernel()),
        );
        Ok(MlaContext {
            operators: Operators {
                context: context.clone(),
                memory: Memory::new(&desc, &parts, context.device()),
                cuts,
                desc,
                alone,
                with_last_chunk,
                chunk: Mutex::new(chunk),
                tables,
            },
            scratch: Scratch::for_desc(&problems.batch)?,
            batch: problems.batch,
            planned: None,
        })
    }

    /// The checked desc, derived values included.
    pub fn desc(&self) -> &MlaContextDesc {
        &self.operators.desc
    }

    /// Name of the kernel for new tokens.
    pub fn kernel(&self) -> &str {
        self.operators.alone.kernel()
    }

    /// Memory that suffices for every batch within the desc.
    pub fn workspace(&self) -> WorkspaceInfo {
        self.operators.memory.info()
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
        let operators = &mut self.operators;
        operators.context.check_stream(stream)?;
        check_workspace(&operators.memory.info(), workspace, workspace_bytes)?;
        let device = operators.context.device();
        let batch = match batch::check(input, &self.batch, device, &mut self.scratch)? {
            Batch::Host(batch) => batch,
            Batch::Device(_) => {
                return Err(Error::Unsupported(
                    "kv_len: lengths on a device are not supported; host tensors are".into(),
                ));
            }
        };
        check_contexts(&batch, &operators.desc)?;
        check_page_ids(input, device)?;
        let tables = workspace.part(operators.memory.tables);
        let numbers = operators.tables.address(&tables);
        let indptr = operators
            .memory
            .table(numbers, PAGE_INDPTR, batch.batch_size() + 1)?;
        let planned = Planned {
            workspace: *workspace,
            buffers: operators.memory.buffers(&operators.desc, workspace)?,
            pages: record_pages(input, indptr)?,
            num_tokens: batch.num_tokens() as i64,
        };
        // From here on only the device can fail, and then there is no plan.
        self.planned = None;
        operators.cuts.cut(&batch);
        let cuts = &operators.cuts;
        let indptr = match batch.pages {
            Pages::Csr { indptr, .. } => Some(indptr),
            Pages::Table { .. } | Pages::Ragged { .. } => None,
        };
        operators.tables.write(&tables, stream, &mut |numbers| {
            cuts.write_tables(numbers, &batch, indptr);
        })?;
        let itself = BatchInput {
            qo_indptr: input.qo_indptr,
            kv_indptr: input.qo_indptr,
            ..BatchInput::default()
        };
        let part = workspace.part(operators.memory.new_tokens);
        let info = operators.alone.workspace();
        let bytes = (info.device_bytes, info.host_bytes);
        operators.alone.plan(&itself, &part, bytes, stream)?;
        operators.plan_with_last_chunk(&batch, workspace, stream)?;
        if operators.has_sum() {
            let rows = match operators.desc.graph {
                true => operators.desc.max_num_tokens.into(),
                false => planned.num_tokens,
            };
            let lse = planned.buffers.sum_lse.narrow(0, 0, rows);
            operators.clear(&planned, lse, stream)?;
        }
        self.planned = Some(planned);
        self.plan_chunks(stream)
    }

    /// Plans a chunk that is alone, for all runs. Several are planned once where that is done on the host: what runs
    /// need grows here.
    fn plan_chunks(&mut self, stream: Stream) -> Result<()> {
        let on_host = self.operators.context.device() == Device::Cpu;
        if !on_host && !self.operators.cuts.has_one_chunk() {
            return Ok(());
        }
        let Some(planned) = &self.planned else {
            return Ok(());
        };
        let mut cuts = self.operators.cuts.list().iter();
        cuts.try_for_each(|cut| self.operators.plan_chunk(planned, cut, stream).map(drop))
    }

    /// The number of chunks of the current plan.
    ///
    /// # Errors
    /// [`Error::NotPlanned`].
    pub fn num_chunks(&self) -> Result<usize> {
        self.planned()?;
        Ok(self.operators.cuts.list().len())
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
        if self.operators.desc.in_steps {
            return Err(Error::InvalidArgument(
                "run: it is not accepted with FOLIO_MLA_CONTEXT_STEPS; the steps are".into(),
            ));
        }
        run.whole()
    }

    /// The first step. Without chunks it computes everything; else new tokens are attended over themselves with the last chunk.
    ///
    /// # Errors
    /// As [`MlaContext::run`].
    pub fn new_tokens(&self, args: &MlaContextArgs, stream: Stream) -> Result<()> {
        let run = self.start_step(args, 0, stream)?;
        match self.operators.cuts.list().is_empty() {
            true => run.new_tokens(),
            false => run.begin(),
        }
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
        match chunk + 1 == self.operators.cuts.list().len() {
            true => run.last(cut),
            false => run.attend(cut, &run.chunk_rows(cut)),
        }
    }

    fn planned(&self) -> Result<&Planned> {
        self.planned.as_ref().ok_or_else(|| {
            Error::NotPlanned("run: there is no plan yet; a successful plan is needed first".into())
        })
    }

    fn cut(&self, chunk: usize) -> Result<&Cut> {
        self.planned()?;
        let cuts = self.operators.cuts.list();
        cuts.get(chunk).ok_or_else(|| {
            Error::InvalidArgument(format!(
                "chunk: {chunk} is not accepted; a number below {} is",
                cuts.len()
            ))
        })
    }

    fn start_step(&self, args: &MlaContextArgs, rows: i64, stream: Stream) -> Result<Run<'_>> {
        if !self.operators.desc.in_steps {
            return Err(Error::InvalidArgument(
                "handle: a step is not accepted without FOLIO_MLA_CONTEXT_STEPS; run is".into(),
            ));
        }
        self.start(args, rows, stream)
    }

    fn start(&self, args: &MlaContextArgs, rows: i64, stream: Stream) -> Result<Run<'_>> {
        let planned = self.planned()?;
        self.operators.context.check_stream(stream)?;
        let sizes = (planned.num_tokens, rows);
        let args = args::check(
            args,
            &self.operators.desc,
            sizes,
            self.operators.context.device(),
        )?;
        Run::new(&self.operators, planned, args, stream)
    }
}
