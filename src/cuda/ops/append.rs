//! KV append on a device: new tokens are written to a paged cache by one launch.
#![allow(unsafe_code)]

use std::sync::Arc;

use super::kernels::{Kernel, Kernels};
use super::rows::{VECTOR, moves_vectors};
use crate::backend::Stream;
use crate::cuda::compiler::loader::Loader;
use crate::cuda::driver::{Context, blocks_of};
use crate::cuda::kernels::append::{APPEND, AppendTypes};
use crate::cuda::params::{
    AppendParams, AppendTensor, Cache, Divisor, Rows, address, count, scales_stride,
};
use crate::error::Result;
use crate::problem::{AppendArgs, Checked};
use crate::tensor::Tensor;

/// The operator on one device.
#[derive(Debug)]
pub struct Append {
    kernels: Kernels<AppendTypes, Kernel>,
}

impl Append {
    /// Loads nothing yet.
    pub fn new(loader: &Arc<Loader>, context: &Arc<Context>) -> Append {
        Append {
            kernels: Kernels::new("append", loader, context),
        }
    }

    /// Writes new tokens to a paged cache.
    pub fn run(&self, args: &Checked<AppendArgs>, stream: Stream) -> Result<()> {
        let types = AppendTypes {
            source: args.key.dtype(),
            cache: args.k_cache.dtype(),
        };
        let params = append_params(args)?;
        let blocks = blocks_of("slot_mapping", params.num_tokens as u64)?;
        let current = self.kernels.enter(stream)?;
        let kernel = self.kernels.get(&current, types, stream, |loader, cc| {
            let found = loader.find(APPEND.candidates(types, cc), || {
                APPEND.unsupported(types, cc)
            });
            found.map(Kernel::new)
        })?;
        // SAFETY: the kernel takes a `FolioAppendParams`; the addresses are the caller's tensors, whose
        // extents `api` checked.
        unsafe { kernel.enqueue(&current, &params, blocks, stream) }
    }
}

/// What the kernels need of an append.
pub fn append_params(args: &AppendArgs) -> Result<AppendParams> {
    let sides = [(&args.key, &args.k_cache), (&args.value, &args.v_cache)];
    let vectors = sides
        .iter()
        .all(|(source, cache)| moves_vectors(source) && moves_vectors(cache));
    let side = |field, source: &Tensor, cache, scale, scales| {
        let (heads, head_dim) = (source.extent(1), source.extent(2) as u32);
        // The kernel counts the pieces of a token.
        count(field, "elements of a token", heads * source.extent(2))?;
        Ok(AppendTensor {
            source: Rows::of(source),
            cache: Cache::of(cache),
            scales: address(scales),
            scale,
            scales_stride: scales_stride(scales),
            head_dim,
            pieces: Divisor::new(if vectors { head_dim / VECTOR } else { head_dim }),
        })
    };
    let (key, value) = (&args.key, &args.value);
    let page_size = args.k_cache.extent(1);
    Ok(AppendParams {
        k: side("key", key, &args.k_cache, args.k_scale, args.k_scales)?,
        v: side("value", value, &args.v_cache, args.v_scale, args.v_scales)?,
        slots: args.slot_mapping.address() as u64,
        num_tokens: args.slot_mapping.extent(0),
        num_slots: args.k_cache.extent(0).saturating_mul(page_size),
        page_size: Divisor::new(page_size as u32),
        slot_bytes: args.slot_mapping.dtype().size() as u32,
        num_kv_heads: key.extent(1) as u32,
        vectors: vectors.into(),
    })
}
