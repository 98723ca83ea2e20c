// Merges attention states that the caller has: n per row and head, or two in separate tensors. The partial results of
// Folio's own split rows are plan/combine.cu's. A state without keys has lse -inf; +inf and NaN count as that too, as
// FlashAttention-2 marks empty rows with +inf.
//
// A row and head belong to lanes of one warp, which read every lse before one of them writes the merged
// one: outputs may be the inputs themselves. Compiled per element type, FOLIO_Q.
//
// Two states, the most common case, have a kernel of their own. It is bound by the latency of memory: few registers and
// many blocks make it fast. So what is asked for less often (another number of states for every token, tokens that
// have the second state alone, outputs in fp8 or of fp32 states in 16 bits, an lse in 16 bits) has kernels of its own too,
// the general ones.
#include "core/elements.cuh"
#include "core/paged.cuh"
#include "core/softmax.cuh"
#include "params/merge.h"

namespace folio {

typedef FOLIO_Q Element;
typedef Element::Storage Storage;

// Where a lane's row is.
struct Position {
    u32 token, head, lane;
    bool wanted;

    __device__ __forceinline__ Position(const FolioMergeStatesParams &p) {
        const u32 row = blockIdx.x * (FOLIO_THREADS >> p.log2_lanes) + (threadIdx.x >> p.log2_lanes);
        token = divide(row, p.num_heads);
        head = row - token * p.num_heads.divisor;
        lane = threadIdx.x & ((1u << p.log2_lanes) - 1);
        wanted = token < p.num_tokens && !(p.mask && p.mask[token * p.mask_stride] == 0);
    }
};

// Every lse in fp32.
struct Floats {
    __device__ __forceinline__ i64 bytes(i64 elements) const { return elements * static_cast<i64>(sizeof(float)); }
    __device__ __forceinline__ float load(const void *s) const { return *static_cast<const float *>(s); }
    __device__ __forceinline__ void store(void *s, i64 at, float lse) const { static_cast<float *>(s)[at] = lse; }
};

// Those of the states in one type, the merged one in one of its own.
struct AnyFloats {
    u32 states, merged;  // FolioDtype: FOLIO_F32, FOLIO_F16 or FOLIO_BF16

    __device__ __forceinline__ explicit AnyFloats(const FolioMergeGeneralParams &p)
        : states(p.s_dtype), merged(p.s_out_dtype) {}

    __device__ __forceinline__ i64 bytes(i64 elements) const { return elements << (states == FOLIO_F32 ? 2 : 1); }
    __device__ __forceinline__ float load(const void *s) const {
        switch (states) {
            case FOLIO_F16: return f16::load(*static_cast<const u16 *>(s));
            case FOLIO_BF16: return bf16::load(*static_cast<const u16 *>(s));
            default: return *static_cast<const float *>(s);
        }
    }
    __device__ __forceinline__ void store(void *s, i64 at, float lse) const {
        switch (merged) {
            case FOLIO_F16: static_cast<u16 *>(s)[at] = f16::store(lse); break;
            case FOLIO_BF16: static_cast<u16 *>(s)[at] = bf16::store(lse); break;
            default: static_cast<float *>(s)[at] = lse;
        }
    }
};

// One state of a token and head. Lse says of what type its lse is.
template <class Lse>
struct State {
    const Storage *v;
    const char *s;

    __device__ __forceinline__ State(const FolioState &states, const Position &at, u32 index, const Lse &type)
        : v(static_cast<const Storage *>(states.v) + at.token * states.v_stride_token + index * states.v_stride_state +
            at.head * states.v_stride_head),
          s(reinterpret_cast<const char *>(states.s) +
            type.bytes(at.token * states.s_stride_token + index * states.s_stride_state +
                       at.head * states.s_stride_head)) {}

