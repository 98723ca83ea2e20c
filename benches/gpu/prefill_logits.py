"""Prefill with logits that are more than a scale: checks every answer against float64, then times it beside the plain run.

Method as bench.py's: the median of graph replays with a cold L2. Ratios are to the plain run of the same batch.
"""

import argparse
import json
import math

import torch

import folio
from bench import captured
from masks import Masked, error, hidden, packed, positions
from workloads import Workload, prefill

TOLERANCE = 4e-3
LSE_TOLERANCE = 2e-4


def handle_of(context, w):
    row = w.row
    desc = dict(flags=folio.PLAN_GRAPH, q_dtype=folio.dtype(w.q.dtype), kv_dtype=folio.dtype(w.kv_dtype),
                num_qo_heads=row.hq, num_kv_heads=row.hk, head_dim_qk=row.d, head_dim_vo=w.head_dim_vo,
                max_batch_size=row.batch, max_kv_len=row.kv, max_num_tokens=row.batch * row.q, max_qo_len=row.q)
    desc |= dict(kv_storage=folio.KV_RAGGED) if row.ragged else dict(page_size=row.page)
    handle = folio.Attention(context, "prefill", **desc)
    handle.plan(kv_indptr=w.kv_indptr, kv_indices=w.kv_indices, last_page_len=w.last_page_len, qo_indptr=w.qo_indptr)
    return handle


def slopes_of(heads):
    return torch.tensor([2.0 ** (-8 * (h + 1) / heads) for h in range(heads)], device="cuda")


