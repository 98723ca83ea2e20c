//! Whole problems against dense attention: random ones in every form, and some that random ones rarely
//! are.

use crate::common::c_door::CDoor;
use crate::common::compare::{Tolerance, compare, compare_token};
use crate::common::dense;
use crate::common::door::{Door, Session};
use crate::common::grids::{GRIDS, Place};
use crate::common::instance::{LayerData, Output, Planned, Scratch, Step, solve, window_of_plan};
use crate::common::memory::{HostMemory, Memory};
use crate::common::problem::{
    HeadScales, Layer, MaskKind, Problem, Request, Storage, TableForm, ValueRows,
};
use crate::common::random;
use crate::common::strategy::problems;
use crate::gpu::{self, DeviceMemory};
use folio::api::{Stream, Target};
use folio::dtype::DType;
use folio::problem::{CacheForm, Kind, KvLayout};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

pub fn session() -> Box<dyn Session> {
    gpu::enter();
    let target = Target::Cuda { ordinal: 0 };
    CDoor.open(target).expect("a CUDA context")
}

/// What kernels may be off by, over a cache of any form: `of_codes` is `of_matrix_unit` where elements are plain.
fn tolerance(problem: &Problem) -> Tolerance {
    Tolerance::of_codes(problem)
        .of_parts(problem)
        .of_rounded_rows(problem)
}

pub fn assert_right(problem: &Problem, got: &Output) {
    assert_all_right(problem, std::slice::from_ref(got));
}

/// The problem has a solution, in memory of the device, and it is right.
pub fn assert_solved(session: &dyn Session, problem: &Problem) {
    let got = solve(session, &DeviceMemory, problem);
    let got = got.unwrap_or_else(|error| panic!("{error}\n{problem:?}"));
    assert_right(problem, &got);
}

/// Every output is what the problem's is.
fn assert_all_right(problem: &Problem, outputs: &[Output]) {
    let over_codes = dense::attention(problem);
    for got in outputs {
        if let Err(difference) = compare_with_either_of(problem, &over_codes, got) {
            panic!("{difference}\n{problem:?}");
        }
    }
}

/// Over other forms than plain rows a query takes codes as they are, or, where its request's queries are many, the numbers
/// that they are read as, rounded to rows of q's type. Each has bounds over its own numbers; how far rounded rows are from the
/// codes is in none.
pub fn compare_with_either(problem: &Problem, got: &Output) -> Result<(), String> {
    compare_with_either_of(problem, &dense::attention(problem), got)
}

fn compare_with_either_of(
    problem: &Problem,
    over_codes: &[Vec<dense::Row>],
    got: &Output,
) -> Result<(), String> {
    let of_codes = compare(problem, over_codes, got, tolerance(problem));
    if of_codes.is_ok() || problem.form == CacheForm::Plain {
        return of_codes;
    }
    let rounded = with_rounded_rows(problem);
    let over_rows = dense::attention(&rounded);
    for token in 0..over_codes.len() {
        let of_codes = compare_token(problem, over_codes, got, token, tolerance(problem));
        let of_rows = || {
            let tolerance = tolerance_of_rounded_rows(&rounded);
            compare_token(&rounded, &over_rows, got, token, tolerance)
        };
        of_codes.or_else(|of_codes| {
            of_rows()
                .map_err(|of_rows| format!("over codes: {of_codes}; over rounded rows: {of_rows}"))
        })?;
    }
    Ok(())
}

/// A run over rows of q's type that hold what the cache is read as.
pub fn compare_with_rounded_rows(problem: &Problem, got: &Output) -> Result<(), String> {
    let rounded = with_rounded_rows(problem);
    let tolerance = tolerance_of_rounded_rows(&rounded);
    compare(&rounded, &dense::attention(&rounded), got, tolerance)
}

fn with_rounded_rows(problem: &Problem) -> Problem {
    Problem {
        rounds_rows: true,
        ..problem.clone()
    }
}

