/* The demo: one attention layer of Llama 3 8B over a step's mixed batch, at real sizes.
 *
 * 32 query heads over 8 KV heads, head_dim 128, bf16, pages of 16 tokens in random order; requests that
 * decode beside prompts of which a chunk is computed. It runs the batch as one plan and one call, times it,
 * times the decoding requests alone and compares their rate with what this machine reads from memory,
 * and checks rows of every request against Folio's float64 oracle.
 *
 *   demo            real sizes
 *   demo --quick    small ones, for tests */
#include "common.h"
#include <pthread.h>
#include <time.h>
#include <unistd.h>

enum { QO_HEADS = 32, KV_HEADS = 8, HEAD_DIM = 128, PAGE_SIZE = 16 };
enum { ROW = QO_HEADS * HEAD_DIM, MOST_REQUESTS = 32, MOST_THREADS = 256 };
static const size_t key_bytes = 2 * sizeof(uint16_t) * KV_HEADS * HEAD_DIM; /* with its value */

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
} step;

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void progress(const char *text)
{
    printf("%s", text);
    fflush(stdout);
}

/* ---- The batch --------------------------------------------------------------------------------- */

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
    /* Lengths from 7/8 to 9/8 of the middle one, none a whole number of pages. */
    for (int32_t i = 0; i < n->decodes; i++)
        add_request(&s, 1, n->decode_keys * (7 * n->decodes + 2 * i) / (8 * n->decodes) + 5);
    for (int32_t i = 0; i < n->chunks; i++)
        add_request(&s, n->chunk_rows, n->chunk_context + n->chunk_rows);
    size_t cache_count = (size_t)s.num_pages * PAGE_SIZE * KV_HEADS * HEAD_DIM;
    s.pages = shuffled(s.num_pages, 1);
    s.q = random_bf16((size_t)s.num_tokens * ROW, 2);
    s.k = random_bf16(cache_count, 3);
    s.v = random_bf16(cache_count, 4);
    /* Random keys are alike to a random query; real ones are not. Longer queries sharpen the softmax. */
    for (size_t i = 0; i < (size_t)s.num_tokens * ROW; i++)
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

/* Keys that all rows together see. */
static double visible_keys(const step *s)
{
    double keys = 0;
    for (int32_t b = 0; b < s->batch_size; b++) {
        double rows = s->qo_indptr[b + 1] - s->qo_indptr[b];
        keys += rows * (s->kv_len[b] - (rows - 1) / 2);
    }
    return keys;
}

static double bytes_read(const step *s, int32_t requests)
{
    double keys = 0;
    for (int32_t b = 0; b < requests; b++)
        keys += s->kv_len[b];
    return keys * (double)key_bytes;
}

/* ---- Folio ------------------------------------------------------------------------------------- */

static folio_context *open_cpu(uint32_t flags, uint32_t num_threads)
{
    folio_error err = FOLIO_INIT(folio_error);
    folio_context_desc desc = FOLIO_INIT(folio_context_desc);
    desc.flags = flags;
    desc.device_type = FOLIO_DEVICE_CPU;
    desc.num_threads = num_threads;
    folio_context *ctx = NULL;
    check(folio_context_create(&desc, &ctx, &err), &err);
    return ctx;
}

/* Seconds per call of the best round. */
typedef struct timing {
    double plan, run;
    int rounds;
} timing;

