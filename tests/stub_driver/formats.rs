//! What operators and attention over caches in other forms than rows of plain elements are launched with.

use folio::api::{Attention, Cascade, append, gather, rope_append};
use folio::cuda::stored_params::{
    StoredAppendParams, StoredAttentionParams, StoredDecodeParams, StoredFormat,
    StoredGatherParams, StoredRopeAppendParams,
};
use folio::dtype::DType;
use folio::error::{Error, Result};
use folio::problem::{
    AppendArgs, AttentionArgs, AttentionDesc, CacheForm, GatherArgs, GatheredRequests, Kind,
    KvLayout, Norm, RecordPages, RopeAppendArgs,
};
use folio::tensor::Tensor;

use crate::fixture::{
    CAPTURED, DIM, Handle, OURS, PAGE_SIZE, SOMEWHERE, at, context, desc, divides,
};
use crate::stub::Recorder;

const KEY: usize = 0x1_0000_0000;
const VALUE: usize = 0x2_0000_0000;
const K: usize = 0x3_0000_0000;
const V: usize = 0x4_0000_0000;
const K_SCALES: usize = 0x5_0000_0000;
const V_SCALES: usize = 0x6_0000_0000;
const K_ZEROS: usize = 0x7_0000_0000;
const V_ZEROS: usize = 0x8_0000_0000;
const SLOTS: usize = 0x9_0000_0000;

const FORMS: [CacheForm; 5] = [
    CacheForm::TokenHeadScales,
    CacheForm::ChannelScales,
    CacheForm::ChannelZeroPoints,
    CacheForm::Nvfp4,
    CacheForm::PackedKeys,
];

/// Ten pages of 16 tokens of eight heads of 128 elements, HND.
fn cache(form: CacheForm, is_key: bool) -> Tensor {
    let element = form.elements(DType::BF16)[0];
    let address = if is_key { K } else { V };
    let shape: &[i64] = match (form, is_key) {
        (CacheForm::PackedKeys, true) => &[10, 8, 16, 16, 8],
        (CacheForm::PackedKeys, false) => &[10, 8, 128, 16],
        _ => &[10, 8, 16, 128 / i64::from(element.lanes())],
    };
    at(address, element, shape, None)
}

fn scales(form: CacheForm, address: usize) -> Option<Tensor> {
    let tensor = |dtype, shape: &[i64]| Some(at(address, dtype, shape, None));
    match form {
        CacheForm::Plain | CacheForm::PackedKeys => None,
        CacheForm::TokenHeadScales => tensor(DType::F32, &[10, 16, 8]),
        CacheForm::Nvfp4 => tensor(DType::F8E4M3, &[10, 8, 16, 8]),
        _ => tensor(DType::F32, &[8, 128]),
    }
}

fn zeros(form: CacheForm, address: usize) -> Option<Tensor> {
    (form == CacheForm::ChannelZeroPoints).then(|| at(address, DType::F32, &[8, 128], None))
}

fn tokens(form: CacheForm) -> AppendArgs {
    AppendArgs {
        key: at(KEY, DType::BF16, &[3, 8, 128], None),
        value: at(VALUE, DType::BF16, &[3, 8, 128], None),
        k_cache: cache(form, true),
        v_cache: cache(form, false),
        layout: KvLayout::Hnd,
        form,
        kv_dtype: None,
        slot_mapping: at(SLOTS, DType::I32, &[3], None),
        k_scale: 0.0,
        v_scale: 0.0,
        k_scales: scales(form, K_SCALES),
        v_scales: scales(form, V_SCALES),
        k_zero_points: zeros(form, K_ZEROS),
        v_zero_points: zeros(form, V_ZEROS),
    }
}

fn format(form: CacheForm) -> StoredFormat {
    let (form, element) = match form {
        CacheForm::Plain => (0, 2),
        CacheForm::TokenHeadScales => (1, 5),
        CacheForm::ChannelScales => (2, 5),
        CacheForm::ChannelZeroPoints => (3, 6),
        CacheForm::Nvfp4 => (4, 7),
        CacheForm::PackedKeys => (5, 2),
    };
    StoredFormat { form, element }
}

