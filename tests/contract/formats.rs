//! Caches of other forms than rows of plain elements with callers who err.

use crate::common::c_door::{
    Tensors, c_append, c_args, c_cascade_desc, c_decode_desc, c_gather, c_prefill_desc,
    c_rope_append,
};
use crate::common::memory::{HostMemory, Image, Resident, View};
use crate::common::problem::{Problem, Storage};
use crate::fixture::{Context, Fixture, Reply, plain};
use crate::table::{INVALID, UNKNOWN, UNSUPPORTED, check};
use crate::tensors::Dim::{AtLeast, Exact, Free};
use crate::tensors::{Field, any_strides, field, input, output, walk};
use folio::dtype::DType;
use folio::ffi::*;
use folio::problem::{
    AppendArgs, CacheForm, GatherArgs, GatheredRequests, Kind, KvLayout, Norm, RecordPages,
    RopeAppendArgs,
};
use std::ptr::{null, null_mut};

/// The plain problem over a cache of a form.
fn stored(kind: Kind, form: CacheForm) -> Problem {
    let problem = plain(kind);
    let element = form.elements(problem.q_dtype)[0];
    problem.stored(form, element)
}

const FORMS: [CacheForm; 5] = [
    CacheForm::TokenHeadScales,
    CacheForm::ChannelScales,
    CacheForm::ChannelZeroPoints,
    CacheForm::Nvfp4,
    CacheForm::PackedKeys,
];

fn dtype(dtype: DType) -> folio_dtype {
    crate::common::c_door::dtype(dtype)
}

#[test]
fn descs() {
    let context = Context::cpu();
    type Desc = folio_decode_desc;
    let create = |desc: &Desc| {
        let mut decode = null_mut();
        // SAFETY: live structs; the handle is destroyed at once.
        let reply =
            Reply::of(|err| unsafe { folio_decode_create(context.0, desc, &mut decode, err) });
        assert_eq!(decode.is_null(), reply.status != FOLIO_OK);
        // SAFETY: NULL or new.
        unsafe { folio_decode_destroy(decode) };
        reply
    };
    for form in FORMS {
        let desc = c_decode_desc(&stored(Kind::Decode, form).desc());
        check(
            &desc,
            create,
            &[
                (
                    &|d: &mut Desc| d.kv_format = 6,
                    INVALID,
                    &["kv_format", "6"],
                ),
                (
                    &|d: &mut Desc| d.kv_format = -1,
                    INVALID,
                    &["kv_format", "-1"],
                ),
                (&|d: &mut Desc| d.reserved = 1, UNKNOWN, &["reserved", "1"]),
                (
                    &|d: &mut Desc| d.kv_dtype = dtype(DType::I32),
                    UNSUPPORTED,
                    &["kv_dtype", "int32"],
                ),
            ],
        );
        // The default is the form's own.
        let default = Desc {
            kv_dtype: folio_dtype {
                code: 0,
                bits: 0,
                lanes: 0,
            },
            ..desc
        };
        create(&default).assert_ok(form.name());
    }
    for (form, change, words) in [
        (
            CacheForm::Nvfp4,
            (|d| d.head_dim_qk = 72) as fn(&mut Desc),
            ["head_dim_qk", "72", "16"],
        ),
        (
            CacheForm::Nvfp4,
            |d| d.head_dim_vo = 8,
            ["head_dim_vo", "8", "NVFP4"],
        ),
        (
            CacheForm::PackedKeys,
            |d| (d.head_dim_qk, d.kv_dtype) = (72, dtype(DType::F8E4M3)),
            ["head_dim_qk", "72", "PACKED_KEYS"],
        ),
        (
            CacheForm::ChannelScales,
            |d| d.kv_dtype = dtype(DType::F8E4M3),
            ["kv_dtype", "float8_e4m3", "int8"],
        ),
        (
            CacheForm::TokenHeadScales,
            |d| d.kv_dtype = dtype(DType::F8E5M2),
            ["kv_dtype", "float8_e5m2", "int8 or float8_e4m3"],
        ),
        (
            CacheForm::ChannelZeroPoints,
            |d| d.kv_format = FOLIO_KV_FORMAT_PLAIN,
            ["kv_dtype", "int4_x2", "q_dtype"],
        ),
    ] {
        let mut desc = c_decode_desc(&stored(Kind::Decode, form).desc());
        change(&mut desc);
        create(&desc).assert(words[0], UNSUPPORTED, &words);
    }
}

