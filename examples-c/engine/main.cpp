// A runtime in a few hundred lines: requests come and go, the cache is paged and shared, prompts are computed in chunks
// beside decodes, drafts are verified, and every step is one plan of Folio's and one run per layer.
//
//   safetensors   weights from a file               batch        what a step computes
//   page_pool     who owns which page               scheduler    which tokens the next step computes
//   drafts        proposals for speculation         attention    Folio: the cache, plan, append, attend
//   model         from tokens to tokens             naive        the same by the formulas, to compare with
//
// This file serves a few requests of random tokens and checks each against the naive loop: exits with 0 iff all tokens
// are equal and every mechanism was in use. docs/from-zero-to-tokens.md walks through it.
#include "naive.hpp"
#include "scheduler.hpp"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <random>

namespace {

using engine::Counters;

// Small enough that requests have to wait, prompts are cut, and pages run out.
constexpr engine::Limits limits{/*page_size*/ 4,       /*num_pages*/ 30,   /*max_batch_size*/ 5,
                                /*max_num_tokens*/ 24, /*max_seq_len*/ 80, /*max_drafts*/ 4};
constexpr uint32_t num_threads = 2;

struct Arrival {
    size_t step;
    std::vector<int32_t> prompt;
    size_t max_new_tokens;
};

// Ten requests, some with the same first 22 tokens, as a system prompt gives them.
std::vector<Arrival> arrivals(size_t vocab_size)
{
    std::mt19937 random(2);
    const auto tokens = [&](size_t count) {
        std::vector<int32_t> list(count);
        for (int32_t &token : list)
            token = static_cast<int32_t>(random() % vocab_size);
        return list;
    };
    const std::vector<int32_t> system_prompt = tokens(22);
    std::vector<Arrival> list;
    for (size_t i = 0; i < 10; i++) {
        std::vector<int32_t> prompt = i % 2 ? system_prompt : std::vector<int32_t>();
        const std::vector<int32_t> question = tokens(1 + random() % 30);
        prompt.insert(prompt.end(), question.begin(), question.end());
        list.push_back({2 * i, prompt, 6 + random() % 8});
    }
    return list;
}

// The engine: whatever has arrived is scheduled, computed and taken over, step by step.
std::vector<std::vector<int32_t>> serve(engine::Scheduler &scheduler, engine::Model &model,
                                        const std::vector<Arrival> &requests)
{
    std::vector<std::vector<int32_t>> texts(requests.size());
    size_t arrived = 0;
    for (size_t step = 0; arrived < requests.size() || scheduler.has_work(); step++) {
        for (; arrived < requests.size() && requests[arrived].step <= step; arrived++)
            scheduler.add(requests[arrived].prompt, requests[arrived].max_new_tokens);
        if (!scheduler.has_work())
            continue;
        const engine::Batch batch = scheduler.schedule();
        for (auto &request : scheduler.update(model.forward(batch)))
            texts[request->id] = std::move(request->tokens);
    }
    return texts;
}

// Whether every text is the naive loop's.
bool compare(const engine::Weights &weights, const std::vector<Arrival> &requests,
             const std::vector<std::vector<int32_t>> &texts)
{
    bool equal = true;
    float smallest_lead = 1e30f;
    for (size_t i = 0; i < requests.size(); i++) {
        const auto expected = engine::naive(weights, requests[i].prompt, requests[i].max_new_tokens);
        const bool same = texts[i] == expected.tokens;
        smallest_lead = std::min(smallest_lead, expected.smallest_lead);
        equal = equal && same;
        std::printf("request %zu: prompt of %3zu, %2zu new tokens: %s\n", i, requests[i].prompt.size(),
                    requests[i].max_new_tokens, same ? "equal to the naive loop's" : "WRONG");
    }
    std::printf("the closest of all choices had a lead of %.1e\n", static_cast<double>(smallest_lead));
    return equal;
}

bool all_in_use(const Counters &counters)
{
    std::printf("%zu steps: %zu of decodes alone, %zu with prompts beside decodes\n", counters.steps, counters.decode_steps,
                counters.mixed_steps);
    std::printf("%zu tokens computed, %zu found in the cache; %zu chunks of prompts that went on\n", counters.computed_tokens,
                counters.reused_tokens, counters.chunks);
    std::printf("%zu of %zu drafts accepted; %zu preemptions\n", counters.accepted_tokens, counters.proposed_tokens,
                counters.preemptions);
    return counters.decode_steps && counters.mixed_steps && counters.reused_tokens && counters.chunks && counters.preemptions &&
           counters.accepted_tokens && counters.accepted_tokens < counters.proposed_tokens;
}

} // namespace

int main(int argc, char **argv)
try {
    if (argc != 2) {
        std::fprintf(stderr, "usage: engine MODEL.safetensors\n");
        return 2;
    }
    const engine::SafeTensors file(argv[1]);
    const engine::Weights weights(file);
    engine::Scheduler scheduler(limits);
    engine::Model model(weights, limits, num_threads);
    std::printf("kernels: decode %s, prefill %s\n", model.attention().decode_kernel(), model.attention().prefill_kernel());

    const std::vector<Arrival> requests = arrivals(weights.vocab_size());
    const auto start = std::chrono::steady_clock::now();
    const auto texts = serve(scheduler, model, requests);
    const std::chrono::duration<double, std::milli> time = std::chrono::steady_clock::now() - start;
    std::printf("served %zu requests in %.1f ms\n", requests.size(), time.count());

    const bool used = all_in_use(scheduler.counters());
    const bool leaked = scheduler.pool().num_idle() != scheduler.pool().num_pages();
    const bool equal = compare(weights, requests, texts);
    return used && !leaked && equal ? 0 : 1;
} catch (const std::exception &error) { // folio::Error among them
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
}
