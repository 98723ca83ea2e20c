// Lists of requests, one behind another, and who writes which part of them. A block takes a group of as many requests as a
// warp has lanes, or shares it with other blocks. It sums up the requests before the group, and each warp those of the
// group: a lane has a request. So there is one barrier, and no search in memory. Every warp pays for that with its
// instructions, which is why blocks are as many as run at once.
#pragma once
#include "core/integers.cuh"

namespace folio {

// Numbers that a warp writes at a time, all of one request: quads of a lane, which asks for all of them before it writes
// the first.
constexpr u32 QUADS = 2, PIECE = QUADS * 4 * LANES;

// The group of a block, and which of the group's blocks it is.
struct Group {
    u32 group, part, parts;

    __device__ __forceinline__ Group(u32 block, const FolioDivisor &parts)
        : group(divide(block, parts)), part(block - group * parts.divisor), parts(parts.divisor) {}

    __device__ __forceinline__ u32 first() const { return group * LANES; }

    // The lane's request. It may be beyond the batch.
    __device__ __forceinline__ u32 request() const { return first() + threadIdx.x % LANES; }

    // Which of the group's warps this is, and how many there are.
    __device__ __forceinline__ u32 warp() const { return part * WARPS + threadIdx.x / LANES; }
    __device__ __forceinline__ u32 warps() const { return parts * WARPS; }

    // The elements of all requests before the lane's, which has `own`. count(b) is how many a request has.
    template <class Count>
    __device__ __forceinline__ i64 before(i64 own, const Count &count) const {
        __shared__ i64 of_warps[WARPS];
        const i64 sum = warp_sum(sum_of_thread(count));
        if (threadIdx.x % LANES == 0) of_warps[threadIdx.x / LANES] = sum;
        i64 before = sum_up_to_lane(own) - own;
        __syncthreads();
#pragma unroll
        for (u32 i = 0; i < WARPS; i++) before += of_warps[i];
        return before;
    }

    // Calls put(lane, piece) for every piece of the group's that is the warp's. The lane's request has `pieces`.
    template <class Put>
    __device__ __forceinline__ void each_piece(u32 pieces, const Put &put) const {
        const u32 end = sum_up_to_lane(pieces), all = __shfl_sync(FULL_WARP, end, LANES - 1);
#pragma unroll 1
        for (u32 i = warp(); i < all; i += warps()) {
            const u32 lane = __popc(__ballot_sync(FULL_WARP, end <= i));
            put(lane, i - __shfl_sync(FULL_WARP, end - pieces, lane));
        }
    }

private:
    // Of the requests before the group, those that the thread adds up; several are loaded at a time.
    template <class Count>
    __device__ __forceinline__ i64 sum_of_thread(const Count &count) const {
        constexpr u32 AT_ONCE = 4;
        i64 sum = 0;
#pragma unroll 1
        for (u32 b = threadIdx.x; b < first(); b += AT_ONCE * FOLIO_THREADS) {
            i64 counts[AT_ONCE];
#pragma unroll
            for (u32 i = 0; i < AT_ONCE; i++) counts[i] = count(min(b + i * FOLIO_THREADS, first() - 1));
#pragma unroll
            for (u32 i = 0; i < AT_ONCE; i++) sum += b + i * FOLIO_THREADS < first() ? counts[i] : 0;
        }
        return sum;
    }
};

// A request's part of a list. Pieces end with lines of 128 bytes: numbers stored across them take 1.2 times as long.
struct Span {
    i64 begin, end;

    // Numbers of the line of the first one that stand before it.
    __device__ __forceinline__ i32 lead(const FolioIntegers &list, i64 row) const {
        const u64 first = reinterpret_cast<u64>(list.data) / 4 + static_cast<u64>(row * list.stride + begin);
        return static_cast<i32>(first % LANES);
    }

    __device__ __forceinline__ u32 pieces(const FolioIntegers &list, i64 row) const {
        return begin < end ? static_cast<u32>((lead(list, row) + (end - begin) + PIECE - 1) / PIECE) : 0;
    }
};

// Writes those of `count` numbers of int32 that are `first` and up, as far as a piece goes; by a warp. quad(i) is four of
// them from the i-th one on, of which some may be before the first or behind the last one, but not all that are written.
template <class Quad>
__device__ __forceinline__ void put_piece(i32 *out, i32 first, i32 count, const Quad &quad) {
    first += static_cast<i32>(threadIdx.x % LANES * 4);
    int4 quads[QUADS];
#pragma unroll
    for (u32 n = 0; n < QUADS; n++) quads[n] = quad(first + static_cast<i32>(n * 4 * LANES));
#pragma unroll
    for (u32 n = 0; n < QUADS; n++) {
        const i32 i = first + static_cast<i32>(n * 4 * LANES);
        if (i >= 0 && i + 4 <= count) {
            *reinterpret_cast<int4 *>(out + i) = quads[n];
            continue;
        }
        const i32 ids[] = {quads[n].x, quads[n].y, quads[n].z, quads[n].w};
#pragma unroll
        for (i32 at = 0; at < 4; at++) {
            if (i + at >= 0 && i + at < count) out[i + at] = ids[at];
        }
    }
}

// Four entries of a row as they are, for put_piece().
__device__ __forceinline__ int4 quad_of(const i32 *entries, i32 i, i32 count) {
    i32 ids[4];
#pragma unroll
    for (i32 at = 0; at < 4; at++) ids[at] = max(__ldg(entries + min(max(i + at, 0), count - 1)), -1);
    return make_int4(ids[0], ids[1], ids[2], ids[3]);
}

}  // namespace folio
