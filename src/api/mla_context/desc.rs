//! Checks of what an MLA context handle is made from, and the attention problems that it consists of.

use crate::api::check::FLOATS;
use crate::api::desc;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::plan::{default_chunk_tokens, most_chunks};
use crate::problem::{AttentionDesc, CacheFormat, Kind, KvLayout, KvStorage, MlaContextDesc};

/// What dimensions are multiples of.
const UNIT: u32 = 8;
/// Widest latent rows.
const MOST_RANK: u32 = 512;

/// A checked desc, and what follows from it.
pub(super) struct Problems {
    pub desc: MlaContextDesc,
    /// Attention of new tokens over themselves, to outputs of the desc's type.
    pub new_tokens: AttentionDesc,
    /// Attention of new tokens over the tokens of a chunk.
    pub chunk: AttentionDesc,
    /// What batches are checked against: requests over pages.
    pub batch: AttentionDesc,
    /// The most chunks of a batch.
    pub most_chunks: usize,
}

impl Problems {
    /// Attention of new tokens over themselves and over the last chunk, whose tokens take whole steps of the kernel.
    pub fn with_last_chunk(&self, step: u32) -> AttentionDesc {
        AttentionDesc {
            max_kv_len: self.new_tokens.max_kv_len.saturating_add(step),
            ..self.new_tokens
        }
    }

    /// Checks a desc and fills in what the caller left 0.
    pub fn of(mut desc: MlaContextDesc) -> Result<Problems> {
        dtypes(&desc)?;
        for (name, dim) in [
            ("kv_lora_rank", desc.kv_lora_rank),
            ("qk_nope_head_dim", desc.qk_nope_head_dim),
            ("qk_rope_head_dim", desc.qk_rope_head_dim),
            ("v_head_dim", desc.v_head_dim),
        ] {
            width(name, dim)?;
        }
        // The chunks follow from the other maxima, which are checked with the problems.
        let batch = desc::check(attention(
            &desc,
            KvStorage::Paged {
                page_size: desc.page_size,
                layout: KvLayout::Nhd,
            },
        ))?;
        let new_tokens = desc::check(attention(&desc, KvStorage::Ragged))?;
        (desc.max_qo_len, desc.max_num_pages) = (batch.max_qo_len, batch.max_num_pages);
        let most_tokens = most_context_tokens(&desc);
        desc.max_chunk_tokens = chunk_tokens(&desc, most_tokens)?;
        let chunk = desc::check(AttentionDesc {
            max_kv_len: desc.max_chunk_tokens,
            o_dtype: DType::F32,
            ..new_tokens
        })?;
        Ok(Problems {
            most_chunks: most_chunks(most_tokens, desc.max_chunk_tokens),
            desc,
            new_tokens,
            chunk,
            batch,
        })
    }
}

/// Multi-head attention with these maxima.
fn attention(desc: &MlaContextDesc, kv: KvStorage) -> AttentionDesc {
    AttentionDesc {
        kind: Kind::Prefill,
        q_dtype: desc.dtype,
        kv_format: desc.dtype.into(),
        o_dtype: desc.dtype,
        num_qo_heads: desc.num_heads,
        num_kv_heads: desc.num_heads,
        head_dim_qk: desc.qk_nope_head_dim.saturating_add(desc.qk_rope_head_dim),
        head_dim_vo: desc.v_head_dim,
        kv,
        max_batch_size: desc.max_batch_size,
        max_qo_len: desc.max_qo_len,
        max_num_tokens: desc.max_num_tokens,
        max_kv_len: desc.max_kv_len,
        max_num_pages: desc.max_num_pages,
        graph: desc.graph,
        batch_invariant: false,
        fp8_products: false,
        mask_items: false,
        shared_levels: 0,
        new_kv: None,
    }
}

/// Tokens that the contexts of a batch may have together.
fn most_context_tokens(desc: &MlaContextDesc) -> u64 {
    let by_requests = u64::from(desc.max_batch_size) * u64::from(desc.max_kv_len);
    by_requests.min(desc.max_num_pages.saturating_mul(desc.page_size.into()))
}

/// No more than there can be.
fn chunk_tokens(desc: &MlaContextDesc, most_tokens: u64) -> Result<u32> {
    let stated = match desc.max_chunk_tokens {
        0 => default_chunk_tokens(desc.max_kv_len, desc.max_batch_size, desc.page_size),
        stated if stated <= i32::MAX as u32 => stated,
        stated => {
            return Err(Error::InvalidArgument(format!(
                "max_chunk_tokens: {stated} is not accepted; 0 (for vLLM's) to {} is",
                i32::MAX
            )));
        }
    };
    let most = u32::try_from(most_tokens).unwrap_or(u32::MAX);
    Ok(stated.min(most).min(i32::MAX as u32))
}

fn dtypes(desc: &MlaContextDesc) -> Result<()> {
    if !FLOATS.contains(&desc.dtype) {
        return Err(Error::Unsupported(format!(
            "dtype: {} is not supported; float32, float16 and bfloat16 are",
            desc.dtype
        )));
    }
    let (cache, element) = (desc.cache, desc.cache.element);
    if cache == CacheFormat::DS_MLA {
        if (desc.kv_lora_rank, desc.qk_rope_head_dim) == (512, 64) {
            return Ok(());
        }
        return Err(Error::Unsupported(format!(
            "kv_lora_rank, qk_rope_head_dim: {}, {} are not supported with fp8_ds_mla; 512, 64 are",
            desc.kv_lora_rank, desc.qk_rope_head_dim
        )));
    }
    if element == desc.dtype || element.is_fp8() {
        return Ok(());
    }
    Err(Error::Unsupported(format!(
        "kv_dtype: {element} is not supported with dtype {}; the same type, float8_e4m3 and float8_e5m2 are",
        desc.dtype
    )))
}

fn width(name: &str, dim: u32) -> Result<()> {
    if (UNIT..=MOST_RANK).contains(&dim) && dim.is_multiple_of(UNIT) {
        return Ok(());
    }
    Err(Error::Unsupported(format!(
        "{name}: {dim} is not supported; multiples of {UNIT} up to {MOST_RANK} are"
    )))
}
