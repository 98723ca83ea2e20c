//! Operators that build a batch's indices.

use super::context::{folio_context, operate};
use super::error::folio_error;
use super::sized::{Input, reserved};
use super::status::folio_status;
use super::tensor::{folio_tensor, required, tensor};
use crate::api;
use crate::error::{Error, Result};
use crate::problem::{
    BatchLengthsArgs, BlockTableArgs, DraftKvIndicesArgs, DraftSlots, KvIndicesArgs, QueryRows,
    SlotMappingArgs, TokenRows,
};
use std::ffi::c_void;

/// The request has no new tokens.
pub const FOLIO_ROW_INACTIVE: i32 = 0;
/// The request has new tokens and encoder_len above 0: a prompt, or a part of it.
pub const FOLIO_ROW_PREFILL: i32 = 1;
/// Any other request with new tokens.
pub const FOLIO_ROW_DECODE: i32 = 2;

/// The slot of step i and branch t is entry `kv_len + i · topk + t`.
pub const FOLIO_DRAFT_STEP_MAJOR: i32 = 0;
/// The slot of step i and branch t is entry `kv_len + t · num_steps + i`.
pub const FOLIO_DRAFT_BRANCH_MAJOR: i32 = 1;
/// Every branch has whole pages: with `r = kv_len % page_size`, the slot of step i and branch t is entry
/// `kv_len - r + t · ceil((r + num_steps) / page_size) · page_size + r + i`.
pub const FOLIO_DRAFT_PAGED: i32 = 2;

/// Lengths of a step, and what follows from them: vLLM's query_start_loc and seq_lens, SGLang's qo_indptr and kv_indptr,
/// and FastDeploy's lengths, of which seq_lens_this_time is qo_len, seq_lens_decoder is cached_len and seq_lens_encoder is
/// encoder_len. For cumulative lengths alone, give them as qo_len and take qo_indptr.
///
/// Outputs may be longer than the batch, as those of CUDA graphs are: cumulative lengths then stay at their last value,
/// and the others are 0. At least one output is not NULL.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct folio_batch_lengths_args {
    /// sizeof(folio_batch_lengths_args).
    pub struct_size: u32,
    /// 0.
    pub flags: u32,
    /// `[batch_size]` new tokens of each request, 0 or more. A request without any is inactive. A negative number on a
    /// device counts as 0.
    pub qo_len: *const folio_tensor,
    /// `[batch_size]` tokens in the cache before the new ones, 0 or more; NULL: none; for kv_len and kv_indptr only.
    pub cached_len: *const folio_tensor,
    /// `[batch_size]`: above 0 where new tokens are of a prompt; for row_kind, and only for it.
    pub encoder_len: *const folio_tensor,
    /// Output: `[batch_size + 1 or more]` new tokens before each request; or NULL. An int32 sum beyond int32 is refused
    /// on the host and saturates on a device.
    pub qo_indptr: *const folio_tensor,
    /// Output: `[batch_size or more]` `cached_len + qo_len` of active requests and 0 of others; or NULL.
    pub kv_len: *const folio_tensor,
    /// Output: `[batch_size + 1 or more]` the same summed up, as qo_indptr; or NULL.
    pub kv_indptr: *const folio_tensor,
    /// Output: `[batch_size or more]` FOLIO_ROW_…; or NULL.
    pub row_kind: *const folio_tensor,
}

