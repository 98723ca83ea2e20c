"""SGLang's attention by Folio: `--attention-backend folio`.

SGLang calls `register` as a plugin, in each of its processes.
"""

from folio_sglang.selection import register

__all__ = ["register"]
