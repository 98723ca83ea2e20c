"""Stands in for SGLang's base class where SGLang is not installed: the tests need nothing else of it. Runs every
test on both devices."""

import importlib.util
import sys
import types
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "testing"))

import devices  # noqa: E402

if importlib.util.find_spec("sglang") is None:
    base = types.ModuleType("sglang.srt.layers.attention.base_attn_backend")
    base.AttentionBackend = type("AttentionBackend", (), {})
    sys.modules[base.__name__] = base


@pytest.fixture(autouse=True, params=["cpu", "cuda"])
def device(request):
    """The device of the runner and its batches."""
    yield from devices.one_after_the_other(request.param)
