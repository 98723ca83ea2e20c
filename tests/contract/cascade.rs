//! Cascades with callers who err: descs, prefixes, batches, runs, and finding what is shared.

use crate::common::c_door::{Tensors, c_args, c_batch, c_cascade_desc, c_prefixes, dtype, init};
use crate::common::cascade::{Case, Data, Extra, compare};
use crate::common::memory::{HostMemory, Image, Resident};
use crate::fixture::{Context, Reply, bytes};
use crate::structs::{sizes, sizes_from};
use crate::stub::Stub;
use crate::table::{INVALID, UNSUPPORTED, check, poke};
use crate::workspaces::refuse_workspaces;
use folio::api::{BatchInput, Cascade, SharedPrefixes, Stream, Workspace};
use folio::dtype::DType;
use folio::error::Error;
use folio::ffi::*;
use folio::tensor::{Device, Tensor};
use std::ptr::{null, null_mut};
use std::sync::atomic::Ordering::SeqCst;

type Desc = folio_cascade_desc;
type Prefixes = folio_shared_prefixes;

/// Four requests over a long prefix; the first two share more. Pages of 8.
fn case() -> Case {
    let requests = [(1, 9), (2, 17), (1, 30), (1, 5)];
    Case::plain(&requests, &[(0, 4, 160), (0, 2, 240)])
}

/// A handle with its tensors and a workspace of exactly the size that it asks for.
struct Fixture {
    handle: *mut folio_cascade,
    workspace: Resident<'static>,
    data: Data<'static>,
    _context: Context,
}

impl Drop for Fixture {
    fn drop(&mut self) {
        // SAFETY: made by _create and not used afterwards.
        unsafe { folio_cascade_destroy(self.handle) }
    }
}

impl Fixture {
    fn unplanned(case: &Case) -> Fixture {
        let context = Context::cpu();
        let (mut handle, desc) = (null_mut(), c_cascade_desc(&case.desc()));
        // SAFETY: live structs and a live context.
        Reply::of(|err| unsafe { folio_cascade_create(context.0, &desc, &mut handle, err) })
            .assert_ok("create");
        let mut fixture = Fixture {
            handle,
            workspace: bytes(0),
            data: Data::new(&HostMemory, case),
            _context: context,
        };
        fixture.workspace = bytes(fixture.info().host_bytes as i64);
        fixture
    }

    /// With a plan that shares.
    fn new(case: &Case) -> Fixture {
        let fixture = Fixture::unplanned(case);
        fixture.plan_as(|_, _| {}).assert_ok("plan");
        assert_eq!(fixture.shares(), 1);
        fixture
    }

    fn info(&self) -> folio_workspace_info {
        // SAFETY: integers behind the size.
        let mut info: folio_workspace_info = unsafe { init() };
        // SAFETY: a live handle and a live struct.
        Reply::of(|err| unsafe { folio_cascade_workspace(self.handle, &mut info, err) })
            .assert_ok("workspace");
        info
    }

    fn workspace(&self) -> folio_workspace {
        let memory = self.workspace.tensor();
        folio_workspace {
            struct_size: size_of::<folio_workspace>() as u32,
            flags: 0,
            device: null_mut(),
            device_bytes: 0,
            host: memory.address() as *mut _,
            host_bytes: memory.extent(0) as u64,
        }
    }

    fn plan(
        &self,
        batch: *const folio_batch,
        prefixes: *const Prefixes,
        workspace: *const folio_workspace,
    ) -> Reply {
        // SAFETY: live structs or NULL, and a handle that nobody else uses.
        Reply::of(|err| unsafe {
            folio_cascade_plan(self.handle, batch, prefixes, workspace, null_mut(), err)
        })
    }

    /// Plans the right batch and prefixes after a change.
    fn plan_as(&self, change: impl FnOnce(&mut folio_batch, &mut Prefixes)) -> Reply {
        let tensors = Tensors::default();
        let mut batch = c_batch(&self.data.batch(), &tensors);
        let mut prefixes = c_prefixes(&self.data.prefixes());
        change(&mut batch, &mut prefixes);
        self.plan(&batch, &prefixes, &self.workspace())
    }

