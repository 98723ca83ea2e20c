/* Contract, seen from C: NULL, struct sizes, unknown flags and fields, calls out of order. Each is refused
 * with its status and a sentence that names the field, and no output is touched. */
#include "problem.h"

/* `status` is as expected, and the report says so and names `field`. */
static void refused(folio_status status, folio_status expected, const folio_error *err, const char *field)
{
    if (status != expected || err->status != expected || strstr(err->message, field) == NULL) {
        fprintf(stderr, "status %d, expected %d naming \"%s\": %s\n", (int)status, (int)expected, field, err->message);
        exit(1);
    }
}

static void null_is_refused_or_fine(const folio_context *ctx)
{
    folio_error err = FOLIO_INIT(folio_error);
    folio_context_desc device = FOLIO_INIT(folio_context_desc);
    folio_decode *decode = NULL;
    folio_context *other = NULL;
    problem p;
    make_problem(&p, 1);
    refused(folio_context_create(NULL, &other, &err), FOLIO_ERR_INVALID_ARGUMENT, &err, "folio_context_desc");
    device.device_type = FOLIO_DEVICE_CPU;
    refused(folio_context_create(&device, NULL, &err), FOLIO_ERR_INVALID_ARGUMENT, &err, "out");
    refused(folio_decode_create(NULL, &p.desc, &decode, &err), FOLIO_ERR_INVALID_ARGUMENT, &err, "ctx");
    refused(folio_decode_create(ctx, NULL, &decode, &err), FOLIO_ERR_INVALID_ARGUMENT, &err, "folio_decode_desc");
    refused(folio_decode_create(ctx, &p.desc, NULL, &err), FOLIO_ERR_INVALID_ARGUMENT, &err, "out");
    refused(folio_decode_run(NULL, NULL, NULL, &err), FOLIO_ERR_INVALID_ARGUMENT, &err, "decode");
    EXPECT(folio_decode_create(ctx, NULL, &decode, NULL) == FOLIO_ERR_INVALID_ARGUMENT); /* no report wanted */
    EXPECT(decode == NULL && other == NULL);

    EXPECT(folio_decode_kernel(NULL) == NULL);
    folio_decode_destroy(NULL);
    folio_prefill_destroy(NULL);
    folio_context_destroy(NULL);
}

/* A desc of tomorrow: today's fields and one more. */
typedef struct longer_desc {
    folio_decode_desc today;
    uint64_t tomorrow;
} longer_desc;

static void struct_sizes(const folio_context *ctx)
{
    folio_error err = FOLIO_INIT(folio_error);
    folio_decode *decode = NULL;
    longer_desc longer;
    problem p;
    make_problem(&p, 1);
    p.desc.struct_size = 0; /* forgotten */
    refused(folio_decode_create(ctx, &p.desc, &decode, &err), FOLIO_ERR_INVALID_STRUCT_SIZE, &err, "struct_size");
    p.desc.struct_size = 8;
    refused(folio_decode_create(ctx, &p.desc, &decode, &err), FOLIO_ERR_INVALID_STRUCT_SIZE, &err, "struct_size");

    memset(&longer, 0, sizeof longer);
    longer.today = p.desc;
    longer.today.struct_size = sizeof longer;
    longer.tomorrow = 1;
    refused(folio_decode_create(ctx, &longer.today, &decode, &err), FOLIO_ERR_UNKNOWN_FIELD, &err, "not zero");
    longer.tomorrow = 0;
    expect_ok(folio_decode_create(ctx, &longer.today, &decode, &err), &err);
    folio_decode_destroy(decode);
}

static void unknown_and_unsupported(const folio_context *ctx)
{
    folio_error err = FOLIO_INIT(folio_error);
    folio_context_desc device = FOLIO_INIT(folio_context_desc);
    folio_decode *decode = NULL;
    folio_context *other = NULL;
    problem p;
    make_problem(&p, 1);
    p.desc.flags = 1u << 31;
    refused(folio_decode_create(ctx, &p.desc, &decode, &err), FOLIO_ERR_UNKNOWN_FIELD, &err, "flags");
    make_problem(&p, 1);
    p.desc.head_dim_qk = 12;
    refused(folio_decode_create(ctx, &p.desc, &decode, &err), FOLIO_ERR_UNSUPPORTED, &err, "head_dim_qk: 12");
    device.device_type = 99;
    EXPECT(folio_context_create(&device, &other, &err) != FOLIO_OK);
    EXPECT(strstr(err.message, "device_type") != NULL);
}

static void order_and_outputs(const folio_context *ctx)
{
    folio_error err = FOLIO_INIT(folio_error);
    float o[HEADS * HEAD_DIM], lse[HEADS];
    folio_decode *decode = NULL;
    problem p;
    make_problem(&p, 1);
    memset(o, 0x5a, sizeof o);
    memset(lse, 0x5a, sizeof lse);
    expect_ok(folio_decode_create(ctx, &p.desc, &decode, &err), &err);
    refused(run_decode(decode, &p, o, lse, &err), FOLIO_ERR_NOT_PLANNED, &err, "plan");
    folio_decode_destroy(decode);

    decode = planned_decode(ctx, &p);
    p.row_shape[2] = HEAD_DIM + 8;
    refused(run_decode(decode, &p, o, lse, &err), FOLIO_ERR_SHAPE, &err, "q: shape");
    p.row_shape[2] = HEAD_DIM;
    p.k.dtype = FOLIO_FLOAT16;
    refused(run_decode(decode, &p, o, lse, &err), FOLIO_ERR_DTYPE, &err, "k: dtype");
    p.k.dtype = FOLIO_FLOAT32;
    p.v.data = NULL;
    refused(run_decode(decode, &p, o, lse, &err), FOLIO_ERR_INVALID_ARGUMENT, &err, "v: data is NULL");
    EXPECT(((const unsigned char *)o)[0] == 0x5a && ((const unsigned char *)lse)[sizeof lse - 1] == 0x5a);

    /* A refused plan leaves the one before it in force. */
    p.v.data = p.v_data;
    p.len_data[0] = SLOTS + 1;
    EXPECT(folio_decode_plan(decode, &p.batch, NULL, NULL, &err) != FOLIO_OK);
    p.len_data[0] = KEYS;
    expect_ok(run_decode(decode, &p, o, lse, &err), &err);
    folio_decode_destroy(decode);
    free(p.workspace);
}

int main(void)
{
    folio_context *ctx = open_cpu(0);
    null_is_refused_or_fine(ctx);
    struct_sizes(ctx);
    unknown_and_unsupported(ctx);
    order_and_outputs(ctx);
    folio_context_destroy(ctx);
    return 0;
}
