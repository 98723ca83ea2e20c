// The transposing warps of the Hopper fp8 prefill kernel. wgmma takes values in e4m3 only with their keys contiguous,
// which no cache has: two to four warps turn [key][dimension] into [dimension][key]. Each loads its share of a block's
// keys by TMA, or row by row.
//
// The order within 16 keys becomes 0 1 8 9 | 2 3 10 11 | 4 5 12 13 | 6 7 14 15. It is what a thread's accumulators of
// Q K give as an operand without a shuffle (softmax.cuh). Of 16 dimensions the even ones come first, in rows 0 to 7,
// then the odd ones: stores meet all banks, and a thread's outputs are four neighbours (output.cuh).
#pragma once

#include "ptx/tma_store.cuh"
#include "sm90/prefill_fp8/gather.cuh"

namespace folio::prefill_fp8 {

class Transposer {
public:
    __device__ __forceinline__ Transposer(const FolioPrefillFp8Params &params, const TensorMap *v_map, u32 shared)
        : all(params), params(params.attention), v_map(v_map), shared(shared) {}

    __device__ __forceinline__ void run() {
        Ring<TILE_SLOTS> slot;
        while (true) {
            mbarrier_wait(shared + TILE_FULL + 8 * slot.index(), slot.parity());
            const Tile &tile = shared_tiles()[slot.index()];
            if constexpr (GATHERED) {
                const bool ends = tile.num_steps == 0;
                if (!ends) transpose_rows(tile);
                __syncwarp();
                if (lane() == 0) mbarrier_arrive(shared + TILE_READ + 8 * slot.index());
                slot.advance();
                if (ends) return;
                continue;
            }
            int remaining = tile.num_steps, keys = tile.kv_end - tile.first_block * BLOCK;
            __syncwarp();
            if (lane() == 0) mbarrier_arrive(shared + TILE_READ + 8 * slot.index());
            slot.advance();
            if (remaining == 0) return;
#pragma unroll 1
            for (; remaining > 0; --remaining, keys = BLOCK) step(keys);
        }
    }

private:
    // Computed where they are used: this warp has 32 registers.
    static __device__ __forceinline__ u32 lane() { return threadIdx.x % 32; }
    static __device__ __forceinline__ u32 share() { return threadIdx.x / 32 - 1; }
    __device__ __forceinline__ u32 raw_full(u32 stage) const {
        return shared + RAW_FULL + 8 * (share() * STAGES + stage);
    }

    // The blocks of a tile. The copies of one are under way while the one behind it is transposed.
    __device__ __forceinline__ void transpose_rows(const Tile &tile) {
        int remaining = tile.num_steps, keys = tile.kv_end - tile.first_block * BLOCK;
        RowCursor<TRANSPOSER_KEYS> rows(all, tile, share() * TRANSPOSER_KEYS);
        copy(rows, block, remaining == 1);
#pragma unroll 1
        for (; remaining > 0; --remaining, keys = BLOCK) {
            if (remaining > 1) {
                copy(rows, {block.count + 1}, remaining == 2);
                cp_async_wait<1>();
            } else {
                cp_async_wait<0>();
            }
            __syncwarp();
            transpose_block(keys);
        }
    }

    // This warp's keys of a block. The stage is free: this warp has transposed what was in it.
    __device__ __forceinline__ void copy(RowCursor<TRANSPOSER_KEYS> &rows, Ring<STAGES> to, bool is_last) const {
        const u32 first = kept(share()) * TRANSPOSER_KEYS;
        rows.copy(params.v, all.v, shared + RAW_VALUES + to.index() * KEY_BYTES + first * ROW, is_last);
        cp_async_commit();
    }

    // One block, of which the first `keys` exist.
    __device__ __forceinline__ void step(int keys) {
#pragma unroll 1
        while (loads_more()) load();
        mbarrier_wait(raw_full(block.index()), block.parity());
        transpose_block(keys);
    }

