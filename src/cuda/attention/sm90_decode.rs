//! The Hopper decode kernels, `kernels/sm90/decode/decode.cu`: what they take, and the tensor maps that
//! one of the two reads keys and values by. Where a map cannot describe a cache, the other one gathers keys
//! row by row.
#![allow(unsafe_code)]

use super::features::{Feature, Features};
use super::kernel::{AttentionKernel, COMBINE_UNITS, OrLacks, Run, find, query};
use super::sm90::{GROUP, Map, evict_first_bytes, rows_are_distinct};
use crate::backend::Stream;
use crate::cuda::compiler::loader::Loader;
use crate::cuda::driver::{Context, Current, Function, Launch, Swizzle, TensorMap};
use crate::cuda::kernels::attention::{AttentionRow, KeySource, Variant};
use crate::cuda::params::{DecodeParams, dtype_code, row_alignment};
use crate::error::Result;
use crate::problem::{AttentionDesc, Kind, KvLayout, KvStorage, Mask, Tiling, Workers};
use crate::tensor::Tensor;

/// Blocks in z direction that a launch can have.
const MOST_ITEMS: u32 = 65_535;

/// One of the two kernels for one problem.
#[derive(Debug)]
pub struct Sm90Decode {
    desc: AttentionDesc,
    page_size: u32,
    layout: KvLayout,
    row: &'static AttentionRow,
    function: Function,
    keys: KeySource,
    /// KV heads of a block.
    heads: u32,
    sm_count: u32,
    /// Bytes of keys and values up to which they are loaded with the evict-first policy.
    evict_first_bytes: u64,
}

impl Sm90Decode {
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
        // Positions and their distances stay far from the ends of i32.
        const MOST_KEYS: u32 = 1 << 30;
        let KvStorage::Paged { page_size, layout } = desc.kv else {
            return Ok(Err(Feature::RaggedKv.into()));
        };
        let page_fits = keys == KeySource::Gather || page_size.is_multiple_of(GROUP);
        let is_long = desc.max_kv_len.max(desc.max_qo_len) > MOST_KEYS;
        let lacks = Features::default()
            .and(Feature::PageSize, !page_fits)
            .and(Feature::Lengths, is_long);
        if !lacks.is_empty() {
            return Ok(Err(lacks));
        }
        let rows = desc.group_size().saturating_mul(desc.max_qo_len);
        let wanted = |row: &AttentionRow| {
            heads(row, keys).is_some_and(|heads| desc.num_kv_heads.is_multiple_of(heads))
                && row.shape.q_tile >= rows
        };
        let found = find(loader, query(context, desc), wanted)?;
        Ok(found.map(|(row, function)| Sm90Decode {
            desc: *desc,
            page_size,
            layout,
            heads: heads(row, keys).unwrap_or(1),
            row,
            function,
            keys,
            sm_count: context.device().sm_count,
            evict_first_bytes: evict_first_bytes(context.device().l2_bytes),
        }))
    }

    /// Tokens of a box: as many as a page and a tile have in common.
    fn box_tokens(&self) -> u32 {
        1 << (self.page_size | self.row.shape.kv_tile).trailing_zeros()
    }

    /// How far the coordinate that counts pages moves from page to page; `None` where pages are not a
    /// whole number of its units apart, or a map could not describe the cache at all.
    ///
    /// NHD caches are `[8-token group][head]`, where the groups of a page follow one another; HND caches
    /// `[page and head][8-token group]`.
    fn page_step(&self, cache: &Tensor) -> Option<u32> {
        if !rows_are_distinct(cache) {
            return None;
        }
        let in_page = match self.layout {
            KvLayout::Nhd => self.page_size / GROUP,
            KvLayout::Hnd => self.desc.num_kv_heads,
        };
        let unit = match self.layout {
            KvLayout::Nhd => i64::from(GROUP) * cache.stride(1),
            KvLayout::Hnd => cache.stride(2),
        };
        let step = match cache.extent(0) {
            0 | 1 => i64::from(in_page),
            _ if unit > 0 && cache.stride(0) % unit == 0 => cache.stride(0) / unit,
            _ => return None,
        };
        let end = cache.extent(0).checked_mul(step)?;
        (step >= i64::from(in_page) && end <= i64::from(i32::MAX)).then_some(step as u32)
    }

    /// A box is `[head][8-token group][swizzle atom][token][byte]`, for the heads of a block.
    fn map(&self, current: &Current<'_>, cache: &Tensor, page_step: u32) -> Result<TensorMap> {
        let size = cache.dtype().size() as u32;
        let row_bytes = cache.extent(3) as u32 * size;
        let (atom_bytes, swizzle) = match row_bytes % 128 {
            0 => (128, Swizzle::Span128),
            _ => (64, Swizzle::Span64),
        };
        let (atom, atoms) = (atom_bytes / size, row_bytes / atom_bytes);
        // `page_step` counts these, and all of them together are within i32.
        let pages = (cache.extent(0) as u32 - 1) * page_step;
        let (groups, kv_heads) = (self.page_size / GROUP, self.desc.num_kv_heads);
        let (groups, kv_heads) = match self.layout {
            KvLayout::Nhd => (pages + groups, kv_heads),
            KvLayout::Hnd => (groups, pages + kv_heads),
        };
        let token = cache.stride(1);
        Map::new(cache)
            .dimension(atom, atom, 1)
            .dimension(GROUP, GROUP, token)
            .dimension(atoms, atoms, i64::from(atom))
            .dimension(groups, self.box_tokens() / GROUP, i64::from(GROUP) * token)
            .dimension(kv_heads, self.heads, cache.stride(2))
            .encode(current.driver(), swizzle)
    }

    fn grid(&self, run: &Run<'_>) -> [u32; 3] {
        let heads = self.desc.num_kv_heads / self.heads;
        let row_tiles = (run.q_tile * self.desc.group_size()).div_ceil(self.row.shape.q_tile);
        // Blocks take items in turn. A graph is launched for the largest batch, and blocks without an
        // item cost a little too: as many as run at a time, and as many again for balance.
        let most = match self.desc.graph {
            true => (4 * self.sm_count).div_ceil(heads * row_tiles),
            false => MOST_ITEMS,
        };
        [heads, row_tiles, run.num_items.min(most).min(MOST_ITEMS)]
    }

    /// Whether keys and values are loaded with the evict-first policy. Where they are few they then leave
    /// other data in L2. A longer stream is slower with it (on an H200 whose L2 is full of unwritten data:
    /// 18.8 against 20.4 µs at 34 MB, 141 against 135 µs at 537 MB).
    fn evict_first(&self, run: &Run<'_>) -> bool {
        let bytes_per_key = u64::from(self.desc.num_kv_heads) * self.desc.kv_bytes();
        run.num_keys.saturating_mul(bytes_per_key) <= self.evict_first_bytes
    }

    /// How the maps of k and v count pages; `None` for the kernel that needs no maps.
    fn page_steps(&self, run: &Run<'_>) -> Option<[u32; 2]> {
        match self.keys {
            KeySource::Tma => Some([self.page_step(&run.args.k)?, self.page_step(&run.args.v)?]),
            KeySource::Gather => None,
        }
    }
}

