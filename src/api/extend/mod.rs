//! Attention over a cache and over new keys and values beside it, in one run: those of the query rows, which are in no
//! cache yet. SGLang's extend and vLLM's prefix prefill. It is made of what every backend has: a pass over the cache, a
//! pass over the new keys as ragged tensors, and a merge of the two.
//!
//! Kernels know nothing of it. In the pass over the cache rows are at the positions that they have among all keys. The
//! pass over the new keys has two plans, and every run takes the one that its arguments allow. Where only distances count,
//! positions start at the first new key, so that the pass is an ordinary ragged prefill, which every fast kernel takes.
//! Where positions count (chunks, mm-prefix ranges, masks with columns of all keys), keys have the numbers that they have
//! among all. A request's first one is then mostly not the first of a kernel's block, which the portable kernel of a device
//! takes.
//!
//! Both passes write states of the type of the output, or of q's where that is fp8, and each is rounded to it before they
//! are merged: the fast kernels write no other. A batch of which nothing is cached is the pass over the new keys alone.

mod args;
mod desc;
mod memory;
mod rows;

use super::planned::{Planned, no_plan};
use super::{Context, merge};
use crate::backend::{Attention as Kernel, Stream, Workspace, WorkspaceInfo};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::problem::{
    AttentionArgs, AttentionDesc, Batch, Checked, HostBatch, Keys, MergeArgs, Pages, WorkList,
};
use crate::tensor::Tensor;
use desc::Problems;
use memory::{Buffers, Memory};
use rows::BatchRows;
use std::sync::{Mutex, PoisonError};

/// One problem on one context, with its current plan.
pub(super) struct Extend {
    context: Context,
    desc: AttentionDesc,
    cached: Pass,
    /// Over the new keys, by their distance.
    near: Pass,
    /// Over the new keys, by their positions.
    placed: Pass,
    memory: Memory,
    /// For graphs.
    rows: Option<(BatchRows, Workspace)>,
    /// New keys of each request.
    new_len: Vec<i32>,
    planned: Option<PlannedExtend>,
    /// Held while a run is enqueued: the states of the passes are the plan's.
    enqueuing: Mutex<()>,
}

/// A kernel with its part of the workspace.
struct Pass {
    kernel: Box<dyn Kernel>,
    desc: AttentionDesc,
    at: Workspace,
}

/// What a run needs of the current plan.
#[derive(Clone, Copy)]
struct PlannedExtend {
    planned: Planned,
    buffers: Buffers,
    /// Some request has keys in the cache; taken for granted in a graph.
    has_cached: bool,
    /// The rows of the batch, in a graph.
    rows: Option<Tensor>,
}

impl Extend {
    /// Picks the code for a checked desc.
    ///
    /// # Errors
    /// As [`Attention::new`](super::Attention::new).
    pub fn new(context: &Context, desc: &AttentionDesc) -> Result<Extend> {
        let problems = Problems::of(desc);
        context.backend().prepare_merges(problems.cached.o_dtype)?;
        let mut memory = Memory::new(&problems, context.device());
        let mut pass = |desc: AttentionDesc| {
            let kernel = context.backend().attention(&desc)?;
            let at = memory.place(&kernel.workspace());
            Ok::<_, Error>(Pass { kernel, desc, at })
        };
        let cached = pass(problems.cached)?;
        let (near, placed) = (pass(problems.new)?, pass(problems.new)?);
        let rows = match desc.graph {
            false => None,
            true => {
                let rows = BatchRows::new(context, desc.max_num_tokens)?;
                let at = memory.place(&rows.workspace());
                Some((rows, at))
            }
        };
        let mut new_len = Vec::new();
        new_len
            .try_reserve_exact(desc.max_batch_size as usize)
            .map_err(|_| {
                Error::OutOfMemory(format!(
                    "max_batch_size: the lengths of {} requests do not fit into host memory",
                    desc.max_batch_size
                ))
            })?;
        Ok(Extend {
            context: context.clone(),
            desc: *desc,
            cached,
            near,
            placed,
            memory,
            rows,
            new_len,
            planned: None,
            enqueuing: Mutex::default(),
        })
    }

    /// Name of the kernel for the cache, which most of the keys are in.
    pub fn kernel(&self) -> &str {
        self.cached.kernel.kernel()
    }

    /// Memory that suffices for every batch within the desc.
    pub fn workspace(&self) -> WorkspaceInfo {
        self.memory.info()
    }

