// The tail of a prefill whose lengths are on the device: its last tiles, whose keys are cut where whole tiles would leave most
// workers idle at the end. The rules are those of src/plan/tail.rs, with fewer classes of tiles. But all cut tiles of a
// request have as many pieces: of those that see less than its last tile, the last pieces have no keys, which counts as an
// item's time here.
#pragma once
#include "plan/dealing.cuh"
#include "plan/planning.cuh"

namespace folio {

// Which tiles are cut, and into what.
struct Tail {
    u32 whole;  // tiles of the batch before it
    u32 units;  // of a chunk; 0: no tile is cut
};

// The whole tiles before a tail. In shared memory: registers are few.
struct WholeTiles {
    u32 count;           // in the batch
    u32 request, tiles;  // so many of this request's, and all of the requests before it

    static __device__ __forceinline__ WholeTiles &of_block() {
        __shared__ WholeTiles whole;
        return whole;
    }

    __device__ __forceinline__ u32 of_request(u32 b, u32 tiles_of_request) const {
        return b < request ? tiles_of_request : b == request ? tiles : 0;
    }
};

// Tiles of about the same number of units, of keys that a causal mask leaves; and the units that it hides from them.
struct TileClass {
    u32 count, units, hidden, rows;

    __device__ __forceinline__ void add(u32 seen, u32 hidden_units, u32 q_len) {
        atomicAdd(&count, 1), atomicAdd(&units, seen), atomicAdd(&hidden, hidden_units), atomicAdd(&rows, q_len);
    }
    __device__ __forceinline__ TileClass without(const TileClass &other) const {
        return {count - other.count, units - other.units, hidden - other.hidden, rows - other.rows};
    }
    __device__ __forceinline__ u32 mean() const { return units / max(count, 1u); }
};

// How long the cuts of a batch take, by dealing out its tiles, and the chunks behind them. The block's threads call the public
// functions together. Each warp estimates cuts by itself.
class TailEstimate {
public:
    // Tails begin behind one of two numbers of whole rounds.
    static constexpr u32 TAILS = 2;

    __device__ __forceinline__ TailEstimate(const FolioPlanBatchParams &params, const Requests &all, const Batch &batch)
        : params(params),
          batch(batch),
          of_item(batch.tiling.workers_of_item),
          rounds(static_cast<u32>(batch.tiles) * of_item / params.workers.all) {
        u32 *const words = reinterpret_cast<u32 *>(classes());
        for (u32 i = threadIdx.x; i < sizeof(Classes) / sizeof(u32); i += blockDim.x) words[i] = 0;
        __syncthreads();
        add_tiles(all);
        __syncthreads();
    }

    // Whether there are so few tiles that a last round that is not full costs much.
    static __device__ __forceinline__ bool is_possible(const FolioPlanBatchParams &params, const Batch &batch) {
        const u64 pieces = batch.tiles * batch.tiling.workers_of_item;
        return params.tail.most_chunks > 0 && batch.tiles > 0 && pieces <= MOST_ROUNDS * params.workers.all;
    }

    // Units in the time of tiles that are all cut into chunks of so many.
    __device__ __forceinline__ u32 time_of_chunks(u32 chunk) const { return time(TAILS, chunk); }

    // What no tail is below: all workers end together, and parts are put together.
    __device__ __forceinline__ u32 least() const {
        const u64 units = batch.tile_units + batch.tiles * params.tail.item_units;
        return static_cast<u32>(units * of_item / params.workers.all) + params.tail.combine_units;
    }

    // Whether it is worth it to take the time `then` instead of `now`.
    __device__ __forceinline__ bool pays(u32 now, u32 then) const {
        constexpr u64 WORTH = 105;  // hundredths
        return 100ull * now > WORTH * then && now > then + params.tail.least_gain;
    }

