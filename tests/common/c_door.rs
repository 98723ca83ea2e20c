//! The door of C: every call goes through the function table, with C structs made from the API's plain
//! inputs, as a host that loads the library would do it.

#![allow(unsafe_code)]

use super::door::{CascadeHandle, ContextHandle, Door, Handle, Session};
use folio::api::{BatchInput, SharedPrefixes};
use folio::api::{Stream, Target, Workspace, WorkspaceInfo};
use folio::dtype::DType;
use folio::error::{Error, Result};
use folio::ffi::*;
use folio::problem::{
    AbsorbQArgs, AbsorbWeightsArgs, Angles, AppendArgs, AttentionArgs, AttentionDesc,
    BatchLengthsArgs, BlockTableArgs, CacheFormat, CopyArgs, CpCorrectArgs, CpReorderArgs,
    DraftKvIndicesArgs, DraftSlots, GatherArgs, Kind, KvIndicesArgs, KvLayout, KvStorage,
    LatentCache, LogBase, Mask, MaskColumns, MergeArgs, MergeStatesArgs, MergeVarlenArgs,
    MlaAppendArgs, MlaContextArgs, MlaContextDesc, MlaGatherArgs, ProjectOArgs, QueryRows,
    RecordPages, RopeAppendArgs, SlotMappingArgs, TreeMaskArgs, Unpacking, UpProjectArgs, Window,
};
use folio::tensor::{Device, Tensor};
use std::cell::RefCell;
use std::ffi::{CStr, c_void};
use std::ptr::{null, null_mut};

/// `folio_get_api`.
pub struct CDoor;

/// The table.
pub fn api() -> &'static folio_api {
    // SAFETY: not NULL for the version of the same build, and static.
    unsafe { folio_get_api(FOLIO_ABI_VERSION).as_ref() }.expect("a table for this version")
}

/// A zeroed struct with its size filled in: what FOLIO_INIT makes.
///
/// # Safety
/// `T` begins with a `u32` struct_size, and zeros are a value of it.
pub unsafe fn init<T>() -> T {
    // SAFETY: the caller's promise.
    unsafe {
        let mut value: T = std::mem::zeroed();
        (&raw mut value).cast::<u32>().write(size_of::<T>() as u32);
        value
    }
}

/// An error report to be filled in.
pub fn report() -> folio_error {
    // SAFETY: a struct of integers behind its size.
    unsafe { init() }
}

/// The text of a report.
pub fn message(err: &folio_error) -> String {
    let text = err.message.as_ptr();
    // SAFETY: the library ends every message with NUL within the struct, and a fresh report is zeros.
    let text = unsafe { CStr::from_ptr(text) };
    text.to_str().expect("UTF-8").to_owned()
}

/// A status and report as an error of the kind that the Rust door gives.
pub fn outcome(status: folio_status, err: &folio_error) -> Result<()> {
    if status == FOLIO_OK {
        return Ok(());
    }
    assert_eq!(err.status, status, "the report carries the status");
    let kind: fn(String) -> Error = match status {
        FOLIO_ERR_INVALID_ARGUMENT => Error::InvalidArgument,
        FOLIO_ERR_INVALID_STRUCT_SIZE => Error::InvalidStructSize,
        FOLIO_ERR_UNKNOWN_FIELD => Error::UnknownField,
        FOLIO_ERR_SHAPE => Error::Shape,
        FOLIO_ERR_DTYPE => Error::DType,
        FOLIO_ERR_DEVICE_MISMATCH => Error::DeviceMismatch,
        FOLIO_ERR_WORKSPACE_TOO_SMALL => Error::WorkspaceTooSmall,
        FOLIO_ERR_NOT_PLANNED => Error::NotPlanned,
        FOLIO_ERR_CAPTURE => Error::Capture,
        FOLIO_ERR_UNSUPPORTED => Error::Unsupported,
        FOLIO_ERR_NO_DEVICE => Error::NoDevice,
        FOLIO_ERR_NO_DRIVER => Error::NoDriver,
        FOLIO_ERR_DRIVER_TOO_OLD => Error::DriverTooOld,
        FOLIO_ERR_COMPILE => Error::Compile,
        FOLIO_ERR_OUT_OF_MEMORY => Error::OutOfMemory,
        FOLIO_ERR_DRIVER => Error::Driver,
        _ => Error::Internal,
    };
    Err(kind(message(err)))
}

/// C tensors that live until the call is over.
#[derive(Default)]
pub struct Tensors {
    #[expect(clippy::vec_box, reason = "C holds the addresses")]
    made: RefCell<Vec<Box<Made>>>,
}

struct Made {
    tensor: folio_tensor,
    shape: Vec<i64>,
    strides: Vec<i64>,
}

impl Tensors {
    /// A tensor of the Rust API as C describes it; NULL for none.
    pub fn of(&self, tensor: impl Into<Option<Tensor>>) -> *mut folio_tensor {
        let Some(tensor) = tensor.into() else {
            return null_mut();
        };
        let (device_type, device_id) = match tensor.device() {
            Device::Cpu if tensor.is_page_locked() => (FOLIO_DEVICE_CUDA_HOST, 0),
            Device::Cpu => (FOLIO_DEVICE_CPU, 0),
            Device::Cuda(id) => (FOLIO_DEVICE_CUDA, id),
        };
        // A part of the address goes through byte_offset, so that it is not forgotten.
        let byte_offset = tensor.address() % 64;
        let mut made = Box::new(Made {
            shape: tensor.shape().to_vec(),
            strides: tensor.strides().to_vec(),
            tensor: folio_tensor {
                data: (tensor.address() - byte_offset) as *mut c_void,
                device_type,
                device_id,
                ndim: tensor.rank() as i32,
                dtype: dtype(tensor.dtype()),
                shape: null_mut(),
                strides: null_mut(),
                byte_offset: byte_offset as u64,
            },
        });
        made.tensor.shape = made.shape.as_mut_ptr();
        made.tensor.strides = made.strides.as_mut_ptr();
        let pointer = &raw mut made.tensor;
        self.made.borrow_mut().push(made);
        pointer
    }
}

/// An element type as C describes it.
pub fn dtype(dtype: DType) -> folio_dtype {
    let (code, bits) = dtype.to_dlpack();
    folio_dtype {
        code,
        bits,
        lanes: dtype.lanes(),
    }
}

pub fn c_layout(layout: KvLayout) -> i32 {
    match layout {
        KvLayout::Nhd => FOLIO_LAYOUT_NHD,
        KvLayout::Hnd => FOLIO_LAYOUT_HND,
    }
}

/// A C batch.
pub fn c_batch(input: &BatchInput, tensors: &Tensors) -> folio_batch {
    folio_batch {
        struct_size: size_of::<folio_batch>() as u32,
        flags: match input.window_left {
            Some(_) => FOLIO_BATCH_WINDOW,
            None => 0,
        },
        qo_len: input.qo_len,
        reserved: 0,
        qo_indptr: tensors.of(input.qo_indptr),
        kv_indptr: tensors.of(input.kv_indptr),
        kv_indices: tensors.of(input.kv_indices),
        last_page_len: tensors.of(input.last_page_len),
        kv_len: tensors.of(input.kv_len),
        block_table: tensors.of(input.block_table),
        window_left: input.window_left.map_or(-1, i64::from),
    }
}

