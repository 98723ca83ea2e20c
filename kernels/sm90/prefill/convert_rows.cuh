// Rows of K and V in fp8, converted to fp16 on the way to shared memory; every fp8 value is one of fp16.
// A lane copies 16 bytes at a time to a place of its own, and converts them a step later: nobody else reads them. Beside
// queries in two terms (split_queries.cuh) keys stay as they are.
#pragma once

#include "sm90/prefill/rows.cuh"

namespace folio::prefill {

// Four fp8 values as two pairs of fp16.
template <class Fp8>
__device__ __forceinline__ void widen(u32 bytes, u32 &low_pair, u32 &high_pair);
template <>
__device__ __forceinline__ void widen<e4m3>(u32 bytes, u32 &low_pair, u32 &high_pair) {
    asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %2;\ncvt.rn.f16x2.e4m3x2 %0, l;\ncvt.rn.f16x2.e4m3x2 %1, h;\n}"
        : "=r"(low_pair), "=r"(high_pair)
        : "r"(bytes));
}
template <>
__device__ __forceinline__ void widen<e5m2>(u32 bytes, u32 &low_pair, u32 &high_pair) {
    low_pair = spread_bytes<0, 1>(bytes);
    high_pair = spread_bytes<2, 3>(bytes);
}

template <class Fp8>
class RowConverter {
    static_assert(CacheRows<Fp8>::row_bytes(64) == 64, "the rows of a piece are those of an atom");

public:
    __device__ __forceinline__ explicit RowConverter(const RowWarp &rows) : rows(rows) {}

    __device__ __forceinline__ void fill(const Work &work) {
        const int last_block = work.first_block - work.num_steps + 1;
        int block = work.first_block;
        Places places = rows.find(work, block);
        if constexpr (SPLITS) rows.await_empty(KEY_EMPTY, stage);
        request_keys(work, places, stage);
        cp_async_commit();
        request_values(work, places);
        cp_async_commit();
#pragma unroll 1
        for (bool more = true; more; --block) {
            more = block > last_block;
            if (more) places = rows.find(work, block - 1);
            Ring<STAGES> next = stage;
            next.advance();
            if constexpr (!SPLITS) rows.await_empty(KEY_EMPTY, stage);
            cp_async_wait<1>();
            if constexpr (!SPLITS) convert<DIM_QK>(RAW_KEYS, KEYS + stage.index * KEY_BYTES);
            rows.hand_over(KEY_FULL, stage);
            if (more) {
                if constexpr (SPLITS) rows.await_empty(KEY_EMPTY, next);
                request_keys(work, places, next);
            }
            cp_async_commit();
            rows.await_empty(VALUE_EMPTY, stage);
            cp_async_wait<1>();
            convert<DIM_VO>(RAW_VALUES, VALUES + stage.index * VALUE_BYTES);
            rows.hand_over(VALUE_FULL, stage);
            if (more) request_values(work, places);
            cp_async_commit();
            stage = next;
        }
    }

private:
    // Raw bytes of a lane: [piece][64-column block][lane][16 bytes].
    template <int DIM>
    __device__ __forceinline__ u32 raw_chunk(u32 raw, u32 piece, u32 block) const {
        return rows.shared + raw + (((piece * FILLING_WARPS + rows.warp) * (DIM / 64) + block) * 32 + rows.lane) * 16;
    }

    // To the lane's own place, or, where keys stay as they are, to the tile: there chunk c of row r of an atom of 8 lies
    // at c ^ r / 2.
    __device__ __forceinline__ void request_keys(const Work &work, const Places &places,
                                                 const Ring<STAGES> &next) const {
        const u32 row = rows.lane / ROW_LANES, chunk = rows.lane % ROW_LANES;
        const u32 tile = rows.shared + KEYS + next.index * KEY_BYTES + rows.warp * 512 + row * 64 + ((chunk ^ row / 2) << 4);
        request<DIM_QK>(rows.params.k, work, places, [&](u32 piece, u32 block) {
            return SPLITS ? tile + piece * FILLING_WARPS * 512 + block * BLOCK * 64
                          : raw_chunk<DIM_QK>(RAW_KEYS, piece, block);
        });
    }

    __device__ __forceinline__ void request_values(const Work &work, const Places &places) const {
        request<DIM_VO>(rows.params.v, work, places,
                        [&](u32 piece, u32 block) { return raw_chunk<DIM_VO>(RAW_VALUES, piece, block); });
    }

    template <int DIM, class Target>
    __device__ __forceinline__ void request(const FolioCache &cache, const Work &work, const Places &places,
                                            const Target &target) const {
        const Addresses addresses(cache, places, rows.params.num_pages, work.kv_head);
        rows.for_pieces([&](u32 piece) {
            const u64 source = addresses.of_piece(piece, rows.lane);
            const u32 bytes = source != 0 ? 16 : 0;
#pragma unroll
            for (u32 block = 0; block < DIM / 64; ++block) {
                cp_async<16>(target(piece, block),
                             reinterpret_cast<const u8 *>(source) + 16 * (rows.lane % ROW_LANES) + 64 * block, bytes);
            }
        });
    }

    template <int DIM>
    __device__ __forceinline__ void convert(u32 raw, u32 tile) const {
        // 16 bytes become two chunks. Swizzled: chunk c of row r of an atom lies at c ^ r.
        const u32 row = rows.lane / ROW_LANES, chunk = rows.lane % ROW_LANES * 2;
        const u32 first = rows.shared + tile + rows.warp * 1024 + row * 128 + ((chunk ^ row) << 4);
        rows.for_pieces([&](u32 piece) {
#pragma unroll
            for (u32 block = 0; block < DIM / 64; ++block) {
                const uint4 bytes = ld_shared_v4(raw_chunk<DIM>(raw, piece, block));
                const u32 target = first + piece * FILLING_WARPS * 1024 + block * KEY_COLUMN_STRIDE;
                u32 x[4];
                widen<Fp8>(bytes.x, x[0], x[1]);
                widen<Fp8>(bytes.y, x[2], x[3]);
                st_shared_v4(target, x);
                widen<Fp8>(bytes.z, x[0], x[1]);
                widen<Fp8>(bytes.w, x[2], x[3]);
                st_shared_v4(target ^ 16, x);
            }
        });
    }

    const RowWarp rows;
    Ring<STAGES> stage;
};

}  // namespace folio::prefill
