//! Numbers of runs and appends that are wrong: no output is touched.

use crate::common::c_door::{Tensors, c_absorb_weights, c_append, c_up_project, dtype};
use crate::common::door::DOORS;
use crate::common::instance::{LayerData, Planned, Scratch, Step};
use crate::common::memory::{HostMemory, Image, Resident};
use crate::common::problem::{Layer, MaskKind, Pattern};
use crate::fixture::{Append, Fixture, Merge, Projections, Reply, everything, plain};
use crate::table::{INVALID, UNKNOWN, check, poke};
use folio::api::{Stream, Target};
use folio::dtype::DType;
use folio::error::Error;
use folio::ffi::*;
use folio::problem::{Kind, Mask, MaskColumns};
use std::ptr::null;

#[test]
fn arguments_of_a_run() {
    type Args = folio_attention_args;
    let (nan, inf) = (f32::NAN, f32::INFINITY);
    for kind in [Kind::Decode, Kind::Prefill] {
        let fixture = Fixture::new(&everything(kind));
        let tensors = Tensors::default();
        let call = |args: &Args| {
            fixture.layer.reset_outputs();
            let reply = fixture.run(args);
            assert!(reply.status == FOLIO_OK || fixture.layer.is_untouched());
            reply
        };
        check(
            &fixture.args(&tensors),
            call,
            &[
                (&|a: &mut Args| a.reserved = 1, UNKNOWN, &["reserved", "1"]),
                (
                    &|a: &mut Args| a.sm_scale = nan,
                    INVALID,
                    &["sm_scale", "NaN"],
                ),
                (
                    &|a: &mut Args| a.sm_scale = inf,
                    INVALID,
                    &["sm_scale", "inf"],
                ),
                (
                    &|a: &mut Args| a.q_scale = -inf,
                    INVALID,
                    &["q_scale", "-inf"],
                ),
                (
                    &|a: &mut Args| a.k_scale = nan,
                    INVALID,
                    &["k_scale", "NaN"],
                ),
                (
                    &|a: &mut Args| a.v_scale = inf,
                    INVALID,
                    &["v_scale", "inf"],
                ),
                (
                    &|a: &mut Args| a.o_scale = nan,
                    INVALID,
                    &["o_scale", "NaN"],
                ),
                (
                    &|a: &mut Args| a.o_scale = -2.0,
                    INVALID,
                    &["o_scale", "-2"],
                ),
                (
                    &|a: &mut Args| (a.sm_scale, a.k_scale) = (1e30, 1e30),
                    INVALID,
                    &["sm_scale"],
                ),
                (
                    &|a: &mut Args| a.logits_soft_cap = -1.0,
                    INVALID,
                    &["logits_soft_cap", "-1"],
                ),
                (
                    &|a: &mut Args| a.logits_soft_cap = nan,
                    INVALID,
                    &["logits_soft_cap", "NaN"],
                ),
                (
                    &|a: &mut Args| a.logits_soft_cap = inf,
                    INVALID,
                    &["logits_soft_cap", "inf"],
                ),
                (
                    &|a: &mut Args| a.o_scale = 1e-40,
                    INVALID,
                    &["o_scale", "1e-40", "2^-60 to 2^60"],
                ),
                (
                    &|a: &mut Args| a.v_scale = -3e38,
                    INVALID,
                    &["v_scale", "-3e38", "-2^60 to 2^60"],
                ),
                (
                    &|a: &mut Args| a.logits_soft_cap = 2.4e38,
                    INVALID,
                    &["logits_soft_cap", "2.4e38", "2^-60 to 2^60"],
                ),
                (
                    &|a: &mut Args| a.logits_soft_cap = 1e-40,
                    INVALID,
                    &["logits_soft_cap", "1e-40", "2^-60 to 2^60"],
                ),
                (
                    &|a: &mut Args| a.sm_scale = 3e38,
                    INVALID,
                    &["sm_scale", "3e38", "-2^60 to 2^60"],
                ),
                (
                    &|a: &mut Args| (a.sm_scale, a.q_scale, a.k_scale) = (-2.0, 1e9, 2e9),
                    INVALID,
                    &["sm_scale · q_scale · k_scale", "-4e18"],
                ),
                (
                    &|a: &mut Args| a.mask_mode = 5,
                    INVALID,
                    &["mask_mode", "5"],
                ),
                (
                    &|a: &mut Args| a.mask_mode = -1,
                    INVALID,
                    &["mask_mode", "-1"],
                ),
                (
                    &|a: &mut Args| a.mask_mode = FOLIO_MASK_CAUSAL,
                    INVALID,
                    &["custom_mask"],
                ),
                (
                    &|a: &mut Args| a.mask_mode = FOLIO_MASK_FULL,
                    INVALID,
                    &["custom_mask"],
                ),
                (
                    &|a: &mut Args| a.custom_mask = null(),
                    INVALID,
                    &["custom_mask", "NULL"],
                ),
                (
                    // The bits are too few for a byte each.
                    &|a: &mut Args| a.mask_mode = FOLIO_MASK_CUSTOM_BYTES,
                    FOLIO_ERR_SHAPE,
                    &["custom_mask", "40 or more"],
                ),
                (
                    &|a: &mut Args| a.causal_requests = a.custom_mask,
                    INVALID,
                    &["causal_requests", "mask_mode 3", "NULL"],
                ),
                (
                    &|a: &mut Args| {
                        a.mask_mode = FOLIO_MASK_CAUSAL_BY_REQUEST;
                        a.causal_requests = a.custom_mask;
                    },
                    INVALID,
                    &["custom_mask", "mask_mode 4"],
                ),
                (
                    &|a: &mut Args| {
                        (a.mask_mode, a.custom_mask) = (FOLIO_MASK_CAUSAL_BY_REQUEST, null());
                    },
                    INVALID,
                    &["causal_requests", "NULL", "a tensor"],
                ),
                (
                    &|a: &mut Args| a.item_positions = a.custom_mask,
                    INVALID,
                    &["item_positions", "mask_mode 3", "NULL"],
                ),
                (
                    &|a: &mut Args| {
                        (a.mask_mode, a.item_positions) = (FOLIO_MASK_ITEMS, a.custom_mask);
                    },
                    INVALID,
                    &["item_starts", "NULL", "mask_mode 5"],
                ),
                (
                    &|a: &mut Args| {
                        a.mask_mode = FOLIO_MASK_ITEMS;
                        (a.item_starts, a.item_positions) = (a.custom_mask, a.custom_mask);
                    },
                    INVALID,
                    &["custom_mask", "mask_mode 5"],
                ),
                (
                    &|a: &mut Args| a.flags |= FOLIO_RUN_MASK_NEW_KEYS,
                    INVALID,
                    &["MASK_NEW_KEYS", "custom_mask_indptr"],
                ),
                (
                    &|a: &mut Args| {
                        a.flags |= FOLIO_RUN_MASK_NEW_KEYS | FOLIO_RUN_MASK_SKIP_PREFIX;
                    },
                    INVALID,
                    &["flags", "MASK_SKIP_PREFIX", "one of them"],
                ),
                (
                    &|a: &mut Args| {
                        (a.mask_mode, a.custom_mask) = (FOLIO_MASK_CAUSAL, null());
                        a.flags |= FOLIO_RUN_MASK_SKIP_PREFIX;
                    },
                    INVALID,
                    &["MASK_SKIP_PREFIX", "custom_mask"],
                ),
                (
                    &|a: &mut Args| {
                        (a.mask_mode, a.custom_mask_indptr) = (FOLIO_MASK_FULL, a.custom_mask);
                        a.custom_mask = null();
                    },
                    INVALID,
                    &["custom_mask_indptr", "custom_mask"],
                ),
                (
                    &|a: &mut Args| {
                        a.mm_prefix_ranges = null();
                        a.flags |= FOLIO_RUN_MM_PREFIX_IN_WINDOW;
                    },
                    INVALID,
                    &["MM_PREFIX_IN_WINDOW", "mm_prefix_ranges"],
                ),
                (
                    &|a: &mut Args| {
                        a.score_bias = null();
                        a.flags |= FOLIO_RUN_BIAS_NEW_KEYS;
                    },
                    INVALID,
                    &["BIAS_NEW_KEYS", "score_bias"],
                ),
                (
                    &|a: &mut Args| {
                        a.score_bias = null();
                        a.flags |= FOLIO_RUN_BIAS_REQUEST_ROWS;
                    },
                    INVALID,
                    &["BIAS_REQUEST_ROWS", "score_bias"],
                ),
                (
                    &|a: &mut Args| a.attention_chunk_look_back = 2,
                    INVALID,
                    &["attention_chunk_look_back", "2", "attention_chunk_size"],
                ),
                (
                    &|a: &mut Args| a.window_left = -2,
                    INVALID,
                    &["window_left", "-2"],
                ),
                (
                    &|a: &mut Args| a.window_right = i32::MIN,
                    INVALID,
                    &["window_right", "-2147483648"],
                ),
                (
                    &|a: &mut Args| a.flags &= !FOLIO_RUN_WINDOW,
                    INVALID,
                    &["window_left", "5"],
                ),
                (
                    &|a: &mut Args| a.alibi_slopes = null(),
                    INVALID,
                    &["ALIBI_SQRT", "alibi_slopes"],
                ),
            ],
        );
    }
    let mut unscaled = plain(Kind::Prefill);
    unscaled.layer = Layer::plain();
    let fixture = Fixture::new(&unscaled);
    let reply = fixture.run_as(|args, _| args.o_scale = 0.5);
    reply.assert("o_scale", INVALID, &["o_scale", "0.5", "float32"]);
    let reply = fixture.run_as(|args, _| args.o_scales = args.q);
    reply.assert("o_scales", INVALID, &["o_scales", "float32"]);
    assert!(fixture.layer.is_untouched());
}

