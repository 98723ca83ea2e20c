//! The Hopper decode kernel, `kernels/sm90/decode/decode.cu`: what it takes, and the tensor maps that it reads
//! keys and values by. Where a map cannot describe a cache, keys are gathered instead.
#![allow(unsafe_code)]

use super::kernel::{AttentionKernel, Run, find, query};
use crate::backend::Stream;
use crate::cuda::compiler::loader::Loader;
use crate::cuda::driver::{
    Context, Current, Function, L2Promotion, Launch, Swizzle, TensorMap, Tiled,
};
use crate::cuda::kernels::attention::{AttentionRow, KeySource, Variant};
use crate::cuda::params::{DecodeParams, dtype_code, row_alignment};
use crate::error::{Error, Result};
use crate::problem::{AttentionDesc, Kind, KvLayout, KvStorage, Mask, Tiling};
use crate::tensor::Tensor;

/// Tokens of a group, the rows of a swizzle atom.
const GROUP: u32 = 8;
/// Blocks in z direction that a launch can have.
const MOST_ITEMS: u32 = 65_535;

/// The kernels for one problem.
#[derive(Debug)]
pub struct Sm90Decode {
    desc: AttentionDesc,
    page_size: u32,
    layout: KvLayout,
    tma: (&'static AttentionRow, Function),
    gather: (&'static AttentionRow, Function),
    heads: u32,
    sm_count: u32,
}

impl Sm90Decode {
    /// Loads the rows for a problem; `None` where there are none.
    ///
    /// # Errors
    /// As [`Loader::find`], but for [`Error::Unsupported`].
    pub fn load(loader: &Loader, context: &Context, desc: &AttentionDesc) -> Result<Option<Self>> {
        // Positions and their distances stay far from the ends of i32.
        const MOST_KEYS: u32 = 1 << 30;
        let KvStorage::Paged { page_size, layout } = desc.kv else {
            return Ok(None);
        };
        let rows = desc.group_size().saturating_mul(desc.max_qo_len);
        if desc.max_kv_len.max(desc.max_qo_len) > MOST_KEYS {
            return Ok(None);
        }
        let query = query(context, desc);
        let find = |wanted: KeySource| {
            find(loader, query, |row| {
                matches!(row.variant, Variant::Sm90Decode { keys, heads }
                    if keys == wanted && desc.num_kv_heads.is_multiple_of(heads))
                    && row.shape.q_tile >= rows
            })
        };
        let tma = match find(KeySource::Tma) {
            Err(Error::Unsupported(_)) => return Ok(None),
            found => found?,
        };
        Ok(Some(Sm90Decode {
            desc: *desc,
            page_size,
            layout,
            heads: heads(tma.0),
            tma,
            gather: find(KeySource::Gather)?,
            sm_count: context.device().sm_count,
        }))
    }

    /// Tokens of a box: as many as a page and a tile have in common.
    fn box_tokens(&self) -> u32 {
        1 << (self.page_size | self.tma.0.shape.kv_tile).trailing_zeros()
    }

    /// How far the coordinate that counts pages moves from page to page; `None` where pages are not a
    /// whole number of its units apart, or a map could not describe the cache at all.
    ///
    /// NHD caches are `[8-token group][head]`, where the groups of a page follow one another; HND caches
    /// `[page and head][8-token group]`.
    fn page_step(&self, cache: &Tensor) -> Option<u32> {
        let distinct = |(&extent, &stride): (&i64, &i64)| extent <= 1 || stride > 0;
        if !self.page_size.is_multiple_of(GROUP)
            || !cache.shape().iter().zip(cache.strides()).all(distinct)
        {
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
        let (atom, swizzle) = match row_bytes % 128 {
            0 => (128, Swizzle::Span128),
            _ => (64, Swizzle::Span64),
        };
        let pages = (cache.extent(0) as u64 - 1) * u64::from(page_step);
        let groups = u64::from(self.page_size / GROUP);
        let kv_heads = u64::from(self.desc.num_kv_heads);
        let (groups, kv_heads) = match self.layout {
            KvLayout::Nhd => (pages + groups, kv_heads),
            KvLayout::Hnd => (groups, pages + kv_heads),
        };
        let atoms = row_bytes / atom;
        let extents = [
            u64::from(atom / size),
            u64::from(GROUP),
            u64::from(atoms),
            groups,
            kv_heads,
        ];
        let token = cache.stride(1) as u64 * u64::from(size);
        let head = cache.stride(2) as u64 * u64::from(size);
        let mut strides = [token, u64::from(atom), u64::from(GROUP) * token, head];
        for (stride, extent) in strides.iter_mut().zip(&extents[1..]) {
            // Where there is one index the stride does not matter, and may be anything.
            if *extent == 1 {
                *stride = 16;
            }
        }
        let tiled = Tiled {
            dtype: cache.dtype(),
            address: cache.address() as u64,
            extents: &extents,
            strides: &strides,
            box_extents: &[
                atom / size,
                GROUP,
                atoms,
                self.box_tokens() / GROUP,
                self.heads,
            ],
            element_strides: &[1; 5],
            swizzle,
            l2_promotion: L2Promotion::Bytes128,
        };
        TensorMap::encode(current.driver(), &tiled)
    }

    fn grid(&self, run: &Run<'_>) -> [u32; 3] {
        let heads = self.desc.num_kv_heads / self.heads;
        let row_tiles = (run.q_tile * self.desc.group_size()).div_ceil(self.tma.0.shape.q_tile);
        // Blocks take items in turn. A graph is launched for the largest batch, and blocks without an
        // item cost a little too: as many as run at a time, and as many again for balance.
        let most = match self.desc.graph {
            true => (4 * self.sm_count).div_ceil(heads * row_tiles),
            false => MOST_ITEMS,
        };
        [heads, row_tiles, run.num_items.min(most).min(MOST_ITEMS)]
    }

    /// Keys that fit in L2 beside what is there already displace nothing when they are marked to go
    /// first; a longer stream is slower for it (on an H200: 18.8 against 20.4 µs at 34 MB, 141 against
    /// 135 µs at 537 MB, with an L2 full of unwritten data).
    fn evict_first(&self, run: &Run<'_>) -> bool {
        const MOST_BYTES: u64 = 96 << 20;
        let dims = u64::from(self.desc.head_dim_qk + self.desc.head_dim_vo);
        let bytes_per_key =
            u64::from(self.desc.num_kv_heads) * dims * self.desc.kv_dtype.size() as u64;
        run.num_keys.saturating_mul(bytes_per_key) <= MOST_BYTES
    }
}

impl AttentionKernel for Sm90Decode {
    fn name(&self) -> &str {
        match self.page_size.is_multiple_of(GROUP) {
            true => &self.tma.0.row.name,
            false => &self.gather.0.row.name,
        }
    }

    fn tiling(&self) -> Tiling {
        Tiling {
            q_tile: self.desc.max_qo_len,
            kv_unit: 64,
            // Two blocks, of one KV head each, run on a multiprocessor.
            max_splits: (2 * self.sm_count / self.desc.num_kv_heads).max(1),
            invariant_chunk: match self.desc.kind {
                Kind::Decode => 2048,
                // As in the generic kernel: splits of prefill would need memory for the largest batch.
                Kind::Prefill => u32::MAX,
            },
        }
    }

    fn supports(&self, run: &Run<'_>) -> bool {
        let args = run.args;
        let of_four = (4 * args.o.dtype().size() as u32).min(16);
        matches!(args.mask, Mask::Causal | Mask::Full)
            && args.mm_prefix_ranges.is_none()
            && row_alignment(&args.q) >= 8
            && row_alignment(&args.o) >= of_four
            && [&args.k, &args.v]
                .iter()
                .all(|cache| !cache.is_empty() && row_alignment(cache) >= 16)
    }

    fn launch(&self, current: &Current<'_>, run: &Run<'_>, stream: Stream) -> Result<()> {
        let steps = self.page_step(&run.args.k).zip(self.page_step(&run.args.v));
        let (k_page_step, v_page_step) = steps.unwrap_or_default();
        let boxes = match steps {
            Some(_) => self.tma.0.shape.kv_tile / self.box_tokens(),
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
            threads: self.tma.0.shape.threads,
            cluster: 1,
            dependent: true,
            stream,
        };
        if steps.is_none() {
            // SAFETY: the kernel takes a `FolioDecodeParams`; its addresses are the caller's tensors,
            // which were checked against the plan, and the workspace, whose list of items and places has
            // room for the grid.
            return unsafe { launch.enqueue(current, &self.gather.1, &params, &[]) };
        }
        let maps = [
            self.map(current, &run.args.k, k_page_step)?,
            self.map(current, &run.args.v, v_page_step)?,
        ];
        // SAFETY: as above, and two tensor maps.
        unsafe { launch.enqueue(current, &self.tma.1, &params, &maps) }
    }
}

/// KV heads of a block.
fn heads(row: &AttentionRow) -> u32 {
    match row.variant {
        Variant::Sm90Decode { heads, .. } => heads,
        _ => 1,
    }
}
