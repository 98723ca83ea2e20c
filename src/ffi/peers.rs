//! What the schedulers of SGLang and vLLM decide about a batch: pure functions of numbers on the host.

use super::error::folio_error;
use super::figures::compute;
use super::numbers::{number, numbers, output};
use super::sized::{Input, reserved};
use super::status::folio_status;
use crate::api::{self, BalancedKvSplits, ReorderBatch, UseCascade};
use crate::error::Result;

/// Every request gets the most splits.
pub const FOLIO_BALANCED_KV_SPLITS_STATIC: u32 = 1;

/// The model uses ALiBi.
pub const FOLIO_USE_CASCADE_ALIBI: u32 = 1;
/// A layer has a sliding window.
pub const FOLIO_USE_CASCADE_SLIDING_WINDOW: u32 = 2;
/// A layer attends locally.
pub const FOLIO_USE_CASCADE_LOCAL_ATTENTION: u32 = 4;
/// Ranks share the keys.
pub const FOLIO_USE_CASCADE_CONTEXT_PARALLEL: u32 = 8;

const RULES_OUT_CASCADE: u32 = FOLIO_USE_CASCADE_ALIBI
    | FOLIO_USE_CASCADE_SLIDING_WINDOW
    | FOLIO_USE_CASCADE_LOCAL_ATTENTION
    | FOLIO_USE_CASCADE_CONTEXT_PARALLEL;

/// Splits of the keys of decode requests as SGLang's Triton backend makes them (get_num_kv_splits). Lengths within a
/// quarter of each other count as equal. Others are cut to about the shortest; and the more the fewer rows there are for
/// the multiprocessors. The larger of the two numbers counts.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct folio_balanced_kv_splits_args {
    /// sizeof(folio_balanced_kv_splits_args).
    pub struct_size: u32,
    /// FOLIO_BALANCED_KV_SPLITS_STATIC or 0.
    pub flags: u32,
    /// Requests.
    pub num_requests: u32,
    /// Rows of each request: branches of a draft. 0: 1.
    pub num_group: u32,
    /// Query heads, a multiple of num_kv_heads.
    pub num_heads: u32,
    /// KV heads.
    pub num_kv_heads: u32,
    /// Multiprocessors of the device. 0: every request gets the most splits.
    pub num_sms: u32,
    /// Most splits of a request. 0: 8.
    pub max_splits: u32,
    /// `[num_requests]` keys of each, 1 or more.
    pub seq_lens: *const i32,
    /// Output: `[num_requests, num_group]`.
    pub out: *mut i32,
    /// Numbers that out has room for.
    pub capacity: u64,
}

/// vLLM's use_cascade_attention: whether its FlashAttention backend would attend a prefix that all requests share once.
/// folio_cascade decides by itself.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct folio_use_cascade_args {
    /// sizeof(folio_use_cascade_args).
    pub struct_size: u32,
    /// FOLIO_USE_CASCADE_…: each of them rules a cascade out.
    pub flags: u32,
    /// Requests.
    pub num_requests: u32,
    /// Keys that all of them share.
    pub common_prefix_len: u32,
    /// Query heads, a multiple of num_kv_heads.
    pub num_heads: u32,
    /// KV heads.
    pub num_kv_heads: u32,
    /// Multiprocessors of the device, 1 or more.
    pub num_sms: u32,
    /// 0.
    pub reserved: u32,
    /// `[num_requests]` query rows of each, 0 or more.
    pub query_lens: *const i32,
    /// Output: 1: yes; 0: no.
    pub out: *mut u32,
}

/// The order that vLLM's backends want a batch in (reorder_batch).
///
/// Without context_lens, as in its first releases, decodes come first: requests with up to decode_threshold rows. The
/// last decodes change places with the first prefills.
///
/// With context_lens, as in later ones (reorder_batch_to_split_decodes_and_prefills), decodes come first: requests with up
/// to decode_threshold rows and a context; then other requests with a context; then those without. Only requests that
/// stand in the wrong region move. Those of a region fill its free places in their order.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct folio_reorder_batch_args {
    /// sizeof(folio_reorder_batch_args).
    pub struct_size: u32,
    /// 0.
    pub flags: u32,
    /// Requests.
    pub num_requests: u32,
    /// Most query rows of a decode.
    pub decode_threshold: u32,
    /// `[num_requests]` query rows of each, 0 or more.
    pub query_lens: *const i32,
    /// `[num_requests]` tokens in the cache before the new ones, 0 or more; or NULL.
    pub context_lens: *const i32,
    /// Output: `[num_requests]`: where the request of each place stood before.
    pub order: *mut i32,
    /// Numbers that order has room for.
    pub order_capacity: u64,
    /// Output: `[num_swaps, 2]` places to be swapped, one pair after the other, which makes the order; or NULL.
    pub swaps: *mut i32,
    /// Numbers that swaps has room for; `2 · num_requests` is always enough.
    pub swaps_capacity: u64,
    /// Output: the number of pairs.
    pub num_swaps: *mut u32,
}

const _: () = assert!(size_of::<folio_balanced_kv_splits_args>() == 56);
const _: () = assert!(size_of::<folio_use_cascade_args>() == 48);
const _: () = assert!(size_of::<folio_reorder_batch_args>() == 72);

