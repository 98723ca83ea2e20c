//! The CPUs of Folio's own threads, as the system sees them. Linux only.
#![cfg(target_os = "linux")]
#![allow(unsafe_code)]

mod common;

use common::c_door::c_context_desc;
use common::instance::solve;
use common::memory::HostMemory;
use common::problem::Problem;
use folio::api::{self, CpuSet, Target, Threads};
use folio::ffi::*;
use folio::log::{Level, Logger};
use std::collections::BTreeMap;
use std::ffi::{CStr, c_char, c_void};
use std::ptr::{from_mut, null, null_mut};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::Duration;

/// Tests count the threads of the process, so they run one after the other.
static ALONE: Mutex<()> = Mutex::new(());

/// Calls `test` on a thread that is bound to the first of the process's CPUs, as OpenMP binds its threads, and with all
/// of them.
fn on_a_bound_thread(test: impl FnOnce(&[u32]) + Send) {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let cpus = cpus_of("self").1;
    thread::scope(|scope| {
        let test = || {
            bind(cpus[0]);
            test(&cpus);
        };
        scope.spawn(test).join().unwrap();
    });
}

/// Binds the calling thread.
fn bind(cpu: u32) {
    let set = CpuSet::of(&[cpu]).unwrap();
    let words = set.words();
    // SAFETY: as many bytes as the words have.
    let status = unsafe { libc::sched_setaffinity(0, size_of_val(words), words.as_ptr().cast()) };
    assert_eq!(status, 0);
}

/// Name and CPUs of a thread of this process, or of the main thread ("self").
fn cpus_of(thread: &str) -> (String, Vec<u32>) {
    let path = match thread {
        "self" => "/proc/self/status".to_owned(),
        id => format!("/proc/self/task/{id}/status"),
    };
    let status = std::fs::read_to_string(path).unwrap_or_default();
    let field = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name));
        line.unwrap_or_default().trim().to_owned()
    };
    let mut cpus = Vec::new();
    for range in field("Cpus_allowed_list:")
        .split(',')
        .filter(|range| !range.is_empty())
    {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        cpus.extend(first.parse::<u32>().unwrap()..=last.parse().unwrap());
    }
    (field("Name:"), cpus)
}

/// The CPUs of Folio's threads in this process, by name. There are to be `count` of them: a thread that was just started
/// has no name yet, and one that has just ended may still be listed, so this looks until there are.
fn workers(count: usize) -> BTreeMap<String, Vec<u32>> {
    let of_now = || -> BTreeMap<String, Vec<u32>> {
        let threads = std::fs::read_dir("/proc/self/task").unwrap();
        let threads = threads.map(|thread| thread.unwrap().file_name());
        threads
            .map(|id| cpus_of(id.to_str().unwrap()))
            .filter(|(name, _)| name.starts_with("folio-"))
            .collect()
    };
    let mut workers = of_now();
    for _ in 0..1000 {
        if workers.len() == count && !workers.contains_key("folio-start") {
            return workers;
        }
        thread::sleep(Duration::from_millis(5));
        workers = of_now();
    }
    panic!("{workers:?} are not {count}");
}

/// A context of a desc, with its warnings.
struct Context {
    ctx: *mut folio_context,
    /// Boxed, as the callback has the address.
    warnings: Box<Mutex<Vec<String>>>,
}

unsafe extern "C" fn note(user: *mut c_void, level: i32, message: *const c_char) {
    assert_eq!(level, FOLIO_LOG_WARNING);
    // SAFETY: the context's own list, and a C string.
    let (warnings, text) =
        unsafe { (&*user.cast::<Mutex<Vec<String>>>(), CStr::from_ptr(message)) };
    let text = text.to_string_lossy().into_owned();
    warnings.lock().unwrap().push(text);
}