    fn reset_outputs(&self) {
        self.data.o.reset();
        self.data.lse.iter().for_each(Resident::reset);
    }

    fn is_untouched(&self) -> bool {
        self.data.o.is_untouched() && self.data.lse.iter().all(Resident::is_untouched)
    }

    fn run(&self, args: *const folio_attention_args) -> Reply {
        // SAFETY: a live handle, and live structs or NULL.
        Reply::of(|err| unsafe { folio_cascade_run(self.handle, args, null_mut(), err) })
    }

    /// Runs the right arguments after a change; a refused run writes nothing.
    fn run_as(&self, change: impl FnOnce(&mut folio_attention_args)) -> Reply {
        let tensors = Tensors::default();
        let mut args = c_args(&self.data.args(), &tensors);
        change(&mut args);
        self.reset_outputs();
        let reply = self.run(&args);
        assert!(reply.status == FOLIO_OK || self.is_untouched());
        reply
    }

    /// What the right arguments give with the plan in force.
    fn output(&self) -> Vec<u8> {
        self.run_as(|_| {}).assert_ok("run");
        self.data.o.current().bytes
    }

    fn shares(&self) -> u32 {
        let mut shares = 7;
        // SAFETY: a live handle and a number.
        Reply::of(|err| unsafe { folio_cascade_shares(self.handle, &mut shares, err) })
            .assert_ok("shares");
        shares
    }
}

/// Makes a handle, which must not come into being where the reply is a refusal, and ends it.
fn create(context: &Context, desc: *const Desc) -> Reply {
    let mut handle = null_mut();
    // SAFETY: live structs or NULL.
    let reply = Reply::of(|err| unsafe { folio_cascade_create(context.0, desc, &mut handle, err) });
    assert_eq!(handle.is_null(), reply.status != FOLIO_OK);
    // SAFETY: NULL or new.
    unsafe { folio_cascade_destroy(handle) };
    reply
}

#[test]
fn descs() {
    let context = Context::cpu();
    let right = c_cascade_desc(&case().desc());
    let flags = FOLIO_PLAN_GRAPH
        | FOLIO_PLAN_BATCH_INVARIANT
        | FOLIO_PLAN_FP8_PRODUCTS
        | FOLIO_PLAN_MASK_ITEMS;
    sizes_from("folio_cascade_desc", &right, 72, flags, |desc| {
        create(&context, desc)
    });
    for max_shared_levels in [0, 16] {
        let desc = Desc {
            max_shared_levels,
            ..right
        };
        create(&context, &desc).assert_ok("levels");
    }
    let most = i32::MAX as u32;
    check(
        &right,
        |desc| create(&context, desc),
        &[
            (
                &|d: &mut Desc| d.max_shared_levels = 17,
                UNSUPPORTED,
                &["max_shared_levels", "17", "16"],
            ),
            (
                &|d: &mut Desc| d.max_shared_levels = u32::MAX,
                UNSUPPORTED,
                &["max_shared_levels", "4294967295"],
            ),
            (
                &|d: &mut Desc| d.max_kv_len = most - 4,
                UNSUPPORTED,
                &["max_kv_len", "2147483643", "max_num_tokens 5"],
            ),
            (
                &|d: &mut Desc| (d.max_kv_len, d.max_num_tokens) = (1 << 30, 1 << 30),
                UNSUPPORTED,
                &["max_kv_len", "1073741824", "max_num_tokens 1073741824"],
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
                &|d: &mut Desc| d.kv_layout = 2,
                INVALID,
                &["kv_layout", "2"],
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
                &|d: &mut Desc| d.max_num_pages = 1 << 31,
                INVALID,
                &["max_num_pages", "2147483648"],
            ),
        ],
    );
}

#[test]
fn types_and_heads_of_descs() {
    let context = Context::cpu();
    let unknown = folio_dtype {
        code: 77,
        bits: 8,
        lanes: 1,
    };
    check(
        &c_cascade_desc(&case().desc()),
        |desc| create(&context, desc),
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
                &|d: &mut Desc| d.kv_dtype = dtype(DType::F16),
                UNSUPPORTED,
                &["kv_dtype", "float16"],
            ),
            (
                &|d: &mut Desc| d.o_dtype = dtype(DType::BF16),
                UNSUPPORTED,
                &["o_dtype", "bfloat16"],
            ),
            (
                &|d: &mut Desc| d.num_qo_heads = 0,
                INVALID,
                &["num_qo_heads", "0"],
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
                &|d: &mut Desc| d.head_dim_qk = 0,
                UNSUPPORTED,
                &["head_dim_qk", "0"],
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
        ],
    );
}

