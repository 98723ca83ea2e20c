// When workers end that take pieces of work one by one, whoever is free the next one: src/plan/dealing.rs, by one warp. What the
// pieces are, is the caller's.
#pragma once
#include "plan/planning.cuh"

namespace folio {

// All workers, as pieces are dealt out to them. A lane has those that are free from one time on.
class Dealing {
public:
    // So many workers, all of them free.
    __device__ __forceinline__ explicit Dealing(u32 all) : all(all), from(0), count(lane_index() == 0 ? all : 0) {}

    // So many pieces, each for the worker that is free first. Those that give all workers several are not dealt one by one.
    __device__ __forceinline__ void deal(u32 pieces, u32 time) {
        if (pieces >= 3 * all) {
            const u32 at_once = pieces / all - 2;
            from += at_once * time, pieces -= at_once * all;
        }
#pragma unroll 1
        while (pieces > 0) {
            const u32 first = __reduce_min_sync(FULL_WARP, count > 0 ? from : NEVER);
            const u32 lane = first_lane(count > 0 && from == first);
            const u32 busy = min(__shfl_sync(FULL_WARP, count, lane), pieces);
            if (lane_index() == lane) count -= busy;
            join(first + time, busy);
            pieces -= busy;
        }
    }

    // When the last worker ends.
    __device__ __forceinline__ u32 last() const { return __reduce_max_sync(FULL_WARP, count > 0 ? from : 0); }

private:
    static constexpr u32 NEVER = 0xffffffff;

    // 32: none.
    static __device__ __forceinline__ u32 first_lane(bool is_it) {
        const u32 lanes = __ballot_sync(FULL_WARP, is_it);
        return lanes == 0 ? 32 : __ffs(lanes) - 1;
    }

    // So many workers are free from now on. More times than lanes are told apart by none: these workers end with the last.
    __device__ __forceinline__ void join(u32 now, u32 workers) {
        const u32 same = first_lane(count > 0 && from == now), empty = first_lane(count == 0);
        const u32 target = same < 32 ? same : empty < 32 ? empty : first_lane(count > 0 && from == last());
        if (lane_index() != target) return;
        from = count > 0 ? from : now, count += workers;
    }

    u32 all, from, count;
};

}  // namespace folio
