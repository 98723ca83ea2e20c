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
    /// Where the elements of a row are.
    pub order: RowOrder,
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
    /// An element of a KV head's rows: the scales are `[num_kv_heads, head_dim]` (FastDeploy's `cache_int8`).
    Channel,
    /// The same, with a zero point for each: a row holds `x / scale + zero_point` (FastDeploy's `cache_int4_zp`).
    ChannelZeroPoint,
    /// A block of so many elements: the scales are part of the row.
    Block(u32),
    /// A block of so many elements of a token and head: the scales are a tensor of e4m3 beside the cache (NVFP4).
    BlockBeside(u32),
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

/// Where the elements of a row are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum RowOrder {
    /// One after the other.
    Contiguous,
    /// vLLM's first layout: 16 bytes of a key lie together, `[num_pages, num_kv_heads, head_dim / x, page_size, x]`, and
    /// each element of a value lies with those of its page's other tokens, `[num_pages, num_kv_heads, head_dim, page_size]`.
    Packed,
}

/// Bytes that lie together of a key in [`RowOrder::Packed`].
const PACKED_BYTES: usize = 16;

/// The forms of a paged cache that callers name; with the type of the elements each is a [`CacheFormat`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum CacheForm {
    /// Elements as they are, or fp8 with a scale for the cache or for each head.
    #[default]
    Plain,
    /// int8 or e4m3, with a scale for each token and head that the append computes.
    TokenHeadScales,
    /// int8, with a scale for each element of a head.
    ChannelScales,
    /// Pairs of int4, with a scale and a zero point for each element of a head.
    ChannelZeroPoints,
    /// Pairs of e2m1, with an e4m3 scale for each 16.
    Nvfp4,
    /// [`RowOrder::Packed`], otherwise as `Plain`.
    PackedKeys,
}

impl CacheForm {
    /// The types of elements that it has beside queries of a type, the default first.
    pub fn elements(self, q_dtype: DType) -> Vec<DType> {
        match self {
            CacheForm::Plain | CacheForm::PackedKeys => {
                vec![q_dtype, DType::F8E4M3, DType::F8E5M2]
            }
            CacheForm::TokenHeadScales => vec![DType::I8, DType::F8E4M3],
            CacheForm::ChannelScales => vec![DType::I8],
            CacheForm::ChannelZeroPoints => vec![DType::I4x2],
            CacheForm::Nvfp4 => vec![DType::F4E2M1x2],
        }
    }

    /// The format of rows of these elements.
    pub fn of(self, element: DType) -> CacheFormat {
        let plain = CacheFormat::plain(element);
        let scaled = |scales| CacheFormat { scales, ..plain };
        match self {
            CacheForm::Plain => plain,
            CacheForm::TokenHeadScales => scaled(ScaleGranularity::TokenHead),
            CacheForm::ChannelScales => scaled(ScaleGranularity::Channel),
            CacheForm::ChannelZeroPoints => scaled(ScaleGranularity::ChannelZeroPoint),
            CacheForm::Nvfp4 => scaled(ScaleGranularity::BlockBeside(CacheFormat::NVFP4_BLOCK)),
            CacheForm::PackedKeys => CacheFormat {
                order: RowOrder::Packed,
                ..plain
            },
        }
    }

    /// What follows the prefix `FOLIO_KV_FORMAT_` in C.
    pub fn name(self) -> &'static str {
        match self {
            CacheForm::Plain => "PLAIN",
            CacheForm::TokenHeadScales => "TOKEN_HEAD_SCALES",
            CacheForm::ChannelScales => "CHANNEL_SCALES",
            CacheForm::ChannelZeroPoints => "CHANNEL_ZERO_POINTS",
            CacheForm::Nvfp4 => "NVFP4",
            CacheForm::PackedKeys => "PACKED_KEYS",
        }
    }
}

impl CacheFormat {
    /// `fp8_ds_mla`: 512 elements of e4m3 with a scale for each 128, and 64 rotary elements in bf16.
    pub const DS_MLA: CacheFormat = CacheFormat {
        element: DType::F8E4M3,
        scales: ScaleGranularity::Block(128),
        extra: ExtraParts::DsMla { rope_dim: 64 },
        order: RowOrder::Contiguous,
    };

