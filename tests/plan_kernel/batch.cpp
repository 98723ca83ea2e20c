#include "batch.h"

#include <algorithm>
#include <cmath>

namespace {

constexpr unsigned PAGE_SIZE = 16;

unsigned between(Random &random, unsigned low, unsigned high) { return low + random() % (high - low + 1); }

int log_uniform(Random &random, double low, double high) {
    const double x = std::uniform_real_distribution<double>(std::log(low), std::log(high))(random);
    return static_cast<int>(std::lround(std::exp(x)));
}

unsigned divide_up(unsigned n, unsigned d) { return (n + d - 1) / d; }

// src/cuda/params.rs, `Divisor`.
FolioDivisor divisor(unsigned d) {
    unsigned shift = 0;
    while ((1ull << shift) < d) shift++;
    const unsigned long long multiplier = ((1ull << 32) * ((1ull << shift) - d)) / d + 1;
    return {d, static_cast<unsigned>(multiplier), shift};
}

}  // namespace

RandomBatch::RandomBatch(Kind kind, Random &random) {
    const unsigned group = 1u << between(random, 0, 3), rows_of_part = 64 / group;
    const unsigned parts = kind == Kind::FEW_TILES ? 3 : between(random, 1, 3);
    FolioPlanWorkers &workers = params.workers;
    workers.of_item = between(random, 1, 16);
    workers.all = random() % 3 ? 132 : between(random, 16, 264);
    workers.rows_of_unit = random() % 3 ? 0 : between(random, 1, 600);
    FolioPlanParams &p = params.plan;
    p.q_tile = divisor(rows_of_part * parts);
    p.kv_unit = 16 * between(random, 3, 8);
    const bool is_decode = kind == Kind::SHARES || (kind == Kind::ANY && random() % 6 == 0);
    p.order = kind == Kind::SHARES ? FOLIO_PLAN_BY_SHARE : is_decode ? FOLIO_PLAN_BY_COST : FOLIO_PLAN_BY_REQUEST;
    p.max_splits = workers.all / workers.of_item;
    p.max_shares = is_decode ? p.max_splits : 0;
    p.least_gain = 3, p.combine_units = 3;
    p.window_left = random() % 5 == 0 ? log_uniform(random, 10, 5000) : -1;
    const bool is_invariant = kind == Kind::INVARIANT;
    if (is_invariant) p.invariant_chunk = p.kv_unit * between(random, 4, 20);
    if (!is_decode && !is_invariant) {
        params.tail = {3 * p.max_splits, 3, 5, 8, static_cast<float>(between(random, 0, 100)) / 2000.0f, 0};
    }
    for (unsigned n = 0; n < FOLIO_NARROW_TILES; n++) params.narrow.q_tile[n] = divisor(rows_of_part * (n + 1));
    params.narrow.count = is_invariant ? 0 : parts - 1;
    params.narrow.at_a_time = p.max_splits, params.narrow.least_gain = 8;
    draw_lengths(kind, random);
    make_room(is_invariant);
}

int RandomBatch::first_key(int request) const {
    const FolioPlanParams &p = params.plan;
    if (p.window_left < 0) return 0;
    const int hidden = std::clamp(kv_len[request] - rows(request) - p.window_left, 0, kv_len[request]);
    return hidden - hidden % static_cast<int>(p.kv_unit);
}

