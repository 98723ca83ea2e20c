// Lists the pages or slots of every request. A list that is full ends, and so does kv_indptr.
#include "core/groups.cuh"
#include "ptx/prefetch.cuh"

namespace folio {

typedef FolioKvIndicesParams Params;

// The indices of a request that are listed, and where its last page ends. Loads are not asked for under conditions, so
// that those of several requests are on the way together.
struct Listed {
    i64 row;
    u32 first, count, kv_len;

    __device__ __forceinline__ Listed() : row(-1), first(0), count(0), kv_len(0) {}

    __device__ __forceinline__ Listed(const Params &p, u32 b) {
        const u32 keys = min(length_of(p.kv_len, b), static_cast<u32>(tokens_of_row(p.rows)));
        u32 start = p.kv_start.data ? length_of(p.kv_start, b) : 0;
        if (p.window > 0 && keys > p.window) start = max(start, keys - p.window);
        row = row_of(p.rows, b);
        const bool is_listed = row >= 0 && start < keys;
        kv_len = is_listed ? keys : 0;
        first = divide(start, p.page_size);
        count = is_listed ? divide(keys - 1, p.page_size) + 1 - first : 0;
    }

    __device__ __forceinline__ i64 last_page_len(const Params &p) const {
        return count == 0 ? 0 : kv_len - (first + count - 1) * p.page_size.divisor;
    }
};

// Index `index` of a row, counted from the first token on.
__device__ __forceinline__ i64 index_of(const Params &p, i64 row, u32 index) {
    const i64 slot = slot_of(p.rows, row, index * p.page_size.divisor);
    return slot < 0 || p.page_size.divisor == 1 ? slot : slot / p.page_size.divisor;
}

// Four slots of tokens that are in two pages at most, for put_piece().
struct SlotQuad {
    const i32 *pages;
    const FolioDivisor &page_size;
    i32 first, count;  // tokens

