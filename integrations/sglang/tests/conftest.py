"""Stands in for two of SGLang's classes where SGLang is not installed: the tests import nothing else of it. Runs every
test on both devices."""

import importlib.util
import sys
import types
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parents[2] / "testing"), str(Path(__file__).parent)]

import devices  # noqa: E402


def stand_in(name: str, **contents) -> None:
    module = sys.modules[name] = types.ModuleType(name)
    module.__dict__.update(contents)


if importlib.util.find_spec("sglang") is None:
    import standins

    stand_in("sglang.srt.layers.attention.base_attn_backend", AttentionBackend=type("AttentionBackend", (), {}))
    stand_in("sglang.srt.mem_cache.memory_pool", KVWriteLoc=standins.KVWriteLoc)


@pytest.fixture(autouse=True, params=["cpu", "cuda"])
def device(request):
    """The device of the runner and its batches."""
    yield from devices.one_after_the_other(request.param)
