"""FastDeploy's ops on Folio: which signature this FastDeploy has, and putting the ops in its modules.

The library folio_paddle_ops has each op in FastDeploy's signatures of several versions. They differ in the number of
arguments, or of tensors among them, or in their names, so what the installed op says of its own tells which is meant:
pybind11 writes types into a function's documentation, and registered ops have names, which FastDeploy's wrapper of both
shows. Where an op says nothing, fastdeploy.__version__ decides.
"""

import inspect
import re

import paddle

import folio_paddle_ops

from .rebinding import replace

#: Suffixes of the signatures of each op, by generation, newest first; the last stands for all generations before. What comes
#: after the fourth is of times between versions.
SIGNATURES = {
    "get_block_shape_and_split_kv_block": ("", "", "", "_v3", "_v2", "_v1"),
    "prefill_mla_write_cache": ("", "_v2", "_v2", "_v1"),
    "decode_mla_write_cache": ("", "_v1"),
    "multi_head_latent_attention": ("", "", "", "", "_v1"),
    "merge_prefill_decode_output": ("",),
    "get_position_ids_and_slot_mapping": ("",),
    "append_attention": ("", "", "_v3", "_v3", "_v2"),
    "append_attention_with_output": ("", "", "_v3", "_v3", "_v2"),
    "gqa_rope_write_cache": ("", "", "", "_v1", "_v2"),
    "pre_cache_len_concat": ("", "", "", "_v1"),
    "flash_mask_attention": ("", "", "_v1"),
    "config_for_attention": ("",),
    "decoder_write_cache_with_rope": ("",),
    "decode_unified_attention": ("",),
    "decode_append_attention": ("",),
}
#: The last version of each generation but the newest.
LAST = ([2, 6], [2, 4], [2, 3])


def arguments(function):
    """How many arguments a compiled function takes and how many of them are tensors, or None where it does not say."""
    stated = re.match(r"\w+\((.*?)\)(?: ->|\n|$)", function.__doc__ or "")
    if not stated or "arg0:" not in stated[1]:
        return None
    return len(re.findall(r"\barg\d+:", stated[1])), stated[1].count("Tensor")


def names(function):
    """The names of a registered op's arguments, or of FastDeploy's wrapper of one; None of functions without them."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None
    named = all(parameter.kind is parameter.POSITIONAL_OR_KEYWORD for parameter in parameters)
    return [parameter.name for parameter in parameters] if named else None


def generation(version):
    """How many generations ago a FastDeploy version is: 0 after 2.6, 3 for 2.3 and before. Unknown versions are new."""
    numbers = [int(part) for part in re.findall(r"\d+", version)[:2]]
    if len(numbers) < 2 or numbers[0] == 0:
        return 0
    return sum(numbers <= last for last in LAST)


def choose(name, installed, version):
    """The suffix of the signature that stands in for `installed`."""
    suffixes = SIGNATURES[name]
    if (types := arguments(installed)) is not None:
        return choose_by_types(name, types, version)
    if (own := names(installed)) is not None:
        return choose_by_names(name, own, version)
    return suffixes[min(generation(version), len(suffixes) - 1)]


def choose_by_types(name, wanted, version):
    offered = {arguments(getattr(folio_paddle_ops, f"folio_{name}{suffix}")): suffix for suffix in SIGNATURES[name]}
    if wanted not in offered:
        known = " or ".join(f"{count} arguments, {tensors} of them tensors" for count, tensors in sorted(offered))
        raise RuntimeError(f"FastDeploy {version} has {name} with {wanted[0]} arguments, {wanted[1]} of them tensors; Folio "
                           f"has it with {known}")
    return offered[wanted]


def alike(wanted, own):
    """
    How many arguments have the same name, or None of other signatures: single arguments have had other names from version to
    version, but none has moved. FastDeploy's registered ops may lack the last argument that the function has.
    """
    if len(own) - len(wanted) not in (0, 1):
        return None
    if any(a != b and (a in own or b in wanted) for a, b in zip(wanted, own)):
        return None
    return sum(a == b for a, b in zip(wanted, own))


def choose_by_names(name, wanted, version):
    """As many arguments, most of them of the same name, and those at the same place."""
    offered = {suffix: names(getattr(folio_paddle_ops, f"static_op_folio_{name}{suffix}")) for suffix in SIGNATURES[name]}
    matches = {(len(own) == len(wanted), alike(wanted, own)): suffix for suffix, own in offered.items()
               if 2 * (alike(wanted, own) or 0) >= len(wanted)}
    if not matches:
        known = " or ".join(", ".join(own) for own in offered.values())
        raise RuntimeError(f"FastDeploy {version} has {name} with the arguments {', '.join(wanted)}; Folio has it with {known}")
    return matches[max(matches)]


def op(name, suffix=""):
    """An op as FastDeploy's modules have it: a list of one tensor comes as the tensor. Static graphs get the registered op."""
    function = getattr(folio_paddle_ops, f"folio_{name}{suffix}")
    registered = getattr(folio_paddle_ops, f"static_op_folio_{name}{suffix}")

    def call(*args):
        result = (function if paddle.in_dynamic_mode() else registered)(*args)
        return result[0] if isinstance(result, list) and len(result) == 1 else result

    call.__name__ = name
    call.__doc__ = function.__doc__
    return call


