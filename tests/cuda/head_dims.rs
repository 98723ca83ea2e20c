//! Prefill at every head dim, which Hopper's kernel takes by rows of ten widths: keys and values of equal and of other
//! widths, over pages and ragged rows, with gaps behind every row. Gaps hold NaN, and what is written to them shows.

use crate::common::instance::solve;
use crate::common::problem::{Gaps, Layer, MaskKind, MemoryShape, Problem, Storage, TableForm};
use crate::gpu::DeviceMemory;
use crate::problems::{assert_right, session};
use folio::dtype::DType;
use folio::problem::KvLayout;

const WIDTHS: u32 = 32;

fn width(n: u32) -> u32 {
    8 + n % WIDTHS * 8
}

fn paged(page_size: u32, layout: KvLayout) -> Storage {
    Storage::Paged {
        page_size,
        layout,
        form: TableForm::BlockTable { spare_columns: 1 },
        unused_pages: 2,
        shared_pages: 0,
    }
}

/// Rows of 16-byte units apart by `units` more than they are long; pages of K and V as far apart as if they were
/// interleaved, where `outer` says so.
fn gapped(problem: &Problem, units: u32, interleaved: bool) -> MemoryShape {
    let inner = 8 * units;
    let page = |width: u32| match problem.storage {
        Storage::Paged { page_size, .. } if interleaved => {
            page_size * problem.num_kv_heads * (width + inner)
        }
        _ => 0,
    };
    let gaps = |outer| Gaps {
        inner,
        outer,
        ..Gaps::default()
    };
    MemoryShape {
        q: gaps(0),
        k: gaps(page(problem.head_dim_qk)),
        v: gaps(page(problem.head_dim_vo)),
        o: gaps(0),
        ..MemoryShape::default()
    }
}

fn layers() -> [Layer; 4] {
    [
        Layer::plain(),
        Layer {
            mask: MaskKind::Full,
            logits_soft_cap: 20.0,
            ..Layer::plain()
        },
        Layer {
            window: Some((90, 0)),
            sinks: true,
            ..Layer::plain()
        },
        Layer {
            mask: MaskKind::Full,
            v_scale: 0.5,
            ..Layer::plain()
        },
    ]
}

/// Every width of keys, each with three widths of values; what else there is takes turns.
pub fn every_pair_of_widths() {
    let session = session();
    let storages = [
        paged(16, KvLayout::Nhd),
        Storage::Ragged,
        paged(8, KvLayout::Hnd),
        paged(64, KvLayout::Nhd),
        paged(128, KvLayout::Hnd),
    ];
    let lens = [(130, 300), (77, 77), (1, 200), (0, 40), (70, 64), (20, 0)];
    for n in 0..3 * WIDTHS {
        let (qk, turn) = (width(n), n / WIDTHS);
        let vo = [qk, width(5 * n + 3), width(11 * n + 20)][turn as usize];
        let (qo_heads, kv_heads) = [(2, 2), (8, 2), (3, 1), (6, 2)][(n % 4) as usize];
        let problem = Problem {
            head_dim_vo: vo,
            storage: storages[(n % 5) as usize],
            layer: layers()[((n + turn) % 4) as usize].clone(),
            ..Problem::plain(&lens)
                .of([DType::BF16, DType::F16][(n / 2 % 2) as usize])
                .heads(qo_heads, kv_heads, qk)
        };
        let problem = Problem {
            memory: gapped(&problem, n % 3, n % 2 == 0),
            ..problem
        };
        let got = solve(&*session, &DeviceMemory, &problem).unwrap();
        assert_right(&problem, &got);
    }
}

/// Few rows against many keys: partial results, whose rows are as long as those of o.
pub fn split_rows() {
    let session = session();
    for (n, dim) in [
        8, 40, 72, 80, 96, 104, 120, 136, 160, 184, 192, 216, 224, 248,
    ]
    .into_iter()
    .enumerate()
    {
        for (qk, vo) in [(dim, dim), (dim, width(n as u32 * 7))] {
            let problem = Problem {
                head_dim_vo: vo,
                storage: [Storage::paged(16), Storage::Ragged][n % 2],
                layer: Layer {
                    sinks: true,
                    v_scale: 2.0,
                    ..Layer::plain()
                },
                ..Problem::plain(&[(20, 4000), (1, 17), (33, 1100)])
                    .of(DType::BF16)
                    .heads(4, 2, qk)
            };
            let got = solve(&*session, &DeviceMemory, &problem).unwrap();
            assert_right(&problem, &got);
        }
    }
}
