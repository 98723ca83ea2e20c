//! A step's batch: lengths and page table.

use super::sized::{Input, reserved};
use super::tensor::{folio_tensor, tensor};
use crate::api::BatchInput;
use crate::error::{Error, Result};

/// folio_batch.window_left is in force. Without the flag it must be 0 (or -1).
pub const FOLIO_BATCH_WINDOW: u32 = 1;

/// One step's lengths and page table. Index tensors are contiguous, each int32 or int64; block_table's rows may be
/// apart. The page table comes in one of these forms:
///
/// | form | fields | known from |
/// |---|---|---|
/// | CSR | kv_indptr in pages, kv_indices, and last_page_len or kv_len, not both | FlashInfer |
/// | token slots | CSR with page_size 1: kv_indptr in tokens, kv_indices | SGLang |
/// | block table | block_table, kv_len | vLLM |
/// | ragged | kv_indptr in tokens (prefill with FOLIO_KV_RAGGED) | FlashInfer |
///
/// A request may own more pages than its keys need; those are not read.
///
/// Lengths (qo_indptr, kv_indptr, last_page_len, kv_len) are all on the host, or all on the context's
/// device; page ids (kv_indices, block_table) on either. Lengths on a device need page ids on it. Host tensors
/// are only read during plan. Device tensors must stay as they are until the last run of the plan has finished:
/// plan's kernel reads the lengths, runs read the page ids. int32 page ids may be changed between runs, in stream order;
/// each run reads those that it finds.
///
/// Numbers of int64 are copied as int32. On the host those in use that do not fit are refused. On a device one more launch
/// of plan copies them to the workspace, page ids where there is room for max_num_pages of them (a block table's first
/// max_kv_len / page_size columns; more are refused), so runs do not read them.
///
/// Numbers on the host are checked. Numbers on a device cannot be: lengths beyond the desc's maxima, beyond the
/// page table or beyond the rows of a tensor, and page ids beyond the cache, give wrong results, but no access
/// outside the tensors and the workspace that were passed.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct folio_batch {
    /// sizeof(folio_batch).
    pub struct_size: u32,
    /// FOLIO_BATCH_WINDOW.
    pub flags: u32,
    /// Query rows of every request where qo_indptr is NULL (decode only); 0: 1.
    pub qo_len: u32,
    /// 0.
    pub reserved: u32,
    /// `[batch_size + 1]` query-row offsets from 0; decode accepts NULL.
    pub qo_indptr: *const folio_tensor,
    /// `[batch_size + 1]` offsets from 0 into kv_indices, or into ragged K and V.
    pub kv_indptr: *const folio_tensor,
    /// `[num_pages or more]` page ids, 0 or more.
    pub kv_indices: *const folio_tensor,
    /// `[batch_size]` tokens in the last page, 1 to page_size; not read for requests without pages. Refused
    /// together with kv_len.
    pub last_page_len: *const folio_tensor,
    /// `[batch_size]` keys per request, those of this step included; 0 or more. With a new_kv_dtype, those in the cache.
    pub kv_len: *const folio_tensor,
    /// `[batch_size, max_pages_per_request]` page ids; only those that kv_len needs are read.
    pub block_table: *const folio_tensor,
    /// No run of the plan sees a key more than so many before its row's own position: a run with a wider window is refused,
    /// and one with mm_prefix_ranges that reach beyond it. Keys before the window are not planned for, which saves time
    /// where it is short. -1: unlimited. Needs FOLIO_BATCH_WINDOW. For decode and
    /// prefill over the cache; MLA, cascades and handles with a new_kv_dtype refuse it. Where captured runs are replayed,
    /// every plan is for the window of those runs or a wider one: a replay cannot be refused.
    pub window_left: i64,
}

const _: () = assert!(size_of::<folio_batch>() == 72);

// SAFETY: repr(C), two u32 first, integers and pointers only, no padding (asserted by size).
unsafe impl Input for folio_batch {
    const NAME: &'static str = "folio_batch";
    const FIRST_SIZE: usize = 64;
    const FLAGS: u32 = FOLIO_BATCH_WINDOW;
    type Parsed = BatchInput;

    unsafe fn parse(&self) -> Result<BatchInput> {
        reserved("folio_batch.reserved", self.reserved)?;
        // SAFETY: the caller's promise.
        unsafe {
            Ok(BatchInput {
                qo_indptr: tensor("qo_indptr", self.qo_indptr)?,
                qo_len: self.qo_len,
                kv_indptr: tensor("kv_indptr", self.kv_indptr)?,
                kv_indices: tensor("kv_indices", self.kv_indices)?,
                last_page_len: tensor("last_page_len", self.last_page_len)?,
                kv_len: tensor("kv_len", self.kv_len)?,
                block_table: tensor("block_table", self.block_table)?,
                window_left: planned_window(self.flags, self.window_left)?,
            })
        }
    }
}

fn planned_window(flags: u32, left: i64) -> Result<Option<u32>> {
    let accepted = match (flags & FOLIO_BATCH_WINDOW != 0, left) {
        (_, -1) | (false, 0) => return Ok(None),
        // No run has a window that is wider than u32.
        (true, 0..) => return Ok(Some(u32::try_from(left).unwrap_or(u32::MAX))),
        (true, _) => "is not accepted; -1 (unlimited) or more is",
        (false, _) => "is not accepted without FOLIO_BATCH_WINDOW in flags; 0 or -1 is",
    };
    Err(Error::InvalidArgument(format!(
        "folio_batch.window_left: {left} {accepted}"
    )))
}
