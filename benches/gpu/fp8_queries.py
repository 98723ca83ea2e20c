"""Queries in e4m3 over e4m3 caches: answers against float64, then times as bench.py takes them.

Decode beside the same rows with bf16 queries, which read the same bytes. Prefill with probabilities in e4m3 where the
handle permits them, beside FlashAttention-3, whose are too, and the accuracy of values whose mean is 1 and of logits four
times as wide. The goals are those of a skeleton that was measured apart. Prefill whose queries and keys are widened to
rows, beside the same rows with all in 16 bits, and keys of small pages that are copied beside larger pages.

    FOLIO_LIBRARY=… python3 benches/gpu/fp8_queries.py [decode] [accuracy] [prefill] [widened] [copied]
"""

import dataclasses
import itertools
import sys

import torch

import folio
import peers
from bench import captured, error
from workloads import E4M3, Workload, decode, prefill

FP8_PRODUCTS = 4
DECODE = [decode(1, 8192, kv_dtype=E4M3), decode(64, 8192, kv_dtype=E4M3), decode(256, 4096, kv_dtype=E4M3),
          decode(64, 4096, hq=64, d=64, kv_dtype=E4M3), decode(64, 4096, hq=16, d=256, kv_dtype=E4M3)]
# With the PFLOP/s to reach.
PREFILL = [(prefill(1, 16384, 16384, kv_dtype=E4M3), 1.05), (prefill(4, 4096, 4096, kv_dtype=E4M3), 0.97),
           (prefill(16, 1024, 1024, kv_dtype=E4M3), 0.70), (prefill(4, 4096, 4096, causal=False, kv_dtype=E4M3), None),
           (prefill(8, 512, 8192, kv_dtype=E4M3), None),
           (prefill(4, 4096, 4096, hq=64, d=64, kv_dtype=E4M3), 0.72),
           (prefill(16, 1024, 1024, hq=64, d=64, kv_dtype=E4M3), None),
           (prefill(1, 16384, 16384, hq=64, d=64, kv_dtype=E4M3), None),
           (prefill(4, 4096, 4096, hq=16, d=256, kv_dtype=E4M3), 1.0),
           (prefill(16, 1024, 1024, hq=16, d=256, kv_dtype=E4M3), None),
           (prefill(1, 16384, 16384, hq=16, d=256, kv_dtype=E4M3), None)]
PREFILL += [(prefill(batch, q, kv, kv_dtype=E4M3, **dims), None) for batch, q, kv in [(4, 4096, 4096), (8, 512, 8192)]
            for dims in [dict(d=96), dict(hk=32, d=80), dict(hq=16, d=192), dict(page=1), dict(d=96, page=1),
                         dict(hq=64, d=64, page=1), dict(hq=16, d=256, page=1)]]
PREFILL += [(prefill(4, 4096, 4096, kv_dtype=E4M3, ragged=True), None)]
WIDENED = [prefill(batch, tokens, tokens, **dims) for batch, tokens in [(4, 4096), (16, 1024)]
           for dims in [dict(), dict(hq=64, d=64), dict(hq=16, d=256), dict(d=96), dict(page=1)]]
COPIED = [prefill(4, 4096, 4096, **dims) for dims in [dict(), dict(hq=64, d=64), dict(d=96), dict(hq=16, d=256)]]
COPIED += [prefill(16, 1024, 1024)]


def attention(context, w, flags=0):
    """A planned handle over the workload, and its run into `w.o`."""
    row = w.row
    desc = dict(flags=folio.PLAN_GRAPH | flags, q_dtype=folio.dtype(w.q.dtype), kv_dtype=folio.dtype(w.kv_dtype),
                o_dtype=folio.dtype(w.o.dtype), num_qo_heads=row.hq, num_kv_heads=row.hk, head_dim_qk=row.d,
                head_dim_vo=row.d, max_batch_size=row.batch, max_kv_len=row.kv)
    desc |= dict(kv_storage=folio.KV_RAGGED) if row.ragged else dict(page_size=row.page)
    batch = dict(kv_indptr=w.kv_indptr, kv_indices=w.kv_indices, last_page_len=w.last_page_len)
    if row.kind == "prefill":
        desc["max_num_tokens"] = row.batch * row.q
        batch["qo_indptr"] = w.qo_indptr
    handle = folio.Attention(context, row.kind, **desc)
    handle.plan(**batch)
    mask = folio.MASK_CAUSAL if row.causal else folio.MASK_FULL
    return handle, handle.run(q=w.q, k=w.k, v=w.v, o=w.o, sm_scale=w.sm_scale, mask_mode=mask)


def answered(run, w):
    w.o.fill_(float("nan"))
    run()
    torch.cuda.synchronize()
    return error(w, w.o)


