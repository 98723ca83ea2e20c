//! Decode steps whose new tokens are appended and attended to by one call. What is accepted has done what two calls do with the
//! same arguments, to the bit on the CPU.

#![allow(unsafe_code)]

use super::Place;
use super::attention::{draw, finite_inputs, of_attention};
use super::corrupt::{Rng, corrupt, may_be_called};
use super::guarded::Guarded;
use super::handle::{Door, Structs, append_and_run};
use super::oracle::{By, Ending, Output, Run};
use super::structs::Struct;
use crate::common::append_run::{AppendRun, append_runs};
use crate::common::c_door::{Tensors, c_decode_desc, c_rope_append};
use folio::tensor::Device;

/// Keys of a request, so that cases are quick.
const LONGEST: i64 = 60;

/// One case; its text goes to `place.announce` before anything can go wrong.
pub fn case(rng: &mut Rng, place: &Place) -> Result<Option<Ending>, String> {
    let step = draw(rng, append_runs(LONGEST));
    let data = Guarded::new(place.device);
    step.laid_out(&data, |batch, append, args| {
        let tensors = Tensors::default();
        // SAFETY: the header's structs, with tensors that `tensors` keeps until they were copied.
        let (desc, appended) = unsafe {
            (
                Struct::new("folio_decode_desc", c_decode_desc(&step.desc())),
                Struct::new("folio_rope_append_args", c_rope_append(append, &tensors)),
            )
        };
        let structs = of_attention(Door::Decode, desc, batch, args);
        corrupted(rng, place, &data, &step, structs, appended)
    })
}

/// Corrupts the structs of a step's calls, makes them, and judges what was left.
fn corrupted(
    rng: &mut Rng,
    place: &Place,
    data: &Guarded,
    step: &AppendRun,
    mut structs: Structs,
    mut append: Struct,
) -> Result<Option<Ending>, String> {
    if place.device == Device::Cpu {
        finite_inputs(&structs.args);
    }
    let count = 1 + rng.below(2);
    let text = corrupt(&mut [&mut structs.args, &mut append], count, rng);
    if !may_be_called(&[&structs.args, &append], count, data) {
        return Ok(None);
    }
    place.announce(&format!("{step:?}\n{text}"));
    let call = |by| {
        append_and_run(
            place.context(By::Backend),
            &structs,
            &append,
            by == By::Backend,
        )
    };
    if place.device != Device::Cpu {
        return Ok(Some(match call(By::Backend) {
            Ok(()) => Ending::Accepted,
            Err(refusal) => Ending::Refused(refusal),
        }));
    }
    let appended = ["q", "q_out", "key_out", "k_cache", "v_cache"].map(|name| (&append, name));
    let attended = ["o", "lse"].map(|name| (&structs.args, name));
    let outputs = appended
        .into_iter()
        .chain(attended)
        .filter_map(|(of, name)| {
            let elements = of.tensor(name)?.needed()?;
            let exact_in = Some(elements.dtype);
            Some(Output {
                name,
                elements,
                exact_in,
            })
        });
    let run = Run {
        memory: data,
        call: &call,
        outputs: outputs.collect(),
        values: Vec::new(),
        bound: &|_, _| (0.0, 0.0),
    };
    run.check().map(Some)
}
