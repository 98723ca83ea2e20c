//! Cascades on the device against flat attention in float64: whatever requests share, on Hopper's kernels and on the
//! portable ones, and captured runs that follow their plans.

use crate::common::cascade::{
    Case, Data, EXTRAS, Extra, Handle, check, check_with, compare, short_requests, tree,
};
use crate::common::values::mix;
use crate::gpu::{self, DeviceMemory};
use crate::problems::session;
use folio::api::{SharedPrefixes, Stream};
use folio::dtype::DType;
use folio::problem::{AttentionDesc, KvLayout, LogBase};

/// Decodes of a model with grouped heads over one prefix, with a deeper one for some. Plans for graphs share them, short as
/// they are: longer ones within the handle may pay.
fn decodes(dtype: DType) -> Case {
    let own: Vec<(i32, i32)> = (0..24).map(|b| (1, 1 + 13 * b % 150)).collect();
    Case {
        kv_heads: 2,
        group: 4,
        dim_qk: 128,
        dim_vo: 128,
        page_size: 16,
        graph: true,
        most_keys: 1 << 16,
        ..Case::plain(&own, &[(0, 24, 64), (4, 16, 112)]).of(dtype)
    }
}

#[track_caller]
fn assert_right(case: &Case) -> bool {
    let session = session();
    let result = check(&*session, &DeviceMemory, case);
    assert!(result.is_ok(), "{result:?} {case:?}");
    result == Ok(true)
}

/// The same with lengths on the device.
#[track_caller]
fn assert_right_on_device(case: &Case) -> bool {
    let session = session();
    let result = check_with(&*session, (&DeviceMemory, &DeviceMemory), case);
    assert!(result.is_ok(), "{result:?} {case:?}");
    result == Ok(true)
}

pub fn cascade() {
    for dtype in [DType::BF16, DType::F16] {
        assert!(assert_right(&decodes(dtype)), "nothing was shared");
        for extra in EXTRAS {
            assert_right(&Case {
                extra,
                lse: Some(LogBase::Two),
                ..decodes(dtype)
            });
        }
    }
    let own: Vec<(i32, i32)> = (0..80).map(|b| (1, 1 + 7 * b % 50)).collect();
    let many = Case {
        graph: false,
        requests: own,
        prefixes: vec![(0, 80, 72)],
        ..decodes(DType::BF16)
    };
    assert!(assert_right(&many), "nothing was shared");
    for seed in 0..16u64 {
        let rows = if seed % 3 == 0 { 20 } else { 3 };
        let requests: Vec<(i32, i32)> = (0..20)
            .map(|b| ((b + seed as i32) % rows, rows + 31 * b % 190))
            .collect();
        assert_right(&Case {
            prefixes: tree(seed, 20, 3, 40),
            requests,
            graph: seed % 4 != 3,
            csr: seed % 2 == 0,
            layout: if seed % 4 == 1 {
                KvLayout::Hnd
            } else {
                KvLayout::Nhd
            },
            seed,
            ..decodes(DType::BF16)
        });
    }
}

/// Rows above 256, which are the portable kernels'.
pub fn cascade_of_wide_rows() {
    for dtype in [DType::BF16, DType::F32] {
        for extra in [Extra::Nothing, Extra::Scales, Extra::Window] {
            let is_shared = assert_right(&Case {
                dim_qk: 512,
                dim_vo: 320,
                extra,
                lse: Some(LogBase::E),
                ..decodes(dtype)
            });
            assert!(is_shared, "nothing was shared");
        }
    }
}

/// More items of few rows than run at a time: Hopper's kernel takes one to three of their heads in a tile, in the last one
/// what is left. Beside them are prefixes of many rows.
pub fn cascade_of_many() {
    for (seed, (kv_heads, group, rows, requests)) in [
        (8, 4, 1, 60),
        (5, 4, 1, 100),
        (4, 2, 3, 90),
        (2, 8, 1, 150),
        (3, 16, 4, 60),
        (1, 4, 1, 200),
        (2, 28, 1, 70),
        (2, 17, 1, 90),
    ]
    .into_iter()
    .enumerate()
    {
        let own = (0..requests)
            .map(|b| (1 + b % rows, rows + 17 * b % 300))
            .collect();
        let case = Case {
            kv_heads,
            group,
            requests: own,
            prefixes: vec![(0, requests, 60), (3, requests / 2, 81), (3, 8, 100)],
            page_size: 8 << (seed % 2),
            seed: seed as u64,
            ..decodes(DType::BF16)
        };
        assert!(assert_right(&case), "nothing was shared");
    }
}

