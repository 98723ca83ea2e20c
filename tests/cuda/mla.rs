//! Multi-head latent attention on a real GPU: random problems, every head count and format, splits, graphs, batch
//! invariance, and lengths and page ids in device memory that are wrong. The first choice for 512 + 64 over pages that
//! are multiples of 16 may be another kernel than for other problems, and up to 16 rows of a request have kernels of their
//! own, so every case has all kinds.

use crate::common::door::Session;
use crate::common::instance::{Output, Planned, Scratch, Step};
use crate::common::memory::{HostMemory, Image, Memory, Resident};
use crate::common::mla::{self, Cache, MlaLayer, MlaProblem, Queries, problems};
use crate::common::mla_forms::forms_agree;
use crate::common::mla_lists::{Lists, check_lists};
use crate::common::pages::PageTable;
use crate::common::problem::{Gaps, Layer, MaskKind, TableForm};
use crate::common::random;
use crate::gpu::{self, DeviceMemory};
use crate::problems::{session, spread, with_a_page, with_lens};
use crate::steps::{BATCHES, SIX_REQUESTS, Slot};
use folio::api::{BatchInput, Stream};
use folio::dtype::DType;
use folio::problem::{AttentionArgs, AttentionDesc};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use std::ops::Range;

/// The ways to store records: as q's type, as fp8 per tensor, and as `fp8_ds_mla`.
const FORMATS: [Option<(Cache, DType)>; 4] = [
    None,
    Some((Cache::Views, DType::F8E4M3)),
    Some((Cache::Two, DType::F8E5M2)),
    Some((Cache::DsMla, DType::F8E4M3)),
];

/// The same problem with records in one of [`FORMATS`].
fn stored(problem: MlaProblem, format: Option<(Cache, DType)>) -> MlaProblem {
    let Some((cache, kv_dtype)) = format else {
        return problem;
    };
    let mut problem = problem.tensors(Queries::Two, cache);
    problem.batch.kv_dtype = kv_dtype;
    if cache != Cache::DsMla {
        problem.batch.layer.k_scale = 0.5;
    }
    problem
}

fn every_format() -> impl Iterator<Item = (DType, Option<(Cache, DType)>)> {
    let types = [DType::BF16, DType::F16].into_iter();
    types.flat_map(|dtype| FORMATS.map(|format| (dtype, format)))
}

fn solve(session: &dyn Session, index_memory: &dyn Memory, problem: &MlaProblem) -> Output {
    mla::solve(session, &DeviceMemory, index_memory, problem)
        .unwrap_or_else(|error| panic!("{error}\n{problem:?}"))
}

/// Runs one plan five times: every run has the bits of the first.
pub fn solve_five_times(session: &dyn Session, problem: &MlaProblem) -> Output {
    let handle = session.attention(problem.desc()).unwrap();
    let planned = Planned::new(handle, &DeviceMemory, &HostMemory, &problem.batch).unwrap();
    let layer = MlaLayer::new(&DeviceMemory, problem);
    let first = mla::run(&planned, &layer).unwrap();
    for n in 1..5 {
        let again = mla::run(&planned, &layer).unwrap();
        assert!(bits(&again) == bits(&first), "run {n} of {problem:?}");
    }
    first
}

/// The bits of outputs, which NaN has too.
fn bits(output: &Output) -> (&[u64], Option<Vec<u32>>) {
    let lse = output.lse.as_ref();
    let lse = lse.map(|lse| lse.iter().map(|value| value.to_bits()).collect());
    (&output.o, lse)
}

fn assert_right(problem: &MlaProblem, got: &Output) {
    if let Err(difference) = mla::check(problem, got) {
        panic!("{difference}\n{problem:?}");
    }
}

/// Random problems in the 16-bit types, shrunk where they fail.
fn random_problems(cases: u32, index_memory: &dyn Memory) {
    let session = session();
    let mut runner = TestRunner::new(Config {
        source_file: Some(file!()),
        ..random::cases(cases)
    });
    let result = runner.run(&problems(), |problem| {
        let problem = on_device(problem);
        let got = mla::solve(&*session, &DeviceMemory, index_memory, &problem);
        let checked = got.map_err(|error| error.to_string());
        checked
            .and_then(|got| mla::check(&problem, &got))
            .map_err(TestCaseError::fail)
    });
    if let Err(error) = result {
        panic!("{error}");
    }
}

