//! The operators of context parallelism with callers who err.

use crate::common::c_door::{Tensors, c_cp_correct, c_cp_reorder};
use crate::common::memory::{HostMemory, Image, Resident};
use crate::fixture::{Context, Reply, floats};
use crate::structs::sizes;
use crate::table::{INVALID, UNKNOWN, check, poke};
use crate::tensors::Dim::{Exact, Free};
use crate::tensors::{field, input, optional_output, output, walk};
use folio::dtype::DType;
use folio::ffi::*;
use folio::problem::{CpCorrectArgs, CpReorderArgs, LogBase};
use std::ptr::{null, null_mut};

fn integers(values: &[i32]) -> Resident<'static> {
    Resident::new(&HostMemory, Image::of_i32(&[values.len() as i64], values))
}

/// Two requests of five and two tokens on two ranks.
struct Reorder {
    context: Context,
    gathered: Resident<'static>,
    dst: Resident<'static>,
    integers: [Resident<'static>; 3],
}

impl Reorder {
    fn new() -> Reorder {
        Reorder {
            context: Context::cpu(),
            gathered: floats(DType::BF16, &[2, 5, 6]),
            dst: floats(DType::BF16, &[8, 6]),
            integers: [
                integers(&[5, 2]),
                integers(&[0, 5, 7]),
                integers(&[0, 3, 4]),
            ],
        }
    }

    fn input(&self) -> CpReorderArgs {
        let [lens, ends, padded] = self.integers.each_ref().map(Resident::tensor);
        CpReorderArgs {
            gathered: self.gathered.tensor(),
            dst: self.dst.tensor(),
            context_lens: lens,
            cu_seq_lens: ends,
            cu_padded_lens: padded,
            local_start: 0,
            interleave: 0,
        }
    }

    fn call(&self, args: *const folio_cp_reorder_args) -> Reply {
        // SAFETY: a live context and the caller's structs.
        Reply::of(|err| unsafe { folio_cp_reorder(self.context.0, args, null_mut(), err) })
    }
}

/// Three ranks, two tokens, four heads.
struct Correct {
    context: Context,
    lse_all: Resident<'static>,
    o: Resident<'static>,
    o_out: Resident<'static>,
    lse_out: Resident<'static>,
}

impl Correct {
    fn new() -> Correct {
        Correct {
            context: Context::cpu(),
            lse_all: floats(DType::F32, &[3, 2, 4]),
            o: floats(DType::F16, &[2, 4, 8]),
            o_out: floats(DType::F16, &[2, 4, 8]),
            lse_out: floats(DType::F32, &[2, 4]),
        }
    }

    fn input(&self) -> CpCorrectArgs {
        CpCorrectArgs {
            lse_all: self.lse_all.tensor(),
            rank: 2,
            o: self.o.tensor(),
            o_out: self.o_out.tensor(),
            lse_out: Some(self.lse_out.tensor()),
            lse_base: LogBase::E,
        }
    }

    fn call(&self, args: *const folio_cp_correct_args) -> Reply {
        // SAFETY: a live context and the caller's structs.
        Reply::of(|err| unsafe { folio_cp_correct(self.context.0, args, null_mut(), err) })
    }

    fn is_untouched(&self) -> bool {
        self.o_out.is_untouched() && self.lse_out.is_untouched()
    }
}

#[test]
fn tensors_of_a_reordering() {
    type Args = folio_cp_reorder_args;
    let reorder = Reorder::new();
    let fields = [
        field!(input, Args, gathered, [Free, Free, Free]),
        field!(output, Args, dst, [Free, Exact]),
        field!(input, Args, context_lens, [Free]),
        field!(input, Args, cu_seq_lens, [Exact]),
        field!(input, Args, cu_padded_lens, [Exact]),
    ];
    walk(
        "cp_reorder",
        &fields,
        |tensors| c_cp_reorder(&reorder.input(), tensors),
        |args| reorder.call(args),
        || reorder.dst.is_untouched(),
    );
}

#[test]
fn tensors_of_a_correction() {
    type Args = folio_cp_correct_args;
    let correct = Correct::new();
    let fields = [
        crate::tensors::any_strides(field!(input, Args, lse_all, [Free, Exact, Exact])),
        field!(input, Args, o, [Free, Free, Free]),
        field!(output, Args, o_out, [Exact, Exact, Exact]),
        field!(optional_output, Args, lse_out, [Exact, Exact]),
    ];
    walk(
        "cp_correct",
        &fields,
        |tensors| c_cp_correct(&correct.input(), tensors),
        |args| correct.call(args),
        || correct.is_untouched(),
    );
}

#[test]
fn lengths_that_do_not_fit() {
    for (at, index, value, words) in [
        (0, 0, -1, ["context_lens[0]", "-1"]),
        (0, 0, 4, ["cu_seq_lens[1]", "4"]),
        (1, 2, 9, ["cu_seq_lens[2]", "9"]),
        (1, 0, -1, ["cu_seq_lens[0]", "-1"]),
        (1, 1, 6, ["cu_seq_lens[1]", "6 rows"]),
        (2, 2, 6, ["cu_padded_lens[2]", "6"]),
        (2, 2, 2, ["cu_padded_lens[2]", "2"]),
        (2, 1, 2, ["cu_seq_lens[1]", "request 0"]),
    ] {
        let reorder = Reorder::new();
        let tensors = Tensors::default();
        let args = c_cp_reorder(&reorder.input(), &tensors);
        poke(
            [args.context_lens, args.cu_seq_lens, args.cu_padded_lens][at],
            index,
            value,
        );
        reorder.call(&args).assert(words[0], INVALID, &words);
        assert!(reorder.dst.is_untouched(), "no row was written");
    }
}

#[test]
fn arguments_of_a_correction() {
    type Args = folio_cp_correct_args;
    let (correct, tensors) = (Correct::new(), Tensors::default());
    check(
        &c_cp_correct(&correct.input(), &tensors),
        |args| correct.call(args),
        &[
            (&|a: &mut Args| a.rank = 3, INVALID, &["rank", "3"]),
            (&|a: &mut Args| a.reserved = 5, UNKNOWN, &["reserved", "5"]),
        ],
    );
}

#[test]
fn struct_sizes_and_nulls() {
    let (reorder, correct, tensors) = (Reorder::new(), Correct::new(), Tensors::default());
    let args = c_cp_reorder(&reorder.input(), &tensors);
    sizes("folio_cp_reorder_args", &args, 0, |args| reorder.call(args));
    let args = c_cp_correct(&correct.input(), &tensors);
    let flags = FOLIO_CP_LSE_BASE_2;
    sizes("folio_cp_correct_args", &args, flags, |args| {
        correct.call(args)
    });
    let refused = |reply: Reply, name: &str| reply.assert(name, INVALID, &[name, "NULL"]);
    refused(reorder.call(null()), "folio_cp_reorder_args");
    refused(correct.call(null()), "folio_cp_correct_args");
    // SAFETY: NULL, which every entry refuses.
    unsafe {
        let reorder = |err| folio_cp_reorder(null(), null(), null_mut(), err);
        refused(Reply::of(reorder), "ctx");
        let correct = |err| folio_cp_correct(null(), null(), null_mut(), err);
        refused(Reply::of(correct), "ctx");
    }
}
