"""Caches in other forms than rows of plain elements: decode of 64 x 4k and causal prefill of 4 x 4k over each, and the append
and the gather that write and read it. Prefill over a bf16 cache comes first. Every answer is checked: the append and the
gather by what comes back, decode and some rows of prefill in float64 over that.

Method as in bench.py: a call in a CUDA graph, 256 MB written before each replay, the median of 30. Bytes are those of the
rows and of their scales.
"""

import math
import sys

import torch

import folio
from bench import captured

BATCH, KV, HEADS, KV_HEADS, DIM, PAGE = 64, 4096, 32, 8, 128, 16
PAGES = BATCH * KV // PAGE
TOKENS = 8192
PROMPTS = 4
I8, E4M3, I4, E2M1, BF16 = (folio.DType(*code) for code in ((0, 8, 1), (10, 8, 1), (0, 4, 2), (17, 4, 2), (4, 16, 1)))
PLAIN, TOKEN_HEAD, CHANNEL, ZERO_POINTS, NVFP4, PACKED = 0, 1, 2, 3, 4, 5
# Name, form, element, bytes of a row of 128, and what the stored numbers are off by from those that were appended.
FORMS = [
    ("plain, bf16", PLAIN, BF16, 256, 1e-9),
    ("token and head, int8", TOKEN_HEAD, I8, 128, 0.02), ("token and head, e4m3", TOKEN_HEAD, E4M3, 128, 0.04),
    ("channel, int8", CHANNEL, I8, 128, 0.02), ("channel, int4", ZERO_POINTS, I4, 64, 0.2), ("nvfp4", NVFP4, E2M1, 64, 0.15),
    ("packed, bf16", PACKED, BF16, 256, 1e-9),
]


def cuda(*shape, dtype=torch.uint8):
    return torch.zeros(*shape, dtype=dtype, device="cuda")