/// A table of pages or slots, to be listed request by request: vLLM's block table as FlashInfer's kv_indptr, kv_indices
/// and last_page_len, and SGLang's req_to_token as its kv_indptr and kv_indices (create_flashinfer_kv_indices).
///
/// Index n of a request stands for its tokens from `n · indices_page_size` on. It is the slot of the first of them (its
/// entry's id times page_size, plus its place in the page) divided by indices_page_size, rounded down. So pages may be
/// listed as they are, or as slots (indices_page_size 1), and a table of slots (page_size 1) may be listed as pages, if
/// the tokens of a page have neighbouring slots.
///
/// A negative entry gives -1, and so does an index that the type of kv_indices cannot hold.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct folio_kv_indices_args {
    /// sizeof(folio_kv_indices_args).
    pub struct_size: u32,
    /// 0.
    pub flags: u32,
    /// `[rows, columns]` page ids, or slots where page_size is 1; rows may be strided. Without row_ids there is a row per
    /// request, or more. Entries of tokens that are not listed are not read.
    pub block_table: *const folio_tensor,
    /// `[batch_size]` row of each request, SGLang's req_pool_indices; NULL: its own number. One beyond the table is
    /// refused on the host; on a device the request is empty.
    pub row_ids: *const folio_tensor,
    /// `[batch_size]` tokens of each request. More than a row has entries for are refused on the host and cut off on a
    /// device.
    pub kv_len: *const folio_tensor,
    /// `[batch_size]` first token that is listed, 0 to kv_len; NULL: 0.
    pub kv_start: *const folio_tensor,
    /// Output: `[batch_size + 1 or more]` indices before each request; beyond the batch, of all.
    pub kv_indptr: *const folio_tensor,
    /// Output: `[capacity]`; what is left of it is not written. Too little room is refused on the host. On a device the
    /// list ends there, and kv_indptr says so.
    pub kv_indices: *const folio_tensor,
    /// Output: `[batch_size or more]` tokens in the last listed page, 0 where there is none; or NULL.
    pub last_page_len: *const folio_tensor,
    /// Tokens per entry of block_table, 1 or more.
    pub page_size: u32,
    /// Tokens per index: a divisor or a multiple of page_size; 1: slots. 0: page_size.
    pub indices_page_size: u32,
    /// Only so many last tokens are listed, from the page of the first of them on. 0: all.
    pub window: u32,
    /// 0.
    pub reserved: u32,
}

/// A list of pages or slots, to be turned into a block table.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct folio_block_table_args {
    /// sizeof(folio_block_table_args).
    pub struct_size: u32,
    /// 0.
    pub flags: u32,
    /// `[batch_size + 1]` indices before each request, from 0 on.
    pub kv_indptr: *const folio_tensor,
    /// `[n]`.
    pub kv_indices: *const folio_tensor,
    /// Output: `[batch_size or more, columns]`; rows may be strided. More indices than columns are refused on the host
    /// and cut off on a device. An index that its type cannot hold, or a negative one, gives -1.
    pub block_table: *const folio_tensor,
    /// What entries get that no index stands for, those of rows beyond the batch among them: -1, or what the host takes.
    pub fill: i32,
    /// 0.
    pub reserved: u32,
}

/// Where new tokens go: vLLM's and FastDeploy's slot_mapping and positions (get_position_ids_and_slot_mapping). The new
/// tokens of a request are its last ones: token i of them has position `kv_len - qo_len + i` and slot
/// `id · page_size + position % page_size`, where id is entry `position / page_size` of the request's row.
///
/// A negative entry gives slot -1, and so does a slot that the type of slot_mapping cannot hold. Elements beyond the new
/// tokens become -1 in both outputs.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct folio_slot_mapping_args {
    /// sizeof(folio_slot_mapping_args).
    pub struct_size: u32,
    /// 0.
    pub flags: u32,
    /// As in folio_kv_indices_args.
    pub block_table: *const folio_tensor,
    /// As in folio_kv_indices_args. On a device the tokens of a request without a row have slot -1.
    pub row_ids: *const folio_tensor,
    /// `[batch_size + 1]` new tokens before each request, from 0 on; or NULL with qo_len.
    pub qo_indptr: *const folio_tensor,
    /// `[batch_size]` new tokens of each request; or NULL with qo_indptr.
    pub qo_len: *const folio_tensor,
    /// `[batch_size]` tokens of each request, the new ones included: qo_len or more, up to what a row has entries for. On
    /// a device tokens outside have slot -1, and position -1 where it would be negative.
    pub kv_len: *const folio_tensor,
    /// Output: `[num_tokens or more]`. Too little room is refused on the host and leaves tokens out on a device.
    pub slot_mapping: *const folio_tensor,
    /// Output: as many; or NULL.
    pub positions: *const folio_tensor,
    /// Tokens per entry of block_table, 1 or more.
    pub page_size: u32,
    /// 0.
    pub reserved: u32,
}

