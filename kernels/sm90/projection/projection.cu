// Products per head on Hopper: out[t, h] = x[t, h] weight[h]. Two warps load steps of 64 along the depth by TMA into a
// ring, one the weights and one x; consumer warpgroups multiply (tokens are the rows of the matrix unit, columns of the weight its columns)
// and store by TMA.
//
// Few tokens are bound by reading the weights, which is what the ring is for: as many bytes as shared memory holds are
// under way, across tiles. The matrix unit then has rows to spare, so a tile of 16 tokens is one of 64 whose other rows
// are whatever lies behind the tokens: products of rows do not mix, and those are not stored.
//
// FOLIO_Q_TILE tokens and FOLIO_KV_TILE columns are a tile.
#include "core/dtype.cuh"
#include "params/projection.h"
#include "ptx/tma_store.cuh"
#include "ptx/wgmma_products.cuh"

namespace folio::projection {

typedef FOLIO_Q Element;

constexpr int TOKENS = FOLIO_Q_TILE, COLUMNS = FOLIO_KV_TILE;
constexpr int WARPGROUP = 128, CONSUMERS = FOLIO_THREADS / WARPGROUP;
// Rows of a product, and how many such blocks a warpgroup has.
constexpr int ROWS = 64, BLOCKS = TOKENS <= ROWS ? 1 : TOKENS / ROWS / CONSUMERS;
// Rows of a block that are stored.
constexpr int STORED = TOKENS < ROWS ? TOKENS : ROWS;
// A step along the depth, 128 bytes: a row of the swizzle atom. STEPS of the matrix unit.
constexpr int DEPTH = 64, STEPS = DEPTH / 16;
constexpr u32 ROW_BYTES = 128, ATOM_BYTES = 1024;

constexpr u32 X_BYTES = TOKENS * ROW_BYTES, WEIGHT_BYTES = COLUMNS * ROW_BYTES, STAGE_BYTES = X_BYTES + WEIGHT_BYTES;
constexpr u32 BARRIER_BYTES = 1024;
// Results of a tile, so that no block waits for the stores of another: [block][64 columns][row][column].
constexpr u32 OUT_COLUMN_BYTES = STORED * ROW_BYTES, OUT_BLOCK_BYTES = COLUMNS / 64 * OUT_COLUMN_BYTES;
constexpr u32 OUT_BYTES = CONSUMERS * BLOCKS * OUT_BLOCK_BYTES;
constexpr int STAGES = (FOLIO_SHARED_BYTES - OUT_BYTES - BARRIER_BYTES) / STAGE_BYTES;
static_assert(STAGES >= 2 && STAGES <= 32 && STAGE_BYTES % ATOM_BYTES == 0 && X_BYTES % ATOM_BYTES == 0, "ring");
static_assert(ROWS * ROW_BYTES <= STAGE_BYTES, "a block's rows lie within its stage");
// Two CTAs per multiprocessor where both fit.
constexpr int CTAS = FOLIO_SHARED_BYTES <= 115712 ? 2 : 1;

constexpr u32 OUT = STAGES * STAGE_BYTES, FULL = OUT + OUT_BYTES, EMPTY = FULL + 8 * STAGES;

// Token blocks that are taken together before the next columns: their rows stay in L2.
constexpr u32 TOKEN_BLOCKS = 16;

struct Tile {
    u32 token, column, head;
};

// Tiles of a group of token blocks follow one another, the token block fastest: those that share a weight are near.
struct Tiles {
    u32 token_blocks, column_blocks, num_heads;

    __device__ __forceinline__ Tiles(const FolioProjectionParams &p)
        : token_blocks((p.num_tokens - 1) / TOKENS + 1),
          column_blocks((p.columns - 1) / COLUMNS + 1),
          num_heads(p.num_heads) {}

    __device__ __forceinline__ u32 count() const { return token_blocks * column_blocks * num_heads; }

