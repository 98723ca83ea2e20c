//! A row of an attention kernel, what a problem asks of one, and how a family becomes rows.

use crate::cuda::kernels::row::{Arch, Row, Sizes, defines, name, type_name};
use crate::dtype::DType;

/// The widest rows of q, k, v and o that every kind of attention kernels exists for.
pub const MOST_HEAD_DIM: u32 = 256;

/// The widest that the portable kernels over rows of plain elements exist for. Wider problems pass every layer above this
/// table, and are refused here.
pub const MOST_WIDE_HEAD_DIM: u32 = 512;

/// How a kernel divides its tile of query rows. It is not the handle that the problem came by: short
/// prompts decode.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Phase {
    /// All warps share the rows, which are few, and divide the keys.
    Decode,
    /// The warps divide the rows.
    Prefill,
}

impl Phase {
    /// The name in kernel names.
    pub fn name(self) -> &'static str {
        match self {
            Phase::Decode => "decode",
            Phase::Prefill => "prefill",
        }
    }
}

/// Which kernel a row is of, and what tells its rows apart beside types and sizes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Variant {
    /// `generic/attention.cu`: mma.sync.
    Generic {
        /// Warps along the rows of a tile; where it is one, the warps divide the keys.
        warps_m: u32,
        /// Warps along the columns of the output.
        warps_d: u32,
        /// Tiles of keys and values that there is room for.
        stages: u32,
    },
    /// `generic/attention_f32.cu`: fp32 arithmetic.
    GenericF32,
    /// `generic/decode_stored.cu` and `attention_stored.cu`: mma.sync on what other forms of caches are widened to.
    GenericStored,
    /// `sm90/decode/decode.cu`, and `sm90/decode_warpgroup/decode_warpgroup.cu`.
    Sm90Decode {
        /// How keys come.
        keys: KeySource,
        /// KV heads of a block, one or two neighbours.
        heads: u32,
        /// How keys and values are scaled.
        scales: CacheScales,
        /// Who multiplies.
        products: Products,
        /// Who makes queries and keys of new tokens.
        tokens: Tokens,
        /// No row of the same types and sizes has its keys in the other way: their image has no kernel for that.
        is_alone: bool,
    },
    /// `sm90/prefill/prefill.cu`.
    Sm90Prefill {
        /// How tiles of K and V are filled.
        kv: KvRows,
        /// In how many tensors keys are, and what else rows may see.
        parts: KeyParts,
        /// Which masks it has.
        masks: Masks,
        /// What its logits are.
        logits: Logits,
    },
    /// `sm90/prefill_fp8/prefill_fp8.cu`.
    Sm90PrefillFp8 {
        /// How K and V are read.
        keys: KeySource,
    },
}

/// How a Hopper kernel brings keys to shared memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum KeySource {
    /// By TMA, in boxes.
    Tma,
    /// Row by row.
    Gather,
}

/// The rotary part of keys in two parts, which is DeepSeek's.
pub const SPLIT_ROPE_DIM: u32 = 64;

/// The tensors that Hopper's prefill kernel reads keys from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum KeyParts {
    /// One.
    One,
    /// Two: the last [`SPLIT_ROPE_DIM`] elements are in one of their own, which all heads share.
    Two,
    /// The same, and rows may go on from what they came to before, and see a context in other tensors first.
    TwoAfter,
}

impl KeyParts {
    /// Elements of keys in a tensor of their own.
    fn rope_dim(self) -> u32 {
        match self {
            KeyParts::One => 0,
            KeyParts::Two | KeyParts::TwoAfter => SPLIT_ROPE_DIM,
        }
    }

    fn suffix(self) -> &'static str {
        match self {
            KeyParts::One => "",
            KeyParts::Two => "_split_keys",
            KeyParts::TwoAfter => "_split_keys_after",
        }
    }
}

/// Who has the rows and keys of a product in Hopper's decode kernels.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Products {
    /// A warp by itself: keys of its own, or rows of its own where there are more than its registers hold.
    OfWarps,
    /// All warps together: every key is converted once, whatever the number of rows.
    OfWarpgroup,
}

/// Whether Hopper's decode kernel finds new tokens in the cache, or puts them there.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Tokens {
    /// All keys are in the cache, and queries are as they are multiplied.
    Cached,
    /// It normalises and rotates queries and keys, and appends.
    New,
}

