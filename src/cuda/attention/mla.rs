//! Multi-head latent attention: what every kernel for it is told, and the portable one, `kernels/generic/mla.cu`, which
//! takes every run.
#![allow(unsafe_code)]

use super::features::Features;
use super::kernel::{AttentionKernel, COMBINE_UNITS, Run};
use crate::backend::Stream;
use crate::cuda::compiler::loader::Loader;
use crate::cuda::driver::{Context, Current, Function, Launch, blocks_of};
use crate::cuda::kernels::mla::{
    MlaQuery, MlaRow, MlaVariant, RecordFormat, candidates, unsupported,
};
use crate::cuda::mla_params::MlaParams;
use crate::cuda::params::{Cache, Divisor, Rows, dtype_code, row_alignment};
use crate::error::Result;
use crate::problem::{AttentionDesc, CacheFormat, SmallItems, TailCosts, Tiling, Workers};
use crate::tensor::Tensor;

/// What of [`MlaParams`] the desc decides.
#[derive(Debug, Clone, Copy)]
pub struct MlaDims {
    kv_lora_rank: u32,
    qk_rope_head_dim: u32,
    num_heads: u32,
    o_dtype: u32,
    page_divisor: Divisor,
    head_divisor: Divisor,
}

impl MlaDims {
    /// Of a problem.
    pub fn of(desc: &AttentionDesc) -> MlaDims {
        MlaDims {
            kv_lora_rank: desc.head_dim_vo,
            qk_rope_head_dim: desc.rope_dim(),
            num_heads: desc.num_qo_heads,
            o_dtype: dtype_code(desc.o_dtype),
            page_divisor: Divisor::new(desc.kv.page_size()),
            head_divisor: Divisor::new(desc.num_qo_heads),
        }
    }

    /// Heads of a token.
    pub fn num_heads(&self) -> u32 {
        self.num_heads
    }

    /// Tiles of `q_tile` rows that an item of so many tokens needs.
    pub fn row_tiles(&self, tokens: u32, q_tile: u32) -> u32 {
        tokens.saturating_mul(self.num_heads).div_ceil(q_tile)
    }

    /// What a run's kernel is told.
    pub fn params(&self, run: &Run<'_>, row_tiles: u32) -> MlaParams {
        let args = run.args;
        let alignment = |tensor: &Option<Tensor>| tensor.as_ref().map_or(16, row_alignment);
        MlaParams {
            attention: *run.params,
            q_rope: args.q_rope.as_ref().map_or(Rows::default(), Rows::of),
            k_rope: args.k_rope.as_ref().map_or(Cache::default(), Cache::of),
            kv_lora_rank: self.kv_lora_rank,
            qk_rope_head_dim: self.qk_rope_head_dim,
            o_dtype: self.o_dtype,
            row_tiles,
            q_copy_bytes: row_alignment(&args.q),
            q_rope_copy_bytes: alignment(&args.q_rope),
            k_copy_bytes: row_alignment(&args.k),
            k_rope_copy_bytes: alignment(&args.k_rope),
            page_size: self.page_divisor,
            num_heads: self.head_divisor,
        }
    }
}

/// Whether a token's rotary part follows its latent part.
pub fn is_one_record(run: &Run<'_>) -> bool {
    let latent = &run.args.k;
    run.args.k_rope.as_ref().is_some_and(|rope| {
        let latent_bytes = latent.extent(3) as usize * latent.dtype().size();
        let same_step = |axis| latent.extent(axis) <= 1 || latent.stride(axis) == rope.stride(axis);
        rope.address() == latent.address() + latent_bytes
            && same_step(0)
            && same_step(1)
            && latent.extent(0) == rope.extent(0)
    })
}

/// What to look for in the kernel table.
pub fn query(context: &Context, desc: &AttentionDesc) -> MlaQuery {
    MlaQuery {
        compute_capability: context.device().compute_capability,
        q: desc.q_dtype,
        format: match desc.kv_format {
            CacheFormat::DS_MLA => RecordFormat::DsMla,
            plain => RecordFormat::Plain(plain.element),
        },
        kv_lora_rank: desc.head_dim_vo,
        qk_rope_head_dim: desc.rope_dim(),
    }
}

/// The portable kernel: takes every run. It is fast where rows are aligned to 16 bytes.
#[derive(Debug)]
pub struct GenericMla {
    row: &'static MlaRow,
    function: Function,
    tiling: Tiling,
    dims: MlaDims,
}

impl GenericMla {
    /// Loads the row for a problem.
    ///
    /// # Errors
    /// As [`Loader::find`].
    pub fn load(loader: &Loader, context: &Context, desc: &AttentionDesc) -> Result<GenericMla> {
        let query = query(context, desc);
        let rows = candidates(query).filter(|row| row.variant == MlaVariant::Generic);
        let (row, function) = loader.find(rows, || unsupported(&query))?;
        let current = context.enter()?;
        let blocks_per_sm = function.blocks_per_sm(&current, row.shape.threads)?.max(1);
        let slots = context.device().sm_count * blocks_per_sm;
        let dims = MlaDims::of(desc);
        Ok(GenericMla {
            row,
            function,
            tiling: tiling(row, &dims, desc.max_qo_len, slots),
            dims,
        })
    }
}

/// Items are the tokens whose heads fill a tile, or a token of several tiles; they are cut so that the tiles of all
/// items fill the device once.
fn tiling(row: &MlaRow, dims: &MlaDims, max_qo_len: u32, slots: u32) -> Tiling {
    let rows = row.shape.q_tile;
    let q_tile = (rows / dims.num_heads).max(1);
    let row_tiles = dims.row_tiles(q_tile.min(max_qo_len), rows);
    let at_a_time = slots.div_ceil(row_tiles);
    Tiling {
        q_tile,
        q_parts: 1,
        kv_unit: 128,
        unit_bytes: u32::MAX,
        max_splits: at_a_time,
        max_shares: at_a_time,
        tail: TailCosts::NO_TAIL,
        takes_shares: false,
        least_gain: 0,
        rows_of_unit: 0,
        invariant_chunk: 2048,
        combine_units: COMBINE_UNITS,
        own_key_bytes: 0,
        workers: Workers {
            all: slots,
            of_item: row_tiles,
            small: SmallItems::NONE,
        },
    }
}

impl AttentionKernel for GenericMla {
    fn name(&self) -> &str {
        &self.row.row.name
    }

    fn tiling(&self) -> Tiling {
        self.tiling
    }

    fn missing(&self, _: &Run<'_>) -> Features {
        Features::default()
    }

    fn launch(&self, current: &Current<'_>, run: &Run<'_>, stream: Stream) -> Result<()> {
        let row_tiles = self.dims.row_tiles(run.q_tile, self.row.shape.q_tile);
        let params = self.dims.params(run, row_tiles);
        let blocks = u64::from(run.num_items) * u64::from(row_tiles);
        let launch = Launch {
            grid: [blocks_of("qo_indptr and kv_len", blocks)?, 1, 1],
            threads: self.row.shape.threads,
            cluster: 1,
            dependent: false,
            stream,
        };
        // SAFETY: the kernel takes a `FolioMlaParams`; its addresses are the caller's tensors, which were checked
        // against the plan, and the workspace.
        unsafe { launch.enqueue(current, &self.function, &params, &[]) }
    }
}
