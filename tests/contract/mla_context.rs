//! MLA over a cached context with callers who err.

use crate::common::c_door::{Tensors, c_batch, c_mla_context, c_mla_context_desc, dtype, init};
use crate::common::memory::{HostMemory, Resident};
use crate::common::mla_context::{Case, Data};
use crate::fixture::{Context, Reply, bytes};
use crate::structs::sizes;
use crate::table::{INVALID, UNSUPPORTED, check, poke};
use crate::tensors::Dim::{AtLeast, Exact};
use crate::tensors::{field, input, optional, output, walk};
use crate::workspaces::refuse_workspaces;
use folio::dtype::DType;
use folio::ffi::*;
use folio::problem::LogBase;
use std::mem::offset_of;
use std::ptr::{null, null_mut};

type Args = folio_mla_context_args;

/// A planned handle with its tensors.
struct Fixture {
    handle: *mut folio_mla_context,
    workspace: Resident<'static>,
    data: Data<'static>,
    _context: Context,
}

impl Drop for Fixture {
    fn drop(&mut self) {
        // SAFETY: made by _create and not used afterwards.
        unsafe { folio_mla_context_destroy(self.handle) }
    }
}

/// Two chunks for three requests.
fn case(in_steps: bool) -> Case {
    Case {
        in_steps,
        split_cache: true,
        chunk_tokens: 16,
        padded_rows: 0,
        lse: Some(LogBase::Two),
        ..Case::plain(&[(3, 12), (1, 0), (2, 9)]).of(DType::BF16)
    }
}

