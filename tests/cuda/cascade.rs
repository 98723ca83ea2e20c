//! Cascades on the device against flat attention in float64: whatever requests share, on Hopper's kernels and on the
//! portable ones, and captured runs that follow their plans.

use crate::common::cascade::{Case, Data, EXTRAS, Extra, Handle, check, compare, tree};
use crate::gpu::{self, DeviceMemory};
use crate::problems::session;
use folio::api::SharedPrefixes;
use folio::dtype::DType;
use folio::problem::{KvLayout, LogBase};

/// Decodes of a model with grouped heads over one prefix, with a deeper one for some. Plans for graphs share them, short as
/// they are.
fn decodes(dtype: DType) -> Case {
    let own: Vec<(i32, i32)> = (0..24).map(|b| (1, 1 + 13 * b % 150)).collect();
    Case {
        kv_heads: 2,
        group: 4,
        dim_qk: 128,
        dim_vo: 128,
        page_size: 16,
        graph: true,
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
