//! What a problem or a run may ask for that not every attention kernel has. A kernel that is passed over
//! says which of these it lacks; the words are for the log.

use std::fmt::{Display, Formatter, Result};
use std::ops::BitOr;

/// One thing that a kernel may lack.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Feature {
    /// Keys and values that are not paged.
    RaggedKv,
    /// Pages that are no whole number of 8-token groups.
    PageSize,
    /// The desc's longest request.
    Lengths,
    /// The desc's element types, with its head dims.
    TypesAndDims,
    /// The kernel is in the table, but not in the library, and there is no compiler.
    Code,
    /// A mask of bytes or bits.
    CustomMask,
    /// Causality that goes by request.
    CausalByRequest,
    /// Ranges that see each other whatever the mask says.
    MmPrefix,
    /// A bias by distance.
    Alibi,
    /// Addresses and strides of q.
    QStrides,
    /// Addresses and strides of o.
    OStrides,
    /// Addresses and strides of k and v.
    KvStrides,
    /// k and v without an element.
    EmptyKv,
    /// How far the pages of k and v are apart, or how many there are.
    PageSteps,
    /// The number of rows of q or of ragged k and v.
    Rows,
    /// A factor on q·k that is negative or next to nothing.
    LogitsScale,
    /// Keys in two parts.
    SplitKeys,
    /// Rows that are not plain elements one after the other.
    CacheForm,
    /// Few queries for so many keys, or keys that its part of the workspace has no room for.
    Widening,
    /// Requests whose first key is within a block.
    StartsInBlocks,
    /// Numbers that are added to logits.
    ScoreBias,
    /// Addresses and strides of scales of blocks.
    BlockScales,
}

use Feature as F;

/// All features, in the order that they are listed in.
const ALL: [Feature; 22] = [
    F::RaggedKv,
    F::PageSize,
    F::Lengths,
    F::TypesAndDims,
    F::Code,
    F::CustomMask,
    F::CausalByRequest,
    F::MmPrefix,
    F::Alibi,
    F::QStrides,
    F::OStrides,
    F::KvStrides,
    F::EmptyKv,
    F::PageSteps,
    F::Rows,
    F::LogitsScale,
    F::SplitKeys,
    F::CacheForm,
    F::Widening,
    F::StartsInBlocks,
    F::ScoreBias,
    F::BlockScales,
];

impl Feature {
    fn words(self) -> &'static str {
        match self {
            F::RaggedKv => "ragged k and v",
            F::PageSize => "a page_size that is no multiple of 8",
            F::Lengths => "max_kv_len and max_qo_len as large as these",
            F::TypesAndDims => "these dtypes with these head dims",
            F::Code => "compiled code in this library, or a compiler",
            F::CustomMask => "custom_mask",
            F::CausalByRequest => "causal_requests",
            F::MmPrefix => "mm_prefix_ranges",
            F::Alibi => "alibi_slopes",
            F::QStrides => "q with this address and these strides",
            F::OStrides => "o with this address and these strides",
            F::KvStrides => "k and v with these addresses and strides",
            F::EmptyKv => "k and v without elements",
            F::PageSteps => "pages of k and v that lie so far apart",
            F::Rows => "as many rows of q, k or v",
            F::LogitsScale => "an sm_scale that is not positive",
            F::SplitKeys => "k_rope",
            F::CacheForm => "kv_format",
            F::StartsInBlocks => "new keys by position",
            F::ScoreBias => "score_bias",
            F::BlockScales => "k_scales and v_scales with these addresses and strides",
            F::Widening => "a batch of so few queries or so many keys",
        }
    }

    fn bit(self) -> u32 {
        1 << self as u32
    }
}

/// A set of features.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Features(u32);

impl Features {
    /// With one more, where it is `lacking`.
    pub fn and(self, feature: Feature, lacking: bool) -> Features {
        Features(self.0 | if lacking { feature.bit() } else { 0 })
    }

    /// Nothing is missing.
    pub fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// As the bits of a number.
    pub fn bits(self) -> u32 {
        self.0
    }
}

impl From<Feature> for Features {
    fn from(feature: Feature) -> Features {
        Features(feature.bit())
    }
}

impl BitOr for Features {
    type Output = Features;

    fn bitor(self, other: Features) -> Features {
        Features(self.0 | other.0)
    }
}

impl Display for Features {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        let listed = ALL.iter().filter(|feature| self.0 & feature.bit() != 0);
        for (i, feature) in listed.enumerate() {
            f.write_str(if i == 0 { "" } else { "; " })?;
            f.write_str(feature.words())?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_set_lists_what_is_in_it() {
        let none = Features::default();
        assert!(none.is_empty() && none.and(F::Alibi, false).is_empty());
        let two = none.and(F::CustomMask, true) | Features::from(F::RaggedKv);
        assert_eq!(two.to_string(), "ragged k and v; custom_mask");
    }

    #[test]
    fn every_feature_is_listed() {
        for (i, feature) in ALL.iter().enumerate() {
            assert_eq!(*feature as usize, i);
        }
        let all = ALL.iter().fold(Features::default(), |set, &feature| {
            set | Features::from(feature)
        });
        assert_eq!(all.to_string().matches("; ").count() + 1, ALL.len());
    }
}
