//! Planning on the device: one launch cuts a batch whose lengths are in device memory, and writes the plan
//! where a copy from the host would put it. That of a cascade has the segments that its requests share in its parameters, so
//! that nothing is staged, and a captured plan keeps them.
#![allow(unsafe_code)]

use super::kernel::SideBySide;
use crate::backend::Stream;
use crate::cuda::cascade_params::{
    NO_SEGMENT, PlanCascadeParams, SHARED_SEGMENTS, SharedSegmentParams,
};
use crate::cuda::compiler::loader::Loader;
use crate::cuda::driver::{Context, Current, Function, Launch};
use crate::cuda::kernels::Row;
use crate::cuda::kernels::keyless::{PLAN, PLAN_CASCADE};
use crate::cuda::params::{Divisor, address};
use crate::cuda::plan::regions::PlanningRegions;
use crate::cuda::plan_params::{
    NARROW_TILES, PlanBatchParams, PlanNarrowParams, PlanOrder, PlanParams, PlanTailParams,
    PlanWorkersParams,
};
use crate::error::Result;
use crate::plan::{Capacity, Regions, least_gain_beside_narrow};
use crate::problem::{
    AttentionDesc, DeviceBatch, Kind, Requests, SharedSegment, TailCosts, Tiling,
};

/// Work items for which planning on the device takes [`FEW_THREADS`] threads.
const FEW_ITEMS: u64 = 512;
/// Threads of a small plan: 6.4 µs for one request on an H200, against 8.5 µs with 1024.
const FEW_THREADS: u32 = 256;

/// No window, and the left side of one that no request reaches.
const UNLIMITED: i32 = -1;

/// The kernel for one problem.
#[derive(Debug)]
pub struct Planner {
    row: &'static Row,
    function: Function,
    desc: AttentionDesc,
    capacity: Capacity,
    regions: Regions,
}

impl Planner {
    /// Loads the kernel, for plans that lie in `regions`.
    ///
    /// # Errors
    /// As [`Loader::find`].
    pub fn load(
        loader: &Loader,
        context: &Context,
        desc: &AttentionDesc,
        (capacity, regions): (&Capacity, &Regions),
    ) -> Result<Planner> {
        let cc = context.device().compute_capability;
        let rows = match desc.shared_levels {
            0 => &PLAN,
            _ => &PLAN_CASCADE,
        };
        let (row, function) = loader.find(rows.candidates(cc), || rows.unsupported(cc))?;
        Ok(Planner {
            row,
            function,
            desc: *desc,
            capacity: *capacity,
            regions: *regions,
        })
    }

    /// Enqueues the kernel for a workspace at `base`. Outside of cascades there are no segments.
    ///
    /// # Safety
    /// The workspace must have room for the largest plan, and the batch's tensors must be valid until the
    /// kernel has run.
    pub unsafe fn launch(
        &self,
        current: &Current<'_>,
        batch: &DeviceBatch,
        segments: &[SharedSegment],
        (tiling, side_by_side): &(Tiling, Option<SideBySide>),
        base: u64,
        stream: Stream,
    ) -> Result<()> {
        let launch = Launch {
            grid: [1, 1, 1],
            threads: self.threads(batch.batch_size, tiling),
            cluster: 1,
            dependent: false,
            stream,
        };
        let own = PlanningRegions::at(
            self.regions.own,
            self.capacity.counts.batch_size,
            &self.desc,
        );
        let plan = self.params(batch, tiling, &own, base);
        if self.desc.shared_levels == 0 {
            let params = PlanBatchParams {
                plan,
                workers: PlanWorkersParams {
                    of_item: tiling.workers.of_item,
                    most_rows: side_by_side.map_or(0, SideBySide::rows_of_request),
                    num_heads: side_by_side.map_or(0, |kernel| kernel.num_heads),
                    rows_of_tile: side_by_side.map_or(0, |kernel| kernel.tile),
                    all: tiling.workers.all,
                    rows_of_unit: tiling.rows_of_unit,
                },
                tail: self.tail(tiling),
                narrow: self.narrow(tiling),
            };
            // SAFETY: the kernel takes a `FolioPlanBatchParams`; the rest is the caller's promise.
            return unsafe { launch.enqueue(current, &self.function, &params, &[]) };
        }
        let params = PlanCascadeParams {
            plan,
            shares: base + own.shares as u64,
            num_segments: segments.len().min(SHARED_SEGMENTS) as u32,
            reserved: 0,
            segments: listed(segments),
        };
        // SAFETY: the kernel takes a `FolioPlanCascadeParams`; the rest is the caller's promise.
        unsafe { launch.enqueue(current, &self.function, &params, &[]) }
    }

    /// Few threads where few items are expected: those without work still cost instructions.
    fn threads(&self, batch_size: u32, tiling: &Tiling) -> u32 {
        let tiles = u64::from(self.desc.max_qo_len.div_ceil(tiling.q_tile));
        let items = u64::from(batch_size) * tiles + u64::from(tiling.max_splits);
        match items.min(self.capacity.counts.items as u64) {
            0..=FEW_ITEMS => FEW_THREADS,
            _ => self.row.threads,
        }
    }

    /// Rows of several requests may share keys in a cascade, so items go by their cost there.
    fn order(&self, tiling: &Tiling) -> PlanOrder {
        match self.desc.kind {
            _ if self.desc.shared_levels > 0 => PlanOrder::ByCost,
            Kind::Prefill => PlanOrder::ByRequest,
            Kind::Decode | Kind::Mla if tiling.takes_shares => PlanOrder::ByShare,
            Kind::Decode | Kind::Mla => PlanOrder::ByCost,
        }
    }

