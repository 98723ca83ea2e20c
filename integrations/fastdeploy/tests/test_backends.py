"""FOLIO_ATTN and FOLIO_MLA_ATTN as FastDeploy's models call them, against float64."""

import types

import numpy as np
import paddle
import pytest

import folio_paddle_ops as ops
import oracle
from formats import FORMATS
from paddle_devices import narrow_on_gpu
from steps import CHUNK, DECODE, DRAFT, IDLE, INACTIVE, MIXED, PROMPT, Step, array, on_host, tensor
from test_append import TOLERANCE, Layer


def given(step, caches, **more):
    """What FastDeploy's metadata of a step holds. Keys are counted as its newest versions count them: with contexts of prompts."""
    encoder, decoder, this_time = step.lengths()
    batch_ids, cu, table = step.tensors()
    keys = [t + (d if e > 0 else 0) for e, d, t in zip(step.encoder, step.decoder, step.this_time)]
    return dict(seq_lens_encoder=encoder, seq_lens_decoder=decoder, seq_lens_this_time=this_time, batch_id_per_token=batch_ids,
                cu_seqlens_q=cu, cu_seqlens_k=tensor([0, *np.cumsum(keys)]), block_tables=table, caches=caches,
                max_len_tensor_cpu=on_host([0] * 9), **more)


def forward_meta(step, caches, **more):
    from fastdeploy.model_executor.forward_meta import ForwardMeta

    return ForwardMeta(None, **given(step, caches, **more))


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
    from fastdeploy.model_executor.forward_meta import ForwardMode

    meta.forward_mode = ForwardMode[mode.upper()]
    backend.init_attention_metadata(meta)
    assert backend.get_attntion_meta().has_prompts and backend.get_attntion_meta().has_decodes
    for i, (layer, window) in enumerate(zip(layers, (0, 7))):
        meta.rotary_embs = layer.rotary_embs
        options = types.SimpleNamespace(layer_id=i, use_neox_rotary_style=layer.neox, q_norm_weight=layer.norms[0],
                                        k_norm_weight=layer.norms[1], qkv_bias=layer.bias, sliding_window=window,
                                        rms_norm_eps=1e-5)
        out = backend.forward(None, None, None, layer.qkv, None, None, options, meta)
        np.testing.assert_allclose(array(out), layer.attended(window=window), atol=3e-5, rtol=3e-5)


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_attention_over_quantised_caches(load, format):
    """Scales and zero points are the layer's, under FastDeploy's names; its quantising ones are one over the others."""
    backend = load(FD_ATTENTION_BACKEND="FOLIO_ATTN").backend()(config(head_dim=32), 2, 6, 32, 64, 16)
    step, dtype = Step([CHUNK, DECODE], column=True), narrow_on_gpu()
    layer = Layer(step, dtype)
    filled = format.fill(layer)
    meta = forward_meta(step, [layer.k_cache, layer.v_cache], rotary_embs=layer.rotary_embs)
    options = types.SimpleNamespace(layer_id=0, cache_quant_type_str=format.quant, sliding_window=0)
    (options.cache_k_out_scale, options.cache_v_out_scale), (options.cache_k_zp, options.cache_v_zp) = (
        filled["scales"], filled["zero_points"])
    options.cache_k_scale, options.cache_v_scale = (1 / scale.cast("float32") for scale in filled["scales"])
    backend.init_attention_metadata(meta)
    out = backend.forward(None, None, None, layer.qkv, None, None, options, meta)
    np.testing.assert_allclose(array(out), layer.attended(caches=format.decoded(layer)), atol=TOLERANCE[dtype],
                               rtol=TOLERANCE[dtype])


