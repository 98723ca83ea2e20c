//! Numbers that are added to logits, which the portable kernels of every type take: all forms of a tensor, lengths on
//! either side, splits, graphs, and tensors that lack what a batch on the device asks for. Against dense attention.

use crate::common::instance::solve;
use crate::common::memory::{HostMemory, Memory};
use crate::common::problem::{
    Alibi, Bias, BiasHeads, Layer, MaskKind, Pattern, Problem, Storage, TableForm,
};
use crate::gpu::{self, DeviceMemory};
use crate::problems::{assert_right, session, solve_with, with_lens};
use crate::steps::{Captured, Slot};
use folio::dtype::DType;
use folio::problem::{Kind, KvLayout};

const FEW: &[(u32, u32)] = &[(1, 700), (3, 130), (0, 40), (2, 1), (4, 4)];
const MANY: &[(u32, u32)] = &[(90, 300), (1, 70), (70, 70), (0, 40), (9, 3), (33, 513)];

const PLAIN: Bias = Bias {
    dtype: DType::F32,
    heads: BiasHeads::Absent,
    request_rows: false,
    new_keys: false,
    transposed: false,
    spare: 0,
    reach: None,
};

/// Every form once, each in another type.
fn forms() -> Vec<Bias> {
    let dtypes = [DType::F32, DType::F16, DType::BF16];
    let heads = [BiasHeads::Absent, BiasHeads::One, BiasHeads::Each];
    (0..24)
        .map(|n| Bias {
            dtype: dtypes[n % 3],
            heads: heads[n / 8],
            request_rows: n & 1 != 0,
            new_keys: n & 2 != 0,
            transposed: n & 4 != 0,
            spare: n as u32 % 4,
            reach: None,
        })
        .collect()
}

fn paged(page_size: u32) -> Storage {
    Storage::Paged {
        page_size,
        layout: KvLayout::Hnd,
        form: TableForm::BlockTable { spare_columns: 1 },
        unused_pages: 2,
        shared_pages: 0,
    }
}

pub fn biases() {
    let session = session();
    let kinds = [
        (Kind::Decode, FEW),
        (Kind::Prefill, MANY),
        (Kind::Prefill, FEW),
    ];
    let types = [
        (DType::BF16, DType::BF16, 128, 16),
        (DType::F16, DType::F16, 64, 8),
        (DType::F16, DType::F8E4M3, 128, 16),
        (DType::BF16, DType::F8E5M2, 256, 5),
        (DType::F32, DType::F32, 128, 16),
        (DType::BF16, DType::BF16, 96, 1),
    ];
    for (number, bias) in forms().into_iter().enumerate() {
        let (kind, lens) = kinds[number % 3];
        let (q, kv, dim, page_size) = types[number / 3 % 6];
        let layer = Layer {
            bias: Some(bias),
            mask: [
                MaskKind::Causal,
                MaskKind::Full,
                MaskKind::Bits(Pattern::Random(0.5)),
            ][number % 5 % 3],
            alibi: (number % 4 == 1).then_some(Alibi::Linear),
            logits_soft_cap: [0.0, 0.0, 20.0][number % 7 % 3],
            sinks: number % 5 == 2,
            ..Layer::plain()
        };
        let problem = Problem {
            kind,
            kv_dtype: kv,
            storage: paged(page_size),
            layer,
            ..Problem::plain(lens)
                .of(q)
                .heads([8, 4, 12][number % 3], 2, dim)
        };
        for memory in [&HostMemory as &dyn Memory, &DeviceMemory] {
            let got = solve_with(&*session, memory, &problem).unwrap();
            assert_right(&problem, &got);
        }
    }
}

/// Parts of a row meet columns far behind the first, and parts that all of them hide.
pub fn biases_of_split_requests() {
    let session = session();
    for (kind, lens) in [
        (Kind::Decode, &[(1, 6000), (2, 3000)][..]),
        (Kind::Prefill, &[(64, 3000), (20, 70)]),
    ] {
        for new_keys in [false, true] {
            let bias = Bias {
                heads: BiasHeads::Each,
                new_keys,
                ..PLAIN
            };
            let problem = Problem {
                kind,
                layer: Layer {
                    bias: Some(bias),
                    ..Layer::plain()
                },
                ..Problem::plain(lens).of(DType::BF16).heads(4, 1, 128)
            };
            let got = solve(&*session, &DeviceMemory, &problem).unwrap();
            assert_right(&problem, &got);
        }
    }
}

/// Where only the device knows lengths, rows and columns that the tensor lacks add nothing.
pub fn biases_beyond_the_tensor() {
    let session = session();
    for dtype in [DType::BF16, DType::F32] {
        for number in 0..8 {
            let bias = Bias {
                heads: [BiasHeads::Absent, BiasHeads::Each][number % 2],
                request_rows: number & 2 != 0,
                new_keys: number & 4 != 0,
                reach: Some([0, 1, 7, 40][number % 4]),
                ..PLAIN
            };
            let problem = Problem {
                storage: paged(16),
                layer: Layer {
                    bias: Some(bias),
                    ..Layer::plain()
                },
                ..Problem::plain(MANY).of(dtype).heads(8, 2, 128)
            };
            let got = solve_with(&*session, &DeviceMemory, &problem).unwrap();
            assert_right(&problem, &got);
        }
    }
}

/// A captured run reads what the tensor holds when it is launched, and serves later plans.
pub fn biases_under_a_graph() {
    let session = session();
    let stream = gpu::new_stream();
    for (request_rows, new_keys) in [(true, true), (false, false)] {
        let problem = Problem {
            graph: true,
            layer: Layer {
                bias: Some(Bias {
                    request_rows,
                    new_keys,
                    ..PLAIN
                }),
                ..Layer::plain()
            },
            ..Problem::plain(&[]).of(DType::BF16).heads(8, 2, 128)
        };
        let largest = with_lens(&problem, &[(40, 400), (17, 390)]);
        let mut slot = Slot::new(session.attention(largest.desc()).unwrap());
        let captured = Captured::of_largest(&mut slot, largest.clone(), stream);
        for tag in [0, 3] {
            let other = largest.with_layer(Layer {
                tag,
                ..largest.layer.clone()
            });
            assert_right(&other, &captured.launch(&other));
        }
        for lens in [&[(3, 300), (1, 1)][..], &[(17, 17)]] {
            let batch = with_lens(&problem, lens);
            assert_right(&batch, &captured.replay(&mut slot, &batch));
        }
        slot.scratch.assert_within_bounds();
    }
}
