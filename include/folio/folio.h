/**
 * @file folio.h
 * Folio: attention over paged KV caches for LLM inference runtimes.
 *
 * Generated from the Rust sources; do not edit.
 *
 * Three speeds. `_create` is slow and done once: it picks code. `_plan` is done once per step, in
 * microseconds: it takes over lengths and page tables. `_run` is done once per layer: a launch, or on the
 * CPU the computation. Layers with different windows, soft caps, scales, sinks or masks share one plan.
 *
 * Ownership. All memory that outlives a call is the caller's: tensors, workspaces, error reports. What
 * a struct or tensor argument points to is borrowed for the call, unless its field says otherwise.
 * Outputs are written only on success. Handles are ended by their `_destroy`, which accepts NULL.
 *
 * Structs. Fill `struct_size` with sizeof (FOLIO_INIT does) and zero the rest: zero is every field's
 * default. A library older than the header refuses fields it does not know, unless they are zero.
 *
 * Threads. A function whose object parameter is `const` may run concurrently with others of its kind;
 * one whose object parameter is not const needs the object for itself. Handles may move between threads,
 * but not across fork(). Functions without an object may be called any time.
 *
 * Errors. Every call that can fail returns a folio_status and fills in a folio_error of the caller's,
 * one sentence that names field, value and what is accepted. Nothing throws or aborts.
 */

#ifndef FOLIO_FOLIO_H
#define FOLIO_FOLIO_H

#include <stddef.h>
#include <stdint.h>

/** A zeroed struct with its struct_size filled in: `folio_batch batch = FOLIO_INIT(folio_batch);` */
#ifdef __cplusplus
#define FOLIO_INIT(T) ([] { T folio_init_{}; folio_init_.struct_size = sizeof(T); return folio_init_; }())
#else
#define FOLIO_INIT(T) ((T){ .struct_size = sizeof(T) })
#endif

