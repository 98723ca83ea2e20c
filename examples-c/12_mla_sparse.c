/* Sparse attention of DeepSeek-V3.2: every query token sees the records that an indexer has listed for it, at most 32 here
 * and 2048 in the model. A list is a row of a page table with pages of one token, so that each query token is a request.
 *
 * The records lie in pages of 64 tokens, as for dense attention; the lists name slots in them. Two layers have the same
 * lengths and lists of their own. On a CUDA device, with lists that lie there, one plan would serve both. The check: the
 * same sums as a plain loop in double. */
#include "common.h"

enum {
    HEADS = 16, /* 128 heads over 8 devices */
    RANK = 512,
    ROPE = 64,
    RECORD = RANK + ROPE,
    PAGE_SIZE = 64,
    POOL_PAGES = 8,
    SLOTS = POOL_PAGES * PAGE_SIZE,
    CONTEXT = 300, /* tokens of the request, its new ones included */
    TOKENS = 5,    /* new ones, the last of the context */
    LISTED = 32,   /* tokens of a list at most */
    LAYERS = 2,
};

static const float sm_scale = 0.1352337788608801f; /* as in 07_mla.c */

/* What an indexer would choose: some of the tokens up to `position`, as slots, and -1 behind them. Returns how many. */
static int32_t list_tokens(int32_t *list, const int32_t *pages, int32_t position, uint32_t seed)
{
    int32_t *order = shuffled(position + 1, seed);
    int32_t count = position + 1 < LISTED ? position + 1 : LISTED;
    for (int32_t i = 0; i < LISTED; i++)
        list[i] = i < count ? pages[order[i] / PAGE_SIZE] * PAGE_SIZE + order[i] % PAGE_SIZE : -1;
    free(order);
    return count;
}

static folio_mla *create(folio_context *ctx)
{
    folio_error err = FOLIO_INIT(folio_error);
    folio_mla_desc desc = FOLIO_INIT(folio_mla_desc);
    desc.q_dtype = FOLIO_BFLOAT16; /* the cache and o: the same */
    desc.num_heads = HEADS;
    desc.kv_lora_rank = RANK;
    desc.qk_rope_head_dim = ROPE;
    desc.page_size = 1; /* of the lists, not of the pool */
    desc.max_batch_size = TOKENS;
    desc.max_kv_len = LISTED;
    folio_mla *handle = NULL;
    check(folio_mla_create(ctx, &desc, &handle, &err), &err);
    return handle;
}

/* One layer: its lists, its queries, its records. */
static void attend(folio_mla *handle, const folio_workspace *ws, int32_t *lists, int32_t *lengths, uint16_t *q,
                   uint16_t *cache, uint16_t *o)
{
    folio_error err = FOLIO_INIT(folio_error);
    folio_tensor keys = int32_vector(lengths, (int64_t[]){ TOKENS });
    folio_tensor table = tensor(lists, FOLIO_INT32, 2, (int64_t[]){ TOKENS, LISTED });
    folio_batch batch = FOLIO_INIT(folio_batch);
    batch.kv_len = &keys; /* a request has one row where nothing else is said */
    batch.block_table = &table;
    check(folio_mla_plan(handle, &batch, ws, NULL, &err), &err);

    /* The parts of q are views of one tensor, and the pool is looked at token by token. */
    int64_t strides[] = { HEADS * RECORD, RECORD, 1 };
    folio_tensor latent = tensor(q, FOLIO_BFLOAT16, 3, (int64_t[]){ TOKENS, HEADS, RANK });
    folio_tensor rope = tensor(q + RANK, FOLIO_BFLOAT16, 3, (int64_t[]){ TOKENS, HEADS, ROPE });
    latent.strides = rope.strides = strides;
    folio_tensor kv = tensor(cache, FOLIO_BFLOAT16, 3, (int64_t[]){ SLOTS, 1, RECORD });
    folio_tensor out = tensor(o, FOLIO_BFLOAT16, 3, (int64_t[]){ TOKENS, HEADS, RANK });
    folio_mla_args args = FOLIO_INIT(folio_mla_args);
    args.q_latent = &latent;
    args.q_rope = &rope;
    args.kv = &kv;
    args.o = &out;
    args.sm_scale = sm_scale;
    check(folio_mla_run(handle, &args, NULL, &err), &err);
}

/* o of one row of one head over a list. */
static void naive(const uint16_t *q, const uint16_t *cache, const int32_t *list, int32_t count, double *o)
{
    double weights[LISTED], sum = 0;
    for (int32_t i = 0; i < count; i++) {
        const uint16_t *record = cache + (size_t)list[i] * RECORD;
        double s = 0;
        for (int d = 0; d < RECORD; d++)
            s += (double)from_bf16(q[d]) * from_bf16(record[d]);
        weights[i] = exp(s * sm_scale);
        sum += weights[i];
    }
    for (int d = 0; d < RANK; d++) {
        o[d] = 0;
        for (int32_t i = 0; i < count; i++)
            o[d] += weights[i] / sum * from_bf16(cache[(size_t)list[i] * RECORD + (size_t)d]);
    }
}

int main(void)
{
    folio_error err = FOLIO_INIT(folio_error);
    folio_context_desc device = FOLIO_INIT(folio_context_desc);
    device.device_type = FOLIO_DEVICE_CPU;
    device.num_threads = 2;
    folio_context *ctx = NULL;
    check(folio_context_create(&device, &ctx, &err), &err);
    folio_mla *handle = create(ctx);
    printf("kernel: %s\n", folio_mla_kernel(handle));
    folio_workspace_info info = FOLIO_INIT(folio_workspace_info);
    check(folio_mla_workspace(handle, &info, &err), &err);
    folio_workspace ws = allocate_workspace(&info);

    int32_t *pages = shuffled(POOL_PAGES, 3), lists[TOKENS * LISTED], lengths[TOKENS];
    uint16_t *o = allocate((size_t)TOKENS * HEADS * RANK * sizeof *o);
    difference of_o = { 0, 0, 0, 0 };
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        uint16_t *q = random_bf16((size_t)TOKENS * HEADS * RECORD, 11 + layer);
        uint16_t *cache = random_bf16((size_t)SLOTS * RECORD, 21 + layer);
        for (int t = 0; t < TOKENS; t++)
            lengths[t] = list_tokens(lists + t * LISTED, pages, CONTEXT - TOKENS + t, 31 * layer + (uint32_t)t + 1);
        attend(handle, &ws, lists, lengths, q, cache, o);
        for (int row = 0; row < TOKENS * HEADS; row++) {
            double want[RANK];
            naive(q + (size_t)row * RECORD, cache, lists + row / HEADS * LISTED, lengths[row / HEADS], want);
            for (int d = 0; d < RANK; d++)
                take(&of_o, from_bf16(o[(size_t)row * RANK + (size_t)d]), want[d]);
        }
        free(q);
        free(cache);
    }
    expect("o against a plain loop", &of_o, BF16_TOLERANCE);

    folio_mla_destroy(handle);
    folio_context_destroy(ctx);
    free(ws.host);
    free(pages);
    free(o);
    return 0;
}