def timed_forms(w):
    """Name, standard deviation of the logits, and the form. Caps above 64 are not the kernel's that has soft caps only."""
    row, (p, j) = w.row, positions(w)
    causal, args = hidden(j <= p), dict(mask_mode=folio.MASK_CAUSAL)
    slopes = slopes_of(row.hq)
    bias = causal + slopes.double()[:, None, None] * (j - p)
    yield "plain", 1, Masked("", causal, **args)
    for cap, spread in (50, 1), (30, 1), (50, 3), (50, 8), (50, 40), (65, 1):
        yield f"cap {cap}, N(0, {spread}²)", spread, Masked("", causal, logits_soft_cap=float(cap), **args)
    window = dict(flags=folio.RUN_WINDOW, window_left=row.kv // 4 - 1, window_right=-1)
    near = hidden((j <= p) & (p - j < row.kv // 4))
    yield "window of a quarter", 1, Masked("", near, **args, **window)
    yield "… and cap 50", 1, Masked("", near, logits_soft_cap=50.0, **args, **window)
    yield "ALiBi", 1, Masked("", bias, alibi_slopes=slopes, **args)
    yield "ALiBi by request", 1, Masked("", bias, alibi_slopes=slopes.repeat(row.batch, 1), **args)
    full = torch.zeros_like(causal)
    yield "full", 1, Masked("", full, mask_mode=folio.MASK_FULL)
    if row.q * row.kv * row.batch <= 1 << 27:
        ones = torch.ones(row.batch, row.q, row.kv, dtype=torch.bool, device="cuda")
        yield "full, bits", 1, Masked("", full, mask_mode=folio.MASK_BITS, custom_mask=packed(ones))


def measure(context, row):
    w = Workload(row)
    handle = handle_of(context, w)
    plain, scale = None, w.sm_scale
    for name, spread, form in timed_forms(w):
        w.sm_scale = scale * spread
        run = handle.run(q=w.q, k=w.k, v=w.v, o=w.o, sm_scale=w.sm_scale, **form.args)
        w.o.fill_(float("nan"))
        run()
        torch.cuda.synchronize()
        wrong, us = error(w, form), captured(run)[0]
        plain = plain or us
        verdict = "" if wrong < TOLERANCE else "  WRONG"
        print(f"  {us:8.1f} us {us / plain:5.2f}  {name:22} {wrong:.1e}{verdict}", flush=True)
        yield {"batch": row.name, "form": name, "kernel": handle.kernel, "error": wrong, "us": us}
    handle.close()


def reference(w, cap, bias):
    """Float64 outputs and log-sum-exps of all rows: [batch, rows, heads, dim], [batch, rows, heads]."""
    row, outputs, sums = w.row, [], []
    for b in range(row.batch):
        k, v = (t.double().repeat_interleave(row.hq // row.hk, 1) for t in w.tokens(b))
        q = w.q.view(row.batch, row.q, row.hq, -1)[b].double()
        s = torch.einsum("qhd,khd->hqk", q, k) * w.sm_scale
        s = (cap * torch.tanh(s / cap) if cap else s) + bias
        lse = s.logsumexp(-1)
        outputs.append(torch.einsum("hqk,khd->qhd", (s - lse[..., None]).exp().nan_to_num(nan=0.0), v))
        sums.append(lse.transpose(0, 1))
    return torch.stack(outputs), torch.stack(sums)


def check(context, row, spread, cap, window, alibi):
    """The worst relative error of a row, and of its log-sum-exp. Pages and rows that no request has are NaN."""
    w = Workload(row)
    w.sm_scale *= spread
    if not row.ragged:
        used = torch.zeros(len(w.k), dtype=torch.bool, device="cuda")
        used[w.block_table.long().flatten()] = True
        for cache in (w.k, w.v):
            cache[~used] = float("nan")
            cache[w.block_table[:, -1].long(), (row.kv - 1) % row.page + 1:] = float("nan")
    p, j = positions(w)
    seen = j <= p
    args = dict(mask_mode=folio.MASK_CAUSAL, logits_soft_cap=cap)
    if window:
        seen = seen & (p - j < window)
        args |= dict(flags=folio.RUN_WINDOW, window_left=window - 1, window_right=-1)
    bias = hidden(seen)
    if alibi:
        args["alibi_slopes"] = slopes_of(row.hq)
        bias = bias + args["alibi_slopes"].double()[:, None, None] * (j - p)
    lse = torch.full((len(w.q), row.hq), float("nan"), device="cuda")
    handle = handle_of(context, w)
    w.o.fill_(float("nan"))
    handle.run(q=w.q, k=w.k, v=w.v, o=w.o, lse=lse, sm_scale=w.sm_scale, **args)()
    torch.cuda.synchronize()
    handle.close()
    want, want_lse = reference(w, cap, bias)
    got, got_lse = w.o.view_as(want).double(), lse.view_as(want_lse).double()
    empty = want_lse == -math.inf
    relative = (got - want).norm(dim=-1) / want.norm(dim=-1)
    relative = torch.where(empty, got.norm(dim=-1), relative)
    apart = torch.where(empty & (got_lse == -math.inf), 0.0, (got_lse - want_lse).abs())
    # Of a log-sum-exp of thousands, fp32 has fewer digits.
    apart = apart / want_lse.abs().clamp(min=64.0) * 64.0
    return [x.nan_to_num(nan=math.inf).max().item() for x in (relative, apart)]


def checks(context):
    wrong = n = 0
    for d, hq in ((64, 8), (128, 8), (256, 4)):
        for cap, spread in ((50.0, 1.0), (64.0, 20.0), (30.0, -3.0), (5.0, 2.0), (50.0, 200.0), (0.0, 1.0)):
            for window in (0, 70):
                n += 1
                q, kv = ((150, 437), (70, 70), (300, 90), (1, 300))[n % 4]
                row = prefill(2, q, kv, hq=hq, hk=[hq // 4, hq][n % 3 == 2], d=d, page=(16, 64)[n % 2], ragged=n % 3 == 0)
                o, lse = check(context, row, spread, cap, window, alibi=cap == 0.0)
                if not (o < 2 * TOLERANCE and lse < LSE_TOLERANCE):
                    wrong += 1
                    print(f"WRONG: {row.name} cap {cap} spread {spread} window {window}: o {o:.1e} lse {lse:.1e}")
    print(f"checks: {n}, wrong: {wrong}", flush=True)


ROWS = [prefill(4, 4096, 4096), prefill(16, 1024, 1024), prefill(4, 4096, 4096, hq=16, d=256),
        prefill(16, 1024, 1024, hq=16, d=256), prefill(4, 4096, 4096, d=64), prefill(16, 1024, 1024, hq=64, d=64),
        prefill(64, 257, 257, hq=12, hk=12, d=64, ragged=True), prefill(128, 50, 50, hq=40, hk=40)]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", help="a file of results, a line each")
    parser.add_argument("--rows", type=int, nargs="*", default=range(len(ROWS)), help="some of the batches")
    args = parser.parse_args()
    context, lines = folio.Context(), []
    checks(context)
    for row in (ROWS[i] for i in args.rows):
        print(row.name, flush=True)
        lines += [json.dumps(result) for result in measure(context, row)]
    if args.json:
        open(args.json, "w").write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
