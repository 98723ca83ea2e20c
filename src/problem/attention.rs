//! One attention problem: what picks code ([`AttentionDesc`]) and what may change from layer to layer
//! ([`AttentionArgs`]).

use super::{CacheFormat, RowTensors};
use crate::dtype::DType;
use crate::tensor::Tensor;
use std::num::NonZeroU32;

/// Which handle the problem belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Kind {
    /// Few query rows per request, over a paged cache.
    Decode,
    /// Any number of query rows per request, over a paged cache or ragged K/V.
    Prefill,
    /// Absorbed multi-head latent attention (DeepSeek-V2): one KV head whose key is a latent row and a rotary row,
    /// and whose value is the latent row. `head_dim_vo` is the latent rank, and what `head_dim_qk` is longer is the
    /// rotary part.
    Mla,
}

/// The order of the two middle dimensions of a paged cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum KvLayout {
    /// `[num_pages, page_size, num_kv_heads, head_dim]`.
    Nhd,
    /// `[num_pages, num_kv_heads, page_size, head_dim]`.
    Hnd,
}

/// Where keys and values come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum KvStorage {
    /// Pages of `page_size` tokens, found through a page table.
    Paged {
        /// Tokens per page.
        page_size: u32,
        /// Dimension order of the cache tensors.
        layout: KvLayout,
    },
    /// `[nnz_kv, num_kv_heads, head_dim]`, the requests one after the other.
    Ragged,
}

impl KvStorage {
    /// Tokens per page; a ragged tensor is one page per token.
    pub fn page_size(self) -> u32 {
        match self {
            KvStorage::Paged { page_size, .. } => page_size,
            KvStorage::Ragged => 1,
        }
    }
}

/// What picks code and bounds memory. Fixed at create.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AttentionDesc {
    /// Whose problem it is.
    pub kind: Kind,
    /// Type of q: fp32, fp16 or bf16; fp8 over caches of fp8.
    pub q_dtype: DType,
    /// How rows of k and v are stored: in the type of q, or in fp8.
    pub kv_format: CacheFormat,
    /// Type of o: that of q, fp32, or fp8 e4m3 / e5m2; where q is fp8 also fp16 and bf16.
    pub o_dtype: DType,
    /// Query heads; a multiple of `num_kv_heads`.
    pub num_qo_heads: u32,
    /// KV heads.
    pub num_kv_heads: u32,
    /// Elements of a q or k row.
    pub head_dim_qk: u32,
    /// Elements of a v or o row.
    pub head_dim_vo: u32,
    /// Paged or ragged.
    pub kv: KvStorage,
    /// Most requests in a batch.
    pub max_batch_size: u32,
    /// Most query rows of one request.
    pub max_qo_len: u32,
    /// Most query rows of a batch.
    pub max_num_tokens: u32,
    /// Most keys of one request.
    pub max_kv_len: u32,
    /// Most page-table entries of a batch.
    pub max_num_pages: u64,
    /// The plan may be captured in a CUDA graph and planned again for the same graph.
    pub graph: bool,
    /// A request's result does not depend on the rest of the batch, to the bit.
    pub batch_invariant: bool,
    /// Probabilities may be rounded to e4m3, where queries and the cache are e4m3. A permission: a backend may do better.
    pub fp8_products: bool,
    /// Runs may have [`Mask::Items`]: backends that compute them by a mask need room for it.
    pub mask_items: bool,
    /// Most levels of keys that several requests share, one within the other: the parts of a query row beside its
    /// request's own. 0 but for cascades.
    pub shared_levels: u32,
    /// Type of the keys and values that are beside the cache, those of each request's query rows, or none: then the cache
    /// has all. Backends know of none; `api` makes problems over one of the two.
    pub new_kv: Option<DType>,
}

impl AttentionDesc {
    /// Query heads per KV head.
    pub fn group_size(&self) -> u32 {
        self.num_qo_heads / self.num_kv_heads
    }

    /// Keys of a batch, at most.
    pub fn most_keys(&self) -> u64 {
        let of_requests = u64::from(self.max_batch_size).saturating_mul(self.max_kv_len.into());
        match self.kv {
            KvStorage::Paged { page_size, .. } => {
                of_requests.min(self.max_num_pages.saturating_mul(page_size.into()))
            }
            KvStorage::Ragged => of_requests,
        }
    }

    /// Columns of a block table that are copied where it is int64 on a device: those that a request may need.
    pub fn copied_columns(&self, columns: i64) -> i64 {
        columns.min(self.max_kv_len.div_ceil(self.kv.page_size()).into())
    }

