"""The header's constants. Generated from folio.h by `python -m generator`; do not edit."""

from enum import IntEnum, IntFlag

__all__ = [
    "ABI_MAJOR",
    "ABI_MINOR",
    "ABI_VERSION",
    "Status",
    "Device",
    "ContextFlag",
    "LogLevel",
    "KvLayout",
    "KvStorage",
    "KvFormat",
    "PlanFlag",
    "BatchFlag",
    "RunFlag",
    "MaskMode",
    "MlaCacheFormat",
    "MlaContextFlag",
    "MlaRopeFlag",
    "RopeFlag",
    "MergeFlag",
    "CpFlag",
    "RowKind",
    "SlotLayout",
    "SplitFlag",
    "BalancedKvSplitsFlag",
    "UseCascadeFlag",
]

#: Major version of the ABI. While it is 0, every minor version may break.
ABI_MAJOR = 0

#: Minor version of the ABI.
ABI_MINOR = 1

#: `(major << 16) | minor` of this header.
ABI_VERSION = 1


class Status(IntEnum):
    """What a call answers: 0 is success."""

    OK = 0
    """Success."""

    ERR_INVALID_ARGUMENT = 1
    """A value is outside what the field accepts."""

    ERR_INVALID_STRUCT_SIZE = 2
    """struct_size is smaller than the struct's first version, not a multiple of its alignment, or not plausible."""

    ERR_UNKNOWN_FIELD = 3
    """A flag or a field beyond what this library knows is not zero."""

    ERR_SHAPE = 4
    """A tensor's rank, extents, strides or alignment do not fit."""

    ERR_DTYPE = 5
    """A tensor's element type does not fit."""

    ERR_DEVICE_MISMATCH = 6
    """A tensor or a stream belongs to another device or to another CUDA context."""

    ERR_WORKSPACE_TOO_SMALL = 7
    """The workspace is missing, misaligned or smaller than needed."""

    ERR_NOT_PLANNED = 8
    """run before a successful plan."""

    ERR_CAPTURE = 9
    """The call may not be captured in a CUDA graph."""

    ERR_UNSUPPORTED = 50
    """Legal, but this library, build or device has no code for it."""

    ERR_NO_DEVICE = 51
    """There is no such device."""

    ERR_NO_DRIVER = 52
    """The CUDA driver library is missing, incomplete or a stub."""

    ERR_DRIVER_TOO_OLD = 53
    """The CUDA driver is older than this library needs."""

    ERR_COMPILE = 54
    """A kernel variant could not be compiled."""

    ERR_OUT_OF_MEMORY = 100
    """Host or device memory ran out."""

    ERR_DRIVER = 101
    """The CUDA driver reported a failure, perhaps that of an earlier kernel."""

    ERR_INTERNAL = 200
    """A bug in Folio. The object of the call is unusable afterwards and can still be destroyed; outputs may have been
    written. Where the bug was a panic, its message is on stderr too."""


class Device(IntEnum):
    """Where memory is."""

    CPU = 1
    """Host memory (DLPack's kDLCPU)."""

    CUDA = 2
    """Memory of a CUDA device (kDLCUDA)."""

    CUDA_HOST = 3
    """Page-locked host memory (kDLCUDAHost); treated as host memory, but for what `kv_copy` says."""


class ContextFlag(IntFlag):
    """Flags of a context."""

    REFERENCE = 1
    """Compute in float64, one key after the other: the oracle that Folio's own tests compare with. CPU only."""


class LogLevel(IntEnum):
    """Levels of messages."""

    ERROR = 1
    """Messages about failures that no status reports."""

    WARNING = 2
    """Also messages about what works less well than it could."""

    INFO = 3
    """Also messages about what was chosen."""


class KvLayout(IntEnum):
    """The order of a paged cache's dimensions."""

    NHD = 0
    """Cache dimensions `[num_pages, page_size, num_kv_heads, head_dim]`: FlashInfer's NHD."""

    HND = 1
    """Cache dimensions `[num_pages, num_kv_heads, page_size, head_dim]`: FlashInfer's HND."""


class KvStorage(IntEnum):
    """How keys and values lie in memory."""

    PAGED = 0
    """Keys and values lie in pages."""

    RAGGED = 1
    """Keys and values lie one request after the other: `[nnz_kv, num_kv_heads, head_dim]`."""


