// Who owns which page of the KV cache, and which pages hold the beginning of a text that may come again.
//
// A page that a request has filled is published: it can be found by its tokens and all tokens before them. A later
// request with the same beginning gets the same page in its page table, and computes nothing for it. Pages without a
// user keep what they hold until they are needed, the ones that were used last for longest.
//
// The pool deals in page ids only. It never sees a key or a value.
#pragma once

#include <cstddef>
#include <cstdint>
#include <list>
#include <map>
#include <utility>
#include <vector>

namespace engine {

// The pages of a request. The pool fills it in.
struct PageTable {
    std::vector<int32_t> pages;
    size_t num_published = 0; // the first pages, whose text is known to the pool
    uint64_t text = 0;        // which text the published pages hold; 0: none
};

class PagePool {
public:
    PagePool(int32_t num_pages, int32_t page_size);

    // The published pages that hold the beginning of `tokens`. The last token is left out: somebody has to compute
    // the logits behind it.
    PageTable reuse(const std::vector<int32_t> &tokens);

    // Adds pages until there is room for `num_tokens`. False, and no page, if there are too few.
    bool grow(PageTable &table, size_t num_tokens);

    // Publishes the pages that the first `num_tokens` of `tokens` fill. They are not written to any more.
    void publish(PageTable &table, const std::vector<int32_t> &tokens, size_t num_tokens);

    // Takes back all pages of a table.
    void release(PageTable &table);

    size_t num_pages_for(size_t num_tokens) const { return (num_tokens + page_size_ - 1) / page_size_; }
    size_t num_pages() const { return pages_.size(); }
    size_t num_idle() const { return idle_.size(); }

private:
    // The text before a page, and the tokens in it. Comparing tokens, not hashes, leaves nothing to chance.
    using Key = std::pair<uint64_t, std::vector<int32_t>>;

    struct Published {
        int32_t page;
        uint64_t text; // a number for the text up to the end of the page, never used again
    };

    struct Page {
        int32_t users = 0;
        std::map<Key, Published>::iterator published; // or published_.end()
        std::list<int32_t>::iterator idle;            // where users is 0
    };

    std::vector<int32_t> page_tokens(const std::vector<int32_t> &tokens, size_t index) const;
    void add_user(int32_t page);

    size_t page_size_;
    uint64_t last_text_ = 0;
    std::vector<Page> pages_;
    std::map<Key, Published> published_;
    std::list<int32_t> idle_; // pages without users; the next one to be overwritten comes first
};

} // namespace engine
