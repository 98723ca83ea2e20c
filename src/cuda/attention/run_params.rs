//! What every attention kernel is told of a run: tensors, masks, windows, scales and flags. What only some kernels are told
//! is theirs to add.

use crate::cuda::params::{
    ALIBI_SQRT, AttentionParams, Cache, K_SCALES_OF_REQUESTS, MASK_NEW_KEYS, MASK_SKIP_PREFIX,
    MM_PREFIX_IN_WINDOW, MaskMode, PlanView, QUERIES_E4M3, QUERIES_E5M2, Rows,
    V_SCALES_OF_REQUESTS, address, are_of_requests, fewest, lse_flag, scales_stride,
};
use crate::dtype::DType;
use crate::problem::{AttentionArgs, AttentionDesc, Checked, Mask, MaskColumns};
use crate::tensor::Tensor;

/// Device addresses of the custom masks' starts.
#[derive(Debug, Clone, Copy)]
pub struct MaskStarts {
    pub bytes: u64,
    pub bits: u64,
}

/// Of a run over a plan, by a device whose L2 has so many bytes.
pub fn of(
    desc: &AttentionDesc,
    l2_bytes: u32,
    plan: PlanView,
    starts: &MaskStarts,
    args: &Checked<AttentionArgs>,
) -> AttentionParams {
    let custom = |mode, mask: &Tensor, start| (mode, mask.address() as u64, mask.extent(0), start);
    let (mask_mode, mask, mask_bytes, mask_start) = match &args.mask {
        // Items are a mask of bits by now.
        Mask::Causal | Mask::Items { .. } => (MaskMode::Causal, 0, 0, 0),
        Mask::Full | Mask::CausalByRequest(_) => (MaskMode::Full, 0, 0, 0),
        Mask::Bytes(mask) => custom(MaskMode::Bytes, mask, starts.bytes),
        Mask::Bits(mask) => custom(MaskMode::Bits, mask, starts.bits),
    };
    let mask_start = args
        .custom_mask_indptr
        .map_or(mask_start, |indptr| indptr.address() as u64);
    let causal_requests = match args.mask {
        Mask::CausalByRequest(causal) => address(Some(causal)),
        _ => 0,
    };
    let [k_scales, v_scales] =
        [args.k_scales, args.v_scales].map(|scales| desc.kv_format.head_scales(scales));
    let side = |side: Option<u32>| side.and_then(|n| i32::try_from(n).ok()).unwrap_or(-1);
    AttentionParams {
        plan,
        q: Rows::of(&args.q),
        o: Rows::of(&args.o),
        k: Cache::of(&args.k),
        v: Cache::of(&args.v),
        lse: address(args.lse),
        lse_stride_token: args.lse.map_or(0, |lse| lse.stride(0)),
        lse_stride_head: args.lse.map_or(0, |lse| lse.stride(1)),
        sinks: address(args.sinks),
        alibi_slopes: address(args.alibi_slopes),
        k_scales: address(k_scales),
        v_scales: address(v_scales),
        mask,
        mask_start,
        mm_prefix_ranges: address(args.mm_prefix_ranges),
        logits_scale: args.logits_scale(),
        v_scale: args.v_scale,
        o_scale: args.o_scale,
        logits_soft_cap: args.logits_soft_cap,
        window_left: side(args.window.left),
        window_right: side(args.window.right),
        mask_mode,
        flags: run_flags(args) | scales_flags(k_scales, v_scales),
        k_scales_stride: scales_stride(k_scales),
        v_scales_stride: scales_stride(v_scales),
        num_qo_heads: desc.num_qo_heads,
        num_kv_heads: desc.num_kv_heads,
        page_size: desc.kv.page_size(),
        num_mm_prefix_ranges: args.mm_prefix_ranges.map_or(0, |r| r.extent(1) as u32),
        num_tokens: fewest(
            [&args.q, &args.o]
                .into_iter()
                .chain(&args.q_rope)
                .chain(&args.lse),
        ),
        num_pages: fewest([&args.k, &args.v].into_iter().chain(&args.k_rope)),
        mask_bytes,
        section_bytes: section_bytes(l2_bytes),
        k_rope_page_groups: 0,
        causal_requests,
        alibi_request_stride: args.alibi_slopes.map_or(0, |slopes| match slopes.rank() {
            1 => 0,
            _ => slopes.extent(1) as u32,
        }),
        chunk_size: args.chunks.map_or(0, |chunks| chunks.size.get()),
        chunk_look_back: args.chunks.map_or(0, |chunks| chunks.look_back),
        reserved: 0,
    }
}

fn run_flags(args: &AttentionArgs) -> u32 {
    let when = |stated: bool, flag| if stated { flag } else { 0 };
    let columns = match args.mask_columns {
        MaskColumns::Keys => 0,
        MaskColumns::KeysAfterPrefix => MASK_SKIP_PREFIX,
        MaskColumns::NewKeys => MASK_NEW_KEYS,
    };
    let queries = match args.q.dtype() {
        DType::F8E4M3 => QUERIES_E4M3,
        DType::F8E5M2 => QUERIES_E5M2,
        _ => 0,
    };
    lse_flag(args.lse_base)
        | queries
        | when(args.alibi_sqrt, ALIBI_SQRT)
        | columns
        | when(args.mm_prefix_in_window, MM_PREFIX_IN_WINDOW)
}

/// Which of the scales each request has of its own.
fn scales_flags(k_scales: Option<Tensor>, v_scales: Option<Tensor>) -> u32 {
    let flag = |scales: Option<Tensor>, flag| match scales.as_ref().is_some_and(are_of_requests) {
        true => flag,
        false => 0,
    };
    flag(k_scales, K_SCALES_OF_REQUESTS) | flag(v_scales, V_SCALES_OF_REQUESTS)
}

/// Two thirds of the L2: the rest is for queries and outputs. (40 of the 60 MiB that an H200 states.)
fn section_bytes(l2_bytes: u32) -> u32 {
    l2_bytes / 3 * 2
}
