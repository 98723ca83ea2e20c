//! The MLA handle with callers who err: NULL, struct sizes, every number of the desc and of a run, every tensor.

use crate::common::c_door::{Tensors, c_batch, c_mla_args, c_mla_desc, dtype, init};
use crate::common::instance::Step;
use crate::common::memory::{HostMemory, Resident};
use crate::common::mla::{Cache, MlaLayer, MlaProblem, Queries};
use crate::common::problem::TableForm;
use crate::fixture::{Context, Reply, bytes};
use crate::structs::sizes;
use crate::table::{INVALID, UNKNOWN, UNSUPPORTED, check};
use crate::tensors::Dim::{AtLeast, Exact};
use crate::tensors::{Field, input, optional, optional_output, output, walk};
use crate::workspaces::refuse_workspaces;
use folio::dtype::DType;
use folio::ffi::*;
use folio::problem::LogBase;
use std::mem::offset_of;
use std::ptr::{null, null_mut};

/// fp16 queries of three heads over pages of four, in parts of 32 and 8.
fn plain(cache: Cache) -> MlaProblem {
    let form = TableForm::BlockTable { spare_columns: 0 };
    let problem = MlaProblem::plain(&[(2, 9), (1, 4), (3, 6)])
        .of(DType::F16)
        .heads(3)
        .pages(4, form);
    let mut problem = match cache {
        Cache::DsMla => problem,
        _ => problem.dims(32, 8),
    };
    problem.batch.layer.lse = Some(LogBase::Two);
    problem.tensors(Queries::Two, cache)
}

/// A planned handle with its tensors.
struct Fixture {
    handle: *mut folio_mla,
    layer: MlaLayer<'static>,
    step: Step<'static>,
    workspace: Resident<'static>,
    _context: Context,
}

impl Fixture {
    fn unplanned(problem: &MlaProblem) -> Fixture {
        let context = Context::cpu();
        let (desc, mut handle) = (c_mla_desc(&problem.desc()), null_mut());
        // SAFETY: live structs and a live context.
        Reply::of(|err| unsafe { folio_mla_create(context.0, &desc, &mut handle, err) })
            .assert_ok("create");
        let mut fixture = Fixture {
            handle,
            layer: MlaLayer::new(&HostMemory, problem),
            step: Step::new(&HostMemory, &problem.batch),
            workspace: bytes(0),
            _context: context,
        };
        // SAFETY: integers behind the size.
        let mut info: folio_workspace_info = unsafe { init() };
        fixture.query(&mut info).assert_ok("workspace");
        fixture.workspace = bytes(info.host_bytes as i64);
        fixture
    }

    fn new(problem: &MlaProblem) -> Fixture {
        let fixture = Fixture::unplanned(problem);
        let tensors = Tensors::default();
        let batch = c_batch(&fixture.step.input(), &tensors);
        fixture
            .plan(&batch, &fixture.given_workspace())
            .assert_ok("plan");
        fixture
    }

    fn given_workspace(&self) -> folio_workspace {
        folio_workspace {
            struct_size: size_of::<folio_workspace>() as u32,
            flags: 0,
            device: null_mut(),
            device_bytes: 0,
            host: self.workspace.tensor().address() as *mut _,
            host_bytes: self.workspace.image().view.shape[0] as u64,
        }
    }

    fn query(&self, info: *mut folio_workspace_info) -> Reply {
        // SAFETY: a live handle and the caller's struct.
        Reply::of(|err| unsafe { folio_mla_workspace(self.handle, info, err) })
    }

    fn plan(&self, batch: *const folio_batch, workspace: *const folio_workspace) -> Reply {
        // SAFETY: a live handle that nobody else uses, and the caller's structs.
        Reply::of(|err| unsafe { folio_mla_plan(self.handle, batch, workspace, null_mut(), err) })
    }

    fn run(&self, args: *const folio_mla_args) -> Reply {
        self.layer.reset_outputs();
        // SAFETY: a live handle and the caller's struct.
        let reply = Reply::of(|err| unsafe { folio_mla_run(self.handle, args, null_mut(), err) });
        assert!(reply.status == FOLIO_OK || self.layer.is_untouched());
        reply
    }

