//! Copies of pages. The bytes of all pairs are dealt to the threads as one line, so that few large pages occupy as many
//! threads as many small ones.
#![allow(unsafe_code)]

use super::append::{BYTES_PER_PIECE, NONTEMPORAL_BYTES, NONTEMPORAL_COPY, NONTEMPORAL_PIECE};
use crate::cpu::kernels::nontemporal_copy::NontemporalCopy;
use crate::cpu::kernels::table::Kernels;
use crate::cpu::threads::Pool;
use crate::error::{Error, Result};
use crate::problem::{Checked, CopyArgs, PagePairs, PagesToCopy};
use crate::tensor::Tensor;
use std::ops::Range;

/// One call.
struct Copy<'a> {
    kernels: &'a Kernels,
    pairs: PagePairs<'a>,
    k: &'a PagesToCopy,
    v: Option<&'a PagesToCopy>,
    is_nontemporal: bool,
}

/// Copies the pages of all pairs that are not skipped.
pub fn copy(pool: &Pool, kernels: &Kernels, args: &Checked<CopyArgs>) -> Result<()> {
    let mut copy = Copy {
        kernels,
        pairs: args.pairs_on_host().ok_or_else(|| {
            Error::Internal("page_pairs passed its checks and is no host integer".into())
        })?,
        k: &args.k,
        v: args.v.as_ref(),
        is_nontemporal: false,
    };
    let bytes = copy.pairs.len().checked_mul(copy.pair_bytes());
    let bytes = bytes.ok_or_else(|| {
        Error::Unsupported(format!(
            "page_pairs: {} pairs of {} bytes are not supported; fewer than 2^64 bytes are",
            copy.pairs.len(),
            copy.pair_bytes()
        ))
    })?;
    copy.is_nontemporal = bytes / pool.num_threads() >= NONTEMPORAL_BYTES;
    let piece_bytes = match copy.is_nontemporal {
        true => NONTEMPORAL_PIECE,
        false => BYTES_PER_PIECE,
    };
    pool.turn()
        .for_each(bytes.div_ceil(piece_bytes), &|_, piece| {
            let first = piece * piece_bytes;
            copy.bytes(first..bytes.min(first + piece_bytes));
        });
    Ok(())
}

fn page_bytes(pages: &PagesToCopy) -> usize {
    pages.src.extent(1) as usize
}

impl Copy<'_> {
    fn pair_bytes(&self) -> usize {
        page_bytes(self.k) + self.v.map_or(0, page_bytes)
    }

    /// A part of the line: of each pair the page of k, and then that of v.
    fn bytes(&self, part: Range<usize>) {
        let mut at = part.start;
        while at < part.end {
            let (pair, within) = (at / self.pair_bytes(), at % self.pair_bytes());
            let k_bytes = page_bytes(self.k);
            let (pages, first) = match self.v {
                Some(v) if within >= k_bytes => (v, within - k_bytes),
                _ => (self.k, within),
            };
            let count = (page_bytes(pages) - first).min(part.end - at);
            if let Some([src, dst]) = self.pairs.get(pair) {
                self.run(
                    address(&pages.src, src) + first,
                    address(&pages.dst, dst) + first,
                    count,
                );
            }
            at += count;
        }
    }

    fn run(&self, from: usize, to: usize, bytes: usize) {
        // A page that is to become its own copy.
        if from == to {
            return;
        }
        let (from, to) = (from as *const u8, to as *mut u8);
        // SAFETY: the pages are within the tensors, which were checked, and no page is read and written.
        unsafe {
            match self.is_nontemporal && bytes >= NONTEMPORAL_COPY {
                true => (self.kernels.nontemporal_copy)(&NontemporalCopy { from, to, bytes }),
                false => std::ptr::copy_nonoverlapping(from, to, bytes),
            }
        }
    }
}

fn address(pages: &Tensor, page: i64) -> usize {
    pages.address() + page as usize * pages.stride(0) as usize
}
