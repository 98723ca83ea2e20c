//! Attention over a cache and new keys beside it: both backends of this machine, through both doors, over random problems.
//! What each must come to is computed in `common::dense`, which sees one list of keys.

use crate::common::compare::{Tolerance, compare};
use crate::common::dense;
use crate::common::door::{DOORS, Door, RustDoor, Session};
use crate::common::instance::{LayerData, Output, Planned, solve};
use crate::common::memory::HostMemory;
use crate::common::problem::{
    Alibi, Bias, BiasHeads, HeadScales, Layer, MaskKind, Pattern, Problem, TableForm,
};
use crate::common::random;
use crate::common::strategy::extends;
use folio::api::Target;
use folio::dtype::DType;
use folio::problem::MaskColumns;
use proptest::prelude::*;

const CPU: Target = Target::Cpu { num_threads: 2 };

fn open(door: &dyn Door, target: Target) -> Box<dyn Session> {
    door.open(target).expect("a CPU context")
}

fn check(session: &dyn Session, problem: &Problem, tolerance: Tolerance) -> Result<(), String> {
    let got = solve(session, &HostMemory, problem).map_err(|error| error.to_string())?;
    let tolerance = tolerance.of_parts(problem);
    compare(problem, &dense::attention(problem), &got, tolerance)
}

proptest! {
    #![proptest_config(random::cases(200))]

    #[test]
    fn the_oracle_agrees_with_dense_attention(problem in extends()) {
        let session = open(&RustDoor, Target::Reference);
        let result = check(&*session, &problem, Tolerance::oracle());
        prop_assert_eq!(result, Ok(()));
    }

    #[test]
    fn the_cpu_agrees_with_dense_attention(problem in extends()) {
        for door in DOORS {
            let session = open(door, CPU);
            let tolerance = Tolerance::fast(problem.q_dtype);
            let result = check(&*session, &problem, tolerance);
            prop_assert!(result.is_ok(), "{} door: {}", door.name(), result.unwrap_err());
        }
    }
}

#[track_caller]
fn check_on_cpu(problem: &Problem) {
    for door in DOORS {
        let tolerance = Tolerance::fast(problem.q_dtype);
        let result = check(&*open(door, CPU), problem, tolerance);
        assert_eq!(result, Ok(()), "{} door: {problem:?}", door.name());
    }
}

/// Prefixes that end within a page and at its end, prompts without one, and a request without rows.
const LENS: [(u32, u32); 6] = [(70, 400), (33, 33), (1, 513), (0, 40), (9, 73), (48, 64)];

/// Of each request's rows, over all keys or the new ones.
fn bias(heads: BiasHeads, new_keys: bool) -> Option<Bias> {
    Some(Bias {
        dtype: DType::F32,
        heads,
        request_rows: new_keys,
        new_keys,
        transposed: false,
        spare: 1,
        reach: None,
    })
}

/// Each thing that positions count for, with new keys that do not begin on a block of a kernel.
#[test]
fn positions_are_those_among_all_keys() {
    let plain = Layer::plain();
    let layers = [
        Layer {
            window: Some((37, 5)),
            mask: MaskKind::Full,
            ..plain.clone()
        },
        Layer {
            chunks: Some((50, 1)),
            ..plain.clone()
        },
        Layer {
            mm_prefix_ranges: 3,
            ..plain.clone()
        },
        Layer {
            alibi: Some(Alibi::Sqrt),
            alibi_by_request: true,
            ..plain.clone()
        },
        Layer {
            mask: MaskKind::Bits(Pattern::Random(0.4)),
            ..plain.clone()
        },
        Layer {
            mask: MaskKind::Bytes(Pattern::Tree),
            mask_columns: MaskColumns::NewKeys,
            masks_apart: true,
            ..plain.clone()
        },
        Layer {
            mask: MaskKind::Bits(Pattern::Tree),
            mask_columns: MaskColumns::KeysAfterPrefix,
            ..plain.clone()
        },
        Layer {
            mask: MaskKind::Items,
            ..plain.clone()
        },
        Layer {
            bias: bias(BiasHeads::Each, false),
            ..plain.clone()
        },
        Layer {
            bias: bias(BiasHeads::Absent, true),
            ..plain.clone()
        },
        Layer {
            mask: MaskKind::CausalByRequest,
            sinks: true,
            logits_soft_cap: 20.0,
            ..plain
        },
    ];
    for layer in layers {
        for dtype in [DType::F32, DType::BF16] {
            let problem = Problem::plain(&LENS).of(dtype).extend(dtype);
            check_on_cpu(&problem.with_layer(layer.clone()));
        }
    }
}

