//! All attention rows, and the look-up.

use std::sync::LazyLock;

use super::row::{AttentionQuery, AttentionRow, Family};
use super::{generic, sm90_decode, sm90_prefill, sm90_prefill_fp8};
use crate::cuda::kernels::row::refusal;
use crate::error::Error;

/// All rows, the preferred ones first.
pub fn rows() -> &'static [AttentionRow] {
    static ROWS: LazyLock<Vec<AttentionRow>> = LazyLock::new(|| {
        [
            sm90_decode::FAMILIES,
            sm90_prefill::FAMILIES,
            sm90_prefill_fp8::FAMILIES,
            generic::FAMILIES,
        ]
        .into_iter()
        .flatten()
        .flat_map(Family::rows)
        .collect()
    });
    &ROWS
}

/// The rows that compute the problem on the device, the preferred ones first.
pub fn candidates(query: AttentionQuery) -> impl Iterator<Item = &'static AttentionRow> {
    rows().iter().filter(move |row| row.fits(&query))
}

/// The refusal of a problem that no row fits: says what there is.
pub fn unsupported(query: &AttentionQuery) -> Error {
    let problem = format!(
        "{} kernel for q {}, kv {}, o {}, head_dim {} / {}",
        query.phase.name(),
        query.types.q.name(),
        query.types.kv.name(),
        query.types.o.name(),
        query.head_dim_qk,
        query.head_dim_vo,
    );
    let of_phase = rows().iter().filter(|row| row.phase == query.phase);
    refusal(
        &problem,
        query.compute_capability,
        of_phase.map(|row| &row.row),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::kernels::attention::row::{
        AttentionTypes, HALF, HALF_FP8, MOST_WIDE_HEAD_DIM, Phase, cached, same,
    };
    use crate::cuda::kernels::row::Arch;
    use crate::dtype::DType;

    fn query(compute_capability: (u32, u32), head_dim: u32) -> AttentionQuery {
        AttentionQuery {
            phase: Phase::Decode,
            compute_capability,
            types: same(DType::BF16),
            head_dim_qk: head_dim,
            head_dim_vo: head_dim,
        }
    }

    fn queries_of_every_kind(compute_capability: (u32, u32), head_dim: u32) -> Vec<AttentionQuery> {
        let of_f32 = [DType::F32, DType::F8E4M3, DType::F8E5M2].map(|kv| cached(DType::F32, kv));
        let types = HALF.iter().chain(HALF_FP8).chain(&of_f32);
        let of_types = |&types: &AttentionTypes| {
            [Phase::Decode, Phase::Prefill].map(|phase| AttentionQuery {
                phase,
                types,
                ..query(compute_capability, head_dim)
            })
        };
        types.flat_map(of_types).collect()
    }

    #[test]
    fn rows_of_an_architecture_come_before_portable_ones() {
        let portable = |row: &AttentionRow| row.row.arch == Arch::Sm80;
        assert!(rows().is_sorted_by_key(portable));
        for (cc, runs) in [
            ((8, 6), true),
            ((9, 0), true),
            ((12, 0), true),
            ((7, 5), false),
        ] {
            let found: Vec<_> = candidates(query(cc, 128)).collect();
            assert_eq!(found.iter().any(|row| portable(row)), runs, "{cc:?}");
            assert!(
                cc == (9, 0) || found.iter().all(|row| portable(row)),
                "{cc:?}"
            );
        }
    }

    /// Up to the stated width every device has a row of every kind, and none beyond.
    #[test]
    fn the_widest_rows_are_as_wide_as_stated() {
        for cc in [(8, 0), (9, 0)] {
            for query in queries_of_every_kind(cc, MOST_WIDE_HEAD_DIM) {
                assert!(candidates(query).next().is_some(), "{query:?}");
            }
            for query in queries_of_every_kind(cc, MOST_WIDE_HEAD_DIM + 8) {
                assert_eq!(candidates(query).count(), 0, "{query:?}");
            }
        }
    }

    #[test]
    fn a_refusal_lists_what_there_is() {
        let query = query((8, 0), 4096);
        assert_eq!(candidates(query).count(), 0);
        let message = unsupported(&query).to_string();
        assert!(message.contains("4096"), "{message}");
        assert!(message.contains("decode_sm80_bf16"), "{message}");
        assert!(!message.contains("sm90a"), "{message}");
    }
}
