// The up-projection on Hopper: keys and values of every head from latent rows that all heads share, in one launch. It is
// a matrix product that the matrix units bound. Products whose heads have rows of their own are in projection.cu.
//
// Two warpgroups multiply 64 tokens by all columns of a tile each. Columns come in chunks of 64, which belong to one head
// each, so FOLIO_KV_TILE columns of any heads are a tile. FOLIO_Q_TILE tokens are those of a CTA, or of a cluster of two that
// has the same columns: each CTA loads half of the chunks and sends them to both. Smaller tiles are for so few tokens that
// large ones would leave multiprocessors without any.
//
// The second warpgroup starts some steps after the first. From then on one multiplies while the other stores.
#include "core/dtype.cuh"
#include "params/up_projection.h"
#include "ptx/bulk.cuh"
#include "ptx/cluster.cuh"
#include "ptx/tma_store.cuh"
#include "ptx/wgmma_products.cuh"

namespace folio::up_projection {

typedef FOLIO_Q Element;

constexpr u32 WARPGROUP = 128, CONSUMERS = 2;
constexpr u32 ROWS = 64, TOKENS = CONSUMERS * ROWS;
// Of 64 columns each.
constexpr u32 CHUNK = 64, COLUMNS = FOLIO_KV_TILE, CHUNKS = COLUMNS / CHUNK;
constexpr u32 CLUSTER = FOLIO_Q_TILE / TOKENS;
// A step along the depth, 128 bytes: a row of the swizzle atom. STEPS of the matrix unit.
constexpr u32 DEPTH = 64, STEPS = DEPTH / 16, ROW_BYTES = 128, ATOM_BYTES = 1024;

constexpr u32 X_BYTES = TOKENS * ROW_BYTES, CHUNK_BYTES = CHUNK * ROW_BYTES;
constexpr u32 STAGE_BYTES = X_BYTES + CHUNKS * CHUNK_BYTES;
// A warpgroup stores a chunk while it writes the next one.
constexpr u32 CHUNK_OUT_BYTES = ROWS * ROW_BYTES, OUT_BUFFERS = CHUNKS > 1 ? 2 : 1;
constexpr u32 OUT_BYTES = CONSUMERS * OUT_BUFFERS * CHUNK_OUT_BYTES, BARRIER_BYTES = 1024;
constexpr u32 STAGES = (FOLIO_SHARED_BYTES - OUT_BYTES - BARRIER_BYTES) / STAGE_BYTES;
constexpr u32 OUT = STAGES * STAGE_BYTES, FULL = OUT + OUT_BYTES, EMPTY = FULL + 8 * STAGES;
static_assert(STAGES >= 2 && STAGES <= 32, "ring");

// Token blocks that are taken together before the next columns: their rows stay in L2.
constexpr u32 TOKEN_BLOCKS = 16;
// Steps of the first warpgroup before the second one's first. CTAs that have one tile or two gain nothing by them.
constexpr bool STAGGERED = CHUNKS == 4;
constexpr u32 HEAD_START = 2, STARTER = (HEAD_START - 1) * DEPTH, STARTED = 3;

__device__ __forceinline__ u32 rank() { return CLUSTER > 1 ? cluster_rank() : 0; }

// All threads of the cluster.
__device__ __forceinline__ void synchronize_cluster() {
    if constexpr (CLUSTER > 1) {
        cluster_sync();
    } else {
        __syncthreads();
    }
}

struct Maps {
    const TensorMap *x, *w_uk, *w_uv, *k_nope, *v;

