//! The grids that the peers test: shapes, windows, caps, masks and lengths of vLLM's, SGLang's and
//! FlashInfer's own unit tests, as far as they fit into a test on a small CPU; the longest lengths and widest
//! batches are cut. Tolerances are ours (`compare`), which are no looser than theirs.

use super::compare::{Tolerance, compare};
use super::dense;
use super::door::Session;
use super::instance::{LayerData, Planned, solve};
use super::memory::{HostMemory, Memory};
use super::problem::{
    Alibi, Bias, BiasHeads, Layer, MaskKind, NAN_QUERIES, Pattern, Problem, Storage, TableForm,
};
use super::random::one_of_grid;
use folio::dtype::DType;
use folio::problem::{Kind, KvLayout};
use std::cell::Cell;

/// Where the grids are run, and which of their cases.
pub struct Place<'a> {
    session: &'a dyn Session,
    memory: &'a dyn Memory,
    /// One case of so many.
    one_of: u32,
    /// Cases so far.
    seen: Cell<u32>,
}

/// Cases of the longest grid, `every_head_dim_and_group_size`.
const MOST_CASES: u32 = 192;

/// A grid.
pub type Grid = fn(&Place<'_>);

impl<'a> Place<'a> {
    /// All cases, unless their number is limited.
    pub fn new(session: &'a dyn Session, memory: &'a dyn Memory) -> Place<'a> {
        Place {
            session,
            memory,
            one_of: one_of_grid(MOST_CASES),
            seen: Cell::new(0),
        }
    }

    /// Whether the next case is one to run.
    fn takes_next(&self) -> bool {
        let seen = self.seen.get();
        self.seen.set(seen + 1);
        seen.is_multiple_of(self.one_of)
    }

    #[track_caller]
    pub fn check(&self, problem: &Problem) {
        if !self.takes_next() {
            return;
        }
        let got = solve(self.session, self.memory, problem).unwrap();
        let tolerance = Tolerance::fast(problem.q_dtype);
        let result = compare(problem, &dense::attention(problem), &got, tolerance);
        assert_eq!(result, Ok(()), "{problem:?}");
    }

    /// Several layers of one batch on one plan.
    #[track_caller]
    fn check_layers(&self, problem: &Problem, layers: impl IntoIterator<Item = Layer>) {
        self.check_layers_within(None, problem, layers);
    }

    /// On a plan for a window.
    #[track_caller]
    fn check_layers_within(
        &self,
        left: Option<u32>,
        problem: &Problem,
        layers: impl IntoIterator<Item = Layer>,
    ) {
        let layers: Vec<Layer> = layers.into_iter().filter(|_| self.takes_next()).collect();
        if layers.is_empty() {
            return;
        }
        let handle = self.session.attention(problem.desc()).unwrap();
        let planned = Planned::within(left, handle, self.memory, &HostMemory, problem).unwrap();
        for layer in layers {
            let problem = problem.with_layer(layer);
            let got = planned.run(&LayerData::new(self.memory, &problem)).unwrap();
            let tolerance = Tolerance::fast(problem.q_dtype);
            let result = compare(&problem, &dense::attention(&problem), &got, tolerance);
            assert_eq!(result, Ok(()), "{problem:?}");
        }
    }
}

/// All of them, by name.
pub const GRIDS: [(&str, Grid); 14] = [
    ("unified_attention", unified_attention),
    ("unified_attention_over_fp8", unified_attention_over_fp8),
    ("encoder_attention", encoder_attention),
    ("cross_attention", cross_attention),
    ("named_batches", named_batches),
    ("batch_decode", batch_decode),
    ("batch_prefill", batch_prefill),
    ("sliding_windows", sliding_windows),
    ("caps_and_alibi", caps_and_alibi),
    ("score_biases", score_biases),
    ("sinks", sinks),
    ("draft_trees", draft_trees),
    ("nan_queries", nan_queries),
    (
        "every_head_dim_and_group_size",
        every_head_dim_and_group_size,
    ),
];

/// A page table as a runtime has it: shuffled, with pages of others between.
fn block_table(page_size: u32) -> Storage {
    Storage::Paged {
        page_size,
        layout: KvLayout::Nhd,
        form: TableForm::BlockTable { spare_columns: 2 },
        unused_pages: 7,
        shared_pages: 0,
    }
}

