"""Decode of requests that share prefixes: a cascade against flat decode, and against FlashAttention-3 flat and as vLLM's
cascade (prefix pass, suffix pass, merge), in the same run. Checks every answer, then times it.

Method as in bench.py: a call in a CUDA graph, 256 MB written before each replay, the median of 30. `floor` is what the
bytes take that have to be read at the copy rate, or the FLOP at the rate of a matrix product, whichever is more, level by
level. Writes JSON lines to the file that is the first argument, if there is one.
"""

import dataclasses
import math
import sys

import torch

import folio
import peers
from bench import captured, host_microseconds, limits, write

HEADS, KV_HEADS, DIM, PAGE = 32, 8, 128, 16
TOLERANCE = 4e-3
KEY_BYTES = KV_HEADS * DIM * 2 * 2


@dataclasses.dataclass
class Row:
    """Prefixes are (first request, end, keys), the wider ones first; every request has `own` keys beyond its prefixes."""

    name: str
    requests: int
    prefixes: list
    own: int

    def shared(self, b):
        return max([keys for begin, end, keys in self.prefixes if begin <= b < end], default=0)

    def lens(self):
        return [self.shared(b) + self.own for b in range(self.requests)]


def common(requests, prefix, own):
    return Row(f"{requests} x ({prefix} shared + {own})", requests, [(0, requests, prefix)], own)


def documents(requests, system, count, document, own):
    each = requests // count
    inner = [(i * each, (i + 1) * each, system + document) for i in range(count)]
    return Row(f"{requests} x ({system} + {count} x {document} + {own})", requests, [(0, requests, system)] + inner, own)


ROWS = [
    common(64, 8192, 256), common(256, 8192, 256), common(256, 32768, 256), common(16, 2048, 128),
    documents(128, 32768, 8, 4096, 256), common(8, 1024, 128), common(64, 256, 256), common(64, 64, 2048),
    common(4, 32768, 256), common(2, 8192, 128), common(32, 2048, 2048),
]


