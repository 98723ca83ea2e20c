// The end of a unit of 16-bit records: the warpgroups' sums become one, and rows are stored to the output, or to the partial
// results where the item is one chunk of several. Rows go to memory straight from registers: a unit ends once, so that
// most of what this costs is to fetch its code.
#pragma once

#include "sm90/mla_few/output_rows.cuh"

namespace folio::mla_few {

template <class Format>
class Output {
    using P = Products<Format>;
    static constexpr u32 THREADS = CONSUMERS * GROUP_THREADS;
    // The barrier of all consumers; 1 and the next are those of the warpgroups.
    static constexpr u32 BARRIER = 1 + CONSUMERS;
    // A warpgroup stores so many tiles of 64 dims; the others it hands on.
    static constexpr int OWN_TILES = OUTPUT_TILES / CONSUMERS;
    // Handed on at a time: a float4 for each thread and half of a tile. Both ways they fit where the queries were.
    static constexpr int TILES_AT_ONCE = 2;
    static constexpr u32 PIECE_BYTES = GROUP_THREADS * 16, HANDED_BYTES = 2 * TILES_AT_ONCE * PIECE_BYTES;
    static_assert(2 * HANDED_BYTES <= Memory<Format>::QUERY_BYTES);

public:
    // All consumer warps together. Nobody may read the queries any more after the first barrier in here.
    static __device__ __forceinline__ void store(const FolioMlaFewParams &params, const Unit &unit,
                                                 Softmax<Format> &softmax, Statistics<Format> &shared, u8 *queries,
                                                 u32 group, u32 warp, u32 lane) {
        publish(softmax, shared, group, warp, lane);
        group_sync(BARRIER, THREADS);
        // Once for a row and warpgroup, not by every lane that has a part of the row.
        if (threadIdx.x < ROWS * CONSUMERS) weigh(params, unit, shared, threadIdx.x / ROWS, threadIdx.x % ROWS);
        group_sync(BARRIER, THREADS);
#pragma unroll
        for (int n = 0; n < 4; ++n) {
            const float factor = shared.factor[group][lane_row(n, lane)];
#pragma unroll
            for (int j = 0; j < OUTPUT_TILES; ++j) {
                softmax.o[j][n / 2 * 4 + n % 2] *= factor;
                softmax.o[j][n / 2 * 4 + n % 2 + 2] *= factor;
            }
        }
        if (group == 0) {
            finish<0>(params, unit, softmax.o, shared_address(queries), warp, lane);
        } else {
            finish<OUTPUT_TILES - OWN_TILES>(params, unit, softmax.o, shared_address(queries), warp, lane);
        }
    }

private:
    // What a warpgroup's sums of a row are multiplied by. The row's lse is stored with it.
    static __device__ __forceinline__ void weigh(const FolioMlaFewParams &params, const Unit &unit,
                                                 Statistics<Format> &shared, u32 group, u32 row) {
        const RowState state = total(shared, row);
        const float scale = unit.work.partial != FOLIO_NO_PARTIAL ? 1.0f : params.mla.attention.v_scale;
        const float own = exp2_approx(shared.max[group][row] - state.max);
        shared.factor[group][row] = state.sum == 0.0f ? 0.0f : __fdividef(own, state.sum) * scale;
        if (group == 0 && row < unit.num_rows) store_lse(params, unit, row, state);
    }

    // Tiles FIRST .. of a warpgroup, once it has the other's part of them.
    template <int FIRST>
    static __device__ __forceinline__ void finish(const FolioMlaFewParams &params, const Unit &unit,
                                                  float (&o)[OUTPUT_TILES][8], u32 queries, u32 warp, u32 lane) {
        exchange<FIRST>(o, queries);
        if (unit.work.partial == FOLIO_NO_PARTIAL) {
            store_rows<FIRST>(params, unit, o, warp, lane);
        } else {
            store_partial<FIRST>(params, unit, o, warp, lane);
        }
    }