/// A problem of a type that the backend has, and of a page at least.
fn on_device(mut problem: MlaProblem) -> MlaProblem {
    if problem.batch.q_dtype == DType::F32 {
        let kv_dtype = problem.batch.kv_dtype;
        problem = problem.of(DType::BF16);
        if kv_dtype.is_fp8() {
            problem.batch.kv_dtype = kv_dtype;
        }
    }
    problem.batch = with_a_page(&problem.batch);
    problem
}

pub fn host_lengths() {
    random_problems(300, &HostMemory);
}

pub fn device_lengths() {
    random_problems(200, &DeviceMemory);
}

/// Head counts around those of tiles, ragged rows, and pages of every kind, in every format.
pub fn heads_and_rows() {
    let session = session();
    let lens = [(1, 90), (2, 33), (4, 4), (17, 70), (0, 9), (1, 0), (4, 1)];
    for (dtype, format) in every_format() {
        for (heads, page_size) in [1, 3, 9, 16, 63, 64, 126, 128]
            .into_iter()
            .zip([16, 3, 64, 16, 1, 64, 32, 16])
        {
            let problem = MlaProblem::plain(&lens).of(dtype).heads(heads);
            let problem = problem.pages(page_size, TableForm::CsrKvLen { spare_pages: 1 });
            let mut problem = stored(problem, format);
            for mask in [MaskKind::Causal, MaskKind::Full] {
                problem.batch.layer.mask = mask;
                assert_right(&problem, &solve(&*session, &HostMemory, &problem));
            }
        }
    }
}

/// Queries in fp8 for every kernel, in rows that begin anywhere, with lengths on the host and on the device; and under a graph.
pub fn fp8_queries() {
    let session = session();
    let lens = [(1, 90), (2, 33), (0, 9), (1, 0), (4, 700), (1, 3000)];
    let types = [DType::F8E4M3, DType::F8E5M2];
    let mut n = 0;
    for (heads, page_size, (rank, rope)) in [
        (1, 16, (512, 64)),
        (16, 64, (512, 64)),
        (16, 1, (512, 64)),
        (64, 16, (512, 64)),
        (128, 64, (512, 64)),
        (126, 3, (512, 64)),
        (9, 16, (512, 0)),
        (40, 5, (256, 32)),
    ] {
        for (cache, o_dtype) in [(Cache::Views, DType::BF16), (Cache::Two, DType::F16)] {
            let problem = MlaProblem::plain(&lens).heads(heads).dims(rank, rope);
            let problem = problem.pages(page_size, TableForm::CsrKvLen { spare_pages: 1 });
            let queries = [Queries::One, Queries::Two][n % 2];
            let mut problem = problem.tensors(queries, cache);
            let batch = &mut problem.batch;
            (batch.q_dtype, batch.kv_dtype) = (types[n / 2 % 2], types[n / 3 % 2]);
            (batch.o_dtype, batch.layer.q_scale, batch.layer.k_scale) = (o_dtype, 2.0, 0.5);
            batch.graph = n % 4 == 3;
            if n % 3 == 1 {
                let gaps = [3, 5].map(|middle| Gaps {
                    middle,
                    ..Gaps::default()
                });
                (batch.memory.q, batch.memory.v) = (gaps[0], gaps[1]);
            }
            let index_memory: &dyn Memory = [&HostMemory as &dyn Memory, &DeviceMemory][n / 2 % 2];
            assert_right(&problem, &solve(&*session, index_memory, &problem));
            n += 1;
        }
    }
}

/// One row for each request, as most batches have, at every length around a tile of keys.
pub fn lengths_around_a_tile() {
    let session = session();
    let lens: Vec<(u32, u32)> = (0..70).map(|kv_len| (1, kv_len)).collect();
    for (dtype, format) in every_format() {
        for heads in [8, 16, 128] {
            let problem = stored(MlaProblem::plain(&lens).of(dtype).heads(heads), format);
            assert_right(&problem, &solve(&*session, &HostMemory, &problem));
        }
    }
}

/// Long enough to be split, for few and for many heads, with lengths on the host and on the device.
pub fn long_splits() {
    let session = session();
    let lens = [(1, 3000), (2, 1200), (1, 17), (1, 0)];
    for (dtype, format) in every_format() {
        for (heads, page_size) in [(16, 64), (70, 16), (5, 3)] {
            let problem = MlaProblem::plain(&lens).of(dtype).heads(heads);
            let form = TableForm::BlockTable { spare_columns: 2 };
            let problem = stored(problem.pages(page_size, form), format);
            // Both ways to a plan for one type: the oracle takes its time.
            assert_right(&problem, &solve_five_times(&*session, &problem));
            if dtype == DType::BF16 && heads == 5 {
                assert_right(&problem, &solve(&*session, &DeviceMemory, &problem));
            }
        }
    }
}

