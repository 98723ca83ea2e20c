"""What the plugin changes in FastDeploy, and what it leaves."""

import importlib
import importlib.metadata
import logging
import os
import pathlib
import re

import paddle
import pytest
from paddle_devices import cpu_only

pytestmark = cpu_only

ATTENTION = "fastdeploy.model_executor.layers.attention"


def module(name):
    return importlib.import_module(name)


def is_folio(function):
    return getattr(function, "__module__", "").startswith("folio_fastdeploy")


def test_fastdeploy_finds_the_plugin():
    """The entry point of the installed distribution."""
    points = importlib.metadata.entry_points(group="fastdeploy.model_register_plugins")
    assert [point.value for point in points if point.name == "folio"] == ["folio_fastdeploy:register"]


def test_every_variable_is_documented():
    """R12: the README of the distribution names every FD_…, FOLIO_… and FLAGS_… that a source has in quotes."""
    fastdeploy = pathlib.Path(__file__).parents[1]
    sources = [*fastdeploy.glob("folio_fastdeploy/*.py"), fastdeploy / "folio_backend.h", *fastdeploy.glob("../paddle/csrc/*")]
    names = {name for source in sources for name in re.findall(r"""["']((?:FD|FOLIO|FLAGS)_\w+)["']""", source.read_text())}
    assert {"FD_ATTENTION_BACKEND", "FD_FOLIO_BACKEND", "FD_FOLIO_PREFER", "FOLIO_LIBRARY", "FOLIO_NUM_THREADS"} <= names
    described = (fastdeploy / "README.md").read_text()
    assert [name for name in sorted(names) if f"`{name}`" not in described] == []
    assert "## Variables of the environment" in importlib.metadata.metadata("folio-fastdeploy").get_payload()


@pytest.mark.parametrize("name, class_name, latent", [("FOLIO_ATTN", "FolioAttentionBackend", False),
                                                      ("FOLIO_MLA_ATTN", "FolioMLAAttentionBackend", True)])
def test_folio_answers_by_its_names(load, name, class_name, latent):
    """The runner's own binding, made before, answers too; what compares names sees FastDeploy's."""
    runner = load(FD_ATTENTION_BACKEND=name)
    assert runner.backend().__name__ == class_name and runner.mla_cache() is latent
    assert module(ATTENTION).get_attention_backend() is runner.backend()
    assert issubclass(runner.backend(), module(ATTENTION + ".base_attention_backend").AttentionBackend)


def test_a_process_started_from_here_answers_too(load):
    load(FD_ATTENTION_BACKEND="FOLIO_MLA_ATTN")
    inherited = {name: os.environ[name] for name in ("FD_ATTENTION_BACKEND", "FD_FOLIO_BACKEND")}
    assert inherited == {"FD_ATTENTION_BACKEND": "MLA_ATTN", "FD_FOLIO_BACKEND": "FOLIO_MLA_ATTN"}
    assert load(**inherited).backend().__name__ == "FolioMLAAttentionBackend"


def test_a_later_choice_wins_over_an_inherited_one(load):
    runner = load(FD_ATTENTION_BACKEND="APPEND_ATTN", FD_FOLIO_BACKEND="FOLIO_MLA_ATTN")
    assert runner.backend().__name__ == "AppendAttentionBackend"


@pytest.mark.parametrize("environment", [{}, {"FD_ATTENTION_BACKEND": "MLA_ATTN"},
                                         {"FD_ATTENTION_BACKEND": "APPEND_ATTN", "FD_FOLIO_PREFER": "1"}])
def test_fastdeploy_stays_as_it_is(load, environment):
    runner = load(**environment)
    assert not is_folio(runner.backend()) and not is_folio(module("fastdeploy.model_executor.ops.gpu").append_attention)


def test_a_wrong_name_is_refused_with_all_names(load):
    """R11."""
    with pytest.raises(ValueError) as refusal:
        load(FD_ATTENTION_BACKEND="FOLIO_MLA")
    for name in ("FOLIO_MLA;", "APPEND_ATTN", "TRITON_MLA_ATTN", "FOLIO_ATTN", "FOLIO_MLA_ATTN"):
        assert name in str(refusal.value)


