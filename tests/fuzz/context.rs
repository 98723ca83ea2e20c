//! Contexts: made from a corrupted desc, and ended again.

#![allow(unsafe_code)]

use super::Place;
use super::corrupt::{Rng, corrupt};
use super::oracle::{Ending, Refusal};
use super::structs::Struct;
use crate::common::c_door::{api, c_context_desc, message, report};
use folio::api::Target;
use folio::ffi::FOLIO_OK;
use folio::tensor::Device;
use std::ptr::null_mut;

/// One case.
pub fn case(rng: &mut Rng, place: &Place) -> Option<Ending> {
    let target = match place.device {
        Device::Cpu => rng.pick(&[Target::Cpu { num_threads: 2 }, Target::Reference]),
        Device::Cuda(ordinal) => Target::Cuda { ordinal },
    };
    // SAFETY: the header's struct, which points to no tensor.
    let mut desc = unsafe { Struct::new("folio_context_desc", c_context_desc(target)) };
    let count = 1 + rng.below(3);
    place.announce(&corrupt(&mut [&mut desc], count, rng));
    let (mut ctx, mut err) = (null_mut(), report());
    // SAFETY: live structs, the desc as large as it says.
    let status = unsafe { api().context_create.unwrap()(desc.pointer(), &mut ctx, &mut err) };
    // SAFETY: NULL, or just made.
    unsafe { api().context_destroy.unwrap()(ctx) };
    Some(match status {
        FOLIO_OK => Ending::Accepted,
        status => Ending::Refused(Refusal {
            status,
            message: message(&err),
        }),
    })
}
