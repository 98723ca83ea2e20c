// Which tokens the next step computes. One rule makes continuous batching, chunked prefill, reuse of prefixes,
// speculation and preemption: a request has tokens, and the first `num_computed` of them have their keys and values in
// the cache. A step computes some of the others. While they are many, that is a prefill, in chunks where the step's
// budget ends it; when one is left, it is a decode; with drafts behind it, a verification.
#pragma once

#include "page_pool.hpp"

#include <algorithm>
#include <deque>
#include <stdexcept>

namespace engine {

struct Request {
    Tokens tokens;    // the prompt, and what was generated behind it
    size_t last_size; // of tokens, when all are generated
    size_t num_computed = 0;
    PageTable pages = {};
    Tokens drafts = {};  // of the step that is under way
    size_t num_rows = 0; // that it computes of the request

    bool finished() const { return tokens.size() == last_size; }

    // Rows after which the next token is wanted: those of the last token and of drafts.
    size_t num_sampled() const { return num_rows - std::min(num_rows, tokens.size() - 1 - num_computed); }
};

// What happened so far.
struct Counters {
    size_t chunks = 0, reused_tokens = 0, proposed_tokens = 0, accepted_tokens = 0, preemptions = 0;
};

// Drafts for the next tokens of a text, which the model verifies: what followed its last n tokens where they stood
// before. The longest n counts, and of places the latest. A draft model would have this signature.
inline Tokens propose(const Tokens &tokens, size_t most)
{
    for (size_t n = std::min<size_t>(3, tokens.size() - 1); n >= 1; n--) {
        const auto found = std::find_end(tokens.begin(), tokens.end() - 1, tokens.end() - n, tokens.end());
        if (found != tokens.end() - 1)
            return {found + n, found + n + std::min<size_t>(most, tokens.end() - found - n)};
    }
    return {};
}

class Scheduler {
public:
    explicit Scheduler(const Limits &limits) : limits_(limits), pool_(limits.num_pages, limits.page_size) {}

    // The request waits for its turn. It is the caller's, and stays where it is until it is finished.
    void add(Request &request)
    {
        const size_t most = std::min<size_t>(limits_.max_seq_len, limits_.num_slots());
        if (request.tokens.empty() || request.last_size <= request.tokens.size() || request.last_size > most)
            throw std::invalid_argument("a request needs a prompt, a token to generate, and room in the cache");
        waiting_.push_back(&request);
    }

    bool has_work() const { return !waiting_.empty() || !running_.empty(); }

    // The next step. Running requests first, the oldest before the others: nobody starves, and what is begun gets
    // finished. Then waiting ones.
    Batch schedule()
    {
        Batch batch;
        size_t budget = limits_.max_num_tokens;
        for (size_t i = 0; budget > 0; i++) {
            if (i == running_.size() && !admit(budget))
                break;
            Request &request = *running_[i];
            choose_rows(request, budget);
            if (!reserve(request))
                break;
            write(batch, request);
            budget -= request.num_rows;
        }
        return batch;
    }

    // Takes over the step's results: the model's next token for each of sampled_rows.
    void update(const Tokens &next_tokens)
    {
        const int32_t *next = next_tokens.data();
        for (Request *request : running_) {
            const size_t begin = request->num_computed, sampled = request->num_sampled();
            accept(*request, next, sampled);
            next += sampled;
            // Keys of drafts that did not hold lie behind these, where the next tokens' keys overwrite them.
            request->num_computed = std::min(begin + request->num_rows, request->tokens.size() - 1);
            request->num_rows = 0;
            pool_.publish(request->pages, request->tokens, begin, request->num_computed);
            if (request->finished())
                pool_.release(request->pages);
        }
        const auto finished = [](const Request *request) { return request->finished(); };
        running_.erase(std::remove_if(running_.begin(), running_.end(), finished), running_.end());
    }

    const Counters &counters() const { return counters_; }
    size_t num_idle_pages() const { return pool_.num_idle(); }

private:
    // Moves the first waiting request to the running ones, where there is room for its first chunk.
    bool admit(size_t budget)
    {
        if (waiting_.empty() || running_.size() == limits_.max_batch_size)
            return false;
        Request &request = *waiting_.front();
        request.pages = pool_.reuse(request.tokens);
        request.num_computed = request.pages.size() * limits_.page_size;
        if (!pool_.grow(request.pages, std::min(request.tokens.size(), request.num_computed + budget))) {
            pool_.release(request.pages);
            return false;
        }
        counters_.reused_tokens += request.num_computed;
        running_.push_back(&request);
        waiting_.pop_front();
        return true;
    }

    // What the budget has room for. A decode proposes drafts, behind which the model adds a token of its own.
    void choose_rows(Request &request, size_t budget) const
    {
        const size_t known = request.tokens.size() - request.num_computed;
        const size_t left = request.last_size - request.tokens.size() - 1;
        request.drafts.clear();
        if (known == 1)
            request.drafts = propose(request.tokens, std::min({size_t{limits_.max_drafts}, left, budget - 1}));
        request.num_rows = std::min(known + request.drafts.size(), budget);
    }

    // Pages for the rows of a running request, at the cost of younger ones. False where it had to go itself.
    bool reserve(Request &request)
    {
        while (!pool_.grow(request.pages, request.num_computed + request.num_rows))
            if (preempt_last() == &request)
                return false;
        return true;
    }

    // The youngest running request waits again. Its tokens are kept, and its full pages until they are needed.
    const Request *preempt_last()
    {
        Request *last = running_.back();
        pool_.release(last->pages);
        waiting_.push_front(last);
        running_.pop_back();
        counters_.preemptions++;
        return last;
    }

    void write(Batch &batch, const Request &request)
    {
        const size_t known = request.tokens.size(), end = request.num_computed + request.num_rows;
        for (size_t i = request.num_computed; i < end; i++) {
            const size_t page = request.pages[i / limits_.page_size];
            batch.tokens.push_back(i < known ? request.tokens[i] : request.drafts[i - known]);
            batch.positions.push_back(i);
            batch.slot_mapping.push_back(page * limits_.page_size + i % limits_.page_size);
        }
        for (size_t i = request.num_sampled(); i > 0; i--)
            batch.sampled_rows.push_back(batch.tokens.size() - i);
        batch.qo_indptr.push_back(batch.tokens.size());
        batch.kv_len.push_back(end);
        batch.block_table.insert(batch.block_table.end(), request.pages.begin(), request.pages.end());
        batch.block_table.resize(batch.kv_len.size() * limits_.max_pages());
        batch.max_qo_len = std::max<uint32_t>(batch.max_qo_len, request.num_rows);
        counters_.proposed_tokens += request.drafts.size();
        counters_.chunks += request.num_sampled() == 0;
    }

    // Greedy acceptance: a draft holds if it is the token that the model puts there itself. The first that does not
    // hold is replaced by the model's token, so that the tokens are exactly those of decoding one by one.
    void accept(Request &request, const int32_t *next_tokens, size_t count)
    {
        for (size_t i = 0; i < count; i++) {
            request.tokens.push_back(next_tokens[i]);
            if (i == request.drafts.size() || request.drafts[i] != next_tokens[i])
                break;
            counters_.accepted_tokens++;
        }
    }

    Limits limits_;
    PagePool pool_;
    std::deque<Request *> waiting_;
    std::vector<Request *> running_; // the oldest first
    Counters counters_;
};

} // namespace engine
