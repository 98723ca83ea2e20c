//! Products of rows that all heads share, keys and values in one launch on Hopper. Which products go this way is decided
//! in `projection`, which has the other ways.
#![allow(unsafe_code)]

use super::projection_maps::{ATOM, Order, Ordered, map_of_rows, map_of_weight};
use crate::backend::Stream;
use crate::cuda::compiler::loader::Loader;
use crate::cuda::driver::{Current, Function, Launch};
use crate::cuda::kernels::Row;
use crate::cuda::kernels::up_projection::{CHUNK, CHUNKS, CLUSTER, TOKENS, candidates};
use crate::cuda::up_projection_params::{UpProjectionParams, UpProjectionPart};
use crate::dtype::DType;
use crate::error::{Error, Result};

/// The kernel of a type.
#[derive(Debug)]
pub struct UpProjection {
    row: &'static Row,
    function: Function,
}

impl UpProjection {
    /// The kernel, where it can be had.
    pub fn load(loader: &Loader, dtype: DType, cc: (u32, u32)) -> Result<Option<UpProjection>> {
        let Some(found) = candidates(dtype, cc).next() else {
            return Ok(None);
        };
        match loader.load(&found.row) {
            Ok(function) => Ok(Some(UpProjection {
                row: &found.row,
                function,
            })),
            Err(Error::Unsupported(_)) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Whether both are made of whole tiles of a cluster: others have not been run on a device yet.
    pub fn takes(&self, products: &[Ordered<'_>; 2]) -> bool {
        products.iter().all(|(args, _)| {
            let [tokens, heads, depth, columns] = args.extents();
            let chunks = heads * (columns / i64::from(CHUNK));
            tokens % i64::from(CLUSTER * TOKENS) == 0
                && depth % i64::from(ATOM) == 0
                && columns % i64::from(CHUNK) == 0
                && chunks % i64::from(CHUNKS) == 0
        })
    }

    /// Enqueues two products of the same rows and number of heads.
    pub fn enqueue(
        &self,
        current: &Current<'_>,
        products: &[Ordered<'_>; 2],
        sm_count: u32,
        stream: Stream,
    ) -> Result<()> {
        let [keys, values] = *products;
        let (args, _) = keys;
        let [num_tokens, num_heads, depth, _] = args.extents().map(|extent| extent as u32);
        let part = |(args, order): Ordered<'_>| UpProjectionPart {
            columns: args.weight.extent(2) as u32,
            depth_first: (order == Order::DepthFirst).into(),
        };
        let params = UpProjectionParams {
            num_tokens,
            num_heads,
            depth,
            reserved: 0,
            keys: part(keys),
            values: part(values),
        };
        let driver = current.driver();
        let maps = [
            map_of_rows(driver, &args.x, TOKENS)?,
            map_of_weight(driver, keys, CHUNK)?,
            map_of_weight(driver, values, CHUNK)?,
            map_of_rows(driver, &keys.0.out, ATOM)?,
            map_of_rows(driver, &values.0.out, ATOM)?,
        ];
        let clusters = tiles(&params).min(u64::from(sm_count / CLUSTER).max(1)) as u32;
        let launch = Launch {
            grid: [clusters * CLUSTER, 1, 1],
            threads: self.row.threads,
            cluster: CLUSTER,
            dependent: true,
            stream,
        };
        // SAFETY: the kernel takes a `FolioUpProjectionParams` and five maps; the addresses are the caller's
        // tensors, whose extents `api` checked. It waits for the grid before it before it reads or writes.
        unsafe { launch.enqueue(current, &self.function, &params, &maps) }
    }
}

/// Tiles of a cluster: the tokens of all its CTAs, by chunks of one part.
fn tiles(params: &UpProjectionParams) -> u64 {
    let blocks = |part: UpProjectionPart| {
        let chunks = u64::from(params.num_heads) * u64::from(part.columns.div_ceil(CHUNK));
        chunks.div_ceil(CHUNKS.into())
    };
    let tokens = u64::from(params.num_tokens.div_ceil(CLUSTER * TOKENS));
    tokens * (blocks(params.keys) + blocks(params.values))
}
