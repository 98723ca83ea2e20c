//! Which keys a query row sees: one range where that says it all, and a row of limits where the visible keys have
//! holes.
//!
//! The contract is `(base AND window) OR mm-prefix`, or `(base OR mm-prefix) AND window` for runs that say so. Base and
//! window of a row give one range, whose bounds never fall from row to row. Chunks of local attention are a window whose
//! left side depends on the row. Only custom masks, items and mm-prefix ranges make holes.

use crate::problem::{AttentionArgs, AttentionChunks, Checked, Mask, MaskColumns, Window};
use crate::tensor::Tensor;
use std::ops::Range;

/// The base mask of one request.
#[derive(Debug, Clone, Copy)]
enum Base<'a> {
    Causal,
    Full,
    /// A byte per (row, column).
    Bytes(&'a [u8]),
    /// A bit per (row, column), little-endian within a byte.
    Bits(&'a [u8]),
    /// Causal; the keys from `start` on are items, in which these are their positions.
    Items {
        start: i64,
        positions: &'a [i32],
    },
}

/// What is around a row's own position.
#[derive(Debug, Clone, Copy)]
struct Surroundings {
    /// Keys before and after it, [`UNLIMITED`] where that is not bounded.
    left: i64,
    right: i64,
    /// Keys of a chunk, 0 where there are none, and chunks to look back.
    chunk_size: i64,
    look_back: i64,
}

/// More keys than any request has.
const UNLIMITED: i64 = 1 << 40;

impl Surroundings {
    fn of(window: Window, chunks: Option<AttentionChunks>) -> Surroundings {
        let keys = |side: Option<u32>| side.map_or(UNLIMITED, i64::from);
        Surroundings {
            left: keys(window.left),
            right: keys(window.right),
            chunk_size: chunks.map_or(0, |chunks| chunks.size.get().into()),
            look_back: chunks.map_or(0, |chunks| chunks.look_back.into()),
        }
    }

    /// The first key that the row at `position` may see; it may be below 0.
    fn begin(&self, position: i64) -> i64 {
        let first = position - self.left;
        if self.chunk_size == 0 {
            return first;
        }
        // A chunk before the first key would be too far for 64 bits.
        let chunk = (position.div_euclid(self.chunk_size) - self.look_back).max(0);
        first.max(chunk * self.chunk_size)
    }

    /// The key after the last that the row may see.
    fn end(&self, position: i64) -> i64 {
        position + self.right + 1
    }
}

/// The keys that the rows of one request see.
#[derive(Debug, Clone, Copy)]
pub struct RequestMask<'a> {
    base: Base<'a>,
    columns: MaskColumns,
    surroundings: Surroundings,
    /// Pairs (start, end), inclusive.
    ranges: &'a [i32],
    /// The ranges hold only around a row.
    clip_ranges: bool,
    kv_len: i64,
    /// Position of row 0; negative where there are more rows than keys.
    past: i64,
}

/// Masks of all requests of a run.
#[derive(Debug, Clone, Copy)]
pub struct Masks<'a> {
    mask: Mask,
    columns: MaskColumns,
    surroundings: Surroundings,
    /// A custom mask, or a byte per request.
    bytes: &'a [u8],
    /// Of custom masks, in bytes; of items, in keys.
    starts: Option<&'a [i64]>,
    /// Positions in items, `columns` of each request.
    positions: &'a [i32],
    positions_per_request: usize,
    ranges: &'a [i32],
    ranges_per_request: usize,
    clip_ranges: bool,
}

/// A request, as its mask needs it.
#[derive(Debug, Clone, Copy)]
pub struct Extents {
    /// Position of row 0.
    pub past: i64,
    pub kv_len: i64,
    /// First byte of a custom mask of bytes, and of one of bits, where the run does not state it.
    pub mask_start: [i64; 2],
}

