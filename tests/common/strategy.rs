//! Random problems: small, and often at an edge. They shrink to plain ones.

use super::problem::*;
use folio::dtype::DType;
use folio::problem::{CacheForm, Kind, KvLayout, LogBase, MaskColumns};
use proptest::prelude::*;

/// Any problem that the contract covers.
pub fn problems() -> impl Strategy<Value = Problem> {
    problems_within(BUDGET)
}

/// The same with at most so many multiplications in the oracle.
pub fn problems_within(budget: u64) -> impl Strategy<Value = Problem> {
    let shape = (types(), heads(), splits(), storages(), requests(), memory());
    (shape, layers(), any::<[bool; 6]>(), any::<u64>()).prop_map(
        move |((types, heads, split, storage, requests, memory), layer, flags, seed)| {
            let (q_dtype, kv_dtype, o_dtype) = types;
            let (num_kv_heads, group_size, head_dim_qk, head_dim_vo) = heads;
            let decode = flags[0] && storage != Storage::Ragged;
            let mut problem = Problem {
                kind: if decode { Kind::Decode } else { Kind::Prefill },
                q_dtype,
                kv_dtype,
                form: CacheForm::Plain,
                o_dtype,
                num_kv_heads,
                group_size,
                head_dim_qk,
                head_dim_vo,
                split_keys: split
                    .filter(|_| !decode)
                    .and_then(|split| split_of(split, head_dim_qk)),
                storage,
                requests,
                uniform_rows: flags[1],
                wide_indices: flags[5],
                memory,
                layer,
                batch_invariant: flags[2],
                fp8_products: false,
                graph: flags[3],
                slack: flags[4],
                new_kv: None,
                rounds_rows: false,
                cache_exponent: 0,
                query_exponents: [0; 2],
                values: ValueRows::Normal,
                seed,
            };
            // Only an fp8 output has a scale.
            if !o_dtype.is_fp8() {
                problem.layer.o_scale = 0.0;
            }
            within_budget(problem, budget)
        },
    )
}

/// The same with what only hosts compute without being asked for it at create: items.
pub fn host_problems() -> impl Strategy<Value = Problem> {
    (problems(), prop::bool::weighted(0.15)).prop_map(|(mut problem, items)| {
        if items {
            let layer = &mut problem.layer;
            layer.mask = MaskKind::Items;
            layer.mask_columns = MaskColumns::Keys;
            layer.masks_apart = false;
        }
        problem
    })
}

/// The contract's problems in one type.
pub fn problems_of(dtype: DType) -> impl Strategy<Value = Problem> {
    problems().prop_map(move |problem| {
        let mut problem = problem.of(dtype);
        problem.layer.o_scale = 0.0;
        problem
    })
}

/// The contract's problems over caches of other forms than rows of plain elements.
pub fn stored_problems() -> impl Strategy<Value = Problem> {
    let forms = prop::sample::select(vec![
        CacheForm::TokenHeadScales,
        CacheForm::ChannelScales,
        CacheForm::ChannelZeroPoints,
        CacheForm::Nvfp4,
        CacheForm::PackedKeys,
    ]);
    (problems(), forms, any::<u8>()).prop_map(|(mut problem, form, pick)| {
        // Queries in fp8 stand beside elements of fp8 only.
        if problem.q_dtype.is_fp8() && form != CacheForm::PackedKeys {
            (problem.q_dtype, problem.o_dtype) = (DType::BF16, DType::BF16);
            problem.layer.o_scale = 0.0;
        }
        let elements = form.elements(problem.q_dtype);
        let mut problem = problem.stored(form, elements[pick as usize % elements.len()]);
        let format = form.of(problem.kv_dtype);
        for dim in [&mut problem.head_dim_qk, &mut problem.head_dim_vo] {
            *dim = dim.next_multiple_of(format.dim_unit()).min(256);
        }
        problem.split_keys = None;
        if problem.storage == Storage::Ragged {
            problem.storage = Storage::paged(16);
        }
        if format.has_scales_beside() {
            problem.layer.k_scales = HeadScales::Absent;
            problem.layer.v_scales = HeadScales::Absent;
        }
        problem
    })
}

/// The contract's problems with the keys of the query rows beside the cache, of any form.
pub fn extends() -> impl Strategy<Value = Problem> {
    let any = prop_oneof![3 => problems().boxed(), 1 => stored_problems().boxed()];
    any.prop_map(extended)
}

