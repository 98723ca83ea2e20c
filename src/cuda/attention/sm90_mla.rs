//! The Hopper MLA kernels of 64 rows, `kernels/sm90/mla` and `mla_gather`: what they take, and the tensor maps that one of
//! them reads records by. Where a map cannot describe the cache, or records are not of 16 bits, the others take them token by
//! token.
#![allow(unsafe_code)]

use super::features::{Feature, Features};
use super::kernel::{AttentionKernel, COMBINE_UNITS, OrLacks, Run, SideBySide};
use super::mla::{MlaDims, is_one_record, query};
use super::sm90::{GROUP, Map, rows_are_distinct};
use crate::backend::Stream;
use crate::cuda::compiler::loader::Loader;
use crate::cuda::driver::{Context, Current, Function, Launch, Swizzle, TensorMap};
use crate::cuda::kernels::mla::{MlaRow, MlaVariant, candidates, unsupported};
use crate::cuda::mla_params::MlaHopperParams;
use crate::cuda::params::row_alignment;
use crate::error::{Error, Result};
use crate::problem::{AttentionDesc, SmallItems, TailCosts, Tiling, Workers};
use crate::tensor::Tensor;

/// Columns of a swizzle atom, 128 bytes of 16-bit elements.
const ATOM: u32 = 64;

/// Rows of a request that is one item, at most. (On an H200, 64 requests of 4k keys: 2 × 128 rows 219 µs, in items of 128 230;
/// 4 × 80 rows 288, in items of 80 425; 4 × 128 rows 416, in items of 128 431.)
const ROWS_SIDE_BY_SIDE: u32 = 512;

/// The same of batch-invariant plans, which cut a request alike whatever others have. Tiles of the rows that a request could have
/// and does not are idle: 128 requests of one token of 64 heads took 2.4 times as long on a handle for four.
const ROWS_OF_ANY_BATCH: u32 = 256;

/// Keys of a chunk of a batch-invariant plan, rounded down to whole tiles.
const INVARIANT_CHUNK: u32 = 2048;

/// [`Tiling::least_gain`], and heads of query rows for [`Tiling::rows_of_unit`]. A unit takes 1.3 µs on an H200, and the launch that
/// puts parts together 3 µs and 0.12 for 64 heads of a row, whose 512 columns are written twice in fp32 and read again. 54 × 2
/// tokens of 32 heads on 141 keys take 17.2 µs whole and 25.4 split, 59 of 64 on 602 29.4 and 35.2.
const LEAST_GAIN: u32 = 1;
const HEADS_OF_UNIT: u32 = 576;

/// One of the kernels for one problem.
#[derive(Debug)]
pub struct Sm90Mla {
    row: &'static MlaRow,
    function: Function,
    dims: MlaDims,
    side_by_side: SideBySide,
    /// Query rows of an item, by the desc alone.
    q_tile: u32,
    page_size: u32,
    sm_count: u32,
}

impl Sm90Mla {
    /// Loads the row of a variant for a problem: [`MlaVariant::Sm90`], [`MlaVariant::Sm90Rows`] or
    /// [`MlaVariant::Sm90Gather`].
    ///
    /// # Errors
    /// As [`Loader::find`], but for [`Error::Unsupported`].
    pub fn load(
        variant: MlaVariant,
        loader: &Loader,
        context: &Context,
        desc: &AttentionDesc,
    ) -> Result<OrLacks<Self>> {
        let page_size = desc.kv.page_size();
        if variant == MlaVariant::Sm90 && !page_size.is_multiple_of(GROUP) {
            return Ok(Err(Feature::PageSize.into()));
        }
        let query = query(context, desc);
        let mut rows = candidates(query)
            .filter(|row| row.variant == variant)
            .peekable();
        let Some(&first) = rows.peek() else {
            return Ok(Err(Feature::TypesAndDims.into()));
        };
        let (row, function) = match loader.find(rows, || unsupported(&query)) {
            Ok(found) => found,
            Err(Error::Unsupported(_)) => return Ok(Err(Feature::Code.into())),
            Err(error) => return Err(error),
        };
        let side_by_side = SideBySide {
            num_heads: desc.num_qo_heads,
            tile: first.shape.q_tile,
            most_rows: ROWS_SIDE_BY_SIDE,
        };
        Ok(Ok(Sm90Mla {
            row,
            function,
            dims: MlaDims::of(desc),
            side_by_side,
            q_tile: tokens_of_item(side_by_side, desc.max_qo_len),
            page_size,
            sm_count: context.device().sm_count,
        }))
    }

    fn has_maps(&self) -> bool {
        self.row.variant == MlaVariant::Sm90
    }

    /// Groups of tokens in a box: two where pages allow it, and latent and rotary rows come together.
    fn box_log2(&self, whole_records: bool) -> u32 {
        u32::from(whole_records && self.page_size.is_multiple_of(2 * GROUP))
    }