impl Context {
    fn new(num_threads: u32, cpus: &[u32]) -> Context {
        let mut made = Context {
            ctx: null_mut(),
            warnings: Box::default(),
        };
        let mut desc = c_context_desc(Target::Cpu { num_threads });
        desc.cpus = if cpus.is_empty() {
            null()
        } else {
            cpus.as_ptr()
        };
        desc.num_cpus = cpus.len() as u32;
        desc.log = Some(note);
        desc.log_level = FOLIO_LOG_WARNING;
        desc.log_user = from_mut(&mut *made.warnings).cast();
        // SAFETY: live structs; the list outlives the context.
        let status = unsafe { folio_context_create(&desc, &mut made.ctx, null_mut()) };
        assert_eq!(status, FOLIO_OK);
        made
    }
}

impl Context {
    fn warnings(&self) -> Vec<String> {
        self.warnings.lock().unwrap().clone()
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: made by folio_context_create.
        unsafe { folio_context_destroy(self.ctx) }
    }
}

/// By default: the CPUs that the process had when the library was loaded, and a thread for each, the caller among them.
#[test]
fn a_bound_creator_does_not_bind_its_workers() {
    on_a_bound_thread(|cpus| {
        let context = Context::new(0, &[]);
        let workers = workers(cpus.len() - 1);
        assert!(workers.values().all(|of| of == cpus), "{workers:?}");
        assert_eq!(context.warnings(), [""; 0]);
        let bound = cpus_of(&this_thread());
        assert_eq!(bound.1, cpus[..1], "the caller stays where it was");
    });
}

/// The number of the calling thread.
fn this_thread() -> String {
    // SAFETY: no arguments.
    unsafe { libc::gettid() }.to_string()
}

#[test]
fn a_list_binds_workers_and_counts_them() {
    on_a_bound_thread(|cpus| {
        let last = &cpus[cpus.len() - 1..];
        let context = Context::new(0, last);
        assert!(workers(0).is_empty(), "one CPU: the caller alone");
        assert!(context.warnings().is_empty());
        drop(context);
        let _context = Context::new(2, last);
        // With one CPU in all there is none for a worker.
        let workers = workers(cpus.len().min(2) - 1);
        assert!(workers.values().all(|of| of == last), "{workers:?}");
    });
}

/// Threads that have no CPU are not started, and a warning says so. Results are those of as many threads as were asked
/// for.
#[test]
fn threads_that_outnumber_their_cpus() {
    on_a_bound_thread(|cpus| {
        let context = Context::new(3, &cpus[..1]);
        assert!(workers(0).is_empty());
        let [warning] = &context.warnings()[..] else {
            panic!("{:?}", context.warnings());
        };
        for word in ["num_threads: 3", &format!("({})", cpus[0]), "cpus"] {
            assert!(warning.contains(word), "{warning}");
        }
        let problem = Problem::plain(&[(1, 300), (30, 700)]);
        let threads = |cpus: Option<Box<CpuSet>>, num_threads| Threads::Own { num_threads, cpus };
        let on_one = threads(Some(Box::new(CpuSet::of(&cpus[..1]).unwrap())), 3);
        let outputs = [on_one, threads(None, 3)].map(|threads| {
            let context = api::Context::on_threads(&threads, Logger::silent()).unwrap();
            solve(&context, &HostMemory, &problem).unwrap().o
        });
        assert!(outputs[0] == outputs[1]);
    });
}

#[test]
fn threads_with_a_cpu_each_are_no_matter() {
    on_a_bound_thread(|cpus| {
        let all = cpus.len() as u32;
        for num_threads in [0, 1, all] {
            for list in [&[][..], cpus] {
                let context = Context::new(num_threads, list);
                assert_eq!(context.warnings(), [""; 0], "{num_threads} on {list:?}");
            }
        }
        let sink = std::sync::Arc::new(|level: Level, message: &str| {
            panic!("{level:?}: {message}");
        });
        let logger = Logger::new(sink, Level::Warning);
        api::Context::new(Target::Cpu { num_threads: all }, logger).unwrap();
    });
}
