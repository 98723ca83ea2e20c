"""Prompts of MLA on a GPU: keys in two parts against whole keys, and chunked context against the chain of vLLM's MLA
backends (gather, cuBLAS up-projection, keys put together, FlashAttention-3, merge) in the same run, answers checked.

Method as in bench.py. FOLIO_FA3 names `_vllm_fa3_C.abi3.so`; without it there is no chain to compare with.
Writes JSON lines to the file that is the first argument, if there is one.
"""

import json

import torch

import folio
import peers
from bench import captured, launched, limits, write

L, P, R, V, PAGE = 512, 128, 64, 128, 64
TOLERANCE = 4e-3
# Of a chunk's workspace: vLLM's own limit.
CHUNK_TOKENS = 65536


def random(*shape):
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def relative(got, want):
    return ((got.double() - want).norm() / want.norm()).item()


def split_keys(context, batch, q_len, heads):
    """Causal prefill at 192 / 128: k as one tensor, and as k_nope and a k_rope that all heads share."""
    tokens = batch * q_len
    q, k_nope, k_rope, v = random(tokens, heads, P + R), random(tokens, heads, P), random(tokens, R), random(tokens, heads, V)
    k = torch.cat([k_nope, k_rope[:, None].expand(-1, heads, -1)], -1)
    indptr = torch.arange(batch + 1, dtype=torch.int32) * q_len
    outs, times = [], {}
    for name, keys in (("whole", dict(k=k)), ("split", dict(k=k_nope, k_rope=k_rope))):
        handle = folio.Attention(
            context, "prefill", flags=folio.PLAN_GRAPH, q_dtype=folio.dtype(q.dtype), num_qo_heads=heads,
            num_kv_heads=heads, head_dim_qk=P + R, head_dim_vo=V, kv_storage=folio.KV_RAGGED, max_batch_size=batch,
            max_num_tokens=tokens, max_kv_len=q_len)
        handle.plan(qo_indptr=indptr, kv_indptr=indptr)
        outs.append(torch.full_like(v, float("nan")))
        run = handle.run(q=q, v=v, o=outs[-1], mask_mode=folio.MASK_CAUSAL, **keys)
        run()
        torch.cuda.synchronize()
        times[name] = captured(run)[0]
        handle.close()
    wrong = relative(outs[1], outs[0].double())
    if not wrong < TOLERANCE:
        raise RuntimeError(f"split keys: {wrong} from whole keys")
    flops = batch * heads * q_len * (q_len + 1) * (P + R + V)
    return {"kind": "split_keys", "name": f"{batch} x {q_len} heads={heads}", "flops": flops, "us": times}