def test_cache_shapes(load):
    """Those of FastDeploy's own backends; what has no code is refused."""
    backend = load(FD_ATTENTION_BACKEND="FOLIO_ATTN").backend()(config(head_dim=32), 2, 6, 32)
    assert backend.get_kv_cache_shape(9) == ([9, 2, 16, 32], [9, 2, 16, 32])
    assert backend.get_kv_cache_shape(9, "int4_zp") == ([9, 2, 16, 16], [9, 2, 16, 16])
    assert backend.get_kv_cache_shape(9, "int8") == ([9, 2, 16, 32], [9, 2, 16, 32])
    with pytest.raises(NotImplementedError, match="kv_cache_quant_type is block_wise_fp8; accepted are None, none, float8_e4m3fn"):
        backend.get_kv_cache_shape(9, "block_wise_fp8")
    backend = mla_backend(load)
    assert backend.get_kv_cache_shape(9) == ([9, 1, 16, 40], [])
    with pytest.raises(NotImplementedError, match="kv_cache_quant_type is int8"):
        backend.get_kv_cache_shape(9, "int8")


def mla_backend(load, drafts=True):
    made = config(head_dim=32, kv_lora_rank=32, qk_rope_head_dim=8, qk_nope_head_dim=24)
    made.speculative_config.method = "mtp" if drafts else None
    return load(FD_ATTENTION_BACKEND="FOLIO_MLA_ATTN").backend()(made, 1, 3, 32)


def test_scale_with_yarn(load):
    """The scale of the heads before absorption; DeepSeek-V3's with YaRN is 0.1352337788608801."""
    backend = mla_backend(load)
    assert backend.softmax_scale == pytest.approx(32 ** -0.5)
    from folio_fastdeploy.backends import yarn_mscale

    assert 192 ** -0.5 * yarn_mscale({"factor": 40, "mscale_all_dim": 1}) ** 2 == pytest.approx(0.1352337788608801, rel=1e-12)


def test_models_without_scaled_rope(load):
    """Configurations of some models have no such attribute."""
    made = config(head_dim=32, kv_lora_rank=32, qk_rope_head_dim=8, qk_nope_head_dim=24)
    del made.model_config.rope_scaling
    backend = load(FD_ATTENTION_BACKEND="FOLIO_MLA_ATTN").backend()(made, 1, 3, 32)
    assert backend.softmax_scale == pytest.approx(32 ** -0.5)


@pytest.mark.parametrize("model, run, model_type, expected", [
    ({}, None, "main", False), ({"rope_3d": True}, None, "main", True), ({"use_3d_rope": True}, None, "main", True),
    ({"rope_3d": True}, False, "main", False), ({}, True, "main", True), ({"rope_3d": True}, True, "mtp", False),
])
def test_rope_of_three_axes_is_as_the_configuration_says(load, model, run, model_type, expected):
    """Older ones say it of the model, newer ones of this run; draft models have none. The op refuses it."""
    made = config(head_dim=32, **model)
    made.speculative_config.model_type = model_type
    if run is not None:
        made.enable_rope_3d_runtime = run
    backend = load(FD_ATTENTION_BACKEND="FOLIO_ATTN").backend()(made, 2, 6, 32)
    assert backend.rope_3d is expected and backend.enable_ids_reorder is False


