//! What an MLA context handle asks of a batch beyond what every batch must be, and the page ids that its gathers read.

use crate::api::batch::BatchInput;
use crate::error::{Error, Result};
use crate::problem::{HostBatch, MlaContextDesc, RecordPages};
use crate::tensor::{Device, Tensor};

/// Every request has at least as many tokens as are new; a graph's batch has as many requests as any.
pub(super) fn check_contexts(batch: &HostBatch<'_>, desc: &MlaContextDesc) -> Result<()> {
    let batch_size = batch.batch_size();
    if desc.graph && batch_size != desc.max_batch_size as usize {
        return Err(Error::InvalidArgument(format!(
            "kv_len: batch size {batch_size} is not accepted with FOLIO_PLAN_GRAPH; max_batch_size ({}) is, with requests of no tokens",
            desc.max_batch_size
        )));
    }
    let short = (0..batch_size).find(|&b| (batch.kv_len[b] as u32) < batch.qo_len(b));
    match short {
        None => Ok(()),
        Some(b) => Err(Error::InvalidArgument(format!(
            "kv_len[{b}]: {} is not accepted; {}, the new tokens of the request, or more is",
            batch.kv_len[b],
            batch.qo_len(b)
        ))),
    }
}

/// Runs read page ids where the caller has them.
pub(super) fn check_page_ids(input: &BatchInput, device: Device) -> Result<()> {
    for (name, ids) in [
        ("block_table", input.block_table),
        ("kv_indices", input.kv_indices),
    ] {
        if let Some(ids) = ids.filter(|ids| ids.device() != device) {
            return Err(Error::DeviceMismatch(format!(
                "{name}: the tensor is on {}, the context on {device}",
                ids.device()
            )));
        }
    }
    Ok(())
}

/// Page ids as the caller states them, whose offsets are among the tables.
pub(super) fn record_pages(input: &BatchInput, indptr: Tensor) -> Result<RecordPages> {
    match (input.block_table, input.kv_indices) {
        (Some(table), _) => Ok(RecordPages::Table(table)),
        (None, Some(indices)) => Ok(RecordPages::Csr { indptr, indices }),
        (None, None) => Err(Error::Internal("a checked batch has no page ids".into())),
    }
}