class KvFormat(IntEnum):
    """How rows of a cache are stored."""

    PLAIN = 0
    """Rows of a cache are elements one after the other: of the type of q (or key), or fp8 with a scale for all heads
    or for each."""

    TOKEN_HEAD_SCALES = 1
    """Rows of int8 (the default) or float8_e4m3 with a scale for each token and head, which the append computes: the
    largest magnitude of the row divided by 127 or 448, and 1e-6 at least (vLLM's int8_per_token_head and
    fp8_per_token_head). A row is its elements times its scale. k_scales and v_scales are float32 `[num_pages or
    more, page_size, num_kv_heads]` in both layouts, of any strides."""

    CHANNEL_SCALES = 2
    """Rows of int8 with a fixed scale for each element of a head (FastDeploy's cache_int8): the append stores x /
    scale, rounded to nearest even, within -127 to 127. k_scales are float32 `[num_kv_heads, head_dim_qk]`, v_scales
    `[num_kv_heads, head_dim_vo]`, with unit stride on the last dimension."""

    CHANNEL_ZERO_POINTS = 3
    """Rows of int4 with a fixed scale and zero point for each element of a head (FastDeploy's cache_int4_zp): the
    append stores x / scale + zero point, rounded to nearest even, within -8 to 7, in two's complement. (FastDeploy
    stores these numbers plus 8, in an order of its own.) Two elements share a byte, the first in its low bits: a
    row of a cache has head_dim / 2 bytes, as uint8 or as DLPack's int4 of two lanes. Scales and zero points are
    shaped as in `KvFormat.CHANNEL_SCALES`."""

    NVFP4 = 4
    """NVFP4 (FlashInfer's nvfp4_kv_quantize): rows of float4_e2m1 with a scale in float8_e4m3 for each 16 elements,
    and k_scale or v_scale as the global scale: x is element · scale · k_scale. The append stores the largest
    magnitude of 16 elements, divided by k_scale and by 6, as their scale. Two elements share a byte, the first in
    its low bits: a row of a cache has head_dim / 2 bytes, as uint8 or as DLPack's float4_e2m1fn of two lanes.
    k_scales and v_scales are uint8 or float8_e4m3 `[num_pages or more, page_size, num_kv_heads, head_dim / 16]`,
    its two middle dimensions in the order of kv_layout, with unit stride on the last dimension. Head dimensions are
    multiples of 16."""

    PACKED_KEYS = 5
    """vLLM's layout of reshape_and_cache, of types as in `KvFormat.PLAIN`: keys `[num_pages, num_kv_heads, head_dim_qk
    / x, page_size, x]` with x = 16 / bytes of an element and unit stride on the last dimension, values `[num_pages,
    num_kv_heads, head_dim_vo, page_size]` of any strides. Elements have 16 or 8 bits; head_dim_qk is a multiple of
    x. kv_layout is not read."""


class PlanFlag(IntFlag):
    """Flags of handles."""

    GRAPH = 1
    """Runs may be captured in a CUDA graph, and planned again for the same graph: see attention. No effect on the CPU,
    whose calls are complete when they return."""

    BATCH_INVARIANT = 2
    """A request's result does not depend on the other requests of its batch, to the bit."""

    FP8_PRODUCTS = 4
    """Decode, prefill and cascade: where q and the cache are float8_e4m3, probabilities may be rounded to float8_e4m3
    too, and their products with values summed in the matrix unit's own precision for up to 1440 keys at a time. A
    permission, which kernels that gain nothing by it do not use; without it probabilities keep 8 significant bits
    or more. The error: a probability is off by up to 1/16 of itself, at random, and an output is too small by up to
    1 % of its values' mean."""

    MASK_ITEMS = 8
    """Decode, prefill and cascade, without new_kv_dtype: runs may have `MaskMode.ITEMS`. On CUDA devices the workspace
    is larger by max_num_tokens · max_kv_len bits, for the mask that such a run makes. No effect on the CPU, which
    needs none."""


class BatchFlag(IntFlag):
    """Flags of batches."""

    WINDOW = 1
    """`Batch`.window_left is in force. Without the flag it must be 0 (or -1)."""


class RunFlag(IntFlag):
    """Flags of attention calls."""

    WINDOW = 1
    """window_left and window_right are in force. Without the flag both must be 0 (or -1)."""

    LSE_BASE_2 = 2
    """lse is in base 2 (FlashInfer's) instead of base e. Without lse it has no effect."""

    ALIBI_SQRT = 4
    """alibi_slopes take the square-root form."""

    MASK_SKIP_PREFIX = 8
    """Columns of custom_mask before a request's last qo_len keys are not read: every row sees those keys. It is
    SGLang's skip_prefix_custom_mask."""

    MASK_NEW_KEYS = 16
    """custom_mask has columns for a request's last qo_len keys only, `[qo_len, qo_len]` per request: every row sees
    the keys before them. Needs custom_mask_indptr."""

    MM_PREFIX_IN_WINDOW = 32
    """Window and chunks hold inside mm_prefix_ranges too."""

    BIAS_NEW_KEYS = 64
    """Columns of score_bias are a request's last qo_len keys; those before them get nothing. With
    `RunFlag.BIAS_REQUEST_ROWS` and a tensor of rank 2 it is vLLM's qq_bias. Needs score_bias."""

    BIAS_REQUEST_ROWS = 128
    """Rows of score_bias count within a request, so that all requests share them; without the flag they are the rows
    of q. Needs score_bias."""


