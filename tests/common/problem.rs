//! A whole attention problem as plain data: shapes, lengths, where memory lies, and what one layer adds.
//! No memory and no values here: `values` draws numbers from the seed, `instance` lays them out.

use folio::dtype::DType;
use folio::problem::{AttentionDesc, CacheForm, Kind, KvLayout, KvStorage, LogBase, MaskColumns};

/// One attention problem.
#[derive(Debug, Clone)]
pub struct Problem {
    pub kind: Kind,
    pub q_dtype: DType,
    pub kv_dtype: DType,
    /// How rows of the cache are stored. Others than `Plain` are paged, and keys are whole.
    pub form: CacheForm,
    pub o_dtype: DType,
    pub num_kv_heads: u32,
    pub group_size: u32,
    pub head_dim_qk: u32,
    pub head_dim_vo: u32,
    /// Keys are in two parts. Prefill only.
    pub split_keys: Option<SplitKeys>,
    pub storage: Storage,
    pub requests: Vec<Request>,
    /// Decode and MLA: `qo_indptr` is left out and `qo_len` stated instead, where all are equal.
    pub uniform_rows: bool,
    /// Index tensors are int64.
    pub wide_indices: bool,
    pub memory: MemoryShape,
    pub layer: Layer,
    pub batch_invariant: bool,
    pub fp8_products: bool,
    pub graph: bool,
    /// The maxima of the desc exceed what the batch needs.
    pub slack: bool,
    /// The keys of the query rows, each request's last, are beside the cache, in this type. Prefill over pages, and no
    /// request has fewer keys than rows.
    pub new_kv: Option<DType>,
    /// Attention is over what the cache holds rounded to the type of q, to as many bits but within no range.
    pub rounds_rows: bool,
    /// What the cache holds is so many powers of two larger. Only where its scales are float32, for numbers of any size.
    pub cache_exponent: i32,
    /// Queries of even and of odd heads are so many powers of two larger.
    pub query_exponents: [i32; 2],
    pub values: ValueRows,
    pub seed: u64,
}

/// What rows of V hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ValueRows {
    /// Normal numbers: a long row's output is close to 0 whichever rows it is made from.
    Normal,
    /// A single 1, in a column of the key's: an output element is the weight of few keys, so that one wrong row
    /// among thousands shows in every type.
    OneHot,
}

/// The tag of requests whose queries are NaN.
pub const NAN_QUERIES: u64 = u64::MAX;

/// One request. Requests of equal tags hold the same numbers, in whatever batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Request {
    pub qo_len: u32,
    pub kv_len: u32,
    pub tag: u64,
}

/// The last elements of all heads' keys, in a tensor of their own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SplitKeys {
    /// Elements of its rows.
    pub rope_dim: u32,
    /// It has a dimension of one head.
    pub has_head: bool,
}

/// Where keys and values are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Storage {
    Ragged,
    Paged {
        page_size: u32,
        layout: KvLayout,
        form: TableForm,
        /// Pages of the cache that no request owns.
        unused_pages: u32,
        /// Leading full pages that every request shares with the first.
        shared_pages: u32,
    },
}

/// How a batch states its page table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TableForm {
    /// `kv_indptr`, `kv_indices`, `last_page_len`.
    CsrLastPageLen,
    /// `kv_indptr`, `kv_indices`, `kv_len`, with ids of pages that no key has reached yet.
    CsrKvLen { spare_pages: u32 },
    /// `block_table`, `kv_len`, with columns that no key has reached yet.
    BlockTable { spare_columns: u32 },
    /// `kv_indptr`, `kv_indices` of single tokens; caches of rank 3. Needs page size 1.
    TokenSlots,
}

/// Elements between the parts of a tensor, from the inside out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Gaps {
    pub inner: u32,
    pub middle: u32,
    pub outer: u32,
    /// Elements before the first one: takes away the allocation's alignment.
    pub lead: u32,
}

/// Gaps of every tensor, and rows beyond the batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct MemoryShape {
    pub q: Gaps,
    pub k: Gaps,
    pub k_rope: Gaps,
    pub v: Gaps,
    pub o: Gaps,
    pub lse: Gaps,
    /// lse lies in memory as `[head, token]`.
    pub lse_head_major: bool,
    /// Rows of q, o and lse beyond the batch.
    pub padded_rows: u32,
}

