//! KV append and merges of attention states.

use super::context::folio_context;
use super::error::{folio_error, folio_status};
use super::handle;
use super::sized::{self, Input};
use super::types::{folio_dtype, folio_tensor, layout, log_base, required, tensor};
use crate::api::{self, Stream};
use crate::error::Result;
use crate::problem::{AppendArgs, MergeArgs, MergeStatesArgs};
use std::ffi::c_void;

/// All lse of a merge are in base 2 instead of base e.
pub const FOLIO_MERGE_LSE_BASE_2: u32 = 1;

/// New tokens for a paged cache: vLLM's reshape_and_cache_flash.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct folio_kv_append_args {
    /// sizeof(folio_kv_append_args).
    pub struct_size: u32,
    /// 0.
    pub flags: u32,
    /// `[num_tokens or more, num_kv_heads, head_dim_qk]` float32, float16 or bfloat16; any strides with a
    /// unit last one, so a slice of a fused QKV tensor will do.
    pub key: *const folio_tensor,
    /// `[num_tokens or more, num_kv_heads, head_dim_vo]`, of key's type.
    pub value: *const folio_tensor,
    /// Output: the key cache, in kv_layout: `[num_pages, page_size, num_kv_heads, head_dim_qk]` or
    /// `[num_pages, num_kv_heads, page_size, head_dim_qk]`, or `[num_slots, num_kv_heads, head_dim_qk]`;
    /// of key's type or fp8.
    pub k_cache: *const folio_tensor,
    /// Output: the value cache, as k_cache with head_dim_vo and strides of its own.
    pub v_cache: *const folio_tensor,
    /// `[num_tokens]` int32 or int64: page · page_size + offset; a negative slot skips the token. Its
    /// length is the number of tokens.
    pub slot_mapping: *const folio_tensor,
    /// float32, 1 or num_kv_heads elements, or NULL; fp8 caches only.
    pub k_scales: *const folio_tensor,
    /// float32, 1 or num_kv_heads elements, or NULL; fp8 caches only.
    pub v_scales: *const folio_tensor,
    /// An fp8 cache gets `key / (k_scale · k_scales[head])`, rounded to nearest even, saturated. 0: 1.
    pub k_scale: f32,
    /// As k_scale. 0: 1.
    pub v_scale: f32,
    /// FOLIO_LAYOUT_NHD or FOLIO_LAYOUT_HND.
    pub kv_layout: i32,
    /// What caches that are described as uint8 hold (an fp8 type); all zero: the tensors say it.
    pub kv_dtype: folio_dtype,
}

/// Two attention states (v, s) of the same rows, over disjoint sets of keys, to be merged:
/// FlashInfer's merge_state, and merge_state_in_place where v_out is v_a. s is the lse. An s of -inf
/// (or +inf, as FlashAttention-2 marks it) is an empty state; two empty states give 0 and -inf.
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
    /// Output: as v_a; may be v_a or v_b.
    pub v_out: *const folio_tensor,
    /// Output: as s_a; may be s_a or s_b; or NULL.
    pub s_out: *const folio_tensor,
    /// `[num_tokens]` uint8 or NULL: a zero leaves the row of the outputs as it is.
    pub mask: *const folio_tensor,
}

/// n attention states per row, over disjoint sets of keys, to be merged: FlashInfer's merge_states.
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

const _: () = assert!(size_of::<folio_kv_append_args>() == 80);
const _: () = assert!(size_of::<folio_merge_state_args>() == 64);
const _: () = assert!(size_of::<folio_merge_states_args>() == 40);

// SAFETY: repr(C), two u32 first, numbers and pointers only, no padding (asserted by size).
unsafe impl Input for folio_kv_append_args {
    const NAME: &'static str = "folio_kv_append_args";
    const FIRST_SIZE: usize = 80;
    const FLAGS: u32 = 0;
}

