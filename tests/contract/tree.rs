//! Trees of draft tokens with callers who err.

use crate::common::c_door::{Tensors, c_tree_mask};
use crate::common::memory::HostMemory;
use crate::common::tree::{Forest, OUTPUTS};
use crate::fixture::{Context, Reply};
use crate::structs::sizes;
use crate::table::{INVALID, poke};
use crate::tensors::Dim::{AtLeast, Exact, Free};
use crate::tensors::{Field, field, input, output, walk};
use folio::ffi::*;
use std::ptr::{null, null_mut};

/// Two trees of four tokens, or one of four and one of three, with every output.
struct Trees {
    context: Context,
    tensors: crate::common::tree::Tensors<'static>,
}

impl Trees {
    fn new(is_ragged: bool) -> Trees {
        let second = [-1, 0, 0, 2];
        let sizes = if is_ragged { 3 } else { 4 };
        let parents = vec![vec![-1, 0, 1, 1], second[..sizes].to_vec()];
        let forest = Forest::new(parents, vec![9, 2]);
        Trees {
            context: Context::cpu(),
            tensors: forest.tensors(&HostMemory),
        }
    }

    fn args(&self, tensors: &Tensors) -> folio_tree_mask_args {
        c_tree_mask(&self.tensors.args(), tensors)
    }

    fn call(&self, args: *const folio_tree_mask_args) -> Reply {
        // SAFETY: a live context and the caller's structs.
        Reply::of(|err| unsafe { folio_tree_mask(self.context.0, args, null_mut(), err) })
    }
}

/// The fields of trees of one size, or of many.
fn fields(is_ragged: bool) -> Vec<Field> {
    let mut fields = match is_ragged {
        false => vec![
            field!(input, folio_tree_mask_args, parents, [Exact, Free]),
            field!(
                output,
                folio_tree_mask_args,
                tree_mask,
                [Exact, Exact, Exact]
            )
            .or_none(),
            field!(
                output,
                folio_tree_mask_args,
                tree_bits,
                [Exact, Exact, Free]
            )
            .or_none(),
            field!(output, folio_tree_mask_args, positions, [Exact, Exact]).or_none(),
            field!(output, folio_tree_mask_args, next_token, [Exact, Exact]).or_none(),
            field!(output, folio_tree_mask_args, next_sibling, [Exact, Exact]).or_none(),
        ],
        true => vec![
            field!(input, folio_tree_mask_args, parents, [Free]),
            field!(input, folio_tree_mask_args, qo_indptr, [Exact]).or_none(),
            field!(output, folio_tree_mask_args, tree_mask, [AtLeast]).or_none(),
            field!(output, folio_tree_mask_args, tree_bits, [Exact, Free]).or_none(),
            field!(output, folio_tree_mask_args, positions, [Exact]).or_none(),
            field!(output, folio_tree_mask_args, next_token, [Exact]).or_none(),
            field!(output, folio_tree_mask_args, next_sibling, [Exact]).or_none(),
        ],
    };
    fields.extend([
        field!(input, folio_tree_mask_args, prefix_lens, [Free]),
        field!(output, folio_tree_mask_args, mask_bytes, [AtLeast]).or_none(),
        field!(output, folio_tree_mask_args, mask_bits, [AtLeast]).or_none(),
    ]);
    fields
}

#[test]
fn tensors_of_trees_of_one_size() {
    let trees = Trees::new(false);
    walk(
        "tree_mask",
        &fields(false),
        |tensors| trees.args(tensors),
        |args| trees.call(args),
        || trees.tensors.is_untouched(),
    );
}

#[test]
fn tensors_of_trees_of_many_sizes() {
    let trees = Trees::new(true);
    walk(
        "tree_mask with qo_indptr",
        &fields(true),
        |tensors| trees.args(tensors),
        |args| trees.call(args),
        || trees.tensors.is_untouched(),
    );
}

/// What is changed: an element of parents, prefix_lens or qo_indptr.
type Change = (usize, usize, i32);

