// The softmax of one warpgroup of the Hopper fp8 prefill kernel on wgmma accumulators: a thread holds two rows, row(0) =
// 16 warp + lane / 4 and row(1) = row(0) + 8, of each of them columns 8 j + 2 (lane % 4) + {0, 1} in
// s[4 j + 2 row + {0, 1}]; a row is spread over the four lanes of a quad. Registers only.
//
// Sums of exponentials are not taken here: the matrix unit sums P as it rounded it, by the rows of ones behind V.
#pragma once

#include "core/softmax.cuh"
#include "ptx/wgmma_fp8.cuh"
#include "sm90/prefill_fp8/tile.cuh"

namespace folio::prefill_fp8 {

using Scores = float[BLOCK / 2];
// The four probabilities of a register belong to keys 2 q, 2 q + 1, 2 q + 8 and 2 q + 9 of 16, q being lane % 4: that is
// the order of the keys of transposed values.
using Probabilities = u32[BLOCK / 8];

__device__ __forceinline__ float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(FULL_WARP, x, 1));
    return fmaxf(x, __shfl_xor_sync(FULL_WARP, x, 2));
}

// The thread's first row within the tile.
__device__ __forceinline__ u32 first_row() {
    return (threadIdx.x - PRODUCERS * WARPGROUP) / 32 * 16 + threadIdx.x % 32 / 4;
}

// Keys from `end` on become -inf for one of the thread's rows, or those before `begin`; both count from its first column.
__device__ __forceinline__ void mask_right(Scores &s, int row, int end) {
#pragma unroll
    for (int i = 2 * row; i < BLOCK / 2; i += i % 2 == 0 ? 1 : 3) {
        if (8 * (i / 4) + i % 2 >= end) s[i] = minus_infinity();
    }
}

__device__ __forceinline__ void mask_left(Scores &s, int row, int begin) {
#pragma unroll
    for (int i = 2 * row; i < BLOCK / 2; i += i % 2 == 0 ? 1 : 3) {
        if (8 * (i / 4) + i % 2 < begin) s[i] = minus_infinity();
    }
}

// Masks what the thread's rows must not see of a block: keys outside their window, or past the end.
__device__ __forceinline__ void mask_keys(Scores &s, const FolioAttentionParams &params, const Tile &tile, int block,
                                          bool right, bool left) {
    const Window<i32> window(params);
    const int first_column = block * BLOCK + 2 * static_cast<int>(threadIdx.x % 4);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int position = tile.position + static_cast<int>(first_row() + 8 * r >> tile.pack_shift);
        if (right) mask_right(s, r, min(tile.kv_end, window.end(position)) - first_column);
        if (left) mask_left(s, r, window.begin(position) - first_column);
    }
}

// Keys of a block before their rows' last: those that the warp's last row sees, those that its first row does, and those
// of the thread's rows from its first column on.
struct KeysBefore {
    int some, all, row[2];

    __device__ __forceinline__ KeysBefore(const FolioAttentionParams &params, const Tile &tile, u32 warp_row,
                                          int block) {
        const Window<i32> window(params);
        const int first = block * BLOCK;
        const auto end = [&](u32 row) {
            const int position = tile.position + static_cast<int>(row >> tile.pack_shift);
            return min(tile.kv_end, window.end(position)) - first;
        };
        all = end(warp_row);
        some = end(warp_row + 15);
#pragma unroll
        for (int r = 0; r < 2; ++r) row[r] = end(first_row() + 8 * r) - 2 * static_cast<int>(threadIdx.x % 4);
    }
};

// The references of the exponentials of the thread's two rows: P = 2^(logit - reference). A row's largest probability
// is at most 2^8, within e4m3's 448; smaller ones keep their three bits down to 2^-6 and vanish below 2^-10. The
// reference follows the maximum only where that would be exceeded, because to follow costs a pass over the output. Where
// it is set the maximum becomes 2^HEADROOM: less the first time, when a row has seen few keys and is likely to rise.
//
// Maxima are not taken: rounded probabilities tell that one was too large, which is rare, and then all are made again.
class Rows {
public:
    // Of a row that has seen no key it is infinite: its probabilities are 0.
    float reference[2] = {-minus_infinity(), -minus_infinity()};
    bool some_unset = true;  // in some lane of the warp

