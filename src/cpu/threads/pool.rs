//! The pool of one CPU context: threads that compute a job together, one job at a time. Folio's own, with the caller's
//! among them, or the host's. Nothing is global, and a job allocates nothing. This is no general executor: jobs do not
//! nest.
//!
//! A panic in a piece goes on in the calling thread when everybody has left the job, and so does what the host's threads
//! did wrong. The border's guard then treats it as any other panic.
#![allow(unsafe_code)]

use super::jobs::{Jobs, Piece};
use super::workers::{Started, Workers, check_number};
use crate::backend::{HostThreads, Tasks, Threads};
use crate::error::{Error, Result};
use crate::log::{Level, Logger};
use std::fmt;
use std::panic::resume_unwind;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};

/// Threads, and the lock that serialises their jobs.
pub struct Pool {
    num_threads: usize,
    crew: Crew,
    turn: Mutex<()>,
    /// Who has the turn: [`this_thread`], or 0.
    holder: AtomicUsize,
}

/// Who does the jobs.
enum Crew {
    /// The caller and some workers.
    Own(Workers),
    /// The host's threads. `tasks` are the jobs, as the host sees them.
    Host {
        host: Arc<dyn HostThreads>,
        jobs: Arc<Jobs>,
        tasks: Arc<dyn Tasks>,
    },
}

/// The right to run jobs: while one thread holds it, others wait.
pub struct Turn<'a> {
    pool: &'a Pool,
    /// Whether other threads are likely to come for the jobs.
    helped: bool,
    _lock: MutexGuard<'a, ()>,
}

impl Pool {
    /// A pool of threads. Says to `logger` where they are more than their CPUs.
    ///
    /// # Errors
    /// `InvalidArgument` for a number of threads that no pool has, and for CPUs that are not there; `OutOfMemory` where
    /// the system starts no more threads.
    pub fn new(threads: &Threads, logger: &Logger) -> Result<Pool> {
        let (num_threads, crew) = match threads {
            Threads::Own { num_threads, cpus } => {
                let Started {
                    num_threads,
                    workers,
                    warning,
                } = Workers::start(*num_threads, cpus.as_deref())?;
                if let Some(warning) = warning {
                    logger.log(Level::Warning, format_args!("{warning}"));
                }
                (num_threads, Crew::Own(workers))
            }
            Threads::Host { num_threads, host } => {
                let num_threads = check_number(*num_threads)? as usize;
                (num_threads, Crew::of_host(num_threads, host)?)
            }
        };
        Ok(Pool::of(num_threads, crew))
    }

    fn of(num_threads: usize, crew: Crew) -> Pool {
        Pool {
            num_threads,
            crew,
            turn: Mutex::new(()),
            holder: AtomicUsize::new(0),
        }
    }

    /// Threads that work is cut for.
    pub fn num_threads(&self) -> usize {
        self.num_threads
    }

    /// Waits for the pool to be free.
    ///
    /// # Panics
    /// Where the calling thread has the turn: it would wait for itself. A host's thread comes here when it takes up
    /// other work of the host's while it waits for `parallel_for`.
    pub fn turn(&self) -> Turn<'_> {
        let lock = match self.turn.try_lock() {
            Ok(lock) => lock,
            Err(TryLockError::Poisoned(error)) => error.into_inner(),
            Err(TryLockError::WouldBlock) => self.wait_for_turn(),
        };
        self.holder.store(this_thread(), Relaxed);
        Turn {
            pool: self,
            helped: match &self.crew {
                Crew::Own(workers) => workers.are_likely_to_help(),
                Crew::Host { .. } => true,
            },
            _lock: lock,
        }
    }

    #[cold]
    fn wait_for_turn(&self) -> MutexGuard<'_, ()> {
        if self.holder.load(Relaxed) == this_thread() {
            fail("parallel_for: the thread that called it called the context again before it returned; no call is accepted \
                  meanwhile".into());
        }
        self.turn.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A number that no other thread has meanwhile.
fn this_thread() -> usize {
    thread_local!(static PLACE: u8 = const { 0 });
    PLACE.with(|place| std::ptr::from_ref(place) as usize)
}

/// Ends a job whose threads did not do it. This is no bug of Folio's, but nobody knows what the outputs hold.
fn fail(message: String) -> ! {
    resume_unwind(Box::new(message))
}