    // A block as loaded.
    __device__ __forceinline__ void transpose_block(int keys) {
        mbarrier_wait(shared + VALUE_EMPTY + 8 * block.index(), block.parity() ^ 1);
        const u32 lane = kept(this->lane()), stage = block.index(), key = lane % 16;
        const u32 sixteen = share() * (TRANSPOSER_KEYS / 16),
                  piece = sixteen + (STAGES_SHARE_ROWS ? stage * BLOCK / 16 : 0);
        const u32 source = shared + RAW_VALUES + stage * KEY_BYTES + (16 * sixteen + key) * ROW +
                           ((lane / 16 ^ first_piece(key)) << 4);
        const u32 target = shared + VALUES + (STAGES_SHARE_ROWS ? 0 : stage * VALUE_BYTES) + lane * VALUE_ROW +
                           ((piece ^ lane & 7) << 4);
        keys -= static_cast<int>(16 * sixteen);
#pragma unroll
        for (u32 i = 0; i < TRANSPOSER_KEYS / 16; ++i) {
#pragma unroll
            for (u32 part = 0; part < PARTS; ++part) {
                transpose(source + part * KEY_PART + 16 * i * ROW, (target ^ i << 4) + part * COLUMNS * VALUE_ROW,
                          keys - 16 * static_cast<int>(i));
            }
        }
        if constexpr (!GATHERED) fence_proxy_async();
        __syncwarp();
        if (lane == 0) mbarrier_arrive(shared + VALUE_FULL + 8 * block.index());
        block.advance();
    }

    // The block itself, and the one behind it if that is known yet: its buffer is free.
    __device__ __forceinline__ bool loads_more() const {
        if (loaded.count != block.count + 1) return loaded.count == block.count;
        const u32 at = loaded.count % PLACES, parity = loaded.count / PLACES % 2;
        return __any_sync(FULL_WARP, mbarrier_test(shared + PLACE_FULL + 8 * at, parity));
    }

    // This warp's keys of a block, the boxes of a page's tokens per lane. Boxes that read as zeros count in full.
    __device__ __forceinline__ void load() {
        const u32 at = loaded.count % PLACES, parity = loaded.count / PLACES % 2, tokens = box_tokens(params);
        const u32 full = raw_full(loaded.index()), first = share() * TRANSPOSER_KEYS;
        mbarrier_wait(shared + PLACE_FULL + 8 * at, parity);
        if (lane() == 0) mbarrier_arrive_expect(full, TRANSPOSER_KEYS * DIM);
        __syncwarp();
        if (lane() < TRANSPOSER_KEYS / tokens) {
            const u32 row = first + lane() * tokens;
            const Place &place = shared_places()[at];
#pragma unroll
            for (u32 part = 0; part < PARTS; ++part) {
                tma_load_5d(shared + RAW_VALUES + loaded.index() * KEY_BYTES + part * KEY_PART + row * ROW, v_map, full,
                            part * COLUMNS, 0, 0, place.head, place.group[row / tokens]);
            }
        }
        __syncwarp();
        if (lane() == 0) mbarrier_arrive(shared + PLACE_READ + 8 * at);
        loaded.advance();
    }

    // 16 keys in the dimensions of a part, of which the first `keys` exist: the others become zeros, because 0 x NaN would reach the
    // output.
    static __device__ __forceinline__ void transpose(u32 source, u32 target, int keys) {
        u32 x[COLUMNS / 32][4];
#pragma unroll
        for (u32 i = 0; i < COLUMNS / 32; ++i) ldmatrix_x4_trans(x[i], source ^ i << 5);
        if (keys < 16) clear(x, keys);
#pragma unroll
        for (u32 i = 0; i < COLUMNS / 32; ++i) {
            const u32 columns[4] = {__byte_perm(x[i][0], x[i][1], 0x6420), __byte_perm(x[i][0], x[i][1], 0x7531),
                                    __byte_perm(x[i][2], x[i][3], 0x6420), __byte_perm(x[i][2], x[i][3], 0x7531)};
            stmatrix_x4(target + i * 32 * VALUE_ROW, columns);
        }
    }

    // A register has two dimensions of keys 2 (lane % 4) and the next, of the second eight keys where it is odd.
    static __device__ __forceinline__ void clear(u32 (&x)[COLUMNS / 32][4], int keys) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int existing = keys - 2 * static_cast<int>(lane() % 4) - 8 * (i % 2);
            const u32 kept = existing <= 0 ? 0 : existing == 1 ? 0xffff : 0xffffffff;
#pragma unroll
            for (u32 j = 0; j < COLUMNS / 32; ++j) x[j][i] &= kept;
        }
    }

    const FolioPrefillFp8Params &all;
    const FolioAttentionParams &params;
    const TensorMap *v_map;
    u32 shared;
    Ring<STAGES> block, loaded;
};

}  // namespace folio::prefill_fp8
