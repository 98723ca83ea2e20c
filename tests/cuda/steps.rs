//! Steps of a serving loop: captured graphs over changing batches, plans while runs are in flight,
//! streams and threads.

use crate::common::door::Handle;
use crate::common::instance::{LayerData, Output, Scratch, Step};
use crate::common::memory::{HostMemory, Memory};
use crate::common::problem::{Problem, Storage, TableForm};
use crate::gpu::{self, DeviceMemory, PinnedMemory};
use crate::problems::{assert_right, session, some_layers, with_lens};
use folio::api::{Stream, Workspace};
use folio::dtype::DType;
use folio::error::Error;
use folio::problem::{AttentionArgs, AttentionDesc, Kind, KvLayout};

/// Batches that change in every way within their maxima: 6 requests, 3 rows, 2000 keys.
pub const BATCHES: [&[(u32, u32)]; 5] = [
    &[(1, 100), (1, 900), (3, 40)],
    &[(1, 2000), (2, 0), (1, 1), (1, 333), (0, 50), (3, 2)],
    &[(2, 2000)],
    &[],
    &[(1, 64), (1, 64), (1, 64), (1, 64), (1, 64), (1, 64)],
];

/// Batches whose tensors have the shapes of the largest: as many requests, and as long a request.
pub const SIX_REQUESTS: [&[(u32, u32)]; 3] = [
    &[(1, 2000), (2, 0), (1, 1), (1, 333), (0, 50), (3, 2)],
    &[(3, 5), (1, 7), (0, 0), (2, 2000), (1, 1999), (1, 16)],
    &[(0, 0), (0, 0), (0, 0), (0, 0), (0, 0), (0, 2000)],
];

fn plain(kind: Kind, graph: bool) -> Problem {
    Problem {
        kind,
        graph,
        storage: Storage::Paged {
            page_size: 16,
            layout: KvLayout::Nhd,
            form: TableForm::BlockTable { spare_columns: 2 },
            unused_pages: 3,
            shared_pages: 0,
        },
        ..Problem::plain(&[]).of(DType::BF16).heads(8, 2, 128)
    }
}

fn desc(problem: &Problem) -> AttentionDesc {
    AttentionDesc {
        max_batch_size: 6,
        max_qo_len: 3,
        max_num_tokens: match problem.kind {
            Kind::Decode => 0,
            Kind::Prefill | Kind::Mla => 18,
        },
        max_kv_len: 2000,
        max_num_pages: 0,
        ..problem.desc()
    }
}

/// A handle with its workspace.
pub struct Slot<'m> {
    pub handle: Box<dyn Handle>,
    pub scratch: Scratch<'m>,
    bytes: (usize, usize),
}

impl Slot<'_> {
    pub fn new(handle: Box<dyn Handle>) -> Slot<'static> {
        let info = handle.workspace().unwrap();
        Slot {
            scratch: Scratch::new(&DeviceMemory, &info),
            bytes: (info.device_bytes, info.host_bytes),
            handle,
        }
    }

    pub fn plan(&mut self, step: &Step<'_>, stream: Stream) -> folio::error::Result<()> {
        let workspace = self.scratch.workspace();
        self.handle
            .plan(&step.input(), &workspace, self.bytes, stream)
    }
}

/// A run captured over the tensors of the largest batch. Other batches' tensors are moved to their addresses.
pub struct Captured {
    layer: LayerData<'static>,
    graph: gpu::Graph,
    stream: Stream,
}

impl Captured {
    fn new(slot: &mut Slot<'_>, problem: &Problem, stream: Stream) -> Captured {
        Captured::of_largest(slot, with_lens(problem, &[(3, 2000); 6]), stream)
    }

    /// The run of this batch.
    pub fn of_largest(slot: &mut Slot<'_>, largest: Problem, stream: Stream) -> Captured {
        slot.plan(&Step::new(&HostMemory, &largest), stream)
            .unwrap();
        Captured::calls(&largest, stream, |input| {
            slot.handle.run(input, stream).unwrap();
        })
    }

    /// Calls over the tensors of the largest batch.
    fn calls(largest: &Problem, stream: Stream, calls: impl FnOnce(&AttentionArgs)) -> Captured {
        let layer = LayerData::new(&DeviceMemory, largest);
        let graph = gpu::capture(stream, || calls(&layer.input()));
        Captured {
            layer,
            graph,
            stream,
        }
    }

    /// Plans a batch and launches the graph with it.
    pub fn replay(&self, slot: &mut Slot<'_>, batch: &Problem) -> Output {
        let step = Step::new(&HostMemory, batch);
        slot.plan(&step, self.stream).unwrap();
        self.launch(batch)
    }