fn uniform(batch_size: usize, qo_len: u32, kv_len: u32) -> Vec<(u32, u32)> {
    vec![(qo_len, kv_len); batch_size]
}

fn window(left: i32, right: i32) -> Layer {
    Layer {
        window: Some((left, right)),
        ..Layer::plain()
    }
}

/// vLLM `test_triton_unified_attention.py`.
fn unified_attention(place: &Place<'_>) {
    let prefill = [(1, 1328), (5, 18), (129, 463)];
    let decode = [(1, 523), (1, 37), (1, 2011)];
    for (lens, head_dim) in [(&prefill[..], 128), (&decode[..], 128), (&decode[..], 256)] {
        for (num_qo_heads, num_kv_heads) in [(4, 4), (8, 2), (5, 1)] {
            let problem =
                Problem::plain(lens)
                    .of(DType::BF16)
                    .heads(num_qo_heads, num_kv_heads, head_dim);
            let problem = Problem {
                storage: block_table(16),
                ..problem
            };
            let capped = |cap| Layer {
                logits_soft_cap: cap,
                ..Layer::plain()
            };
            let windowed = Layer {
                logits_soft_cap: 50.0,
                ..window(128, 0)
            };
            place.check_layers(
                &problem,
                [capped(0.0), capped(50.0), window(64, 0), windowed],
            );
        }
    }
}

/// The same with an fp8 cache and scales.
fn unified_attention_over_fp8(place: &Place<'_>) {
    for kv_dtype in [DType::F8E4M3, DType::F8E5M2] {
        for lens in [
            &[(1, 328), (5, 18), (29, 163)][..],
            &[(1, 523), (1, 37), (1, 511)],
        ] {
            let mut problem = Problem::plain(lens).of(DType::BF16).heads(8, 2, 128);
            problem.kv_dtype = kv_dtype;
            problem.storage = block_table(16);
            problem.layer.k_scale = 0.5;
            problem.layer.v_scale = 0.25;
            place.check(&problem);
            problem.o_dtype = DType::F8E4M3;
            problem.layer.o_scale = 0.05;
            place.check(&problem);
        }
    }
}

/// vLLM `test_triton_prefill_attention.py`: no past, causal, bidirectional, two-sided windows.
fn encoder_attention(place: &Place<'_>) {
    let lens: Vec<(u32, u32)> = [64, 71, 96, 103, 128].map(|n| (n, n)).to_vec();
    for dtype in [DType::F32, DType::BF16] {
        for num_kv_heads in [8, 2] {
            let problem = Problem {
                storage: Storage::Ragged,
                ..Problem::plain(&lens).of(dtype).heads(8, num_kv_heads, 128)
            };
            let full = |layer: Layer| Layer {
                mask: MaskKind::Full,
                ..layer
            };
            let windows = [(32, 32), (32, 0), (0, 32), (-1, -1)];
            let bidirectional = windows.map(|(left, right)| full(window(left, right)));
            place.check_layers(&problem, [Layer::plain()].into_iter().chain(bidirectional));
        }
    }
}

/// Cross attention: rows and keys are of different sequences, every row sees every key.
fn cross_attention(place: &Place<'_>) {
    let mut problem = Problem::plain(&[(7, 100), (64, 30), (1, 57)]).of(DType::F16);
    problem.layer.mask = MaskKind::Full;
    place.check(&problem);
    problem.storage = Storage::Ragged;
    place.check(&problem);
}

/// vLLM `test_attention_backends.py`: the named batches, Llama-3-8B heads.
fn named_batches(place: &Place<'_>) {
    let rows = |kv: &[u32], qo: &[u32]| -> Vec<(u32, u32)> {
        kv.iter()
            .zip(qo.iter().cycle())
            .map(|(&kv, &qo)| (qo, kv))
            .collect()
    };
    for lens in [
        rows(&[32, 40], &[1]),
        rows(&[32, 40], &[8]),
        rows(&[32, 40, 48, 56], &[1, 1, 5, 5]),
        rows(&[128, 256, 512, 1024], &[1]),
        rows(&[256, 512], &[16]),
        rows(&[512, 1024, 2048], &[1, 1, 7]),
        rows(&[1024], &[1]),
        rows(&[512], &[64]),
    ] {
        let problem = Problem {
            storage: block_table(16),
            ..Problem::plain(&lens).of(DType::BF16).heads(32, 8, 128)
        };
        place.check(&problem);
    }
}