/// More requests than run at a time.
pub fn many_requests() {
    let session = session();
    let lens: Vec<(u32, u32)> = (0..700).map(|b| (b % 3, b * 7 % 41)).collect();
    for heads in [16, 64] {
        let problem = MlaProblem::plain(&lens).heads(heads);
        assert_right(&problem, &solve(&*session, &HostMemory, &problem));
        assert_right(&problem, &solve(&*session, &DeviceMemory, &problem));
    }
}

/// More requests than run at a time, which are cut into equal shares.
pub fn equal_shares() {
    let session = session();
    // Requests without rows, without keys, and of fewer than a piece of a share has.
    let ragged = (0..150).map(|b| match b % 25 {
        3 => (0, 500),
        9 => (1, 0),
        14 | 15 => (1, 1 + b),
        _ => (1, 900 + b * 37 % 400),
    });
    for (lens, heads) in [
        ([(1, 1100); 150].to_vec(), 4),
        ([(2, 1100); 75].to_vec(), 40),
        (ragged.collect(), 17),
    ] {
        let problem = MlaProblem::plain(&lens).heads(heads);
        assert_right(&problem, &solve(&*session, &HostMemory, &problem));
        assert_right(&problem, &solve(&*session, &DeviceMemory, &problem));
    }
}

/// Heads, page sizes and most rows of a request, in formats by which kernels are chosen: many rows, then up to 16.
const KERNELS: [(u32, u32, u32, usize); 11] = [
    (16, 16, 3, 0),
    (128, 64, 3, 3),
    (9, 5, 3, 1),
    (9, 5, 3, 3),
    (40, 16, 3, 2),
    // Boxes of records, and rows.
    (16, 64, 1, 0),
    (16, 1, 1, 0),
    // Records one by one.
    (16, 64, 1, 1),
    (16, 3, 1, 2),
    (16, 64, 1, 3),
    (5, 64, 3, 0),
];

/// A problem for each of [`KERNELS`] with as many of these rows as it takes.
fn of_every_kernel(lens: &[(u32, u32)], form: TableForm) -> Vec<MlaProblem> {
    let problem = |(heads, page_size, most_rows, format): (u32, u32, u32, usize)| {
        let lens: Vec<_> = (lens.iter())
            .map(|&(rows, keys)| (rows.min(most_rows), keys))
            .collect();
        let problem = MlaProblem::plain(&lens).heads(heads);
        stored(problem.pages(page_size, form), FORMATS[format])
    };
    KERNELS.into_iter().map(problem).collect()
}

/// Where the values of request `b` are among those of the batch.
fn values_of(problem: &MlaProblem, b: usize) -> Range<usize> {
    let indptr = problem.batch.qo_indptr();
    let row = (problem.batch.num_qo_heads() * problem.batch.head_dim_vo) as usize;
    indptr[b] as usize * row..indptr[b + 1] as usize * row
}

/// A request's bits do not depend on the batch, with lengths on the host or the device.
pub fn batch_invariant() {
    let session = session();
    let lens = [(1, 5000), (3, 900), (2, 2049), (1, 3)];
    let problems = of_every_kernel(&lens, TableForm::CsrKvLen { spare_pages: 0 });
    for (n, mut problem) in problems.into_iter().enumerate() {
        (problem.batch.batch_invariant, problem.batch.graph) = (true, n % 2 == 1);
        let whole = solve(&*session, &HostMemory, &problem);
        assert_right(&problem, &whole);
        let on_device = solve(&*session, &DeviceMemory, &problem);
        assert!(whole == on_device, "lengths on the device of {problem:?}");
        for b in 0..lens.len() {
            // The handle is the same: another desc may be given other code.
            let one = problem.alone(b);
            let handle = session.attention(problem.desc()).unwrap();
            let planned = Planned::new(handle, &DeviceMemory, &HostMemory, &one.batch).unwrap();
            let alone = mla::run(&planned, &MlaLayer::new(&DeviceMemory, &one)).unwrap();
            let rows = values_of(&problem, b);
            assert!(alone.o == whole.o[rows], "request {b} of {problem:?}");
        }
    }
}