/* Plans and runs the whole step, as a prefill batch: any mix of row counts. */
static timing run_mixed(const folio_context *ctx, step *s, double seconds, uint16_t *o, float *lse)
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
    desc.max_kv_len = 8192;
    desc.max_num_pages = (uint64_t)s->num_pages;
    folio_prefill *handle = NULL;
    check(folio_prefill_create(ctx, &desc, &handle, &err), &err);
    folio_workspace_info info = FOLIO_INIT(folio_workspace_info);
    check(folio_prefill_workspace(handle, &info, &err), &err);
    folio_workspace ws = allocate_workspace(&info);
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

    int64_t q_shape[] = { s->num_tokens, QO_HEADS, HEAD_DIM };
    int64_t cache_shape[] = { s->num_pages, PAGE_SIZE, KV_HEADS, HEAD_DIM };
    folio_tensor q = tensor(s->q, FOLIO_BFLOAT16, 3, q_shape);
    folio_tensor k = tensor(s->k, FOLIO_BFLOAT16, 4, cache_shape);
    folio_tensor v = tensor(s->v, FOLIO_BFLOAT16, 4, cache_shape);
    folio_tensor out = tensor(o, FOLIO_BFLOAT16, 3, q_shape);
    folio_tensor out_lse = tensor(lse, FOLIO_FLOAT32, 2, q_shape);
    folio_attention_args args = FOLIO_INIT(folio_attention_args);
    args.q = &q;
    args.k = &k;
    args.v = &v;
    args.o = &out;
    args.lse = &out_lse;

    timing best = { 1e30, 1e30, 0 };
    for (double start = now(); best.rounds < 3 || now() - start < seconds; best.rounds++) {
        double t0 = now();
        check(folio_prefill_plan(handle, &batch, &ws, NULL, &err), &err);
        double t1 = now();
        check(folio_prefill_run(handle, &args, NULL, &err), &err);
        double t2 = now();
        best.plan = fmin(best.plan, t1 - t0);
        best.run = fmin(best.run, t2 - t1);
    }
    folio_prefill_destroy(handle);
    free(ws.host);
    return best;
}

static folio_decode *create_decode(const folio_context *ctx, uint32_t max_batch_size)
{
    folio_error err = FOLIO_INIT(folio_error);
    folio_decode_desc desc = FOLIO_INIT(folio_decode_desc);
    desc.q_dtype = FOLIO_BFLOAT16;
    desc.kv_layout = FOLIO_LAYOUT_NHD;
    desc.num_qo_heads = QO_HEADS;
    desc.num_kv_heads = KV_HEADS;
    desc.head_dim_qk = HEAD_DIM;
    desc.page_size = PAGE_SIZE;
    desc.max_batch_size = max_batch_size;
    desc.max_kv_len = 8192;
    folio_decode *handle = NULL;
    check(folio_decode_create(ctx, &desc, &handle, &err), &err);
    return handle;
}

/* Rows [first, first + n) of the step as n decodes, whose pages begin at `kv_indptr`. */
static timing run_decode(folio_decode *handle, step *s, int32_t first, int32_t n, int32_t *kv_indptr,
                         int32_t *kv_len, double seconds, uint16_t *o, float *lse)
{
    folio_error err = FOLIO_INIT(folio_error);
    folio_workspace_info info = FOLIO_INIT(folio_workspace_info);
    check(folio_decode_workspace(handle, &info, &err), &err);
    folio_workspace ws = allocate_workspace(&info);

    /* indptr counts from 0, so a request in the middle of the page list gets the list from there. */
    int32_t zero_based[MOST_REQUESTS + 1];
    for (int32_t i = 0; i <= n; i++)
        zero_based[i] = kv_indptr[i] - kv_indptr[0];
    folio_tensor indptr = int32_vector(zero_based, (int64_t[]){ n + 1 });
    folio_tensor indices = int32_vector(s->pages + kv_indptr[0], (int64_t[]){ zero_based[n] });
    folio_tensor lengths = int32_vector(kv_len, (int64_t[]){ n });
    folio_batch batch = FOLIO_INIT(folio_batch);
    batch.kv_indptr = &indptr;
    batch.kv_indices = &indices;
    batch.kv_len = &lengths;

    int64_t q_shape[] = { n, QO_HEADS, HEAD_DIM };
    int64_t cache_shape[] = { s->num_pages, PAGE_SIZE, KV_HEADS, HEAD_DIM };
    folio_tensor q = tensor(s->q + (size_t)first * ROW, FOLIO_BFLOAT16, 3, q_shape);
    folio_tensor k = tensor(s->k, FOLIO_BFLOAT16, 4, cache_shape);
    folio_tensor v = tensor(s->v, FOLIO_BFLOAT16, 4, cache_shape);
    folio_tensor out = tensor(o, FOLIO_BFLOAT16, 3, q_shape);
    folio_tensor out_lse = tensor(lse, FOLIO_FLOAT32, 2, q_shape);
    folio_attention_args args = FOLIO_INIT(folio_attention_args);
    args.q = &q;
    args.k = &k;
    args.v = &v;
    args.o = &out;
    args.lse = &out_lse;

    timing best = { 0, 1e30, 0 };
    check(folio_decode_plan(handle, &batch, &ws, NULL, &err), &err);
    for (double start = now(); best.rounds < 1 || now() - start < seconds; best.rounds++) {
        double t = now();
        check(folio_decode_run(handle, &args, NULL, &err), &err);
        best.run = fmin(best.run, now() - t);
    }
    free(ws.host);
    return best;
}

