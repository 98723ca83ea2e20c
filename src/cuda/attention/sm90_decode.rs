//! The Hopper decode kernels, `kernels/sm90/decode/decode.cu`: what they take, and the tensor maps that
//! one of the two reads keys and values by. Where a map cannot describe a cache, the other one gathers keys
//! row by row.
#![allow(unsafe_code)]

use super::features::{Feature, Features};
use super::kernel::{
    AttentionKernel, COMBINE_UNITS, OWN_KEY_BYTES, OrLacks, Run, find, packed_rows, query,
};
use super::sm90::{GROUP, Map, evict_first_bytes, rows_are_distinct};
use crate::backend::Stream;
use crate::cuda::compiler::loader::Loader;
use crate::cuda::driver::{Context, Current, Function, Launch, Swizzle, TensorMap};
use crate::cuda::kernels::attention::{
    AttentionQuery, AttentionRow, AttentionTypes, CacheScales, KeySource, Masks, Phase, Products,
    Shape, Tokens, Variant, rows,
};
use crate::cuda::new_tokens_params::NewTokensParams;
use crate::cuda::ops::rope_append::params as rope_params;
use crate::cuda::params::{DecodeParams, dtype_code, piece_bytes, row_alignment};
use crate::cuda::rope_append_params::RopeAppendParams;
use crate::cuda::stored_params::{Stored, StoredDecodeParams};
use crate::dtype::DType;
use crate::error::Result;
use crate::problem::{
    AttentionDesc, CacheForm, CacheFormat, Kind, KvLayout, KvStorage, Mask, RopeAppendArgs,
    SmallItems, TailCosts, Tiling, Workers,
};
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
    /// The kernel of the same row that makes queries and keys of new tokens.
    with_new_tokens: Option<Function>,
    keys: KeySource,
    /// KV heads of a block.
    heads: u32,
    scales: CacheScales,
    sm_count: u32,
    /// Bytes of keys and values up to which they are loaded with the evict-first policy.
    evict_first_bytes: u64,
}

impl Sm90Decode {
    /// Packed query rows of its largest tile: keys are read once for all of them.
    const TILE_ROWS: u32 = 64;
    /// Up to so many, warps that multiply by themselves are at least as fast.
    const FEW_ROWS: u32 = 8;

    /// Whether few rows are its own. More than eight of more than 128 columns, over keys of 16 bits, are prefill's: 0.93 of the time on
    /// average (84 batches of 9 to 16 rows of 160 to 256 on an H200, 0.73 to 1.10; of 192/128 as long, and in a window longer).
    pub fn is_for(desc: &AttentionDesc) -> bool {
        packed_rows(desc) <= Self::FEW_ROWS
            || desc.head_dim_qk.max(desc.head_dim_vo) <= 128
            || desc.kv_format.element.size() < 2
    }

    /// Packed query rows that it should be given: of a tile, or of two where another kernel's tiles read keys as often.
    pub fn most_rows(another_reads_keys_once: bool) -> u32 {
        match another_reads_keys_once {
            true => Self::TILE_ROWS,
            false => 2 * Self::TILE_ROWS,
        }
    }

    /// Packed query rows up to which it comes before a prefill kernel, where both convert keys. At head_dims up to 128 it converts
    /// each key once for all rows of a tile: 1.3 to 2.3 times as fast as prefill over many keys, but 0.9 over few, and two tiles 1.05 to
    /// 1.4 times as fast where prefill's read keys as often. Above that each of its warps converts for itself.
    pub fn most_converting_rows(desc: &AttentionDesc, prefill_reads_keys_once: bool) -> u32 {
        match desc.head_dim_qk.max(desc.head_dim_vo) {
            0..=128 => Self::most_rows(prefill_reads_keys_once),
            _ => 32,
        }
    }