impl Crew {
    fn of_host(num_threads: usize, host: &Arc<dyn HostThreads>) -> Result<Crew> {
        if num_threads == 0 {
            return Err(Error::InvalidArgument(
                "num_threads: 0 is not accepted with parallel_for; the number of the host's threads, 1 or more, is".into(),
            ));
        }
        let jobs = Arc::new(Jobs::new(num_threads));
        Ok(Crew::Host {
            host: Arc::clone(host),
            tasks: Arc::<Jobs>::clone(&jobs),
            jobs,
        })
    }
}

impl Turn<'_> {
    /// Threads that are likely to compute. Pieces that one thread computes best together may be cut for so many, where
    /// that changes no result.
    pub fn likely_threads(&self) -> usize {
        match self.helped {
            true => self.pool.num_threads,
            false => 1,
        }
    }

    /// Calls `piece(thread, index)` for every index below `count`, each exactly once, and returns when
    /// all have returned. `thread` is below [`Pool::num_threads`] and held by one thread at a time.
    ///
    /// # Panics
    /// With the panic of a piece, and where the host's threads did not come for every task; other pieces may or may not
    /// have been computed.
    pub fn for_each(&self, count: usize, piece: &Piece<'_>) {
        let alone = count <= 1;
        match &self.pool.crew {
            Crew::Own(workers) if !alone && workers.num_threads() > 1 => {
                // SAFETY: the turn is ours.
                unsafe {
                    workers
                        .jobs()
                        .run(count, piece, |job| workers.join(&job, count, self.helped));
                }
                workers.job_ended();
            }
            Crew::Host { host, jobs, tasks } if !alone && jobs.num_threads() > 1 => {
                let num_tasks = jobs.num_tasks(count) as u32;
                // SAFETY: the turn is ours.
                unsafe { jobs.run(count, piece, |_| host.parallel_for(num_tasks, tasks)) };
                jobs.check_tasks(count).unwrap_or_else(|wrong| fail(wrong));
            }
            Crew::Own(_) | Crew::Host { .. } => (0..count).for_each(|index| piece(0, index)),
        }
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.pool.holder.store(0, Relaxed);
    }
}

