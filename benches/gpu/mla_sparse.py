"""Absorbed MLA over lists of tokens (DeepSeek-V3.2's sparse attention) on a GPU, against FlashMLA's sparse kernels in the
same run: checks every answer, then times it.

Every query token is a request, whose row of the block table lists the slots of the records it sees: pages of one token.
Lists are drawn at random from a context, as an indexer chooses them. FlashMLA takes prompts over 16-bit records and decodes
over those of 656 bytes; it has 64 and 128 heads. Method and peers as in mla.py. Writes JSON lines to the file that is the
first argument, if there is one.
"""

import dataclasses
import sys

import torch

import folio
from bench import captured, host_microseconds, limits, write
from mla import FLASHMLA, RANK, RECORD_BYTES, ROPE, TOLERANCE, dequantised, ds_mla

SM_SCALE = 0.07
# FlashMLA rounds scaled latent values and weights on the way.
PEERS_TOLERANCE = 8e-3


@dataclasses.dataclass
class Row:
    heads: int
    tokens: int
    contexts: int  # the tokens are dealt to so many, each with records of its own
    context: int  # tokens of each
    cache: str
    listed: int = 2048

    @property
    def name(self):
        return (f"{self.tokens} tokens, {self.listed} of {self.context} in {self.contexts}, heads={self.heads}"
                f" {self.cache}")


ROWS = [
    Row(128, 4096, 1, 32768, "bf16"), Row(64, 4096, 1, 32768, "bf16"), Row(16, 4096, 1, 32768, "bf16"),
    Row(128, 512, 1, 65536, "bf16"), Row(128, 128, 128, 8192, "bf16"), Row(64, 128, 128, 8192, "bf16"),
    Row(16, 128, 128, 8192, "bf16"),
    Row(128, 128, 128, 8192, "ds_mla"), Row(64, 128, 128, 8192, "ds_mla"), Row(16, 128, 128, 8192, "ds_mla"),
    Row(128, 256, 128, 8192, "ds_mla"), Row(128, 32, 32, 8192, "ds_mla"), Row(128, 4, 4, 65536, "ds_mla"),
    Row(128, 4096, 1, 32768, "ds_mla"),
]


class Workload:
    def __init__(self, row):
        torch.manual_seed(0)
        self.row = row
        values = torch.randn(row.contexts * row.context, 1, RANK + ROPE, device="cuda", dtype=torch.bfloat16)
        self.kv = ds_mla(values) if row.cache == "ds_mla" else values
        self.dense = (dequantised(self.kv) if row.cache == "ds_mla" else values).flatten(0, 1)
        lists = [torch.randperm(row.context, device="cuda")[: row.listed] + t % row.contexts * row.context
                 for t in range(row.tokens)]
        self.lists = torch.stack(lists).int()
        self.q = torch.randn(row.tokens, row.heads, RANK + ROPE, device="cuda", dtype=torch.bfloat16)
        self.o = torch.full((row.tokens, row.heads, RANK), float("nan"), device="cuda", dtype=torch.bfloat16)

    def error(self, out):
        """Worst relative error of sampled tokens against float64."""
        worst = 0.0
        for t in {0, self.row.tokens // 2, self.row.tokens - 1}:
            keys = self.dense[self.lists[t].long()].double()
            want = (self.q[t].double() @ keys.T * SM_SCALE).softmax(1) @ keys[:, :RANK]
            got = out.view(self.row.tokens, self.row.heads, RANK)[t].double()
            worst = max(worst, ((got - want).norm() / want.norm()).nan_to_num(nan=torch.inf).item())
        return worst


def folio_lists(context, w):
    row = w.row
    kv_dtype = torch.bfloat16 if row.cache == "bf16" else torch.float8_e4m3fn
    handle = folio.Attention(
        context, "mla", flags=folio.PLAN_GRAPH, q_dtype=folio.dtype(torch.bfloat16), kv_dtype=folio.dtype(kv_dtype),
        cache_format=int(row.cache == "ds_mla"), num_heads=row.heads, kv_lora_rank=RANK, qk_rope_head_dim=ROPE,
        page_size=1, max_batch_size=row.tokens, max_qo_len=1, max_kv_len=row.listed)
    lens = torch.full((row.tokens,), row.listed, dtype=torch.int32)
    batch = dict(kv_len=lens, block_table=w.lists, qo_len=1)
    handle.plan(**batch)
    run = handle.run(q_latent=w.q[..., :RANK], q_rope=w.q[..., RANK:], kv=w.kv, o=w.o, sm_scale=SM_SCALE)
    return handle, batch, run


def flashmla(w):
    if FLASHMLA is None or w.row.heads < 64:
        return None
    row, lists = w.row, w.lists.unsqueeze(1)
    if row.cache == "bf16":
        return lambda: FLASHMLA.sparse_prefill_fwd(w.q, w.kv, lists, SM_SCALE, RANK, None, None, None)[0]
    q, kv = w.q.unsqueeze(1), w.kv.view(-1, 64, 1, RECORD_BYTES["ds_mla"])

    def call(metadata, splits):
        return FLASHMLA.sparse_decode_fwd(q, kv, lists, None, None, metadata, splits, None, None, None, RANK, SM_SCALE,
                                          None)

    _, _, metadata, splits = call(None, None)
    return lambda: call(metadata, splits)[0]


def measure(context, row):
    w = Workload(row)
    handle, batch, run = folio_lists(context, w)
    run()
    torch.cuda.synchronize()
    wrong = w.error(w.o)
    if not wrong < TOLERANCE:
        raise RuntimeError(f"{row.name}: error {wrong} against float64 (kernel {handle.kernel})")
    keys = row.tokens * row.listed
    result = {"kind": "mla_sparse", "name": row.name, "kernel": handle.kernel, "error": wrong,
              "flops": 2 * row.heads * keys * (2 * RANK + ROPE), "kv_bytes": keys * RECORD_BYTES[row.cache],
              "plan_us": host_microseconds(lambda: handle.plan(**batch), 20), "us": {"folio": captured(run)[0]}}
    try:
        peer = flashmla(w)
        if peer:
            wrong = w.error(peer())
            if not wrong < PEERS_TOLERANCE:
                raise RuntimeError(f"error {wrong} against float64")
            result["us"]["flashmla"] = captured(peer)[0]
    except Exception as failure:
        print(f"# FlashMLA on {row.name}: {str(failure)[:120]}", file=sys.stderr)
    handle.close()
    return result


def main():
    context = folio.Context()
    lines = [{"kind": "limits", **limits()}]
    print(lines[0])
    for row in ROWS:
        lines.append(result := measure(context, row))
        times = "  ".join(f"{name} {us:7.1f} µs" for name, us in result["us"].items())
        print(f"{row.name:58s} {times}  {result['flops'] / result['us']['folio'] * 1e-6:5.0f} TFLOP/s"
              f"  plan {result['plan_us']:.0f} µs  {result['kernel']}", flush=True)
        torch.cuda.empty_cache()
    write(lines)


if __name__ == "__main__":
    main()
