//! Cascades come to what flat attention over the same page table comes to, on the CPU and the oracle, through both doors:
//! whatever requests share, and whatever runs ask for.

use crate::common::cascade::{
    Case, Data, EXTRAS, Extra, Handle, cascades_of_every_form, check, compare as compare_case,
    short_requests, tree,
};
use crate::common::compare::Tolerance;
use crate::common::door::DOORS;
use crate::common::memory::HostMemory;
use crate::common::problem::Problem;
use crate::common::random;
use folio::api::{SharedPrefixes, Stream, Target};
use folio::dtype::DType;
use folio::problem::{KvLayout, LogBase};
use proptest::prelude::*;

const TARGETS: [Target; 2] = [Target::Cpu { num_threads: 2 }, Target::Reference];

#[track_caller]
fn check_everywhere(case: &Case) {
    for door in DOORS {
        for target in TARGETS {
            let session = door.open(target).unwrap();
            let result = check(&*session, &HostMemory, case);
            assert!(
                result.is_ok(),
                "{result:?} {} door, {target:?}: {case:?}",
                door.name()
            );
        }
    }
}

/// Whether the CPU's plan shares keys.
fn shares(case: &Case) -> bool {
    let session = DOORS[0].open(TARGETS[0]).unwrap();
    check(&*session, &HostMemory, case).unwrap()
}

/// Eight decodes over one prefix.
fn one_prefix(pages: i32) -> Case {
    let own: Vec<(i32, i32)> = (0..8).map(|b| (1, 3 + 7 * b)).collect();
    Case::plain(&own, &[(0, 8, pages)])
}

#[test]
fn one_prefix_of_every_length() {
    for pages in [1, 7, 8, 9, 40, 200] {
        check_everywhere(&one_prefix(pages));
    }
    assert!(shares(&one_prefix(200)));
    assert!(!shares(&one_prefix(1)));
}

#[test]
fn three_levels() {
    let own: Vec<(i32, i32)> = (0..9).map(|b| (1 + b % 3, 5 + 20 * b)).collect();
    let prefixes = [
        (0, 9, 60),
        (0, 4, 140),
        (0, 2, 260),
        (2, 4, 250),
        (4, 5, 100),
        (5, 9, 130),
    ];
    let case = Case::plain(&own, &prefixes);
    check_everywhere(&case);
    assert!(shares(&case));
    for levels in [1, 2] {
        check_everywhere(&Case {
            levels,
            ..case.clone()
        });
    }
}

#[test]
fn every_type_and_extra() {
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        for kv_dtype in [dtype, DType::F8E4M3, DType::F8E5M2] {
            for extra in EXTRAS {
                let own: Vec<(i32, i32)> = (0..6).map(|b| (1 + b % 2, 9 + 11 * b)).collect();
                check_everywhere(&Case {
                    kv_dtype,
                    extra,
                    ..Case::plain(&own, &[(0, 6, 60), (0, 3, 100)]).of(dtype)
                });
            }
        }
    }
}

#[test]
fn an_lse_of_16_bits() {
    for lse_dtype in [DType::F16, DType::BF16] {
        for extra in [Extra::Nothing, Extra::Window] {
            let own: Vec<(i32, i32)> = (0..6).map(|b| (1 + b % 2, 9 + 11 * b)).collect();
            check_everywhere(&Case {
                extra,
                lse_dtype,
                ..Case::plain(&own, &[(0, 6, 60), (0, 3, 100)]).of(DType::BF16)
            });
        }
    }
}

/// Keys that a request does not have are not shared, whatever is stated.
#[test]
fn requests_without_all_keys_of_their_prefixes() {
    for seed in 0..6 {
        let like = Case {
            graph: seed % 4 != 3,
            csr: seed % 4 < 2,
            ..Case::plain(&[], &[])
        };
        check_everywhere(&short_requests(seed, like));
    }
}

/// New tokens are never shared, whatever is stated; requests may have none, and no keys of their own beyond them.
#[test]
fn prefixes_end_before_new_tokens() {
    let requests = [(0, 4), (5, 5), (70, 70), (1, 1), (0, 0), (3, 30)];
    check_everywhere(&Case::plain(&requests, &[(0, 6, 70), (1, 4, 100)]));
}

