// What becomes of the logits of a step that a row must not see, and the bias of logits by distance. Registers, the
// tile's record and masks in memory; the layout of logits is softmax.cuh's.
//
// A tile has a call, `begin`, and a step two: `prepare` while the tensor cores are busy with the products, for what comes
// from memory, and `apply` to the products. Both forms answer all calls.
#pragma once

#include "sm90/prefill/softmax.cuh"

namespace folio::prefill {

// The blocks of a tile that hold keys which some of a warpgroup's rows must not see: those from `from` on, those
// below `below`, and the one where a context ends. Every step asks: in registers.
struct MaskedBlocks {
    int from, below;
    ContextEnd<AFTER> context;

    MaskedBlocks() = default;

    // By the keys that all of the rows see.
    __device__ __forceinline__ MaskedBlocks(KeyRange all, const Tile &tile)
        : from(max(all.end, 0) / BLOCK), below((max(all.begin, 0) + BLOCK - 1) / BLOCK), context(tile) {}

    __device__ __forceinline__ bool right(int block) const { return block >= from; }
    __device__ __forceinline__ bool left(int block) const { return block < below; }
    __device__ __forceinline__ bool end_context(int block) const { return AFTER && block == context.block(); }
};

// Masks by position: of a row's keys one range is seen.
template <class Tile>
struct WindowStep {
    static __device__ __forceinline__ void begin(const FolioAttentionParams &, const Tile &, u32, const float (&)[2]) {}

    __device__ __forceinline__ void prepare(const FolioAttentionParams &, const Tile &, u32, const MaskedBlocks &,
                                            int) const {}

    template <int N>
    __device__ __forceinline__ void apply(float (&s)[N], const FolioAttentionParams &params, const Tile &tile, u32,
                                          const MaskedBlocks &blocks, int block) const {
        const bool right = blocks.right(block) || blocks.end_context(block), left = blocks.left(block);
        if (right || left) mask_keys(s, params, tile, block, right, left);
    }
};

// Any mask, and ALiBi. The lanes of a warp share its 16 rows of a block among them, 32 keys at a time. What is the same
// for a tile lies in shared memory, where each thread reads only what it wrote: registers are few.
template <class Tile>
class WordStep {
public:
    // At the start of a tile. `scale` is what the logits of the thread's rows are multiplied by later.
    static __device__ __forceinline__ void begin(const FolioAttentionParams &params, const Tile &tile, u32 shared,
                                                 const float (&scale)[2]) {
        const Own own(shared);
#pragma unroll
        for (int n = 0; n < WORDS_OF_LANE; ++n) {
            const WordMask mask = WordMask::of_row<i32>(params, tile.request, tile.keys, row_of(tile, n));
            const u64 first = mask.place.first;
            const u32 words[4] = {static_cast<u32>(first), static_cast<u32>(first >> 32),
                                  static_cast<u32>(mask.keys.begin), static_cast<u32>(mask.keys.end)};
            st_shared_v4(own.mask(n), words);
        }
        const LogitRule rule(params);
        if (!rule.alibi) return;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const u32 head = tile.head_of(first_row() + 8 * r);
            const float slope = -rule.slope(params, tile.request.index, head) * reciprocal_approx(scale[r]);
            asm volatile("st.shared.f32 [%0], %1;" ::"r"(own.slope(r)), "f"(slope) : "memory");
        }
    }

    __device__ __forceinline__ void prepare(const FolioAttentionParams &params, const Tile &tile, u32 shared,
                                            const MaskedBlocks &blocks, int block) {
        if (!blocks.right(block) && !blocks.left(block)) return;
        const Own own(shared);
#pragma unroll
        for (int n = 0; n < WORDS_OF_LANE; ++n) {
            u32 words[4];
            asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                         : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                         : "r"(own.mask(n)));
            const WordMask mask = {MaskRow(static_cast<i64>(static_cast<u64>(words[1]) << 32 | words[0])),
                                   {static_cast<i32>(words[2]), static_cast<i32>(words[3])}};
            const int column = column_of(n);
            // Keys past the block count as seen.
            seen[n] = ~first_bits(BLOCK - column);
            if (column < BLOCK) {
                seen[n] |= mask.seen(params, tile.request, tile.keys, row_of(tile, n), block * BLOCK + column);
            }
        }
    }

    template <int N>
    __device__ __forceinline__ void apply(float (&s)[N], const FolioAttentionParams &params, const Tile &tile,
                                          u32 shared, const MaskedBlocks &blocks, int block) const {
        if (params.alibi_slopes) {
            if (params.flags & FOLIO_RUN_ALIBI_SQRT) {
                add_bias<true>(s, tile, shared, block);
            } else {
                add_bias<false>(s, tile, shared, block);
            }
        }
        if (blocks.right(block) || blocks.left(block)) hide(s);
    }

