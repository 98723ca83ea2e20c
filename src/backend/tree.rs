//! Trees of draft tokens.

use super::refusal::refused;
use super::stream::Stream;
use crate::error::Result;
use crate::problem::{Checked, TreeMaskArgs};

/// Operators on trees of draft tokens.
pub trait TreeOps {
    /// Makes masks, positions and links of trees from the parents of their tokens.
    ///
    /// # Errors
    /// `Unsupported` where the backend cannot.
    fn tree_mask(&self, _args: &Checked<TreeMaskArgs>, _stream: Stream) -> Result<()> {
        refused("tree_mask")
    }
}