impl<'a> Masks<'a> {
    /// The masks in `args`; their tensors must outlive the result.
    pub fn new(args: &'a Checked<AttentionArgs>) -> Masks<'a> {
        let bytes = match &args.mask {
            Mask::Bytes(tensor) | Mask::Bits(tensor) | Mask::CausalByRequest(tensor) => {
                tensor.as_bytes().unwrap_or_default()
            }
            Mask::Causal | Mask::Full | Mask::Items { .. } => &[],
        };
        let (starts, positions) = match &args.mask {
            Mask::Items { starts, positions } => (Some(starts), Some(positions)),
            _ => (args.custom_mask_indptr.as_ref(), None),
        };
        let ranges = args.mm_prefix_ranges.as_ref();
        Masks {
            mask: args.mask,
            columns: args.mask_columns,
            surroundings: Surroundings::of(args.window, args.chunks),
            bytes,
            starts: starts.and_then(Tensor::as_i64),
            positions: positions.and_then(Tensor::as_i32).unwrap_or_default(),
            positions_per_request: positions.map_or(0, |t| t.extent(1) as usize),
            ranges: ranges.and_then(|t| t.as_i32()).unwrap_or_default(),
            ranges_per_request: ranges.map_or(0, |t| t.extent(1) as usize),
            clip_ranges: args.mm_prefix_in_window,
        }
    }

    /// What request `b` sees.
    pub fn of(&self, b: usize, extents: Extents) -> RequestMask<'a> {
        let stride = 2 * self.ranges_per_request;
        let Extents {
            past,
            kv_len,
            mask_start,
        } = extents;
        let custom =
            |start: i64| &self.bytes[self.starts.map_or(start, |starts| starts[b]) as usize..];
        RequestMask {
            base: match self.mask {
                Mask::Causal => Base::Causal,
                Mask::Full => Base::Full,
                Mask::CausalByRequest(_) if self.bytes[b] == 0 => Base::Full,
                Mask::CausalByRequest(_) => Base::Causal,
                Mask::Bytes(_) => Base::Bytes(custom(mask_start[0])),
                Mask::Bits(_) => Base::Bits(custom(mask_start[1])),
                Mask::Items { .. } => Base::Items {
                    start: self.starts.map_or(0, |starts| starts[b]),
                    positions: &self.positions[b * self.positions_per_request..]
                        [..self.positions_per_request],
                },
            },
            columns: self.columns,
            surroundings: self.surroundings,
            ranges: &self.ranges[b * stride..(b + 1) * stride],
            clip_ranges: self.clip_ranges,
            kv_len,
            past,
        }
    }
}

