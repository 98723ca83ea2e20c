//! What of the current plan a run is checked against.

use crate::backend::Attention as Kernel;
use crate::error::{Error, Result};
use crate::plan::schedule;
use crate::problem::{
    AttentionDesc, Batch, DeviceBatch, HostBatch, Pages, RequestStarts, WorkList,
};

/// What a run is checked against.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Planned {
    pub batch_size: i64,
    /// Query rows, as far as the host knows: with offsets on the device it may be none.
    pub num_tokens: i64,
    /// Largest page id that the host knows to be in use, or -1. Kernels clamp ids that only the device knows to
    /// the cache, for which it needs a first page.
    pub max_page_id: i64,
    /// Rows of ragged K and V in use.
    pub kv_rows: i64,
    /// Most rows of a request, and most keys of one with rows, as far as the host knows.
    pub most_rows: i64,
    pub most_keys: i64,
    /// No run sees further left.
    pub window_left: Option<u32>,
    /// Elements of a custom mask of bytes, and of bits.
    pub mask_bytes: i64,
    pub mask_bits: i64,
}

impl Planned {
    /// Cuts a batch for a kernel where its lengths are on the host; `work` stays empty for one that the device cuts.
    pub fn cut(
        batch: &Batch<'_>,
        desc: &AttentionDesc,
        kernel: &dyn Kernel,
        work: &mut WorkList,
    ) -> Result<Planned> {
        match batch {
            Batch::Host(host) => {
                schedule(host, desc, &kernel.tiling_of(host), work)?;
                Ok(Planned::of(host, &work.starts))
            }
            Batch::Device(device) => {
                work.clear();
                Ok(Planned::of_device(device))
            }
        }
    }

    fn of_device(batch: &DeviceBatch) -> Planned {
        let batch_size = i64::from(batch.batch_size);
        let num_ids = batch.page_ids.map_or(0, |ids| ids.num_elements());
        Planned {
            batch_size,
            num_tokens: match batch.qo_indptr {
                None => batch_size * i64::from(batch.qo_len),
                Some(_) => 0,
            },
            max_page_id: if num_ids > 0 { 0 } else { -1 },
            most_rows: match batch.qo_indptr {
                None => i64::from(batch.qo_len),
                Some(_) => 0,
            },
            ..Planned::default()
        }
    }

    fn of(batch: &HostBatch<'_>, starts: &RequestStarts) -> Planned {
        let n = batch.batch_size();
        let busy = (0..n).filter(|&b| batch.qo_len(b) > 0);
        let most_keys = busy.clone().map(|b| i64::from(batch.kv_len[b])).max();
        let most_rows = busy.map(|b| i64::from(batch.qo_len(b))).max();
        let mut planned = Planned {
            batch_size: n as i64,
            mask_bytes: starts.mask_bytes[n],
            mask_bits: starts.mask_bits[n],
            num_tokens: batch.num_tokens() as i64,
            most_rows: most_rows.unwrap_or(0),
            most_keys: most_keys.unwrap_or(0),
            max_page_id: match batch.are_page_ids_on_device() {
                true if batch.num_pages > 0 => 0,
                _ => i64::from(batch.max_page_id),
            },
            ..Planned::default()
        };
        if let Pages::Ragged { indptr } = batch.pages {
            planned.kv_rows = i64::from(indptr[n]);
        }
        planned
    }
}

/// The refusal of a run before the first plan.
pub(super) fn no_plan() -> Error {
    Error::NotPlanned("run: there is no plan yet; a successful plan is needed first".into())
}