/// The leading keys of all requests, as vLLM states them.
#[test]
fn a_common_prefix() {
    let case = one_prefix(150);
    for door in DOORS {
        let session = door.open(TARGETS[0]).unwrap();
        let data = Data::new(&HostMemory, &case);
        let mut handle = Handle::new(&*session, &HostMemory, case.desc()).unwrap();
        for (common_prefix_len, shares) in [(1200, true), (0, false), (640, true)] {
            let prefixes = SharedPrefixes {
                common_prefix_len,
                ..SharedPrefixes::default()
            };
            handle
                .plan(&data.batch(), &prefixes, Stream::default())
                .unwrap();
            assert_eq!(handle.cascade.shares(), Ok(shares));
            handle.cascade.run(&data.args(), Stream::default()).unwrap();
            assert_eq!(compare_case(&case, &data), Ok(()));
        }
    }
}

/// Shared keys in caches of every form are those that the requests have.
#[test]
fn caches_of_every_form() {
    for (door, target) in DOORS.iter().flat_map(|door| TARGETS.map(|t| (door, t))) {
        let session = door.open(target).unwrap();
        let tolerance = |problem: &Problem| Tolerance::fast(problem.q_dtype);
        cascades_of_every_form(&*session, &HostMemory, tolerance);
    }
}

/// What requests share says something of the batch.
#[test]
fn a_batch_invariant_result_does_not_depend_on_what_is_shared() {
    let session = DOORS[0].open(TARGETS[0]).unwrap();
    for dtype in [DType::F32, DType::BF16] {
        let case = Case {
            batch_invariant: true,
            dim_qk: 64,
            dim_vo: 64,
            kv_heads: 1,
            page_size: 16,
            ..Case::plain(&[(1, 20), (2, 300), (1, 5)], &[(0, 3, 150), (1, 3, 300)]).of(dtype)
        };
        let data = Data::new(&HostMemory, &case);
        let mut handle = Handle::new(&*session, &HostMemory, case.desc()).unwrap();
        let mut outputs = Vec::new();
        for prefixes in [data.prefixes(), SharedPrefixes::default()] {
            handle
                .plan(&data.batch(), &prefixes, Stream::default())
                .unwrap();
            assert_eq!(handle.cascade.shares(), Ok(false));
            data.o.reset();
            handle.cascade.run(&data.args(), Stream::default()).unwrap();
            outputs.push(data.o.current().bytes);
        }
        assert!(outputs[0] == outputs[1], "{dtype}");
    }
}

fn cases() -> impl Strategy<Value = Case> {
    let float = prop_oneof![Just(DType::F32), Just(DType::F16), Just(DType::BF16)];
    let fp8 = prop_oneof![3 => Just(None), 1 => Just(Some(DType::F8E4M3))];
    let rows = prop_oneof![1 => Just(0i32), 6 => 1i32..4, 2 => 4i32..40];
    let requests = prop::collection::vec((rows, 0i32..80), 1..14);
    let lse = prop_oneof![Just(None), Just(Some(LogBase::E)), Just(Some(LogBase::Two))];
    let sizes = (
        1i64..4,
        1i64..5,
        1i64..9,
        1i64..9,
        prop::sample::select(vec![1i64, 8, 16]),
    );
    let extra = prop::sample::select(EXTRAS.to_vec());
    (
        (float, fp8, extra, lse),
        requests,
        sizes,
        (0u32..4, 1i32..60, any::<u64>()),
        any::<[bool; 3]>(),
    )
        .prop_map(
            |((dtype, fp8, extra, lse), requests, sizes, (levels, pages, seed), flags)| Case {
                kv_dtype: fp8.unwrap_or(dtype),
                extra,
                lse,
                kv_heads: sizes.0,
                group: sizes.1,
                dim_qk: 8 * sizes.2,
                dim_vo: 8 * sizes.3,
                page_size: sizes.4,
                layout: if flags[0] {
                    KvLayout::Hnd
                } else {
                    KvLayout::Nhd
                },
                csr: flags[1],
                batch_invariant: flags[2],
                prefixes: tree(seed, requests.len() as i32, levels, pages),
                levels: levels.max(1),
                seed,
                requests: requests
                    .into_iter()
                    .map(|(rows, own)| (rows, own.max(rows)))
                    .collect(),
                ..Case::plain(&[], &[]).of(dtype)
            },
        )
}

proptest! {
    #![proptest_config(random::cases(200))]

    #[test]
    fn any_tree(case in cases()) {
        for door in DOORS {
            let session = door.open(TARGETS[0]).unwrap();
            let result = check(&*session, &HostMemory, &case);
            prop_assert!(result.is_ok(), "{} door: {}", door.name(), result.unwrap_err());
        }
    }
}

#[test]
fn nothing_in_the_batch() {
    check_everywhere(&Case::plain(&[], &[]));
    check_everywhere(&Case {
        extra: Extra::Window,
        ..Case::plain(&[(0, 0)], &[])
    });
}
