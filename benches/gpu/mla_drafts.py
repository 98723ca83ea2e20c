"""Absorbed MLA where requests have fewer tokens than their handle is for: a step without drafts, or with some.

    mla_drafts.py OUT.jsonl

Handles are for graphs. Every batch is planned once with lengths on the host and once with lengths on the device, and beside
them by a handle that is for no more tokens than the batch has. Answers are compared with float64.
"""

import argparse
import json
import pathlib
import sys

import bench
import folio
import mla
import torch

# Heads, requests × tokens, tokens that the handle is for.
BATCHES = [
    (64, [(128, 1)], 4),
    (64, [(96, 1), (32, 4)], 4),
    (64, [(128, 4)], 4),
    (128, [(64, 1)], 2),
    (128, [(32, 1), (32, 2)], 2),
    (128, [(64, 2)], 2),
    (32, [(128, 1)], 4),
    (32, [(96, 1), (32, 4)], 4),
    (16, [(128, 1)], 8),
    (80, [(64, 4)], 4),
]
KEYS, PAGE = 4096, 64
# Elements of fp8_ds_mla are rounded to bf16 with their scales.
TOLERANCE = 6e-3


class Batch:
    """Tokens of requests, one behind the other."""

    def __init__(self, heads, counts, cache):
        self.tokens = [tokens for requests, tokens in counts for _ in range(requests)]
        self.most = max(self.tokens)
        self.workload = mla.Workload(mla.Row(heads, [KEYS] * len(self.tokens), self.most, PAGE, cache))
        starts = torch.tensor([0, *self.tokens]).cumsum(0)
        self.q = self.workload.q[: starts[-1]].contiguous()
        self.o = torch.empty_like(self.q[..., : mla.RANK])
        self.starts, self.qo_indptr = starts.tolist(), starts.to(torch.int32)

    def error(self):
        """Worst relative error of sampled rows."""
        worst, w = 0.0, self.workload
        for b in {0, len(self.tokens) // 2, len(self.tokens) - 1}:
            keys = w.keys(b)
            for i in range(self.tokens[b]):
                token, end = self.starts[b] + i, KEYS - self.tokens[b] + 1 + i
                worst = max(worst, w.error_of_token(self.q[token], keys[:end], self.o[token]))
        return worst

    def measure(self, context, max_qo_len, on_device):
        w = self.workload
        handle = mla.folio_handle(context, w, max_qo_len)
        lengths = [self.qo_indptr.cuda(), w.kv_len_device] if on_device else [self.qo_indptr, w.kv_len]
        handle.plan(qo_indptr=lengths[0], kv_len=lengths[1], block_table=w.block_table)
        run = handle.run(q_latent=self.q[..., : mla.RANK], q_rope=self.q[..., mla.RANK :], kv=w.kv, o=self.o,
                         sm_scale=w.sm_scale, mask_mode=folio.MASK_CAUSAL)
        self.o.fill_(float("nan"))
        run()
        error = self.error()
        if not error < TOLERANCE:
            raise RuntimeError(f"error {error} against float64 (kernel {handle.kernel})")
        us = bench.captured(run)[0]
        handle.close()
        return us, error


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=pathlib.Path)
    options = parser.parse_args()
    context, results = folio.Context(), []
    for cache in ["bf16", "e4m3"]:
        for heads, counts, most in BATCHES:
            batch = Batch(heads, counts, cache)
            ways = {"host": (most, False), "device": (most, True), "own": (batch.most, False)}
            timed = {way: batch.measure(context, *how) for way, how in ways.items()}
            name = f"{' and '.join(f'{n} × {t}' for n, t in counts)} of up to {most}, {heads} heads, {cache}"
            results.append({"kind": "mla_drafts", "name": name, "us": {way: us for way, (us, _) in timed.items()},
                            "error": max(error for _, error in timed.values())})
            print(f"{name}:", *(f"{way} {us:.1f}" for way, (us, _) in timed.items()), flush=True)
    options.out.write_text("".join(json.dumps(result) + "\n" for result in results))


if __name__ == "__main__":
    sys.exit(main())
