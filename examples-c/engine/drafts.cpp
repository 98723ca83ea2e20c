// Drafts by n-grams. See drafts.hpp.
#include "drafts.hpp"

#include <algorithm>

namespace engine {

std::vector<int32_t> propose(const std::vector<int32_t> &tokens, size_t most)
{
    // Of the places where the last n tokens stand, the latest one counts, and the longest n that stands anywhere.
    for (std::ptrdiff_t n = 3; n >= 1; n--) {
        if (tokens.size() <= static_cast<size_t>(n))
            continue;
        const auto last = tokens.end() - n;
        const auto found = std::find_end(tokens.begin(), tokens.end() - 1, last, tokens.end());
        if (found == tokens.end() - 1)
            continue;
        const auto follow = found + n;
        const auto count = std::min(most, static_cast<size_t>(tokens.end() - follow));
        return {follow, follow + static_cast<std::ptrdiff_t>(count)};
    }
    return {};
}

} // namespace engine