fn tolerance_of_rounded_rows(rounded: &Problem) -> Tolerance {
    Tolerance::of_matrix_unit(rounded).of_parts(rounded)
}

/// Random problems, shrunk where `check` fails.
fn for_random_problems(cases: u32, check: impl Fn(&Problem) -> Result<(), String>) {
    let mut runner = TestRunner::new(Config {
        source_file: Some(file!()),
        ..random::cases(cases)
    });
    let result = runner.run(&problems(), |problem| {
        check(&problem).map_err(TestCaseError::fail)
    });
    if let Err(error) = result {
        panic!("{error}");
    }
}

pub fn check(problem: &Problem, got: folio::error::Result<Output>) -> Result<(), String> {
    compare_with_either(problem, &got.map_err(|error| error.to_string())?)
}

pub fn solve_with(
    session: &dyn Session,
    index_memory: &dyn Memory,
    problem: &Problem,
) -> folio::error::Result<Output> {
    let handle = session.attention(problem.desc())?;
    let window = window_of_plan(problem);
    Planned::within(window, handle, &DeviceMemory, index_memory, problem)?
        .run(&LayerData::new(&DeviceMemory, problem))
}

/// What a handle gives for another batch.
pub fn run_again<'m>(
    planned: &mut Planned<'m>,
    index_memory: &'m dyn Memory,
    problem: &Problem,
) -> Output {
    planned.replan(index_memory, problem).unwrap();
    let layer = LayerData::new(&DeviceMemory, problem);
    planned.run(&layer).unwrap()
}

/// The grids of the peers' own tests.
pub fn peers_grids() {
    let session = session();
    for (name, grid) in GRIDS {
        println!("  grid {name}");
        grid(&Place::new(&*session, &DeviceMemory));
    }
}

pub fn host_lengths() {
    let session = session();
    for_random_problems(600, |problem| {
        check(problem, solve_with(&*session, &HostMemory, problem))
    });
}

pub fn device_lengths() {
    let session = session();
    for_random_problems(300, |problem| {
        let problem = &with_a_page(problem);
        check(problem, solve_with(&*session, &DeviceMemory, problem))
    });
}

/// Where lengths are on the device a cache has a first page, even if no key is in it.
pub fn with_a_page(problem: &Problem) -> Problem {
    let mut problem = problem.clone();
    if let Storage::Paged { unused_pages, .. } = &mut problem.storage {
        *unused_pages = (*unused_pages).max(1);
    }
    problem
}

/// Lengths on the host, page ids on the device.
pub fn device_page_ids() {
    let session = session();
    for_random_problems(100, |problem| {
        check(problem, solve_with_ids_on_the_device(&*session, problem))
    });
}

/// Lengths on the host and page ids on the device.
fn solve_with_ids_on_the_device(
    session: &dyn Session,
    problem: &Problem,
) -> folio::error::Result<Output> {
    let mut handle = session.attention(problem.desc())?;
    let info = handle.workspace()?;
    let scratch = Scratch::new(&DeviceMemory, &info);
    let (host, device) = (
        Step::new(&HostMemory, problem),
        Step::new(&DeviceMemory, problem),
    );
    let mut input = host.input();
    input.kv_indices = device.input().kv_indices;
    input.block_table = device.input().block_table;
    let bytes = (info.device_bytes, info.host_bytes);
    handle.plan(&input, &scratch.workspace(), bytes, Stream::default())?;
    let layer = LayerData::new(&DeviceMemory, problem);
    handle.run(&layer.input(), Stream::default())?;
    let output = layer.output();
    scratch.assert_within_bounds();
    Ok(output)
}

