// How the ring is filled. Three loaders: boxes of tensor maps (16-bit records in pages of whole groups of 8 tokens),
// rows gathered by cp.async (16-bit records in any pages), and whole records by bulk copies (fp8, in any pages). Tokens
// beyond the unit's keys, and those in pages that the cache does not have, become zeros, but for the tokens that share
// a box with keys. No arithmetic on records.
#pragma once

#include "ptx/bulk.cuh"
#include "sm90/mla_few/work.cuh"

namespace folio::mla_few {

template <class Format>
struct Ring {
    u32 slots, full, empty;  // shared addresses: slots, and two barriers for each

    __device__ __forceinline__ u32 slot(u32 n) const { return slots + n * Format::SLOT_BYTES; }
    __device__ __forceinline__ u32 full_barrier(u32 n) const { return full + 8 * n; }
    __device__ __forceinline__ u32 empty_barrier(u32 n) const { return empty + 8 * n; }

    __device__ __forceinline__ void wait_full(const Cursor<Format> &at) const {
        mbarrier_wait(full_barrier(at.slot), at.parity);
    }
    __device__ __forceinline__ void wait_empty(const Cursor<Format> &at) const {
        mbarrier_wait(empty_barrier(at.slot), at.parity ^ 1);
    }
};

__device__ __forceinline__ u64 policy(const FolioMlaFewParams &params) {
    return params.kv_evict_first ? EVICT_FIRST : EVICT_NORMAL;
}

// One warp. Page ids are fetched by all lanes, 32 boxes at a time and one fetch ahead, so that no box waits for an id;
// one lane issues.
template <class Format>
class BoxLoader {
public:
    static constexpr int WARPS = 1, ARRIVALS = 1;
    static constexpr bool ZERO_FILLS = false;

    __device__ __forceinline__ BoxLoader(const FolioMlaFewParams &params, const Ring<Format> &ring,
                                         const TensorMap *latent, const TensorMap *rope, u32, u32 lane)
        : params(params), ring(ring), latent(latent), rope(rope), lane(lane) {}

    // By one thread, before there is anything to load.
    static __device__ __forceinline__ void prepare(const TensorMap *latent, const TensorMap *rope) {
        tensor_map_prefetch(latent);
        tensor_map_prefetch(rope);
    }

    __device__ __forceinline__ void load(const Unit &unit, Cursor<Format> &cursor) const {
        const Span<Format> span(params, unit);
        Box current = inside(fetch(unit, span, 0)), next = fetch(unit, span, 32);
#pragma unroll 1
        for (u32 i = 0; i < span.slots; ++i) {
            const u32 first = (i << params.boxes_log2) & 31;
            if (first == 0 && i != 0) {
                current = inside(next);
                next = fetch(unit, span, (i << params.boxes_log2) + 32);
            }
            ring.wait_empty(cursor);
            const u32 barrier = ring.full_barrier(cursor.slot);
            u32 target = ring.slot(cursor.slot);
            if (lane == 0) mbarrier_arrive_expect(barrier, Format::SLOT_BYTES);
#pragma unroll 1
            for (u32 b = 0; b < 1u << params.boxes_log2; ++b) {
                const int page = __shfl_sync(FULL_WARP, current.page, first + b);
                const int group = __shfl_sync(FULL_WARP, current.group, first + b);
                if (elect_lane()) {
                    tma_load_4d(target, latent, barrier, 0, 0, 0, page * static_cast<int>(params.page_step) + group,
                                policy(params));
                    if (!params.one_record) {
                        tma_load_4d(target + Format::GROUP_BYTES - Format::ATOM_BYTES, rope, barrier, 0, 0, 0,
                                    page * static_cast<int>(params.rope_page_step) + group, policy(params));
                    }
                }
                target += Format::SLOT_BYTES >> params.boxes_log2;
            }
            cursor.advance(1);
        }
    }

private:
    struct Box {
        int page, group;  // page id, or -1: a box outside the tensor, which arrives as zeros; group of 8 tokens
    };

    // Box `n` + lane of the unit.
    __device__ __forceinline__ Box fetch(const Unit &unit, const Span<Format> &span, u32 n) const {
        const int tokens = Format::SLOT_TOKENS >> params.boxes_log2;
        const i32 token = span.first + static_cast<i32>(n + lane) * tokens;
        if (token >= span.end || token + tokens <= span.begin) return {-1, 0};
        const KeySlot slot = PageTable(params.mla.attention, unit.work, params.mla.page_size)[token];
        return {slot.page, static_cast<int>(slot.token / 8)};
    }

    // A page id that the cache does not have counts as a box outside the tensor. Asked when the id is used, not when it
    // is fetched: nothing is to wait for it then.
    __device__ __forceinline__ Box inside(Box box) const {
        return static_cast<u32>(box.page) < params.mla.attention.num_pages ? box : Box{-1, 0};
    }