    fn args(&self, tensors: &Tensors) -> folio_mla_args {
        c_mla_args(&self.layer.input(), tensors)
    }
}

impl Drop for Fixture {
    fn drop(&mut self) {
        // SAFETY: made by folio_mla_create, and not used afterwards.
        unsafe { folio_mla_destroy(self.handle) }
    }
}

fn create(context: &Context, desc: *const folio_mla_desc) -> Reply {
    let mut handle = null_mut();
    // SAFETY: live structs; the handle is destroyed at once.
    let reply = Reply::of(|err| unsafe { folio_mla_create(context.0, desc, &mut handle, err) });
    assert_eq!(handle.is_null(), reply.status != FOLIO_OK);
    // SAFETY: NULL or new.
    unsafe { folio_mla_destroy(handle) };
    reply
}

#[test]
fn null_pointers() {
    let context = Context::cpu();
    let desc = c_mla_desc(&plain(Cache::Records).desc());
    let mut handle = null_mut();
    let refused = |reply: Reply, name: &str| reply.assert(name, INVALID, &[name, "NULL"]);
    // SAFETY: NULL, which every entry refuses, or live structs.
    unsafe {
        let no_context = Reply::of(|err| folio_mla_create(null(), &desc, &mut handle, err));
        refused(no_context, "ctx");
        refused(create(&context, null()), "folio_mla_desc");
        refused(
            Reply::of(|err| folio_mla_create(context.0, &desc, null_mut(), err)),
            "out",
        );
        refused(
            Reply::of(|err| folio_mla_workspace(null(), null_mut(), err)),
            "mla",
        );
        let plan = |err| folio_mla_plan(null_mut(), null(), null(), null_mut(), err);
        refused(Reply::of(plan), "mla");
        let run = |err| folio_mla_run(null(), null(), null_mut(), err);
        refused(Reply::of(run), "mla");
        folio_mla_destroy(null_mut());
        assert!(folio_mla_kernel(null()).is_null());
    }
    assert!(handle.is_null());
    let fixture = Fixture::new(&plain(Cache::Records));
    refused(fixture.query(null_mut()), "folio_workspace_info");
    refused(
        fixture.plan(null(), &fixture.given_workspace()),
        "folio_batch",
    );
    refused(fixture.run(null()), "folio_mla_args");
    // SAFETY: a live handle, and a static string.
    let name = unsafe { std::ffi::CStr::from_ptr(folio_mla_kernel(fixture.handle)) };
    assert!(name.to_str().unwrap().starts_with("cpu/"));
}

/// MLA has no windows.
#[test]
fn windows_are_not_planned_for() {
    let problem = MlaProblem::plain(&[(1, 40)]).of(DType::F16).heads(3);
    let problem = problem.dims(32, 8).pages(4, TableForm::CsrLastPageLen);
    let (fixture, tensors) = (Fixture::new(&problem), Tensors::default());
    let mut batch = c_batch(&fixture.step.input(), &tensors);
    (batch.flags, batch.window_left) = (FOLIO_BATCH_WINDOW, 5);
    let reply = fixture.plan(&batch, &fixture.given_workspace());
    reply.assert("a window", UNSUPPORTED, &["window_left", "5", "MLA"]);
}

/// Missing, too small and skew workspaces leave the plan before in force.
#[test]
fn workspaces() {
    // Long enough to be split, and with room for it.
    let form = TableForm::BlockTable { spare_columns: 0 };
    let problem = MlaProblem::plain(&[(1, 4096)]).of(DType::F16).heads(3);
    let problem = problem.dims(32, 8).pages(4, form);
    let (fixture, tensors) = (Fixture::new(&problem), Tensors::default());
    let run = || {
        fixture.run(&fixture.args(&tensors)).assert_ok("run");
        fixture.layer.output()
    };
    let before = run();
    let batch = c_batch(&fixture.step.input(), &tensors);
    let right = fixture.given_workspace();
    // SAFETY: integers behind the size.
    let mut info: folio_workspace_info = unsafe { init() };
    fixture.query(&mut info).assert_ok("workspace");
    assert!(info.host_bytes > 0 && info.device_bytes == 0 && info.alignment > 1);
    refuse_workspaces(&right, &info, |workspace| {
        let reply = fixture.plan(&batch, workspace);
        assert!(run() == before, "the plan before is gone");
        reply
    });
}