/// Index tensors of int64, wherever lengths and page ids are.
pub fn wide_indices() {
    let session = session();
    for kind in [Kind::Decode, Kind::Prefill] {
        for form in [
            TableForm::CsrLastPageLen,
            TableForm::CsrKvLen { spare_pages: 2 },
            TableForm::BlockTable { spare_columns: 3 },
        ] {
            let problem = Problem {
                kind,
                wide_indices: true,
                storage: Storage::Paged {
                    page_size: 16,
                    layout: KvLayout::Nhd,
                    form,
                    unused_pages: 3,
                    shared_pages: 0,
                },
                ..Problem::plain(&[(1, 900), (5, 17), (0, 4), (2, 130)]).heads(8, 2, 128)
            };
            assert_right(
                &problem,
                &solve(&*session, &DeviceMemory, &problem).unwrap(),
            );
            let ids = solve_with_ids_on_the_device(&*session, &problem).unwrap();
            assert_right(&problem, &ids);
            let handle = session.attention(problem.desc()).unwrap();
            let planned = Planned::new(handle, &DeviceMemory, &DeviceMemory, &problem).unwrap();
            let layer = LayerData::new(&DeviceMemory, &problem);
            assert_right(&problem, &planned.run(&layer).unwrap());
        }
    }
}

/// Decode and prefill long enough to be split, with sinks, windows and fp8.
pub fn long_splits() {
    let session = session();
    let lens = [(1, 3000), (1, 17), (3, 1200), (1, 0)];
    for dtype in [DType::BF16, DType::F16, DType::F32] {
        for kv_dtype in [dtype, DType::F8E4M3] {
            for (kind, window) in [
                (Kind::Decode, None),
                (Kind::Prefill, None),
                (Kind::Decode, Some((700, 0))),
                (Kind::Prefill, Some((700, -1))),
            ] {
                let problem = Problem {
                    kind,
                    kv_dtype,
                    layer: Layer {
                        sinks: true,
                        window,
                        ..Layer::plain()
                    },
                    ..Problem::plain(&lens).of(dtype).heads(8, 2, 128)
                };
                // One wrong row of V among thousands shows where values are ones, whatever the type.
                for values in [ValueRows::Normal, ValueRows::OneHot] {
                    let problem = Problem {
                        values,
                        ..problem.clone()
                    };
                    let got = solve(&*session, &DeviceMemory, &problem).unwrap();
                    assert_right(&problem, &got);
                }
            }
        }
    }
}

/// More requests than planning on the device keeps in shared memory, some of them long.
pub fn many_requests() {
    let session = session();
    let request = |b: u32| match b % 400 {
        7 => (2, 900),
        _ => (b % 3, b * 7 % 41),
    };
    for num_requests in [1023, 1024, 1025, 2100] {
        for (kind, batch_invariant) in [
            (Kind::Decode, false),
            (Kind::Prefill, false),
            (Kind::Decode, true),
        ] {
            let lens: Vec<(u32, u32)> = (0..num_requests).map(request).collect();
            let problem = Problem {
                kind,
                batch_invariant,
                ..Problem::plain(&lens).of(DType::BF16).heads(2, 1, 64)
            };
            let got = solve_with(&*session, &DeviceMemory, &problem).unwrap();
            assert_right(&problem, &got);
        }
    }
}

/// With lengths on the host and on the device, planned for its window.
fn assert_right_by_both_plans(session: &dyn Session, problem: &Problem) {
    let layer = LayerData::new(&DeviceMemory, problem);
    let outputs = [&HostMemory as &dyn Memory, &DeviceMemory].map(|lengths| {
        let handle = session.attention(problem.desc()).unwrap();
        let left = problem.window_to_plan_for();
        let planned = Planned::within(left, handle, &DeviceMemory, lengths, problem).unwrap();
        planned.run(&layer).unwrap()
    });
    assert_all_right(problem, &outputs);
}

