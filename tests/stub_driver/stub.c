/* A CUDA driver that computes nothing: it answers as the tests want and writes down what it was asked.
 *
 * FOLIO_STUB picks what goes wrong: "ok", "toolkit_stub", "no_device", "old", "driver_of_cuda_12",
 * "out_of_memory", "no_pools" or "launch_failure". "cc_10_3" is a device of compute capability 10.3, and "cc_10_0_of_cuda_12"
 * one under an older driver. -DWITHOUT_TENSOR_MAPS builds a driver that lacks a function.
 * folio_stub_fail makes one later call fail. Launches and uploads are kept with what they carried.
 * Page-locked memory of the tests lies from 2^45 on, and the device has it at twice the address. Memory of the device that
 * is allocated here lies from 2^42 on; nobody may read it. Page-locked memory that is allocated here is the process's.
 * Streams: 0x1000 belongs to the primary context, 0x2000 to another one, 0x3000 is being captured. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef int CUresult;
enum {
    OK = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    STUB_LIBRARY = 34,
    NO_DEVICE = 100,
    UNSUPPORTED_PTX = 222,
    INVALID_DEVICE = 101,
    INVALID_HANDLE = 400,
    NOT_READY = 600,
    LAUNCH_FAILED = 719,
    UNKNOWN = 999
};

#define PRIMARY ((void *)0xC0)
#define OTHER ((void *)0xC1)
#define EXPORT __attribute__((visibility("default")))

static char calls[1 << 16];
static size_t used;

static int retained;
static __thread void *stack[16];
static __thread int depth;

/* The next call of this function fails. */
static char failing[64];

static int fails(const char *call) {
    if (strcmp(failing, call) != 0) return 0;
    failing[0] = 0;
    return 1;
}

/* A kernel, and how many bytes its first parameter has: what the tests said, or one number. */
struct kernel { char name[64]; size_t bytes; };
static struct kernel kernels[64];
static unsigned num_kernels;

static struct kernel *kernel_named(const char *name) {
    for (unsigned i = 0; i < num_kernels; ++i)
        if (strcmp(kernels[i].name, name) == 0) return &kernels[i];
    if (num_kernels == 64) abort();
    snprintf(kernels[num_kernels].name, sizeof kernels->name, "%s", name);
    kernels[num_kernels].bytes = 8;
    return &kernels[num_kernels++];
}

/* What a launch carried, of the first that nobody has forgotten; stub.rs mirrors it. */
struct launch {
    char name[64];
    unsigned grid[3], block[3], shared, cluster, dependent, num_maps;
    uint64_t stream, bytes;
    unsigned char params[4096];
    uint64_t maps[7][16];
};
static struct launch launches[64];
static unsigned num_launches;

/* What the last uploads carried, by their numbers modulo the length. */
static struct upload { uint64_t destination, bytes; unsigned char *data; } uploads[8];
static unsigned num_uploads;

static int mode_is(const char *name) {
    const char *mode = getenv("FOLIO_STUB");
    return mode && strcmp(mode, name) == 0;
}

static int driver_of_cuda_12(void) {
    const char *mode = getenv("FOLIO_STUB");
    return mode && strstr(mode, "of_cuda_12");
}

static void compute_capability(int *major, int *minor) {
    const char *mode = getenv("FOLIO_STUB");
    if (!mode || sscanf(mode, "cc_%d_%d", major, minor) != 2) *major = 9, *minor = 0;
}

static void note(const char *call) {
    int n = snprintf(calls + used, sizeof calls - used, "%s\n", call);
    if (n > 0 && used + (size_t)n < sizeof calls) used += (size_t)n;
}

/* What the tests ask. */
EXPORT const char *folio_stub_calls(void) { return calls; }
EXPORT void folio_stub_forget(void) { used = 0, calls[0] = 0, num_launches = 0; }
EXPORT void folio_stub_fail(const char *call) { snprintf(failing, sizeof failing, "%s", call); }
EXPORT void folio_stub_params(const char *kernel, size_t bytes) {
    if (bytes > sizeof launches->params) abort();
    kernel_named(kernel)->bytes = bytes;
}
EXPORT const struct launch *folio_stub_launches(unsigned *count) { return *count = num_launches, launches; }
/* The last upload but so many; the last few are kept. */
EXPORT const unsigned char *folio_stub_upload(unsigned later, uint64_t *destination, uint64_t *bytes) {
    if (later >= num_uploads || later >= sizeof uploads / sizeof *uploads) return NULL;
    const struct upload *upload = &uploads[(num_uploads - 1 - later) % (sizeof uploads / sizeof *uploads)];
    return *destination = upload->destination, *bytes = upload->bytes, upload->data;
}
EXPORT void *folio_stub_current(void) { return depth ? stack[depth - 1] : NULL; }
EXPORT int folio_stub_retained(void) { return retained; }

