//! The projections of MLA: every operator against the formula, and what they are for: scores of absorbed queries with
//! latent rows are those of queries with keys.

use crate::common::codec::{encode, rounded};
use crate::common::door::{DOORS, Session};
use crate::common::instance::for_each_index;
use crate::common::memory::{HostMemory, Image, Resident, View};
use crate::common::projections::{Case, Layout, Model, Operator, Values, Weights, grid, rows};
use folio::api::{Stream, Target};
use folio::dtype::DType;
use folio::problem::{AbsorbQArgs, AbsorbWeightsArgs, UpProjectArgs};

const FLOATS: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

fn sessions(target: Target) -> Vec<Box<dyn Session>> {
    let sessions = DOORS.iter().map(|door| door.open(target));
    sessions
        .map(|session| session.expect("a CPU context"))
        .collect()
}

#[test]
fn products_are_what_the_formula_says() {
    let sizes = [
        (0, 3, [64, 64, 128]),
        (1, 3, [8, 16, 24]),
        (7, 1, [64, 40, 72]),
        (5, 3, [24, 64, 128]),
    ];
    for target in [Target::Reference, Target::Cpu { num_threads: 2 }] {
        for session in sessions(target) {
            for case in grid(&FLOATS, &sizes) {
                case.check(&*session, &HostMemory);
            }
        }
    }
}

/// More tokens, columns and depth than the CPU takes at a time, and the widths of models.
#[test]
fn products_of_whole_models_are_what_the_formula_says() {
    let sizes = [
        (1, 2, [128, 128, 512]),
        (65, 1, [128, 256, 512]),
        (3, 128, [64, 64, 128]),
        (523, 1, [64, 64, 64]),
        (70, 2, [64, 72, 648]),
    ];
    for session in sessions(Target::Cpu { num_threads: 2 }) {
        for (n, case) in grid(&FLOATS, &sizes).into_iter().enumerate() {
            // A third of them, in turn: of each layout, order and type some.
            if n % 3 == 0 {
                case.check(&*session, &HostMemory);
            }
        }
    }
}

/// (q_nope · W_UK) · c is q_nope · (W_UKᵀ c), for every query and latent row.
#[test]
fn absorbed_queries_score_latent_rows_as_queries_score_keys() {
    const DTYPE: DType = DType::F32;
    let (tokens, heads, widths) = (6, 3, [128, 128, 512]);
    let [nope, _, latent] = widths;
    let case = Case {
        operator: Operator::AbsorbQ,
        dtype: DTYPE,
        tokens,
        heads,
        widths,
        layout: Layout::Compact,
        weights: Weights::Parts,
    };
    for target in [Target::Reference, Target::Cpu { num_threads: 2 }] {
        for session in sessions(target) {
            let model = Model::new(&HostMemory, &case);
            let of = |seed, view| {
                let values = Values { dtype: DTYPE, seed };
                Resident::new(&HostMemory, values.image(view))
            };
            let view = |width| rows(DTYPE, [tokens, heads, width], Layout::Compact);
            let q_nope = of(1, view(nope));
            let kv_c = of(2, View::compact(DTYPE, &[tokens, latent]));
            let q_latent = Resident::new(&HostMemory, Image::poisoned(view(latent)));
            let k_nope = Resident::new(&HostMemory, Image::poisoned(view(nope)));
            let absorb = AbsorbQArgs {
                q_nope: q_nope.tensor(),
                w_uk: model.w_uk,
                q_latent: q_latent.tensor(),
            };
            let up_project = UpProjectArgs {
                kv_c: kv_c.tensor(),
                w_uk: Some(model.w_uk),
                w_uv: None,
                k_nope: Some(k_nope.tensor()),
                v: None,
            };
            session.absorb_q(&absorb, Stream::default()).unwrap();
            session.up_project(&up_project, Stream::default()).unwrap();
            let (q_nope, kv_c) = (q_nope.image(), kv_c.image());
            let (q_latent, k_nope) = (q_latent.current(), k_nope.current());
            for_each_index(&[tokens, tokens, heads], |at| {
                let [i, j, head] = at else { unreachable!() };
                let dot = |width, a: &dyn Fn(i64) -> f64, b: &dyn Fn(i64) -> f64| {
                    (0..width).map(|d| a(d) * b(d)).sum::<f64>()
                };
                let absorbed = dot(latent, &|l| q_latent.value(&[*i, *head, l]), &|l| {
                    kv_c.value(&[*j, l])
                });
                let plain = dot(nope, &|p| q_nope.value(&[*i, *head, p]), &|p| {
                    k_nope.value(&[*j, *head, p])
                });
                // Terms are about sqrt(128 · 512) = 256 large; either sum has float32's error of its terms.
                assert!(
                    (absorbed - plain).abs() < 1e-2,
                    "{at:?}: {absorbed} {plain}"
                );
            });
        }
    }
}

