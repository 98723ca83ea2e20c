// The decode kernel's arithmetic: query operands, and one warp's online softmax over its tiles. Loads of keys and
// values are load.cuh's, the end of an item is output.cuh's.
//
// Scores are k^T q with 16 tokens by 8 rows, outputs v p with 16 dimensions by 8 rows: with eight rows per KV head no
// part of an instruction is padding.
#pragma once

#include "sm90/decode/block_scales.cuh"
#include "sm90/decode/mask.cuh"
#include "sm90/decode/new_tokens.cuh"
#include "sm90/decode/stored_query.cuh"
#include "sm90/decode/token_scales.cuh"

namespace folio::decode {

// The packed rows as mma operands. Warps of a row group have the same; where they would not fit in registers beside the
// accumulators they live in shared memory.
class QueryRows {
public:
    static constexpr int STEPS = QUERY_STEPS;
    static constexpr int GROUP_FRAGMENTS = COLUMN_TILES * QUERY_PARTS * STEPS * 32;
    static_assert(!SHARED_QUERIES || ROW_GROUPS * GROUP_FRAGMENTS * sizeof(NarrowFragment) == QUERY_BYTES);

    // What the rows were divided by is multiplied into the scales of `logits`; new `tokens` have made the rows. All warps
    // call this together.
    template <class Tokens>
    __device__ __forceinline__ void load(const FolioPaddedDecodeParams &params, const Item &item,
                                         NarrowFragment *shared, const WarpPlace &place, u32 lane, LaneLogits &logits,
                                         const Tokens &tokens) {
        lane_fragments = shared + place.row_group * GROUP_FRAGMENTS + lane;
#pragma unroll
        for (int c = 0; c < COLUMN_TILES; ++c) {
            NarrowFragment fragments[QUERY_PARTS][STEPS];
            if constexpr (STORED) {
                read_stored(fragments, params, item, c, lane, logits);
            } else {
                if constexpr (Tokens::ARE_NEW) {
                    tokens.read_query(fragments[0], item, c, lane);
                } else {
                    read_query(fragments[0], params, item, c, lane);
                }
                if constexpr (Op::BITS == 8) {
                    if (params.bf16_queries) {
                        of_lane(narrow_to_f16(fragments[0]), lane,
                                [&](int j, float power) { logits.scale[c][j] *= power; });
                    }
                }
            }
#pragma unroll
            for (int part = 0; part < QUERY_PARTS; ++part) {
#pragma unroll
                for (int k = 0; k < STEPS; ++k) {
                    const int at = index(c, part, k);
                    if constexpr (!SHARED_QUERIES) {
                        held[at] = fragments[part][k];
                    } else if (k % KEY_GROUPS == place.key_group) {
                        lane_fragments[at * 32] = fragments[part][k];
                    }
                }
            }
        }
        if constexpr (SHARED_QUERIES) __syncthreads();
    }

    // One of the numbers that the query is the sum of.
    __device__ __forceinline__ NarrowFragment step(int column_tile, int part, int k) const {
        if constexpr (SHARED_QUERIES) {
            return lane_fragments[index(column_tile, part, k) * 32];
        } else {
            return held[index(column_tile, part, k)];
        }
    }

private:
    static constexpr __device__ __forceinline__ int index(int column_tile, int part, int k) {
        return (column_tile * QUERY_PARTS + part) * STEPS + k;
    }

    // Calls `use` with the numbers of the two rows whose scores a lane holds; x is that of row lane / 4.
    template <class Use>
    static __device__ __forceinline__ void of_lane(float x, u32 lane, Use use) {
        use(0, __shfl_sync(FULL_WARP, x, 8 * (lane & 3)));
        use(1, __shfl_sync(FULL_WARP, x, 8 * (lane & 3) + 4));
    }

    static __device__ __forceinline__ void read_stored(NarrowFragment (&fragments)[QUERY_PARTS][STEPS],
                                                       const FolioPaddedDecodeParams &params, const Item &item, int c,
                                                       u32 lane, LaneLogits &logits) {
        const StoredQuery query(fragments, stored_params(params), item, c, lane);
        of_lane(query.unit, lane, [&](int j, float unit) { logits.scale[c][j] *= unit; });
        if constexpr (ZERO_POINTS) of_lane(query.bias, lane, [&](int j, float bias) { logits.bias[c][j] = bias; });
    }

    NarrowFragment held[SHARED_QUERIES ? 1 : COLUMN_TILES * QUERY_PARTS * STEPS];
    NarrowFragment *lane_fragments;
};

// Where a lane finds its part of a tile: addresses for the first block of 16 tokens of the first KV head, relative to the
// stage, and the distances to others.
struct TileAddress {
    u32 k, v, k_block, v_block, k_head, v_head;

