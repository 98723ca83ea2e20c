//! What an append with norm and RoPE is launched with.

use folio::api::rope_append;
use folio::cuda::rope_append_params::RopeAppendParams;
use folio::dtype::DType;
use folio::error::Error;
use folio::problem::{
    Angles, AppendArgs, CacheForm, Frequencies, KvLayout, Llama3Scaling, Norm, Rope, RopeAppendArgs,
};

use crate::fixture::{CAPTURED, OURS, at, context, divides};
use crate::stub::Recorder;

const Q: usize = 0x1_0000_0000;
const KEY: usize = Q + 8 * 128 * 2;
const VALUE: usize = KEY + 2 * 128 * 2;
const K_CACHE: usize = 0x2_0000_0000;
const V_CACHE: usize = 0x3_0000_0000;
const SLOTS: usize = 0x4_0000_0000;
const TABLE: usize = 0x5_0000_0000;
const POSITIONS: usize = 0x6_0000_0000;
const OFFSETS: usize = 0x7_0000_0000;
const OUT: usize = 0x8_0000_0000;
const WEIGHT: usize = 0x9_0000_0000;

/// Elements from token to token of a fused projection: 8 heads of queries and 2 of keys and values.
const FUSED: i64 = 12 * 128;

fn recorder() -> Recorder {
    let recorder = Recorder::new();
    for kernel in ["folio_rope_append", "folio_rope_append_loose"] {
        recorder.expect::<RopeAppendParams>(kernel);
    }
    recorder
}

/// Three bf16 tokens of which two are cached, in an fp8 cache of ten HND pages of 24 tokens.
fn tokens() -> RopeAppendArgs {
    let part = |address, heads| {
        at(
            address,
            DType::BF16,
            &[3, heads, 128],
            Some(&[FUSED, 128, 1]),
        )
    };
    RopeAppendArgs {
        append: AppendArgs {
            key: part(KEY, 2),
            value: part(VALUE, 2),
            k_cache: at(K_CACHE, DType::U8, &[10, 2, 24, 128], None),
            v_cache: at(V_CACHE, DType::U8, &[10, 2, 24, 128], None),
            layout: KvLayout::Hnd,
            kv_dtype: Some(DType::F8E4M3),
            form: CacheForm::Plain,
            k_zero_points: None,
            v_zero_points: None,
            slot_mapping: at(SLOTS, DType::I64, &[2], None),
            k_scale: 0.5,
            v_scale: 2.0,
            k_scales: None,
            v_scales: None,
        },
        key_out: None,
        q: Some(part(Q, 8)),
        q_out: None,
        norm: Norm {
            q_weight: Some(at(WEIGHT, DType::F32, &[128], None)),
            k_weight: Some(at(WEIGHT + 512, DType::BF16, &[128], None)),
            eps: 1e-6,
        },
        rope: Some(Rope {
            positions: at(POSITIONS, DType::I64, &[3], None),
            position_offsets: Some(at(OFFSETS, DType::I32, &[3], None)),
            angles: Angles::Table(at(TABLE, DType::F32, &[1000, 64], None)),
            rotary_dim: 0,
            is_interleaved: true,
        }),
    }
}

