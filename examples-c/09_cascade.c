/* A cascade: eight decodes share a system prompt of 512 tokens, and each half of them a document of 256 more. The page
 * table has the shared pages in the rows of every request, as an engine with a prefix cache has them.
 *
 * Folio finds in the table what is shared, and a plan decides what of it is worth reading once for all rows. The check:
 * folio_decode on the same batch, which reads the keys of every request. */
#include "common.h"

enum {
    BATCH = 8,
    GROUP = BATCH / 2, /* requests with the same document */
    QO_HEADS = 8,
    KV_HEADS = 2,
    HEAD_DIM = 64,
    PAGE_SIZE = 16,
    SYSTEM_PAGES = 512 / PAGE_SIZE,
    DOCUMENT_PAGES = 256 / PAGE_SIZE,
    SHARED_PAGES = SYSTEM_PAGES + DOCUMENT_PAGES,
    OWN_PAGES = 4, /* at most */
    COLUMNS = SHARED_PAGES + OWN_PAGES,
    POOL_PAGES = SYSTEM_PAGES + 2 * DOCUMENT_PAGES + BATCH * OWN_PAGES,
    MAX_KV_LEN = COLUMNS * PAGE_SIZE,
};

static const size_t o_count = (size_t)BATCH * QO_HEADS * HEAD_DIM;

/* What a layer has. */
typedef struct layer {
    float *q, *k, *v;
} layer;

/* The pages of every request, each with its keys: shared ones first, then its own. */
static void build_page_table(int32_t *table, int32_t *kv_len)
{
    int32_t *pool = shuffled(POOL_PAGES, 1);
    const int32_t *prompt = pool, *documents = prompt + SYSTEM_PAGES, *own = documents + 2 * DOCUMENT_PAGES;
    for (int b = 0; b < BATCH; b++) {
        int32_t *row = table + b * COLUMNS;
        memcpy(row, prompt, SYSTEM_PAGES * sizeof *row);
        memcpy(row + SYSTEM_PAGES, documents + b / GROUP * DOCUMENT_PAGES, DOCUMENT_PAGES * sizeof *row);
        memcpy(row + SHARED_PAGES, own + b * OWN_PAGES, OWN_PAGES * sizeof *row);
        kv_len[b] = SHARED_PAGES * PAGE_SIZE + 1 + 7 * b; /* the new token included */
    }
    free(pool);
}

/* Lists in `found` which neighbouring requests have their first pages in common. */
static void find_prefixes(const folio_batch *batch, folio_shared_prefixes *found, int32_t arrays[3][BATCH])
{
    folio_error err = FOLIO_INIT(folio_error);
    folio_find_shared_prefixes_args args = FOLIO_INIT(folio_find_shared_prefixes_args);
    args.page_size = PAGE_SIZE;
    args.capacity = BATCH; /* there are fewer prefixes than requests */
    args.batch = batch;
    args.request_begin = arrays[0];
    args.request_end = arrays[1];
    args.kv_len = arrays[2];
    args.num_prefixes = &found->num_prefixes;
    check(folio_find_shared_prefixes(&args, &err), &err);
    found->request_begin = arrays[0];
    found->request_end = arrays[1];
    found->kv_len = arrays[2];
    for (uint32_t i = 0; i < found->num_prefixes; i++)
        printf("requests %d to %d share their first %d keys\n", (int)arrays[0][i], (int)arrays[1][i] - 1,
               (int)arrays[2][i]);
}

/* Attention where shared keys are read once. */
static void cascade(const folio_context *ctx, const folio_batch *batch, const folio_attention_args *args)
{
    folio_error err = FOLIO_INIT(folio_error);
    folio_cascade_desc desc = FOLIO_INIT(folio_cascade_desc);
    desc.q_dtype = FOLIO_FLOAT32; /* the cache and o: the same */
    desc.kv_layout = FOLIO_LAYOUT_NHD;
    desc.num_qo_heads = QO_HEADS;
    desc.num_kv_heads = KV_HEADS;
    desc.head_dim_qk = HEAD_DIM;
    desc.page_size = PAGE_SIZE;
    desc.max_batch_size = BATCH;
    desc.max_num_tokens = BATCH; /* any request may have several of them */
    desc.max_kv_len = MAX_KV_LEN;
    desc.max_shared_levels = 2; /* a document within the system prompt */
    folio_cascade *handle = NULL;
    check(folio_cascade_create(ctx, &desc, &handle, &err), &err);
    printf("kernel for shared keys: %s\n", folio_cascade_kernel(handle));
    folio_workspace_info info = FOLIO_INIT(folio_workspace_info);
    check(folio_cascade_workspace(handle, &info, &err), &err);
    folio_workspace ws = allocate_workspace(&info);

    /* Once per step: the batch and what its requests share. */
    int32_t arrays[3][BATCH];
    folio_shared_prefixes prefixes = FOLIO_INIT(folio_shared_prefixes);
    find_prefixes(batch, &prefixes, arrays);
    check(folio_cascade_plan(handle, batch, &prefixes, &ws, NULL, &err), &err);
    uint32_t shares = 0;
    check(folio_cascade_shares(handle, &shares, &err), &err);
    printf("the plan %s\n", shares ? "reads shared keys once" : "found that sharing does not pay");

    /* Once per layer. */
    check(folio_cascade_run(handle, args, NULL, &err), &err);
    folio_cascade_destroy(handle);
    free(ws.host);
}