class MlaLayer:
    """Weights and new tokens of an MLA layer, run as FastDeploy's models run it."""

    heads, latent, rope, nope, value = 3, 32, 8, 24, 16

    def __init__(self, step):
        rng, T, self.dtype = np.random.default_rng(2), step.num_tokens, narrow_on_gpu()
        self.step, self.tolerance = step, {"float32": 3e-5, "float16": 3e-2}[self.dtype]
        rounded = lambda *shape: array(tensor(rng.standard_normal(shape), self.dtype))
        self.w_uk = rng.standard_normal((self.heads, self.nope, self.latent)) / 6
        self.w_uv = rng.standard_normal((self.heads, self.latent, self.value)) / 6
        self.q = rounded(T, self.heads, self.nope + self.rope)
        self.c, self.k_pe = rounded(T, self.latent), rounded(T, self.rope)
        self.cache = step.cache([1, "BS", self.latent + self.rope], self.dtype)

    def given(self, values):
        """In the layer's type."""
        return tensor(values, self.dtype)

    def check(self, out, scale):
        np.testing.assert_allclose(array(out), self.expected(scale), atol=self.tolerance, rtol=self.tolerance)

    def up(self, latents, ropes):
        """k and v."""
        k = np.einsum("tl,hpl->thp", latents, self.w_uk)
        return np.concatenate([k, np.repeat(ropes[:, None], self.heads, 1)], -1), np.einsum("tl,hlv->thv", latents, self.w_uv)

    def with_contexts(self):
        """Latents and their rotated parts with the cached contexts of prompts before the new ones, as newer models read them back."""
        step, records, rows = self.step, array(self.cache), []
        for b in range(len(step.rows)):
            context = step.decoder[b] if step.encoder[b] > 0 else 0
            places = [step.place(b, position) for position in range(context)]
            rows += [records[page, 0, offset] for page, offset in places]
            rows += [np.concatenate([self.c[t], self.k_pe[t]]) for t in range(step.cu[b], step.cu[b + 1])]
        return np.split(np.array(rows), [self.latent], axis=1)

    def absorbed(self, call, meta, one_row):
        """[T, H v] of the call without k. `one_row`: as models do it for kernels that take one token of each request."""
        step = self.step
        q_latent = np.einsum("thp,hpl->thl", self.q[..., :self.nope], self.w_uk)
        query = np.concatenate([q_latent, self.q[..., self.nope:]], -1).reshape(step.num_tokens, -1)
        if one_row:
            requests = np.flatnonzero((step.decoder > 0) & (step.this_time > 0))
            picked = np.full([len(step.rows), query.shape[1]], 7.0)  # what was in the memory
            picked[requests], query = query[step.cu[requests]], picked
            meta.cache_seqlens = tensor([1])
        latents = array(call(self.given(query), None, None)).reshape(-1, self.heads, self.latent)
        out = np.einsum("thl,hlv->thv", latents, self.w_uv).reshape(len(latents), -1)
        if not one_row:
            return out
        spread = np.full([step.num_tokens, out.shape[1]], np.nan)
        spread[step.cu[requests]] = out[requests]
        return spread

    def run(self, backend, meta, absorbed_call=True, merge=True, read_back=False, one_row=False):
        """[T, H v]. `merge`: by the op of FastDeploy's newer models; else by the sum of its early ones."""
        T, layer = self.step.num_tokens, types.SimpleNamespace(layer_id=0)
        call = lambda query, k, v: backend.forward(
            query, k, v, None, self.given(self.c), self.given(self.k_pe), layer, meta)
        out = paddle.zeros([T, self.heads * self.value], dtype=self.dtype)
        if meta.max_len_tensor_cpu[1] > 0:
            k, v = self.up(*(self.with_contexts() if read_back else (self.c, self.k_pe)))
            out = call(self.given(self.q), self.given(k), self.given(v)).reshape([T, -1])
        if meta.max_len_tensor_cpu[2] > 0 and absorbed_call:
            decoded = self.given(self.absorbed(call, meta, one_row))
            if not meta.max_len_tensor_cpu[1] > 0:
                return decoded
            if not merge:
                prompt = np.repeat(self.step.encoder > 0, self.step.this_time)
                return out * self.given(prompt[:, None]) + decoded
            from fastdeploy.model_executor.ops import gpu

            gpu.merge_prefill_decode_output(out, decoded, *self.step.lengths(), tensor(self.step.cu), self.heads, self.value, 4)
        return out

    def expected(self, scale):
        """Every row over all keys of its request, in the form with heads."""
        step, records = self.step, array(self.cache)
        out = np.zeros((step.num_tokens, self.heads, self.value))
        for b in range(len(step.rows)):
            tokens = slice(step.cu[b], step.cu[b + 1])
            if tokens.start == tokens.stop:
                continue
            past = np.stack([records[page, 0, offset] for page, offset in
                             (step.place(b, position) for position in range(step.kv_len[b]))])
            for h in range(self.heads):
                k = np.concatenate([past[:, :self.latent] @ self.w_uk[h].T, past[:, self.latent:]], -1)
                out[tokens, h] = oracle.attention(self.q[tokens, h], k, past[:, :self.latent] @ self.w_uv[h], scale)
        return out.reshape(step.num_tokens, -1)


