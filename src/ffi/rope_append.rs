//! Norm, RoPE and append of new tokens in one call.

use super::context::{folio_context, operate};
use super::error::folio_error;
use super::kv_storage::{cache_form, layout};
use super::sized::Input;
use super::status::folio_status;
use super::tensor::{folio_dtype, folio_tensor, required, tensor};
use crate::api;
use crate::error::{Error, Result};
use crate::problem::{Angles, AppendArgs, Frequencies, Llama3Scaling, Norm, Rope, RopeAppendArgs};
use crate::tensor::Tensor;
use std::ffi::c_void;

/// RoPE rotates neighbouring elements (GPT-J). Without: an element of the first half of rotary_dim and one of the second
/// (GPT-NeoX).
pub const FOLIO_ROPE_INTERLEAVED: u32 = 1;

/// New tokens of a model with query, key and value heads, from the projection to the attention: what vLLM's
/// fused_rope_kvcache and FlashInfer's rope_quantize_fp8_append_paged_kv_cache do in one pass.
///
/// Each row of q and key becomes, in float32 and in this order,
/// 1. with a norm weight: `x · weight / sqrt(mean(x²) + rms_norm_eps)`, over all head_dim_qk elements (RMS norm of each
///    head, as Qwen3 has it);
/// 2. with RoPE: pair i of the first rotary_dim elements, (x, y), becomes `(x · cos_i - y · sin_i, y · cos_i + x · sin_i)`.
///    Elements behind rotary_dim stay.
///
/// Then it is rounded once for each output: to the tensor's type, or for the cache as folio_kv_append does it, to fp8 after
/// the division by its scale or as kv_format says. Values are appended as folio_kv_append does it. Without norm and RoPE
/// queries and keys are copied.
///
/// Angles come from cos_sin_cache, or are computed where rope_theta is not 0: pair i at position p has the angle
/// `p · f_i`, with `f_i = rope_theta^(-2i / rotary_dim)` (Su et al., RoFormer, 2021), divided by rope_scale. With
/// low_freq_factor, high_freq_factor and old_context_len, as Llama 3.1 has it (the reference code of Meta; rope_type
/// llama3 of Hugging Face; apply_llama31_rope of FlashInfer), f_i becomes `s · f_i + (1 - s) · f_i / rope_scale`, where
/// `s = (old_context_len · f_i / 2π - low_freq_factor) / (high_freq_factor - low_freq_factor)`, from 0 to 1.
/// Computed angles are reduced to one turn without an error, whatever the position.
///
/// On CUDA rows of more than 480 elements are refused with UNSUPPORTED where rotary_dim is no multiple of 16 and they need
/// more than 32 threads, one for each 16 elements that are rotated and for each 16 others.
///
/// The outputs may not overlap other tensors, but for q_out and key_out, which may be q and key: with the same address
/// and the same strides.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct folio_rope_append_args {
    /// sizeof(folio_rope_append_args).
    pub struct_size: u32,
    /// FOLIO_ROPE_INTERLEAVED or 0.
    pub flags: u32,
    /// `[num_tokens or more, num_qo_heads, head_dim_qk]` of key's type, or NULL: no queries. All its rows are computed,
    /// also those of tokens that are not cached. A slice of a fused QKV tensor will do, as for key and value.
    pub q: *const folio_tensor,
    /// Output: the queries, as q; may be q itself. NULL: in place.
    pub q_out: *const folio_tensor,
    /// `[num_tokens or more, num_kv_heads, head_dim_qk]` float32, float16 or bfloat16; head_dim_qk is 512 at most.
    pub key: *const folio_tensor,
    /// Output: the first num_tokens keys, normalised and rotated, whatever their slots are; as key, which it may be. NULL:
    /// not wanted, and key stays as it is.
    pub key_out: *const folio_tensor,
    /// `[num_tokens or more, num_kv_heads, head_dim_vo]`, of key's type.
    pub value: *const folio_tensor,
    /// Output: as in folio_kv_append_args.
    pub k_cache: *const folio_tensor,
    /// Output: as in folio_kv_append_args.
    pub v_cache: *const folio_tensor,
    /// `[num_tokens]` int32 or int64, as in folio_kv_append_args: tokens with a negative slot are not cached.
    pub slot_mapping: *const folio_tensor,
    /// As in folio_kv_append_args.
    pub k_scales: *const folio_tensor,
    /// As in folio_kv_append_args.
    pub v_scales: *const folio_tensor,
    /// `[head_dim_qk]` float32 or of key's type; NULL: queries are not normalised.
    pub q_norm_weight: *const folio_tensor,
    /// As q_norm_weight, for keys.
    pub k_norm_weight: *const folio_tensor,
    /// `[rows or more]` int32 or int64, where rows are those of q, or num_tokens without q. NULL: no RoPE, and the fields
    /// below it that are about RoPE are NULL and 0. A position beyond cos_sin_cache is refused where it is on the host; on
    /// a device the nearest one in the table is taken. Computed angles are there for every position.
    pub positions: *const folio_tensor,
    /// As positions, which they are added to; or NULL.
    pub position_offsets: *const folio_tensor,
    /// `[max_position, rotary_dim]` float32 or of key's type: the cosines of a position, one for each pair, and then the
    /// sines; or `[2, max_position, rotary_dim / 2]`. NULL: angles are computed.
    pub cos_sin_cache: *const folio_tensor,
    /// As in folio_kv_append_args.
    pub k_scale: f32,
    /// As in folio_kv_append_args.
    pub v_scale: f32,
    /// FOLIO_LAYOUT_NHD or FOLIO_LAYOUT_HND.
    pub kv_layout: i32,
    /// As in folio_kv_append_args.
    pub kv_dtype: folio_dtype,
    /// Added to the mean of squares; positive with a norm weight, else 0.
    pub rms_norm_eps: f32,
    /// Elements that are rotated, an even number; 0: the width of cos_sin_cache, or head_dim_qk.
    pub rotary_dim: u32,
    /// Base of the frequencies of computed angles, such as 10000; 0 with cos_sin_cache.
    pub rope_theta: f32,
    /// Computed frequencies are divided by it. 0: 1.
    pub rope_scale: f32,
    /// Llama 3.1: turns in old_context_len up to which rope_scale divides altogether. 0: rope_scale divides all.
    pub low_freq_factor: f32,
    /// Llama 3.1: turns in old_context_len from which on rope_scale does not divide.
    pub high_freq_factor: f32,
    /// Llama 3.1: tokens of the context before it was extended, such as 8192.
    pub old_context_len: u32,
    /// FOLIO_KV_FORMAT_…: how the rows of the caches are stored.
    pub kv_format: i32,
    /// As in folio_kv_append_args.
    pub k_zero_points: *const folio_tensor,
    /// As in folio_kv_append_args.
    pub v_zero_points: *const folio_tensor,
}