    __device__ __forceinline__ Tile at(u32 index) const {
        const u32 of_columns = column_blocks * num_heads;
        const u32 first = index / (TOKEN_BLOCKS * of_columns) * TOKEN_BLOCKS;
        const u32 blocks = min(TOKEN_BLOCKS, token_blocks - first), rest = index - first * of_columns;
        const u32 columns = rest / blocks;
        return {(first + rest % blocks) * TOKENS, columns % column_blocks * COLUMNS, columns / column_blocks};
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

// A step of a weight is [row of depth or column][128 bytes]: one box depth first, else one for every 64 columns.
template <bool DEPTH_FIRST, class Load>
__device__ __forceinline__ void for_each_box(const Tile &tile, u32 depth, Load load) {
    if constexpr (DEPTH_FIRST) {
        load(0, depth, tile.column, tile.head);
    } else {
#pragma unroll
        for (u32 c = 0; c < COLUMNS; c += 64) load(c * ROW_BYTES, tile.column + c, depth, tile.head);
    }
}

// Calls `load(tile, depth, stage, full)` for every step of the CTA's tiles; `bytes` will arrive at the barrier `full`. The
// stages are filled for the first time by a lane each, since a lane takes 370 cycles from one step to the next, and then
// by one lane as they become free.
template <class Load>
__device__ __forceinline__ void produce(const FolioProjectionParams &p, u32 shared, u32 bytes, Load load) {
    const Tiles tiles(p);
    const u32 steps_of_tile = (p.depth - 1) / DEPTH + 1;
    const u32 steps = ((tiles.count() - 1 - blockIdx.x) / gridDim.x + 1) * steps_of_tile;
    const auto fill = [&](u32 step) {
        const u32 stage = step % STAGES, full = shared + FULL + 8 * stage;
        const Tile tile = tiles.at(blockIdx.x + step / steps_of_tile * gridDim.x);
        mbarrier_arrive_expect(full, bytes);
        load(tile, step % steps_of_tile * DEPTH, shared + stage * STAGE_BYTES, full);
    };
    const u32 lane = threadIdx.x % 32;
    if (lane < STAGES && lane < steps) fill(lane);
    if (lane > 0) return;
    for (u32 step = STAGES; step < steps; ++step) {
        mbarrier_wait(shared + EMPTY + 8 * (step % STAGES), (step / STAGES - 1) & 1);
        fill(step);
    }
}

template <bool DEPTH_FIRST>
__device__ __forceinline__ void produce_weights(const FolioProjectionParams &p, const TensorMap *map, u32 shared) {
    produce(p, shared, WEIGHT_BYTES, [&](const Tile &tile, u32 depth, u32 stage, u32 full) {
        for_each_box<DEPTH_FIRST>(tile, depth, [&](u32 offset, int c0, int c1, int c2) {
            tma_load_3d(stage + X_BYTES + offset, map, full, c0, c1, c2);
        });
    });
}

__device__ __forceinline__ void produce_x(const FolioProjectionParams &p, const TensorMap *map, u32 shared) {
    produce(p, shared, X_BYTES, [&](const Tile &tile, u32 depth, u32 stage, u32 full) {
        tma_load_3d(stage, map, full, depth, tile.token, min(tile.head, p.x_heads - 1));
    });
}

template <bool DEPTH_FIRST>
struct Consumer {
    const FolioProjectionParams &p;
    const TensorMap *out_map;
    u32 shared, group;
    Ring ring;
    float sums[BLOCKS][COLUMNS / 2];

    __device__ __forceinline__ Consumer(const FolioProjectionParams &params, const TensorMap *map, u32 shared)
        : p(params), out_map(map), shared(shared), group(threadIdx.x / WARPGROUP) {}

    __device__ __forceinline__ void run() {
        const Tiles tiles(p);
        for (u32 index = blockIdx.x; index < tiles.count(); index += gridDim.x) {
            multiply();
            store(tiles.at(index));
        }
        if (is_leader()) tma_store_wait_read();
    }

    // Sums of a tile. A stage is given back when the products after it have been issued.
    __device__ __forceinline__ void multiply() {
        u32 before = 0;
        for (u32 depth = 0; depth < p.depth; depth += DEPTH) {
            mbarrier_wait(shared + FULL + 8 * ring.stage, ring.parity);
            multiply_stage(shared + ring.stage * STAGE_BYTES, depth > 0);
            if (depth > 0) {
                wgmma_wait<1>();
                give_back(before);
            }
            before = ring.stage;
            ring.advance();
        }
        wgmma_wait<0>();
#pragma unroll
        for (int b = 0; b < BLOCKS; ++b) pin(sums[b]);
        give_back(before);
    }

    __device__ __forceinline__ void multiply_stage(u32 stage, int accumulate) {
        const u64 x = wgmma_descriptor(stage + group * BLOCKS * ROWS * ROW_BYTES, 16, ATOM_BYTES);
        const u64 weight = wgmma_descriptor(stage + X_BYTES, DEPTH_FIRST ? 16 : DEPTH * ROW_BYTES, ATOM_BYTES);
        // 16 along the depth: 32 bytes of a row, or 16 rows.
        constexpr u32 X_STEP = 32 >> 4, WEIGHT_STEP = (DEPTH_FIRST ? 32 : 16 * ROW_BYTES) >> 4;
        constexpr u32 X_BLOCK = (ROWS * ROW_BYTES) >> 4;
#pragma unroll
        for (int b = 0; b < BLOCKS; ++b) pin(sums[b]);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
#pragma unroll
            for (int b = 0; b < BLOCKS; ++b) {
                wgmma_ss<Element, Major::DEPTH, DEPTH_FIRST ? Major::DEPTH : Major::WIDTH>(
                    sums[b], x + b * X_BLOCK + step * X_STEP, weight + step * WEIGHT_STEP, step > 0 || accumulate);
            }
        }
        wgmma_commit();
    }

    __device__ __forceinline__ void give_back(u32 stage) {
        if (threadIdx.x % 32 == 0) mbarrier_arrive(shared + EMPTY + 8 * stage);
    }

    __device__ __forceinline__ bool is_leader() const { return threadIdx.x % WARPGROUP == 0; }

    __device__ __forceinline__ void synchronize() const {
        asm volatile("bar.sync %0, %1;" ::"r"(group + 1), "n"(WARPGROUP) : "memory");
    }

    __device__ __forceinline__ void store(const Tile &tile) {
        const u32 out = shared + OUT + group * BLOCKS * OUT_BLOCK_BYTES;
        // The stores of the tile before have read what is overwritten now.
        if (is_leader()) tma_store_wait_read();
        synchronize();
#pragma unroll
        for (int b = 0; b < BLOCKS; ++b) stage_block(out + b * OUT_BLOCK_BYTES, sums[b]);
        fence_proxy_async();
        synchronize();
        if (!is_leader()) return;
#pragma unroll
        for (int b = 0; b < BLOCKS; ++b) {
            const u32 token = tile.token + (group * BLOCKS + b) * ROWS;
#pragma unroll
            for (int c = 0; c < COLUMNS / 64; ++c) {
                const u32 column = tile.column + 64 * c;
                if (token < p.num_tokens && column < p.columns) {
                    tma_store_3d(out_map, out + b * OUT_BLOCK_BYTES + c * OUT_COLUMN_BYTES, column, token, tile.head);
                }
            }
        }
        tma_store_commit();
    }

    // Rounds a block's sums to rows in shared memory, swizzled as the map says.
    __device__ __forceinline__ void stage_block(u32 out, const float (&d)[COLUMNS / 2]) const {
        const u32 lane = threadIdx.x % 32, first = threadIdx.x % WARPGROUP / 32 * 16;
        if (first >= STORED) return;
        const u32 row = first + lane % 16;
#pragma unroll
        for (int j = 0; j < COLUMNS / 16; ++j) {
            const u32 chunk = j % 4 * 2 + lane / 16;
            const u32 x[4] = {Element::pack(d[8 * j], d[8 * j + 1]), Element::pack(d[8 * j + 2], d[8 * j + 3]),
                              Element::pack(d[8 * j + 4], d[8 * j + 5]), Element::pack(d[8 * j + 6], d[8 * j + 7])};
            stmatrix_x4(out + j / 4 * OUT_COLUMN_BYTES + row * ROW_BYTES + ((chunk ^ (row & 7)) << 4), x);
        }
    }
};

template <bool DEPTH_FIRST>
__device__ __forceinline__ void project(const FolioProjectionParams &p, const TensorMap *x_map,
                                        const TensorMap *weight_map, const TensorMap *out_map, u32 shared) {
    // The first threads of the warps that load.
    constexpr u32 WEIGHTS = WARPGROUP * CONSUMERS, X = WEIGHTS + 32;
    if (threadIdx.x == WEIGHTS) tensor_map_prefetch(weight_map);
    if (threadIdx.x == X) tensor_map_prefetch(x_map);
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) {
            mbarrier_init(shared + FULL + 8 * i, 2);
            mbarrier_init(shared + EMPTY + 8 * i, WARPGROUP / 32 * CONSUMERS);
        }
        mbarrier_init_fence();
        tensor_map_prefetch(out_map);
    }
    __syncthreads();
    wait_for_prerequisites();
    if (threadIdx.x < WEIGHTS) {
        Consumer<DEPTH_FIRST>(p, out_map, shared).run();
        // Not earlier: CTAs of the next grid would take bandwidth from those of this one.
        allow_dependents();
    } else if (threadIdx.x < X) {
        produce_weights<DEPTH_FIRST>(p, weight_map, shared);
    } else {
        produce_x(p, x_map, shared);
    }
}

}  // namespace folio::projection

// Grid: up to as many CTAs as there are tiles, FOLIO_THREADS each. The weight's depth has a unit stride, or its columns
// have.
extern "C" __global__ void __launch_bounds__(FOLIO_THREADS, folio::projection::CTAS)
    folio_project_depth_first(const __grid_constant__ FolioProjectionParams p,
                              const __grid_constant__ folio::TensorMap x_map,
                              const __grid_constant__ folio::TensorMap weight_map,
                              const __grid_constant__ folio::TensorMap out_map) {
    extern __shared__ __align__(1024) folio::u8 shared_bytes[];
    folio::projection::project<true>(p, &x_map, &weight_map, &out_map, folio::shared_address(shared_bytes));
}

extern "C" __global__ void __launch_bounds__(FOLIO_THREADS, folio::projection::CTAS)
    folio_project_columns_first(const __grid_constant__ FolioProjectionParams p,
                                const __grid_constant__ folio::TensorMap x_map,
                                const __grid_constant__ folio::TensorMap weight_map,
                                const __grid_constant__ folio::TensorMap out_map) {
    extern __shared__ __align__(1024) folio::u8 shared_bytes[];
    folio::projection::project<false>(p, &x_map, &weight_map, &out_map, folio::shared_address(shared_bytes));
}
