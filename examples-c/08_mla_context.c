/* MLA over a cached context: a prompt comes in two parts, as a scheduler with chunked prefill cuts it. The first part's
 * latent records go to a paged cache; the second part attends over itself and over them, which are unpacked a few at a
 * time. The check: the whole prompt at once. */
#include "common.h"

enum { HEADS = 4, LATENT = 64, NOPE = 32, ROPE = 16, VALUE = 32, PAGE_SIZE = 16, POOL_PAGES = 8, CHUNK = 24 };
enum { TOKENS = 96, FIRST = 64, SECOND = TOKENS - FIRST, QK = NOPE + ROPE, RECORD = LATENT + ROPE };

/* What a layer knows of a prompt, and its weights. */
typedef struct layer {
    float *q, *kv_c, *k_rope, *k_nope, *v, *w_uk, *w_uv, *cache;
} layer;

static folio_tensor rows(float *first, int64_t count, int64_t *shape)
{
    shape[0] = count;
    return tensor(first, FOLIO_FLOAT32, 3, shape);
}

/* Keys and values of new tokens: what a model's kv_b_proj computes. */
static void up_project(const folio_context *ctx, const layer *l)
{
    folio_error err = FOLIO_INIT(folio_error);
    folio_tensor kv_c = tensor(l->kv_c, FOLIO_FLOAT32, 2, (int64_t[]){ TOKENS, LATENT });
    folio_tensor w_uk = tensor(l->w_uk, FOLIO_FLOAT32, 3, (int64_t[]){ HEADS, NOPE, LATENT });
    folio_tensor w_uv = tensor(l->w_uv, FOLIO_FLOAT32, 3, (int64_t[]){ HEADS, LATENT, VALUE });
    folio_tensor k_nope = tensor(l->k_nope, FOLIO_FLOAT32, 3, (int64_t[]){ TOKENS, HEADS, NOPE });
    folio_tensor v = tensor(l->v, FOLIO_FLOAT32, 3, (int64_t[]){ TOKENS, HEADS, VALUE });
    folio_mla_up_project_args args = FOLIO_INIT(folio_mla_up_project_args);
    args.kv_c = &kv_c;
    args.w_uk = &w_uk;
    args.w_uv = &w_uv;
    args.k_nope = &k_nope;
    args.v = &v;
    check(folio_mla_up_project(ctx, &args, NULL, &err), &err);
}

/* The first tokens' records to the cache. */
static void append(const folio_context *ctx, const layer *l, const int32_t *pages, int64_t count)
{
    folio_error err = FOLIO_INIT(folio_error);
    int32_t slots[TOKENS];
    for (int64_t t = 0; t < count; t++)
        slots[t] = pages[t / PAGE_SIZE] * PAGE_SIZE + (int32_t)(t % PAGE_SIZE);
    folio_tensor latent = tensor(l->kv_c, FOLIO_FLOAT32, 2, (int64_t[]){ count, LATENT });
    folio_tensor rope = tensor(l->k_rope, FOLIO_FLOAT32, 2, (int64_t[]){ count, ROPE });
    folio_tensor kv = tensor(l->cache, FOLIO_FLOAT32, 3, (int64_t[]){ POOL_PAGES, PAGE_SIZE, RECORD });
    folio_tensor slot_mapping = int32_vector(slots, &count);
    folio_mla_append_args args = FOLIO_INIT(folio_mla_append_args);
    args.latent = &latent;
    args.rope = &rope;
    args.kv = &kv;
    args.slot_mapping = &slot_mapping;
    check(folio_mla_append(ctx, &args, NULL, &err), &err);
}

