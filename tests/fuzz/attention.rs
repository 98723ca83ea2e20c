//! Attention: create, plan and run of a random problem.

#![allow(unsafe_code)]

use super::Place;
use super::corrupt::{Rng, corrupt, may_be_called};
use super::guarded::Guarded;
use super::oracle::{By, Ending, Output, Refusal, Run, make_finite};
use super::structs::{Described, Struct};
use crate::common::c_door::{
    Tensors, api, c_args, c_batch, c_decode_desc, c_prefill_desc, init, message, report,
};
use crate::common::codec::decode;
use crate::common::compare::Tolerance;
use crate::common::instance::{LayerData, Step, for_each_index};
use crate::common::memory::Memory;
use crate::common::problem::Problem;
use crate::common::strategy::problems_within;
use folio::dtype::DType;
use folio::ffi::*;
use folio::problem::Kind;
use folio::tensor::Device;
use proptest::strategy::{Strategy, ValueTree};
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};
use std::ffi::c_void;
use std::ptr::{null, null_mut};

/// Multiplications of one problem.
const BUDGET: u64 = 1 << 17;

/// Workspaces beyond this are not allocated; the call ends before its plan.
const MOST_WORKSPACE: u64 = 1 << 26;

/// A problem from a strategy of the other suites.
pub fn draw<T: std::fmt::Debug>(rng: &mut Rng, problems: impl Strategy<Value = T>) -> T {
    let mut seed = [0; 32];
    for part in seed.chunks_exact_mut(8) {
        part.copy_from_slice(&rng.next().to_le_bytes());
    }
    let random = TestRng::from_seed(RngAlgorithm::ChaCha, &seed);
    let mut runner = TestRunner::new_with_rng(Config::default(), random);
    let tree = problems.new_tree(&mut runner);
    tree.expect("the strategy rejects nothing").current()
}

/// Above the keys of any request.
const MOST_KEYS: f64 = 8192.0;

/// Above any value of the fuzzer's times its scale.
const LARGEST_VALUE: f64 = 1e5;

/// What is wrong with the workspace.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Workspace {
    Right,
    Null,
    Short,
    Skew,
    StructSize,
    Flags,
}

/// The structs of one problem.
pub struct Structs {
    pub kind: Kind,
    pub desc: Struct,
    pub batch: Struct,
    pub args: Struct,
    pub workspace: Workspace,
    pub stream: usize,
}

impl Structs {
    fn of(problem: &Problem, step: &Step<'_>, layer: &LayerData<'_>) -> Structs {
        let tensors = Tensors::default();
        // SAFETY: the header's structs, with tensors that `tensors` keeps until they were copied.
        unsafe {
            Structs {
                kind: problem.kind,
                desc: match problem.kind {
                    Kind::Decode => {
                        Struct::new("folio_decode_desc", c_decode_desc(&problem.desc()))
                    }
                    Kind::Prefill => {
                        Struct::new("folio_prefill_desc", c_prefill_desc(&problem.desc()))
                    }
                    Kind::Mla => unreachable!("`mla` describes its own structs"),
                },
                batch: Struct::new("folio_batch", c_batch(&step.input(), &tensors)),
                args: Struct::new("folio_attention_args", c_args(&layer.input(), &tensors)),
                workspace: Workspace::Right,
                stream: 0,
            }
        }
    }

    /// Corrupts up to three things.
    pub fn corrupt(&mut self, rng: &mut Rng) -> (String, usize) {
        let mut count = 1 + rng.below(3);
        if rng.one_in(16) {
            let faults = [
                Workspace::Null,
                Workspace::Short,
                Workspace::Skew,
                Workspace::StructSize,
                Workspace::Flags,
            ];
            self.workspace = rng.pick(&faults);
            count -= 1;
        }
        if rng.one_in(60) {
            self.stream = 0x1000;
        }
        let parts = &mut [&mut self.desc, &mut self.batch, &mut self.args];
        let mut text = corrupt(parts, count, rng);
        text += &format!(
            "  workspace: {:?}, stream: {:#x}\n",
            self.workspace, self.stream
        );
        (text, count)
    }
}

/// A handle of any kind.
struct Handle {
    decode: *mut folio_decode,
    prefill: *mut folio_prefill,
    mla: *mut folio_mla,
    workspace: Guarded,
    device_workspace: Guarded,
}

