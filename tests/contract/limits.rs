//! Numbers at the ends of their ranges: what is legal works, what is not is refused, and nothing overflows.

use crate::common::c_door::{Tensors, c_append, c_merge_states};
use crate::common::problem::{Problem, Storage, TableForm};
use crate::fixture::{Append, Fixture, Merge, everything, plain, plain_with};
use crate::table::INVALID;
use folio::dtype::DType;
use folio::ffi::*;
use folio::problem::Kind;
use std::ptr::null_mut;

/// The extents and strides of a test's own tensor.
fn dims(tensor: *const folio_tensor) -> (&'static mut [i64], &'static mut [i64]) {
    // SAFETY: every caller names a tensor of `Tensors`, which has ndim extents and strides and outlives the call.
    unsafe {
        let rank = (*tensor).ndim as usize;
        (
            std::slice::from_raw_parts_mut((*tensor).shape, rank),
            std::slice::from_raw_parts_mut((*tensor).strides, rank),
        )
    }
}

#[test]
fn a_table_without_columns_holds_no_keys() {
    for kind in [Kind::Decode, Kind::Prefill] {
        let form = TableForm::BlockTable { spare_columns: 0 };
        let mut problem = plain_with(kind, form);
        problem.requests.iter_mut().for_each(|r| r.kv_len = 0);
        let fixture = Fixture::new(&problem);
        // Without strides a row of no columns counts as one of one.
        let reply = fixture.plan_as(|batch, tensors| {
            let table = tensors.of(fixture.step.input().block_table);
            // SAFETY: a tensor of this call's.
            unsafe { (*table).strides = null_mut() };
            batch.block_table = table;
        });
        reply.assert_ok("a table without columns or strides");
        let output = fixture.output();
        let lse = output.lse.expect("a plain problem has lse");
        assert!(lse.iter().all(|&lse| lse == f32::NEG_INFINITY));
        assert!(output.o.iter().all(|&bits| bits == 0));
    }
}

#[test]
fn an_extent_of_one_may_have_any_stride() {
    for kind in [Kind::Decode, Kind::Prefill] {
        let mut problem = Problem::plain(&[(1, 3)]).heads(1, 1, 16);
        problem.kind = kind;
        for storage in [Storage::paged(1), Storage::paged(4)] {
            problem.storage = storage;
            let fixture = Fixture::new(&problem);
            let want = fixture.output();
            let reply = fixture.run_as(|args, _| {
                for tensor in [args.q, args.k, args.v, args.o, args.lse] {
                    let (shape, strides) = dims(tensor);
                    for (stride, _) in strides.iter_mut().zip(shape).filter(|dim| *dim.1 == 1) {
                        *stride = i64::MAX;
                    }
                }
            });
            reply.assert_ok("strides of INT64_MAX");
            assert!(fixture.layer.output() == want, "{kind:?}");
        }
    }
}

#[test]
fn an_offset_beyond_all_memory_is_refused() {
    let fixture = Fixture::new(&plain(Kind::Prefill));
    for offset in [1 << 63, u64::MAX, i64::MAX as u64] {
        let reply = fixture.run_as(|args, tensors| {
            let q = tensors.of(fixture.layer.input().q);
            // SAFETY: a tensor of this call's.
            unsafe { (*q).byte_offset = offset };
            args.q = q;
        });
        reply.assert("byte_offset", FOLIO_ERR_SHAPE, &["q"]);
        assert!(fixture.layer.is_untouched());
    }
}

#[test]
fn counts_of_more_than_31_bits_are_refused() {
    let fixture = Fixture::new(&everything(Kind::Prefill));
    let reply = fixture.run_as(|args, tensors| {
        let ranges = tensors.of(fixture.layer.input().mm_prefix_ranges);
        dims(ranges).0[1] = 1 << 32;
        // SAFETY: a tensor of this call's. Without strides it is contiguous.
        unsafe { (*ranges).strides = null_mut() };
        args.mm_prefix_ranges = ranges;
    });
    let words = ["mm_prefix_ranges", "4294967296", "0 to 2147483647"];
    reply.assert("ranges", FOLIO_ERR_SHAPE, &words);
    assert!(fixture.layer.is_untouched());

    let append = Append::new(DType::F8E4M3);
    let tensors = Tensors::default();
    let args = c_append(&append.input(), &tensors);
    for cache in [args.k_cache, args.v_cache] {
        let shape = dims(cache).0;
        (shape[0], shape[1]) = (0, 1 << 32);
    }
    let reply = append.call(&args);
    let words = ["k_cache", "4294967296", "1 to 2147483647"];
    reply.assert("tokens of a page", FOLIO_ERR_SHAPE, &words);

    let merge = Merge::new();
    let args = c_merge_states(&merge.many(), &tensors);
    for states in [args.v, args.s] {
        let (shape, strides) = dims(states);
        (shape[1], strides[1]) = (1 << 32, 0);
    }
    let reply = merge.call_many(&args);
    reply.assert("states", FOLIO_ERR_SHAPE, &["v", "4294967296"]);
    assert!(merge.is_untouched());
}

/// A cache that is empty has no slot, however long its pages would be.
#[test]
fn slots_of_an_empty_cache_are_refused() {
    let append = Append::new(DType::F8E4M3);
    let tensors = Tensors::default();
    let args = c_append(&append.input(), &tensors);
    for cache in [args.k_cache, args.v_cache] {
        let shape = dims(cache).0;
        (shape[0], shape[1]) = (0, i64::from(i32::MAX));
    }
    append
        .call(&args)
        .assert("slots", INVALID, &["slot_mapping[0]", "5", "(0)"]);
}

/// The ends of what is accepted give numbers.
#[test]
fn extreme_scales_and_caps_give_numbers() {
    for kind in [Kind::Decode, Kind::Prefill] {
        let fixture = Fixture::new(&plain(kind));
        for (scale, cap) in [
            (0.0, 2f32.powi(60)),
            (0.0, 2f32.powi(-60)),
            (2f32.powi(60), 0.0),
            (-(2f32.powi(60)), 30.0),
            (2f32.powi(60), 2f32.powi(60)),
            (1e-30, 0.0),
        ] {
            fixture.layer.reset_outputs();
            let reply = fixture.run_as(|args, _| {
                (args.sm_scale, args.logits_soft_cap) = (scale, cap);
            });
            reply.assert_ok("an accepted scale and cap");
            let output = fixture.layer.output();
            let is_number = |bits: &u64| f32::from_bits(*bits as u32).is_finite();
            assert!(
                output.o.iter().all(is_number),
                "scale {scale:e}, cap {cap:e}"
            );
            let lse = output.lse.expect("a plain problem has lse");
            assert!(
                lse.iter().all(|lse| lse.is_finite()),
                "scale {scale:e}, cap {cap:e}"
            );
        }
    }
}
