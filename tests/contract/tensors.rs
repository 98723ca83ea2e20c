//! Every tensor field of every entry, spoilt in every way that a tensor can be.

use crate::common::c_door::{
    Tensors, c_absorb_q, c_absorb_weights, c_append, c_merge, c_merge_states, c_merge_varlen,
    c_project_o, c_up_project,
};
use crate::common::problem::{
    Alibi, Bias, BiasHeads, HeadScales, Layer, MaskKind, Pattern, Problem, Storage, TableForm,
};
use crate::fixture::{Append, Fixture, Merge, Projections, Reply, everything, plain, plain_with};
use folio::dtype::DType;
use folio::ffi::*;
use folio::problem::Kind;
use std::mem::offset_of;
use std::ptr::from_ref;
use std::ptr::{null, null_mut};

/// What an extent must be.
#[derive(Clone, Copy, PartialEq)]
pub enum Dim {
    /// One more or one less is refused under the field's own name.
    Exact,
    /// One less is refused.
    AtLeast,
    /// Other fields are measured by it.
    Free,
}
use Dim::{AtLeast, Exact, Free};

/// A tensor field of a struct.
pub struct Field {
    name: &'static str,
    offset: usize,
    dims: &'static [Dim],
    required: bool,
    output: bool,
    /// Only a unit stride of the last dimension is accepted.
    unit_stride: bool,
}

impl Field {
    /// The same where it may be NULL.
    pub const fn or_none(self) -> Field {
        Field {
            required: false,
            ..self
        }
    }
}

/// A field of a struct by its name.
macro_rules! field {
    ($kind:ident, $args:ident, $field:ident, $dims:expr) => {
        $kind(
            stringify!($field),
            std::mem::offset_of!($args, $field),
            &$dims,
        )
    };
}

pub(crate) use field;

pub const fn input(name: &'static str, offset: usize, dims: &'static [Dim]) -> Field {
    Field {
        name,
        offset,
        dims,
        required: true,
        output: false,
        unit_stride: true,
    }
}

pub const fn optional(name: &'static str, offset: usize, dims: &'static [Dim]) -> Field {
    Field {
        required: false,
        ..input(name, offset, dims)
    }
}

pub const fn output(name: &'static str, offset: usize, dims: &'static [Dim]) -> Field {
    Field {
        output: true,
        ..input(name, offset, dims)
    }
}

/// An output that may be left out; its strides are free.
pub const fn optional_output(name: &'static str, offset: usize, dims: &'static [Dim]) -> Field {
    Field {
        required: false,
        ..any_strides(output(name, offset, dims))
    }
}

pub const fn any_strides(field: Field) -> Field {
    Field {
        unit_stride: false,
        ..field
    }
}

/// One way to spoil a tensor, and the answer.
struct Spoil {
    what: String,
    change: Box<dyn Fn(&mut folio_tensor)>,
    status: folio_status,
    word: String,
}

fn spoil(
    what: impl Into<String>,
    status: folio_status,
    word: impl Into<String>,
    change: impl Fn(&mut folio_tensor) + 'static,
) -> Spoil {
    Spoil {
        what: what.into(),
        change: Box::new(change),
        status,
        word: word.into(),
    }
}

fn extents(tensor: &mut folio_tensor) -> &mut [i64] {
    // SAFETY: the test's own tensor, whose shape holds ndim values.
    unsafe { std::slice::from_raw_parts_mut(tensor.shape, tensor.ndim as usize) }
}

fn strides(tensor: &mut folio_tensor) -> &mut [i64] {
    // SAFETY: as above; the test's tensors have strides.
    unsafe { std::slice::from_raw_parts_mut(tensor.strides, tensor.ndim as usize) }
}

