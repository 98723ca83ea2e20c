// Stretches of sums in the Hopper fp8 prefill kernel. Uninterrupted sums of the matrix unit over 16k keys lose 14 % of an
// output whose values have a mean of 1, because it truncates small addends. So a sum is broken off after a stretch of
// steps, and stretches are added up in fp32. Where shared memory has no room for sums in fp32 it keeps means, in fp16.
// No products.
#pragma once

#include "sm90/prefill_fp8/output.cuh"

namespace folio::prefill_fp8 {

// A piece of 16 bytes of what is kept of a thread's sums.
template <bool IS_FP16>
struct Piece;

template <>
struct Piece<false> {
    static constexpr int COUNT = 4;
    float x[COUNT];

    __device__ __forceinline__ void load(u32 address) {
        asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                     : "=f"(x[0]), "=f"(x[1]), "=f"(x[2]), "=f"(x[3])
                     : "r"(address)
                     : "memory");
    }

    __device__ __forceinline__ void store(u32 address) const {
        asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(x[0]), "f"(x[1]), "f"(x[2]),
                     "f"(x[3])
                     : "memory");
    }
};

template <>
struct Piece<true> {
    static constexpr int COUNT = 8;
    float x[COUNT];

    __device__ __forceinline__ void load(u32 address) {
        u32 words[4];
        asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                     : "r"(address)
                     : "memory");
#pragma unroll
        for (int i = 0; i < COUNT; ++i) x[i] = f16::load(static_cast<u16>(words[i / 2] >> i % 2 * 16));
    }

    __device__ __forceinline__ void store(u32 address) const {
        const u32 words[4] = {f16::pack(x[0], x[1]), f16::pack(x[2], x[3]), f16::pack(x[4], x[5]),
                              f16::pack(x[6], x[7])};
        st_shared_v4(address, words);
    }
};

// Finished stretches of a warp's sums, in shared memory of its own: P V of both rows of each thread, as sums or, divided by
// the sum of P, as means, which are no larger than values are. What they are short of, by references that rose since,
// waits in `factor` for the next stretch.
class Stretches {
public:
    // About 1440 keys: the output is too small by 0.3 % of the values' mean at 16k keys, as with 768 keys, and values of
    // mean 0 are off by 0.030 of their size instead of 0.0276. 768 keys cost 3 % of time more.
    static constexpr int PROMOTE_STEPS = 1440 / BLOCK;

    // Warpgroups begin at different steps, so that they do not wait for shared memory together.
    __device__ __forceinline__ Stretches(u32 shared, u32 group)
        : shared(shared), left(PROMOTE_STEPS - group * PROMOTE_STEPS / CONSUMERS) {}

    __device__ __forceinline__ void rescale(const float (&by)[2]) {
        factor[0] *= by[0];
        factor[1] *= by[1];
    }

    // After a product of a block was added to `o`: true if `o` is a finished stretch, whose sums were taken over.
    __device__ __forceinline__ bool add_step(const Output &o) {
        if (--left != 0) return false;
        left = PROMOTE_STEPS;
        float weight[2], divided[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            weight[r] = kept_weight(r);
            probabilities[r] = fmaf(probabilities[r], factor[r], probability_sum(o, r));
            factor[r] = 1.0f;
            // Of rows that saw nothing all sums are 0.
            divided[r] = KEEPS_MEANS && probabilities[r] > 0.0f ? reciprocal_approx(probabilities[r]) : 1.0f;
        }
#pragma unroll
        for (int i = 0; i < DIM / 2 / Kept::COUNT; ++i) {
            Kept kept = {};
            if (any) kept.load(address(i));
#pragma unroll
            for (int j = 0; j < Kept::COUNT; ++j) {
                const int r = j / 2 % 2;
                kept.x[j] = fmaf(kept.x[j], weight[r], o[Kept::COUNT * i + j]) * divided[r];
            }
            kept.store(address(i));
        }
        any = true;
        return true;
    }

    // Adds all that was taken over to the last stretch.
    __device__ __forceinline__ void finish(Output &o) const {
        if (!any) return;
        const float weight[2] = {kept_weight(0), kept_weight(1)};
#pragma unroll
        for (int i = 0; i < DIM / 2 / Kept::COUNT; ++i) {
            Kept kept;
            kept.load(address(i));
#pragma unroll
            for (int j = 0; j < Kept::COUNT; ++j) {
                float &sum = o[Kept::COUNT * i + j];
                sum = fmaf(kept.x[j], weight[j / 2 % 2], sum);
            }
        }
#pragma unroll
        for (int r = 0; r < 2; ++r) o[DIM / 2 + 2 * r] = fmaf(probabilities[r], factor[r], o[DIM / 2 + 2 * r]);
    }

private:
    using Kept = Piece<KEEPS_MEANS>;

    // What makes a sum of today's reference of what is kept.
    __device__ __forceinline__ float kept_weight(int r) const {
        return KEEPS_MEANS ? factor[r] * probabilities[r] : factor[r];
    }

    __device__ __forceinline__ u32 address(int i) const { return shared + (i * 32 + threadIdx.x % 32) * 16; }

    u32 shared, left;  // steps until the end of the stretch
    bool any = false;  // something is kept
    float probabilities[2] = {}, factor[2] = {1.0f, 1.0f};
};

}  // namespace folio::prefill_fp8
