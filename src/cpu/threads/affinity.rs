//! The CPUs that threads may use. Linux only: elsewhere nothing is known, and nothing can be bound.
#![allow(unsafe_code)]

use crate::backend::CpuSet;
use crate::error::{Error, Result};
use std::io;
use std::sync::OnceLock;
use std::thread;

/// The CPUs of the process's main thread when the library was loaded. Later is too late: OpenMP binds the threads that
/// it finds to one CPU each, the main thread among them. `None` where the system does not say.
pub fn at_load() -> Option<CpuSet> {
    static AT_LOAD: OnceLock<Option<CpuSet>> = OnceLock::new();
    *AT_LOAD.get_or_init(|| system::of_main_thread().ok())
}

/// Runs [`at_load`] when the library is loaded. (Linked statically it may be left out; then the first context does.)
#[cfg(target_os = "linux")]
#[used]
// SAFETY: the section holds functions of this type, which take no arguments that this one would miss; std's locks and
// system calls work before `main`.
#[unsafe(link_section = ".init_array")]
static NOTE_AT_LOAD: extern "C" fn() = {
    extern "C" fn note() {
        at_load();
    }
    note
};

/// The CPUs of the calling thread; none where the system does not say.
pub fn of_caller() -> CpuSet {
    system::of_caller().unwrap_or_default()
}

/// The CPU that the calling thread is on; negative where the system does not say.
pub fn cpu_of_caller() -> i32 {
    system::cpu_of_caller()
}

/// Calls `body` on a new thread, which ends with it. What the thread is bound to, the threads that it starts are too.
///
/// # Errors
/// `OutOfMemory` where the system starts no more threads.
pub fn on_a_new_thread<T: Send>(body: impl FnOnce() -> Result<T> + Send) -> Result<T> {
    thread::scope(|scope| {
        let thread = thread::Builder::new().name("folio-start".into());
        let thread = thread.spawn_scoped(scope, body).map_err(|error| {
            Error::OutOfMemory(format!(
                "num_threads: no thread could be started ({error}); 1 needs none"
            ))
        })?;
        thread
            .join()
            .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

/// Binds the calling thread to CPUs, as far as they are there and the process may use them. A thread that cannot be bound
/// keeps what it has.
pub fn bind_where_possible(cpus: &CpuSet) {
    let _ = system::bind(cpus);
}

/// Binds the calling thread to all of the CPUs.
///
/// # Errors
/// `InvalidArgument` where one of them is not there or not the process's; `Unsupported` where the system binds no threads.
pub fn bind(cpus: &CpuSet) -> Result<()> {
    let refused = |error: io::Error| {
        Error::Unsupported(format!(
            "cpus: {cpus} is not supported on this system, which does not bind threads ({error}); NULL is"
        ))
    };
    // The system binds to those that are there, and says that it could not where none is.
    let bound = system::bind(cpus);
    let granted = match &bound {
        Ok(()) => system::of_caller().map_err(refused)?,
        Err(_) => CpuSet::default(),
    };
    let Some(missing) = cpus.iter().find(|&cpu| !granted.contains(cpu)) else {
        return Ok(());
    };
    system::bind(&CpuSet::all()).map_err(refused)?;
    let usable = system::of_caller().map_err(refused)?;
    match bound {
        Err(error) if usable.contains(missing) => Err(refused(error)),
        _ => Err(Error::InvalidArgument(format!(
            "cpus: {missing} is not accepted, as this process may not use it or it is not there; {usable} are"
        ))),
    }
}

#[cfg(target_os = "linux")]
mod system {
    use super::CpuSet;
    use std::io;

    pub fn of_main_thread() -> io::Result<CpuSet> {
        // SAFETY: no arguments. The main thread's id is that of the process.
        of(unsafe { libc::getpid() })
    }

    pub fn of_caller() -> io::Result<CpuSet> {
        of(0)
    }

    pub fn cpu_of_caller() -> i32 {
        // SAFETY: no arguments.
        unsafe { libc::sched_getcpu() }
    }

    fn of(thread: libc::pid_t) -> io::Result<CpuSet> {
        let mut cpus = CpuSet::default();
        let words = cpus.words_mut();
        // SAFETY: the call writes as many bytes as the words have.
        let status = unsafe {
            libc::sched_getaffinity(thread, size_of_val(words), words.as_mut_ptr().cast())
        };
        done(status).map(|()| cpus)
    }

    pub fn bind(cpus: &CpuSet) -> io::Result<()> {
        let words = cpus.words();
        // SAFETY: the call reads as many bytes as the words have.
        done(unsafe { libc::sched_setaffinity(0, size_of_val(words), words.as_ptr().cast()) })
    }

    fn done(status: i32) -> io::Result<()> {
        match status {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }
}

#[cfg(not(target_os = "linux"))]
mod system {
    use super::CpuSet;
    use std::io;

    pub fn of_main_thread() -> io::Result<CpuSet> {
        Err(io::ErrorKind::Unsupported.into())
    }

    pub fn of_caller() -> io::Result<CpuSet> {
        of_main_thread()
    }

    pub fn cpu_of_caller() -> i32 {
        -1
    }

    pub fn bind(_: &CpuSet) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    /// `NOTE_AT_LOAD` ran before any test could bind a thread.
    #[test]
    fn the_library_notes_what_the_process_had() {
        let noted = at_load().expect("Linux says");
        assert!(!noted.is_empty());
        let first = CpuSet::of(&[noted.iter().next().unwrap()]).unwrap();
        thread::scope(|scope| {
            scope.spawn(|| {
                bind(&first).unwrap();
                assert_eq!(of_caller(), first);
                assert_eq!(at_load(), Some(noted));
            });
        });
    }

    #[test]
    fn new_threads_have_what_their_creator_was_bound_to() {
        let before = of_caller();
        let first = CpuSet::of(&[before.iter().next().unwrap()]).unwrap();
        let of_child = on_a_new_thread(|| {
            bind(&first)?;
            Ok(thread::spawn(of_caller).join().unwrap())
        });
        assert_eq!(of_child, Ok(first));
        assert_eq!(of_caller(), before, "the caller is left as it was");
    }

    #[test]
    fn cpus_that_are_not_there_are_named() {
        let there = of_caller().iter().next().unwrap();
        for cpus in [&[there, 8191][..], &[8191]] {
            let cpus = CpuSet::of(cpus).unwrap();
            let refused = on_a_new_thread(|| bind(&cpus));
            let Err(Error::InvalidArgument(message)) = refused else {
                panic!("{refused:?}");
            };
            assert!(message.contains("cpus: 8191"), "{message}");
        }
        let bound = on_a_new_thread(|| {
            bind_where_possible(&CpuSet::of(&[there, 8191])?);
            Ok(of_caller())
        });
        assert_eq!(bound, CpuSet::of(&[there]));
    }
}
