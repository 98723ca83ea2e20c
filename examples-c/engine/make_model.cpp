// Writes a Llama-shaped model with random weights, small enough for a test: matrices in BF16, vectors in F32.
#include <nlohmann/json.hpp>

#include <cmath>
#include <cstring>
#include <fstream>
#include <random>
#include <string>

namespace {

constexpr size_t vocab_size = 64, hidden = 64, intermediate = 96, layers = 2, qo_heads = 4, kv_heads = 2, head_dim = 16;

// Of this seed's greedy choices all are clear, by 0.01 in the logits: rounding must not decide between two tokens.
std::mt19937 random_bits(9);
nlohmann::json header;
std::string data;

// Values of a normal distribution, such that a product with a vector keeps the vector's size.
void add_matrix(const std::string &name, size_t out, size_t in, float gain = 1)
{
    std::normal_distribution<float> normal(0, gain / std::sqrt(static_cast<float>(in)));
    const size_t begin = data.size();
    while (data.size() < begin + 2 * out * in) {
        const float value = normal(random_bits);
        uint32_t bits;
        std::memcpy(&bits, &value, sizeof bits);
        bits += 0x7fff + (bits >> 16 & 1); // to the nearest that ends with 16 zeros
        data += {static_cast<char>(bits >> 16), static_cast<char>(bits >> 24)};
    }
    header[name] = {{"dtype", "BF16"}, {"shape", {out, in}}, {"data_offsets", {begin, data.size()}}};
}

void add_norm(const std::string &name)
{
    std::uniform_real_distribution<float> uniform(0.5f, 1.5f);
    const size_t begin = data.size();
    while (data.size() < begin + 4 * hidden) {
        const float value = uniform(random_bits);
        data.append(reinterpret_cast<const char *>(&value), sizeof value);
    }
    header[name] = {{"dtype", "F32"}, {"shape", {hidden}}, {"data_offsets", {begin, data.size()}}};
}

void add_layer(const std::string &prefix)
{
    add_norm(prefix + "input_layernorm.weight");
    add_matrix(prefix + "self_attn.q_proj.weight", qo_heads * head_dim, hidden, 2);
    add_matrix(prefix + "self_attn.k_proj.weight", kv_heads * head_dim, hidden, 2);
    add_matrix(prefix + "self_attn.v_proj.weight", kv_heads * head_dim, hidden);
    add_matrix(prefix + "self_attn.o_proj.weight", hidden, qo_heads * head_dim);
    add_norm(prefix + "post_attention_layernorm.weight");
    add_matrix(prefix + "mlp.gate_proj.weight", intermediate, hidden);
    add_matrix(prefix + "mlp.up_proj.weight", intermediate, hidden);
    add_matrix(prefix + "mlp.down_proj.weight", hidden, intermediate);
}

} // namespace

int main(int argc, char **argv)
{
    add_matrix("model.embed_tokens.weight", vocab_size, hidden, 8);
    for (size_t layer = 0; layer < layers; layer++)
        add_layer("model.layers." + std::to_string(layer) + ".");
    add_norm("model.norm.weight");
    add_matrix("lm_head.weight", vocab_size, hidden);
    const nlohmann::json config{
        {"vocab_size", vocab_size},    {"hidden_size", hidden},           {"intermediate_size", intermediate},
        {"num_hidden_layers", layers}, {"num_attention_heads", qo_heads}, {"num_key_value_heads", kv_heads},
        {"head_dim", head_dim},        {"rope_theta", 10000},             {"rms_norm_eps", 1e-5}};
    header["__metadata__"]["config"] = config.dump();
    const std::string text = header.dump();
    const uint64_t length = text.size();
    std::ofstream file(argc > 1 ? argv[1] : "model.safetensors", std::ios::binary);
    file.write(reinterpret_cast<const char *>(&length), sizeof length) << text << data;
    return file.flush() ? 0 : 1;
}