class Workload:
    """A cache, a page table with the shared pages in every row, and queries."""

    def __init__(self, row):
        torch.manual_seed(0)
        self.row = row
        lens = row.lens()
        tables, taken = [[] for _ in lens], 0
        for begin, end, keys in row.prefixes:
            new = keys // PAGE - len(tables[begin])
            for table in tables[begin:end]:
                table.extend(range(taken, taken + new))
            taken += new
        for table, keys in zip(tables, lens):
            new = -(-keys // PAGE) - len(table)
            table.extend(range(taken, taken + new))
            taken += new
        ids = torch.randperm(taken, dtype=torch.int32)
        table = torch.zeros(len(lens), max(map(len, tables)), dtype=torch.int64)
        for b, pages in enumerate(tables):
            table[b, : len(pages)] = torch.tensor(pages)
        self.block_table = ids[table].cuda()
        shape = (taken, PAGE, KV_HEADS, DIM)
        self.k, self.v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        self.q = torch.randn(row.requests, HEADS, DIM, device="cuda", dtype=torch.bfloat16)
        self.o = torch.empty_like(self.q)
        self.lens, self.kv_len = lens, torch.tensor(lens, dtype=torch.int32)
        self.kv_len_device = self.kv_len.cuda()
        self.qo_indptr = torch.arange(row.requests + 1, dtype=torch.int32)
        self.qo_indptr_device = self.qo_indptr.cuda()

    def error(self, out):
        """Worst relative error of sampled rows against float64."""
        worst = 0.0
        for b in {0, self.row.requests // 2, self.row.requests - 1}:
            pages = self.block_table[b, : -(-self.lens[b] // PAGE)].long()
            k, v = (cache[pages].flatten(0, 1)[: self.lens[b]].double().repeat_interleave(HEADS // KV_HEADS, 1)
                    for cache in (self.k, self.v))
            scores = torch.einsum("hd,khd->hk", self.q[b].double(), k) / math.sqrt(DIM)
            want = torch.einsum("hk,khd->hd", scores.softmax(1), v)
            relative = (out[b].double() - want).norm() / want.norm()
            worst = max(worst, relative.nan_to_num(nan=torch.inf).item())
        return worst


def desc(w):
    return dict(flags=folio.PLAN_GRAPH, q_dtype=folio.dtype(torch.bfloat16), num_qo_heads=HEADS, num_kv_heads=KV_HEADS,
                head_dim_qk=DIM, page_size=PAGE, max_batch_size=w.row.requests, max_qo_len=1, max_kv_len=max(w.lens))


def cascade(context, w):
    handle = folio.Cascade(context, max_num_tokens=w.row.requests, max_shared_levels=2, **desc(w))
    batch = dict(qo_indptr=w.qo_indptr, kv_len=w.kv_len, block_table=w.block_table)
    handle.plan(w.row.prefixes, **batch)
    run = handle.run(q=w.q, k=w.k, v=w.v, o=w.o)
    return handle, lambda: handle.plan(w.row.prefixes, **batch), run


def flat(context, w):
    handle = folio.Attention(context, "decode", **desc(w))
    handle.plan(kv_len=w.kv_len, block_table=w.block_table)
    return handle, handle.run(q=w.q, k=w.k, v=w.v, o=w.o)


def fa3(w, q_rows, kv_len, table, longest, causal, out):
    cu = torch.arange(len(kv_len) + 1, device="cuda", dtype=torch.int32) * q_rows
    return lambda: peers.FA3(w.q, w.k, w.v, None, None, None, out, cu, None, None, None, kv_len, q_rows, longest, table,
                             None, None, None, None, None, None, None, None, 1 / math.sqrt(DIM), causal, -1, -1, 0.0,
                             True, None, 0, None, 0, None, 1, 0, None)


def fa3_flat(_context, w):
    run = fa3(w, 1, w.kv_len_device, w.block_table, max(w.lens), True, torch.empty_like(w.q))
    return lambda: run()[0]


def fa3_cascade(context, w):
    """Two levels only, as vLLM has it."""
    if len(w.row.prefixes) > 1:
        return None
    keys = w.row.prefixes[0][2]
    prefix_o, own_o = torch.empty_like(w.q), torch.empty_like(w.q)
    prefix_len = torch.tensor([keys], device="cuda", dtype=torch.int32)
    prefix = fa3(w, w.row.requests, prefix_len, w.block_table[:1], keys, False, prefix_o)
    own = fa3(w, 1, w.kv_len_device - keys, w.block_table[:, keys // PAGE:].contiguous(), w.row.own, True, own_o)
    out = torch.empty_like(w.q)

    def run():
        a, b = prefix(), own()
        lse = [part[1].view(HEADS, -1).T for part in (a, b)]
        context.merge(v_a=a[0], s_a=lse[0], v_b=b[0], s_b=lse[1], v_out=out)()
        return out

    return run


def floor(w, rates):
    """Microseconds that the bytes or the products of every level take at least."""
    levels = []
    for begin, end, keys in w.row.prefixes:
        around = max([k for b, e, k in w.row.prefixes if b <= begin and end <= e and k < keys], default=0)
        levels.append((end - begin, keys - around))
    levels += [(1, w.row.own)] * w.row.requests
    read = sum(keys for _, keys in levels) * KEY_BYTES / (rates["copy_bytes_per_s"] / 1e6)
    products = sum(rows * keys for rows, keys in levels) * 4 * HEADS * DIM / (rates["bf16_flops"] / 1e6)
    return max(read, products)


def measure(context, row, rates):
    w = Workload(row)
    handle, plan, run = cascade(context, w)
    result = {"kind": "cascade", "name": row.name, "kernel": handle.kernel, "shares": handle.shares,
              "floor_us": floor(w, rates), "plan_us": host_microseconds(plan, 50), "us": {}}
    flat_handle, flat_run = flat(context, w)

    def folio_run(function):
        return lambda: (function(), w.o)[1]

    entries = [("cascade", folio_run(run)), ("flat", folio_run(flat_run))]
    if peers.FA3 is not None:
        entries += [("fa3", fa3_flat(context, w)), ("fa3_cascade", fa3_cascade(context, w))]
    for name, function in entries:
        if function is None:
            continue
        w.o.fill_(float("nan"))
        wrong = w.error(function())
        if not wrong < TOLERANCE:
            message = f"{row.name}: {name}: error {wrong} against float64"
            if name in ("cascade", "flat"):
                raise RuntimeError(message)
            print(f"# {message}", file=sys.stderr)
            continue
        result["us"][name] = captured(function)[0]
    handle.close()
    flat_handle.close()
    return result


def main():
    context = folio.Context()
    rates = limits()
    lines = [{"kind": "limits", **rates}]
    print(lines[0])
    for row in ROWS:
        lines.append(measure(context, row, rates))
        result = lines[-1]
        times = "  ".join(f"{name} {us:7.1f}" for name, us in result["us"].items())
        print(f"{result['name']:36s} {times} µs  floor {result['floor_us']:6.1f}  shares {result['shares']}  "
              f"plan {result['plan_us']:.0f} µs  {result['kernel']}", flush=True)
        torch.cuda.empty_cache()
    write(lines)


if __name__ == "__main__":
    main()
