//! An lse of 16 bits: of decode and prefill on Hopper's kernels and on the portable ones, of MLA, cascades, MLA over a
//! context, and new keys beside the cache; of rows that are split and rows that see nothing, with lengths on either side.

use crate::common::cascade;
use crate::common::instance::solve;
use crate::common::memory::{HostMemory, Memory};
use crate::common::mla::{self, MlaProblem};
use crate::common::mla_context;
use crate::common::problem::{Layer, Problem, Storage};
use crate::gpu::DeviceMemory;
use crate::problems::{assert_right, session, solve_with};
use folio::dtype::DType;
use folio::problem::{Kind, LogBase};

/// With the base that each is tested in.
const TYPES: [(DType, LogBase); 2] = [(DType::F16, LogBase::E), (DType::BF16, LogBase::Two)];

const ON_HOST: &dyn Memory = &HostMemory;
const ON_DEVICE: &dyn Memory = &DeviceMemory;

/// Splits, a request without keys, and one without rows; then the same with many rows.
const LENS: [(Kind, &[(u32, u32)]); 3] = [
    (Kind::Decode, &[(1, 9000), (2, 0), (0, 40), (1, 17)]),
    (Kind::Prefill, &[(5, 3000), (3, 0), (0, 40), (1, 17)]),
    (Kind::Prefill, &[(200, 3000), (70, 100), (3, 0), (130, 130)]),
];

pub fn lse_of_16_bits() {
    let session = session();
    for (lse_dtype, base) in TYPES {
        for (kind, lens) in LENS {
            for (dtype, dim, page_size) in [
                (DType::BF16, 128, 16),
                (DType::F16, 96, 5),
                (DType::F32, 64, 16),
            ] {
                let mut problem = Problem {
                    kind,
                    storage: Storage::paged(page_size),
                    layer: Layer {
                        lse: Some(base),
                        lse_dtype,
                        ..Layer::plain()
                    },
                    ..Problem::plain(lens).of(dtype).heads(40, 8, dim)
                };
                problem.memory.lse_head_major = base == LogBase::Two;
                problem.memory.padded_rows = 3;
                for memory in [ON_HOST, ON_DEVICE] {
                    let got = solve_with(&*session, memory, &problem).unwrap();
                    assert_right(&problem, &got);
                }
            }
        }
    }
}

pub fn lse_of_16_bits_of_sums() {
    let session = session();
    for (lse_dtype, base) in TYPES {
        for lens in [&[(1, 5000), (2, 0), (3, 70)][..], &[(70, 300), (9, 9)]] {
            let mut problem = MlaProblem::plain(lens);
            (problem.batch.layer.lse, problem.batch.layer.lse_dtype) = (Some(base), lse_dtype);
            for memory in [ON_HOST, ON_DEVICE] {
                let got = mla::solve(&*session, &DeviceMemory, memory, &problem).unwrap();
                assert_eq!(mla::check(&problem, &got), Ok(()), "{problem:?}");
            }
        }
        let own: Vec<(i32, i32)> = (0..24).map(|b| (1, 1 + 13 * b % 150)).collect();
        let case = cascade::Case {
            kv_heads: 2,
            group: 4,
            dim_qk: 128,
            dim_vo: 128,
            page_size: 16,
            graph: true,
            most_keys: 1 << 16,
            lse: Some(base),
            lse_dtype,
            ..cascade::Case::plain(&own, &[(0, 24, 64), (4, 16, 112)]).of(DType::BF16)
        };
        let shared = cascade::check(&*session, &DeviceMemory, &case);
        assert_eq!(shared, Ok(true), "{case:?}");
        for lens in [&[(70, 210), (5, 0), (1, 260)][..], &[(70, 0), (5, 0)]] {
            let case = mla_context::Case {
                chunk_tokens: 100,
                lse: Some(base),
                lse_dtype,
                ..mla_context::Case::plain(lens).of(DType::BF16)
            };
            let result = mla_context::check(&*session, &DeviceMemory, &case);
            assert_eq!(result, Ok(()), "{case:?}");
        }
        for lens in [&[(100, 430), (3, 129), (0, 9)][..], &[(64, 64), (5, 5)]] {
            let layer = Layer {
                lse: Some(base),
                lse_dtype,
                ..Layer::plain()
            };
            let problem = Problem::plain(lens).of(DType::BF16).heads(8, 2, 128);
            let problem = problem.extend(DType::BF16).with_layer(layer);
            let got = solve(&*session, &DeviceMemory, &problem).unwrap();
            assert_right(&problem, &got);
        }
    }
}
