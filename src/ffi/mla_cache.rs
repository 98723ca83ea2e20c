//! Caches of latent records (MLA): writing new tokens, and copying records to dense rows.

use super::context::{folio_context, operate};
use super::error::folio_error;
use super::gather::pages;
use super::mla::{FOLIO_MLA_CACHE_FP8_DS_MLA, FOLIO_MLA_CACHE_PLAIN};
use super::sized::{Input, reserved};
use super::status::folio_status;
use super::tensor::{folio_dtype, folio_tensor, required, tensor};
use crate::api;
use crate::error::{Error, Result};
use crate::problem::{LatentCache, MlaAppendArgs, MlaGatherArgs, Rotary};
use std::ffi::c_void;

/// RoPE rotates neighbouring elements (GPT-J; DeepSeek). Without: an element of the first half and one of the second
/// (GPT-NeoX).
pub const FOLIO_MLA_ROPE_INTERLEAVED: u32 = 1;

/// New tokens for a cache of latent records: vLLM's concat_and_cache_mla, and concat_and_cache_mla_rope_fused where
/// cos_sin_cache is given.
///
/// A record of an fp8_ds_mla cache gets, for each 128 latent elements, the scale `max(max |x| / 448, FLT_MIN)` and
/// `x / scale` in e4m3. That is what vLLM writes, but for the rotary elements of float16 tokens: they are converted to
/// bfloat16, where vLLM keeps their bits.
///
/// RoPE: pair i of a row, (x, y), becomes `(x · cos_i - y · sin_i, y · cos_i + x · sin_i)`, computed in float32 and
/// rounded to the tokens' type, before anything is stored. Rows of q_rope and rope_out are rotated whatever the slot.
///
/// The outputs may not overlap other tensors, but for rope_out and q_rope_out, which may be rope and q_rope: with the
/// same address and the same strides.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct folio_mla_append_args {
    /// sizeof(folio_mla_append_args).
    pub struct_size: u32,
    /// FOLIO_MLA_ROPE_INTERLEAVED or 0.
    pub flags: u32,
    /// `[num_tokens or more, kv_lora_rank]` or `[num_tokens or more, 1, kv_lora_rank]` float32, float16 or bfloat16.
    pub latent: *const folio_tensor,
    /// `[num_tokens or more, qk_rope_head_dim]` or `[num_tokens or more, 1, qk_rope_head_dim]`, of latent's type; NULL
    /// where records have no rotary part.
    pub rope: *const folio_tensor,
    /// Output: `[num_pages, page_size, kv_lora_rank + qk_rope_head_dim]` of latent's type or fp8; with kv_rope
    /// `[num_pages, page_size, kv_lora_rank]`. fp8_ds_mla: `[num_pages, page_size, 656]` uint8, where address and
    /// strides are multiples of 4.
    pub kv: *const folio_tensor,
    /// Output: `[num_pages, page_size, qk_rope_head_dim]` of kv's type, where the rotary part of the records has a
    /// tensor of its own; or NULL.
    pub kv_rope: *const folio_tensor,
    /// `[num_tokens]` int32 or int64: page · page_size + offset; a negative slot skips the token. Its length is the
    /// number of tokens. A slot beyond the cache is refused where it is on the host, and skips the token where it is on
    /// a device.
    pub slot_mapping: *const folio_tensor,
    /// `[max_position, qk_rope_head_dim]` float32 or of latent's type: the cosines of a position, and then the sines;
    /// NULL: no RoPE, and the fields below it are NULL too.
    pub cos_sin_cache: *const folio_tensor,
    /// `[num_tokens]` int32 or int64. One beyond cos_sin_cache is refused where it is on the host; where it is on a
    /// device nothing is written for the token.
    pub positions: *const folio_tensor,
    /// Output: the rotated rope, `[num_tokens or more, qk_rope_head_dim]` as rope; may be rope itself; or NULL.
    pub rope_out: *const folio_tensor,
    /// `[num_tokens or more, num_heads, qk_rope_head_dim]` of latent's type, to be rotated; in place where q_rope_out
    /// is NULL; or NULL.
    pub q_rope: *const folio_tensor,
    /// Output: the rotated q_rope, as it; may be q_rope itself; or NULL.
    pub q_rope_out: *const folio_tensor,
    /// A plain fp8 cache gets `x / k_scale`, rounded to nearest even, saturated. 0: 1.
    pub k_scale: f32,
    /// FOLIO_MLA_CACHE_…
    pub cache_format: i32,
    /// What a plain cache that is described as uint8 holds (an fp8 type); all zero: the tensors say it.
    pub kv_dtype: folio_dtype,
    /// 0.
    pub reserved: u32,
}