/// The lse of the parts stay float32 where the caller's has 16 bits.
#[test]
fn an_lse_of_16_bits() {
    for lse_dtype in [DType::F16, DType::BF16] {
        let layer = Layer {
            lse_dtype,
            ..Layer::plain()
        };
        for lens in [&LENS[..], &[(33, 33), (5, 5)]] {
            for dtype in [DType::F32, DType::BF16] {
                let problem = Problem::plain(lens).of(dtype).extend(dtype);
                check_on_cpu(&problem.with_layer(layer.clone()));
            }
        }
    }
}

/// The cache's scales are not the new keys', and types may differ.
#[test]
fn new_keys_have_a_type_of_their_own_and_no_scales() {
    let layer = Layer {
        k_scale: 0.5,
        v_scale: 3.0,
        k_scales: HeadScales::PerHead,
        v_scales: HeadScales::PerHead,
        ..Layer::plain()
    };
    for (q_dtype, kv_dtype, new_kv) in [
        (DType::BF16, DType::F8E4M3, DType::BF16),
        (DType::BF16, DType::BF16, DType::F8E5M2),
        (DType::F32, DType::F8E5M2, DType::F32),
        (DType::F8E4M3, DType::F8E4M3, DType::F8E5M2),
    ] {
        let problem = Problem {
            q_dtype,
            kv_dtype,
            o_dtype: if q_dtype.is_fp8() {
                DType::BF16
            } else {
                q_dtype
            },
            layer: layer.clone(),
            ..Problem::plain(&LENS)
        };
        check_on_cpu(&problem.clone().extend(new_kv));
        // An output in fp8 is of states in another type.
        let mut problem = Problem {
            o_dtype: DType::F8E4M3,
            ..problem
        };
        problem.layer.o_scale = 0.02;
        check_on_cpu(&problem.extend(new_kv));
    }
}

/// A batch without a cache takes one pass; the plan before or after it does not show. Pages are none then.
#[test]
fn batches_without_a_cache_and_with_one_take_turns() {
    let with = Problem::plain(&LENS).extend(DType::F32);
    let without = Problem::plain(&[(70, 70), (33, 33), (5, 5)]).extend(DType::F32);
    let session = open(&RustDoor, CPU);
    let handle = session.attention(with.desc()).expect("a handle");
    let mut planned = Planned::new(handle, &HostMemory, &HostMemory, &with).expect("a plan");
    for problem in [&without, &with, &without] {
        planned.replan(&HostMemory, problem).expect("a plan");
        let got = planned.run(&LayerData::new(&HostMemory, problem));
        let want = dense::attention(problem);
        let tolerance = Tolerance::fast(DType::F32).of_parts(problem);
        let got: Output = got.expect("a run");
        assert_eq!(compare(problem, &want, &got, tolerance), Ok(()));
    }
}

/// A request is computed alike in every batch, where that is asked for.
#[test]
fn batch_invariant_results_do_not_depend_on_the_batch() {
    let mut all = Problem::plain(&[(70, 3400), (33, 33), (1, 2513), (9, 73)])
        .of(DType::BF16)
        .extend(DType::BF16);
    all.batch_invariant = true;
    let session = open(&RustDoor, CPU);
    let together = solve(&*session, &HostMemory, &all).expect("a run");
    let dim = (all.num_qo_heads() * all.head_dim_vo) as usize;
    for b in 0..all.requests.len() {
        let mut one = all.alone(b);
        // The same chunks.
        one.slack = true;
        let mut desc = one.desc();
        desc.max_kv_len = all.desc().max_kv_len;
        desc.max_qo_len = all.desc().max_qo_len;
        desc.max_num_tokens = all.desc().max_num_tokens;
        let handle = session.attention(desc).expect("a handle");
        let planned = Planned::new(handle, &HostMemory, &HostMemory, &one).expect("a plan");
        let alone = planned
            .run(&LayerData::new(&HostMemory, &one))
            .expect("a run");
        let rows = all.qo_indptr()[b] as usize * dim..all.qo_indptr()[b + 1] as usize * dim;
        assert!(alone.o == together.o[rows], "request {b}");
    }
}

/// The tables of every form say where the cached keys are, and nothing of the new ones.
#[test]
fn every_form_of_page_table() {
    use crate::common::problem::Storage;
    use folio::problem::KvLayout;
    let forms = [
        (16, TableForm::CsrLastPageLen),
        (16, TableForm::CsrKvLen { spare_pages: 1 }),
        (5, TableForm::BlockTable { spare_columns: 2 }),
        (1, TableForm::TokenSlots),
    ];
    for (page_size, form) in forms {
        let mut problem = Problem::plain(&LENS).of(DType::F16).extend(DType::F16);
        problem.storage = Storage::Paged {
            page_size,
            layout: KvLayout::Nhd,
            form,
            unused_pages: 3,
            shared_pages: 1,
        };
        check_on_cpu(&problem);
    }
}
