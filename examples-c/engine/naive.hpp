// The same model without an engine: what every token of the engine is compared with.
#pragma once

#include "model.hpp"

namespace engine {

struct NaiveText {
    std::vector<int32_t> tokens;
    float smallest_lead; // by which a chosen token's logit exceeded the next one's, at its closest
};

// Greedy decoding, one request at a time. For every new token the whole text is computed again, without a cache, and
// attention by its formula.
NaiveText naive(const Weights &weights, std::vector<int32_t> prompt, size_t max_new_tokens);

} // namespace engine