/// Which levels a window leaves keys of, only its runs know.
#[test]
fn windows_are_not_planned_for() {
    let (fixture, tensors) = (Fixture::new(&case()), Tensors::default());
    let mut batch = c_batch(&fixture.data.batch(), &tensors);
    (batch.flags, batch.window_left) = (FOLIO_BATCH_WINDOW, 5);
    let prefixes = c_prefixes(&fixture.data.prefixes());
    let reply = fixture.plan(&batch, &prefixes, &fixture.workspace());
    reply.assert("a window", UNSUPPORTED, &["window_left", "5", "cascades"]);
}

#[test]
fn struct_sizes() {
    let (fixture, tensors) = (Fixture::new(&case()), Tensors::default());
    let batch = c_batch(&fixture.data.batch(), &tensors);
    let prefixes = c_prefixes(&fixture.data.prefixes());
    let workspace = fixture.workspace();
    sizes("folio_shared_prefixes", &prefixes, 0, |prefixes| {
        fixture.plan(&batch, prefixes, &workspace)
    });
    sizes_from("folio_batch", &batch, 64, FOLIO_BATCH_WINDOW, |batch| {
        fixture.plan(batch, &prefixes, &workspace)
    });
    sizes("folio_workspace", &workspace, 0, |workspace| {
        fixture.plan(&batch, &prefixes, workspace)
    });
}

#[test]
fn nulls() {
    let refused = |reply: Reply, name: &str| reply.assert(name, INVALID, &[name, "NULL"]);
    let (fixture, desc) = (Fixture::new(&case()), c_cascade_desc(&case().desc()));
    let (prefixes, workspace) = (c_prefixes(&fixture.data.prefixes()), fixture.workspace());
    refused(fixture.plan(null(), &prefixes, &workspace), "folio_batch");
    refused(fixture.run(null()), "folio_attention_args");
    refused(create(&fixture._context, null()), "folio_cascade_desc");
    let mut handle = null_mut();
    // SAFETY: NULL, which every entry refuses, and live structs and handles.
    unsafe {
        refused(
            Reply::of(|err| folio_cascade_create(null(), &desc, &mut handle, err)),
            "ctx",
        );
        refused(
            Reply::of(|err| folio_cascade_create(fixture._context.0, &desc, null_mut(), err)),
            "out",
        );
        refused(
            Reply::of(|err| folio_cascade_workspace(null(), null_mut(), err)),
            "handle",
        );
        refused(
            Reply::of(|err| folio_cascade_workspace(fixture.handle, null_mut(), err)),
            "folio_workspace_info",
        );
        refused(
            Reply::of(|err| {
                folio_cascade_plan(null_mut(), null(), null(), null(), null_mut(), err)
            }),
            "handle",
        );
        refused(
            Reply::of(|err| folio_cascade_run(null(), null(), null_mut(), err)),
            "handle",
        );
        refused(
            Reply::of(|err| folio_cascade_shares(null(), null_mut(), err)),
            "handle",
        );
        refused(
            Reply::of(|err| folio_cascade_shares(fixture.handle, null_mut(), err)),
            "out",
        );
        assert!(folio_cascade_kernel(null()).is_null());
        assert!(!folio_cascade_kernel(fixture.handle).is_null());
        folio_cascade_destroy(null_mut());
        // Without a report there is a status all the same.
        let status = folio_cascade_run(fixture.handle, null(), null_mut(), null_mut());
        assert_eq!(status, INVALID);
    }
    assert!(handle.is_null() && fixture.is_untouched());
}

