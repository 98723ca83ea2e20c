"""FOLIO_ATTN and FOLIO_MLA_ATTN as FastDeploy's models call them, against float64."""

import types

import numpy as np
import paddle
import pytest

import oracle
from steps import CHUNK, DECODE, DRAFT, IDLE, INACTIVE, MIXED, PROMPT, Step, array, tensor
from test_append import Layer


class ForwardMeta(types.SimpleNamespace):
    """Attributes that nobody set are None, as FastDeploy's are."""

    def __getattr__(self, name):
        return None


def forward_meta(step, caches, **more):
    encoder, decoder, this_time = step.lengths()
    batch_ids, cu, table = step.tensors()
    made = lambda n: tensor([0] * n)
    return ForwardMeta(
        seq_lens_encoder=encoder, seq_lens_decoder=decoder, seq_lens_this_time=this_time, batch_id_per_token=batch_ids,
        cu_seqlens_q=cu, cu_seqlens_k=cu, block_tables=table, caches=caches, forward_mode="mixed",
        max_len_tensor_cpu=made(9), **more)


def config(**model):
    space = types.SimpleNamespace
    return space(
        model_config=space(max_model_len=128, rope_scaling=None, **model), cache_config=space(block_size=16),
        parallel_config=space(pd_disaggregation_mode="None", max_model_len=128),
        speculative_config=space(method="mtp", num_speculative_tokens=2))


@pytest.mark.parametrize("mode", ["mixed", "extend", "decode"])
def test_attention_of_two_layers(load, mode):
    """One backend, one metadata per step, layers with caches of their own; windows and sinks are the layer's."""
    backend = load(FD_ATTENTION_BACKEND="FOLIO_ATTN").backend()(config(head_dim=32), 2, 6, 32, 64, 16)
    step = Step(MIXED, column=True)
    layers = [Layer(step, neox=True, norm=True), Layer(step, bias=True)]
    meta = forward_meta(step, [cache for layer in layers for cache in (layer.k_cache, layer.v_cache)])
    meta.forward_mode = mode
    backend.init_attention_metadata(meta)
    assert backend.get_attntion_meta().has_prompts and backend.get_attntion_meta().has_decodes
    for i, (layer, window) in enumerate(zip(layers, (0, 7))):
        meta.rotary_embs = layer.rotary_embs
        options = types.SimpleNamespace(layer_id=i, use_neox_rotary_style=layer.neox, q_norm_weight=layer.norms[0],
                                        k_norm_weight=layer.norms[1], qkv_bias=layer.bias, sliding_window=window,
                                        rms_norm_eps=1e-5)
        out = backend.forward(None, None, None, layer.qkv, None, None, options, meta)
        np.testing.assert_allclose(array(out), layer.attended(window=window), atol=3e-5, rtol=3e-5)


def test_cache_shapes(load):
    """Those of FastDeploy's own backends; what has no code is refused."""
    backend = load(FD_ATTENTION_BACKEND="FOLIO_ATTN").backend()(config(head_dim=32), 2, 6, 32)
    assert backend.get_kv_cache_shape(9) == ([9, 2, 16, 32], [9, 2, 16, 32])
    with pytest.raises(NotImplementedError, match="kv_cache_quant_type is int4_zp"):
        backend.get_kv_cache_shape(9, "int4_zp")
    backend = mla_backend(load)
    assert backend.get_kv_cache_shape(9) == ([9, 1, 16, 40], [])
    with pytest.raises(NotImplementedError, match="kv_cache_quant_type is int8"):
        backend.get_kv_cache_shape(9, "int8")


def mla_backend(load, **more):
    model = dict(head_dim=32, kv_lora_rank=32, qk_rope_head_dim=8, qk_nope_head_dim=24, **more)
    return load(FD_ATTENTION_BACKEND="FOLIO_MLA_ATTN").backend()(config(**model), 1, 3, 32)


def test_scale_with_yarn(load):
    """The scale of the heads before absorption; DeepSeek-V3's with YaRN is 0.1352337788608801."""
    backend = mla_backend(load)
    assert backend.softmax_scale == pytest.approx(32 ** -0.5)
    from folio_fastdeploy.backends import yarn_mscale

    assert 192 ** -0.5 * yarn_mscale({"factor": 40, "mscale_all_dim": 1}) ** 2 == pytest.approx(0.1352337788608801, rel=1e-12)