/// More requests than run at a time, which are cut into equal shares: of one length or of many, and within windows.
pub fn equal_shares() {
    let session = session();
    let equal = |requests, rows, keys| vec![(rows, keys); requests];
    let ragged = (0..80).map(|b| (1 + b % 2, 400 + b * b * 37 % 1200));
    for (lens, heads, kv_heads, window) in [
        (equal(80, 1, 1100), 8, 8, None),
        (ragged.collect(), 8, 8, Some((700, 0))),
    ] {
        let problem = Problem {
            kind: Kind::Decode,
            layer: Layer {
                window,
                ..Layer::plain()
            },
            ..Problem::plain(&lens)
                .of(DType::BF16)
                .heads(heads, kv_heads, 64)
        };
        assert_right_by_both_plans(&*session, &problem);
    }
}

/// Prefill of a few tiles more than run at a time: the last ones are cut, which are requests of one tile, or tiles of a request of
/// several, or of requests whose lengths are far apart.
pub fn prefill_tail() {
    let session = session();
    let one_tile = [vec![(60, 2600)], vec![(1, 2600); 17]].concat();
    let three_tiles = [vec![(1, 2600); 130], vec![(500, 2700)]].concat();
    let far_apart = [vec![(5, 300); 130], vec![(0, 40), (500, 4000)]].concat();
    for (lens, heads, mask, window, dim) in [
        (&one_tile, 8, MaskKind::Causal, None, 128),
        (&one_tile, 8, MaskKind::Full, None, 64),
        (&one_tile, 8, MaskKind::Causal, Some((2000, 0)), 128),
        (&three_tiles, 1, MaskKind::Causal, None, 128),
        (&three_tiles, 1, MaskKind::Causal, Some((2000, 0)), 64),
        (&far_apart, 1, MaskKind::Causal, None, 128),
    ] {
        let problem = Problem {
            kind: Kind::Prefill,
            layer: Layer {
                mask,
                window,
                ..Layer::plain()
            },
            ..Problem::plain(lens)
                .of(DType::BF16)
                .heads(heads, heads, dim)
        };
        assert_right_by_both_plans(&*session, &problem);
    }
}

/// Many split rows of fewer heads than a block of the combine kernel has warps.
pub fn splits_of_few_heads() {
    let session = session();
    for (heads, dim, sinks) in [
        (1, 64, false),
        (2, 128, true),
        (3, 96, false),
        (7, 64, true),
    ] {
        let problem = Problem {
            kind: Kind::Prefill,
            layer: Layer {
                sinks,
                ..Layer::plain()
            },
            ..Problem::plain(&[(1300, 2900), (0, 7), (1, 40)])
                .of(DType::BF16)
                .heads(heads, 1, dim)
        };
        assert_right_by_both_plans(&*session, &problem);
    }
}

/// Drafts with more rows than the decode kernels have: requests of several tiles, the last ones cut, and of one tile, in equal
/// shares. Some are shorter, and one is idle.
pub fn decode_tiles() {
    let session = session();
    for (rows, requests, heads) in [(40, 17, (16, 2)), (12, 10, (64, 8)), (16, 5, (28, 4))] {
        let mut lens = vec![(rows, 4000); requests];
        (lens[1], lens[2], lens[3]) = ((1, 700), (0, 30), (rows / 2, 90));
        let (num_qo_heads, num_kv_heads) = heads;
        let problem = Problem {
            kind: Kind::Decode,
            ..Problem::plain(&lens)
                .of(DType::BF16)
                .heads(num_qo_heads, num_kv_heads, 128)
        };
        assert_right_by_both_plans(&*session, &problem);
    }
}

/// Prompts that do not fill the device: tiles of one and of two warpgroups, beside a request without rows.
pub fn narrow_tiles() {
    let session = session();
    for (lens, heads, dim) in [
        (vec![(200, 200)], (32, 8), 128),
        (vec![(130, 400), (0, 20), (5, 70)], (16, 8), 128),
        (vec![(400, 410)], (32, 8), 64),
        (vec![(190, 190), (64, 100)], (7, 7), 256),
    ] {
        let (num_qo_heads, num_kv_heads) = heads;
        let problem = Problem {
            kind: Kind::Prefill,
            ..Problem::plain(&lens)
                .of(DType::BF16)
                .heads(num_qo_heads, num_kv_heads, dim)
        };
        assert_right_by_both_plans(&*session, &problem);
    }
}