    __device__ __forceinline__ const TensorMap *weight(u32 part) const { return part == 0 ? w_uk : w_uv; }
    __device__ __forceinline__ const TensorMap *out(u32 part) const { return part == 0 ? k_nope : v; }
};

// The first of the chunks of a tile, all of the keys or all of the values.
struct Tile {
    u32 token, chunk, part;
};

__device__ __forceinline__ const FolioUpProjectionPart &part_of(const FolioUpProjectionParams &p, u32 part) {
    return part == 0 ? p.keys : p.values;
}

__device__ __forceinline__ u32 chunks_of_head(const FolioUpProjectionPart &part) {
    return (part.columns + CHUNK - 1) / CHUNK;
}

// The index of a CTA's tile of all: its cluster's, which the cluster shares.
__device__ __forceinline__ u32 tile_of_cta(u32 nth) { return blockIdx.x / CLUSTER + nth * (gridDim.x / CLUSTER); }

// Tiles of a cluster, in token blocks of all its CTAs. Those of a group of token blocks follow one another, the token
// block fastest.
struct Tiles {
    u32 token_blocks, key_blocks, column_blocks;

    __device__ __forceinline__ Tiles(const FolioUpProjectionParams &p)
        : token_blocks((existing_tokens(p) + CLUSTER * TOKENS - 1) / (CLUSTER * TOKENS)),
          key_blocks(blocks(p, p.keys)),
          column_blocks(key_blocks + blocks(p, p.values)) {}

    // Rows past the last token that exists are not looked at.
    static __device__ __forceinline__ u32 existing_tokens(const FolioUpProjectionParams &p) {
        return p.existing_tokens ? min(static_cast<u32>(max(*p.existing_tokens, 0)), p.num_tokens) : p.num_tokens;
    }

    static __device__ __forceinline__ u32 blocks(const FolioUpProjectionParams &p, const FolioUpProjectionPart &part) {
        return (p.num_heads * chunks_of_head(part) + CHUNKS - 1) / CHUNKS;
    }

    // How many a CTA has.
    __device__ __forceinline__ u32 of_cta() const {
        const u32 count = token_blocks * column_blocks, first = tile_of_cta(0), clusters = gridDim.x / CLUSTER;
        return first < count ? (count - 1 - first) / clusters + 1 : 0;
    }

    __device__ __forceinline__ Tile at(u32 index) const {
        const u32 first = index / (TOKEN_BLOCKS * column_blocks) * TOKEN_BLOCKS;
        const u32 together = min(TOKEN_BLOCKS, token_blocks - first), rest = index - first * column_blocks;
        const u32 block = rest / together, part = block >= key_blocks;
        return {((first + rest % together) * CLUSTER + rank()) * TOKENS, (block - (part ? key_blocks : 0)) * CHUNKS,
                part};
    }
};

struct Ring {
    u32 stage = 0, parity = 0;

    __device__ __forceinline__ void advance() {
        if (++stage == STAGES) {
            stage = 0;
            parity ^= 1;
        }
    }
};

// To all CTAs of the cluster.
__device__ __forceinline__ void load_weight(u32 target, const TensorMap *map, u32 full, int c0, int c1, int c2) {
    if constexpr (CLUSTER > 1) {
        tma_multicast_3d(target, map, full, c0, c1, c2, (1 << CLUSTER) - 1);
    } else {
        tma_load_3d(target, map, full, c0, c1, c2);
    }
}

// One thread: x of the CTA, and its chunks for the cluster.
__device__ __forceinline__ void produce(const FolioUpProjectionParams &p, const Maps &maps, u32 shared) {
    constexpr u32 OWN = CHUNKS / CLUSTER;
    const Tiles tiles(p);
    const u32 first_own = rank() * OWN, count = tiles.of_cta();
    Ring ring;
    for (u32 nth = 0; nth < count; ++nth) {
        const Tile tile = tiles.at(tile_of_cta(nth));
        const FolioUpProjectionPart &part = part_of(p, tile.part);
        const u32 per_head = chunks_of_head(part);
        u32 heads[OWN], columns[OWN];
#pragma unroll
        for (u32 c = 0; c < OWN; ++c) {
            const u32 chunk = tile.chunk + first_own + c;
            heads[c] = chunk / per_head;
            columns[c] = chunk % per_head * CHUNK;
        }
        for (u32 depth = 0; depth < p.depth; depth += DEPTH) {
            const u32 full = shared + FULL + 8 * ring.stage, stage = shared + ring.stage * STAGE_BYTES;
            mbarrier_wait(shared + EMPTY + 8 * ring.stage, ring.parity ^ 1);
            mbarrier_arrive_expect(full, STAGE_BYTES);
            tma_load_3d(stage, maps.x, full, depth, tile.token, 0);
#pragma unroll
            for (u32 c = 0; c < OWN; ++c) {
                const u32 target = stage + X_BYTES + (first_own + c) * CHUNK_BYTES;
                const u32 c0 = part.depth_first ? depth : columns[c], c1 = part.depth_first ? columns[c] : depth;
                load_weight(target, maps.weight(tile.part), full, c0, c1, heads[c]);
            }
            ring.advance();
        }
    }
}

struct Consumer {
    const FolioUpProjectionParams &p;
    const Maps &maps;
    u32 shared, group;
    Ring ring;
    float sums[COLUMNS / 2];

