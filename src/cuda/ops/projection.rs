//! Products per head on a device, each one launch: the projections of MLA, and the copy that prepares their weights. Which
//! kernel takes a product is decided here; how those for few tokens and for rows that all heads share are launched is in
//! `projection_few` and `up_projection`.
#![allow(unsafe_code)]

use std::sync::Arc;

use super::kernels::{Kernel, Kernels};
use super::projection_few::FewTokens;
use super::projection_maps::{
    ATOM, Order, Ordered, map_of_rows, map_of_weight, order_for_maps, order_of_aligned,
};
use super::up_projection::UpProjection;
use crate::backend::Stream;
use crate::cuda::compiler::loader::Loader;
use crate::cuda::driver::{Context, Current, Driver, Function, Launch, TensorMap, blocks_of};
use crate::cuda::kernels::projection::{
    COPY_TILE, CopyTypes, PORTABLE_TILE, ProjectRow, Tile, blocks_per_multiprocessor, candidates,
    copy_candidates, tile, unsupported, unsupported_copy,
};
use crate::cuda::projection_params::{CopyWeightsParams, ProjectionParams};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::problem::{Checked, CopyWeightsArgs, ProjectArgs};
use crate::tensor::Tensor;

/// The operators on one device.
#[derive(Debug)]
pub struct Projections {
    products: Kernels<DType, Products>,
    copies: Kernels<CopyTypes, Kernel>,
    sm_count: u32,
}

/// All kernels of a type. Which of them a call takes depends on its number of tokens, so that the first call loads all,
/// and any later one may be captured.
#[derive(Debug)]
struct Products {
    few_tokens: FewTokens,
    shared_rows: UpProjection,
    hopper: Vec<Hopper>,
    portable: Kernel,
}

/// A kernel for one tile and order of the weight.
#[derive(Debug)]
struct Hopper {
    row: &'static ProjectRow,
    tile: Tile,
    function: Function,
}

impl Projections {
    /// Loads nothing yet.
    pub fn new(loader: &Arc<Loader>, context: &Arc<Context>) -> Projections {
        Projections {
            products: Kernels::new("MLA projection", loader, context),
            copies: Kernels::new("mla_absorb_weights", loader, context),
            sm_count: context.device().sm_count,
        }
    }

    /// Computes a product per head.
    pub fn project(&self, args: &Checked<ProjectArgs>, stream: Stream) -> Result<()> {
        let current = self.products.enter(stream)?;
        let products = self.load(&current, args, stream)?;
        products.project(&current, args, self.sm_count, stream)
    }

    /// Computes two products of the same rows, which all heads share. Rows from `existing_tokens` on need no results.
    pub fn project_pair(
        &self,
        products: &[Checked<ProjectArgs>; 2],
        existing_tokens: Option<&Tensor>,
        stream: Stream,
    ) -> Result<()> {
        let current = self.products.enter(stream)?;
        let [keys, values] = products;
        let kernels = self.load(&current, keys, stream)?;
        if let (Some(keys), Some(values)) = (for_shared_rows(keys), for_shared_rows(values))
            && kernels.shared_rows.enqueue(
                &current,
                &[keys, values],
                existing_tokens,
                self.sm_count,
                stream,
            )?
        {
            return Ok(());
        }
        let mut each = products.iter();
        each.try_for_each(|args| kernels.project(&current, args, self.sm_count, stream))
    }

    fn load(
        &self,
        current: &Current<'_>,
        args: &Checked<ProjectArgs>,
        stream: Stream,
    ) -> Result<Arc<Products>> {
        let dtype = args.x.dtype();
        self.products.get(current, dtype, stream, |loader, cc| {
            Products::load(loader, dtype, cc)
        })
    }

    /// Copies weights.
    pub fn copy_weights(&self, args: &Checked<CopyWeightsArgs>, stream: Stream) -> Result<()> {
        let types = CopyTypes {
            source: args.source.dtype(),
            target: args.target.dtype(),
        };
        let params = CopyWeightsParams::of(args);
        let [rows, columns] =
            [params.rows, params.columns].map(|extent| u64::from(extent.div_ceil(COPY_TILE)));
        let blocks = blocks_of("kv_b_proj", u64::from(params.num_heads) * rows * columns)?;
        let current = self.copies.enter(stream)?;
        let kernel = self.copies.get(&current, types, stream, |loader, cc| {
            let found = loader.find(copy_candidates(types, cc), || unsupported_copy(types, cc));
            found.map(Kernel::new)
        })?;
        // SAFETY: the kernel takes a `FolioCopyWeightsParams`; the addresses are the caller's tensors, whose
        // extents `api` checked.
        unsafe { kernel.enqueue(&current, &params, blocks, stream) }
    }
}

impl Products {
    /// Hopper kernels that cannot be had are left out; the portable one must be there.
    fn load(loader: &Loader, dtype: DType, cc: (u32, u32)) -> Result<Products> {
        let mut hopper = Vec::new();
        for row in candidates(dtype, cc) {
            let Some(tile) = row.tile else { continue };
            match loader.load(&row.row) {
                Ok(function) => hopper.push(Hopper {
                    row,
                    tile,
                    function,
                }),
                Err(Error::Unsupported(_)) => {}
                Err(error) => return Err(error),
            }
        }
        let portable = candidates(dtype, cc).filter(|row| row.tile.is_none());
        let found = loader.find(portable, || unsupported(dtype, cc));
        Ok(Products {
            few_tokens: FewTokens::load(loader, dtype, cc)?,
            shared_rows: UpProjection::load(loader, dtype, cc)?,
            hopper,
            portable: found.map(Kernel::new)?,
        })
    }