#[test]
fn ragged_keys_and_keys_in_two_parts() {
    let context = Context::cpu();
    for form in FORMS {
        let mut problem = stored(Kind::Prefill, form);
        problem.storage = Storage::Ragged;
        let (desc, mut prefill) = (c_prefill_desc(&problem.desc()), null_mut());
        // SAFETY: live structs; a refusal makes no handle.
        let reply =
            Reply::of(|err| unsafe { folio_prefill_create(context.0, &desc, &mut prefill, err) });
        reply.assert(
            form.name(),
            UNSUPPORTED,
            &["kv_format", form.name(), "ragged"],
        );
        let fixture = Fixture::new(&stored(Kind::Prefill, form));
        let rope = Resident::new(
            &HostMemory,
            Image::poisoned(View::compact(DType::F32, &[7, 4, 8])),
        );
        let reply = fixture.run_as(|args, tensors| args.k_rope = tensors.of(rope.tensor()));
        reply.assert(form.name(), UNSUPPORTED, &["k_rope", form.name()]);
        assert!(fixture.layer.is_untouched());
    }
}

#[test]
fn cascade_descs() {
    let context = Context::cpu();
    let mut problem = stored(Kind::Prefill, CacheForm::Nvfp4);
    problem.kind = Kind::Prefill;
    let desc = folio_cascade_desc {
        max_shared_levels: 1,
        ..c_cascade_desc(&problem.desc())
    };
    type Desc = folio_cascade_desc;
    check(
        &desc,
        |desc| {
            let mut cascade = null_mut();
            // SAFETY: live structs; the handle is destroyed at once.
            let reply = Reply::of(|err| unsafe {
                folio_cascade_create(context.0, desc, &mut cascade, err)
            });
            // SAFETY: NULL or new.
            unsafe { folio_cascade_destroy(cascade) };
            reply
        },
        &[
            (
                &|d: &mut Desc| d.kv_format = 9,
                INVALID,
                &["kv_format", "9"],
            ),
            (&|d: &mut Desc| d.reserved = 2, UNKNOWN, &["reserved", "2"]),
            (
                &|d: &mut Desc| d.head_dim_vo = 24,
                UNSUPPORTED,
                &["head_dim_vo", "24"],
            ),
        ],
    );
}

/// The scales and zero points of a form, as fields of a struct.
macro_rules! beside {
    ($args:ident, $form:expr, $computed:ident) => {
        match $form {
            CacheForm::Plain | CacheForm::PackedKeys => vec![],
            CacheForm::TokenHeadScales => vec![
                any_strides(field!($computed, $args, k_scales, [AtLeast, Exact, Exact])),
                any_strides(field!($computed, $args, v_scales, [AtLeast, Exact, Exact])),
            ],
            CacheForm::ChannelScales => vec![
                field!(input, $args, k_scales, [Exact, Exact]),
                field!(input, $args, v_scales, [Exact, Exact]),
            ],
            CacheForm::ChannelZeroPoints => vec![
                field!(input, $args, k_scales, [Exact, Exact]),
                field!(input, $args, v_scales, [Exact, Exact]),
                field!(input, $args, k_zero_points, [Exact, Exact]),
                field!(input, $args, v_zero_points, [Exact, Exact]),
            ],
            CacheForm::Nvfp4 => vec![
                field!($computed, $args, k_scales, [AtLeast, Exact, Exact, Exact]),
                field!($computed, $args, v_scales, [AtLeast, Exact, Exact, Exact]),
            ],
        }
    };
}

