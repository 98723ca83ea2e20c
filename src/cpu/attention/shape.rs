//! The sizes that follow from a desc: tiles, parts of the workspace, and the scratch of each thread. Arithmetic
//! only; nothing here touches memory.

use super::whole_rows::{copies_heads, row_dtype};
use crate::backend::WorkspaceInfo;
use crate::cpu::isa::Matrix;
use crate::cpu::kernels::bf16_split;
use crate::dtype::DType;
use crate::plan::{Capacity, Regions, UNITS_NOT_SPLIT};
use crate::problem::{
    AttentionDesc, CacheFormat, Kind, SmallItems, TailCosts, Tiling, WorkItem, Workers,
};
use std::ops::Range;

/// Widest rows of queries and keys, and of values and outputs: those of absorbed MLA. They bound the products of
/// `many_rows_bf16` on AMX; all other kernels take any width.
pub const MAX_DIM_QK: usize = 576;
pub const MAX_DIM_VO: usize = 512;

/// Keys per tile. Scores, weights and both panels of a tile stay within the second-level cache. (256 keys are 2 %
/// faster than 128 in fp32 prefill, 6 % on AMX.)
pub const KEY_TILE: usize = 256;

/// Keys per tile of `many_rows_bf16`, which loads and stores its sums once per tile. With 256 keys, prefill on AMX
/// takes 2 % longer in bf16 and 4 % in fp16. (By pairs on a Zen 5 it takes 1 to 3 % less.)
pub const BF16_KEY_TILE: usize = 512;

/// Most keys in two parts that are joined at a time.
pub const JOINED_KEYS: usize = 32;

/// Elements from one row of scores or weights to the next. It is not a power of two, so that a column of scores
/// spreads over all sets of the first-level cache. It is a whole number of cache lines, in bf16 too.
pub const SCORE_LD: usize = KEY_TILE + 32;

/// Tiles are multiples of so many keys, whatever walk has them.
const TILE_UNIT: usize = 64;

/// Chunks of keys are multiples of this. The heads of shorter requests are spread over threads instead, which costs
/// no merge.
const KEY_UNIT: u32 = 256;

/// Most rows (query rows × group) that `few_rows` takes.
pub const FEW_ROWS: usize = 16;

/// Tiles of `few_rows` are multiples of so many keys.
const FEW_ROWS_KEY_UNIT: usize = 32;

/// Bytes of keys and values that a tile of `few_rows` aims at. Prefetched rows must be a small part of the
/// second-level cache. With twice as many bytes, cold bf16 decode is 10 to 20 % slower on a processor with 1 MiB of
/// it, and warm decode is faster. Processors with AMX have 2 MiB.
fn few_rows_tile_bytes(amx: bool) -> usize {
    if amx { 256 << 10 } else { 128 << 10 }
}

/// Query rows that a block of q·kᵀ aims at.
const BLOCK_ROWS: usize = 48;

/// Rows per query tile that amortise the packing of keys and values, and most tokens.
const TILE_ROWS: u32 = 512;
const TILE_TOKENS: u32 = 128;

/// `many_rows_bf16` computes a tile faster than it packs one, so its query tiles are twice as large. There must
/// still be so many pieces of work per thread, or so many tiles of the smaller size in a prompt. Tiles of fp32 stay
/// small, because their three parts would not fit into the second-level cache.
const PIECES_PER_THREAD: usize = 4;
const LONG_PROMPT_TILES: u32 = 16;

/// Bytes of partial results that a batch-invariant plan may need.
const INVARIANT_BYTES: u64 = 64 << 20;

/// Cache lines; every part starts on one.
const ALIGNMENT: usize = 64;

