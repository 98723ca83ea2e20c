//! `folio_mla_context`: new tokens over themselves and over a cached context of latent records, in bounded memory.

use super::args::FOLIO_RUN_LSE_BASE_2;
use super::attention::{self, FOLIO_PLAN_GRAPH, Handle, Planner, PlansBatch};
use super::batch::folio_batch;
use super::context::folio_context;
use super::error::folio_error;
use super::handle::{self, Object};
use super::mla::cache_format;
use super::numbers::write;
use super::sized::{self, Input};
use super::status::folio_status;
use super::tensor::{folio_dtype, folio_tensor, log_base, required, tensor};
use super::workspace::{folio_workspace, folio_workspace_info};
use crate::api::{BatchInput, Context, MlaContext, Stream, Workspace, WorkspaceInfo};
use crate::error::{Error, Result};
use crate::problem::{
    ChunkRows, LatentCache, MlaContextArgs, MlaContextDesc, Unpacking, UpProjection,
};
use std::ffi::{c_char, c_void};

/// The caller unpacks the context itself, for instance with quantised weights: runs are made in steps, and the workspace
/// has no room for unpacked chunks.
pub const FOLIO_MLA_CONTEXT_STEPS: u32 = 4;

/// What an MLA context handle is made from: DeepSeek-V2's multi-head latent attention in its multi-head form, for
/// prompts whose requests may have a cached context.
///
/// Names of extents below: T new tokens, H num_heads, L kv_lora_rank, P qk_nope_head_dim, R qk_rope_head_dim, V
/// v_head_dim. Dimensions are multiples of 8; P + R and V are what prefill takes as head_dim_qk and head_dim_vo. The
/// maxima bound every later batch and fix the workspace.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct folio_mla_context_desc {
    /// sizeof(folio_mla_context_desc).
    pub struct_size: u32,
    /// FOLIO_PLAN_GRAPH, FOLIO_MLA_CONTEXT_STEPS.
    pub flags: u32,
    /// Type of q, k_nope, k_rope, v, o and the weights: float32, float16 or bfloat16.
    pub dtype: folio_dtype,
    /// Type of the cache: dtype, float8_e4m3 or float8_e5m2; all zero: as dtype. With FOLIO_MLA_CACHE_FP8_DS_MLA: all
    /// zero or float8_e4m3.
    pub kv_dtype: folio_dtype,
    /// FOLIO_MLA_CACHE_…
    pub cache_format: i32,
    /// H.
    pub num_heads: u32,
    /// L, up to 512.
    pub kv_lora_rank: u32,
    /// P.
    pub qk_nope_head_dim: u32,
    /// R.
    pub qk_rope_head_dim: u32,
    /// V.
    pub v_head_dim: u32,
    /// Tokens per page, 1 or more.
    pub page_size: u32,
    /// Most requests of a batch.
    pub max_batch_size: u32,
    /// Most new tokens of a batch, over all requests.
    pub max_num_tokens: u32,
    /// Most new tokens of a request; 0: max_num_tokens.
    pub max_qo_len: u32,
    /// Most tokens of a request, those of this step included.
    pub max_kv_len: u32,
    /// Most context tokens that are unpacked at a time: a chunk. 0: as many as vLLM unpacks,
    /// max(min(max(8 · max_kv_len, 4 · max_batch_size · page_size), 65536), max_batch_size · page_size). Of
    /// 16-bit types with 128 heads of 128, 64 Ki tokens need 4 GiB; no chunk is larger than all contexts can be.
    pub max_chunk_tokens: u32,
    /// Most pages of a batch, over all requests; 0: max_batch_size times the pages of max_kv_len.
    pub max_num_pages: u64,
}

const _: () = assert!(size_of::<folio_mla_context_desc>() == 72);

