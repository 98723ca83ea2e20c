"""Absorbed MLA on a GPU against FlashMLA, FlashInfer and FlashAttention-3 in the same run: checks every answer, then times
it.

Method as in bench.py: a call in a CUDA graph, 256 MB written before each replay, the median of 30, combining included and
planning not. Rates count 2 · rows · keys · (576 + 512) FLOP, and the bytes of every record once.
FlashMLA is found as the extensions that vLLM ships: FOLIO_FLASHMLA names `_flashmla_C.abi3.so`, FOLIO_FLASHMLA_FP8
`_flashmla_extension_C.abi3.so`, whose kernel for fp8 has weights in e4m3; FOLIO_FA3 as in peers.py.
Writes JSON lines to the file that is the first argument, if there is one.
"""

import dataclasses
import math
import os
import random
import sys

import torch

import folio
import peers
from bench import captured, host_microseconds, limits, write

RANK, ROPE = 512, 64
RECORD_BYTES = {"bf16": 1152, "e4m3": 576, "ds_mla": 656}
# Relative error (Frobenius) of a bf16 answer against float64 over the same records.
TOLERANCE = 4e-3
# The same where weights are in e4m3, of 4 bits.
TOLERANCE_OF_FP8_WEIGHTS = 5e-2


@dataclasses.dataclass
class Row:
    heads: int
    lens: list
    q: int = 1
    page: int = 64
    cache: str = "bf16"
    queries: str = "bf16"
    tokens: list = None  # of each request; `q` is the most. All have `q` where it is not given.

    def __post_init__(self):
        self.tokens = self.tokens or [self.q] * len(self.lens)
        self.q = max(self.tokens)

    @property
    def is_uniform(self):
        return min(self.tokens) == self.q

    @property
    def pairs(self):
        """Of new tokens and keys, without masks."""
        return sum(tokens * keys for tokens, keys in zip(self.tokens, self.lens))

    @property
    def name(self):
        same = len(set(self.lens)) == 1
        kv = self.lens[0] if same else f"{min(self.lens)}..{max(self.lens)}"
        qlen = f"{self.q}" if self.is_uniform else f"{min(self.tokens)}..{self.q} of {sum(self.tokens)}"
        more = (f" qlen={qlen}" if self.q > 1 else "") + (f" page={self.page}" if self.page != 64 else "")
        queries = f" q={self.queries}" if self.queries != "bf16" else ""
        return f"bs={len(self.lens)} kv={kv} heads={self.heads}{more} {self.cache}{queries}"


def equal(heads, batch, kv, **more):
    return Row(heads, [kv] * batch, **more)


def ragged(heads):
    draw = random.Random(3)
    return Row(heads, [int(100 * 327.68 ** draw.random()) for _ in range(64)])


ROWS = [
    equal(128, 128, 4096), equal(128, 32, 4096), equal(128, 64, 4096, q=2), equal(128, 1, 131072), ragged(128),
    equal(16, 16, 4096), equal(16, 64, 4096), equal(16, 128, 4096), equal(16, 128, 16384), equal(16, 1, 8192),
    equal(16, 150, 4096), equal(16, 1, 131072), ragged(16), equal(16, 64, 4096, page=16), equal(16, 64, 4096, page=1),
    equal(8, 128, 4096), equal(32, 64, 4096), equal(32, 128, 4096), equal(64, 64, 4096), equal(64, 128, 4096),
] + [equal(16, batch, kv, cache=cache) for cache in ("e4m3", "ds_mla")
     for batch, kv in ((16, 4096), (64, 4096), (128, 4096), (128, 16384), (1, 8192))] + [
    equal(heads, batch, 4096, cache=cache) for cache in ("e4m3", "ds_mla")
    for heads, batch in ((32, 128), (64, 128), (128, 128), (128, 32))] + [
    equal(128, 64, 4096, q=2, cache="e4m3"), equal(128, 1, 131072, cache="e4m3"),
    equal(128, 128, 4096, page=1), equal(64, 128, 4096, page=1), equal(128, 64, 4096, q=2, page=1),
    equal(64, 64, 4096, q=4, page=1), equal(32, 64, 4096, page=1), equal(128, 32, 4096, page=1),
] + [equal(heads, batch, kv, cache="e4m3", queries="e4m3")
     for heads, batch, kv in ((16, 1, 8192), (16, 64, 4096), (128, 32, 4096), (128, 128, 4096))]


