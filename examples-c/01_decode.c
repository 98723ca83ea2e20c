/* Decode: one new token per request over a paged bf16 cache, two layers with one plan.
 *
 * The whole life of a handle: create once, plan once per step, run once per layer. The same calls on
 * Folio's float64 oracle give the numbers to compare with. */
#include "common.h"

enum {
    BATCH = 4,
    QO_HEADS = 8,
    KV_HEADS = 2,
    HEAD_DIM = 64,
    PAGE_SIZE = 16,
    POOL_PAGES = 64,
    LAYERS = 2,
};

static const size_t q_count = BATCH * QO_HEADS * HEAD_DIM;
static const size_t cache_count = (size_t)POOL_PAGES * PAGE_SIZE * KV_HEADS * HEAD_DIM;

/* What an engine holds: per layer a query, keys and values; for all of them one page table. */
typedef struct step {
    uint16_t *q[LAYERS], *k[LAYERS], *v[LAYERS];
    int32_t *page_ids;
} step;

/* Runs all layers of a step on a context made with `flags` and writes o and lse of each layer. */
static void decode(uint32_t flags, const step *in, uint16_t *o[LAYERS], float *lse[LAYERS])
{
    folio_error err = FOLIO_INIT(folio_error);

    /* A context is a device and its threads. 1 computes on the calling thread only. */
    folio_context_desc device = FOLIO_INIT(folio_context_desc);
    device.flags = flags;
    device.device_type = FOLIO_DEVICE_CPU;
    device.num_threads = flags & FOLIO_CONTEXT_REFERENCE ? 0 : 2;
    folio_context *ctx = NULL;
    check(folio_context_create(&device, &ctx, &err), &err);

    /* The desc says what picks code, and the most that will ever come. */
    folio_decode_desc desc = FOLIO_INIT(folio_decode_desc);
    desc.q_dtype = FOLIO_BFLOAT16; /* the cache and o: the same, unless said otherwise */
    desc.kv_layout = FOLIO_LAYOUT_NHD;
    desc.num_qo_heads = QO_HEADS;
    desc.num_kv_heads = KV_HEADS;
    desc.head_dim_qk = HEAD_DIM;
    desc.page_size = PAGE_SIZE;
    desc.max_batch_size = BATCH;
    desc.max_kv_len = 1024;
    folio_decode *handle = NULL;
    check(folio_decode_create(ctx, &desc, &handle, &err), &err);
    printf("kernel: %s\n", folio_decode_kernel(handle));

    /* The workspace is the caller's, and large enough for every batch within the desc. */
    folio_workspace_info info = FOLIO_INIT(folio_workspace_info);
    check(folio_decode_workspace(handle, &info, &err), &err);
    folio_workspace ws = allocate_workspace(&info);

    /* Once per step: the page table, here as CSR. Requests of 100, 16, 1 and 37 keys. */
    int32_t kv_indptr[BATCH + 1] = { 0, 7, 8, 9, 12 }; /* in pages */
    int32_t last_page_len[BATCH] = { 4, 16, 1, 5 };
    folio_tensor indptr = int32_vector(kv_indptr, (int64_t[]){ BATCH + 1 });
    folio_tensor indices = int32_vector(in->page_ids, (int64_t[]){ kv_indptr[BATCH] });
    folio_tensor last = int32_vector(last_page_len, (int64_t[]){ BATCH });
    folio_batch batch = FOLIO_INIT(folio_batch);
    batch.kv_indptr = &indptr;
    batch.kv_indices = &indices;
    batch.last_page_len = &last;
    check(folio_decode_plan(handle, &batch, &ws, NULL, &err), &err);

    /* Once per layer: tensors, and what differs between layers. The second one has a sliding window. */
    int64_t q_shape[] = { BATCH, QO_HEADS, HEAD_DIM };
    int64_t cache_shape[] = { POOL_PAGES, PAGE_SIZE, KV_HEADS, HEAD_DIM };
    int64_t lse_shape[] = { BATCH, QO_HEADS };
    for (int layer = 0; layer < LAYERS; layer++) {
        folio_tensor q = tensor(in->q[layer], FOLIO_BFLOAT16, 3, q_shape);
        folio_tensor k = tensor(in->k[layer], FOLIO_BFLOAT16, 4, cache_shape);
        folio_tensor v = tensor(in->v[layer], FOLIO_BFLOAT16, 4, cache_shape);
        folio_tensor out = tensor(o[layer], FOLIO_BFLOAT16, 3, q_shape);
        folio_tensor out_lse = tensor(lse[layer], FOLIO_FLOAT32, 2, lse_shape);
        folio_attention_args args = FOLIO_INIT(folio_attention_args);
        args.q = &q;
        args.k = &k;
        args.v = &v;
        args.o = &out;
        args.lse = &out_lse;
        if (layer == 1) {
            args.flags |= FOLIO_RUN_WINDOW;
            args.window_left = 31;
        }
        check(folio_decode_run(handle, &args, NULL, &err), &err);
    }

    folio_decode_destroy(handle);
    folio_context_destroy(ctx);
    free(ws.host);
}

int main(void)
{
    step in;
    uint16_t *o[LAYERS], *want[LAYERS];
    float *lse[LAYERS], *want_lse[LAYERS];
    in.page_ids = shuffled(POOL_PAGES, 1);
    for (int layer = 0; layer < LAYERS; layer++) {
        in.q[layer] = random_bf16(q_count, 10 + (uint32_t)layer);
        in.k[layer] = random_bf16(cache_count, 20 + (uint32_t)layer);
        in.v[layer] = random_bf16(cache_count, 30 + (uint32_t)layer);
        o[layer] = allocate(q_count * sizeof(uint16_t));
        want[layer] = allocate(q_count * sizeof(uint16_t));
        lse[layer] = allocate(BATCH * QO_HEADS * sizeof(float));
        want_lse[layer] = allocate(BATCH * QO_HEADS * sizeof(float));
    }

    decode(0, &in, o, lse);
    decode(FOLIO_CONTEXT_REFERENCE, &in, want, want_lse);
    for (int layer = 0; layer < LAYERS; layer++) {
        printf("layer %d\n", layer);
        expect_bf16("o against the oracle", o[layer], want[layer], q_count);
        expect_float("lse against the oracle", lse[layer], want_lse[layer], BATCH * QO_HEADS);
    }

    free(in.page_ids);
    for (int layer = 0; layer < LAYERS; layer++) {
        free(in.q[layer]);
        free(in.k[layer]);
        free(in.v[layer]);
        free(o[layer]);
        free(want[layer]);
        free(lse[layer]);
        free(want_lse[layer]);
    }
    return 0;
}