/// Handles for graphs, with the largest batch: 6 requests, 3 rows or 1, 2000 keys.
fn graph_problems() -> Vec<MlaProblem> {
    let form = TableForm::BlockTable { spare_columns: 2 };
    let mut problems = of_every_kernel(&[(3, 2000); 6], form);
    for problem in &mut problems {
        problem.batch.graph = true;
    }
    problems
}

/// The desc that fits a largest batch and, of pages, whatever it may have.
fn graph_desc(largest: &MlaProblem) -> AttentionDesc {
    AttentionDesc {
        max_num_pages: 0,
        ..largest.desc()
    }
}

/// A batch of other lengths for the same handle, and of as many rows as that takes.
fn batch_within(largest: &MlaProblem, lens: &[(u32, u32)]) -> MlaProblem {
    let most_rows = largest.desc().max_qo_len;
    let lens: Vec<_> = (lens.iter())
        .map(|&(rows, keys)| (rows.min(most_rows), keys))
        .collect();
    batch_of(largest, &lens)
}

/// A batch of other lengths.
fn batch_of(problem: &MlaProblem, lens: &[(u32, u32)]) -> MlaProblem {
    MlaProblem {
        batch: with_lens(&problem.batch, lens),
        ..problem.clone()
    }
}

/// Replays a graph over a batch's tensors, which are moved to those of the captured run.
fn replay(
    graph: &gpu::Graph,
    captured: &MlaLayer<'_>,
    batch: &MlaProblem,
    stream: Stream,
) -> Output {
    let layer = MlaLayer::new(&DeviceMemory, batch);
    gpu::synchronize_all();
    captured.take_inputs_of(&layer);
    captured.reset_outputs();
    graph.launch(stream);
    gpu::synchronize_all();
    layer.take_outputs_of(captured);
    layer.output()
}

/// A run of a largest batch that was planned and captured.
struct Captured {
    slot: Slot<'static>,
    layer: MlaLayer<'static>,
    graph: gpu::Graph,
    stream: Stream,
}

impl Captured {
    fn new(session: &dyn Session, largest: &MlaProblem, stream: Stream) -> Captured {
        let mut slot = Slot::new(session.attention(graph_desc(largest)).unwrap());
        let layer = MlaLayer::new(&DeviceMemory, largest);
        let step = Step::new(&HostMemory, &largest.batch);
        slot.plan(&step, stream).unwrap();
        let input = layer.input();
        let graph = gpu::capture(stream, || slot.handle.run(&input, stream).unwrap());
        Captured {
            slot,
            layer,
            graph,
            stream,
        }
    }

    /// Plans a batch and launches the graph with it.
    fn replay(&mut self, batch: &MlaProblem) -> Output {
        let step = Step::new(&HostMemory, &batch.batch);
        self.slot.plan(&step, self.stream).unwrap();
        replay(&self.graph, &self.layer, batch, self.stream)
    }
}

/// A graph captured once serves every later plan.
pub fn graph_replays() {
    let session = session();
    let stream = gpu::new_stream();
    for largest in graph_problems() {
        let mut captured = Captured::new(&*session, &largest, stream);
        for lens in BATCHES {
            let batch = batch_within(&largest, lens);
            assert_right(&batch, &captured.replay(&batch));
        }
        captured.slot.scratch.assert_within_bounds();
    }
}

/// Under one captured graph too a request's bits do not depend on the batch that is replayed.
pub fn batch_invariant_replays() {
    let session = session();
    let stream = gpu::new_stream();
    for mut largest in graph_problems() {
        largest.batch.batch_invariant = true;
        let mut captured = Captured::new(&*session, &largest, stream);
        let batch = batch_within(&largest, BATCHES[1]);
        let whole = captured.replay(&batch);
        assert_right(&batch, &whole);
        for b in 0..batch.batch.requests.len() {
            let alone = captured.replay(&batch.alone(b));
            let rows = values_of(&batch, b);
            assert!(alone.o == whole.o[rows], "request {b} of {batch:?}");
        }
        captured.slot.scratch.assert_within_bounds();
    }
}

/// Planning by the device is captured too: a replay follows the lengths in memory.
pub fn graph_plans_on_the_device() {
    for largest in graph_problems() {
        let batches = SIX_REQUESTS.map(|lens| batch_within(&largest, lens));
        replays_plan(&largest, &batches);
    }
}