/// Sizes of a problem.
#[derive(Debug, Clone)]
pub struct Shape {
    pub group: usize,
    pub num_qo_heads: usize,
    pub num_kv_heads: usize,
    pub dim_qk: usize,
    pub dim_vo: usize,
    /// Type and bytes of a row of the cache, as the walks read it. Rows of MLA may be copies.
    pub row_dtype: DType,
    pub k_row_bytes: usize,
    pub v_row_bytes: usize,
    /// Values are the leading elements of their keys.
    pub values_in_keys: bool,
    /// Bytes of a query row that may be copied, or 0, and the same of a key.
    q_copy_bytes: usize,
    k_copy_bytes: usize,
    /// Keys and values of every head are copied.
    copies_heads: bool,
    /// `dim_qk` and `dim_vo`, padded to whole cache lines of bf16.
    pub ld_qk: usize,
    pub ld_vo: usize,
    /// Tokens per block of rows.
    pub block_tokens: usize,
    /// Keys per tile of `few_rows`, and elements from one of its rows of scores to the next. It does not depend on
    /// how many heads a thread computes, so that this does not change a result.
    pub few_rows_keys: usize,
    /// Keys per tile of `many_rows` and of `many_rows_bf16`: [`KEY_TILE`] and [`BF16_KEY_TILE`], or all that a request
    /// can have.
    pub key_tile: usize,
    pub bf16_key_tile: usize,
    /// What multiplies blocks of bf16 for items of many rows; `None` where `many_rows` computes them. The bf16 parts
    /// of a number.
    pub matrix: Option<Matrix>,
    pub bf16_parts: Bf16Parts,
    /// Items of few rows use AMX too.
    pub amx: bool,
    /// Runs may have keys in two parts.
    pub may_split_keys: bool,
    pub tiling: Tiling,
    pub regions: Regions,
    pub scratch: Layouts,
}

/// The number of bf16 parts of a query or weight, and of a key or value. Keys and values have no more, since they
/// are of the type of the queries, or fp8.
#[derive(Debug, Clone, Copy)]
pub struct Bf16Parts {
    pub q: usize,
    pub kv: usize,
}

/// What the scratch of a thread holds, which is one of these at a time.
#[derive(Debug, Clone, Default)]
pub struct Layouts {
    /// For `few_rows`, `many_rows`, `many_rows_bf16` (where it has items) and combining.
    pub few: ScratchLayout,
    pub many: ScratchLayout,
    pub blocks: ScratchLayout,
    pub combine: ScratchLayout,
    /// Bytes of the largest.
    pub total: usize,
}

/// Byte ranges of the scratch of a thread. What a walk has no use for is empty. Where an item is walked head by head,
/// `q`, `o` and the running state hold one head.
#[derive(Debug, Clone, Default)]
pub struct ScratchLayout {
    pub q: Range<usize>,
    pub o: Range<usize>,
    pub max: Range<usize>,
    pub sum: Range<usize>,
    pub alpha: Range<usize>,
    pub s: Range<usize>,
    pub staged: Range<usize>,
    /// bf16 blocks.
    pub q16: Range<usize>,
    pub p16: Range<usize>,
    pub staged16: Range<usize>,
    pub limits: Range<usize>,
    /// What is added to the logits of a row.
    pub biases: Range<usize>,
    pub q_offsets: Range<usize>,
    pub o_offsets: Range<usize>,
    /// Keys and values of a tile, and as much again of the next tile.
    pub k_offsets: Range<usize>,
    pub k_rope_offsets: Range<usize>,
    pub v_offsets: Range<usize>,
    pub k: Range<usize>,
    pub v: Range<usize>,
    /// Values of one tile, where they are not staged ahead.
    pub values: Range<usize>,
    pub k16: Range<usize>,
    pub v16: Range<usize>,
    /// Copies of queries, and of keys of a tile and of the next one.
    pub q_rows: Range<usize>,
    pub rows: Range<usize>,
    /// Some whole keys of keys in two parts.
    pub joined: Range<usize>,
    pub joined_offsets: Range<usize>,
    pub total: usize,
}

/// Hands out consecutive ranges.
#[derive(Default)]
struct Cursor(usize);

