"""
Compiled ops, which only say that they were called. FastDeploy binds each with pybind11 and registers it too; what its modules
get is a wrapper of both, which shows the parameters of the registered one.
"""

import functools

import folio_paddle_ops
from paddle.jit.marker import unified

from folio_fastdeploy.ops import names

#: Arguments, and how many of them are tensors.
OPS = {
    "get_block_shape_and_split_kv_block": (19, 15), "prefill_mla_write_cache": (11, 10), "decode_mla_write_cache": (10, 8),
    "multi_head_latent_attention": (39, 28), "merge_prefill_decode_output": (9, 6),
    "get_position_ids_and_slot_mapping": (8, 7), "append_attention": (54, 36), "append_attention_with_output": (55, 37),
    "gqa_rope_write_cache": (32, 26), "pre_cache_len_concat": (5, 3), "config_for_attention": (11, 7),
    "decoder_write_cache_with_rope": (29, 21), "decode_unified_attention": (33, 26),
    "flash_mask_attention": (11, 8),
}


def compiled(name, arguments, tensors):
    """As pybind11 documents it."""

    def function(*args):
        return f"FastDeploy's {name}"

    kinds = ["paddle::Tensor"] * tensors + ["int"] * (arguments - tensors)
    names = ", ".join(f"arg{i}: {kind}" for i, kind in enumerate(kinds))
    function.__doc__ = f"{name}({names}) -> List[paddle::Tensor]\n"
    return function


def wrapped(compiled_op, parameters):
    """As FastDeploy's wrapper: it calls the compiled op, and shows the registered one's parameters."""
    registered = eval(f"lambda {parameters}: None")

    @unified
    @functools.wraps(registered)
    def unified_op(*args):
        return compiled_op(*args)

    return unified_op


def newest(name):
    """The registered op's parameters are Folio's but for one name."""
    parameters = ", ".join(names(getattr(folio_paddle_ops, f"static_op_folio_{name}")))
    return parameters.replace("compute_dtype", "compute_type")


globals().update({name: wrapped(compiled(name, *counts), newest(name)) for name, counts in OPS.items()})
