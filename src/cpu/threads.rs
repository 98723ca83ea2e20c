//! The threads of one CPU context: the caller's and a few of our own that sleep between jobs.
//!
//! A job is `count` independent pieces, dealt out in turn. A thread takes its own one by one from a counter
//! and then goes on to the others', so the caller never waits for a worker that has not woken up. Equal
//! jobs in a row thus mostly give a thread the same pieces, whose memory its caches hold. Nothing is global,
//! nothing is allocated per job. This is no general executor: jobs do not nest.
#![allow(unsafe_code)]

use crate::error::{Error, Result};
use std::any::Any;
use std::cell::UnsafeCell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle, Thread};

/// Looks at the job word before a worker sleeps: tens of microseconds, which bridges the gap between
/// the phases of a run and between back-to-back runs.
const SPINS: u32 = 4000;

/// The job word: open flag, number of workers inside, and a sequence number in the upper half.
const OPEN: u64 = 1 << 31;
const INSIDE: u64 = OPEN - 1;
const NEXT_JOB: u64 = 1 << 32;

/// A piece of work: (thread index, piece index).
type Piece<'a> = dyn Fn(usize, usize) + Sync + 'a;

/// Worker threads plus the lock that serialises jobs.
#[derive(Debug)]
pub struct Pool {
    shared: Arc<Shared>,
    workers: Vec<Worker>,
    turn: Mutex<()>,
}

#[derive(Debug)]
struct Worker {
    thread: Option<JoinHandle<()>>,
    handle: Thread,
    asleep: Arc<AtomicBool>,
}

#[derive(Debug)]
struct Shared {
    word: AtomicU64,
    stop: AtomicBool,
    /// Written by the caller while the job is closed and nobody is inside.
    job: UnsafeCell<Job>,
    /// How many of its pieces were taken, per thread.
    taken: Vec<Counter>,
    panicked: AtomicBool,
}

/// A counter alone on its pair of cache lines.
#[derive(Debug, Default)]
#[repr(align(128))]
struct Counter(AtomicUsize);

#[derive(Debug, Clone, Copy)]
struct Job {
    piece: *const Piece<'static>,
    count: usize,
}

// SAFETY: `job` is written only while no worker is inside (the job word says so), and read only by
// threads that are; the closure behind the pointer is Sync.
unsafe impl Sync for Shared {}
// SAFETY: as for Sync; the pointer itself is plain data.
unsafe impl Send for Shared {}

/// The right to run jobs: while one thread holds it, others wait.
pub struct Turn<'a> {
    pool: &'a Pool,
    _lock: MutexGuard<'a, ()>,
}

impl Pool {
    /// A pool of `num_threads` threads, the caller's among them; 0 and 1 start none.
    pub fn new(num_threads: u32) -> Result<Pool> {
        let shared = Arc::new(Shared {
            word: AtomicU64::new(0),
            stop: AtomicBool::new(false),
            job: UnsafeCell::new(Job {
                piece: &|_: usize, _: usize| {},
                count: 0,
            }),
            taken: (0..num_threads.max(1))
                .map(|_| Counter::default())
                .collect(),
            panicked: AtomicBool::new(false),
        });
        let mut pool = Pool {
            shared,
            workers: Vec::new(),
            turn: Mutex::new(()),
        };
        for index in 1..num_threads as usize {
            pool.workers.push(start(&pool.shared, index)?);
        }
        Ok(pool)
    }

    /// Threads that take part in a job.
    pub fn num_threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Waits for the pool to be free.
    pub fn turn(&self) -> Turn<'_> {
        Turn {
            pool: self,
            _lock: self.turn.lock().unwrap_or_else(PoisonError::into_inner),
        }
    }
}

impl Turn<'_> {
    /// Calls `piece(thread, index)` for every index below `count`, each exactly once, and returns when
    /// all have returned. `thread` is below [`Pool::num_threads`] and held by one thread at a time.
    ///
    /// # Errors
    /// `Internal` when a piece panicked; other pieces may or may not have been computed.
    pub fn for_each(&self, count: usize, piece: &Piece<'_>) -> Result<()> {
        let shared = &*self.pool.shared;
        if self.pool.workers.is_empty() || count <= 1 {
            let outcome = catch_unwind(AssertUnwindSafe(|| {
                (0..count).for_each(|index| piece(0, index));
            }));
            return outcome.map_err(|panic| internal(&panic));
        }
        // SAFETY: only the lifetime changes; the job is closed and empty again before this returns.
        let piece =
            unsafe { std::mem::transmute::<*const Piece<'_>, *const Piece<'static>>(piece) };
        // SAFETY: the turn is ours and the job is closed, so no worker reads `job`.
        unsafe { *shared.job.get() = Job { piece, count } };
        for taken in &shared.taken {
            taken.0.store(0, SeqCst);
        }
        shared.panicked.store(false, SeqCst);
        let word = shared.word.load(SeqCst);
        shared
            .word
            .store(word.wrapping_add(NEXT_JOB) | OPEN, SeqCst);
        self.wake(count - 1);
        shared.work(0);
        shared.word.fetch_and(!OPEN, SeqCst);
        while shared.word.load(SeqCst) & INSIDE != 0 {
            std::hint::spin_loop();
        }
        match shared.panicked.load(SeqCst) {
            true => Err(Error::Internal("a CPU worker panicked".into())),
            false => Ok(()),
        }
    }

    fn wake(&self, wanted: usize) {
        for worker in self.pool.workers.iter().take(wanted) {
            if worker.asleep.swap(false, SeqCst) {
                worker.handle.unpark();
            }
        }
    }
}

