// A Llama-shaped model: RMS norm, grouped-query attention with RoPE, SwiGLU. Matrix products are those of a CBLAS.
#pragma once

#include "attention.hpp"
#include "safetensors.hpp"

#include <cblas.h>

#include <algorithm>
#include <cmath>

namespace engine {

using Rows = std::vector<float>; // of a step: [num_tokens, …]

// A weight as checkpoints have it: `[out, in]`, compact.
struct Matrix {
    std::vector<float> values;
    size_t out, in;
};

// y += x · wᵀ, row by row
inline void multiply_add(const Rows &x, const Matrix &w, Rows &y)
{
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, x.size() / w.in, w.out, w.in, 1, x.data(), w.in,
                w.values.data(), w.in, 1, y.data(), w.out);
}

inline Rows multiply(const Rows &x, const Matrix &w)
{
    Rows y(x.size() / w.in * w.out);
    multiply_add(x, w, y);
    return y;
}

struct Layer {
    std::vector<float> attention_norm, mlp_norm; // [hidden]
    Matrix q, k, v, o, gate, up, down;
};

// The weights of a file and the sizes of its config, by the names of Hugging Face's.
struct Weights {
    AttentionShape shape;
    float rms_norm_eps;
    size_t vocab_size, hidden, intermediate;
    Matrix embedding, head; // [vocab_size, hidden]
    std::vector<float> final_norm;
    std::vector<Layer> layers;

    explicit Weights(const SafeTensors &file)
    {
        const nlohmann::json config = file.config();
        shape = {config.at("num_hidden_layers"), config.at("num_attention_heads"), config.at("num_key_value_heads"),
                 config.at("head_dim"), config.at("rope_theta")};
        rms_norm_eps = config.at("rms_norm_eps");
        vocab_size = config.at("vocab_size");
        hidden = config.at("hidden_size");
        intermediate = config.at("intermediate_size");

        const auto norm = [&](const std::string &name) { return file.tensor(name, {hidden}); };
        const auto matrix = [&](const std::string &name, size_t out, size_t in) {
            return Matrix{file.tensor(name, {out, in}), out, in};
        };
        embedding = matrix("model.embed_tokens.weight", vocab_size, hidden);
        head = matrix("lm_head.weight", vocab_size, hidden);
        final_norm = norm("model.norm.weight");
        for (size_t i = 0; i < shape.num_layers; i++) {
            const std::string layer = "model.layers." + std::to_string(i) + ".";
            layers.push_back({norm(layer + "input_layernorm.weight"), norm(layer + "post_attention_layernorm.weight"),
                              matrix(layer + "self_attn.q_proj.weight", shape.q_width(), hidden),
                              matrix(layer + "self_attn.k_proj.weight", shape.kv_width(), hidden),
                              matrix(layer + "self_attn.v_proj.weight", shape.kv_width(), hidden),
                              matrix(layer + "self_attn.o_proj.weight", hidden, shape.q_width()),
                              matrix(layer + "mlp.gate_proj.weight", intermediate, hidden),
                              matrix(layer + "mlp.up_proj.weight", intermediate, hidden),
                              matrix(layer + "mlp.down_proj.weight", hidden, intermediate)});
        }
    }

    // The row of a token's embedding.
    const float *embedded(int32_t token) const
    {
        if (token < 0 || static_cast<size_t>(token) >= vocab_size)
            throw std::invalid_argument("token " + std::to_string(token) + " is not in the vocabulary");
        return &embedding.values[token * hidden];
    }
};

class Model {
public:
    // The weights must outlive the model.
    Model(const Weights &weights, const Limits &limits, uint32_t num_threads)
        : weights_(weights), attention_(weights.shape, limits, num_threads)
    {
    }

    // The model's token after each of the batch's sampled_rows: that with the largest logit, of equals the first.
    Tokens forward(const Batch &batch)
    {
        Rows x; // the residual stream
        for (const int32_t token : batch.tokens)
            x.insert(x.end(), weights_.embedded(token), weights_.embedded(token) + weights_.hidden);
        attention_.plan(batch);
        for (size_t layer = 0; layer < weights_.layers.size(); layer++)
            run_layer(layer, batch, x);

        Rows sampled;
        for (const int32_t row : batch.sampled_rows)
            sampled.insert(sampled.end(), &x[row * weights_.hidden], &x[row * weights_.hidden] + weights_.hidden);
        const Rows logits = multiply(normalised(sampled, weights_.final_norm), weights_.head);
        Tokens next;
        for (auto row = logits.begin(); row != logits.end(); row += weights_.vocab_size)
            next.push_back(std::max_element(row, row + weights_.vocab_size) - row);
        return next;
    }

private:
    void run_layer(size_t index, const Batch &batch, Rows &x)
    {
        const Layer &layer = weights_.layers[index];
        Rows y = normalised(x, layer.attention_norm);
        Rows q = multiply(y, layer.q);
        multiply_add(attention_.run(index, batch, q, multiply(y, layer.k), multiply(y, layer.v)), layer.o, x);

        y = normalised(x, layer.mlp_norm);
        Rows gate = multiply(y, layer.gate);
        const Rows up = multiply(y, layer.up);
        for (size_t i = 0; i < gate.size(); i++)
            gate[i] = gate[i] / (1 + std::exp(-gate[i])) * up[i];
        multiply_add(gate, layer.down, x);
    }

    // x / sqrt(mean(x²) + eps) · weight, row by row.
    Rows normalised(Rows x, const std::vector<float> &weight) const
    {
        for (auto row = x.begin(); row != x.end(); row += weight.size()) {
            float squares = 0;
            for (size_t i = 0; i < weight.size(); i++)
                squares += row[i] * row[i];
            const float scale = 1 / std::sqrt(squares / weight.size() + weights_.rms_norm_eps);
            for (size_t i = 0; i < weight.size(); i++)
                row[i] = row[i] * scale * weight[i];
        }
        return x;
    }

    const Weights &weights_;
    Attention attention_;
};

} // namespace engine
