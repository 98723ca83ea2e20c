"""Tensors of torch, Paddle and JAX on the CPU: each skipped where it is not installed. Other tests have NumPy's."""

import numpy as np
import pytest
from batches import batch
from oracle import attend

import folio


def decode(ctx, made, tensor, dtype, **kv):
    """Attention of a decode batch whose arrays all come from `tensor`, over caches that folio.kv_append has filled."""
    o = tensor(np.zeros(made.q.shape, np.float32), dtype)
    lse = tensor(np.zeros(made.q.shape[:2], np.float32), "float32")
    caches = [tensor(np.zeros(made.k.shape, np.float32), kv.get("kv_dtype", dtype)) for _ in range(2)]
    for b, (pages, length) in enumerate(zip(made.pages, made.kv_lens)):
        tokens = np.arange(length)
        slots = tensor(pages[tokens // made.page_size] * made.page_size + tokens % made.page_size, "int64")
        key, value = (tensor(made.keys(cache, b).astype(np.float32), dtype) for cache in (made.k, made.v))
        folio.kv_append(ctx, key=key, value=value, k_cache=caches[0], v_cache=caches[1], slot_mapping=slots)
    handle = folio.Decode(
        ctx,
        q_dtype=dtype,
        num_qo_heads=4,
        num_kv_heads=2,
        head_dim_qk=32,
        page_size=16,
        max_batch_size=4,
        max_kv_len=64,
        **kv,
    )
    handle.plan(kv_len=tensor(made.kv_len, "int32"), block_table=tensor(made.block_table, "int32"))
    handle.run(q=tensor(made.q, dtype), k=caches[0], v=caches[1], o=o, lse=lse)
    return o, lse


def made_for(rng):
    return batch(rng, [1] * 3, [5, 33, 64], heads=4, kv_heads=2, dim=32)


def check(made, o, tolerance):
    for b in range(3):
        wanted, _ = attend(made.q[b : b + 1], made.keys(made.k, b), made.keys(made.v, b))
        np.testing.assert_allclose(o[b : b + 1], wanted, rtol=0, atol=tolerance)


TYPES = [("float32", None, 2e-6), ("float16", None, 4e-3), ("bfloat16", None, 3e-2), ("float16", "float8_e4m3fn", 0.15)]


@pytest.mark.parametrize("dtype,kv_dtype,tolerance", TYPES)
def test_torch(ctx, rng, dtype, kv_dtype, tolerance):
    torch = pytest.importorskip("torch")

    def tensor(array, dtype):
        return torch.from_numpy(np.ascontiguousarray(array)).to(getattr(torch, dtype))

    made = made_for(rng)
    o, _ = decode(ctx, made, tensor, dtype, **({"kv_dtype": kv_dtype} if kv_dtype else {}))
    check(made, o.float().numpy(), tolerance)


def test_views_and_refusals_of_torch():
    torch = pytest.importorskip("torch")
    whole = torch.zeros(4, 6, 8, dtype=torch.bfloat16)
    tensor = folio.Tensor(whole[1:, ::2, :4].transpose(0, 1))
    assert (tensor.shape, tensor.strides, tensor.dtype) == ((3, 3, 4), (16, 48, 1), "bfloat16")
    assert folio.Tensor(whole.view(torch.uint8), dtype=torch.float8_e5m2).dtype == "float8_e5m2"
    assert folio.Tensor(torch.nn.Parameter(torch.zeros(2), requires_grad=False)).shape == (2,)
    parameter = torch.nn.Parameter(torch.zeros(2))
    with torch.no_grad():
        folio.Tensor(parameter)
    for wrong, sentence in (
        (parameter, "array requires grad, and Folio computes no gradients"),
        (torch.zeros(2, device="meta"), "array is on meta; tensors on cpu and cuda"),
        (torch.zeros(2, 2).to_sparse(), "array has the layout torch.sparse_coo"),
        (torch.zeros(2, dtype=torch.complex64), "array has elements of type torch.complex64"),
        (torch.zeros(2, dtype=torch.complex64).conj().imag, "array is a view whose numbers have to be negated"),
    ):
        with pytest.raises(folio.InvalidArgumentError, match=sentence):
            folio.Tensor(wrong)


@pytest.mark.parametrize("dtype,kv_dtype,tolerance", TYPES)
def test_paddle(ctx, rng, dtype, kv_dtype, tolerance):
    paddle = pytest.importorskip("paddle")

    def tensor(array, dtype):
        return paddle.to_tensor(np.ascontiguousarray(array)).astype(dtype)

    made = made_for(rng)
    o, _ = decode(ctx, made, tensor, dtype, **({"kv_dtype": kv_dtype} if kv_dtype else {}))
    check(made, o.astype("float32").numpy(), tolerance)
    view = folio.Tensor(paddle.zeros([4, 6, 8])[1:, ::2].transpose([1, 0, 2]))
    assert (view.shape, view.strides) == ((3, 3, 8), (16, 48, 1))


def test_jax(ctx, rng):
    jax = pytest.importorskip("jax")
    made = made_for(rng)
    handle = folio.Decode(
        ctx,
        q_dtype="bfloat16",
        num_qo_heads=4,
        num_kv_heads=2,
        head_dim_qk=32,
        page_size=16,
        max_batch_size=4,
        max_kv_len=64,
    )
    q, k, v = (jax.numpy.asarray(np.nan_to_num(array), dtype="bfloat16") for array in (made.q, made.k, made.v))
    handle.plan(kv_len=jax.numpy.asarray(made.kv_len), block_table=jax.numpy.asarray(made.block_table))
    o = np.zeros(made.q.shape, q.dtype)
    handle.run(q=q, k=k, v=v, o=o)
    check(made, o.astype(np.float32), 3e-2)
    with pytest.raises(folio.InvalidArgumentError, match="o is read-only"):
        handle.run(q=q, k=k, v=v, o=jax.numpy.zeros(made.q.shape, dtype="bfloat16"))
