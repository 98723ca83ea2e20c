/* A quantised cache: keys and values as int8, with a scale for each token and head that the append computes
 * (vLLM's int8_per_token_head). A quarter of the bytes of float32, and half of those of bfloat16.
 *
 * Two checks. Attention over the cache is attention over what the cache holds, its bytes times their scales,
 * within rounding. And it is near to attention over the tokens themselves, as near as 8 bits are. */
#include "common.h"

enum {
    TOKENS = 75,
    QO_HEADS = 8,
    KV_HEADS = 2,
    HEAD_DIM = 64,
    PAGE_SIZE = 16,
    POOL_PAGES = 7,
    NUM_PAGES = (TOKENS + PAGE_SIZE - 1) / PAGE_SIZE,
    SLOTS = POOL_PAGES * PAGE_SIZE,
    ROW = KV_HEADS * HEAD_DIM,
};

/* Keys or values: the bytes, and a scale for each token and head. */
typedef struct cache {
    int8_t *bytes; /* [POOL_PAGES, PAGE_SIZE, KV_HEADS, HEAD_DIM] */
    float *scales; /* [POOL_PAGES, PAGE_SIZE, KV_HEADS] */
} cache;

static int64_t cache_shape[] = { POOL_PAGES, PAGE_SIZE, KV_HEADS, HEAD_DIM };

static folio_tensor bytes_of(cache of)
{
    return tensor(of.bytes, FOLIO_INT8, 4, cache_shape);
}

static folio_tensor scales_of(cache of)
{
    return tensor(of.scales, FOLIO_FLOAT32, 3, cache_shape);
}

/* What no token was written to may hold anything. */
static cache new_cache(void)
{
    cache made = { allocate((size_t)SLOTS * ROW), allocate((size_t)SLOTS * KV_HEADS * sizeof(float)) };
    memset(made.bytes, 0x5a, (size_t)SLOTS * ROW);
    for (int i = 0; i < SLOTS * KV_HEADS; i++)
        made.scales[i] = NAN;
    return made;
}

/* The rows of the tokens, as floats, that a cache holds. */
static float *dequantised(cache from, const int32_t *pages)
{
    float *rows = allocate((size_t)TOKENS * ROW * sizeof *rows);
    for (int t = 0; t < TOKENS; t++) {
        int slot = pages[t / PAGE_SIZE] * PAGE_SIZE + t % PAGE_SIZE;
        for (int i = 0; i < ROW; i++)
            rows[t * ROW + i] = (float)from.bytes[slot * ROW + i] * from.scales[slot * KV_HEADS + i / HEAD_DIM];
    }
    return rows;
}

/* Attention of one query row over all tokens, by the formula. */
static void attend(const float *q, const float *k, const float *v, float *o)
{
    for (int head = 0; head < QO_HEADS; head++) {
        int kv = head / (QO_HEADS / KV_HEADS) * HEAD_DIM;
        double weights[TOKENS], sum = 0, out[HEAD_DIM] = { 0 };
        for (int t = 0; t < TOKENS; t++) {
            double score = 0;
            for (int d = 0; d < HEAD_DIM; d++)
                score += (double)q[head * HEAD_DIM + d] * k[t * ROW + kv + d];
            weights[t] = exp(score / sqrt((double)HEAD_DIM));
            sum += weights[t];
        }
        for (int t = 0; t < TOKENS; t++)
            for (int d = 0; d < HEAD_DIM; d++)
                out[d] += weights[t] / sum * v[t * ROW + kv + d];
        for (int d = 0; d < HEAD_DIM; d++)
            o[head * HEAD_DIM + d] = (float)out[d];
    }
}

static void append(const folio_context *ctx, float *key, float *value, const int32_t *pages, cache k, cache v)
{
    folio_error err = FOLIO_INIT(folio_error);
    int64_t slots[TOKENS], shape[] = { TOKENS, KV_HEADS, HEAD_DIM };
    for (int t = 0; t < TOKENS; t++)
        slots[t] = (int64_t)pages[t / PAGE_SIZE] * PAGE_SIZE + t % PAGE_SIZE;
    folio_tensor keys = tensor(key, FOLIO_FLOAT32, 3, shape), values = tensor(value, FOLIO_FLOAT32, 3, shape);
    folio_tensor k_cache = bytes_of(k), k_scales = scales_of(k), v_cache = bytes_of(v), v_scales = scales_of(v);
    folio_tensor slot_mapping = tensor(slots, FOLIO_INT64, 1, (int64_t[]){ TOKENS });

    folio_kv_append_args args = FOLIO_INIT(folio_kv_append_args);
    args.key = &keys;
    args.value = &values;
    args.k_cache = &k_cache;
    args.v_cache = &v_cache;
    args.k_scales = &k_scales; /* outputs here: the append computes them */
    args.v_scales = &v_scales;
    args.slot_mapping = &slot_mapping;
    args.kv_layout = FOLIO_LAYOUT_NHD;
    args.kv_format = FOLIO_KV_FORMAT_TOKEN_HEAD_SCALES;
    check(folio_kv_append(ctx, &args, NULL, &err), &err);
}

