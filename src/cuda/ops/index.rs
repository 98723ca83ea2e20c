//! The operators that build a batch's indices on a device, each one launch.
#![allow(unsafe_code)]

use std::sync::Arc;

use super::keyless_kernel::{KeylessKernel, Workers};
use crate::backend::Stream;
use crate::cuda::compiler::loader::Loader;
use crate::cuda::driver::Context;
use crate::cuda::index_params::{
    BatchLengthsParams, BlockTableParams, DraftKvIndicesParams, Integers, KvIndicesParams,
    SlotMappingParams, TokenRows,
};
use crate::cuda::kernels::keyless::{
    BATCH_LENGTHS, BLOCK_TABLE, DRAFT_KV_INDICES, KV_INDICES, SLOT_MAPPING,
};
use crate::cuda::params::Divisor;
use crate::error::Result;
use crate::problem::{
    BatchLengthsArgs, BlockTableArgs, Checked, DraftKvIndicesArgs, DraftSlots, KvIndicesArgs,
    QueryRows, SlotMappingArgs,
};

/// Threads of a block of these kernels.
const THREADS: i64 = 256;
/// Numbers that a thread writes at most where more blocks are to be had.
const NUMBERS_OF_THREAD: i64 = 16;
/// Blocks that are enough for any device. Every block sums up the lengths before its own, so more are no gain.
const ENOUGH_BLOCKS: i64 = 4096;

/// The operators on one device.
#[derive(Debug)]
pub struct Index {
    batch_lengths: KeylessKernel,
    kv_indices: KeylessKernel,
    block_table: KeylessKernel,
    slot_mapping: KeylessKernel,
    draft_kv_indices: KeylessKernel,
}

impl Index {
    /// Loads nothing yet.
    pub fn new(loader: &Arc<Loader>, context: &Arc<Context>) -> Index {
        let kernel = |operator, table| KeylessKernel::new(operator, table, loader, context);
        Index {
            batch_lengths: kernel("batch_lengths", &BATCH_LENGTHS),
            kv_indices: kernel("kv_indices", &KV_INDICES),
            block_table: kernel("block_table", &BLOCK_TABLE),
            slot_mapping: kernel("slot_mapping", &SLOT_MAPPING),
            draft_kv_indices: kernel("draft_kv_indices", &DRAFT_KV_INDICES),
        }
    }

    /// Sums up lengths: a thread for each number of the longest output.
    pub fn batch_lengths(&self, args: &Checked<BatchLengthsArgs>, stream: Stream) -> Result<()> {
        let outputs = [args.qo_indptr, args.kv_len, args.kv_indptr, args.row_kind];
        let longest = outputs
            .iter()
            .flatten()
            .map(|output| output.extent(0))
            .max();
        let params = BatchLengthsParams {
            qo_len: Integers::of(&args.qo_len),
            cached_len: Integers::of_any(args.cached_len),
            encoder_len: Integers::of_any(args.encoder_len),
            qo_indptr: Integers::of_any(args.qo_indptr),
            kv_len: Integers::of_any(args.kv_len),
            kv_indptr: Integers::of_any(args.kv_indptr),
            row_kind: Integers::of_any(args.row_kind),
            batch_size: args.qo_len.extent(0) as u32,
            reserved: 0,
        };
        let blocks = (longest.unwrap_or(0) as u64).div_ceil(THREADS as u64);
        // SAFETY: the kernel takes a `FolioBatchLengthsParams`; the addresses are the caller's tensors, whose extents
        // `api` checked.
        unsafe {
            let of = ("qo_len", Workers::Blocks(blocks));
            self.batch_lengths.enqueue(&params, of, stream)
        }
    }

    /// Lists pages or slots.
    pub fn kv_indices(&self, args: &Checked<KvIndicesArgs>, stream: Stream) -> Result<()> {
        let batch_size = args.kv_len.extent(0);
        let of_row = args.rows.tokens() / i64::from(args.page_size) + 1;
        let parts = parts(of_row.min(args.kv_indices.extent(0)), batch_size);
        let params = KvIndicesParams {
            rows: TokenRows::of(&args.rows),
            kv_len: Integers::of(&args.kv_len),
            kv_start: Integers::of_any(args.kv_start),
            kv_indptr: Integers::of(&args.kv_indptr),
            kv_indices: Integers::of(&args.kv_indices),
            last_page_len: Integers::of_any(args.last_page_len),
            page_size: Divisor::new(args.page_size),
            window: args.window,
            batch_size: batch_size as u32,
            parts,
        };
        let of = (
            "kv_len",
            Workers::Blocks(batch_size.max(1) as u64 * u64::from(parts)),
        );
        // SAFETY: as above, of a `FolioKvIndicesParams`.
        unsafe { self.kv_indices.enqueue(&params, of, stream) }
    }

