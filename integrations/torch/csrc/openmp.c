/* Folio on the threads of the process's OpenMP: a folio_parallel_for_fn whose `user` is the address of GOMP_parallel.
 *
 * That is GCC's entry to a parallel region; LLVM's and Intel's OpenMP have it too. Nothing of OpenMP is linked: a second
 * OpenMP in the process would bring a second pool of threads. */
#include <stdatomic.h>
#include <stdint.h>

typedef void (*task_fn)(void *task_data, uint32_t index);
typedef void (*gomp_parallel_fn)(void (*region)(void *), void *data, unsigned num_threads, unsigned flags);

struct job {
    task_fn task;
    void *task_data;
    uint32_t num_tasks;
    atomic_uint next;
};

/* What each thread of a region does. OpenMP may give fewer threads than there are tasks. */
static void region(void *data)
{
    struct job *job = data;
    for (unsigned i; (i = atomic_fetch_add(&job->next, 1)) < job->num_tasks;)
        job->task(job->task_data, i);
}

__attribute__((visibility("default"))) void folio_torch_parallel_for(void *user, uint32_t num_tasks, task_fn task,
                                                                    void *task_data)
{
    struct job job = { .task = task, .task_data = task_data, .num_tasks = num_tasks };
    ((gomp_parallel_fn)user)(region, &job, num_tasks, 0);
}
