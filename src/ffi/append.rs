//! KV append: new tokens into a paged cache.

use super::context::{folio_context, operate};
use super::error::folio_error;
use super::kv_storage::{cache_form, layout};
use super::sized::{Input, reserved};
use super::status::folio_status;
use super::tensor::{folio_dtype, folio_tensor, required, tensor};
use crate::api;
use crate::error::Result;
use crate::problem::AppendArgs;
use std::ffi::c_void;

/// New tokens for a paged cache: vLLM's reshape_and_cache_flash. The caches may not overlap key or value.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct folio_kv_append_args {
    /// sizeof(folio_kv_append_args).
    pub struct_size: u32,
    /// 0.
    pub flags: u32,
    /// `[num_tokens or more, num_kv_heads, head_dim_qk]` float32, float16 or bfloat16; a slice of a fused QKV
    /// tensor will do.
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
    /// length is the number of tokens. A slot beyond the cache is refused where it is on the host, and skips
    /// the token where it is on a device.
    pub slot_mapping: *const folio_tensor,
    /// `[1]` or `[num_kv_heads]` float32, or NULL; fp8 caches only. Of formats with scales of their own: those,
    /// which the append writes where it computes them.
    pub k_scales: *const folio_tensor,
    /// As k_scales, for values.
    pub v_scales: *const folio_tensor,
    /// An fp8 cache gets `key / (k_scale · k_scales[head])`, rounded to nearest even, saturated. 0: 1.
    pub k_scale: f32,
    /// As k_scale. 0: 1.
    pub v_scale: f32,
    /// FOLIO_LAYOUT_NHD or FOLIO_LAYOUT_HND.
    pub kv_layout: i32,
    /// What caches that are described as uint8 hold (an fp8 type, or one of kv_format); all zero: the tensors say it, and
    /// uint8 is the first type that a kv_format other than FOLIO_KV_FORMAT_PLAIN has.
    pub kv_dtype: folio_dtype,
    /// FOLIO_KV_FORMAT_…: how the rows of the caches are stored.
    pub kv_format: i32,
    /// 0.
    pub reserved: u32,
    /// FOLIO_KV_FORMAT_CHANNEL_ZERO_POINTS: `[num_kv_heads, head_dim_qk]` float32. NULL otherwise.
    pub k_zero_points: *const folio_tensor,
    /// FOLIO_KV_FORMAT_CHANNEL_ZERO_POINTS: `[num_kv_heads, head_dim_vo]` float32. NULL otherwise.
    pub v_zero_points: *const folio_tensor,
}

const _: () = assert!(size_of::<folio_kv_append_args>() == 104);

// SAFETY: repr(C), two u32 first, numbers and pointers only, no padding (asserted by size).
unsafe impl Input for folio_kv_append_args {
    const NAME: &'static str = "folio_kv_append_args";
    const FIRST_SIZE: usize = 80;
    const FLAGS: u32 = 0;
    type Parsed = AppendArgs;

    unsafe fn parse(&self) -> Result<AppendArgs> {
        reserved("folio_kv_append_args.reserved", self.reserved)?;
        // SAFETY: the caller's promise about the tensors.
        unsafe {
            Ok(AppendArgs {
                key: required("key", self.key)?,
                value: required("value", self.value)?,
                k_cache: required("k_cache", self.k_cache)?,
                v_cache: required("v_cache", self.v_cache)?,
                layout: layout("kv_layout", self.kv_layout)?,
                form: cache_form(self.kv_format)?,
                kv_dtype: self.kv_dtype.parse_optional("kv_dtype")?,
                slot_mapping: required("slot_mapping", self.slot_mapping)?,
                k_scale: self.k_scale,
                v_scale: self.v_scale,
                k_scales: tensor("k_scales", self.k_scales)?,
                v_scales: tensor("v_scales", self.v_scales)?,
                k_zero_points: tensor("k_zero_points", self.k_zero_points)?,
                v_zero_points: tensor("v_zero_points", self.v_zero_points)?,
            })
        }
    }
}

/// Writes new tokens to a paged cache, quantising to fp8 where the cache is fp8.
///
/// On CUDA the first call on a context with given types loads code and answers CAPTURE in a capture. Later ones
/// can be captured: they are one launch each. On the CPU the tokens are in the cache on return.
///
/// @param ctx the device
/// @param args tensors and scales
/// @param stream CUDA stream, or NULL on the CPU
/// @param err report of a failure, or NULL
/// @return FOLIO_OK, or INVALID_ARGUMENT, INVALID_STRUCT_SIZE, UNKNOWN_FIELD, SHAPE, DTYPE, DEVICE_MISMATCH,
///         CAPTURE, UNSUPPORTED, COMPILE, OUT_OF_MEMORY, DRIVER; then nothing was written
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
    unsafe { operate(ctx, args, stream, err, api::append) }
}