#[test]
fn struct_sizes() {
    let context = Context::cpu();
    let desc = c_mla_desc(&plain(Cache::Records).desc());
    let flags = FOLIO_PLAN_GRAPH | FOLIO_PLAN_BATCH_INVARIANT;
    sizes("folio_mla_desc", &desc, flags, |desc| {
        create(&context, desc)
    });
    let fixture = Fixture::new(&plain(Cache::Two));
    let tensors = Tensors::default();
    let args = fixture.args(&tensors);
    sizes("folio_mla_args", &args, FOLIO_RUN_LSE_BASE_2, |args| {
        fixture.run(args)
    });
}

#[test]
fn running_without_a_plan() {
    let fixture = Fixture::unplanned(&plain(Cache::Records));
    let tensors = Tensors::default();
    let args = fixture.args(&tensors);
    let reply = fixture.run(&args);
    reply.assert("run", FOLIO_ERR_NOT_PLANNED, &["plan"]);
}

#[test]
fn descs() {
    type Desc = folio_mla_desc;
    let context = Context::cpu();
    let call = |desc: &Desc| create(&context, desc);
    let unknown = folio_dtype {
        code: 77,
        bits: 8,
        lanes: 1,
    };
    let absent = folio_dtype {
        code: 0,
        bits: 0,
        lanes: 0,
    };
    let most = i32::MAX as u32;
    check(
        &c_mla_desc(&plain(Cache::Records).desc()),
        call,
        &[
            (&|d: &mut Desc| d.reserved = 3, UNKNOWN, &["reserved", "3"]),
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
                &|d: &mut Desc| d.q_dtype = dtype(DType::F8E4M3),
                UNSUPPORTED,
                &["kv_dtype", "float16", "float8_e4m3"],
            ),
            (
                &|d: &mut Desc| {
                    (d.q_dtype, d.kv_dtype) = (dtype(DType::F8E5M2), dtype(DType::F8E4M3));
                    d.o_dtype = absent;
                },
                UNSUPPORTED,
                &["o_dtype", "float8_e5m2", "bfloat16"],
            ),
            (
                &|d: &mut Desc| {
                    (d.q_dtype, d.kv_dtype) = (dtype(DType::F8E4M3), dtype(DType::F8E4M3));
                    d.o_dtype = dtype(DType::F32);
                },
                UNSUPPORTED,
                &["o_dtype", "float32", "bfloat16"],
            ),
            (
                &|d: &mut Desc| {
                    (d.q_dtype, d.kv_dtype) = (dtype(DType::F8E4M3), absent);
                    d.o_dtype = dtype(DType::BF16);
                    d.cache_format = FOLIO_MLA_CACHE_FP8_DS_MLA;
                },
                UNSUPPORTED,
                &["kv_dtype", "fp8_ds_mla", "float8_e5m2"],
            ),
            (
                &|d: &mut Desc| d.kv_dtype = dtype(DType::BF16),
                UNSUPPORTED,
                &["kv_dtype", "bfloat16"],
            ),
            (
                &|d: &mut Desc| d.kv_dtype = dtype(DType::U8),
                UNSUPPORTED,
                &["kv_dtype", "uint8"],
            ),
            (
                &|d: &mut Desc| d.o_dtype = dtype(DType::F32),
                UNSUPPORTED,
                &["o_dtype", "float32"],
            ),
            (
                &|d: &mut Desc| d.o_dtype = dtype(DType::F8E4M3),
                UNSUPPORTED,
                &["o_dtype", "float8_e4m3"],
            ),
            (
                &|d: &mut Desc| d.cache_format = 2,
                INVALID,
                &["cache_format", "2"],
            ),
            (
                &|d: &mut Desc| d.cache_format = -1,
                INVALID,
                &["cache_format", "-1"],
            ),
            (
                &|d: &mut Desc| d.cache_format = FOLIO_MLA_CACHE_FP8_DS_MLA,
                UNSUPPORTED,
                &["kv_dtype", "float16"],
            ),
            (
                &|d: &mut Desc| d.num_heads = 0,
                INVALID,
                &["num_heads", "0"],
            ),
            (
                &|d: &mut Desc| d.num_heads = 4097,
                INVALID,
                &["num_heads", "4097"],
            ),
            (
                &|d: &mut Desc| d.kv_lora_rank = 0,
                UNSUPPORTED,
                &["kv_lora_rank", "0"],
            ),
            (
                &|d: &mut Desc| d.kv_lora_rank = 36,
                UNSUPPORTED,
                &["kv_lora_rank", "36"],
            ),
            (
                &|d: &mut Desc| d.kv_lora_rank = 520,
                UNSUPPORTED,
                &["kv_lora_rank", "520"],
            ),
            (
                &|d: &mut Desc| d.kv_lora_rank = u32::MAX,
                UNSUPPORTED,
                &["kv_lora_rank", "4294967295"],
            ),
            (
                &|d: &mut Desc| d.qk_rope_head_dim = 12,
                UNSUPPORTED,
                &["qk_rope_head_dim", "12"],
            ),
            (
                &|d: &mut Desc| d.qk_rope_head_dim = 72,
                UNSUPPORTED,
                &["qk_rope_head_dim", "72"],
            ),
            (
                &|d: &mut Desc| d.page_size = 0,
                INVALID,
                &["page_size", "0"],
            ),
            (
                &|d: &mut Desc| d.max_batch_size = 0,
                INVALID,
                &["max_batch_size", "0"],
            ),
            (
                &|d: &mut Desc| d.max_qo_len = u32::MAX,
                INVALID,
                &["max_qo_len", "4294967295"],
            ),
            (
                &|d: &mut Desc| d.max_num_tokens = most + 1,
                INVALID,
                &["max_num_tokens", "2147483648"],
            ),
            (
                &|d: &mut Desc| {
                    (d.max_batch_size, d.max_qo_len, d.max_num_tokens) = (most, 2, 0);
                },
                INVALID,
                &["max_num_tokens"],
            ),
            (
                &|d: &mut Desc| d.max_kv_len = 0,
                INVALID,
                &["max_kv_len", "0"],
            ),
            (
                &|d: &mut Desc| d.max_num_pages = 1 << 32,
                INVALID,
                &["max_num_pages"],
            ),
        ],
    );
    check(
        &c_mla_desc(&plain(Cache::DsMla).desc()),
        call,
        &[
            (
                &|d: &mut Desc| d.kv_dtype = dtype(DType::F8E5M2),
                UNSUPPORTED,
                &["kv_dtype", "float8_e5m2"],
            ),
            (
                &|d: &mut Desc| d.kv_lora_rank = 256,
                UNSUPPORTED,
                &["kv_lora_rank", "256", "fp8_ds_mla"],
            ),
            (
                &|d: &mut Desc| d.qk_rope_head_dim = 0,
                UNSUPPORTED,
                &["qk_rope_head_dim", "0", "fp8_ds_mla"],
            ),
        ],
    );
}

