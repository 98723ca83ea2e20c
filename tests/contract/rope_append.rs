//! Norm, RoPE and append with callers who err.

use crate::common::c_door::{Tensors, c_rope_append};
use crate::common::memory::{HostMemory, Image, Resident};
use crate::fixture::{Context, Reply, floats};
use crate::structs::sizes_from;
use crate::table::{INVALID, check};
use crate::tensors::Dim::{AtLeast, Exact, Free};
use crate::tensors::{field, input, optional, output, walk};
use folio::dtype::DType;
use folio::ffi::*;
use folio::problem::{Angles, AppendArgs, CacheForm, KvLayout, Norm, Rope, RopeAppendArgs};
use std::ptr::{null, null_mut};

/// Three fp16 tokens of two KV heads of 16 elements for an fp8 cache of three pages of four tokens; four heads of
/// queries. Half of a row is rotated.
struct Call {
    context: Context,
    /// q, key, value, the weights.
    inputs: [Resident<'static>; 5],
    /// q_out, key_out, the caches.
    outputs: [Resident<'static>; 4],
    table: Resident<'static>,
    /// slot_mapping, positions, position_offsets.
    integers: [Resident<'static>; 3],
}

impl Call {
    fn new() -> Call {
        let integers = |values: [i32; 3]| Resident::new(&HostMemory, Image::of_i32(&[3], &values));
        Call {
            context: Context::cpu(),
            inputs: [
                floats(DType::F16, &[3, 4, 16]),
                floats(DType::F16, &[3, 2, 16]),
                floats(DType::F16, &[3, 2, 24]),
                floats(DType::F32, &[16]),
                floats(DType::F16, &[16]),
            ],
            outputs: [
                floats(DType::F16, &[3, 4, 16]),
                floats(DType::F16, &[3, 2, 16]),
                floats(DType::F8E4M3, &[3, 4, 2, 16]),
                floats(DType::F8E4M3, &[3, 4, 2, 24]),
            ],
            table: floats(DType::F32, &[10, 8]),
            integers: [
                integers([5, -1, 11]),
                integers([0, 8, 3]),
                integers([0, 1, 0]),
            ],
        }
    }

    fn input(&self) -> RopeAppendArgs {
        let [q, key, value, q_weight, k_weight] = self.inputs.each_ref().map(Resident::tensor);
        let [q_out, key_out, k_cache, v_cache] = self.outputs.each_ref().map(Resident::tensor);
        let [slot_mapping, positions, offsets] = self.integers.each_ref().map(Resident::tensor);
        RopeAppendArgs {
            append: AppendArgs {
                key,
                value,
                k_cache,
                v_cache,
                layout: KvLayout::Nhd,
                kv_dtype: None,
                form: CacheForm::Plain,
                k_zero_points: None,
                v_zero_points: None,
                slot_mapping,
                k_scale: 0.0,
                v_scale: 0.0,
                k_scales: None,
                v_scales: None,
            },
            key_out: Some(key_out),
            q: Some(q),
            q_out: Some(q_out),
            norm: Norm {
                q_weight: Some(q_weight),
                k_weight: Some(k_weight),
                eps: 1e-6,
            },
            rope: Some(Rope {
                positions,
                position_offsets: Some(offsets),
                angles: Angles::Table(self.table.tensor()),
                rotary_dim: 8,
                is_interleaved: true,
            }),
        }
    }

    fn call(&self, args: *const folio_rope_append_args) -> Reply {
        // SAFETY: a live context and the caller's structs.
        Reply::of(|err| unsafe { folio_rope_append(self.context.0, args, null_mut(), err) })
    }

    fn is_untouched(&self) -> bool {
        self.outputs.iter().all(Resident::is_untouched)
    }
}

type Args = folio_rope_append_args;

#[test]
fn tensors() {
    let fields = [
        field!(optional, Args, q, [AtLeast, Free, Exact]),
        field!(output, Args, q_out, [AtLeast, Exact, Exact]).or_none(),
        field!(input, Args, key, [AtLeast, Free, Free]),
        field!(output, Args, key_out, [AtLeast, Exact, Exact]).or_none(),
        field!(input, Args, value, [AtLeast, Free, Free]),
        field!(output, Args, k_cache, [Free, Free, Exact, Exact]),
        field!(output, Args, v_cache, [Exact, Exact, Exact, Exact]),
        field!(input, Args, slot_mapping, [Free]),
        field!(optional, Args, q_norm_weight, [Exact]),
        field!(optional, Args, k_norm_weight, [Exact]),
        field!(optional, Args, positions, [AtLeast]),
        field!(optional, Args, position_offsets, [AtLeast]),
        field!(optional, Args, cos_sin_cache, [Free, Exact]),
    ];
    let call = Call::new();
    walk(
        "rope_append",
        &fields,
        |tensors| c_rope_append(&call.input(), tensors),
        |args| call.call(args),
        || call.is_untouched(),
    );
}

#[test]
fn arguments() {
    let (call, tensors) = (Call::new(), Tensors::default());
    let right = c_rope_append(&call.input(), &tensors);
    check(
        &right,
        |args| call.call(args),
        &[
            (
                &|a: &mut Args| a.q = null(),
                INVALID,
                &["q_out", "without q"],
            ),
            (
                &|a: &mut Args| (a.q, a.q_out) = (null(), null()),
                INVALID,
                &["q_norm_weight", "without q"],
            ),
            (
                &|a: &mut Args| a.rms_norm_eps = 0.0,
                INVALID,
                &["rms_norm_eps", "0"],
            ),
            (
                &|a: &mut Args| a.rms_norm_eps = f32::NAN,
                INVALID,
                &["rms_norm_eps", "NaN"],
            ),
            (
                &|a: &mut Args| (a.q_norm_weight, a.k_norm_weight) = (null(), null()),
                INVALID,
                &["rms_norm_eps", "without"],
            ),
            (
                &|a: &mut Args| a.positions = null(),
                INVALID,
                &["position_offsets", "without positions"],
            ),
            (
                &|a: &mut Args| (a.positions, a.position_offsets) = (null(), null()),
                INVALID,
                &["cos_sin_cache", "without positions"],
            ),
            (
                &|a: &mut Args| a.rotary_dim = 10,
                FOLIO_ERR_SHAPE,
                &["cos_sin_cache", "10"],
            ),
            (
                &|a: &mut Args| a.rope_theta = 1e4,
                INVALID,
                &["rope_theta", "10000", "with cos_sin_cache"],
            ),
            (
                &|a: &mut Args| a.old_context_len = 9,
                INVALID,
                &["old_context_len", "9"],
            ),
            (
                &|a: &mut Args| a.k_scale = f32::INFINITY,
                INVALID,
                &["k_scale", "inf"],
            ),
            (
                &|a: &mut Args| a.kv_layout = 5,
                INVALID,
                &["kv_layout", "5"],
            ),
            (
                &|a: &mut Args| a.kv_format = 6,
                INVALID,
                &["kv_format", "6"],
            ),
            (
                &|a: &mut Args| a.v_zero_points = a.k_cache,
                INVALID,
                &["v_zero_points", "FOLIO_KV_FORMAT_PLAIN", "NULL"],
            ),
        ],
    );
}

#[test]
fn without_rope() {
    let (call, tensors) = (Call::new(), Tensors::default());
    let mut right = c_rope_append(&call.input(), &tensors);
    (right.positions, right.position_offsets) = (null(), null());
    (right.cos_sin_cache, right.rotary_dim, right.flags) = (null(), 0, 0);
    check(
        &right,
        |args| call.call(args),
        &[
            (
                &|a: &mut Args| a.rotary_dim = 8,
                INVALID,
                &["rotary_dim", "8"],
            ),
            (&|a: &mut Args| a.flags = 1, INVALID, &["flags", "1"]),
            (&|a: &mut Args| a.rope_theta = 1e4, INVALID, &["rope_theta"]),
            (
                &|a: &mut Args| a.rope_scale = 2.0,
                INVALID,
                &["rope_scale", "2"],
            ),
        ],
    );
}

#[test]
fn computed_angles() {
    let (call, tensors) = (Call::new(), Tensors::default());
    let mut right = c_rope_append(&call.input(), &tensors);
    (right.cos_sin_cache, right.rope_theta, right.rope_scale) = (null(), 5e5, 8.0);
    (right.low_freq_factor, right.high_freq_factor) = (1.0, 4.0);
    right.old_context_len = 8192;
    check(
        &right,
        |args| call.call(args),
        &[
            (
                &|a: &mut Args| a.rope_theta = 0.0,
                INVALID,
                &["rope_theta", "0"],
            ),
            (
                &|a: &mut Args| a.rope_theta = -1.0,
                INVALID,
                &["rope_theta", "-1"],
            ),
            (
                &|a: &mut Args| a.rope_scale = -2.0,
                INVALID,
                &["rope_scale", "-2"],
            ),
            (
                &|a: &mut Args| a.rope_scale = f32::NAN,
                INVALID,
                &["rope_scale", "NaN"],
            ),
            (
                &|a: &mut Args| a.low_freq_factor = 0.0,
                INVALID,
                &["low_freq_factor", "0"],
            ),
            (
                &|a: &mut Args| a.high_freq_factor = 1.0,
                INVALID,
                &["high_freq_factor", "1"],
            ),
            (
                &|a: &mut Args| a.old_context_len = 0,
                INVALID,
                &["old_context_len", "0"],
            ),
            (
                &|a: &mut Args| a.rotary_dim = 7,
                INVALID,
                &["rotary_dim", "7", "16"],
            ),
            (
                &|a: &mut Args| a.rotary_dim = 18,
                INVALID,
                &["rotary_dim", "18", "16"],
            ),
        ],
    );
}

/// A table of an odd width, and rows that are too long.
#[test]
fn shapes() {
    let (call, tensors) = (Call::new(), Tensors::default());
    let mut args = c_rope_append(&call.input(), &tensors);
    let odd = floats(DType::F32, &[10, 7]);
    (args.cos_sin_cache, args.rotary_dim) = (tensors.of(odd.tensor()), 0);
    call.call(&args)
        .assert("odd", FOLIO_ERR_SHAPE, &["cos_sin_cache", "7"]);
    let (long, cache) = (
        floats(DType::F16, &[3, 2, 520]),
        floats(DType::F8E4M3, &[3, 4, 2, 520]),
    );
    let mut args = c_rope_append(&call.input(), &tensors);
    (args.key, args.k_cache) = (tensors.of(long.tensor()), tensors.of(cache.tensor()));
    call.call(&args)
        .assert("long", FOLIO_ERR_SHAPE, &["key", "520", "512"]);
    assert!(call.is_untouched() && cache.is_untouched());
}

#[test]
fn struct_sizes() {
    let (call, tensors) = (Call::new(), Tensors::default());
    let args = c_rope_append(&call.input(), &tensors);
    // Those without zero points were built into hosts before the fields were there.
    sizes_from(
        "folio_rope_append_args",
        &args,
        176,
        FOLIO_ROPE_INTERLEAVED,
        |args| call.call(args),
    );
}

#[test]
fn nulls() {
    let refused = |reply: Reply, name: &str| reply.assert(name, INVALID, &[name, "NULL"]);
    refused(Call::new().call(null()), "folio_rope_append_args");
    // SAFETY: NULL, which every entry refuses.
    unsafe {
        let call = |err| folio_rope_append(null(), null(), null_mut(), err);
        refused(Reply::of(call), "ctx");
    }
}