@pytest.mark.parametrize("rows", [[DECODE, PROMPT, IDLE, DRAFT, (3, 0, 3), INACTIVE], [PROMPT], [DECODE, DRAFT]])
def test_mla_of_a_step(load, rows):
    """R16: prompts in the form with heads, decodes absorbed, merged: every row as attention over all its keys gives it."""
    heads, latent, rope, nope, value = 3, 32, 8, 24, 16
    backend, step = mla_backend(load), Step(rows, padded=0)
    rng, T = np.random.default_rng(2), step.num_tokens
    w_uk, w_uv = rng.standard_normal((heads, nope, latent)) / 6, rng.standard_normal((heads, latent, value)) / 6
    q, c, k_pe = rng.standard_normal((T, heads, nope + rope)), rng.standard_normal((T, latent)), rng.standard_normal((T, rope))
    cache = step.cache([1, "BS", latent + rope], "float32")
    meta, layer = forward_meta(step, [cache]), types.SimpleNamespace(layer_id=0)
    backend.init_attention_metadata(meta)
    call = lambda query, k, v: backend.forward(query, k, v, None, tensor(c, "float32"), tensor(k_pe, "float32"), layer, meta)

    out = paddle.zeros([T, heads * value])
    if backend.attention_metadata.has_prompts:
        k = np.concatenate([np.einsum("tl,hpl->thp", c, w_uk), np.repeat(k_pe[:, None], heads, 1)], -1)
        v = np.einsum("tl,hlv->thv", c, w_uv)
        out = call(tensor(q, "float32"), tensor(k, "float32"), tensor(v, "float32")).reshape([T, -1])
    if backend.attention_metadata.has_decodes:
        absorbed = np.concatenate([np.einsum("thp,hpl->thl", q[..., :nope], w_uk), q[..., nope:]], -1)
        latents = array(call(tensor(absorbed.reshape(T, -1), "float32"), None, None)).reshape(T, heads, latent)
        decoded = tensor(np.einsum("thl,hlv->thv", latents, w_uv).reshape(T, -1), "float32")
        from folio_fastdeploy import ops

        ops.op("merge_prefill_decode_output")(out, decoded, *step.lengths(), tensor(step.cu), heads, value, 4)

    records = array(cache)
    for b in range(len(rows)):
        tokens = slice(step.cu[b], step.cu[b + 1])
        if tokens.start == tokens.stop:
            continue
        past = np.stack([records[page, 0, offset] for page, offset in
                         (step.place(b, position) for position in range(step.kv_len[b]))])
        for h in range(heads):
            k = np.concatenate([past[:, :latent] @ w_uk[h].T, past[:, latent:]], -1)
            expected = oracle.attention(q[tokens, h], k, past[:, :latent] @ w_uv[h], backend.softmax_scale)
            np.testing.assert_allclose(array(out).reshape(T, heads, value)[tokens, h], expected, atol=3e-5, rtol=3e-5)


def test_prompts_over_a_cached_context_are_refused_when_they_are_planned(load):
    """R6: k and v of a step hold the new tokens only, so a chunk's past would be left out without a word."""
    backend, step = mla_backend(load), Step([DECODE, CHUNK])
    with pytest.raises(NotImplementedError, match="a prompt of this step has a cached context"):
        backend.init_attention_metadata(forward_meta(step, []))


@pytest.mark.parametrize("name", ["FOLIO_ATTN", "FOLIO_MLA_ATTN"])
def test_disaggregation_is_refused(load, name):
    """Spec 8.9: signals that would not be sent."""
    backend = load(FD_ATTENTION_BACKEND=name).backend()
    settings = config(head_dim=32, kv_lora_rank=32, qk_rope_head_dim=8, qk_nope_head_dim=24)
    settings.parallel_config.pd_disaggregation_mode = "per_query"
    with pytest.raises(NotImplementedError, match="pd_disaggregation_mode is per_query"):
        backend(settings, 1, 2, 32)
