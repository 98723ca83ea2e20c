"""The portable kernels, which Ampere and Ada have alone, on a Hopper device as a stand-in: prefill beside
FlashAttention-2, which is mma.sync and cp.async as they are, and decode beside Folio's own Hopper kernels.

One line of JSON for each row, answers checked against float64; `--only TEXT` for rows whose name has the text. The
aims are 0.7 of FlashAttention-2's rate for prefill and 0.9 of the Hopper kernels' for decode.
"""

import argparse
import json
import os

import torch

import folio
import peers
from bench import answered, captured, checked, measure_peer
from workloads import E4M3, Workload, decode, prefill

MHA, WIDE = dict(hk=32), dict(hq=16, d=256)
SMALL = dict(hq=64, d=64)
ROWS = [
    prefill(4, 4096, 4096), prefill(4, 4096, 4096, **SMALL), prefill(4, 4096, 4096, causal=False),
    prefill(4, 4096, 4096, causal=False, **SMALL), prefill(1, 16384, 16384), prefill(1, 16384, 16384, **SMALL),
    prefill(16, 1024, 1024), prefill(16, 1024, 1024, **SMALL), prefill(16, 1024, 1024, **MHA),
    prefill(16, 1024, 1024, hk=32, d=64), prefill(8, 512, 8192), prefill(32, 128, 4096), prefill(4, 4096, 4096, page=1),
    prefill(4, 4096, 4096, d=96), prefill(4, 4096, 4096, hk=32, d=80), prefill(4, 4096, 4096, hq=16, d=192, dv=128, hk=16),
    prefill(4, 4096, 4096, **WIDE), prefill(4, 4096, 4096, window=1024), prefill(4, 4096, 4096, soft_cap=50.0),
    prefill(4, 4096, 4096, kv_dtype=E4M3), prefill(4, 4096, 4096, kv_dtype=E4M3, **SMALL),
    prefill(16, 1024, 1024, kv_dtype=E4M3),
    decode(1, 8192), decode(8, 1024), decode(8, 8192), decode(64, 1024), decode(64, 4096), decode(64, 4096, hq=64),
    decode(64, 4096, **MHA), decode(64, 4096, **SMALL), decode(64, 4096, **WIDE), decode(64, 4096, d=96),
    decode(64, 4096, hq=32, hk=4), decode(64, 4096, page=1), decode(64, 4096, kv_dtype=E4M3),
    decode(64, 8192, kv_dtype=E4M3), decode(64, 8192, kv_dtype=E4M3, **SMALL), decode(64, 8192, kv_dtype=E4M3, **WIDE),
]


def context_for(compute_capability):
    """A context whose kernels are those of a compute capability."""
    os.environ["FOLIO_COMPUTE_CAPABILITY"] = compute_capability
    try:
        return folio.Context()
    finally:
        del os.environ["FOLIO_COMPUTE_CAPABILITY"]


def measure(portable, own, row):
    torch.manual_seed(0)
    w = Workload(row)
    result = {"kind": row.kind, "name": row.name, "kv_bytes": w.kv_bytes, "flops": w.flops, "us": {}}
    for name, context in (("portable", portable), ("own", own)):
        if context is None:
            continue
        handle, _, run, _ = answered(context, w)
        result[name] = handle.kernel
        result["us"][name] = captured(run)[0]
        handle.close()
    if row.kind == "prefill":
        measure_peer(result, "fa2", lambda: checked(w, peers.fa2))
    peer = result["us"].get("fa2" if row.kind == "prefill" else "own")
    result["of_peer"] = round(peer / result["us"]["portable"], 3) if peer else None
    return result


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="")
    parser.add_argument("--kind", default="")
    parser.add_argument("--portable-only", action="store_true", help="without Folio's own Hopper kernels")
    arguments = parser.parse_args()
    portable, own = context_for("8.0"), None if arguments.portable_only else folio.Context()
    for row in ROWS:
        if arguments.only in row.name and arguments.kind in row.kind:
            print(json.dumps(measure(portable, own, row)), flush=True)


if __name__ == "__main__":
    main()
