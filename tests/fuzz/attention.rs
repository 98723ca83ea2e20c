//! Attention: create, plan and run of a random problem.

#![allow(unsafe_code)]

use super::Place;
use super::corrupt::{Rng, corrupt, may_be_called};
use super::guarded::Guarded;
use super::handle::{Door, Structs, Workspace, call};
use super::oracle::{By, Ending, Output, Refusal, Run, make_finite};
use super::structs::{Described, Struct};
use crate::common::c_door::{Tensors, c_args, c_batch, c_decode_desc, c_prefill_desc};
use crate::common::codec::decode;
use crate::common::compare::Tolerance;
use crate::common::instance::{LayerData, Step, for_each_index};
use crate::common::problem::Problem;
use crate::common::strategy::{extended, problems_within};
use folio::api::BatchInput;
use folio::dtype::DType;
use folio::ffi::*;
use folio::problem::{AttentionArgs, Kind};
use folio::tensor::Device;
use proptest::prop_oneof;
use proptest::strategy::{Strategy, ValueTree};
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};

/// Multiplications of one problem.
pub const BUDGET: u64 = 1 << 17;

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

fn described(problem: &Problem, step: &Step<'_>, layer: &LayerData<'_>) -> Structs {
    let desc = problem.desc();
    // SAFETY: the header's structs.
    let (door, desc) = unsafe {
        match problem.kind {
            Kind::Decode => (
                Door::Decode,
                Struct::new("folio_decode_desc", c_decode_desc(&desc)),
            ),
            Kind::Prefill => (
                Door::Prefill,
                Struct::new("folio_prefill_desc", c_prefill_desc(&desc)),
            ),
            Kind::Mla => unreachable!("`mla` describes its own structs"),
        }
    };
    of_attention(door, desc, &step.input(), &layer.input())
}

/// The structs of a handle that takes the arguments of attention.
pub fn of_attention(door: Door, desc: Struct, batch: &BatchInput, args: &AttentionArgs) -> Structs {
    let tensors = Tensors::default();
    // SAFETY: the header's structs, with tensors that `tensors` keeps until they were copied.
    unsafe {
        Structs {
            door,
            desc,
            batch: Struct::new("folio_batch", c_batch(batch, &tensors)),
            prefixes: None,
            args: Struct::new("folio_attention_args", c_args(args, &tensors)),
            workspace: Workspace::Right,
            stream: 0,
        }
    }
}

/// One case; its text goes to `place.announce` before anything can go wrong.
pub fn case(rng: &mut Rng, place: &Place) -> Result<Option<Ending>, String> {
    let problems = prop_oneof![
        4 => problems_within(BUDGET),
        1 => problems_within(BUDGET).prop_map(extended),
    ];
    let problem = draw(rng, problems);
    let data = Guarded::new(place.device);
    let host = Guarded::new(Device::Cpu);
    let on_device = place.device != Device::Cpu && rng.one_in(2);
    let index = match (place.device, on_device) {
        (Device::Cpu, _) | (_, true) => &data,
        _ => &host,
    };
    let step = Step::new(index, &problem);
    let layer = LayerData::new(&data, &problem);
    let mut structs = described(&problem, &step, &layer);
    // What a corrupted index leads to must be comparable; that poison is not read is tested elsewhere.
    if place.device == Device::Cpu {
        finite_inputs(&structs.args);
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

/// Numbers in every element of the inputs.
pub fn finite_inputs(args: &Struct) {
    for name in ["q", "k", "v"] {
        make_finite(&original(args, name).expect("a required tensor"));
    }
    for name in ["k_new", "v_new"] {
        if let Some(tensor) = original(args, name) {
            make_finite(&tensor);
        }
    }
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

/// Makes the call and judges it.
pub fn judge(
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
        values: ["v", "v_new"]
            .into_iter()
            .filter_map(|name| original(args, name))
            .collect(),
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
        let largest = |name| {
            within(args, name).map_or(1.0, |scales| {
                let mut largest = 0f64;
                for_each_index(&scales.shape, |at| {
                    largest = largest.max(decode(DType::F32, scales.bits(at)).abs());
                });
                largest
            })
        };
        let scales = ["sm_scale", "q_scale"].map(|name| one_if_zero(args.float(name)));
        let of_queries = scales.iter().product::<f64>().abs() * largest("q_scales");
        let length = |name| within(args, name).map_or(0.0, |keys| longest(&keys));
        let k_scale = one_if_zero(args.float("k_scale")).abs() * largest("k_scales");
        // Keys beside the cache have no scale.
        let longest_key = (k_scale * length("k")).max(length("k_new"));
        let mut tolerance = Tolerance::fast(q.as_ref().map_or(DType::F32, |q| q.dtype));
        if within(args, "k_new").is_some() {
            // The states of both passes are rounded, to bfloat16 at the coarsest.
            tolerance.weight += 2f64.powi(-9);
        }
        let [v_scale, o_scale] = ["v_scale", "o_scale"].map(|name| one_if_zero(args.float(name)));
        let values = LARGEST_VALUE * v_scale.abs() / o_scale;
        let base_2 = args.get("flags") as u32 & FOLIO_RUN_LSE_BASE_2 != 0;
        Scores {
            reach: of_queries * longest_key,
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
