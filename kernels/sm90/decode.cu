// Split-KV decode attention for Hopper: up to 16 packed query rows (q_len x group) per KV head and CTA, the keys
// streamed through per-warp rings, products by mma.sync. Memory-bound by design: every key is read once per 16
// rows and the arithmetic hides behind it. Longer queries belong to the prefill kernel.
//
// Grid (num_kv_heads, row tiles, items): heads fastest, so that CTAs that run together read the same pages.
// A CTA takes items z, z + gridDim.z, ... below counts[0]; the rest exit. Warp w takes tiles w, w + kWarps, ...
// of an item's keys on its own, without a barrier; the warps' results are merged through shared memory.
//
// Defines, one set per kernel-table row:
//   FOLIO_Q_BF16 | FOLIO_Q_F16                 type of q
//   FOLIO_KV_E4M3 | FOLIO_KV_E5M2 (optional)   type of the cache when it is not that of q
//   FOLIO_HEAD_DIM_QK, FOLIO_HEAD_DIM_VO       multiples of 64
//   FOLIO_DECODE_WARPS, FOLIO_DECODE_STAGES, FOLIO_DECODE_TILE, FOLIO_DECODE_CTAS_PER_SM
#if defined(FOLIO_KV_E4M3) || defined(FOLIO_KV_E5M2)
#define FOLIO_KV_BYTES 1
#else
#define FOLIO_KV_BYTES 2
#endif

#include "common/output.cuh"
#include "common/tma.cuh"
#include "params.h"
#include "sm90/decode_load.cuh"
#include "sm90/decode_tile.cuh"

namespace folio {

#if defined(FOLIO_Q_BF16)
using QueryType = Bf16;
#else
using QueryType = F16;
#endif
#if defined(FOLIO_KV_E4M3)
using CacheType = E4m3;
#elif defined(FOLIO_KV_E5M2)
using CacheType = E5m2;
#else
using CacheType = QueryType;
#endif

using Op = Operands<CacheType>;
using Math = Op::Math;
using Shape = RingShape<FOLIO_DECODE_TILE, FOLIO_HEAD_DIM_QK * FOLIO_KV_BYTES, FOLIO_HEAD_DIM_VO * FOLIO_KV_BYTES,
                        FOLIO_DECODE_STAGES, FOLIO_DECODE_WARPS>;
using KTile = RowTile<Shape::kKRowBytes>;
using VTile = RowTile<Shape::kVRowBytes>;

constexpr int kHeadDimQk = FOLIO_HEAD_DIM_QK, kHeadDimVo = FOLIO_HEAD_DIM_VO;
constexpr int kTileTokens = Shape::kTileTokens;
constexpr int kThreads = 32 * Shape::kWarps;
constexpr int kRows = 16;
constexpr int kKPairs = KTile::kRowChunks / 2, kVPairs = VTile::kRowChunks / 2;
constexpr float kLog2E = 1.4426950408889634f;
// Below every finite score in base 2, and finite, so that a difference of two peaks is never NaN.
constexpr float kNoPeak = -1e30f;
// A stale peak is kept until a score exceeds it by this much: probabilities stay below 2^8.
constexpr float kPeakSlack = 8.f;

// A warp's rows of partial results in shared memory, padded against bank conflicts.
constexpr int kMergePitch = kHeadDimVo + 8;
static_assert(kRows * kMergePitch * 4 <= Shape::kWarpBytes);

struct alignas(16) MergeState {
    float peak[Shape::kWarps][kRows], total[Shape::kWarps][kRows];
};

constexpr int kBarrierBytes = (Shape::kWarps * Shape::kStages * 8 + 15) / 16 * 16;

// What one lane knows of its two rows, g = lane / 4 and g + 8. Rows past the last repeat the last.
struct LaneRows {
    int begin[2], end[2];  // visible keys
    int position[2];
    unsigned query[2], head[2];  // query row within the item; query head
};

struct Item {
    FolioWorkItem work;
    FolioItemPlace place;
    unsigned kv_head, first_row, num_rows;  // rows first_row .. of the item's q_len x group belong to this CTA
};

__device__ __forceinline__ int clamp_to_int(folio_i64 x, int low, int high) {
    return static_cast<int>(x < low ? low : x > high ? high : x);
}

// Keys that the row at `position` sees, within the item.
__device__ __forceinline__ void visible_keys(const FolioAttentionParams &params, const Item &item, int position,
                                             int &begin, int &end) {
    const int first = static_cast<int>(item.work.kv_start), last = static_cast<int>(item.work.kv_end);
    const folio_i64 p = position;
    folio_i64 low = first, high = last;
    if (params.mask_mode == FOLIO_MASK_CAUSAL && p + 1 < high) {
        high = p + 1;
    }
    if (params.window_right >= 0 && p + params.window_right + 1 < high) {
        high = p + params.window_right + 1;
    }
    if (params.window_left >= 0 && p - params.window_left > low) {
        low = p - params.window_left;
    }
    begin = clamp_to_int(low, first, last);
    end = clamp_to_int(high, first, last);
}

__device__ __forceinline__ int row_position(const Item &item, unsigned query) {
    return item.place.position + static_cast<int>(query);
}

// Scores in base 2: scale, cap, then position bias; masked in the tile loop.
struct ScoreRule {
    float scale[2];     // per row, times log2(e)
    float cap, cap_rate;  // cap * log2(e), or 0; 2 * log2(e) / cap
    float slope[2];     // ALiBi slopes times log2(e)
    bool plain, alibi, alibi_sqrt;

