"""PyTorch SDPA on the shapes of the CPU benchmark; see torch.rs for the lines that come and go."""
import sys
import time

import torch
import torch.nn.functional as F

QO_HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
COLD_BYTES = 768 << 20


def best_us(dtype, batch, qo_len, kv_len, warm, rounds):
    """Best time of one call, each on the next of enough copies of K and V to be cold."""
    size = 2 * batch * KV_HEADS * kv_len * HEAD_DIM * torch.finfo(dtype).bits // 8
    copies = 1 if warm else -(-COLD_BYTES // size)
    shape = (copies, batch, KV_HEADS, kv_len, HEAD_DIM)
    k, v = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
    q = torch.randn(batch, QO_HEADS, qo_len, HEAD_DIM).to(dtype)
    # Bottom-right causal: a mask where there is a past, PyTorch's own where there is none.
    mask, causal = None, qo_len == kv_len
    if not causal and qo_len > 1:
        mask = torch.ones(qo_len, kv_len, dtype=torch.bool).tril(kv_len - qo_len)
    best = float("inf")
    for i in range(rounds if not warm else 20 * rounds):
        start = time.perf_counter()
        F.scaled_dot_product_attention(
            q, k[i % copies], v[i % copies], attn_mask=mask, is_causal=causal, enable_gqa=True
        )
        best = min(best, time.perf_counter() - start)
    return best * 1e6


def main():
    torch.set_num_threads(int(sys.argv[1]))
    rounds = int(sys.argv[2])
    for line in sys.stdin:
        fields = line.rstrip("\n").split("\t")
        if len(fields) != 6:
            continue
        name, dtype = fields[0], getattr(torch, fields[1])
        batch, qo_len, kv_len, warm = map(int, fields[2:])
        us = best_us(dtype, batch, qo_len, kv_len, bool(warm), rounds)
        print(f"{name}\t{us:.2f}", flush=True)


main()
