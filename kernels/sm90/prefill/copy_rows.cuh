// Rows of K and V of q's type, copied by cp.async to where a box would have put them. V of a step and K of the next are
// requested together: their buffers become free at the same time, and are needed at the same time.
#pragma once

#include "sm90/prefill/rows.cuh"

namespace folio::prefill {

template <class Format>
class RowCopier {
    // A piece is the upper or the lower half of an atom, in turn.
    static_assert(Format::row_bytes(64) == 128 && FILLING_WARPS % 2 == 1);

public:
    __device__ __forceinline__ explicit RowCopier(const RowWarp &rows) : rows(rows) {}

    __device__ __forceinline__ void fill(const Work &work) {
        int block = work.first_block;
        const int last_block = block - work.num_steps + 1;
        Places places = rows.find(work, block);
        request_keys(work, places, stage);
        cp_async_wait<0>();
        rows.hand_over(KEY_FULL, stage);
#pragma unroll 1
        while (block > last_block) {
            const Places now = places;
            places = rows.find(work, --block);
            request_values(work, now);
            Ring<STAGES> next = stage;
            next.advance();
            request_keys(work, places, next);
            cp_async_wait<1>();
            rows.hand_over(VALUE_FULL, stage);
            cp_async_wait<0>();
            rows.hand_over(KEY_FULL, next);
            stage = next;
        }
        request_values(work, places);
        cp_async_wait<0>();
        rows.hand_over(VALUE_FULL, stage);
        stage.advance();
    }

private:
    __device__ __forceinline__ void request_keys(const Work &work, const Places &places,
                                                 const Ring<STAGES> &next) const {
        rows.await_empty(KEY_EMPTY, next);
        request<DIM_QK>(rows.params.k, rows.shared + KEYS + next.index * KEY_BYTES, work, places);
    }

    __device__ __forceinline__ void request_values(const Work &work, const Places &places) const {
        rows.await_empty(VALUE_EMPTY, stage);
        request<DIM_VO>(rows.params.v, rows.shared + VALUES + stage.index * VALUE_BYTES, work, places);
    }

    template <int DIM>
    __device__ __forceinline__ void request(const FolioCache &cache, u32 tile, const Work &work,
                                            const Places &places) const {
        const Addresses addresses(cache, places, rows.params.num_pages, work.kv_head);
        // Of the warp's first piece. Swizzled: chunk c of row r of an atom, 8 rows, lies at c ^ r.
        const u32 row = rows.warp * PIECE_ROWS + rows.lane / ROW_LANES, chunk = rows.lane % ROW_LANES;
        const u32 first = tile + row * 128 + ((chunk ^ row % 8) << 4);
        rows.for_pieces([&](u32 piece) {
            const u64 source = addresses.of_piece(piece, rows.lane);
            const u32 bytes = source != 0 ? 16 : 0;
            const u32 target = (piece % 2 == 0 ? first : first ^ 64) + piece * FILLING_WARPS * PIECE_ROWS * 128;
#pragma unroll
            for (u32 block = 0; block < DIM / 64; ++block) {
                cp_async<16>(target + block * KEY_COLUMN_STRIDE,
                             reinterpret_cast<const u8 *>(source) + 16 * chunk + 128 * block, bytes);
            }
        });
        cp_async_commit();
    }

    const RowWarp rows;
    Ring<STAGES> stage;  // of V
};

}  // namespace folio::prefill
