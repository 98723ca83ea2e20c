//! Gather of latent records: rows of a paged cache are copied to dense rows, and converted where the types differ.
#![allow(unsafe_code)]

use super::requests::Requests;
use super::rows::{CHUNK, Chunk, Row};
use crate::cpu::kernels::table::Kernels;
use crate::cpu::threads::Pool;
use crate::error::{Error, Result};
use crate::problem::{Checked, DS_MLA_BLOCK, GatheredRequests, LatentRecords, MlaGatherArgs};
use crate::tensor::Tensor;

/// Bytes per piece of work, as in `append`.
const BYTES_PER_PIECE: usize = 64 << 10;

// A block is converted at a time.
const _: () = assert!(CHUNK == DS_MLA_BLOCK);

/// One call.
struct Gather<'a> {
    kernels: &'a Kernels,
    args: &'a MlaGatherArgs<LatentRecords>,
}

/// Copies the records of all requests.
pub fn gather(
    pool: &Pool,
    kernels: &Kernels,
    args: &Checked<MlaGatherArgs<LatentRecords>>,
) -> Result<()> {
    let stated = GatheredRequests {
        cu_seq_lens: args.cu_seq_lens,
        seq_starts: args.seq_starts,
        pages: args.pages,
    };
    let requests = Requests::new(&stated, args.cache.latent.extent(1)).ok_or_else(|| {
        Error::Internal("lengths and page ids passed their checks and are no host integers".into())
    })?;
    let gather = Gather { kernels, args };
    let rows = requests.rows();
    let rows_per_piece = BYTES_PER_PIECE.div_ceil(gather.row_bytes());
    let pieces = rows.len().div_ceil(rows_per_piece);
    pool.turn().for_each(pieces, &|_, piece| {
        let first = rows.start + piece * rows_per_piece;
        let some = first..rows.end.min(first + rows_per_piece);
        requests.for_each(some, |row, place| gather.row(row, place));
    });
    Ok(())
}

impl Gather<'_> {
    /// Bytes of a row; at least one.
    fn row_bytes(&self) -> usize {
        let rope = self.args.dst_rope.map_or(0, |rope| rope.extent(1));
        let elements = self.args.dst.extent(1) + rope;
        (elements as usize * self.args.dst.dtype().size()).max(1)
    }

    fn row(&self, row: usize, place: [i64; 2]) {
        let scale = |block: usize| match &self.args.cache.scales {
            None => self.args.k_scale,
            Some(scales) => scales.get(&[place[0], place[1], block as i64]),
        };
        self.part(&self.args.cache.latent, place, &self.args.dst, row, scale);
        if let (Some(rope), Some(dst)) = (&self.args.cache.rope, &self.args.dst_rope) {
            self.part(rope, place, dst, row, |_| self.args.k_scale);
        }
    }

    /// The latent or the rotary part of a record; `scale` is that of 128 elements.
    fn part(
        &self,
        from: &Tensor,
        place: [i64; 2],
        to: &Tensor,
        row: usize,
        scale: impl Fn(usize) -> f32,
    ) {
        let dim = to.extent(1) as usize;
        let (from, to) = (Row::of(from, &place), Row::of(to, &[row as i64]));
        if from.dtype == to.dtype {
            // SAFETY: `api` checked both rows.
            unsafe { to.copy(dim, from) };
            return;
        }
        let mut chunk: Chunk = [0.0; CHUNK];
        for first in (0..dim).step_by(CHUNK) {
            let count = CHUNK.min(dim - first);
            // SAFETY: as above.
            unsafe {
                from.skip(first).load(self.kernels, count, &mut chunk);
                to.skip(first)
                    .store(self.kernels, count, &chunk, scale(first / CHUNK));
            }
        }
    }
}
