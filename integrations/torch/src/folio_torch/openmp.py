"""PyTorch's OpenMP, so that Folio computes on its threads.

Two pools on the same CPUs are in each other's way: between its regions OpenMP's threads spin, and Folio's own then find no
CPU. So where PyTorch computes by OpenMP, Folio's work is regions of the same OpenMP.
"""

import ctypes
from functools import cache
from pathlib import Path

import torch

_LIBRARY = Path(__file__).with_name("libfolio_openmp.so")


@cache
def parallel_for() -> dict[str, int]:
    """`parallel_for` and `parallel_for_user` of a `folio.Context`; nothing where Folio is to have threads of its own.

    That is where PyTorch computes without OpenMP, and where no C compiler was there when this package was built.
    """
    begin_region = _gomp_parallel()
    if begin_region is None or not _LIBRARY.exists():
        return {}
    function = ctypes.CDLL(str(_LIBRARY)).folio_torch_parallel_for
    return dict(parallel_for=_address(function), parallel_for_user=_address(begin_region))


def _gomp_parallel():
    """The entry to a region, of the OpenMP that PyTorch itself calls: a preloaded one comes before that of its wheel."""
    if not torch.backends.openmp.is_available():
        return None
    for library in (None, Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"):
        try:
            return ctypes.CDLL(library and str(library)).GOMP_parallel
        except (AttributeError, OSError):
            pass
    return None


def _address(function) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value
