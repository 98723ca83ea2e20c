// Decode from C++: folio.hpp's handles end themselves, failures are exceptions, tensors own their shape.
//
// One step of a small layer with attention sinks and a soft cap, HND cache, fp8 keys and values. The same
// function runs on Folio's float64 oracle for the numbers to compare with.
#include <folio/folio.hpp>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <random>
#include <vector>

namespace {

constexpr int64_t batch_size = 3, qo_heads = 8, kv_heads = 2, head_dim = 64, page_size = 16, pool_pages = 12;

struct Layer {
    std::vector<float> q, sinks;
    std::vector<uint8_t> k, v; // float8_e4m3
};

Layer random_layer()
{
    std::mt19937 random(1);
    std::uniform_real_distribution<float> uniform(-1, 1);
    Layer layer;
    layer.q.resize(batch_size * qo_heads * head_dim);
    layer.sinks.resize(qo_heads);
    layer.k.resize(pool_pages * kv_heads * page_size * head_dim);
    layer.v.resize(layer.k.size());
    for (auto *values : {&layer.q, &layer.sinks})
        for (float &value : *values)
            value = uniform(random);
    // Any byte but 0x7f and 0xff, its two NaNs, is a number; exponents up to 7 stay below 2.
    for (auto *bytes : {&layer.k, &layer.v})
        for (uint8_t &byte : *bytes)
            byte = static_cast<uint8_t>(random() & 0xbf);
    return layer;
}

std::vector<float> decode(const folio::Context &context, const Layer &layer)
{
    auto desc = FOLIO_INIT(folio_decode_desc);
    desc.q_dtype = FOLIO_FLOAT32;
    desc.kv_dtype = FOLIO_FLOAT8_E4M3;
    desc.kv_layout = FOLIO_LAYOUT_HND;
    desc.num_qo_heads = qo_heads;
    desc.num_kv_heads = kv_heads;
    desc.head_dim_qk = head_dim;
    desc.page_size = page_size;
    desc.max_batch_size = batch_size;
    desc.max_kv_len = 128;
    folio::Decode handle(context, desc);
    folio::HostWorkspace workspace(handle.workspace());
    std::printf("kernel: %s\n", handle.kernel());

    // Requests of 60, 1 and 33 keys, as vLLM states them: a block table and lengths.
    const std::vector<int32_t> lengths{60, 1, 33};
    const std::vector<int32_t> pages{7, 2, 9, 0, /**/ 5, 0, 0, 0, /**/ 11, 4, 6, 0};
    folio::Tensor kv_len(lengths);
    folio::Tensor block_table(pages.data(), FOLIO_INT32, {batch_size, 4});
    auto batch = FOLIO_INIT(folio_batch);
    batch.kv_len = kv_len;
    batch.block_table = block_table;
    handle.plan(batch, workspace);

    std::vector<float> result(layer.q.size());
    folio::Tensor q(layer.q.data(), FOLIO_FLOAT32, {batch_size, qo_heads, head_dim});
    folio::Tensor k(layer.k.data(), FOLIO_FLOAT8_E4M3, {pool_pages, kv_heads, page_size, head_dim});
    folio::Tensor v(layer.v.data(), FOLIO_FLOAT8_E4M3, {pool_pages, kv_heads, page_size, head_dim});
    folio::Tensor o(result.data(), FOLIO_FLOAT32, {batch_size, qo_heads, head_dim});
    folio::Tensor sinks(layer.sinks.data(), FOLIO_FLOAT32, {qo_heads});
    auto args = FOLIO_INIT(folio_attention_args);
    args.q = q;
    args.k = k;
    args.v = v;
    args.o = o;
    args.sinks = sinks;
    args.k_scale = 0.5f;
    args.v_scale = 0.25f;
    args.logits_soft_cap = 30;
    handle.run(args);
    return result;
}

folio::Context oracle()
{
    auto desc = FOLIO_INIT(folio_context_desc);
    desc.device_type = FOLIO_DEVICE_CPU;
    desc.flags = FOLIO_CONTEXT_REFERENCE;
    return folio::Context(desc);
}

} // namespace

int main()
try {
    const Layer layer = random_layer();
    const std::vector<float> result = decode(folio::Context::cpu(2), layer);
    const std::vector<float> expected = decode(oracle(), layer);

    float error = 0, largest = 0;
    for (size_t i = 0; i < result.size(); i++) {
        error = std::fmax(error, std::isnan(result[i]) ? INFINITY : std::fabs(result[i] - expected[i]));
        largest = std::fmax(largest, std::fabs(expected[i]));
    }
    const bool right = error <= 1e-4f * largest;
    std::printf("o against the oracle: max error %.1e, largest value %.3g: %s\n", error, largest, right ? "ok" : "WRONG");
    return right ? 0 : 1;
} catch (const folio::Error &error) {
    std::fprintf(stderr, "Folio failed with status %d: %s\n", error.status(), error.what());
    return 1;
}
