//! Figures: pure functions of numbers on the host.

use super::error::folio_error;
use super::guard::guard;
use super::guard_value::guard_value;
use super::numbers::{number, numbers, output};
use super::sized::{self, Input, reserved};
use super::status::folio_status;
use crate::api::{
    self, CpLocalLengths, FlashMlaMetadata, MlaContextChunks, NumKvSplits, SplitDecodesAndPrefills,
};
use crate::error::Result;

/// Every decode has as many query rows as the first request.
pub const FOLIO_SPLIT_UNIFORM: u32 = 1;

/// Tokens that ranks of decode context parallelism hold of sequences: the token at position t is on rank
/// `t / interleave % world_size` (vLLM's get_dcp_local_seq_lens).
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct folio_cp_local_lengths_args {
    /// sizeof(folio_cp_local_lengths_args).
    pub struct_size: u32,
    /// 0.
    pub flags: u32,
    /// Number of ranks, 1 or more.
    pub world_size: u32,
    /// Tokens that are dealt to a rank at a time. 0: 1.
    pub interleave: u32,
    /// The rank whose lengths are wanted; -1: all ranks'.
    pub rank: i32,
    /// Sequences.
    pub num_lengths: u32,
    /// `[num_lengths]` tokens of each, 0 or more.
    pub lengths: *const i32,
    /// Output: `[num_lengths]`; for all ranks `[num_lengths, world_size]`.
    pub out: *mut i32,
    /// Numbers that out has room for.
    pub capacity: u64,
}

/// Contexts that are attended chunk by chunk, in a workspace of so many tokens: vLLM's chunked prefill metadata. Every
/// request with a context gets an equal share of the workspace, of whole pages. On several ranks a share is also a
/// whole number of rounds of `interleave · world_size` tokens, so that the chunks that ranks cut of what they hold are
/// those of the sequence.
///
/// With cu_seq_lens (one rank) or cu_padded_lens, and seq_starts, a row of the tables is what folio_mla_gather takes.
/// All tables are NULL where only num_chunks is wanted.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct folio_mla_context_chunks_args {
    /// sizeof(folio_mla_context_chunks_args).
    pub struct_size: u32,
    /// 0.
    pub flags: u32,
    /// Requests.
    pub num_requests: u32,
    /// Tokens per page, 1 or more.
    pub page_size: u32,
    /// Ranks that share every context. 0: 1.
    pub world_size: u32,
    /// As in folio_cp_local_lengths_args.
    pub interleave: u32,
    /// Tokens of the workspace, on all ranks; folio_mla_context_tokens says how many vLLM takes.
    pub workspace_tokens: u64,
    /// `[num_requests]` tokens in the cache before the new ones, 0 or more.
    pub context_lens: *const i32,
    /// Output: `[num_chunks, num_requests]` the first token of a chunk, counted on a rank; or NULL.
    pub seq_starts: *mut i32,
    /// Output: `[num_chunks, num_requests + 1]` tokens of all ranks before each request, and of all requests; or NULL.
    pub cu_seq_lens: *mut i32,
    /// Output: `[num_chunks, num_requests + 1]` tokens of a rank before each request, where every rank counts as many
    /// as the first one; or NULL.
    pub cu_padded_lens: *mut i32,
    /// Output: `[num_chunks]` most tokens of a request, of all ranks; or NULL.
    pub max_lens: *mut i32,
    /// Chunks that the tables have room for.
    pub max_num_chunks: u32,
    /// 0.
    pub reserved: u32,
    /// Output: the number of chunks.
    pub num_chunks: *mut u32,
    /// Output: tokens of a chunk of one request, of all ranks; or NULL.
    pub chunk_tokens: *mut u32,
}

/// The plan of FlashMLA's dense decode kernel: what its get_mla_metadata computes, for hosts that drive that kernel.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct folio_flashmla_metadata_args {
    /// sizeof(folio_flashmla_metadata_args).
    pub struct_size: u32,
    /// 0.
    pub flags: u32,
    /// Requests.
    pub batch_size: u32,
    /// Multiprocessors of the device.
    pub num_sms: u32,
    /// Query rows of every request.
    pub q_len: u32,
    /// Query heads, a multiple of num_kv_heads.
    pub num_heads: u32,
    /// KV heads.
    pub num_kv_heads: u32,
    /// 0.
    pub reserved: u32,
    /// `[batch_size]` keys of each request, those of this step included.
    pub seq_lens: *const i32,
    /// Output: `[num_sm_parts, 8]`: first request, last request, first block of 64 keys, block after the last, first
    /// split, whether the first and whether the last request are split, 0. A part whose first request is after its last
    /// one is idle.
    pub tile_scheduler_metadata: *mut i32,
    /// Numbers that it has room for; `8 · num_sms` is always enough.
    pub metadata_capacity: u64,
    /// Output: `[batch_size + 1]` splits before each request, and all of them.
    pub num_splits: *mut i32,
    /// Numbers that it has room for.
    pub num_splits_capacity: u64,
    /// Output: parts that the work is cut into.
    pub num_sm_parts: *mut u32,
}

