//! MLA: create, plan and run of a random problem.

#![allow(unsafe_code)]

use super::Place;
use super::attention::draw;
use super::corrupt::{Rng, may_be_called};
use super::guarded::Guarded;
use super::handle::{Door, Structs, Workspace, call};
use super::oracle::{Ending, Output, Run, make_finite};
use super::structs::{Described, Struct};
use crate::common::c_door::{Tensors, c_batch, c_mla_args, c_mla_desc};
use crate::common::codec::decode;
use crate::common::instance::{Step, for_each_index};
use crate::common::mla::{Cache, MlaLayer, MlaProblem, problems_within};
use folio::dtype::DType;
use folio::tensor::Device;

/// Above any difference of two outputs.
const UNKNOWN: f64 = 1e30;

/// Multiplications of one problem.
const BUDGET: u64 = 1 << 17;

/// One case; its text goes to `place.announce` before anything can go wrong.
pub fn case(rng: &mut Rng, place: &Place) -> Result<Option<Ending>, String> {
    let problem = draw(rng, problems_within(BUDGET));
    let data = Guarded::new(place.device);
    let step = Step::new(&data, &problem.batch);
    let layer = MlaLayer::new(&data, &problem);
    let mut structs = described(&problem, &step, &layer);
    if place.device == Device::Cpu && problem.cache != Cache::DsMla {
        // What a corrupted index leads to must be comparable.
        for name in ["q_latent", "q_rope", "kv", "kv_rope"] {
            original(&structs.args, name).iter().for_each(make_finite);
        }
    }
    let (text, count) = structs.corrupt(rng);
    let parts = [&structs.desc, &structs.batch, &structs.args];
    if !may_be_called(&parts, count, &data) {
        return Ok(None);
    }
    place.announce(&format!("{problem:?}\n{text}"));
    let run = |by| call(place.context(by), &structs, None);
    if place.device != Device::Cpu {
        return Ok(Some(match run(super::oracle::By::Backend) {
            Ok(()) => Ending::Accepted,
            Err(refusal) => Ending::Refused(refusal),
        }));
    }
    let args = &structs.args;
    let outputs = ["o", "lse"].into_iter().filter_map(|name| {
        Some(Output {
            name,
            elements: args.tensor(name)?.needed()?,
            exact_in: None,
        })
    });
    let absolute = bound(&problem, args);
    let run = Run {
        memory: &data,
        call: &run,
        outputs: outputs.collect(),
        // Without their signs keys would be others, hence the weights of values too.
        values: Vec::new(),
        bound: &|_, _| (0.0, absolute),
    };
    run.check().map(Some)
}

fn described(problem: &MlaProblem, step: &Step<'_>, layer: &MlaLayer<'_>) -> Structs {
    let tensors = Tensors::default();
    // SAFETY: the header's structs, with tensors that `tensors` keeps until they were copied.
    unsafe {
        Structs {
            door: Door::Mla,
            desc: Struct::new("folio_mla_desc", c_mla_desc(&problem.desc())),
            batch: Struct::new("folio_batch", c_batch(&step.input(), &tensors)),
            prefixes: None,
            args: Struct::new("folio_mla_args", c_mla_args(&layer.input(), &tensors)),
            workspace: Workspace::Right,
            stream: 0,
        }
    }
}

/// What the valid case said of a tensor.
fn original(args: &Struct, name: &str) -> Option<Described> {
    args.tensor(name).map(|block| block.original.clone())
}

/// How far an output may be from the oracle's: a share of the largest value, and of the largest score. A corrupted call
/// may read bytes as other numbers than were written, of which nothing is known.
fn bound(problem: &MlaProblem, args: &Struct) -> f64 {
    let stays = |name: &str| {
        let now = args.tensor(name).and_then(|block| block.described());
        now == original(args, name)
    };
    let inputs = ["q_latent", "q_rope", "kv", "kv_rope"];
    if problem.cache == Cache::DsMla || !inputs.into_iter().all(stays) {
        return UNKNOWN;
    }
    let largest = |name: &str| original(args, name).map_or(0.0, |tensor| largest(&tensor));
    let one_if_zero = |value: f32| {
        if value == 0.0 {
            1.0
        } else {
            f64::from(value).abs()
        }
    };
    let [sm_scale, q_scale, k_scale] =
        ["sm_scale", "q_scale", "k_scale"].map(|name| one_if_zero(args.float(name)));
    let q = largest("q_latent").max(largest("q_rope"));
    let kv = largest("kv").max(largest("kv_rope"));
    let scores = 576.0 * q * kv * sm_scale * q_scale * k_scale;
    let rounding = match problem.batch.q_dtype {
        DType::F32 => 1e-5,
        DType::F16 => 2f64.powi(-10),
        _ => 2f64.powi(-7),
    };
    (1.0 + kv * k_scale) * (rounding + 1e-4 + 1e-6 * scores)
}

/// The largest absolute value.
fn largest(tensor: &Described) -> f64 {
    let mut largest = 0f64;
    for_each_index(&tensor.shape, |at| {
        largest = largest.max(decode(tensor.dtype, tensor.bits(at)).abs());
    });
    largest
}
