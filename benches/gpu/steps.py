"""What a step needs beside attention: norm, RoPE and append of new tokens, indices of a batch, masks of draft trees, and
merges of any number of states. Checks every answer, then times it.

Method as in bench.py: a call in a CUDA graph, 256 MB written before each replay, the median of 30. An empty kernel takes
about 2.5 us so. Writes JSON lines to the file that is the first argument, if there is one.
"""

import json
import sys

import torch

import folio
from bench import captured, error, folio_attention, limits
from workloads import Workload, decode

HEADS, KV_HEADS, DIM, PAGE = 32, 8, 128, 16

# What `rope_append` is asked for, by the name of the row.
STEPS = {
    "append": {"rotated_keys": False},
    "RoPE of keys + append": {"queries": False},
    "RoPE + append": {},
    "norm + RoPE + append": {"normed": True},
}


def int32(values):
    return torch.tensor(values, dtype=torch.int32, device="cuda")


def rotated(x, cos, sin):
    a, b = x.float().chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def rope_append(context, tokens, cache_dtype, normed=False, queries=True, rotated_keys=True):
    """Queries and keys out of a fused QKV tensor, neox style, from a table of cosines; keys alone; or the append alone."""
    qkv = torch.randn(tokens, HEADS + 2 * KV_HEADS, DIM, device="cuda", dtype=torch.bfloat16)
    q, key, value = qkv.split([HEADS, KV_HEADS, KV_HEADS], dim=1)
    pages = 2 * tokens // PAGE + 1
    k_cache, v_cache = (torch.zeros(pages, PAGE, KV_HEADS, DIM, device="cuda").to(cache_dtype) for _ in range(2))
    slots = torch.randperm(pages * PAGE, device="cuda")[:tokens]
    common = {"key": key, "value": value, "k_cache": k_cache, "v_cache": v_cache, "slot_mapping": slots}
    width = k_cache.element_size()
    if not rotated_keys:
        run = context.append(**common)
        run()
        want = key.float()
        moved = tokens * 2 * KV_HEADS * DIM * (2 + width)
    else:
        angles = torch.outer(torch.arange(8192, device="cuda"), 10000.0 ** (-torch.arange(0, DIM, 2, device="cuda") / DIM))
        table = torch.cat([angles.cos(), angles.sin()], dim=-1).float()
        positions = torch.arange(tokens, device="cuda") % 8192
        q_out, fields = torch.empty_like(q, memory_format=torch.contiguous_format), {}
        source = {"q": q.float(), "k": key.float()}
        if queries:
            fields = {"q": q, "q_out": q_out}
        if normed:
            weight = torch.rand(DIM, device="cuda", dtype=torch.bfloat16) + 0.5
            fields |= {"q_norm_weight": weight, "k_norm_weight": weight, "rms_norm_eps": 1e-6}
            for name, x in source.items():
                source[name] = x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight.float()
        run = context.operator("rope_append", positions=positions, cos_sin_cache=table, **common, **fields)
        run()
        cos, sin = table[positions].chunk(2, dim=-1)
        if queries:
            torch.testing.assert_close(q_out.float(), rotated(source["q"], cos, sin), rtol=1e-2, atol=1e-2)
        want = rotated(source["k"], cos, sin)
        moved = tokens * DIM * (4 * HEADS * queries + 2 * KV_HEADS * (2 + width)) + tokens * DIM * 4
    tolerance = 0.07 if width == 1 else 1e-2
    got = k_cache.reshape(-1, KV_HEADS, DIM).float()[slots]
    torch.testing.assert_close(got, want, rtol=tolerance, atol=1e-2)
    return captured(run)[0], moved