/// Queries, keys and values in one launch, by vectors where all of them are aligned.
pub fn launch() {
    let recorder = recorder();
    let context = context();
    let refused = rope_append(&context, &tokens(), CAPTURED);
    assert!(matches!(&refused, Err(Error::Capture(_))), "{refused:?}");
    let skew = RopeAppendArgs {
        q_out: Some(at(OUT + 2, DType::BF16, &[3, 8, 128], None)),
        ..tokens()
    };
    for (args, kernel, q_out, vectors) in [
        (tokens(), "folio_rope_append", Q, 1),
        (skew, "folio_rope_append_loose", OUT + 2, 0),
    ] {
        recorder.forget();
        rope_append(&context, &args, OURS).unwrap();
        let launched = recorder.launches();
        assert_eq!((launched.len(), launched[0].name()), (1, kernel));
        // Of each of three tokens one warp has queries, one keys and one values.
        assert_eq!(
            (launched[0].grid, launched[0].block),
            ([3, 1, 1], [128, 1, 1])
        );
        let p: RopeAppendParams = launched[0].params();
        assert_eq!((p.log2_lanes, p.units_of_token.divisor), (3, 3));
        assert_eq!(
            (p.q.data, p.q.stride_token, p.q.stride_head),
            (Q as u64, FUSED, 128)
        );
        assert_eq!((p.q_out.data, p.key_out.data), (q_out as u64, 0));
        let (k, v) = (&p.append.k, &p.append.v);
        assert_eq!((k.source.data, v.source.data), (KEY as u64, VALUE as u64));
        assert_eq!((k.source.stride_token, k.source.stride_head), (FUSED, 128));
        assert_eq!(
            (k.cache.data, v.cache.data),
            (K_CACHE as u64, V_CACHE as u64)
        );
        let strides = [
            k.cache.stride_page,
            k.cache.stride_token,
            k.cache.stride_head,
        ];
        assert_eq!(strides, [2 * 24 * 128, 128, 24 * 128]);
        assert_eq!(
            (k.scale, v.scale, k.head_dim, v.pieces.divisor),
            (0.5, 2.0, 128, 16)
        );
        assert_eq!((p.append.slots, p.append.slot_bytes), (SLOTS as u64, 8));
        assert_eq!((p.append.num_tokens, p.append.num_slots), (2, 240));
        assert_eq!(divides(1000, p.append.page_size), 1000 / 24);
        assert_eq!(
            (p.num_q_rows, p.num_q_heads, p.append.num_kv_heads),
            (3, 8, 2)
        );
        assert_eq!((p.cos, p.sin), (TABLE as u64, TABLE as u64 + 32 * 4));
        assert_eq!(
            (p.cos_sin_stride, p.max_position, p.cos_sin_dtype),
            (64, 1000, 0)
        );
        assert_eq!((p.positions, p.position_bytes), (POSITIONS as u64, 8));
        assert_eq!((p.offsets, p.offset_bytes), (OFFSETS as u64, 4));
        assert_eq!(
            (p.rotary_dim, p.is_interleaved, p.vectors),
            (64, 1, vectors)
        );
        assert_eq!((p.q_weight, p.q_weight_dtype), (WEIGHT as u64, 0));
        assert_eq!((p.k_weight, p.k_weight_dtype), (WEIGHT as u64 + 512, 2));
        assert_eq!(p.rms_norm_eps, 1e-6);
        assert!(p.turns.iter().all(|turns| *turns == 0));
    }
    recorder.forget();
    rope_append(&context, &tokens(), CAPTURED).unwrap();
    assert_eq!(recorder.launches().len(), 1);
}

/// Frequencies travel with the parameters, and tables in two planes are two tables.
pub fn angles() {
    let recorder = recorder();
    let context = context();
    let with = |angles| RopeAppendArgs {
        rope: Some(Rope {
            angles,
            position_offsets: None,
            ..tokens().rope.unwrap()
        }),
        ..tokens()
    };
    let frequencies = Frequencies {
        theta: 5e5,
        scale: 8.0,
        llama3: Some(Llama3Scaling {
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            old_context_len: 8192,
        }),
    };
    rope_append(&context, &with(Angles::Computed(frequencies)), OURS).unwrap();
    let p: RopeAppendParams = recorder.launches()[0].params();
    assert_eq!((p.cos, p.sin, p.offsets, p.rotary_dim), (0, 0, 0, 128));
    let turns = p.turns.map(|turns| turns as f64 / 2f64.powi(64));
    let turn = |frequency: f64| frequency / std::f64::consts::TAU;
    // The first pair turns fast and stays, the last is slow and is divided.
    assert!((turns[0] - turn(1.0)).abs() < 1e-16);
    assert!((turns[63] - turn(5e5f64.powf(-63.0 / 64.0) / 8.0)).abs() < 1e-18);
    assert!(turns[64..].iter().all(|turns| *turns == 0.0));
    recorder.forget();
    let planes = at(TABLE, DType::BF16, &[2, 1000, 64], Some(&[128_000, 128, 1]));
    rope_append(&context, &with(Angles::Table(planes)), OURS).unwrap();
    let p: RopeAppendParams = recorder.launches()[0].params();
    assert_eq!((p.cos, p.sin), (TABLE as u64, TABLE as u64 + 256_000));
    assert_eq!(
        (p.cos_sin_stride, p.max_position, p.cos_sin_dtype),
        (128, 1000, 2)
    );
}

