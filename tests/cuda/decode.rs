//! Few query rows for each KV head, which the Hopper decode kernel takes with rows narrower than it was compiled for:
//! every head dimension, every number of packed rows, both ways to bring keys.

use crate::common::instance::solve;
use crate::common::problem::{Alibi, Gaps, Layer, MemoryShape, Problem, Storage, TableForm};
use crate::gpu::DeviceMemory;
use crate::problems::{assert_right, session};
use folio::dtype::DType;
use folio::problem::{Kind, KvLayout};

/// Types of q and of the cache.
const TYPES: [(DType, DType); 5] = [
    (DType::BF16, DType::BF16),
    (DType::F16, DType::F16),
    (DType::BF16, DType::F8E4M3),
    (DType::F16, DType::F8E4M3),
    (DType::BF16, DType::F8E5M2),
];

/// Pages of 16 come by TMA in one box, of 8 in two, of 3 row by row.
const PAGES: [(u32, KvLayout); 4] = [
    (16, KvLayout::Nhd),
    (8, KvLayout::Hnd),
    (3, KvLayout::Nhd),
    (32, KvLayout::Hnd),
];

/// Behind every row lies NaN, and fp8 rows begin at odd multiples of 8 bytes.
const APART: Gaps = Gaps {
    inner: 8,
    middle: 16,
    outer: 32,
    lead: 0,
};

fn problem(lens: &[(u32, u32)], types: (DType, DType), pages: (u32, KvLayout)) -> Problem {
    let (page_size, layout) = pages;
    Problem {
        kind: Kind::Decode,
        kv_dtype: types.1,
        storage: Storage::Paged {
            page_size,
            layout,
            form: TableForm::BlockTable { spare_columns: 1 },
            unused_pages: 1,
            shared_pages: 0,
        },
        ..Problem::plain(lens).of(types.0)
    }
}

fn solve_each(problems: impl Iterator<Item = Problem>) {
    let session = session();
    for mut problem in problems {
        for memory in [
            MemoryShape::default(),
            MemoryShape {
                q: APART,
                k: APART,
                v: APART,
                o: APART,
                ..MemoryShape::default()
            },
        ] {
            problem.memory = memory;
            assert_right(
                &problem,
                &solve(&*session, &DeviceMemory, &problem).unwrap(),
            );
        }
    }
}

/// Rows of every multiple of 8, of keys, values or both, alone and in pairs of KV heads.
pub fn decode_head_dims() {
    let dims = (1..=32).flat_map(|n| {
        let dim = 8 * n;
        [(dim, dim), (dim, 264 - dim), (192, dim), (dim, 128)]
    });
    let problems = dims.enumerate().map(|(n, (qk, vo))| {
        let (types, pages) = (TYPES[n % TYPES.len()], PAGES[n / 4 % PAGES.len()]);
        let (heads, kv_heads) = [(8, 2), (6, 3), (20, 2)][n % 3];
        Problem {
            head_dim_qk: qk,
            head_dim_vo: vo,
            ..problem(&[(1, 75), (1, 0), (1, 9)], types, pages).heads(heads, kv_heads, qk)
        }
    });
    solve_each(problems);
}

/// Every type over every form of pages, at the head dims of models that have no row of their own.
pub fn decode_head_dims_of_models() {
    let problems = [72, 80, 96, 112, 120, 160, 224]
        .into_iter()
        .flat_map(|dim| {
            TYPES.into_iter().flat_map(move |types| {
                PAGES.map(|pages| problem(&[(1, 40), (2, 21)], types, pages).heads(8, 2, dim))
            })
        });
    solve_each(problems);
}

