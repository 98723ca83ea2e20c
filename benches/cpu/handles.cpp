// What the choice of a handle costs: the same batches on folio_decode, folio_prefill and folio_cascade, in turn.
//
//     c++ -std=c++17 -O2 benches/cpu/handles.cpp $(pkg-config --cflags --libs folio) -o handles && ./handles [threads]
//
// Prints for each batch the median time of the decode handle's run and, for the others, the median of their times over
// that of a run of the decode handle beside them: neighbours disturb both alike. Outputs are compared too. The decode
// handle is made for the batch, the others for prompts as well, as an engine's are.
#include <folio/folio.hpp>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <numeric>
#include <random>

namespace {

constexpr int64_t qo_heads = 32, kv_heads = 8, dim = 128, page_size = 16;

struct Case {
    int64_t batch_size, qo_len, kv_len;
};

double microseconds(const std::function<void()> &call)
{
    const auto start = std::chrono::steady_clock::now();
    call();
    return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - start).count();
}

double median(std::vector<double> values)
{
    std::nth_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2), values.end());
    return values[values.size() / 2];
}

template <class Desc>
Desc described(const Case &sizes)
{
    auto desc = FOLIO_INIT(Desc);
    desc.q_dtype = FOLIO_BFLOAT16;
    desc.num_qo_heads = qo_heads;
    desc.num_kv_heads = kv_heads;
    desc.head_dim_qk = dim;
    desc.page_size = page_size;
    desc.max_batch_size = static_cast<uint32_t>(sizes.batch_size);
    desc.max_kv_len = 8192;
    if constexpr (std::is_same_v<Desc, folio_decode_desc>)
        desc.max_qo_len = static_cast<uint32_t>(sizes.qo_len);
    else
        desc.max_num_tokens = 2048; // chunks of prompts have to fit too
    return desc;
}

void compare(const folio::Context &context, const Case &sizes)
{
    const int64_t tokens = sizes.batch_size * sizes.qo_len, pages = (sizes.kv_len + page_size - 1) / page_size;
    std::mt19937 random(1);
    const auto bf16 = [&](int64_t count) { // ±0.5 to ±1
        std::vector<uint16_t> values(static_cast<size_t>(count));
        for (uint16_t &value : values)
            value = static_cast<uint16_t>(0x3f00 | (random() & 0x807f));
        return values;
    };
    const auto cache_elements = sizes.batch_size * pages * page_size * kv_heads * dim;
    const auto q_data = bf16(tokens * qo_heads * dim), k_data = bf16(cache_elements), v_data = bf16(cache_elements);
    std::vector<uint16_t> o_data(q_data.size());
    std::vector<int32_t> indptr, lengths(static_cast<size_t>(sizes.batch_size), static_cast<int32_t>(sizes.kv_len));
    for (int64_t i = 0; i <= sizes.batch_size; i++)
        indptr.push_back(static_cast<int32_t>(i * sizes.qo_len));
    std::vector<int32_t> ids(static_cast<size_t>(sizes.batch_size * pages));
    std::iota(ids.begin(), ids.end(), 0);
    std::shuffle(ids.begin(), ids.end(), random);

    const folio::Tensor qo_indptr(indptr), kv_len(lengths), block_table(ids, {sizes.batch_size, pages});
    auto batch = FOLIO_INIT(folio_batch);
    batch.qo_indptr = qo_indptr;
    batch.kv_len = kv_len;
    batch.block_table = block_table;
    const folio::Tensor q(q_data, FOLIO_BFLOAT16, {tokens, qo_heads, dim});
    const folio::Tensor o(o_data, FOLIO_BFLOAT16, {tokens, qo_heads, dim});
    const folio::Tensor k(k_data, FOLIO_BFLOAT16, {sizes.batch_size * pages, page_size, kv_heads, dim});
    const folio::Tensor v(v_data, FOLIO_BFLOAT16, {sizes.batch_size * pages, page_size, kv_heads, dim});
    auto args = FOLIO_INIT(folio_attention_args);
    args.q = q;
    args.k = k;
    args.v = v;
    args.o = o;

    folio::Decode decode(context, described<folio_decode_desc>(sizes));
    folio::Prefill prefill(context, described<folio_prefill_desc>(sizes));
    folio::Cascade cascade(context, described<folio_cascade_desc>(sizes));
    folio::HostWorkspace decode_memory(decode.workspace()), prefill_memory(prefill.workspace());
    folio::HostWorkspace cascade_memory(cascade.workspace());
    const auto none = FOLIO_INIT(folio_shared_prefixes);

    std::vector<double> decodes, prefills, cascades, decode_plans, prefill_plans, cascade_plans;
    const auto outputs = [&](const std::function<void()> &run) {
        std::fill(o_data.begin(), o_data.end(), uint16_t{0});
        run();
        return o_data;
    };
    decode.plan(batch, decode_memory);
    prefill.plan(batch, prefill_memory);
    cascade.plan(batch, none, cascade_memory);
    const auto expected = outputs([&] { decode.run(args); });
    for (const auto &other : {outputs([&] { prefill.run(args); }), outputs([&] { cascade.run(args); })})
        for (size_t i = 0; i < expected.size(); i++)
            if (std::abs(int{other[i]} - int{expected[i]}) > 256) { // another number than by rounding
                std::fprintf(stderr, "the handles disagree\n");
                std::exit(1);
            }

    // Who runs second finds more of the cache in the processor, so the others go first in every other round.
    const auto compared = [&](bool first, const std::function<void()> &run, std::vector<double> &shares) {
        const double before = first ? microseconds(run) : 0;
        const double decoded = microseconds([&] { decode.run(args); });
        shares.push_back((first ? before : microseconds(run)) / decoded);
        decodes.push_back(decoded);
    };
    const auto rounds = std::clamp<int64_t>(2000000 / (sizes.batch_size * sizes.qo_len * sizes.kv_len), 20, 400);
    for (int64_t i = 0; i < rounds; i++) {
        decode_plans.push_back(microseconds([&] { decode.plan(batch, decode_memory); }));
        prefill_plans.push_back(microseconds([&] { prefill.plan(batch, prefill_memory); }));
        cascade_plans.push_back(microseconds([&] { cascade.plan(batch, none, cascade_memory); }));
        compared(i % 2, [&] { prefill.run(args); }, prefills);
        compared(i % 2, [&] { cascade.run(args); }, cascades);
    }
    std::printf("%2d x %4d keys, %d rows: decode %8.1f us; prefill %.2f, cascade %.2f times that; plans %.1f, %.1f, %.1f us\n",
                static_cast<int>(sizes.batch_size), static_cast<int>(sizes.kv_len), static_cast<int>(sizes.qo_len),
                median(decodes), median(prefills), median(cascades), median(decode_plans), median(prefill_plans),
                median(cascade_plans));
    std::fflush(stdout);
}

} // namespace

int main(int argc, char **argv)
try {
    const folio::Context context = folio::Context::cpu(argc > 1 ? static_cast<uint32_t>(std::atoi(argv[1])) : 1);
    for (const Case &sizes : {Case{1, 1, 512}, {1, 1, 8192}, {8, 1, 512}, {8, 1, 2048}, {32, 1, 512}, {64, 1, 128},
                              {8, 3, 2048}, {8, 5, 2048}, {32, 5, 512}})
        compare(context, sizes);
    return 0;
} catch (const folio::Error &error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
}