/// No prefixes at all are none.
#[test]
fn prefixes_may_be_null() {
    let (fixture, tensors) = (Fixture::new(&case()), Tensors::default());
    let batch = c_batch(&fixture.data.batch(), &tensors);
    let none = c_prefixes(&SharedPrefixes::default());
    for prefixes in [null(), &raw const none] {
        fixture
            .plan(&batch, prefixes, &fixture.workspace())
            .assert_ok("plan");
        assert_eq!(fixture.shares(), 0);
        fixture.run_as(|_| {}).assert_ok("run");
        assert_eq!(compare(&case(), &fixture.data), Ok(()));
    }
}

/// First requests, ends and keys of prefixes, and words of the message.
type Stated<'a> = ([&'a [i32]; 3], &'a [&'a str]);

#[test]
fn prefixes() {
    let fixture = Fixture::new(&case());
    let before = fixture.output();
    let least = i32::MIN;
    let rows: &[Stated<'_>] = &[
        ([&[-1], &[2], &[8]], &["request_begin[0]", "-1", "0 to 4"]),
        ([&[5], &[5], &[8]], &["request_begin[0]", "5", "0 to 4"]),
        ([&[0, 9], &[4, 9], &[8, 8]], &["request_begin[1]", "9"]),
        (
            [&[2, 1], &[4, 2], &[8, 8]],
            &["request_begin[1]", "1", "behind 2"],
        ),
        ([&[2], &[1], &[8]], &["request_end[0]", "1", "2 to 4"]),
        ([&[0], &[5], &[8]], &["request_end[0]", "5", "0 to 4"]),
        ([&[1], &[least], &[8]], &["request_end[0]", "-2147483648"]),
        (
            [&[0, 1], &[2, 3], &[8, 16]],
            &["request_end[1]", "3", "up to 2"],
        ),
        // The wider one comes first.
        (
            [&[0, 0], &[2, 4], &[16, 8]],
            &["request_end[1]", "4", "up to 2"],
        ),
        (
            [&[0, 0, 1], &[4, 2, 3], &[8, 16, 24]],
            &["request_end[2]", "3", "up to 2"],
        ),
        ([&[0], &[4], &[-8]], &["kv_len[0]", "-8"]),
        (
            [&[0, 0], &[4, 2], &[8, least]],
            &["kv_len[1]", "-2147483648"],
        ),
    ];
    for ([request_begin, request_end, kv_len], words) in rows {
        let stated = c_prefixes(&SharedPrefixes {
            common_prefix_len: 0,
            request_begin,
            request_end,
            kv_len,
        });
        let reply = fixture.plan_as(|_, prefixes| *prefixes = stated);
        reply.assert("plan", INVALID, words);
        assert_eq!(fixture.shares(), 1, "{words:?}: the plan before is gone");
        assert!(fixture.output() == before, "{words:?}: another result");
    }
}

#[test]
fn fields_of_prefixes() {
    let fixture = Fixture::new(&case());
    let right = c_prefixes(&fixture.data.prefixes());
    check(
        &right,
        |stated| {
            let reply = fixture.plan_as(|_, prefixes| *prefixes = *stated);
            assert_eq!(fixture.shares(), 1);
            reply
        },
        &[
            (
                &|p: &mut Prefixes| p.common_prefix_len = 640,
                INVALID,
                &["common_prefix_len", "640", "num_prefixes 2"],
            ),
            (
                &|p: &mut Prefixes| p.request_begin = null(),
                INVALID,
                &["request_begin", "NULL", "2"],
            ),
            (
                &|p: &mut Prefixes| p.request_end = null(),
                INVALID,
                &["request_end", "NULL", "2"],
            ),
            (
                &|p: &mut Prefixes| p.kv_len = null(),
                INVALID,
                &["kv_len", "NULL", "2"],
            ),
            (
                &|p: &mut Prefixes| p.kv_len = p.kv_len.wrapping_byte_add(2),
                INVALID,
                &["kv_len", "multiple of 4"],
            ),
        ],
    );
}