def test_preferred_ops_are_replaced_wherever_they_were_imported(load):
    """Bindings of `from … import`, under other names too; Paddle itself keeps its functions."""
    runner = load(FD_ATTENTION_BACKEND="MLA_ATTN", FD_FOLIO_PREFER="1")
    assert runner.backend().__name__ == "MLAAttentionBackend"
    mla, append = module(ATTENTION + ".mla_attention_backend"), module(ATTENTION + ".append_attn_backend")
    gpu = module("fastdeploy.model_executor.ops.gpu")
    assert all(is_folio(getattr(gpu, name)) for name in gpu.OPS)
    assert mla.multi_head_latent_attention_cuda is gpu.multi_head_latent_attention
    around = module(ATTENTION + ".ops")
    assert append.append_attention is around.append_attention and around.append_attention_gpu is gpu.append_attention
    assert is_folio(mla.flash_attn_unpadded) and not is_folio(module("paddle.nn.functional.flash_attention").flash_attn_unpadded)
    cu, *_ = around.pre_cache_len_concat(*[paddle.to_tensor([0, 4], dtype="int32")] * 3, 8, 16)
    assert cu.numpy().tolist() == [0, 0, 8]


def test_the_newest_decode_path_can_be_preferred(load):
    """FastDeploy's DECODE_UNIFIED_ATTN keeps its backend, and its three ops run on Folio."""
    load(FD_ATTENTION_BACKEND="DECODE_UNIFIED_ATTN", FD_FOLIO_PREFER="1")
    gpu = module("fastdeploy.model_executor.ops.gpu")
    for name in ("config_for_attention", "decoder_write_cache_with_rope", "decode_unified_attention"):
        assert is_folio(getattr(gpu, name))


def test_a_preferred_backend_of_triton_functions_is_replaced_whole(load):
    runner = load(FD_ATTENTION_BACKEND="TRITON_MLA_ATTN", FD_FOLIO_PREFER="1")
    assert runner.backend().__name__ == "FolioMLAAttentionBackend"
    assert os.environ["FD_ATTENTION_BACKEND"] == "TRITON_MLA_ATTN"


@pytest.mark.parametrize("name, counts, suffix", [
    ("get_block_shape_and_split_kv_block", (19, 15), ""), ("get_block_shape_and_split_kv_block", (19, 14), "_v2"),
    ("get_block_shape_and_split_kv_block", (12, 7), "_v1"), ("multi_head_latent_attention", (45, 34), "_v1"),
    ("get_block_shape_and_split_kv_block", (20, 15), "_v3"), ("prefill_mla_write_cache", (11, 10), ""),
    ("prefill_mla_write_cache", (11, 9), "_v2"), ("prefill_mla_write_cache", (10, 8), "_v1"),
    ("decode_mla_write_cache", (10, 8), ""), ("decode_mla_write_cache", (11, 8), "_v1"), ("append_attention", (54, 36), ""), ("append_attention", (53, 36), "_v3"),
    ("append_attention", (52, 36), "_v2"), ("append_attention_with_output", (54, 37), "_v3"),
    ("append_attention_with_output", (55, 37), ""), ("append_attention_with_output", (53, 37), "_v2"),
    ("gqa_rope_write_cache", (31, 26), "_v2"), ("gqa_rope_write_cache", (28, 24), "_v1"),
    ("pre_cache_len_concat", (4, 2), "_v1"), ("flash_mask_attention", (11, 8), ""), ("flash_mask_attention", (14, 8), "_v1"),
])
def test_signatures_are_found_by_their_arguments(load, name, counts, suffix):
    load()
    ops, gpu = module("folio_fastdeploy.ops"), module("fastdeploy.model_executor.ops.gpu")
    assert ops.choose(name, gpu.compiled(name, *counts), "0.0.0") == suffix