pub fn appends() {
    let recorder = Recorder::new();
    recorder.expect::<StoredAppendParams>("folio_append_stored");
    let context = context();
    for form in FORMS {
        recorder.forget();
        append(&context, &tokens(form), OURS).unwrap();
        let launched = recorder.launches();
        assert_eq!(launched.len(), 1);
        assert_eq!(
            (launched[0].grid, launched[0].block),
            ([3, 1, 1], [128, 1, 1])
        );
        let p: StoredAppendParams = launched[0].params();
        assert_eq!(p.cache.format, format(form));
        let (k, v) = (p.cache.k, p.cache.v);
        assert_eq!((k.cache.data, v.cache.data), (K as u64, V as u64));
        assert_eq!((p.key.data, p.value.data), (KEY as u64, VALUE as u64));
        assert_eq!((k.head_dim, k.scale), (128, 1.0));
        let strides = [
            k.cache.stride_page,
            k.cache.stride_token,
            k.cache.stride_head,
        ];
        let scales = [k.scales_page, k.scales_token, k.scales_head];
        let (wanted, wanted_scales) = match form {
            CacheForm::TokenHeadScales => ([16384, 128, 2048], [128, 8, 1]),
            CacheForm::ChannelScales => ([16384, 128, 2048], [0, 0, 128]),
            CacheForm::ChannelZeroPoints => ([8192, 64, 1024], [0, 0, 128]),
            CacheForm::Nvfp4 => ([8192, 64, 1024], [1024, 8, 128]),
            _ => ([16384, 8, 2048], [0, 0, 0]),
        };
        assert_eq!((strides, scales), (wanted, wanted_scales), "{form:?}");
        let is_packed = form == CacheForm::PackedKeys;
        let parts = [(k.part_stride, k.log2_part), (v.part_stride, v.log2_part)];
        match is_packed {
            true => assert_eq!(parts, [(128, 3), (16, 0)]),
            false => assert_eq!(parts, [(0, 31), (0, 31)]),
        }
        // Eight elements of a packed value are not neighbours.
        assert_eq!((k.vectors, v.vectors), (1, u32::from(!is_packed)));
        let with_zeros = form == CacheForm::ChannelZeroPoints;
        assert_eq!(
            (k.zero_points, k.zero_points_head),
            match with_zeros {
                true => (K_ZEROS as u64, 128),
                false => (0, 0),
            }
        );
        assert_eq!((p.num_slots, p.num_kv_heads, p.slot_bytes), (160, 8, 4));
        assert_eq!((p.row_dtype, p.row_vectors, p.log2_lanes), (2, 1, 4));
        assert_eq!(divides(159, p.page_size), 9);
    }
}

/// Rows of queries are four, of which three are tokens; the parts of the launch are those of a plain one and of an append.
pub fn rope_appends() {
    let recorder = Recorder::new();
    recorder.expect::<StoredRopeAppendParams>("folio_rope_append_stored");
    let context = context();
    for form in FORMS {
        let args = RopeAppendArgs {
            append: tokens(form),
            key_out: None,
            q: Some(at(SOMEWHERE, DType::BF16, &[4, 9, 128], None)),
            q_out: None,
            norm: Norm {
                q_weight: None,
                k_weight: None,
                eps: 0.0,
            },
            rope: None,
        };
        recorder.forget();
        let captured = rope_append(&context, &args, CAPTURED);
        assert_eq!(captured.is_ok(), form != FORMS[0], "{form:?}");
        recorder.forget();
        rope_append(&context, &args, OURS).unwrap();
        let launched = recorder.launches();
        assert_eq!(launched.len(), 1);
        assert_eq!(
            (launched[0].grid, launched[0].block),
            ([4, 1, 1], [128, 1, 1])
        );
        let p: StoredRopeAppendParams = launched[0].params();
        assert_eq!(p.cache.format, format(form));
        let (k, v) = (p.cache.k, p.cache.v);
        assert_eq!((k.cache.data, v.cache.data), (K as u64, V as u64));
        let wanted = scales(form, V_SCALES).map_or(0, |_| V_SCALES as u64);
        assert_eq!((v.scales, v.head_dim), (wanted, 128));
        let wanted = zeros(form, K_ZEROS).map_or(0, |_| K_ZEROS as u64);
        assert_eq!(k.zero_points, wanted);
        assert_eq!((p.row_dtype, p.value_vectors), (2, 1));
        let (q, append) = (p.rope.q, p.rope.append);
        assert_eq!(
            (q.data, p.rope.q_out.data),
            (SOMEWHERE as u64, SOMEWHERE as u64)
        );
        assert_eq!((p.rope.num_q_rows, p.rope.num_q_heads), (4, 9));
        let sources = (append.k.source.data, append.v.source.data);
        assert_eq!(sources, (KEY as u64, VALUE as u64));
        assert_eq!((append.num_tokens, append.num_slots), (3, 160));
        assert_eq!((append.slots, append.slot_bytes), (SLOTS as u64, 4));
        assert_eq!(divides(159, append.page_size), 9);
        // What moves the rows of a cache is a matter of its own parameters.
        assert_eq!((p.rope.vectors, p.rope.log2_lanes), (1, 3));
    }
    // A block of NVFP4 has two lanes, also where a row has no more than a block.
    let short = |address| at(address, DType::BF16, &[3, 8, 16], None);
    let cache = |address| at(address, DType::F4E2M1x2, &[10, 8, 16, 8], None);
    let scales = |address| Some(at(address, DType::F8E4M3, &[10, 8, 16, 1], None));
    let args = RopeAppendArgs {
        append: AppendArgs {
            key: short(KEY + 2),
            value: short(VALUE),
            k_cache: cache(K),
            v_cache: cache(V),
            k_scales: scales(K_SCALES),
            v_scales: scales(V_SCALES),
            ..tokens(CacheForm::Nvfp4)
        },
        key_out: None,
        q: None,
        q_out: None,
        norm: Norm {
            q_weight: None,
            k_weight: None,
            eps: 0.0,
        },
        rope: None,
    };
    recorder.forget();
    rope_append(&context, &args, OURS).unwrap();
    let p: StoredRopeAppendParams = recorder.launches()[0].params();
    assert_eq!(
        (p.rope.log2_lanes, p.rope.vectors, p.value_vectors),
        (1, 0, 1)
    );
}