class MaskMode(IntEnum):
    """Which keys a row sees."""

    CAUSAL = 0
    """Row i of a request sees key j iff j <= kv_len - qo_len + i: the last row sees the last key."""

    FULL = 1
    """Every row sees every key: encoders, cross attention."""

    CUSTOM_BYTES = 2
    """custom_mask holds a byte (uint8 or bool) per (row, key), row-major `[qo_len, kv_len]` per request, the requests
    one after the other; non-zero lets see."""

    CUSTOM_BITS = 3
    """custom_mask holds a bit per (row, key), little-endian in each byte; each request starts on a byte. It is
    FlashInfer's packed custom mask."""

    CAUSAL_BY_REQUEST = 4
    """Requests whose element of causal_requests is not 0 are causal, the others full."""

    ITEMS = 5
    """Multi-item scoring (FlashInfer): the keys before item_starts are a prefix, the others items one after the other.
    The row at position p sees key j iff `j <= p && (j < item_starts[request] || p - j <= item_positions[request, p
    - item_starts])`. On CUDA devices it is for handles with `PlanFlag.MASK_ITEMS`."""


class MlaCacheFormat(IntEnum):
    """Records of a cache of latent rows."""

    PLAIN = 0
    """Records are elements of kv_dtype one after another: kv_lora_rank latent ones, then qk_rope_head_dim rotary ones."""

    FP8_DS_MLA = 1
    """Records are vLLM's and FlashMLA's fp8_ds_mla of 656 bytes: 512 latent elements of float8_e4m3, four float32
    scales, one for each 128 of them, and 64 rotary elements of bfloat16."""


class MlaContextFlag(IntFlag):
    """Flags of MLA context handles."""

    STEPS = 4
    """The caller unpacks the context itself, for instance with quantised weights: runs are made in steps, and the
    workspace has no room for unpacked chunks."""


class MlaRopeFlag(IntFlag):
    """Flags of `mla_append`."""

    INTERLEAVED = 1
    """RoPE rotates neighbouring elements (GPT-J; DeepSeek). Without: an element of the first half and one of the
    second (GPT-NeoX)."""


class RopeFlag(IntFlag):
    """Flags of `rope_append`."""

    INTERLEAVED = 1
    """RoPE rotates neighbouring elements (GPT-J). Without: an element of the first half of rotary_dim and one of the
    second (GPT-NeoX)."""


class MergeFlag(IntFlag):
    """Flags of merges."""

    LSE_BASE_2 = 1
    """All lse of a merge are in base 2 instead of base e."""


class CpFlag(IntFlag):
    """Flags of `cp_correct`."""

    LSE_BASE_2 = 1
    """All lse of a correction are in base 2 instead of base e."""


class RowKind(IntEnum):
    """Kinds of requests in a step."""

    INACTIVE = 0
    """The request has no new tokens."""

    PREFILL = 1
    """The request has new tokens and encoder_len above 0: a prompt, or a part of it."""

    DECODE = 2
    """Any other request with new tokens."""


class SlotLayout(IntEnum):
    """Where drafted tokens stand in a row of slots."""

    STEP_MAJOR = 0
    """The slot of step i and branch t is entry `kv_len + i · topk + t`."""

    BRANCH_MAJOR = 1
    """The slot of step i and branch t is entry `kv_len + t · num_steps + i`."""

    PAGED = 2
    """Every branch has whole pages: with `r = kv_len % page_size`, the slot of step i and branch t is entry `kv_len -
    r + t · ceil((r + num_steps) / page_size) · page_size + r + i`."""


class SplitFlag(IntFlag):
    """Flags of `split_decodes_and_prefills`."""

    UNIFORM = 1
    """Every decode has as many query rows as the first request."""


class BalancedKvSplitsFlag(IntFlag):
    """Flags of `balanced_kv_splits`."""

    STATIC = 1
    """Every request gets the most splits."""


class UseCascadeFlag(IntFlag):
    """Flags of `use_cascade`: each rules a cascade out."""

    ALIBI = 1
    """The model uses ALiBi."""

    SLIDING_WINDOW = 2
    """A layer has a sliding window."""

    LOCAL_ATTENTION = 4
    """A layer attends locally."""

    CONTEXT_PARALLEL = 8
    """Ranks share the keys."""
