// Steps from requests, and requests from the results of steps. See scheduler.hpp.
#include "scheduler.hpp"

#include "drafts.hpp"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace engine {

Scheduler::Scheduler(const Limits &limits) : limits_(limits), pool_(limits.num_pages, limits.page_size) {}

size_t Scheduler::add(std::vector<int32_t> prompt, size_t max_new_tokens)
{
    const size_t tokens = prompt.size() + max_new_tokens;
    const size_t most = std::min(static_cast<size_t>(limits_.max_seq_len),
                                 pool_.num_pages() * static_cast<size_t>(limits_.page_size));
    if (prompt.empty() || max_new_tokens == 0 || tokens > most)
        throw std::invalid_argument("a prompt of " + std::to_string(prompt.size()) + " tokens with " +
                                    std::to_string(max_new_tokens) +
                                    " new ones is not accepted; at least one of each and at most " + std::to_string(most) +
                                    " together are");
    const size_t size = prompt.size();
    waiting_.push_back(std::make_unique<Request>(Request{next_id_, std::move(prompt), size, max_new_tokens, 0, {}, {}}));
    return next_id_++;
}

// How much of a request the step has room for, drafts included. A decode proposes drafts.
size_t Scheduler::wanted_tokens(Request &request, size_t budget) const
{
    request.drafts.clear();
    const size_t known = request.tokens.size() - request.num_computed;
    if (known == 1) {
        // The model adds a token of its own behind the drafts.
        const size_t left = request.last_size() - request.tokens.size() - 1;
        request.drafts = propose(request.tokens, std::min({static_cast<size_t>(limits_.max_drafts), left, budget - 1}));
    }
    return std::min(known + request.drafts.size(), budget);
}

void Scheduler::preempt_last()
{
    // Its pages stay published, so it may find most of them again. Its tokens are never lost.
    std::unique_ptr<Request> last = std::move(running_.back());
    running_.pop_back();
    pool_.release(last->table);
    last->num_computed = 0;
    waiting_.push_front(std::move(last));
    counters_.preemptions++;
}

// Pages for a running request, at the cost of younger ones. False where it had to go itself.
bool Scheduler::reserve(size_t index, size_t num_tokens)
{
    while (!pool_.grow(running_[index]->table, num_tokens)) {
        preempt_last();
        if (index == running_.size())
            return false;
    }
    return true;
}

// Moves the first waiting request to the running ones, where there is room for its first chunk.
bool Scheduler::admit(size_t budget)
{
    Request &request = *waiting_.front();
    request.table = pool_.reuse(request.tokens);
    const size_t reused = request.table.pages.size() * static_cast<size_t>(limits_.page_size);
    if (!pool_.grow(request.table, std::min(request.tokens.size(), reused + budget))) {
        pool_.release(request.table);
        return false;
    }
    request.num_computed = reused;
    counters_.reused_tokens += reused;
    running_.push_back(std::move(waiting_.front()));
    waiting_.pop_front();
    return true;
}

void Scheduler::write(Batch &batch, Request &request, size_t num_tokens)
{
    const size_t end = request.num_computed + num_tokens;
    const size_t sampled = end - std::min(end, request.tokens.size() - 1); // the last token, and drafts behind it
    for (size_t i = request.num_computed; i < end; i++)
        batch.tokens.push_back(i < request.tokens.size() ? request.tokens[i] : request.drafts[i - request.tokens.size()]);
    for (size_t i = sampled; i > 0; i--)
        batch.sampled_rows.push_back(static_cast<int32_t>(batch.tokens.size() - i));
    batch.qo_indptr.push_back(static_cast<int32_t>(batch.tokens.size()));
    batch.kv_len.push_back(static_cast<int32_t>(end));
    const size_t row = batch.block_table.size();
    batch.block_table.resize(row + static_cast<size_t>(limits_.max_pages()), 0);
    std::copy(request.table.pages.begin(), request.table.pages.end(),
              batch.block_table.begin() + static_cast<std::ptrdiff_t>(row));
    parts_.push_back({&request, num_tokens, sampled});
}

Batch Scheduler::schedule()
{
    Batch batch;
    parts_.clear();
    auto budget = static_cast<size_t>(limits_.max_num_tokens);
    // Running requests first, the oldest before the others: nobody starves, and what is begun gets finished. Then new
    // ones, as long as no running one had to give way.
    const size_t preemptions = counters_.preemptions;
    for (size_t i = 0; budget > 0; i++) {
        const bool may_admit = i < static_cast<size_t>(limits_.max_batch_size) && counters_.preemptions == preemptions;
        if (i == running_.size() && (!may_admit || waiting_.empty() || !admit(budget)))
            break;
        const size_t wanted = wanted_tokens(*running_[i], budget);
        if (!reserve(i, running_[i]->num_computed + wanted))
            break;
        write(batch, *running_[i], wanted);
        budget -= wanted;
    }
    count(batch);
    return batch;
}

void Scheduler::count(const Batch &batch)
{
    bool prompts = false, decodes = false;
    for (const Part &part : parts_) {
        const bool prompt = part.num_tokens > part.num_sampled;
        prompts = prompts || prompt;
        decodes = decodes || !prompt;
        counters_.chunks += part.num_sampled == 0;
        counters_.proposed_tokens += part.request->drafts.size();
    }
    counters_.steps++;
    counters_.computed_tokens += batch.num_tokens();
    counters_.mixed_steps += prompts && decodes;
    counters_.decode_steps += !prompts;
}

// Greedy acceptance: a draft holds if it is the token that the model puts there itself. The first that does not hold is
// replaced by the model's token, so that every step yields at least one token, and exactly those of decoding one by one.
void Scheduler::accept(Request &request, const int32_t *next_tokens, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        request.tokens.push_back(next_tokens[i]);
        if (i == request.drafts.size() || request.drafts[i] != next_tokens[i])
            break;
        counters_.accepted_tokens++;
    }
    // Keys of drafts that did not hold lie behind these, where the next tokens' keys overwrite them.
    request.num_computed = request.tokens.size() - 1;
}

std::vector<std::unique_ptr<Request>> Scheduler::update(const std::vector<int32_t> &next_tokens)
{
    size_t taken = 0;
    for (const Part &part : parts_) {
        Request &request = *part.request;
        if (part.num_sampled == 0)
            request.num_computed += part.num_tokens;
        else
            accept(request, &next_tokens[taken], part.num_sampled);
        taken += part.num_sampled;
        pool_.publish(request.table, request.tokens, request.num_computed);
        if (request.finished())
            pool_.release(request.table);
    }
    parts_.clear();

    std::vector<std::unique_ptr<Request>> done;
    for (auto &request : running_)
        if (request->finished())
            done.push_back(std::move(request));
    running_.erase(std::remove(running_.begin(), running_.end(), nullptr), running_.end());
    return done;
}

} // namespace engine
