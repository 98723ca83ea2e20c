//! Numbers of runs and appends that are wrong: no output is touched.

use crate::common::c_door::{Tensors, c_append, dtype};
use crate::common::door::DOORS;
use crate::common::instance::{LayerData, Planned, Scratch, Step};
use crate::common::memory::HostMemory;
use crate::common::problem::Layer;
use crate::fixture::{Append, Fixture, Merge, everything, plain};
use crate::table::{INVALID, UNKNOWN, check, poke};
use folio::api::{Stream, Target};
use folio::dtype::DType;
use folio::error::Error;
use folio::ffi::*;
use folio::problem::Kind;
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
                    &|a: &mut Args| a.mask_mode = 4,
                    INVALID,
                    &["mask_mode", "4"],
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
    assert!(fixture.layer.is_untouched());
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
        let step = Step::new(&HostMemory, &problem);
        let scratch = Scratch::new(&HostMemory, &planned.handle.workspace().unwrap());
        let bytes = planned.handle.workspace().unwrap().host_bytes;
        let results = [
            planned.handle.run(&layer.input(), stream),
            (planned.handle).plan(&step.input(), &scratch.workspace(), (0, bytes), stream),
            session.append(&append.input(), stream),
            session.merge(&merge.two(), stream),
            session.merge_states(&merge.many(), stream),
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
    }
}
