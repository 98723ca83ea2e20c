// Rows of K and V in fp8, converted to fp16 on the way to shared memory; every fp8 value is one of fp16. They come to a ring
// of their own, by boxes where tensor maps describe them, else one by one, 16 bytes a lane and copy, or 8 where rows are
// aligned to no more. A lane converts 16 bytes at a time when they have landed.
//
// K and V of a step are two units, K first. Warps take units in turn, so that what a unit costs beside its rows, addresses
// and barriers, is one warp's time. As many units are under way as there is room for, also those of the next tile: that
// hides the latency of memory.
#pragma once

#include "ptx/bulk.cuh"
#include "sm90/fp8_pairs.cuh"
#include "sm90/prefill/rows.cuh"

namespace folio::prefill {

template <class Fp8>
class RowConverter {
    static_assert(CacheRows<Fp8>::row_bytes(64) == 64, "the rows of a piece are those of an atom");
    static constexpr u32 PIECE_BYTES = PIECE_ROWS * 64;

public:
    __device__ __forceinline__ RowConverter(const RowWarp &rows, const TileReader &reader)
        : rows(rows), reader(reader), position(rows.warp), requested(rows.warp), oldest(rows.warp), target(rows.warp) {}

    __device__ __forceinline__ void run() {
#pragma unroll 1
        while (true) {
            request_units();
            if (pending == 0) return;
            convert_oldest();
        }
    }

private:
    // Units of a warp that have slots of the ring at a time, which the warps use in turn. A barrier of a slot tells whether the
    // unit before was converted, if the one before that surely was. With so many units of each warp it was, since stages are
    // filled in order (docs/kernels/sm90_prefill.md).
    static constexpr u32 TOLD_APART = 2 * (RAW_STAGES - STAGES) / FILLING_WARPS;
    static constexpr u32 SLOTS_OF_WARP = (RAW_STAGES + FILLING_WARPS - 1) / FILLING_WARPS;
    static constexpr u32 MOST_PENDING = SLOTS_OF_WARP < TOLD_APART ? SLOTS_OF_WARP : TOLD_APART;
    static_assert(!CONVERTS || MOST_PENDING > 0);

    // A place of the ring of units that are not converted yet.
    struct Slot {
        u32 index, parity = 0;

        __device__ __forceinline__ explicit Slot(u32 index) : index(index) {}

        // That of the warp's next unit.
        __device__ __forceinline__ void advance() {
            static_assert(!CONVERTS || RAW_STAGES > FILLING_WARPS, "a ring is not passed at once");
            index += FILLING_WARPS;
            if (index >= RAW_STAGES) index -= RAW_STAGES, parity ^= 1;
        }
    };

    // Where a unit goes.
    struct Target {
        bool values;
        Ring<STAGES> stage;

        __device__ __forceinline__ explicit Target(u32 unit) : values(unit % 2 != 0) {
            if (unit >= 2) stage.advance();
        }

        // That of the warp's next unit.
        __device__ __forceinline__ void advance() {
            static_assert(FILLING_WARPS == 3, "a step and half of the next");
            stage.advance();
            if (values) stage.advance();
            values = !values;
        }
    };

    // Nothing is waited for while units are pending: a tile may be announced only after they are converted, and its page ids
    // come meanwhile.
    __device__ __forceinline__ void request_units() {
#pragma unroll 1
        while (pending < MOST_PENDING) {
            if (position >= units()) {
                if (!begin_tile() || pending > 0) return;
            } else {
                if (pending > 0 && !is_over(empty(requested.index), requested.parity ^ 1)) return;
                request();
            }
        }
    }

    // False where there is none, or none yet.
    __device__ __forceinline__ bool begin_tile() {
        if (ended || (pending > 0 && !reader.announced())) return false;
        position -= units();
        work = reader.next();
        ended = work.num_steps == 0;
        if (ended) return false;
        find_places();
        return true;
    }

    // Of the unit at `position`, where the tile has it.
    __device__ __forceinline__ void find_places() {
        if (position >= units()) return;
        const int block = work.first_block - static_cast<int>(position / 2);
        if (box_tokens() == 0) {
            places = rows.find(work, block);
        } else {
            rows.find_row(work, block * BLOCK + lane_box() * box_tokens(), places.page[0], places.token[0]);
        }
    }