    // The tail that spares the most, and its time.
    __device__ __forceinline__ Tail best(u32 &least_time) const {
        __shared__ u32 found;  // the time, and in the last bits which it is
        if (threadIdx.x == 0) found = 0xffffffff;
        __syncthreads();
#pragma unroll 1
        for (u32 n = warp_index(); n < TAILS * CHUNKS; n += num_warps()) {
            const Tail tail = candidate(n);
            if (tail.units == 0 || chunks(n / CHUNKS, tail.units) > params.tail.most_chunks) continue;
            const u32 took = time(n / CHUNKS, tail.units);
            if (lane_index() == 0) atomicMin(&found, min(took, 0x0fffffffu) << 4 | n);
        }
        __syncthreads();
        least_time = found >> 4;
        return found == 0xffffffff ? Tail{} : candidate(found % 16);
    }

private:
    // After so many rounds a last one that is not full costs little.
    static constexpr u32 MOST_ROUNDS = 8;
    // The longest tile is so many classes long. The time to deal them out grows by their square.
    static constexpr u32 CLASSES_OF_TILES = 8;
    // Numbers of chunks of a tile that are tried: 2 to 6, and 8.
    static constexpr u32 CHUNKS = 6;
    static_assert(TAILS * CHUNKS <= 16, "four bits");

    // Whole tiles of each tail, and then all tiles.
    struct Classes {
        TileClass of[TAILS + 1][CLASSES_OF_TILES];
        u32 longest[TAILS];  // units of the longest request of the tail
    };

    static __device__ __forceinline__ Classes *classes() {
        __shared__ Classes shared;
        return &shared;
    }

    // Tiles before a tail.
    __device__ __forceinline__ u32 whole(u32 tail) const {
        return (rounds - min(tail, rounds)) * params.workers.all / of_item;
    }

    __device__ __forceinline__ Tail candidate(u32 n) const {
        const u32 tail = n / CHUNKS, nth = n % CHUNKS, chunks = nth + 2 + (nth + 1 == CHUNKS);
        return {whole(tail), divide_up(classes()->longest[tail], chunks)};
    }

    // A warp has a request, and a lane a tile of it.
    __device__ __forceinline__ void add_tiles(const Requests &all) const {
        const FolioPlanParams &p = params.plan;
        const FolioDivisor &q_tile = batch.tiling.q_tile;
        const u32 units_of_class = batch.most_units / CLASSES_OF_TILES + 1;
#pragma unroll 1
        for (u32 b = warp_index(); b < p.batch_size; b += num_warps()) {
            const FolioPlanRequest &request = all.request[b];
            const u32 tiles = divide_up(request.rows, q_tile), first = first_key(p, request.rows, request.keys);
#pragma unroll 1
            for (u32 t = lane_index(); t < tiles; t += 32) {
                const u32 q_end = min((t + 1) * q_tile.divisor, request.rows), hidden_keys = request.rows - q_end;
                const u32 seen = clamp(static_cast<i64>(request.keys) - first - hidden_keys, request.keys);
                const u32 units = min(divide_up(seen, p.kv_unit), request.units);
                const u32 of_class = min(units / units_of_class, CLASSES_OF_TILES - 1);
#pragma unroll
                for (u32 n = 0; n <= TAILS; n++) {
                    if (n == TAILS || request.tiles_before + t < whole(n)) {
                        classes()->of[n][of_class].add(units, request.units - units, q_end - t * q_tile.divisor);
                    } else {
                        atomicMax(&classes()->longest[n], request.units);
                    }
                }
            }
        }
    }

    // The tiles of a class that are cut: all, or those of a tail.
    __device__ __forceinline__ TileClass cut_tiles(u32 tail, u32 of_class) const {
        const TileClass &of_all = classes()->of[TAILS][of_class];
        return tail == TAILS ? of_all : of_all.without(classes()->of[tail][of_class]);
    }