impl AttentionKernel for Sm90Decode {
    fn name(&self) -> &str {
        &self.row.row.name
    }

    fn tiling(&self) -> Tiling {
        Tiling {
            q_tile: self.desc.max_qo_len,
            kv_unit: 64,
            // Two blocks, of one KV head each, run on a multiprocessor.
            max_splits: (2 * self.sm_count / self.desc.num_kv_heads).max(1),
            invariant_chunk: match self.desc.kind {
                Kind::Decode | Kind::Mla => 2048,
                // As in the generic kernel: splits of prefill would need memory for the largest batch.
                Kind::Prefill => u32::MAX,
            },
            combine_units: COMBINE_UNITS,
            workers: Workers {
                all: 2 * self.sm_count,
                of_item: self.desc.num_kv_heads,
            },
        }
    }

    fn missing(&self, run: &Run<'_>) -> Features {
        let args = run.args;
        let of_four = (4 * args.o.dtype().size() as u32).min(16);
        let caches = [&args.k, &args.v];
        let custom = matches!(args.mask, Mask::Bytes(_) | Mask::Bits(_));
        let by_request = matches!(args.mask, Mask::CausalByRequest(_));
        let is_empty = caches.iter().any(|cache| cache.is_empty());
        let aligned = caches.iter().all(|cache| row_alignment(cache) >= 16);
        let mapped = is_empty || self.keys == KeySource::Gather || self.page_steps(run).is_some();
        Features::default()
            .and(Feature::CustomMask, custom)
            .and(Feature::CausalByRequest, by_request)
            .and(Feature::MmPrefix, args.mm_prefix_ranges.is_some())
            .and(
                Feature::QStrides,
                row_alignment(&args.q) < 4 * args.q.dtype().size() as u32,
            )
            .and(Feature::OStrides, row_alignment(&args.o) < of_four)
            .and(Feature::EmptyKv, is_empty)
            .and(Feature::KvStrides, !aligned)
            .and(Feature::PageSteps, !mapped)
            .and(Feature::SplitKeys, args.k_rope.is_some())
    }

    fn launch(&self, current: &Current<'_>, run: &Run<'_>, stream: Stream) -> Result<()> {
        let steps = self.page_steps(run);
        let [k_page_step, v_page_step] = steps.unwrap_or_default();
        let boxes = match steps {
            Some(_) => self.row.shape.kv_tile / self.box_tokens(),
            None => 1,
        };
        let params = DecodeParams {
            attention: *run.params,
            group_size: self.desc.group_size(),
            o_dtype: dtype_code(self.desc.o_dtype),
            kv_evict_first: u32::from(self.evict_first(run)),
            boxes_log2: boxes.ilog2(),
            k_page_step,
            v_page_step,
            pages_by_head: u32::from(self.layout == KvLayout::Hnd),
            reserved: 0,
        };
        let launch = Launch {
            grid: self.grid(run),
            threads: self.row.shape.threads,
            cluster: 1,
            dependent: true,
            stream,
        };
        if steps.is_none() {
            // SAFETY: the kernel takes a `FolioDecodeParams`; its addresses are the caller's tensors,
            // which were checked against the plan, and the workspace, whose list of items and places has
            // room for the grid.
            return unsafe { launch.enqueue(current, &self.function, &params, &[]) };
        }
        let maps = [
            self.map(current, &run.args.k, k_page_step)?,
            self.map(current, &run.args.v, v_page_step)?,
        ];
        // SAFETY: as above, and two tensor maps.
        unsafe { launch.enqueue(current, &self.function, &params, &maps) }
    }
}

/// KV heads of a block of the row, where it brings keys in this way.
fn heads(row: &AttentionRow, wanted: KeySource) -> Option<u32> {
    match row.variant {
        Variant::Sm90Decode { keys, heads } if keys == wanted => Some(heads),
        _ => None,
    }
}
