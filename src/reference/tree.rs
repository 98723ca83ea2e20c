//! The oracle's operator on trees of draft tokens: what a token sees, asked for every token and key.

use crate::problem::TreeMaskArgs;
use crate::tensor::Tensor;

/// A request's tree.
struct Tree<'a> {
    args: &'a TreeMaskArgs,
    first: i64,
    size: i64,
    prefix_len: i64,
}

/// Elements of the masks before a request.
#[derive(Default)]
struct Starts {
    bytes: i64,
    bits: i64,
    tree: i64,
}

pub(super) fn mask(args: &TreeMaskArgs) {
    let mut starts = Starts::default();
    for b in 0..args.prefix_lens.extent(0) {
        let (first, end) = match &args.qo_indptr {
            None => (b * args.tree_size(), (b + 1) * args.tree_size()),
            Some(qo_indptr) => (qo_indptr.integer(&[b]), qo_indptr.integer(&[b + 1])),
        };
        let tree = Tree {
            args,
            first,
            size: end - first,
            prefix_len: args.prefix_lens.integer(&[b]),
        };
        tree.masks(&starts);
        tree.rows();
        let elements = tree.size * tree.kv_len();
        starts.bytes += elements;
        starts.bits += (elements + 7) / 8;
        starts.tree += tree.size * tree.size;
    }
}

impl Tree<'_> {
    fn kv_len(&self) -> i64 {
        self.prefix_len + self.size
    }

    fn parent(&self, token: i64) -> i64 {
        self.args.parents.integer(&[self.first + token])
    }

    /// Whether a token sees a key, of which negative ones stand before the tree.
    fn sees(&self, token: i64, key: i64) -> bool {
        key < 0 || token == key || (token > key && self.sees_above(token, key))
    }

    fn sees_above(&self, token: i64, key: i64) -> bool {
        let parent = self.parent(token);
        parent >= 0 && self.sees(parent, key)
    }

    fn masks(&self, starts: &Starts) {
        let (kv_len, elements) = (self.kv_len(), self.size * self.kv_len());
        let at = |element: i64| self.sees(element / kv_len, element % kv_len - self.prefix_len);
        if let Some(out) = self.args.mask_bytes {
            for element in 0..elements {
                out.set(&[starts.bytes + element], f32::from(at(element)));
            }
        }
        if let Some(out) = self.args.mask_bits {
            for byte in 0..(elements + 7) / 8 {
                let bits = (8 * byte..elements.min(8 * byte + 8)).map(at);
                let value: u32 = bits.zip(0..).map(|(bit, n)| u32::from(bit) << n).sum();
                out.set(&[starts.bits + byte], value as f32);
            }
        }
        if let Some(out) = self.args.tree_mask {
            for element in 0..self.size * self.size {
                let bit = self.sees(element / self.size, element % self.size);
                out.set(&[starts.tree + element], f32::from(bit));
            }
        }
    }

    fn rows(&self) {
        for token in 0..self.size {
            let row = self.first + token;
            if let Some(out) = self.args.tree_bits {
                for byte in 0..out.extent(1) {
                    let seen = (8 * byte..self.size.min(8 * byte + 8)).map(|j| self.sees(token, j));
                    let value: u32 = seen.zip(0..).map(|(bit, n)| u32::from(bit) << n).sum();
                    out.set(&[row, byte], value as f32);
                }
            }
            let ancestors = (0..token).filter(|&j| self.sees(token, j)).count() as i64;
            put(&self.args.positions, row, self.prefix_len + ancestors);
            let child = (0..self.size).find(|&j| self.parent(j) == token);
            put(&self.args.next_token, row, child.unwrap_or(-1));
            let is_sibling = |&j: &i64| self.parent(j) == self.parent(token);
            let sibling = (token + 1..self.size).find(is_sibling);
            put(&self.args.next_sibling, row, sibling.unwrap_or(-1));
        }
    }
}

fn put(out: &Option<Tensor>, row: i64, value: i64) {
    if let Some(out) = out {
        out.set_integer(&[row], value);
    }
}
