//! Trees of draft tokens: masks, positions and links from parents.

use super::context::{folio_context, operate};
use super::error::folio_error;
use super::sized::Input;
use super::status::folio_status;
use super::tensor::{folio_tensor, required, tensor};
use crate::api;
use crate::error::Result;
use crate::problem::TreeMaskArgs;
use std::ffi::c_void;

/// A tree of draft tokens for each request, each token under its parent, and what is wanted of the trees. A token sees
/// the keys before the tree, its ancestors and itself (SpecInfer, Miao et al. 2024; Medusa, Cai et al. 2024). The masks
/// are those that runs take with the draft tokens' keys appended: kv_len is `prefix_lens + tree_size`.
///
/// A token whose parent is -1 is a root. There may be several, as where the last verified token is not part of the tree.
///
/// Outputs may be NULL. All tensors are contiguous.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct folio_tree_mask_args {
    /// sizeof(folio_tree_mask_args).
    pub struct_size: u32,
    /// 0.
    pub flags: u32,
    /// `[batch_size, tree_size]` int32, or `[num_tokens]` with qo_indptr: the parent of each token, counted from the first
    /// token of its request, below the token's own index; -1 for a root.
    pub parents: *const folio_tensor,
    /// `[batch_size]` int32: keys before the tree of each request, without any of its tokens. With those they are 2^31 - 1 at
    /// most.
    pub prefix_lens: *const folio_tensor,
    /// `[batch_size + 1]` int32, the qo_indptr of the batch: tokens before each request, for trees of different sizes. Tokens
    /// behind the last offset are of no request. NULL: all trees have tree_size tokens.
    pub qo_indptr: *const folio_tensor,
    /// Output: `[elements or more]` uint8 or bool, for FOLIO_MASK_CUSTOM_BYTES: `[tree_size, prefix_len + tree_size]` per
    /// request, 1 or 0.
    pub mask_bytes: *const folio_tensor,
    /// Output: `[elements or more]` uint8, for FOLIO_MASK_CUSTOM_BITS: the same in bits, and 0 up to the end of a byte.
    pub mask_bits: *const folio_tensor,
    /// Output: `[batch_size, tree_size, tree_size]` uint8 or bool, or `[elements or more]` with qo_indptr: mask_bytes without the
    /// keys before the tree. SGLang's QLEN_ONLY.
    pub tree_mask: *const folio_tensor,
    /// Output: `[batch_size, tree_size, bytes]` uint8, or `[num_tokens, bytes]` with qo_indptr, of 1, 2 or 4 bytes, a bit for
    /// every token of the tree: bit j of a little-endian number says whether the row sees token j. Trees have at most as many
    /// tokens; where a qo_indptr on CUDA says otherwise, the tokens behind have no bits. SGLang's QLEN_ONLY_BITPACKING.
    pub tree_bits: *const folio_tensor,
    /// Output: int32 or int64, as parents: the position of each token, prefix_len and the number of its ancestors.
    pub positions: *const folio_tensor,
    /// Output: int32 or int64, as parents: the first child of each token, counted as parents are; -1 where it has none.
    /// SGLang's retrive_next_token.
    pub next_token: *const folio_tensor,
    /// Output: int32 or int64, as parents: the next token with the same parent (of a root: the next root), or -1. SGLang's
    /// retrive_next_sibling.
    pub next_sibling: *const folio_tensor,
}

const _: () = assert!(size_of::<folio_tree_mask_args>() == 88);

// SAFETY: repr(C), two u32 first, pointers only, no padding (asserted by size).
unsafe impl Input for folio_tree_mask_args {
    const NAME: &'static str = "folio_tree_mask_args";
    const FIRST_SIZE: usize = 88;
    const FLAGS: u32 = 0;
    type Parsed = TreeMaskArgs;

    unsafe fn parse(&self) -> Result<TreeMaskArgs> {
        // SAFETY: the caller's promise about the tensors.
        unsafe {
            Ok(TreeMaskArgs {
                parents: required("parents", self.parents)?,
                prefix_lens: required("prefix_lens", self.prefix_lens)?,
                qo_indptr: tensor("qo_indptr", self.qo_indptr)?,
                mask_bytes: tensor("mask_bytes", self.mask_bytes)?,
                mask_bits: tensor("mask_bits", self.mask_bits)?,
                tree_mask: tensor("tree_mask", self.tree_mask)?,
                tree_bits: tensor("tree_bits", self.tree_bits)?,
                positions: tensor("positions", self.positions)?,
                next_token: tensor("next_token", self.next_token)?,
                next_sibling: tensor("next_sibling", self.next_sibling)?,
            })
        }
    }
}

/// Makes masks, positions and links of trees of draft tokens from the parents of their tokens.
///
/// On CUDA numbers are read by the kernel. There a token with a parent that does not stand before it is a root, and nothing is
/// written beyond a tensor. The first call on a context loads code and answers CAPTURE in a capture. Later ones can be
/// captured: they are one launch each. On the CPU such a parent is refused, and the outputs are complete on return.
///
/// @param ctx the device
/// @param args tensors
/// @param stream CUDA stream, or NULL on the CPU
/// @param err report of a failure, or NULL
/// @return FOLIO_OK, or INVALID_ARGUMENT, INVALID_STRUCT_SIZE, UNKNOWN_FIELD, SHAPE, DTYPE, DEVICE_MISMATCH,
///         CAPTURE, UNSUPPORTED, COMPILE, OUT_OF_MEMORY, DRIVER; then nothing was written
///
/// # Safety
/// `ctx` is alive; the structs are readable, and the tensors' memory as the fields say. Concurrent use
/// is fine with different outputs.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn folio_tree_mask(
    ctx: *const folio_context,
    args: *const folio_tree_mask_args,
    stream: *mut c_void,
    err: *mut folio_error,
) -> folio_status {
    // SAFETY: the documented promises of the caller.
    unsafe { operate(ctx, args, stream, err, api::tree_mask) }
}
