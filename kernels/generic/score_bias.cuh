// Numbers of the caller that are added to logits of visible keys, on the portable kernels. They are added to finished
// logits, in a pass of its own: runs without a bias pay one test for a tile of keys.
//
// Registers are scarce beside logits and outputs. So a lane knows where one row lies and asks the others for theirs;
// rows that each thread computed for itself spilled 252 bytes at head_dim 128.
//
// Lengths may be the device's alone, so rows and columns that the tensor lacks are not read. They add nothing.
#pragma once
#include "core/paged.cuh"
#include "core/softmax.cuh"
#include "generic/work.cuh"

namespace folio {

// Less hides a key: LEAST_BIAS of src/problem/attention.rs.
constexpr float LEAST_BIAS = -1.7014118346046923e38f;

__device__ __forceinline__ bool is_biased(const FolioScoreBias &bias, const Request &request, KeyRange keys) {
    return bias.data && (!(bias.flags & FOLIO_BIAS_NEW_KEYS) || keys.end > request.past);
}

// Where a tile row's column 0 is; of another row, where the tensor lacks this one.
struct BiasRow {
    const u8 *data;
    bool exists;

    __device__ __forceinline__ BiasRow(const FolioScoreBias &bias, const Work &work, u32 tile_row) {
        const u32 of_item = work.row(tile_row), token = divide(of_item, bias.group_size);
        const u32 head = (work.kv_head - token) * bias.group_size.divisor + of_item;
        // Few runs have a bias: addresses are not computed before the loop, in registers that all would lack.
        const FolioWorkItem *item = kept(work.item);
        const u32 row = token + (bias.flags & FOLIO_BIAS_REQUEST_ROWS ? item->q_start : item->q_token);
        exists = row < bias.rows;
        data = static_cast<const u8 *>(bias.data) + head * bias.stride_head + (exists ? row : 0) * bias.stride_row;
    }

    __device__ __forceinline__ BiasRow(const u8 *data, bool exists) : data(data), exists(exists) {}

    // Of the lane that has it.
    __device__ __forceinline__ BiasRow of_lane(u32 lane) const {
        const u64 address = __shfl_sync(FULL_WARP, reinterpret_cast<u64>(data), lane);
        return {reinterpret_cast<const u8 *>(address), (__ballot_sync(FULL_WARP, exists) >> lane & 1) != 0};
    }

    // A logit in base 2 with what belongs to its column. Hidden keys stay hidden, whatever stands there.
    __device__ __forceinline__ float add_to(float logit, const FolioScoreBias &bias, i32 column) const {
        const bool there = exists && static_cast<u32>(column) < bias.columns;
        const u8 *at = data + (there ? column : 0) * bias.stride_column;
        const float found = bias.dtype == FOLIO_F32   ? *reinterpret_cast<const float *>(at)
                            : bias.dtype == FOLIO_F16 ? f16::load(*reinterpret_cast<const u16 *>(at))
                                                      : bf16::load(*reinterpret_cast<const u16 *>(at));
        const float x = there ? found : 0.0f;
        return x < LEAST_BIAS || logit == minus_infinity() ? minus_infinity() : fmaf(x, LOG2_E, logit);
    }
};

// A key's column; negative where it has none.
__device__ __forceinline__ i32 bias_column(const FolioScoreBias &bias, const Request &request, i32 key) {
    return bias.flags & FOLIO_BIAS_NEW_KEYS ? key - request.past : key;
}

// To a thread's fragment of a tile's logits: 16 M_TILES tile rows from `first_row` on, and keys from `first_key` on. All
// lanes of the warp take part.
template <int M_TILES, int N_TILES>
__device__ __forceinline__ void add_bias(float (&s)[M_TILES][N_TILES][4], const FolioScoreBias &bias, const Work &work,
                                         u32 first_row, i32 first_key) {
    static_assert(16 * M_TILES <= 32, "a row for each lane");
    const u32 lane = threadIdx.x % 32;
    const BiasRow mine(bias, work, first_row + lane % (16 * M_TILES));
    const i32 column = bias_column(bias, work.request, first_key + 2 * static_cast<i32>(lane % 4));
#pragma unroll
    for (int m = 0; m < M_TILES; m++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const BiasRow row = mine.of_lane(16 * m + 8 * half + lane / 4);
#pragma unroll
            for (int n = 0; n < N_TILES; n++) {
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    float &x = s[m][n][2 * half + i];
                    x = row.add_to(x, bias, column + 8 * n + i);
                }
            }
        }
    }
}

}  // namespace folio
