//! Trees of draft tokens: masks, positions and links from the parents of the tokens. A thread takes a request.
#![allow(unsafe_code)]

use super::threads::Pool;
use crate::error::{Error, Result};
use crate::problem::{Checked, TreeMaskArgs};
use crate::tensor::Tensor;

/// Makes what is wanted of all trees.
pub fn mask(pool: &Pool, args: &Checked<TreeMaskArgs>) -> Result<()> {
    let (Some(parents), Some(prefix_lens)) = (args.parents.as_i32(), args.prefix_lens.as_i32())
    else {
        return Err(Error::Internal(
            "parents and lengths passed their checks and are no host integers".into(),
        ));
    };
    let qo_indptr = args.qo_indptr.as_ref().and_then(Tensor::as_i32);
    let size = args.tree_size() as usize;
    let rows = |b: usize| match qo_indptr {
        None => b * size..(b + 1) * size,
        Some(qo_indptr) => qo_indptr[b] as usize..qo_indptr[b + 1] as usize,
    };
    let elements = |b: usize| rows(b).len() * (prefix_lens[b] as usize + rows(b).len());
    pool.turn().for_each(prefix_lens.len(), &|_, b| {
        let tree = Tree {
            parents: &parents[rows(b)],
            prefix_len: prefix_lens[b] as usize,
        };
        let (len, before) = (tree.parents.len(), 0..b);
        // SAFETY: what is asked for below is of this request alone, and `api` checked that it is there.
        let part = |out: &Tensor, first, len| unsafe { part(out, first, len) };
        if let Some(out) = &args.mask_bytes {
            let first = before.clone().map(elements).sum();
            tree.write_bytes(tree.prefix_len, part(out, first, elements(b)));
        }
        if let Some(out) = &args.mask_bits {
            let bytes = |b: usize| elements(b).div_ceil(8);
            let out = part(out, before.clone().map(bytes).sum(), bytes(b));
            tree.write_bits(tree.prefix_len, tree.prefix_len + len, out);
        }
        if let Some(out) = &args.tree_mask {
            let first = before.map(|b| rows(b).len() * rows(b).len()).sum();
            tree.write_bytes(0, part(out, first, len * len));
        }
        if let Some(out) = &args.tree_bits {
            let bytes = out.extent(1) as usize;
            let out = part(out, rows(b).start * bytes, len * bytes);
            tree.write_bits(0, 8 * bytes, out);
        }
        tree.write_rows(args, rows(b).start);
    });
    Ok(())
}

/// The tree of a request; every parent stands before its children.
struct Tree<'a> {
    parents: &'a [i32],
    prefix_len: usize,
}

impl Tree<'_> {
    /// A token and its ancestors, up to a root.
    fn path(&self, token: usize) -> impl Iterator<Item = usize> {
        let above = |&token: &usize| usize::try_from(self.parents[token]).ok();
        std::iter::successors(Some(token), above)
    }

    /// A row of bytes for every token: those before the tree, then the tree's.
    fn write_bytes(&self, prefix_len: usize, out: &mut [u8]) {
        let row_len = (prefix_len + self.parents.len()).max(1);
        for (token, row) in out.chunks_exact_mut(row_len).enumerate() {
            row[..prefix_len].fill(1);
            row[prefix_len..].fill(0);
            for seen in self.path(token) {
                row[prefix_len + seen] = 1;
            }
        }
    }

    /// The same in bits, with a row every `stride` bits.
    fn write_bits(&self, prefix_len: usize, stride: usize, out: &mut [u8]) {
        out.fill(0);
        for token in 0..self.parents.len() {
            let first = token * stride;
            set_bits(out, first, prefix_len);
            for seen in self.path(token) {
                set_bits(out, first + prefix_len + seen, 1);
            }
        }
    }

    /// Positions and links; `first` is the row of the first token.
    fn write_rows(&self, args: &TreeMaskArgs, first: usize) {
        let put = |out: &Option<Tensor>, token: usize, value: &dyn Fn() -> Option<usize>| {
            if let Some(out) = out {
                let value = value().map_or(-1, |value| value as i64);
                out.set_integer(&[(first + token) as i64], value);
            }
        };
        let next = |after: usize, parent: i32| {
            let behind = &self.parents[after + 1..];
            let found = behind.iter().position(|&other| other == parent);
            found.map(|at| after + 1 + at)
        };
        for (token, &parent) in self.parents.iter().enumerate() {
            let position = || Some(self.prefix_len + self.path(token).count() - 1);
            put(&args.positions, token, &position);
            put(&args.next_token, token, &|| next(token, token as i32));
            put(&args.next_sibling, token, &|| next(token, parent));
        }
    }
}

/// Sets `count` bits from bit `first` on, little-endian in each byte.
fn set_bits(out: &mut [u8], first: usize, count: usize) {
    let end = first + count;
    let whole = first.div_ceil(8)..end / 8;
    if whole.start >= whole.end {
        (first..end).for_each(|bit| out[bit / 8] |= 1 << (bit % 8));
        return;
    }
    (first..8 * whole.start).for_each(|bit| out[bit / 8] |= 1 << (bit % 8));
    (8 * whole.end..end).for_each(|bit| out[bit / 8] |= 1 << (bit % 8));
    out[whole].fill(0xff);
}

/// Bytes of a compact output.
///
/// # Safety
/// They lie within the tensor, and nobody else uses them meanwhile.
unsafe fn part<'a>(out: &Tensor, first: usize, len: usize) -> &'a mut [u8] {
    if len == 0 {
        return &mut [];
    }
    // SAFETY: the caller's promise.
    unsafe { std::slice::from_raw_parts_mut((out.address() as *mut u8).add(first), len) }
}