EXPORT CUresult cuInit(unsigned flags) {
    note("cuInit");
    if (mode_is("toolkit_stub")) return STUB_LIBRARY;
    if (mode_is("no_device")) return NO_DEVICE;
    return flags ? INVALID_VALUE : OK;
}
EXPORT CUresult cuDriverGetVersion(int *version) {
    *version = mode_is("old") ? 11080 : driver_of_cuda_12() ? 12080 : 13000;
    return OK;
}
EXPORT CUresult cuGetErrorName(unsigned code, const char **text) {
    *text = code == LAUNCH_FAILED ? "CUDA_ERROR_LAUNCH_FAILED" : code == OUT_OF_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY" : NULL;
    return *text ? OK : INVALID_VALUE;
}
EXPORT CUresult cuGetErrorString(unsigned code, const char **text) {
    *text = code == LAUNCH_FAILED ? "unspecified launch failure" : code == OUT_OF_MEMORY ? "out of memory" : NULL;
    return *text ? OK : INVALID_VALUE;
}

EXPORT CUresult cuDeviceGetCount(int *count) { return *count = 1, OK; }
EXPORT CUresult cuDeviceGet(int *device, int ordinal) { return *device = ordinal, ordinal ? INVALID_DEVICE : OK; }
EXPORT CUresult cuDeviceGetName(char *name, int len, int device) {
    (void)device;
    snprintf(name, (size_t)len, "Stub GPU");
    return OK;
}
EXPORT CUresult cuDeviceGetAttribute(int *value, unsigned attribute, int device) {
    int major, minor;
    (void)device;
    compute_capability(&major, &minor);
    switch (attribute) {
    case 16: *value = 132; return OK;            /* multiprocessors */
    case 36: *value = 2619000; return OK;        /* memory: clock in kHz, bits */
    case 37: *value = 5120; return OK;
    case 38: *value = 50 << 20; return OK;       /* L2 */
    case 75: *value = major; return OK;          /* compute capability */
    case 76: *value = minor; return OK;
    case 115: *value = !mode_is("no_pools"); return OK;
    case 97: *value = major == 12 || (major == 8 && minor) ? 101376 : 232448; return OK; /* shared memory of a block */
    default: return INVALID_VALUE;
    }
}

EXPORT CUresult cuDevicePrimaryCtxRetain(void **context, int device) {
    (void)device;
    note("cuDevicePrimaryCtxRetain");
    ++retained;
    return *context = PRIMARY, OK;
}
EXPORT CUresult cuDevicePrimaryCtxRelease_v2(int device) {
    (void)device;
    note("cuDevicePrimaryCtxRelease");
    --retained;
    return OK;
}
EXPORT CUresult cuCtxPushCurrent_v2(void *context) {
    note("cuCtxPushCurrent");
    if (depth == 16) return INVALID_VALUE;
    stack[depth++] = context;
    return OK;
}
EXPORT CUresult cuCtxPopCurrent_v2(void **context) {
    note("cuCtxPopCurrent");
    if (!depth) return INVALID_VALUE;
    *context = stack[--depth];
    return OK;
}

EXPORT CUresult cuStreamGetCtx(void *stream, void **context) {
    note("cuStreamGetCtx");
    switch ((uintptr_t)stream) {
    case 0x1000: case 0x3000: *context = PRIMARY; return OK;
    case 0x2000: *context = OTHER; return OK;
    default: return INVALID_HANDLE;
    }
}
EXPORT CUresult cuStreamIsCapturing(void *stream, unsigned *status) {
    note("cuStreamIsCapturing");
    *status = (uintptr_t)stream == 0x3000;
    return OK;
}

EXPORT CUresult cuStreamSynchronize(void *stream) {
    (void)stream;
    note("cuStreamSynchronize");
    return fails("cuStreamSynchronize") ? UNKNOWN : OK;
}

