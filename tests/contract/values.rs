//! Numbers that are wrong: in descs, batches, arguments of runs and of the small operators.

use crate::common::c_door::*;
use crate::common::problem::{Layer, Problem, Storage, TableForm};
use crate::fixture::{Append, Context, Fixture, Reply, everything, plain, plain_with};
use folio::api::Target;
use folio::dtype::DType;
use folio::ffi::*;
use folio::problem::Kind;
use std::ffi::{c_char, c_void};
use std::ptr::{null, null_mut};

/// What to change, the status, and words of the message.
type Row<'a, T> = (&'a dyn Fn(&mut T), folio_status, &'a [&'a str]);

const INVALID: folio_status = FOLIO_ERR_INVALID_ARGUMENT;
const UNSUPPORTED: folio_status = FOLIO_ERR_UNSUPPORTED;
const UNKNOWN: folio_status = FOLIO_ERR_UNKNOWN_FIELD;

/// Makes every call of a table.
fn check<T: Copy>(right: &T, call: impl Fn(&T) -> Reply, rows: &[Row<'_, T>]) {
    call(right).assert_ok("the right call");
    for (n, (change, status, words)) in rows.iter().enumerate() {
        let mut wrong = *right;
        change(&mut wrong);
        call(&wrong).assert(&format!("row {n}, {words:?}"), *status, words);
    }
    call(right).assert_ok("the right call after the wrong ones");
}

unsafe extern "C" fn ignore(_: *mut c_void, _: i32, _: *const c_char) {}

const IGNORE: folio_log_fn = Some(ignore);

#[test]
fn context_descs() {
    let create = |desc: &folio_context_desc| {
        let mut ctx = null_mut();
        // SAFETY: live structs; the context is destroyed at once.
        let reply = Reply::of(|err| unsafe { folio_context_create(desc, &mut ctx, err) });
        assert_eq!(ctx.is_null(), reply.status != FOLIO_OK);
        // SAFETY: NULL or new.
        unsafe { folio_context_destroy(ctx) };
        reply
    };
    type Desc = folio_context_desc;
    let right = c_context_desc(Target::Cpu { num_threads: 2 });
    check(
        &right,
        create,
        &[
            (
                &|d: &mut Desc| d.device_type = 0,
                INVALID,
                &["device_type", "0"],
            ),
            (
                &|d: &mut Desc| d.device_type = 3,
                INVALID,
                &["device_type", "3"],
            ),
            (
                &|d: &mut Desc| d.device_type = -9,
                INVALID,
                &["device_type", "-9"],
            ),
            (
                &|d: &mut Desc| d.device_id = 1,
                FOLIO_ERR_NO_DEVICE,
                &["device_id", "1"],
            ),
            (
                &|d: &mut Desc| d.device_id = -1,
                FOLIO_ERR_NO_DEVICE,
                &["device_id", "-1"],
            ),
            (
                &|d: &mut Desc| d.log_level = 1,
                INVALID,
                &["log_level", "1"],
            ),
            (&|d: &mut Desc| d.log = IGNORE, INVALID, &["log_level", "0"]),
            (
                &|d: &mut Desc| (d.log, d.log_level) = (IGNORE, 4),
                INVALID,
                &["log_level", "4"],
            ),
            (
                &|d: &mut Desc| (d.log, d.log_level) = (IGNORE, -1),
                INVALID,
                &["log_level", "-1"],
            ),
            (
                &|d: &mut Desc| d.flags = FOLIO_CONTEXT_REFERENCE,
                INVALID,
                &["num_threads", "2"],
            ),
            (
                &|d: &mut Desc| d.device_type = FOLIO_DEVICE_CUDA,
                INVALID,
                &["num_threads", "2"],
            ),
            (
                &|d: &mut Desc| {
                    (d.device_type, d.flags) = (FOLIO_DEVICE_CUDA, FOLIO_CONTEXT_REFERENCE);
                },
                UNSUPPORTED,
                &["flags", "FOLIO_CONTEXT_REFERENCE"],
            ),
        ],
    );
}

#[test]
fn decode_descs() {
    let context = Context::cpu();
    let create = |desc: &folio_decode_desc| {
        let mut decode = null_mut();
        // SAFETY: live structs; the handle is destroyed at once.
        let reply =
            Reply::of(|err| unsafe { folio_decode_create(context.0, desc, &mut decode, err) });
        assert_eq!(decode.is_null(), reply.status != FOLIO_OK);
        // SAFETY: NULL or new.
        unsafe { folio_decode_destroy(decode) };
        reply
    };
    type Desc = folio_decode_desc;
    let unknown = folio_dtype {
        code: 77,
        bits: 8,
        lanes: 1,
    };
    let most = i32::MAX as u32;
    check(
        &c_decode_desc(&plain(Kind::Decode).desc()),
        create,
        &[
            (
                &|d: &mut Desc| d.q_dtype = unknown,
                FOLIO_ERR_DTYPE,
                &["q_dtype", "77"],
            ),
            (
                &|d: &mut Desc| d.kv_dtype = unknown,
                FOLIO_ERR_DTYPE,
                &["kv_dtype", "77"],
            ),
            (
                &|d: &mut Desc| d.o_dtype = unknown,
                FOLIO_ERR_DTYPE,
                &["o_dtype", "77"],
            ),
            (
                &|d: &mut Desc| d.q_dtype.lanes = 4,
                FOLIO_ERR_DTYPE,
                &["q_dtype", "lanes 4"],
            ),
            (
                &|d: &mut Desc| d.q_dtype = dtype(DType::F8E4M3),
                UNSUPPORTED,
                &["q_dtype", "float8_e4m3"],
            ),
            (
                &|d: &mut Desc| d.q_dtype = dtype(DType::I32),
                UNSUPPORTED,
                &["q_dtype", "int32"],
            ),
            (
                &|d: &mut Desc| d.kv_dtype = dtype(DType::F16),
                UNSUPPORTED,
                &["kv_dtype", "float16"],
            ),
            (
                &|d: &mut Desc| d.kv_dtype = dtype(DType::U8),
                UNSUPPORTED,
                &["kv_dtype", "uint8"],
            ),
            (
                &|d: &mut Desc| d.o_dtype = dtype(DType::BF16),
                UNSUPPORTED,
                &["o_dtype", "bfloat16"],
            ),
            (
                &|d: &mut Desc| d.kv_layout = 2,
                INVALID,
                &["kv_layout", "2"],
            ),
            (
                &|d: &mut Desc| d.kv_layout = -1,
                INVALID,
                &["kv_layout", "-1"],
            ),
            (
                &|d: &mut Desc| d.num_qo_heads = 0,
                INVALID,
                &["num_qo_heads", "0"],
            ),
            (
                &|d: &mut Desc| d.num_qo_heads = 4098,
                INVALID,
                &["num_qo_heads", "4098"],
            ),
            (
                &|d: &mut Desc| d.num_qo_heads = 7,
                INVALID,
                &["num_qo_heads", "7", "2"],
            ),
            (
                &|d: &mut Desc| d.num_kv_heads = 0,
                INVALID,
                &["num_kv_heads", "0"],
            ),
            (
                &|d: &mut Desc| d.num_kv_heads = u32::MAX,
                INVALID,
                &["num_kv_heads", "4294967295"],
            ),
            (
                &|d: &mut Desc| d.head_dim_qk = 0,
                UNSUPPORTED,
                &["head_dim_qk", "0"],
            ),
            (
                &|d: &mut Desc| d.head_dim_qk = 4,
                UNSUPPORTED,
                &["head_dim_qk", "4"],
            ),
            (
                &|d: &mut Desc| d.head_dim_qk = 100,
                UNSUPPORTED,
                &["head_dim_qk", "100"],
            ),
            (
                &|d: &mut Desc| d.head_dim_qk = 264,
                UNSUPPORTED,
                &["head_dim_qk", "264"],
            ),
            (
                &|d: &mut Desc| d.head_dim_vo = 12,
                UNSUPPORTED,
                &["head_dim_vo", "12"],
            ),
            (
                &|d: &mut Desc| d.head_dim_vo = 512,
                UNSUPPORTED,
                &["head_dim_vo", "512"],
            ),
            (
                &|d: &mut Desc| d.page_size = 0,
                INVALID,
                &["page_size", "0"],
            ),
            (
                &|d: &mut Desc| d.page_size = most + 1,
                INVALID,
                &["page_size", "2147483648"],
            ),
            (
                &|d: &mut Desc| d.max_batch_size = 0,
                INVALID,
                &["max_batch_size", "0"],
            ),
            (
                &|d: &mut Desc| d.max_batch_size = most + 1,
                INVALID,
                &["max_batch_size", "2147483648"],
            ),
            (
                &|d: &mut Desc| d.max_qo_len = u32::MAX,
                INVALID,
                &["max_qo_len", "4294967295"],
            ),
            (
                &|d: &mut Desc| d.max_kv_len = 0,
                INVALID,
                &["max_kv_len", "0"],
            ),
            (
                &|d: &mut Desc| d.max_kv_len = most + 1,
                INVALID,
                &["max_kv_len", "2147483648"],
            ),
            (
                &|d: &mut Desc| (d.max_batch_size, d.max_qo_len) = (most, 2),
                INVALID,
                &["max_num_tokens"],
            ),
        ],
    );
}

#[test]
fn prefill_descs() {
    let context = Context::cpu();
    let create = |desc: &folio_prefill_desc| {
        let mut prefill = null_mut();
        // SAFETY: live structs; the handle is destroyed at once.
        let reply =
            Reply::of(|err| unsafe { folio_prefill_create(context.0, desc, &mut prefill, err) });
        assert_eq!(prefill.is_null(), reply.status != FOLIO_OK);
        // SAFETY: NULL or new.
        unsafe { folio_prefill_destroy(prefill) };
        reply
    };
    type Desc = folio_prefill_desc;
    let int = dtype(DType::I64);
    let paged = c_prefill_desc(&plain(Kind::Prefill).desc());
    check(
        &paged,
        create,
        &[
            (
                &|d: &mut Desc| d.q_dtype = int,
                UNSUPPORTED,
                &["q_dtype", "int64"],
            ),
            (
                &|d: &mut Desc| d.kv_storage = 2,
                INVALID,
                &["kv_storage", "2"],
            ),
            (
                &|d: &mut Desc| d.kv_storage = -1,
                INVALID,
                &["kv_storage", "-1"],
            ),
            (
                &|d: &mut Desc| d.kv_layout = 9,
                INVALID,
                &["kv_layout", "9"],
            ),
            (
                &|d: &mut Desc| d.page_size = 0,
                INVALID,
                &["page_size", "0"],
            ),
            (
                &|d: &mut Desc| d.num_qo_heads = 9,
                INVALID,
                &["num_qo_heads", "9"],
            ),
            (
                &|d: &mut Desc| d.head_dim_vo = 260,
                UNSUPPORTED,
                &["head_dim_vo", "260"],
            ),
            (
                &|d: &mut Desc| d.max_batch_size = 0,
                INVALID,
                &["max_batch_size", "0"],
            ),
            (
                &|d: &mut Desc| d.max_num_tokens = 0,
                INVALID,
                &["max_num_tokens", "0"],
            ),
            (
                &|d: &mut Desc| d.max_num_tokens = u32::MAX,
                INVALID,
                &["max_num_tokens", "4294967295"],
            ),
            (
                &|d: &mut Desc| d.max_kv_len = 0,
                INVALID,
                &["max_kv_len", "0"],
            ),
        ],
    );
    let mut problem = plain(Kind::Prefill);
    problem.storage = Storage::Ragged;
    check(
        &c_prefill_desc(&problem.desc()),
        create,
        &[
            (
                &|d: &mut Desc| d.page_size = 16,
                INVALID,
                &["page_size", "16"],
            ),
            (
                &|d: &mut Desc| d.kv_layout = 1,
                INVALID,
                &["kv_layout", "1"],
            ),
            (
                &|d: &mut Desc| d.max_num_pages = 5,
                INVALID,
                &["max_num_pages", "5"],
            ),
        ],
    );
}

/// One int32 of a tensor of a batch.
fn poke(tensor: *const folio_tensor, at: usize, value: i32) {
    // SAFETY: an index tensor of the fixture, on the host; nobody else uses it.
    unsafe {
        let data = (*tensor).data.byte_add((*tensor).byte_offset as usize);
        data.cast::<i32>().add(at).write(value);
    }
}

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
            }
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

#[test]
fn fields_of_a_batch_that_do_not_fit_together() {
    let csr = |kind| plain_with(kind, TableForm::CsrLastPageLen);
    let table = |kind| plain_with(kind, TableForm::BlockTable { spare_columns: 0 });
    for kind in [Kind::Decode, Kind::Prefill] {
        let reserved = |b: &mut folio_batch, _: &Tensors| b.reserved = 7;
        refuse_plan(&csr(kind), reserved, UNKNOWN, &["reserved", "7"]);
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
    let fields: [(&str, fn(&mut folio_batch)); 4] = [
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
                    &|a: &mut Args| a.lse = null(),
                    INVALID,
                    &["LSE_BASE_2", "lse"],
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
