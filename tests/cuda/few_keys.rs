//! Batches whose requests have few keys, which Hopper takes in tiles of one warpgroup: by handles for no others, and by
//! handles for any that see such a batch between others. And requests of many keys, of which a window leaves few to a tile.

use crate::common::instance::{LayerData, Planned};
use crate::common::memory::{HostMemory, Memory};
use crate::common::problem::{Alibi, Layer, MaskKind, Pattern, Problem, Storage};
use crate::gpu::DeviceMemory;
use crate::problems::{assert_right, session};
use folio::dtype::DType;

/// Lengths of more requests than run at a time: rows, which are the last of so many keys.
fn requests(most_keys: u32) -> Vec<(u32, u32)> {
    (0..40)
        .map(|b| {
            let keys = 1 + b * 37 % most_keys;
            (keys.div_ceil(1 + b % 3), keys)
        })
        .collect()
}

fn layers() -> [Layer; 7] {
    let plain = Layer::plain;
    [
        plain(),
        Layer {
            mask: MaskKind::Full,
            sinks: true,
            ..plain()
        },
        Layer {
            mask: MaskKind::Full,
            window: Some((20, 30)),
            ..plain()
        },
        Layer {
            logits_soft_cap: 30.0,
            ..plain()
        },
        Layer {
            alibi: Some(Alibi::Linear),
            ..plain()
        },
        Layer {
            mask: MaskKind::Bits(Pattern::Random(0.7)),
            sinks: true,
            ..plain()
        },
        Layer {
            mask: MaskKind::CausalByRequest,
            alibi: Some(Alibi::Sqrt),
            alibi_by_request: true,
            window: Some((40, 20)),
            ..plain()
        },
    ]
}

/// Every width, in pages of any size and without, and a group of heads, over elements of 16 bits and of fp8. A graph's handle has
/// the same tiles.
pub fn few_keys() {
    let session = session();
    let storages = [
        Storage::Ragged,
        Storage::paged(16),
        Storage::paged(1),
        Storage::paged(3),
    ];
    let mut n = 0;
    for (heads, dim, most_keys) in [
        ((6, 6), 64, 190),
        ((8, 2), 64, 300),
        ((5, 5), 40, 100),
        ((5, 5), 72, 120),
        ((6, 2), 128, 250),
        ((4, 4), 128, 130),
        ((6, 2), 120, 110),
    ] {
        for (layer, cached) in layers().into_iter().flat_map(|layer| {
            [None, Some(DType::F8E4M3), None].map(|cached| (layer.clone(), cached))
        }) {
            let q_dtype = [DType::BF16, DType::F16][n / 4 % 2];
            let problem = Problem {
                storage: storages[n % 4],
                layer,
                graph: n % 5 == 2,
                kv_dtype: cached.unwrap_or(q_dtype),
                ..Problem::plain(&requests(most_keys))
                    .of(q_dtype)
                    .heads(heads.0, heads.1, dim)
            };
            let lengths: &dyn Memory = match n % 7 {
                6 => &DeviceMemory,
                _ => &HostMemory,
            };
            let handle = session.attention(problem.desc()).unwrap();
            let planned = Planned::new(handle, &DeviceMemory, lengths, &problem).unwrap();
            let got = planned.run(&LayerData::new(&DeviceMemory, &problem));
            assert_right(&problem, &got.unwrap());
            n += 1;
        }
    }
}

/// One handle's plans, of few keys and of many by turns.
pub fn few_keys_between_many() {
    let session = session();
    for (dim, most_keys, page_size, kv_dtype) in [
        (64, 200, 16, DType::BF16),
        (128, 140, 1, DType::BF16),
        (80, 90, 16, DType::BF16),
        (64, 200, 1, DType::F8E4M3),
        (128, 140, 16, DType::F8E4M3),
        (80, 90, 16, DType::F8E5M2),
    ] {
        for layer in layers() {
            let of = |lens: &[(u32, u32)]| Problem {
                layer: layer.clone(),
                storage: Storage::paged(page_size),
                kv_dtype,
                ..Problem::plain(lens).of(DType::BF16).heads(6, 2, dim)
            };
            let few = requests(most_keys);
            let many = [(300, 2100), (1, 700), (190, 190), (65, 1500)];
            let handle = session
                .attention(of(&[&few[..], &many[..]].concat()).desc())
                .unwrap();
            let (few, many) = (of(&few), of(&many));
            let mut planned = Planned::new(handle, &DeviceMemory, &HostMemory, &few).unwrap();
            for problem in [&few, &many, &few] {
                planned.replan(&HostMemory, problem).unwrap();
                let got = planned.run(&LayerData::new(&DeviceMemory, problem));
                assert_right(problem, &got.unwrap());
            }
        }
    }
}

/// Requests of many keys within a window that the plan knows, and then by a plan that does not. What a full mask leaves on the right
/// of a row is the window's for some layers, and all keys for others.
pub fn few_keys_in_windows() {
    let session = session();
    let lens = [
        (1, 3000),
        (700, 2500),
        (90, 90),
        (20, 1111),
        (1, 1),
        (333, 5000),
    ];
    for (heads, dim, page_size, kv_dtype) in [
        ((8, 1), 64, 16, DType::BF16),
        ((6, 2), 64, 1, DType::BF16),
        ((14, 2), 64, 64, DType::F8E4M3),
        ((8, 2), 128, 16, DType::BF16),
        ((4, 4), 128, 3, DType::F8E4M3),
        ((6, 2), 80, 16, DType::BF16),
    ] {
        for (mask, window) in [
            (MaskKind::Causal, (100, -1)),
            (MaskKind::Full, (40, 30)),
            (MaskKind::Full, (60, -1)),
            (MaskKind::Bits(Pattern::Random(0.7)), (50, 10)),
        ] {
            let problem = Problem {
                layer: Layer {
                    mask,
                    window: Some(window),
                    sinks: true,
                    ..Layer::plain()
                },
                storage: Storage::paged(page_size),
                kv_dtype,
                ..Problem::plain(&lens)
                    .of(DType::BF16)
                    .heads(heads.0, heads.1, dim)
            };
            let handle = session.attention(problem.desc()).unwrap();
            let left = problem.window_to_plan_for();
            assert!(left.is_some());
            let mut planned =
                Planned::within(left, handle, &DeviceMemory, &HostMemory, &problem).unwrap();
            let layer = LayerData::new(&DeviceMemory, &problem);
            assert_right(&problem, &planned.run(&layer).unwrap());
            planned.replan(&HostMemory, &problem).unwrap();
            assert_right(&problem, &planned.run(&layer).unwrap());
        }
    }
}
