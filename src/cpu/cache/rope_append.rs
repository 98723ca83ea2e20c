//! Norm, RoPE and append: each row of queries and keys is computed in f32, and goes from there to all of its outputs.
//! What is only copied goes through `append`.
#![allow(unsafe_code)]

use super::append::{Side, sides};
use super::rotation::{angles, rotate_halves, rotate_neighbours};
use super::rows::Row;
use crate::cpu::kernels::table::Kernels;
use crate::cpu::threads::Pool;
use crate::error::{Error, Result};
use crate::problem::{Angles, Checked, MOST_PAIRS, MOST_ROW_ELEMENTS, Rope, RopeAppendArgs};
use crate::tensor::{Integers, Tensor};
use std::ops::Range;

/// Bytes per piece of work, as in `append`.
const BYTES_PER_PIECE: usize = 64 << 10;

/// A row as f32; what is behind its elements is anything.
type Values = [f32; MOST_ROW_ELEMENTS];

/// One call.
struct Call<'a> {
    kernels: &'a Kernels,
    args: &'a RopeAppendArgs,
    slots: Integers<'a>,
    keys: Side<'a>,
    values: Side<'a>,
    q_norm: Option<Values>,
    k_norm: Option<Values>,
    rotation: Option<Rotation<'a>>,
}

/// RoPE of one call.
struct Rotation<'a> {
    rope: &'a Rope,
    positions: Integers<'a>,
    offsets: Option<Integers<'a>>,
    /// Of computed angles.
    turns: [u64; MOST_PAIRS],
}

/// What a thread computes with.
struct Scratch {
    /// Of the pairs at the row's position.
    cos: [f32; MOST_PAIRS],
    sin: [f32; MOST_PAIRS],
    /// The row of a head.
    values: Values,
}

/// Computes all rows, and writes keys and values; tokens with negative slots are not written.
pub fn append(pool: &Pool, kernels: &Kernels, args: &Checked<RopeAppendArgs>) -> Result<()> {
    let [keys, values] = sides(&args.append, kernels, false);
    let weight = |weight: &Option<Tensor>| weight.map(|weight| loaded(kernels, &weight));
    let call = Call {
        kernels,
        args,
        slots: integers("slot_mapping", &args.append.slot_mapping)?,
        keys,
        values,
        q_norm: weight(&args.norm.q_weight),
        k_norm: weight(&args.norm.k_weight),
        rotation: match &args.rope {
            None => None,
            Some(rope) => Some(Rotation::new(rope)?),
        },
    };
    let rows = args.num_rows() as usize;
    let rows_per_piece = BYTES_PER_PIECE.div_ceil(call.row_bytes());
    let pieces = rows.div_ceil(rows_per_piece);
    pool.turn().for_each(pieces, &|_, piece| {
        let first = piece * rows_per_piece;
        call.rows(first..rows.min(first + rows_per_piece));
    });
    Ok(())
}

fn integers<'a>(name: &str, tensor: &'a Tensor) -> Result<Integers<'a>> {
    tensor
        .as_integers()
        .ok_or_else(|| Error::Internal(format!("{name} passed its checks and is no host integer")))
}

fn loaded(kernels: &Kernels, row: &Tensor) -> Values {
    let mut values = [0.0; MOST_ROW_ELEMENTS];
    // SAFETY: `api` checked that weights are no longer than the longest row.
    unsafe { Row::of(row, &[]).load(kernels, row.extent(0) as usize, &mut values) };
    values
}

impl<'a> Rotation<'a> {
    fn new(rope: &'a Rope) -> Result<Rotation<'a>> {
        Ok(Rotation {
            rope,
            positions: integers("positions", &rope.positions)?,
            offsets: match &rope.position_offsets {
                None => None,
                Some(offsets) => Some(integers("position_offsets", offsets)?),
            },
            turns: match &rope.angles {
                Angles::Table(_) => [0; MOST_PAIRS],
                Angles::Computed(frequencies) => frequencies.turns(rope.rotary_dim),
            },
        })
    }

    fn pairs(&self) -> usize {
        self.rope.rotary_dim as usize / 2
    }

    /// The angles of a row's position.
    fn load(&self, kernels: &Kernels, row: usize, scratch: &mut Scratch) {
        let offset = self.offsets.map_or(0, |offsets| offsets.get(row));
        let position = self.positions.get(row).wrapping_add(offset);
        match &self.rope.angles {
            Angles::Computed(_) => {
                let turns = &self.turns[..self.pairs()];
                angles(position, turns, &mut scratch.cos, &mut scratch.sin);
            }
            Angles::Table(table) => {
                for (plane, to) in [(0, &mut scratch.cos), (1, &mut scratch.sin)] {
                    let from = Row::of(table, &[plane, position]);
                    // SAFETY: `api` checked the position, and that there are no more pairs.
                    unsafe { from.load(kernels, self.pairs(), to) };
                }
            }
        }
    }

    fn rotate(&self, scratch: &mut Scratch) {
        let pairs = self.pairs();
        let (cos, sin) = (&scratch.cos[..pairs], &scratch.sin[..pairs]);
        let row = &mut scratch.values;
        if self.rope.is_interleaved {
            rotate_neighbours(&mut row[..2 * pairs], cos, sin);
        } else {
            let (x, y) = row[..2 * pairs].split_at_mut(pairs);
            rotate_halves(x, y, cos, sin);
        }
    }
}

impl Call<'_> {
    /// Bytes of a row of all tensors; at least one.
    fn row_bytes(&self) -> usize {
        let append = &self.args.append;
        let tensors = [Some(append.key), Some(append.value), self.args.q];
        let elements = tensors
            .into_iter()
            .flatten()
            .map(|rows| rows.extent(1) * rows.extent(2));
        (elements.sum::<i64>() as usize * append.key.dtype().size()).max(1)
    }