/// What is within its limits is accepted, though nobody has these keys, or these requests.
#[test]
fn prefixes_at_the_limits() {
    let fixture = Fixture::new(&case());
    let rows: &[[&[i32]; 3]] = &[
        [&[4], &[4], &[8]],
        [&[0], &[0], &[0]],
        [&[0, 4], &[4, 4], &[0, i32::MAX]],
        [&[0, 0], &[4, 4], &[1280, 8]],
    ];
    for [request_begin, request_end, kv_len] in rows {
        let stated = c_prefixes(&SharedPrefixes {
            common_prefix_len: 0,
            request_begin,
            request_end,
            kv_len,
        });
        let reply = fixture.plan_as(|_, prefixes| *prefixes = stated);
        reply.assert_ok("plan");
        fixture.output();
        assert_eq!(compare(&case(), &fixture.data), Ok(()));
    }
    let all = |_: &mut folio_batch, prefixes: &mut Prefixes| {
        (prefixes.num_prefixes, prefixes.common_prefix_len) = (0, 1280);
        (prefixes.request_begin, prefixes.request_end) = (null(), null());
        prefixes.kv_len = null();
    };
    fixture.plan_as(all).assert_ok("plan");
    assert_eq!(fixture.shares(), 1);
    fixture.output();
    assert_eq!(compare(&case(), &fixture.data), Ok(()));
}

#[test]
fn batches() {
    let fixture = Fixture::new(&case());
    let before = fixture.output();
    let kept = |reply: Reply, words: &[&str]| {
        reply.assert("plan", INVALID, words);
        assert_eq!(fixture.shares(), 1, "{words:?}: the plan before is gone");
        assert!(fixture.output() == before, "{words:?}: another result");
    };
    let tensors = Tensors::default();
    let right = c_batch(&fixture.data.batch(), &tensors);
    let lens = [1929, 1937, 1310, 1285];
    for (at, value, words) in [
        (0, -1, &["kv_len[0]", "-1"][..]),
        (1, 1938, &["kv_len[1]", "1938", "max_kv_len"]),
    ] {
        poke(right.kv_len, at, value);
        kept(fixture.plan_as(|_, _| {}), words);
        poke(right.kv_len, at, lens[at]);
    }
    kept(
        fixture.plan_as(|batch, _| batch.block_table = null()),
        &["kv_indptr", "NULL"],
    );
    kept(
        fixture.plan_as(|batch, _| batch.kv_len = null()),
        &["kv_len", "NULL"],
    );
    kept(
        fixture.plan_as(|batch, _| batch.qo_indptr = null()),
        &["qo_indptr", "NULL"],
    );
}

/// Keys that a request does not have are not shared: where the first one has no rows and few keys, the pages are those of
/// the next.
#[test]
fn an_idle_request_may_be_the_first_of_a_prefix() {
    let case = Case::plain(&[(0, 4), (1, 9), (2, 17), (1, 30), (1, 5)], &[(0, 5, 160)]);
    let fixture = Fixture::new(&case);
    for kv_len in [0, 4, 900] {
        let idle = |batch: &mut folio_batch, _: &mut Prefixes| {
            poke(batch.kv_len, 0, kv_len);
            poke(batch.block_table, 0, 3);
        };
        fixture.plan_as(idle).assert_ok("plan");
        fixture.output();
        assert_eq!(compare(&case, &fixture.data), Ok(()), "{kv_len} keys");
    }
}

#[test]
fn a_plan_that_fails_in_the_backend_leaves_the_one_before() {
    let stub = Stub::new(Device::Cpu);
    let fails = stub.fails.clone();
    let (context, data) = (stub.context(), Data::new(&HostMemory, &case()));
    let mut handle = Cascade::new(&context, case().desc()).unwrap();
    let plan = |handle: &mut Cascade| {
        let memory = Workspace::default();
        let stream = Stream::default();
        handle.plan(&data.batch(), &data.prefixes(), &memory, (0, 0), stream)
    };
    assert_eq!(plan(&mut handle), Ok(()));
    let before = handle.shares();
    fails.store(true, SeqCst);
    assert!(matches!(plan(&mut handle), Err(Error::Driver(_))));
    assert_eq!(handle.shares(), before, "the plan before is gone");
    assert_eq!(handle.run(&data.args(), Stream::default()), Ok(()));
}

