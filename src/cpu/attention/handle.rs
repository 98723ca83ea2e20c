//! The attention handle of the CPU backend: what plan copies into the workspace, and how a run hands the
//! work to the threads.
#![allow(unsafe_code)]

use super::run::{Plan, Run};
use super::scratch::Pad;
use super::shape::Shape;
use super::walk;
use crate::backend::{Attention, Stream, Tiling, Workspace, WorkspaceInfo};
use crate::cpu::isa::Isa;
use crate::cpu::threads::Pool;
use crate::error::{Error, Result};
use crate::problem::{
    AttentionArgs, AttentionDesc, Batch, Checked, HostBatch, MergeItem, PageIds, Pages, WorkItem,
    WorkList,
};
use std::ops::Range;
use std::sync::Arc;

/// One problem, and where its current plan lies.
pub struct CpuAttention {
    pool: Arc<Pool>,
    isa: Isa,
    desc: AttentionDesc,
    shape: Shape,
    planned: Option<Planned>,
}

/// Address of the workspace, and how much of its parts is in use.
#[derive(Debug, Clone, Copy)]
struct Planned {
    base: usize,
    batch_size: usize,
    page_ids: usize,
    items: usize,
    /// Items of many rows, whose heads are computed one by one. They come first.
    many: usize,
    /// Parts that the heads of the other items are cut into.
    parts: usize,
    merges: usize,
}

/// Idle threads at a run's end that are put up with: one in so many pieces.
const MOST_IDLE: usize = 8;

impl CpuAttention {
    pub fn new(pool: Arc<Pool>, isa: Isa, desc: &AttentionDesc) -> CpuAttention {
        CpuAttention {
            shape: Shape::new(
                desc,
                pool.num_threads(),
                isa.kernels().strip,
                isa.matrix(desc.q_dtype),
            ),
            pool,
            isa,
            desc: *desc,
            planned: None,
        }
    }

    /// Copies the batch and its work into the workspace at `base`.
    fn write(&self, batch: &HostBatch<'_>, work: &WorkList, base: usize) -> Result<Planned> {
        let parts = &self.shape.parts;
        let n = batch.batch_size();
        // SAFETY: the workspace was checked to be as large and aligned as `workspace` says, it is the
        // plan's alone, and the parts do not overlap.
        let (qo_indptr, kv_len, page_start, mask_start, page_ids, items, merges) = unsafe {
            (
                part::<i32>(base, &parts.qo_indptr),
                part::<i32>(base, &parts.kv_len),
                part::<u64>(base, &parts.page_start),
                part::<[u64; 2]>(base, &parts.mask_start),
                part::<i32>(base, &parts.page_ids),
                part::<WorkItem>(base, &parts.items),
                part::<MergeItem>(base, &parts.merges),
            )
        };
        copy("qo_indptr", batch.qo_indptr, qo_indptr)?;
        copy("kv_len", batch.kv_len, kv_len)?;
        let many = partition(&self.shape, &work.items, items)?;
        copy("merges", &work.merges, merges)?;
        mask_starts(batch, mask_start);
        let page_ids = copy_pages(batch, self.desc.kv.page_size(), page_start, page_ids)?;
        self.check_partials(work)?;
        Ok(Planned {
            base,
            batch_size: n,
            page_ids,
            items: work.items.len(),
            many,
            parts: self.parts(many, work.items.len() - many),
            merges: work.merges.len(),
        })
    }

    /// Parts that the heads of items of few rows are cut into: no more than it takes to keep the threads
    /// busy, since a token's heads lie together.
    fn parts(&self, many: usize, few: usize) -> usize {
        let (threads, heads) = (self.pool.num_threads(), self.shape.num_kv_heads);
        let busy = |parts: &usize| {
            let pieces = many * heads + few * parts;
            let idle = pieces.next_multiple_of(threads) - pieces;
            MOST_IDLE * idle <= pieces
        };
        let mut equal = (1..heads).filter(|parts| heads.is_multiple_of(*parts));
        equal.find(busy).unwrap_or(heads)
    }

    /// The partial rows of the work lie within the workspace.
    fn check_partials(&self, work: &WorkList) -> Result<()> {
        let last = work
            .merges
            .iter()
            .map(|m| u64::from(m.partial) + u64::from(m.num_chunks) * u64::from(m.q_len));
        let row_bytes = 4 * self.shape.num_qo_heads * self.shape.ld_vo;
        let room = self.shape.parts.partial_o.len() / row_bytes;
        match last.max() {
            Some(rows) if rows > room as u64 => Err(beyond("partial rows", rows as usize, room)),
            _ => Ok(()),
        }
    }

    /// The plan as slices of the workspace.
    fn plan_view(&self, planned: &Planned) -> (Plan<'_>, &[WorkItem], &[MergeItem]) {
        let (parts, base) = (&self.shape.parts, planned.base);
        let n = planned.batch_size;
        // SAFETY: as in `write`, which filled these leading elements.
        unsafe {
            let plan = Plan {
                qo_indptr: &part::<i32>(base, &parts.qo_indptr)[..n + 1],
                kv_len: &part::<i32>(base, &parts.kv_len)[..n],
                page_start: &part::<u64>(base, &parts.page_start)[..n],
                mask_start: &part::<[u64; 2]>(base, &parts.mask_start)[..n],
                page_ids: &part::<i32>(base, &parts.page_ids)[..planned.page_ids],
                partial_o: (base + parts.partial_o.start) as *mut f32,
                partial_lse: (base + parts.partial_lse.start) as *mut f32,
            };
            let items = &part::<WorkItem>(base, &parts.items)[..planned.items];
            let merges = &part::<MergeItem>(base, &parts.merges)[..planned.merges];
            (plan, items, merges)
        }
    }
}

