// Cuts a batch whose lengths are on the device: one CTA, no synchronisation with the host. The rules are
// those of src/plan/schedule.rs; only the order of items is coarser (sixteen classes of cost, the dearest
// first, and the natural order within a class). Nobody has checked these lengths: what exceeds the desc's
// maxima is cut off or dropped, so that nothing is ever written outside the workspace.
#include "common/dtype.cuh"

namespace folio {

constexpr u32 THREADS = 512, WARPS = THREADS / 32, COST_CLASSES = 16;

// Exclusive prefix of every thread's value, and the total.
struct Scan {
    u64 before, total;
};

__device__ Scan block_scan(u64 value) {
    __shared__ u64 of_warp[WARPS];
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    u64 inclusive = value;
#pragma unroll
    for (u32 i = 1; i < 32; i *= 2) {
        const u64 other = __shfl_up_sync(FULL_WARP, inclusive, i);
        if (lane >= i) inclusive += other;
    }
    if (lane == 31) of_warp[warp] = inclusive;
    __syncthreads();
    Scan scan = {inclusive - value, 0};
#pragma unroll
    for (u32 w = 0; w < WARPS; w++) {
        if (w < warp) scan.before += of_warp[w];
        scan.total += of_warp[w];
    }
    __syncthreads();
    return scan;
}

__device__ u32 block_max(u32 value) {
    __shared__ u32 of_warp[WARPS];
    value = __reduce_max_sync(FULL_WARP, value);
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = value;
    __syncthreads();
    u32 max = 0;
#pragma unroll
    for (u32 w = 0; w < WARPS; w++) max = umax(max, of_warp[w]);
    __syncthreads();
    return max;
}

__device__ __forceinline__ u32 divide_up(u32 n, u32 d) { return n == 0 ? 0 : (n - 1) / d + 1; }

__device__ __forceinline__ i32 clamp(i32 x, i32 most) { return min(max(x, 0), most); }

// How one request is cut.
struct Cut {
    u32 tiles, chunks;

    __device__ __forceinline__ Cut(const FolioPlanParams &p, u32 request, u32 chunk) {
        tiles = divide_up(qo_len(p, request), p.q_tile);
        chunks = max(1u, divide_up(p.out_kv_len[request], chunk));
    }

