//! The rows of all operators: what a build compiles. Look-ups are the operators' own.

use super::append::{APPEND, ROPE_APPEND, ROPE_APPEND_LOOSE};
use super::keyless::{
    APPEND_STORED, BATCH_LENGTHS, BLOCK_TABLE, COMBINE, COMBINE_INVARIANT, COMBINE_LATENT,
    COMBINE_SUMS, COMBINE_WIDE, COPY_ROWS, CP_CORRECT, CP_REORDER, DRAFT_KV_INDICES, FOLD_SCALES,
    GATHER_STORED, KV_COPY, KV_COPY_LIST, KV_GATHER, KV_INDICES, LATENT_QUERIES, MASK_ITEMS,
    MLA_APPEND, MLA_GATHER, NARROW, PLAN, PLAN_CASCADE, ROPE_APPEND_STORED, ROUND_LSE,
    SLOT_MAPPING, TREE_MASK, WIDEN_PLACES, WIDEN_QUERIES, WIDEN_ROWS, WIDEN_STORED, WIDEN_UNITS,
};
use super::row::Row;
use super::{attention, merge, mla, projection, projection_few, up_projection};

/// All rows.
pub fn table() -> impl Iterator<Item = &'static Row> {
    attention::rows()
        .iter()
        .map(|row| &row.row)
        .chain(mla::rows().iter().map(|row| &row.row))
        .chain(COMBINE.rows())
        .chain(COMBINE_INVARIANT.rows())
        .chain(COMBINE_SUMS.rows())
        .chain(COMBINE_WIDE.rows())
        .chain(COMBINE_LATENT.rows())
        .chain(FOLD_SCALES.rows())
        .chain(NARROW.rows())
        .chain(LATENT_QUERIES.rows())
        .chain(MASK_ITEMS.rows())
        .chain(ROUND_LSE.rows())
        .chain(PLAN.rows())
        .chain(PLAN_CASCADE.rows())
        .chain(WIDEN_PLACES.rows())
        .chain(WIDEN_ROWS.rows())
        .chain(COPY_ROWS.rows())
        .chain(WIDEN_STORED.rows())
        .chain(WIDEN_UNITS.rows())
        .chain(WIDEN_QUERIES.rows())
        .chain(KV_COPY.rows())
        .chain(KV_COPY_LIST.rows())
        .chain(KV_GATHER.rows())
        .chain(APPEND_STORED.rows())
        .chain(ROPE_APPEND_STORED.rows())
        .chain(GATHER_STORED.rows())
        .chain(MLA_APPEND.rows())
        .chain(MLA_GATHER.rows())
        .chain(CP_REORDER.rows())
        .chain(CP_CORRECT.rows())
        .chain(TREE_MASK.rows())
        .chain(BATCH_LENGTHS.rows())
        .chain(KV_INDICES.rows())
        .chain(BLOCK_TABLE.rows())
        .chain(SLOT_MAPPING.rows())
        .chain(DRAFT_KV_INDICES.rows())
        .chain(APPEND.rows().iter().map(|row| &row.row))
        .chain(ROPE_APPEND.rows().iter().map(|row| &row.row))
        .chain(ROPE_APPEND_LOOSE.rows().iter().map(|row| &row.row))
        .chain(merge::rows().iter().map(|row| &row.row))
        .chain(projection::rows().iter().map(|row| &row.row))
        .chain(projection::copy_rows().iter().map(|row| &row.row))
        .chain(projection_few::rows().iter().map(|row| &row.row))
        .chain(up_projection::rows().iter().map(|row| &row.row))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique() {
        let mut names: Vec<_> = table().map(|row| &row.name).collect();
        let all = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), all);
    }
}
