//! Merges of attention states.

use super::context::{folio_context, operate};
use super::error::folio_error;
use super::sized::{Input, reserved};
use super::status::folio_status;
use super::tensor::{folio_tensor, log_base, required, tensor};
use crate::api;
use crate::error::Result;
use crate::problem::{MergeArgs, MergeStatesArgs, MergeVarlenArgs};
use std::ffi::c_void;

/// All lse of a merge are in base 2 instead of base e.
pub const FOLIO_MERGE_LSE_BASE_2: u32 = 1;

/// Two attention states (v, s) of the same rows, over disjoint sets of keys, to be merged:
/// FlashInfer's merge_state, merge_state_in_place where v_out is v_a, and vLLM's merge_attn_states, whose prefix is
/// state a. s is the lse. An s of -inf (or +inf, as FlashAttention-2 marks it, or NaN) is an empty state, whose v counts
/// for nothing, whatever it is; two empty states give 0 and -inf. Beside an empty state the other one stays as it is.
///
/// An output may be the input of its kind: v_out v_a or v_b, s_out s_a or s_b, with the same address and the same
/// strides. Any other overlap of an output with another tensor, in part too, makes the outputs undefined. The
/// rows of v have a unit last stride; all other strides are free, so that an lse of `[num_heads, num_tokens]`
/// is given as `[num_tokens, num_heads]` with the strides 1 and num_tokens. Every lse has strides of its own.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct folio_merge_state_args {
    /// sizeof(folio_merge_state_args).
    pub struct_size: u32,
    /// FOLIO_MERGE_…
    pub flags: u32,
    /// `[num_tokens, num_heads, head_dim]` float32, float16 or bfloat16.
    pub v_a: *const folio_tensor,
    /// `[num_tokens, num_heads]` float32, float16 or bfloat16.
    pub s_a: *const folio_tensor,
    /// As v_a.
    pub v_b: *const folio_tensor,
    /// As s_a, and of its type.
    pub s_b: *const folio_tensor,
    /// Output: as v_a, and may be v_a or v_b itself; or in float8_e4m3 or float8_e5m2, which holds o / o_scale, saturated.
    pub v_out: *const folio_tensor,
    /// Output: as s_a, in any of those types; may be s_a or s_b itself; or NULL.
    pub s_out: *const folio_tensor,
    /// `[num_tokens]` uint8 or bool, or NULL: a zero leaves the row of the outputs as it is.
    pub mask: *const folio_tensor,
    /// Divisor of o, 2^-60 to 2^60; only for fp8 outputs. 0: 1.
    pub o_scale: f32,
    /// The last so many tokens have no state a: nothing of it is read, and the outputs are state b. In vLLM's terms
    /// num_tokens - prefill_tokens_with_context. At most num_tokens; 0: all tokens have both.
    pub num_tokens_without_a: u32,
}

/// n attention states per row, over disjoint sets of keys, to be merged: FlashInfer's merge_states. No state
/// gives 0 and -inf. The outputs may not overlap the states. Empty states and strides as in folio_merge_state_args.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct folio_merge_states_args {
    /// sizeof(folio_merge_states_args).
    pub struct_size: u32,
    /// FOLIO_MERGE_…
    pub flags: u32,
    /// `[num_tokens, n, num_heads, head_dim]` float32, float16 or bfloat16.
    pub v: *const folio_tensor,
    /// `[num_tokens, n, num_heads]` float32, float16 or bfloat16.
    pub s: *const folio_tensor,
    /// Output: `[num_tokens, num_heads, head_dim]` of the type of v, or in fp8 as in folio_merge_state_args.
    pub v_out: *const folio_tensor,
    /// Output: `[num_tokens, num_heads]` float32, float16 or bfloat16, or NULL.
    pub s_out: *const folio_tensor,
    /// As in folio_merge_state_args.
    pub o_scale: f32,
    /// 0.
    pub reserved: u32,
}

/// As many attention states per token as each has, over disjoint sets of keys, to be merged: what split keys, or the
/// levels of a cascade, leave where rows have different numbers of parts (FlashInfer's variable-length merge of states).
/// Token t has the states `indptr[t]` to `indptr[t + 1]`, without the last. A token with none gives 0 and -inf, one
/// with one state is that state. The outputs may not overlap the states. Empty states and strides as in
/// folio_merge_state_args.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct folio_merge_varlen_args {
    /// sizeof(folio_merge_varlen_args).
    pub struct_size: u32,
    /// FOLIO_MERGE_…
    pub flags: u32,
    /// `[num_states, num_heads, head_dim]` float32, float16 or bfloat16: the states of all tokens.
    pub v: *const folio_tensor,
    /// `[num_states, num_heads]` float32, float16 or bfloat16.
    pub s: *const folio_tensor,
    /// `[num_tokens + 1]` int32, contiguous, on the context's device: numbers from 0 to num_states, none below the one
    /// before it. On the CPU they are checked. On CUDA a token has those of its states that exist.
    pub indptr: *const folio_tensor,
    /// Output: `[num_tokens, num_heads, head_dim]` of the type of v, or in fp8 as in folio_merge_state_args.
    pub v_out: *const folio_tensor,
    /// Output: `[num_tokens, num_heads]` float32, float16 or bfloat16, or NULL.
    pub s_out: *const folio_tensor,
    /// As in folio_merge_state_args.
    pub o_scale: f32,
    /// 0.
    pub reserved: u32,
}