    __device__ __forceinline__ Consumer(const FolioUpProjectionParams &params, const Maps &maps, u32 shared)
        : p(params), maps(maps), shared(shared), group(threadIdx.x / WARPGROUP) {}

    __device__ __forceinline__ void run() {
        const Tiles tiles(p);
        const u32 count = tiles.of_cta();
        if (STAGGERED && group == 1 && count > 0) group_sync(STARTED, CONSUMERS * WARPGROUP);
        for (u32 nth = 0; nth < count; ++nth) {
            const Tile tile = tiles.at(tile_of_cta(nth));
            const bool starts_other = STAGGERED && nth == 0 && group == 0;
            if (part_of(p, tile.part).depth_first) {
                multiply<true>(starts_other);
            } else {
                multiply<false>(starts_other);
            }
            store(tile);
        }
        if (is_leader()) tma_store_wait_read();
    }

    // Sums of a tile. A stage is given back when the products after it have been issued.
    template <bool DEPTH_FIRST>
    __device__ __forceinline__ void multiply(bool starts_other) {
        u32 before = 0;
#pragma unroll 1
        for (u32 depth = 0; depth < p.depth; depth += DEPTH) {
            mbarrier_wait(shared + FULL + 8 * ring.stage, ring.parity);
            multiply_stage<DEPTH_FIRST>(shared + ring.stage * STAGE_BYTES, depth > 0);
            if (depth > 0) {
                wgmma_wait<1>();
                give_back(before);
            }
            // After the step of the head start, or the last one.
            if (starts_other && (depth == STARTER || (depth < STARTER && depth + DEPTH >= p.depth))) {
                asm volatile("bar.arrive %0, %1;" ::"n"(STARTED), "n"(CONSUMERS * WARPGROUP) : "memory");
            }
            before = ring.stage;
            ring.advance();
        }
        wgmma_wait<0>();
        pin(sums);
        give_back(before);
    }

    template <bool DEPTH_FIRST>
    __device__ __forceinline__ void multiply_stage(u32 stage, int accumulate) {
        const u64 x = wgmma_descriptor(stage + group * ROWS * ROW_BYTES, 16, ATOM_BYTES);
        const u64 weight = wgmma_descriptor(stage + X_BYTES, DEPTH_FIRST ? 16 : CHUNK_BYTES, ATOM_BYTES);
        // 16 along the depth: 32 bytes of a row, or 16 rows.
        constexpr u32 X_STEP = 32 >> 4, WEIGHT_STEP = (DEPTH_FIRST ? 32 : 16 * ROW_BYTES) >> 4;
        pin(sums);
        wgmma_fence();
#pragma unroll
        for (u32 step = 0; step < STEPS; ++step) {
            wgmma_ss<Element, Major::DEPTH, DEPTH_FIRST ? Major::DEPTH : Major::WIDTH>(
                sums, x + step * X_STEP, weight + step * WEIGHT_STEP, step > 0 || accumulate);
        }
        wgmma_commit();
    }

    // To the producers of all CTAs that write the stage.
    __device__ __forceinline__ void give_back(u32 stage) {
        const u32 lane = threadIdx.x % 32, empty = shared + EMPTY + 8 * stage;
        if (lane >= CLUSTER) return;
        if constexpr (CLUSTER > 1) {
            mbarrier_arrive_at(empty, lane);
        } else {
            mbarrier_arrive(empty);
        }
    }

