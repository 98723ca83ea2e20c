// Folio's calls: two handles, one plan per step, and per layer one append and one run. See attention.hpp.
#include "attention.hpp"

namespace engine {

namespace {

// A handle for steps in which no request has more rows than its drafts and the token before them.
folio_decode_desc decode_desc(const AttentionShape &shape, const Limits &limits)
{
    auto desc = FOLIO_INIT(folio_decode_desc);
    desc.q_dtype = FOLIO_FLOAT32; // the cache and the output are of the same type
    desc.num_qo_heads = static_cast<uint32_t>(shape.num_qo_heads);
    desc.num_kv_heads = static_cast<uint32_t>(shape.num_kv_heads);
    desc.head_dim_qk = static_cast<uint32_t>(shape.head_dim);
    desc.page_size = static_cast<uint32_t>(limits.page_size);
    desc.max_batch_size = static_cast<uint32_t>(limits.max_batch_size);
    desc.max_qo_len = static_cast<uint32_t>(limits.max_drafts) + 1;
    desc.max_kv_len = static_cast<uint32_t>(limits.max_seq_len);
    return desc;
}

// A handle for all other steps: chunks of prompts, alone or beside decodes.
folio_prefill_desc prefill_desc(const AttentionShape &shape, const Limits &limits)
{
    auto desc = FOLIO_INIT(folio_prefill_desc);
    desc.q_dtype = FOLIO_FLOAT32;
    desc.num_qo_heads = static_cast<uint32_t>(shape.num_qo_heads);
    desc.num_kv_heads = static_cast<uint32_t>(shape.num_kv_heads);
    desc.head_dim_qk = static_cast<uint32_t>(shape.head_dim);
    desc.kv_storage = FOLIO_KV_PAGED;
    desc.page_size = static_cast<uint32_t>(limits.page_size);
    desc.max_batch_size = static_cast<uint32_t>(limits.max_batch_size);
    desc.max_num_tokens = static_cast<uint32_t>(limits.max_num_tokens);
    desc.max_kv_len = static_cast<uint32_t>(limits.max_seq_len);
    return desc;
}

bool only_few_rows(const Batch &batch, int32_t most)
{
    for (size_t i = 0; i < batch.batch_size(); i++)
        if (batch.qo_indptr[i + 1] - batch.qo_indptr[i] > most)
            return false;
    return true;
}

} // namespace

Attention::Attention(const AttentionShape &shape, const Limits &limits, uint32_t num_threads)
    : shape_(shape), limits_(limits), context_(folio::Context::cpu(num_threads)), decode_(context_, decode_desc(shape, limits)),
      prefill_(context_, prefill_desc(shape, limits)), decode_workspace_(decode_.workspace()),
      prefill_workspace_(prefill_.workspace()), caches_(static_cast<size_t>(shape.num_layers))
{
    const auto elements = static_cast<size_t>(limits.num_pages) * static_cast<size_t>(limits.page_size) *
                          static_cast<size_t>(shape.num_kv_heads * shape.head_dim);
    for (Cache &cache : caches_)
        cache = {std::vector<float>(elements), std::vector<float>(elements)};
}

void Attention::plan(const Batch &batch)
{
    const auto batch_size = static_cast<int64_t>(batch.batch_size());
    const folio::Tensor qo_indptr(batch.qo_indptr), kv_len(batch.kv_len);
    const folio::Tensor block_table(batch.block_table, {batch_size, limits_.max_pages()});

    // Where in the cache the new tokens go, and at which positions they stand.
    slot_mapping_.resize(batch.num_tokens());
    positions_.resize(batch.num_tokens());
    const folio::Tensor slot_mapping(slot_mapping_), positions(positions_);
    auto slots = FOLIO_INIT(folio_slot_mapping_args);
    slots.block_table = block_table;
    slots.qo_indptr = qo_indptr;
    slots.kv_len = kv_len;
    slots.slot_mapping = slot_mapping;
    slots.positions = positions;
    slots.page_size = static_cast<uint32_t>(limits_.page_size);
    context_.slot_mapping(slots);

    // How the rows and keys of the step are dealt to threads. It holds for every layer.
    auto step = FOLIO_INIT(folio_batch);
    step.qo_indptr = qo_indptr;
    step.kv_len = kv_len;
    step.block_table = block_table;
    decoding_ = only_few_rows(batch, limits_.max_drafts + 1);
    if (decoding_)
        decode_.plan(step, decode_workspace_);
    else
        prefill_.plan(step, prefill_workspace_);
}

void Attention::run(int layer, std::vector<float> &qkv, std::vector<float> &o)
{
    const auto num_tokens = static_cast<int64_t>(slot_mapping_.size());
    const int64_t heads = shape_.num_qo_heads, kv_heads = shape_.num_kv_heads, dim = shape_.head_dim;
    const int64_t width = shape_.qkv_width();

    // Queries, keys and values are slices of one tensor, and stay where the projection wrote them.
    const float *k_rows = qkv.data() + heads * dim, *v_rows = k_rows + kv_heads * dim;
    const folio::Tensor q(qkv, {num_tokens, heads, dim}, {width, dim, 1});
    const folio::Tensor key(k_rows, FOLIO_FLOAT32, {num_tokens, kv_heads, dim}, {width, dim, 1});
    const folio::Tensor value(v_rows, FOLIO_FLOAT32, {num_tokens, kv_heads, dim}, {width, dim, 1});
    Cache &cache = caches_[static_cast<size_t>(layer)];
    const folio::Tensor k_cache(cache.k, {limits_.num_pages, limits_.page_size, kv_heads, dim});
    const folio::Tensor v_cache(cache.v, {limits_.num_pages, limits_.page_size, kv_heads, dim});

    // Append first, then attend: a row sees its own key in the cache.
    const folio::Tensor slot_mapping(slot_mapping_), positions(positions_);
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

    const folio::Tensor out(o, {num_tokens, heads, dim});
    auto args = FOLIO_INIT(folio_attention_args);
    args.q = q;
    args.k = k_cache;
    args.v = v_cache;
    args.o = out;
    if (decoding_)
        decode_.run(args);
    else
        prefill_.run(args);
}

} // namespace engine