/// What may differ between the layers that share a plan.
#[derive(Debug, Clone, PartialEq)]
pub struct Layer {
    pub mask: MaskKind,
    pub mask_columns: MaskColumns,
    /// The requests' custom masks lie with gaps, the last first, and a tensor says where.
    pub masks_apart: bool,
    pub window: Option<(i32, i32)>,
    /// Keys of a chunk, and chunks to look back.
    pub chunks: Option<(u32, u32)>,
    /// mm-prefix ranges per request; 0 leaves the tensor out.
    pub mm_prefix_ranges: u32,
    pub mm_prefix_in_window: bool,
    pub alibi: Option<Alibi>,
    /// Every request has slopes of its own.
    pub alibi_by_request: bool,
    pub bias: Option<Bias>,
    pub sinks: bool,
    pub sm_scale: f32,
    pub q_scale: f32,
    pub k_scale: f32,
    pub v_scale: f32,
    pub q_scales: HeadScales,
    pub k_scales: HeadScales,
    pub v_scales: HeadScales,
    pub o_scale: f32,
    /// A tensor divides the output as well, if that is fp8.
    pub o_scales: bool,
    pub logits_soft_cap: f32,
    pub lse: Option<LogBase>,
    pub lse_dtype: DType,
    /// Draws this layer's numbers apart from those of other layers.
    pub tag: u64,
}

/// The base mask.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum MaskKind {
    Causal,
    Full,
    /// Some requests are causal.
    CausalByRequest,
    Bytes(Pattern),
    Bits(Pattern),
    /// A prefix, and items that see themselves and it.
    Items,
}

impl MaskKind {
    /// Whether it is in memory, a mark per row and key.
    pub fn is_custom(self) -> bool {
        matches!(self, MaskKind::Bytes(_) | MaskKind::Bits(_))
    }
}

/// What a custom mask lets see.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Pattern {
    /// Each key with this probability.
    Random(f32),
    /// What a causal mask lets see.
    Causal,
    /// All but every seventh key from this one on, which no row sees.
    Holes(u32),
    /// Keys from the first to below the second fraction of the request, in 1/256.
    Range(u32, u32),
    /// A draft tree: the keys before the draft, and the ancestors of the row (node `i` hangs under
    /// `(i - 1) / 2`).
    Tree,
}

/// Which form of ALiBi.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Alibi {
    Linear,
    Sqrt,
}

/// Numbers that are added to logits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bias {
    pub dtype: DType,
    pub heads: BiasHeads,
    /// Rows count within a request.
    pub request_rows: bool,
    /// Columns are the new keys.
    pub new_keys: bool,
    /// Rows lie side by side in memory.
    pub transposed: bool,
    /// Rows and columns beyond the batch's, and elements between rows and heads.
    pub spare: u32,
    /// Rows and columns that it has, and no more: for lengths on a device.
    pub reach: Option<u32>,
}

/// A bias's dimension of heads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BiasHeads {
    Absent,
    One,
    Each,
}

/// A scale tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HeadScales {
    Absent,
    One,
    PerHead,
    /// One for each KV head of each request.
    PerRequest,
}

impl Layer {
    /// Causal attention with nothing added.
    pub fn plain() -> Layer {
        Layer {
            mask: MaskKind::Causal,
            mask_columns: MaskColumns::Keys,
            masks_apart: false,
            window: None,
            chunks: None,
            mm_prefix_ranges: 0,
            mm_prefix_in_window: false,
            alibi: None,
            alibi_by_request: false,
            bias: None,
            sinks: false,
            sm_scale: 0.0,
            q_scale: 0.0,
            k_scale: 0.0,
            v_scale: 0.0,
            q_scales: HeadScales::Absent,
            k_scales: HeadScales::Absent,
            v_scales: HeadScales::Absent,
            o_scale: 0.0,
            o_scales: false,
            logits_soft_cap: 0.0,
            lse: Some(LogBase::E),
            lse_dtype: DType::F32,
            tag: 0,
        }
    }
}

