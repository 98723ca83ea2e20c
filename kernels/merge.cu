// Merges attention states of the caller's: n per row and head, or two in separate tensors. A state without
// keys has lse -inf; +inf and NaN count as that too, as FlashAttention-2 marks empty rows with +inf.
//
// A row and head belong to lanes of one warp, which read every lse before one of them writes the merged
// one: outputs may be the inputs themselves. Compiled per element type, FOLIO_Q.
#include "common/paged.cuh"
#include "common/softmax.cuh"

namespace folio {

typedef FOLIO_Q Element;

// N elements that lie side by side, as fp32.
template <int N>
struct Values {
    float x[N];

    static __device__ __forceinline__ Values load(const Element::Storage *source) {
        Values values;
        if constexpr (N == 1) {
            values.x[0] = Element::load(*source);
        } else {
            union {
                uint4 vectors[N * sizeof(Element::Storage) / 16];
                Element::Storage elements[N];
            };
#pragma unroll
            for (u32 i = 0; i < N * sizeof(Element::Storage) / 16; i++) {
                vectors[i] = reinterpret_cast<const uint4 *>(source)[i];
            }
#pragma unroll
            for (int i = 0; i < N; i++) values.x[i] = Element::load(elements[i]);
        }
        return values;
    }

    __device__ __forceinline__ void store(Element::Storage *target) const {
        if constexpr (N == 1) {
            *target = Element::store(x[0]);
        } else {
            union {
                uint4 vectors[N * sizeof(Element::Storage) / 16];
                Element::Storage elements[N];
            };
#pragma unroll
            for (int i = 0; i < N; i++) elements[i] = Element::store(x[i]);
#pragma unroll
            for (u32 i = 0; i < N * sizeof(Element::Storage) / 16; i++) {
                reinterpret_cast<uint4 *>(target)[i] = vectors[i];
            }
        }
    }
};

// State `index` of a row and head.
struct State {
    const Element::Storage *v;
    float lse;

    __device__ __forceinline__ State(const FolioMergeStatesParams &p, i64 token, u32 head, u32 index) {
        const bool second = p.second.v && index == 1;
        const FolioState &states = second ? p.second : p.first;
        const i64 n = p.second.v ? 0 : index;
        v = static_cast<const Element::Storage *>(states.v) + token * states.v_stride_token + n * states.v_stride_state +
            head * states.v_stride_head;
        lse = states.s[token * states.s_stride_token + n * states.s_stride_state + head * states.s_stride_head];
        if (!(lse < __uint_as_float(0x7f800000u))) lse = minus_infinity();
    }
};

// The row's lse statistics, in the states' base.
struct Weights {
    float max, base, to_base_2, sum;

    __device__ __forceinline__ Weights(const FolioMergeStatesParams &p, float max)
        : max(max), base(exponent_base(max)), to_base_2(p.flags & FOLIO_RUN_LSE_BASE_2 ? 1.0f : LOG2_E), sum(0.0f) {}

    __device__ __forceinline__ float weight(float lse) const { return exp2_approx((lse - base) * to_base_2); }
    __device__ __forceinline__ float factor() const { return sum > 0.0f ? 1.0f / sum : 0.0f; }
    __device__ __forceinline__ float lse() const {
        return sum > 0.0f ? max + log2_approx(sum) / to_base_2 : minus_infinity();
    }
};

// total += weight * values; what an empty state holds does not count, whatever it is.
template <int N>
__device__ __forceinline__ void add(Values<N> &total, float weight, const Values<N> &values) {
#pragma unroll
    for (int j = 0; j < N; j++) total.x[j] += weight > 0.0f ? weight * values.x[j] : 0.0f;
}

__device__ __forceinline__ Element::Storage *output_row(const FolioMergeStatesParams &p, i64 token, u32 head) {
    return static_cast<Element::Storage *>(p.v_out.data) + token * p.v_out.stride_token + head * p.v_out.stride_head;
}

__device__ __forceinline__ void store_lse(const FolioMergeStatesParams &p, i64 token, u32 head, u32 lane, float lse) {
    __syncwarp(__activemask());
    if (p.s_out && lane == 0) p.s_out[token * p.s_out_stride_token + head * p.s_out_stride_head] = lse;
}

// The most common case: everything is read once, and all reads are under way together.
template <int N>
__device__ __forceinline__ void merge_two(const FolioMergeStatesParams &p, i64 token, u32 head, u32 lane) {
    const State a(p, token, head, 0), b(p, token, head, 1);
    Weights weights(p, fmaxf(a.lse, b.lse));
    const float of_a = weights.weight(a.lse), of_b = weights.weight(b.lse);
    weights.sum = of_a + of_b;
    const float factor = weights.factor();
    Element::Storage *out = output_row(p, token, head);
    for (u32 d = N * lane; d < p.head_dim; d += N << p.log2_lanes) {
        const Values<N> values_a = Values<N>::load(a.v + d), values_b = Values<N>::load(b.v + d);
        Values<N> total = {};
        add(total, of_a * factor, values_a);
        add(total, of_b * factor, values_b);
        total.store(out + d);
    }
    store_lse(p, token, head, lane, weights.lse());
}

template <int N>
__device__ __forceinline__ void merge_many(const FolioMergeStatesParams &p, i64 token, u32 head, u32 lane) {
    float max = minus_infinity();
    for (u32 i = 0; i < p.num_states; i++) max = fmaxf(max, State(p, token, head, i).lse);
    Weights weights(p, max);
    for (u32 i = 0; i < p.num_states; i++) weights.sum += weights.weight(State(p, token, head, i).lse);
    const float factor = weights.factor();
    Element::Storage *out = output_row(p, token, head);
    for (u32 d = N * lane; d < p.head_dim; d += N << p.log2_lanes) {
        Values<N> total = {};
#pragma unroll 2
        for (u32 i = 0; i < p.num_states; i++) {
            const State state(p, token, head, i);
            add(total, weights.weight(state.lse) * factor, Values<N>::load(state.v + d));
        }
        total.store(out + d);
    }
    store_lse(p, token, head, lane, weights.lse());
}

template <int N>
__device__ __forceinline__ void merge_row(const FolioMergeStatesParams &p, i64 token, u32 head, u32 lane) {
    if (p.num_states == 2) {
        merge_two<N>(p, token, head, lane);
    } else {
        merge_many<N>(p, token, head, lane);
    }
}

}  // namespace folio

extern "C" __global__ void __launch_bounds__(FOLIO_THREADS)
    folio_merge_states(const __grid_constant__ FolioMergeStatesParams p) {
    using namespace folio;
    wait_for_prerequisites();
    const u32 row = blockIdx.x * (FOLIO_THREADS >> p.log2_lanes) + (threadIdx.x >> p.log2_lanes);
    const u32 token = divide(row, p.num_heads), head = row - token * p.num_heads.divisor;
    if (token >= p.num_tokens || (p.mask && p.mask[token * p.mask_stride] == 0)) return;
    const u32 lane = threadIdx.x & ((1u << p.log2_lanes) - 1);
    if (p.vectors) {
        merge_row<8>(p, token, head, lane);
    } else {
        merge_row<1>(p, token, head, lane);
    }
}
