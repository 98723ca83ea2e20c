//! Where keys and values lie. Keys are whole rows of the cache, or rows in two parts, whose second part all heads
//! share. The walks read whole rows: keys in two parts are joined in scratch, a few at a time, when they are staged,
//! packed or multiplied.
#![allow(unsafe_code)]

use super::addresses::Cache;
use super::scratch::{Joined, Tile};
use super::shape::{JOINED_KEYS, Shape};
use crate::cpu::kernels::rows::Rows;
use crate::problem::{AttentionArgs, Checked};
use crate::tensor::Tensor;
use std::ops::Range;

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

    /// Rows that are whole wherever they lie: those of MLA.
    pub fn whole_rows(cache: Cache, shape: &Shape) -> Keys {
        Keys {
            cache,
            row_bytes: shape.k_row_bytes,
            rope: None,
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
