//! Sized structs: every size relation between caller and library, unknown flags, and memory around the
//! struct that belongs to somebody else.

use crate::common::c_door::*;
use crate::common::problem::TableForm;
use crate::fixture::{Append, Context, Fixture, Merge, Projections, Reply, everything, plain_with};
use folio::api::Target;
use folio::dtype::DType;
use folio::ffi::*;
use folio::problem::Kind;
use std::ptr::{from_mut, null_mut};

/// What lies behind the caller's struct; read as a field it would be refused.
const GUARD: [u8; 24] = [0xee; 24];

/// Bytes of a caller's struct of `size` bytes, with the guard behind it.
fn caller<T>(value: &T, size: usize, fill: u8) -> Vec<u64> {
    let mut bytes = vec![fill; size];
    let common = size.min(size_of::<T>());
    // SAFETY: `T` is a C struct without padding.
    let ours = unsafe { std::slice::from_raw_parts(std::ptr::from_ref(value).cast(), common) };
    bytes[..common].copy_from_slice(ours);
    if size >= 4 {
        bytes[..4].copy_from_slice(&(size as u32).to_ne_bytes());
    }
    bytes.extend(GUARD);
    bytes.resize(bytes.len().next_multiple_of(8), GUARD[0]);
    let words = bytes
        .chunks(8)
        .map(|word| u64::from_ne_bytes(word.try_into().unwrap()));
    words.collect()
}

/// Calls with every size relation. `flags` are those that the struct knows; an accepted call is any that
/// does not complain about the struct itself.
pub fn sizes<T>(name: &str, value: &T, flags: u32, call: impl Fn(*const T) -> Reply) {
    sizes_from(name, value, size_of::<T>(), flags, call);
}

/// The same for a struct that had `first` bytes in the first release: they are the fewest.
pub fn sizes_from<T>(
    name: &str,
    value: &T,
    first: usize,
    flags: u32,
    call: impl Fn(*const T) -> Reply,
) {
    let ours = size_of::<T>();
    let refused = |size: usize, fill, status, word: &str| {
        let bytes = caller(value, size, fill);
        let reply = call(bytes.as_ptr().cast());
        reply.assert(&format!("{name} of {size} bytes"), status, &[name, word]);
        assert_eq!(bytes, caller(value, size, fill), "{name}: an input changed");
    };
    // Where the last field of the library's is a pointer, two of these sizes end inside of it.
    let uneven = [first + 1, ours - 4, ours - 1, ours + 1];
    let uneven = (uneven.into_iter()).filter(|size| !size.is_multiple_of(align_of::<T>()));
    for size in [4, 8, first - 8, first - 1].into_iter().chain(uneven) {
        refused(size, 0, FOLIO_ERR_INVALID_STRUCT_SIZE, &size.to_string());
    }
    for size in [0u32, 3, (1 << 16) + 1, u32::MAX] {
        let mut bytes = caller(value, ours, 0);
        bytes[0] = bytes[0] & !0xffff_ffff | u64::from(size);
        let reply = call(bytes.as_ptr().cast());
        let what = format!("{name} that claims {size} bytes");
        reply.assert(
            &what,
            FOLIO_ERR_INVALID_STRUCT_SIZE,
            &[name, &size.to_string()],
        );
    }
    for longer in [8, 64] {
        refused(ours + longer, 1, FOLIO_ERR_UNKNOWN_FIELD, &ours.to_string());
    }
    for size in [first, ours, ours + 8, ours + 4096] {
        let bytes = caller(value, size, 0);
        let what = format!("{name} of {size} bytes");
        call(bytes.as_ptr().cast()).assert_ok(&what);
        assert_eq!(bytes, caller(value, size, 0), "{name}: an input changed");
    }
    for flag in (0..32)
        .map(|bit| 1u32 << bit)
        .filter(|flag| flag & flags == 0)
    {
        let mut bytes = caller(value, ours, 0);
        bytes[0] |= u64::from(flag) << 32;
        let words = [name, "flags", &format!("{flag:#x}")];
        call(bytes.as_ptr().cast()).assert(name, FOLIO_ERR_UNKNOWN_FIELD, &words);
    }
}

