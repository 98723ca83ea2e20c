"""Masks that do not follow from positions, beside the same batch under a plain one: checks each answer, then times it.

Method as bench.py's: the median of graph replays with a cold L2. A tree's mask has columns for the new keys only.
"""

import argparse
import json
import math

import torch

import folio
from bench import captured
from workloads import E4M3, Workload, prefill

TOLERANCE = 4e-3


class Masked:
    """A run's arguments beside q, k, v, o, and what each (row, key) of a request adds to the logit."""

    def __init__(self, name, bias, **args):
        self.name, self.bias, self.args, self.cap = name, bias, args, args.get("logits_soft_cap")


def positions(w):
    row = w.row
    p = torch.arange(row.q, device="cuda")[:, None] + row.kv - row.q
    return p, torch.arange(row.kv, device="cuda")[None]


def hidden(seen):
    return torch.zeros_like(seen, dtype=torch.float64).masked_fill_(~seen, -math.inf)


def packed(bits):
    """Bits of [batch, elements], each request from a byte on."""
    batch = bits.shape[0]
    bits = torch.nn.functional.pad(bits.reshape(batch, -1), (0, -bits[0].numel() % 8)).view(batch, -1, 8)
    return (bits.int() << torch.arange(8, device=bits.device)).sum(-1).to(torch.uint8).flatten().contiguous()


