// From tokens to tokens. See model.hpp.
#include "model.hpp"

#include <algorithm>
#include <cmath>
#include <stdexcept>

namespace engine {

namespace {

Matrix matrix(const SafeTensors &file, const std::string &name)
{
    const NamedTensor &tensor = file.tensor(name);
    if (tensor.shape.size() != 2)
        throw std::runtime_error(name + ": a matrix is expected");
    return {tensor.values.data(), static_cast<int>(tensor.shape[0]), static_cast<int>(tensor.shape[1])};
}

Matrix matrix(const SafeTensors &file, const std::string &name, int out, int in)
{
    const Matrix found = matrix(file, name);
    if (found.out != out || found.in != in)
        throw std::runtime_error(name + ": shape [" + std::to_string(found.out) + ", " + std::to_string(found.in) +
                                 "] is not accepted; [" + std::to_string(out) + ", " + std::to_string(in) + "] is");
    return found;
}

const float *norm(const SafeTensors &file, const std::string &name, size_t hidden)
{
    const NamedTensor &tensor = file.tensor(name);
    if (tensor.values.size() != hidden)
        throw std::runtime_error(name + ": " + std::to_string(hidden) + " elements are expected");
    return tensor.values.data();
}

// y = x / sqrt(mean(x²) + eps) · weight, row by row.
void rms_norm(const float *x, size_t rows, size_t width, const float *weight, float eps, float *y)
{
    for (size_t row = 0; row < rows; row++, x += width, y += width) {
        float squares = 0;
        for (size_t i = 0; i < width; i++)
            squares += x[i] * x[i];
        const float scale = 1 / std::sqrt(squares / static_cast<float>(width) + eps);
        for (size_t i = 0; i < width; i++)
            y[i] = x[i] * scale * weight[i];
    }
}

} // namespace

Weights::Weights(const SafeTensors &file)
    : embedding(matrix(file, "model.embed_tokens.weight")), head(matrix(file, "lm_head.weight", embedding.out, embedding.in)),
      final_norm(norm(file, "model.norm.weight", hidden())), rms_norm_eps(std::stof(file.metadata("rms_norm_eps")))
{
    const int hidden = embedding.in, head_dim = std::stoi(file.metadata("head_dim"));
    shape = {0, 0, 0, head_dim, std::stof(file.metadata("rope_theta"))};
    if (head_dim <= 0)
        throw std::runtime_error("head_dim: " + std::to_string(head_dim) + " is not accepted; 1 or more is");
    for (;; shape.num_layers++) {
        const std::string prefix = "model.layers." + std::to_string(shape.num_layers) + ".";
        if (!file.has(prefix + "input_layernorm.weight"))
            break;
        if (shape.num_layers == 0) {
            shape.num_qo_heads = matrix(file, prefix + "self_attn.q_proj.weight").out / head_dim;
            shape.num_kv_heads = matrix(file, prefix + "self_attn.k_proj.weight").out / head_dim;
        }
        const int q_width = shape.num_qo_heads * head_dim, kv_width = shape.num_kv_heads * head_dim;
        const int intermediate = matrix(file, prefix + "mlp.gate_proj.weight").out;
        layers.push_back({norm(file, prefix + "input_layernorm.weight", this->hidden()),
                          norm(file, prefix + "post_attention_layernorm.weight", this->hidden()),
                          matrix(file, prefix + "self_attn.q_proj.weight", q_width, hidden),
                          matrix(file, prefix + "self_attn.k_proj.weight", kv_width, hidden),
                          matrix(file, prefix + "self_attn.v_proj.weight", kv_width, hidden),
                          matrix(file, prefix + "self_attn.o_proj.weight", hidden, q_width),
                          matrix(file, prefix + "mlp.gate_proj.weight", intermediate, hidden),
                          matrix(file, prefix + "mlp.up_proj.weight", intermediate, hidden),
                          matrix(file, prefix + "mlp.down_proj.weight", hidden, intermediate)});
    }
    if (layers.empty())
        throw std::runtime_error("there is no tensor model.layers.0.input_layernorm.weight");
}

Model::Model(const Weights &weights, const Limits &limits, uint32_t num_threads)
    : weights_(weights), attention_(weights.shape, limits, num_threads)
{
    const auto tokens = static_cast<size_t>(limits.max_num_tokens);
    size_t intermediate = 0;
    for (const Layer &layer : weights.layers)
        intermediate = std::max(intermediate, static_cast<size_t>(layer.gate.out));
    x_.resize(tokens * weights.hidden());
    y_.resize(tokens * weights.hidden());
    qkv_.resize(tokens * static_cast<size_t>(weights.shape.qkv_width()));
    o_.resize(tokens * static_cast<size_t>(weights.shape.o_width()));
    gate_.resize(tokens * intermediate);
    up_.resize(tokens * intermediate);
    logits_.resize(tokens * weights.vocab_size());
}

void Model::embed(const std::vector<int32_t> &tokens)
{
    float *row = x_.data();
    for (const int32_t token : tokens) {
        if (token < 0 || static_cast<size_t>(token) >= weights_.vocab_size())
            throw std::invalid_argument("token " + std::to_string(token) + " is not in the vocabulary");
        row = std::copy_n(weights_.embedding.data + static_cast<size_t>(token) * weights_.hidden(), weights_.hidden(), row);
    }
}

void Model::run_layer(int index, size_t num_tokens)
{
    const Layer &layer = weights_.layers[static_cast<size_t>(index)];
    const size_t hidden = weights_.hidden(), qkv_width = static_cast<size_t>(weights_.shape.qkv_width());

    rms_norm(x_.data(), num_tokens, hidden, layer.attention_norm, weights_.rms_norm_eps, y_.data());
    multiply(y_.data(), num_tokens, layer.q, qkv_.data(), qkv_width);
    multiply(y_.data(), num_tokens, layer.k, qkv_.data() + layer.q.out, qkv_width);
    multiply(y_.data(), num_tokens, layer.v, qkv_.data() + layer.q.out + layer.k.out, qkv_width);
    attention_.run(index, qkv_, o_);
    multiply(o_.data(), num_tokens, layer.o, x_.data(), hidden, 1);

    const auto intermediate = static_cast<size_t>(layer.gate.out);
    rms_norm(x_.data(), num_tokens, hidden, layer.mlp_norm, weights_.rms_norm_eps, y_.data());
    multiply(y_.data(), num_tokens, layer.gate, gate_.data(), intermediate);
    multiply(y_.data(), num_tokens, layer.up, up_.data(), intermediate);
    for (size_t i = 0; i < num_tokens * intermediate; i++)
        gate_[i] = gate_[i] / (1 + std::exp(-gate_[i])) * up_[i];
    multiply(gate_.data(), num_tokens, layer.down, x_.data(), hidden, 1);
}

std::vector<int32_t> Model::forward(const Batch &batch)
{
    const size_t hidden = weights_.hidden(), vocab_size = weights_.vocab_size(), samples = batch.sampled_rows.size();
    embed(batch.tokens);
    attention_.plan(batch);
    for (int layer = 0; layer < weights_.shape.num_layers; layer++)
        run_layer(layer, batch.num_tokens());

    // Logits of the rows that somebody waits for. Rows move towards the front only.
    for (size_t i = 0; i < samples; i++)
        rms_norm(&x_[static_cast<size_t>(batch.sampled_rows[i]) * hidden], 1, hidden, weights_.final_norm,
                 weights_.rms_norm_eps, &y_[i * hidden]);
    multiply(y_.data(), samples, weights_.head, logits_.data(), vocab_size);
    std::vector<int32_t> next(samples);
    for (size_t i = 0; i < samples; i++) {
        const float *row = &logits_[i * vocab_size];
        next[i] = static_cast<int32_t>(std::max_element(row, row + vocab_size) - row);
    }
    return next;
}

} // namespace engine