/// Captures the plan of a largest batch by the device, and its run; replays both with batches of as many requests.
fn replays_plan(largest: &MlaProblem, batches: &[MlaProblem]) {
    let session = session();
    let stream = gpu::new_stream();
    let mut slot = Slot::new(session.attention(graph_desc(largest)).unwrap());
    let captured = MlaLayer::new(&DeviceMemory, largest);
    let step = Step::new(&DeviceMemory, &largest.batch);
    slot.plan(&step, stream).unwrap();
    let input = captured.input();
    slot.handle.run(&input, stream).unwrap();
    let graph = gpu::capture(stream, || {
        slot.plan(&step, stream).unwrap();
        slot.handle.run(&input, stream).unwrap();
    });
    for batch in batches {
        gpu::synchronize_all();
        step.take_lengths_of(&Step::new(&DeviceMemory, &batch.batch));
        assert_right(batch, &replay(&graph, &captured, batch, stream));
    }
    slot.scratch.assert_within_bounds();
}

/// Drafts in graphs: how many row tiles take an item together changes from replay to replay. With few requests keys are split,
/// with many they are not; requests of 0 to 4 rows, all alike and not.
pub fn graph_drafts() {
    let session = session();
    let stream = gpu::new_stream();
    let form = TableForm::BlockTable { spare_columns: 0 };
    for (heads, requests, keys, format) in [
        (64, 12, 600, 0),
        (24, 160, 40, 0),
        (128, 4, 900, 0),
        (80, 6, 500, 1),
        (48, 20, 250, 3),
    ] {
        let lens = |rows: &[u32]| -> Vec<_> {
            let request = |n: u32| (rows[n as usize % rows.len()], keys - n * 7 % (keys / 2));
            (0..requests).map(request).collect()
        };
        let mut largest = MlaProblem::plain(&vec![(4, keys); requests as usize]).heads(heads);
        largest.batch.graph = true;
        let largest = stored(largest.pages(64, form), FORMATS[format]);
        let rows: [&[u32]; 4] = [&[4], &[1], &[1, 1, 1, 4], &[3, 0, 1]];
        let batches = rows.map(|rows| batch_of(&largest, &lens(rows)));
        let mut captured = Captured::new(&*session, &largest, stream);
        for batch in &batches {
            assert_right(batch, &captured.replay(batch));
        }
        captured.slot.scratch.assert_within_bounds();
        replays_plan(&largest, &batches);
    }
}

/// Decodes of so many keys that they are planned apart from the prompts beside them: 2^18 and a few.
pub fn decodes_beside_prompts() {
    let session = session();
    let lens = [
        (1, 140_000),
        (30, 90),
        (2, 300),
        (0, 50),
        (1, 0),
        (3, 123_000),
        (17, 4),
    ];
    for (heads, format) in [(5, 1), (3, 3)] {
        let form = TableForm::CsrKvLen { spare_pages: 1 };
        let problem = MlaProblem::plain(&lens).heads(heads).pages(64, form);
        let problem = stored(problem, FORMATS[format]);
        assert_right(&problem, &solve(&*session, &HostMemory, &problem));
    }
}

/// From `kv_b_proj` to the input of `o_proj`: the absorbed form is that of the heads.
pub fn both_forms() {
    let session = session();
    for heads in [16, 128] {
        forms_agree(&*session, &DeviceMemory, heads, &[DType::BF16, DType::F16]);
    }
}

/// Sparse attention, by the kernels for few rows and for many, over every format. One plan serves layers with other lists.
pub fn lists_of_tokens() {
    let session = session();
    for (dtype, format) in every_format() {
        for heads in [16, 64, 128] {
            let of_format = |problem: MlaProblem| stored(problem.of(dtype).heads(heads), format);
            let sizes = (9, 700, 45);
            check_lists(&*session, &DeviceMemory, Lists::Read, sizes, &of_format);
        }
    }
    let many_heads = |problem: MlaProblem| problem.heads(128);
    for (sizes, lists) in [
        ((12, 3000, 2048), Lists::Read),
        // More than run at a time.
        ((150, 3000, 256), Lists::Read),
        ((150, 3000, 256), Lists::Planned),
    ] {
        check_lists(&*session, &DeviceMemory, lists, sizes, &many_heads);
    }
}

