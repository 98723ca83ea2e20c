//! The thread pool of one CPU context: the caller's thread, and workers that sleep between jobs.
//!
//! A job is `count` independent pieces, dealt out in turn. A thread takes its own pieces one by one from a counter,
//! then those of the other threads, so the caller never waits for a worker that has not woken up. Equal jobs in a row
//! mostly give a thread the same pieces, whose memory its caches hold. Nothing is global, and a job allocates nothing.
//! This is no general executor: jobs do not nest.
//!
//! A panic in a piece is caught, and raised again on the calling thread when every worker has left the job. The
//! border's guard then treats it as any other panic.
#![allow(unsafe_code)]

use crate::error::{Error, Result};
use std::any::Any;
use std::cell::UnsafeCell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle, Thread};

/// Most threads of a pool. The largest machines in use have 1024 hardware threads (four sockets of 128 cores, two
/// threads each); threads beyond that only wait for one another.
pub const MAX_THREADS: u32 = 1024;

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
    /// The first panic of the job's pieces, and whether there is one: a flag costs a job less than the lock.
    panic: Mutex<Option<Box<dyn Any + Send>>>,
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
    ///
    /// # Errors
    /// `InvalidArgument` above [`MAX_THREADS`], before anything is allocated; `OutOfMemory` where the system starts no
    /// more threads. Workers that were started by then have ended when this returns.
    pub fn new(num_threads: u32) -> Result<Pool> {
        Pool::with_builder(num_threads, thread::Builder::new)
    }

    /// As [`Pool::new`], each worker by a builder of the caller's.
    fn with_builder(num_threads: u32, builder: impl Fn() -> thread::Builder) -> Result<Pool> {
        if num_threads > MAX_THREADS {
            return Err(Error::InvalidArgument(format!(
                "num_threads: {num_threads} exceeds {MAX_THREADS}, the most threads of a context"
            )));
        }
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
            panic: Mutex::new(None),
            panicked: AtomicBool::new(false),
        });
        let mut pool = Pool {
            shared,
            workers: Vec::new(),
            turn: Mutex::new(()),
        };
        for index in 1..num_threads as usize {
            pool.workers.push(start(&pool.shared, index, builder())?);
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
    /// # Panics
    /// With the panic of a piece; other pieces may or may not have been computed.
    pub fn for_each(&self, count: usize, piece: &Piece<'_>) {
        let shared = &*self.pool.shared;
        if self.pool.workers.is_empty() || count <= 1 {
            (0..count).for_each(|index| piece(0, index));
            return;
        }
        // SAFETY: only the lifetime changes; the job is closed and empty again before this returns.
        let piece =
            unsafe { std::mem::transmute::<*const Piece<'_>, *const Piece<'static>>(piece) };
        // SAFETY: the turn is ours and the job is closed, so no worker reads `job`.
        unsafe { *shared.job.get() = Job { piece, count } };
        for taken in &shared.taken {
            taken.0.store(0, SeqCst);
        }
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
        if shared.panicked.load(SeqCst) {
            shared.panicked.store(false, SeqCst);
            let panic = shared.panic().take();
            resume_unwind(panic.unwrap_or_else(|| Box::new("a panic without a payload")));
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
                // Unwind safety: the panic goes on in the caller, who knows what may be half done.
                if let Err(panic) = catch_unwind(AssertUnwindSafe(|| piece(thread, index))) {
                    self.panic().get_or_insert(panic);
                    self.panicked.store(true, SeqCst);
                }
            }
        }
    }

    fn panic(&self) -> MutexGuard<'_, Option<Box<dyn Any + Send>>> {
        self.panic.lock().unwrap_or_else(PoisonError::into_inner)
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

