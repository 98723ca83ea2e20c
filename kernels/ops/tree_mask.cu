// Masks, positions and links of trees of draft tokens, from the parents of the tokens. A block takes a tile of a tree's
// tokens, finds their ancestors once, and writes their rows of every output. Parents and lengths are the device's, and
// unchecked: a parent that does not stand before its token is none, so that every walk ends, and nothing is written beyond
// an output.
#include "core/requests.cuh"
#include "params/tree_mask.h"

namespace folio {

typedef FolioTreeMaskParams Params;

// Ancestors among a tree's first tokens are looked up, others are walked to. More than trees have in practice.
constexpr u32 LOOKED_UP = 1024;

// More bytes than a device has. Sums of wrong lengths end here, and a block's threads' sums of them are no overflow.
constexpr i64 MOST_BYTES = 1ll << 54;

constexpr u32 NONE = 0xffffffffu, WARPS = FOLIO_THREADS / WARP;

// Tokens of a tile; src/cuda/ops/tree_mask.rs counts blocks by it. The bits of eight rows are whole bytes, whatever the
// length of a row, so that no byte belongs to two tiles.
constexpr u32 TOKENS = 32;
static_assert(TOKENS % 8 == 0 && TOKENS <= WARP, "tiles end with bytes, and a warp walks from all their tokens");
static_assert(LOOKED_UP / 32 <= WARP, "a warp clears a token's words");

// The masks, of which a call wants some.
enum MaskKind { MASK_BYTES, MASK_BITS, TREE_MASK, TREE_BITS, MASKS };

// What a block finds out.
struct Shared {
    i32 parents[LOOKED_UP];            // of the tree's first tokens
    u32 seen[TOKENS][LOOKED_UP / 32];  // by each token of the tile: itself and its ancestors
    i64 before[TREE_BITS][WARPS];      // bytes of the first masks that the requests before have, by warp
};

// The tree of a request.
struct Tree {
    const i32 *parents;
    const Shared &shared;
    u32 size;
    i64 prefix_len;

