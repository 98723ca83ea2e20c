"""vLLM's cache and attention ops by Folio, with vLLM's names and positional signatures (those of vLLM 0.32).

A host that calls `vllm._custom_ops` or `vllm.vllm_flash_attn` imports these names from here instead. What Folio has no
counterpart for is refused with NotImplementedError, which names the parameter.

Scales. vLLM passes them as float32 tensors. Those of attention and of caches of keys and values stay tensors, and are
read on the device. Those of MLA's caches and of merged outputs are numbers to Folio: a tensor on a device is read
once, at the first call, and remembered as long as it lives. So do that call before a capture.
"""

import weakref
from typing import Any

import folio
import torch

from folio_torch.devices import context_of

FP8 = {"fp8": "float8_e4m3", "fp8_e4m3": "float8_e4m3", "fp8_e5m2": "float8_e5m2"}
_PLAIN = ("auto", "float16", "bfloat16", "float32")
_DS_MLA = "fp8_ds_mla"


def _refuse(**unsupported: tuple[Any, Any]) -> None:
    """Refuses parameters that are not at the only value that is accepted: `name=(value, accepted)`."""
    for name, (value, accepted) in unsupported.items():
        if value is not accepted and value != accepted:
            said = f"a tensor of {list(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
            raise NotImplementedError(f"{name} is {said}; {accepted!r} is accepted by Folio")


def _cache_dtype(kv_cache_dtype: str, also: tuple[str, ...] = ()) -> str | None:
    """Folio's name of an fp8 cache's type; None where the cache's own type says it."""
    if kv_cache_dtype not in (*_PLAIN, *FP8, *also):
        accepted = ", ".join((*_PLAIN, *FP8, *also))
        raise NotImplementedError(f"kv_cache_dtype is {kv_cache_dtype!r}; {accepted} are accepted by Folio")
    return FP8.get(kv_cache_dtype)


_known_scales: dict[int, tuple[weakref.ref, float]] = {}


def _number(scale: torch.Tensor | float | None) -> float:
    """A scale on the host; None is 1."""
    if scale is None or isinstance(scale, (int, float)):
        return 1.0 if scale is None else float(scale)
    if scale.device.type == "cpu":
        return float(scale)
    known = _known_scales.get(id(scale))
    if known is None or known[0]() is not scale:
        known = _known_scales[id(scale)] = (weakref.ref(scale), float(scale))
    return known[1]


# --- Caches of keys and values ----------------------------------------------------------------------


def reshape_and_cache_flash(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_cache_dtype: str,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
) -> None:
    """New tokens into a cache.

    Args:
        key, value: `[num_tokens or more, num_heads, head_size]` of any strides but the last.
        key_cache, value_cache: `[num_blocks, block_size, num_heads, head_size]`, in any order in memory.
        slot_mapping: `[num_tokens]` int64; negative slots are skipped.
        kv_cache_dtype: "auto", "fp8", "fp8_e4m3" or "fp8_e5m2".
        k_scale, v_scale: `[1]`, `[num_heads]` or no dimension, float32; of fp8 caches only.
    """
    _append(key, value, key_cache, value_cache, slot_mapping, kv_cache_dtype, k_scale, v_scale, "plain")


def _append(key, value, key_cache, value_cache, slot_mapping, kv_cache_dtype, k_scale, v_scale, kv_format) -> None:
    dtype = _cache_dtype(kv_cache_dtype)
    scales = {} if dtype is None else dict(k_scales=k_scale.reshape(-1), v_scales=v_scale.reshape(-1))
    folio.kv_append(
        context_of(key.device),
        key=key,
        value=value,
        k_cache=folio.Tensor(key_cache, dtype=dtype),
        v_cache=folio.Tensor(value_cache, dtype=dtype),
        slot_mapping=slot_mapping,
        kv_format=kv_format,
        **scales,
    )