def attended(context, requests, keys):
    """RoPE and append of each request's last token, then decode over its keys: the attention alone, both by two calls, and by
    one, in a graph.
    """
    w = Workload(decode(requests, keys))
    qkv = torch.randn(requests, HEADS + 2 * KV_HEADS, DIM, device="cuda", dtype=torch.bfloat16)
    q, key, value = qkv.split([HEADS, KV_HEADS, KV_HEADS], dim=1)
    angles = torch.outer(torch.arange(8192, device="cuda"), 10000.0 ** (-torch.arange(0, DIM, 2, device="cuda") / DIM))
    last = torch.full((requests,), keys - 1, device="cuda")
    slots = w.block_table[:, (keys - 1) // PAGE].long() * PAGE + (keys - 1) % PAGE
    handle, _, attend = folio_attention(context, w)
    new_tokens = dict(q=q, q_out=w.q, key=key, value=value, k_cache=w.k, v_cache=w.v, positions=last, slot_mapping=slots,
                      cos_sin_cache=torch.cat([angles.cos(), angles.sin()], dim=-1).float())
    append = context.operator("rope_append", **new_tokens)
    one_call = handle.append_run(new_tokens, q=w.q, k=w.k, v=w.v, o=w.o, sm_scale=w.sm_scale)

    def both():
        append()
        attend()

    for call in (both, one_call):
        w.o.fill_(float("nan"))
        w.q.fill_(float("nan"))
        w.v.flatten(0, 1)[slots] = float("nan")
        w.k.flatten(0, 1)[slots] = float("nan")
        call()
        torch.cuda.synchronize()
        torch.testing.assert_close(w.v.flatten(0, 1)[slots], value)
        assert error(w, w.o) < 4e-3
    times = captured(attend)[0], captured(both)[0], captured(one_call)[0]
    handle.close()
    return times


def indices(context, requests, longest):
    """All lists of a decode step."""
    lengths = torch.randint(1, longest, (requests,), dtype=torch.int32, device="cuda")
    columns = longest // PAGE + 1
    table = torch.randint(0, 1 << 20, (requests, columns), dtype=torch.int32, device="cuda")
    counts = (lengths + PAGE - 1) // PAGE
    wanted_indptr = torch.cat([int32([0]), counts.cumsum(0).to(torch.int32)])
    wanted = torch.cat([table[b, :n] for b, n in enumerate(counts.tolist())])
    indptr, last = torch.empty_like(wanted_indptr), torch.empty_like(lengths)
    ids, back = torch.empty_like(wanted), torch.full_like(table, -1)
    one = torch.ones_like(lengths)
    slots, positions = (torch.empty(requests, dtype=torch.int64, device="cuda") for _ in range(2))
    qo_indptr, kv_len = torch.empty_like(wanted_indptr), torch.empty_like(lengths)
    token_ids = torch.empty(int(lengths.sum()), dtype=torch.int32, device="cuda")
    token_indptr = torch.empty_like(wanted_indptr)
    runs = {
        "batch_lengths": context.operator("batch_lengths", qo_len=one, cached_len=lengths - 1, qo_indptr=qo_indptr, kv_len=kv_len),
        "kv_indices, pages": context.operator("kv_indices", block_table=table, kv_len=lengths, kv_indptr=indptr, kv_indices=ids,
                                              last_page_len=last, page_size=PAGE),
        "kv_indices, slots": context.operator("kv_indices", block_table=table, kv_len=lengths, kv_indptr=token_indptr,
                                              kv_indices=token_ids, page_size=PAGE, indices_page_size=1),
        "block_table": context.operator("block_table", kv_indptr=indptr, kv_indices=ids, block_table=back, fill=-1),
        "slot_mapping": context.operator("slot_mapping", block_table=table, qo_len=one, kv_len=lengths, slot_mapping=slots,
                                         positions=positions, page_size=PAGE),
    }
    for run in runs.values():
        run()
    page = table.gather(1, ((lengths - 1) // PAGE).long()[:, None])[:, 0].long()
    assert torch.equal(kv_len, lengths) and torch.equal(indptr, wanted_indptr) and torch.equal(ids, wanted)
    assert torch.equal(slots, page * PAGE + (lengths - 1) % PAGE) and torch.equal(positions, lengths.long() - 1)
    assert all(torch.equal(back[b, :n], table[b, :n]) for b, n in enumerate(counts.tolist()))
    assert torch.equal(token_ids[:PAGE] if lengths[0] >= PAGE else token_ids[:1], table[0, 0] * PAGE + torch.arange(
        PAGE if lengths[0] >= PAGE else 1, dtype=torch.int32, device="cuda"))
    return {f"{name}, {requests} requests up to {longest}": captured(run)[0] for name, run in runs.items()}


def drafts(context, requests, topk, steps, longest=4096):
    """SGLang's lists of a multi-step draft, step-major."""
    lengths = torch.randint(1, longest, (requests,), dtype=torch.int32, device="cuda")
    table = torch.randint(0, 1 << 20, (requests, longest + topk * steps), dtype=torch.int32, device="cuda")
    capacity = int(lengths.sum()) * topk + requests * topk * steps
    indptr = torch.empty(steps, requests * topk + 1, dtype=torch.int32, device="cuda")
    ids = torch.empty(steps, capacity, dtype=torch.int32, device="cuda")
    run = context.operator("draft_kv_indices", req_to_token=table, kv_len=lengths, kv_indptr=indptr, kv_indices=ids, topk=topk,
                           num_steps=steps)
    run()
    n = int(lengths[0])
    for step in range(steps):
        assert torch.equal(ids[step, :n], table[0, :n])
        assert torch.equal(ids[step, n:n + step + 1], table[0, n:n + (step + 1) * topk:topk])
    return captured(run)[0]


def trees(context, requests, drafts, prefix):
    parents = torch.stack([torch.tensor([(i - 1) // 2 if i else -1 for i in range(drafts)])] * requests).to(torch.int32).cuda()
    prefixes = torch.full((requests,), prefix, dtype=torch.int32, device="cuda")
    bits = torch.empty(requests * (drafts * (prefix + drafts) // 8 + 1), dtype=torch.uint8, device="cuda")
    small, positions = torch.empty(requests, drafts, drafts, dtype=torch.uint8, device="cuda"), torch.empty_like(parents)
    whole = context.operator("tree_mask", parents=parents, prefix_lens=prefixes, mask_bits=bits, positions=positions)
    new_only = context.operator("tree_mask", parents=parents, prefix_lens=prefixes, tree_mask=small, positions=positions)
    whole()
    new_only()
    last, ancestors = drafts - 1, {drafts - 1}
    while last > 0:
        last = (last - 1) // 2
        ancestors.add(last)
    assert set(small[0, -1].nonzero()[:, 0].tolist()) == ancestors
    assert positions[0, -1] == prefix + len(ancestors) - 1
    return captured(whole)[0], captured(new_only)[0]


def merges(context, tokens, states):
    v = torch.randn(tokens * states, HEADS, DIM, device="cuda", dtype=torch.bfloat16)
    s = torch.randn(tokens * states, HEADS, device="cuda")
    indptr = torch.arange(0, tokens * states + 1, states, dtype=torch.int32, device="cuda")
    out, lse = torch.empty(tokens, HEADS, DIM, device="cuda", dtype=torch.bfloat16), torch.empty(tokens, HEADS, device="cuda")
    run = context.operator("merge_varlen", v=v, s=s, indptr=indptr, v_out=out, s_out=lse)
    run()
    weights = s.reshape(tokens, states, HEADS).softmax(1)
    want = (v.reshape(tokens, states, HEADS, DIM).float() * weights[..., None]).sum(1)
    torch.testing.assert_close(out.float(), want, rtol=2e-2, atol=2e-2)
    return captured(run)[0], v.nbytes + s.nbytes + out.nbytes + lse.nbytes


def main():
    torch.manual_seed(1)
    context, out = folio.Context(), open(sys.argv[1], "w") if len(sys.argv) > 1 else None
    rate = limits()["copy_bytes_per_s"]

    def report(name, microseconds, moved=None):
        share = f"{moved / microseconds * 1e6 / rate:6.1%}" if moved else ""
        print(f"{name:60} {microseconds:9.1f} us {share}")
        if out:
            out.write(json.dumps({"name": name, "us": microseconds, "bytes": moved}) + "\n")

    for tokens in (1, 64, 8192):
        for dtype in (torch.bfloat16, torch.float8_e4m3fn):
            for name, parts in STEPS.items():
                report(f"{name}, {tokens} tokens, {dtype}", *rope_append(context, tokens, dtype, **parts))
    for requests, keys in ((1, 1024), (8, 1024), (64, 1024), (64, 4096)):
        alone, both, one_call = attended(context, requests, keys)
        report(f"decode, {requests} x {keys}", alone)
        report(f"RoPE + append, then decode, {requests} x {keys}", both)
        report(f"RoPE + append + decode by one call, {requests} x {keys}", one_call)
    for requests, longest in ((64, 4096), (256, 8192), (1024, 8192), (4096, 2048)):
        for name, microseconds in indices(context, requests, longest).items():
            report(name, microseconds)
    report("draft_kv_indices, 64 requests, top 4, 5 steps", drafts(context, 64, 4, 5))
    for requests, prefix in ((64, 4096), (256, 4096)):
        whole, new_only = trees(context, requests, 64, prefix)
        report(f"tree_mask, {requests} trees of 64 on {prefix} keys, bits", whole)
        report(f"tree_mask, {requests} trees of 64, new keys only", new_only)
    for tokens, states in ((256, 2), (256, 8), (4096, 4)):
        report(f"merge_varlen, {tokens} tokens of {states} states", *merges(context, tokens, states))


if __name__ == "__main__":
    main()
