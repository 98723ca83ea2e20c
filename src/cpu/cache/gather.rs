//! Gather of keys and values: tokens of a paged cache are copied to dense rows, and converted where the types differ.
#![allow(unsafe_code)]

use super::append::BYTES_PER_PIECE;
use super::requests::Requests;
use super::rows::{CHUNK, Chunk, Row};
use super::stored::StoredRows;
use crate::cpu::kernels::table::Kernels;
use crate::cpu::threads::Pool;
use crate::error::{Error, Result};
use crate::problem::{CacheForm, Checked, GatherArgs, RowTensors};
use crate::tensor::Tensor;

/// A cache and the rows that its tokens go to.
struct Side<'a> {
    kernels: &'a Kernels,
    from: &'a Tensor,
    to: &'a Tensor,
    scale: f32,
    scales: Option<&'a [f32]>,
    /// The heads of a token are one run of elements on both sides, of one scale.
    is_run: bool,
    /// Rows that are no plain elements.
    stored: Option<StoredRows<'a>>,
}

/// Copies the tokens of all requests.
pub fn gather(pool: &Pool, kernels: &Kernels, args: &Checked<GatherArgs>) -> Result<()> {
    let requests = Requests::new(&args.requests, args.k_cache.extent(1)).ok_or_else(|| {
        Error::Internal("lengths and page ids passed their checks and are no host integers".into())
    })?;
    let caches = args.caches();
    let [keys, values] = &caches;
    let sides = [
        Side::new(kernels, keys, &args.key, args.k_scale),
        Side::new(kernels, values, &args.value, args.v_scale),
    ];
    let rows = requests.rows();
    let row_bytes: usize = sides.iter().map(|side| row_bytes(side.to)).sum();
    let rows_per_piece = BYTES_PER_PIECE.div_ceil(row_bytes.max(1));
    let pieces = rows.len().div_ceil(rows_per_piece);
    pool.turn().for_each(pieces, &|_, piece| {
        let first = rows.start + piece * rows_per_piece;
        let some = first..rows.end.min(first + rows_per_piece);
        requests.for_each(some, |row, place| {
            for side in &sides {
                side.token(row, place);
            }
        });
    });
    Ok(())
}

fn row_bytes(rows: &Tensor) -> usize {
    (rows.extent(1) * rows.extent(2)) as usize * rows.dtype().size()
}

impl<'a> Side<'a> {
    fn new(kernels: &'a Kernels, cache: &'a RowTensors, to: &'a Tensor, scale: f32) -> Side<'a> {
        let (from, dim) = (&cache.rows, to.extent(2));
        let scales = match cache.format.has_scales_beside() {
            true => None,
            false => cache.scales.as_ref().and_then(Tensor::as_f32),
        };
        let is_plain = cache.format.form() == CacheForm::Plain;
        Side {
            kernels,
            from,
            to,
            scale,
            scales,
            stored: (!is_plain).then(|| StoredRows::new(kernels, *cache)),
            is_run: is_plain
                && from.stride(2) == dim
                && to.stride(1) == dim
                && scales.is_none_or(|scales| scales.len() == 1),
        }
    }

    fn token(&self, row: usize, [page, at]: [i64; 2]) {
        let (heads, dim) = (self.to.extent(1), self.to.extent(2) as usize);
        let row = row as i64;
        let (runs, count) = match self.is_run {
            true => (heads.min(1), heads as usize * dim),
            false => (heads, dim),
        };
        for head in 0..runs {
            let to = Row::of(self.to, &[row, head]);
            let scale = self.head_scale(head as usize);
            if let Some(stored) = &self.stored {
                // SAFETY: as in `run`.
                unsafe { stored.load([page, at, head], to, scale) };
                continue;
            }
            let from = Row::of(self.from, &[page, at, head]);
            self.run(from, to, count, scale);
        }
    }

    fn head_scale(&self, head: usize) -> f32 {
        match self.scales {
            None => self.scale,
            Some([one]) => self.scale * one,
            Some(all) => self.scale * all[head],
        }
    }

    fn run(&self, from: Row, to: Row, count: usize, scale: f32) {
        if from.dtype == to.dtype {
            // SAFETY: token and row are within the tensors, which were checked, and do not overlap by the operator's
            // contract.
            unsafe { to.copy(count, from) };
            return;
        }
        let mut chunk: Chunk = [0.0; CHUNK];
        for first in (0..count).step_by(CHUNK) {
            let count = CHUNK.min(count - first);
            // SAFETY: as above.
            unsafe {
                from.skip(first).load(self.kernels, count, &mut chunk);
                to.skip(first).store(self.kernels, count, &chunk, scale);
            }
        }
    }
}
