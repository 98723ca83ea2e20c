"""Decode, prefill and cascade against the formula in float64."""

import ml_dtypes
import numpy as np
import pytest
from batches import batch, indptr
from oracle import attend

import folio

#: Types of q, k and v, and how far an output of about 1 may be from the formula.
DTYPES = {"float32": (np.float32, 2e-6), "float16": (np.float16, 2e-3), "bfloat16": (ml_dtypes.bfloat16, 1.6e-2)}


def expected(made, **options):
    """Output and lse of all rows."""
    parts = [
        attend(made.q[made.rows(b)], made.keys(made.k, b), made.keys(made.v, b), **options)
        for b in range(len(made.kv_lens))
    ]
    return tuple(np.concatenate(part) for part in zip(*parts))


def check(o, lse, wanted, tolerance):
    wanted_o, wanted_lse = wanted
    assert np.abs(o.astype(np.float64) - wanted_o).max() <= tolerance
    np.testing.assert_allclose(lse, wanted_lse, rtol=0, atol=max(tolerance, 5e-6))


def outputs(made):
    dtype = made.q.dtype
    o = np.full((*made.q.shape[:2], made.v.shape[-1]), np.nan, np.float32).astype(dtype)
    return o, np.full(made.q.shape[:2], np.nan, np.float32)


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("heads,kv_heads,dim", [(8, 2, 64), (4, 4, 128), (6, 1, 40)])
def test_decode(ctx, rng, name, heads, kv_heads, dim):
    dtype, tolerance = DTYPES[name]
    made = batch(rng, [1] * 4, [1, 16, 37, 150], heads=heads, kv_heads=kv_heads, dim=dim, dtype=dtype)
    handle = folio.Decode(
        ctx,
        q_dtype=name,
        num_qo_heads=heads,
        num_kv_heads=kv_heads,
        head_dim_qk=dim,
        page_size=16,
        max_batch_size=4,
        max_kv_len=160,
    )
    assert handle.kernel.startswith("cpu/")
    handle.plan(kv_len=made.kv_len, block_table=made.block_table)
    o, lse = outputs(made)
    handle.run(q=made.q, k=made.k, v=made.v, o=o, lse=lse)
    check(o, lse, expected(made), tolerance)


def prefill(ctx, made, name="float32", **options):
    return folio.Prefill(
        ctx,
        q_dtype=name,
        num_qo_heads=made.q.shape[1],
        num_kv_heads=made.k.shape[-2],
        head_dim_qk=made.q.shape[2],
        head_dim_vo=made.v.shape[-1],
        page_size=made.page_size,
        max_batch_size=8,
        max_num_tokens=len(made.q) + 8,
        max_kv_len=256,
        **options,
    )


MIXED = [1, 20, 5, 1, 33], [40, 20, 77, 1, 100]


@pytest.mark.parametrize("name", DTYPES)
def test_prefill_of_a_mixed_batch(ctx, rng, name):
    dtype, tolerance = DTYPES[name]
    made = batch(rng, *MIXED, heads=8, kv_heads=2, dim=64, dim_vo=32, dtype=dtype)
    handle = prefill(ctx, made, name)
    handle.plan(qo_indptr=made.qo_indptr, kv_len=made.kv_len, block_table=made.block_table)
    o, lse = outputs(made)
    handle.run(q=made.q, k=made.k, v=made.v, o=o, lse=lse)
    check(o, lse, expected(made), tolerance)