const _: () = assert!(size_of::<folio_rope_append_args>() == 192);

// SAFETY: repr(C), two u32 first, numbers and pointers only, no padding (asserted by size).
unsafe impl Input for folio_rope_append_args {
    const NAME: &'static str = "folio_rope_append_args";
    const FIRST_SIZE: usize = 176;
    const FLAGS: u32 = FOLIO_ROPE_INTERLEAVED;
    type Parsed = RopeAppendArgs;

    unsafe fn parse(&self) -> Result<RopeAppendArgs> {
        // SAFETY: the caller's promise about the tensors.
        unsafe {
            Ok(RopeAppendArgs {
                append: AppendArgs {
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
                },
                key_out: tensor("key_out", self.key_out)?,
                q: tensor("q", self.q)?,
                q_out: tensor("q_out", self.q_out)?,
                norm: Norm {
                    q_weight: tensor("q_norm_weight", self.q_norm_weight)?,
                    k_weight: tensor("k_norm_weight", self.k_norm_weight)?,
                    eps: self.rms_norm_eps,
                },
                rope: self.rope()?,
            })
        }
    }
}

impl folio_rope_append_args {
    /// What is there of RoPE; without `positions` there may be nothing.
    ///
    /// # Safety
    /// As [`tensor`].
    unsafe fn rope(&self) -> Result<Option<Rope>> {
        // SAFETY: the caller's promise about the tensors.
        unsafe {
            let Some(positions) = tensor("positions", self.positions)? else {
                return self.without_rope();
            };
            Ok(Some(Rope {
                positions,
                position_offsets: tensor("position_offsets", self.position_offsets)?,
                angles: match tensor("cos_sin_cache", self.cos_sin_cache)? {
                    Some(table) => self.tabulated(table)?,
                    None => self.computed()?,
                },
                rotary_dim: self.rotary_dim,
                is_interleaved: self.flags & FOLIO_ROPE_INTERLEAVED != 0,
            }))
        }
    }