    /// Elements of NVFP4 that share a scale.
    pub const NVFP4_BLOCK: u32 = 16;

    /// Elements one after the other: as they are, or fp8 with scales of the caller.
    pub const fn plain(element: DType) -> CacheFormat {
        CacheFormat {
            element,
            scales: match element {
                DType::F8E4M3 | DType::F8E5M2 => ScaleGranularity::Head,
                _ => ScaleGranularity::None,
            },
            extra: ExtraParts::None,
            order: RowOrder::Contiguous,
        }
    }

    /// The form that it has, unless it is one of latent records.
    pub fn form(self) -> CacheForm {
        match (self.scales, self.order) {
            (_, RowOrder::Packed) => CacheForm::PackedKeys,
            (ScaleGranularity::TokenHead, _) => CacheForm::TokenHeadScales,
            (ScaleGranularity::Channel, _) => CacheForm::ChannelScales,
            (ScaleGranularity::ChannelZeroPoint, _) => CacheForm::ChannelZeroPoints,
            (ScaleGranularity::BlockBeside(_), _) => CacheForm::Nvfp4,
            (ScaleGranularity::None | ScaleGranularity::Head | ScaleGranularity::Block(_), _) => {
                CacheForm::Plain
            }
        }
    }

    /// Values are rounded when they are written, and multiplied by a scale when they are read.
    pub fn is_scaled(self) -> bool {
        self.scales != ScaleGranularity::None
    }

    /// Each scale covers less than a head, and reading a row takes it from a tensor beside the cache.
    pub fn has_scales_beside(self) -> bool {
        !matches!(
            self.scales,
            ScaleGranularity::None | ScaleGranularity::Head | ScaleGranularity::Block(_)
        )
    }

    /// Of a call's scales, those that are factors of whole heads.
    pub fn head_scales<T>(self, scales: Option<T>) -> Option<T> {
        scales.filter(|_| !self.has_scales_beside())
    }

    /// Rows of `dim` elements are rows of so many elements of a tensor.
    pub fn tensor_elements(self, dim: u32) -> u32 {
        dim / u32::from(self.element.lanes())
    }

    /// What the number of elements of a row is a multiple of.
    pub fn dim_unit(self) -> u32 {
        match (self.scales, self.order) {
            (ScaleGranularity::BlockBeside(block), _) => block,
            (_, RowOrder::Packed) => self.packed_elements(),
            _ => self.element.lanes().into(),
        }
    }

    /// Elements of a key that lie together in [`RowOrder::Packed`]: `x`.
    pub fn packed_elements(self) -> u32 {
        (PACKED_BYTES / self.element.size()) as u32
    }

    /// Bytes of a row of `dim` elements in all, those of the extra parts among them.
    pub fn row_bytes(self, dim: u32) -> usize {
        match self.extra {
            ExtraParts::None => self.tensor_elements(dim) as usize * self.element.size(),
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
        assert_eq!(CacheForm::TokenHeadScales.of(DType::I8).row_bytes(128), 128);
        assert_eq!(CacheForm::Nvfp4.of(DType::F4E2M1x2).row_bytes(128), 64);
    }

    #[test]
    fn fp8_is_scaled_and_wider_types_are_not() {
        assert!(CacheFormat::from(DType::F8E4M3).is_scaled());
        assert!(CacheFormat::DS_MLA.is_scaled());
        assert!(!CacheFormat::from(DType::F16).is_scaled());
    }

    #[test]
    fn forms_and_elements_make_formats_of_that_form() {
        for form in [
            CacheForm::Plain,
            CacheForm::TokenHeadScales,
            CacheForm::ChannelScales,
            CacheForm::ChannelZeroPoints,
            CacheForm::Nvfp4,
            CacheForm::PackedKeys,
        ] {
            for element in form.elements(DType::BF16) {
                assert_eq!(form.of(element).form(), form);
            }
        }
        assert_eq!(CacheForm::PackedKeys.of(DType::F8E4M3).dim_unit(), 16);
        assert_eq!(CacheForm::PackedKeys.of(DType::F16).dim_unit(), 8);
    }
}