    __device__ __forceinline__ float operator()(float score, int row, int position, int key) const {
        float x = score;
        if (cap != 0.f) {
            // tanh(y) = 1 - 2 / (1 + e^2y): exact to rounding where tanh.approx is not.
            x = cap - __fdividef(2.f * cap, 1.f + exp2_approx(x * cap_rate));
        }
        if (alibi) {
            const int distance = position - key;
            const float bias = !alibi_sqrt ? -static_cast<float>(distance)
                               : distance >= 0 ? -sqrtf(static_cast<float>(distance)) : 0.f;
            x += slope[row] * bias;
        }
        return x;
    }
};

// The 16 query rows as mma operands. Every warp has the same; where they would not fit in registers beside the
// accumulators they live in shared memory.
class QueryRows {
  public:
    static constexpr int kSteps = kHeadDimQk / 16;
    static constexpr bool kShared = kHeadDimQk > 192;
    static constexpr int kSharedBytes = kShared ? kSteps * 32 * static_cast<int>(sizeof(uint4)) : 0;

    // `scale` is multiplied by what the rows were divided by. All warps call this together.
    __device__ __forceinline__ void load(const FolioAttentionParams &params, const Item &item, const LaneRows &rows,
                                         uint4 *shared, unsigned warp, unsigned lane, float (&scale)[2]) {
        Fragment fragments[kSteps];
        read(fragments, params, item, rows, lane);
        if constexpr (Op::kFp8 && is_same<QueryType, Bf16>) {
            narrow_to_f16(fragments, scale);
        }
        if constexpr (kShared) {
            shared_ = shared + lane;
#pragma unroll
            for (int k = 0; k < kSteps; ++k) {
                const unsigned(&r)[4] = fragments[k].r;
                if (k % Shape::kWarps == warp) {
                    shared[k * 32 + lane] = make_uint4(r[0], r[1], r[2], r[3]);
                }
            }
            __syncthreads();
        } else {
#pragma unroll
            for (int k = 0; k < kSteps; ++k) {
                held_[k] = fragments[k];
            }
        }
    }

    __device__ __forceinline__ Fragment step(int k) const {
        if constexpr (kShared) {
            const uint4 x = shared_[k * 32];
            return {{x.x, x.y, x.z, x.w}};
        } else {
            return held_[k];
        }
    }

