//! Calls that are right in every respect, for the tables to spoil one thing at a time.

use crate::common::c_door::{Tensors, init, message, report};
use crate::common::c_door::{c_args, c_batch, c_context_desc, c_decode_desc, c_prefill_desc};
use crate::common::instance::{LayerData, Output, Step};
use crate::common::memory::{HostMemory, Image, Resident, View};
use crate::common::problem::TableForm;
use crate::common::problem::{
    Alibi, Bias, BiasHeads, HeadScales, Layer, MaskKind, Pattern, Problem, Storage,
};
use folio::api::Target;
use folio::dtype::DType;
use folio::ffi::*;
use folio::problem::{
    AbsorbQArgs, AbsorbWeightsArgs, AppendArgs, CacheForm, Kind, KvLayout, LogBase, MergeArgs,
    MergeStatesArgs, MergeVarlenArgs, ProjectOArgs, UpProjectArgs,
};
use std::ptr::null_mut;

/// What a call answered.
pub struct Reply {
    pub status: folio_status,
    pub message: String,
}

impl Reply {
    /// Makes a call with a fresh report.
    pub fn of(call: impl FnOnce(*mut folio_error) -> folio_status) -> Reply {
        let mut err = report();
        let status = call(&mut err);
        let told = if status == FOLIO_OK {
            FOLIO_OK
        } else {
            err.status
        };
        assert!(told == status, "report and result differ");
        Reply {
            status,
            message: message(&err),
        }
    }

    /// The status, and every one of the words in the message.
    pub fn assert(&self, what: &str, status: folio_status, words: &[&str]) {
        assert_eq!(self.status, status, "{what}: {:?}", self.message);
        for word in words {
            let found = self.message.contains(word);
            assert!(found, "{what}: no {word:?} in {:?}", self.message);
        }
        assert_eq!(status == FOLIO_OK, self.message.is_empty(), "{what}");
    }

    pub fn assert_ok(&self, what: &str) {
        self.assert(what, FOLIO_OK, &[]);
    }
}

/// A CPU context.
pub struct Context(pub *mut folio_context);

impl Context {
    pub fn cpu() -> Context {
        let desc = c_context_desc(Target::Cpu { num_threads: 1 });
        let mut ctx = null_mut();
        // SAFETY: live structs.
        Reply::of(|err| unsafe { folio_context_create(&desc, &mut ctx, err) }).assert_ok("context");
        Context(ctx)
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: made by folio_context_create; the handles keep what they need.
        unsafe { folio_context_destroy(self.0) }
    }
}

/// A problem that uses every tensor of a run.
pub fn everything(kind: Kind) -> Problem {
    let mut problem = Problem::plain(&[(2, 9), (1, 4), (3, 6)]);
    problem.kind = kind;
    problem.q_dtype = DType::F16;
    problem.kv_dtype = DType::F8E4M3;
    problem.o_dtype = DType::F8E5M2;
    problem.num_kv_heads = 3;
    problem.group_size = 2;
    problem.head_dim_qk = 16;
    problem.head_dim_vo = 24;
    problem.storage = Storage::paged(4);
    problem.layer = Layer {
        mask: MaskKind::Bits(Pattern::Random(0.5)),
        window: Some((5, 2)),
        mm_prefix_ranges: 2,
        alibi: Some(Alibi::Sqrt),
        bias: Some(Bias {
            dtype: DType::BF16,
            heads: BiasHeads::Each,
            request_rows: false,
            new_keys: false,
            transposed: false,
            spare: 0,
            reach: None,
        }),
        sinks: true,
        q_scales: HeadScales::PerHead,
        k_scales: HeadScales::PerHead,
        v_scales: HeadScales::PerHead,
        o_scale: 0.5,
        o_scales: true,
        logits_soft_cap: 30.0,
        lse: Some(LogBase::Two),
        ..Layer::plain()
    };
    problem
}

/// The same with nothing added, in one type.
pub fn plain(kind: Kind) -> Problem {
    let mut problem = Problem::plain(&[(2, 9), (1, 4), (3, 6)]);
    problem.kind = kind;
    problem.storage = Storage::paged(4);
    problem
}

/// The plain problem behind another form of page table.
pub fn plain_with(kind: Kind, form: TableForm) -> Problem {
    let mut problem = plain(kind);
    problem.storage = Storage::Paged {
        page_size: 4,
        layout: KvLayout::Nhd,
        form,
        unused_pages: 0,
        shared_pages: 0,
    };
    problem
}

/// A planned handle with its tensors.
pub struct Fixture {
    decode: *mut folio_decode,
    prefill: *mut folio_prefill,
    pub problem: Problem,
    pub layer: LayerData<'static>,
    pub step: Step<'static>,
    workspace: Resident<'static>,
    _context: Context,
}