#[test]
fn numbers_that_do_not_fit() {
    let rows: [(bool, Change, [&str; 2]); 12] = [
        (false, (0, 0, 0), ["parents[0]", "0 of token 0"]),
        (false, (0, 1, 1), ["parents[1]", "1 of token 1"]),
        (false, (0, 2, -2), ["parents[2]", "-2"]),
        (false, (0, 7, 4), ["parents[7]", "4 of token 3"]),
        (true, (0, 6, i32::MAX), ["parents[6]", "2147483647"]),
        (true, (0, 4, 3), ["parents[4]", "3 of token 0"]),
        (false, (1, 1, -1), ["prefix_lens[1]", "-1"]),
        (
            false,
            (1, 0, i32::MAX - 3),
            ["prefix_lens[0]", "2147483644"],
        ),
        (false, (1, 0, 10), ["mask_bytes", "80 or more"]),
        (true, (2, 0, 1), ["qo_indptr[0]", "1"]),
        (true, (2, 1, -1), ["qo_indptr[1]", "-1"]),
        (true, (2, 2, 8), ["qo_indptr[2]", "8"]),
    ];
    for (is_ragged, (input, at, value), words) in rows {
        let (trees, tensors) = (Trees::new(is_ragged), Tensors::default());
        let args = trees.args(&tensors);
        poke(
            [args.parents, args.prefix_lens, args.qo_indptr][input],
            at,
            value,
        );
        let status = match words[0] {
            "mask_bytes" => FOLIO_ERR_SHAPE,
            _ => INVALID,
        };
        trees.call(&args).assert(words[0], status, &words);
        assert!(trees.tensors.is_untouched(), "{words:?}: written");
    }
}

/// Rows of bits that a tree does not fit into, and of bytes that no row has.
#[test]
fn rows_of_bits() {
    for (row_bytes, size, is_fine) in [
        (1, 8, true),
        (1, 9, false),
        (2, 16, true),
        (2, 17, false),
        (4, 32, true),
        (4, 33, false),
        (3, 8, false),
        (8, 33, false),
    ] {
        for is_ragged in [false, true] {
            let forest = Forest {
                is_ragged,
                row_bytes,
                wanted: 1 << 3,
                ..Forest::new(vec![(-1..size - 1).collect()], vec![1])
            };
            let (context, outputs) = (Context::cpu(), forest.tensors(&HostMemory));
            let tensors = Tensors::default();
            let args = c_tree_mask(&outputs.args(), &tensors);
            // SAFETY: a live context and live structs.
            let reply =
                Reply::of(|err| unsafe { folio_tree_mask(context.0, &args, null_mut(), err) });
            match is_fine {
                true => reply.assert_ok("rows of bits"),
                false => {
                    let words = ["tree_bits", &row_bytes.to_string()];
                    reply.assert("rows of bits", FOLIO_ERR_SHAPE, &words);
                    assert!(outputs.is_untouched());
                }
            }
        }
    }
}

/// Every output may be left out, and none is needed.
#[test]
fn outputs_that_are_not_wanted() {
    for wanted in 0..1 << OUTPUTS.len() {
        let forest = Forest {
            wanted,
            ..Forest::new(vec![vec![-1, 0, 1, 0]], vec![3])
        };
        let (context, outputs) = (Context::cpu(), forest.tensors(&HostMemory));
        let tensors = Tensors::default();
        let args = c_tree_mask(&outputs.args(), &tensors);
        // SAFETY: a live context and live structs.
        let reply = Reply::of(|err| unsafe { folio_tree_mask(context.0, &args, null_mut(), err) });
        reply.assert_ok("some outputs");
        assert_eq!(forest.compare(&outputs), Ok(()));
    }
}

#[test]
fn struct_sizes_and_nulls() {
    let (trees, tensors) = (Trees::new(true), Tensors::default());
    let args = trees.args(&tensors);
    sizes("folio_tree_mask_args", &args, 0, |args| trees.call(args));
    let refused = |reply: Reply, name: &str| reply.assert(name, INVALID, &[name, "NULL"]);
    refused(trees.call(null()), "folio_tree_mask_args");
    // SAFETY: NULL, which every entry refuses.
    let no_context = |err| unsafe { folio_tree_mask(null(), null(), null_mut(), err) };
    refused(Reply::of(no_context), "ctx");
}
