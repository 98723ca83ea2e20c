// How latent records lie in shared memory, format by format, and the rings of them: sizes and addresses only.
//
// A record is what one token has in the cache: 512 latent elements, which are key and value, and 64 rotary ones. A ring
// is of slots, which a loader fills and a consumer frees; a tile is up to 64 tokens in one or more slots, and the
// consumer of a tile is a warpgroup.
#pragma once

#include "core/dtype.cuh"

namespace folio::mla_few {

constexpr int LATENT = 512, ROPE = 64, ROWS = 16, TILE_TOKENS = 64;
// Warpgroups that multiply, a tile each at a time.
constexpr int CONSUMERS = 2;
// Of latent elements that share a scale in fp8_ds_mla; output dims are taken in such blocks too.
constexpr int BLOCK = 128, BLOCKS = LATENT / BLOCK;

// 16-bit records, in the layout that wgmma reads as keys and, transposed, as values:
// [8 tokens][atom of 64 elements][token][128 bytes], swizzled by 128 bytes. A box of a tensor map fills whole groups of
// 8 tokens. A tile lies in neighbouring slots, so that one descriptor covers it.
template <class T>
struct Halves {
    using Math = T;
    static constexpr bool FP8 = false, SCALED = false;
    static constexpr int ATOMS = 9, ATOM_BYTES = 1024, GROUP_BYTES = ATOMS * ATOM_BYTES;
    static constexpr int RECORD_BYTES = 1152, LATENT_BYTES = 1024;
    static constexpr int SLOT_TOKENS = 16, SLOT_BYTES = 2 * GROUP_BYTES, SLOTS = 11;
    // Most slots of a tile. Fewer would keep more loads in flight, and take more clocks for a token's scores.
    static constexpr int TILE_SLOTS = 4;
    static constexpr bool WRAPS = false;

    // Offset of 16-byte chunk `chunk` of the record of token `token` of the slot.
    static __device__ __forceinline__ u32 chunk(u32 token, u32 chunk) {
        return token / 8 * GROUP_BYTES + chunk / 8 * ATOM_BYTES + token % 8 * 128 + ((chunk % 8 ^ token % 8) << 4);
    }
};

// fp8 records, one after the other. The pitch is an odd number of 16-byte chunks: eight records begin in eight different
// bank groups, and ldmatrix has no conflicts. Those of fp8_ds_mla are so many by themselves, and lie as in the cache.
template <class T, bool SCALED_>
struct Bytes {
    using Element = T;
    using Math = f16;
    static constexpr bool FP8 = true, SCALED = SCALED_;
    static constexpr int LATENT_BYTES = LATENT;
    // fp8_ds_mla: a fp32 scale for each block, then the rotary part in bf16.
    static constexpr int SCALES = LATENT, ROPE_BEGIN = SCALED ? LATENT + 4 * BLOCKS : LATENT;
    static constexpr int RECORD_BYTES = ROPE_BEGIN + (SCALED ? 2 : 1) * ROPE;
    static constexpr int PITCH = RECORD_BYTES % 32 == 16 ? RECORD_BYTES : RECORD_BYTES + 16;
    static constexpr int SLOT_TOKENS = 32, SLOT_BYTES = SLOT_TOKENS * PITCH, SLOTS = SCALED ? 9 : 10;
    static constexpr int TILE_SLOTS = 2;
    static constexpr bool WRAPS = true;
};

// Shared memory: queries (and at the end of a unit its output), ring, weights, statistics, barriers.
template <class Format>
struct Memory {
    static_assert(Format::TILE_SLOTS * Format::SLOT_TOKENS <= TILE_TOKENS);
    // [atom of 64 elements][row][128 bytes], swizzled by 128 bytes.
    static constexpr int QUERY_ATOM_BYTES = ROWS * 128, QUERY_BYTES = 9 * QUERY_ATOM_BYTES;
    static constexpr int RING = QUERY_BYTES, RING_BYTES = Format::SLOTS * Format::SLOT_BYTES;
    // A tile's weights, in core matrices of 8 rows x 8 tokens: [8 tokens][8 rows][row][token]. Where a value is scaled
    // its weight is, once for each block.
    static constexpr int WEIGHT_BYTES = TILE_TOKENS * ROWS * 2, WEIGHT_COPIES = Format::SCALED ? BLOCKS : 1;
    static constexpr int WEIGHTS = RING + RING_BYTES, WEIGHTS_BYTES = CONSUMERS * WEIGHT_COPIES * WEIGHT_BYTES;
    static constexpr int STATISTICS = WEIGHTS + WEIGHTS_BYTES;
};

// A place in the ring, and how often the ring was gone round, modulo 2.
template <class Format>
struct Cursor {
    u32 slot = 0, parity = 0;

    __device__ __forceinline__ void advance(u32 slots) {
        slot += slots;
        if (slot >= Format::SLOTS) {
            slot -= Format::SLOTS;
            parity ^= 1;
        }
    }
};

}  // namespace folio::mla_few