impl Fixture {
    /// A handle without a plan.
    pub fn unplanned(problem: &Problem) -> Fixture {
        let context = Context::cpu();
        let (mut decode, mut prefill) = (null_mut(), null_mut());
        let desc = problem.desc();
        // SAFETY: live structs and a live context.
        let reply = Reply::of(|err| unsafe {
            match problem.kind {
                Kind::Decode => {
                    folio_decode_create(context.0, &c_decode_desc(&desc), &mut decode, err)
                }
                Kind::Prefill => {
                    folio_prefill_create(context.0, &c_prefill_desc(&desc), &mut prefill, err)
                }
                Kind::Mla => unreachable!("problems of this fixture are decode and prefill"),
            }
        });
        reply.assert_ok("create");
        let mut fixture = Fixture {
            decode,
            prefill,
            problem: problem.clone(),
            layer: LayerData::new(&HostMemory, problem),
            step: Step::new(&HostMemory, problem),
            workspace: bytes(0),
            _context: context,
        };
        fixture.workspace = bytes(fixture.info().host_bytes as i64);
        fixture
    }

    pub fn new(problem: &Problem) -> Fixture {
        let fixture = Fixture::unplanned(problem);
        fixture.plan_as(|_, _| {}).assert_ok("plan");
        fixture
    }

    pub fn info(&self) -> folio_workspace_info {
        // SAFETY: integers behind the size.
        let mut info: folio_workspace_info = unsafe { init() };
        self.query(&mut info).assert_ok("workspace");
        info
    }

    pub fn query(&self, info: *mut folio_workspace_info) -> Reply {
        // SAFETY: a live handle and the caller's struct.
        Reply::of(|err| unsafe {
            match self.problem.kind {
                Kind::Decode => folio_decode_workspace(self.decode, info, err),
                Kind::Prefill => folio_prefill_workspace(self.prefill, info, err),
                Kind::Mla => unreachable!("problems of this fixture are decode and prefill"),
            }
        })
    }

    /// The right batch.
    pub fn batch(&self, tensors: &Tensors) -> folio_batch {
        c_batch(&self.step.input(), tensors)
    }

    /// A workspace of exactly the size that the handle asks for.
    pub fn workspace(&self) -> folio_workspace {
        folio_workspace {
            struct_size: size_of::<folio_workspace>() as u32,
            flags: 0,
            device: null_mut(),
            device_bytes: 0,
            host: self.workspace.tensor().address() as *mut _,
            host_bytes: self.info().host_bytes,
        }
    }

    pub fn plan(&self, batch: *const folio_batch, workspace: *const folio_workspace) -> Reply {
        // SAFETY: a live handle that nobody else uses, and the caller's structs.
        Reply::of(|err| unsafe {
            match self.problem.kind {
                Kind::Decode => folio_decode_plan(self.decode, batch, workspace, null_mut(), err),
                Kind::Prefill => {
                    folio_prefill_plan(self.prefill, batch, workspace, null_mut(), err)
                }
                Kind::Mla => unreachable!("problems of this fixture are decode and prefill"),
            }
        })
    }

    /// Plans the right batch after a change.
    pub fn plan_as(&self, change: impl FnOnce(&mut folio_batch, &Tensors)) -> Reply {
        let tensors = Tensors::default();
        let mut batch = self.batch(&tensors);
        change(&mut batch, &tensors);
        self.plan(&batch, &self.workspace())
    }

    /// The right arguments.
    pub fn args(&self, tensors: &Tensors) -> folio_attention_args {
        c_args(&self.layer.input(), tensors)
    }

    pub fn run(&self, args: *const folio_attention_args) -> Reply {
        // SAFETY: a live handle and the caller's structs.
        Reply::of(|err| unsafe {
            match self.problem.kind {
                Kind::Decode => folio_decode_run(self.decode, args, null_mut(), err),
                Kind::Prefill => folio_prefill_run(self.prefill, args, null_mut(), err),
                Kind::Mla => unreachable!("problems of this fixture are decode and prefill"),
            }
        })
    }

    /// Runs the right arguments after a change.
    pub fn run_as(&self, change: impl FnOnce(&mut folio_attention_args, &Tensors)) -> Reply {
        let tensors = Tensors::default();
        let mut args = self.args(&tensors);
        change(&mut args, &tensors);
        self.run(&args)
    }

    /// What the right arguments give with the plan in force.
    pub fn output(&self) -> Output {
        self.layer.reset_outputs();
        self.run_as(|_, _| {}).assert_ok("run");
        let output = self.layer.output();
        self.layer.reset_outputs();
        output
    }
}