    /// A box is `[page][8-token group][swizzle atom][token][column]`.
    fn map(
        &self,
        current: &Current<'_>,
        cache: &Tensor,
        columns: u32,
        box_log2: u32,
    ) -> Result<TensorMap> {
        let (atoms, token) = (columns / ATOM, cache.stride(1));
        Map::new(cache)
            .dimension(ATOM, ATOM, 1)
            .dimension(GROUP, GROUP, token)
            .dimension(atoms, atoms, i64::from(ATOM))
            .dimension(
                self.page_size / GROUP,
                1 << box_log2,
                i64::from(GROUP) * token,
            )
            .dimension(cache.extent(0) as u32, 1, cache.stride(0))
            .encode(current.driver(), Swizzle::Span128)
    }

    /// Row tiles of the largest item, 0 where the plan says it, and CTAs.
    fn row_tiles_and_ctas(&self, run: &Run<'_>) -> (u32, u32) {
        let row_tiles = self.dims.row_tiles(run.q_tile, self.row.shape.q_tile);
        let of_items = |items: u32| row_tiles.saturating_mul(items);
        let at_a_time = (self.sm_count / row_tiles).max(1);
        match run.q_tile_is_exact {
            true => (row_tiles, of_items(run.num_items.min(at_a_time))),
            false => (0, of_items(run.num_items).min(self.sm_count.max(row_tiles))),
        }
    }
}

/// The tokens of a request that has few rows, or as many as fill a tile.
fn tokens_of_item(kernel: SideBySide, tokens: u32) -> u32 {
    match tokens.saturating_mul(kernel.num_heads) <= ROWS_OF_ANY_BATCH {
        true => tokens,
        false => kernel.rows_of_tile(),
    }
}

impl AttentionKernel for Sm90Mla {
    fn name(&self) -> &str {
        &self.row.row.name
    }

    fn tiling(&self) -> Tiling {
        let of_single_workers = Tiling {
            q_tile: 1,
            q_parts: 1,
            kv_unit: self.row.shape.kv_tile,
            unit_bytes: u32::MAX,
            max_splits: self.sm_count,
            max_shares: self.sm_count,
            tail: TailCosts::NO_TAIL,
            takes_shares: true,
            least_gain: LEAST_GAIN,
            rows_of_unit: HEADS_OF_UNIT.div_ceil(self.side_by_side.num_heads),
            invariant_chunk: INVARIANT_CHUNK - INVARIANT_CHUNK % self.row.shape.kv_tile,
            combine_units: COMBINE_UNITS,
            own_key_bytes: 0,
            workers: Workers {
                all: self.sm_count,
                of_item: 1,
                small: SmallItems::NONE,
            },
        };
        self.side_by_side.of_items(of_single_workers, self.q_tile)
    }

    fn side_by_side(&self) -> Option<SideBySide> {
        Some(self.side_by_side)
    }

    fn missing(&self, run: &Run<'_>) -> Features {
        let args = run.args;
        let rows_suit = |tensor: &Tensor| row_alignment(tensor) >= 16;
        let queries = [Some(&args.q), args.q_rope.as_ref()];
        let caches = [Some(&args.k), args.k_rope.as_ref()];
        let by_maps = self.has_maps();
        let cache_suits =
            |cache: &Tensor| rows_suit(cache) && (!by_maps || rows_are_distinct(cache));
        let is_empty = by_maps && caches.iter().flatten().any(|cache| cache.is_empty());
        Features::default()
            .and(
                Feature::QStrides,
                !queries.into_iter().flatten().all(rows_suit),
            )
            .and(Feature::OStrides, !rows_suit(&args.o))
            .and(Feature::EmptyKv, is_empty)
            .and(
                Feature::KvStrides,
                !is_empty && !caches.into_iter().flatten().all(cache_suits),
            )
            .and(
                Feature::LogitsScale,
                args.logits_scale() < f32::MIN_POSITIVE,
            )
    }

    fn launch(&self, current: &Current<'_>, run: &Run<'_>, stream: Stream) -> Result<()> {
        let latent = &run.args.k;
        let rope = run.args.k_rope.as_ref().unwrap_or(latent);
        let whole_records = is_one_record(run);
        let box_log2 = self.box_log2(whole_records);
        let (latent_dim, rope_dim) = (latent.extent(3) as u32, rope.extent(3) as u32);
        let columns = if whole_records {
            latent_dim + rope_dim
        } else {
            latent_dim
        };
        let (row_tiles, ctas) = self.row_tiles_and_ctas(run);
        let params = MlaHopperParams {
            mla: self.dims.params(run, row_tiles),
            box_log2,
            whole_records: u32::from(whole_records),
        };
        let launch = Launch {
            grid: [ctas, 1, 1],
            threads: self.row.shape.threads,
            cluster: 1,
            dependent: true,
            stream,
        };
        if !self.has_maps() {
            // SAFETY: the kernel takes a `FolioMlaHopperParams`; its addresses are the caller's tensors, which were
            // checked against the plan, and the workspace, whose list has room for `num_items` items.
            return unsafe { launch.enqueue(current, &self.function, &params, &[]) };
        }
        let maps = [
            self.map(current, latent, columns, box_log2)?,
            self.map(current, rope, rope_dim, box_log2)?,
        ];
        // SAFETY: as above, and two maps.
        unsafe { launch.enqueue(current, &self.function, &params, &maps) }
    }
}