impl Drop for Handle {
    fn drop(&mut self) {
        // SAFETY: NULL, or made by _create and not used afterwards.
        unsafe {
            api().decode_destroy.unwrap()(self.decode);
            api().prefill_destroy.unwrap()(self.prefill);
            api().mla_destroy.unwrap()(self.mla);
        }
    }
}

/// A call's report as a refusal.
fn refused(call: impl FnOnce(&mut folio_error) -> folio_status) -> Result<(), Refusal> {
    let mut err = report();
    match call(&mut err) {
        FOLIO_OK => Ok(()),
        status => {
            assert_eq!(err.status, status, "the report carries the status");
            Err(Refusal {
                status,
                message: message(&err),
            })
        }
    }
}

impl Handle {
    fn create(ctx: *const folio_context, structs: &Structs) -> Result<Handle, Refusal> {
        let mut handle = Handle {
            decode: null_mut(),
            prefill: null_mut(),
            mla: null_mut(),
            workspace: Guarded::new(Device::Cpu),
            device_workspace: Guarded::new(Device::Cuda(0)),
        };
        // SAFETY: a live context, and structs as large as they say.
        refused(|err| unsafe {
            match structs.kind {
                Kind::Decode => {
                    let desc = structs.desc.pointer();
                    api().decode_create.unwrap()(ctx, desc, &mut handle.decode, err)
                }
                Kind::Prefill => {
                    let desc = structs.desc.pointer();
                    api().prefill_create.unwrap()(ctx, desc, &mut handle.prefill, err)
                }
                Kind::Mla => {
                    let desc = structs.desc.pointer();
                    api().mla_create.unwrap()(ctx, desc, &mut handle.mla, err)
                }
            }
        })?;
        Ok(handle)
    }

    fn info(&self) -> folio_workspace_info {
        // SAFETY: integers behind the size.
        let mut info: folio_workspace_info = unsafe { init() };
        // SAFETY: a live handle of one of the kinds.
        let outcome = refused(|err| unsafe {
            match (self.decode.is_null(), self.mla.is_null()) {
                (false, _) => api().decode_workspace.unwrap()(self.decode, &mut info, err),
                (_, false) => api().mla_workspace.unwrap()(self.mla, &mut info, err),
                _ => api().prefill_workspace.unwrap()(self.prefill, &mut info, err),
            }
        });
        outcome.expect("a live handle says what it needs");
        info
    }

    /// A workspace of exactly the bytes that are needed, or not quite.
    fn workspace(&self, info: &folio_workspace_info, fault: Workspace) -> folio_workspace {
        // SAFETY: integers and addresses behind the size.
        let mut ws: folio_workspace = unsafe { init() };
        let whole = |bytes: u64| bytes.next_multiple_of(info.alignment.max(1)) as usize;
        (ws.host_bytes, ws.device_bytes) = (info.host_bytes, info.device_bytes);
        ws.host = self.workspace.alloc(whole(info.host_bytes)) as *mut c_void;
        ws.device = self.device_workspace.alloc(whole(info.device_bytes)) as *mut c_void;
        match fault {
            Workspace::Right | Workspace::Null => {}
            Workspace::Short => {
                ws.host_bytes = ws.host_bytes.saturating_sub(1);
                ws.device_bytes = ws.device_bytes.saturating_sub(1);
            }
            Workspace::Skew => {
                ws.host = ws.host.wrapping_byte_sub(1);
                ws.device = ws.device.wrapping_byte_sub(1);
            }
            Workspace::StructSize => ws.struct_size = 7,
            Workspace::Flags => ws.flags = 1,
        }
        ws
    }

    fn plan(
        &self,
        batch: &Struct,
        ws: *const folio_workspace,
        stream: usize,
    ) -> Result<(), Refusal> {
        let stream = stream as *mut c_void;
        // SAFETY: a live handle that nobody else uses, and structs as large as they say.
        refused(|err| unsafe {
            match (self.decode.is_null(), self.mla.is_null()) {
                (false, _) => {
                    api().decode_plan.unwrap()(self.decode, batch.pointer(), ws, stream, err)
                }
                (_, false) => api().mla_plan.unwrap()(self.mla, batch.pointer(), ws, stream, err),
                _ => api().prefill_plan.unwrap()(self.prefill, batch.pointer(), ws, stream, err),
            }
        })
    }

