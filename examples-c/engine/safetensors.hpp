// Files of the safetensors format: 8 bytes with the length of a header (little-endian), the header in JSON, and the
// elements of all tensors. The header has for each tensor its dtype, its shape, and where its elements begin and end
// behind the header; under "__metadata__" it may have strings.
#pragma once

#include <nlohmann/json.hpp>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace engine {

// A file comes from somewhere else, so every number in it is checked before it is used. What is no such file, or lacks
// what is asked for, throws a std::exception.
class SafeTensors {
public:
    explicit SafeTensors(const std::string &path) : bytes_(std::filesystem::file_size(path), '\0')
    {
        uint64_t length = 0;
        const bool read = !!std::ifstream(path, std::ios::binary).read(bytes_.data(), bytes_.size());
        std::memcpy(&length, bytes_.data(), std::min(sizeof length, bytes_.size()));
        if (!read || bytes_.size() < sizeof length || length > bytes_.size() - sizeof length)
            throw std::runtime_error(path + ": this is no safetensors file, or it ends within its header");
        data_ = sizeof length + length;
        header_ = nlohmann::json::parse(bytes_.begin() + sizeof length, bytes_.begin() + data_);
    }

    // What Hugging Face's config.json says. Metadata are strings, so here it is one.
    nlohmann::json config() const
    {
        return nlohmann::json::parse(header_.at("__metadata__").at("config").get<std::string>());
    }

    // A tensor in float32; the file may have it in BF16 as well. It must be of the given shape.
    std::vector<float> tensor(const std::string &name, const std::vector<size_t> &shape) const
    {
        const nlohmann::json &entry = header_.at(name);
        const nlohmann::json wanted = shape;
        const size_t size = entry.at("dtype") == "F32" ? 4 : entry.at("dtype") == "BF16" ? 2 : 0;
        const size_t begin = entry.at("data_offsets").at(0), end = entry.at("data_offsets").at(1);
        size_t count = 1;
        for (const size_t extent : shape)
            count *= extent;
        if (entry.at("shape") != wanted || size == 0 || begin > end || end > bytes_.size() - data_ ||
            end - begin != count * size)
            throw std::runtime_error(name + ": " + entry.dump() + " is not accepted; F32 or BF16, of shape " +
                                     wanted.dump() + " and within the file, is");
        std::vector<float> values(count);
        for (size_t i = 0; i < count; i++) { // bf16 is the upper half of a float; this machine is little-endian too
            auto *value = reinterpret_cast<char *>(&values[i]);
            std::memcpy(value + sizeof(float) - size, &bytes_[data_ + begin + i * size], size);
        }
        return values;
    }

private:
    std::string bytes_;
    size_t data_; // where in them the elements begin
    nlohmann::json header_;
};

} // namespace engine
