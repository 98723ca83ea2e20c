// From a projection to the attention: rows of queries and keys are normalised and rotated in fp32, queries are stored,
// keys and values go to a paged cache, rounded to fp8 where the cache is fp8. One launch, and every element is read once
// and written once to each output.
//
// A warp has some rows of every token that it takes, queries, keys or values, so that what depends on heads is worked out
// once. A row of queries or keys has a group of lanes, a power of two, and each lane 16 elements of it: eight pairs while
// RoPE lasts, and 16 neighbours behind. Values move in pieces that lie one after another. Where tokens are more than run at a
// time, warps take them in turn and ask for three tokens ahead. Slots beyond the cache are skipped; positions beyond the
// table are those of its ends.
//
// With 32 and 8 heads of 128 in bf16 a token moves 12 KiB in and 12 KiB out, 10 KiB out where the cache is fp8.
//
// Tokens in turn are in tokens.cuh of the folder beside this file, queries and keys in rows.cuh and loose_rows.cuh, values in
// values.cuh. Compiled per pair of types: FOLIO_Q of the tokens, FOLIO_KV of the cache (that, or fp8).
#include "ops/rope_append/loose_rows.cuh"
#include "ops/rope_append/rows.cuh"
#include "ops/rope_append/values.cuh"

namespace folio {

// Units of a token: of its queries, of its keys, and of its values. src/cuda/ops/rope_append.rs counts them too.
struct Units {
    u32 rows;  // of a unit
    u32 queries, keys;

    __device__ __forceinline__ explicit Units(const Params &p)
        : rows(ROWS * (WARP >> p.log2_lanes)),
          queries((p.num_q_heads + rows - 1) / rows),
          keys((p.append.num_kv_heads + rows - 1) / rows) {}
};

__device__ __forceinline__ Rotated rotated(const Params &p, bool are_queries) {
    const FolioAppendParams &a = p.append;
    return {are_queries ? p.q : a.k.source,
            are_queries ? p.q_out : p.key_out,
            are_queries ? nullptr : &a.k,
            are_queries ? p.q_weight : p.k_weight,
            are_queries ? p.q_weight_dtype : p.k_weight_dtype,
            are_queries ? p.num_q_heads : a.num_kv_heads};
}

// A unit of every token that the warp takes. LOOSE: rows may be such as do not move in vectors.
template <bool LOOSE>
__device__ __forceinline__ void move_unit(const Params &p, u32 unit, i64 first, i64 stride, Stages &stages) {
    const FolioAppendParams &a = p.append;
    const Units units(p);
    const bool are_queries = unit < units.queries;
    const Tokens tokens = {first, stride, are_queries ? p.num_q_rows : a.num_tokens};
    if (unit < units.queries + units.keys) {
        const Rotated of = rotated(p, are_queries);
        const u32 first_head = (are_queries ? unit : unit - units.queries) * units.rows;
        if (!LOOSE || p.vectors) {
            RotatedRows rows(p, of, first_head, tokens);
            move_in_turn(rows, tokens, stages);
        } else {
#pragma unroll 1
            for (u32 i = 0; i < ROWS; i++) LooseRows(p, of, first_head + i * units.rows / ROWS).move(tokens);
        }
    } else if (!LOOSE || a.vectors) {
        Values values(a, unit - units.queries - units.keys, tokens);
        move_in_turn(values, tokens, stages);
    } else {
        move_loose_values(a, unit - units.queries - units.keys, tokens);
    }
}

template <bool LOOSE>
__device__ __forceinline__ void move_share(const Params &p) {
    __shared__ Stages stages[WARPS];
    allow_dependents();  // what attends to the tokens prepares itself meanwhile
    wait_for_prerequisites();
    const u32 warp = blockIdx.x * WARPS + threadIdx.x / WARP, at_once = divide(gridDim.x * WARPS, p.units_of_token);
    const u32 token = divide(warp, p.units_of_token), unit = warp - token * p.units_of_token.divisor;
    if (token < at_once) move_unit<LOOSE>(p, unit, token, at_once, stages[threadIdx.x / WARP]);
}

// CTAs of a multiprocessor, which src/cuda/ops/rope_append.rs launches where tokens are many.
constexpr u32 BLOCKS = 4;

}  // namespace folio

// Rows that all move in vectors, without the code for others: code comes from memory too.
extern "C" __global__ void __launch_bounds__(FOLIO_THREADS, folio::BLOCKS)
    folio_rope_append(const __grid_constant__ FolioRopeAppendParams p) {
    folio::move_share<false>(p);
}

extern "C" __global__ void __launch_bounds__(FOLIO_THREADS, folio::BLOCKS)
    folio_rope_append_loose(const __grid_constant__ FolioRopeAppendParams p) {
    folio::move_share<true>(p);
}