    // State `index` of all.
    __device__ __forceinline__ State(const FolioMergeStatesParams &p, const Position &at, u32 index, const Lse &type)
        : State(p.second.v && index ? State(p.second, at, 0, type) : State(p.first, at, index, type)) {}
};

// Where the first element of the merged row is, from the start of the output.
__device__ __forceinline__ i64 output_row(const FolioMergeStatesParams &p, const Position &at) {
    return at.token * p.v_out.stride_token + at.head * p.v_out.stride_head;
}

// s_out may be an s: no lane of the row reads one after this barrier, which orders its reads before the store. Lanes
// that have left are not waited for, and all others come here.
template <class Lse>
__device__ __forceinline__ void store_lse(const FolioMergeStatesParams &p, const Position &at, const Lse &type,
                                          float lse) {
    __syncwarp();
    if (p.s_out && at.lane == 0) {
        type.store(p.s_out, at.token * p.s_out_stride_token + at.head * p.s_out_stride_head, lse);
    }
}

__device__ __forceinline__ float without_keys(float lse) {
    return lse < __uint_as_float(0x7f800000u) ? lse : minus_infinity();
}

// A row's lse statistics, in the states' base.
struct Weights {
    float max, base, to_base_2, from_base_2, sum;

    __device__ __forceinline__ Weights(const FolioMergeStatesParams &p, float max)
        : max(max),
          base(exponent_base(max)),
          to_base_2(p.flags & FOLIO_RUN_LSE_BASE_2 ? 1.0f : LOG2_E),
          from_base_2(p.flags & FOLIO_RUN_LSE_BASE_2 ? 1.0f : LN_2),
          sum(0.0f) {}

    __device__ __forceinline__ float weight(float lse) const { return exp2_approx((lse - base) * to_base_2); }
    __device__ __forceinline__ float factor() const { return sum > 0.0f ? reciprocal_approx(sum) : 0.0f; }
    __device__ __forceinline__ float lse() const {
        return sum > 0.0f ? max + log2_approx(sum) * from_base_2 : minus_infinity();
    }
};

// A weighted sum of N elements.
template <u32 N>
struct Sum {
    float x[N];

    // What an empty state holds does not count, whatever it is.
    __device__ __forceinline__ void add(float weight, const Elements<N, Element> &values) {
        const Elements<N, Element> counted = weight > 0.0f ? values : Elements<N, Element>{};
#pragma unroll
        for (u32 j = 0; j < N; j++) x[j] += weight * Element::load(counted.x[j]);
    }

    __device__ __forceinline__ void scale(float factor) {
#pragma unroll
        for (u32 j = 0; j < N; j++) x[j] *= factor;
    }

    // As elements of type T, times `factor`.
    template <class T>
    __device__ __forceinline__ void store(typename T::Storage *target, float factor) const {
        Elements<N, T> out;
#pragma unroll
        for (u32 j = 0; j < N; j++) out.x[j] = T::store(x[j] * factor);
        out.store(target);
    }
};

// A row of an output that has the states' type.
struct SameType {
    Storage *row;

    __device__ __forceinline__ SameType(const FolioMergeStatesParams &p, const Position &at)
        : row(static_cast<Storage *>(p.v_out.data) + output_row(p, at)) {}

    template <u32 N>
    __device__ __forceinline__ void store(u32 d, const Sum<N> &sum) const {
        sum.template store<Element>(row + d, 1.0f);
    }
};

template <class T>
constexpr bool IS_F32 = false;
template <>
constexpr bool IS_F32<f32> = true;

// A row of an output that has the states' type, is fp8, or is what fp32 states are rounded to.
struct AnyType {
    const FolioMergeGeneralParams &p;
    i64 row;

    __device__ __forceinline__ AnyType(const FolioMergeGeneralParams &p, const Position &at)
        : p(p), row(output_row(p.merge, at)) {}

