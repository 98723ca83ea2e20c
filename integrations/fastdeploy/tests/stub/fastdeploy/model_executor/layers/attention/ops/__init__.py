"""FastDeploy's functions around compiled ops. Some hold the op under another name, some look for it in every call."""

from fastdeploy.model_executor.ops.gpu import append_attention as append_attention_gpu


def append_attention(*args):
    return append_attention_gpu(*args)


def pre_cache_len_concat(*args):
    from fastdeploy.model_executor.ops.gpu import pre_cache_len_concat

    return pre_cache_len_concat(*args)
