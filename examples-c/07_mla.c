/* Multi-head latent attention, absorbed: one plan takes decodes, a draft of three tokens and a short prompt over a paged
 * cache of DeepSeek-V3's latent records.
 *
 * A record is 512 latent numbers, which are key and value of every head, and 64 rotary ones, which are key only. The
 * caller has multiplied the other part of its queries by W_UK, and multiplies o by W_UV afterwards. The check: the same
 * sums as a plain loop in double. */
#include "common.h"

enum {
    BATCH = 4,
    HEADS = 16, /* 128 heads over 8 devices */
    RANK = 512,
    ROPE = 64,
    RECORD = RANK + ROPE,
    PAGE_SIZE = 64,
    POOL_PAGES = 16,
    COLUMNS = 4, /* of the block table */
    TOKENS = 1 + 3 + 10 + 1,
};

static const int32_t qo_indptr[BATCH + 1] = { 0, 1, 4, 14, 15 };
static const int32_t kv_len[BATCH] = { 200, 67, 10, 64 };

/* 1 / sqrt(128 + 64), the width of a head before absorption, times YaRN's mscale squared for a factor of 40. */
static const float sm_scale = 0.1352337788608801f;

/* Where a matrix unit takes the weights in bf16, lse is the logarithm of their sum as rounded. */
#define LSE_TOLERANCE 2e-4

/* Writes the latent and rotary part of every key to the pages of its request: what a layer does as tokens come. */
static void write_cache(uint16_t *cache, const int32_t *block_table)
{
    uint32_t seed = 7;
    for (int b = 0; b < BATCH; b++) {
        for (int j = 0; j < kv_len[b]; j++) {
            int32_t page = block_table[b * COLUMNS + j / PAGE_SIZE];
            uint16_t *record = cache + ((size_t)page * PAGE_SIZE + (size_t)(j % PAGE_SIZE)) * RECORD;
            for (int d = 0; d < RECORD; d++)
                record[d] = to_bf16(uniform(&seed));
        }
    }
}

/* o and lse of all rows. */
static void attend(uint16_t *q_latent, uint16_t *q_rope, uint16_t *cache, int32_t *block_table, uint16_t *o, float *lse)
{
    folio_error err = FOLIO_INIT(folio_error);
    folio_context_desc device = FOLIO_INIT(folio_context_desc);
    device.device_type = FOLIO_DEVICE_CPU;
    device.num_threads = 2;
    folio_context *ctx = NULL;
    check(folio_context_create(&device, &ctx, &err), &err);

    folio_mla_desc desc = FOLIO_INIT(folio_mla_desc);
    desc.q_dtype = FOLIO_BFLOAT16; /* the cache and o: the same */
    desc.num_heads = HEADS;
    desc.kv_lora_rank = RANK;
    desc.qk_rope_head_dim = ROPE;
    desc.page_size = PAGE_SIZE;
    desc.max_batch_size = BATCH;
    desc.max_qo_len = 10;
    desc.max_kv_len = COLUMNS * PAGE_SIZE;
    folio_mla *handle = NULL;
    check(folio_mla_create(ctx, &desc, &handle, &err), &err);
    printf("kernel: %s\n", folio_mla_kernel(handle));
    folio_workspace_info info = FOLIO_INIT(folio_workspace_info);
    check(folio_mla_workspace(handle, &info, &err), &err);
    folio_workspace ws = allocate_workspace(&info);

    /* Once per step: rows and keys of each request, and its pages. Host tensors are only read during plan. */
    folio_tensor rows = int32_vector((int32_t *)qo_indptr, (int64_t[]){ BATCH + 1 });
    folio_tensor keys = int32_vector((int32_t *)kv_len, (int64_t[]){ BATCH });
    folio_tensor table = tensor(block_table, FOLIO_INT32, 2, (int64_t[]){ BATCH, COLUMNS });
    folio_batch batch = FOLIO_INIT(folio_batch);
    batch.qo_indptr = &rows;
    batch.kv_len = &keys;
    batch.block_table = &table;
    check(folio_mla_plan(handle, &batch, &ws, NULL, &err), &err);

    /* Once per layer. The two parts of q may also be views of one tensor. */
    folio_tensor latent = tensor(q_latent, FOLIO_BFLOAT16, 3, (int64_t[]){ TOKENS, HEADS, RANK });
    folio_tensor rope = tensor(q_rope, FOLIO_BFLOAT16, 3, (int64_t[]){ TOKENS, HEADS, ROPE });
    folio_tensor kv = tensor(cache, FOLIO_BFLOAT16, 3, (int64_t[]){ POOL_PAGES, PAGE_SIZE, RECORD });
    folio_tensor out = tensor(o, FOLIO_BFLOAT16, 3, (int64_t[]){ TOKENS, HEADS, RANK });
    folio_tensor out_lse = tensor(lse, FOLIO_FLOAT32, 2, (int64_t[]){ TOKENS, HEADS });
    folio_mla_args args = FOLIO_INIT(folio_mla_args);
    args.q_latent = &latent;
    args.q_rope = &rope;
    args.kv = &kv;
    args.o = &out;
    args.lse = &out_lse;
    args.sm_scale = sm_scale; /* has no default: the latent width does not say it */
    args.mask_mode = FOLIO_MASK_CAUSAL;
    check(folio_mla_run(handle, &args, NULL, &err), &err);

    folio_mla_destroy(handle);
    folio_context_destroy(ctx);
    free(ws.host);
}