const _: () = assert!(size_of::<folio_merge_state_args>() == 72);
const _: () = assert!(size_of::<folio_merge_states_args>() == 48);
const _: () = assert!(size_of::<folio_merge_varlen_args>() == 56);

// SAFETY: repr(C), two u32 first, numbers and pointers only, no padding (asserted by size).
unsafe impl Input for folio_merge_state_args {
    const NAME: &'static str = "folio_merge_state_args";
    const FIRST_SIZE: usize = 64;
    const FLAGS: u32 = FOLIO_MERGE_LSE_BASE_2;
    type Parsed = MergeArgs;

    unsafe fn parse(&self) -> Result<MergeArgs> {
        // SAFETY: the caller's promise about the tensors.
        unsafe {
            Ok(MergeArgs {
                v_a: required("v_a", self.v_a)?,
                s_a: required("s_a", self.s_a)?,
                v_b: required("v_b", self.v_b)?,
                s_b: required("s_b", self.s_b)?,
                v_out: required("v_out", self.v_out)?,
                s_out: tensor("s_out", self.s_out)?,
                mask: tensor("mask", self.mask)?,
                lse_base: log_base(self.flags & FOLIO_MERGE_LSE_BASE_2),
                num_tokens_without_a: self.num_tokens_without_a.into(),
                o_scale: self.o_scale,
            })
        }
    }
}

// SAFETY: repr(C), two u32 first, numbers and pointers only, no padding (asserted by size).
unsafe impl Input for folio_merge_states_args {
    const NAME: &'static str = "folio_merge_states_args";
    const FIRST_SIZE: usize = 40;
    const FLAGS: u32 = FOLIO_MERGE_LSE_BASE_2;
    type Parsed = MergeStatesArgs;

    unsafe fn parse(&self) -> Result<MergeStatesArgs> {
        reserved("reserved", self.reserved)?;
        // SAFETY: the caller's promise about the tensors.
        unsafe {
            Ok(MergeStatesArgs {
                v: required("v", self.v)?,
                s: required("s", self.s)?,
                v_out: required("v_out", self.v_out)?,
                s_out: tensor("s_out", self.s_out)?,
                lse_base: log_base(self.flags & FOLIO_MERGE_LSE_BASE_2),
                o_scale: self.o_scale,
            })
        }
    }
}

// SAFETY: repr(C), two u32 first, numbers and pointers only, no padding (asserted by size).
unsafe impl Input for folio_merge_varlen_args {
    const NAME: &'static str = "folio_merge_varlen_args";
    const FIRST_SIZE: usize = 56;
    const FLAGS: u32 = FOLIO_MERGE_LSE_BASE_2;
    type Parsed = MergeVarlenArgs;

    unsafe fn parse(&self) -> Result<MergeVarlenArgs> {
        reserved("reserved", self.reserved)?;
        // SAFETY: the caller's promise about the tensors.
        unsafe {
            Ok(MergeVarlenArgs {
                v: required("v", self.v)?,
                s: required("s", self.s)?,
                indptr: required("indptr", self.indptr)?,
                v_out: required("v_out", self.v_out)?,
                s_out: tensor("s_out", self.s_out)?,
                lse_base: log_base(self.flags & FOLIO_MERGE_LSE_BASE_2),
                o_scale: self.o_scale,
            })
        }
    }
}

/// Merges two attention states.
///
/// On CUDA the first merge on a context with given types loads code and answers CAPTURE in a capture. Later ones
/// can be captured: they are one launch each. On the CPU the outputs are complete on return.
///
/// @param ctx the device
/// @param args the states
/// @param stream CUDA stream, or NULL on the CPU
/// @param err report of a failure, or NULL
/// @return FOLIO_OK, or INVALID_ARGUMENT, INVALID_STRUCT_SIZE, UNKNOWN_FIELD, SHAPE, DTYPE, DEVICE_MISMATCH,
///         CAPTURE, UNSUPPORTED, COMPILE, OUT_OF_MEMORY, DRIVER; then nothing was written
///
/// # Safety
/// `ctx` is alive; the structs are readable, and the tensors' memory as the fields say. Concurrent use
/// is fine with different outputs.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn folio_merge_state(
    ctx: *const folio_context,
    args: *const folio_merge_state_args,
    stream: *mut c_void,
    err: *mut folio_error,
) -> folio_status {
    // SAFETY: the documented promises of the caller.
    unsafe { operate(ctx, args, stream, err, api::merge) }
}

/// Merges n attention states per row.
///
/// @copydetails folio_merge_state
///
/// # Safety
/// As folio_merge_state.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn folio_merge_states(
    ctx: *const folio_context,
    args: *const folio_merge_states_args,
    stream: *mut c_void,
    err: *mut folio_error,
) -> folio_status {
    // SAFETY: the documented promises of the caller.
    unsafe { operate(ctx, args, stream, err, api::merge_states) }
}

/// Merges as many attention states per token as each has.
///
/// @copydetails folio_merge_state
///
/// # Safety
/// As folio_merge_state.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn folio_merge_varlen(
    ctx: *const folio_context,
    args: *const folio_merge_varlen_args,
    stream: *mut c_void,
    err: *mut folio_error,
) -> folio_status {
    // SAFETY: the documented promises of the caller.
    unsafe { operate(ctx, args, stream, err, api::merge_varlen) }
}