/// Pages whose records begin more than 2^32 elements apart, by the kernels for few rows and for many.
pub fn far_pages() {
    // Whole groups of 8 records are what tensor maps count by.
    const GROUP: usize = 8 * 576;
    const BYTES: usize = 17 << 30;
    let session = session();
    if gpu::free_bytes() < BYTES + (1 << 30) {
        crate::harness::skip("less than 18 GiB of device memory are free");
    }
    let far = DeviceMemory.alloc(BYTES);
    for heads in [16, 128] {
        for (cache, kv_dtype, page_size) in [
            (Cache::Records, DType::BF16, 16),
            (Cache::Records, DType::BF16, 1),
            (Cache::Records, DType::F8E4M3, 16),
            (Cache::DsMla, DType::F8E4M3, 16),
        ] {
            let form = TableForm::BlockTable { spare_columns: 0 };
            let problem = MlaProblem::plain(&[(1, 75)]).heads(heads);
            let mut problem = problem.pages(page_size, form).tensors(Queries::Two, cache);
            problem.batch.kv_dtype = kv_dtype;
            let handle = session.attention(problem.desc()).unwrap();
            let planned = Planned::new(handle, &DeviceMemory, &HostMemory, &problem.batch).unwrap();
            let layer = MlaLayer::new(&DeviceMemory, &problem);
            let near = layer.input();
            let elements = BYTES / near.k.dtype().size() / near.k.extent(0) as usize;
            let stride = elements / GROUP * GROUP;
            assert!((near.k.extent(0) as usize - 1) * stride > u32::MAX as usize);
            gpu::fill(far, 0xff, BYTES);
            let kv = spread(&near.k, far, stride);
            planned
                .run_args(&AttentionArgs {
                    k: kv,
                    v: kv,
                    ..near
                })
                .unwrap();
            assert_right(&problem, &layer.output());
        }
    }
    DeviceMemory.free(far, BYTES);
}

/// Page ids that no cache has.
const NO_PAGES: [i32; 6] = [i32::MAX, -1, i32::MIN, 1 << 24, -1000, 1 << 30];

/// A request more in device memory than q, o and lse have rows, with pages that the cache does not have: nothing
/// beside the rows is written, and what is there is right.
pub fn batches_beyond_the_tensors() {
    const KEYS: u32 = 3000;
    let session = session();
    for (dtype, format) in every_format() {
        for (heads, page_size) in [(16, 16), (128, 64), (9, 5)] {
            let lens = [(2, 100), (1, 50)];
            let problem = MlaProblem::plain(&lens).of(dtype).heads(heads);
            let form = TableForm::CsrKvLen { spare_pages: 0 };
            let mut problem = stored(problem.pages(page_size, form), format);
            problem.batch.layer = Layer {
                lse: Some(folio::problem::LogBase::Two),
                ..problem.batch.layer
            };
            let all = batch_of(&problem, &[(2, 100), (1, 50), (2, KEYS)]);
            let (mut ids, mut indptr) = (Vec::new(), vec![0]);
            for pages in PageTable::of(&problem.batch).ids {
                ids.extend(pages);
                indptr.push(ids.len() as i32);
            }
            let pages = KEYS.div_ceil(page_size) as usize;
            ids.extend(NO_PAGES.iter().cycle().take(pages));
            indptr.push(ids.len() as i32);
            let numbers = |values: &[i32]| {
                Resident::new(&DeviceMemory, Image::of_i32(&[values.len() as i64], values))
            };
            let qo_indptr = numbers(&all.batch.qo_indptr());
            let kv_len = numbers(&[100, 50, KEYS as i32]);
            let (kv_indptr, kv_indices) = (numbers(&indptr), numbers(&ids));
            let batch = BatchInput {
                qo_indptr: Some(qo_indptr.tensor()),
                kv_indptr: Some(kv_indptr.tensor()),
                kv_indices: Some(kv_indices.tensor()),
                kv_len: Some(kv_len.tensor()),
                ..BatchInput::default()
            };
            let mut handle = session.attention(all.desc()).unwrap();
            let scratch = Scratch::new(&DeviceMemory, &handle.workspace().unwrap());
            scratch.plan(&mut *handle, &batch).unwrap();
            let layer = MlaLayer::new(&DeviceMemory, &problem);
            handle.run(&layer.input(), Stream::default()).unwrap();
            let output = layer.output();
            scratch.assert_within_bounds();
            assert_right(&problem, &output);
        }
    }
}
