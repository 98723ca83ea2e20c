//! `folio_prefill`: any number of query rows per request, over a paged cache or ragged K and V.

use super::args::folio_attention_args;
use super::attention::{
    self, AttentionHandle, FOLIO_PLAN_BATCH_INVARIANT, FOLIO_PLAN_FP8_PRODUCTS, FOLIO_PLAN_GRAPH,
    FOLIO_PLAN_MASK_ITEMS, or,
};
use super::batch::folio_batch;
use super::context::folio_context;
use super::error::folio_error;
use super::handle::{self, Object};
use super::kv_storage::{FOLIO_KV_PAGED, FOLIO_KV_RAGGED, cache_format, layout};
use super::sized::Input;
use super::status::folio_status;
use super::tensor::folio_dtype;
use super::workspace::{folio_workspace, folio_workspace_info};
use crate::error::{Error, Result};
use crate::problem::{AttentionDesc, Kind, KvStorage};
use std::ffi::{c_char, c_void};

/// What a prefill handle is made from: any number of query rows per request, over a paged cache or over
/// ragged K and V. Mixed batches (prefill, chunked prefill, decode, speculative verify) are one batch.
/// Types, heads and dimensions as in folio_decode_desc.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct folio_prefill_desc {
    /// sizeof(folio_prefill_desc).
    pub struct_size: u32,
    /// FOLIO_PLAN_…
    pub flags: u32,
    /// Type of q.
    pub q_dtype: folio_dtype,
    /// Type of k and v; all zero: as q, or the default of kv_format.
    pub kv_dtype: folio_dtype,
    /// Type of o; all zero: as q.
    pub o_dtype: folio_dtype,
    /// FOLIO_LAYOUT_NHD or FOLIO_LAYOUT_HND; 0 for ragged.
    pub kv_layout: i32,
    /// Query (and output) heads.
    pub num_qo_heads: u32,
    /// KV heads.
    pub num_kv_heads: u32,
    /// Elements of a q or k row.
    pub head_dim_qk: u32,
    /// Elements of a v or o row; 0: head_dim_qk.
    pub head_dim_vo: u32,
    /// FOLIO_KV_PAGED or FOLIO_KV_RAGGED.
    pub kv_storage: i32,
    /// Tokens per page, 1 or more; 0 for ragged.
    pub page_size: u32,
    /// Most requests of a batch.
    pub max_batch_size: u32,
    /// Most query rows of a batch, over all requests.
    pub max_num_tokens: u32,
    /// Most query rows of a request; 0: max_num_tokens.
    pub max_qo_len: u32,
    /// Most keys of a request, those beside the cache included.
    pub max_kv_len: u32,
    /// Most pages of a batch, over all requests; 0: max_batch_size times the pages of max_kv_len.
    pub max_num_pages: u64,
    /// FOLIO_KV_FORMAT_…: how rows of the cache are stored. Other formats than FOLIO_KV_FORMAT_PLAIN are for paged caches; on
    /// CUDA q has 16 bits there.
    pub kv_format: i32,
    /// Type of k_new and v_new, that of q or fp8; all zero: there are none. With it the keys and values of the query rows are
    /// beside the paged cache, in every run of the handle: see folio_attention_args.k_new.
    pub new_kv_dtype: folio_dtype,
}

const _: () = assert!(size_of::<folio_prefill_desc>() == 80);

// SAFETY: repr(C), two u32 first, integers only, no padding (asserted by size).
unsafe impl Input for folio_prefill_desc {
    const NAME: &'static str = "folio_prefill_desc";
    const FIRST_SIZE: usize = 72;
    const FLAGS: u32 = FOLIO_PLAN_GRAPH
        | FOLIO_PLAN_BATCH_INVARIANT
        | FOLIO_PLAN_FP8_PRODUCTS
        | FOLIO_PLAN_MASK_ITEMS;
    type Parsed = AttentionDesc;

