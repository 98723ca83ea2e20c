//! What a kernel that computes attention offers to a plan. Every such kernel works from the same work
//! items; a plan is cut as its preferred kernel wants, and whichever kernel a run needs takes the items as
//! they are.

use super::features::{Feature, Features};
use crate::backend::Stream;
use crate::cuda::compiler::loader::Loader;
use crate::cuda::driver::{Context, Current, Function};
use crate::cuda::kernels::attention::{
    self, AttentionQuery, AttentionRow, AttentionTypes, Phase, STORED,
};
use crate::cuda::params::AttentionParams;
use crate::cuda::rope_append_params::RopeAppendParams;
use crate::error::{Error, Result};
use crate::problem::{
    AttentionArgs, AttentionDesc, CacheForm, Checked, Earlier, Keys, RopeAppendArgs, TailCosts,
    Tiling, Workers,
};
use crate::tensor::Tensor;

/// One run of a plan.
#[derive(Debug)]
pub struct Run<'a> {
    /// The checked arguments.
    pub args: &'a Checked<AttentionArgs>,
    /// The same for the device.
    pub params: &'a AttentionParams,
    /// Work items, or the most there can be where only the device knows.
    pub num_items: u32,
    /// Most query rows of an item, or the most there can be.
    pub q_tile: u32,
    /// An item has as many: the host cut the batch, and the launch serves no other one.
    pub q_tile_is_exact: bool,
    /// A window leaves no more keys to a tile than [`AttentionKernel::few_keys`], and items have no more rows than a part of a tile;
    /// the launch serves no other batch.
    pub has_few_keys: bool,
    /// Keys of all requests together, or the most there can be where only the device knows.
    pub num_keys: u64,
    /// Query rows of all requests together, or the most there can be.
    pub num_rows: u64,
    /// Requests, or the most there can be.
    pub num_requests: u32,
    /// Query rows that the tensors have for the batch: those of requests that are not this run's too.
    pub num_tokens: u64,
    /// Which keys of each request these are. The others are elsewhere, and the first of new ones may be within a block.
    pub keys: Keys,
    /// Address of the memory that kernels asked for ([`AttentionKernel::scratch_bytes`]).
    pub scratch: u64,
    /// Tokens that the kernel is to make and append: what [`AttentionKernel::new_tokens`] said. Otherwise tokens are in the
    /// cache.
    pub new_tokens: Option<&'a RopeAppendParams>,
    /// What the rows see beside these keys, for a kernel that [`AttentionKernel::goes_on`].
    pub earlier: Earlier,
}

/// What a launch reads in place of the run's own tensors.
pub struct Inputs<'a> {
    /// Queries.
    pub q: &'a Tensor,
    /// Keys.
    pub k: &'a Tensor,
    /// Values.
    pub v: &'a Tensor,
    /// Of the run, with work items that say where these keys are.
    pub params: AttentionParams,
    /// Another kernel of the run, before this one on the stream, writes some of them.
    pub dependent: bool,
}

/// Of a kernel whose workers take an item together, a tile of its rows each, so that its keys are read once from memory. Rows
/// are pairs of a query row and a head. Several items of a request would read its keys several times; but workers are reserved
/// for the tiles of the largest item, and those that another one does not have are idle.
#[derive(Debug, Clone, Copy)]
pub struct SideBySide {
    /// Heads of a query row.
    pub num_heads: u32,
    /// Rows of a tile.
    pub tile: u32,
    /// Rows of a request that is one item, at most.
    pub most_rows: u32,
}

impl SideBySide {
    /// Query rows of a request that is one item, at most. 0: none is.
    pub fn rows_of_request(self) -> u32 {
        self.most_rows / self.num_heads
    }

    /// Query rows that fill a tile, or one of several tiles.
    pub fn rows_of_tile(self) -> u32 {
        (self.tile / self.num_heads).max(1)
    }

    /// By items of so many query rows at most: as many at a time as there are workers for.
    pub fn of_items(self, tiling: Tiling, q_tile: u32) -> Tiling {
        let of_item = q_tile.saturating_mul(self.num_heads).div_ceil(self.tile);
        let at_a_time = (tiling.workers.all / of_item).max(1);
        Tiling {
            q_tile,
            max_splits: at_a_time,
            max_shares: at_a_time,
            tail: TailCosts::NO_TAIL,
            workers: Workers {
                of_item,
                ..tiling.workers
            },
            ..tiling
        }
    }
}

/// A loaded kernel that computes attention.
pub trait AttentionKernel: Send + Sync {
    /// Name of its row.
    fn name(&self) -> &str;

    /// How its work is cut best.
    fn tiling(&self) -> Tiling;