class Workload:
    """Records of a row in shuffled pages, queries, and what they are to Folio."""

    def __init__(self, row):
        torch.manual_seed(0)
        self.row = row
        pages = [-(-kv // row.page) for kv in row.lens]
        total = sum(pages)
        ids = torch.randperm(total, device="cuda", dtype=torch.int32)
        values = torch.randn(total, row.page, RANK + ROPE, device="cuda", dtype=torch.bfloat16)
        self.kv, self.kv_dtype, self.format = values, torch.bfloat16, 0
        if row.cache == "e4m3":
            self.kv, self.kv_dtype = values.to(torch.float8_e4m3fn), torch.float8_e4m3fn
        if row.cache == "ds_mla":
            self.kv, self.kv_dtype, self.format = ds_mla(values), torch.float8_e4m3fn, 1
        self.dense = dequantised(self.kv) if row.cache == "ds_mla" else self.kv
        starts = torch.tensor([0] + pages).cumsum(0)
        self.tables = [ids[starts[b]:starts[b + 1]] for b in range(len(pages))]
        self.block_table = torch.zeros(len(pages), max(pages), device="cuda", dtype=torch.int32)
        for b, table in enumerate(self.tables):
            self.block_table[b, : len(table)] = table
        tokens = sum(row.tokens)
        self.rows = torch.tensor([0, *row.tokens], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        self.q = torch.randn(tokens, row.heads, RANK + ROPE, device="cuda", dtype=torch.bfloat16)
        if row.queries == "e4m3":
            self.q = self.q.to(torch.float8_e4m3fn)
        self.o = torch.empty(tokens, row.heads, RANK, device="cuda", dtype=torch.bfloat16)
        self.kv_len = torch.tensor(row.lens, dtype=torch.int32)
        self.kv_len_device = self.kv_len.cuda()
        self.sm_scale = 1 / math.sqrt(192)

    def error(self, out):
        """Worst relative error of sampled rows against float64."""
        worst = 0.0
        for b in {0, len(self.row.lens) // 2, len(self.row.lens) - 1}:
            keys = self.keys(b)
            for i in {0, self.row.tokens[b] - 1}:
                token, end = int(self.rows[b]) + i, self.row.lens[b] - self.row.tokens[b] + 1 + i
                got = out.view(-1, self.row.heads, RANK)[token]
                worst = max(worst, self.error_of_token(self.q[token], keys[:end], got))
        return worst

    def keys(self, request):
        """Records of a request in float64, in order."""
        return self.dense[self.tables[request].long()].flatten(0, 1)[: self.row.lens[request]].double()

    def error_of_token(self, query, keys, got):
        """Relative error of a token's heads against float64, where it sees these keys."""
        want = (query.double() @ keys.T * self.sm_scale).softmax(1) @ keys[:, :RANK]
        return ((got.double() - want).norm() / want.norm()).nan_to_num(nan=torch.inf).item()


def ds_mla(values):
    """Records of 656 bytes: 512 e4m3, a float32 scale for each 128 of them, 64 bf16."""
    latent = values[..., :RANK].float().unflatten(-1, (4, 128))
    scales = (latent.abs().amax(-1, keepdim=True) / 448).clamp(min=torch.finfo(torch.float32).tiny)
    parts = [(latent / scales).flatten(-2).to(torch.float8_e4m3fn), scales.flatten(-2), values[..., RANK:].contiguous()]
    return torch.cat([part.contiguous().view(torch.uint8) for part in parts], -1)


def dequantised(records):
    latent = records[..., :512].view(torch.float8_e4m3fn).float().unflatten(-1, (4, 128))
    scales = records[..., 512:528].contiguous().view(torch.float32).unsqueeze(-1)
    rope = records[..., 528:].contiguous().view(torch.bfloat16)
    return torch.cat([(latent * scales).flatten(-2), rope.float()], -1)


def folio_handle(context, w, max_qo_len):
    row = w.row
    return folio.Attention(
        context, "mla", flags=folio.PLAN_GRAPH, q_dtype=folio.dtype(w.q.dtype), kv_dtype=folio.dtype(w.kv_dtype),
        o_dtype=folio.dtype(w.o.dtype), cache_format=w.format, num_heads=row.heads, kv_lora_rank=RANK,
        qk_rope_head_dim=ROPE, page_size=row.page, max_batch_size=len(row.lens), max_qo_len=max_qo_len,
        max_kv_len=max(row.lens))


def folio_mla(context, w):
    row, handle = w.row, folio_handle(context, w, w.row.q)
    rows = dict(qo_len=row.q) if row.is_uniform else dict(qo_indptr=w.rows)
    batch = dict(kv_len=w.kv_len, block_table=w.block_table, **rows)
    handle.plan(**batch)
    run = handle.run(q_latent=w.q[..., :RANK], q_rope=w.q[..., RANK:], kv=w.kv, o=w.o, sm_scale=w.sm_scale,
                     mask_mode=folio.MASK_CAUSAL)
    return handle, batch, run


def load_flashmla(variable, library):
    path = os.environ.get(variable)
    if not path or not os.path.exists(path):
        return None
    torch.ops.load_library(path)
    return getattr(torch.ops, library)


FLASHMLA = load_flashmla("FOLIO_FLASHMLA", "_flashmla_C")
FLASHMLA_FP8 = load_flashmla("FOLIO_FLASHMLA_FP8", "_flashmla_extension_C")


def flashmla(w):
    """Pages of 64; the scheduler's metadata are made by the first call."""
    if FLASHMLA is None or w.row.cache != "bf16" or w.row.page != 64 or not w.row.is_uniform:
        return None
    q, kv = w.q.view(len(w.row.lens), w.row.q, w.row.heads, RANK + ROPE), w.kv.unsqueeze(2)

    def call(metadata, splits):
        return FLASHMLA.dense_decode_fwd(q, kv, RANK, w.kv_len_device, w.block_table, w.sm_scale, w.row.q > 1, metadata,
                                         splits, None)

    _, _, metadata, splits = call(None, None)
    return lambda: call(metadata, splits)[0]


def flashmla_fp8(w):
    """Queries and records in e4m3."""
    row = w.row
    if FLASHMLA_FP8 is None or row.queries != "e4m3" or row.page != 64 or not row.is_uniform:
        return None
    q, kv = w.q.view(len(row.lens), row.q, row.heads, RANK + ROPE), w.kv.unsqueeze(2)
    plan = FLASHMLA_FP8.get_mla_decoding_metadata_dense_fp8(w.kv_len_device, row.q * row.heads, 1)
    one = torch.ones(1, device="cuda")
    return lambda: FLASHMLA_FP8.fwd_kvcache_mla_fp8(q, kv, RANK, w.kv_len_device, w.block_table, w.sm_scale, row.q > 1,
                                                    *plan, one, one)[0]


def fa3(w):
    """The rotary part as q and k, the latent one as q_v and v."""
    if peers.FA3 is None or w.row.cache != "bf16":
        return None
    kv = w.kv.unsqueeze(2)
    q, q_v = w.q[..., RANK:], w.q[..., :RANK]
    k, v = kv[..., RANK:], kv[..., :RANK]
    cu = w.rows.cuda()
    longest = max(w.row.lens)
    return lambda: peers.FA3(q, k, v, None, None, q_v, None, cu, None, None, None, w.kv_len_device, w.row.q, longest,
                             w.block_table, None, None, None, None, None, None, None, None, w.sm_scale, True, -1, -1,
                             0.0, True, None, 0, None, 0, None, 1, 0, None)[0]


def flashinfer(w):
    """Its FA3 backend, over both parts of a record as views of it."""
    if peers.FLASHINFER is None or w.row.cache == "ds_mla" or w.row.queries != "bf16":
        return None
    row = w.row
    pages = torch.tensor([0] + [len(table) for table in w.tables], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    wrapper = peers.FLASHINFER.mla.BatchMLAPagedAttentionWrapper(peers.flashinfer_space(), backend="fa3")
    wrapper.plan(w.rows.cuda(), pages.cuda(), torch.cat(w.tables), w.kv_len_device, row.heads, RANK, ROPE, row.page, True,
                 w.sm_scale, torch.bfloat16, w.kv_dtype)
    out = torch.empty_like(w.o)
    tensors = w.q[..., :RANK], w.q[..., RANK:], w.kv[..., :RANK], w.kv[..., RANK:]
    scales = dict(ckv_scale=1.0, kpe_scale=1.0) if row.cache == "e4m3" else {}
    return lambda: wrapper.run(*tensors, out=out, **scales)


PEERS = {"flashmla": flashmla, "flashmla_fp8": flashmla_fp8, "flashinfer": flashinfer, "fa3": fa3}


def measure(context, row):
    w = Workload(row)
    handle, batch, run = folio_mla(context, w)
    w.o.fill_(float("nan"))
    run()
    torch.cuda.synchronize()
    wrong = w.error(w.o)
    if not wrong < TOLERANCE:
        raise RuntimeError(f"{row.name}: error {wrong} against float64 (kernel {handle.kernel})")
    keys = sum(row.lens)
    result = {"kind": "mla", "name": row.name, "kernel": handle.kernel, "error": wrong,
              "kv_bytes": keys * RECORD_BYTES[row.cache], "flops": 2 * row.heads * row.pairs * (2 * RANK + ROPE),
              "plan_us": host_microseconds(lambda: handle.plan(**batch), 50),
              "run_host_us": host_microseconds(run, 50), "us": {"folio": captured(run)[0]}}
    for name, peer in PEERS.items():
        try:
            function = peer(w)
            if function is None:
                continue
            wrong = w.error(function())
            if not wrong < (TOLERANCE_OF_FP8_WEIGHTS if name == "flashmla_fp8" else TOLERANCE):
                raise RuntimeError(f"error {wrong} against float64")
            result["us"][name] = captured(function)[0]
        except Exception as failure:
            print(f"# {name} on {row.name}: {str(failure)[:120]}", file=sys.stderr)
    handle.close()
    return result


def shown(result):
    rates = [f"{result['flops'] / us * 1e-6:6.1f} TFLOP/s {result['kv_bytes'] / us * 1e-6:5.2f} TB/s"
             for us in (result["us"]["folio"],)]
    times = "  ".join(f"{name} {us:7.1f} µs" for name, us in result["us"].items())
    return (f"{result['name']:40s} {times}  {rates[0]}  plan {result['plan_us']:.0f} run {result['run_host_us']:.0f} µs"
            f"  {result['kernel']}")


def main():
    context = folio.Context()
    lines = [{"kind": "limits", **limits()}]
    print(lines[0])
    wanted = sys.argv[2] if len(sys.argv) > 2 else ""
    for row in ROWS:
        if wanted not in row.name:
            continue
        lines.append(measure(context, row))
        print(shown(lines[-1]), flush=True)
        torch.cuda.empty_cache()
    write(lines)


if __name__ == "__main__":
    main()
