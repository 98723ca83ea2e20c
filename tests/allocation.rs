//! `run` allocates nothing, on any thread. Projections keep what their threads work in. A cascade's plans after the first
//! one of the same size allocate nothing either.

mod common;

use common::cascade::{Case as CascadeCase, Data as CascadeData, Handle as CascadeHandle};
use common::door::{Door, RustDoor, Session};
use common::instance::{LayerData, Planned};
use common::memory::{HostMemory, Resident};
use common::mla::{Cache, MlaLayer, MlaProblem, Queries};
use common::mla_context::{Case as ContextCase, Data, Handle as ContextHandle};
use common::problem::Problem;
use common::projections::{Case, Layout as RowLayout, Model, Operator, Values, Weights, rows};
use folio::api::{Context, HostThreads, SharedPrefixes, Stream, Target, Tasks, Threads};
use folio::dtype::DType;
use folio::log::Logger;
use folio::problem::{AbsorbQArgs, Kind};
use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Counts what the whole process asks for.
struct Counting;

static ALLOCATIONS: AtomicUsize = AtomicUsize::new(0);

// SAFETY: everything is passed on to the system's allocator.
#[allow(unsafe_code)]
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's promises are the same.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller's promises are the same.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn allocations(body: impl FnOnce()) -> usize {
    let before = ALLOCATIONS.load(Ordering::Relaxed);
    body();
    ALLOCATIONS.load(Ordering::Relaxed) - before
}

/// One test, so that nothing else in the process allocates meanwhile.
#[test]
fn run_allocates_nothing() {
    assert_eq!(
        allocations(|| drop(std::hint::black_box(Box::new(1)))),
        1,
        "the counter counts"
    );
    let session = RustDoor
        .open(Target::Cpu { num_threads: 3 })
        .expect("a CPU context");
    runs_allocate_nothing(&*session);
    contexts_allocate_nothing(&*session);
    cascades_allocate_nothing(&*session);
    let threads = Threads::Host {
        num_threads: 3,
        host: Arc::new(OneAfterTheOther),
    };
    let on_host = Context::on_threads(&threads, Logger::silent()).expect("a CPU context");
    runs_allocate_nothing(&on_host);
    let session = RustDoor
        .open(Target::Cpu { num_threads: 1 })
        .expect("a CPU context");
    projections_allocate_flags(&*session);
}

/// A host that has the tasks of `parallel_for` run on the calling thread.
#[derive(Debug)]
struct OneAfterTheOther;

impl HostThreads for OneAfterTheOther {
    fn parallel_for(&self, num_tasks: u32, tasks: &Arc<dyn Tasks>) {
        (0..num_tasks).for_each(|index| tasks.run(index));
    }
}

fn runs_allocate_nothing(session: &dyn Session) {
    let prefill = Problem::plain(&[(40, 300), (1, 700), (0, 0), (5, 3)]);
    let decode = Problem {
        kind: Kind::Decode,
        ..Problem::plain(&[(1, 900), (1, 1), (1, 0)])
    };
    let extend = Problem::plain(&[(40, 300), (1, 700), (0, 0), (5, 5)]).extend(DType::F32);
    for problem in [prefill, decode, extend] {
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            let problem = Problem {
                new_kv: problem.new_kv.map(|_| dtype),
                ..problem.clone().of(dtype)
            };
            let handle = session.attention(problem.desc()).expect("supported");
            let planned = Planned::new(handle, &HostMemory, &HostMemory, &problem).expect("a plan");
            let layer = LayerData::new(&HostMemory, &problem);
            let input = layer.input();
            let count = allocations(|| {
                for _ in 0..3 {
                    planned
                        .handle
                        .run(&input, Stream::default())
                        .expect("a run");
                }
            });
            assert_eq!(count, 0, "{:?} {dtype}", problem.kind);
        }
    }
    for cache in [Cache::Records, Cache::Two, Cache::DsMla] {
        let problem = MlaProblem::plain(&[(1, 700), (3, 40)]).tensors(Queries::Two, cache);
        let handle = session.attention(problem.desc()).expect("supported");
        let planned =
            Planned::new(handle, &HostMemory, &HostMemory, &problem.batch).expect("a plan");
        let input = MlaLayer::new(&HostMemory, &problem);
        let args = input.input();
        let count = allocations(|| {
            let outcome = planned.handle.run(&args, Stream::default());
            outcome.expect("a run");
        });
        assert_eq!(count, 0, "MLA {cache:?}");
    }
}

