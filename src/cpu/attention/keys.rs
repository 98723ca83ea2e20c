//! Where keys and values lie. Keys are whole rows of the cache, or rows in two parts, whose second part all heads
//! share. The walks read whole rows: keys in two parts are joined in scratch, a few at a time, when they are staged,
//! packed or multiplied.
#![allow(unsafe_code)]

use super::scratch::{Joined, Tile};
use super::shape::JOINED_KEYS;
use crate::cpu::kernels::rows::Rows;
use crate::problem::{AttentionArgs, Checked};
use crate::tensor::Tensor;
use std::ops::Range;

/// A cache tensor: address, and strides in bytes.
#[derive(Clone, Copy)]
pub struct Cache {
    pub base: *const u8,
    pub page: i64,
    pub token: i64,
    pub head: i64,
}

/// Where keys lie.
pub struct Keys {
    /// Whole rows, or their first parts.
    pub cache: Cache,
    /// Bytes of a row there.
    pub row_bytes: usize,
    rope: Option<Rope>,
}

/// The last elements of the keys, for all heads.
struct Rope {
    cache: Cache,
    row_bytes: usize,
}

impl Cache {
    pub fn new(tensor: &Tensor) -> Cache {
        let bytes = tensor.dtype().size() as i64;
        Cache {
            base: tensor.address() as *const u8,
            page: tensor.stride(0) * bytes,
            token: tensor.stride(1) * bytes,
            head: tensor.stride(2) * bytes,
        }
    }

    /// Where the row at a slot of a page starts, for head 0.
    pub fn offset(&self, page: i64, slot: i64) -> i64 {
        page * self.page + slot * self.token
    }

    /// Keys or values of one head at `offsets`.
    pub fn rows(&self, head: usize, offsets: &[i64]) -> Rows {
        Rows {
            base: self
                .base
                .wrapping_offset((head as i64 * self.head) as isize),
            offsets: offsets.as_ptr(),
            count: offsets.len(),
        }
    }
}

impl Keys {
    pub fn new(args: &Checked<AttentionArgs>) -> Keys {
        let row_bytes = |tensor: &Tensor| tensor.extent(3) as usize * tensor.dtype().size();
        Keys {
            cache: Cache::new(&args.k),
            row_bytes: row_bytes(&args.k),
            rope: args.k_rope.map(|k_rope| Rope {
                cache: Cache::new(&k_rope),
                row_bytes: row_bytes(&k_rope),
            }),
        }
    }

    /// Notes where key `i` of a tile is: in a page, at a slot.
    pub fn locate(&self, page: i64, slot: i64, i: usize, tile: &mut Tile<'_>) {
        tile.k_offsets[i] = self.cache.offset(page, slot);
        if let Some(rope) = &self.rope {
            tile.k_rope_offsets[i] = rope.cache.offset(page, slot);
        }
    }

    /// How many keys [`Keys::whole`] takes at a time, where `wanted` are wanted.
    pub fn at_a_time(&self, wanted: usize) -> usize {
        match self.rope {
            None => wanted,
            Some(_) => JOINED_KEYS,
        }
    }

    /// Whole rows of located keys of a tile, at most [`Keys::at_a_time`]. They stay as they are until the next call.
    pub fn whole(
        &self,
        head: usize,
        tile: &Tile<'_>,
        keys: Range<usize>,
        joined: &mut Joined<'_>,
    ) -> Rows {
        let first = self.cache.rows(head, &tile.k_offsets[keys.clone()]);
        let Some(rope) = &self.rope else {
            return first;
        };
        let second = rope.cache.rows(0, &tile.k_rope_offsets[keys.clone()]);
        let row_bytes = self.row_bytes + rope.row_bytes;
        for (j, row) in joined
            .rows
            .chunks_exact_mut(row_bytes)
            .take(keys.len())
            .enumerate()
        {
            let (start, end) = row.split_at_mut(self.row_bytes);
            // SAFETY: the keys were located within the caches, whose rows have so many bytes.
            unsafe {
                start
                    .as_mut_ptr()
                    .copy_from_nonoverlapping(first.at_row(j), start.len());
                end.as_mut_ptr()
                    .copy_from_nonoverlapping(second.at_row(j), end.len());
            }
            joined.offsets[j] = (j * row_bytes) as i64;
        }
        Rows {
            base: joined.rows.as_ptr(),
            offsets: joined.offsets[..keys.len()].as_ptr(),
            count: keys.len(),
        }
    }
}
