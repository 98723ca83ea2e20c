// The same model without an engine: what every token of the engine is compared with. The formulas are written down a
// second time, in float64 but for the matrix products, and share nothing else with model.hpp, so that a mistake there
// shows.
#pragma once

#include "model.hpp"

namespace engine {

class Naive {
public:
    explicit Naive(const Weights &weights) : weights_(weights) {}

    // Greedy decoding up to a text of `size` tokens. For every new one the whole text is computed again, without a
    // cache, and attention by its formula.
    Tokens generate(Tokens text, size_t size) const
    {
        while (text.size() < size) {
            std::vector<Row> rows;
            for (const int32_t token : text)
                rows.emplace_back(weights_.embedded(token), weights_.embedded(token) + weights_.hidden);
            for (const Layer &layer : weights_.layers)
                run_layer(layer, rows);
            const Row logits = multiply(normalised(rows.back(), weights_.final_norm), weights_.head);
            text.push_back(std::max_element(logits.begin(), logits.end()) - logits.begin());
        }
        return text;
    }

private:
    using Row = std::vector<float>; // of one token

    void run_layer(const Layer &layer, std::vector<Row> &rows) const
    {
        std::vector<Row> k, v; // of the tokens so far, which are all that a token sees
        for (Row &x : rows) {
            Row y = normalised(x, layer.attention_norm);
            const Row q = rotated(multiply(y, layer.q), k.size());
            k.push_back(rotated(multiply(y, layer.k), k.size()));
            v.push_back(multiply(y, layer.v));
            multiply_add(attention(q, k, v), layer.o, x);

            y = normalised(x, layer.mlp_norm);
            Row gate = multiply(y, layer.gate);
            const Row up = multiply(y, layer.up);
            for (size_t i = 0; i < gate.size(); i++)
                gate[i] *= up[i] / (1 + std::exp(-gate[i]));
            multiply_add(gate, layer.down, x);
        }
    }

    Row normalised(Row x, const Row &weight) const
    {
        double mean = 0;
        for (const double element : x)
            mean += element * element / x.size();
        for (size_t i = 0; i < x.size(); i++)
            x[i] = x[i] / std::sqrt(mean + weights_.rms_norm_eps) * weight[i];
        return x;
    }

    // Each head's pairs of elements i and i + half, rotated by the angles of the position (Su et al., 2021).
    Row rotated(Row heads, size_t position) const
    {
        const size_t dim = weights_.shape.head_dim, half = dim / 2;
        for (size_t i = 0; i < half; i++) {
            const double angle = position * std::pow(weights_.shape.rope_theta, -2.0 * i / dim);
            const double cosine = std::cos(angle), sine = std::sin(angle);
            for (size_t element = i; element < heads.size(); element += dim) {
                const double x = heads[element], y = heads[element + half];
                heads[element] = x * cosine - y * sine;
                heads[element + half] = y * cosine + x * sine;
            }
        }
        return heads;
    }

    // softmax(q · kᵀ / sqrt(dim)) · v, head by head. Scores are small: their exponentials fit in float64.
    Row attention(const Row &q, const std::vector<Row> &k, const std::vector<Row> &v) const
    {
        const size_t dim = weights_.shape.head_dim, group = weights_.shape.num_qo_heads / weights_.shape.num_kv_heads;
        Row o(q.size());
        for (size_t first = 0; first < q.size(); first += dim) {
            const size_t kv_first = first / dim / group * dim;
            double sum = 0;
            std::vector<double> weighted(dim);
            for (size_t t = 0; t < k.size(); t++) {
                double score = 0;
                for (size_t i = 0; i < dim; i++)
                    score += double{q[first + i]} * k[t][kv_first + i];
                const double weight = std::exp(score / std::sqrt(dim));
                sum += weight;
                for (size_t i = 0; i < dim; i++)
                    weighted[i] += weight * v[t][kv_first + i];
            }
            for (size_t i = 0; i < dim; i++)
                o[first + i] = weighted[i] / sum;
        }
        return o;
    }

    const Weights &weights_;
};

} // namespace engine
