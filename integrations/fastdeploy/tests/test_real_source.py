"""The plugin in FastDeploy's own Python, where FASTDEPLOY_SOURCE is a checkout of it. Skipped without.

    FASTDEPLOY_SOURCE=/path/to/FastDeploy make test-paddle
"""

import importlib
import inspect
import os
import subprocess
import sys
import types

import numpy as np
import paddle
import pytest

import real_source
from paddle_devices import cpu_only
from steps import CHUNK, DECODE, DRAFT, IDLE, INACTIVE, MIXED, PROMPT, Step, array, tensor
from test_append import Layer
from test_backends import MlaLayer, given

pytestmark = [cpu_only, pytest.mark.skipif(not real_source.ROOT, reason="FASTDEPLOY_SOURCE is not set")]

PATCH = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "fastdeploy.patch")
ATTENTION = "fastdeploy.model_executor.layers.attention"


def module(name):
    return importlib.import_module(name)


@pytest.fixture
def load(monkeypatch, tmp_path):
    """load(FD_ATTENTION_BACKEND="…", …): a process with these variables, in which FastDeploy has loaded its plugins."""

    def fresh(**environment):
        for name in ("FD_ATTENTION_BACKEND", "FD_FOLIO_PREFER", "FD_FOLIO_BACKEND"):
            monkeypatch.setenv(name, environment.get(name, ""))
            if name not in environment:
                monkeypatch.delenv(name)
        monkeypatch.setenv("FD_PLUGINS", "folio")
        monkeypatch.setenv("FD_LOG_DIR", str(tmp_path))
        monkeypatch.setenv("FD_MLA_USE_NAIVE", "1")  # FastDeploy's reading of latents without Triton
        monkeypatch.setattr(paddle.Tensor, "pin_memory", lambda self: self)
        real_source.start(monkeypatch)
        runner = module("fastdeploy.worker.gpu_model_runner")
        module("fastdeploy.model_executor.models")
        return runner

    yield fresh
    real_source.forget()


def config(**model):
    space, real = types.SimpleNamespace, module("fastdeploy.config")
    model = {"head_dim": 32, "num_attention_heads": 6, "num_key_value_heads": 2, "num_hidden_layers": 2, "max_model_len": 128,
             "start_layer_index": 0, "rope_theta": None, "rope_scaling": None, "dtype": "float32", **model}
    parallel = real.ParallelConfig({})
    parallel.tensor_parallel_size = 1
    cache = real.CacheConfig({"block_size": 16})
    return space(model_config=space(**model), cache_config=cache, parallel_config=parallel, quant_config=None,
                 speculative_config=real.SpeculativeConfig({}), scheduler_config=space(max_num_seqs=8),
                 plas_attention_config=None, enable_rope_3d_runtime=False, graph_opt_config=space(full_cuda_graph=True))


def backend_of(runner, fd_config):
    """As the runner makes it."""
    this = types.SimpleNamespace(fd_config=fd_config, attn_backends=[], share_inputs={}, use_cudagraph=False,
                                 **{name: getattr(fd_config, name) for name in (
                                     "model_config", "parallel_config", "scheduler_config", "speculative_config", "cache_config")})
    runner.GPUModelRunner._initialize_attn_backend(this)
    this.attn_backends[0].launch_buffers = this.share_inputs
    return this.attn_backends[0]


MLA = dict(num_attention_heads=3, num_key_value_heads=1, kv_lora_rank=32, qk_rope_head_dim=8, qk_nope_head_dim=24)


def call(function, **arguments):
    """With those of the arguments that this version has."""
    return function(**{name: arguments[name] for name in inspect.signature(function).parameters if name in arguments})


def real_meta(step, caches, backend):
    """FastDeploy's own class."""
    ids = paddle.zeros([step.num_tokens], dtype="int64")
    return call(module("fastdeploy.model_executor.forward_meta").ForwardMeta, input_ids=ids, ids_remove_padding=ids,
                attn_backend=backend, **given(step, caches))


@pytest.mark.parametrize("name, class_name, host", [("FOLIO_ATTN", "FolioAttentionBackend", "APPEND_ATTN"),
                                                    ("FOLIO_MLA_ATTN", "FolioMLAAttentionBackend", "MLA_ATTN")])
def test_fastdeploy_loads_the_plugin_and_selects_its_backend(load, name, class_name, host):
    runner = load(FD_ATTENTION_BACKEND=name)
    assert runner.get_attention_backend().__name__ == class_name
    assert module(ATTENTION).get_attention_backend() is runner.get_attention_backend()
    assert module("fastdeploy.envs").FD_ATTENTION_BACKEND == host
    latent = host == "MLA_ATTN"
    assert getattr(module("fastdeploy.config").CacheConfig({}), "use_mla_cache", latent) is latent  # 2.4 has none