    /// Takes over a checked batch, one of [`Keys::Cached`].
    ///
    /// # Errors
    /// `Unsupported` for lengths on a device, and what memory and the device answer.
    pub fn plan(
        &mut self,
        batch: &Batch<'_>,
        work: &mut WorkList,
        workspace: &Workspace,
        stream: Stream,
    ) -> Result<()> {
        let Batch::Host(cached) = batch else {
            return Err(Error::Unsupported(
                "kv_len: lengths on a device are not supported with new_kv_dtype; host tensors are"
                    .into(),
            ));
        };
        let buffers = self.memory.buffers(workspace)?;
        // From here on only memory and the device can fail, and then there is no plan.
        self.planned = None;
        let planned = self.cached.plan(cached, work, workspace, stream)?;
        let rows = Pages::Ragged {
            indptr: cached.qo_indptr,
        };
        let placed = HostBatch {
            keys: Keys::New,
            window_left: None,
            pages: rows,
            num_pages: 0,
            max_page_id: -1,
            ..*cached
        };
        self.placed.plan(&placed, work, workspace, stream)?;
        self.new_len.clear();
        let lengths = (0..cached.batch_size()).map(|b| cached.qo_len(b) as i32);
        self.new_len.extend(lengths);
        let near = HostBatch {
            keys: Keys::All,
            window_left: None,
            kv_len: &self.new_len,
            ..placed
        };
        self.near.plan(&near, work, workspace, stream)?;
        let rows = match &mut self.rows {
            None => None,
            Some((rows, at)) => Some(rows.mark(cached.num_tokens(), workspace, *at, stream)?),
        };
        let has_cached = (0..cached.batch_size()).any(|b| cached.num_keys(b) > 0);
        self.planned = Some(PlannedExtend {
            planned,
            buffers,
            has_cached: has_cached || self.desc.graph,
            rows,
        });
        Ok(())
    }

    /// Computes attention for the planned batch. Rows of the outputs beyond the batch keep what they hold.
    ///
    /// # Errors
    /// What is wrong with the arguments; then no output was touched.
    pub fn run(&self, args: &AttentionArgs, stream: Stream) -> Result<()> {
        let PlannedExtend {
            planned,
            buffers,
            has_cached,
            rows: rows_of_batch,
        } = self.planned.ok_or_else(no_plan)?;
        self.context.check_stream(stream)?;
        let args = args::check(args, &self.desc, &planned, self.context.device())?;
        let new = match args::go_by_distance(&args) {
            true => &self.near,
            false => &self.placed,
        };
        let _enqueuing = self
            .enqueuing
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if !has_cached && buffers.new_o.is_none() {
            let alone = args::of_new_keys(&args, args.o, args.lse);
            return new.kernel.run(&Checked::new(alone), stream);
        }
        let new_o = buffers.new_o.unwrap_or(args.o);
        // What is rounded once more is another number.
        let new_lse = args
            .lse
            .filter(|lse| lse.dtype() == DType::F32)
            .unwrap_or(buffers.new_lse);
        if has_cached {
            let over_cache = args::of_cache(&args, buffers.cached_o, buffers.cached_lse);
            self.cached.kernel.run(&Checked::new(over_cache), stream)?;
        }
        let over_new = args::of_new_keys(&args, new_o, Some(new_lse));
        new.kernel.run(&Checked::new(over_new), stream)?;
        // A graph's rows are those of every later plan.
        let num_tokens = match rows_of_batch {
            Some(rows) => common_rows(&args).min(rows.extent(0)),
            None => planned.num_tokens,
        };
        let rows = |tensor: Tensor| tensor.narrow(0, 0, num_tokens);
        let both = MergeArgs {
            v_a: rows(buffers.cached_o),
            s_a: rows(buffers.cached_lse),
            v_b: rows(new_o),
            s_b: rows(new_lse),
            v_out: rows(args.o),
            s_out: args.lse.map(rows),
            mask: rows_of_batch.map(rows),
            lse_base: args.lse_base,
            num_tokens_without_a: if has_cached { 0 } else { num_tokens },
            o_scale: args.o_scale,
        };
        merge(&self.context, &both, stream)
    }
}

impl Pass {
    fn plan(
        &mut self,
        batch: &HostBatch<'_>,
        work: &mut WorkList,
        workspace: &Workspace,
        stream: Stream,
    ) -> Result<Planned> {
        let batch = Batch::Host(*batch);
        let planned = Planned::cut(&batch, &self.desc, self.kernel.as_ref(), work)?;
        self.kernel
            .plan(&batch, work, &workspace.part(self.at), stream)?;
        Ok(planned)
    }
}

/// Rows that queries and outputs have.
fn common_rows(args: &AttentionArgs) -> i64 {
    let rows = args.q.extent(0).min(args.o.extent(0));
    args.lse.map_or(rows, |lse| rows.min(lse.extent(0)))
}