def reshape_and_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_cache_dtype: str,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
) -> None:
    """As `reshape_and_cache_flash`, for vLLM's first layout or one with the heads before the tokens.

    Args:
        key_cache: `[num_blocks, num_heads, head_size / x, block_size, x]` with x = 16 / bytes of an element, or
            `[num_blocks, num_heads, block_size, head_size]`.
        value_cache: `[num_blocks, num_heads, head_size, block_size]`, or of the shape of such a key_cache.
    """
    kv_format = "packed_keys" if key_cache.ndim == 5 else "plain"
    if kv_format == "plain":
        if key_cache.shape != value_cache.shape:
            raise NotImplementedError(
                f"key_cache is {list(key_cache.shape)} and value_cache {list(value_cache.shape)}; both of [num_blocks,"
                " num_heads, block_size, head_size] are accepted by Folio, or a key_cache of 5 dimensions"
            )
        key_cache, value_cache = key_cache.transpose(1, 2), value_cache.transpose(1, 2)
    _append(key, value, key_cache, value_cache, slot_mapping, kv_cache_dtype, k_scale, v_scale, kv_format)


def copy_blocks(key_caches: list[torch.Tensor], value_caches: list[torch.Tensor], block_mapping: torch.Tensor) -> None:
    """Copies blocks within the caches of each layer: `block_mapping` is `[num_pairs, 2]` int64, source and target."""
    for k, v in zip(key_caches, value_caches, strict=True):
        folio.kv_copy(context_of(k.device), k_src=k, k_dst=k, v_src=v, v_dst=v, page_pairs=block_mapping)


def swap_blocks(src: torch.Tensor, dst: torch.Tensor, block_size_in_bytes: int, block_mapping: torch.Tensor) -> None:
    """Copies blocks between a device and the host, or within either of them, in the order of the current stream.

    Args:
        src, dst: blocks one after the other in memory, of any type. On the CPU beside a tensor on CUDA: page-locked
            memory, which has to stay until the copy has run.
        block_size_in_bytes: bytes of a block.
        block_mapping: `[num_pairs, 2]` int64 on the CPU: blocks of src, and of dst.
    """
    device = dst.device if src.device.type == "cpu" else src.device
    folio.kv_copy(
        context_of(device),
        k_src=_blocks("src", src, block_size_in_bytes, device),
        k_dst=_blocks("dst", dst, block_size_in_bytes, device),
        page_pairs=block_mapping,
    )


def _blocks(name: str, tensor: torch.Tensor, block_size: int, device: torch.device) -> folio.Tensor:
    """A tensor's memory as rows of bytes, a row for each block."""
    last = sum((extent - 1) * stride for extent, stride in zip(tensor.shape, tensor.stride()))
    if tensor.numel() != last + 1:
        raise NotImplementedError(f"{name} has the strides {tensor.stride()}; memory without gaps is accepted by Folio")
    if block_size <= 0 or tensor.nbytes % block_size:
        raise ValueError(f"block_size_in_bytes is {block_size}; a divisor of the {tensor.nbytes} of {name} is accepted")
    swapped = tensor.device != device
    if swapped and not tensor.is_pinned():
        raise NotImplementedError(
            f"{name} is on {tensor.device} in pageable memory; page-locked memory (pin_memory) is accepted by Folio"
            f" beside {device}"
        )
    blocks = tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8).view(-1, block_size)
    return folio.Tensor(blocks, device="cuda_host" if swapped else None)


# --- Caches of latent records -----------------------------------------------------------------------


def concat_and_cache_mla(
    kv_c: torch.Tensor,
    k_pe: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_cache_dtype: str,
    scale: torch.Tensor,
) -> None:
    """New records into MLA's cache.

    Args:
        kv_c: `[num_tokens or more, kv_lora_rank]`
        k_pe: `[num_tokens or more, qk_rope_head_dim]`
        kv_cache: `[num_blocks, block_size, kv_lora_rank + qk_rope_head_dim]`; 656 bytes a token for "fp8_ds_mla".
        slot_mapping: `[num_tokens]` int64; negative slots are skipped.
        kv_cache_dtype: as for `reshape_and_cache_flash`, or "fp8_ds_mla".
        scale: `[1]` float32; of fp8 caches only.
    """
    _append_mla(kv_cache, kv_cache_dtype, scale, latent=kv_c, rope=k_pe, slot_mapping=slot_mapping)