// SAFETY: repr(C), two u32 first, integers only, no padding (asserted by size).
unsafe impl Input for folio_mla_context_desc {
    const NAME: &'static str = "folio_mla_context_desc";
    const FIRST_SIZE: usize = 72;
    const FLAGS: u32 = FOLIO_PLAN_GRAPH | FOLIO_MLA_CONTEXT_STEPS;
    type Parsed = MlaContextDesc;

    unsafe fn parse(&self) -> Result<MlaContextDesc> {
        let dtype = self.dtype.parse("dtype")?;
        Ok(MlaContextDesc {
            dtype,
            cache: cache_format(self.cache_format, self.kv_dtype, dtype)?,
            num_heads: self.num_heads,
            kv_lora_rank: self.kv_lora_rank,
            qk_nope_head_dim: self.qk_nope_head_dim,
            qk_rope_head_dim: self.qk_rope_head_dim,
            v_head_dim: self.v_head_dim,
            page_size: self.page_size,
            max_batch_size: self.max_batch_size,
            max_qo_len: self.max_qo_len,
            max_num_tokens: self.max_num_tokens,
            max_kv_len: self.max_kv_len,
            max_num_pages: self.max_num_pages,
            max_chunk_tokens: self.max_chunk_tokens,
            in_steps: self.flags & FOLIO_MLA_CONTEXT_STEPS != 0,
            graph: self.flags & FOLIO_PLAN_GRAPH != 0,
        })
    }
}

/// Tensors and parameters of one call; one plan serves many, with different values. The extents are those of
/// folio_mla_context_desc.
///
/// With the context's records (c, r) unpacked to keys (`W_UK[h] c`, r) and values `c W_UV[h]`, and the new tokens' keys
/// (k_nope, k_rope) and values v behind them, row i of a request sees its whole context and its new tokens up to i:
///
/// ```text
/// o = Σ softmax(q·k · sm_scale)_j v_j
/// lse = log(Σ e^(q·k · sm_scale))
/// ```
///
/// Chunks of the context are summed up in float32, new tokens are added to that, and o is rounded: once on the CPU and by
/// Hopper's kernels, while of the portable CUDA kernel both of these parts are rounded before. This is the prefill of vLLM's MLA
/// backends; there every chunk is merged in the type of o.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct folio_mla_context_args {
    /// sizeof(folio_mla_context_args).
    pub struct_size: u32,
    /// FOLIO_RUN_LSE_BASE_2 or 0.
    pub flags: u32,
    /// Queries, the last R elements rotated: `[T or more, H, P + R]`.
    pub q: *const folio_tensor,
    /// Keys of the new tokens: `[T or more, H, P]`.
    pub k_nope: *const folio_tensor,
    /// Their rotated part, of all heads: `[T or more, R]` or `[T or more, 1, R]`.
    pub k_rope: *const folio_tensor,
    /// Values of the new tokens: `[T or more, H, V]`.
    pub v: *const folio_tensor,
    /// The cache: `[num_pages, page_size, L + R]` of kv_dtype; uint8 stands for fp8. With kv_rope:
    /// `[num_pages, page_size, L]`. fp8_ds_mla: `[num_pages, page_size, 656]` uint8. The new tokens need not be in it.
    pub kv: *const folio_tensor,
    /// The rotary part of the cache, `[num_pages, page_size, R]`; NULL where kv holds whole records.
    pub kv_rope: *const folio_tensor,
    /// `[H, P, L]` with any strides. NULL with FOLIO_MLA_CONTEXT_STEPS.
    pub w_uk: *const folio_tensor,
    /// `[H, L, V]` with any strides. NULL with FOLIO_MLA_CONTEXT_STEPS.
    pub w_uv: *const folio_tensor,
    /// With FOLIO_MLA_CONTEXT_STEPS, as the next three; NULL without. Output of gather: `[tokens of the chunk or more, L]`.
    pub context_latent: *const folio_tensor,
    /// Output of gather, and read by attend: `[…, R]`.
    pub context_rope: *const folio_tensor,
    /// Read by attend: `[…, H, P]`.
    pub context_k_nope: *const folio_tensor,
    /// Read by attend: `[…, H, V]`.
    pub context_v: *const folio_tensor,
    /// Output: `[T or more, H, V]`. It may not overlap another tensor.
    pub o: *const folio_tensor,
    /// Output: `[T or more, H]` float32, float16 or bfloat16 of any strides, or NULL. The sum over the chunks is kept in
    /// float32.
    pub lse: *const folio_tensor,
    /// Factor of q·k. 0: 1 / sqrt(P + R).
    pub sm_scale: f32,
    /// A plain fp8 cache holds records / k_scale. 0: 1.
    pub k_scale: f32,
}

