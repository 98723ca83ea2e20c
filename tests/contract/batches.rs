//! Lengths, ids and fields of a batch that are wrong: the plan before stays in force.

use crate::common::c_door::Tensors;
use crate::common::door::{Door, RustDoor};
use crate::common::instance::Scratch;
use crate::common::memory::{HostMemory, Image, Resident};
use crate::common::problem::{Problem, Storage, TableForm};
use crate::fixture::{Fixture, plain, plain_with};
use crate::stub::Stub;
use crate::table::{INVALID, UNKNOWN, poke, poke_wide};
use folio::api::{Attention, BatchInput, Stream, Target, Workspace};
use folio::dtype::DType;
use folio::error::Error;
use folio::ffi::*;
use folio::problem::Kind;
use folio::tensor::{Device, Tensor};
use std::ptr::null;

/// Plans a batch after `change`, which must fail and leave the plan before in force. Each row gets a
/// fixture of its own, because it may spoil memory.
fn refuse_plan(
    problem: &Problem,
    change: impl FnOnce(&mut folio_batch, &Tensors),
    status: folio_status,
    words: &[&str],
) {
    let fixture = Fixture::new(problem);
    let before = fixture.output();
    fixture.plan_as(change).assert("plan", status, words);
    assert!(
        fixture.output() == before,
        "{words:?}: the plan before is gone"
    );
}

/// What one int32 of a field must not be: field, index, value, words.
type Poke<'a> = (
    fn(&folio_batch) -> *const folio_tensor,
    usize,
    i32,
    &'a [&'a str],
);

#[test]
fn lengths_and_ids_of_a_batch() {
    // Lengths 9, 4, 6 on pages of 4: 3, 1 and 2 pages; 2, 1 and 3 rows.
    let csr: &[Poke<'_>] = &[
        (|b| b.kv_indptr, 0, 1, &["kv_indptr[0]", "1"]),
        (|b| b.kv_indptr, 0, -1, &["kv_indptr[0]", "-1"]),
        (|b| b.kv_indptr, 2, 2, &["kv_indptr[2]", "2"]),
        (|b| b.kv_indptr, 3, -5, &["kv_indptr[3]", "-5"]),
        (|b| b.qo_indptr, 0, 1, &["qo_indptr[0]", "1"]),
        (|b| b.qo_indptr, 1, -2, &["qo_indptr[1]", "-2"]),
        (|b| b.qo_indptr, 2, 1, &["qo_indptr[2]", "1"]),
        (|b| b.kv_indices, 0, -1, &["kv_indices[0]", "-1"]),
        (
            |b| b.kv_indices,
            5,
            i32::MIN,
            &["kv_indices[5]", "-2147483648"],
        ),
    ];
    let last: &[Poke<'_>] = &[
        (|b| b.last_page_len, 0, 0, &["last_page_len[0]", "0", "4"]),
        (|b| b.last_page_len, 1, 5, &["last_page_len[1]", "5", "4"]),
        (|b| b.last_page_len, 2, -1, &["last_page_len[2]", "-1"]),
        (|b| b.last_page_len, 0, 4, &["kv_len[0]", "12", "9"]),
    ];
    let lengths: &[Poke<'_>] = &[
        (|b| b.kv_len, 0, -1, &["kv_len[0]", "-1"]),
        (|b| b.kv_len, 2, i32::MIN, &["kv_len[2]", "-2147483648"]),
        (|b| b.kv_len, 0, 10, &["kv_len[0]", "10", "9"]),
        (|b| b.kv_len, 1, 5, &["kv_len[1]", "5"]),
    ];
    let table: &[Poke<'_>] = &[
        (|b| b.block_table, 0, -1, &["block_table[0][0]", "-1"]),
        (|b| b.block_table, 2, -3, &["block_table[0][2]", "-3"]),
        (|b| b.block_table, 7, -9, &["block_table[2][1]", "-9"]),
        (|b| b.kv_len, 0, -1, &["kv_len[0]", "-1"]),
    ];
    let forms = [
        (TableForm::CsrLastPageLen, [csr, last].concat()),
        (
            TableForm::CsrKvLen { spare_pages: 0 },
            [csr, lengths].concat(),
        ),
        (TableForm::BlockTable { spare_columns: 0 }, table.to_vec()),
    ];
    for (form, rows) in forms {
        for (tensor, at, value, words) in rows {
            for kind in [Kind::Decode, Kind::Prefill] {
                let change = |batch: &mut folio_batch, _: &Tensors| poke(tensor(batch), at, value);
                refuse_plan(&plain_with(kind, form), change, INVALID, words);
                let change = |batch: &mut folio_batch, _: &Tensors| {
                    poke_wide(tensor(batch), at, value.into())
                };
                refuse_plan(&wide(kind, form), change, INVALID, words);
            }
        }
    }
}