LENGTHS = "seq_lens_encoder, seq_lens_decoder, seq_lens_this_time, "
TILES = ("encoder_batch_ids, encoder_tile_ids_per_batch, encoder_num_blocks_x_cpu, kv_batch_ids, kv_tile_ids_per_batch, "
         "kv_num_blocks_x_cpu, ")
LATENTS = "kv_nope, kv_pe, kv_cache, seq_lens, {}, batch_id_per_token, cu_seqlens_q, block_tables, "
BLOCKS = "encoder_block_shape_q, decoder_block_shape_q, group_size, block_size"


@pytest.mark.parametrize("name, parameters, suffix", [
    ("get_block_shape_and_split_kv_block", LENGTHS + "decoder_batch_ids, decoder_tile_ids_per_batch, decoder_num_blocks_cpu, "
     "decoder_num_blocks_device, decoder_chunk_size_device, max_len_tensor_cpu, " + TILES + BLOCKS, ""),
    ("get_block_shape_and_split_kv_block", LENGTHS + "decoder_batch_ids, decoder_tile_ids_per_batch, decoder_num_blocks_x_cpu, "
     "max_len_tensor_cpu, " + TILES + "max_len_kv_cpu, " + BLOCKS + ", decoder_step_token_num", "_v2"),
    ("get_block_shape_and_split_kv_block", LENGTHS + "decoder_batch_ids, decoder_tile_ids_per_batch, decoder_num_blocks_x_cpu, "
     "max_len_tensor_cpu, " + BLOCKS + ", decoder_step_token_num", "_v1"),
    ("pre_cache_len_concat", LENGTHS + "max_dec_len, block_size", ""),
    ("pre_cache_len_concat", "seq_lens_decoder, seq_lens_this_time, max_dec_len, block_size", "_v1"),
    ("flash_mask_attention", "q_input, k_input, v_input, cu_seq_q, cu_seq_k, seq_len_encoder, attn_out, mask, head_num, "
     "kv_head_num, head_dim, max_seq_len, q_token_num, k_token_num", "_v1"),
    ("get_block_shape_and_split_kv_block", LENGTHS + "decoder_batch_ids, decoder_tile_ids_per_batch, decoder_num_blocks_cpu, "
     "decoder_num_blocks_device, decoder_chunk_size_device, max_len_tensor_cpu, " + TILES + BLOCKS + ", decoder_step_token_num",
     "_v3"),
    ("prefill_mla_write_cache", LATENTS.format("seq_lens_decoder") + "slot_mapping, kv_signal_data, cache_quant_type_str", ""),
    ("prefill_mla_write_cache", LATENTS.format("seq_lens_decoder") + "kv_signal_data, cache_quant_type_str, max_seq_len", "_v2"),
    ("prefill_mla_write_cache", LATENTS.format("seq_lens_decoder") + "cache_quant_type_str, max_seq_len", "_v1"),
    ("decode_mla_write_cache", LATENTS.format("seq_lens_encoder") + "cache_quant_type_str, speculate_decoder", ""),
    ("decode_mla_write_cache", LATENTS.format("seq_lens_encoder") + "cache_quant_type_str, max_seq_len, speculate_decoder", "_v1"),
    # FastDeploy's 2.3 registers it without rope_3d, which its function has.
    ("gqa_rope_write_cache", "qkv, key_cache, value_cache, cu_seqlens_q, cu_seqlens_k, rotary_embs, seq_lens_this_time, "
     "seq_lens_encoder, seq_lens_decoder, batch_id_per_token, block_tables, kv_batch_ids, kv_tile_ids_per_batch, kv_num_blocks, "
     "cache_batch_ids, cache_tile_ids_per_batch, cache_num_blocks, cache_k_quant_scales, cache_v_quant_scales, "
     "cache_k_dequant_scales, cache_v_dequant_scales, cache_k_zp, cache_v_zp, kv_signal_data, kv_token_num, max_seq_len, "
     "cache_quant_type", "_v1"),
])
def test_signatures_are_found_by_the_names_that_a_wrapper_shows(load, name, parameters, suffix):
    """Two of one length too, and where single arguments have other names than Folio's."""
    load()
    ops, gpu = module("folio_fastdeploy.ops"), module("fastdeploy.model_executor.ops.gpu")
    assert ops.choose(name, gpu.wrapped(gpu.compiled(name, 1, 1), parameters), "0.0.0") == suffix