impl Problem {
    /// Prefill over NHD pages of 16, compact memory, 8 over 2 heads of 64, fp32; to be changed field by
    /// field. `lens` are `(qo_len, kv_len)`.
    pub fn plain(lens: &[(u32, u32)]) -> Problem {
        let requests = lens
            .iter()
            .zip(1..)
            .map(|(&(qo_len, kv_len), tag)| Request {
                qo_len,
                kv_len,
                tag,
            });
        Problem {
            kind: Kind::Prefill,
            q_dtype: DType::F32,
            kv_dtype: DType::F32,
            form: CacheForm::Plain,
            o_dtype: DType::F32,
            num_kv_heads: 2,
            group_size: 4,
            head_dim_qk: 64,
            head_dim_vo: 64,
            split_keys: None,
            storage: Storage::paged(16),
            requests: requests.collect(),
            uniform_rows: false,
            wide_indices: false,
            memory: MemoryShape::default(),
            layer: Layer::plain(),
            batch_invariant: false,
            fp8_products: false,
            graph: false,
            slack: false,
            new_kv: None,
            rounds_rows: false,
            cache_exponent: 0,
            query_exponents: [0; 2],
            values: ValueRows::Normal,
            seed: 1,
        }
    }

    /// The same with all of q, k, v and o of this type.
    pub fn of(self, dtype: DType) -> Problem {
        Problem {
            q_dtype: dtype,
            kv_dtype: dtype,
            o_dtype: dtype,
            ..self
        }
    }

    /// The same with these heads.
    pub fn heads(self, num_qo_heads: u32, num_kv_heads: u32, head_dim: u32) -> Problem {
        Problem {
            num_kv_heads,
            group_size: num_qo_heads / num_kv_heads,
            head_dim_qk: head_dim,
            head_dim_vo: head_dim,
            ..self
        }
    }

    /// The same batch with another layer.
    pub fn with_layer(&self, layer: Layer) -> Problem {
        Problem {
            layer,
            ..self.clone()
        }
    }

    /// The same over a cache of another form.
    pub fn stored(self, form: CacheForm, kv_dtype: DType) -> Problem {
        Problem {
            form,
            kv_dtype,
            ..self
        }
    }

    /// Only request `b`.
    pub fn alone(&self, b: usize) -> Problem {
        Problem {
            requests: vec![self.requests[b]],
            ..self.clone()
        }
    }

    /// The same with the last elements of keys in a tensor of their own.
    pub fn split(self, rope_dim: u32) -> Problem {
        Problem {
            split_keys: Some(SplitKeys {
                rope_dim,
                has_head: false,
            }),
            ..self
        }
    }

    /// The same with the keys of the query rows beside the cache.
    pub fn extend(self, new_kv: DType) -> Problem {
        Problem {
            new_kv: Some(new_kv),
            ..self
        }
    }

    /// Keys of request `b` that are in the cache, its first ones.
    pub fn cached_len(&self, b: usize) -> u32 {
        let request = self.requests[b];
        match self.new_kv {
            None => request.kv_len,
            Some(_) => request.kv_len - request.qo_len,
        }
    }

    /// The type of key `j` of request `b`, where it is beside the cache.
    pub fn new_kv_of(&self, b: usize, j: usize) -> Option<DType> {
        self.new_kv.filter(|_| j >= self.cached_len(b) as usize)
    }

    /// Elements of keys that all heads share; 0 where keys are whole.
    pub fn rope_dim(&self) -> u32 {
        self.split_keys.map_or(0, |split| split.rope_dim)
    }

    pub fn num_qo_heads(&self) -> u32 {
        self.num_kv_heads * self.group_size
    }

    /// Query rows of the batch.
    pub fn num_tokens(&self) -> usize {
        self.requests.iter().map(|r| r.qo_len as usize).sum()
    }

    /// First row of each request, and the number of rows.
    pub fn qo_indptr(&self) -> Vec<i32> {
        offsets(self.requests.iter().map(|r| r.qo_len))
    }

    /// First key of each request in ragged K and V, and the number of keys.
    pub fn token_indptr(&self) -> Vec<i32> {
        offsets(self.requests.iter().map(|r| r.kv_len))
    }

