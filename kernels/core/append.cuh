// How tokens go to a paged cache: where a slot is, and the pieces in which rows move there.
#pragma once
#include "core/awaited_integer.cuh"
#include "core/cache_rounding.cuh"
#include "core/paged.cuh"

namespace folio {

// Where a token goes. A cache may have more pages than int32 can count.
struct CacheSlot {
    i64 page;
    u32 token;
};

// The slot of a token, by its number in the list.
class AwaitedSlot {
public:
    __device__ __forceinline__ void ask(const FolioAppendParams &p, i64 token) {
        slot.ask(p.slots, p.slot_bytes, token);
    }
    __device__ __forceinline__ i64 value(const FolioAppendParams &p) const { return slot.value(p.slot_bytes); }

private:
    AwaitedInteger slot;
};

__device__ __forceinline__ i64 slot_index(const FolioAppendParams &p, i64 token) {
    AwaitedSlot slot;
    slot.ask(p, token);
    return slot.value(p);
}

__device__ __forceinline__ CacheSlot place(const FolioAppendParams &p, i64 index) {
    if (index < 1ll << 31) {
        const u32 page = divide(static_cast<u32>(index), p.page_size);
        return {page, static_cast<u32>(index) - page * p.page_size.divisor};
    }
    return {index / p.page_size.divisor, static_cast<u32>(index % p.page_size.divisor)};
}

// The place of a piece of N elements within a row of heads.
template <u32 N, class Source, class Cached>
struct AppendPiece {
    typedef CacheRows<Cached> Cache;
    static_assert(Cache::SCALES == ScaleGranularity::HEAD,
                  "the caller gives the scales; nothing computes them from rows");

    u32 head, d;

    __device__ __forceinline__ AppendPiece(const FolioAppendTensor &t, u32 index) {
        head = divide(index, t.pieces);
        d = N * (index - head * t.pieces.divisor);
    }

    __device__ __forceinline__ const typename Source::Storage *source(const FolioAppendTensor &t, i64 token) const {
        return row_of<Source>(t.source, token, head) + d;
    }

    __device__ __forceinline__ Elements<N, Source> load(const FolioAppendTensor &t, i64 token) const {
        Elements<N, Source> in;
        in.load(source(t, token));
        return in;
    }

    // As they are, or as the head's rounding has them.
    __device__ __forceinline__ void store(const FolioAppendTensor &t, const CacheSlot &slot,
                                          const Elements<N, Source> &in, const CacheRounding<Cached> &rounding) const {
        rounded(in, rounding).store(Cache::row(t.cache, slot.page, slot.token, head) + d);
    }

private:
    static __device__ __forceinline__ Elements<N, Cached> rounded(const Elements<N, Source> &in,
                                                                  const CacheRounding<Cached> &rounding) {
        if constexpr (!Cached::IS_FP8) {
            return in;
        } else if constexpr (N == VECTOR) {
            float x[VECTOR];
#pragma unroll
            for (u32 i = 0; i < VECTOR; i++) x[i] = Source::load(in.x[i]);
            return rounding.vector(x);
        } else {
            Elements<N, Cached> out;
            out.x[0] = rounding.element(Source::load(in.x[0]));
            return out;
        }
    }
};

}  // namespace folio
