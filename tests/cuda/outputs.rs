//! Outputs in fp32 and in fp8 of prefill with 16-bit queries, on each of its kernels: by boxes and row by row, few keys, masks, soft
//! caps, biases, rows that are made first, and rows that are split.

use crate::common::problem::{Alibi, HeadScales, Layer, MaskKind, Pattern, Problem, Storage};
use crate::problems::{assert_solved, paged, session};
use folio::dtype::DType;
use folio::problem::{KvLayout, LogBase};

const OUTPUTS: [DType; 3] = [DType::F32, DType::F8E4M3, DType::F8E5M2];

/// More than one tile, few keys, a request without any, and rows over so many keys that they are split.
const LENS: [&[(u32, u32)]; 3] = [
    &[(210, 300), (1, 70), (0, 40), (70, 0), (33, 33)],
    &[(40, 100), (64, 64), (17, 90), (30, 30)],
    &[(64, 5000), (20, 70)],
];

fn layers(o_dtype: DType) -> [Layer; 4] {
    let scaled = Layer {
        v_scale: 3.0,
        o_scale: if o_dtype.is_fp8() { 0.02 } else { 0.0 },
        sinks: true,
        lse: Some(LogBase::E),
        ..Layer::plain()
    };
    [
        scaled.clone(),
        Layer {
            logits_soft_cap: 5.0,
            v_scales: HeadScales::PerHead,
            ..scaled.clone()
        },
        Layer {
            alibi: Some(Alibi::Linear),
            v_scales: HeadScales::PerRequest,
            ..scaled.clone()
        },
        Layer {
            mask: MaskKind::Bits(Pattern::Random(0.5)),
            ..scaled
        },
    ]
}

pub fn outputs() {
    let session = session();
    let dims = [
        (64, 64),
        (128, 128),
        (96, 96),
        (192, 128),
        (256, 256),
        (72, 80),
    ];
    let storages = [
        paged(16, KvLayout::Nhd),
        Storage::Ragged,
        paged(1, KvLayout::Hnd),
    ];
    let mut turn = 0;
    for dims in dims {
        for o_dtype in OUTPUTS {
            for layer in layers(o_dtype) {
                for lens in LENS {
                    let q_dtype = [DType::BF16, DType::F16][turn % 2];
                    let kv_dtype = [q_dtype, q_dtype, DType::F8E4M3][turn / 2 % 3];
                    let problem = Problem {
                        storage: storages[turn % storages.len()],
                        kv_dtype,
                        o_dtype,
                        head_dim_vo: dims.1,
                        layer: layer.clone(),
                        ..Problem::plain(lens).of(q_dtype).heads(4, 2, dims.0)
                    };
                    assert_solved(&*session, &problem);
                    turn += 1;
                }
            }
        }
    }
}

/// The same of keys in fp8 that are widened first.
pub fn of_widened_keys() {
    let session = session();
    for o_dtype in OUTPUTS {
        for layer in layers(o_dtype) {
            let problem = Problem {
                storage: paged(16, KvLayout::Nhd),
                kv_dtype: DType::F8E4M3,
                o_dtype,
                layer,
                ..Problem::plain(&[(300, 700), (280, 300), (150, 150), (1, 9000)])
                    .of(DType::BF16)
                    .heads(16, 1, 128)
            };
            assert_solved(&*session, &problem);
        }
    }
}
