//! Jobs, one at a time: independent pieces, dealt out to the threads that come for them.
//!
//! A thread takes its own pieces one by one from a counter, then those of the others, so nobody waits for a thread that
//! does not come. Equal jobs in a row mostly give a thread the same pieces, whose memory its caches hold.
//!
//! A thread *enters* the open job before it looks at anything of it, and leaves it. The owner closes the job and waits
//! until everybody has left; only then the job's closure may end. So a thread that comes late, or comes when nobody asked
//! it to, finds nothing to do.
//!
//! A panic in a piece is caught, and raised again by the owner when everybody has left.
#![allow(unsafe_code)]

use super::waiting::Patience;
use crate::backend::Tasks;
use std::any::Any;
use std::cell::UnsafeCell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering::SeqCst};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// The word: whether a job is open, whether its owner sleeps until everybody has left, how many are inside, and a
/// sequence number in the upper half.
const OPEN: u64 = 1 << 31;
const OWNER_SLEEPS: u64 = 1 << 30;
const INSIDE: u64 = OWNER_SLEEPS - 1;
const NEXT_JOB: u64 = 1 << 32;

/// A piece of work: (thread index, piece index).
pub type Piece<'a> = dyn Fn(usize, usize) + Sync + 'a;

/// The present job, and the way in and out of it.
pub struct Jobs {
    word: AtomicU64,
    /// Written by the owner while the job is closed and nobody is inside.
    job: UnsafeCell<Job>,
    threads: Box<[PerThread]>,
    /// Calls of tasks that there are not, or that were called before, in the present job.
    strange_tasks: AtomicU32,
    /// The first panic of the job's pieces, and whether there is one: a flag costs a job less than the lock.
    panic: Mutex<Option<Box<dyn Any + Send>>>,
    panicked: AtomicBool,
    /// Where the owner sleeps.
    all_left: Condvar,
    leaving: Mutex<()>,
}

/// What a thread has of the present job, alone on its pair of cache lines.
#[derive(Default)]
#[repr(align(128))]
struct PerThread {
    /// How many of its pieces were taken.
    taken: AtomicUsize,
    /// Whether a task of the host's came for it.
    came: AtomicBool,
}

#[derive(Clone, Copy)]
struct Job {
    piece: *const Piece<'static>,
    count: usize,
}

// SAFETY: `job` is written only while nobody is inside (the word says so), and read only by threads that are; the
// closure behind the pointer is Sync.
unsafe impl Sync for Jobs {}
// SAFETY: as for Sync; the pointer itself is plain data.
unsafe impl Send for Jobs {}

impl Jobs {
    /// For so many threads, 1 or more.
    pub fn new(threads: usize) -> Jobs {
        Jobs {
            word: AtomicU64::new(0),
            job: UnsafeCell::new(Job {
                piece: &|_: usize, _: usize| {},
                count: 0,
            }),
            threads: (0..threads).map(|_| PerThread::default()).collect(),
            strange_tasks: AtomicU32::new(0),
            panic: Mutex::new(None),
            panicked: AtomicBool::new(false),
            all_left: Condvar::new(),
            leaving: Mutex::new(()),
        }
    }

    /// Threads that a job is dealt out to.
    pub fn num_threads(&self) -> usize {
        self.threads.len()
    }