/// The lists of slots for all steps of a draft with branches: kv_indptr and kv_indices of SGLang's multi-step draft
/// decoding. Step s has a request per branch, `b · topk + t`. Its slots are those of the kv_len tokens of request b, then
/// those of the tokens that branch t drafted in steps 0 to s.
///
/// A negative entry gives -1, and so does a slot that the type of kv_indices cannot hold.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct folio_draft_kv_indices_args {
    /// sizeof(folio_draft_kv_indices_args).
    pub struct_size: u32,
    /// 0.
    pub flags: u32,
    /// `[rows, columns]` slots; rows may be strided. Without row_ids there is a row per request, or more.
    pub req_to_token: *const folio_tensor,
    /// As in folio_kv_indices_args.
    pub row_ids: *const folio_tensor,
    /// `[batch_size]` tokens of each request, without drafts. Where the drafts end beyond the columns it is refused on the
    /// host; on a device slots beyond them are -1.
    pub kv_len: *const folio_tensor,
    /// Output: `[steps, batch_size · topk + 1 or more]` slots before each branch; beyond the batch, of all.
    pub kv_indptr: *const folio_tensor,
    /// Output: `[steps, capacity]`, as kv_indices in folio_kv_indices_args.
    pub kv_indices: *const folio_tensor,
    /// Branches of each request, 1 to 65535.
    pub topk: u32,
    /// Steps that branches have slots for: those of kv_indptr or more, up to 65535. 0: those of kv_indptr.
    pub num_steps: u32,
    /// Slots per page with FOLIO_DRAFT_PAGED; else 0.
    pub page_size: u32,
    /// Where drafted tokens stand in a row: FOLIO_DRAFT_…
    pub slot_layout: i32,
}

const _: () = assert!(size_of::<folio_batch_lengths_args>() == 64);
const _: () = assert!(size_of::<folio_kv_indices_args>() == 80);
const _: () = assert!(size_of::<folio_block_table_args>() == 40);
const _: () = assert!(size_of::<folio_slot_mapping_args>() == 72);
const _: () = assert!(size_of::<folio_draft_kv_indices_args>() == 64);

// SAFETY: repr(C), two u32 first, numbers and pointers only, no padding (asserted by size).
unsafe impl Input for folio_batch_lengths_args {
    const NAME: &'static str = "folio_batch_lengths_args";
    const FIRST_SIZE: usize = 64;
    const FLAGS: u32 = 0;
    type Parsed = BatchLengthsArgs;

    unsafe fn parse(&self) -> Result<BatchLengthsArgs> {
        // SAFETY: the caller's promise about the tensors.
        unsafe {
            Ok(BatchLengthsArgs {
                qo_len: required("qo_len", self.qo_len)?,
                cached_len: tensor("cached_len", self.cached_len)?,
                encoder_len: tensor("encoder_len", self.encoder_len)?,
                qo_indptr: tensor("qo_indptr", self.qo_indptr)?,
                kv_len: tensor("kv_len", self.kv_len)?,
                kv_indptr: tensor("kv_indptr", self.kv_indptr)?,
                row_kind: tensor("row_kind", self.row_kind)?,
            })
        }
    }
}

// SAFETY: repr(C), two u32 first, numbers and pointers only, no padding (asserted by size).
unsafe impl Input for folio_kv_indices_args {
    const NAME: &'static str = "folio_kv_indices_args";
    const FIRST_SIZE: usize = 80;
    const FLAGS: u32 = 0;
    type Parsed = KvIndicesArgs;

