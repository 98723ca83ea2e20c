// The parts that need no model, each on its own: files that are damaged, pages, drafts.
#include "drafts.hpp"
#include "safetensors.hpp"
#include "scheduler.hpp"

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <stdexcept>

using namespace engine;

#define EXPECT(condition)                                                               \
    do {                                                                                \
        if (!(condition)) {                                                             \
            std::fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #condition); \
            std::exit(1);                                                               \
        }                                                                               \
    } while (0)

static void write_file(const std::string &path, const std::string &header, uint64_t length, size_t data_bytes)
{
    std::ofstream file(path, std::ios::binary);
    for (unsigned shift = 0; shift < 64; shift += 8)
        file.put(static_cast<char>(length >> shift & 0xff));
    file << header << std::string(data_bytes, '\0');
}

static std::string refusal(const std::string &path)
{
    try {
        SafeTensors file(path);
    } catch (const std::runtime_error &error) {
        return error.what();
    }
    return "";
}

static void files(const std::string &path)
{
    // 1 + 2^-8 lies between two bf16 numbers and goes to the even one, 1 + 3·2^-8 to the other side.
    write_safetensors(path, {{"w", {{2, 2}, {1, -0.5f, 1.00390625f, 1.01171875f}}}, {"n", {{2}, {0.1f, 3}}}},
                      {{"head_dim", "16"}});
    const SafeTensors file(path);
    EXPECT((file.tensor("w").shape == std::vector<int64_t>{2, 2}));
    EXPECT((file.tensor("w").values == std::vector<float>{1, -0.5f, 1, 1.015625f}));
    EXPECT((file.tensor("n").values == std::vector<float>{0.1f, 3}));
    EXPECT(file.metadata("head_dim") == "16" && file.has("w") && !file.has("v"));
    try {
        file.tensor("v");
        EXPECT(!"a missing tensor is refused");
    } catch (const std::runtime_error &) {
    }

    const auto damaged = [&](const std::string &header, size_t data_bytes, const char *why) {
        write_file(path, header, header.size(), data_bytes);
        EXPECT(refusal(path).find(why) != std::string::npos);
    };
    damaged(R"({"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})", 7, "data_offsets [0, 8]");
    damaged(R"({"w":{"dtype":"F32","shape":[2],"data_offsets":[8,0]}})", 8, "data_offsets [8, 0]");
    damaged(R"({"w":{"dtype":"F32","shape":[3],"data_offsets":[0,8]}})", 8, "3 elements does not fill 8 bytes");
    damaged(R"({"w":{"dtype":"F32","shape":[4611686018427387904,4],"data_offsets":[0,0]}})", 8, "more elements than the file");
    damaged(R"({"w":{"dtype":"I64","shape":[1],"data_offsets":[0,8]}})", 8, "dtype I64 is not accepted");
    damaged(R"({"w":{"dtype":"F32","shape":[2]}})", 8, "data_offsets");
    damaged("{", 0, "the header");
    write_file(path, "{}", 3, 0);
    EXPECT(refusal(path).find("a header of 3 bytes does not fit in a file of 10") != std::string::npos);
    EXPECT(refusal(path + ".missing").find("cannot be opened") != std::string::npos);
    std::remove(path.c_str());
}

static void pages()
{
    PagePool pool(4, 2);
    const std::vector<int32_t> text{1, 2, 3, 4, 5};
    PageTable first = pool.reuse(text);
    EXPECT(first.pages.empty() && pool.grow(first, 5) && first.pages.size() == 3 && pool.num_idle() == 1);
    PageTable rest;
    EXPECT(!pool.grow(rest, 3) && rest.pages.empty()); // all of it or nothing

    pool.publish(first, text, 3); // one page is full, and half of another
    EXPECT(first.num_published == 1);
    PageTable second = pool.reuse(text);
    EXPECT(second.pages == std::vector<int32_t>{first.pages[0]});
    pool.publish(first, text, 5);
    pool.release(second);

    // The last token is computed in any case, so a page that ends with it is no use.
    EXPECT(pool.reuse({1, 2}).pages.empty());
    PageTable third = pool.reuse({1, 2, 3, 4, 9});
    EXPECT(third.pages.size() == 2);
    EXPECT(pool.reuse({3, 4, 9}).pages.empty()); // the same tokens behind another text

    // Released pages are found again until they are needed; the end of the text goes first.
    const std::vector<int32_t> known = first.pages;
    pool.release(third);
    pool.release(first);
    EXPECT(pool.num_idle() == 4);
    PageTable other;
    EXPECT(pool.grow(other, 6)); // two pages that hold nothing, and the end of the text
    PageTable again = pool.reuse(text);
    EXPECT(again.pages == std::vector<int32_t>{known[0]});
}

static void same_text_at_the_same_time()
{
    PagePool pool(8, 1);
    const std::vector<int32_t> text{1, 2, 3};
    PageTable a, b;
    EXPECT(pool.grow(a, 3) && pool.grow(b, 3));
    pool.publish(a, text, 1);
    pool.publish(b, text, 2); // its first page is a's text, so its second is found behind a's first
    PageTable c = pool.reuse(text);
    EXPECT((c.pages == std::vector<int32_t>{a.pages[0], b.pages[1]}));
}

static void drafts()
{
    EXPECT((propose({1, 2, 3, 4, 9, 2, 3, 4}, 2) == std::vector<int32_t>{9, 2})); // three tokens match
    EXPECT((propose({7, 5, 7, 6, 7}, 4) == std::vector<int32_t>{6, 7}));          // the latest place counts
    EXPECT((propose({1, 4, 2, 4, 5, 2, 4}, 1) == std::vector<int32_t>{5}));       // two tokens before one
    EXPECT((propose({4, 4}, 3) == std::vector<int32_t>{4}));
    EXPECT(propose({1, 2, 3}, 3).empty() && propose({1}, 3).empty() && propose({1, 1, 1}, 0).empty());
}

static void requests_that_never_fit()
{
    Scheduler scheduler(Limits{/*page_size*/ 4, /*num_pages*/ 4, /*max_batch_size*/ 2, /*max_num_tokens*/ 8,
                               /*max_seq_len*/ 32, /*max_drafts*/ 0});
    const auto refused = [&](size_t prompt, size_t new_tokens) {
        try {
            scheduler.add(std::vector<int32_t>(prompt, 1), new_tokens);
        } catch (const std::invalid_argument &) {
            return true;
        }
        return false;
    };
    EXPECT(refused(0, 1) && refused(1, 0) && refused(16, 1) && !refused(15, 1));
    const Batch batch = scheduler.schedule(); // the first chunk
    EXPECT(batch.num_tokens() == 8 && batch.sampled_rows.empty() && batch.kv_len == std::vector<int32_t>{8});
    EXPECT(scheduler.update({}).empty());
    EXPECT((scheduler.schedule().sampled_rows == std::vector<int32_t>{6}));
    EXPECT(scheduler.update({5}).size() == 1 && !scheduler.has_work());
}

int main(int argc, char **argv)
{
    if (argc != 2) {
        std::fprintf(stderr, "usage: engine_parts FOLDER\n");
        return 2;
    }
    files(std::string(argv[1]) + "/parts.safetensors");
    pages();
    same_text_at_the_same_time();
    drafts();
    requests_that_never_fit();
    return 0;
}
