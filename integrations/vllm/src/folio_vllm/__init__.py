"""vLLM's attention by Folio: an out-of-tree plugin, chosen with `attention_backend="FOLIO"`.

vLLM calls `register` in each of its processes. That makes the name known, and changes nothing for other backends.
"""

from folio_vllm.selection import register

__all__ = ["register"]
