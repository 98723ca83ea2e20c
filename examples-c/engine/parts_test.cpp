// What the tokens of a run cannot show: files that are damaged, requests that never fit, which pages are kept, and
// which drafts are proposed.
#include "safetensors.hpp"
#include "scheduler.hpp"

#include <cstdio>

using namespace engine;

static int failures = 0;

static void expect(bool condition, const std::string &what)
{
    if (!condition)
        std::fprintf(stderr, "not so: %s\n", what.c_str());
    failures += !condition;
}

// The only element of w in a file with this header and four bytes of elements; 0 where it is refused.
static float read(const std::string &header, uint64_t length)
{
    const uint16_t elements[2]{0x3f80, 0}; // 1 in bf16
    {
        std::ofstream file("parts.safetensors", std::ios::binary);
        file.write(reinterpret_cast<const char *>(&length), sizeof length) << header;
        file.write(reinterpret_cast<const char *>(elements), sizeof elements);
    }
    try {
        return SafeTensors("parts.safetensors").tensor("w", {1})[0];
    } catch (const std::exception &) {
        return 0;
    }
}

static void files()
{
    const std::string good = R"({"w":{"dtype":"BF16","shape":[1],"data_offsets":[0,2]}})";
    expect(read(good, good.size()) == 1, "a bf16 number is read");
    expect(read(good, UINT64_MAX) == 0, "a header that is longer than the file is refused");
    for (const std::string bad : {R"({"w":{"dtype":"BF16","shape":[1],"data_offsets":[1000002,1000004]}})",
                                  R"({"w":{"dtype":"BF16","shape":[1],"data_offsets":[2,0]}})",
                                  R"({"w":{"dtype":"BF16","shape":[1],"data_offsets":[0,4]}})",
                                  R"({"w":{"dtype":"BF16","shape":[2],"data_offsets":[0,2]}})",
                                  R"({"w":{"dtype":"F16","shape":[1],"data_offsets":[0,2]}})",
                                  R"({"w":{"dtype":"BF16","shape":[1]}})", "[1]", "{", ""})
        expect(read(bad, bad.size()) == 0, "refused: " + bad);
}

static void pages()
{
    PagePool pool(4, 2);
    const Tokens text{1, 2, 3, 4, 5};
    PageTable first, second;
    expect(pool.grow(first, 5) && !pool.grow(second, 4) && second.empty(), "all pages or none");
    pool.publish(first, text, 0, 3);
    const PageTable beginning{first[0]};
    expect(pool.grow(second, 2), "a page is left");
    pool.publish(second, text, 0, 2);
    expect(second == beginning, "requests that compute the same text at the same time end with one page of it");
    expect(pool.reuse(text) == beginning, "the next page is not full");
    pool.publish(first, text, 3, 5);
    expect(pool.reuse({1, 2}).empty(), "the last token is computed");
    expect(pool.reuse({3, 4, 5}).empty(), "the same tokens behind another text are others");
}

static void overwritten_pages()
{
    PagePool pool(4, 2);
    const Tokens text{1, 2, 3, 4, 5};
    PageTable first, second;
    expect(pool.grow(first, 4) && pool.grow(second, 2), "pages for two");
    pool.publish(first, text, 0, 4);
    pool.release(first);
    pool.release(second);
    expect(pool.num_idle() == 4 && pool.grow(second, 4), "released pages are idle");
    first = pool.reuse(text);
    expect(first.size() == 2, "pages without a text are overwritten first");
    pool.release(first);
    expect(pool.grow(second, 6) && pool.reuse(text).size() == 1, "then the end of a text");
}

static void requests()
{
    Scheduler scheduler({/*page_size*/ 4, /*num_pages*/ 4, /*max_batch_size*/ 2, /*max_num_tokens*/ 8,
                         /*max_seq_len*/ 32, /*max_drafts*/ 0});
    for (Request request : {Request{{}, 1}, Request{{1}, 1}, Request{Tokens(16, 1), 17}})
        try {
            scheduler.add(request);
            expect(false, "a request that never fits is refused");
        } catch (const std::invalid_argument &) {
        }
    expect(propose({2, 4, 9, 4, 5, 2, 4}, 2) == Tokens{9, 4}, "drafts are what stood behind the same two tokens");
    expect(propose({7, 5, 7, 6, 7}, 4) == Tokens{6, 7}, "drafts are of the latest place");
    expect(propose({1, 2, 3}, 3).empty() && propose({1}, 3).empty() && propose({1, 1}, 0).empty(), "no drafts");
}

int main()
{
    files();
    pages();
    overwritten_pages();
    requests();
    return failures == 0 ? 0 : 1;
}
