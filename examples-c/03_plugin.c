/* Plugin: a host that links nothing of Folio. It loads the library, asks for the table of functions, and
 * falls back where the library or a capability is missing.
 *
 *   03_plugin /path/to/libfolio.so.0
 *
 * The check is by hand: with all keys zero the softmax is even, so o is the mean of the values and
 * lse = log(number of keys). */
#include "common.h"
#include <dlfcn.h>

enum { HEADS = 2, HEAD_DIM = 8, NUM_SLOTS = 16, NUM_KEYS = 5 };

/* The table, or the end of the program. The library stays loaded: Folio is never dlclosed. */
static const folio_api *load(const char *path)
{
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!library) {
        fprintf(stderr, "%s\n", dlerror());
        exit(1);
    }
    const folio_api *(*get_api)(uint32_t);
    *(void **)&get_api = dlsym(library, "folio_get_api"); /* POSIX's way of saying it */
    const folio_api *api = get_api ? get_api(FOLIO_ABI_VERSION) : NULL;
    if (!api) {
        fprintf(stderr, "%s has no table for ABI %d.%d\n", path, FOLIO_ABI_MAJOR, FOLIO_ABI_MINOR);
        exit(1);
    }
    return api;
}

/* A decode handle for `head_dim`, or NULL where this library has no code for it. */
static folio_decode *try_decode(const folio_api *api, const folio_context *ctx, uint32_t head_dim)
{
    folio_error err = FOLIO_INIT(folio_error);
    folio_decode_desc desc = FOLIO_INIT(folio_decode_desc);
    desc.q_dtype = FOLIO_FLOAT32;
    desc.num_qo_heads = HEADS;
    desc.num_kv_heads = HEADS;
    desc.head_dim_qk = head_dim;
    desc.page_size = 1; /* the page table is a list of token slots */
    desc.max_batch_size = 1;
    desc.max_kv_len = NUM_SLOTS;
    folio_decode *handle = NULL;
    folio_status status = api->decode_create(ctx, &desc, &handle, &err);
    if (status != FOLIO_OK)
        printf("head_dim %u: %s: %s\n", head_dim, api->status_name(status), err.message);
    return handle;
}

int main(int argc, char **argv)
{
    if (argc != 2) {
        fprintf(stderr, "usage: 03_plugin /path/to/libfolio.so.0\n");
        return 2;
    }
    const folio_api *api = load(argv[1]);
    printf("Folio %s, CUDA devices: %u\n", api->version(), api->device_count(FOLIO_DEVICE_CUDA));

    /* A slot that came after the first release is asked for before it is used. */
    if (!FOLIO_API_HAS(api, merge_states)) {
        fprintf(stderr, "this library is older than merge_states\n");
        return 1;
    }

    folio_error err = FOLIO_INIT(folio_error);
    folio_context_desc device = FOLIO_INIT(folio_context_desc);
    device.device_type = FOLIO_DEVICE_CPU;
    folio_context *ctx = NULL;
    check(api->context_create(&device, &ctx, &err), &err);

    /* create is also the capability query: it refuses with a reason, and has no side effects. */
    folio_decode *handle = try_decode(api, ctx, 7);
    if (handle) {
        fprintf(stderr, "head_dim 7 was accepted\n");
        return 1;
    }
    handle = try_decode(api, ctx, HEAD_DIM);
    if (!handle)
        return 1;
    folio_workspace_info info = FOLIO_INIT(folio_workspace_info);
    check(api->decode_workspace(handle, &info, &err), &err);
    folio_workspace ws = allocate_workspace(&info);

    int32_t kv_indptr[] = { 0, NUM_KEYS };
    int32_t slots[NUM_KEYS] = { 3, 14, 0, 7, 9 };
    int32_t lengths[] = { NUM_KEYS };
    folio_tensor indptr = int32_vector(kv_indptr, (int64_t[]){ 2 });
    folio_tensor indices = int32_vector(slots, (int64_t[]){ NUM_KEYS });
    folio_tensor kv_len = int32_vector(lengths, (int64_t[]){ 1 });
    folio_batch batch = FOLIO_INIT(folio_batch);
    batch.kv_indptr = &indptr;
    batch.kv_indices = &indices;
    batch.kv_len = &kv_len;
    check(api->decode_plan(handle, &batch, &ws, NULL, &err), &err);

    /* Slots outside the page table hold NaN; none of it may show. */
    float q_data[HEADS * HEAD_DIM], k_data[NUM_SLOTS][HEADS][HEAD_DIM], v_data[NUM_SLOTS][HEADS][HEAD_DIM];
    float o_data[HEADS * HEAD_DIM], lse_data[HEADS], mean[HEADS * HEAD_DIM], log_keys[HEADS];
    uint32_t seed = 1;
    for (int i = 0; i < NUM_SLOTS * HEADS * HEAD_DIM; i++)
        (&k_data[0][0][0])[i] = (&v_data[0][0][0])[i] = NAN;
    for (int i = 0; i < HEADS * HEAD_DIM; i++) {
        q_data[i] = uniform(&seed);
        mean[i] = 0;
        for (int j = 0; j < NUM_KEYS; j++) {
            float *value = &v_data[slots[j]][0][0] + i;
            *value = uniform(&seed);
            mean[i] += *value / NUM_KEYS;
            (&k_data[slots[j]][0][0])[i] = 0;
        }
    }
    for (int h = 0; h < HEADS; h++)
        log_keys[h] = logf(NUM_KEYS);

    folio_tensor q = tensor(q_data, FOLIO_FLOAT32, 3, (int64_t[]){ 1, HEADS, HEAD_DIM });
    folio_tensor k = tensor(k_data, FOLIO_FLOAT32, 3, (int64_t[]){ NUM_SLOTS, HEADS, HEAD_DIM });
    folio_tensor v = tensor(v_data, FOLIO_FLOAT32, 3, (int64_t[]){ NUM_SLOTS, HEADS, HEAD_DIM });
    folio_tensor o = tensor(o_data, FOLIO_FLOAT32, 3, (int64_t[]){ 1, HEADS, HEAD_DIM });
    folio_tensor lse = tensor(lse_data, FOLIO_FLOAT32, 2, (int64_t[]){ 1, HEADS });
    folio_attention_args args = FOLIO_INIT(folio_attention_args);
    args.q = &q;
    args.k = &k;
    args.v = &v;
    args.o = &o;
    args.lse = &lse;
    check(api->decode_run(handle, &args, NULL, &err), &err);
    expect_float("o against the mean of the values", o_data, mean, HEADS * HEAD_DIM);
    expect_float("lse against log(number of keys)", lse_data, log_keys, HEADS);

    api->decode_destroy(handle);
    api->context_destroy(ctx);
    free(ws.host);
    return 0;
}
