//! `folio_mla`: absorbed multi-head latent attention over a paged cache of latent records.

use super::args::{FOLIO_MASK_CAUSAL, FOLIO_MASK_FULL, FOLIO_RUN_LSE_BASE_2};
use super::attention::{self, AttentionHandle, FOLIO_PLAN_BATCH_INVARIANT, FOLIO_PLAN_GRAPH, or};
use super::batch::folio_batch;
use super::context::folio_context;
use super::error::folio_error;
use super::handle::{self, Object};
use super::sized::{Input, reserved};
use super::status::folio_status;
use super::tensor::{folio_dtype, folio_tensor, log_base, required, tensor};
use super::workspace::{folio_workspace, folio_workspace_info};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::problem::{AttentionArgs, AttentionDesc, CacheFormat, Kind, KvLayout, KvStorage, Mask};
use std::ffi::{c_char, c_void};

/// Records are elements of kv_dtype one after another: kv_lora_rank latent ones, then qk_rope_head_dim rotary ones.
pub const FOLIO_MLA_CACHE_PLAIN: i32 = 0;
/// Records are vLLM's and FlashMLA's fp8_ds_mla of 656 bytes: 512 latent elements of float8_e4m3, four float32 scales,
/// one for each 128 of them, and 64 rotary elements of bfloat16.
pub const FOLIO_MLA_CACHE_FP8_DS_MLA: i32 = 1;

/// What an MLA handle is made from: the absorbed form of DeepSeek-V2's multi-head latent attention. All heads read one
/// record per token: its latent part is key and value, its rotary part is key only.
///
/// Types: q float32, float16 or bfloat16; the cache the same type, float8_e4m3, float8_e5m2 or fp8_ds_mla; o the type
/// of q. Or q float8_e4m3 or float8_e5m2, as vLLM quantises it: the cache either of these, o float16 or bfloat16; products
/// and weights are as exact as beside queries of 16 bits. On CUDA devices a launch then makes rows of o's type of the
/// queries, for which the workspace has 2 bytes for each element of those of the largest batch.
///
/// The maxima bound every later batch and fix the workspace. One plan takes any mixture of decodes, verified drafts and
/// prompts.
///
/// Sparse attention (DeepSeek-V3.2), where every query token sees a list of tokens of its own: page_size 1, each query token a
/// request of one row, whose row of block_table lists slots, and whose kv_len counts them. On CUDA devices one plan serves
/// the lists of all layers, if these are int32, on the device, and come to the same tensor.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct folio_mla_desc {
    /// sizeof(folio_mla_desc).
    pub struct_size: u32,
    /// FOLIO_PLAN_…
    pub flags: u32,
    /// Type of q.
    pub q_dtype: folio_dtype,
    /// Type of the cache; all zero: as q. With FOLIO_MLA_CACHE_FP8_DS_MLA: all zero or float8_e4m3.
    pub kv_dtype: folio_dtype,
    /// Type of o, which is that of q, or beside fp8 one of 16 bits; all zero: as q.
    pub o_dtype: folio_dtype,
    /// FOLIO_MLA_CACHE_…
    pub cache_format: i32,
    /// Query (and output) heads, 1 or more.
    pub num_heads: u32,
    /// Elements of a latent row, and of a row of o: a multiple of 8 up to 512. DeepSeek-V2 and V3: 512.
    pub kv_lora_rank: u32,
    /// Elements of a rotary row: 0, or a multiple of 8 up to 64. DeepSeek-V2 and V3: 64.
    pub qk_rope_head_dim: u32,
    /// Tokens per page, 1 or more.
    pub page_size: u32,
    /// Most requests of a batch.
    pub max_batch_size: u32,
    /// Most query rows of a request; 0: 1.
    pub max_qo_len: u32,
    /// Most query rows of a batch, over all requests; 0: max_batch_size times max_qo_len.
    pub max_num_tokens: u32,
    /// Most keys of a request.
    pub max_kv_len: u32,
    /// 0.
    pub reserved: u32,
    /// Most pages of a batch, over all requests; 0: max_batch_size times the pages of max_kv_len.
    pub max_num_pages: u64,
}

const _: () = assert!(size_of::<folio_mla_desc>() == 72);

// SAFETY: repr(C), two u32 first, integers only, no padding (asserted by size).
unsafe impl Input for folio_mla_desc {
    const NAME: &'static str = "folio_mla_desc";
    const FIRST_SIZE: usize = 72;
    const FLAGS: u32 = FOLIO_PLAN_GRAPH | FOLIO_PLAN_BATCH_INVARIANT;
    type Parsed = AttentionDesc;

