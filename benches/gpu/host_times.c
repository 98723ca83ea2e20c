/* Host time per call of plan, run and append on CUDA device 0, from C, and of plan and run of MLA: what the calls cost
 * without an interpreter around them. The device is idle at every call, so that no call waits for it. Prints one JSON
 * line per row, which bench.py takes over.
 *
 *   cc -O2 -Iinclude benches/gpu/host_times.c -Ltarget/release -lfolio -ldl -o host_times
 *
 * Only the driver is opened, by hand: the program is compiled where there is no CUDA. */
#include <dlfcn.h>
#include <folio/folio.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { ROUNDS = 500, HEADS = 32, KV_HEADS = 8, HEAD_DIM = 128, PAGE = 16, MAX_KEYS = 2048 };
/* Of DeepSeek-V3, whose heads are shared out to eight devices. */
enum { MLA_HEADS = 16, LATENT = 512, ROPE = 64, MLA_PAGE = 64 };

static void check(int fine, const char *what)
{
    if (fine)
        return;
    fprintf(stderr, "%s failed\n", what);
    exit(1);
}

/* --- the driver ---------------------------------------------------------------------------------- */

static void *driver;

static void *symbol(const char *name)
{
    void *address = dlsym(driver, name);
    check(address != NULL, name);
    return address;
}

/* A driver function whose arguments are numbers and pointers. */
#define CALL(name, types, ...) check(((int (*) types)symbol(#name))(__VA_ARGS__) == 0, #name)

static void *open_device(void)
{
    void *context, *stream;
    driver = dlopen("libcuda.so.1", RTLD_NOW);
    check(driver != NULL, "libcuda.so.1");
    CALL(cuInit, (unsigned), 0);
    CALL(cuDevicePrimaryCtxRetain, (void **, int), &context, 0);
    CALL(cuCtxSetCurrent, (void *), context);
    CALL(cuStreamCreate, (void **, unsigned), &stream, 1);
    return stream;
}

static void *device_memory(size_t bytes)
{
    uint64_t address;
    CALL(cuMemAlloc_v2, (uint64_t *, size_t), &address, bytes);
    CALL(cuMemsetD8_v2, (uint64_t, unsigned char, size_t), address, 0, bytes);
    return (void *)(uintptr_t)address;
}

static void *pinned_memory(size_t bytes)
{
    void *address;
    CALL(cuMemHostAlloc, (void **, size_t, unsigned), &address, bytes, 0);
    return address;
}

static void finish(void *stream) { CALL(cuStreamSynchronize, (void *), stream); }

/* --- tensors ------------------------------------------------------------------------------------- */

typedef struct tensor {
    folio_tensor tensor;
    int64_t shape[4];
} tensor;

static void describe(tensor *t, void *data, int32_t device_type, folio_dtype dtype, int ndim, const int64_t *shape)
{
    memset(t, 0, sizeof *t);
    memcpy(t->shape, shape, (size_t)ndim * sizeof *shape);
    t->tensor.data = data;
    t->tensor.device_type = device_type;
    t->tensor.ndim = ndim;
    t->tensor.dtype = dtype;
    t->tensor.shape = t->shape;
}

#define SHAPE(...) ((const int64_t[]){__VA_ARGS__})

/* --- what is timed ------------------------------------------------------------------------------- */

typedef struct problem {
    void *stream;
    folio_decode *decode;
    folio_mla *mla;
    folio_context *context;
    folio_batch batch;
    folio_workspace workspace;
    folio_attention_args run;
    folio_kv_append_args append;
    folio_mla_args mla_run;
} problem;

typedef folio_status operation(problem *, folio_error *);

static folio_status plan(problem *p, folio_error *err)
{
    return folio_decode_plan(p->decode, &p->batch, &p->workspace, p->stream, err);
}
static folio_status run(problem *p, folio_error *err) { return folio_decode_run(p->decode, &p->run, p->stream, err); }
static folio_status append(problem *p, folio_error *err)
{
    return folio_kv_append(p->context, &p->append, p->stream, err);
}

static folio_status mla_plan(problem *p, folio_error *err)
{
    return folio_mla_plan(p->mla, &p->batch, &p->workspace, p->stream, err);
}
static folio_status mla_run(problem *p, folio_error *err) { return folio_mla_run(p->mla, &p->mla_run, p->stream, err); }