fn wide(kind: Kind, form: TableForm) -> Problem {
    Problem {
        wide_indices: true,
        ..plain_with(kind, form)
    }
}

/// Numbers of int64 that are no int32, where they are used.
#[test]
fn indices_that_do_not_fit() {
    type Wide = (
        TableForm,
        fn(&folio_batch) -> *const folio_tensor,
        usize,
        &'static str,
    );
    let csr = TableForm::CsrLastPageLen;
    let table = TableForm::BlockTable { spare_columns: 1 };
    let rows: [Wide; 7] = [
        (csr, |b| b.kv_indptr, 3, "kv_indptr[3]"),
        (csr, |b| b.qo_indptr, 1, "qo_indptr[1]"),
        (csr, |b| b.kv_indices, 4, "kv_indices[4]"),
        (csr, |b| b.last_page_len, 2, "last_page_len[2]"),
        (table, |b| b.kv_len, 1, "kv_len[1]"),
        (table, |b| b.block_table, 0, "block_table[0][0]"),
        // Rows of four ids, an element apart.
        (table, |b| b.block_table, 11, "block_table[2][1]"),
    ];
    for (form, tensor, at, field) in rows {
        for value in [1 << 31, (1 << 32) + 1, i64::MIN] {
            let change = |batch: &mut folio_batch, _: &Tensors| poke_wide(tensor(batch), at, value);
            let words = [field, &value.to_string()];
            refuse_plan(&wide(Kind::Prefill, form), change, INVALID, &words);
        }
    }
}

#[test]
fn batches_beyond_the_maxima() {
    // Requests of the desc: 3 of at most 3 rows and 9 keys, 6 rows and 6 pages in all.
    let more = [
        (&[(1, 1); 4][..], "max_batch_size"),
        (&[(3, 1), (3, 1), (1, 1)], "max_num_tokens"),
    ];
    let longer = [
        (&[(4, 4)][..], "max_qo_len"),
        (&[(1, 10)], "max_kv_len"),
        (&[(1, 9); 3], "max_num_pages"),
    ];
    for (lens, limit) in more.into_iter().chain(longer) {
        let fixture = Fixture::new(&plain(Kind::Prefill));
        let before = fixture.output();
        let other = Fixture::unplanned(&Problem {
            requests: Problem::plain(lens).requests,
            ..plain(Kind::Prefill)
        });
        let tensors = Tensors::default();
        let reply = fixture.plan(&other.batch(&tensors), &fixture.workspace());
        reply.assert(limit, INVALID, &[limit]);
        assert!(
            fixture.output() == before,
            "{limit}: the plan before is gone"
        );
    }
}

/// Pages may hold more keys than a length of 32 bits can say.
#[test]
fn a_derived_length_beyond_31_bits_is_refused() {
    for kind in [Kind::Decode, Kind::Prefill] {
        let mut problem = plain(kind);
        problem.requests.truncate(1);
        problem.storage = Storage::paged(1 << 30);
        problem.requests[0].kv_len = 1 << 20;
        let mut desc = problem.desc();
        (desc.max_kv_len, desc.max_num_pages) = (i32::MAX as u32, 8);
        let session = RustDoor.open(Target::Cpu { num_threads: 1 }).unwrap();
        let mut handle = session.attention(desc).unwrap();
        let scratch = Scratch::new(&HostMemory, &handle.workspace().unwrap());
        let ints = |values: &[i32]| {
            Resident::new(&HostMemory, Image::of_i32(&[values.len() as i64], values))
        };
        let (qo_indptr, kv_indptr) = (ints(&[0, 1]), ints(&[0, 3]));
        let (ids, last_page_len) = (ints(&[0, 1, 2]), ints(&[4]));
        let batch = BatchInput {
            qo_indptr: Some(qo_indptr.tensor()),
            kv_indptr: Some(kv_indptr.tensor()),
            kv_indices: Some(ids.tensor()),
            last_page_len: Some(last_page_len.tensor()),
            ..BatchInput::default()
        };
        let error = scratch.plan(&mut *handle, &batch).unwrap_err().to_string();
        for word in ["kv_indptr", "request 0", "2147483652", "max_kv_len"] {
            assert!(error.contains(word), "no {word:?} in {error:?}");
        }
    }
}