impl fmt::Debug for Pool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let crew = match &self.crew {
            Crew::Own(workers) => format!("{} own", workers.num_threads()),
            Crew::Host { host, .. } => format!("{host:?}"),
        };
        write!(f, "Pool({} threads: {crew})", self.num_threads)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::sync::atomic::Ordering::SeqCst;
    use std::thread;
    use std::time::Duration;

    /// Own threads, as many as are asked for whatever CPUs there are.
    fn own(num_threads: usize) -> Pool {
        let workers = Workers::spawn(num_threads, &thread::Builder::new).unwrap();
        Pool::of(num_threads, Crew::Own(workers))
    }

    fn on(host: impl HostThreads + 'static, num_threads: u32) -> Pool {
        let host = Arc::new(host);
        Pool::new(&Threads::Host { num_threads, host }, &Logger::silent()).unwrap()
    }

    /// Threads of a host's, by what they do with a job.
    struct Host<F>(F);

    impl<F> fmt::Debug for Host<F> {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("a host")
        }
    }

    impl<F: Fn(u32, &Arc<dyn Tasks>) + Send + Sync> HostThreads for Host<F> {
        fn parallel_for(&self, num_tasks: u32, tasks: &Arc<dyn Tasks>) {
            self.0(num_tasks, tasks);
        }
    }

    /// A thread per task.
    fn threads_of_a_host(num_tasks: u32, tasks: &Arc<dyn Tasks>) {
        thread::scope(|scope| {
            for index in 0..num_tasks {
                scope.spawn(move || tasks.run(index));
            }
        });
    }

    /// One thread, the last task first.
    fn one_after_the_other(num_tasks: u32, tasks: &Arc<dyn Tasks>) {
        (0..num_tasks).rev().for_each(|index| tasks.run(index));
    }

    /// Pools of every kind of crew, of up to four threads.
    fn pools() -> Vec<Pool> {
        let mut pools: Vec<Pool> = [1, 2, 4].map(own).into();
        for num_threads in [0, 1, 3] {
            let cpus = None;
            let threads = Threads::Own { num_threads, cpus };
            pools.push(Pool::new(&threads, &Logger::silent()).unwrap());
        }
        for num_threads in [1, 2, 4] {
            pools.push(on(Host(threads_of_a_host), num_threads));
            pools.push(on(Host(one_after_the_other), num_threads));
        }
        pools
    }

    #[test]
    fn every_piece_runs_once() {
        for pool in pools() {
            for count in [0usize, 1, 2, 3, 7, 100] {
                let seen: Vec<AtomicUsize> = (0..count).map(|_| AtomicUsize::new(0)).collect();
                let busy: Vec<AtomicUsize> = (0..pool.num_threads())
                    .map(|_| AtomicUsize::new(0))
                    .collect();
                pool.turn().for_each(count, &|thread, index| {
                    assert_eq!(busy[thread].fetch_add(1, SeqCst), 0, "{pool:?}");
                    seen[index].fetch_add(1, SeqCst);
                    busy[thread].fetch_sub(1, SeqCst);
                });
                assert!(seen.iter().all(|n| n.load(SeqCst) == 1), "{pool:?}");
            }
        }
    }

    #[test]
    fn sleeping_workers_do_not_miss_jobs() {
        let pool = own(3);
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

    /// Pieces that take longer than anybody spins: the caller sleeps until the last worker wakes it.
    #[test]
    fn a_caller_sleeps_until_workers_are_done() {
        for pool in [own(4), on(Host(threads_of_a_host), 4)] {
            for round in 0..10 {
                let done = AtomicUsize::new(0);
                pool.turn().for_each(4, &|thread, index| {
                    if thread != 0 || index == round % 4 {
                        thread::sleep(Duration::from_millis(1));
                    }
                    done.fetch_add(1, SeqCst);
                });
                assert_eq!(done.load(SeqCst), 4);
            }
        }
    }

    /// Jobs of all sizes, of several callers, with pauses in which threads go to sleep.
    #[test]
    fn jobs_in_a_row_lose_nothing() {
        for pool in [own(3), on(Host(threads_of_a_host), 3)] {
            thread::scope(|scope| {
                for caller in 0..3usize {
                    let pool = &pool;
                    scope.spawn(move || {
                        for round in 0..300usize {
                            let count = (round * 7 + caller) % 40;
                            let sum = AtomicUsize::new(0);
                            pool.turn().for_each(count, &|_, index| {
                                sum.fetch_add(index + 1, SeqCst);
                            });
                            assert_eq!(sum.load(SeqCst), count * (count + 1) / 2);
                            if round % 50 == 0 {
                                thread::sleep(Duration::from_micros(300));
                            }
                        }
                    });
                }
            });
        }
    }

    /// The text of the panic that a job of ten pieces ends with, if it does.
    fn panic_of_ten(pool: &Pool, piece: &Piece<'_>) -> Option<String> {
        let outcome = catch_unwind(AssertUnwindSafe(|| pool.turn().for_each(10, piece)));
        let panic = outcome.err()?;
        let text = (panic.downcast_ref::<&str>().map(|text| (*text).to_owned()))
            .or_else(|| panic.downcast_ref::<String>().cloned());
        Some(text.expect("a panic with a message"))
    }

    #[test]
    fn a_panic_goes_on_in_the_caller_and_the_pool_survives_it() {
        for pool in pools() {
            for _ in 0..3 {
                let done = AtomicUsize::new(0);
                let panic = panic_of_ten(&pool, &|_, index| {
                    if index == 6 {
                        panic!("piece six");
                    }
                    done.fetch_add(1, SeqCst);
                });
                assert_eq!(panic.as_deref(), Some("piece six"), "{pool:?}");
                // Nobody computes pieces of a job that has ended.
                let left = done.load(SeqCst);
                assert_eq!(panic_of_ten(&pool, &|_, _| {}), None, "{pool:?}");
                assert_eq!(done.load(SeqCst), left);
            }
        }
    }

    #[test]
    fn a_panic_of_another_thread_reaches_the_caller() {
        let both = std::sync::Barrier::new(2);
        for pool in [own(2), on(Host(threads_of_a_host), 2)] {
            // Each thread takes one of the first two pieces, as neither can finish without the other.
            let panic = panic_of_ten(&pool, &|thread, index| {
                if index < 2 {
                    both.wait();
                    assert!(thread == 0, "another thread");
                }
            });
            assert_eq!(panic.as_deref(), Some("another thread"));
        }
    }

    /// A host that runs other tasks than it was asked to: the job fails, and the next one does not.
    #[test]
    fn hosts_that_run_other_tasks_are_found_out() {
        type Wrong = fn(u32, &Arc<dyn Tasks>);
        let cases: [(Wrong, &str); 6] = [
            (|_, _| {}, "task 0 of 4"),
            (
                |n, tasks| (0..n - 1).for_each(|i| tasks.run(i)),
                "task 3 of 4",
            ),
            (|n, tasks| (1..n).for_each(|i| tasks.run(i)), "task 0 of 4"),
            (
                |n, tasks| (0..n).for_each(|i| (tasks.run(i), tasks.run(i)).1),
                "4 calls of 4 tasks",
            ),
            (
                |n, tasks| (0..n + 2).for_each(|i| tasks.run(i)),
                "2 calls of 4 tasks",
            ),
            (
                |n, tasks| {
                    [u32::MAX]
                        .into_iter()
                        .chain(0..n)
                        .for_each(|i| tasks.run(i))
                },
                "1 calls of 4 tasks",
            ),
        ];
        for (wrong, text) in cases {
            let is_wrong = Arc::new(std::sync::atomic::AtomicBool::new(false));
            let flag = Arc::clone(&is_wrong);
            let pool = on(
                Host(
                    move |num_tasks, tasks: &Arc<dyn Tasks>| match flag.load(SeqCst) {
                        true => wrong(num_tasks, tasks),
                        false => threads_of_a_host(num_tasks, tasks),
                    },
                ),
                4,
            );
            for _ in 0..3 {
                is_wrong.store(true, SeqCst);
                let seen: [AtomicUsize; 10] = Default::default();
                let panic = panic_of_ten(&pool, &|_, index| {
                    seen[index].fetch_add(1, SeqCst);
                });
                let panic = panic.unwrap_or_default();
                assert!(
                    panic.contains("parallel_for") && panic.contains(text),
                    "{text}: {panic}"
                );
                assert!(seen.iter().all(|n| n.load(SeqCst) <= 1), "{text}");
                is_wrong.store(false, SeqCst);
                assert_eq!(panic_of_ten(&pool, &|_, _| {}), None, "{text}");
            }
        }
    }

    /// Tasks that are run when nobody waits for them any more find nothing to do. (Within another job they may come for
    /// it, which that job notices.)
    #[test]
    fn tasks_that_come_late_do_nothing() {
        let kept = Arc::new(Mutex::new(None));
        let keep = Arc::clone(&kept);
        let pool = on(
            Host(move |_, tasks: &Arc<dyn Tasks>| *keep.lock().unwrap() = Some(Arc::clone(tasks))),
            2,
        );
        let done = AtomicUsize::new(0);
        let panic = panic_of_ten(&pool, &|_, _| {
            done.fetch_add(1, SeqCst);
        });
        assert!(panic.is_some_and(|panic| panic.contains("task 0 of 2")));
        let tasks = kept.lock().unwrap().take().unwrap();
        tasks.run(0);
        drop(pool);
        tasks.run(1);
        assert_eq!(done.load(SeqCst), 0);
    }

    /// A host whose `parallel_for` panics: the job is closed all the same.
    #[test]
    fn a_panic_of_a_host_goes_on() {
        let pool = on(
            Host(|_, tasks: &Arc<dyn Tasks>| {
                tasks.run(1);
                panic!("of a host")
            }),
            2,
        );
        for _ in 0..2 {
            let panic = panic_of_ten(&pool, &|_, _| {});
            assert_eq!(panic.as_deref(), Some("of a host"));
        }
    }

    /// A host's thread that takes up other work while it waits, which calls the context.
    #[test]
    fn a_call_within_a_call_is_refused() {
        let again: Arc<Mutex<Option<Arc<Pool>>>> = Arc::default();
        let inner = Arc::clone(&again);
        let pool = Arc::new(on(
            Host(move |num_tasks, tasks: &Arc<dyn Tasks>| {
                threads_of_a_host(num_tasks, tasks);
                let pool = inner.lock().unwrap().clone().unwrap();
                drop(pool.turn());
            }),
            2,
        ));
        *again.lock().unwrap() = Some(Arc::clone(&pool));
        for _ in 0..2 {
            let panic = panic_of_ten(&pool, &|_, _| {}).unwrap_or_default();
            assert!(panic.contains("called the context again"), "{panic}");
        }
        *again.lock().unwrap() = None;
    }

    #[test]
    fn numbers_that_no_host_has_are_refused() {
        for (num_threads, words) in [(0, ["num_threads: 0", "1"]), (1025, ["1025", "1024"])] {
            let host = Arc::new(Host(one_after_the_other));
            let refused = Pool::new(&Threads::Host { num_threads, host }, &Logger::silent());
            let Err(Error::InvalidArgument(message)) = refused else {
                panic!("{refused:?}");
            };
            assert!(words.iter().all(|word| message.contains(word)), "{message}");
        }
    }

    #[test]
    fn callers_take_turns() {
        let pool = own(2);
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