impl Cursor {
    fn take(&mut self, count: usize, size: usize) -> Range<usize> {
        let start = self.0;
        let end = start.saturating_add(count.saturating_mul(size));
        // A saturated size stays the largest. No caller can bring that much, and `plan` refuses what it brings.
        self.0 = end.saturating_add(ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
        start..end
    }

    /// The layout whose ranges were handed out.
    fn end(self, layout: ScratchLayout) -> ScratchLayout {
        ScratchLayout {
            total: self.0,
            ..layout
        }
    }
}

impl Shape {
    /// `strip`: columns of a panel's strip, a multiple of 16.
    pub fn new(
        desc: &AttentionDesc,
        num_threads: usize,
        strip: usize,
        matrix: Option<Matrix>,
    ) -> Shape {
        let group = desc.group_size() as usize;
        let row_dtype = row_dtype(desc);
        let row = CacheFormat::plain(row_dtype);
        let bf16_parts = Bf16Parts {
            q: bf16_split::count(desc.q_dtype),
            kv: bf16_split::count(row_dtype),
        };
        let matrix = matrix.filter(|_| bf16_parts.kv <= bf16_parts.q);
        let has_parts = desc.rope_dim() > 0;
        let amx = matrix == Some(Matrix::Amx) && desc.q_dtype == DType::BF16;
        let mut shape = Shape {
            group,
            num_qo_heads: desc.num_qo_heads as usize,
            num_kv_heads: desc.num_kv_heads as usize,
            dim_qk: desc.head_dim_qk as usize,
            dim_vo: desc.head_dim_vo as usize,
            row_dtype,
            k_row_bytes: row.row_bytes(desc.head_dim_qk),
            v_row_bytes: row.row_bytes(desc.head_dim_vo),
            values_in_keys: desc.kind == Kind::Mla,
            q_copy_bytes: match has_parts {
                true => desc.head_dim_qk as usize * desc.q_dtype.size(),
                false => 0,
            },
            k_copy_bytes: match has_parts {
                true => row.row_bytes(desc.head_dim_qk),
                false => 0,
            },
            copies_heads: copies_heads(desc),
            ld_qk: (desc.head_dim_qk as usize).next_multiple_of(32),
            ld_vo: (desc.head_dim_vo as usize).next_multiple_of(32),
            block_tokens: (BLOCK_ROWS / group).max(1),
            few_rows_keys: few_rows_keys(desc, row, amx),
            key_tile: tile_keys(desc, KEY_TILE),
            bf16_key_tile: tile_keys(desc, BF16_KEY_TILE),
            matrix,
            bf16_parts,
            amx,
            may_split_keys: desc.kind == Kind::Prefill,
            tiling: tiling(desc, num_threads, matrix),
            regions: Regions::default(),
            scratch: Layouts::default(),
        };
        shape.scratch = shape.layouts(strip);
        let capacity = Capacity::new(desc, &shape.tiling);
        let scratch_bytes = num_threads.saturating_mul(shape.scratch.total);
        shape.regions = Regions::new(&capacity, shape.num_qo_heads, shape.ld_vo, scratch_bytes);
        shape
    }

    /// Whether some item may use AMX.
    pub fn uses_amx(&self) -> bool {
        self.amx || self.matrix == Some(Matrix::Amx) && self.tile_rows() > FEW_ROWS
    }

    /// Whether the item goes through `few_rows`.
    pub fn is_few(&self, work: &WorkItem) -> bool {
        work.q_len as usize * self.group <= FEW_ROWS
    }

    /// The larger of `dim_qk` and `dim_vo`.
    pub fn widest(&self) -> usize {
        self.dim_qk.max(self.dim_vo)
    }

    /// Query rows of a block of tokens.
    pub fn block_rows(&self) -> usize {
        self.block_tokens * self.group
    }

    /// The workspace that the caller has to bring.
    pub fn workspace(&self) -> WorkspaceInfo {
        WorkspaceInfo {
            device_bytes: 0,
            host_bytes: self.regions.end,
            alignment: ALIGNMENT,
        }
    }

    /// Bytes of the rows of a tile of so many keys that are copied, of so many heads.
    fn copied_bytes(&self, keys: usize, heads: usize) -> usize {
        if !self.copies_heads {
            return keys * self.k_copy_bytes;
        }
        let bytes = (keys * heads).saturating_mul(self.k_row_bytes + self.v_row_bytes);
        bytes.next_multiple_of(ALIGNMENT)
    }

    fn layouts(&self, strip: usize) -> Layouts {
        let mut layouts = Layouts {
            few: self.few_layout(strip),
            combine: self.combine_layout(),
            ..Layouts::default()
        };
        if self.tile_rows() > FEW_ROWS {
            layouts.many = self.many_layout(strip);
            if self.matrix.is_some() {
                layouts.blocks = self.blocks_layout();
            }
        }
        let all = [
            &layouts.few,
            &layouts.many,
            &layouts.blocks,
            &layouts.combine,
        ];
        layouts.total = all
            .map(|layout| layout.total)
            .into_iter()
            .max()
            .unwrap_or(0);
        layouts
    }