    const FolioMlaFewParams &params;
    const Ring<Format> &ring;
    const TensorMap *latent, *rope;
    u32 lane;
};

// Slots are dealt to four warps. Lane t knows where token t of the warp's next slot is.
class SlotTokens {
public:
    static constexpr int WARPS = 4;

    __device__ __forceinline__ SlotTokens(const FolioMlaFewParams &params, const Unit &unit)
        : params(params), unit(unit), next{-1, 0} {}

    // Of the token that the last fetch was for; a page that the cache does not have is none.
    __device__ __forceinline__ KeySlot fetched() const {
        return static_cast<u32>(next.page) < params.mla.attention.num_pages ? next : KeySlot{-1, 0};
    }

    __device__ __forceinline__ void fetch(i32 token, i32 begin, i32 end) {
        const bool wanted = token >= begin && token < end;
        next = wanted ? PageTable(params.mla.attention, unit.work, params.mla.page_size)[token] : KeySlot{-1, 0};
    }

private:
    const FolioMlaFewParams &params;
    const Unit &unit;
    KeySlot next;
};

// What a warp says of a slot that another fills: that it is no longer waiting for it. So all warps wait for every slot, in
// order, and none is ever two rounds behind a barrier, whose phases it could not tell apart.
template <class Format>
__device__ __forceinline__ void pass(const Ring<Format> &ring, const Cursor<Format> &cursor, u32 lane) {
    if (lane == 0) mbarrier_arrive(ring.full_barrier(cursor.slot));
}

__device__ __forceinline__ i64 record_offset(const FolioCache &cache, const KeySlot &place) {
    return static_cast<i64>(place.page) * cache.stride_page + static_cast<i64>(place.token) * cache.stride_token;
}

template <class Format>
class GatherLoader {
public:
    // Every lane of the warp that copies, and the other warps.
    static constexpr int WARPS = SlotTokens::WARPS, ARRIVALS = 32 + WARPS - 1;
    static constexpr bool ZERO_FILLS = true;

    __device__ __forceinline__ GatherLoader(const FolioMlaFewParams &params, const Ring<Format> &ring,
                                            const TensorMap *, const TensorMap *, u32 warp, u32 lane)
        : params(params), ring(ring), warp(warp), lane(lane) {}

    static __device__ __forceinline__ void prepare(const TensorMap *, const TensorMap *) {}

    __device__ __forceinline__ void load(const Unit &unit, Cursor<Format> &cursor) const {
        const Span<Format> span(params, unit);
        SlotTokens tokens(params, unit);
        const auto fetch = [&](u32 slot) {
            const i32 end = lane < Format::SLOT_TOKENS ? span.end : 0;
            tokens.fetch(span.first + static_cast<i32>(slot * Format::SLOT_TOKENS + lane), span.begin, end);
        };
        fetch(warp);
#pragma unroll 1
        for (u32 i = 0; i < span.slots; ++i, cursor.advance(1)) {
            ring.wait_empty(cursor);
            if (i % WARPS != warp) {
                pass(ring, cursor, lane);
                continue;
            }
            const KeySlot place = tokens.fetched();
            fetch(i + WARPS);
            copy(ring.slot(cursor.slot), place);
            mbarrier_arrive_by_copies(ring.full_barrier(cursor.slot));
        }
    }

private:
    // All lanes have a half of a token's latent part, or four tokens' rotary parts.
    __device__ __forceinline__ void copy(u32 slot, const KeySlot &place) const {
        constexpr u32 LATENT_CHUNKS = Format::LATENT_BYTES / 16,
                      ROPE_CHUNKS = Format::RECORD_BYTES / 16 - LATENT_CHUNKS;
        constexpr u32 TOGETHER = 32 / ROPE_CHUNKS;
        static_assert(LATENT_CHUNKS % 32 == 0 && 32 % ROPE_CHUNKS == 0 && Format::SLOT_TOKENS % TOGETHER == 0);
        const u64 latent = address(params.mla.attention.k, place), rope = address(params.mla.k_rope, place);
#pragma unroll 4
        for (u32 token = 0; token < Format::SLOT_TOKENS; ++token) {
            const u64 source = __shfl_sync(FULL_WARP, latent, token);
#pragma unroll
            for (u32 first = 0; first < LATENT_CHUNKS; first += 32) {
                copy_chunk(slot + Format::chunk(token, first + lane), source, first + lane);
            }
        }
        const u32 token = lane / ROPE_CHUNKS, chunk = lane % ROPE_CHUNKS;
#pragma unroll
        for (u32 first = 0; first < Format::SLOT_TOKENS; first += TOGETHER) {
            const u64 source = __shfl_sync(FULL_WARP, rope, first + token);
            copy_chunk(slot + Format::chunk(first + token, LATENT_CHUNKS + chunk), source, chunk);
        }
    }

