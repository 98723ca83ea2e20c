//! Prompts and decodes in one batch, over caches for which Hopper or the portable kernels plan the decodes apart.

use crate::common::instance::Planned;
use crate::common::memory::{HostMemory, Memory};
use crate::common::problem::{
    Alibi, HeadScales, Layer, MaskKind, Pattern, Problem, Request, Storage,
};
use crate::gpu::DeviceMemory;
use crate::problems::{
    assert_alone_is_the_same, assert_right, paged, run_again, session, solve_with,
};
use folio::dtype::DType;
use folio::problem::{CacheForm, KvLayout, LogBase};

/// Decodes of one and two tokens, short and long, with and without keys; prompts of one tile and of several; requests without
/// queries.
const LENS: [(u32, u32); 10] = [
    (1, 700),
    (90, 200),
    (2, 300),
    (0, 50),
    (150, 150),
    (1, 0),
    (1, 1900),
    (64, 0),
    (3, 40),
    (1, 1),
];

const TYPES: [(DType, DType); 6] = [
    (DType::BF16, DType::F8E4M3),
    (DType::F16, DType::F8E5M2),
    (DType::F8E4M3, DType::F8E4M3),
    (DType::BF16, DType::F8E5M2),
    (DType::BF16, DType::BF16),
    (DType::F16, DType::F16),
];

const FORMS: [(CacheForm, DType); 6] = [
    (CacheForm::TokenHeadScales, DType::I8),
    (CacheForm::TokenHeadScales, DType::F8E4M3),
    (CacheForm::ChannelScales, DType::I8),
    (CacheForm::ChannelZeroPoints, DType::I4x2),
    (CacheForm::Nvfp4, DType::F4E2M1x2),
    (CacheForm::PackedKeys, DType::BF16),
];

/// Groups of 1, 4, 8 and 32 heads, so that 8, 2, 1 and 1 tokens are a decode.
const HEADS: [(u32, u32, u32); 5] = [
    (16, 16, 64),
    (8, 2, 128),
    (16, 2, 96),
    (32, 1, 128),
    (6, 2, 256),
];

fn storages() -> [Storage; 3] {
    [
        paged(16, KvLayout::Nhd),
        paged(1, KvLayout::Nhd),
        paged(48, KvLayout::Hnd),
    ]
}

fn problem(
    lens: &[(u32, u32)],
    (q_dtype, kv_dtype): (DType, DType),
    (qo, kv, dim): (u32, u32, u32),
) -> Problem {
    let o_dtype = if q_dtype.is_fp8() {
        DType::BF16
    } else {
        q_dtype
    };
    Problem {
        kv_dtype,
        o_dtype,
        // Else decodes of so few keys are planned as prompts.
        batch_invariant: true,
        ..Problem::plain(lens).of(q_dtype).heads(qo, kv, dim)
    }
}

const ON_HOST: &dyn Memory = &HostMemory;
const ON_DEVICE: &dyn Memory = &DeviceMemory;

fn check(problem: &Problem) {
    let session = session();
    for memory in [ON_HOST, ON_DEVICE] {
        let got = solve_with(&*session, memory, problem);
        let got = got.unwrap_or_else(|error| panic!("{error}\n{problem:?}"));
        assert_right(problem, &got);
    }
}

/// Types, heads, pages; lengths on the host and on the device.
pub fn mixed_types() {
    for (n, types) in TYPES.into_iter().enumerate() {
        for (m, heads) in HEADS.into_iter().enumerate() {
            check(&Problem {
                storage: storages()[(n + m) % 3],
                ..problem(&LENS, types, heads)
            });
        }
    }
}

/// Queries and outputs in fp8: what rounds the outputs of prompts leaves those of decodes as they are.
pub fn mixed_fp8_outputs() {
    for types in [TYPES[2], (DType::F8E5M2, DType::F8E4M3)] {
        for v_scales in [HeadScales::Absent, HeadScales::PerRequest] {
            check(&Problem {
                o_dtype: types.0,
                storage: paged(16, KvLayout::Nhd),
                layer: Layer {
                    v_scales,
                    ..Layer::plain()
                },
                ..problem(&LENS, types, HEADS[3])
            });
        }
    }
}

/// Caches in other forms.
pub fn mixed_forms() {
    for (form, element) in FORMS {
        for heads in &HEADS[1..4] {
            let plain = problem(&LENS, (DType::BF16, DType::BF16), *heads);
            check(&Problem {
                storage: paged(16, KvLayout::Nhd),
                ..plain.stored(form, element)
            });
        }
    }
}

/// What a layer may add: both parts of the batch have it.
pub fn mixed_layers() {
    let scaled = Layer {
        k_scale: 0.5,
        v_scale: 3.0,
        sinks: true,
        lse: Some(LogBase::Two),
        ..Layer::plain()
    };
    let layers = [
        Layer {
            lse_dtype: DType::BF16,
            ..scaled.clone()
        },
        Layer {
            mask: MaskKind::Full,
            k_scales: HeadScales::PerHead,
            v_scales: HeadScales::PerHead,
            lse_dtype: DType::F16,
            ..scaled.clone()
        },
        Layer {
            q_scales: HeadScales::PerRequest,
            k_scales: HeadScales::PerRequest,
            v_scales: HeadScales::PerRequest,
            ..scaled.clone()
        },
        Layer {
            window: Some((90, 0)),
            ..scaled.clone()
        },
        Layer {
            mask: MaskKind::Bits(Pattern::Random(0.5)),
            ..scaled.clone()
        },
        Layer {
            mask: MaskKind::Bytes(Pattern::Causal),
            logits_soft_cap: 5.0,
            ..scaled.clone()
        },
        Layer {
            alibi: Some(Alibi::Linear),
            ..scaled.clone()
        },
        Layer {
            mask: MaskKind::CausalByRequest,
            mm_prefix_ranges: 2,
            ..scaled.clone()
        },
        Layer {
            chunks: Some((64, 1)),
            ..scaled
        },
    ];
    for layer in layers {
        check(&Problem {
            storage: paged(16, KvLayout::Nhd),
            layer,
            ..problem(&LENS, TYPES[0], HEADS[1])
        });
    }
}