@pytest.mark.parametrize("environment", [{"FD_ATTENTION_BACKEND": "FOLIO_ATTN"},
                                         {"FD_ATTENTION_BACKEND": "MLA_ATTN", "FD_FOLIO_PREFER": "1"}], ids=str)
def test_no_module_keeps_an_op_of_fastdeploys(load, environment):
    """Every op that the checkout has and the plugin knows has a signature that Folio has, and is Folio's wherever it was."""
    load(**environment)
    gpu, ops = module("fastdeploy.model_executor.ops.gpu"), module("folio_fastdeploy.ops")
    known = {"multi_head_latent_attention", "prefill_mla_write_cache", "append_attention", "merge_prefill_decode_output"}
    there = [name for name in ops.SIGNATURES if hasattr(gpu, name)]
    assert known <= set(there)
    for name in there:
        assert getattr(gpu, name).__module__ == "folio_fastdeploy.ops", name
    kept = [f"{place}.{name}" for place, held in list(sys.modules.items()) if place.startswith("fastdeploy.")
            for name, value in list(vars(held).items()) if name.startswith(tuple(there)) and callable(value)
            and getattr(value, "__wrapped__", None) is not None]
    assert kept == []


def test_functions_that_fastdeploy_binds_and_registers_are_one_signature(load):
    """By the types that pybind11 shows, and by the names that the registered op has."""
    load(FD_ATTENTION_BACKEND="APPEND_ATTN")
    ops, bound, registered = module("folio_fastdeploy.ops"), real_source.bound_ops(), real_source.registered_ops()
    for name in ops.SIGNATURES:
        if name in bound and name in registered:
            by_types = ops.choose(name, real_source.bound(name, bound[name]), "checkout")
            assert ops.choose(name, real_source.registered(registered[name]), "checkout") == by_types, name


@pytest.mark.parametrize("name", ["FOLIO_ATTN", "FOLIO_MLA_ATTN"])
def test_caches_have_the_shapes_of_fastdeploys_backend(load, name):
    """As the runner asks for them: by name, and with its own kinds of caches."""
    runner = load(FD_ATTENTION_BACKEND=name)
    backend = backend_of(runner, config(kv_lora_rank=32, qk_rope_head_dim=8, qk_nope_head_dim=24))
    kinds = module("fastdeploy.model_executor.layers.quantization.kv_cache").KvCacheQuantzationTypes
    host = module(ATTENTION).MLAAttentionBackend if name == "FOLIO_MLA_ATTN" else module(ATTENTION).AppendAttentionBackend
    for kind in (None,) if name == "FOLIO_MLA_ATTN" else (None, *(kind.value for kind in (kinds.INT8, kinds.FP8, kinds.INT4_ZP))):
        shapes = backend.get_kv_cache_shape(max_num_blocks=9, kv_cache_quant_type=kind)
        assert shapes == host.get_kv_cache_shape(backend, max_num_blocks=9, kv_cache_quant_type=kind)
    with pytest.raises(NotImplementedError, match="block_wise_fp8"):
        backend.get_kv_cache_shape(max_num_blocks=9, kv_cache_quant_type=kinds.BLOCK_WISE_FP8.value)


@pytest.mark.parametrize("mode", ["MIXED", "DECODE", "EXTEND"])
def test_fastdeploys_attention_layer(load, mode):
    """Its layer, its metadata, its dispatch by mode; bias and RoPE of both styles."""
    runner, step = load(FD_ATTENTION_BACKEND="FOLIO_ATTN"), Step(MIXED, column=True)
    fd_config = config()
    backend = backend_of(runner, fd_config)
    layers = [Layer(step, neox=True, norm=True), Layer(step, bias=True)]
    meta = real_meta(step, [cache for layer in layers for cache in (layer.k_cache, layer.v_cache)], backend)
    meta.forward_mode = module("fastdeploy.model_executor.forward_meta").ForwardMode[mode]
    backend.init_attention_metadata(meta)
    for i, layer in enumerate(layers):
        attention = module(ATTENTION).Attention(fd_config, i, qkv_bias=layer.bias, use_neox_rotary_style=layer.neox,
                                                use_qk_norm=layer.norms[0] is not None, rms_norm_eps=1e-5)
        if attention.use_qk_norm:
            attention.q_norm_weight.set_value(layer.norms[0])
            attention.k_norm_weight.set_value(layer.norms[1])
        meta.rotary_embs = layer.rotary_embs
        out = attention.forward(qkv=layer.qkv, forward_meta=meta)
        np.testing.assert_allclose(array(out), layer.attended(), atol=3e-5, rtol=3e-5)


