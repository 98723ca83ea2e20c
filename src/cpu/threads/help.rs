//! Whether the workers of a pool help the thread that calls it. They do not where all of them have its CPU: a host's
//! OpenMP may have bound the process to one, and others may use the rest. Waking them costs a short job more than they
//! take off it.

use super::affinity;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, Ordering::Relaxed};
use std::time::{Duration, Instant};

/// Jobs in a row that look for help in vain, after which none is expected. A virtual CPU wakes quickly where it is woken often:
/// eight jobs of 0.1 ms found no help where it came to most of the later ones.
const PATIENCE: u32 = 64;

/// So many jobs do not look for help where none is expected. Waking a worker in vain takes 2 to 5 microseconds, a fifth of
/// the shortest jobs that are cut; so one job in 32 pays it.
const ALONE_JOBS: u32 = 1984;

/// A job that has taken so long looks for help all the same: then waking workers in vain is one hundredth of it.
const ALONE: Duration = Duration::from_micros(500);

/// What is known from the jobs before. The thread that has the pool's turn keeps it, workers say that they came.
#[derive(Default)]
pub struct Help {
    /// Where the caller was at the begin of its turn.
    callers_cpu: AtomicI32,
    came: AtomicBool,
    /// Jobs since help came last, without those that did not look for it.
    without: AtomicU32,
    /// Jobs left that are not to look for help.
    alone: AtomicU32,
}

impl Help {
    /// Begins a turn of the calling thread. Returns whether help is likely, and to be looked for.
    pub fn is_likely(&self) -> bool {
        self.callers_cpu.store(affinity::cpu_of_caller(), Relaxed);
        self.alone.load(Relaxed) == 0
    }

    /// A worker has done pieces of a job. Where the system does not say on which CPU, that counts as help.
    pub fn comes(&self) {
        let cpu = affinity::cpu_of_caller();
        if cpu < 0 || cpu != self.callers_cpu.load(Relaxed) {
            self.came.store(true, Relaxed);
        }
    }

    /// A job has ended.
    pub fn job_ended(&self) {
        let alone = self.alone.load(Relaxed);
        let (without, alone) = match self.came.swap(false, Relaxed) {
            true => (0, 0),
            false if alone > 0 => (0, alone - 1),
            false => match self.without.load(Relaxed) + 1 {
                without @ ..PATIENCE => (without, 0),
                PATIENCE.. => (0, ALONE_JOBS),
            },
        };
        self.without.store(without, Relaxed);
        self.alone.store(alone, Relaxed);
    }
}

/// The call of `wake` that a job without help makes when it has taken [`ALONE`].
pub struct Late<F> {
    since: Instant,
    wake: Option<F>,
}

impl<F: FnOnce()> Late<F> {
    /// From now on.
    pub fn new(wake: F) -> Late<F> {
        Late {
            since: Instant::now(),
            wake: Some(wake),
        }
    }

    /// After each piece of the caller's.
    pub fn look(&mut self) {
        if let Some(wake) = self.wake.take_if(|_| self.since.elapsed() >= ALONE) {
            wake();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::CpuSet;
    use std::thread;

    fn turns(help: &Help, count: u32) -> Vec<bool> {
        let turn = |_| {
            let likely = help.is_likely();
            help.job_ended();
            likely
        };
        (0..count).map(turn).collect()
    }

    #[test]
    fn after_some_jobs_without_help_many_do_not_look_for_it() {
        let help = Help::default();
        for _ in 0..3 {
            assert!(turns(&help, PATIENCE).iter().all(|likely| *likely));
            assert!(turns(&help, ALONE_JOBS).iter().all(|likely| !likely));
        }
    }

    #[test]
    fn help_that_comes_is_looked_for_again() {
        let help = Help::default();
        turns(&help, PATIENCE + 3);
        assert!(!help.is_likely());
        help.callers_cpu.store(i32::MAX, Relaxed);
        thread::scope(|scope| scope.spawn(|| help.comes()).join().unwrap());
        help.job_ended();
        assert_eq!(turns(&help, PATIENCE), [true; PATIENCE as usize]);
        assert!(!help.is_likely());
    }

    /// A worker that takes pieces while the caller waits for its CPU takes nothing off it.
    #[test]
    fn who_has_the_callers_cpu_is_no_help() {
        let help = Help::default();
        let Some(cpu) = affinity::of_caller().iter().next() else {
            return; // This system does not say.
        };
        let outcome = affinity::on_a_new_thread(|| {
            affinity::bind(&CpuSet::of(&[cpu])?)?;
            help.is_likely();
            help.comes();
            Ok(())
        });
        assert_eq!(outcome, Ok(()));
        turns(&help, PATIENCE);
        assert!(!help.is_likely());
    }

    #[test]
    fn late_calls_are_made_once() {
        let mut count = 0;
        let mut late = Late::new(|| count += 1);
        late.look();
        while late.since.elapsed() < ALONE {}
        late.look();
        late.look();
        assert_eq!(count, 1);
    }
}
