// The records of an fp8_ds_mla cache (FlashMLA, vLLM): 512 latent values in e4m3, an fp32 scale for each 128 of them,
// and 64 rotary values in bf16, one record per token. What CacheRows is for plain rows.
#pragma once
#include "core/cache.cuh"

namespace folio {

struct DsMlaRows {
    typedef e4m3 Latent;
    typedef bf16 Rope;
    typedef u8 Unit;
    static constexpr ScaleGranularity SCALES = ScaleGranularity::BLOCK;
    static constexpr u32 RANK = 512, ROPE_DIM = 64, BLOCK = 128;
    static constexpr u32 SCALES_AT = RANK, ROPE_AT = SCALES_AT + 4 * (RANK / BLOCK), BYTES = ROPE_AT + 2 * ROPE_DIM;

    static __device__ __forceinline__ const u8 *record(const FolioCache &cache, i64 page, i64 token) {
        return static_cast<const u8 *>(cache.data) + page * cache.stride_page + token * cache.stride_token;
    }

    // The scale of a block of 128. Records may lie at any address; copy_bytes says what all are multiples of.
    static __device__ __forceinline__ float scale(const u8 *record, u32 block, u32 copy_bytes) {
        const u8 *at = record + SCALES_AT + 4 * block;
        if (copy_bytes >= 4) return *reinterpret_cast<const float *>(at);
        return __uint_as_float(at[0] | at[1] << 8 | at[2] << 16 | static_cast<u32>(at[3]) << 24);
    }
};
static_assert(DsMlaRows::BYTES == 656, "a record");

}  // namespace folio
