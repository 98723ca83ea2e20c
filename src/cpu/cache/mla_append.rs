//! Append of latent records: copies, quantises by a scale of the caller or by scales of 128 elements that are computed
//! here, and rotates rotary elements first where that is asked for.
#![allow(unsafe_code)]

use super::rotation::{rotate_halves, rotate_neighbours};
use super::rows::{CHUNK, Chunk, Row};
use crate::cpu::kernels::table::Kernels;
use crate::cpu::threads::Pool;
use crate::dtype::{DType, F8E4M3_MAX};
use crate::error::{Error, Result};
use crate::problem::{Checked, DS_MLA_BLOCK, LatentRecords, MlaAppendArgs, Rotary};
use crate::tensor::{Integers, Tensor};

/// Bytes per piece of work, as in `append`.
const BYTES_PER_PIECE: usize = 64 << 10;

// A block is converted at a time.
const _: () = assert!(CHUNK == DS_MLA_BLOCK);

/// One call.
struct Append<'a> {
    kernels: &'a Kernels,
    args: &'a MlaAppendArgs<LatentRecords>,
    slots: Integers<'a>,
    /// With the positions of the tokens.
    rotary: Option<(&'a Rotary, Integers<'a>)>,
}

/// Writes the records of new tokens; negative slots are skipped.
pub fn append(
    pool: &Pool,
    kernels: &Kernels,
    args: &Checked<MlaAppendArgs<LatentRecords>>,
) -> Result<()> {
    let rotary = match &args.rotary {
        None => None,
        Some(rotary) => Some((rotary, integers("positions", &rotary.positions)?)),
    };
    let append = Append {
        kernels,
        args,
        slots: integers("slot_mapping", &args.slot_mapping)?,
        rotary,
    };
    let tokens = append.slots.len();
    let tokens_per_piece = BYTES_PER_PIECE.div_ceil(append.token_bytes());
    let pieces = tokens.div_ceil(tokens_per_piece);
    pool.turn().for_each(pieces, &|_, piece| {
        let first = piece * tokens_per_piece;
        for token in first..tokens.min(first + tokens_per_piece) {
            append.token(token);
        }
    });
    Ok(())
}

fn integers<'a>(name: &str, tensor: &'a Tensor) -> Result<Integers<'a>> {
    tensor
        .as_integers()
        .ok_or_else(|| Error::Internal(format!("{name} passed its checks and is no host integer")))
}