/// FlashInfer `test_batch_decode_kernels.py`.
fn batch_decode(place: &Place<'_>) {
    for (batch_size, kv_len, page_size) in [(12, 54, 1), (17, 97, 8), (2, 1024, 16)] {
        for (num_qo_heads, head_dim) in [(32, 128), (4, 256)] {
            for kv_dtype in [DType::F16, DType::F8E4M3] {
                let problem = Problem::plain(&uniform(batch_size, 1, kv_len));
                let problem = problem.of(DType::F16).heads(num_qo_heads, 4, head_dim);
                place.check(&Problem {
                    kind: Kind::Decode,
                    uniform_rows: true,
                    kv_dtype,
                    storage: Storage::paged(page_size),
                    ..problem
                });
            }
        }
    }
}

/// FlashInfer `test_batch_prefill_kernels.py`, with a custom mask that repeats the causal one.
fn batch_prefill(place: &Place<'_>) {
    for (qo_len, kv_len, page_size) in [(37, 54, 1), (17, 97, 5), (127, 312, 16), (37, 37, 16)] {
        for (num_qo_heads, num_kv_heads, head_dim) in [(4, 4, 128), (8, 1, 256)] {
            let problem = Problem::plain(&uniform(2, qo_len, kv_len))
                .of(DType::F16)
                .heads(num_qo_heads, num_kv_heads, head_dim);
            let problem = Problem {
                storage: Storage::paged(page_size),
                ..problem
            };
            let masked = |mask| Layer {
                mask,
                ..Layer::plain()
            };
            let capped = Layer {
                logits_soft_cap: 30.0,
                ..masked(MaskKind::Full)
            };
            let causal = [
                MaskKind::Causal,
                MaskKind::Bytes(Pattern::Causal),
                MaskKind::Bits(Pattern::Causal),
            ];
            place.check_layers(&problem, causal.map(masked).into_iter().chain([capped]));
        }
    }
}

/// FlashInfer `test_sliding_window.py`.
fn sliding_windows(place: &Place<'_>) {
    for (qo_len, kv_len) in [(1, 1), (1, 199), (37, 54), (47, 397), (1, 1999)] {
        for (num_qo_heads, num_kv_heads, head_dim) in [(4, 1, 64), (4, 4, 128), (4, 2, 256)] {
            let problem = Problem::plain(&uniform(2, qo_len, kv_len))
                .of(DType::F16)
                .heads(num_qo_heads, num_kv_heads, head_dim);
            let windows = [0, 13, 33, 111, 533];
            place.check_layers(&problem, windows.map(|left| window(left, 0)));
            place.check_layers_within(Some(533), &problem, windows.map(|left| window(left, 0)));
        }
    }
}

/// FlashInfer `test_logits_cap.py` and `test_alibi.py`.
fn caps_and_alibi(place: &Place<'_>) {
    for (qo_len, kv_len) in [
        (1, 1),
        (1, 9),
        (1, 81),
        (1, 729),
        (17, 17),
        (81, 81),
        (17, 987),
    ] {
        for dtype in [DType::F16, DType::F32] {
            let problem = Problem::plain(&[(qo_len, kv_len)])
                .of(dtype)
                .heads(8, 4, 128);
            let capped = [1.0, 30.0, 50.0].map(|logits_soft_cap| Layer {
                logits_soft_cap,
                ..Layer::plain()
            });
            let biased = [Alibi::Linear, Alibi::Sqrt].map(|alibi| Layer {
                alibi: Some(alibi),
                ..Layer::plain()
            });
            place.check_layers(&problem, capped.into_iter().chain(biased));
        }
    }
}

