"""What Folio is measured against, where it is installed: FlashAttention-3, cuDNN and FlashAttention-2 through PyTorch,
FlashInfer, and vLLM's Triton kernel.

Each peer answers a workload with a function of no arguments, or with None where it has no such kernel. What is called
writes `out`, or returns its answer in a layout that its attribute `rows` turns into `out`'s. The tables at the end name
them: PEERS for attention; APPEND, MERGE and HOST for the rest.
FlashAttention-3 is found as the extension that vLLM ships: FOLIO_FA3 names `_vllm_fa3_C.abi3.so`. FlashInfer compiles
a module at the first use of each shape, which takes minutes for all rows.
"""

import os

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

FP8 = torch.float8_e4m3fn


def load_fa3():
    path = os.environ.get("FOLIO_FA3")
    if not path or not os.path.exists(path):
        return None, None
    torch.ops.load_library(path)
    return torch.ops._vllm_fa3_C.fwd, torch.ops._vllm_fa3_C.get_scheduler_metadata


def load_flashinfer():
    try:
        import flashinfer

        return flashinfer
    except ImportError:
        return None


def load_triton():
    try:
        from vllm.v1.attention.ops.triton_unified_attention import unified_attention

        return unified_attention
    except ImportError:
        return None


(FA3, FA3_SCHEDULE), FLASHINFER, TRITON = load_fa3(), load_flashinfer(), load_triton()


def fa3(w, out):
    """Decode and prefill: q is variable-length; K and V are pages found through a block table, or as q. Over pages it is given
    its schedule, as vLLM does, which computes that once for all layers of a step. In fp8 its products and probabilities are
    fp8 too, with a scale for each request and KV head."""
    if FA3 is None or w.kv_dtype != w.q.dtype:
        return None
    longest_q, longest_kv = int(w.qo_lens.max()), int(w.kv_lens.max())
    cu = w.qo_indptr_device
    cu_k, used = (w.kv_indptr.cuda(), None) if w.block_table is None else (None, w.kv_len_device)
    sinks = None if w.sinks is None else w.sinks.to(torch.bfloat16)
    scales = torch.ones(len(w.qo_lens), w.num_kv_heads, device="cuda") if w.q.dtype == FP8 else None
    schedule = None
    if w.block_table is not None:
        schedule = FA3_SCHEDULE(len(w.qo_lens), longest_q, longest_kv, w.num_qo_heads, w.num_kv_heads, w.head_dim_qk, w.head_dim_vo,
                                w.q.dtype, used, cu, None, None, None, None, w.page_size, 0, w.causal, w.window - 1, -1,
                                w.soft_cap > 0, 0, None, 0)
    return lambda: FA3(w.q, w.k, w.v, None, None, None, out, cu, cu_k, None, None, used, longest_q, longest_kv,
                       w.block_table, None, None, None, None, None, scales, scales, scales, w.sm_scale, w.causal,
                       w.window - 1, -1, w.soft_cap, True, schedule, 0, None, 0, sinks, 1, 0, None)


def fa2(w, out):
    """FlashAttention-2 as PyTorch has it, over dense [batch, token, head, dim] copies of the same tokens, or over packed
    ones where requests differ."""
    row = w.row
    if row.soft_cap or row.sinks or w.kv_dtype != w.q.dtype or w.head_dim_qk != w.head_dim_vo:
        return None
    # A window of w keys is w - 1 to the left; -1 is none, which a row without a window has too.
    options = dict(scale=w.sm_scale, window_size_left=row.window - 1 if row.window else None)
    if row.window and row.causal:
        options["window_size_right"] = 0
    op = torch.ops.aten._flash_attention_forward
    if w.dense is None:
        k, v = (torch.cat(parts) for parts in zip(*(w.tokens(b) for b in range(row.batch))))
        ends = F.pad(w.kv_len_device.cumsum(0, dtype=torch.int32), (1, 0))
        run = lambda: op(w.q, k, v, w.qo_indptr_device, ends, max(row.qo_lens), row.kv, 0.0, row.causal, False, **options)[0]
        run.rows = lambda packed: packed
        return run
    q, k, v = (t.transpose(1, 2).contiguous() for t in w.dense)
    run = lambda: op(q, k, v, None, None, row.q, row.kv, 0.0, row.causal, False, **options)[0]
    run.rows = lambda dense: dense.flatten(0, 1)
    return run


def cudnn(w, _out):
    """Dense [batch, head, token, dim] copies of the same tokens, where all requests are alike. Its causal mask is that of
    as many rows as keys."""
    row = w.row
    causal = row.causal and row.q > 1
    if row.soft_cap or row.sinks or row.window or (causal and row.q != row.kv) or w.dense is None:
        return None
    q, k, v = w.dense

    def run():
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=w.sm_scale, enable_gqa=True)

    run.rows = lambda dense: dense.transpose(1, 2).flatten(0, 1)
    return run


def flashinfer_space():
    return torch.empty(256 << 20, dtype=torch.uint8, device="cuda")


def flashinfer_decode(w):
    """The tensor-core kernels, which are the faster ones in every row with grouped heads."""
    wrapper = FLASHINFER.BatchDecodeWithPagedKVCacheWrapper(flashinfer_space(), "NHD", use_tensor_cores=True)
    return wrapper, lambda: wrapper.plan(w.kv_indptr, w.kv_indices, w.last_page_len, w.num_qo_heads, w.num_kv_heads,
                                         w.head_dim_qk, w.page_size, q_data_type=w.q.dtype, kv_data_type=w.kv_dtype,
                                         sm_scale=w.sm_scale, window_left=w.window - 1, logits_soft_cap=w.soft_cap)


