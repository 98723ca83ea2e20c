//! Merges of attention states.

use super::context::{folio_context, operate};
use super::error::folio_error;
use super::sized::Input;
use super::status::folio_status;
use super::tensor::{folio_tensor, log_base, required, tensor};
use crate::api;
use crate::error::Result;
use crate::problem::{MergeArgs, MergeStatesArgs};
use std::ffi::c_void;

/// All lse of a merge are in base 2 instead of base e.
pub const FOLIO_MERGE_LSE_BASE_2: u32 = 1;

/// Two attention states (v, s) of the same rows, over disjoint sets of keys, to be merged:
/// FlashInfer's merge_state, and merge_state_in_place where v_out is v_a. s is the lse. An s of -inf
/// (or +inf, as FlashAttention-2 marks it) is an empty state; two empty states give 0 and -inf.
///
/// An output may be the input of its kind: v_out v_a or v_b, s_out s_a or s_b, with the same address and the same
/// strides. Any other overlap of an output with another tensor, in part too, makes the outputs undefined. The
/// rows of v have a unit last stride; all other strides are free.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct folio_merge_state_args {
    /// sizeof(folio_merge_state_args).
    pub struct_size: u32,
    /// FOLIO_MERGE_…
    pub flags: u32,
    /// `[num_tokens, num_heads, head_dim]` float32, float16 or bfloat16.
    pub v_a: *const folio_tensor,
    /// `[num_tokens, num_heads]` float32.
    pub s_a: *const folio_tensor,
    /// As v_a.
    pub v_b: *const folio_tensor,
    /// As s_a.
    pub s_b: *const folio_tensor,
    /// Output: as v_a; may be v_a or v_b itself.
    pub v_out: *const folio_tensor,
    /// Output: as s_a; may be s_a or s_b itself; or NULL.
    pub s_out: *const folio_tensor,
    /// `[num_tokens]` uint8 or bool, or NULL: a zero leaves the row of the outputs as it is.
    pub mask: *const folio_tensor,
}

/// n attention states per row, over disjoint sets of keys, to be merged: FlashInfer's merge_states. No state
/// gives 0 and -inf. The outputs may not overlap the states. Strides as in folio_merge_state_args.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct folio_merge_states_args {
    /// sizeof(folio_merge_states_args).
    pub struct_size: u32,
    /// FOLIO_MERGE_…
    pub flags: u32,
    /// `[num_tokens, n, num_heads, head_dim]` float32, float16 or bfloat16.
    pub v: *const folio_tensor,
    /// `[num_tokens, n, num_heads]` float32.
    pub s: *const folio_tensor,
    /// Output: `[num_tokens, num_heads, head_dim]`.
    pub v_out: *const folio_tensor,
    /// Output: `[num_tokens, num_heads]` float32, or NULL.
    pub s_out: *const folio_tensor,
}

const _: () = assert!(size_of::<folio_merge_state_args>() == 64);
const _: () = assert!(size_of::<folio_merge_states_args>() == 40);

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
        // SAFETY: the caller's promise about the tensors.
        unsafe {
            Ok(MergeStatesArgs {
                v: required("v", self.v)?,
                s: required("s", self.s)?,
                v_out: required("v_out", self.v_out)?,
                s_out: tensor("s_out", self.s_out)?,
                lse_base: log_base(self.flags & FOLIO_MERGE_LSE_BASE_2),
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