/// What the scales of a cache cover that Hopper's decode kernel is compiled for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum CacheScales {
    /// Whole heads, or nothing: plain rows.
    Heads,
    /// A token and head.
    Tokens,
    /// An element of a head's rows.
    Channels,
    /// The same, with a zero point each.
    ZeroPoints,
    /// Sixteen elements of a token and head.
    Blocks,
}

impl CacheScales {
    /// Its number among `FolioForm` of `kernels/params/stored.h`; 0 for plain rows.
    fn form(self) -> u32 {
        match self {
            CacheScales::Heads => 0,
            CacheScales::Tokens => 1,
            CacheScales::Channels => 2,
            CacheScales::ZeroPoints => 3,
            CacheScales::Blocks => 4,
        }
    }

    /// What stands before the source of keys in a row's name.
    fn prefix(self) -> &'static str {
        match self {
            CacheScales::Heads => "",
            CacheScales::Tokens => "token_scales_",
            CacheScales::Channels => "channel_scales_",
            CacheScales::ZeroPoints => "zero_points_",
            CacheScales::Blocks => "block_scales_",
        }
    }
}

/// How the Hopper prefill kernel finds the rows of K and V.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum KvRows {
    /// Page by page, all columns together: rows are whole blocks of 64 columns.
    Paged,
    /// Page by page, 64 columns at a time.
    PagedColumns,
    /// As `Paged`, and warpgroups may have keys of their own.
    PagedOwn,
    /// They are consecutive.
    Ragged,
    /// One by one, wherever they are; ragged ones too.
    Rows,
}

impl KvRows {
    /// The name in kernel names.
    fn name(self) -> &'static str {
        match self {
            KvRows::Ragged => "ragged",
            KvRows::Paged => "paged",
            KvRows::Rows => "rows",
            KvRows::PagedColumns => "paged_columns",
            KvRows::PagedOwn => "paged_own",
        }
    }

    /// Its number in `kernels/sm90/prefill/tile.cuh`.
    fn number(self) -> u32 {
        match self {
            KvRows::Ragged => 0,
            KvRows::Paged => 1,
            KvRows::Rows => 2,
            KvRows::PagedColumns => 3,
            KvRows::PagedOwn => 4,
        }
    }
}

/// Which keys the rows of the Hopper prefill kernel may see.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Masks {
    /// Those that follow from positions: causal or all, windows, chunks.
    ByPosition,
    /// Also those of a mask in memory, by request and by ranges; and logits may depend on distance.
    Any,
}

/// What logits of the Hopper prefill kernel are beside products times a factor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Logits {
    /// Whatever its masks allow; a soft cap takes longer.
    Some,
    /// All runs have a soft cap of at most [`MOST_SOFT_CAP`], and no bias.
    Capped,
    /// All runs have a bias by distance, a slope for a query head, and no soft cap.
    Biased,
}

impl Logits {
    /// The last part of a row's name.
    fn suffix(self) -> &'static str {
        match self {
            Logits::Some => "",
            Logits::Capped => "_capped",
            Logits::Biased => "_biased",
        }
    }

    /// Its number in `kernels/sm90/prefill/tile.cuh`.
    fn number(self) -> u32 {
        match self {
            Logits::Some => 0,
            Logits::Capped => 1,
            Logits::Biased => 2,
        }
    }
}

/// What [`Logits::Capped`] has exponents for; also in the kernel.
pub const MOST_SOFT_CAP: f32 = 64.0;

impl Variant {
    /// The variant of the same source that makes new tokens; itself where there is none such.
    pub const fn with_new_tokens(self) -> Variant {
        match self {
            Variant::Sm90Decode {
                keys,
                heads,
                scales,
                products,
                is_alone,
                ..
            } => Variant::Sm90Decode {
                keys,
                heads,
                scales,
                products,
                tokens: Tokens::New,
                is_alone,
            },
            other => other,
        }
    }

    /// The variant of a row that has no twin with its keys in the other way; itself where that is never compiled apart.
    pub const fn alone(self) -> Variant {
        match self {
            Variant::Sm90Decode {
                keys,
                heads,
                scales,
                products,
                tokens,
                ..
            } => Variant::Sm90Decode {
                keys,
                heads,
                scales,
                products,
                tokens,
                is_alone: true,
            },
            other => other,
        }
    }

