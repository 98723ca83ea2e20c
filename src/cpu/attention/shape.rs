//! The sizes that follow from a desc: tiles, parts of the workspace, and the scratch of each thread. Arithmetic
//! only; nothing here touches memory.

use super::whole_rows::{copies_heads, row_dtype};
use crate::backend::WorkspaceInfo;
use crate::cpu::isa::Matrix;
use crate::cpu::kernels::bf16_split;
use crate::dtype::DType;
use crate::plan::{Capacity, Regions};
use crate::problem::{AttentionDesc, CacheFormat, Kind, Tiling, WorkItem};
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
    pub scratch: ScratchLayout,
}

/// The number of bf16 parts of a query or weight, and of a key or value. Keys and values have no more, since they
/// are of the type of the queries, or fp8.
#[derive(Debug, Clone, Copy)]
pub struct Bf16Parts {
    pub q: usize,
    pub kv: usize,
}

/// Byte ranges of the scratch of a thread. Where an item is walked head by head, `q`, `o` and the running state hold
/// one head.
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
    pub q_offsets: Range<usize>,
    pub o_offsets: Range<usize>,
    /// Keys and values of a tile, and as much again of the next tile.
    pub k_offsets: Range<usize>,
    pub k_rope_offsets: Range<usize>,
    pub v_offsets: Range<usize>,
    pub k: Range<usize>,
    pub v: Range<usize>,
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
            matrix,
            bf16_parts,
            amx,
            may_split_keys: desc.kind == Kind::Prefill,
            tiling: tiling(desc, num_threads, matrix),
            regions: Regions::default(),
            scratch: ScratchLayout::default(),
        };
        shape.scratch = shape.scratch(strip);
        let capacity = Capacity::new(desc, &shape.tiling);
        let scratch_bytes = num_threads.saturating_mul(shape.scratch.total);
        shape.regions = Regions::new(&capacity, shape.num_qo_heads, shape.ld_vo, scratch_bytes);
        shape
    }

    /// Whether some item may use AMX.
    pub fn uses_amx(&self) -> bool {
        let most_rows = self.tiling.q_tile as usize * self.group;
        self.amx || self.matrix == Some(Matrix::Amx) && most_rows > FEW_ROWS
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

    /// Bytes of the rows of a tile that are copied: of one head of `most_keys`, or of all heads of as many as `few_rows`
    /// takes.
    fn copied_bytes(&self, most_keys: usize) -> usize {
        if !self.copies_heads {
            return most_keys * self.k_copy_bytes;
        }
        let most = most_keys.max(self.few_rows_keys * self.num_kv_heads);
        let bytes = most.saturating_mul(self.k_row_bytes + self.v_row_bytes);
        bytes.next_multiple_of(ALIGNMENT)
    }

    fn scratch(&self, strip: usize) -> ScratchLayout {
        let tile_rows = self.tiling.q_tile as usize * self.group;
        // `few_rows`: all heads, but few rows of each.
        let few_rows = self.num_kv_heads * tile_rows.min(FEW_ROWS);
        let rows = tile_rows.max(few_rows);
        let block_rows = self.block_rows();
        let scores_of_few = few_rows * self.few_rows_keys;
        // `many_rows_bf16`: strips of 32 rows, and scores of two groups of 32 keys.
        let in_blocks = self.matrix.is_some();
        let (rows, scores, most_keys) = match in_blocks {
            true => (rows.next_multiple_of(32), 2 * 32 * 32, BF16_KEY_TILE),
            false => (rows, 0, KEY_TILE),
        };
        let v_width = self.ld_vo.next_multiple_of(strip);
        let mut cursor = Cursor::default();
        let mut halves = |count: usize| cursor.take(if in_blocks { count } else { 0 }, 2);
        let q16 = halves(rows * self.ld_qk * self.bf16_parts.q);
        let k16 = halves(2 * BF16_KEY_TILE * self.ld_qk * self.bf16_parts.kv);
        let v16 = halves(2 * BF16_KEY_TILE * self.ld_vo * self.bf16_parts.kv);
        let p16 = halves(32 * BF16_KEY_TILE * self.bf16_parts.q);
        let staged16 = halves(32 * self.ld_qk.max(self.ld_vo) * self.bf16_parts.q);
        let split = |count: usize| if self.may_split_keys { count } else { 0 };
        let mut floats = |count| cursor.take(count, 4);
        ScratchLayout {
            q16,
            k16,
            v16,
            p16,
            staged16,
            q: floats(rows * self.ld_qk),
            o: floats(rows * self.ld_vo),
            max: floats(rows),
            sum: floats(rows),
            alpha: floats(rows),
            s: floats(scores.max(block_rows * SCORE_LD).max(scores_of_few)),
            k: floats(2 * self.ld_qk * KEY_TILE.next_multiple_of(strip)),
            v: floats(2 * v_width * KEY_TILE),
            staged: floats(32 * self.ld_qk.max(self.ld_vo)),
            limits: floats(KEY_TILE),
            q_offsets: cursor.take(tile_rows, 8),
            o_offsets: cursor.take(tile_rows, 8),
            k_offsets: cursor.take(2 * most_keys, 8),
            k_rope_offsets: cursor.take(split(2 * most_keys), 8),
            v_offsets: cursor.take(2 * most_keys, 8),
            q_rows: cursor.take(tile_rows, self.q_copy_bytes),
            rows: cursor.take(2, self.copied_bytes(most_keys)),
            joined: cursor.take(split(JOINED_KEYS), self.k_row_bytes),
            joined_offsets: cursor.take(split(JOINED_KEYS), 8),
            total: cursor.0,
        }
    }
}

fn few_rows_keys(desc: &AttentionDesc, row: CacheFormat, amx: bool) -> usize {
    let key = row.row_bytes(desc.head_dim_qk);
    let key_and_value = match desc.kind {
        Kind::Mla => key,
        Kind::Decode | Kind::Prefill => key + row.row_bytes(desc.head_dim_vo),
    };
    let bytes = desc.num_kv_heads as usize * key_and_value;
    (few_rows_tile_bytes(amx) / bytes).clamp(FEW_ROWS_KEY_UNIT, KEY_TILE) / FEW_ROWS_KEY_UNIT
        * FEW_ROWS_KEY_UNIT
}

fn tiling(desc: &AttentionDesc, num_threads: usize, matrix: Option<Matrix>) -> Tiling {
    let tile = (TILE_ROWS / desc.group_size()).clamp(1, TILE_TOKENS);
    let is_long =
        matrix.is_some() && desc.q_dtype != DType::F32 && fills_long_tiles(desc, tile, num_threads);
    let q_tile = if is_long { 2 * tile } else { tile };
    let q_tile = q_tile.min(desc.max_qo_len.max(1));
    let threads = u32::try_from(num_threads).unwrap_or(u32::MAX);
    Tiling {
        q_tile,
        kv_unit: KEY_UNIT,
        // Tiles of many rows are many already, and their partial results are large. Tiles of few rows may belong to
        // a single long request.
        max_splits: match threads {
            1 => 0,
            _ if is_long => threads / 2,
            _ if q_tile > 16 => threads,
            _ => threads.saturating_mul(2),
        },
        invariant_chunk: invariant_chunk(desc),
        combine_units: 1,
    }
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