    template <int FIRST>
    static __device__ __forceinline__ void exchange(float (&o)[OUTPUT_TILES][8], u32 queries) {
        constexpr int OTHERS = OWN_TILES - FIRST;
        constexpr u32 TO = FIRST == 0 ? 0 : HANDED_BYTES, FROM = HANDED_BYTES - TO;
        const u32 mine = queries + threadIdx.x % GROUP_THREADS * 16;
#pragma unroll
        for (int tile = 0; tile < OWN_TILES; tile += TILES_AT_ONCE) {
#pragma unroll
            for (int n = 0; n < 2 * TILES_AT_ONCE; ++n) {
                const float(&x)[8] = o[OTHERS + tile + n / 2];
                const int i = n % 2 * 4;
                const u32 words[4] = {__float_as_uint(x[i]), __float_as_uint(x[i + 1]), __float_as_uint(x[i + 2]),
                                      __float_as_uint(x[i + 3])};
                st_shared_v4(mine + TO + n * PIECE_BYTES, words);
            }
            group_sync(BARRIER, THREADS);
#pragma unroll
            for (int n = 0; n < 2 * TILES_AT_ONCE; ++n) {
                float(&x)[8] = o[FIRST + tile + n / 2];
                const int i = n % 2 * 4;
                const float4 more = ld_shared_f4(mine + FROM + n * PIECE_BYTES);
                x[i] += more.x, x[i + 1] += more.y, x[i + 2] += more.z, x[i + 3] += more.w;
            }
            group_sync(BARRIER, THREADS);
        }
    }

    // 32 bytes of neighbouring dims of each of four rows at a time.
    template <int FIRST>
    static __device__ __forceinline__ void store_partial(const FolioMlaFewParams &params, const Unit &unit,
                                                         const float (&o)[OUTPUT_TILES][8], u32 warp, u32 lane) {
#pragma unroll
        for (int n = 0; n < 4; ++n) {
            const u32 row = lane_row(n, lane);
            if (row >= unit.num_rows) continue;
            const i64 at = partial_row(params, unit, token_head(params, unit, row));
            float *const to = params.mla.attention.plan.partial_o + at * LATENT + P::first_dim(FIRST, warp, lane / 4);
#pragma unroll
            for (int j = FIRST; j < FIRST + OWN_TILES; ++j) {
                float *const tile = to + P::tile_dim(j) - P::tile_dim(FIRST);
                const float x = o[j][n / 2 * 4 + n % 2], y = o[j][n / 2 * 4 + n % 2 + 2];
                tile[0] = x;
                tile[P::DIM_STEP] = y;
            }
        }
    }

    template <int FIRST>
    static __device__ __forceinline__ void store_rows(const FolioMlaFewParams &params, const Unit &unit,
                                                      const float (&o)[OUTPUT_TILES][8], u32 warp, u32 lane) {
        // A lane has two rows of a dim; transposed, two dims of a row.
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const u32 row = 8 * half + lane / 4;
            const bool exists = row < unit.num_rows;
            u16 *const to = output_row(params, unit, row) + P::first_dim(FIRST, warp, 0) + 2 * (lane % 4);
#pragma unroll
            for (int n = 0; n < 2 * OWN_TILES; ++n) {
                const float(&x)[8] = o[FIRST + n / 2];
                const int i = 4 * half + n % 2 * 2;
                const u32 pair = transpose_8x8(QueryType::pack(x[i], x[i + 1]));
                if (exists) *reinterpret_cast<u32 *>(to + P::tile_dim(n / 2) + n % 2 * P::DIM_STEP) = pair;
            }
        }
    }

    static __device__ __forceinline__ u16 *output_row(const FolioMlaFewParams &params, const Unit &unit, u32 row) {
        const FolioRows &o = params.mla.attention.o;
        const TokenHead at = token_head(params, unit, row);
        const i64 token = static_cast<i64>(unit.work.q_token) + at.token;
        return static_cast<u16 *>(o.data) + token * o.stride_token + at.head * o.stride_head;
    }
};

}  // namespace folio::mla_few