/// 1 to 129 packed rows: groups, query tokens and both.
pub fn decode_packed_rows() {
    let rows = [
        (1, 1),
        (3, 3),
        (9, 1),
        (4, 4),
        (17, 1),
        (4, 5),
        (32, 1),
        (1, 32),
        (2, 16),
        (33, 1),
        (8, 8),
        (6, 16),
        (32, 4),
        (64, 2),
        (20, 6),
        (31, 4),
        (128, 1),
        (14, 4),
        (28, 2),
        (43, 1),
        (71, 1),
        (43, 3),
    ];
    let problems = rows.into_iter().flat_map(|(group, qo_len)| {
        [(64, 64), (128, 128), (96, 80), (192, 128), (256, 256)]
            .into_iter()
            .enumerate()
            .map(move |(n, (qk, vo))| {
                let lens = [(qo_len, 70), (1, 33), (qo_len, qo_len), (qo_len, 2)];
                let types = TYPES[(n + group as usize) % TYPES.len()];
                Problem {
                    head_dim_vo: vo,
                    ..problem(&lens, types, PAGES[(n + qo_len as usize) % PAGES.len()]).heads(
                        2 * group,
                        2,
                        qk,
                    )
                }
            })
    });
    solve_each(problems);
}

/// 9 to 64 packed rows over fp8 caches, which a warpgroup multiplies together: requests of more keys than the rings hold, steps
/// of which some warps have no keys, rows that see different keys, and every form of a logit.
pub fn decode_by_warpgroups() {
    let layers = [
        Layer::plain(),
        Layer {
            window: Some((100, 0)),
            ..Layer::plain()
        },
        Layer {
            logits_soft_cap: 5.0,
            ..Layer::plain()
        },
        Layer {
            alibi: Some(Alibi::Linear),
            sinks: true,
            ..Layer::plain()
        },
    ];
    let rows = [
        (3, 4),
        (8, 2),
        (8, 3),
        (8, 4),
        (5, 8),
        (16, 3),
        (1, 64),
        (6, 9),
        (32, 2),
    ];
    let types = [
        (DType::BF16, DType::F8E4M3),
        (DType::F16, DType::F8E5M2),
        (DType::F8E4M3, DType::F8E4M3),
    ];
    let problems = rows
        .into_iter()
        .enumerate()
        .flat_map(|(n, (group, qo_len))| {
            let layers = layers.clone();
            [64, 72, 96, 128]
                .into_iter()
                .enumerate()
                .map(move |(m, dim)| {
                    let lens = [
                        (qo_len, 700),
                        (qo_len, qo_len),
                        (1, 0),
                        (2, 1009),
                        (qo_len, 65),
                    ];
                    let types = types[(n + m) % types.len()];
                    Problem {
                        layer: layers[(n + m / 2) % layers.len()].clone(),
                        o_dtype: DType::F32,
                        ..problem(&lens, types, PAGES[(n + m) % PAGES.len()]).heads(
                            2 * group,
                            2,
                            dim,
                        )
                    }
                })
        });
    solve_each(problems);
    let split = [64, 128].into_iter().map(|dim| {
        problem(
            &[(6, 5000), (6, 300)],
            (DType::BF16, DType::F8E4M3),
            PAGES[0],
        )
        .heads(16, 2, dim)
    });
    solve_each(split);
}

/// Caps, slopes, both, and windows, at few and many rows: every form of a logit.
pub fn decode_logits() {
    let layers = [(50.0, false), (0.0, true), (3.0, true)]
        .into_iter()
        .flat_map(|(cap, alibi)| {
            [None, Some((20, 0))].map(|window| Layer {
                logits_soft_cap: cap,
                alibi: alibi.then_some(Alibi::Linear),
                window,
                ..Layer::plain()
            })
        });
    let problems = layers.flat_map(|layer| {
        [(2, 1, 256), (8, 4, 128), (16, 1, 96)].map(|(group, qo_len, dim)| Problem {
            layer: layer.clone(),
            ..problem(&[(qo_len, 70), (1, 9)], TYPES[0], PAGES[0]).heads(2 * group, 2, dim)
        })
    });
    solve_each(problems);
}