    /// Most query rows of a KV head in an item.
    fn tile_rows(&self) -> usize {
        self.tiling.q_tile as usize * self.group
    }

    /// All heads, but few rows of each. Keys and values are read where they lie.
    fn few_layout(&self, strip: usize) -> ScratchLayout {
        let of_head = self.tile_rows().min(FEW_ROWS);
        let rows = (self.num_kv_heads * of_head).next_multiple_of(FEW_ROWS);
        let mut cursor = Cursor::default();
        let mut layout = self.rows_of_tiles(
            &mut cursor,
            of_head,
            (self.few_rows_keys, self.num_kv_heads),
        );
        let mut floats = |count| cursor.take(count, 4);
        layout.q = floats(rows * self.ld_qk);
        layout.o = floats(rows * self.ld_vo);
        layout.max = floats(rows);
        layout.sum = floats(rows);
        layout.alpha = floats(rows);
        layout.s = floats(rows * self.few_rows_keys);
        layout.values = floats(self.ld_vo.next_multiple_of(strip) * self.few_rows_keys);
        layout.limits = floats(KEY_TILE);
        layout.biases = floats(KEY_TILE);
        cursor.end(layout)
    }

    /// One head; f32 panels of a tile and of the next one.
    fn many_layout(&self, strip: usize) -> ScratchLayout {
        let (rows, keys) = (self.tile_rows(), self.key_tile);
        let mut cursor = Cursor::default();
        let mut layout = self.rows_of_tiles(&mut cursor, rows, (keys, 1));
        let mut floats = |count| cursor.take(count, 4);
        layout.q = floats(rows * self.ld_qk);
        layout.o = floats(rows * self.ld_vo);
        layout.max = floats(rows);
        layout.sum = floats(rows);
        layout.alpha = floats(rows);
        layout.s = floats(self.block_rows() * SCORE_LD);
        layout.k = floats(2 * self.ld_qk * keys.next_multiple_of(strip));
        layout.v = floats(2 * self.ld_vo.next_multiple_of(strip) * keys);
        layout.staged = floats(32 * self.widest_ld());
        layout.limits = floats(KEY_TILE);
        layout.biases = floats(KEY_TILE);
        cursor.end(layout)
    }

    /// One head, in strips of 32 rows; blocks of a tile and of the next one, and scores of two groups of 32 keys.
    fn blocks_layout(&self) -> ScratchLayout {
        let (rows, keys) = (self.tile_rows().next_multiple_of(32), self.bf16_key_tile);
        let parts = self.bf16_parts;
        let mut cursor = Cursor::default();
        let mut layout = self.rows_of_tiles(&mut cursor, rows, (keys, 1));
        let mut halves = |count| cursor.take(count, 2);
        layout.q16 = halves(rows * self.ld_qk * parts.q);
        layout.k16 = halves(2 * keys * self.ld_qk * parts.kv);
        layout.v16 = halves(2 * keys * self.ld_vo * parts.kv);
        layout.p16 = halves(32 * keys * parts.q);
        layout.staged16 = halves(32 * self.widest_ld() * parts.q);
        let mut floats = |count| cursor.take(count, 4);
        layout.o = floats(rows * self.ld_vo);
        layout.max = floats(rows);
        layout.sum = floats(rows);
        layout.s = floats(2 * 32 * 32);
        layout.staged = floats(32 * self.widest_ld());
        layout.limits = floats(KEY_TILE);
        cursor.end(layout)
    }

    /// One row, and a tile of its partial rows.
    fn combine_layout(&self) -> ScratchLayout {
        let mut cursor = Cursor::default();
        let layout = ScratchLayout {
            o: cursor.take(self.ld_vo, 4),
            s: cursor.take(KEY_TILE, 4),
            k_offsets: cursor.take(2 * KEY_TILE, 8),
            ..ScratchLayout::default()
        };
        cursor.end(layout)
    }

