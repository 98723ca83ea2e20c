//! Append of latent records on a device: new tokens are rotated and written to a paged cache by one launch.
#![allow(unsafe_code)]

use std::sync::Arc;

use super::keyless_kernel::{KeylessKernel, Workers};
use super::rows::{VECTOR, moves_vectors};
use crate::backend::Stream;
use crate::cuda::compiler::loader::Loader;
use crate::cuda::driver::Context;
use crate::cuda::kernels::keyless::MLA_APPEND;
use crate::cuda::mla_cache_params::{MlaAppendParams, Records, rows};
use crate::cuda::params::{Divisor, Rows, address, count, dtype_code};
use crate::error::Result;
use crate::problem::{Checked, LatentRecords, MlaAppendArgs};
use crate::tensor::Tensor;

/// The operator on one device.
#[derive(Debug)]
pub struct MlaAppend(KeylessKernel);

impl MlaAppend {
    /// Loads nothing yet.
    pub fn new(loader: &Arc<Loader>, context: &Arc<Context>) -> MlaAppend {
        MlaAppend(KeylessKernel::new(
            "mla_append",
            &MLA_APPEND,
            loader,
            context,
        ))
    }

    /// Writes the records of new tokens.
    pub fn run(&self, args: &Checked<MlaAppendArgs<LatentRecords>>, stream: Stream) -> Result<()> {
        let params = params(args)?;
        let tokens = args.slot_mapping.extent(0) as u64;
        let of = ("slot_mapping", Workers::Blocks(tokens));
        // SAFETY: the kernel takes a `FolioMlaAppendParams`; the addresses are the caller's tensors, whose extents
        // `api` checked.
        unsafe { self.0.enqueue(&params, of, stream) }
    }
}

fn params(args: &MlaAppendArgs<LatentRecords>) -> Result<MlaAppendParams> {
    let rope_dim = args.rope.map_or(0, |rope| rope.extent(1));
    let page_size = args.cache.latent.extent(1);
    let rotary = args.rotary.as_ref();
    let q = rotary.and_then(|rotary| rotary.q_rope);
    let q_out = rotary.and_then(|rotary| rotary.q_rope_out);
    let table = rotary.map(|rotary| rotary.cos_sin_cache);
    let positions = rotary.map(|rotary| rotary.positions);
    let vectors = tensors(args).all(|tensor| moves_vectors(&tensor))
        // Halves of a rotary row, and neighbours of eight pairs, are whole vectors.
        && (rotary.is_none() || rope_dim % i64::from(2 * VECTOR) == 0);
    let rope_pieces = (rope_dim as u32 / 2).div_ceil(VECTOR);
    let num_heads = q.map_or(0, |q| q.extent(1));
    // The kernel counts the pieces of a token, and addresses elements of a row by 32 bits.
    count("q_rope", "elements of a token", num_heads * rope_dim)?;
    let heads = |tensor: Option<Tensor>| tensor.map_or(Rows::default(), |tensor| Rows::of(&tensor));
    Ok(MlaAppendParams {
        cache: Records::of(&args.cache),
        latent: rows(Some(args.latent)),
        rope: rows(args.rope),
        rope_out: rows(rotary.and_then(|rotary| rotary.rope_out)),
        q: heads(q),
        q_out: heads(q_out),
        cos_sin: address(table),
        cos_sin_stride: table.map_or(0, |table| table.stride(0)),
        max_position: table.map_or(0, |table| table.extent(0)),
        positions: address(positions),
        slots: args.slot_mapping.address() as u64,
        num_slots: args.cache.latent.extent(0).saturating_mul(page_size),
        page_size: Divisor::new(page_size as u32),
        rope_pieces: Divisor::new(rope_pieces),
        position_bytes: positions.map_or(0, |positions| positions.dtype().size() as u32),
        slot_bytes: args.slot_mapping.dtype().size() as u32,
        rank: args.latent.extent(1) as u32,
        rope_dim: rope_dim as u32,
        num_heads: num_heads as u32,
        dtype: dtype_code(args.latent.dtype()),
        cos_sin_dtype: table.map_or(0, |table| dtype_code(table.dtype())),
        is_interleaved: rotary.is_some_and(|rotary| rotary.is_interleaved).into(),
        vectors: vectors.into(),
        k_scale: args.k_scale,
    })
}

/// Those whose rows move in pieces.
fn tensors(args: &MlaAppendArgs<LatentRecords>) -> impl Iterator<Item = Tensor> {
    let rotary = args.rotary.map(|rotary| {
        let table = Some(rotary.cos_sin_cache);
        [table, rotary.rope_out, rotary.q_rope, rotary.q_rope_out]
    });
    [
        Some(args.latent),
        args.rope,
        Some(args.cache.latent),
        args.cache.rope,
    ]
    .into_iter()
    .chain(rotary.into_iter().flatten())
    .flatten()
}