/// Both halves, or one of them, in every type and any strides.
#[test]
fn weights_are_cut_from_the_up_projection() {
    let (heads, [nope, value, latent]) = (3, [16, 40, 24]);
    let types = [
        (DType::F32, DType::F32),
        (DType::F32, DType::F16),
        (DType::F32, DType::BF16),
        (DType::F16, DType::F16),
        (DType::BF16, DType::BF16),
    ];
    for target in [Target::Reference, Target::Cpu { num_threads: 2 }] {
        for session in sessions(target) {
            for (source, target) in types {
                for (gap, uk, uv) in [(0, true, true), (5, true, false), (3, false, true)] {
                    let values = Values {
                        dtype: source,
                        seed: 9,
                    };
                    let per_head = nope + value;
                    let view = View::gapped(source, &[heads * per_head, latent], &[gap, 0], gap);
                    let kv_b_proj = Resident::new(&HostMemory, values.image(view));
                    let resident = |shape: [i64; 3], strides: [i64; 3]| {
                        let view = View {
                            dtype: target,
                            shape: shape.to_vec(),
                            strides: strides.to_vec(),
                            lead: gap as usize,
                        };
                        Resident::new(&HostMemory, Image::poisoned(view))
                    };
                    let w_uk = resident([heads, nope, latent], [nope * latent, latent, 1]);
                    // As many rows behind one another as W_UV has columns.
                    let w_uv = resident([heads, latent, value], [value * latent, 1, latent]);
                    let args = AbsorbWeightsArgs {
                        kv_b_proj: kv_b_proj.tensor(),
                        w_uk: uk.then(|| w_uk.tensor()),
                        w_uv: uv.then(|| w_uv.tensor()),
                    };
                    session.absorb_weights(&args, Stream::default()).unwrap();
                    let expected =
                        |row: i64, l: i64| encode(target, rounded(source, values.at(&[row, l])));
                    let (mut uk_now, mut uv_now) = (w_uk.current(), w_uv.current());
                    for_each_index(&[heads, nope, latent], |at| {
                        let wanted = expected(at[0] * per_head + at[1], at[2]);
                        assert!(!uk || uk_now.bits(at) == wanted, "w_uk{at:?}");
                        uk_now.put(at, w_uk.image().bits(at));
                    });
                    for_each_index(&[heads, latent, value], |at| {
                        let wanted = expected(at[0] * per_head + nope + at[2], at[1]);
                        assert!(!uv || uv_now.bits(at) == wanted, "w_uv{at:?}");
                        uv_now.put(at, w_uv.image().bits(at));
                    });
                    assert!(uk_now == *w_uk.image() && uv_now == *w_uv.image());
                    assert!(uk || w_uk.is_untouched());
                    assert!(uv || w_uv.is_untouched());
                    assert!(kv_b_proj.is_untouched());
                }
            }
        }
    }
}
