//! Checks of the arguments of a run of an MLA context handle. What the cache holds is checked by the gather.

use crate::api::check::{Extent, Named, finite, optional_lse};
use crate::error::{Error, Result};
use crate::problem::{
    CacheFormat, ChunkRows, LatentCache, MlaContextArgs, MlaContextDesc, Unpacking, UpProjection,
};
use crate::tensor::Device;

/// Checks the arguments for a batch of `num_tokens` new tokens and chunks of up to `chunk_tokens`. Checked: `k_rope` and
/// the chunk's rows without a dimension of heads.
pub(super) fn check(
    args: &MlaContextArgs,
    desc: &MlaContextDesc,
    (num_tokens, chunk_tokens): (i64, i64),
    device: Device,
) -> Result<MlaContextArgs> {
    let [heads, latent, nope, rope, value] = [
        desc.num_heads,
        desc.kv_lora_rank,
        desc.qk_nope_head_dim,
        desc.qk_rope_head_dim,
        desc.v_head_dim,
    ]
    .map(|n| Extent::Is(n.into()));
    let whole = Extent::Is((desc.qk_nope_head_dim + desc.qk_rope_head_dim).into());
    let (tokens, rows) = (Extent::AtLeast(num_tokens), Extent::AtLeast(chunk_tokens));
    let rows_of = |name, tensor, extents: &[Extent]| {
        Named { name, tensor }
            .on(device)?
            .of(desc.dtype)?
            .shaped(extents)?
            .unit_last_stride()
    };
    let input = |name, tensor, extents: &[Extent]| Ok(rows_of(name, tensor, extents)?.tensor);
    let k_rope = match args.k_rope.rank() {
        3 => input("k_rope", args.k_rope, &[tokens, Extent::Is(1), rope])?.remove_dim(1),
        _ => input("k_rope", args.k_rope, &[tokens, rope])?,
    };
    let weight = |name, tensor, extents: &[Extent]| {
        let named = Named { name, tensor }.on(device)?.of(desc.dtype)?;
        Ok::<_, Error>(named.shaped(extents)?.tensor)
    };
    let unpacking = match (args.unpacking, desc.in_steps) {
        (Unpacking::Weights(weights), false) => Unpacking::Weights(UpProjection {
            w_uk: weight("w_uk", weights.w_uk, &[heads, nope, latent])?,
            w_uv: weight("w_uv", weights.w_uv, &[heads, latent, value])?,
        }),
        (Unpacking::Caller(chunk), true) => Unpacking::Caller(ChunkRows {
            latent: rows_of("context_latent", chunk.latent, &[rows, latent])?
                .writable()?
                .tensor,
            rope: rows_of("context_rope", chunk.rope, &[rows, rope])?
                .writable()?
                .tensor,
            k_nope: input("context_k_nope", chunk.k_nope, &[rows, heads, nope])?,
            v: input("context_v", chunk.v, &[rows, heads, value])?,
        }),
        (Unpacking::Caller(_), false) => {
            return Err(Error::InvalidArgument(
                "context_latent: a tensor is not accepted without FOLIO_MLA_CONTEXT_STEPS; NULL is"
                    .into(),
            ));
        }
        (Unpacking::Weights(_), true) => {
            return Err(Error::InvalidArgument(
                "w_uk: a tensor is not accepted with FOLIO_MLA_CONTEXT_STEPS; NULL is".into(),
            ));
        }
    };
    finite("sm_scale", args.sm_scale)?;
    Ok(MlaContextArgs {
        q: input("q", args.q, &[tokens, heads, whole])?,
        k_nope: input("k_nope", args.k_nope, &[tokens, heads, nope])?,
        k_rope,
        v: input("v", args.v, &[tokens, heads, value])?,
        cache: cache(&args.cache, desc)?,
        unpacking,
        o: rows_of("o", args.o, &[tokens, heads, value])?
            .writable()?
            .tensor,
        lse: optional_lse("lse", args.lse, &[tokens, heads], device)?,
        ..*args
    })
}

/// A cache of the desc's records; what its tensors hold is the gather's to check.
fn cache(cache: &LatentCache, desc: &MlaContextDesc) -> Result<LatentCache> {
    let is_ds_mla = desc.cache == CacheFormat::DS_MLA;
    let (rank, rope) = (desc.kv_lora_rank, desc.qk_rope_head_dim);
    let width = match (is_ds_mla, cache.kv_rope) {
        (true, _) => desc.cache.row_bytes(rank + rope) as i64,
        (false, None) => (rank + rope).into(),
        (false, Some(_)) => rank.into(),
    };
    let tokens = Extent::Is(desc.page_size.into());
    let pages = |name, tensor, width| {
        Named { name, tensor }.shaped(&[Extent::Any, tokens, Extent::Is(width)])
    };
    pages("kv", cache.kv, width)?;
    if let Some(kv_rope) = cache.kv_rope {
        pages("kv_rope", kv_rope, rope.into())?;
    }
    Ok(LatentCache {
        is_ds_mla,
        kv_dtype: (!is_ds_mla).then_some(desc.cache.element),
        ..*cache
    })
}
