// What becomes of the logits of a step that a row must not see, and the bias of logits by distance. Registers, the
// tile's record and masks in memory; the layout of logits is softmax.cuh's.
//
// A step has two calls: `prepare` while the tensor cores are busy with the products, for what comes from memory, and
// `apply` to the products. Both forms answer both calls.
#pragma once

#include "sm90/prefill/softmax.cuh"

namespace folio::prefill {

// The blocks of a tile that hold keys which some of a warpgroup's rows must not see: those from `from` on, and those
// below `below`.
struct MaskedBlocks {
    int from, below;

    MaskedBlocks() = default;

    // By the keys that all of the rows see.
    __device__ __forceinline__ explicit MaskedBlocks(KeyRange all)
        : from(max(all.end, 0) / BLOCK), below((max(all.begin, 0) + BLOCK - 1) / BLOCK) {}

    __device__ __forceinline__ bool right(int block) const { return block >= from; }
    __device__ __forceinline__ bool left(int block) const { return block < below; }
};

// Masks by position: of a row's keys one range is seen.
template <class Tile>
struct WindowStep {
    __device__ __forceinline__ void prepare(const FolioAttentionParams &, const Tile &, const MaskedBlocks &,
                                            int) const {}

    template <int N>
    __device__ __forceinline__ void apply(float (&s)[N], const FolioAttentionParams &params, const Tile &tile,
                                          const MaskedBlocks &blocks, int block, float) const {
        const bool right = blocks.right(block), left = blocks.left(block);
        if (right || left) mask_keys(s, params, tile, block, right, left);
    }
};

// Any mask, and ALiBi. Each lane of a quad finds out about 32 keys of the quad's two rows.
template <class Tile>
class WordStep {
public:
    __device__ __forceinline__ void prepare(const FolioAttentionParams &params, const Tile &tile,
                                            const MaskedBlocks &blocks, int block) {
        if (blocks.right(block) || blocks.left(block)) {
            // One row after the other, because registers are few here.
#pragma unroll 1
            for (int r = 0; r < 2; ++r) {
                const u32 word = seen_by(params, tile, block, r);
                seen[0] = r == 0 ? word : seen[0];
                seen[1] = word;
            }
        }
    }

    // `exponent` is what logits are multiplied by later.
    template <int N>
    __device__ __forceinline__ void apply(float (&s)[N], const FolioAttentionParams &params, const Tile &tile,
                                          const MaskedBlocks &blocks, int block, float exponent) const {
        if (params.alibi_slopes) add_bias(s, params, tile, block, exponent);
        if (blocks.right(block) || blocks.left(block)) hide(s);
    }

private:
    // This lane's word of a row.
    static __device__ __forceinline__ u32 seen_by(const FolioAttentionParams &params, const Tile &tile, int block,
                                                  int r) {
        const int column = 32 * (threadIdx.x % 4);
        const i32 token = min(first_row() + 8 * r >> tile.pack_shift, tile.num_tokens - 1);
        return column < BLOCK ? seen_word<i32>(params, tile.request, tile.keys,
                                               tile.position - tile.request.past + token, block * BLOCK + column)
                              : ~0u;
    }

    // logits.cuh's rule, for logits that are multiplied by the exponent later.
    template <int N>
    static __device__ __forceinline__ void add_bias(float (&s)[N], const FolioAttentionParams &params, const Tile &tile,
                                                    int block, float exponent) {
        const LogitRule rule(params);
        const int first_column = block * BLOCK + 2 * static_cast<int>(threadIdx.x % 4);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const u32 row = first_row() + 8 * r, token = row >> tile.pack_shift;
            const u32 head = tile.head + row - (token << tile.pack_shift);
            const float slope = -rule.slope(params, tile.request.index, head) * reciprocal_approx(exponent);
            const float distance = static_cast<float>(tile.position + static_cast<int>(token) - first_column);
#pragma unroll
            for (int i = 2 * r; i < N; i += i % 2 == 0 ? 1 : 3) {
                const float d = distance - static_cast<float>(8 * (i / 4) + i % 2);
                s[i] = fmaf(slope, rule.alibi_sqrt ? root_of(d) : d, s[i]);
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
        if (__all_sync(FULL_WARP, (seen[0] & seen[1]) == ~0u)) return;
#pragma unroll
        for (int i = 0; i < N; i += 16) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const u32 bits = __shfl_sync(FULL_WARP, seen[r], i / 16, 4) >> 2 * (threadIdx.x % 4);
#pragma unroll
                for (int j = 0; j < 16 && i + j < N; j += 4) {
                    if (!(bits >> 2 * j & 1)) s[i + j + 2 * r] = minus_infinity();
                    if (!(bits >> 2 * j & 2)) s[i + j + 2 * r + 1] = minus_infinity();
                }
            }
        }
    }

    u32 seen[2];  // bits of the keys from 32 * (lane in quad) on; the rest of the last word is of keys that are not there
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
