"""Prefill whose requests have scales of k and v of their own (FlashAttention-3's k_descale and v_descale), beside the same with
scales of KV heads and with none. Checks every answer against float64, then times all as bench.py does, in turn.

The cache holds keys and values times powers of two, which every type stores exactly, and scales take these away: the answer is
the workload's.

    FOLIO_LIBRARY=… python3 benches/gpu/request_scales.py [part of a row's name ...]
"""

import dataclasses
import sys

import torch

import folio
from bench import captured, error
from workloads import E4M3, Workload, prefill

BF16 = torch.bfloat16
ROWS = [prefill(4, 4096, 4096), prefill(16, 1024, 1024), prefill(8, 512, 8192), prefill(1, 2048, 32768),
        prefill(4, 4096, 4096, soft_cap=50.0)]
FP8_PRODUCTS = 4
# Types of q and of the cache, flags of the handle, and the error of their products.
FORMS = [(BF16, BF16, 0, 4e-3), (BF16, E4M3, 0, 4e-3), (E4M3, E4M3, 0, 4e-3), (E4M3, E4M3, FP8_PRODUCTS, 4e-2)]
ROUNDS = 2


def scales_of(row, kind):
    """Powers of two down to a quarter: `[batch, heads]`, `[heads]` or None."""
    if kind == "none":
        return None
    shape = (row.batch, row.hk) if kind == "requests" else (row.hk,)
    return torch.exp2(-torch.randint(0, 3, shape, device="cuda").float())


def divided(w, cache, scales):
    """The cache without the scales."""
    if scales is None:
        return cache
    of_page = torch.ones(len(cache), w.row.hk, device="cuda")
    for request, pages in enumerate(w.block_table.long()):
        of_page[pages] = scales[request] if scales.dim() == 2 else scales
    return (cache.float() / of_page[:, None, :, None]).to(cache.dtype)


def prepared(context, w, flags, kind):
    """A planned handle and its run."""
    row, scales = w.row, scales_of(w.row, kind)
    handle = folio.Attention(context, "prefill", flags=folio.PLAN_GRAPH | flags, q_dtype=folio.dtype(w.q.dtype),
                             kv_dtype=folio.dtype(w.kv_dtype), o_dtype=folio.dtype(w.o.dtype), num_qo_heads=row.hq,
                             num_kv_heads=row.hk, head_dim_qk=row.d, head_dim_vo=row.d, max_batch_size=row.batch,
                             max_kv_len=row.kv, page_size=row.page, max_num_tokens=len(w.q))
    handle.plan(kv_indptr=w.kv_indptr, kv_indices=w.kv_indices, last_page_len=w.last_page_len, qo_indptr=w.qo_indptr)
    return handle, handle.run(q=w.q, k=divided(w, w.k, scales), v=divided(w, w.v, scales), o=w.o, k_scales=scales,
                              v_scales=scales, sm_scale=w.sm_scale, mask_mode=folio.MASK_CAUSAL,
                              logits_soft_cap=row.soft_cap)


def measure(context, row, form):
    q_dtype, kv_dtype, flags, bound = form
    w = Workload(dataclasses.replace(row, kv_dtype=kv_dtype))
    w.q = w.q.to(q_dtype)
    runs, times = {}, {}
    for kind in ("none", "heads", "requests"):
        handle, run = prepared(context, w, flags, kind)
        w.o.fill_(float("nan"))
        run()
        torch.cuda.synchronize()
        wrong = error(w, w.o)
        assert wrong < bound, (row.name, form, kind, wrong, handle.kernel)
        runs[kind], times[kind] = run, []
    for _ in range(ROUNDS):
        for kind, run in runs.items():
            times[kind].append(captured(run)[0])
    none, heads, requests = (min(of_kind) for of_kind in times.values())
    short = [str(dtype).split(".")[1] for dtype in form[:2]]
    print(f"{row.name} {short[0]}/{short[1]}{' fp8 products' if flags else ''}: none {none:.1f} us, heads {heads:.1f}, "
          f"requests {requests:.1f} = {requests / heads:.3f} of heads, {handle.kernel}", flush=True)


def main(words):
    torch.manual_seed(0)
    context = folio.Context()
    for row in ROWS:
        if all(word in row.name for word in words):
            for form in FORMS:
                measure(context, row, form)


if __name__ == "__main__":
    main(sys.argv[1:])
