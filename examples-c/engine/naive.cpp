// The formulas, written down a second time and in float64 but for the matrix products. Shares nothing else with
// model.cpp, so that a mistake there shows. See naive.hpp.
#include "naive.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

namespace engine {

namespace {

using Rows = std::vector<std::vector<float>>;

std::vector<float> normalised(const std::vector<float> &x, const float *weight, float eps)
{
    double mean = 0;
    for (const float value : x)
        mean += static_cast<double>(value) * value / static_cast<double>(x.size());
    std::vector<float> y(x.size());
    for (size_t i = 0; i < x.size(); i++)
        y[i] = static_cast<float>(x[i] / std::sqrt(mean + eps) * weight[i]);
    return y;
}

std::vector<float> product(const std::vector<float> &x, const Matrix &w)
{
    std::vector<float> y(static_cast<size_t>(w.out));
    multiply(x.data(), 1, w, y.data(), y.size());
    return y;
}

// Rotates each head's pairs of elements i and i + half by the position's angles (Su et al., 2021).
void rotate(std::vector<float> &heads, size_t position, const AttentionShape &shape)
{
    const auto dim = static_cast<size_t>(shape.head_dim), half = dim / 2;
    for (size_t i = 0; i < half; i++) {
        const double exponent = -2.0 * static_cast<double>(i) / static_cast<double>(dim);
        const double angle = static_cast<double>(position) * std::pow(shape.rope_theta, exponent);
        const double cosine = std::cos(angle), sine = std::sin(angle);
        for (size_t head = 0; head < heads.size(); head += dim) {
            const double x = heads[head + i], y = heads[head + i + half];
            heads[head + i] = static_cast<float>(x * cosine - y * sine);
            heads[head + i + half] = static_cast<float>(y * cosine + x * sine);
        }
    }
}

// softmax(q · kᵀ / sqrt(dim)) · v of one token over the first `num_keys` keys.
std::vector<float> attention(const std::vector<float> &q, const Rows &k, const Rows &v, size_t num_keys,
                             const AttentionShape &shape)
{
    const auto dim = static_cast<size_t>(shape.head_dim);
    const size_t group = static_cast<size_t>(shape.num_qo_heads / shape.num_kv_heads);
    std::vector<float> o(q.size());
    for (size_t head = 0; head < q.size() / dim; head++) {
        const size_t from = head / group * dim;
        std::vector<double> weights(num_keys);
        for (size_t j = 0; j < num_keys; j++) {
            double dot = 0;
            for (size_t i = 0; i < dim; i++)
                dot += static_cast<double>(q[head * dim + i]) * k[j][from + i];
            weights[j] = dot / std::sqrt(static_cast<double>(dim));
        }
        const double largest = *std::max_element(weights.begin(), weights.end());
        double sum = 0;
        for (double &weight : weights)
            sum += weight = std::exp(weight - largest);
        for (size_t i = 0; i < dim; i++) {
            double value = 0;
            for (size_t j = 0; j < num_keys; j++)
                value += weights[j] / sum * v[j][from + i];
            o[head * dim + i] = static_cast<float>(value);
        }
    }
    return o;
}

void add(std::vector<float> &x, const std::vector<float> &y)
{
    for (size_t i = 0; i < x.size(); i++)
        x[i] += y[i];
}

// All tokens through one layer.
void run_layer(const Weights &weights, const Layer &layer, Rows &x)
{
    Rows q, k, v;
    for (size_t t = 0; t < x.size(); t++) {
        const auto y = normalised(x[t], layer.attention_norm, weights.rms_norm_eps);
        q.push_back(product(y, layer.q));
        k.push_back(product(y, layer.k));
        v.push_back(product(y, layer.v));
        rotate(q.back(), t, weights.shape);
        rotate(k.back(), t, weights.shape);
    }
    for (size_t t = 0; t < x.size(); t++) {
        add(x[t], product(attention(q[t], k, v, t + 1, weights.shape), layer.o));
        const auto y = normalised(x[t], layer.mlp_norm, weights.rms_norm_eps);
        auto gate = product(y, layer.gate);
        const auto up = product(y, layer.up);
        for (size_t i = 0; i < gate.size(); i++)
            gate[i] *= up[i] / (1 + std::exp(-gate[i]));
        add(x[t], product(gate, layer.down));
    }
}

} // namespace

NaiveText naive(const Weights &weights, std::vector<int32_t> tokens, size_t max_new_tokens)
{
    float smallest_lead = std::numeric_limits<float>::infinity();
    for (size_t i = 0; i < max_new_tokens; i++) {
        Rows x;
        for (const int32_t token : tokens) {
            const float *row = weights.embedding.data + static_cast<size_t>(token) * weights.hidden();
            x.emplace_back(row, row + weights.hidden());
        }
        for (const Layer &layer : weights.layers)
            run_layer(weights, layer, x);
        auto logits = product(normalised(x.back(), weights.final_norm, weights.rms_norm_eps), weights.head);
        const auto best = std::max_element(logits.begin(), logits.end());
        tokens.push_back(static_cast<int32_t>(best - logits.begin()));
        const float largest = std::exchange(*best, -std::numeric_limits<float>::infinity());
        smallest_lead = std::min(smallest_lead, largest - *std::max_element(logits.begin(), logits.end()));
    }
    return {std::move(tokens), smallest_lead};
}

} // namespace engine
