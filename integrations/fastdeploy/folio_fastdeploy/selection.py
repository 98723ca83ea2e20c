"""What FD_ATTENTION_BACKEND stands for.

FastDeploy compares the variable with names of its own in several places: whether caches are latent, how large they are,
whether positions and slots are computed. FOLIO_MLA_ATTN is in all of that MLA_ATTN, and FOLIO_ATTN is APPEND_ATTN. So the
variable is set to those names, and FD_FOLIO_BACKEND, which processes started from here inherit, holds what was asked for.
"""

import os

from .rebinding import replace

#: Folio's backends, with the class and with FastDeploy's name for caches and runners.
BACKENDS = {
    "FOLIO_ATTN": ("FolioAttentionBackend", "APPEND_ATTN"),
    "FOLIO_MLA_ATTN": ("FolioMLAAttentionBackend", "MLA_ATTN"),
}
#: Backends of FastDeploy that FD_FOLIO_PREFER=1 puts on Folio: by their ops, or, where those are Triton functions, whole.
#: folio_backend.h, which a fork asks, has the same tables.
PREFERABLE = {"MLA_ATTN": None, "DECODE_UNIFIED_ATTN": None, "TRITON_MLA_ATTN": "FOLIO_MLA_ATTN"}


def requested():
    """The name of Folio's backend that is asked for, or None. A name that begins with FOLIO and is none is refused."""
    asked = os.environ.get("FD_ATTENTION_BACKEND", "")
    inherited = os.environ.get("FD_FOLIO_BACKEND", "")
    if not asked.startswith("FOLIO"):
        # Of a parent that has answered. FastDeploy's own name decides where somebody has changed it since.
        return inherited if inherited in BACKENDS and asked == BACKENDS[inherited][1] else None
    if asked not in BACKENDS:
        from fastdeploy.platforms import _Backend

        names = ", ".join([*_Backend.__members__, *(name for name in BACKENDS if name not in _Backend.__members__)])
        raise ValueError(f"FD_ATTENTION_BACKEND is {asked}; the names that are known are {names}")
    return asked


def preferred():
    """The name of FastDeploy's backend that is to run on Folio where it can, or None."""
    asked = os.environ.get("FD_ATTENTION_BACKEND", "")
    return asked if os.environ.get("FD_FOLIO_PREFER") == "1" and asked in PREFERABLE else None


def install(name):
    """Makes FastDeploy construct Folio's backend `name` wherever it asks for the attention backend."""
    from fastdeploy.model_executor.layers.attention import attention_selecter

    from . import backends

    backend = getattr(backends, BACKENDS[name][0])

    def get_attention_backend(*args, **kwargs):
        return backend

    replace(attention_selecter.get_attention_backend, get_attention_backend)


def answer(name):
    """Installs the backend that FD_ATTENTION_BACKEND asks for by Folio's name, and leaves FastDeploy's name there."""
    install(name)
    os.environ["FD_FOLIO_BACKEND"] = name
    os.environ["FD_ATTENTION_BACKEND"] = BACKENDS[name][1]