#[test]
fn nothing_before_a_plan() {
    let fixture = Fixture::unplanned(&case());
    let not_planned = |reply: Reply| reply.assert("early", FOLIO_ERR_NOT_PLANNED, &["plan"]);
    let shares = |out: *mut u32| {
        // SAFETY: a live handle, and a number or NULL.
        Reply::of(|err| unsafe { folio_cascade_shares(fixture.handle, out, err) })
    };
    let mut out = 7;
    not_planned(fixture.run_as(|_| {}));
    not_planned(shares(&mut out));
    let refused = fixture.plan_as(|batch, _| batch.block_table = null());
    refused.assert("plan", INVALID, &["kv_indptr"]);
    not_planned(fixture.run_as(|_| {}));
    not_planned(shares(&mut out));
    assert_eq!(out, 7, "written although refused");
    fixture.plan_as(|_, _| {}).assert_ok("plan");
    fixture.run_as(|_| {}).assert_ok("run");
}

#[test]
fn runs() {
    for extra in [Extra::Nothing, Extra::Window] {
        let fixture = Fixture::new(&Case { extra, ..case() });
        let before = fixture.output();
        let refused = |reply: Reply, status, words: &[&str]| reply.assert("run", status, words);
        refused(
            fixture.run_as(|args| args.k_rope = args.k),
            UNSUPPORTED,
            &["k_rope", "NULL"],
        );
        refused(
            fixture.run_as(|args| args.sm_scale = f32::NAN),
            INVALID,
            &["sm_scale", "NaN"],
        );
        refused(
            fixture.run_as(|args| args.mask_mode = 9),
            INVALID,
            &["mask_mode", "9"],
        );
        refused(
            fixture.run_as(|args| args.q = null()),
            INVALID,
            &["q", "NULL"],
        );
        assert!(fixture.output() == before);
    }
}

/// A page id beyond the cache is found before anything is written.
#[test]
fn page_ids() {
    for extra in [Extra::Nothing, Extra::Window] {
        let fixture = Fixture::new(&Case { extra, ..case() });
        let plan_with = |id: i32| {
            let poked = |batch: &mut folio_batch, _: &mut Prefixes| poke(batch.block_table, 0, id);
            fixture.plan_as(poked)
        };
        plan_with(99_999).assert_ok("plan");
        let reply = fixture.run_as(|_| {});
        reply.assert("run", FOLIO_ERR_SHAPE, &["k:", "[100000 or more"]);
        plan_with(-3).assert("plan", INVALID, &["block_table[0][0]", "-3"]);
    }
}

#[test]
fn workspaces() {
    let (fixture, tensors) = (Fixture::new(&case()), Tensors::default());
    let before = fixture.output();
    let batch = c_batch(&fixture.data.batch(), &tensors);
    let prefixes = c_prefixes(&fixture.data.prefixes());
    let (right, info) = (fixture.workspace(), fixture.info());
    assert!(info.host_bytes > 0 && info.device_bytes == 0 && info.alignment > 1);
    refuse_workspaces(&right, &info, |workspace| {
        let reply = fixture.plan(&batch, &prefixes, workspace);
        assert!(fixture.output() == before, "the plan before is gone");
        reply
    });
}

/// An int32 tensor of which nobody reads an element.
fn unread(device: Device, shape: &[i64]) -> Option<Tensor> {
    // SAFETY: the stub reads nothing, and lengths of devices are not looked at.
    unsafe { Tensor::new("x", 4096 as *mut u8, device, DType::I32, shape, None) }.ok()
}

