/* Speculation with trees over several steps. In every step a draft model proposes a tree of tokens for each request. Their
 * keys go to the cache behind the request's own, one run verifies all of them under a mask, and the tokens of one path are
 * accepted: they are appended once more, now at their positions. The next tree overwrites what is left of this one.
 *
 * folio_tree_mask makes the mask from the tokens' parents, and the positions and links that accepting needs. The check:
 * each path of each tree as a request of its own, over rows that were copied by hand. */
#include "common.h"

enum {
    BATCH = 2,
    STEPS = 5,
    DRAFTS = 8, /* tokens of a tree, the root among them: the token that the step before ended with */
    MAX_LEN = 64 + (STEPS + 1) * DRAFTS,
    QO_HEADS = 4,
    KV_HEADS = 2,
    HEAD_DIM = 64,
    Q_ROW = QO_HEADS * HEAD_DIM,
    KV_ROW = KV_HEADS * HEAD_DIM,
    TOKENS = BATCH * DRAFTS,
    NUM_SLOTS = BATCH * MAX_LEN,
    COPIES = NUM_SLOTS + TOKENS, /* rows of the requests, and of the trees */
};

/* A decode handle with its workspace. */
typedef struct decode {
    folio_decode *handle;
    folio_workspace ws;
} decode;

/* What a model has of some new tokens. */
typedef struct rows {
    float *q, *k, *v;
} rows;

/* The trees of a step and what becomes of them. */
typedef struct trees {
    int32_t parents[BATCH][DRAFTS], positions[BATCH][DRAFTS], next_token[BATCH][DRAFTS], next_sibling[BATCH][DRAFTS];
    uint8_t mask[BATCH * DRAFTS * MAX_LEN / 8 + BATCH]; /* a bit for every row and key, each request on a byte */
} trees;

static int32_t len[BATCH], slots[BATCH][MAX_LEN];       /* of every request: tokens in the cache, and their slots */
static float *k_cache, *v_cache;                        /* [NUM_SLOTS, KV_HEADS, HEAD_DIM] */
static float k_copy[COPIES][KV_ROW], v_copy[COPIES][KV_ROW]; /* row b * MAX_LEN + i: token i of request b */

static decode create(const folio_context *ctx, uint32_t max_batch_size, uint32_t max_qo_len)
{
    folio_error err = FOLIO_INIT(folio_error);
    folio_decode_desc desc = FOLIO_INIT(folio_decode_desc);
    desc.q_dtype = FOLIO_FLOAT32;
    desc.num_qo_heads = QO_HEADS;
    desc.num_kv_heads = KV_HEADS;
    desc.head_dim_qk = HEAD_DIM;
    desc.page_size = 1; /* page ids are slots */
    desc.max_batch_size = max_batch_size;
    desc.max_qo_len = max_qo_len;
    desc.max_kv_len = MAX_LEN;
    decode made;
    check(folio_decode_create(ctx, &desc, &made.handle, &err), &err);
    folio_workspace_info info = FOLIO_INIT(folio_workspace_info);
    check(folio_decode_workspace(made.handle, &info, &err), &err);
    made.ws = allocate_workspace(&info);
    return made;
}

static void destroy(decode d)
{
    folio_decode_destroy(d.handle);
    free(d.ws.host);
}

/* Attention of `count` requests with qo_len rows each over rows `indices` of a cache of num_slots rows. */
static void attend(decode d, int64_t count, uint32_t qo_len, int32_t *kv_indptr, int32_t *indices, float *q_data,
                   float *caches[2], int64_t num_slots, float *o_data, folio_tensor *mask)
{
    folio_error err = FOLIO_INIT(folio_error);
    int32_t lengths[TOKENS];
    for (int64_t b = 0; b < count; b++)
        lengths[b] = kv_indptr[b + 1] - kv_indptr[b];
    folio_tensor indptr = int32_vector(kv_indptr, (int64_t[]){ count + 1 });
    folio_tensor kv_indices = int32_vector(indices, (int64_t[]){ kv_indptr[count] });
    folio_tensor kv_len = int32_vector(lengths, (int64_t[]){ count });
    folio_batch batch = FOLIO_INIT(folio_batch);
    batch.qo_len = qo_len;
    batch.kv_indptr = &indptr;
    batch.kv_indices = &kv_indices;
    batch.kv_len = &kv_len;
    check(folio_decode_plan(d.handle, &batch, &d.ws, NULL, &err), &err);

    int64_t q_shape[] = { TOKENS, QO_HEADS, HEAD_DIM }, cache_shape[] = { num_slots, KV_HEADS, HEAD_DIM };
    folio_tensor q = tensor(q_data, FOLIO_FLOAT32, 3, q_shape), o = tensor(o_data, FOLIO_FLOAT32, 3, q_shape);
    folio_tensor k = tensor(caches[0], FOLIO_FLOAT32, 3, cache_shape);
    folio_tensor v = tensor(caches[1], FOLIO_FLOAT32, 3, cache_shape);
    folio_attention_args args = FOLIO_INIT(folio_attention_args);
    args.q = &q;
    args.k = &k;
    args.v = &v;
    args.o = &o;
    args.mask_mode = mask ? FOLIO_MASK_CUSTOM_BITS : FOLIO_MASK_CAUSAL;
    args.custom_mask = mask;
    check(folio_decode_run(d.handle, &args, NULL, &err), &err);
}

