"""Stands in for SGLang's base class where SGLang is not installed: the tests need nothing else of it."""

import importlib.util
import sys
import types
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "testing"))

if importlib.util.find_spec("sglang") is None:
    base = types.ModuleType("sglang.srt.layers.attention.base_attn_backend")
    base.AttentionBackend = type("AttentionBackend", (), {})
    sys.modules[base.__name__] = base