def flashinfer_paged(w):
    wrapper = FLASHINFER.BatchPrefillWithPagedKVCacheWrapper(flashinfer_space(), "NHD")
    return wrapper, lambda: wrapper.plan(w.qo_indptr, w.kv_indptr, w.kv_indices, w.last_page_len, w.num_qo_heads,
                                         w.num_kv_heads, w.head_dim_qk, w.page_size, head_dim_vo=w.head_dim_vo,
                                         causal=w.causal, sm_scale=w.sm_scale, q_data_type=w.q.dtype,
                                         kv_data_type=w.kv_dtype, window_left=w.window - 1, logits_soft_cap=w.soft_cap)


def flashinfer_ragged(w):
    wrapper = FLASHINFER.BatchPrefillWithRaggedKVCacheWrapper(flashinfer_space(), "NHD")
    return wrapper, lambda: wrapper.plan(w.qo_indptr, w.kv_indptr, w.num_qo_heads, w.num_kv_heads, w.head_dim_qk,
                                         head_dim_vo=w.head_dim_vo, causal=w.causal, sm_scale=w.sm_scale,
                                         q_data_type=w.q.dtype, kv_data_type=w.kv_dtype)


def flashinfer(w, out):
    """Its own choice of backend: its FA3 kernels where it has them. Sinks would need a kernel of another wrapper."""
    if FLASHINFER is None or w.sinks is not None:
        return None
    if w.ragged:
        wrapper, plan = flashinfer_ragged(w)
        plan()
        return lambda: wrapper.run(w.q, w.k, w.v, out=out)
    wrapper, plan = flashinfer_decode(w) if w.is_decode else flashinfer_paged(w)
    plan()
    return lambda: wrapper.run(w.q, (w.k, w.v), out=out)


# vLLM runs its split kernel for up to 128 programs of one request and KV head, with 16 segments each.
TRITON_PROGRAMS, TRITON_SEGMENTS = 128, 16


def triton_unified(w, out):
    unsupported = w.ragged or w.kv_dtype == FP8 or w.head_dim_qk != w.head_dim_vo or not (w.causal or w.is_decode)
    if TRITON is None or unsupported:
        return None
    requests = TRITON_PROGRAMS // w.num_kv_heads
    split = torch.empty(requests, w.num_qo_heads, TRITON_SEGMENTS, w.head_dim_vo, device="cuda")
    largest, total = (torch.empty(requests, w.num_qo_heads, TRITON_SEGMENTS, device="cuda") for _ in range(2))
    return lambda: TRITON(q=w.q, k=w.k, v=w.v, out=out, cu_seqlens_q=w.qo_indptr_device,
                          max_seqlen_q=int(w.qo_lens.max()), seqused_k=w.kv_len_device,
                          max_seqlen_k=int(w.kv_lens.max()), softmax_scale=w.sm_scale, causal=True,
                          window_size=(w.window - 1, 0 if w.window else -1), block_table=w.block_table,
                          softcap=w.soft_cap, sinks=w.sinks, q_descale=None, k_descale=None,
                          v_descale=None, seq_threshold_3D=requests, num_par_softmax_segments=TRITON_SEGMENTS,
                          softmax_segm_output=split, softmax_segm_max=largest, softmax_segm_expsum=total)


def flashinfer_append(key, value, k_cache, v_cache, pages):
    """All tokens belong to one request, whose pages are these."""
    if FLASHINFER is None:
        return None
    tokens, page = key.shape[0], k_cache.shape[1]
    batch = torch.zeros(tokens, dtype=torch.int32, device="cuda")
    positions = torch.arange(tokens, dtype=torch.int32, device="cuda")
    indptr = torch.tensor([0, len(pages)], dtype=torch.int32, device="cuda")
    last = torch.tensor([(tokens - 1) % page + 1], dtype=torch.int32, device="cuda")
    return lambda: FLASHINFER.append_paged_kv_cache(key, value, batch, positions, (k_cache, v_cache), pages.int(),
                                                    indptr, last)


def flashinfer_merge(v_a, s_a, v_b, s_b):
    return None if FLASHINFER is None else lambda: FLASHINFER.merge_state(v_a, s_a, v_b, s_b)


def flashinfer_plan(w):
    return None if FLASHINFER is None else flashinfer_decode(w)[1]


def flashinfer_run(w):
    return flashinfer(w, torch.empty_like(w.q))


PEERS = {"fa3": fa3, "cudnn": cudnn, "fa2": fa2, "flashinfer": flashinfer, "triton": triton_unified}
APPEND = {"flashinfer": flashinfer_append}
MERGE = {"flashinfer": flashinfer_merge}
HOST = {"plan": {"flashinfer": flashinfer_plan}, "run_host": {"flashinfer": flashinfer_run}}


def installed():
    """Names of the peers of PEERS that this machine has; those of PyTorch are always there."""
    missing = {"fa3": FA3, "flashinfer": FLASHINFER, "triton": TRITON}
    return [name for name in PEERS if missing.get(name, name) is not None]
