// Rows of queries and keys that do not move in vectors, since they are not aligned or their halves are not whole vectors: the
// lanes of a group take pairs in turn, and the elements behind.
#pragma once
#include "ops/rope_append/rows.cuh"

namespace folio {

class LooseRows {
public:
    __device__ __forceinline__ LooseRows(const Params &p, const Rotated &of, u32 first_head)
        : p(p),
          of(of),
          lanes(1u << p.log2_lanes),
          first(threadIdx.x & (lanes - 1)),
          wanted(first_head + (threadIdx.x % WARP >> p.log2_lanes)),
          head(min(wanted, of.num_heads - 1)),
          rounding(p.append.k, of.cached ? head : 0) {}

    __device__ __forceinline__ void move(const Tokens &tokens) {
#pragma unroll 1
        for (i64 token = tokens.first; token < tokens.end; token += tokens.stride) {
            in = row_of<Source>(of.in, token, head);
            out = of.out.data && wanted == head ? row_of<Source>(of.out, token, head) : nullptr;
            cached = of.cached && wanted == head ? cached_row(slot_index(p.append, token)) : nullptr;
            // Every lane has read the row when the first of them writes.
            if (of.weight) factor = norm_factor(p, squares(), lanes, FULL_WARP);
            rotate(p.rotary_dim > 0 ? position_of(p, token) : 0);
#pragma unroll 1
            for (u32 d = p.rotary_dim + first; d < p.append.k.head_dim; d += lanes) put(d, number(d));
        }
    }

private:
    __device__ __forceinline__ Cached::Storage *cached_row(i64 slot) const {
        const FolioCache &cache = of.cached->cache;
        const i64 place = place_in_cache(p.append, cache, slot);
        return place == NOWHERE ? nullptr
                                : static_cast<Cached::Storage *>(cache.data) + place + head * cache.stride_head;
    }

    __device__ __forceinline__ float squares() const {
        float sum = 0.0f;
#pragma unroll 1
        for (u32 d = first; d < p.append.k.head_dim; d += lanes) sum += Source::load(in[d]) * Source::load(in[d]);
        return sum;
    }

    __device__ __forceinline__ void rotate(i64 position) const {
        const u32 pairs = p.rotary_dim / 2;
#pragma unroll 1
        for (u32 pair = first; pair < pairs; pair += lanes) {
            const u32 a = p.is_interleaved ? 2 * pair : pair, b = p.is_interleaved ? a + 1 : pairs + pair;
            float x = number(a), y = number(b), cos, sin;
            if (p.cos) {
                const i64 at = place_of_angles(p, position, pair);
                cos = number_of(p.cos, p.cos_sin_dtype, at), sin = number_of(p.sin, p.cos_sin_dtype, at);
            } else {
                compute_angle(p, position, pair, cos, sin);
            }
            turn(x, y, cos, sin);
            put(a, x);
            put(b, y);
        }
    }

    // fp32, or of the tokens' type.
    static __device__ __forceinline__ float number_of(const void *numbers, u32 dtype, i64 index) {
        if (dtype == FOLIO_F32) return static_cast<const float *>(numbers)[index];
        return Source::load(static_cast<const Source::Storage *>(numbers)[index]);
    }

    // Normalised.
    __device__ __forceinline__ float number(u32 d) const {
        const float x = Source::load(in[d]);
        return of.weight ? x * factor * number_of(of.weight, of.weight_dtype, d) : x;
    }

    __device__ __forceinline__ void put(u32 d, float x) const {
        if (out) out[d] = Source::store(x);
        if (cached) cached[d] = rounding.element(x);
    }

    const Params &p;
    const Rotated &of;
    const u32 lanes, first, wanted, head;
    const CacheRounding<Cached> rounding;
    const Source::Storage *in;
    Source::Storage *out;
    Cached::Storage *cached;
    float factor;
};

}  // namespace folio