/// A prefill over pages with the keys of its query rows beside the cache, in a type that the seed picks.
pub fn extended(mut problem: Problem) -> Problem {
    problem.kind = Kind::Prefill;
    problem.split_keys = None;
    // Refused: the merge takes a number.
    problem.layer.o_scales = false;
    if problem.storage == Storage::Ragged {
        problem.storage = Storage::paged(16);
    }
    for request in &mut problem.requests {
        request.kv_len = request.kv_len.max(request.qo_len);
    }
    let new_kv = match problem.seed % 5 {
        0 => DType::F8E4M3,
        1 => DType::F8E5M2,
        _ if problem.q_dtype.is_fp8() => DType::F8E4M3,
        _ => problem.q_dtype,
    };
    problem.extend(new_kv)
}

/// Multiplications that one problem may take in the oracle.
const BUDGET: u64 = 1 << 21;

/// Takes away keys, then rows, until the oracle is fast enough.
pub fn within_budget(mut problem: Problem, budget: u64) -> Problem {
    let per_pair =
        u64::from(problem.num_qo_heads()) * u64::from(problem.head_dim_qk + problem.head_dim_vo);
    let pairs = |problem: &Problem| -> u64 {
        let of = |r: &Request| u64::from(r.qo_len.max(1)) * u64::from(r.kv_len);
        problem.requests.iter().map(of).sum()
    };
    while pairs(&problem) * per_pair > budget {
        for request in &mut problem.requests {
            request.kv_len -= request.kv_len / 4;
            request.qo_len -= request.qo_len / 4;
        }
        if problem
            .requests
            .iter()
            .all(|r| r.qo_len < 4 && r.kv_len < 4)
        {
            problem.requests.pop();
        }
    }
    problem
}

fn types() -> impl Strategy<Value = (DType, DType, DType)> {
    let float = prop_oneof![Just(DType::F32), Just(DType::F16), Just(DType::BF16)];
    let other = || {
        prop_oneof![
            3 => Just(None),
            1 => Just(Some(DType::F8E4M3)),
            1 => Just(Some(DType::F8E5M2)),
        ]
    };
    let output = prop_oneof![6 => other(), 1 => Just(Some(DType::F32))];
    let plain =
        (float, other(), output).prop_map(|(q, kv, o)| (q, kv.unwrap_or(q), o.unwrap_or(q)));
    prop_oneof![8 => plain, 1 => fp8_queries()]
}

/// Types of queries in fp8, of their cache and of the output.
fn fp8_queries() -> impl Strategy<Value = (DType, DType, DType)> {
    let fp8 = || prop_oneof![3 => Just(DType::F8E4M3), 1 => Just(DType::F8E5M2)];
    let output = prop_oneof![
        3 => Just(DType::BF16),
        1 => Just(DType::F16),
        1 => Just(DType::F32),
        1 => Just(DType::F8E4M3),
    ];
    (fp8(), fp8(), output)
}

fn heads() -> impl Strategy<Value = (u32, u32, u32, u32)> {
    let head_dims = || {
        prop_oneof![
            4 => prop::sample::select(vec![8u32, 16, 32, 64, 128]),
            2 => prop::sample::select(vec![40u32, 72, 80, 96, 112, 136, 192, 256]),
            1 => (1u32..=32).prop_map(|n| 8 * n),
        ]
    };
    let groups = prop_oneof![
        3 => prop::sample::select(vec![1u32, 2, 4, 8]),
        2 => prop::sample::select(vec![3u32, 5, 6, 7, 16]),
        1 => 1u32..=16,
    ];
    let differ = prop::bool::weighted(0.3);
    (1u32..=3, groups, head_dims(), head_dims(), differ).prop_map(
        |(kv_heads, group, qk, other, differ)| {
            (kv_heads, group, qk, if differ { other } else { qk })
        },
    )
}

/// A share of the keys' elements, and the head dimension.
fn splits() -> impl Strategy<Value = Option<(u32, bool)>> {
    prop::option::weighted(0.3, (any::<u32>(), any::<bool>()))
}

/// Both parts are multiples of 8.
fn split_of((share, has_head): (u32, bool), head_dim_qk: u32) -> Option<SplitKeys> {
    let splits = head_dim_qk / 8 - 1;
    (splits > 0).then(|| SplitKeys {
        rope_dim: 8 * (1 + share % splits),
        has_head,
    })
}