def deepseek(layer, fd_config, caching):
    """FastDeploy's DeepSeek attention without its projections and norms: they give what the layer of the test holds."""
    source, heads = module("fastdeploy.model_executor.models.deepseek_v3"), layer.heads
    made = source.DeepseekV3MLAAttention.__new__(source.DeepseekV3MLAAttention)
    paddle.nn.Layer.__init__(made)
    pairs = "layernorm(compressed_kv)[0]" in inspect.getsource(made.forward)  # norms give more than their result, from 2.4 on
    as_given = lambda x: (x, None) if pairs else x
    up = tensor(np.concatenate([np.swapaxes(layer.w_uk, 1, 2), layer.w_uv], -1), "float32")  # [H, L, P + V]
    absorb = {"k": tensor(layer.w_uk, "float32"), "v": tensor(layer.w_uv, "float32")}
    for name, value in dict(
            use_gated_attn=False, q_lora_rank=1, kv_lora_rank=layer.latent, qk_rope_head_dim=layer.rope,
            qk_nope_head_dim=layer.nope, qk_head_dim=layer.nope + layer.rope, v_head_dim=layer.value,
            num_attention_heads_tp=heads, layer_id=0, block_size=16, enable_chunked_prefill=caching,
            enable_prefix_caching=caching, fd_config=fd_config, prop=paddle.device.cuda.get_device_properties(),
            qkv_a_proj_with_mqa=lambda x: tensor(np.concatenate([x.numpy(), layer.c, layer.k_pe], -1), "float32"),
            q_a_layernorm=as_given, kv_a_layernorm=as_given, o_proj=lambda x: x,
            q_b_proj=lambda x: tensor(layer.q.reshape(len(layer.q), -1), "float32"),
            rotary_emb=lambda positions, q, k: (q, k),
            kv_b_proj=lambda c: paddle.einsum("tl,hlp->thp", c, up).reshape([c.shape[0], -1]),
            kv_b_proj_bmm=lambda x, proj_type: paddle.bmm(x, absorb[proj_type]),
            mla_attn=module(ATTENTION).Attention(fd_config, 0)).items():
        object.__setattr__(made, name, value)
    return made


def run_deepseek(backend, layer, meta, fd_config, caching):
    step = layer.step
    is_prompt = np.repeat(step.encoder > 0, step.this_time)[:, None]
    backend.init_attention_metadata(meta)
    return call(deepseek(layer, fd_config, caching).forward, forward_meta=meta, position_ids=None,
                hidden_states=paddle.zeros([step.num_tokens, 1]), mask_encoder_batch=tensor(is_prompt, "float32"))


@pytest.mark.parametrize("rows", [[PROMPT], [DECODE, DRAFT], [DECODE, PROMPT, IDLE, DRAFT, INACTIVE], [CHUNK], [CHUNK, DECODE],
                                  [PROMPT, CHUNK, DECODE, INACTIVE, (17, 40, 17), IDLE, (1, 16, 1)]], ids=str)
@pytest.mark.parametrize("caching", [False, True])
def test_fastdeploys_deepseek_attention(load, rows, caching):
    """Its own forward decides what is called, reads latents back where it does that, and merges."""
    runner, step = load(FD_ATTENTION_BACKEND="FOLIO_MLA_ATTN"), Step(rows, padded=0)
    fd_config = config(**MLA)
    backend, layer = backend_of(runner, fd_config), MlaLayer(step)
    meta = real_meta(step, [layer.cache], backend)
    layer.check(run_deepseek(backend, layer, meta, fd_config, caching), backend.softmax_scale)
    backend.init_attention_metadata(meta)


@pytest.mark.parametrize("rows", [[PROMPT], [DECODE, IDLE, (0, 20, 1)], [DECODE, PROMPT, INACTIVE, (0, 1, 1)],
                                  [CHUNK, DECODE, PROMPT, (1, 16, 1)]], ids=str)
def test_fastdeploys_own_backend_on_folios_ops(load, rows):
    """MLA_ATTN with FD_FOLIO_PREFER=1: every op gets its arguments as FastDeploy's Python passes them."""
    runner, step = load(FD_ATTENTION_BACKEND="MLA_ATTN", FD_FOLIO_PREFER="1"), Step(rows, padded=0)
    if CHUNK in rows and not hasattr(module(ATTENTION + ".mla_attention_backend"), "fused_read_cache_and_interleave"):
        pytest.skip("this FastDeploy has no code for prompts over a cached context")
    fd_config = config(**MLA)
    backend, layer = backend_of(runner, fd_config), MlaLayer(step)
    meta = real_meta(step, [layer.cache], backend)
    vars(meta).update(backend.launch_buffers, slot_mapping=paddle.zeros([step.num_tokens], dtype="int64"))
    layer.check(run_deepseek(backend, layer, meta, fd_config, CHUNK in rows), 32 ** -0.5)


def test_the_patch_applies():
    """To the versions that it names: earlier ones have other lines."""
    environment = {**os.environ, "GIT_CEILING_DIRECTORIES": os.path.dirname(os.path.abspath(real_source.ROOT))}
    done = subprocess.run(["git", "apply", "--check", os.path.abspath(PATCH)], cwd=real_source.ROOT, env=environment,
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