/// A plan for a window takes runs that see no further, whichever they are.
#[test]
fn runs_keep_to_the_window_that_was_planned_for() {
    for kind in [Kind::Decode, Kind::Prefill] {
        let mut problem = plain_with(kind, TableForm::CsrLastPageLen);
        problem.layer.window = Some((5, -1));
        let fixture = Fixture::new(&problem);
        let plan = |left: i64| {
            fixture
                .plan_as(|batch, _| (batch.flags, batch.window_left) = (FOLIO_BATCH_WINDOW, left))
                .assert_ok("plan");
        };
        plan(4);
        let wider = ["window_left", "5", "4"];
        fixture.run_as(|_, _| {}).assert("5 of 4", INVALID, &wider);
        let unlimited = |args: &mut folio_attention_args, _: &Tensors| args.window_left = -1;
        let reply = fixture.run_as(unlimited);
        reply.assert(
            "-1 of 4",
            INVALID,
            &["window_left", "-1", "4", "FOLIO_RUN_WINDOW"],
        );
        let prefixes = |args: &mut folio_attention_args, _: &Tensors| {
            (args.window_left, args.mm_prefix_ranges) = (4, args.q);
        };
        let reply = fixture.run_as(prefixes);
        reply.assert(
            "mm-prefix",
            INVALID,
            &["mm_prefix_ranges", "MM_PREFIX_IN_WINDOW"],
        );
        assert!(fixture.layer.is_untouched());
        for left in [5, 6, i64::MAX, -1] {
            plan(left);
            fixture.run_as(|_, _| {}).assert_ok("5");
        }
    }
}

/// Sets a field of a batch.
type Set = fn(&mut folio_batch);

