//! Gather of keys and values on a device: tokens of a paged cache are copied to dense rows by one launch.
#![allow(unsafe_code)]

use std::sync::Arc;

use super::keyless_kernel::{KeylessKernel, Workers};
use super::page_ids::PageIds;
use super::rows::{VECTOR, moves_vectors};
use crate::backend::Stream;
use crate::cuda::compiler::loader::Loader;
use crate::cuda::driver::Context;
use crate::cuda::gather_params::{GatheredTensor, KvGatherParams};
use crate::cuda::integers_params::Integers;
use crate::cuda::kernels::keyless::{GATHER_STORED, KV_GATHER};
use crate::cuda::params::{
    Cache, Divisor, Rows, address, count, dtype_code, fewest, scales_stride,
};
use crate::cuda::stored_params::{Stored, StoredGatherParams};
use crate::error::Result;
use crate::problem::{CacheForm, Checked, GatherArgs};
use crate::tensor::Tensor;

/// Rows that a warp converts together; also in the kernel.
const ROWS_OF_WARP: u64 = 32;
const WARP: u32 = 32;

/// The operator on one device.
#[derive(Debug)]
pub struct Gather {
    plain: KeylessKernel,
    stored: KeylessKernel,
}

impl Gather {
    /// Loads nothing yet.
    pub fn new(loader: &Arc<Loader>, context: &Arc<Context>) -> Gather {
        Gather {
            plain: KeylessKernel::new("kv_gather", &KV_GATHER, loader, context),
            stored: KeylessKernel::new("kv_gather", &GATHER_STORED, loader, context),
        }
    }

    /// Copies tokens to dense rows.
    pub fn run(&self, args: &Checked<GatherArgs>, stream: Stream) -> Result<()> {
        let gather = params(args)?;
        let rows = match gather.batch_size {
            0 => 0,
            _ => gather.num_rows as u64,
        };
        if args.form == CacheForm::Plain {
            let of = ("key", Workers::Warps(rows));
            // SAFETY: the kernel takes a `FolioKvGatherParams`; the addresses are the caller's tensors, whose extents
            // `api` checked.
            return unsafe { self.plain.enqueue(&gather, of, stream) };
        }
        let of = ("key", Workers::Blocks(blocks_of_stored(rows, &gather)));
        let params = StoredGatherParams {
            gather: KvGatherParams {
                vectors: [&args.key, &args.value]
                    .into_iter()
                    .all(moves_vectors)
                    .into(),
                ..gather
            },
            cache: Stored::of(&args.caches(), [args.k_scale, args.v_scale]),
        };
        // SAFETY: the kernel takes a `FolioStoredGatherParams`; otherwise as above.
        unsafe { self.stored.enqueue(&params, of, stream) }
    }
}

/// A warp takes [`ROWS_OF_WARP`] rows of the keys or of the values of one head; heads of other rows are other blocks'.
fn blocks_of_stored(rows: u64, gather: &KvGatherParams) -> u64 {
    let warps = 2 * u64::from(gather.num_kv_heads);
    rows.div_ceil(ROWS_OF_WARP) * warps.div_ceil(u64::from(GATHER_STORED.threads() / WARP))
}

fn params(args: &GatherArgs) -> Result<KvGatherParams> {
    let tensors = [&args.k_cache, &args.v_cache, &args.key, &args.value];
    let requests = &args.requests;
    let page_ids = PageIds::of(&requests.pages);
    let (k_cache, v_cache) = (&args.k_cache, &args.v_cache);
    // The kernel counts the pieces of a token, keys and values together.
    let elements = args.key.extent(1) * (args.key.extent(2) + args.value.extent(2));
    count("key", "elements of a token", elements)?;
    Ok(KvGatherParams {
        k: side(k_cache, &args.key, args.k_scale, args.k_scales),
        v: side(v_cache, &args.value, args.v_scale, args.v_scales),
        cu_seq_lens: Integers::of(&requests.cu_seq_lens),
        seq_starts: Integers::of_any(requests.seq_starts),
        page_indptr: page_ids.indptr,
        page_ids: page_ids.ids,
        num_rows: args.key.extent(0),
        page_size: Divisor::new(k_cache.extent(1) as u32),
        batch_size: (requests.cu_seq_lens.extent(0) - 1) as u32,
        num_pages: fewest([k_cache, v_cache]),
        num_kv_heads: args.key.extent(1) as u32,
        cache_dtype: dtype_code(k_cache.dtype()),
        row_dtype: dtype_code(args.key.dtype()),
        vectors: tensors.into_iter().all(moves_vectors).into(),
        reserved: 0,
    })
}

fn side(cache: &Tensor, rows: &Tensor, scale: f32, scales: Option<Tensor>) -> GatheredTensor {
    let head_dim = rows.extent(2) as u32;
    GatheredTensor {
        cache: Cache::of(cache),
        rows: Rows::of(rows),
        scales: address(scales),
        scale,
        scales_stride: scales_stride(scales),
        head_pieces: Divisor::new(head_dim.div_ceil(VECTOR)),
        head_dim,
    }
}