/// C arguments of a run.
pub fn c_args(input: &AttentionArgs, tensors: &Tensors) -> folio_attention_args {
    let flag = |on: bool, flag: u32| if on { flag } else { 0 };
    let [window_left, window_right] = c_window(input.window);
    let (mask_mode, custom_mask, causal_requests) = c_mask(input.mask);
    let (item_starts, item_positions) = match input.mask {
        Mask::Items { starts, positions } => (Some(starts), Some(positions)),
        _ => (None, None),
    };
    folio_attention_args {
        struct_size: size_of::<folio_attention_args>() as u32,
        flags: flag(input.window != Window::default(), FOLIO_RUN_WINDOW)
            | flag(input.lse_base == LogBase::Two, FOLIO_RUN_LSE_BASE_2)
            | flag(input.alibi_sqrt, FOLIO_RUN_ALIBI_SQRT)
            | flag(input.mm_prefix_in_window, FOLIO_RUN_MM_PREFIX_IN_WINDOW)
            | input.score_bias.map_or(0, |bias| {
                flag(bias.new_keys, FOLIO_RUN_BIAS_NEW_KEYS)
                    | flag(bias.request_rows, FOLIO_RUN_BIAS_REQUEST_ROWS)
            })
            | match input.mask_columns {
                MaskColumns::Keys => 0,
                MaskColumns::KeysAfterPrefix => FOLIO_RUN_MASK_SKIP_PREFIX,
                MaskColumns::NewKeys => FOLIO_RUN_MASK_NEW_KEYS,
            },
        q: tensors.of(input.q),
        k: tensors.of(input.k),
        v: tensors.of(input.v),
        o: tensors.of(input.o),
        lse: tensors.of(input.lse),
        k_scales: tensors.of(input.k_scales),
        v_scales: tensors.of(input.v_scales),
        custom_mask: tensors.of(custom_mask),
        mm_prefix_ranges: tensors.of(input.mm_prefix_ranges),
        alibi_slopes: tensors.of(input.alibi_slopes),
        sinks: tensors.of(input.sinks),
        sm_scale: input.sm_scale,
        q_scale: input.q_scale,
        k_scale: input.k_scale,
        v_scale: input.v_scale,
        o_scale: input.o_scale,
        logits_soft_cap: input.logits_soft_cap,
        mask_mode,
        window_left,
        window_right,
        reserved: 0,
        k_rope: tensors.of(input.k_rope),
        custom_mask_indptr: tensors.of(input.custom_mask_indptr),
        causal_requests: tensors.of(causal_requests),
        attention_chunk_size: input.chunks.map_or(0, |chunks| chunks.size.get()),
        attention_chunk_look_back: input.chunks.map_or(0, |chunks| chunks.look_back),
        k_zero_points: tensors.of(input.k_zero_points),
        v_zero_points: tensors.of(input.v_zero_points),
        k_new: tensors.of(input.k_new),
        v_new: tensors.of(input.v_new),
        q_scales: tensors.of(input.q_scales),
        o_scales: tensors.of(input.o_scales),
        item_starts: tensors.of(item_starts),
        item_positions: tensors.of(item_positions),
        score_bias: tensors.of(input.score_bias.map(|bias| bias.tensor)),
    }
}

/// Both sides, -1 where unlimited. No window at all is stated without the flag, and then 0 is fine too.
fn c_window(window: Window) -> [i32; 2] {
    match window {
        Window {
            left: None,
            right: None,
        } => [0, -1],
        Window { left, right } => [left, right].map(|side| side.map_or(-1, |n| n as i32)),
    }
}

/// The mode, custom_mask and causal_requests.
fn c_mask(mask: Mask) -> (i32, Option<Tensor>, Option<Tensor>) {
    match mask {
        Mask::Causal => (FOLIO_MASK_CAUSAL, None, None),
        Mask::Full => (FOLIO_MASK_FULL, None, None),
        Mask::CausalByRequest(causal) => (FOLIO_MASK_CAUSAL_BY_REQUEST, None, Some(causal)),
        Mask::Items { .. } => (FOLIO_MASK_ITEMS, None, None),
        Mask::Bytes(mask) => (FOLIO_MASK_CUSTOM_BYTES, Some(mask), None),
        Mask::Bits(mask) => (FOLIO_MASK_CUSTOM_BITS, Some(mask), None),
    }
}

/// C arguments of a run of MLA.
pub fn c_mla_args(input: &AttentionArgs, tensors: &Tensors) -> folio_mla_args {
    folio_mla_args {
        struct_size: size_of::<folio_mla_args>() as u32,
        flags: match input.lse_base {
            LogBase::E => 0,
            LogBase::Two => FOLIO_RUN_LSE_BASE_2,
        },
        q_latent: tensors.of(input.q),
        q_rope: tensors.of(input.q_rope),
        kv: tensors.of(input.k),
        kv_rope: tensors.of(input.k_rope),
        o: tensors.of(input.o),
        lse: tensors.of(input.lse),
        sm_scale: input.sm_scale,
        q_scale: input.q_scale,
        k_scale: input.k_scale,
        mask_mode: c_mask(input.mask).0,
    }
}

/// C arguments of an append.
pub fn c_append(input: &AppendArgs, tensors: &Tensors) -> folio_kv_append_args {
    folio_kv_append_args {
        struct_size: size_of::<folio_kv_append_args>() as u32,
        flags: 0,
        key: tensors.of(input.key),
        value: tensors.of(input.value),
        k_cache: tensors.of(input.k_cache),
        v_cache: tensors.of(input.v_cache),
        slot_mapping: tensors.of(input.slot_mapping),
        k_scales: tensors.of(input.k_scales),
        v_scales: tensors.of(input.v_scales),
        k_scale: input.k_scale,
        v_scale: input.v_scale,
        kv_layout: c_layout(input.layout),
        kv_dtype: input.kv_dtype.map_or(NO_DTYPE, dtype),
        kv_format: input.form as i32,
        reserved: 0,
        k_zero_points: tensors.of(input.k_zero_points),
        v_zero_points: tensors.of(input.v_zero_points),
    }
}

/// C arguments of an append with norm and RoPE.
pub fn c_rope_append(input: &RopeAppendArgs, tensors: &Tensors) -> folio_rope_append_args {
    let append = c_append(&input.append, tensors);
    let rope = input.rope.as_ref();
    let (table, frequencies) = match rope.map(|rope| rope.angles) {
        None => (None, None),
        Some(Angles::Table(table)) => (Some(table), None),
        Some(Angles::Computed(frequencies)) => (None, Some(frequencies)),
    };
    let llama3 = frequencies.and_then(|frequencies| frequencies.llama3);
    folio_rope_append_args {
        struct_size: size_of::<folio_rope_append_args>() as u32,
        flags: match rope {
            Some(rope) if rope.is_interleaved => FOLIO_ROPE_INTERLEAVED,
            _ => 0,
        },
        q: tensors.of(input.q),
        q_out: tensors.of(input.q_out),
        key: append.key,
        key_out: tensors.of(input.key_out),
        value: append.value,
        k_cache: append.k_cache,
        v_cache: append.v_cache,
        slot_mapping: append.slot_mapping,
        k_scales: append.k_scales,
        v_scales: append.v_scales,
        q_norm_weight: tensors.of(input.norm.q_weight),
        k_norm_weight: tensors.of(input.norm.k_weight),
        positions: tensors.of(rope.map(|rope| rope.positions)),
        position_offsets: tensors.of(rope.and_then(|rope| rope.position_offsets)),
        cos_sin_cache: tensors.of(table),
        k_scale: append.k_scale,
        v_scale: append.v_scale,
        kv_layout: append.kv_layout,
        kv_dtype: append.kv_dtype,
        rms_norm_eps: input.norm.eps,
        rotary_dim: rope.map_or(0, |rope| rope.rotary_dim),
        rope_theta: frequencies.map_or(0.0, |frequencies| frequencies.theta),
        rope_scale: frequencies.map_or(0.0, |frequencies| frequencies.scale),
        low_freq_factor: llama3.map_or(0.0, |llama3| llama3.low_freq_factor),
        high_freq_factor: llama3.map_or(0.0, |llama3| llama3.high_freq_factor),
        old_context_len: llama3.map_or(0, |llama3| llama3.old_context_len),
        kv_format: append.kv_format,
        k_zero_points: append.k_zero_points,
        v_zero_points: append.v_zero_points,
    }
}