/// Documents of more steps than are otherwise taken several heads at a time, beside shared keys that take longer.
pub fn cascade_of_documents() {
    for kv_heads in [2, 3] {
        let case = Case {
            kv_heads,
            requests: (0..100).map(|b| (1, 1 + 29 * b % 60)).collect(),
            prefixes: vec![(0, 100, 200), (0, 8, 260), (8, 16, 275)],
            ..decodes(DType::BF16)
        };
        assert!(assert_right(&case), "nothing was shared");
    }
}

/// Types, head dimensions and page sizes that Hopper's prefill kernel does not take; fp32.
pub fn cascade_on_every_kernel() {
    for (dtype, kv_dtype, dim, page_size) in [
        (DType::BF16, DType::BF16, 96, 16),
        (DType::BF16, DType::BF16, 128, 1),
        (DType::F16, DType::F8E4M3, 128, 16),
        (DType::BF16, DType::F8E5M2, 64, 8),
        (DType::F32, DType::F32, 64, 16),
        (DType::BF16, DType::BF16, 64, 64),
        (DType::F16, DType::F16, 256, 32),
    ] {
        for batch_invariant in [false, true] {
            for extra in [
                Extra::Nothing,
                Extra::Scales,
                Extra::Window,
                Extra::BiasOfKeys,
                Extra::BiasOfNewKeys,
                Extra::BiasOfRequestRows,
            ] {
                assert_right(&Case {
                    kv_dtype,
                    dim_qk: dim,
                    dim_vo: dim,
                    page_size,
                    batch_invariant,
                    extra,
                    ..decodes(dtype)
                });
            }
        }
    }
}

/// A captured run is planned again: other prefixes, and none.
pub fn cascade_graph() {
    let session = session();
    let stream = gpu::new_stream();
    for extra in [Extra::Nothing, Extra::Window] {
        let case = Case {
            extra,
            ..decodes(DType::BF16)
        };
        let data = Data::new(&DeviceMemory, &case);
        let mut handle = Handle::new(&*session, &DeviceMemory, case.desc()).unwrap();
        let args = data.args();
        handle
            .plan(&data.batch(), &data.prefixes(), stream)
            .unwrap();
        handle.cascade.run(&args, stream).unwrap();
        gpu::synchronize_all();
        assert_eq!(compare(&case, &data), Ok(()));
        let graph = gpu::capture(stream, || handle.cascade.run(&args, stream).unwrap());
        let common = |common_prefix_len| SharedPrefixes {
            common_prefix_len,
            ..SharedPrefixes::default()
        };
        for prefixes in [common(0), data.prefixes(), common(1024), common(100)] {
            data.o.reset();
            gpu::synchronize_all();
            handle.plan(&data.batch(), &prefixes, stream).unwrap();
            graph.launch(stream);
            gpu::synchronize_all();
            assert_eq!(compare(&case, &data), Ok(()), "{prefixes:?} {case:?}");
        }
    }
}

/// The device cuts where prefixes end, for every run and kernel.
pub fn cascade_with_device_lengths() {
    for dtype in [DType::BF16, DType::F16] {
        assert!(
            assert_right_on_device(&decodes(dtype)),
            "nothing was shared"
        );
    }
    for extra in EXTRAS {
        for batch_invariant in [false, true] {
            assert_right_on_device(&Case {
                extra,
                batch_invariant,
                lse: Some(LogBase::Two),
                ..decodes(DType::BF16)
            });
        }
    }
    for (dtype, kv_dtype, dim, page_size) in [
        (DType::BF16, DType::BF16, 96, 16),
        (DType::BF16, DType::BF16, 128, 1),
        (DType::F16, DType::F8E4M3, 128, 16),
        (DType::F32, DType::F32, 64, 16),
    ] {
        assert_right_on_device(&Case {
            kv_dtype,
            dim_qk: dim,
            dim_vo: dim,
            page_size,
            ..decodes(dtype)
        });
    }
    // More requests than a small plan has threads for.
    let many = Case {
        requests: (0..300).map(|b| (1, 1 + 7 * b % 50)).collect(),
        prefixes: vec![(0, 300, 24), (10, 200, 40)],
        ..decodes(DType::BF16)
    };
    assert!(assert_right_on_device(&many), "nothing was shared");
}