  private:
    static __device__ __forceinline__ void read(Fragment (&fragments)[kSteps], const FolioAttentionParams &params,
                                                const Item &item, const LaneRows &rows, unsigned lane) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const folio_i64 token = item.place.q_token + static_cast<folio_i64>(rows.query[r]);
            const char *row = static_cast<const char *>(params.q.data) +
                              2 * (token * params.q.stride_token + rows.head[r] * params.q.stride_head);
#pragma unroll
            for (int k = 0; k < kSteps; ++k) {
                if constexpr (Op::kFp8) {
                    const uint2 four = *reinterpret_cast<const uint2 *>(row + 32 * k + 8 * (lane & 3));
                    fragments[k].r[r] = four.x;
                    fragments[k].r[2 + r] = four.y;
                } else {
                    const char *two = row + 32 * k + 4 * (lane & 3);
                    fragments[k].r[r] = *reinterpret_cast<const unsigned *>(two);
                    fragments[k].r[2 + r] = *reinterpret_cast<const unsigned *>(two + 16);
                }
            }
        }
    }

    // bf16 rows become f16 without loss of range: each row is divided by a power of two that brings its largest
    // element to [1, 2).
    static __device__ __forceinline__ void narrow_to_f16(Fragment (&fragments)[kSteps], float (&scale)[2]) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float largest = 0.f;
#pragma unroll
            for (int k = 0; k < kSteps; ++k) {
                const float2 a = unpack2<Bf16>(fragments[k].r[r]), b = unpack2<Bf16>(fragments[k].r[2 + r]);
                largest = fmaxf(largest, fmaxf(fmaxf(fabsf(a.x), fabsf(a.y)), fmaxf(fabsf(b.x), fabsf(b.y))));
            }
            largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
            largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
            // Exponents are kept where both 2^e and 2^-e are normal; a row of zeros stays as it is.
            const unsigned exponent = min(max(__float_as_uint(largest) >> 23, 1u), 253u);
            const float inverse = __uint_as_float((254 - exponent) << 23);
            scale[r] *= __uint_as_float(exponent << 23);
#pragma unroll
            for (int k = 0; k < kSteps; ++k) {
                const float2 a = unpack2<Bf16>(fragments[k].r[r]), b = unpack2<Bf16>(fragments[k].r[2 + r]);
                fragments[k].r[r] = pack2<F16>(a.x * inverse, a.y * inverse);
                fragments[k].r[2 + r] = pack2<F16>(b.x * inverse, b.y * inverse);
            }
        }
    }

    Fragment held_[kShared ? 1 : kSteps];
    const uint4 *shared_;
};

// Online softmax of one warp over its tiles.
struct WarpState {
    float o[kHeadDimVo / 8][4];
    float peak[2], total[2];

    __device__ __forceinline__ void reset() {
#pragma unroll
        for (int i = 0; i < kHeadDimVo / 8; ++i) {
            o[i][0] = o[i][1] = o[i][2] = o[i][3] = 0.f;
        }
        peak[0] = peak[1] = kNoPeak;
        total[0] = total[1] = 0.f;
    }

    __device__ __forceinline__ void raise_peaks(float first, float second) {
        const float a = exp2_approx(peak[0] - first), b = exp2_approx(peak[1] - second);
        peak[0] = first;
        peak[1] = second;
        total[0] *= a;
        total[1] *= b;
#pragma unroll
        for (int i = 0; i < kHeadDimVo / 8; ++i) {
            o[i][0] *= a;
            o[i][1] *= a;
            o[i][2] *= b;
            o[i][3] *= b;
        }
    }

    // One tile: `k` and `v` are its lane-adjusted addresses, `edge` says that some row does not see all of it.
    __device__ __forceinline__ void add_tile(const QueryRows &q, const ScoreRule &rule, const LaneRows &rows,
                                             unsigned k, unsigned v, int token, bool edge, unsigned lane) {
        float s[kTileTokens / 8][4];
        scores(s, q, k);
        const int column = token + 2 * (lane & 3);
        if (!rule.plain) {
#pragma unroll
            for (int n = 0; n < kTileTokens / 8; ++n) {
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    s[n][j] = rule(s[n][j] * rule.scale[j >> 1], j >> 1, rows.position[j >> 1], column + 8 * n + (j & 1));
                }
            }
        } else {
#pragma unroll
            for (int n = 0; n < kTileTokens / 8; ++n) {
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    s[n][j] *= rule.scale[j >> 1];
                }
            }
        }
        if (edge) {
#pragma unroll
            for (int n = 0; n < kTileTokens / 8; ++n) {
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    const int key = column + 8 * n + (j & 1);
                    s[n][j] = key >= rows.begin[j >> 1] && key < rows.end[j >> 1] ? s[n][j] : -kInfinity;
                }
            }
        }
        unsigned p[kTileTokens / 16][4];
        probabilities(p, s);
