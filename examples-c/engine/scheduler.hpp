// Which tokens the next step computes: continuous batching with chunked prefill, reuse of prefixes, speculation and
// preemption.
//
// One rule makes all of it: a request has tokens, and the first `num_computed` of them have their keys and values in
// the cache. A step computes some of the others. While they are many, that is a prefill, in chunks where the step's
// budget ends it; when one is left, it is a decode; with drafts behind it, a verification. Every request that takes
// part in a step is a few rows of one batch.
#pragma once

#include "batch.hpp"
#include "page_pool.hpp"

#include <deque>
#include <memory>

namespace engine {

struct Request {
    size_t id;
    std::vector<int32_t> tokens; // the prompt and what was generated
    size_t num_prompt;
    size_t max_new_tokens;
    size_t num_computed = 0;
    PageTable table;
    std::vector<int32_t> drafts; // of the step that is under way

    size_t last_size() const { return num_prompt + max_new_tokens; }
    bool finished() const { return tokens.size() == last_size(); }
};

// What happened so far.
struct Counters {
    size_t steps = 0, computed_tokens = 0, reused_tokens = 0, proposed_tokens = 0, accepted_tokens = 0, preemptions = 0,
           mixed_steps = 0, decode_steps = 0, chunks = 0;
};

class Scheduler {
public:
    explicit Scheduler(const Limits &limits);

    // Takes a prompt; the request waits for its turn. Throws std::invalid_argument where it can never have one.
    size_t add(std::vector<int32_t> prompt, size_t max_new_tokens);

    bool has_work() const { return !waiting_.empty() || !running_.empty(); }

    // The next step. Pages for all of its tokens are reserved.
    Batch schedule();

    // Takes over the step's results: the model's next token for each of sampled_rows. Returns what is finished.
    std::vector<std::unique_ptr<Request>> update(const std::vector<int32_t> &next_tokens);

    const Counters &counters() const { return counters_; }
    const PagePool &pool() const { return pool_; }

private:
    // A request's share of a step.
    struct Part {
        Request *request;
        size_t num_tokens;
        size_t num_sampled;
    };

    bool reserve(size_t index, size_t num_tokens);
    void preempt_last();
    bool admit(size_t budget);
    size_t wanted_tokens(Request &request, size_t budget) const;
    void write(Batch &batch, Request &request, size_t num_tokens);
    void count(const Batch &batch);
    void accept(Request &request, const int32_t *next_tokens, size_t count);

    Limits limits_;
    PagePool pool_;
    std::deque<std::unique_ptr<Request>> waiting_;
    std::vector<std::unique_ptr<Request>> running_; // the oldest first
    std::vector<Part> parts_;                       // of the step that is under way
    size_t next_id_ = 0;
    Counters counters_;
};

} // namespace engine
