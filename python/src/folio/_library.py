"""Loads the C library: that of FOLIO_LIBRARY in the environment, or the one that lies beside this file."""

from __future__ import annotations

import os
from pathlib import Path

from folio._generated.constants import ABI_VERSION
from folio._generated.ffi import ffi

ENVIRONMENT = "FOLIO_LIBRARY"


def _load():
    """The library, after the check that it speaks the ABI of the declarations."""
    named = os.environ.get(ENVIRONMENT)
    path = Path(named) if named else Path(__file__).with_name("libfolio.so")
    source = f"{ENVIRONMENT} names {named!r}" if named else f"the package's library is {path}"
    try:
        library = ffi.dlopen(str(path))
    except OSError as error:
        raise ImportError(f"folio needs its C library; {source}, which cannot be loaded: {error}") from error
    if library.folio_get_api(ABI_VERSION) == ffi.NULL:
        version = ffi.string(library.folio_version()).decode()
        raise ImportError(f"{source}, version {version}, whose ABI is not {ABI_VERSION >> 16}.{ABI_VERSION & 0xFFFF}")
    return library


lib = _load()


def version() -> str:
    """The library's version, "MAJOR.MINOR.PATCH"."""
    return ffi.string(lib.folio_version()).decode()


def mla_context_tokens(max_model_len: int, max_num_seqs: int, page_size: int) -> int:
    """Tokens of the workspace that vLLM takes for chunks of contexts: `min(max(8 · max_model_len, 4 · max_num_seqs ·
    page_size), 65536)`, but at least `max_num_seqs · page_size`."""
    return lib.folio_mla_context_tokens(max_model_len, max_num_seqs, page_size)
