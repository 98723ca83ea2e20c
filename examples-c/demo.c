/* The demo: one attention layer of Llama 3 8B over a step's mixed batch, at real sizes.
 *
 * 32 query heads over 8 KV heads, head_dim 128, bf16, pages of 16 tokens in random order; requests that
 * decode beside prompts of which a chunk is computed. It runs the batch as one plan and one call, checks
 * rows of every request against Folio's float64 oracle, and compares the rate of the decoding requests
 * with the rate at which this machine reads memory. Where there is a GPU that Folio has kernels for, it
 * runs there, else on the CPU.
 *
 *   demo            real sizes
 *   demo --quick    small ones, for tests, always on the CPU */
#include "demo_machine.h"

enum { QO_HEADS = 32, KV_HEADS = 8, HEAD_DIM = 128, PAGE_SIZE = 16, ROW = QO_HEADS * HEAD_DIM };
enum { MOST_REQUESTS = 32, MOST_KEYS = 8192 };

typedef struct sizes {
    int32_t decodes, decode_keys; /* requests, and keys of the middle one */
    int32_t chunks, chunk_rows, chunk_context;
    int32_t rows_to_check; /* of every chunk */
    double seconds;        /* spent on each measurement */
} sizes;

static const sizes real_sizes = { 16, 4096, 2, 512, 2048, 8, 1.5 };
static const sizes quick_sizes = { 3, 90, 1, 9, 40, 3, 0.01 };

/* A step: requests 0 to decodes - 1 decode, the others are chunks of prompts. */
typedef struct step {
    int32_t batch_size, decodes, num_tokens, num_pages;
    int32_t qo_indptr[MOST_REQUESTS + 1], kv_indptr[MOST_REQUESTS + 1], kv_len[MOST_REQUESTS];
    int32_t *pages;
    uint16_t *q, *k, *v;
    size_t q_bytes, cache_bytes; /* of q; of k, and as many of v */
} step;

static void progress(const char *text)
{
    printf("%s", text);
    fflush(stdout);
}

static void add_request(step *s, int32_t rows, int32_t keys)
{
    int32_t b = s->batch_size++;
    s->qo_indptr[b + 1] = s->num_tokens += rows;
    s->kv_indptr[b + 1] = s->num_pages += (keys + PAGE_SIZE - 1) / PAGE_SIZE;
    s->kv_len[b] = keys;
}

static step make_step(const sizes *n)
{
    step s;
    memset(&s, 0, sizeof s);
    s.decodes = n->decodes;
    /* Lengths from 7/8 to 9/8 of the middle one, few of them a whole number of pages. */
    for (int32_t i = 0; i < n->decodes; i++)
        add_request(&s, 1, n->decode_keys * (7 * n->decodes + 2 * i) / (8 * n->decodes) + 5);
    for (int32_t i = 0; i < n->chunks; i++)
        add_request(&s, n->chunk_rows, n->chunk_context + n->chunk_rows);
    size_t q_count = (size_t)s.num_tokens * ROW;
    size_t cache_count = (size_t)s.num_pages * PAGE_SIZE * KV_HEADS * HEAD_DIM;
    s.q_bytes = q_count * sizeof(uint16_t);
    s.cache_bytes = cache_count * sizeof(uint16_t);
    s.pages = shuffled(s.num_pages, 1);
    s.q = random_bf16(q_count, 2);
    s.k = random_bf16(cache_count, 3);
    s.v = random_bf16(cache_count, 4);
    /* Random keys are all alike to a random query; real ones are not. Longer queries sharpen the softmax. */
    for (size_t i = 0; i < q_count; i++)
        s.q[i] = to_bf16(4 * from_bf16(s.q[i]));
    return s;
}

static void free_step(step *s)
{
    free(s->pages);
    free(s->q);
    free(s->k);
    free(s->v);
}

/* Pairs of a row and a key that it sees. */
static double visible_pairs(const step *s)
{
    double pairs = 0;
    for (int32_t b = 0; b < s->batch_size; b++) {
        double rows = s->qo_indptr[b + 1] - s->qo_indptr[b];
        pairs += rows * (s->kv_len[b] - (rows - 1) / 2);
    }
    return pairs;
}

/* Bytes of the keys and values of the first requests, each counted once. */
static double key_value_bytes(const step *s, int32_t requests)
{
    double keys = 0;
    for (int32_t b = 0; b < requests; b++)
        keys += s->kv_len[b];
    return keys * 2 * KV_HEADS * HEAD_DIM * sizeof(uint16_t);
}

