// Reading and writing safetensors. A file comes from somewhere else, so every number in it is checked before it is used.
// See safetensors.hpp.
#include "safetensors.hpp"

#include <nlohmann/json.hpp>

#include <cstring>
#include <fstream>
#include <stdexcept>

namespace engine {

using nlohmann::json;

namespace {

float from_bf16(const unsigned char *bytes)
{
    const auto bits = static_cast<uint32_t>(bytes[1]) << 24 | static_cast<uint32_t>(bytes[0]) << 16;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

uint16_t to_bf16(float value)
{
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// The elements of one tensor, out of all bytes behind the header.
NamedTensor read_tensor(const json &entry, const std::vector<unsigned char> &data)
{
    NamedTensor tensor;
    const auto dtype = entry.at("dtype").get<std::string>();
    const size_t size = dtype == "F32" ? 4 : dtype == "BF16" ? 2 : 0;
    if (size == 0)
        throw std::runtime_error("dtype " + dtype + " is not accepted; F32 and BF16 are");
    const auto begin = entry.at("data_offsets").at(0).get<uint64_t>();
    const auto end = entry.at("data_offsets").at(1).get<uint64_t>();
    if (begin > end || end > data.size())
        throw std::runtime_error("data_offsets [" + std::to_string(begin) + ", " + std::to_string(end) +
                                 "] are not within the " + std::to_string(data.size()) + " bytes that are there");
    uint64_t count = 1;
    for (const json &extent : entry.at("shape")) {
        const auto n = extent.get<uint64_t>();
        if (n != 0 && count > data.size() / n) // more elements than there are bytes
            throw std::runtime_error("the shape has more elements than the file");
        count *= n;
        tensor.shape.push_back(static_cast<int64_t>(n));
    }
    if (count * size != end - begin)
        throw std::runtime_error("a shape of " + std::to_string(count) + " elements does not fill " +
                                 std::to_string(end - begin) + " bytes of " + dtype);
    tensor.values.resize(count);
    if (size == 4 && count != 0)
        std::memcpy(tensor.values.data(), &data[begin], end - begin);
    for (size_t i = 0; size == 2 && i < count; i++)
        tensor.values[i] = from_bf16(&data[begin + 2 * i]);
    return tensor;
}

std::vector<unsigned char> read_bytes(std::ifstream &file, uint64_t count)
{
    std::vector<unsigned char> bytes(count);
    if (!file.read(reinterpret_cast<char *>(bytes.data()), static_cast<std::streamsize>(count)))
        throw std::runtime_error("the file ends early");
    return bytes;
}

} // namespace

SafeTensors::SafeTensors(const std::string &path) : path_(path)
{
    std::string what = "the header"; // of which a failure is
    try {
        std::ifstream file(path, std::ios::binary | std::ios::ate);
        if (!file)
            throw std::runtime_error("the file cannot be opened");
        const auto total = static_cast<uint64_t>(file.tellg());
        file.seekg(0);
        uint64_t length = 0;
        const auto prefix = read_bytes(file, 8);
        for (size_t i = 8; i-- > 0;)
            length = length << 8 | prefix[i];
        if (length > total - 8)
            throw std::runtime_error("a header of " + std::to_string(length) + " bytes does not fit in a file of " +
                                     std::to_string(total));
        const json header = json::parse(read_bytes(file, length));
        const auto data = read_bytes(file, total - 8 - length);
        for (const auto &[name, entry] : header.items()) {
            what = name;
            if (name == "__metadata__")
                metadata_ = entry.get<std::map<std::string, std::string>>();
            else
                tensors_.emplace(name, read_tensor(entry, data));
        }
    } catch (const std::exception &error) { // JSON's own too
        throw std::runtime_error(path + ": " + what + ": " + error.what());
    }
}

const NamedTensor &SafeTensors::tensor(const std::string &name) const
{
    const auto found = tensors_.find(name);
    if (found == tensors_.end())
        throw std::runtime_error(path_ + ": there is no tensor " + name);
    return found->second;
}

const std::string &SafeTensors::metadata(const std::string &name) const
{
    const auto found = metadata_.find(name);
    if (found == metadata_.end())
        throw std::runtime_error(path_ + ": __metadata__ has no " + name);
    return found->second;
}

void write_safetensors(const std::string &path, const std::map<std::string, NamedTensor> &tensors,
                       const std::map<std::string, std::string> &metadata)
{
    json header;
    header["__metadata__"] = metadata;
    std::string data;
    for (const auto &[name, tensor] : tensors) {
        const bool matrix = tensor.shape.size() > 1;
        const size_t begin = data.size();
        for (const float value : tensor.values) {
            const uint16_t half = to_bf16(value);
            const void *bytes = matrix ? static_cast<const void *>(&half) : &value;
            data.append(static_cast<const char *>(bytes), matrix ? sizeof half : sizeof value);
        }
        header[name] = {
            {"dtype", matrix ? "BF16" : "F32"}, {"shape", tensor.shape}, {"data_offsets", {begin, data.size()}}};
    }
    std::string text = header.dump();
    text.append((8 - text.size() % 8) % 8, ' '); // elements begin at a multiple of 8
    std::ofstream file(path, std::ios::binary);
    for (unsigned shift = 0; shift < 64; shift += 8)
        file.put(static_cast<char>(static_cast<uint64_t>(text.size()) >> shift & 0xff));
    file << text << data;
    if (!file.flush())
        throw std::runtime_error(path + ": the file cannot be written");
}

} // namespace engine
