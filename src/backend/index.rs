//! Indices of a batch. They are integers, of which there is one right answer: what backends on the host compute stands here
//! once, and those of devices have kernels.

use super::host_index;
use super::stream::Stream;
use crate::error::Result;
use crate::problem::{
    BatchLengthsArgs, BlockTableArgs, Checked, DraftKvIndicesArgs, KvIndicesArgs, SlotMappingArgs,
};

/// Operators that build the indices of a batch. A backend whose tensors are not on the host has its own of each.
pub trait IndexOps {
    /// Cumulative lengths, and what follows from lengths.
    ///
    /// # Errors
    /// What the backend's device answers.
    fn batch_lengths(&self, args: &Checked<BatchLengthsArgs>, _stream: Stream) -> Result<()> {
        host_index::batch_lengths(args);
        Ok(())
    }

    /// A list of pages or slots from a table.
    ///
    /// # Errors
    /// What the backend's device answers.
    fn kv_indices(&self, args: &Checked<KvIndicesArgs>, _stream: Stream) -> Result<()> {
        host_index::kv_indices(args);
        Ok(())
    }

    /// A block table from a list.
    ///
    /// # Errors
    /// What the backend's device answers.
    fn block_table(&self, args: &Checked<BlockTableArgs>, _stream: Stream) -> Result<()> {
        host_index::block_table(args);
        Ok(())
    }

    /// Slots and positions of new tokens.
    ///
    /// # Errors
    /// What the backend's device answers.
    fn slot_mapping(&self, args: &Checked<SlotMappingArgs>, _stream: Stream) -> Result<()> {
        host_index::slot_mapping(args);
        Ok(())
    }

    /// Lists of slots for every step of a draft.
    ///
    /// # Errors
    /// What the backend's device answers.
    fn draft_kv_indices(&self, args: &Checked<DraftKvIndicesArgs>, _stream: Stream) -> Result<()> {
        host_index::draft_kv_indices(args);
        Ok(())
    }
}