    unsafe fn parse(&self) -> Result<KvIndicesArgs> {
        reserved("reserved", self.reserved)?;
        // SAFETY: the caller's promise about the tensors.
        unsafe {
            Ok(KvIndicesArgs {
                rows: TokenRows {
                    table: required("block_table", self.block_table)?,
                    row_ids: tensor("row_ids", self.row_ids)?,
                    page_size: self.page_size,
                },
                kv_len: required("kv_len", self.kv_len)?,
                kv_start: tensor("kv_start", self.kv_start)?,
                window: self.window,
                page_size: self.indices_page_size,
                kv_indptr: required("kv_indptr", self.kv_indptr)?,
                kv_indices: required("kv_indices", self.kv_indices)?,
                last_page_len: tensor("last_page_len", self.last_page_len)?,
            })
        }
    }
}

// SAFETY: repr(C), two u32 first, numbers and pointers only, no padding (asserted by size).
unsafe impl Input for folio_block_table_args {
    const NAME: &'static str = "folio_block_table_args";
    const FIRST_SIZE: usize = 40;
    const FLAGS: u32 = 0;
    type Parsed = BlockTableArgs;

    unsafe fn parse(&self) -> Result<BlockTableArgs> {
        reserved("reserved", self.reserved)?;
        // SAFETY: the caller's promise about the tensors.
        unsafe {
            Ok(BlockTableArgs {
                kv_indptr: required("kv_indptr", self.kv_indptr)?,
                kv_indices: required("kv_indices", self.kv_indices)?,
                block_table: required("block_table", self.block_table)?,
                fill: self.fill,
            })
        }
    }
}

// SAFETY: repr(C), two u32 first, numbers and pointers only, no padding (asserted by size).
unsafe impl Input for folio_slot_mapping_args {
    const NAME: &'static str = "folio_slot_mapping_args";
    const FIRST_SIZE: usize = 72;
    const FLAGS: u32 = 0;
    type Parsed = SlotMappingArgs;

    unsafe fn parse(&self) -> Result<SlotMappingArgs> {
        reserved("reserved", self.reserved)?;
        // SAFETY: the caller's promise about the tensors.
        unsafe {
            Ok(SlotMappingArgs {
                rows: TokenRows {
                    table: required("block_table", self.block_table)?,
                    row_ids: tensor("row_ids", self.row_ids)?,
                    page_size: self.page_size,
                },
                queries: self.queries()?,
                kv_len: required("kv_len", self.kv_len)?,
                slot_mapping: required("slot_mapping", self.slot_mapping)?,
                positions: tensor("positions", self.positions)?,
            })
        }
    }
}

impl folio_slot_mapping_args {
    /// The one form of new tokens that is there.
    ///
    /// # Safety
    /// As [`tensor`].
    unsafe fn queries(&self) -> Result<QueryRows> {
        // SAFETY: the caller's promise about the tensors.
        unsafe {
            match tensor("qo_len", self.qo_len)? {
                None => Ok(QueryRows::Indptr(required("qo_indptr", self.qo_indptr)?)),
                Some(_) if !self.qo_indptr.is_null() => Err(Error::InvalidArgument(
                    "qo_indptr: a tensor is not accepted beside qo_len; NULL is".into(),
                )),
                Some(len) => Ok(QueryRows::Len(len)),
            }
        }
    }
}

// SAFETY: repr(C), two u32 first, numbers and pointers only, no padding (asserted by size).
unsafe impl Input for folio_draft_kv_indices_args {
    const NAME: &'static str = "folio_draft_kv_indices_args";
    const FIRST_SIZE: usize = 64;
    const FLAGS: u32 = 0;
    type Parsed = DraftKvIndicesArgs;

