"""Absorbed MLA decode on the CPU beside vLLM's operator, `mla_decode_kvcache_cpu`, in turn in one process.

    mla_vllm.py [threads]

Its Python has vLLM for the CPU and the package `folio` (`make test-vllm` makes such an environment). bf16, pages of 16 in
random order. Every answer of both is compared with the other's. Printed are the fastest and the median time of each, and
the median of the ratios of neighbouring calls, which a busy machine changes least.
"""

import math
import statistics
import sys
import time

import torch
import vllm._custom_ops as vllm_ops

import folio

RANK, ROPE, PAGE, ROUNDS = 512, 64, 16, 9
ROWS = [(heads, batch, kv) for heads in (16, 128) for batch, kv in ((1, 512), (1, 2048), (1, 8192), (8, 2048), (8, 4096))]


class Problem:
    def __init__(self, heads, batch, kv):
        torch.manual_seed(0)
        pages = batch * kv // PAGE
        self.kv = torch.randn(pages, PAGE, RANK + ROPE).bfloat16()
        self.table = torch.randperm(pages, dtype=torch.int32).view(batch, kv // PAGE)
        self.kv_len = torch.full((batch,), kv, dtype=torch.int32)
        self.q = torch.randn(batch, heads, RANK + ROPE).bfloat16()
        self.sm_scale = 1 / math.sqrt(192)

    def output(self):
        return torch.empty(*self.q.shape[:2], RANK, dtype=torch.bfloat16)


def of_folio(context, problem):
    batch, heads, _ = problem.q.shape
    handle = folio.Mla(
        context, q_dtype=torch.bfloat16, kv_dtype=torch.bfloat16, num_heads=heads, kv_lora_rank=RANK,
        qk_rope_head_dim=ROPE, page_size=PAGE, max_batch_size=batch, max_kv_len=int(problem.kv_len.max()))
    handle.plan(kv_len=problem.kv_len, block_table=problem.table)
    o, (latent, rope) = problem.output(), problem.q.split([RANK, ROPE], dim=-1)
    return o, lambda: handle.run(q_latent=latent, q_rope=rope, kv=problem.kv, o=o, sm_scale=problem.sm_scale)


def of_vllm(problem):
    o = problem.output()
    return o, lambda: vllm_ops.mla_decode_kvcache_cpu(
        o, problem.q, problem.kv, problem.sm_scale, problem.table, problem.kv_len)


def seconds(function):
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin


def main():
    threads = int(sys.argv[1]) if len(sys.argv) > 1 else 2
    torch.set_num_threads(threads)
    context = folio.Context(num_threads=threads)
    for row in ROWS:
        problem = Problem(*row)
        (own, run), (other, peer) = of_folio(context, problem), of_vllm(problem)
        run(), peer()
        difference = ((own.float() - other.float()).norm() / other.float().norm()).item()
        if not difference < 6e-3:
            raise RuntimeError(f"{row}: the two differ by {difference}")
        times = [(seconds(run), seconds(peer)) for _ in range(ROUNDS)]
        ratio = statistics.median(theirs / ours for ours, theirs in times)
        ours, theirs = (f"{min(of) * 1e3:.2f} / {statistics.median(of) * 1e3:.2f} ms" for of in zip(*times))
        heads, batch, kv = row
        print(f"{heads} heads, {batch} x {kv}: folio {ours}, vLLM {theirs}, {ratio:.1f} times", flush=True)


if __name__ == "__main__":
    main()
