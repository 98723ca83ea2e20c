// The up-projection on Hopper: keys and values of every head from latent rows that all heads share, in one launch. It is
// a matrix product that the matrix units bound. Products whose heads have rows of their own are in projection.cu.
//
// Two warpgroups multiply 64 tokens by 256 columns each. Columns come in chunks of 64, which belong to one head each, so
// four chunks of any heads are a tile. A cluster of two CTAs has the same columns of 256 tokens: each CTA loads two chunks
// and sends them to both.
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

constexpr u32 WARPGROUP = 128, CONSUMERS = 2, CLUSTER = 2;
constexpr u32 ROWS = 64, TOKENS = CONSUMERS * ROWS;
// Of 64 columns each.
constexpr u32 CHUNK = 64, CHUNKS = 4, COLUMNS = CHUNK * CHUNKS;
// A step along the depth, 128 bytes: a row of the swizzle atom. STEPS of the matrix unit.
constexpr u32 DEPTH = 64, STEPS = DEPTH / 16, ROW_BYTES = 128, ATOM_BYTES = 1024;

constexpr u32 X_BYTES = TOKENS * ROW_BYTES, CHUNK_BYTES = CHUNK * ROW_BYTES;
constexpr u32 STAGE_BYTES = X_BYTES + CHUNKS * CHUNK_BYTES, STAGES = 4;
// A warpgroup stores a chunk while it writes the next one.
constexpr u32 OUT_BYTES = ROWS * ROW_BYTES, OUT_BUFFERS = 2;
constexpr u32 OUT = STAGES * STAGE_BYTES, FULL = OUT + CONSUMERS * OUT_BUFFERS * OUT_BYTES, EMPTY = FULL + 8 * STAGES;
static_assert(EMPTY + 8 * STAGES <= FOLIO_SHARED_BYTES, "shared memory");

// Token blocks that are taken together before the next columns: their rows stay in L2.
constexpr u32 TOKEN_BLOCKS = 16;
// Steps of the first warpgroup before the second one's first.
constexpr u32 HEAD_START = 2, STARTER = (HEAD_START - 1) * DEPTH, STARTED = 3;

struct Maps {
    const TensorMap *x, *w_uk, *w_uv, *k_nope, *v;

    __device__ __forceinline__ const TensorMap *weight(u32 part) const { return part == 0 ? w_uk : w_uv; }
    __device__ __forceinline__ const TensorMap *out(u32 part) const { return part == 0 ? k_nope : v; }
};

// Four chunks of the keys or of the values.
struct Tile {
    u32 token, chunk, part;
};

__device__ __forceinline__ const FolioUpProjectionPart &part_of(const FolioUpProjectionParams &p, u32 part) {
    return part == 0 ? p.keys : p.values;
}

__device__ __forceinline__ u32 chunks_of_head(const FolioUpProjectionPart &part) {
    return (part.columns + CHUNK - 1) / CHUNK;
}

// Tiles of a cluster, in token blocks of all its CTAs. Those of a group of token blocks follow one another, the token
// block fastest.
struct Tiles {
    u32 token_blocks, key_blocks, column_blocks;

    __device__ __forceinline__ Tiles(const FolioUpProjectionParams &p)
        : token_blocks((p.num_tokens - 1) / (CLUSTER * TOKENS) + 1),
          key_blocks(blocks(p, p.keys)),
          column_blocks(key_blocks + blocks(p, p.values)) {}

    static __device__ __forceinline__ u32 blocks(const FolioUpProjectionParams &p, const FolioUpProjectionPart &part) {
        return (p.num_heads * chunks_of_head(part) + CHUNKS - 1) / CHUNKS;
    }

    __device__ __forceinline__ u32 count() const { return token_blocks * column_blocks; }

    __device__ __forceinline__ Tile at(u32 index) const {
        const u32 first = index / (TOKEN_BLOCKS * column_blocks) * TOKEN_BLOCKS;
        const u32 together = min(TOKEN_BLOCKS, token_blocks - first), rest = index - first * column_blocks;
        const u32 block = rest / together, part = block >= key_blocks;
        return {((first + rest % together) * CLUSTER + cluster_rank()) * TOKENS,
                (block - (part ? key_blocks : 0)) * CHUNKS, part};
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

__device__ __forceinline__ u32 first_tile() { return blockIdx.x / CLUSTER; }
__device__ __forceinline__ u32 next_tile(u32 tile) { return tile + gridDim.x / CLUSTER; }

// One thread: x of the CTA, and its chunks for the cluster.
__device__ __forceinline__ void produce(const FolioUpProjectionParams &p, const Maps &maps, u32 shared) {
    constexpr u32 OWN = CHUNKS / CLUSTER;
    const Tiles tiles(p);
    const u32 rank = cluster_rank();
    Ring ring;
    for (u32 index = first_tile(); index < tiles.count(); index = next_tile(index)) {
        const Tile tile = tiles.at(index);
        const FolioUpProjectionPart &part = part_of(p, tile.part);
        const u32 per_head = chunks_of_head(part);
        u32 heads[OWN], columns[OWN];
#pragma unroll
        for (u32 c = 0; c < OWN; ++c) {
            const u32 chunk = tile.chunk + rank * OWN + c;
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
                const u32 target = stage + X_BYTES + (rank * OWN + c) * CHUNK_BYTES;
                const u32 c0 = part.depth_first ? depth : columns[c], c1 = part.depth_first ? columns[c] : depth;
                tma_multicast_3d(target, maps.weight(tile.part), full, c0, c1, heads[c], (1 << CLUSTER) - 1);
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
        if (group == 1) group_sync(STARTED, CONSUMERS * WARPGROUP);
        bool first = true;
        for (u32 index = first_tile(); index < tiles.count(); index = next_tile(index)) {
            const Tile tile = tiles.at(index);
            if (part_of(p, tile.part).depth_first) {
                multiply<true>(first);
            } else {
                multiply<false>(first);
            }
            first = false;
            store(tile);
        }
        if (is_leader()) tma_store_wait_read();
    }

    // Sums of a tile. A stage is given back when the products after it have been issued.
    template <bool DEPTH_FIRST>
    __device__ __forceinline__ void multiply(bool first) {
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
            if (first && group == 0 && (depth == STARTER || (depth < STARTER && depth + DEPTH >= p.depth))) {
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
        const u32 lane = threadIdx.x % 32;
        if (lane < CLUSTER) mbarrier_arrive_at(shared + EMPTY + 8 * stage, lane);
    }

    __device__ __forceinline__ bool is_leader() const { return threadIdx.x % WARPGROUP == 0; }

    __device__ __forceinline__ void store(const Tile &tile) {
        const u32 per_head = chunks_of_head(part_of(p, tile.part)), token = tile.token + group * ROWS;
#pragma unroll
        for (u32 c = 0; c < CHUNKS; ++c) {
            const u32 out = shared + OUT + (group * OUT_BUFFERS + c % OUT_BUFFERS) * OUT_BYTES;
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

// Grid: clusters of CTAs, up to as many as there are tiles.
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
    cluster_sync();
    wait_for_prerequisites();
    if (threadIdx.x < PRODUCER) {
        Consumer(p, maps, shared).run();
        allow_dependents();
    } else if (threadIdx.x == PRODUCER) {
        produce(p, maps, shared);
    }
    // The other CTA may still write to this one's shared memory.
    __syncwarp();
    cluster_sync();
}