    /// Elements of the rotary part of MLA's queries and keys; 0 for other kinds, which do not know of one.
    pub fn rope_dim(&self) -> u32 {
        match self.kind {
            Kind::Mla => self.head_dim_qk - self.head_dim_vo,
            Kind::Decode | Kind::Prefill => 0,
        }
    }

    /// Bytes of a key and its value in one KV head. MLA's value is part of its key.
    pub fn kv_bytes(&self) -> u64 {
        if self.kind == Kind::Mla {
            return self.kv_format.row_bytes(self.head_dim_qk) as u64;
        }
        let rows = [self.head_dim_qk, self.head_dim_vo].map(|dim| self.kv_format.row_bytes(dim));
        (rows[0] + rows[1]) as u64
    }
}

/// Which keys a query row may see, before window and mm-prefix.
#[derive(Debug, Clone, Copy)]
pub enum Mask {
    /// Key `j <= kv_len - qo_len + i`: bottom-right aligned.
    Causal,
    /// Every key.
    Full,
    /// Causal for requests whose element is not 0, full for the others: `[batch_size]` uint8.
    CausalByRequest(Tensor),
    /// One byte per (row, key); non-zero lets see. Per request row-major `[qo_len, kv_len]`, the
    /// requests one after the other.
    Bytes(Tensor),
    /// One bit per (row, key), little-endian within a byte; each request starts on a byte
    /// (FlashInfer's packing).
    Bits(Tensor),
    /// Multi-item scoring: causal, but of the keys from a request's first item on, a row sees those of its own item only.
    /// Key `j <= p` is seen iff `j < start` or `p - j <= position`, the position of the row's token in its item.
    Items {
        /// `[batch_size]` int64: the key that the first item begins with.
        starts: Tensor,
        /// `[batch_size, columns]` int32, of the tokens from `start` on. Without a column a row sees no item.
        positions: Tensor,
    },
}

/// The columns of a custom mask's rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MaskColumns {
    /// The request's keys.
    Keys,
    /// The request's keys; those before its last `qo_len` are seen and their columns not read (SGLang's
    /// skip_prefix_custom_mask).
    KeysAfterPrefix,
    /// The request's last `qo_len` keys; those before them are seen.
    NewKeys,
}

/// Less is added to hide a key, as -inf is: -2^127, which in base 2 is still a number of float32.
pub const LEAST_BIAS: f32 = -f32::from_bits(0x7f00_0000);

/// Numbers that are added to the logits of visible keys, in base e. Those below [`LEAST_BIAS`] hide a key.
#[derive(Debug, Clone, Copy)]
pub struct ScoreBias {
    /// fp32, fp16 or bf16, of any strides: `[rows, columns]` for all heads, or `[num_qo_heads or 1, rows, columns]`.
    /// Checked: of rank 3, and without a stride between heads where there is one. Rows and columns are as many as the
    /// batch's, as far as the host knows them; what only a device knows may lie outside, and adds nothing.
    pub tensor: Tensor,
    /// Rows count within a request, so that all requests share them; otherwise they are the batch's rows.
    pub request_rows: bool,
    /// Columns are a request's last `qo_len` keys, and those before get nothing (vLLM's qq_bias); otherwise they are all
    /// keys.
    pub new_keys: bool,
}

/// Chunked local attention (Llama 4): the row at position `p` sees no key before the chunk that lies `look_back` chunks
/// before its own. Chunks count from the request's first key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AttentionChunks {
    /// Keys of a chunk.
    pub size: NonZeroU32,
    /// Chunks before the row's own.
    pub look_back: u32,
}

/// Sliding window: key `j` is in the window of the row at position `p` iff `p - j <= left` and
/// `j - p <= right`. `None` is unlimited.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Window {
    /// Keys before the row's own position.
    pub left: Option<u32>,
    /// Keys after the row's own position.
    pub right: Option<u32>,
}

/// Base of the logarithm in `lse`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogBase {
    /// Natural logarithm.
    E,
    /// Base 2, as FlashInfer has it.
    Two,
}

/// What rows see beside the keys of a run.
#[derive(Debug, Clone, Copy, Default)]
pub struct Earlier {
    /// What they came to before.
    pub sum: Option<Sum>,
    /// Keys that all of a request's rows see.
    pub context: Option<ContextKeys>,
}

impl Earlier {
    /// Whether rows see no more than the run's keys.
    pub fn is_nothing(&self) -> bool {
        self.sum.is_none() && self.context.is_none()
    }
}