    unsafe fn parse(&self) -> Result<DraftKvIndicesArgs> {
        // SAFETY: the caller's promise about the tensors.
        unsafe {
            Ok(DraftKvIndicesArgs {
                rows: TokenRows {
                    table: required("req_to_token", self.req_to_token)?,
                    row_ids: tensor("row_ids", self.row_ids)?,
                    page_size: 1,
                },
                kv_len: required("kv_len", self.kv_len)?,
                topk: self.topk,
                num_steps: self.num_steps,
                slots: self.slots()?,
                kv_indptr: required("kv_indptr", self.kv_indptr)?,
                kv_indices: required("kv_indices", self.kv_indices)?,
            })
        }
    }
}

impl folio_draft_kv_indices_args {
    fn slots(&self) -> Result<DraftSlots> {
        match (self.slot_layout, self.page_size) {
            (FOLIO_DRAFT_PAGED, page_size) => Ok(DraftSlots::Paged(page_size)),
            (FOLIO_DRAFT_STEP_MAJOR, 0) => Ok(DraftSlots::StepMajor),
            (FOLIO_DRAFT_BRANCH_MAJOR, 0) => Ok(DraftSlots::BranchMajor),
            (FOLIO_DRAFT_STEP_MAJOR | FOLIO_DRAFT_BRANCH_MAJOR, page_size) => {
                Err(Error::InvalidArgument(format!(
                    "page_size: {page_size} is not accepted without FOLIO_DRAFT_PAGED; 0 is"
                )))
            }
            (layout, _) => Err(Error::InvalidArgument(format!(
                "slot_layout: {layout} is not accepted; FOLIO_DRAFT_STEP_MAJOR (0) to FOLIO_DRAFT_PAGED (2) is"
            ))),
        }
    }
}

/// Computes cumulative lengths and what else follows from the lengths of a step.
///
/// On CUDA the kernel reads the lengths. The first call on a context
/// loads code and answers CAPTURE in a capture. Later ones can be captured: they are one launch each. On the CPU the
/// outputs are complete on return.
///
/// @param ctx the device
/// @param args tensors and numbers
/// @param stream CUDA stream, or NULL on the CPU
/// @param err report of a failure, or NULL
/// @return FOLIO_OK, or INVALID_ARGUMENT, INVALID_STRUCT_SIZE, UNKNOWN_FIELD, SHAPE, DTYPE, DEVICE_MISMATCH,
///         CAPTURE, UNSUPPORTED, COMPILE, OUT_OF_MEMORY, DRIVER; then nothing was written
///
/// # Safety
/// `ctx` is alive; the structs are readable, and the tensors' memory as the fields say; outputs overlap nothing.
/// Concurrent use is fine with different outputs.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn folio_batch_lengths(
    ctx: *const folio_context,
    args: *const folio_batch_lengths_args,
    stream: *mut c_void,
    err: *mut folio_error,
) -> folio_status {
    // SAFETY: the documented promises of the caller.
    unsafe { operate(ctx, args, stream, err, api::batch_lengths) }
}

/// Lists the pages or slots of every request's tokens.
///
/// On CUDA the kernel reads lengths and table. The first call on a context
/// loads code and answers CAPTURE in a capture. Later ones can be captured: they are one launch each. On the CPU the
/// outputs are complete on return.
///
/// @param ctx the device
/// @param args tensors and numbers
/// @param stream CUDA stream, or NULL on the CPU
/// @param err report of a failure, or NULL
/// @return FOLIO_OK, or INVALID_ARGUMENT, INVALID_STRUCT_SIZE, UNKNOWN_FIELD, SHAPE, DTYPE, DEVICE_MISMATCH,
///         CAPTURE, UNSUPPORTED, COMPILE, OUT_OF_MEMORY, DRIVER; then nothing was written
///
/// # Safety
/// `ctx` is alive; the structs are readable, and the tensors' memory as the fields say; outputs overlap nothing.
/// Concurrent use is fine with different outputs.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn folio_kv_indices(
    ctx: *const folio_context,
    args: *const folio_kv_indices_args,
    stream: *mut c_void,
    err: *mut folio_error,
) -> folio_status {
    // SAFETY: the documented promises of the caller.
    unsafe { operate(ctx, args, stream, err, api::kv_indices) }
}