#[test]
fn tensors_of_a_run() {
    type Args = folio_attention_args;
    for kind in [Kind::Decode, Kind::Prefill] {
        for form in FORMS {
            let fixture = Fixture::new(&stored(kind, form));
            let mut fields: Vec<Field> = beside!(Args, form, input);
            fields.extend(match form {
                CacheForm::PackedKeys => vec![
                    field!(input, Args, k, [AtLeast, Exact, Exact, Exact, Exact]),
                    any_strides(field!(input, Args, v, [AtLeast, Exact, Exact, Exact])),
                ],
                CacheForm::TokenHeadScales | CacheForm::ChannelScales => vec![
                    field!(input, Args, k, [AtLeast, Exact, Exact, Exact]),
                    field!(input, Args, v, [AtLeast, Exact, Exact, Exact]),
                ],
                _ => vec![],
            });
            walk(
                form.name(),
                &fields,
                |tensors| c_args(&fixture.layer.input(), tensors),
                |args| {
                    let reply = fixture.run(args);
                    if reply.status == FOLIO_OK {
                        fixture.layer.reset_outputs();
                    }
                    reply
                },
                || fixture.layer.is_untouched(),
            );
        }
    }
}

/// A tensor that the form does not have.
#[test]
fn zero_points_without_their_format() {
    for form in [CacheForm::Plain, CacheForm::Nvfp4, CacheForm::ChannelScales] {
        let fixture = Fixture::new(&stored(Kind::Decode, form));
        let points = Resident::new(&HostMemory, Image::of_f32(&[2, 64], &[0.0; 128]));
        let reply =
            fixture.run_as(|args, tensors| args.v_zero_points = tensors.of(points.tensor()));
        reply.assert(form.name(), INVALID, &["v_zero_points", form.name()]);
        assert!(fixture.layer.is_untouched());
    }
}

