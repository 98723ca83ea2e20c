//! Folio's own threads, which sleep between jobs.
//!
//! They are bound to all of their CPUs together, not to one each: the thread that calls Folio is the host's and stays
//! where the host has put it, so a worker that was bound to the same CPU would wait for it, with idle ones beside it.

use super::affinity;
use super::help::{Help, Late};
use super::jobs::{Jobs, Present};
use super::waiting::Patience;
use crate::backend::CpuSet;
use crate::error::{Error, Result};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::thread::{self, JoinHandle, Thread};

/// Most threads of a pool. The largest machines in use have 1024 hardware threads (four sockets of 128 cores, two
/// threads each); threads beyond that only wait for one another.
const MAX_THREADS: u32 = 1024;

/// The workers of a pool, which end when this is dropped.
pub struct Workers {
    shared: Arc<Shared>,
    workers: Vec<Worker>,
}

/// What the workers and their caller share.
struct Shared {
    jobs: Jobs,
    help: Help,
}

/// What [`Workers::start`] has started.
pub struct Started {
    /// Threads that were asked for, the caller's among them.
    pub num_threads: usize,
    /// All of them but the caller's, or fewer.
    pub workers: Workers,
    /// What is to be said where they are fewer.
    pub warning: Option<String>,
}

struct Worker {
    thread: Option<JoinHandle<()>>,
    handle: Thread,
    signals: Arc<Signals>,
}

#[derive(Default)]
struct Signals {
    asleep: AtomicBool,
    stop: AtomicBool,
}

/// `num_threads`, where it is a number that a pool can have.
///
/// # Errors
/// `InvalidArgument`.
pub fn check_number(num_threads: u32) -> Result<u32> {
    if num_threads > MAX_THREADS {
        return Err(Error::InvalidArgument(format!(
            "num_threads: {num_threads} exceeds {MAX_THREADS}, the most threads of a context"
        )));
    }
    Ok(num_threads)
}

impl Workers {
    /// Starts the workers of so many threads (0: one for each of the CPUs), of which the caller's is one. `cpus` as in
    /// `Threads::Own`.
    ///
    /// No more compute than have CPUs, their own and the caller's together: two on one CPU wait for each other.
    ///
    /// # Errors
    /// `InvalidArgument` above [`MAX_THREADS`], before anything is allocated, and for CPUs that are not there;
    /// `OutOfMemory` where the system starts no more threads. Workers that were started by then have ended when this
    /// returns.
    pub fn start(num_threads: u32, cpus: Option<&CpuSet>) -> Result<Started> {
        Workers::start_by(num_threads, cpus, &thread::Builder::new)
    }

    /// As [`Workers::start`], each worker by a builder of the caller's.
    fn start_by(
        num_threads: u32,
        cpus: Option<&CpuSet>,
        builder: &(impl Fn() -> thread::Builder + Sync),
    ) -> Result<Started> {
        check_number(num_threads)?;
        if num_threads == 1 && cpus.is_none() {
            return Ok(Started {
                num_threads: 1,
                workers: Workers::spawn(1, builder)?,
                warning: None,
            });
        }
        let of_caller = affinity::of_caller();
        // The workers get the CPUs of the thread that starts them, and the caller keeps its own.
        affinity::on_a_new_thread(|| {
            match cpus {
                Some(cpus) => affinity::bind(cpus)?,
                None => affinity::at_load()
                    .iter()
                    .for_each(affinity::bind_where_possible),
            }
            let own = affinity::of_caller();
            start_on([own, own.with(&of_caller)], num_threads, builder)
        })
    }

    /// The workers of so many threads, which have the CPUs of the caller.
    pub(super) fn spawn(
        num_threads: usize,
        builder: &impl Fn() -> thread::Builder,
    ) -> Result<Workers> {
        let shared = Shared {
            jobs: Jobs::new(num_threads),
            help: Help::default(),
        };
        let mut workers = Workers {
            shared: Arc::new(shared),
            workers: Vec::new(),
        };
        for index in 1..num_threads {
            let worker = Worker::start(&workers.shared, index, builder())?;
            workers.workers.push(worker);
        }
        Ok(workers)
    }

    /// Threads that compute, the caller's among them.
    pub fn num_threads(&self) -> usize {
        self.shared.jobs.num_threads()
    }

    /// The jobs that they do.
    pub fn jobs(&self) -> &Jobs {
        &self.shared.jobs
    }

    /// Begins a turn of the caller's. Returns whether workers are likely to help it.
    pub fn are_likely_to_help(&self) -> bool {
        self.num_threads() > 1 && self.shared.help.is_likely()
    }

    /// The caller's part of a job of `count` pieces. Workers that sleep are woken before it, or, where they are not
    /// likely to help, when it has taken long.
    pub fn join(&self, job: &Present<'_>, count: usize, likely: bool) {
        let wake = || self.wake(count - 1);
        if likely {
            wake();
            job.work(0, || {});
        } else {
            let mut late = Late::new(wake);
            job.work(0, || late.look());
        }
    }

    /// A job that the caller joined has ended.
    pub fn job_ended(&self) {
        self.shared.help.job_ended();
    }

