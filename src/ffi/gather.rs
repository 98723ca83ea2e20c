//! KV gather: tokens of a paged cache to dense rows.

use super::context::{folio_context, operate};
use super::error::folio_error;
use super::kv_storage::{cache_form, layout};
use super::sized::{Input, reserved};
use super::status::folio_status;
use super::tensor::{folio_dtype, folio_tensor, required, tensor};
use crate::api;
use crate::error::{Error, Result};
use crate::problem::{GatherArgs, GatheredRequests, RecordPages};
use std::ffi::c_void;

/// Keys and values of many requests to be copied from a paged cache to dense rows, and converted: what folio_kv_append
/// wrote, read back. vLLM's cp_gather_cache and gather_and_maybe_dequant_cache do it for caches of MLA. Page ids are a
/// block_table, or kv_indptr and kv_indices.
///
/// Lengths and page ids that are wrong are refused where they are on the host. Where they are on a device, rows whose
/// page or token does not exist are not written. The outputs may not overlap other tensors.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct folio_kv_gather_args {
    /// sizeof(folio_kv_gather_args).
    pub struct_size: u32,
    /// 0.
    pub flags: u32,
    /// Output: `[num_rows, num_kv_heads, head_dim_qk]` float32, float16 or bfloat16, whatever the caches' type.
    pub key: *const folio_tensor,
    /// Output: `[num_rows, num_kv_heads, head_dim_vo]`, of key's type.
    pub value: *const folio_tensor,
    /// The key cache, in kv_layout: `[num_pages, page_size, num_kv_heads, head_dim_qk]` or
    /// `[num_pages, num_kv_heads, page_size, head_dim_qk]`, or `[num_slots, num_kv_heads, head_dim_qk]`; float32,
    /// float16, bfloat16 or fp8.
    pub k_cache: *const folio_tensor,
    /// The value cache, as k_cache with head_dim_vo and strides of its own.
    pub v_cache: *const folio_tensor,
    /// `[batch_size + 1]` int32 or int64: request b gets rows `cu_seq_lens[b]` to `cu_seq_lens[b + 1]`, at most num_rows.
    /// Rows of no request are left as they are.
    pub cu_seq_lens: *const folio_tensor,
    /// `[batch_size]` int32 or int64: the token of request b that its first row gets; NULL: 0.
    pub seq_starts: *const folio_tensor,
    /// `[batch_size, columns]` int32 or int64 page ids; rows may be strided. Entries of tokens that are not asked for
    /// are not read.
    pub block_table: *const folio_tensor,
    /// `[batch_size + 1]` int32 or int64: the page ids of request b begin at `kv_indices[kv_indptr[b]]`.
    pub kv_indptr: *const folio_tensor,
    /// `[n]` int32 or int64 page ids.
    pub kv_indices: *const folio_tensor,
    /// `[1]` or `[num_kv_heads]` float32, or NULL; fp8 caches only. Of formats with scales of their own: those,
    /// as the append wrote or took them.
    pub k_scales: *const folio_tensor,
    /// As k_scales, for values.
    pub v_scales: *const folio_tensor,
    /// Keys of an fp8 cache are multiplied by `k_scale · k_scales[head]`. 0: 1.
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

const _: () = assert!(size_of::<folio_kv_gather_args>() == 136);

// SAFETY: repr(C), two u32 first, numbers and pointers only, no padding (asserted by size).
unsafe impl Input for folio_kv_gather_args {
    const NAME: &'static str = "folio_kv_gather_args";
    const FIRST_SIZE: usize = 112;
    const FLAGS: u32 = 0;
    type Parsed = GatherArgs;

    unsafe fn parse(&self) -> Result<GatherArgs> {
        reserved("folio_kv_gather_args.reserved", self.reserved)?;
        // SAFETY: the caller's promise about the tensors.
        unsafe {
            Ok(GatherArgs {
                key: required("key", self.key)?,
                value: required("value", self.value)?,
                k_cache: required("k_cache", self.k_cache)?,
                v_cache: required("v_cache", self.v_cache)?,
                layout: layout("kv_layout", self.kv_layout)?,
                form: cache_form(self.kv_format)?,
                kv_dtype: self.kv_dtype.parse_optional("kv_dtype")?,
                requests: GatheredRequests {
                    cu_seq_lens: required("cu_seq_lens", self.cu_seq_lens)?,
                    seq_starts: tensor("seq_starts", self.seq_starts)?,
                    pages: pages(self.block_table, self.kv_indptr, self.kv_indices)?,
                },
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

/// The one form of page ids that is there.
///
/// # Safety
/// As [`tensor`].
pub(super) unsafe fn pages(
    block_table: *const folio_tensor,
    kv_indptr: *const folio_tensor,
    kv_indices: *const folio_tensor,
) -> Result<RecordPages> {
    // SAFETY: the caller's promise about the tensors.
    unsafe {
        let Some(table) = tensor("block_table", block_table)? else {
            return Ok(RecordPages::Csr {
                indptr: required("kv_indptr", kv_indptr)?,
                indices: required("kv_indices", kv_indices)?,
            });
        };
        let csr = [("kv_indptr", kv_indptr), ("kv_indices", kv_indices)];
        match csr.iter().find(|field| !field.1.is_null()) {
            None => Ok(RecordPages::Table(table)),
            Some((name, _)) => Err(Error::InvalidArgument(format!(
                "{name}: a tensor is not accepted beside block_table; NULL is"
            ))),
        }
    }
}

/// Copies keys and values of many requests from a paged cache to dense rows, and converts them to the rows' type.
///
/// On CUDA lengths and page ids are read by the kernel: nothing waits for them. The first call on a context loads code
/// and answers CAPTURE in a capture. Later ones can be captured: they are one launch each. On the CPU the rows are
/// complete on return.
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
/// is fine with different outputs.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn folio_kv_gather(
    ctx: *const folio_context,
    args: *const folio_kv_gather_args,
    stream: *mut c_void,
    err: *mut folio_error,
) -> folio_status {
    // SAFETY: the documented promises of the caller.
    unsafe { operate(ctx, args, stream, err, api::gather) }
}
