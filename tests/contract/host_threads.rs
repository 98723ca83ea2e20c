//! `parallel_for`: the host's threads compute what Folio's own would, to the bit. A host that does not run the tasks it is
//! given is found out, whatever it does instead.

use crate::common::c_door::{self, c_context_desc};
use crate::common::door::Session;
use crate::common::instance::{LayerData, Output, Planned, solve};
use crate::common::memory::HostMemory;
use crate::common::problem::Problem;
use crate::threads::{batch, same};
use folio::api::{self, HostThreads, Stream, Target, Tasks, Threads};
use folio::error::{Error, Result};
use folio::ffi::*;
use folio::log::Logger;
use folio::problem::Kind;
use std::ffi::c_void;
use std::ptr::from_ref;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::SeqCst};
use std::thread;

/// What a host does with the tasks of a call: (number of tasks, task).
type Runs = dyn Fn(u32, &(dyn Fn(u32) + Sync)) + Send + Sync;

/// A host, and the number of its calls.
struct Host {
    runs: Box<Runs>,
    calls: AtomicU32,
    most_tasks: AtomicU32,
}

impl Host {
    fn new(runs: impl Fn(u32, &(dyn Fn(u32) + Sync)) + Send + Sync + 'static) -> Host {
        Host {
            runs: Box::new(runs),
            calls: AtomicU32::new(0),
            most_tasks: AtomicU32::new(0),
        }
    }

    fn call(&self, num_tasks: u32, task: &(dyn Fn(u32) + Sync)) {
        self.calls.fetch_add(1, SeqCst);
        self.most_tasks.fetch_max(num_tasks, SeqCst);
        (self.runs)(num_tasks, task);
    }
}

impl std::fmt::Debug for Host {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("a host")
    }
}

impl HostThreads for Host {
    fn parallel_for(&self, num_tasks: u32, tasks: &Arc<dyn Tasks>) {
        self.call(num_tasks, &|index| tasks.run(index));
    }
}

unsafe extern "C" fn parallel_for(
    user: *mut c_void,
    num_tasks: u32,
    task: folio_task_fn,
    task_data: *mut c_void,
) {
    struct Data(*mut c_void);
    // SAFETY: the header says that any threads may run tasks.
    unsafe impl Sync for Data {}
    impl Data {
        fn get(&self) -> *mut c_void {
            self.0
        }
    }
    let data = Data(task_data);
    // SAFETY: the test's host, which outlives the context.
    let host = unsafe { &*user.cast::<Host>() };
    // SAFETY: a task with its data.
    host.call(num_tasks, &|index| unsafe {
        task.unwrap()(data.get(), index)
    });
}

/// A context on the host's threads, through each of the doors.
fn sessions(host: &Arc<Host>, num_threads: u32) -> Vec<Box<dyn Session>> {
    let threads = Threads::Host {
        num_threads,
        host: Arc::<Host>::clone(host),
    };
    let rust = api::Context::on_threads(&threads, Logger::silent()).expect("a context");
    let mut desc = c_context_desc(Target::Cpu { num_threads });
    desc.parallel_for = Some(parallel_for);
    desc.parallel_for_user = from_ref::<Host>(host).cast_mut().cast();
    // SAFETY: the callers keep the host until the sessions are gone.
    let c = unsafe { c_door::open(&desc) }.expect("a context");
    vec![Box::new(rust), c]
}

/// What so many threads of Folio's own compute.
fn on_own(num_threads: u32, problem: &Problem) -> Output {
    let own = api::Context::new(Target::Cpu { num_threads }, Logger::silent()).unwrap();
    solve(&own, &HostMemory, problem).unwrap()
}

fn on_threads(num_tasks: u32, task: &(dyn Fn(u32) + Sync)) {
    thread::scope(|scope| {
        for index in 0..num_tasks {
            scope.spawn(move || task(index));
        }
    });
}

fn last_first(num_tasks: u32, task: &(dyn Fn(u32) + Sync)) {
    (0..num_tasks).rev().for_each(task);
}

/// Some threads of a pool of the host's, each with every third task.
fn on_three(num_tasks: u32, task: &(dyn Fn(u32) + Sync)) {
    thread::scope(|scope| {
        for first in 0..3 {
            scope.spawn(move || (first..num_tasks).step_by(3).for_each(task));
        }
    });
}

