//! How the batches of a handle are cut, and the room that all of them need: by the desc alone, or by the query rows that a
//! batch's requests have. Kernels say which tilings there are; `plan` cuts.

use super::candidates::Candidates;
use crate::plan::{Capacity, quicker};
use crate::problem::{AttentionDesc, DeviceBatch, HostBatch, Tiling};

/// Kernels cut batches with more query rows than that for each request alike.
const MOST_ROWS_TOLD_APART: u32 = 1024;

/// The tilings of a handle.
#[derive(Clone, Copy)]
pub struct Tilings<'a> {
    pub candidates: &'a Candidates,
    pub desc: &'a AttentionDesc,
}

impl Tilings<'_> {
    /// Of batches that nobody knows more of than the desc says.
    pub fn of_desc(self) -> Tiling {
        self.candidates.tiling()
    }

    /// Of batches whose requests have up to so many query rows, where they may be cut in ways of their own: what a graph
    /// launches is the same for every batch, and a batch-invariant plan cuts a request alike in every batch.
    pub fn of_rows(self, rows: u32) -> Option<[Tiling; 2]> {
        match self.desc.graph || self.desc.batch_invariant {
            true => None,
            false => self.candidates.tilings_of(rows),
        }
    }

    /// Of a batch that the host knows.
    pub fn of_host(self, batch: &HostBatch<'_>) -> Tiling {
        let longest = (0..batch.batch_size()).map(|b| batch.planned_rows(b)).max();
        match self.of_rows(longest.unwrap_or(0)) {
            Some([large, small]) => quicker(batch, large, small),
            None => self.of_desc(),
        }
    }

    /// Of a batch on the device. Where all requests have the same number of query rows, the host knows it.
    pub fn of_device(self, batch: &DeviceBatch) -> Tiling {
        let rows = match batch.qo_indptr {
            None => batch.qo_len,
            Some(_) => return self.of_desc(),
        };
        match self.of_rows(rows) {
            Some([large, _]) => large,
            None => self.of_desc(),
        }
    }

    /// What no batch exceeds, however it is cut.
    pub fn capacity(self) -> Capacity {
        (1..=self.desc.max_qo_len.min(MOST_ROWS_TOLD_APART))
            .filter_map(|rows| self.of_rows(rows))
            .flatten()
            .map(|tiling| Capacity::new(self.desc, &tiling))
            .fold(Capacity::new(self.desc, &self.of_desc()), Capacity::max)
    }
}