const NO_DTYPE: folio_dtype = folio_dtype {
    code: 0,
    bits: 0,
    lanes: 0,
};

/// C arguments of a merge of two states.
pub fn c_merge(input: &MergeArgs, tensors: &Tensors) -> folio_merge_state_args {
    folio_merge_state_args {
        struct_size: size_of::<folio_merge_state_args>() as u32,
        flags: merge_flags(input.lse_base),
        v_a: tensors.of(input.v_a),
        s_a: tensors.of(input.s_a),
        v_b: tensors.of(input.v_b),
        s_b: tensors.of(input.s_b),
        v_out: tensors.of(input.v_out),
        s_out: tensors.of(input.s_out),
        mask: tensors.of(input.mask),
        o_scale: input.o_scale,
        num_tokens_without_a: input.num_tokens_without_a as u32,
    }
}

/// C arguments of a merge of n states.
pub fn c_merge_states(input: &MergeStatesArgs, tensors: &Tensors) -> folio_merge_states_args {
    folio_merge_states_args {
        struct_size: size_of::<folio_merge_states_args>() as u32,
        flags: merge_flags(input.lse_base),
        v: tensors.of(input.v),
        s: tensors.of(input.s),
        v_out: tensors.of(input.v_out),
        s_out: tensors.of(input.s_out),
        o_scale: input.o_scale,
        reserved: 0,
    }
}

/// C arguments of a merge of as many states as each token has.
pub fn c_merge_varlen(input: &MergeVarlenArgs, tensors: &Tensors) -> folio_merge_varlen_args {
    folio_merge_varlen_args {
        struct_size: size_of::<folio_merge_varlen_args>() as u32,
        flags: merge_flags(input.lse_base),
        v: tensors.of(input.v),
        s: tensors.of(input.s),
        indptr: tensors.of(input.indptr),
        v_out: tensors.of(input.v_out),
        s_out: tensors.of(input.s_out),
        o_scale: input.o_scale,
        reserved: 0,
    }
}

/// C arguments of cutting an up-projection.
pub fn c_absorb_weights(
    input: &AbsorbWeightsArgs,
    tensors: &Tensors,
) -> folio_mla_absorb_weights_args {
    folio_mla_absorb_weights_args {
        struct_size: size_of::<folio_mla_absorb_weights_args>() as u32,
        flags: 0,
        kv_b_proj: tensors.of(input.kv_b_proj),
        w_uk: tensors.of(input.w_uk),
        w_uv: tensors.of(input.w_uv),
    }
}

/// C arguments of an absorption of queries.
pub fn c_absorb_q(input: &AbsorbQArgs, tensors: &Tensors) -> folio_mla_absorb_q_args {
    folio_mla_absorb_q_args {
        struct_size: size_of::<folio_mla_absorb_q_args>() as u32,
        flags: 0,
        q_nope: tensors.of(input.q_nope),
        w_uk: tensors.of(input.w_uk),
        q_latent: tensors.of(input.q_latent),
    }
}

/// C arguments of a projection of outputs.
pub fn c_project_o(input: &ProjectOArgs, tensors: &Tensors) -> folio_mla_project_o_args {
    folio_mla_project_o_args {
        struct_size: size_of::<folio_mla_project_o_args>() as u32,
        flags: 0,
        o_latent: tensors.of(input.o_latent),
        w_uv: tensors.of(input.w_uv),
        out: tensors.of(input.out),
    }
}

/// C arguments of an up-projection of latent rows.
pub fn c_up_project(input: &UpProjectArgs, tensors: &Tensors) -> folio_mla_up_project_args {
    folio_mla_up_project_args {
        struct_size: size_of::<folio_mla_up_project_args>() as u32,
        flags: 0,
        kv_c: tensors.of(input.kv_c),
        w_uk: tensors.of(input.w_uk),
        w_uv: tensors.of(input.w_uv),
        k_nope: tensors.of(input.k_nope),
        v: tensors.of(input.v),
    }
}

fn c_cache_format(cache: &LatentCache) -> i32 {
    match cache.is_ds_mla {
        false => FOLIO_MLA_CACHE_PLAIN,
        true => FOLIO_MLA_CACHE_FP8_DS_MLA,
    }
}

/// C arguments of an append of latent records.
pub fn c_mla_append(input: &MlaAppendArgs, tensors: &Tensors) -> folio_mla_append_args {
    let rotary = input.rotary.as_ref();
    let interleaved = rotary.is_some_and(|rotary| rotary.is_interleaved);
    folio_mla_append_args {
        struct_size: size_of::<folio_mla_append_args>() as u32,
        flags: if interleaved {
            FOLIO_MLA_ROPE_INTERLEAVED
        } else {
            0
        },
        latent: tensors.of(input.latent),
        rope: tensors.of(input.rope),
        kv: tensors.of(input.cache.kv),
        kv_rope: tensors.of(input.cache.kv_rope),
        slot_mapping: tensors.of(input.slot_mapping),
        cos_sin_cache: tensors.of(rotary.map(|rotary| rotary.cos_sin_cache)),
        positions: tensors.of(rotary.map(|rotary| rotary.positions)),
        rope_out: tensors.of(rotary.and_then(|rotary| rotary.rope_out)),
        q_rope: tensors.of(rotary.and_then(|rotary| rotary.q_rope)),
        q_rope_out: tensors.of(rotary.and_then(|rotary| rotary.q_rope_out)),
        k_scale: input.k_scale,
        cache_format: c_cache_format(&input.cache),
        kv_dtype: input.cache.kv_dtype.map_or(NO_DTYPE, dtype),
        reserved: 0,
    }
}

/// C arguments of a gather of latent records.
pub fn c_mla_gather(input: &MlaGatherArgs, tensors: &Tensors) -> folio_mla_gather_args {
    let (table, indptr, indices) = match input.pages {
        RecordPages::Table(table) => (Some(table), None, None),
        RecordPages::Csr { indptr, indices } => (None, Some(indptr), Some(indices)),
    };
    folio_mla_gather_args {
        struct_size: size_of::<folio_mla_gather_args>() as u32,
        flags: 0,
        kv: tensors.of(input.cache.kv),
        kv_rope: tensors.of(input.cache.kv_rope),
        dst: tensors.of(input.dst),
        dst_rope: tensors.of(input.dst_rope),
        cu_seq_lens: tensors.of(input.cu_seq_lens),
        seq_starts: tensors.of(input.seq_starts),
        block_table: tensors.of(table),
        kv_indptr: tensors.of(indptr),
        kv_indices: tensors.of(indices),
        k_scale: input.k_scale,
        cache_format: c_cache_format(&input.cache),
        kv_dtype: input.cache.kv_dtype.map_or(NO_DTYPE, dtype),
        reserved: 0,
    }
}

/// C arguments of a copy of pages.
pub fn c_copy(input: &CopyArgs, tensors: &Tensors) -> folio_kv_copy_args {
    folio_kv_copy_args {
        struct_size: size_of::<folio_kv_copy_args>() as u32,
        flags: 0,
        k_src: tensors.of(input.k.src),
        k_dst: tensors.of(input.k.dst),
        v_src: tensors.of(input.v.map(|v| v.src)),
        v_dst: tensors.of(input.v.map(|v| v.dst)),
        page_pairs: tensors.of(input.page_pairs),
    }
}