const _: () = assert!(size_of::<folio_mla_context_args>() == 128);

// SAFETY: repr(C), two u32 first, numbers and pointers only, no padding (asserted by size).
unsafe impl Input for folio_mla_context_args {
    const NAME: &'static str = "folio_mla_context_args";
    const FIRST_SIZE: usize = 128;
    const FLAGS: u32 = FOLIO_RUN_LSE_BASE_2;
    type Parsed = MlaContextArgs;

    unsafe fn parse(&self) -> Result<MlaContextArgs> {
        // SAFETY: the caller's promise.
        unsafe {
            Ok(MlaContextArgs {
                q: required("q", self.q)?,
                k_nope: required("k_nope", self.k_nope)?,
                k_rope: required("k_rope", self.k_rope)?,
                v: required("v", self.v)?,
                cache: LatentCache {
                    kv: required("kv", self.kv)?,
                    kv_rope: tensor("kv_rope", self.kv_rope)?,
                    kv_dtype: None,
                    is_ds_mla: false,
                },
                unpacking: self.unpacking()?,
                o: required("o", self.o)?,
                lse: tensor("lse", self.lse)?,
                lse_base: log_base(self.flags & FOLIO_RUN_LSE_BASE_2),
                sm_scale: self.sm_scale,
                k_scale: self.k_scale,
            })
        }
    }
}

impl folio_mla_context_args {
    /// # Safety
    /// As [`Input::parse`].
    unsafe fn unpacking(&self) -> Result<Unpacking> {
        let weights = [("w_uk", self.w_uk), ("w_uv", self.w_uv)];
        let chunk = [
            ("context_latent", self.context_latent),
            ("context_rope", self.context_rope),
            ("context_k_nope", self.context_k_nope),
            ("context_v", self.context_v),
        ];
        let stated = |fields: &[(&'static str, *const folio_tensor)]| {
            fields
                .iter()
                .find(|field| !field.1.is_null())
                .map(|field| field.0)
        };
        match (stated(&weights), stated(&chunk)) {
            (Some(weight), Some(rows)) => Err(Error::InvalidArgument(format!(
                "{rows}: a tensor is not accepted together with {weight}; one of the two is"
            ))),
            (None, None) => Err(Error::InvalidArgument(
                "w_uk, context_latent: NULL is not accepted for both; a tensor for one of them is"
                    .into(),
            )),
            // SAFETY: the caller's promise.
            (Some(_), None) => Ok(Unpacking::Weights(unsafe {
                UpProjection {
                    w_uk: required("w_uk", self.w_uk)?,
                    w_uv: required("w_uv", self.w_uv)?,
                }
            })),
            // SAFETY: the caller's promise.
            (None, Some(_)) => Ok(Unpacking::Caller(unsafe {
                ChunkRows {
                    latent: required("context_latent", self.context_latent)?,
                    rope: required("context_rope", self.context_rope)?,
                    k_nope: required("context_k_nope", self.context_k_nope)?,
                    v: required("context_v", self.context_v)?,
                }
            })),
        }
    }
}

/// Prefill of MLA over a cached context: vLLM's chunked context. One handle serves every batch within its desc, and one
/// plan every layer of a step.
///
/// Runs of one plan share its workspace. On CUDA they are on one stream, or on streams that the host orders.
pub struct folio_mla_context {
    _opaque: [u8; 0],
}

impl Handle for MlaContext {
    type Desc = MlaContextDesc;