/// What 0 stands for: the type of q, one row per request, as many rows as requests have, pages for all keys.
#[test]
fn defaults() {
    let context = Context::cpu();
    for cache in [Cache::Records, Cache::DsMla] {
        let mut desc = c_mla_desc(&plain(cache).desc());
        let none = folio_dtype {
            code: 0,
            bits: 0,
            lanes: 0,
        };
        (desc.kv_dtype, desc.o_dtype) = (none, none);
        (desc.max_qo_len, desc.max_num_tokens, desc.max_num_pages) = (0, 0, 0);
        create(&context, &desc).assert_ok("a desc of defaults");
    }
}

#[test]
fn arguments() {
    type Args = folio_mla_args;
    let (nan, inf) = (f32::NAN, f32::INFINITY);
    let fixture = Fixture::new(&plain(Cache::Two));
    let tensors = Tensors::default();
    let right = fixture.args(&tensors);
    check(
        &right,
        |args| fixture.run(args),
        &[
            (
                &|a: &mut Args| a.sm_scale = 0.0,
                INVALID,
                &["sm_scale", "0"],
            ),
            (
                &|a: &mut Args| a.sm_scale = -0.0,
                INVALID,
                &["sm_scale", "0"],
            ),
            (
                &|a: &mut Args| a.sm_scale = nan,
                INVALID,
                &["sm_scale", "NaN"],
            ),
            (
                &|a: &mut Args| a.q_scale = inf,
                INVALID,
                &["q_scale", "inf"],
            ),
            (
                &|a: &mut Args| a.k_scale = -inf,
                INVALID,
                &["k_scale", "-inf"],
            ),
            (
                &|a: &mut Args| (a.sm_scale, a.q_scale) = (1e30, 1e30),
                INVALID,
                &["sm_scale"],
            ),
            (
                &|a: &mut Args| (a.sm_scale, a.k_scale) = (1e-10, 1e20),
                INVALID,
                &["k_scale", "1e20"],
            ),
            (
                &|a: &mut Args| a.mask_mode = 2,
                INVALID,
                &["mask_mode", "2"],
            ),
            (
                &|a: &mut Args| a.mask_mode = -1,
                INVALID,
                &["mask_mode", "-1"],
            ),
            (
                &|a: &mut Args| a.kv_rope = null(),
                FOLIO_ERR_SHAPE,
                &["kv", "32", "40"],
            ),
        ],
    );
    // Without a rotary part there is no tensor for one.
    let fixture = Fixture::new(&plain(Cache::Records).dims(32, 0));
    let without = fixture.args(&tensors);
    check(
        &without,
        |args| fixture.run(args),
        &[
            (
                &|a: &mut Args| a.q_rope = right.q_rope,
                INVALID,
                &["q_rope", "NULL"],
            ),
            (
                &|a: &mut Args| a.kv_rope = right.kv_rope,
                INVALID,
                &["kv_rope", "NULL"],
            ),
        ],
    );
    let fixture = Fixture::new(&plain(Cache::DsMla));
    check(
        &fixture.args(&tensors),
        |args| fixture.run(args),
        &[(
            &|a: &mut Args| a.kv_rope = right.kv_rope,
            INVALID,
            &["kv_rope", "fp8_ds_mla"],
        )],
    );
}