/// The steps of a run over a cached context, which are all of it but the projections.
fn contexts_allocate_nothing(session: &dyn Session) {
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        let case = ContextCase {
            in_steps: true,
            ..ContextCase::plain(&[(30, 300), (1, 0), (5, 200)]).of(dtype)
        };
        let data = Data::new(&HostMemory, &case);
        let stream = Stream::default();
        let mut handle = ContextHandle::new(session, &HostMemory, case.desc()).expect("supported");
        handle.plan(&data.batch(), stream).expect("a plan");
        let (context, args) = (&handle.context, data.args());
        let count = allocations(|| {
            for _ in 0..3 {
                context.new_tokens(&args, stream).expect("a step");
                for chunk in 0..context.num_chunks().expect("a plan") {
                    context.gather(chunk, &args, stream).expect("a step");
                    context.attend(chunk, &args, stream).expect("a step");
                }
            }
        });
        assert_eq!(count, 0, "{dtype}");
    }
}

/// Plans that share and plans that do not, with runs of both.
fn cascades_allocate_nothing(session: &dyn Session) {
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        let own: Vec<(i32, i32)> = (0..8).map(|b| (1 + b % 2, 5 + 20 * b)).collect();
        let case = CascadeCase::plain(&own, &[(0, 8, 200), (0, 4, 340)]).of(dtype);
        let data = CascadeData::new(&HostMemory, &case);
        let (batch, args, stream) = (data.batch(), data.args(), Stream::default());
        let mut handle = CascadeHandle::new(session, &HostMemory, case.desc()).expect("supported");
        let plan_and_run = |handle: &mut CascadeHandle<'_>, prefixes: &SharedPrefixes<'_>| {
            handle.plan(&batch, prefixes, stream).expect("a plan");
            handle.cascade.run(&args, stream).expect("a run");
            handle.cascade.shares()
        };
        let (some, none) = (data.prefixes(), SharedPrefixes::default());
        assert_eq!(plan_and_run(&mut handle, &some), Ok(true));
        let count = allocations(|| {
            assert_eq!(plan_and_run(&mut handle, &none), Ok(false));
            assert_eq!(plan_and_run(&mut handle, &some), Ok(true));
        });
        assert_eq!(count, 0, "{dtype}");
    }
}

/// The first call makes what the thread works in. (Of several threads each would at its first piece, whenever it gets
/// one.) After that there are a few bytes for every product of two blocks, which the crate `gemm` keeps flags in; were
/// the blocks packed, there would be more.
fn projections_allocate_flags(session: &dyn Session) {
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        for weights in [Weights::Compact, Weights::Parts] {
            for tokens in [1, 3, 70] {
                let case = Case {
                    operator: Operator::AbsorbQ,
                    dtype,
                    tokens,
                    heads: 24,
                    widths: [64, 64, 136],
                    layout: RowLayout::Compact,
                    weights,
                };
                let model = Model::new(&HostMemory, &case);
                let rows = |width| {
                    let view = rows(dtype, [tokens, case.heads, width], RowLayout::Compact);
                    Resident::new(&HostMemory, Values { dtype, seed: 1 }.image(view))
                };
                let (q_nope, q_latent) = (rows(64), rows(136));
                let args = AbsorbQArgs {
                    q_nope: q_nope.tensor(),
                    w_uk: model.w_uk,
                    q_latent: q_latent.tensor(),
                };
                let run = || {
                    session
                        .absorb_q(&args, Stream::default())
                        .expect("a product")
                };
                let counts: Vec<usize> = (0..5).map(|_| allocations(run)).collect();
                // Columns are taken by 128, tokens by 64.
                let products = 24 * 2 * (tokens as usize).div_ceil(64);
                let few = counts[1..].iter().all(|&count| count <= products);
                assert!(few, "{case:?}: {counts:?}");
            }
        }
    }
}
