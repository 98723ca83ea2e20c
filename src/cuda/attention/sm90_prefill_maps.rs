//! The tensor maps that the Hopper prefill kernels read Q, K and V by, and what maps, or copies of rows, cannot describe. Which kernel
//! takes a run is `sm90_prefill`'s matter.

use super::features::{Feature, Features};
use super::sm90::{GROUP, Map, rows_are_distinct};
use crate::cuda::driver::{Current, Swizzle, TensorMap};
use crate::cuda::kernels::attention::{AttentionRow, KeySource};
use crate::cuda::params::row_alignment;
use crate::cuda::prefill_params::Packing;
use crate::error::Result;
use crate::problem::KvStorage;
use crate::tensor::Tensor;

/// Columns of a box: a swizzle atom, 128 bytes of 16-bit elements. Where a row ends within a box, the rest is zeros.
const BOX_COLUMNS: u32 = 64;
pub const SWIZZLE: Swizzle = Swizzle::Span128;
/// Rows are copied so many bytes at a time, and those that are converted by half as many where their addresses ask for it:
/// fp8 rows of 72 elements, or 120, begin at every odd multiple of 8.
const ROW_BYTES: u32 = 16;

/// How the kernels for one problem read its tensors.
#[derive(Debug, Clone, Copy)]
pub struct PrefillMaps {
    /// By maps, or row by row.
    pub keys: KeySource,
    /// The problem's.
    pub kv: KvStorage,
    /// That of the preferred form of keys.
    pub row: &'static AttentionRow,
    /// A box of a page has all columns of its rows.
    pub columns_together: bool,
    /// Query heads of a box.
    pub packing: Packing,
}

/// Boxes of rows that are converted.
#[derive(Debug, Clone, Copy)]
pub struct RawBoxes {
    pub tokens: u8,
    /// A box has all columns of its tokens, or 64.
    pub of_rows: bool,
}

impl PrefillMaps {
    /// Of queries, keys and values; where rows come one by one, those of the queries for all, since no other is read. Rows that are
    /// converted lie as they come, since who converts them reads them.
    pub fn all(
        &self,
        row: &AttentionRow,
        raw: Option<RawBoxes>,
        current: &Current<'_>,
        [q, k, v]: [&Tensor; 3],
    ) -> Result<[TensorMap; 3]> {
        let driver = current.driver();
        let q = self.query(q).encode(driver, SWIZZLE)?;
        let (columns_together, swizzle) = match (self.keys, raw) {
            (KeySource::Tma, _) => (self.columns_together, SWIZZLE),
            (KeySource::Gather, Some(boxes)) => (boxes.of_rows, Swizzle::None),
            (KeySource::Gather, None) => return Ok([q; 3]),
        };
        let cache = |cache| {
            self.cache(cache, row, columns_together)
                .encode(driver, swizzle)
        };
        Ok([q, cache(k)?, cache(v)?])
    }

    /// By which rows of fp8 come that are converted; `None` where none are, and where no map describes both K and V: those come one
    /// by one.
    pub fn raw_boxes(&self, row: &AttentionRow, [k, v]: [&Tensor; 2]) -> Option<RawBoxes> {
        let whole_groups = match self.kv {
            KvStorage::Paged { page_size, .. } => page_size.is_multiple_of(GROUP),
            KvStorage::Ragged => true,
        };
        let converts = row.types.kv != row.types.q;
        let described = |cache| self.missing_of_maps(cache).is_empty();
        if !(converts && whole_groups && described(k) && described(v)) {
            return None;
        }
        let has_all = |cache: &Tensor, dim: u32| {
            dim.is_multiple_of(BOX_COLUMNS) && cache.extent(3) == i64::from(dim)
        };
        let shape = &row.shape;
        Some(RawBoxes {
            tokens: self.box_tokens(row) as u8,
            of_rows: self.kv != KvStorage::Ragged
                && has_all(k, shape.head_dim_qk)
                && has_all(v, shape.head_dim_vo),
        })
    }

    /// Of keys in two parts and values.
    pub fn split(&self, current: &Current<'_>, caches: [&Tensor; 3]) -> Result<[TensorMap; 3]> {
        let map = |cache| {
            self.cache(cache, self.row, self.columns_together)
                .encode(current.driver(), SWIZZLE)
        };
        let [k, v, k_rope] = caches.map(map);
        Ok([k?, v?, k_rope?])
    }

    /// 8-token groups from page to page of k_rope.
    pub fn page_groups(&self, k_rope: &Tensor) -> u32 {
        match self.kv {
            KvStorage::Paged { .. } => {
                (k_rope.stride(0) / (i64::from(GROUP) * k_rope.stride(1))) as u32
            }
            KvStorage::Ragged => 0,
        }
    }

    /// `[position][head][column]`; a box is a column block of a warpgroup's rows.
    pub fn query(&self, q: &Tensor) -> Map {
        Map::new(q)
            .dimension(q.extent(2) as u32, BOX_COLUMNS, 1)
            .dimension(q.extent(1) as u32, self.packing.heads.into(), q.stride(1))
            .dimension(q.extent(0) as u32, self.packing.positions(), q.stride(0))
    }

