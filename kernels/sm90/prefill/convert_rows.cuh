// Rows of K and V in fp8, converted to fp16 on the way to shared memory; every fp8 value is one of fp16. A lane copies 16
// bytes at a time to a place of its own, or 8 where rows are aligned to no more, and converts them a step later: nobody else
// reads them.
#pragma once

#include "sm90/fp8_pairs.cuh"
#include "sm90/prefill/rows.cuh"

namespace folio::prefill {

template <class Fp8>
class RowConverter {
    static_assert(CacheRows<Fp8>::row_bytes(64) == 64, "the rows of a piece are those of an atom");

public:
    __device__ __forceinline__ explicit RowConverter(const RowWarp &rows) : rows(rows) {}

    // K and V of the next step are under way while those of this one are converted, and page ids of the step after it.
    __device__ __forceinline__ void fill(const Work &work) {
        const int last_block = work.first_block - work.num_steps + 1;
        int block = work.first_block;
        Places next = rows.find(work, block);
        request(work, block, next);
        if (block > last_block) next = rows.find(work, block - 1);
#pragma unroll 1
        for (; block >= last_block; --block) {
            cp_async_wait<0>();
            if (block > last_block) request(work, block - 1, next);
            if (block > last_block + 1) next = rows.find(work, block - 2);
            rows.await_empty(KEY_EMPTY, stage);
            convert<DIM_QK>(raw(RAW_KEYS, RAW_KEY_BYTES, block), KEYS + stage.index * KEY_BYTES);
            rows.hand_over(KEY_FULL, stage);
            rows.await_empty(VALUE_EMPTY, stage);
            convert<DIM_VO>(raw(RAW_VALUES, RAW_VALUE_BYTES, block), VALUES + stage.index * VALUE_BYTES);
            rows.hand_over(VALUE_FULL, stage);
            stage.advance();
        }
    }

private:
    static __device__ __forceinline__ u32 raw(u32 first, u32 bytes, int block) {
        return first + block % RAW_STAGES * bytes;
    }

    // Raw bytes of a lane: [piece][64-column block][lane][16 bytes].
    template <int DIM>
    __device__ __forceinline__ u32 raw_chunk(u32 raw, u32 piece, u32 block) const {
        return rows.shared + raw + (((piece * FILLING_WARPS + rows.warp) * (DIM / 64) + block) * 32 + rows.lane) * 16;
    }

    __device__ __forceinline__ void request(const Work &work, int block, const Places &places) const {
        copy<DIM_QK>(rows.params.k, rows.key_bytes(), raw(RAW_KEYS, RAW_KEY_BYTES, block), work, places);
        copy<DIM_VO>(rows.params.v, rows.value_bytes(), raw(RAW_VALUES, RAW_VALUE_BYTES, block), work, places);
        cp_async_commit();
    }

    template <int DIM>
    __device__ __forceinline__ void copy(const FolioCache &cache, u32 row_bytes, u32 raw, const Work &work,
                                         const Places &places) const {
        const Addresses addresses(cache, places, rows.params.num_pages, work.kv_head);
        rows.for_pieces([&](u32 piece) {
            const u64 source = addresses.of_piece(piece, rows.lane);
            const u32 end = source != 0 ? row_bytes : 0;
#pragma unroll
            for (u32 columns = 0; columns < DIM / 64; ++columns) {
                const u32 offset = 16 * (rows.lane % ROW_LANES) + 64 * columns;
                const u8 *bytes = reinterpret_cast<const u8 *>(source) + offset;
                const u32 target = raw_chunk<DIM>(raw, piece, columns);
                if (rows.prefill.row_alignment >= 16) {
                    cp_async<16>(target, bytes, offset < end ? 16 : 0);
                } else {
                    cp_async<8>(target, bytes, offset < end ? 8 : 0);
                    cp_async<8>(target + 8, bytes + 8, offset + 8 < end ? 8 : 0);
                }
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
                widen_fp8<Fp8>(bytes.x, x[0], x[1]);
                widen_fp8<Fp8>(bytes.y, x[2], x[3]);
                st_shared_v4(target, x);
                widen_fp8<Fp8>(bytes.z, x[0], x[1]);
                widen_fp8<Fp8>(bytes.w, x[2], x[3]);
                st_shared_v4(target ^ 16, x);
            }
        });
    }

    const RowWarp rows;
    Ring<STAGES> stage;
};

}  // namespace folio::prefill