/// Splits of the keys of decode requests as FastDeploy's Triton MLA backend makes them: one for each 256 keys.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct folio_num_kv_splits_args {
    /// sizeof(folio_num_kv_splits_args).
    pub struct_size: u32,
    /// 0.
    pub flags: u32,
    /// Requests.
    pub num_requests: u32,
    /// Most splits of a request. 0: 32.
    pub max_splits: u32,
    /// `[num_requests]` keys of each, 0 or more.
    pub kv_lens: *const i32,
    /// Output: `[capacity]` splits of each request, 1 or more; 1 for what is not a request.
    pub out: *mut i32,
    /// Numbers that out, and keys_per_split, have room for.
    pub capacity: u64,
    /// Output: `[capacity]` keys of a split, whole blocks of 32; split s has those from `s · keys` on, fewer or none at
    /// the end. 0 for what is not a request. Or NULL.
    pub keys_per_split: *mut i32,
}

/// A batch whose decodes come first, cut where prefills begin: vLLM's split_decodes_and_prefills. All requests are
/// decodes where none has more rows than the threshold. Otherwise prefills begin at the first request with more rows, or
/// with none; with FOLIO_SPLIT_UNIFORM and a threshold above 1, at the first with another number of rows than the first
/// request, and all are prefills where that one has more rows than the threshold.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct folio_split_decodes_and_prefills_args {
    /// sizeof(folio_split_decodes_and_prefills_args).
    pub struct_size: u32,
    /// FOLIO_SPLIT_UNIFORM or 0.
    pub flags: u32,
    /// Requests.
    pub num_requests: u32,
    /// Most query rows of a decode.
    pub decode_threshold: u32,
    /// `[num_requests]` query rows of each, 0 or more.
    pub query_lens: *const i32,
    /// Output: `[4]` decodes, prefills, query rows of decodes, query rows of prefills.
    pub out: *mut i32,
    /// Numbers that out has room for, 4 or more.
    pub capacity: u64,
}

const _: () = assert!(size_of::<folio_cp_local_lengths_args>() == 48);
const _: () = assert!(size_of::<folio_mla_context_chunks_args>() == 96);
const _: () = assert!(size_of::<folio_flashmla_metadata_args>() == 80);
const _: () = assert!(size_of::<folio_num_kv_splits_args>() == 48);
const _: () = assert!(size_of::<folio_split_decodes_and_prefills_args>() == 40);

// SAFETY: repr(C), two u32 first, numbers and pointers only, no padding (asserted by size).
unsafe impl Input for folio_cp_local_lengths_args {
    const NAME: &'static str = "folio_cp_local_lengths_args";
    const FIRST_SIZE: usize = 48;
    const FLAGS: u32 = 0;
    type Parsed = CpLocalLengths<'static>;

    unsafe fn parse(&self) -> Result<CpLocalLengths<'static>> {
        // SAFETY: the caller's promise about the arrays.
        unsafe {
            Ok(CpLocalLengths {
                lengths: numbers("lengths", self.lengths, self.num_lengths.into())?,
                world_size: self.world_size,
                interleave: self.interleave,
                rank: self.rank,
                out: output("out", self.out, self.capacity)?,
            })
        }
    }
}

// SAFETY: repr(C), two u32 first, numbers and pointers only, no padding (asserted by size).
unsafe impl Input for folio_mla_context_chunks_args {
    const NAME: &'static str = "folio_mla_context_chunks_args";
    const FIRST_SIZE: usize = 96;
    const FLAGS: u32 = 0;
    type Parsed = MlaContextChunks<'static>;