    unsafe fn parse(&self) -> Result<AttentionDesc> {
        let q_dtype = self.q_dtype.parse("q_dtype")?;
        Ok(AttentionDesc {
            kind: Kind::Prefill,
            q_dtype,
            kv_format: cache_format(self.kv_format, self.kv_dtype, q_dtype)?,
            o_dtype: self.o_dtype.parse_or("o_dtype", q_dtype)?,
            num_qo_heads: self.num_qo_heads,
            num_kv_heads: self.num_kv_heads,
            head_dim_qk: self.head_dim_qk,
            head_dim_vo: or(self.head_dim_vo, self.head_dim_qk),
            kv: self.storage()?,
            max_batch_size: self.max_batch_size,
            max_qo_len: self.max_qo_len,
            max_num_tokens: self.max_num_tokens,
            max_kv_len: self.max_kv_len,
            max_num_pages: self.max_num_pages,
            graph: self.flags & FOLIO_PLAN_GRAPH != 0,
            batch_invariant: self.flags & FOLIO_PLAN_BATCH_INVARIANT != 0,
            fp8_products: self.flags & FOLIO_PLAN_FP8_PRODUCTS != 0,
            mask_items: self.flags & FOLIO_PLAN_MASK_ITEMS != 0,
            shared_levels: 0,
            new_kv: self.new_kv_dtype.parse_optional("new_kv_dtype")?,
        })
    }
}

impl folio_prefill_desc {
    fn storage(&self) -> Result<KvStorage> {
        match self.kv_storage {
            FOLIO_KV_PAGED => Ok(KvStorage::Paged {
                page_size: self.page_size,
                layout: layout("kv_layout", self.kv_layout)?,
            }),
            FOLIO_KV_RAGGED => {
                unused("page_size", self.page_size.into())?;
                unused("kv_layout", self.kv_layout.into())?;
                unused(
                    "max_num_pages",
                    i64::try_from(self.max_num_pages).unwrap_or(i64::MAX),
                )?;
                Ok(KvStorage::Ragged)
            }
            other => Err(Error::InvalidArgument(format!(
                "kv_storage: {other} is not accepted; FOLIO_KV_PAGED (0) or FOLIO_KV_RAGGED (1) is"
            ))),
        }
    }
}

fn unused(name: &str, value: i64) -> Result<()> {
    if value == 0 {
        return Ok(());
    }
    Err(Error::InvalidArgument(format!(
        "{name}: {value} is not accepted with FOLIO_KV_RAGGED; 0 is"
    )))
}

/// Prefill attention: FlashInfer's BatchPrefillWithPagedKVCacheWrapper and
/// BatchPrefillWithRaggedKVCacheWrapper. One handle serves every batch within its desc, and one plan
/// every layer of a step.
pub struct folio_prefill {
    _opaque: [u8; 0],
}

impl Object for folio_prefill {
    type Value = AttentionHandle;
    const PARAMETER: &'static str = "handle";
    const NAME: &'static str = "folio_prefill";
}

/// Picks the code for a problem.
///
/// @copydetails folio_decode_create
///
/// # Safety
/// As folio_decode_create.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn folio_prefill_create(
    ctx: *const folio_context,
    desc: *const folio_prefill_desc,
    out: *mut *mut folio_prefill,
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
pub unsafe extern "C" fn folio_prefill_workspace(
    handle: *const folio_prefill,
    out: *mut folio_workspace_info,
    err: *mut folio_error,
) -> folio_status {
    // SAFETY: the documented promises of the caller.
    unsafe { attention::workspace(handle, out, err) }
}

/// Takes over a step's batch.
///
/// @copydetails folio_decode_plan
///
/// # Safety
/// As folio_decode_plan.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn folio_prefill_plan(
    handle: *mut folio_prefill,
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
pub unsafe extern "C" fn folio_prefill_run(
    handle: *const folio_prefill,
    args: *const folio_attention_args,
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
pub unsafe extern "C" fn folio_prefill_kernel(handle: *const folio_prefill) -> *const c_char {
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
pub unsafe extern "C" fn folio_prefill_destroy(handle: *mut folio_prefill) {
    // SAFETY: the documented promise of the caller.
    unsafe { handle::destroy(handle) }
}