#[test]
fn fields_of_a_batch_that_do_not_fit_together() {
    let csr = |kind| plain_with(kind, TableForm::CsrLastPageLen);
    let table = |kind| plain_with(kind, TableForm::BlockTable { spare_columns: 0 });
    for kind in [Kind::Decode, Kind::Prefill] {
        let reserved = |b: &mut folio_batch, _: &Tensors| b.reserved = 7;
        refuse_plan(&csr(kind), reserved, UNKNOWN, &["reserved", "7"]);
        let flags = |b: &mut folio_batch, _: &Tensors| b.flags = 2;
        refuse_plan(&csr(kind), flags, UNKNOWN, &["flags", "2"]);
        let unsaid = |b: &mut folio_batch, _: &Tensors| b.window_left = 7;
        refuse_plan(
            &csr(kind),
            unsaid,
            INVALID,
            &["window_left", "7", "FOLIO_BATCH_WINDOW"],
        );
        let negative = |b: &mut folio_batch, _: &Tensors| {
            (b.flags, b.window_left) = (FOLIO_BATCH_WINDOW, -2);
        };
        refuse_plan(&csr(kind), negative, INVALID, &["window_left", "-2"]);
        let both = |b: &mut folio_batch, _: &Tensors| b.kv_len = b.last_page_len;
        refuse_plan(&csr(kind), both, INVALID, &["kv_len", "last_page_len"]);
        let neither = |b: &mut folio_batch, _: &Tensors| b.last_page_len = null();
        refuse_plan(&csr(kind), neither, INVALID, &["last_page_len", "NULL"]);
        let two_tables = |b: &mut folio_batch, _: &Tensors| b.kv_indptr = b.qo_indptr;
        refuse_plan(
            &table(kind),
            two_tables,
            INVALID,
            &["kv_indptr", "block_table"],
        );
        let ids_twice = |b: &mut folio_batch, _: &Tensors| b.kv_indices = b.kv_len;
        refuse_plan(
            &table(kind),
            ids_twice,
            INVALID,
            &["kv_indices", "block_table"],
        );
        let last = |b: &mut folio_batch, _: &Tensors| b.last_page_len = b.kv_len;
        refuse_plan(
            &table(kind),
            last,
            INVALID,
            &["last_page_len", "block_table"],
        );
        let no_table = |b: &mut folio_batch, _: &Tensors| b.block_table = null();
        refuse_plan(&table(kind), no_table, INVALID, &["kv_indptr", "NULL"]);
        let rows_twice = |b: &mut folio_batch, _: &Tensors| b.qo_len = 2;
        refuse_plan(&csr(kind), rows_twice, INVALID, &["qo_len", "2"]);
    }
    let too_many = |b: &mut folio_batch, _: &Tensors| (b.qo_indptr, b.qo_len) = (null(), 4);
    refuse_plan(
        &csr(Kind::Decode),
        too_many,
        INVALID,
        &["qo_len", "4", "max_qo_len"],
    );
    let stated = |b: &mut folio_batch, _: &Tensors| (b.qo_indptr, b.qo_len) = (null(), 1);
    refuse_plan(&csr(Kind::Prefill), stated, INVALID, &["qo_indptr", "NULL"]);
    let mut ragged = plain(Kind::Prefill);
    ragged.storage = Storage::Ragged;
    let fields: [(&str, Set); 4] = [
        ("kv_indices", |b| b.kv_indices = b.kv_indptr),
        ("last_page_len", |b| b.last_page_len = b.kv_indptr),
        ("kv_len", |b| b.kv_len = b.kv_indptr),
        ("block_table", |b| b.block_table = b.kv_indptr),
    ];
    for (name, set) in fields {
        refuse_plan(&ragged, |b, _| set(b), INVALID, &[name, "ragged"]);
    }
}

#[test]
fn running_before_a_plan() {
    for kind in [Kind::Decode, Kind::Prefill] {
        let fixture = Fixture::unplanned(&plain(kind));
        let run = || fixture.run_as(|_, _| {});
        run().assert("run", FOLIO_ERR_NOT_PLANNED, &["plan"]);
        let bad = fixture.plan_as(|batch, _| batch.kv_indptr = null());
        bad.assert("plan", INVALID, &["kv_indptr"]);
        run().assert("run after a refused plan", FOLIO_ERR_NOT_PLANNED, &["plan"]);
        assert!(fixture.layer.is_untouched());
        fixture.plan_as(|_, _| {}).assert_ok("plan");
        run().assert_ok("run");
    }
}

/// An int32 tensor of which nobody reads an element.
fn unread(device: Device, shape: &[i64]) -> Option<Tensor> {
    // SAFETY: the stub reads nothing, and lengths of devices are not looked at.
    unsafe { Tensor::new("x", 4096 as *mut u8, device, DType::I32, shape, None) }.ok()
}

/// Lengths on a device need page ids there too; the message names the field that the caller filled in.
#[test]
fn page_ids_on_the_host_with_lengths_on_a_device() {
    let device = Device::Cuda(0);
    let context = Stub::new(device).context();
    let mut handle = Attention::new(&context, plain(Kind::Decode).desc()).unwrap();
    let csr = BatchInput {
        qo_len: 1,
        kv_indptr: unread(device, &[2]),
        kv_indices: unread(Device::Cpu, &[1]),
        last_page_len: unread(device, &[1]),
        ..BatchInput::default()
    };
    let table = BatchInput {
        qo_len: 1,
        kv_len: unread(device, &[1]),
        block_table: unread(Device::Cpu, &[1, 1]),
        ..BatchInput::default()
    };
    let memory = Workspace {
        device: 1 << 20,
        host: 1 << 16,
    };
    for (batch, field) in [(csr, "kv_indices"), (table, "block_table")] {
        let planned = handle.plan(&batch, &memory, (4096, 1000), Stream::default());
        let named = |message: &str| message.starts_with(field) && message.contains("cuda:0");
        assert!(
            matches!(&planned, Err(Error::DeviceMismatch(message)) if named(message)),
            "{planned:?}"
        );
    }
}