#pragma unroll
        for (int t = 0; t < kTileTokens / 16; ++t) {
#pragma unroll
            for (int pair = 0; pair < kVPairs; ++pair) {
                unsigned r[4];
                ldmatrix_x4_trans(r, VTile::chunk_pair(v + t * 2 * VTile::kGroupBytes, pair));
                Op::add_values(o, p[t], pair, r);
            }
        }
    }

  private:
    static __device__ __forceinline__ void scores(float (&s)[kTileTokens / 8][4], const QueryRows &q, unsigned k) {
#pragma unroll
        for (int n = 0; n < kTileTokens / 8; ++n) {
            s[n][0] = s[n][1] = s[n][2] = s[n][3] = 0.f;
        }
#pragma unroll
        for (int pair = 0; pair < kKPairs; ++pair) {
#pragma unroll
            for (int t = 0; t < kTileTokens / 16; ++t) {
                unsigned r[4];
                ldmatrix_x4(r, KTile::chunk_pair(k + t * 2 * KTile::kGroupBytes, pair));
                Op::add_scores(s[2 * t], s[2 * t + 1], q, pair, r);
            }
        }
    }

    __device__ __forceinline__ void probabilities(unsigned (&p)[kTileTokens / 16][4],
                                                  const float (&s)[kTileTokens / 8][4]) {
        float first = peak[0], second = peak[1];
#pragma unroll
        for (int n = 0; n < kTileTokens / 8; ++n) {
            first = fmaxf(first, fmaxf(s[n][0], s[n][1]));
            second = fmaxf(second, fmaxf(s[n][2], s[n][3]));
        }
#pragma unroll
        for (int lanes = 1; lanes <= 2; lanes *= 2) {
            first = fmaxf(first, __shfl_xor_sync(~0u, first, lanes));
            second = fmaxf(second, __shfl_xor_sync(~0u, second, lanes));
        }
        if (__any_sync(~0u, first - peak[0] > kPeakSlack || second - peak[1] > kPeakSlack)) {
            raise_peaks(first, second);
        }
#pragma unroll
        for (int n = 0; n < kTileTokens / 8; ++n) {
            const float a = exp2_approx(s[n][0] - peak[0]), b = exp2_approx(s[n][1] - peak[0]);
            const float c = exp2_approx(s[n][2] - peak[1]), d = exp2_approx(s[n][3] - peak[1]);
            total[0] += a + b;
            total[1] += c + d;
            p[n / 2][n % 2 * 2] = pack2<Math>(a, b);
            p[n / 2][n % 2 * 2 + 1] = pack2<Math>(c, d);
        }
    }
};

// Writes zeros over the values of keys that no row sees: 0 x NaN would reach the output.
__device__ __forceinline__ void clear_values(unsigned v_tile, int token, const KeySpan &span, unsigned lane) {
    for (unsigned piece = lane; piece < kTileTokens * VTile::kRowChunks; piece += 32) {
        const unsigned row = piece / VTile::kRowChunks, chunk = piece % VTile::kRowChunks;
        const int key = token + static_cast<int>(row);
        if (key < span.begin || key >= span.end) {
            store_shared_zero_16(v_tile + VTile::at(row, chunk));
        }
    }
    fence_proxy_async();
    __syncwarp();
}

