//! New keys and values beside the cache with callers who err.

use crate::common::c_door::{Tensors, c_prefill_desc, dtype};
use crate::common::problem::{Problem, TableForm};
use crate::fixture::{Context, Fixture, Reply, everything, floats, plain, plain_with};
use crate::table::{INVALID, UNSUPPORTED, check};
use crate::tensors::Dim::{AtLeast, Exact};
use crate::tensors::{Field, input, walk};
use folio::dtype::DType;
use folio::ffi::*;
use folio::problem::Kind;
use std::mem::offset_of;
use std::ptr::{null, null_mut};

fn extend() -> Problem {
    let mut problem = everything(Kind::Prefill).extend(DType::F16);
    problem.layer.o_scales = false;
    problem
}

const NEW_KEYS: [Field; 4] = [
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
    input(
        "k_new",
        offset_of!(folio_attention_args, k_new),
        &[AtLeast, Exact, Exact],
    ),
    input(
        "v_new",
        offset_of!(folio_attention_args, v_new),
        &[AtLeast, Exact, Exact],
    ),
];

#[test]
fn tensors() {
    let fixture = Fixture::new(&extend());
    walk(
        "run",
        &NEW_KEYS,
        |tensors| fixture.args(tensors),
        |args| fixture.run(args),
        || fixture.layer.is_untouched(),
    );
}

#[test]
fn handles_of_the_other_kind_refuse_them() {
    let with = Fixture::new(&extend());
    for kind in [Kind::Prefill, Kind::Decode] {
        let without = Fixture::new(&everything(kind));
        let tensors = Tensors::default();
        let new = with.args(&tensors);
        let reply = without.run_as(|args, _| args.k_new = new.k_new);
        reply.assert("k_new", INVALID, &["k_new", "new_kv_dtype", "NULL"]);
        let reply = without.run_as(|args, _| args.v_new = new.v_new);
        reply.assert("v_new", INVALID, &["v_new", "new_kv_dtype", "NULL"]);
        assert!(without.layer.is_untouched());
    }
    let reply = with.run_as(|args, _| args.k_new = null());
    reply.assert("k_new", INVALID, &["k_new", "NULL", "a tensor"]);
    let reply = with.run_as(|args, _| args.v_new = null());
    reply.assert("v_new", INVALID, &["v_new", "NULL", "a tensor"]);
    let split = Fixture::new(&everything(Kind::Prefill).split(8));
    let tensors = Tensors::default();
    let reply = with.run_as(|args, _| args.k_rope = split.args(&tensors).k_rope);
    reply.assert("k_rope", UNSUPPORTED, &["k_rope", "new_kv_dtype"]);
    let one = floats(DType::F32, &[1]);
    let reply = with.run_as(|args, tensors| args.o_scales = tensors.of(one.tensor()));
    reply.assert("o_scales", UNSUPPORTED, &["o_scales", "new_kv_dtype"]);
    assert!(with.layer.is_untouched());
}

/// A host of before has a shorter struct, which says nothing of new keys.
#[test]
fn shorter_structs_have_none() {
    let with = Fixture::new(&extend());
    let reply = with.run_as(|args, _| args.struct_size = 184);
    reply.assert("k_new", INVALID, &["k_new", "NULL"]);
    let without = Fixture::new(&plain(Kind::Prefill));
    without
        .run_as(|args, _| args.struct_size = 184)
        .assert_ok("184 bytes");
}

#[test]
fn descs() {
    let context = Context::cpu();
    let create = |desc: &folio_prefill_desc| {
        let mut handle = null_mut();
        // SAFETY: live structs; the handle is destroyed at once.
        let reply =
            Reply::of(|err| unsafe { folio_prefill_create(context.0, desc, &mut handle, err) });
        assert_eq!(handle.is_null(), reply.status != FOLIO_OK);
        // SAFETY: NULL or new.
        unsafe { folio_prefill_destroy(handle) };
        reply
    };
    type Desc = folio_prefill_desc;
    check(
        &c_prefill_desc(&plain(Kind::Prefill).extend(DType::F32).desc()),
        create,
        &[
            (
                &|d: &mut Desc| d.new_kv_dtype = dtype(DType::BF16),
                UNSUPPORTED,
                &["new_kv_dtype", "bfloat16", "q_dtype float32"],
            ),
            (
                &|d: &mut Desc| d.new_kv_dtype.code = 99,
                FOLIO_ERR_DTYPE,
                &["new_kv_dtype", "99"],
            ),
            (
                &|d: &mut Desc| {
                    (d.kv_storage, d.page_size, d.max_num_pages) = (FOLIO_KV_RAGGED, 0, 0)
                },
                INVALID,
                &["new_kv_dtype", "float32", "FOLIO_KV_RAGGED"],
            ),
            (
                &|d: &mut Desc| d.max_kv_len = (1 << 29) + 1,
                UNSUPPORTED,
                &["max_kv_len", "536870913", "new_kv_dtype"],
            ),
            (
                &|d: &mut Desc| d.flags |= FOLIO_PLAN_MASK_ITEMS,
                UNSUPPORTED,
                &["flags", "FOLIO_PLAN_MASK_ITEMS", "new_kv_dtype"],
            ),
        ],
    );
    let half = plain(Kind::Prefill).of(DType::F16);
    create(&c_prefill_desc(&half.extend(DType::F8E5M2).desc())).assert_ok("new keys in fp8");
}

/// `max_kv_len` counts what is in the cache and what is new, the batch what is in the cache; a refused batch leaves the plan.
#[test]
fn batches() {
    let form = TableForm::BlockTable { spare_columns: 1 };
    let fixture = Fixture::new(&plain_with(Kind::Prefill, form).extend(DType::F32));
    let right = fixture.output();
    let mut lengths = [7, 3, 4];
    let reply = fixture.plan_as(|batch, tensors| {
        batch.kv_len = tensors.of(lengths_of(&mut lengths));
    });
    // The third request has three new keys to its four, one beyond the longest of none.
    reply.assert_ok("within max_kv_len");
    let mut lengths = [8, 3, 3];
    let reply = fixture.plan_as(|batch, tensors| {
        batch.kv_len = tensors.of(lengths_of(&mut lengths));
    });
    reply.assert(
        "kv_len",
        INVALID,
        &["kv_len[0]", "8", "10", "max_kv_len (9)"],
    );
    let mut lengths = [7, 3, 9];
    let reply = fixture.plan_as(|batch, tensors| {
        batch.kv_len = tensors.of(lengths_of(&mut lengths));
    });
    reply.assert(
        "kv_len",
        INVALID,
        &["kv_len[2]", "9", "12", "max_kv_len (9)"],
    );
    fixture.plan_as(|_, _| {}).assert_ok("the right one");
    assert!(fixture.output() == right);
}

fn lengths_of(lengths: &mut [i32; 3]) -> Option<folio::tensor::Tensor> {
    let data = lengths.as_mut_ptr().cast();
    let device = folio::tensor::Device::Cpu;
    // SAFETY: three numbers, which outlive the call.
    let tensor =
        unsafe { folio::tensor::Tensor::new("kv_len", data, device, DType::I32, &[3], None) };
    Some(tensor.expect("three numbers"))
}

#[test]
fn a_run_needs_a_plan() {
    let fixture = Fixture::unplanned(&extend());
    let reply = fixture.run_as(|_, _| {});
    reply.assert("run", FOLIO_ERR_NOT_PLANNED, &["plan"]);
}