@pytest.mark.parametrize("name, parameters, known", [
    ("pre_cache_len_concat", "a, b, c", "seq_lens_encoder, .*, block_size or seq_lens_decoder, "),
    ("pre_cache_len_concat", "max_dec_len, " + LENGTHS + "block_size", "seq_lens_encoder, "),  # as many, in other places
    # Three of eleven have moved.
    ("prefill_mla_write_cache", LATENTS.format("seq_lens_decoder") + "max_seq_len, cache_quant_type_str, kv_signal_data", "kv_nope, "),
])
def test_a_wrapper_of_an_unknown_signature_is_refused(load, name, parameters, known):
    load()
    ops, gpu = module("folio_fastdeploy.ops"), module("fastdeploy.model_executor.ops.gpu")
    with pytest.raises(RuntimeError, match=f"FastDeploy 9.9 has {name} with the arguments {parameters}; Folio has it with {known}"):
        ops.choose(name, gpu.wrapped(gpu.compiled(name, 1, 1), parameters), "9.9")


def test_every_signature_is_there_for_static_graphs_too(load):
    load()
    ops = module("folio_fastdeploy.ops")
    for name, suffixes in ops.SIGNATURES.items():
        for suffix in suffixes:
            assert all(hasattr(ops.folio_paddle_ops, f"{kind}{name}{suffix}") for kind in ("folio_", "static_op_folio_"))


@pytest.mark.parametrize("version, suffixes", [
    ("2.3.0", ("_v3", "_v1", "_v1", "", "_v3", "_v1", "_v1")), ("2.4.1", ("", "_v2", "_v1", "", "_v3", "", "_v1")),
    ("2.5.0", ("", "_v2", "_v1", "", "", "", "")), ("2.6.0", ("", "_v2", "_v1", "", "", "", "")),
    *((version, ("",) * 7) for version in ("2.7.0", "3.0", "0.0.0.dev", "unknown")),
])
def test_signatures_are_found_by_version_otherwise(load, version, suffixes):
    """As the branches of FastDeploy's versions have them (test_real_source)."""
    load()
    ops = module("folio_fastdeploy.ops")
    names = ("get_block_shape_and_split_kv_block", "prefill_mla_write_cache", "decode_mla_write_cache",
             "multi_head_latent_attention", "append_attention", "gqa_rope_write_cache", "flash_mask_attention")
    assert tuple(ops.choose(name, lambda *args: None, version) for name in names) == suffixes


def test_an_unknown_signature_is_refused_before_anything_is_replaced(load, monkeypatch, caplog):
    """An error where Folio was asked for; a warning where it was preferred."""
    gpu_module = "fastdeploy.model_executor.ops.gpu"
    load()
    gpu = module(gpu_module)
    changed = gpu.compiled("pre_cache_len_concat", 6, 3)
    ops = module("folio_fastdeploy.ops")
    monkeypatch.setattr(gpu, "pre_cache_len_concat", changed)
    before = gpu.append_attention
    with pytest.raises(RuntimeError, match="FastDeploy 2.5.0 has pre_cache_len_concat with 6 arguments, 3 of them tensors; Folio has it with 4"):
        ops.rebind()
    assert gpu.append_attention is before
    monkeypatch.setenv("FD_ATTENTION_BACKEND", "MLA_ATTN")
    monkeypatch.setenv("FD_FOLIO_PREFER", "1")
    with caplog.at_level(logging.WARNING):
        module("folio_fastdeploy").register()
    assert "FastDeploy keeps its own ops: FastDeploy 2.5.0 has pre_cache_len_concat" in caplog.text
    assert gpu.append_attention is before