    unsafe fn parse(&self) -> Result<MlaContextChunks<'static>> {
        reserved("reserved", self.reserved)?;
        let requests = u64::from(self.num_requests);
        let rows = u64::from(self.max_num_chunks);
        // SAFETY: the caller's promise about the arrays.
        unsafe {
            let table = |name, table: *mut i32, columns: u64| match table.is_null() {
                true => Ok(None),
                false => output(name, table, rows.saturating_mul(columns)).map(Some),
            };
            Ok(MlaContextChunks {
                context_lens: numbers("context_lens", self.context_lens, requests)?,
                workspace_tokens: self.workspace_tokens,
                page_size: self.page_size,
                world_size: self.world_size,
                interleave: self.interleave,
                max_num_chunks: self.max_num_chunks,
                seq_starts: table("seq_starts", self.seq_starts, requests)?,
                cu_seq_lens: table("cu_seq_lens", self.cu_seq_lens, requests + 1)?,
                cu_padded_lens: table("cu_padded_lens", self.cu_padded_lens, requests + 1)?,
                max_lens: table("max_lens", self.max_lens, 1)?,
                num_chunks: number("num_chunks", self.num_chunks)?,
                chunk_tokens: self.chunk_tokens.as_mut(),
            })
        }
    }
}

// SAFETY: repr(C), two u32 first, numbers and pointers only, no padding (asserted by size).
unsafe impl Input for folio_flashmla_metadata_args {
    const NAME: &'static str = "folio_flashmla_metadata_args";
    const FIRST_SIZE: usize = 80;
    const FLAGS: u32 = 0;
    type Parsed = FlashMlaMetadata<'static>;

    unsafe fn parse(&self) -> Result<FlashMlaMetadata<'static>> {
        reserved("reserved", self.reserved)?;
        let (metadata, splits) = (self.metadata_capacity, self.num_splits_capacity);
        // SAFETY: the caller's promise about the arrays.
        unsafe {
            Ok(FlashMlaMetadata {
                seq_lens: numbers("seq_lens", self.seq_lens, self.batch_size.into())?,
                num_sms: self.num_sms,
                q_len: self.q_len,
                num_heads: self.num_heads,
                num_kv_heads: self.num_kv_heads,
                metadata: output(
                    "tile_scheduler_metadata",
                    self.tile_scheduler_metadata,
                    metadata,
                )?,
                num_splits: output("num_splits", self.num_splits, splits)?,
                num_parts: number("num_sm_parts", self.num_sm_parts)?,
            })
        }
    }
}

// SAFETY: repr(C), two u32 first, numbers and pointers only, no padding (asserted by size).
unsafe impl Input for folio_num_kv_splits_args {
    const NAME: &'static str = "folio_num_kv_splits_args";
    const FIRST_SIZE: usize = 48;
    const FLAGS: u32 = 0;
    type Parsed = NumKvSplits<'static>;

    unsafe fn parse(&self) -> Result<NumKvSplits<'static>> {
        // SAFETY: the caller's promise about the arrays.
        unsafe {
            Ok(NumKvSplits {
                kv_lens: numbers("kv_lens", self.kv_lens, self.num_requests.into())?,
                max_splits: self.max_splits,
                out: output("out", self.out, self.capacity)?,
                keys_per_split: match self.keys_per_split.is_null() {
                    true => None,
                    false => Some(output(
                        "keys_per_split",
                        self.keys_per_split,
                        self.capacity,
                    )?),
                },
            })
        }
    }
}

// SAFETY: repr(C), two u32 first, numbers and pointers only, no padding (asserted by size).
unsafe impl Input for folio_split_decodes_and_prefills_args {
    const NAME: &'static str = "folio_split_decodes_and_prefills_args";
    const FIRST_SIZE: usize = 40;
    const FLAGS: u32 = FOLIO_SPLIT_UNIFORM;
    type Parsed = SplitDecodesAndPrefills<'static>;

    unsafe fn parse(&self) -> Result<SplitDecodesAndPrefills<'static>> {
        // SAFETY: the caller's promise about the arrays.
        unsafe {
            Ok(SplitDecodesAndPrefills {
                query_lens: numbers("query_lens", self.query_lens, self.num_requests.into())?,
                decode_threshold: self.decode_threshold,
                uniform: self.flags & FOLIO_SPLIT_UNIFORM != 0,
                out: output("out", self.out, self.capacity)?,
            })
        }
    }
}