EXPORT CUresult cuModuleLoadData(void **module, const void *image) {
    char text[64];
    if (memcmp(image, "\x7f" "ELF", 4) == 0) snprintf(text, sizeof text, "cuModuleLoadData cubin");
    else snprintf(text, sizeof text, "cuModuleLoadData PTX %.*s", (int)strcspn(image, "\n"), (const char *)image);
    note(text);
    if (mode_is("out_of_memory")) return OUT_OF_MEMORY;
    if (driver_of_cuda_12() && strstr(text, "PTX")) return UNSUPPORTED_PTX;
    return *module = (void *)image, OK;
}
EXPORT CUresult cuModuleUnload(void *module) { return (void)module, note("cuModuleUnload"), OK; }
EXPORT CUresult cuModuleGetFunction(void **function, void *module, const char *name) {
    (void)module;
    note("cuModuleGetFunction");
    return *function = kernel_named(name), OK;
}
EXPORT CUresult cuFuncSetAttribute(void *function, unsigned attribute, int value) {
    char text[64];
    (void)function;
    snprintf(text, sizeof text, "cuFuncSetAttribute %u=%d", attribute, value);
    note(text);
    return OK;
}
EXPORT CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, void *function, int threads, size_t shared) {
    (void)function, (void)threads, (void)shared;
    return *blocks = 2, OK;
}

struct config {
    unsigned grid[3], block[3], shared;
    void *stream;
    struct { unsigned id, pad; union { unsigned words[16]; char bytes[64]; } value; } *attributes;
    unsigned num_attributes;
};
static void keep_launch(const struct config *c, const struct kernel *kernel, void **params) {
    if (num_launches == sizeof launches / sizeof *launches) return;
    struct launch *l = &launches[num_launches++];
    *l = (struct launch){.shared = c->shared, .cluster = 1, .stream = (uintptr_t)c->stream, .bytes = kernel->bytes};
    memcpy(l->name, kernel->name, sizeof l->name);
    memcpy(l->grid, c->grid, sizeof l->grid);
    memcpy(l->block, c->block, sizeof l->block);
    for (unsigned i = 0; i < c->num_attributes; ++i) {
        if (c->attributes[i].id == 4) l->cluster = c->attributes[i].value.words[0];
        if (c->attributes[i].id == 6) l->dependent = c->attributes[i].value.words[0];
    }
    memcpy(l->params, params[0], kernel->bytes);
    for (; l->num_maps < 7 && params[1 + l->num_maps]; ++l->num_maps)
        memcpy(l->maps[l->num_maps], params[1 + l->num_maps], sizeof l->maps[0]);
}

EXPORT CUresult cuLaunchKernelEx(const struct config *c, void *function, void **params, void **extra) {
    char text[512];
    int n = snprintf(text, sizeof text, "cuLaunchKernelEx %u,%u,%u x %u,%u,%u shared %u stream %#lx", c->grid[0], c->grid[1],
                     c->grid[2], c->block[0], c->block[1], c->block[2], c->shared, (unsigned long)(uintptr_t)c->stream);
    for (unsigned i = 0; i < c->num_attributes; ++i)
        n += snprintf(text + n, sizeof text - (size_t)n, " attribute %u=%u,%u,%u", c->attributes[i].id,
                      c->attributes[i].value.words[0], c->attributes[i].value.words[1], c->attributes[i].value.words[2]);
    /* Kernels of the tests take one 64-bit number, then tensor maps. */
    if (params[0]) n += snprintf(text + n, sizeof text - (size_t)n, " params %#llx", *(unsigned long long *)params[0]);
    for (int i = 1; i <= 4 && params[i]; ++i)
        n += snprintf(text + n, sizeof text - (size_t)n, " map %#llx", *(unsigned long long *)params[i]);
    if (extra) return INVALID_VALUE;
    note(text);
    if (mode_is("launch_failure") || fails("cuLaunchKernelEx")) return LAUNCH_FAILED;
    return keep_launch(c, function, params), OK;
}

#ifndef WITHOUT_TENSOR_MAPS
/* The map's first word says what was asked: data type, rank, swizzle, promotion, first stride. Then come the
 * address, five extents, four strides and five box extents, two to a word. */
EXPORT CUresult cuTensorMapEncodeTiled(void *map, unsigned type, unsigned rank, void *address, const uint64_t *extents,
                                       const uint64_t *strides, const uint32_t *box, const uint32_t *steps,
                                       unsigned interleave, unsigned swizzle, unsigned promotion, unsigned fill) {
    uint64_t *words = map;
    if ((uintptr_t)map % 64 || interleave || fill || !address) return INVALID_VALUE;
    for (unsigned i = 0; i < rank; ++i)
        if (!extents[i] || !box[i] || !steps[i]) return INVALID_VALUE;
    words[0] = (uint64_t)type << 32 | rank << 24 | swizzle << 20 | promotion << 16 | (rank > 1 ? strides[0] : 0);
    words[1] = (uintptr_t)address;
    for (unsigned i = 0; i < 5; ++i) words[2 + i] = i < rank ? extents[i] : 0;
    for (unsigned i = 0; i < 4; ++i) words[7 + i] = i + 1 < rank ? strides[i] : 0;
    for (unsigned i = 0; i < 5; ++i) words[11 + i / 2] |= (uint64_t)(i < rank ? box[i] : 0) << 32 * (i % 2);
    return OK;
}
#endif

