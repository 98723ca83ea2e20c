"""Grids of what merges states, writes and reads caches and lists indices: those of vLLM, FlashInfer, SGLang and
FastDeploy, as tables, and how a row of each is checked.
"""

from __future__ import annotations

import zlib

import torch

import folio
from grids.batches import GARBAGE, as_bytes, numbers
from grids.grid import Grid
from grids.storage import TILE, ds_mla_records, ds_mla_rows

EXACT, ROUNDED = (0.0, 0.0), (1e-3, 0.1)
#: Most numbers of a tensor on the CPU: tokens and pages are cut to it.
MOST_ON_CPU = 1 << 20


def generator_of(runner, case):
    return torch.Generator(runner.device).manual_seed(zlib.crc32(repr(sorted(case.items())).encode()))


def cut(runner, count, width):
    """So many rows of a width on a GPU, and at least 8 on the CPU."""
    return min(count, max(MOST_ON_CPU // width, 8)) if runner.device == "cpu" else count


def near(got, want, tolerance):
    """Asserts that numbers are within (atol, rtol) of others, with the same infinities."""
    atol, rtol = tolerance
    got, want = (x.to(torch.float32).double() for x in (got, want))
    error = torch.where(got == want, 0.0, (got - want).abs() - rtol * want.abs())
    assert bool((error <= atol).all()), f"{error.max().item()} beyond the relative tolerance; {atol} is allowed"


def quantised(x, dtype, scale):
    """What a cache of a type holds of numbers."""
    if dtype is x.dtype:
        return x
    most = torch.finfo(dtype).max
    return (x.float() / scale).clamp(-most, most).to(dtype)


# --- Merges ----------------------------------------------------------------------------------------


def check_merge(runner, case, tolerance):
    """Two states; a tenth of the lse of each is +inf, never both; lse lie as `[heads, tokens]`."""
    made = generator_of(runner, case)
    heads, dim = case["heads"], case["dim"]
    tokens = cut(runner, case["tokens"], heads * dim)
    dtype = getattr(torch, case["dtype"])
    v_a, v_b = numbers(made, (2, tokens, heads, dim), dtype)
    s_a, s_b = numbers(made, (2, heads, tokens), torch.float32).transpose(1, 2)
    empty = torch.rand((tokens, heads), generator=made, device=runner.device)
    s_a.masked_fill_(empty < 0.1, torch.inf)
    s_b.masked_fill_(empty > 0.9, torch.inf)
    # What is empty may hold anything.
    v_a.masked_fill_((empty < 0.1)[..., None], torch.nan)
    v_b.masked_fill_((empty > 0.9)[..., None], torch.nan)
    o_dtype = torch.float8_e4m3fn if case.get("fp8") else dtype
    o_scale = 0.05 if case.get("fp8") else 0
    without = tokens - min(case.get("with_context") or tokens, tokens)
    out = torch.empty((tokens, heads, dim), device=runner.device, dtype=o_dtype)
    lse = torch.full((tokens, heads), torch.nan, device=runner.device)
    folio.merge_state(
        runner.context,
        v_a=v_a,
        s_a=s_a,
        v_b=v_b,
        s_b=s_b,
        v_out=out,
        s_out=lse,
        o_scale=o_scale,
        num_tokens_without_a=without,
    )
    want, want_lse = merged(v_a, s_a, v_b, s_b, without)
    near(out.float() * (o_scale or 1), want, (1e-1, 1e-1) if case.get("fp8") else tolerance)
    near(lse, want_lse, (1e-3, 1e-3))
    return 1


def merged(v_a, s_a, v_b, s_b, without):
    """Both states as one, in float64."""
    s = torch.stack([s_a, s_b]).double()
    s[0, len(s_a) - without :] = -torch.inf
    s[s == torch.inf] = -torch.inf
    weights = torch.softmax(s, 0)[..., None]
    o = torch.where(weights[0] > 0, v_a.double() * weights[0], 0) + torch.where(weights[1] > 0, v_b * weights[1], 0)
    return o, s.logsumexp(0).nan_to_num(posinf=-torch.inf)


def check_masked_merge(runner, case, tolerance):
    """In place, for every other token."""
    made = generator_of(runner, case)
    v_a, v_b = numbers(made, (2, case["tokens"], case["heads"], case["dim"]), torch.float16)
    s_a, s_b = numbers(made, (2, case["tokens"], case["heads"]), torch.float32)
    mask = torch.arange(case["tokens"], device=runner.device) % 2 == 0
    want, want_lse = merged(v_a, s_a, v_b, s_b, 0)
    want = torch.where(mask[:, None, None], want, v_a)
    want_lse = torch.where(mask[:, None], want_lse, s_a)
    folio.merge_state(runner.context, v_a=v_a, s_a=s_a, v_b=v_b, s_b=s_b, v_out=v_a, s_out=s_a, mask=mask)
    near(v_a, want, tolerance)
    near(s_a, want_lse, tolerance)
    return 1


def check_combine(runner, case, tolerance):
    """Outputs of ranks, each scaled by its share of the softmax, add up to one over the keys of all."""
    made, ranks = generator_of(runner, case), case["ranks"]
    shape = (cut(runner, case["tokens"], ranks * case["heads"] * case["dim"]), case["heads"])
    o = numbers(made, (ranks, *shape, case["dim"]), getattr(torch, case["dtype"]))
    lse_all = numbers(made, (ranks, *shape), torch.float32, 3.0)
    lse_all[0, 1] = -torch.inf
    total = torch.zeros((*shape, case["dim"]), device=runner.device, dtype=torch.float64)
    lse = torch.empty_like(lse_all)
    for rank in range(ranks):
        share = torch.empty_like(o[rank])
        folio.cp_correct(runner.context, lse_all=lse_all, o=o[rank], o_out=share, lse_out=lse[rank], rank=rank)
        total += share
    near(total, (torch.softmax(lse_all.double(), 0)[..., None] * o).sum(0), tolerance)
    near(lse, lse_all.double().logsumexp(0).expand_as(lse), (1e-5, 1e-5))
    return 1


# --- Caches of keys and values -----------------------------------------------------------------------


def check_append(runner, case, tolerance):
    """Tokens in slots at random, out of a fused tensor of queries, keys and values; nothing else is written."""
    made = generator_of(runner, case)
    tokens, heads, dim, page = case["tokens"], 8, case["dim"], case["page"]
    pages = cut(runner, case["pages"], page * heads * dim)
    dtype, stored = (getattr(torch, case[name]) for name in ("dtype", "kv_dtype"))
    fused = numbers(made, (tokens, 3, heads, dim), dtype)
    key, value = fused[:, 1], fused[:, 2]
    slots = some_slots(runner, made, pages * page, tokens)
    # Both caches in one tensor, as vLLM has them.
    shape = (2, pages, page, heads, dim) if case["layout"] == "nhd" else (2, pages, heads, page, dim)
    caches = torch.full(shape, 3, device=runner.device, dtype=storable(stored))
    scales = scales_of(case["scales"], key, value)
    k_cache, v_cache = caches.view(stored)
    folio.kv_append(
        runner.context,
        key=key,
        value=value,
        k_cache=k_cache,
        v_cache=v_cache,
        slot_mapping=slots,
        kv_layout=case["layout"],
        **scales,
    )
    for part, rows, name in zip(caches, (key, value), ("k", "v")):
        part = part if case["layout"] == "nhd" else part.transpose(1, 2)
        check_slots(part.reshape(pages * page, heads, dim), rows, slots, stored, scale_of(scales, name), tolerance)
    return 1


def check_packed_append(runner, case, tolerance):
    """The same to keys `[pages, heads, dim / x, page, x]` and values `[pages, heads, dim, page]`."""
    made = generator_of(runner, case)
    tokens, heads, dim, page = case["tokens"], 8, case["dim"], case["page"]
    pages = cut(runner, case["pages"], page * heads * dim)
    dtype, stored = (getattr(torch, case[name]) for name in ("dtype", "kv_dtype"))
    key, value = numbers(made, (2, tokens, heads, dim), dtype)
    slots = some_slots(runner, made, pages * page, tokens)
    together = 16 // stored.itemsize
    k_cache, v_cache = (
        torch.full((pages, heads, *shape), 3, device=runner.device, dtype=storable(stored))
        for shape in ((dim // together, page, together), (dim, page))
    )
    scales = scales_of(case["scales"], key, value)
    folio.kv_append(
        runner.context,
        key=key,
        value=value,
        k_cache=k_cache.view(stored),
        v_cache=v_cache.view(stored),
        slot_mapping=slots,
        kv_format="packed_keys",
        **scales,
    )
    flat_k = k_cache.permute(0, 3, 1, 2, 4).reshape(-1, heads, dim)
    flat_v = v_cache.permute(0, 3, 1, 2).reshape(-1, heads, dim)
    for flat, rows, name in ((flat_k, key, "k"), (flat_v, value, "v")):
        check_slots(flat, rows, slots, stored, scale_of(scales, name), tolerance)
    return 1


def some_slots(runner, generator, count, tokens):
    """Slots of tokens at random; some tokens have none."""
    slots = torch.randperm(count, generator=generator, device=runner.device)[:tokens]
    slots[::7] = -1
    return slots


def scales_of(kind, key, value):
    """No scales, one for each tensor, or one for each head: the largest magnitude by 64."""
    if kind is None:
        return {}
    if kind == "tensor":
        return {"k_scale": key.abs().max().item() / 64, "v_scale": value.abs().max().item() / 64}
    return {f"{name}_scales": (x.abs().amax((0, 2)) / 64).float() for name, x in (("k", key), ("v", value))}


def scale_of(scales, name):
    """What rows `[tokens, heads, dim]` are divided by."""
    by_head = scales.get(f"{name}_scales")
    return by_head[:, None] if by_head is not None else scales.get(f"{name}_scale", 1.0)


def check_slots(flat, rows, slots, stored, scale, tolerance):
    """Slots hold their rows, and all others what they held."""
    kept = slots >= 0
    got = flat[slots[kept]].view(stored)
    if stored is rows.dtype:
        assert torch.equal(got, rows[kept])
    else:
        near(got.float() * scale, quantised(rows[kept], stored, scale).float() * scale, tolerance)
    untouched = torch.ones(len(flat), dtype=torch.bool, device=flat.device)
    untouched[slots[kept]] = False
    assert bool((flat[untouched] == 3).all())


def check_rope_append(runner, case, tolerance):
    """Queries and keys are rotated by angles of a table and keys are cached; tokens without a slot are rotated too."""
    made, dtype, stored = generator_of(runner, case), getattr(torch, case["dtype"]), getattr(torch, case["kv_dtype"])
    tokens, heads, kv_heads, dim, page = case["tokens"], 64, 8, 64, 16
    q, key, value = (numbers(made, (tokens, n, dim), dtype) for n in (heads, kv_heads, kv_heads))
    pages = tokens // page + 3
    positions = torch.randperm(4096, generator=made, device=runner.device)[:tokens]
    angles = torch.arange(4096, device=runner.device)[:, None] * 10000.0 ** (
        -torch.arange(0, dim, 2, device=runner.device) / dim
    )
    table = torch.cat([angles.cos(), angles.sin()], -1).float()
    slots = torch.randperm(pages * page, generator=made, device=runner.device)[:tokens]
    slots[::5] = -1
    want_q, want_k = (rotated(x, table[positions], case["interleaved"]) for x in (q, key))
    caches = torch.zeros((2, pages, page, kv_heads, dim), device=runner.device, dtype=storable(stored))
    k_cache, v_cache = caches.view(stored)
    scale = {"k_scale": 0.5, "v_scale": 0.5} if stored is not dtype else {}
    folio.rope_append(
        runner.context,
        q=q,
        key=key,
        value=value,
        k_cache=k_cache,
        v_cache=v_cache,
        slot_mapping=slots,
        positions=positions,
        cos_sin_cache=table,
        flags="interleaved" if case["interleaved"] else 0,
        **scale,
    )
    near(q, want_q, (tolerance, tolerance))
    kept, by = slots >= 0, scale.get("k_scale", 1.0)
    allowed = (tolerance, tolerance) if stored is dtype else (by * 2**-6, 2**-3)
    for cache, rows in ((k_cache, want_k), (v_cache, value)):
        got = as_bytes(cache).flatten(0, 1)[slots[kept]].view(stored)
        near(got.float() * by, rows[kept], allowed)
    return 1


def rotated(x, angles, interleaved):
    """RoPE in float64."""
    cos, sin = angles.double()[:, None].chunk(2, -1)
    a, b = (x.double()[..., ::2], x.double()[..., 1::2]) if interleaved else x.double().chunk(2, -1)
    turned = a * cos - b * sin, b * cos + a * sin
    return torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)


# --- Caches of latent records ------------------------------------------------------------------------


def slots_of(made, kind, tokens, count):
    """Slots of new tokens: one after the other, every third, or at random."""
    if kind == "sequential":
        return torch.arange(tokens, device=made.device)
    if kind == "scattered":
        return torch.arange(tokens, device=made.device) * 3
    return torch.randperm(count, generator=made, device=made.device)[:tokens]


def check_mla_append(runner, case, tolerance):
    """Records in slots of a kind; nothing else is written; twice the same bits."""
    made = generator_of(runner, case)
    tokens, latent, rope, pages, page = (case[name] for name in ("tokens", "latent", "rope", "pages", "page"))
    dtype, stored = (getattr(torch, case[name] or case["dtype"]) for name in ("dtype", "kv_dtype"))
    rows = numbers(made, (tokens, latent + rope), dtype)
    slots = slots_of(made, case["slots"], tokens, pages * page)
    slots[5::9] = -1
    scale, results = (0.1 if stored is not dtype else 1.0), []
    for _ in range(2):
        cache = torch.full((pages, page, latent + rope), 3, device=runner.device, dtype=storable(stored))
        folio.mla_append(
            runner.context,
            latent=rows[:, :latent],
            rope=rows[:, latent:],
            kv=cache.view(stored),
            slot_mapping=slots,
            k_scale=scale if stored is not dtype else 0,
        )
        results.append(cache.flatten(0, 1))
    assert torch.equal(*results)
    check_slots(results[0], rows, slots, stored, scale, tolerance)
    return 1


def storable(dtype):
    """A type that torch can fill: bytes for fp8."""
    return torch.uint8 if dtype.itemsize == 1 else dtype


def check_ds_mla_append(runner, case, tolerance):
    """656-byte records: values, scales and rotary elements, each within the tolerance."""
    made, tokens, page = generator_of(runner, case), case["tokens"], 16
    dtype, pages = getattr(torch, case["dtype"]), tokens // page + 8
    latent, rope = numbers(made, (tokens, 512), dtype), numbers(made, (tokens, 64), dtype)
    slots = torch.randperm(pages * page, generator=made, device=runner.device)[:tokens]
    cache = torch.full((pages, page, 656), 3, device=runner.device, dtype=torch.uint8)
    folio.mla_append(runner.context, latent=latent, rope=rope, kv=cache, slot_mapping=slots, cache_format="fp8_ds_mla")
    records = cache.flatten(0, 1)
    got = ds_mla_rows(records[slots])
    scales = records[slots][:, 512:528].contiguous().view(torch.float32)
    near(got[:, :512], latent, tolerance)
    near(scales, latent.float().unflatten(-1, (4, TILE)).abs().amax(-1) / 448, tolerance)
    near(got[:, 512:], rope.to(torch.bfloat16), tolerance)
    records[slots] = 3
    assert bool((records == 3).all())
    return 1


def check_mla_gather(runner, case, tolerance):
    """Rows of requests from tokens on that begin within pages, converted; entries behind the last page are garbage."""
    made, page, pages = generator_of(runner, case), case["page"], case["pages"]
    dtype, batch, most = getattr(torch, case["dtype"]), case["batch"], case["most"]
    cache, exact, options = gathered_cache(made, pages * page, case["kv_dtype"] or case["dtype"], dtype)
    lengths = torch.randint(0, most + 1, (batch,), generator=made, device=runner.device)
    starts = torch.randint(0, 2 * page, (batch,), generator=made, device=runner.device) * case["starts"]
    columns = (most + 2 * page) // page + 1
    table = torch.randint(0, pages, (batch, columns), generator=made, device=runner.device)
    behind = torch.arange(columns, device=runner.device) * page >= (starts + lengths)[:, None]
    ends = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    dst = torch.full((int(ends[-1]) + 3, 576), 3, device=runner.device, dtype=dtype)
    folio.mla_gather(
        runner.context,
        kv=cache.view(pages, page, -1),
        dst=dst,
        cu_seq_lens=ends.int(),
        seq_starts=starts.int(),
        block_table=table.masked_fill(behind, GARBAGE).int(),
        **options,
    )
    request = torch.arange(batch, device=runner.device).repeat_interleave(lengths)
    token = torch.arange(int(ends[-1]), device=runner.device) - ends[request] + starts[request]
    near(dst[:-3], exact(table[request, token // page] * page + token % page), tolerance)
    assert bool((dst[-3:] == 3).all())
    return 1


def gathered_cache(made, count, stored, dtype):
    """So many records of a type, what gives rows of them as numbers, and the options of a gather."""
    if stored == "fp8_ds_mla":
        latent = numbers(made, (count, 4, TILE), torch.float32)
        records = ds_mla_records(latent, numbers(made, (count, 64), torch.bfloat16))
        return records, lambda slots: ds_mla_rows(records[slots]), {"cache_format": stored}
    records = numbers(made, (count, 576), getattr(torch, stored))
    scale = 1.0 if records.dtype is dtype else 0.1

    def rows(slots):
        return as_bytes(records)[slots].view(records.dtype).float() * scale

    return records, rows, {} if scale == 1 else {"k_scale": scale}


# --- Indices ---------------------------------------------------------------------------------------


def check_kv_indices(runner, case, tolerance):
    """SGLang's table of slots of every token, whose rows are listed one after the other."""
    made, batch = generator_of(runner, case), case["batch"]
    columns = case["columns"] if runner.device == "cuda" else 256
    table = torch.randint(0, 1 << 20, (batch, columns), generator=made, device=runner.device, dtype=torch.int32)
    lengths = torch.randint(1, columns, (batch,), generator=made, device=runner.device, dtype=torch.int32)
    total = int(lengths.sum())
    listed = torch.full((total + 2,), -7, device=runner.device, dtype=torch.int32)
    indptr = torch.empty(batch + 1, device=runner.device, dtype=torch.int32)
    folio.kv_indices(
        runner.context, block_table=table, kv_len=lengths, kv_indptr=indptr, kv_indices=listed, page_size=1
    )
    used = torch.arange(columns, device=runner.device) < lengths[:, None]
    assert torch.equal(listed[:total], table[used]) and listed[total:].tolist() == [-7, -7]
    assert torch.equal(indptr[1:], lengths.cumsum(0).int()) and indptr[0] == 0
    return 1


# --- Tables ----------------------------------------------------------------------------------------

MERGE_TOLERANCES = {"float32": (1e-3, 1e-3), "float16": (1e-3, 1e-3), "bfloat16": (1e-3, 1e-2)}
LATENT_CACHE = {"tokens": 42, "rope": 64, "pages": 8, "page": 16, "slots": "random"}
#: fp8 or not, and the scales of a cache.
CACHED = [(None, None), ("float8_e4m3fn", "tensor"), ("float8_e4m3fn", "head")]

MERGES = [
    *(
        Grid(
            f"merge_{dtype}",
            "vLLM test_merge_attn_states.py",
            {
                "tokens": [256, 512, 613, 1024, 1536, 4096],
                "heads": [4, 8, 16, 32, 48, 64],
                "dim": [32, 48, 64, 96, 128, 256],
                "dtype": dtype,
                "with_context": [None, 128],
                "fp8": [False, True],
            },
            tolerance,
            check_merge,
        )
        for dtype, tolerance in MERGE_TOLERANCES.items()
    ),
    Grid(
        "merge_of_cascades",
        "vLLM test_cascade_flash_attn.py",
        {"tokens": [1, 39, 16912], "heads": [4, 8, 16], "dim": [128, 192, 256], "dtype": ["float16", "bfloat16"]},
        (1e-2, 1e-2),
        check_merge,
    ),
    Grid(
        "masked_merge",
        "FlashInfer test_shared_prefix_kernels.py",
        {"tokens": 512, "heads": 32, "dim": 128},
        (1e-3, 1e-3),
        check_masked_merge,
    ),
    *(
        Grid(
            f"combine_{dtype}",
            "vLLM, combining of ranks",
            {"ranks": [2, 4, 8], "tokens": [2, 37, 256], "heads": [16, 128], "dim": [128, 512], "dtype": dtype},
            tolerance,
            check_combine,
        )
        for dtype, tolerance in (("float32", (1e-5, 1e-5)), ("bfloat16", (3e-2, 3e-2)))
    ),
]

CACHES = [
    *(
        Grid(
            f"append_{dtype}",
            "vLLM test_cache.py",
            {
                "tokens": 21,
                "dim": [64, 80, 256],
                "page": [8, 16, 32],
                "pages": [512, 5000],
                "dtype": dtype,
                ("kv_dtype", "scales"): [(stored or dtype, scales) for stored, scales in CACHED],
                "layout": ["nhd", "hnd"],
            },
            ROUNDED,
            check_append,
        )
        for dtype in ("bfloat16", "float32")
    ),
    Grid(
        "append_packed",
        "vLLM test_cache.py",
        {
            "tokens": 42,
            "dim": [64, 80, 256],
            "page": [8, 16, 32],
            "pages": [1024, 10000],
            "dtype": "bfloat16",
            ("kv_dtype", "scales"): [("bfloat16", None), ("float8_e4m3fn", "tensor")],
        },
        ROUNDED,
        check_packed_append,
    ),
    *(
        Grid(
            f"rope_append_{dtype}",
            "vLLM test_rope_kvcache_fusion.py",
            {
                "tokens": [7, 64, 533],
                "dtype": dtype,
                "kv_dtype": [dtype, "float8_e4m3fn"],
                "interleaved": [False, True],
            },
            tolerance,
            check_rope_append,
        )
        for dtype, tolerance in (("float16", 2e-3), ("bfloat16", 1e-2))
    ),
    Grid(
        "mla_append",
        "vLLM test_cache.py",
        {
            **LATENT_CACHE,
            "latent": [256, 512],
            "dtype": ["float16", "bfloat16", "float32"],
            "kv_dtype": [None, "float8_e4m3fn"],
        },
        ROUNDED,
        check_mla_append,
    ),
    Grid(
        "mla_append_of_fastdeploy",
        "FastDeploy test_triton_mla_cache_kernel.py",
        {
            "tokens": [0, 1, 7, 42],
            ("latent", "rope"): [(512, 64), (256, 32), (128, 32)],
            "pages": 16,
            "page": 16,
            "slots": ["sequential", "scattered", "random"],
            "dtype": ["float16", "bfloat16"],
            "kv_dtype": None,
        },
        (1e-6, 0.0),
        check_mla_append,
    ),
    Grid(
        "ds_mla_append",
        "vLLM test_cache.py, FastDeploy test_dsmla_writecache.py",
        {"tokens": [1, 2, 16, 17, 42, 256, 512], "dtype": ["float16", "bfloat16"]},
        ROUNDED,
        check_ds_mla_append,
    ),
    Grid(
        "mla_gather",
        "vLLM test_cache.py",
        {
            "batch": 8,
            "most": 512,
            "page": [16, 64],
            "pages": 1024,
            "starts": [0, 1],
            "dtype": ["float32", "float16", "bfloat16"],
            "kv_dtype": [None, "float8_e4m3fn", "fp8_ds_mla"],
        },
        ROUNDED,
        check_mla_gather,
    ),
    Grid(
        "kv_indices",
        "SGLang test_create_kvindices.py",
        {"batch": [1, 37, 1786], "columns": 4096},
        None,
        check_kv_indices,
    ),
]

GRIDS = [*MERGES, *CACHES]