    /// Items of decode are ordered by their cost, wherever their keys are cut.
    fn tail(&self, tiling: &Tiling) -> PlanTailParams {
        let costs = match self.desc.kind {
            Kind::Prefill if !self.desc.batch_invariant => tiling.tail,
            _ => TailCosts::NO_TAIL,
        };
        let row_bytes = size_of::<f32>() as u32 * self.desc.num_qo_heads * self.desc.head_dim_vo;
        PlanTailParams {
            most_chunks: costs.most_chunks,
            item_units: costs.item_units,
            combine_units: costs.combine_units,
            least_gain: costs.least_gain,
            units_of_row: 2.0 * row_bytes as f32 / tiling.unit_bytes as f32,
            reserved: 0,
        }
    }

    fn narrow(&self, tiling: &Tiling) -> PlanNarrowParams {
        let mut q_tile = [Divisor::new(1); NARROW_TILES];
        let mut count = 0;
        if !self.desc.batch_invariant {
            for (to, narrow) in q_tile.iter_mut().zip(tiling.narrower()) {
                *to = Divisor::new(narrow.q_tile);
                count += 1;
            }
        }
        PlanNarrowParams {
            q_tile,
            count,
            at_a_time: tiling.workers.items_at_a_time() as u32,
            least_gain: least_gain_beside_narrow(&self.desc, tiling),
            reserved: 0,
        }
    }

    fn params(
        &self,
        batch: &DeviceBatch,
        tiling: &Tiling,
        own: &PlanningRegions,
        base: u64,
    ) -> PlanParams {
        let layout = &self.regions.plan;
        let at = |offset: usize| base + offset as u64;
        let table = batch.page_ids.filter(|ids| ids.rank() == 2);
        let is_cascade = self.desc.shared_levels > 0;
        let most = self.desc.max_qo_len;
        let (max_qo_len, decode_rows, least_units, decode_counts) = match batch.planned {
            Requests::All => (most, 0, 0, 0),
            Requests::Decodes {
                most_rows,
                least_keys,
            } => {
                let units = least_keys.div_ceil(u64::from(tiling.kv_unit));
                let least_units = u32::try_from(units).unwrap_or(u32::MAX);
                // What is longer than a decode is none, and is not cut off to be one.
                (i32::MAX as u32, most_rows, least_units, 0)
            }
            Requests::Prompts {
                decode_rows,
                decode_counts,
            } => (most, decode_rows, 0, decode_counts),
        };
        let Capacity {
            counts,
            partial_rows,
        } = self.capacity;
        PlanParams {
            qo_indptr: address(batch.qo_indptr),
            kv_indptr: address(batch.kv_indptr),
            kv_len: address(batch.kv_len),
            last_page_len: address(batch.last_page_len),
            table_stride: table.map_or(0, |table| table.stride(0)),
            num_page_ids: num_page_ids(batch),
            out_qo_indptr: at(layout.qo_indptr),
            out_kv_len: at(layout.kv_len),
            out_mask_bytes_start: at(layout.mask_bytes_start),
            out_mask_bits_start: at(layout.mask_bits_start),
            requests: at(own.requests),
            first_item: at(own.first_item),
            first_combine: at(own.first_combine),
            items: at(layout.items),
            combines: at(layout.combines),
            partials: at(layout.partials),
            counts: at(layout.counts),
            next_tile: at(layout.next_tile),
            decode_counts,
            q_tile: Divisor::new(tiling.q_tile),
            batch_size: batch.batch_size,
            fixed_qo_len: batch.qo_len,
            page_size: self.desc.kv.page_size(),
            kv_unit: tiling.kv_unit,
            max_splits: tiling.max_splits,
            invariant_chunk: match self.desc.batch_invariant {
                true => tiling.invariant_chunk,
                false => 0,
            },
            max_shares: match !is_cascade && tiling.may_be_shared(most) {
                true => tiling.max_shares,
                false => 0,
            },
            least_gain: match is_cascade {
                true => 0,
                false => tiling.least_gain,
            },
            combine_units: tiling.combine_units,
            window_left: batch
                .window_left
                .map_or(UNLIMITED, |left| i32::try_from(left).unwrap_or(UNLIMITED)),
            max_qo_len,
            max_kv_len: self.desc.max_kv_len,
            max_num_tokens: self.desc.max_num_tokens,
            max_items: at_most(counts.items),
            max_combines: at_most(counts.combines),
            max_partial_rows: at_most(partial_rows),
            decode_rows,
            least_units,
            order: self.order(tiling) as u32,
        }
    }
}

/// Segments as the kernel takes them. Those that its parameters have no room for stay with their requests: no segment has its
/// parent behind it.
fn listed(segments: &[SharedSegment]) -> [SharedSegmentParams; SHARED_SEGMENTS] {
    let mut list = [SharedSegmentParams::default(); SHARED_SEGMENTS];
    for (to, segment) in list.iter_mut().zip(segments) {
        *to = SharedSegmentParams {
            begin: segment.requests.start,
            end: segment.requests.end,
            keys: segment.kv_end,
            parent: segment.parent.map_or(NO_SEGMENT, |parent| parent as u32),
        };
    }
    list
}

/// The page ids that a request may need at most: all that there are, or its row of a block table. Ragged tensors have
/// none, and rows beyond their end are not read in any case.
fn num_page_ids(batch: &DeviceBatch) -> i64 {
    const MOST: i64 = 1 << 31;
    batch.page_ids.map_or(MOST, |ids| {
        let last = ids.rank() - 1;
        ids.extent(last).min(MOST)
    })
}

/// A bound as kernels take it. A smaller one than stated is safe.
fn at_most(bound: usize) -> u32 {
    u32::try_from(bound).unwrap_or(u32::MAX)
}
