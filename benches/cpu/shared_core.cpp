// What a second thread costs a caller that has one core: decodes on two threads over the same on one thread, in turn.
//
//     c++ -std=c++17 -O2 benches/cpu/shared_core.cpp $(pkg-config --cflags --libs folio) -o shared_core
//     taskset -c 0 ./shared_core && ./shared_core
//
// With one CPU it prints what a context that is asked for two threads takes there. With several it prints first what two
// threads gain, and then, when every thread of the process was bound to the first CPU, what they lose. Figures are the
// median time on one thread, and the time on two threads over that of the run on one beside it: the median, and what 90 %
// of the rounds are within. The same of a second context with one thread says what other work on the core does.
#include <folio/folio.hpp>

#include <dirent.h>
#include <sched.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <random>
#include <vector>

namespace {

constexpr int64_t qo_heads = 32, kv_heads = 8, dim = 128, page_size = 16;

struct Case {
    int64_t batch_size, kv_len;
};

constexpr Case cases[] = {{1, 128}, {1, 512}, {8, 512}, {8, 2048}};

std::vector<uint16_t> bf16(int64_t count) // ±0.5 to ±1
{
    std::mt19937 random(1);
    std::vector<uint16_t> values(static_cast<size_t>(count));
    for (uint16_t &value : values)
        value = static_cast<uint16_t>(0x3f00 | (random() & 0x807f));
    return values;
}

double value_at(std::vector<double> values, double share)
{
    const auto place = values.begin() + static_cast<std::ptrdiff_t>(static_cast<double>(values.size() - 1) * share);
    std::nth_element(values.begin(), place, values.end());
    return *place;
}

folio::Decode decode_for(const folio::Context &context, const Case &sizes)
{
    auto desc = FOLIO_INIT(folio_decode_desc);
    desc.q_dtype = FOLIO_BFLOAT16;
    desc.num_qo_heads = qo_heads;
    desc.num_kv_heads = kv_heads;
    desc.head_dim_qk = dim;
    desc.page_size = page_size;
    desc.max_batch_size = static_cast<uint32_t>(sizes.batch_size);
    desc.max_kv_len = static_cast<uint32_t>(sizes.kv_len);
    return folio::Decode(context, desc);
}

void compare(const folio::Context &one, const folio::Context &other, const folio::Context &two, const Case &sizes)
{
    const int64_t pages = sizes.batch_size * sizes.kv_len / page_size;
    const auto q_data = bf16(sizes.batch_size * qo_heads * dim), cache = bf16(pages * page_size * kv_heads * dim);
    std::vector<uint16_t> o_data(q_data.size());
    std::vector<int32_t> ids(static_cast<size_t>(pages));
    std::iota(ids.begin(), ids.end(), 0);
    std::shuffle(ids.begin(), ids.end(), std::mt19937(1));
    const std::vector<int32_t> lengths(static_cast<size_t>(sizes.batch_size), static_cast<int32_t>(sizes.kv_len));

    const folio::Tensor kv_len(lengths), block_table(ids, {sizes.batch_size, pages / sizes.batch_size});
    auto batch = FOLIO_INIT(folio_batch);
    batch.kv_len = kv_len;
    batch.block_table = block_table;
    const folio::Tensor q(q_data, FOLIO_BFLOAT16, {sizes.batch_size, qo_heads, dim});
    const folio::Tensor o(o_data, FOLIO_BFLOAT16, {sizes.batch_size, qo_heads, dim});
    const folio::Tensor kv(cache, FOLIO_BFLOAT16, {pages, page_size, kv_heads, dim});
    auto args = FOLIO_INIT(folio_attention_args);
    args.q = q;
    args.k = kv;
    args.v = kv;
    args.o = o;

    folio::Decode alone = decode_for(one, sizes), again = decode_for(other, sizes), together = decode_for(two, sizes);
    folio::HostWorkspace memory_alone(alone.workspace()), memory_again(again.workspace());
    folio::HostWorkspace memory_together(together.workspace());
    alone.plan(batch, memory_alone);
    again.plan(batch, memory_again);
    together.plan(batch, memory_together);
    const auto microseconds = [&](folio::Decode &decode) {
        const auto start = std::chrono::steady_clock::now();
        decode.run(args);
        return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - start).count();
    };

    std::vector<double> times, of_two, of_one;
    const auto compared = [&](bool first, folio::Decode &decode, std::vector<double> &shares) {
        const double before = first ? microseconds(decode) : 0;
        const double time = microseconds(alone);
        times.push_back(time);
        shares.push_back((first ? before : microseconds(decode)) / time);
    };
    const auto rounds = std::clamp<int64_t>(4000000 / (sizes.batch_size * sizes.kv_len), 200, 4000);
    for (int64_t i = 0; i < rounds; i++) {
        compared(i % 2, together, of_two);
        compared(i % 2, again, of_one);
    }
    std::printf("%d x %4d keys: one thread %8.1f us; two %.2f times that, 90 %% within %.2f; one again %.2f, within %.2f\n",
                static_cast<int>(sizes.batch_size), static_cast<int>(sizes.kv_len), value_at(times, 0.5),
                value_at(of_two, 0.5), value_at(of_two, 0.9), value_at(of_one, 0.5), value_at(of_one, 0.9));
    std::fflush(stdout);
}

void bind_every_thread(int cpu)
{
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(cpu, &set);
    DIR *threads = opendir("/proc/self/task");
    while (const dirent *thread = threads ? readdir(threads) : nullptr)
        if (const int id = std::atoi(thread->d_name))
            sched_setaffinity(id, sizeof set, &set);
    if (threads)
        closedir(threads);
}

} // namespace

int main()
try {
    cpu_set_t set;
    sched_getaffinity(0, sizeof set, &set);
    int first = 0;
    while (!CPU_ISSET(first, &set))
        first++;
    const folio::Context one = folio::Context::cpu(1), other = folio::Context::cpu(1), two = folio::Context::cpu(2);
    const bool several = CPU_COUNT(&set) > 1;
    std::printf(several ? "each thread has a CPU\n" : "the process has one CPU\n");
    for (const Case &sizes : cases)
        compare(one, other, two, sizes);
    if (several) {
        bind_every_thread(first);
        std::printf("both threads are bound to one CPU\n");
        for (const Case &sizes : cases)
            compare(one, other, two, sizes);
    }
    return 0;
} catch (const folio::Error &error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
}
