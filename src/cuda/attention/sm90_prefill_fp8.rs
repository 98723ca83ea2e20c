//! The Hopper prefill kernel in e4m3, `kernels/sm90/prefill_fp8/prefill_fp8.cu`: what it takes, the tensor maps that it
//! reads Q, K and V by, and where rows of K and V are that no map describes. It is for handles that permit probabilities
//! in e4m3, and for no others.
#![allow(unsafe_code)]

use super::features::{Feature, Features};
use super::kernel::{AttentionKernel, OrLacks, Run, find, query};
use super::sm90::{GROUP, Map};
use super::sm90_prefill::other_masks;
use super::sm90_prefill_maps::{num_groups, rows_suit};
use super::sm90_prefill_tiling::{tiling, unit_bytes};
use crate::backend::Stream;
use crate::cuda::compiler::loader::Loader;
use crate::cuda::driver::{Context, Current, Function, Launch, Swizzle, TensorMap};
use crate::cuda::kernels::attention::{AttentionRow, KeySource, Variant};
use crate::cuda::params::{Divisor, dtype_code, row_alignment};
use crate::cuda::prefill_fp8_params::{Pieces, PrefillFp8Params};
use crate::cuda::prefill_params::WARPGROUP_ROWS;
use crate::dtype::DType;
use crate::error::Result;
use crate::problem::{AttentionDesc, KvStorage, Tiling};
use crate::tensor::Tensor;

/// Columns of a swizzle atom at most, 128 bytes. Wider rows come in several boxes.
const MOST_COLUMNS: u32 = 128;
/// Bytes of a row that are copied together, where rows are copied one by one. Rows in tensor maps are multiples of it, too.
const PIECE: u32 = 16;
/// Query heads that share a tile at most; also in the kernel.
const MOST_PACKED_HEADS: u32 = 16;

/// The kernel for one problem.
#[derive(Debug)]
pub struct Sm90PrefillFp8 {
    keys: KeySource,
    row: &'static AttentionRow,
    function: Function,
    sm_count: u32,
    unit_bytes: u32,
    packed_heads: u32,
    head_blocks: u32,
    page_size: u32,
    o_dtype: DType,
}

impl Sm90PrefillFp8 {
    /// Whether the problem's types are the kernel's, keys and values are as wide, rows are whole pieces, and the caller permits
    /// what the kernel rounds.
    pub fn is_for(desc: &AttentionDesc) -> bool {
        let types = [desc.q_dtype, desc.kv_format.element];
        let dims_suit =
            desc.head_dim_qk == desc.head_dim_vo && desc.head_dim_qk.is_multiple_of(PIECE);
        desc.fp8_products && types == [DType::F8E4M3; 2] && dims_suit
    }

    /// Tiles of a decode for each KV head, which read its keys once each, where the kernel is for the problem.
    pub fn tiles_of_decode(desc: &AttentionDesc) -> Option<u32> {
        let group = desc.group_size();
        Self::is_for(desc).then(|| group / packed_heads(group))
    }

    /// Loads the row for a problem.
    ///
    /// # Errors
    /// As [`find`].
    pub fn load(
        keys: KeySource,
        loader: &Loader,
        context: &Context,
        desc: &AttentionDesc,
    ) -> Result<OrLacks<Self>> {
        // A position plus or minus an unlimited window, 2^30 in the kernel, stays within i32.
        const MOST_KEYS: u32 = 1 << 29;
        let page_size = desc.kv.page_size();
        let by_maps = keys == KeySource::Tma;
        let is_ragged = desc.kv == KvStorage::Ragged;
        let lacks = Features::default()
            .and(Feature::RaggedKv, by_maps && is_ragged)
            .and(
                Feature::PageSize,
                by_maps && !is_ragged && !page_size.is_multiple_of(GROUP),
            )
            .and(
                Feature::Lengths,
                desc.max_kv_len.max(desc.max_qo_len) > MOST_KEYS,
            );
        if !lacks.is_empty() {
            return Ok(Err(lacks));
        }
        let wanted = |row: &AttentionRow| row.variant == Variant::Sm90PrefillFp8 { keys };
        let packed_heads = packed_heads(desc.group_size());
        let found = find(loader, query(context, desc), wanted)?;
        Ok(found.map(|(row, function)| Sm90PrefillFp8 {
            keys,
            row,
            function,
            sm_count: context.device().sm_count,
            unit_bytes: unit_bytes(context.device()),
            packed_heads,
            head_blocks: desc.num_qo_heads / packed_heads,
            page_size,
            o_dtype: desc.o_dtype,
        }))
    }