    /// Whether a row of the variant, compiled for these types, takes queries of another. Those in fp8 become fp16, which
    /// holds every number of theirs, when a kernel over an fp8 cache loads them. (Hopper's prefill reads queries by TMA.)
    /// Rows of queries in bf16 are divided so that fp16 holds them, by the same kernels, by Hopper's prefill, and by Hopper's
    /// decode over other elements of 8 bits or less.
    fn converts(self, types: AttentionTypes, q: DType) -> bool {
        let over_fp8 = types.q == DType::F16 && types.kv.is_fp8();
        let (widens_fp8, narrows_bf16) = (over_fp8 && q.is_fp8(), over_fp8 && q == DType::BF16);
        match self {
            // Tiles whose rows the warps divide have a variant for bf16.
            Variant::Generic { warps_m, .. } if warps_m > 1 => widens_fp8,
            Variant::Generic { .. }
            | Variant::Sm90Decode {
                scales: CacheScales::Heads,
                ..
            } => widens_fp8 || narrows_bf16,
            Variant::Sm90Decode { .. } => q == DType::BF16,
            Variant::Sm90Prefill { .. } => narrows_bf16,
            _ => false,
        }
    }

    /// Dynamic shared memory beside what all kernels of a source have.
    fn more_shared_bytes(self, types: AttentionTypes, shape: Shape) -> u32 {
        match self {
            Variant::Sm90Decode {
                heads,
                tokens: Tokens::New,
                ..
            } => new_tokens_bytes(heads, types, shape),
            _ => 0,
        }
    }

    /// What the source is told, as `NAME=VALUE`.
    fn defines(self, types: AttentionTypes, shape: Shape) -> Vec<String> {
        match self {
            Variant::Generic {
                warps_m,
                warps_d,
                stages,
            } => vec![
                format!("FOLIO_STAGES={stages}"),
                format!("FOLIO_WARPS_M={warps_m}"),
                format!("FOLIO_WARPS_D={warps_d}"),
            ],
            Variant::GenericStored | Variant::GenericF32 => Vec::new(),
            Variant::Sm90PrefillFp8 { keys } => vec![format!(
                "FOLIO_GATHERED={}",
                u32::from(keys == KeySource::Gather)
            )],
            Variant::Sm90Decode {
                keys,
                heads,
                scales,
                products,
                is_alone,
                ..
            } => {
                let mut defines = vec![
                    format!("FOLIO_DECODE_HEADS={heads}"),
                    format!("FOLIO_CACHE_FORM={}", scales.form()),
                    format!(
                        "FOLIO_DECODE_WARPGROUP={}",
                        u32::from(products == Products::OfWarpgroup)
                    ),
                    format!(
                        "FOLIO_TAKES_NEW_TOKENS={}",
                        u32::from(takes_new_tokens(scales, products, types, shape))
                    ),
                    format!(
                        "FOLIO_NEW_TOKENS_BYTES={}",
                        new_tokens_bytes(heads, types, shape)
                    ),
                ];
                if products == Products::OfWarps {
                    let has = |other| u32::from(keys == other || !is_alone);
                    defines.push(format!("FOLIO_BY_TMA={}", has(KeySource::Tma)));
                    defines.push(format!("FOLIO_GATHERED={}", has(KeySource::Gather)));
                }
                defines
            }
            Variant::Sm90Prefill {
                kv,
                parts,
                masks,
                logits,
            } => vec![
                format!("FOLIO_KV_ROWS={}", kv.number()),
                format!("FOLIO_ROPE_DIM={}", parts.rope_dim()),
                format!("FOLIO_AFTER={}", u32::from(parts == KeyParts::TwoAfter)),
                format!("FOLIO_MASKED={}", u32::from(masks == Masks::Any)),
                format!("FOLIO_LOGITS={}", logits.number()),
            ],
        }
    }

    /// The last part of a row's name, where rows differ in nothing else that the name says.
    fn suffix(self) -> Option<String> {
        match self {
            Variant::Generic { .. } | Variant::GenericF32 => None,
            Variant::GenericStored => Some("stored".into()),
            Variant::Sm90PrefillFp8 { keys } => Some(
                match keys {
                    KeySource::Tma => "paged",
                    KeySource::Gather => "rows",
                }
                .into(),
            ),
            Variant::Sm90Decode {
                keys,
                scales,
                products,
                tokens,
                ..
            } => {
                let keys = match keys {
                    KeySource::Tma => "tma",
                    KeySource::Gather => "gather",
                };
                let products = match products {
                    Products::OfWarps => "",
                    Products::OfWarpgroup => "warpgroup_",
                };
                let tokens = match tokens {
                    Tokens::Cached => "",
                    Tokens::New => "new_tokens_",
                };
                Some(format!("{}{products}{tokens}{keys}", scales.prefix()))
            }
            Variant::Sm90Prefill {
                kv,
                parts,
                masks,
                logits,
            } => {
                let parts = parts.suffix();
                let masks = if masks == Masks::Any { "_masked" } else { "" };
                Some(format!("{}{parts}{masks}{}", kv.name(), logits.suffix()))
            }
        }
    }
}