/* A step's tensors in a machine's memory. */
typedef struct layer {
    uint16_t *q, *k, *v, *o;
    float *lse;
} layer;

static layer place_layer(const machine *m, const step *s, uint16_t *o, float *lse)
{
    return (layer){ place(m, s->q, s->q_bytes), place(m, s->k, s->cache_bytes), place(m, s->v, s->cache_bytes),
                    place(m, o, s->q_bytes), place(m, lse, (size_t)s->num_tokens * QO_HEADS * sizeof *lse) };
}

static void release_layer(const machine *m, layer *l)
{
    release(m, l->q);
    release(m, l->k);
    release(m, l->v);
    release(m, l->o);
    release(m, l->lse);
}

/* The best of the rounds, in seconds. */
typedef struct timing {
    double plan, run;
    int rounds;
} timing;

/* The arguments of a run over `rows` rows. Their tensors and shapes are in `t`, which must stay. */
typedef struct tensors {
    int64_t row_shape[3], cache_shape[4];
    folio_tensor q, k, v, o, lse;
} tensors;

static folio_attention_args arguments(const machine *m, const step *s, const layer *l, int32_t rows, tensors *t)
{
    *t = (tensors){ .row_shape = { rows, QO_HEADS, HEAD_DIM },
                    .cache_shape = { s->num_pages, PAGE_SIZE, KV_HEADS, HEAD_DIM } };
    t->q = on(m, tensor(l->q, FOLIO_BFLOAT16, 3, t->row_shape));
    t->k = on(m, tensor(l->k, FOLIO_BFLOAT16, 4, t->cache_shape));
    t->v = on(m, tensor(l->v, FOLIO_BFLOAT16, 4, t->cache_shape));
    t->o = on(m, tensor(l->o, FOLIO_BFLOAT16, 3, t->row_shape));
    t->lse = on(m, tensor(l->lse, FOLIO_FLOAT32, 2, t->row_shape));
    folio_attention_args args = FOLIO_INIT(folio_attention_args);
    args.q = &t->q;
    args.k = &t->k;
    args.v = &t->v;
    args.o = &t->o;
    args.lse = &t->lse;
    return args;
}

/* Plans and runs the whole step, as a prefill batch: any mix of row counts. */
static timing run_mixed(const machine *m, step *s, const layer *l, double seconds)
{
    folio_error err = FOLIO_INIT(folio_error);
    folio_prefill_desc desc = FOLIO_INIT(folio_prefill_desc);
    desc.q_dtype = FOLIO_BFLOAT16;
    desc.kv_layout = FOLIO_LAYOUT_NHD;
    desc.num_qo_heads = QO_HEADS;
    desc.num_kv_heads = KV_HEADS;
    desc.head_dim_qk = HEAD_DIM;
    desc.page_size = PAGE_SIZE;
    desc.max_batch_size = MOST_REQUESTS;
    desc.max_num_tokens = (uint32_t)s->num_tokens;
    desc.max_kv_len = MOST_KEYS;
    desc.max_num_pages = (uint64_t)s->num_pages;
    folio_prefill *handle = NULL;
    check(folio_prefill_create(m->ctx, &desc, &handle, &err), &err);
    folio_workspace_info info = FOLIO_INIT(folio_workspace_info);
    check(folio_prefill_workspace(handle, &info, &err), &err);
    folio_workspace ws = machine_workspace(m, &info);
    printf("kernel      %s\n", folio_prefill_kernel(handle));

    folio_tensor rows = int32_vector(s->qo_indptr, (int64_t[]){ s->batch_size + 1 });
    folio_tensor indptr = int32_vector(s->kv_indptr, (int64_t[]){ s->batch_size + 1 });
    folio_tensor indices = int32_vector(s->pages, (int64_t[]){ s->num_pages });
    folio_tensor lengths = int32_vector(s->kv_len, (int64_t[]){ s->batch_size });
    folio_batch batch = FOLIO_INIT(folio_batch);
    batch.qo_indptr = &rows;
    batch.kv_indptr = &indptr;
    batch.kv_indices = &indices;
    batch.kv_len = &lengths;
    tensors t;
    folio_attention_args args = arguments(m, s, l, s->num_tokens, &t);

    timing best = { 1e30, 1e30, 0 };
    for (double start = now(); best.rounds < 3 || now() - start < seconds; best.rounds++) {
        double t0 = now();
        check(folio_prefill_plan(handle, &batch, &ws, stream_of(m), &err), &err);
        double t1 = now();
        wait_for(m);
        double t2 = now();
        check(folio_prefill_run(handle, &args, stream_of(m), &err), &err);
        wait_for(m);
        best.plan = fmin(best.plan, t1 - t0);
        best.run = fmin(best.run, now() - t2);
    }
    folio_prefill_destroy(handle);
    free_machine_workspace(m, &ws);
    return best;
}

