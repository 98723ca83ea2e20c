// What one step computes, as plain numbers: the scheduler writes it, the model and its attention read it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace engine {

// The largest steps and the cache. They are fixed when the engine starts, and so is all of its memory.
struct Limits {
    int32_t page_size;      // tokens per page of the cache
    int32_t num_pages;      // pages of the cache, of all requests together
    int32_t max_batch_size; // requests that run at the same time
    int32_t max_num_tokens; // new tokens of a step; longer prompts take several steps
    int32_t max_seq_len;    // tokens of a request
    int32_t max_drafts;     // tokens that are proposed for a request in a step; 0: no speculation

    int32_t max_pages() const { return (max_seq_len + page_size - 1) / page_size; } // of a request
};

// The new tokens of every request that takes part, one request after another. Nothing here says what is a prompt, a
// part of a prompt, a decode or a verification of drafts: to attention they are rows that see the keys before them.
struct Batch {
    std::vector<int32_t> tokens;       // [num_tokens]
    std::vector<int32_t> qo_indptr{0}; // [batch_size + 1] tokens before each request
    std::vector<int32_t> kv_len;       // [batch_size] keys of each request, those of its new tokens included
    std::vector<int32_t> block_table;  // [batch_size, max_pages] pages of each request, in order
    std::vector<int32_t> sampled_rows; // rows of tokens after which the next token is wanted

    size_t num_tokens() const { return tokens.size(); }
    size_t batch_size() const { return kv_len.size(); }
};

} // namespace engine