#[test]
fn descs() {
    let desc = c_context_desc(Target::Cpu { num_threads: 1 });
    sizes_from(
        "folio_context_desc",
        &desc,
        40,
        FOLIO_CONTEXT_REFERENCE,
        |desc| {
            let mut ctx = null_mut();
            // SAFETY: live structs; the context is destroyed at once.
            let reply = Reply::of(|err| unsafe { folio_context_create(desc, &mut ctx, err) });
            assert_eq!(ctx.is_null(), reply.status != FOLIO_OK);
            // SAFETY: NULL or new.
            unsafe { folio_context_destroy(ctx) };
            reply
        },
    );
    let context = Context::cpu();
    let flags = FOLIO_PLAN_GRAPH
        | FOLIO_PLAN_BATCH_INVARIANT
        | FOLIO_PLAN_FP8_PRODUCTS
        | FOLIO_PLAN_MASK_ITEMS;
    let desc = c_decode_desc(&everything(Kind::Decode).desc());
    sizes_from("folio_decode_desc", &desc, 64, flags, |desc| {
        let mut decode = null_mut();
        // SAFETY: live structs; the handle is destroyed at once.
        let reply =
            Reply::of(|err| unsafe { folio_decode_create(context.0, desc, &mut decode, err) });
        assert_eq!(decode.is_null(), reply.status != FOLIO_OK);
        // SAFETY: NULL or new.
        unsafe { folio_decode_destroy(decode) };
        reply
    });
    let desc = c_prefill_desc(&everything(Kind::Prefill).desc());
    sizes_from("folio_prefill_desc", &desc, 72, flags, |desc| {
        let mut prefill = null_mut();
        // SAFETY: live structs; the handle is destroyed at once.
        let reply =
            Reply::of(|err| unsafe { folio_prefill_create(context.0, desc, &mut prefill, err) });
        assert_eq!(prefill.is_null(), reply.status != FOLIO_OK);
        // SAFETY: NULL or new.
        unsafe { folio_prefill_destroy(prefill) };
        reply
    });
}

#[test]
fn batches_workspaces_and_args() {
    for kind in [Kind::Decode, Kind::Prefill] {
        let fixture = Fixture::new(&plain_with(kind, TableForm::CsrLastPageLen));
        let tensors = Tensors::default();
        let (batch, workspace) = (fixture.batch(&tensors), fixture.workspace());
        sizes_from("folio_batch", &batch, 64, FOLIO_BATCH_WINDOW, |batch| {
            fixture.plan(batch, &workspace)
        });
        sizes("folio_workspace", &workspace, 0, |workspace| {
            fixture.plan(&batch, workspace)
        });
    }
    for kind in [Kind::Decode, Kind::Prefill] {
        let fixture = Fixture::new(&everything(kind));
        let tensors = Tensors::default();
        let args = fixture.args(&tensors);
        let flags = FOLIO_RUN_WINDOW
            | FOLIO_RUN_LSE_BASE_2
            | FOLIO_RUN_ALIBI_SQRT
            | FOLIO_RUN_MASK_SKIP_PREFIX
            | FOLIO_RUN_MASK_NEW_KEYS
            | FOLIO_RUN_MM_PREFIX_IN_WINDOW
            | FOLIO_RUN_BIAS_NEW_KEYS
            | FOLIO_RUN_BIAS_REQUEST_ROWS;
        sizes_from("folio_attention_args", &args, 136, flags, |args| {
            fixture.run(args)
        });
    }
}

