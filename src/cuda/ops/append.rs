//! KV append on a device: new tokens are written to a paged cache by one launch.

use super::kernels::Kernels;
use super::rows::{VECTOR, moves_vectors};
use crate::backend::Stream;
use crate::cuda::driver::blocks_of;
use crate::cuda::kernels::{Op, Types};
use crate::cuda::params::{
    AppendParams, AppendTensor, Cache, Divisor, Rows, address, scales_stride,
};
use crate::error::Result;
use crate::problem::{AppendArgs, Checked};

/// Writes new tokens to a paged cache.
pub fn append(kernels: &Kernels, args: &Checked<AppendArgs>, stream: Stream) -> Result<()> {
    let types = Types {
        q: args.key.dtype(),
        kv: args.k_cache.dtype(),
        o: args.key.dtype(),
    };
    let params = append_params(args);
    let blocks = blocks_of(params.num_tokens as u64)?;
    kernels.enqueue((Op::Append, types), &params, blocks, stream)
}

fn append_params(args: &Checked<AppendArgs>) -> AppendParams {
    let sides = [
        (&args.key, &args.k_cache, args.k_scale, args.k_scales),
        (&args.value, &args.v_cache, args.v_scale, args.v_scales),
    ];
    let vectors = sides
        .iter()
        .all(|&(source, cache, ..)| moves_vectors(source) && moves_vectors(cache));
    let [k, v] = sides.map(|(source, cache, scale, scales)| {
        let head_dim = source.extent(2) as u32;
        let pieces = if vectors { head_dim / VECTOR } else { head_dim };
        AppendTensor {
            source: Rows::of(source),
            cache: Cache::of(cache),
            scales: address(scales),
            scale,
            scales_stride: scales_stride(scales),
            head_dim,
            pieces: Divisor::new(pieces.max(1)),
        }
    });
    let page_size = args.k_cache.extent(1);
    AppendParams {
        k,
        v,
        slots: args.slot_mapping.address() as u64,
        num_tokens: args.slot_mapping.extent(0),
        num_slots: args.k_cache.extent(0) * page_size,
        page_size: Divisor::new(page_size as u32),
        slot_bytes: args.slot_mapping.dtype().size() as u32,
        num_kv_heads: args.key.extent(1) as u32,
        vectors: vectors.into(),
    }
}
