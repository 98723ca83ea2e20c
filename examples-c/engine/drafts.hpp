// Proposals for the next tokens of a text. The model verifies them: a bad proposal costs time and changes no token.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace engine {

// What followed the last tokens where they stood before (prompt lookup): up to `most` tokens, none if nothing matches.
// A draft model would have the same signature.
std::vector<int32_t> propose(const std::vector<int32_t> &tokens, size_t most);

} // namespace engine