/// Heads of one scale each, and rows at any address.
pub fn appends_of_odd_rows() {
    let recorder = Recorder::new();
    recorder.expect::<StoredAppendParams>("folio_append_stored");
    let element = DType::F8E4M3;
    let args = AppendArgs {
        key: at(KEY + 2, DType::BF16, &[3, 8, 128], None),
        k_cache: at(K, element, &[10, 8, 8, 16, 16], None),
        v_cache: at(V, element, &[10, 8, 128, 16], None),
        k_scales: Some(at(K_SCALES, DType::F32, &[8], None)),
        v_scales: Some(at(V_SCALES, DType::F32, &[1], None)),
        k_scale: 0.5,
        ..tokens(CacheForm::PackedKeys)
    };
    append(&context(), &args, OURS).unwrap();
    let p: StoredAppendParams = recorder.launches()[0].params();
    let (k, v) = (p.cache.k, p.cache.v);
    assert_eq!((k.scales_head, v.scales_head), (1, 0));
    assert_eq!((k.scale, v.scale, p.row_vectors), (0.5, 1.0, 0));
    assert_eq!((k.part_stride, k.log2_part, k.vectors), (256, 4, 1));
}

pub fn gathers() {
    let recorder = Recorder::new();
    recorder.expect::<StoredGatherParams>("folio_gather_stored");
    let context = context();
    for form in FORMS {
        let append = tokens(form);
        let args = GatherArgs {
            key: at(KEY, DType::F16, &[9, 8, 128], None),
            value: at(VALUE, DType::F16, &[9, 8, 128], None),
            k_cache: append.k_cache,
            v_cache: append.v_cache,
            layout: append.layout,
            form,
            kv_dtype: None,
            requests: GatheredRequests {
                cu_seq_lens: at(SLOTS, DType::I32, &[3], None),
                seq_starts: None,
                pages: RecordPages::Table(at(SOMEWHERE, DType::I32, &[2, 5], None)),
            },
            k_scale: 0.0,
            v_scale: 0.0,
            k_scales: append.k_scales,
            v_scales: append.v_scales,
            k_zero_points: append.k_zero_points,
            v_zero_points: append.v_zero_points,
        };
        // Rows of the type of a packed cache, which are copied.
        let args = match form {
            CacheForm::PackedKeys => GatherArgs {
                key: at(KEY, DType::BF16, &[9, 8, 128], None),
                value: at(VALUE, DType::BF16, &[9, 8, 128], None),
                ..args
            },
            _ => args,
        };
        recorder.forget();
        gather(&context, &args, OURS).unwrap();
        let launched = recorder.launches();
        // Of 9 rows a warp takes those of keys or of values of one of eight heads.
        assert_eq!((launched.len(), launched[0].grid), (1, [4, 1, 1]));
        let p: StoredGatherParams = launched[0].params();
        assert_eq!(p.cache.format, format(form));
        assert_eq!(
            (p.cache.k.cache.data, p.gather.k.rows.data),
            (K as u64, KEY as u64)
        );
        assert_eq!((p.gather.vectors, p.gather.num_rows), (1, 9));
    }
}