/// C arguments of a gather of keys and values.
pub fn c_gather(input: &GatherArgs, tensors: &Tensors) -> folio_kv_gather_args {
    let (table, indptr, indices) = match input.requests.pages {
        RecordPages::Table(table) => (Some(table), None, None),
        RecordPages::Csr { indptr, indices } => (None, Some(indptr), Some(indices)),
    };
    folio_kv_gather_args {
        struct_size: size_of::<folio_kv_gather_args>() as u32,
        flags: 0,
        key: tensors.of(input.key),
        value: tensors.of(input.value),
        k_cache: tensors.of(input.k_cache),
        v_cache: tensors.of(input.v_cache),
        cu_seq_lens: tensors.of(input.requests.cu_seq_lens),
        seq_starts: tensors.of(input.requests.seq_starts),
        block_table: tensors.of(table),
        kv_indptr: tensors.of(indptr),
        kv_indices: tensors.of(indices),
        k_scales: tensors.of(input.k_scales),
        v_scales: tensors.of(input.v_scales),
        k_scale: input.k_scale,
        v_scale: input.v_scale,
        kv_layout: c_layout(input.layout),
        kv_dtype: input.kv_dtype.map_or(NO_DTYPE, dtype),
        kv_format: input.form as i32,
        reserved: 0,
        k_zero_points: tensors.of(input.k_zero_points),
        v_zero_points: tensors.of(input.v_zero_points),
    }
}

/// C arguments of a reordering of gathered records.
pub fn c_cp_reorder(input: &CpReorderArgs, tensors: &Tensors) -> folio_cp_reorder_args {
    folio_cp_reorder_args {
        struct_size: size_of::<folio_cp_reorder_args>() as u32,
        flags: 0,
        gathered: tensors.of(input.gathered),
        dst: tensors.of(input.dst),
        context_lens: tensors.of(input.context_lens),
        cu_seq_lens: tensors.of(input.cu_seq_lens),
        cu_padded_lens: tensors.of(input.cu_padded_lens),
        local_start: input.local_start,
        interleave: input.interleave,
    }
}

/// C arguments of a correction of a rank's output.
pub fn c_cp_correct(input: &CpCorrectArgs, tensors: &Tensors) -> folio_cp_correct_args {
    folio_cp_correct_args {
        struct_size: size_of::<folio_cp_correct_args>() as u32,
        flags: match input.lse_base {
            LogBase::E => 0,
            LogBase::Two => FOLIO_CP_LSE_BASE_2,
        },
        lse_all: tensors.of(input.lse_all),
        o: tensors.of(input.o),
        o_out: tensors.of(input.o_out),
        lse_out: tensors.of(input.lse_out),
        rank: input.rank,
        reserved: 0,
    }
}

/// C arguments of masks of trees.
pub fn c_tree_mask(input: &TreeMaskArgs, tensors: &Tensors) -> folio_tree_mask_args {
    folio_tree_mask_args {
        struct_size: size_of::<folio_tree_mask_args>() as u32,
        flags: 0,
        parents: tensors.of(input.parents),
        prefix_lens: tensors.of(input.prefix_lens),
        qo_indptr: tensors.of(input.qo_indptr),
        mask_bytes: tensors.of(input.mask_bytes),
        mask_bits: tensors.of(input.mask_bits),
        tree_mask: tensors.of(input.tree_mask),
        tree_bits: tensors.of(input.tree_bits),
        positions: tensors.of(input.positions),
        next_token: tensors.of(input.next_token),
        next_sibling: tensors.of(input.next_sibling),
    }
}

/// C arguments of lengths.
pub fn c_batch_lengths(input: &BatchLengthsArgs, tensors: &Tensors) -> folio_batch_lengths_args {
    folio_batch_lengths_args {
        struct_size: size_of::<folio_batch_lengths_args>() as u32,
        flags: 0,
        qo_len: tensors.of(input.qo_len),
        cached_len: tensors.of(input.cached_len),
        encoder_len: tensors.of(input.encoder_len),
        qo_indptr: tensors.of(input.qo_indptr),
        kv_len: tensors.of(input.kv_len),
        kv_indptr: tensors.of(input.kv_indptr),
        row_kind: tensors.of(input.row_kind),
    }
}

/// C arguments of a list of pages or slots.
pub fn c_kv_indices(input: &KvIndicesArgs, tensors: &Tensors) -> folio_kv_indices_args {
    folio_kv_indices_args {
        struct_size: size_of::<folio_kv_indices_args>() as u32,
        flags: 0,
        block_table: tensors.of(input.rows.table),
        row_ids: tensors.of(input.rows.row_ids),
        kv_len: tensors.of(input.kv_len),
        kv_start: tensors.of(input.kv_start),
        kv_indptr: tensors.of(input.kv_indptr),
        kv_indices: tensors.of(input.kv_indices),
        last_page_len: tensors.of(input.last_page_len),
        page_size: input.rows.page_size,
        indices_page_size: input.page_size,
        window: input.window,
        reserved: 0,
    }
}

/// C arguments of a block table.
pub fn c_block_table(input: &BlockTableArgs, tensors: &Tensors) -> folio_block_table_args {
    folio_block_table_args {
        struct_size: size_of::<folio_block_table_args>() as u32,
        flags: 0,
        kv_indptr: tensors.of(input.kv_indptr),
        kv_indices: tensors.of(input.kv_indices),
        block_table: tensors.of(input.block_table),
        fill: input.fill,
        reserved: 0,
    }
}

/// C arguments of the slots of new tokens.
pub fn c_slot_mapping(input: &SlotMappingArgs, tensors: &Tensors) -> folio_slot_mapping_args {
    let (qo_indptr, qo_len) = match input.queries {
        QueryRows::Indptr(indptr) => (Some(indptr), None),
        QueryRows::Len(len) => (None, Some(len)),
    };
    folio_slot_mapping_args {
        struct_size: size_of::<folio_slot_mapping_args>() as u32,
        flags: 0,
        block_table: tensors.of(input.rows.table),
        row_ids: tensors.of(input.rows.row_ids),
        qo_indptr: tensors.of(qo_indptr),
        qo_len: tensors.of(qo_len),
        kv_len: tensors.of(input.kv_len),
        slot_mapping: tensors.of(input.slot_mapping),
        positions: tensors.of(input.positions),
        page_size: input.rows.page_size,
        reserved: 0,
    }
}

/// C arguments of the lists of a draft.
pub fn c_draft_kv_indices(
    input: &DraftKvIndicesArgs,
    tensors: &Tensors,
) -> folio_draft_kv_indices_args {
    let (slot_layout, page_size) = match input.slots {
        DraftSlots::StepMajor => (FOLIO_DRAFT_STEP_MAJOR, 0),
        DraftSlots::BranchMajor => (FOLIO_DRAFT_BRANCH_MAJOR, 0),
        DraftSlots::Paged(page_size) => (FOLIO_DRAFT_PAGED, page_size),
    };
    folio_draft_kv_indices_args {
        struct_size: size_of::<folio_draft_kv_indices_args>() as u32,
        flags: 0,
        req_to_token: tensors.of(input.rows.table),
        row_ids: tensors.of(input.rows.row_ids),
        kv_len: tensors.of(input.kv_len),
        kv_indptr: tensors.of(input.kv_indptr),
        kv_indices: tensors.of(input.kv_indices),
        topk: input.topk,
        num_steps: input.num_steps,
        page_size,
        slot_layout,
    }
}

fn merge_flags(base: LogBase) -> u32 {
    match base {
        LogBase::E => 0,
        LogBase::Two => FOLIO_MERGE_LSE_BASE_2,
    }
}