def concat_and_cache_mla_rope_fused(
    positions: torch.Tensor,
    q_pe: torch.Tensor,
    k_pe: torch.Tensor,
    kv_c: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    is_neox: bool,
    slot_mapping: torch.Tensor,
    kv_cache: torch.Tensor,
    kv_cache_dtype: str,
    kv_cache_scale: torch.Tensor,
) -> None:
    """As `concat_and_cache_mla`, with RoPE: `q_pe` and `k_pe` are rotated in place before."""
    _append_mla(
        kv_cache,
        kv_cache_dtype,
        kv_cache_scale,
        flags=() if is_neox else ("interleaved",),
        latent=kv_c,
        rope=k_pe,
        rope_out=k_pe,
        q_rope=q_pe,
        cos_sin_cache=cos_sin_cache,
        positions=positions,
        slot_mapping=slot_mapping,
    )


def _append_mla(kv_cache: torch.Tensor, kv_cache_dtype: str, scale: torch.Tensor, **arguments) -> None:
    dtype = _cache_dtype(kv_cache_dtype, also=(_DS_MLA,))
    folio.mla_append(
        context_of(kv_cache.device),
        kv=kv_cache,
        kv_dtype=dtype,
        k_scale=0.0 if dtype is None else _number(scale),
        cache_format="fp8_ds_mla" if kv_cache_dtype == _DS_MLA else "plain",
        **arguments,
    )


def gather_and_maybe_dequant_cache(
    src_cache: torch.Tensor,
    dst: torch.Tensor,
    block_table: torch.Tensor,
    cu_seq_lens: torch.Tensor,
    token_to_seq: torch.Tensor | None,
    num_tokens: int,
    kv_cache_dtype: str,
    scale: torch.Tensor,
    seq_starts: torch.Tensor | None = None,
) -> None:
    """Records of requests from MLA's cache to dense rows of `dst`'s type.

    Args:
        src_cache: as `kv_cache` of `concat_and_cache_mla`.
        dst: `[num_tokens or more, kv_lora_rank + qk_rope_head_dim]`
        block_table: `[batch_size, blocks]` int32
        cu_seq_lens: `[batch_size + 1]` int32 rows of each request; it says what `token_to_seq` would.
        num_tokens: rows of all requests, at most those of `dst`.
        seq_starts: `[batch_size]` int32 first token of each request; None: 0.
    """
    dtype = _cache_dtype(kv_cache_dtype, also=(_DS_MLA,))
    folio.mla_gather(
        context_of(src_cache.device),
        kv=src_cache,
        dst=dst[:num_tokens],
        cu_seq_lens=cu_seq_lens,
        seq_starts=seq_starts,
        block_table=block_table,
        kv_dtype=dtype,
        k_scale=0.0 if dtype is None else _number(scale),
        cache_format="fp8_ds_mla" if kv_cache_dtype == _DS_MLA else "plain",
    )


def cp_gather_cache(
    src_cache: torch.Tensor,
    dst: torch.Tensor,
    block_table: torch.Tensor,
    cu_seq_lens: torch.Tensor,
    batch_size: int,
    seq_starts: torch.Tensor | None = None,
) -> None:
    """As `gather_and_maybe_dequant_cache`, for caches of `dst`'s type."""
    _refuse(dtype=(src_cache.dtype, dst.dtype))
    folio.mla_gather(
        context_of(src_cache.device),
        kv=src_cache,
        dst=dst,
        cu_seq_lens=cu_seq_lens[: batch_size + 1],
        seq_starts=None if seq_starts is None else seq_starts[:batch_size],
        block_table=block_table[:batch_size],
    )


# --- Attention --------------------------------------------------------------------------------------


def merge_attn_states(
    output: torch.Tensor,
    prefix_output: torch.Tensor,
    prefix_lse: torch.Tensor,
    suffix_output: torch.Tensor,
    suffix_lse: torch.Tensor,
    output_lse: torch.Tensor | None = None,
    prefill_tokens_with_context: int | None = None,
    output_scale: torch.Tensor | None = None,
) -> None:
    """Two attention states to one. Where both are empty, `output` is 0.

    Args:
        output: `[num_tokens, num_heads, head_size]`; fp8 with `output_scale`.
        prefix_output, suffix_output: as `output`, of float32, float16 or bfloat16.
        prefix_lse, suffix_lse, output_lse: `[num_heads, num_tokens]` float32.
        prefill_tokens_with_context: tokens behind the first so many have a suffix only; None: all have both.
        output_scale: one float32.
    """
    num_tokens = output.shape[0]
    with_context = num_tokens if prefill_tokens_with_context is None else prefill_tokens_with_context
    folio.merge_state(
        context_of(output.device),
        v_a=prefix_output,
        s_a=prefix_lse.transpose(0, 1),
        v_b=suffix_output,
        s_b=suffix_lse.transpose(0, 1),
        v_out=output,
        s_out=None if output_lse is None else output_lse.transpose(0, 1),
        num_tokens_without_a=num_tokens - with_context,
        o_scale=0.0 if output_scale is None else _number(output_scale),
    )