/* ---- The machine's read bandwidth -------------------------------------------------------------- */

typedef struct slice {
    const uint64_t *words;
    size_t count;
    uint64_t sum; /* so that the reads are not optimised away */
} slice;

static void *read_slice(void *argument)
{
    slice *s = argument;
    uint64_t sums[8] = { 0 };
    for (size_t i = 0; i + 8 <= s->count; i += 8)
        for (int j = 0; j < 8; j++)
            sums[j] += s->words[i + (size_t)j];
    for (int j = 0; j < 8; j++)
        s->sum += sums[j];
    return NULL;
}

/* Bytes per second that all threads together read from the key cache, front to back. */
static double read_bandwidth(const step *s, uint32_t num_threads, double seconds)
{
    size_t words = (size_t)s->num_pages * PAGE_SIZE * key_bytes / 2 / sizeof(uint64_t);
    double best = 0;
    for (double start = now(); best == 0 || now() - start < seconds;) {
        pthread_t threads[MOST_THREADS];
        slice slices[MOST_THREADS];
        double t = now();
        for (uint32_t i = 0; i < num_threads; i++) {
            size_t count = words / num_threads;
            slices[i] = (slice){ (const uint64_t *)(const void *)s->k + i * count, count, 0 };
            if (pthread_create(&threads[i], NULL, read_slice, &slices[i]) != 0) {
                fprintf(stderr, "cannot start a thread\n");
                exit(1);
            }
        }
        for (uint32_t i = 0; i < num_threads; i++)
            pthread_join(threads[i], NULL);
        double rate = (double)(words / num_threads * num_threads * sizeof(uint64_t)) / (now() - t);
        if (rate > best)
            best = rate;
    }
    return best;
}

/* ---- The check --------------------------------------------------------------------------------- */

/* Compares rows of every request with the oracle. A causal row at position p sees the keys 0 to p, so it
 * is a decode over p + 1 keys, and the oracle computes only the rows that are looked at. */
static void check_rows(step *s, int32_t rows_to_check, const uint16_t *o, const float *lse)
{
    folio_context *oracle = open_cpu(FOLIO_CONTEXT_REFERENCE, 1);
    folio_decode *handle = create_decode(oracle, 1);
    int32_t most = s->decodes + (s->batch_size - s->decodes) * rows_to_check, rows = 0;
    uint16_t *got = allocate((size_t)most * ROW * sizeof *got), *want = allocate((size_t)most * ROW * sizeof *want);
    float *got_lse = allocate((size_t)most * QO_HEADS * sizeof *got_lse);
    float *want_lse = allocate((size_t)most * QO_HEADS * sizeof *want_lse);

    progress("checking    ");
    for (int32_t b = 0; b < s->batch_size; b++) {
        int32_t request_rows = s->qo_indptr[b + 1] - s->qo_indptr[b];
        int32_t samples = request_rows < rows_to_check ? request_rows : rows_to_check;
        for (int32_t i = 0; i < samples; i++, rows++) {
            /* Evenly from the first row to the last. */
            int32_t row_of_request = samples == 1 ? 0 : i * (request_rows - 1) / (samples - 1);
            int32_t row = s->qo_indptr[b] + row_of_request;
            int32_t keys = s->kv_len[b] - request_rows + row_of_request + 1;
            int32_t pages[] = { s->kv_indptr[b], s->kv_indptr[b] + (keys + PAGE_SIZE - 1) / PAGE_SIZE };
            run_decode(handle, s, row, 1, pages, &keys, 0, want + (size_t)rows * ROW, want_lse + (size_t)rows * QO_HEADS);
            memcpy(got + (size_t)rows * ROW, o + (size_t)row * ROW, ROW * sizeof *got);
            memcpy(got_lse + (size_t)rows * QO_HEADS, lse + (size_t)row * QO_HEADS, QO_HEADS * sizeof *got_lse);
            progress(".");
        }
    }
    printf(" %d rows of %d requests against the float64 oracle\n", rows, s->batch_size);
    expect("            o", compare_bf16(got, want, (size_t)rows * ROW), BF16_TOLERANCE);
    expect("            lse", compare_float(got_lse, want_lse, (size_t)rows * QO_HEADS), 1e-4);

    folio_decode_destroy(handle);
    folio_context_destroy(oracle);
    free(got);
    free(want);
    free(got_lse);
    free(want_lse);
}