    fn run(&self, args: &Struct, stream: usize) -> Result<(), Refusal> {
        let stream = stream as *mut c_void;
        // SAFETY: as in `plan`.
        refused(|err| unsafe {
            match (self.decode.is_null(), self.mla.is_null()) {
                (false, _) => api().decode_run.unwrap()(self.decode, args.pointer(), stream, err),
                (_, false) => api().mla_run.unwrap()(self.mla, args.pointer(), stream, err),
                _ => api().prefill_run.unwrap()(self.prefill, args.pointer(), stream, err),
            }
        })
    }
}

/// Why a call that was accepted so far went no further.
fn too_large() -> Refusal {
    Refusal {
        status: FOLIO_ERR_OUT_OF_MEMORY,
        message: "ws: more than the fuzzer wants to give".into(),
    }
}

/// Create, plan and run. Where `refused_plan` is given, it is planned in between, and must be refused.
pub fn call(
    ctx: *const folio_context,
    structs: &Structs,
    refused_plan: Option<&Struct>,
) -> Result<(), Refusal> {
    let handle = Handle::create(ctx, structs)?;
    let info = handle.info();
    if info.host_bytes.saturating_add(info.device_bytes) > MOST_WORKSPACE {
        return Err(too_large());
    }
    let ws = handle.workspace(&info, structs.workspace);
    let given: *const folio_workspace = match structs.workspace {
        Workspace::Null => null(),
        _ => &ws,
    };
    handle.plan(&structs.batch, given, structs.stream)?;
    if let Some(batch) = refused_plan
        && handle.plan(batch, given, structs.stream).is_ok()
    {
        return Err(Refusal {
            status: FOLIO_OK,
            message: "batch: accepted after all".into(),
        });
    }
    handle.run(&structs.args, structs.stream)
}

/// One case; its text goes to `place.announce` before anything can go wrong.
pub fn case(rng: &mut Rng, place: &Place) -> Result<Option<Ending>, String> {
    let problem = draw(rng, problems_within(BUDGET));
    let data = Guarded::new(place.device);
    let host = Guarded::new(Device::Cpu);
    let on_device = place.device != Device::Cpu && rng.one_in(2);
    let index = match (place.device, on_device) {
        (Device::Cpu, _) | (_, true) => &data,
        _ => &host,
    };
    let step = Step::new(index, &problem);
    let layer = LayerData::new(&data, &problem);
    let mut structs = Structs::of(&problem, &step, &layer);
    // What a corrupted index leads to must be comparable; that poison is not read is tested elsewhere.
    if place.device == Device::Cpu {
        for name in ["q", "k", "v"] {
            make_finite(&original(&structs.args, name).expect("a required tensor"));
        }
    }
    if place.device == Device::Cpu && rng.one_in(8) {
        return replan(rng, place, &problem, &structs, &data);
    }
    let (text, count) = structs.corrupt(rng);
    let parts = [&structs.desc, &structs.batch, &structs.args];
    if !may_be_called(&parts, count, index) || !may_be_called(&parts, count, &data) {
        return Ok(None);
    }
    place.announce(&format!("{problem:?}\n{text}"));
    let run = |by| call(place.context(by), &structs, None);
    judge(place, &structs, &data, &run)
}

/// A plan, then one that is refused: the first must still be in force.
fn replan(
    rng: &mut Rng,
    place: &Place,
    problem: &Problem,
    structs: &Structs,
    data: &Guarded,
) -> Result<Option<Ending>, String> {
    let step = Step::new(data, problem);
    let tensors = Tensors::default();
    // SAFETY: the header's struct, with tensors that `tensors` keeps until they were copied.
    let mut batch = unsafe { Struct::new("folio_batch", c_batch(&step.input(), &tensors)) };
    let count = 1 + rng.below(2);
    let text = corrupt(&mut [&mut batch], count, rng);
    if !may_be_called(&[&batch], count, data) {
        return Ok(None);
    }
    place.announce(&format!("{problem:?}\nplanned, and again with\n{text}"));
    let run = |by| call(place.context(by), structs, Some(&batch));
    match judge(place, structs, data, &run)? {
        // What was accepted after all is the other cases' business.
        Some(Ending::Refused(refusal)) if refusal.status == FOLIO_OK => Ok(None),
        ending => Ok(ending),
    }
}

/// What the valid case said of a tensor.
fn original(part: &Struct, name: &str) -> Option<Described> {
    part.tensor(name).map(|block| block.original.clone())
}

/// What a call may touch of a tensor, as it is described now.
fn within(part: &Struct, name: &str) -> Option<Described> {
    part.tensor(name)?.needed()
}

