//! How a row of a KV cache is stored. One value says it for every layer: no other place derives bytes from elements,
//! or scales from element types.

use crate::dtype::DType;

/// The storage of one row, which holds the key or the value of one token and head, or the latent record of one token.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct CacheFormat {
    /// The elements.
    pub element: DType,
    /// What one scale covers.
    pub scales: ScaleGranularity,
    /// What a row holds beside its elements.
    pub extra: ExtraParts,
}

/// What one scale covers, and where the scales are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ScaleGranularity {
    /// Values are stored as they are.
    None,
    /// The tensor, or a KV head of it: the caller passes one scale or one for each head beside the cache.
    Head,
    /// A token and head: the scales are a tensor beside the cache (vLLM's per-token-head formats).
    TokenHead,
    /// A block of so many elements: the scales are part of the row.
    Block(u32),
}

/// What a row holds beside its elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ExtraParts {
    /// Nothing.
    None,
    /// DeepSeek's `fp8_ds_mla`: four fp32 scales, one for each 128 latent elements, and then the rotary part of so many
    /// bf16 elements (FlashMLA's and vLLM's record of 512 + 16 + 128 bytes).
    DsMla {
        /// Elements of the rotary part.
        rope_dim: u32,
    },
}

impl CacheFormat {
    /// `fp8_ds_mla`: 512 elements of e4m3 with a scale for each 128, and 64 rotary elements in bf16.
    pub const DS_MLA: CacheFormat = CacheFormat {
        element: DType::F8E4M3,
        scales: ScaleGranularity::Block(128),
        extra: ExtraParts::DsMla { rope_dim: 64 },
    };

    /// Elements one after the other: as they are, or fp8 with scales of the caller.
    pub const fn plain(element: DType) -> CacheFormat {
        CacheFormat {
            element,
            scales: match element {
                DType::F8E4M3 | DType::F8E5M2 => ScaleGranularity::Head,
                _ => ScaleGranularity::None,
            },
            extra: ExtraParts::None,
        }
    }

    /// Values are rounded when they are written, and multiplied by a scale when they are read.
    pub fn is_scaled(self) -> bool {
        self.scales != ScaleGranularity::None
    }

    /// Bytes of a row of `dim` elements in all, those of the extra parts among them.
    pub fn row_bytes(self, dim: u32) -> usize {
        match self.extra {
            ExtraParts::None => dim as usize * self.element.size(),
            ExtraParts::DsMla { rope_dim } => {
                let latent = dim - rope_dim;
                let block = match self.scales {
                    ScaleGranularity::Block(elements) => elements,
                    _ => latent,
                };
                let scales = latent.div_ceil(block) as usize * size_of::<f32>();
                latent as usize * self.element.size()
                    + scales
                    + rope_dim as usize * DType::BF16.size()
            }
        }
    }
}

impl From<DType> for CacheFormat {
    fn from(element: DType) -> CacheFormat {
        CacheFormat::plain(element)
    }
}

impl std::fmt::Display for CacheFormat {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.extra {
            ExtraParts::None => write!(f, "{}", self.element),
            ExtraParts::DsMla { .. } => f.write_str("fp8_ds_mla"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_have_the_bytes_of_their_format() {
        assert_eq!(CacheFormat::plain(DType::BF16).row_bytes(576), 1152);
        assert_eq!(CacheFormat::plain(DType::F8E5M2).row_bytes(576), 576);
        assert_eq!(CacheFormat::plain(DType::F32).row_bytes(8), 32);
        assert_eq!(CacheFormat::DS_MLA.row_bytes(576), 656);
    }

    #[test]
    fn fp8_is_scaled_and_wider_types_are_not() {
        assert!(CacheFormat::from(DType::F8E4M3).is_scaled());
        assert!(CacheFormat::DS_MLA.is_scaled());
        assert!(!CacheFormat::from(DType::F16).is_scaled());
    }
}