/// Ways to spoil `field`, which looks like `sample` when it is right.
fn spoils(field: &Field, sample: &mut folio_tensor) -> Vec<Spoil> {
    let (name, rank) = (field.name, field.dims.len());
    let shape = extents(sample).to_vec();
    let float = sample.dtype.code != 0;
    let wrong_bits = if float { 64 } else { 32 };
    let wrong_code = if float { 0 } else { 2 };
    let mut spoils = vec![
        spoil("an unknown device", FOLIO_ERR_DEVICE_MISMATCH, "99", |t| {
            t.device_type = 99
        }),
        spoil("another device", FOLIO_ERR_DEVICE_MISMATCH, "cuda:3", |t| {
            (t.device_type, t.device_id) = (FOLIO_DEVICE_CUDA, 3);
        }),
        spoil("an unknown type", FOLIO_ERR_DTYPE, "77", |t| {
            t.dtype.code = 77
        }),
        spoil("two lanes", FOLIO_ERR_DTYPE, "lanes 2", |t| {
            t.dtype.lanes = 2
        }),
        spoil("another type", FOLIO_ERR_DTYPE, "dtype", move |t| {
            (t.dtype.code, t.dtype.bits) = (wrong_code, wrong_bits);
        }),
        spoil("a negative rank", FOLIO_ERR_SHAPE, "-1", |t| t.ndim = -1),
        spoil("too high a rank", FOLIO_ERR_SHAPE, "6", |t| t.ndim = 6),
        spoil("one dimension less", FOLIO_ERR_SHAPE, "shape", |t| {
            t.ndim -= 1
        }),
        spoil("no shape", FOLIO_ERR_INVALID_ARGUMENT, "NULL", |t| {
            t.shape = null_mut()
        }),
        spoil("no data", FOLIO_ERR_INVALID_ARGUMENT, "NULL", |t| {
            (t.data, t.byte_offset) = (null_mut(), 0);
        }),
        spoil("an offset from nowhere", FOLIO_ERR_SHAPE, "8", |t| {
            (t.data, t.byte_offset) = (null_mut(), 8);
        }),
        spoil(
            "an endless offset",
            FOLIO_ERR_SHAPE,
            u64::MAX.to_string(),
            |t| {
                t.byte_offset = u64::MAX;
            },
        ),
    ];
    if sample.dtype.bits > 8 {
        spoils.push(spoil("a skew address", FOLIO_ERR_SHAPE, "aligned", |t| {
            t.byte_offset += 1
        }));
    }
    for d in 0..rank {
        let at = format!("dimension {d}");
        spoils.push(spoil(
            format!("a negative extent of {at}"),
            FOLIO_ERR_SHAPE,
            "-1",
            move |t| {
                extents(t)[d] = -1;
            },
        ));
        spoils.push(spoil(
            format!("a negative stride of {at}"),
            FOLIO_ERR_SHAPE,
            "-1",
            move |t| {
                strides(t)[d] = -1;
            },
        ));
        spoils.push(spoil(
            format!("an endless {at}"),
            FOLIO_ERR_SHAPE,
            "overflow",
            move |t| {
                extents(t)[d] = i64::MAX;
            },
        ));
        if shape[d] > 1 {
            let endless = format!("an endless stride of {at}");
            spoils.push(spoil(endless, FOLIO_ERR_SHAPE, "overflow", move |t| {
                strides(t)[d] = i64::MAX;
            }));
        }
        let other = |by: i64| {
            let mut wrong = shape.clone();
            wrong[d] += by;
            let what = format!("{at} of {}", wrong[d]);
            spoil(what, FOLIO_ERR_SHAPE, format!("{}", wrong[d]), move |t| {
                extents(t)[d] += by
            })
        };
        if field.dims[d] != Free {
            spoils.push(other(-1));
        }
        if field.dims[d] == Exact {
            spoils.push(other(1));
        }
        if field.output && shape[d] > 1 {
            let what = format!("elements that overlap in {at}");
            // A stride of 0 in the last dimension is not a unit stride either.
            spoils.push(spoil(what, FOLIO_ERR_SHAPE, name, move |t| {
                strides(t)[d] = 0
            }));
        }
    }
    if field.unit_stride && shape[rank - 1] > 1 {
        spoils.push(spoil(
            "every other element",
            FOLIO_ERR_SHAPE,
            "2",
            move |t| {
                strides(t)[rank - 1] = 2;
            },
        ));
    }
    spoils
}