/// Prefixes are on the host wherever the lengths are: they are checked, and say what may be shared.
#[test]
fn lengths_on_a_device() {
    let device = Device::Cuda(0);
    let batch = BatchInput {
        qo_indptr: unread(device, &[5]),
        kv_len: unread(device, &[4]),
        block_table: unread(device, &[4, 300]),
        ..BatchInput::default()
    };
    let plan = |of: Device, case: &Case, prefixes: &SharedPrefixes<'_>| {
        let mut handle = Cascade::new(&Stub::new(of).context(), case.desc()).unwrap();
        let memory = Workspace::default();
        handle.plan(&batch, prefixes, &memory, (0, 0), Stream::default())?;
        handle.shares()
    };
    let common = |common_prefix_len| SharedPrefixes {
        common_prefix_len,
        ..SharedPrefixes::default()
    };
    for graph in [false, true] {
        let case = Case { graph, ..case() };
        assert_eq!(plan(device, &case, &common(0)), Ok(false));
        assert_eq!(plan(device, &case, &common(640)), Ok(true));
        let invariant = Case {
            batch_invariant: true,
            ..case.clone()
        };
        assert_eq!(plan(device, &invariant, &common(640)), Ok(false));
        let too_many = SharedPrefixes {
            request_begin: &[0],
            request_end: &[5],
            kv_len: &[640],
            ..common(0)
        };
        let refused = plan(device, &case, &too_many);
        let named = |message: &str| message.contains("request_end[0]: 5");
        assert!(
            matches!(&refused, Err(Error::InvalidArgument(message)) if named(message)),
            "{refused:?}"
        );
        let elsewhere = plan(Device::Cpu, &case, &common(640));
        assert!(
            matches!(elsewhere, Err(Error::DeviceMismatch(_))),
            "{elsewhere:?}"
        );
    }
}

/// The arguments of finding what a batch shares, and room for three prefixes.
struct Find {
    data: Data<'static>,
    columns: [Resident<'static>; 3],
}

/// What outputs hold before a call.
const UNWRITTEN: i32 = -7;

type FindArgs = folio_find_shared_prefixes_args;

impl Find {
    fn new() -> Find {
        Find {
            data: Data::new(&HostMemory, &case()),
            columns: [0; 3].map(|_| ints(&[UNWRITTEN; 3])),
        }
    }

    /// Calls with the right arguments after a change; a refused call writes nothing.
    fn call_as(&self, change: impl FnOnce(&mut FindArgs)) -> (Reply, u32) {
        let tensors = Tensors::default();
        let batch = c_batch(&self.data.batch(), &tensors);
        self.call(&batch, change)
    }

    fn call(&self, batch: *const folio_batch, change: impl FnOnce(&mut FindArgs)) -> (Reply, u32) {
        let mut count = UNWRITTEN as u32;
        let column = |i: usize| self.columns[i].tensor().address() as *mut i32;
        let mut args = FindArgs {
            struct_size: size_of::<FindArgs>() as u32,
            flags: 0,
            page_size: 8,
            capacity: 3,
            batch,
            request_begin: column(0),
            request_end: column(1),
            kv_len: column(2),
            num_prefixes: &mut count,
        };
        self.columns.iter().for_each(Resident::reset);
        change(&mut args);
        // SAFETY: live structs and arrays, or NULL.
        let reply = Reply::of(|err| unsafe { folio_find_shared_prefixes(&args, err) });
        assert!(reply.status == FOLIO_OK || count == UNWRITTEN as u32 && self.is_untouched());
        (reply, count)
    }

    fn is_untouched(&self) -> bool {
        self.columns.iter().all(Resident::is_untouched)
    }

    /// So many prefixes as the last call wrote them: first requests, ends, keys.
    fn found(&self, count: u32) -> [Vec<i32>; 3] {
        self.columns.each_ref().map(|column| {
            let image = column.current();
            let numbers = (0..i64::from(count)).map(|i| image.value(&[i]) as i32);
            numbers.collect()
        })
    }
}

fn ints(values: &[i32]) -> Resident<'static> {
    let image = Image::of_i32(&[values.len() as i64], values);
    Resident::new(&HostMemory, image)
}

#[test]
fn finding() {
    let find = Find::new();
    let both = [vec![0, 0], vec![4, 2], vec![1280, 1920]];
    for capacity in [2, 3] {
        let (reply, count) = find.call_as(|args| args.capacity = capacity);
        reply.assert_ok("find");
        assert_eq!(find.found(count), both);
    }
    // What was found is what a plan takes.
    let fixture = Fixture::new(&case());
    let before = fixture.output();
    let [request_begin, request_end, kv_len] = &both;
    let stated = c_prefixes(&SharedPrefixes {
        common_prefix_len: 0,
        request_begin,
        request_end,
        kv_len,
    });
    fixture
        .plan_as(|_, prefixes| *prefixes = stated)
        .assert_ok("plan");
    assert!(fixture.output() == before);
    // No arrays are needed where there is nothing to find.
    let tensors = Tensors::default();
    let alone = Data::new(&HostMemory, &Case::plain(&[(1, 9), (1, 30)], &[]));
    let (reply, count) = find.call(&c_batch(&alone.batch(), &tensors), |args| {
        args.capacity = 0;
        (args.request_begin, args.request_end, args.kv_len) = (null_mut(), null_mut(), null_mut());
    });
    reply.assert_ok("find");
    assert_eq!(count, 0);
}