    unsafe fn parse(&self) -> Result<AttentionDesc> {
        reserved("folio_mla_desc.reserved", self.reserved)?;
        let q_dtype = self.q_dtype.parse("q_dtype")?;
        Ok(AttentionDesc {
            kind: Kind::Mla,
            q_dtype,
            kv_format: cache_format(self.cache_format, self.kv_dtype, q_dtype)?,
            o_dtype: self.o_dtype.parse_or("o_dtype", q_dtype)?,
            num_qo_heads: self.num_heads,
            num_kv_heads: 1,
            head_dim_qk: self.head_dim_qk()?,
            head_dim_vo: self.kv_lora_rank,
            kv: KvStorage::Paged {
                page_size: self.page_size,
                layout: KvLayout::Nhd,
            },
            max_batch_size: self.max_batch_size,
            max_qo_len: or(self.max_qo_len, 1),
            max_num_tokens: self.max_num_tokens,
            max_kv_len: self.max_kv_len,
            max_num_pages: self.max_num_pages,
            graph: self.flags & FOLIO_PLAN_GRAPH != 0,
            batch_invariant: self.flags & FOLIO_PLAN_BATCH_INVARIANT != 0,
            fp8_products: false,
            mask_items: false,
            shared_levels: 0,
            new_kv: None,
        })
    }
}

/// The format of a cache from `cache_format` and `kv_dtype` of a desc; elements are of `default` where kv_dtype is zero.
pub(super) fn cache_format(
    format: i32,
    kv_dtype: folio_dtype,
    default: DType,
) -> Result<CacheFormat> {
    match format {
        FOLIO_MLA_CACHE_PLAIN => Ok(kv_dtype.parse_or("kv_dtype", default)?.into()),
        FOLIO_MLA_CACHE_FP8_DS_MLA => match kv_dtype.parse_or("kv_dtype", DType::F8E4M3)? {
            DType::F8E4M3 => Ok(CacheFormat::DS_MLA),
            other => Err(Error::Unsupported(format!(
                "kv_dtype: {other} is not supported with FOLIO_MLA_CACHE_FP8_DS_MLA; all zero and float8_e4m3 are"
            ))),
        },
        other => Err(Error::InvalidArgument(format!(
            "cache_format: {other} is not accepted; FOLIO_MLA_CACHE_PLAIN (0) or FOLIO_MLA_CACHE_FP8_DS_MLA (1) is"
        ))),
    }
}

impl folio_mla_desc {
    fn head_dim_qk(&self) -> Result<u32> {
        let dim = self.kv_lora_rank.checked_add(self.qk_rope_head_dim);
        dim.ok_or_else(|| {
            Error::Unsupported(format!(
                "kv_lora_rank, qk_rope_head_dim: {}, {} is not supported; 512, 64 is",
                self.kv_lora_rank, self.qk_rope_head_dim
            ))
        })
    }
}

/// Tensors and parameters of one MLA call; one plan serves many, with different values.
///
/// For query row i of head h and the record (c, r) of key j, which holds values divided by k_scale:
///
/// ```text
/// s = (q_latent·c + q_rope·r) · sm_scale · q_scale · k_scale
/// seen iff mask_mode is FOLIO_MASK_FULL or j <= kv_len - qo_len + i
/// o = Σ softmax(s)_j c_j · k_scale
/// lse = log(Σ e^s)
/// ```
///
/// A row that sees nothing has o = 0 and lse = -inf. Memory that no row sees may hold anything, NaN included.
///
/// This is the data-movement friendly form of vLLM's MLA backends, and what FlashMLA and FlashInfer's
/// BatchMLAPagedAttentionWrapper compute: q_latent is the query's part without rotation times W_UK, and the output
/// times W_UV is that of the heads (DeepSeek-V2, section 2.1).
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct folio_mla_args {
    /// sizeof(folio_mla_args).
    pub struct_size: u32,
    /// FOLIO_RUN_LSE_BASE_2 or 0.
    pub flags: u32,
    /// Absorbed queries: `[num_tokens or more, num_heads, kv_lora_rank]` of q_dtype.
    pub q_latent: *const folio_tensor,
    /// Rotated queries: `[num_tokens or more, num_heads, qk_rope_head_dim]` of q_dtype, with strides of its own; NULL
    /// iff qk_rope_head_dim is 0. Two views of one tensor of whole queries are read fastest.
    pub q_rope: *const folio_tensor,
    /// The cache: `[num_pages, page_size, kv_lora_rank + qk_rope_head_dim]`, or `[num_slots, …]` with page_size 1, of
    /// kv_dtype; uint8 stands for fp8. With kv_rope: the latent part, `[…, kv_lora_rank]`. fp8_ds_mla:
    /// `[num_pages, page_size, 656]` uint8. num_pages is above every page id in use, and 1 or more where page ids or
    /// lengths are on a device.
    pub kv: *const folio_tensor,
    /// The rotary part of the cache, as kv with qk_rope_head_dim and strides of its own; NULL where kv holds whole
    /// records.
    pub kv_rope: *const folio_tensor,
    /// Output: `[num_tokens or more, num_heads, kv_lora_rank]` of o_dtype. It may not overlap another tensor.
    pub o: *const folio_tensor,
    /// Output: `[num_tokens or more, num_heads]` float32, float16 or bfloat16 of any strides, or NULL, as that of
    /// folio_attention_args.
    pub lse: *const folio_tensor,
    /// Factor of q·k, not 0: that of the model's heads before absorption, 1 / sqrt(qk_nope_head_dim +
    /// qk_rope_head_dim) and YaRN's mscale² where the model has it. It cannot be derived from the latent width.
    /// sm_scale · q_scale · k_scale is within ±2^60.
    pub sm_scale: f32,
    /// Factor of q, which holds the queries divided by it. 0: 1.
    pub q_scale: f32,
    /// Factor of the cache, hence of logits and of o; within ±2^60. 0: 1.
    pub k_scale: f32,
    /// FOLIO_MASK_CAUSAL or FOLIO_MASK_FULL.
    pub mask_mode: i32,
}