/// Spoils every field of a struct in turn. `make` gives the right struct, `call` makes the call,
/// `unchanged` looks whether it has changed anything.
pub fn walk<T: Copy>(
    entry: &str,
    fields: &[Field],
    make: impl Fn(&Tensors) -> T,
    call: impl Fn(&T) -> Reply,
    unchanged: impl Fn() -> bool,
) {
    for field in fields {
        let tensors = Tensors::default();
        let right = make(&tensors);
        let sample = tensor_at(&right, field.offset);
        // SAFETY: the fixtures fill in every field that is walked.
        let sample = unsafe { sample.cast_mut().as_mut() }.expect(field.name);
        assert_eq!(sample.ndim as usize, field.dims.len(), "{}", field.name);
        for spoil in spoils(field, sample) {
            let tensors = Tensors::default();
            let args = make(&tensors);
            // SAFETY: as above; `tensors` owns it and nothing else refers to it.
            (spoil.change)(unsafe { &mut *tensor_at(&args, field.offset).cast_mut() });
            let what = format!("{entry}: {} with {}", field.name, spoil.what);
            call(&args).assert(&what, spoil.status, &[field.name, &spoil.word]);
            assert!(unchanged(), "{what}: an output changed");
        }
        if field.required {
            let mut args = right;
            // SAFETY: a pointer field of the struct.
            unsafe {
                (&raw mut args)
                    .byte_add(field.offset)
                    .cast::<*const folio_tensor>()
                    .write(null());
            }
            let what = format!("{entry}: {} NULL", field.name);
            call(&args).assert(&what, FOLIO_ERR_INVALID_ARGUMENT, &[field.name, "NULL"]);
            assert!(unchanged(), "{what}: an output changed");
        }
    }
    let tensors = Tensors::default();
    call(&make(&tensors)).assert_ok(entry);
}

fn tensor_at<T>(args: &T, offset: usize) -> *const folio_tensor {
    // SAFETY: the offset is that of a tensor pointer in `T`.
    unsafe {
        from_ref(args)
            .byte_add(offset)
            .cast::<*const folio_tensor>()
            .read()
    }
}

const RUN: [Field; 14] = [
    input(
        "q",
        offset_of!(folio_attention_args, q),
        &[AtLeast, Exact, Exact],
    ),
    input(
        "k",
        offset_of!(folio_attention_args, k),
        &[AtLeast, Exact, Exact, Exact],
    ),
    input(
        "v",
        offset_of!(folio_attention_args, v),
        &[AtLeast, Exact, Exact, Exact],
    ),
    output(
        "o",
        offset_of!(folio_attention_args, o),
        &[AtLeast, Exact, Exact],
    ),
    optional_output(
        "lse",
        offset_of!(folio_attention_args, lse),
        &[AtLeast, Exact],
    ),
    optional(
        "k_scales",
        offset_of!(folio_attention_args, k_scales),
        &[Exact],
    ),
    optional(
        "v_scales",
        offset_of!(folio_attention_args, v_scales),
        &[Exact],
    ),
    optional(
        "q_scales",
        offset_of!(folio_attention_args, q_scales),
        &[Exact],
    ),
    optional(
        "o_scales",
        offset_of!(folio_attention_args, o_scales),
        &[Exact],
    ),
    optional(
        "custom_mask",
        offset_of!(folio_attention_args, custom_mask),
        &[AtLeast],
    ),
    optional(
        "mm_prefix_ranges",
        offset_of!(folio_attention_args, mm_prefix_ranges),
        &[Exact, Free, Exact],
    ),
    optional(
        "alibi_slopes",
        offset_of!(folio_attention_args, alibi_slopes),
        &[Exact],
    ),
    any_strides(optional(
        "score_bias",
        offset_of!(folio_attention_args, score_bias),
        &[Exact, AtLeast, AtLeast],
    )),
    optional("sinks", offset_of!(folio_attention_args, sinks), &[Exact]),
];