/// vLLM's qq_bias, and biases over all keys, of one row per KV head up to tiles of many.
fn score_biases(place: &Place<'_>) {
    for (qo_len, kv_len, heads) in [
        (1, 729, (8, 4)),
        (5, 133, (4, 4)),
        (7, 300, (32, 2)),
        (81, 81, (8, 4)),
        (70, 987, (6, 2)),
    ] {
        for dtype in [DType::F16, DType::BF16, DType::F32] {
            let lens = [(qo_len, kv_len), (1, 40), (0, 9), (3, 2)];
            let problem = Problem {
                storage: block_table(8),
                ..Problem::plain(&lens).of(dtype).heads(heads.0, heads.1, 64)
            };
            let qq_bias = Bias {
                dtype: DType::F32,
                heads: BiasHeads::Absent,
                request_rows: true,
                new_keys: true,
                transposed: false,
                spare: 0,
                reach: None,
            };
            let of_heads = Bias {
                dtype,
                heads: BiasHeads::Each,
                request_rows: false,
                new_keys: false,
                spare: 3,
                ..qq_bias
            };
            let transposed = Bias {
                heads: BiasHeads::One,
                transposed: true,
                ..of_heads
            };
            let with = |bias, mask| Layer {
                bias: Some(bias),
                mask,
                ..Layer::plain()
            };
            let capped = Layer {
                logits_soft_cap: 20.0,
                alibi: Some(Alibi::Linear),
                sinks: true,
                ..with(of_heads, MaskKind::Full)
            };
            place.check_layers(
                &problem,
                [
                    with(qq_bias, MaskKind::Causal),
                    with(of_heads, MaskKind::Causal),
                    with(transposed, MaskKind::Bits(Pattern::Random(0.5))),
                    capped,
                ],
            );
        }
    }
}

/// FlashInfer `test_attention_sink.py`.
fn sinks(place: &Place<'_>) {
    for (batch_size, len) in [(1, 1), (4, 4), (4, 16), (2, 128)] {
        for num_kv_heads in [8, 32] {
            for dtype in [DType::F16, DType::BF16] {
                let problem = Problem {
                    storage: block_table(1),
                    ..Problem::plain(&uniform(batch_size, len.min(33), len))
                        .of(dtype)
                        .heads(32, num_kv_heads, 64)
                };
                let layers = [MaskKind::Causal, MaskKind::Full].map(|mask| Layer {
                    mask,
                    sinks: true,
                    ..window(32, -1)
                });
                place.check_layers(&problem, layers);
            }
        }
    }
}

/// SGLang's extend and speculative verify: a draft tree behind a past.
fn draft_trees(place: &Place<'_>) {
    for dtype in [DType::F16, DType::BF16] {
        for head_dim in [256, 128, 96, 80] {
            let lens = [(8, 13), (8, 18), (64, 164), (1, 70), (16, 16)];
            let problem = Problem::plain(&lens).of(dtype).heads(12, 4, head_dim);
            let trees = [
                MaskKind::Bytes(Pattern::Tree),
                MaskKind::Bits(Pattern::Tree),
            ];
            place.check_layers(
                &problem,
                trees.map(|mask| Layer {
                    mask,
                    ..Layer::plain()
                }),
            );
        }
    }
}

/// Every head dimension and every group size once, with other dimensions for keys than for values.
fn every_head_dim_and_group_size(place: &Place<'_>) {
    for n in 1..=32 {
        let group_size = (n - 1) % 16 + 1;
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            let mut problem = Problem::plain(&[(1, 70), (6, 40), (18, 33)]).of(dtype);
            problem.group_size = group_size;
            problem.head_dim_qk = 8 * n;
            problem.head_dim_vo = 8 * n;
            place.check(&problem);
            problem.head_dim_vo = 8 * (33 - n);
            place.check(&problem);
        }
    }
}

/// A request with NaN in its queries has NaN in all of its results, split or not, and the others have not.
fn nan_queries(place: &Place<'_>) {
    let decode = [(1, 2000), (1, 37), (1, 700)];
    let prefill = [(5, 900), (40, 463), (3, 4)];
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        for (kind, lens) in [
            (Kind::Decode, &decode[..]),
            (Kind::Decode, &decode[..1]),
            (Kind::Prefill, &prefill[..]),
        ] {
            for group_size in [1, 4] {
                let problem = Problem::plain(lens).of(dtype).heads(2 * group_size, 2, 128);
                let mut problem = Problem { kind, ..problem };
                problem.requests[0].tag = NAN_QUERIES;
                let plain = Layer::plain;
                let layers = [
                    plain(),
                    window(100, 0),
                    Layer {
                        sinks: true,
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
                        mask: MaskKind::Bytes(Pattern::Causal),
                        ..plain()
                    },
                ];
                place.check_layers(&problem, layers);
            }
        }
    }
}
