//! What the header leaves to the caller: flags that are set once, bytes that are called bool, the order of
//! dimensions in memory.

use crate::common::c_door::Tensors;
use crate::common::instance::Output;
use crate::common::problem::{MaskKind, Pattern, Problem};
use crate::fixture::{Fixture, everything, plain};
use folio::ffi::*;
use folio::problem::Kind;
use std::ptr::null;

const BOOL: folio_dtype = folio_dtype {
    code: 6,
    bits: 8,
    lanes: 1,
};

/// A host sets its flags once, and asks for lse where it needs one.
#[test]
fn lse_of_base_2_may_be_left_out() {
    for kind in [Kind::Decode, Kind::Prefill] {
        let fixture = Fixture::new(&everything(kind));
        let with = fixture.output();
        let flags = |args: &mut folio_attention_args, _: &Tensors| {
            assert_ne!(args.flags & FOLIO_RUN_LSE_BASE_2, 0);
            args.lse = null();
        };
        fixture.run_as(flags).assert_ok("no lse");
        assert!(fixture.layer.output().o == with.o);
    }
}

/// The output with the custom mask described as `dtype`.
fn masked(problem: &Problem, dtype: folio_dtype) -> Output {
    let fixture = Fixture::new(problem);
    let reply = fixture.run_as(|args, _| {
        // SAFETY: the fixture's own tensor, which nobody else refers to.
        unsafe { (*args.custom_mask.cast_mut()).dtype = dtype };
    });
    reply.assert_ok("a custom mask");
    fixture.layer.output()
}

#[test]
fn masks_may_be_bool() {
    const UINT8: folio_dtype = folio_dtype { code: 1, ..BOOL };
    for mask in [
        MaskKind::Bytes(Pattern::Random(0.5)),
        MaskKind::Bits(Pattern::Random(0.5)),
    ] {
        let mut problem = plain(Kind::Prefill);
        problem.layer.mask = mask;
        assert!(masked(&problem, UINT8) == masked(&problem, BOOL));
    }
    let wide = folio_dtype { bits: 32, ..BOOL };
    let fixture = Fixture::new(&everything(Kind::Prefill));
    let reply = fixture.run_as(|args, _| {
        // SAFETY: as above.
        unsafe { (*args.custom_mask.cast_mut()).dtype = wide };
    });
    reply.assert(
        "bool of 32 bits",
        FOLIO_ERR_DTYPE,
        &["custom_mask", "code 6", "32"],
    );
}

/// The scales that a message asks for.
#[test]
fn scales_are_one_or_one_per_head() {
    let fixture = Fixture::new(&everything(Kind::Decode));
    let reply = fixture.run_as(|args, _| {
        // SAFETY: as above; a shape of one extent.
        unsafe { *(*args.k_scales).shape = 2 };
    });
    reply.assert(
        "two scales of three",
        FOLIO_ERR_SHAPE,
        &["k_scales", "[2]", "[1] or [3]"],
    );
    let one = fixture.run_as(|args, _| {
        // SAFETY: as above.
        unsafe { *(*args.k_scales).shape = 1 };
    });
    one.assert_ok("one scale");
}

/// Scales of all requests may be one row, or one number, expanded by strides of 0: the same bits as that row or number.
#[test]
fn scales_may_be_expanded_to_requests() {
    let problem = everything(Kind::Decode);
    let mut shape = [problem.requests.len() as i64, 3];
    for (heads, mut strides) in [(3, [0, 1]), (1, [0, 0])] {
        let fixture = Fixture::new(&problem);
        let of_heads = |args: &mut folio_attention_args, _: &Tensors| {
            // SAFETY: the fixture's own tensor, which nobody else refers to.
            unsafe { *(*args.v_scales).shape = heads };
        };
        fixture.run_as(of_heads).assert_ok("scales of heads");
        let wanted = fixture.layer.output();
        let fixture = Fixture::new(&problem);
        let expanded = |args: &mut folio_attention_args, _: &Tensors| {
            // SAFETY: as above; the extents and strides outlive the run.
            let scales = unsafe { &mut *args.v_scales.cast_mut() };
            scales.ndim = 2;
            scales.shape = shape.as_mut_ptr();
            scales.strides = strides.as_mut_ptr();
        };
        fixture.run_as(expanded).assert_ok("expanded scales");
        let got = fixture.layer.output();
        assert!(got.o == wanted.o, "{strides:?}");
    }
}

/// A `[token, head, element]` tensor with its heads outermost in memory.
struct HeadsFirst {
    data: Vec<u8>,
    shape: [i64; 3],
    strides: [i64; 3],
    bytes: usize,
}

impl HeadsFirst {
    fn of(tensor: &folio_tensor) -> HeadsFirst {
        // SAFETY: a tensor of the fixture with three extents and strides.
        let [shape, strides] = [tensor.shape, tensor.strides]
            .map(|values| unsafe { *values.cast_const().cast::<[i64; 3]>() });
        let bytes = usize::from(tensor.dtype.bits / 8);
        let mut turned = HeadsFirst {
            data: vec![0; shape.iter().product::<i64>() as usize * bytes],
            shape,
            strides: [shape[2], shape[0] * shape[2], 1],
            bytes,
        };
        for (token, head) in (0..shape[0]).flat_map(|t| (0..shape[1]).map(move |h| (t, h))) {
            let from = (token * strides[0] + head * strides[1]) as usize * bytes;
            let row = turned.row(token, head);
            // SAFETY: a row of the fixture's tensor, on the host.
            let source = unsafe {
                let start = tensor
                    .data
                    .cast::<u8>()
                    .add(tensor.byte_offset as usize + from);
                std::slice::from_raw_parts(start, row.len())
            };
            turned.data[row].copy_from_slice(source);
        }
        turned
    }

    fn row(&self, token: i64, head: i64) -> std::ops::Range<usize> {
        let start = (token * self.strides[0] + head * self.strides[1]) as usize * self.bytes;
        start..start + self.shape[2] as usize * self.bytes
    }

    fn tensor(&mut self, like: &folio_tensor) -> folio_tensor {
        folio_tensor {
            data: self.data.as_mut_ptr().cast(),
            shape: self.shape.as_mut_ptr(),
            strides: self.strides.as_mut_ptr(),
            byte_offset: 0,
            ..*like
        }
    }
}

#[test]
fn heads_may_come_before_tokens() {
    for kind in [Kind::Decode, Kind::Prefill] {
        let fixture = Fixture::new(&plain(kind));
        let tensors = Tensors::default();
        let args = fixture.args(&tensors);
        fixture.run(&args).assert_ok("tokens first");
        // SAFETY: tensors of the fixture.
        let (q, o) = unsafe { (&*args.q, &*args.o) };
        let (mut turned_q, expected) = (HeadsFirst::of(q), HeadsFirst::of(o));
        let mut turned_o = HeadsFirst::of(o);
        turned_o.data.fill(0xee);
        let (q, o) = (turned_q.tensor(q), turned_o.tensor(o));
        let turned = folio_attention_args {
            q: &q,
            o: &o,
            ..args
        };
        fixture.run(&turned).assert_ok("heads first");
        assert!(turned_o.data == expected.data);
    }
}