#[test]
fn tensors_of_a_run() {
    for kind in [Kind::Decode, Kind::Prefill] {
        let fixture = Fixture::new(&everything(kind));
        walk(
            "run",
            &RUN,
            |tensors| fixture.args(tensors),
            |args| fixture.run(args),
            || fixture.layer.is_untouched(),
        );
    }
}

const MASK_STARTS: [Field; 1] = [optional(
    "custom_mask_indptr",
    offset_of!(folio_attention_args, custom_mask_indptr),
    &[Exact],
)];

const CAUSAL_REQUESTS: [Field; 1] = [optional(
    "causal_requests",
    offset_of!(folio_attention_args, causal_requests),
    &[Exact],
)];

const ITEMS: [Field; 2] = [
    input(
        "item_starts",
        offset_of!(folio_attention_args, item_starts),
        &[Exact],
    ),
    input(
        "item_positions",
        offset_of!(folio_attention_args, item_positions),
        &[Exact, Free],
    ),
];

const SCALES_BY_REQUEST: [Field; 3] = [
    optional(
        "q_scales",
        offset_of!(folio_attention_args, q_scales),
        &[Exact, Exact],
    ),
    optional(
        "k_scales",
        offset_of!(folio_attention_args, k_scales),
        &[Exact, Exact],
    ),
    optional(
        "v_scales",
        offset_of!(folio_attention_args, v_scales),
        &[Exact, Exact],
    ),
];

const SLOPES_BY_REQUEST: [Field; 1] = [optional(
    "alibi_slopes",
    offset_of!(folio_attention_args, alibi_slopes),
    &[Exact, Exact],
)];

const BIAS: [Field; 1] = [any_strides(optional(
    "score_bias",
    offset_of!(folio_attention_args, score_bias),
    &[AtLeast, AtLeast],
))];

/// Its rows are those of a request, its columns the new keys: both are as many as the longest request's three.
#[test]
fn biases_of_requests() {
    let layer = Layer {
        bias: Some(Bias {
            dtype: DType::F16,
            heads: BiasHeads::Absent,
            request_rows: true,
            new_keys: true,
            transposed: false,
            spare: 0,
            reach: None,
        }),
        ..Layer::plain()
    };
    for kind in [Kind::Decode, Kind::Prefill] {
        let fixture = Fixture::new(&plain(kind).with_layer(layer.clone()));
        let tensors = Tensors::default();
        let args = fixture.args(&tensors);
        // SAFETY: the fixture's own tensor.
        let shape = unsafe { std::slice::from_raw_parts((*args.score_bias).shape, 2) };
        assert_eq!(shape, [3, 3]);
        walk(
            "run",
            &BIAS,
            |tensors| fixture.args(tensors),
            |args| fixture.run(args),
            || fixture.layer.is_untouched(),
        );
    }
}

#[test]
fn tensors_by_request() {
    let layer = Layer {
        alibi: Some(Alibi::Linear),
        alibi_by_request: true,
        masks_apart: true,
        mask: MaskKind::Bytes(Pattern::Causal),
        q_scales: HeadScales::PerRequest,
        k_scales: HeadScales::PerRequest,
        v_scales: HeadScales::PerRequest,
        ..Layer::plain()
    };
    let by_request = Layer {
        mask: MaskKind::CausalByRequest,
        ..Layer::plain()
    };
    let items = Layer {
        mask: MaskKind::Items,
        ..Layer::plain()
    };
    let cases: [(&Layer, &[Field]); 5] = [
        (&items, &ITEMS),
        (&layer, &MASK_STARTS),
        (&layer, &SLOPES_BY_REQUEST),
        (&layer, &SCALES_BY_REQUEST),
        (&by_request, &CAUSAL_REQUESTS),
    ];
    for (layer, fields) in cases {
        let problem = everything(Kind::Prefill)
            .of(DType::F32)
            .with_layer(layer.clone());
        let fixture = Fixture::new(&problem);
        walk(
            "run",
            fields,
            |tensors| fixture.args(tensors),
            |args| fixture.run(args),
            || fixture.layer.is_untouched(),
        );
    }
}

