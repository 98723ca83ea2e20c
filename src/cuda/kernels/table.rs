//! All rows, and the look-up.

use std::sync::LazyLock;

use super::row::{Family, Query, Row};
use super::{generic, sm90_decode, sm90_prefill};
use crate::error::Error;

/// All rows, the preferred ones first.
pub fn table() -> &'static [Row] {
    static TABLE: LazyLock<Vec<Row>> = LazyLock::new(|| {
        [
            sm90_decode::FAMILIES,
            sm90_prefill::FAMILIES,
            generic::FAMILIES,
        ]
        .into_iter()
        .flatten()
        .flat_map(Family::rows)
        .collect()
    });
    &TABLE
}

/// The rows that compute the problem on the device, the preferred ones first.
pub fn candidates(query: Query) -> impl Iterator<Item = &'static Row> {
    table().iter().filter(move |row| row.fits(&query))
}

/// The refusal of a problem that no row fits: says what there is.
pub fn unsupported(query: &Query) -> Error {
    let mut names: Vec<&str> = table()
        .iter()
        .filter(|row| row.op == query.op && row.arch.runs_on(query.compute_capability))
        .map(|row| row.name.as_str())
        .collect();
    names.sort_unstable();
    Error::Unsupported(format!(
        "no {} kernel for q {}, kv {}, o {}, head_dim {} / {} on compute capability {}.{}; there is {}",
        query.op.name(),
        query.types.q.name(),
        query.types.kv.name(),
        query.types.o.name(),
        query.head_dim_qk,
        query.head_dim_vo,
        query.compute_capability.0,
        query.compute_capability.1,
        if names.is_empty() {
            "none".into()
        } else {
            names.join(", ")
        }
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::kernels::row::{Arch, Op, same};
    use crate::dtype::DType;

    fn query(compute_capability: (u32, u32), head_dim: u32) -> Query {
        Query {
            op: Op::Decode,
            compute_capability,
            types: same(DType::BF16),
            head_dim_qk: head_dim,
            head_dim_vo: head_dim,
        }
    }

    #[test]
    fn names_are_unique() {
        let mut names: Vec<_> = table().iter().map(|row| &row.name).collect();
        let all = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), all);
    }

    #[test]
    fn rows_of_an_architecture_come_before_portable_ones() {
        let portable = |row: &Row| row.arch == Arch::Sm80;
        assert!(table().is_sorted_by_key(portable));
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
