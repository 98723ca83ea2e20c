//! The attention handle of the CPU backend: `plan` copies a batch into the workspace, and `run` hands its work to
//! the threads. The walks compute.
#![allow(unsafe_code)]

use super::mask_starts::check_mask_starts;
use super::run::{Plan, Run};
use super::scratch::ThreadMemory;
use super::shape::{MAX_DIM_QK, MAX_DIM_VO, Shape};
use super::walk;
use crate::backend::{Attention, Stream, Workspace, WorkspaceInfo};
use crate::cpu::isa::Isa;
use crate::cpu::threads::Pool;
use crate::error::{Error, Result};
use crate::plan::{self, device_page_ids, num_copied_page_ids};
use crate::problem::{
    AttentionArgs, AttentionDesc, Batch, Checked, CombineItem, Earlier, HostBatch, Sum, Tiling,
    WorkItem, WorkList,
};
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
    /// Items of many rows, whose heads are computed one by one. They come first in the list.
    many: usize,
    combines: usize,
    /// Entries of the list of partial rows.
    partials: usize,
}

/// Split rows that a thread combines in one piece of work.
const COMBINED_ROWS: usize = 16;

/// Idle threads at the end of a run are accepted up to one in so many pieces of work.
const MOST_IDLE: usize = 8;

impl CpuAttention {
    /// # Errors
    /// `Unsupported` for rows that are wider than the kernels take.
    pub fn new(pool: Arc<Pool>, isa: Isa, desc: &AttentionDesc) -> Result<CpuAttention> {
        within("head_dim_qk", desc.head_dim_qk, MAX_DIM_QK)?;
        within("head_dim_vo", desc.head_dim_vo, MAX_DIM_VO)?;
        Ok(CpuAttention {
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
        })
    }

    /// Writes the batch and its work to the workspace at `base`: items of many rows first, then those of few.
    fn write(&self, batch: &HostBatch<'_>, work: &WorkList, base: usize) -> Result<Planned> {
        if device_page_ids(batch).is_some() {
            return Err(Error::Unsupported(
                "batch: page ids on a device are not supported by a CPU context; host tensors are"
                    .into(),
            ));
        }
        let layout = &self.shape.regions.plan;
        // SAFETY: the workspace was checked to be as large and aligned as `workspace` says, and it is the plan's
        // alone. Any bytes are bytes.
        let image = unsafe { slice::<u8>(base, 0, layout.end) };
        let is_few = |item: &&WorkItem| self.shape.is_few(item);
        let (many, few) = (
            work.items.iter().filter(|item| !is_few(item)),
            work.items.iter().filter(is_few),
        );
        let num_many = many.clone().count();
        let page_size = self.desc.kv.page_size();
        plan::write(image, layout, batch, work, many.chain(few), page_size)?;
        Ok(Planned {
            base,
            batch_size: batch.batch_size(),
            page_ids: num_copied_page_ids(batch),
            items: work.items.len(),
            many: num_many,
            combines: work.combines.len(),
            partials: work.partials.len(),
        })
    }

    /// The number of parts that the heads of items of few rows are cut into. It is the least that keeps so many threads
    /// busy, since the heads of a token lie together in memory.
    fn parts(&self, threads: usize, many: usize, few: usize) -> usize {
        let heads = self.shape.num_kv_heads;
        let busy = |parts: &usize| {
            let pieces = many * heads + few * parts;
            let idle = pieces.next_multiple_of(threads) - pieces;
            MOST_IDLE * idle <= pieces
        };
        let mut equal = (1..heads).filter(|parts| heads.is_multiple_of(*parts));
        equal.find(busy).unwrap_or(heads)
    }