/* Writes `count` tokens to their slots of the cache; negative slots are skipped. */
static void append(const folio_context *ctx, float *key, float *value, int64_t count, int32_t *slot_mapping)
{
    folio_error err = FOLIO_INIT(folio_error);
    int64_t shape[] = { count, KV_HEADS, HEAD_DIM }, cache_shape[] = { NUM_SLOTS, 1, KV_HEADS, HEAD_DIM };
    folio_tensor k = tensor(key, FOLIO_FLOAT32, 3, shape), v = tensor(value, FOLIO_FLOAT32, 3, shape);
    folio_tensor to_k = tensor(k_cache, FOLIO_FLOAT32, 4, cache_shape);
    folio_tensor to_v = tensor(v_cache, FOLIO_FLOAT32, 4, cache_shape);
    folio_tensor mapping = int32_vector(slot_mapping, (int64_t[]){ count });
    folio_kv_append_args args = FOLIO_INIT(folio_kv_append_args);
    args.key = &k;
    args.value = &v;
    args.k_cache = &to_k;
    args.v_cache = &to_v;
    args.slot_mapping = &mapping;
    check(folio_kv_append(ctx, &args, NULL, &err), &err);
}

/* By hand: row `to` of the copies. */
static void copy(int64_t to, const rows *r, int64_t token)
{
    memcpy(k_copy[to], r->k + token * KV_ROW, sizeof k_copy[to]);
    memcpy(v_copy[to], r->v + token * KV_ROW, sizeof v_copy[to]);
}

/* A token hangs under any token before it. */
static void draft(trees *t, uint32_t *seed)
{
    for (int b = 0; b < BATCH; b++)
        for (int i = 0; i < DRAFTS; i++)
            t->parents[b][i] = i ? (int32_t)(next_random(seed) % (uint32_t)i) : -1;
}

/* The masks, positions and links of the trees; gives the mask. */
static folio_tensor build(const folio_context *ctx, trees *t)
{
    folio_error err = FOLIO_INIT(folio_error);
    static int64_t shape[] = { BATCH, DRAFTS }, mask_shape[] = { sizeof t->mask };
    folio_tensor parents = tensor(t->parents, FOLIO_INT32, 2, shape);
    folio_tensor prefix_lens = int32_vector(len, (int64_t[]){ BATCH });
    folio_tensor mask = tensor(t->mask, FOLIO_UINT8, 1, mask_shape);
    folio_tensor positions = tensor(t->positions, FOLIO_INT32, 2, shape);
    folio_tensor next_token = tensor(t->next_token, FOLIO_INT32, 2, shape);
    folio_tensor next_sibling = tensor(t->next_sibling, FOLIO_INT32, 2, shape);
    folio_tree_mask_args args = FOLIO_INIT(folio_tree_mask_args);
    args.parents = &parents;
    args.prefix_lens = &prefix_lens; /* without the drafts */
    args.mask_bits = &mask;
    args.positions = &positions;
    args.next_token = &next_token;
    args.next_sibling = &next_sibling;
    check(folio_tree_mask(ctx, &args, NULL, &err), &err);
    return mask;
}

/* One run for all trees: DRAFTS rows per request over its tokens and the tree behind them. */
static void verify(decode d, float *q, folio_tensor *mask, float *o)
{
    int32_t kv_indptr[BATCH + 1] = { 0 }, indices[NUM_SLOTS];
    for (int b = 0; b < BATCH; b++) {
        int32_t kv_len = len[b] + DRAFTS;
        memcpy(indices + kv_indptr[b], slots[b], (size_t)kv_len * sizeof *indices);
        kv_indptr[b + 1] = kv_indptr[b] + kv_len;
    }
    attend(d, BATCH, DRAFTS, kv_indptr, indices, q, (float *[]){ k_cache, v_cache }, NUM_SLOTS, o, mask);
}