/// Lengths on the device that need more partial rows than there is room for: wrong results, but nothing is
/// written behind the workspace, and the next plan is right.
pub fn more_parts_than_there_is_room_for() {
    let session = session();
    let problem = |kv_len: u32| Problem {
        kind: Kind::Decode,
        batch_invariant: true,
        storage: Storage::Paged {
            page_size: 16,
            layout: KvLayout::Nhd,
            form: TableForm::BlockTable { spare_columns: 0 },
            unused_pages: 0,
            shared_pages: 0,
        },
        ..Problem::plain(&[(1, 20_000), (1, kv_len), (1, kv_len), (1, kv_len)])
            .of(DType::BF16)
            .heads(8, 2, 64)
    };
    let (right, longer) = (problem(10), problem(20_000));
    let handle = session.attention(right.desc()).unwrap();
    let mut planned = Planned::new(handle, &DeviceMemory, &DeviceMemory, &longer).unwrap();
    // `run` looks behind the workspace.
    planned
        .run(&LayerData::new(&DeviceMemory, &longer))
        .unwrap();
    planned.replan(&DeviceMemory, &right).unwrap();
    let got = planned.run(&LayerData::new(&DeviceMemory, &right)).unwrap();
    assert_right(&right, &got);
}

/// Groups around and beyond a tile, and every size of head.
pub fn any_group() {
    let session = session();
    for (heads, kv_heads, dim) in [
        (71, 1, 64),
        (58, 2, 128),
        (128, 1, 128),
        (17, 1, 8),
        (48, 3, 256),
        (10, 2, 192),
        (6, 2, 248),
    ] {
        for dtype in [DType::BF16, DType::F32] {
            for kind in [Kind::Decode, Kind::Prefill] {
                let problem = Problem {
                    kind,
                    ..Problem::plain(&[(1, 90), (5, 33), (70, 70), (2, 3000)])
                        .of(dtype)
                        .heads(heads, kv_heads, dim)
                };
                let got = solve(&*session, &DeviceMemory, &problem).unwrap();
                assert_right(&problem, &got);
            }
        }
    }
}

/// Pages in a block table, some of which no request has.
pub fn paged(page_size: u32, layout: KvLayout) -> Storage {
    Storage::Paged {
        page_size,
        layout,
        form: TableForm::BlockTable { spare_columns: 1 },
        unused_pages: 3,
        shared_pages: 0,
    }
}

/// Each request of the problem alone, by a handle that is made as for all of them, has the bits that it has among them.
pub fn assert_alone_is_the_same(session: &dyn Session, problem: &Problem, whole: &Output) {
    let indptr = problem.qo_indptr();
    let row = (problem.num_qo_heads() * problem.head_dim_vo) as usize;
    for b in 0..problem.requests.len() {
        // The handle is the same: another desc may be given other code.
        let one = problem.alone(b);
        let handle = session.attention(problem.desc()).unwrap();
        let planned = Planned::new(handle, &DeviceMemory, &HostMemory, &one).unwrap();
        let alone = planned.run(&LayerData::new(&DeviceMemory, &one)).unwrap();
        let rows = indptr[b] as usize * row..indptr[b + 1] as usize * row;
        assert!(alone.o == whole.o[rows], "request {b} of {problem:?}");
    }
}

/// A request's bits do not depend on the batch, with lengths on the host or the device.
pub fn batch_invariant() {
    let session = session();
    for (kind, dtype, graph) in [
        (Kind::Decode, DType::BF16, false),
        (Kind::Decode, DType::F16, true),
        (Kind::Prefill, DType::BF16, false),
        (Kind::Decode, DType::F32, false),
    ] {
        let problem = Problem {
            kind,
            graph,
            batch_invariant: true,
            ..Problem::plain(&[(1, 5000), (4, 900), (2, 2049), (1, 3)])
                .of(dtype)
                .heads(8, 2, 64)
        };
        let whole = solve(&*session, &DeviceMemory, &problem).unwrap();
        assert_right(&problem, &whole);
        let on_device = solve_with(&*session, &DeviceMemory, &problem).unwrap();
        assert!(whole == on_device, "lengths on the device");
        assert_alone_is_the_same(&*session, &problem, &whole);
    }
}

