// The scales of blocks of elements, e4m3, as factors of the words that ldmatrix hands a lane of a tile's rows. In forms without them
// all of it is nothing.
#pragma once

#include "sm90/decode/scale_loader.cuh"

namespace folio::decode {

// Scales of N tokens of a head that follow one another, as words.
template <int N, int BYTES>
__device__ __forceinline__ void load_blocks(u32 (&words)[4], u32 address) {
    static_assert(N * BYTES == 4 || N * BYTES == 8 || N * BYTES == 16, "whole words");
    if constexpr (N * BYTES == 4) {
        asm volatile("ld.shared.u32 %0, [%1];" : "=r"(words[0]) : "r"(address) : "memory");
    } else {
        const uint2 two = ld_shared_v2(address);
        words[0] = two.x, words[1] = two.y;
        if constexpr (N * BYTES == 16) {
            const uint2 more = ld_shared_v2(address + 8);
            words[2] = more.x, words[3] = more.y;
        }
    }
}

// Of 16 keys of a head, where a word is of a token and of one block of a chunk: block lane % 4 / 2.
template <int BYTES>
struct KeyFactors {
    u32 of_chunks[2][2];  // of tokens lane / 4 and lane / 4 + 8: chunks 0 and 1, and 2 and 3

    KeyFactors() = default;
    __device__ __forceinline__ KeyFactors(u32 scales, u32 lane) {
        const u32 own = 0x6420 + (lane & 2) / 2 * 0x1111;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            u32 words[4] = {};
            load_blocks<1, BYTES>(words, scales + (lane / 4 + 8 * half) * BYTES);
            widen_fp8<e4m3>(__byte_perm(words[0], words[1], own), of_chunks[half][0], of_chunks[half][1]);
        }
    }

    // Of a pair of chunks.
    __device__ __forceinline__ WordFactors<e2m1> of_pair(int pair, const E2m1Shifts &shifts) const {
        WordFactors<e2m1> factors = {{}, shifts};
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            both_halves(of_chunks[half][pair], factors.of_word[half], factors.of_word[2 + half]);
        }
        return factors;
    }
};

// Of 16 values of a head, where a word is of two tokens and of one block of a chunk: block lane / 16.
template <int BYTES>
struct ValueFactors {
    u32 of_chunks[2][4];  // of tokens 2 (lane % 4) and the next, and 8 behind

    __device__ __forceinline__ ValueFactors(u32 scales, u32 lane) {
        constexpr int WORDS = BYTES / 4;
        const u32 own = 0x6240 + lane / 16 * 0x1111;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            u32 words[4];
            load_blocks<2, BYTES>(words, scales + (2 * (lane & 3) + 8 * half) * BYTES);
#pragma unroll
            for (int w = 0; w < WORDS; ++w) {
                widen_fp8<e4m3>(__byte_perm(words[w], words[WORDS + w], own), of_chunks[half][2 * w],
                                of_chunks[half][2 * w + 1]);
            }
        }
    }

    __device__ __forceinline__ WordFactors<e2m1> of_pair(int pair, const E2m1Shifts &shifts) const {
        WordFactors<e2m1> factors = {{}, shifts};
#pragma unroll
        for (int i = 0; i < 4; ++i) factors.of_word[i] = of_chunks[i / 2][2 * pair + i % 2];
        return factors;
    }
};

// Of a tile, with so many bytes of scales for a key and for a value.
template <int KEY_BYTES, int VALUE_BYTES>
class BlockFactorsOf {
public:
    typedef KeyFactors<KEY_BYTES> Keys;
    typedef ValueFactors<VALUE_BYTES> Values;

    __device__ __forceinline__ BlockFactorsOf(u32 stage, u32 lane, const E2m1Shifts &shifts)
        : stage(stage), lane(lane), shifts(shifts) {}

    // Of 16 tokens of a head.
    __device__ __forceinline__ Keys keys(int h, int t) const {
        return Keys(stage + (h * TILE_TOKENS + 16 * t) * KEY_BYTES, lane);
    }
    __device__ __forceinline__ Values values(int h, int t) const {
        return Values(stage + ScalesOfStage::VALUES + (h * TILE_TOKENS + 16 * t) * VALUE_BYTES, lane);
    }

    template <class Factors>
    __device__ __forceinline__ WordFactors<e2m1> of_pair(const Factors &of, int pair) const {
        return of.of_pair(pair, shifts);
    }

private:
    u32 stage, lane;
    E2m1Shifts shifts;
};

template <>
class BlockFactorsOf<0, 0> {
public:
    struct None {};
    typedef None Keys;
    typedef None Values;

    __device__ __forceinline__ BlockFactorsOf(u32, u32, const E2m1Shifts &) {}
    __device__ __forceinline__ None keys(int, int) const { return {}; }
    __device__ __forceinline__ None values(int, int) const { return {}; }
    __device__ __forceinline__ WordFactors<CacheType> of_pair(None, int) const { return {}; }
};

typedef BlockFactorsOf<BLOCK_SCALES ? KEY_SCALE_BYTES : 0, BLOCK_SCALES ? VALUE_SCALE_BYTES : 0> BlockFactors;

}  // namespace folio::decode
