"""Random shapes, to find those that fall behind: the rows of the other tables are samples of this space.

    random_shapes.py OUT.jsonl [--seed N] [--seconds S] [--peers] [--device-lengths]

draws rows of decode, verify, prompts (as many keys as tokens: a fresh prompt, an encoder), prefill on a context and mixed
batches over the heads, head dims, pages, lengths and extras that models have. In half of the rows every request has a length of its own.
Every answer is compared with float64. A row's expectation is the time of its bytes or of its FLOPs at the rates of the same
run, whichever is longer, and OVERHEAD_US. What took the longest for its expectation is printed last. --peers measures what
bench.py's peers need for the same rows. --device-lengths plans on the device.
"""

import argparse
import json
import math
import pathlib
import random
import sys
import time

import torch

import bench
import folio
import peers
from models import limit_microseconds
from workloads import E4M3, of_requests

HEADS = [(32, 8), (32, 8), (28, 4), (64, 8), (16, 16), (8, 1), (40, 8), (24, 8), (20, 20), (16, 2), (32, 1), (12, 12), (96, 8)]
HEAD_DIMS = [64, 64, 72, 80, 96, 112, 120, 128, 128, 128, 128, 128, 160, 192, 256, 256]
PAGES = [1, 8, 16, 16, 16, 32, 64, 128, 256]
QUERY_TOKENS = [2, 3, 4, 5, 8, 12, 16]
MOST_BYTES, MOST_FLOPS = 3e9, 2e12
# An empty kernel in a graph, the first loads, and a second kernel where rows are split.
OVERHEAD_US = 9.0


def log_uniform(rng, low, high):
    return round(math.exp(rng.uniform(math.log(low), math.log(high))))


def extras(rng):
    """None in most rows, as in most models."""
    return rng.choice([{}, {}, {}, {}, {"window": rng.choice([128, 1024])}, {"soft_cap": 50.0}, {"sinks": True}])


def draw(rng):
    kind = rng.choices(list(REQUESTS), [35, 12, 20, 18, 15])[0]
    hq, hk = rng.choice(HEADS)
    more = dict(hq=hq, hk=hk, d=rng.choice(HEAD_DIMS), page=rng.choice(PAGES), **extras(rng))
    if rng.random() < 0.2:
        more["kv_dtype"] = E4M3
    if kind in ("prompts", "prefill"):
        more["causal"] = rng.random() < 0.7
    if kind == "prompts" and rng.random() < 0.5:
        more["ragged"] = True
    return of_requests(KINDS.get(kind, kind), REQUESTS[kind](rng, rng.random() < 0.5), **more)


def lengths(rng, count, low, high, equal):
    """All alike, or each its own, up to one that is drawn."""
    most = log_uniform(rng, low, high)
    return [most] * count if equal else [log_uniform(rng, low, most) for _ in range(count)]


def decodes(rng, equal):
    return [(1, kv) for kv in lengths(rng, log_uniform(rng, 1, 256), 100, 32768, equal)]


def drafts(rng, equal):
    q = rng.choice(QUERY_TOKENS)
    return [(q, kv) for kv in lengths(rng, log_uniform(rng, 1, 256), 100, 32768, equal)]


def prompts(rng, equal):
    return [(kv, kv) for kv in lengths(rng, log_uniform(rng, 1, 512), 16, 8192, equal)]


def on_context(rng, equal):
    kv = lengths(rng, log_uniform(rng, 1, 32), 100, 32768, equal)
    return list(zip(map(min, kv, lengths(rng, len(kv), 16, 16384, equal)), kv))


def mixed(rng, equal):
    """Chunks of prompts among decodes; one where lengths are equal."""
    decoding = decodes(rng, equal)
    kv = [decoding[0][1]] if equal else lengths(rng, rng.randint(1, 4), 100, 32768, False)
    chunks = [(min(keys, log_uniform(rng, 16, 2048)), keys) for keys in kv]
    requests = chunks + decoding
    rng.shuffle(requests)
    return requests


# New tokens and keys of the requests of a row, by work; prompts are prefill.
REQUESTS = {"decode": decodes, "verify": drafts, "prompts": prompts, "prefill": on_context, "mixed": mixed}
KINDS = {"prompts": "prefill"}


def cost(row):
    """Bytes of keys and values, and products without masks."""
    dim = row.d + (row.dv or row.d)
    pairs = sum(q * kv for q, kv in row.requests)
    return 2 * sum(row.kv_lens) * row.hk * dim, 2 * row.hq * pairs * dim


def rows(seed, draw=draw, cost=cost, most_bytes=MOST_BYTES, most_flops=MOST_FLOPS):
    """Rows that are drawn, without those that move or compute too much."""
    rng = random.Random(seed)
    while True:
        row = draw(rng)
        moved, flops = cost(row)
        if moved <= most_bytes and flops <= most_flops:
            yield row


def measure(context, row, limits):
    result = bench.measure(context, row)
    result["requests"] = row.requests
    result["expected_us"] = limit_microseconds(result, limits) + OVERHEAD_US
    result["ratio"] = result["us"]["folio"] / result["expected_us"]
    return result


def measured(rows, seconds, measure):
    """What `measure` says of as many rows as there is time for, and how many failed. These are printed."""
    results, failures, end = [], 0, time.monotonic() + seconds
    for row in rows:
        if time.monotonic() > end:
            break
        try:
            results.append(measure(row))
        except Exception as failure:
            failures += 1
            print(f"FAILED {row.name}: {str(failure)[:200]}", flush=True)
        torch.cuda.empty_cache()
    return results, failures


def line(result):
    own, *others = (f"{name} {us:.1f}" for name, us in result["us"].items())
    behind = "  BEHIND" if min(result["us"].values()) < result["us"]["folio"] else ""
    return f"{result['ratio']:5.2f}  {own} of {result['expected_us']:.1f} {' '.join(others)}  {result['kind']} {result['name']}  {result['kernel']}{behind}"


def argument_parser(description, seconds):
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=seconds)
    return parser


def finish(options, limits, results, failures):
    """Writes what was measured, prints it by ratio, and exits: with 1 where something failed."""
    options.out.write_text("".join(json.dumps(entry) + "\n" for entry in [{"kind": "limits", **limits}, *results]))
    for result in sorted(results, key=lambda result: result["ratio"]):
        print(line(result))
    print(f"{len(results)} rows, {failures} failures")
    sys.exit(1 if failures else 0)


def main():
    parser = argument_parser(__doc__, seconds=120)
    parser.add_argument("--peers", action="store_true")
    parser.add_argument("--device-lengths", action="store_true")
    options = parser.parse_args()
    bench.REST_SECONDS = 0.05
    bench.LENGTHS_ON = "cuda" if options.device_lengths else "cpu"
    if not options.peers:
        peers.PEERS.clear()
    context, limits = folio.Context(), bench.limits()
    print(json.dumps(limits), torch.cuda.get_device_name(), "peers:", ", ".join(peers.PEERS), flush=True)
    finish(options, limits, *measured(rows(options.seed), options.seconds, lambda row: measure(context, row, limits)))


if __name__ == "__main__":
    main()
