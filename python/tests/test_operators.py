"""Cache writers, merges, trees and indices against what folio.h says of them."""

import ml_dtypes
import numpy as np
import pytest
from batches import batch
from oracle import softmax_sum

import folio

LAYOUTS = {"nhd": lambda cache: cache, "hnd": lambda cache: np.ascontiguousarray(cache.swapaxes(1, 2))}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_kv_append_and_gather(ctx, rng, layout):
    tokens, pages, page_size, heads, dim = 6, 4, 8, 2, 16
    key, value = rng.standard_normal((2, tokens, heads, dim)).astype(np.float32)
    slots = np.array([0, 9, -1, 31, 16, 17], np.int64)
    k_cache, v_cache = (LAYOUTS[layout](np.zeros((pages, page_size, heads, dim), np.float32)) for _ in range(2))
    folio.kv_append(ctx, key=key, value=value, k_cache=k_cache, v_cache=v_cache, slot_mapping=slots, kv_layout=layout)
    for cache, rows in ((k_cache, key), (v_cache, value)):
        wanted = np.zeros((pages * page_size, heads, dim), np.float32)
        wanted[slots[slots >= 0]] = rows[slots >= 0]
        assert (LAYOUTS[layout](cache).reshape(wanted.shape) == wanted).all()

    k_rows, v_rows = np.zeros((3, heads, dim), np.float16), np.zeros((3, heads, dim), np.float16)
    folio.kv_gather(
        ctx,
        key=k_rows,
        value=v_rows,
        k_cache=k_cache,
        v_cache=v_cache,
        kv_layout=layout,
        cu_seq_lens=np.array([0, 1, 3], np.int32),
        seq_starts=np.array([1, 0], np.int32),
        kv_indptr=np.array([0, 1, 2], np.int32),
        kv_indices=np.array([1, 2], np.int32),
    )
    assert (k_rows == key[[1, 4, 5]].astype(np.float16)).all() and (v_rows == value[[1, 4, 5]].astype(np.float16)).all()


def test_kv_append_with_scales_per_token_and_head(ctx, rng):
    key, value = rng.standard_normal((2, 3, 2, 16)).astype(np.float32)
    k_cache, v_cache = np.zeros((2, 2, 4, 2, 16), np.int8)
    k_scales, v_scales = np.zeros((2, 2, 4, 2), np.float32)
    caches = {"k_cache": k_cache, "v_cache": v_cache, "k_scales": k_scales, "v_scales": v_scales}
    slots = np.array([0, -1, 5], np.int32)
    folio.kv_append(ctx, key=key, value=value, slot_mapping=slots, kv_format="token_head_scales", **caches)
    scale = np.abs(key[2]).max(axis=-1) / np.float32(127)
    np.testing.assert_allclose(k_scales[1, 1], scale, rtol=1e-6)
    assert np.abs(k_cache[1, 1] - key[2] / scale[:, None]).max() <= 0.501
    assert not k_scales[0, 1].any()

    rows = np.zeros((2, 1, 2, 16), np.float32)
    folio.kv_gather(
        ctx,
        key=rows[0],
        value=rows[1],
        kv_format=folio.KvFormat.TOKEN_HEAD_SCALES,
        cu_seq_lens=np.array([0, 1], np.int32),
        seq_starts=np.array([1], np.int32),
        kv_indptr=np.array([0, 1], np.int32),
        kv_indices=np.array([1], np.int32),
        **caches,
    )
    np.testing.assert_allclose(rows[1, 0], v_cache[1, 1] * v_scales[1, 1][:, None], rtol=1e-6)


def test_kv_append_quantises(ctx, rng):
    key, value = (4 * rng.standard_normal((2, 3, 2, 16))).astype(ml_dtypes.bfloat16)
    k_cache = np.zeros((2, 4, 2, 16), ml_dtypes.float8_e4m3fn)
    v_cache = np.zeros((2, 4, 2, 16), np.uint8)
    slots = np.array([0, 1, 2], np.int32)
    with pytest.raises(folio.Error) as refused:
        folio.kv_append(ctx, key=key, value=value, k_cache=v_cache, v_cache=v_cache, slot_mapping=slots)
    assert refused.value.status == folio.Status.ERR_DTYPE
    folio.kv_append(
        ctx,
        key=key,
        value=value,
        k_cache=k_cache,
        v_cache=folio.Tensor(v_cache, dtype="float8_e4m3fn"),
        slot_mapping=slots,
        k_scale=0.5,
        v_scales=np.array([1, 2], np.float32),
    )
    wanted = (key.astype(np.float32) / 0.5).astype(ml_dtypes.float8_e4m3fn)
    assert (k_cache.reshape(-1, 2, 16)[:3] == wanted).all()
    wanted = (value.astype(np.float32) / np.array([[1], [2]], np.float32)).astype(ml_dtypes.float8_e4m3fn)
    assert (v_cache.reshape(-1, 2, 16)[:3] == wanted.view(np.uint8)).all()