/// Records of many requests to be copied to dense rows and converted: vLLM's gather_and_maybe_dequant_cache, its
/// variant for fp8_ds_mla, and cp_gather_cache. Page ids are a block_table, or kv_indptr and kv_indices.
///
/// Lengths and page ids that are wrong are refused where they are on the host. Where they are on a device, rows whose
/// page or token does not exist are not written. The outputs may not overlap other tensors.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct folio_mla_gather_args {
    /// sizeof(folio_mla_gather_args).
    pub struct_size: u32,
    /// 0.
    pub flags: u32,
    /// `[num_pages, page_size, kv_lora_rank + qk_rope_head_dim]` and so on, as in folio_mla_append_args; float32,
    /// float16, bfloat16, fp8, or fp8_ds_mla records.
    pub kv: *const folio_tensor,
    /// As in folio_mla_append_args.
    pub kv_rope: *const folio_tensor,
    /// Output: `[num_rows, kv_lora_rank + qk_rope_head_dim]`, with dst_rope `[num_rows, kv_lora_rank]`; float32,
    /// float16 or bfloat16, whatever kv's type.
    pub dst: *const folio_tensor,
    /// Output: `[num_rows, qk_rope_head_dim]` of dst's type; or NULL.
    pub dst_rope: *const folio_tensor,
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
    /// Values of a plain fp8 cache are multiplied by it. 0: 1.
    pub k_scale: f32,
    /// FOLIO_MLA_CACHE_…
    pub cache_format: i32,
    /// What a plain cache that is described as uint8 holds (an fp8 type); all zero: the tensors say it.
    pub kv_dtype: folio_dtype,
    /// 0.
    pub reserved: u32,
}

const _: () = assert!(size_of::<folio_mla_append_args>() == 104);
const _: () = assert!(size_of::<folio_mla_gather_args>() == 96);

// SAFETY: repr(C), two u32 first, numbers and pointers only, no padding (asserted by size).
unsafe impl Input for folio_mla_append_args {
    const NAME: &'static str = "folio_mla_append_args";
    const FIRST_SIZE: usize = 104;
    const FLAGS: u32 = FOLIO_MLA_ROPE_INTERLEAVED;
    type Parsed = MlaAppendArgs;

    unsafe fn parse(&self) -> Result<MlaAppendArgs> {
        reserved("reserved", self.reserved)?;
        // SAFETY: the caller's promise about the tensors.
        unsafe {
            Ok(MlaAppendArgs {
                latent: required("latent", self.latent)?,
                rope: tensor("rope", self.rope)?,
                cache: LatentCache {
                    kv: required("kv", self.kv)?,
                    kv_rope: tensor("kv_rope", self.kv_rope)?,
                    kv_dtype: self.kv_dtype.parse_optional("kv_dtype")?,
                    is_ds_mla: is_ds_mla("cache_format", self.cache_format)?,
                },
                slot_mapping: required("slot_mapping", self.slot_mapping)?,
                k_scale: self.k_scale,
                rotary: self.rotary()?,
            })
        }
    }
}

impl folio_mla_append_args {
    /// What is there of RoPE; without `cos_sin_cache` there may be nothing.
    ///
    /// # Safety
    /// As [`tensor`].
    unsafe fn rotary(&self) -> Result<Option<Rotary>> {
        // SAFETY: the caller's promise about the tensors.
        unsafe {
            let Some(cos_sin_cache) = tensor("cos_sin_cache", self.cos_sin_cache)? else {
                return self.without_rotary();
            };
            Ok(Some(Rotary {
                cos_sin_cache,
                positions: required("positions", self.positions)?,
                is_interleaved: self.flags & FOLIO_MLA_ROPE_INTERLEAVED != 0,
                rope_out: tensor("rope_out", self.rope_out)?,
                q_rope: tensor("q_rope", self.q_rope)?,
                q_rope_out: tensor("q_rope_out", self.q_rope_out)?,
            }))
        }
    }

    fn without_rotary(&self) -> Result<Option<Rotary>> {
        let fields = [
            ("positions", self.positions),
            ("rope_out", self.rope_out),
            ("q_rope", self.q_rope),
            ("q_rope_out", self.q_rope_out),
        ];
        if let Some((name, _)) = fields.iter().find(|field| !field.1.is_null()) {
            return Err(Error::InvalidArgument(format!(
                "{name}: a tensor is not accepted without cos_sin_cache; NULL is"
            )));
        }
        if self.flags & FOLIO_MLA_ROPE_INTERLEAVED != 0 {
            return Err(Error::InvalidArgument(
                "flags: FOLIO_MLA_ROPE_INTERLEAVED is not accepted without cos_sin_cache; 0 is"
                    .into(),
            ));
        }
        Ok(None)
    }
}