    // P of the first block of a tile, whose last keys are often hidden from all of the warp's rows: they are passed over,
    // 32 at a time. 16 at a time cost more in branches than they save.
    __device__ __forceinline__ void begin(Scores &s, float scale, const KeysBefore &keys) {
        float largest[2] = {minus_infinity(), minus_infinity()};
#pragma unroll
        for (int first = 0; first < BLOCK; first += 32) {
            if (first >= keys.some) continue;
            float(&part)[16] = reinterpret_cast<float(&)[16]>(s[first / 2]);
            if (first + 32 > keys.all) {
                pin(part);
#pragma unroll
                for (int i = 0; i < 16; ++i) {
                    if (first + 8 * (i / 4) + i % 2 >= keys.row[i / 2 % 2]) part[i] = minus_infinity();
                }
            }
#pragma unroll
            for (int i = 0; i < 16; ++i) largest[i / 2 % 2] = fmaxf(largest[i / 2 % 2], part[i]);
        }
        set(largest, scale);
#pragma unroll
        for (int first = 0; first < BLOCK; first += 32) {
            float(&part)[16] = reinterpret_cast<float(&)[16]>(s[first / 2]);
            if (first < keys.some) {
                pin(part);
#pragma unroll
                for (int i = 0; i < 16; ++i) part[i] = exp2_approx(fmaf(part[i], scale, -reference[i / 2 % 2]));
            } else {
#pragma unroll
                for (int i = 0; i < 16; ++i) part[i] = 0.0f;
            }
        }
    }

    // Sets the references of rows that had seen no key before this block.
    __device__ __forceinline__ void set_first(const Scores &s, float scale) {
        float largest[2];
        block_max(s, largest);
        set(largest, scale);
    }

    // s becomes the exponents of P.
    __device__ __forceinline__ void subtract(Scores &s, float scale) const {
#pragma unroll
        for (int i = 0; i < BLOCK / 2; ++i) s[i] = fmaf(s[i], scale, -reference[i / 2 % 2]);
    }

    // P from its exponents. True if the output must be multiplied by `factor`.
    __device__ __forceinline__ bool exponentials(Probabilities &p, Scores &s, float (&factor)[2]) {
        pack_exponentials(p, s);
        const bool rises = __any_sync(FULL_WARP, exceeds(p));
        if (rises) {
            raise(s, factor);
            pack_exponentials(p, s);
        }
        return rises;
    }

private:
    static constexpr float HEADROOM = 4.0f, FIRST_HEADROOM = 2.0f;
    static constexpr float MOST = 7.9f;  // exponents above it may be rounded to 2^8

    __device__ __forceinline__ bool is_unset(int r) const { return reference[r] == -minus_infinity(); }

    static __device__ __forceinline__ void block_max(const Scores &s, float (&largest)[2]) {
        largest[0] = fmaxf(s[0], s[1]);
        largest[1] = fmaxf(s[2], s[3]);
#pragma unroll
        for (int i = 4; i < BLOCK / 2; i += 4) {
            largest[0] = fmaxf(largest[0], fmaxf(s[i], s[i + 1]));
            largest[1] = fmaxf(largest[1], fmaxf(s[i + 2], s[i + 3]));
        }
    }

    static __device__ __forceinline__ void pack_exponentials(Probabilities &p, const Scores &s) {
#pragma unroll
        for (int i = 0; i < BLOCK / 8; ++i) {
            const int first = i / 2 * 8 + i % 2 * 2;
            p[i] = pack_e4m3(exp2_approx(s[first]), exp2_approx(s[first + 1]), exp2_approx(s[first + 4]),
                             exp2_approx(s[first + 5]));
        }
    }

    // Whether a probability is 2^8 or more: an exponent field of ones, to which 8 adds the sign.
    static __device__ __forceinline__ bool exceeds(const Probabilities &p) {
        u32 signs = 0;
#pragma unroll
        for (int i = 0; i < BLOCK / 8; ++i) signs |= p[i] + 0x08080808;
        return (signs & 0x80808080) != 0;
    }

    __device__ __forceinline__ void set(float (&largest)[2], float scale) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            largest[r] = quad_max(largest[r]);
            if (is_unset(r) && largest[r] > minus_infinity()) {
                reference[r] = fmaf(largest[r], scale, -FIRST_HEADROOM);
            }
        }
        some_unset = __any_sync(FULL_WARP, is_unset(0) || is_unset(1));
    }

    __device__ __forceinline__ void raise(Scores &s, float (&factor)[2]) {
        float largest[2], rise[2];
        block_max(s, largest);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            largest[r] = quad_max(largest[r]);
            rise[r] = largest[r] > MOST ? largest[r] - HEADROOM : 0.0f;
            factor[r] = exp2_approx(-rise[r]);
            reference[r] += rise[r];
        }
#pragma unroll
        for (int i = 0; i < BLOCK / 2; ++i) s[i] -= rise[i / 2 % 2];
    }
};

// P as an operand of P V, as Rows makes it.
__device__ __forceinline__ void pack_probabilities(Probabilities &p, const Scores &s) {
#pragma unroll
    for (int i = 0; i < BLOCK / 8; ++i) {
        const int first = i / 2 * 8 + i % 2 * 2;
        p[i] = pack_e4m3(s[first], s[first + 1], s[first + 4], s[first + 5]);
    }
}

}  // namespace folio::prefill_fp8