/// Shared memory of what a block makes of new tokens: padded queries, keys and values, and a word for each; in the kernel too.
fn new_tokens_bytes(heads: u32, types: AttentionTypes, shape: Shape) -> u32 {
    let dim = shape.head_dim_qk;
    let of_row = 2 * dim + 16 + 2 * dim * types.kv.size() as u32;
    shape.q_tile * (heads * of_row + 4)
}

/// Whether a source has the kernel that makes queries and keys of new tokens. No column is masked: problems have just these head
/// dims. More than eight rows over fp8 are the warpgroup's; more of 256
/// columns, and pairs of them over fp8, leave no shared memory.
pub(super) fn takes_new_tokens(
    scales: CacheScales,
    products: Products,
    types: AttentionTypes,
    shape: Shape,
) -> bool {
    let most_rows = match (types.kv.is_fp8(), shape.head_dim_qk) {
        (false, 64 | 128) => 16,
        (true, 64 | 128) | (false, MOST_HEAD_DIM) => 8,
        _ => 0,
    };
    (scales, products) == (CacheScales::Heads, Products::OfWarps)
        && shape.q_tile <= most_rows
        && shape.head_dim_qk == shape.head_dim_vo
}

/// Element types.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct AttentionTypes {
    /// Of q.
    pub q: DType,
    /// Of k and v.
    pub kv: DType,
    /// Of o.
    pub o: DType,
}

/// One size that a family is compiled for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    /// Elements of a q or k row.
    pub head_dim_qk: u32,
    /// Elements of a v or o row.
    pub head_dim_vo: u32,
    /// Query rows of a block.
    pub q_tile: u32,
    /// Keys of a step.
    pub kv_tile: u32,
    /// Threads of a block.
    pub threads: u32,
}

/// How a row's dims relate to a problem's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fit {
    /// They are equal.
    Exact,
    /// The problem's may be smaller: the kernel masks the rest.
    UpTo,
}

/// Rows that differ in types and shape only. Every combination is a row.
pub struct Family {
    /// How the tile is divided.
    pub phase: Phase,
    /// Which kernel.
    pub variant: Variant,
    /// What it is written for.
    pub arch: Arch,
    /// File, relative to `kernels/`.
    pub source: &'static str,
    /// The `extern "C" __global__` function.
    pub symbol: &'static str,
    /// Element types.
    pub types: &'static [AttentionTypes],
    /// The kernels take the type of o at run time: `o` of the types is not asked for, and `FOLIO_O` is
    /// not defined.
    pub any_output: bool,
    /// Sizes.
    pub shapes: &'static [Shape],
    /// How the dims are meant.
    pub fit: Fit,
    /// Dynamic shared memory in bytes.
    pub shared_bytes: fn(AttentionTypes, Shape) -> u32,
    /// Compiled ahead of time; otherwise where NVRTC is found at run time.
    pub bundled: bool,
}

/// One variant.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AttentionRow {
    /// The code.
    pub row: Row,
    /// How the tile is divided.
    pub phase: Phase,
    /// Which kernel.
    pub variant: Variant,
    /// Element types.
    pub types: AttentionTypes,
    /// The type of o is whatever the problem says.
    pub any_output: bool,
    /// Sizes.
    pub shape: Shape,
    /// How the dims are meant.
    pub fit: Fit,
}

impl AsRef<Row> for AttentionRow {
    fn as_ref(&self) -> &Row {
        &self.row
    }
}

/// What a problem asks of a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AttentionQuery {
    /// How its rows are divided.
    pub phase: Phase,
    /// The device's.
    pub compute_capability: (u32, u32),
    /// Element types.
    pub types: AttentionTypes,
    /// Elements of a q or k row.
    pub head_dim_qk: u32,
    /// Elements of a v or o row.
    pub head_dim_vo: u32,
}