    // A falling qo_indptr counts as no rows.
    static __device__ __forceinline__ u32 qo_len(const FolioPlanParams &p, u32 request) {
        return clamp(p.out_qo_indptr[request + 1] - p.out_qo_indptr[request], p.max_qo_len);
    }
};

// The caller's lengths into the workspace, within the maxima.
__device__ void copy_lengths(const FolioPlanParams &p) {
    for (u32 b = threadIdx.x; b <= p.batch_size; b += THREADS) {
        p.out_qo_indptr[b] = clamp(p.qo_indptr ? p.qo_indptr[b] : b * p.fixed_qo_len, p.max_num_tokens);
    }
    for (u32 b = threadIdx.x; b < p.batch_size; b += THREADS) {
        i64 length;
        if (p.kv_len) {
            length = p.kv_len[b];
        } else {
            const i64 pages = static_cast<i64>(p.kv_indptr[b + 1]) - p.kv_indptr[b];
            length = pages <= 0 ? 0 : (pages - 1) * p.page_size + (p.last_page_len ? p.last_page_len[b] : 1);
        }
        p.out_kv_len[b] = static_cast<i32>(min(max(length, 0ll), static_cast<i64>(p.max_kv_len)));
        p.out_page_start[b] = p.kv_indptr ? p.kv_indptr[b] : static_cast<i64>(b) * p.table_stride;
    }
    __syncthreads();
}

// What `chunk` is chosen from.
struct Batch {
    u64 tiles, tile_keys;
    u32 longest, most_rows;
};

__device__ Batch measure(const FolioPlanParams &p) {
    u64 tiles = 0, tile_keys = 0;
    u32 longest = 0, most_rows = 0;
    for (u32 b = threadIdx.x; b < p.batch_size; b += THREADS) {
        const u32 rows = Cut::qo_len(p, b), keys = p.out_kv_len[b], n = divide_up(rows, p.q_tile);
        tiles += n;
        tile_keys += static_cast<u64>(n) * keys;
        longest = max(longest, keys);
        most_rows = max(most_rows, min(rows, p.q_tile));
    }
    return {block_scan(tiles).total, block_scan(tile_keys).total, block_max(longest), block_max(most_rows)};
}

__device__ u32 smallest_chunk(const FolioPlanParams &p, const Batch &batch) {
    // All items together come to max_splits, but half as many splits are always allowed.
    const u64 budget = max(p.max_splits - min(batch.tiles, static_cast<u64>(p.max_splits)), static_cast<u64>(p.max_splits / 2));
    if (budget == 0) return 0x7fffffffu;
    const u32 most_units = max(1u, divide_up(batch.longest, p.kv_unit));
    const u64 fewest = batch.tile_keys / ((budget + batch.tiles) * p.kv_unit);
    const u64 enough = (batch.tile_keys + budget * p.kv_unit - 1) / (budget * p.kv_unit);
    u32 low = static_cast<u32>(min(max(fewest, 1ull), static_cast<u64>(most_units)));
    u32 high = static_cast<u32>(min(max(enough, 1ull), static_cast<u64>(most_units)));
    while (low < high) {
        const u32 middle = low + (high - low) / 2;
        u64 splits = 0;
        for (u32 b = threadIdx.x; b < p.batch_size; b += THREADS) {
            const Cut cut(p, b, middle * p.kv_unit);
            splits += static_cast<u64>(cut.tiles) * (cut.chunks - 1);
        }
        if (block_scan(splits).total <= budget) {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    return high * p.kv_unit;
}

// What the batch comes to.
struct Totals {
    u32 items, merges;
};

// Prefix sums over requests, and the merges.
__device__ Totals lay_out(const FolioPlanParams &p, u32 chunk) {
    u64 items = 0, merges = 0, partial = 0, bytes = 0, bits = 0;
    for (u32 first = 0; first < p.batch_size; first += THREADS) {
        const u32 b = first + threadIdx.x;
        const bool valid = b < p.batch_size;
        const Cut cut(p, valid ? b : 0, chunk);
        const u64 rows = valid ? Cut::qo_len(p, b) : 0, elements = valid ? rows * p.out_kv_len[b] : 0;
        const bool split = valid && cut.chunks > 1;
        const Scan of_items = block_scan(valid ? static_cast<u64>(cut.tiles) * cut.chunks : 0);
        const Scan of_merges = block_scan(split ? cut.tiles : 0), of_partial = block_scan(split ? rows * cut.chunks : 0);
        const Scan of_bytes = block_scan(elements), of_bits = block_scan((elements + 7) / 8);
        if (valid) {
            p.first_item[b] = static_cast<u32>(items + of_items.before);
            p.out_mask_bytes_start[b] = bytes + of_bytes.before;
            p.out_mask_bits_start[b] = bits + of_bits.before;
            p.first_partial[b] = split ? static_cast<u32>(partial + of_partial.before) : FOLIO_NO_PARTIAL;
        }
        for (u32 t = 0; split && t < cut.tiles; t++) {
            const u64 at = merges + of_merges.before + t;
            if (at >= p.max_merges) break;
            const u32 q_start = t * p.q_tile, q_len = min(p.q_tile, static_cast<u32>(rows) - q_start);
            const u32 before = static_cast<u32>(partial + of_partial.before) + q_start * cut.chunks;
            const u32 rows_there = before + q_len * cut.chunks <= p.max_partial_rows ? q_len : 0;
            p.merges[at] = {b, q_start, rows_there, before, cut.chunks, {0, 0, 0}};
        }
        items += of_items.total, merges += of_merges.total, partial += of_partial.total;
        bytes += of_bytes.total, bits += of_bits.total;
    }
    if (threadIdx.x == 0) p.first_item[p.batch_size] = static_cast<u32>(items);
    __syncthreads();
    return {static_cast<u32>(min(items, static_cast<u64>(p.max_items))),
            static_cast<u32>(min(merges, static_cast<u64>(p.max_merges)))};
}

// Item `index` in natural order: by request, tile, chunk.
__device__ FolioWorkItem make_item(const FolioPlanParams &p, u32 index, u32 chunk) {
    u32 low = 0, high = p.batch_size;  // the last request whose first item is not after index
    while (high - low > 1) {
        const u32 middle = low + (high - low) / 2;
        if (p.first_item[middle] <= index) {
            low = middle;
        } else {
            high = middle;
        }
    }
    const Cut cut(p, low, chunk);
    const u32 rows = Cut::qo_len(p, low), keys = p.out_kv_len[low], within = index - p.first_item[low];
    const u32 tile = within / cut.chunks, c = within % cut.chunks;
    FolioWorkItem item = {};
    item.request = low;
    item.q_start = tile * p.q_tile;
    item.q_len = min(p.q_tile, rows - item.q_start);
    item.kv_start = c * chunk;
    item.kv_end = static_cast<u32>(min(static_cast<u64>(chunk) * (c + 1), static_cast<u64>(keys)));
    item.partial = FOLIO_NO_PARTIAL;
    if (cut.chunks > 1) {
        item.partial = p.first_partial[low] + item.q_start * cut.chunks + c * item.q_len;
        if (item.partial + item.q_len > p.max_partial_rows) item.q_len = 0;
    }
    const i64 last_visible = static_cast<i64>(keys) - rows + item.q_start + item.q_len;
    const i64 visible = max(min(static_cast<i64>(item.kv_end), last_visible) - item.kv_start, 0ll);
    item.cost = static_cast<u32>(min(visible * item.q_len, 0xffffffffll));
    return item;
}

__device__ FolioItemPlace make_place(const FolioPlanParams &p, const FolioWorkItem &item) {
    const i32 past = p.out_kv_len[item.request] - static_cast<i32>(Cut::qo_len(p, item.request));
    return {p.out_page_start[item.request], static_cast<i32>(p.out_qo_indptr[item.request] + item.q_start),
            static_cast<i32>(past + item.q_start)};
}

// 0 for items near the largest possible cost.
__device__ __forceinline__ u32 cost_class(u32 cost, u64 largest) {
    return COST_CLASSES - 1 - static_cast<u32>(static_cast<u64>(cost) * COST_CLASSES / (largest + 1));
}

// One pass of a counting sort, stable; every thread has a run of neighbouring items.
__device__ void write_items(const FolioPlanParams &p, u32 num_items, u32 chunk, u64 largest_cost) {
    __shared__ u32 next[COST_CLASSES * THREADS];
    const u32 run = divide_up(num_items, THREADS), begin = min(threadIdx.x * run, num_items), end = min(begin + run, num_items);
    for (u32 c = 0; c < COST_CLASSES; c++) next[c * THREADS + threadIdx.x] = 0;
    for (u32 i = begin; i < end; i++) next[cost_class(make_item(p, i, chunk).cost, largest_cost) * THREADS + threadIdx.x]++;
    __syncthreads();
    u32 sum = 0;
    for (u32 c = 0; c < COST_CLASSES; c++) sum += next[threadIdx.x * COST_CLASSES + c];
    u32 before = static_cast<u32>(block_scan(sum).before);
    for (u32 c = 0; c < COST_CLASSES; c++) {
        u32 &count = next[threadIdx.x * COST_CLASSES + c];
        const u32 here = count;
        count = before;
        before += here;
    }
    __syncthreads();
    for (u32 i = begin; i < end; i++) {
        const FolioWorkItem item = make_item(p, i, chunk);
        const u32 at = next[cost_class(item.cost, largest_cost) * THREADS + threadIdx.x]++;
        p.items[at] = item;
        p.places[at] = make_place(p, item);
    }
}

}  // namespace folio

extern "C" __global__ void __launch_bounds__(folio::THREADS, 1) folio_plan(const __grid_constant__ FolioPlanParams p) {
    using namespace folio;
    wait_for_prerequisites();
    copy_lengths(p);
    const Batch batch = measure(p);
    const u32 chunk = p.invariant_chunk ? p.invariant_chunk : smallest_chunk(p, batch);
    const Totals totals = lay_out(p, chunk);
    write_items(p, totals.items, chunk, static_cast<u64>(min(chunk, batch.longest)) * batch.most_rows);
    if (threadIdx.x == 0) {
        p.counts[0] = totals.items;
        p.counts[1] = totals.merges;
        p.counts[2] = p.batch_size;
        p.counts[3] = 0;
        *p.next_tile = 0;
    }
}
