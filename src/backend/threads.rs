//! The threads that compute on a CPU: Folio's own, or the host's.

use super::CpuSet;
use std::fmt;
use std::sync::Arc;

/// What a CPU context computes on.
#[derive(Debug, Clone)]
pub enum Threads {
    /// The caller's thread, and others that Folio starts.
    Own {
        /// All of them, the caller's among them. 0: one for each of the CPUs.
        num_threads: u32,
        /// The CPUs that the others are bound to. None: those that the process had when the library was loaded.
        cpus: Option<Box<CpuSet>>,
    },
    /// Threads of the host's.
    Host {
        /// How many of them work at a time, 1 or more.
        num_threads: u32,
        /// Runs tasks on them.
        host: Arc<dyn HostThreads>,
    },
}

/// Threads of the host's: OpenMP, TBB, rayon.
pub trait HostThreads: Send + Sync + fmt::Debug {
    /// Calls `tasks.run(index)` for every index below `num_tasks`, each exactly once, on any threads, in any order, at the
    /// same time or not; returns when all have returned. Nobody may call the context meanwhile on the thread that called
    /// this.
    ///
    /// What does otherwise is found out: the call that needed the threads fails with `Internal`.
    fn parallel_for(&self, num_tasks: u32, tasks: &Arc<dyn Tasks>);
}

/// What the host's threads are to run.
pub trait Tasks: Send + Sync {
    /// Runs a task. It does not panic, and does nothing once [`HostThreads::parallel_for`] has returned.
    fn run(&self, index: u32);
}
