//! What the operator on trees of draft tokens is given.

use crate::tensor::Tensor;

/// A tree of draft tokens for each request, each token under its parent, and what is wanted of the trees.
#[derive(Debug, Clone, Copy)]
pub struct TreeMaskArgs {
    /// int32 `[batch_size, tree_size]`, or `[num_tokens]` with `qo_indptr`: the parent of each token, counted from the
    /// first token of its request, below the token's own index; -1 for a root. Checked: always `[num_tokens]`.
    pub parents: Tensor,
    /// `[batch_size]` int32: keys before the tree of each request.
    pub prefix_lens: Tensor,
    /// `[batch_size + 1]` int32: tokens before each request; `None` where all trees have as many.
    pub qo_indptr: Option<Tensor>,
    /// `[elements or more]` uint8: a byte for every row and key, as [`super::Mask::Bytes`] has them.
    pub mask_bytes: Option<Tensor>,
    /// `[elements or more]` uint8: a bit for every row and key, as [`super::Mask::Bits`] has them.
    pub mask_bits: Option<Tensor>,
    /// uint8 `[batch_size, tree_size, tree_size]`, or `[elements or more]` with `qo_indptr`: a byte for every row and
    /// token of the tree. Checked: always `[elements]`.
    pub tree_mask: Option<Tensor>,
    /// uint8, as `parents` with a last dimension of 1, 2 or 4: a bit for every row and token of the tree. Checked:
    /// always `[num_tokens, bytes]`.
    pub tree_bits: Option<Tensor>,
    /// int32 or int64, as `parents`: `prefix_lens` and the depth of each token. Checked: always `[num_tokens]`, as are
    /// the next two.
    pub positions: Option<Tensor>,
    /// int32 or int64, as `parents`: the first child of each token, or -1.
    pub next_token: Option<Tensor>,
    /// int32 or int64, as `parents`: the next token under the same parent, or -1.
    pub next_sibling: Option<Tensor>,
}

impl TreeMaskArgs {
    /// Tokens of a tree where all trees have as many. Of checked arguments.
    pub fn tree_size(&self) -> i64 {
        self.parents.extent(0) / self.prefix_lens.extent(0).max(1)
    }
}