/* A decode handle for the layer, or NULL where the machine has no code for it. */
static folio_decode *create_decode(const machine *m, uint32_t max_batch_size, folio_error *err)
{
    folio_decode_desc desc = FOLIO_INIT(folio_decode_desc);
    desc.q_dtype = FOLIO_BFLOAT16;
    desc.kv_layout = FOLIO_LAYOUT_NHD;
    desc.num_qo_heads = QO_HEADS;
    desc.num_kv_heads = KV_HEADS;
    desc.head_dim_qk = HEAD_DIM;
    desc.page_size = PAGE_SIZE;
    desc.max_batch_size = max_batch_size;
    desc.max_kv_len = MOST_KEYS;
    folio_decode *handle = NULL;
    folio_status status = folio_decode_create(m->ctx, &desc, &handle, err);
    if (status != FOLIO_ERR_UNSUPPORTED)
        check(status, err);
    return handle;
}

/* Runs n decodes over the pages from `pages` on; kv_indptr counts from 0. */
static timing run_decode(const machine *m, folio_decode *handle, const step *s, const layer *l, int32_t n,
                         int32_t *kv_indptr, int32_t *pages, int32_t *kv_len, double seconds)
{
    folio_error err = FOLIO_INIT(folio_error);
    folio_workspace_info info = FOLIO_INIT(folio_workspace_info);
    check(folio_decode_workspace(handle, &info, &err), &err);
    folio_workspace ws = machine_workspace(m, &info);

    folio_tensor indptr = int32_vector(kv_indptr, (int64_t[]){ n + 1 });
    folio_tensor indices = int32_vector(pages, (int64_t[]){ kv_indptr[n] });
    folio_tensor lengths = int32_vector(kv_len, (int64_t[]){ n });
    folio_batch batch = FOLIO_INIT(folio_batch);
    batch.kv_indptr = &indptr;
    batch.kv_indices = &indices;
    batch.kv_len = &lengths;
    tensors t;
    folio_attention_args args = arguments(m, s, l, n, &t);

    timing best = { 0, 1e30, 0 };
    check(folio_decode_plan(handle, &batch, &ws, stream_of(m), &err), &err);
    for (double start = now(); best.rounds < 1 || now() - start < seconds; best.rounds++) {
        wait_for(m);
        double t0 = now();
        check(folio_decode_run(handle, &args, stream_of(m), &err), &err);
        wait_for(m);
        best.run = fmin(best.run, now() - t0);
    }
    free_machine_workspace(m, &ws);
    return best;
}

/* Compares rows of every request with the oracle. A causal row at position p sees the keys 0 to p, so it
 * is a decode over p + 1 keys, and the oracle computes only the rows that are looked at. */
static void check_rows(const step *s, int32_t rows_to_check, const uint16_t *o, const float *lse)
{
    folio_error err = FOLIO_INIT(folio_error);
    machine oracle = open_cpu(FOLIO_CONTEXT_REFERENCE);
    folio_decode *handle = create_decode(&oracle, 1, &err);
    uint16_t want[ROW];
    float want_lse[QO_HEADS];
    difference o_difference = { 0, 0, 0, 0 }, lse_difference = { 0, 0, 0, 0 };
    int32_t rows = 0;

    progress("checking    ");
    for (int32_t b = 0; b < s->batch_size; b++) {
        int32_t request_rows = s->qo_indptr[b + 1] - s->qo_indptr[b];
        int32_t samples = request_rows < rows_to_check ? request_rows : rows_to_check;
        for (int32_t i = 0; i < samples; i++, rows++) {
            /* Evenly from the first row to the last. */
            int32_t row_of_request = samples == 1 ? 0 : i * (request_rows - 1) / (samples - 1);
            size_t row = (size_t)(s->qo_indptr[b] + row_of_request);
            int32_t keys = s->kv_len[b] - request_rows + row_of_request + 1;
            int32_t kv_indptr[] = { 0, (keys + PAGE_SIZE - 1) / PAGE_SIZE };
            layer l = { s->q + row * ROW, s->k, s->v, want, want_lse };
            run_decode(&oracle, handle, s, &l, 1, kv_indptr, s->pages + s->kv_indptr[b], &keys, 0);
            compare_bf16(&o_difference, o + row * ROW, want, ROW);
            compare_float(&lse_difference, lse + row * QO_HEADS, want_lse, QO_HEADS);
            progress(".");
        }
    }
    printf(" %d rows of %d requests against the float64 oracle\n", rows, s->batch_size);
    expect("            o", &o_difference, BF16_TOLERANCE);
    expect("            lse", &lse_difference, 1e-4);
    folio_decode_destroy(handle);
    folio_context_destroy(oracle.ctx);
}

