//! `folio_cascade`: attention over batches whose requests share prefixes, and finding what they share.

use super::args::folio_attention_args;
use super::attention::{
    self, FOLIO_PLAN_BATCH_INVARIANT, FOLIO_PLAN_FP8_PRODUCTS, FOLIO_PLAN_GRAPH,
    FOLIO_PLAN_MASK_ITEMS, Handle, Planner, or,
};
use super::batch::folio_batch;
use super::context::folio_context;
use super::error::folio_error;
use super::figures::compute;
use super::handle::{self, Object};
use super::kv_storage::{cache_format, layout};
use super::numbers::{number, numbers, output, write};
use super::sized::{self, Input, reserved};
use super::status::folio_status;
use super::tensor::folio_dtype;
use super::workspace::{folio_workspace, folio_workspace_info, workspace as memory};
use crate::api::{
    self, Cascade, Context, FindSharedPrefixes, SharedPrefixes, Stream, WorkspaceInfo,
};
use crate::error::Result;
use crate::problem::{AttentionDesc, Kind, KvStorage};
use std::ffi::{c_char, c_void};

/// What a cascade handle is made from: any number of query rows per request, over a paged cache, where neighbouring
/// requests may have their first pages in common. Types, heads and dimensions as in folio_decode_desc.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct folio_cascade_desc {
    /// sizeof(folio_cascade_desc).
    pub struct_size: u32,
    /// FOLIO_PLAN_…
    pub flags: u32,
    /// Type of q.
    pub q_dtype: folio_dtype,
    /// Type of k and v; all zero: as q, or the default of kv_format.
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
    /// Most query rows of a batch, over all requests.
    pub max_num_tokens: u32,
    /// Most query rows of a request; 0: max_num_tokens.
    pub max_qo_len: u32,
    /// Most keys of a request, shared ones included.
    pub max_kv_len: u32,
    /// Most prefixes that are shared one within the other, up to 16; 0: 1. Deeper ones are left to the requests.
    pub max_shared_levels: u32,
    /// Most page-table entries of a batch, over all requests, where shared pages count for each of them; 0:
    /// max_batch_size times the pages of max_kv_len.
    pub max_num_pages: u64,
    /// FOLIO_KV_FORMAT_…: how rows of the cache are stored. Other formats than FOLIO_KV_FORMAT_PLAIN are for paged caches; on
    /// CUDA q has 16 bits there.
    pub kv_format: i32,
    /// 0.
    pub reserved: u32,
}

const _: () = assert!(size_of::<folio_cascade_desc>() == 80);

// SAFETY: repr(C), two u32 first, integers only, no padding (asserted by size).
unsafe impl Input for folio_cascade_desc {
    const NAME: &'static str = "folio_cascade_desc";
    const FIRST_SIZE: usize = 72;
    const FLAGS: u32 = FOLIO_PLAN_GRAPH
        | FOLIO_PLAN_BATCH_INVARIANT
        | FOLIO_PLAN_FP8_PRODUCTS
        | FOLIO_PLAN_MASK_ITEMS;
    type Parsed = AttentionDesc;

    unsafe fn parse(&self) -> Result<AttentionDesc> {
        reserved("folio_cascade_desc.reserved", self.reserved)?;
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
            kv: KvStorage::Paged {
                page_size: self.page_size,
                layout: layout("kv_layout", self.kv_layout)?,
            },
            max_batch_size: self.max_batch_size,
            max_qo_len: self.max_qo_len,
            max_num_tokens: self.max_num_tokens,
            max_kv_len: self.max_kv_len,
            max_num_pages: self.max_num_pages,
            graph: self.flags & FOLIO_PLAN_GRAPH != 0,
            batch_invariant: self.flags & FOLIO_PLAN_BATCH_INVARIANT != 0,
            fp8_products: self.flags & FOLIO_PLAN_FP8_PRODUCTS != 0,
            mask_items: self.flags & FOLIO_PLAN_MASK_ITEMS != 0,
            shared_levels: self.max_shared_levels,
            new_kv: None,
        })
    }
}

/// What requests of a batch share. Every prefix is the first keys of some neighbouring requests, which have them in the
/// same pages. Prefixes may lie one within the other, as the nodes of a tree: the wider one, with fewer keys, comes
/// first. Arrays are on the host, and only read during the call.
///
/// This is a promise of the caller's, which changes the time and not the result: keys that a request does not have, or
/// that are its new tokens, are not shared whatever is stated. Where the pages are not the same ones, the results are
/// those of the first request's pages.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct folio_shared_prefixes {
    /// sizeof(folio_shared_prefixes).
    pub struct_size: u32,
    /// 0.
    pub flags: u32,
    /// First keys that all requests share (vLLM's common_prefix_len); 0 together with num_prefixes.
    pub common_prefix_len: u32,
    /// Prefixes in the arrays.
    pub num_prefixes: u32,
    /// `[num_prefixes]` first request of each; these never fall.
    pub request_begin: *const i32,
    /// `[num_prefixes]` the request behind its last one.
    pub request_end: *const i32,
    /// `[num_prefixes]` its keys.
    pub kv_len: *const i32,
}

