/* What the examples share: stopping on errors, memory, tensors, random numbers, comparison.
 * Nothing here is part of Folio, and each example can be read without it. */
#ifndef EXAMPLES_COMMON_H
#define EXAMPLES_COMMON_H

#include <folio/folio.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Ends the program with the library's own sentence unless a call succeeded. */
static inline void check(folio_status status, const folio_error *err)
{
    if (status == FOLIO_OK)
        return;
    fprintf(stderr, "Folio failed with status %d: %s\n", (int)status, err->message);
    exit(1);
}

/* Memory, aligned well enough for every workspace, or the end of the program. */
static inline void *allocate(size_t bytes)
{
    void *memory = aligned_alloc(256, (bytes + 255) / 256 * 256 + 256);
    if (!memory) {
        fprintf(stderr, "out of memory: %zu bytes\n", bytes);
        exit(1);
    }
    return memory;
}

/* A compact host tensor. The shape is borrowed: a compound literal lives until its block ends. */
static inline folio_tensor tensor(void *data, folio_dtype dtype, int32_t ndim, int64_t *shape)
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

/* A compact vector of int32 on the host, as Folio takes lengths and page ids. */
static inline folio_tensor int32_vector(int32_t *data, int64_t *length)
{
    return tensor(data, FOLIO_INT32, 1, length);
}

/* The workspace that a CPU handle asks for; free its `host`. */
static inline folio_workspace allocate_workspace(const folio_workspace_info *info)
{
    folio_workspace ws = FOLIO_INIT(folio_workspace);
    ws.host = allocate(info->host_bytes);
    ws.host_bytes = info->host_bytes;
    return ws;
}

static inline uint16_t to_bf16(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

static inline float from_bf16(uint16_t x)
{
    uint32_t bits = (uint32_t)x << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* The next number of a xorshift sequence; the seed is not 0. */
static inline uint32_t next_random(uint32_t *seed)
{
    *seed ^= *seed << 13;
    *seed ^= *seed >> 17;
    *seed ^= *seed << 5;
    return *seed;
}

/* Evenly distributed in [-1, 1). */
static inline float uniform(uint32_t *seed)
{
    return (float)(next_random(seed) >> 8) / 8388608.0f - 1.0f;
}

static inline uint16_t *random_bf16(size_t count, uint32_t seed)
{
    uint16_t *values = allocate(count * sizeof *values);
    for (size_t i = 0; i < count; i++)
        values[i] = to_bf16(uniform(&seed));
    return values;
}

static inline float *random_float(size_t count, uint32_t seed)
{
    float *values = allocate(count * sizeof *values);
    for (size_t i = 0; i < count; i++)
        values[i] = uniform(&seed);
    return values;
}

/* The numbers 0 to count - 1 in random order: a page pool after a while in use. */
static inline int32_t *shuffled(int32_t count, uint32_t seed)
{
    int32_t *ids = allocate((size_t)count * sizeof *ids);
    for (int32_t i = 0; i < count; i++) {
        int32_t j = (int32_t)(next_random(&seed) % (uint32_t)(i + 1));
        ids[i] = ids[j];
        ids[j] = i;
    }
    return ids;
}

/* How far a result is from the right one. */
typedef struct difference {
    double max, sum; /* of the distances */
    size_t count;
    double largest; /* right value: what the tolerance is relative to */
} difference;

static inline void take(difference *d, double got, double want)
{
    double distance = got == want ? 0 : fabs(got - want); /* equal infinities are equal */
    if (isnan(distance))
        distance = INFINITY;
    d->max = fmax(d->max, distance);
    d->sum += distance;
    d->count++;
    if (isfinite(want) && fabs(want) > d->largest)
        d->largest = fabs(want);
}

static inline void compare_bf16(difference *d, const uint16_t *got, const uint16_t *want, size_t count)
{
    for (size_t i = 0; i < count; i++)
        take(d, from_bf16(got[i]), from_bf16(want[i]));
}

static inline void compare_float(difference *d, const float *got, const float *want, size_t count)
{
    for (size_t i = 0; i < count; i++)
        take(d, got[i], want[i]);
}

/* bf16 has 8 significant bits, so the right value and the result are each off by up to 2^-9, and a kernel
 * that multiplies bf16 weights adds as much again. */
#define BF16_TOLERANCE 1e-2
#define FLOAT_TOLERANCE 1e-5

/* Prints a difference; ends the program where it is above the tolerance, relative to the largest value. */
static inline void expect(const char *what, const difference *d, double tolerance)
{
    double limit = tolerance * d->largest;
    int fine = d->max <= limit;
    printf("%s: max error %.1e, mean %.1e, allowed %.1e (%.0e of the largest value, %.3g): %s\n", what, d->max,
           d->sum / (double)d->count, limit, tolerance, d->largest, fine ? "ok" : "WRONG");
    if (!fine)
        exit(1);
}

static inline void expect_bf16(const char *what, const uint16_t *got, const uint16_t *want, size_t count)
{
    difference d = { 0, 0, 0, 0 };
    compare_bf16(&d, got, want, count);
    expect(what, &d, BF16_TOLERANCE);
}

static inline void expect_float(const char *what, const float *got, const float *want, size_t count)
{
    difference d = { 0, 0, 0, 0 };
    compare_float(&d, got, want, count);
    expect(what, &d, FLOAT_TOLERANCE);
}

#endif
