// What the ops of grouped-query attention have in common: caches of keys and values, the fused projection of new tokens,
// RoPE with the cache write, and attention over the pages.
#pragma once

#include "rows.h"

#include <optional>

namespace folio_paddle {

/** How a cache_quant_type of FastDeploy is stored. */
struct CacheKind {
    const char *name;
    int32_t kv_format;
    folio_dtype kv_dtype;      /**< an fp8 type; all zero: as q, or the default of kv_format */
    int64_t elements_per_byte; /**< of quantised caches, which are bytes */
    bool has_scales, has_zero_points;
};

/** Refuses kinds of caches that have no code. */
const CacheKind &kind_of(const std::string &cache_quant_type);

/** Width of the output of attention over a fused projection: its rows without keys and values. */
int64_t attended_width(int64_t row, const std::vector<int64_t> &key_cache, const std::string &cache_quant_type);

/** What quantised elements are multiplied by, after zero points were taken from them. */
struct GivenFactors {
    const OptionalTensor &k_dequant, &v_dequant, &k_zp, &v_zp;
};

/** Caches [nb, Hkv, BS, d], of int4 [nb, Hkv, BS, d / 2], and what they hold. */
struct Caches {
    const Tensor &key, &value;
    const CacheKind &kind;
    int64_t num_pages, num_kv_heads, page_size, row, head_dim;
    /** float32 factors of what is stored, [1] or [Hkv], of int8 and int4 [Hkv, d]; empty: 1. */
    Tensor k_scales, v_scales;
    Tensor k_zero_points, v_zero_points;
};

Caches caches_of(const Tensor &key, const Tensor &value, const std::string &cache_quant_type, const GivenFactors &given);

folio::Tensor pages(const Tensor &cache, const Caches &caches);

/** Views of the factors of caches, which live as long as the args that name them. */
struct FactorViews {
    std::optional<folio::Tensor> k_scales, v_scales, k_zero_points, v_zero_points;

    explicit FactorViews(const Caches &caches);

    template <class Args>
    void put(Args &args) const
    {
        if (k_scales) {
            args.k_scales = *k_scales;
            args.v_scales = *v_scales;
        }
        if (k_zero_points) {
            args.k_zero_points = *k_zero_points;
            args.v_zero_points = *v_zero_points;
        }
    }
};

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

/** Which keys a token sees. */
struct Mask {
    bool causal;
    int sliding_window;            /**< 0, or how many keys, its own among them */
    const OptionalTensor &offsets; /**< the first key of each token and the one behind its last, in place of causality */
    int sink_size;                 /**< the first keys of those, which a token sees whatever the window says */

    Mask(bool causal, int sliding_window, const OptionalTensor &offsets, int64_t num_tokens, int sink_size = 0);

    /** [T, columns] to add to logits where there are offsets: 0 for keys that a token sees, else -inf. */
    Tensor bias(int64_t num_tokens, int64_t columns) const;
};

/** The largest length, where it can be had without waiting; else `bound`. */
int64_t longest(const Tensor &lengths, int64_t bound);

/** Attention of `queries` [T, Hq, d], which are views into `storage`, over the pages of a batch, to `out`. */
void attend(const Tensor &storage, const folio::Tensor &queries, int64_t num_tokens, int64_t num_heads, Tensor &out,
            const Caches &caches, const Batch &lengths_of, const Mask &mask, const OptionalTensor &sinks);

}  // namespace folio_paddle
