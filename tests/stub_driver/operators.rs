//! What append and the merges are launched with, and what they do with extents that no kernel counts.

use folio::api::{Context, append, merge, merge_states};
use folio::cuda::params::{AppendParams, AppendTensor, MergeStatesParams};
use folio::dtype::DType;
use folio::error::{Error, Result};
use folio::problem::{AppendArgs, CacheForm, KvLayout, LogBase, MergeArgs, MergeStatesArgs};
use folio::tensor::Tensor;

use crate::fixture::{OURS, at, context, divides};
use crate::stub::{Launched, Recorder};

const KEY: usize = 0x1_0000_0000;
const VALUE: usize = 0x2_0000_0000;
const K_CACHE: usize = 0x3_0000_0000;
const V_CACHE: usize = 0x4_0000_0000;
const SLOTS: usize = 0x5_0000_0000;
const SCALES: usize = 0x6_0000_0000;
const OUT: usize = 0x7_0000_0000;
const LSE: usize = 0x8_0000_0000;
const MASK: usize = 0x9_0000_0000;

fn recorder() -> Recorder {
    let recorder = Recorder::new();
    recorder.expect::<AppendParams>("folio_append");
    recorder.expect::<MergeStatesParams>("folio_merge_state");
    recorder.expect::<MergeStatesParams>("folio_merge_states");
    recorder
}

/// The launches of `body`.
fn launches(recorder: &Recorder, body: impl FnOnce() -> Result<()>) -> Vec<Launched> {
    recorder.forget();
    body().unwrap();
    recorder.launches()
}

/// Three tokens of two heads of 128 and 64 elements, to an fp8 cache of 10 pages of 24 tokens.
fn tokens() -> AppendArgs {
    AppendArgs {
        key: at(KEY, DType::BF16, &[4, 2, 128], Some(&[512, 128, 1])),
        value: at(VALUE, DType::BF16, &[3, 2, 64], None),
        k_cache: at(K_CACHE, DType::F8E4M3, &[10, 24, 2, 128], None),
        v_cache: at(V_CACHE, DType::F8E4M3, &[10, 24, 2, 64], None),
        slot_mapping: at(SLOTS, DType::I64, &[3], None),
        layout: KvLayout::Nhd,
        kv_dtype: None,
        form: CacheForm::Plain,
        k_zero_points: None,
        v_zero_points: None,
        k_scale: 0.5,
        v_scale: 2.0,
        k_scales: Some(at(SCALES, DType::F32, &[2], None)),
        v_scales: Some(at(SCALES, DType::F32, &[1], None)),
    }
}

fn assert_side(
    side: &AppendTensor,
    addresses: [usize; 2],
    source: [i64; 2],
    cache: [i64; 3],
    dim: u32,
) {
    let [from, to] = addresses.map(|address| address as u64);
    assert_eq!((side.source.data, side.cache.data), (from, to));
    assert_eq!([side.source.stride_token, side.source.stride_head], source);
    let strides = [
        side.cache.stride_page,
        side.cache.stride_token,
        side.cache.stride_head,
    ];
    assert_eq!(strides, cache);
    assert_eq!((side.head_dim, side.scales), (dim, SCALES as u64));
}

pub fn append_moves_vectors_or_elements() {
    let recorder = recorder();
    let context = context();
    let by_element = AppendArgs {
        key: at(KEY + 2, DType::BF16, &[4, 2, 128], Some(&[512, 128, 1])),
        slot_mapping: at(SLOTS, DType::I32, &[3], None),
        ..tokens()
    };
    for (args, key, slot_bytes, vectors) in [(tokens(), KEY, 8, 1), (by_element, KEY + 2, 4, 0)] {
        let launched = launches(&recorder, || append(&context, &args, OURS));
        assert_eq!(launched.len(), 1);
        assert_eq!(launched[0].name(), "folio_append");
        assert_eq!(
            (launched[0].grid, launched[0].block),
            ([3, 1, 1], [128, 1, 1])
        );
        let params: AppendParams = launched[0].params();
        assert_side(
            &params.k,
            [key, K_CACHE],
            [512, 128],
            [24 * 256, 256, 128],
            128,
        );
        assert_side(
            &params.v,
            [VALUE, V_CACHE],
            [128, 64],
            [24 * 128, 128, 64],
            64,
        );
        assert_eq!((params.k.scale, params.v.scale), (0.5, 2.0));
        // A scale for each head, and one for all.
        assert_eq!((params.k.scales_stride, params.v.scales_stride), (1, 0));
        let in_piece = if vectors == 1 { 8 } else { 1 };
        assert_eq!(params.k.pieces.divisor, 128 / in_piece);
        assert_eq!(divides(999, params.v.pieces), 999 / (64 / in_piece));
        assert_eq!(
            (params.slots, params.slot_bytes),
            (SLOTS as u64, slot_bytes)
        );
        assert_eq!((params.num_tokens, params.num_slots), (3, 240));
        assert_eq!((params.num_kv_heads, params.vectors), (2, vectors));
        assert_eq!(params.page_size.divisor, 24);
        assert_eq!(divides(1000, params.page_size), 1000 / 24);
    }
}