EXPORT CUresult cuPointerGetAttribute(void *data, unsigned attribute, uint64_t pointer) {
    note("cuPointerGetAttribute");
    if (attribute == 9 && pointer >> 42 == 1) return *(int *)data = 0, OK;
    if (attribute != 3 || pointer >> 45 != 1) return INVALID_VALUE;
    return *(uint64_t *)data = 2 * pointer, OK;
}

/* An event is pending from its recording until somebody waits for it, or for the device. */
struct event { unsigned pending; };
static unsigned recorded, finished;
EXPORT void folio_stub_finish(void) { finished = recorded; }
EXPORT CUresult cuEventCreate(struct event **event, unsigned flags) {
    note("cuEventCreate");
    *event = calloc(1, sizeof **event);
    return flags == 2 ? OK : INVALID_VALUE;
}
EXPORT CUresult cuEventDestroy_v2(struct event *event) { return free(event), note("cuEventDestroy"), OK; }
EXPORT CUresult cuEventRecord(struct event *event, void *stream) {
    (void)stream;
    note("cuEventRecord");
    if (fails("cuEventRecord")) return UNKNOWN;
    return event->pending = ++recorded, OK;
}
EXPORT CUresult cuEventQuery(struct event *event) {
    return note("cuEventQuery"), event->pending > finished ? NOT_READY : OK;
}
EXPORT CUresult cuEventSynchronize(struct event *event) {
    event->pending = 0;
    return note("cuEventSynchronize"), OK;
}

/* What is asked of memory, and on which stream. */
static void note_memory(const char *call, uint64_t number, void *stream) {
    char text[96];
    snprintf(text, sizeof text, "%s %llu stream %#lx", call, (unsigned long long)number, (unsigned long)(uintptr_t)stream);
    note(text);
}
static CUresult allocate(const char *call, uint64_t *address, size_t bytes, void *stream) {
    static uint64_t next = 1ull << 42;
    note_memory(call, bytes, stream);
    if (!depth || !bytes) return INVALID_VALUE;
    if (fails(call)) return OUT_OF_MEMORY;
    *address = next;
    next += (bytes + 511) / 512 * 512;
    return OK;
}
EXPORT CUresult cuMemAllocAsync(uint64_t *address, size_t bytes, void *stream) {
    return allocate("cuMemAllocAsync", address, bytes, stream);
}
EXPORT CUresult cuMemAlloc_v2(uint64_t *address, size_t bytes) { return allocate("cuMemAlloc", address, bytes, NULL); }
EXPORT CUresult cuMemFreeAsync(uint64_t address, void *stream) {
    return note_memory("cuMemFreeAsync", address, stream), depth ? OK : INVALID_VALUE;
}
EXPORT CUresult cuMemFree_v2(uint64_t address) {
    return note_memory("cuMemFree", address, NULL), depth ? OK : INVALID_VALUE;
}
EXPORT CUresult cuMemHostAlloc(void **address, size_t bytes, unsigned flags) {
    note_memory("cuMemHostAlloc", bytes, NULL);
    if (!depth || !bytes || flags) return INVALID_VALUE;
    if (fails("cuMemHostAlloc")) return OUT_OF_MEMORY;
    *address = aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
    return OK;
}
EXPORT CUresult cuMemFreeHost(void *address) {
    note("cuMemFreeHost");
    if (!depth) return INVALID_VALUE;
    return free(address), OK;
}
/* How strict captures are with a thread: 0 is the driver's default, 2 lets it call what it likes. */
static __thread unsigned strictness;
EXPORT unsigned folio_stub_strictness(void) { return strictness; }
EXPORT CUresult cuThreadExchangeStreamCaptureMode(unsigned *mode) {
    unsigned before = strictness;
    return strictness = *mode, *mode = before, OK;
}
EXPORT CUresult cuMemcpyHtoDAsync_v2(uint64_t destination, const void *source, size_t bytes, void *stream) {
    (void)stream;
    note("cuMemcpyHtoDAsync");
    if (fails("cuMemcpyHtoDAsync")) return UNKNOWN;
    struct upload *upload = &uploads[num_uploads++ % (sizeof uploads / sizeof *uploads)];
    upload->data = realloc(upload->data, bytes);
    memcpy(upload->data, source, bytes);
    return upload->destination = destination, upload->bytes = bytes, OK;
}
