// The paged KV cache and attention over it: everything that the engine asks of Folio. Two handles, one plan per step,
// and per layer one append and one run.
#pragma once

#include "batch.hpp"

#include <folio/folio.hpp>

#include <type_traits>

namespace engine {

struct AttentionShape {
    uint32_t num_layers, num_qo_heads, num_kv_heads, head_dim;
    float rope_theta;

    size_t q_width() const { return size_t{num_qo_heads} * head_dim; } // of a token
    size_t kv_width() const { return size_t{num_kv_heads} * head_dim; }
};

class Attention {
public:
    // Takes all memory that any step within the limits needs.
    Attention(const AttentionShape &shape, const Limits &limits, uint32_t num_threads)
        : shape_(shape), limits_(limits), context_(folio::Context::cpu(num_threads)),
          decode_(context_, describe<folio_decode_desc>()), prefill_(context_, describe<folio_prefill_desc>()),
          decode_workspace_(decode_.workspace()), prefill_workspace_(prefill_.workspace()),
          k_caches_(shape.num_layers, std::vector<float>(limits.num_slots() * shape.kv_width())), v_caches_(k_caches_)
    {
    }

    // Once per step: how its rows and keys are dealt to threads. It holds for every layer.
    void plan(const Batch &batch)
    {
        const int64_t batch_size = batch.kv_len.size();
        const folio::Tensor qo_indptr(batch.qo_indptr), kv_len(batch.kv_len);
        const folio::Tensor block_table(batch.block_table, {batch_size, limits_.max_pages()});
        auto step = FOLIO_INIT(folio_batch);
        step.qo_indptr = qo_indptr;
        step.kv_len = kv_len;
        step.block_table = block_table;
        decoding_ = batch.max_qo_len <= limits_.max_drafts + 1;
        decoding_ ? decode_.plan(step, decode_workspace_) : prefill_.plan(step, prefill_workspace_);
    }

    // Once per layer: rotates queries and keys, appends keys and values to the layer's cache, and attends. Queries are
    // rotated in place; those and the result are [num_tokens, q_width], keys and values [num_tokens, kv_width].
    std::vector<float> run(size_t layer, const Batch &batch, std::vector<float> &queries,
                           const std::vector<float> &keys, const std::vector<float> &values)
    {
        const int64_t tokens = batch.tokens.size(), dim = shape_.head_dim;
        const folio::Tensor q(queries, {tokens, shape_.num_qo_heads, dim});
        const folio::Tensor key(keys, {tokens, shape_.num_kv_heads, dim});
        const folio::Tensor value(values, {tokens, shape_.num_kv_heads, dim});
        const folio::Tensor k_cache(k_caches_[layer], {limits_.num_pages, limits_.page_size, shape_.num_kv_heads, dim});
        const folio::Tensor v_cache(v_caches_[layer], {limits_.num_pages, limits_.page_size, shape_.num_kv_heads, dim});

        // Append first, then attend: a row sees its own key in the cache.
        const folio::Tensor slot_mapping(batch.slot_mapping), positions(batch.positions);
        auto append = FOLIO_INIT(folio_rope_append_args);
        append.q = q;
        append.key = key;
        append.value = value;
        append.k_cache = k_cache;
        append.v_cache = v_cache;
        append.slot_mapping = slot_mapping;
        append.positions = positions;
        append.rope_theta = shape_.rope_theta;
        context_.append(append);

        std::vector<float> result(queries.size());
        const folio::Tensor o(result, {tokens, shape_.num_qo_heads, dim});
        auto args = FOLIO_INIT(folio_attention_args);
        args.q = q;
        args.k = k_cache;
        args.v = v_cache;
        args.o = o;
        decoding_ ? decode_.run(args) : prefill_.run(args);
        return result;
    }

private:
    template <class Desc>
    Desc describe() const
    {
        auto desc = FOLIO_INIT(Desc);
        desc.q_dtype = FOLIO_FLOAT32; // the cache and the output are of the same type
        desc.num_qo_heads = shape_.num_qo_heads;
        desc.num_kv_heads = shape_.num_kv_heads;
        desc.head_dim_qk = shape_.head_dim;
        desc.page_size = limits_.page_size;
        desc.max_batch_size = limits_.max_batch_size;
        desc.max_kv_len = limits_.max_seq_len;
        if constexpr (std::is_same_v<Desc, folio_decode_desc>) {
            desc.max_qo_len = limits_.max_drafts + 1; // the last token, and drafts behind it
        } else {
            desc.kv_storage = FOLIO_KV_PAGED;
            desc.max_num_tokens = limits_.max_num_tokens;
        }
        return desc;
    }

    AttentionShape shape_;
    Limits limits_;
    folio::Context context_;
    folio::Decode decode_;   // for steps in which no request has more rows than its drafts and the token before them
    folio::Prefill prefill_; // for all other steps: chunks of prompts, alone or beside decodes
    folio::HostWorkspace decode_workspace_, prefill_workspace_;
    bool decoding_ = false;                               // which handle has the step's plan
    std::vector<std::vector<float>> k_caches_, v_caches_; // by layer: [num_pages, page_size, num_kv_heads, head_dim]
};

} // namespace engine