// SAFETY: repr(C), two u32 first, numbers and pointers only, no padding (asserted by size).
unsafe impl Input for folio_balanced_kv_splits_args {
    const NAME: &'static str = "folio_balanced_kv_splits_args";
    const FIRST_SIZE: usize = 56;
    const FLAGS: u32 = FOLIO_BALANCED_KV_SPLITS_STATIC;
    type Parsed = BalancedKvSplits<'static>;

    unsafe fn parse(&self) -> Result<BalancedKvSplits<'static>> {
        // SAFETY: the caller's promise about the arrays.
        unsafe {
            Ok(BalancedKvSplits {
                seq_lens: numbers("seq_lens", self.seq_lens, self.num_requests.into())?,
                num_group: self.num_group,
                num_heads: self.num_heads,
                num_kv_heads: self.num_kv_heads,
                num_sms: self.num_sms,
                max_splits: self.max_splits,
                is_static: self.flags & FOLIO_BALANCED_KV_SPLITS_STATIC != 0,
                out: output("out", self.out, self.capacity)?,
            })
        }
    }
}

// SAFETY: repr(C), two u32 first, numbers and pointers only, no padding (asserted by size).
unsafe impl Input for folio_use_cascade_args {
    const NAME: &'static str = "folio_use_cascade_args";
    const FIRST_SIZE: usize = 48;
    const FLAGS: u32 = RULES_OUT_CASCADE;
    type Parsed = UseCascade<'static>;

    unsafe fn parse(&self) -> Result<UseCascade<'static>> {
        reserved("reserved", self.reserved)?;
        // SAFETY: the caller's promise about the arrays.
        unsafe {
            Ok(UseCascade {
                common_prefix_len: self.common_prefix_len,
                query_lens: numbers("query_lens", self.query_lens, self.num_requests.into())?,
                num_heads: self.num_heads,
                num_kv_heads: self.num_kv_heads,
                num_sms: self.num_sms,
                is_ruled_out: self.flags & RULES_OUT_CASCADE != 0,
                out: number("out", self.out)?,
            })
        }
    }
}

// SAFETY: repr(C), two u32 first, numbers and pointers only, no padding (asserted by size).
unsafe impl Input for folio_reorder_batch_args {
    const NAME: &'static str = "folio_reorder_batch_args";
    const FIRST_SIZE: usize = 72;
    const FLAGS: u32 = 0;
    type Parsed = ReorderBatch<'static>;

    unsafe fn parse(&self) -> Result<ReorderBatch<'static>> {
        let requests = self.num_requests.into();
        // SAFETY: the caller's promise about the arrays.
        unsafe {
            Ok(ReorderBatch {
                query_lens: numbers("query_lens", self.query_lens, requests)?,
                context_lens: match self.context_lens.is_null() {
                    true => None,
                    false => Some(numbers("context_lens", self.context_lens, requests)?),
                },
                decode_threshold: self.decode_threshold,
                order: output("order", self.order, self.order_capacity)?,
                swaps: match self.swaps.is_null() {
                    true => None,
                    false => Some(output("swaps", self.swaps, self.swaps_capacity)?),
                },
                num_swaps: number("num_swaps", self.num_swaps)?,
            })
        }
    }
}

/// Says into how many splits SGLang cuts the keys of decode requests.
///
/// @param args lengths, sizes and output
/// @param err report of a failure, or NULL
/// @return FOLIO_OK, or INVALID_ARGUMENT, INVALID_STRUCT_SIZE, UNKNOWN_FIELD; then nothing was written
///
/// # Safety
/// The struct and its arrays are as the fields say; the output overlaps nothing. Any thread, any time.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn folio_balanced_kv_splits(
    args: *const folio_balanced_kv_splits_args,
    err: *mut folio_error,
) -> folio_status {
    // SAFETY: the documented promises of the caller.
    unsafe { compute(args, err, api::balanced_splits) }
}

/// Says whether vLLM would attend a shared prefix once.
///
/// @param args lengths, sizes and output
/// @param err report of a failure, or NULL
/// @return FOLIO_OK, or INVALID_ARGUMENT, INVALID_STRUCT_SIZE, UNKNOWN_FIELD; then nothing was written
///
/// # Safety
/// The struct and its arrays are as the fields say; the output overlaps nothing. Any thread, any time.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn folio_use_cascade(
    args: *const folio_use_cascade_args,
    err: *mut folio_error,
) -> folio_status {
    // SAFETY: the documented promises of the caller.
    unsafe { compute(args, err, api::use_cascade) }
}

/// Says in which order vLLM's backends want a batch.
///
/// @param args lengths and outputs
/// @param err report of a failure, or NULL
/// @return FOLIO_OK, or INVALID_ARGUMENT, INVALID_STRUCT_SIZE, UNKNOWN_FIELD; then nothing was written
///
/// # Safety
/// The struct and its arrays are as the fields say; the outputs overlap nothing. Any thread, any time.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn folio_reorder_batch(
    args: *const folio_reorder_batch_args,
    err: *mut folio_error,
) -> folio_status {
    // SAFETY: the documented promises of the caller.
    unsafe { compute(args, err, api::reorder_batch) }
}
