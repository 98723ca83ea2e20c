//! The operators that build a batch's indices on a device, each one launch.
#![allow(unsafe_code)]

use std::sync::Arc;

use super::keyless_kernel::{KeylessKernel, Workers};
use crate::backend::Stream;
use crate::cuda::compiler::loader::Loader;
use crate::cuda::driver::Context;
use crate::cuda::index_params::{
    BatchLengthsParams, BlockTableParams, DraftKvIndicesParams, KvIndicesParams, SlotMappingParams,
    TokenRows,
};
use crate::cuda::integers_params::Integers;
use crate::cuda::kernels::keyless::{
    BATCH_LENGTHS, BLOCK_TABLE, DRAFT_KV_INDICES, KV_INDICES, Keyless, SLOT_MAPPING,
};
use crate::cuda::params::Divisor;
use crate::error::Result;
use crate::problem::{
    BatchLengthsArgs, BlockTableArgs, Checked, DraftKvIndicesArgs, DraftSlots, KvIndicesArgs,
    QueryRows, SlotMappingArgs,
};

/// Requests of a group, of which a block takes one or shares it: the lanes of a warp (`kernels/core/groups.cuh`).
const GROUP: u64 = 32;
/// Threads of a warp.
const WARP: u64 = 32;
/// Numbers of a request that a warp writes at a time: `PIECE` there.
const PIECE: u64 = 256;
/// Blocks of a list that a multiprocessor has at once. Every block sums up the requests before its group, which costs more
/// than it gains where rows are read ahead: two instead of one take 1.1 µs longer for pages of 1024 requests.
const BLOCKS_OF_LIST: u64 = 1;
/// The same of drafts, which wait for rows: one instead of two takes 1.2 µs longer for 64 requests.
const BLOCKS_OF_DRAFTS: u64 = 2;
/// Slots and positions for which there is one block more, up to one for every multiprocessor.
const TOKENS_OF_BLOCK: u64 = 256;
/// Columns that a warp takes where more warps are to be had: two stores of 16 bytes for each lane.
const COLUMNS_OF_WARP: u64 = 256;
/// Warps that fill any device several times.
const ENOUGH_WARPS: u64 = 1 << 16;

/// The operators on one device.
#[derive(Debug)]
pub struct Index {
    batch_lengths: KeylessKernel,
    kv_indices: KeylessKernel,
    block_table: KeylessKernel,
    slot_mapping: KeylessKernel,
    draft_kv_indices: KeylessKernel,
    sm_count: u64,
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
            sm_count: context.device().sm_count.into(),
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
        let blocks = (longest.unwrap_or(0) as u64).div_ceil(BATCH_LENGTHS.threads().into());
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
        let of_row = args.rows.tokens() as u64 / u64::from(args.page_size) + 1;
        let at_once = BLOCKS_OF_LIST * self.sm_count;
        let (groups, parts) = split(&KV_INDICES, batch_size, pieces_of(of_row), at_once);
        let params = KvIndicesParams {
            rows: TokenRows::of(&args.rows),
            kv_len: Integers::of(&args.kv_len),
            kv_start: Integers::of_any(args.kv_start),
            kv_indptr: Integers::of(&args.kv_indptr),
            kv_indices: Integers::of(&args.kv_indices),
            last_page_len: Integers::of_any(args.last_page_len),
            page_size: Divisor::new(args.page_size),
            window: args.window,
            parts: Divisor::new(parts as u32),
            batch_size: batch_size as u32,
        };
        let of = ("kv_len", Workers::Blocks(groups * parts));
        // SAFETY: as above, of a `FolioKvIndicesParams`.
        unsafe { self.kv_indices.enqueue(&params, of, stream) }
    }

    /// Makes a block table.
    pub fn block_table(&self, args: &Checked<BlockTableArgs>, stream: Stream) -> Result<()> {
        let [rows, columns] = [0, 1].map(|axis| args.block_table.extent(axis) as u64);
        let parts = columns.div_ceil(COLUMNS_OF_WARP);
        let parts = parts.min(ENOUGH_WARPS / rows.max(1)).max(1) as u32;
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
            Workers::Warps(rows.saturating_mul(parts.into())),
        );
        // SAFETY: as above, of a `FolioBlockTableParams`.
        unsafe { self.block_table.enqueue(&params, of, stream) }
    }

    /// Finds slots and positions.
    pub fn slot_mapping(&self, args: &Checked<SlotMappingArgs>, stream: Stream) -> Result<()> {
        let batch_size = args.kv_len.extent(0);
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
            reserved: 0,
        };
        let tokens = args.slot_mapping.extent(0) as u64;
        let blocks = tokens.div_ceil(TOKENS_OF_BLOCK).min(self.sm_count);
        let of = ("slot_mapping", Workers::Blocks(blocks));
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
        let steps = args.kv_indptr.extent(0) as u64;
        // What was drafted is a piece of its own, and every branch begins in a line of its own.
        let pieces = 1 + u64::from(args.topk) * pieces_of(args.rows.table.extent(1) as u64);
        let at_once = BLOCKS_OF_DRAFTS * self.sm_count / steps.max(1);
        let (groups, parts) = split(&DRAFT_KV_INDICES, batch_size, pieces, at_once);
        let blocks = groups * parts;
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
            blocks: Divisor::new(blocks as u32),
            parts: Divisor::new(parts as u32),
            reserved: 0,
        };
        let of = ("kv_indptr", Workers::Blocks(steps.saturating_mul(blocks)));
        // SAFETY: as above, of a `FolioDraftKvIndicesParams`.
        unsafe { self.draft_kv_indices.enqueue(&params, of, stream) }
    }
}

/// Pieces of a request with up to `numbers`, which need not begin where a piece does.
fn pieces_of(numbers: u64) -> u64 {
    numbers.div_ceil(PIECE) + 1
}

/// Groups of a batch, and how many blocks share one: as many as have a piece for every warp if requests are as long as
/// they can be, and up to `at_once` of all groups.
fn split(kernel: &'static Keyless, batch_size: i64, pieces: u64, at_once: u64) -> (u64, u64) {
    let batch_size = batch_size as u64;
    let groups = batch_size.div_ceil(GROUP).max(1);
    let warps = pieces * batch_size.min(GROUP);
    let blocks = (warps * WARP).div_ceil(kernel.threads().into());
    (groups, blocks.min(at_once / groups).max(1))
}