    __device__ __forceinline__ TileAddress(u32 boxes_log2, u32 lane) {
        const StageStrides<Shape, KTile> key(boxes_log2);
        const StageStrides<Shape, VTile> value(boxes_log2);
        k = Op::key_row(lane) / 8 * key.group + KTile::at(Op::key_row(lane) & 7, Op::key_chunk(lane));
        v = Shape::K_BYTES + Op::value_row(lane) / 8 * value.group +
            VTile::at(Op::value_row(lane) & 7, Op::value_chunk(lane));
        k_block = key.block;
        v_block = value.block;
        k_head = key.head;
        v_head = value.head;
    }
};

// Online softmax of one warp. Lane 4g + i holds scores of tokens g and g + 8 and rows 2i, 2i + 1, and outputs of the
// same rows.
struct WarpState {
    static constexpr int BLOCKS = HEAD_DIM_VO / 16;
    float o[COLUMN_TILES][BLOCKS][4];
    float row_max[COLUMN_TILES][2], row_sum[COLUMN_TILES][2];

    __device__ __forceinline__ void reset() {
#pragma unroll
        for (int c = 0; c < COLUMN_TILES; ++c) {
            row_max[c][0] = row_max[c][1] = NO_MAX;
            row_sum[c][0] = row_sum[c][1] = 0.0f;
#pragma unroll
            for (int b = 0; b < BLOCKS; ++b) o[c][b][0] = o[c][b][1] = o[c][b][2] = o[c][b][3] = 0.0f;
        }
    }

    // `edge` says that some row may not see all of the tile that starts at `token`; `seen` holds nothing otherwise.
    __device__ __forceinline__ void add_tile(const QueryRows &q, const LaneLogits &logits, const LaneRows &rows,
                                             const SeenKeys &seen, const TokenFactors &factors,
                                             const BlockFactors &blocks, u32 stage, const TileAddress &at, int token,
                                             bool edge, u32 lane) {
        float s[COLUMN_TILES][TILE_TOKENS / 16][4];
        scores(s, q, logits, blocks, stage, at);
        factors.scale(s);
        finish_scores(s, logits, rows, seen, token, edge, lane);
        NarrowFragment p[COLUMN_TILES][TILE_TOKENS / 16];
        probabilities(p, s, factors);
        add_values(p, blocks, stage, at);
    }

private:
    static __device__ __forceinline__ void multiply(float (&sum)[4], const WideFragment &a, const NarrowFragment &b) {
        Math::mma(sum, a.r, b.r[0], b.r[1]);
    }

    static __device__ __forceinline__ void scores(float (&s)[COLUMN_TILES][TILE_TOKENS / 16][4], const QueryRows &q,
                                                  const LaneLogits &logits, const BlockFactors &blocks, u32 stage,
                                                  const TileAddress &at) {
#pragma unroll
        for (int c = 0; c < COLUMN_TILES; ++c) {
#pragma unroll
            for (int t = 0; t < TILE_TOKENS / 16; ++t) {
#pragma unroll
                for (int n = 0; n < 4; ++n) s[c][t][n] = ZERO_POINTS ? -logits.bias[c][n & 1] : 0.0f;
            }
        }
#pragma unroll
        for (int h = 0; h < HEADS; ++h) {
            BlockFactors::Keys of_blocks[TILE_TOKENS / 16];
#pragma unroll
            for (int t = 0; t < TILE_TOKENS / 16; ++t) of_blocks[t] = blocks.keys(h, t);
#pragma unroll
            for (int pair = 0; pair < KTile::ROW_CHUNKS / 2; ++pair) {
#pragma unroll
                for (int t = 0; t < TILE_TOKENS / 16; ++t) {
                    WideFragment a[Op::STEPS_PER_PAIR];
                    Op::load_keys(a, KTile::chunk_pair(stage + at.k + h * at.k_head + t * at.k_block, pair),
                                  blocks.of_pair(of_blocks[t], pair));
#pragma unroll
                    for (int r = 0; r < ROW_TILES; ++r) {
                        const int c = h * ROW_TILES + r;
#pragma unroll
                        for (int i = 0; i < Op::STEPS_PER_PAIR * QUERY_PARTS; ++i) {
                            const int step = i / QUERY_PARTS, part = i % QUERY_PARTS;
                            multiply(s[c][t], a[step], q.step(c, part, pair * Op::STEPS_PER_PAIR + step));
                        }
                    }
                }
            }
        }
    }

    // Calls `use` with each score, its column tile, its row of two and its token; `key` is the lane's first token.
    template <class Use>
    static __device__ __forceinline__ void for_scores(float (&s)[COLUMN_TILES][TILE_TOKENS / 16][4], int key, Use use) {
#pragma unroll
        for (int c = 0; c < COLUMN_TILES; ++c) {
#pragma unroll
            for (int t = 0; t < TILE_TOKENS / 16; ++t) {
#pragma unroll
                for (int n = 0; n < 4; ++n) use(s[c][t][n], c, n & 1, key + 16 * t + 8 * (n >> 1));
            }
        }
    }

