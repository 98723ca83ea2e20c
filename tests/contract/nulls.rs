//! NULL in every pointer parameter of every entry, and the entries that take no object.

use crate::common::c_door::{Tensors, c_context_desc, c_decode_desc, c_prefill_desc};
use crate::fixture::{Append, Context, Fixture, Merge, Projections, Reply, plain};
use folio::api::Target;
use folio::dtype::DType;
use folio::ffi::*;
use folio::problem::Kind;
use std::ffi::CStr;
use std::ptr::{null, null_mut};

#[track_caller]
fn assert_null(name: &str, call: impl FnOnce(*mut folio_error) -> folio_status) {
    Reply::of(call).assert(name, FOLIO_ERR_INVALID_ARGUMENT, &[name, "NULL"]);
}

#[test]
fn creating_from_null() {
    let desc = c_context_desc(Target::Cpu { num_threads: 0 });
    let context = Context::cpu();
    let decode = c_decode_desc(&plain(Kind::Decode).desc());
    let prefill = c_prefill_desc(&plain(Kind::Prefill).desc());
    let (mut ctx, mut d, mut p) = (null_mut(), null_mut(), null_mut());
    // SAFETY: NULL, which every entry refuses, or live structs and handles.
    unsafe {
        assert_null("out", |err| folio_context_create(&desc, null_mut(), err));
        assert_null("folio_context_desc", |err| {
            folio_context_create(null(), &mut ctx, err)
        });
        assert_null("ctx", |err| {
            folio_decode_create(null(), &decode, &mut d, err)
        });
        assert_null("folio_decode_desc", |err| {
            folio_decode_create(context.0, null(), &mut d, err)
        });
        assert_null("out", |err| {
            folio_decode_create(context.0, &decode, null_mut(), err)
        });
        assert_null("ctx", |err| {
            folio_prefill_create(null(), &prefill, &mut p, err)
        });
        assert_null("folio_prefill_desc", |err| {
            folio_prefill_create(context.0, null(), &mut p, err)
        });
        assert_null("out", |err| {
            folio_prefill_create(context.0, &prefill, null_mut(), err)
        });
    }
    assert!(ctx.is_null() && d.is_null() && p.is_null());
}

#[test]
fn using_null() {
    // SAFETY: NULL, which every entry refuses.
    unsafe {
        assert_null("decode", |err| {
            folio_decode_workspace(null(), null_mut(), err)
        });
        assert_null("prefill", |err| {
            folio_prefill_workspace(null(), null_mut(), err)
        });
        assert_null("decode", |err| {
            folio_decode_plan(null_mut(), null(), null(), null_mut(), err)
        });
        assert_null("prefill", |err| {
            folio_prefill_plan(null_mut(), null(), null(), null_mut(), err)
        });
        assert_null("decode", |err| {
            folio_decode_run(null(), null(), null_mut(), err)
        });
        assert_null("decode", |err| {
            folio_decode_append_run(null(), null(), null(), null_mut(), err)
        });
        assert_null("prefill", |err| {
            folio_prefill_run(null(), null(), null_mut(), err)
        });
        assert_null("ctx", |err| {
            folio_kv_append(null(), null(), null_mut(), err)
        });
        assert_null("ctx", |err| {
            folio_merge_state(null(), null(), null_mut(), err)
        });
        assert_null("ctx", |err| {
            folio_merge_states(null(), null(), null_mut(), err)
        });
        assert_null("ctx", |err| {
            folio_merge_varlen(null(), null(), null_mut(), err)
        });
        assert_null("ctx", |err| {
            folio_mla_absorb_weights(null(), null(), null_mut(), err)
        });
        assert_null("ctx", |err| {
            folio_mla_absorb_q(null(), null(), null_mut(), err)
        });
        assert_null("ctx", |err| {
            folio_mla_project_o(null(), null(), null_mut(), err)
        });
        assert_null("ctx", |err| {
            folio_mla_up_project(null(), null(), null_mut(), err)
        });
    }
    for kind in [Kind::Decode, Kind::Prefill] {
        let fixture = Fixture::new(&plain(kind));
        let refused = |reply: Reply, name: &str| {
            reply.assert(name, FOLIO_ERR_INVALID_ARGUMENT, &[name, "NULL"]);
        };
        refused(fixture.query(null_mut()), "folio_workspace_info");
        refused(fixture.plan(null(), &fixture.workspace()), "folio_batch");
        refused(fixture.run(null()), "folio_attention_args");
        assert!(fixture.layer.is_untouched());
    }
    let refused = |reply: Reply, name: &str| {
        reply.assert(name, FOLIO_ERR_INVALID_ARGUMENT, &[name, "NULL"]);
    };
    refused(Append::new(DType::F16).call(null()), "folio_kv_append_args");
    refused(Merge::new().call_two(null()), "folio_merge_state_args");
    refused(Merge::new().call_many(null()), "folio_merge_states_args");
    refused(Merge::new().call_varlen(null()), "folio_merge_varlen_args");
    let projections = Projections::new();
    refused(
        projections.call_weights(null()),
        "folio_mla_absorb_weights_args",
    );
    refused(projections.call_absorb(null()), "folio_mla_absorb_q_args");
    refused(projections.call_project(null()), "folio_mla_project_o_args");
    refused(
        projections.call_up_project(null()),
        "folio_mla_up_project_args",
    );
}

