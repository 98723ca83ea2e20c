//! When workers end that take pieces of work one by one, whoever is free the next one. What the pieces are, is the caller's.

use super::reserve::reserve;
use crate::error::Result;
use crate::problem::FreeWorkers;

/// All workers, as pieces are dealt out to them.
pub(super) struct Dealing<'a> {
    free: &'a mut Vec<FreeWorkers>,
    all: u64,
}

impl Dealing<'_> {
    /// So many workers, all of them free. `free` is scratch.
    pub fn new(free: &mut Vec<FreeWorkers>, all: u32) -> Result<Dealing<'_>> {
        free.clear();
        reserve("workers", free, all as usize + 1)?;
        let mut dealing = Dealing {
            free,
            all: u64::from(all),
        };
        dealing.all_free();
        Ok(dealing)
    }

    /// Begins anew.
    pub fn all_free(&mut self) {
        self.free.clear();
        self.free.push(FreeWorkers {
            from: 0,
            count: self.all,
        });
    }

    /// So many pieces, each for the worker that is free first. Those that give all workers several are not dealt one by one.
    pub fn deal(&mut self, mut pieces: u64, time: u64) {
        let rounds = (pieces / self.all).saturating_sub(2);
        for group in &mut *self.free {
            group.from = group.from.saturating_add(rounds.saturating_mul(time));
        }
        pieces -= rounds * self.all;
        while pieces > 0 {
            let first = (0..self.free.len()).min_by_key(|&at| self.free[at].from);
            let Some(at) = first else { return };
            let FreeWorkers { from, count } = self.free[at];
            let busy = FreeWorkers {
                from: from.saturating_add(time),
                count: count.min(pieces),
            };
            pieces -= busy.count;
            match count - busy.count {
                0 => _ = self.free.swap_remove(at),
                left => self.free[at].count = left,
            }
            self.join(busy);
        }
    }

    fn join(&mut self, group: FreeWorkers) {
        match self.free.iter_mut().find(|other| other.from == group.from) {
            Some(other) => other.count += group.count,
            None => self.free.push(group),
        }
    }

    /// When the last worker ends.
    pub fn last(&self) -> u64 {
        self.free.iter().map(|group| group.from).max().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_go_to_who_is_free_first() {
        let mut free = Vec::new();
        let mut workers = Dealing::new(&mut free, 3).unwrap();
        workers.deal(2, 10);
        workers.deal(3, 4);
        assert_eq!(workers.last(), 12);
        // Many of a length at once, in as many rounds as they take.
        workers.all_free();
        workers.deal(301, 5);
        assert_eq!(workers.last(), 505);
    }
}
