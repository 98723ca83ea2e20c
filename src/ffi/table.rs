//! The table of all functions, for hosts that load Folio with dlopen.

use super::guard_value::guard_value;
use super::*;
use std::ffi::{c_char, c_void};

/// Every function of the library, for hosts that dlopen it: one dlsym of folio_get_api instead of one
/// per function. Slots are only ever appended, and none is NULL; ask for later ones with FOLIO_API_HAS.
#[repr(C)]
pub struct folio_api {
    /// sizeof(folio_api) of the library.
    pub struct_size: u32,
    /// FOLIO_ABI_VERSION of the library.
    pub abi_version: u32,
    /// folio_version
    pub version: Option<unsafe extern "C" fn() -> *const c_char>,
    /// folio_status_name
    pub status_name: Option<unsafe extern "C" fn(status: folio_status) -> *const c_char>,
    /// folio_device_count
    pub device_count: Option<unsafe extern "C" fn(device_type: i32) -> u32>,
    /// folio_context_create
    pub context_create: Option<
        unsafe extern "C" fn(
            desc: *const folio_context_desc,
            out: *mut *mut folio_context,
            err: *mut folio_error,
        ) -> folio_status,
    >,
    /// folio_context_destroy
    pub context_destroy: Option<unsafe extern "C" fn(ctx: *mut folio_context)>,
    /// folio_decode_create
    pub decode_create: Option<
        unsafe extern "C" fn(
            ctx: *const folio_context,
            desc: *const folio_decode_desc,
            out: *mut *mut folio_decode,
            err: *mut folio_error,
        ) -> folio_status,
    >,
    /// folio_decode_workspace
    pub decode_workspace: Option<
        unsafe extern "C" fn(
            handle: *const folio_decode,
            out: *mut folio_workspace_info,
            err: *mut folio_error,
        ) -> folio_status,
    >,
    /// folio_decode_plan
    pub decode_plan: Option<
        unsafe extern "C" fn(
            handle: *mut folio_decode,
            batch: *const folio_batch,
            ws: *const folio_workspace,
            stream: *mut c_void,
            err: *mut folio_error,
        ) -> folio_status,
    >,
    /// folio_decode_run
    pub decode_run: Option<
        unsafe extern "C" fn(
            handle: *const folio_decode,
            args: *const folio_attention_args,
            stream: *mut c_void,
            err: *mut folio_error,
        ) -> folio_status,
    >,
    /// folio_decode_kernel
    pub decode_kernel: Option<unsafe extern "C" fn(handle: *const folio_decode) -> *const c_char>,
    /// folio_decode_destroy
    pub decode_destroy: Option<unsafe extern "C" fn(handle: *mut folio_decode)>,
    /// folio_prefill_create
    pub prefill_create: Option<
        unsafe extern "C" fn(
            ctx: *const folio_context,
            desc: *const folio_prefill_desc,
            out: *mut *mut folio_prefill,
            err: *mut folio_error,
        ) -> folio_status,
    >,
    /// folio_prefill_workspace
    pub prefill_workspace: Option<
        unsafe extern "C" fn(
            handle: *const folio_prefill,
            out: *mut folio_workspace_info,
            err: *mut folio_error,
        ) -> folio_status,
    >,
    /// folio_prefill_plan
    pub prefill_plan: Option<
        unsafe extern "C" fn(
            handle: *mut folio_prefill,
            batch: *const folio_batch,
            ws: *const folio_workspace,
            stream: *mut c_void,
            err: *mut folio_error,
        ) -> folio_status,
    >,
    /// folio_prefill_run
    pub prefill_run: Option<
        unsafe extern "C" fn(
            handle: *const folio_prefill,
            args: *const folio_attention_args,
            stream: *mut c_void,
            err: *mut folio_error,
        ) -> folio_status,
    >,
    /// folio_prefill_kernel
    pub prefill_kernel: Option<unsafe extern "C" fn(handle: *const folio_prefill) -> *const c_char>,
    /// folio_prefill_destroy
    pub prefill_destroy: Option<unsafe extern "C" fn(handle: *mut folio_prefill)>,
    /// folio_kv_append
    pub kv_append: Option<
        unsafe extern "C" fn(
            ctx: *const folio_context,
            args: *const folio_kv_append_args,
            stream: *mut c_void,
            err: *mut folio_error,
        ) -> folio_status,
    >,
    /// folio_merge_state
    pub merge_state: Option<
        unsafe extern "C" fn(
            ctx: *const folio_context,
            args: *const folio_merge_state_args,
            stream: *mut c_void,
            err: *mut folio_error,
        ) -> folio_status,
    >,
    /// folio_merge_states
    pub merge_states: Option<
        unsafe extern "C" fn(
            ctx: *const folio_context,
            args: *const folio_merge_states_args,
            stream: *mut c_void,
            err: *mut folio_error,
        ) -> folio_status,
    >,
    /// folio_mla_create
    pub mla_create: Option<
        unsafe extern "C" fn(
            ctx: *const folio_context,
            desc: *const folio_mla_desc,
            out: *mut *mut folio_mla,
            err: *mut folio_error,
        ) -> folio_status,
    >,
    /// folio_mla_workspace
    pub mla_workspace: Option<
        unsafe extern "C" fn(
            handle: *const folio_mla,
            out: *mut folio_workspace_info,
            err: *mut folio_error,
        ) -> folio_status,
    >,
    /// folio_mla_plan
    pub mla_plan: Option<
        unsafe extern "C" fn(
            handle: *mut folio_mla,
            batch: *const folio_batch,
            ws: *const folio_workspace,
            stream: *mut c_void,
            err: *mut folio_error,
        ) -> folio_status,
    >,
    /// folio_mla_run
    pub mla_run: Option<
        unsafe extern "C" fn(
            handle: *const folio_mla,
            args: *const folio_mla_args,
            stream: *mut c_void,
            err: *mut folio_error,
        ) -> folio_status,
    >,
    /// folio_mla_kernel
    pub mla_kernel: Option<unsafe extern "C" fn(handle: *const folio_mla) -> *const c_char>,
    /// folio_mla_destroy
    pub mla_destroy: Option<unsafe extern "C" fn(handle: *mut folio_mla)>,
    /// folio_mla_absorb_weights
    pub mla_absorb_weights: Option<
        unsafe extern "C" fn(
            ctx: *const folio_context,
            args: *const folio_mla_absorb_weights_args,
            stream: *mut c_void,
            err: *mut folio_error,
        ) -> folio_status,
    >,
    /// folio_mla_absorb_q
    pub mla_absorb_q: Option<
        unsafe extern "C" fn(
            ctx: *const folio_context,
            args: *const folio_mla_absorb_q_args,
            stream: *mut c_void,
            err: *mut folio_error,
        ) -> folio_status,
    >,
    /// folio_mla_project_o
    pub mla_project_o: Option<
        unsafe extern "C" fn(
            ctx: *const folio_context,
            args: *const folio_mla_project_o_args,
            stream: *mut c_void,
            err: *mut folio_error,
        ) -> folio_status,
    >,
    /// folio_mla_up_project
    pub mla_up_project: Option<
        unsafe extern "C" fn(
            ctx: *const folio_context,
            args: *const folio_mla_up_project_args,
            stream: *mut c_void,
            err: *mut folio_error,
        ) -> folio_status,
    >,
    /// folio_mla_append
    pub mla_append: Option<
        unsafe extern "C" fn(
            ctx: *const folio_context,
            args: *const folio_mla_append_args,
            stream: *mut c_void,
            err: *mut folio_error,
        ) -> folio_status,
    >,
    /// folio_mla_gather
    pub mla_gather: Option<
        unsafe extern "C" fn(
            ctx: *const folio_context,
            args: *const folio_mla_gather_args,
            stream: *mut c_void,
            err: *mut folio_error,
        ) -> folio_status,
    >,
    /// folio_mla_context_create
    pub mla_context_create: Option<
        unsafe extern "C" fn(
            ctx: *const folio_context,
            desc: *const folio_mla_context_desc,
            out: *mut *mut folio_mla_context,
            err: *mut folio_error,
        ) -> folio_status,
    >,
    /// folio_mla_context_workspace
    pub mla_context_workspace: Option<
        unsafe extern "C" fn(
            handle: *const folio_mla_context,
            out: *mut folio_workspace_info,
            err: *mut folio_error,
        ) -> folio_status,
    >,
    /// folio_mla_context_plan
    pub mla_context_plan: Option<
        unsafe extern "C" fn(
            handle: *mut folio_mla_context,
            batch: *const folio_batch,
            ws: *const folio_workspace,
            stream: *mut c_void,
            err: *mut folio_error,
        ) -> folio_status,
    >,
    /// folio_mla_context_run
    pub mla_context_run: Option<
        unsafe extern "C" fn(
            handle: *const folio_mla_context,
            args: *const folio_mla_context_args,
            stream: *mut c_void,
            err: *mut folio_error,
        ) -> folio_status,
    >,
    /// folio_mla_context_num_chunks
    pub mla_context_num_chunks: Option<
        unsafe extern "C" fn(
            handle: *const folio_mla_context,
            out: *mut u32,
            err: *mut folio_error,
        ) -> folio_status,
    >,
    /// folio_mla_context_chunk_tokens
    pub mla_context_chunk_tokens: Option<
        unsafe extern "C" fn(
            handle: *const folio_mla_context,
            chunk: u32,
            out: *mut u32,
            err: *mut folio_error,
        ) -> folio_status,
    >,
    /// folio_mla_context_new_tokens
    pub mla_context_new_tokens: Option<
        unsafe extern "C" fn(
            handle: *const folio_mla_context,
            args: *const folio_mla_context_args,
            stream: *mut c_void,
            err: *mut folio_error,
        ) -> folio_status,
    >,
    /// folio_mla_context_gather
    pub mla_context_gather: Option<
        unsafe extern "C" fn(
            handle: *const folio_mla_context,
            chunk: u32,
            args: *const folio_mla_context_args,
            stream: *mut c_void,
            err: *mut folio_error,
        ) -> folio_status,
    >,
    /// folio_mla_context_attend
    pub mla_context_attend: Option<
        unsafe extern "C" fn(
            handle: *const folio_mla_context,
            chunk: u32,
            args: *const folio_mla_context_args,
            stream: *mut c_void,
            err: *mut folio_error,
        ) -> folio_status,
    >,
    /// folio_mla_context_kernel
    pub mla_context_kernel:
        Option<unsafe extern "C" fn(handle: *const folio_mla_context) -> *const c_char>,
    /// folio_mla_context_destroy
    pub mla_context_destroy: Option<unsafe extern "C" fn(handle: *mut folio_mla_context)>,
    /// folio_mla_context_tokens
    pub mla_context_tokens:
        Option<unsafe extern "C" fn(max_model_len: u32, max_num_seqs: u32, page_size: u32) -> u64>,
    /// folio_cp_local_lengths
    pub cp_local_lengths: Option<
        unsafe extern "C" fn(
            args: *const folio_cp_local_lengths_args,
            err: *mut folio_error,
        ) -> folio_status,
    >,
    /// folio_mla_context_chunks
    pub mla_context_chunks: Option<
        unsafe extern "C" fn(
            args: *const folio_mla_context_chunks_args,
            err: *mut folio_error,
        ) -> folio_status,
    >,
    /// folio_flashmla_metadata
    pub flashmla_metadata: Option<
        unsafe extern "C" fn(
            args: *const folio_flashmla_metadata_args,
            err: *mut folio_error,
        ) -> folio_status,
    >,
    /// folio_num_kv_splits
    pub num_kv_splits: Option<
        unsafe extern "C" fn(
            args: *const folio_num_kv_splits_args,
            err: *mut folio_error,
        ) -> folio_status,
    >,
    /// folio_split_decodes_and_prefills
    pub split_decodes_and_prefills: Option<
        unsafe extern "C" fn(
            args: *const folio_split_decodes_and_prefills_args,
            err: *mut folio_error,
        ) -> folio_status,
    >,
    /// folio_cp_reorder
    pub cp_reorder: Option<
        unsafe extern "C" fn(
            ctx: *const folio_context,
            args: *const folio_cp_reorder_args,
            stream: *mut c_void,
            err: *mut folio_error,
        ) -> folio_status,
    >,
    /// folio_cp_correct
    pub cp_correct: Option<
        unsafe extern "C" fn(
            ctx: *const folio_context,
            args: *const folio_cp_correct_args,
            stream: *mut c_void,
            err: *mut folio_error,
        ) -> folio_status,
    >,
    /// folio_cascade_create
    pub cascade_create: Option<
        unsafe extern "C" fn(
            ctx: *const folio_context,
            desc: *const folio_cascade_desc,
            out: *mut *mut folio_cascade,
            err: *mut folio_error,
        ) -> folio_status,
    >,
    /// folio_cascade_workspace
    pub cascade_workspace: Option<
        unsafe extern "C" fn(
            handle: *const folio_cascade,
            out: *mut folio_workspace_info,
            err: *mut folio_error,
        ) -> folio_status,
    >,
    /// folio_cascade_plan
    pub cascade_plan: Option<
        unsafe extern "C" fn(
            handle: *mut folio_cascade,
            batch: *const folio_batch,
            prefixes: *const folio_shared_prefixes,
            ws: *const folio_workspace,
            stream: *mut c_void,
            err: *mut folio_error,
        ) -> folio_status,
    >,
    /// folio_cascade_run
    pub cascade_run: Option<
        unsafe extern "C" fn(
            handle: *const folio_cascade,
            args: *const folio_attention_args,
            stream: *mut c_void,
            err: *mut folio_error,
        ) -> folio_status,
    >,
    /// folio_cascade_shares
    pub cascade_shares: Option<
        unsafe extern "C" fn(
            handle: *const folio_cascade,
            out: *mut u32,
            err: *mut folio_error,
        ) -> folio_status,
    >,
    /// folio_cascade_kernel
    pub cascade_kernel: Option<unsafe extern "C" fn(handle: *const folio_cascade) -> *const c_char>,
    /// folio_cascade_destroy
    pub cascade_destroy: Option<unsafe extern "C" fn(handle: *mut folio_cascade)>,
    /// folio_find_shared_prefixes
    pub find_shared_prefixes: Option<
        unsafe extern "C" fn(
            args: *const folio_find_shared_prefixes_args,
            err: *mut folio_error,
        ) -> folio_status,
    >,
    /// folio_merge_varlen
    pub merge_varlen: Option<
        unsafe extern "C" fn(
            ctx: *const folio_context,
            args: *const folio_merge_varlen_args,
            stream: *mut c_void,
            err: *mut folio_error,
        ) -> folio_status,
    >,
    /// folio_kv_copy
    pub kv_copy: Option<
        unsafe extern "C" fn(
            ctx: *const folio_context,
            args: *const folio_kv_copy_args,
            stream: *mut c_void,
            err: *mut folio_error,
        ) -> folio_status,
    >,
    /// folio_tree_mask
    pub tree_mask: Option<
        unsafe extern "C" fn(
            ctx: *const folio_context,
            args: *const folio_tree_mask_args,
            stream: *mut c_void,
            err: *mut folio_error,
        ) -> folio_status,
    >,
    /// folio_kv_gather
    pub kv_gather: Option<
        unsafe extern "C" fn(
            ctx: *const folio_context,
            args: *const folio_kv_gather_args,
            stream: *mut c_void,
            err: *mut folio_error,
        ) -> folio_status,
    >,
    /// folio_balanced_kv_splits
    pub balanced_kv_splits: Option<
        unsafe extern "C" fn(
            args: *const folio_balanced_kv_splits_args,
            err: *mut folio_error,
        ) -> folio_status,
    >,
    /// folio_use_cascade
    pub use_cascade: Option<
        unsafe extern "C" fn(
            args: *const folio_use_cascade_args,
            err: *mut folio_error,
        ) -> folio_status,
    >,
    /// folio_reorder_batch
    pub reorder_batch: Option<
        unsafe extern "C" fn(
            args: *const folio_reorder_batch_args,
            err: *mut folio_error,
        ) -> folio_status,
    >,
    /// folio_batch_lengths
    pub batch_lengths: Option<
        unsafe extern "C" fn(
            ctx: *const folio_context,
            args: *const folio_batch_lengths_args,
            stream: *mut c_void,
            err: *mut folio_error,
        ) -> folio_status,
    >,
    /// folio_kv_indices
    pub kv_indices: Option<
        unsafe extern "C" fn(
            ctx: *const folio_context,
            args: *const folio_kv_indices_args,
            stream: *mut c_void,
            err: *mut folio_error,
        ) -> folio_status,
    >,
    /// folio_block_table
    pub block_table: Option<
        unsafe extern "C" fn(
            ctx: *const folio_context,
            args: *const folio_block_table_args,
            stream: *mut c_void,
            err: *mut folio_error,
        ) -> folio_status,
    >,
    /// folio_slot_mapping
    pub slot_mapping: Option<
        unsafe extern "C" fn(
            ctx: *const folio_context,
            args: *const folio_slot_mapping_args,
            stream: *mut c_void,
            err: *mut folio_error,
        ) -> folio_status,
    >,
    /// folio_draft_kv_indices
    pub draft_kv_indices: Option<
        unsafe extern "C" fn(
            ctx: *const folio_context,
            args: *const folio_draft_kv_indices_args,
            stream: *mut c_void,
            err: *mut folio_error,
        ) -> folio_status,
    >,
    /// folio_rope_append
    pub rope_append: Option<
        unsafe extern "C" fn(
            ctx: *const folio_context,
            args: *const folio_rope_append_args,
            stream: *mut c_void,
            err: *mut folio_error,
        ) -> folio_status,
    >,
    /// folio_decode_append_run
    pub decode_append_run: Option<
        unsafe extern "C" fn(
            handle: *const folio_decode,
            append: *const folio_rope_append_args,
            args: *const folio_attention_args,
            stream: *mut c_void,
            err: *mut folio_error,
        ) -> folio_status,
    >,
}