const Q_LATENT: Field = input(
    "q_latent",
    offset_of!(folio_mla_args, q_latent),
    &[AtLeast, Exact, Exact],
);
const Q_ROPE: Field = input(
    "q_rope",
    offset_of!(folio_mla_args, q_rope),
    &[AtLeast, Exact, Exact],
);
const KV: Field = input(
    "kv",
    offset_of!(folio_mla_args, kv),
    &[AtLeast, Exact, Exact],
);
const KV_ROPE: Field = optional(
    "kv_rope",
    offset_of!(folio_mla_args, kv_rope),
    &[AtLeast, Exact, Exact],
);
const O: Field = output("o", offset_of!(folio_mla_args, o), &[AtLeast, Exact, Exact]);
const LSE: Field = optional_output("lse", offset_of!(folio_mla_args, lse), &[AtLeast, Exact]);

#[test]
fn tensors() {
    let walk_all = |problem: &MlaProblem, fields: &[Field]| {
        let fixture = Fixture::new(problem);
        let entry = "folio_mla_run";
        walk(
            entry,
            fields,
            |tensors| fixture.args(tensors),
            |args| fixture.run(args),
            || true,
        );
    };
    walk_all(&plain(Cache::Two), &[Q_LATENT, Q_ROPE, KV, KV_ROPE, O, LSE]);
    walk_all(&plain(Cache::Records), &[Q_LATENT, Q_ROPE, KV, O, LSE]);
    walk_all(&plain(Cache::DsMla), &[KV]);
}
