// Rows of K and V of q's type, copied by cp.async to where a box would have put them. Copies say themselves that they
// have landed, so that every stage may be under way at once.
#pragma once

#include "ptx/bulk.cuh"
#include "sm90/prefill/rows.cuh"

namespace folio::prefill {

template <class Format>
class RowCopier {
    // A piece is the upper or the lower half of an atom, in turn.
    static_assert(Format::row_bytes(64) == 128 && FILLING_WARPS % 2 == 1);

public:
    __device__ __forceinline__ RowCopier(const RowWarp &rows, const TileReader &reader) : rows(rows), reader(reader) {}

    __device__ __forceinline__ void run() {
        while (true) {
            const Work work = reader.next();
            if (work.num_steps == 0) return;
            fill(work);
        }
    }

private:
    __device__ __forceinline__ void fill(const Work &work) {
        const int last_block = work.first_block - work.num_steps + 1;
        int block = work.first_block;
        Places next = rows.find(work, block);
#pragma unroll 1
        for (bool more = true; more; --block) {
            more = block > last_block;
            const Places places = next;
            if (more) next = rows.find(work, block - 1);
            if (rows.warp == 0 && rows.lane == 0) announce_end(rows.shared, block - last_block + 1);
            rows.await_empty(KEY_EMPTY, stage);
            copy<DIM_QK>(rows.params.k, rows.key_bytes(), rows.shared + KEYS + stage.index * KEY_BYTES, work, places);
            mbarrier_arrive_by_copies(rows.shared + KEY_FULL + 8 * stage.index);
            rows.await_empty(VALUE_EMPTY, stage);
            copy<DIM_VO>(rows.params.v, rows.value_bytes(), rows.shared + VALUES + stage.index * VALUE_BYTES, work,
                         places);
            mbarrier_arrive_by_copies(rows.shared + VALUE_FULL + 8 * stage.index);
            stage.advance();
        }
    }

    template <int DIM>
    __device__ __forceinline__ void copy(const FolioCache &cache, u32 row_bytes, u32 tile, const Work &work,
                                         const Places &places) const {
        const Addresses addresses(cache, places, rows.params.num_pages, work.kv_head);
        // Of the warp's first piece. Swizzled: chunk c of row r of an atom, 8 rows, lies at c ^ r.
        const u32 row = rows.warp * PIECE_ROWS + rows.lane / ROW_LANES, chunk = rows.lane % ROW_LANES;
        const u32 first = tile + row * 128 + ((chunk ^ row % 8) << 4);
        rows.for_pieces([&](u32 piece) {
            const u64 source = addresses.of_piece(piece, rows.lane);
            // Rows of one block are whole: the table has this kernel for no others, since registers do not suffice to compare.
            const u32 end = source != 0 ? row_bytes : 0;
            const u32 target = (piece % 2 == 0 ? first : first ^ 64) + piece * FILLING_WARPS * PIECE_ROWS * 128;
#pragma unroll
            for (u32 block = 0; block < column_blocks(DIM); ++block) {
                const u32 offset = 16 * chunk + 128 * block;
                // The last block may have columns that nobody multiplies.
                if (DIM % 64 != 0 && offset >= 2 * DIM) continue;
                cp_async<16>(target + block * KEY_COLUMN_STRIDE, reinterpret_cast<const u8 *>(source) + offset,
                             (DIM > 64 ? offset < end : source != 0) ? 16 : 0);
            }
        });
    }

    const RowWarp rows;
    TileReader reader;
    Ring<STAGES> stage;
};

}  // namespace folio::prefill
