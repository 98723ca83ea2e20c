//! The descs of decode and prefill: what picks code and bounds memory.

use super::sized::Input;
use super::types::{FOLIO_KV_PAGED, FOLIO_KV_RAGGED, folio_dtype, layout};
use crate::error::{Error, Result};
use crate::problem::{AttentionDesc, Kind, KvStorage};

/// The plan may be captured in a CUDA graph and planned again for the same graph. No effect on the CPU,
/// whose calls are complete when they return.
pub const FOLIO_PLAN_GRAPH: u32 = 1;
/// A request's result does not depend on the other requests of its batch, to the bit.
pub const FOLIO_PLAN_BATCH_INVARIANT: u32 = 2;

/// What a decode handle is made from: a few query rows per request over a paged cache.
///
/// Types: q float32, float16 or bfloat16; the cache the same type, or float8_e4m3 / float8_e5m2; o the
/// type of q, or fp8. num_qo_heads is a multiple of num_kv_heads; query head h reads KV head
/// h / (num_qo_heads / num_kv_heads). Head dimensions are multiples of 8 up to 256.
/// The maxima bound every later batch and fix the workspace.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct folio_decode_desc {
    /// sizeof(folio_decode_desc).
    pub struct_size: u32,
    /// FOLIO_PLAN_…
    pub flags: u32,
    /// Type of q.
    pub q_dtype: folio_dtype,
    /// Type of the cache; all zero: as q.
    pub kv_dtype: folio_dtype,
    /// Type of o; all zero: as q.
    pub o_dtype: folio_dtype,
    /// FOLIO_LAYOUT_NHD or FOLIO_LAYOUT_HND.
    pub kv_layout: i32,
    /// Query (and output) heads.
    pub num_qo_heads: u32,
    /// KV heads.
    pub num_kv_heads: u32,
    /// Elements of a q or k row.
    pub head_dim_qk: u32,
    /// Elements of a v or o row; 0: head_dim_qk.
    pub head_dim_vo: u32,
    /// Tokens per page, 1 or more.
    pub page_size: u32,
    /// Most requests of a batch.
    pub max_batch_size: u32,
    /// Most query rows of a request; 0: 1.
    pub max_qo_len: u32,
    /// Most keys of a request.
    pub max_kv_len: u32,
    /// Most pages of a batch, over all requests; 0: max_batch_size times the pages of max_kv_len.
    pub max_num_pages: u64,
}

/// What a prefill handle is made from: any number of query rows per request, over a paged cache or over
/// ragged K and V. Mixed batches (prefill, chunked prefill, decode, speculative verify) are one batch.
/// Types, heads and dimensions as in folio_decode_desc.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct folio_prefill_desc {
    /// sizeof(folio_prefill_desc).
    pub struct_size: u32,
    /// FOLIO_PLAN_…
    pub flags: u32,
    /// Type of q.
    pub q_dtype: folio_dtype,
    /// Type of k and v; all zero: as q.
    pub kv_dtype: folio_dtype,
    /// Type of o; all zero: as q.
    pub o_dtype: folio_dtype,
    /// FOLIO_LAYOUT_NHD or FOLIO_LAYOUT_HND; 0 for ragged.
    pub kv_layout: i32,
    /// Query (and output) heads.
    pub num_qo_heads: u32,
    /// KV heads.
    pub num_kv_heads: u32,
    /// Elements of a q or k row.
    pub head_dim_qk: u32,
    /// Elements of a v or o row; 0: head_dim_qk.
    pub head_dim_vo: u32,
    /// FOLIO_KV_PAGED or FOLIO_KV_RAGGED.
    pub kv_storage: i32,
    /// Tokens per page, 1 or more; 0 for ragged.
    pub page_size: u32,
    /// Most requests of a batch.
    pub max_batch_size: u32,
    /// Most query rows of a batch, over all requests.
    pub max_num_tokens: u32,
    /// Most query rows of a request; 0: max_num_tokens.
    pub max_qo_len: u32,
    /// Most keys of a request.
    pub max_kv_len: u32,
    /// Most pages of a batch, over all requests; 0: max_batch_size times the pages of max_kv_len.
    pub max_num_pages: u64,
}

const _: () = assert!(size_of::<folio_decode_desc>() == 64);
const _: () = assert!(size_of::<folio_prefill_desc>() == 72);