/// Masks of requests that would lie outside of custom_mask, where the host knows.
#[test]
fn custom_masks_lie_within_their_tensor() {
    for (mask, columns) in [
        (MaskKind::Bytes(Pattern::Causal), MaskColumns::Keys),
        (
            MaskKind::Bits(Pattern::Causal),
            MaskColumns::KeysAfterPrefix,
        ),
        (MaskKind::Bytes(Pattern::Causal), MaskColumns::NewKeys),
    ] {
        let mut problem = plain(Kind::Prefill);
        problem.layer = Layer {
            mask,
            mask_columns: columns,
            masks_apart: true,
            ..Layer::plain()
        };
        let fixture = Fixture::new(&problem);
        fixture.run_as(|_, _| {}).assert_ok("as stated");
        let (Mask::Bytes(bytes) | Mask::Bits(bytes)) = fixture.layer.input().mask else {
            panic!("a custom mask")
        };
        for wrong in [-1, bytes.extent(0), i64::MAX, i64::MIN] {
            fixture.layer.reset_outputs();
            let starts = Image::of_bits(DType::I64, &[4], [wrong as u64, 0, 0, 0]);
            let starts = Resident::new(&HostMemory, starts);
            let reply = fixture.run_as(|args, tensors| {
                args.custom_mask_indptr = tensors.of(starts.tensor());
            });
            let words = ["custom_mask_indptr", &format!("{wrong} of request 0")];
            reply.assert("starts", INVALID, &words);
            assert!(fixture.layer.is_untouched());
        }
    }
}

