"""Prefill with 16-bit queries over fp8 caches, beside the same rows over a 16-bit cache. Checks every answer against float64,
then times it as bench.py does. `tiles`: also where the workspace has no room for widened keys, so that every tile of queries
converts its own.

    FOLIO_LIBRARY=… python3 benches/gpu/fp8_caches.py [tiles] [part of a row's name]
"""

import sys

import torch

import folio
from bench import captured, error
from workloads import MLA, Workload, prefill

BF16, F16, E4M3, E5M2 = torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2
ROWS = [prefill(4, 4096, 4096), prefill(1, 16384, 16384), prefill(16, 1024, 1024), prefill(1, 2048, 32768),
        prefill(8, 512, 8192), prefill(32, 128, 4096), prefill(4, 4096, 4096, page=1), prefill(4, 4096, 4096, hq=64, d=64),
        prefill(4, 4096, 4096, hq=16, d=256), prefill(4, 4096, 4096, **MLA), prefill(4, 4096, 4096, d=96),
        prefill(4, 4096, 4096, d=96, page=1)]
FORMS = [(BF16, BF16), (BF16, E4M3), (F16, E4M3), (BF16, E5M2)]
# More than any room for widened keys is for.
MANY_KEYS = 1 << 20


def attention(context, row, q_dtype, kv_dtype, by_tiles):
    row.kv_dtype = kv_dtype
    w = Workload(row)
    w.q, w.o = w.q.to(q_dtype), w.o.to(q_dtype)
    handle = folio.Attention(context, "prefill", flags=folio.PLAN_GRAPH, q_dtype=folio.dtype(q_dtype),
                             kv_dtype=folio.dtype(kv_dtype), num_qo_heads=row.hq, num_kv_heads=row.hk,
                             head_dim_qk=row.d, head_dim_vo=w.head_dim_vo, max_batch_size=row.batch,
                             max_kv_len=MANY_KEYS if by_tiles else row.kv, page_size=row.page, max_num_tokens=len(w.q),
                             max_num_pages=MANY_KEYS // row.page if by_tiles else 0)
    handle.plan(kv_indptr=w.kv_indptr, kv_indices=w.kv_indices, last_page_len=w.last_page_len, qo_indptr=w.qo_indptr)
    return w, handle, handle.run(q=w.q, k=w.k, v=w.v, o=w.o, sm_scale=w.sm_scale, mask_mode=folio.MASK_CAUSAL)


def measure(context, row, form, by_tiles):
    w, handle, run = attention(context, row, *form, by_tiles)
    w.o.fill_(float("nan"))
    run()
    torch.cuda.synchronize()
    wrong = error(w, w.o)
    assert wrong < 4e-3, (row.name, form, wrong, handle.kernel)
    result = captured(run)[0], wrong, handle.kernel, handle.workspace_bytes >> 20
    handle.close()
    return result


def main(words):
    context, tiles = folio.Context(), "tiles" in words
    wanted = [word for word in words if word != "tiles"]
    for row in ROWS:
        name = row.name
        if not all(word in name for word in wanted):
            continue
        forms = [(form, False) for form in FORMS] + ([((BF16, E4M3), True)] if tiles else [])
        base = None
        for form, by_tiles in forms:
            us, wrong, kernel, mebibytes = measure(context, row, form, by_tiles)
            base = base or us
            short = [str(dtype).split(".")[1] for dtype in form]
            print(f"{name} {short[0]}/{short[1]} {us:.1f} us {base / us:.3f} err {wrong:.4f} {mebibytes}M {kernel[14:]}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