const _: () = assert!(size_of::<folio_shared_prefixes>() == 40);

// SAFETY: repr(C), two u32 first, integers and pointers only, no padding (asserted by size).
unsafe impl Input for folio_shared_prefixes {
    const NAME: &'static str = "folio_shared_prefixes";
    const FIRST_SIZE: usize = 40;
    const FLAGS: u32 = 0;
    type Parsed = SharedPrefixes<'static>;

    unsafe fn parse(&self) -> Result<SharedPrefixes<'static>> {
        // SAFETY: the caller's promise.
        let column = |name, array| unsafe { numbers(name, array, self.num_prefixes.into()) };
        Ok(SharedPrefixes {
            common_prefix_len: self.common_prefix_len,
            request_begin: column("request_begin", self.request_begin)?,
            request_end: column("request_end", self.request_end)?,
            kv_len: column("kv_len", self.kv_len)?,
        })
    }
}

/// Which neighbouring requests of a batch have their first pages in common.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct folio_find_shared_prefixes_args {
    /// sizeof(folio_find_shared_prefixes_args).
    pub struct_size: u32,
    /// 0.
    pub flags: u32,
    /// Tokens per page, 1 or more.
    pub page_size: u32,
    /// Prefixes that the arrays have room for; one less than there are requests is always enough.
    pub capacity: u32,
    /// Lengths and page table, all on the host.
    pub batch: *const folio_batch,
    /// Output: `[capacity]`, as in folio_shared_prefixes.
    pub request_begin: *mut i32,
    /// Output: `[capacity]`
    pub request_end: *mut i32,
    /// Output: `[capacity]`
    pub kv_len: *mut i32,
    /// Output: the number of prefixes.
    pub num_prefixes: *mut u32,
}

const _: () = assert!(size_of::<folio_find_shared_prefixes_args>() == 56);

// SAFETY: repr(C), two u32 first, integers and pointers only, no padding (asserted by size).
unsafe impl Input for folio_find_shared_prefixes_args {
    const NAME: &'static str = "folio_find_shared_prefixes_args";
    const FIRST_SIZE: usize = 56;
    const FLAGS: u32 = 0;
    type Parsed = FindSharedPrefixes<'static>;

    unsafe fn parse(&self) -> Result<FindSharedPrefixes<'static>> {
        // SAFETY: the caller's promise.
        unsafe {
            let column = |name, array| output(name, array, self.capacity.into());
            Ok(FindSharedPrefixes {
                batch: sized::parse(self.batch)?,
                page_size: self.page_size,
                request_begin: column("request_begin", self.request_begin)?,
                request_end: column("request_end", self.request_end)?,
                kv_len: column("kv_len", self.kv_len)?,
                num_prefixes: number("num_prefixes", self.num_prefixes)?,
            })
        }
    }
}

/// Attention over batches whose requests share prefixes: FlashInfer's MultiLevelCascadeAttentionWrapper, vLLM's cascade
/// attention. Shared keys are read once for all rows that see them, and the parts of every row are put together by one
/// kernel. Results are those of folio_prefill on the same batch, up to rounding.
///
/// A plan shares what pays and leaves the rest to the requests. Runs with a window to the left, chunks, ALiBi or a custom
/// mask of all keys depend on positions, which rows of several requests do not have in common: they read the keys request
/// by request. With FOLIO_PLAN_GRAPH, runs without them always take the kernel for shared keys, also where nothing pays: steps
/// that share nothing are faster with folio_decode. But where max_batch_size requests of max_kv_len keys that share two thirds of
/// them would not pay, no run shares, and runs are those of folio_decode: so make handles of graphs for no longer requests than
/// they get. With FOLIO_PLAN_BATCH_INVARIANT nothing is shared, since what a request shares depends on the others. One handle
/// serves every batch within its desc, and one plan every layer of a step.
pub struct folio_cascade {
    _opaque: [u8; 0],
}

impl Handle for Cascade {
    type Desc = AttentionDesc;

    fn create(context: &Context, desc: AttentionDesc) -> Result<Cascade> {
        Cascade::new(context, desc)
    }

    fn kernel(&self) -> &str {
        self.kernel()
    }

    fn workspace(&self) -> WorkspaceInfo {
        self.workspace()
    }
}

/// NULL: nothing is shared.
///
/// # Safety
/// As [`sized::parse`], where it is not NULL.
unsafe fn shared(prefixes: *const folio_shared_prefixes) -> Result<SharedPrefixes<'static>> {
    match prefixes.is_null() {
        true => Ok(SharedPrefixes::default()),
        // SAFETY: the caller's promise.
        false => unsafe { sized::parse(prefixes) },
    }
}

