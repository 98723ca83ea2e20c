// Masks, positions and links of trees of draft tokens, from the parents of the tokens. A block takes a token: it walks from
// there to a root, and writes the token's row of every output. Parents and lengths are the device's, and unchecked: a parent
// that does not stand before its token is none, so that every walk ends, and nothing is written beyond an output.
#include "core/requests.cuh"
#include "params/tree_mask.h"

namespace folio {

typedef FolioTreeMaskParams Params;

// Ancestors among a tree's first tokens are looked up, others are walked to. More than trees have in practice.
constexpr u32 LOOKED_UP = 1024;

// More bytes than a device has. Sums of wrong lengths end here, and a block's threads' sums of them are no overflow.
constexpr i64 MOST_BYTES = 1ll << 55;

constexpr u32 NONE = 0xffffffffu;

// What a block finds out of its token.
struct Shared {
    u32 seen[LOOKED_UP / 32];                 // the token and its ancestors
    u32 depth;                                // ancestors
    u32 next_token, next_sibling;             // NONE where there is none
    u64 bytes_start, bits_start, tree_start;  // of the request in the masks
};

// The tree of a request.
struct Tree {
    const i32 *parents;
    u32 size;
    i64 prefix_len;

    __device__ __forceinline__ i32 parent(i32 token) const {
        const i32 parent = parents[token];
        return parent < token ? max(parent, -1) : -1;
    }

    // Whether a token sees another, by a walk.
    __device__ __forceinline__ bool sees(i32 token, i32 other) const {
        while (token > other) token = parent(token);
        return token == other;
    }
};

// The tokens of a request, clamped to those that there are.
struct Rows {
    i64 first, count;

    __device__ __forceinline__ Rows(const Params &p, u32 request) {
        if (p.qo_indptr) {
            first = p.qo_indptr[request];
            count = min(p.qo_indptr[request + 1] - first, static_cast<i64>(p.num_tokens) - first);
            if (first < 0 || count < 0) count = 0;
        } else {
            first = static_cast<i64>(request) * p.tree_size;
            count = p.tree_size;
        }
    }
};

// Keys before a tree. With its tokens they are below 2^31, as a run's keys are.
__device__ __forceinline__ i64 prefix_of(const Params &p, u32 request, i64 size) {
    return max(min(static_cast<i64>(p.prefix_lens[request]), 0x7fffffffll - size), 0ll);
}

// The token itself and its ancestors; by one warp.
__device__ __forceinline__ void walk(const Tree &tree, i32 token, Shared &shared) {
    const u32 lane = threadIdx.x % WARP;
    u32 seen = 0, depth = 0;
    for (i32 node = token; node >= 0; node = tree.parent(node)) {
        if (node / 32 == lane) seen |= 1u << node % 32;
        depth += node != token;
    }
    shared.seen[lane] = seen;
    if (lane == 0) shared.depth = depth;
}

// The first child, and the next token under the same parent: both stand behind the token.
__device__ __forceinline__ void link(const Tree &tree, i32 token, Shared &shared) {
    const i32 parent = tree.parent(token);
    u32 child = NONE, sibling = NONE;
    for (u32 other = token + 1 + threadIdx.x; other < tree.size; other += FOLIO_THREADS) {
        const i32 above = tree.parent(other);
        if (above == token) child = min(child, other);
        if (above == parent) sibling = min(sibling, other);
    }
    if (child != NONE) atomicMin(&shared.next_token, child);
    if (sibling != NONE) atomicMin(&shared.next_sibling, sibling);
}

// Atomics of 64 bits in shared memory are loops: one per thread would take ten times as long as all else.
__device__ __forceinline__ i64 warp_sum(i64 x) {
#pragma unroll
    for (u32 lanes = WARP / 2; lanes > 0; lanes /= 2) x += __shfl_xor_sync(FULL_WARP, x, lanes);
    return x;
}

// Bytes of the masks that the requests before have.
__device__ __forceinline__ void find_starts(const Params &p, u32 request, Shared &shared) {
    i64 bytes = 0, bits = 0, tree = 0;
    for (u32 before = threadIdx.x; before < request; before += FOLIO_THREADS) {
        const i64 size = Rows(p, before).count, elements = size * (prefix_of(p, before, size) + size);
        bytes = min(bytes + min(elements, MOST_BYTES), MOST_BYTES);
        bits = min(bits + min((elements + 7) / 8, MOST_BYTES), MOST_BYTES);
        tree = min(tree + min(size * size, MOST_BYTES), MOST_BYTES);
    }
    // Warps that have no request do not come here.
    if (threadIdx.x / WARP * WARP >= request) return;
    bytes = warp_sum(bytes), bits = warp_sum(bits), tree = warp_sum(tree);
    if (threadIdx.x % WARP == 0) {
        atomicAdd(&shared.bytes_start, static_cast<u64>(bytes));
        atomicAdd(&shared.bits_start, static_cast<u64>(bits));
        atomicAdd(&shared.tree_start, static_cast<u64>(tree));
    }
}

// Fills bytes [begin, end) of an output, 16 at a time between the ends.
__device__ __forceinline__ void fill(u8 *out, i64 begin, i64 end, u8 value) {
    if (begin >= end) return;
    const i64 misaligned = static_cast<i64>(reinterpret_cast<u64>(out + begin) % 16);
    const i64 whole = min(begin + (16 - misaligned) % 16, end), whole_end = whole + (end - whole) / 16 * 16;
    const u32 word = value * 0x01010101u;
    const uint4 words = {word, word, word, word};
    for (i64 at = begin + threadIdx.x; at < whole; at += FOLIO_THREADS) out[at] = value;
    for (i64 at = whole + 16 * threadIdx.x; at < whole_end; at += 16 * FOLIO_THREADS) {
        *reinterpret_cast<uint4 *>(out + at) = words;
    }
    for (i64 at = whole_end + threadIdx.x; at < end; at += FOLIO_THREADS) out[at] = value;
}

// A token's row of the masks.
struct Row {
    const Tree &tree;
    const Shared &shared;
    u32 token;

