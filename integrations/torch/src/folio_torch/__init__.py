"""Folio as PyTorch operators.

Importing this module registers `torch.ops.folio.*`: one operator for each operator of the package folio, and one for
the `run` of each handle. `folio_torch.vllm_ops` has vLLM's op signatures.

    prefill = folio.Prefill(folio_torch.context_of(q.device), ...)
    layer = folio_torch.number_of(prefill)
    prefill.plan(qo_indptr=..., kv_len=..., block_table=...)                    # once per step, not compiled
    torch.ops.folio.prefill(layer, q=q, k=k_cache, v=v_cache, o=o)              # once per layer, may be compiled
"""

from folio_torch.devices import context_of
from folio_torch.operators import number_of

__all__ = ["context_of", "number_of"]
