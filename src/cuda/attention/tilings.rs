//! How the batches of a handle are cut, and the room that all of them need: by the desc alone, or by the query rows that a
//! batch's requests have. Kernels say which of the two; `plan` and the planning kernel cut.

use super::candidates::Candidates;
use super::kernel::SideBySide;
use crate::plan::{Capacity, quicker};
use crate::problem::{AttentionDesc, HostBatch, Tiling};

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

    /// Of a batch that the host knows.
    pub fn of_host(self, batch: &HostBatch<'_>) -> Tiling {
        let Some(kernel) = self.side_by_side() else {
            return match self.has_few_keys(batch) {
                true => self.of_desc().of_few_keys(),
                false => self.of_desc(),
            };
        };
        let longest = (0..batch.batch_size()).map(|b| batch.planned_rows(b)).max();
        let (longest, small) = (longest.unwrap_or(0), self.of_tiles(kernel));
        match (1..=kernel.rows_of_request()).contains(&longest) {
            true => quicker(batch, kernel.of_items(self.of_desc(), longest), small),
            false => small,
        }
    }

    /// Of a batch that only the device knows. Of a kernel whose workers are side by side, it may choose that every request is one
    /// item.
    pub fn of_device(self) -> Tiling {
        match self.side_by_side() {
            Some(kernel) => self.of_tiles(kernel),
            None => self.of_desc(),
        }
    }

    /// What no batch exceeds, however it is cut.
    pub fn capacity(self) -> Capacity {
        let room = |tiling: Tiling| Capacity::new(self.desc, &tiling);
        let Some(kernel) = self.side_by_side() else {
            let any = room(self.of_desc());
            return match self.few_keys() {
                0 => any,
                _ => any.max(room(self.of_desc().of_few_keys())),
            };
        };
        (1..=kernel.rows_of_request().min(self.desc.max_qo_len))
            .map(|rows| room(kernel.of_items(self.of_desc(), rows)))
            .fold(room(self.of_tiles(kernel)), Capacity::max)
    }

    /// Query rows that an item may have.
    pub fn most_rows_of_item(self) -> u32 {
        let most = match self.side_by_side() {
            Some(kernel) => kernel.rows_of_request().max(kernel.rows_of_tile()),
            None => self.of_desc().q_tile,
        };
        most.min(self.desc.max_qo_len)
    }

    /// Whether the host cuts a batch in tiles of one part, because each of them sees few keys.
    pub fn has_few_keys(self, batch: &HostBatch<'_>) -> bool {
        let most = self.few_keys();
        if most == 0 {
            return false;
        }
        let rows = self.of_desc().of_few_keys().q_tile;
        let is_planned = |&b: &usize| batch.planned_rows(b) > 0;
        (0..batch.batch_size())
            .filter(is_planned)
            .all(|b| batch.most_seen(batch.kv_len[b] as u32, rows) <= most)
    }

    /// Keys that a tile sees up to which batches may be cut in tiles of one part.
    fn few_keys(self) -> u32 {
        self.candidates.first().few_keys()
    }

    /// A batch-invariant plan cuts a request alike in every batch.
    pub fn side_by_side(self) -> Option<SideBySide> {
        match self.desc.batch_invariant {
            true => None,
            false => self.candidates.first().side_by_side(),
        }
    }

    /// Items that fill a tile, or that are a query row of several tiles.
    fn of_tiles(self, kernel: SideBySide) -> Tiling {
        kernel.of_items(self.of_desc(), kernel.rows_of_tile())
    }
}
