// A batch whose lengths are on the device, and the parameters and memory of its plan, as src/cuda/attention/planner.rs and
// src/plan/capacity.rs have them.
#pragma once
#include <random>
#include <vector>

#include "params/plan.h"

using Random = std::mt19937;

// What is drawn.
enum class Kind { ANY, FEW_ROUNDS, FEW_TILES, SHARES, INVARIANT };

struct RandomBatch {
    std::vector<int> qo_indptr, kv_len;
    FolioPlanBatchParams params = {};

    std::vector<FolioPlanRequest> requests;
    std::vector<unsigned> first_item, first_combine, partials, counts;
    std::vector<FolioWorkItem> items;
    std::vector<FolioCombineItem> combines;
    std::vector<int> out_qo_indptr, out_kv_len;
    std::vector<folio_i64> out_mask_bytes_start, out_mask_bits_start;
    unsigned next_tile = 1;

    RandomBatch(Kind kind, Random &random);
    RandomBatch(const RandomBatch &) = delete;

    int size() const { return static_cast<int>(kv_len.size()); }
    int rows(int request) const { return qo_indptr[request + 1] - qo_indptr[request]; }
    // Where the keys of a request begin that have items.
    int first_key(int request) const;

private:
    void draw_lengths(Kind kind, Random &random);
    void make_room(bool is_invariant);
};
