// Cuts a batch whose lengths are on the device: one CTA, no synchronisation with the host. The rules are
// those of src/plan/schedule.rs; only the order of items is coarser (sixteen classes, the natural order
// within a class). Nobody has checked these lengths: what exceeds the desc's maxima is cut off or dropped,
// so that nothing is ever written outside the workspace.
#include "common/dtype.cuh"

namespace folio {

constexpr u32 THREADS = FOLIO_THREADS, WARPS = THREADS / 32, CLASSES = 16;
// A longest request of so many units is not split, as in src/plan/schedule.rs.
constexpr u32 UNITS_NOT_SPLIT = 2;
static_assert(WARPS <= 32, "a lane per warp");

// Exclusive prefix of every thread's value, and the total.
struct Scan {
    u64 before, total;
};

__device__ __forceinline__ u64 warp_inclusive(u64 value) {
#pragma unroll
    for (u32 i = 1; i < 32; i *= 2) {
        const u64 other = __shfl_up_sync(FULL_WARP, value, i);
        if (threadIdx.x % 32 >= i) value += other;
    }
    return value;
}

__device__ __noinline__ Scan block_scan(u64 value) {
    __shared__ u64 of_warps[WARPS];
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const u64 inclusive = warp_inclusive(value);
    if (lane == 31) of_warps[warp] = inclusive;
    __syncthreads();
    const u64 warps = warp_inclusive(lane < WARPS ? of_warps[lane] : 0);
    __syncthreads();
    const u64 own = __shfl_sync(FULL_WARP, inclusive, 31);
    return {__shfl_sync(FULL_WARP, warps, warp) - own + inclusive - value, __shfl_sync(FULL_WARP, warps, 31)};
}

__device__ __noinline__ u32 block_max(u32 value) {
    __shared__ u32 of_warps[WARPS];
    value = __reduce_max_sync(FULL_WARP, value);
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = value;
    __syncthreads();
    value = threadIdx.x % 32 < WARPS ? of_warps[threadIdx.x % 32] : 0;
    __syncthreads();
    return __reduce_max_sync(FULL_WARP, value);
}

__device__ __forceinline__ u32 divide_up(u32 n, u32 d) { return n == 0 ? 0 : (n - 1) / d + 1; }

__device__ __forceinline__ i32 clamp(i64 x, u32 most) {
    return static_cast<i32>(min(max(x, 0ll), static_cast<i64>(most)));
}

// A request, and how it is cut into tiles of rows and chunks of keys.
struct Cut {
    u32 rows, keys, tiles, chunks;

