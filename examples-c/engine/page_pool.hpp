// Who owns which page of the KV cache, and which pages hold the beginning of a text that may come again: full pages are
// published, and found by their tokens and the page before them. Pages without a user keep what they hold until they
// are needed, the ones that were used last for longest.
#pragma once

#include "batch.hpp"

#include <map>
#include <set>
#include <utility>

namespace engine {

class PagePool {
public:
    PagePool(size_t num_pages, size_t page_size) : page_size_(page_size), pages_(num_pages)
    {
        for (size_t id = 0; id < num_pages; id++)
            idle_.emplace(0, id);
    }

    // The published pages that hold the beginning of `tokens`. The last is left out: its logits have to be computed.
    PageTable reuse(const Tokens &tokens)
    {
        PageTable table;
        while ((table.size() + 1) * page_size_ < tokens.size()) {
            const auto found = published_.find(key(table, tokens, table.size()));
            if (found == published_.end())
                break;
            add_user(found->second);
            table.push_back(found->second);
        }
        return table;
    }

    // Adds pages until there is room for `num_tokens`. False, and no page, if there are too few.
    bool grow(PageTable &table, size_t num_tokens)
    {
        const size_t wanted = (num_tokens + page_size_ - 1) / page_size_;
        if (wanted > table.size() + idle_.size())
            return false;
        while (table.size() < wanted) {
            table.push_back(idle_.begin()->second);
            add_user(table.back());
            published_.erase(std::exchange(pages_[table.back()].key, {})); // its text is overwritten
        }
        return true;
    }

    // Publishes the pages that `tokens` fill from number `begin` up to number `end`. Nobody writes to them any more.
    void publish(PageTable &table, const Tokens &tokens, size_t begin, size_t end)
    {
        for (size_t i = begin / page_size_; i < end / page_size_; i++) {
            const auto [entry, is_new] = published_.emplace(key(table, tokens, i), table[i]);
            if (is_new) {
                pages_[table[i]].key = entry->first;
            } else { // another request was first: its page serves both
                add_user(entry->second);
                remove_user(std::exchange(table[i], entry->second));
            }
        }
    }

    // Takes back all pages of a table. The end of a text goes first, see idle_.
    void release(PageTable &table)
    {
        for (; !table.empty(); table.pop_back())
            remove_user(table.back());
    }

    size_t num_idle() const { return idle_.size(); }

private:
    // The page before, or -1, and the tokens in the page. Comparing tokens, not hashes, leaves nothing to chance.
    using Key = std::pair<int32_t, Tokens>;

    struct Page {
        size_t users = 0;
        uint64_t idle_since = 0; // 0 where nobody will look for it
        Key key;                 // without tokens where it is not published
    };

    Key key(const PageTable &table, const Tokens &tokens, size_t index) const
    {
        const auto begin = tokens.begin() + index * page_size_;
        return {index == 0 ? -1 : table[index - 1], Tokens(begin, begin + page_size_)};
    }

    void add_user(int32_t id)
    {
        if (pages_[id].users++ == 0)
            idle_.erase({pages_[id].idle_since, id});
    }

    void remove_user(int32_t id)
    {
        Page &page = pages_[id];
        if (--page.users == 0) {
            page.idle_since = page.key.second.empty() ? 0 : ++clock_;
            idle_.emplace(page.idle_since, id);
        }
    }

    size_t page_size_;
    uint64_t clock_ = 0;
    std::vector<Page> pages_;
    std::map<Key, int32_t> published_;
    // Pages without users; the next one to be overwritten comes first. Who uses a page uses those before it in the text
    // and gives it back before them. So it is overwritten before them, and the page before it says what text that is.
    std::set<std::pair<uint64_t, int32_t>> idle_;
};

} // namespace engine