    pub fn page_size(&self) -> u32 {
        match self.storage {
            Storage::Ragged => 1,
            Storage::Paged { page_size, .. } => page_size,
        }
    }

    /// Rows of every request where `qo_indptr` is to be left out.
    pub fn stated_qo_len(&self) -> Option<u32> {
        let first = self.requests.first()?.qo_len;
        let equal = self.requests.iter().all(|r| r.qo_len == first);
        (self.uniform_rows && self.kind != Kind::Prefill && equal && first > 0).then_some(first)
    }

    /// Page ids of the table, those that no key has reached included: copies of int64 on a device need room for all.
    fn most_page_ids(&self) -> u64 {
        let pages = |r: &Request| u64::from(r.kv_len.div_ceil(self.page_size()));
        let in_use: u64 = self.requests.iter().map(pages).sum();
        let count = self.requests.len() as u64;
        match self.storage {
            Storage::Paged { form, .. } => match form {
                TableForm::CsrKvLen { spare_pages } => {
                    in_use + (count + 1) * u64::from(spare_pages)
                }
                TableForm::BlockTable { spare_columns } => {
                    let most = self.requests.iter().map(pages).max().unwrap_or(0);
                    count * (most + u64::from(spare_columns))
                }
                _ => in_use,
            },
            Storage::Ragged => 0,
        }
    }

    /// The layer's window, where plans take one and nothing lets the layer see further.
    pub fn window_to_plan_for(&self) -> Option<u32> {
        let layer = &self.layer;
        let sees_further = layer.mm_prefix_ranges > 0 && !layer.mm_prefix_in_window;
        if self.kind == Kind::Mla || self.new_kv.is_some() || sees_further {
            return None;
        }
        layer.window.and_then(|(left, _)| u32::try_from(left).ok())
    }

    /// The desc that fits the batch.
    pub fn desc(&self) -> AttentionDesc {
        let slack = if self.slack { 3 } else { 0 };
        let most = |f: fn(&Request) -> u32| self.requests.iter().map(f).max().unwrap_or(0).max(1);
        let num_pages: u64 = (0..self.requests.len())
            .map(|b| u64::from(self.cached_len(b).div_ceil(self.page_size())))
            .sum();
        AttentionDesc {
            kind: self.kind,
            q_dtype: self.q_dtype,
            kv_format: self.form.of(self.kv_dtype),
            o_dtype: self.o_dtype,
            num_qo_heads: self.num_qo_heads(),
            num_kv_heads: self.num_kv_heads,
            head_dim_qk: self.head_dim_qk,
            head_dim_vo: self.head_dim_vo,
            kv: match self.storage {
                Storage::Ragged => KvStorage::Ragged,
                Storage::Paged {
                    page_size, layout, ..
                } => KvStorage::Paged { page_size, layout },
            },
            max_batch_size: (self.requests.len() as u32).max(1) + slack,
            max_qo_len: most(|r| r.qo_len) + slack,
            max_num_tokens: match self.kind {
                Kind::Decode => 0,
                Kind::Prefill | Kind::Mla => (self.num_tokens() as u32).max(1) + slack,
            },
            max_kv_len: most(|r| r.kv_len) + slack,
            max_num_pages: match self.slack {
                _ if self.wide_indices => self.most_page_ids().max(1),
                true => 0,
                false => num_pages.max(1),
            },
            graph: self.graph,
            batch_invariant: self.batch_invariant,
            fp8_products: self.fp8_products,
            mask_items: self.layer.mask == MaskKind::Items && self.new_kv.is_none(),
            shared_levels: 0,
            new_kv: self.new_kv,
        }
    }
}

impl Storage {
    /// NHD pages behind a CSR table, nothing unused.
    pub fn paged(page_size: u32) -> Storage {
        Storage::Paged {
            page_size,
            layout: KvLayout::Nhd,
            form: TableForm::CsrLastPageLen,
            unused_pages: 0,
            shared_pages: 0,
        }
    }
}

fn offsets(lens: impl Iterator<Item = u32>) -> Vec<i32> {
    let mut indptr = vec![0];
    for len in lens {
        indptr.push(indptr[indptr.len() - 1] + len as i32);
    }
    indptr
}
