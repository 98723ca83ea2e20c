// Records on their way from the cache to a stage, format by format: four lanes share a token, and what a lane has of it
// becomes 16-bit elements in its registers. Tokens without a page become zeros. Where tokens are is not decided here.
//
// `fetch` is given the lane's place in the first tile; `put` brings a tile to a stage, arrives at the stage's barrier, and
// then asks for the tile after it, of which it is given the place. `announce` asks the L2 for the tile after that. Who
// multiplies has to have the fence between stores and the tensor unit: here it would wait for the loads too.
//
// A tile is asked for once the one before is stored, and not as its registers become free: that was slower, as if a wait
// for an old load were one for young loads too, for which a warp has few scoreboards.
#pragma once

#include "ptx/prefetch.cuh"
#include "sm90/fp8_pairs.cuh"
#include "sm90/mla_gather/tile.cuh"

namespace folio::mla {

constexpr u32 LOADING_THREADS = 256, LANES = 4;
static_assert(LANES * KEYS == LOADING_THREADS);

// Where a token is. Its page may be one that the cache does not have, or -1 where there is no token.
struct Place {
    i32 page;
    u32 token;

    __device__ __forceinline__ bool exists(const FolioMlaHopperParams &p) const {
        return static_cast<u32>(page) < p.mla.attention.num_pages;
    }
    __device__ __forceinline__ i64 offset(const FolioCache &cache) const {
        return page * cache.stride_page + token * cache.stride_token;
    }
};

// Where a token lies in a stage. Chunk c of 16 bytes of row r of an atom is at c ^ r.
struct StageRow {
    u32 address, row;

    __device__ __forceinline__ StageRow(u32 stage, u32 token)
        : address(stage + token / GROUP * GROUP_BYTES + token % GROUP * 128), row(token % GROUP) {}

    __device__ __forceinline__ u32 chunk(u32 atom, u32 chunk) const {
        return address + atom * ATOM + ((chunk ^ row) << 4);
    }
};

// Sixteen elements of one byte as two chunks of fp16.
template <class T>
__device__ __forceinline__ void widen(const uint4 &bytes, u32 (&first)[4], u32 (&second)[4]) {
    const u32 in[4] = {bytes.x, bytes.y, bytes.z, bytes.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        u32 *const out = i < 2 ? first + 2 * i : second + 2 * (i - 2);
        widen_fp8<T>(in[i], out[0], out[1]);
    }
}

// What the formats have in common. A lane has 16 of every 64 bytes, which are chunks 2 lane and 2 lane + 1 of an atom's row.
struct InRegisters {
    // The warp's stores are done.
    static __device__ __forceinline__ void arrive(u32 barrier) {
        __syncwarp();
        if (threadIdx.x % 32 == 0) mbarrier_arrive(barrier);
    }

    static __device__ __forceinline__ uint4 read(bool exists, const u8 *from) {
        return exists ? *reinterpret_cast<const uint4 *>(from) : make_uint4(0, 0, 0, 0);
    }
};

// fp8 records.
template <class T>
struct Bytes : InRegisters {
    uint4 pieces[LATENT_ATOMS + 1];  // the last one is rotary

    // Where a lane's pieces of a token are.
    struct Source {
        const u8 *latent, *rope;
        bool exists;

        __device__ __forceinline__ Source(const FolioMlaHopperParams &p, const Place &place, u32 lane)
            : latent(static_cast<const u8 *>(p.mla.attention.k.data) + place.offset(p.mla.attention.k) + 16 * lane),
              rope(static_cast<const u8 *>(p.mla.k_rope.data) + place.offset(p.mla.k_rope) + 16 * lane),
              exists(place.exists(p)) {}

        __device__ __forceinline__ uint4 piece(int atom) const {
            return read(exists, atom < LATENT_ATOMS ? latent + 64 * atom : rope);
        }
    };

    // Lines that the token is in, to the L2.
    static __device__ __forceinline__ void announce(const FolioMlaHopperParams &p, const Place &place, u32 lane) {
        const FolioCache &k = p.mla.attention.k, &k_rope = p.mla.k_rope;
        if (!place.exists(p)) return;
        prefetch_l2(static_cast<const u8 *>(k.data) + place.offset(k) + RANK / LANES * lane);
        if (lane == 0) prefetch_l2(static_cast<const u8 *>(k_rope.data) + place.offset(k_rope));
    }

    __device__ __forceinline__ void fetch(const FolioMlaHopperParams &p, const Place &place, u32 lane) {
        const Source source(p, place, lane);
#pragma unroll
        for (int atom = 0; atom <= LATENT_ATOMS; ++atom) pieces[atom] = source.piece(atom);
    }