static int ascending(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void measure(problem *p, operation *call, const char *kind, int batch_size)
{
    static double us[ROUNDS];
    for (int i = -10; i < ROUNDS; i++) {
        struct timespec begin, end;
        folio_error err = FOLIO_INIT(folio_error);
        clock_gettime(CLOCK_MONOTONIC, &begin);
        const folio_status status = call(p, &err);
        clock_gettime(CLOCK_MONOTONIC, &end);
        check(status == FOLIO_OK, err.message);
        finish(p->stream);
        if (i >= 0)
            us[i] = (double)(end.tv_sec - begin.tv_sec) * 1e6 + (double)(end.tv_nsec - begin.tv_nsec) * 1e-3;
    }
    qsort(us, ROUNDS, sizeof *us, ascending);
    printf("{\"kind\": \"%s\", \"name\": \"bs=%d\", \"us\": {\"folio\": %.3f}}\n", kind, batch_size, us[ROUNDS / 2]);
}

static folio_workspace workspace(const folio_workspace_info *info)
{
    folio_workspace ws = FOLIO_INIT(folio_workspace);
    ws.device = device_memory(info->device_bytes), ws.device_bytes = info->device_bytes;
    ws.host = pinned_memory(info->host_bytes), ws.host_bytes = info->host_bytes;
    return ws;
}

/* Up to MAX_KEYS keys a request, 1024 of a single one; lengths and page ids on the host. */
typedef struct lengths {
    int32_t *indptr, *ids, *last;
    tensor kv_indptr, kv_indices, last_page_len;
    int num_pages;
} lengths;

static void draw(lengths *l, int batch_size, int page_size)
{
    l->indptr = calloc((size_t)batch_size + 1, sizeof *l->indptr), l->last = calloc((size_t)batch_size, sizeof *l->last);
    check(l->indptr && l->last, "calloc");
    unsigned seed = 1;
    for (int b = 0; b < batch_size; b++) {
        seed = seed * 1664525u + 1013904223u;
        const int keys = batch_size == 1 ? 1024 : 1 + (int)((seed >> 8) % MAX_KEYS);
        const int pages = (keys + page_size - 1) / page_size;
        l->indptr[b + 1] = l->indptr[b] + pages;
        l->last[b] = keys - (pages - 1) * page_size;
    }
    l->num_pages = l->indptr[batch_size];
    l->ids = calloc((size_t)l->num_pages, sizeof *l->ids);
    check(l->ids != NULL, "calloc");
    for (int i = 0; i < l->num_pages; i++)
        l->ids[i] = (int)((long)i * 7919 % l->num_pages);
    describe(&l->kv_indptr, l->indptr, FOLIO_DEVICE_CPU, FOLIO_INT32, 1, SHAPE(batch_size + 1));
    describe(&l->kv_indices, l->ids, FOLIO_DEVICE_CPU, FOLIO_INT32, 1, SHAPE(l->num_pages));
    describe(&l->last_page_len, l->last, FOLIO_DEVICE_CPU, FOLIO_INT32, 1, SHAPE(batch_size));
}

static folio_batch batch_of(const lengths *l)
{
    folio_batch batch = FOLIO_INIT(folio_batch);
    batch.kv_indptr = &l->kv_indptr.tensor, batch.kv_indices = &l->kv_indices.tensor;
    batch.last_page_len = &l->last_page_len.tensor;
    return batch;
}

static void free_lengths(lengths *l) { free(l->indptr), free(l->ids), free(l->last); }

static void time_decode(const folio_context *context, void *stream, int batch_size)
{
    problem p = {.stream = stream, .context = (folio_context *)context};
    folio_error err = FOLIO_INIT(folio_error);
    folio_decode_desc desc = FOLIO_INIT(folio_decode_desc);
    folio_workspace_info info = FOLIO_INIT(folio_workspace_info);
    desc.q_dtype = FOLIO_BFLOAT16;
    desc.num_qo_heads = HEADS, desc.num_kv_heads = KV_HEADS, desc.head_dim_qk = HEAD_DIM;
    desc.page_size = PAGE, desc.max_batch_size = (uint32_t)batch_size, desc.max_kv_len = MAX_KEYS;
    check(folio_decode_create(context, &desc, &p.decode, &err) == FOLIO_OK, err.message);
    check(folio_decode_workspace(p.decode, &info, &err) == FOLIO_OK, err.message);
    p.workspace = workspace(&info);

    lengths l;
    draw(&l, batch_size, PAGE);
    p.batch = batch_of(&l);
    int64_t *slots = calloc((size_t)batch_size, sizeof *slots);
    check(slots != NULL, "calloc");
    for (int b = 0; b < batch_size; b++)
        slots[b] = (int64_t)l.indptr[b] * PAGE;
    void *device_slots = device_memory((size_t)batch_size * sizeof *slots);
    CALL(cuMemcpyHtoD_v2, (uint64_t, const void *, size_t), (uint64_t)(uintptr_t)device_slots, slots,
         (size_t)batch_size * sizeof *slots);

    tensor slot_mapping, q, o, k, v, key, value;
    const size_t row = HEAD_DIM * 2, cache = (size_t)l.num_pages * PAGE * KV_HEADS * row;
    describe(&slot_mapping, device_slots, FOLIO_DEVICE_CUDA, FOLIO_INT64, 1, SHAPE(batch_size));
    describe(&q, device_memory((size_t)batch_size * HEADS * row), FOLIO_DEVICE_CUDA, FOLIO_BFLOAT16, 3,
             SHAPE(batch_size, HEADS, HEAD_DIM));
    describe(&o, device_memory((size_t)batch_size * HEADS * row), FOLIO_DEVICE_CUDA, FOLIO_BFLOAT16, 3,
             SHAPE(batch_size, HEADS, HEAD_DIM));
    describe(&k, device_memory(cache), FOLIO_DEVICE_CUDA, FOLIO_BFLOAT16, 4, SHAPE(l.num_pages, PAGE, KV_HEADS, HEAD_DIM));
    describe(&v, device_memory(cache), FOLIO_DEVICE_CUDA, FOLIO_BFLOAT16, 4, SHAPE(l.num_pages, PAGE, KV_HEADS, HEAD_DIM));
    describe(&key, device_memory((size_t)batch_size * KV_HEADS * row), FOLIO_DEVICE_CUDA, FOLIO_BFLOAT16, 3,
             SHAPE(batch_size, KV_HEADS, HEAD_DIM));
    describe(&value, device_memory((size_t)batch_size * KV_HEADS * row), FOLIO_DEVICE_CUDA, FOLIO_BFLOAT16, 3,
             SHAPE(batch_size, KV_HEADS, HEAD_DIM));

    p.run = FOLIO_INIT(folio_attention_args);
    p.run.q = &q.tensor, p.run.k = &k.tensor, p.run.v = &v.tensor, p.run.o = &o.tensor;
    p.append = FOLIO_INIT(folio_kv_append_args);
    p.append.key = &key.tensor, p.append.value = &value.tensor, p.append.k_cache = &k.tensor;
    p.append.v_cache = &v.tensor, p.append.slot_mapping = &slot_mapping.tensor;

    measure(&p, plan, "plan", batch_size);
    measure(&p, run, "run_host", batch_size);
    measure(&p, append, "append_host", batch_size);
    folio_decode_destroy(p.decode);
    free(slots);
    free_lengths(&l);
}

static void time_mla(const folio_context *context, void *stream, int batch_size)
{
    problem p = {.stream = stream};
    folio_error err = FOLIO_INIT(folio_error);
    folio_mla_desc desc = FOLIO_INIT(folio_mla_desc);
    folio_workspace_info info = FOLIO_INIT(folio_workspace_info);
    desc.q_dtype = FOLIO_BFLOAT16, desc.num_heads = MLA_HEADS, desc.kv_lora_rank = LATENT, desc.qk_rope_head_dim = ROPE;
    desc.page_size = MLA_PAGE, desc.max_batch_size = (uint32_t)batch_size, desc.max_kv_len = MAX_KEYS;
    check(folio_mla_create(context, &desc, &p.mla, &err) == FOLIO_OK, err.message);
    check(folio_mla_workspace(p.mla, &info, &err) == FOLIO_OK, err.message);
    p.workspace = workspace(&info);
    lengths l;
    draw(&l, batch_size, MLA_PAGE);
    p.batch = batch_of(&l);

    tensor q_latent, q_rope, kv, o;
    const size_t rows = (size_t)batch_size * MLA_HEADS, records = (size_t)l.num_pages * MLA_PAGE;
    describe(&q_latent, device_memory(rows * LATENT * 2), FOLIO_DEVICE_CUDA, FOLIO_BFLOAT16, 3,
             SHAPE(batch_size, MLA_HEADS, LATENT));
    describe(&q_rope, device_memory(rows * ROPE * 2), FOLIO_DEVICE_CUDA, FOLIO_BFLOAT16, 3,
             SHAPE(batch_size, MLA_HEADS, ROPE));
    describe(&o, device_memory(rows * LATENT * 2), FOLIO_DEVICE_CUDA, FOLIO_BFLOAT16, 3,
             SHAPE(batch_size, MLA_HEADS, LATENT));
    describe(&kv, device_memory(records * (LATENT + ROPE) * 2), FOLIO_DEVICE_CUDA, FOLIO_BFLOAT16, 3,
             SHAPE(l.num_pages, MLA_PAGE, LATENT + ROPE));
    p.mla_run = FOLIO_INIT(folio_mla_args);
    p.mla_run.q_latent = &q_latent.tensor, p.mla_run.q_rope = &q_rope.tensor, p.mla_run.kv = &kv.tensor;
    /* 1 / sqrt(192), of the rows that are not absorbed. */
    p.mla_run.o = &o.tensor, p.mla_run.sm_scale = 0.07216878f;

    measure(&p, mla_plan, "mla_plan", batch_size);
    measure(&p, mla_run, "mla_run_host", batch_size);
    folio_mla_destroy(p.mla);
    free_lengths(&l);
}

int main(void)
{
    void *stream = open_device();
    folio_error err = FOLIO_INIT(folio_error);
    folio_context_desc desc = FOLIO_INIT(folio_context_desc);
    folio_context *context = NULL;
    desc.device_type = FOLIO_DEVICE_CUDA;
    check(folio_context_create(&desc, &context, &err) == FOLIO_OK, err.message);
    const int batch_sizes[] = {1, 64, 256, 1024};
    for (size_t i = 0; i < sizeof batch_sizes / sizeof *batch_sizes; i++) {
        time_decode(context, stream, batch_sizes[i]);
        time_mla(context, stream, batch_sizes[i]);
    }
    folio_context_destroy(context);
    return 0;
}