/// An output; bytes are what the desc says they are.
fn written(structs: &Structs, name: &str) -> Option<Described> {
    let mut elements = within(&structs.args, name)?;
    if elements.dtype == DType::U8 {
        let stated = structs.desc.get("o_dtype");
        let dtype = DType::from_dlpack(stated as u8, (stated >> 8) as u8, 1);
        elements.dtype = dtype.ok().filter(|dtype| dtype.is_fp8())?;
    }
    Some(elements)
}

fn judge(
    place: &Place,
    structs: &Structs,
    data: &Guarded,
    call: &dyn Fn(By) -> Result<(), Refusal>,
) -> Result<Option<Ending>, String> {
    if place.device != Device::Cpu {
        return Ok(Some(match call(By::Backend) {
            Ok(()) => Ending::Accepted,
            Err(refusal) => Ending::Refused(refusal),
        }));
    }
    let args = &structs.args;
    let outputs = ["o", "lse"].into_iter().filter_map(|name| {
        Some(Output {
            name,
            elements: written(structs, name)?,
            exact_in: None,
        })
    });
    let scores = Scores::of(args);
    let bound = |name: &str, index: &[i64]| scores.bound(name, index);
    let run = Run {
        memory: data,
        call,
        outputs: outputs.collect(),
        values: original(args, "v").into_iter().collect(),
        bound: &bound,
    };
    run.check().map(Some)
}

/// What bounds the error of a row's scores: `|q·k| <= Σ|q k| <= |q| |k|`.
struct Scores {
    q: Option<Described>,
    /// The longest key times the scales.
    reach: f64,
    tolerance: Tolerance,
    lse_unit: f64,
    /// What the smallest weights are off by, times the largest value.
    underflow: f64,
}

impl Scores {
    fn of(args: &Struct) -> Scores {
        let one_if_zero = |value: f32| if value == 0.0 { 1.0 } else { f64::from(value) };
        let q = within(args, "q");
        let largest_scale = within(args, "k_scales").map_or(1.0, |scales| {
            let mut largest = 0f64;
            for_each_index(&scales.shape, |at| {
                largest = largest.max(decode(DType::F32, scales.bits(at)).abs());
            });
            largest
        });
        let scales = ["sm_scale", "q_scale", "k_scale"].map(|name| one_if_zero(args.float(name)));
        let tolerance = Tolerance::fast(q.as_ref().map_or(DType::F32, |q| q.dtype));
        let [v_scale, o_scale] = ["v_scale", "o_scale"].map(|name| one_if_zero(args.float(name)));
        let values = LARGEST_VALUE * v_scale.abs() / o_scale;
        let base_2 = args.get("flags") as u32 & FOLIO_RUN_LSE_BASE_2 != 0;
        Scores {
            reach: scales.iter().product::<f64>().abs()
                * largest_scale
                * within(args, "k").map_or(0.0, |k| longest(&k)),
            q,
            lse_unit: if base_2 {
                std::f64::consts::LOG2_E
            } else {
                1.0
            },
            underflow: MOST_KEYS * tolerance.underflow * (values + LARGEST_VALUE),
            tolerance,
        }
    }

    fn bound(&self, name: &str, index: &[i64]) -> (f64, f64) {
        let Some(q) = &self.q else {
            return (0.0, 0.0);
        };
        if index[0] >= q.shape[0] || index[1] >= q.shape[1] {
            return (0.0, 0.0);
        }
        let score = norm(q, &index[..2]) * self.reach;
        let tolerance = self.tolerance;
        let error = tolerance.score + (tolerance.score_growth + tolerance.score_sum) * score;
        match name {
            "lse" => (2f64.powi(-23), error * self.lse_unit),
            _ => (tolerance.weight + 2.0 * error, self.underflow),
        }
    }
}

/// The length of a row of finite numbers; 0 where there are others.
fn norm(tensor: &Described, row: &[i64]) -> f64 {
    let dims = tensor.shape[tensor.shape.len() - 1];
    let mut index = row.to_vec();
    index.push(0);
    let mut sum = 0.0;
    for d in 0..dims {
        *index.last_mut().expect("just pushed") = d;
        let value = decode(tensor.dtype, tensor.bits(&index));
        sum += value * value;
    }
    if sum.is_finite() { sum.sqrt() } else { 0.0 }
}

fn longest(tensor: &Described) -> f64 {
    let mut longest = 0f64;
    let Some((_, rows)) = tensor.shape.split_last() else {
        return longest;
    };
    for_each_index(rows, |row| longest = longest.max(norm(tensor, row)));
    longest
}
