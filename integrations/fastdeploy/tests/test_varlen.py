"""Paddle's functions of attention over ragged keys, as FastDeploy's modules call them once Folio has taken their place."""

import importlib
import inspect

import numpy as np
import paddle
import pytest
from paddle.nn.functional import flash_attention

import oracle
from steps import array, tensor

LENGTHS = [(3, 3), (0, 0), (4, 9), (1, 1)]  # new tokens and keys of each request
HEADS, DIM = 3, 24
MODULE = "fastdeploy.model_executor.layers.attention.mla_attention_backend"


@pytest.fixture
def call(load):
    """call(name, …): the function in a module that imported it before Folio was registered."""
    load(FD_ATTENTION_BACKEND="MLA_ATTN", FD_FOLIO_PREFER="1")
    module = importlib.import_module(MODULE)
    return lambda name, *args, **options: getattr(module, name)(*args, **options)


def tensors():
    rng = np.random.default_rng(5)
    cu_q, cu_k = ([0, *np.cumsum(part)] for part in zip(*LENGTHS))
    q, k, v = (rng.standard_normal((rows, HEADS, DIM)) for rows in (cu_q[-1], cu_k[-1], cu_k[-1]))
    return q, k, v, cu_q, cu_k


def given():
    return [*(tensor(part, "float32") for part in tensors()[:3]), *(tensor(part) for part in tensors()[3:])]


def expected(scale, causal):
    q, k, v, cu_q, cu_k = tensors()
    out = np.zeros_like(q)
    for b in range(len(LENGTHS)):
        rows, keys = slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b + 1])
        for h in range(HEADS) if rows.stop > rows.start else ():
            out[rows, h] = oracle.attention(q[rows, h], k[keys, h], v[keys, h], scale, causal)
    return out


def test_parameters_are_paddles(load):
    """Whichever of them a module passes by position or by name."""
    load()
    ops = importlib.import_module("folio_fastdeploy.ops")
    for name in ("flash_attention_v3_varlen", "flash_attn_unpadded"):
        parameters = [(p.name, p.default) for p in inspect.signature(getattr(flash_attention, name)).parameters.values()]
        assert [(p.name, p.default) for p in inspect.signature(getattr(ops, name)).parameters.values()] == parameters


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name, options, scale", [
    ("flash_attention_v3_varlen", dict(softmax_scale=0.3), 0.3), ("flash_attention_v3_varlen", {}, DIM ** -0.5),
    ("flash_attention_v3_varlen", dict(softmax_scale=0.3, num_splits=4), 0.3),
    ("flash_attn_unpadded", dict(scale=0.3, training=False), 0.3),
    ("flash_attn_unpadded", dict(scale=0.3, training=False, dropout=0.5), 0.3),
], ids=str)
def test_first_of_the_results_is_attention(call, name, options, scale, causal):
    """The maxima are the largest lengths upstream; they say nothing that the lengths do not, so stale ones change nothing."""
    out = call(name, *given(), max_seqlen_q=0, max_seqlen_k=0, causal=causal, **options)[0]
    np.testing.assert_allclose(array(out), expected(scale, causal), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("name, options, sentence", [
    ("flash_attention_v3_varlen", dict(window_size=(8, 0)), r"window_size is \(8, 0\), which has no code on Folio"),
    ("flash_attention_v3_varlen", dict(window_size=[8, 0]), r"window_size is \(8, 0\)"),
    ("flash_attention_v3_varlen", dict(softcap=30.0), "softcap is 30.0"),
    ("flash_attention_v3_varlen", dict(seqused_k=tensor([1] * 4)), "seqused_k is given"),
    ("flash_attention_v3_varlen", dict(q_descale=paddle.ones([1])), "q_descale is given"),
    ("flash_attn_unpadded", dict(scale=0.3, return_softmax=True), "return_softmax is True"),
    ("flash_attn_unpadded", dict(scale=0.3, dropout=0.5), "dropout is 0.5"),
], ids=str)
def test_what_is_refused(call, name, options, sentence):
    with pytest.raises(ValueError, match=f"{name}: {sentence}"):
        call(name, *given(), 4, 9, **options)