private:
    // A row's words of a block, three of them as four, and how many of a warp's 16 rows' words a lane has: word i of all
    // is lane i % 32's.
    static constexpr int ROW_WORDS = BLOCK <= 64 ? 2 : 4, WORDS_OF_LANE = ROW_WORDS / 2;
    static_assert(BLOCK > 32 && BLOCK <= 128 && WORDS_OF_LANE == ROW_MASKS_OF_THREAD);

    // A thread's own part of shared memory.
    struct Own {
        u32 masks, slopes;

        explicit __device__ __forceinline__ Own(u32 shared)
            : masks(shared + ROW_MASKS + 16 * (threadIdx.x - WARPGROUP)),
              slopes(shared + SLOPES + 8 * (threadIdx.x - WARPGROUP)) {}

        __device__ __forceinline__ u32 mask(int n) const { return masks + 16 * WARPGROUP * CONSUMERS * n; }
        __device__ __forceinline__ u32 slope(int r) const { return slopes + 4 * r; }
    };

    // The request's row, and the column of the block, that the lane's word n is of.
    static __device__ __forceinline__ i32 row_of(const Tile &tile, int n) {
        const u32 row = (threadIdx.x - WARPGROUP) / 32 * 16 + (32 * n + threadIdx.x % 32) / ROW_WORDS;
        return tile.position - tile.request.past + min(tile.position_of(row), tile.num_tokens - 1);
    }
    static __device__ __forceinline__ int column_of(int n) { return 32 * (threadIdx.x % ROW_WORDS); }

    // logits.cuh's rule, for logits that are multiplied by the scale later; the slope is divided by it, and negative.
    template <bool ROOT, int N>
    static __device__ __forceinline__ void add_bias(float (&s)[N], const Tile &tile, u32 shared, int block) {
        const int first_column = block * BLOCK + 2 * static_cast<int>(threadIdx.x % 4);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float slope;
            asm volatile("ld.shared.f32 %0, [%1];" : "=f"(slope) : "r"(Own(shared).slope(r)));
            const float distance = static_cast<float>(
                tile.position + static_cast<int>(tile.position_of(first_row() + 8 * r)) - first_column);
#pragma unroll
            for (int i = 2 * r; i < N; i += i % 2 == 0 ? 1 : 3) {
                const float d = distance - static_cast<float>(8 * (i / 4) + i % 2);
                s[i] = fmaf(slope, ROOT ? root_of(d) : d, s[i]);
            }
        }
    }

    // 0 for what is negative. The relative error is 2^-23.
    static __device__ __forceinline__ float root_of(float x) {
        float root;
        asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(root) : "f"(fmaxf(x, 0.0f)));
        return root;
    }

    template <int N>
    __device__ __forceinline__ void hide(float (&s)[N]) const {
        bool all = true;
#pragma unroll
        for (int n = 0; n < WORDS_OF_LANE; ++n) all &= seen[n] == ~0u;
        if (__all_sync(FULL_WARP, all)) return;
#pragma unroll
        for (int i = 0; i < N; i += 16) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const int word = threadIdx.x % 32 / 4 * ROW_WORDS + i / 16, offset = 8 * r * ROW_WORDS;
                const u32 bits = __shfl_sync(FULL_WARP, seen[offset / 32], word + offset % 32) >> 2 * (threadIdx.x % 4);
#pragma unroll
                for (int j = 0; j < 16 && i + j < N; j += 4) {
                    if (!(bits >> 2 * j & 1)) s[i + j + 2 * r] = minus_infinity();
                    if (!(bits >> 2 * j & 2)) s[i + j + 2 * r + 1] = minus_infinity();
                }
            }
        }
    }

    u32 seen[WORDS_OF_LANE];
};

template <bool MASKED>
struct StepMaskOf {
    using Type = WindowStep<Tile>;
};
template <>
struct StepMaskOf<true> {
    using Type = WordStep<Tile>;
};
using StepMask = StepMaskOf<MASKED>::Type;

}  // namespace folio::prefill
