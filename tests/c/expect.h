/* What the C tests share: one check that names file and line, and host tensors. */
#ifndef TESTS_EXPECT_H
#define TESTS_EXPECT_H

#include <folio/folio.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Ends the program unless `condition` holds. */
#define EXPECT(condition)                                                          \
    do {                                                                           \
        if (!(condition)) {                                                        \
            fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #condition); \
            exit(1);                                                               \
        }                                                                          \
    } while (0)

/* Ends the program unless a call succeeded. */
static inline void expect_ok(folio_status status, const folio_error *err)
{
    if (status == FOLIO_OK)
        return;
    fprintf(stderr, "status %d (%s): %s\n", (int)status, folio_status_name(status), err->message);
    exit(1);
}

/* A compact host tensor over borrowed memory and shape. */
static inline folio_tensor host_tensor(void *data, folio_dtype dtype, int32_t ndim, int64_t *shape)
{
    folio_tensor t;
    memset(&t, 0, sizeof t);
    t.data = data;
    t.device_type = FOLIO_DEVICE_CPU;
    t.ndim = ndim;
    t.dtype = dtype;
    t.shape = shape;
    return t;
}

static inline folio_context *open_cpu(uint32_t num_threads)
{
    folio_error err = FOLIO_INIT(folio_error);
    folio_context_desc desc = FOLIO_INIT(folio_context_desc);
    folio_context *ctx = NULL;
    desc.device_type = FOLIO_DEVICE_CPU;
    desc.num_threads = num_threads;
    expect_ok(folio_context_create(&desc, &ctx, &err), &err);
    return ctx;
}

#endif