class Context:
    """Requests of some new tokens whose context is in a latent cache, and the weights of a layer. `requests` has (new tokens,
    keys) of each, the new ones included."""

    def __init__(self, requests, heads):
        torch.manual_seed(0)
        self.heads = heads
        self.q_lens, self.kv_lens = zip(*requests)
        self.cached = [kv - q for q, kv in requests]
        pages = [-(-kv // PAGE) for kv in self.kv_lens]
        ids = torch.randperm(sum(pages), device="cuda", dtype=torch.int32).split(pages)
        self.table = torch.zeros(len(requests), max(pages), device="cuda", dtype=torch.int32)
        for row, own in zip(self.table, ids):
            row[: len(own)] = own
        self.kv = random(sum(pages), PAGE, L + R)
        self.kv_b_proj = random(heads * (P + V), L) / L**0.5
        parts = self.kv_b_proj.view(heads, P + V, L)
        self.w_uk, self.w_uv = parts[:, :P].contiguous(), parts[:, P:].transpose(1, 2).contiguous()
        tokens = sum(self.q_lens)
        self.q, self.k_nope, self.k_rope, self.v = (random(tokens, heads, P + R), random(tokens, heads, P),
                                                    random(tokens, R), random(tokens, heads, V))
        self.indptr = torch.tensor([0, *self.q_lens]).cumsum(0).to(torch.int32)
        self.scale = (P + R) ** -0.5
        self.slots = [self.slots_of(own, cached) for own, cached in zip(ids, self.cached)]

    def slots_of(self, pages, tokens):
        at = torch.arange(tokens, device="cuda")
        return pages[at // PAGE].long() * PAGE + at % PAGE

    def folio(self, context, flags):
        handle = folio.Attention(
            context, "mla_context", flags=flags, dtype=folio.dtype(torch.bfloat16), num_heads=self.heads,
            kv_lora_rank=L, qk_nope_head_dim=P, qk_rope_head_dim=R, v_head_dim=V, page_size=PAGE,
            max_batch_size=len(self.q_lens), max_num_tokens=sum(self.q_lens), max_qo_len=max(self.q_lens),
            max_kv_len=max(self.kv_lens), max_chunk_tokens=CHUNK_TOKENS)
        handle.plan(qo_indptr=self.indptr, kv_len=torch.tensor(self.kv_lens, dtype=torch.int32), block_table=self.table)
        o = torch.full_like(self.v, float("nan"))
        return handle, o, handle.run(q=self.q, k_nope=self.k_nope, k_rope=self.k_rope, v=self.v, kv=self.kv,
                                     w_uk=self.w_uk, w_uv=self.w_uv, o=o, sm_scale=self.scale)

    def chain(self, context):
        """What vLLM launches for one chunk. Its merge is Folio's; its gather is torch's."""
        if sum(self.cached) > CHUNK_TOKENS:
            raise ValueError(f"{sum(self.cached)} tokens are more than a chunk")
        heads, cu_q, slots = self.heads, self.indptr.cuda(), torch.cat(self.slots)
        cu_k = torch.tensor([0, *self.cached]).cumsum(0).to(torch.int32).cuda()
        k_new = torch.cat([self.k_nope, self.k_rope[:, None].expand(-1, heads, -1)], -1)
        records = self.kv.view(-1, L + R)
        k = torch.empty(len(slots), heads, P + R, device="cuda", dtype=torch.bfloat16)
        o, outs, longest = torch.empty_like(self.v), {}, max(self.q_lens)

        def attend(keys, values, cu, most, causal):
            return peers.FA3(self.q, keys, values, None, None, None, None, cu_q, cu, None, None, None, longest,
                             most, None, None, None, None, None, None, None, None, None, self.scale, causal, -1, -1,
                             0.0, True, None, 0, None, 0, None, 1, 0, None)[:2]

        def run():
            outs["new"] = attend(k_new, self.v, cu_q, longest, True)
            chunk = records[slots]
            kv = (chunk[:, :L] @ self.kv_b_proj.T).view(-1, heads, P + V)
            k[..., :P] = kv[..., :P]
            k[..., P:] = chunk[:, None, L:]
            outs["context"] = attend(k, kv[..., P:], cu_k, max(self.cached), False)
            (a, s_a), (b, s_b) = outs["context"], outs["new"]
            context.merge(v_a=a, s_a=s_a.T, v_b=b, s_b=s_b.T, v_out=o)()

        return o, run

    def reference(self, token, head):
        b = int(torch.searchsorted(self.indptr, token, right=True)) - 1
        first = int(self.indptr[b])
        records = self.kv.view(-1, L + R)[self.slots[b]].double()
        new = slice(first, token + 1)
        keys = torch.cat([torch.cat([records[:, :L] @ self.w_uk[head].double().T, records[:, L:]], 1),
                          torch.cat([self.k_nope[new, head], self.k_rope[new]], 1).double()])
        values = torch.cat([records[:, :L] @ self.w_uv[head].double(), self.v[new, head].double()])
        return (keys @ self.q[token, head].double() * self.scale).softmax(0) @ values

    def error(self, o):
        tokens = sum(self.q_lens)
        places = [(0, 0), (tokens // 2, self.heads // 2), (tokens - 1, self.heads - 1)]
        return max(relative(o[t, h], self.reference(t, h)) for t, h in places)


def chunked(context, name, requests, heads, eager=False):
    """`eager`: Folio's run is launched, by a handle that is not for graphs. The chain is captured always."""
    case = Context(requests, heads)
    handle, o, run = case.folio(context, 0 if eager else folio.PLAN_GRAPH)
    run()
    torch.cuda.synchronize()
    wrong = case.error(o)
    # Up-projected keys and values are rounded to bf16 before they are multiplied, by both.
    if not wrong < 3 * TOLERANCE:
        raise RuntimeError(f"chunked context: error {wrong} against float64")
    result = {"kind": "mla_context", "name": f"{name} heads={heads}", "kernel": handle.kernel, "error": wrong,
              "us": {"folio": launched(run) if eager else captured(run)[0]}}
    if peers.FA3 is not None:
        o, run = case.chain(context)
        run()
        torch.cuda.synchronize()
        result["chain_error"] = case.error(o)
        result["us"]["chain"] = captured(run)[0]
    handle.close()
    return result


def equal(context, batch, q_len, kv_len, heads):
    return chunked(context, f"{batch} x {q_len} on {kv_len}", [(q_len, kv_len)] * batch, heads)


def main():
    context = folio.Context()
    lines = [{"kind": "limits", **limits()}]
    print(lines[0])
    work = [lambda a=a: split_keys(context, *a) for a in ((4, 4096, 16), (1, 16384, 16), (16, 1024, 16))]
    work += [lambda a=a: equal(context, *a) for a in ((1, 2048, 32768, 16), (8, 512, 8192, 16), (1, 2048, 32768, 128),
                                                      (8, 512, 8192, 128))]
    for row in work:
        try:
            lines.append(row())
            print(json.dumps(lines[-1]), flush=True)
        except Exception as failure:
            print(f"# {str(failure)[:300]}", flush=True)
        torch.cuda.empty_cache()
    write(lines)


if __name__ == "__main__":
    main()