    /// Launches the graph with the tensors of a batch of the plan in force.
    pub fn launch(&self, batch: &Problem) -> Output {
        let layer = LayerData::new(&DeviceMemory, batch);
        gpu::synchronize_all();
        self.layer.take_inputs_of(&layer);
        self.layer.reset_outputs();
        self.graph.launch(self.stream);
        gpu::synchronize_all();
        layer.take_outputs_of(&self.layer);
        layer.output()
    }
}

/// A graph captured once serves every later plan.
pub fn graph_replays() {
    let session = session();
    let stream = gpu::new_stream();
    for kind in [Kind::Decode, Kind::Prefill] {
        for layer in some_layers() {
            let problem = plain(kind, true).with_layer(layer);
            let mut slot = Slot::new(session.attention(desc(&problem)).unwrap());
            let captured = Captured::new(&mut slot, &problem, stream);
            for lens in BATCHES {
                let batch = with_lens(&problem, lens);
                assert_right(&batch, &captured.replay(&mut slot, &batch));
            }
            slot.scratch.assert_within_bounds();
        }
    }
}

/// The same under one captured graph: a request's bits do not depend on the batch that is replayed.
pub fn batch_invariant_replays() {
    let session = session();
    let stream = gpu::new_stream();
    for kind in [Kind::Decode, Kind::Prefill] {
        let problem = Problem {
            batch_invariant: true,
            ..plain(kind, true)
        };
        let mut slot = Slot::new(session.attention(desc(&problem)).unwrap());
        let captured = Captured::new(&mut slot, &problem, stream);
        let mut replay = |batch: &Problem| captured.replay(&mut slot, batch);
        let batch = with_lens(&problem, BATCHES[1]);
        let whole = replay(&batch);
        assert_right(&batch, &whole);
        let indptr = batch.qo_indptr();
        let row = (batch.num_qo_heads() * batch.head_dim_vo) as usize;
        for b in 0..batch.requests.len() {
            let alone = replay(&batch.alone(b));
            let rows = indptr[b] as usize * row..indptr[b + 1] as usize * row;
            assert!(alone.o == whole.o[rows], "request {b} of {batch:?}");
        }
    }
}

/// A handle may end while its kernels run, and before the graphs that captured them: what they need is the
/// caller's workspace and the context's modules.
pub fn destroyed_in_flight() {
    let session = session();
    let stream = gpu::new_stream();
    for kind in [Kind::Decode, Kind::Prefill] {
        let batch = with_lens(&plain(kind, true), BATCHES[1]);
        let mut slot = Slot::new(session.attention(desc(&batch)).unwrap());
        slot.plan(&Step::new(&HostMemory, &batch), stream).unwrap();
        let layer = LayerData::new(&DeviceMemory, &batch);
        let input = layer.input();
        gpu::synchronize_all();
        let graph = gpu::capture(stream, || slot.handle.run(&input, stream).unwrap());
        for _ in 0..200 {
            slot.handle.run(&input, stream).unwrap();
        }
        let Slot {
            handle, scratch, ..
        } = slot;
        drop(handle);
        assert_right(&batch, &layer.output());
        layer.reset_outputs();
        graph.launch(stream);
        assert_right(&batch, &layer.output());
        scratch.assert_within_bounds();
    }
}

/// Planning by the device is captured too: a replay follows the lengths in memory.
pub fn graph_plans_on_the_device() {
    let session = session();
    let stream = gpu::new_stream();
    for kind in [Kind::Decode, Kind::Prefill] {
        let mut problem = plain(kind, true);
        if kind == Kind::Prefill {
            problem.layer.lse_dtype = DType::F16;
        }
        let mut slot = Slot::new(session.attention(desc(&problem)).unwrap());
        let largest = with_lens(&problem, &[(3, 2000); 6]);
        let step = Step::new(&DeviceMemory, &largest);
        let captured = Captured::calls(&largest, stream, |input| {
            slot.plan(&step, stream).unwrap();
            slot.handle.run(input, stream).unwrap();
        });
        for lens in SIX_REQUESTS {
            let batch = with_lens(&problem, lens);
            step.take_lengths_of(&Step::new(&DeviceMemory, &batch));
            assert_right(&batch, &captured.launch(&batch));
        }
    }
}

