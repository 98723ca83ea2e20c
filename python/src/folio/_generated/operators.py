"""Operators and figures of the library, one function each. Generated from folio.h by `python -m generator`; do not edit."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from folio._calls import Call, Figure, context_call, operator
from folio._context import Context
from folio._generated import structs
from folio._generated.constants import (
    BalancedKvSplitsFlag,
    CpFlag,
    KvFormat,
    KvLayout,
    MergeFlag,
    MlaCacheFormat,
    MlaRopeFlag,
    RopeFlag,
    SlotLayout,
    SplitFlag,
    UseCascadeFlag,
)
from folio._generated.types import Batch
from folio._tensors import DtypeLike, StreamLike, TensorLike

__all__ = [
    "find_shared_prefixes",
    "kv_append",
    "kv_copy",
    "kv_gather",
    "rope_append",
    "merge_state",
    "merge_states",
    "merge_varlen",
    "mla_absorb_weights",
    "mla_absorb_q",
    "mla_project_o",
    "mla_up_project",
    "mla_append",
    "mla_gather",
    "cp_reorder",
    "cp_correct",
    "tree_mask",
    "batch_lengths",
    "kv_indices",
    "block_table",
    "slot_mapping",
    "draft_kv_indices",
    "cp_local_lengths",
    "mla_context_chunks",
    "flashmla_metadata",
    "num_kv_splits",
    "split_decodes_and_prefills",
    "balanced_kv_splits",
    "use_cascade",
    "reorder_batch",
]


@operator
def find_shared_prefixes(
    *,
    page_size: int,
    batch: Batch,
    request_begin: TensorLike,
    request_end: TensorLike,
    kv_len: TensorLike,
) -> Figure[int]:
    """Finds what neighbouring requests of a batch share, by their page tables: every set of requests with first pages
    in common that no larger set has, in the order that `Cascade.plan` takes. Whole pages count. An engine that
    sorts its batch by prefix finds all of them so.

    Which neighbouring requests of a batch have their first pages in common.

    Args:
        page_size: Tokens per page, 1 or more.
        batch: Lengths and page table, all on the host.
        request_begin: Output: `[capacity]`, as in `SharedPrefixes`.
        request_end: Output: `[capacity]`
        kv_len: Output: `[capacity]`

    Returns:
        num_prefixes: the number of prefixes.

    Raises:
        OutOfMemoryError
    """
    return Figure("folio_find_shared_prefixes", structs.FIND_SHARED_PREFIXES_ARGS, locals())


@operator
def kv_append(
    ctx: Context,
    *,
    key: TensorLike,
    value: TensorLike,
    k_cache: TensorLike,
    v_cache: TensorLike,
    slot_mapping: TensorLike,
    k_scales: TensorLike | None = None,
    v_scales: TensorLike | None = None,
    k_scale: float = 0,
    v_scale: float = 0,
    kv_layout: KvLayout | str = KvLayout.NHD,
    kv_dtype: DtypeLike | None = None,
    kv_format: KvFormat | str = KvFormat.PLAIN,
    k_zero_points: TensorLike | None = None,
    v_zero_points: TensorLike | None = None,
    stream: StreamLike | None = None,
) -> Call:
    """Writes new tokens to a paged cache, quantising to fp8 where the cache is fp8.

    On CUDA the first call on a context with given types loads code and answers `CaptureError` in a capture. Later
    ones can be captured: they are one launch each. On the CPU the tokens are in the cache on return.

    New tokens for a paged cache: vLLM's reshape_and_cache_flash. The caches may not overlap key or value.

    Args:
        ctx: the device.
        key: `[num_tokens or more, num_kv_heads, head_dim_qk]` float32, float16 or bfloat16; a slice of a fused QKV
            tensor will do.
        value: `[num_tokens or more, num_kv_heads, head_dim_vo]`, of key's type.
        k_cache: Output: the key cache, in kv_layout: `[num_pages, page_size, num_kv_heads, head_dim_qk]` or
            `[num_pages, num_kv_heads, page_size, head_dim_qk]`, or `[num_slots, num_kv_heads, head_dim_qk]`; of
            key's type or fp8.
        v_cache: Output: the value cache, as k_cache with head_dim_vo and strides of its own.
        slot_mapping: `[num_tokens]` int32 or int64: page · page_size + offset; a negative slot skips the token. Its
            length is the number of tokens. A slot beyond the cache is refused where it is on the host, and skips
            the token where it is on a device.
        k_scales: `[1]` or `[num_kv_heads]` float32, or None; fp8 caches only. Of formats with scales of their own:
            those, which the append writes where it computes them.
        v_scales: As k_scales, for values.
        k_scale: An fp8 cache gets `key / (k_scale · k_scales[head])`, rounded to nearest even, saturated. 0: 1.
        v_scale: As k_scale. 0: 1.
        kv_layout: `KvLayout.NHD` or `KvLayout.HND`.
        kv_dtype: What caches that are described as uint8 hold (an fp8 type, or one of kv_format); None: the tensors
            say it, and uint8 is the first type that a kv_format other than `KvFormat.PLAIN` has.
        kv_format: `KvFormat`: how the rows of the caches are stored.
        k_zero_points: `KvFormat.CHANNEL_ZERO_POINTS`: `[num_kv_heads, head_dim_qk]` float32. None otherwise.
        v_zero_points: `KvFormat.CHANNEL_ZERO_POINTS`: `[num_kv_heads, head_dim_vo]` float32. None otherwise.
        stream: CUDA stream; None: the current one of the tensors' framework. It is None on the CPU.

    Raises:
        InvalidArgumentError, UnknownFieldError, ShapeError, DtypeError, DeviceMismatchError, CaptureError,
        UnsupportedError, CompileError, OutOfMemoryError, DriverError
    """
    return context_call("folio_kv_append", ctx, structs.KV_APPEND_ARGS, locals())


@operator
def kv_copy(
    ctx: Context,
    *,
    k_src: TensorLike,
    k_dst: TensorLike,
    v_src: TensorLike | None = None,
    v_dst: TensorLike | None = None,
    page_pairs: TensorLike,
    stream: StreamLike | None = None,
) -> Call:
    """Copies pages of a cache.

    On CUDA it is one launch, for keys and values together. Pairs on the host travel in the kernel's parameters, 480
    to a launch: nothing is staged, and nothing waits. The first call on a context with pairs on the device, and the
    first with pairs on the host, load code and answer `CaptureError` in a capture. Later ones can be captured: a
    replay copies by the pairs that the device's memory holds then, or by the host's pairs of the capture. Memory in
    `Device.CUDA_HOST` tensors is read and written in stream order: it must stay until then. On the CPU the pages
    are copied on return.

    Pages to be copied: vLLM's copy_blocks and swap_blocks. A page is what an index of the first dimension covers:
    bytes that are copied as they are, whatever they hold (fp8, fp8_ds_mla records, scales). Within a page there are
    no gaps, and its dimensions may be in any order (NHD, HND) that is the same in src and dst; pages may be any
    distance apart.

    src and dst may be one tensor, as for copy-on-write and defragmentation. Then no page may be the source of one
    pair and the destination of another. No page may be the destination of two pairs. Pairs that break these rules
    are refused where they are on the host; where they are on a device, it is not defined which of the pages is
    copied.

    On CUDA each of src and dst may be in page-locked host memory (`Device.CUDA_HOST`): pages are swapped out and in
    by the same kernel, which reaches them over the bus.

    Args:
        ctx: the device.
        k_src: `[num_src_pages, ...]` of any type: keys, or a cache that has one tensor.
        k_dst: Output: `[num_dst_pages, ...]` of k_src's type; all but the first extent are k_src's.
        v_src: Values, copied by the same pairs in the same launch; as many pages as k_src. None: none.
        v_dst: Output: values, with as many pages as k_dst. None iff v_src is.
        page_pairs: `[n, 2]` int32 or int64: a page of src, and the page of dst that becomes its copy. A pair with a
            negative number is skipped. Pairs on the host are accepted by every context; they are read during the
            call, and a page beyond src or dst is refused. Where they are on a device, such a pair is skipped.
        stream: CUDA stream; None: the current one of the tensors' framework. It is None on the CPU.

    Raises:
        InvalidArgumentError, UnknownFieldError, ShapeError, DtypeError, DeviceMismatchError, CaptureError,
        UnsupportedError, CompileError, OutOfMemoryError, DriverError
    """
    return context_call("folio_kv_copy", ctx, structs.KV_COPY_ARGS, locals())


@operator
def kv_gather(
    ctx: Context,
    *,
    key: TensorLike,
    value: TensorLike,
    k_cache: TensorLike,
    v_cache: TensorLike,
    cu_seq_lens: TensorLike,
    seq_starts: TensorLike | None = None,
    block_table: TensorLike | None = None,
    kv_indptr: TensorLike | None = None,
    kv_indices: TensorLike | None = None,
    k_scales: TensorLike | None = None,
    v_scales: TensorLike | None = None,
    k_scale: float = 0,
    v_scale: float = 0,
    kv_layout: KvLayout | str = KvLayout.NHD,
    kv_dtype: DtypeLike | None = None,
    kv_format: KvFormat | str = KvFormat.PLAIN,
    k_zero_points: TensorLike | None = None,
    v_zero_points: TensorLike | None = None,
    stream: StreamLike | None = None,
) -> Call:
    """Copies keys and values of many requests from a paged cache to dense rows, and converts them to the rows' type.

    On CUDA lengths and page ids are read by the kernel: nothing waits for them. The first call on a context loads
    code and answers `CaptureError` in a capture. Later ones can be captured: they are one launch each. On the CPU
    the rows are complete on return.

    Keys and values of many requests to be copied from a paged cache to dense rows, and converted: what `kv_append`
    wrote, read back. vLLM's cp_gather_cache and gather_and_maybe_dequant_cache do it for caches of MLA. Page ids
    are a block_table, or kv_indptr and kv_indices.

    Lengths and page ids that are wrong are refused where they are on the host. Where they are on a device, rows
    whose page or token does not exist are not written. The outputs may not overlap other tensors.

    Args:
        ctx: the device.
        key: Output: `[num_rows, num_kv_heads, head_dim_qk]` float32, float16 or bfloat16, whatever the caches'
            type.
        value: Output: `[num_rows, num_kv_heads, head_dim_vo]`, of key's type.
        k_cache: The key cache, in kv_layout: `[num_pages, page_size, num_kv_heads, head_dim_qk]` or `[num_pages,
            num_kv_heads, page_size, head_dim_qk]`, or `[num_slots, num_kv_heads, head_dim_qk]`; float32, float16,
            bfloat16 or fp8.
        v_cache: The value cache, as k_cache with head_dim_vo and strides of its own.
        cu_seq_lens: `[batch_size + 1]` int32 or int64: request b gets rows `cu_seq_lens[b]` to `cu_seq_lens[b +
            1]`, at most num_rows. Rows of no request are left as they are.
        seq_starts: `[batch_size]` int32 or int64: the token of request b that its first row gets; None: 0.
        block_table: `[batch_size, columns]` int32 or int64 page ids; rows may be strided. Entries of tokens that
            are not asked for are not read.
        kv_indptr: `[batch_size + 1]` int32 or int64: the page ids of request b begin at `kv_indices[kv_indptr[b]]`.
        kv_indices: `[n]` int32 or int64 page ids.
        k_scales: `[1]` or `[num_kv_heads]` float32, or None; fp8 caches only. Of formats with scales of their own:
            those, as the append wrote or took them.
        v_scales: As k_scales, for values.
        k_scale: Keys of an fp8 cache are multiplied by `k_scale · k_scales[head]`. 0: 1.
        v_scale: As k_scale. 0: 1.
        kv_layout: `KvLayout.NHD` or `KvLayout.HND`.
        kv_dtype: What caches that are described as uint8 hold (an fp8 type, or one of kv_format); None: the tensors
            say it, and uint8 is the first type that a kv_format other than `KvFormat.PLAIN` has.
        kv_format: `KvFormat`: how the rows of the caches are stored.
        k_zero_points: `KvFormat.CHANNEL_ZERO_POINTS`: `[num_kv_heads, head_dim_qk]` float32. None otherwise.
        v_zero_points: `KvFormat.CHANNEL_ZERO_POINTS`: `[num_kv_heads, head_dim_vo]` float32. None otherwise.
        stream: CUDA stream; None: the current one of the tensors' framework. It is None on the CPU.

    Raises:
        InvalidArgumentError, UnknownFieldError, ShapeError, DtypeError, DeviceMismatchError, CaptureError,
        UnsupportedError, CompileError, OutOfMemoryError, DriverError
    """
    return context_call("folio_kv_gather", ctx, structs.KV_GATHER_ARGS, locals())


@operator
def rope_append(
    ctx: Context,
    *,
    flags: RopeFlag | int | str | Iterable[str] = 0,
    q: TensorLike | None = None,
    q_out: TensorLike | None = None,
    key: TensorLike,
    key_out: TensorLike | None = None,
    value: TensorLike,
    k_cache: TensorLike,
    v_cache: TensorLike,
    slot_mapping: TensorLike,
    k_scales: TensorLike | None = None,
    v_scales: TensorLike | None = None,
    q_norm_weight: TensorLike | None = None,
    k_norm_weight: TensorLike | None = None,
    positions: TensorLike | None = None,
    position_offsets: TensorLike | None = None,
    cos_sin_cache: TensorLike | None = None,
    k_scale: float = 0,
    v_scale: float = 0,
    kv_layout: KvLayout | str = KvLayout.NHD,
    kv_dtype: DtypeLike | None = None,
    rms_norm_eps: float = 0,
    rotary_dim: int = 0,
    rope_theta: float = 0,
    rope_scale: float = 0,
    low_freq_factor: float = 0,
    high_freq_factor: float = 0,
    old_context_len: int = 0,
    kv_format: KvFormat | str = KvFormat.PLAIN,
    k_zero_points: TensorLike | None = None,
    v_zero_points: TensorLike | None = None,
    stream: StreamLike | None = None,
) -> Call:
    """Normalises and rotates queries and keys of new tokens, and writes keys and values to a paged cache, quantising
    where the cache is fp8 or of a kv_format that does.

    On CUDA the first call on a context with given types loads code and answers `CaptureError` in a capture. Later
    ones can be captured: they are one launch each. On the CPU the results are there on return.

    New tokens of a model with query, key and value heads, from the projection to the attention: what vLLM's
    fused_rope_kvcache and FlashInfer's rope_quantize_fp8_append_paged_kv_cache do in one pass.

    Each row of q and key becomes, in float32 and in this order,
    1. with a norm weight: `x · weight / sqrt(mean(x²) + rms_norm_eps)`, over all head_dim_qk elements (RMS norm of each
       head, as Qwen3 has it);
    2. with RoPE: pair i of the first rotary_dim elements, (x, y), becomes `(x · cos_i - y · sin_i, y · cos_i + x · sin_i)`.
       Elements behind rotary_dim stay.

    Then it is rounded once for each output: to the tensor's type, or for the cache as `kv_append` does it, to fp8
    after the division by its scale or as kv_format says. Values are appended as `kv_append` does it. Without norm
    and RoPE queries and keys are copied.

    Angles come from cos_sin_cache, or are computed where rope_theta is not 0: pair i at position p has the angle `p
    · f_i`, with `f_i = rope_theta^(-2i / rotary_dim)` (Su et al., RoFormer, 2021), divided by rope_scale. With
    low_freq_factor, high_freq_factor and old_context_len, as Llama 3.1 has it (the reference code of Meta;
    rope_type llama3 of Hugging Face; apply_llama31_rope of FlashInfer), f_i becomes `s · f_i + (1 - s) · f_i /
    rope_scale`, where `s = (old_context_len · f_i / 2π - low_freq_factor) / (high_freq_factor - low_freq_factor)`,
    from 0 to 1. Computed angles are reduced to one turn without an error, whatever the position.

    On CUDA rows of more than 480 elements are refused with `UnsupportedError` where rotary_dim is no multiple of 16
    and they need more than 32 threads, one for each 16 elements that are rotated and for each 16 others.

    The outputs may not overlap other tensors, but for q_out and key_out, which may be q and key: with the same
    address and the same strides.

    Args:
        ctx: the device.
        flags: `RopeFlag.INTERLEAVED` or 0.
        q: `[num_tokens or more, num_qo_heads, head_dim_qk]` of key's type, or None: no queries. All its rows are
            computed, also those of tokens that are not cached. A slice of a fused QKV tensor will do, as for key
            and value.
        q_out: Output: the queries, as q; may be q itself. None: in place.
        key: `[num_tokens or more, num_kv_heads, head_dim_qk]` float32, float16 or bfloat16; head_dim_qk is 512 at
            most.
        key_out: Output: the first num_tokens keys, normalised and rotated, whatever their slots are; as key, which
            it may be. None: not wanted, and key stays as it is.
        value: `[num_tokens or more, num_kv_heads, head_dim_vo]`, of key's type.
        k_cache: Output: the key cache, in kv_layout: `[num_pages, page_size, num_kv_heads, head_dim_qk]` or
            `[num_pages, num_kv_heads, page_size, head_dim_qk]`, or `[num_slots, num_kv_heads, head_dim_qk]`; of
            key's type or fp8.
        v_cache: Output: the value cache, as k_cache with head_dim_vo and strides of its own.
        slot_mapping: `[num_tokens]` int32 or int64, as in `kv_append`: tokens with a negative slot are not cached.
        k_scales: `[1]` or `[num_kv_heads]` float32, or None; fp8 caches only. Of formats with scales of their own:
            those, which the append writes where it computes them.
        v_scales: As k_scales, for values.
        q_norm_weight: `[head_dim_qk]` float32 or of key's type; None: queries are not normalised.
        k_norm_weight: As q_norm_weight, for keys.
        positions: `[rows or more]` int32 or int64, where rows are those of q, or num_tokens without q. None: no
            RoPE, and the fields below it that are about RoPE are None and 0. A position beyond cos_sin_cache is
            refused where it is on the host; on a device the nearest one in the table is taken. Computed angles are
            there for every position.
        position_offsets: As positions, which they are added to; or None.
        cos_sin_cache: `[max_position, rotary_dim]` float32 or of key's type: the cosines of a position, one for
            each pair, and then the sines; or `[2, max_position, rotary_dim / 2]`. None: angles are computed.
        k_scale: An fp8 cache gets `key / (k_scale · k_scales[head])`, rounded to nearest even, saturated. 0: 1.
        v_scale: As k_scale. 0: 1.
        kv_layout: `KvLayout.NHD` or `KvLayout.HND`.
        kv_dtype: What caches that are described as uint8 hold (an fp8 type, or one of kv_format); None: the tensors
            say it, and uint8 is the first type that a kv_format other than `KvFormat.PLAIN` has.
        rms_norm_eps: Added to the mean of squares; positive with a norm weight, else 0.
        rotary_dim: Elements that are rotated, an even number; 0: the width of cos_sin_cache, or head_dim_qk.
        rope_theta: Base of the frequencies of computed angles, such as 10000; 0 with cos_sin_cache.
        rope_scale: Computed frequencies are divided by it. 0: 1.
        low_freq_factor: Llama 3.1: turns in old_context_len up to which rope_scale divides altogether. 0:
            rope_scale divides all.
        high_freq_factor: Llama 3.1: turns in old_context_len from which on rope_scale does not divide.
        old_context_len: Llama 3.1: tokens of the context before it was extended, such as 8192.
        kv_format: `KvFormat`: how the rows of the caches are stored.
        k_zero_points: `KvFormat.CHANNEL_ZERO_POINTS`: `[num_kv_heads, head_dim_qk]` float32. None otherwise.
        v_zero_points: `KvFormat.CHANNEL_ZERO_POINTS`: `[num_kv_heads, head_dim_vo]` float32. None otherwise.
        stream: CUDA stream; None: the current one of the tensors' framework. It is None on the CPU.

    Raises:
        InvalidArgumentError, UnknownFieldError, ShapeError, DtypeError, DeviceMismatchError, CaptureError,
        UnsupportedError, CompileError, OutOfMemoryError, DriverError
    """
    return context_call("folio_rope_append", ctx, structs.ROPE_APPEND_ARGS, locals())


@operator
def merge_state(
    ctx: Context,
    *,
    flags: MergeFlag | int | str | Iterable[str] = 0,
    v_a: TensorLike,
    s_a: TensorLike,
    v_b: TensorLike,
    s_b: TensorLike,
    v_out: TensorLike,
    s_out: TensorLike | None = None,
    mask: TensorLike | None = None,
    o_scale: float = 0,
    num_tokens_without_a: int = 0,
    stream: StreamLike | None = None,
) -> Call:
    """Merges two attention states.

    On CUDA the first merge on a context with given types loads code and answers `CaptureError` in a capture. Later
    ones can be captured: they are one launch each. On the CPU the outputs are complete on return.

    Two attention states (v, s) of the same rows, over disjoint sets of keys, to be merged: FlashInfer's
    merge_state, merge_state_in_place where v_out is v_a, and vLLM's merge_attn_states, whose prefix is state a. s
    is the lse. An s of -inf (or +inf, as FlashAttention-2 marks it, or NaN) is an empty state, whose v counts for
    nothing, whatever it is; two empty states give 0 and -inf. Beside an empty state the other one stays as it is.

    An output may be the input of its kind: v_out v_a or v_b, s_out s_a or s_b, with the same address and the same
    strides. Any other overlap of an output with another tensor, in part too, makes the outputs undefined. The rows
    of v have a unit last stride; all other strides are free, so that an lse of `[num_heads, num_tokens]` is given
    as `[num_tokens, num_heads]` with the strides 1 and num_tokens. Every lse has strides of its own.

    Args:
        ctx: the device.
        flags: `MergeFlag`
        v_a: `[num_tokens, num_heads, head_dim]` float32, float16 or bfloat16.
        s_a: `[num_tokens, num_heads]` float32, float16 or bfloat16.
        v_b: As v_a.
        s_b: As s_a, and of its type.
        v_out: Output: as v_a, and may be v_a or v_b itself; or in float8_e4m3 or float8_e5m2, which holds o /
            o_scale, saturated.
        s_out: Output: as s_a, in any of those types; may be s_a or s_b itself; or None.
        mask: `[num_tokens]` uint8 or bool, or None: a zero leaves the row of the outputs as it is.
        o_scale: Divisor of o, 2^-60 to 2^60; only for fp8 outputs. 0: 1.
        num_tokens_without_a: The last so many tokens have no state a: nothing of it is read, and the outputs are
            state b. In vLLM's terms num_tokens - prefill_tokens_with_context. At most num_tokens; 0: all tokens
            have both.
        stream: CUDA stream; None: the current one of the tensors' framework. It is None on the CPU.

    Raises:
        InvalidArgumentError, UnknownFieldError, ShapeError, DtypeError, DeviceMismatchError, CaptureError,
        UnsupportedError, CompileError, OutOfMemoryError, DriverError
    """
    return context_call("folio_merge_state", ctx, structs.MERGE_STATE_ARGS, locals())


@operator
def merge_states(
    ctx: Context,
    *,
    flags: MergeFlag | int | str | Iterable[str] = 0,
    v: TensorLike,
    s: TensorLike,
    v_out: TensorLike,
    s_out: TensorLike | None = None,
    o_scale: float = 0,
    stream: StreamLike | None = None,
) -> Call:
    """Merges n attention states per row.

    n attention states per row, over disjoint sets of keys, to be merged: FlashInfer's merge_states. No state gives
    0 and -inf. The outputs may not overlap the states. Empty states and strides as in `merge_state`.

    Args:
        ctx: the device.
        flags: `MergeFlag`
        v: `[num_tokens, n, num_heads, head_dim]` float32, float16 or bfloat16.
        s: `[num_tokens, n, num_heads]` float32, float16 or bfloat16.
        v_out: Output: `[num_tokens, num_heads, head_dim]` of the type of v, or in fp8 as in `merge_state`.
        s_out: Output: `[num_tokens, num_heads]` float32, float16 or bfloat16, or None.
        o_scale: Divisor of o, 2^-60 to 2^60; only for fp8 outputs. 0: 1.
        stream: CUDA stream; None: the current one of the tensors' framework. It is None on the CPU.

    Raises:
        InvalidArgumentError, UnknownFieldError, ShapeError, DtypeError, DeviceMismatchError, CaptureError,
        UnsupportedError, CompileError, OutOfMemoryError, DriverError
    """
    return context_call("folio_merge_states", ctx, structs.MERGE_STATES_ARGS, locals())


@operator
def merge_varlen(
    ctx: Context,
    *,
    flags: MergeFlag | int | str | Iterable[str] = 0,
    v: TensorLike,
    s: TensorLike,
    indptr: TensorLike,
    v_out: TensorLike,
    s_out: TensorLike | None = None,
    o_scale: float = 0,
    stream: StreamLike | None = None,
) -> Call:
    """Merges as many attention states per token as each has.

    As many attention states per token as each has, over disjoint sets of keys, to be merged: what split keys, or
    the levels of a cascade, leave where rows have different numbers of parts (FlashInfer's variable-length merge of
    states). Token t has the states `indptr[t]` to `indptr[t + 1]`, without the last. A token with none gives 0 and
    -inf, one with one state is that state. The outputs may not overlap the states. Empty states and strides as in
    `merge_state`.

    Args:
        ctx: the device.
        flags: `MergeFlag`
        v: `[num_states, num_heads, head_dim]` float32, float16 or bfloat16: the states of all tokens.
        s: `[num_states, num_heads]` float32, float16 or bfloat16.
        indptr: `[num_tokens + 1]` int32, contiguous, on the context's device: numbers from 0 to num_states, none
            below the one before it. On the CPU they are checked. On CUDA a token has those of its states that
            exist.
        v_out: Output: `[num_tokens, num_heads, head_dim]` of the type of v, or in fp8 as in `merge_state`.
        s_out: Output: `[num_tokens, num_heads]` float32, float16 or bfloat16, or None.
        o_scale: Divisor of o, 2^-60 to 2^60; only for fp8 outputs. 0: 1.
        stream: CUDA stream; None: the current one of the tensors' framework. It is None on the CPU.

    Raises:
        InvalidArgumentError, UnknownFieldError, ShapeError, DtypeError, DeviceMismatchError, CaptureError,
        UnsupportedError, CompileError, OutOfMemoryError, DriverError
    """
    return context_call("folio_merge_varlen", ctx, structs.MERGE_VARLEN_ARGS, locals())


@operator
def mla_absorb_weights(
    ctx: Context,
    *,
    kv_b_proj: TensorLike,
    w_uk: TensorLike | None = None,
    w_uv: TensorLike | None = None,
    stream: StreamLike | None = None,
) -> Call:
    """Copies the halves of kv_b_proj to weights of their own, once after a model is loaded.

    On CUDA the first copy between given types on a context, and the first projection of a type, whichever it is and
    of however many tokens, load code and answer `CaptureError` in a capture. Later ones can be captured. On the CPU
    the outputs are complete on return.

    The up-projection of keys and values, `kv_b_proj` in DeepSeek's models, and where its two halves go.

    H heads; P, V and L are the widths of a head's nope part, of its value and of the latent row, multiples of 8.
    All strides are free. w_uk and w_uv have the type of kv_b_proj, or any of the three where that is float32.

    The halves need not be copied: a tensor of shape [H, P, L] or [H, L, V] over the memory of kv_b_proj, with its
    strides, is a weight for the functions below.

    Args:
        ctx: the device.
        kv_b_proj: `[H·(P+V), L]` float32, float16 or bfloat16, (out, in) as a linear layer stores it: for each head
            the P rows of its W_UK, then the V rows of its W_UV.
        w_uk: Output: `[H, P, L]`, or None where w_uv is given.
        w_uv: Output: `[H, L, V]`, or None where w_uk is given.
        stream: CUDA stream; None: the current one of the tensors' framework. It is None on the CPU.

    Raises:
        InvalidArgumentError, UnknownFieldError, ShapeError, DtypeError, DeviceMismatchError, CaptureError,
        UnsupportedError, CompileError, OutOfMemoryError, DriverError
    """
    return context_call("folio_mla_absorb_weights", ctx, structs.MLA_ABSORB_WEIGHTS_ARGS, locals())


@operator
def mla_absorb_q(
    ctx: Context,
    *,
    q_nope: TensorLike,
    w_uk: TensorLike,
    q_latent: TensorLike,
    stream: StreamLike | None = None,
) -> Call:
    """Takes queries to the latent space: q_nope · W_UK, before attention over latent rows. Sums are float32, rounded
    to the type of q_latent once. No token is nothing to do.

    On the CPU every thread of the context allocates half a megabyte at its first projection, and keeps it.

    The absorption of W_UK into queries: `q_latent[t, h] = q_nope[t, h] · w_uk[h]`. All three tensors have one type.
    Rows of q_nope and q_latent have a unit last stride; all other strides are free, so that q_latent may be the
    first L columns of a wider query tensor.

    Args:
        ctx: the device.
        q_nope: `[num_tokens, H, P]` float16 or bfloat16; float32 too on the CPU.
        w_uk: `[H, P, L]`, any strides.
        q_latent: Output: `[num_tokens, H, L]`.
        stream: CUDA stream; None: the current one of the tensors' framework. It is None on the CPU.

    Raises:
        InvalidArgumentError, UnknownFieldError, ShapeError, DtypeError, DeviceMismatchError, CaptureError,
        UnsupportedError, CompileError, OutOfMemoryError, DriverError
    """
    return context_call("folio_mla_absorb_q", ctx, structs.MLA_ABSORB_Q_ARGS, locals())


@operator
def mla_project_o(
    ctx: Context,
    *,
    o_latent: TensorLike,
    w_uv: TensorLike,
    out: TensorLike,
    stream: StreamLike | None = None,
) -> Call:
    """Takes outputs of attention over latent rows to the values' space: o_latent · W_UV. Sums as in `mla_absorb_q`.

    The projection of latent outputs to values: `out[t, h] = o_latent[t, h] · w_uv[h]`. Types and strides as in
    `mla_absorb_q`; out may be a view of `[num_tokens, H·V]`.

    Args:
        ctx: the device.
        o_latent: `[num_tokens, H, L]` float16 or bfloat16; float32 too on the CPU.
        w_uv: `[H, L, V]`, any strides.
        out: Output: `[num_tokens, H, V]`.
        stream: CUDA stream; None: the current one of the tensors' framework. It is None on the CPU.

    Raises:
        InvalidArgumentError, UnknownFieldError, ShapeError, DtypeError, DeviceMismatchError, CaptureError,
        UnsupportedError, CompileError, OutOfMemoryError, DriverError
    """
    return context_call("folio_mla_project_o", ctx, structs.MLA_PROJECT_O_ARGS, locals())


@operator
def mla_up_project(
    ctx: Context,
    *,
    kv_c: TensorLike,
    w_uk: TensorLike | None = None,
    w_uv: TensorLike | None = None,
    k_nope: TensorLike | None = None,
    v: TensorLike | None = None,
    stream: StreamLike | None = None,
) -> Call:
    """Takes latent rows to keys and values of every head, as prefill attends to them. Sums as in `mla_absorb_q`.

    The up-projection of latent rows to keys and values, for attention in the form with heads of their own:
    `k_nope[t, h] = kv_c[t] · w_uk[h]ᵀ`, `v[t, h] = kv_c[t] · w_uv[h]`. Types and strides as in `mla_absorb_q`;
    k_nope may be the first P columns of a wider key tensor. Either output may be left out together with its weight.

    Args:
        ctx: the device.
        kv_c: `[num_tokens, L]` float16 or bfloat16; float32 too on the CPU.
        w_uk: `[H, P, L]`, any strides, or None.
        w_uv: `[H, L, V]`, any strides, or None.
        k_nope: Output: `[num_tokens, H, P]`, or None.
        v: Output: `[num_tokens, H, V]`, or None.
        stream: CUDA stream; None: the current one of the tensors' framework. It is None on the CPU.

    Raises:
        InvalidArgumentError, UnknownFieldError, ShapeError, DtypeError, DeviceMismatchError, CaptureError,
        UnsupportedError, CompileError, OutOfMemoryError, DriverError
    """
    return context_call("folio_mla_up_project", ctx, structs.MLA_UP_PROJECT_ARGS, locals())


@operator
def mla_append(
    ctx: Context,
    *,
    flags: MlaRopeFlag | int | str | Iterable[str] = 0,
    latent: TensorLike,
    rope: TensorLike | None = None,
    kv: TensorLike,
    kv_rope: TensorLike | None = None,
    slot_mapping: TensorLike,
    cos_sin_cache: TensorLike | None = None,
    positions: TensorLike | None = None,
    rope_out: TensorLike | None = None,
    q_rope: TensorLike | None = None,
    q_rope_out: TensorLike | None = None,
    k_scale: float = 0,
    cache_format: MlaCacheFormat | str = MlaCacheFormat.PLAIN,
    kv_dtype: DtypeLike | None = None,
    stream: StreamLike | None = None,
) -> Call:
    """Writes new tokens to a cache of latent records, quantising them where the cache is fp8, and rotating rotary
    elements where a table of angles is given.

    On CUDA the first call on a context loads code and answers `CaptureError` in a capture. Later ones can be
    captured: they are one launch each. On the CPU the tokens are in the cache on return.

    New tokens for a cache of latent records: vLLM's concat_and_cache_mla, and concat_and_cache_mla_rope_fused where
    cos_sin_cache is given.

    A record of an fp8_ds_mla cache gets, for each 128 latent elements, the scale `max(max |x| / 448, FLT_MIN)` and
    `x / scale` in e4m3. That is what vLLM writes, but for the rotary elements of float16 tokens: they are converted
    to bfloat16, where vLLM keeps their bits.

    RoPE: pair i of a row, (x, y), becomes `(x · cos_i - y · sin_i, y · cos_i + x · sin_i)`, computed in float32 and
    rounded to the tokens' type, before anything is stored. Rows of q_rope and rope_out are rotated whatever the
    slot.

    The outputs may not overlap other tensors, but for rope_out and q_rope_out, which may be rope and q_rope: with
    the same address and the same strides.

    Args:
        ctx: the device.
        flags: `MlaRopeFlag.INTERLEAVED` or 0.
        latent: `[num_tokens or more, kv_lora_rank]` or `[num_tokens or more, 1, kv_lora_rank]` float32, float16 or
            bfloat16.
        rope: `[num_tokens or more, qk_rope_head_dim]` or `[num_tokens or more, 1, qk_rope_head_dim]`, of latent's
            type; None where records have no rotary part.
        kv: Output: `[num_pages, page_size, kv_lora_rank + qk_rope_head_dim]` of latent's type or fp8; with kv_rope
            `[num_pages, page_size, kv_lora_rank]`. fp8_ds_mla: `[num_pages, page_size, 656]` uint8, where address
            and strides are multiples of 4.
        kv_rope: Output: `[num_pages, page_size, qk_rope_head_dim]` of kv's type, where the rotary part of the
            records has a tensor of its own; or None.
        slot_mapping: `[num_tokens]` int32 or int64: page · page_size + offset; a negative slot skips the token. Its
            length is the number of tokens. A slot beyond the cache is refused where it is on the host, and skips
            the token where it is on a device.
        cos_sin_cache: `[max_position, qk_rope_head_dim]` float32 or of latent's type: the cosines of a position,
            and then the sines; None: no RoPE, and the fields below it are None too.
        positions: `[num_tokens]` int32 or int64. One beyond cos_sin_cache is refused where it is on the host; where
            it is on a device nothing is written for the token.
        rope_out: Output: the rotated rope, `[num_tokens or more, qk_rope_head_dim]` as rope; may be rope itself; or
            None.
        q_rope: `[num_tokens or more, num_heads, qk_rope_head_dim]` of latent's type, to be rotated; in place where
            q_rope_out is None; or None.
        q_rope_out: Output: the rotated q_rope, as it; may be q_rope itself; or None.
        k_scale: A plain fp8 cache gets `x / k_scale`, rounded to nearest even, saturated. 0: 1.
        cache_format: `MlaCacheFormat`
        kv_dtype: What a plain cache that is described as uint8 holds (an fp8 type); None: the tensors say it.
        stream: CUDA stream; None: the current one of the tensors' framework. It is None on the CPU.

    Raises:
        InvalidArgumentError, UnknownFieldError, ShapeError, DtypeError, DeviceMismatchError, CaptureError,
        UnsupportedError, CompileError, OutOfMemoryError, DriverError
    """
    return context_call("folio_mla_append", ctx, structs.MLA_APPEND_ARGS, locals())


@operator
def mla_gather(
    ctx: Context,
    *,
    kv: TensorLike,
    kv_rope: TensorLike | None = None,
    dst: TensorLike,
    dst_rope: TensorLike | None = None,
    cu_seq_lens: TensorLike,
    seq_starts: TensorLike | None = None,
    block_table: TensorLike | None = None,
    kv_indptr: TensorLike | None = None,
    kv_indices: TensorLike | None = None,
    k_scale: float = 0,
    cache_format: MlaCacheFormat | str = MlaCacheFormat.PLAIN,
    kv_dtype: DtypeLike | None = None,
    stream: StreamLike | None = None,
) -> Call:
    """Copies latent records of many requests from a paged cache to dense rows, and converts them to the rows' type.

    On CUDA lengths and page ids are read by the kernel: nothing waits for them. The first call on a context loads
    code and answers `CaptureError` in a capture. Later ones can be captured: they are one launch each. On the CPU
    the rows are complete on return.

    Records of many requests to be copied to dense rows and converted: vLLM's gather_and_maybe_dequant_cache, its
    variant for fp8_ds_mla, and cp_gather_cache. Page ids are a block_table, or kv_indptr and kv_indices.

    Lengths and page ids that are wrong are refused where they are on the host. Where they are on a device, rows
    whose page or token does not exist are not written. The outputs may not overlap other tensors.

    Args:
        ctx: the device.
        kv: `[num_pages, page_size, kv_lora_rank + qk_rope_head_dim]` and so on, as in `mla_append`; float32,
            float16, bfloat16, fp8, or fp8_ds_mla records.
        kv_rope: Output: `[num_pages, page_size, qk_rope_head_dim]` of kv's type, where the rotary part of the
            records has a tensor of its own; or None.
        dst: Output: `[num_rows, kv_lora_rank + qk_rope_head_dim]`, with dst_rope `[num_rows, kv_lora_rank]`;
            float32, float16 or bfloat16, whatever kv's type.
        dst_rope: Output: `[num_rows, qk_rope_head_dim]` of dst's type; or None.
        cu_seq_lens: `[batch_size + 1]` int32 or int64: request b gets rows `cu_seq_lens[b]` to `cu_seq_lens[b +
            1]`, at most num_rows. Rows of no request are left as they are.
        seq_starts: `[batch_size]` int32 or int64: the token of request b that its first row gets; None: 0.
        block_table: `[batch_size, columns]` int32 or int64 page ids; rows may be strided. Entries of tokens that
            are not asked for are not read.
        kv_indptr: `[batch_size + 1]` int32 or int64: the page ids of request b begin at `kv_indices[kv_indptr[b]]`.
        kv_indices: `[n]` int32 or int64 page ids.
        k_scale: Values of a plain fp8 cache are multiplied by it. 0: 1.
        cache_format: `MlaCacheFormat`
        kv_dtype: What a plain cache that is described as uint8 holds (an fp8 type); None: the tensors say it.
        stream: CUDA stream; None: the current one of the tensors' framework. It is None on the CPU.

    Raises:
        InvalidArgumentError, UnknownFieldError, ShapeError, DtypeError, DeviceMismatchError, CaptureError,
        UnsupportedError, CompileError, OutOfMemoryError, DriverError
    """
    return context_call("folio_mla_gather", ctx, structs.MLA_GATHER_ARGS, locals())


@operator
def cp_reorder(
    ctx: Context,
    *,
    gathered: TensorLike,
    dst: TensorLike,
    context_lens: TensorLike,
    cu_seq_lens: TensorLike,
    cu_padded_lens: TensorLike,
    local_start: int,
    interleave: int = 0,
    stream: StreamLike | None = None,
) -> Call:
    """Puts records that were gathered rank by rank request by request.

    On CUDA lengths are read by the kernel, and rows that do not exist are not written. The first call on a context
    loads code and answers `CaptureError` in a capture. Later ones can be captured: they are one launch each. On the
    CPU lengths are checked, and the rows are complete on return.

    A chunk of every context, gathered from all ranks (an all-gather of what `mla_gather` gave on each), to be put
    request by request: vLLM's reorg_kvcache. A request's rows are those of rank 0, then of rank 1, and so on. They
    are not in the order of their positions, which attention without a mask does not ask for. The output may not
    overlap others.

    Args:
        ctx: the device.
        gathered: `[world_size, rank_rows, width]` of any type but integers: as many rows of every rank. Of each
            request there are as many as the first rank holds.
        dst: Output: `[num_rows, width]` of gathered's type.
        context_lens: `[batch_size]` int32: tokens of each context, on all ranks.
        cu_seq_lens: `[batch_size + 1]` int32: rows of dst before each request. A row of the table of
            `mla_context_chunks`, on the context's device.
        cu_padded_lens: `[batch_size + 1]` int32: rows of a rank before each request. As cu_seq_lens.
        local_start: Tokens of a rank before the chunk: a number of seq_starts of `mla_context_chunks`.
        interleave: Tokens that are dealt to a rank at a time. 0: 1.
        stream: CUDA stream; None: the current one of the tensors' framework. It is None on the CPU.

    Raises:
        InvalidArgumentError, UnknownFieldError, ShapeError, DtypeError, DeviceMismatchError, CaptureError,
        UnsupportedError, CompileError, OutOfMemoryError, DriverError
    """
    return context_call("folio_cp_reorder", ctx, structs.CP_REORDER_ARGS, locals())


@operator
def cp_correct(
    ctx: Context,
    *,
    flags: CpFlag | int | str | Iterable[str] = 0,
    lse_all: TensorLike,
    o: TensorLike,
    o_out: TensorLike,
    lse_out: TensorLike | None = None,
    rank: int,
    stream: StreamLike | None = None,
) -> Call:
    """Scales one rank's output by its share of the softmax over all ranks' keys.

    On CUDA the first call on a context loads code and answers `CaptureError` in a capture. Later ones can be
    captured: they are one launch each. On the CPU the outputs are complete on return.

    One rank's output over the keys that it holds, to be scaled by its share of the softmax over all keys. The sum
    of all ranks' scaled outputs (an all-reduce or a reduce-scatter) is the output over all keys. An lse of -inf,
    +inf or NaN is that of a rank without keys, whose output counts for nothing, whatever it is: it gives 0.

    o_out may be o itself, with the same address and the same strides, and else overlaps nothing.

    Args:
        ctx: the device.
        flags: `CpFlag.LSE_BASE_2` or 0.
        lse_all: `[world_size, num_tokens, num_heads]` float32, of all ranks; strides are free, so `[world_size,
            num_heads, num_tokens]` will do by its strides.
        o: `[num_tokens, num_heads, head_dim]` float32, float16 or bfloat16.
        o_out: Output: as o; may be o itself.
        lse_out: Output: `[num_tokens, num_heads]` float32, the lse over all keys, -inf where there are none; or
            None.
        rank: Whose output it is, below world_size.
        stream: CUDA stream; None: the current one of the tensors' framework. It is None on the CPU.

    Raises:
        InvalidArgumentError, UnknownFieldError, ShapeError, DtypeError, DeviceMismatchError, CaptureError,
        UnsupportedError, CompileError, OutOfMemoryError, DriverError
    """
    return context_call("folio_cp_correct", ctx, structs.CP_CORRECT_ARGS, locals())


@operator
def tree_mask(
    ctx: Context,
    *,
    parents: TensorLike,
    prefix_lens: TensorLike,
    qo_indptr: TensorLike | None = None,
    mask_bytes: TensorLike | None = None,
    mask_bits: TensorLike | None = None,
    tree_mask: TensorLike | None = None,
    tree_bits: TensorLike | None = None,
    positions: TensorLike | None = None,
    next_token: TensorLike | None = None,
    next_sibling: TensorLike | None = None,
    stream: StreamLike | None = None,
) -> Call:
    """Makes masks, positions and links of trees of draft tokens from the parents of their tokens.

    On CUDA numbers are read by the kernel. There a token with a parent that does not stand before it is a root, and
    nothing is written beyond a tensor. The first call on a context loads code and answers `CaptureError` in a
    capture. Later ones can be captured: they are one launch each. On the CPU such a parent is refused, and the
    outputs are complete on return.

    A tree of draft tokens for each request, each token under its parent, and what is wanted of the trees. A token
    sees the keys before the tree, its ancestors and itself (SpecInfer, Miao et al. 2024; Medusa, Cai et al. 2024).
    The masks are those that runs take with the draft tokens' keys appended: kv_len is `prefix_lens + tree_size`.

    A token whose parent is -1 is a root. There may be several, as where the last verified token is not part of the
    tree.

    Outputs may be None. All tensors are contiguous.

    Args:
        ctx: the device.
        parents: `[batch_size, tree_size]` int32, or `[num_tokens]` with qo_indptr: the parent of each token,
            counted from the first token of its request, below the token's own index; -1 for a root.
        prefix_lens: `[batch_size]` int32: keys before the tree of each request, without any of its tokens. With
            those they are 2^31 - 1 at most.
        qo_indptr: `[batch_size + 1]` int32, the qo_indptr of the batch: tokens before each request, for trees of
            different sizes. Tokens behind the last offset are of no request. None: all trees have tree_size tokens.
        mask_bytes: Output: `[elements or more]` uint8 or bool, for `MaskMode.CUSTOM_BYTES`: `[tree_size, prefix_len
            + tree_size]` per request, 1 or 0.
        mask_bits: Output: `[elements or more]` uint8, for `MaskMode.CUSTOM_BITS`: the same in bits, and 0 up to the
            end of a byte.
        tree_mask: Output: `[batch_size, tree_size, tree_size]` uint8 or bool, or `[elements or more]` with
            qo_indptr: mask_bytes without the keys before the tree. SGLang's QLEN_ONLY.
        tree_bits: Output: `[batch_size, tree_size, bytes]` uint8, or `[num_tokens, bytes]` with qo_indptr, of 1, 2
            or 4 bytes, a bit for every token of the tree: bit j of a little-endian number says whether the row sees
            token j. Trees have at most as many tokens; where a qo_indptr on CUDA says otherwise, the tokens behind
            have no bits. SGLang's QLEN_ONLY_BITPACKING.
        positions: Output: int32 or int64, as parents: the position of each token, prefix_len and the number of its
            ancestors.
        next_token: Output: int32 or int64, as parents: the first child of each token, counted as parents are; -1
            where it has none. SGLang's retrive_next_token.
        next_sibling: Output: int32 or int64, as parents: the next token with the same parent (of a root: the next
            root), or -1. SGLang's retrive_next_sibling.
        stream: CUDA stream; None: the current one of the tensors' framework. It is None on the CPU.

    Raises:
        InvalidArgumentError, UnknownFieldError, ShapeError, DtypeError, DeviceMismatchError, CaptureError,
        UnsupportedError, CompileError, OutOfMemoryError, DriverError
    """
    return context_call("folio_tree_mask", ctx, structs.TREE_MASK_ARGS, locals())


@operator
def batch_lengths(
    ctx: Context,
    *,
    qo_len: TensorLike,
    cached_len: TensorLike | None = None,
    encoder_len: TensorLike | None = None,
    qo_indptr: TensorLike | None = None,
    kv_len: TensorLike | None = None,
    kv_indptr: TensorLike | None = None,
    row_kind: TensorLike | None = None,
    stream: StreamLike | None = None,
) -> Call:
    """Computes cumulative lengths and what else follows from the lengths of a step.

    On CUDA the kernel reads the lengths. The first call on a context loads code and answers `CaptureError` in a
    capture. Later ones can be captured: they are one launch each. On the CPU the outputs are complete on return.

    Lengths of a step, and what follows from them: vLLM's query_start_loc and seq_lens, SGLang's qo_indptr and
    kv_indptr, and FastDeploy's lengths, of which seq_lens_this_time is qo_len, seq_lens_decoder is cached_len and
    seq_lens_encoder is encoder_len. For cumulative lengths alone, give them as qo_len and take qo_indptr.

    Outputs may be longer than the batch, as those of CUDA graphs are: cumulative lengths then stay at their last
    value, and the others are 0. At least one output is not None.

    Args:
        ctx: the device.
        qo_len: `[batch_size]` new tokens of each request, 0 or more. A request without any is inactive. A negative
            number on a device counts as 0.
        cached_len: `[batch_size]` tokens in the cache before the new ones, 0 or more; None: none; for kv_len and
            kv_indptr only.
        encoder_len: `[batch_size]`: above 0 where new tokens are of a prompt; for row_kind, and only for it.
        qo_indptr: Output: `[batch_size + 1 or more]` new tokens before each request; or None. An int32 sum beyond
            int32 is refused on the host and saturates on a device.
        kv_len: Output: `[batch_size or more]` `cached_len + qo_len` of active requests and 0 of others; or None.
        kv_indptr: Output: `[batch_size + 1 or more]` the same summed up, as qo_indptr; or None.
        row_kind: Output: `[batch_size or more]` `RowKind`; or None.
        stream: CUDA stream; None: the current one of the tensors' framework. It is None on the CPU.

    Raises:
        InvalidArgumentError, UnknownFieldError, ShapeError, DtypeError, DeviceMismatchError, CaptureError,
        UnsupportedError, CompileError, OutOfMemoryError, DriverError
    """
    return context_call("folio_batch_lengths", ctx, structs.BATCH_LENGTHS_ARGS, locals())


@operator
def kv_indices(
    ctx: Context,
    *,
    block_table: TensorLike,
    row_ids: TensorLike | None = None,
    kv_len: TensorLike,
    kv_start: TensorLike | None = None,
    kv_indptr: TensorLike,
    kv_indices: TensorLike,
    last_page_len: TensorLike | None = None,
    page_size: int,
    indices_page_size: int = 0,
    window: int = 0,
    stream: StreamLike | None = None,
) -> Call:
    """Lists the pages or slots of every request's tokens.

    On CUDA the kernel reads lengths and table. The first call on a context loads code and answers `CaptureError` in
    a capture. Later ones can be captured: they are one launch each. On the CPU the outputs are complete on return.

    A table of pages or slots, to be listed request by request: vLLM's block table as FlashInfer's kv_indptr,
    kv_indices and last_page_len, and SGLang's req_to_token as its kv_indptr and kv_indices
    (create_flashinfer_kv_indices).

    Index n of a request stands for its tokens from `n · indices_page_size` on. It is the slot of the first of them
    (its entry's id times page_size, plus its place in the page) divided by indices_page_size, rounded down. So
    pages may be listed as they are, or as slots (indices_page_size 1), and a table of slots (page_size 1) may be
    listed as pages, if the tokens of a page have neighbouring slots.

    A negative entry gives -1, and so does an index that the type of kv_indices cannot hold.

    Args:
        ctx: the device.
        block_table: `[rows, columns]` page ids, or slots where page_size is 1; rows may be strided. Without row_ids
            there is a row per request, or more. Entries of tokens that are not listed are not read.
        row_ids: `[batch_size]` row of each request, SGLang's req_pool_indices; None: its own number. One beyond the
            table is refused on the host; on a device the request is empty.
        kv_len: `[batch_size]` tokens of each request. More than a row has entries for are refused on the host and
            cut off on a device.
        kv_start: `[batch_size]` first token that is listed, 0 to kv_len; None: 0.
        kv_indptr: Output: `[batch_size + 1 or more]` indices before each request; beyond the batch, of all.
        kv_indices: Output: `[capacity]`; what is left of it is not written. Too little room is refused on the host.
            On a device the list ends there, and kv_indptr says so.
        last_page_len: Output: `[batch_size or more]` tokens in the last listed page, 0 where there is none; or
            None.
        page_size: Tokens per entry of block_table, 1 or more.
        indices_page_size: Tokens per index: a divisor or a multiple of page_size; 1: slots. 0: page_size.
        window: Only so many last tokens are listed, from the page of the first of them on. 0: all.
        stream: CUDA stream; None: the current one of the tensors' framework. It is None on the CPU.

    Raises:
        InvalidArgumentError, UnknownFieldError, ShapeError, DtypeError, DeviceMismatchError, CaptureError,
        UnsupportedError, CompileError, OutOfMemoryError, DriverError
    """
    return context_call("folio_kv_indices", ctx, structs.KV_INDICES_ARGS, locals())


@operator
def block_table(
    ctx: Context,
    *,
    kv_indptr: TensorLike,
    kv_indices: TensorLike,
    block_table: TensorLike,
    fill: int,
    stream: StreamLike | None = None,
) -> Call:
    """Makes a block table of a list.

    On CUDA the kernel reads the list. The first call on a context loads code and answers `CaptureError` in a
    capture. Later ones can be captured: they are one launch each. On the CPU the outputs are complete on return.

    A list of pages or slots, to be turned into a block table.

    Args:
        ctx: the device.
        kv_indptr: `[batch_size + 1]` indices before each request, from 0 on.
        kv_indices: `[n]`.
        block_table: Output: `[batch_size or more, columns]`; rows may be strided. More indices than columns are
            refused on the host and cut off on a device. An index that its type cannot hold, or a negative one,
            gives -1.
        fill: What entries get that no index stands for, those of rows beyond the batch among them: -1, or what the
            host takes.
        stream: CUDA stream; None: the current one of the tensors' framework. It is None on the CPU.

    Raises:
        InvalidArgumentError, UnknownFieldError, ShapeError, DtypeError, DeviceMismatchError, CaptureError,
        UnsupportedError, CompileError, OutOfMemoryError, DriverError
    """
    return context_call("folio_block_table", ctx, structs.BLOCK_TABLE_ARGS, locals())


@operator
def slot_mapping(
    ctx: Context,
    *,
    block_table: TensorLike,
    row_ids: TensorLike | None = None,
    qo_indptr: TensorLike | None = None,
    qo_len: TensorLike | None = None,
    kv_len: TensorLike,
    slot_mapping: TensorLike,
    positions: TensorLike | None = None,
    page_size: int,
    stream: StreamLike | None = None,
) -> Call:
    """Finds the slots and positions of new tokens.

    On CUDA the kernel reads lengths and table. The first call on a context loads code and answers `CaptureError` in
    a capture. Later ones can be captured: they are one launch each. On the CPU the outputs are complete on return.

    Where new tokens go: vLLM's and FastDeploy's slot_mapping and positions (get_position_ids_and_slot_mapping). The
    new tokens of a request are its last ones: token i of them has position `kv_len - qo_len + i` and slot `id ·
    page_size + position % page_size`, where id is entry `position / page_size` of the request's row.

    A negative entry gives slot -1, and so does a slot that the type of slot_mapping cannot hold. Elements beyond
    the new tokens become -1 in both outputs.

    Args:
        ctx: the device.
        block_table: `[rows, columns]` page ids, or slots where page_size is 1; rows may be strided. Without row_ids
            there is a row per request, or more. Entries of tokens that are not listed are not read.
        row_ids: `[batch_size]` row of each request, SGLang's req_pool_indices; None: its own number. One beyond the
            table is refused on the host; on a device the request is empty. On a device the tokens of a request
            without a row have slot -1.
        qo_indptr: `[batch_size + 1]` new tokens before each request, from 0 on; or None with qo_len.
        qo_len: `[batch_size]` new tokens of each request; or None with qo_indptr.
        kv_len: `[batch_size]` tokens of each request, the new ones included: qo_len or more, up to what a row has
            entries for. On a device tokens outside have slot -1, and position -1 where it would be negative.
        slot_mapping: Output: `[num_tokens or more]`. Too little room is refused on the host and leaves tokens out
            on a device.
        positions: Output: as many; or None.
        page_size: Tokens per entry of block_table, 1 or more.
        stream: CUDA stream; None: the current one of the tensors' framework. It is None on the CPU.

    Raises:
        InvalidArgumentError, UnknownFieldError, ShapeError, DtypeError, DeviceMismatchError, CaptureError,
        UnsupportedError, CompileError, OutOfMemoryError, DriverError
    """
    return context_call("folio_slot_mapping", ctx, structs.SLOT_MAPPING_ARGS, locals())


@operator
def draft_kv_indices(
    ctx: Context,
    *,
    req_to_token: TensorLike,
    row_ids: TensorLike | None = None,
    kv_len: TensorLike,
    kv_indptr: TensorLike,
    kv_indices: TensorLike,
    topk: int,
    num_steps: int = 0,
    page_size: int = 0,
    slot_layout: SlotLayout | str = SlotLayout.STEP_MAJOR,
    stream: StreamLike | None = None,
) -> Call:
    """Lists the slots of every branch of a draft for each of its steps.

    On CUDA the kernel reads lengths and table. The first call on a context loads code and answers `CaptureError` in
    a capture. Later ones can be captured: they are one launch each. On the CPU the outputs are complete on return.

    The lists of slots for all steps of a draft with branches: kv_indptr and kv_indices of SGLang's multi-step draft
    decoding. Step s has a request per branch, `b · topk + t`. Its slots are those of the kv_len tokens of request
    b, then those of the tokens that branch t drafted in steps 0 to s.

    A negative entry gives -1, and so does a slot that the type of kv_indices cannot hold.

    Args:
        ctx: the device.
        req_to_token: `[rows, columns]` slots; rows may be strided. Without row_ids there is a row per request, or
            more.
        row_ids: `[batch_size]` row of each request, SGLang's req_pool_indices; None: its own number. One beyond the
            table is refused on the host; on a device the request is empty.
        kv_len: `[batch_size]` tokens of each request, without drafts. Where the drafts end beyond the columns it is
            refused on the host; on a device slots beyond them are -1.
        kv_indptr: Output: `[steps, batch_size · topk + 1 or more]` slots before each branch; beyond the batch, of
            all.
        kv_indices: Output: `[steps, capacity]`, as kv_indices in `kv_indices`.
        topk: Branches of each request, 1 to 65535.
        num_steps: Steps that branches have slots for: those of kv_indptr or more, up to 65535. 0: those of
            kv_indptr.
        page_size: Slots per page with `SlotLayout.PAGED`; else 0.
        slot_layout: Where drafted tokens stand in a row: `SlotLayout`
        stream: CUDA stream; None: the current one of the tensors' framework. It is None on the CPU.

    Raises:
        InvalidArgumentError, UnknownFieldError, ShapeError, DtypeError, DeviceMismatchError, CaptureError,
        UnsupportedError, CompileError, OutOfMemoryError, DriverError
    """
    return context_call("folio_draft_kv_indices", ctx, structs.DRAFT_KV_INDICES_ARGS, locals())


@operator
def cp_local_lengths(
    *,
    world_size: int,
    interleave: int = 0,
    rank: int,
    lengths: TensorLike | Sequence[int],
    out: TensorLike,
) -> Figure[None]:
    """Says how many tokens ranks of decode context parallelism hold of sequences.

    Tokens that ranks of decode context parallelism hold of sequences: the token at position t is on rank `t /
    interleave % world_size` (vLLM's get_dcp_local_seq_lens).

    Args:
        world_size: Number of ranks, 1 or more.
        interleave: Tokens that are dealt to a rank at a time. 0: 1.
        rank: The rank whose lengths are wanted; -1: all ranks'.
        lengths: `[num_lengths]` tokens of each, 0 or more.
        out: Output: `[num_lengths]`; for all ranks `[num_lengths, world_size]`.

    Raises:
        InvalidArgumentError, UnknownFieldError
    """
    return Figure("folio_cp_local_lengths", structs.CP_LOCAL_LENGTHS_ARGS, locals())


@operator
def mla_context_chunks(
    *,
    page_size: int,
    world_size: int = 0,
    interleave: int = 0,
    workspace_tokens: int,
    context_lens: TensorLike | Sequence[int],
    seq_starts: TensorLike | None = None,
    cu_seq_lens: TensorLike | None = None,
    cu_padded_lens: TensorLike | None = None,
    max_lens: TensorLike | None = None,
) -> Figure[tuple[int, int]]:
    """Cuts contexts into chunks that fit a workspace.

    Contexts that are attended chunk by chunk, in a workspace of so many tokens: vLLM's chunked prefill metadata.
    Every request with a context gets an equal share of the workspace, of whole pages. On several ranks a share is
    also a whole number of rounds of `interleave · world_size` tokens, so that the chunks that ranks cut of what
    they hold are those of the sequence.

    With cu_seq_lens (one rank) or cu_padded_lens, and seq_starts, a row of the tables is what `mla_gather` takes.
    All tables are None where only num_chunks is wanted.

    Args:
        page_size: Tokens per page, 1 or more.
        world_size: Ranks that share every context. 0: 1.
        interleave: Tokens that are dealt to a rank at a time. 0: 1.
        workspace_tokens: Tokens of the workspace, on all ranks; `mla_context_tokens` says how many vLLM takes.
        context_lens: `[num_requests]` tokens in the cache before the new ones, 0 or more.
        seq_starts: Output: `[num_chunks, num_requests]` the first token of a chunk, counted on a rank; or None.
        cu_seq_lens: Output: `[num_chunks, num_requests + 1]` tokens of all ranks before each request, and of all
            requests; or None.
        cu_padded_lens: Output: `[num_chunks, num_requests + 1]` tokens of a rank before each request, where every
            rank counts as many as the first one; or None.
        max_lens: Output: `[num_chunks]` most tokens of a request, of all ranks; or None.

    Returns:
        num_chunks: the number of chunks.; chunk_tokens: tokens of a chunk of one request, of all ranks; or None.

    Raises:
        InvalidArgumentError, UnknownFieldError
    """
    return Figure("folio_mla_context_chunks", structs.MLA_CONTEXT_CHUNKS_ARGS, locals())


@operator
def flashmla_metadata(
    *,
    num_sms: int,
    q_len: int,
    num_heads: int,
    num_kv_heads: int,
    seq_lens: TensorLike | Sequence[int],
    tile_scheduler_metadata: TensorLike,
    num_splits: TensorLike,
) -> Figure[int]:
    """Computes the plan of FlashMLA's dense decode kernel on the host.

    The plan of FlashMLA's dense decode kernel: what its get_mla_metadata computes, for hosts that drive that
    kernel.

    Args:
        num_sms: Multiprocessors of the device.
        q_len: Query rows of every request.
        num_heads: Query heads, a multiple of num_kv_heads.
        num_kv_heads: KV heads.
        seq_lens: `[batch_size]` keys of each request, those of this step included.
        tile_scheduler_metadata: Output: `[num_sm_parts, 8]`: first request, last request, first block of 64 keys,
            block after the last, first split, whether the first and whether the last request are split, 0. A part
            whose first request is after its last one is idle.
        num_splits: Output: `[batch_size + 1]` splits before each request, and all of them.

    Returns:
        num_sm_parts: parts that the work is cut into.

    Raises:
        InvalidArgumentError, UnknownFieldError
    """
    return Figure("folio_flashmla_metadata", structs.FLASHMLA_METADATA_ARGS, locals())


@operator
def num_kv_splits(
    *,
    max_splits: int = 0,
    kv_lens: TensorLike | Sequence[int],
    out: TensorLike,
    keys_per_split: TensorLike | None = None,
) -> Figure[None]:
    """Says into how many splits FastDeploy's Triton MLA backend cuts the keys of requests.

    Splits of the keys of decode requests as FastDeploy's Triton MLA backend makes them: one for each 256 keys.

    Args:
        max_splits: Most splits of a request. 0: 32.
        kv_lens: `[num_requests]` keys of each, 0 or more.
        out: Output: `[capacity]` splits of each request, 1 or more; 1 for what is not a request.
        keys_per_split: Output: `[capacity]` keys of a split, whole blocks of 32; split s has those from `s · keys`
            on, fewer or none at the end. 0 for what is not a request. Or None.

    Raises:
        InvalidArgumentError, UnknownFieldError
    """
    return Figure("folio_num_kv_splits", structs.NUM_KV_SPLITS_ARGS, locals())


@operator
def split_decodes_and_prefills(
    *,
    flags: SplitFlag | int | str | Iterable[str] = 0,
    decode_threshold: int,
    query_lens: TensorLike | Sequence[int],
    out: TensorLike,
) -> Figure[None]:
    """Says where the prefills of a batch begin.

    A batch whose decodes come first, cut where prefills begin: vLLM's split_decodes_and_prefills. All requests are
    decodes where none has more rows than the threshold. Otherwise prefills begin at the first request with more
    rows, or with none; with `SplitFlag.UNIFORM` and a threshold above 1, at the first with another number of rows
    than the first request, and all are prefills where that one has more rows than the threshold.

    Args:
        flags: `SplitFlag.UNIFORM` or 0.
        decode_threshold: Most query rows of a decode.
        query_lens: `[num_requests]` query rows of each, 0 or more.
        out: Output: `[4]` decodes, prefills, query rows of decodes, query rows of prefills.

    Raises:
        InvalidArgumentError, UnknownFieldError
    """
    return Figure("folio_split_decodes_and_prefills", structs.SPLIT_DECODES_AND_PREFILLS_ARGS, locals())


@operator
def balanced_kv_splits(
    *,
    flags: BalancedKvSplitsFlag | int | str | Iterable[str] = 0,
    num_group: int = 0,
    num_heads: int,
    num_kv_heads: int,
    num_sms: int = 0,
    max_splits: int = 0,
    seq_lens: TensorLike | Sequence[int],
    out: TensorLike,
) -> Figure[None]:
    """Says into how many splits SGLang cuts the keys of decode requests.

    Splits of the keys of decode requests as SGLang's Triton backend makes them (get_num_kv_splits). Lengths within
    a quarter of each other count as equal. Others are cut to about the shortest; and the more the fewer rows there
    are for the multiprocessors. The larger of the two numbers counts.

    Args:
        flags: `BalancedKvSplitsFlag.STATIC` or 0.
        num_group: Rows of each request: branches of a draft. 0: 1.
        num_heads: Query heads, a multiple of num_kv_heads.
        num_kv_heads: KV heads.
        num_sms: Multiprocessors of the device. 0: every request gets the most splits.
        max_splits: Most splits of a request. 0: 8.
        seq_lens: `[num_requests]` keys of each, 1 or more.
        out: Output: `[num_requests, num_group]`.

    Raises:
        InvalidArgumentError, UnknownFieldError
    """
    return Figure("folio_balanced_kv_splits", structs.BALANCED_KV_SPLITS_ARGS, locals())


@operator
def use_cascade(
    *,
    flags: UseCascadeFlag | int | str | Iterable[str] = 0,
    common_prefix_len: int,
    num_heads: int,
    num_kv_heads: int,
    num_sms: int,
    query_lens: TensorLike | Sequence[int],
) -> Figure[int]:
    """Says whether vLLM would attend a shared prefix once.

    vLLM's use_cascade_attention: whether its FlashAttention backend would attend a prefix that all requests share
    once. `Cascade` decides by itself.

    Args:
        flags: `UseCascadeFlag`: each of them rules a cascade out.
        common_prefix_len: Keys that all of them share.
        num_heads: Query heads, a multiple of num_kv_heads.
        num_kv_heads: KV heads.
        num_sms: Multiprocessors of the device, 1 or more.
        query_lens: `[num_requests]` query rows of each, 0 or more.

    Returns:
        out: 1: yes; 0: no.

    Raises:
        InvalidArgumentError, UnknownFieldError
    """
    return Figure("folio_use_cascade", structs.USE_CASCADE_ARGS, locals())


@operator
def reorder_batch(
    *,
    decode_threshold: int,
    query_lens: TensorLike | Sequence[int],
    context_lens: TensorLike | Sequence[int] | None = None,
    order: TensorLike,
    swaps: TensorLike | None = None,
) -> Figure[int]:
    """Says in which order vLLM's backends want a batch.

    The order that vLLM's backends want a batch in (reorder_batch).

    Without context_lens, as in its first releases, decodes come first: requests with up to decode_threshold rows.
    The last decodes change places with the first prefills.

    With context_lens, as in later ones (reorder_batch_to_split_decodes_and_prefills), decodes come first: requests
    with up to decode_threshold rows and a context; then other requests with a context; then those without. Only
    requests that stand in the wrong region move. Those of a region fill its free places in their order.

    Args:
        decode_threshold: Most query rows of a decode.
        query_lens: `[num_requests]` query rows of each, 0 or more.
        context_lens: `[num_requests]` tokens in the cache before the new ones, 0 or more; or None.
        order: Output: `[num_requests]`: where the request of each place stood before.
        swaps: Output: `[num_swaps, 2]` places to be swapped, one pair after the other, which makes the order; or
            None.

    Returns:
        num_swaps: the number of pairs.

    Raises:
        InvalidArgumentError, UnknownFieldError
    """
    return Figure("folio_reorder_batch", structs.REORDER_BATCH_ARGS, locals())
