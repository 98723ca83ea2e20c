"""What a call from Python costs beside the same call of C: prepared, with described tensors, and with plain ones.

    python benchmark.py          # NumPy, and torch where it is installed

The C call is timed through cffi as it is, without the package. The call is a decode of one request of one key, which
is next to nothing in C, so that differences show.
"""

import sys
import time

import numpy as np

import folio
from folio._generated.ffi import ffi
from folio._library import lib


def microseconds(call, repeats=100, calls=500):
    """The fastest mean of some calls."""
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        for _ in range(calls):
            call()
        best = min(best, time.perf_counter() - start)
    return best / calls * 1e6


def c_call(prepared):
    """What a prepared call calls."""
    arguments = (prepared._object.c, *prepared._arguments, ffi.NULL)
    run = lib.folio_decode_run
    return lambda: run(*arguments)


def main():
    """Prints a table."""
    ctx = folio.Context("cpu")
    decode = folio.Decode(
        ctx,
        q_dtype="float32",
        num_qo_heads=1,
        num_kv_heads=1,
        head_dim_qk=8,
        page_size=16,
        max_batch_size=1,
        max_kv_len=16,
    )
    kv_len, block_table = np.array([1], np.int32), np.array([[0]], np.int32)
    decode.plan(kv_len=kv_len, block_table=block_table)
    arrays = {
        "q": np.ones((1, 1, 8), np.float32),
        "k": np.ones((1, 16, 1, 8), np.float32),
        "v": np.ones((1, 16, 1, 8), np.float32),
        "o": np.ones((1, 1, 8), np.float32),
        "lse": np.ones((1, 1), np.float32),
    }
    prepared = decode.prepare_run(**arrays)
    bare = microseconds(c_call(prepared))
    print(f"Python {sys.version.split()[0]}, {decode.kernel}; microseconds, and those above the C call")

    def report(what, call):
        took = microseconds(call)
        print(f"{what:48} {took:6.2f} {took - bare:+6.2f}")

    print(f"{'the C call through cffi':48} {bare:6.2f}")
    report("prepared call", prepared)
    described = {name: folio.Tensor(array) for name, array in arrays.items()}
    report("run, five described tensors", lambda: decode.run(**described))
    report("run, five NumPy arrays", lambda: decode.run(**arrays))
    if _torch():
        tensors = {name: _torch().from_numpy(array) for name, array in arrays.items()}
        report("run, five torch tensors", lambda: decode.run(**tensors))
    report("plan, two NumPy arrays", lambda: decode.plan(kv_len=kv_len, block_table=block_table))


def _torch():
    try:
        import torch
    except ImportError:
        return None
    return torch


if __name__ == "__main__":
    main()