    fn rows(&self, rows: Range<usize>) {
        let mut scratch = Scratch {
            cos: [0.0; MOST_PAIRS],
            sin: [0.0; MOST_PAIRS],
            values: [0.0; MOST_ROW_ELEMENTS],
        };
        for row in rows.clone() {
            if let Some(rotation) = &self.rotation {
                rotation.load(self.kernels, row, &mut scratch);
            }
            self.queries(row, &mut scratch);
            if row < self.slots.len() && self.args.changes_keys() {
                self.keys(row, &mut scratch);
            }
        }
        let tokens = rows.start.min(self.slots.len())..rows.end.min(self.slots.len());
        if !self.args.changes_keys() {
            self.keys.tokens(tokens.clone(), &self.slots);
            self.copy_keys(tokens.clone());
        }
        self.values.tokens(tokens, &self.slots);
    }

    fn queries(&self, row: usize, scratch: &mut Scratch) {
        let (Some(q), Some(out)) = (&self.args.q, &self.args.q_out) else {
            return;
        };
        for head in 0..q.extent(1) {
            let [from, to] = [q, out].map(|rows| Row::of(rows, &[row as i64, head]));
            if self.args.changes_queries() {
                self.compute(from, self.q_norm.as_ref(), scratch);
                self.store(to, &scratch.values);
            } else {
                self.copy(to, from);
            }
        }
    }

    /// The keys of a token, from the projection to the cache.
    fn keys(&self, token: usize, scratch: &mut Scratch) {
        let slot = self.slots.get(token);
        if slot < 0 && self.args.key_out.is_none() {
            return;
        }
        let key = &self.args.append.key;
        for head in 0..key.extent(1) {
            let at = [token as i64, head];
            self.compute(Row::of(key, &at), self.k_norm.as_ref(), scratch);
            if let Some(out) = &self.args.key_out {
                self.store(Row::of(out, &at), &scratch.values);
            }
            if slot >= 0 {
                self.keys.write_computed(slot, head, &scratch.values);
            }
        }
    }

    fn copy_keys(&self, tokens: Range<usize>) {
        let (key, Some(out)) = (&self.args.append.key, &self.args.key_out) else {
            return;
        };
        for token in tokens {
            for head in 0..key.extent(1) {
                let [from, to] = [key, out].map(|rows| Row::of(rows, &[token as i64, head]));
                self.copy(to, from);
            }
        }
    }

    fn dim(&self) -> usize {
        self.args.append.key.extent(2) as usize
    }

    /// A row, normalised and rotated.
    fn compute(&self, from: Row, norm: Option<&Values>, scratch: &mut Scratch) {
        // SAFETY: `api` checked the row, and that it is no longer than the longest.
        unsafe { from.load(self.kernels, self.dim(), &mut scratch.values) };
        if let Some(weight) = norm {
            let row = &mut scratch.values[..self.dim()];
            normalise(row, weight, self.args.norm.eps);
        }
        if let Some(rotation) = &self.rotation {
            rotation.rotate(scratch);
        }
    }

    fn store(&self, to: Row, values: &Values) {
        // SAFETY: `api` checked the row.
        unsafe { to.store(self.kernels, self.dim(), values, 1.0) }
    }

    /// An output may be its input.
    fn copy(&self, to: Row, from: Row) {
        if to.at != from.at {
            // SAFETY: `api` checked both rows.
            unsafe { to.copy(self.dim(), from) }
        }
    }
}

/// RMS norm of a row.
fn normalise(row: &mut [f32], weight: &Values, eps: f32) {
    // Sums of lanes, so that the compiler keeps them in vectors.
    let mut sums = [0f32; 16];
    let (whole, rest) = row.as_chunks::<16>();
    for some in whole {
        for (sum, x) in sums.iter_mut().zip(some) {
            *sum += x * x;
        }
    }
    for (sum, x) in sums.iter_mut().zip(rest) {
        *sum += x * x;
    }
    let mean = sums.iter().sum::<f32>() / row.len() as f32;
    let factor = 1.0 / (mean + eps).sqrt();
    for (x, weight) in row.iter_mut().zip(weight) {
        *x = *x * factor * weight;
    }
}