#[test]
fn destroying_and_naming_null() {
    // SAFETY: NULL is fine.
    unsafe {
        folio_context_destroy(null_mut());
        folio_decode_destroy(null_mut());
        folio_prefill_destroy(null_mut());
        assert!(folio_decode_kernel(null()).is_null());
        assert!(folio_prefill_kernel(null()).is_null());
    }
}

/// A NULL report costs the text, not the status.
#[test]
fn failing_without_a_report() {
    let fixture = Fixture::new(&plain(Kind::Prefill));
    let tensors = Tensors::default();
    let mut args = fixture.args(&tensors);
    args.sm_scale = f32::NAN;
    // SAFETY: live structs; the last one is NULL on purpose.
    unsafe {
        let status = folio_context_create(null(), null_mut(), null_mut());
        assert_eq!(status, FOLIO_ERR_INVALID_ARGUMENT);
        let context = Context::cpu();
        let status = folio_kv_append(context.0, null(), null_mut(), null_mut());
        assert_eq!(status, FOLIO_ERR_INVALID_ARGUMENT);
    }
    assert_eq!(fixture.run(&args).status, FOLIO_ERR_INVALID_ARGUMENT);
}

#[test]
fn entries_without_an_object() {
    // SAFETY: static strings.
    let name = |code| unsafe { CStr::from_ptr(folio_status_name(folio_status(code))) };
    let names = [
        (0, "OK"),
        (1, "INVALID_ARGUMENT"),
        (2, "INVALID_STRUCT_SIZE"),
        (3, "UNKNOWN_FIELD"),
        (4, "SHAPE"),
        (5, "DTYPE"),
        (6, "DEVICE_MISMATCH"),
        (7, "WORKSPACE_TOO_SMALL"),
        (8, "NOT_PLANNED"),
        (9, "CAPTURE"),
        (50, "UNSUPPORTED"),
        (51, "NO_DEVICE"),
        (52, "NO_DRIVER"),
        (53, "DRIVER_TOO_OLD"),
        (54, "COMPILE"),
        (100, "OUT_OF_MEMORY"),
        (101, "DRIVER"),
        (200, "INTERNAL"),
    ];
    for code in -300..300 {
        let known = names.iter().find(|row| row.0 == code);
        assert_eq!(
            name(code).to_str(),
            Ok(known.map_or("unknown", |row| row.1))
        );
    }
    assert_eq!(folio_device_count(FOLIO_DEVICE_CPU), 1);
    for none in [0, 3, -1, i32::MAX, i32::MIN] {
        assert_eq!(folio_device_count(none), 0, "device type {none}");
    }
    // SAFETY: a static string.
    let version = unsafe { CStr::from_ptr(folio_version()) };
    assert_eq!(version.to_str(), Ok(env!("CARGO_PKG_VERSION")));
    assert!(!folio_get_api(FOLIO_ABI_VERSION).is_null());
    for other in [FOLIO_ABI_VERSION + 1, 0, 1 << 16, u32::MAX] {
        assert!(folio_get_api(other).is_null(), "ABI version {other:#x}");
    }
}

/// Every pointer of the table is a function.
#[test]
fn the_table_has_no_holes() {
    let table = folio_get_api(FOLIO_ABI_VERSION);
    // SAFETY: the table states its own size, and its slots are pointers.
    unsafe {
        assert_eq!((*table).struct_size as usize, size_of::<folio_api>());
        assert_eq!((*table).abi_version, FOLIO_ABI_VERSION);
        let slots = (size_of::<folio_api>() - 8) / size_of::<usize>();
        let first = table.cast::<u8>().add(8).cast::<usize>();
        for slot in 0..slots {
            assert_ne!(first.add(slot).read(), 0, "slot {slot}");
        }
    }
}