    /// Where the query rows of an item are, and the keys and values of a tile and of the next one. With them the copies
    /// of those that are not whole rows, for so many keys of a tile and so many heads.
    fn rows_of_tiles(
        &self,
        cursor: &mut Cursor,
        rows: usize,
        (keys, heads): (usize, usize),
    ) -> ScratchLayout {
        let split = |count: usize| if self.may_split_keys { count } else { 0 };
        ScratchLayout {
            q_offsets: cursor.take(rows, 8),
            o_offsets: cursor.take(rows, 8),
            k_offsets: cursor.take(2 * keys, 8),
            k_rope_offsets: cursor.take(split(2 * keys), 8),
            v_offsets: cursor.take(2 * keys, 8),
            q_rows: cursor.take(rows, self.q_copy_bytes),
            rows: cursor.take(2, self.copied_bytes(keys, heads)),
            joined: cursor.take(split(JOINED_KEYS), self.k_row_bytes),
            joined_offsets: cursor.take(split(JOINED_KEYS), 8),
            ..ScratchLayout::default()
        }
    }

    fn widest_ld(&self) -> usize {
        self.ld_qk.max(self.ld_vo)
    }
}

/// Keys of a tile: `most`, or all that a request can have.
fn tile_keys(desc: &AttentionDesc, most: usize) -> usize {
    most.min((desc.max_kv_len.max(1) as usize).next_multiple_of(TILE_UNIT))
}

fn few_rows_keys(desc: &AttentionDesc, row: CacheFormat, amx: bool) -> usize {
    let key = row.row_bytes(desc.head_dim_qk);
    let key_and_value = match desc.kind {
        Kind::Mla => key,
        Kind::Decode | Kind::Prefill => key + row.row_bytes(desc.head_dim_vo),
    };
    let bytes = desc.num_kv_heads as usize * key_and_value;
    let most = tile_keys(desc, KEY_TILE);
    (few_rows_tile_bytes(amx) / bytes).clamp(FEW_ROWS_KEY_UNIT, most) / FEW_ROWS_KEY_UNIT
        * FEW_ROWS_KEY_UNIT
}

fn tiling(desc: &AttentionDesc, num_threads: usize, matrix: Option<Matrix>) -> Tiling {
    let tile = (TILE_ROWS / desc.group_size()).clamp(1, TILE_TOKENS);
    let is_long =
        matrix.is_some() && desc.q_dtype != DType::F32 && fills_long_tiles(desc, tile, num_threads);
    let q_tile = if is_long { 2 * tile } else { tile };
    let q_tile = q_tile.min(desc.max_qo_len.max(1));
    let threads = u32::try_from(num_threads).unwrap_or(u32::MAX);
    // Tiles of many rows are many already, and their partial results are large. Tiles of few rows may belong to
    // a single long request.
    let max_splits = match threads {
        1 => 0,
        _ if is_never_split(desc) => 0,
        _ if is_long => threads / 2,
        _ if q_tile > 16 => threads,
        _ => threads.saturating_mul(2),
    };
    Tiling {
        q_tile,
        q_parts: 1,
        kv_unit: KEY_UNIT,
        unit_bytes: u32::MAX,
        max_splits,
        max_shares: match desc.kind {
            Kind::Mla => max_splits,
            Kind::Decode | Kind::Prefill => 0,
        },
        tail: TailCosts::NO_TAIL,
        takes_shares: false,
        least_gain: 0,
        rows_of_unit: 0,
        invariant_chunk: invariant_chunk(desc),
        combine_units: 1,
        own_key_bytes: 0,
        workers: Workers {
            all: threads.max(1),
            of_item: desc.num_kv_heads,
            small: SmallItems::NONE,
        },
    }
}

/// Whether requests are too short to be split. (In a cascade the number of splits also says what sharing costs.)
fn is_never_split(desc: &AttentionDesc) -> bool {
    desc.kind != Kind::Mla
        && desc.shared_levels == 0
        && desc.max_kv_len <= UNITS_NOT_SPLIT * KEY_UNIT
}

/// Whether query tiles of twice as many tokens are still many. Where the number of threads must not change a result,
/// this follows from the length of the prompt alone.
fn fills_long_tiles(desc: &AttentionDesc, tile: u32, num_threads: usize) -> bool {
    if desc.batch_invariant {
        return desc.max_qo_len / tile >= LONG_PROMPT_TILES;
    }
    let pieces = u64::from(desc.max_num_tokens / (2 * tile)) * u64::from(desc.num_kv_heads);
    desc.max_qo_len >= 2 * tile && pieces >= (PIECES_PER_THREAD * num_threads) as u64
}

/// The chunk of keys of a batch-invariant plan: as many chunks per request as `INVARIANT_BYTES` of partial results
/// allow, none below 1024 keys. It follows from the desc alone, so a result depends neither on the batch nor on the
/// number of threads.
fn invariant_chunk(desc: &AttentionDesc) -> u32 {
    let row = u64::from(desc.num_qo_heads) * (u64::from(desc.head_dim_vo) * 4 + 4);
    let rows = u64::from(desc.max_num_tokens.max(1));
    let chunks = (INVARIANT_BYTES / (row * rows)).clamp(1, 1 << 20) as u32;
    if chunks == 1 {
        return u32::MAX / KEY_UNIT * KEY_UNIT;
    }
    let chunk = desc.max_kv_len.div_ceil(chunks).max(1024);
    chunk.next_multiple_of(KEY_UNIT)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::problem::{KvLayout, KvStorage};

    /// Prompts of a model with 32 heads of 128.
    fn prompts(dtype: DType, num_kv_heads: u32) -> AttentionDesc {
        AttentionDesc {
            kind: Kind::Prefill,
            q_dtype: dtype,
            kv_format: dtype.into(),
            o_dtype: dtype,
            num_qo_heads: 32,
            num_kv_heads,
            head_dim_qk: 128,
            head_dim_vo: 128,
            kv: KvStorage::Paged {
                page_size: 16,
                layout: KvLayout::Nhd,
            },
            max_batch_size: 64,
            max_qo_len: 8192,
            max_num_tokens: 8192,
            max_kv_len: 8192,
            max_num_pages: 4096,
            graph: false,
            batch_invariant: false,
            fp8_products: false,
            mask_items: false,
            shared_levels: 0,
            new_kv: None,
        }
    }

    const MATRICES: [Option<Matrix>; 3] = [None, Some(Matrix::Pairs), Some(Matrix::Amx)];

    /// The bytes that each of 16 threads adds to the workspace: scratch and partial results.
    fn per_thread(desc: &AttentionDesc, matrix: Option<Matrix>) -> usize {
        let of = |threads| Shape::new(desc, threads, 64, matrix).workspace().host_bytes;
        (of(17) - of(1)) / 16
    }

    /// Partial results are 2.1 MB of it, a row for each of 128 tokens. Numbers of fp32 have three parts in blocks of bf16.
    #[test]
    fn a_threads_part_is_small() {
        for matrix in MATRICES {
            for (dtype, most) in [(DType::BF16, 4_000_000), (DType::F32, 5_000_000)] {
                for num_kv_heads in [8, 32] {
                    let bytes = per_thread(&prompts(dtype, num_kv_heads), matrix);
                    assert!(bytes < most, "{matrix:?} {dtype} {num_kv_heads}: {bytes}");
                }
            }
        }
    }

    #[test]
    fn smaller_maxima_take_less() {
        for matrix in MATRICES {
            for dtype in [DType::BF16, DType::F16, DType::F32] {
                let desc = prompts(dtype, 8);
                let all = per_thread(&desc, matrix);
                let short = AttentionDesc {
                    max_kv_len: 64,
                    ..desc
                };
                let few = AttentionDesc {
                    max_qo_len: 4,
                    ..desc
                };
                let one = AttentionDesc {
                    max_qo_len: 1,
                    max_num_tokens: 64,
                    max_kv_len: 64,
                    ..desc
                };
                let [short, few, one] = [short, few, one].map(|desc| per_thread(&desc, matrix));
                assert!(
                    short < all - 300_000,
                    "{matrix:?} {dtype}: {short} of {all}"
                );
                assert!(few < all / 4, "{matrix:?} {dtype}: {few} of {all}");
                assert!(one < few / 2, "{matrix:?} {dtype}: {one} of {few}");
            }
        }
    }
}
