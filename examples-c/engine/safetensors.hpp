// Files of the safetensors format: 8 bytes with the length of a header (little-endian), the header in JSON, and the
// elements of all tensors. The header has for each tensor its dtype, its shape, and where its elements begin and end
// behind the header; under "__metadata__" it may have strings.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace engine {

// A tensor in float32, whatever the file had.
struct NamedTensor {
    std::vector<int64_t> shape;
    std::vector<float> values;
};

class SafeTensors {
public:
    // Reads a file whose tensors are F32 or BF16. Throws std::runtime_error where it is not one.
    explicit SafeTensors(const std::string &path);

    // Throws std::runtime_error where there is no such tensor or entry.
    const NamedTensor &tensor(const std::string &name) const;
    const std::string &metadata(const std::string &name) const;

    bool has(const std::string &name) const { return tensors_.count(name) != 0; }

private:
    std::string path_;
    std::map<std::string, NamedTensor> tensors_;
    std::map<std::string, std::string> metadata_;
};

// Writes such a file: matrices in BF16, rounded to nearest even, and vectors in F32.
void write_safetensors(const std::string &path, const std::map<std::string, NamedTensor> &tensors,
                       const std::map<std::string, std::string> &metadata);

} // namespace engine