    // Chunks of so many units that a tail is split into, about: what is chosen is counted exactly.
    __device__ __forceinline__ u32 chunks(u32 tail, u32 units) const {
        u32 sum = 0;
#pragma unroll 1
        for (u32 c = 0; c < CLASSES_OF_TILES; c++) {
            const TileClass tiles = cut_tiles(tail, c);
            if (tiles.count > 0) sum += tiles.count * divide_up((tiles.units + tiles.hidden) / tiles.count, units);
        }
        return sum;
    }

    // In which order pieces are dealt out: whole tiles, then chunks, then what is left of the keys of each cut tile, then its
    // pieces without keys.
    enum Phase { WHOLE, CHUNK, REST, HIDDEN };
    // A lane has the pieces of a phase and a class.
    static_assert(4 * CLASSES_OF_TILES == 32, "the lanes of a warp");

    // When the last worker ends and parts are put together, in units, if the tiles of a tail are cut into chunks of so many.
    __device__ __forceinline__ u32 time(u32 tail, u32 chunk) const {
        const Phase phase = static_cast<Phase>(lane_index() / CLASSES_OF_TILES);
        // The longest first.
        const u32 of_class = CLASSES_OF_TILES - 1 - lane_index() % CLASSES_OF_TILES;
        TileClass tiles = {};
        if (phase != WHOLE) tiles = cut_tiles(tail, of_class);
        if (phase == WHOLE && tail < TAILS) tiles = classes()->of[tail][of_class];
        const u32 chunks = tiles.mean() / chunk, rest = tiles.mean() - chunks * chunk;
        u32 count = tiles.count, units = tiles.mean();
        if (phase == CHUNK) count *= chunks, units = chunk;
        if (phase == REST) count = rest > 0 || chunks == 0 ? count : 0, units = rest;
        if (phase == HIDDEN) count = tiles.hidden / chunk, units = 0;
        const u32 parts = phase == CHUNK && tiles.mean() > chunk ? tiles.rows * (chunks + (rest > 0)) : 0;
        Dealing workers(params.workers.all);
#pragma unroll 1
        for (u32 left = __ballot_sync(FULL_WARP, count > 0); left > 0; left &= left - 1) {
            const u32 lane = __ffs(left) - 1;
            workers.deal(__shfl_sync(FULL_WARP, count, lane) * of_item,
                         __shfl_sync(FULL_WARP, units, lane) + params.tail.item_units);
        }
        return workers.last() + combining(__reduce_add_sync(FULL_WARP, parts));
    }

    // So many rows of partial results are written, and read by a second kernel.
    __device__ __forceinline__ u32 combining(u32 rows) const {
        if (rows == 0) return 0;
        return params.tail.combine_units + static_cast<u32>(static_cast<float>(rows) * params.tail.units_of_row);
    }

    const FolioPlanBatchParams &params;
    const Batch &batch;
    u32 of_item, rounds;
};

// The tail that spares the most, where one is worth it. Without it, keys are cut into chunks of so many units.
__device__ __forceinline__ Tail worthwhile_tail(const FolioPlanBatchParams &params, const Requests &all,
                                                const Batch &batch, u32 chunk) {
    if (!TailEstimate::is_possible(params, batch)) return {};
    const TailEstimate estimate(params, all, batch);
    const u32 now = estimate.time_of_chunks(chunk);
    if (!estimate.pays(now, estimate.least())) return {};
    u32 then;
    const Tail tail = estimate.best(then);
    return estimate.pays(now, then) ? tail : Tail{};
}

// Finds where the tiles end that are before a tail.
__device__ __forceinline__ void find_whole_tiles(const Requests &all, const FolioDivisor &q_tile, u32 count) {
#pragma unroll 1
    for (u32 b = all.begin; b < all.end; b++) {
        const u32 before = all.request[b].tiles_before, tiles = divide_up(all.request[b].rows, q_tile);
        if (before <= count && count < before + tiles) WholeTiles::of_block() = {count, b, count - before};
    }
    __syncthreads();
}

}  // namespace folio
