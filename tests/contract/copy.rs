//! Copies of pages with callers who err.

use crate::common::c_door::{Tensors, c_copy};
use crate::common::memory::{HostMemory, Image, Resident, View};
use crate::fixture::{Context, Reply};
use crate::structs::sizes;
use crate::table::{INVALID, poke};
use crate::tensors::Dim::{Exact, Free};
use crate::tensors::{input, output, walk};
use folio::dtype::DType;
use folio::ffi::*;
use folio::problem::{CopyArgs, PagesToCopy};
use std::mem::offset_of;
use std::ptr::{null, null_mut};

/// Three pairs, from five pages to four.
struct Copying {
    context: Context,
    sources: [Resident<'static>; 2],
    targets: [Resident<'static>; 2],
    pairs: Resident<'static>,
}

impl Copying {
    fn new() -> Copying {
        // Every page holds something else.
        let pages = |count, dim| {
            let view = View::compact(DType::BF16, &[count, 4, 2, dim]);
            let mut image = Image::poisoned(view);
            for (at, byte) in image.bytes.iter_mut().enumerate() {
                *byte = (at % 251) as u8;
            }
            Resident::new(&HostMemory, image)
        };
        Copying {
            context: Context::cpu(),
            sources: [pages(5, 8), pages(5, 6)],
            targets: [pages(4, 8), pages(4, 6)],
            pairs: Resident::new(&HostMemory, Image::of_i32(&[3, 2], &[4, 0, 1, 3, 4, 2])),
        }
    }

    fn input(&self) -> CopyArgs {
        let pages = |n: usize| PagesToCopy {
            src: self.sources[n].tensor(),
            dst: self.targets[n].tensor(),
        };
        CopyArgs {
            k: pages(0),
            v: Some(pages(1)),
            page_pairs: self.pairs.tensor(),
        }
    }

    /// The same within the sources.
    fn in_place(&self) -> CopyArgs {
        let pages = |n: usize| PagesToCopy {
            src: self.sources[n].tensor(),
            dst: self.sources[n].tensor(),
        };
        CopyArgs {
            k: pages(0),
            v: Some(pages(1)),
            page_pairs: self.pairs.tensor(),
        }
    }

    fn call(&self, args: *const folio_kv_copy_args) -> Reply {
        // SAFETY: a live context and the caller's structs.
        Reply::of(|err| unsafe { folio_kv_copy(self.context.0, args, null_mut(), err) })
    }

    fn is_untouched(&self) -> bool {
        let all = self.sources.iter().chain(&self.targets);
        all.into_iter().all(Resident::is_untouched)
    }
}

#[test]
fn tensors_of_a_copy() {
    type Args = folio_kv_copy_args;
    let copying = Copying::new();
    let fields = [
        input(
            "k_src",
            offset_of!(Args, k_src),
            &[Free, Exact, Exact, Exact],
        ),
        output(
            "k_dst",
            offset_of!(Args, k_dst),
            &[Free, Exact, Exact, Exact],
        ),
        input(
            "v_src",
            offset_of!(Args, v_src),
            &[Exact, Exact, Exact, Exact],
        ),
        output(
            "v_dst",
            offset_of!(Args, v_dst),
            &[Exact, Exact, Exact, Exact],
        ),
        input("page_pairs", offset_of!(Args, page_pairs), &[Free, Exact]),
    ];
    walk(
        "kv_copy",
        &fields,
        |tensors| c_copy(&copying.input(), tensors),
        |args| copying.call(args),
        || copying.is_untouched(),
    );
}

#[test]
fn a_cache_of_one_tensor() {
    let (copying, tensors) = (Copying::new(), Tensors::default());
    let mut args = c_copy(&copying.input(), &tensors);
    (args.v_src, args.v_dst) = (null(), null());
    copying.call(&args).assert_ok("keys alone");
    assert!(!copying.targets[0].is_untouched() && copying.targets[1].is_untouched());
}

#[test]
fn pairs_that_break_the_rules() {
    let rows: [(usize, i32, &[&str]); 4] = [
        (0, 5, &["page_pairs[0, 0]", "5", "src"]),
        (3, 4, &["page_pairs[1, 1]", "4", "dst"]),
        (3, 0, &["page_pairs[1, 1]", "0", "no pair before it"]),
        (4, i32::MAX, &["page_pairs[2, 0]", "2147483647"]),
    ];
    for (at, value, words) in rows {
        let (copying, tensors) = (Copying::new(), Tensors::default());
        let args = c_copy(&copying.input(), &tensors);
        poke(args.page_pairs, at, value);
        copying.call(&args).assert(words[0], INVALID, words);
        assert!(copying.is_untouched(), "no page was written");
    }
    // Within one tensor a page is either read or written.
    for (at, value, words) in [
        (0, 3, ["page_pairs[0, 0]", "3", "one tensor"]),
        (5, 1, ["page_pairs[1, 0]", "1", "one tensor"]),
    ] {
        let (copying, tensors) = (Copying::new(), Tensors::default());
        let args = c_copy(&copying.in_place(), &tensors);
        poke(args.page_pairs, at, value);
        copying.call(&args).assert(words[0], INVALID, &words);
        assert!(copying.is_untouched(), "no page was written");
    }
    let (copying, tensors) = (Copying::new(), Tensors::default());
    let args = c_copy(&copying.in_place(), &tensors);
    copying.call(&args).assert_ok("in place");
    poke(args.page_pairs, 1, 4);
    let words = ["page_pairs[2, 0]", "4"];
    copying
        .call(&args)
        .assert("a pair of one page", INVALID, &words);
}

/// Pages that are not one run of bytes, and those that are one in another order.
#[test]
fn pages_without_gaps() {
    let (copying, tensors) = (Copying::new(), Tensors::default());
    let args = c_copy(&copying.input(), &tensors);
    let strides = |tensor: *const folio_tensor, strides: [i64; 4]| {
        // SAFETY: the test's own tensor of four dimensions.
        unsafe { std::slice::from_raw_parts_mut((*tensor).strides, 4).copy_from_slice(&strides) }
    };
    strides(args.k_src, [64, 8, 32, 1]);
    let words = ["k_dst", "k_src", "[64, 8, 32, 1]"];
    let answer = copying.call(&args);
    answer.assert("other orders", FOLIO_ERR_SHAPE, &words);
    strides(args.k_dst, [64, 8, 32, 1]);
    copying.call(&args).assert_ok("one order");
    for tensor in [args.v_src, args.v_dst] {
        strides(tensor, [96, 24, 6, 1]);
    }
    let answer = copying.call(&args);
    answer.assert(
        "gaps",
        FOLIO_ERR_SHAPE,
        &["v_src", "[96, 24, 6, 1]", "gaps"],
    );
}

#[test]
fn struct_sizes_and_nulls() {
    let (copying, tensors) = (Copying::new(), Tensors::default());
    let args = c_copy(&copying.input(), &tensors);
    sizes("folio_kv_copy_args", &args, 0, |args| copying.call(args));
    let refused = |reply: Reply, name: &str| reply.assert(name, INVALID, &[name, "NULL"]);
    refused(copying.call(null()), "folio_kv_copy_args");
    // SAFETY: NULL, which every entry refuses.
    let reply = Reply::of(|err| unsafe { folio_kv_copy(null(), null(), null_mut(), err) });
    refused(reply, "ctx");
}