/// The caches of a form, in pages of the fixture's desc.
fn attention_args(form: CacheForm, k: Tensor) -> AttentionArgs {
    let q = |address| at(address, DType::BF16, &[2, 8, DIM.into()], None);
    AttentionArgs {
        k_scales: scales(form, K_SCALES),
        v_scales: scales(form, V_SCALES),
        k_zero_points: zeros(form, K_ZEROS),
        v_zero_points: zeros(form, V_ZEROS),
        ..AttentionArgs::new(q(KEY), k, cache(form, false), q(VALUE))
    }
}

fn desc_of(form: CacheForm) -> AttentionDesc {
    AttentionDesc {
        kv_format: form.of(form.elements(DType::BF16)[0]),
        kv: folio::problem::KvStorage::Paged {
            page_size: PAGE_SIZE,
            layout: KvLayout::Hnd,
        },
        ..desc(false)
    }
}

/// Of the form that Hopper's decode kernel does not take, the portable kernel is the first choice, without scales of heads.
pub fn attention() {
    let recorder = Recorder::new();
    recorder.expect::<StoredAttentionParams>("folio_attention_stored");
    let form = CacheForm::PackedKeys;
    let mut handle = Handle::of(&context(), desc_of(form)).unwrap();
    assert_eq!(
        handle.attention.kernel(),
        "decode_sm80_bf16_kvu8_d128_q16_stored"
    );
    handle.plan_host(40, OURS).unwrap();
    recorder.forget();
    let args = attention_args(form, cache(form, true));
    handle.attention.run(&args, OURS).unwrap();
    let p: StoredAttentionParams = recorder.launches()[0].params();
    assert_eq!(p.cache.format, format(form));
    let attention = p.generic.attention;
    assert_eq!((attention.k_scales, attention.v_scales), (0, 0));
    assert_eq!((p.cache.k.scales, p.copied_ahead), (0, 1));
}

/// Scales of blocks that are aligned to their bytes come with the decode kernel; others are the portable kernel's.
pub fn scales_of_blocks() {
    let recorder = Recorder::new();
    recorder.expect::<StoredAttentionParams>("folio_attention_stored");
    recorder.expect::<StoredDecodeParams>("folio_sm90_decode_tma");
    let form = CacheForm::Nvfp4;
    let mut handle = Handle::of(&context(), desc_of(form)).unwrap();
    handle.plan_host(40, OURS).unwrap();
    for (bytes, name) in [
        (8, "folio_sm90_decode_tma"),
        (4, "folio_attention_stored"),
        (1, "folio_attention_stored"),
    ] {
        recorder.forget();
        let args = AttentionArgs {
            v_scales: scales(form, V_SCALES + bytes),
            ..attention_args(form, cache(form, true))
        };
        handle.attention.run(&args, OURS).unwrap();
        let launched = &recorder.launches()[0];
        assert_eq!(launched.name(), name);
        let of_values = match name {
            "folio_sm90_decode_tma" => launched.params::<StoredDecodeParams>().cache.v.scales,
            _ => launched.params::<StoredAttentionParams>().cache.v.scales,
        };
        assert_eq!(of_values, (V_SCALES + bytes) as u64);
    }
}