/* The same request by request. */
static void decode(const folio_context *ctx, const folio_batch *batch, const folio_attention_args *args)
{
    folio_error err = FOLIO_INIT(folio_error);
    folio_decode_desc desc = FOLIO_INIT(folio_decode_desc);
    desc.q_dtype = FOLIO_FLOAT32;
    desc.kv_layout = FOLIO_LAYOUT_NHD;
    desc.num_qo_heads = QO_HEADS;
    desc.num_kv_heads = KV_HEADS;
    desc.head_dim_qk = HEAD_DIM;
    desc.page_size = PAGE_SIZE;
    desc.max_batch_size = BATCH;
    desc.max_kv_len = MAX_KV_LEN;
    folio_decode *handle = NULL;
    check(folio_decode_create(ctx, &desc, &handle, &err), &err);
    folio_workspace_info info = FOLIO_INIT(folio_workspace_info);
    check(folio_decode_workspace(handle, &info, &err), &err);
    folio_workspace ws = allocate_workspace(&info);
    check(folio_decode_plan(handle, batch, &ws, NULL, &err), &err);
    check(folio_decode_run(handle, args, NULL, &err), &err);
    folio_decode_destroy(handle);
    free(ws.host);
}

int main(void)
{
    folio_error err = FOLIO_INIT(folio_error);
    folio_context_desc device = FOLIO_INIT(folio_context_desc);
    device.device_type = FOLIO_DEVICE_CPU;
    device.num_threads = 2;
    folio_context *ctx = NULL;
    check(folio_context_create(&device, &ctx, &err), &err);

    static int32_t table[BATCH * COLUMNS], qo_indptr[BATCH + 1], kv_len[BATCH];
    build_page_table(table, kv_len);
    for (int32_t b = 0; b <= BATCH; b++)
        qo_indptr[b] = b; /* one new token each */
    folio_tensor rows = int32_vector(qo_indptr, (int64_t[]){ BATCH + 1 });
    folio_tensor keys = int32_vector(kv_len, (int64_t[]){ BATCH });
    folio_tensor block_table = tensor(table, FOLIO_INT32, 2, (int64_t[]){ BATCH, COLUMNS });
    folio_batch batch = FOLIO_INIT(folio_batch);
    batch.qo_indptr = &rows;
    batch.kv_len = &keys;
    batch.block_table = &block_table;

    size_t cache_count = (size_t)POOL_PAGES * PAGE_SIZE * KV_HEADS * HEAD_DIM;
    layer l = { random_float(o_count, 2), random_float(cache_count, 3), random_float(cache_count, 4) };
    float *shared = allocate(o_count * sizeof *shared), *flat = allocate(o_count * sizeof *flat);
    int64_t q_shape[] = { BATCH, QO_HEADS, HEAD_DIM }, cache_shape[] = { POOL_PAGES, PAGE_SIZE, KV_HEADS, HEAD_DIM };
    folio_tensor q = tensor(l.q, FOLIO_FLOAT32, 3, q_shape);
    folio_tensor k = tensor(l.k, FOLIO_FLOAT32, 4, cache_shape);
    folio_tensor v = tensor(l.v, FOLIO_FLOAT32, 4, cache_shape);
    folio_tensor o = tensor(shared, FOLIO_FLOAT32, 3, q_shape);
    folio_attention_args args = FOLIO_INIT(folio_attention_args);
    args.q = &q;
    args.k = &k;
    args.v = &v;
    args.o = &o;
    cascade(ctx, &batch, &args);
    o.data = flat;
    decode(ctx, &batch, &args);
    expect_float("the cascade against flat attention", shared, flat, o_count);

    folio_context_destroy(ctx);
    free(l.q);
    free(l.k);
    free(l.v);
    free(shared);
    free(flat);
    return 0;
}