    fn without_rope(&self) -> Result<Option<Rope>> {
        let tensors = [
            ("position_offsets", self.position_offsets),
            ("cos_sin_cache", self.cos_sin_cache),
        ];
        if let Some((name, _)) = tensors.iter().find(|field| !field.1.is_null()) {
            return Err(Error::InvalidArgument(format!(
                "{name}: a tensor is not accepted without positions; NULL is"
            )));
        }
        let dim = ("rotary_dim", f64::from(self.rotary_dim));
        let flag = f64::from(self.flags & FOLIO_ROPE_INTERLEAVED);
        zeros(
            [dim, ("flags", flag)].into_iter().chain(self.numbers()),
            "without positions",
        )?;
        Ok(None)
    }

    fn tabulated(&self, table: Tensor) -> Result<Angles> {
        zeros(self.numbers(), "with cos_sin_cache")?;
        Ok(Angles::Table(table))
    }

    fn computed(&self) -> Result<Angles> {
        if self.rope_theta == 0.0 {
            return Err(Error::InvalidArgument(
                "rope_theta: 0 is not accepted with positions; a positive number, or cos_sin_cache, is".into(),
            ));
        }
        let llama3 = Llama3Scaling {
            low_freq_factor: self.low_freq_factor,
            high_freq_factor: self.high_freq_factor,
            old_context_len: self.old_context_len,
        };
        let none = Llama3Scaling {
            low_freq_factor: 0.0,
            high_freq_factor: 0.0,
            old_context_len: 0,
        };
        Ok(Angles::Computed(Frequencies {
            theta: self.rope_theta,
            scale: self.rope_scale,
            llama3: (llama3 != none).then_some(llama3),
        }))
    }

    /// What computed angles depend on.
    fn numbers(&self) -> [(&'static str, f64); 5] {
        [
            ("rope_theta", self.rope_theta.into()),
            ("rope_scale", self.rope_scale.into()),
            ("low_freq_factor", self.low_freq_factor.into()),
            ("high_freq_factor", self.high_freq_factor.into()),
            ("old_context_len", self.old_context_len.into()),
        ]
    }
}

/// Refuses what would be ignored.
fn zeros(numbers: impl IntoIterator<Item = (&'static str, f64)>, when: &str) -> Result<()> {
    match numbers.into_iter().find(|number| number.1 != 0.0) {
        None => Ok(()),
        Some((name, value)) => Err(Error::InvalidArgument(format!(
            "{name}: {value} is not accepted {when}; 0 is"
        ))),
    }
}

/// Normalises and rotates queries and keys of new tokens, and writes keys and values to a paged cache, quantising where the
/// cache is fp8 or of a kv_format that does.
///
/// On CUDA the first call on a context with given types loads code and answers CAPTURE in a capture. Later ones
/// can be captured: they are one launch each. On the CPU the results are there on return.
///
/// @param ctx the device
/// @param args tensors and numbers
/// @param stream CUDA stream, or NULL on the CPU
/// @param err report of a failure, or NULL
/// @return FOLIO_OK, or INVALID_ARGUMENT, INVALID_STRUCT_SIZE, UNKNOWN_FIELD, SHAPE, DTYPE, DEVICE_MISMATCH,
///         CAPTURE, UNSUPPORTED, COMPILE, OUT_OF_MEMORY, DRIVER; then nothing was written
///
/// # Safety
/// `ctx` is alive; the structs are readable, and the tensors' memory as the fields say. Concurrent use
/// is fine where no slot and no row is written by two calls, or by two tokens of one call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn folio_rope_append(
    ctx: *const folio_context,
    args: *const folio_rope_append_args,
    stream: *mut c_void,
    err: *mut folio_error,
) -> folio_status {
    // SAFETY: the documented promises of the caller.
    unsafe { operate(ctx, args, stream, err, api::rope_append) }
}
