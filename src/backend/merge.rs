//! Merges of attention states.

use super::refusal::refused;
use super::stream::Stream;
use crate::dtype::DType;
use crate::error::Result;
use crate::problem::{Checked, CpCorrectArgs, MergeArgs, MergeStatesArgs, MergeVarlenArgs};

/// Operators that merge attention states of the caller.
pub trait MergeOps {
    /// Loads what merges of states of this type need, so that the first of them can be captured.
    ///
    /// # Errors
    /// `Unsupported` where the backend cannot merge them.
    fn prepare_merges(&self, _states: DType) -> Result<()> {
        Ok(())
    }

    /// Merges two attention states.
    ///
    /// # Errors
    /// `Unsupported` where the backend cannot.
    fn merge(&self, _args: &Checked<MergeArgs>, _stream: Stream) -> Result<()> {
        refused("merge_state")
    }

    /// Merges n attention states.
    ///
    /// # Errors
    /// `Unsupported` where the backend cannot.
    fn merge_states(&self, _args: &Checked<MergeStatesArgs>, _stream: Stream) -> Result<()> {
        refused("merge_states")
    }

    /// Merges as many attention states per token as it has.
    ///
    /// # Errors
    /// `Unsupported` where the backend cannot.
    fn merge_varlen(&self, _args: &Checked<MergeVarlenArgs>, _stream: Stream) -> Result<()> {
        refused("merge_varlen")
    }

    /// Scales one rank's output by its share of the softmax over all ranks' keys.
    ///
    /// # Errors
    /// `Unsupported` where the backend cannot.
    fn cp_correct(&self, _args: &Checked<CpCorrectArgs>, _stream: Stream) -> Result<()> {
        refused("cp_correct")
    }
}