/// Where there is one token, how far the next would be does not matter.
pub fn append_of_one_token_moves_vectors() {
    let recorder = recorder();
    let args = AppendArgs {
        key: at(KEY, DType::BF16, &[1, 2, 128], Some(&[131, 128, 1])),
        slot_mapping: at(SLOTS, DType::I64, &[1], None),
        ..tokens()
    };
    let launched = launches(&recorder, || append(&context(), &args, OURS));
    assert_eq!(launched[0].params::<AppendParams>().vectors, 1);
}

/// A head without elements has nothing to read or write, whatever the other side has.
pub fn append_of_no_keys() {
    let recorder = recorder();
    let args = AppendArgs {
        key: at(KEY, DType::BF16, &[3, 2, 0], None),
        k_cache: at(K_CACHE, DType::F8E4M3, &[10, 24, 2, 0], None),
        ..tokens()
    };
    let launched = launches(&recorder, || append(&context(), &args, OURS));
    let params: AppendParams = launched[0].params();
    assert_eq!((params.k.head_dim, params.k.pieces.divisor), (0, 0));
    assert_eq!((params.v.head_dim, params.v.pieces.divisor), (64, 64));
}

/// All slots lie past an empty cache, whatever the size of its pages.
pub fn append_to_an_empty_cache() {
    let recorder = recorder();
    let context = context();
    let pages_of = |pages, page_size| {
        let cache = |address, dim| {
            let shape = [pages, page_size, 2, dim];
            at(address, DType::F8E4M3, &shape, None)
        };
        AppendArgs {
            k_cache: cache(K_CACHE, 128),
            v_cache: cache(V_CACHE, 64),
            ..tokens()
        }
    };
    let most = i64::from(i32::MAX);
    let launched = launches(&recorder, || append(&context, &pages_of(0, most), OURS));
    let params: AppendParams = launched[0].params();
    assert_eq!(
        (params.num_slots, params.page_size.divisor),
        (0, most as u32)
    );
    for (pages, page_size) in [(0, 1 << 32), (1, 1 << 32), (1, (1 << 32) + 24)] {
        let refused = append(&context, &pages_of(pages, page_size), OURS);
        assert_refused(refused, &format!("k_cache: shape [{pages}, {page_size}"));
    }
    // The context is as good as before.
    let launched = launches(&recorder, || append(&context, &tokens(), OURS));
    assert_eq!(launched.len(), 1);
}

/// Every extent is a count, and their product is not.
pub fn tokens_with_more_elements_than_a_kernel_counts() {
    let context = context();
    let wide = |address, dtype, outer: &[i64]| {
        let shape = [outer, &[1 << 20, 1 << 12]].concat();
        at(address, dtype, &shape, None)
    };
    let args = AppendArgs {
        key: wide(KEY, DType::BF16, &[1]),
        value: wide(VALUE, DType::BF16, &[1]),
        k_cache: wide(K_CACHE, DType::BF16, &[1, 1]),
        v_cache: wide(V_CACHE, DType::BF16, &[1, 1]),
        slot_mapping: at(SLOTS, DType::I64, &[1], None),
        k_scale: 0.0,
        v_scale: 0.0,
        k_scales: None,
        v_scales: None,
        ..tokens()
    };
    assert_refused(append(&context, &args, OURS), "key: 4294967296 elements");
    let rows = |address| at(address, DType::BF16, &[1 << 16, 1 << 16, 8], None);
    let lse = |address| at(address, DType::F32, &[1 << 16, 1 << 16], None);
    let args = MergeArgs {
        v_a: rows(KEY),
        s_a: lse(LSE),
        v_b: rows(KEY),
        s_b: lse(LSE),
        v_out: rows(OUT),
        s_out: None,
        mask: None,
        lse_base: LogBase::E,
        num_tokens_without_a: 0,
        o_scale: 0.0,
    };
    assert_refused(merge(&context, &args, OURS), "v_out: 4294967296 rows");
}

fn assert_refused(result: Result<()>, part: &str) {
    assert!(
        matches!(&result, Err(Error::Unsupported(m) | Error::Shape(m)) if m.contains(part)),
        "{part}: {result:?}"
    );
}

fn state(address: usize, dim: i64) -> Tensor {
    at(
        address,
        DType::BF16,
        &[5, 6, dim],
        Some(&[6 * dim + 8, dim, 1]),
    )
}

fn lse(address: usize) -> Tensor {
    at(address, DType::F32, &[5, 6], Some(&[7, 1]))
}