def test_page_table_forms(ctx, rng):
    made = batch(rng, *MIXED, heads=4, kv_heads=2, dim=32, page_size=8)
    wanted = expected(made)
    last = np.array([(kv_len - 1) % 8 + 1 for kv_len in made.kv_lens], np.int32)
    csr = {"kv_indptr": made.kv_indptr, "kv_indices": made.kv_indices}
    handle = prefill(ctx, made)
    for table in (
        {"kv_len": made.kv_len, "block_table": made.block_table},
        {**csr, "kv_len": made.kv_len},
        {**csr, "last_page_len": last},
    ):
        handle.plan(qo_indptr=made.qo_indptr, **table)
        o, lse = outputs(made)
        handle.run(q=made.q, k=made.k, v=made.v, o=o, lse=lse)
        check(o, lse, wanted, 2e-6)

    slots = [
        np.concatenate([page * 8 + np.arange(8) for page in pages])[:n] for pages, n in zip(made.pages, made.kv_lens)
    ]
    flat = folio.Prefill(
        ctx,
        q_dtype="float32",
        num_qo_heads=4,
        num_kv_heads=2,
        head_dim_qk=32,
        page_size=1,
        max_batch_size=8,
        max_num_tokens=64,
        max_kv_len=256,
    )
    flat.plan(
        qo_indptr=made.qo_indptr, kv_indptr=indptr(made.kv_lens), kv_indices=np.concatenate(slots).astype(np.int32)
    )
    o, lse = outputs(made)
    flat.run(q=made.q, k=made.k.reshape(-1, 2, 32), v=made.v.reshape(-1, 2, 32), o=o, lse=lse)
    check(o, lse, wanted, 2e-6)


def test_hnd_layout_and_strided_tensors(ctx, rng):
    made = batch(rng, *MIXED, heads=4, kv_heads=2, dim=32)
    handle = prefill(ctx, made, kv_layout="hnd")
    handle.plan(qo_indptr=made.qo_indptr, kv_len=made.kv_len, block_table=made.block_table)
    fused = np.zeros((len(made.q), 3, 4, 32), np.float32)
    fused[:, 1] = made.q
    o, lse = np.zeros((len(made.q), 4, 64), np.float32)[:, :, :32], np.zeros((4, len(made.q)), np.float32).T
    k, v = (np.swapaxes(cache, 1, 2) for cache in (made.k, made.v))
    handle.run(q=fused[:, 1], k=k, v=v, o=o, lse=lse)
    check(o, lse, expected(made), 2e-6)


def test_ragged(ctx, rng):
    qo_lens, kv_lens = MIXED
    k, v = rng.standard_normal((2, sum(kv_lens), 2, 32)).astype(np.float32)
    q = rng.standard_normal((sum(qo_lens), 4, 32)).astype(np.float32)
    handle = folio.Prefill(
        ctx,
        q_dtype="float32",
        num_qo_heads=4,
        num_kv_heads=2,
        head_dim_qk=32,
        kv_storage="ragged",
        max_batch_size=5,
        max_num_tokens=64,
        max_kv_len=256,
    )
    rows, keys = indptr(qo_lens), indptr(kv_lens)
    handle.plan(qo_indptr=rows, kv_indptr=keys)
    o = np.zeros_like(q)
    handle.run(q=q, k=k, v=v, o=o)
    for b in range(5):
        of = slice(keys[b], keys[b + 1])
        wanted, _ = attend(q[rows[b] : rows[b + 1]], k[of], v[of])
        np.testing.assert_allclose(o[rows[b] : rows[b + 1]], wanted, rtol=0, atol=2e-6)