    template <u32 N>
    __device__ __forceinline__ void store(u32 d, const Sum<N> &sum) const {
        void *const out = p.merge.v_out.data;
        if constexpr (IS_F32<Element>) {
            u16 *const half = static_cast<u16 *>(out) + row + d;
            if (p.o_dtype == FOLIO_BF16) return sum.template store<bf16>(half, 1.0f);
            if (p.o_dtype == FOLIO_F16) return sum.template store<f16>(half, 1.0f);
        }
        switch (p.o_dtype) {
            case FOLIO_E4M3: sum.template store<e4m3>(static_cast<u8 *>(out) + row + d, p.o_factor); break;
            case FOLIO_E5M2: sum.template store<e5m2>(static_cast<u8 *>(out) + row + d, p.o_factor); break;
            default: sum.template store<Element>(static_cast<Storage *>(out) + row + d, 1.0f);
        }
    }
};

// The states of a token: from `begin` to `end`, without it.
struct Range {
    u32 begin, end;
};

// The numbers of indptr are kept within the states that there are.
__device__ __forceinline__ Range states_of(const FolioMergeGeneralParams &p, u32 token) {
    const u32 count = p.merge.num_states;
    if (!p.indptr) return {token < p.num_tokens_with_first ? 0u : 1u, count};
    const i32 first = p.indptr[token], after = p.indptr[token + 1];
    return {static_cast<u32>(max(first, 0)), min(static_cast<u32>(max(after, 0)), count)};
}

// Any number of states, of which UNROLL are loaded at a time. Returns the lse.
template <u32 N, u32 UNROLL, class Lse, class Output>
__device__ __forceinline__ float merge_states(const FolioMergeStatesParams &p, const Position &at, const Range &states,
                                              const Lse &type, const Output &out) {
    const auto lse = [&](u32 i) { return without_keys(type.load(State<Lse>(p, at, i, type).s)); };
    float max = minus_infinity();
    for (u32 i = states.begin; i < states.end; i++) max = fmaxf(max, lse(i));
    Weights weights(p, max);
    for (u32 i = states.begin; i < states.end; i++) weights.sum += weights.weight(lse(i));
    const float factor = weights.factor();
    for (u32 d = N * at.lane; d < p.head_dim; d += N << p.log2_lanes) {
        Sum<N> sum = {};
#pragma unroll UNROLL
        for (u32 i = states.begin; i < states.end; i++) {
            Elements<N, Element> values;
            values.load(State<Lse>(p, at, i, type).v + d);
            sum.add(weights.weight(lse(i)) * factor, values);
        }
        out.store(d, sum);
    }
    return weights.lse();
}

// States at the same distance from each other.
template <class Lse>
struct StateRow {
    State<Lse> first;
    i64 v_step, s_step;  // bytes

    __device__ __forceinline__ StateRow(const FolioMergeStatesParams &p, const Position &at, const Lse &type)
        : first(p, at, 0, type) {
        const State<Lse> second(p, at, 1, type);
        v_step = distance(first.v, second.v), s_step = distance(first.s, second.s);
    }

    __device__ __forceinline__ const void *s(u32 index) const { return first.s + index * s_step; }
    __device__ __forceinline__ const Storage *v(u32 index) const { return moved(first.v, index * v_step); }

private:
    static __device__ __forceinline__ i64 distance(const void *from, const void *to) {
        return static_cast<const char *>(to) - static_cast<const char *>(from);
    }

