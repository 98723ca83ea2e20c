// The paged KV cache and attention over it: everything that the engine asks of Folio.
#pragma once

#include "batch.hpp"

#include <folio/folio.hpp>

namespace engine {

struct AttentionShape {
    int num_layers, num_qo_heads, num_kv_heads, head_dim;
    float rope_theta;

    // Elements of a token's row with its queries, keys and values.
    int qkv_width() const { return (num_qo_heads + 2 * num_kv_heads) * head_dim; }
    int o_width() const { return num_qo_heads * head_dim; }
};

class Attention {
public:
    // Takes all memory that any step within the limits needs.
    Attention(const AttentionShape &shape, const Limits &limits, uint32_t num_threads);

    // Once per step.
    void plan(const Batch &batch);

    // Once per layer: rotates queries and keys, appends keys and values to the layer's cache, and attends. `qkv` is
    // [num_tokens, qkv_width], and its queries are rotated in place; `o` is [num_tokens, o_width].
    void run(int layer, std::vector<float> &qkv, std::vector<float> &o);

    const char *decode_kernel() const { return decode_.kernel(); }
    const char *prefill_kernel() const { return prefill_.kernel(); }

private:
    struct Cache {
        std::vector<float> k, v; // [num_pages, page_size, num_kv_heads, head_dim]
    };

    AttentionShape shape_;
    Limits limits_;
    folio::Context context_;
    folio::Decode decode_;
    folio::Prefill prefill_;
    folio::HostWorkspace decode_workspace_, prefill_workspace_;
    std::vector<Cache> caches_; // one for each layer

    // Of the step that was planned.
    bool decoding_ = false;
    std::vector<int32_t> slot_mapping_, positions_; // [num_tokens]
};

} // namespace engine
