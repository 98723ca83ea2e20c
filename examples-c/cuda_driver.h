/* The few calls of NVIDIA's driver that the examples need: memory, a stream, a graph. The driver is opened
 * at run time, so the examples build and start on every machine. A real host has these from <cuda.h>. */
#ifndef EXAMPLES_CUDA_DRIVER_H
#define EXAMPLES_CUDA_DRIVER_H

#include "common.h"
#include <dlfcn.h>

typedef uint64_t device_pointer;

typedef struct cuda {
    int (*init)(unsigned flags);
    int (*device_get)(int *device, int ordinal);
    int (*device_get_name)(char *name, int length, int device);
    int (*context_retain)(void **context, int device);
    int (*context_make_current)(void *context);
    int (*memory_allocate)(device_pointer *memory, size_t bytes);
    int (*memory_free)(device_pointer memory);
    int (*pinned_allocate)(void **memory, size_t bytes);
    int (*pinned_free)(void *memory);
    int (*to_device)(device_pointer to, const void *from, size_t bytes);
    int (*to_host)(void *to, device_pointer from, size_t bytes);
    int (*copy_async)(device_pointer to, device_pointer from, size_t bytes, void *stream);
    int (*stream_create)(void **stream, unsigned flags);
    int (*stream_synchronize)(void *stream);
    int (*stream_destroy)(void *stream);
    int (*capture_begin)(void *stream, int mode);
    int (*capture_end)(void *stream, void **graph);
    int (*graph_instantiate)(void **executable, void *graph, unsigned long long flags);
    int (*graph_launch)(void *executable, void *stream);
    int (*graph_executable_destroy)(void *executable);
    int (*graph_destroy)(void *graph);
    void *stream; /* of the example */
    char name[96];
} cuda;

/* Ends the program unless a driver call succeeded. */
static inline void check_cuda(const char *what, int result)
{
    if (result == 0)
        return;
    fprintf(stderr, "the CUDA driver failed with %d in %s\n", result, what);
    exit(1);
}

/* Opens device 0 with its primary context, which is the one that Folio uses too, and makes a stream. */
static inline cuda open_cuda(void)
{
    cuda c;
    memset(&c, 0, sizeof c);
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    const struct {
        void *slot;
        const char *symbol;
    } functions[] = {
        { &c.init, "cuInit" },
        { &c.device_get, "cuDeviceGet" },
        { &c.device_get_name, "cuDeviceGetName" },
        { &c.context_retain, "cuDevicePrimaryCtxRetain" },
        { &c.context_make_current, "cuCtxSetCurrent" },
        { &c.memory_allocate, "cuMemAlloc_v2" },
        { &c.memory_free, "cuMemFree_v2" },
        { &c.pinned_allocate, "cuMemAllocHost_v2" },
        { &c.pinned_free, "cuMemFreeHost" },
        { &c.to_device, "cuMemcpyHtoD_v2" },
        { &c.to_host, "cuMemcpyDtoH_v2" },
        { &c.copy_async, "cuMemcpyDtoDAsync_v2" },
        { &c.stream_create, "cuStreamCreate" },
        { &c.stream_synchronize, "cuStreamSynchronize" },
        { &c.stream_destroy, "cuStreamDestroy_v2" },
        { &c.capture_begin, "cuStreamBeginCapture_v2" },
        { &c.capture_end, "cuStreamEndCapture" },
        { &c.graph_instantiate, "cuGraphInstantiateWithFlags" },
        { &c.graph_launch, "cuGraphLaunch" },
        { &c.graph_executable_destroy, "cuGraphExecDestroy" },
        { &c.graph_destroy, "cuGraphDestroy" },
    };
    for (size_t i = 0; i < sizeof functions / sizeof functions[0]; i++) {
        void *function = library ? dlsym(library, functions[i].symbol) : NULL;
        if (!function) {
            fprintf(stderr, "libcuda.so.1 has no %s\n", functions[i].symbol);
            exit(1);
        }
        memcpy(functions[i].slot, &function, sizeof function);
    }
    int device;
    void *context;
    check_cuda("cuInit", c.init(0));
    check_cuda("cuDeviceGet", c.device_get(&device, 0));
    check_cuda("cuDeviceGetName", c.device_get_name(c.name, sizeof c.name, device));
    check_cuda("cuDevicePrimaryCtxRetain", c.context_retain(&context, device));
    check_cuda("cuCtxSetCurrent", c.context_make_current(context));
    check_cuda("cuStreamCreate", c.stream_create(&c.stream, 1)); /* does not wait for the default stream */
    return c;
}

static inline void *cuda_allocate(const cuda *c, size_t bytes)
{
    device_pointer memory = 0;
    check_cuda("cuMemAlloc", c->memory_allocate(&memory, bytes ? bytes : 1));
    return (void *)(uintptr_t)memory;
}

static inline void cuda_free(const cuda *c, void *memory)
{
    check_cuda("cuMemFree", c->memory_free((device_pointer)(uintptr_t)memory));
}

/* Device memory with a copy of `bytes` bytes of host memory. */
static inline void *cuda_copy_of(const cuda *c, const void *host, size_t bytes)
{
    void *memory = cuda_allocate(c, bytes);
    check_cuda("cuMemcpyHtoD", c->to_device((device_pointer)(uintptr_t)memory, host, bytes));
    return memory;
}

static inline void cuda_fetch(const cuda *c, void *host, const void *memory, size_t bytes)
{
    check_cuda("cuMemcpyDtoH", c->to_host(host, (device_pointer)(uintptr_t)memory, bytes));
}

/* The workspace that a CUDA handle asks for: device memory, and pinned host memory. */
static inline folio_workspace cuda_workspace(const cuda *c, const folio_workspace_info *info)
{
    folio_workspace ws = FOLIO_INIT(folio_workspace);
    ws.device = cuda_allocate(c, info->device_bytes);
    ws.device_bytes = info->device_bytes;
    check_cuda("cuMemAllocHost", c->pinned_allocate(&ws.host, info->host_bytes ? info->host_bytes : 1));
    ws.host_bytes = info->host_bytes;
    return ws;
}

static inline void free_cuda_workspace(const cuda *c, folio_workspace *ws)
{
    cuda_free(c, ws->device);
    check_cuda("cuMemFreeHost", c->pinned_free(ws->host));
}

#endif