impl Attention for CpuAttention {
    fn kernel(&self) -> &str {
        match self.isa {
            Isa::Amx if !self.shape.uses_amx() => Isa::Avx512.name(),
            isa => isa.name(),
        }
    }

    fn tiling(&self) -> Tiling {
        self.shape.tiling
    }

    fn workspace(&self) -> WorkspaceInfo {
        self.shape.workspace()
    }

    fn plan(
        &mut self,
        batch: &Batch<'_>,
        work: &WorkList,
        workspace: &Workspace,
        _: Stream,
    ) -> Result<()> {
        let Batch::Host(batch) = batch else {
            return Err(Error::Unsupported(
                "batch: lengths on a device are not supported by a CPU context; host tensors are"
                    .into(),
            ));
        };
        self.planned = None;
        self.planned = Some(self.write(batch, work, workspace.host)?);
        Ok(())
    }

    fn run(&self, args: &Checked<AttentionArgs>, _: Stream) -> Result<()> {
        let planned = self.planned.as_ref().ok_or_else(|| {
            Error::NotPlanned("run: there is no plan yet; a successful plan is needed first".into())
        })?;
        let (plan, items, merges) = self.plan_view(planned);
        let run = Run::new(&self.desc, &self.shape, self.isa.kernels(), plan, args);
        let (scratch, start) = (
            &self.shape.scratch,
            planned.base + self.shape.parts.scratch.start,
        );
        // Partial results and scratch are the plan's, so the turn lasts until the merges are done.
        let turn = self.pool.turn();
        let pad = |thread: usize| {
            let base = start + thread * scratch.total;
            // SAFETY: each thread has its part of the workspace, for as long as the turn lasts.
            unsafe { Pad::new(scratch, base as *mut u8) }
        };
        // Head by head over all items, which come request by request: what follows in a thread mostly
        // reads the same keys, which then lie in its second-level cache.
        let (many, few) = items.split_at(planned.many);
        let heads = self.shape.num_kv_heads;
        let (whole, parts) = (many.len() * heads, planned.parts);
        turn.for_each(whole + few.len() * parts, &|thread, index| {
            let pad = &mut pad(thread);
            if index < whole {
                walk::head(&run, &many[index % many.len()], index / many.len(), pad);
            } else {
                let (item, part) = ((index - whole) / parts, (index - whole) % parts);
                let heads = part * heads / parts..(part + 1) * heads / parts;
                walk::heads(&run, &few[item], heads, pad);
            }
        });
        // A single split request is merged by all threads too.
        turn.for_each(merges.len() * heads, &|thread, index| {
            run.merge(&merges[index / heads], index % heads, &mut pad(thread));
        });
        Ok(())
    }
}

/// # Safety
/// The range must be memory of the caller's from `base` on, aligned for `T`, used by nobody else;
/// any bits must be a `T`.
unsafe fn part<'a, T>(base: usize, range: &Range<usize>) -> &'a mut [T] {
    let len = range.len() / size_of::<T>();
    // SAFETY: the caller's promise.
    unsafe { std::slice::from_raw_parts_mut((base + range.start) as *mut T, len) }
}

fn copy<T: Copy>(name: &str, from: &[T], to: &mut [T]) -> Result<()> {
    if from.len() > to.len() {
        return Err(beyond(name, from.len(), to.len()));
    }
    to[..from.len()].copy_from_slice(from);
    Ok(())
}

/// Copies the items: those of many rows, which are counted, and then those of few.
fn partition(shape: &Shape, from: &[WorkItem], to: &mut [WorkItem]) -> Result<usize> {
    if from.len() > to.len() {
        return Err(beyond("work items", from.len(), to.len()));
    }
    let many = from.iter().filter(|item| !shape.is_few(item)).count();
    let mut next = [0, many];
    for item in from {
        let next = &mut next[usize::from(shape.is_few(item))];
        to[*next] = *item;
        *next += 1;
    }
    Ok(many)
}

fn beyond(name: &str, needed: usize, room: usize) -> Error {
    Error::Internal(format!(
        "plan: {needed} {name} exceed the {room} that the workspace was sized for"
    ))
}

fn mask_starts(batch: &HostBatch<'_>, starts: &mut [[u64; 2]]) {
    let (mut bytes, mut bits) = (0, 0);
    for (b, start) in starts.iter_mut().take(batch.batch_size()).enumerate() {
        *start = [bytes, bits];
        let elements = u64::from(batch.qo_len(b)) * batch.kv_len[b] as u64;
        bytes += elements;
        bits += elements.div_ceil(8);
    }
}

/// Copies the ids in use, one request after the other; returns how many.
fn copy_pages(
    batch: &HostBatch<'_>,
    page_size: u32,
    starts: &mut [u64],
    ids: &mut [i32],
) -> Result<usize> {
    if let Pages::Ragged { indptr } = batch.pages {
        for (start, &first) in starts.iter_mut().zip(&indptr[..batch.batch_size()]) {
            *start = first as u64;
        }
        return Ok(0);
    }
    let (Pages::Csr { ids: given, .. } | Pages::Table { ids: given, .. }) = batch.pages else {
        return Ok(0);
    };
    if matches!(given, PageIds::Device(_)) {
        return Err(Error::Unsupported(
            "batch: page ids on a device are not supported by a CPU context; host tensors are"
                .into(),
        ));
    }
    let mut count = 0;
    for (b, start) in starts.iter_mut().take(batch.batch_size()).enumerate() {
        let own = batch.page_ids(b, page_size).unwrap_or_default();
        copy("page ids", own, &mut ids[count..])?;
        *start = count as u64;
        count += own.len();
    }
    Ok(count)
}