/// Warps for all units of a token, and for as many whole tokens as multiprocessors have room for.
pub fn grids() {
    let recorder = recorder();
    let context = context();
    // Four CTAs of four warps on each of 132 multiprocessors.
    for (tokens, heads, units, grid) in [
        (1i64, 32i64, 6u32, 2),
        (351, 32, 6, 527),
        (660, 32, 6, 528),
        (300, 64, 10, 528),
        (8192, 128, 18, 527),
        (5, 16384, 2050, 513),
    ] {
        let rows = |address, heads| at(address, DType::BF16, &[tokens, heads, 128], None);
        let args = RopeAppendArgs {
            append: AppendArgs {
                key: rows(KEY, 8),
                value: rows(VALUE, 8),
                k_cache: at(K_CACHE, DType::BF16, &[10, 24, 8, 128], None),
                v_cache: at(V_CACHE, DType::BF16, &[10, 24, 8, 128], None),
                layout: KvLayout::Nhd,
                kv_dtype: None,
                form: CacheForm::Plain,
                k_zero_points: None,
                v_zero_points: None,
                k_scale: 0.0,
                v_scale: 0.0,
                ..self::tokens().append
            },
            q: Some(rows(Q, heads)),
            rope: None,
            ..self::tokens()
        };
        recorder.forget();
        let args = RopeAppendArgs {
            append: AppendArgs {
                slot_mapping: at(SLOTS, DType::I64, &[tokens], None),
                ..args.append
            },
            ..args
        };
        rope_append(&context, &args, OURS).unwrap();
        let launched = recorder.launches();
        assert_eq!(launched[0].grid, [grid, 1, 1]);
        let p: RopeAppendParams = launched[0].params();
        assert_eq!(p.units_of_token.divisor, units);
        assert_eq!((p.rotary_dim, p.positions, p.cos), (0, 0, 0));
    }
}

/// No token is no launch, and rows that need more threads than a warp has are refused.
pub fn edges() {
    let recorder = recorder();
    let context = context();
    let none = RopeAppendArgs {
        append: AppendArgs {
            slot_mapping: at(SLOTS, DType::I64, &[0], None),
            ..tokens().append
        },
        q: None,
        norm: Norm {
            q_weight: None,
            ..tokens().norm
        },
        ..tokens()
    };
    rope_append(&context, &none, OURS).unwrap();
    assert!(recorder.launches().is_empty());
    let long = |address| at(address, DType::BF16, &[3, 2, 512], None);
    let wide = RopeAppendArgs {
        append: AppendArgs {
            key: long(KEY),
            k_cache: at(K_CACHE, DType::U8, &[10, 2, 24, 512], None),
            ..tokens().append
        },
        q: None,
        norm: Norm {
            q_weight: None,
            k_weight: None,
            eps: 0.0,
        },
        rope: Some(Rope {
            angles: Angles::Computed(Frequencies {
                theta: 1e4,
                scale: 1.0,
                llama3: None,
            }),
            rotary_dim: 8,
            ..tokens().rope.unwrap()
        }),
        ..tokens()
    };
    let refused = rope_append(&context, &wide, OURS);
    let Err(Error::Unsupported(message)) = refused else {
        panic!("{refused:?}");
    };
    assert!(
        message.contains("rotary_dim: 8 of rows of 512"),
        "{message}"
    );
}
