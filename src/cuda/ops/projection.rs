//! Products per head on a device, each one launch: the projections of MLA, and the copy that prepares their weights.
#![allow(unsafe_code)]

use std::sync::Arc;

use super::kernels::{Kernel, Kernels};
use crate::backend::Stream;
use crate::cuda::attention::sm90::{Map, rows_are_distinct};
use crate::cuda::compiler::loader::Loader;
use crate::cuda::driver::{
    Context, Current, Driver, Function, Launch, Swizzle, TensorMap, blocks_of,
};
use crate::cuda::kernels::projection::{
    COPY_TILE, CopyTypes, PORTABLE_TILE, ProjectRow, Tile, blocks_per_multiprocessor, candidates,
    copy_candidates, unsupported, unsupported_copy,
};
use crate::cuda::params::row_alignment;
use crate::cuda::projection_params::{CopyWeightsParams, ProjectionParams, WeightOrder};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::problem::{Checked, CopyWeightsArgs, ProjectArgs};
use crate::tensor::Tensor;

/// Columns of a swizzle atom, 128 bytes of 16-bit elements, and the step along the depth of the Hopper kernel.
const ATOM: u32 = 64;

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
        let dtype = args.x.dtype();
        let products = self.products.get(&current, dtype, stream, |loader, cc| {
            Products::load(loader, dtype, cc)
        })?;
        if args.is_empty() {
            return Ok(());
        }
        let params = ProjectionParams::of(args);
        match products.hopper_for(args, &params, self.sm_count) {
            Some(kernel) => kernel.enqueue(&current, args, &params, self.sm_count, stream),
            None => {
                let blocks = blocks_of("num_tokens", tiles(PORTABLE_TILE, &params))?;
                // SAFETY: the kernel takes a `FolioProjectionParams`; the addresses are the caller's tensors,
                // whose extents `api` checked.
                unsafe { products.portable.enqueue(&current, &params, blocks, stream) }
            }
        }
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
            hopper,
            portable: found.map(Kernel::new)?,
        })
    }

    /// The Hopper kernel whose tile suits best, where tensor maps can describe the tensors.
    fn hopper_for(
        &self,
        args: &Checked<ProjectArgs>,
        params: &ProjectionParams,
        sm_count: u32,
    ) -> Option<&Hopper> {
        let order = WeightOrder::of(&args.weight);
        let tensors = [&args.x, &args.weight, &args.out];
        let described = order != WeightOrder::Elements
            && tensors.into_iter().all(map_describes)
            && [&args.x, &args.out]
                .map(row_alignment)
                .iter()
                .all(|&a| a >= 16);
        if !described {
            return None;
        }
        let depth_first = order == WeightOrder::DepthFirst;
        self.hopper
            .iter()
            .filter(|kernel| kernel.row.depth_first == depth_first)
            .filter(|kernel| tiles(kernel.tile, params) < MOST_TILES)
            .min_by_key(|kernel| cost(kernel.tile, params, sm_count))
    }
}

/// Tiles that the Hopper kernel counts, sixteen times over, in 32 bits.
const MOST_TILES: u64 = 1 << 27;

fn map_describes(tensor: &Tensor) -> bool {
    const MOST_BYTES: i64 = 1 << 40;
    let bytes = |stride: &i64| stride.saturating_mul(tensor.dtype().size() as i64);
    rows_are_distinct(tensor)
        && tensor
            .strides()
            .iter()
            .all(|stride| bytes(stride) < MOST_BYTES)
}

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
        let rows = |tensor: &Tensor, tokens| {
            Map::new(tensor)
                .dimension(tensor.extent(2) as u32, ATOM, 1)
                .dimension(tensor.extent(0) as u32, tokens, tensor.stride(0))
                .dimension(tensor.extent(1) as u32, 1, tensor.stride(1))
                .encode(driver, Swizzle::Span128)
        };
        let (weight, in_box) = match self.row.depth_first {
            true => (args.weight.swap_dims(1, 2), self.tile.columns),
            false => (args.weight, ATOM),
        };
        let weight_map = Map::new(&weight)
            .dimension(weight.extent(2) as u32, ATOM, 1)
            .dimension(weight.extent(1) as u32, in_box, weight.stride(1))
            .dimension(weight.extent(0) as u32, 1, weight.stride(0))
            .encode(driver, Swizzle::Span128)?;
        Ok([
            rows(&args.x, self.tile.tokens)?,
            weight_map,
            rows(&args.out, self.tile.tokens.min(ATOM))?,
        ])
    }
}
