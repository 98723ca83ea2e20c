//! Decode context parallelism: every rank holds a part of each sequence's keys.

use super::context::{folio_context, operate};
use super::error::folio_error;
use super::sized::{Input, reserved};
use super::status::folio_status;
use super::tensor::{folio_tensor, log_base, required, tensor};
use crate::api;
use crate::error::Result;
use crate::problem::{CpCorrectArgs, CpReorderArgs};
use std::ffi::c_void;

/// All lse of a correction are in base 2 instead of base e.
pub const FOLIO_CP_LSE_BASE_2: u32 = 1;

/// A chunk of every context, gathered from all ranks (an all-gather of what folio_mla_gather gave on each), to be put
/// request by request: vLLM's reorg_kvcache. A request's rows are those of rank 0, then of rank 1, and so on. They are not in
/// the order of their positions, which attention without a mask does not ask for. The output may not overlap others.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct folio_cp_reorder_args {
    /// sizeof(folio_cp_reorder_args).
    pub struct_size: u32,
    /// 0.
    pub flags: u32,
    /// `[world_size, rank_rows, width]` of any type but integers: as many rows of every rank. Of each request there are
    /// as many as the first rank holds.
    pub gathered: *const folio_tensor,
    /// Output: `[num_rows, width]` of gathered's type.
    pub dst: *const folio_tensor,
    /// `[batch_size]` int32: tokens of each context, on all ranks.
    pub context_lens: *const folio_tensor,
    /// `[batch_size + 1]` int32: rows of dst before each request. A row of the table of folio_mla_context_chunks, on the
    /// context's device.
    pub cu_seq_lens: *const folio_tensor,
    /// `[batch_size + 1]` int32: rows of a rank before each request. As cu_seq_lens.
    pub cu_padded_lens: *const folio_tensor,
    /// Tokens of a rank before the chunk: a number of seq_starts of folio_mla_context_chunks.
    pub local_start: u32,
    /// As in folio_cp_local_lengths_args.
    pub interleave: u32,
}

/// One rank's output over the keys that it holds, to be scaled by its share of the softmax over all keys. The sum of
/// all ranks' scaled outputs (an all-reduce or a reduce-scatter) is the output over all keys. An lse of -inf, +inf or
/// NaN is that of a rank without keys, whose output counts for nothing, whatever it is: it gives 0.
///
/// o_out may be o itself, with the same address and the same strides, and else overlaps nothing.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct folio_cp_correct_args {
    /// sizeof(folio_cp_correct_args).
    pub struct_size: u32,
    /// FOLIO_CP_LSE_BASE_2 or 0.
    pub flags: u32,
    /// `[world_size, num_tokens, num_heads]` float32, of all ranks; strides are free, so `[world_size, num_heads,
    /// num_tokens]` will do by its strides.
    pub lse_all: *const folio_tensor,
    /// `[num_tokens, num_heads, head_dim]` float32, float16 or bfloat16.
    pub o: *const folio_tensor,
    /// Output: as o; may be o itself.
    pub o_out: *const folio_tensor,
    /// Output: `[num_tokens, num_heads]` float32, the lse over all keys, -inf where there are none; or NULL.
    pub lse_out: *const folio_tensor,
    /// Whose output it is, below world_size.
    pub rank: u32,
    /// 0.
    pub reserved: u32,
}

const _: () = assert!(size_of::<folio_cp_reorder_args>() == 56);
const _: () = assert!(size_of::<folio_cp_correct_args>() == 48);

// SAFETY: repr(C), two u32 first, numbers and pointers only, no padding (asserted by size).
unsafe impl Input for folio_cp_reorder_args {
    const NAME: &'static str = "folio_cp_reorder_args";
    const FIRST_SIZE: usize = 56;
    const FLAGS: u32 = 0;
    type Parsed = CpReorderArgs;