fn plan_flags(desc: &AttentionDesc) -> u32 {
    let mut flags = 0;
    if desc.graph {
        flags |= FOLIO_PLAN_GRAPH;
    }
    if desc.batch_invariant {
        flags |= FOLIO_PLAN_BATCH_INVARIANT;
    }
    if desc.fp8_products {
        flags |= FOLIO_PLAN_FP8_PRODUCTS;
    }
    if desc.mask_items {
        flags |= FOLIO_PLAN_MASK_ITEMS;
    }
    flags
}

/// A C decode desc.
pub fn c_decode_desc(desc: &AttentionDesc) -> folio_decode_desc {
    let (page_size, kv_layout) = storage(desc.kv);
    folio_decode_desc {
        struct_size: size_of::<folio_decode_desc>() as u32,
        flags: plan_flags(desc),
        q_dtype: dtype(desc.q_dtype),
        kv_dtype: dtype(desc.kv_format.element),
        o_dtype: dtype(desc.o_dtype),
        kv_layout,
        num_qo_heads: desc.num_qo_heads,
        num_kv_heads: desc.num_kv_heads,
        head_dim_qk: desc.head_dim_qk,
        head_dim_vo: desc.head_dim_vo,
        page_size,
        max_batch_size: desc.max_batch_size,
        max_qo_len: desc.max_qo_len,
        max_kv_len: desc.max_kv_len,
        max_num_pages: desc.max_num_pages,
        kv_format: desc.kv_format.form() as i32,
        reserved: 0,
    }
}

/// A C prefill desc.
pub fn c_prefill_desc(desc: &AttentionDesc) -> folio_prefill_desc {
    let (page_size, kv_layout) = storage(desc.kv);
    let ragged = desc.kv == KvStorage::Ragged;
    folio_prefill_desc {
        struct_size: size_of::<folio_prefill_desc>() as u32,
        flags: plan_flags(desc),
        q_dtype: dtype(desc.q_dtype),
        kv_dtype: dtype(desc.kv_format.element),
        o_dtype: dtype(desc.o_dtype),
        kv_layout,
        num_qo_heads: desc.num_qo_heads,
        num_kv_heads: desc.num_kv_heads,
        head_dim_qk: desc.head_dim_qk,
        head_dim_vo: desc.head_dim_vo,
        kv_storage: if ragged {
            FOLIO_KV_RAGGED
        } else {
            FOLIO_KV_PAGED
        },
        page_size,
        max_batch_size: desc.max_batch_size,
        max_num_tokens: desc.max_num_tokens,
        max_qo_len: desc.max_qo_len,
        max_kv_len: desc.max_kv_len,
        max_num_pages: if ragged { 0 } else { desc.max_num_pages },
        kv_format: desc.kv_format.form() as i32,
        new_kv_dtype: desc.new_kv.map_or(NO_DTYPE, dtype),
    }
}

/// A C MLA desc.
pub fn c_mla_desc(desc: &AttentionDesc) -> folio_mla_desc {
    folio_mla_desc {
        struct_size: size_of::<folio_mla_desc>() as u32,
        flags: plan_flags(desc),
        q_dtype: dtype(desc.q_dtype),
        kv_dtype: dtype(desc.kv_format.element),
        o_dtype: dtype(desc.o_dtype),
        cache_format: match desc.kv_format {
            CacheFormat::DS_MLA => FOLIO_MLA_CACHE_FP8_DS_MLA,
            _ => FOLIO_MLA_CACHE_PLAIN,
        },
        num_heads: desc.num_qo_heads,
        kv_lora_rank: desc.head_dim_vo,
        qk_rope_head_dim: desc.rope_dim(),
        page_size: desc.kv.page_size(),
        max_batch_size: desc.max_batch_size,
        max_qo_len: desc.max_qo_len,
        max_num_tokens: desc.max_num_tokens,
        max_kv_len: desc.max_kv_len,
        reserved: 0,
        max_num_pages: desc.max_num_pages,
    }
}

fn storage(kv: KvStorage) -> (u32, i32) {
    match kv {
        KvStorage::Ragged => (0, 0),
        KvStorage::Paged { page_size, layout } => (page_size, c_layout(layout)),
    }
}

/// The desc of a context on this target.
pub fn c_context_desc(target: Target) -> folio_context_desc {
    // SAFETY: integers and nullable pointers behind the size.
    let mut desc: folio_context_desc = unsafe { init() };
    desc.device_type = FOLIO_DEVICE_CPU;
    match target {
        Target::Cpu { num_threads } => desc.num_threads = num_threads,
        Target::Reference => desc.flags = FOLIO_CONTEXT_REFERENCE,
        Target::Cuda { ordinal } => {
            desc.device_type = FOLIO_DEVICE_CUDA;
            desc.device_id = ordinal;
        }
    }
    desc
}

/// Gives a fresh report to `call`, and makes of both what the Rust door would have given.
fn call(call: impl FnOnce(&mut folio_error) -> folio_status) -> Result<()> {
    let mut err = report();
    let status = call(&mut err);
    outcome(status, &err)
}

impl Door for CDoor {
    fn name(&self) -> &'static str {
        "c"
    }

    fn open(&self, target: Target) -> Result<Box<dyn Session>> {
        // SAFETY: a live struct without pointers.
        unsafe { open(&c_context_desc(target)) }
    }
}

/// A context of this desc.
///
/// # Safety
/// What the desc points to is as its fields say, for as long as they say.
pub unsafe fn open(desc: &folio_context_desc) -> Result<Box<dyn Session>> {
    let mut ctx = null_mut();
    // SAFETY: live structs; the caller's promise.
    call(|err| unsafe { api().context_create.unwrap()(desc, &mut ctx, err) })?;
    Ok(Box::new(CContext(ctx)))
}

struct CContext(*mut folio_context);

// SAFETY: the header's thread rules; only functions that take a const context are called.
unsafe impl Send for CContext {}
// SAFETY: as above.
unsafe impl Sync for CContext {}

impl Drop for CContext {
    fn drop(&mut self) {
        // SAFETY: made by context_create, and not used afterwards.
        unsafe { api().context_destroy.unwrap()(self.0) }
    }
}

impl Session for CContext {
    fn attention(&self, desc: AttentionDesc) -> Result<Box<dyn Handle>> {
        let mut handle = CHandle {
            decode: null_mut(),
            prefill: null_mut(),
            mla: null_mut(),
        };
        let (ctx, decode, prefill) = (self.0, &mut handle.decode, &mut handle.prefill);
        // SAFETY: live structs and a live context.
        call(|err| unsafe {
            match desc.kind {
                Kind::Decode => {
                    api().decode_create.unwrap()(ctx, &c_decode_desc(&desc), decode, err)
                }
                Kind::Prefill => {
                    api().prefill_create.unwrap()(ctx, &c_prefill_desc(&desc), prefill, err)
                }
                Kind::Mla => {
                    let mla = &mut handle.mla;
                    api().mla_create.unwrap()(ctx, &c_mla_desc(&desc), mla, err)
                }
            }
        })?;
        Ok(Box::new(handle))
    }

    fn append(&self, input: &AppendArgs, stream: Stream) -> Result<()> {
        let tensors = Tensors::default();
        let args = c_append(input, &tensors);
        let stream = stream.0 as *mut c_void;
        // SAFETY: live structs and a live context.
        call(|err| unsafe { api().kv_append.unwrap()(self.0, &args, stream, err) })
    }

    fn copy(&self, input: &CopyArgs, stream: Stream) -> Result<()> {
        let tensors = Tensors::default();
        let args = c_copy(input, &tensors);
        let stream = stream.0 as *mut c_void;
        // SAFETY: live structs and a live context.
        call(|err| unsafe { api().kv_copy.unwrap()(self.0, &args, stream, err) })
    }

