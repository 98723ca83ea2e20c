/* Threads of the host's: a pool of pthreads computes what Folio's own threads compute, and a host that does not run
 * the tasks it is given is told so by the call that needed them. */
#include "problem.h"
#include <pthread.h>

enum { WORKERS = 3, ROUNDS = 200 };

/* A pool: workers wait for a job, take its tasks one by one, and the last to finish wakes the caller. */
typedef struct pool {
    pthread_mutex_t lock;
    pthread_cond_t begins, ends;
    pthread_t threads[WORKERS];
    folio_task_fn task;
    void *task_data;
    uint32_t num_tasks, next, left; /* of the present job */
    int stop, calls;
    uint32_t leave_out; /* this many of the last tasks are not run */
} pool;

/* Runs a task, if there is one that nobody has taken. The lock is held before and after. */
static int run_next(pool *p)
{
    folio_task_fn task = p->task;
    void *data = p->task_data;
    uint32_t index;
    if (p->next == p->num_tasks)
        return 0;
    index = p->next++;
    pthread_mutex_unlock(&p->lock);
    task(data, index);
    pthread_mutex_lock(&p->lock);
    if (--p->left == 0)
        pthread_cond_signal(&p->ends);
    return 1;
}

static void *worker(void *argument)
{
    pool *p = (pool *)argument;
    pthread_mutex_lock(&p->lock);
    while (!p->stop)
        if (!run_next(p))
            pthread_cond_wait(&p->begins, &p->lock);
    pthread_mutex_unlock(&p->lock);
    return NULL;
}

static void parallel_for(void *user, uint32_t num_tasks, folio_task_fn task, void *task_data)
{
    pool *p = (pool *)user;
    pthread_mutex_lock(&p->lock);
    p->calls++;
    p->task = task;
    p->task_data = task_data;
    p->next = 0;
    p->num_tasks = p->left = num_tasks - p->leave_out;
    pthread_cond_broadcast(&p->begins);
    while (run_next(p)) {
    }
    while (p->left != 0)
        pthread_cond_wait(&p->ends, &p->lock);
    pthread_mutex_unlock(&p->lock);
}

static void start(pool *p)
{
    int i;
    memset(p, 0, sizeof *p);
    EXPECT(pthread_mutex_init(&p->lock, NULL) == 0);
    EXPECT(pthread_cond_init(&p->begins, NULL) == 0 && pthread_cond_init(&p->ends, NULL) == 0);
    for (i = 0; i < WORKERS; i++)
        EXPECT(pthread_create(&p->threads[i], NULL, worker, p) == 0);
}

static void stop(pool *p)
{
    int i;
    pthread_mutex_lock(&p->lock);
    p->stop = 1;
    pthread_cond_broadcast(&p->begins);
    pthread_mutex_unlock(&p->lock);
    for (i = 0; i < WORKERS; i++)
        EXPECT(pthread_join(p->threads[i], NULL) == 0);
    pthread_cond_destroy(&p->begins);
    pthread_cond_destroy(&p->ends);
    pthread_mutex_destroy(&p->lock);
}

static folio_context *open_on(pool *p)
{
    folio_error err = FOLIO_INIT(folio_error);
    folio_context_desc desc = FOLIO_INIT(folio_context_desc);
    folio_context *ctx = NULL;
    desc.device_type = FOLIO_DEVICE_CPU;
    desc.num_threads = WORKERS + 1;
    desc.parallel_for = parallel_for;
    desc.parallel_for_user = p;
    expect_ok(folio_context_create(&desc, &ctx, &err), &err);
    return ctx;
}

/* A list of CPUs goes to Folio's own threads only. */
static void lists_are_refused(pool *p)
{
    static const uint32_t cpus[] = { 0 };
    folio_error err = FOLIO_INIT(folio_error);
    folio_context_desc desc = FOLIO_INIT(folio_context_desc);
    folio_context *ctx = NULL;
    desc.device_type = FOLIO_DEVICE_CPU;
    desc.num_threads = 2;
    desc.parallel_for = parallel_for;
    desc.parallel_for_user = p;
    desc.cpus = cpus;
    desc.num_cpus = 1;
    EXPECT(folio_context_create(&desc, &ctx, &err) == FOLIO_ERR_INVALID_ARGUMENT && ctx == NULL);
    EXPECT(strstr(err.message, "cpus") && strstr(err.message, "parallel_for"));
    desc.parallel_for = NULL;
    EXPECT(folio_context_create(&desc, &ctx, &err) == FOLIO_ERR_INVALID_ARGUMENT && ctx == NULL);
    EXPECT(strstr(err.message, "parallel_for_user"));
}

int main(void)
{
    folio_error err = FOLIO_INIT(folio_error);
    float expected[HEADS * HEAD_DIM], o[HEADS * HEAD_DIM], lse[HEADS];
    folio_context *own = open_cpu(WORKERS + 1), *ctx;
    folio_decode *decode;
    problem p, on_host;
    pool host;
    int round, calls;

    make_problem(&p, 1);
    decode = planned_decode(own, &p);
    expect_ok(run_decode(decode, &p, expected, lse, &err), &err);
    folio_decode_destroy(decode);
    folio_context_destroy(own);
    free(p.workspace);

    start(&host);
    lists_are_refused(&host);
    ctx = open_on(&host);
    make_problem(&on_host, 1);
    decode = planned_decode(ctx, &on_host);
    for (round = 0; round < ROUNDS; round++) {
        memset(o, 0xff, sizeof o);
        expect_ok(run_decode(decode, &on_host, o, lse, &err), &err);
        EXPECT(memcmp(o, expected, sizeof o) == 0);
    }
    calls = host.calls;
    EXPECT(calls >= ROUNDS);

    host.leave_out = 1;
    EXPECT(run_decode(decode, &on_host, o, lse, &err) == FOLIO_ERR_INTERNAL);
    EXPECT(strstr(err.message, "parallel_for") && strstr(err.message, "was not run"));
    host.leave_out = 0;
    /* What the handle holds is not known any more. */
    EXPECT(run_decode(decode, &on_host, o, lse, &err) == FOLIO_ERR_INTERNAL);
    EXPECT(host.calls == calls + 1);
    folio_decode_destroy(decode);
    free(on_host.workspace);

    /* The context is as good as before. */
    make_problem(&on_host, 1);
    decode = planned_decode(ctx, &on_host);
    folio_context_destroy(ctx);
    expect_ok(run_decode(decode, &on_host, o, lse, &err), &err);
    EXPECT(memcmp(o, expected, sizeof o) == 0);
    folio_decode_destroy(decode);
    free(on_host.workspace);
    stop(&host);
    return 0;
}