impl RequestMask<'_> {
    /// The row's position among the keys.
    pub fn position(&self, row: i64) -> i64 {
        self.past + row
    }

    /// The keys within base and window; a custom mask shows no others. Empty ranges are `0..0`.
    pub fn row(&self, row: i64) -> Range<i64> {
        let (low, high) = self.bounds(row);
        if low < high { low..high } else { 0..0 }
    }

    /// Bounds of base and window, which may have crossed. Neither falls from row to row.
    fn bounds(&self, row: i64) -> (i64, i64) {
        let around = self.around(row);
        match self.base {
            Base::Causal | Base::Items { .. } => (around.0, around.1.min(self.position(row) + 1)),
            _ => around,
        }
    }

    /// Bounds of the window, as [`RequestMask::bounds`].
    fn around(&self, row: i64) -> (i64, i64) {
        let p = self.position(row);
        (
            self.surroundings.begin(p).max(0),
            self.surroundings.end(p).min(self.kv_len),
        )
    }

    /// What a row sees by mm-prefix ranges: those that contain its position, as ranges of keys.
    fn prefixes(&self, row: i64) -> impl Iterator<Item = Range<i64>> {
        let p = self.position(row);
        let (low, high) = match self.clip_ranges {
            true => self.around(row),
            false => (0, self.kv_len),
        };
        self.ranges.chunks_exact(2).filter_map(move |pair| {
            let (start, end) = (i64::from(pair[0]), i64::from(pair[1]));
            let keys = start.max(low)..(end + 1).min(high);
            (start < end && (start..=end).contains(&p) && !keys.is_empty()).then_some(keys)
        })
    }

    /// Whether the keys of `keys` that a row sees may differ from those of [`RequestMask::row`].
    pub fn has_holes(&self, row: i64, keys: &Range<i64>) -> bool {
        let seen = self.row(row);
        self.is_custom(row, keys)
            || self
                .prefixes(row)
                .any(|prefix| prefix.start < seen.start || prefix.end > seen.end)
    }

    /// Whether a custom mask decides on some of `keys`, or some are of items before the row's.
    fn is_custom(&self, row: i64, keys: &Range<i64>) -> bool {
        match self.base {
            Base::Causal | Base::Full => false,
            Base::Bytes(_) | Base::Bits(_) => {
                self.columns == MaskColumns::Keys || keys.end > self.past
            }
            Base::Items { start, positions } => {
                keys.end > start && keys.start < self.item_begin(row, start, positions)
            }
        }
    }

    /// The first key of the row's item; `start` at least.
    fn item_begin(&self, row: i64, start: i64, positions: &[i32]) -> i64 {
        let p = self.position(row);
        let of_items = usize::try_from(p - start).ok();
        let position = of_items.map_or(Some(&0), |at| positions.get(at));
        position
            .map_or(p + 1, |&position| p - i64::from(position))
            .max(start)
    }

    /// The smallest known range that holds every key that one of `rows` sees. Keys outside of it are not read.
    pub fn span(&self, rows: Range<i64>) -> Range<i64> {
        if self.ranges.is_empty() && !rows.is_empty() {
            let (low, high) = (self.bounds(rows.start).0, self.bounds(rows.end - 1).1);
            return if low < high { low..high } else { 0..0 };
        }
        let mut span = 0..0;
        for row in rows {
            span = join(span, self.row(row));
            for keys in self.prefixes(row) {
                span = join(span, keys);
            }
        }
        span
    }

    /// +inf for the keys of `keys` that the row sees, -inf for the others.
    pub fn limits(&self, row: i64, keys: Range<i64>, limits: &mut [f32]) {
        let seen = self.row(row);
        for (j, limit) in keys.clone().zip(limits.iter_mut()) {
            let visible = seen.contains(&j) && self.custom(row, j);
            *limit = if visible {
                f32::INFINITY
            } else {
                f32::NEG_INFINITY
            };
        }
        for prefix in self.prefixes(row) {
            let (low, high) = (prefix.start.max(keys.start), prefix.end.min(keys.end));
            for j in low..high {
                limits[(j - keys.start) as usize] = f32::INFINITY;
            }
        }
    }

    fn custom(&self, row: i64, j: i64) -> bool {
        if let Base::Items { start, positions } = self.base {
            return j < start || j >= self.item_begin(row, start, positions);
        }
        let Some(element) = self.element(row, j) else {
            return true;
        };
        match self.base {
            Base::Causal | Base::Full | Base::Items { .. } => true,
            Base::Bytes(bytes) => bytes[element] != 0,
            Base::Bits(bits) => bits[element / 8] >> (element % 8) & 1 == 1,
        }
    }

    /// The element of a custom mask for a row and a key, if there is one.
    fn element(&self, row: i64, j: i64) -> Option<usize> {
        let element = match self.columns {
            MaskColumns::Keys => row * self.kv_len + j,
            _ if j < self.past => return None,
            MaskColumns::KeysAfterPrefix => row * self.kv_len + j,
            MaskColumns::NewKeys => row * (self.kv_len - self.past) + j - self.past,
        };
        Some(element as usize)
    }
}