const SPLIT_KEYS: [Field; 2] = [
    input(
        "k",
        offset_of!(folio_attention_args, k),
        &[AtLeast, Exact, Exact, Exact],
    ),
    optional(
        "k_rope",
        offset_of!(folio_attention_args, k_rope),
        &[AtLeast, Exact, Exact],
    ),
];

#[test]
fn keys_in_two_parts() {
    let fixture = Fixture::new(&everything(Kind::Prefill).split(8));
    walk(
        "run",
        &SPLIT_KEYS,
        |tensors| fixture.args(tensors),
        |args| fixture.run(args),
        || fixture.layer.is_untouched(),
    );
}

#[test]
fn decode_has_whole_keys() {
    let split = Fixture::new(&everything(Kind::Prefill).split(8));
    let decode = Fixture::new(&everything(Kind::Decode));
    let tensors = Tensors::default();
    let args = folio_attention_args {
        k_rope: split.args(&tensors).k_rope,
        ..decode.args(&tensors)
    };
    let refused = decode.run(&args);
    refused.assert("decode", FOLIO_ERR_UNSUPPORTED, &["k_rope", "decode"]);
    assert!(decode.layer.is_untouched());
}

const CSR: [Field; 4] = [
    input("kv_indptr", offset_of!(folio_batch, kv_indptr), &[Free]),
    input(
        "kv_indices",
        offset_of!(folio_batch, kv_indices),
        &[AtLeast],
    ),
    input(
        "last_page_len",
        offset_of!(folio_batch, last_page_len),
        &[Exact],
    ),
    input("qo_indptr", offset_of!(folio_batch, qo_indptr), &[Exact]),
];

const CSR_WITH_LENGTHS: [Field; 4] = [
    input("kv_indptr", offset_of!(folio_batch, kv_indptr), &[Free]),
    input(
        "kv_indices",
        offset_of!(folio_batch, kv_indices),
        &[AtLeast],
    ),
    input("kv_len", offset_of!(folio_batch, kv_len), &[Exact]),
    input("qo_indptr", offset_of!(folio_batch, qo_indptr), &[Exact]),
];

const BLOCK_TABLE: [Field; 3] = [
    optional(
        "block_table",
        offset_of!(folio_batch, block_table),
        &[Exact, Free],
    ),
    input("kv_len", offset_of!(folio_batch, kv_len), &[Free]),
    input("qo_indptr", offset_of!(folio_batch, qo_indptr), &[Exact]),
];

const RAGGED: [Field; 2] = [
    input("kv_indptr", offset_of!(folio_batch, kv_indptr), &[Free]),
    input("qo_indptr", offset_of!(folio_batch, qo_indptr), &[Exact]),
];

#[test]
fn tensors_of_a_batch() {
    let spare_columns = 0;
    for (form, fields) in [
        (TableForm::CsrLastPageLen, &CSR[..]),
        (TableForm::CsrKvLen { spare_pages: 0 }, &CSR_WITH_LENGTHS),
        (TableForm::BlockTable { spare_columns }, &BLOCK_TABLE),
    ] {
        for kind in [Kind::Decode, Kind::Prefill] {
            walk_batch(&plain_with(kind, form), fields);
        }
    }
    let mut ragged = plain(Kind::Prefill);
    ragged.storage = Storage::Ragged;
    walk_batch(&ragged, &RAGGED);
}