/* The GPU where Folio has one and can do this layer on it, else the CPU. */
static machine choose_machine(cuda *gpu, int quick)
{
    if (!quick && folio_device_count(FOLIO_DEVICE_CUDA) > 0) {
        folio_error err = FOLIO_INIT(folio_error);
        *gpu = open_cuda();
        machine m = open_gpu(gpu);
        folio_decode *handle = create_decode(&m, 1, &err);
        if (handle) {
            printf("Folio %s on %s\n", folio_version(), gpu->name);
            folio_decode_destroy(handle);
            return m;
        }
        printf("Not on %s: %s\n", gpu->name, err.message);
        folio_context_destroy(m.ctx);
    }
    machine m = open_cpu(0);
    printf("Folio %s on the CPU, %u threads\n", folio_version(), m.num_threads);
    return m;
}

int main(int argc, char **argv)
{
    int quick = argc == 2 && strcmp(argv[1], "--quick") == 0;
    if (argc > 1 && !quick) {
        fprintf(stderr, "usage: demo [--quick]\n");
        return 2;
    }
    const sizes *n = quick ? &quick_sizes : &real_sizes;
    folio_error err = FOLIO_INIT(folio_error);
    cuda gpu;
    machine m = choose_machine(&gpu, quick);
    printf("layer       Llama 3 8B: %d query heads, %d KV heads, head_dim %d, bf16, pages of %d tokens\n", QO_HEADS,
           KV_HEADS, HEAD_DIM, PAGE_SIZE);
    progress("cache       filling ... ");
    step s = make_step(n);
    printf("%.0f MiB of keys and values in %d shuffled pages\n", (double)(2 * s.cache_bytes) / (1 << 20), s.num_pages);
    printf("batch       %d requests decode over %d to %d keys; %d prefill chunks of %d rows follow %d cached keys\n",
           s.decodes, s.kv_len[0], s.kv_len[s.decodes - 1], n->chunks, n->chunk_rows, n->chunk_context);
    uint16_t *o = allocate(s.q_bytes);
    size_t lse_bytes = (size_t)s.num_tokens * QO_HEADS * sizeof(float);
    float *lse = allocate(lse_bytes);
    layer l = place_layer(&m, &s, o, lse);

    timing mixed = run_mixed(&m, &s, &l, n->seconds);
    printf("mixed batch plan %.1f us, run %.3f ms (best of %d): %.1f GB/s of keys and values, %.0f GFLOP/s\n",
           mixed.plan * 1e6, mixed.run * 1e3, mixed.rounds, key_value_bytes(&s, s.batch_size) / mixed.run / 1e9,
           4 * visible_pairs(&s) * ROW / mixed.run / 1e9);
    fetch(&m, o, l.o, s.q_bytes);
    fetch(&m, lse, l.lse, lse_bytes);
    check_rows(&s, n->rows_to_check, o, lse);

    folio_decode *handle = create_decode(&m, MOST_REQUESTS, &err);
    timing decode = run_decode(&m, handle, &s, &l, s.decodes, s.kv_indptr, s.pages, s.kv_len, n->seconds);
    double rate = key_value_bytes(&s, s.decodes) / decode.run;
    printf("decode only kernel %s, run %.3f ms (best of %d): %.1f GB/s of keys and values\n",
           folio_decode_kernel(handle), decode.run * 1e3, decode.rounds, rate / 1e9);
    if (!quick) { /* the small cache would measure the processor's own */
        double bandwidth = read_bandwidth(&m, l.k, s.cache_bytes, n->seconds);
        printf("            which is %.2f of the %.1f GB/s that this machine reads in sequence\n", rate / bandwidth,
               bandwidth / 1e9);
    }

    folio_decode_destroy(handle);
    folio_context_destroy(m.ctx);
    release_layer(&m, &l);
    free_step(&s);
    free(o);
    free(lse);
    return 0;
}