impl Shared {
    /// Takes pieces until none are left, its own first.
    fn work(&self, thread: usize) {
        // SAFETY: this thread is inside the open job (or is its owner), so `job` does not change and the
        // closure is alive.
        let (piece, count) = unsafe {
            let job = *self.job.get();
            (&*job.piece, job.count)
        };
        let threads = self.taken.len();
        for owner in (thread..threads).chain(0..thread) {
            loop {
                let index = owner + threads * self.taken[owner].0.fetch_add(1, SeqCst);
                if index >= count {
                    break;
                }
                if catch_unwind(AssertUnwindSafe(|| piece(thread, index))).is_err() {
                    self.panicked.store(true, SeqCst);
                }
            }
        }
    }

    /// Enters the open job unless it is the one with sequence number `last`.
    fn enter(&self, last: u64) -> Option<u64> {
        let word = self.word.load(SeqCst);
        let sequence = word / NEXT_JOB;
        if word & OPEN == 0 || sequence == last {
            return None;
        }
        let entered = self.word.compare_exchange(word, word + 1, SeqCst, SeqCst);
        entered.ok().map(|_| sequence)
    }

    fn serve(&self, thread: usize, asleep: &AtomicBool) {
        let mut last = 0;
        let mut idle = 0;
        while !self.stop.load(SeqCst) {
            if let Some(sequence) = self.enter(last) {
                last = sequence;
                self.work(thread);
                self.word.fetch_sub(1, SeqCst);
                idle = 0;
            } else if idle < SPINS {
                idle += 1;
                std::hint::spin_loop();
            } else {
                self.sleep(last, asleep);
                idle = 0;
            }
        }
    }

    /// Sleeps unless a job was opened in the meantime: the flag is up before the word is looked at, and
    /// the caller opens the job before it looks at the flag.
    fn sleep(&self, last: u64, asleep: &AtomicBool) {
        asleep.store(true, SeqCst);
        let word = self.word.load(SeqCst);
        let open = word & OPEN != 0 && word / NEXT_JOB != last;
        if !open && !self.stop.load(SeqCst) {
            thread::park();
        }
        asleep.store(false, SeqCst);
    }
}

fn start(shared: &Arc<Shared>, index: usize) -> Result<Worker> {
    let asleep = Arc::new(AtomicBool::new(false));
    let (theirs, flag) = (Arc::clone(shared), Arc::clone(&asleep));
    let thread = thread::Builder::new()
        .name(format!("folio-{index}"))
        .spawn(move || theirs.serve(index, &flag))
        .map_err(|error| {
            Error::OutOfMemory(format!(
                "num_threads: worker {index} could not be started ({error}); fewer threads may be"
            ))
        })?;
    Ok(Worker {
        handle: thread.thread().clone(),
        thread: Some(thread),
        asleep,
    })
}

fn internal(panic: &Box<dyn Any + Send>) -> Error {
    let text = panic
        .downcast_ref::<&str>()
        .copied()
        .or_else(|| panic.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("no message");
    Error::Internal(format!("a CPU kernel panicked: {text}"))
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.stop.store(true, SeqCst);
        for worker in &mut self.workers {
            worker.handle.unpark();
            if let Some(thread) = worker.thread.take() {
                // A worker catches its panics, so there is nothing to report.
                let _ = thread.join();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn every_piece_runs_once() {
        for threads in [0, 1, 2, 4] {
            let pool = Pool::new(threads).unwrap();
            for count in [0usize, 1, 2, 7, 100] {
                let seen: Vec<AtomicUsize> = (0..count).map(|_| AtomicUsize::new(0)).collect();
                pool.turn()
                    .for_each(count, &|thread, index| {
                        assert!(thread < pool.num_threads());
                        seen[index].fetch_add(1, SeqCst);
                    })
                    .unwrap();
                assert!(seen.iter().all(|n| n.load(SeqCst) == 1));
            }
        }
    }

    #[test]
    fn sleeping_workers_do_not_miss_jobs() {
        let pool = Pool::new(3).unwrap();
        for round in 0..20 {
            if round % 4 == 0 {
                thread::sleep(Duration::from_millis(2));
            }
            let sum = AtomicUsize::new(0);
            let piece = |_: usize, index: usize| {
                sum.fetch_add(index, SeqCst);
            };
            pool.turn().for_each(50, &piece).unwrap();
            assert_eq!(sum.load(SeqCst), 49 * 50 / 2);
        }
    }

    #[test]
    fn a_panic_becomes_an_error_and_the_pool_goes_on() {
        for threads in [0, 3] {
            let pool = Pool::new(threads).unwrap();
            let outcome = pool
                .turn()
                .for_each(10, &|_, index| assert!(index != 6, "piece six"));
            assert!(matches!(outcome, Err(Error::Internal(_))));
            pool.turn().for_each(10, &|_, _| {}).unwrap();
        }
    }

    #[test]
    fn callers_take_turns() {
        let pool = Pool::new(2).unwrap();
        let inside = AtomicUsize::new(0);
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..50 {
                        let turn = pool.turn();
                        assert_eq!(inside.fetch_add(1, SeqCst), 0);
                        turn.for_each(8, &|_, _| {}).unwrap();
                        inside.fetch_sub(1, SeqCst);
                    }
                });
            }
        });
    }
}