#: Prefill handles by what decides their code, with the maxima that they were made for.
_handles: dict[tuple, tuple[tuple[int, int, int], folio.Prefill]] = {}
#: Those of captures, for as long as the process: a graph reads their memory whenever it is replayed.
_captured: list[folio.Prefill] = []


def _prefill(context: folio.Context, wanted: tuple[int, int, int], page_ids: int, **desc: Any) -> folio.Prefill:
    """A handle for batches of (requests, rows, keys of a request); larger batches than before get a larger one.

    Captures have handles of their own, one for each address of page ids: graphs bind it.
    """
    capturing = context.on_cuda and torch.cuda.is_current_stream_capturing()
    if capturing:
        desc["flags"] = ("graph",)
    key = (context, page_ids if capturing else None, *desc.items())
    maxima, handle = _handles.get(key, ((0, 0, 0), None))
    if handle is None or any(want > most for want, most in zip(wanted, maxima)):
        maxima = tuple(max(most, 1 << max(want - 1, 0).bit_length()) for want, most in zip(wanted, maxima))
        batch_size, num_tokens, kv_len = maxima
        handle = folio.Prefill(context, max_batch_size=batch_size, max_num_tokens=num_tokens, max_kv_len=kv_len, **desc)
        _handles[key] = (maxima, handle)
        if capturing:
            _captured.append(handle)
    return handle


