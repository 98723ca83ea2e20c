//! Copies of pages on a device, keys and values in one launch. Pairs on the host travel in the parameters of the launch,
//! so that nothing is staged and nothing waits; a list that is longer than they are takes several launches.
#![allow(unsafe_code)]

use std::sync::Arc;

use super::keyless_kernel::{KeylessKernel, Workers};
use crate::backend::Stream;
use crate::cuda::compiler::loader::Loader;
use crate::cuda::copy_params::{self, KV_COPY_PAIRS, KvCopyList, KvCopyParams};
use crate::cuda::driver::{Context, Current};
use crate::cuda::kernels::keyless::{KV_COPY, KV_COPY_LIST};
use crate::cuda::params::{Divisor, count, row_alignment};
use crate::error::Result;
use crate::problem::{Checked, CopyArgs, PagesToCopy};
use crate::tensor::Tensor;

const WARP: u32 = 32;

/// Units that a warp copies of a page at once: `UNITS_OF_LANE` of the kernel for each lane.
const UNITS_OF_PIECE: i64 = 2 * WARP as i64;

/// The operator on one device.
#[derive(Debug)]
pub struct Copy {
    /// For pairs on the device.
    by_tensor: KeylessKernel,
    /// For pairs on the host.
    by_list: KeylessKernel,
}

impl Copy {
    /// Loads nothing yet.
    pub fn new(loader: &Arc<Loader>, context: &Arc<Context>) -> Copy {
        Copy {
            by_tensor: KeylessKernel::new("kv_copy", &KV_COPY, loader, context),
            by_list: KeylessKernel::new("kv_copy", &KV_COPY_LIST, loader, context),
        }
    }

    /// Copies pages.
    pub fn run(&self, args: &Checked<CopyArgs>, stream: Stream) -> Result<()> {
        let current = self.by_tensor.enter(stream)?;
        let pages = Pages::of(args, &current)?;
        let Some(pairs) = args.pairs_on_host() else {
            let params = pages.params(&args.page_pairs, args.page_pairs.extent(0))?;
            let of = workers(&params);
            // SAFETY: the kernel takes a `FolioKvCopyParams`; the addresses are the caller's tensors, whose extents
            // `api` checked.
            return unsafe { self.by_tensor.enqueue(&params, of, stream) };
        };
        let mut all = (0..pairs.len()).filter_map(|pair| pairs.get(pair));
        // Below the number of pages, which `api` bounded.
        let mut list = [[0; 2]; KV_COPY_PAIRS];
        loop {
            let mut listed = 0;
            for (to, pair) in list.iter_mut().zip(&mut all) {
                *to = pair.map(|page| page as i32);
                listed += 1;
            }
            let params = KvCopyList {
                copy: pages.params(&args.page_pairs, listed)?,
                pairs: list,
            };
            let of = workers(&params.copy);
            // SAFETY: as above, of a `FolioKvCopyList`.
            unsafe { self.by_list.enqueue(&params, of, stream)? };
            if listed < KV_COPY_PAIRS as i64 {
                return Ok(());
            }
        }
    }
}

/// A warp for each piece.
fn workers(copy: &KvCopyParams) -> (&'static str, Workers) {
    ("page_pairs", Workers::Warps(copy.num_pieces.into()))
}

/// What all launches of a call have in common.
struct Pages {
    k: copy_params::PagesToCopy,
    v: copy_params::PagesToCopy,
    num_pages: [u32; 2],
    unit_bytes: u32,
}

impl Pages {
    fn of(args: &CopyArgs, current: &Current<'_>) -> Result<Pages> {
        let tensors = [args.k.src, args.k.dst]
            .into_iter()
            .chain(args.v.iter().flat_map(|v| [v.src, v.dst]));
        let aligned = tensors.map(|pages| row_alignment(&pages) | pages.extent(1) as u32);
        let unit_bytes = match aligned.fold(16, |bits, of| bits | of).trailing_zeros() {
            4 => 16,
            2 | 3 => 4,
            bits => 1 << bits,
        };
        let side = |pages: &PagesToCopy, names| side(pages, names, unit_bytes, current);
        Ok(Pages {
            k: side(&args.k, ["k_src", "k_dst"])?,
            v: match &args.v {
                None => copy_params::PagesToCopy::default(),
                Some(v) => side(v, ["v_src", "v_dst"])?,
            },
            num_pages: [&args.k.src, &args.k.dst].map(|pages| pages.extent(0) as u32),
            unit_bytes,
        })
    }

    /// The parameters for so many pairs, wherever they are.
    fn params(&self, pairs: &Tensor, num_pairs: i64) -> Result<KvCopyParams> {
        let pieces = i64::from(self.k.pieces) + i64::from(self.v.pieces);
        let pair_pieces = count("page_pairs", "pieces of a pair", pieces)?;
        Ok(KvCopyParams {
            k: self.k,
            v: self.v,
            pairs: pairs.address() as u64,
            num_pieces: count("page_pairs", "pieces", num_pairs.saturating_mul(pieces))?,
            pair_pieces: Divisor::new(pair_pieces),
            src_pages: self.num_pages[0],
            dst_pages: self.num_pages[1],
            pair_bytes: 2 * pairs.dtype().size() as u32,
            unit_bytes: self.unit_bytes,
        })
    }
}

fn side(
    pages: &PagesToCopy,
    names: [&str; 2],
    unit_bytes: u32,
    current: &Current<'_>,
) -> Result<copy_params::PagesToCopy> {
    let page_bytes = pages.src.extent(1);
    let piece_bytes = UNITS_OF_PIECE * i64::from(unit_bytes);
    let pieces = (page_bytes as u64).div_ceil(piece_bytes as u64) as i64;
    Ok(copy_params::PagesToCopy {
        src: address(names[0], &pages.src, current)?,
        dst: address(names[1], &pages.dst, current)?,
        src_stride: pages.src.stride(0),
        dst_stride: pages.dst.stride(0),
        page_bytes,
        pieces: count(names[0], "pieces of a page", pieces)?,
        reserved: 0,
    })
}

/// Where the kernel finds a tensor.
fn address(name: &str, pages: &Tensor, current: &Current<'_>) -> Result<u64> {
    match pages.is_page_locked() && !pages.is_empty() {
        true => current.device_address(name, pages.address()),
        false => Ok(pages.address() as u64),
    }
}
