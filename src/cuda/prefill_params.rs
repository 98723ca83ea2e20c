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
    /// Of the heads of a group, for queries of up to so many tokens. Rows that are left are multiplied for nothing, so that
    /// there are at most four. Of 16 heads a tile has few positions already: more would only make the list of items longer,
    /// unless a tile, which has two warpgroups or three, has all rows of a request.
    pub fn new(group_size: u32, max_qo_len: u32) -> Packing {
        const MOST_HEADS: u32 = 16;
        const MOST_LEFT: u32 = 4;
        let suits =
            |heads: &u32| group_size.is_multiple_of(*heads) && WARPGROUP_ROWS % heads <= MOST_LEFT;
        let most = match group_size.saturating_mul(max_qo_len) <= 2 * WARPGROUP_ROWS {
            true => WARPGROUP_ROWS,
            false => MOST_HEADS,
        };
        let heads = (1..=most).rev().find(suits).unwrap_or(1);
        Packing {
            heads: heads as u8,
            positions: (WARPGROUP_ROWS / heads) as u8,
            inverse: ((1 << 15) / heads + 1) as u16,
        }
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
    pub row_alignment: u32,
    pub page_size: Divisor,
    pub reserved: u32,
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
    fn heads_of_a_group_share_rows_where_few_are_left() {
        let heads = |group| Packing::new(group, LONG).heads;
        let whole = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 15, 16];
        assert!(whole.iter().all(|&group| heads(group) == group as u8));
        for (group, packed) in [
            (11, 1),
            (13, 1),
            (14, 7),
            (20, 10),
            (24, 12),
            (28, 7),
            (71, 1),
        ] {
            assert_eq!(heads(group), packed, "{group}");
        }
        for (group, max_qo_len, packed) in [
            (32, 4, 32),
            (32, 5, 16),
            (64, 2, 64),
            (64, 3, 16),
            (128, 1, 64),
            (128, 2, 16),
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
