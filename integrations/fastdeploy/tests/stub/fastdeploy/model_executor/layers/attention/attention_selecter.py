"""Which class FD_ATTENTION_BACKEND stands for."""

import importlib

from fastdeploy import envs
from fastdeploy.platforms import _Backend, current_platform


def get_attention_backend():
    path = current_platform.get_attention_backend_cls(_Backend.__members__.get(envs.FD_ATTENTION_BACKEND))
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)
