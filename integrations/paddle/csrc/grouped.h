// What the ops of grouped-query attention have in common: caches of keys and values, the fused projection of new tokens,
// RoPE with the cache write, and attention over the pages.
#pragma once

#include "rows.h"

namespace folio_paddle {

/** Caches [nb, Hkv, BS, d] and what they hold. */
struct Caches {
    const Tensor &key, &value;
    int64_t num_pages, num_kv_heads, page_size, head_dim;
    folio_dtype kv_dtype{};     /**< an fp8 type, or all zero */
    Tensor k_scales, v_scales;  /**< [1] or [Hkv] float32 factors of what is stored; empty: 1 */
};

/** Refuses kinds of caches other than "none" and "cache_fp8". */
void refuse_other_caches(const std::string &cache_quant_type);

Caches caches_of(const Tensor &key, const Tensor &value, const std::string &cache_quant_type,
                 const OptionalTensor &k_dequant, const OptionalTensor &v_dequant);

folio::Tensor pages(const Tensor &cache, const Caches &caches);

/** The fused projection [T, (Hq + 2 Hkv) d], with the bias added. */
struct Projection {
    Tensor qkv;
    int64_t num_tokens, num_heads, row;

    Projection(const Tensor &given, const OptionalTensor &bias, const Caches &caches);
};

/** RoPE tables as FastDeploy keeps them: float32 [2, 1, max_len, 1, d/2], and with NeoX [2, 1, max_len, 1, d]. */
struct Rotation {
    OptionalTensor table; /**< none: no RoPE */
    int64_t max_len = 0, width = 0, half = 0;
    bool interleaved = true;

    Rotation(const OptionalTensor &rotary_embs, bool use_neox_rotary_style, bool rope_3d, int64_t head_dim);

    /** [2, max_len, d / 2]. NeoX tables hold every angle twice; the first half is read. */
    folio::Tensor angles() const { return view(*table, {2, max_len, half}, {max_len * width, width, 1}); }
};

/** Queries and keys of new tokens: [T, Hq, d] and [T, Hkv, d]. */
struct Rotated {
    Tensor q, k;
};

/** Rotates and normalises queries and keys, and writes keys and values to the cache. */
Rotated rotate_and_write(const Projection &projection, const Caches &caches, const Rotation &rotation,
                         const OptionalTensor &q_norm_weight, const OptionalTensor &k_norm_weight, float rms_norm_eps,
                         const Places &where);

/** The lengths of a step, checked against each other. */
struct Batch {
    int64_t size;
    Tensor kv_len;
    const Tensor &cu_seqlens_q, &block_tables;

    Batch(const Tensor &seq_lens_encoder, const Tensor &seq_lens_decoder, const Tensor &seq_lens_this_time,
          const Tensor &cu, const Tensor &tables);
};

/** Attention of `queries` [T, Hq, d], which are views into `storage`, over the pages of a batch, to `out`. */
void attend(const Tensor &storage, const folio::Tensor &queries, int64_t num_tokens, int64_t num_heads, Tensor &out,
            const Caches &caches, const Batch &lengths_of, bool causal, int sliding_window, const OptionalTensor &sinks);

}  // namespace folio_paddle
