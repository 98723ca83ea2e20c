"""Copies of pages and gathers of tokens on a GPU, in shares of the rate of a plain copy. Checks every answer, then times it.

Method as in bench.py: a call in a CUDA graph, 256 MB written before each replay, the median of 30. Bytes count twice, read
and written. Swaps are compared with cuMemcpyAsync of as many contiguous bytes (`copy_` of page-locked tensors), and count
once. Writes JSON lines to the file that is the first argument, if there is one.
"""

import json
import sys

import torch

import folio
from bench import captured, limits

# Name, pages that are copied, bytes of a page of keys (and of values, or None).
COPIES = [
    ("16 tokens of 8 heads of 128, bf16", 4096, 32768, 32768),
    ("the same, few pages", 64, 32768, 32768),
    ("1 token of 8 heads of 128, bf16", 65536, 2048, 2048),
    ("64 records of 656 bytes", 4096, 41984, None),
    ("1 record of 656 bytes", 262144, 656, None),
    ("few large pages", 8, 16 << 20, 16 << 20),
    ("one page of 16 tokens", 1, 32768, 32768),
]


def pages(count, size, device="cuda"):
    values = torch.randint(0, 255, (count, size), dtype=torch.uint8)
    return values.pin_memory() if device == "cpu" else values.to(device)


def copy(context, name, count, k_bytes, v_bytes, src_device="cuda", dst_device="cuda", pairs_on="cuda"):
    sides = {"k": k_bytes, "v": v_bytes}
    tensors = {}
    for side, size in sides.items():
        if size is not None:
            tensors[f"{side}_src"] = pages(2 * count, size, src_device)
            tensors[f"{side}_dst"] = pages(2 * count, size, dst_device)
    pairs = torch.stack([torch.randperm(2 * count)[:count], torch.randperm(2 * count)[:count]], dim=1).to(torch.int32)
    run = context.kv_copy(page_pairs=pairs.to(pairs_on).contiguous(), **tensors)
    run()
    torch.cuda.synchronize()
    for side, size in sides.items():
        if size is not None:
            src, dst = (tensors[f"{side}_{end}"].cpu() for end in ("src", "dst"))
            assert torch.equal(src[pairs[:, 0].long()], dst[pairs[:, 1].long()]), name
    return captured(run)[0], count * (k_bytes + (v_bytes or 0))


def gather(context, cache_dtype, tokens=65536, page=16, heads=8, dim=128):
    k, v = (torch.randn(2 * tokens // page, page, heads, dim, device="cuda").to(cache_dtype) for _ in range(2))
    ids = torch.randperm(2 * tokens // page, device="cuda")[:tokens // page].to(torch.int32)
    key, value = (torch.empty(tokens, heads, dim, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    ends = torch.tensor([0, tokens // 4, tokens], dtype=torch.int32, device="cuda")
    indptr = torch.tensor([0, tokens // 4 // page, tokens // page], dtype=torch.int32, device="cuda")
    run = context.kv_gather(key=key, value=value, k_cache=k, v_cache=v, cu_seq_lens=ends, kv_indptr=indptr, kv_indices=ids)
    run()
    for cache, rows in ((k, key), (v, value)):
        assert torch.equal(cache.float()[ids.long()].reshape(tokens, heads, dim).to(torch.bfloat16), rows)
    return captured(run)[0], tokens * heads * dim * 2 * (k.element_size() + 2)


def main():
    torch.manual_seed(1)
    context, out = folio.Context(), open(sys.argv[1], "w") if len(sys.argv) > 1 else None
    rate = limits()["copy_bytes_per_s"]

    def report(name, microseconds, moved, limit):
        share = moved / microseconds * 1e6 / limit
        print(f"{name:60} {microseconds:9.1f} us {moved / microseconds / 1e3:8.1f} GB/s {share:6.1%}")
        if out:
            out.write(json.dumps({"name": name, "us": microseconds, "bytes": moved, "share": share}) + "\n")

    for row in COPIES:
        microseconds, size = copy(context, *row)
        report(row[0], microseconds, 2 * size, rate)
    microseconds, size = copy(context, *COPIES[1], pairs_on="cpu")
    report(f"{COPIES[1][0]}, pairs on the host", microseconds, 2 * size, rate)
    for source, target in (("cuda", "cpu"), ("cpu", "cuda")):
        plain = torch.empty(1 << 28, dtype=torch.uint8, device="cuda"), torch.empty(1 << 28, dtype=torch.uint8).pin_memory()
        to, of = plain[::-1] if source == "cuda" else plain
        bus = to.nbytes / captured(lambda: to.copy_(of, non_blocking=True))[0] * 1e6
        microseconds, size = copy(context, *COPIES[0], src_device=source, dst_device=target)
        report(f"{COPIES[0][0]}, {source} to {target}", microseconds, size, bus)
    for dtype in (torch.bfloat16, torch.float8_e4m3fn):
        report(f"gather of 65536 tokens, {dtype}", *gather(context, dtype), rate)


main()
