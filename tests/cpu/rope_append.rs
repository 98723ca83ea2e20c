//! Norm, RoPE and append of new tokens: every output by the formulas, and that no other byte changes.

use crate::common::append_run::{AppendRun, append_runs};
use crate::common::codec::encode;
use crate::common::door::{DOORS, Session};
use crate::common::instance::for_each_index;
use crate::common::memory::{HostMemory, Image, Resident, View};
use crate::common::random;
use crate::common::rope_append::{MAX_POSITION, RopeAppend, Rotation, Source};
use crate::common::rope_append_forms::appends_in_forms;
use crate::common::values::{mix, normal};
use folio::api::{Stream, Target};
use folio::dtype::DType;
use folio::problem::{
    Angles, AppendArgs, CacheForm, Frequencies, KvLayout, Llama3Scaling, Norm, Rope, RopeAppendArgs,
};
use folio::tensor::Tensor;
use proptest::prelude::*;

const LLAMA_3_1: Frequencies = Frequencies {
    theta: 5e5,
    scale: 8.0,
    llama3: Some(Llama3Scaling {
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        old_context_len: 8192,
    }),
};

const PLAIN: Frequencies = Frequencies {
    theta: 1e4,
    scale: 0.0,
    llama3: None,
};

fn sources() -> impl Strategy<Value = Source> {
    let linear = Frequencies {
        theta: 1e6,
        scale: 4.0,
        llama3: None,
    };
    prop_oneof![
        3 => any::<[bool; 2]>().prop_map(|[is_f32, planes]| Source::Table { is_f32, planes }),
        1 => Just(Source::Computed(PLAIN)),
        1 => Just(Source::Computed(linear)),
        1 => Just(Source::Computed(LLAMA_3_1)),
    ]
}

/// Of rows of so many elements, all or a part of them.
fn rotations(dim: i64) -> impl Strategy<Value = Option<Rotation>> {
    let dims = vec![dim / 2 * 2, dim / 4 * 2, (dim / 2).min(8) * 2, 2];
    let rotation = (sources(), prop::sample::select(dims), any::<[bool; 3]>());
    let rotation = rotation.prop_map(|(source, rotary_dim, flags)| Rotation {
        source,
        rotary_dim: rotary_dim.max(2),
        is_interleaved: flags[0],
        with_offsets: flags[1],
        wide_positions: flags[2],
    });
    prop_oneof![5 => rotation.prop_map(Some), 1 => Just(None)]
}

fn appends() -> impl Strategy<Value = RopeAppend> {
    let float = prop::sample::select(vec![DType::F32, DType::F16, DType::BF16]);
    let fp8 = prop::sample::select(vec![None, Some(DType::F8E4M3), Some(DType::F8E5M2)]);
    let dims = prop::sample::select(vec![128i64, 64, 8, 72, 256, 13, 80, 512, 5, 300]);
    let queries = prop::option::of((0i64..9, 0i64..4, any::<bool>()));
    let shape = (1i64..5, dims.clone(), prop::option::of(dims));
    let pages = (prop::sample::select(vec![16i64, 1, 3]), 1i64..6);
    let gap = || prop_oneof![2 => Just(0u32), 1 => Just(8), 1 => 1u32..9];
    let scale = prop_oneof![1 => Just(0.0f32), 2 => 0.01f32..4.0, 1 => -2.0f32..-0.1];
    (
        (float, fp8, any::<[bool; 3]>()),
        (queries, shape, pages),
        (0i64..25, 0i64..3),
        (scale, any::<Option<bool>>()),
        (any::<[Option<bool>; 2]>(), any::<Option<bool>>()),
        [gap(), gap(), gap()],
        any::<u64>(),
    )
        .prop_flat_map(
            |(types, (queries, shape, pages), tokens, scales, (norms, key_out), gaps, seed)| {
                let (source, fp8, flags) = types;
                let append = RopeAppend {
                    source,
                    cache: fp8.unwrap_or(source),
                    as_bytes: fp8.is_some() && flags[0],
                    queries,
                    heads: shape.0,
                    dim: shape.1,
                    dim_vo: shape.2.unwrap_or(shape.1),
                    page_size: pages.0,
                    num_pages: pages.1,
                    layout: if flags[1] {
                        KvLayout::Nhd
                    } else {
                        KvLayout::Hnd
                    },
                    num_tokens: tokens.0,
                    padded_rows: tokens.1,
                    wide_slots: flags[2],
                    scale: fp8.map_or(0.0, |_| scales.0),
                    scales: fp8.and(scales.1),
                    norms: [norms[0].filter(|_| queries.is_some()), norms[1]],
                    rotation: None,
                    key_out,
                    gaps,
                    seed,
                };
                rotations(append.dim).prop_map(move |rotation| RopeAppend {
                    rotation,
                    ..append.clone()
                })
            },
        )
}

