//! How long a thread looks for what it waits for before it sleeps.

use std::hint::spin_loop;
use std::thread::yield_now;

/// Looks that keep the CPU: a few microseconds, in which another thread of the job is done where it has a CPU of its
/// own. Where it has not, every look costs the one that is waited for its time.
const SPINS: u32 = 200;

/// Looks that offer the CPU to others: some 30 microseconds where nobody wants it, which bridges the gap between the
/// phases of a run and between back-to-back runs.
const YIELDS: u32 = 100;

/// The looks of a thread.
#[derive(Debug, Default)]
pub struct Patience(u32);

impl Patience {
    /// Waits a little. Returns false when it is time to sleep.
    pub fn waits(&mut self) -> bool {
        match self.0 {
            0..SPINS => spin_loop(),
            SPINS..WAITS => yield_now(),
            WAITS.. => return false,
        }
        self.0 += 1;
        true
    }
}

const WAITS: u32 = SPINS + YIELDS;