/// Decodes of more keys than are worth a kernel of their own: 16384 of 4 heads of 256 in fp8.
const MANY_KEYS: [(u32, u32); 11] = [
    (1, 2300),
    (90, 100),
    (1, 2200),
    (1, 1900),
    (1, 2100),
    (1, 2000),
    (1, 2001),
    (1, 2002),
    (1, 1999),
    (0, 7),
    (40, 0),
];

/// One handle with a batch of decodes, of prompts, and of both; lengths on the host and on the device. Of a graph, and where the
/// batch decides, too: decodes of many keys are planned apart, and of few not.
pub fn mixed_batches() {
    let session = session();
    let small = problem(&LENS, TYPES[0], HEADS[1]);
    let large = Problem {
        batch_invariant: false,
        ..problem(&MANY_KEYS, TYPES[0], (4, 4, 256))
    };
    for (mixed, graph) in [
        (&small, false),
        (&small, true),
        (&large, false),
        (&large, true),
    ] {
        let mixed = Problem {
            graph,
            storage: paged(16, KvLayout::Nhd),
            ..mixed.clone()
        };
        let only = |is_wanted: &dyn Fn(&Request) -> bool| Problem {
            requests: mixed.requests.iter().copied().filter(is_wanted).collect(),
            ..mixed.clone()
        };
        let decodes = only(&|request| request.qo_len <= 2);
        let prompts = only(&|request| request.qo_len > 2);
        let few_decodes = only(&|request| request.qo_len > 2 || request.kv_len < 1950);
        let handle = session.attention(mixed.desc()).unwrap();
        let mut planned = Planned::new(handle, &DeviceMemory, &HostMemory, &mixed).unwrap();
        // Graphs have the page ids where the first plan had them.
        let memories = match graph {
            true => &[ON_HOST][..],
            false => &[ON_HOST, ON_DEVICE],
        };
        for problem in [&mixed, &decodes, &few_decodes, &prompts, &mixed] {
            for memory in memories {
                let got = run_again(&mut planned, *memory, problem);
                assert_right(problem, &got);
            }
        }
    }
}

/// Drafts of 9 to 32 packed rows, and of 33 to 64, alone and with decodes, and where there are enough keys beside prompts: one
/// handle for each batch of some requests.
pub fn mixed_drafts() {
    // Those of the drafts are more than 8192, which have 32 MiB of 16 heads of 128.
    const MANY: [(u32, u32); 7] = [
        (9, 3300),
        (60, 100),
        (10, 3200),
        (1, 1900),
        (9, 2100),
        (0, 7),
        (40, 0),
    ];
    const LONG: [(u32, u32); 8] = [
        (64, 4600),
        (70, 130),
        (33, 4200),
        (1, 1900),
        (9, 300),
        (64, 65),
        (0, 7),
        (40, 0),
    ];
    const FEW: [(u32, u32); 8] = [
        (12, 230),
        (60, 100),
        (9, 220),
        (1, 2000),
        (32, 210),
        (20, 65),
        (0, 7),
        (40, 0),
    ];
    let window = Layer {
        window: Some((100, 0)),
        ..Layer::plain()
    };
    let session = session();
    for (lens, most_rows, types, dim, layer) in [
        (&MANY[..], 32, TYPES[0], 128, Layer::plain()),
        (&FEW, 32, TYPES[1], 72, window.clone()),
        (&FEW, 32, TYPES[2], 96, Layer::plain()),
        (&LONG, 64, TYPES[0], 128, Layer::plain()),
        (&LONG, 64, TYPES[1], 64, window),
    ] {
        let mixed = Problem {
            batch_invariant: false,
            storage: paged(16, KvLayout::Nhd),
            layer,
            ..problem(lens, types, (16, 16, dim))
        };
        let drafts = Problem {
            requests: mixed
                .requests
                .iter()
                .copied()
                .filter(|request| request.qo_len <= most_rows)
                .collect(),
            ..mixed.clone()
        };
        let handle = session.attention(mixed.desc()).unwrap();
        let mut planned = Planned::new(handle, &DeviceMemory, &HostMemory, &mixed).unwrap();
        for problem in [&mixed, &drafts] {
            let got = run_again(&mut planned, ON_HOST, problem);
            assert_right(problem, &got);
        }
    }
}

/// A request has the same bits alone and among others.
pub fn mixed_invariant() {
    let session = session();
    for types in [TYPES[0], TYPES[2]] {
        let problem = Problem {
            storage: paged(16, KvLayout::Nhd),
            ..problem(&LENS, types, HEADS[1])
        };
        let whole = solve_with(&*session, ON_HOST, &problem).unwrap();
        assert_alone_is_the_same(&*session, &problem, &whole);
    }
}