@pytest.mark.parametrize("merge", [True, False])
@pytest.mark.parametrize("rows", [
    [DECODE, PROMPT, IDLE, DRAFT, (3, 0, 3), INACTIVE], [PROMPT], [DECODE, DRAFT],
    [CHUNK], [CHUNK, DECODE], [CHUNK, PROMPT], [PROMPT, CHUNK, DECODE, INACTIVE, DRAFT, (17, 40, 17), IDLE, (1, 16, 1)],
], ids=str)
def test_mla_of_a_step(load, rows, merge):
    """
    R6, R16: prompts in the form with heads; decodes, and prompts over a cached context, absorbed; then put together. Every
    row is as attention over all its keys gives it.
    """
    backend, step = mla_backend(load), Step(rows, padded=0)
    layer = MlaLayer(step)
    meta = forward_meta(step, [layer.cache])
    backend.init_attention_metadata(meta)
    assert backend.attention_metadata.has_prefix_cache is False  # newer models would lengthen k by latents read back
    out = layer.run(backend, meta, merge=merge)
    layer.check(out, backend.softmax_scale)
    backend.init_attention_metadata(meta)


@pytest.mark.parametrize("one_row", [False, True])
@pytest.mark.parametrize("rows", [[CHUNK], [CHUNK, DECODE], [PROMPT, CHUNK], [DECODE, PROMPT, INACTIVE],
                                  [PROMPT, CHUNK, DECODE, INACTIVE, (17, 40, 17), IDLE, (1, 16, 1)]], ids=str)
def test_mla_of_a_model_that_reads_contexts_back(load, rows, one_row):
    """R6: k has the contexts of prompts before their new tokens, so the call with k attends them, and the other one decodes."""
    backend, step = mla_backend(load, drafts=not one_row), Step(rows, padded=0)
    layer = MlaLayer(step)
    meta = forward_meta(step, [layer.cache])
    backend.init_attention_metadata(meta)
    layer.check(layer.run(backend, meta, read_back=True, one_row=one_row), backend.softmax_scale)
    backend.init_attention_metadata(meta)


@pytest.mark.parametrize("rows", [[DECODE, IDLE, (0, 20, 1)], [PROMPT, DECODE, (0, 1, 1), INACTIVE]], ids=str)
def test_mla_of_one_row_for_each_request(load, rows):
    """Newer models pick the decodes' tokens out where the device is not Hopper. Rows of other requests are not read."""
    backend, step = mla_backend(load, drafts=False), Step(rows, padded=0)
    layer = MlaLayer(step)
    meta = forward_meta(step, [layer.cache])
    backend.init_attention_metadata(meta)
    layer.check(layer.run(backend, meta, one_row=True), backend.softmax_scale)


@pytest.mark.parametrize("rows, drafts", [([CHUNK, DECODE], False), ([DRAFT], True)], ids=str)
def test_one_row_of_several_is_refused(load, rows, drafts):
    """R6: the other rows of a prompt over its context, or of a draft, would be missing."""
    backend, step = mla_backend(load, drafts), Step(rows, padded=0)
    layer = MlaLayer(step)
    meta = forward_meta(step, [layer.cache])
    backend.init_attention_metadata(meta)
    with pytest.raises(NotImplementedError, match="the model gives one row for each request, and drafts or prompts over"):
        layer.run(backend, meta, one_row=True)


