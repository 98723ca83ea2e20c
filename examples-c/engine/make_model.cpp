// Writes a Llama-shaped model with random weights, small enough for a test, with the names of Hugging Face's files.
#include "safetensors.hpp"

#include <cmath>
#include <cstdio>
#include <exception>
#include <random>

namespace {

constexpr int64_t vocab_size = 64, hidden = 64, intermediate = 96, layers = 2, qo_heads = 4, kv_heads = 2, head_dim = 16;

// Values of a normal distribution, such that a product with a vector keeps the vector's size.
engine::NamedTensor random_matrix(std::mt19937 &random, int64_t out, int64_t in, float gain = 1)
{
    std::normal_distribution<float> normal(0, gain / std::sqrt(static_cast<float>(in)));
    engine::NamedTensor tensor{{out, in}, std::vector<float>(static_cast<size_t>(out * in))};
    for (float &value : tensor.values)
        value = normal(random);
    return tensor;
}

engine::NamedTensor random_norm(std::mt19937 &random)
{
    std::uniform_real_distribution<float> uniform(0.5f, 1.5f);
    engine::NamedTensor tensor{{hidden}, std::vector<float>(hidden)};
    for (float &value : tensor.values)
        value = uniform(random);
    return tensor;
}

} // namespace

int main(int argc, char **argv)
try {
    if (argc != 2) {
        std::fprintf(stderr, "usage: make_model FILE.safetensors\n");
        return 2;
    }
    // A seed whose greedy choices are clear (main.cpp prints the closest): rounding must not decide between two tokens.
    std::mt19937 random(9);
    std::map<std::string, engine::NamedTensor> tensors;
    tensors["model.embed_tokens.weight"] = random_matrix(random, vocab_size, hidden, 8);
    for (int64_t layer = 0; layer < layers; layer++) {
        const std::string prefix = "model.layers." + std::to_string(layer) + ".";
        tensors[prefix + "input_layernorm.weight"] = random_norm(random);
        tensors[prefix + "self_attn.q_proj.weight"] = random_matrix(random, qo_heads * head_dim, hidden, 2);
        tensors[prefix + "self_attn.k_proj.weight"] = random_matrix(random, kv_heads * head_dim, hidden, 2);
        tensors[prefix + "self_attn.v_proj.weight"] = random_matrix(random, kv_heads * head_dim, hidden);
        tensors[prefix + "self_attn.o_proj.weight"] = random_matrix(random, hidden, qo_heads * head_dim);
        tensors[prefix + "post_attention_layernorm.weight"] = random_norm(random);
        tensors[prefix + "mlp.gate_proj.weight"] = random_matrix(random, intermediate, hidden);
        tensors[prefix + "mlp.up_proj.weight"] = random_matrix(random, intermediate, hidden);
        tensors[prefix + "mlp.down_proj.weight"] = random_matrix(random, hidden, intermediate);
    }
    tensors["model.norm.weight"] = random_norm(random);
    tensors["lm_head.weight"] = random_matrix(random, vocab_size, hidden);
    engine::write_safetensors(argv[1], tensors,
                              {{"head_dim", std::to_string(head_dim)}, {"rope_theta", "10000"}, {"rms_norm_eps", "1e-5"}});
    std::printf("%s: %zu tensors\n", argv[1], tensors.size());
    return 0;
} catch (const std::exception &error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
}
