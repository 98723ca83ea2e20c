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

/// Requests that may be one item each, where the planning kernel chooses.
#[derive(Debug, Clone, Copy, Default)]
pub struct WholeRequests {
    /// Query rows of a request at most. 0: none is.
    pub most_rows: u32,
    pub num_heads: u32,
    /// Of rows of all heads.
    pub rows_of_tile: u32,
}

impl Tilings<'_> {
    /// Of batches that nobody knows more of than the desc says.
    pub fn of_desc(self) -> Tiling {
        self.candidates.tiling()
    }

    /// Of a batch that the host knows.
    pub fn of_host(self, batch: &HostBatch<'_>) -> Tiling {
        let Some(kernel) = self.side_by_side() else {
            return self.of_desc();
        };
        let longest = (0..batch.batch_size()).map(|b| batch.planned_rows(b)).max();
        let (longest, small) = (longest.unwrap_or(0), self.of_tiles(kernel));
        match (1..=self.most_rows_of_request(kernel)).contains(&longest) {
            true => quicker(batch, self.of_items(kernel, longest), small),
            false => small,
        }
    }

    /// Of a batch that only the device knows, and of which it may choose that every request is one item.
    pub fn of_device(self) -> (Tiling, WholeRequests) {
        let Some(kernel) = self.side_by_side() else {
            return (self.of_desc(), WholeRequests::default());
        };
        let whole = WholeRequests {
            most_rows: self.most_rows_of_request(kernel),
            num_heads: self.desc.num_qo_heads,
            rows_of_tile: kernel.tile,
        };
        (self.of_tiles(kernel), whole)
    }

    /// What no batch exceeds, however it is cut.
    pub fn capacity(self) -> Capacity {
        let room = |tiling: Tiling| Capacity::new(self.desc, &tiling);
        let Some(kernel) = self.side_by_side() else {
            return room(self.of_desc());
        };
        (1..=self.most_rows_of_request(kernel).min(self.desc.max_qo_len))
            .map(|rows| room(self.of_items(kernel, rows)))
            .fold(room(self.of_tiles(kernel)), Capacity::max)
    }

    /// Query rows that an item may have.
    pub fn most_rows_of_item(self) -> u32 {
        let most = match self.side_by_side() {
            Some(kernel) => self
                .most_rows_of_request(kernel)
                .max(self.of_tiles(kernel).q_tile),
            None => self.of_desc().q_tile,
        };
        most.min(self.desc.max_qo_len)
    }

    /// A batch-invariant plan cuts a request alike in every batch.
    pub fn side_by_side(self) -> Option<SideBySide> {
        match self.desc.batch_invariant {
            true => None,
            false => self.candidates.first().side_by_side(),
        }
    }

    fn most_rows_of_request(self, kernel: SideBySide) -> u32 {
        kernel.most_rows / self.desc.num_qo_heads
    }

    /// Items that fill a tile, or that are a query row of several tiles.
    fn of_tiles(self, kernel: SideBySide) -> Tiling {
        self.of_items(kernel, (kernel.tile / self.desc.num_qo_heads).max(1))
    }

    /// Items of so many query rows at most; that may be all rows of a request.
    fn of_items(self, kernel: SideBySide, q_tile: u32) -> Tiling {
        let mut tiling = self.of_desc();
        let workers = &mut tiling.workers;
        workers.of_item = q_tile
            .saturating_mul(self.desc.num_qo_heads)
            .div_ceil(kernel.tile);
        let at_a_time = (workers.all / workers.of_item).max(1);
        Tiling {
            q_tile,
            max_splits: at_a_time,
            max_shares: at_a_time,
            ..tiling
        }
    }
}