class Cache:
    """One of keys and values of a form, with what it has beside them."""

    def __init__(self, form, row_bytes, is_key):
        self.rows = cuda(PAGES, PAGE, KV_HEADS, row_bytes)
        if form == PLAIN:
            self.rows = self.rows.view(torch.bfloat16)
        if form == PACKED:
            shape = (PAGES, KV_HEADS, DIM // 8, PAGE, 8) if is_key else (PAGES, KV_HEADS, DIM, PAGE)
            self.rows = cuda(*shape, dtype=torch.bfloat16)
        self.scales = self.zeros = None
        if form == TOKEN_HEAD:
            self.scales = cuda(PAGES, PAGE, KV_HEADS, dtype=torch.float32)
        if form == NVFP4:
            self.scales = cuda(PAGES, PAGE, KV_HEADS, DIM // 16).view(torch.float8_e4m3fn)
        if form in (CHANNEL, ZERO_POINTS):
            most = 127 if form == CHANNEL else 7
            self.scales = (0.8 + 0.4 * torch.rand(KV_HEADS, DIM, device="cuda")) * 4 / most
        if form == ZERO_POINTS:
            self.zeros = torch.rand(KV_HEADS, DIM, device="cuda") - 0.5


def error(want, got):
    want, got = want.double(), got.double()
    return ((got - want).norm() / want.norm()).nan_to_num(nan=torch.inf).item()


def prefill(context, form, element, caches, args, ids, exact):
    """Time, errors and kernel of prompts; `exact(b)` gives the keys and values of one in float32. A kernel over widened rows
    rounds those to q's type first. The first error is over what it multiplies, the second over the exact ones."""
    q = torch.randn(PROMPTS * KV, HEADS, DIM, device="cuda", dtype=torch.bfloat16)
    o = torch.full_like(q, float("nan"))
    handle = folio.Attention(context, "prefill", flags=folio.PLAN_GRAPH, q_dtype=folio.dtype(q.dtype), kv_dtype=element,
                             num_qo_heads=HEADS, num_kv_heads=KV_HEADS, head_dim_qk=DIM, page_size=PAGE,
                             max_batch_size=PROMPTS, max_num_tokens=len(q), max_kv_len=KV, kv_format=form)
    ends = torch.arange(PROMPTS + 1, dtype=torch.int32) * KV
    handle.plan(qo_indptr=ends, kv_len=torch.full((PROMPTS,), KV, dtype=torch.int32), block_table=ids[:PROMPTS])
    run = handle.run(q=q, k=caches[0].rows, v=caches[1].rows, o=o, mask_mode=folio.MASK_CAUSAL, **args)
    run()
    torch.cuda.synchronize()
    assert not o.isnan().any(), "rows without a result"
    def worst(dtype):
        errors = []
        for b in (0, PROMPTS - 1):
            x, y = (rows.to(dtype).double().repeat_interleave(HEADS // KV_HEADS, 1) for rows in exact(b))
            for token in (0, 1, 191, 1500, KV - 1):
                seen = slice(0, token + 1)
                scores = torch.einsum("hd,khd->hk", q[b * KV + token].double(), x[seen]) / math.sqrt(DIM)
                errors.append(error(torch.einsum("hk,khd->hd", scores.softmax(1), y[seen]), o[b * KV + token]))
        return max(errors)

    multiplied = q.dtype if "widened" in handle.kernel else torch.float32
    result = captured(run)[0], worst(multiplied), worst(torch.float32), handle.kernel
    handle.close()
    return result


def measure(context, name, form, element, row_bytes, off):
    torch.manual_seed(0)
    k, v = (Cache(form, row_bytes, is_key) for is_key in (True, False))
    beside = dict(kv_dtype=element, kv_format=form)
    args = dict(k_scales=k.scales, v_scales=v.scales, k_zero_points=k.zeros, v_zero_points=v.zeros)
    ids = torch.randperm(PAGES, dtype=torch.int32, device="cuda").view(BATCH, -1)
    key, value = (torch.randn(BATCH * KV, KV_HEADS, DIM, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    slots = (ids.long()[:, :, None] * PAGE + torch.arange(PAGE, device="cuda")).flatten()
    written = dict(k_cache=k.rows, v_cache=v.rows, **beside, **args)
    context.append(key=key, value=value, slot_mapping=slots, **written)()
    read = [torch.empty_like(key) for _ in range(2)]
    ends = torch.arange(BATCH + 1, dtype=torch.int32, device="cuda") * KV
    gather = context.kv_gather(key=read[0], value=read[1], cu_seq_lens=ends, block_table=ids, **written)
    gather()
    torch.cuda.synchronize()
    stored = max(error(key, read[0]), error(value, read[1]))
    assert stored < off, f"{name}: what was appended comes back with an error of {stored}"
    # What is attended over, exactly: float32 rows of one request.
    exact = [torch.empty(KV, KV_HEADS, DIM, device="cuda") for _ in range(2)]
    q = torch.randn(BATCH, HEADS, DIM, device="cuda", dtype=torch.bfloat16)
    o = torch.full_like(q, float("nan"))
    handle = folio.Attention(context, "decode", flags=folio.PLAN_GRAPH, q_dtype=folio.dtype(q.dtype), kv_dtype=element,
                             num_qo_heads=HEADS, num_kv_heads=KV_HEADS, head_dim_qk=DIM, page_size=PAGE,
                             max_batch_size=BATCH, max_kv_len=KV, kv_format=form)
    handle.plan(kv_len=torch.full((BATCH,), KV, dtype=torch.int32), block_table=ids)
    run = handle.run(q=q, k=k.rows, v=v.rows, o=o, **args)
    run()
    torch.cuda.synchronize()

    def exact_of(b):
        one = torch.tensor([0, KV], dtype=torch.int32, device="cuda")
        context.kv_gather(key=exact[0], value=exact[1], cu_seq_lens=one, block_table=ids[b:b + 1], **written)()
        torch.cuda.synchronize()
        return exact

    worst = 0.0
    for b in (0, BATCH - 1):
        x, y = (rows.double().repeat_interleave(HEADS // KV_HEADS, 1) for rows in exact_of(b))
        scores = torch.einsum("hd,khd->hk", q[b].double(), x) / math.sqrt(DIM)
        worst = max(worst, error(torch.einsum("hk,khd->hd", scores.softmax(1), y), o[b]))
    assert worst < 4e-3, f"{name}: error {worst} against float64"
    held = sum(t.nbytes for c in (k, v) for t in (c.rows, c.scales) if t is not None)
    decode = captured(run)[0]
    some = context.append(key=key[:TOKENS], value=value[:TOKENS], slot_mapping=slots[:TOKENS], **written)
    print(f"{name:22} {held / 1e6:6.0f} MB  decode {decode:7.1f} us {held / decode / 1e6:5.2f} TB/s  error {worst:.1e}  "
          f"append of {TOKENS} {captured(some)[0]:6.1f} us  gather {captured(gather)[0]:7.1f} us  {handle.kernel}", flush=True)
    handle.close()
    us, worst, over_exact, kernel = prefill(context, form, element, (k, v), args, ids, exact_of)
    assert worst < 4e-3, f"{name}: prefill has an error of {worst} against float64"
    print(f"{name:22} prefill of {PROMPTS} x {KV} {us:7.1f} us  error {worst:.1e}, over exact rows {over_exact:.1e}  {kernel}",
          flush=True)


def main():
    context = folio.Context()
    for form in FORMS:
        if len(sys.argv) < 2 or sys.argv[1] in form[0]:
            measure(context, *form)


if __name__ == "__main__":
    main()