#[test]
fn arguments_of_an_append() {
    type Args = folio_kv_append_args;
    let nan = f32::NAN;
    let unknown = folio_dtype {
        code: 77,
        bits: 8,
        lanes: 1,
    };
    let fp8 = Append::new(DType::F8E4M3);
    let tensors = Tensors::default();
    check(
        &c_append(&fp8.input(), &tensors),
        |args| fp8.call(args),
        &[
            (
                &|a: &mut Args| a.k_scale = nan,
                INVALID,
                &["k_scale", "NaN"],
            ),
            (
                &|a: &mut Args| a.v_scale = f32::INFINITY,
                INVALID,
                &["v_scale", "inf"],
            ),
            (
                &|a: &mut Args| a.k_scale = 1e-45,
                INVALID,
                &["k_scale", "inf"],
            ),
            (
                &|a: &mut Args| a.kv_layout = 3,
                INVALID,
                &["kv_layout", "3"],
            ),
            (
                &|a: &mut Args| a.kv_dtype = unknown,
                FOLIO_ERR_DTYPE,
                &["kv_dtype", "77"],
            ),
            (
                &|a: &mut Args| a.kv_dtype = dtype(DType::F8E5M2),
                FOLIO_ERR_DTYPE,
                &["k_cache"],
            ),
        ],
    );
    let plain = Append::new(DType::F16);
    let scales = c_append(&fp8.input(), &tensors).k_scales;
    check(
        &c_append(&plain.input(), &tensors),
        |args| plain.call(args),
        &[
            (
                &|a: &mut Args| a.k_scale = 0.5,
                INVALID,
                &["k_scale", "0.5", "float16"],
            ),
            (
                &|a: &mut Args| a.v_scale = 2.0,
                INVALID,
                &["v_scale", "2", "float16"],
            ),
            (
                &|a: &mut Args| a.k_scales = scales,
                INVALID,
                &["k_scales", "float16"],
            ),
            (
                &|a: &mut Args| a.v_scales = scales,
                INVALID,
                &["v_scales", "float16"],
            ),
        ],
    );
    let other = Append::new(DType::F32);
    let reply = other.call(&c_append(&other.input(), &tensors));
    reply.assert(
        "fp16 keys for an fp32 cache",
        FOLIO_ERR_DTYPE,
        &["k_cache", "float32"],
    );
    assert!(other.is_untouched());
}