    /// Loads the row for a problem, of those that have such masks.
    ///
    /// # Errors
    /// As [`find`].
    pub fn load(
        keys: KeySource,
        masks: Masks,
        loader: &Loader,
        context: &Context,
        desc: &AttentionDesc,
    ) -> Result<OrLacks<Self>> {
        // Positions and their distances stay far from the ends of i32.
        const MOST_KEYS: u32 = 1 << 30;
        let KvStorage::Paged { page_size, layout } = desc.kv else {
            return Ok(Err(Feature::RaggedKv.into()));
        };
        let Some(scales) = scales(desc.kv_format.form()) else {
            return Ok(Err(Feature::CacheForm.into()));
        };
        let page_fits = keys == KeySource::Gather || page_size.is_multiple_of(GROUP);
        let is_long = desc.max_kv_len.max(desc.max_qo_len) > MOST_KEYS;
        let lacks = Features::default()
            .and(Feature::PageSize, !page_fits)
            .and(Feature::Lengths, is_long);
        if !lacks.is_empty() {
            return Ok(Err(lacks));
        }
        let rows = packed_rows(desc);
        let wanted = |row: &AttentionRow| {
            heads(row, keys, scales).is_some_and(|heads| {
                desc.num_kv_heads.is_multiple_of(heads)
                    && (keys == KeySource::Gather || suit_boxes(desc, heads, row.shape))
            }) && row.shape.q_tile >= rows.min(Self::TILE_ROWS)
                && (rows > Self::FEW_ROWS || !by_warpgroup(row))
                && (masks == Masks::ByPosition || takes_masks(row))
        };
        let any = query(context, desc);
        let query = AttentionQuery {
            phase: Phase::Decode,
            types: AttentionTypes {
                kv: desc.kv_format.element,
                ..any.types
            },
            ..any
        };
        let (row, function) = match find(loader, query, wanted)? {
            Ok(found) => found,
            Err(lacks) => return Ok(Err(lacks)),
        };
        Ok(Ok(Sm90Decode {
            desc: *desc,
            page_size,
            layout,
            heads: heads(row, keys, scales).unwrap_or(1),
            scales,
            row,
            function,
            with_new_tokens: with_new_tokens(row, desc)
                .map(|row| loader.load(&row.row))
                .transpose()?,
            keys,
            sm_count: context.device().sm_count,
            evict_first_bytes: evict_first_bytes(context.device().l2_bytes),
        }))
    }

    /// Whether it takes masks that do not follow from positions.
    pub fn takes_masks(&self) -> bool {
        takes_masks(self.row)
    }

