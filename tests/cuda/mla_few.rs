//! Latent attention with few rows, for which Hopper has kernels of their own: every way that records come to shared
//! memory, lengths around the ring that they come to, and units that follow each other there.

use crate::common::door::Session;
use crate::common::instance::Output;
use crate::common::memory::HostMemory;
use crate::common::mla::{self, Cache, MlaProblem, Queries};
use crate::common::problem::{MaskKind, TableForm};
use crate::gpu::DeviceMemory;
use crate::mla::solve_five_times;
use crate::problems::session;
use folio::dtype::DType;

/// Types of queries and records, and where the records' parts are.
const STORED: [(DType, DType, Cache); 9] = [
    (DType::BF16, DType::BF16, Cache::Records),
    (DType::BF16, DType::BF16, Cache::Views),
    (DType::BF16, DType::BF16, Cache::Two),
    (DType::F16, DType::F16, Cache::Records),
    (DType::BF16, DType::F8E4M3, Cache::Records),
    (DType::BF16, DType::F8E4M3, Cache::Two),
    (DType::F16, DType::F8E4M3, Cache::Records),
    (DType::BF16, DType::F8E5M2, Cache::Records),
    (DType::BF16, DType::F8E4M3, Cache::DsMla),
];

fn stored(
    (q_dtype, kv_dtype, cache): (DType, DType, Cache),
    lens: &[(u32, u32)],
    heads: u32,
    page_size: u32,
) -> MlaProblem {
    let form = TableForm::CsrKvLen { spare_pages: 2 };
    let problem = MlaProblem::plain(lens).of(q_dtype).heads(heads);
    let mut problem = problem.pages(page_size, form).tensors(Queries::Two, cache);
    problem.batch.kv_dtype = kv_dtype;
    if kv_dtype.is_fp8() && cache != Cache::DsMla {
        problem.batch.layer.k_scale = 0.5;
    }
    problem
}

fn assert_right(session: &dyn Session, problem: &MlaProblem) {
    let got = mla::solve(session, &DeviceMemory, &HostMemory, problem)
        .unwrap_or_else(|error| panic!("{error}\n{problem:?}"));
    assert_equals(problem, &got);
}

fn assert_equals(problem: &MlaProblem, got: &Output) {
    if let Err(difference) = mla::check(problem, got) {
        panic!("{difference}\n{problem:?}");
    }
}

/// Pages of every kind: by boxes of 16 and of 8 tokens, and token by token.
pub fn pages() {
    let session = session();
    let lens = [(1, 200), (2, 65), (1, 1), (2, 1), (1, 0), (0, 8), (1, 48)];
    for format in STORED {
        for page_size in [1, 2, 3, 4, 8, 16, 24, 64, 128] {
            for heads in [8, 16] {
                assert_right(&*session, &stored(format, &lens, heads, page_size));
            }
        }
    }
}

/// The ring has 11 slots of 16 tokens, or 10 or 9 of 32: lengths around a tile, and around once and twice the ring.
pub fn lengths_around_the_ring() {
    let session = session();
    let near = |n: u32| n.saturating_sub(2)..n + 3;
    let lens: Vec<(u32, u32)> = [
        0, 16, 32, 48, 64, 128, 160, 176, 192, 288, 320, 352, 576, 640,
    ]
    .into_iter()
    .flat_map(near)
    .map(|kv_len| (1, kv_len))
    .collect();
    for format in STORED {
        assert_right(&*session, &stored(format, &lens, 16, 64));
    }
}

/// Several tokens, in one row tile or more, by both masks. With more rows than keys some see none.
pub fn rows_of_several_tokens() {
    let session = session();
    let lens = [(4, 100), (3, 70), (4, 2), (1, 300), (2, 64), (0, 5), (4, 0)];
    for format in STORED {
        for heads in [1, 3, 4, 5, 8] {
            let mut problem = stored(format, &lens, heads, 16);
            for mask in [MaskKind::Causal, MaskKind::Full] {
                problem.batch.layer.mask = mask;
                assert_right(&*session, &problem);
            }
        }
    }
}

/// More units than multiprocessors, of lengths that differ: loads run ahead into the next unit.
pub fn units_in_turn() {
    let session = session();
    let lens: Vec<(u32, u32)> = (0..600).map(|b| (b % 3, b * b % 151)).collect();
    for format in STORED {
        assert_right(&*session, &stored(format, &lens, 8, 32));
    }
}

/// Chunks of keys, whose parts are combined: every run in the same order.
pub fn chunks() {
    let session = session();
    for lens in [
        &[(1, 9000)][..],
        &[(2, 5001), (1, 700), (1, 12_345), (1, 1)],
    ] {
        for format in STORED {
            for (heads, page_size) in [(16, 64), (7, 1)] {
                let problem = stored(format, lens, heads, page_size);
                assert_equals(&problem, &solve_five_times(&*session, &problem));
            }
        }
    }
}