impl Object for folio_cascade {
    type Value = Planner<Cascade>;
    const PARAMETER: &'static str = "handle";
    const NAME: &'static str = "folio_cascade";
}

/// Picks the code for a problem.
///
/// @copydetails folio_decode_create
///
/// # Safety
/// As folio_decode_create.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn folio_cascade_create(
    ctx: *const folio_context,
    desc: *const folio_cascade_desc,
    out: *mut *mut folio_cascade,
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
pub unsafe extern "C" fn folio_cascade_workspace(
    handle: *const folio_cascade,
    out: *mut folio_workspace_info,
    err: *mut folio_error,
) -> folio_status {
    // SAFETY: the documented promises of the caller.
    unsafe { attention::workspace(handle, out, err) }
}

/// Takes over a step's batch, whose page table has shared pages in the rows of every request that has them, and what its
/// requests share. Lengths may be on the device, where prefixes end at the last key that all of their requests have: what was
/// stated bounds that. A plan that was captured keeps its prefixes.
///
/// @param prefixes what requests share; NULL: nothing
///
/// @copydetails folio_decode_plan
///
/// # Safety
/// As folio_decode_plan; `prefixes` is NULL or as its fields say.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn folio_cascade_plan(
    handle: *mut folio_cascade,
    batch: *const folio_batch,
    prefixes: *const folio_shared_prefixes,
    ws: *const folio_workspace,
    stream: *mut c_void,
    err: *mut folio_error,
) -> folio_status {
    // SAFETY: the documented promises of the caller.
    unsafe { plan(handle, batch, prefixes, ws, stream, err) }
}

/// Computes attention for the planned batch.
///
/// @copydetails folio_decode_run
///
/// # Safety
/// As folio_decode_run.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn folio_cascade_run(
    handle: *const folio_cascade,
    args: *const folio_attention_args,
    stream: *mut c_void,
    err: *mut folio_error,
) -> folio_status {
    // SAFETY: the documented promises of the caller.
    unsafe {
        handle::shared(handle, err, |h| {
            h.handle.run(&sized::parse(args)?, Stream(stream as usize))
        })
    }
}

/// Whether the current plan shares keys: some prefix pays.
///
/// @param handle the handle
/// @param out receives 1 or 0
/// @param err report of a failure, or NULL
/// @return FOLIO_OK, INVALID_ARGUMENT or NOT_PLANNED
///
/// # Safety
/// `handle` as for folio_cascade_run; `out` is NULL or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn folio_cascade_shares(
    handle: *const folio_cascade,
    out: *mut u32,
    err: *mut folio_error,
) -> folio_status {
    // SAFETY: the documented promises of the caller.
    unsafe { handle::shared(handle, err, |h| write(out, h.handle.shares()?.into())) }
}

/// Name of the kernel that create picked for shared keys.
///
/// @copydetails folio_decode_kernel
///
/// # Safety
/// As folio_decode_kernel.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn folio_cascade_kernel(handle: *const folio_cascade) -> *const c_char {
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
pub unsafe extern "C" fn folio_cascade_destroy(handle: *mut folio_cascade) {
    // SAFETY: the documented promise of the caller.
    unsafe { handle::destroy(handle) }
}

/// Finds what neighbouring requests of a batch share, by their page tables: every set of requests with first pages in
/// common that no larger set has, in the order that folio_cascade_plan takes. Whole pages count. An engine that sorts its
/// batch by prefix finds all of them so.
///
/// @param args batch and outputs
/// @param err report of a failure, or NULL
/// @return FOLIO_OK, or what is wrong with the batch, or OUT_OF_MEMORY; then nothing was written
///
/// # Safety
/// The struct and its arrays are as the fields say; the outputs overlap nothing. Any thread, any time.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn folio_find_shared_prefixes(
    args: *const folio_find_shared_prefixes_args,
    err: *mut folio_error,
) -> folio_status {
    // SAFETY: the documented promises of the caller.
    unsafe { compute(args, err, api::find_shared_prefixes) }
}

/// # Safety
/// As [`folio_cascade_plan`].
unsafe fn plan(
    handle: *mut folio_cascade,
    batch: *const folio_batch,
    prefixes: *const folio_shared_prefixes,
    ws: *const folio_workspace,
    stream: *mut c_void,
    err: *mut folio_error,
) -> folio_status {
    // SAFETY: the caller's promises.
    unsafe {
        handle::exclusive(handle, err, |h| {
            let (batch, prefixes) = (sized::parse(batch)?, shared(prefixes)?);
            let (ws, bytes) = memory(ws)?;
            h.handle
                .plan(&batch, &prefixes, &ws, bytes, Stream(stream as usize))
        })
    }
}