// SAFETY: repr(C), two u32 first, integers only, no padding (asserted by size).
unsafe impl Input for folio_decode_desc {
    const NAME: &'static str = "folio_decode_desc";
    const FIRST_SIZE: usize = 64;
    const FLAGS: u32 = FOLIO_PLAN_GRAPH | FOLIO_PLAN_BATCH_INVARIANT;
}

// SAFETY: as above.
unsafe impl Input for folio_prefill_desc {
    const NAME: &'static str = "folio_prefill_desc";
    const FIRST_SIZE: usize = 72;
    const FLAGS: u32 = FOLIO_PLAN_GRAPH | FOLIO_PLAN_BATCH_INVARIANT;
}

impl folio_decode_desc {
    pub(super) fn parse(&self) -> Result<AttentionDesc> {
        let q_dtype = self.q_dtype.parse("q_dtype")?;
        Ok(AttentionDesc {
            kind: Kind::Decode,
            q_dtype,
            kv_dtype: self.kv_dtype.parse_or("kv_dtype", q_dtype)?,
            o_dtype: self.o_dtype.parse_or("o_dtype", q_dtype)?,
            num_qo_heads: self.num_qo_heads,
            num_kv_heads: self.num_kv_heads,
            head_dim_qk: self.head_dim_qk,
            head_dim_vo: or(self.head_dim_vo, self.head_dim_qk),
            kv: KvStorage::Paged {
                page_size: self.page_size,
                layout: layout("kv_layout", self.kv_layout)?,
            },
            max_batch_size: self.max_batch_size,
            max_qo_len: or(self.max_qo_len, 1),
            max_num_tokens: 0,
            max_kv_len: self.max_kv_len,
            max_num_pages: self.max_num_pages,
            graph: self.flags & FOLIO_PLAN_GRAPH != 0,
            batch_invariant: self.flags & FOLIO_PLAN_BATCH_INVARIANT != 0,
        })
    }
}

impl folio_prefill_desc {
    pub(super) fn parse(&self) -> Result<AttentionDesc> {
        let q_dtype = self.q_dtype.parse("q_dtype")?;
        Ok(AttentionDesc {
            kind: Kind::Prefill,
            q_dtype,
            kv_dtype: self.kv_dtype.parse_or("kv_dtype", q_dtype)?,
            o_dtype: self.o_dtype.parse_or("o_dtype", q_dtype)?,
            num_qo_heads: self.num_qo_heads,
            num_kv_heads: self.num_kv_heads,
            head_dim_qk: self.head_dim_qk,
            head_dim_vo: or(self.head_dim_vo, self.head_dim_qk),
            kv: self.storage()?,
            max_batch_size: self.max_batch_size,
            max_qo_len: self.max_qo_len,
            max_num_tokens: self.max_num_tokens,
            max_kv_len: self.max_kv_len,
            max_num_pages: self.max_num_pages,
            graph: self.flags & FOLIO_PLAN_GRAPH != 0,
            batch_invariant: self.flags & FOLIO_PLAN_BATCH_INVARIANT != 0,
        })
    }

    fn storage(&self) -> Result<KvStorage> {
        match self.kv_storage {
            FOLIO_KV_PAGED => Ok(KvStorage::Paged {
                page_size: self.page_size,
                layout: layout("kv_layout", self.kv_layout)?,
            }),
            FOLIO_KV_RAGGED => {
                unused("page_size", self.page_size.into())?;
                unused("kv_layout", self.kv_layout.into())?;
                unused(
                    "max_num_pages",
                    i64::try_from(self.max_num_pages).unwrap_or(i64::MAX),
                )?;
                Ok(KvStorage::Ragged)
            }
            other => Err(Error::InvalidArgument(format!(
                "kv_storage: {other} is not accepted; FOLIO_KV_PAGED (0) or FOLIO_KV_RAGGED (1) is"
            ))),
        }
    }
}

/// `value`, or what 0 stands for.
fn or(value: u32, default: u32) -> u32 {
    if value == 0 { default } else { value }
}

fn unused(name: &str, value: i64) -> Result<()> {
    if value == 0 {
        return Ok(());
    }
    Err(Error::InvalidArgument(format!(
        "{name}: {value} is not accepted with FOLIO_KV_RAGGED; 0 is"
    )))
}
