/* Speculative verify: score a tree of draft tokens in one decode call with a custom mask.
 *
 *          0            Draft tokens 0 to 5 follow a prefix that is already in the cache. Each sees the
 *         / \           prefix, its ancestors and itself:
 *        1   2
 *       /   / \           0: 0    1: 0 1    3: 0 1 3    2: 0 2    4: 0 2 4    5: 0 2 5
 *      3   4   5
 *
 * The check needs no other implementation: every node of the tree is the last token of a straight line
 * (its path), so decoding each path as a request of its own must give the same row. */
#include "common.h"

enum {
    PREFIX = 45,
    DRAFTS = 6,
    KV_LEN = PREFIX + DRAFTS,
    QO_HEADS = 4,
    KV_HEADS = 1,
    HEAD_DIM = 64,
    NUM_SLOTS = 80,
    ROW = QO_HEADS * HEAD_DIM,
};

static const int parent[DRAFTS] = { -1, 0, 0, 1, 2, 2 };

static folio_decode *create(const folio_context *ctx, uint32_t max_batch_size, uint32_t max_qo_len)
{
    folio_error err = FOLIO_INIT(folio_error);
    folio_decode_desc desc = FOLIO_INIT(folio_decode_desc);
    desc.q_dtype = FOLIO_BFLOAT16;
    desc.num_qo_heads = QO_HEADS;
    desc.num_kv_heads = KV_HEADS;
    desc.head_dim_qk = HEAD_DIM;
    desc.page_size = 1;
    desc.max_batch_size = max_batch_size;
    desc.max_qo_len = max_qo_len;
    desc.max_kv_len = KV_LEN;
    folio_decode *handle = NULL;
    check(folio_decode_create(ctx, &desc, &handle, &err), &err);
    return handle;
}

/* Plans and runs `batch`; the handle is destroyed afterwards. */
static void decode(folio_decode *handle, const folio_batch *batch, const folio_attention_args *args)
{
    folio_error err = FOLIO_INIT(folio_error);
    folio_workspace_info info = FOLIO_INIT(folio_workspace_info);
    check(folio_decode_workspace(handle, &info, &err), &err);
    folio_workspace ws = allocate_workspace(&info);
    check(folio_decode_plan(handle, batch, &ws, NULL, &err), &err);
    check(folio_decode_run(handle, args, NULL, &err), &err);
    folio_decode_destroy(handle);
    free(ws.host);
}

/* One request with DRAFTS rows; the mask says which keys each row sees. */
static void verify_tree(const folio_context *ctx, int32_t *slots, folio_attention_args args)
{
    uint8_t mask[DRAFTS][KV_LEN];
    memset(mask, 0, sizeof mask);
    for (int row = 0; row < DRAFTS; row++) {
        memset(mask[row], 1, PREFIX);
        for (int node = row; node >= 0; node = parent[node])
            mask[row][PREFIX + node] = 1;
    }
    folio_tensor custom_mask = tensor(mask, FOLIO_UINT8, 1, (int64_t[]){ DRAFTS * KV_LEN });
    args.mask_mode = FOLIO_MASK_CUSTOM_BYTES;
    args.custom_mask = &custom_mask;

    int32_t kv_indptr[] = { 0, KV_LEN };
    int32_t lengths[] = { KV_LEN };
    folio_tensor indptr = int32_vector(kv_indptr, (int64_t[]){ 2 });
    folio_tensor indices = int32_vector(slots, (int64_t[]){ KV_LEN });
    folio_tensor kv_len = int32_vector(lengths, (int64_t[]){ 1 });
    folio_batch batch = FOLIO_INIT(folio_batch);
    batch.qo_len = DRAFTS;
    batch.kv_indptr = &indptr;
    batch.kv_indices = &indices;
    batch.kv_len = &kv_len;
    decode(create(ctx, 1, DRAFTS), &batch, &args);
}

/* DRAFTS requests of one row each: the prefix, then the path from the root to the node. */
static void decode_paths(const folio_context *ctx, const int32_t *slots, folio_attention_args args)
{
    int32_t kv_indptr[DRAFTS + 1] = { 0 }, path_slots[DRAFTS * KV_LEN], lengths[DRAFTS];
    for (int row = 0; row < DRAFTS; row++) {
        int depth = 0;
        for (int node = row; node >= 0; node = parent[node])
            depth++;
        lengths[row] = PREFIX + depth;
        int32_t *path = path_slots + kv_indptr[row];
        memcpy(path, slots, PREFIX * sizeof *path);
        for (int node = row, at = depth; node >= 0; node = parent[node])
            path[PREFIX + --at] = slots[PREFIX + node];
        kv_indptr[row + 1] = kv_indptr[row] + lengths[row];
    }
    folio_tensor indptr = int32_vector(kv_indptr, (int64_t[]){ DRAFTS + 1 });
    folio_tensor indices = int32_vector(path_slots, (int64_t[]){ kv_indptr[DRAFTS] });
    folio_tensor kv_len = int32_vector(lengths, (int64_t[]){ DRAFTS });
    folio_batch batch = FOLIO_INIT(folio_batch);
    batch.kv_indptr = &indptr;
    batch.kv_indices = &indices;
    batch.kv_len = &kv_len;
    decode(create(ctx, DRAFTS, 1), &batch, &args);
}

int main(void)
{
    folio_error err = FOLIO_INIT(folio_error);
    folio_context_desc device = FOLIO_INIT(folio_context_desc);
    device.device_type = FOLIO_DEVICE_CPU;
    folio_context *ctx = NULL;
    check(folio_context_create(&device, &ctx, &err), &err);

    int32_t *slots = shuffled(NUM_SLOTS, 1);
    uint16_t *q_data = random_bf16(DRAFTS * ROW, 10);
    uint16_t *k_data = random_bf16(NUM_SLOTS * KV_HEADS * HEAD_DIM, 20);
    uint16_t *v_data = random_bf16(NUM_SLOTS * KV_HEADS * HEAD_DIM, 30);
    uint16_t tree[DRAFTS * ROW], paths[DRAFTS * ROW];

    int64_t q_shape[] = { DRAFTS, QO_HEADS, HEAD_DIM };
    int64_t cache_shape[] = { NUM_SLOTS, KV_HEADS, HEAD_DIM };
    folio_tensor q = tensor(q_data, FOLIO_BFLOAT16, 3, q_shape);
    folio_tensor k = tensor(k_data, FOLIO_BFLOAT16, 3, cache_shape);
    folio_tensor v = tensor(v_data, FOLIO_BFLOAT16, 3, cache_shape);
    folio_tensor tree_o = tensor(tree, FOLIO_BFLOAT16, 3, q_shape);
    folio_tensor paths_o = tensor(paths, FOLIO_BFLOAT16, 3, q_shape);
    folio_attention_args args = FOLIO_INIT(folio_attention_args);
    args.q = &q;
    args.k = &k;
    args.v = &v;
    args.o = &tree_o;
    verify_tree(ctx, slots, args);
    args.o = &paths_o;
    decode_paths(ctx, slots, args);
    expect_bf16("the tree against its paths", tree, paths, DRAFTS * ROW);

    folio_context_destroy(ctx);
    free(slots);
    free(q_data);
    free(k_data);
    free(v_data);
    return 0;
}