/// Keys in tensors of their own, in front of those of a run over ragged keys in two parts. A plan for such runs has lengths that
/// count them in whole steps of the kernel.
#[derive(Debug, Clone, Copy)]
pub struct ContextKeys {
    /// As the run's: `[rows, 1, num_kv_heads, elements]`.
    pub k: Tensor,
    /// `[rows, 1, 1, elements]`.
    pub k_rope: Tensor,
    /// `[rows, 1, num_kv_heads, head_dim_vo]`.
    pub v: Tensor,
    /// `[batch_size + 1]` int32 on the run's device: the rows of each request.
    pub indptr: Tensor,
}

/// What rows came to over other keys, for a run to add to.
#[derive(Debug, Clone, Copy)]
pub struct Sum {
    /// `[num_tokens, num_qo_heads, head_dim_vo]` fp32, compact. It may be the output of the run.
    pub o: Tensor,
    /// `[num_tokens, num_qo_heads]` fp32, compact, in the base of the run's lse, which it may be. -inf where a row saw no key;
    /// then its `o` is not read.
    pub lse: Tensor,
    /// It ends with this run, whose outputs are elsewhere: afterwards the `lse` of its rows is -inf, for the next sum.
    pub ends: bool,
}

/// Everything that may differ between the layers that share a plan, as the caller states it. The `api` layer
/// checks it and hands it on as [`Checked`](super::Checked), whose notes say what is different then.
#[derive(Debug, Clone, Copy)]
pub struct AttentionArgs {
    /// `[num_tokens or more, num_qo_heads, head_dim_qk]`, unit stride on the last dimension. With `q_rope`: the leading
    /// elements of these rows.
    pub q: Tensor,
    /// MLA: the rotary part of q, `[num_tokens or more, num_qo_heads, rope_dim]`, where there is one.
    pub q_rope: Option<Tensor>,
    /// Paged: `[num_pages, page_size, num_kv_heads, head_dim_qk]` (NHD), `[num_pages, num_kv_heads, page_size,
    /// head_dim_qk]` (HND), or without the page dimension where page_size is 1. Ragged: `[nnz_kv, num_kv_heads,
    /// head_dim_qk]`. Any strides but a unit last one. Checked: `[page, token, head, dim]` in every case, where a
    /// ragged tensor has one token per page. With `k_rope`: the leading elements of these rows. A `fp8_ds_mla` cache:
    /// its records as bytes, `[page, token, 1, 656]`.
    pub k: Tensor,
    /// The last elements of keys in a tensor of their own, as `k` but with a dimension of its own and one head that all
    /// KV heads share; `None` where `k` has whole keys.
    pub k_rope: Option<Tensor>,
    /// As `k`, with `head_dim_vo` and strides of its own. MLA: `k`.
    pub v: Tensor,
    /// `[num_tokens or more, num_qo_heads, head_dim_vo]`.
    pub o: Tensor,
    /// `[num_tokens or more, num_qo_heads]` fp32.
    pub lse: Option<Tensor>,
    /// Base of `lse`.
    pub lse_base: LogBase,
    /// Factor on q·k; 0 means `1 / sqrt(head_dim_qk)`. Checked: never 0.
    pub sm_scale: f32,
    /// Further factor on q·k; 0 means 1. Checked: never 0, as all scales.
    pub q_scale: f32,
    /// Further factor on q·k; 0 means 1.
    pub k_scale: f32,
    /// As `q_scale`, for what is known at run only: `[1]`, `[num_kv_heads]` or `[batch_size, num_kv_heads]` fp32.
    pub q_scales: Option<Tensor>,
    /// As `q_scales`, of k. Formats with scales beside the cache: those scales, as [`RowTensors`] says.
    pub k_scales: Option<Tensor>,
    /// As `k_scales`, where the format has zero points.
    pub k_zero_points: Option<Tensor>,
    /// Factor on the output; 0 means 1.
    pub v_scale: f32,
    /// As `k_scales`, for values.
    pub v_scales: Option<Tensor>,
    /// As `v_scales`, where the format has zero points.
    pub v_zero_points: Option<Tensor>,
    /// What an fp8 output is divided by before it is rounded; 0 means 1.
    pub o_scale: f32,
    /// As `o_scale`, for what is known at run only: `[1]` fp32.
    pub o_scales: Option<Tensor>,
    /// `cap · tanh(s / cap)` after the scale; 0 is off.
    pub logits_soft_cap: f32,
    /// The base mask.
    pub mask: Mask,
    /// Where each request's custom mask starts: `[batch_size + 1]` int64, in bytes. `None`: one after the other.
    pub custom_mask_indptr: Option<Tensor>,
    /// What a custom mask has columns for.
    pub mask_columns: MaskColumns,
    /// Intersected with the base mask.
    pub window: Window,
    /// Intersected with the base mask.
    pub chunks: Option<AttentionChunks>,
    /// `[batch_size, num_ranges, 2]` int32, inclusive, absolute positions: a row and a key inside the
    /// same range see each other whatever mask and window say. A range with start >= end is unused.
    pub mm_prefix_ranges: Option<Tensor>,
    /// Window and chunks hold inside mm-prefix ranges too.
    pub mm_prefix_in_window: bool,
    /// `[num_qo_heads]`, or `[batch_size, num_qo_heads]`, fp32: adds `slope · (j - p)`, or `-slope · sqrt(p - j)` for past keys.
    pub alibi_slopes: Option<Tensor>,
    /// ALiBi takes the square-root form.
    pub alibi_sqrt: bool,
    /// Added after the cap, as ALiBi is.
    pub score_bias: Option<ScoreBias>,
    /// `[num_qo_heads]` fp32: one more logit per head, with no value behind it.
    pub sinks: Option<Tensor>,
    /// Where the desc has `new_kv`: the keys of the query rows, `[num_tokens or more, num_kv_heads, head_dim_qk]`. No scale
    /// of `k` is theirs. Checked: in no run of a backend.
    pub k_new: Option<Tensor>,
    /// As `k_new`, with `head_dim_vo`.
    pub v_new: Option<Tensor>,
}