def test_kv_copy(ctx, rng):
    k, v = rng.standard_normal((2, 5, 4, 2, 8)).astype(np.float32)
    before = k.copy(), v.copy()
    folio.kv_copy(ctx, k_src=k, k_dst=k, v_src=v, v_dst=v, page_pairs=np.array([[0, 3], [-1, 2], [1, 4]], np.int32))
    for cache, old in zip((k, v), before):
        assert (cache[[3, 4]] == old[[0, 1]]).all() and (cache[:3] == old[:3]).all()
    with pytest.raises(folio.InvalidArgumentError, match="page_pairs"):
        folio.kv_copy(ctx, k_src=k, k_dst=k, page_pairs=np.array([[0, 5]], np.int32))


@pytest.mark.parametrize("interleaved", [False, True])
def test_rope_append(ctx, rng, interleaved):
    tokens, heads, kv_heads, dim, theta, eps = 5, 4, 2, 32, 10000.0, 1e-6
    q, key, value = (rng.standard_normal((tokens, n, dim)).astype(np.float32) for n in (heads, kv_heads, kv_heads))
    weight = rng.standard_normal(dim).astype(np.float32)
    positions = np.array([0, 1, 17, 900, 65536], np.int64)
    k_cache, v_cache = np.zeros((2, 2, 4, kv_heads, dim), np.float32)
    slots = np.array([0, 1, 2, -1, 7], np.int32)
    q_out, key_out = np.zeros_like(q), np.zeros_like(key)
    folio.rope_append(
        ctx,
        q=q,
        q_out=q_out,
        key=key,
        key_out=key_out,
        value=value,
        k_cache=k_cache,
        v_cache=v_cache,
        slot_mapping=slots,
        k_norm_weight=weight,
        rms_norm_eps=eps,
        positions=positions,
        rope_theta=theta,
        flags="interleaved" if interleaved else 0,
    )
    angles = positions[:, None] * theta ** (-2 * np.arange(dim // 2) / dim)

    def rotated(x):
        cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
        a, b = (x[..., ::2], x[..., 1::2]) if interleaved else np.split(x, 2, -1)
        turned = [a * cos - b * sin, b * cos + a * sin]
        return np.stack(turned, -1).reshape(x.shape) if interleaved else np.concatenate(turned, -1)

    exact = key.astype(np.float64)
    normed = exact * weight / np.sqrt((exact**2).mean(-1, keepdims=True) + eps)
    np.testing.assert_allclose(q_out, rotated(q.astype(np.float64)), rtol=0, atol=2e-6)
    np.testing.assert_allclose(key_out, rotated(normed), rtol=0, atol=5e-6)
    kept = slots >= 0
    assert (k_cache.reshape(-1, kv_heads, dim)[slots[kept]] == key_out[kept]).all()
    assert (v_cache.reshape(-1, kv_heads, dim)[slots[kept]] == value[kept]).all()

    # Another form of the cache gets the bytes that an append of the rotated keys writes.
    def quantised():
        codes, scales = np.zeros((2, 2, 4, kv_heads, dim), np.int8), np.zeros((2, 2, 4, kv_heads), np.float32)
        form = {"k_cache": codes[0], "v_cache": codes[1], "k_scales": scales[0], "v_scales": scales[1]}
        return codes, scales, {**form, "slot_mapping": slots, "kv_format": "token_head_scales"}

    rotation = {"positions": positions, "rope_theta": theta, "flags": "interleaved" if interleaved else 0}
    codes, scales, form = quantised()
    folio.rope_append(ctx, key=key, value=value, k_norm_weight=weight, rms_norm_eps=eps, **rotation, **form)
    two_steps, two_scales, form = quantised()
    folio.kv_append(ctx, key=key_out, value=value, **form)
    assert codes.any() and (codes == two_steps).all() and (scales == two_scales).all()

    # In place, where no q_out is given: then q must be writable.
    q.flags.writeable = False
    arguments = {"key": key, "value": value, "k_cache": k_cache, "v_cache": v_cache, "slot_mapping": slots}
    with pytest.raises(folio.InvalidArgumentError, match="q is read-only"):
        folio.rope_append(ctx, q=q, **arguments, positions=positions, rope_theta=theta)
    folio.rope_append(ctx, q=q, q_out=q_out, **arguments, positions=positions, rope_theta=theta)


def test_append_and_decode_by_one_call(ctx, rng):
    heads, kv_heads, dim, page = 4, 2, 32, 4
    desc = {"q_dtype": "float32", "num_qo_heads": heads, "num_kv_heads": kv_heads, "head_dim_qk": dim}
    q, key, value = (rng.standard_normal((2, n, dim)).astype(np.float32) for n in (heads, kv_heads, kv_heads))
    cached = rng.standard_normal((2, 5, page, kv_heads, dim)).astype(np.float32)
    table, kv_len = np.array([[4, 0], [2, 3]], np.int32), np.array([6, 3], np.int32)
    slots = np.array([0 * page + 1, 2 * page + 2], np.int32)
    rotation = {"positions": kv_len - 1, "rope_theta": 10000.0}

    def step(attend):
        k_cache, v_cache = cached.copy()
        q_out, o = np.zeros_like(q), np.zeros_like(q)
        append = {"q": q, "q_out": q_out, "key": key, "value": value, "slot_mapping": slots, **rotation}
        append |= {"k_cache": k_cache, "v_cache": v_cache}
        with folio.Decode(ctx, page_size=page, max_batch_size=2, max_kv_len=8, **desc) as decode:
            decode.plan(block_table=table, kv_len=kv_len)
            attend(decode, append, {"q": q_out, "k": k_cache, "v": v_cache, "o": o})
        return k_cache, v_cache, q_out, o

    def by_two_calls(decode, append, args):
        folio.rope_append(ctx, **append)
        decode.run(**args)

    wanted = step(by_two_calls)
    assert wanted[3].any()
    for got in (
        step(lambda decode, append, args: decode.append_run(append, **args)),
        step(lambda decode, append, args: decode.prepare_append_run(append, **args)()),
    ):
        assert all((a == b).all() for a, b in zip(got, wanted))
    with pytest.raises(TypeError, match="append has no key 'k'"):
        step(lambda decode, append, args: decode.append_run({**append, "k": key}, **args))
    with pytest.raises(folio.InvalidArgumentError, match="q: "):
        step(lambda decode, append, args: decode.append_run(append, **{**args, "q": q}))


def states(rng, tokens, count, heads=2, dim=16):
    v = rng.standard_normal((tokens, count, heads, dim)).astype(np.float32)
    return v, rng.standard_normal((tokens, count, heads)).astype(np.float32)


def merged(v, s):
    """`[n, dim]` states of one token and head."""
    out, lse = softmax_sum(s.astype(np.float64), v.astype(np.float64))
    return out, lse


def test_merges(ctx, rng):
    v, s = states(rng, 4, 3)
    s[1, 0, 0] = -np.inf
    v[1, 0, 0] = np.nan
    v_out, s_out = np.zeros((4, 2, 16), np.float32), np.zeros((4, 2), np.float32)
    folio.merge_states(ctx, v=v, s=s, v_out=v_out, s_out=s_out)
    v[1, 0, 0] = 0
    for t in range(4):
        for h in range(2):
            wanted, lse = merged(v[t, :, h], s[t, :, h])
            np.testing.assert_allclose(v_out[t, h], wanted, rtol=0, atol=2e-6)
            np.testing.assert_allclose(s_out[t, h], lse, rtol=0, atol=2e-6)

    # Two states, in place, but for the masked token.
    a, b = np.ascontiguousarray(v[:, 0]), v[:, 1]
    s_a = np.ascontiguousarray(s[:, 0])
    old = a.copy()
    mask = np.array([True, True, False, True])
    folio.merge_state(ctx, v_a=a, s_a=s_a, v_b=b, s_b=s[:, 1], v_out=a, s_out=s_a, mask=mask)
    assert (a[2] == old[2]).all()
    wanted, _ = merged(v[3, :2, 1], s[3, :2, 1])
    np.testing.assert_allclose(a[3, 1], wanted, rtol=0, atol=2e-6)

    # As many states as each token has.
    flat_v, flat_s = v.reshape(12, 2, 16), s.reshape(12, 2)
    indptr = np.array([0, 0, 1, 5, 12], np.int32)
    folio.merge_varlen(ctx, v=flat_v, s=flat_s, indptr=indptr, v_out=v_out, s_out=s_out)
    assert (v_out[0] == 0).all() and np.isneginf(s_out[0]).all()
    wanted, lse = merged(flat_v[5:12, 0], flat_s[5:12, 0])
    np.testing.assert_allclose(v_out[3, 0], wanted, rtol=0, atol=2e-6)


def test_merge_of_split_keys_is_attention_over_all(ctx, rng):
    made = batch(rng, [2], [40], heads=4, kv_heads=2, dim=32)
    handle = folio.Prefill(
        ctx,
        q_dtype="float32",
        num_qo_heads=4,
        num_kv_heads=2,
        head_dim_qk=32,
        page_size=16,
        max_batch_size=1,
        max_num_tokens=2,
        max_kv_len=64,
    )

    def attended(pages, kv_len):
        handle.plan(
            qo_indptr=made.qo_indptr, kv_len=np.array([kv_len], np.int32), block_table=pages[None].astype(np.int32)
        )
        o, lse = np.zeros_like(made.q), np.zeros((2, 4), np.float32)
        handle.run(q=made.q, k=made.k, v=made.v, o=o, lse=lse, mask_mode="full")
        return o, lse

    (o_a, s_a), (o_b, s_b) = attended(made.pages[0][:1], 16), attended(made.pages[0][1:], 24)
    o, lse = np.zeros_like(o_a), np.zeros_like(s_a)
    folio.merge_state(ctx, v_a=o_a, s_a=s_a, v_b=o_b, s_b=s_b, v_out=o, s_out=lse)
    whole_o, whole_lse = attended(made.pages[0], 40)
    np.testing.assert_allclose(o, whole_o, rtol=0, atol=1e-6)
    np.testing.assert_allclose(lse, whole_lse, rtol=0, atol=1e-6)


def test_tree_mask(ctx):
    #   0 ─ 1 ─ 3
    #     └ 2
    parents, prefix = np.array([[-1, 0, 0, 1]], np.int32), np.array([2], np.int32)
    wanted = np.array([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]], np.uint8)
    tree, flat = np.zeros((1, 4, 4), np.uint8), np.zeros(24, np.bool_)
    positions, child, sibling = (np.zeros((1, 4), np.int64) for _ in range(3))
    bits = np.zeros((1, 4, 1), np.uint8)
    folio.tree_mask(
        ctx,
        parents=parents,
        prefix_lens=prefix,
        tree_mask=tree,
        mask_bytes=flat,
        tree_bits=bits,
        positions=positions,
        next_token=child,
        next_sibling=sibling,
    )
    assert (tree[0] == wanted).all()
    assert (flat.reshape(4, 6) == np.hstack([np.ones((4, 2)), wanted])).all()
    assert (bits[0] == np.packbits(wanted, -1, "little")).all()
    assert positions.tolist() == [[2, 3, 3, 4]]
    assert child.tolist() == [[1, 3, -1, -1]] and sibling.tolist() == [[-1, 2, -1, -1]]


def test_indices_of_a_step(ctx):
    table = np.array([[4, 7, 0], [2, 0, 0]], np.int32)
    qo_len, cached = np.array([3, 1], np.int32), np.array([5, 0], np.int32)
    qo_indptr, kv_len, kv_indptr, kinds = (np.full(n, -5, np.int32) for n in (3, 2, 3, 2))
    folio.batch_lengths(
        ctx,
        qo_len=qo_len,
        cached_len=cached,
        encoder_len=np.array([0, 1], np.int32),
        qo_indptr=qo_indptr,
        kv_len=kv_len,
        kv_indptr=kv_indptr,
        row_kind=kinds,
    )
    assert qo_indptr.tolist() == [0, 3, 4] and kv_len.tolist() == [8, 1] and kv_indptr.tolist() == [0, 8, 9]
    assert kinds.tolist() == [folio.RowKind.DECODE, folio.RowKind.PREFILL]

    indptr, indices, last = np.zeros(3, np.int32), np.full(5, -9, np.int32), np.zeros(2, np.int32)
    folio.kv_indices(
        ctx, block_table=table, kv_len=kv_len, kv_indptr=indptr, kv_indices=indices, last_page_len=last, page_size=4
    )
    assert indptr.tolist() == [0, 2, 3] and indices.tolist() == [4, 7, 2, -9, -9] and last.tolist() == [4, 1]

    back = np.zeros((2, 3), np.int64)
    folio.block_table(ctx, kv_indptr=indptr, kv_indices=indices, block_table=back, fill=-1)
    assert back.tolist() == [[4, 7, -1], [2, -1, -1]]

    slots, positions = np.zeros(5, np.int64), np.zeros(5, np.int32)
    folio.slot_mapping(
        ctx, block_table=table, qo_indptr=qo_indptr, kv_len=kv_len, slot_mapping=slots, positions=positions, page_size=4
    )
    assert slots.tolist() == [29, 30, 31, 8, -1] and positions.tolist() == [5, 6, 7, 0, -1]

    rows = np.arange(20, dtype=np.int32).reshape(2, 10)
    drafts, lists = np.zeros((2, 5), np.int32), np.full((2, 20), -9, np.int32)
    folio.draft_kv_indices(
        ctx,
        req_to_token=rows,
        kv_len=np.array([2, 1], np.int32),
        kv_indptr=drafts,
        kv_indices=lists,
        topk=2,
        slot_layout=folio.SlotLayout.STEP_MAJOR,
    )
    assert drafts.tolist() == [[0, 3, 6, 8, 10], [0, 4, 8, 11, 14]]
    assert lists[0, :10].tolist() == [0, 1, 2, 0, 1, 3, 10, 11, 10, 12]