/// More heads of split rows than are put together side by side, each of more parts than a warp has in flight. Each request
/// alone has fewer: batch-invariant plans must not put its parts together in another order then.
pub fn many_split_rows() {
    let session = session();
    for (kind, batch_invariant) in [
        (Kind::Decode, false),
        (Kind::Decode, true),
        (Kind::Prefill, false),
    ] {
        let problem = Problem {
            kind,
            batch_invariant,
            ..Problem::plain(&[(12, 8300), (12, 8400), (12, 9000)])
                .of(DType::BF16)
                .heads(32, 2, 64)
        };
        let whole = solve(&*session, &DeviceMemory, &problem).unwrap();
        assert_right(&problem, &whole);
        if batch_invariant {
            assert_alone_is_the_same(&*session, &problem, &whole);
        }
    }
}

/// Pages more than 2^31 elements apart.
pub fn far_offsets() {
    const PAGE_STRIDE: usize = 1_700_000_000;
    let session = session();
    let pages = 5;
    let bytes = PAGE_STRIDE * 2 * pages;
    if gpu::free_bytes() < bytes + (1 << 30) {
        crate::harness::skip("less than 17 GiB of device memory are free");
    }
    let far = DeviceMemory.alloc(bytes);
    gpu::fill(far, 0xff, bytes);
    for (dtype, kind) in [(DType::BF16, Kind::Decode), (DType::F16, Kind::Prefill)] {
        let problem = Problem {
            kind,
            storage: Storage::Paged {
                page_size: 16,
                layout: KvLayout::Nhd,
                form: TableForm::BlockTable { spare_columns: 0 },
                unused_pages: 0,
                shared_pages: 0,
            },
            ..Problem::plain(&[(1, 75)]).of(dtype).heads(8, 2, 128)
        };
        let handle = session.attention(problem.desc()).unwrap();
        let planned = Planned::new(handle, &DeviceMemory, &HostMemory, &problem).unwrap();
        let layer = LayerData::new(&DeviceMemory, &problem);
        let mut input = layer.input();
        // V lies half a page stride behind K.
        input.k = spread(&input.k, far, PAGE_STRIDE);
        input.v = spread(&input.v, far + PAGE_STRIDE, PAGE_STRIDE);
        planned.handle.run(&input, Stream::default()).unwrap();
        assert_right(&problem, &layer.output());
    }
    DeviceMemory.free(far, bytes);
}

/// Copies a compact cache to pages that lie `stride` elements apart.
#[allow(unsafe_code)]
pub fn spread(
    cache: &folio::tensor::Tensor,
    target: usize,
    stride: usize,
) -> folio::tensor::Tensor {
    let size = cache.dtype().size();
    let page = cache.stride(0) as usize * size;
    for n in 0..cache.extent(0) as usize {
        gpu::copy(target + n * stride * size, cache.address() + n * page, page);
    }
    let mut strides = cache.strides().to_vec();
    strides[0] = stride as i64;
    // SAFETY: the caller allocated `stride` elements for every page.
    unsafe {
        folio::tensor::Tensor::new(
            "cache",
            target as *mut u8,
            cache.device(),
            cache.dtype(),
            cache.shape(),
            Some(&strides),
        )
    }
    .unwrap()
}