#[test]
fn slots_beyond_the_cache() {
    for slot in [12, i32::MAX] {
        let append = Append::new(DType::F16);
        let tensors = Tensors::default();
        let args = c_append(&append.input(), &tensors);
        poke(args.slot_mapping, 2, slot);
        let words = ["slot_mapping[2]", &slot.to_string(), "12"];
        append.call(&args).assert("slot", INVALID, &words);
        assert!(
            append.is_untouched(),
            "no token was written, not even the good ones"
        );
    }
}

/// The CPU has no streams; one that is given is not silently dropped.
#[test]
fn a_stream_on_the_cpu() {
    let problem = plain(Kind::Decode);
    let stream = Stream(0x88);
    for door in DOORS {
        let session = door.open(Target::Cpu { num_threads: 1 }).unwrap();
        let handle = session.attention(problem.desc()).unwrap();
        let mut planned = Planned::new(handle, &HostMemory, &HostMemory, &problem).unwrap();
        let layer = LayerData::new(&HostMemory, &problem);
        let (append, merge) = (Append::new(DType::F16), Merge::new());
        let projections = Projections::new();
        let step = Step::new(&HostMemory, &problem);
        let scratch = Scratch::new(&HostMemory, &planned.handle.workspace().unwrap());
        let bytes = planned.handle.workspace().unwrap().host_bytes;
        let results = [
            planned.handle.run(&layer.input(), stream),
            (planned.handle).plan(&step.input(), &scratch.workspace(), (0, bytes), stream),
            session.append(&append.input(), stream),
            session.merge(&merge.two(), stream),
            session.merge_states(&merge.many(), stream),
            session.merge_varlen(&merge.varlen(), stream),
            session.absorb_weights(&projections.weights(), stream),
            session.absorb_q(&projections.absorb(), stream),
            session.project_o(&projections.project(), stream),
            session.up_project(&projections.up_project(), stream),
        ];
        for (n, result) in results.into_iter().enumerate() {
            let Err(Error::DeviceMismatch(message)) = result else {
                panic!("call {n}: {result:?}");
            };
            assert!(
                message.contains("stream") && message.contains("0x88"),
                "{message}"
            );
        }
        assert!(layer.is_untouched() && append.is_untouched() && merge.is_untouched());
        assert!(projections.is_untouched());
    }
}

/// A half of the up-projection, or a product, may be left out, but not both, and a product not by half.
#[test]
fn projections_of_nothing_are_refused() {
    let projections = Projections::new();
    let tensors = Tensors::default();
    let weights = c_absorb_weights(&projections.weights(), &tensors);
    let nothing = folio_mla_absorb_weights_args {
        w_uk: null(),
        w_uv: null(),
        ..weights
    };
    let refused = |reply: Reply, words: &[&str]| {
        reply.assert("left out", FOLIO_ERR_INVALID_ARGUMENT, words);
        assert!(projections.is_untouched());
    };
    refused(
        projections.call_weights(&nothing),
        &["w_uk", "w_uv", "NULL"],
    );
    let up_project = c_up_project(&projections.up_project(), &tensors);
    let nothing = folio_mla_up_project_args {
        w_uk: null(),
        w_uv: null(),
        k_nope: null(),
        v: null(),
        ..up_project
    };
    refused(
        projections.call_up_project(&nothing),
        &["k_nope", "v", "NULL"],
    );
    let mut spoilt = up_project;
    spoilt.w_uk = null();
    refused(
        projections.call_up_project(&spoilt),
        &["w_uk", "k_nope", "NULL"],
    );
    spoilt = up_project;
    spoilt.v = null();
    refused(projections.call_up_project(&spoilt), &["v", "w_uv", "NULL"]);
}

/// One half alone says nothing about the other's rows, but they cannot be fewer than none.
#[test]
fn halves_that_do_not_fit_the_up_projection_are_refused() {
    let projections = Projections::new();
    for (w_uk, w_uv) in [(true, true), (true, false), (false, true)] {
        let tensors = Tensors::default();
        let mut args = c_absorb_weights(&projections.weights(), &tensors);
        args.w_uk = if w_uk { args.w_uk } else { null() };
        args.w_uv = if w_uv { args.w_uv } else { null() };
        // SAFETY: the shape of the test's own tensor.
        unsafe { *(*args.kv_b_proj).shape = 2 * 8 };
        let reply = projections.call_weights(&args);
        reply.assert("16 rows", FOLIO_ERR_SHAPE, &["kv_b_proj", "16 rows"]);
        assert!(projections.is_untouched());
    }
}
