"""Multi-head latent attention, its caches and its projections, against the formulas of folio.h in float64."""

import ml_dtypes
import numpy as np
import pytest
from batches import indptr, pages_of
from oracle import attend, softmax_sum

import folio

HEADS, LATENT, NOPE, ROPE, VALUE, PAGE = 4, 64, 32, 16, 24, 8
QO_LENS, KV_LENS = [1, 6, 3], [20, 6, 33]


@pytest.fixture
def records(rng):
    """Page ids, and a cache of latent records of float32."""
    pages = pages_of(rng, KV_LENS, PAGE)
    cache = rng.standard_normal((sum(map(len, pages)) + 2, PAGE, LATENT + ROPE)).astype(np.float32)
    return pages, cache


def table_of(pages):
    table = np.zeros((len(pages), max(map(len, pages))), np.int32)
    for row, ids in zip(table, pages):
        row[: len(ids)] = ids
    return table


def dense(cache, pages, length):
    return cache[pages].reshape(-1, cache.shape[-1])[:length]


def absorbed_handle(ctx, **options):
    return folio.Mla(
        ctx, q_dtype="float32", num_heads=HEADS, kv_lora_rank=LATENT, qk_rope_head_dim=ROPE, max_kv_len=64, **options
    )


def test_absorbed_attention(ctx, rng, records):
    pages, cache = records
    q = rng.standard_normal((sum(QO_LENS), HEADS, LATENT + ROPE)).astype(np.float32)
    o, lse = np.zeros((len(q), HEADS, LATENT), np.float32), np.zeros((len(q), HEADS), np.float32)
    handle = absorbed_handle(ctx, page_size=PAGE, max_batch_size=4, max_qo_len=8)
    handle.plan(qo_indptr=indptr(QO_LENS), kv_len=np.array(KV_LENS, np.int32), block_table=table_of(pages))
    handle.run(q_latent=q[..., :LATENT], q_rope=q[..., LATENT:], kv=cache, o=o, lse=lse, sm_scale=0.2)
    start = 0
    for ids, rows, length in zip(pages, QO_LENS, KV_LENS):
        keys = dense(cache, ids, length)[:, None]
        wanted_o, wanted_lse = attend(q[start : start + rows], keys, keys[..., :LATENT], sm_scale=0.2)
        np.testing.assert_allclose(o[start : start + rows], wanted_o, rtol=0, atol=2e-6)
        np.testing.assert_allclose(lse[start : start + rows], wanted_lse, rtol=0, atol=5e-6)
        start += rows
    with pytest.raises(TypeError, match="sm_scale"):
        handle.run(q_latent=q[..., :LATENT], q_rope=q[..., LATENT:], kv=cache, o=o)


def test_a_tree_of_drafts_is_two_runs_and_a_merge(ctx, rng, records):
    """docs/concepts.md, Speculation: the last four tokens of each request are drafts."""
    pages, cache = records
    parents = [-1, 0, 0, 2]
    drafts, rows = len(parents), len(parents) * len(KV_LENS)
    seen = np.eye(drafts, dtype=bool)
    for draft, parent in enumerate(parents):
        seen[draft] |= seen[parent] & (parent >= 0)
    slots = [(ids[:, None] * PAGE + np.arange(PAGE)).reshape(-1) for ids in map(np.asarray, pages)]
    prefixes = np.array(KV_LENS, np.int32) - drafts
    q = rng.standard_normal((rows, HEADS, LATENT + ROPE)).astype(np.float32)
    queries = dict(q_latent=q[..., :LATENT], q_rope=q[..., LATENT:], sm_scale=0.2, mask_mode="full")
    states = [
        dict(o=np.full((rows, HEADS, LATENT), np.nan, np.float32), lse=np.full((rows, HEADS), np.nan, np.float32))
        for _ in range(2)
    ]

    handle = absorbed_handle(ctx, page_size=PAGE, max_batch_size=4, max_qo_len=drafts)
    handle.plan(qo_indptr=indptr([drafts] * len(KV_LENS)), kv_len=prefixes, block_table=table_of(pages))
    handle.run(kv=cache, **queries, **states[0])
    own = [of[prefix : prefix + drafts][ancestors] for of, prefix in zip(slots, prefixes) for ancestors in seen]
    tree = absorbed_handle(ctx, page_size=1, max_batch_size=rows)
    tree.plan(kv_indptr=indptr(list(map(len, own))), kv_indices=np.concatenate(own).astype(np.int32))
    tree.run(kv=cache.reshape(-1, 1, LATENT + ROPE), **queries, **states[1])
    (first, second), o = states, np.empty((rows, HEADS, LATENT), np.float32)
    folio.merge_state(ctx, v_a=first["o"], s_a=first["lse"], v_b=second["o"], s_b=second["lse"], v_out=o)

    for b, (ids, length, prefix) in enumerate(zip(pages, KV_LENS, prefixes)):
        keys = dense(cache, ids, length)[:, None]
        of_request = slice(b * drafts, (b + 1) * drafts)

        def sees(p, j, prefix=prefix):
            return j < prefix or seen[p - prefix, j - prefix]

        wanted, _ = attend(q[of_request], keys, keys[..., :LATENT], sm_scale=0.2, sees=sees)
        np.testing.assert_allclose(o[of_request], wanted, rtol=0, atol=2e-6)