    fn gather(&self, input: &GatherArgs, stream: Stream) -> Result<()> {
        let tensors = Tensors::default();
        let args = c_gather(input, &tensors);
        let stream = stream.0 as *mut c_void;
        // SAFETY: live structs and a live context.
        call(|err| unsafe { api().kv_gather.unwrap()(self.0, &args, stream, err) })
    }

    fn merge(&self, input: &MergeArgs, stream: Stream) -> Result<()> {
        let tensors = Tensors::default();
        let args = c_merge(input, &tensors);
        let stream = stream.0 as *mut c_void;
        // SAFETY: live structs and a live context.
        call(|err| unsafe { api().merge_state.unwrap()(self.0, &args, stream, err) })
    }

    fn merge_states(&self, input: &MergeStatesArgs, stream: Stream) -> Result<()> {
        let tensors = Tensors::default();
        let args = c_merge_states(input, &tensors);
        let stream = stream.0 as *mut c_void;
        // SAFETY: live structs and a live context.
        call(|err| unsafe { api().merge_states.unwrap()(self.0, &args, stream, err) })
    }

    fn merge_varlen(&self, input: &MergeVarlenArgs, stream: Stream) -> Result<()> {
        let tensors = Tensors::default();
        let args = c_merge_varlen(input, &tensors);
        let stream = stream.0 as *mut c_void;
        // SAFETY: live structs and a live context.
        call(|err| unsafe { api().merge_varlen.unwrap()(self.0, &args, stream, err) })
    }

    fn absorb_weights(&self, input: &AbsorbWeightsArgs, stream: Stream) -> Result<()> {
        let tensors = Tensors::default();
        let args = c_absorb_weights(input, &tensors);
        let stream = stream.0 as *mut c_void;
        // SAFETY: live structs and a live context.
        call(|err| unsafe { api().mla_absorb_weights.unwrap()(self.0, &args, stream, err) })
    }

    fn absorb_q(&self, input: &AbsorbQArgs, stream: Stream) -> Result<()> {
        let tensors = Tensors::default();
        let args = c_absorb_q(input, &tensors);
        let stream = stream.0 as *mut c_void;
        // SAFETY: live structs and a live context.
        call(|err| unsafe { api().mla_absorb_q.unwrap()(self.0, &args, stream, err) })
    }

    fn project_o(&self, input: &ProjectOArgs, stream: Stream) -> Result<()> {
        let tensors = Tensors::default();
        let args = c_project_o(input, &tensors);
        let stream = stream.0 as *mut c_void;
        // SAFETY: live structs and a live context.
        call(|err| unsafe { api().mla_project_o.unwrap()(self.0, &args, stream, err) })
    }

    fn up_project(&self, input: &UpProjectArgs, stream: Stream) -> Result<()> {
        let tensors = Tensors::default();
        let args = c_up_project(input, &tensors);
        let stream = stream.0 as *mut c_void;
        // SAFETY: live structs and a live context.
        call(|err| unsafe { api().mla_up_project.unwrap()(self.0, &args, stream, err) })
    }

    fn mla_append(&self, input: &MlaAppendArgs, stream: Stream) -> Result<()> {
        let tensors = Tensors::default();
        let args = c_mla_append(input, &tensors);
        let stream = stream.0 as *mut c_void;
        // SAFETY: live structs and a live context.
        call(|err| unsafe { api().mla_append.unwrap()(self.0, &args, stream, err) })
    }

    fn rope_append(&self, input: &RopeAppendArgs, stream: Stream) -> Result<()> {
        let tensors = Tensors::default();
        let args = c_rope_append(input, &tensors);
        let stream = stream.0 as *mut c_void;
        // SAFETY: live structs and a live context.
        call(|err| unsafe { api().rope_append.unwrap()(self.0, &args, stream, err) })
    }

    fn mla_context(&self, desc: MlaContextDesc) -> Result<Box<dyn ContextHandle>> {
        let mut handle = null_mut();
        let desc = c_mla_context_desc(&desc);
        // SAFETY: live structs and a live context.
        call(|err| unsafe { api().mla_context_create.unwrap()(self.0, &desc, &mut handle, err) })?;
        Ok(Box::new(CMlaContext(handle)))
    }

    fn mla_gather(&self, input: &MlaGatherArgs, stream: Stream) -> Result<()> {
        let tensors = Tensors::default();
        let args = c_mla_gather(input, &tensors);
        let stream = stream.0 as *mut c_void;
        // SAFETY: live structs and a live context.
        call(|err| unsafe { api().mla_gather.unwrap()(self.0, &args, stream, err) })
    }

    fn cascade(&self, desc: AttentionDesc) -> Result<Box<dyn CascadeHandle>> {
        let mut handle = null_mut();
        let desc = c_cascade_desc(&desc);
        // SAFETY: live structs and a live context.
        call(|err| unsafe { api().cascade_create.unwrap()(self.0, &desc, &mut handle, err) })?;
        Ok(Box::new(CCascade(handle)))
    }

    fn cp_reorder(&self, input: &CpReorderArgs, stream: Stream) -> Result<()> {
        let tensors = Tensors::default();
        let args = c_cp_reorder(input, &tensors);
        let stream = stream.0 as *mut c_void;
        // SAFETY: live structs and a live context.
        call(|err| unsafe { api().cp_reorder.unwrap()(self.0, &args, stream, err) })
    }

    fn cp_correct(&self, input: &CpCorrectArgs, stream: Stream) -> Result<()> {
        let tensors = Tensors::default();
        let args = c_cp_correct(input, &tensors);
        let stream = stream.0 as *mut c_void;
        // SAFETY: live structs and a live context.
        call(|err| unsafe { api().cp_correct.unwrap()(self.0, &args, stream, err) })
    }

    fn tree_mask(&self, input: &TreeMaskArgs, stream: Stream) -> Result<()> {
        let tensors = Tensors::default();
        let args = c_tree_mask(input, &tensors);
        let stream = stream.0 as *mut c_void;
        // SAFETY: live structs and a live context.
        call(|err| unsafe { api().tree_mask.unwrap()(self.0, &args, stream, err) })
    }

    fn batch_lengths(&self, input: &BatchLengthsArgs, stream: Stream) -> Result<()> {
        let tensors = Tensors::default();
        let args = c_batch_lengths(input, &tensors);
        let stream = stream.0 as *mut c_void;
        // SAFETY: live structs and a live context.
        call(|err| unsafe { api().batch_lengths.unwrap()(self.0, &args, stream, err) })
    }

    fn kv_indices(&self, input: &KvIndicesArgs, stream: Stream) -> Result<()> {
        let tensors = Tensors::default();
        let args = c_kv_indices(input, &tensors);
        let stream = stream.0 as *mut c_void;
        // SAFETY: live structs and a live context.
        call(|err| unsafe { api().kv_indices.unwrap()(self.0, &args, stream, err) })
    }

    fn block_table(&self, input: &BlockTableArgs, stream: Stream) -> Result<()> {
        let tensors = Tensors::default();
        let args = c_block_table(input, &tensors);
        let stream = stream.0 as *mut c_void;
        // SAFETY: live structs and a live context.
        call(|err| unsafe { api().block_table.unwrap()(self.0, &args, stream, err) })
    }

    fn slot_mapping(&self, input: &SlotMappingArgs, stream: Stream) -> Result<()> {
        let tensors = Tensors::default();
        let args = c_slot_mapping(input, &tensors);
        let stream = stream.0 as *mut c_void;
        // SAFETY: live structs and a live context.
        call(|err| unsafe { api().slot_mapping.unwrap()(self.0, &args, stream, err) })
    }