    __device__ __forceinline__ void request() {
        mbarrier_wait(empty(requested.index), requested.parity ^ 1);
        if (position % 2 != 0) {
            bring<DIM_VO>(rows.params.v, rows.maps.v, rows.value_bytes());
        } else {
            if (rows.lane == 0) announce_end(rows.shared, work.num_steps - static_cast<int>(position / 2));
            bring<DIM_QK>(rows.params.k, rows.maps.k, rows.key_bytes());
        }
        ++pending;
        requested.advance();
        position += FILLING_WARPS;
        find_places();
    }

    __device__ __forceinline__ void convert_oldest() {
        mbarrier_wait(full(oldest.index), oldest.parity);
        if (target.values) {
            await_free(VALUE_FULL, VALUE_EMPTY);
            convert<DIM_VO>(VALUES + target.stage.index * VALUE_BYTES);
            rows.hand_over(VALUE_FULL, target.stage);
        } else {
            await_free(KEY_FULL, KEY_EMPTY);
            convert<DIM_QK>(KEYS + target.stage.index * KEY_BYTES);
            rows.hand_over(KEY_FULL, target.stage);
        }
        if (rows.lane == 0) mbarrier_arrive(empty(oldest.index));
        --pending;
        oldest.advance();
        target.advance();
    }

    // Until what the stage had before was read. Barriers tell one round of the ring from the next only, and a warp may be ahead
    // of the one that fills the stage in between: first that it is filled. That the round before is over follows from the
    // warp's unit before: its stage was free, so that all older ones had been filled.
    __device__ __forceinline__ void await_free(u32 full, u32 empty) const {
        mbarrier_wait(rows.shared + full + 8 * target.stage.index, target.stage.parity ^ 1);
        rows.await_empty(empty, target.stage);
    }

    // Of the tile.
    __device__ __forceinline__ u32 units() const { return 2 * work.num_steps; }

    __device__ __forceinline__ u32 full(u32 slot) const { return rows.shared + RAW_FULL + 8 * slot; }
    __device__ __forceinline__ u32 empty(u32 slot) const { return rows.shared + RAW_EMPTY + 8 * slot; }

    // Bytes between the blocks of 64 columns and between the pieces of a unit, which is [block][row][64 bytes], or, by boxes of
    // all columns, [8-token group][block][row][64 bytes].
    struct Strides {
        u32 block, piece;
    };
    static_assert(!CONVERTS || PIECE_ROWS == 8, "pieces are groups of a map");

    __device__ __forceinline__ Strides strides_of(u32 blocks) const {
        const bool of_rows = rows.prefill.raw_boxes_of_rows;
        return {of_rows ? PIECE_BYTES : BLOCK * 64, of_rows ? blocks * PIECE_BYTES : PIECE_BYTES};
    }

    __device__ __forceinline__ u32 raw(u32 slot) const { return rows.shared + RAW + slot * RAW_BYTES; }

    template <int DIM>
    __device__ __forceinline__ void bring(const FolioCache &cache, const TensorMap *map, u32 row_bytes) const {
        if (box_tokens() != 0) {
            load_boxes<DIM>(cache, map);
        } else {
            const Addresses addresses(cache, places, rows.params.num_pages, work.kv_head);
            if (rows.prefill.row_alignment >= 16) {
                copy_by<16, DIM>(addresses, row_bytes);
            } else {
                copy_by<8, DIM>(addresses, row_bytes);
            }
            mbarrier_arrive_by_copies(full(requested.index));
        }
    }

    // Lanes i and i + 16 load the same tokens, of even and of odd blocks of columns, or lane i alone.
    static constexpr u32 BOX_LANES = 16;
    static_assert(BLOCK / 8 <= BOX_LANES, "a lane per box of tokens");

    __device__ __forceinline__ u32 box_tokens() const { return rows.prefill.raw_box_tokens; }
    __device__ __forceinline__ u32 lane_box() const { return rows.lane % BOX_LANES; }