/// Scales and zero points of the form come with Hopper's decode kernel, and maps of the bytes of its rows.
pub fn decode() {
    let recorder = Recorder::new();
    recorder.expect::<StoredDecodeParams>("folio_sm90_decode_tma");
    let context = context();
    for (form, name) in [
        (CacheForm::TokenHeadScales, "i8_d128_q8_token_scales"),
        (CacheForm::ChannelScales, "i8_d128_q8_channel_scales"),
        (CacheForm::ChannelZeroPoints, "i4_d128_q8_zero_points"),
        (CacheForm::Nvfp4, "e2m1_d128_q8_block_scales"),
    ] {
        for q_dtype in [DType::BF16, DType::F16] {
            let desc = AttentionDesc {
                q_dtype,
                o_dtype: q_dtype,
                ..desc_of(form)
            };
            let mut handle = Handle::of(&context, desc).unwrap();
            assert_eq!(
                handle.attention.kernel(),
                format!("decode_sm90a_f16_kv{name}_tma")
            );
            handle.plan_host(40, OURS).unwrap();
            recorder.forget();
            let rows = |address| at(address, q_dtype, &[2, 8, DIM.into()], None);
            let args = AttentionArgs {
                q: rows(KEY),
                o: rows(VALUE),
                ..attention_args(form, cache(form, true))
            };
            handle.attention.run(&args, OURS).unwrap();
            let launched = &recorder.launches()[0];
            let p: StoredDecodeParams = launched.params();
            assert_eq!(p.cache.format, format(form));
            assert_eq!(p.decode.bf16_queries, u32::from(q_dtype == DType::BF16));
            assert_eq!(
                [p.cache.k.scales, p.cache.v.scales],
                [K_SCALES as u64, V_SCALES as u64]
            );
            let zeros = match form {
                CacheForm::ChannelZeroPoints => [K_ZEROS as u64, V_ZEROS as u64],
                _ => [0; 2],
            };
            assert_eq!([p.cache.k.zero_points, p.cache.v.zero_points], zeros);
            let attention = p.decode.attention;
            assert_eq!((attention.k_scales, attention.v_scales), (0, 0));
            assert_eq!((attention.k.data, attention.v.data), (K as u64, V as u64));
            assert_eq!((p.decode.k_page_step, p.decode.pages_by_head), (8, 1));
            // Two heads of a block, whose rows are as many bytes.
            assert_eq!(launched.grid[0], 4);
            let row_bytes = form.of(form.elements(q_dtype)[0]).row_bytes(DIM) as u64;
            for (map, address) in launched.maps().iter().zip([K, V]) {
                assert_eq!(map.address, address as u64);
                assert_eq!(map.extents, [row_bytes, 8, 2, 80, 1]);
                assert_eq!(map.boxes, [row_bytes as u32, 8, 2, 2, 1]);
            }
        }
    }
}

/// What Hopper's kernel lacks the portable one takes: rows that no copy of 8 bytes reads are read by the element.
pub fn attention_over_odd_rows() {
    let recorder = Recorder::new();
    recorder.expect::<StoredAttentionParams>("folio_attention_stored");
    recorder.expect::<StoredDecodeParams>("folio_sm90_decode_gather");
    let form = CacheForm::TokenHeadScales;
    let mut handle = Handle::of(&context(), desc_of(form)).unwrap();
    handle.plan_host(40, OURS).unwrap();
    for (bytes, name) in [
        (8, "folio_sm90_decode_gather"),
        (4, "folio_attention_stored"),
    ] {
        recorder.forget();
        let odd = at(K + bytes, DType::I8, &[10, 8, 16, 128], None);
        handle
            .attention
            .run(&attention_args(form, odd), OURS)
            .unwrap();
        let launched = &recorder.launches()[0];
        assert_eq!(launched.name(), name);
        match bytes {
            8 => assert_eq!(
                launched.params::<StoredDecodeParams>().decode.row_alignment,
                8
            ),
            _ => assert_eq!(launched.params::<StoredAttentionParams>().copied_ahead, 0),
        }
    }
    let mut handle = Handle::of(&context(), desc_of(CacheForm::PackedKeys)).unwrap();
    handle.plan_host(40, OURS).unwrap();
    recorder.forget();
    let odd = at(K + 8, DType::BF16, &[10, 8, 16, 16, 8], None);
    let args = attention_args(CacheForm::PackedKeys, odd);
    handle.attention.run(&args, OURS).unwrap();
    let p: StoredAttentionParams = recorder.launches()[0].params();
    assert_eq!(p.copied_ahead, 0);
}

/// Queries of fp32 are refused, and the refusal says with what they are not.
pub fn fp32_queries_are_refused() {
    let context = context();
    let is_refused = |result: Result<()>, form: CacheForm| {
        let message = match &result {
            Err(Error::Unsupported(message)) => message.clone(),
            _ => panic!("{result:?}"),
        };
        for part in ["kv_format", form.name(), "float32", "bfloat16 are"] {
            assert!(message.contains(part), "{message}");
        }
    };
    for form in FORMS {
        let desc = AttentionDesc {
            q_dtype: DType::F32,
            o_dtype: DType::F32,
            kv_format: form.of(form.elements(DType::F32)[0]),
            ..desc(false)
        };
        is_refused(Attention::new(&context, desc).map(drop), form);
        let shared = AttentionDesc {
            kind: Kind::Prefill,
            shared_levels: 1,
            ..desc
        };
        is_refused(Cascade::new(&context, shared).map(drop), form);
    }
}