    __device__ __forceinline__ bool is_leader() const { return threadIdx.x % WARPGROUP == 0; }

    __device__ __forceinline__ void store(const Tile &tile) {
        const u32 per_head = chunks_of_head(part_of(p, tile.part)), token = tile.token + group * ROWS;
#pragma unroll
        for (u32 c = 0; c < CHUNKS; ++c) {
            const u32 out = shared + OUT + (group * OUT_BUFFERS + c % OUT_BUFFERS) * CHUNK_OUT_BYTES;
            // The store of the chunk before the last has read what is overwritten now.
            if (is_leader()) tma_store_wait_read<OUT_BUFFERS - 1>();
            group_sync(group + 1, WARPGROUP);
            stage_chunk(out, c);
            fence_proxy_async();
            group_sync(group + 1, WARPGROUP);
            const u32 chunk = tile.chunk + c;
            if (is_leader()) {
                if (token < p.num_tokens && chunk < p.num_heads * per_head) {
                    tma_store_3d(maps.out(tile.part), out, chunk % per_head * CHUNK, token, chunk / per_head);
                }
                tma_store_commit();
            }
        }
    }

    // Rounds the sums of a chunk to rows in shared memory, swizzled as the map says.
    __device__ __forceinline__ void stage_chunk(u32 out, u32 c) const {
        const u32 lane = threadIdx.x % 32, row = threadIdx.x % WARPGROUP / 32 * 16 + lane % 16;
        const float *d = sums + c * CHUNK / 2;
#pragma unroll
        for (u32 j = 0; j < CHUNK / 16; ++j) {
            const u32 at = j * 2 + lane / 16;
            const u32 x[4] = {Element::pack(d[8 * j], d[8 * j + 1]), Element::pack(d[8 * j + 2], d[8 * j + 3]),
                              Element::pack(d[8 * j + 4], d[8 * j + 5]), Element::pack(d[8 * j + 6], d[8 * j + 7])};
            stmatrix_x4(out + row * ROW_BYTES + ((at ^ (row & 7)) << 4), x);
        }
    }
};

}  // namespace folio::up_projection

// Grid: clusters of CTAs, or CTAs, up to as many as there are tiles.
extern "C" __global__ void __launch_bounds__(FOLIO_THREADS, 1)
    folio_up_project(const __grid_constant__ FolioUpProjectionParams p, const __grid_constant__ folio::TensorMap x_map,
                     const __grid_constant__ folio::TensorMap w_uk_map,
                     const __grid_constant__ folio::TensorMap w_uv_map,
                     const __grid_constant__ folio::TensorMap k_nope_map,
                     const __grid_constant__ folio::TensorMap v_map) {
    using namespace folio;
    using namespace folio::up_projection;
    extern __shared__ __align__(1024) u8 shared_bytes[];
    const u32 shared = shared_address(shared_bytes);
    const Maps maps = {&x_map, &w_uk_map, &w_uv_map, &k_nope_map, &v_map};
    constexpr u32 PRODUCER = WARPGROUP * CONSUMERS;
    if (threadIdx.x == PRODUCER) {
        for (u32 i = 0; i < STAGES; ++i) {
            mbarrier_init(shared + FULL + 8 * i, 1);
            mbarrier_init(shared + EMPTY + 8 * i, CLUSTER * CONSUMERS * (WARPGROUP / 32));
        }
        mbarrier_init_fence();
        tensor_map_prefetch(maps.x);
        tensor_map_prefetch(maps.w_uk);
        tensor_map_prefetch(maps.w_uv);
    }
    synchronize_cluster();
    wait_for_prerequisites();
    if (threadIdx.x < PRODUCER) {
        Consumer(p, maps, shared).run();
        allow_dependents();
    } else if (threadIdx.x == PRODUCER) {
        produce(p, maps, shared);
    }
    // The other CTA may still write to this one's shared memory.
    __syncwarp();
    synchronize_cluster();
}