    fn draft_kv_indices(&self, input: &DraftKvIndicesArgs, stream: Stream) -> Result<()> {
        let tensors = Tensors::default();
        let args = c_draft_kv_indices(input, &tensors);
        let stream = stream.0 as *mut c_void;
        // SAFETY: live structs and a live context.
        call(|err| unsafe { api().draft_kv_indices.unwrap()(self.0, &args, stream, err) })
    }
}

/// All but one are NULL.
/// One of the two is NULL.
/// A C desc of an MLA context handle.
pub fn c_mla_context_desc(desc: &MlaContextDesc) -> folio_mla_context_desc {
    let is_ds_mla = desc.cache == CacheFormat::DS_MLA;
    folio_mla_context_desc {
        struct_size: size_of::<folio_mla_context_desc>() as u32,
        flags: if desc.graph { FOLIO_PLAN_GRAPH } else { 0 }
            | if desc.in_steps {
                FOLIO_MLA_CONTEXT_STEPS
            } else {
                0
            },
        dtype: dtype(desc.dtype),
        kv_dtype: if is_ds_mla {
            NO_DTYPE
        } else {
            dtype(desc.cache.element)
        },
        cache_format: match is_ds_mla {
            false => FOLIO_MLA_CACHE_PLAIN,
            true => FOLIO_MLA_CACHE_FP8_DS_MLA,
        },
        num_heads: desc.num_heads,
        kv_lora_rank: desc.kv_lora_rank,
        qk_nope_head_dim: desc.qk_nope_head_dim,
        qk_rope_head_dim: desc.qk_rope_head_dim,
        v_head_dim: desc.v_head_dim,
        page_size: desc.page_size,
        max_batch_size: desc.max_batch_size,
        max_num_tokens: desc.max_num_tokens,
        max_qo_len: desc.max_qo_len,
        max_kv_len: desc.max_kv_len,
        max_chunk_tokens: desc.max_chunk_tokens,
        max_num_pages: desc.max_num_pages,
    }
}

/// C arguments of an MLA context handle.
pub fn c_mla_context(input: &MlaContextArgs, tensors: &Tensors) -> folio_mla_context_args {
    let (weights, chunk) = match input.unpacking {
        Unpacking::Weights(weights) => (Some(weights), None),
        Unpacking::Caller(chunk) => (None, Some(chunk)),
    };
    folio_mla_context_args {
        struct_size: size_of::<folio_mla_context_args>() as u32,
        flags: match input.lse_base {
            LogBase::E => 0,
            LogBase::Two => FOLIO_RUN_LSE_BASE_2,
        },
        q: tensors.of(input.q),
        k_nope: tensors.of(input.k_nope),
        k_rope: tensors.of(input.k_rope),
        v: tensors.of(input.v),
        kv: tensors.of(input.cache.kv),
        kv_rope: tensors.of(input.cache.kv_rope),
        w_uk: tensors.of(weights.map(|weights| weights.w_uk)),
        w_uv: tensors.of(weights.map(|weights| weights.w_uv)),
        context_latent: tensors.of(chunk.map(|chunk| chunk.latent)),
        context_rope: tensors.of(chunk.map(|chunk| chunk.rope)),
        context_k_nope: tensors.of(chunk.map(|chunk| chunk.k_nope)),
        context_v: tensors.of(chunk.map(|chunk| chunk.v)),
        o: tensors.of(input.o),
        lse: tensors.of(input.lse),
        sm_scale: input.sm_scale,
        k_scale: input.k_scale,
    }
}

struct CMlaContext(*mut folio_mla_context);

// SAFETY: the header's thread rules; `plan` has the handle for itself.
unsafe impl Send for CMlaContext {}
// SAFETY: as above.
unsafe impl Sync for CMlaContext {}

impl Drop for CMlaContext {
    fn drop(&mut self) {
        // SAFETY: made by _create and not used afterwards.
        unsafe { api().mla_context_destroy.unwrap()(self.0) }
    }
}

type ContextStep = unsafe extern "C" fn(
    *const folio_mla_context,
    u32,
    *const folio_mla_context_args,
    *mut c_void,
    *mut folio_error,
) -> folio_status;

impl CMlaContext {
    fn step(
        &self,
        step: Option<ContextStep>,
        chunk: usize,
        args: &MlaContextArgs,
        stream: Stream,
    ) -> Result<()> {
        let tensors = Tensors::default();
        let args = c_mla_context(args, &tensors);
        let stream = stream.0 as *mut c_void;
        // SAFETY: live structs and a live handle.
        call(|err| unsafe { step.unwrap()(self.0, chunk as u32, &args, stream, err) })
    }
}

impl ContextHandle for CMlaContext {
    fn workspace(&self) -> Result<WorkspaceInfo> {
        // SAFETY: integers behind the size.
        let mut info: folio_workspace_info = unsafe { init() };
        // SAFETY: live structs and a live handle.
        call(|err| unsafe { api().mla_context_workspace.unwrap()(self.0, &mut info, err) })?;
        Ok(api_info(&info))
    }

    fn plan(
        &mut self,
        batch: &BatchInput,
        workspace: &Workspace,
        bytes: (usize, usize),
        stream: Stream,
    ) -> Result<()> {
        let tensors = Tensors::default();
        let batch = c_batch(batch, &tensors);
        let ws = c_workspace(workspace, bytes);
        let stream = stream.0 as *mut c_void;
        // SAFETY: live structs, and a handle that nobody else uses.
        call(|err| unsafe { api().mla_context_plan.unwrap()(self.0, &batch, &ws, stream, err) })
    }

    fn num_chunks(&self) -> Result<usize> {
        let mut count = 0;
        // SAFETY: a live handle and a number.
        call(|err| unsafe { api().mla_context_num_chunks.unwrap()(self.0, &mut count, err) })?;
        Ok(count as usize)
    }

    fn chunk_tokens(&self, chunk: usize) -> Result<i64> {
        let mut count = 0;
        // SAFETY: a live handle and a number.
        call(|err| unsafe {
            api().mla_context_chunk_tokens.unwrap()(self.0, chunk as u32, &mut count, err)
        })?;
        Ok(count.into())
    }

    fn run(&self, args: &MlaContextArgs, stream: Stream) -> Result<()> {
        let tensors = Tensors::default();
        let args = c_mla_context(args, &tensors);
        let stream = stream.0 as *mut c_void;
        // SAFETY: live structs and a live handle.
        call(|err| unsafe { api().mla_context_run.unwrap()(self.0, &args, stream, err) })
    }

    fn new_tokens(&self, args: &MlaContextArgs, stream: Stream) -> Result<()> {
        let tensors = Tensors::default();
        let args = c_mla_context(args, &tensors);
        let stream = stream.0 as *mut c_void;
        // SAFETY: live structs and a live handle.
        call(|err| unsafe { api().mla_context_new_tokens.unwrap()(self.0, &args, stream, err) })
    }

    fn gather(&self, chunk: usize, args: &MlaContextArgs, stream: Stream) -> Result<()> {
        self.step(api().mla_context_gather, chunk, args, stream)
    }

    fn attend(&self, chunk: usize, args: &MlaContextArgs, stream: Stream) -> Result<()> {
        self.step(api().mla_context_attend, chunk, args, stream)
    }
}

struct CHandle {
    decode: *mut folio_decode,
    prefill: *mut folio_prefill,
    mla: *mut folio_mla,
}

// SAFETY: the header's thread rules; `plan` has the handle for itself.
unsafe impl Send for CHandle {}
// SAFETY: as above.
unsafe impl Sync for CHandle {}