#ifdef __cplusplus
extern "C" {
#endif

/**
 * @defgroup version Versions
 * Of the library and of its ABI.
 * @{
 */

/**
 * Major version of the ABI. While it is 0, every minor version may break.
 */
#define FOLIO_ABI_MAJOR 0

/**
 * Minor version of the ABI.
 */
#define FOLIO_ABI_MINOR 1

/**
 * `(major << 16) | minor` of this header.
 */
#define FOLIO_ABI_VERSION 1

/**
 * The library's version, `"MAJOR.MINOR.PATCH"`.
 *
 * Any thread, any time. The string lives as long as the process.
 */
const char *folio_version(void);

/** @} */

/**
 * @defgroup status Status codes and error reports
 * What a call answers, and the sentence that goes with a failure.
 * @{
 */

/**
 * Result of every call that can fail: 0 is success. Treat unknown positive codes as failure.
 * 1 to 49: the caller's fault. 50 to 99: cannot be done here. 100 to 149: something ran out or broke.
 * 200: a bug in Folio. Any call may answer 200; the lists of the functions leave it out.
 */
typedef int32_t folio_status;

/**
 * Success.
 */
#define FOLIO_OK 0

/**
 * A value is outside what the field accepts.
 */
#define FOLIO_ERR_INVALID_ARGUMENT 1

/**
 * struct_size is smaller than the struct's first version, not a multiple of its alignment, or not plausible.
 */
#define FOLIO_ERR_INVALID_STRUCT_SIZE 2

/**
 * A flag or a field beyond what this library knows is not zero.
 */
#define FOLIO_ERR_UNKNOWN_FIELD 3

/**
 * A tensor's rank, extents, strides or alignment do not fit.
 */
#define FOLIO_ERR_SHAPE 4

/**
 * A tensor's element type does not fit.
 */
#define FOLIO_ERR_DTYPE 5

/**
 * A tensor or a stream belongs to another device or to another CUDA context.
 */
#define FOLIO_ERR_DEVICE_MISMATCH 6

/**
 * The workspace is missing, misaligned or smaller than needed.
 */
#define FOLIO_ERR_WORKSPACE_TOO_SMALL 7

/**
 * run before a successful plan.
 */
#define FOLIO_ERR_NOT_PLANNED 8

/**
 * The call may not be captured in a CUDA graph.
 */
#define FOLIO_ERR_CAPTURE 9

/**
 * Legal, but this library, build or device has no code for it.
 */
#define FOLIO_ERR_UNSUPPORTED 50

/**
 * There is no such device.
 */
#define FOLIO_ERR_NO_DEVICE 51

/**
 * The CUDA driver library is missing, incomplete or a stub.
 */
#define FOLIO_ERR_NO_DRIVER 52

/**
 * The CUDA driver is older than this library needs.
 */
#define FOLIO_ERR_DRIVER_TOO_OLD 53

/**
 * A kernel variant could not be compiled.
 */
#define FOLIO_ERR_COMPILE 54

/**
 * Host or device memory ran out.
 */
#define FOLIO_ERR_OUT_OF_MEMORY 100

/**
 * The CUDA driver reported a failure, perhaps that of an earlier kernel.
 */
#define FOLIO_ERR_DRIVER 101

/**
 * A bug in Folio. The object of the call is unusable afterwards and can still be destroyed; outputs may
 * have been written. Where the bug was a panic, its message is on stderr too.
 */
#define FOLIO_ERR_INTERNAL 200

/**
 * The name of a status code without its prefix, `"unknown"` for numbers that are none.
 *
 * Any thread, any time. The string lives as long as the process.
 */
const char *folio_status_name(folio_status status);

/**
 * What went wrong, in memory of the caller's. Set struct_size (`FOLIO_INIT` does) and pass its address
 * as the last argument, or pass NULL. Written only on failure.
 */
typedef struct folio_error {
    /**
     * sizeof(folio_error) of the caller.
     */
    uint32_t struct_size;
    /**
     * The status that the call returned.
     */
    folio_status status;
    /**
     * One sentence: field, value, what would be accepted. UTF-8, NUL-terminated, cut at a character
     * boundary where it is longer.
     */
    char message[504];
} folio_error;

/** @} */

/**
 * @defgroup context Devices and contexts
 * A context is one device and what belongs to it. All other objects are made from one.
 *
 * CUDA context. Folio uses the primary context of the device: the one of the CUDA runtime, hence of the
 * frameworks that are built on it. Every call makes it current on the calling thread and restores what was
 * current before. So no device has to be current, and none is changed.
 *
 * Streams. A stream is a CUstream or cudaStream_t of the primary context; one of another context is
 * FOLIO_ERR_DEVICE_MISMATCH. NULL is the legacy default stream, as is 1 (CU_STREAM_LEGACY); 2
 * (CU_STREAM_PER_THREAD) is the calling thread's default stream. What a call enqueues runs in the order of its
 * stream. On the CPU a stream must be NULL, and a call is complete when it returns.
 *
 * Waiting. No call waits for the device but the one that folio_decode_plan names. A kernel that fails shows at
 * the host's next synchronisation and in later calls, as FOLIO_ERR_DRIVER.
 * @{
 */

/**
 * Host memory (DLPack's kDLCPU).
 */
#define FOLIO_DEVICE_CPU 1

/**
 * Memory of a CUDA device (kDLCUDA).
 */
#define FOLIO_DEVICE_CUDA 2

/**
 * Page-locked host memory (kDLCUDAHost); treated as host memory, but for what folio_kv_copy says.
 */
#define FOLIO_DEVICE_CUDA_HOST 3

/**
 * Compute in float64, one key after the other: the oracle that Folio's own tests compare with. CPU only.
 */
#define FOLIO_CONTEXT_REFERENCE 1

/**
 * Messages about failures that no status reports.
 */
#define FOLIO_LOG_ERROR 1

/**
 * Also messages about what works less well than it could.
 */
#define FOLIO_LOG_WARNING 2

/**
 * Also messages about what was chosen.
 */
#define FOLIO_LOG_INFO 3

/**
 * A device and what belongs to it: threads, modules, the log callback. Made by
 * folio_context_create; handles made from it keep it alive, so it may be destroyed before them.
 */
typedef struct folio_context folio_context;

/**
 * Receives a message on the thread that called Folio, with no lock held. `message` is valid during the
 * call. It must not call Folio and must not throw.
 */
typedef void (*folio_log_fn)(void *user,
                             int32_t level,
                             const char *message);

/**
 * One task of a folio_parallel_for_fn.
 */
typedef void (*folio_task_fn)(void *task_data,
                              uint32_t index);

/**
 * Runs tasks on threads of the host's: OpenMP, TBB, folly, a pool of its own. It calls `task(task_data, index)` for every
 * index below num_tasks, each exactly once, and returns when all of these calls have returned. They may be made by any
 * threads, that of the caller included, in any order, at the same time or one after the other: no task waits for another
 * one. There are at most num_threads tasks of one call, and one call at a time of a context; small work is done without
 * one.
 *
 * A task does not throw, and what fails in it is reported by the function that needed it. parallel_for must not throw
 * either. Until it returns, the thread that called it must not call a function of this context or of its handles. A
 * thread that takes up other work of the host's while it waits does (TBB: this_task_arena::isolate prevents it).
 *
 * If an index was left out, called twice or is none, or if the context was called within the call, the function that
 * needed the threads answers FOLIO_ERR_INTERNAL; its outputs may then be written in part. Calls of a task that are made
 * after parallel_for has returned do nothing, while the context or a handle of it exists.
 */
typedef void (*folio_parallel_for_fn)(void *user,
                                      uint32_t num_tasks,
                                      folio_task_fn task,
                                      void *task_data);

/**
 * What a context is made from.
 *
 * Threads of a CPU context. Either Folio starts its own, and the caller's computes with them; or the host's compute
 * (parallel_for). Folio's own are bound to their CPUs, to all of them together, and sleep between calls; the caller's
 * stays where the host has put it. CPUs are those of `cpus`, or those that the process's main thread had when the library
 * was loaded. They are not those of the creating thread, as OpenMP binds its threads to one CPU each. If the host binds
 * its main thread before it loads Folio, it should pass `cpus`.
 *
 * If num_threads is larger than the number of CPUs that these threads and the creating one have together, a warning says
 * so to `log`, and only as many threads compute. Results follow from num_threads in any case.
 */
typedef struct folio_context_desc {
    /**
     * sizeof(folio_context_desc).
     */
    uint32_t struct_size;
    /**
     * FOLIO_CONTEXT_…
     */
    uint32_t flags;
    /**
     * FOLIO_DEVICE_CPU or FOLIO_DEVICE_CUDA.
     */
    int32_t device_type;
    /**
     * Device ordinal; 0 for the CPU.
     */
    int32_t device_id;
    /**
     * CPU: threads that compute, the caller's among them, at most 1024. 0: one for each of the CPUs; in a struct of 40
     * bytes, that of 0.1.0: 1. 1: only the calling thread. With parallel_for: threads of the host's that work at a time, 1
     * or more. CUDA and FOLIO_CONTEXT_REFERENCE: 0.
     */
    uint32_t num_threads;
    /**
     * The most talkative level that reaches `log`: FOLIO_LOG_…; 0 where log is NULL.
     */
    int32_t log_level;
    /**
     * NULL for no messages.
     */
    folio_log_fn log;
    /**
     * Passed to `log`.
     */
    void *log_user;
    /**
     * CPU: `[num_cpus]` the CPUs of Folio's own threads, by the numbers that Linux gives them, each once; read during the
     * call. A CPU that is not there, or that the process may not use, is refused; so is a list on other systems. NULL:
     * those of the process when the library was loaded. CUDA, FOLIO_CONTEXT_REFERENCE and parallel_for: NULL.
     */
    const uint32_t *cpus;
    /**
     * CPU: what runs Folio's work on threads of the host's, for as long as the context or a handle of it exists; NULL:
     * Folio has its own. CUDA and FOLIO_CONTEXT_REFERENCE: NULL.
     */
    folio_parallel_for_fn parallel_for;
    /**
     * Passed to `parallel_for`; NULL without it.
     */
    void *parallel_for_user;
    /**
     * CPUs in the list; 0 where it is NULL.
     */
    uint32_t num_cpus;
    /**
     * 0.
     */
    uint32_t reserved;
} folio_context_desc;

/**
 * The number of devices of a type: 1 for FOLIO_DEVICE_CPU, the driver's count for FOLIO_DEVICE_CUDA, 0
 * where there is no driver and for other numbers. Never fails. For FOLIO_DEVICE_CUDA it opens and initialises
 * the driver; a context is opened by folio_context_create only.
 *
 * Any thread, any time.
 */
uint32_t folio_device_count(int32_t device_type);

/**
 * Opens a device.
 *
 * @param desc what to open
 * @param out receives the context; destroy it with folio_context_destroy
 * @param err report of a failure, or NULL
 * @return FOLIO_OK, or INVALID_ARGUMENT, UNSUPPORTED, NO_DEVICE, NO_DRIVER, DRIVER_TOO_OLD,
 *         OUT_OF_MEMORY, DRIVER
 *
 * # Safety
 * `desc` points to as many bytes as its struct_size says, `out` to a pointer. Any thread.
 */
folio_status folio_context_create(const folio_context_desc *desc,
                                  folio_context **out,
                                  folio_error *err);

/**
 * Ends the caller's hold on a context; NULL is fine. Handles made from it stay usable. On CUDA the kernels are
 * unloaded with the last of them: what was launched or captured must be done by then.
 *
 * # Safety
 * `ctx` is NULL or came from folio_context_create and is not used afterwards.
 */
void folio_context_destroy(folio_context *ctx);

/** @} */

/**
 * @defgroup tensor Tensors
 * Memory as the caller describes it. What a field says of a tensor is checked; what is said here holds for
 * all of them.
 *
 * Alignment. The address of the first element is a multiple of the element's size. Any such address is
 * accepted. Kernels are fast where every row of q, k, v, o, key, value, caches and states begins at a multiple
 * of 16 bytes: so do the address and, in bytes, all strides but the last.
 *
 * Strides. Rows of head_dim elements have a unit last stride. All other strides of q, k, v, o, lse, key, value,
 * caches and states are free, so slices of larger tensors will do, and heads may come before tokens. An input may
 * name memory twice (stride 0), an output may not. Lengths, page ids, slots, scales, masks, slopes, sinks and
 * ranges are contiguous, but for the rows of a block_table and the scales of a kv_format.
 *
 * Extents. Where a field says "or more", what lies beyond the part in use does not count, whatever it holds, and is
 * not written.
 *
 * Overlap. An output may not share memory with another tensor of the call, o not with q either, unless its field
 * says so. This is not checked; what the outputs hold is then not defined.
 * @{
 */

/**
 * An element type, as DLPack describes it: float is code 2, bfloat 4, float8_e4m3fn 10, float8_e5m2
 * 12, float4_e2m1fn 17, int 0, uint 1, bool 6; lanes is 1, but 2 for types of 4 bits, of which a tensor's element is a pair
 * in a byte. Where a field asks for uint8, bool of 8 bits is accepted as well.
 * All zero means "the default" where a field says so.
 */
typedef struct folio_dtype {
    /**
     * DLPack's DLDataTypeCode.
     */
    uint8_t code;
    /**
     * Bits per element.
     */
    uint8_t bits;
    /**
     * 1, or 2 for pairs of 4 bits.
     */
    uint16_t lanes;
} folio_dtype;

/**
 * Borrowed memory with a shape; byte for byte a DLTensor of DLPack 1.x. The struct, its shape and its
 * strides are only read during the call that receives them.
 */
typedef struct folio_tensor {
    /**
     * Address of the allocation; NULL is accepted where an extent is 0.
     */
    void *data;
    /**
     * FOLIO_DEVICE_CPU, FOLIO_DEVICE_CUDA or FOLIO_DEVICE_CUDA_HOST.
     */
    int32_t device_type;
    /**
     * Device ordinal.
     */
    int32_t device_id;
    /**
     * Number of dimensions, at most 5.
     */
    int32_t ndim;
    /**
     * Element type.
     */
    folio_dtype dtype;
    /**
     * `[ndim]` extents.
     */
    int64_t *shape;
    /**
     * `[ndim]` strides in elements, 0 or more; NULL, which DLPack forbids since 1.2, means compact
     * row-major.
     */
    int64_t *strides;
    /**
     * Bytes from `data` to the first element.
     */
    uint64_t byte_offset;
} folio_tensor;

/** So many elements as one, as an expression. */
#ifdef __cplusplus
#define FOLIO_DTYPE_LANES(code, bits, lanes) (folio_dtype{ (code), (bits), (lanes) })
#else
#define FOLIO_DTYPE_LANES(code, bits, lanes) ((folio_dtype){ (code), (bits), (lanes) })
#endif
/** An element type, as an expression. */
#define FOLIO_DTYPE(code, bits) FOLIO_DTYPE_LANES(code, bits, 1)
#define FOLIO_FLOAT32 FOLIO_DTYPE(2, 32) /**< IEEE 754 single */
#define FOLIO_FLOAT16 FOLIO_DTYPE(2, 16) /**< IEEE 754 half */
#define FOLIO_BFLOAT16 FOLIO_DTYPE(4, 16) /**< the upper half of a single */
#define FOLIO_FLOAT8_E4M3 FOLIO_DTYPE(10, 8) /**< e4m3fn, which NVIDIA and PyTorch call e4m3: up to 448, no infinity */
#define FOLIO_FLOAT8_E5M2 FOLIO_DTYPE(12, 8) /**< e5m2: up to 57344 */
#define FOLIO_UINT8 FOLIO_DTYPE(1, 8) /**< bytes: masks, and pages of 8 or 4 bits of hosts that have no type for them */
#define FOLIO_INT8 FOLIO_DTYPE(0, 8) /**< quantised caches */
#define FOLIO_INT4_X2 FOLIO_DTYPE_LANES(0, 4, 2) /**< two int4 in a byte, the first in its low bits */
#define FOLIO_FLOAT4_E2M1_X2 FOLIO_DTYPE_LANES(17, 4, 2) /**< two e2m1 in a byte, the first in its low bits: PyTorch's float4_e2m1fn_x2 */
#define FOLIO_INT32 FOLIO_DTYPE(0, 32) /**< lengths, offsets, page ids */
#define FOLIO_INT64 FOLIO_DTYPE(0, 64) /**< slots */

/** @} */

/**
 * @defgroup kv_storage How keys and values are stored
 * Numbers of the fields kv_layout, kv_storage and kv_format.
 * @{
 */

/**
 * Cache dimensions `[num_pages, page_size, num_kv_heads, head_dim]`: FlashInfer's NHD.
 */
#define FOLIO_LAYOUT_NHD 0

/**
 * Cache dimensions `[num_pages, num_kv_heads, page_size, head_dim]`: FlashInfer's HND.
 */
#define FOLIO_LAYOUT_HND 1

/**
 * Keys and values lie in pages.
 */
#define FOLIO_KV_PAGED 0

/**
 * Keys and values lie one request after the other: `[nnz_kv, num_kv_heads, head_dim]`.
 */
#define FOLIO_KV_RAGGED 1

/**
 * Rows of a cache are elements one after the other: of the type of q (or key), or fp8 with a scale for all heads or for each.
 */
#define FOLIO_KV_FORMAT_PLAIN 0

/**
 * Rows of int8 (the default) or float8_e4m3 with a scale for each token and head, which the append computes: the largest
 * magnitude of the row divided by 127 or 448, and 1e-6 at least (vLLM's int8_per_token_head and fp8_per_token_head).
 * A row is its elements times its scale. k_scales and v_scales are float32 `[num_pages or more, page_size, num_kv_heads]` in
 * both layouts, of any strides.
 */
#define FOLIO_KV_FORMAT_TOKEN_HEAD_SCALES 1

/**
 * Rows of int8 with a fixed scale for each element of a head (FastDeploy's cache_int8): the append stores x / scale, rounded
 * to nearest even, within -127 to 127. k_scales are float32 `[num_kv_heads, head_dim_qk]`, v_scales
 * `[num_kv_heads, head_dim_vo]`, with unit stride on the last dimension.
 */
#define FOLIO_KV_FORMAT_CHANNEL_SCALES 2

/**
 * Rows of int4 with a fixed scale and zero point for each element of a head (FastDeploy's cache_int4_zp): the append stores
 * x / scale + zero point, rounded to nearest even, within -8 to 7, in two's complement. (FastDeploy stores these numbers plus
 * 8, in an order of its own.) Two elements share a byte, the first in its low bits: a row of a cache has head_dim / 2 bytes,
 * as uint8 or as DLPack's int4 of two lanes. Scales and zero points are shaped as in FOLIO_KV_FORMAT_CHANNEL_SCALES.
 */
#define FOLIO_KV_FORMAT_CHANNEL_ZERO_POINTS 3

/**
 * NVFP4 (FlashInfer's nvfp4_kv_quantize): rows of float4_e2m1 with a scale in float8_e4m3 for each 16 elements, and k_scale or
 * v_scale as the global scale: x is element · scale · k_scale. The append stores the largest magnitude of 16 elements,
 * divided by k_scale and by 6, as their scale. Two elements share a byte, the first in its low bits: a row of a cache has
 * head_dim / 2 bytes, as uint8 or as DLPack's float4_e2m1fn of two lanes. k_scales and v_scales are uint8 or float8_e4m3
 * `[num_pages or more, page_size, num_kv_heads, head_dim / 16]`, its two middle dimensions in the order of kv_layout, with
 * unit stride on the last dimension. Head dimensions are multiples of 16.
 */
#define FOLIO_KV_FORMAT_NVFP4 4

/**
 * vLLM's layout of reshape_and_cache, of types as in FOLIO_KV_FORMAT_PLAIN: keys `[num_pages, num_kv_heads, head_dim_qk / x,
 * page_size, x]` with x = 16 / bytes of an element and unit stride on the last dimension, values `[num_pages, num_kv_heads,
 * head_dim_vo, page_size]` of any strides. Elements have 16 or 8 bits; head_dim_qk is a multiple of x. kv_layout is not read.
 */
#define FOLIO_KV_FORMAT_PACKED_KEYS 5

/** @} */

/**
 * @defgroup attention Attention
 * Handles that are made once per problem, planned once per step and run once per layer, as FlashInfer's
 * wrappers are. Their functions come in sixes, _create, _workspace, _plan, _run, _kernel and _destroy, and do the same
 * for every handle: folio_decode_create and its neighbours say what.
 *
 * CUDA graphs. A handle made with FOLIO_PLAN_GRAPH has one layout of its workspace for all plans. Its runs can be
 * captured, and a replay computes the batch of the last plan before it. For that
 * - every plan gets the same workspace;
 * - page ids on the device keep the address that they had in the handle's first plan, which is checked. Those on the
 *   host are copied, and may move. A handle has the one or the other;
 * - lengths, and all else of a batch, may be somewhere else in every plan, on the host or on the device. Where plan
 *   itself was captured, with lengths on the device, the replay reads them where they were;
 * - the tensors of a run stay where they were captured, and have room for the largest batch that is replayed: rows of
 *   q, o and lse, pages of k and v, elements of masks and ranges. A capture with that batch planned checks it.
 *
 * @{
 */

/**
 * Runs may be captured in a CUDA graph, and planned again for the same graph: see @ref attention. No effect on
 * the CPU, whose calls are complete when they return.
 */
#define FOLIO_PLAN_GRAPH 1

/**
 * A request's result does not depend on the other requests of its batch, to the bit.
 */
#define FOLIO_PLAN_BATCH_INVARIANT 2

/**
 * Decode, prefill and cascade: where q and the cache are float8_e4m3, probabilities may be rounded to float8_e4m3 too, and
 * their products with values summed in the matrix unit's own precision for up to 1440 keys at a time. A permission, which
 * kernels that gain nothing by it do not use; without it probabilities keep 8 significant bits or more. The error: a
 * probability is off by up to 1/16 of itself, at random, and an output is too small by up to 1 % of its values' mean.
 */
#define FOLIO_PLAN_FP8_PRODUCTS 4

/**
 * Decode, prefill and cascade, without new_kv_dtype: runs may have FOLIO_MASK_ITEMS. On CUDA devices the workspace is larger by
 * max_num_tokens · max_kv_len bits, for the mask that such a run makes. No effect on the CPU, which needs none.
 */
#define FOLIO_PLAN_MASK_ITEMS 8

/**
 * folio_batch.window_left is in force. Without the flag it must be 0 (or -1).
 */
#define FOLIO_BATCH_WINDOW 1

/**
 * One step's lengths and page table. Index tensors are contiguous, each int32 or int64; block_table's rows may be
 * apart. The page table comes in one of these forms:
 *
 * | form | fields | known from |
 * |---|---|---|
 * | CSR | kv_indptr in pages, kv_indices, and last_page_len or kv_len, not both | FlashInfer |
 * | token slots | CSR with page_size 1: kv_indptr in tokens, kv_indices | SGLang |
 * | block table | block_table, kv_len | vLLM |
 * | ragged | kv_indptr in tokens (prefill with FOLIO_KV_RAGGED) | FlashInfer |
 *
 * A request may own more pages than its keys need; those are not read.
 *
 * Lengths (qo_indptr, kv_indptr, last_page_len, kv_len) are all on the host, or all on the context's
 * device; page ids (kv_indices, block_table) on either. Lengths on a device need page ids on it. Host tensors
 * are only read during plan. Device tensors must stay as they are until the last run of the plan has finished:
 * plan's kernel reads the lengths, runs read the page ids. int32 page ids may be changed between runs, in stream order;
 * each run reads those that it finds.
 *
 * Numbers of int64 are copied as int32. On the host those in use that do not fit are refused. On a device one more launch
 * of plan copies them to the workspace, page ids where there is room for max_num_pages of them (a block table's first
 * max_kv_len / page_size columns; more are refused), so runs do not read them.
 *
 * Numbers on the host are checked. Numbers on a device cannot be: lengths beyond the desc's maxima, beyond the
 * page table or beyond the rows of a tensor, and page ids beyond the cache, give wrong results, but no access
 * outside the tensors and the workspace that were passed.
 */
typedef struct folio_batch {
    /**
     * sizeof(folio_batch).
     */
    uint32_t struct_size;
    /**
     * FOLIO_BATCH_WINDOW.
     */
    uint32_t flags;
    /**
     * Query rows of every request where qo_indptr is NULL (decode only); 0: 1.
     */
    uint32_t qo_len;
    /**
     * 0.
     */
    uint32_t reserved;
    /**
     * `[batch_size + 1]` query-row offsets from 0; decode accepts NULL.
     */
    const folio_tensor *qo_indptr;
    /**
     * `[batch_size + 1]` offsets from 0 into kv_indices, or into ragged K and V.
     */
    const folio_tensor *kv_indptr;
    /**
     * `[num_pages or more]` page ids, 0 or more.
     */
    const folio_tensor *kv_indices;
    /**
     * `[batch_size]` tokens in the last page, 1 to page_size; not read for requests without pages. Refused
     * together with kv_len.
     */
    const folio_tensor *last_page_len;
    /**
     * `[batch_size]` keys per request, those of this step included; 0 or more. With a new_kv_dtype, those in the cache.
     */
    const folio_tensor *kv_len;
    /**
     * `[batch_size, max_pages_per_request]` page ids; only those that kv_len needs are read.
     */
    const folio_tensor *block_table;
    /**
     * No run of the plan sees a key more than so many before its row's own position: a run with a wider window is refused,
     * and one with mm_prefix_ranges that reach beyond it. Keys before the window are not planned for, which saves time
     * where it is short. -1: unlimited. Needs FOLIO_BATCH_WINDOW. For decode and
     * prefill over the cache; MLA, cascades and handles with a new_kv_dtype refuse it. Where captured runs are replayed,
     * every plan is for the window of those runs or a wider one: a replay cannot be refused.
     */
    int64_t window_left;
} folio_batch;

/**
 * Memory that a handle needs for any batch within its desc. Nothing has to be zeroed.
 */
typedef struct folio_workspace_info {
    /**
     * sizeof(folio_workspace_info) of the caller.
     */
    uint32_t struct_size;
    /**
     * 0.
     */
    uint32_t reserved;
    /**
     * Bytes of device memory; 0 on the CPU.
     */
    uint64_t device_bytes;
    /**
     * Bytes of host memory. For CUDA it should be page-locked (cudaHostAlloc): out of other memory the driver
     * copies before it returns, and may wait for the stream.
     */
    uint64_t host_bytes;
    /**
     * Alignment in bytes of both addresses.
     */
    uint64_t alignment;
} folio_workspace_info;

/**
 * The caller's memory for a plan. It belongs to the handle from plan until the next plan, or until the
 * handle is destroyed and its last run has finished. The next plan may bring other memory, unless a graph
 * has been captured.
 */
typedef struct folio_workspace {
    /**
     * sizeof(folio_workspace).
     */
    uint32_t struct_size;
    /**
     * 0.
     */
    uint32_t flags;
    /**
     * Device memory, or NULL where device_bytes of folio_workspace_info is 0.
     */
    void *device;
    /**
     * Bytes of it.
     */
    uint64_t device_bytes;
    /**
     * Host memory, or NULL where host_bytes of folio_workspace_info is 0.
     */
    void *host;
    /**
     * Bytes of it.
     */
    uint64_t host_bytes;
} folio_workspace;

/**
 * window_left and window_right are in force. Without the flag both must be 0 (or -1).
 */
#define FOLIO_RUN_WINDOW 1

/**
 * lse is in base 2 (FlashInfer's) instead of base e. Without lse it has no effect.
 */
#define FOLIO_RUN_LSE_BASE_2 2

/**
 * alibi_slopes take the square-root form.
 */
#define FOLIO_RUN_ALIBI_SQRT 4

/**
 * Columns of custom_mask before a request's last qo_len keys are not read: every row sees those keys. It is SGLang's
 * skip_prefix_custom_mask.
 */
#define FOLIO_RUN_MASK_SKIP_PREFIX 8

/**
 * custom_mask has columns for a request's last qo_len keys only, `[qo_len, qo_len]` per request: every row sees the keys
 * before them. Needs custom_mask_indptr.
 */
#define FOLIO_RUN_MASK_NEW_KEYS 16

/**
 * Window and chunks hold inside mm_prefix_ranges too.
 */
#define FOLIO_RUN_MM_PREFIX_IN_WINDOW 32

/**
 * Columns of score_bias are a request's last qo_len keys; those before them get nothing. With
 * FOLIO_RUN_BIAS_REQUEST_ROWS and a tensor of rank 2 it is vLLM's qq_bias. Needs score_bias.
 */
#define FOLIO_RUN_BIAS_NEW_KEYS 64

/**
 * Rows of score_bias count within a request, so that all requests share them; without the flag they are the rows of q.
 * Needs score_bias.
 */
#define FOLIO_RUN_BIAS_REQUEST_ROWS 128

/**
 * Row i of a request sees key j iff j <= kv_len - qo_len + i: the last row sees the last key.
 */
#define FOLIO_MASK_CAUSAL 0

/**
 * Every row sees every key: encoders, cross attention.
 */
#define FOLIO_MASK_FULL 1

/**
 * custom_mask holds a byte (uint8 or bool) per (row, key), row-major `[qo_len, kv_len]` per request, the
 * requests one after the other; non-zero lets see.
 */
#define FOLIO_MASK_CUSTOM_BYTES 2

/**
 * custom_mask holds a bit per (row, key), little-endian in each byte; each request starts on a byte. It is
 * FlashInfer's packed custom mask.
 */
#define FOLIO_MASK_CUSTOM_BITS 3

/**
 * Requests whose element of causal_requests is not 0 are causal, the others full.
 */
#define FOLIO_MASK_CAUSAL_BY_REQUEST 4

/**
 * Multi-item scoring (FlashInfer): the keys before item_starts are a prefix, the others items one after the other. The row at
 * position p sees key j iff `j <= p && (j < item_starts[request] || p - j <= item_positions[request, p - item_starts])`.
 * On CUDA devices it is for handles with FOLIO_PLAN_MASK_ITEMS.
 */
#define FOLIO_MASK_ITEMS 5

/**
 * Tensors and parameters of one attention call; one plan serves many, with different values.
 *
 * For query row i (position p = kv_len - qo_len + i) and key j:
 *
 * ```text
 * s = cap(q·k · sm_scale · q_scale · q_scales[kv_head] · k_scale · k_scales[kv_head]) + alibi(j - p) + score_bias[row, j]
 * around(p, j) = p - j <= window_left and j - p <= window_right and chunk(p) - chunk(j) <= attention_chunk_look_back
 * seen iff (mask(i, j) and around(p, j)) or mm_prefix(p, j)
 * o = Σ softmax(s)_j v_j · v_scale · v_scales[kv_head],  divided by o_scale · o_scales[0] and saturated for fp8
 * lse = log(Σ e^s [+ e^sink])
 * ```
 *
 * with chunk(x) = floor(x / attention_chunk_size), and cap(s) = logits_soft_cap · tanh(s / logits_soft_cap), and a sink as one more logit without a
 * value. A row that sees nothing has o = 0 and lse = -inf (its sink, with sinks). Memory that no row sees may
 * hold anything, NaN included.
 *
 * The rules are those of FlashInfer's, vLLM's and SGLang's attention backends, with their differences
 * resolved. Soft caps are Gemma 2's, ALiBi that of Press et al. (2022), its square-root form and the prefix
 * ranges vLLM's, as is the bias of new keys, chunks those of Llama 4's local attention, sinks those of gpt-oss, the lse of parts that of FlashAttention-2.
 *
 * A scale or factor of 0 stands for its default, so 0 itself cannot be said.
 */
typedef struct folio_attention_args {
    /**
     * sizeof(folio_attention_args).
     */
    uint32_t struct_size;
    /**
     * FOLIO_RUN_…
     */
    uint32_t flags;
    /**
     * Queries: `[num_tokens or more, num_qo_heads, head_dim_qk]` of q_dtype.
     */
    const folio_tensor *q;
    /**
     * Keys: paged `[num_pages, page_size, num_kv_heads, head_dim_qk]` (NHD), `[num_pages, num_kv_heads,
     * page_size, head_dim_qk]` (HND), `[num_slots, num_kv_heads, head_dim_qk]` (page_size 1); ragged
     * `[nnz_kv or more, num_kv_heads, head_dim_qk]`. Of kv_dtype; uint8 stands for fp8. num_pages is above
     * every page id in use, and 1 or more where page ids or lengths are on a device. With k_rope, rows are shorter.
     */
    const folio_tensor *k;
    /**
     * Values: as k, with head_dim_vo and strides of its own.
     */
    const folio_tensor *v;
    /**
     * Output: `[num_tokens or more, num_qo_heads, head_dim_vo]` of o_dtype; uint8 stands for fp8. It may
     * not overlap another tensor, q neither.
     */
    const folio_tensor *o;
    /**
     * Output: `[num_tokens or more, num_qo_heads]` float32, float16 or bfloat16 of any strides, or NULL. It is computed in
     * float32 and rounded once; what is beyond the type becomes infinite.
     */
    const folio_tensor *lse;
    /**
     * `[1]`, `[num_kv_heads]` or `[batch_size, num_kv_heads]` float32, or NULL: further factors of k, read by the run
     * where it computes. Contiguous, but strides of 0 may expand one row, or one number, to the last of these shapes.
     * Where the desc's kv_format has scales of its own: those, in the shape that FOLIO_KV_FORMAT_… says.
     */
    const folio_tensor *k_scales;
    /**
     * As k_scales, for v.
     */
    const folio_tensor *v_scales;
    /**
     * `[elements or more]` uint8 or bool, for the custom mask modes: as many bytes as the mode says for the
     * batch. NULL otherwise.
     */
    const folio_tensor *custom_mask;
    /**
     * `[batch_size, num_ranges, 2]` int32 or NULL: a row and a key at positions inside the same
     * inclusive range see each other whatever mask and window say. start >= end: unused.
     */
    const folio_tensor *mm_prefix_ranges;
    /**
     * `[num_qo_heads]` or `[batch_size, num_qo_heads]` float32, or NULL: adds slope · (j - p), or -slope · sqrt(p - j) for past keys.
     */
    const folio_tensor *alibi_slopes;
    /**
     * `[num_qo_heads]` float32 or NULL: a logit per head, in base e, that no scale and no cap changes.
     */
    const folio_tensor *sinks;
    /**
     * Factor of q·k. 0: 1 / sqrt(head_dim_qk). sm_scale · q_scale · k_scale is within ±2^60: beyond it
     * logits leave float32.
     */
    float sm_scale;
    /**
     * Factor of q, which holds the queries divided by it. 0: 1.
     */
    float q_scale;
    /**
     * Factor of k, for all heads: an fp8 cache holds k / k_scale. 0: 1.
     */
    float k_scale;
    /**
     * Factor of v, for all heads, as k_scale; within ±2^60. 0: 1.
     */
    float v_scale;
    /**
     * Divisor of o, 2^-60 to 2^60; only for fp8 outputs. 0: 1.
     */
    float o_scale;
    /**
     * Logits are capped to ± this, 2^-60 to 2^60. 0: off.
     */
    float logits_soft_cap;
    /**
     * FOLIO_MASK_…
     */
    int32_t mask_mode;
    /**
     * Keys before the row's own position that it sees; -1: unlimited. Needs FOLIO_RUN_WINDOW.
     */
    int32_t window_left;
    /**
     * Keys after the row's own position that it sees; -1: unlimited. Needs FOLIO_RUN_WINDOW.
     */
    int32_t window_right;
    /**
     * 0.
     */
    uint32_t reserved;
    /**
     * NULL where k has whole keys. Otherwise the last elements of the keys, in a tensor of one head that all KV heads
     * share (the rotary part of DeepSeek-V2's MLA in its multi-head form): as k without the dimension of heads, or
     * with one of extent 1, and with rope elements per row and strides of its own; of kv_dtype. k then has rows of
     * head_dim_qk - rope elements, a multiple of 8. Paged `[num_pages, page_size, rope]` (both layouts),
     * `[num_slots, rope]` (page_size 1); ragged `[nnz_kv or more, rope]`. Prefill handles only. Scales of k are of both
     * parts.
     */
    const folio_tensor *k_rope;
    /**
     * `[batch_size + 1]` int64, for the custom mask modes: where each request's mask starts in custom_mask, in bytes. The
     * last element is not read, and neither are those of requests without rows. NULL: the masks lie one after the other.
     * On a device, what a mask lacks is hidden.
     */
    const folio_tensor *custom_mask_indptr;
    /**
     * `[batch_size]` uint8 or bool, for FOLIO_MASK_CAUSAL_BY_REQUEST. NULL otherwise.
     */
    const folio_tensor *causal_requests;
    /**
     * Keys of a chunk of chunked local attention; 0: off. Chunks count from a request's first key.
     */
    uint32_t attention_chunk_size;
    /**
     * Chunks before its own that a row sees.
     */
    uint32_t attention_chunk_look_back;
    /**
     * `[num_kv_heads, head_dim_qk]` float32, for FOLIO_KV_FORMAT_CHANNEL_ZERO_POINTS. NULL otherwise.
     */
    const folio_tensor *k_zero_points;
    /**
     * `[num_kv_heads, head_dim_vo]` float32, for FOLIO_KV_FORMAT_CHANNEL_ZERO_POINTS. NULL otherwise.
     */
    const folio_tensor *v_zero_points;
    /**
     * Where a prefill desc has a new_kv_dtype, else NULL: the keys of the query rows, `[num_tokens or more, num_kv_heads,
     * head_dim_qk]` of that type, in the order of the rows; any strides but a unit last one. They follow the request's
     * keys in the cache, which are all that the batch's lengths and page table tell of, and kv_len above counts both. So
     * positions, masks with their columns, windows, chunks, ranges and biases are those of a cache that had the new keys at
     * the end. k_scale, v_scale, k_scales, v_scales and zero points are the cache's: new keys and values are as they are.
     * Not with k_rope.
     */
    const folio_tensor *k_new;
    /**
     * As k_new, for values: `[num_tokens or more, num_kv_heads, head_dim_vo]`.
     */
    const folio_tensor *v_new;
    /**
     * `[1]`, `[num_kv_heads]` or `[batch_size, num_kv_heads]` float32, or NULL: further factors of q, as k_scales. On a
     * device they are read when the run gets there, so they may change under a captured graph, as k_scales and v_scales
     * may. On CUDA this field and o_scales cost one more small launch. No number is checked.
     */
    const folio_tensor *q_scales;
    /**
     * `[1]` float32, or NULL: a further divisor of o; only for fp8 outputs. As q_scales.
     */
    const folio_tensor *o_scales;
    /**
     * `[batch_size]` int64, for FOLIO_MASK_ITEMS: the key that a request's first item begins with (FlashInfer's prefix_len_ptr).
     * NULL otherwise.
     */
    const folio_tensor *item_starts;
    /**
     * `[batch_size, columns]` int32, for FOLIO_MASK_ITEMS: the positions within their items of the tokens from item_starts on,
     * the delimiter before an item at 0 (FlashInfer's token_pos_in_items_ptr). A row without a column sees the prefix
     * alone. NULL otherwise.
     */
    const folio_tensor *item_positions;
    /**
     * `[rows, columns]` for all heads or `[num_qo_heads or 1, rows, columns]`, float32, float16 or bfloat16 of any strides,
     * or NULL: adds its elements to the logits of keys that a row sees, after the cap and beside ALiBi, in base e. Rows are
     * those of q, or with FOLIO_RUN_BIAS_REQUEST_ROWS a request's; columns are a request's keys, or with
     * FOLIO_RUN_BIAS_NEW_KEYS its last qo_len ones. There are as many as the batch has, or more, in each dimension; of lengths on
     * a device, what the tensor lacks adds nothing. -inf hides a key. Elements of keys that a row does not see
     * may be anything. Others may be neither NaN nor +inf, which give NaN.
     */
    const folio_tensor *score_bias;
} folio_attention_args;

/**
 * @defgroup decode Decode
 * A few query rows per request over a paged cache.
 * @{
 */

/**
 * Decode attention: FlashInfer's BatchDecodeWithPagedKVCacheWrapper. One handle serves every batch
 * within its desc, and one plan every layer of a step. Multi-token decode (speculative verify) is
 * decode with max_qo_len above 1, its tree given as a custom mask.
 */
typedef struct folio_decode folio_decode;

/**
 * What a decode handle is made from: a few query rows per request over a paged cache.
 *
 * Types: q float32, float16 or bfloat16; the cache the same type, or float8_e4m3 / float8_e5m2; o the
 * type of q, float32, or fp8. Over an fp8 cache q may be fp8 as well, of either type, and then o is of any of these types.
 * num_qo_heads is a multiple of num_kv_heads; query head h reads KV head
 * h / (num_qo_heads / num_kv_heads). Head dimensions are multiples of 8 up to 512, on the
 * CPU head_dim_qk up to 576; on CUDA up to 256 with another kv_format than plain rows.
 * The maxima bound every later batch and fix the workspace.
 */
typedef struct folio_decode_desc {
    /**
     * sizeof(folio_decode_desc).
     */
    uint32_t struct_size;
    /**
     * FOLIO_PLAN_…
     */
    uint32_t flags;
    /**
     * Type of q.
     */
    folio_dtype q_dtype;
    /**
     * Type of the cache; all zero: as q, or the default of kv_format.
     */
    folio_dtype kv_dtype;
    /**
     * Type of o; all zero: as q.
     */
    folio_dtype o_dtype;
    /**
     * FOLIO_LAYOUT_NHD or FOLIO_LAYOUT_HND.
     */
    int32_t kv_layout;
    /**
     * Query (and output) heads.
     */
    uint32_t num_qo_heads;
    /**
     * KV heads.
     */
    uint32_t num_kv_heads;
    /**
     * Elements of a q or k row.
     */
    uint32_t head_dim_qk;
    /**
     * Elements of a v or o row; 0: head_dim_qk.
     */
    uint32_t head_dim_vo;
    /**
     * Tokens per page, 1 or more.
     */
    uint32_t page_size;
    /**
     * Most requests of a batch.
     */
    uint32_t max_batch_size;
    /**
     * Most query rows of a request; 0: 1.
     */
    uint32_t max_qo_len;
    /**
     * Most keys of a request.
     */
    uint32_t max_kv_len;
    /**
     * Most pages of a batch, over all requests; 0: max_batch_size times the pages of max_kv_len.
     */
    uint64_t max_num_pages;
    /**
     * FOLIO_KV_FORMAT_…: how rows of the cache are stored. Other formats than FOLIO_KV_FORMAT_PLAIN are for paged caches; on
     * CUDA q has 16 bits there.
     */
    int32_t kv_format;
    /**
     * 0.
     */
    uint32_t reserved;
} folio_decode_desc;

/**
 * Picks the code for a problem; slow, once. Also the capability query: UNSUPPORTED says why not.
 *
 * On CUDA it loads modules and may compile a kernel; it is no call for a capture.
 *
 * @param ctx the device
 * @param desc types, shapes and maxima
 * @param out receives the handle; end it with its _destroy
 * @param err report of a failure, or NULL
 * @return FOLIO_OK, or INVALID_ARGUMENT, INVALID_STRUCT_SIZE, UNKNOWN_FIELD, DTYPE, UNSUPPORTED, COMPILE,
 *         OUT_OF_MEMORY, DRIVER
 *
 * # Safety
 * `ctx` is alive, `desc` points to as many bytes as its struct_size says, `out` to a pointer. Any
 * thread, concurrently with other uses of `ctx`.
 */
folio_status folio_decode_create(const folio_context *ctx,
                                 const folio_decode_desc *desc,
                                 folio_decode **out,
                                 folio_error *err);

/**
 * The memory that every plan within the desc can do with.
 *
 * @param handle the handle
 * @param out struct_size set by the caller; receives the sizes
 * @param err report of a failure, or NULL
 * @return FOLIO_OK, or INVALID_ARGUMENT, INVALID_STRUCT_SIZE
 *
 * # Safety
 * `handle` is alive, `out` points to as many bytes as its struct_size says. Concurrent use is fine.
 */
folio_status folio_decode_workspace(const folio_decode *handle,
                                    folio_workspace_info *out,
                                    folio_error *err);

/**
 * Takes over a step's batch: microseconds, once per step. On failure the previous plan stays in force.
 *
 * Lengths on the host: Folio writes the plan to one of three parts of the workspace's host memory, in turn,
 * and enqueues its copy to the device. It waits in one case only: where the copy out of that part, which the
 * third plan before this one enqueued, has not run yet. A host may thus be three steps ahead of the device.
 * Such a plan cannot be captured.
 *
 * Lengths on the device: Folio enqueues one kernel and never waits. With FOLIO_PLAN_GRAPH the call can be
 * captured.
 *
 * On the CPU the plan is complete on return.
 *
 * @param handle the handle
 * @param batch lengths and page table; prefill requires qo_indptr
 * @param ws memory as _workspace asks; NULL where it asks for none
 * @param stream CUDA: the stream that later runs use or wait for; CPU: NULL
 * @param err report of a failure, or NULL
 * @return FOLIO_OK, or INVALID_ARGUMENT, INVALID_STRUCT_SIZE, UNKNOWN_FIELD, SHAPE, DTYPE, DEVICE_MISMATCH,
 *         WORKSPACE_TOO_SMALL, CAPTURE, UNSUPPORTED, OUT_OF_MEMORY, DRIVER
 *
 * # Safety
 * `handle` is alive and in no other call; the structs are readable, and the tensors' memory too.
 */
folio_status folio_decode_plan(folio_decode *handle,
                               const folio_batch *batch,
                               const folio_workspace *ws,
                               void *stream,
                               folio_error *err);

/**
 * Computes attention for the planned batch: once per layer. Allocates nothing, synchronises nothing.
 * On the CPU the outputs are complete on return; on CUDA they are when the stream gets there.
 *
 * @param handle the handle
 * @param args tensors and parameters
 * @param stream CUDA stream, or NULL on the CPU
 * @param err report of a failure, or NULL
 * @return FOLIO_OK; NOT_PLANNED, INVALID_ARGUMENT, INVALID_STRUCT_SIZE, UNKNOWN_FIELD, SHAPE, DTYPE,
 *         DEVICE_MISMATCH, CAPTURE or UNSUPPORTED, and then no output was touched; or DRIVER
 *
 * # Safety
 * `handle` is alive and not being planned; the structs are readable, and the tensors' memory as the
 * fields say. Concurrent runs are fine with different outputs; on CUDA on
 * one stream, or on streams that the host orders: parts of split rows meet in the workspace.
 */
folio_status folio_decode_run(const folio_decode *handle,
                              const folio_attention_args *args,
                              void *stream,
                              folio_error *err);

/**
 * Name of the kernel that create picked, e.g. "cpu/avx512-bf16"; NULL for a NULL handle. On the CPU it names the
 * instruction set, whatever the types of the handle are, and on CUDA what the kernel was compiled for. It lives as long
 * as the handle.
 *
 * Plans are cut for this kernel. A run that asks for a feature it lacks, as custom masks on Hopper, takes a more
 * general one; of the first run with each such feature, a message of level FOLIO_LOG_INFO tells.
 *
 * @param handle the handle, or NULL
 *
 * # Safety
 * `handle` is NULL or alive. Concurrent use is fine.
 */
const char *folio_decode_kernel(const folio_decode *handle);

/**
 * Ends a handle without waiting; NULL is fine. On CUDA its runs may still be on the device, and graphs that
 * captured them may be replayed, while the workspace and the context stay.
 *
 * @param handle the handle, or NULL
 *
 * # Safety
 * `handle` is NULL or came from its _create and is not used afterwards.
 */
void folio_decode_destroy(folio_decode *handle);

/** @} */

/**
 * @defgroup prefill Prefill
 * Any number of query rows per request, over a paged cache or ragged K and V.
 * @{
 */

/**
 * Prefill attention: FlashInfer's BatchPrefillWithPagedKVCacheWrapper and
 * BatchPrefillWithRaggedKVCacheWrapper. One handle serves every batch within its desc, and one plan
 * every layer of a step.
 */
typedef struct folio_prefill folio_prefill;

/**
 * What a prefill handle is made from: any number of query rows per request, over a paged cache or over
 * ragged K and V. Mixed batches (prefill, chunked prefill, decode, speculative verify) are one batch.
 * Types, heads and dimensions as in folio_decode_desc.
 */
typedef struct folio_prefill_desc {
    /**
     * sizeof(folio_prefill_desc).
     */
    uint32_t struct_size;
    /**
     * FOLIO_PLAN_…
     */
    uint32_t flags;
    /**
     * Type of q.
     */
    folio_dtype q_dtype;
    /**
     * Type of k and v; all zero: as q, or the default of kv_format.
     */
    folio_dtype kv_dtype;
    /**
     * Type of o; all zero: as q.
     */
    folio_dtype o_dtype;
    /**
     * FOLIO_LAYOUT_NHD or FOLIO_LAYOUT_HND; 0 for ragged.
     */
    int32_t kv_layout;
    /**
     * Query (and output) heads.
     */
    uint32_t num_qo_heads;
    /**
     * KV heads.
     */
    uint32_t num_kv_heads;
    /**
     * Elements of a q or k row.
     */
    uint32_t head_dim_qk;
    /**
     * Elements of a v or o row; 0: head_dim_qk.
     */
    uint32_t head_dim_vo;
    /**
     * FOLIO_KV_PAGED or FOLIO_KV_RAGGED.
     */
    int32_t kv_storage;
    /**
     * Tokens per page, 1 or more; 0 for ragged.
     */
    uint32_t page_size;
    /**
     * Most requests of a batch.
     */
    uint32_t max_batch_size;
    /**
     * Most query rows of a batch, over all requests.
     */
    uint32_t max_num_tokens;
    /**
     * Most query rows of a request; 0: max_num_tokens.
     */
    uint32_t max_qo_len;
    /**
     * Most keys of a request, those beside the cache included.
     */
    uint32_t max_kv_len;
    /**
     * Most pages of a batch, over all requests; 0: max_batch_size times the pages of max_kv_len.
     */
    uint64_t max_num_pages;
    /**
     * FOLIO_KV_FORMAT_…: how rows of the cache are stored. Other formats than FOLIO_KV_FORMAT_PLAIN are for paged caches; on
     * CUDA q has 16 bits there.
     */
    int32_t kv_format;
    /**
     * Type of k_new and v_new, that of q or fp8; all zero: there are none. With it the keys and values of the query rows are
     * beside the paged cache, in every run of the handle: see folio_attention_args.k_new.
     */
    folio_dtype new_kv_dtype;
} folio_prefill_desc;

/**
 * Picks the code for a problem.
 *
 * @copydetails folio_decode_create
 *
 * # Safety
 * As folio_decode_create.
 */
folio_status folio_prefill_create(const folio_context *ctx,
                                  const folio_prefill_desc *desc,
                                  folio_prefill **out,
                                  folio_error *err);

/**
 * The memory that every plan within the desc can do with.
 *
 * @copydetails folio_decode_workspace
 *
 * # Safety
 * As folio_decode_workspace.
 */
folio_status folio_prefill_workspace(const folio_prefill *handle,
                                     folio_workspace_info *out,
                                     folio_error *err);

/**
 * Takes over a step's batch.
 *
 * @copydetails folio_decode_plan
 *
 * # Safety
 * As folio_decode_plan.
 */
folio_status folio_prefill_plan(folio_prefill *handle,
                                const folio_batch *batch,
                                const folio_workspace *ws,
                                void *stream,
                                folio_error *err);

/**
 * Computes attention for the planned batch.
 *
 * @copydetails folio_decode_run
 *
 * # Safety
 * As folio_decode_run.
 */
folio_status folio_prefill_run(const folio_prefill *handle,
                               const folio_attention_args *args,
                               void *stream,
                               folio_error *err);

/**
 * Name of the kernel that create picked.
 *
 * @copydetails folio_decode_kernel
 *
 * # Safety
 * As folio_decode_kernel.
 */
const char *folio_prefill_kernel(const folio_prefill *handle);

/**
 * Ends a handle.
 *
 * @copydetails folio_decode_destroy
 *
 * # Safety
 * As folio_decode_destroy.
 */
void folio_prefill_destroy(folio_prefill *handle);

/** @} */

/**
 * @defgroup cascade Cascades
 * Batches whose requests share their first keys: a system prompt, a document, the parent of beams. Shared keys are read
 * once.
 * @{
 */

/**
 * Attention over batches whose requests share prefixes: FlashInfer's MultiLevelCascadeAttentionWrapper, vLLM's cascade
 * attention. Shared keys are read once for all rows that see them, and the parts of every row are put together by one
 * kernel. Results are those of folio_prefill on the same batch, up to rounding.
 *
 * A plan shares what pays and leaves the rest to the requests. Runs with a window to the left, chunks, ALiBi or a custom
 * mask of all keys depend on positions, which rows of several requests do not have in common: they read the keys request
 * by request. With FOLIO_PLAN_GRAPH, runs without them always take the kernel for shared keys, also where nothing pays: steps
 * that share nothing are faster with folio_decode. But where max_batch_size requests of max_kv_len keys that share two thirds of
 * them would not pay, no run shares, and runs are those of folio_decode: so make handles of graphs for no longer requests than
 * they get. With FOLIO_PLAN_BATCH_INVARIANT nothing is shared, since what a request shares depends on the others. One handle
 * serves every batch within its desc, and one plan every layer of a step.
 */
typedef struct folio_cascade folio_cascade;

/**
 * What a cascade handle is made from: any number of query rows per request, over a paged cache, where neighbouring
 * requests may have their first pages in common. Types, heads and dimensions as in folio_decode_desc.
 */
typedef struct folio_cascade_desc {
    /**
     * sizeof(folio_cascade_desc).
     */
    uint32_t struct_size;
    /**
     * FOLIO_PLAN_…
     */
    uint32_t flags;
    /**
     * Type of q.
     */
    folio_dtype q_dtype;
    /**
     * Type of k and v; all zero: as q, or the default of kv_format.
     */
    folio_dtype kv_dtype;
    /**
     * Type of o; all zero: as q.
     */
    folio_dtype o_dtype;
    /**
     * FOLIO_LAYOUT_NHD or FOLIO_LAYOUT_HND.
     */
    int32_t kv_layout;
    /**
     * Query (and output) heads.
     */
    uint32_t num_qo_heads;
    /**
     * KV heads.
     */
    uint32_t num_kv_heads;
    /**
     * Elements of a q or k row.
     */
    uint32_t head_dim_qk;
    /**
     * Elements of a v or o row; 0: head_dim_qk.
     */
    uint32_t head_dim_vo;
    /**
     * Tokens per page, 1 or more.
     */
    uint32_t page_size;
    /**
     * Most requests of a batch.
     */
    uint32_t max_batch_size;
    /**
     * Most query rows of a batch, over all requests.
     */
    uint32_t max_num_tokens;
    /**
     * Most query rows of a request; 0: max_num_tokens.
     */
    uint32_t max_qo_len;
    /**
     * Most keys of a request, shared ones included.
     */
    uint32_t max_kv_len;
    /**
     * Most prefixes that are shared one within the other, up to 16; 0: 1. Deeper ones are left to the requests.
     */
    uint32_t max_shared_levels;
    /**
     * Most page-table entries of a batch, over all requests, where shared pages count for each of them; 0:
     * max_batch_size times the pages of max_kv_len.
     */
    uint64_t max_num_pages;
    /**
     * FOLIO_KV_FORMAT_…: how rows of the cache are stored. Other formats than FOLIO_KV_FORMAT_PLAIN are for paged caches; on
     * CUDA q has 16 bits there.
     */
    int32_t kv_format;
    /**
     * 0.
     */
    uint32_t reserved;
} folio_cascade_desc;

/**
 * What requests of a batch share. Every prefix is the first keys of some neighbouring requests, which have them in the
 * same pages. Prefixes may lie one within the other, as the nodes of a tree: the wider one, with fewer keys, comes
 * first. Arrays are on the host, and only read during the call.
 *
 * This is a promise of the caller's, which changes the time and not the result: keys that a request does not have, or
 * that are its new tokens, are not shared whatever is stated. Where the pages are not the same ones, the results are
 * those of the first request's pages.
 */
typedef struct folio_shared_prefixes {
    /**
     * sizeof(folio_shared_prefixes).
     */
    uint32_t struct_size;
    /**
     * 0.
     */
    uint32_t flags;
    /**
     * First keys that all requests share (vLLM's common_prefix_len); 0 together with num_prefixes.
     */
    uint32_t common_prefix_len;
    /**
     * Prefixes in the arrays.
     */
    uint32_t num_prefixes;
    /**
     * `[num_prefixes]` first request of each; these never fall.
     */
    const int32_t *request_begin;
    /**
     * `[num_prefixes]` the request behind its last one.
     */
    const int32_t *request_end;
    /**
     * `[num_prefixes]` its keys.
     */
    const int32_t *kv_len;
} folio_shared_prefixes;

/**
 * Which neighbouring requests of a batch have their first pages in common.
 */
typedef struct folio_find_shared_prefixes_args {
    /**
     * sizeof(folio_find_shared_prefixes_args).
     */
    uint32_t struct_size;
    /**
     * 0.
     */
    uint32_t flags;
    /**
     * Tokens per page, 1 or more.
     */
    uint32_t page_size;
    /**
     * Prefixes that the arrays have room for; one less than there are requests is always enough.
     */
    uint32_t capacity;
    /**
     * Lengths and page table, all on the host.
     */
    const folio_batch *batch;
    /**
     * Output: `[capacity]`, as in folio_shared_prefixes.
     */
    int32_t *request_begin;
    /**
     * Output: `[capacity]`
     */
    int32_t *request_end;
    /**
     * Output: `[capacity]`
     */
    int32_t *kv_len;
    /**
     * Output: the number of prefixes.
     */
    uint32_t *num_prefixes;
} folio_find_shared_prefixes_args;

/**
 * Picks the code for a problem.
 *
 * @copydetails folio_decode_create
 *
 * # Safety
 * As folio_decode_create.
 */
folio_status folio_cascade_create(const folio_context *ctx,
                                  const folio_cascade_desc *desc,
                                  folio_cascade **out,
                                  folio_error *err);

/**
 * The memory that every plan within the desc can do with.
 *
 * @copydetails folio_decode_workspace
 *
 * # Safety
 * As folio_decode_workspace.
 */
folio_status folio_cascade_workspace(const folio_cascade *handle,
                                     folio_workspace_info *out,
                                     folio_error *err);

/**
 * Takes over a step's batch, whose page table has shared pages in the rows of every request that has them, and what its
 * requests share. Lengths may be on the device, where prefixes end at the last key that all of their requests have: what was
 * stated bounds that. A plan that was captured keeps its prefixes.
 *
 * @param prefixes what requests share; NULL: nothing
 *
 * @copydetails folio_decode_plan
 *
 * # Safety
 * As folio_decode_plan; `prefixes` is NULL or as its fields say.
 */
folio_status folio_cascade_plan(folio_cascade *handle,
                                const folio_batch *batch,
                                const folio_shared_prefixes *prefixes,
                                const folio_workspace *ws,
                                void *stream,
                                folio_error *err);

/**
 * Computes attention for the planned batch.
 *
 * @copydetails folio_decode_run
 *
 * # Safety
 * As folio_decode_run.
 */
folio_status folio_cascade_run(const folio_cascade *handle,
                               const folio_attention_args *args,
                               void *stream,
                               folio_error *err);

/**
 * Whether the current plan shares keys: some prefix pays.
 *
 * @param handle the handle
 * @param out receives 1 or 0
 * @param err report of a failure, or NULL
 * @return FOLIO_OK, INVALID_ARGUMENT or NOT_PLANNED
 *
 * # Safety
 * `handle` as for folio_cascade_run; `out` is NULL or writable.
 */
folio_status folio_cascade_shares(const folio_cascade *handle,
                                  uint32_t *out,
                                  folio_error *err);

/**
 * Name of the kernel that create picked for shared keys.
 *
 * @copydetails folio_decode_kernel
 *
 * # Safety
 * As folio_decode_kernel.
 */
const char *folio_cascade_kernel(const folio_cascade *handle);

/**
 * Ends a handle.
 *
 * @copydetails folio_decode_destroy
 *
 * # Safety
 * As folio_decode_destroy.
 */
void folio_cascade_destroy(folio_cascade *handle);

/**
 * Finds what neighbouring requests of a batch share, by their page tables: every set of requests with first pages in
 * common that no larger set has, in the order that folio_cascade_plan takes. Whole pages count. An engine that sorts its
 * batch by prefix finds all of them so.
 *
 * @param args batch and outputs
 * @param err report of a failure, or NULL
 * @return FOLIO_OK, or what is wrong with the batch, or OUT_OF_MEMORY; then nothing was written
 *
 * # Safety
 * The struct and its arrays are as the fields say; the outputs overlap nothing. Any thread, any time.
 */
folio_status folio_find_shared_prefixes(const folio_find_shared_prefixes_args *args,
                                        folio_error *err);

/** @} */

/**
 * @defgroup mla Multi-head latent attention
 * Absorbed MLA over a paged cache of latent records, with any number of query rows per request.
 * @{
 */

/**
 * Records are elements of kv_dtype one after another: kv_lora_rank latent ones, then qk_rope_head_dim rotary ones.
 */
#define FOLIO_MLA_CACHE_PLAIN 0

/**
 * Records are vLLM's and FlashMLA's fp8_ds_mla of 656 bytes: 512 latent elements of float8_e4m3, four float32 scales,
 * one for each 128 of them, and 64 rotary elements of bfloat16.
 */
#define FOLIO_MLA_CACHE_FP8_DS_MLA 1

/**
 * Multi-head latent attention in its absorbed form: FlashMLA's flash_mla_with_kvcache and FlashInfer's
 * BatchMLAPagedAttentionWrapper. One handle serves every batch within its desc, and one plan every layer of a step.
 */
typedef struct folio_mla folio_mla;

/**
 * What an MLA handle is made from: the absorbed form of DeepSeek-V2's multi-head latent attention. All heads read one
 * record per token: its latent part is key and value, its rotary part is key only.
 *
 * Types: q float32, float16 or bfloat16; the cache the same type, float8_e4m3, float8_e5m2 or fp8_ds_mla; o the type
 * of q. Or q float8_e4m3 or float8_e5m2, as vLLM quantises it: the cache either of these, o float16 or bfloat16; products
 * and weights are as exact as beside queries of 16 bits. On CUDA devices a launch then makes rows of o's type of the
 * queries, for which the workspace has 2 bytes for each element of those of the largest batch.
 *
 * The maxima bound every later batch and fix the workspace. One plan takes any mixture of decodes, verified drafts and
 * prompts.
 *
 * Sparse attention (DeepSeek-V3.2), where every query token sees a list of tokens of its own: page_size 1, each query token a
 * request of one row, whose row of block_table lists slots, and whose kv_len counts them. On CUDA devices one plan serves
 * the lists of all layers, if these are int32, on the device, and come to the same tensor.
 */
typedef struct folio_mla_desc {
    /**
     * sizeof(folio_mla_desc).
     */
    uint32_t struct_size;
    /**
     * FOLIO_PLAN_…
     */
    uint32_t flags;
    /**
     * Type of q.
     */
    folio_dtype q_dtype;
    /**
     * Type of the cache; all zero: as q. With FOLIO_MLA_CACHE_FP8_DS_MLA: all zero or float8_e4m3.
     */
    folio_dtype kv_dtype;
    /**
     * Type of o, which is that of q, or beside fp8 one of 16 bits; all zero: as q.
     */
    folio_dtype o_dtype;
    /**
     * FOLIO_MLA_CACHE_…
     */
    int32_t cache_format;
    /**
     * Query (and output) heads, 1 or more.
     */
    uint32_t num_heads;
    /**
     * Elements of a latent row, and of a row of o: a multiple of 8 up to 512. DeepSeek-V2 and V3: 512.
     */
    uint32_t kv_lora_rank;
    /**
     * Elements of a rotary row: 0, or a multiple of 8 up to 64. DeepSeek-V2 and V3: 64.
     */
    uint32_t qk_rope_head_dim;
    /**
     * Tokens per page, 1 or more.
     */
    uint32_t page_size;
    /**
     * Most requests of a batch.
     */
    uint32_t max_batch_size;
    /**
     * Most query rows of a request; 0: 1.
     */
    uint32_t max_qo_len;
    /**
     * Most query rows of a batch, over all requests; 0: max_batch_size times max_qo_len.
     */
    uint32_t max_num_tokens;
    /**
     * Most keys of a request.
     */
    uint32_t max_kv_len;
    /**
     * 0.
     */
    uint32_t reserved;
    /**
     * Most pages of a batch, over all requests; 0: max_batch_size times the pages of max_kv_len.
     */
    uint64_t max_num_pages;
} folio_mla_desc;

/**
 * Tensors and parameters of one MLA call; one plan serves many, with different values.
 *
 * For query row i of head h and the record (c, r) of key j, which holds values divided by k_scale:
 *
 * ```text
 * s = (q_latent·c + q_rope·r) · sm_scale · q_scale · k_scale
 * seen iff mask_mode is FOLIO_MASK_FULL or j <= kv_len - qo_len + i
 * o = Σ softmax(s)_j c_j · k_scale
 * lse = log(Σ e^s)
 * ```
 *
 * A row that sees nothing has o = 0 and lse = -inf. Memory that no row sees may hold anything, NaN included.
 *
 * This is the data-movement friendly form of vLLM's MLA backends, and what FlashMLA and FlashInfer's
 * BatchMLAPagedAttentionWrapper compute: q_latent is the query's part without rotation times W_UK, and the output
 * times W_UV is that of the heads (DeepSeek-V2, section 2.1).
 */
typedef struct folio_mla_args {
    /**
     * sizeof(folio_mla_args).
     */
    uint32_t struct_size;
    /**
     * FOLIO_RUN_LSE_BASE_2 or 0.
     */
    uint32_t flags;
    /**
     * Absorbed queries: `[num_tokens or more, num_heads, kv_lora_rank]` of q_dtype.
     */
    const folio_tensor *q_latent;
    /**
     * Rotated queries: `[num_tokens or more, num_heads, qk_rope_head_dim]` of q_dtype, with strides of its own; NULL
     * iff qk_rope_head_dim is 0. Two views of one tensor of whole queries are read fastest.
     */
    const folio_tensor *q_rope;
    /**
     * The cache: `[num_pages, page_size, kv_lora_rank + qk_rope_head_dim]`, or `[num_slots, …]` with page_size 1, of
     * kv_dtype; uint8 stands for fp8. With kv_rope: the latent part, `[…, kv_lora_rank]`. fp8_ds_mla:
     * `[num_pages, page_size, 656]` uint8. num_pages is above every page id in use, and 1 or more where page ids or
     * lengths are on a device.
     */
    const folio_tensor *kv;
    /**
     * The rotary part of the cache, as kv with qk_rope_head_dim and strides of its own; NULL where kv holds whole
     * records.
     */
    const folio_tensor *kv_rope;
    /**
     * Output: `[num_tokens or more, num_heads, kv_lora_rank]` of o_dtype. It may not overlap another tensor.
     */
    const folio_tensor *o;
    /**
     * Output: `[num_tokens or more, num_heads]` float32, float16 or bfloat16 of any strides, or NULL, as that of
     * folio_attention_args.
     */
    const folio_tensor *lse;
    /**
     * Factor of q·k, not 0: that of the model's heads before absorption, 1 / sqrt(qk_nope_head_dim +
     * qk_rope_head_dim) and YaRN's mscale² where the model has it. It cannot be derived from the latent width.
     * sm_scale · q_scale · k_scale is within ±2^60.
     */
    float sm_scale;
    /**
     * Factor of q, which holds the queries divided by it. 0: 1.
     */
    float q_scale;
    /**
     * Factor of the cache, hence of logits and of o; within ±2^60. 0: 1.
     */
    float k_scale;
    /**
     * FOLIO_MASK_CAUSAL or FOLIO_MASK_FULL.
     */
    int32_t mask_mode;
} folio_mla_args;

/**
 * Picks the code for a problem.
 *
 * @copydetails folio_decode_create
 *
 * # Safety
 * As folio_decode_create.
 */
folio_status folio_mla_create(const folio_context *ctx,
                              const folio_mla_desc *desc,
                              folio_mla **out,
                              folio_error *err);

/**
 * The memory that every plan within the desc can do with.
 *
 * @copydetails folio_decode_workspace
 *
 * # Safety
 * As folio_decode_workspace.
 */
folio_status folio_mla_workspace(const folio_mla *handle,
                                 folio_workspace_info *out,
                                 folio_error *err);

/**
 * Takes over a step's batch. qo_indptr may be NULL, as for decode.
 *
 * @copydetails folio_decode_plan
 *
 * # Safety
 * As folio_decode_plan.
 */
folio_status folio_mla_plan(folio_mla *handle,
                            const folio_batch *batch,
                            const folio_workspace *ws,
                            void *stream,
                            folio_error *err);

/**
 * Computes attention for the planned batch.
 *
 * @copydetails folio_decode_run
 *
 * # Safety
 * As folio_decode_run.
 */
folio_status folio_mla_run(const folio_mla *handle,
                           const folio_mla_args *args,
                           void *stream,
                           folio_error *err);

/**
 * Name of the kernel that create picked.
 *
 * @copydetails folio_decode_kernel
 *
 * # Safety
 * As folio_decode_kernel.
 */
const char *folio_mla_kernel(const folio_mla *handle);

/**
 * Ends a handle.
 *
 * @copydetails folio_decode_destroy
 *
 * # Safety
 * As folio_decode_destroy.
 */
void folio_mla_destroy(folio_mla *handle);

/** @} */

/** @} */

/**
 * @defgroup append KV append
 * New tokens into a paged cache.
 * @{
 */

/**
 * New tokens for a paged cache: vLLM's reshape_and_cache_flash. The caches may not overlap key or value.
 */
typedef struct folio_kv_append_args {
    /**
     * sizeof(folio_kv_append_args).
     */
    uint32_t struct_size;
    /**
     * 0.
     */
    uint32_t flags;
    /**
     * `[num_tokens or more, num_kv_heads, head_dim_qk]` float32, float16 or bfloat16; a slice of a fused QKV
     * tensor will do.
     */
    const folio_tensor *key;
    /**
     * `[num_tokens or more, num_kv_heads, head_dim_vo]`, of key's type.
     */
    const folio_tensor *value;
    /**
     * Output: the key cache, in kv_layout: `[num_pages, page_size, num_kv_heads, head_dim_qk]` or
     * `[num_pages, num_kv_heads, page_size, head_dim_qk]`, or `[num_slots, num_kv_heads, head_dim_qk]`;
     * of key's type or fp8.
     */
    const folio_tensor *k_cache;
    /**
     * Output: the value cache, as k_cache with head_dim_vo and strides of its own.
     */
    const folio_tensor *v_cache;
    /**
     * `[num_tokens]` int32 or int64: page · page_size + offset; a negative slot skips the token. Its
     * length is the number of tokens. A slot beyond the cache is refused where it is on the host, and skips
     * the token where it is on a device.
     */
    const folio_tensor *slot_mapping;
    /**
     * `[1]` or `[num_kv_heads]` float32, or NULL; fp8 caches only. Of formats with scales of their own: those,
     * which the append writes where it computes them.
     */
    const folio_tensor *k_scales;
    /**
     * As k_scales, for values.
     */
    const folio_tensor *v_scales;
    /**
     * An fp8 cache gets `key / (k_scale · k_scales[head])`, rounded to nearest even, saturated. 0: 1.
     */
    float k_scale;
    /**
     * As k_scale. 0: 1.
     */
    float v_scale;
    /**
     * FOLIO_LAYOUT_NHD or FOLIO_LAYOUT_HND.
     */
    int32_t kv_layout;
    /**
     * What caches that are described as uint8 hold (an fp8 type, or one of kv_format); all zero: the tensors say it, and
     * uint8 is the first type that a kv_format other than FOLIO_KV_FORMAT_PLAIN has.
     */
    folio_dtype kv_dtype;
    /**
     * FOLIO_KV_FORMAT_…: how the rows of the caches are stored.
     */
    int32_t kv_format;
    /**
     * 0.
     */
    uint32_t reserved;
    /**
     * FOLIO_KV_FORMAT_CHANNEL_ZERO_POINTS: `[num_kv_heads, head_dim_qk]` float32. NULL otherwise.
     */
    const folio_tensor *k_zero_points;
    /**
     * FOLIO_KV_FORMAT_CHANNEL_ZERO_POINTS: `[num_kv_heads, head_dim_vo]` float32. NULL otherwise.
     */
    const folio_tensor *v_zero_points;
} folio_kv_append_args;

/**
 * Writes new tokens to a paged cache, quantising to fp8 where the cache is fp8.
 *
 * On CUDA the first call on a context with given types loads code and answers CAPTURE in a capture. Later ones
 * can be captured: they are one launch each. On the CPU the tokens are in the cache on return.
 *
 * @param ctx the device
 * @param args tensors and scales
 * @param stream CUDA stream, or NULL on the CPU
 * @param err report of a failure, or NULL
 * @return FOLIO_OK, or INVALID_ARGUMENT, INVALID_STRUCT_SIZE, UNKNOWN_FIELD, SHAPE, DTYPE, DEVICE_MISMATCH,
 *         CAPTURE, UNSUPPORTED, COMPILE, OUT_OF_MEMORY, DRIVER; then nothing was written
 *
 * # Safety
 * `ctx` is alive; the structs are readable, and the tensors' memory as the fields say. Concurrent use
 * is fine where no slot is written by two calls, or by two tokens of one call.
 */
folio_status folio_kv_append(const folio_context *ctx,
                             const folio_kv_append_args *args,
                             void *stream,
                             folio_error *err);

/** @} */

/**
 * @defgroup copy KV copy
 * Pages from one cache to another, or within one.
 * @{
 */

/**
 * Pages to be copied: vLLM's copy_blocks and swap_blocks. A page is what an index of the first dimension covers: bytes
 * that are copied as they are, whatever they hold (fp8, fp8_ds_mla records, scales). Within a page there are no gaps, and
 * its dimensions may be in any order (NHD, HND) that is the same in src and dst; pages may be any distance apart.
 *
 * src and dst may be one tensor, as for copy-on-write and defragmentation. Then no page may be the source of one pair
 * and the destination of another. No page may be the destination of two pairs. Pairs that break these rules are
 * refused where they are on the host; where they are on a device, it is not defined which of the pages is copied.
 *
 * On CUDA each of src and dst may be in page-locked host memory (FOLIO_DEVICE_CUDA_HOST): pages are swapped out and in
 * by the same kernel, which reaches them over the bus.
 */
typedef struct folio_kv_copy_args {
    /**
     * sizeof(folio_kv_copy_args).
     */
    uint32_t struct_size;
    /**
     * 0.
     */
    uint32_t flags;
    /**
     * `[num_src_pages, ...]` of any type: keys, or a cache that has one tensor.
     */
    const folio_tensor *k_src;
    /**
     * Output: `[num_dst_pages, ...]` of k_src's type; all but the first extent are k_src's.
     */
    const folio_tensor *k_dst;
    /**
     * Values, copied by the same pairs in the same launch; as many pages as k_src. NULL: none.
     */
    const folio_tensor *v_src;
    /**
     * Output: values, with as many pages as k_dst. NULL iff v_src is.
     */
    const folio_tensor *v_dst;
    /**
     * `[n, 2]` int32 or int64: a page of src, and the page of dst that becomes its copy. A pair with a negative number is
     * skipped. Pairs on the host are accepted by every context; they are read during the call, and a page beyond
     * src or dst is refused. Where they are on a device, such a pair is skipped.
     */
    const folio_tensor *page_pairs;
} folio_kv_copy_args;

/**
 * Copies pages of a cache.
 *
 * On CUDA it is one launch, for keys and values together. Pairs on the host travel in the kernel's parameters, 480 to a
 * launch: nothing is staged, and nothing waits. The first call on a context with pairs on the device, and the first
 * with pairs on the host, load code and answer CAPTURE in a capture. Later ones can be captured: a replay copies by the
 * pairs that the device's memory holds then, or by the host's pairs of the capture.
 * Memory in FOLIO_DEVICE_CUDA_HOST tensors is read and written in stream order: it must stay until then. On the CPU
 * the pages are copied on return.
 *
 * @param ctx the device
 * @param args tensors and pairs
 * @param stream CUDA stream, or NULL on the CPU
 * @param err report of a failure, or NULL
 * @return FOLIO_OK, or INVALID_ARGUMENT, INVALID_STRUCT_SIZE, UNKNOWN_FIELD, SHAPE, DTYPE, DEVICE_MISMATCH,
 *         CAPTURE, UNSUPPORTED, COMPILE, OUT_OF_MEMORY, DRIVER; then nothing was copied, but for launches before one
 *         that the driver refused
 *
 * # Safety
 * `ctx` is alive; the structs are readable, and the tensors' memory as the fields say. Concurrent use
 * is fine where no page is written by one call and read or written by another.
 */
folio_status folio_kv_copy(const folio_context *ctx,
                           const folio_kv_copy_args *args,
                           void *stream,
                           folio_error *err);

/** @} */

/**
 * @defgroup gather KV gather
 * Tokens of a paged cache to dense rows.
 * @{
 */

/**
 * Keys and values of many requests to be copied from a paged cache to dense rows, and converted: what folio_kv_append
 * wrote, read back. vLLM's cp_gather_cache and gather_and_maybe_dequant_cache do it for caches of MLA. Page ids are a
 * block_table, or kv_indptr and kv_indices.
 *
 * Lengths and page ids that are wrong are refused where they are on the host. Where they are on a device, rows whose
 * page or token does not exist are not written. The outputs may not overlap other tensors.
 */
typedef struct folio_kv_gather_args {
    /**
     * sizeof(folio_kv_gather_args).
     */
    uint32_t struct_size;
    /**
     * 0.
     */
    uint32_t flags;
    /**
     * Output: `[num_rows, num_kv_heads, head_dim_qk]` float32, float16 or bfloat16, whatever the caches' type.
     */
    const folio_tensor *key;
    /**
     * Output: `[num_rows, num_kv_heads, head_dim_vo]`, of key's type.
     */
    const folio_tensor *value;
    /**
     * The key cache, in kv_layout: `[num_pages, page_size, num_kv_heads, head_dim_qk]` or
     * `[num_pages, num_kv_heads, page_size, head_dim_qk]`, or `[num_slots, num_kv_heads, head_dim_qk]`; float32,
     * float16, bfloat16 or fp8.
     */
    const folio_tensor *k_cache;
    /**
     * The value cache, as k_cache with head_dim_vo and strides of its own.
     */
    const folio_tensor *v_cache;
    /**
     * `[batch_size + 1]` int32 or int64: request b gets rows `cu_seq_lens[b]` to `cu_seq_lens[b + 1]`, at most num_rows.
     * Rows of no request are left as they are.
     */
    const folio_tensor *cu_seq_lens;
    /**
     * `[batch_size]` int32 or int64: the token of request b that its first row gets; NULL: 0.
     */
    const folio_tensor *seq_starts;
    /**
     * `[batch_size, columns]` int32 or int64 page ids; rows may be strided. Entries of tokens that are not asked for
     * are not read.
     */
    const folio_tensor *block_table;
    /**
     * `[batch_size + 1]` int32 or int64: the page ids of request b begin at `kv_indices[kv_indptr[b]]`.
     */
    const folio_tensor *kv_indptr;
    /**
     * `[n]` int32 or int64 page ids.
     */
    const folio_tensor *kv_indices;
    /**
     * `[1]` or `[num_kv_heads]` float32, or NULL; fp8 caches only. Of formats with scales of their own: those,
     * as the append wrote or took them.
     */
    const folio_tensor *k_scales;
    /**
     * As k_scales, for values.
     */
    const folio_tensor *v_scales;
    /**
     * Keys of an fp8 cache are multiplied by `k_scale · k_scales[head]`. 0: 1.
     */
    float k_scale;
    /**
     * As k_scale. 0: 1.
     */
    float v_scale;
    /**
     * FOLIO_LAYOUT_NHD or FOLIO_LAYOUT_HND.
     */
    int32_t kv_layout;
    /**
     * What caches that are described as uint8 hold (an fp8 type, or one of kv_format); all zero: the tensors say it, and
     * uint8 is the first type that a kv_format other than FOLIO_KV_FORMAT_PLAIN has.
     */
    folio_dtype kv_dtype;
    /**
     * FOLIO_KV_FORMAT_…: how the rows of the caches are stored.
     */
    int32_t kv_format;
    /**
     * 0.
     */
    uint32_t reserved;
    /**
     * FOLIO_KV_FORMAT_CHANNEL_ZERO_POINTS: `[num_kv_heads, head_dim_qk]` float32. NULL otherwise.
     */
    const folio_tensor *k_zero_points;
    /**
     * FOLIO_KV_FORMAT_CHANNEL_ZERO_POINTS: `[num_kv_heads, head_dim_vo]` float32. NULL otherwise.
     */
    const folio_tensor *v_zero_points;
} folio_kv_gather_args;

/**
 * Copies keys and values of many requests from a paged cache to dense rows, and converts them to the rows' type.
 *
 * On CUDA lengths and page ids are read by the kernel: nothing waits for them. The first call on a context loads code
 * and answers CAPTURE in a capture. Later ones can be captured: they are one launch each. On the CPU the rows are
 * complete on return.
 *
 * @param ctx the device
 * @param args tensors and scales
 * @param stream CUDA stream, or NULL on the CPU
 * @param err report of a failure, or NULL
 * @return FOLIO_OK, or INVALID_ARGUMENT, INVALID_STRUCT_SIZE, UNKNOWN_FIELD, SHAPE, DTYPE, DEVICE_MISMATCH,
 *         CAPTURE, UNSUPPORTED, COMPILE, OUT_OF_MEMORY, DRIVER; then nothing was written
 *
 * # Safety
 * `ctx` is alive; the structs are readable, and the tensors' memory as the fields say. Concurrent use
 * is fine with different outputs.
 */
folio_status folio_kv_gather(const folio_context *ctx,
                             const folio_kv_gather_args *args,
                             void *stream,
                             folio_error *err);

/** @} */

/**
 * @defgroup rope_append Norm, RoPE and KV append
 * Queries, keys and values of new tokens from a projection to the attention in one step.
 * @{
 */

/**
 * RoPE rotates neighbouring elements (GPT-J). Without: an element of the first half of rotary_dim and one of the second
 * (GPT-NeoX).
 */
#define FOLIO_ROPE_INTERLEAVED 1

/**
 * New tokens of a model with query, key and value heads, from the projection to the attention: what vLLM's
 * fused_rope_kvcache and FlashInfer's rope_quantize_fp8_append_paged_kv_cache do in one pass.
 *
 * Each row of q and key becomes, in float32 and in this order,
 * 1. with a norm weight: `x · weight / sqrt(mean(x²) + rms_norm_eps)`, over all head_dim_qk elements (RMS norm of each
 *    head, as Qwen3 has it);
 * 2. with RoPE: pair i of the first rotary_dim elements, (x, y), becomes `(x · cos_i - y · sin_i, y · cos_i + x · sin_i)`.
 *    Elements behind rotary_dim stay.
 *
 * Then it is rounded once for each output: to the tensor's type, or for the cache as folio_kv_append does it, to fp8 after
 * the division by its scale or as kv_format says. Values are appended as folio_kv_append does it. Without norm and RoPE
 * queries and keys are copied.
 *
 * Angles come from cos_sin_cache, or are computed where rope_theta is not 0: pair i at position p has the angle
 * `p · f_i`, with `f_i = rope_theta^(-2i / rotary_dim)` (Su et al., RoFormer, 2021), divided by rope_scale. With
 * low_freq_factor, high_freq_factor and old_context_len, as Llama 3.1 has it (the reference code of Meta; rope_type
 * llama3 of Hugging Face; apply_llama31_rope of FlashInfer), f_i becomes `s · f_i + (1 - s) · f_i / rope_scale`, where
 * `s = (old_context_len · f_i / 2π - low_freq_factor) / (high_freq_factor - low_freq_factor)`, from 0 to 1.
 * Computed angles are reduced to one turn without an error, whatever the position.
 *
 * On CUDA rows of more than 480 elements are refused with UNSUPPORTED where rotary_dim is no multiple of 16 and they need
 * more than 32 threads, one for each 16 elements that are rotated and for each 16 others.
 *
 * The outputs may not overlap other tensors, but for q_out and key_out, which may be q and key: with the same address
 * and the same strides.
 */
typedef struct folio_rope_append_args {
    /**
     * sizeof(folio_rope_append_args).
     */
    uint32_t struct_size;
    /**
     * FOLIO_ROPE_INTERLEAVED or 0.
     */
    uint32_t flags;
    /**
     * `[num_tokens or more, num_qo_heads, head_dim_qk]` of key's type, or NULL: no queries. All its rows are computed,
     * also those of tokens that are not cached. A slice of a fused QKV tensor will do, as for key and value.
     */
    const folio_tensor *q;
    /**
     * Output: the queries, as q; may be q itself. NULL: in place.
     */
    const folio_tensor *q_out;
    /**
     * `[num_tokens or more, num_kv_heads, head_dim_qk]` float32, float16 or bfloat16; head_dim_qk is 512 at most.
     */
    const folio_tensor *key;
    /**
     * Output: the first num_tokens keys, normalised and rotated, whatever their slots are; as key, which it may be. NULL:
     * not wanted, and key stays as it is.
     */
    const folio_tensor *key_out;
    /**
     * `[num_tokens or more, num_kv_heads, head_dim_vo]`, of key's type.
     */
    const folio_tensor *value;
    /**
     * Output: as in folio_kv_append_args.
     */
    const folio_tensor *k_cache;
    /**
     * Output: as in folio_kv_append_args.
     */
    const folio_tensor *v_cache;
    /**
     * `[num_tokens]` int32 or int64, as in folio_kv_append_args: tokens with a negative slot are not cached.
     */
    const folio_tensor *slot_mapping;
    /**
     * As in folio_kv_append_args.
     */
    const folio_tensor *k_scales;
    /**
     * As in folio_kv_append_args.
     */
    const folio_tensor *v_scales;
    /**
     * `[head_dim_qk]` float32 or of key's type; NULL: queries are not normalised.
     */
    const folio_tensor *q_norm_weight;
    /**
     * As q_norm_weight, for keys.
     */
    const folio_tensor *k_norm_weight;
    /**
     * `[rows or more]` int32 or int64, where rows are those of q, or num_tokens without q. NULL: no RoPE, and the fields
     * below it that are about RoPE are NULL and 0. A position beyond cos_sin_cache is refused where it is on the host; on
     * a device the nearest one in the table is taken. Computed angles are there for every position.
     */
    const folio_tensor *positions;
    /**
     * As positions, which they are added to; or NULL.
     */
    const folio_tensor *position_offsets;
    /**
     * `[max_position, rotary_dim]` float32 or of key's type: the cosines of a position, one for each pair, and then the
     * sines; or `[2, max_position, rotary_dim / 2]`. NULL: angles are computed.
     */
    const folio_tensor *cos_sin_cache;
    /**
     * As in folio_kv_append_args.
     */
    float k_scale;
    /**
     * As in folio_kv_append_args.
     */
    float v_scale;
    /**
     * FOLIO_LAYOUT_NHD or FOLIO_LAYOUT_HND.
     */
    int32_t kv_layout;
    /**
     * As in folio_kv_append_args.
     */
    folio_dtype kv_dtype;
    /**
     * Added to the mean of squares; positive with a norm weight, else 0.
     */
    float rms_norm_eps;
    /**
     * Elements that are rotated, an even number; 0: the width of cos_sin_cache, or head_dim_qk.
     */
    uint32_t rotary_dim;
    /**
     * Base of the frequencies of computed angles, such as 10000; 0 with cos_sin_cache.
     */
    float rope_theta;
    /**
     * Computed frequencies are divided by it. 0: 1.
     */
    float rope_scale;
    /**
     * Llama 3.1: turns in old_context_len up to which rope_scale divides altogether. 0: rope_scale divides all.
     */
    float low_freq_factor;
    /**
     * Llama 3.1: turns in old_context_len from which on rope_scale does not divide.
     */
    float high_freq_factor;
    /**
     * Llama 3.1: tokens of the context before it was extended, such as 8192.
     */
    uint32_t old_context_len;
    /**
     * FOLIO_KV_FORMAT_…: how the rows of the caches are stored.
     */
    int32_t kv_format;
    /**
     * As in folio_kv_append_args.
     */
    const folio_tensor *k_zero_points;
    /**
     * As in folio_kv_append_args.
     */
    const folio_tensor *v_zero_points;
} folio_rope_append_args;

/**
 * Normalises and rotates queries and keys of new tokens, and writes keys and values to a paged cache, quantising where the
 * cache is fp8 or of a kv_format that does.
 *
 * On CUDA the first call on a context with given types loads code and answers CAPTURE in a capture. Later ones
 * can be captured: they are one launch each. On the CPU the results are there on return.
 *
 * @param ctx the device
 * @param args tensors and numbers
 * @param stream CUDA stream, or NULL on the CPU
 * @param err report of a failure, or NULL
 * @return FOLIO_OK, or INVALID_ARGUMENT, INVALID_STRUCT_SIZE, UNKNOWN_FIELD, SHAPE, DTYPE, DEVICE_MISMATCH,
 *         CAPTURE, UNSUPPORTED, COMPILE, OUT_OF_MEMORY, DRIVER; then nothing was written
 *
 * # Safety
 * `ctx` is alive; the structs are readable, and the tensors' memory as the fields say. Concurrent use
 * is fine where no slot and no row is written by two calls, or by two tokens of one call.
 */
folio_status folio_rope_append(const folio_context *ctx,
                               const folio_rope_append_args *args,
                               void *stream,
                               folio_error *err);

/** @} */

/**
 * @defgroup append_run Append and decode
 * All of a decode step that is between two projections of a layer.
 * @{
 */

/**
 * Appends the new tokens of a step and computes attention with them: what folio_rope_append(append) followed by
 * folio_decode_run(args) does, with the same results up to rounding, as one enqueue. In a decode step of a model this is all
 * between the projection of q, k and v and that of the output. (No counterpart in FlashInfer or vLLM, whose fusions end at
 * the cache.)
 *
 * The tensors of the two are the same: args.q is append.q_out, or append.q where that is NULL, and args.k and args.v are the
 * caches of append. The planned lengths count the new tokens: row i of the batch is token i of append, and its key the one
 * that causal masking lets it see last. Its slot is where the planned page table has that key; a negative slot leaves the
 * cache as it is, and the run attends to what it holds. Whether tokens are computed and appended that no request of the batch
 * has, or for which its kv_len has no key, is not defined. On CUDA nothing checks slots in device memory: another key's slot
 * is a race.
 *
 * On Hopper one kernel does both, and a second where keys of a request are split, for: caches of float16, bfloat16 or fp8 in
 * pages of a multiple of 8 tokens; head_dim 64, 128 or 256 (fp8: 64 or 128), up to 16 packed rows for each KV head (fp8 and
 * head_dim 256: 8), q of 16 bits; q_out another tensor than q, no key_out; rotary_dim a multiple of 16; rows aligned to 16
 * bytes; no custom mask. Otherwise, and on other devices, the two kernels are enqueued one after the other.
 *
 * @param handle the handle
 * @param append new tokens, with their queries
 * @param args tensors and parameters of the attention
 * @param stream CUDA stream, or NULL on the CPU
 * @param err report of a failure, or NULL
 * @return FOLIO_OK; what folio_rope_append and folio_decode_run return, and INVALID_ARGUMENT where their tensors are not
 *         the same
 *
 * # Safety
 * As folio_decode_run, for the tensors of both structs. Concurrent calls are fine as there, with different slots.
 */
folio_status folio_decode_append_run(const folio_decode *handle,
                                     const folio_rope_append_args *append,
                                     const folio_attention_args *args,
                                     void *stream,
                                     folio_error *err);

/** @} */

/**
 * @defgroup merge Merges of attention states
 * Attention over a set of keys from attention over its parts.
 * @{
 */

/**
 * All lse of a merge are in base 2 instead of base e.
 */
#define FOLIO_MERGE_LSE_BASE_2 1

/**
 * Two attention states (v, s) of the same rows, over disjoint sets of keys, to be merged:
 * FlashInfer's merge_state, merge_state_in_place where v_out is v_a, and vLLM's merge_attn_states, whose prefix is
 * state a. s is the lse. An s of -inf (or +inf, as FlashAttention-2 marks it, or NaN) is an empty state, whose v counts
 * for nothing, whatever it is; two empty states give 0 and -inf. Beside an empty state the other one stays as it is.
 *
 * An output may be the input of its kind: v_out v_a or v_b, s_out s_a or s_b, with the same address and the same
 * strides. Any other overlap of an output with another tensor, in part too, makes the outputs undefined. The
 * rows of v have a unit last stride; all other strides are free, so that an lse of `[num_heads, num_tokens]`
 * is given as `[num_tokens, num_heads]` with the strides 1 and num_tokens. Every lse has strides of its own.
 */
typedef struct folio_merge_state_args {
    /**
     * sizeof(folio_merge_state_args).
     */
    uint32_t struct_size;
    /**
     * FOLIO_MERGE_…
     */
    uint32_t flags;
    /**
     * `[num_tokens, num_heads, head_dim]` float32, float16 or bfloat16.
     */
    const folio_tensor *v_a;
    /**
     * `[num_tokens, num_heads]` float32, float16 or bfloat16.
     */
    const folio_tensor *s_a;
    /**
     * As v_a.
     */
    const folio_tensor *v_b;
    /**
     * As s_a, and of its type.
     */
    const folio_tensor *s_b;
    /**
     * Output: as v_a, and may be v_a or v_b itself; or in float8_e4m3 or float8_e5m2, which holds o / o_scale, saturated.
     */
    const folio_tensor *v_out;
    /**
     * Output: as s_a, in any of those types; may be s_a or s_b itself; or NULL.
     */
    const folio_tensor *s_out;
    /**
     * `[num_tokens]` uint8 or bool, or NULL: a zero leaves the row of the outputs as it is.
     */
    const folio_tensor *mask;
    /**
     * Divisor of o, 2^-60 to 2^60; only for fp8 outputs. 0: 1.
     */
    float o_scale;
    /**
     * The last so many tokens have no state a: nothing of it is read, and the outputs are state b. In vLLM's terms
     * num_tokens - prefill_tokens_with_context. At most num_tokens; 0: all tokens have both.
     */
    uint32_t num_tokens_without_a;
} folio_merge_state_args;

/**
 * n attention states per row, over disjoint sets of keys, to be merged: FlashInfer's merge_states. No state
 * gives 0 and -inf. The outputs may not overlap the states. Empty states and strides as in folio_merge_state_args.
 */
typedef struct folio_merge_states_args {
    /**
     * sizeof(folio_merge_states_args).
     */
    uint32_t struct_size;
    /**
     * FOLIO_MERGE_…
     */
    uint32_t flags;
    /**
     * `[num_tokens, n, num_heads, head_dim]` float32, float16 or bfloat16.
     */
    const folio_tensor *v;
    /**
     * `[num_tokens, n, num_heads]` float32, float16 or bfloat16.
     */
    const folio_tensor *s;
    /**
     * Output: `[num_tokens, num_heads, head_dim]` of the type of v, or in fp8 as in folio_merge_state_args.
     */
    const folio_tensor *v_out;
    /**
     * Output: `[num_tokens, num_heads]` float32, float16 or bfloat16, or NULL.
     */
    const folio_tensor *s_out;
    /**
     * As in folio_merge_state_args.
     */
    float o_scale;
    /**
     * 0.
     */
    uint32_t reserved;
} folio_merge_states_args;

/**
 * As many attention states per token as each has, over disjoint sets of keys, to be merged: what split keys, or the
 * levels of a cascade, leave where rows have different numbers of parts (FlashInfer's variable-length merge of states).
 * Token t has the states `indptr[t]` to `indptr[t + 1]`, without the last. A token with none gives 0 and -inf, one
 * with one state is that state. The outputs may not overlap the states. Empty states and strides as in
 * folio_merge_state_args.
 */
typedef struct folio_merge_varlen_args {
    /**
     * sizeof(folio_merge_varlen_args).
     */
    uint32_t struct_size;
    /**
     * FOLIO_MERGE_…
     */
    uint32_t flags;
    /**
     * `[num_states, num_heads, head_dim]` float32, float16 or bfloat16: the states of all tokens.
     */
    const folio_tensor *v;
    /**
     * `[num_states, num_heads]` float32, float16 or bfloat16.
     */
    const folio_tensor *s;
    /**
     * `[num_tokens + 1]` int32, contiguous, on the context's device: numbers from 0 to num_states, none below the one
     * before it. On the CPU they are checked. On CUDA a token has those of its states that exist.
     */
    const folio_tensor *indptr;
    /**
     * Output: `[num_tokens, num_heads, head_dim]` of the type of v, or in fp8 as in folio_merge_state_args.
     */
    const folio_tensor *v_out;
    /**
     * Output: `[num_tokens, num_heads]` float32, float16 or bfloat16, or NULL.
     */
    const folio_tensor *s_out;
    /**
     * As in folio_merge_state_args.
     */
    float o_scale;
    /**
     * 0.
     */
    uint32_t reserved;
} folio_merge_varlen_args;

/**
 * Merges two attention states.
 *
 * On CUDA the first merge on a context with given types loads code and answers CAPTURE in a capture. Later ones
 * can be captured: they are one launch each. On the CPU the outputs are complete on return.
 *
 * @param ctx the device
 * @param args the states
 * @param stream CUDA stream, or NULL on the CPU
 * @param err report of a failure, or NULL
 * @return FOLIO_OK, or INVALID_ARGUMENT, INVALID_STRUCT_SIZE, UNKNOWN_FIELD, SHAPE, DTYPE, DEVICE_MISMATCH,
 *         CAPTURE, UNSUPPORTED, COMPILE, OUT_OF_MEMORY, DRIVER; then nothing was written
 *
 * # Safety
 * `ctx` is alive; the structs are readable, and the tensors' memory as the fields say. Concurrent use
 * is fine with different outputs.
 */
folio_status folio_merge_state(const folio_context *ctx,
                               const folio_merge_state_args *args,
                               void *stream,
                               folio_error *err);

/**
 * Merges n attention states per row.
 *
 * @copydetails folio_merge_state
 *
 * # Safety
 * As folio_merge_state.
 */
folio_status folio_merge_states(const folio_context *ctx,
                                const folio_merge_states_args *args,
                                void *stream,
                                folio_error *err);

/**
 * Merges as many attention states per token as each has.
 *
 * @copydetails folio_merge_state
 *
 * # Safety
 * As folio_merge_state.
 */
folio_status folio_merge_varlen(const folio_context *ctx,
                                const folio_merge_varlen_args *args,
                                void *stream,
                                folio_error *err);

/** @} */

/**
 * @defgroup projection Projections of MLA
 * From the queries' space to the latent one and back (DeepSeek-V2, section 2.1.2): what stands before and after
 * attention over latent rows.
 * @{
 */

/**
 * The up-projection of keys and values, `kv_b_proj` in DeepSeek's models, and where its two halves go.
 *
 * H heads; P, V and L are the widths of a head's nope part, of its value and of the latent row, multiples of 8. All
 * strides are free. w_uk and w_uv have the type of kv_b_proj, or any of the three where that is float32.
 *
 * The halves need not be copied: a tensor of shape [H, P, L] or [H, L, V] over the memory of kv_b_proj, with its
 * strides, is a weight for the functions below.
 */
typedef struct folio_mla_absorb_weights_args {
    /**
     * sizeof(folio_mla_absorb_weights_args).
     */
    uint32_t struct_size;
    /**
     * 0.
     */
    uint32_t flags;
    /**
     * `[H·(P+V), L]` float32, float16 or bfloat16, (out, in) as a linear layer stores it: for each head the P rows of
     * its W_UK, then the V rows of its W_UV.
     */
    const folio_tensor *kv_b_proj;
    /**
     * Output: `[H, P, L]`, or NULL where w_uv is given.
     */
    const folio_tensor *w_uk;
    /**
     * Output: `[H, L, V]`, or NULL where w_uk is given.
     */
    const folio_tensor *w_uv;
} folio_mla_absorb_weights_args;

/**
 * The absorption of W_UK into queries: `q_latent[t, h] = q_nope[t, h] · w_uk[h]`. All three tensors have one type. Rows
 * of q_nope and q_latent have a unit last stride; all other strides are free, so that q_latent may be the first L
 * columns of a wider query tensor.
 */
typedef struct folio_mla_absorb_q_args {
    /**
     * sizeof(folio_mla_absorb_q_args).
     */
    uint32_t struct_size;
    /**
     * 0.
     */
    uint32_t flags;
    /**
     * `[num_tokens, H, P]` float16 or bfloat16; float32 too on the CPU.
     */
    const folio_tensor *q_nope;
    /**
     * `[H, P, L]`, any strides.
     */
    const folio_tensor *w_uk;
    /**
     * Output: `[num_tokens, H, L]`.
     */
    const folio_tensor *q_latent;
} folio_mla_absorb_q_args;

/**
 * The projection of latent outputs to values: `out[t, h] = o_latent[t, h] · w_uv[h]`. Types and strides as in
 * folio_mla_absorb_q_args; out may be a view of `[num_tokens, H·V]`.
 */
typedef struct folio_mla_project_o_args {
    /**
     * sizeof(folio_mla_project_o_args).
     */
    uint32_t struct_size;
    /**
     * 0.
     */
    uint32_t flags;
    /**
     * `[num_tokens, H, L]` float16 or bfloat16; float32 too on the CPU.
     */
    const folio_tensor *o_latent;
    /**
     * `[H, L, V]`, any strides.
     */
    const folio_tensor *w_uv;
    /**
     * Output: `[num_tokens, H, V]`.
     */
    const folio_tensor *out;
} folio_mla_project_o_args;

/**
 * The up-projection of latent rows to keys and values, for attention in the form with heads of their own:
 * `k_nope[t, h] = kv_c[t] · w_uk[h]ᵀ`, `v[t, h] = kv_c[t] · w_uv[h]`. Types and strides as in folio_mla_absorb_q_args;
 * k_nope may be the first P columns of a wider key tensor. Either output may be left out together with its weight.
 */
typedef struct folio_mla_up_project_args {
    /**
     * sizeof(folio_mla_up_project_args).
     */
    uint32_t struct_size;
    /**
     * 0.
     */
    uint32_t flags;
    /**
     * `[num_tokens, L]` float16 or bfloat16; float32 too on the CPU.
     */
    const folio_tensor *kv_c;
    /**
     * `[H, P, L]`, any strides, or NULL.
     */
    const folio_tensor *w_uk;
    /**
     * `[H, L, V]`, any strides, or NULL.
     */
    const folio_tensor *w_uv;
    /**
     * Output: `[num_tokens, H, P]`, or NULL.
     */
    const folio_tensor *k_nope;
    /**
     * Output: `[num_tokens, H, V]`, or NULL.
     */
    const folio_tensor *v;
} folio_mla_up_project_args;

/**
 * Copies the halves of kv_b_proj to weights of their own, once after a model is loaded.
 *
 * On CUDA the first copy between given types on a context, and the first projection of a type, whichever it is and of
 * however many tokens, load code and answer CAPTURE in a capture. Later ones can be captured. On the CPU the outputs are
 * complete on return.
 *
 * @param ctx the device
 * @param args the up-projection and its halves
 * @param stream CUDA stream, or NULL on the CPU
 * @param err report of a failure, or NULL
 * @return FOLIO_OK, or INVALID_ARGUMENT, INVALID_STRUCT_SIZE, UNKNOWN_FIELD, SHAPE, DTYPE, DEVICE_MISMATCH,
 *         CAPTURE, UNSUPPORTED, COMPILE, OUT_OF_MEMORY, DRIVER; then nothing was written
 *
 * # Safety
 * `ctx` is alive; the structs are readable, and the tensors' memory as the fields say. Concurrent use
 * is fine with different outputs.
 */
folio_status folio_mla_absorb_weights(const folio_context *ctx,
                                      const folio_mla_absorb_weights_args *args,
                                      void *stream,
                                      folio_error *err);

/**
 * Takes queries to the latent space: q_nope · W_UK, before attention over latent rows. Sums are float32, rounded to
 * the type of q_latent once. No token is nothing to do.
 *
 * On the CPU every thread of the context allocates half a megabyte at its first projection, and keeps it.
 *
 * @copydetails folio_mla_absorb_weights
 *
 * # Safety
 * As folio_mla_absorb_weights.
 */
folio_status folio_mla_absorb_q(const folio_context *ctx,
                                const folio_mla_absorb_q_args *args,
                                void *stream,
                                folio_error *err);

/**
 * Takes outputs of attention over latent rows to the values' space: o_latent · W_UV. Sums as in folio_mla_absorb_q.
 *
 * @copydetails folio_mla_absorb_weights
 *
 * # Safety
 * As folio_mla_absorb_weights.
 */
folio_status folio_mla_project_o(const folio_context *ctx,
                                 const folio_mla_project_o_args *args,
                                 void *stream,
                                 folio_error *err);

/**
 * Takes latent rows to keys and values of every head, as prefill attends to them. Sums as in folio_mla_absorb_q.
 *
 * @copydetails folio_mla_absorb_weights
 *
 * # Safety
 * As folio_mla_absorb_weights.
 */
folio_status folio_mla_up_project(const folio_context *ctx,
                                  const folio_mla_up_project_args *args,
                                  void *stream,
                                  folio_error *err);

/** @} */

/**
 * @defgroup mla_cache Caches of latent records
 * What MLA (DeepSeek's multi-head latent attention) keeps of a token: one latent row, and one rotary row that all heads
 * share. New tokens into a paged cache of them, and from there to dense rows, for prefill over a cached context.
 * @{
 */

/**
 * RoPE rotates neighbouring elements (GPT-J; DeepSeek). Without: an element of the first half and one of the second
 * (GPT-NeoX).
 */
#define FOLIO_MLA_ROPE_INTERLEAVED 1

/**
 * New tokens for a cache of latent records: vLLM's concat_and_cache_mla, and concat_and_cache_mla_rope_fused where
 * cos_sin_cache is given.
 *
 * A record of an fp8_ds_mla cache gets, for each 128 latent elements, the scale `max(max |x| / 448, FLT_MIN)` and
 * `x / scale` in e4m3. That is what vLLM writes, but for the rotary elements of float16 tokens: they are converted to
 * bfloat16, where vLLM keeps their bits.
 *
 * RoPE: pair i of a row, (x, y), becomes `(x · cos_i - y · sin_i, y · cos_i + x · sin_i)`, computed in float32 and
 * rounded to the tokens' type, before anything is stored. Rows of q_rope and rope_out are rotated whatever the slot.
 *
 * The outputs may not overlap other tensors, but for rope_out and q_rope_out, which may be rope and q_rope: with the
 * same address and the same strides.
 */
typedef struct folio_mla_append_args {
    /**
     * sizeof(folio_mla_append_args).
     */
    uint32_t struct_size;
    /**
     * FOLIO_MLA_ROPE_INTERLEAVED or 0.
     */
    uint32_t flags;
    /**
     * `[num_tokens or more, kv_lora_rank]` or `[num_tokens or more, 1, kv_lora_rank]` float32, float16 or bfloat16.
     */
    const folio_tensor *latent;
    /**
     * `[num_tokens or more, qk_rope_head_dim]` or `[num_tokens or more, 1, qk_rope_head_dim]`, of latent's type; NULL
     * where records have no rotary part.
     */
    const folio_tensor *rope;
    /**
     * Output: `[num_pages, page_size, kv_lora_rank + qk_rope_head_dim]` of latent's type or fp8; with kv_rope
     * `[num_pages, page_size, kv_lora_rank]`. fp8_ds_mla: `[num_pages, page_size, 656]` uint8, where address and
     * strides are multiples of 4.
     */
    const folio_tensor *kv;
    /**
     * Output: `[num_pages, page_size, qk_rope_head_dim]` of kv's type, where the rotary part of the records has a
     * tensor of its own; or NULL.
     */
    const folio_tensor *kv_rope;
    /**
     * `[num_tokens]` int32 or int64: page · page_size + offset; a negative slot skips the token. Its length is the
     * number of tokens. A slot beyond the cache is refused where it is on the host, and skips the token where it is on
     * a device.
     */
    const folio_tensor *slot_mapping;
    /**
     * `[max_position, qk_rope_head_dim]` float32 or of latent's type: the cosines of a position, and then the sines;
     * NULL: no RoPE, and the fields below it are NULL too.
     */
    const folio_tensor *cos_sin_cache;
    /**
     * `[num_tokens]` int32 or int64. One beyond cos_sin_cache is refused where it is on the host; where it is on a
     * device nothing is written for the token.
     */
    const folio_tensor *positions;
    /**
     * Output: the rotated rope, `[num_tokens or more, qk_rope_head_dim]` as rope; may be rope itself; or NULL.
     */
    const folio_tensor *rope_out;
    /**
     * `[num_tokens or more, num_heads, qk_rope_head_dim]` of latent's type, to be rotated; in place where q_rope_out
     * is NULL; or NULL.
     */
    const folio_tensor *q_rope;
    /**
     * Output: the rotated q_rope, as it; may be q_rope itself; or NULL.
     */
    const folio_tensor *q_rope_out;
    /**
     * A plain fp8 cache gets `x / k_scale`, rounded to nearest even, saturated. 0: 1.
     */
    float k_scale;
    /**
     * FOLIO_MLA_CACHE_…
     */
    int32_t cache_format;
    /**
     * What a plain cache that is described as uint8 holds (an fp8 type); all zero: the tensors say it.
     */
    folio_dtype kv_dtype;
    /**
     * 0.
     */
    uint32_t reserved;
} folio_mla_append_args;

/**
 * Records of many requests to be copied to dense rows and converted: vLLM's gather_and_maybe_dequant_cache, its
 * variant for fp8_ds_mla, and cp_gather_cache. Page ids are a block_table, or kv_indptr and kv_indices.
 *
 * Lengths and page ids that are wrong are refused where they are on the host. Where they are on a device, rows whose
 * page or token does not exist are not written. The outputs may not overlap other tensors.
 */
typedef struct folio_mla_gather_args {
    /**
     * sizeof(folio_mla_gather_args).
     */
    uint32_t struct_size;
    /**
     * 0.
     */
    uint32_t flags;
    /**
     * `[num_pages, page_size, kv_lora_rank + qk_rope_head_dim]` and so on, as in folio_mla_append_args; float32,
     * float16, bfloat16, fp8, or fp8_ds_mla records.
     */
    const folio_tensor *kv;
    /**
     * As in folio_mla_append_args.
     */
    const folio_tensor *kv_rope;
    /**
     * Output: `[num_rows, kv_lora_rank + qk_rope_head_dim]`, with dst_rope `[num_rows, kv_lora_rank]`; float32,
     * float16 or bfloat16, whatever kv's type.
     */
    const folio_tensor *dst;
    /**
     * Output: `[num_rows, qk_rope_head_dim]` of dst's type; or NULL.
     */
    const folio_tensor *dst_rope;
    /**
     * `[batch_size + 1]` int32 or int64: request b gets rows `cu_seq_lens[b]` to `cu_seq_lens[b + 1]`, at most num_rows.
     * Rows of no request are left as they are.
     */
    const folio_tensor *cu_seq_lens;
    /**
     * `[batch_size]` int32 or int64: the token of request b that its first row gets; NULL: 0.
     */
    const folio_tensor *seq_starts;
    /**
     * `[batch_size, columns]` int32 or int64 page ids; rows may be strided. Entries of tokens that are not asked for
     * are not read.
     */
    const folio_tensor *block_table;
    /**
     * `[batch_size + 1]` int32 or int64: the page ids of request b begin at `kv_indices[kv_indptr[b]]`.
     */
    const folio_tensor *kv_indptr;
    /**
     * `[n]` int32 or int64 page ids.
     */
    const folio_tensor *kv_indices;
    /**
     * Values of a plain fp8 cache are multiplied by it. 0: 1.
     */
    float k_scale;
    /**
     * FOLIO_MLA_CACHE_…
     */
    int32_t cache_format;
    /**
     * What a plain cache that is described as uint8 holds (an fp8 type); all zero: the tensors say it.
     */
    folio_dtype kv_dtype;
    /**
     * 0.
     */
    uint32_t reserved;
} folio_mla_gather_args;

/**
 * Writes new tokens to a cache of latent records, quantising them where the cache is fp8, and rotating rotary
 * elements where a table of angles is given.
 *
 * On CUDA the first call on a context loads code and answers CAPTURE in a capture. Later ones can be captured: they
 * are one launch each. On the CPU the tokens are in the cache on return.
 *
 * @param ctx the device
 * @param args tensors and scale
 * @param stream CUDA stream, or NULL on the CPU
 * @param err report of a failure, or NULL
 * @return FOLIO_OK, or INVALID_ARGUMENT, INVALID_STRUCT_SIZE, UNKNOWN_FIELD, SHAPE, DTYPE, DEVICE_MISMATCH,
 *         CAPTURE, UNSUPPORTED, COMPILE, OUT_OF_MEMORY, DRIVER; then nothing was written
 *
 * # Safety
 * `ctx` is alive; the structs are readable, and the tensors' memory as the fields say. Concurrent use
 * is fine where no slot is written by two calls, or by two tokens of one call.
 */
folio_status folio_mla_append(const folio_context *ctx,
                              const folio_mla_append_args *args,
                              void *stream,
                              folio_error *err);

/**
 * Copies latent records of many requests from a paged cache to dense rows, and converts them to the rows' type.
 *
 * On CUDA lengths and page ids are read by the kernel: nothing waits for them. The first call on a context loads code
 * and answers CAPTURE in a capture. Later ones can be captured: they are one launch each. On the CPU the rows are
 * complete on return.
 *
 * @param ctx the device
 * @param args tensors and scale
 * @param stream CUDA stream, or NULL on the CPU
 * @param err report of a failure, or NULL
 * @return FOLIO_OK, or INVALID_ARGUMENT, INVALID_STRUCT_SIZE, UNKNOWN_FIELD, SHAPE, DTYPE, DEVICE_MISMATCH,
 *         CAPTURE, UNSUPPORTED, COMPILE, OUT_OF_MEMORY, DRIVER; then nothing was written
 *
 * # Safety
 * `ctx` is alive; the structs are readable, and the tensors' memory as the fields say. Concurrent use
 * is fine with different outputs.
 */
folio_status folio_mla_gather(const folio_context *ctx,
                              const folio_mla_gather_args *args,
                              void *stream,
                              folio_error *err);

/** @} */

/**
 * @defgroup mla_context MLA over a cached context
 * Prefill of multi-head latent attention, for prompts of which a part may be cached: new tokens over themselves, and
 * over their context chunk by chunk, each unpacked from the latent cache into memory of a bounded size.
 * @{
 */

/**
 * The caller unpacks the context itself, for instance with quantised weights: runs are made in steps, and the workspace
 * has no room for unpacked chunks.
 */
#define FOLIO_MLA_CONTEXT_STEPS 4

/**
 * Prefill of MLA over a cached context: vLLM's chunked context. One handle serves every batch within its desc, and one
 * plan every layer of a step.
 *
 * Runs of one plan share its workspace. On CUDA they are on one stream, or on streams that the host orders.
 */
typedef struct folio_mla_context folio_mla_context;

/**
 * What an MLA context handle is made from: DeepSeek-V2's multi-head latent attention in its multi-head form, for
 * prompts whose requests may have a cached context.
 *
 * Names of extents below: T new tokens, H num_heads, L kv_lora_rank, P qk_nope_head_dim, R qk_rope_head_dim, V
 * v_head_dim. Dimensions are multiples of 8; P + R and V are what prefill takes as head_dim_qk and head_dim_vo. The
 * maxima bound every later batch and fix the workspace.
 */
typedef struct folio_mla_context_desc {
    /**
     * sizeof(folio_mla_context_desc).
     */
    uint32_t struct_size;
    /**
     * FOLIO_PLAN_GRAPH, FOLIO_MLA_CONTEXT_STEPS.
     */
    uint32_t flags;
    /**
     * Type of q, k_nope, k_rope, v, o and the weights: float32, float16 or bfloat16.
     */
    folio_dtype dtype;
    /**
     * Type of the cache: dtype, float8_e4m3 or float8_e5m2; all zero: as dtype. With FOLIO_MLA_CACHE_FP8_DS_MLA: all
     * zero or float8_e4m3.
     */
    folio_dtype kv_dtype;
    /**
     * FOLIO_MLA_CACHE_…
     */
    int32_t cache_format;
    /**
     * H.
     */
    uint32_t num_heads;
    /**
     * L, up to 512.
     */
    uint32_t kv_lora_rank;
    /**
     * P.
     */
    uint32_t qk_nope_head_dim;
    /**
     * R.
     */
    uint32_t qk_rope_head_dim;
    /**
     * V.
     */
    uint32_t v_head_dim;
    /**
     * Tokens per page, 1 or more.
     */
    uint32_t page_size;
    /**
     * Most requests of a batch.
     */
    uint32_t max_batch_size;
    /**
     * Most new tokens of a batch, over all requests.
     */
    uint32_t max_num_tokens;
    /**
     * Most new tokens of a request; 0: max_num_tokens.
     */
    uint32_t max_qo_len;
    /**
     * Most tokens of a request, those of this step included.
     */
    uint32_t max_kv_len;
    /**
     * Most context tokens that are unpacked at a time: a chunk. 0: as many as vLLM unpacks,
     * max(min(max(8 · max_kv_len, 4 · max_batch_size · page_size), 65536), max_batch_size · page_size). Of
     * 16-bit types with 128 heads of 128, 64 Ki tokens need 4 GiB; no chunk is larger than all contexts can be.
     */
    uint32_t max_chunk_tokens;
    /**
     * Most pages of a batch, over all requests; 0: max_batch_size times the pages of max_kv_len.
     */
    uint64_t max_num_pages;
} folio_mla_context_desc;

/**
 * Tensors and parameters of one call; one plan serves many, with different values. The extents are those of
 * folio_mla_context_desc.
 *
 * With the context's records (c, r) unpacked to keys (`W_UK[h] c`, r) and values `c W_UV[h]`, and the new tokens' keys
 * (k_nope, k_rope) and values v behind them, row i of a request sees its whole context and its new tokens up to i:
 *
 * ```text
 * o = Σ softmax(q·k · sm_scale)_j v_j
 * lse = log(Σ e^(q·k · sm_scale))
 * ```
 *
 * Chunks of the context are summed up in float32, new tokens are added to that, and o is rounded: once on the CPU and by
 * Hopper's kernels, while of the portable CUDA kernel both of these parts are rounded before. This is the prefill of vLLM's MLA
 * backends; there every chunk is merged in the type of o.
 */
typedef struct folio_mla_context_args {
    /**
     * sizeof(folio_mla_context_args).
     */
    uint32_t struct_size;
    /**
     * FOLIO_RUN_LSE_BASE_2 or 0.
     */
    uint32_t flags;
    /**
     * Queries, the last R elements rotated: `[T or more, H, P + R]`.
     */
    const folio_tensor *q;
    /**
     * Keys of the new tokens: `[T or more, H, P]`.
     */
    const folio_tensor *k_nope;
    /**
     * Their rotated part, of all heads: `[T or more, R]` or `[T or more, 1, R]`.
     */
    const folio_tensor *k_rope;
    /**
     * Values of the new tokens: `[T or more, H, V]`.
     */
    const folio_tensor *v;
    /**
     * The cache: `[num_pages, page_size, L + R]` of kv_dtype; uint8 stands for fp8. With kv_rope:
     * `[num_pages, page_size, L]`. fp8_ds_mla: `[num_pages, page_size, 656]` uint8. The new tokens need not be in it.
     */
    const folio_tensor *kv;
    /**
     * The rotary part of the cache, `[num_pages, page_size, R]`; NULL where kv holds whole records.
     */
    const folio_tensor *kv_rope;
    /**
     * `[H, P, L]` with any strides. NULL with FOLIO_MLA_CONTEXT_STEPS.
     */
    const folio_tensor *w_uk;
    /**
     * `[H, L, V]` with any strides. NULL with FOLIO_MLA_CONTEXT_STEPS.
     */
    const folio_tensor *w_uv;
    /**
     * With FOLIO_MLA_CONTEXT_STEPS, as the next three; NULL without. Output of gather: `[tokens of the chunk or more, L]`.
     */
    const folio_tensor *context_latent;
    /**
     * Output of gather, and read by attend: `[…, R]`.
     */
    const folio_tensor *context_rope;
    /**
     * Read by attend: `[…, H, P]`.
     */
    const folio_tensor *context_k_nope;
    /**
     * Read by attend: `[…, H, V]`.
     */
    const folio_tensor *context_v;
    /**
     * Output: `[T or more, H, V]`. It may not overlap another tensor.
     */
    const folio_tensor *o;
    /**
     * Output: `[T or more, H]` float32, float16 or bfloat16 of any strides, or NULL. The sum over the chunks is kept in
     * float32.
     */
    const folio_tensor *lse;
    /**
     * Factor of q·k. 0: 1 / sqrt(P + R).
     */
    float sm_scale;
    /**
     * A plain fp8 cache holds records / k_scale. 0: 1.
     */
    float k_scale;
} folio_mla_context_args;

/**
 * Picks the code for a problem.
 *
 * @copydetails folio_decode_create
 *
 * # Safety
 * As folio_decode_create.
 */
folio_status folio_mla_context_create(const folio_context *ctx,
                                      const folio_mla_context_desc *desc,
                                      folio_mla_context **out,
                                      folio_error *err);

/**
 * The memory that every plan within the desc can do with: two sums of T rows in float32, an unpacked chunk (unless
 * FOLIO_MLA_CONTEXT_STEPS), and plans.
 *
 * @copydetails folio_decode_workspace
 *
 * # Safety
 * As folio_decode_workspace.
 */
folio_status folio_mla_context_workspace(const folio_mla_context *handle,
                                         folio_workspace_info *out,
                                         folio_error *err);

/**
 * Takes over a step's batch: kv_len counts the context of a request and its new tokens, of which it has qo_len. Lengths
 * are in host memory; page ids (block_table, or kv_indices) are on the context's device, where runs read them: they stay
 * as they are until the last run of the plan, and those of int64 are not copied. For a graph, the batch has max_batch_size requests, some of them without tokens, and rows of the
 * outputs beyond the batch may be written.
 *
 * @copydetails folio_decode_plan
 *
 * # Safety
 * As folio_decode_plan.
 */
folio_status folio_mla_context_plan(folio_mla_context *handle,
                                    const folio_batch *batch,
                                    const folio_workspace *ws,
                                    void *stream,
                                    folio_error *err);

/**
 * Computes attention for the planned batch. Not with FOLIO_MLA_CONTEXT_STEPS.
 *
 * @copydetails folio_decode_run
 *
 * # Safety
 * As folio_decode_run.
 */
folio_status folio_mla_context_run(const folio_mla_context *handle,
                                   const folio_mla_context_args *args,
                                   void *stream,
                                   folio_error *err);

/**
 * The number of chunks of the current plan; of a graph's, as many as any plan has.
 *
 * # Safety
 * `handle` as for folio_mla_context_run; `out` is NULL or writable.
 */
folio_status folio_mla_context_num_chunks(const folio_mla_context *handle,
                                          uint32_t *out,
                                          folio_error *err);

/**
 * Context tokens of a chunk of the current plan: rows that folio_mla_context_gather writes. They are at most
 * max_chunk_tokens, and all of a graph's chunks have these.
 *
 * # Safety
 * As folio_mla_context_num_chunks.
 */
folio_status folio_mla_context_chunk_tokens(const folio_mla_context *handle,
                                            uint32_t chunk,
                                            uint32_t *out,
                                            folio_error *err);

/**
 * The first step of a run with FOLIO_MLA_CONTEXT_STEPS. Where no request has context it is the only one: new tokens over
 * themselves, and o is written. Else it starts the sum of the chunks. Then, for every chunk in turn, folio_mla_context_gather,
 * the caller's products of context_latent with its weights to context_k_nope and context_v, and folio_mla_context_attend; the
 * last of these also attends the new tokens over themselves, and writes o. All steps of a run have the same args but for the context's
 * tensors, and no other run of the plan comes between them.
 *
 * @copydetails folio_decode_run
 *
 * # Safety
 * As folio_decode_run.
 */
folio_status folio_mla_context_new_tokens(const folio_mla_context *handle,
                                          const folio_mla_context_args *args,
                                          void *stream,
                                          folio_error *err);

/**
 * Copies a chunk's records to context_latent and context_rope, in the type of the desc.
 *
 * @param chunk the chunk's number, below that of folio_mla_context_num_chunks
 *
 * @copydetails folio_mla_context_new_tokens
 *
 * # Safety
 * As folio_decode_run.
 */
folio_status folio_mla_context_gather(const folio_mla_context *handle,
                                      uint32_t chunk,
                                      const folio_mla_context_args *args,
                                      void *stream,
                                      folio_error *err);

/**
 * Attends a chunk whose keys and values are in context_k_nope, context_rope and context_v; with the last one, new tokens over
 * themselves as well.
 *
 * @param chunk the chunk's number, below that of folio_mla_context_num_chunks
 *
 * @copydetails folio_mla_context_new_tokens
 *
 * # Safety
 * As folio_decode_run.
 */
folio_status folio_mla_context_attend(const folio_mla_context *handle,
                                      uint32_t chunk,
                                      const folio_mla_context_args *args,
                                      void *stream,
                                      folio_error *err);

/**
 * Name of the kernel that create picked for new tokens.
 *
 * @copydetails folio_decode_kernel
 *
 * # Safety
 * As folio_decode_kernel.
 */
const char *folio_mla_context_kernel(const folio_mla_context *handle);

/**
 * Ends a handle.
 *
 * @copydetails folio_decode_destroy
 *
 * # Safety
 * As folio_decode_destroy.
 */
void folio_mla_context_destroy(folio_mla_context *handle);

/** @} */

/**
 * @defgroup context_parallel Context parallelism
 * Several devices share the keys of every sequence: token t is on rank `t / interleave % world_size`. Folio computes on
 * one rank; what ranks tell each other is the caller's.
 * @{
 */

/**
 * All lse of a correction are in base 2 instead of base e.
 */
#define FOLIO_CP_LSE_BASE_2 1

/**
 * A chunk of every context, gathered from all ranks (an all-gather of what folio_mla_gather gave on each), to be put
 * request by request: vLLM's reorg_kvcache. A request's rows are those of rank 0, then of rank 1, and so on. They are not in
 * the order of their positions, which attention without a mask does not ask for. The output may not overlap others.
 */
typedef struct folio_cp_reorder_args {
    /**
     * sizeof(folio_cp_reorder_args).
     */
    uint32_t struct_size;
    /**
     * 0.
     */
    uint32_t flags;
    /**
     * `[world_size, rank_rows, width]` of any type but integers: as many rows of every rank. Of each request there are
     * as many as the first rank holds.
     */
    const folio_tensor *gathered;
    /**
     * Output: `[num_rows, width]` of gathered's type.
     */
    const folio_tensor *dst;
    /**
     * `[batch_size]` int32: tokens of each context, on all ranks.
     */
    const folio_tensor *context_lens;
    /**
     * `[batch_size + 1]` int32: rows of dst before each request. A row of the table of folio_mla_context_chunks, on the
     * context's device.
     */
    const folio_tensor *cu_seq_lens;
    /**
     * `[batch_size + 1]` int32: rows of a rank before each request. As cu_seq_lens.
     */
    const folio_tensor *cu_padded_lens;
    /**
     * Tokens of a rank before the chunk: a number of seq_starts of folio_mla_context_chunks.
     */
    uint32_t local_start;
    /**
     * As in folio_cp_local_lengths_args.
     */
    uint32_t interleave;
} folio_cp_reorder_args;

/**
 * One rank's output over the keys that it holds, to be scaled by its share of the softmax over all keys. The sum of
 * all ranks' scaled outputs (an all-reduce or a reduce-scatter) is the output over all keys. An lse of -inf, +inf or
 * NaN is that of a rank without keys, whose output counts for nothing, whatever it is: it gives 0.
 *
 * o_out may be o itself, with the same address and the same strides, and else overlaps nothing.
 */
typedef struct folio_cp_correct_args {
    /**
     * sizeof(folio_cp_correct_args).
     */
    uint32_t struct_size;
    /**
     * FOLIO_CP_LSE_BASE_2 or 0.
     */
    uint32_t flags;
    /**
     * `[world_size, num_tokens, num_heads]` float32, of all ranks; strides are free, so `[world_size, num_heads,
     * num_tokens]` will do by its strides.
     */
    const folio_tensor *lse_all;
    /**
     * `[num_tokens, num_heads, head_dim]` float32, float16 or bfloat16.
     */
    const folio_tensor *o;
    /**
     * Output: as o; may be o itself.
     */
    const folio_tensor *o_out;
    /**
     * Output: `[num_tokens, num_heads]` float32, the lse over all keys, -inf where there are none; or NULL.
     */
    const folio_tensor *lse_out;
    /**
     * Whose output it is, below world_size.
     */
    uint32_t rank;
    /**
     * 0.
     */
    uint32_t reserved;
} folio_cp_correct_args;

/**
 * Puts records that were gathered rank by rank request by request.
 *
 * On CUDA lengths are read by the kernel, and rows that do not exist are not written. The first call on a context
 * loads code and answers CAPTURE in a capture. Later ones can be captured: they are one launch each. On the CPU
 * lengths are checked, and the rows are complete on return.
 *
 * @param ctx the device
 * @param args tensors
 * @param stream CUDA stream, or NULL on the CPU
 * @param err report of a failure, or NULL
 * @return FOLIO_OK, or INVALID_ARGUMENT, INVALID_STRUCT_SIZE, UNKNOWN_FIELD, SHAPE, DTYPE, DEVICE_MISMATCH,
 *         CAPTURE, UNSUPPORTED, COMPILE, OUT_OF_MEMORY, DRIVER; then nothing was written
 *
 * # Safety
 * `ctx` is alive; the structs are readable, and the tensors' memory as the fields say. Concurrent use
 * is fine with different outputs.
 */
folio_status folio_cp_reorder(const folio_context *ctx,
                              const folio_cp_reorder_args *args,
                              void *stream,
                              folio_error *err);

/**
 * Scales one rank's output by its share of the softmax over all ranks' keys.
 *
 * On CUDA the first call on a context loads code and answers CAPTURE in a capture. Later ones can be captured: they
 * are one launch each. On the CPU the outputs are complete on return.
 *
 * @param ctx the device
 * @param args the output and all ranks' lse
 * @param stream CUDA stream, or NULL on the CPU
 * @param err report of a failure, or NULL
 * @return FOLIO_OK, or INVALID_ARGUMENT, INVALID_STRUCT_SIZE, UNKNOWN_FIELD, SHAPE, DTYPE, DEVICE_MISMATCH,
 *         CAPTURE, UNSUPPORTED, COMPILE, OUT_OF_MEMORY, DRIVER; then nothing was written
 *
 * # Safety
 * `ctx` is alive; the structs are readable, and the tensors' memory as the fields say. Concurrent use
 * is fine with different outputs.
 */
folio_status folio_cp_correct(const folio_context *ctx,
                              const folio_cp_correct_args *args,
                              void *stream,
                              folio_error *err);

/** @} */

/**
 * @defgroup tree Trees of draft tokens
 * What speculative decoding needs to verify a tree of draft tokens in one run: its masks, positions and links.
 * @{
 */

/**
 * A tree of draft tokens for each request, each token under its parent, and what is wanted of the trees. A token sees
 * the keys before the tree, its ancestors and itself (SpecInfer, Miao et al. 2024; Medusa, Cai et al. 2024). The masks
 * are those that runs take with the draft tokens' keys appended: kv_len is `prefix_lens + tree_size`.
 *
 * A token whose parent is -1 is a root. There may be several, as where the last verified token is not part of the tree.
 *
 * Outputs may be NULL. All tensors are contiguous.
 */
typedef struct folio_tree_mask_args {
    /**
     * sizeof(folio_tree_mask_args).
     */
    uint32_t struct_size;
    /**
     * 0.
     */
    uint32_t flags;
    /**
     * `[batch_size, tree_size]` int32, or `[num_tokens]` with qo_indptr: the parent of each token, counted from the first
     * token of its request, below the token's own index; -1 for a root.
     */
    const folio_tensor *parents;
    /**
     * `[batch_size]` int32: keys before the tree of each request, without any of its tokens. With those they are 2^31 - 1 at
     * most.
     */
    const folio_tensor *prefix_lens;
    /**
     * `[batch_size + 1]` int32, the qo_indptr of the batch: tokens before each request, for trees of different sizes. Tokens
     * behind the last offset are of no request. NULL: all trees have tree_size tokens.
     */
    const folio_tensor *qo_indptr;
    /**
     * Output: `[elements or more]` uint8 or bool, for FOLIO_MASK_CUSTOM_BYTES: `[tree_size, prefix_len + tree_size]` per
     * request, 1 or 0.
     */
    const folio_tensor *mask_bytes;
    /**
     * Output: `[elements or more]` uint8, for FOLIO_MASK_CUSTOM_BITS: the same in bits, and 0 up to the end of a byte.
     */
    const folio_tensor *mask_bits;
    /**
     * Output: `[batch_size, tree_size, tree_size]` uint8 or bool, or `[elements or more]` with qo_indptr: mask_bytes without the
     * keys before the tree. SGLang's QLEN_ONLY.
     */
    const folio_tensor *tree_mask;
    /**
     * Output: `[batch_size, tree_size, bytes]` uint8, or `[num_tokens, bytes]` with qo_indptr, of 1, 2 or 4 bytes, a bit for
     * every token of the tree: bit j of a little-endian number says whether the row sees token j. Trees have at most as many
     * tokens; where a qo_indptr on CUDA says otherwise, the tokens behind have no bits. SGLang's QLEN_ONLY_BITPACKING.
     */
    const folio_tensor *tree_bits;
    /**
     * Output: int32 or int64, as parents: the position of each token, prefix_len and the number of its ancestors.
     */
    const folio_tensor *positions;
    /**
     * Output: int32 or int64, as parents: the first child of each token, counted as parents are; -1 where it has none.
     * SGLang's retrive_next_token.
     */
    const folio_tensor *next_token;
    /**
     * Output: int32 or int64, as parents: the next token with the same parent (of a root: the next root), or -1. SGLang's
     * retrive_next_sibling.
     */
    const folio_tensor *next_sibling;
} folio_tree_mask_args;

/**
 * Makes masks, positions and links of trees of draft tokens from the parents of their tokens.
 *
 * On CUDA numbers are read by the kernel. There a token with a parent that does not stand before it is a root, and nothing is
 * written beyond a tensor. The first call on a context loads code and answers CAPTURE in a capture. Later ones can be
 * captured: they are one launch each. On the CPU such a parent is refused, and the outputs are complete on return.
 *
 * @param ctx the device
 * @param args tensors
 * @param stream CUDA stream, or NULL on the CPU
 * @param err report of a failure, or NULL
 * @return FOLIO_OK, or INVALID_ARGUMENT, INVALID_STRUCT_SIZE, UNKNOWN_FIELD, SHAPE, DTYPE, DEVICE_MISMATCH,
 *         CAPTURE, UNSUPPORTED, COMPILE, OUT_OF_MEMORY, DRIVER; then nothing was written
 *
 * # Safety
 * `ctx` is alive; the structs are readable, and the tensors' memory as the fields say. Concurrent use
 * is fine with different outputs.
 */
folio_status folio_tree_mask(const folio_context *ctx,
                             const folio_tree_mask_args *args,
                             void *stream,
                             folio_error *err);

/** @} */

/**
 * @defgroup index Indices of a batch
 * From what schedulers keep (block tables, tables of slots, lengths) to what attention and caches are given (kv_indptr,
 * kv_indices, slot_mapping), and back. Tensors are int32 or int64, each of its own, and lie on the context's device. A
 * number per request is `[batch_size]` or `[batch_size, 1]`.
 *
 * On the host lengths that do not fit are refused. On a device kernels read them: nothing waits for them, and what does
 * not fit the tensors is cut off. Every operator is one launch there, which a graph can capture.
 * @{
 */

/**
 * The request has no new tokens.
 */
#define FOLIO_ROW_INACTIVE 0

/**
 * The request has new tokens and encoder_len above 0: a prompt, or a part of it.
 */
#define FOLIO_ROW_PREFILL 1

/**
 * Any other request with new tokens.
 */
#define FOLIO_ROW_DECODE 2

/**
 * The slot of step i and branch t is entry `kv_len + i · topk + t`.
 */
#define FOLIO_DRAFT_STEP_MAJOR 0

/**
 * The slot of step i and branch t is entry `kv_len + t · num_steps + i`.
 */
#define FOLIO_DRAFT_BRANCH_MAJOR 1

/**
 * Every branch has whole pages: with `r = kv_len % page_size`, the slot of step i and branch t is entry
 * `kv_len - r + t · ceil((r + num_steps) / page_size) · page_size + r + i`.
 */
#define FOLIO_DRAFT_PAGED 2

/**
 * Lengths of a step, and what follows from them: vLLM's query_start_loc and seq_lens, SGLang's qo_indptr and kv_indptr,
 * and FastDeploy's lengths, of which seq_lens_this_time is qo_len, seq_lens_decoder is cached_len and seq_lens_encoder is
 * encoder_len. For cumulative lengths alone, give them as qo_len and take qo_indptr.
 *
 * Outputs may be longer than the batch, as those of CUDA graphs are: cumulative lengths then stay at their last value,
 * and the others are 0. At least one output is not NULL.
 */
typedef struct folio_batch_lengths_args {
    /**
     * sizeof(folio_batch_lengths_args).
     */
    uint32_t struct_size;
    /**
     * 0.
     */
    uint32_t flags;
    /**
     * `[batch_size]` new tokens of each request, 0 or more. A request without any is inactive. A negative number on a
     * device counts as 0.
     */
    const folio_tensor *qo_len;
    /**
     * `[batch_size]` tokens in the cache before the new ones, 0 or more; NULL: none; for kv_len and kv_indptr only.
     */
    const folio_tensor *cached_len;
    /**
     * `[batch_size]`: above 0 where new tokens are of a prompt; for row_kind, and only for it.
     */
    const folio_tensor *encoder_len;
    /**
     * Output: `[batch_size + 1 or more]` new tokens before each request; or NULL. An int32 sum beyond int32 is refused
     * on the host and saturates on a device.
     */
    const folio_tensor *qo_indptr;
    /**
     * Output: `[batch_size or more]` `cached_len + qo_len` of active requests and 0 of others; or NULL.
     */
    const folio_tensor *kv_len;
    /**
     * Output: `[batch_size + 1 or more]` the same summed up, as qo_indptr; or NULL.
     */
    const folio_tensor *kv_indptr;
    /**
     * Output: `[batch_size or more]` FOLIO_ROW_…; or NULL.
     */
    const folio_tensor *row_kind;
} folio_batch_lengths_args;

/**
 * A table of pages or slots, to be listed request by request: vLLM's block table as FlashInfer's kv_indptr, kv_indices
 * and last_page_len, and SGLang's req_to_token as its kv_indptr and kv_indices (create_flashinfer_kv_indices).
 *
 * Index n of a request stands for its tokens from `n · indices_page_size` on. It is the slot of the first of them (its
 * entry's id times page_size, plus its place in the page) divided by indices_page_size, rounded down. So pages may be
 * listed as they are, or as slots (indices_page_size 1), and a table of slots (page_size 1) may be listed as pages, if
 * the tokens of a page have neighbouring slots.
 *
 * A negative entry gives -1, and so does an index that the type of kv_indices cannot hold.
 */
typedef struct folio_kv_indices_args {
    /**
     * sizeof(folio_kv_indices_args).
     */
    uint32_t struct_size;
    /**
     * 0.
     */
    uint32_t flags;
    /**
     * `[rows, columns]` page ids, or slots where page_size is 1; rows may be strided. Without row_ids there is a row per
     * request, or more. Entries of tokens that are not listed are not read.
     */
    const folio_tensor *block_table;
    /**
     * `[batch_size]` row of each request, SGLang's req_pool_indices; NULL: its own number. One beyond the table is
     * refused on the host; on a device the request is empty.
     */
    const folio_tensor *row_ids;
    /**
     * `[batch_size]` tokens of each request. More than a row has entries for are refused on the host and cut off on a
     * device.
     */
    const folio_tensor *kv_len;
    /**
     * `[batch_size]` first token that is listed, 0 to kv_len; NULL: 0.
     */
    const folio_tensor *kv_start;
    /**
     * Output: `[batch_size + 1 or more]` indices before each request; beyond the batch, of all.
     */
    const folio_tensor *kv_indptr;
    /**
     * Output: `[capacity]`; what is left of it is not written. Too little room is refused on the host. On a device the
     * list ends there, and kv_indptr says so.
     */
    const folio_tensor *kv_indices;
    /**
     * Output: `[batch_size or more]` tokens in the last listed page, 0 where there is none; or NULL.
     */
    const folio_tensor *last_page_len;
    /**
     * Tokens per entry of block_table, 1 or more.
     */
    uint32_t page_size;
    /**
     * Tokens per index: a divisor or a multiple of page_size; 1: slots. 0: page_size.
     */
    uint32_t indices_page_size;
    /**
     * Only so many last tokens are listed, from the page of the first of them on. 0: all.
     */
    uint32_t window;
    /**
     * 0.
     */
    uint32_t reserved;
} folio_kv_indices_args;

/**
 * A list of pages or slots, to be turned into a block table.
 */
typedef struct folio_block_table_args {
    /**
     * sizeof(folio_block_table_args).
     */
    uint32_t struct_size;
    /**
     * 0.
     */
    uint32_t flags;
    /**
     * `[batch_size + 1]` indices before each request, from 0 on.
     */
    const folio_tensor *kv_indptr;
    /**
     * `[n]`.
     */
    const folio_tensor *kv_indices;
    /**
     * Output: `[batch_size or more, columns]`; rows may be strided. More indices than columns are refused on the host
     * and cut off on a device. An index that its type cannot hold, or a negative one, gives -1.
     */
    const folio_tensor *block_table;
    /**
     * What entries get that no index stands for, those of rows beyond the batch among them: -1, or what the host takes.
     */
    int32_t fill;
    /**
     * 0.
     */
    uint32_t reserved;
} folio_block_table_args;

/**
 * Where new tokens go: vLLM's and FastDeploy's slot_mapping and positions (get_position_ids_and_slot_mapping). The new
 * tokens of a request are its last ones: token i of them has position `kv_len - qo_len + i` and slot
 * `id · page_size + position % page_size`, where id is entry `position / page_size` of the request's row.
 *
 * A negative entry gives slot -1, and so does a slot that the type of slot_mapping cannot hold. Elements beyond the new
 * tokens become -1 in both outputs.
 */
typedef struct folio_slot_mapping_args {
    /**
     * sizeof(folio_slot_mapping_args).
     */
    uint32_t struct_size;
    /**
     * 0.
     */
    uint32_t flags;
    /**
     * As in folio_kv_indices_args.
     */
    const folio_tensor *block_table;
    /**
     * As in folio_kv_indices_args. On a device the tokens of a request without a row have slot -1.
     */
    const folio_tensor *row_ids;
    /**
     * `[batch_size + 1]` new tokens before each request, from 0 on; or NULL with qo_len.
     */
    const folio_tensor *qo_indptr;
    /**
     * `[batch_size]` new tokens of each request; or NULL with qo_indptr.
     */
    const folio_tensor *qo_len;
    /**
     * `[batch_size]` tokens of each request, the new ones included: qo_len or more, up to what a row has entries for. On
     * a device tokens outside have slot -1, and position -1 where it would be negative.
     */
    const folio_tensor *kv_len;
    /**
     * Output: `[num_tokens or more]`. Too little room is refused on the host and leaves tokens out on a device.
     */
    const folio_tensor *slot_mapping;
    /**
     * Output: as many; or NULL.
     */
    const folio_tensor *positions;
    /**
     * Tokens per entry of block_table, 1 or more.
     */
    uint32_t page_size;
    /**
     * 0.
     */
    uint32_t reserved;
} folio_slot_mapping_args;

/**
 * The lists of slots for all steps of a draft with branches: kv_indptr and kv_indices of SGLang's multi-step draft
 * decoding. Step s has a request per branch, `b · topk + t`. Its slots are those of the kv_len tokens of request b, then
 * those of the tokens that branch t drafted in steps 0 to s.
 *
 * A negative entry gives -1, and so does a slot that the type of kv_indices cannot hold.
 */
typedef struct folio_draft_kv_indices_args {
    /**
     * sizeof(folio_draft_kv_indices_args).
     */
    uint32_t struct_size;
    /**
     * 0.
     */
    uint32_t flags;
    /**
     * `[rows, columns]` slots; rows may be strided. Without row_ids there is a row per request, or more.
     */
    const folio_tensor *req_to_token;
    /**
     * As in folio_kv_indices_args.
     */
    const folio_tensor *row_ids;
    /**
     * `[batch_size]` tokens of each request, without drafts. Where the drafts end beyond the columns it is refused on the
     * host; on a device slots beyond them are -1.
     */
    const folio_tensor *kv_len;
    /**
     * Output: `[steps, batch_size · topk + 1 or more]` slots before each branch; beyond the batch, of all.
     */
    const folio_tensor *kv_indptr;
    /**
     * Output: `[steps, capacity]`, as kv_indices in folio_kv_indices_args.
     */
    const folio_tensor *kv_indices;
    /**
     * Branches of each request, 1 to 65535.
     */
    uint32_t topk;
    /**
     * Steps that branches have slots for: those of kv_indptr or more, up to 65535. 0: those of kv_indptr.
     */
    uint32_t num_steps;
    /**
     * Slots per page with FOLIO_DRAFT_PAGED; else 0.
     */
    uint32_t page_size;
    /**
     * Where drafted tokens stand in a row: FOLIO_DRAFT_…
     */
    int32_t slot_layout;
} folio_draft_kv_indices_args;

/**
 * Computes cumulative lengths and what else follows from the lengths of a step.
 *
 * On CUDA the kernel reads the lengths. The first call on a context
 * loads code and answers CAPTURE in a capture. Later ones can be captured: they are one launch each. On the CPU the
 * outputs are complete on return.
 *
 * @param ctx the device
 * @param args tensors and numbers
 * @param stream CUDA stream, or NULL on the CPU
 * @param err report of a failure, or NULL
 * @return FOLIO_OK, or INVALID_ARGUMENT, INVALID_STRUCT_SIZE, UNKNOWN_FIELD, SHAPE, DTYPE, DEVICE_MISMATCH,
 *         CAPTURE, UNSUPPORTED, COMPILE, OUT_OF_MEMORY, DRIVER; then nothing was written
 *
 * # Safety
 * `ctx` is alive; the structs are readable, and the tensors' memory as the fields say; outputs overlap nothing.
 * Concurrent use is fine with different outputs.
 */
folio_status folio_batch_lengths(const folio_context *ctx,
                                 const folio_batch_lengths_args *args,
                                 void *stream,
                                 folio_error *err);

/**
 * Lists the pages or slots of every request's tokens.
 *
 * On CUDA the kernel reads lengths and table. The first call on a context
 * loads code and answers CAPTURE in a capture. Later ones can be captured: they are one launch each. On the CPU the
 * outputs are complete on return.
 *
 * @param ctx the device
 * @param args tensors and numbers
 * @param stream CUDA stream, or NULL on the CPU
 * @param err report of a failure, or NULL
 * @return FOLIO_OK, or INVALID_ARGUMENT, INVALID_STRUCT_SIZE, UNKNOWN_FIELD, SHAPE, DTYPE, DEVICE_MISMATCH,
 *         CAPTURE, UNSUPPORTED, COMPILE, OUT_OF_MEMORY, DRIVER; then nothing was written
 *
 * # Safety
 * `ctx` is alive; the structs are readable, and the tensors' memory as the fields say; outputs overlap nothing.
 * Concurrent use is fine with different outputs.
 */
folio_status folio_kv_indices(const folio_context *ctx,
                              const folio_kv_indices_args *args,
                              void *stream,
                              folio_error *err);

/**
 * Makes a block table of a list.
 *
 * On CUDA the kernel reads the list. The first call on a context
 * loads code and answers CAPTURE in a capture. Later ones can be captured: they are one launch each. On the CPU the
 * outputs are complete on return.
 *
 * @param ctx the device
 * @param args tensors and numbers
 * @param stream CUDA stream, or NULL on the CPU
 * @param err report of a failure, or NULL
 * @return FOLIO_OK, or INVALID_ARGUMENT, INVALID_STRUCT_SIZE, UNKNOWN_FIELD, SHAPE, DTYPE, DEVICE_MISMATCH,
 *         CAPTURE, UNSUPPORTED, COMPILE, OUT_OF_MEMORY, DRIVER; then nothing was written
 *
 * # Safety
 * `ctx` is alive; the structs are readable, and the tensors' memory as the fields say; outputs overlap nothing.
 * Concurrent use is fine with different outputs.
 */
folio_status folio_block_table(const folio_context *ctx,
                               const folio_block_table_args *args,
                               void *stream,
                               folio_error *err);

/**
 * Finds the slots and positions of new tokens.
 *
 * On CUDA the kernel reads lengths and table. The first call on a context
 * loads code and answers CAPTURE in a capture. Later ones can be captured: they are one launch each. On the CPU the
 * outputs are complete on return.
 *
 * @param ctx the device
 * @param args tensors and numbers
 * @param stream CUDA stream, or NULL on the CPU
 * @param err report of a failure, or NULL
 * @return FOLIO_OK, or INVALID_ARGUMENT, INVALID_STRUCT_SIZE, UNKNOWN_FIELD, SHAPE, DTYPE, DEVICE_MISMATCH,
 *         CAPTURE, UNSUPPORTED, COMPILE, OUT_OF_MEMORY, DRIVER; then nothing was written
 *
 * # Safety
 * `ctx` is alive; the structs are readable, and the tensors' memory as the fields say; outputs overlap nothing.
 * Concurrent use is fine with different outputs.
 */
folio_status folio_slot_mapping(const folio_context *ctx,
                                const folio_slot_mapping_args *args,
                                void *stream,
                                folio_error *err);

/**
 * Lists the slots of every branch of a draft for each of its steps.
 *
 * On CUDA the kernel reads lengths and table. The first call on a context
 * loads code and answers CAPTURE in a capture. Later ones can be captured: they are one launch each. On the CPU the
 * outputs are complete on return.
 *
 * @param ctx the device
 * @param args tensors and numbers
 * @param stream CUDA stream, or NULL on the CPU
 * @param err report of a failure, or NULL
 * @return FOLIO_OK, or INVALID_ARGUMENT, INVALID_STRUCT_SIZE, UNKNOWN_FIELD, SHAPE, DTYPE, DEVICE_MISMATCH,
 *         CAPTURE, UNSUPPORTED, COMPILE, OUT_OF_MEMORY, DRIVER; then nothing was written
 *
 * # Safety
 * `ctx` is alive; the structs are readable, and the tensors' memory as the fields say; outputs overlap nothing.
 * Concurrent use is fine with different outputs.
 */
folio_status folio_draft_kv_indices(const folio_context *ctx,
                                    const folio_draft_kv_indices_args *args,
                                    void *stream,
                                    folio_error *err);

/** @} */

/**
 * @defgroup figures Figures
 * Pure functions of numbers on the host: tokens of ranks and of chunks, and what the planners of other libraries make of
 * a batch. All arrays are the caller's, with their capacities, and lie on the host.
 * @{
 */

/**
 * Every decode has as many query rows as the first request.
 */
#define FOLIO_SPLIT_UNIFORM 1

/**
 * Tokens that ranks of decode context parallelism hold of sequences: the token at position t is on rank
 * `t / interleave % world_size` (vLLM's get_dcp_local_seq_lens).
 */
typedef struct folio_cp_local_lengths_args {
    /**
     * sizeof(folio_cp_local_lengths_args).
     */
    uint32_t struct_size;
    /**
     * 0.
     */
    uint32_t flags;
    /**
     * Number of ranks, 1 or more.
     */
    uint32_t world_size;
    /**
     * Tokens that are dealt to a rank at a time. 0: 1.
     */
    uint32_t interleave;
    /**
     * The rank whose lengths are wanted; -1: all ranks'.
     */
    int32_t rank;
    /**
     * Sequences.
     */
    uint32_t num_lengths;
    /**
     * `[num_lengths]` tokens of each, 0 or more.
     */
    const int32_t *lengths;
    /**
     * Output: `[num_lengths]`; for all ranks `[num_lengths, world_size]`.
     */
    int32_t *out;
    /**
     * Numbers that out has room for.
     */
    uint64_t capacity;
} folio_cp_local_lengths_args;

/**
 * Contexts that are attended chunk by chunk, in a workspace of so many tokens: vLLM's chunked prefill metadata. Every
 * request with a context gets an equal share of the workspace, of whole pages. On several ranks a share is also a
 * whole number of rounds of `interleave · world_size` tokens, so that the chunks that ranks cut of what they hold are
 * those of the sequence.
 *
 * With cu_seq_lens (one rank) or cu_padded_lens, and seq_starts, a row of the tables is what folio_mla_gather takes.
 * All tables are NULL where only num_chunks is wanted.
 */
typedef struct folio_mla_context_chunks_args {
    /**
     * sizeof(folio_mla_context_chunks_args).
     */
    uint32_t struct_size;
    /**
     * 0.
     */
    uint32_t flags;
    /**
     * Requests.
     */
    uint32_t num_requests;
    /**
     * Tokens per page, 1 or more.
     */
    uint32_t page_size;
    /**
     * Ranks that share every context. 0: 1.
     */
    uint32_t world_size;
    /**
     * As in folio_cp_local_lengths_args.
     */
    uint32_t interleave;
    /**
     * Tokens of the workspace, on all ranks; folio_mla_context_tokens says how many vLLM takes.
     */
    uint64_t workspace_tokens;
    /**
     * `[num_requests]` tokens in the cache before the new ones, 0 or more.
     */
    const int32_t *context_lens;
    /**
     * Output: `[num_chunks, num_requests]` the first token of a chunk, counted on a rank; or NULL.
     */
    int32_t *seq_starts;
    /**
     * Output: `[num_chunks, num_requests + 1]` tokens of all ranks before each request, and of all requests; or NULL.
     */
    int32_t *cu_seq_lens;
    /**
     * Output: `[num_chunks, num_requests + 1]` tokens of a rank before each request, where every rank counts as many
     * as the first one; or NULL.
     */
    int32_t *cu_padded_lens;
    /**
     * Output: `[num_chunks]` most tokens of a request, of all ranks; or NULL.
     */
    int32_t *max_lens;
    /**
     * Chunks that the tables have room for.
     */
    uint32_t max_num_chunks;
    /**
     * 0.
     */
    uint32_t reserved;
    /**
     * Output: the number of chunks.
     */
    uint32_t *num_chunks;
    /**
     * Output: tokens of a chunk of one request, of all ranks; or NULL.
     */
    uint32_t *chunk_tokens;
} folio_mla_context_chunks_args;

/**
 * The plan of FlashMLA's dense decode kernel: what its get_mla_metadata computes, for hosts that drive that kernel.
 */
typedef struct folio_flashmla_metadata_args {
    /**
     * sizeof(folio_flashmla_metadata_args).
     */
    uint32_t struct_size;
    /**
     * 0.
     */
    uint32_t flags;
    /**
     * Requests.
     */
    uint32_t batch_size;
    /**
     * Multiprocessors of the device.
     */
    uint32_t num_sms;
    /**
     * Query rows of every request.
     */
    uint32_t q_len;
    /**
     * Query heads, a multiple of num_kv_heads.
     */
    uint32_t num_heads;
    /**
     * KV heads.
     */
    uint32_t num_kv_heads;
    /**
     * 0.
     */
    uint32_t reserved;
    /**
     * `[batch_size]` keys of each request, those of this step included.
     */
    const int32_t *seq_lens;
    /**
     * Output: `[num_sm_parts, 8]`: first request, last request, first block of 64 keys, block after the last, first
     * split, whether the first and whether the last request are split, 0. A part whose first request is after its last
     * one is idle.
     */
    int32_t *tile_scheduler_metadata;
    /**
     * Numbers that it has room for; `8 · num_sms` is always enough.
     */
    uint64_t metadata_capacity;
    /**
     * Output: `[batch_size + 1]` splits before each request, and all of them.
     */
    int32_t *num_splits;
    /**
     * Numbers that it has room for.
     */
    uint64_t num_splits_capacity;
    /**
     * Output: parts that the work is cut into.
     */
    uint32_t *num_sm_parts;
} folio_flashmla_metadata_args;

/**
 * Splits of the keys of decode requests as FastDeploy's Triton MLA backend makes them: one for each 256 keys.
 */
typedef struct folio_num_kv_splits_args {
    /**
     * sizeof(folio_num_kv_splits_args).
     */
    uint32_t struct_size;
    /**
     * 0.
     */
    uint32_t flags;
    /**
     * Requests.
     */
    uint32_t num_requests;
    /**
     * Most splits of a request. 0: 32.
     */
    uint32_t max_splits;
    /**
     * `[num_requests]` keys of each, 0 or more.
     */
    const int32_t *kv_lens;
    /**
     * Output: `[capacity]` splits of each request, 1 or more; 1 for what is not a request.
     */
    int32_t *out;
    /**
     * Numbers that out, and keys_per_split, have room for.
     */
    uint64_t capacity;
    /**
     * Output: `[capacity]` keys of a split, whole blocks of 32; split s has those from `s · keys` on, fewer or none at
     * the end. 0 for what is not a request. Or NULL.
     */
    int32_t *keys_per_split;
} folio_num_kv_splits_args;

/**
 * A batch whose decodes come first, cut where prefills begin: vLLM's split_decodes_and_prefills. All requests are
 * decodes where none has more rows than the threshold. Otherwise prefills begin at the first request with more rows, or
 * with none; with FOLIO_SPLIT_UNIFORM and a threshold above 1, at the first with another number of rows than the first
 * request, and all are prefills where that one has more rows than the threshold.
 */
typedef struct folio_split_decodes_and_prefills_args {
    /**
     * sizeof(folio_split_decodes_and_prefills_args).
     */
    uint32_t struct_size;
    /**
     * FOLIO_SPLIT_UNIFORM or 0.
     */
    uint32_t flags;
    /**
     * Requests.
     */
    uint32_t num_requests;
    /**
     * Most query rows of a decode.
     */
    uint32_t decode_threshold;
    /**
     * `[num_requests]` query rows of each, 0 or more.
     */
    const int32_t *query_lens;
    /**
     * Output: `[4]` decodes, prefills, query rows of decodes, query rows of prefills.
     */
    int32_t *out;
    /**
     * Numbers that out has room for, 4 or more.
     */
    uint64_t capacity;
} folio_split_decodes_and_prefills_args;

/**
 * Says how many tokens ranks of decode context parallelism hold of sequences.
 *
 * @param args lengths and output
 * @param err report of a failure, or NULL
 * @return FOLIO_OK, or INVALID_ARGUMENT, INVALID_STRUCT_SIZE, UNKNOWN_FIELD; then nothing was written
 *
 * # Safety
 * The struct and its arrays are as the fields say; the output overlaps nothing. Any thread, any time.
 */
folio_status folio_cp_local_lengths(const folio_cp_local_lengths_args *args,
                                    folio_error *err);

/**
 * Tokens of the workspace that vLLM takes for chunks of contexts: `min(max(8 · max_model_len, 4 · max_num_seqs ·
 * page_size), 65536)`, but at least `max_num_seqs · page_size`. Any thread, any time.
 *
 * @param max_model_len longest sequence
 * @param max_num_seqs most requests of a batch
 * @param page_size tokens per page
 * @return tokens
 */
uint64_t folio_mla_context_tokens(uint32_t max_model_len,
                                  uint32_t max_num_seqs,
                                  uint32_t page_size);

/**
 * Cuts contexts into chunks that fit a workspace.
 *
 * @param args contexts and tables
 * @param err report of a failure, or NULL
 * @return FOLIO_OK, or INVALID_ARGUMENT, INVALID_STRUCT_SIZE, UNKNOWN_FIELD; then nothing was written
 *
 * # Safety
 * The struct and its arrays are as the fields say; the outputs overlap nothing. Any thread, any time.
 */
folio_status folio_mla_context_chunks(const folio_mla_context_chunks_args *args,
                                      folio_error *err);

/**
 * Computes the plan of FlashMLA's dense decode kernel on the host.
 *
 * @param args lengths, sizes and outputs
 * @param err report of a failure, or NULL
 * @return FOLIO_OK, or INVALID_ARGUMENT, INVALID_STRUCT_SIZE, UNKNOWN_FIELD; then nothing was written
 *
 * # Safety
 * The struct and its arrays are as the fields say; the outputs overlap nothing. Any thread, any time.
 */
folio_status folio_flashmla_metadata(const folio_flashmla_metadata_args *args,
                                     folio_error *err);

/**
 * Says into how many splits FastDeploy's Triton MLA backend cuts the keys of requests.
 *
 * @param args lengths and outputs
 * @param err report of a failure, or NULL
 * @return FOLIO_OK, or INVALID_ARGUMENT, INVALID_STRUCT_SIZE, UNKNOWN_FIELD; then nothing was written
 *
 * # Safety
 * The struct and its arrays are as the fields say; the outputs overlap nothing. Any thread, any time.
 */
folio_status folio_num_kv_splits(const folio_num_kv_splits_args *args,
                                 folio_error *err);

/**
 * Says where the prefills of a batch begin.
 *
 * @param args lengths and output
 * @param err report of a failure, or NULL
 * @return FOLIO_OK, or INVALID_ARGUMENT, INVALID_STRUCT_SIZE, UNKNOWN_FIELD; then nothing was written
 *
 * # Safety
 * The struct and its arrays are as the fields say; the output overlaps nothing. Any thread, any time.
 */
folio_status folio_split_decodes_and_prefills(const folio_split_decodes_and_prefills_args *args,
                                              folio_error *err);

/**
 * Every request gets the most splits.
 */
#define FOLIO_BALANCED_KV_SPLITS_STATIC 1

/**
 * The model uses ALiBi.
 */
#define FOLIO_USE_CASCADE_ALIBI 1

/**
 * A layer has a sliding window.
 */
#define FOLIO_USE_CASCADE_SLIDING_WINDOW 2

/**
 * A layer attends locally.
 */
#define FOLIO_USE_CASCADE_LOCAL_ATTENTION 4

/**
 * Ranks share the keys.
 */
#define FOLIO_USE_CASCADE_CONTEXT_PARALLEL 8

/**
 * Splits of the keys of decode requests as SGLang's Triton backend makes them (get_num_kv_splits). Lengths within a
 * quarter of each other count as equal. Others are cut to about the shortest; and the more the fewer rows there are for
 * the multiprocessors. The larger of the two numbers counts.
 */
typedef struct folio_balanced_kv_splits_args {
    /**
     * sizeof(folio_balanced_kv_splits_args).
     */
    uint32_t struct_size;
    /**
     * FOLIO_BALANCED_KV_SPLITS_STATIC or 0.
     */
    uint32_t flags;
    /**
     * Requests.
     */
    uint32_t num_requests;
    /**
     * Rows of each request: branches of a draft. 0: 1.
     */
    uint32_t num_group;
    /**
     * Query heads, a multiple of num_kv_heads.
     */
    uint32_t num_heads;
    /**
     * KV heads.
     */
    uint32_t num_kv_heads;
    /**
     * Multiprocessors of the device. 0: every request gets the most splits.
     */
    uint32_t num_sms;
    /**
     * Most splits of a request. 0: 8.
     */
    uint32_t max_splits;
    /**
     * `[num_requests]` keys of each, 1 or more.
     */
    const int32_t *seq_lens;
    /**
     * Output: `[num_requests, num_group]`.
     */
    int32_t *out;
    /**
     * Numbers that out has room for.
     */
    uint64_t capacity;
} folio_balanced_kv_splits_args;

/**
 * vLLM's use_cascade_attention: whether its FlashAttention backend would attend a prefix that all requests share once.
 * folio_cascade decides by itself.
 */
typedef struct folio_use_cascade_args {
    /**
     * sizeof(folio_use_cascade_args).
     */
    uint32_t struct_size;
    /**
     * FOLIO_USE_CASCADE_…: each of them rules a cascade out.
     */
    uint32_t flags;
    /**
     * Requests.
     */
    uint32_t num_requests;
    /**
     * Keys that all of them share.
     */
    uint32_t common_prefix_len;
    /**
     * Query heads, a multiple of num_kv_heads.
     */
    uint32_t num_heads;
    /**
     * KV heads.
     */
    uint32_t num_kv_heads;
    /**
     * Multiprocessors of the device, 1 or more.
     */
    uint32_t num_sms;
    /**
     * 0.
     */
    uint32_t reserved;
    /**
     * `[num_requests]` query rows of each, 0 or more.
     */
    const int32_t *query_lens;
    /**
     * Output: 1: yes; 0: no.
     */
    uint32_t *out;
} folio_use_cascade_args;

/**
 * The order that vLLM's backends want a batch in (reorder_batch).
 *
 * Without context_lens, as in its first releases, decodes come first: requests with up to decode_threshold rows. The
 * last decodes change places with the first prefills.
 *
 * With context_lens, as in later ones (reorder_batch_to_split_decodes_and_prefills), decodes come first: requests with up
 * to decode_threshold rows and a context; then other requests with a context; then those without. Only requests that
 * stand in the wrong region move. Those of a region fill its free places in their order.
 */
typedef struct folio_reorder_batch_args {
    /**
     * sizeof(folio_reorder_batch_args).
     */
    uint32_t struct_size;
    /**
     * 0.
     */
    uint32_t flags;
    /**
     * Requests.
     */
    uint32_t num_requests;
    /**
     * Most query rows of a decode.
     */
    uint32_t decode_threshold;
    /**
     * `[num_requests]` query rows of each, 0 or more.
     */
    const int32_t *query_lens;
    /**
     * `[num_requests]` tokens in the cache before the new ones, 0 or more; or NULL.
     */
    const int32_t *context_lens;
    /**
     * Output: `[num_requests]`: where the request of each place stood before.
     */
    int32_t *order;
    /**
     * Numbers that order has room for.
     */
    uint64_t order_capacity;
    /**
     * Output: `[num_swaps, 2]` places to be swapped, one pair after the other, which makes the order; or NULL.
     */
    int32_t *swaps;
    /**
     * Numbers that swaps has room for; `2 · num_requests` is always enough.
     */
    uint64_t swaps_capacity;
    /**
     * Output: the number of pairs.
     */
    uint32_t *num_swaps;
} folio_reorder_batch_args;

/**
 * Says into how many splits SGLang cuts the keys of decode requests.
 *
 * @param args lengths, sizes and output
 * @param err report of a failure, or NULL
 * @return FOLIO_OK, or INVALID_ARGUMENT, INVALID_STRUCT_SIZE, UNKNOWN_FIELD; then nothing was written
 *
 * # Safety
 * The struct and its arrays are as the fields say; the output overlaps nothing. Any thread, any time.
 */
folio_status folio_balanced_kv_splits(const folio_balanced_kv_splits_args *args,
                                      folio_error *err);

/**
 * Says whether vLLM would attend a shared prefix once.
 *
 * @param args lengths, sizes and output
 * @param err report of a failure, or NULL
 * @return FOLIO_OK, or INVALID_ARGUMENT, INVALID_STRUCT_SIZE, UNKNOWN_FIELD; then nothing was written
 *
 * # Safety
 * The struct and its arrays are as the fields say; the output overlaps nothing. Any thread, any time.
 */
folio_status folio_use_cascade(const folio_use_cascade_args *args,
                               folio_error *err);

/**
 * Says in which order vLLM's backends want a batch.
 *
 * @param args lengths and outputs
 * @param err report of a failure, or NULL
 * @return FOLIO_OK, or INVALID_ARGUMENT, INVALID_STRUCT_SIZE, UNKNOWN_FIELD; then nothing was written
 *
 * # Safety
 * The struct and its arrays are as the fields say; the outputs overlap nothing. Any thread, any time.
 */
folio_status folio_reorder_batch(const folio_reorder_batch_args *args,
                                 folio_error *err);

/** @} */

/**
 * @defgroup table The table of functions
 * For hosts that load Folio instead of linking it.
 * @{
 */

/**
 * Every function of the library, for hosts that dlopen it: one dlsym of folio_get_api instead of one
 * per function. Slots are only ever appended, and none is NULL; ask for later ones with FOLIO_API_HAS.
 */
typedef struct folio_api {
    /**
     * sizeof(folio_api) of the library.
     */
    uint32_t struct_size;
    /**
     * FOLIO_ABI_VERSION of the library.
     */
    uint32_t abi_version;
    /**
     * folio_version
     */
    const char *(*version)(void);
    /**
     * folio_status_name
     */
    const char *(*status_name)(folio_status status);
    /**
     * folio_device_count
     */
    uint32_t (*device_count)(int32_t device_type);
    /**
     * folio_context_create
     */
    folio_status (*context_create)(const folio_context_desc *desc,
                                   folio_context **out,
                                   folio_error *err);
    /**
     * folio_context_destroy
     */
    void (*context_destroy)(folio_context *ctx);
    /**
     * folio_decode_create
     */
    folio_status (*decode_create)(const folio_context *ctx,
                                  const folio_decode_desc *desc,
                                  folio_decode **out,
                                  folio_error *err);
    /**
     * folio_decode_workspace
     */
    folio_status (*decode_workspace)(const folio_decode *handle,
                                     folio_workspace_info *out,
                                     folio_error *err);
    /**
     * folio_decode_plan
     */
    folio_status (*decode_plan)(folio_decode *handle,
                                const folio_batch *batch,
                                const folio_workspace *ws,
                                void *stream,
                                folio_error *err);
    /**
     * folio_decode_run
     */
    folio_status (*decode_run)(const folio_decode *handle,
                               const folio_attention_args *args,
                               void *stream,
                               folio_error *err);
    /**
     * folio_decode_kernel
     */
    const char *(*decode_kernel)(const folio_decode *handle);
    /**
     * folio_decode_destroy
     */
    void (*decode_destroy)(folio_decode *handle);
    /**
     * folio_prefill_create
     */
    folio_status (*prefill_create)(const folio_context *ctx,
                                   const folio_prefill_desc *desc,
                                   folio_prefill **out,
                                   folio_error *err);
    /**
     * folio_prefill_workspace
     */
    folio_status (*prefill_workspace)(const folio_prefill *handle,
                                      folio_workspace_info *out,
                                      folio_error *err);
    /**
     * folio_prefill_plan
     */
    folio_status (*prefill_plan)(folio_prefill *handle,
                                 const folio_batch *batch,
                                 const folio_workspace *ws,
                                 void *stream,
                                 folio_error *err);
    /**
     * folio_prefill_run
     */
    folio_status (*prefill_run)(const folio_prefill *handle,
                                const folio_attention_args *args,
                                void *stream,
                                folio_error *err);
    /**
     * folio_prefill_kernel
     */
    const char *(*prefill_kernel)(const folio_prefill *handle);
    /**
     * folio_prefill_destroy
     */
    void (*prefill_destroy)(folio_prefill *handle);
    /**
     * folio_kv_append
     */
    folio_status (*kv_append)(const folio_context *ctx,
                              const folio_kv_append_args *args,
                              void *stream,
                              folio_error *err);
    /**
     * folio_merge_state
     */
    folio_status (*merge_state)(const folio_context *ctx,
                                const folio_merge_state_args *args,
                                void *stream,
                                folio_error *err);
    /**
     * folio_merge_states
     */
    folio_status (*merge_states)(const folio_context *ctx,
                                 const folio_merge_states_args *args,
                                 void *stream,
                                 folio_error *err);
    /**
     * folio_mla_create
     */
    folio_status (*mla_create)(const folio_context *ctx,
                               const folio_mla_desc *desc,
                               folio_mla **out,
                               folio_error *err);
    /**
     * folio_mla_workspace
     */
    folio_status (*mla_workspace)(const folio_mla *handle,
                                  folio_workspace_info *out,
                                  folio_error *err);
    /**
     * folio_mla_plan
     */
    folio_status (*mla_plan)(folio_mla *handle,
                             const folio_batch *batch,
                             const folio_workspace *ws,
                             void *stream,
                             folio_error *err);
    /**
     * folio_mla_run
     */
    folio_status (*mla_run)(const folio_mla *handle,
                            const folio_mla_args *args,
                            void *stream,
                            folio_error *err);
    /**
     * folio_mla_kernel
     */
    const char *(*mla_kernel)(const folio_mla *handle);
    /**
     * folio_mla_destroy
     */
    void (*mla_destroy)(folio_mla *handle);
    /**
     * folio_mla_absorb_weights
     */
    folio_status (*mla_absorb_weights)(const folio_context *ctx,
                                       const folio_mla_absorb_weights_args *args,
                                       void *stream,
                                       folio_error *err);
    /**
     * folio_mla_absorb_q
     */
    folio_status (*mla_absorb_q)(const folio_context *ctx,
                                 const folio_mla_absorb_q_args *args,
                                 void *stream,
                                 folio_error *err);
    /**
     * folio_mla_project_o
     */
    folio_status (*mla_project_o)(const folio_context *ctx,
                                  const folio_mla_project_o_args *args,
                                  void *stream,
                                  folio_error *err);
    /**
     * folio_mla_up_project
     */
    folio_status (*mla_up_project)(const folio_context *ctx,
                                   const folio_mla_up_project_args *args,
                                   void *stream,
                                   folio_error *err);
    /**
     * folio_mla_append
     */
    folio_status (*mla_append)(const folio_context *ctx,
                               const folio_mla_append_args *args,
                               void *stream,
                               folio_error *err);
    /**
     * folio_mla_gather
     */
    folio_status (*mla_gather)(const folio_context *ctx,
                               const folio_mla_gather_args *args,
                               void *stream,
                               folio_error *err);
    /**
     * folio_mla_context_create
     */
    folio_status (*mla_context_create)(const folio_context *ctx,
                                       const folio_mla_context_desc *desc,
                                       folio_mla_context **out,
                                       folio_error *err);
    /**
     * folio_mla_context_workspace
     */
    folio_status (*mla_context_workspace)(const folio_mla_context *handle,
                                          folio_workspace_info *out,
                                          folio_error *err);
    /**
     * folio_mla_context_plan
     */
    folio_status (*mla_context_plan)(folio_mla_context *handle,
                                     const folio_batch *batch,
                                     const folio_workspace *ws,
                                     void *stream,
                                     folio_error *err);
    /**
     * folio_mla_context_run
     */
    folio_status (*mla_context_run)(const folio_mla_context *handle,
                                    const folio_mla_context_args *args,
                                    void *stream,
                                    folio_error *err);
    /**
     * folio_mla_context_num_chunks
     */
    folio_status (*mla_context_num_chunks)(const folio_mla_context *handle,
                                           uint32_t *out,
                                           folio_error *err);
    /**
     * folio_mla_context_chunk_tokens
     */
    folio_status (*mla_context_chunk_tokens)(const folio_mla_context *handle,
                                             uint32_t chunk,
                                             uint32_t *out,
                                             folio_error *err);
    /**
     * folio_mla_context_new_tokens
     */
    folio_status (*mla_context_new_tokens)(const folio_mla_context *handle,
                                           const folio_mla_context_args *args,
                                           void *stream,
                                           folio_error *err);
    /**
     * folio_mla_context_gather
     */
    folio_status (*mla_context_gather)(const folio_mla_context *handle,
                                       uint32_t chunk,
                                       const folio_mla_context_args *args,
                                       void *stream,
                                       folio_error *err);
    /**
     * folio_mla_context_attend
     */
    folio_status (*mla_context_attend)(const folio_mla_context *handle,
                                       uint32_t chunk,
                                       const folio_mla_context_args *args,
                                       void *stream,
                                       folio_error *err);
    /**
     * folio_mla_context_kernel
     */
    const char *(*mla_context_kernel)(const folio_mla_context *handle);
    /**
     * folio_mla_context_destroy
     */
    void (*mla_context_destroy)(folio_mla_context *handle);
    /**
     * folio_mla_context_tokens
     */
    uint64_t (*mla_context_tokens)(uint32_t max_model_len,
                                   uint32_t max_num_seqs,
                                   uint32_t page_size);
    /**
     * folio_cp_local_lengths
     */
    folio_status (*cp_local_lengths)(const folio_cp_local_lengths_args *args,
                                     folio_error *err);
    /**
     * folio_mla_context_chunks
     */
    folio_status (*mla_context_chunks)(const folio_mla_context_chunks_args *args,
                                       folio_error *err);
    /**
     * folio_flashmla_metadata
     */
    folio_status (*flashmla_metadata)(const folio_flashmla_metadata_args *args,
                                      folio_error *err);
    /**
     * folio_num_kv_splits
     */
    folio_status (*num_kv_splits)(const folio_num_kv_splits_args *args,
                                  folio_error *err);
    /**
     * folio_split_decodes_and_prefills
     */
    folio_status (*split_decodes_and_prefills)(const folio_split_decodes_and_prefills_args *args,
                                               folio_error *err);
    /**
     * folio_cp_reorder
     */
    folio_status (*cp_reorder)(const folio_context *ctx,
                               const folio_cp_reorder_args *args,
                               void *stream,
                               folio_error *err);
    /**
     * folio_cp_correct
     */
    folio_status (*cp_correct)(const folio_context *ctx,
                               const folio_cp_correct_args *args,
                               void *stream,
                               folio_error *err);
    /**
     * folio_cascade_create
     */
    folio_status (*cascade_create)(const folio_context *ctx,
                                   const folio_cascade_desc *desc,
                                   folio_cascade **out,
                                   folio_error *err);
    /**
     * folio_cascade_workspace
     */
    folio_status (*cascade_workspace)(const folio_cascade *handle,
                                      folio_workspace_info *out,
                                      folio_error *err);
    /**
     * folio_cascade_plan
     */
    folio_status (*cascade_plan)(folio_cascade *handle,
                                 const folio_batch *batch,
                                 const folio_shared_prefixes *prefixes,
                                 const folio_workspace *ws,
                                 void *stream,
                                 folio_error *err);
    /**
     * folio_cascade_run
     */
    folio_status (*cascade_run)(const folio_cascade *handle,
                                const folio_attention_args *args,
                                void *stream,
                                folio_error *err);
    /**
     * folio_cascade_shares
     */
    folio_status (*cascade_shares)(const folio_cascade *handle,
                                   uint32_t *out,
                                   folio_error *err);
    /**
     * folio_cascade_kernel
     */
    const char *(*cascade_kernel)(const folio_cascade *handle);
    /**
     * folio_cascade_destroy
     */
    void (*cascade_destroy)(folio_cascade *handle);
    /**
     * folio_find_shared_prefixes
     */
    folio_status (*find_shared_prefixes)(const folio_find_shared_prefixes_args *args,
                                         folio_error *err);
    /**
     * folio_merge_varlen
     */
    folio_status (*merge_varlen)(const folio_context *ctx,
                                 const folio_merge_varlen_args *args,
                                 void *stream,
                                 folio_error *err);
    /**
     * folio_kv_copy
     */
    folio_status (*kv_copy)(const folio_context *ctx,
                            const folio_kv_copy_args *args,
                            void *stream,
                            folio_error *err);
    /**
     * folio_tree_mask
     */
    folio_status (*tree_mask)(const folio_context *ctx,
                              const folio_tree_mask_args *args,
                              void *stream,
                              folio_error *err);
    /**
     * folio_kv_gather
     */
    folio_status (*kv_gather)(const folio_context *ctx,
                              const folio_kv_gather_args *args,
                              void *stream,
                              folio_error *err);
    /**
     * folio_balanced_kv_splits
     */
    folio_status (*balanced_kv_splits)(const folio_balanced_kv_splits_args *args,
                                       folio_error *err);
    /**
     * folio_use_cascade
     */
    folio_status (*use_cascade)(const folio_use_cascade_args *args,
                                folio_error *err);
    /**
     * folio_reorder_batch
     */
    folio_status (*reorder_batch)(const folio_reorder_batch_args *args,
                                  folio_error *err);
    /**
     * folio_batch_lengths
     */
    folio_status (*batch_lengths)(const folio_context *ctx,
                                  const folio_batch_lengths_args *args,
                                  void *stream,
                                  folio_error *err);
    /**
     * folio_kv_indices
     */
    folio_status (*kv_indices)(const folio_context *ctx,
                               const folio_kv_indices_args *args,
                               void *stream,
                               folio_error *err);
    /**
     * folio_block_table
     */
    folio_status (*block_table)(const folio_context *ctx,
                                const folio_block_table_args *args,
                                void *stream,
                                folio_error *err);
    /**
     * folio_slot_mapping
     */
    folio_status (*slot_mapping)(const folio_context *ctx,
                                 const folio_slot_mapping_args *args,
                                 void *stream,
                                 folio_error *err);
    /**
     * folio_draft_kv_indices
     */
    folio_status (*draft_kv_indices)(const folio_context *ctx,
                                     const folio_draft_kv_indices_args *args,
                                     void *stream,
                                     folio_error *err);
    /**
     * folio_rope_append
     */
    folio_status (*rope_append)(const folio_context *ctx,
                                const folio_rope_append_args *args,
                                void *stream,
                                folio_error *err);
    /**
     * folio_decode_append_run
     */
    folio_status (*decode_append_run)(const folio_decode *handle,
                                      const folio_rope_append_args *append,
                                      const folio_attention_args *args,
                                      void *stream,
                                      folio_error *err);
} folio_api;

/**
 * The table of this library, for a caller that was compiled with `abi_version` (FOLIO_ABI_VERSION of
 * its header); NULL where the two do not fit: another major version, or, while the major version is 0,
 * another minor one. Touches no driver, starts no thread, allocates nothing.
 *
 * Any thread, any time. The table lives as long as the process. Never dlclose the library.
 */
const folio_api *folio_get_api(uint32_t abi_version);

/** Whether the library behind a table has a slot that was added after the first release. */
#define FOLIO_API_HAS(api, slot) ((api)->struct_size >= offsetof(folio_api, slot) + sizeof((api)->slot))

/** @} */

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* FOLIO_FOLIO_H */