    /// The plan as slices of the workspace.
    fn plan_view(&self, planned: &Planned) -> (Plan<'_>, &[WorkItem], &[CombineItem]) {
        let (regions, base) = (&self.shape.regions, planned.base);
        let layout = &regions.plan;
        let n = planned.batch_size;
        // SAFETY: as in `write`, which filled these leading elements.
        unsafe {
            let plan = Plan {
                base: base as *const u8,
                qo_indptr: slice(base, layout.qo_indptr, n + 1),
                kv_len: slice(base, layout.kv_len, n),
                mask_bytes_start: slice(base, layout.mask_bytes_start, n),
                mask_bits_start: slice(base, layout.mask_bits_start, n),
                page_ids: slice(base, layout.page_ids, planned.page_ids),
                partials: slice(base, layout.partials, planned.partials),
                partial_o: (base + regions.partial_o) as *mut f32,
                partial_lse: (base + regions.partial_lse) as *mut f32,
            };
            let items = slice::<WorkItem>(base, layout.items, planned.items);
            let combines = slice::<CombineItem>(base, layout.combines, planned.combines);
            (plan, items, combines)
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
        self.planned = Some(self.write(batch, work, workspace.host)?);
        Ok(())
    }

    fn run(&self, args: &Checked<AttentionArgs>, _: Stream) -> Result<()> {
        self.compute(args, None)
    }

    fn run_after(
        &self,
        args: &Checked<AttentionArgs>,
        earlier: &Earlier,
        _: Stream,
    ) -> Result<bool> {
        if earlier.context.is_some() {
            return Ok(false);
        }
        self.compute(args, earlier.sum.as_ref()).map(|()| true)
    }
}

impl CpuAttention {
    fn compute(&self, args: &Checked<AttentionArgs>, sum: Option<&Sum>) -> Result<()> {
        let planned = self.planned.as_ref().ok_or_else(|| {
            Error::NotPlanned("run: there is no plan yet; a successful plan is needed first".into())
        })?;
        let (plan, items, combines) = self.plan_view(planned);
        check_mask_starts(
            args,
            items.iter().map(|item| {
                let b = item.request as usize;
                let rows = plan.qo_indptr[b + 1] - plan.qo_indptr[b];
                (b, rows.into(), plan.kv_len[b].into())
            }),
        )?;
        let run = Run::new(&self.desc, &self.shape, self.isa.kernels(), plan, args, sum);
        let (layouts, start) = (&self.shape.scratch, planned.base + self.shape.regions.own);
        // Partial results and scratch belong to the plan, so the turn lasts until the rows are combined.
        let turn = self.pool.turn();
        let memory = |thread: usize| {
            let base = start + thread * layouts.total;
            // SAFETY: each thread has its part of the workspace, for as long as the turn lasts.
            unsafe { ThreadMemory::new(layouts, base as *mut u8) }
        };
        // Head by head over all items, which are ordered by request: consecutive pieces of a thread mostly read the
        // same keys, which are then in its second-level cache.
        let (many, few) = items.split_at(planned.many);
        let heads = self.shape.num_kv_heads;
        let whole = many.len() * heads;
        let parts = self.parts(turn.likely_threads(), many.len(), few.len());
        turn.for_each(whole + few.len() * parts, &|thread, index| {
            let memory = &mut memory(thread);
            if index < whole {
                walk::head(&run, &many[index % many.len()], index / many.len(), memory);
            } else {
                let (item, part) = ((index - whole) / parts, (index - whole) % parts);
                let heads = part * heads / parts..(part + 1) * heads / parts;
                walk::heads(&run, &few[item], heads, memory);
            }
        });
        // All threads combine, even where the rows of a single request were split.
        let pieces = combines.len().div_ceil(COMBINED_ROWS);
        turn.for_each(pieces * heads, &|thread, index| {
            let first = index / heads * COMBINED_ROWS;
            let rows = &combines[first..combines.len().min(first + COMBINED_ROWS)];
            let mut memory = memory(thread);
            let scratch = &mut memory.combine();
            for row in rows {
                run.combine(row, index % heads, scratch);
            }
        });
        Ok(())
    }
}

fn within(name: &str, dim: u32, most: usize) -> Result<()> {
    match dim as usize <= most {
        true => Ok(()),
        false => Err(Error::Unsupported(format!(
            "{name}: {dim} is not supported by the CPU backend; up to {most} is"
        ))),
    }
}

/// # Safety
/// `len` elements from `base + offset` on must be memory of the caller's, aligned for `T`, that nobody else uses;
/// any bits must be a `T`.
unsafe fn slice<'a, T>(base: usize, offset: usize, len: usize) -> &'a mut [T] {
    // SAFETY: the caller's promise.
    unsafe { std::slice::from_raw_parts_mut((base + offset) as *mut T, len) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::{AttentionOps, Backend};
    use crate::cpu::CpuBackend;
    use crate::cpu::isa::for_each_isa;
    use crate::dtype::{self, DType};
    use crate::plan::schedule;
    use crate::problem::{
        Checked, Keys, Kind, KvLayout, KvStorage, LogBase, PageIds, Pages, Requests,
    };
    use crate::reference::ReferenceBackend;
    use crate::tensor::{Device, Tensor};

    /// Requests as (query rows, keys), over pages of 16 in their natural order.
    #[derive(Clone)]
    struct Case {
        dtype: DType,
        kv_dtype: DType,
        group: u32,
        dim_qk: u32,
        dim_vo: u32,
        requests: Vec<(i32, i32)>,
    }

    const PAGE: i32 = 16;

    impl Case {
        fn desc(&self) -> AttentionDesc {
            let most =
                |f: fn(&(i32, i32)) -> i32| self.requests.iter().map(f).max().unwrap() as u32;
            AttentionDesc {
                kind: Kind::Prefill,
                q_dtype: self.dtype,
                kv_format: self.kv_dtype.into(),
                o_dtype: self.dtype,
                num_qo_heads: self.group,
                num_kv_heads: 1,
                head_dim_qk: self.dim_qk,
                head_dim_vo: self.dim_vo,
                kv: KvStorage::Paged {
                    page_size: PAGE as u32,
                    layout: KvLayout::Nhd,
                },
                max_batch_size: self.requests.len() as u32,
                max_qo_len: most(|r| r.0),
                max_num_tokens: self.tokens() as u32,
                max_kv_len: most(|r| r.1),
                max_num_pages: self.pages() as u64,
                graph: false,
                batch_invariant: false,
                fp8_products: false,
                mask_items: false,
                shared_levels: 0,
                new_kv: None,
            }
        }

        fn tokens(&self) -> i64 {
            self.requests.iter().map(|r| i64::from(r.0)).sum()
        }

        fn pages(&self) -> i32 {
            self.requests.iter().map(|r| (r.1 + PAGE - 1) / PAGE).sum()
        }
    }

    /// A batch's index arrays.
    struct Lengths {
        qo_indptr: Vec<i32>,
        kv_len: Vec<i32>,
        page_indptr: Vec<i32>,
        page_ids: Vec<i32>,
    }

    impl Lengths {
        fn of(case: &Case) -> Lengths {
            let sums = |f: fn(&(i32, i32)) -> i32| {
                let mut all = vec![0];
                case.requests
                    .iter()
                    .for_each(|r| all.push(all[all.len() - 1] + f(r)));
                all
            };
            Lengths {
                qo_indptr: sums(|r| r.0),
                kv_len: case.requests.iter().map(|r| r.1).collect(),
                page_indptr: sums(|r| (r.1 + PAGE - 1) / PAGE),
                page_ids: (0..case.pages()).collect(),
            }
        }

        fn batch(&self) -> HostBatch<'_> {
            HostBatch {
                qo_indptr: &self.qo_indptr,
                kv_len: &self.kv_len,
                keys: Keys::All,
                window_left: None,
                pages: Pages::Csr {
                    indptr: &self.page_indptr,
                    ids: PageIds::Host(&self.page_ids),
                },
                num_pages: self.page_ids.len(),
                max_page_id: self.page_ids.len() as i32 - 1,
                planned: Requests::All,
            }
        }
    }

    /// Elements of a type, spread over -2 to 2.
    fn elements(dtype: DType, count: i64, seed: u32) -> Vec<u8> {
        let mut bytes = vec![0; count as usize * dtype.size()];
        let mut state = seed;
        for i in 0..count as isize {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let value = (state >> 8) as f32 / (1 << 22) as f32 - 2.0;
            // SAFETY: `bytes` holds `count` elements.
            unsafe { dtype::store(bytes.as_mut_ptr(), dtype, i, value) };
        }
        bytes
    }

    fn tensor(data: &mut [u8], dtype: DType, shape: &[i64], strides: Option<&[i64]>) -> Tensor {
        // SAFETY: the callers' vectors hold the extents.
        unsafe {
            Tensor::new(
                "tensor",
                data.as_mut_ptr(),
                Device::Cpu,
                dtype,
                shape,
                strides,
            )
        }
        .unwrap()
    }

    /// Memory that begins on a cache line.
    fn lines(bytes: usize) -> Vec<[u64; 8]> {
        vec![[u64::MAX; 8]; bytes.div_ceil(64) + 1]
    }

    /// A handle, its plan and the plan's memory.
    struct Planned {
        handle: Box<dyn Attention>,
        case: Case,
        memory: Vec<[u64; 8]>,
    }

    impl Planned {
        fn new(backend: &dyn Backend, case: &Case) -> Planned {
            let handle = backend.attention(&case.desc()).unwrap();
            let memory = lines(handle.workspace().host_bytes);
            let mut planned = Planned {
                handle,
                case: case.clone(),
                memory,
            };
            let lengths = Lengths::of(case);
            let mut work = WorkList::default();
            schedule(
                &lengths.batch(),
                &case.desc(),
                &planned.handle.tiling(),
                &mut work,
            )
            .unwrap();
            planned.plan(&lengths.batch(), &work).unwrap();
            planned
        }

        fn plan(&mut self, batch: &HostBatch<'_>, work: &WorkList) -> Result<()> {
            let base = self.memory.as_mut_ptr() as usize;
            let workspace = Workspace {
                device: 0,
                host: base.next_multiple_of(64),
            };
            let batch = Batch::Host(*batch);
            self.handle
                .plan(&batch, work, &workspace, Stream::default())
        }

        /// Outputs and lse. The values are the leading columns of the keys, where these are as wide: so
        /// absorbed MLA reads its cache.
        fn run(&self) -> (Vec<f32>, Vec<f32>) {
            self.run_with(1.2 / (self.case.dim_qk as f32).sqrt(), 0.0)
        }

        fn run_with(&self, sm_scale: f32, logits_soft_cap: f32) -> (Vec<f32>, Vec<f32>) {
            let case = &self.case;
            let (heads, tokens) = (i64::from(case.group), case.tokens());
            let (qk, vo) = (i64::from(case.dim_qk), i64::from(case.dim_vo));
            let wide = qk.max(vo);
            let rows = i64::from(case.pages() * PAGE);
            let mut q = elements(case.dtype, tokens * heads * qk, 1);
            let mut cache = elements(case.kv_dtype, rows * wide, 2);
            let mut o = vec![0; (tokens * heads * vo) as usize * case.dtype.size()];
            let mut lse = vec![0; 4 * (tokens * heads) as usize];
            let pages = i64::from(case.pages());
            let page = i64::from(PAGE);
            let strides = [page * wide, wide, wide, 1];
            let mut of_cache = |dim| {
                tensor(
                    &mut cache,
                    case.kv_dtype,
                    &[pages, page, 1, dim],
                    Some(&strides),
                )
            };
            let (k, v) = (of_cache(qk), of_cache(vo));
            let args = AttentionArgs {
                lse: Some(tensor(&mut lse, DType::F32, &[tokens, heads], None)),
                lse_base: LogBase::E,
                sm_scale,
                logits_soft_cap,
                q_scale: 1.0,
                k_scale: 1.0,
                v_scale: 1.0,
                o_scale: 1.0,
                ..AttentionArgs::new(
                    tensor(&mut q, case.dtype, &[tokens, heads, qk], None),
                    k,
                    v,
                    tensor(&mut o, case.dtype, &[tokens, heads, vo], None),
                )
            };
            self.handle
                .run(&Checked::new(args), Stream::default())
                .unwrap();
            let read = |from: &[u8], dtype: DType| {
                let count = from.len() / dtype.size();
                // SAFETY: within the slice.
                let load = |i: usize| unsafe { dtype::load(from.as_ptr(), dtype, i as isize) };
                (0..count).map(load).collect()
            };
            (read(&o, case.dtype), read(&lse, DType::F32))
        }
    }

    fn largest_difference(a: &[f32], b: &[f32]) -> f32 {
        let pairs = a.iter().zip(b);
        pairs
            .map(|(a, b)| (a - b).abs())
            .fold(0.0, |most, d| if d > most || d.is_nan() { d } else { most })
    }

    /// Outputs are averages of numbers up to 2: about as large as 2 over the root of the number of keys.
    fn tolerance(dtype: DType) -> f32 {
        match dtype {
            DType::F32 => 2e-5,
            DType::F16 => 3e-3,
            _ => 2e-2,
        }
    }

    #[test]
    fn the_widest_heads_agree_with_the_oracle() {
        let requests = vec![(1, 70), (5, 300), (40, 45), (1, 0)];
        for (group, dim_qk, dim_vo) in [
            (16, 576, 512),
            (3, 576, 512),
            (1, 8, 512),
            (2, 576, 8),
            (20, 264, 328),
        ] {
            for (dtype, kv_dtype) in [
                (DType::F32, DType::F32),
                (DType::F16, DType::F16),
                (DType::BF16, DType::BF16),
                (DType::BF16, DType::F8E4M3),
            ] {
                let case = Case {
                    dtype,
                    kv_dtype,
                    group,
                    dim_qk,
                    dim_vo,
                    requests: requests.clone(),
                };
                let (want, want_lse) = Planned::new(&ReferenceBackend, &case).run();
                for_each_isa(|isa| {
                    let backend = CpuBackend::with_isa(2, isa).unwrap();
                    let (got, lse) = Planned::new(&backend, &case).run();
                    let off = largest_difference(&got, &want);
                    assert!(
                        off < tolerance(dtype),
                        "{isa:?} {dtype} {kv_dtype} {group} {dim_qk} {dim_vo}: {off}"
                    );
                    let same = lse
                        .iter()
                        .zip(&want_lse)
                        .all(|(a, b)| a == b || (a - b).abs() < 1e-3);
                    assert!(
                        same,
                        "{isa:?} {dtype} {kv_dtype} {group} {dim_qk} {dim_vo}: lse"
                    );
                });
            }
        }
    }

    /// One request of ten keys.
    fn small() -> Case {
        Case {
            dtype: DType::F32,
            kv_dtype: DType::F32,
            group: 2,
            dim_qk: 16,
            dim_vo: 16,
            requests: vec![(3, 10)],
        }
    }

    #[test]
    fn wider_heads_are_refused() {
        let backend = CpuBackend::new(1).unwrap();
        let (wide_qk, wide_vo) = (
            Case {
                dim_qk: 584,
                ..small()
            },
            Case {
                dim_vo: 520,
                ..small()
            },
        );
        for (case, name, most) in [
            (wide_qk, "head_dim_qk: 584", "576"),
            (wide_vo, "head_dim_vo: 520", "512"),
        ] {
            let Err(Error::Unsupported(message)) = backend.attention(&case.desc()) else {
                panic!("{name} was accepted");
            };
            assert!(
                message.contains(name) && message.contains(most),
                "{message}"
            );
        }
    }

    /// The bounds of the `api` layer on scales and caps, and what lies between them.
    #[test]
    fn no_scale_and_no_cap_makes_a_nan() {
        let (small_factor, large_factor) = ((-60f32).exp2(), 60f32.exp2());
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            let case = Case {
                dtype,
                kv_dtype: dtype,
                dim_qk: 64,
                dim_vo: 64,
                requests: vec![(1, 40), (30, 600)],
                ..small()
            };
            for_each_isa(|isa| {
                let planned = Planned::new(&CpuBackend::with_isa(2, isa).unwrap(), &case);
                for scale in [-large_factor, -1.0, small_factor, 1.0, large_factor] {
                    for cap in [0.0, small_factor, 1.0, large_factor] {
                        let (o, lse) = planned.run_with(scale, cap);
                        let bounded = o.iter().all(|o| o.abs() <= 2.01);
                        assert!(bounded, "{isa:?} {dtype} {scale:e} {cap:e}: o");
                        let finite = lse.iter().all(|lse| lse.is_finite());
                        assert!(finite, "{isa:?} {dtype} {scale:e} {cap:e}: lse");
                    }
                }
            });
        }
    }

    #[test]
    fn a_plan_that_fails_leaves_the_previous_one_in_force() {
        let case = small();
        let mut planned = Planned::new(&CpuBackend::new(2).unwrap(), &case);
        let before = planned.run();
        let lengths = Lengths::of(&Case {
            requests: vec![(1, 1)],
            ..case
        });
        let items = vec![WorkItem::default(); 100];
        let too_long = WorkList {
            items,
            ..WorkList::default()
        };
        assert!(matches!(
            planned.plan(&lengths.batch(), &too_long),
            Err(Error::Internal(_))
        ));
        let mut on_device = lengths.batch();
        on_device.pages = Pages::Csr {
            indptr: &lengths.page_indptr,
            // SAFETY: never read.
            ids: PageIds::Device(unsafe {
                Tensor::new(
                    "ids",
                    64 as *mut u8,
                    Device::Cuda(0),
                    DType::I32,
                    &[8],
                    None,
                )
                .unwrap()
            }),
        };
        let refused = planned.plan(&on_device, &WorkList::default());
        assert!(matches!(refused, Err(Error::Unsupported(_))));
        assert_eq!(planned.run(), before);
    }
}