    static __device__ __forceinline__ void finish_scores(float (&s)[COLUMN_TILES][TILE_TOKENS / 16][4],
                                                         const LaneLogits &logits, const LaneRows &rows,
                                                         const SeenKeys &seen, int token, bool edge, u32 lane) {
        const int first = static_cast<int>(lane / 4);
        with_rule(logits.rule, [&](const LogitRule &rule) {
            for_scores(s, token + first, [&](float &x, int c, int j, int token) {
                x = rule(x, logits.scale[c][j], logits.slope[c][j], rows.position[c % ROW_TILES][j] - token);
            });
        });
        if (!edge) return;
        for_scores(s, first, [&](float &x, int c, int j, int key) {
            if (!(seen.words[c % ROW_TILES][j] >> key & 1)) x = minus_infinity();
        });
    }

    __device__ __forceinline__ void probabilities(NarrowFragment (&p)[COLUMN_TILES][TILE_TOKENS / 16],
                                                  const float (&s)[COLUMN_TILES][TILE_TOKENS / 16][4],
                                                  const TokenFactors &factors) {
        // The largest of the lane's own weights, in base 2. Lanes compare theirs only where one of them is above the threshold.
        float lane_max[COLUMN_TILES][2];
        bool stale = false;
#pragma unroll
        for (int c = 0; c < COLUMN_TILES; ++c) {
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                float x = row_max[c][j];
#pragma unroll
                for (int t = 0; t < TILE_TOKENS / 16; ++t) {
                    x = fmaxf(
                        x, fmaxf(factors.log_weight(s[c][t][j], c, t, 0), factors.log_weight(s[c][t][2 + j], c, t, 1)));
                }
                lane_max[c][j] = x;
                stale |= x - row_max[c][j] > RESCALE_THRESHOLD;
            }
        }
        if (__any_sync(FULL_WARP, stale)) rescale(lane_max);
#pragma unroll
        for (int c = 0; c < COLUMN_TILES; ++c) {
#pragma unroll
            for (int t = 0; t < TILE_TOKENS / 16; ++t) {
                float e[4];
#pragma unroll
                for (int n = 0; n < 4; ++n) {
                    e[n] = exp2_approx(s[c][t][n] - row_max[c][n & 1]);
                    row_sum[c][n & 1] += e[n];
                    e[n] = factors.weight(e[n], c, t, n >> 1);
                }
                // Rows in pairs, a token per quad of lanes; the operand wants tokens in pairs, a row per quad.
                p[c][t] = {{transpose_8x8(Math::pack(e[0], e[1])), transpose_8x8(Math::pack(e[2], e[3]))}};
            }
        }
    }

    // Rows refer to the largest of all lanes' scores from now on.
    __device__ __forceinline__ void rescale(const float (&lane_max)[COLUMN_TILES][2]) {
#pragma unroll
        for (int c = 0; c < COLUMN_TILES; ++c) {
            float f[2];
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                float new_max = lane_max[c][j];
#pragma unroll
                for (int lanes = 4; lanes <= 16; lanes *= 2) {
                    new_max = fmaxf(new_max, __shfl_xor_sync(FULL_WARP, new_max, lanes));
                }
                f[j] = exp2_approx(row_max[c][j] - new_max);
                row_max[c][j] = new_max;
                row_sum[c][j] *= f[j];
            }
#pragma unroll
            for (int b = 0; b < BLOCKS; ++b) {
#pragma unroll
                for (int n = 0; n < 4; ++n) o[c][b][n] *= f[n & 1];
            }
        }
    }

    __device__ __forceinline__ void add_values(const NarrowFragment (&p)[COLUMN_TILES][TILE_TOKENS / 16],
                                               const BlockFactors &blocks, u32 stage, const TileAddress &at) {
#pragma unroll
        for (int h = 0; h < HEADS; ++h) {
#pragma unroll
            for (int t = 0; t < TILE_TOKENS / 16; ++t) {
                const BlockFactors::Values of_blocks = blocks.values(h, t);
#pragma unroll
                for (int pair = 0; pair < VTile::ROW_CHUNKS / 2; ++pair) {
                    WideFragment a[Op::STEPS_PER_PAIR];
                    Op::load_values(a, VTile::chunk_pair(stage + at.v + h * at.v_head + t * at.v_block, pair),
                                    blocks.of_pair(of_blocks, pair));
#pragma unroll
                    for (int r = 0; r < ROW_TILES; ++r) {
                        const int c = h * ROW_TILES + r;
#pragma unroll
                        for (int i = 0; i < Op::STEPS_PER_PAIR; ++i) {
                            multiply(o[c][pair * Op::STEPS_PER_PAIR + i], a[i], p[c][t]);
                        }
                    }
                }
            }
        }
    }
};

}  // namespace folio::decode