    // Pages that the cache does not have, and boxes past the last key, read as zeros.
    template <int DIM>
    __device__ __forceinline__ void load_boxes(const FolioCache &cache, const TensorMap *map) const {
        constexpr u32 BLOCKS = column_blocks(DIM);
        const u32 full = this->full(requested.index), first = lane_box() * box_tokens(), second = rows.lane / BOX_LANES;
        if (rows.lane == 0) mbarrier_arrive_expect(full, BLOCKS * PIECES * PIECE_BYTES);
        __syncwarp();
        const bool of_rows = rows.prefill.raw_boxes_of_rows;
        if (first >= BLOCK || (of_rows && second != 0)) return;
        const bool ragged = rows.params.plan.page_ids == nullptr;
        int place = OUTSIDE;
        if (static_cast<u32>(places.page[0]) < rows.params.num_pages) {
            const u32 groups_of_page = static_cast<u32>(cache.stride_page >> 3) / static_cast<u32>(cache.stride_token);
            place = ragged ? places.page[0] : places.page[0] * groups_of_page + places.token[0] / 8;
        }
        const Strides strides = strides_of(BLOCKS);
        const u32 target = raw(requested.index) + first / PIECE_ROWS * strides.piece;
        const u32 end = of_rows ? 1 : BLOCKS;
#pragma unroll 1
        for (u32 block = second; block < end; block += 32 / BOX_LANES) {
            const u32 to = target + block * strides.block, column = BLOCK_COLUMNS * block;
            if (ragged) {
                tma_load_3d(to, map, full, column, place, work.kv_head);
            } else {
                tma_load_5d(to, map, full, column, 0, 0, work.kv_head, place);
            }
        }
    }

    template <u32 BYTES, int DIM>
    __device__ __forceinline__ void copy_by(const Addresses &addresses, u32 row_bytes) const {
        const u32 column = 16 * (rows.lane % ROW_LANES), target = raw(requested.index) + 16 * rows.lane;
#pragma unroll
        for (u32 piece = 0; piece < PIECES; ++piece) {
            const u64 row = addresses.of_piece(piece, rows.lane);
            const u8 *source = reinterpret_cast<const u8 *>(row) + column;
#pragma unroll
            for (u32 block = 0; block < column_blocks(DIM); ++block) {
#pragma unroll
                for (u32 part = 0; part < 16; part += BYTES) {
                    const bool exists = row != 0 && column + 64 * block + part < row_bytes;
                    cp_async<BYTES>(target + block * BLOCK * 64 + PIECE_BYTES * piece + part,
                                    source + 64 * block + part, exists ? BYTES : 0);
                }
            }
        }
    }

    // Pieces that are read before the first is converted: one by one, each would wait for shared memory. There are registers for
    // five loads.
    static constexpr __device__ __forceinline__ u32 pieces_together(u32 blocks) {
        u32 together = 5 / blocks;
        while (PIECES % together != 0) --together;
        return together;
    }

    // 16 bytes become two chunks.
    template <int DIM>
    __device__ __forceinline__ void convert(u32 tile) const {
        constexpr u32 BLOCKS = column_blocks(DIM), TOGETHER = pieces_together(BLOCKS);
        // Swizzled: chunk c of row r of an atom lies at c ^ r.
        const u32 row = rows.lane / ROW_LANES, chunk = rows.lane % ROW_LANES * 2;
        const Strides strides = strides_of(BLOCKS);
        u32 raw = this->raw(oldest.index) + 16 * rows.lane,
            target = rows.shared + tile + row * 128 + ((chunk ^ row) << 4);
#pragma unroll 1
        for (u32 piece = 0; piece < PIECES; piece += TOGETHER) {
            uint4 bytes[TOGETHER][BLOCKS];
#pragma unroll
            for (u32 i = 0; i < TOGETHER * BLOCKS; ++i)
                bytes[i / BLOCKS][i % BLOCKS] =
                    ld_shared_v4(raw + i % BLOCKS * strides.block + i / BLOCKS * strides.piece);
#pragma unroll
            for (u32 i = 0; i < TOGETHER * BLOCKS; ++i) {
                const u32 of_piece = target + i / BLOCKS * ATOM_BYTES;
                store_widened(bytes[i / BLOCKS][i % BLOCKS], of_piece + i % BLOCKS * KEY_COLUMN_STRIDE);
            }
            raw += TOGETHER * strides.piece;
            target += TOGETHER * ATOM_BYTES;
        }
    }

    static __device__ __forceinline__ void store_widened(const uint4 &bytes, u32 target) {
        u32 x[4];
        widen_fp8<Fp8>(bytes.x, x[0], x[1]);
        widen_fp8<Fp8>(bytes.y, x[2], x[3]);
        st_shared_v4(target, x);
        widen_fp8<Fp8>(bytes.z, x[0], x[1]);
        widen_fp8<Fp8>(bytes.w, x[2], x[3]);
        st_shared_v4(target ^ 16, x);
    }

    const RowWarp rows;
    TileReader reader;
    // What is requested next: the unit of a tile at `position`, or one of a later tile.
    Work work = {};
    u32 position;
    Places places;
    bool ended = false;
    Slot requested;
    // What is converted next, and how many units were requested from there on.
    Slot oldest;
    Target target;
    u32 pending = 0;
};

}  // namespace folio::prefill