    /// Wakes those that sleep, up to so many. The others find the open job by themselves.
    fn wake(&self, wanted: usize) {
        for worker in self.workers.iter().take(wanted) {
            if worker.signals.asleep.swap(false, SeqCst) {
                worker.handle.unpark();
            }
        }
    }
}

/// Starts workers on the calling thread's CPUs, the first of the two sets. The second one has the caller's too.
fn start_on(
    [own, all]: [CpuSet; 2],
    num_threads: u32,
    builder: &impl Fn() -> thread::Builder,
) -> Result<Started> {
    let counted = |set: &CpuSet| match set.len() {
        // This system does not say.
        0 => thread::available_parallelism().map_or(1, usize::from),
        count => count,
    };
    let num_threads = match num_threads {
        0 => counted(&own).min(MAX_THREADS as usize),
        stated => stated as usize,
    };
    let most = if own.is_empty() {
        num_threads
    } else {
        counted(&all)
    };
    let warning = (num_threads > most).then(|| {
        format!(
            "num_threads: {num_threads} is more than the CPUs that these threads and the one that creates the context \
             may use ({all}), so {most} of them compute; cpus and the creating thread's affinity say which these are"
        )
    });
    Ok(Started {
        num_threads,
        workers: Workers::spawn(num_threads.min(most), builder)?,
        warning,
    })
}

impl Worker {
    fn start(shared: &Arc<Shared>, index: usize, builder: thread::Builder) -> Result<Worker> {
        let signals = Arc::new(Signals::default());
        let (shared, theirs) = (Arc::clone(shared), Arc::clone(&signals));
        let thread = builder
            .name(format!("folio-{index}"))
            .spawn(move || theirs.serve(&shared, index))
            .map_err(|error| {
                Error::OutOfMemory(format!(
                    "num_threads: thread {index} of the context could not be started ({error}); fewer threads may be"
                ))
            })?;
        Ok(Worker {
            handle: thread.thread().clone(),
            thread: Some(thread),
            signals,
        })
    }
}

impl Signals {
    fn serve(&self, Shared { jobs, help }: &Shared, thread: usize) {
        let mut last = 0;
        let mut patience = Patience::of_worker();
        while !self.stop.load(SeqCst) {
            if let Some(inside) = jobs.enter(Some(last)) {
                last = inside.sequence;
                if inside.job.work(thread, || {}) > 0 {
                    help.comes();
                }
                patience = Patience::of_worker();
            } else if !patience.waits() {
                self.sleep(jobs, last);
                patience = Patience::of_worker();
            }
        }
    }

    /// Sleeps unless a job was opened in the meantime: the flag is up before the jobs are looked at, and the caller
    /// opens a job before it looks at the flag.
    fn sleep(&self, jobs: &Jobs, last: u64) {
        self.asleep.store(true, SeqCst);
        if !jobs.is_open(last) && !self.stop.load(SeqCst) {
            thread::park();
        }
        self.asleep.store(false, SeqCst);
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        for worker in &self.workers {
            worker.signals.stop.store(true, SeqCst);
            worker.handle.unpark();
        }
        for worker in &mut self.workers {
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
    use std::sync::atomic::AtomicUsize;

    #[test]
    fn too_many_threads_are_refused_before_any_is_started() {
        for num_threads in [MAX_THREADS + 1, 1_000_000, u32::MAX] {
            let outcome = Workers::start_by(num_threads, None, &|| unreachable!("a thread"));
            let Some(Error::InvalidArgument(message)) = outcome.err() else {
                panic!("{num_threads} were accepted");
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
        let outcome = Workers::spawn(8, &|| match started.fetch_add(1, SeqCst) {
            0 | 1 => thread::Builder::new(),
            _ => thread::Builder::new().stack_size(1 << 60),
        });
        let Some(Error::OutOfMemory(message)) = outcome.err() else {
            panic!("all were started");
        };
        assert!(message.contains("num_threads: thread 3"), "{message}");
        assert_eq!(started.load(SeqCst), 3);
    }

    /// No more threads compute than have a CPU, whatever is asked for; the number asked for is what work is cut for.
    #[test]
    fn threads_without_a_cpu_are_not_started() {
        let [one, two] = [&[0][..], &[0, 3]].map(|cpus| CpuSet::of(cpus).unwrap());
        let unknown = CpuSet::default();
        for (sets, asked, threads, workers) in [
            ([one, one], 0, 1, 0),
            ([one, one], 4, 4, 0),
            ([one, two], 2, 2, 1),
            ([one, two], 0, 1, 0),
            ([two, two], 0, 2, 1),
            ([two, two], 1, 1, 0),
            ([unknown, unknown], 3, 3, 2),
        ] {
            let started = start_on(sets, asked, &thread::Builder::new).unwrap();
            assert_eq!(started.num_threads, threads, "{sets:?} {asked}");
            assert_eq!(started.workers.workers.len(), workers, "{sets:?} {asked}");
            let warned = started.warning.is_some();
            assert_eq!(warned, workers + 1 < threads, "{sets:?} {asked}");
        }
        let started = start_on([one, two], 5, &thread::Builder::new).unwrap();
        let warning = started.warning.unwrap();
        assert!(
            ["5", "0,3", "2"].iter().all(|w| warning.contains(w)),
            "{warning}"
        );
    }
}