// Leaves a warp's rows in shared memory, over its own ring, which is drained.
__device__ __forceinline__ void publish(WarpState &state, MergeState &merge, float *rows, unsigned num_rows,
                                        unsigned warp, unsigned lane) {
    const unsigned g = lane >> 2, i = lane & 3;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        float sum = state.total[r];
        sum += __shfl_xor_sync(~0u, sum, 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        const unsigned row = g + 8 * r;
        if (row >= num_rows) {
            continue;
        }
        if (i == 0) {
            merge.peak[warp][row] = state.peak[r];
            merge.total[warp][row] = sum;
        }
        float *out = rows + row * kMergePitch;
        if constexpr (Op::kFp8) {
#pragma unroll
            for (int c = 0; c < kHeadDimVo / 16; ++c) {
                *reinterpret_cast<float4 *>(out + 16 * c + 4 * i) =
                    make_float4(state.o[2 * c][2 * r], state.o[2 * c + 1][2 * r], state.o[2 * c][2 * r + 1],
                                state.o[2 * c + 1][2 * r + 1]);
            }
        } else {
#pragma unroll
            for (int c = 0; c < kHeadDimVo / 8; ++c) {
                *reinterpret_cast<float2 *>(out + 8 * c + 2 * i) = make_float2(state.o[c][2 * r], state.o[c][2 * r + 1]);
            }
        }
    }
}

// Where one row's result goes, and what it is multiplied by.
struct RowSink {
    const FolioAttentionParams &params;
    const FolioDecodeLaunch &launch;
    const Item &item;

    __device__ __forceinline__ void store(unsigned row, unsigned column, float4 sum, SoftmaxTotal total) const {
        const unsigned packed = item.first_row + row;
        const unsigned query = packed / launch.group_size;
        const unsigned head = item.kv_head * launch.group_size + packed - query * launch.group_size;
        float rescale = 1.f;
        const bool partial = item.work.partial != FOLIO_NO_PARTIAL;
        if (!partial && params.sinks) {
            total = add_sink(total, params.sinks[head] * kLog2E, rescale);
        }
        float scale = total.total == 0.f ? 0.f : rescale / total.total;
        if (partial) {
            const folio_i64 entry = static_cast<folio_i64>(item.work.partial + query) * params.num_qo_heads + head;
            *reinterpret_cast<float4 *>(params.plan.partial_o + entry * kHeadDimVo + column) = scaled(sum, scale);
            if (column == 0) {
                params.plan.partial_lse[entry] = total.base2_lse();
            }
            return;
        }
        const folio_i64 token = item.place.q_token + static_cast<folio_i64>(query);
        scale *= output_scale(params, launch.output_type, item.kv_head);
        store_output4(output_row(params.o, launch.output_type, token, head), launch.output_type, column,
                      scaled(sum, scale));
        if (column == 0 && params.lse) {
            const float unit = params.flags & FOLIO_RUN_LSE_BASE_2 ? 1.f : 1.f / kLog2E;
            params.lse[token * params.lse_stride_token + head * params.lse_stride_head] = total.base2_lse() * unit;
        }
    }

    static __device__ __forceinline__ float4 scaled(float4 x, float f) {
        return make_float4(x.x * f, x.y * f, x.z * f, x.w * f);
    }
};

// Sums the warps' rows in the order of the warps and stores them.
__device__ __forceinline__ void merge_warps(const MergeState &merge, const unsigned char *ring, const RowSink &sink) {
    constexpr unsigned kPieces = kHeadDimVo / 4;
    for (unsigned n = threadIdx.x; n < sink.item.num_rows * kPieces; n += kThreads) {
        const unsigned row = n / kPieces, column = n % kPieces * 4;
        float peak = merge.peak[0][row];
#pragma unroll
        for (int w = 1; w < Shape::kWarps; ++w) {
            peak = fmaxf(peak, merge.peak[w][row]);
        }
        float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
        float total = 0.f;
#pragma unroll
        for (int w = 0; w < Shape::kWarps; ++w) {
            const float weight = exp2_approx(merge.peak[w][row] - peak);
            const float4 x = *reinterpret_cast<const float4 *>(
                ring + w * Shape::kWarpBytes + (row * kMergePitch + column) * sizeof(float));
            sum.x += weight * x.x;
            sum.y += weight * x.y;
            sum.z += weight * x.z;
            sum.w += weight * x.w;
            total += weight * merge.total[w][row];
        }
        sink.store(row, column, sum, {peak, total});
    }
}

