"""How SGLang finds the backends, with stand-ins for its tables and its plugins' hooks."""

import functools
import sys
from enum import Enum
from types import ModuleType, SimpleNamespace

import pytest
from standins import Engine, MlaEngine

from folio_sglang import register
from folio_sglang.backend import FolioAttnBackend
from folio_sglang.drafts import FolioMultiStepDraftBackend
from folio_sglang.mla import FolioMLAAttnBackend


class HookType(Enum):
    AROUND = "around"


class HookRegistry:
    """As SGLang's: hooks by the dotted name of a function, applied when all plugins were called."""

    def __init__(self):
        self.hooks = []

    def register(self, target, hook, hook_type):
        assert hook_type is HookType.AROUND
        self.hooks.append((target, hook))


class Factory:
    """As SGLang's DraftBackendFactory: a table for decodes and one for extends."""

    def __init__(self, runner, backend, topk=2, steps=4):
        self.draft_model_runner, self.backend, self.topk, self.speculative_num_steps = runner, backend, topk, steps

    def _create_backend(self, backend_name, backend_map, error_template, stamps_children=False):
        if self.backend not in backend_map:
            raise ValueError(error_template.format(backend_type=self.backend))
        stamp, backend = backend_map[self.backend]()
        for one in [backend, *(backend.attn_backends if stamps_children else ())]:
            one.decode_attention_backend_str = stamp
        return backend

    def create_decode_backend(self):
        return self._create_backend("decode", {"own": self._own}, "no {backend_type}", stamps_children=True)

    def create_draft_extend_backend(self):
        return self._create_backend("prefill", {"own": self._own}, "no {backend_type}")

    def _own(self):
        return "own", SimpleNamespace(attn_backends=[])


@pytest.fixture
def sglang(monkeypatch):
    """SGLang's modules, and the factory with the hooks that were registered."""
    choices, backends = ["own"], {}
    modules = {
        "arg_groups.choices": dict(ATTENTION_BACKEND_CHOICES=choices),
        "layers.attention.attention_registry": dict(ATTENTION_BACKENDS=backends),
        "plugins.hook_registry": dict(HookRegistry=HookRegistry(), HookType=HookType),
    }
    for name, contents in modules.items():
        module = ModuleType(f"sglang.srt.{name}")
        module.__dict__.update(contents)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    register()
    register()
    ((target, hook),) = modules["plugins.hook_registry"]["HookRegistry"].hooks
    assert target == "sglang.srt.speculative.draft_utils.DraftBackendFactory._create_backend"
    original = Factory._create_backend
    hooked = functools.wraps(original)(lambda *args, **kwargs: hook(original, *args, **kwargs))
    monkeypatch.setattr(Factory, "_create_backend", hooked)
    return SimpleNamespace(choices=choices, backends=backends)


@pytest.mark.parametrize("engine, kind", [(Engine, FolioAttnBackend), (MlaEngine, FolioMLAAttnBackend)])
def test_the_backend_of_a_model(sglang, engine, kind):
    assert sglang.choices == ["own", "folio"]
    assert type(sglang.backends["folio"](engine().runner)) is kind


@pytest.mark.parametrize("engine, kind", [(Engine, FolioAttnBackend), (MlaEngine, FolioMLAAttnBackend)])
def test_the_backends_of_a_draft(sglang, engine, kind):
    factory = Factory(engine().runner, "folio")
    decodes = factory.create_decode_backend()
    assert type(decodes) is FolioMultiStepDraftBackend and (decodes.topk, decodes.speculative_num_steps) == (2, 4)
    assert [type(one) for one in decodes.attn_backends] == [kind] * 3
    assert {one.decode_attention_backend_str for one in decodes.attn_backends} == {"folio"}
    assert type(factory.create_draft_extend_backend()) is kind


def test_drafts_of_other_backends_are_made_as_before(sglang):
    assert Factory(Engine().runner, "own").create_decode_backend().decode_attention_backend_str == "own"
    with pytest.raises(ValueError, match="no other"):
        Factory(Engine().runner, "other").create_draft_extend_backend()