    unsafe fn parse(&self) -> Result<CpReorderArgs> {
        // SAFETY: the caller's promise about the tensors.
        unsafe {
            Ok(CpReorderArgs {
                gathered: required("gathered", self.gathered)?,
                dst: required("dst", self.dst)?,
                context_lens: required("context_lens", self.context_lens)?,
                cu_seq_lens: required("cu_seq_lens", self.cu_seq_lens)?,
                cu_padded_lens: required("cu_padded_lens", self.cu_padded_lens)?,
                local_start: self.local_start,
                interleave: self.interleave,
            })
        }
    }
}

// SAFETY: repr(C), two u32 first, numbers and pointers only, no padding (asserted by size).
unsafe impl Input for folio_cp_correct_args {
    const NAME: &'static str = "folio_cp_correct_args";
    const FIRST_SIZE: usize = 48;
    const FLAGS: u32 = FOLIO_CP_LSE_BASE_2;
    type Parsed = CpCorrectArgs;

    unsafe fn parse(&self) -> Result<CpCorrectArgs> {
        reserved("reserved", self.reserved)?;
        // SAFETY: the caller's promise about the tensors.
        unsafe {
            Ok(CpCorrectArgs {
                lse_all: required("lse_all", self.lse_all)?,
                rank: self.rank,
                o: required("o", self.o)?,
                o_out: required("o_out", self.o_out)?,
                lse_out: tensor("lse_out", self.lse_out)?,
                lse_base: log_base(self.flags & FOLIO_CP_LSE_BASE_2),
            })
        }
    }
}

/// Puts records that were gathered rank by rank request by request.
///
/// On CUDA lengths are read by the kernel, and rows that do not exist are not written. The first call on a context
/// loads code and answers CAPTURE in a capture. Later ones can be captured: they are one launch each. On the CPU
/// lengths are checked, and the rows are complete on return.
///
/// @param ctx the device
/// @param args tensors
/// @param stream CUDA stream, or NULL on the CPU
/// @param err report of a failure, or NULL
/// @return FOLIO_OK, or INVALID_ARGUMENT, INVALID_STRUCT_SIZE, UNKNOWN_FIELD, SHAPE, DTYPE, DEVICE_MISMATCH,
///         CAPTURE, UNSUPPORTED, COMPILE, OUT_OF_MEMORY, DRIVER; then nothing was written
///
/// # Safety
/// `ctx` is alive; the structs are readable, and the tensors' memory as the fields say. Concurrent use
/// is fine with different outputs.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn folio_cp_reorder(
    ctx: *const folio_context,
    args: *const folio_cp_reorder_args,
    stream: *mut c_void,
    err: *mut folio_error,
) -> folio_status {
    // SAFETY: the documented promises of the caller.
    unsafe { operate(ctx, args, stream, err, api::cp_reorder) }
}

/// Scales one rank's output by its share of the softmax over all ranks' keys.
///
/// On CUDA the first call on a context loads code and answers CAPTURE in a capture. Later ones can be captured: they
/// are one launch each. On the CPU the outputs are complete on return.
///
/// @param ctx the device
/// @param args the output and all ranks' lse
/// @param stream CUDA stream, or NULL on the CPU
/// @param err report of a failure, or NULL
/// @return FOLIO_OK, or INVALID_ARGUMENT, INVALID_STRUCT_SIZE, UNKNOWN_FIELD, SHAPE, DTYPE, DEVICE_MISMATCH,
///         CAPTURE, UNSUPPORTED, COMPILE, OUT_OF_MEMORY, DRIVER; then nothing was written
///
/// # Safety
/// `ctx` is alive; the structs are readable, and the tensors' memory as the fields say. Concurrent use
/// is fine with different outputs.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn folio_cp_correct(
    ctx: *const folio_context,
    args: *const folio_cp_correct_args,
    stream: *mut c_void,
    err: *mut folio_error,
) -> folio_status {
    // SAFETY: the documented promises of the caller.
    unsafe { operate(ctx, args, stream, err, api::cp_correct) }
}
