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
    assert append.append_attention is gpu.append_attention
    assert is_folio(mla.flash_attn_unpadded) and not is_folio(module("paddle.nn.functional.flash_attention").flash_attn_unpadded)
    cu, *_ = gpu.pre_cache_len_concat(*[paddle.to_tensor([0, 4], dtype="int32")] * 3, 8, 16)
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
    ("prefill_mla_write_cache", (10, 8), "_v1"), ("append_attention", (54, 36), ""), ("append_attention", (53, 36), "_v3"),
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
     "kv_head_num, head_dim, max_seq_len, max_enc_len_this_time, max_dec_len_this_time", "_v1"),
])
def test_signatures_are_found_by_the_names_that_a_wrapper_shows(load, name, parameters, suffix):
    """Two of one length too, and where single arguments have other names than Folio's."""
    load()
    ops, gpu = module("folio_fastdeploy.ops"), module("fastdeploy.model_executor.ops.gpu")
    assert ops.choose(name, gpu.wrapped(gpu.compiled(name, 1, 1), parameters), "0.0.0") == suffix


def test_a_wrapper_of_an_unknown_signature_is_refused(load):
    load()
    ops, gpu = module("folio_fastdeploy.ops"), module("fastdeploy.model_executor.ops.gpu")
    with pytest.raises(RuntimeError, match="FastDeploy 9.9 has pre_cache_len_concat with 3 arguments; Folio has it with 4 or 5"):
        ops.choose("pre_cache_len_concat", gpu.wrapped(gpu.compiled("pre_cache_len_concat", 5, 3), "a, b, c"), "9.9")
    moved = "max_dec_len, " + LENGTHS + "block_size"  # as many, in other places
    with pytest.raises(RuntimeError, match="with the arguments max_dec_len, seq_lens_encoder, .*; Folio has it with seq_lens_enc"):
        ops.choose("pre_cache_len_concat", gpu.wrapped(gpu.compiled("pre_cache_len_concat", 5, 3), moved), "9.9")


def test_every_signature_is_there_for_static_graphs_too(load):
    load()
    ops = module("folio_fastdeploy.ops")
    for name, suffixes in ops.SIGNATURES.items():
        for suffix in suffixes:
            assert all(hasattr(ops.folio_paddle_ops, f"{kind}{name}{suffix}") for kind in ("folio_", "static_op_folio_"))


@pytest.mark.parametrize("version, suffix", [("2.1.0", "_v1"), ("2.2.1", "_v1"), ("2.3.0", "_v2"), ("2.4.0", ""),
                                             ("3.0", ""), ("0.0.0.dev", ""), ("unknown", "")])
def test_signatures_are_found_by_version_otherwise(load, version, suffix):
    load()
    ops = module("folio_fastdeploy.ops")
    assert ops.choose("get_block_shape_and_split_kv_block", lambda *args: None, version) == suffix
    assert ops.choose("merge_prefill_decode_output", lambda *args: None, version) == ""
    appended = {"2.1.0": "_v2", "2.2.1": "_v2", "2.3.0": "_v2", "2.4.0": "_v3"}.get(version, "")
    for name in ("append_attention", "append_attention_with_output"):
        assert ops.choose(name, lambda *args: None, version) == appended


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
