//! `folio_decode`: few query rows per request over a paged cache.

use super::args::folio_attention_args;
use super::attention::{
    self, AttentionHandle, FOLIO_PLAN_BATCH_INVARIANT, FOLIO_PLAN_FP8_PRODUCTS, FOLIO_PLAN_GRAPH,
    FOLIO_PLAN_MASK_ITEMS, or,
};
use super::batch::folio_batch;
use super::context::folio_context;
use super::error::folio_error;
use super::handle::{self, Object};
use super::kv_storage::{cache_format, layout};
use super::sized::{Input, reserved};
use super::status::folio_status;
use super::tensor::folio_dtype;
use super::workspace::{folio_workspace, folio_workspace_info};
use crate::error::Result;
use crate::problem::{AttentionDesc, Kind, KvStorage};
use std::ffi::{c_char, c_void};

/// What a decode handle is made from: a few query rows per request over a paged cache.
///
/// Types: q float32, float16 or bfloat16; the cache the same type, or float8_e4m3 / float8_e5m2; o the
/// type of q, float32, or fp8. Over an fp8 cache q may be fp8 as well, of either type, and then o is of any of these types.
/// num_qo_heads is a multiple of num_kv_heads; query head h reads KV head
/// h / (num_qo_heads / num_kv_heads). Head dimensions are multiples of 8 up to 512, on the
/// CPU head_dim_qk up to 576; on CUDA up to 256 with another kv_format than plain rows.
/// The maxima bound every later batch and fix the workspace.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct folio_decode_desc {
    /// sizeof(folio_decode_desc).
    pub struct_size: u32,
    /// FOLIO_PLAN_…
    pub flags: u32,
    /// Type of q.
    pub q_dtype: folio_dtype,
    /// Type of the cache; all zero: as q, or the default of kv_format.
    pub kv_dtype: folio_dtype,
    /// Type of o; all zero: as q.
    pub o_dtype: folio_dtype,
    /// FOLIO_LAYOUT_NHD or FOLIO_LAYOUT_HND.
    pub kv_layout: i32,
    /// Query (and output) heads.
    pub num_qo_heads: u32,
    /// KV heads.
    pub num_kv_heads: u32,
    /// Elements of a q or k row.
    pub head_dim_qk: u32,
    /// Elements of a v or o row; 0: head_dim_qk.
    pub head_dim_vo: u32,
    /// Tokens per page, 1 or more.
    pub page_size: u32,
    /// Most requests of a batch.
    pub max_batch_size: u32,
    /// Most query rows of a request; 0: 1.
    pub max_qo_len: u32,
    /// Most keys of a request.
    pub max_kv_len: u32,
    /// Most pages of a batch, over all requests; 0: max_batch_size times the pages of max_kv_len.
    pub max_num_pages: u64,
    /// FOLIO_KV_FORMAT_…: how rows of the cache are stored. Other formats than FOLIO_KV_FORMAT_PLAIN are for paged caches; on
    /// CUDA q has 16 bits there.
    pub kv_format: i32,
    /// 0.
    pub reserved: u32,
}

const _: () = assert!(size_of::<folio_decode_desc>() == 72);

// SAFETY: repr(C), two u32 first, integers only, no padding (asserted by size).
unsafe impl Input for folio_decode_desc {
    const NAME: &'static str = "folio_decode_desc";
    const FIRST_SIZE: usize = 64;
    const FLAGS: u32 = FOLIO_PLAN_GRAPH
        | FOLIO_PLAN_BATCH_INVARIANT
        | FOLIO_PLAN_FP8_PRODUCTS
        | FOLIO_PLAN_MASK_ITEMS;
    type Parsed = AttentionDesc;

    unsafe fn parse(&self) -> Result<AttentionDesc> {
        reserved("folio_decode_desc.reserved", self.reserved)?;
        let q_dtype = self.q_dtype.parse("q_dtype")?;
        Ok(AttentionDesc {
            kind: Kind::Decode,
            q_dtype,
            kv_format: cache_format(self.kv_format, self.kv_dtype, q_dtype)?,
            o_dtype: self.o_dtype.parse_or("o_dtype", q_dtype)?,
            num_qo_heads: self.num_qo_heads,
            num_kv_heads: self.num_kv_heads,
            head_dim_qk: self.head_dim_qk,
            head_dim_vo: or(self.head_dim_vo, self.head_dim_qk),
            kv: KvStorage::Paged {
                page_size: self.page_size,
                layout: layout("kv_layout", self.kv_layout)?,
            },
            max_batch_size: self.max_batch_size,
            max_qo_len: or(self.max_qo_len, 1),
            max_num_tokens: 0,
            max_kv_len: self.max_kv_len,
            max_num_pages: self.max_num_pages,
            graph: self.flags & FOLIO_PLAN_GRAPH != 0,
            batch_invariant: self.flags & FOLIO_PLAN_BATCH_INVARIANT != 0,
            fp8_products: self.flags & FOLIO_PLAN_FP8_PRODUCTS != 0,
            mask_items: self.flags & FOLIO_PLAN_MASK_ITEMS != 0,
            shared_levels: 0,
            new_kv: None,
        })
    }
}

/// Decode attention: FlashInfer's BatchDecodeWithPagedKVCacheWrapper. One handle serves every batch
/// within its desc, and one plan every layer of a step. Multi-token decode (speculative verify) is
/// decode with max_qo_len above 1, its tree given as a custom mask.
pub struct folio_decode {
    _opaque: [u8; 0],
}

impl Object for folio_decode {
    type Value = AttentionHandle;
    const PARAMETER: &'static str = "handle";
    const NAME: &'static str = "folio_decode";
}

