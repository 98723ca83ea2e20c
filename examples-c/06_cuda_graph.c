/* CUDA graph: a host with its own allocator and stream captures a layer once and replays it for every step,
 * whatever the number of requests and their lengths.
 *
 * Planning is outside the graph: it writes the step's lengths into the workspace, from where the captured
 * kernels read them. Exits with 77 where there is no GPU. The check: Folio's float64 oracle. */
#include "cuda_driver.h"

enum { MOST = 4, QO_HEADS = 8, KV_HEADS = 2, HEAD_DIM = 128, PAGE_SIZE = 16, POOL_PAGES = 64, ROW = QO_HEADS * HEAD_DIM };
enum { STEPS = 3, SKIPPED = 77 };

/* A step: requests, and their keys. */
static const int32_t num_requests[STEPS] = { 4, 4, 2 };
static const int32_t num_keys[STEPS][MOST] = { { 100, 16, 1, 37 }, { 101, 17, 2, 38 }, { 300, 5, 0, 0 } };

/* The host's allocator: one block of device memory, given out front to back. */
typedef struct arena {
    char *next, *end;
} arena;

static void *take_bytes(arena *a, size_t bytes)
{
    char *start = a->next;
    a->next += (bytes + 255) / 256 * 256;
    if (a->next > a->end) {
        fprintf(stderr, "the arena is full\n");
        exit(1);
    }
    return start;
}

static void *take_copy(arena *a, const cuda *gpu, const void *host, size_t bytes)
{
    void *memory = take_bytes(a, bytes);
    check_cuda("cuMemcpyHtoD", gpu->to_device((device_pointer)(uintptr_t)memory, host, bytes));
    return memory;
}

static folio_decode *create(const folio_context *ctx)
{
    folio_error err = FOLIO_INIT(folio_error);
    folio_decode_desc desc = FOLIO_INIT(folio_decode_desc);
    desc.flags = FOLIO_PLAN_GRAPH;
    desc.q_dtype = FOLIO_BFLOAT16;
    desc.num_qo_heads = QO_HEADS;
    desc.num_kv_heads = KV_HEADS;
    desc.head_dim_qk = HEAD_DIM;
    desc.page_size = PAGE_SIZE;
    desc.max_batch_size = MOST;
    desc.max_kv_len = 1024;
    desc.max_num_pages = POOL_PAGES;
    folio_decode *handle = NULL;
    check(folio_decode_create(ctx, &desc, &handle, &err), &err);
    return handle;
}

static void plan(folio_decode *handle, int step, int32_t *pages, const folio_workspace *ws, void *stream)
{
    folio_error err = FOLIO_INIT(folio_error);
    int32_t kv_indptr[MOST + 1] = { 0 }, kv_len[MOST];
    for (int b = 0; b < num_requests[step]; b++) {
        kv_len[b] = num_keys[step][b];
        kv_indptr[b + 1] = kv_indptr[b] + (kv_len[b] + PAGE_SIZE - 1) / PAGE_SIZE;
    }
    folio_tensor indptr = int32_vector(kv_indptr, (int64_t[]){ num_requests[step] + 1 });
    folio_tensor indices = int32_vector(pages, (int64_t[]){ kv_indptr[num_requests[step]] });
    folio_tensor lengths = int32_vector(kv_len, (int64_t[]){ num_requests[step] });
    folio_batch batch = FOLIO_INIT(folio_batch);
    batch.kv_indptr = &indptr;
    batch.kv_indices = &indices;
    batch.kv_len = &lengths;
    check(folio_decode_plan(handle, &batch, ws, stream, &err), &err);
}

/* Runs a planned handle on tensors of a device, with room for the largest batch. */
static void run(const folio_decode *handle, int32_t device_type, void *q, void *k, void *v, void *o, void *stream)
{
    folio_error err = FOLIO_INIT(folio_error);
    int64_t rows[] = { MOST, QO_HEADS, HEAD_DIM }, cache[] = { POOL_PAGES, PAGE_SIZE, KV_HEADS, HEAD_DIM };
    folio_tensor tensors[4] = { tensor(q, FOLIO_BFLOAT16, 3, rows), tensor(k, FOLIO_BFLOAT16, 4, cache),
                                tensor(v, FOLIO_BFLOAT16, 4, cache), tensor(o, FOLIO_BFLOAT16, 3, rows) };
    for (int i = 0; i < 4; i++)
        tensors[i].device_type = device_type;
    folio_attention_args args = FOLIO_INIT(folio_attention_args);
    args.q = &tensors[0];
    args.k = &tensors[1];
    args.v = &tensors[2];
    args.o = &tensors[3];
    check(folio_decode_run(handle, &args, stream, &err), &err);
}