/// One call of a pure function.
///
/// # Safety
/// `args` as in [`sized::parse`], `err` as in `guard`.
pub(super) unsafe fn compute<A: Input>(
    args: *const A,
    err: *mut folio_error,
    function: fn(A::Parsed) -> Result<()>,
) -> folio_status {
    // SAFETY: the caller's promises.
    unsafe { guard(err, None, || function(sized::parse(args)?)) }
}

/// Says how many tokens ranks of decode context parallelism hold of sequences.
///
/// @param args lengths and output
/// @param err report of a failure, or NULL
/// @return FOLIO_OK, or INVALID_ARGUMENT, INVALID_STRUCT_SIZE, UNKNOWN_FIELD; then nothing was written
///
/// # Safety
/// The struct and its arrays are as the fields say; the output overlaps nothing. Any thread, any time.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn folio_cp_local_lengths(
    args: *const folio_cp_local_lengths_args,
    err: *mut folio_error,
) -> folio_status {
    // SAFETY: the documented promises of the caller.
    unsafe { compute(args, err, api::cp_local_lengths) }
}

/// Tokens of the workspace that vLLM takes for chunks of contexts: `min(max(8 · max_model_len, 4 · max_num_seqs ·
/// page_size), 65536)`, but at least `max_num_seqs · page_size`. Any thread, any time.
///
/// @param max_model_len longest sequence
/// @param max_num_seqs most requests of a batch
/// @param page_size tokens per page
/// @return tokens
#[unsafe(no_mangle)]
pub extern "C" fn folio_mla_context_tokens(
    max_model_len: u32,
    max_num_seqs: u32,
    page_size: u32,
) -> u64 {
    guard_value(0, || {
        api::mla_context_tokens(max_model_len.into(), max_num_seqs.into(), page_size.into())
    })
}

/// Cuts contexts into chunks that fit a workspace.
///
/// @param args contexts and tables
/// @param err report of a failure, or NULL
/// @return FOLIO_OK, or INVALID_ARGUMENT, INVALID_STRUCT_SIZE, UNKNOWN_FIELD; then nothing was written
///
/// # Safety
/// The struct and its arrays are as the fields say; the outputs overlap nothing. Any thread, any time.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn folio_mla_context_chunks(
    args: *const folio_mla_context_chunks_args,
    err: *mut folio_error,
) -> folio_status {
    // SAFETY: the documented promises of the caller.
    unsafe { compute(args, err, api::mla_context_chunks) }
}

/// Computes the plan of FlashMLA's dense decode kernel on the host.
///
/// @param args lengths, sizes and outputs
/// @param err report of a failure, or NULL
/// @return FOLIO_OK, or INVALID_ARGUMENT, INVALID_STRUCT_SIZE, UNKNOWN_FIELD; then nothing was written
///
/// # Safety
/// The struct and its arrays are as the fields say; the outputs overlap nothing. Any thread, any time.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn folio_flashmla_metadata(
    args: *const folio_flashmla_metadata_args,
    err: *mut folio_error,
) -> folio_status {
    // SAFETY: the documented promises of the caller.
    unsafe { compute(args, err, api::flashmla_metadata) }
}

/// Says into how many splits FastDeploy's Triton MLA backend cuts the keys of requests.
///
/// @param args lengths and outputs
/// @param err report of a failure, or NULL
/// @return FOLIO_OK, or INVALID_ARGUMENT, INVALID_STRUCT_SIZE, UNKNOWN_FIELD; then nothing was written
///
/// # Safety
/// The struct and its arrays are as the fields say; the outputs overlap nothing. Any thread, any time.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn folio_num_kv_splits(
    args: *const folio_num_kv_splits_args,
    err: *mut folio_error,
) -> folio_status {
    // SAFETY: the documented promises of the caller.
    unsafe { compute(args, err, api::num_kv_splits) }
}

/// Says where the prefills of a batch begin.
///
/// @param args lengths and output
/// @param err report of a failure, or NULL
/// @return FOLIO_OK, or INVALID_ARGUMENT, INVALID_STRUCT_SIZE, UNKNOWN_FIELD; then nothing was written
///
/// # Safety
/// The struct and its arrays are as the fields say; the output overlaps nothing. Any thread, any time.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn folio_split_decodes_and_prefills(
    args: *const folio_split_decodes_and_prefills_args,
    err: *mut folio_error,
) -> folio_status {
    // SAFETY: the documented promises of the caller.
    unsafe { compute(args, err, api::split_decodes_and_prefills) }
}