def test_backends_of_a_step_look_at_its_lengths_once(load):
    """FastDeploy's newest runner has one for each layer. What calls again has a new step."""
    backend, step = mla_backend(load), Step([CHUNK, PROMPT])
    other = type(backend)(config(head_dim=32, kv_lora_rank=32, qk_rope_head_dim=8, qk_nope_head_dim=24), 1, 3, 32)
    meta = forward_meta(step, [])
    backend.init_attention_metadata(meta)
    other.init_attention_metadata(meta)
    assert other.attention_metadata is backend.attention_metadata and backend.attention_metadata.fresh is not None
    meta.seq_lens_decoder.set_value(paddle.zeros_like(meta.seq_lens_decoder))
    backend.init_attention_metadata(meta)
    assert backend.attention_metadata.fresh is None and other.attention_metadata.fresh is not None
    other.init_attention_metadata(meta)
    assert other.attention_metadata is backend.attention_metadata


@pytest.mark.parametrize("rows", [[DECODE], [PROMPT], [CHUNK], [CHUNK, PROMPT, DECODE, DRAFT, IDLE]], ids=str)
@pytest.mark.parametrize("name", ["FOLIO_ATTN", "FOLIO_MLA_ATTN"])
def test_a_step_copies_its_lengths_to_the_host_once(load, monkeypatch, name, rows):
    """
    R1: of all that a step has on the device, one copy goes to the host, that of folio_max_lengths. Python reads no other tensor
    than max_len_tensor_cpu, which FastDeploy keeps on the host.
    """
    backend = load(FD_ATTENTION_BACKEND=name).backend()
    made = backend(config(head_dim=32, kv_lora_rank=32, qk_rope_head_dim=8, qk_nope_head_dim=24), 1, 3, 32)
    step = Step(rows, column=True)
    meta = forward_meta(step, [])
    copies, read = [], []
    max_lengths = ops.folio_max_lengths
    monkeypatch.setattr(ops, "folio_max_lengths", lambda *args: (copies.append(args), max_lengths(*args))[1])
    for reader in ("numpy", "tolist", "item", "cpu", "__array__", "__bool__", "__int__", "__index__", "__float__"):
        original = getattr(paddle.Tensor, reader)
        monkeypatch.setattr(paddle.Tensor, reader, lambda self, *args, original=original, **more: (
            read.append(self), original(self, *args, **more))[1])
    made.init_attention_metadata(meta)
    monkeypatch.undo()
    assert len(copies) == 1 and all(one is meta.max_len_tensor_cpu for one in read)
    metadata = made.get_attntion_meta()
    assert [metadata.has_prompts, metadata.has_decodes, metadata.has_chunks, metadata.has_fresh_prompts] == [
        any(min(e, t) > 0 for e, _, t in rows), any(not e and min(d, t) > 0 for e, d, t in rows),
        any(min(e, d, t) > 0 for e, d, t in rows), any(min(e, t) > 0 and not d for e, d, t in rows)]


def test_padded_rows_of_a_chunk_are_zero(load):
    backend, step = mla_backend(load), Step([PROMPT, CHUNK], padded=3)
    layer = MlaLayer(step)
    meta = forward_meta(step, [layer.cache])
    backend.init_attention_metadata(meta)
    out = layer.run(backend, meta)
    layer.check(out, backend.softmax_scale)


@pytest.mark.parametrize("rows", [[CHUNK], [CHUNK, PROMPT, DECODE]], ids=str)
def test_a_model_that_leaves_out_chunks_is_found(load, rows):
    """R6: a model that makes no absorbed call for prompts over a cached context gets an error, not zeros."""
    backend, step = mla_backend(load), Step(rows, padded=0)
    layer = MlaLayer(step)
    meta = forward_meta(step, [layer.cache])
    backend.init_attention_metadata(meta)
    layer.run(backend, meta, absorbed_call=False)
    with pytest.raises(RuntimeError, match="layer 0 has prompts over a cached context, and its model did not call"):
        layer.run(backend, meta)
    layer.run(backend, meta, absorbed_call=False)
    with pytest.raises(RuntimeError, match="layer 0 has prompts over a cached context"):
        backend.init_attention_metadata(meta)
    backend.init_attention_metadata(meta)