    __device__ __forceinline__ int4 operator()(i32 i) const {
        const i32 size = static_cast<i32>(page_size.divisor), token = first + min(i, count - 1);
        const u32 column = divide(max(token, 0), page_size), last = divide(first + count - 1, page_size);
        const i32 place = token - static_cast<i32>(column) * size, rest = size - place;
        const i32 here = slots_from(__ldg(pages + column), place);
        const i32 next = slots_from(__ldg(pages + min(column + 1, last)), -rest);
        return make_int4(max(here, -1), max((rest > 1 ? here : next) + 1, -1), max((rest > 2 ? here : next) + 2, -1),
                         max((rest > 3 ? here : next) + 3, -1));
    }

private:
    // A slot of the page, from where others are counted; it stays negative if the page has none that int32 can hold.
    __device__ __forceinline__ i32 slots_from(i32 page, i32 place) const {
        const u64 slot = static_cast<u64>(static_cast<u32>(page)) * page_size.divisor;
        return slot > MOST_INT32 ? -0x7fffffff - 1 : static_cast<i32>(static_cast<u32>(slot) + place);
    }
};

// Lists those of a request's indices that are `done` and up, as far as a piece goes; by a warp. The request's first index
// is `first`.
__device__ __forceinline__ void put_indices(const Params &p, i64 row, u32 first, const Span &span, i32 done) {
    const i32 count = static_cast<i32>(span.end - span.begin);
    const u32 tokens = p.rows.page_size.divisor;
    if (p.rows.table.bytes == 4 && p.kv_indices.bytes == 4) {
        const i32 *const pages = static_cast<const i32 *>(p.rows.table.data) + row * p.rows.table.stride;
        i32 *const out = static_cast<i32 *>(p.kv_indices.data) + span.begin;
        if (p.page_size.divisor == tokens) {
            put_piece(out, done, count, [&](i32 i) { return quad_of(pages + first, i, count); });
            return;
        }
        if (p.page_size.divisor == 1 && tokens >= 4) {
            put_piece(out, done, count, SlotQuad{pages, p.rows.page_size, static_cast<i32>(first), count});
            return;
        }
    }
    const i32 end = min(done + static_cast<i32>(PIECE), count);
#pragma unroll 1
    for (i32 i = max(done, 0) + static_cast<i32>(threadIdx.x % LANES); i < end; i += LANES) {
        put_id(p.kv_indices, 0, span.begin + i, index_of(p, row, first + i));
    }
}

// All but the list; by one of the group's warps.
__device__ __forceinline__ void put_lengths(const Params &p, const Group &group, const Listed &own, i64 end) {
    const u32 b = group.request();
    if (b == 0) put(p.kv_indptr, 0, 0, 0);
    if (b < p.batch_size) {
        put(p.kv_indptr, 0, b + 1, end);
        if (p.last_page_len.data) put(p.last_page_len, 0, b, own.last_page_len(p));
    }
    if (group.first() + LANES < p.batch_size) return;
    // What is beyond the batch.
    const i64 total = __shfl_sync(FULL_WARP, end, LANES - 1);
#pragma unroll 1
    for (i64 i = p.batch_size + threadIdx.x % LANES; i + 1 < p.kv_indptr.columns; i += LANES) {
        put(p.kv_indptr, 0, i + 1, total);
    }
    if (!p.last_page_len.data) return;
#pragma unroll 1
    for (i64 i = p.batch_size + threadIdx.x % LANES; i < p.last_page_len.columns; i += LANES) {
        put(p.last_page_len, 0, i, 0);
    }
}

// Fetches the group's rows while requests are summed up.
__device__ __forceinline__ void prefetch_rows(const Params &p, const Group &group, const Listed &own) {
    if (own.count == 0) return;
    const u32 of_line = p.rows.table.bytes == 4 ? 32 : 16, end = divide(own.kv_len - 1, p.rows.page_size) + 1;
    const u32 first = divide(own.first * p.page_size.divisor, p.rows.page_size);
    const char *const row =
        static_cast<const char *>(p.rows.table.data) + own.row * p.rows.table.stride * p.rows.table.bytes;
#pragma unroll 1
    for (u32 column = first + group.warp() * of_line; column < end; column += group.warps() * of_line) {
        prefetch_l2(row + static_cast<u64>(column) * p.rows.table.bytes);
    }
}

__device__ __forceinline__ void list(const Params &p) {
    const Group group(blockIdx.x, p.parts);
    const Listed own = group.request() < p.batch_size ? Listed(p, group.request()) : Listed();
    prefetch_rows(p, group, own);
    const i64 capacity = p.kv_indices.columns;
    const i64 begin = group.before(own.count, [&](u32 b) { return Listed(p, b).count; });
    const Span span = {begin, min(begin + own.count, capacity)};
    if (group.warp() + 1 == group.warps()) put_lengths(p, group, own, span.end);
    group.each_piece(span.pieces(p.kv_indices, 0), [&](u32 lane, u32 piece) {
        const Span its = {__shfl_sync(FULL_WARP, span.begin, lane), __shfl_sync(FULL_WARP, span.end, lane)};
        const i64 row = __shfl_sync(FULL_WARP, own.row, lane);
        const u32 first = __shfl_sync(FULL_WARP, own.first, lane);
        put_indices(p, row, first, its, static_cast<i32>(piece * PIECE) - its.lead(p.kv_indices, 0));
    });
}

}  // namespace folio

extern "C" __global__ void __launch_bounds__(FOLIO_THREADS, 2)
    folio_kv_indices(const __grid_constant__ FolioKvIndicesParams p) {
    using namespace folio;
    wait_for_prerequisites();
    const u32 bytes = p.rows.table.bytes | p.rows.row_ids.bytes | p.kv_len.bytes | p.kv_start.bytes |
                      p.kv_indptr.bytes | p.kv_indices.bytes | p.last_page_len.bytes;
    if (bytes != 4) {
        list(p);
        return;
    }
    // A compiler that knows it leaves out a third of the instructions, and jumps over them, which every launch waits for.
    FolioKvIndicesParams narrow = p;
    narrow.rows.table.bytes = narrow.rows.row_ids.bytes = narrow.kv_len.bytes = narrow.kv_start.bytes = 4;
    narrow.kv_indptr.bytes = narrow.kv_indices.bytes = narrow.last_page_len.bytes = 4;
    list(narrow);
}