    /// Whether it has a worker for each tile of an item's rows. Then batches are cut by the rows that their requests have.
    fn side_by_side(&self) -> Option<SideBySide> {
        None
    }

    /// Keys up to which a tile is faster with one part, where it may be chosen by plan. Then batches whose tiles see no more are cut
    /// in these.
    fn few_keys(&self) -> u32 {
        0
    }

    /// Query rows that an item may have for it.
    fn most_rows(&self) -> u32 {
        u32::MAX
    }

    /// Items that it takes begin at keys that are multiples of this. 1: anywhere where any kernel's chunks begin.
    fn starts_at(&self) -> u32 {
        1
    }

    /// What the run asks for and the kernel lacks; nothing where it takes the run. Asked before every
    /// launch: a few comparisons, and no memory.
    fn missing(&self, run: &Run<'_>) -> Features;

    /// Memory that a launch needs beside the plan, for plans of up to so many work items. The kernels of a problem share it.
    fn scratch_bytes(&self, _most_items: usize) -> usize {
        0
    }

    /// What a launch of the run needs to append these tokens before it attends to them; `None` where it cannot.
    fn new_tokens(&self, _run: &Run<'_>, _tokens: &RopeAppendArgs) -> Option<RopeAppendParams> {
        None
    }

    /// Whether it goes on from earlier keys in some runs.
    fn may_go_on(&self) -> bool {
        false
    }

    /// Whether it does so in this one.
    fn goes_on(&self, _run: &Run<'_>) -> bool {
        false
    }

    /// Keys of a step, where it takes a context.
    fn context_step(&self) -> Option<u32> {
        None
    }

    /// Enqueues the kernel.
    fn launch(&self, current: &Current<'_>, run: &Run<'_>, stream: Stream) -> Result<()>;

    /// What rows are put together by whose keys were split: those of the run, but for factors of v that a launch finds.
    fn of_parts(&self, run: &Run<'_>) -> AttentionParams {
        *run.params
    }
}

/// What was wanted, or what the wanted one lacks.
pub type OrLacks<T> = std::result::Result<T, Features>;

/// The preferred row of a problem that `accept` agrees to, with its kernel: of rows that are as wide, the first of the
/// table, and a narrow one before a wide one.
///
/// # Errors
/// As [`Loader::find`], but for [`Error::Unsupported`].
pub fn find(
    loader: &Loader,
    query: AttentionQuery,
    accept: impl Fn(&AttentionRow) -> bool,
) -> Result<OrLacks<(&'static AttentionRow, Function)>> {
    let mut rows: Vec<_> = attention::candidates(query)
        .filter(|row| accept(row))
        .collect();
    if rows.is_empty() {
        return Ok(Err(Feature::TypesAndDims.into()));
    }
    rows.sort_by_key(|row| row.shape.head_dim_qk + row.shape.head_dim_vo);
    match loader.find(rows, || attention::unsupported(&query)) {
        Ok(found) => Ok(Ok(found)),
        Err(Error::Unsupported(_)) => Ok(Err(Feature::Code.into())),
        Err(error) => Err(error),
    }
}

/// What to look for in the kernel table.
pub fn query(context: &Context, desc: &AttentionDesc) -> AttentionQuery {
    AttentionQuery {
        phase: phase(desc),
        compute_capability: context.device().compute_capability,
        types: AttentionTypes {
            q: desc.q_dtype,
            // Of other forms than plain rows a kernel takes all.
            kv: match desc.kv_format.form() {
                CacheForm::Plain => desc.kv_format.element,
                _ => STORED,
            },
            o: desc.o_dtype,
        },
        head_dim_qk: desc.head_dim_qk,
        head_dim_vo: desc.head_dim_vo,
    }
}

/// Units of keys in the time of a combine kernel and of what else a cascade costs. On an H200, with fewer, 8 decodes of
/// 1024 shared keys would lose 0.3 µs and 64 of 256 lose 4; 16 of 2048 win 3.
pub const COMBINE_UNITS: u32 = 5;

/// [`Tiling::own_key_bytes`] of Hopper's kernels, whose tiles have few rows of a request.
pub const OWN_KEY_BYTES: u32 = 32;

/// Query rows that read the keys of one KV head, at most.
pub fn packed_rows(desc: &AttentionDesc) -> u32 {
    desc.group_size().saturating_mul(desc.max_qo_len)
}

/// Rows of the tile that all warps share suffice for short queries; more rows are divided among warps.
pub fn phase(desc: &AttentionDesc) -> Phase {
    const SHARED_ROWS: u32 = 16;
    if packed_rows(desc) <= SHARED_ROWS {
        Phase::Decode
    } else {
        Phase::Prefill
    }
}