fn two(dim: i64) -> MergeArgs {
    MergeArgs {
        v_a: state(KEY, dim),
        s_a: lse(LSE),
        v_b: at(VALUE, DType::BF16, &[5, 6, dim], None),
        s_b: lse(LSE + 0x1000),
        v_out: state(OUT, dim),
        s_out: Some(lse(LSE + 0x2000)),
        mask: Some(at(MASK, DType::U8, &[5], None)),
        lse_base: LogBase::Two,
        num_tokens_without_a: 0,
        o_scale: 0.0,
    }
}

pub fn merge_of_two_states() {
    let recorder = recorder();
    let context = context();
    // 128 elements are 16 lanes of a vector each, so 128 threads take 8 of 30 rows; 20 elements are 20
    // lanes of one each, rounded up to a warp, for any row.
    for (dim, name, vectors, log2_lanes, blocks) in [
        (128, "folio_merge_state", 1, 4, 4),
        (20, "folio_merge_states", 0, 5, 8),
    ] {
        let launched = launches(&recorder, || merge(&context, &two(dim), OURS));
        assert_eq!(launched.len(), 1);
        let launch = &launched[0];
        assert_eq!(launch.name(), name);
        assert_eq!((launch.grid, launch.block), ([blocks, 1, 1], [128, 1, 1]));
        let params: MergeStatesParams = launch.params();
        let (a, b) = (params.first, params.second);
        assert_eq!((a.v, a.s), (KEY as u64, LSE as u64));
        assert_eq!((a.v_stride_token, a.v_stride_head), (6 * dim + 8, dim));
        assert_eq!((a.s_stride_token, a.s_stride_head), (7, 1));
        assert_eq!((b.v, b.s), (VALUE as u64, LSE as u64 + 0x1000));
        assert_eq!((b.v_stride_token, b.v_stride_head), (6 * dim, dim));
        let out = params.v_out;
        assert_eq!((out.data, out.stride_token), (OUT as u64, 6 * dim + 8));
        assert_eq!(out.stride_head, dim);
        assert_eq!(params.s_out, LSE as u64 + 0x2000);
        assert_eq!(
            (params.s_out_stride_token, params.s_out_stride_head),
            (7, 1)
        );
        assert_eq!((params.mask, params.mask_stride), (MASK as u64, 1));
        assert_eq!((params.num_tokens, params.num_heads.divisor), (5, 6));
        assert_eq!((params.num_states, params.head_dim), (2, dim as u32));
        assert_eq!((params.flags, params.vectors), (1, vectors));
        assert_eq!(params.log2_lanes, log2_lanes);
    }
}

/// `n` states of 4 tokens and 2 heads of 64 elements.
fn many(n: i64) -> MergeStatesArgs {
    MergeStatesArgs {
        v: at(KEY, DType::F16, &[4, n, 2, 64], Some(&[9000, 128, 64, 1])),
        s: at(LSE, DType::F32, &[4, n, 2], Some(&[400, 2, 1])),
        v_out: at(OUT, DType::F16, &[4, 2, 64], None),
        s_out: None,
        lse_base: LogBase::E,
        o_scale: 0.0,
    }
}

pub fn merge_of_many_states() {
    let recorder = recorder();
    let context = context();
    for (n, name) in [(2, "folio_merge_state"), (7, "folio_merge_states")] {
        let launched = launches(&recorder, || merge_states(&context, &many(n), OURS));
        assert_eq!(launched[0].name(), name);
        let params: MergeStatesParams = launched[0].params();
        let first = params.first;
        assert_eq!((first.v, first.s), (KEY as u64, LSE as u64));
        assert_eq!(
            [
                first.v_stride_token,
                first.v_stride_state,
                first.v_stride_head
            ],
            [9000, 128, 64]
        );
        assert_eq!(
            [
                first.s_stride_token,
                first.s_stride_state,
                first.s_stride_head
            ],
            [400, 2, 1]
        );
        // Two states are told apart from one tensor of many: the second starts a stride later, in bytes.
        let second = match n {
            2 => (KEY as u64 + 2 * 128, LSE as u64 + 4 * 2),
            _ => (0, 0),
        };
        assert_eq!((params.second.v, params.second.s), second);
        assert_eq!((params.num_states, params.flags), (n as u32, 0));
        let absent = [params.s_out, params.mask];
        assert_eq!(absent, [0; 2]);
        assert_eq!((params.mask_stride, params.s_out_stride_token), (0, 0));
    }
}

/// 2^32 and two states, one and the same at a stride of 0, are not two.
pub fn more_states_than_a_kernel_counts() {
    let context: Context = context();
    let args = MergeStatesArgs {
        v: at(
            KEY,
            DType::F16,
            &[4, (1 << 32) + 2, 2, 64],
            Some(&[128, 0, 64, 1]),
        ),
        s: at(LSE, DType::F32, &[4, (1 << 32) + 2, 2], Some(&[2, 0, 1])),
        ..many(2)
    };
    assert_refused(
        merge_states(&context, &args, OURS),
        "v: shape [4, 4294967298",
    );
}