    /// Tiles of the rows of so many query tokens.
    fn row_tiles(&self, qo_len: u32) -> u32 {
        (qo_len * self.desc.group_size()).div_ceil(self.row.shape.q_tile)
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

    /// A box is `[swizzle atom][head][8-token group][token][byte]`, for the heads of a block: of all atoms of a row, or
    /// of one, which `columns` says.
    fn map(
        &self,
        current: &Current<'_>,
        cache: &Tensor,
        page_step: u32,
        columns: &Columns,
    ) -> Result<TensorMap> {
        let swizzle = match columns.atom_bytes {
            128 => Swizzle::Span128,
            64 => Swizzle::Span64,
            _ => Swizzle::Span32,
        };
        // `page_step` counts these, and all of them together are within i32.
        let pages = (cache.extent(0) as u32 - 1) * page_step;
        let (groups, kv_heads) = (self.page_size / GROUP, self.desc.num_kv_heads);
        let (groups, kv_heads) = match self.layout {
            KvLayout::Nhd => (pages + groups, kv_heads),
            KvLayout::Hnd => (groups, pages + kv_heads),
        };
        let token = cache.stride(1);
        let (row, atom) = (cache.extent(3) as u32, columns.atom());
        let (extent, atoms, atoms_of_box) = match columns.whole {
            true => (atom, row / atom, columns.atoms),
            false => (row, 1, 1),
        };
        Map::new(cache)
            .dimension(extent, atom, 1)
            .dimension(GROUP, GROUP, token)
            .dimension(groups, self.box_tokens() / GROUP, i64::from(GROUP) * token)
            .dimension(kv_heads, self.heads, cache.stride(2))
            .dimension(atoms, atoms_of_box, i64::from(atom))
            .encode(current.driver(), swizzle)
    }

    /// How the rows of a tensor are read that are `dim` elements wide in the kernel.
    fn columns(&self, cache: &Tensor, dim: u32) -> Columns {
        let element_bytes = cache.dtype().size() as u32;
        let row_bytes = self.desc.kv_format.row_bytes(dim) as u32;
        let atom_bytes = atom_bytes(row_bytes);
        let atoms = row_bytes / atom_bytes;
        // Boxes of a tile lie next to each other in every atom, and a box writes its atoms next to each other.
        let whole = self.box_tokens() == self.row.shape.kv_tile
            && (cache.extent(3) as u32 * element_bytes).is_multiple_of(atom_bytes);
        Columns {
            element_bytes,
            atom_bytes,
            atoms,
            whole,
        }
    }

    fn grid(&self, run: &Run<'_>) -> [u32; 3] {
        let heads = self.desc.num_kv_heads / self.heads;
        let row_tiles = self.row_tiles(run.q_tile);
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

    /// What every row's address in k and v is a multiple of, up to 16.
    fn row_alignment(&self, run: &Run<'_>) -> u32 {
        row_alignment(&run.args.k).min(row_alignment(&run.args.v))
    }

    /// Maps count in 16 bytes. fp8 rows of 72 elements, or 88, begin at every odd multiple of 8 where they are
    /// neighbours, and are gathered.
    fn least_alignment(&self) -> u32 {
        match self.keys {
            KeySource::Tma => 16,
            KeySource::Gather => 8,
        }
    }

    /// Whether the scales of a token and head are copied in one piece, of as many bytes as the kernel's rows have blocks.
    fn brings_scales(&self, run: &Run<'_>) -> bool {
        let shape = self.row.shape;
        let of_blocks =
            [shape.head_dim_qk, shape.head_dim_vo].map(|dim| dim / CacheFormat::NVFP4_BLOCK);
        let scales = [run.args.k_scales, run.args.v_scales];
        self.scales != CacheScales::Blocks
            || scales
                .iter()
                .zip(of_blocks)
                .all(|(scales, bytes)| scales.is_some_and(|scales| row_alignment(&scales) >= bytes))
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

    fn new_tokens(&self, run: &Run<'_>, tokens: &RopeAppendArgs) -> Option<RopeAppendParams> {
        self.with_new_tokens.as_ref()?;
        // What the operator refuses, it refuses itself.
        let rope = rope_params(tokens).ok()?;
        makes_tokens(run, tokens, &rope).then_some(rope)
    }

    fn tiling(&self) -> Tiling {
        // Two blocks run on a multiprocessor.
        let (blocks, slots) = (self.desc.num_kv_heads / self.heads, 2 * self.sm_count);
        let at_a_time = (slots / (blocks * self.row_tiles(self.desc.max_qo_len))).max(1);
        Tiling {
            q_tile: self.desc.max_qo_len,
            q_parts: 1,
            kv_unit: 64,
            unit_bytes: u32::MAX,
            max_splits: at_a_time,
            max_shares: match self.desc.kind {
                Kind::Decode | Kind::Mla => at_a_time,
                Kind::Prefill => 0,
            },
            tail: TailCosts::NO_TAIL,
            takes_shares: false,
            least_gain: 0,
            rows_of_unit: 0,
            invariant_chunk: match self.desc.kind {
                Kind::Decode | Kind::Mla => 2048,
                // As in the generic kernel: splits of prefill would need memory for the largest batch.
                Kind::Prefill => u32::MAX,
            },
            combine_units: COMBINE_UNITS,
            own_key_bytes: OWN_KEY_BYTES,
            workers: Workers {
                all: slots,
                of_item: blocks,
                small: SmallItems::NONE,
            },
        }
    }

    fn missing(&self, run: &Run<'_>) -> Features {
        let args = run.args;
        let of_four = (4 * args.o.dtype().size() as u32).min(16);
        let caches = [&args.k, &args.v];
        let custom = matches!(args.mask, Mask::Bytes(_) | Mask::Bits(_));
        let masks = self.takes_masks();
        let is_empty = caches.iter().any(|cache| cache.is_empty());
        let aligned = self.row_alignment(run) >= self.least_alignment();
        let mapped = is_empty || self.keys == KeySource::Gather || self.page_steps(run).is_some();
        Features::default()
            .and(Feature::CustomMask, custom && !masks)
            .and(Feature::MmPrefix, args.mm_prefix_ranges.is_some() && !masks)
            .and(
                Feature::QStrides,
                row_alignment(&args.q) < 4 * args.q.dtype().size() as u32,
            )
            .and(Feature::OStrides, row_alignment(&args.o) < of_four)
            .and(Feature::EmptyKv, is_empty)
            .and(Feature::KvStrides, !aligned)
            .and(Feature::BlockScales, !self.brings_scales(run))
            .and(Feature::PageSteps, !mapped)
            .and(Feature::SplitKeys, args.k_rope.is_some())
    }

    fn launch(&self, current: &Current<'_>, run: &Run<'_>, stream: Stream) -> Result<()> {
        let steps = self.page_steps(run);
        let Shape {
            head_dim_qk,
            head_dim_vo,
            ..
        } = self.row.shape;
        let k_columns = self.columns(&run.args.k, head_dim_qk);
        let v_columns = self.columns(&run.args.v, head_dim_vo);
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
            head_dim_qk: self.desc.head_dim_qk,
            head_dim_vo: self.desc.head_dim_vo,
            k_column_boxes: k_columns.boxes(),
            v_column_boxes: v_columns.boxes(),
            row_alignment: piece_bytes(&run.args.k).min(piece_bytes(&run.args.v)),
            bf16_queries: u32::from(self.desc.q_dtype == DType::BF16),
        };
        let launch = Launch {
            grid: self.grid(run),
            threads: self.row.shape.threads,
            cluster: 1,
            dependent: true,
            stream,
        };
        let maps = match steps {
            None => None,
            Some(_) => Some([
                self.map(current, &run.args.k, k_page_step, &k_columns)?,
                self.map(current, &run.args.v, v_page_step, &v_columns)?,
            ]),
        };
        let maps: &[TensorMap] = maps.as_ref().map_or(&[], |maps| maps);
        // SAFETY: the kernel takes a `FolioPaddedDecodeParams`, a `FolioNewTokensParams` where it makes queries and keys, or a
        // `FolioStoredDecodeParams` over caches of other forms, and two tensor maps if it reads by them; their addresses
        // are the caller's tensors, which were checked against the plan, and the workspace, whose list of items and places
        // has room for the grid.
        unsafe {
            match (run.new_tokens, &self.with_new_tokens, self.scales) {
                (Some(rope), Some(function), _) => {
                    launch.enqueue(current, function, &new_tokens(rope, params), maps)
                }
                (_, _, CacheScales::Heads) => {
                    launch.enqueue(current, &self.function, &params, maps)
                }
                _ => launch.enqueue(current, &self.function, &self.stored(run, params), maps),
            }
        }
    }
}

impl Sm90Decode {
    /// The parameters of a run over a cache in another form than plain rows.
    fn stored(&self, run: &Run<'_>, decode: DecodeParams) -> StoredDecodeParams {
        StoredDecodeParams {
            decode,
            cache: Stored::of(&run.args.caches(self.desc.kv_format), [1.0; 2]),
        }
    }
}

/// The parameters of a run that makes queries and keys of new tokens, and reads queries where they come from.
fn new_tokens(rope: &RopeAppendParams, mut decode: DecodeParams) -> NewTokensParams {
    decode.attention.q = rope.q;
    let rows = u32::try_from(rope.num_q_rows).unwrap_or(u32::MAX);
    decode.attention.num_tokens = decode.attention.num_tokens.min(rows);
    NewTokensParams {
        decode,
        rope: *rope,
    }
}

/// What the scales cover of a form that there are rows for.
fn scales(form: CacheForm) -> Option<CacheScales> {
    match form {
        CacheForm::Plain => Some(CacheScales::Heads),
        CacheForm::TokenHeadScales => Some(CacheScales::Tokens),
        CacheForm::ChannelScales => Some(CacheScales::Channels),
        CacheForm::ChannelZeroPoints => Some(CacheScales::ZeroPoints),
        CacheForm::Nvfp4 => Some(CacheScales::Blocks),
        CacheForm::PackedKeys => None,
    }
}

/// How the rows of a tensor come to shared memory, where they lie in atoms of the swizzle.
struct Columns {
    element_bytes: u32,
    atom_bytes: u32,
    /// Of a row of the kernel.
    atoms: u32,
    /// One box brings all of them, or each has a box.
    whole: bool,
}

impl Columns {
    /// Elements of an atom.
    fn atom(&self) -> u32 {
        self.atom_bytes / self.element_bytes
    }

    /// Boxes that bring the rows of a page.
    fn boxes(&self) -> u32 {
        if self.whole { 1 } else { self.atoms }
    }
}

/// Many rows leave no registers for masks that do not follow from positions; also in the kernels.
fn takes_masks(row: &AttentionRow) -> bool {
    row.shape.q_tile <= 16 && !by_warpgroup(row)
}

/// Whether all of its warps multiply together.
fn by_warpgroup(row: &AttentionRow) -> bool {
    let products = match row.variant {
        Variant::Sm90Decode { products, .. } => products,
        _ => Products::OfWarps,
    };
    products == Products::OfWarpgroup
}

/// Bytes of a row within which the kernel's row swizzles, and of which boxes are made.
fn atom_bytes(row_bytes: u32) -> u32 {
    (1 << row_bytes.trailing_zeros()).min(128)
}

/// Whether boxes bring rows at least as fast as gathering does: rows that end where one of the kernel's atoms does, or that
/// end a sector of the L2 where a box has two heads. Others take longer (on an H200 174 requests of 2454 keys, 96/8 heads,
/// head_dim 112: 562 against 466 µs; 64 × 4k, head_dim 120: 378 against 309; but head_dim 32, two heads: 311 against 410).
fn suit_boxes(desc: &AttentionDesc, heads: u32, shape: Shape) -> bool {
    const SECTOR: u32 = 32;
    let dims = [
        (desc.head_dim_qk, shape.head_dim_qk),
        (desc.head_dim_vo, shape.head_dim_vo),
    ];
    dims.into_iter().all(|(dim, of_row)| {
        let bytes = |dim| desc.kv_format.row_bytes(dim) as u32;
        let atom = match heads {
            1 => atom_bytes(bytes(of_row)),
            _ => SECTOR,
        };
        bytes(dim).is_multiple_of(atom)
    })
}

/// KV heads of a block of the row, where it brings keys in this way and takes these scales.
fn heads(row: &AttentionRow, wanted: KeySource, of: CacheScales) -> Option<u32> {
    match row.variant {
        Variant::Sm90Decode {
            keys,
            heads,
            scales,
            tokens: Tokens::Cached,
            ..
        } if keys == wanted && scales == of => Some(heads),
        _ => None,
    }
}

/// The row in the same image that makes queries and keys of new tokens; it masks no columns.
fn with_new_tokens(row: &AttentionRow, desc: &AttentionDesc) -> Option<&'static AttentionRow> {
    let wanted = (row.variant.with_new_tokens(), row.types, row.shape);
    let is_whole =
        (desc.head_dim_qk, desc.head_dim_vo) == (row.shape.head_dim_qk, row.shape.head_dim_vo);
    let found = rows()
        .iter()
        .find(|row| (row.variant, row.types, row.shape) == wanted);
    found.filter(|_| is_whole)
}

/// Whether the kernel can make such queries and keys: rows that move in pieces of 16 bytes. Queries stay as they are while
/// blocks read them, so they go elsewhere; and every new key is in the tiles of some block, which only masks in memory could
/// hide.
fn makes_tokens(run: &Run<'_>, tokens: &RopeAppendArgs, rope: &RopeAppendParams) -> bool {
    let (Some(q), Some(q_out)) = (tokens.q, tokens.q_out) else {
        return false;
    };
    tokens.append.form == CacheForm::Plain
        && tokens.key_out.is_none()
        && q.address() != q_out.address()
        && rope.append.num_tokens > 0
        && rope.append.vectors != 0
        && rope.vectors != 0
        && !matches!(run.args.mask, Mask::Bytes(_) | Mask::Bits(_))
}
