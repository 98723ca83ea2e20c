"""Attention handles, a class each. Generated from folio.h by `python -m generator`; do not edit."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from folio._calls import Call, operator, prepared
from folio._context import Context
from folio._generated import structs
from folio._generated.constants import (
    BatchFlag,
    KvFormat,
    KvLayout,
    KvStorage,
    MaskMode,
    MlaCacheFormat,
    MlaContextFlag,
    PlanFlag,
    RunFlag,
)
from folio._generated.types import RopeAppendArgs, SharedPrefixes
from folio._handle import Handle, Workspace
from folio._tensors import DtypeLike, StreamLike, TensorLike

__all__ = ["Decode", "Prefill", "Cascade", "Mla", "MlaContext"]


class Decode(Handle):
    """Decode attention: FlashInfer's BatchDecodeWithPagedKVCacheWrapper. One handle serves every batch within its
    desc, and one plan every layer of a step. Multi-token decode (speculative verify) is decode with max_qo_len
    above 1, its tree given as a custom mask.

    What a decode handle is made from: a few query rows per request over a paged cache.

    Types: q float32, float16 or bfloat16; the cache the same type, or float8_e4m3 / float8_e5m2; o the type of q,
    float32, or fp8. Over an fp8 cache q may be fp8 as well, of either type, and then o is of any of these types.
    num_qo_heads is a multiple of num_kv_heads; query head h reads KV head h / (num_qo_heads / num_kv_heads). Head
    dimensions are multiples of 8 up to 512, on the CPU head_dim_qk up to 576; on CUDA up to 256 with another
    kv_format than plain rows. The maxima bound every later batch and fix the workspace.

    Args:
        ctx: the device.
        flags: `PlanFlag`
        q_dtype: Type of q.
        kv_dtype: Type of the cache; None: as q, or the default of kv_format.
        o_dtype: Type of o; None: as q.
        kv_layout: `KvLayout.NHD` or `KvLayout.HND`.
        num_qo_heads: Query (and output) heads.
        num_kv_heads: KV heads.
        head_dim_qk: Elements of a q or k row.
        head_dim_vo: Elements of a v or o row; 0: head_dim_qk.
        page_size: Tokens per page, 1 or more.
        max_batch_size: Most requests of a batch.
        max_qo_len: Most query rows of a request; 0: 1.
        max_kv_len: Most keys of a request.
        max_num_pages: Most pages of a batch, over all requests; 0: max_batch_size times the pages of max_kv_len.
        kv_format: `KvFormat`: how rows of the cache are stored. Other formats than `KvFormat.PLAIN` are for paged
            caches; on CUDA q has 16 bits there.
    """

    _name = "decode"

    def __init__(
        self,
        ctx: Context,
        *,
        flags: PlanFlag | int | str | Iterable[str] = 0,
        q_dtype: DtypeLike,
        kv_dtype: DtypeLike | None = None,
        o_dtype: DtypeLike | None = None,
        kv_layout: KvLayout | str = KvLayout.NHD,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        head_dim_vo: int = 0,
        page_size: int,
        max_batch_size: int,
        max_qo_len: int = 0,
        max_kv_len: int,
        max_num_pages: int = 0,
        kv_format: KvFormat | str = KvFormat.PLAIN,
    ) -> None:
        super().__init__(ctx, structs.DECODE_DESC, locals())

    def plan(
        self,
        *,
        flags: BatchFlag | int | str | Iterable[str] = 0,
        qo_len: int = 0,
        qo_indptr: TensorLike | None = None,
        kv_indptr: TensorLike | None = None,
        kv_indices: TensorLike | None = None,
        last_page_len: TensorLike | None = None,
        kv_len: TensorLike | None = None,
        block_table: TensorLike | None = None,
        window_left: int = 0,
        workspace: Workspace | None = None,
        stream: StreamLike | None = None,
    ) -> None:
        """Takes over a step's batch: microseconds, once per step. On failure the previous plan stays in force.

        Lengths on the host: Folio writes the plan to one of three parts of the workspace's host memory, in turn,
        and enqueues its copy to the device. It waits in one case only: where the copy out of that part, which the
        third plan before this one enqueued, has not run yet. A host may thus be three steps ahead of the device.
        Such a plan cannot be captured.

        Lengths on the device: Folio enqueues one kernel and never waits. With `PlanFlag.GRAPH` the call can be
        captured.

        On the CPU the plan is complete on return.

        Args:
            flags: `BatchFlag.WINDOW`.
            qo_len: Query rows of every request where qo_indptr is None (decode only); 0: 1.
            qo_indptr: `[batch_size + 1]` query-row offsets from 0; decode accepts None.
            kv_indptr: `[batch_size + 1]` offsets from 0 into kv_indices, or into ragged K and V.
            kv_indices: `[num_pages or more]` page ids, 0 or more.
            last_page_len: `[batch_size]` tokens in the last page, 1 to page_size; not read for requests without
                pages. Refused together with kv_len.
            kv_len: `[batch_size]` keys per request, those of this step included; 0 or more. With a new_kv_dtype,
                those in the cache.
            block_table: `[batch_size, max_pages_per_request]` page ids; only those that kv_len needs are read.
            window_left: No run of the plan sees a key more than so many before its row's own position: a run with a
                wider window is refused, and one with mm_prefix_ranges that reach beyond it. Keys before the window
                are not planned for, which saves time where it is short. -1: unlimited. Needs `BatchFlag.WINDOW`.
                For decode and prefill over the cache; MLA, cascades and handles with a new_kv_dtype refuse it.
                Where captured runs are replayed, every plan is for the window of those runs or a wider one: a
                replay cannot be refused.
            workspace: memory as workspace_info asks; None: that of the last plan, or at the first plan memory that
                the handle allocates.
            stream: CUDA stream that later runs use or wait for; None: the current one of the tensors' framework. It
                is None on the CPU.

        Raises:
            InvalidArgumentError, UnknownFieldError, ShapeError, DtypeError, DeviceMismatchError,
            WorkspaceTooSmallError, CaptureError, UnsupportedError, OutOfMemoryError, DriverError
        """
        self._plan(structs.BATCH, locals())

    @operator
    def run(
        self,
        *,
        flags: RunFlag | int | str | Iterable[str] = 0,
        q: TensorLike,
        k: TensorLike,
        v: TensorLike,
        o: TensorLike,
        lse: TensorLike | None = None,
        k_scales: TensorLike | None = None,
        v_scales: TensorLike | None = None,
        custom_mask: TensorLike | None = None,
        mm_prefix_ranges: TensorLike | None = None,
        alibi_slopes: TensorLike | None = None,
        sinks: TensorLike | None = None,
        sm_scale: float = 0,
        q_scale: float = 0,
        k_scale: float = 0,
        v_scale: float = 0,
        o_scale: float = 0,
        logits_soft_cap: float = 0,
        mask_mode: MaskMode | str = MaskMode.CAUSAL,
        window_left: int = 0,
        window_right: int = 0,
        k_rope: TensorLike | None = None,
        custom_mask_indptr: TensorLike | None = None,
        causal_requests: TensorLike | None = None,
        attention_chunk_size: int = 0,
        attention_chunk_look_back: int = 0,
        k_zero_points: TensorLike | None = None,
        v_zero_points: TensorLike | None = None,
        k_new: TensorLike | None = None,
        v_new: TensorLike | None = None,
        q_scales: TensorLike | None = None,
        o_scales: TensorLike | None = None,
        item_starts: TensorLike | None = None,
        item_positions: TensorLike | None = None,
        score_bias: TensorLike | None = None,
        stream: StreamLike | None = None,
    ) -> Call:
        """Computes attention for the planned batch: once per layer. Allocates nothing, synchronises nothing. On the
        CPU the outputs are complete on return; on CUDA they are when the stream gets there.

        Tensors and parameters of one attention call; one plan serves many, with different values.

        For query row i (position p = kv_len - qo_len + i) and key j:

            s = cap(q·k · sm_scale · q_scale · q_scales[kv_head] · k_scale · k_scales[kv_head]) + alibi(j - p) + score_bias[row, j]
            around(p, j) = p - j <= window_left and j - p <= window_right and chunk(p) - chunk(j) <= attention_chunk_look_back
            seen iff (mask(i, j) and around(p, j)) or mm_prefix(p, j)
            o = Σ softmax(s)_j v_j · v_scale · v_scales[kv_head],  divided by o_scale · o_scales[0] and saturated for fp8
            lse = log(Σ e^s [+ e^sink])

        with chunk(x) = floor(x / attention_chunk_size), and cap(s) = logits_soft_cap · tanh(s / logits_soft_cap),
        and a sink as one more logit without a value. A row that sees nothing has o = 0 and lse = -inf (its sink,
        with sinks). Memory that no row sees may hold anything, NaN included.

        The rules are those of FlashInfer's, vLLM's and SGLang's attention backends, with their differences
        resolved. Soft caps are Gemma 2's, ALiBi that of Press et al. (2022), its square-root form and the prefix
        ranges vLLM's, as is the bias of new keys, chunks those of Llama 4's local attention, sinks those of
        gpt-oss, the lse of parts that of FlashAttention-2.

        A scale or factor of 0 stands for its default, so 0 itself cannot be said.

        Args:
            flags: `RunFlag`
            q: Queries: `[num_tokens or more, num_qo_heads, head_dim_qk]` of q_dtype.
            k: Keys: paged `[num_pages, page_size, num_kv_heads, head_dim_qk]` (NHD), `[num_pages, num_kv_heads,
                page_size, head_dim_qk]` (HND), `[num_slots, num_kv_heads, head_dim_qk]` (page_size 1); ragged
                `[nnz_kv or more, num_kv_heads, head_dim_qk]`. Of kv_dtype; uint8 stands for fp8. num_pages is above
                every page id in use, and 1 or more where page ids or lengths are on a device. With k_rope, rows are
                shorter.
            v: Values: as k, with head_dim_vo and strides of its own.
            o: Output: `[num_tokens or more, num_qo_heads, head_dim_vo]` of o_dtype; uint8 stands for fp8. It may
                not overlap another tensor, q neither.
            lse: Output: `[num_tokens or more, num_qo_heads]` float32, float16 or bfloat16 of any strides, or None.
                It is computed in float32 and rounded once; what is beyond the type becomes infinite.
            k_scales: `[1]`, `[num_kv_heads]` or `[batch_size, num_kv_heads]` float32, or None: further factors of
                k, read by the run where it computes. Contiguous, but strides of 0 may expand one row, or one
                number, to the last of these shapes. Where the desc's kv_format has scales of its own: those, in the
                shape that `KvFormat` says.
            v_scales: As k_scales, for v.
            custom_mask: `[elements or more]` uint8 or bool, for the custom mask modes: as many bytes as the mode
                says for the batch. None otherwise.
            mm_prefix_ranges: `[batch_size, num_ranges, 2]` int32 or None: a row and a key at positions inside the
                same inclusive range see each other whatever mask and window say. start >= end: unused.
            alibi_slopes: `[num_qo_heads]` or `[batch_size, num_qo_heads]` float32, or None: adds slope · (j - p),
                or -slope · sqrt(p - j) for past keys.
            sinks: `[num_qo_heads]` float32 or None: a logit per head, in base e, that no scale and no cap changes.
            sm_scale: Factor of q·k. 0: 1 / sqrt(head_dim_qk). sm_scale · q_scale · k_scale is within ±2^60: beyond
                it logits leave float32.
            q_scale: Factor of q, which holds the queries divided by it. 0: 1.
            k_scale: Factor of k, for all heads: an fp8 cache holds k / k_scale. 0: 1.
            v_scale: Factor of v, for all heads, as k_scale; within ±2^60. 0: 1.
            o_scale: Divisor of o, 2^-60 to 2^60; only for fp8 outputs. 0: 1.
            logits_soft_cap: Logits are capped to ± this, 2^-60 to 2^60. 0: off.
            mask_mode: `MaskMode`
            window_left: Keys before the row's own position that it sees; -1: unlimited. Needs `RunFlag.WINDOW`.
            window_right: Keys after the row's own position that it sees; -1: unlimited. Needs `RunFlag.WINDOW`.
            k_rope: None where k has whole keys. Otherwise the last elements of the keys, in a tensor of one head
                that all KV heads share (the rotary part of DeepSeek-V2's MLA in its multi-head form): as k without
                the dimension of heads, or with one of extent 1, and with rope elements per row and strides of its
                own; of kv_dtype. k then has rows of head_dim_qk - rope elements, a multiple of 8. Paged
                `[num_pages, page_size, rope]` (both layouts), `[num_slots, rope]` (page_size 1); ragged `[nnz_kv or
                more, rope]`. Prefill handles only. Scales of k are of both parts.
            custom_mask_indptr: `[batch_size + 1]` int64, for the custom mask modes: where each request's mask
                starts in custom_mask, in bytes. The last element is not read, and neither are those of requests
                without rows. None: the masks lie one after the other. On a device, what a mask lacks is hidden.
            causal_requests: `[batch_size]` uint8 or bool, for `MaskMode.CAUSAL_BY_REQUEST`. None otherwise.
            attention_chunk_size: Keys of a chunk of chunked local attention; 0: off. Chunks count from a request's
                first key.
            attention_chunk_look_back: Chunks before its own that a row sees.
            k_zero_points: `[num_kv_heads, head_dim_qk]` float32, for `KvFormat.CHANNEL_ZERO_POINTS`. None
                otherwise.
            v_zero_points: `[num_kv_heads, head_dim_vo]` float32, for `KvFormat.CHANNEL_ZERO_POINTS`. None
                otherwise.
            k_new: Where a prefill desc has a new_kv_dtype, else None: the keys of the query rows, `[num_tokens or
                more, num_kv_heads, head_dim_qk]` of that type, in the order of the rows; any strides but a unit
                last one. They follow the request's keys in the cache, which are all that the batch's lengths and
                page table tell of, and kv_len above counts both. So positions, masks with their columns, windows,
                chunks, ranges and biases are those of a cache that had the new keys at the end. k_scale, v_scale,
                k_scales, v_scales and zero points are the cache's: new keys and values are as they are. Not with
                k_rope.
            v_new: As k_new, for values: `[num_tokens or more, num_kv_heads, head_dim_vo]`.
            q_scales: `[1]`, `[num_kv_heads]` or `[batch_size, num_kv_heads]` float32, or None: further factors of
                q, as k_scales. On a device they are read when the run gets there, so they may change under a
                captured graph, as k_scales and v_scales may. On CUDA this field and o_scales cost one more small
                launch. No number is checked.
            o_scales: `[1]` float32, or None: a further divisor of o; only for fp8 outputs. As q_scales.
            item_starts: `[batch_size]` int64, for `MaskMode.ITEMS`: the key that a request's first item begins with
                (FlashInfer's prefix_len_ptr). None otherwise.
            item_positions: `[batch_size, columns]` int32, for `MaskMode.ITEMS`: the positions within their items of
                the tokens from item_starts on, the delimiter before an item at 0 (FlashInfer's
                token_pos_in_items_ptr). A row without a column sees the prefix alone. None otherwise.
            score_bias: `[rows, columns]` for all heads or `[num_qo_heads or 1, rows, columns]`, float32, float16 or
                bfloat16 of any strides, or None: adds its elements to the logits of keys that a row sees, after the
                cap and beside ALiBi, in base e. Rows are those of q, or with `RunFlag.BIAS_REQUEST_ROWS` a
                request's; columns are a request's keys, or with `RunFlag.BIAS_NEW_KEYS` its last qo_len ones. There
                are as many as the batch has, or more, in each dimension; of lengths on a device, what the tensor
                lacks adds nothing. -inf hides a key. Elements of keys that a row does not see may be anything.
                Others may be neither NaN nor +inf, which give NaN.
            stream: CUDA stream; None: the current one of the tensors' framework. It is None on the CPU.

        Raises:
            NotPlannedError, InvalidArgumentError, UnknownFieldError, ShapeError, DtypeError, DeviceMismatchError,
            CaptureError, UnsupportedError, DriverError
        """
        return self._call("run", structs.ATTENTION_ARGS, locals())

    #: `run` without the call: its result makes it, any number of times.
    prepare_run = prepared(run)

    @operator
    def append_run(
        self,
        append: RopeAppendArgs,
        *,
        flags: RunFlag | int | str | Iterable[str] = 0,
        q: TensorLike,
        k: TensorLike,
        v: TensorLike,
        o: TensorLike,
        lse: TensorLike | None = None,
        k_scales: TensorLike | None = None,
        v_scales: TensorLike | None = None,
        custom_mask: TensorLike | None = None,
        mm_prefix_ranges: TensorLike | None = None,
        alibi_slopes: TensorLike | None = None,
        sinks: TensorLike | None = None,
        sm_scale: float = 0,
        q_scale: float = 0,
        k_scale: float = 0,
        v_scale: float = 0,
        o_scale: float = 0,
        logits_soft_cap: float = 0,
        mask_mode: MaskMode | str = MaskMode.CAUSAL,
        window_left: int = 0,
        window_right: int = 0,
        k_rope: TensorLike | None = None,
        custom_mask_indptr: TensorLike | None = None,
        causal_requests: TensorLike | None = None,
        attention_chunk_size: int = 0,
        attention_chunk_look_back: int = 0,
        k_zero_points: TensorLike | None = None,
        v_zero_points: TensorLike | None = None,
        k_new: TensorLike | None = None,
        v_new: TensorLike | None = None,
        q_scales: TensorLike | None = None,
        o_scales: TensorLike | None = None,
        item_starts: TensorLike | None = None,
        item_positions: TensorLike | None = None,
        score_bias: TensorLike | None = None,
        stream: StreamLike | None = None,
    ) -> Call:
        """Appends the new tokens of a step and computes attention with them: what `rope_append`(append) followed by
        `Decode.run`(args) does, with the same results up to rounding, as one enqueue. In a decode step of a model
        this is all between the projection of q, k and v and that of the output. (No counterpart in FlashInfer or
        vLLM, whose fusions end at the cache.)

        The tensors of the two are the same: args.q is append.q_out, or append.q where that is None, and args.k and
        args.v are the caches of append. The planned lengths count the new tokens: row i of the batch is token i of
        append, and its key the one that causal masking lets it see last. Its slot is where the planned page table
        has that key; a negative slot leaves the cache as it is, and the run attends to what it holds. Whether
        tokens are computed and appended that no request of the batch has, or for which its kv_len has no key, is
        not defined. On CUDA nothing checks slots in device memory: another key's slot is a race.

        On Hopper one kernel does both, and a second where keys of a request are split, for: caches of float16,
        bfloat16 or fp8 in pages of a multiple of 8 tokens; head_dim 64, 128 or 256 (fp8: 64 or 128), up to 16
        packed rows for each KV head (fp8 and head_dim 256: 8), q of 16 bits; q_out another tensor than q, no
        key_out; rotary_dim a multiple of 16; rows aligned to 16 bytes; no custom mask. Otherwise, and on other
        devices, the two kernels are enqueued one after the other.

        Tensors and parameters of one attention call; one plan serves many, with different values.

        For query row i (position p = kv_len - qo_len + i) and key j:

            s = cap(q·k · sm_scale · q_scale · q_scales[kv_head] · k_scale · k_scales[kv_head]) + alibi(j - p) + score_bias[row, j]
            around(p, j) = p - j <= window_left and j - p <= window_right and chunk(p) - chunk(j) <= attention_chunk_look_back
            seen iff (mask(i, j) and around(p, j)) or mm_prefix(p, j)
            o = Σ softmax(s)_j v_j · v_scale · v_scales[kv_head],  divided by o_scale · o_scales[0] and saturated for fp8
            lse = log(Σ e^s [+ e^sink])

        with chunk(x) = floor(x / attention_chunk_size), and cap(s) = logits_soft_cap · tanh(s / logits_soft_cap),
        and a sink as one more logit without a value. A row that sees nothing has o = 0 and lse = -inf (its sink,
        with sinks). Memory that no row sees may hold anything, NaN included.

        The rules are those of FlashInfer's, vLLM's and SGLang's attention backends, with their differences
        resolved. Soft caps are Gemma 2's, ALiBi that of Press et al. (2022), its square-root form and the prefix
        ranges vLLM's, as is the bias of new keys, chunks those of Llama 4's local attention, sinks those of
        gpt-oss, the lse of parts that of FlashAttention-2.

        A scale or factor of 0 stands for its default, so 0 itself cannot be said.

        Args:
            append: what `rope_append` takes, as a mapping.
            flags: `RunFlag`
            q: Queries: `[num_tokens or more, num_qo_heads, head_dim_qk]` of q_dtype.
            k: Keys: paged `[num_pages, page_size, num_kv_heads, head_dim_qk]` (NHD), `[num_pages, num_kv_heads,
                page_size, head_dim_qk]` (HND), `[num_slots, num_kv_heads, head_dim_qk]` (page_size 1); ragged
                `[nnz_kv or more, num_kv_heads, head_dim_qk]`. Of kv_dtype; uint8 stands for fp8. num_pages is above
                every page id in use, and 1 or more where page ids or lengths are on a device. With k_rope, rows are
                shorter.
            v: Values: as k, with head_dim_vo and strides of its own.
            o: Output: `[num_tokens or more, num_qo_heads, head_dim_vo]` of o_dtype; uint8 stands for fp8. It may
                not overlap another tensor, q neither.
            lse: Output: `[num_tokens or more, num_qo_heads]` float32, float16 or bfloat16 of any strides, or None.
                It is computed in float32 and rounded once; what is beyond the type becomes infinite.
            k_scales: `[1]`, `[num_kv_heads]` or `[batch_size, num_kv_heads]` float32, or None: further factors of
                k, read by the run where it computes. Contiguous, but strides of 0 may expand one row, or one
                number, to the last of these shapes. Where the desc's kv_format has scales of its own: those, in the
                shape that `KvFormat` says.
            v_scales: As k_scales, for v.
            custom_mask: `[elements or more]` uint8 or bool, for the custom mask modes: as many bytes as the mode
                says for the batch. None otherwise.
            mm_prefix_ranges: `[batch_size, num_ranges, 2]` int32 or None: a row and a key at positions inside the
                same inclusive range see each other whatever mask and window say. start >= end: unused.
            alibi_slopes: `[num_qo_heads]` or `[batch_size, num_qo_heads]` float32, or None: adds slope · (j - p),
                or -slope · sqrt(p - j) for past keys.
            sinks: `[num_qo_heads]` float32 or None: a logit per head, in base e, that no scale and no cap changes.
            sm_scale: Factor of q·k. 0: 1 / sqrt(head_dim_qk). sm_scale · q_scale · k_scale is within ±2^60: beyond
                it logits leave float32.
            q_scale: Factor of q, which holds the queries divided by it. 0: 1.
            k_scale: Factor of k, for all heads: an fp8 cache holds k / k_scale. 0: 1.
            v_scale: Factor of v, for all heads, as k_scale; within ±2^60. 0: 1.
            o_scale: Divisor of o, 2^-60 to 2^60; only for fp8 outputs. 0: 1.
            logits_soft_cap: Logits are capped to ± this, 2^-60 to 2^60. 0: off.
            mask_mode: `MaskMode`
            window_left: Keys before the row's own position that it sees; -1: unlimited. Needs `RunFlag.WINDOW`.
            window_right: Keys after the row's own position that it sees; -1: unlimited. Needs `RunFlag.WINDOW`.
            k_rope: None where k has whole keys. Otherwise the last elements of the keys, in a tensor of one head
                that all KV heads share (the rotary part of DeepSeek-V2's MLA in its multi-head form): as k without
                the dimension of heads, or with one of extent 1, and with rope elements per row and strides of its
                own; of kv_dtype. k then has rows of head_dim_qk - rope elements, a multiple of 8. Paged
                `[num_pages, page_size, rope]` (both layouts), `[num_slots, rope]` (page_size 1); ragged `[nnz_kv or
                more, rope]`. Prefill handles only. Scales of k are of both parts.
            custom_mask_indptr: `[batch_size + 1]` int64, for the custom mask modes: where each request's mask
                starts in custom_mask, in bytes. The last element is not read, and neither are those of requests
                without rows. None: the masks lie one after the other. On a device, what a mask lacks is hidden.
            causal_requests: `[batch_size]` uint8 or bool, for `MaskMode.CAUSAL_BY_REQUEST`. None otherwise.
            attention_chunk_size: Keys of a chunk of chunked local attention; 0: off. Chunks count from a request's
                first key.
            attention_chunk_look_back: Chunks before its own that a row sees.
            k_zero_points: `[num_kv_heads, head_dim_qk]` float32, for `KvFormat.CHANNEL_ZERO_POINTS`. None
                otherwise.
            v_zero_points: `[num_kv_heads, head_dim_vo]` float32, for `KvFormat.CHANNEL_ZERO_POINTS`. None
                otherwise.
            k_new: Where a prefill desc has a new_kv_dtype, else None: the keys of the query rows, `[num_tokens or
                more, num_kv_heads, head_dim_qk]` of that type, in the order of the rows; any strides but a unit
                last one. They follow the request's keys in the cache, which are all that the batch's lengths and
                page table tell of, and kv_len above counts both. So positions, masks with their columns, windows,
                chunks, ranges and biases are those of a cache that had the new keys at the end. k_scale, v_scale,
                k_scales, v_scales and zero points are the cache's: new keys and values are as they are. Not with
                k_rope.
            v_new: As k_new, for values: `[num_tokens or more, num_kv_heads, head_dim_vo]`.
            q_scales: `[1]`, `[num_kv_heads]` or `[batch_size, num_kv_heads]` float32, or None: further factors of
                q, as k_scales. On a device they are read when the run gets there, so they may change under a
                captured graph, as k_scales and v_scales may. On CUDA this field and o_scales cost one more small
                launch. No number is checked.
            o_scales: `[1]` float32, or None: a further divisor of o; only for fp8 outputs. As q_scales.
            item_starts: `[batch_size]` int64, for `MaskMode.ITEMS`: the key that a request's first item begins with
                (FlashInfer's prefix_len_ptr). None otherwise.
            item_positions: `[batch_size, columns]` int32, for `MaskMode.ITEMS`: the positions within their items of
                the tokens from item_starts on, the delimiter before an item at 0 (FlashInfer's
                token_pos_in_items_ptr). A row without a column sees the prefix alone. None otherwise.
            score_bias: `[rows, columns]` for all heads or `[num_qo_heads or 1, rows, columns]`, float32, float16 or
                bfloat16 of any strides, or None: adds its elements to the logits of keys that a row sees, after the
                cap and beside ALiBi, in base e. Rows are those of q, or with `RunFlag.BIAS_REQUEST_ROWS` a
                request's; columns are a request's keys, or with `RunFlag.BIAS_NEW_KEYS` its last qo_len ones. There
                are as many as the batch has, or more, in each dimension; of lengths on a device, what the tensor
                lacks adds nothing. -inf hides a key. Elements of keys that a row does not see may be anything.
                Others may be neither NaN nor +inf, which give NaN.
            stream: CUDA stream; None: the current one of the tensors' framework. It is None on the CPU.

        Raises:
            InvalidArgumentError
        """
        return self._call("append_run", structs.ATTENTION_ARGS, locals(), append=structs.ROPE_APPEND_ARGS)

    #: `append_run` without the call: its result makes it, any number of times.
    prepare_append_run = prepared(append_run)


class Prefill(Handle):
    """Prefill attention: FlashInfer's BatchPrefillWithPagedKVCacheWrapper and BatchPrefillWithRaggedKVCacheWrapper.
    One handle serves every batch within its desc, and one plan every layer of a step.

    What a prefill handle is made from: any number of query rows per request, over a paged cache or over ragged K
    and V. Mixed batches (prefill, chunked prefill, decode, speculative verify) are one batch. Types, heads and
    dimensions as in `Decode`.

    Args:
        ctx: the device.
        flags: `PlanFlag`
        q_dtype: Type of q.
        kv_dtype: Type of k and v; None: as q, or the default of kv_format.
        o_dtype: Type of o; None: as q.
        kv_layout: `KvLayout.NHD` or `KvLayout.HND`; 0 for ragged.
        num_qo_heads: Query (and output) heads.
        num_kv_heads: KV heads.
        head_dim_qk: Elements of a q or k row.
        head_dim_vo: Elements of a v or o row; 0: head_dim_qk.
        kv_storage: `KvStorage.PAGED` or `KvStorage.RAGGED`.
        page_size: Tokens per page, 1 or more; 0 for ragged.
        max_batch_size: Most requests of a batch.
        max_num_tokens: Most query rows of a batch, over all requests.
        max_qo_len: Most query rows of a request; 0: max_num_tokens.
        max_kv_len: Most keys of a request, those beside the cache included.
        max_num_pages: Most pages of a batch, over all requests; 0: max_batch_size times the pages of max_kv_len.
        kv_format: `KvFormat`: how rows of the cache are stored. Other formats than `KvFormat.PLAIN` are for paged
            caches; on CUDA q has 16 bits there.
        new_kv_dtype: Type of k_new and v_new, that of q or fp8; None: there are none. With it the keys and values
            of the query rows are beside the paged cache, in every run of the handle: see `Decode.run`.k_new.
    """

    _name = "prefill"

    def __init__(
        self,
        ctx: Context,
        *,
        flags: PlanFlag | int | str | Iterable[str] = 0,
        q_dtype: DtypeLike,
        kv_dtype: DtypeLike | None = None,
        o_dtype: DtypeLike | None = None,
        kv_layout: KvLayout | str = KvLayout.NHD,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        head_dim_vo: int = 0,
        kv_storage: KvStorage | str = KvStorage.PAGED,
        page_size: int = 0,
        max_batch_size: int,
        max_num_tokens: int,
        max_qo_len: int = 0,
        max_kv_len: int,
        max_num_pages: int = 0,
        kv_format: KvFormat | str = KvFormat.PLAIN,
        new_kv_dtype: DtypeLike | None = None,
    ) -> None:
        super().__init__(ctx, structs.PREFILL_DESC, locals())

    def plan(
        self,
        *,
        flags: BatchFlag | int | str | Iterable[str] = 0,
        qo_len: int = 0,
        qo_indptr: TensorLike | None = None,
        kv_indptr: TensorLike | None = None,
        kv_indices: TensorLike | None = None,
        last_page_len: TensorLike | None = None,
        kv_len: TensorLike | None = None,
        block_table: TensorLike | None = None,
        window_left: int = 0,
        workspace: Workspace | None = None,
        stream: StreamLike | None = None,
    ) -> None:
        """Takes over a step's batch.

        The page table comes in the forms of `Batch`. On failure the previous plan stays in force.

        Args:
            flags: `BatchFlag.WINDOW`.
            qo_len: Query rows of every request where qo_indptr is None (decode only); 0: 1.
            qo_indptr: `[batch_size + 1]` query-row offsets from 0; decode accepts None.
            kv_indptr: `[batch_size + 1]` offsets from 0 into kv_indices, or into ragged K and V.
            kv_indices: `[num_pages or more]` page ids, 0 or more.
            last_page_len: `[batch_size]` tokens in the last page, 1 to page_size; not read for requests without
                pages. Refused together with kv_len.
            kv_len: `[batch_size]` keys per request, those of this step included; 0 or more. With a new_kv_dtype,
                those in the cache.
            block_table: `[batch_size, max_pages_per_request]` page ids; only those that kv_len needs are read.
            window_left: No run of the plan sees a key more than so many before its row's own position: a run with a
                wider window is refused, and one with mm_prefix_ranges that reach beyond it. Keys before the window
                are not planned for, which saves time where it is short. -1: unlimited. Needs `BatchFlag.WINDOW`.
                For decode and prefill over the cache; MLA, cascades and handles with a new_kv_dtype refuse it.
                Where captured runs are replayed, every plan is for the window of those runs or a wider one: a
                replay cannot be refused.
            workspace: memory as workspace_info asks; None: that of the last plan, or at the first plan memory that
                the handle allocates.
            stream: CUDA stream that later runs use or wait for; None: the current one of the tensors' framework. It
                is None on the CPU.

        Raises:
            InvalidArgumentError, UnknownFieldError, ShapeError, DtypeError, DeviceMismatchError,
            WorkspaceTooSmallError, CaptureError, UnsupportedError, OutOfMemoryError, DriverError
        """
        self._plan(structs.BATCH, locals())

    @operator
    def run(
        self,
        *,
        flags: RunFlag | int | str | Iterable[str] = 0,
        q: TensorLike,
        k: TensorLike,
        v: TensorLike,
        o: TensorLike,
        lse: TensorLike | None = None,
        k_scales: TensorLike | None = None,
        v_scales: TensorLike | None = None,
        custom_mask: TensorLike | None = None,
        mm_prefix_ranges: TensorLike | None = None,
        alibi_slopes: TensorLike | None = None,
        sinks: TensorLike | None = None,
        sm_scale: float = 0,
        q_scale: float = 0,
        k_scale: float = 0,
        v_scale: float = 0,
        o_scale: float = 0,
        logits_soft_cap: float = 0,
        mask_mode: MaskMode | str = MaskMode.CAUSAL,
        window_left: int = 0,
        window_right: int = 0,
        k_rope: TensorLike | None = None,
        custom_mask_indptr: TensorLike | None = None,
        causal_requests: TensorLike | None = None,
        attention_chunk_size: int = 0,
        attention_chunk_look_back: int = 0,
        k_zero_points: TensorLike | None = None,
        v_zero_points: TensorLike | None = None,
        k_new: TensorLike | None = None,
        v_new: TensorLike | None = None,
        q_scales: TensorLike | None = None,
        o_scales: TensorLike | None = None,
        item_starts: TensorLike | None = None,
        item_positions: TensorLike | None = None,
        score_bias: TensorLike | None = None,
        stream: StreamLike | None = None,
    ) -> Call:
        """Computes attention for the planned batch.

        Tensors and parameters of one attention call; one plan serves many, with different values.

        For query row i (position p = kv_len - qo_len + i) and key j:

            s = cap(q·k · sm_scale · q_scale · q_scales[kv_head] · k_scale · k_scales[kv_head]) + alibi(j - p) + score_bias[row, j]
            around(p, j) = p - j <= window_left and j - p <= window_right and chunk(p) - chunk(j) <= attention_chunk_look_back
            seen iff (mask(i, j) and around(p, j)) or mm_prefix(p, j)
            o = Σ softmax(s)_j v_j · v_scale · v_scales[kv_head],  divided by o_scale · o_scales[0] and saturated for fp8
            lse = log(Σ e^s [+ e^sink])

        with chunk(x) = floor(x / attention_chunk_size), and cap(s) = logits_soft_cap · tanh(s / logits_soft_cap),
        and a sink as one more logit without a value. A row that sees nothing has o = 0 and lse = -inf (its sink,
        with sinks). Memory that no row sees may hold anything, NaN included.

        The rules are those of FlashInfer's, vLLM's and SGLang's attention backends, with their differences
        resolved. Soft caps are Gemma 2's, ALiBi that of Press et al. (2022), its square-root form and the prefix
        ranges vLLM's, as is the bias of new keys, chunks those of Llama 4's local attention, sinks those of
        gpt-oss, the lse of parts that of FlashAttention-2.

        A scale or factor of 0 stands for its default, so 0 itself cannot be said.

        Args:
            flags: `RunFlag`
            q: Queries: `[num_tokens or more, num_qo_heads, head_dim_qk]` of q_dtype.
            k: Keys: paged `[num_pages, page_size, num_kv_heads, head_dim_qk]` (NHD), `[num_pages, num_kv_heads,
                page_size, head_dim_qk]` (HND), `[num_slots, num_kv_heads, head_dim_qk]` (page_size 1); ragged
                `[nnz_kv or more, num_kv_heads, head_dim_qk]`. Of kv_dtype; uint8 stands for fp8. num_pages is above
                every page id in use, and 1 or more where page ids or lengths are on a device. With k_rope, rows are
                shorter.
            v: Values: as k, with head_dim_vo and strides of its own.
            o: Output: `[num_tokens or more, num_qo_heads, head_dim_vo]` of o_dtype; uint8 stands for fp8. It may
                not overlap another tensor, q neither.
            lse: Output: `[num_tokens or more, num_qo_heads]` float32, float16 or bfloat16 of any strides, or None.
                It is computed in float32 and rounded once; what is beyond the type becomes infinite.
            k_scales: `[1]`, `[num_kv_heads]` or `[batch_size, num_kv_heads]` float32, or None: further factors of
                k, read by the run where it computes. Contiguous, but strides of 0 may expand one row, or one
                number, to the last of these shapes. Where the desc's kv_format has scales of its own: those, in the
                shape that `KvFormat` says.
            v_scales: As k_scales, for v.
            custom_mask: `[elements or more]` uint8 or bool, for the custom mask modes: as many bytes as the mode
                says for the batch. None otherwise.
            mm_prefix_ranges: `[batch_size, num_ranges, 2]` int32 or None: a row and a key at positions inside the
                same inclusive range see each other whatever mask and window say. start >= end: unused.
            alibi_slopes: `[num_qo_heads]` or `[batch_size, num_qo_heads]` float32, or None: adds slope · (j - p),
                or -slope · sqrt(p - j) for past keys.
            sinks: `[num_qo_heads]` float32 or None: a logit per head, in base e, that no scale and no cap changes.
            sm_scale: Factor of q·k. 0: 1 / sqrt(head_dim_qk). sm_scale · q_scale · k_scale is within ±2^60: beyond
                it logits leave float32.
            q_scale: Factor of q, which holds the queries divided by it. 0: 1.
            k_scale: Factor of k, for all heads: an fp8 cache holds k / k_scale. 0: 1.
            v_scale: Factor of v, for all heads, as k_scale; within ±2^60. 0: 1.
            o_scale: Divisor of o, 2^-60 to 2^60; only for fp8 outputs. 0: 1.
            logits_soft_cap: Logits are capped to ± this, 2^-60 to 2^60. 0: off.
            mask_mode: `MaskMode`
            window_left: Keys before the row's own position that it sees; -1: unlimited. Needs `RunFlag.WINDOW`.
            window_right: Keys after the row's own position that it sees; -1: unlimited. Needs `RunFlag.WINDOW`.
            k_rope: None where k has whole keys. Otherwise the last elements of the keys, in a tensor of one head
                that all KV heads share (the rotary part of DeepSeek-V2's MLA in its multi-head form): as k without
                the dimension of heads, or with one of extent 1, and with rope elements per row and strides of its
                own; of kv_dtype. k then has rows of head_dim_qk - rope elements, a multiple of 8. Paged
                `[num_pages, page_size, rope]` (both layouts), `[num_slots, rope]` (page_size 1); ragged `[nnz_kv or
                more, rope]`. Prefill handles only. Scales of k are of both parts.
            custom_mask_indptr: `[batch_size + 1]` int64, for the custom mask modes: where each request's mask
                starts in custom_mask, in bytes. The last element is not read, and neither are those of requests
                without rows. None: the masks lie one after the other. On a device, what a mask lacks is hidden.
            causal_requests: `[batch_size]` uint8 or bool, for `MaskMode.CAUSAL_BY_REQUEST`. None otherwise.
            attention_chunk_size: Keys of a chunk of chunked local attention; 0: off. Chunks count from a request's
                first key.
            attention_chunk_look_back: Chunks before its own that a row sees.
            k_zero_points: `[num_kv_heads, head_dim_qk]` float32, for `KvFormat.CHANNEL_ZERO_POINTS`. None
                otherwise.
            v_zero_points: `[num_kv_heads, head_dim_vo]` float32, for `KvFormat.CHANNEL_ZERO_POINTS`. None
                otherwise.
            k_new: Where a prefill desc has a new_kv_dtype, else None: the keys of the query rows, `[num_tokens or
                more, num_kv_heads, head_dim_qk]` of that type, in the order of the rows; any strides but a unit
                last one. They follow the request's keys in the cache, which are all that the batch's lengths and
                page table tell of, and kv_len above counts both. So positions, masks with their columns, windows,
                chunks, ranges and biases are those of a cache that had the new keys at the end. k_scale, v_scale,
                k_scales, v_scales and zero points are the cache's: new keys and values are as they are. Not with
                k_rope.
            v_new: As k_new, for values: `[num_tokens or more, num_kv_heads, head_dim_vo]`.
            q_scales: `[1]`, `[num_kv_heads]` or `[batch_size, num_kv_heads]` float32, or None: further factors of
                q, as k_scales. On a device they are read when the run gets there, so they may change under a
                captured graph, as k_scales and v_scales may. On CUDA this field and o_scales cost one more small
                launch. No number is checked.
            o_scales: `[1]` float32, or None: a further divisor of o; only for fp8 outputs. As q_scales.
            item_starts: `[batch_size]` int64, for `MaskMode.ITEMS`: the key that a request's first item begins with
                (FlashInfer's prefix_len_ptr). None otherwise.
            item_positions: `[batch_size, columns]` int32, for `MaskMode.ITEMS`: the positions within their items of
                the tokens from item_starts on, the delimiter before an item at 0 (FlashInfer's
                token_pos_in_items_ptr). A row without a column sees the prefix alone. None otherwise.
            score_bias: `[rows, columns]` for all heads or `[num_qo_heads or 1, rows, columns]`, float32, float16 or
                bfloat16 of any strides, or None: adds its elements to the logits of keys that a row sees, after the
                cap and beside ALiBi, in base e. Rows are those of q, or with `RunFlag.BIAS_REQUEST_ROWS` a
                request's; columns are a request's keys, or with `RunFlag.BIAS_NEW_KEYS` its last qo_len ones. There
                are as many as the batch has, or more, in each dimension; of lengths on a device, what the tensor
                lacks adds nothing. -inf hides a key. Elements of keys that a row does not see may be anything.
                Others may be neither NaN nor +inf, which give NaN.
            stream: CUDA stream; None: the current one of the tensors' framework. It is None on the CPU.

        Raises:
            NotPlannedError, InvalidArgumentError, UnknownFieldError, ShapeError, DtypeError, DeviceMismatchError,
            CaptureError, UnsupportedError, DriverError
        """
        return self._call("run", structs.ATTENTION_ARGS, locals())

    #: `run` without the call: its result makes it, any number of times.
    prepare_run = prepared(run)


class Cascade(Handle):
    """Attention over batches whose requests share prefixes: FlashInfer's MultiLevelCascadeAttentionWrapper, vLLM's
    cascade attention. Shared keys are read once for all rows that see them, and the parts of every row are put
    together by one kernel. Results are those of `Prefill` on the same batch, up to rounding.

    A plan shares what pays and leaves the rest to the requests. Runs with a window to the left, chunks, ALiBi or a
    custom mask of all keys depend on positions, which rows of several requests do not have in common: they read the
    keys request by request. With `PlanFlag.GRAPH`, runs without them always take the kernel for shared keys, also
    where nothing pays: steps that share nothing are faster with `Decode`. But where max_batch_size requests of
    max_kv_len keys that share two thirds of them would not pay, no run shares, and runs are those of `Decode`: so
    make handles of graphs for no longer requests than they get. With `PlanFlag.BATCH_INVARIANT` nothing is shared,
    since what a request shares depends on the others. One handle serves every batch within its desc, and one plan
    every layer of a step.

    What a cascade handle is made from: any number of query rows per request, over a paged cache, where neighbouring
    requests may have their first pages in common. Types, heads and dimensions as in `Decode`.

    Args:
        ctx: the device.
        flags: `PlanFlag`
        q_dtype: Type of q.
        kv_dtype: Type of k and v; None: as q, or the default of kv_format.
        o_dtype: Type of o; None: as q.
        kv_layout: `KvLayout.NHD` or `KvLayout.HND`.
        num_qo_heads: Query (and output) heads.
        num_kv_heads: KV heads.
        head_dim_qk: Elements of a q or k row.
        head_dim_vo: Elements of a v or o row; 0: head_dim_qk.
        page_size: Tokens per page, 1 or more.
        max_batch_size: Most requests of a batch.
        max_num_tokens: Most query rows of a batch, over all requests.
        max_qo_len: Most query rows of a request; 0: max_num_tokens.
        max_kv_len: Most keys of a request, shared ones included.
        max_shared_levels: Most prefixes that are shared one within the other, up to 16; 0: 1. Deeper ones are left
            to the requests.
        max_num_pages: Most page-table entries of a batch, over all requests, where shared pages count for each of
            them; 0: max_batch_size times the pages of max_kv_len.
        kv_format: `KvFormat`: how rows of the cache are stored. Other formats than `KvFormat.PLAIN` are for paged
            caches; on CUDA q has 16 bits there.
    """

    _name = "cascade"

    def __init__(
        self,
        ctx: Context,
        *,
        flags: PlanFlag | int | str | Iterable[str] = 0,
        q_dtype: DtypeLike,
        kv_dtype: DtypeLike | None = None,
        o_dtype: DtypeLike | None = None,
        kv_layout: KvLayout | str = KvLayout.NHD,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        head_dim_vo: int = 0,
        page_size: int,
        max_batch_size: int,
        max_num_tokens: int,
        max_qo_len: int = 0,
        max_kv_len: int,
        max_shared_levels: int = 0,
        max_num_pages: int = 0,
        kv_format: KvFormat | str = KvFormat.PLAIN,
    ) -> None:
        super().__init__(ctx, structs.CASCADE_DESC, locals())

    def plan(
        self,
        *,
        flags: BatchFlag | int | str | Iterable[str] = 0,
        qo_len: int = 0,
        qo_indptr: TensorLike | None = None,
        kv_indptr: TensorLike | None = None,
        kv_indices: TensorLike | None = None,
        last_page_len: TensorLike | None = None,
        kv_len: TensorLike | None = None,
        block_table: TensorLike | None = None,
        window_left: int = 0,
        prefixes: SharedPrefixes | None = None,
        workspace: Workspace | None = None,
        stream: StreamLike | None = None,
    ) -> None:
        """Takes over a step's batch, whose page table has shared pages in the rows of every request that has them, and
        what its requests share. Lengths may be on the device, where prefixes end at the last key that all of their
        requests have: what was stated bounds that. A plan that was captured keeps its prefixes.

        The page table comes in the forms of `Batch`. On failure the previous plan stays in force.

        Args:
            flags: `BatchFlag.WINDOW`.
            qo_len: Query rows of every request where qo_indptr is None (decode only); 0: 1.
            qo_indptr: `[batch_size + 1]` query-row offsets from 0; decode accepts None.
            kv_indptr: `[batch_size + 1]` offsets from 0 into kv_indices, or into ragged K and V.
            kv_indices: `[num_pages or more]` page ids, 0 or more.
            last_page_len: `[batch_size]` tokens in the last page, 1 to page_size; not read for requests without
                pages. Refused together with kv_len.
            kv_len: `[batch_size]` keys per request, those of this step included; 0 or more. With a new_kv_dtype,
                those in the cache.
            block_table: `[batch_size, max_pages_per_request]` page ids; only those that kv_len needs are read.
            window_left: No run of the plan sees a key more than so many before its row's own position: a run with a
                wider window is refused, and one with mm_prefix_ranges that reach beyond it. Keys before the window
                are not planned for, which saves time where it is short. -1: unlimited. Needs `BatchFlag.WINDOW`.
                For decode and prefill over the cache; MLA, cascades and handles with a new_kv_dtype refuse it.
                Where captured runs are replayed, every plan is for the window of those runs or a wider one: a
                replay cannot be refused.
            prefixes: what requests share; None: nothing.
            workspace: memory as workspace_info asks; None: that of the last plan, or at the first plan memory that
                the handle allocates.
            stream: CUDA stream that later runs use or wait for; None: the current one of the tensors' framework. It
                is None on the CPU.

        Raises:
            InvalidArgumentError, UnknownFieldError, ShapeError, DtypeError, DeviceMismatchError,
            WorkspaceTooSmallError, CaptureError, UnsupportedError, OutOfMemoryError, DriverError
        """
        self._plan(structs.BATCH, locals(), structs.SHARED_PREFIXES)

    @operator
    def run(
        self,
        *,
        flags: RunFlag | int | str | Iterable[str] = 0,
        q: TensorLike,
        k: TensorLike,
        v: TensorLike,
        o: TensorLike,
        lse: TensorLike | None = None,
        k_scales: TensorLike | None = None,
        v_scales: TensorLike | None = None,
        custom_mask: TensorLike | None = None,
        mm_prefix_ranges: TensorLike | None = None,
        alibi_slopes: TensorLike | None = None,
        sinks: TensorLike | None = None,
        sm_scale: float = 0,
        q_scale: float = 0,
        k_scale: float = 0,
        v_scale: float = 0,
        o_scale: float = 0,
        logits_soft_cap: float = 0,
        mask_mode: MaskMode | str = MaskMode.CAUSAL,
        window_left: int = 0,
        window_right: int = 0,
        k_rope: TensorLike | None = None,
        custom_mask_indptr: TensorLike | None = None,
        causal_requests: TensorLike | None = None,
        attention_chunk_size: int = 0,
        attention_chunk_look_back: int = 0,
        k_zero_points: TensorLike | None = None,
        v_zero_points: TensorLike | None = None,
        k_new: TensorLike | None = None,
        v_new: TensorLike | None = None,
        q_scales: TensorLike | None = None,
        o_scales: TensorLike | None = None,
        item_starts: TensorLike | None = None,
        item_positions: TensorLike | None = None,
        score_bias: TensorLike | None = None,
        stream: StreamLike | None = None,
    ) -> Call:
        """Computes attention for the planned batch.

        Tensors and parameters of one attention call; one plan serves many, with different values.

        For query row i (position p = kv_len - qo_len + i) and key j:

            s = cap(q·k · sm_scale · q_scale · q_scales[kv_head] · k_scale · k_scales[kv_head]) + alibi(j - p) + score_bias[row, j]
            around(p, j) = p - j <= window_left and j - p <= window_right and chunk(p) - chunk(j) <= attention_chunk_look_back
            seen iff (mask(i, j) and around(p, j)) or mm_prefix(p, j)
            o = Σ softmax(s)_j v_j · v_scale · v_scales[kv_head],  divided by o_scale · o_scales[0] and saturated for fp8
            lse = log(Σ e^s [+ e^sink])

        with chunk(x) = floor(x / attention_chunk_size), and cap(s) = logits_soft_cap · tanh(s / logits_soft_cap),
        and a sink as one more logit without a value. A row that sees nothing has o = 0 and lse = -inf (its sink,
        with sinks). Memory that no row sees may hold anything, NaN included.

        The rules are those of FlashInfer's, vLLM's and SGLang's attention backends, with their differences
        resolved. Soft caps are Gemma 2's, ALiBi that of Press et al. (2022), its square-root form and the prefix
        ranges vLLM's, as is the bias of new keys, chunks those of Llama 4's local attention, sinks those of
        gpt-oss, the lse of parts that of FlashAttention-2.

        A scale or factor of 0 stands for its default, so 0 itself cannot be said.

        Args:
            flags: `RunFlag`
            q: Queries: `[num_tokens or more, num_qo_heads, head_dim_qk]` of q_dtype.
            k: Keys: paged `[num_pages, page_size, num_kv_heads, head_dim_qk]` (NHD), `[num_pages, num_kv_heads,
                page_size, head_dim_qk]` (HND), `[num_slots, num_kv_heads, head_dim_qk]` (page_size 1); ragged
                `[nnz_kv or more, num_kv_heads, head_dim_qk]`. Of kv_dtype; uint8 stands for fp8. num_pages is above
                every page id in use, and 1 or more where page ids or lengths are on a device. With k_rope, rows are
                shorter.
            v: Values: as k, with head_dim_vo and strides of its own.
            o: Output: `[num_tokens or more, num_qo_heads, head_dim_vo]` of o_dtype; uint8 stands for fp8. It may
                not overlap another tensor, q neither.
            lse: Output: `[num_tokens or more, num_qo_heads]` float32, float16 or bfloat16 of any strides, or None.
                It is computed in float32 and rounded once; what is beyond the type becomes infinite.
            k_scales: `[1]`, `[num_kv_heads]` or `[batch_size, num_kv_heads]` float32, or None: further factors of
                k, read by the run where it computes. Contiguous, but strides of 0 may expand one row, or one
                number, to the last of these shapes. Where the desc's kv_format has scales of its own: those, in the
                shape that `KvFormat` says.
            v_scales: As k_scales, for v.
            custom_mask: `[elements or more]` uint8 or bool, for the custom mask modes: as many bytes as the mode
                says for the batch. None otherwise.
            mm_prefix_ranges: `[batch_size, num_ranges, 2]` int32 or None: a row and a key at positions inside the
                same inclusive range see each other whatever mask and window say. start >= end: unused.
            alibi_slopes: `[num_qo_heads]` or `[batch_size, num_qo_heads]` float32, or None: adds slope · (j - p),
                or -slope · sqrt(p - j) for past keys.
            sinks: `[num_qo_heads]` float32 or None: a logit per head, in base e, that no scale and no cap changes.
            sm_scale: Factor of q·k. 0: 1 / sqrt(head_dim_qk). sm_scale · q_scale · k_scale is within ±2^60: beyond
                it logits leave float32.
            q_scale: Factor of q, which holds the queries divided by it. 0: 1.
            k_scale: Factor of k, for all heads: an fp8 cache holds k / k_scale. 0: 1.
            v_scale: Factor of v, for all heads, as k_scale; within ±2^60. 0: 1.
            o_scale: Divisor of o, 2^-60 to 2^60; only for fp8 outputs. 0: 1.
            logits_soft_cap: Logits are capped to ± this, 2^-60 to 2^60. 0: off.
            mask_mode: `MaskMode`
            window_left: Keys before the row's own position that it sees; -1: unlimited. Needs `RunFlag.WINDOW`.
            window_right: Keys after the row's own position that it sees; -1: unlimited. Needs `RunFlag.WINDOW`.
            k_rope: None where k has whole keys. Otherwise the last elements of the keys, in a tensor of one head
                that all KV heads share (the rotary part of DeepSeek-V2's MLA in its multi-head form): as k without
                the dimension of heads, or with one of extent 1, and with rope elements per row and strides of its
                own; of kv_dtype. k then has rows of head_dim_qk - rope elements, a multiple of 8. Paged
                `[num_pages, page_size, rope]` (both layouts), `[num_slots, rope]` (page_size 1); ragged `[nnz_kv or
                more, rope]`. Prefill handles only. Scales of k are of both parts.
            custom_mask_indptr: `[batch_size + 1]` int64, for the custom mask modes: where each request's mask
                starts in custom_mask, in bytes. The last element is not read, and neither are those of requests
                without rows. None: the masks lie one after the other. On a device, what a mask lacks is hidden.
            causal_requests: `[batch_size]` uint8 or bool, for `MaskMode.CAUSAL_BY_REQUEST`. None otherwise.
            attention_chunk_size: Keys of a chunk of chunked local attention; 0: off. Chunks count from a request's
                first key.
            attention_chunk_look_back: Chunks before its own that a row sees.
            k_zero_points: `[num_kv_heads, head_dim_qk]` float32, for `KvFormat.CHANNEL_ZERO_POINTS`. None
                otherwise.
            v_zero_points: `[num_kv_heads, head_dim_vo]` float32, for `KvFormat.CHANNEL_ZERO_POINTS`. None
                otherwise.
            k_new: Where a prefill desc has a new_kv_dtype, else None: the keys of the query rows, `[num_tokens or
                more, num_kv_heads, head_dim_qk]` of that type, in the order of the rows; any strides but a unit
                last one. They follow the request's keys in the cache, which are all that the batch's lengths and
                page table tell of, and kv_len above counts both. So positions, masks with their columns, windows,
                chunks, ranges and biases are those of a cache that had the new keys at the end. k_scale, v_scale,
                k_scales, v_scales and zero points are the cache's: new keys and values are as they are. Not with
                k_rope.
            v_new: As k_new, for values: `[num_tokens or more, num_kv_heads, head_dim_vo]`.
            q_scales: `[1]`, `[num_kv_heads]` or `[batch_size, num_kv_heads]` float32, or None: further factors of
                q, as k_scales. On a device they are read when the run gets there, so they may change under a
                captured graph, as k_scales and v_scales may. On CUDA this field and o_scales cost one more small
                launch. No number is checked.
            o_scales: `[1]` float32, or None: a further divisor of o; only for fp8 outputs. As q_scales.
            item_starts: `[batch_size]` int64, for `MaskMode.ITEMS`: the key that a request's first item begins with
                (FlashInfer's prefix_len_ptr). None otherwise.
            item_positions: `[batch_size, columns]` int32, for `MaskMode.ITEMS`: the positions within their items of
                the tokens from item_starts on, the delimiter before an item at 0 (FlashInfer's
                token_pos_in_items_ptr). A row without a column sees the prefix alone. None otherwise.
            score_bias: `[rows, columns]` for all heads or `[num_qo_heads or 1, rows, columns]`, float32, float16 or
                bfloat16 of any strides, or None: adds its elements to the logits of keys that a row sees, after the
                cap and beside ALiBi, in base e. Rows are those of q, or with `RunFlag.BIAS_REQUEST_ROWS` a
                request's; columns are a request's keys, or with `RunFlag.BIAS_NEW_KEYS` its last qo_len ones. There
                are as many as the batch has, or more, in each dimension; of lengths on a device, what the tensor
                lacks adds nothing. -inf hides a key. Elements of keys that a row does not see may be anything.
                Others may be neither NaN nor +inf, which give NaN.
            stream: CUDA stream; None: the current one of the tensors' framework. It is None on the CPU.

        Raises:
            NotPlannedError, InvalidArgumentError, UnknownFieldError, ShapeError, DtypeError, DeviceMismatchError,
            CaptureError, UnsupportedError, DriverError
        """
        return self._call("run", structs.ATTENTION_ARGS, locals())

    #: `run` without the call: its result makes it, any number of times.
    prepare_run = prepared(run)

    def shares(self) -> int:
        """Whether the current plan shares keys: some prefix pays."""
        return self._number("shares")


class Mla(Handle):
    """Multi-head latent attention in its absorbed form: FlashMLA's flash_mla_with_kvcache and FlashInfer's
    BatchMLAPagedAttentionWrapper. One handle serves every batch within its desc, and one plan every layer of a
    step.

    What an MLA handle is made from: the absorbed form of DeepSeek-V2's multi-head latent attention. All heads read
    one record per token: its latent part is key and value, its rotary part is key only.

    Types: q float32, float16 or bfloat16; the cache the same type, float8_e4m3, float8_e5m2 or fp8_ds_mla; o the
    type of q. Or q float8_e4m3 or float8_e5m2, as vLLM quantises it: the cache either of these, o float16 or
    bfloat16; products and weights are as exact as beside queries of 16 bits. On CUDA devices a launch then makes
    rows of o's type of the queries, for which the workspace has 2 bytes for each element of those of the largest
    batch.

    The maxima bound every later batch and fix the workspace. One plan takes any mixture of decodes, verified drafts
    and prompts.

    Sparse attention (DeepSeek-V3.2), where every query token sees a list of tokens of its own: page_size 1, each
    query token a request of one row, whose row of block_table lists slots, and whose kv_len counts them. On CUDA
    devices one plan serves the lists of all layers, if these are int32, on the device, and come to the same tensor.

    Args:
        ctx: the device.
        flags: `PlanFlag`
        q_dtype: Type of q.
        kv_dtype: Type of the cache; None: as q. With `MlaCacheFormat.FP8_DS_MLA`: None or float8_e4m3.
        o_dtype: Type of o, which is that of q, or beside fp8 one of 16 bits; None: as q.
        cache_format: `MlaCacheFormat`
        num_heads: Query (and output) heads, 1 or more.
        kv_lora_rank: Elements of a latent row, and of a row of o: a multiple of 8 up to 512. DeepSeek-V2 and V3:
            512.
        qk_rope_head_dim: Elements of a rotary row: 0, or a multiple of 8 up to 64. DeepSeek-V2 and V3: 64.
        page_size: Tokens per page, 1 or more.
        max_batch_size: Most requests of a batch.
        max_qo_len: Most query rows of a request; 0: 1.
        max_num_tokens: Most query rows of a batch, over all requests; 0: max_batch_size times max_qo_len.
        max_kv_len: Most keys of a request.
        max_num_pages: Most pages of a batch, over all requests; 0: max_batch_size times the pages of max_kv_len.
    """

    _name = "mla"

    def __init__(
        self,
        ctx: Context,
        *,
        flags: PlanFlag | int | str | Iterable[str] = 0,
        q_dtype: DtypeLike,
        kv_dtype: DtypeLike | None = None,
        o_dtype: DtypeLike | None = None,
        cache_format: MlaCacheFormat | str = MlaCacheFormat.PLAIN,
        num_heads: int,
        kv_lora_rank: int,
        qk_rope_head_dim: int = 0,
        page_size: int,
        max_batch_size: int,
        max_qo_len: int = 0,
        max_num_tokens: int = 0,
        max_kv_len: int,
        max_num_pages: int = 0,
    ) -> None:
        super().__init__(ctx, structs.MLA_DESC, locals())

    def plan(
        self,
        *,
        flags: BatchFlag | int | str | Iterable[str] = 0,
        qo_len: int = 0,
        qo_indptr: TensorLike | None = None,
        kv_indptr: TensorLike | None = None,
        kv_indices: TensorLike | None = None,
        last_page_len: TensorLike | None = None,
        kv_len: TensorLike | None = None,
        block_table: TensorLike | None = None,
        window_left: int = 0,
        workspace: Workspace | None = None,
        stream: StreamLike | None = None,
    ) -> None:
        """Takes over a step's batch. qo_indptr may be None, as for decode.

        The page table comes in the forms of `Batch`. On failure the previous plan stays in force.

        Args:
            flags: `BatchFlag.WINDOW`.
            qo_len: Query rows of every request where qo_indptr is None (decode only); 0: 1.
            qo_indptr: `[batch_size + 1]` query-row offsets from 0; decode accepts None.
            kv_indptr: `[batch_size + 1]` offsets from 0 into kv_indices, or into ragged K and V.
            kv_indices: `[num_pages or more]` page ids, 0 or more.
            last_page_len: `[batch_size]` tokens in the last page, 1 to page_size; not read for requests without
                pages. Refused together with kv_len.
            kv_len: `[batch_size]` keys per request, those of this step included; 0 or more. With a new_kv_dtype,
                those in the cache.
            block_table: `[batch_size, max_pages_per_request]` page ids; only those that kv_len needs are read.
            window_left: No run of the plan sees a key more than so many before its row's own position: a run with a
                wider window is refused, and one with mm_prefix_ranges that reach beyond it. Keys before the window
                are not planned for, which saves time where it is short. -1: unlimited. Needs `BatchFlag.WINDOW`.
                For decode and prefill over the cache; MLA, cascades and handles with a new_kv_dtype refuse it.
                Where captured runs are replayed, every plan is for the window of those runs or a wider one: a
                replay cannot be refused.
            workspace: memory as workspace_info asks; None: that of the last plan, or at the first plan memory that
                the handle allocates.
            stream: CUDA stream that later runs use or wait for; None: the current one of the tensors' framework. It
                is None on the CPU.

        Raises:
            InvalidArgumentError, UnknownFieldError, ShapeError, DtypeError, DeviceMismatchError,
            WorkspaceTooSmallError, CaptureError, UnsupportedError, OutOfMemoryError, DriverError
        """
        self._plan(structs.BATCH, locals())

    @operator
    def run(
        self,
        *,
        flags: RunFlag | int | str | Iterable[str] = 0,
        q_latent: TensorLike,
        q_rope: TensorLike | None = None,
        kv: TensorLike,
        kv_rope: TensorLike | None = None,
        o: TensorLike,
        lse: TensorLike | None = None,
        sm_scale: float,
        q_scale: float = 0,
        k_scale: float = 0,
        mask_mode: MaskMode | str = MaskMode.CAUSAL,
        stream: StreamLike | None = None,
    ) -> Call:
        """Computes attention for the planned batch.

        Tensors and parameters of one MLA call; one plan serves many, with different values.

        For query row i of head h and the record (c, r) of key j, which holds values divided by k_scale:

            s = (q_latent·c + q_rope·r) · sm_scale · q_scale · k_scale
            seen iff mask_mode is `MaskMode.FULL` or j <= kv_len - qo_len + i
            o = Σ softmax(s)_j c_j · k_scale
            lse = log(Σ e^s)

        A row that sees nothing has o = 0 and lse = -inf. Memory that no row sees may hold anything, NaN included.

        This is the data-movement friendly form of vLLM's MLA backends, and what FlashMLA and FlashInfer's
        BatchMLAPagedAttentionWrapper compute: q_latent is the query's part without rotation times W_UK, and the
        output times W_UV is that of the heads (DeepSeek-V2, section 2.1).

        Args:
            flags: `RunFlag.LSE_BASE_2` or 0.
            q_latent: Absorbed queries: `[num_tokens or more, num_heads, kv_lora_rank]` of q_dtype.
            q_rope: Rotated queries: `[num_tokens or more, num_heads, qk_rope_head_dim]` of q_dtype, with strides of
                its own; None iff qk_rope_head_dim is 0. Two views of one tensor of whole queries are read fastest.
            kv: The cache: `[num_pages, page_size, kv_lora_rank + qk_rope_head_dim]`, or `[num_slots, …]` with
                page_size 1, of kv_dtype; uint8 stands for fp8. With kv_rope: the latent part, `[…, kv_lora_rank]`.
                fp8_ds_mla: `[num_pages, page_size, 656]` uint8. num_pages is above every page id in use, and 1 or
                more where page ids or lengths are on a device.
            kv_rope: The rotary part of the cache, as kv with qk_rope_head_dim and strides of its own; None where kv
                holds whole records.
            o: Output: `[num_tokens or more, num_heads, kv_lora_rank]` of o_dtype. It may not overlap another
                tensor.
            lse: Output: `[num_tokens or more, num_heads]` float32, float16 or bfloat16 of any strides, or None, as
                that of `Decode.run`.
            sm_scale: Factor of q·k, not 0: that of the model's heads before absorption, 1 / sqrt(qk_nope_head_dim +
                qk_rope_head_dim) and YaRN's mscale² where the model has it. It cannot be derived from the latent
                width. sm_scale · q_scale · k_scale is within ±2^60.
            q_scale: Factor of q, which holds the queries divided by it. 0: 1.
            k_scale: Factor of the cache, hence of logits and of o; within ±2^60. 0: 1.
            mask_mode: `MaskMode.CAUSAL` or `MaskMode.FULL`.
            stream: CUDA stream; None: the current one of the tensors' framework. It is None on the CPU.

        Raises:
            NotPlannedError, InvalidArgumentError, UnknownFieldError, ShapeError, DtypeError, DeviceMismatchError,
            CaptureError, UnsupportedError, DriverError
        """
        return self._call("run", structs.MLA_ARGS, locals())

    #: `run` without the call: its result makes it, any number of times.
    prepare_run = prepared(run)


class MlaContext(Handle):
    """Prefill of MLA over a cached context: vLLM's chunked context. One handle serves every batch within its desc, and
    one plan every layer of a step.

    Runs of one plan share its workspace. On CUDA they are on one stream, or on streams that the host orders.

    What an MLA context handle is made from: DeepSeek-V2's multi-head latent attention in its multi-head form, for
    prompts whose requests may have a cached context.

    Names of extents below: T new tokens, H num_heads, L kv_lora_rank, P qk_nope_head_dim, R qk_rope_head_dim, V
    v_head_dim. Dimensions are multiples of 8; P + R and V are what prefill takes as head_dim_qk and head_dim_vo.
    The maxima bound every later batch and fix the workspace.

    Args:
        ctx: the device.
        flags: `PlanFlag.GRAPH`, `MlaContextFlag.STEPS`.
        dtype: Type of q, k_nope, k_rope, v, o and the weights: float32, float16 or bfloat16.
        kv_dtype: Type of the cache: dtype, float8_e4m3 or float8_e5m2; None: as dtype. With
            `MlaCacheFormat.FP8_DS_MLA`: all zero or float8_e4m3.
        cache_format: `MlaCacheFormat`
        num_heads: H.
        kv_lora_rank: L, up to 512.
        qk_nope_head_dim: P.
        qk_rope_head_dim: R.
        v_head_dim: V.
        page_size: Tokens per page, 1 or more.
        max_batch_size: Most requests of a batch.
        max_num_tokens: Most new tokens of a batch, over all requests.
        max_qo_len: Most new tokens of a request; 0: max_num_tokens.
        max_kv_len: Most tokens of a request, those of this step included.
        max_chunk_tokens: Most context tokens that are unpacked at a time: a chunk. 0: as many as vLLM unpacks,
            max(min(max(8 · max_kv_len, 4 · max_batch_size · page_size), 65536), max_batch_size · page_size). Of
            16-bit types with 128 heads of 128, 64 Ki tokens need 4 GiB; no chunk is larger than all contexts can
            be.
        max_num_pages: Most pages of a batch, over all requests; 0: max_batch_size times the pages of max_kv_len.
    """

    _name = "mla_context"

    def __init__(
        self,
        ctx: Context,
        *,
        flags: PlanFlag | MlaContextFlag | int | str | Iterable[str] = 0,
        dtype: DtypeLike,
        kv_dtype: DtypeLike | None = None,
        cache_format: MlaCacheFormat | str = MlaCacheFormat.PLAIN,
        num_heads: int,
        kv_lora_rank: int,
        qk_nope_head_dim: int,
        qk_rope_head_dim: int,
        v_head_dim: int,
        page_size: int,
        max_batch_size: int,
        max_num_tokens: int,
        max_qo_len: int = 0,
        max_kv_len: int,
        max_chunk_tokens: int = 0,
        max_num_pages: int = 0,
    ) -> None:
        super().__init__(ctx, structs.MLA_CONTEXT_DESC, locals())

    def plan(
        self,
        *,
        flags: BatchFlag | int | str | Iterable[str] = 0,
        qo_len: int = 0,
        qo_indptr: TensorLike | None = None,
        kv_indptr: TensorLike | None = None,
        kv_indices: TensorLike | None = None,
        last_page_len: TensorLike | None = None,
        kv_len: TensorLike | None = None,
        block_table: TensorLike | None = None,
        window_left: int = 0,
        workspace: Workspace | None = None,
        stream: StreamLike | None = None,
    ) -> None:
        """Takes over a step's batch: kv_len counts the context of a request and its new tokens, of which it has
        qo_len. Lengths are in host memory; page ids (block_table, or kv_indices) are on the context's device, where
        runs read them: they stay as they are until the last run of the plan, and those of int64 are not copied. For
        a graph, the batch has max_batch_size requests, some of them without tokens, and rows of the outputs beyond
        the batch may be written.

        The page table comes in the forms of `Batch`. On failure the previous plan stays in force.

        Args:
            flags: `BatchFlag.WINDOW`.
            qo_len: Query rows of every request where qo_indptr is None (decode only); 0: 1.
            qo_indptr: `[batch_size + 1]` query-row offsets from 0; decode accepts None.
            kv_indptr: `[batch_size + 1]` offsets from 0 into kv_indices, or into ragged K and V.
            kv_indices: `[num_pages or more]` page ids, 0 or more.
            last_page_len: `[batch_size]` tokens in the last page, 1 to page_size; not read for requests without
                pages. Refused together with kv_len.
            kv_len: `[batch_size]` keys per request, those of this step included; 0 or more. With a new_kv_dtype,
                those in the cache.
            block_table: `[batch_size, max_pages_per_request]` page ids; only those that kv_len needs are read.
            window_left: No run of the plan sees a key more than so many before its row's own position: a run with a
                wider window is refused, and one with mm_prefix_ranges that reach beyond it. Keys before the window
                are not planned for, which saves time where it is short. -1: unlimited. Needs `BatchFlag.WINDOW`.
                For decode and prefill over the cache; MLA, cascades and handles with a new_kv_dtype refuse it.
                Where captured runs are replayed, every plan is for the window of those runs or a wider one: a
                replay cannot be refused.
            workspace: memory as workspace_info asks; None: that of the last plan, or at the first plan memory that
                the handle allocates.
            stream: CUDA stream that later runs use or wait for; None: the current one of the tensors' framework. It
                is None on the CPU.

        Raises:
            InvalidArgumentError, UnknownFieldError, ShapeError, DtypeError, DeviceMismatchError,
            WorkspaceTooSmallError, CaptureError, UnsupportedError, OutOfMemoryError, DriverError
        """
        self._plan(structs.BATCH, locals())

    @operator
    def run(
        self,
        *,
        flags: RunFlag | int | str | Iterable[str] = 0,
        q: TensorLike,
        k_nope: TensorLike,
        k_rope: TensorLike,
        v: TensorLike,
        kv: TensorLike,
        kv_rope: TensorLike | None = None,
        w_uk: TensorLike | None = None,
        w_uv: TensorLike | None = None,
        context_latent: TensorLike | None = None,
        context_rope: TensorLike | None = None,
        context_k_nope: TensorLike | None = None,
        context_v: TensorLike | None = None,
        o: TensorLike,
        lse: TensorLike | None = None,
        sm_scale: float = 0,
        k_scale: float = 0,
        stream: StreamLike | None = None,
    ) -> Call:
        """Computes attention for the planned batch. Not with `MlaContextFlag.STEPS`.

        Tensors and parameters of one call; one plan serves many, with different values. The extents are those of
        `MlaContext`.

        With the context's records (c, r) unpacked to keys (`W_UK[h] c`, r) and values `c W_UV[h]`, and the new
        tokens' keys (k_nope, k_rope) and values v behind them, row i of a request sees its whole context and its
        new tokens up to i:

            o = Σ softmax(q·k · sm_scale)_j v_j
            lse = log(Σ e^(q·k · sm_scale))

        Chunks of the context are summed up in float32, new tokens are added to that, and o is rounded: once on the
        CPU and by Hopper's kernels, while of the portable CUDA kernel both of these parts are rounded before. This
        is the prefill of vLLM's MLA backends; there every chunk is merged in the type of o.

        Args:
            flags: `RunFlag.LSE_BASE_2` or 0.
            q: Queries, the last R elements rotated: `[T or more, H, P + R]`.
            k_nope: Keys of the new tokens: `[T or more, H, P]`.
            k_rope: Their rotated part, of all heads: `[T or more, R]` or `[T or more, 1, R]`.
            v: Values of the new tokens: `[T or more, H, V]`.
            kv: The cache: `[num_pages, page_size, L + R]` of kv_dtype; uint8 stands for fp8. With kv_rope:
                `[num_pages, page_size, L]`. fp8_ds_mla: `[num_pages, page_size, 656]` uint8. The new tokens need
                not be in it.
            kv_rope: The rotary part of the cache, `[num_pages, page_size, R]`; None where kv holds whole records.
            w_uk: `[H, P, L]` with any strides. None with `MlaContextFlag.STEPS`.
            w_uv: `[H, L, V]` with any strides. None with `MlaContextFlag.STEPS`.
            context_latent: With `MlaContextFlag.STEPS`, as the next three; None without. Output of gather: `[tokens
                of the chunk or more, L]`.
            context_rope: Output of gather, and read by attend: `[…, R]`.
            context_k_nope: Read by attend: `[…, H, P]`.
            context_v: Read by attend: `[…, H, V]`.
            o: Output: `[T or more, H, V]`. It may not overlap another tensor.
            lse: Output: `[T or more, H]` float32, float16 or bfloat16 of any strides, or None. The sum over the
                chunks is kept in float32.
            sm_scale: Factor of q·k. 0: 1 / sqrt(P + R).
            k_scale: A plain fp8 cache holds records / k_scale. 0: 1.
            stream: CUDA stream; None: the current one of the tensors' framework. It is None on the CPU.

        Raises:
            NotPlannedError, InvalidArgumentError, UnknownFieldError, ShapeError, DtypeError, DeviceMismatchError,
            CaptureError, UnsupportedError, DriverError
        """
        return self._call("run", structs.MLA_CONTEXT_ARGS, locals())

    #: `run` without the call: its result makes it, any number of times.
    prepare_run = prepared(run)

    def num_chunks(self) -> int:
        """The number of chunks of the current plan; of a graph's, as many as any plan has."""
        return self._number("num_chunks")

    def chunk_tokens(self, chunk: int) -> int:
        """Context tokens of a chunk of the current plan: rows that `MlaContext.gather` writes. They are at most
        max_chunk_tokens, and all of a graph's chunks have these."""
        return self._number("chunk_tokens", chunk)

    @operator
    def new_tokens(
        self,
        *,
        flags: RunFlag | int | str | Iterable[str] = 0,
        q: TensorLike,
        k_nope: TensorLike,
        k_rope: TensorLike,
        v: TensorLike,
        kv: TensorLike,
        kv_rope: TensorLike | None = None,
        w_uk: TensorLike | None = None,
        w_uv: TensorLike | None = None,
        context_latent: TensorLike | None = None,
        context_rope: TensorLike | None = None,
        context_k_nope: TensorLike | None = None,
        context_v: TensorLike | None = None,
        o: TensorLike,
        lse: TensorLike | None = None,
        sm_scale: float = 0,
        k_scale: float = 0,
        stream: StreamLike | None = None,
    ) -> Call:
        """The first step of a run with `MlaContextFlag.STEPS`. Where no request has context it is the only one: new
        tokens over themselves, and o is written. Else it starts the sum of the chunks. Then, for every chunk in
        turn, `MlaContext.gather`, the caller's products of context_latent with its weights to context_k_nope and
        context_v, and `MlaContext.attend`; the last of these also attends the new tokens over themselves, and
        writes o. All steps of a run have the same args but for the context's tensors, and no other run of the plan
        comes between them.

        Tensors and parameters of one call; one plan serves many, with different values. The extents are those of
        `MlaContext`.

        With the context's records (c, r) unpacked to keys (`W_UK[h] c`, r) and values `c W_UV[h]`, and the new
        tokens' keys (k_nope, k_rope) and values v behind them, row i of a request sees its whole context and its
        new tokens up to i:

            o = Σ softmax(q·k · sm_scale)_j v_j
            lse = log(Σ e^(q·k · sm_scale))

        Chunks of the context are summed up in float32, new tokens are added to that, and o is rounded: once on the
        CPU and by Hopper's kernels, while of the portable CUDA kernel both of these parts are rounded before. This
        is the prefill of vLLM's MLA backends; there every chunk is merged in the type of o.

        Args:
            flags: `RunFlag.LSE_BASE_2` or 0.
            q: Queries, the last R elements rotated: `[T or more, H, P + R]`.
            k_nope: Keys of the new tokens: `[T or more, H, P]`.
            k_rope: Their rotated part, of all heads: `[T or more, R]` or `[T or more, 1, R]`.
            v: Values of the new tokens: `[T or more, H, V]`.
            kv: The cache: `[num_pages, page_size, L + R]` of kv_dtype; uint8 stands for fp8. With kv_rope:
                `[num_pages, page_size, L]`. fp8_ds_mla: `[num_pages, page_size, 656]` uint8. The new tokens need
                not be in it.
            kv_rope: The rotary part of the cache, `[num_pages, page_size, R]`; None where kv holds whole records.
            w_uk: `[H, P, L]` with any strides. None with `MlaContextFlag.STEPS`.
            w_uv: `[H, L, V]` with any strides. None with `MlaContextFlag.STEPS`.
            context_latent: With `MlaContextFlag.STEPS`, as the next three; None without. Output of gather: `[tokens
                of the chunk or more, L]`.
            context_rope: Output of gather, and read by attend: `[…, R]`.
            context_k_nope: Read by attend: `[…, H, P]`.
            context_v: Read by attend: `[…, H, V]`.
            o: Output: `[T or more, H, V]`. It may not overlap another tensor.
            lse: Output: `[T or more, H]` float32, float16 or bfloat16 of any strides, or None. The sum over the
                chunks is kept in float32.
            sm_scale: Factor of q·k. 0: 1 / sqrt(P + R).
            k_scale: A plain fp8 cache holds records / k_scale. 0: 1.
            stream: CUDA stream; None: the current one of the tensors' framework. It is None on the CPU.

        Raises:
            NotPlannedError, InvalidArgumentError, UnknownFieldError, ShapeError, DtypeError, DeviceMismatchError,
            CaptureError, UnsupportedError, DriverError
        """
        return self._call("new_tokens", structs.MLA_CONTEXT_ARGS, locals())

    #: `new_tokens` without the call: its result makes it, any number of times.
    prepare_new_tokens = prepared(new_tokens)

    @operator
    def gather(
        self,
        chunk: int,
        *,
        flags: RunFlag | int | str | Iterable[str] = 0,
        q: TensorLike,
        k_nope: TensorLike,
        k_rope: TensorLike,
        v: TensorLike,
        kv: TensorLike,
        kv_rope: TensorLike | None = None,
        w_uk: TensorLike | None = None,
        w_uv: TensorLike | None = None,
        context_latent: TensorLike | None = None,
        context_rope: TensorLike | None = None,
        context_k_nope: TensorLike | None = None,
        context_v: TensorLike | None = None,
        o: TensorLike,
        lse: TensorLike | None = None,
        sm_scale: float = 0,
        k_scale: float = 0,
        stream: StreamLike | None = None,
    ) -> Call:
        """Copies a chunk's records to context_latent and context_rope, in the type of the desc.

        Args:
            chunk: the chunk's number, below that of num_chunks.
            flags: `RunFlag.LSE_BASE_2` or 0.
            q: Queries, the last R elements rotated: `[T or more, H, P + R]`.
            k_nope: Keys of the new tokens: `[T or more, H, P]`.
            k_rope: Their rotated part, of all heads: `[T or more, R]` or `[T or more, 1, R]`.
            v: Values of the new tokens: `[T or more, H, V]`.
            kv: The cache: `[num_pages, page_size, L + R]` of kv_dtype; uint8 stands for fp8. With kv_rope:
                `[num_pages, page_size, L]`. fp8_ds_mla: `[num_pages, page_size, 656]` uint8. The new tokens need
                not be in it.
            kv_rope: The rotary part of the cache, `[num_pages, page_size, R]`; None where kv holds whole records.
            w_uk: `[H, P, L]` with any strides. None with `MlaContextFlag.STEPS`.
            w_uv: `[H, L, V]` with any strides. None with `MlaContextFlag.STEPS`.
            context_latent: With `MlaContextFlag.STEPS`, as the next three; None without. Output of gather: `[tokens
                of the chunk or more, L]`.
            context_rope: Output of gather, and read by attend: `[…, R]`.
            context_k_nope: Read by attend: `[…, H, P]`.
            context_v: Read by attend: `[…, H, V]`.
            o: Output: `[T or more, H, V]`. It may not overlap another tensor.
            lse: Output: `[T or more, H]` float32, float16 or bfloat16 of any strides, or None. The sum over the
                chunks is kept in float32.
            sm_scale: Factor of q·k. 0: 1 / sqrt(P + R).
            k_scale: A plain fp8 cache holds records / k_scale. 0: 1.
            stream: CUDA stream; None: the current one of the tensors' framework. It is None on the CPU.

        Raises:
            NotPlannedError, InvalidArgumentError, UnknownFieldError, ShapeError, DtypeError, DeviceMismatchError,
            CaptureError, UnsupportedError, DriverError
        """
        return self._call("gather", structs.MLA_CONTEXT_ARGS, locals(), chunk)

    #: `gather` without the call: its result makes it, any number of times.
    prepare_gather = prepared(gather)

    @operator
    def attend(
        self,
        chunk: int,
        *,
        flags: RunFlag | int | str | Iterable[str] = 0,
        q: TensorLike,
        k_nope: TensorLike,
        k_rope: TensorLike,
        v: TensorLike,
        kv: TensorLike,
        kv_rope: TensorLike | None = None,
        w_uk: TensorLike | None = None,
        w_uv: TensorLike | None = None,
        context_latent: TensorLike | None = None,
        context_rope: TensorLike | None = None,
        context_k_nope: TensorLike | None = None,
        context_v: TensorLike | None = None,
        o: TensorLike,
        lse: TensorLike | None = None,
        sm_scale: float = 0,
        k_scale: float = 0,
        stream: StreamLike | None = None,
    ) -> Call:
        """Attends a chunk whose keys and values are in context_k_nope, context_rope and context_v; with the last one,
        new tokens over themselves as well.

        Args:
            chunk: the chunk's number, below that of num_chunks.
            flags: `RunFlag.LSE_BASE_2` or 0.
            q: Queries, the last R elements rotated: `[T or more, H, P + R]`.
            k_nope: Keys of the new tokens: `[T or more, H, P]`.
            k_rope: Their rotated part, of all heads: `[T or more, R]` or `[T or more, 1, R]`.
            v: Values of the new tokens: `[T or more, H, V]`.
            kv: The cache: `[num_pages, page_size, L + R]` of kv_dtype; uint8 stands for fp8. With kv_rope:
                `[num_pages, page_size, L]`. fp8_ds_mla: `[num_pages, page_size, 656]` uint8. The new tokens need
                not be in it.
            kv_rope: The rotary part of the cache, `[num_pages, page_size, R]`; None where kv holds whole records.
            w_uk: `[H, P, L]` with any strides. None with `MlaContextFlag.STEPS`.
            w_uv: `[H, L, V]` with any strides. None with `MlaContextFlag.STEPS`.
            context_latent: With `MlaContextFlag.STEPS`, as the next three; None without. Output of gather: `[tokens
                of the chunk or more, L]`.
            context_rope: Output of gather, and read by attend: `[…, R]`.
            context_k_nope: Read by attend: `[…, H, P]`.
            context_v: Read by attend: `[…, H, V]`.
            o: Output: `[T or more, H, V]`. It may not overlap another tensor.
            lse: Output: `[T or more, H]` float32, float16 or bfloat16 of any strides, or None. The sum over the
                chunks is kept in float32.
            sm_scale: Factor of q·k. 0: 1 / sqrt(P + R).
            k_scale: A plain fp8 cache holds records / k_scale. 0: 1.
            stream: CUDA stream; None: the current one of the tensors' framework. It is None on the CPU.

        Raises:
            NotPlannedError, InvalidArgumentError, UnknownFieldError, ShapeError, DtypeError, DeviceMismatchError,
            CaptureError, UnsupportedError, DriverError
        """
        return self._call("attend", structs.MLA_CONTEXT_ARGS, locals(), chunk)

    #: `attend` without the call: its result makes it, any number of times.
    prepare_attend = prepared(attend)