/// A refused batch leaves the plan before it in force.
fn walk_batch(problem: &Problem, fields: &[Field]) {
    let fixture = Fixture::new(problem);
    let before = fixture.output();
    let decode = problem.kind == Kind::Decode;
    let fields: Vec<Field> = (fields.iter())
        .map(|field| Field {
            // Decode derives it.
            required: field.required && !(decode && field.name == "qo_indptr"),
            ..*field
        })
        .collect();
    walk(
        "plan",
        &fields,
        |tensors| fixture.batch(tensors),
        |batch| fixture.plan(batch, &fixture.workspace()),
        || fixture.output() == before,
    );
}

const APPEND: [Field; 7] = [
    input(
        "key",
        offset_of!(folio_kv_append_args, key),
        &[AtLeast, Free, Free],
    ),
    input(
        "value",
        offset_of!(folio_kv_append_args, value),
        &[AtLeast, Free, Free],
    ),
    output(
        "k_cache",
        offset_of!(folio_kv_append_args, k_cache),
        &[Free, Free, Exact, Exact],
    ),
    output(
        "v_cache",
        offset_of!(folio_kv_append_args, v_cache),
        &[Exact, Exact, Exact, Exact],
    ),
    input(
        "slot_mapping",
        offset_of!(folio_kv_append_args, slot_mapping),
        &[Free],
    ),
    optional(
        "k_scales",
        offset_of!(folio_kv_append_args, k_scales),
        &[Exact],
    ),
    optional(
        "v_scales",
        offset_of!(folio_kv_append_args, v_scales),
        &[Exact],
    ),
];

#[test]
fn tensors_of_an_append() {
    let append = Append::new(DType::F8E4M3);
    walk(
        "kv_append",
        &APPEND,
        |tensors| c_append(&append.input(), tensors),
        |args| append.call(args),
        || append.is_untouched(),
    );
}

const MERGE: [Field; 7] = [
    input(
        "v_a",
        offset_of!(folio_merge_state_args, v_a),
        &[Free, Free, Free],
    ),
    any_strides(input(
        "s_a",
        offset_of!(folio_merge_state_args, s_a),
        &[Exact, Exact],
    )),
    input(
        "v_b",
        offset_of!(folio_merge_state_args, v_b),
        &[Exact, Exact, Exact],
    ),
    any_strides(input(
        "s_b",
        offset_of!(folio_merge_state_args, s_b),
        &[Exact, Exact],
    )),
    output(
        "v_out",
        offset_of!(folio_merge_state_args, v_out),
        &[Exact, Exact, Exact],
    ),
    optional_output(
        "s_out",
        offset_of!(folio_merge_state_args, s_out),
        &[Exact, Exact],
    ),
    optional("mask", offset_of!(folio_merge_state_args, mask), &[Exact]),
];

const MERGE_STATES: [Field; 4] = [
    input(
        "v",
        offset_of!(folio_merge_states_args, v),
        &[Free, Free, Free, Free],
    ),
    any_strides(input(
        "s",
        offset_of!(folio_merge_states_args, s),
        &[Exact, Exact, Exact],
    )),
    output(
        "v_out",
        offset_of!(folio_merge_states_args, v_out),
        &[Exact, Exact, Exact],
    ),
    optional_output(
        "s_out",
        offset_of!(folio_merge_states_args, s_out),
        &[Exact, Exact],
    ),
];

const MERGE_VARLEN: [Field; 5] = [
    input(
        "v",
        offset_of!(folio_merge_varlen_args, v),
        &[Free, Free, Free],
    ),
    any_strides(input(
        "s",
        offset_of!(folio_merge_varlen_args, s),
        &[Exact, Exact],
    )),
    input(
        "indptr",
        offset_of!(folio_merge_varlen_args, indptr),
        &[Free],
    ),
    output(
        "v_out",
        offset_of!(folio_merge_varlen_args, v_out),
        &[Exact, Exact, Exact],
    ),
    optional_output(
        "s_out",
        offset_of!(folio_merge_varlen_args, s_out),
        &[Exact, Exact],
    ),
];

