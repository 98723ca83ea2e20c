/* Prefill: a mixed batch in one plan and one call. A fresh prompt, a chunk of a long prompt, a decoding
 * request and an idle one, over a paged cache given as a block table with sequence lengths.
 *
 * The check is a plain loop over keys, written out below, in double precision. */
#include "common.h"

enum {
    BATCH = 4,
    QO_HEADS = 6,
    KV_HEADS = 2,
    HEAD_DIM = 32,
    PAGE_SIZE = 8,
    POOL_PAGES = 40,
    MOST_PAGES = 10, /* columns of the block table */
};

static int32_t qo_indptr[BATCH + 1] = { 0, 19, 27, 28, 28 };
static int32_t kv_len[BATCH] = { 19, 75, 42, 0 };
enum { NUM_TOKENS = 28 };

/* Address of a head's key or value in an NHD cache. */
static const uint16_t *cache_row(const uint16_t *cache, const int32_t *pages, int32_t token, int kv_head)
{
    size_t slot = (size_t)pages[token / PAGE_SIZE] * PAGE_SIZE + (size_t)(token % PAGE_SIZE);
    return cache + (slot * KV_HEADS + (size_t)kv_head) * HEAD_DIM;
}

/* One row of attention over the keys 0 to num_keys - 1: softmax(q·k / sqrt(d)) v. */
static void attend(const uint16_t *q, const uint16_t *k, const uint16_t *v, const int32_t *pages, int kv_head,
                   int32_t num_keys, uint16_t *o)
{
    double sum = 0, acc[HEAD_DIM] = { 0 };
    for (int32_t j = 0; j < num_keys; j++) {
        const uint16_t *key = cache_row(k, pages, j, kv_head);
        const uint16_t *value = cache_row(v, pages, j, kv_head);
        double logit = 0;
        for (int d = 0; d < HEAD_DIM; d++)
            logit += (double)from_bf16(q[d]) * from_bf16(key[d]);
        /* No maximum is subtracted: these logits are small. */
        double weight = exp(logit / sqrt(HEAD_DIM));
        sum += weight;
        for (int d = 0; d < HEAD_DIM; d++)
            acc[d] += weight * from_bf16(value[d]);
    }
    for (int d = 0; d < HEAD_DIM; d++)
        o[d] = to_bf16((float)(acc[d] / sum));
}

/* Row i of a request with n rows stands at position kv_len - n + i, and sees what is not after it. */
static void expected(const uint16_t *q, const uint16_t *k, const uint16_t *v, const int32_t *block_table,
                     uint16_t *o)
{
    for (int b = 0; b < BATCH; b++) {
        for (int32_t row = qo_indptr[b]; row < qo_indptr[b + 1]; row++) {
            int32_t position = kv_len[b] - qo_indptr[b + 1] + row;
            for (int head = 0; head < QO_HEADS; head++) {
                size_t at = ((size_t)row * QO_HEADS + (size_t)head) * HEAD_DIM;
                attend(q + at, k, v, block_table + b * MOST_PAGES, head / (QO_HEADS / KV_HEADS), position + 1,
                       o + at);
            }
        }
    }
}

int main(void)
{
    folio_error err = FOLIO_INIT(folio_error);

    /* A context with two threads, the calling one among them. */
    folio_context_desc device = FOLIO_INIT(folio_context_desc);
    device.device_type = FOLIO_DEVICE_CPU;
    device.num_threads = 2;
    folio_context *ctx = NULL;
    check(folio_context_create(&device, &ctx, &err), &err);

    /* Maxima bound all batches to come; this handle takes any mix of up to 64 rows. */
    folio_prefill_desc desc = FOLIO_INIT(folio_prefill_desc);
    desc.q_dtype = FOLIO_BFLOAT16;
    desc.kv_layout = FOLIO_LAYOUT_NHD;
    desc.num_qo_heads = QO_HEADS;
    desc.num_kv_heads = KV_HEADS;
    desc.head_dim_qk = HEAD_DIM;
    desc.page_size = PAGE_SIZE;
    desc.max_batch_size = BATCH;
    desc.max_num_tokens = 64;
    desc.max_kv_len = MOST_PAGES * PAGE_SIZE;
    folio_prefill *handle = NULL;
    check(folio_prefill_create(ctx, &desc, &handle, &err), &err);
    printf("kernel: %s\n", folio_prefill_kernel(handle));
    folio_workspace_info info = FOLIO_INIT(folio_workspace_info);
    check(folio_prefill_workspace(handle, &info, &err), &err);
    folio_workspace ws = allocate_workspace(&info);

    /* The block table: a row of page ids per request. What kv_len does not need is not read. */
    int32_t *block_table = shuffled(POOL_PAGES, 1);
    folio_tensor rows = int32_vector(qo_indptr, (int64_t[]){ BATCH + 1 });
    folio_tensor lengths = int32_vector(kv_len, (int64_t[]){ BATCH });
    folio_tensor table = tensor(block_table, FOLIO_INT32, 2, (int64_t[]){ BATCH, MOST_PAGES });
    folio_batch batch = FOLIO_INIT(folio_batch);
    batch.qo_indptr = &rows;
    batch.kv_len = &lengths;
    batch.block_table = &table;
    check(folio_prefill_plan(handle, &batch, &ws, NULL, &err), &err);

    size_t q_count = (size_t)NUM_TOKENS * QO_HEADS * HEAD_DIM;
    size_t cache_count = (size_t)POOL_PAGES * PAGE_SIZE * KV_HEADS * HEAD_DIM;
    uint16_t *q_data = random_bf16(q_count, 10);
    uint16_t *k_data = random_bf16(cache_count, 20);
    uint16_t *v_data = random_bf16(cache_count, 30);
    uint16_t *o_data = allocate(q_count * sizeof *o_data);
    uint16_t *want = allocate(q_count * sizeof *want);

    /* All rows of all requests lie one after the other, as the model's other layers want them. */
    int64_t q_shape[] = { NUM_TOKENS, QO_HEADS, HEAD_DIM };
    int64_t cache_shape[] = { POOL_PAGES, PAGE_SIZE, KV_HEADS, HEAD_DIM };
    folio_tensor q = tensor(q_data, FOLIO_BFLOAT16, 3, q_shape);
    folio_tensor k = tensor(k_data, FOLIO_BFLOAT16, 4, cache_shape);
    folio_tensor v = tensor(v_data, FOLIO_BFLOAT16, 4, cache_shape);
    folio_tensor o = tensor(o_data, FOLIO_BFLOAT16, 3, q_shape);
    folio_attention_args args = FOLIO_INIT(folio_attention_args);
    args.q = &q;
    args.k = &k;
    args.v = &v;
    args.o = &o; /* mask_mode 0 is causal, sm_scale 0 is 1 / sqrt(head_dim) */
    check(folio_prefill_run(handle, &args, NULL, &err), &err);

    expected(q_data, k_data, v_data, block_table, want);
    expect_bf16("mixed batch against a loop over keys", o_data, want, q_count);

    folio_prefill_destroy(handle);
    folio_context_destroy(ctx);
    free(ws.host);
    free(block_table);
    free(q_data);
    free(k_data);
    free(v_data);
    free(o_data);
    free(want);
    return 0;
}
