//! Gather of latent records on a device: rows of a paged cache are copied to dense rows by one launch.
#![allow(unsafe_code)]

use std::sync::Arc;

use super::keyless_kernel::{KeylessKernel, Workers};
use super::page_ids::PageIds;
use super::rows::moves_vectors;
use crate::backend::Stream;
use crate::cuda::compiler::loader::Loader;
use crate::cuda::driver::Context;
use crate::cuda::integers_params::Integers;
use crate::cuda::kernels::keyless::MLA_GATHER;
use crate::cuda::mla_cache_params::{MlaGatherParams, Records, rows};
use crate::cuda::params::{Divisor, dtype_code, fewest};
use crate::error::Result;
use crate::problem::{Checked, LatentRecords, MlaGatherArgs};
use crate::tensor::Tensor;

/// The operator on one device.
#[derive(Debug)]
pub struct MlaGather(KeylessKernel);

impl MlaGather {
    /// Loads nothing yet.
    pub fn new(loader: &Arc<Loader>, context: &Arc<Context>) -> MlaGather {
        MlaGather(KeylessKernel::new(
            "mla_gather",
            &MLA_GATHER,
            loader,
            context,
        ))
    }

    /// Copies records to dense rows.
    pub fn run(&self, args: &Checked<MlaGatherArgs<LatentRecords>>, stream: Stream) -> Result<()> {
        let params = params(args);
        let rows = match params.batch_size {
            0 => 0,
            _ => params.num_rows as u64,
        };
        let of = ("dst", Workers::Warps(rows));
        // SAFETY: the kernel takes a `FolioMlaGatherParams`; the addresses are the caller's tensors, whose extents
        // `api` checked.
        unsafe { self.0.enqueue(&params, of, stream) }
    }
}

fn params(args: &MlaGatherArgs<LatentRecords>) -> MlaGatherParams {
    let LatentRecords { latent, rope, .. } = &args.cache;
    let parts = [Some(*latent), *rope, Some(args.dst), args.dst_rope];
    let vectors = parts.iter().flatten().all(moves_vectors);
    let page_ids = PageIds::of(&args.pages);
    MlaGatherParams {
        cache: Records::of(&args.cache),
        dst: rows(Some(args.dst)),
        dst_rope: rows(args.dst_rope),
        cu_seq_lens: Integers::of(&args.cu_seq_lens),
        seq_starts: Integers::of_any(args.seq_starts),
        page_indptr: page_ids.indptr,
        page_ids: page_ids.ids,
        num_rows: args.dst.extent(0),
        page_size: Divisor::new(latent.extent(1) as u32),
        batch_size: (args.cu_seq_lens.extent(0) - 1) as u32,
        num_pages: fewest([latent].into_iter().chain(rope.as_ref())),
        rank: latent.extent(2) as u32,
        rope_dim: rope.map_or(0, |rope: Tensor| rope.extent(2) as u32),
        dst_dtype: dtype_code(args.dst.dtype()),
        vectors: vectors.into(),
        k_scale: args.k_scale,
    }
}
