"""Random cascades: decode of requests that share prefixes, beside folio_decode on the same batch.

    random_cascades.py OUT.jsonl [--seed N] [--rows N] [--eager] [--most-keys N]

draws requests, heads, shared and own keys, a third of the rows with four documents between. Method as in cascade.py, with one
sampled request checked against float64. --eager: outside of graphs, of handles that are not for them; both are launched behind
a write that takes longer than launching does. --most-keys: the max_kv_len of handles, instead of the longest request's. What is
slower than flat decode is counted at the end.
"""

import argparse
import json
import math
import pathlib
import random
import statistics

import torch

import bench
import folio
from random_shapes import log_uniform

HEADS = [(32, 8), (64, 8), (40, 8), (28, 4), (16, 16), (8, 1), (32, 1)]
DIMS = [64, 128, 128, 256]
PAGE = 16
MOST_BYTES = 8e9
TOLERANCE = 8e-3


def draw(rng):
    """Requests, heads, head_dim, prefixes and own keys of each request."""
    hq, hk = rng.choice(HEADS)
    requests, dim = log_uniform(rng, 2, 256), rng.choice(DIMS)
    shared, own = (log_uniform(rng, low, high) // PAGE * PAGE for low, high in ((64, 32768), (16, 4096)))
    prefixes = [(0, requests, shared)]
    if requests >= 8 and rng.random() < 1 / 3:
        document = shared + log_uniform(rng, 64, 4096) // PAGE * PAGE
        ends = [i * requests // 4 for i in range(5)]
        prefixes += [(begin, end, document) for begin, end in zip(ends, ends[1:])]
    return dict(requests=requests, hq=hq, hk=hk, dim=dim, prefixes=prefixes, own=own)


class Workload:
    """A cache, a page table with the shared pages in every row, and queries."""

    def __init__(self, row):
        self.row = row
        tables, taken = [[] for _ in range(row["requests"])], 0
        ends = row["prefixes"] + [(b, b + 1, None) for b in range(row["requests"])]
        for begin, end, keys in ends:
            new = row["own"] // PAGE if keys is None else keys // PAGE - len(tables[begin])
            for table in tables[begin:end]:
                table.extend(range(taken, taken + new))
            taken += new
        self.kv_len = torch.tensor([PAGE * len(table) for table in tables], dtype=torch.int32)
        ids = torch.randperm(taken, dtype=torch.int32)
        self.block_table = torch.stack([ids[torch.tensor(table)] for table in tables]).cuda()
        shape = (taken, PAGE, row["hk"], row["dim"])
        self.k, self.v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        self.q = torch.randn(row["requests"], row["hq"], row["dim"], device="cuda", dtype=torch.bfloat16)
        self.o = torch.empty_like(self.q)
        self.qo_indptr = torch.arange(row["requests"] + 1, dtype=torch.int32)

    def error(self):
        b = self.row["requests"] - 1
        pages, group = self.block_table[b].long(), self.row["hq"] // self.row["hk"]
        k, v = (cache[pages].flatten(0, 1).double() for cache in (self.k, self.v))
        q = self.q[b].double().view(self.row["hk"], group, -1)
        scores = torch.einsum("hgd,khd->hgk", q, k) / math.sqrt(self.row["dim"])
        want = torch.einsum("hgk,khd->hgd", scores.softmax(2), v).flatten(0, 1)
        return ((self.o[b].double() - want).norm() / want.norm()).nan_to_num(nan=torch.inf).item()

    def timed(self, run, eager):
        self.o.fill_(float("nan"))
        run()
        wrong = self.error()
        if not wrong < TOLERANCE:
            raise RuntimeError(f"{self.row}: error {wrong} against float64")
        return launched(run) if eager else bench.captured(run)[0]


def launched(run):
    times = []
    for _ in range(bench.REPLAYS):
        bench.flush()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return statistics.median(times)


def desc(w, options):
    row = w.row
    return dict(flags=0 if options.eager else folio.PLAN_GRAPH, q_dtype=folio.dtype(torch.bfloat16),
                num_qo_heads=row["hq"], num_kv_heads=row["hk"], head_dim_qk=row["dim"], page_size=PAGE, max_batch_size=row["requests"], max_qo_len=1,
                max_kv_len=options.most_keys or int(w.kv_len.max()))


def measure(context, row, options):
    w = Workload(row)
    tensors = dict(q=w.q, k=w.k, v=w.v, o=w.o)
    flat = folio.Attention(context, "decode", **desc(w, options))
    flat.plan(kv_len=w.kv_len, block_table=w.block_table)
    cascade = folio.Cascade(context, max_num_tokens=row["requests"], max_shared_levels=2, **desc(w, options))
    cascade.plan(row["prefixes"], qo_indptr=w.qo_indptr, kv_len=w.kv_len, block_table=w.block_table)
    us = {name: w.timed(handle.run(**tensors), options.eager) for name, handle in (("cascade", cascade), ("flat", flat))}
    result = {"kind": "random_cascade", **row, "shares": cascade.shares, "kernel": cascade.kernel, "us": us}
    flat.close()
    cascade.close()
    return result


def rows(seed):
    rng = random.Random(seed)
    while True:
        row = draw(rng)
        last = row["prefixes"][-1][2]
        keys = row["prefixes"][0][2] + 4 * last + row["requests"] * row["own"]
        read = row["requests"] * (last + row["own"])
        if 4 * row["hk"] * row["dim"] * max(keys, read // 4) <= MOST_BYTES:
            yield row


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rows", type=int, default=200)
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--most-keys", type=int)
    options = parser.parse_args()
    bench.REST_SECONDS = 0.01
    context, results = folio.Context(), []
    for _, row in zip(range(options.rows), rows(options.seed)):
        results.append(measure(context, row, options))
        torch.cuda.empty_cache()
    options.out.write_text("".join(json.dumps(result) + "\n" for result in results))
    for shares in (False, True):
        ratios = sorted(r["us"]["cascade"] / r["us"]["flat"] for r in results if r["shares"] == shares)
        if ratios:
            slower = [sum(ratio > bar for ratio in ratios) for bar in (1.03, 1.1)]
            print(f"shares {shares}: {len(ratios)} rows, mean {sum(ratios) / len(ratios):.3f}, "
                  f"more than 3 % slower {slower[0]}, 10 % {slower[1]}, worst {ratios[-1]:.2f}")


if __name__ == "__main__":
    main()
