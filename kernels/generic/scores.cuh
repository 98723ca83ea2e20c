// From products to probabilities in fragments, for kernels whose runs seldom ask for more than a scale: what all runs need
// is beside the loop or one test for a tile, and numbers for masks, ALiBi and caps are made where they are asked for.
//
// `Lane` has `pair`, and `seldom_tile_row(m, half)`: the tile row of half `half` (rows 0-7, 8-15) of 16-row tile m.
#pragma once
#include "generic/fragments.cuh"
#include "generic/work.cuh"

namespace folio {

// How products become logits: by the softmax alone, which multiplies by `unit`, where a logit is a product times a
// positive scale; else by the rule. `biased`: something is added to logits.
struct Logits {
    float scale;
    bool are_products;

    __device__ __forceinline__ Logits(const FolioAttentionParams &p, const Work &work, bool biased) {
        const LogitRule rule(p);
        scale = rule.scale<CapDivision::EXACT>(p, work.kv_head, work.request.index);
        are_products = rule.plain() && scale > 0.0f && !biased;
    }

    __device__ __forceinline__ float unit() const { return are_products ? scale : 1.0f; }
};

template <int M_TILES, int N_TILES, class F>
__device__ __forceinline__ void for_each_score(float (&s)[M_TILES][N_TILES][4], F f) {
#pragma unroll
    for (int m = 0; m < M_TILES; m++) {
#pragma unroll
        for (int n = 0; n < N_TILES; n++) {
#pragma unroll
            for (int i = 0; i < 4; i++) f(s[m][n][i]);
        }
    }
}

// What each row of the tile sees by base mask and window. A row's range takes 64-bit arithmetic and a division: it is
// computed once, and not for each tile of keys.
template <int ROWS>
__device__ __forceinline__ void write_row_keys(KeyRange (&row_keys)[ROWS], const FolioAttentionParams &p,
                                               const Work &work) {
    for (u32 row = threadIdx.x; row < ROWS; row += FOLIO_THREADS) {
        row_keys[row] = RowMask(p, work.request, work.token(row)).keys;
    }
}

// The keys that each of `count` rows from `first` on sees. After write_row_keys; later rows see no less at the end and no
// more at the beginning.
template <int ROWS>
__device__ __forceinline__ KeyRange keys_of_all_rows(const KeyRange (&row_keys)[ROWS], const FolioAttentionParams &p,
                                                     const Work &work, u32 first, u32 count, KeyRange keys) {
    const i32 end = p.mask_mode > FOLIO_MASK_FULL ? min(keys.end, visible_prefix(p, work.request)) : keys.end;
    return {max(row_keys[first + count - 1].begin, keys.begin), min(row_keys[first].end, end)};
}

// What a row may not see becomes -inf. Only keys in `keys` may be asked about.
template <class Lane, int ROWS, int M_TILES, int N_TILES>
__device__ __forceinline__ void hide(float (&s)[M_TILES][N_TILES][4], const KeyRange (&row_keys)[ROWS],
                                     const FolioAttentionParams &p, const Work &work, const Lane &lane, KeyRange keys,
                                     i32 first_key) {
#pragma unroll
    for (int m = 0; m < M_TILES; m++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const u32 row = lane.seldom_tile_row(m, half);
            const RowMask mask(work.token(row), row_keys[row]);
            const u32 seen =
                seen_columns<N_TILES>(p, work.request, mask, keys, first_key + 2 * static_cast<i32>(lane.pair));
#pragma unroll
            for (int n = 0; n < N_TILES; n++) {
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    if (!(seen >> (2 * n + i) & 1)) s[m][n][2 * half + i] = minus_infinity();
                }
            }
        }
    }
}

// Dot products to base-2 logits, where the softmax does not do that. What the run does not ask for costs one test for all.
template <class Lane, int M_TILES, int N_TILES>
__device__ __forceinline__ void apply_rule(float (&s)[M_TILES][N_TILES][4], const FolioAttentionParams &p,
                                           const Work &work, const Logits &logits, const Lane &lane, i32 first_key) {
    const LogitRule rule(p);
    if (rule.cap > 0.0f) {
        for_each_score(s, [&](float &x) { x = rule.capped(x * logits.scale); });
    } else {
        for_each_score(s, [&](float &x) { x *= logits.scale; });
    }
    if (!rule.alibi) return;
#pragma unroll
    for (int m = 0; m < M_TILES; m++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const u32 tile_row = lane.seldom_tile_row(m, half);
            const float slope = rule.slope(p, work.request.index, work.qo_head(tile_row));
            const i32 position = static_cast<i32>(position_of(work.request, work.token(tile_row)));
            const i32 distance = position - first_key - 2 * static_cast<i32>(lane.pair);
#pragma unroll
            for (int n = 0; n < N_TILES; n++) {
#pragma unroll
                for (int i = 0; i < 2; i++) s[m][n][2 * half + i] -= rule.bias(slope, distance - 8 * n - i);
            }
        }
    }
}

// A unit of all rows, or one for each of a thread's.
__device__ __forceinline__ float unit_of_row(float unit, int, int) { return unit; }

template <int M_TILES>
struct RowUnits {
    float units[M_TILES][2];
};

template <int M_TILES>
__device__ __forceinline__ float unit_of_row(const RowUnits<M_TILES> &rows, int m, int half) {
    return rows.units[m][half];
}

// Takes over a tile's logits, which are `unit` times what is in s and become probabilities; rescales what was accumulated
// before where the maximum of one of the warp's rows has grown.
template <int M_TILES, int N_TILES, int D_TILES, class Unit>
__device__ __forceinline__ void update(FragmentSoftmax<M_TILES, N_TILES> &softmax, float (&s)[M_TILES][N_TILES][4],
                                       float (&o)[M_TILES][D_TILES][4], Unit unit) {
    float corrections[M_TILES][2];
    bool changes = false;
#pragma unroll
    for (int m = 0; m < M_TILES; m++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            corrections[m][half] = softmax.update(s, m, half, unit_of_row(unit, m, half), MOST_GROWTH);
            changes |= corrections[m][half] != 1.0f;
        }
    }
    rescale(o, corrections, changes);
}

}  // namespace folio