static API: folio_api = folio_api {
    struct_size: size_of::<folio_api>() as u32,
    abi_version: FOLIO_ABI_VERSION,
    version: Some(folio_version),
    status_name: Some(folio_status_name),
    device_count: Some(folio_device_count),
    context_create: Some(folio_context_create),
    context_destroy: Some(folio_context_destroy),
    decode_create: Some(folio_decode_create),
    decode_workspace: Some(folio_decode_workspace),
    decode_plan: Some(folio_decode_plan),
    decode_run: Some(folio_decode_run),
    decode_kernel: Some(folio_decode_kernel),
    decode_destroy: Some(folio_decode_destroy),
    prefill_create: Some(folio_prefill_create),
    prefill_workspace: Some(folio_prefill_workspace),
    prefill_plan: Some(folio_prefill_plan),
    prefill_run: Some(folio_prefill_run),
    prefill_kernel: Some(folio_prefill_kernel),
    prefill_destroy: Some(folio_prefill_destroy),
    kv_append: Some(folio_kv_append),
    merge_state: Some(folio_merge_state),
    merge_states: Some(folio_merge_states),
    mla_create: Some(folio_mla_create),
    mla_workspace: Some(folio_mla_workspace),
    mla_plan: Some(folio_mla_plan),
    mla_run: Some(folio_mla_run),
    mla_kernel: Some(folio_mla_kernel),
    mla_destroy: Some(folio_mla_destroy),
    mla_absorb_weights: Some(folio_mla_absorb_weights),
    mla_absorb_q: Some(folio_mla_absorb_q),
    mla_project_o: Some(folio_mla_project_o),
    mla_up_project: Some(folio_mla_up_project),
    mla_append: Some(folio_mla_append),
    mla_gather: Some(folio_mla_gather),
    mla_context_create: Some(folio_mla_context_create),
    mla_context_workspace: Some(folio_mla_context_workspace),
    mla_context_plan: Some(folio_mla_context_plan),
    mla_context_run: Some(folio_mla_context_run),
    mla_context_num_chunks: Some(folio_mla_context_num_chunks),
    mla_context_chunk_tokens: Some(folio_mla_context_chunk_tokens),
    mla_context_new_tokens: Some(folio_mla_context_new_tokens),
    mla_context_gather: Some(folio_mla_context_gather),
    mla_context_attend: Some(folio_mla_context_attend),
    mla_context_kernel: Some(folio_mla_context_kernel),
    mla_context_destroy: Some(folio_mla_context_destroy),
    mla_context_tokens: Some(folio_mla_context_tokens),
    cp_local_lengths: Some(folio_cp_local_lengths),
    mla_context_chunks: Some(folio_mla_context_chunks),
    flashmla_metadata: Some(folio_flashmla_metadata),
    num_kv_splits: Some(folio_num_kv_splits),
    split_decodes_and_prefills: Some(folio_split_decodes_and_prefills),
    cp_reorder: Some(folio_cp_reorder),
    cp_correct: Some(folio_cp_correct),
    cascade_create: Some(folio_cascade_create),
    cascade_workspace: Some(folio_cascade_workspace),
    cascade_plan: Some(folio_cascade_plan),
    cascade_run: Some(folio_cascade_run),
    cascade_shares: Some(folio_cascade_shares),
    cascade_kernel: Some(folio_cascade_kernel),
    cascade_destroy: Some(folio_cascade_destroy),
    find_shared_prefixes: Some(folio_find_shared_prefixes),
    merge_varlen: Some(folio_merge_varlen),
    tree_mask: Some(folio_tree_mask),
    kv_copy: Some(folio_kv_copy),
    kv_gather: Some(folio_kv_gather),
    balanced_kv_splits: Some(folio_balanced_kv_splits),
    use_cascade: Some(folio_use_cascade),
    reorder_batch: Some(folio_reorder_batch),
    batch_lengths: Some(folio_batch_lengths),
    kv_indices: Some(folio_kv_indices),
    block_table: Some(folio_block_table),
    slot_mapping: Some(folio_slot_mapping),
    draft_kv_indices: Some(folio_draft_kv_indices),
    rope_append: Some(folio_rope_append),
    decode_append_run: Some(folio_decode_append_run),
};

/// The table of this library, for a caller that was compiled with `abi_version` (FOLIO_ABI_VERSION of
/// its header); NULL where the two do not fit: another major version, or, while the major version is 0,
/// another minor one. Touches no driver, starts no thread, allocates nothing.
///
/// Any thread, any time. The table lives as long as the process. Never dlclose the library.
#[unsafe(no_mangle)]
pub extern "C" fn folio_get_api(abi_version: u32) -> *const folio_api {
    guard_value(std::ptr::null(), || match fits(abi_version) {
        true => &raw const API,
        false => std::ptr::null(),
    })
}

fn fits(abi_version: u32) -> bool {
    match FOLIO_ABI_MAJOR {
        0 => abi_version == FOLIO_ABI_VERSION,
        major => abi_version >> 16 == major,
    }
}