    /// Makes a block table.
    pub fn block_table(&self, args: &Checked<BlockTableArgs>, stream: Stream) -> Result<()> {
        let rows = args.block_table.extent(0);
        let parts = parts(args.block_table.extent(1), rows);
        let params = BlockTableParams {
            kv_indptr: Integers::of(&args.kv_indptr),
            kv_indices: Integers::of(&args.kv_indices),
            block_table: Integers::of(&args.block_table),
            fill: args.fill,
            batch_size: (args.kv_indptr.extent(0) - 1) as u32,
            parts,
            reserved: 0,
        };
        let of = (
            "block_table",
            Workers::Blocks((rows as u64).saturating_mul(parts.into())),
        );
        // SAFETY: as above, of a `FolioBlockTableParams`.
        unsafe { self.block_table.enqueue(&params, of, stream) }
    }

    /// Finds slots and positions.
    pub fn slot_mapping(&self, args: &Checked<SlotMappingArgs>, stream: Stream) -> Result<()> {
        let batch_size = args.kv_len.extent(0);
        let parts = parts(args.slot_mapping.extent(0), batch_size);
        let (qo_indptr, qo_len) = match &args.queries {
            QueryRows::Indptr(indptr) => (Integers::of(indptr), Integers::default()),
            QueryRows::Len(len) => (Integers::default(), Integers::of(len)),
        };
        let params = SlotMappingParams {
            rows: TokenRows::of(&args.rows),
            qo_indptr,
            qo_len,
            kv_len: Integers::of(&args.kv_len),
            slot_mapping: Integers::of(&args.slot_mapping),
            positions: Integers::of_any(args.positions),
            batch_size: batch_size as u32,
            parts,
        };
        let of = (
            "kv_len",
            Workers::Blocks(batch_size.max(1) as u64 * u64::from(parts)),
        );
        // SAFETY: as above, of a `FolioSlotMappingParams`.
        unsafe { self.slot_mapping.enqueue(&params, of, stream) }
    }

    /// Lists the slots of a draft's branches.
    pub fn draft_kv_indices(
        &self,
        args: &Checked<DraftKvIndicesArgs>,
        stream: Stream,
    ) -> Result<()> {
        let batch_size = args.kv_len.extent(0);
        let steps = args.kv_indptr.extent(0);
        let rows = (batch_size * i64::from(args.topk))
            .max(1)
            .saturating_mul(steps);
        let parts = parts(args.rows.tokens().min(args.kv_indices.extent(1)), rows);
        let (slot_layout, page_size) = match args.slots {
            DraftSlots::StepMajor => (0, 0),
            DraftSlots::BranchMajor => (1, 0),
            DraftSlots::Paged(page_size) => (2, page_size),
        };
        let params = DraftKvIndicesParams {
            rows: TokenRows::of(&args.rows),
            kv_len: Integers::of(&args.kv_len),
            kv_indptr: Integers::of(&args.kv_indptr),
            kv_indices: Integers::of(&args.kv_indices),
            batch_size: batch_size as u32,
            topk: args.topk,
            num_steps: args.num_steps,
            slot_layout,
            page_size,
            parts,
        };
        let of = (
            "kv_indptr",
            Workers::Blocks((rows as u64).saturating_mul(parts.into())),
        );
        // SAFETY: as above, of a `FolioDraftKvIndicesParams`.
        unsafe { self.draft_kv_indices.enqueue(&params, of, stream) }
    }
}

/// Blocks that share a row of up to `numbers`, of `rows` rows.
fn parts(numbers: i64, rows: i64) -> u32 {
    let useful = (numbers as u64).div_ceil((THREADS * NUMBERS_OF_THREAD) as u64);
    useful.clamp(1, (ENOUGH_BLOCKS / rows.max(1)).max(1) as u64) as u32
}