fn sessions() -> Vec<Box<dyn Session>> {
    let targets = [Target::Reference, Target::Cpu { num_threads: 2 }];
    let pairs = DOORS
        .iter()
        .flat_map(|door| targets.map(|target| door.open(target)));
    pairs
        .map(|session| session.expect("a CPU context"))
        .collect()
}

proptest! {
    #![proptest_config(random::cases(300))]

    #[test]
    fn rows_are_those_of_the_formulas(append in appends()) {
        for session in sessions() {
            let got = append.run(&*session, &HostMemory).unwrap();
            prop_assert_eq!(append.check(&got), Ok(()));
        }
    }
}

proptest! {
    #![proptest_config(random::cases(200))]

    #[test]
    fn caches_of_other_forms_get_the_bytes_of_two_steps(append in appends_in_forms()) {
        for session in sessions() {
            prop_assert_eq!(append.check(&*session, &HostMemory), Ok(()));
        }
    }
}

/// Enough tokens for several pieces of work.
#[test]
fn many_tokens() {
    for (source, cache) in [(DType::BF16, DType::F8E4M3), (DType::F32, DType::F32)] {
        let append = RopeAppend {
            source,
            cache,
            as_bytes: false,
            queries: Some((16, 3, true)),
            heads: 4,
            dim: 128,
            dim_vo: 128,
            page_size: 16,
            num_pages: 12,
            layout: KvLayout::Nhd,
            num_tokens: 200,
            padded_rows: 0,
            wide_slots: true,
            scale: 0.0,
            scales: None,
            norms: [Some(true), Some(false)],
            rotation: Some(Rotation {
                source: Source::Computed(LLAMA_3_1),
                rotary_dim: 128,
                is_interleaved: false,
                with_offsets: false,
                wide_positions: true,
            }),
            key_out: None,
            gaps: [0; 3],
            seed: 5,
        };
        for session in sessions() {
            let got = append.run(&*session, &HostMemory).unwrap();
            assert_eq!(append.check(&got), Ok(()));
        }
    }
}

/// One token by hand: a quarter turn of the pair, between two others that stay.
#[test]
fn golden_row() {
    let row = |values: &[f32]| Resident::new(&HostMemory, Image::of_f32(&[1, 1, 6], values));
    let table = Image::of_f32(&[2, 4], &[9.0, 9.0, 9.0, 9.0, 1.0, 0.0, 0.0, 1.0]);
    let table = Resident::new(&HostMemory, table);
    let blank = |shape: &[i64]| {
        Resident::new(
            &HostMemory,
            Image::poisoned(View::compact(DType::F32, shape)),
        )
    };
    for (is_interleaved, want) in [
        (false, [1.0, -4.0, 3.0, 2.0, 5.0, 6.0]),
        (true, [1.0, 2.0, -4.0, 3.0, 5.0, 6.0]),
    ] {
        for session in sessions() {
            let (key, value) = (row(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]), row(&[7.0; 6]));
            let caches = [(); 2].map(|()| blank(&[1, 1, 1, 6]));
            let zero = Resident::new(&HostMemory, Image::of_i32(&[1], &[0]));
            let one = Resident::new(&HostMemory, Image::of_i32(&[1], &[1]));
            let input = RopeAppendArgs {
                append: append_args(&key, &value, &caches, &zero),
                key_out: None,
                q: None,
                q_out: None,
                norm: NO_NORM,
                rope: Some(Rope {
                    positions: one.tensor(),
                    position_offsets: None,
                    angles: Angles::Table(table.tensor()),
                    rotary_dim: 0,
                    is_interleaved,
                }),
            };
            session.rope_append(&input, Stream::default()).unwrap();
            let [k, v] = caches.each_ref().map(Resident::current);
            assert_eq!(k, Image::of_f32(&[1, 1, 1, 6], &want));
            assert_eq!(v, Image::of_f32(&[1, 1, 1, 6], &[7.0; 6]));
        }
    }
}