    __device__ __forceinline__ i32 parent(i32 token) const {
        const i32 parent = token < LOOKED_UP ? shared.parents[token] : parents[token];
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

// Marks the token itself and its ancestors in a row of words that are 0. Returns how many ancestors it has.
__device__ __forceinline__ u32 walk(const Tree &tree, i32 token, u32 (&seen)[LOOKED_UP / 32]) {
    u32 count = 0, word = token / 32, bits = 0;
    for (i32 node = token; node >= 0; node = tree.parent(node)) {
        // Ancestors stand before a token, so a word that was left does not come again.
        if (node / 32 != word) {
            if (word < LOOKED_UP / 32) seen[word] = bits;
            word = node / 32, bits = 0;
        }
        bits |= 1u << node % 32;
        count++;
    }
    if (word < LOOKED_UP / 32) seen[word] = bits;
    return count - 1;
}

// The first child, and the next token under the same parent: both stand behind the token. By one warp.
struct Links {
    u32 child, sibling;

    __device__ __forceinline__ Links(const Tree &tree, i32 token) : child(NONE), sibling(NONE) {
        const i32 parent = tree.parent(token);
        for (u32 first = token + 1; first < tree.size && (child == NONE || sibling == NONE); first += WARP) {
            const u32 other = first + threadIdx.x % WARP;
            const bool is_there = other < tree.size;
            const i32 above = is_there ? tree.parent(other) : -1;
            child = min(child, first_of(first, is_there && above == token));
            sibling = min(sibling, first_of(first, is_there && above == parent));
        }
    }

private:
    static __device__ __forceinline__ u32 first_of(u32 first, bool is_one) {
        const u32 ones = __ballot_sync(FULL_WARP, is_one);
        return ones == 0 ? NONE : first + __ffs(ones) - 1;
    }
};

__device__ __forceinline__ i64 warp_sum(i64 x) {
#pragma unroll
    for (u32 lanes = WARP / 2; lanes > 0; lanes /= 2) x += __shfl_xor_sync(FULL_WARP, x, lanes);
    return x;
}

__device__ __forceinline__ u8 *output_of(const Params &p, u32 kind) {
    return kind == MASK_BYTES  ? p.mask_bytes
           : kind == MASK_BITS ? p.mask_bits
           : kind == TREE_MASK ? p.tree_mask
                               : p.tree_bits;
}

// Bytes that a request has of a mask that has no rows between requests.
__device__ __forceinline__ i64 bytes_of(const Params &p, u32 kind, u32 request) {
    const i64 size = Rows(p, request).count;
    if (kind == TREE_MASK) return min(size * size, MOST_BYTES);
    const i64 elements = size * (prefix_of(p, request, size) + size);
    return min(kind == MASK_BITS ? (elements + 7) / 8 : elements, MOST_BYTES);
}

// Where the masks of a request begin.
__device__ __forceinline__ void find_starts(const Params &p, u32 request, Shared &shared) {
#pragma unroll 1
    for (u32 kind = 0; kind < TREE_BITS; kind++) {
        if (!output_of(p, kind)) continue;
        i64 bytes = 0;
#pragma unroll 1
        for (u32 before = threadIdx.x; before < request; before += FOLIO_THREADS) {
            bytes = min(bytes + bytes_of(p, kind, before), MOST_BYTES);
        }
        bytes = warp_sum(bytes);
        if (threadIdx.x % WARP == 0) shared.before[kind][threadIdx.x / WARP] = bytes;
    }
}

// The rows of a tile in a mask: `prefix_len` elements of 1, one for every token of the tree, and zeros up to `stride`.
// Elements are counted from the tile's first.
struct Elements {
    const Tree &tree;
    u32 first, tokens;
    i64 prefix_len, stride;

    // Up to 32 elements from `column` of a row on, which may be those of the rows behind; zeros behind the last.
    __device__ __forceinline__ u32 bits(u32 row, i64 column, u32 count) const {
        u32 bits = 0;
        for (u32 done = 0; done < count; row++, column = 0) {
            for (; column >= stride; column -= stride) row++;
            if (row >= tokens) break;
            const u32 here = static_cast<u32>(min(stride - column, static_cast<i64>(count - done)));
            bits |= (of_row(row, column) & 0xffffffffu >> (32 - here)) << done;
            done += here;
        }
        return bits;
    }

private:
    // The same of one row; what is beyond it does not count.
    __device__ __forceinline__ u32 of_row(u32 row, i64 column) const {
        if (column + 32 <= prefix_len) return 0xffffffffu;
        if (column >= prefix_len) return of_tree(row, static_cast<u32>(min(column - prefix_len, MOST_TOKENS)));
        const u32 ones = static_cast<u32>(prefix_len - column);
        return (1u << ones) - 1 | of_tree(row, 0) << ones;
    }

    static constexpr i64 MOST_TOKENS = 0xffffffffll - 32;

    __device__ __forceinline__ u32 of_tree(u32 row, u32 other) const {
        const u32(&seen)[LOOKED_UP / 32] = tree.shared.seen[row];
        const u32 word = other / 32;
        if (other + 32 <= LOOKED_UP) {
            return __funnelshift_r(seen[word], other % 32 == 0 ? 0 : seen[word + 1], other % 32);
        }
        u32 bits = 0;
        for (u32 n = 0; n < 32 && other + n < tree.size; n++) {
            const u32 at = other + n;
            const bool sees = at < LOOKED_UP ? seen[at / 32] >> at % 32 & 1 : tree.sees(first + row, at);
            bits |= static_cast<u32>(sees) << n;
        }
        return bits;
    }
};

// Where a request's rows go: bytes from `start` of an output of `room` bytes on, of 1 << log2 elements each.
struct Mask {
    u8 *out;
    i64 room, start;
    i64 prefix_len, stride;
    u32 log2;
};

// Writes a tile's rows, in units of 16 bytes where whole ones are the tile's.
struct Writer {
    const Elements &elements;
    u32 log2, log2_of_unit;
    u8 *out;    // the tile's first byte
    i64 bytes;  // of the tile
    u32 head;   // bytes before the first unit
    i64 units;

    __device__ __forceinline__ Writer(const Elements &elements, const Mask &mask)
        : elements(elements), log2(mask.log2), log2_of_unit(mask.log2 + 4) {
        const i64 start = mask.start + (elements.first * mask.stride >> log2);
        out = mask.out + start;
        bytes = min((elements.tokens * mask.stride + (1 << log2) - 1) >> log2, mask.room - start);
        head = min(static_cast<i64>(-reinterpret_cast<u64>(out) % 16), max(bytes, 0ll));
        units = (bytes - head) / 16;
    }

    __device__ __forceinline__ void write() const {
        if (bytes <= 0) return;
        if (elements.prefix_len >> log2_of_unit > 0) write_ones();
        write_mixed();
        write_edges();
    }

private:
    __device__ __forceinline__ uint4 *unit(i64 index) const { return reinterpret_cast<uint4 *>(out + head) + index; }

    // Elements before a row, from the first unit on.
    __device__ __forceinline__ i64 before(u32 row) const {
        return row * elements.stride - (static_cast<i64>(head) << log2);
    }

    // The first unit that begins in a row, or behind those before it.
    __device__ __forceinline__ i64 first_unit(u32 row) const {
        if (row >= elements.tokens) return units;
        return min(max((before(row) + (1 << log2_of_unit) - 1) >> log2_of_unit, 0ll), units);
    }

    // The first of them that has not only ones of the prefix.
    __device__ __forceinline__ i64 first_mixed(u32 row) const {
        return max(first_unit(row), min(before(row) + elements.prefix_len >> log2_of_unit, units));
    }

    __device__ __forceinline__ void write_ones() const {
        const u32 ones = log2 == 0 ? 0x01010101u : 0xffffffffu;
        // A lane finds out for one row what its warp asks for: it is long arithmetic.
        const u32 lane = threadIdx.x % WARP;
        const i64 first = first_unit(lane), behind = first_mixed(lane);
        for (u32 row = threadIdx.x / WARP; row < elements.tokens; row += WARPS) {
            const i64 end = __shfl_sync(FULL_WARP, behind, row);
            for (i64 i = __shfl_sync(FULL_WARP, first, row) + lane; i < end; i += WARP)
                *unit(i) = {ones, ones, ones, ones};
        }
    }

    // A thread for each of them: as many for every row.
    __device__ __forceinline__ void write_mixed() const {
        const u32 most = static_cast<u32>(elements.stride - elements.prefix_len >> log2_of_unit) + 2;
        for (u32 i = threadIdx.x; i < most * elements.tokens; i += FOLIO_THREADS) {
            const u32 row = i / most;
            const i64 index = first_mixed(row) + (i - row * most);
            if (index < first_unit(row + 1)) *unit(index) = unit_of(row, (index << log2_of_unit) - before(row));
        }
    }

    __device__ __forceinline__ uint4 unit_of(u32 row, i64 column) const {
        u32 words[4];
        if (log2 == 0) {
            // Four bits to the lowest ones of four bytes.
            const u32 bits = elements.bits(row, column, 16);
#pragma unroll
            for (u32 i = 0; i < 4; i++) words[i] = (bits >> 4 * i & 0xf) * 0x00204081u & 0x01010101u;
        } else {
#pragma unroll
            for (u32 i = 0; i < 4; i++) words[i] = elements.bits(row, column + 32 * i, 32);
        }
        return {words[0], words[1], words[2], words[3]};
    }

    __device__ __forceinline__ void write_edges() const {
        const i64 tail = head + 16 * units;
        for (i64 i = threadIdx.x; i < head + bytes - tail; i += FOLIO_THREADS) {
            const i64 byte = i < head ? i : tail + i - head;
            out[byte] = static_cast<u8>(elements.bits(0, byte << log2, 1u << log2));
        }
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

// Everything of the tile's tokens but masks.
__device__ __forceinline__ void find_tokens(const Params &p, const Tree &tree, const Rows &rows, u32 first, u32 tokens,
                                            Shared &shared) {
    if (threadIdx.x < tokens) {
        const u32 token = first + threadIdx.x, depth = walk(tree, token, shared.seen[threadIdx.x]);
        const i32 position = static_cast<i32>(tree.prefix_len + depth);
        put(p.positions, p.wide & FOLIO_TREE_WIDE_POSITIONS, rows.first + token, position);
    }
    if (!p.next_token && !p.next_sibling) return;
    for (u32 i = threadIdx.x / WARP; i < tokens; i += WARPS) {
        const Links links(tree, first + i);
        if (threadIdx.x % WARP != 0) continue;
        const u32 row = static_cast<u32>(rows.first) + first + i;
        put(p.next_token, p.wide & FOLIO_TREE_WIDE_NEXT_TOKEN, row, static_cast<i32>(links.child));
        put(p.next_sibling, p.wide & FOLIO_TREE_WIDE_NEXT_SIBLING, row, static_cast<i32>(links.sibling));
    }
}

__device__ __forceinline__ Mask mask_of(const Params &p, const Tree &tree, const Rows &rows, u32 kind) {
    u8 *const out = output_of(p, kind);
    const i64 size = tree.size, prefix = kind < TREE_MASK ? tree.prefix_len : 0, row_bytes = p.row_bytes;
    const u32 log2 = kind == MASK_BITS || kind == TREE_BITS ? 3 : 0;
    if (kind == TREE_BITS) return {out, p.num_tokens * row_bytes, rows.first * row_bytes, 0, 8 * row_bytes, log2};
    i64 start = 0;
    for (u32 warp = 0; warp < WARPS; warp++) start += tree.shared.before[kind][warp];
    const i64 room = kind == MASK_BYTES ? p.bytes_room : kind == MASK_BITS ? p.bits_room : p.tree_room;
    return {out, room, start, prefix, prefix + size, log2};
}

__device__ __forceinline__ void write_masks(const Params &p, const Tree &tree, const Rows &rows, u32 first,
                                            u32 tokens) {
#pragma unroll 1
    for (u32 kind = 0; kind < MASKS; kind++) {
        if (!output_of(p, kind)) continue;
        const Mask mask = mask_of(p, tree, rows, kind);
        const Elements elements = {tree, first, tokens, mask.prefix_len, mask.stride};
        Writer(elements, mask).write();
    }
}

}  // namespace folio

extern "C" __global__ void __launch_bounds__(FOLIO_THREADS)
    folio_tree_mask(const __grid_constant__ FolioTreeMaskParams p) {
    using namespace folio;
    __shared__ Shared shared;
    wait_for_prerequisites();
    const u32 request = blockIdx.x / p.parts, part = blockIdx.x - request * p.parts;
    const Rows rows(p, request);
    const u32 size = static_cast<u32>(rows.count);
    if (part * TOKENS >= size) return;
    const Tree tree = {p.parents + rows.first, shared, size, prefix_of(p, request, rows.count)};

    // On the way while the requests before are summed up.
    for (u32 token = threadIdx.x; token < min(size, LOOKED_UP); token += FOLIO_THREADS) {
        cp_async<4>(shared_address(&shared.parents[token]), tree.parents + token, 4);
    }
    find_starts(p, request, shared);
    cp_async_commit();
    cp_async_wait<0>();
    // Words that are read: of the tree, of a row of bits that is longer, and one behind.
    const u32 words = min(max(size / 32, p.row_bytes / 4) + 2, LOOKED_UP / 32);
    for (u32 first = part * TOKENS; first < size; first += p.parts * TOKENS) {
        const u32 tokens = min(size - first, TOKENS);
        for (u32 i = threadIdx.x / WARP; i < tokens; i += WARPS) {
            if (threadIdx.x % WARP < words) shared.seen[i][threadIdx.x % WARP] = 0;
        }
        __syncthreads();
        find_tokens(p, tree, rows, first, tokens, shared);
        __syncthreads();
        write_masks(p, tree, rows, first, tokens);
        __syncthreads();  // all have read what the next tile clears
    }
}