#[test]
fn small_operators() {
    let append = Append::new(DType::F16);
    let tensors = Tensors::default();
    let args = c_append(&append.input(), &tensors);
    sizes_from("folio_kv_append_args", &args, 80, 0, |args| {
        append.call(args)
    });
    let merge = Merge::new();
    let args = c_merge(&merge.two(), &tensors);
    let flags = FOLIO_MERGE_LSE_BASE_2;
    sizes_from("folio_merge_state_args", &args, 64, flags, |args| {
        merge.call_two(args)
    });
    let args = c_merge_states(&merge.many(), &tensors);
    sizes_from("folio_merge_states_args", &args, 40, flags, |args| {
        merge.call_many(args)
    });
    let args = c_merge_varlen(&merge.varlen(), &tensors);
    sizes("folio_merge_varlen_args", &args, flags, |args| {
        merge.call_varlen(args)
    });
    let projections = Projections::new();
    let args = c_absorb_weights(&projections.weights(), &tensors);
    sizes("folio_mla_absorb_weights_args", &args, 0, |args| {
        projections.call_weights(args)
    });
    let args = c_absorb_q(&projections.absorb(), &tensors);
    sizes("folio_mla_absorb_q_args", &args, 0, |args| {
        projections.call_absorb(args)
    });
    let args = c_project_o(&projections.project(), &tensors);
    sizes("folio_mla_project_o_args", &args, 0, |args| {
        projections.call_project(args)
    });
    let args = c_up_project(&projections.up_project(), &tensors);
    sizes("folio_mla_up_project_args", &args, 0, |args| {
        projections.call_up_project(args)
    });
}

/// An output struct: the library writes what both sides know, zeros what only the caller knows, and
/// nothing behind the caller's size.
#[test]
fn workspace_infos() {
    let fixture = Fixture::new(&plain_with(Kind::Prefill, TableForm::CsrLastPageLen));
    let info = fixture.info();
    let ours = size_of::<folio_workspace_info>();
    assert!(info.alignment.is_power_of_two());
    for size in [0, 4, ours - 1, ours + 1, (1 << 16) + 1] {
        let mut bytes = caller(&info, ours, 0);
        bytes[0] = size as u64;
        let before = bytes.clone();
        let reply = fixture.query(bytes.as_mut_ptr().cast());
        let words = ["folio_workspace_info", &size.to_string()];
        reply.assert("workspace", FOLIO_ERR_INVALID_STRUCT_SIZE, &words);
        assert_eq!(bytes, before, "written although refused");
    }
    for size in [ours, ours + 8, ours + 40] {
        let mut bytes = caller(&info, size, 0x77);
        bytes[1..ours / 8].fill(0x7777);
        fixture
            .query(bytes.as_mut_ptr().cast())
            .assert_ok("workspace");
        assert_eq!(bytes, caller(&info, size, 0), "{size} bytes");
    }
    fixture
        .query(null_mut())
        .assert("workspace", FOLIO_ERR_INVALID_ARGUMENT, &["NULL"]);
}

/// An error report: nothing is written behind the caller's size, nothing on success, and what is written
/// ends with NUL.
#[test]
fn error_reports() {
    for size in 0..=600usize {
        let mut bytes = vec![0x55u8; size.max(4) + GUARD.len()];
        bytes[..4].copy_from_slice(&(size as u32).to_ne_bytes());
        let before = bytes.clone();
        let err: *mut folio_error = from_mut(&mut bytes[0]).cast();
        // SAFETY: a report of `size` bytes, and a NULL desc.
        let status = unsafe { folio_context_create(std::ptr::null(), null_mut(), err) };
        assert_eq!(status, FOLIO_ERR_INVALID_ARGUMENT);
        let room = size.min(size_of::<folio_error>());
        assert_eq!(
            bytes[room.max(4)..],
            before[room.max(4)..],
            "behind {size} bytes"
        );
        assert_eq!(bytes[..4], before[..4], "struct_size changed");
        if size <= 8 {
            assert_eq!(bytes, before, "no room for a text");
            continue;
        }
        assert_eq!(bytes[4..8], 1i32.to_ne_bytes());
        let text = bytes[8..room].split(|&byte| byte == 0).next().unwrap();
        assert!(text.len() < room - 8, "no NUL");
        assert!(
            "out: NULL is not accepted".starts_with(std::str::from_utf8(text).unwrap())
                || text.starts_with(b"out: NULL is not accepted")
        );
    }
    let mut err = report();
    err.message[0] = 0x55;
    let desc = c_context_desc(Target::Reference);
    let mut ctx = null_mut();
    // SAFETY: live structs; the context is destroyed at once.
    unsafe {
        assert_eq!(folio_context_create(&desc, &mut ctx, &mut err), FOLIO_OK);
        folio_context_destroy(ctx);
    }
    assert_eq!(
        (err.status, err.message[0]),
        (FOLIO_OK, 0x55),
        "written on success"
    );
}