    __device__ __forceinline__ void put(const FolioMlaHopperParams &p, u32 stage, u32 barrier, u32 token, u32 lane,
                                        const Place &next) {
        const StageRow to(stage, token);
        const Source source(p, next, lane);
        const u32 even = to.chunk(0, 2 * lane), odd = to.chunk(0, 2 * lane + 1);
#pragma unroll
        for (int atom = 0; atom <= LATENT_ATOMS; ++atom) {
            u32 first[4], second[4];
            widen<T>(pieces[atom], first, second);
            st_shared_v4(even + atom * ATOM, first);
            st_shared_v4(odd + atom * ATOM, second);
        }
        arrive(barrier);
#pragma unroll
        for (int atom = 0; atom <= LATENT_ATOMS; ++atom) pieces[atom] = source.piece(atom);
    }
};

// Records of fp8_ds_mla: 512 latent bytes, a fp32 scale for each 128 of them, 64 rotary elements in bf16. Values become
// bf16 once they are multiplied by their scale.
struct ScaledBytes : InRegisters {
    static constexpr int BLOCKS = 4, SCALES_AT = RANK, ROPE_AT = SCALES_AT + 4 * BLOCKS;

    uint4 latent[LATENT_ATOMS], rope[2];
    uint4 scales;

    // A token's record.
    struct Source {
        const u8 *record;
        bool exists;

        __device__ __forceinline__ Source(const FolioMlaHopperParams &p, const Place &place)
            : record(static_cast<const u8 *>(p.mla.attention.k.data) + place.offset(p.mla.attention.k)),
              exists(place.exists(p)) {}

        __device__ __forceinline__ uint4 chunk(u32 byte) const { return read(exists, record + byte); }
    };

    // Lines that the token is in, to the L2.
    static __device__ __forceinline__ void announce(const FolioMlaHopperParams &p, const Place &place, u32 lane) {
        const Source source(p, place);
        if (!source.exists) return;
        prefetch_l2(source.record + RANK / LANES * lane);
        if (lane == 0) prefetch_l2(source.record + SCALES_AT);
    }

    __device__ __forceinline__ void fetch(const FolioMlaHopperParams &p, const Place &place, u32 lane) {
        const Source source(p, place);
#pragma unroll
        for (int atom = 0; atom < LATENT_ATOMS; ++atom) latent[atom] = source.chunk(64 * atom + 16 * lane);
        read_rest(source, lane);
    }

    __device__ __forceinline__ void put(const FolioMlaHopperParams &p, u32 stage, u32 barrier, u32 token, u32 lane,
                                        const Place &next) {
        const StageRow to(stage, token);
        const Source source(p, next);
        const u32 even = to.chunk(0, 2 * lane), odd = to.chunk(0, 2 * lane + 1);
        const u32 scale[BLOCKS] = {scales.x, scales.y, scales.z, scales.w};
#pragma unroll
        for (int atom = 0; atom < LATENT_ATOMS; ++atom) {
            u32 first[4], second[4];
            const float of_block = __uint_as_float(scale[atom / 2]);
            widen_scaled(latent[atom].x, latent[atom].y, of_block, first);
            widen_scaled(latent[atom].z, latent[atom].w, of_block, second);
            st_shared_v4(even + atom * ATOM, first);
            st_shared_v4(odd + atom * ATOM, second);
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const u32 chunk[4] = {rope[i].x, rope[i].y, rope[i].z, rope[i].w};
            st_shared_v4(to.chunk(LATENT_ATOMS, lane + LANES * i), chunk);
        }
        arrive(barrier);
#pragma unroll
        for (int atom = 0; atom < LATENT_ATOMS; ++atom) latent[atom] = source.chunk(64 * atom + 16 * lane);
        read_rest(source, lane);
    }

private:
    __device__ __forceinline__ void read_rest(const Source &source, u32 lane) {
        scales = source.chunk(SCALES_AT);
#pragma unroll
        for (int i = 0; i < 2; ++i) rope[i] = source.chunk(ROPE_AT + 16 * (lane + LANES * i));
    }

    // Eight bytes of a block. e4m3 is exact in fp16 and in fp32, and a product in fp32 is rounded once.
    static __device__ __forceinline__ void widen_scaled(u32 low_bytes, u32 high_bytes, float scale, u32 (&chunk)[4]) {
        widen_fp8<e4m3>(low_bytes, chunk[0], chunk[1]);
        widen_fp8<e4m3>(high_bytes, chunk[2], chunk[3]);
#pragma unroll
        for (u32 &pair : chunk) {
            const float low = f16::load(static_cast<u16>(pair)), high = f16::load(static_cast<u16>(pair >> 16));
            pair = Element::pack(low * scale, high * scale);
        }
    }
};

}  // namespace folio::mla