/// Requests have not all keys of their prefixes, or no rows.
pub fn cascade_trees_with_device_lengths() {
    for seed in 0..24u64 {
        assert_right_on_device(&Case {
            graph: seed % 4 != 3,
            csr: seed % 4 < 2,
            ..short_requests(seed, decodes(DType::BF16))
        });
    }
}

/// More segments than the planner takes, and more entries than it has shared memory for.
pub fn cascade_of_many_prefixes() {
    let requests = 700;
    let pairs = (0..requests / 2).map(|i| (2 * i, 2 * i + 2, 20 + i % 3));
    let case = Case {
        kv_heads: 1,
        dim_qk: 64,
        dim_vo: 64,
        requests: (0..requests).map(|b| (1, 1 + 7 * b % 50)).collect(),
        prefixes: std::iter::once((0, requests, 10)).chain(pairs).collect(),
        ..decodes(DType::BF16)
    };
    assert!(assert_right_on_device(&case), "nothing was shared");
}

/// A captured plan is replayed with other lengths. What it was told of prefixes is more than the requests have: by other keys
/// in every replay.
pub fn cascade_graph_plans_on_the_device() {
    let session = session();
    let stream = gpu::new_stream();
    for extra in [Extra::Nothing, Extra::SoftCap, Extra::Window] {
        // The same requests in another order: tensors of the same shapes. Of each prefix a request has no more than that.
        let turned = |by: i32| {
            let mut requests: Vec<(i32, i32)> =
                (0..30).map(|b| (b % 4, 4 + 37 * (b % 7) % 90)).collect();
            requests.rotate_left(by as usize);
            requests.insert(0, (1, 1));
            requests.insert(4, (1, 1));
            Case {
                extra,
                csr: true,
                requests,
                prefixes: vec![(0, 32, 64), (4, 16, 112)],
                seed: by as u64,
                ..decodes(DType::BF16)
            }
        };
        let first = turned(0);
        let data = Data::with_lengths(&DeviceMemory, &DeviceMemory, &first);
        let desc = AttentionDesc {
            max_kv_len: 4096,
            ..first.desc()
        };
        let mut handle = Handle::new(&*session, &DeviceMemory, desc).unwrap();
        let prefixes = SharedPrefixes {
            common_prefix_len: 0,
            request_begin: &[0, 4],
            request_end: &[32, 16],
            kv_len: &[64 * 16 + 100, 112 * 16 + 200],
        };
        let args = data.args();
        let graph = gpu::capture(stream, || {
            handle.plan(&data.batch(), &prefixes, stream).unwrap();
            handle.cascade.run(&args, stream).unwrap();
        });
        assert_eq!(handle.cascade.shares(), Ok(true));
        for by in [0, 7, 1, 16] {
            let case = turned(by);
            let other = Data::with_lengths(&DeviceMemory, &DeviceMemory, &case);
            data.take_inputs_of(&other);
            data.o.reset();
            gpu::synchronize_all();
            graph.launch(stream);
            gpu::synchronize_all();
            assert_eq!(compare(&case, &data), Ok(()), "{case:?}");
        }
    }
}

/// Lengths that no batch has: results are wrong, but nothing outside of the tensors and the workspace is touched, and the
/// next plan is right.
pub fn cascade_with_wrong_device_lengths() {
    const WRONG: [i32; 8] = [i32::MIN, -1, 0, 3, 20, 500, 1 << 20, i32::MAX];
    let session = session();
    let case = decodes(DType::BF16);
    let data = Data::with_lengths(&DeviceMemory, &DeviceMemory, &case);
    let mut handle = Handle::new(&*session, &DeviceMemory, case.desc()).unwrap();
    let mut compute = || {
        let stream = Stream::default();
        handle
            .plan(&data.batch(), &data.prefixes(), stream)
            .unwrap();
        handle.cascade.run(&data.args(), stream).unwrap();
        gpu::synchronize_all();
        handle.assert_within_bounds();
    };
    for seed in 0..32 {
        data.set_lengths(|i| WRONG[(mix(seed << 32 | i) % 8) as usize]);
        compute();
    }
    data.reset_lengths();
    compute();
    assert_eq!(compare(&case, &data), Ok(()));
}
