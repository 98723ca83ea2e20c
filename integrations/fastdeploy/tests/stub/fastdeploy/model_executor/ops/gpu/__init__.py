"""
Compiled ops, as pybind11 documents them. They only say that they were called. FastDeploy wraps those that are registered
ops too; here these are the ones of a step.
"""

import functools

#: Arguments, and how many of them are tensors.
OPS = {
    "get_block_shape_and_split_kv_block": (19, 15), "prefill_mla_write_cache": (11, 9), "decode_mla_write_cache": (11, 8),
    "multi_head_latent_attention": (39, 28), "merge_prefill_decode_output": (9, 6),
    "get_position_ids_and_slot_mapping": (8, 7), "append_attention": (54, 36), "append_attention_with_output": (55, 37),
    "gqa_rope_write_cache": (32, 26), "pre_cache_len_concat": (5, 3), "config_for_attention": (11, 7),
    "decoder_write_cache_with_rope": (29, 21), "decode_unified_attention": (33, 26),
    "flash_mask_attention": (11, 8),
}


def compiled(name, arguments, tensors):
    def function(*args):
        return f"FastDeploy's {name}"

    kinds = ["paddle::Tensor"] * tensors + ["int"] * (arguments - tensors)
    names = ", ".join(f"arg{i}: {kind}" for i, kind in enumerate(kinds))
    function.__doc__ = f"{name}({names}) -> List[paddle::Tensor]\n"
    return function


def wrapped(compiled_op, parameters):
    """As FastDeploy's wrapper: it calls the compiled op, and shows the registered one's parameters."""
    registered = eval(f"lambda {parameters}: None")

    @functools.wraps(registered)
    def unified(*args):
        return compiled_op(*args)

    return unified


globals().update({name: compiled(name, *counts) for name, counts in OPS.items()})

LENGTHS = "seq_lens_encoder, seq_lens_decoder, seq_lens_this_time, "
pre_cache_len_concat = wrapped(pre_cache_len_concat, LENGTHS + "max_dec_len, block_size")
get_position_ids_and_slot_mapping = wrapped(
    get_position_ids_and_slot_mapping,
    LENGTHS + "batch_id_per_token, block_tables, position_ids, slot_mapping, block_size")