    /// Opens a job of `count` pieces, calls `crew`, and closes the job when that returns and everybody has left. What
    /// `crew` did not do, or have done, by then is not done.
    ///
    /// # Safety
    /// One call at a time.
    ///
    /// # Panics
    /// With the panic of a piece or of `crew`.
    pub unsafe fn run(&self, count: usize, piece: &Piece<'_>, crew: impl FnOnce(Present<'_>)) {
        // SAFETY: only the lifetime changes; the job is closed and empty again before this returns.
        let piece =
            unsafe { std::mem::transmute::<*const Piece<'_>, *const Piece<'static>>(piece) };
        // SAFETY: the caller's promise, and the job before this one is closed and empty, so nobody looks at it.
        unsafe { *self.job.get() = Job { piece, count } };
        for thread in &self.threads {
            thread.taken.store(0, SeqCst);
            thread.came.store(false, SeqCst);
        }
        self.strange_tasks.store(0, SeqCst);
        let word = self.word.load(SeqCst);
        self.word.store(word.wrapping_add(NEXT_JOB) | OPEN, SeqCst);
        // Unwind safety: the panic goes on below.
        let outcome = catch_unwind(AssertUnwindSafe(|| crew(Present(self))));
        self.close();
        if self.panicked.swap(false, SeqCst) {
            let panic = self.panic().take();
            resume_unwind(panic.unwrap_or_else(|| Box::new("a panic without a payload")));
        }
        if let Err(panic) = outcome {
            resume_unwind(panic);
        }
    }

    /// Lets nobody in any more, and waits until everybody has left.
    fn close(&self) {
        self.word.fetch_and(!OPEN, SeqCst);
        let is_empty = || self.word.load(SeqCst) & INSIDE == 0;
        let mut patience = Patience::of_owner();
        while !is_empty() {
            if !patience.waits() {
                return self.sleep_until(is_empty);
            }
        }
    }

    #[cold]
    fn sleep_until(&self, is_empty: impl Fn() -> bool) {
        self.word.fetch_or(OWNER_SLEEPS, SeqCst);
        let mut lock = self.leaving.lock().unwrap_or_else(PoisonError::into_inner);
        while !is_empty() {
            let woken = self.all_left.wait(lock);
            lock = woken.unwrap_or_else(PoisonError::into_inner);
        }
        self.word.fetch_and(!OWNER_SLEEPS, SeqCst);
    }

    /// Whether a job is open that is not the one with sequence number `last`.
    pub fn is_open(&self, last: u64) -> bool {
        let word = self.word.load(SeqCst);
        word & OPEN != 0 && word / NEXT_JOB != last
    }

    /// Enters the open job, if there is one and it is not the one with sequence number `last`.
    pub fn enter(&self, last: Option<u64>) -> Option<Inside<'_>> {
        let mut word = self.word.load(SeqCst);
        loop {
            let sequence = word / NEXT_JOB;
            if word & OPEN == 0 || last == Some(sequence) {
                return None;
            }
            match (self.word).compare_exchange_weak(word, word + 1, SeqCst, SeqCst) {
                Ok(_) => {
                    let job = Present(self);
                    return Some(Inside { job, sequence });
                }
                Err(now) => word = now,
            }
        }
    }

    /// Tasks of a job of so many pieces, where the host's threads do it.
    pub fn num_tasks(&self, count: usize) -> usize {
        self.threads.len().min(count)
    }

    /// What was wrong with the tasks of the last job, which had so many pieces.
    pub fn check_tasks(&self, count: usize) -> Result<(), String> {
        let num_tasks = self.num_tasks(count);
        let mut threads = self.threads[..num_tasks].iter();
        if let Some(index) = threads.position(|thread| !thread.came.load(SeqCst)) {
            return Err(format!(
                "parallel_for: task {index} of {num_tasks} was not run when it returned; every task is needed, once"
            ));
        }
        match self.strange_tasks.load(SeqCst) {
            0 => Ok(()),
            strange => Err(format!(
                "parallel_for: {strange} calls of {num_tasks} tasks were of no task, or of one that was called before; \
                 one call of each is accepted"
            )),
        }
    }

    fn panic(&self) -> MutexGuard<'_, Option<Box<dyn Any + Send>>> {
        self.panic.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A task is a thread's share of the present job. (With fewer tasks than threads, the tasks do the others' shares.)
impl Tasks for Jobs {
    fn run(&self, index: u32) {
        let Some(inside) = self.enter(None) else {
            return;
        };
        let tasks = &self.threads[..self.num_tasks(inside.job.read().count)];
        let task = tasks.get(index as usize);
        match task.map(|task| task.came.swap(true, SeqCst)) {
            Some(false) => {
                inside.job.work(index as usize, || {});
            }
            Some(true) | None => {
                self.strange_tasks.fetch_add(1, SeqCst);
            }
        }
    }
}

/// The open job, as its owner and those who are inside see it.
pub struct Present<'a>(&'a Jobs);

impl Present<'_> {
    fn read(&self) -> Job {
        // SAFETY: the job is written only while it is closed and nobody is inside.
        unsafe { *self.0.job.get() }
    }

    /// Takes pieces until none are left, those of `thread` first, and calls `after` behind each. Returns how many it
    /// took.
    pub fn work(&self, thread: usize, mut after: impl FnMut()) -> usize {
        let (jobs, job) = (self.0, self.read());
        let mut taken = 0;
        // SAFETY: the closure lives until the job is closed and empty.
        let piece = unsafe { &*job.piece };
        let threads = jobs.threads.len();
        for owner in (thread..threads).chain(0..thread) {
            loop {
                let index = owner + threads * jobs.threads[owner].taken.fetch_add(1, SeqCst);
                if index >= job.count {
                    break;
                }
                // Unwind safety: the panic goes on in the owner, who knows what may be half done.
                if let Err(panic) = catch_unwind(AssertUnwindSafe(|| piece(thread, index))) {
                    jobs.panic().get_or_insert(panic);
                    jobs.panicked.store(true, SeqCst);
                }
                taken += 1;
                after();
            }
        }
        taken
    }
}

/// A thread's stay in the open job, which ends when this is dropped.
pub struct Inside<'a> {
    /// The job.
    pub job: Present<'a>,
    /// The job's number.
    pub sequence: u64,
}

impl Drop for Inside<'_> {
    fn drop(&mut self) {
        let jobs = self.job.0;
        let before = jobs.word.fetch_sub(1, SeqCst);
        if before & OWNER_SLEEPS != 0 && before & INSIDE == 1 {
            // The owner holds the lock from its look at the word until it sleeps.
            drop(jobs.leaving.lock().unwrap_or_else(PoisonError::into_inner));
            jobs.all_left.notify_one();
        }
    }
}