    template <class T>
    static __device__ __forceinline__ const T *moved(const T *from, i64 bytes) {
        return reinterpret_cast<const T *>(reinterpret_cast<const char *>(from) + bytes);
    }
};

// Any number of states in one pass, of which four are on their way at a time with their lse. What was summed up is scaled
// down where a greater lse comes. Returns the lse.
template <u32 N, class Lse, class Output>
__device__ __forceinline__ float merge_as_they_come(const FolioMergeStatesParams &p, const Position &at,
                                                    const Range &states, const Lse &type, const Output &out) {
    constexpr u32 AT_ONCE = 4;
    const StateRow<Lse> row(p, at, type);
    Weights weights(p, minus_infinity());
    for (u32 d = N * at.lane; d < p.head_dim; d += N << p.log2_lanes) {
        weights = Weights(p, minus_infinity());
        Sum<N> sum = {};
#pragma unroll 1
        for (u32 i = states.begin; i < states.end; i += AT_ONCE) {
            float lse[AT_ONCE];
            Elements<N, Element> values[AT_ONCE];
#pragma unroll
            for (u32 j = 0; j < AT_ONCE; j++) {
                // Those past the end are the last one once more, and do not count.
                const u32 index = min(i + j, states.end - 1);
                lse[j] = type.load(row.s(index));
                values[j].load(row.v(index) + d);
            }
            float max = weights.max;
#pragma unroll
            for (u32 j = 0; j < AT_ONCE; j++) {
                lse[j] = i + j < states.end ? without_keys(lse[j]) : minus_infinity();
                max = fmaxf(max, lse[j]);
            }
            Weights risen(p, max);
            const float kept = risen.weight(weights.max);
            risen.sum = weights.sum * kept;
            sum.scale(kept);
#pragma unroll
            for (u32 j = 0; j < AT_ONCE; j++) {
                const float weight = risen.weight(lse[j]);
                risen.sum += weight;
                sum.add(weight, values[j]);
            }
            weights = risen;
        }
        sum.scale(weights.factor());
        out.store(d, sum);
    }
    return weights.lse();
}

// Two states in `first` and `second`, whose rows are at most a vector per lane. Returns the lse.
template <class Lse, class Output>
__device__ __forceinline__ float merge_two(const FolioMergeStatesParams &p, const Position &at, bool has_first,
                                           const Lse &type, const Output &out) {
    // Lanes past the end of the row read its last vector and store nothing.
    const u32 d = min(VECTOR * at.lane, p.head_dim - VECTOR);
    const State<Lse> a(p.first, at, 0, type), b(p.second, at, 0, type);
    const float stated_a = has_first ? type.load(a.s) : minus_infinity(), stated_b = type.load(b.s);
    Elements<VECTOR, Element> of_a = {}, of_b;
    if (has_first) of_a.load(a.v + d);
    of_b.load(b.v + d);
    const float lse_a = without_keys(stated_a), lse_b = without_keys(stated_b);
    Weights weights(p, fmaxf(lse_a, lse_b));
    const float weight_a = weights.weight(lse_a), weight_b = weights.weight(lse_b);
    weights.sum = weight_a + weight_b;
    const float factor = weights.factor();
    Sum<VECTOR> sum = {};
    sum.add(weight_a * factor, of_a);
    sum.add(weight_b * factor, of_b);
    if (d == VECTOR * at.lane) out.store(d, sum);
    return weights.lse();
}

}  // namespace folio

extern "C" __global__ void __launch_bounds__(FOLIO_THREADS)
    folio_merge_states(const __grid_constant__ FolioMergeStatesParams p) {
    using namespace folio;
    wait_for_prerequisites();
    const Position at(p);
    if (!at.wanted) return;
    const Range states = {0, p.num_states};
    const Floats type;
    const SameType out(p, at);
    store_lse(
        p, at, type,
        p.vectors ? merge_states<VECTOR, 2>(p, at, states, type, out) : merge_states<1, 2>(p, at, states, type, out));
}

extern "C" __global__ void __launch_bounds__(FOLIO_THREADS)
    folio_merge_state(const __grid_constant__ FolioMergeStatesParams p) {
    using namespace folio;
    wait_for_prerequisites();
    const Position at(p);
    if (!at.wanted) return;
    const Floats type;
    store_lse(p, at, type, merge_two(p, at, true, type, SameType(p, at)));
}

extern "C" __global__ void __launch_bounds__(FOLIO_THREADS)
    folio_merge_states_general(const __grid_constant__ FolioMergeGeneralParams p) {
    using namespace folio;
    wait_for_prerequisites();
    const Position at(p.merge);
    if (!at.wanted) return;
    const Range states = states_of(p, at.token);
    const AnyFloats type(p);
    const AnyType out(p, at);
    store_lse(p.merge, at, type,
              p.merge.vectors ? merge_as_they_come<VECTOR>(p.merge, at, states, type, out)
                              : merge_states<1, 4>(p.merge, at, states, type, out));
}

extern "C" __global__ void __launch_bounds__(FOLIO_THREADS)
    folio_merge_state_general(const __grid_constant__ FolioMergeGeneralParams p) {
    using namespace folio;
    wait_for_prerequisites();
    const Position at(p.merge);
    if (!at.wanted) return;
    const AnyFloats type(p);
    store_lse(p.merge, at, type, merge_two(p.merge, at, at.token < p.num_tokens_with_first, type, AnyType(p, at)));
}
