"""Random cascades: decode of requests that share prefixes, beside folio_decode on the same batch.

    random_cascades.py OUT.jsonl [--seed N] [--rows N] [--eager] [--most-keys N]

draws requests, heads, tokens of a request, shared and own keys, a third of the rows with documents between. In half of the rows
every request has own keys of its own number, and documents are of several lengths and requests. Method as in cascade.py, with
three requests checked against float64. --eager: outside of graphs, of handles that are not for them; both are launched behind
a write that takes longer than launching does. --most-keys: the max_kv_len of handles, instead of the longest request's. What is
slower than flat decode is counted at the end.
"""

import argparse
import json
import math
import pathlib
import random

import torch

import bench
import folio
from random_shapes import log_uniform

HEADS = [(32, 8), (64, 8), (40, 8), (28, 4), (16, 16), (8, 1), (32, 1)]
DIMS = [64, 128, 128, 256]
TOKENS = [1, 1, 1, 1, 2, 4, 8]
PAGE = 16
MOST_BYTES = 8e9
TOLERANCE = 8e-3


def draw(rng):
    """Heads, head_dim, tokens of a request, prefixes, and own keys of each request."""
    hq, hk = rng.choice(HEADS)
    requests, dim = log_uniform(rng, 2, 256), rng.choice(DIMS)
    shared, most_own = (log_uniform(rng, low, high) // PAGE * PAGE for low, high in ((64, 32768), (16, 4096)))
    equal = rng.random() < 0.5
    own = [most_own if equal else log_uniform(rng, PAGE, most_own) for _ in range(requests)]
    prefixes = [(0, requests, shared)]
    if requests >= 8 and rng.random() < 1 / 3:
        prefixes += documents(rng, requests, shared, equal)
    return dict(hq=hq, hk=hk, dim=dim, tokens=rng.choice(TOKENS), prefixes=prefixes, own=own)


def documents(rng, requests, shared, equal):
    """Four of as many requests and keys; or up to eight, each of its own."""
    most = log_uniform(rng, 64, 4096)
    if equal:
        ends, keys = [i * requests // 4 for i in range(5)], [most] * 4
    else:
        ends = [0, *sorted(rng.sample(range(1, requests), rng.randint(1, 7))), requests]
        keys = [log_uniform(rng, 64, most) for _ in ends[1:]]
    return [(begin, end, shared + own // PAGE * PAGE) for begin, end, own in zip(ends, ends[1:], keys)]


class Workload:
    """A cache, a page table with the shared pages in every row, and queries."""

    def __init__(self, row):
        self.row, self.requests = row, len(row["own"])
        tables, taken = [[] for _ in row["own"]], 0
        lens = [max(keys for begin, end, keys in row["prefixes"] if begin <= b < end) + own for b, own in enumerate(row["own"])]
        for begin, end, keys in row["prefixes"] + [(b, b + 1, keys) for b, keys in enumerate(lens)]:
            new = -(-keys // PAGE) - len(tables[begin])
            for table in tables[begin:end]:
                table.extend(range(taken, taken + new))
            taken += new
        self.kv_len = torch.tensor(lens, dtype=torch.int32)
        ids = torch.randperm(taken, dtype=torch.int32)
        self.block_table = torch.zeros(self.requests, max(map(len, tables)), dtype=torch.int32)
        for b, table in enumerate(tables):
            self.block_table[b, : len(table)] = ids[torch.tensor(table)]
        self.block_table = self.block_table.cuda()
        shape = (taken, PAGE, row["hk"], row["dim"])
        self.k, self.v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        self.q = torch.randn(row["tokens"] * self.requests, row["hq"], row["dim"], device="cuda", dtype=torch.bfloat16)
        self.o = torch.empty_like(self.q)
        self.qo_indptr = torch.arange(self.requests + 1, dtype=torch.int32) * row["tokens"]

    def error(self):
        """The worst of three requests' first and last tokens."""
        last = self.row["tokens"] - 1
        return max(self.error_of(b, token) for b in {0, self.requests // 2, self.requests - 1} for token in {0, last})

    def error_of(self, b, token):
        keys, group = int(self.kv_len[b]) - self.row["tokens"] + 1 + token, self.row["hq"] // self.row["hk"]
        pages = self.block_table[b, : -(-keys // PAGE)].long()
        k, v = (cache[pages].flatten(0, 1)[:keys].double() for cache in (self.k, self.v))
        at = b * self.row["tokens"] + token
        q = self.q[at].double().view(self.row["hk"], group, -1)
        scores = torch.einsum("hgd,khd->hgk", q, k) / math.sqrt(self.row["dim"])
        want = torch.einsum("hgk,khd->hgd", scores.softmax(2), v).flatten(0, 1)
        return ((self.o[at].double() - want).norm() / want.norm()).nan_to_num(nan=torch.inf).item()

    def timed(self, run, eager):
        self.o.fill_(float("nan"))
        run()
        wrong = self.error()
        if not wrong < TOLERANCE:
            raise RuntimeError(f"{self.row}: error {wrong} against float64")
        return bench.launched(run) if eager else bench.captured(run)[0]


def desc(w, options):
    row = w.row
    return dict(flags=0 if options.eager else folio.PLAN_GRAPH, q_dtype=folio.dtype(torch.bfloat16),
                num_qo_heads=row["hq"], num_kv_heads=row["hk"], head_dim_qk=row["dim"], page_size=PAGE, max_batch_size=w.requests,
                max_qo_len=row["tokens"],
                max_kv_len=options.most_keys or int(w.kv_len.max()))


def measure(context, row, options):
    w = Workload(row)
    tensors = dict(q=w.q, k=w.k, v=w.v, o=w.o, mask_mode=folio.MASK_CAUSAL)
    flat = folio.Attention(context, "decode", **desc(w, options))
    flat.plan(qo_len=row["tokens"], kv_len=w.kv_len, block_table=w.block_table)
    cascade = folio.Cascade(context, max_num_tokens=len(w.q), max_shared_levels=2, **desc(w, options))
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
        prefixes, own = row["prefixes"], sum(row["own"])
        keys = sum(prefix[2] for prefix in prefixes) + own
        read = len(row["own"]) * max(prefix[2] for prefix in prefixes) + own
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