def context_handle(ctx, **options):
    return folio.MlaContext(
        ctx,
        dtype="float32",
        num_heads=HEADS,
        kv_lora_rank=LATENT,
        qk_nope_head_dim=NOPE,
        qk_rope_head_dim=ROPE,
        v_head_dim=VALUE,
        page_size=PAGE,
        max_batch_size=4,
        max_num_tokens=16,
        max_kv_len=64,
        max_chunk_tokens=24,
        **options,
    )


@pytest.mark.parametrize("in_steps", [False, True])
def test_prompts_over_a_cached_context(ctx, rng, records, in_steps):
    pages, cache = records
    tokens = sum(QO_LENS)
    q, k_nope, v, k_rope = (
        rng.standard_normal(shape).astype(np.float32)
        for shape in ((tokens, HEADS, NOPE + ROPE), (tokens, HEADS, NOPE), (tokens, HEADS, VALUE), (tokens, ROPE))
    )
    w_uk = rng.standard_normal((HEADS, NOPE, LATENT)).astype(np.float32) / 8
    w_uv = rng.standard_normal((HEADS, LATENT, VALUE)).astype(np.float32) / 8
    o, lse = np.zeros((tokens, HEADS, VALUE), np.float32), np.zeros((tokens, HEADS), np.float32)
    handle = context_handle(ctx, flags="steps" if in_steps else 0)
    handle.plan(qo_indptr=indptr(QO_LENS), kv_len=np.array(KV_LENS, np.int32), block_table=table_of(pages))
    args = {"q": q, "k_nope": k_nope, "k_rope": k_rope, "v": v, "kv": cache, "o": o, "lse": lse}
    if in_steps:
        # The caller's own products take the place of the weights.
        latent, rope = np.zeros((24, LATENT), np.float32), np.zeros((24, ROPE), np.float32)
        context_k, context_v = np.zeros((24, HEADS, NOPE), np.float32), np.zeros((24, HEADS, VALUE), np.float32)
        args.update(context_latent=latent, context_rope=rope, context_k_nope=context_k, context_v=context_v)
        assert handle.num_chunks() > 1
        handle.new_tokens(**args)
        for chunk in range(handle.num_chunks()):
            assert 0 < handle.chunk_tokens(chunk) <= 24
            handle.gather(chunk, **args)
            context_k[:] = np.einsum("tl,hpl->thp", latent, w_uk)
            context_v[:] = np.einsum("tl,hlv->thv", latent, w_uv)
            attend_chunk = handle.prepare_attend(chunk, **args)
            attend_chunk()
    else:
        handle.run(**args, w_uk=w_uk, w_uv=w_uv)

    start = 0
    for ids, rows, length in zip(pages, QO_LENS, KV_LENS):
        context = dense(cache, ids, length)[: length - rows].astype(np.float64)
        new = slice(start, start + rows)
        nope = np.concatenate([np.einsum("tl,hpl->thp", context[:, :LATENT], w_uk), k_nope[new]])
        rope = np.concatenate([context[:, LATENT:], k_rope[new]])[:, None].repeat(HEADS, 1)
        values = np.concatenate([np.einsum("tl,hlv->thv", context[:, :LATENT], w_uv), v[new]])
        wanted_o, wanted_lse = attend(q[new], np.concatenate([nope, rope], -1), values)
        np.testing.assert_allclose(o[new], wanted_o, rtol=0, atol=1e-5)
        np.testing.assert_allclose(lse[new], wanted_lse, rtol=0, atol=1e-5)
        start += rows