/// Keys in two parts: the Hopper prefill kernel's own form over pages of every size and ragged rows, other forms, and
/// prompts that decode. Heads do and do not share keys.
pub fn split_keys() {
    let session = session();
    let paged = |page_size, layout| Storage::Paged {
        page_size,
        layout,
        form: TableForm::BlockTable { spare_columns: 1 },
        unused_pages: 3,
        shared_pages: 0,
    };
    let storages = [
        Storage::Ragged,
        paged(8, KvLayout::Nhd),
        paged(16, KvLayout::Hnd),
        paged(64, KvLayout::Nhd),
        paged(256, KvLayout::Hnd),
        paged(5, KvLayout::Nhd),
        paged(1, KvLayout::Nhd),
    ];
    for (n, storage) in storages.into_iter().enumerate() {
        for dtype in [DType::BF16, DType::F16] {
            for rope_dim in if n < 2 { &[64, 8, 128][..] } else { &[64] } {
                split_keys_in(&*session, storage, (dtype, dtype), *rope_dim);
            }
        }
        split_keys_in(&*session, storage, (DType::F16, DType::F8E4M3), 64);
    }
    split_keys_that_no_map_describes(&*session);
}

fn split_keys_in(
    session: &dyn Session,
    storage: Storage,
    (dtype, kv_dtype): (DType, DType),
    rope_dim: u32,
) {
    let long = [(200, 600), (130, 130), (1, 300), (0, 50), (65, 65), (70, 0)];
    let short = [(5, 900), (16, 16), (1, 33), (0, 7)];
    for (lens, (qo_heads, kv_heads), mask, o_dtype) in [
        (&long[..], (3, 3), MaskKind::Causal, dtype),
        (&long, (4, 2), MaskKind::Full, DType::F32),
        (&short, (4, 4), MaskKind::Causal, DType::F32),
    ] {
        let problem = Problem {
            storage,
            kv_dtype,
            o_dtype,
            head_dim_vo: 128,
            layer: Layer {
                mask,
                ..Layer::plain()
            },
            ..Problem::plain(lens)
                .of(dtype)
                .heads(qo_heads, kv_heads, 192)
        };
        let problem = problem.split(rope_dim);
        let got = solve(session, &DeviceMemory, &problem).unwrap();
        assert_right(&problem, &got);
    }
}

/// Addresses and strides that are no multiples of 16 bytes, and fp32.
fn split_keys_that_no_map_describes(session: &dyn Session) {
    for dtype in [DType::BF16, DType::F32] {
        for lead in [0, 1, 4] {
            for storage in [Storage::Ragged, Storage::paged(16)] {
                let mut problem = Problem::plain(&[(40, 300), (3, 3), (70, 70)])
                    .of(dtype)
                    .heads(2, 2, 192)
                    .split(64);
                problem.storage = storage;
                problem.memory.k_rope.lead = lead;
                problem.memory.k_rope.inner = 8 + lead;
                let got = solve(session, &DeviceMemory, &problem).unwrap();
                assert_right(&problem, &got);
            }
        }
    }
}

/// A batch of other lengths for the same handle as `problem`'s.
pub fn with_lens(problem: &Problem, lens: &[(u32, u32)]) -> Problem {
    let requests = lens.iter().zip(100..);
    Problem {
        requests: requests
            .map(|(&(qo_len, kv_len), tag)| Request {
                qo_len,
                kv_len,
                tag,
            })
            .collect(),
        ..problem.clone()
    }
}

/// Causal, with a sink and a custom mask that depends on lengths, and with scales of each request.
pub fn some_layers() -> [Layer; 3] {
    [
        Layer::plain(),
        Layer {
            mask: MaskKind::Full,
            sinks: true,
            window: Some((50, 3)),
            lse_dtype: DType::BF16,
            ..Layer::plain()
        },
        Layer {
            q_scales: HeadScales::PerRequest,
            v_scales: HeadScales::PerRequest,
            ..Layer::plain()
        },
    ]
}

/// Types of four index tensors, all of them for 16 numbers in a row.
pub fn integer_types(n: usize) -> [DType; 4] {
    [0, 1, 2, 3].map(|tensor| match n >> tensor & 1 {
        0 => DType::I32,
        _ => DType::I64,
    })
}
