// The formulas, written down a second time and in float64 but for the matrix products. Shares nothing else with
// model.cpp, so that a mistake there shows. See naive.hpp.
#include "naive.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

namespace engine {

namespace {

// A row for every token of the text.
struct Rows {
    size_t count, width;
    std::vector<float> values;

    Rows(size_t rows, size_t elements) : count(rows), width(elements), values(rows * elements) {}
    float *operator[](size_t t) { return &values[t * width]; }
    const float *operator[](size_t t) const { return &values[t * width]; }
};

Rows normalised(const Rows &x, const float *weight, float eps)
{
    Rows y(x.count, x.width);
    for (size_t t = 0; t < x.count; t++) {
        double mean = 0;
        const float *row = x[t];
        float *out = y[t];
        for (size_t i = 0; i < x.width; i++)
            mean += static_cast<double>(row[i]) * row[i] / static_cast<double>(x.width);
        const double root = std::sqrt(mean + eps);
        for (size_t i = 0; i < x.width; i++)
            out[i] = static_cast<float>(row[i] / root * weight[i]);
    }
    return y;
}

Rows product(const Rows &x, const Matrix &w)
{
    Rows y(x.count, static_cast<size_t>(w.out));
    multiply(x.values.data(), x.count, w, y.values.data(), y.width);
    return y;
}

// Rotates each head's pairs of elements i and i + half by the angles of the row's position (Su et al., 2021).
void rotate(Rows &heads, const AttentionShape &shape)
{
    const auto dim = static_cast<size_t>(shape.head_dim), half = dim / 2;
    for (size_t t = 0; t < heads.count; t++) {
        for (size_t i = 0; i < half; i++) {
            const double exponent = -2.0 * static_cast<double>(i) / static_cast<double>(dim);
            const double angle = static_cast<double>(t) * std::pow(shape.rope_theta, exponent);
            const double cosine = std::cos(angle), sine = std::sin(angle);
            for (float *head = heads[t]; head < heads[t] + heads.width; head += dim) {
                const double x = head[i], y = head[i + half];
                head[i] = static_cast<float>(x * cosine - y * sine);
                head[i + half] = static_cast<float>(y * cosine + x * sine);
            }
        }
    }
}

// o = softmax(q · kᵀ / sqrt(dim)) · v for one head of one token, over the keys of the tokens up to it.
void attend(const float *q, const Rows &k, const Rows &v, size_t first_element, size_t token, size_t dim, float *o)
{
    std::vector<double> weights(token + 1);
    for (size_t j = 0; j <= token; j++) {
        const float *key = k[j] + first_element;
        double dot = 0;
        for (size_t i = 0; i < dim; i++)
            dot += static_cast<double>(q[i]) * key[i];
        weights[j] = dot / std::sqrt(static_cast<double>(dim));
    }
    const double largest = *std::max_element(weights.begin(), weights.end());
    double sum = 0;
    for (double &weight : weights)
        sum += weight = std::exp(weight - largest);
    for (size_t i = 0; i < dim; i++) {
        double mean = 0;
        const float *element = v[0] + first_element + i;
        for (const double weight : weights) {
            mean += weight * *element;
            element += v.width;
        }
        o[i] = static_cast<float>(mean / sum);
    }
}

Rows attention(const Rows &q, const Rows &k, const Rows &v, const AttentionShape &shape)
{
    const auto dim = static_cast<size_t>(shape.head_dim);
    const auto group = static_cast<size_t>(shape.num_qo_heads / shape.num_kv_heads);
    Rows o(q.count, q.width);
    for (size_t t = 0; t < q.count; t++)
        for (size_t head = 0; head < q.width / dim; head++)
            attend(q[t] + head * dim, k, v, head / group * dim, t, dim, o[t] + head * dim);
    return o;
}

void add(Rows &x, const Rows &y)
{
    for (size_t i = 0; i < x.values.size(); i++)
        x.values[i] += y.values[i];
}

void run_layer(const Weights &weights, const Layer &layer, Rows &x)
{
    Rows y = normalised(x, layer.attention_norm, weights.rms_norm_eps);
    Rows q = product(y, layer.q), k = product(y, layer.k);
    rotate(q, weights.shape);
    rotate(k, weights.shape);
    add(x, product(attention(q, k, product(y, layer.v), weights.shape), layer.o));

    y = normalised(x, layer.mlp_norm, weights.rms_norm_eps);
    Rows gate = product(y, layer.gate);
    const Rows up = product(y, layer.up);
    for (size_t i = 0; i < gate.values.size(); i++)
        gate.values[i] *= up.values[i] / (1 + std::exp(-gate.values[i]));
    add(x, product(gate, layer.down));
}

// The logits behind the last token.
std::vector<float> logits(const Weights &weights, const std::vector<int32_t> &tokens)
{
    Rows x(tokens.size(), weights.hidden());
    for (size_t t = 0; t < tokens.size(); t++)
        std::copy_n(weights.embedding.data + static_cast<size_t>(tokens[t]) * x.width, x.width, x[t]);
    for (const Layer &layer : weights.layers)
        run_layer(weights, layer, x);
    Rows last(1, x.width);
    std::copy_n(x[x.count - 1], x.width, last[0]);
    return product(normalised(last, weights.final_norm, weights.rms_norm_eps), weights.head).values;
}

} // namespace

NaiveText naive(const Weights &weights, std::vector<int32_t> tokens, size_t max_new_tokens)
{
    float smallest_lead = std::numeric_limits<float>::infinity();
    for (size_t i = 0; i < max_new_tokens; i++) {
        auto row = logits(weights, tokens);
        const auto best = std::max_element(row.begin(), row.end());
        tokens.push_back(static_cast<int32_t>(best - row.begin()));
        const float largest = std::exchange(*best, -std::numeric_limits<float>::infinity());
        smallest_lead = std::min(smallest_lead, largest - *std::max_element(row.begin(), row.end()));
    }
    return {std::move(tokens), smallest_lead};
}

} // namespace engine
