//! MLA over a cached context: new tokens over themselves and over their context in chunks come to what attention over all
//! of it comes to, on the CPU and the oracle, through both doors, whoever unpacks the records.

use crate::common::door::DOORS;
use crate::common::memory::HostMemory;
use crate::common::mla_context::{Case, Data, Handle, check};
use crate::common::random;
use folio::api::{Stream, Target};
use folio::dtype::DType;
use folio::problem::{CacheFormat, LogBase, MlaContextDesc};
use proptest::prelude::*;

const TARGETS: [Target; 2] = [Target::Cpu { num_threads: 2 }, Target::Reference];

#[track_caller]
fn check_everywhere(case: &Case) {
    for door in DOORS {
        for target in TARGETS {
            let session = door.open(target).unwrap();
            let result = check(&*session, &HostMemory, case);
            assert_eq!(result, Ok(()), "{} door, {target:?}: {case:?}", door.name());
        }
    }
}

/// No, short and long contexts, requests without new tokens; chunks that end inside of requests, and one for all.
const MIXED: [(u32, u32); 7] = [(3, 70), (5, 0), (0, 33), (1, 129), (0, 0), (20, 7), (2, 1)];

#[test]
fn chunks_of_every_size() {
    for chunk_tokens in [1, 7, 32, 64, 1000, 0] {
        for in_steps in [false, true] {
            check_everywhere(&Case {
                chunk_tokens,
                in_steps,
                ..Case::plain(&MIXED)
            });
        }
    }
}

/// The sum over the chunks has an lse of float32, whatever the caller's is.
#[test]
fn an_lse_of_16_bits() {
    for lse_dtype in [DType::F16, DType::BF16] {
        for dtype in [DType::F32, DType::BF16] {
            for lens in [&MIXED[..], &[(3, 0), (20, 0)]] {
                for in_steps in [false, true] {
                    check_everywhere(&Case {
                        chunk_tokens: 24,
                        in_steps,
                        lse_dtype,
                        ..Case::plain(lens).of(dtype)
                    });
                }
            }
        }
    }
}

#[test]
fn indices_of_int64() {
    for csr in [false, true] {
        check_everywhere(&Case {
            csr,
            wide_indices: true,
            chunk_tokens: 24,
            ..Case::plain(&MIXED)
        });
    }
}

#[test]
fn every_type_of_record() {
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        for cache in [
            dtype.into(),
            DType::F8E4M3.into(),
            DType::F8E5M2.into(),
            CacheFormat::DS_MLA,
        ] {
            for in_steps in [false, true] {
                let case = Case::plain(&[(3, 50), (4, 0), (1, 21)]).of(dtype);
                let is_scaled = cache != CacheFormat::DS_MLA && cache.is_scaled();
                check_everywhere(&Case {
                    in_steps,
                    k_scale: if is_scaled { 0.5 } else { 0.0 },
                    chunk_tokens: 24,
                    ..case.over(cache)
                });
            }
        }
    }
}

/// DeepSeek's dimensions, many new tokens.
#[test]
fn the_dimensions_of_deepseek() {
    for dtype in [DType::F16, DType::BF16] {
        check_everywhere(&Case {
            rank: 512,
            nope: 128,
            rope: 64,
            value: 128,
            page_size: 16,
            chunk_tokens: 48,
            ..Case::plain(&[(17, 60), (9, 40)]).of(dtype)
        });
    }
}

/// The caller's products are Folio's, between the steps.
#[test]
fn steps_around_up_projections() {
    for (dtype, cache) in [
        (DType::F32, DType::F32.into()),
        (DType::F16, DType::F8E4M3.into()),
        (DType::BF16, CacheFormat::DS_MLA),
    ] {
        check_everywhere(&Case {
            in_steps: true,
            up_project: true,
            chunk_tokens: 24,
            ..Case::plain(&MIXED).of(dtype).over(cache)
        });
    }
}

/// A value near zero has most of the weight, whose sum over the latent row cancels.
#[test]
fn values_whose_sums_cancel() {
    for cache in [DType::F8E4M3, DType::F32] {
        check_everywhere(&Case {
            heads: 1,
            rank: 56,
            nope: 56,
            rope: 24,
            value: 16,
            page_size: 1,
            chunk_tokens: 1,
            lse: None,
            sm_scale: 0.3657434,
            seed: 5021625809823146462,
            ..Case::plain(&[(29, 0), (3, 10)]).over(cache.into())
        });
    }
}

/// Where nobody has a context there is no chunk, and the output is written at once.
#[test]
fn nobody_has_a_context() {
    for dtype in [DType::F32, DType::BF16] {
        check_everywhere(&Case::plain(&[(5, 0), (0, 0), (9, 0)]).of(dtype));
    }
    check_everywhere(&Case::plain(&[(0, 5), (0, 0)]));
}

/// A plan for a graph runs as many chunks as any batch has.
#[test]
fn chunks_beyond_the_last_one_add_nothing() {
    for (dtype, in_steps) in [
        (DType::F32, false),
        (DType::BF16, false),
        (DType::BF16, true),
    ] {
        check_everywhere(&Case {
            graph: true,
            in_steps,
            chunk_tokens: 16,
            ..Case::plain(&[(3, 20), (2, 0), (4, 31)]).of(dtype)
        });
    }
}

