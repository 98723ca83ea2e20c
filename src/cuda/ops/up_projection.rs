//! Products of rows that all heads share, keys and values in one launch on Hopper. Which products go this way is decided
//! in `projection`, which has the other ways.
#![allow(unsafe_code)]

use super::projection_maps::{ATOM, Order, Ordered, map_of_rows, map_of_weight};
use crate::backend::Stream;
use crate::cuda::compiler::loader::Loader;
use crate::cuda::driver::{Current, Function, Launch};
use crate::cuda::kernels::up_projection::{CHUNK, TOKENS, UpProjectRow, UpProjectTile, candidates};
use crate::cuda::params::address;
use crate::cuda::up_projection_params::{UpProjectionParams, UpProjectionPart};
use crate::dtype::DType;
use crate::error::Result;
use crate::tensor::Tensor;

/// The kernels of a type, one for each size of a tile.
#[derive(Debug)]
pub struct UpProjection {
    kernels: Vec<(&'static UpProjectRow, Function)>,
}

impl UpProjection {
    /// Kernels that cannot be had are left out.
    pub fn load(loader: &Loader, dtype: DType, cc: (u32, u32)) -> Result<UpProjection> {
        let kernels = loader.find_all(candidates(dtype, cc))?;
        Ok(UpProjection { kernels })
    }

    /// Enqueues two products of the same rows and number of heads, where there is a kernel for them. Of the rows only
    /// those are looked at that exist, where a number on the device says how many.
    pub fn enqueue(
        &self,
        current: &Current<'_>,
        products: &[Ordered<'_>; 2],
        existing_tokens: Option<&Tensor>,
        sm_count: u32,
        stream: Stream,
    ) -> Result<bool> {
        let [keys, values] = *products;
        let (args, _) = keys;
        let [num_tokens, num_heads, depth, _] = args.extents().map(|extent| extent as u32);
        let part = |(args, order): Ordered<'_>| UpProjectionPart {
            columns: args.weight.extent(2) as u32,
            depth_first: (order == Order::DepthFirst).into(),
        };
        let params = UpProjectionParams {
            existing_tokens: address(existing_tokens.copied()),
            num_tokens,
            num_heads,
            depth,
            reserved: 0,
            keys: part(keys),
            values: part(values),
        };
        let kernels = self.kernels.iter();
        let best = kernels.min_by_key(|(row, _)| cost(row, &params, sm_count));
        let Some((row, function)) = best else {
            return Ok(false);
        };
        let driver = current.driver();
        let maps = [
            map_of_rows(driver, &args.x, TOKENS)?,
            map_of_weight(driver, keys, CHUNK)?,
            map_of_weight(driver, values, CHUNK)?,
            map_of_rows(driver, &keys.0.out, ATOM)?,
            map_of_rows(driver, &values.0.out, ATOM)?,
        ];
        let cluster = row.tile.cluster;
        let clusters = tiles(row, &params).min(u64::from((sm_count / cluster).max(1))) as u32;
        let launch = Launch {
            grid: [clusters * cluster, 1, 1],
            threads: row.row.threads,
            cluster,
            dependent: true,
            stream,
        };
        // SAFETY: the kernel takes a `FolioUpProjectionParams` and five maps; the addresses are the caller's
        // tensors, whose extents `api` checked. It waits for the grid before it before it reads or writes.
        unsafe { launch.enqueue(current, function, &params, &maps) }?;
        Ok(true)
    }
}

/// Tiles of a cluster: the tokens of all its CTAs, by chunks of one part.
fn tiles(row: &UpProjectRow, params: &UpProjectionParams) -> u64 {
    let blocks = |part: UpProjectionPart| {
        let chunks = u64::from(params.num_heads) * u64::from(part.columns.div_ceil(CHUNK));
        chunks.div_ceil(row.tile.chunks.into())
    };
    let tokens = u64::from(params.num_tokens.div_ceil(row.tile.cluster * TOKENS));
    tokens * (blocks(params.keys) + blocks(params.values))
}

/// The time of the cluster with the most tiles, in tenths of a microsecond of an H200: what a launch takes, and each tile.
fn cost(row: &UpProjectRow, params: &UpProjectionParams, sm_count: u32) -> u64 {
    let UpProjectTile { cluster, chunks } = row.tile;
    let (launch, of_a_tile) = match (cluster, chunks) {
        (2, _) => (65, 66),
        (_, 4) => (60, 68),
        (_, 2) => (45, 52),
        _ => (42, 38),
    };
    let clusters = u64::from((sm_count / cluster).max(1));
    launch + tiles(row, params).div_ceil(clusters) * of_a_tile
}
