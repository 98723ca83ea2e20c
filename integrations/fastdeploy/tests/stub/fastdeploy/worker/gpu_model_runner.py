"""A runner, which has imported the selection before any plugin, and compares names itself."""

from fastdeploy import envs
from fastdeploy.model_executor.layers.attention import get_attention_backend


def backend():
    return get_attention_backend()


def mla_cache():
    return envs.FD_ATTENTION_BACKEND == "MLA_ATTN"