#[test]
fn finding_is_refused() {
    let find = Find::new();
    type Set = fn(&mut FindArgs);
    let rows: &[(Set, &[&str])] = &[
        (|a| a.capacity = 1, &["capacity", "1", "2 prefixes"]),
        (|a| a.capacity = 0, &["capacity", "0", "2 prefixes"]),
        (|a| a.page_size = 0, &["page_size", "0"]),
        (|a| a.page_size = u32::MAX, &["page_size", "4294967295"]),
        (|a| a.batch = null(), &["folio_batch", "NULL"]),
        (|a| a.request_begin = null_mut(), &["request_begin", "NULL"]),
        (|a| a.request_end = null_mut(), &["request_end", "NULL"]),
        (|a| a.kv_len = null_mut(), &["kv_len", "NULL"]),
        (|a| a.num_prefixes = null_mut(), &["num_prefixes", "NULL"]),
        (
            |a| a.request_end = a.request_end.wrapping_byte_add(1),
            &["request_end", "multiple of 4"],
        ),
    ];
    for (change, words) in rows {
        find.call_as(change).0.assert("find", INVALID, words);
    }
    // SAFETY: NULL, which is refused.
    let null_args = Reply::of(|err| unsafe { folio_find_shared_prefixes(null(), err) });
    null_args.assert(
        "find",
        INVALID,
        &["folio_find_shared_prefixes_args", "NULL"],
    );
}

#[test]
fn finding_in_wrong_batches() {
    let (find, tensors) = (Find::new(), Tensors::default());
    let right = c_batch(&find.data.batch(), &tensors);
    let refused = |batch: folio_batch, words: &[&str]| {
        let (reply, _) = find.call(&batch, |_| {});
        reply.assert("find", INVALID, words);
    };
    for (at, value, words) in [
        (0, -1, &["kv_len[0]", "-1"][..]),
        (3, 99_999, &["kv_len[3]", "99999"]),
    ] {
        let before = [1929, 1937, 1310, 1285][at];
        poke(right.kv_len, at, value);
        refused(right, words);
        poke(right.kv_len, at, before);
    }
    let without = folio_batch {
        block_table: null(),
        ..right
    };
    refused(without, &["kv_indptr", "NULL"]);
    find.call(&right, |_| {}).0.assert_ok("find");
}

/// Nothing is read from a device.
#[test]
fn finding_on_a_device() {
    let find = Find::new();
    for name in ["kv_len", "block_table"] {
        let tensors = Tensors::default();
        let batch = c_batch(&find.data.batch(), &tensors);
        let tensor = match name {
            "kv_len" => batch.kv_len,
            _ => batch.block_table,
        };
        // SAFETY: a tensor of this test, which nobody else uses.
        unsafe { (*tensor.cast_mut()).device_type = FOLIO_DEVICE_CUDA };
        let (reply, _) = find.call(&batch, |_| {});
        reply.assert("find", FOLIO_ERR_DEVICE_MISMATCH, &[name, "cuda:0"]);
    }
}

#[test]
fn sizes_of_finding() {
    let (find, tensors) = (Find::new(), Tensors::default());
    let batch = c_batch(&find.data.batch(), &tensors);
    let column = |i: usize| find.columns[i].tensor().address() as *mut i32;
    let mut count = 0;
    let args = FindArgs {
        struct_size: size_of::<FindArgs>() as u32,
        flags: 0,
        page_size: 8,
        capacity: 3,
        batch: &batch,
        request_begin: column(0),
        request_end: column(1),
        kv_len: column(2),
        num_prefixes: &mut count,
    };
    sizes("folio_find_shared_prefixes_args", &args, 0, |args| {
        // SAFETY: live structs and arrays.
        Reply::of(|err| unsafe { folio_find_shared_prefixes(args, err) })
    });
}