    fn create(context: &Context, desc: MlaContextDesc) -> Result<MlaContext> {
        MlaContext::new(context, desc)
    }

    fn kernel(&self) -> &str {
        self.kernel()
    }

    fn workspace(&self) -> WorkspaceInfo {
        self.workspace()
    }
}

impl PlansBatch for MlaContext {
    fn plan(
        &mut self,
        batch: &BatchInput,
        workspace: &Workspace,
        bytes: (usize, usize),
        stream: Stream,
    ) -> Result<()> {
        self.plan(batch, workspace, bytes, stream)
    }
}

impl Object for folio_mla_context {
    type Value = Planner<MlaContext>;
    const PARAMETER: &'static str = "handle";
    const NAME: &'static str = "folio_mla_context";
}

/// Picks the code for a problem.
///
/// @copydetails folio_decode_create
///
/// # Safety
/// As folio_decode_create.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn folio_mla_context_create(
    ctx: *const folio_context,
    desc: *const folio_mla_context_desc,
    out: *mut *mut folio_mla_context,
    err: *mut folio_error,
) -> folio_status {
    // SAFETY: the documented promises of the caller.
    unsafe { attention::create(ctx, desc, out, err) }
}

/// The memory that every plan within the desc can do with: two sums of T rows in float32, an unpacked chunk (unless
/// FOLIO_MLA_CONTEXT_STEPS), and plans.
///
/// @copydetails folio_decode_workspace
///
/// # Safety
/// As folio_decode_workspace.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn folio_mla_context_workspace(
    handle: *const folio_mla_context,
    out: *mut folio_workspace_info,
    err: *mut folio_error,
) -> folio_status {
    // SAFETY: the documented promises of the caller.
    unsafe { attention::workspace(handle, out, err) }
}

/// Takes over a step's batch: kv_len counts the context of a request and its new tokens, of which it has qo_len. Lengths
/// are in host memory; page ids (block_table, or kv_indices) are on the context's device, where runs read them: they stay
/// as they are until the last run of the plan, and those of int64 are not copied. For a graph, the batch has max_batch_size requests, some of them without tokens, and rows of the
/// outputs beyond the batch may be written.
///
/// @copydetails folio_decode_plan
///
/// # Safety
/// As folio_decode_plan.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn folio_mla_context_plan(
    handle: *mut folio_mla_context,
    batch: *const folio_batch,
    ws: *const folio_workspace,
    stream: *mut c_void,
    err: *mut folio_error,
) -> folio_status {
    // SAFETY: the documented promises of the caller.
    unsafe { attention::plan(handle, batch, ws, stream, err) }
}

/// Computes attention for the planned batch. Not with FOLIO_MLA_CONTEXT_STEPS.
///
/// @copydetails folio_decode_run
///
/// # Safety
/// As folio_decode_run.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn folio_mla_context_run(
    handle: *const folio_mla_context,
    args: *const folio_mla_context_args,
    stream: *mut c_void,
    err: *mut folio_error,
) -> folio_status {
    // SAFETY: the documented promises of the caller.
    unsafe { launch(handle, args, stream, err, MlaContext::run) }
}

/// The number of chunks of the current plan; of a graph's, as many as any plan has.
///
/// # Safety
/// `handle` as for folio_mla_context_run; `out` is NULL or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn folio_mla_context_num_chunks(
    handle: *const folio_mla_context,
    out: *mut u32,
    err: *mut folio_error,
) -> folio_status {
    // SAFETY: the documented promises of the caller.
    unsafe { handle::shared(handle, err, |h| write(out, h.handle.num_chunks()? as i64)) }
}