def refuse(function, **options):
    """Refuses options of Paddle's functions that Folio's have no code for. None, 0 and a window without ends ask for nothing."""
    for name, value in options.items():
        asked = tuple(value) if isinstance(value, list) else value
        if isinstance(asked, paddle.Tensor) or asked not in (None, 0, (-1, -1)):
            shown = "given" if isinstance(asked, paddle.Tensor) else asked
            raise ValueError(f"{function}: {name} is {shown}, which has no code on Folio; Paddle's default is accepted")


def flash_attention_v3_varlen(query, key, value, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None,
                              seqused_k=None, softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None,
                              v_descale=None, window_size=(-1, -1), softcap=0.0, num_splits=1, pack_gqa=None, sm_margin=0):
    """
    Paddle's function of this name, which returns a tuple. The maxima are not needed: lengths are read where they are. The
    last three arguments say how to compute, and not what.
    """
    refuse("flash_attention_v3_varlen", seqused_q=seqused_q, seqused_k=seqused_k, qv=qv, q_descale=q_descale,
           k_descale=k_descale, v_descale=v_descale, window_size=window_size, softcap=softcap)
    scale = query.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    return folio_paddle_ops.folio_flash_attention_varlen(query, key, value, cu_seqlens_q, cu_seqlens_k, scale, causal)[0], None


def flash_attn_unpadded(query, key, value, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, scale, dropout=0.0,
                        causal=False, return_softmax=False, fixed_seed_offset=None, rng_name="", training=True, name=None):
    """Paddle's function of this name, for inference. Seeds are of dropout."""
    refuse("flash_attn_unpadded", return_softmax=return_softmax, dropout=dropout if training else 0)
    return folio_paddle_ops.folio_flash_attention_varlen(query, key, value, cu_seqlens_q, cu_seqlens_k, scale, causal)[0], None


#: Whether the last call of FolioMLAAttentionBackend without k has attended prompts over a cached context too.
prompts_were_decoded = False


def merge_rows_with_a_past(encoder_res, decoder_res, seq_lens_encoder, *more):
    """
    merge_prefill_decode_output for FolioMLAAttentionBackend, which models call after its call without k. Where that has
    attended every row with a cached context, these are copied; else those of decodes, as FastDeploy's op does it.
    """
    prompts = paddle.zeros_like(seq_lens_encoder) if prompts_were_decoded else seq_lens_encoder
    return op("merge_prefill_decode_output")(encoder_res, decoder_res, prompts, *more)


def replace_merge():
    """Puts merge_rows_with_a_past in place of the merge in every module of FastDeploy. Early versions have none."""
    from fastdeploy.model_executor.ops import gpu

    installed = getattr(gpu, "merge_prefill_decode_output", None)
    if installed not in (None, merge_rows_with_a_past):
        replace(installed, merge_rows_with_a_past)


def rebind():
    """Puts Folio's ops in every module of FastDeploy. Returns the places of each; nothing is replaced where one is refused."""
    import fastdeploy
    from fastdeploy.model_executor.ops import gpu

    version = getattr(fastdeploy, "__version__", "unknown")
    replacements = []
    for name in SIGNATURES:
        installed = getattr(gpu, name, None)
        if installed is not None:  # an older FastDeploy lacks the newer ops
            replacements.append((name, installed, op(name, choose(name, installed, version))))
    from paddle.nn.functional import flash_attention

    for function in (flash_attention_v3_varlen, flash_attn_unpadded):
        installed = getattr(flash_attention, function.__name__, None)
        if installed is not None:
            replacements.append((function.__name__, installed, function))
    return {name: replace(installed, ours) for name, installed, ours in replacements}