    /// Columns of a box.
    fn box_columns(&self) -> u32 {
        self.row.shape.head_dim_qk.min(MOST_COLUMNS)
    }

    /// A box's rows in shared memory are as wide as it.
    fn swizzle(&self) -> Swizzle {
        match self.box_columns() {
            MOST_COLUMNS => Swizzle::Span128,
            _ => Swizzle::Span64,
        }
    }

    /// Keys that a warp loads and transposes at a time; also in the kernel.
    fn transposer_keys(&self) -> u32 {
        4096 / self.row.shape.head_dim_vo
    }

    /// A box is the rows of a warpgroup: `[1][position][packed head][column]`.
    fn query_map(&self, q: &Tensor) -> Map {
        Map::new(q)
            .dimension(q.extent(2) as u32, self.box_columns(), 1)
            .dimension(q.extent(1) as u32, self.packed_heads, q.stride(1))
            .dimension(
                q.extent(0) as u32,
                WARPGROUP_ROWS / self.packed_heads,
                q.stride(0),
            )
            .dimension(1, 1, 0)
    }

    /// `[8-token group][head][1][token][column]`, where the groups of a page follow one another and pages are a
    /// whole number of groups apart; a box is as many groups as a page and the keys of a
    /// transposing warp have in common.
    fn cache_map(&self, cache: &Tensor) -> Map {
        let box_tokens = 1 << (self.page_size | self.transposer_keys()).trailing_zeros();
        let token = cache.stride(1);
        Map::new(cache)
            .dimension(cache.extent(3) as u32, self.box_columns(), 1)
            .dimension(GROUP, GROUP, token)
            .dimension(1, 1, 0)
            .dimension(cache.extent(2) as u32, 1, cache.stride(2))
            .dimension(
                num_groups(cache, self.page_size) as u32,
                box_tokens / GROUP,
                i64::from(GROUP) * token,
            )
    }

    /// Why the map cannot describe the cache, or its rows cannot be copied.
    fn missing_of_cache(&self, cache: &Tensor) -> Features {
        if self.keys == KeySource::Gather {
            return Features::default().and(Feature::KvStrides, pieces(cache).is_none());
        }
        if cache.is_empty() {
            return Feature::EmptyKv.into();
        }
        if !rows_suit(cache) {
            return Feature::KvStrides.into();
        }
        let group = i64::from(GROUP) * cache.stride(1);
        let in_groups = cache.extent(0) <= 1 || cache.stride(0) % group == 0;
        let within = num_groups(cache, self.page_size) <= i64::from(i32::MAX);
        Features::default().and(Feature::PageSteps, !(in_groups && within))
    }
}

/// Heads of a group that share a tile: the largest power of two that divides the group.
fn packed_heads(group_size: u32) -> u32 {
    1 << (group_size | MOST_PACKED_HEADS).trailing_zeros()
}

/// 8-token groups from page to page; 0 of a single page, of which any number does.
fn page_groups(cache: &Tensor) -> u32 {
    match (cache.extent(0), i64::from(GROUP) * cache.stride(1)) {
        (0 | 1, _) | (_, 0) => 0,
        (_, group) => (cache.stride(0) / group) as u32,
    }
}

