//! What the merges ask for beside tensors: scales, tokens without state a, and offsets of states.

use crate::common::c_door::{Tensors, c_merge, c_merge_states, c_merge_varlen};
use crate::fixture::Merge;
use crate::table::{INVALID, UNKNOWN, check, poke};
use folio::dtype::DType;
use folio::ffi::*;

/// An output of fp8 in the place of one of the states' type.
fn in_fp8(v_out: *const folio_tensor) {
    of_type(v_out, DType::F8E4M3);
}

/// The same tensor of narrower elements.
fn of_type(tensor: *const folio_tensor, dtype: DType) {
    // SAFETY: a tensor of the test's own, whose memory holds more bytes than are needed.
    let tensor = unsafe { &mut *tensor.cast_mut() };
    let (code, bits) = dtype.to_dlpack();
    (tensor.dtype.code, tensor.dtype.bits) = (code, bits);
}

#[test]
fn scales_of_outputs_that_have_none() {
    let (merge, tensors) = (Merge::new(), Tensors::default());
    type Two = folio_merge_state_args;
    let bf16 = ["o_scale", "2", "bfloat16"];
    check(
        &c_merge(&merge.two(), &tensors),
        |args| merge.call_two(args),
        &[
            (&|a: &mut Two| a.o_scale = 2.0, INVALID, &bf16),
            (
                &|a: &mut Two| a.o_scale = f32::NAN,
                INVALID,
                &["o_scale", "NaN"],
            ),
            (
                &|a: &mut Two| a.num_tokens_without_a = 3,
                INVALID,
                &["num_tokens_without_a", "3", "0 to 2"],
            ),
        ],
    );
    type Many = folio_merge_states_args;
    check(
        &c_merge_states(&merge.many(), &tensors),
        |args| merge.call_many(args),
        &[
            (&|a: &mut Many| a.o_scale = 2.0, INVALID, &bf16),
            (&|a: &mut Many| a.reserved = 7, UNKNOWN, &["reserved", "7"]),
        ],
    );
    type Varlen = folio_merge_varlen_args;
    check(
        &c_merge_varlen(&merge.varlen(), &tensors),
        |args| merge.call_varlen(args),
        &[
            (&|a: &mut Varlen| a.o_scale = 2.0, INVALID, &bf16),
            (
                &|a: &mut Varlen| a.reserved = 7,
                UNKNOWN,
                &["reserved", "7"],
            ),
        ],
    );
}

/// The lse of two states are of one type, which is not that of any other number.
#[test]
fn types_of_lse() {
    let (merge, tensors) = (Merge::new(), Tensors::default());
    for (dtype, words) in [
        (DType::BF16, ["s_b", "bfloat16", "float32"]),
        (DType::F8E4M3, ["s_b", "float8_e4m3", "float32"]),
    ] {
        let args = c_merge(&merge.two(), &tensors);
        of_type(args.s_b, dtype);
        merge
            .call_two(&args)
            .assert("merge_state", FOLIO_ERR_DTYPE, &words);
    }
    let args = c_merge_states(&merge.many(), &tensors);
    of_type(args.s_out, DType::F8E5M2);
    let words = ["s_out", "float8_e5m2", "float32 or float16 or bfloat16"];
    merge
        .call_many(&args)
        .assert("merge_states", FOLIO_ERR_DTYPE, &words);
}

/// 1 is what 0 stands for, and no scale of an output.
#[test]
fn a_scale_of_one_is_none() {
    let (merge, tensors) = (Merge::new(), Tensors::default());
    let mut args = c_merge(&merge.two(), &tensors);
    args.o_scale = 1.0;
    merge.call_two(&args).assert_ok("o_scale 1");
}

#[test]
fn scales_of_fp8_outputs() {
    let tensors = Tensors::default();
    for (o_scale, word) in [
        (-1.0, "-1"),
        (1e-30, "1e-30"),
        (1e30, "1e30"),
        (f32::INFINITY, "inf"),
    ] {
        let words = ["o_scale", word];
        let merge = Merge::new();
        let mut two = c_merge(&merge.two(), &tensors);
        let mut many = c_merge_states(&merge.many(), &tensors);
        let mut varlen = c_merge_varlen(&merge.varlen(), &tensors);
        (two.o_scale, many.o_scale, varlen.o_scale) = (o_scale, o_scale, o_scale);
        for v_out in [two.v_out, many.v_out, varlen.v_out] {
            in_fp8(v_out);
        }
        merge.call_two(&two).assert("two", INVALID, &words);
        merge.call_many(&many).assert("many", INVALID, &words);
        merge.call_varlen(&varlen).assert("varlen", INVALID, &words);
        assert!(merge.is_untouched());
        two.o_scale = 0.5;
        merge.call_two(&two).assert_ok("o_scale of an fp8 output");
    }
}

/// States are not fp8, and an output of another type than theirs is.
#[test]
fn types_that_do_not_fit() {
    let (merge, tensors) = (Merge::new(), Tensors::default());
    let varlen = c_merge_varlen(&merge.varlen(), &tensors);
    in_fp8(varlen.v);
    let reply = merge.call_varlen(&varlen);
    reply.assert("fp8 states", FOLIO_ERR_DTYPE, &["v: ", "e4m3"]);
    let many = c_merge_states(&merge.many(), &tensors);
    // SAFETY: a tensor of the test's own.
    unsafe { (*many.v_out.cast_mut()).dtype = FLOAT16 };
    let reply = merge.call_many(&many);
    reply.assert(
        "another type",
        FOLIO_ERR_DTYPE,
        &["v_out", "float16", "bfloat16"],
    );
    assert!(merge.is_untouched());
}

const FLOAT16: folio_dtype = folio_dtype {
    code: 2,
    bits: 16,
    lanes: 1,
};

#[test]
fn offsets_that_do_not_fit() {
    for (at, value, words) in [
        (0, -1, ["indptr[0]", "-1", "to 4"]),
        (1, 5, ["indptr[1]", "5", "to 4"]),
        (1, -2, ["indptr[1]", "-2", "to 4"]),
        (2, 2, ["indptr[2]", "2", "3"]),
        (2, 5, ["indptr[2]", "5", "3"]),
        (2, i32::MAX, ["indptr[2]", "2147483647", "4, the states"]),
    ] {
        let (merge, tensors) = (Merge::new(), Tensors::default());
        let args = c_merge_varlen(&merge.varlen(), &tensors);
        poke(args.indptr, at, value);
        merge.call_varlen(&args).assert(words[0], INVALID, &words);
        assert!(merge.is_untouched(), "no row was written");
    }
}

/// States before the first offset and after the last one belong to no token.
#[test]
fn states_of_no_token() {
    let (merge, tensors) = (Merge::new(), Tensors::default());
    let args = c_merge_varlen(&merge.varlen(), &tensors);
    poke(args.indptr, 0, 1);
    poke(args.indptr, 1, 2);
    poke(args.indptr, 2, 3);
    merge.call_varlen(&args).assert_ok("one state each");
}
