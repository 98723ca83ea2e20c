/* A small float32 decode problem over token slots, whose parts stay in one struct. */
#ifndef TESTS_PROBLEM_H
#define TESTS_PROBLEM_H

#include "expect.h"

enum { HEADS = 2, HEAD_DIM = 8, SLOTS = 32, KEYS = 11 };

typedef struct problem {
    float q_data[HEADS * HEAD_DIM], k_data[SLOTS * HEADS * HEAD_DIM], v_data[SLOTS * HEADS * HEAD_DIM];
    int32_t indptr_data[2], slots_data[KEYS], len_data[1];
    int64_t row_shape[3], cache_shape[3], indptr_shape[1], slots_shape[1], len_shape[1], lse_shape[2];
    folio_tensor q, k, v, indptr, slots, len;
    folio_decode_desc desc;
    folio_batch batch;
    void *workspace;
} problem;

/* Different seeds make different numbers of the same shapes. */
static inline void make_problem(problem *p, int seed)
{
    int i;
    memset(p, 0, sizeof *p);
    for (i = 0; i < HEADS * HEAD_DIM; i++)
        p->q_data[i] = (float)((i * 7 + seed) % 11) / 11.0f - 0.5f;
    for (i = 0; i < SLOTS * HEADS * HEAD_DIM; i++) {
        p->k_data[i] = (float)((i * 5 + seed) % 13) / 13.0f - 0.5f;
        p->v_data[i] = (float)((i * 3 + seed) % 17) / 17.0f - 0.5f;
    }
    for (i = 0; i < KEYS; i++)
        p->slots_data[i] = (i * 13 + 5) % SLOTS;
    p->indptr_data[1] = p->len_data[0] = KEYS;

    p->row_shape[0] = p->lse_shape[0] = p->len_shape[0] = 1;
    p->row_shape[1] = p->lse_shape[1] = p->cache_shape[1] = HEADS;
    p->row_shape[2] = p->cache_shape[2] = HEAD_DIM;
    p->cache_shape[0] = SLOTS;
    p->indptr_shape[0] = 2;
    p->slots_shape[0] = KEYS;
    p->q = host_tensor(p->q_data, FOLIO_FLOAT32, 3, p->row_shape);
    p->k = host_tensor(p->k_data, FOLIO_FLOAT32, 3, p->cache_shape);
    p->v = host_tensor(p->v_data, FOLIO_FLOAT32, 3, p->cache_shape);
    p->indptr = host_tensor(p->indptr_data, FOLIO_INT32, 1, p->indptr_shape);
    p->slots = host_tensor(p->slots_data, FOLIO_INT32, 1, p->slots_shape);
    p->len = host_tensor(p->len_data, FOLIO_INT32, 1, p->len_shape);

    p->desc = FOLIO_INIT(folio_decode_desc);
    p->desc.q_dtype = FOLIO_FLOAT32;
    p->desc.num_qo_heads = p->desc.num_kv_heads = HEADS;
    p->desc.head_dim_qk = HEAD_DIM;
    p->desc.page_size = 1;
    p->desc.max_batch_size = 1;
    p->desc.max_kv_len = SLOTS;
    p->batch = FOLIO_INIT(folio_batch);
    p->batch.kv_indptr = &p->indptr;
    p->batch.kv_indices = &p->slots;
    p->batch.kv_len = &p->len;
}

/* A handle for the problem, planned; free p->workspace after destroying it. */
static inline folio_decode *planned_decode(const folio_context *ctx, problem *p)
{
    folio_error err = FOLIO_INIT(folio_error);
    folio_workspace_info info = FOLIO_INIT(folio_workspace_info);
    folio_workspace ws = FOLIO_INIT(folio_workspace);
    folio_decode *decode = NULL;
    size_t padding;
    expect_ok(folio_decode_create(ctx, &p->desc, &decode, &err), &err);
    expect_ok(folio_decode_workspace(decode, &info, &err), &err);
    EXPECT(info.device_bytes == 0 && info.alignment > 0);
    padding = (size_t)info.alignment;
    p->workspace = malloc((size_t)info.host_bytes + padding);
    EXPECT(p->workspace != NULL);
    ws.host = (char *)p->workspace + (padding - (uintptr_t)p->workspace % padding) % padding;
    ws.host_bytes = info.host_bytes;
    expect_ok(folio_decode_plan(decode, &p->batch, &ws, NULL, &err), &err);
    return decode;
}

/* Runs a planned handle into o `[HEADS * HEAD_DIM]` and lse `[HEADS]`. */
static inline folio_status run_decode(const folio_decode *decode, problem *p, float *o_data, float *lse_data,
                                      folio_error *err)
{
    folio_tensor o = host_tensor(o_data, FOLIO_FLOAT32, 3, p->row_shape);
    folio_tensor lse = host_tensor(lse_data, FOLIO_FLOAT32, 2, p->lse_shape);
    folio_attention_args args = FOLIO_INIT(folio_attention_args);
    args.q = &p->q;
    args.k = &p->k;
    args.v = &p->v;
    args.o = &o;
    args.lse = &lse;
    return folio_decode_run(decode, &args, NULL, err);
}

#endif