impl Drop for Fixture {
    fn drop(&mut self) {
        // SAFETY: NULL or made by _create, and not used afterwards.
        unsafe {
            folio_decode_destroy(self.decode);
            folio_prefill_destroy(self.prefill);
        }
    }
}

pub fn bytes(n: i64) -> Resident<'static> {
    Resident::new(&HostMemory, Image::poisoned(View::compact(DType::U8, &[n])))
}

pub fn floats(dtype: DType, shape: &[i64]) -> Resident<'static> {
    let mut image = Image::poisoned(View::compact(dtype, shape));
    image.bytes.fill(0);
    Resident::new(&HostMemory, image)
}

/// The tensors of an append of three tokens to an fp8 cache.
pub struct Append {
    context: Context,
    parts: [Resident<'static>; 7],
}

impl Append {
    /// fp16 tokens, three heads of 16 and 24, three pages of four tokens.
    pub fn new(cache: DType) -> Append {
        let slots = Image::of_i32(&[3], &[5, -1, 11]);
        let scales = Image::of_f32(&[3], &[1.0, 0.5, 2.0]);
        Append {
            context: Context::cpu(),
            parts: [
                floats(DType::F16, &[3, 3, 16]),
                floats(DType::F16, &[3, 3, 24]),
                floats(cache, &[3, 4, 3, 16]),
                floats(cache, &[3, 4, 3, 24]),
                Resident::new(&HostMemory, slots),
                Resident::new(&HostMemory, scales.clone()),
                Resident::new(&HostMemory, scales),
            ],
        }
    }

    pub fn input(&self) -> AppendArgs {
        let scaled = self.parts[2].image().view.dtype.is_fp8();
        let [key, value, k_cache, v_cache, slots, k_scales, v_scales] =
            self.parts.each_ref().map(Resident::tensor);
        AppendArgs {
            key,
            value,
            k_cache,
            v_cache,
            layout: KvLayout::Nhd,
            kv_dtype: None,
            form: CacheForm::Plain,
            k_zero_points: None,
            v_zero_points: None,
            slot_mapping: slots,
            k_scale: if scaled { 0.5 } else { 0.0 },
            v_scale: 0.0,
            k_scales: scaled.then_some(k_scales),
            v_scales: scaled.then_some(v_scales),
        }
    }

    pub fn call(&self, args: *const folio_kv_append_args) -> Reply {
        // SAFETY: a live context and the caller's structs.
        Reply::of(|err| unsafe { folio_kv_append(self.context.0, args, null_mut(), err) })
    }