/// The smallest range that holds both. Empty ranges add nothing.
fn join(a: Range<i64>, b: Range<i64>) -> Range<i64> {
    match (a.is_empty(), b.is_empty()) {
        (true, _) => b,
        (_, true) => a,
        _ => a.start.min(b.start)..a.end.max(b.end),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::num::NonZeroU32;

    fn mask(base: Base<'static>, window: Window, ranges: &'static [i32]) -> RequestMask<'static> {
        RequestMask {
            base,
            columns: MaskColumns::Keys,
            surroundings: Surroundings::of(window, None),
            ranges,
            clip_ranges: false,
            kv_len: 10,
            past: 6,
        }
    }

    fn seen(mask: &RequestMask<'_>, row: i64) -> Vec<i64> {
        let mut limits = [0.0; 10];
        mask.limits(row, 0..10, &mut limits);
        (0..10).filter(|&j| limits[j as usize] > 0.0).collect()
    }

    #[test]
    fn causal_is_bottom_right_and_windows_clip() {
        let causal = mask(Base::Causal, Window::default(), &[]);
        assert_eq!(causal.row(0), 0..7);
        assert_eq!(causal.row(3), 0..10);
        let window = Window {
            left: Some(2),
            right: Some(1),
        };
        assert_eq!(mask(Base::Full, window, &[]).row(0), 4..8);
        assert_eq!(mask(Base::Causal, window, &[]).row(0), 4..7);
        assert_eq!(mask(Base::Causal, window, &[]).span(0..3), 4..9);
        let mut early = causal;
        early.past = -3;
        assert_eq!(
            (early.row(0), early.row(2), early.row(3)),
            (0..0, 0..0, 0..1)
        );
    }

    #[test]
    fn prefixes_add_to_the_range() {
        let mm = mask(
            Base::Causal,
            Window {
                left: Some(0),
                right: None,
            },
            &[5, 8, 3, 3, 9, 40],
        );
        assert!(mm.has_holes(0, &(0..10)) && mm.has_holes(2, &(0..10)));
        assert_eq!(seen(&mm, 0), [5, 6, 7, 8]);
        assert_eq!(mm.span(0..1), 5..9);
        assert_eq!(seen(&mm, 3), [9]);
        assert!(!mm.has_holes(3, &(0..10)));
    }

    #[test]
    fn custom_masks_are_clipped_by_the_window() {
        let bits: &[u8] = &[0b1111_0000, 0b10];
        let window = Window {
            left: Some(1),
            right: None,
        };
        let custom = mask(Base::Bits(bits), window, &[]);
        assert!(custom.has_holes(0, &(0..10)));
        assert_eq!(seen(&custom, 0), [5, 6, 7, 9]);
        let bytes: &[u8] = &[1, 0, 2, 0, 0, 0, 0, 0, 0, 3];
        let custom = mask(Base::Bytes(bytes), Window::default(), &[]);
        assert_eq!(seen(&custom, 0), [0, 2, 9]);
    }

    #[test]
    fn chunks_are_windows_that_begin_at_multiples() {
        let mut chunked = mask(Base::Causal, Window::default(), &[]);
        let chunks = |look_back| {
            Some(AttentionChunks {
                size: NonZeroU32::new(4).unwrap(),
                look_back,
            })
        };
        chunked.surroundings = Surroundings::of(Window::default(), chunks(0));
        assert_eq!((chunked.row(1), chunked.row(2)), (4..8, 8..9));
        chunked.surroundings = Surroundings::of(Window::default(), chunks(1));
        assert_eq!((chunked.row(1), chunked.row(2)), (0..8, 4..9));
        chunked.surroundings.left = 1;
        assert_eq!(chunked.row(2), 7..9);
        let far = AttentionChunks {
            size: NonZeroU32::MAX,
            look_back: u32::MAX,
        };
        chunked.surroundings = Surroundings::of(Window::default(), Some(far));
        assert_eq!(chunked.row(2), 0..9);
    }

    #[test]
    fn items_see_the_prefix_and_themselves() {
        // Keys 0 to 3 are the prefix; items of two, one and three tokens.
        let positions: &[i32] = &[0, 1, 0, 0, 1];
        let base = Base::Items {
            start: 4,
            positions,
        };
        let items = mask(base, Window::default(), &[]);
        assert_eq!(seen(&items, 0), [0, 1, 2, 3, 6]);
        assert_eq!(seen(&items, 2), [0, 1, 2, 3, 7, 8]);
        // The last has no column.
        assert_eq!(seen(&items, 3), [0, 1, 2, 3]);
        assert!(!items.has_holes(2, &(0..4)) && items.has_holes(2, &(0..5)));
        assert!(!items.has_holes(2, &(7..10)));
        let mut prompt = items;
        prompt.past = 0;
        assert_eq!(seen(&prompt, 2), [0, 1, 2]);
        assert_eq!(seen(&prompt, 5), [0, 1, 2, 3, 4, 5]);
    }

    #[test]
    fn columns_of_a_custom_mask() {
        // Rows of the four new keys 6 to 9.
        let bits: &[u8] = &[0b0000_0010, 0];
        let mut custom = mask(Base::Bits(bits), Window::default(), &[]);
        custom.columns = MaskColumns::NewKeys;
        assert_eq!(seen(&custom, 0), [0, 1, 2, 3, 4, 5, 7]);
        assert!(!custom.has_holes(0, &(0..6)) && custom.has_holes(0, &(0..7)));
        let bytes: &[u8] = &[0, 0, 0, 0, 0, 0, 0, 0, 1, 0];
        let mut custom = mask(Base::Bytes(bytes), Window::default(), &[]);
        custom.columns = MaskColumns::KeysAfterPrefix;
        assert_eq!(seen(&custom, 0), [0, 1, 2, 3, 4, 5, 8]);
    }

    #[test]
    fn ranges_may_be_clipped_by_the_window() {
        let window = Window {
            left: Some(2),
            right: Some(1),
        };
        let mut mm = mask(Base::Causal, window, &[0, 9]);
        assert_eq!(seen(&mm, 0), [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]);
        mm.clip_ranges = true;
        assert_eq!(seen(&mm, 0), [4, 5, 6, 7]);
        assert_eq!(mm.span(0..2), 4..9);
    }
}