// SAFETY: as above.
unsafe impl Input for folio_merge_state_args {
    const NAME: &'static str = "folio_merge_state_args";
    const FIRST_SIZE: usize = 64;
    const FLAGS: u32 = FOLIO_MERGE_LSE_BASE_2;
}

// SAFETY: as above.
unsafe impl Input for folio_merge_states_args {
    const NAME: &'static str = "folio_merge_states_args";
    const FIRST_SIZE: usize = 40;
    const FLAGS: u32 = FOLIO_MERGE_LSE_BASE_2;
}

impl folio_kv_append_args {
    unsafe fn parse(&self) -> Result<AppendArgs> {
        // SAFETY: the caller's promise about the tensors.
        unsafe {
            Ok(AppendArgs {
                key: required("key", self.key)?,
                value: required("value", self.value)?,
                k_cache: required("k_cache", self.k_cache)?,
                v_cache: required("v_cache", self.v_cache)?,
                layout: layout("kv_layout", self.kv_layout)?,
                kv_dtype: self.kv_dtype.parse_optional("kv_dtype")?,
                slot_mapping: required("slot_mapping", self.slot_mapping)?,
                k_scale: self.k_scale,
                v_scale: self.v_scale,
                k_scales: tensor("k_scales", self.k_scales)?,
                v_scales: tensor("v_scales", self.v_scales)?,
            })
        }
    }
}

impl folio_merge_state_args {
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

impl folio_merge_states_args {
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

/// Writes new tokens to a paged cache, quantising to fp8 where the cache is fp8.
///
/// @param ctx the device
/// @param args tensors and scales
/// @param stream CUDA stream, or NULL on the CPU
/// @param err report of a failure, or NULL
/// @return FOLIO_OK, or INVALID_ARGUMENT, SHAPE, DTYPE, DEVICE_MISMATCH, UNSUPPORTED, DRIVER; then nothing
///         was written
///
/// # Safety
/// `ctx` is alive; the structs are readable, and the tensors' memory as the fields say. Concurrent use
/// is fine where no slot is written by two calls, or by two tokens of one call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn folio_kv_append(
    ctx: *const folio_context,
    args: *const folio_kv_append_args,
    stream: *mut c_void,
    err: *mut folio_error,
) -> folio_status {
    // SAFETY: the documented promises of the caller.
    unsafe {
        handle::shared(ctx, err, |ctx| {
            api::append(ctx, &sized::read(args)?.parse()?, Stream(stream as usize))
        })
    }
}

/// Merges two attention states.
///
/// @param ctx the device
/// @param args the states
/// @param stream CUDA stream, or NULL on the CPU
/// @param err report of a failure, or NULL
/// @return FOLIO_OK, or INVALID_ARGUMENT, SHAPE, DTYPE, DEVICE_MISMATCH, UNSUPPORTED, DRIVER; then nothing
///         was written
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
    unsafe {
        handle::shared(ctx, err, |ctx| {
            api::merge(ctx, &sized::read(args)?.parse()?, Stream(stream as usize))
        })
    }
}

/// Merges n attention states per row.
///
/// @param ctx the device
/// @param args the states
/// @param stream CUDA stream, or NULL on the CPU
/// @param err report of a failure, or NULL
/// @return FOLIO_OK, or INVALID_ARGUMENT, SHAPE, DTYPE, DEVICE_MISMATCH, UNSUPPORTED, DRIVER; then nothing
///         was written
///
/// # Safety
/// `ctx` is alive; the structs are readable, and the tensors' memory as the fields say. Concurrent use
/// is fine with different outputs.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn folio_merge_states(
    ctx: *const folio_context,
    args: *const folio_merge_states_args,
    stream: *mut c_void,
    err: *mut folio_error,
) -> folio_status {
    // SAFETY: the documented promises of the caller.
    unsafe {
        handle::shared(ctx, err, |ctx| {
            api::merge_states(ctx, &sized::read(args)?.parse()?, Stream(stream as usize))
        })
    }
}
