// From a projection to the attention, where the cache has another form than rows of plain elements: rows of queries and
// keys are normalised and rotated in fp32, queries are stored, and keys and values go to the cache with the scales that the
// form has beside it. One launch.
//
// A CTA takes one token, and groups of lanes its rows in turn: queries, keys, values. A lane has 16 elements of a row that
// is rotated, and they need not be neighbours. So a key goes through shared memory to the cache, still in fp32: its group
// reads it again as rows of numbers are appended, eight neighbours of a lane at a time. Tokens with negative slots, or with
// slots past the cache, are not cached; positions beyond the table are those of its ends.
#include "core/append.cuh"
#include "core/append_stored.cuh"
#include "core/rope_rows.cuh"
#include "params/stored_rope_append.h"

namespace folio {

typedef FolioStoredRopeAppendParams Params;

// Elements of a row that a lane has.
constexpr u32 OF_LANE = 2 * VECTOR;

// Where the key and the value of a token go.
struct Token {
    bool is_cached;
    StoredSlot slot;
};

__device__ __forceinline__ Token token_of(const FolioAppendParams &p, i64 index) {
    if (index >= p.num_tokens) return {false, {0, 0}};
    const i64 slot = slot_index(p, index);
    const bool is_cached = slot >= 0 && slot < p.num_slots;
    return {is_cached, is_cached ? stored_slot(slot, p.page_size) : StoredSlot{0, 0}};
}

template <class T>
__device__ __forceinline__ void read_angles(const FolioRopeAppendParams &p, i64 position, Lane &lane) {
    const u32 first = VECTOR * lane.index, count = min(VECTOR, p.rotary_dim / 2 - first);
    const i64 at = place_of_angles(p, position, first);
    load_numbers<T>(lane.angles.cos, static_cast<const typename T::Storage *>(p.cos) + at, count, p.vectors);
    load_numbers<T>(lane.angles.sin, static_cast<const typename T::Storage *>(p.sin) + at, count, p.vectors);
}

__device__ __forceinline__ void find_angles(const FolioRopeAppendParams &p, i64 position, Lane &lane) {
    if (!lane.is_rotated) return;
    if (!p.cos) {
        compute_angles(p, position, VECTOR * lane.index, lane.angles);
        return;
    }
    switch (p.cos_sin_dtype) {
        case FOLIO_F32: read_angles<f32>(p, position, lane); break;
        case FOLIO_F16: read_angles<f16>(p, position, lane); break;
        default: read_angles<bf16>(p, position, lane); break;
    }
}

// Queries or keys, and where they go.
struct Rotated {
    const FolioRows &rows, &out;  // a null out: nowhere
    const void *weight;
    u32 weight_dtype;
};

// A row of them, to `kept` in shared memory too unless that is null.
template <class Source>
__device__ __forceinline__ void rotate_row_of(const FolioRopeAppendParams &p, const Rotated &of, i64 token, u32 head,
                                              Lane &lane, float *kept) {
    lane.pieces.load<Source>(row_of<Source>(of.rows, token, head), p.vectors);
    compute_row<Source>(p, lane, of.weight, of.weight_dtype, p.vectors);
    if (of.out.data) store_row<Source>(lane.pieces, row_of<Source>(of.out, token, head), p.vectors);
    if (!kept) return;
    __syncwarp(lane.group);  // the key before was read
    lane.pieces.each([&](u32 d, const float(&x)[VECTOR], u32 count) {
#pragma unroll
        for (u32 i = 0; i < VECTOR; i++) {
            if (i < count) kept[d + i] = x[i];
        }
    });
    __syncwarp(lane.group);
}

__device__ __forceinline__ void rotate_row(const Params &params, const Rotated &of, i64 token, u32 head, Lane &lane,
                                           float *kept) {
    switch (params.row_dtype) {
        case FOLIO_F32: rotate_row_of<f32>(params.rope, of, token, head, lane, kept); break;
        case FOLIO_F16: rotate_row_of<f16>(params.rope, of, token, head, lane, kept); break;
        default: rotate_row_of<bf16>(params.rope, of, token, head, lane, kept); break;
    }
}

__device__ __forceinline__ void append_token(const Params &params, i64 index, float *keys) {
    const FolioRopeAppendParams &p = params.rope;
    const Token token = token_of(p.append, index);
    const Group group(p.log2_lanes);
    Lane lane = lane_of(p);
    find_angles(p, position_of(p, index), lane);
    float *const own = keys + (threadIdx.x >> p.log2_lanes) * (OF_LANE << p.log2_lanes);
    const u32 heads = p.append.num_kv_heads, rows = p.num_q_heads + 2 * heads;
    const u32 of_warp = 32 >> p.log2_lanes;
    // The rows of a warp's groups end together.
    const u32 end = (rows + of_warp - 1) / of_warp * of_warp;
#pragma unroll 1
    for (u32 row = threadIdx.x >> p.log2_lanes; row < end; row += FOLIO_THREADS >> p.log2_lanes) {
        const bool is_query = row < p.num_q_heads, is_value = row >= p.num_q_heads + heads, is_there = row < rows;
        const u32 head = !is_there ? 0 : row - (is_query ? 0 : p.num_q_heads) - (is_value ? heads : 0);
        const bool has_key = token.is_cached || (index < p.append.num_tokens && p.key_out.data);
        if (is_query ? index < p.num_q_rows : !is_value && has_key) {
            const Rotated of = {is_query ? p.q : p.append.k.source, is_query ? p.q_out : p.key_out,
                                is_query ? p.q_weight : p.k_weight, is_query ? p.q_weight_dtype : p.k_weight_dtype};
            rotate_row(params, of, index, head, lane, !is_query && token.is_cached ? own : nullptr);
        }
        const bool is_appended = is_there && !is_query && token.is_cached;
        if (!__any_sync(FULL_WARP, is_appended)) continue;
        const FolioRows &values = p.append.v.source;
        const FolioStoredTensor &t = is_value ? params.cache.v : params.cache.k;
        const NumberRow from = is_value ? NumberRow::of(values, index, head, params.row_dtype, params.value_vectors)
                                        : NumberRow{own, FOLIO_F32, false};
        append_row(t, params.cache.format, token.slot, head, group, from, is_appended);
    }
}

}  // namespace folio

extern "C" __global__ void __launch_bounds__(FOLIO_THREADS)
    folio_rope_append_stored(const __grid_constant__ FolioStoredRopeAppendParams p) {
    using namespace folio;
    __shared__ float keys[OF_LANE * FOLIO_THREADS];
    allow_dependents();  // what attends to the tokens prepares itself meanwhile
    wait_for_prerequisites();
    append_token(p, blockIdx.x, keys);
}