    pub fn is_untouched(&self) -> bool {
        self.parts[2].is_untouched() && self.parts[3].is_untouched()
    }
}

/// The tensors of all merges: two tokens, three heads, eight elements, two states or four of both tokens together.
pub struct Merge {
    context: Context,
    /// v of one state, s of one state, v and s of two states, a mask.
    parts: [Resident<'static>; 5],
    /// v, s and indptr of all tokens' states.
    varlen: [Resident<'static>; 3],
    pub v_out: Resident<'static>,
    pub s_out: Resident<'static>,
}

impl Merge {
    pub fn new() -> Merge {
        Merge {
            context: Context::cpu(),
            parts: [
                floats(DType::BF16, &[2, 3, 8]),
                floats(DType::F32, &[2, 3]),
                floats(DType::BF16, &[2, 2, 3, 8]),
                floats(DType::F32, &[2, 2, 3]),
                floats(DType::U8, &[2]),
            ],
            varlen: [
                floats(DType::BF16, &[4, 3, 8]),
                floats(DType::F32, &[4, 3]),
                Resident::new(&HostMemory, Image::of_i32(&[3], &[0, 3, 4])),
            ],
            v_out: floats(DType::BF16, &[2, 3, 8]),
            s_out: floats(DType::F32, &[2, 3]),
        }
    }

    pub fn two(&self) -> MergeArgs {
        let [v, s, _, _, mask] = self.parts.each_ref().map(Resident::tensor);
        MergeArgs {
            v_a: v,
            s_a: s,
            v_b: v,
            s_b: s,
            v_out: self.v_out.tensor(),
            s_out: Some(self.s_out.tensor()),
            mask: Some(mask),
            lse_base: LogBase::E,
            num_tokens_without_a: 0,
            o_scale: 0.0,
        }
    }

    pub fn many(&self) -> MergeStatesArgs {
        let [_, _, v, s, _] = self.parts.each_ref().map(Resident::tensor);
        MergeStatesArgs {
            v,
            s,
            v_out: self.v_out.tensor(),
            s_out: Some(self.s_out.tensor()),
            lse_base: LogBase::E,
            o_scale: 0.0,
        }
    }

    pub fn varlen(&self) -> MergeVarlenArgs {
        let [v, s, indptr] = self.varlen.each_ref().map(Resident::tensor);
        MergeVarlenArgs {
            v,
            s,
            indptr,
            v_out: self.v_out.tensor(),
            s_out: Some(self.s_out.tensor()),
            lse_base: LogBase::E,
            o_scale: 0.0,
        }
    }

    pub fn call_two(&self, args: *const folio_merge_state_args) -> Reply {
        // SAFETY: a live context and the caller's structs.
        Reply::of(|err| unsafe { folio_merge_state(self.context.0, args, null_mut(), err) })
    }

    pub fn call_many(&self, args: *const folio_merge_states_args) -> Reply {
        // SAFETY: a live context and the caller's structs.
        Reply::of(|err| unsafe { folio_merge_states(self.context.0, args, null_mut(), err) })
    }

    pub fn call_varlen(&self, args: *const folio_merge_varlen_args) -> Reply {
        // SAFETY: a live context and the caller's structs.
        Reply::of(|err| unsafe { folio_merge_varlen(self.context.0, args, null_mut(), err) })
    }

    pub fn is_untouched(&self) -> bool {
        self.v_out.is_untouched() && self.s_out.is_untouched()
    }
}

/// The tensors of all projections of MLA: three tokens, two heads, P 16, V 24, L 32.
pub struct Projections {
    context: Context,
    /// kv_b_proj, W_UK, W_UV, q_nope, o_latent, kv_c.
    inputs: [Resident<'static>; 6],
    /// W_UK, W_UV, q_latent, out, k_nope, v.
    outputs: [Resident<'static>; 6],
}

impl Projections {
    pub fn new() -> Projections {
        let half = |shape: &[i64]| floats(DType::BF16, shape);
        Projections {
            context: Context::cpu(),
            inputs: [
                half(&[2 * (16 + 24), 32]),
                half(&[2, 16, 32]),
                half(&[2, 32, 24]),
                half(&[3, 2, 16]),
                half(&[3, 2, 32]),
                half(&[3, 32]),
            ],
            outputs: [
                half(&[2, 16, 32]),
                half(&[2, 32, 24]),
                half(&[3, 2, 32]),
                half(&[3, 2, 24]),
                half(&[3, 2, 16]),
                half(&[3, 2, 24]),
            ],
        }
    }

    pub fn weights(&self) -> AbsorbWeightsArgs {
        AbsorbWeightsArgs {
            kv_b_proj: self.inputs[0].tensor(),
            w_uk: Some(self.outputs[0].tensor()),
            w_uv: Some(self.outputs[1].tensor()),
        }
    }

    pub fn absorb(&self) -> AbsorbQArgs {
        AbsorbQArgs {
            q_nope: self.inputs[3].tensor(),
            w_uk: self.inputs[1].tensor(),
            q_latent: self.outputs[2].tensor(),
        }
    }

    pub fn project(&self) -> ProjectOArgs {
        ProjectOArgs {
            o_latent: self.inputs[4].tensor(),
            w_uv: self.inputs[2].tensor(),
            out: self.outputs[3].tensor(),
        }
    }

    pub fn up_project(&self) -> UpProjectArgs {
        UpProjectArgs {
            kv_c: self.inputs[5].tensor(),
            w_uk: Some(self.inputs[1].tensor()),
            w_uv: Some(self.inputs[2].tensor()),
            k_nope: Some(self.outputs[4].tensor()),
            v: Some(self.outputs[5].tensor()),
        }
    }

    pub fn call_weights(&self, args: *const folio_mla_absorb_weights_args) -> Reply {
        // SAFETY: a live context and the caller's structs.
        Reply::of(|err| unsafe { folio_mla_absorb_weights(self.context.0, args, null_mut(), err) })
    }

    pub fn call_absorb(&self, args: *const folio_mla_absorb_q_args) -> Reply {
        // SAFETY: a live context and the caller's structs.
        Reply::of(|err| unsafe { folio_mla_absorb_q(self.context.0, args, null_mut(), err) })
    }

    pub fn call_project(&self, args: *const folio_mla_project_o_args) -> Reply {
        // SAFETY: a live context and the caller's structs.
        Reply::of(|err| unsafe { folio_mla_project_o(self.context.0, args, null_mut(), err) })
    }

    pub fn call_up_project(&self, args: *const folio_mla_up_project_args) -> Reply {
        // SAFETY: a live context and the caller's structs.
        Reply::of(|err| unsafe { folio_mla_up_project(self.context.0, args, null_mut(), err) })
    }

    pub fn is_untouched(&self) -> bool {
        self.outputs.iter().all(Resident::is_untouched)
    }
}
