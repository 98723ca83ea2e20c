//! Products per head of few tokens on a device. Which products go this way is decided in `projection`, which has the other
//! ways.
#![allow(unsafe_code)]

use super::projection_maps::Order;
use crate::backend::Stream;
use crate::cuda::compiler::loader::Loader;
use crate::cuda::driver::{Current, Function, Launch, blocks_of};
use crate::cuda::kernels::projection_few::{COLUMNS, DEPTH, FewRow, TOKENS, candidates};
use crate::cuda::projection_params::ProjectionParams;
use crate::dtype::DType;
use crate::error::Result;

/// The kernels of a type, one for each order of the weight.
#[derive(Debug)]
pub struct FewTokens {
    kernels: Vec<(&'static FewRow, Function)>,
}

impl FewTokens {
    /// Kernels that cannot be had are left out.
    pub fn load(loader: &Loader, dtype: DType, cc: (u32, u32)) -> Result<FewTokens> {
        let kernels = loader.find_all(candidates(dtype, cc))?;
        Ok(FewTokens { kernels })
    }

    /// Enqueues a product of aligned rows, if it has few tokens and there is a kernel for it.
    pub fn enqueue(
        &self,
        current: &Current<'_>,
        params: &ProjectionParams,
        order: Order,
        stream: Stream,
    ) -> Result<bool> {
        let depth_first = order == Order::DepthFirst;
        let mut kernels = self.kernels.iter();
        let kernel = kernels.find(|(row, _)| row.depth_first == depth_first);
        let Some((row, function)) = kernel.filter(|_| params.num_tokens <= TOKENS) else {
            return Ok(false);
        };
        let blocks = u64::from(params.num_heads) * u64::from(params.columns.div_ceil(COLUMNS));
        let warps_of_depth = params.depth.div_ceil(DEPTH);
        let launch = Launch {
            grid: [blocks_of("num_heads", blocks)?, 1, 1],
            threads: (warps_of_depth * 32).min(row.row.threads),
            cluster: 1,
            dependent: true,
            stream,
        };
        // SAFETY: the kernel takes a `FolioProjectionParams`; the addresses are the caller's tensors, whose extents
        // `api` checked. It waits for the grid before it before it reads or writes.
        unsafe { launch.enqueue(current, function, params, &[]) }?;
        Ok(true)
    }
}