/* One row of one head: o and lse of the first `seen` keys of request b. */
static void naive(const uint16_t *q_latent, const uint16_t *q_rope, const uint16_t *cache, const int32_t *pages, int seen,
                  double *o, double *lse)
{
    double weights[COLUMNS * PAGE_SIZE], sum = 0;
    for (int d = 0; d < RANK; d++)
        o[d] = 0;
    for (int j = 0; j < seen; j++) {
        const uint16_t *record = cache + ((size_t)pages[j / PAGE_SIZE] * PAGE_SIZE + (size_t)(j % PAGE_SIZE)) * RECORD;
        double s = 0;
        for (int d = 0; d < RANK; d++)
            s += (double)from_bf16(q_latent[d]) * from_bf16(record[d]);
        for (int d = 0; d < ROPE; d++)
            s += (double)from_bf16(q_rope[d]) * from_bf16(record[RANK + d]);
        weights[j] = exp(s * sm_scale);
        sum += weights[j];
    }
    for (int j = 0; j < seen; j++) {
        const uint16_t *record = cache + ((size_t)pages[j / PAGE_SIZE] * PAGE_SIZE + (size_t)(j % PAGE_SIZE)) * RECORD;
        for (int d = 0; d < RANK; d++)
            o[d] += weights[j] / sum * from_bf16(record[d]);
    }
    *lse = log(sum);
}

int main(void)
{
    size_t rows = TOKENS * HEADS, records = (size_t)POOL_PAGES * PAGE_SIZE;
    uint16_t *q_latent = random_bf16(rows * RANK, 1), *q_rope = random_bf16(rows * ROPE, 2);
    uint16_t *cache = allocate(records * RECORD * sizeof *cache);
    memset(cache, 0xff, records * RECORD * sizeof *cache); /* NaN in every slot that no key is in */
    int32_t *block_table = shuffled(POOL_PAGES, 3);
    write_cache(cache, block_table);
    uint16_t *o = allocate(rows * RANK * sizeof *o);
    float *lse = allocate(rows * sizeof *lse);
    attend(q_latent, q_rope, cache, block_table, o, lse);

    difference of_o = { 0, 0, 0, 0 }, of_lse = { 0, 0, 0, 0 };
    for (int b = 0; b < BATCH; b++) {
        int qo_len = qo_indptr[b + 1] - qo_indptr[b];
        for (int i = 0; i < qo_len; i++) {
            for (int h = 0; h < HEADS; h++) {
                size_t row = (size_t)(qo_indptr[b] + i) * HEADS + (size_t)h;
                double want[RANK], want_lse;
                naive(q_latent + row * RANK, q_rope + row * ROPE, cache, block_table + b * COLUMNS,
                      kv_len[b] - qo_len + i + 1, want, &want_lse);
                for (int d = 0; d < RANK; d++)
                    take(&of_o, from_bf16(o[row * RANK + (size_t)d]), want[d]);
                take(&of_lse, lse[row], want_lse);
            }
        }
    }
    expect("o against a plain loop", &of_o, BF16_TOLERANCE);
    expect("lse against a plain loop", &of_lse, LSE_TOLERANCE);

    free(q_latent);
    free(q_rope);
    free(cache);
    free(block_table);
    free(o);
    free(lse);
    return 0;
}