def test_append_and_gather(ctx, rng):
    tokens, slots = 5, np.array([3, 17, -1, 8, 40], np.int64)
    latent, rope = (rng.standard_normal((tokens, width)).astype(np.float32) for width in (LATENT, ROPE))
    cache = np.zeros((6, PAGE, LATENT + ROPE), np.float32)
    angles = rng.standard_normal((10, ROPE // 2))
    table = np.concatenate([np.cos(angles), np.sin(angles)], -1).astype(np.float32)
    positions = np.array([0, 9, 3, 4, 7], np.int32)
    rope_out = np.zeros_like(rope)
    folio.mla_append(
        ctx,
        latent=latent,
        rope=rope,
        kv=cache,
        slot_mapping=slots,
        cos_sin_cache=table,
        positions=positions,
        rope_out=rope_out,
        flags=folio.MlaRopeFlag.INTERLEAVED,
    )
    cos, sin = (part[positions].astype(np.float64) for part in np.split(table, 2, -1))
    x, y = rope[:, ::2], rope[:, 1::2]
    rotated = np.stack([x * cos - y * sin, y * cos + x * sin], -1).reshape(tokens, ROPE)
    np.testing.assert_allclose(rope_out, rotated, rtol=0, atol=1e-6)
    flat = cache.reshape(-1, LATENT + ROPE)
    wanted = np.zeros_like(flat)
    kept = slots >= 0
    wanted[slots[kept]] = np.concatenate([latent, rope_out], -1)[kept]
    assert (flat == wanted).all()

    dst, dst_rope = np.zeros((3, LATENT), np.float32), np.zeros((3, ROPE), np.float32)
    folio.mla_gather(
        ctx,
        kv=cache,
        dst=dst,
        dst_rope=dst_rope,
        cu_seq_lens=np.array([0, 2, 3], np.int32),
        seq_starts=np.array([2, 0], np.int32),
        block_table=np.array([[0, 1], [2, 0]], np.int32),
    )
    rows = flat[[2, 3, 16]]
    assert (dst == rows[:, :LATENT]).all() and (dst_rope == rows[:, LATENT:]).all()


def test_fp8_ds_mla_records(ctx, rng):
    latent = rng.standard_normal((2, 512)).astype(ml_dtypes.bfloat16)
    rope = rng.standard_normal((2, 64)).astype(ml_dtypes.bfloat16)
    cache = np.zeros((1, 4, 656), np.uint8)
    folio.mla_append(
        ctx, latent=latent, rope=rope, kv=cache, slot_mapping=np.array([1, 2], np.int32), cache_format="fp8_ds_mla"
    )
    for token in range(2):
        record = cache[0, token + 1]
        blocks = latent[token].astype(np.float32).reshape(4, 128)
        scales = np.abs(blocks).max(-1) / np.float32(448)
        np.testing.assert_allclose(record[512:528].view(np.float32), scales, rtol=1e-6)
        values = record[:512].view(ml_dtypes.float8_e4m3fn).astype(np.float32).reshape(4, 128) * scales[:, None]
        assert (np.abs(values - blocks) <= np.abs(blocks) / 16 + scales[:, None] / 256).all()
        assert (record[528:].view(ml_dtypes.bfloat16) == rope[token]).all()


def test_projections(ctx, rng):
    weight = rng.standard_normal((HEADS * (NOPE + VALUE), LATENT)).astype(np.float32)
    halves = weight.reshape(HEADS, NOPE + VALUE, LATENT)
    w_uk, w_uv = np.zeros((HEADS, NOPE, LATENT), np.float32), np.zeros((HEADS, LATENT, VALUE), np.float32)
    folio.mla_absorb_weights(ctx, kv_b_proj=weight, w_uk=w_uk, w_uv=w_uv)
    assert (w_uk == halves[:, :NOPE]).all() and (w_uv == halves[:, NOPE:].transpose(0, 2, 1)).all()

    q = rng.standard_normal((7, HEADS, NOPE)).astype(np.float32)
    q_latent = np.zeros((7, HEADS, LATENT), np.float32)
    folio.mla_absorb_q(ctx, q_nope=q, w_uk=w_uk, q_latent=q_latent)
    exact = {"rtol": 0, "atol": 5e-5}
    np.testing.assert_allclose(q_latent, np.einsum("thp,hpl->thl", q, w_uk.astype(float)), **exact)

    # A weight may be a view of the model's own.
    out = np.zeros((7, HEADS * VALUE), np.float32)
    folio.mla_project_o(
        ctx, o_latent=q_latent, w_uv=halves[:, NOPE:].transpose(0, 2, 1), out=out.reshape(7, HEADS, VALUE)
    )
    wanted = np.einsum("thl,hlv->thv", q_latent.astype(float), w_uv)
    np.testing.assert_allclose(out.reshape(7, HEADS, VALUE), wanted, rtol=1e-5, atol=1e-3)

    latent = rng.standard_normal((5, LATENT)).astype(np.float32)
    k, v = np.zeros((5, HEADS, NOPE), np.float32), np.zeros((5, HEADS, VALUE), np.float32)
    folio.mla_up_project(ctx, kv_c=latent, w_uk=w_uk, w_uv=w_uv, k_nope=k, v=v)
    np.testing.assert_allclose(k, np.einsum("tl,hpl->thp", latent.astype(float), w_uk), **exact)
    np.testing.assert_allclose(v, np.einsum("tl,hlv->thv", latent.astype(float), w_uv), **exact)


def test_context_parallel(ctx, rng):
    """Two ranks hold the even and the odd tokens; their scaled outputs add up to attention over all."""
    q, keys, values = rng.standard_normal((1, 2, 16)), rng.standard_normal((20, 16)), rng.standard_normal((20, 8))
    parts = [[softmax_sum(keys[rank::2] @ q[0, h], values[rank::2]) for h in range(2)] for rank in range(2)]
    lse_all = np.array([[[lse for _, lse in heads]] for heads in parts], np.float32)
    total = np.zeros((1, 2, 8), np.float32)
    for rank in range(2):
        o = np.array([[out for out, _ in parts[rank]]], np.float32)
        lse_out = np.zeros((1, 2), np.float32)
        folio.cp_correct(ctx, lse_all=lse_all, o=o, o_out=o, lse_out=lse_out, rank=rank)
        total += o
    for h in range(2):
        wanted, lse = softmax_sum(keys @ q[0, h], values)
        np.testing.assert_allclose(total[0, h], wanted, rtol=0, atol=2e-6)
        np.testing.assert_allclose(lse_out[0, h], lse, rtol=0, atol=2e-6)


def test_reorder_of_gathered_records(ctx):
    """Contexts of 5 and 2 tokens on two ranks: ranks hold 3 and 2, 1 and 1."""
    gathered = np.arange(2 * 4 * 3, dtype=np.float32).reshape(2, 4, 3)
    dst = np.zeros((7, 3), np.float32)
    folio.cp_reorder(
        ctx,
        gathered=gathered,
        dst=dst,
        context_lens=np.array([5, 2], np.int32),
        cu_seq_lens=np.array([0, 5, 7], np.int32),
        cu_padded_lens=np.array([0, 3, 4], np.int32),
        local_start=0,
    )
    wanted = [
        gathered[0, 0],
        gathered[0, 1],
        gathered[0, 2],
        gathered[1, 0],
        gathered[1, 1],
        gathered[0, 3],
        gathered[1, 3],
    ]
    assert (dst == np.array(wanted)).all()
