// Random batches planned by kernels/plan/plan.cu on the CPU: every row of every request has all of its keys once, split rows have
// their parts, and what the plan says of itself is so. How good a plan is, is not asked here.
//
//   plan_kernel KIND SEED COUNT
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string>

#include "batch.h"
#include "plan/plan.cu"

namespace {

void check(bool is_so, const char *what, int request = -1) {
    if (is_so) return;
    std::printf(request < 0 ? "not so: %s\n" : "not so: %s (request %d)\n", what, request);
    std::exit(1);
}

struct Plan {
    const RandomBatch &batch;
    unsigned items, combines, small;
    // Of each row of the batch, its rows of partial results, by keys.
    std::vector<std::vector<unsigned>> parts;
    bool is_split = false, has_narrow = false;

    explicit Plan(const RandomBatch &batch)
        : batch(batch),
          items(batch.counts[FOLIO_COUNT_ITEMS]),
          combines(batch.counts[FOLIO_COUNT_COMBINES]),
          small(batch.counts[FOLIO_COUNT_SMALL_ITEMS]),
          parts(batch.qo_indptr.back()) {
        check(items <= batch.items.size() && combines <= batch.combines.size(), "counts are within the workspace");
        check(batch.next_tile == 0, "the counter of tiles is 0");
        check_items();
        check_combines();
        check_order();
    }

private:
    void check_items() {
        std::vector<std::vector<FolioWorkItem>> of(batch.size());
        for (unsigned n = 0; n < items; n++) {
            check(batch.items[n].request < of.size(), "items are of requests");
            of[batch.items[n].request].push_back(batch.items[n]);
        }
        std::vector<bool> is_used(batch.partials.size());
        for (int b = 0; b < batch.size(); b++) {
            std::sort(of[b].begin(), of[b].end(), [](const FolioWorkItem &x, const FolioWorkItem &y) {
                return x.q_start != y.q_start ? x.q_start < y.q_start : x.kv_start < y.kv_start;
            });
            unsigned row = 0;
            for (std::size_t n = 0; n < of[b].size();) {
                const std::size_t pieces = check_tile(b, &of[b][n], of[b].size() - n, row, is_used);
                row += of[b][n].q_len, n += pieces;
            }
            check(row == static_cast<unsigned>(batch.rows(b)), "every row has items", b);
        }
    }

    // The pieces of the tile of request `b` that begins with a row; how many they are.
    std::size_t check_tile(int b, const FolioWorkItem *of_tile, std::size_t most, unsigned row,
                           std::vector<bool> &is_used) {
        std::size_t pieces = 0;
        unsigned key = static_cast<unsigned>(batch.first_key(b));
        while (pieces < most && of_tile[pieces].q_start == of_tile->q_start) {
            const FolioWorkItem &item = of_tile[pieces++];
            check(item.q_start == row && item.q_len == of_tile->q_len, "tiles follow one another", b);
            check(item.q_len > 0 && item.q_len <= batch.params.plan.q_tile.divisor, "a tile has rows", b);
            check(item.kv_start == key && item.kv_end >= key, "keys follow one another", b);
            check(item.q_token == batch.qo_indptr[b] + static_cast<int>(row), "where rows are", b);
            check(item.position == batch.kv_len[b] - batch.rows(b) + static_cast<int>(row), "the first row's position",
                  b);
            check(item.page_start == b * batch.params.plan.table_stride, "where pages are", b);
            key = item.kv_end;
        }
        check(key == static_cast<unsigned>(batch.kv_len[b]), "a row has all keys", b);
        const unsigned end = of_tile->q_start + of_tile->q_len;
        has_narrow |= of_tile->q_len < batch.params.plan.q_tile.divisor && end < static_cast<unsigned>(batch.rows(b));
        is_split |= pieces > 1;
        for (std::size_t n = 0; n < pieces; n++) check_partial(b, of_tile[n], pieces, is_used);
        return pieces;
    }

    void check_partial(int b, const FolioWorkItem &item, std::size_t pieces, std::vector<bool> &is_used) {
        check((pieces > 1) == (item.partial != FOLIO_NO_PARTIAL), "split tiles have partial results", b);
        if (pieces == 1) return;
        check(item.kv_end > item.kv_start, "pieces have keys", b);
        for (unsigned r = 0; r < item.q_len; r++) {
            const unsigned at = item.partial + r;
            check(at < is_used.size() && !is_used[at], "a row of partial results is of one piece", b);
            is_used[at] = true;
            parts[item.q_token + r].push_back(at);
        }
    }

    void check_combines() {
        std::vector<bool> is_combined(parts.size());
        for (unsigned n = 0; n < combines; n++) {
            const FolioCombineItem &combine = batch.combines[n];
            check(combine.q_token < parts.size() && !is_combined[combine.q_token], "a row is combined once");
            is_combined[combine.q_token] = true;
            const auto &wanted = parts[combine.q_token];
            check(combine.count == wanted.size(), "all parts of a row");
            check(std::equal(wanted.begin(), wanted.end(), batch.partials.begin() + combine.first), "which parts");
        }
        for (std::size_t row = 0; row < parts.size(); row++) {
            check(is_combined[row] == (parts[row].size() > 1), "split rows are combined");
        }
    }

    // A tail, which is counted, is last. Where shares are, the items of each follow those of the share before it.
    void check_order() {
        check(small <= items, "a tail is of the items");
        for (unsigned n = 0; n + small < items; n++) {
            check(small == 0 || batch.items[n].partial == FOLIO_NO_PARTIAL, "before the tail tiles are whole");
        }
        const unsigned shares = batch.counts[FOLIO_COUNT_SHARES];
        if (shares == 0) return;
        const unsigned *const others = &batch.counts[FOLIO_NUM_COUNTS];
        check(others[0] == shares && others[shares] == items, "shares have all items");
        check(std::is_sorted(others, others + shares + 1), "shares follow one another");
    }
};

Kind kind_of(const std::string &name) {
    if (name == "few_rounds") return Kind::FEW_ROUNDS;
    if (name == "few_tiles") return Kind::FEW_TILES;
    if (name == "shares") return Kind::SHARES;
    return name == "invariant" ? Kind::INVARIANT : Kind::ANY;
}

}  // namespace

int main(int, char **arguments) {
    const Kind kind = kind_of(arguments[1]);
    const unsigned seed = static_cast<unsigned>(std::stoul(arguments[2]));
    const int count = std::stoi(arguments[3]);
    int split = 0, tails = 0, narrow = 0, shared = 0;
    for (int n = 0; n < count; n++) {
        Random random(seed * 1000003 + n);
        RandomBatch batch(kind, random);
        std::printf("%s batch %d of seed %u: ", arguments[1], n, seed);
        ThreadBlock(random() % 4 ? 256 : FOLIO_THREADS, random(), [&] { folio_plan(batch.params); });
        const Plan plan(batch);
        std::puts("right");
        split += plan.is_split, tails += plan.small > 0, narrow += !plan.is_split && plan.has_narrow;
        shared += batch.counts[FOLIO_COUNT_SHARES] > 0;
    }
    std::printf("%d batches: %d split, %d with a tail, %d with narrow tiles, %d in shares\n", count, split, tails,
                narrow, shared);
}
