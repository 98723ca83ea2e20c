// Pages: reuse, growth, publication, release. See page_pool.hpp.
#include "page_pool.hpp"

namespace engine {

PagePool::PagePool(int32_t num_pages, int32_t page_size)
    : page_size_(static_cast<size_t>(page_size)), pages_(static_cast<size_t>(num_pages))
{
    for (int32_t page = 0; page < num_pages; page++)
        pages_[static_cast<size_t>(page)] = {0, published_.end(), idle_.insert(idle_.end(), page)};
}

std::vector<int32_t> PagePool::page_tokens(const std::vector<int32_t> &tokens, size_t index) const
{
    const auto begin = tokens.begin() + static_cast<std::ptrdiff_t>(index * page_size_);
    return {begin, begin + static_cast<std::ptrdiff_t>(page_size_)};
}

void PagePool::add_user(int32_t id)
{
    Page &page = pages_[static_cast<size_t>(id)];
    if (page.users++ == 0)
        idle_.erase(page.idle);
}

PageTable PagePool::reuse(const std::vector<int32_t> &tokens)
{
    PageTable table;
    while ((table.pages.size() + 1) * page_size_ < tokens.size()) {
        const auto found = published_.find({table.text, page_tokens(tokens, table.pages.size())});
        if (found == published_.end())
            break;
        add_user(found->second.page);
        table.pages.push_back(found->second.page);
        table.text = found->second.text;
    }
    table.num_published = table.pages.size();
    return table;
}

bool PagePool::grow(PageTable &table, size_t num_tokens)
{
    const size_t wanted = num_pages_for(num_tokens);
    if (wanted > table.pages.size() + idle_.size())
        return false;
    while (table.pages.size() < wanted) {
        const int32_t id = idle_.front();
        Page &page = pages_[static_cast<size_t>(id)];
        if (page.published != published_.end()) // its text is overwritten, so nobody may find it any more
            published_.erase(page.published);
        page.published = published_.end();
        add_user(id);
        table.pages.push_back(id);
    }
    return true;
}

void PagePool::publish(PageTable &table, const std::vector<int32_t> &tokens, size_t num_tokens)
{
    for (; (table.num_published + 1) * page_size_ <= num_tokens; table.num_published++) {
        const int32_t id = table.pages[table.num_published];
        const auto [entry, is_new] =
            published_.insert({{table.text, page_tokens(tokens, table.num_published)}, {id, last_text_ + 1}});
        if (is_new) {
            pages_[static_cast<size_t>(id)].published = entry;
            last_text_++;
        }
        // Where another request was first, its page stays the known one, and this one is as good for its owner.
        table.text = entry->second.text;
    }
}

void PagePool::release(PageTable &table)
{
    // The end of a text goes first: it is of no use without its beginning.
    for (auto id = table.pages.rbegin(); id != table.pages.rend(); ++id) {
        Page &page = pages_[static_cast<size_t>(*id)];
        if (--page.users == 0)
            page.idle = idle_.insert(page.published == published_.end() ? idle_.begin() : idle_.end(), *id);
    }
    table = {};
}

} // namespace engine
