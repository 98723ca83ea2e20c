// What one step computes, as plain numbers: the scheduler writes it, the model and its attention read it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace engine {

using Tokens = std::vector<int32_t>;
using PageTable = std::vector<int32_t>; // the pages of a request, in order

// The largest steps and the cache. They are fixed when the engine starts, and so is all of its memory.
struct Limits {
    uint32_t page_size;      // tokens per page of the cache
    uint32_t num_pages;      // pages of the cache, of all requests together
    uint32_t max_batch_size; // requests that run at the same time
    uint32_t max_num_tokens; // new tokens of a step; longer prompts take several steps
    uint32_t max_seq_len;    // tokens of a request
    uint32_t max_drafts;     // tokens that are proposed for a request in a step; 0: no speculation

    uint32_t max_pages() const { return (max_seq_len + page_size - 1) / page_size; } // of a request
    size_t num_slots() const { return size_t{num_pages} * page_size; }               // tokens in the cache
};

// The new tokens of every request that takes part, one request after another. Nothing here says what is a prompt, a
// part of a prompt, a decode or a verification of drafts: to attention they are rows that see the keys before them.
struct Batch {
    Tokens tokens;                     // [num_tokens]
    std::vector<int32_t> positions;    // [num_tokens] of each token in its request
    std::vector<int32_t> slot_mapping; // [num_tokens] where in the cache its key and value go
    std::vector<int32_t> qo_indptr{0}; // [batch_size + 1] tokens before each request
    std::vector<int32_t> kv_len;       // [batch_size] keys of each request, those of its new tokens included
    std::vector<int32_t> block_table;  // [batch_size, max_pages] pages of each request, in order
    std::vector<int32_t> sampled_rows; // rows of tokens after which the next token is wanted
    uint32_t max_qo_len = 0;           // tokens of the request that has most
};

} // namespace engine
