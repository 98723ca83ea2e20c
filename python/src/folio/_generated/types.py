"""Mappings that stand for nested structs. Generated from folio.h by `python -m generator`; do not edit."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypedDict

from folio._generated.constants import (BatchFlag, KvFormat, KvLayout, RopeFlag)
from folio._tensors import DtypeLike, TensorLike


class Batch(TypedDict, total=False):
    """One step's lengths and page table. Index tensors are contiguous, each int32 or int64; block_table's rows may be
    apart. The page table comes in one of these forms:

    | form | fields | known from |
    |---|---|---|
    | CSR | kv_indptr in pages, kv_indices, and last_page_len or kv_len, not both | FlashInfer |
    | token slots | CSR with page_size 1: kv_indptr in tokens, kv_indices | SGLang |
    | block table | block_table, kv_len | vLLM |
    | ragged | kv_indptr in tokens (prefill with `KvStorage.RAGGED`) | FlashInfer |

    A request may own more pages than its keys need; those are not read.

    Lengths (qo_indptr, kv_indptr, last_page_len, kv_len) are all on the host, or all on the context's device; page
    ids (kv_indices, block_table) on either. Lengths on a device need page ids on it. Host tensors are only read
    during plan. Device tensors must stay as they are until the last run of the plan has finished: plan's kernel
    reads the lengths, runs read the page ids. int32 page ids may be changed between runs, in stream order; each run
    reads those that it finds.

    Numbers of int64 are copied as int32. On the host those in use that do not fit are refused. On a device one more
    launch of plan copies them to the workspace, page ids where there is room for max_num_pages of them (a block
    table's first max_kv_len / page_size columns; more are refused), so runs do not read them.

    Numbers on the host are checked. Numbers on a device cannot be: lengths beyond the desc's maxima, beyond the
    page table or beyond the rows of a tensor, and page ids beyond the cache, give wrong results, but no access
    outside the tensors and the workspace that were passed.
    """

    flags: BatchFlag | int | str | Iterable[str]
    """`BatchFlag.WINDOW`."""

    qo_len: int
    """Query rows of every request where qo_indptr is None (decode only); 0: 1."""

    qo_indptr: TensorLike | None
    """`[batch_size + 1]` query-row offsets from 0; decode accepts None."""

    kv_indptr: TensorLike | None
    """`[batch_size + 1]` offsets from 0 into kv_indices, or into ragged K and V."""

    kv_indices: TensorLike | None
    """`[num_pages or more]` page ids, 0 or more."""

    last_page_len: TensorLike | None
    """`[batch_size]` tokens in the last page, 1 to page_size; not read for requests without pages. Refused together
    with kv_len."""

    kv_len: TensorLike | None
    """`[batch_size]` keys per request, those of this step included; 0 or more. With a new_kv_dtype, those in the
    cache."""

    block_table: TensorLike | None
    """`[batch_size, max_pages_per_request]` page ids; only those that kv_len needs are read."""

    window_left: int
    """No run of the plan sees a key more than so many before its row's own position: a run with a wider window is
    refused, and one with mm_prefix_ranges that reach beyond it. Keys before the window are not planned for, which
    saves time where it is short. -1: unlimited. Needs `BatchFlag.WINDOW`. For decode and prefill over the cache;
    MLA, cascades and handles with a new_kv_dtype refuse it. Where captured runs are replayed, every plan is for the
    window of those runs or a wider one: a replay cannot be refused."""


class SharedPrefixes(TypedDict, total=False):
    """What requests of a batch share. Every prefix is the first keys of some neighbouring requests, which have them in
    the same pages. Prefixes may lie one within the other, as the nodes of a tree: the wider one, with fewer keys,
    comes first. Arrays are on the host, and only read during the call.

    This is a promise of the caller's, which changes the time and not the result: keys that a request does not have,
    or that are its new tokens, are not shared whatever is stated. Where the pages are not the same ones, the
    results are those of the first request's pages.
    """

    common_prefix_len: int
    """First keys that all requests share (vLLM's common_prefix_len); 0 together with num_prefixes."""

    request_begin: TensorLike | Sequence[int] | None
    """`[num_prefixes]` first request of each; these never fall."""

    request_end: TensorLike | Sequence[int] | None
    """`[num_prefixes]` the request behind its last one."""

    kv_len: TensorLike | Sequence[int] | None
    """`[num_prefixes]` its keys."""


class RopeAppendArgs(TypedDict, total=False):
    """New tokens of a model with query, key and value heads, from the projection to the attention: what vLLM's
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
    """

    flags: RopeFlag | int | str | Iterable[str]
    """`RopeFlag.INTERLEAVED` or 0."""

    q: TensorLike | None
    """`[num_tokens or more, num_qo_heads, head_dim_qk]` of key's type, or None: no queries. All its rows are computed,
    also those of tokens that are not cached. A slice of a fused QKV tensor will do, as for key and value."""

    q_out: TensorLike | None
    """Output: the queries, as q; may be q itself. None: in place."""

    key: TensorLike
    """`[num_tokens or more, num_kv_heads, head_dim_qk]` float32, float16 or bfloat16; head_dim_qk is 512 at most."""

    key_out: TensorLike | None
    """Output: the first num_tokens keys, normalised and rotated, whatever their slots are; as key, which it may be.
    None: not wanted, and key stays as it is."""

    value: TensorLike
    """`[num_tokens or more, num_kv_heads, head_dim_vo]`, of key's type."""

    k_cache: TensorLike
    """Output: the key cache, in kv_layout: `[num_pages, page_size, num_kv_heads, head_dim_qk]` or `[num_pages,
    num_kv_heads, page_size, head_dim_qk]`, or `[num_slots, num_kv_heads, head_dim_qk]`; of key's type or fp8."""

    v_cache: TensorLike
    """Output: the value cache, as k_cache with head_dim_vo and strides of its own."""

    slot_mapping: TensorLike
    """`[num_tokens]` int32 or int64, as in `kv_append`: tokens with a negative slot are not cached."""

    k_scales: TensorLike | None
    """`[1]` or `[num_kv_heads]` float32, or None; fp8 caches only. Of formats with scales of their own: those, which
    the append writes where it computes them."""

    v_scales: TensorLike | None
    """As k_scales, for values."""

    q_norm_weight: TensorLike | None
    """`[head_dim_qk]` float32 or of key's type; None: queries are not normalised."""

    k_norm_weight: TensorLike | None
    """As q_norm_weight, for keys."""

    positions: TensorLike | None
    """`[rows or more]` int32 or int64, where rows are those of q, or num_tokens without q. None: no RoPE, and the
    fields below it that are about RoPE are None and 0. A position beyond cos_sin_cache is refused where it is on
    the host; on a device the nearest one in the table is taken. Computed angles are there for every position."""

    position_offsets: TensorLike | None
    """As positions, which they are added to; or None."""

    cos_sin_cache: TensorLike | None
    """`[max_position, rotary_dim]` float32 or of key's type: the cosines of a position, one for each pair, and then
    the sines; or `[2, max_position, rotary_dim / 2]`. None: angles are computed."""

    k_scale: float
    """An fp8 cache gets `key / (k_scale · k_scales[head])`, rounded to nearest even, saturated. 0: 1."""

    v_scale: float
    """As k_scale. 0: 1."""

    kv_layout: KvLayout | str
    """`KvLayout.NHD` or `KvLayout.HND`."""

    kv_dtype: DtypeLike | None
    """What caches that are described as uint8 hold (an fp8 type, or one of kv_format); None: the tensors say it, and
    uint8 is the first type that a kv_format other than `KvFormat.PLAIN` has."""

    rms_norm_eps: float
    """Added to the mean of squares; positive with a norm weight, else 0."""

    rotary_dim: int
    """Elements that are rotated, an even number; 0: the width of cos_sin_cache, or head_dim_qk."""

    rope_theta: float
    """Base of the frequencies of computed angles, such as 10000; 0 with cos_sin_cache."""

    rope_scale: float
    """Computed frequencies are divided by it. 0: 1."""

    low_freq_factor: float
    """Llama 3.1: turns in old_context_len up to which rope_scale divides altogether. 0: rope_scale divides all."""

    high_freq_factor: float
    """Llama 3.1: turns in old_context_len from which on rope_scale does not divide."""

    old_context_len: int
    """Llama 3.1: tokens of the context before it was extended, such as 8192."""

    kv_format: KvFormat | str
    """`KvFormat`: how the rows of the caches are stored."""

    k_zero_points: TensorLike | None
    """`KvFormat.CHANNEL_ZERO_POINTS`: `[num_kv_heads, head_dim_qk]` float32. None otherwise."""

    v_zero_points: TensorLike | None
    """`KvFormat.CHANNEL_ZERO_POINTS`: `[num_kv_heads, head_dim_vo]` float32. None otherwise."""