/// One handle, one workspace, a batch after the other.
#[test]
fn plans_follow_one_another() {
    for door in DOORS {
        let session = door.open(TARGETS[0]).unwrap();
        let largest = Case::plain(&[(6, 90), (8, 100), (7, 3)]);
        let mut handle = Handle::new(&*session, &HostMemory, largest.desc()).unwrap();
        for lens in [
            &[(6, 90), (8, 100), (7, 3)][..],
            &[(4, 0)],
            &[(1, 64), (2, 3)],
            &[],
        ] {
            let case = Case {
                lens: lens.to_vec(),
                ..largest.clone()
            };
            let data = Data::new(&HostMemory, &case);
            handle.plan(&data.batch(), Stream::default()).unwrap();
            let total: u32 = lens.iter().map(|r| r.1).sum();
            assert_eq!(
                handle.context.num_chunks().unwrap() as u32,
                total.div_ceil(64)
            );
            for _ in 0..2 {
                data.run(&*session, &*handle.context, Stream::default())
                    .unwrap();
                assert_eq!(data.check(), Ok(()));
            }
        }
    }
}

/// Contexts of any length do with the memory of a chunk, apart from a chunk's five numbers in the tables; twice the tokens of
/// a chunk take the rows of a chunk more, of latent, rotary, key and value elements.
#[test]
fn memory_is_bounded_by_the_chunk() {
    const CHUNK: u32 = 4096;
    let desc = MlaContextDesc {
        max_chunk_tokens: CHUNK,
        max_kv_len: 2 * CHUNK,
        ..Case::plain(&[(3, 1), (20, 1)]).of(DType::BF16).desc()
    };
    let bytes = |target, desc| {
        let session = DOORS[0].open(target).unwrap();
        let info = session.mla_context(desc).unwrap().workspace().unwrap();
        assert_eq!(info.device_bytes, 0);
        info.host_bytes
    };
    for target in TARGETS {
        for in_steps in [false, true] {
            let desc = MlaContextDesc { in_steps, ..desc };
            let small = bytes(target, desc);
            let long = MlaContextDesc {
                max_kv_len: 200 * CHUNK,
                ..desc
            };
            let chunks = desc.max_batch_size * 200;
            let tables = (chunks * 5 * 4) as usize;
            let long = bytes(target, long);
            assert!(
                long <= small + tables,
                "{target:?}: {long} bytes, not {small}"
            );
            let wide = MlaContextDesc {
                max_chunk_tokens: 2 * CHUNK,
                ..desc
            };
            let row = desc.kv_lora_rank
                + desc.qk_rope_head_dim
                + desc.num_heads * (desc.qk_nope_head_dim + desc.v_head_dim);
            let rows = match in_steps {
                true => 0,
                false => (CHUNK * row * 2) as usize,
            };
            assert_eq!(bytes(target, wide), small + rows, "{target:?}");
        }
    }
}

fn cases() -> impl Strategy<Value = Case> {
    let float = prop_oneof![Just(DType::F32), Just(DType::F16), Just(DType::BF16)];
    let fp8 = prop_oneof![
        3 => Just(None),
        1 => Just(Some(DType::F8E4M3)),
        1 => Just(Some(DType::F8E5M2)),
    ];
    let dims = [(1i64..9), (1i64..9), (1i64..9), (1i64..9)].map(|n| n.prop_map(|n| 8 * n));
    let new = prop_oneof![1 => Just(0u32), 3 => 1u32..5, 1 => 5u32..40];
    let context = prop_oneof![2 => Just(0u32), 3 => 1u32..40, 1 => 40u32..300];
    let lens = prop::collection::vec((new, context), 0..6);
    let lse = prop_oneof![Just(None), Just(Some(LogBase::E)), Just(Some(LogBase::Two))];
    let scales = (
        prop_oneof![Just(0.0f32), 0.02f32..0.4],
        prop_oneof![Just(0.0f32), 0.3f32..1.5],
    );
    let sizes = (
        1i64..5,
        prop::sample::select(vec![1i64, 3, 8, 16, 64]),
        1u32..200,
    );
    (
        float,
        fp8,
        dims,
        lens,
        (lse, scales, sizes),
        any::<[bool; 4]>(),
        any::<u64>(),
    )
        .prop_map(
            |(dtype, fp8, [rank, nope, rope, value], lens, (lse, scales, sizes), flags, seed)| {
                Case {
                    cache: fp8.unwrap_or(dtype).into(),
                    split_cache: flags[0],
                    heads: sizes.0,
                    rank,
                    nope,
                    rope,
                    value,
                    page_size: sizes.1,
                    csr: flags[1],
                    wide_indices: seed % 4 == 1,
                    chunk_tokens: sizes.2,
                    in_steps: flags[2],
                    graph: flags[3] && !lens.is_empty(),
                    lens,
                    lse,
                    sm_scale: scales.0,
                    k_scale: if fp8.is_some() { scales.1 } else { 0.0 },
                    padded_rows: (seed % 3) as i64,
                    seed,
                    ..Case::plain(&[]).of(dtype)
                }
            },
        )
}

proptest! {
    #![proptest_config(random::cases(200))]

    #[test]
    fn any_case(case in cases()) {
        for door in DOORS {
            let session = door.open(TARGETS[0]).unwrap();
            let result = check(&*session, &HostMemory, &case);
            prop_assert!(result.is_ok(), "{} door: {}", door.name(), result.unwrap_err());
        }
    }
}