impl Drop for CHandle {
    fn drop(&mut self) {
        // SAFETY: NULL, or made by _create and not used afterwards.
        unsafe {
            api().decode_destroy.unwrap()(self.decode);
            api().prefill_destroy.unwrap()(self.prefill);
            api().mla_destroy.unwrap()(self.mla);
        }
    }
}

impl Handle for CHandle {
    fn workspace(&self) -> Result<WorkspaceInfo> {
        // SAFETY: integers behind the size.
        let mut info: folio_workspace_info = unsafe { init() };
        // SAFETY: live structs and a live handle.
        call(|err| unsafe {
            match (self.decode.is_null(), self.mla.is_null()) {
                (false, _) => api().decode_workspace.unwrap()(self.decode, &mut info, err),
                (_, false) => api().mla_workspace.unwrap()(self.mla, &mut info, err),
                _ => api().prefill_workspace.unwrap()(self.prefill, &mut info, err),
            }
        })?;
        Ok(api_info(&info))
    }

    fn plan(
        &mut self,
        batch: &BatchInput,
        workspace: &Workspace,
        bytes: (usize, usize),
        stream: Stream,
    ) -> Result<()> {
        let tensors = Tensors::default();
        let batch = c_batch(batch, &tensors);
        let given = c_workspace(workspace, bytes);
        let ws = if bytes == (0, 0) {
            null()
        } else {
            &raw const given
        };
        let stream = stream.0 as *mut c_void;
        // SAFETY: live structs, and a handle that nobody else uses.
        call(|err| unsafe {
            match (self.decode.is_null(), self.mla.is_null()) {
                (false, _) => api().decode_plan.unwrap()(self.decode, &batch, ws, stream, err),
                (_, false) => api().mla_plan.unwrap()(self.mla, &batch, ws, stream, err),
                _ => api().prefill_plan.unwrap()(self.prefill, &batch, ws, stream, err),
            }
        })
    }

    fn run(&self, args: &AttentionArgs, stream: Stream) -> Result<()> {
        let tensors = Tensors::default();
        let stream = stream.0 as *mut c_void;
        if !self.mla.is_null() {
            let args = c_mla_args(args, &tensors);
            // SAFETY: live structs and a live handle.
            return call(|err| unsafe { api().mla_run.unwrap()(self.mla, &args, stream, err) });
        }
        let args = c_args(args, &tensors);
        // SAFETY: live structs and a live handle.
        call(|err| unsafe {
            match self.decode.is_null() {
                false => api().decode_run.unwrap()(self.decode, &args, stream, err),
                true => api().prefill_run.unwrap()(self.prefill, &args, stream, err),
            }
        })
    }

    fn append_run(
        &self,
        append: &RopeAppendArgs,
        args: &AttentionArgs,
        stream: Stream,
    ) -> Result<()> {
        let tensors = Tensors::default();
        let (append, args) = (c_rope_append(append, &tensors), c_args(args, &tensors));
        let stream = stream.0 as *mut c_void;
        // SAFETY: live structs and a live handle.
        call(|err| unsafe {
            api().decode_append_run.unwrap()(self.decode, &append, &args, stream, err)
        })
    }
}

/// A C workspace.
fn c_workspace(
    workspace: &Workspace,
    (device_bytes, host_bytes): (usize, usize),
) -> folio_workspace {
    folio_workspace {
        struct_size: size_of::<folio_workspace>() as u32,
        flags: 0,
        device: workspace.device as *mut c_void,
        device_bytes: device_bytes as u64,
        host: workspace.host as *mut c_void,
        host_bytes: host_bytes as u64,
    }
}

/// What a handle needs, as the API says it.
fn api_info(info: &folio_workspace_info) -> WorkspaceInfo {
    WorkspaceInfo {
        device_bytes: info.device_bytes as usize,
        host_bytes: info.host_bytes as usize,
        alignment: info.alignment as usize,
    }
}

/// A C cascade desc.
pub fn c_cascade_desc(desc: &AttentionDesc) -> folio_cascade_desc {
    let (page_size, kv_layout) = storage(desc.kv);
    folio_cascade_desc {
        struct_size: size_of::<folio_cascade_desc>() as u32,
        flags: plan_flags(desc),
        q_dtype: dtype(desc.q_dtype),
        kv_dtype: dtype(desc.kv_format.element),
        o_dtype: dtype(desc.o_dtype),
        kv_layout,
        num_qo_heads: desc.num_qo_heads,
        num_kv_heads: desc.num_kv_heads,
        head_dim_qk: desc.head_dim_qk,
        head_dim_vo: desc.head_dim_vo,
        page_size,
        max_batch_size: desc.max_batch_size,
        max_num_tokens: desc.max_num_tokens,
        max_qo_len: desc.max_qo_len,
        max_kv_len: desc.max_kv_len,
        max_shared_levels: desc.shared_levels,
        max_num_pages: desc.max_num_pages,
        kv_format: desc.kv_format.form() as i32,
        reserved: 0,
    }
}

/// C prefixes.
pub fn c_prefixes(prefixes: &SharedPrefixes<'_>) -> folio_shared_prefixes {
    folio_shared_prefixes {
        struct_size: size_of::<folio_shared_prefixes>() as u32,
        flags: 0,
        common_prefix_len: prefixes.common_prefix_len,
        num_prefixes: prefixes.request_begin.len() as u32,
        request_begin: prefixes.request_begin.as_ptr(),
        request_end: prefixes.request_end.as_ptr(),
        kv_len: prefixes.kv_len.as_ptr(),
    }
}

struct CCascade(*mut folio_cascade);

// SAFETY: the header's thread rules; `plan` has the handle for itself.
unsafe impl Send for CCascade {}
// SAFETY: as above.
unsafe impl Sync for CCascade {}

impl Drop for CCascade {
    fn drop(&mut self) {
        // SAFETY: made by _create and not used afterwards.
        unsafe { api().cascade_destroy.unwrap()(self.0) }
    }
}

impl CascadeHandle for CCascade {
    fn workspace(&self) -> Result<WorkspaceInfo> {
        // SAFETY: integers behind the size.
        let mut info: folio_workspace_info = unsafe { init() };
        // SAFETY: live structs and a live handle.
        call(|err| unsafe { api().cascade_workspace.unwrap()(self.0, &mut info, err) })?;
        Ok(api_info(&info))
    }

    fn plan(
        &mut self,
        batch: &BatchInput,
        prefixes: &SharedPrefixes<'_>,
        workspace: &Workspace,
        bytes: (usize, usize),
        stream: Stream,
    ) -> Result<()> {
        let tensors = Tensors::default();
        let batch = c_batch(batch, &tensors);
        let prefixes = c_prefixes(prefixes);
        let ws = c_workspace(workspace, bytes);
        let stream = stream.0 as *mut c_void;
        // SAFETY: live structs, and a handle that nobody else uses.
        call(|err| unsafe {
            api().cascade_plan.unwrap()(self.0, &batch, &prefixes, &ws, stream, err)
        })
    }

    fn run(&self, args: &AttentionArgs, stream: Stream) -> Result<()> {
        let tensors = Tensors::default();
        let args = c_args(args, &tensors);
        let stream = stream.0 as *mut c_void;
        // SAFETY: live structs and a live handle.
        call(|err| unsafe { api().cascade_run.unwrap()(self.0, &args, stream, err) })
    }

    fn shares(&self) -> Result<bool> {
        let mut shares = 0;
        // SAFETY: a live handle and a number.
        call(|err| unsafe { api().cascade_shares.unwrap()(self.0, &mut shares, err) })?;
        Ok(shares != 0)
    }
}