impl Fixture {
    fn unplanned(case: &Case) -> Fixture {
        let context = Context::cpu();
        let (mut handle, desc) = (null_mut(), c_mla_context_desc(&case.desc()));
        // SAFETY: live structs and a live context.
        Reply::of(|err| unsafe { folio_mla_context_create(context.0, &desc, &mut handle, err) })
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

    fn info(&self) -> folio_workspace_info {
        // SAFETY: integers behind the size.
        let mut info: folio_workspace_info = unsafe { init() };
        // SAFETY: a live handle and a live struct.
        Reply::of(|err| unsafe { folio_mla_context_workspace(self.handle, &mut info, err) })
            .assert_ok("workspace");
        info
    }

    fn new(in_steps: bool) -> Fixture {
        let fixture = Fixture::unplanned(&case(in_steps));
        let tensors = Tensors::default();
        let batch = c_batch(&fixture.data.batch(), &tensors);
        fixture.plan(&batch).assert_ok("plan");
        fixture
    }

    fn given_workspace(&self) -> folio_workspace {
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

    fn plan(&self, batch: *const folio_batch) -> Reply {
        self.plan_in(batch, &self.given_workspace())
    }

    fn plan_in(&self, batch: *const folio_batch, workspace: *const folio_workspace) -> Reply {
        // SAFETY: live structs or NULL, and a handle that nobody else uses.
        Reply::of(|err| unsafe {
            folio_mla_context_plan(self.handle, batch, workspace, null_mut(), err)
        })
    }

    fn args(&self, tensors: &Tensors) -> Args {
        c_mla_context(&self.data.args(), tensors)
    }

    fn run(&self, args: *const Args) -> Reply {
        self.data.reset_outputs();
        // SAFETY: a live handle, and live structs or NULL.
        Reply::of(|err| unsafe { folio_mla_context_run(self.handle, args, null_mut(), err) })
    }

    fn step(&self, step: Step, args: *const Args) -> Reply {
        self.data.reset_outputs();
        // SAFETY: as above.
        Reply::of(|err| unsafe {
            match step {
                Step::NewTokens => folio_mla_context_new_tokens(self.handle, args, null_mut(), err),
                Step::Gather(chunk) => {
                    folio_mla_context_gather(self.handle, chunk, args, null_mut(), err)
                }
                Step::Attend(chunk) => {
                    folio_mla_context_attend(self.handle, chunk, args, null_mut(), err)
                }
            }
        })
    }
}

/// Missing, too small and skew workspaces leave the plan before in force.
#[test]
fn workspaces() {
    let (fixture, tensors) = (Fixture::new(false), Tensors::default());
    let batch = c_batch(&fixture.data.batch(), &tensors);
    let (right, info) = (fixture.given_workspace(), fixture.info());
    assert!(info.host_bytes > 0 && info.device_bytes == 0 && info.alignment > 1);
    refuse_workspaces(&right, &info, |workspace| {
        let reply = fixture.plan_in(&batch, workspace);
        fixture.run(&fixture.args(&tensors)).assert_ok("run");
        assert_eq!(fixture.data.check(), Ok(()), "the plan before is gone");
        reply
    });
}

#[derive(Clone, Copy)]
enum Step {
    NewTokens,
    Gather(u32),
    Attend(u32),
}

#[test]
fn tensors_of_a_run() {
    let fields = [
        field!(input, Args, q, [AtLeast, Exact, Exact]),
        field!(input, Args, k_nope, [AtLeast, Exact, Exact]),
        field!(input, Args, k_rope, [AtLeast, Exact]),
        field!(input, Args, v, [AtLeast, Exact, Exact]),
        field!(input, Args, kv, [AtLeast, Exact, Exact]),
        field!(optional, Args, kv_rope, [Exact, Exact, Exact]),
        field!(output, Args, o, [AtLeast, Exact, Exact]),
        crate::tensors::optional_output("lse", offset_of!(Args, lse), &[AtLeast, Exact]),
    ];
    let weights = [
        crate::tensors::any_strides(field!(input, Args, w_uk, [Exact, Exact, Exact])),
        crate::tensors::any_strides(field!(input, Args, w_uv, [Exact, Exact, Exact])),
    ];
    let fixture = Fixture::new(false);
    for fields in [&fields[..], &weights] {
        walk(
            "run",
            fields,
            |tensors| fixture.args(tensors),
            |args| fixture.run(args),
            || fixture.data.is_untouched(),
        );
    }
}

#[test]
fn tensors_of_the_steps() {
    let gathered = [
        field!(output, Args, context_latent, [AtLeast, Exact]),
        field!(output, Args, context_rope, [AtLeast, Exact]),
    ];
    let attended = [
        field!(input, Args, context_k_nope, [AtLeast, Exact, Exact]),
        field!(input, Args, context_v, [AtLeast, Exact, Exact]),
    ];
    let fixture = Fixture::new(true);
    for (step, fields) in [
        (Step::Gather(0), &gathered[..]),
        (Step::Attend(0), &attended),
        (
            Step::NewTokens,
            &[field!(input, Args, q, [AtLeast, Exact, Exact])],
        ),
    ] {
        walk(
            "step",
            fields,
            |tensors| fixture.args(tensors),
            |args| fixture.step(step, args),
            || fixture.data.is_untouched(),
        );
    }
}

#[test]
fn arguments_of_a_run() {
    let (fixture, tensors) = (Fixture::new(false), Tensors::default());
    let steps = Fixture::new(true);
    let chunk = steps.args(&tensors).context_latent;
    check(
        &fixture.args(&tensors),
        |args| {
            let reply = fixture.run(args);
            assert!(reply.status == FOLIO_OK || fixture.data.is_untouched());
            reply
        },
        &[
            (
                &|a: &mut Args| a.sm_scale = f32::NAN,
                INVALID,
                &["sm_scale", "NaN"],
            ),
            (&|a: &mut Args| a.k_scale = 2.0, INVALID, &["k_scale", "2"]),
            (
                &|a: &mut Args| a.context_latent = chunk,
                INVALID,
                &["context_latent", "w_uk"],
            ),
            (
                &|a: &mut Args| (a.w_uk, a.w_uv) = (null(), null()),
                INVALID,
                &["w_uk", "NULL"],
            ),
        ],
    );
}

#[test]
fn runs_and_steps_are_not_mixed() {
    let tensors = Tensors::default();
    let (whole, steps) = (Fixture::new(false), Fixture::new(true));
    let refused = |reply: Reply| reply.assert("mixed", INVALID, &["FOLIO_MLA_CONTEXT_STEPS"]);
    refused(steps.run(&steps.args(&tensors)));
    refused(steps.run(&whole.args(&tensors)));
    for step in [Step::NewTokens, Step::Gather(0), Step::Attend(0)] {
        refused(whole.step(step, &whole.args(&tensors)));
        refused(whole.step(step, &steps.args(&tensors)));
        refused(steps.step(step, &whole.args(&tensors)));
    }
    for step in [Step::Gather(2), Step::Attend(u32::MAX)] {
        let reply = steps.step(step, &steps.args(&tensors));
        reply.assert("no such chunk", INVALID, &["chunk", "below 2"]);
    }
}

#[test]
fn batches() {
    let (fixture, tensors) = (Fixture::new(false), Tensors::default());
    let right = c_batch(&fixture.data.batch(), &tensors);
    // The last request has 2 new tokens and 9 in its context.
    let lengths = right.kv_len;
    for (at, value, words) in [
        (2, 1, &["kv_len[2]", "1", "2"][..]),
        (0, 16, &["kv_len", "16", "max_kv_len"]),
    ] {
        let before = [15, 1, 11][at];
        poke(lengths, at, value);
        fixture.plan(&right).assert("plan", INVALID, words);
        poke(lengths, at, before);
    }
    let without = folio_batch {
        block_table: null(),
        ..right
    };
    fixture
        .plan(&without)
        .assert("plan", INVALID, &["kv_indptr"]);
    // The plan before is still in force.
    fixture.run(&fixture.args(&tensors)).assert_ok("run");
    assert_eq!(fixture.data.check(), Ok(()));
    let unplanned = Fixture::unplanned(&case(false));
    let reply = unplanned.run(&unplanned.args(&tensors));
    reply.assert("run", FOLIO_ERR_NOT_PLANNED, &["plan"]);
}

/// Runs read page ids where they lie, in either type.
#[test]
fn types_of_page_ids() {
    let (fixture, tensors) = (Fixture::new(false), Tensors::default());
    let batch = c_batch(&fixture.data.batch(), &tensors);
    // SAFETY: a tensor of the test's own, whose ids nobody reads.
    unsafe { (*batch.block_table.cast_mut()).dtype.bits = 8 };
    let reply = fixture.plan(&batch);
    reply.assert("plan", FOLIO_ERR_DTYPE, &["block_table", "int8", "int64"]);
}

/// A page id beyond the cache is found before anything is written.
#[test]
fn page_ids() {
    let (fixture, tensors) = (Fixture::new(false), Tensors::default());
    let table = c_batch(&fixture.data.batch(), &tensors).block_table;
    poke(table, 0, 999);
    let reply = fixture.run(&fixture.args(&tensors));
    reply.assert("run", INVALID, &["block_table", "999"]);
    assert!(fixture.data.is_untouched());
}

#[test]
fn descs() {
    type Desc = folio_mla_context_desc;
    let context = Context::cpu();
    let create = |desc: *const Desc| {
        let mut handle = null_mut();
        // SAFETY: live structs; the handle is destroyed at once.
        let reply =
            Reply::of(|err| unsafe { folio_mla_context_create(context.0, desc, &mut handle, err) });
        assert_eq!(handle.is_null(), reply.status != FOLIO_OK);
        // SAFETY: NULL or new.
        unsafe { folio_mla_context_destroy(handle) };
        reply
    };
    let right = c_mla_context_desc(&case(false).desc());
    let flags = FOLIO_PLAN_GRAPH | FOLIO_MLA_CONTEXT_STEPS;
    sizes("folio_mla_context_desc", &right, flags, create);
    create(null()).assert("create", INVALID, &["folio_mla_context_desc", "NULL"]);
    check(
        &right,
        |desc| create(desc),
        &[
            (
                &|d: &mut Desc| d.dtype = dtype(DType::F8E4M3),
                UNSUPPORTED,
                &["dtype", "float8_e4m3"],
            ),
            (
                &|d: &mut Desc| d.kv_dtype = dtype(DType::F16),
                UNSUPPORTED,
                &["kv_dtype", "float16"],
            ),
            (
                &|d: &mut Desc| d.cache_format = 9,
                INVALID,
                &["cache_format", "9"],
            ),
            (
                &|d: &mut Desc| {
                    d.cache_format = FOLIO_MLA_CACHE_FP8_DS_MLA;
                    d.kv_dtype = dtype(DType::F8E4M3);
                },
                UNSUPPORTED,
                &["kv_lora_rank", "512"],
            ),
            (
                &|d: &mut Desc| d.kv_lora_rank = 520,
                UNSUPPORTED,
                &["kv_lora_rank", "520"],
            ),
            (
                &|d: &mut Desc| d.qk_nope_head_dim = 0,
                UNSUPPORTED,
                &["qk_nope_head_dim", "0"],
            ),
            (
                &|d: &mut Desc| d.qk_rope_head_dim = 12,
                UNSUPPORTED,
                &["qk_rope_head_dim", "12"],
            ),
            (
                &|d: &mut Desc| d.v_head_dim = 4,
                UNSUPPORTED,
                &["v_head_dim", "4"],
            ),
            (
                &|d: &mut Desc| d.num_heads = 0,
                INVALID,
                &["num_qo_heads", "0"],
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
                &|d: &mut Desc| d.max_num_tokens = 0,
                INVALID,
                &["max_num_tokens", "0"],
            ),
            (
                &|d: &mut Desc| d.max_kv_len = 0,
                INVALID,
                &["max_kv_len", "0"],
            ),
            (
                &|d: &mut Desc| d.max_chunk_tokens = u32::MAX,
                INVALID,
                &["max_chunk_tokens", "4294967295"],
            ),
        ],
    );
}

#[test]
fn struct_sizes() {
    let (fixture, tensors) = (Fixture::new(false), Tensors::default());
    let args = fixture.args(&tensors);
    let flags = FOLIO_RUN_LSE_BASE_2;
    sizes("folio_mla_context_args", &args, flags, |args| {
        fixture.run(args)
    });
}

#[test]
fn nulls() {
    let refused = |reply: Reply, name: &str| reply.assert(name, INVALID, &[name, "NULL"]);
    let (fixture, steps) = (Fixture::new(false), Fixture::new(true));
    refused(fixture.run(null()), "folio_mla_context_args");
    refused(fixture.plan(null()), "folio_batch");
    for step in [Step::NewTokens, Step::Gather(0), Step::Attend(0)] {
        refused(steps.step(step, null()), "folio_mla_context_args");
    }
    // SAFETY: NULL, which every entry refuses, and a live handle.
    unsafe {
        let create = |err| folio_mla_context_create(null(), null(), null_mut(), err);
        refused(Reply::of(create), "ctx");
        refused(
            Reply::of(|err| folio_mla_context_workspace(null(), null_mut(), err)),
            "handle",
        );
        refused(
            Reply::of(|err| folio_mla_context_run(null(), null(), null_mut(), err)),
            "handle",
        );
        refused(
            Reply::of(|err| folio_mla_context_plan(null_mut(), null(), null(), null_mut(), err)),
            "handle",
        );
        refused(
            Reply::of(|err| folio_mla_context_num_chunks(fixture.handle, null_mut(), err)),
            "out",
        );
        refused(
            Reply::of(|err| folio_mla_context_chunk_tokens(fixture.handle, 0, null_mut(), err)),
            "out",
        );
        assert!(folio_mla_context_kernel(null()).is_null());
        folio_mla_context_destroy(null_mut());
        let mut count = 0;
        Reply::of(|err| folio_mla_context_num_chunks(fixture.handle, &mut count, err))
            .assert_ok("num_chunks");
        assert_eq!(count, 2);
        Reply::of(|err| folio_mla_context_chunk_tokens(fixture.handle, 1, &mut count, err))
            .assert_ok("chunk_tokens");
        assert_eq!(count, 5);
    }
}
