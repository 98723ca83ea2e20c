// A Llama-shaped model: RMS norm, grouped-query attention with RoPE, SwiGLU. Weights as Hugging Face names them.
#pragma once

#include "attention.hpp"
#include "gemm.hpp"
#include "safetensors.hpp"

namespace engine {

struct Layer {
    const float *attention_norm, *mlp_norm; // [hidden]
    Matrix q, k, v, o, gate, up, down;
};

// The weights of a file, which must outlive them, and what their shapes say.
struct Weights {
    explicit Weights(const SafeTensors &file);

    Matrix embedding, head;  // [vocab_size, hidden]
    const float *final_norm; // [hidden]
    std::vector<Layer> layers;
    float rms_norm_eps;
    AttentionShape shape;

    size_t hidden() const { return static_cast<size_t>(embedding.in); }
    size_t vocab_size() const { return static_cast<size_t>(embedding.out); }
};

class Model {
public:
    // Takes memory for activations of the largest step.
    Model(const Weights &weights, const Limits &limits, uint32_t num_threads);

    // The model's token after each of the batch's sampled_rows: that with the largest logit, of equals the first.
    std::vector<int32_t> forward(const Batch &batch);

    const Attention &attention() const { return attention_; }

private:
    void embed(const std::vector<int32_t> &tokens);
    void run_layer(int index, size_t num_tokens);

    const Weights &weights_;
    Attention attention_;
    // [num_tokens, …] each; x is the residual stream, and y what is normalised of it.
    std::vector<float> x_, y_, qkv_, o_, gate_, up_, logits_;
};

} // namespace engine