/* Attention of the prompt's tokens from `first` on, those before it being its cached context. */
static void prefill(const folio_context *ctx, const layer *l, int32_t *pages, int32_t first, int32_t count, float *o)
{
    folio_error err = FOLIO_INIT(folio_error);
    folio_mla_context_desc desc = FOLIO_INIT(folio_mla_context_desc);
    desc.dtype = FOLIO_FLOAT32;
    desc.num_heads = HEADS;
    desc.kv_lora_rank = LATENT;
    desc.qk_nope_head_dim = NOPE;
    desc.qk_rope_head_dim = ROPE;
    desc.v_head_dim = VALUE;
    desc.page_size = PAGE_SIZE;
    desc.max_batch_size = 1;
    desc.max_num_tokens = TOKENS;
    desc.max_kv_len = TOKENS;
    desc.max_chunk_tokens = CHUNK;
    folio_mla_context *handle = NULL;
    check(folio_mla_context_create(ctx, &desc, &handle, &err), &err);
    folio_workspace_info info = FOLIO_INIT(folio_workspace_info);
    check(folio_mla_context_workspace(handle, &info, &err), &err);
    folio_workspace ws = allocate_workspace(&info);

    /* Once per step: how many tokens are new, how many there are in all, and where the cached ones are. */
    int32_t qo_indptr_data[] = { 0, count }, kv_len_data[] = { first + count };
    folio_tensor qo_indptr = int32_vector(qo_indptr_data, (int64_t[]){ 2 });
    folio_tensor kv_len = int32_vector(kv_len_data, (int64_t[]){ 1 });
    folio_tensor block_table = tensor(pages, FOLIO_INT32, 2, (int64_t[]){ 1, POOL_PAGES });
    folio_batch batch = FOLIO_INIT(folio_batch);
    batch.qo_indptr = &qo_indptr;
    batch.kv_len = &kv_len;
    batch.block_table = &block_table;
    check(folio_mla_context_plan(handle, &batch, &ws, NULL, &err), &err);
    uint32_t chunks = 0;
    check(folio_mla_context_num_chunks(handle, &chunks, &err), &err);
    printf("%d new tokens over a context of %d in %u chunks\n", (int)count, (int)first, (unsigned)chunks);

    /* Once per layer. */
    int64_t q_shape[] = { 0, HEADS, QK }, k_shape[] = { 0, HEADS, NOPE }, v_shape[] = { 0, HEADS, VALUE };
    folio_tensor q = rows(l->q + first * HEADS * QK, count, q_shape);
    folio_tensor k_nope = rows(l->k_nope + first * HEADS * NOPE, count, k_shape);
    folio_tensor k_rope = tensor(l->k_rope + first * ROPE, FOLIO_FLOAT32, 2, (int64_t[]){ count, ROPE });
    folio_tensor v = rows(l->v + first * HEADS * VALUE, count, v_shape), out = rows(o, count, v_shape);
    folio_tensor kv = tensor(l->cache, FOLIO_FLOAT32, 3, (int64_t[]){ POOL_PAGES, PAGE_SIZE, RECORD });
    folio_tensor w_uk = tensor(l->w_uk, FOLIO_FLOAT32, 3, (int64_t[]){ HEADS, NOPE, LATENT });
    folio_tensor w_uv = tensor(l->w_uv, FOLIO_FLOAT32, 3, (int64_t[]){ HEADS, LATENT, VALUE });
    folio_mla_context_args args = FOLIO_INIT(folio_mla_context_args);
    args.q = &q;
    args.k_nope = &k_nope;
    args.k_rope = &k_rope;
    args.v = &v;
    args.kv = &kv;
    args.w_uk = &w_uk;
    args.w_uv = &w_uv;
    args.o = &out;
    check(folio_mla_context_run(handle, &args, NULL, &err), &err);
    folio_mla_context_destroy(handle);
    free(ws.host);
}

int main(void)
{
    folio_error err = FOLIO_INIT(folio_error);
    folio_context_desc device = FOLIO_INIT(folio_context_desc);
    device.device_type = FOLIO_DEVICE_CPU;
    folio_context *ctx = NULL;
    check(folio_context_create(&device, &ctx, &err), &err);

    layer l = { random_float(TOKENS * HEADS * QK, 1),     random_float(TOKENS * LATENT, 2),
                random_float(TOKENS * ROPE, 3),           random_float(TOKENS * HEADS * NOPE, 4),
                random_float(TOKENS * HEADS * VALUE, 5),  random_float(HEADS * NOPE * LATENT, 6),
                random_float(HEADS * LATENT * VALUE, 7),  random_float(POOL_PAGES * PAGE_SIZE * RECORD, 8) };
    int32_t *pages = shuffled(POOL_PAGES, 9);
    float *whole = allocate(TOKENS * HEADS * VALUE * sizeof *whole);
    float *second = allocate(SECOND * HEADS * VALUE * sizeof *second);
    up_project(ctx, &l);
    prefill(ctx, &l, pages, 0, TOKENS, whole);
    append(ctx, &l, pages, FIRST);
    prefill(ctx, &l, pages, FIRST, SECOND, second);
    expect_float("the second part against the whole prompt", second, whole + FIRST * HEADS * VALUE, SECOND * HEADS * VALUE);

    folio_context_destroy(ctx);
    float *memory[] = { l.q, l.kv_c, l.k_rope, l.k_nope, l.v, l.w_uk, l.w_uv, l.cache, whole, second };
    for (size_t i = 0; i < sizeof memory / sizeof *memory; i++)
        free(memory[i]);
    free(pages);
    return 0;
}