const NO_NORM: Norm = Norm {
    q_weight: None,
    k_weight: None,
    eps: 0.0,
};

fn append_args(
    key: &Resident<'_>,
    value: &Resident<'_>,
    caches: &[Resident<'_>; 2],
    slots: &Resident<'_>,
) -> AppendArgs {
    AppendArgs {
        key: key.tensor(),
        value: value.tensor(),
        k_cache: caches[0].tensor(),
        v_cache: caches[1].tensor(),
        layout: KvLayout::Nhd,
        kv_dtype: None,
        form: CacheForm::Plain,
        k_zero_points: None,
        v_zero_points: None,
        slot_mapping: slots.tensor(),
        k_scale: 0.0,
        v_scale: 0.0,
        k_scales: None,
        v_scales: None,
    }
}

/// Queries, keys and values are parts of one tensor and are computed where they lie: the same bits as in tensors of
/// their own.
#[test]
fn parts_of_a_fused_projection() {
    const HEADS: [(i64, i64); 3] = [(0, 4), (4, 2), (6, 2)];
    let fused = |dtype| {
        let mut image = Image::poisoned(View::compact(dtype, &[5, 8, 64]));
        for_each_index(&[5, 8, 64], |at| {
            let hash = mix(mix(at[0] as u64 * 64 + at[1] as u64) ^ at[2] as u64);
            image.put(at, encode(dtype, normal(hash)));
        });
        image
    };
    let part = |image: &Image, (first, count): (i64, i64)| {
        let mut part = Image::poisoned(View::compact(image.view.dtype, &[5, count, 64]));
        for_each_index(&[5, count, 64], |at| {
            part.put(at, image.bits(&[at[0], first + at[1], at[2]]));
        });
        part
    };
    for session in sessions() {
        for dtype in [DType::BF16, DType::F32] {
            let whole = Resident::new(&HostMemory, fused(dtype));
            let parts = HEADS.map(|heads| Resident::new(&HostMemory, part(whole.image(), heads)));
            let run = |[q, key, value]: [Tensor; 3]| {
                let caches = [(); 2].map(|()| {
                    let view = View::compact(dtype, &[2, 4, 2, 64]);
                    Resident::new(&HostMemory, Image::poisoned(view))
                });
                let slots = Resident::new(&HostMemory, Image::of_i32(&[4], &[6, -1, 0, 3]));
                let places = Resident::new(&HostMemory, Image::of_i32(&[5], &[0, 7, 100, 3, 9]));
                let weight = Resident::new(&HostMemory, Image::of_f32(&[64], &[1.5; 64]));
                let input = RopeAppendArgs {
                    append: AppendArgs {
                        key,
                        value,
                        ..append_args(&parts[1], &parts[2], &caches, &slots)
                    },
                    key_out: Some(key),
                    q: Some(q),
                    q_out: None,
                    norm: Norm {
                        q_weight: Some(weight.tensor()),
                        k_weight: Some(weight.tensor()),
                        eps: 1e-6,
                    },
                    rope: Some(Rope {
                        positions: places.tensor(),
                        position_offsets: None,
                        angles: Angles::Computed(PLAIN),
                        rotary_dim: 32,
                        is_interleaved: true,
                    }),
                };
                session.rope_append(&input, Stream::default()).unwrap();
                caches.map(|cache| cache.current())
            };
            let fused_caches =
                run(HEADS.map(|(first, count)| whole.tensor().narrow(1, first, count)));
            let caches = run(parts.each_ref().map(Resident::tensor));
            assert!(fused_caches == caches, "{dtype}");
            for (heads, own) in HEADS.into_iter().zip(&parts) {
                assert!(
                    part(&whole.current(), heads) == own.current(),
                    "{dtype} {heads:?}"
                );
            }
        }
    }
}

/// Also where an offset takes them there.
#[test]
fn positions_beyond_the_table_are_refused() {
    let resident = |image| Resident::new(&HostMemory, image);
    let floats = |shape: &[i64]| resident(Image::poisoned(View::compact(DType::F32, shape)));
    let (key, value) = (floats(&[2, 1, 8]), floats(&[2, 1, 8]));
    let (caches, table) = (
        [(); 2].map(|()| floats(&[1, 4, 1, 8])),
        floats(&[MAX_POSITION, 8]),
    );
    let slots = resident(Image::of_i32(&[2], &[0, 1]));
    for (positions, offsets, words) in [
        ([0, 37], None, "positions[1]: 37 is"),
        ([-1, 0], None, "positions[0]: -1 is"),
        (
            [0, 36],
            Some([0, 1]),
            "positions[1]: 36 with position_offsets[1] (1) is",
        ),
        (
            [i64::MAX, 0],
            Some([1, 0]),
            "positions[0]: 9223372036854775807 with",
        ),
    ] {
        let integers = |values: [i64; 2]| {
            resident(Image::of_bits(
                DType::I64,
                &[2],
                values.map(|value| value as u64),
            ))
        };
        let (positions, offsets) = (integers(positions), offsets.map(integers));
        let input = RopeAppendArgs {
            append: append_args(&key, &value, &caches, &slots),
            key_out: Some(key.tensor()),
            q: None,
            q_out: None,
            norm: NO_NORM,
            rope: Some(Rope {
                positions: positions.tensor(),
                position_offsets: offsets.as_ref().map(Resident::tensor),
                angles: Angles::Table(table.tensor()),
                rotary_dim: 0,
                is_interleaved: false,
            }),
        };
        for session in sessions() {
            let refused = session.rope_append(&input, Stream::default()).unwrap_err();
            let message = refused.to_string();
            assert!(
                message.contains(words) && message.contains("(37)"),
                "{message}"
            );
            assert!(caches.iter().all(Resident::is_untouched) && key.is_untouched());
        }
    }
}

fn check_one_call(step: &AppendRun) -> Result<(), String> {
    for session in sessions() {
        let [one, two] = [true, false].map(|one| step.take(&*session, &HostMemory, one).unwrap());
        step.compare(&one, &two)?;
    }
    Ok(())
}

proptest! {
    #![proptest_config(random::cases(30))]

    /// Append and decode by one call leave what they leave by two.
    #[test]
    fn append_and_decode_by_one_call(step in append_runs(300)) {
        check_one_call(&step).map_err(TestCaseError::fail)?;
    }
}

/// A run that reads other tensors than the append writes is refused, and nothing is written.
#[test]
fn append_and_decode_share_their_tensors() {
    let step = AppendRun::of_one_token(DType::F32, 16);
    for session in sessions() {
        for (field, change) in [("q: ", 0), ("k: ", 1), ("v: ", 2), ("append.q: NULL", 3)] {
            let refused = step.take_with(&*session, &HostMemory, |handle, append, args| {
                let (mut append, mut args) = (*append, *args);
                match change {
                    0 => args.q = append.append.key,
                    1 => args.k = args.v,
                    2 => args.v = args.k,
                    _ => (append.q, append.q_out) = (None, None),
                }
                handle.append_run(&append, &args, Stream::default())
            });
            let message = refused.err().expect("a refusal").to_string();
            assert!(message.starts_with(field), "{message}");
        }
    }
}