    __device__ __forceinline__ bool sees(u32 other) const {
        if (other < LOOKED_UP) return shared.seen[other / 32] >> other % 32 & 1;
        return other < tree.size && tree.sees(token, other);
    }

    // `prefix_len` bytes of 1 and one for every token of the tree, from byte `start` of an output of `room` bytes on.
    __device__ __forceinline__ void write_bytes(u8 *out, i64 room, i64 start, i64 prefix_len) const {
        const i64 row = start + token * (prefix_len + tree.size), own = row + prefix_len;
        fill(out, min(row, room), min(own, room), 1);
        for (u32 other = threadIdx.x; other < tree.size && own + other < room; other += FOLIO_THREADS) {
            out[own + other] = sees(other);
        }
    }

    // The same in bits, a row every `stride` bits. The row writes the bytes that begin in it, of which the last may have
    // bits of rows behind it.
    __device__ __forceinline__ void write_bits(u8 *out, i64 room, i64 start, i64 prefix_len, i64 stride) const {
        const i64 first = token * stride;
        const i64 begin = (first + 7) / 8, end = (first + stride + 7) / 8;
        const i64 ones = max((first + prefix_len) / 8, begin);
        fill(out, min(start + begin, room), min(start + ones, room), 0xff);
        for (i64 byte = ones + threadIdx.x; byte < end && start + byte < room; byte += FOLIO_THREADS) {
            u32 bits = 0;
            for (u32 n = 0; n < 8; n++) bits |= static_cast<u32>(bit(8 * byte + n - first, prefix_len, stride)) << n;
            out[start + byte] = static_cast<u8>(bits);
        }
    }

    // A bit of the request's rows, counted from this row's first.
    __device__ __forceinline__ bool bit(i64 column, i64 prefix_len, i64 stride) const {
        u32 row = token;
        for (; column >= stride; column -= stride) row++;
        if (row >= tree.size || column >= prefix_len + tree.size) return false;
        if (column < prefix_len) return true;
        const u32 other = static_cast<u32>(column - prefix_len);
        return row == token ? sees(other) : tree.sees(row, other);
    }
};

__device__ __forceinline__ void put(void *out, u32 is_wide, u32 row, i32 value) {
    if (!out) return;
    if (is_wide) {
        static_cast<i64 *>(out)[row] = value;
    } else {
        static_cast<i32 *>(out)[row] = value;
    }
}

}  // namespace folio

extern "C" __global__ void __launch_bounds__(FOLIO_THREADS)
    folio_tree_mask(const __grid_constant__ FolioTreeMaskParams p) {
    using namespace folio;
    __shared__ Shared shared;
    wait_for_prerequisites();
    const u32 row = blockIdx.x;
    const u32 request = p.qo_indptr ? request_of_row(p.qo_indptr, p.batch_size, row) : row / p.tree_size;
    const Rows rows(p, request);
    if (row < rows.first || row >= rows.first + rows.count) return;
    const Tree tree = {p.parents + rows.first, static_cast<u32>(rows.count), prefix_of(p, request, rows.count)};
    const u32 token = row - static_cast<u32>(rows.first);

    if (threadIdx.x == 0) {
        shared.next_token = shared.next_sibling = NONE;
        shared.bytes_start = shared.bits_start = shared.tree_start = 0;
    }
    __syncthreads();
    if (threadIdx.x < WARP) walk(tree, token, shared);
    if (p.next_token || p.next_sibling) link(tree, token, shared);
    if (p.mask_bytes || p.mask_bits || p.tree_mask) find_starts(p, request, shared);
    __syncthreads();

    const Row out = {tree, shared, token};
    if (p.mask_bytes) out.write_bytes(p.mask_bytes, p.bytes_room, shared.bytes_start, tree.prefix_len);
    if (p.mask_bits) {
        const i64 kv_len = tree.prefix_len + tree.size;
        out.write_bits(p.mask_bits, p.bits_room, shared.bits_start, tree.prefix_len, kv_len);
    }
    if (p.tree_mask) out.write_bytes(p.tree_mask, p.tree_room, shared.tree_start, 0);
    if (p.tree_bits) {
        const i64 room = static_cast<i64>(p.num_tokens) * p.row_bytes;
        out.write_bits(p.tree_bits, room, rows.first * p.row_bytes, 0, 8 * p.row_bytes);
    }
    if (threadIdx.x == 0) {
        const i32 position = static_cast<i32>(tree.prefix_len + shared.depth);
        put(p.positions, p.wide & FOLIO_TREE_WIDE_POSITIONS, row, position);
        put(p.next_token, p.wide & FOLIO_TREE_WIDE_NEXT_TOKEN, row, static_cast<i32>(shared.next_token));
        put(p.next_sibling, p.wide & FOLIO_TREE_WIDE_NEXT_SIBLING, row, static_cast<i32>(shared.next_sibling));
    }
}
