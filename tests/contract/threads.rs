//! Many threads, as far as the header allows: runs of one plan with different outputs, plans of different
//! handles, creating and destroying on one context. Results must be those of one thread, to the bit.

use crate::common::door::{DOORS, Session};
use crate::common::instance::{LayerData, Output, Planned, solve};
use crate::common::memory::HostMemory;
use crate::common::problem::{Layer, MaskKind, Problem};
use folio::api::{Stream, Target};
use folio::dtype::DType;
use folio::error::Error;
use folio::problem::Kind;
use std::sync::Barrier;
use std::thread;

const THREADS: usize = 6;
const ROUNDS: usize = 4;

fn sessions() -> Vec<Box<dyn Session>> {
    let targets = [1, 2].map(|num_threads| Target::Cpu { num_threads });
    let pairs = DOORS
        .iter()
        .flat_map(|door| targets.map(|target| door.open(target)));
    pairs
        .map(|session| session.expect("a CPU context"))
        .collect()
}

/// A batch that is worth more than one thread.
pub fn batch(kind: Kind) -> Problem {
    let mut problem = Problem::plain(&[(1, 300), (1, 33), (1, 700), (1, 160)]).of(DType::BF16);
    problem.kind = kind;
    if kind == Kind::Prefill {
        problem.requests[1].qo_len = 30;
    }
    problem.memory.padded_rows = 1;
    problem
}

fn layer(problem: &Problem, n: usize) -> Problem {
    problem.with_layer(Layer {
        mask: if n.is_multiple_of(2) {
            MaskKind::Causal
        } else {
            MaskKind::Full
        },
        window: n.is_multiple_of(3).then_some((200, 5)),
        sinks: n % 4 == 1,
        tag: n as u64,
        ..Layer::plain()
    })
}

pub fn same(a: &Output, b: &Output) -> bool {
    let bits = |output: &Output| -> Vec<u32> {
        let lse = output.lse.iter().flatten();
        lse.map(|value| value.to_bits()).collect()
    };
    a.o == b.o && bits(a) == bits(b)
}

#[test]
fn one_plan_many_runs() {
    for session in sessions() {
        for kind in [Kind::Decode, Kind::Prefill] {
            let problem = batch(kind);
            let handle = session.attention(problem.desc()).unwrap();
            let planned = Planned::new(handle, &HostMemory, &HostMemory, &problem).unwrap();
            let layers: Vec<LayerData<'_>> = (0..THREADS)
                .map(|n| LayerData::new(&HostMemory, &layer(&problem, n)))
                .collect();
            let alone: Vec<Output> = layers
                .iter()
                .map(|layer| planned.run(layer).unwrap())
                .collect();
            let (handle, start) = (&planned.handle, Barrier::new(THREADS));
            thread::scope(|scope| {
                for (layer, alone) in layers.iter().zip(&alone) {
                    let start = &start;
                    scope.spawn(move || {
                        start.wait();
                        for _ in 0..ROUNDS {
                            layer.reset_outputs();
                            handle.run(&layer.input(), Stream::default()).unwrap();
                            assert!(same(&layer.output(), alone));
                        }
                    });
                }
            });
        }
    }
}

#[test]
fn many_handles_on_one_context() {
    for session in sessions() {
        let problems: Vec<Problem> = (0..THREADS)
            .map(|n| {
                let kind = if n.is_multiple_of(2) {
                    Kind::Decode
                } else {
                    Kind::Prefill
                };
                layer(&batch(kind), n)
            })
            .collect();
        let alone: Vec<Output> = problems
            .iter()
            .map(|problem| solve(&*session, &HostMemory, problem).unwrap())
            .collect();
        let (session, start) = (&session, Barrier::new(THREADS));
        thread::scope(|scope| {
            for (problem, alone) in problems.iter().zip(&alone) {
                let start = &start;
                scope.spawn(move || {
                    start.wait();
                    for _ in 0..ROUNDS {
                        // Creates, plans, runs and destroys.
                        let got = solve(&**session, &HostMemory, problem).unwrap();
                        assert!(same(&got, alone));
                    }
                });
            }
        });
    }
}

/// Each thread plans its own handle again and again, while the others plan and run theirs.
#[test]
fn plans_of_different_handles() {
    for session in sessions() {
        let (session, start) = (&session, Barrier::new(THREADS));
        thread::scope(|scope| {
            for n in 0..THREADS {
                let start = &start;
                scope.spawn(move || {
                    let problem = layer(&batch(Kind::Prefill), n);
                    let handle = session.attention(problem.desc()).unwrap();
                    let mut planned =
                        Planned::new(handle, &HostMemory, &HostMemory, &problem).unwrap();
                    let layer = LayerData::new(&HostMemory, &problem);
                    let first = planned.run(&layer).unwrap();
                    start.wait();
                    for _ in 0..ROUNDS {
                        planned.replan(&HostMemory, &problem).unwrap();
                        assert!(same(&planned.run(&layer).unwrap(), &first));
                    }
                });
            }
        });
    }
}

/// Contexts come and go on many threads; a handle keeps what it needs of a context that is gone.
#[test]
fn handles_outlive_their_context() {
    let problem = batch(Kind::Decode);
    for door in DOORS {
        // How a row is split, and so its last bits, depend on the number of threads.
        let first = (0..4).map(|num_threads| {
            let session = door.open(Target::Cpu { num_threads }).unwrap();
            solve(&*session, &HostMemory, &problem).unwrap()
        });
        let first: Vec<Output> = first.collect();
        thread::scope(|scope| {
            for num_threads in 0..4 {
                let (problem, first) = (&problem, &first[num_threads as usize]);
                scope.spawn(move || {
                    for _ in 0..ROUNDS {
                        let session = door.open(Target::Cpu { num_threads }).unwrap();
                        let handle = session.attention(problem.desc()).unwrap();
                        drop(session);
                        let planned =
                            Planned::new(handle, &HostMemory, &HostMemory, problem).unwrap();
                        let layer = LayerData::new(&HostMemory, problem);
                        assert!(same(&planned.run(&layer).unwrap(), first));
                    }
                });
            }
        });
    }
}

/// A handle that was made and planned on one thread runs and ends on another.
#[test]
fn handles_move_between_threads() {
    let problem = batch(Kind::Prefill);
    for session in sessions() {
        let alone = solve(&*session, &HostMemory, &problem).unwrap();
        let handle = session.attention(problem.desc()).unwrap();
        let problem = &problem;
        let moved = thread::scope(|scope| {
            let made = scope.spawn(move || {
                let planned = Planned::new(handle, &HostMemory, &HostMemory, problem).unwrap();
                planned.run(&LayerData::new(&HostMemory, problem)).unwrap()
            });
            made.join().unwrap()
        });
        assert!(same(&moved, &alone));
    }
}

/// More threads than the stated limit are refused by name, value and limit.
#[test]
fn too_many_threads_are_refused() {
    for door in DOORS {
        for num_threads in [1025, 1_000_000, u32::MAX] {
            let refused = door.open(Target::Cpu { num_threads }).err();
            let Some(Error::InvalidArgument(message)) = refused else {
                panic!("{} {num_threads}: {refused:?}", door.name());
            };
            for word in ["num_threads", &num_threads.to_string(), "1024"] {
                assert!(message.contains(word), "{}: {message}", door.name());
            }
        }
    }
}