int main(int argc, char **argv)
{
    int quick = argc == 2 && strcmp(argv[1], "--quick") == 0;
    if (argc > 1 && !quick) {
        fprintf(stderr, "usage: demo [--quick]\n");
        return 2;
    }
    const sizes *n = quick ? &quick_sizes : &real_sizes;
    long cpus = sysconf(_SC_NPROCESSORS_ONLN);
    uint32_t num_threads = cpus < 1 ? 1 : cpus > MOST_THREADS ? MOST_THREADS : (uint32_t)cpus;

    printf("Folio %s on the CPU, %u threads\n", folio_version(), num_threads);
    printf("layer       Llama 3 8B: %d query heads, %d KV heads, head_dim %d, bf16, pages of %d tokens\n", QO_HEADS,
           KV_HEADS, HEAD_DIM, PAGE_SIZE);
    progress("cache       filling ... ");
    step s = make_step(n);
    printf("%.0f MiB of keys and values in %d shuffled pages\n",
           (double)s.num_pages * PAGE_SIZE * (double)key_bytes / (1 << 20), s.num_pages);
    printf("batch       %d requests decode over %d to %d keys; %d prefill chunks of %d rows follow %d cached keys\n",
           s.decodes, s.kv_len[0], s.kv_len[s.decodes - 1], n->chunks, n->chunk_rows, n->chunk_context);

    double bandwidth = 0;
    if (!quick) { /* the small cache would measure the processor's */
        progress("memory      measuring ... ");
        bandwidth = read_bandwidth(&s, num_threads, n->seconds);
        printf("this machine reads %.1f GB/s in sequence\n", bandwidth / 1e9);
    }

    uint16_t *o = allocate((size_t)s.num_tokens * ROW * sizeof *o);
    float *lse = allocate((size_t)s.num_tokens * QO_HEADS * sizeof *lse);
    folio_context *ctx = open_cpu(0, num_threads);
    timing mixed = run_mixed(ctx, &s, n->seconds, o, lse);
    printf("mixed batch plan %.1f us, run %.2f ms (best of %d): %.1f GB/s of keys and values, %.0f GFLOP/s\n",
           mixed.plan * 1e6, mixed.run * 1e3, mixed.rounds, bytes_read(&s, s.batch_size) / mixed.run / 1e9,
           4 * visible_keys(&s) * ROW / mixed.run / 1e9);
    check_rows(&s, n->rows_to_check, o, lse);

    folio_decode *handle = create_decode(ctx, MOST_REQUESTS);
    timing decode = run_decode(handle, &s, 0, s.decodes, s.kv_indptr, s.kv_len, n->seconds, o, lse);
    double rate = bytes_read(&s, s.decodes) / decode.run;
    printf("decode only kernel %s, run %.2f ms (best of %d): %.1f GB/s of keys and values", folio_decode_kernel(handle),
           decode.run * 1e3, decode.rounds, rate / 1e9);
    if (quick)
        printf("\n");
    else
        printf(", %.2f of the machine's read bandwidth\n", rate / bandwidth);

    folio_decode_destroy(handle);
    folio_context_destroy(ctx);
    free_step(&s);
    free(o);
    free(lse);
    return 0;
}