#[test]
fn tensors_of_merges() {
    let merge = Merge::new();
    walk(
        "merge_state",
        &MERGE,
        |tensors| c_merge(&merge.two(), tensors),
        |args| merge.call_two(args),
        || merge.is_untouched(),
    );
    let merge = Merge::new();
    walk(
        "merge_states",
        &MERGE_STATES,
        |tensors| c_merge_states(&merge.many(), tensors),
        |args| merge.call_many(args),
        || merge.is_untouched(),
    );
    let merge = Merge::new();
    walk(
        "merge_varlen",
        &MERGE_VARLEN,
        |tensors| c_merge_varlen(&merge.varlen(), tensors),
        |args| merge.call_varlen(args),
        || merge.is_untouched(),
    );
}

/// An output that has a unit last stride and may be left out.
const fn without_null(field: Field) -> Field {
    Field {
        required: false,
        ..field
    }
}

const ABSORB_WEIGHTS: [Field; 3] = [
    any_strides(input(
        "kv_b_proj",
        offset_of!(folio_mla_absorb_weights_args, kv_b_proj),
        &[Exact, Exact],
    )),
    optional_output(
        "w_uk",
        offset_of!(folio_mla_absorb_weights_args, w_uk),
        &[Free, Exact, Exact],
    ),
    optional_output(
        "w_uv",
        offset_of!(folio_mla_absorb_weights_args, w_uv),
        &[Exact, Exact, Exact],
    ),
];

const ABSORB_Q: [Field; 3] = [
    input(
        "q_nope",
        offset_of!(folio_mla_absorb_q_args, q_nope),
        &[Free, Free, Exact],
    ),
    any_strides(input(
        "w_uk",
        offset_of!(folio_mla_absorb_q_args, w_uk),
        &[Exact, Exact, Exact],
    )),
    output(
        "q_latent",
        offset_of!(folio_mla_absorb_q_args, q_latent),
        &[Exact, Exact, Exact],
    ),
];

const PROJECT_O: [Field; 3] = [
    input(
        "o_latent",
        offset_of!(folio_mla_project_o_args, o_latent),
        &[Free, Free, Exact],
    ),
    any_strides(input(
        "w_uv",
        offset_of!(folio_mla_project_o_args, w_uv),
        &[Exact, Exact, Exact],
    )),
    output(
        "out",
        offset_of!(folio_mla_project_o_args, out),
        &[Exact, Exact, Exact],
    ),
];

const UP_PROJECT: [Field; 5] = [
    input(
        "kv_c",
        offset_of!(folio_mla_up_project_args, kv_c),
        &[Free, Exact],
    ),
    any_strides(optional(
        "w_uk",
        offset_of!(folio_mla_up_project_args, w_uk),
        &[Free, Exact, Exact],
    )),
    any_strides(optional(
        "w_uv",
        offset_of!(folio_mla_up_project_args, w_uv),
        &[Exact, Exact, Exact],
    )),
    without_null(output(
        "k_nope",
        offset_of!(folio_mla_up_project_args, k_nope),
        &[Exact, Exact, Exact],
    )),
    without_null(output(
        "v",
        offset_of!(folio_mla_up_project_args, v),
        &[Exact, Exact, Exact],
    )),
];

#[test]
fn tensors_of_projections() {
    let projections = Projections::new();
    walk(
        "mla_absorb_weights",
        &ABSORB_WEIGHTS,
        |tensors| c_absorb_weights(&projections.weights(), tensors),
        |args| projections.call_weights(args),
        || projections.is_untouched(),
    );
    walk(
        "mla_absorb_q",
        &ABSORB_Q,
        |tensors| c_absorb_q(&projections.absorb(), tensors),
        |args| projections.call_absorb(args),
        || projections.is_untouched(),
    );
    walk(
        "mla_project_o",
        &PROJECT_O,
        |tensors| c_project_o(&projections.project(), tensors),
        |args| projections.call_project(args),
        || projections.is_untouched(),
    );
    walk(
        "mla_up_project",
        &UP_PROJECT,
        |tensors| c_up_project(&projections.up_project(), tensors),
        |args| projections.call_up_project(args),
        || projections.is_untouched(),
    );
}