/// Picks the code for a problem; slow, once. Also the capability query: UNSUPPORTED says why not.
///
/// On CUDA it loads modules and may compile a kernel; it is no call for a capture.
///
/// @param ctx the device
/// @param desc types, shapes and maxima
/// @param out receives the handle; end it with its _destroy
/// @param err report of a failure, or NULL
/// @return FOLIO_OK, or INVALID_ARGUMENT, INVALID_STRUCT_SIZE, UNKNOWN_FIELD, DTYPE, UNSUPPORTED, COMPILE,
///         OUT_OF_MEMORY, DRIVER
///
/// # Safety
/// `ctx` is alive, `desc` points to as many bytes as its struct_size says, `out` to a pointer. Any
/// thread, concurrently with other uses of `ctx`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn folio_decode_create(
    ctx: *const folio_context,
    desc: *const folio_decode_desc,
    out: *mut *mut folio_decode,
    err: *mut folio_error,
) -> folio_status {
    // SAFETY: the documented promises of the caller.
    unsafe { attention::create(ctx, desc, out, err) }
}

/// The memory that every plan within the desc can do with.
///
/// @param handle the handle
/// @param out struct_size set by the caller; receives the sizes
/// @param err report of a failure, or NULL
/// @return FOLIO_OK, or INVALID_ARGUMENT, INVALID_STRUCT_SIZE
///
/// # Safety
/// `handle` is alive, `out` points to as many bytes as its struct_size says. Concurrent use is fine.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn folio_decode_workspace(
    handle: *const folio_decode,
    out: *mut folio_workspace_info,
    err: *mut folio_error,
) -> folio_status {
    // SAFETY: the documented promises of the caller.
    unsafe { attention::workspace(handle, out, err) }
}

/// Takes over a step's batch: microseconds, once per step. On failure the previous plan stays in force.
///
/// Lengths on the host: Folio writes the plan to one of three parts of the workspace's host memory, in turn,
/// and enqueues its copy to the device. It waits in one case only: where the copy out of that part, which the
/// third plan before this one enqueued, has not run yet. A host may thus be three steps ahead of the device.
/// Such a plan cannot be captured.
///
/// Lengths on the device: Folio enqueues one kernel and never waits. With FOLIO_PLAN_GRAPH the call can be
/// captured.
///
/// On the CPU the plan is complete on return.
///
/// @param handle the handle
/// @param batch lengths and page table; prefill requires qo_indptr
/// @param ws memory as _workspace asks; NULL where it asks for none
/// @param stream CUDA: the stream that later runs use or wait for; CPU: NULL
/// @param err report of a failure, or NULL
/// @return FOLIO_OK, or INVALID_ARGUMENT, INVALID_STRUCT_SIZE, UNKNOWN_FIELD, SHAPE, DTYPE, DEVICE_MISMATCH,
///         WORKSPACE_TOO_SMALL, CAPTURE, UNSUPPORTED, OUT_OF_MEMORY, DRIVER
///
/// # Safety
/// `handle` is alive and in no other call; the structs are readable, and the tensors' memory too.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn folio_decode_plan(
    handle: *mut folio_decode,
    batch: *const folio_batch,
    ws: *const folio_workspace,
    stream: *mut c_void,
    err: *mut folio_error,
) -> folio_status {
    // SAFETY: the documented promises of the caller.
    unsafe { attention::plan(handle, batch, ws, stream, err) }
}

/// Computes attention for the planned batch: once per layer. Allocates nothing, synchronises nothing.
/// On the CPU the outputs are complete on return; on CUDA they are when the stream gets there.
///
/// @param handle the handle
/// @param args tensors and parameters
/// @param stream CUDA stream, or NULL on the CPU
/// @param err report of a failure, or NULL
/// @return FOLIO_OK; NOT_PLANNED, INVALID_ARGUMENT, INVALID_STRUCT_SIZE, UNKNOWN_FIELD, SHAPE, DTYPE,
///         DEVICE_MISMATCH, CAPTURE or UNSUPPORTED, and then no output was touched; or DRIVER
///
/// # Safety
/// `handle` is alive and not being planned; the structs are readable, and the tensors' memory as the
/// fields say. Concurrent runs are fine with different outputs; on CUDA on
/// one stream, or on streams that the host orders: parts of split rows meet in the workspace.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn folio_decode_run(
    handle: *const folio_decode,
    args: *const folio_attention_args,
    stream: *mut c_void,
    err: *mut folio_error,
) -> folio_status {
    // SAFETY: the documented promises of the caller.
    unsafe { attention::run(handle, args, stream, err) }
}

/// Name of the kernel that create picked, e.g. "cpu/avx512-bf16"; NULL for a NULL handle. On the CPU it names the
/// instruction set, whatever the types of the handle are, and on CUDA what the kernel was compiled for. It lives as long
/// as the handle.
///
/// Plans are cut for this kernel. A run that asks for a feature it lacks, as custom masks on Hopper, takes a more
/// general one; of the first run with each such feature, a message of level FOLIO_LOG_INFO tells.
///
/// @param handle the handle, or NULL
///
/// # Safety
/// `handle` is NULL or alive. Concurrent use is fine.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn folio_decode_kernel(handle: *const folio_decode) -> *const c_char {
    // SAFETY: the documented promise of the caller.
    unsafe { attention::kernel(handle) }
}

/// Ends a handle without waiting; NULL is fine. On CUDA its runs may still be on the device, and graphs that
/// captured them may be replayed, while the workspace and the context stay.
///
/// @param handle the handle, or NULL
///
/// # Safety
/// `handle` is NULL or came from its _create and is not used afterwards.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn folio_decode_destroy(handle: *mut folio_decode) {
    // SAFETY: the documented promise of the caller.
    unsafe { handle::destroy(handle) }
}
