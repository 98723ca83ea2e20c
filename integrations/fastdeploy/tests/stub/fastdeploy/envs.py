"""Variables of the environment, read when they are asked for."""

import os


def __getattr__(name):
    if name == "FD_ATTENTION_BACKEND":
        return os.environ.get(name, "APPEND_ATTN")
    raise AttributeError(name)