/// The tensors of an append and of a gather: four tokens of two heads of 32 elements, three pages of four tokens.
struct Cache {
    context: Context,
    form: CacheForm,
    rows: [Resident<'static>; 2],
    caches: [Resident<'static>; 2],
    scales: Option<[Resident<'static>; 2]>,
    zero_points: Option<[Resident<'static>; 2]>,
    slots: Resident<'static>,
    ends: Resident<'static>,
    table: Resident<'static>,
}

impl Cache {
    fn new(form: CacheForm) -> Cache {
        let element = form.elements(DType::F32)[0];
        let image = |dtype, shape: &[i64]| {
            Resident::new(&HostMemory, Image::poisoned(View::compact(dtype, shape)))
        };
        let both = |dtype, shape: &[i64]| [0, 1].map(|_| image(dtype, shape));
        let numbers = || {
            let numbers = Image::of_f32(&[4, 2, 32], &[0.5; 256]);
            Resident::new(&HostMemory, numbers)
        };
        let caches = match form {
            CacheForm::PackedKeys => [
                image(element, &[3, 2, 8, 4, 4]),
                image(element, &[3, 2, 32, 4]),
            ],
            _ => both(element, &[3, 4, 2, 32 / i64::from(element.lanes())]),
        };
        Cache {
            context: Context::cpu(),
            form,
            rows: [numbers(), numbers()],
            caches,
            scales: match form {
                CacheForm::Plain | CacheForm::PackedKeys => None,
                CacheForm::TokenHeadScales => Some(both(DType::F32, &[3, 4, 2])),
                CacheForm::Nvfp4 => Some(both(DType::F8E4M3, &[3, 4, 2, 2])),
                _ => Some(both(DType::F32, &[2, 32])),
            },
            zero_points: (form == CacheForm::ChannelZeroPoints).then(|| both(DType::F32, &[2, 32])),
            slots: Resident::new(&HostMemory, Image::of_bits(DType::I64, &[4], [3, 0, 11, 5])),
            ends: Resident::new(&HostMemory, Image::of_i32(&[2], &[0, 4])),
            table: Resident::new(&HostMemory, Image::of_i32(&[1, 1], &[2])),
        }
    }

    fn tensors(parts: &Option<[Resident<'static>; 2]>) -> [Option<folio::tensor::Tensor>; 2] {
        match parts {
            None => [None, None],
            Some(both) => both.each_ref().map(|part| Some(part.tensor())),
        }
    }

    fn append(&self) -> AppendArgs {
        let [k_scales, v_scales] = Cache::tensors(&self.scales);
        let [k_zero_points, v_zero_points] = Cache::tensors(&self.zero_points);
        AppendArgs {
            key: self.rows[0].tensor(),
            value: self.rows[1].tensor(),
            k_cache: self.caches[0].tensor(),
            v_cache: self.caches[1].tensor(),
            layout: KvLayout::Nhd,
            form: self.form,
            kv_dtype: None,
            slot_mapping: self.slots.tensor(),
            k_scale: 0.0,
            v_scale: 0.0,
            k_scales,
            v_scales,
            k_zero_points,
            v_zero_points,
        }
    }

    /// Without queries, norm and RoPE.
    fn rope_append(&self) -> RopeAppendArgs {
        RopeAppendArgs {
            append: self.append(),
            key_out: None,
            q: None,
            q_out: None,
            norm: Norm {
                q_weight: None,
                k_weight: None,
                eps: 0.0,
            },
            rope: None,
        }
    }

    fn gather(&self) -> GatherArgs {
        let append = self.append();
        GatherArgs {
            key: append.key,
            value: append.value,
            k_cache: append.k_cache,
            v_cache: append.v_cache,
            layout: append.layout,
            form: append.form,
            kv_dtype: None,
            requests: GatheredRequests {
                cu_seq_lens: self.ends.tensor(),
                seq_starts: None,
                pages: RecordPages::Table(self.table.tensor()),
            },
            k_scale: 0.0,
            v_scale: 0.0,
            k_scales: append.k_scales,
            v_scales: append.v_scales,
            k_zero_points: append.k_zero_points,
            v_zero_points: append.v_zero_points,
        }
    }

    /// Appends; what a call wrote is poisoned again.
    fn call_append(&self, args: *const folio_kv_append_args) -> Reply {
        // SAFETY: a live context and the caller's structs.
        let reply =
            Reply::of(|err| unsafe { folio_kv_append(self.context.0, args, null_mut(), err) });
        self.reset_after(reply)
    }

    fn call_rope_append(&self, args: *const folio_rope_append_args) -> Reply {
        // SAFETY: as above.
        let reply =
            Reply::of(|err| unsafe { folio_rope_append(self.context.0, args, null_mut(), err) });
        self.reset_after(reply)
    }

    fn call_gather(&self, args: *const folio_kv_gather_args) -> Reply {
        // SAFETY: as above.
        let reply =
            Reply::of(|err| unsafe { folio_kv_gather(self.context.0, args, null_mut(), err) });
        self.reset_after(reply)
    }

    fn reset_after(&self, reply: Reply) -> Reply {
        if reply.status == FOLIO_OK {
            self.parts().for_each(Resident::reset);
        }
        reply
    }

    fn parts(&self) -> impl Iterator<Item = &Resident<'static>> {
        let scales = self.scales.iter().flatten();
        self.rows.iter().chain(&self.caches).chain(scales)
    }

    fn is_untouched(&self) -> bool {
        self.parts().all(Resident::is_untouched)
    }
}

/// The tensors that an append writes, of a form.
macro_rules! written {
    ($args:ident, $form:expr) => {{
        let mut fields: Vec<Field> = beside!($args, $form, output);
        if $form == CacheForm::PackedKeys {
            fields.push(field!(
                output,
                $args,
                k_cache,
                [Free, Exact, Exact, Free, Exact]
            ));
            let value = field!(output, $args, v_cache, [Exact, Exact, Exact, Exact]);
            fields.push(any_strides(value));
        }
        fields
    }};
}

#[test]
fn tensors_of_an_append_and_a_gather() {
    for form in FORMS {
        let cache = Cache::new(form);
        type Append = folio_kv_append_args;
        let fields: Vec<Field> = written!(Append, form);
        walk(
            form.name(),
            &fields,
            |tensors| c_append(&cache.append(), tensors),
            |args| cache.call_append(args),
            || cache.is_untouched(),
        );
        type RopeAppend = folio_rope_append_args;
        let fields: Vec<Field> = written!(RopeAppend, form);
        walk(
            form.name(),
            &fields,
            |tensors| c_rope_append(&cache.rope_append(), tensors),
            |args| cache.call_rope_append(args),
            || cache.is_untouched(),
        );
        type Gather = folio_kv_gather_args;
        let fields: Vec<Field> = beside!(Gather, form, input);
        walk(
            form.name(),
            &fields,
            |tensors| c_gather(&cache.gather(), tensors),
            |args| cache.call_gather(args),
            || cache.is_untouched(),
        );
    }
}

#[test]
fn arguments_of_an_append_and_a_gather() {
    for form in FORMS {
        let (cache, tensors) = (Cache::new(form), Tensors::default());
        type Append = folio_kv_append_args;
        let other = dtype(DType::F8E5M2);
        let stray = cache.rows[0].tensor();
        let stray = tensors.of(stray);
        check(
            &c_append(&cache.append(), &tensors),
            |args| cache.call_append(args),
            &[
                (
                    &|a: &mut Append| a.kv_format = 6,
                    INVALID,
                    &["kv_format", "6"],
                ),
                (
                    &|a: &mut Append| a.reserved = 3,
                    UNKNOWN,
                    &["reserved", "3"],
                ),
                (
                    &|a: &mut Append| a.kv_dtype = other,
                    FOLIO_ERR_DTYPE,
                    &["k_cache", "dtype"],
                ),
                (
                    &|a: &mut Append| a.k_scale = f32::NAN,
                    INVALID,
                    &["k_scale", "NaN"],
                ),
            ],
        );
        type RopeAppend = folio_rope_append_args;
        check(
            &c_rope_append(&cache.rope_append(), &tensors),
            |args| cache.call_rope_append(args),
            &[
                (
                    &|a: &mut RopeAppend| a.kv_format = -1,
                    INVALID,
                    &["kv_format", "-1"],
                ),
                (
                    &|a: &mut RopeAppend| a.kv_dtype = other,
                    FOLIO_ERR_DTYPE,
                    &["k_cache", "dtype"],
                ),
                (
                    &|a: &mut RopeAppend| a.v_scale = f32::INFINITY,
                    INVALID,
                    &["v_scale", "inf"],
                ),
            ],
        );
        type Gather = folio_kv_gather_args;
        check(
            &c_gather(&cache.gather(), &tensors),
            |args| cache.call_gather(args),
            &[
                (
                    &|a: &mut Gather| a.kv_format = -1,
                    INVALID,
                    &["kv_format", "-1"],
                ),
                (
                    &|a: &mut Gather| a.reserved = 3,
                    UNKNOWN,
                    &["reserved", "3"],
                ),
            ],
        );
        if form != CacheForm::ChannelZeroPoints {
            let stray_points = |a: &mut Append| a.k_zero_points = stray;
            let mut args = c_append(&cache.append(), &tensors);
            stray_points(&mut args);
            let reply = cache.call_append(&args);
            reply.assert(form.name(), INVALID, &["k_zero_points", form.name()]);
        }
        let mut args = c_append(&cache.append(), &tensors);
        if args.v_scales.is_null() {
            continue;
        }
        args.v_scales = null();
        let reply = cache.call_append(&args);
        reply.assert(form.name(), INVALID, &["v_scales", "NULL", form.name()]);
        assert!(cache.is_untouched());
    }
}