def forms(w):
    """What is timed for a batch: the plain masks first."""
    row, (p, j) = w.row, positions(w)
    causal = hidden(j <= p)
    yield Masked("causal", causal, mask_mode=folio.MASK_CAUSAL)
    yield Masked("full", torch.zeros_like(causal), mask_mode=folio.MASK_FULL)
    yield Masked("window 1024", hidden((j <= p) & (p - j <= 1023)), mask_mode=folio.MASK_CAUSAL, flags=folio.RUN_WINDOW,
                 window_left=1023, window_right=-1)
    yield Masked("causal, soft cap", causal, mask_mode=folio.MASK_CAUSAL, logits_soft_cap=50.0)
    slopes = torch.tensor([2.0 ** (-8 * (h + 1) / row.hq) for h in range(row.hq)], device="cuda")
    yield Masked("causal, ALiBi", causal + slopes.double()[:, None, None] * (j - p), mask_mode=folio.MASK_CAUSAL,
                 alibi_slopes=slopes)
    marks = torch.ones(row.batch, dtype=torch.uint8, device="cuda")
    yield Masked("causal by request", causal, mask_mode=folio.MASK_CAUSAL_BY_REQUEST, causal_requests=marks)
    ranges = torch.tensor([[[row.kv - row.q + 3, row.kv - row.q + 2 + row.q // 4]]] * row.batch, dtype=torch.int32,
                          device="cuda")
    inside = lambda x: (x >= ranges[0, 0, 0]) & (x <= ranges[0, 0, 1])
    yield Masked("causal, mm-prefix", hidden((j <= p) | (inside(p) & inside(j))), mask_mode=folio.MASK_CAUSAL,
                 mm_prefix_ranges=ranges)
    generator = torch.Generator(device="cuda").manual_seed(5)
    new = torch.rand(row.batch, row.q, row.q, generator=generator, device="cuda") < 0.5
    new |= torch.eye(row.q, dtype=torch.bool, device="cuda")
    new &= torch.ones_like(new).tril()
    before = torch.ones(row.q, row.kv - row.q, dtype=torch.bool, device="cuda")
    size = -(-row.q * row.q // 8)
    starts = torch.arange(row.batch + 1, dtype=torch.int64, device="cuda") * size
    if row.q * row.q * row.batch < 1 << 28:
        yield Masked("tree, bits", lambda b: hidden(torch.cat([before, new[b]], 1)), mask_mode=folio.MASK_BITS,
                     flags=folio.RUN_MASK_NEW_KEYS, custom_mask=packed(new), custom_mask_indptr=starts)
    if row.q * row.kv * row.batch <= 1 << 27:
        seen = torch.rand(row.batch, row.q, row.kv, generator=generator, device="cuda") < 0.9
        yield Masked("random, bits", lambda b: hidden(seen[b]), mask_mode=folio.MASK_BITS, custom_mask=packed(seen))
        yield Masked("random, bytes", lambda b: hidden(seen[b]), mask_mode=folio.MASK_BYTES,
                     custom_mask=seen.to(torch.uint8).flatten().contiguous())


def error(w, form):
    """Worst relative error of sampled rows against float64."""
    row, worst = w.row, 0.0
    rows = sorted({0, row.q // 3, row.q - 1})
    for b in {0, row.batch - 1}:
        bias = form.bias(b) if callable(form.bias) else form.bias
        k, v = (t.double().repeat_interleave(row.hq // row.hk, 1) for t in w.tokens(b))
        q = w.q.view(row.batch, row.q, row.hq, -1)[b, rows].double()
        s = torch.einsum("qhd,khd->hqk", q, k) * w.sm_scale
        if form.cap:
            s = form.cap * torch.tanh(s / form.cap)
        s += bias[..., rows, :]
        want = torch.einsum("hqk,khd->qhd", s.softmax(-1), v)
        got = w.o.view(row.batch, row.q, row.hq, -1)[b, rows].double()
        relative = (got - want).flatten(1).norm(dim=1) / want.flatten(1).norm(dim=1)
        worst = max(worst, relative.nan_to_num(nan=torch.inf).max().item())
    return worst


def measure(context, row):
    w = Workload(row)
    desc = dict(flags=folio.PLAN_GRAPH, q_dtype=folio.dtype(w.q.dtype), kv_dtype=folio.dtype(w.kv_dtype),
                num_qo_heads=row.hq, num_kv_heads=row.hk, head_dim_qk=row.d, head_dim_vo=w.head_dim_vo,
                max_batch_size=row.batch, max_kv_len=row.kv, page_size=row.page, max_num_tokens=row.batch * row.q,
                max_qo_len=row.q)
    handle = folio.Attention(context, "prefill", **desc)
    handle.plan(kv_indptr=w.kv_indptr, kv_indices=w.kv_indices, last_page_len=w.last_page_len, qo_indptr=w.qo_indptr)
    for form in forms(w):
        run = handle.run(q=w.q, k=w.k, v=w.v, o=w.o, sm_scale=w.sm_scale, **form.args)
        w.o.fill_(float("nan"))
        run()
        torch.cuda.synchronize()
        wrong = error(w, form)
        if not wrong < TOLERANCE:
            raise RuntimeError(f"{row.name} {form.name}: error {wrong} against float64")
        yield {"batch": row.name, "mask": form.name, "kernel": handle.kernel, "error": wrong, "us": captured(run)[0]}
    handle.close()


# The later ones are not read by boxes: pages of one token, fp8, and head_dims that are no whole blocks of columns.
ROWS = [prefill(4, 4096, 4096), prefill(64, 64, 4096), prefill(64, 16, 4096), prefill(64, 4, 4096),
        prefill(4, 4096, 4096, hq=16, d=256), prefill(4, 4096, 4096, hq=64, d=64),
        prefill(4, 4096, 4096, page=1), prefill(64, 64, 4096, page=1), prefill(64, 16, 4096, page=1),
        prefill(4, 4096, 4096, hq=16, d=256, page=1), prefill(64, 64, 4096, hq=64, d=64, page=1),
        prefill(4, 4096, 4096, d=96), prefill(64, 64, 4096, d=96), prefill(4, 4096, 4096, hq=16, d=160),
        prefill(4, 4096, 4096, kv_dtype=E4M3), prefill(64, 64, 4096, kv_dtype=E4M3),
        prefill(4, 4096, 4096, hq=16, d=256, kv_dtype=E4M3)]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", help="a file of results, a line each")
    parser.add_argument("--rows", type=int, nargs="*", default=range(len(ROWS)), help="some of the batches")
    args = parser.parse_args()
    context, lines = folio.Context(), []
    for row in (ROWS[i] for i in args.rows):
        print(row.name, flush=True)
        for result in measure(context, row):
            lines.append(json.dumps(result))
            print(f"  {result['us']:8.1f} us  {result['mask']:20} {result['error']:.1e}", flush=True)
    if args.json:
        open(args.json, "w").write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
