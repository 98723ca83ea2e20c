//! KV append to caches in other forms than rows of plain elements: one kernel for all of them.
#![allow(unsafe_code)]

use std::sync::Arc;

use super::keyless_kernel::{KeylessKernel, Workers};
use super::rows::{VECTOR, moves_vectors};
use crate::backend::Stream;
use crate::cuda::compiler::loader::Loader;
use crate::cuda::driver::Context;
use crate::cuda::kernels::keyless::APPEND_STORED;
use crate::cuda::params::{Divisor, Rows, count, dtype_code};
use crate::cuda::stored_params::{Stored, StoredAppendParams};
use crate::error::Result;
use crate::problem::{AppendArgs, Checked};

/// Most lanes that share a row.
const WARP: i64 = 32;

/// The operator on one device.
#[derive(Debug)]
pub struct AppendStored(KeylessKernel);

impl AppendStored {
    /// Loads nothing yet.
    pub fn new(loader: &Arc<Loader>, context: &Arc<Context>) -> AppendStored {
        let kernel = KeylessKernel::new("append_stored", &APPEND_STORED, loader, context);
        AppendStored(kernel)
    }

    /// Writes new tokens to a paged cache.
    pub fn run(&self, args: &Checked<AppendArgs>, stream: Stream) -> Result<()> {
        let params = params(args)?;
        let tokens = args.slot_mapping.extent(0) as u64;
        let of = ("slot_mapping", Workers::Blocks(tokens));
        // SAFETY: the kernel takes a `FolioStoredAppendParams`; the addresses are the caller's tensors, whose extents
        // `api` checked.
        unsafe { self.0.enqueue(&params, of, stream) }
    }
}

fn params(args: &AppendArgs) -> Result<StoredAppendParams> {
    let page_size = args.k_cache.extent(1);
    let dim = args.key.extent(2).max(args.value.extent(2));
    // The kernel counts elements of a row and rows of a token.
    count("key", "elements of a row", dim + WARP * i64::from(VECTOR))?;
    count("key", "rows of a token", 2 * args.key.extent(1))?;
    let lanes = (dim as u64).div_ceil(u64::from(VECTOR));
    let lanes = lanes.clamp(1, WARP as u64).next_power_of_two();
    Ok(StoredAppendParams {
        cache: Stored::of(&args.caches(), [args.k_scale, args.v_scale]),
        key: Rows::of(&args.key),
        value: Rows::of(&args.value),
        slots: args.slot_mapping.address() as u64,
        num_slots: args.k_cache.extent(0).saturating_mul(page_size),
        page_size: Divisor::new(page_size as u32),
        slot_bytes: args.slot_mapping.dtype().size() as u32,
        num_kv_heads: args.key.extent(1) as u32,
        row_dtype: dtype_code(args.key.dtype()),
        row_vectors: [&args.key, &args.value]
            .into_iter()
            .all(moves_vectors)
            .into(),
        log2_lanes: lanes.ilog2(),
    })
}