const _: () = assert!(size_of::<folio_mla_args>() == 72);

// SAFETY: repr(C), two u32 first, numbers and pointers only, no padding (asserted by size).
unsafe impl Input for folio_mla_args {
    const NAME: &'static str = "folio_mla_args";
    const FIRST_SIZE: usize = 72;
    const FLAGS: u32 = FOLIO_RUN_LSE_BASE_2;
    type Parsed = AttentionArgs;

    unsafe fn parse(&self) -> Result<AttentionArgs> {
        // SAFETY: the caller's promise.
        unsafe {
            Ok(AttentionArgs {
                lse: tensor("lse", self.lse)?,
                lse_base: log_base(self.flags & FOLIO_RUN_LSE_BASE_2),
                sm_scale: self.sm_scale,
                q_scale: self.q_scale,
                k_scale: self.k_scale,
                mask: self.mask()?,
                ..AttentionArgs::mla(
                    required("q_latent", self.q_latent)?,
                    tensor("q_rope", self.q_rope)?,
                    required("kv", self.kv)?,
                    tensor("kv_rope", self.kv_rope)?,
                    required("o", self.o)?,
                )
            })
        }
    }
}

impl folio_mla_args {
    fn mask(&self) -> Result<Mask> {
        match self.mask_mode {
            FOLIO_MASK_CAUSAL => Ok(Mask::Causal),
            FOLIO_MASK_FULL => Ok(Mask::Full),
            other => Err(Error::InvalidArgument(format!(
                "mask_mode: {other} is not accepted; FOLIO_MASK_CAUSAL (0) or FOLIO_MASK_FULL (1) is"
            ))),
        }
    }
}

/// Multi-head latent attention in its absorbed form: FlashMLA's flash_mla_with_kvcache and FlashInfer's
/// BatchMLAPagedAttentionWrapper. One handle serves every batch within its desc, and one plan every layer of a step.
pub struct folio_mla {
    _opaque: [u8; 0],
}

impl Object for folio_mla {
    type Value = AttentionHandle;
    const PARAMETER: &'static str = "handle";
    const NAME: &'static str = "folio_mla";
}

/// Picks the code for a problem.
///
/// @copydetails folio_decode_create
///
/// # Safety
/// As folio_decode_create.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn folio_mla_create(
    ctx: *const folio_context,
    desc: *const folio_mla_desc,
    out: *mut *mut folio_mla,
    err: *mut folio_error,
) -> folio_status {
    // SAFETY: the documented promises of the caller.
    unsafe { attention::create(ctx, desc, out, err) }
}

/// The memory that every plan within the desc can do with.
///
/// @copydetails folio_decode_workspace
///
/// # Safety
/// As folio_decode_workspace.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn folio_mla_workspace(
    handle: *const folio_mla,
    out: *mut folio_workspace_info,
    err: *mut folio_error,
) -> folio_status {
    // SAFETY: the documented promises of the caller.
    unsafe { attention::workspace(handle, out, err) }
}

/// Takes over a step's batch. qo_indptr may be NULL, as for decode.
///
/// @copydetails folio_decode_plan
///
/// # Safety
/// As folio_decode_plan.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn folio_mla_plan(
    handle: *mut folio_mla,
    batch: *const folio_batch,
    ws: *const folio_workspace,
    stream: *mut c_void,
    err: *mut folio_error,
) -> folio_status {
    // SAFETY: the documented promises of the caller.
    unsafe { attention::plan(handle, batch, ws, stream, err) }
}

/// Computes attention for the planned batch.
///
/// @copydetails folio_decode_run
///
/// # Safety
/// As folio_decode_run.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn folio_mla_run(
    handle: *const folio_mla,
    args: *const folio_mla_args,
    stream: *mut c_void,
    err: *mut folio_error,
) -> folio_status {
    // SAFETY: the documented promises of the caller.
    unsafe { attention::run(handle, args, stream, err) }
}

/// Name of the kernel that create picked.
///
/// @copydetails folio_decode_kernel
///
/// # Safety
/// As folio_decode_kernel.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn folio_mla_kernel(handle: *const folio_mla) -> *const c_char {
    // SAFETY: the documented promise of the caller.
    unsafe { attention::kernel(handle) }
}

/// Ends a handle.
///
/// @copydetails folio_decode_destroy
///
/// # Safety
/// As folio_decode_destroy.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn folio_mla_destroy(handle: *mut folio_mla) {
    // SAFETY: the documented promise of the caller.
    unsafe { handle::destroy(handle) }
}