// SAFETY: repr(C), two u32 first, numbers and pointers only, no padding (asserted by size).
unsafe impl Input for folio_mla_gather_args {
    const NAME: &'static str = "folio_mla_gather_args";
    const FIRST_SIZE: usize = 96;
    const FLAGS: u32 = 0;
    type Parsed = MlaGatherArgs;

    unsafe fn parse(&self) -> Result<MlaGatherArgs> {
        reserved("reserved", self.reserved)?;
        // SAFETY: the caller's promise about the tensors.
        unsafe {
            Ok(MlaGatherArgs {
                cache: LatentCache {
                    kv: required("kv", self.kv)?,
                    kv_rope: tensor("kv_rope", self.kv_rope)?,
                    kv_dtype: self.kv_dtype.parse_optional("kv_dtype")?,
                    is_ds_mla: is_ds_mla("cache_format", self.cache_format)?,
                },
                dst: required("dst", self.dst)?,
                dst_rope: tensor("dst_rope", self.dst_rope)?,
                cu_seq_lens: required("cu_seq_lens", self.cu_seq_lens)?,
                seq_starts: tensor("seq_starts", self.seq_starts)?,
                pages: pages(self.block_table, self.kv_indptr, self.kv_indices)?,
                k_scale: self.k_scale,
            })
        }
    }
}

/// Whether a number of a cache format is that of `fp8_ds_mla`.
pub(super) fn is_ds_mla(name: &str, value: i32) -> Result<bool> {
    match value {
        FOLIO_MLA_CACHE_PLAIN => Ok(false),
        FOLIO_MLA_CACHE_FP8_DS_MLA => Ok(true),
        _ => Err(Error::InvalidArgument(format!(
            "{name}: {value} is not accepted; FOLIO_MLA_CACHE_PLAIN (0) or FOLIO_MLA_CACHE_FP8_DS_MLA (1) is"
        ))),
    }
}

/// Writes new tokens to a cache of latent records, quantising them where the cache is fp8, and rotating rotary
/// elements where a table of angles is given.
///
/// On CUDA the first call on a context loads code and answers CAPTURE in a capture. Later ones can be captured: they
/// are one launch each. On the CPU the tokens are in the cache on return.
///
/// @param ctx the device
/// @param args tensors and scale
/// @param stream CUDA stream, or NULL on the CPU
/// @param err report of a failure, or NULL
/// @return FOLIO_OK, or INVALID_ARGUMENT, INVALID_STRUCT_SIZE, UNKNOWN_FIELD, SHAPE, DTYPE, DEVICE_MISMATCH,
///         CAPTURE, UNSUPPORTED, COMPILE, OUT_OF_MEMORY, DRIVER; then nothing was written
///
/// # Safety
/// `ctx` is alive; the structs are readable, and the tensors' memory as the fields say. Concurrent use
/// is fine where no slot is written by two calls, or by two tokens of one call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn folio_mla_append(
    ctx: *const folio_context,
    args: *const folio_mla_append_args,
    stream: *mut c_void,
    err: *mut folio_error,
) -> folio_status {
    // SAFETY: the documented promises of the caller.
    unsafe { operate(ctx, args, stream, err, api::mla_append) }
}

/// Copies latent records of many requests from a paged cache to dense rows, and converts them to the rows' type.
///
/// On CUDA lengths and page ids are read by the kernel: nothing waits for them. The first call on a context loads code
/// and answers CAPTURE in a capture. Later ones can be captured: they are one launch each. On the CPU the rows are
/// complete on return.
///
/// @param ctx the device
/// @param args tensors and scale
/// @param stream CUDA stream, or NULL on the CPU
/// @param err report of a failure, or NULL
/// @return FOLIO_OK, or INVALID_ARGUMENT, INVALID_STRUCT_SIZE, UNKNOWN_FIELD, SHAPE, DTYPE, DEVICE_MISMATCH,
///         CAPTURE, UNSUPPORTED, COMPILE, OUT_OF_MEMORY, DRIVER; then nothing was written
///
/// # Safety
/// `ctx` is alive; the structs are readable, and the tensors' memory as the fields say. Concurrent use
/// is fine with different outputs.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn folio_mla_gather(
    ctx: *const folio_context,
    args: *const folio_mla_gather_args,
    stream: *mut c_void,
    err: *mut folio_error,
) -> folio_status {
    // SAFETY: the documented promises of the caller.
    unsafe { operate(ctx, args, stream, err, api::mla_gather) }
}