void RandomBatch::draw_lengths(Kind kind, Random &random) {
    const FolioPlanParams &p = params.plan;
    const int tile = static_cast<int>(p.q_tile.divisor);
    int count = log_uniform(random, 1, random() % 4 ? 60 : 300), most_rows = log_uniform(random, 1, 1500),
        most_keys = log_uniform(random, 50, 20000);
    const bool are_equal = random() % 3 == 0;
    if (kind == Kind::FEW_ROUNDS) {
        const int tiles = static_cast<int>(p.max_splits * between(random, 100, 350) / 100);
        count = std::min(count, tiles), most_rows = std::max(tiles / count, 1) * tile;
        most_keys = log_uniform(random, 2000, 20000);
    }
    if (kind == Kind::SHARES) count = between(random, 10, 250), most_rows = tile;
    if (kind == Kind::FEW_TILES) count = between(random, 1, 4), most_rows = 2 * tile, most_keys = 1000;
    qo_indptr = {0};
    for (int b = 0; b < count; b++) {
        const int keys = are_equal ? most_keys : log_uniform(random, std::max(most_keys / 4, 1), most_keys);
        int rows = are_equal || kind == Kind::FEW_ROUNDS ? most_rows : log_uniform(random, 1, most_rows);
        // Some requests are idle, some have no keys, and some more rows than keys.
        if (random() % 20 == 0) rows = 0;
        kv_len.push_back(random() % 30 ? keys : 0);
        qo_indptr.push_back(qo_indptr.back() + (random() % 10 ? std::min(rows, kv_len.back()) : rows));
    }
}

void RandomBatch::make_room(bool is_invariant) {
    FolioPlanParams &p = params.plan;
    const std::size_t count = kv_len.size();
    unsigned most_rows = 1, most_keys = 1, tiles = 0, chunks_of_all = 0, rows_of_chunks = 0;
    for (int b = 0; b < size(); b++) {
        const unsigned request_rows = static_cast<unsigned>(rows(b)), keys = static_cast<unsigned>(kv_len[b]);
        const unsigned chunks = is_invariant ? divide_up(keys, p.invariant_chunk) + 1 : 1;
        most_rows = std::max(most_rows, request_rows), most_keys = std::max(most_keys, keys);
        tiles += divide_up(request_rows, p.q_tile.divisor);
        chunks_of_all += divide_up(request_rows, p.q_tile.divisor) * chunks, rows_of_chunks += request_rows * chunks;
    }
    const unsigned num_rows = static_cast<unsigned>(qo_indptr.back()),
                   rows_of_tile = std::min(p.q_tile.divisor, most_rows);
    const unsigned splits = std::max({p.max_splits, p.max_shares, params.tail.most_chunks});
    const unsigned parts = p.max_shares > 0 ? splits + std::min(splits, tiles) : splits;
    p.max_items = is_invariant ? chunks_of_all : std::max(tiles + splits, p.max_splits);
    p.max_combines = is_invariant ? num_rows : std::min(splits * rows_of_tile, num_rows);
    p.max_partial_rows = is_invariant ? rows_of_chunks : parts * rows_of_tile;
    p.batch_size = static_cast<unsigned>(count), p.page_size = PAGE_SIZE;
    p.max_qo_len = most_rows, p.max_kv_len = most_keys, p.max_num_tokens = num_rows;
    p.num_page_ids = divide_up(most_keys, PAGE_SIZE), p.table_stride = p.num_page_ids + 3;

    requests.resize(count), first_item.resize(count), first_combine.resize(count);
    items.resize(p.max_items), combines.resize(p.max_combines), partials.resize(p.max_partial_rows);
    counts.resize(FOLIO_NUM_COUNTS + p.max_shares + 2);
    out_qo_indptr.resize(count + 1), out_kv_len.resize(count);
    out_mask_bytes_start.resize(count), out_mask_bits_start.resize(count);
    p.qo_indptr = qo_indptr.data(), p.kv_len = kv_len.data();
    p.out_qo_indptr = out_qo_indptr.data(), p.out_kv_len = out_kv_len.data();
    p.out_mask_bytes_start = out_mask_bytes_start.data(), p.out_mask_bits_start = out_mask_bits_start.data();
    p.requests = requests.data(), p.first_item = first_item.data(), p.first_combine = first_combine.data();
    p.items = items.data(), p.combines = combines.data(), p.partials = partials.data();
    p.counts = counts.data(), p.next_tile = &next_tile;
}