/// Many steps are planned and run before the device has finished the first; page-locked staging memory
/// makes that a real race if there were one.
pub fn replan_in_flight() {
    let session = session();
    let stream = gpu::new_stream();
    let problem = plain(Kind::Decode, false);
    let mut handle = session.attention(desc(&problem)).unwrap();
    let info = handle.workspace().unwrap();
    let workspace = Workspace {
        device: DeviceMemory.alloc(info.device_bytes),
        host: PinnedMemory.alloc(info.host_bytes),
    };
    let bytes = (info.device_bytes, info.host_bytes);
    let batches: Vec<Problem> = (0..40)
        .map(|n| {
            let lens = BATCHES[n % BATCHES.len()];
            Problem {
                seed: n as u64,
                ..with_lens(&problem, lens)
            }
        })
        .collect();
    let layers: Vec<LayerData<'_>> = (batches.iter())
        .map(|batch| LayerData::new(&DeviceMemory, batch))
        .collect();
    let steps: Vec<Step<'_>> = (batches.iter())
        .map(|batch| Step::new(&HostMemory, batch))
        .collect();
    gpu::synchronize_all();
    for (step, layer) in steps.iter().zip(&layers) {
        handle
            .plan(&step.input(), &workspace, bytes, stream)
            .unwrap();
        handle.run(&layer.input(), stream).unwrap();
    }
    gpu::synchronize_all();
    for (batch, layer) in batches.iter().zip(&layers) {
        assert_right(batch, &layer.output());
    }
    PinnedMemory.free(workspace.host, info.host_bytes);
    DeviceMemory.free(workspace.device, info.device_bytes);
}

/// Two threads with a stream and a handle each, on one context; and two streams that share one plan.
pub fn two_streams() {
    let session = session();
    std::thread::scope(|scope| {
        for kind in [Kind::Decode, Kind::Prefill] {
            let session = &session;
            scope.spawn(move || {
                gpu::enter();
                let stream = gpu::new_stream();
                let problem = plain(kind, false);
                let mut slot = Slot::new(session.attention(desc(&problem)).unwrap());
                for _ in 0..10 {
                    for lens in BATCHES {
                        let batch = with_lens(&problem, lens);
                        let layer = LayerData::new(&DeviceMemory, &batch);
                        gpu::synchronize_all();
                        slot.plan(&Step::new(&HostMemory, &batch), stream).unwrap();
                        slot.handle.run(&layer.input(), stream).unwrap();
                        assert_right(&batch, &layer.output());
                    }
                }
            });
        }
    });
}

/// Threads that share one plan and one stream: the kernels of their runs must not mix.
pub fn threads_share_a_plan() {
    let session = session();
    let stream = gpu::new_stream();
    let batch = with_lens(&plain(Kind::Decode, false), &[(1, 2000), (3, 1500)]);
    let mut slot = Slot::new(session.attention(desc(&batch)).unwrap());
    slot.plan(&Step::new(&HostMemory, &batch), stream).unwrap();
    let batches: Vec<Problem> = (0..4)
        .map(|tag| {
            let mut layer = batch.layer.clone();
            layer.tag = tag;
            batch.with_layer(layer)
        })
        .collect();
    let layers: Vec<LayerData<'_>> = (batches.iter())
        .map(|batch| LayerData::new(&DeviceMemory, batch))
        .collect();
    gpu::synchronize_all();
    let handle = &slot.handle;
    std::thread::scope(|scope| {
        for layer in &layers {
            scope.spawn(move || {
                let input = layer.input();
                for _ in 0..300 {
                    handle.run(&input, stream).unwrap();
                }
            });
        }
    });
    for (batch, layer) in batches.iter().zip(&layers) {
        assert_right(batch, &layer.output());
    }
}

/// What may not be captured says so, and the capture goes on.
pub fn captures_are_refused() {
    let session = session();
    let stream = gpu::new_stream();
    let batch = with_lens(&plain(Kind::Decode, false), BATCHES[0]);
    let mut eager = Slot::new(session.attention(desc(&batch)).unwrap());
    let step = Step::new(&HostMemory, &batch);
    let device_step = Step::new(&DeviceMemory, &batch);
    let layer = LayerData::new(&DeviceMemory, &batch);
    eager.plan(&step, stream).unwrap();
    let graph_batch = Problem {
        graph: true,
        ..batch.clone()
    };
    let mut captured = Slot::new(session.attention(desc(&graph_batch)).unwrap());
    gpu::capture(stream, || {
        let capture = |result| assert!(matches!(result, Err(Error::Capture(_))), "{result:?}");
        capture(eager.handle.run(&layer.input(), stream));
        capture(eager.plan(&step, stream));
        capture(eager.plan(&device_step, stream));
        capture(captured.plan(&step, stream));
        captured.plan(&device_step, stream).unwrap();
    });
}
