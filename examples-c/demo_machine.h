/* What the demo runs on, the CPU or a GPU: its memory, its stream, and how fast it reads. */
#ifndef EXAMPLES_DEMO_MACHINE_H
#define EXAMPLES_DEMO_MACHINE_H

#include "common.h"
#include "cuda_driver.h"
#include <pthread.h>
#include <time.h>
#include <unistd.h>

enum { MOST_THREADS = 256 };

typedef struct machine {
    folio_context *ctx;
    const cuda *gpu; /* NULL on the CPU */
    uint32_t num_threads;
} machine;

static inline double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* The CPU with all its threads, or, with FOLIO_CONTEXT_REFERENCE, the oracle. */
static inline machine open_cpu(uint32_t flags)
{
    folio_error err = FOLIO_INIT(folio_error);
    machine m = { NULL, NULL, 0 };
    long cpus = sysconf(_SC_NPROCESSORS_ONLN);
    if (!(flags & FOLIO_CONTEXT_REFERENCE)) /* the oracle computes on the calling thread */
        m.num_threads = cpus < 1 ? 1 : cpus < MOST_THREADS ? (uint32_t)cpus : MOST_THREADS;
    folio_context_desc desc = FOLIO_INIT(folio_context_desc);
    desc.flags = flags;
    desc.device_type = FOLIO_DEVICE_CPU;
    desc.num_threads = m.num_threads;
    check(folio_context_create(&desc, &m.ctx, &err), &err);
    return m;
}

static inline machine open_gpu(const cuda *gpu)
{
    folio_error err = FOLIO_INIT(folio_error);
    machine m = { NULL, gpu, 0 };
    folio_context_desc desc = FOLIO_INIT(folio_context_desc);
    desc.device_type = FOLIO_DEVICE_CUDA;
    check(folio_context_create(&desc, &m.ctx, &err), &err);
    return m;
}

/* A tensor in the machine's memory. */
static inline folio_tensor on(const machine *m, folio_tensor t)
{
    t.device_type = m->gpu ? FOLIO_DEVICE_CUDA : FOLIO_DEVICE_CPU;
    return t;
}

/* The machine's copy of host memory; on the CPU that memory itself. */
static inline void *place(const machine *m, void *host, size_t bytes)
{
    return m->gpu ? cuda_copy_of(m->gpu, host, bytes) : host;
}

/* Brings an output back to the host memory that it was placed for. */
static inline void fetch(const machine *m, void *host, const void *placed, size_t bytes)
{
    if (m->gpu)
        cuda_fetch(m->gpu, host, placed, bytes);
}

static inline void release(const machine *m, void *placed)
{
    if (m->gpu)
        cuda_free(m->gpu, placed);
}

static inline void *stream_of(const machine *m)
{
    return m->gpu ? m->gpu->stream : NULL;
}

/* A call of Folio on the CPU is complete when it returns; on a GPU, when its stream gets there. */
static inline void wait_for(const machine *m)
{
    if (m->gpu)
        check_cuda("cuStreamSynchronize", m->gpu->stream_synchronize(m->gpu->stream));
}

static inline folio_workspace machine_workspace(const machine *m, const folio_workspace_info *info)
{
    return m->gpu ? cuda_workspace(m->gpu, info) : allocate_workspace(info);
}

static inline void free_machine_workspace(const machine *m, folio_workspace *ws)
{
    if (m->gpu)
        free_cuda_workspace(m->gpu, ws);
    else
        free(ws->host);
}

/* ---- Reading memory ---------------------------------------------------------------------------- */

typedef struct slice {
    const uint64_t *words;
    size_t count;
    uint64_t sum; /* so that the reads are not optimised away */
} slice;

static inline void *read_slice(void *argument)
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

/* Seconds in which all threads together read memory, front to back. */
static inline double read_once(const uint64_t *words, size_t count, uint32_t num_threads)
{
    pthread_t threads[MOST_THREADS];
    slice slices[MOST_THREADS];
    double start = now();
    for (uint32_t i = 0; i < num_threads; i++) {
        slices[i] = (slice){ words + i * (count / num_threads), count / num_threads, 0 };
        if (pthread_create(&threads[i], NULL, read_slice, &slices[i]) != 0) {
            fprintf(stderr, "cannot start a thread\n");
            exit(1);
        }
    }
    for (uint32_t i = 0; i < num_threads; i++)
        pthread_join(threads[i], NULL);
    return now() - start;
}

/* Seconds in which the GPU reads memory: half of what a copy within it takes, which reads and writes. */
static inline double copy_once(const machine *m, const void *from, void *to, size_t bytes)
{
    double start = now();
    check_cuda("cuMemcpyDtoDAsync", m->gpu->copy_async((device_pointer)(uintptr_t)to, (device_pointer)(uintptr_t)from,
                                                       bytes, m->gpu->stream));
    wait_for(m);
    return (now() - start) / 2;
}

/* Bytes per second that the machine reads in sequence: the best of the rounds in `seconds`. */
static inline double read_bandwidth(const machine *m, const void *placed, size_t bytes, double seconds)
{
    void *target = m->gpu ? cuda_allocate(m->gpu, bytes) : NULL;
    double best = 1e30;
    for (double start = now(); best == 1e30 || now() - start < seconds;)
        best = fmin(best, m->gpu ? copy_once(m, placed, target, bytes)
                                 : read_once(placed, bytes / sizeof(uint64_t), m->num_threads));
    if (m->gpu)
        cuda_free(m->gpu, target);
    return (double)bytes / best;
}

#endif
