//! Numbers of descs that are wrong.

use crate::common::c_door::{c_context_desc, c_decode_desc, c_prefill_desc, dtype};
use crate::common::problem::Storage;
use crate::fixture::{Context, Reply, plain};
use crate::table::{INVALID, UNKNOWN, UNSUPPORTED, check};
use folio::api::Target;
use folio::dtype::DType;
use folio::ffi::*;
use folio::problem::Kind;
use std::ffi::{c_char, c_void};
use std::ptr::null_mut;

unsafe extern "C" fn ignore(_: *mut c_void, _: i32, _: *const c_char) {}

const IGNORE: folio_log_fn = Some(ignore);

unsafe extern "C" fn run_nothing(_: *mut c_void, _: u32, _: folio_task_fn, _: *mut c_void) {
    panic!("no task is run by creating a context");
}

const RUN_NOTHING: folio_parallel_for_fn = Some(run_nothing);

/// No system has the CPU after the last one.
static CPUS: [u32; 4] = [0, 0, 8191, 8192];

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
                &|d: &mut Desc| d.num_threads = 1025,
                INVALID,
                &["num_threads", "1025", "1024"],
            ),
            (
                &|d: &mut Desc| d.num_threads = u32::MAX,
                INVALID,
                &["num_threads", "4294967295", "1024"],
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
                &|d: &mut Desc| d.num_cpus = 2,
                INVALID,
                &["num_cpus: 2", "without cpus"],
            ),
            (
                &|d: &mut Desc| d.cpus = CPUS.as_ptr(),
                INVALID,
                &["num_cpus: 0", "1 or more"],
            ),
            (
                &|d: &mut Desc| (d.cpus, d.num_cpus) = (CPUS.as_ptr(), 2),
                INVALID,
                &["cpus[1]: 0", "once"],
            ),
            (
                &|d: &mut Desc| (d.cpus, d.num_cpus) = (&CPUS[1], 2),
                INVALID,
                &["cpus: 8191", "not there"],
            ),
            (
                &|d: &mut Desc| (d.cpus, d.num_cpus, d.num_threads) = (&CPUS[2], 1, 1),
                INVALID,
                &["cpus: 8191", "not there"],
            ),
            (
                &|d: &mut Desc| (d.cpus, d.num_cpus) = (&CPUS[1], 3),
                INVALID,
                &["cpus[2]: 8192", "8191"],
            ),
            (
                &|d: &mut Desc| {
                    (d.cpus, d.num_cpus) = (CPUS.as_ptr().wrapping_byte_add(1), 1);
                },
                INVALID,
                &["cpus", "multiple of 4"],
            ),
            (
                &|d: &mut Desc| (d.parallel_for, d.num_threads) = (RUN_NOTHING, 0),
                INVALID,
                &["num_threads: 0", "parallel_for"],
            ),
            (
                &|d: &mut Desc| (d.parallel_for, d.num_threads) = (RUN_NOTHING, 1025),
                INVALID,
                &["num_threads", "1025", "1024"],
            ),
            (
                &|d: &mut Desc| {
                    d.parallel_for = RUN_NOTHING;
                    (d.cpus, d.num_cpus) = (CPUS.as_ptr(), 1);
                },
                INVALID,
                &["cpus", "parallel_for"],
            ),
            (
                &|d: &mut Desc| (d.parallel_for, d.num_cpus) = (RUN_NOTHING, 1),
                INVALID,
                &["num_cpus: 1"],
            ),
            (
                &|d: &mut Desc| d.parallel_for_user = null_mut::<c_void>().wrapping_byte_add(8),
                INVALID,
                &["parallel_for_user", "0x8"],
            ),
            (
                &|d: &mut Desc| d.reserved = 7,
                UNKNOWN,
                &["folio_context_desc.reserved", "7"],
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

/// What only threads of a CPU context have is refused elsewhere.
#[test]
fn context_descs_without_threads() {
    type Desc = folio_context_desc;
    type Set = fn(&mut Desc);
    let fields: [(Set, &str); 4] = [
        (|d| d.cpus = CPUS.as_ptr(), "cpus"),
        (|d| d.num_cpus = 1, "num_cpus"),
        (|d| d.parallel_for = RUN_NOTHING, "parallel_for"),
        (
            |d| d.parallel_for_user = null_mut::<c_void>().wrapping_byte_add(8),
            "parallel_for_user",
        ),
    ];
    for target in [Target::Reference, Target::Cuda { ordinal: 0 }] {
        for (set, name) in fields {
            let (mut desc, mut ctx) = (c_context_desc(target), null_mut());
            set(&mut desc);
            // SAFETY: live structs; nothing is made.
            let reply = Reply::of(|err| unsafe { folio_context_create(&desc, &mut ctx, err) });
            reply.assert(&format!("{target:?}"), INVALID, &[&format!("{name}: ")]);
        }
    }
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
                &|d: &mut Desc| d.q_dtype = dtype(DType::I8),
                UNSUPPORTED,
                &["q_dtype", "int8", "float8_e4m3"],
            ),
            (
                &|d: &mut Desc| {
                    (d.q_dtype, d.kv_dtype) = (dtype(DType::F8E4M3), dtype(DType::BF16));
                },
                UNSUPPORTED,
                &["kv_dtype", "bfloat16", "float8_e4m3"],
            ),
            (
                &|d: &mut Desc| {
                    (d.q_dtype, d.kv_dtype) = (dtype(DType::F8E4M3), dtype(DType::F8E5M2));
                    d.o_dtype = dtype(DType::I32);
                },
                UNSUPPORTED,
                &["o_dtype", "int32", "float8_e4m3"],
            ),
            (
                &|d: &mut Desc| {
                    (d.q_dtype, d.kv_dtype) = (dtype(DType::F8E4M3), dtype(DType::F8E4M3));
                    d.kv_format = FOLIO_KV_FORMAT_TOKEN_HEAD_SCALES;
                },
                UNSUPPORTED,
                &["kv_format", "TOKEN_HEAD_SCALES", "float8_e4m3"],
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
                &|d: &mut Desc| d.head_dim_qk = 584,
                UNSUPPORTED,
                &["head_dim_qk", "584"],
            ),
            (
                &|d: &mut Desc| d.head_dim_vo = 12,
                UNSUPPORTED,
                &["head_dim_vo", "12"],
            ),
            (
                &|d: &mut Desc| d.head_dim_vo = 520,
                UNSUPPORTED,
                &["head_dim_vo", "520"],
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