impl Append<'_> {
    /// Bytes of a token's rows, queries included; at least one.
    fn token_bytes(&self) -> usize {
        let heads = self.queries().map_or(0, |q| q.0.extent(1));
        let elements = self.args.latent.extent(1) + self.rope_dim() as i64 * (1 + heads);
        elements as usize * self.args.latent.dtype().size()
    }

    fn rope_dim(&self) -> usize {
        self.args.rope.map_or(0, |rope| rope.extent(1) as usize)
    }

    fn queries(&self) -> Option<(Tensor, Tensor)> {
        let rotary = self.rotary.as_ref()?.0;
        rotary.q_rope.zip(rotary.q_rope_out)
    }

    fn token(&self, token: usize) {
        let (row, slot) = (token as i64, self.slots.get(token));
        let page_size = self.args.cache.latent.extent(1);
        let place = (slot >= 0).then(|| [slot / page_size, slot % page_size]);
        if let Some(place) = place {
            self.store_latent(row, place);
        }
        if let Some((q, out)) = self.queries() {
            for head in 0..q.extent(1) {
                let out = Row::of(&out, &[row, head]);
                self.rotated(token, Row::of(&q, &[row, head]), |column, piece, count| {
                    // SAFETY: the columns are within the row, which was checked.
                    unsafe { out.skip(column).copy(count, piece) }
                });
            }
        }
        if let Some(rope) = self.args.rope {
            self.rope(token, Row::of(&rope, &[row]), place);
        }
    }

    fn rope(&self, token: usize, rope: Row, place: Option<[i64; 2]>) {
        let to = place.zip(self.args.cache.rope);
        let to = to.map(|(place, cache)| Row::of(&cache, &place));
        let Some((rotary, _)) = &self.rotary else {
            if let Some(to) = to {
                self.store_rope(to, rope, self.rope_dim());
            }
            return;
        };
        let out = rotary.rope_out.map(|out| Row::of(&out, &[token as i64]));
        self.rotated(token, rope, |column, piece, count| {
            if let Some(out) = out {
                // SAFETY: the columns are within the row, which was checked.
                unsafe { out.skip(column).copy(count, piece) }
            }
            if let Some(to) = to {
                self.store_rope(to.skip(column), piece, count);
            }
        });
    }

    fn store_latent(&self, row: i64, place: [i64; 2]) {
        let from = Row::of(&self.args.latent, &[row]);
        let to = Row::of(&self.args.cache.latent, &place);
        let rank = self.args.latent.extent(1) as usize;
        let Some(scales) = &self.args.cache.scales else {
            self.store_plain(to, from, rank);
            return;
        };
        let mut chunk: Chunk = [0.0; CHUNK];
        for block in 0..rank / DS_MLA_BLOCK {
            let first = block * DS_MLA_BLOCK;
            // SAFETY: `api` checked that records have whole blocks.
            unsafe {
                from.skip(first)
                    .load(self.kernels, DS_MLA_BLOCK, &mut chunk);
                let scale = block_scale(&chunk);
                scales.set(&[place[0], place[1], block as i64], scale);
                let values = Row {
                    at: chunk.as_mut_ptr().cast(),
                    dtype: DType::F32,
                };
                to.skip(first)
                    .quantise(self.kernels, DS_MLA_BLOCK, values, scale);
            }
        }
    }

    /// Rotary elements: as the latent ones, but for `fp8_ds_mla` records, which have them in bf16.
    fn store_rope(&self, to: Row, from: Row, count: usize) {
        if self.args.cache.scales.is_none() {
            self.store_plain(to, from, count);
        } else if from.dtype == to.dtype {
            // SAFETY: `api` checked both rows.
            unsafe { to.copy(count, from) }
        } else {
            let mut chunk: Chunk = [0.0; CHUNK];
            for first in (0..count).step_by(CHUNK) {
                let count = CHUNK.min(count - first);
                // SAFETY: as above.
                unsafe {
                    from.skip(first).load(self.kernels, count, &mut chunk);
                    to.skip(first).store(self.kernels, count, &chunk, 1.0);
                }
            }
        }
    }

    fn store_plain(&self, to: Row, from: Row, count: usize) {
        // SAFETY: `api` checked both rows.
        unsafe {
            match to.dtype.is_fp8() {
                true => to.quantise(self.kernels, count, from, self.args.k_scale),
                false => to.copy(count, from),
            }
        }
    }

    /// Rotates a row and hands on its columns in pieces, each as `(first column, elements, their number)`.
    fn rotated(&self, token: usize, row: Row, mut piece: impl FnMut(usize, Row, usize)) {
        let Some((rotary, positions)) = &self.rotary else {
            return;
        };
        let table = Row::of(&rotary.cos_sin_cache, &[positions.get(token)]);
        let pairs = self.rope_dim() / 2;
        for first in (0..pairs).step_by(CHUNK / 2) {
            let count = (CHUNK / 2).min(pairs - first);
            if rotary.is_interleaved {
                let rotated = self.rotate_neighbours(row, table, pairs, first..first + count);
                self.rounded(&rotated, 2 * count, row.dtype, |elements| {
                    piece(2 * first, elements, 2 * count);
                });
            } else {
                let halves = self.rotate_halves(row, table, pairs, first..first + count);
                for (half, column) in halves.iter().zip([first, pairs + first]) {
                    self.rounded(half, count, row.dtype, |elements| {
                        piece(column, elements, count);
                    });
                }
            }
        }
    }

    /// Hands on values as elements of a type.
    fn rounded(&self, values: &Chunk, count: usize, dtype: DType, f: impl FnOnce(Row)) {
        let mut memory = [0u32; CHUNK];
        let elements = Row {
            at: memory.as_mut_ptr().cast(),
            dtype,
        };
        // SAFETY: no element is larger than a word.
        unsafe { elements.store(self.kernels, count, values, 1.0) };
        f(elements);
    }

    /// Cosines and sines of some pairs.
    fn angles(&self, table: Row, pairs: usize, some: &std::ops::Range<usize>) -> [Chunk; 2] {
        [0, pairs].map(|first| {
            let mut angles: Chunk = [0.0; CHUNK];
            // SAFETY: a row of the table has two numbers for each pair.
            unsafe {
                table
                    .skip(first + some.start)
                    .load(self.kernels, some.len(), &mut angles);
            }
            angles
        })
    }

    fn rotate_halves(
        &self,
        row: Row,
        table: Row,
        pairs: usize,
        some: std::ops::Range<usize>,
    ) -> [Chunk; 2] {
        let [cos, sin] = self.angles(table, pairs, &some);
        let [mut x, mut y]: [Chunk; 2] = [[0.0; CHUNK]; 2];
        // SAFETY: the row has two elements for each pair.
        unsafe {
            row.skip(some.start).load(self.kernels, some.len(), &mut x);
            row.skip(pairs + some.start)
                .load(self.kernels, some.len(), &mut y);
        }
        let count = some.len();
        rotate_halves(&mut x[..count], &mut y[..count], &cos, &sin);
        [x, y]
    }

    fn rotate_neighbours(
        &self,
        row: Row,
        table: Row,
        pairs: usize,
        some: std::ops::Range<usize>,
    ) -> Chunk {
        let [cos, sin] = self.angles(table, pairs, &some);
        let mut both: Chunk = [0.0; CHUNK];
        // SAFETY: the row has two elements for each pair.
        unsafe {
            row.skip(2 * some.start)
                .load(self.kernels, 2 * some.len(), &mut both);
        }
        rotate_neighbours(&mut both[..2 * some.len()], &cos, &sin);
        both
    }
}

/// What maps the largest magnitude of a block to the largest e4m3; NaN has none.
fn block_scale(block: &Chunk) -> f32 {
    // Maxima of lanes, so that the compiler keeps them in a vector. A comparison with NaN is false.
    let mut largest = [0f32; 16];
    for some in block.as_chunks::<16>().0 {
        for (largest, x) in largest.iter_mut().zip(some) {
            if x.abs() > *largest {
                *largest = x.abs();
            }
        }
    }
    let largest = largest.into_iter().fold(0f32, f32::max);
    (largest / F8E4M3_MAX).max(f32::MIN_POSITIVE)
}
