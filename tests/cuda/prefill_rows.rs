//! Prefill whose keys and values come row by row: pages of any size, rows and pages at distances that no tensor map
//! describes, fp8 caches. And what stays beside them: boxes of the same problems.

use crate::common::problem::{
    Alibi, Gaps, HeadScales, Layer, MaskKind, MemoryShape, Pattern, Problem, Storage,
};
use crate::problems::{assert_solved, paged, session};
use folio::dtype::DType;
use folio::problem::KvLayout;

const DIMS: [(u32, u32); 5] = [(64, 64), (128, 128), (160, 160), (192, 128), (256, 256)];

const TYPES: [(DType, DType); 6] = [
    (DType::BF16, DType::BF16),
    (DType::F16, DType::F16),
    (DType::BF16, DType::F8E4M3),
    (DType::F16, DType::F8E4M3),
    (DType::BF16, DType::F8E5M2),
    (DType::F16, DType::F8E5M2),
];

/// Around a step of keys and a tile of rows, and without either.
const LENS: [(u32, u32); 7] = [
    (70, 200),
    (65, 65),
    (1, 81),
    (0, 50),
    (70, 0),
    (40, 128),
    (33, 7),
];

fn problem((dim_qk, dim_vo): (u32, u32), (q_dtype, kv_dtype): (DType, DType)) -> Problem {
    Problem {
        kv_dtype,
        head_dim_vo: dim_vo,
        ..Problem::plain(&LENS).of(q_dtype).heads(4, 2, dim_qk)
    }
}

/// Every page size, dim and type, in both layouts.
pub fn pages() {
    let session = session();
    for dims in DIMS {
        for types in TYPES {
            for (n, page_size) in [1, 2, 3, 5, 7, 8, 16].into_iter().enumerate() {
                let layout = [KvLayout::Nhd, KvLayout::Hnd][n % 2];
                let problem = Problem {
                    storage: paged(page_size, layout),
                    ..problem(dims, types)
                };
                assert_solved(&*session, &problem);
            }
        }
    }
}

/// Pages, tokens and heads with gaps of 16 bytes: keys and values that interleave, pages that are no whole number of
/// 8-token groups apart.
pub fn strides() {
    let session = session();
    for types in TYPES {
        let unit = 16 / types.1.size() as u32;
        for (n, page_size) in [1, 3, 8, 16].into_iter().enumerate() {
            for layout in [KvLayout::Nhd, KvLayout::Hnd] {
                let dims = DIMS[n % DIMS.len()];
                let gaps = |outer| Gaps {
                    inner: unit,
                    middle: dims.0,
                    outer: outer * unit,
                    lead: unit,
                };
                let problem = Problem {
                    storage: paged(page_size, layout),
                    memory: MemoryShape {
                        k: gaps(3),
                        v: gaps(1),
                        ..MemoryShape::default()
                    },
                    ..problem(dims, types)
                };
                assert_solved(&*session, &problem);
            }
        }
    }
}

/// Rows in fp8 that begin at multiples of 16 bytes, and end 8 bytes before one: what is between them is NaN.
pub fn odd_lengths() {
    let session = session();
    for dims in [(40, 40), (56, 24), (72, 72), (120, 128), (136, 136)] {
        for types in TYPES.into_iter().filter(|types| types.1.is_fp8()) {
            for storage in [Storage::Ragged, paged(1, KvLayout::Nhd)] {
                let to_16 = |dim: u32| Gaps {
                    inner: dim.next_multiple_of(16) - dim,
                    ..Gaps::default()
                };
                let problem = Problem {
                    storage,
                    memory: MemoryShape {
                        k: to_16(dims.0),
                        v: to_16(dims.1),
                        ..MemoryShape::default()
                    },
                    ..problem(dims, types)
                };
                assert_solved(&*session, &problem);
            }
        }
    }
}

/// What a layer may add, ragged rows, and groups of heads of every kind.
pub fn layers() {
    let session = session();
    let layers = [
        Layer {
            mask: MaskKind::Full,
            k_scale: 0.5,
            v_scale: 3.0,
            sinks: true,
            ..Layer::plain()
        },
        Layer {
            window: Some((90, 0)),
            k_scales: HeadScales::PerHead,
            v_scales: HeadScales::PerHead,
            ..Layer::plain()
        },
        Layer {
            window: Some((40, 30)),
            mask: MaskKind::Full,
            logits_soft_cap: 5.0,
            v_scales: HeadScales::One,
            ..Layer::plain()
        },
    ];
    for types in TYPES {
        for layer in &layers {
            for storage in [
                Storage::Ragged,
                paged(1, KvLayout::Nhd),
                paged(6, KvLayout::Hnd),
            ] {
                for (heads, kv_heads) in [(3, 3), (6, 2), (16, 1), (34, 2)] {
                    let problem = Problem {
                        storage,
                        layer: layer.clone(),
                        kv_dtype: types.1,
                        ..Problem::plain(&LENS)
                            .of(types.0)
                            .heads(heads, kv_heads, 128)
                    };
                    assert_solved(&*session, &problem);
                }
            }
        }
    }
}