/// Context tokens of a chunk of the current plan: rows that folio_mla_context_gather writes. They are at most
/// max_chunk_tokens, and all of a graph's chunks have these.
///
/// # Safety
/// As folio_mla_context_num_chunks.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn folio_mla_context_chunk_tokens(
    handle: *const folio_mla_context,
    chunk: u32,
    out: *mut u32,
    err: *mut folio_error,
) -> folio_status {
    // SAFETY: the documented promises of the caller.
    unsafe {
        handle::shared(handle, err, |h| {
            write(out, h.handle.chunk_tokens(chunk as usize)?)
        })
    }
}

/// The first step of a run with FOLIO_MLA_CONTEXT_STEPS. Where no request has context it is the only one: new tokens over
/// themselves, and o is written. Else it starts the sum of the chunks. Then, for every chunk in turn, folio_mla_context_gather,
/// the caller's products of context_latent with its weights to context_k_nope and context_v, and folio_mla_context_attend; the
/// last of these also attends the new tokens over themselves, and writes o. All steps of a run have the same args but for the context's
/// tensors, and no other run of the plan comes between them.
///
/// @copydetails folio_decode_run
///
/// # Safety
/// As folio_decode_run.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn folio_mla_context_new_tokens(
    handle: *const folio_mla_context,
    args: *const folio_mla_context_args,
    stream: *mut c_void,
    err: *mut folio_error,
) -> folio_status {
    // SAFETY: the documented promises of the caller.
    unsafe { launch(handle, args, stream, err, MlaContext::new_tokens) }
}

/// Copies a chunk's records to context_latent and context_rope, in the type of the desc.
///
/// @param chunk the chunk's number, below that of folio_mla_context_num_chunks
///
/// @copydetails folio_mla_context_new_tokens
///
/// # Safety
/// As folio_decode_run.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn folio_mla_context_gather(
    handle: *const folio_mla_context,
    chunk: u32,
    args: *const folio_mla_context_args,
    stream: *mut c_void,
    err: *mut folio_error,
) -> folio_status {
    // SAFETY: the documented promises of the caller.
    unsafe {
        launch(handle, args, stream, err, |context, args, stream| {
            context.gather(chunk as usize, args, stream)
        })
    }
}

/// Attends a chunk whose keys and values are in context_k_nope, context_rope and context_v; with the last one, new tokens over
/// themselves as well.
///
/// @param chunk the chunk's number, below that of folio_mla_context_num_chunks
///
/// @copydetails folio_mla_context_new_tokens
///
/// # Safety
/// As folio_decode_run.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn folio_mla_context_attend(
    handle: *const folio_mla_context,
    chunk: u32,
    args: *const folio_mla_context_args,
    stream: *mut c_void,
    err: *mut folio_error,
) -> folio_status {
    // SAFETY: the documented promises of the caller.
    unsafe {
        launch(handle, args, stream, err, |context, args, stream| {
            context.attend(chunk as usize, args, stream)
        })
    }
}

/// Name of the kernel that create picked for new tokens.
///
/// @copydetails folio_decode_kernel
///
/// # Safety
/// As folio_decode_kernel.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn folio_mla_context_kernel(
    handle: *const folio_mla_context,
) -> *const c_char {
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
pub unsafe extern "C" fn folio_mla_context_destroy(handle: *mut folio_mla_context) {
    // SAFETY: the documented promise of the caller.
    unsafe { handle::destroy(handle) }
}

/// A run, or a step of one.
///
/// # Safety
/// As folio_decode_run.
unsafe fn launch(
    handle: *const folio_mla_context,
    args: *const folio_mla_context_args,
    stream: *mut c_void,
    err: *mut folio_error,
    step: impl FnOnce(&MlaContext, &MlaContextArgs, Stream) -> Result<()>,
) -> folio_status {
    // SAFETY: the caller's promises.
    unsafe {
        handle::shared(handle, err, |h| {
            step(&h.handle, &sized::parse(args)?, Stream(stream as usize))
        })
    }
}