    // A falling qo_indptr counts as no rows.
    __device__ __forceinline__ Cut(const FolioPlanParams &p, u32 request, u32 chunk) {
        rows = clamp(static_cast<i64>(p.out_qo_indptr[request + 1]) - p.out_qo_indptr[request], p.max_qo_len);
        keys = p.out_kv_len[request];
        tiles = divide_up(rows, p.q_tile);
        chunks = max(1u, divide_up(keys, chunk));
    }
};

// The caller's lengths into the workspace, within the maxima.
__device__ __forceinline__ void copy_lengths(const FolioPlanParams &p) {
    for (u32 b = threadIdx.x; b <= p.batch_size; b += THREADS) {
        const i64 row = p.qo_indptr ? p.qo_indptr[b] : static_cast<i64>(b) * p.fixed_qo_len;
        p.out_qo_indptr[b] = clamp(row, p.max_num_tokens);
        if (b == p.batch_size) break;
        i64 length;
        if (p.kv_len) {
            length = p.kv_len[b];
        } else {
            const i64 pages = static_cast<i64>(p.kv_indptr[b + 1]) - p.kv_indptr[b];
            length = pages <= 0 ? 0 : (pages - 1) * p.page_size + (p.last_page_len ? p.last_page_len[b] : 1);
        }
        p.out_kv_len[b] = clamp(length, p.max_kv_len);
        p.out_page_start[b] = p.kv_indptr ? p.kv_indptr[b] : static_cast<i64>(b) * p.table_stride;
    }
    __syncthreads();
}

// What `chunk` and the order are chosen from.
struct Batch {
    u64 tiles, tile_keys;
    u32 longest, most_rows;
};

__device__ __forceinline__ Batch measure(const FolioPlanParams &p) {
    u64 tiles = 0, tile_keys = 0;
    u32 longest = 0, most_rows = 0;
#pragma unroll 1
    for (u32 b = threadIdx.x; b < p.batch_size; b += THREADS) {
        const Cut cut(p, b, 0xffffffffu);
        tiles += cut.tiles;
        tile_keys += static_cast<u64>(cut.tiles) * cut.keys;
        longest = max(longest, cut.keys);
        most_rows = max(most_rows, min(cut.rows, p.q_tile));
    }
    return {block_scan(tiles).total, block_scan(tile_keys).total, block_max(longest), block_max(most_rows)};
}

__device__ __forceinline__ u32 smallest_chunk(const FolioPlanParams &p, const Batch &batch) {
    // All items together come to max_splits, but half as many splits are always allowed.
    const u64 budget = max(p.max_splits - min(batch.tiles, static_cast<u64>(p.max_splits)), static_cast<u64>(p.max_splits / 2));
    const u64 most_units = max(1u, divide_up(batch.longest, p.kv_unit));
    if (budget == 0 || most_units <= UNITS_NOT_SPLIT) return 0x7fffffffu;
    const u64 fewest = batch.tile_keys / ((budget + batch.tiles) * p.kv_unit);
    const u64 enough = (batch.tile_keys + budget * p.kv_unit - 1) / (budget * p.kv_unit);
    u32 low = static_cast<u32>(min(max(fewest, 1ull), most_units));
    u32 high = static_cast<u32>(min(max(enough, 1ull), most_units));
    while (low < high) {
        const u32 middle = low + (high - low) / 2;
        u64 splits = 0;
#pragma unroll 1
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

// The merges of one request whose tiles are split; `partial` is its first row of partial results.
__device__ __forceinline__ void write_merges(const FolioPlanParams &p, u32 request, const Cut &cut, u64 at, u32 partial) {
#pragma unroll 1
    for (u32 t = 0; t < cut.tiles && at + t < p.max_merges; t++) {
        const u32 q_start = t * p.q_tile, q_len = min(p.q_tile, cut.rows - q_start);
        const u32 first = partial + q_start * cut.chunks;
        const u32 held = first + q_len * cut.chunks <= p.max_partial_rows ? q_len : 0;
        p.merges[at + t] = {request, q_start, held, first, cut.chunks, {0, 0, 0}};
    }
}

// Prefix sums over requests, and the merges. Returns the number of items; the counts of both are written.
__device__ __forceinline__ u32 lay_out(const FolioPlanParams &p, u32 chunk) {
    constexpr u64 LOW = 0xffffffffull;
    u64 records = 0, partial = 0, bytes = 0, bits = 0;  // records: items, and merges above bit 32
#pragma unroll 1
    for (u32 first = 0; first < p.batch_size; first += THREADS) {
        const u32 b = first + threadIdx.x;
        const bool valid = b < p.batch_size;
        const Cut cut(p, valid ? b : 0, chunk);
        const bool split = valid && cut.chunks > 1;
        const u64 elements = valid ? static_cast<u64>(cut.rows) * cut.keys : 0;
        const u64 items = valid ? static_cast<u64>(cut.tiles) * cut.chunks : 0;
        const Scan of_records = block_scan(items | (split ? static_cast<u64>(cut.tiles) << 32 : 0));
        const Scan of_partial = block_scan(split ? static_cast<u64>(cut.rows) * cut.chunks : 0);
        const Scan of_bytes = block_scan(elements), of_bits = block_scan((elements + 7) / 8);
        if (valid) {
            p.first_item[b] = static_cast<u32>(records + of_records.before);
            p.out_mask_bytes_start[b] = bytes + of_bytes.before;
            p.out_mask_bits_start[b] = bits + of_bits.before;
            p.first_partial[b] = static_cast<u32>(partial + of_partial.before);
        }
        if (split) write_merges(p, b, cut, (records + of_records.before) >> 32, static_cast<u32>(partial + of_partial.before));
        records += of_records.total, partial += of_partial.total, bytes += of_bytes.total, bits += of_bits.total;
    }
    const u32 num_items = static_cast<u32>(min(records & LOW, static_cast<u64>(p.max_items)));
    if (threadIdx.x == 0) {
        p.counts[0] = num_items;
        p.counts[1] = static_cast<u32>(min(records >> 32, static_cast<u64>(p.max_merges)));
        p.counts[2] = p.batch_size;
        p.counts[3] = 0;
        *p.next_tile = 0;
    }
    __syncthreads();
    return num_items;
}

// Item `index` in natural order: by request, tile, chunk. Prefill takes a request's last tile first, as it
// sees the most keys.
__device__ __forceinline__ FolioWorkItem make_item(const FolioPlanParams &p, u32 index, u32 chunk) {
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
    const u32 within = index - p.first_item[low], t = within / cut.chunks, c = within % cut.chunks;
    FolioWorkItem item = {};
    item.request = low;
    item.q_start = (p.by_request ? cut.tiles - 1 - t : t) * p.q_tile;
    item.q_len = min(p.q_tile, cut.rows - item.q_start);
    item.kv_start = c * chunk;
    item.kv_end = static_cast<u32>(min(static_cast<u64>(chunk) * (c + 1), static_cast<u64>(cut.keys)));
    item.partial = FOLIO_NO_PARTIAL;
    if (cut.chunks > 1) {
        item.partial = p.first_partial[low] + item.q_start * cut.chunks + c * item.q_len;
        if (item.partial + item.q_len > p.max_partial_rows) item.q_len = 0;
    }
    const i64 last_visible = static_cast<i64>(cut.keys) - cut.rows + item.q_start + item.q_len;
    const i64 visible = max(min(static_cast<i64>(item.kv_end), last_visible) - item.kv_start, 0ll);
    item.cost = static_cast<u32>(min(visible * item.q_len, 0xffffffffll));
    return item;
}

__device__ __forceinline__ FolioItemPlace make_place(const FolioPlanParams &p, const FolioWorkItem &item) {
    const Cut cut(p, item.request, 0xffffffffu);
    return {p.out_page_start[item.request], static_cast<i32>(p.out_qo_indptr[item.request] + item.q_start),
            static_cast<i32>(cut.keys - cut.rows + item.q_start)};
}

// 0 comes first. Decode goes by the item's cost; prefill by the request's keys, so that tiles that read the
// same keys stay together.
__device__ __forceinline__ u32 order_class(const FolioPlanParams &p, const FolioWorkItem &item, float scale) {
    const u32 weight = p.by_request ? p.out_kv_len[item.request] : item.cost;
    return CLASSES - 1 - min(static_cast<u32>(static_cast<float>(weight) * scale), CLASSES - 1);
}

// One pass of a counting sort, stable; every thread has a run of neighbouring items.
__device__ __forceinline__ void write_items(const FolioPlanParams &p, u32 num_items, u32 chunk, float scale) {
    __shared__ u32 next[CLASSES * THREADS];
    const u32 run = divide_up(num_items, THREADS), begin = min(threadIdx.x * run, num_items), end = min(begin + run, num_items);
#pragma unroll
    for (u32 c = 0; c < CLASSES; c++) next[c * THREADS + threadIdx.x] = 0;
#pragma unroll 1
    for (u32 i = begin; i < end; i++) next[order_class(p, make_item(p, i, chunk), scale) * THREADS + threadIdx.x]++;
    __syncthreads();
    u32 sum = 0;
#pragma unroll
    for (u32 c = 0; c < CLASSES; c++) sum += next[threadIdx.x * CLASSES + c];
    u32 before = static_cast<u32>(block_scan(sum).before);
#pragma unroll
    for (u32 c = 0; c < CLASSES; c++) {
        u32 &count = next[threadIdx.x * CLASSES + c];
        const u32 here = count;
        count = before;
        before += here;
    }
    __syncthreads();
#pragma unroll 1
    for (u32 i = begin; i < end; i++) {
        const FolioWorkItem item = make_item(p, i, chunk);
        const u32 at = next[order_class(p, item, scale) * THREADS + threadIdx.x]++;
        p.items[at] = item;
        p.places[at] = make_place(p, item);
    }
}

}  // namespace folio

extern "C" __global__ void __launch_bounds__(FOLIO_THREADS, 1) folio_plan(const __grid_constant__ FolioPlanParams p) {
    using namespace folio;
    wait_for_prerequisites();
    copy_lengths(p);
    const Batch batch = measure(p);
    const u32 chunk = p.invariant_chunk ? p.invariant_chunk : smallest_chunk(p, batch);
    const u32 num_items = lay_out(p, chunk);
    const float largest = p.by_request ? static_cast<float>(batch.longest)
                                       : static_cast<float>(min(chunk, batch.longest)) * static_cast<float>(batch.most_rows);
    write_items(p, num_items, chunk, static_cast<float>(CLASSES) / (largest + 1.0f));
}