/// Masks that positions do not say, ranges and biases by distance, at head_dims with kernels of their own for them and at those
/// between: pages that no box has, and where these kernels are the only ones, pages of 16 and ragged rows.
pub fn masks() {
    let session = session();
    let layers = [
        Layer {
            mask: MaskKind::Bits(Pattern::Random(0.5)),
            window: Some((90, 0)),
            ..Layer::plain()
        },
        Layer {
            mask: MaskKind::Bytes(Pattern::Tree),
            sinks: true,
            k_scales: HeadScales::PerHead,
            v_scales: HeadScales::PerHead,
            ..Layer::plain()
        },
        Layer {
            mm_prefix_ranges: 3,
            logits_soft_cap: 5.0,
            ..Layer::plain()
        },
        Layer {
            mask: MaskKind::CausalByRequest,
            ..Layer::plain()
        },
        Layer {
            alibi: Some(Alibi::Sqrt),
            ..Layer::plain()
        },
    ];
    let storages = [
        paged(1, KvLayout::Nhd),
        paged(16, KvLayout::Nhd),
        Storage::Ragged,
        paged(3, KvLayout::Hnd),
    ];
    let others = [(40, 56), (96, 96), (120, 128), (136, 144), (224, 224)];
    let mut turn = 0;
    for dims in DIMS.into_iter().chain(others) {
        for types in TYPES {
            for layer in &layers {
                let (heads, kv_heads) = [(3, 3), (4, 2), (16, 1)][turn % 3];
                let problem = Problem {
                    storage: storages[turn % storages.len()],
                    layer: layer.clone(),
                    kv_dtype: types.1,
                    head_dim_vo: dims.1,
                    ..Problem::plain(&LENS)
                        .of(types.0)
                        .heads(heads, kv_heads, dims.0)
                };
                assert_solved(&*session, &problem);
                turn += 1;
            }
        }
    }
}

/// The same over split keys: parts begin where a step need not.
pub fn masks_of_split_keys() {
    let session = session();
    for dims in DIMS {
        for types in TYPES {
            let problem = Problem {
                layer: Layer {
                    mask: MaskKind::Bits(Pattern::Tree),
                    ..Layer::plain()
                },
                storage: paged(1, KvLayout::Nhd),
                kv_dtype: types.1,
                head_dim_vo: dims.1,
                ..Problem::plain(&[(64, 3000), (20, 70)])
                    .of(types.0)
                    .heads(4, 1, dims.0)
            };
            assert_solved(&*session, &problem);
        }
    }
}

/// Few rows over many keys: split, and many steps in the ring.
pub fn long() {
    let session = session();
    for dims in DIMS {
        for types in TYPES {
            for page_size in [1, 5, 16] {
                let problem = Problem {
                    storage: paged(page_size, KvLayout::Nhd),
                    kv_dtype: types.1,
                    head_dim_vo: dims.1,
                    ..Problem::plain(&[(20, 3000), (17, 17), (30, 1200)])
                        .of(types.0)
                        .heads(4, 1, dims.0)
                };
                assert_solved(&*session, &problem);
            }
        }
    }
}

/// fp8 caches and more tiles than multiprocessors, some full and of many steps, most of one row: whoever loads is steps ahead
/// of who multiplies, and in the next tile.
pub fn waves() {
    let session = session();
    let singles = (0..60).map(|n| (1, 37 * n % 700));
    let lens: Vec<_> = [(150, 1000), (130, 333)]
        .into_iter()
        .chain(singles)
        .collect();
    for dims in DIMS {
        for types in TYPES.into_iter().filter(|types| types.1.is_fp8()) {
            let problem = Problem {
                storage: paged(16, KvLayout::Nhd),
                kv_dtype: types.1,
                head_dim_vo: dims.1,
                ..Problem::plain(&lens).of(types.0).heads(3, 3, dims.0)
            };
            assert_solved(&*session, &problem);
        }
    }
}