fn storages() -> impl Strategy<Value = Storage> {
    let page_sizes = prop::sample::select(vec![16u32, 1, 2, 3, 5, 8, 32, 64, 128]);
    let layout = prop_oneof![Just(KvLayout::Nhd), Just(KvLayout::Hnd)];
    let form = prop_oneof![
        Just(TableForm::CsrLastPageLen),
        (0u32..3).prop_map(|spare_pages| TableForm::CsrKvLen { spare_pages }),
        (0u32..4).prop_map(|spare_columns| TableForm::BlockTable { spare_columns }),
    ];
    let shared = prop_oneof![3 => Just(0u32), 1 => 1u32..4];
    let paged = (page_sizes, layout, form, 0u32..6, shared).prop_map(
        |(page_size, layout, form, unused_pages, shared_pages)| Storage::Paged {
            page_size,
            layout,
            form,
            unused_pages,
            shared_pages,
        },
    );
    let slots = (0u32..9).prop_map(|unused_pages| Storage::Paged {
        page_size: 1,
        layout: KvLayout::Nhd,
        form: TableForm::TokenSlots,
        unused_pages,
        shared_pages: 0,
    });
    prop_oneof![6 => paged, 1 => slots, 2 => Just(Storage::Ragged)]
}

fn requests() -> impl Strategy<Value = Vec<Request>> {
    let rows = prop_oneof![5 => Just(1u32), 1 => Just(0), 3 => 2u32..9, 2 => 9u32..70];
    let keys = prop_oneof![
        1 => Just(0u32),
        1 => Just(1),
        3 => 2u32..20,
        3 => 20u32..140,
        2 => 140u32..600,
        1 => 600u32..1200,
    ];
    // One in four has as many keys as rows: a prompt without a past.
    let lens = (rows, keys, prop::bool::weighted(0.25));
    let request = (lens, any::<u64>()).prop_map(|((qo_len, kv_len, prompt), tag)| Request {
        qo_len,
        kv_len: if prompt { qo_len } else { kv_len },
        tag,
    });
    prop::collection::vec(request, 0..6)
}

fn gaps() -> impl Strategy<Value = Gaps> {
    let gap = || prop_oneof![2 => Just(0u32), 1 => Just(8), 1 => 1u32..20];
    let lead = prop_oneof![2 => Just(0u32), 1 => 1u32..8];
    (gap(), gap(), gap(), lead).prop_map(|(inner, middle, outer, lead)| Gaps {
        inner,
        middle,
        outer,
        lead,
    })
}

fn memory() -> impl Strategy<Value = MemoryShape> {
    let gapped = (
        (gaps(), gaps(), gaps(), gaps(), gaps(), gaps()),
        any::<bool>(),
        0u32..4,
    )
        .prop_map(
            |((q, k, k_rope, v, o, lse), lse_head_major, padded_rows)| MemoryShape {
                q,
                k,
                k_rope,
                v,
                o,
                lse,
                lse_head_major,
                padded_rows,
            },
        );
    prop_oneof![1 => Just(MemoryShape::default()), 2 => gapped]
}

/// Any layer; every feature is off more often than on.
pub fn layers() -> impl Strategy<Value = Layer> {
    let forms = (columns(), any::<[bool; 3]>(), chunks());
    let scores = (masks(), windows(), ranges(), alibis(), any::<bool>());
    let logits = (caps(), biases());
    (scores, forms, scales(), logits, lse()).prop_map(
        |((mask, window, mm_prefix_ranges, alibi, sinks), forms, scales, logits, lse)| {
            let (logits_soft_cap, bias) = logits;
            let (lse, lse_dtype) = lse;
            let (columns, [apart, in_window, by_request], chunks) = forms;
            let mask_columns = match mask.is_custom() {
                true => columns,
                false => MaskColumns::Keys,
            };
            let ([sm_scale, q_scale, k_scale, v_scale, o_scale], tensors, o_scales) = scales;
            let [q_scales, k_scales, v_scales] = tensors;
            Layer {
                mask,
                mask_columns,
                masks_apart: mask.is_custom() && (apart || mask_columns == MaskColumns::NewKeys),
                window,
                chunks,
                mm_prefix_ranges,
                mm_prefix_in_window: in_window && mm_prefix_ranges > 0,
                alibi,
                alibi_by_request: by_request,
                bias,
                sinks,
                sm_scale,
                q_scale,
                k_scale,
                v_scale,
                q_scales,
                k_scales,
                v_scales,
                o_scale,
                o_scales,
                logits_soft_cap,
                lse,
                lse_dtype,
                ..Layer::plain()
            }
        },
    )
}