impl Family {
    pub(super) fn rows(&self) -> impl Iterator<Item = AttentionRow> + '_ {
        self.types
            .iter()
            .flat_map(move |&types| self.shapes.iter().map(move |&shape| self.row(types, shape)))
    }

    fn row(&self, types: AttentionTypes, shape: Shape) -> AttentionRow {
        let shared_bytes = (self.shared_bytes)(types, shape);
        let o = (!self.any_output).then_some(types.o);
        let mut defines = defines((types.q, types.kv, o), &shape.sizes(), shared_bytes);
        defines.extend(self.variant.defines(types, shape));
        AttentionRow {
            row: Row {
                name: self.row_name(types, shape),
                operator: self.phase.name(),
                arch: self.arch,
                source: self.source,
                symbol: self.symbol,
                defines,
                threads: shape.threads,
                shared_bytes: shared_bytes + self.variant.more_shared_bytes(types, shape),
                bundled: self.bundled,
            },
            phase: self.phase,
            variant: self.variant,
            types,
            any_output: self.any_output,
            shape,
            fit: self.fit,
        }
    }

    fn row_name(&self, types: AttentionTypes, shape: Shape) -> String {
        let mut parts = Vec::new();
        if types.o != types.q && !self.any_output {
            parts.push(format!("o{}", type_name(types.o)));
        }
        parts.push(format!("d{}", shape.head_dim_qk));
        if shape.head_dim_vo != shape.head_dim_qk {
            parts.push(format!("dv{}", shape.head_dim_vo));
        }
        parts.push(format!("q{}", shape.q_tile));
        parts.extend(self.variant.suffix());
        name(self.phase.name(), self.arch, (types.q, types.kv), &parts)
    }
}

impl Shape {
    fn sizes(&self) -> Sizes {
        Sizes {
            head_dim_qk: self.head_dim_qk,
            head_dim_vo: self.head_dim_vo,
            q_tile: self.q_tile,
            kv_tile: self.kv_tile,
            threads: self.threads,
        }
    }
}

impl AttentionRow {
    pub(super) fn fits(&self, query: &AttentionQuery) -> bool {
        self.phase == query.phase
            && (self.types.q == query.types.q || self.variant.converts(self.types, query.types.q))
            && self.types.kv == query.types.kv
            && (self.any_output || self.types.o == query.types.o)
            && self.row.arch.runs_on(query.compute_capability)
            && self.fit.accepts(self.shape.head_dim_qk, query.head_dim_qk)
            && self.fit.accepts(self.shape.head_dim_vo, query.head_dim_vo)
    }
}

impl Fit {
    fn accepts(self, row: u32, problem: u32) -> bool {
        match self {
            Fit::Exact => row == problem,
            Fit::UpTo => row >= problem,
        }
    }
}

/// Types of a family whose q, kv and o are the same.
pub(super) const fn same(dtype: DType) -> AttentionTypes {
    cached(dtype, dtype)
}

/// Types of a family whose k and v are stored in a type of their own.
pub(super) const fn cached(q: DType, kv: DType) -> AttentionTypes {
    AttentionTypes { q, kv, o: q }
}

/// The 16-bit types.
pub(super) const HALF: &[AttentionTypes] = &[same(DType::BF16), same(DType::F16)];

/// What rows of the kernels say that take caches in other forms than plain rows: bytes, whatever the elements are.
pub const STORED: DType = DType::U8;

/// The 16-bit types over such caches.
pub(super) const HALF_STORED: &[AttentionTypes] =
    &[cached(DType::BF16, STORED), cached(DType::F16, STORED)];

/// fp16 over fp8 keys and values, where rows take queries of other types too.
pub(super) const F16_FP8: &[AttentionTypes] = &[
    cached(DType::F16, DType::F8E4M3),
    cached(DType::F16, DType::F8E5M2),
];

/// The same over the fp8 that caches mostly are in.
pub(super) const F16_E4M3: &[AttentionTypes] = &[cached(DType::F16, DType::F8E4M3)];

/// The 16-bit types over fp8 keys and values.
pub(super) const HALF_FP8: &[AttentionTypes] = &[
    cached(DType::BF16, DType::F8E4M3),
    cached(DType::F16, DType::F8E4M3),
    cached(DType::BF16, DType::F8E5M2),
    cached(DType::F16, DType::F8E5M2),
];