/// Makes a block table of a list.
///
/// On CUDA the kernel reads the list. The first call on a context
/// loads code and answers CAPTURE in a capture. Later ones can be captured: they are one launch each. On the CPU the
/// outputs are complete on return.
///
/// @param ctx the device
/// @param args tensors and numbers
/// @param stream CUDA stream, or NULL on the CPU
/// @param err report of a failure, or NULL
/// @return FOLIO_OK, or INVALID_ARGUMENT, INVALID_STRUCT_SIZE, UNKNOWN_FIELD, SHAPE, DTYPE, DEVICE_MISMATCH,
///         CAPTURE, UNSUPPORTED, COMPILE, OUT_OF_MEMORY, DRIVER; then nothing was written
///
/// # Safety
/// `ctx` is alive; the structs are readable, and the tensors' memory as the fields say; outputs overlap nothing.
/// Concurrent use is fine with different outputs.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn folio_block_table(
    ctx: *const folio_context,
    args: *const folio_block_table_args,
    stream: *mut c_void,
    err: *mut folio_error,
) -> folio_status {
    // SAFETY: the documented promises of the caller.
    unsafe { operate(ctx, args, stream, err, api::block_table) }
}

/// Finds the slots and positions of new tokens.
///
/// On CUDA the kernel reads lengths and table. The first call on a context
/// loads code and answers CAPTURE in a capture. Later ones can be captured: they are one launch each. On the CPU the
/// outputs are complete on return.
///
/// @param ctx the device
/// @param args tensors and numbers
/// @param stream CUDA stream, or NULL on the CPU
/// @param err report of a failure, or NULL
/// @return FOLIO_OK, or INVALID_ARGUMENT, INVALID_STRUCT_SIZE, UNKNOWN_FIELD, SHAPE, DTYPE, DEVICE_MISMATCH,
///         CAPTURE, UNSUPPORTED, COMPILE, OUT_OF_MEMORY, DRIVER; then nothing was written
///
/// # Safety
/// `ctx` is alive; the structs are readable, and the tensors' memory as the fields say; outputs overlap nothing.
/// Concurrent use is fine with different outputs.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn folio_slot_mapping(
    ctx: *const folio_context,
    args: *const folio_slot_mapping_args,
    stream: *mut c_void,
    err: *mut folio_error,
) -> folio_status {
    // SAFETY: the documented promises of the caller.
    unsafe { operate(ctx, args, stream, err, api::slot_mapping) }
}

/// Lists the slots of every branch of a draft for each of its steps.
///
/// On CUDA the kernel reads lengths and table. The first call on a context
/// loads code and answers CAPTURE in a capture. Later ones can be captured: they are one launch each. On the CPU the
/// outputs are complete on return.
///
/// @param ctx the device
/// @param args tensors and numbers
/// @param stream CUDA stream, or NULL on the CPU
/// @param err report of a failure, or NULL
/// @return FOLIO_OK, or INVALID_ARGUMENT, INVALID_STRUCT_SIZE, UNKNOWN_FIELD, SHAPE, DTYPE, DEVICE_MISMATCH,
///         CAPTURE, UNSUPPORTED, COMPILE, OUT_OF_MEMORY, DRIVER; then nothing was written
///
/// # Safety
/// `ctx` is alive; the structs are readable, and the tensors' memory as the fields say; outputs overlap nothing.
/// Concurrent use is fine with different outputs.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn folio_draft_kv_indices(
    ctx: *const folio_context,
    args: *const folio_draft_kv_indices_args,
    stream: *mut c_void,
    err: *mut folio_error,
) -> folio_status {
    // SAFETY: the documented promises of the caller.
    unsafe { operate(ctx, args, stream, err, api::draft_kv_indices) }
}