/// The strides of a cache in pieces; `None` where rows begin within one, or one lies too far away for 32 bits, or before
/// the first row.
fn pieces(cache: &Tensor) -> Option<Pieces> {
    if !cache.is_empty() && row_alignment(cache) < PIECE {
        return None;
    }
    let step = |axis: usize| -> Option<u32> {
        match cache.extent(axis) {
            0 | 1 => Some(0),
            _ => u32::try_from(cache.stride(axis) / i64::from(PIECE)).ok(),
        }
    };
    let (page, token, head) = (step(0)?, step(1)?, step(2)?);
    let last = |axis: usize, step: u32| (cache.extent(axis).max(1) - 1) as u64 * u64::from(step);
    let reach = last(0, page) + last(1, token) + last(2, head);
    let row_pieces = cache.extent(3) as u64 / u64::from(PIECE);
    (reach + row_pieces < u64::from(u32::MAX)).then_some(Pieces {
        page,
        token,
        head,
        head_dim: cache.extent(3) as u32,
    })
}

/// Pages of k and v are equally far apart in groups: the kernel counts them once.
fn pages_agree(k: &Tensor, v: &Tensor) -> bool {
    let steps = [page_groups(k), page_groups(v)];
    steps[0] == steps[1] || steps.contains(&0)
}

impl AttentionKernel for Sm90PrefillFp8 {
    fn name(&self) -> &str {
        &self.row.row.name
    }

    fn tiling(&self) -> Tiling {
        tiling(
            self.row,
            WARPGROUP_ROWS / self.packed_heads,
            (self.sm_count, self.unit_bytes),
            self.head_blocks,
        )
    }

    fn missing(&self, run: &Run<'_>) -> Features {
        let args = run.args;
        let of_four = (4 * args.o.dtype().size() as u32).min(16);
        other_masks(args)
            .and(Feature::Alibi, args.alibi_slopes.is_some())
            .and(Feature::SplitKeys, args.k_rope.is_some())
            .and(Feature::QStrides, !rows_suit(&args.q))
            .and(Feature::OStrides, row_alignment(&args.o) < of_four)
            .and(Feature::Rows, args.q.extent(0) > i64::from(i32::MAX))
            .and(
                Feature::PageSteps,
                self.keys == KeySource::Tma && !pages_agree(&args.k, &args.v),
            )
            | self.missing_of_cache(&args.k)
            | self.missing_of_cache(&args.v)
    }

    fn launch(&self, current: &Current<'_>, run: &Run<'_>, stream: Stream) -> Result<()> {
        let args = run.args;
        let swizzle = self.swizzle();
        let encode = |map: Map| -> Result<TensorMap> { map.encode(current.driver(), swizzle) };
        let q = encode(self.query_map(&args.q))?;
        let mut params = PrefillFp8Params {
            attention: *run.params,
            o_dtype: dtype_code(self.o_dtype),
            page_groups: 0,
            head_dim_vo: args.o.extent(2) as u32,
            k: Pieces::default(),
            v: Pieces::default(),
            page_size: Divisor::new(self.page_size),
        };
        let (maps, num_maps) = match self.keys {
            KeySource::Tma => {
                params.page_groups = page_groups(&args.k).max(page_groups(&args.v));
                let [k, v] = [&args.k, &args.v].map(|cache| encode(self.cache_map(cache)));
                ([q, k?, v?], 3)
            }
            KeySource::Gather => {
                params.k = pieces(&args.k).unwrap_or_default();
                params.v = pieces(&args.v).unwrap_or_default();
                ([q; 3], 1)
            }
        };
        let tiles = u64::from(run.num_items) * u64::from(self.head_blocks);
        let launch = Launch {
            grid: [tiles.min(u64::from(self.sm_count)) as u32, 1, 1],
            threads: self.row.shape.threads,
            cluster: 1,
            dependent: false,
            stream,
        };
        // SAFETY: the kernel takes a `FolioPrefillFp8Params` and these maps; their addresses are the caller's tensors,
        // which were checked against the plan, and the workspace. The plan's list has room for `num_items` items.
        unsafe { launch.enqueue(current, &self.function, &params, &maps[..num_maps]) }
    }
}
