//! Gather of latent records: rows of a paged cache are copied to dense rows, and converted where the types differ.
#![allow(unsafe_code)]

use super::rows::{CHUNK, Chunk, Row};
use crate::cpu::kernels::table::Kernels;
use crate::cpu::threads::Pool;
use crate::error::{Error, Result};
use crate::problem::{Checked, DS_MLA_BLOCK, LatentRecords, MlaGatherArgs, RecordPages};
use crate::tensor::Tensor;

/// Bytes per piece of work, as in `append`.
const BYTES_PER_PIECE: usize = 64 << 10;

// A block is converted at a time.
const _: () = assert!(CHUNK == DS_MLA_BLOCK);

/// One call.
struct Gather<'a> {
    kernels: &'a Kernels,
    args: &'a MlaGatherArgs<LatentRecords>,
    /// `cu_seq_lens`.
    ends: &'a [i32],
    starts: Option<&'a [i32]>,
    pages: PageIds<'a>,
}

/// The page ids of all requests.
struct PageIds<'a> {
    ids: &'a [i32],
    first: FirstPage<'a>,
}

/// Where those of a request begin.
enum FirstPage<'a> {
    Stride(usize),
    Indptr(&'a [i32]),
}

/// Copies the records of all requests.
pub fn gather(
    pool: &Pool,
    kernels: &Kernels,
    args: &Checked<MlaGatherArgs<LatentRecords>>,
) -> Result<()> {
    let gather = Gather::new(kernels, args).ok_or_else(|| {
        Error::Internal("lengths and page ids passed their checks and are no host integers".into())
    })?;
    let rows = gather.rows();
    let rows_per_piece = BYTES_PER_PIECE.div_ceil(gather.row_bytes());
    let pieces = rows.len().div_ceil(rows_per_piece);
    pool.turn().for_each(pieces, &|_, piece| {
        let first = rows.start + piece * rows_per_piece;
        gather.some(first..rows.end.min(first + rows_per_piece));
    });
    Ok(())
}

impl<'a> Gather<'a> {
    fn new(kernels: &'a Kernels, args: &'a MlaGatherArgs<LatentRecords>) -> Option<Gather<'a>> {
        let starts = match &args.seq_starts {
            None => None,
            Some(starts) => Some(starts.as_i32()?),
        };
        Some(Gather {
            kernels,
            args,
            ends: args.cu_seq_lens.as_i32()?,
            starts,
            pages: match &args.pages {
                RecordPages::Table(table) => PageIds {
                    ids: table.as_i32_rows()?,
                    first: FirstPage::Stride(table.stride(0) as usize),
                },
                RecordPages::Csr { indptr, indices } => PageIds {
                    ids: indices.as_i32()?,
                    first: FirstPage::Indptr(indptr.as_i32()?),
                },
            },
        })
    }

    /// Those of all requests.
    fn rows(&self) -> std::ops::Range<usize> {
        let last = self.ends.len() - 1;
        self.ends[0] as usize..self.ends[last] as usize
    }

    /// Bytes of a row; at least one.
    fn row_bytes(&self) -> usize {
        let rope = self.args.dst_rope.map_or(0, |rope| rope.extent(1));
        let elements = self.args.dst.extent(1) + rope;
        (elements as usize * self.args.dst.dtype().size()).max(1)
    }

    fn some(&self, rows: std::ops::Range<usize>) {
        // The request of the first row; the others follow.
        let mut b = self.ends.partition_point(|&end| end as usize <= rows.start) - 1;
        for row in rows {
            while self.ends[b + 1] as usize <= row {
                b += 1;
            }
            self.row(b, row);
        }
    }

    fn row(&self, b: usize, row: usize) {
        let page_size = self.args.cache.latent.extent(1) as usize;
        let start = self.starts.map_or(0, |starts| starts[b] as usize);
        let token = start + row - self.ends[b] as usize;
        let first = match self.pages.first {
            FirstPage::Stride(stride) => b * stride,
            FirstPage::Indptr(indptr) => indptr[b] as usize,
        };
        let page = i64::from(self.pages.ids[first + token / page_size]);
        let place = [page, (token % page_size) as i64];
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