def flash_attn_varlen_func(
    q,
    k,
    v,
    max_seqlen_q,
    cu_seqlens_q,
    max_seqlen_k,
    cu_seqlens_k=None,
    seqused_k=None,
    q_v=None,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size: list[int] | None = None,
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
    block_table=None,
    return_softmax_lse=False,
    out=None,
    scheduler_metadata=None,
    q_descale=None,
    k_descale=None,
    v_descale=None,
    num_splits: int = 0,
    output_scale=None,
    fa_version: int = 0,
    s_aux=None,
    cp_world_size=1,
    cp_rank=0,
    cp_tot_seqused_k=None,
    mask_mod=None,
    block_sparse_tensors=None,
    aux_tensors=None,
    aux_tensor_leading_dims=None,
    dynamic_causal: torch.Tensor | None = None,
):
    """Attention of packed rows over a paged cache (`block_table`, `seqused_k`) or over packed keys (`cu_seqlens_k`).

    Every call plans its batch; hosts that run many layers with one batch are faster with `folio.Prefill`. The plan is
    made on the device where lengths are there, so a capture holds the plan with the run: replays compute the lengths
    that the tensors hold then, up to the `max_seqlen_q` and `max_seqlen_k` of the capture. Handles are kept by shape
    and grow with the batches. A capture needs a call of the same types and shapes before it, which loads their code.

    Args:
        q: `[total_q, num_heads, head_size]` float32, float16 or bfloat16, or fp8 over fp8 keys.
        k, v: `[num_blocks, block_size, num_kv_heads, head_size]`, or packed `[total_k, num_kv_heads, head_size]`; uint8
            stands for float8_e4m3, in q and out as well.
        max_seqlen_q, max_seqlen_k: the longest rows and keys of a request, or more.
        window_size: (left, right), -1 for unlimited.
        alibi_slopes: `[num_heads]` or `[batch_size, num_heads]` float32. The bias is slope · (j - p), which for rows
            that see keys behind them is not FlashAttention's; it is refused without `causal`.
        q_descale, k_descale, v_descale: `[batch_size, num_kv_heads]` float32, contiguous or expanded from one row or
            one number; q_descale of fp8 queries only, and without effect for others.
        out: of q's type, float32, or fp8; of any type over fp8 queries. None: one of q's type, of fp8 with
            `output_scale`, otherwise bfloat16 over fp8 queries.
        output_scale: one float32, which an fp8 output is divided by.
        s_aux: sinks, `[num_heads]`.
        deterministic, num_splits, fa_version, scheduler_metadata: how, not what is computed: no effect.
        dynamic_causal: `[batch_size]` bool, causality by request.

    Returns:
        The output, and with `return_softmax_lse` the lse, `[num_heads, total_q]`.
    """
    _refuse(
        q_v=(q_v, None),
        dropout_p=(dropout_p, 0.0),
        return_attn_probs=(return_attn_probs, False),
        cp_world_size=(cp_world_size, 1),
        mask_mod=(mask_mod, None),
        block_sparse_tensors=(block_sparse_tensors, None),
        aux_tensors=(aux_tensors, None),
    )
    if (block_table is None) != (cu_seqlens_k is not None) or (block_table is None) != (seqused_k is None):
        raise NotImplementedError("block_table with seqused_k, or cu_seqlens_k alone, is accepted by Folio")
    if alibi_slopes is not None and not causal:
        raise NotImplementedError("alibi_slopes are given with causal=False; causal=True is accepted by Folio")
    context = context_of(q.device)
    num_tokens, num_heads, _ = q.shape
    batch_size = cu_seqlens_q.shape[0] - 1
    if out is None:
        out = q.new_empty(num_tokens, num_heads, v.shape[-1], dtype=_output_type(q.dtype, output_scale))
    desc: dict[str, Any] = dict(
        q_dtype=_element_type(q.dtype),
        kv_dtype=_element_type(k.dtype),
        o_dtype=_element_type(out.dtype),
        num_qo_heads=num_heads,
        num_kv_heads=k.shape[-2],
        head_dim_qk=q.shape[-1],
        head_dim_vo=v.shape[-1],
    )
    if block_table is None:
        desc["kv_storage"] = "ragged"
        lengths = dict(kv_indptr=cu_seqlens_k)
    else:
        desc["page_size"] = k.shape[1]
        lengths = dict(kv_len=seqused_k, block_table=block_table)
    page_ids = 0 if block_table is None else block_table.data_ptr()
    left, right = (-1, -1) if window_size is None else window_size
    # Keys before the window are not planned for.
    window = dict(flags=("window",), window_left=left) if left >= 0 else {}
    handle = _prefill(context, (batch_size, num_tokens, max_seqlen_k), page_ids, **desc)
    handle.plan(qo_indptr=cu_seqlens_q, **lengths, **window)

    lse = torch.empty(num_heads, num_tokens, dtype=torch.float32, device=q.device) if return_softmax_lse else None
    arguments: dict[str, Any] = dict(mask_mode="causal" if causal else "full")
    if dynamic_causal is not None:
        arguments = dict(mask_mode="causal_by_request", causal_requests=dynamic_causal)
    if (left, right) != (-1, -1):
        arguments |= dict(flags=("window",), window_left=left, window_right=right)
    handle.run(
        q=q,
        k=k,
        v=v,
        o=out,
        lse=None if lse is None else lse.transpose(0, 1),
        sm_scale=0.0 if softmax_scale is None else softmax_scale,
        logits_soft_cap=softcap,
        alibi_slopes=alibi_slopes,
        sinks=None if s_aux is None else s_aux.to(torch.float32),
        q_scales=_of_heads(q_descale) if _is_fp8(q.dtype) else None,
        k_scales=_of_heads(k_descale),
        v_scales=_of_heads(v_descale),
        o_scales=None if output_scale is None else output_scale.reshape(-1),
        **arguments,
    )
    return (out, lse) if return_softmax_lse else out


def _is_fp8(dtype: torch.dtype) -> bool:
    return dtype.itemsize == 1


def _element_type(dtype: torch.dtype) -> torch.dtype | str:
    return "float8_e4m3" if dtype == torch.uint8 else dtype


def _output_type(q_dtype: torch.dtype, output_scale: torch.Tensor | None) -> torch.dtype:
    """What an output has that the caller does not bring: FlashAttention's choice."""
    if output_scale is not None:
        return torch.float8_e4m3fn
    return torch.bfloat16 if _is_fp8(q_dtype) else q_dtype


def _of_heads(descale: torch.Tensor | None) -> torch.Tensor | None:
    """The scales of heads, where vLLM expanded one row or one number to requests and heads; others as they are."""
    if descale is None or descale.ndim < 2:
        return descale
    if descale.stride(0) != 0 and descale.shape[0] > 1:
        return descale
    row = descale[0]
    return row[:1] if row.stride(0) == 0 else row