def test_chunks_in_replayed_steps_are_refused(load):
    """R6: a replay makes the calls of its capture, not those that this step needs."""
    backend, step = mla_backend(load), Step([DECODE, CHUNK])
    with pytest.raises(NotImplementedError, match="a prompt of a step that is replayed from a graph has a cached context"):
        backend.init_attention_metadata(forward_meta(step, [], step_use_cudagraph=True))


def test_the_runner_takes_it_for_an_mla_backend(load):
    """FastDeploy's runner asks by class whether a step needs positions and slots."""
    from_runner = mla_backend(load)
    from fastdeploy.model_executor.layers.attention import MLAAttentionBackend

    assert isinstance(from_runner, MLAAttentionBackend)


def test_keys_of_the_context_before_the_new_ones_are_refused(load):
    """R6: where they are not the whole context, so that nothing says which they are."""
    backend, step = mla_backend(load), Step([CHUNK], padded=0)
    dtype = narrow_on_gpu()
    meta, layer = forward_meta(step, [step.cache([1, "BS", 40], dtype)]), types.SimpleNamespace(layer_id=0)
    backend.init_attention_metadata(meta)
    q, k, v = (paddle.zeros([rows, 3, width], dtype=dtype) for rows, width in ((6, 32), (20, 32), (20, 16)))
    with pytest.raises(NotImplementedError, match="k has 20 rows and q 6; accepted are as many as q has, or 25"):
        backend.forward(q, k, v, None, paddle.zeros([6, 32]), paddle.zeros([6, 8]), layer, meta)


@pytest.mark.parametrize("name", ["FOLIO_ATTN", "FOLIO_MLA_ATTN"])
def test_no_backend_asks_for_the_device(load, monkeypatch, name):
    """R15: there is a backend for each layer; what a device can do is the context's, of which there is one per device."""
    def asked(*args, **kwargs):
        raise AssertionError("a backend has asked for the device's properties")

    for function in ("get_device_properties", "get_device_capability", "get_device_name"):
        monkeypatch.setattr(paddle.device.cuda, function, asked)
    backend = load(FD_ATTENTION_BACKEND=name).backend()
    made = backend(config(head_dim=32, kv_lora_rank=32, qk_rope_head_dim=8, qk_nope_head_dim=24), 1, 3, 32)
    made.init_attention_metadata(forward_meta(Step([DECODE, PROMPT]), []))


def test_the_merge_of_other_backends_stays(load):
    """Only FOLIO_MLA_ATTN decodes prompts over a cached context; FastDeploy's own backend has their rows from the prompts' call."""
    load(FD_ATTENTION_BACKEND="MLA_ATTN", FD_FOLIO_PREFER="1")
    from fastdeploy.model_executor.ops import gpu

    step = Step([CHUNK, DECODE], padded=0)
    out, decoded = paddle.zeros([step.num_tokens, 4]), paddle.ones([step.num_tokens, 4])
    gpu.merge_prefill_decode_output(out, decoded, *step.lengths(), tensor(step.cu), 2, 2, 4)
    assert array(out).sum(axis=1).tolist() == [0] * 6 + [4]


@pytest.mark.parametrize("name", ["FOLIO_ATTN", "FOLIO_MLA_ATTN"])
def test_disaggregation_is_refused(load, name):
    """Spec 8.9: signals that would not be sent."""
    backend = load(FD_ATTENTION_BACKEND=name).backend()
    settings = config(head_dim=32, kv_lora_rank=32, qk_rope_head_dim=8, qk_nope_head_dim=24)
    settings.parallel_config.pd_disaggregation_mode = "per_query"
    with pytest.raises(NotImplementedError, match="pd_disaggregation_mode is per_query"):
        backend(settings, 1, 2, 32)