    /// Paged: `[8-token group][head][column block][token][column]`, where the groups of a page follow one
    /// another and pages are a whole number of groups apart; a box is as many groups as a page and a step
    /// have in common. Where columns do not come together, rows are one block, of which a box has a part.
    /// Ragged: `[head][token][column]`, a box is 64 columns of a step.
    fn cache(&self, cache: &Tensor, row: &AttentionRow, columns_together: bool) -> Map {
        let heads = cache.extent(2) as u32;
        let columns = cache.extent(3) as u32;
        let KvStorage::Paged { page_size, .. } = self.kv else {
            return Map::new(cache)
                .dimension(columns, BOX_COLUMNS, 1)
                .dimension(
                    cache.extent(0) as u32,
                    self.box_tokens(row),
                    cache.stride(0),
                )
                .dimension(heads, 1, cache.stride(2));
        };
        let (columns, blocks) = match columns_together {
            true => (BOX_COLUMNS, columns / BOX_COLUMNS),
            false => (columns, 1),
        };
        let token = cache.stride(1);
        Map::new(cache)
            .dimension(columns, BOX_COLUMNS, 1)
            .dimension(GROUP, GROUP, token)
            .dimension(blocks, blocks, i64::from(BOX_COLUMNS))
            .dimension(heads, 1, cache.stride(2))
            .dimension(
                num_groups(cache, page_size) as u32,
                self.box_tokens(row) / GROUP,
                i64::from(GROUP) * token,
            )
    }

    /// Tokens of a box: of ragged rows a step, of pages as many as a page and a step have in common.
    fn box_tokens(&self, row: &AttentionRow) -> u32 {
        let kv_tile = row.shape.kv_tile;
        match self.kv {
            KvStorage::Paged { page_size, .. } => 1 << (page_size | kv_tile).trailing_zeros(),
            KvStorage::Ragged => kv_tile,
        }
    }

    /// Why the maps cannot describe the cache, or its rows not be copied.
    pub fn missing_of_cache(&self, cache: &Tensor) -> Features {
        if self.keys == KeySource::Gather {
            let least = match self.row.types.kv == self.row.types.q {
                true => ROW_BYTES,
                false => ROW_BYTES / 2,
            };
            return Features::default().and(Feature::KvStrides, row_alignment(cache) < least);
        }
        self.missing_of_maps(cache)
    }

    /// Why no map can describe the cache.
    fn missing_of_maps(&self, cache: &Tensor) -> Features {
        const MOST_COORDINATES: i64 = i32::MAX as i64;
        if cache.is_empty() {
            return Feature::EmptyKv.into();
        }
        if !rows_suit(cache) {
            return Feature::KvStrides.into();
        }
        let lacks = Features::default();
        let KvStorage::Paged { page_size, .. } = self.kv else {
            return lacks.and(Feature::Rows, cache.extent(0) > MOST_COORDINATES);
        };
        let group = i64::from(GROUP) * cache.stride(1);
        let one_page = cache.extent(0) <= 1;
        let in_groups = one_page || cache.stride(0) % group == 0;
        let within = cache.stride(0) >> 3 <= i64::from(u32::MAX)
            && num_groups(cache, page_size) <= MOST_COORDINATES;
        lacks.and(Feature::PageSteps, !(in_groups && within))
    }
}

/// 8-token groups from the first to the last page.
pub fn num_groups(cache: &Tensor, page_size: u32) -> i64 {
    let per_page = match cache.extent(0) {
        0 | 1 => 0,
        _ => cache.stride(0) / (i64::from(GROUP) * cache.stride(1)),
    };
    (cache.extent(0) - 1).max(0) * per_page + i64::from(page_size / GROUP)
}

/// Rows of o, of any type, start at whole pieces of eight elements, or of 16 bytes.
pub fn outputs_suit(o: &Tensor) -> bool {
    rows_start_at(o, (GROUP * o.dtype().size() as u32).min(ROW_BYTES))
}

/// What rows of queries lack, which suit or not, and rows of outputs.
pub fn missing_of_rows(q_suits: bool, q: &Tensor, o: &Tensor) -> Features {
    Features::default()
        .and(Feature::QStrides, !q_suits)
        .and(Feature::OStrides, !outputs_suit(o))
        .and(Feature::Rows, q.extent(0) > i64::from(i32::MAX))
}

/// Rows start at whole pieces.
pub fn rows_suit(tensor: &Tensor) -> bool {
    rows_start_at(tensor, ROW_BYTES)
}

/// At multiples of so many bytes, and apart. An empty tensor has no rows that a map could describe.
fn rows_start_at(tensor: &Tensor, bytes: u32) -> bool {
    !tensor.is_empty() && row_alignment(tensor) >= bytes && rows_are_distinct(tensor)
}
