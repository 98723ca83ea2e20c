"""What Folio is measured against, where it is installed: FlashAttention-3, cuDNN through PyTorch, FlashInfer.

Each peer answers a workload with a function of no arguments, or with None where it has no such kernel.
FlashAttention-3 is found as the extension that vLLM ships: FOLIO_FA3 names `_vllm_fa3_C.abi3.so`.
"""

import os

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel


def load_fa3():
    path = os.environ.get("FOLIO_FA3")
    if not path or not os.path.exists(path):
        return None
    torch.ops.load_library(path)
    return torch.ops._vllm_fa3_C.fwd


def load_flashinfer():
    try:
        import flashinfer

        return flashinfer
    except ImportError:
        return None


FA3, FLASHINFER = load_fa3(), load_flashinfer()


def fa3_paged(w, out):
    """Decode and paged prefill: q is variable-length, K and V are pages found through a block table."""
    if FA3 is None or w.kv_dtype != w.q.dtype or w.block_table is None:
        return None
    longest_q, longest_kv = int(w.qo_lens.max()), int(w.kv_lens.max())
    cu, used = w.qo_indptr_device, w.kv_len_device
    return lambda: FA3(w.q, w.k, w.v, None, None, None, out, cu, None, None, None, used, longest_q, longest_kv,
                       w.block_table, None, None, None, None, None, None, None, None, w.sm_scale, w.causal, -1, -1, 0.0,
                       True, None, 0, None, 0, None, 1, 0, None)


def cudnn(w, _out):
    """Dense [batch, head, token, dim] copies of the same tokens, where all requests are alike."""
    if w.dense is None:
        return None
    q, k, v = w.dense

    def run():
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return F.scaled_dot_product_attention(q, k, v, is_causal=w.causal, scale=w.sm_scale, enable_gqa=True)

    return run


def flashinfer_decode(w, out):
    if FLASHINFER is None or int(w.qo_lens.max()) != 1:
        return None
    space = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    wrapper = FLASHINFER.BatchDecodeWithPagedKVCacheWrapper(space, "NHD", use_tensor_cores=True)
    wrapper.plan(w.kv_indptr, w.kv_indices, w.last_page_len, w.num_qo_heads, w.num_kv_heads, w.head_dim_qk, w.page_size,
                 q_data_type=w.q.dtype, kv_data_type=w.kv_dtype, sm_scale=w.sm_scale)
    return lambda: wrapper.run(w.q, (w.k, w.v), out=out)


PEERS = {"fa3": fa3_paged, "cudnn": cudnn, "flashinfer": flashinfer_decode}