    fn project(
        &self,
        current: &Current<'_>,
        args: &Checked<ProjectArgs>,
        sm_count: u32,
        stream: Stream,
    ) -> Result<()> {
        if args.is_empty() {
            return Ok(());
        }
        let params = ProjectionParams::of(args);
        if let Some(order) = order_of_aligned(args)
            && args.x.extent(1) == args.weight.extent(0)
            && self.few_tokens.enqueue(current, &params, order, stream)?
        {
            return Ok(());
        }
        match self.hopper_for(args, &params, sm_count) {
            Some(kernel) => kernel.enqueue(current, args, &params, sm_count, stream),
            None => {
                let blocks = blocks_of("num_tokens", tiles(PORTABLE_TILE, &params))?;
                // SAFETY: the kernel takes a `FolioProjectionParams`; the addresses are the caller's tensors,
                // whose extents `api` checked.
                unsafe { self.portable.enqueue(current, &params, blocks, stream) }
            }
        }
    }

    /// The Hopper kernel whose tile suits best, where tensor maps can describe the tensors.
    fn hopper_for(
        &self,
        args: &Checked<ProjectArgs>,
        params: &ProjectionParams,
        sm_count: u32,
    ) -> Option<&Hopper> {
        let order = order_for_maps(args)?;
        let mut kernels = self
            .hopper
            .iter()
            .filter(|kernel| kernel.row.depth_first == (order == Order::DepthFirst))
            .filter(|kernel| tiles(kernel.tile, params) < MOST_TILES);
        if is_timed(args) {
            return kernels.find(|kernel| kernel.tile == best_tile(params, sm_count));
        }
        kernels
            .filter(|kernel| kernel.tile.tokens != 32)
            .min_by_key(|kernel| cost(kernel.tile, params, sm_count))
    }
}

/// The product with the order of its weight, where the kernels for rows that all heads share take it.
fn for_shared_rows(args: &Checked<ProjectArgs>) -> Option<Ordered<'_>> {
    let shared = args.x.extent(1) == 1 && !args.is_empty();
    let order = order_for_maps(args).filter(|_| shared)?;
    Some((args, order))
}

/// Tiles that the Hopper kernel counts, sixteen times over, in 32 bits.
const MOST_TILES: u64 = 1 << 27;

fn tiles(tile: Tile, params: &ProjectionParams) -> u64 {
    let tokens = u64::from(params.num_tokens.div_ceil(tile.tokens));
    let columns = u64::from(params.columns.div_ceil(tile.columns));
    tokens * columns * u64::from(params.num_heads)
}

/// Clock cycles of the multiprocessor with the most tiles. A tile takes as long as its bytes take between L2 and the
/// multiprocessor, or as its products take the matrix unit: 32 bytes and 4096 FLOP per cycle on an H200.
fn cost(tile: Tile, params: &ProjectionParams, sm_count: u32) -> u64 {
    let [tokens, columns, depth] = [tile.tokens, tile.columns, params.depth].map(u64::from);
    let bytes = 2 * (depth * (tokens + columns) + tokens * columns);
    let flop = 2 * tokens.max(64) * columns * depth;
    tiles(tile, params).div_ceil(u64::from(sm_count)) * (bytes / 32).max(flop / 4096)
}

/// Whether all tiles were timed for such a product, so that `best_tile` knows better than `cost`.
fn is_timed(args: &Checked<ProjectArgs>) -> bool {
    let [tokens, heads, ..] = args.extents();
    args.x.dtype() == DType::BF16 && args.x.extent(1) == heads && tokens <= 512
}

/// The least tile that all tokens fit, or one of 64: of 128 columns where each multiprocessor has several, and of 32 tokens
/// where half of the multiprocessors would have none. Found by timing all tiles on an H200.
fn best_tile(params: &ProjectionParams, sm_count: u32) -> Tile {
    let sm_count = u64::from(sm_count);
    match params.num_tokens {
        0..=16 => tile(16, 64),
        17..=32 => tile(32, 64),
        _ if tiles(tile(64, 64), params) * 2 <= sm_count => tile(32, 64),
        _ if tiles(tile(64, 128), params) >= sm_count * 3 => tile(64, 128),
        _ => tile(64, 64),
    }
}

impl Hopper {
    fn enqueue(
        &self,
        current: &Current<'_>,
        args: &Checked<ProjectArgs>,
        params: &ProjectionParams,
        sm_count: u32,
        stream: Stream,
    ) -> Result<()> {
        let most = u64::from(sm_count * blocks_per_multiprocessor(&self.row.row));
        let launch = Launch {
            grid: [tiles(self.tile, params).min(most) as u32, 1, 1],
            threads: self.row.row.threads,
            cluster: 1,
            dependent: true,
            stream,
        };
        let maps = self.maps(current.driver(), args)?;
        // SAFETY: the kernel takes a `FolioProjectionParams` and three maps; the addresses are the caller's
        // tensors, whose extents `api` checked. It waits for the grid before it before it reads or writes.
        unsafe { launch.enqueue(current, &self.function, params, &maps) }
    }

    /// Boxes of x and of the results are rows of 64 columns; those of the weight 64 along what is contiguous.
    fn maps(&self, driver: Driver, args: &Checked<ProjectArgs>) -> Result<[TensorMap; 3]> {
        let order = match self.row.depth_first {
            true => Order::DepthFirst,
            false => Order::ColumnsFirst,
        };
        Ok([
            map_of_rows(driver, &args.x, self.tile.tokens)?,
            map_of_weight(driver, (args, order), self.tile.columns)?,
            map_of_rows(driver, &args.out, self.tile.tokens.min(ATOM))?,
        ])
    }
}
