//! Few query rows over caches with scales of tokens, channels or blocks, which Hopper's decode kernel takes: every number of packed
//! rows, both ways to bring keys, rows narrower than those it was compiled for, and splits.

use crate::common::compare::{Tolerance, compare};
use crate::common::dense;
use crate::common::instance::solve;
use crate::common::problem::{Alibi, Gaps, Layer, MemoryShape, Problem, Storage, TableForm};
use crate::gpu::DeviceMemory;
use crate::problems::{assert_alone_is_the_same, compare_with_either, session, solve_with};
use folio::dtype::DType;
use folio::problem::{CacheForm, Kind, KvLayout};

const FORMS: [(CacheForm, DType); 5] = [
    (CacheForm::TokenHeadScales, DType::I8),
    (CacheForm::TokenHeadScales, DType::F8E4M3),
    (CacheForm::ChannelScales, DType::I8),
    (CacheForm::ChannelZeroPoints, DType::I4x2),
    (CacheForm::Nvfp4, DType::F4E2M1x2),
];

/// Pages of 16 and 32 come by TMA in one box, of 8 in two, of 3 row by row.
const PAGES: [(u32, KvLayout); 4] = [
    (16, KvLayout::Nhd),
    (8, KvLayout::Hnd),
    (3, KvLayout::Nhd),
    (32, KvLayout::Hnd),
];

fn problem(
    lens: &[(u32, u32)],
    q_dtype: DType,
    (form, element): (CacheForm, DType),
    (page_size, layout): (u32, KvLayout),
) -> Problem {
    Problem {
        kind: Kind::Decode,
        storage: Storage::Paged {
            page_size,
            layout,
            form: TableForm::BlockTable { spare_columns: 1 },
            unused_pages: 1,
            shared_pages: 0,
        },
        ..Problem::plain(lens).of(q_dtype).stored(form, element)
    }
}

fn assert_right(problem: &Problem) {
    let got = solve(&*session(), &DeviceMemory, problem).unwrap();
    let tolerance = Tolerance::of_codes(problem);
    if let Err(difference) = compare(problem, &dense::attention(problem), &got, tolerance) {
        panic!("{difference}\n{problem:?}");
    }
}

/// Packed rows from which on keys become 16-bit rows first where there is no kernel of Hopper's for them.
const WIDENED_ROWS: u32 = 128;

fn assert_right_over_either(problem: &Problem) {
    let got = solve(&*session(), &DeviceMemory, problem).unwrap();
    if let Err(difference) = compare_with_either(problem, &got) {
        panic!("{difference}\n{problem:?}");
    }
}

/// 1 to 128 packed rows: groups, query tokens and both; rows next to each other, and apart.
pub fn packed_rows() {
    let rows = [
        (1, 1),
        (4, 1),
        (4, 2),
        (3, 5),
        (16, 1),
        (7, 4),
        (8, 8),
        (128, 1),
    ];
    let dims = [(64, 64), (128, 128), (96, 128), (32, 64)];
    let apart = Gaps {
        inner: 32,
        middle: 32,
        outer: 64,
        lead: 0,
    };
    for (n, (group, qo_len)) in rows.into_iter().enumerate() {
        for (m, (qk, vo)) in dims.into_iter().enumerate() {
            for (f, form) in FORMS.into_iter().enumerate() {
                let lens = [(qo_len, 70), (1, 33), (qo_len, qo_len), (qo_len, 2), (1, 0)];
                let q_dtype = [DType::BF16, DType::F16][(n + m) % 2];
                let pages = PAGES[(n + m + f) % PAGES.len()];
                let kv_heads = 2 + m as u32 % 2;
                let gaps = [Gaps::default(), apart][(n + f) % 2];
                let problem = Problem {
                    head_dim_vo: vo,
                    memory: MemoryShape {
                        k: gaps,
                        v: gaps,
                        ..MemoryShape::default()
                    },
                    ..problem(&lens, q_dtype, form, pages).heads(kv_heads * group, kv_heads, qk)
                };
                match group * qo_len >= WIDENED_ROWS {
                    true => assert_right_over_either(&problem),
                    false => assert_right(&problem),
                }
            }
        }
    }
}

/// Long enough to be split, with what changes a logit: sinks, windows, caps and slopes.
pub fn splits() {
    let layers = [
        Layer {
            sinks: true,
            ..Layer::plain()
        },
        Layer {
            window: Some((700, 0)),
            sinks: true,
            ..Layer::plain()
        },
        Layer {
            logits_soft_cap: 20.0,
            alibi: Some(Alibi::Linear),
            ..Layer::plain()
        },
    ];
    let lens = [(1, 1800), (1, 17), (3, 700), (1, 0)];
    let sizes = [
        (DType::BF16, 4, 128),
        (DType::F16, 4, 64),
        (DType::BF16, 16, 128),
    ];
    for (n, layer) in layers.into_iter().enumerate() {
        for form in FORMS {
            for (m, (q_dtype, group, dim)) in sizes.into_iter().enumerate() {
                assert_right(&Problem {
                    layer: layer.clone(),
                    batch_invariant: (n + m) % 2 == 1,
                    ..problem(&lens, q_dtype, form, PAGES[0]).heads(2 * group, 2, dim)
                });
            }
        }
    }
}

/// A request has the same bits alone and among others, and with lengths on the device in a graph's handle.
pub fn batch_invariant() {
    let session = session();
    let lens = [(1, 5000), (4, 900), (2, 2049), (1, 3)];
    for (form, graph) in FORMS.into_iter().zip([false, true, false, true, true]) {
        let problem = Problem {
            graph,
            batch_invariant: true,
            ..problem(&lens, DType::BF16, form, PAGES[0]).heads(8, 2, 128)
        };
        let whole = solve(&*session, &DeviceMemory, &problem).unwrap();
        let on_device = solve_with(&*session, &DeviceMemory, &problem).unwrap();
        assert!(whole == on_device, "lengths on the device, {form:?}");
        assert_alone_is_the_same(&*session, &problem, &whole);
    }
}