static void decode(const folio_context *ctx, float *q, int32_t *pages, cache k, cache v, float *o)
{
    folio_error err = FOLIO_INIT(folio_error);
    folio_decode_desc desc = FOLIO_INIT(folio_decode_desc);
    desc.q_dtype = FOLIO_FLOAT32;
    desc.kv_dtype = FOLIO_INT8;
    desc.kv_format = FOLIO_KV_FORMAT_TOKEN_HEAD_SCALES;
    desc.num_qo_heads = QO_HEADS;
    desc.num_kv_heads = KV_HEADS;
    desc.head_dim_qk = HEAD_DIM;
    desc.page_size = PAGE_SIZE;
    desc.max_batch_size = 1;
    desc.max_kv_len = TOKENS;
    folio_decode *handle = NULL;
    check(folio_decode_create(ctx, &desc, &handle, &err), &err);
    folio_workspace_info info = FOLIO_INIT(folio_workspace_info);
    check(folio_decode_workspace(handle, &info, &err), &err);
    folio_workspace ws = allocate_workspace(&info);

    int32_t tokens = TOKENS;
    folio_tensor kv_len = int32_vector(&tokens, (int64_t[]){ 1 });
    folio_tensor table = tensor(pages, FOLIO_INT32, 2, (int64_t[]){ 1, NUM_PAGES });
    folio_batch batch = FOLIO_INIT(folio_batch);
    batch.kv_len = &kv_len;
    batch.block_table = &table;
    check(folio_decode_plan(handle, &batch, &ws, NULL, &err), &err);

    int64_t row[] = { 1, QO_HEADS, HEAD_DIM };
    folio_tensor queries = tensor(q, FOLIO_FLOAT32, 3, row), out = tensor(o, FOLIO_FLOAT32, 3, row);
    folio_tensor k_cache = bytes_of(k), k_scales = scales_of(k), v_cache = bytes_of(v), v_scales = scales_of(v);
    folio_attention_args args = FOLIO_INIT(folio_attention_args);
    args.q = &queries;
    args.k = &k_cache;
    args.v = &v_cache;
    args.k_scales = &k_scales;
    args.v_scales = &v_scales;
    args.o = &out;
    check(folio_decode_run(handle, &args, NULL, &err), &err);
    folio_decode_destroy(handle);
    free(ws.host);
}

int main(void)
{
    folio_error err = FOLIO_INIT(folio_error);
    folio_context_desc device = FOLIO_INIT(folio_context_desc);
    device.device_type = FOLIO_DEVICE_CPU;
    folio_context *ctx = NULL;
    check(folio_context_create(&device, &ctx, &err), &err);

    int32_t *pages = shuffled(POOL_PAGES, 1);
    float *key = random_float((size_t)TOKENS * ROW, 2), *value = random_float((size_t)TOKENS * ROW, 3);
    float *q = random_float((size_t)QO_HEADS * HEAD_DIM, 4);
    cache k = new_cache(), v = new_cache();
    append(ctx, key, value, pages, k, v);

    float o[QO_HEADS * HEAD_DIM], held[QO_HEADS * HEAD_DIM], exact[QO_HEADS * HEAD_DIM];
    decode(ctx, q, pages, k, v, o);
    float *held_k = dequantised(k, pages), *held_v = dequantised(v, pages);
    attend(q, held_k, held_v, held);
    expect_float("attention over what the cache holds", o, held, QO_HEADS * HEAD_DIM);

    attend(q, key, value, exact);
    double worst = 0;
    for (int i = 0; i < QO_HEADS * HEAD_DIM; i++) {
        double error = fabs((double)o[i] - exact[i]);
        worst = error > worst ? error : worst; /* GCC 12 for AArch64 crashes over fmax here */
    }
    printf("attention over the tokens themselves: the largest difference is %.1e\n", worst);
    if (!(worst < 0.02))
        return 1;

    folio_context_destroy(ctx);
    free(pages), free(key), free(value), free(q), free(held_k), free(held_v);
    free(k.bytes), free(k.scales), free(v.bytes), free(v.scales);
    return 0;
}