#[test]
fn results_are_those_of_own_threads() {
    for kind in [Kind::Decode, Kind::Prefill] {
        let problem = batch(kind);
        for num_threads in [1, 2, 5] {
            let want = on_own(num_threads, &problem);
            for runs in [on_threads, last_first, on_three] {
                let host = Arc::new(Host::new(runs));
                for session in sessions(&host, num_threads) {
                    let got = solve(&*session, &HostMemory, &problem).unwrap();
                    assert!(same(&got, &want), "{num_threads} threads");
                }
                assert_eq!(host.calls.load(SeqCst) > 0, num_threads > 1);
                assert!(host.most_tasks.load(SeqCst) <= num_threads);
            }
        }
    }
}

/// Many callers of one context: they take turns with the host's threads.
#[test]
fn callers_take_turns() {
    let problem = batch(Kind::Prefill);
    let host = Arc::new(Host::new(on_threads));
    for session in sessions(&host, 3) {
        let alone = solve(&*session, &HostMemory, &problem).unwrap();
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    let got = solve(&*session, &HostMemory, &problem).unwrap();
                    assert!(same(&got, &alone));
                });
            }
        });
    }
}

/// Runs a planned handle twice, with a host that first does as it should and then as `wrong` says. Returns the outcomes
/// from then on.
fn outcomes(
    problem: &Problem,
    wrong: fn(u32, &(dyn Fn(u32) + Sync)),
) -> Vec<[std::result::Result<(), Error>; 2]> {
    let is_wrong = Arc::new(AtomicU32::new(0));
    let flag = Arc::clone(&is_wrong);
    let host = Arc::new(Host::new(move |num_tasks, task| match flag.load(SeqCst) {
        0 => on_threads(num_tasks, task),
        _ => wrong(num_tasks, task),
    }));
    let run = |session: Box<dyn Session>| {
        is_wrong.store(0, SeqCst);
        let handle = session.attention(problem.desc()).unwrap();
        let planned = Planned::new(handle, &HostMemory, &HostMemory, problem).unwrap();
        let layer = LayerData::new(&HostMemory, problem);
        planned.run(&layer).unwrap();
        is_wrong.store(1, SeqCst);
        let run = || -> Result<()> { planned.handle.run(&layer.input(), Stream::default()) };
        let first = run();
        is_wrong.store(0, SeqCst);
        [first, run()]
    };
    // Panics go through the Rust door as they are: the C door is the one that answers.
    sessions(&host, 4).into_iter().skip(1).map(run).collect()
}

#[test]
fn hosts_that_run_other_tasks_are_found_out() {
    type Wrong = fn(u32, &(dyn Fn(u32) + Sync));
    let cases: [(Wrong, &str); 5] = [
        (|_, _| {}, "task 0 of"),
        (|n, task| (1..n).for_each(task), "task 0 of"),
        (|n, task| (0..n - 1).for_each(task), "was not run"),
        (|n, task| (0..n).chain(0..1).for_each(task), "1 calls of"),
        (|n, task| (0..n + 3).for_each(task), "3 calls of"),
    ];
    for (wrong, words) in cases {
        for [first, second] in outcomes(&batch(Kind::Decode), wrong) {
            let Err(Error::Internal(message)) = first else {
                panic!("{words}: {first:?}");
            };
            assert!(
                message.contains("parallel_for") && message.contains(words),
                "{message}"
            );
            // What the handle computed is not known, so it is unusable.
            let Err(Error::Internal(message)) = second else {
                panic!("{words}: {second:?}");
            };
            assert!(message.contains("unusable"), "{message}");
        }
    }
}

/// In 0.1.0, whose struct had 40 bytes, 0 threads were the calling thread alone: results keep their bits.
#[test]
fn a_desc_of_the_first_release_means_what_it_meant() {
    let problem = batch(Kind::Decode);
    let one = on_own(1, &problem);
    let mut desc = c_context_desc(Target::Cpu { num_threads: 0 });
    desc.struct_size = 40;
    // SAFETY: a live struct, and longer than it says.
    let session = unsafe { c_door::open(&desc) }.unwrap();
    assert!(same(
        &solve(&*session, &HostMemory, &problem).unwrap(),
        &one
    ));
    desc.struct_size = size_of::<folio_context_desc>() as u32;
    // SAFETY: a live struct.
    let session = unsafe { c_door::open(&desc) }.unwrap();
    let all = thread::available_parallelism().unwrap().get() as u32;
    let want = on_own(all, &problem);
    assert!(same(
        &solve(&*session, &HostMemory, &problem).unwrap(),
        &want
    ));
}
