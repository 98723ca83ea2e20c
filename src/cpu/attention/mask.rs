//! Which keys a query row sees: one range where that says it all, and a row of limits where the visible keys have
//! holes.
//!
//! The contract is `(base AND window) OR mm-prefix`. Base and window of a row give one range, whose bounds never
//! fall from row to row. Only custom masks and mm-prefix ranges make holes.

use crate::problem::{AttentionArgs, Checked, Mask, Window};
use std::ops::Range;

/// The base mask of one request.
#[derive(Debug, Clone, Copy)]
enum Base<'a> {
    Causal,
    Full,
    /// A byte per (row, key).
    Bytes(&'a [u8]),
    /// A bit per (row, key), little-endian within a byte.
    Bits(&'a [u8]),
}

/// The keys that the rows of one request see.
#[derive(Debug, Clone, Copy)]
pub struct RequestMask<'a> {
    base: Base<'a>,
    window: Window,
    /// Pairs (start, end), inclusive.
    ranges: &'a [i32],
    kv_len: i64,
    /// Position of row 0; negative where there are more rows than keys.
    past: i64,
}

/// Masks of all requests of a run.
#[derive(Debug, Clone, Copy)]
pub struct Masks<'a> {
    mask: Mask,
    window: Window,
    custom: &'a [u8],
    ranges: &'a [i32],
    ranges_per_request: usize,
}

impl<'a> Masks<'a> {
    /// The masks in `args`; their tensors must outlive the result.
    pub fn new(args: &'a Checked<AttentionArgs>) -> Masks<'a> {
        let custom = match &args.mask {
            Mask::Bytes(tensor) | Mask::Bits(tensor) => tensor.as_bytes().unwrap_or_default(),
            Mask::Causal | Mask::Full => &[],
        };
        let ranges = args.mm_prefix_ranges.as_ref();
        Masks {
            mask: args.mask,
            window: args.window,
            custom,
            ranges: ranges.and_then(|t| t.as_i32()).unwrap_or_default(),
            ranges_per_request: ranges.map_or(0, |t| t.extent(1) as usize),
        }
    }

    /// What request `b` sees, whose row 0 stands at position `past`. `mask_start` is its first byte of a custom
    /// mask of bytes, and of one of bits.
    pub fn of(&self, b: usize, past: i64, kv_len: i64, mask_start: [i64; 2]) -> RequestMask<'a> {
        let stride = 2 * self.ranges_per_request;
        RequestMask {
            base: match self.mask {
                Mask::Causal => Base::Causal,
                Mask::Full => Base::Full,
                Mask::Bytes(_) => Base::Bytes(&self.custom[mask_start[0] as usize..]),
                Mask::Bits(_) => Base::Bits(&self.custom[mask_start[1] as usize..]),
            },
            window: self.window,
            ranges: &self.ranges[b * stride..(b + 1) * stride],
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
        let p = self.position(row);
        let left = self.window.left.map_or(0, |left| p - i64::from(left));
        let right = self.window.right.map_or(i64::MAX, |r| p + i64::from(r) + 1);
        let causal = if matches!(self.base, Base::Causal) {
            p + 1
        } else {
            i64::MAX
        };
        (left.max(0), right.min(causal).min(self.kv_len))
    }

    /// The mm-prefix ranges that contain position `p`, as ranges of keys.
    fn prefixes(&self, p: i64) -> impl Iterator<Item = Range<i64>> {
        self.ranges.chunks_exact(2).filter_map(move |pair| {
            let (start, end) = (i64::from(pair[0]), i64::from(pair[1]));
            let keys = start.max(0)..(end + 1).min(self.kv_len);
            (start < end && (start..=end).contains(&p) && !keys.is_empty()).then_some(keys)
        })
    }

    /// Whether the visible keys of a row differ from [`RequestMask::row`].
    pub fn has_holes(&self, row: i64) -> bool {
        let custom = matches!(self.base, Base::Bytes(_) | Base::Bits(_));
        let seen = self.row(row);
        custom
            || self
                .prefixes(self.position(row))
                .any(|keys| keys.start < seen.start || keys.end > seen.end)
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
            for keys in self.prefixes(self.position(row)) {
                span = join(span, keys);
            }
        }
        span
    }

    /// +inf for the keys of `keys` that the row sees, -inf for the others.
    pub fn limits(&self, row: i64, keys: Range<i64>, limits: &mut [f32]) {
        let p = self.position(row);
        let seen = self.row(row);
        for (j, limit) in keys.clone().zip(limits.iter_mut()) {
            let visible = seen.contains(&j) && self.custom(row, j);
            *limit = if visible {
                f32::INFINITY
            } else {
                f32::NEG_INFINITY
            };
        }
        for prefix in self.prefixes(p) {
            let (low, high) = (prefix.start.max(keys.start), prefix.end.min(keys.end));
            for j in low..high {
                limits[(j - keys.start) as usize] = f32::INFINITY;
            }
        }
    }

    fn custom(&self, row: i64, j: i64) -> bool {
        let at = (row * self.kv_len + j) as usize;
        match self.base {
            Base::Causal | Base::Full => true,
            Base::Bytes(bytes) => bytes[at] != 0,
            Base::Bits(bits) => bits[at / 8] >> (at % 8) & 1 == 1,
        }
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

    fn mask(base: Base<'static>, window: Window, ranges: &'static [i32]) -> RequestMask<'static> {
        RequestMask {
            base,
            window,
            ranges,
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
        assert!(mm.has_holes(0) && mm.has_holes(2));
        assert_eq!(seen(&mm, 0), [5, 6, 7, 8]);
        assert_eq!(mm.span(0..1), 5..9);
        assert_eq!(seen(&mm, 3), [9]);
        assert!(!mm.has_holes(3));
    }

    #[test]
    fn custom_masks_are_clipped_by_the_window() {
        let bits: &[u8] = &[0b1111_0000, 0b10];
        let window = Window {
            left: Some(1),
            right: None,
        };
        let custom = mask(Base::Bits(bits), window, &[]);
        assert!(custom.has_holes(0));
        assert_eq!(seen(&custom, 0), [5, 6, 7, 9]);
        let bytes: &[u8] = &[1, 0, 2, 0, 0, 0, 0, 0, 0, 3];
        let custom = mask(Base::Bytes(bytes), Window::default(), &[]);
        assert_eq!(seen(&custom, 0), [0, 2, 9]);
    }
}
