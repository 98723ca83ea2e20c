/* Append and merge: write new tokens to a paged cache through slot_mapping, attend to two halves of a
 * sequence separately, and merge the two states into the state of the whole.
 *
 * Merging is how a shared prefix, a cache that is spread over devices, or any split of the keys becomes
 * one result. The check: attention over all keys at once. */
#include "common.h"

enum {
    TOKENS = 50,
    SPLIT = 32, /* keys of the first half, whole pages */
    HEADS = 4,
    HEAD_DIM = 64,
    PAGE_SIZE = 16,
    POOL_PAGES = 6,
    NUM_PAGES = (TOKENS + PAGE_SIZE - 1) / PAGE_SIZE,
    ROW = HEADS * HEAD_DIM,
};

/* Writes the tokens of a fused QKV projection to the cache: k and v are slices with a stride. */
static void append(const folio_context *ctx, float *qkv, const int32_t *pages, folio_tensor *k_cache,
                   folio_tensor *v_cache)
{
    folio_error err = FOLIO_INIT(folio_error);
    int64_t slots[TOKENS];
    for (int t = 0; t < TOKENS; t++)
        slots[t] = (int64_t)pages[t / PAGE_SIZE] * PAGE_SIZE + t % PAGE_SIZE;

    int64_t shape[] = { TOKENS, HEADS, HEAD_DIM };
    int64_t strides[] = { 3 * ROW, HEAD_DIM, 1 };
    folio_tensor key = tensor(qkv + ROW, FOLIO_FLOAT32, 3, shape);
    folio_tensor value = tensor(qkv + 2 * ROW, FOLIO_FLOAT32, 3, shape);
    key.strides = value.strides = strides;
    folio_tensor slot_mapping = tensor(slots, FOLIO_INT64, 1, (int64_t[]){ TOKENS });
    folio_kv_append_args args = FOLIO_INIT(folio_kv_append_args);
    args.key = &key;
    args.value = &value;
    args.k_cache = k_cache;
    args.v_cache = v_cache;
    args.slot_mapping = &slot_mapping;
    args.kv_layout = FOLIO_LAYOUT_NHD;
    check(folio_kv_append(ctx, &args, NULL, &err), &err);
}

/* Attention of one query row over `num_keys` keys of the pages; o and lse are its state. */
static void decode(const folio_context *ctx, int32_t *pages, int32_t num_keys, folio_attention_args args)
{
    folio_error err = FOLIO_INIT(folio_error);
    folio_decode_desc desc = FOLIO_INIT(folio_decode_desc);
    desc.q_dtype = FOLIO_FLOAT32;
    desc.num_qo_heads = HEADS;
    desc.num_kv_heads = HEADS;
    desc.head_dim_qk = HEAD_DIM;
    desc.page_size = PAGE_SIZE;
    desc.max_batch_size = 1;
    desc.max_kv_len = TOKENS;
    folio_decode *handle = NULL;
    check(folio_decode_create(ctx, &desc, &handle, &err), &err);
    folio_workspace_info info = FOLIO_INIT(folio_workspace_info);
    check(folio_decode_workspace(handle, &info, &err), &err);
    folio_workspace ws = allocate_workspace(&info);

    folio_tensor kv_len = int32_vector(&num_keys, (int64_t[]){ 1 });
    folio_tensor table = tensor(pages, FOLIO_INT32, 2, (int64_t[]){ 1, (num_keys + PAGE_SIZE - 1) / PAGE_SIZE });
    folio_batch batch = FOLIO_INIT(folio_batch);
    batch.kv_len = &kv_len;
    batch.block_table = &table;
    check(folio_decode_plan(handle, &batch, &ws, NULL, &err), &err);
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

    /* The cache: whatever was in its memory before, what no row sees never shows. */
    size_t cache_count = (size_t)POOL_PAGES * PAGE_SIZE * ROW;
    float *k_data = allocate(cache_count * sizeof *k_data);
    float *v_data = allocate(cache_count * sizeof *v_data);
    for (size_t i = 0; i < cache_count; i++)
        k_data[i] = v_data[i] = NAN;
    int64_t cache_shape[] = { POOL_PAGES, PAGE_SIZE, HEADS, HEAD_DIM };
    folio_tensor k = tensor(k_data, FOLIO_FLOAT32, 4, cache_shape);
    folio_tensor v = tensor(v_data, FOLIO_FLOAT32, 4, cache_shape);
    int32_t *pages = shuffled(POOL_PAGES, 1);
    float *qkv = random_float((size_t)TOKENS * 3 * ROW, 2);
    append(ctx, qkv, pages, &k, &v);

    /* The last token's query attends to the first half, the second half, and all. */
    float o[3][ROW], lse[3][HEADS];
    int64_t row_shape[] = { 1, HEADS, HEAD_DIM };
    int64_t lse_shape[] = { 1, HEADS };
    folio_tensor q = tensor(qkv + (size_t)(TOKENS - 1) * 3 * ROW, FOLIO_FLOAT32, 3, row_shape);
    folio_tensor states[3], lses[3];
    for (int i = 0; i < 3; i++) {
        states[i] = tensor(o[i], FOLIO_FLOAT32, 3, row_shape);
        lses[i] = tensor(lse[i], FOLIO_FLOAT32, 2, lse_shape);
        folio_attention_args args = FOLIO_INIT(folio_attention_args);
        args.q = &q;
        args.k = &k;
        args.v = &v;
        args.o = &states[i];
        args.lse = &lses[i];
        if (i == 0)
            decode(ctx, pages, SPLIT, args);
        else if (i == 1)
            decode(ctx, pages + SPLIT / PAGE_SIZE, TOKENS - SPLIT, args);
        else
            decode(ctx, pages, TOKENS, args);
    }

    /* Merge the halves in place, into the first. */
    folio_merge_state_args merge = FOLIO_INIT(folio_merge_state_args);
    merge.v_a = &states[0];
    merge.s_a = &lses[0];
    merge.v_b = &states[1];
    merge.s_b = &lses[1];
    merge.v_out = &states[0];
    merge.s_out = &lses[0];
    check(folio_merge_state(ctx, &merge, NULL, &err), &err);
    expect_float("merged o against attention over all keys", o[0], o[2], ROW);
    expect_float("merged lse against attention over all keys", lse[0], lse[2], HEADS);

    folio_context_destroy(ctx);
    free(k_data);
    free(v_data);
    free(pages);
    free(qkv);
    return 0;
}