def measure_decode(context, row):
    w = Workload(row)
    handle, run = attention(context, w)
    wrong, times = [answered(run, w)], [captured(run)[0]]
    w.q = w.q.to(E4M3)
    fp8, run = attention(context, w)
    wrong.append(answered(run, w))
    times.append(captured(run)[0])
    print(f"{row.name}: bf16 q {times[0]:.1f} us, e4m3 q {times[1]:.1f} us, errors {wrong[0]:.4f} {wrong[1]:.4f}, "
          f"{fp8.kernel}", flush=True)
    assert max(wrong) < 4e-3


def in_e4m3(row, mean=0.0, width=1.0):
    """A workload whose queries are e4m3, and whose values have a mean."""
    w = Workload(row)
    w.q = w.q.to(E4M3)
    w.v = (w.v.float() + mean).to(E4M3) if mean else w.v
    w.sm_scale *= width
    return w


def show_accuracy(context):
    """Relative errors of sampled rows, and what is missing of the mean, at 16k keys."""
    rows = [prefill(1, 16384, 16384, kv_dtype=E4M3, **dims) for dims in [dict(), dict(hq=64, d=64), dict(hq=16, d=256)]]
    for row, (mean, width) in itertools.product(rows, [(0, 1), (1, 1), (0, 4), (1, 4)]):
        w = in_e4m3(row, mean, width)
        handle, run = attention(context, w, FP8_PRODUCTS)
        wrong = answered(run, w)
        rows = [0, 777, 8191, 16383]
        want, got = w.reference(0, rows), w.o[rows].double()
        bias = ((got.mean((1, 2)) - want.mean((1, 2))) / want.mean((1, 2))).tolist() if mean else []
        print(f"d {row.d} mean {mean} width {width}: error {wrong:.4f}, bias {[f'{x:.4f}' for x in bias]}, {handle.kernel}",
              flush=True)


def measure_prefill(context, row, goal):
    w = in_e4m3(row)
    handle, run = attention(context, w, FP8_PRODUCTS)
    wrong = answered(run, w)
    median, best = captured(run)
    print(f"{row.name}: {median:.1f} us (best {best:.1f}), {w.flops / median * 1e-9:.3f} PFLOP/s"
          + (f" of {goal}" if goal else "") + f", error {wrong:.4f}, {handle.kernel}{beside_fa3(w, median)}", flush=True)
    handle.close()


def beside_fa3(w, us):
    """FlashAttention-3's time for the same, where it is installed, and over Folio's."""
    run = peers.fa3(w, w.o)
    if run is None:
        return ""
    wrong = answered(run, w)
    fa3 = captured(run)[0]
    return f"; fa3 {fa3:.1f} us, {fa3 / us:.2f}, error {wrong:.4f}"


def timed(context, row, q_dtype=torch.bfloat16, o_dtype=torch.bfloat16, bound=4e-3):
    """Microseconds and the kernel of a row whose queries and outputs have these types."""
    w = Workload(row)
    w.q, w.o = w.q.to(q_dtype), w.o.to(o_dtype)
    handle, run = attention(context, w)
    wrong = answered(run, w)
    us = captured(run)[0]
    assert wrong < bound, (row.name, wrong, handle.kernel)
    kernel, mebibytes = handle.kernel, handle.workspace_bytes >> 20
    handle.close()
    return us, f"{us:.1f} us (err {wrong:.4f}, {mebibytes} MiB, {kernel[8:]})"


def measure_widened(context, row):
    in_fp8 = dataclasses.replace(row, kv_dtype=E4M3)
    base, told = timed(context, row)
    print(f"{row.name}: 16 bits {told}")
    for name, o_dtype, bound in [("o bf16", torch.bfloat16, 4e-3), ("o e4m3", E4M3, 6e-2)]:
        us, told = timed(context, in_fp8, E4M3, o_dtype, bound)
        print(f"    all in e4m3, {name}: {told} {us / base:.3f}", flush=True)


def measure_copied(context, row):
    base, _ = timed(context, row)
    us, told = timed(context, dataclasses.replace(row, page=1))
    print(f"{row.name}: pages of 16 {base:.1f} us, of 1 {told} {us / base:.3f}", flush=True)


def main(parts):
    torch.manual_seed(0)
    context = folio.Context()
    if "decode" in parts:
        for row in DECODE:
            measure_decode(context, row)
    if "accuracy" in parts:
        show_accuracy(context)
    if "prefill" in parts:
        for row, goal in PREFILL:
            measure_prefill(context, row, goal)
    if "widened" in parts:
        for row in WIDENED:
            measure_widened(context, row)
    if "copied" in parts:
        for row in COPIED:
            measure_copied(context, row)


if __name__ == "__main__":
    main(sys.argv[1:] or ["decode", "accuracy", "prefill", "widened", "copied"])