static folio_context *open_context(int32_t device_type, uint32_t flags)
{
    folio_error err = FOLIO_INIT(folio_error);
    folio_context_desc desc = FOLIO_INIT(folio_context_desc);
    desc.flags = flags;
    desc.device_type = device_type;
    folio_context *ctx = NULL;
    check(folio_context_create(&desc, &ctx, &err), &err);
    return ctx;
}

int main(void)
{
    if (folio_device_count(FOLIO_DEVICE_CUDA) == 0) {
        printf("skipped: no CUDA device\n");
        return SKIPPED;
    }
    cuda gpu = open_cuda();
    size_t q_bytes = MOST * ROW * sizeof(uint16_t);
    size_t cache_count = (size_t)POOL_PAGES * PAGE_SIZE * KV_HEADS * HEAD_DIM, cache_bytes = cache_count * sizeof(uint16_t);
    int32_t *pages = shuffled(POOL_PAGES, 1);
    uint16_t *q = random_bf16(MOST * ROW, 2), *k = random_bf16(cache_count, 3), *v = random_bf16(cache_count, 4);
    uint16_t *o = allocate(q_bytes), *want = allocate(q_bytes);

    folio_context *ctx = open_context(FOLIO_DEVICE_CUDA, 0);
    folio_decode *handle = create(ctx);
    printf("kernel: %s on %s\n", folio_decode_kernel(handle), gpu.name);

    folio_error err = FOLIO_INIT(folio_error);
    folio_workspace_info info = FOLIO_INIT(folio_workspace_info);
    check(folio_decode_workspace(handle, &info, &err), &err);
    size_t arena_bytes = info.device_bytes + 2 * q_bytes + 2 * cache_bytes + 4096;
    arena a;
    char *block = cuda_allocate(&gpu, arena_bytes);
    a.next = block;
    a.end = block + arena_bytes;
    folio_workspace ws = FOLIO_INIT(folio_workspace);
    ws.device = take_bytes(&a, info.device_bytes);
    ws.device_bytes = info.device_bytes;
    check_cuda("cuMemAllocHost", gpu.pinned_allocate(&ws.host, info.host_bytes));
    ws.host_bytes = info.host_bytes;
    void *device_q = take_copy(&a, &gpu, q, q_bytes), *device_o = take_bytes(&a, q_bytes);
    void *device_k = take_copy(&a, &gpu, k, cache_bytes), *device_v = take_copy(&a, &gpu, v, cache_bytes);

    /* Once: a plan, then the run under capture. */
    void *graph, *executable;
    plan(handle, 0, pages, &ws, gpu.stream);
    check_cuda("cuStreamBeginCapture", gpu.capture_begin(gpu.stream, 1)); /* thread-local */
    run(handle, FOLIO_DEVICE_CUDA, device_q, device_k, device_v, device_o, gpu.stream);
    check_cuda("cuStreamEndCapture", gpu.capture_end(gpu.stream, &graph));
    check_cuda("cuGraphInstantiate", gpu.graph_instantiate(&executable, graph, 0));

    /* Every step: a plan into the same workspace, and the graph. */
    folio_context *oracle = open_context(FOLIO_DEVICE_CPU, FOLIO_CONTEXT_REFERENCE);
    folio_decode *reference = create(oracle);
    folio_workspace_info host_info = FOLIO_INIT(folio_workspace_info);
    check(folio_decode_workspace(reference, &host_info, &err), &err);
    folio_workspace host_ws = allocate_workspace(&host_info);
    for (int step = 0; step < STEPS; step++) {
        plan(handle, step, pages, &ws, gpu.stream);
        check_cuda("cuGraphLaunch", gpu.graph_launch(executable, gpu.stream));
        check_cuda("cuStreamSynchronize", gpu.stream_synchronize(gpu.stream));
        cuda_fetch(&gpu, o, device_o, q_bytes);

        plan(reference, step, pages, &host_ws, NULL);
        run(reference, FOLIO_DEVICE_CPU, q, k, v, want, NULL);
        expect_bf16("replayed graph against the oracle", o, want, (size_t)num_requests[step] * ROW);
    }

    check_cuda("cuGraphExecDestroy", gpu.graph_executable_destroy(executable));
    check_cuda("cuGraphDestroy", gpu.graph_destroy(graph));
    folio_decode_destroy(handle);
    folio_decode_destroy(reference);
    folio_context_destroy(ctx);
    folio_context_destroy(oracle);
    cuda_free(&gpu, block);
    check_cuda("cuMemFreeHost", gpu.pinned_free(ws.host));
    check_cuda("cuStreamDestroy", gpu.stream_destroy(gpu.stream));
    free(host_ws.host);
    free(pages);
    free(q);
    free(k);
    free(v);
    free(o);
    free(want);
    return 0;
}