def test_masks_and_scores_of_one_plan(ctx, rng):
    made = batch(rng, *MIXED, heads=4, kv_heads=2, dim=32)
    handle = prefill(ctx, made)
    handle.plan(qo_indptr=made.qo_indptr, kv_len=made.kv_len, block_table=made.block_table)
    slopes = np.array([0.5, 0.25, 0.1, 0.05], np.float32)
    sinks = rng.standard_normal(4).astype(np.float32)
    base = {"q": made.q, "k": made.k, "v": made.v}
    for options, formula in (
        ({"mask_mode": "full"}, {"sees": lambda p, j: True}),
        ({"mask_mode": folio.MaskMode.FULL, "sm_scale": 0.3}, {"sees": lambda p, j: True, "sm_scale": 0.3}),
        ({"flags": "window", "window_left": 7, "window_right": -1}, {"sees": lambda p, j: p - 7 <= j <= p}),
        ({"logits_soft_cap": 1.5}, {"soft_cap": 1.5}),
        ({"alibi_slopes": slopes}, {"slopes": slopes.astype(np.float64)}),
        ({"sinks": sinks}, {"sinks": sinks.astype(np.float64)}),
        ({"attention_chunk_size": 16}, {"sees": lambda p, j: j <= p and j // 16 == p // 16}),
    ):
        o, lse = outputs(made)
        handle.run(**base, o=o, lse=lse, **options)
        check(o, lse, expected(made, **formula), 3e-6)

    o, lse = outputs(made)
    handle.run(**base, o=o, lse=lse, flags=["lse_base_2", folio.RunFlag.WINDOW], window_left=-1, window_right=-1)
    wanted = expected(made)
    check(o, lse * np.log(2), wanted, 3e-6)


def test_score_bias(ctx, rng):
    made = batch(rng, *MIXED, heads=4, kv_heads=2, dim=32)
    handle = prefill(ctx, made)
    handle.plan(qo_indptr=made.qo_indptr, kv_len=made.kv_len, block_table=made.block_table)
    of_rows = rng.standard_normal((4, len(made.q), max(made.kv_lens))).astype(np.float32)
    of_rows[rng.random(of_rows.shape) < 0.1] = -np.inf
    of_trees = rng.standard_normal((max(made.qo_lens),) * 2).astype(np.float16)
    new_keys = ["bias_new_keys", "bias_request_rows"]

    def attended(bias):
        """`bias` is of a request's first row in the batch, its first new key, a head, a row's position and a key."""
        parts = [
            attend(
                made.q[made.rows(b)],
                made.keys(made.k, b),
                made.keys(made.v, b),
                bias=lambda h, p, j, b=b: bias(made.qo_indptr[b], made.kv_lens[b] - made.qo_lens[b], h, p, j),
            )
            for b in range(len(made.kv_lens))
        ]
        return tuple(np.concatenate(part) for part in zip(*parts))

    for tensor, flags, wanted in (
        (of_rows, None, attended(lambda row, past, h, p, j: of_rows[h, row + p - past, j])),
        (of_trees, new_keys, attended(lambda row, past, h, p, j: of_trees[p - past, j - past] if j >= past else 0)),
    ):
        o, lse = outputs(made)
        handle.run(q=made.q, k=made.k, v=made.v, o=o, lse=lse, score_bias=tensor, flags=flags)
        check(o, lse, wanted, 3e-6)
    with pytest.raises(folio.Error, match="score_bias"):
        handle.run(q=made.q, k=made.k, v=made.v, o=o, lse=lse, flags=new_keys)


def test_custom_mask(ctx, rng):
    made = batch(rng, [4, 3], [10, 7], heads=4, kv_heads=2, dim=32)
    handle = prefill(ctx, made)
    handle.plan(qo_indptr=made.qo_indptr, kv_len=made.kv_len, block_table=made.block_table)
    masks = [rng.random((rows, keys)) < 0.6 for rows, keys in zip(made.qo_lens, made.kv_lens)]
    masks[0][1] = False
    wanted = [
        attend(
            made.q[made.rows(b)],
            made.keys(made.k, b),
            made.keys(made.v, b),
            sees=lambda p, j, b=b: masks[b][p - made.kv_lens[b] + made.qo_lens[b], j],
        )
        for b in range(2)
    ]
    wanted = tuple(np.concatenate(part) for part in zip(*wanted))
    o, lse = outputs(made)
    handle.run(
        q=made.q,
        k=made.k,
        v=made.v,
        o=o,
        lse=lse,
        mask_mode="custom_bytes",
        custom_mask=np.concatenate([mask.ravel() for mask in masks]),
    )
    check(o, lse, wanted, 2e-6)
    assert np.isneginf(lse[1]).all() and (o[1] == 0).all()
    bits = np.concatenate([np.packbits(mask.ravel(), bitorder="little") for mask in masks])
    o, lse = outputs(made)
    handle.run(q=made.q, k=made.k, v=made.v, o=o, lse=lse, mask_mode="custom_bits", custom_mask=bits)
    check(o, lse, wanted, 2e-6)


@pytest.mark.parametrize("as_bytes", [False, True])
def test_fp8_cache(ctx, rng, as_bytes):
    made = batch(rng, [1, 9], [30, 9], heads=4, kv_heads=2, dim=32, dtype=np.float16)
    k, v = (cache.astype(np.float32).astype(ml_dtypes.float8_e4m3fn) for cache in (made.k, made.v))
    made.k, made.v = (cache.astype(np.float16) for cache in (k, v))
    handle = prefill(ctx, made, "float16", kv_dtype="float8_e4m3")
    handle.plan(qo_indptr=made.qo_indptr, kv_len=made.kv_len, block_table=made.block_table)
    o, lse = outputs(made)
    if as_bytes:
        k, v = k.view(np.uint8), folio.Tensor(v.view(np.uint8), dtype="float8_e4m3fn")
    handle.run(q=made.q, k=k, v=v, o=o, lse=lse, k_scale=0.5, v_scale=2.0)
    made.v = made.v * np.float16(2)
    check(o, lse, expected(made, sm_scale=0.5 / np.sqrt(32)), 4e-3)


def test_cascade_shares_a_prefix(ctx, rng):
    shared, page_size = 64, 16
    kv_lens, qo_lens = [80, 70, 100, 65], [1, 3, 1, 1]
    made = batch(rng, qo_lens, kv_lens, heads=4, kv_heads=2, dim=32)
    for request in range(1, 4):
        made.pages[request][: shared // page_size] = made.pages[0][: shared // page_size]
    handle = folio.Cascade(
        ctx,
        q_dtype="float32",
        num_qo_heads=4,
        num_kv_heads=2,
        head_dim_qk=32,
        page_size=16,
        max_batch_size=4,
        max_num_tokens=8,
        max_kv_len=128,
    )
    begin, end, length = (np.zeros(3, np.int32) for _ in range(3))
    lengths = {"kv_len": made.kv_len, "block_table": made.block_table}
    found = folio.find_shared_prefixes(
        page_size=16, batch=folio.Batch(**lengths), request_begin=begin, request_end=end, kv_len=length
    )
    assert found == 1 and (begin[0], end[0], length[0]) == (0, 4, shared)
    wanted = expected(made)
    for prefixes in (
        None,
        {"common_prefix_len": shared},
        folio.SharedPrefixes(request_begin=begin[:1], request_end=[4], kv_len=length[:1]),
    ):
        handle.plan(qo_indptr=made.qo_indptr, **lengths, prefixes=prefixes)
        o, lse = outputs(made)
        handle.run(q=made.q, k=made.k, v=made.v, o=o, lse=lse)
        check(o, lse, wanted, 2e-6)
        assert handle.shares() in (0, 1)
    with pytest.raises(TypeError, match="prefixes has no key 'common'; common_prefix_len, request_begin"):
        handle.plan(qo_indptr=made.qo_indptr, **lengths, prefixes={"common": 3})
    with pytest.raises(folio.ShapeError, match="request_begin has 1, request_end has 2"):
        handle.plan(
            qo_indptr=made.qo_indptr,
            **lengths,
            prefixes=folio.SharedPrefixes(request_begin=[0], request_end=[4, 4], kv_len=[64]),
        )


def test_reference_backend_is_the_formula(rng):
    made = batch(rng, *MIXED, heads=4, kv_heads=2, dim=32)
    with folio.Context("reference") as reference:
        handle = prefill(reference, made)
        handle.plan(qo_indptr=made.qo_indptr, kv_len=made.kv_len, block_table=made.block_table)
        o, lse = outputs(made)
        handle.run(q=made.q, k=made.k, v=made.v, o=o, lse=lse)
    check(o, lse, expected(made), 3e-7)
