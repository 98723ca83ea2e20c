//! How long a thread looks for what it waits for before it sleeps.

use std::hint::spin_loop;
use std::thread::yield_now;

/// Looks that keep the CPU: a few microseconds, in which another thread of the job is done where it has a CPU of its
/// own. Where it has not, every look costs the one that is waited for its time.
const SPINS: u32 = 200;

/// Looks of a worker that offer the CPU to others: some 30 microseconds where nobody wants it, which bridges the gap
/// between the phases of a run and between back-to-back runs.
const WORKER_YIELDS: u32 = 100;

/// The same of the thread that waits for workers: some 300 microseconds, as it is late by what waking it takes.
const OWNER_YIELDS: u32 = 1000;

/// The looks that a thread has left.
#[derive(Debug)]
pub struct Patience {
    spins: u32,
    yields: u32,
}

impl Patience {
    /// Of a worker without a job.
    pub fn of_worker() -> Patience {
        Patience {
            spins: SPINS,
            yields: WORKER_YIELDS,
        }
    }

    /// Of the owner of a job, for the others.
    pub fn of_owner() -> Patience {
        Patience {
            spins: SPINS,
            yields: OWNER_YIELDS,
        }
    }

    /// Waits a little. Returns false when it is time to sleep.
    pub fn waits(&mut self) -> bool {
        if self.spins > 0 {
            self.spins -= 1;
            spin_loop();
            return true;
        }
        if self.yields > 0 {
            self.yields -= 1;
            yield_now();
            return true;
        }
        false
    }
}