fn masks() -> impl Strategy<Value = MaskKind> {
    let pattern = || {
        prop_oneof![
            3 => (0.02f32..1.0).prop_map(Pattern::Random),
            1 => Just(Pattern::Causal),
            1 => (0u32..128, 64u32..=256).prop_map(|(from, to)| Pattern::Range(from, to)),
            1 => Just(Pattern::Tree),
        ]
    };
    prop_oneof![
        4 => Just(MaskKind::Causal),
        2 => Just(MaskKind::Full),
        1 => Just(MaskKind::CausalByRequest),
        1 => pattern().prop_map(MaskKind::Bytes),
        1 => pattern().prop_map(MaskKind::Bits),
    ]
}

fn columns() -> impl Strategy<Value = MaskColumns> {
    prop::sample::select(vec![
        MaskColumns::Keys,
        MaskColumns::KeysAfterPrefix,
        MaskColumns::NewKeys,
    ])
}

fn chunks() -> impl Strategy<Value = Option<(u32, u32)>> {
    let size = prop_oneof![1 => Just(1u32), 2 => 2u32..40, 2 => 40u32..300];
    let look_back = prop_oneof![2 => Just(0u32), 1 => 1u32..4, 1 => Just(u32::MAX)];
    prop_oneof![4 => Just(None), 1 => (size, look_back).prop_map(Some)]
}

fn windows() -> impl Strategy<Value = Option<(i32, i32)>> {
    let side = || prop_oneof![2 => Just(-1), 1 => Just(0), 2 => 1i32..20, 2 => 20i32..200];
    prop_oneof![2 => Just(None), 2 => (side(), side()).prop_map(Some)]
}

fn ranges() -> impl Strategy<Value = u32> {
    prop_oneof![3 => Just(0u32), 1 => 1u32..4]
}

fn alibis() -> impl Strategy<Value = Option<Alibi>> {
    prop_oneof![3 => Just(None), 1 => Just(Some(Alibi::Linear)), 1 => Just(Some(Alibi::Sqrt))]
}

fn biases() -> impl Strategy<Value = Option<Bias>> {
    let dtypes = prop::sample::select(vec![DType::F32, DType::F16, DType::BF16]);
    let heads = prop::sample::select(vec![BiasHeads::Absent, BiasHeads::One, BiasHeads::Each]);
    let bias = (dtypes, heads, any::<[bool; 3]>(), 0u32..4).prop_map(
        |(dtype, heads, [request_rows, new_keys, transposed], spare)| Bias {
            dtype,
            heads,
            request_rows,
            new_keys,
            transposed,
            spare,
            reach: None,
        },
    );
    prop_oneof![4 => Just(None), 1 => bias.prop_map(Some)]
}

fn scales() -> impl Strategy<Value = ([f32; 5], [HeadScales; 3], bool)> {
    let factor = || prop_oneof![3 => Just(0.0f32), 1 => 0.25f32..1.5];
    let per_head = || {
        prop_oneof![
            4 => Just(HeadScales::Absent),
            1 => Just(HeadScales::One),
            1 => Just(HeadScales::PerHead),
            1 => Just(HeadScales::PerRequest),
        ]
    };
    // sm_scale may be negative: nothing in the contract forbids it.
    let sm_scale = prop_oneof![4 => Just(0.0f32), 2 => 0.02f32..0.5, 1 => -0.3f32..-0.02];
    let o_scale = prop_oneof![1 => Just(0.0f32), 3 => 0.002f32..0.5];
    let factors = (sm_scale, factor(), factor(), factor(), o_scale);
    let tensors = [per_head(), per_head(), per_head()];
    (factors, tensors, prop::bool::weighted(0.3))
        .prop_map(|((a, b, c, d, e), tensors, o)| ([a, b, c, d, e], tensors, o))
}

fn caps() -> impl Strategy<Value = f32> {
    prop_oneof![3 => Just(0.0f32), 1 => Just(30.0), 1 => 0.5f32..60.0]
}

fn lse() -> impl Strategy<Value = (Option<LogBase>, DType)> {
    let base =
        prop_oneof![2 => Just(Some(LogBase::E)), 1 => Just(Some(LogBase::Two)), 1 => Just(None)];
    let dtype = prop_oneof![2 => Just(DType::F32), 1 => Just(DType::F16), 1 => Just(DType::BF16)];
    (base, dtype)
}