/* A request for every token of every tree: the request's tokens, then the path from the root to it. */
static void attend_paths(decode d, const trees *t, float *q, float *o)
{
    static int32_t kv_indptr[TOKENS + 1], indices[TOKENS * MAX_LEN];
    for (int32_t row = 0; row < TOKENS; row++) {
        int32_t b = row / DRAFTS, first = b * DRAFTS, at = kv_indptr[row];
        for (int32_t i = 0; i < len[b]; i++)
            indices[at++] = b * MAX_LEN + i;
        int32_t end = at;
        for (int32_t node = row - first; node >= 0; node = t->parents[b][node])
            end++;
        kv_indptr[row + 1] = end;
        for (int32_t node = row - first; node >= 0; node = t->parents[b][node])
            indices[--end] = NUM_SLOTS + first + node;
    }
    attend(d, TOKENS, 1, kv_indptr, indices, q, (float *[]){ k_copy[0], v_copy[0] }, COPIES, o, NULL);
}

/* Follows the links from the root. What the target model would say of a token, a coin says here. Accepted tokens go to the
 * slots of their positions, and the others nowhere. */
static void accept(const folio_context *ctx, const trees *t, const rows *r, uint32_t *seed)
{
    int32_t slot_mapping[TOKENS];
    for (int row = 0; row < TOKENS; row++)
        slot_mapping[row] = -1;
    for (int b = 0; b < BATCH; b++) {
        int32_t before = len[b];
        for (int32_t node = 0; node >= 0;) {
            int32_t position = t->positions[b][node];
            slot_mapping[b * DRAFTS + node] = slots[b][position];
            copy(b * MAX_LEN + position, r, b * DRAFTS + node);
            len[b] = position + 1;
            node = t->next_token[b][node];
            while (node >= 0 && next_random(seed) % 3 == 0)
                node = t->next_sibling[b][node];
        }
        printf("request %d: %d of %d tokens accepted, %d in the cache\n", b, (int)(len[b] - before), DRAFTS,
               (int)len[b]);
    }
    append(ctx, r->k, r->v, TOKENS, slot_mapping);
}

static rows random_rows(int64_t count, uint32_t seed)
{
    size_t n = (size_t)count;
    return (rows){ random_float(n * Q_ROW, seed), random_float(n * KV_ROW, seed + 1), random_float(n * KV_ROW, seed + 2) };
}

static void free_rows(rows r)
{
    free(r.q);
    free(r.k);
    free(r.v);
}

/* Requests of 40 and 51 tokens, at slots all over the cache. What no token was written to is NaN. */
static void prefill(const folio_context *ctx)
{
    int32_t *pool = shuffled(NUM_SLOTS, 1);
    memcpy(slots, pool, sizeof slots);
    free(pool);
    k_cache = allocate((size_t)NUM_SLOTS * KV_ROW * sizeof *k_cache);
    v_cache = allocate((size_t)NUM_SLOTS * KV_ROW * sizeof *v_cache);
    for (size_t i = 0; i < (size_t)NUM_SLOTS * KV_ROW; i++)
        k_cache[i] = v_cache[i] = NAN;
    for (int b = 0; b < BATCH; b++) {
        len[b] = 40 + 11 * b;
        rows r = random_rows(len[b], 2 + (uint32_t)b);
        append(ctx, r.k, r.v, len[b], slots[b]);
        for (int32_t i = 0; i < len[b]; i++)
            copy(b * MAX_LEN + i, &r, i);
        free_rows(r);
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

    prefill(ctx);
    decode of_trees = create(ctx, BATCH, DRAFTS), of_paths = create(ctx, TOKENS, 1);
    uint32_t seed = 100;
    for (int step = 0; step < STEPS; step++) {
        static trees t;
        draft(&t, &seed);
        rows r = random_rows(TOKENS, next_random(&seed));
        int32_t slot_mapping[TOKENS];
        for (int row = 0; row < TOKENS; row++) {
            slot_mapping[row] = slots[row / DRAFTS][len[row / DRAFTS] + row % DRAFTS];
            copy(NUM_SLOTS + row, &r, row);
        }
        append(ctx, r.k, r.v, TOKENS, slot_mapping);
        folio_tensor mask = build(ctx, &t);
        static float tree[TOKENS * Q_ROW], paths[TOKENS * Q_ROW];
        verify(of_trees, r.q, &mask, tree);
        attend_paths(of_paths, &t, r.q, paths);
        expect_float("the trees against their paths", tree, paths, TOKENS * Q_ROW);
        accept(ctx, &t, &r, &seed);
        free_rows(r);
    }

    destroy(of_trees);
    destroy(of_paths);
    folio_context_destroy(ctx);
    free(k_cache);
    free(v_cache);
    return 0;
}
