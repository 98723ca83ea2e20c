/* Threads: what the header promises may be done at the same time gives the same numbers as one after the
 * other. One context is shared by all threads; one planned handle runs in all of them with different
 * outputs; each makes, plans, uses and destroys a handle of its own meanwhile. */
#include "problem.h"
#include <pthread.h>

enum { THREADS = 4, ROUNDS = 25 };

typedef struct work {
    const folio_context *ctx;
    const folio_decode *shared;
    problem *shared_problem;
    const float *expected;
    int seed;
} work;

static void *work_thread(void *argument)
{
    const work *w = (const work *)argument;
    int round;
    for (round = 0; round < ROUNDS; round++) {
        folio_error err = FOLIO_INIT(folio_error);
        float o[HEADS * HEAD_DIM], own[HEADS * HEAD_DIM], again[HEADS * HEAD_DIM], lse[HEADS];
        folio_decode *decode;
        problem p;
        expect_ok(run_decode(w->shared, w->shared_problem, o, lse, &err), &err);
        EXPECT(memcmp(o, w->expected, sizeof o) == 0);

        make_problem(&p, w->seed);
        decode = planned_decode(w->ctx, &p);
        expect_ok(run_decode(decode, &p, own, lse, &err), &err);
        expect_ok(run_decode(decode, &p, again, lse, &err), &err);
        EXPECT(memcmp(own, again, sizeof own) == 0);
        EXPECT(memcmp(own, w->expected, sizeof own) != 0); /* another seed, other numbers */
        folio_decode_destroy(decode);
        free(p.workspace);
    }
    return NULL;
}

int main(void)
{
    folio_error err = FOLIO_INIT(folio_error);
    folio_context *ctx = open_cpu(2);
    float expected[HEADS * HEAD_DIM], lse[HEADS];
    pthread_t threads[THREADS];
    work works[THREADS];
    folio_decode *shared;
    problem p;
    int i;
    make_problem(&p, 1);
    shared = planned_decode(ctx, &p);
    expect_ok(run_decode(shared, &p, expected, lse, &err), &err);
    for (i = 0; i < THREADS; i++) {
        works[i].ctx = ctx;
        works[i].shared = shared;
        works[i].shared_problem = &p;
        works[i].expected = expected;
        works[i].seed = i + 2;
        EXPECT(pthread_create(&threads[i], NULL, work_thread, &works[i]) == 0);
    }
    for (i = 0; i < THREADS; i++)
        EXPECT(pthread_join(threads[i], NULL) == 0);
    folio_decode_destroy(shared);
    folio_context_destroy(ctx);
    free(p.workspace);
    return 0;
}
