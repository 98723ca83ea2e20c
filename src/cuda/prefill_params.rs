//! Mirror of the struct in `kernels/params/prefill.h`, field by field; its size is asserted on both sides. What the
//! fields mean is written there.

use super::params::{AttentionParams, Divisor, SumParams};

/// `FolioPacking`.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct Packing {
    pub heads: u8,
    pub positions: u8,
    pub inverse: u16,
}

/// Rows of a warpgroup.
pub const WARPGROUP_ROWS: u32 = 64;

impl Packing {
    /// Of the heads of a group, for queries of up to so many tokens: heads that leave few rows without a position. Where fewer blocks of
    /// more heads have all rows of a request in two warpgroups, which every tile has at least, these read its keys less often.
    pub fn new(group_size: u32, max_qo_len: u32) -> Packing {
        let filling = Packing::filling(group_size);
        (1..filling.blocks_of(group_size))
            .map(|blocks| group_size.div_ceil(blocks))
            .filter(|&heads| heads <= WARPGROUP_ROWS)
            .map(Packing::of_heads)
            .find(|packing| 2 * packing.positions() >= max_qo_len)
            .unwrap_or(filling)
    }

    /// The quickest for long and for short requests together. Rows without a position, or with a head of another block, are multiplied
    /// for nothing, and every block takes a tile for the few rows of a decode. Of 16 heads a tile has few positions already: more would
    /// only make the list of items longer.
    fn filling(group_size: u32) -> Packing {
        const MOST_HEADS: u32 = 16;
        // Of a batch of prompts and decodes, what its decodes take beside its prompts.
        const DECODES: f32 = 0.25;
        let fewest = group_size.div_ceil(MOST_HEADS) as f32;
        let time = |packing: &Packing| {
            let blocks = packing.blocks_of(group_size) as f32;
            let rows = (packing.positions() * group_size) as f32;
            blocks * (WARPGROUP_ROWS as f32 / rows + DECODES / fewest)
        };
        (1..=MOST_HEADS.min(group_size))
            .map(Packing::of_heads)
            .min_by(|a, b| time(a).total_cmp(&time(b)))
            .unwrap_or(Packing::of_heads(1))
    }

    fn of_heads(heads: u32) -> Packing {
        Packing {
            heads: heads as u8,
            positions: (WARPGROUP_ROWS / heads) as u8,
            inverse: ((1 << 15) / heads + 1) as u16,
        }
    }

    /// Of a group's heads. Where it is no multiple, the last block begins in the one before.
    pub fn blocks_of(self, group_size: u32) -> u32 {
        group_size.div_ceil(self.heads.into())
    }

    /// Positions of a warpgroup's rows.
    pub fn positions(self) -> u32 {
        self.positions.into()
    }
}

/// `FOLIO_O_DTYPE_SHIFT`.
pub const O_DTYPE_SHIFT: u32 = 16;

/// `FolioPrefillParams`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
#[allow(missing_docs)]
pub struct PrefillParams {
    pub attention: AttentionParams,
    pub head_dim_qk: u32,
    pub head_dim_vo: u32,
    pub packing: Packing,
    pub row_alignment: u16,
    pub raw_box_tokens: u8,
    pub raw_boxes_of_rows: u8,
    pub page_size: Divisor,
    pub group_blocks: u16,
    pub group_size: u16,
    pub sum: SumParams,
    pub context_indptr: u64,
}

/// The number of the `static_assert` at the end of `kernels/params/prefill.h`.
const _: () = assert!(size_of::<PrefillParams>() == 432);

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: u32 = 1000;

    #[test]
    fn heads_of_a_group_share_rows() {
        let heads = |group| Packing::new(group, LONG).heads;
        let whole = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 15, 16];
        assert!(whole.iter().all(|&group| heads(group) == group as u8));
        for (group, packed) in [
            (11, 11),
            (13, 13),
            (14, 14),
            (17, 9),
            (19, 10),
            (20, 10),
            (24, 12),
            (25, 9),
            (28, 14),
            (29, 15),
            (31, 16),
            (40, 10),
            (48, 16),
            (71, 15),
        ] {
            assert_eq!(heads(group), packed, "{group}");
        }
    }

    #[test]
    fn blocks_of_short_queries_have_more_heads() {
        for (group, max_qo_len, packed) in [
            (32, 4, 32),
            (32, 5, 16),
            (64, 2, 64),
            (64, 3, 32),
            (128, 1, 64),
            (128, 2, 64),
            (14, 4, 14),
            (11, 8, 11),
            (71, 1, 36),
            (71, 2, 36),
            (71, 8, 15),
        ] {
            assert_eq!(Packing::new(group, max_qo_len).heads, packed, "{group}");
        }
    }

    /// What kernels compute of rows is the quotient.
    #[test]
    fn the_inverse_divides() {
        for group in 1..=128 {
            for packing in [1, LONG].map(|max_qo_len| Packing::new(group, max_qo_len)) {
                for row in 0..=WARPGROUP_ROWS {
                    let quotient = (row * u32::from(packing.inverse)) >> 15;
                    assert_eq!(quotient, row / u32::from(packing.heads), "{packing:?}");
                }
            }
        }
    }
}