impl AttentionArgs {
    /// Causal attention and nothing else.
    pub fn new(q: Tensor, k: Tensor, v: Tensor, o: Tensor) -> AttentionArgs {
        AttentionArgs {
            q,
            q_rope: None,
            k,
            k_rope: None,
            v,
            o,
            lse: None,
            lse_base: LogBase::E,
            sm_scale: 0.0,
            q_scale: 0.0,
            k_scale: 0.0,
            q_scales: None,
            k_scales: None,
            k_zero_points: None,
            v_scale: 0.0,
            v_scales: None,
            v_zero_points: None,
            o_scale: 0.0,
            o_scales: None,
            logits_soft_cap: 0.0,
            mask: Mask::Causal,
            custom_mask_indptr: None,
            mask_columns: MaskColumns::Keys,
            window: Window::default(),
            chunks: None,
            mm_prefix_ranges: None,
            mm_prefix_in_window: false,
            alibi_slopes: None,
            alibi_sqrt: false,
            score_bias: None,
            sinks: None,
            k_new: None,
            v_new: None,
        }
    }
}

impl AttentionArgs {
    /// Multi-head latent attention, causal. `q_latent`: `[num_tokens or more, num_heads, kv_lora_rank]`; `q_rope`: the
    /// same with `qk_rope_head_dim`, where that is not 0. `kv`: whole records, or with `kv_rope` their latent part. A
    /// run needs a `sm_scale` as well: that of the model's own heads.
    pub fn mla(
        q_latent: Tensor,
        q_rope: Option<Tensor>,
        kv: Tensor,
        kv_rope: Option<Tensor>,
        o: Tensor,
    ) -> AttentionArgs {
        AttentionArgs {
            q_rope,
            k_rope: kv_rope,
            ..AttentionArgs::new(q_latent, kv, kv, o)
        }
    }
}

impl super::Checked<AttentionArgs> {
    /// The caches of keys and of values.
    pub fn caches(&self, format: CacheFormat) -> [RowTensors; 2] {
        RowTensors::of_both(
            format,
            [self.k, self.v],
            [self.k_scales, self.v_scales],
            [self.k_zero_points, self.v_zero_points],
        )
    }

    /// Scales of q, of k and of v that multiply whole rows.
    pub fn row_scales(&self, format: CacheFormat) -> [Option<Tensor>; 3] {
        let [k, v] = [self.k_scales, self.v_scales].map(|scales| format.head_scales(scales));
        [self.q_scales, k, v]
    }

    /// Some request has scales of its own.
    pub fn has_request_scales(&self, format: CacheFormat) -> bool {
        let mut scales = self.row_scales(format).into_iter().flatten();
        scales.any(|scales| scales.rank() == 2)
    }

    /// Factor on q·k, apart from `q_scales` and `k_scales`.
    pub fn logits_scale(&self) -> f32 {
        self.sm_scale * self.q_scale * self.k_scale
    }
}