fn start(shared: &Arc<Shared>, index: usize, builder: thread::Builder) -> Result<Worker> {
    let asleep = Arc::new(AtomicBool::new(false));
    let (theirs, flag) = (Arc::clone(shared), Arc::clone(&asleep));
    let thread = builder
        .name(format!("folio-{index}"))
        .spawn(move || theirs.serve(index, &flag))
        .map_err(|error| {
            Error::OutOfMemory(format!(
                "num_threads: thread {index} of the context could not be started ({error}); fewer threads may be"
            ))
        })?;
    Ok(Worker {
        handle: thread.thread().clone(),
        thread: Some(thread),
        asleep,
    })
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.stop.store(true, SeqCst);
        for worker in &mut self.workers {
            worker.handle.unpark();
            if let Some(thread) = worker.thread.take() {
                // A worker catches the panics of pieces, so there is nothing to report.
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
                pool.turn().for_each(count, &|thread, index| {
                    assert!(thread < pool.num_threads());
                    seen[index].fetch_add(1, SeqCst);
                });
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
            pool.turn().for_each(50, &piece);
            assert_eq!(sum.load(SeqCst), 49 * 50 / 2);
        }
    }

    /// The text of the panic that a job of ten pieces ends with, if it does.
    fn panic_of_ten(pool: &Pool, piece: &Piece<'_>) -> Option<String> {
        let outcome = catch_unwind(AssertUnwindSafe(|| pool.turn().for_each(10, piece)));
        let panic = outcome.err()?;
        let text = panic.downcast_ref::<&str>().copied();
        Some(text.expect("a panic with a plain message").to_owned())
    }

    #[test]
    fn a_panic_goes_on_in_the_caller_and_the_pool_survives_it() {
        for threads in [0, 1, 3] {
            let pool = Pool::new(threads).unwrap();
            for _ in 0..3 {
                let done = AtomicUsize::new(0);
                let panic = panic_of_ten(&pool, &|_, index| {
                    if index == 6 {
                        panic!("piece six");
                    }
                    done.fetch_add(1, SeqCst);
                });
                assert_eq!(panic.as_deref(), Some("piece six"), "{threads} threads");
                // Nobody computes pieces of a job that has ended.
                let left = done.load(SeqCst);
                assert_eq!(panic_of_ten(&pool, &|_, _| {}), None, "{threads} threads");
                assert_eq!(done.load(SeqCst), left);
            }
        }
    }

    #[test]
    fn a_panic_of_a_worker_alone_reaches_the_caller() {
        let pool = Pool::new(2).unwrap();
        let both = std::sync::Barrier::new(2);
        // Each thread takes one of the first two pieces, as neither can finish without the other.
        let panic = panic_of_ten(&pool, &|thread, index| {
            if index < 2 {
                both.wait();
                assert!(thread == 0, "a worker");
            }
        });
        assert_eq!(panic.as_deref(), Some("a worker"));
    }

    #[test]
    fn too_many_threads_are_refused_before_any_is_started() {
        for num_threads in [MAX_THREADS + 1, 1_000_000, u32::MAX] {
            let outcome = Pool::with_builder(num_threads, || unreachable!("a thread"));
            let Err(Error::InvalidArgument(message)) = outcome else {
                panic!("{num_threads}: {outcome:?}");
            };
            for word in ["num_threads", &num_threads.to_string(), "1024"] {
                assert!(message.contains(word), "{message}");
            }
        }
    }

    #[test]
    fn a_thread_that_cannot_be_started_is_an_error() {
        let started = AtomicUsize::new(0);
        // The third worker asks for a stack that no address space has.
        let outcome = Pool::with_builder(8, || match started.fetch_add(1, SeqCst) {
            0 | 1 => thread::Builder::new(),
            _ => thread::Builder::new().stack_size(1 << 60),
        });
        let Err(Error::OutOfMemory(message)) = outcome else {
            panic!("{outcome:?}");
        };
        assert!(message.contains("num_threads: thread 3"), "{message}");
        assert_eq!(started.load(SeqCst), 3);
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
                        turn.for_each(8, &|_, _| {});
                        inside.fetch_sub(1, SeqCst);
                    }
                });
            }
        });
    }
}