__device__ __forceinline__ Item read_item(const FolioAttentionParams &params, const FolioDecodeLaunch &launch,
                                          unsigned index) {
    Item item;
    const uint4 *words = reinterpret_cast<const uint4 *>(params.plan.items + index);
    const uint4 a = words[0], b = words[1], c = *reinterpret_cast<const uint4 *>(params.plan.places + index);
    item.work = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
    item.place.page_start = static_cast<folio_i64>(static_cast<unsigned long long>(c.y) << 32 | c.x);
    item.place.q_token = static_cast<int>(c.z);
    item.place.position = static_cast<int>(c.w);
    item.kv_head = blockIdx.x;
    item.first_row = blockIdx.y * kRows;
    const unsigned rows = item.work.q_len * launch.group_size;
    item.num_rows = rows <= item.first_row ? 0 : min(rows - item.first_row, static_cast<unsigned>(kRows));
    return item;
}

__device__ __forceinline__ LaneRows lane_rows(const FolioAttentionParams &params, const FolioDecodeLaunch &launch,
                                              const Item &item, unsigned lane) {
    LaneRows rows;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const unsigned packed = item.first_row + min((lane >> 2) + 8 * r, item.num_rows - 1);
        rows.query[r] = packed / launch.group_size;
        rows.head[r] = item.kv_head * launch.group_size + packed - rows.query[r] * launch.group_size;
        rows.position[r] = row_position(item, rows.query[r]);
        visible_keys(params, item, rows.position[r], rows.begin[r], rows.end[r]);
    }
    return rows;
}

__device__ __forceinline__ ScoreRule score_rule(const FolioAttentionParams &params, const Item &item,
                                                const LaneRows &rows) {
    ScoreRule rule;
    float scale = params.logits_scale * kLog2E;
    if (params.k_scales) {
        scale *= params.k_scales[static_cast<folio_i64>(item.kv_head) * params.k_scales_stride];
    }
    rule.scale[0] = rule.scale[1] = scale;
    rule.cap = params.logits_soft_cap * kLog2E;
    // The scaled score carries a factor log2(e) already.
    rule.cap_rate = params.logits_soft_cap != 0.f ? 2.f / params.logits_soft_cap : 0.f;
    rule.alibi = params.alibi_slopes != nullptr;
    rule.alibi_sqrt = params.flags & FOLIO_RUN_ALIBI_SQRT;
    rule.plain = rule.cap == 0.f && !rule.alibi;
    rule.slope[0] = rule.alibi ? params.alibi_slopes[rows.head[0]] * kLog2E : 0.f;
    rule.slope[1] = rule.alibi ? params.alibi_slopes[rows.head[1]] * kLog2E : 0.f;
    return rule;
}

// The keys that any row of the CTA sees, and [inner_begin, inner_end), those that all rows see.
struct TileSpan {
    KeySpan keys;
    int inner_begin, inner_end;
    int tiles;  // of this warp
};

__device__ __forceinline__ TileSpan tile_span(const FolioAttentionParams &params, const FolioDecodeLaunch &launch,
                                              const Item &item, unsigned warp) {
    TileSpan span;
    // Later rows of a request see no less at the end and no more at the beginning.
    const unsigned first = item.first_row / launch.group_size;
    const unsigned last = (item.first_row + item.num_rows - 1) / launch.group_size;
    visible_keys(params, item, row_position(item, first), span.keys.begin, span.inner_end);
    visible_keys(params, item, row_position(item, last), span.inner_begin, span.keys.end);
    span.keys.page_ids = params.plan.page_ids + item.place.page_start;
    span.keys.first = span.keys.begin / kTileTokens * kTileTokens;
    span.keys.head = item.kv_head;
    const int all = span.keys.end <= span.keys.begin
                        ? 0 : (span.keys.end - span.keys.first + kTileTokens - 1) / kTileTokens;
    const int mine = all - static_cast<int>(warp);
    span.tiles = mine <= 0 ? 0 : (mine + Shape::kWarps - 1) / Shape::kWarps;
    return span;
}

