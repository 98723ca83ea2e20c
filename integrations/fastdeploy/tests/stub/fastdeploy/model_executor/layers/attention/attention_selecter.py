"""Which class FD_ATTENTION_BACKEND stands for."""

import functools
import importlib

from fastdeploy import envs
from fastdeploy.platforms import _Backend, current_platform


@functools.cache
def _get_attn_backend(name):
    path = current_platform.get_attention_backend_cls(_Backend.__members__.get(name))
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def get_attention_backend():
    return _get_attn_backend(envs.FD_ATTENTION_BACKEND)
