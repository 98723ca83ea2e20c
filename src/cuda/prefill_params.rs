//! Mirror of the struct in `kernels/params/prefill.h`, field by field; its size is asserted on both sides. What the
//! fields mean is written there.

use super::params::AttentionParams;

/// `FolioPacking`.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct Packing {
    pub heads: u16,
    pub inverse: u16,
}

/// Rows of a warpgroup.
pub const WARPGROUP_ROWS: u32 = 64;

impl Packing {
    /// Of the heads of a group. Of 16 heads a tile has few positions already: more would only make the list of items longer.
    /// Rows that are left are multiplied for nothing, so that there are at most four.
    pub fn of_group(group_size: u32) -> Packing {
        const MOST_HEADS: u32 = 16;
        const MOST_LEFT: u32 = 4;
        let suits = |heads: &u32| {
            group_size.is_multiple_of(*heads) && WARPGROUP_ROWS % heads <= MOST_LEFT
        };
        let heads = (1..=MOST_HEADS).rev().find(suits).unwrap_or(1) as u16;
        Packing {
            heads,
            inverse: (1 << 15) / heads + 1,
        }
    }

    /// Positions of a warpgroup's rows.
    pub fn positions(self) -> u32 {
        WARPGROUP_ROWS / u32::from(self.heads)
    }
}

/// `FolioPrefillParams`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
#[allow(missing_docs)]
pub struct PrefillParams {
    pub attention: AttentionParams,
    pub head_dim_qk: u32,
    pub head_dim_vo: u32,
    pub packing: Packing,
    pub reserved: u32,
}

/// The number of the `static_assert` at the end of `kernels/params/prefill.h`.
const _: () = assert!(size_of::<PrefillParams>() == 392);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heads_of_a_group_share_rows_where_few_are_left() {
        let heads = |group| Packing::of_group(group).heads;
        let own = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 15, 16];
        assert!(own.iter().all(|&group| heads(group) == group as u16));
        let others = [(11, 1), (13, 1), (14, 7), (20, 10), (24, 12), (28, 7), (32, 16), (71, 1), (128, 16)];
        assert!(others.iter().all(|&(group, packed)| heads(group) == packed));
    }

    /// What kernels compute of rows is the quotient.
    #[test]
    fn the_inverse_divides() {
        for packing in (1..=128).map(Packing::of_group) {
            for row in 0..=WARPGROUP_ROWS {
                let quotient = row * u32::from(packing.inverse) >> 15;
                assert_eq!(quotient, row / u32::from(packing.heads), "{packing:?}");
            }
        }
    }
}