template <class Loader>
__device__ __forceinline__ void decode(const TensorMap *k_map, const TensorMap *v_map,
                                       const FolioAttentionParams &params, const FolioDecodeLaunch &launch) {
    extern __shared__ __align__(1024) unsigned char shared[];
    MergeState &merge = *reinterpret_cast<MergeState *>(shared + Shape::kRingBytes + kBarrierBytes);
    uint4 *query = reinterpret_cast<uint4 *>(shared + Shape::kRingBytes + kBarrierBytes + sizeof(MergeState));
    const unsigned warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const unsigned ring = shared_address(shared) + warp * Shape::kWarpBytes;
    const unsigned barriers = shared_address(shared) + Shape::kRingBytes + warp * Shape::kStages * 8;
    Loader loader(k_map, v_map, params, launch, ring, barriers, warp, lane);
    const unsigned k_lane = KTile::at((lane & 7) + (lane >> 4) * 8, lane >> 3 & 1);
    const unsigned v_lane = Shape::kKBytes + VTile::at(lane & 15, lane >> 4);
    int stage = 0;
    unsigned parity = 0;

    grid_dependency_wait();
    const unsigned num_items = params.plan.counts[0];
    for (unsigned index = blockIdx.z; index == blockIdx.z || index < num_items; index += gridDim.z) {
        // Read before it is known whether there is such an item: one round trip less.
        const Item item = read_item(params, launch, index);
        if (index >= num_items) {
            return;
        }
        if (num_items - index <= gridDim.z) {
            // The combine kernel may come and read its part of the plan; it waits for the results by itself.
            grid_dependency_trigger();
        }
        if (item.num_rows == 0) {
            continue;
        }
        const TileSpan span = tile_span(params, launch, item, warp);
        loader.begin(span.keys, span.tiles);
        for (int i = 0; i < Shape::kStages; ++i) {
            loader.issue(i, stage + i < Shape::kStages ? stage + i : stage + i - Shape::kStages);
        }
        const LaneRows rows = lane_rows(params, launch, item, lane);
        ScoreRule rule = score_rule(params, item, rows);
        QueryRows q;
        q.load(params, item, rows, query, warp, lane, rule.scale);
        WarpState state;
        state.reset();
        int token = span.keys.first + static_cast<int>(warp) * kTileTokens;
#pragma unroll 1
        for (int i = 0; i < span.tiles; ++i) {
            loader.wait(stage, parity);
            const unsigned tile = ring + stage * Shape::kStageBytes;
            const bool edge = token < span.inner_begin || token + kTileTokens > span.inner_end;
            if (!Loader::kZeroFillsRows && edge) {
                clear_values(tile + Shape::kKBytes, token, span.keys, lane);
            }
            state.add_tile(q, rule, rows, tile + k_lane, tile + v_lane, token, edge, lane);
            __syncwarp();
            loader.issue(i + Shape::kStages, stage);
            if (++stage == Shape::kStages) {
                stage = 0;
                parity ^= 1;
            }
            token += Shape::kWarps * kTileTokens;
        }
        publish(state, merge, reinterpret_cast<float *>(shared + warp * Shape::kWarpBytes), item.num_rows, warp, lane);
        __syncthreads();
        merge_warps(merge, shared, {params, launch, item});
        fence_proxy_async();
        __syncthreads();
    }
}

}  // namespace folio

extern "C" __global__ void __launch_bounds__(folio::kThreads, FOLIO_DECODE_CTAS_PER_SM)
folio_sm90_decode_tma(const __grid_constant__ folio::TensorMap k_map, const __grid_constant__ folio::TensorMap v_map,
                      const __grid_constant__ FolioAttentionParams params,
                      const __grid_constant__ FolioDecodeLaunch launch) {
    folio::decode<folio::TmaLoader<folio::Shape>>(&k_map, &v_map, params, launch);
}

extern "C" __global__ void __launch_bounds__(folio::kThreads, FOLIO_DECODE_CTAS_PER_SM)
folio_sm90_decode_gather(const __grid_constant__ FolioAttentionParams params,
                         const __grid_constant__ FolioDecodeLaunch launch) {
    folio::decode<folio::GatherLoader<folio::Shape>>(nullptr, nullptr, params, launch);
}