    // Null where the cache does not have it.
    static __device__ __forceinline__ u64 address(const FolioCache &cache, const KeySlot &place) {
        return place.page < 0 ? 0 : reinterpret_cast<u64>(cache.data) + 2 * record_offset(cache, place);
    }

    // Chunk `chunk` of what is at `source`, or zeros.
    static __device__ __forceinline__ void copy_chunk(u32 target, u64 source, u32 chunk) {
        cp_async<16>(target, reinterpret_cast<const u8 *>(source) + 16 * chunk, source ? 16 : 0);
    }

    const FolioMlaFewParams &params;
    const Ring<Format> &ring;
    u32 warp, lane;
};

// A lane copies a record; of fp8_ds_mla as many as are neighbours in the cache.
template <class Format>
class RecordLoader {
public:
    static constexpr int WARPS = SlotTokens::WARPS, ARRIVALS = WARPS;
    static constexpr bool ZERO_FILLS = true;

    __device__ __forceinline__ RecordLoader(const FolioMlaFewParams &params, const Ring<Format> &ring,
                                            const TensorMap *, const TensorMap *, u32 warp, u32 lane)
        : params(params), ring(ring), warp(warp), lane(lane) {}

    static __device__ __forceinline__ void prepare(const TensorMap *, const TensorMap *) {}

    __device__ __forceinline__ void load(const Unit &unit, Cursor<Format> &cursor) const {
        static_assert(Format::SLOT_TOKENS == 32, "a lane per record");
        const Span<Format> span(params, unit);
        SlotTokens tokens(params, unit);
        const auto fetch = [&](u32 slot) {
            tokens.fetch(span.first + static_cast<i32>(slot * 32 + lane), span.begin, span.end);
        };
        fetch(warp);
#pragma unroll 1
        for (u32 i = 0; i < span.slots; ++i, cursor.advance(1)) {
            ring.wait_empty(cursor);
            if (i % WARPS != warp) {
                pass(ring, cursor, lane);
                continue;
            }
            const KeySlot place = tokens.fetched();
            fetch(i + WARPS);
            copy(ring.slot(cursor.slot) + lane * Format::PITCH, ring.full_barrier(cursor.slot), place);
        }
    }

private:
    __device__ __forceinline__ void copy(u32 target, u32 barrier, const KeySlot &place) const {
        const bool there = place.page >= 0;
        const u32 exist = __ballot_sync(FULL_WARP, there), records = __popc(exist);
        if (!there) clear(target);
        __syncwarp();
        if (lane == 0) mbarrier_arrive_expect(barrier, records * Format::RECORD_BYTES);
        __syncwarp();
        const FolioCache &cache = params.mla.attention.k;
        const u8 *record = static_cast<const u8 *>(cache.data) + record_offset(cache, place);
        if constexpr (Format::SCALED) {
            const u32 run = run_records(params), first = lane & ~(run - 1);
            const u32 of_run = (0xffffffffu >> (32 - run)) << first;
            const bool whole = (exist & of_run) == of_run;
            if (!there || (whole && lane != first)) return;
            bulk_load(target, record, (whole ? run : 1) * Format::RECORD_BYTES, barrier, policy(params));
        } else {
            if (!there) return;
            if (params.one_record) {
                bulk_load(target, record, Format::RECORD_BYTES, barrier, policy(params));
                return;
            }
            const FolioCache &ropes = params.mla.k_rope;
            const u8 *rope = static_cast<const u8 *>(ropes.data) + record_offset(ropes, place);
            bulk_load(target, record, Format::LATENT_BYTES, barrier, policy(params));
            bulk_load(target + Format::LATENT_BYTES, rope, Format::RECORD_BYTES - Format::LATENT_BYTES, barrier,
                      policy(params));
        }
    }

    // Records of a page that are neighbours in memory too, as far as a slot goes: a power of two.
    static __device__ __forceinline__ u32 run_records(const FolioMlaFewParams &params) {
        const u32 page = params.mla.page_size.divisor;
        const bool neighbours = params.mla.attention.k.stride_token == Format::RECORD_BYTES;
        return neighbours ? min(page & (0 - page), static_cast<u32>(Format::SLOT_TOKENS)) : 1;
    }

    static __device__ __forceinline__ void clear(u32 target) {
        const u32 zeros[4] = {0, 0, 0, 0};
#pragma unroll 1
        for (u32 byte = 0; byte < Format::RECORD_BYTES; byte += 16) st_shared_v4(target + byte, zeros);
        // The next round's copy of this record comes after it.
        fence_proxy_async();
    }

    const FolioMlaFewParams &params;
    const Ring<Format> &ring;
    u32 warp, lane;
};

}  // namespace folio::mla_few
