// A runtime in a few hundred lines: requests come and go, the cache is paged and shared, prompts are computed in chunks
// beside decodes, drafts are verified, and every step is one plan of Folio's and one run per layer.
//
//   batch         what a step computes              scheduler    which tokens the next step computes, and drafts
//   page_pool     who owns which page               attention    Folio: the cache, plan, append, attend
//   safetensors   weights from a file               model        from tokens to tokens
//
// This file serves a few requests of random tokens and checks each against a naive loop: exits with 0 iff all tokens
// are equal and every mechanism was in use. docs/from-zero-to-tokens.md walks through it.
#include "naive.hpp"
#include "scheduler.hpp"

#include <cstdio>
#include <random>

using namespace engine;

// Small enough that requests have to wait, prompts are cut, and pages run out.
static constexpr Limits limits{/*page_size*/ 4,       /*num_pages*/ 30,   /*max_batch_size*/ 5,
                               /*max_num_tokens*/ 24, /*max_seq_len*/ 80, /*max_drafts*/ 4};
static constexpr uint32_t num_threads = 2;

// Ten requests, some with the same first 22 tokens, as a system prompt gives them.
static std::vector<Request> random_requests(size_t vocab_size)
{
    std::mt19937 random(2);
    const auto append = [&](Tokens &tokens, size_t count) {
        while (count-- > 0)
            tokens.push_back(random() % vocab_size);
    };
    Tokens system_prompt;
    append(system_prompt, 22);
    std::vector<Request> requests;
    for (size_t i = 0; i < 10; i++) {
        Tokens prompt = i % 2 ? system_prompt : Tokens();
        append(prompt, 1 + random() % 30);
        requests.push_back({prompt, prompt.size() + 6 + random() % 8});
    }
    return requests;
}

// The engine: whatever has arrived is scheduled, computed and taken over, step by step. A request arrives every second
// step. Returns whether there were steps of decodes alone, and others with prompts beside decodes.
static bool serve(Scheduler &scheduler, Model &model, std::vector<Request> &requests)
{
    size_t arrived = 0, steps = 0, decodes = 0, mixed = 0;
    for (size_t tick = 0; arrived < requests.size() || scheduler.has_work(); tick++) {
        if (tick % 2 == 0 && arrived < requests.size())
            scheduler.add(requests[arrived++]);
        if (!scheduler.has_work())
            continue;
        const Batch batch = scheduler.schedule();
        scheduler.update(model.forward(batch));

        const bool few_rows = batch.max_qo_len <= limits.max_drafts + 1;
        steps++;
        decodes += few_rows;
        mixed += !few_rows && batch.kv_len.size() > 1;
    }
    std::printf("%zu steps: %zu of decodes alone, %zu with a prompt beside others\n", steps, decodes, mixed);
    return decodes && mixed;
}

static bool all_in_use(const Counters &counters)
{
    std::printf("%zu chunks of prompts that went on, %zu tokens found in the cache, %zu preemptions\n", counters.chunks,
                counters.reused_tokens, counters.preemptions);
    std::printf("%zu of %zu drafts accepted\n", counters.accepted_tokens, counters.proposed_tokens);
    return counters.chunks && counters.reused_tokens && counters.preemptions && counters.accepted_tokens &&
           counters.accepted_tokens < counters.proposed_tokens;
}

static bool all_equal(const Weights &weights, const std::vector<Request> &prompts, const std::vector<Request> &requests)
{
    size_t equal = 0;
    for (size_t i = 0; i < prompts.size(); i++) {
        const Tokens expected = Naive(weights).generate(prompts[i].tokens, prompts[i].last_size);
        equal += requests[i].tokens == expected;
        if (requests[i].tokens != expected)
            std::printf("request %zu: WRONG tokens\n", i);
    }
    std::printf("%zu of %zu texts are the naive loop's\n", equal, prompts.size());
    return equal == prompts.size();
}

int main(int argc, char **argv)
try {
    const Weights weights{SafeTensors(argc > 1 ? argv[1] : "model.safetensors")};
    Scheduler scheduler(limits);
    Model model(weights, limits, num_threads);
    const std::vector<Request> prompts = random_requests(weights.vocab_size);
    std::vector<Request> requests = prompts;

    const bool served = serve(scheduler, model, requests);
    const bool used = all_in_use(scheduler.counters());
    const bool leaked = scheduler.num_idle_pages() != limits.num_pages;
    const bool equal = all_equal(weights, prompts, requests);
    return served && used && !leaked && equal ? 0 : 1;
} catch (const std::exception &error) { // folio::Error among them
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
}
