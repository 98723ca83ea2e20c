"""The generated modules against the header, and both against the library."""

import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import folio

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from generator.docs import camel  # noqa: E402
from generator.fields import Fields  # noqa: E402
from generator.header import read  # noqa: E402

HEADER = read()
FIELDS = Fields(HEADER)

#: Functions that have a form of their own in Python.
BY_HAND = {
    "folio_version": folio.version,
    "folio_status_name": folio.Status,
    "folio_device_count": folio.device_count,
    "folio_context_create": folio.Context,
    "folio_context_destroy": folio.Context.close,
    "folio_mla_context_tokens": folio.mla_context_tokens,
    "folio_get_api": folio.ABI_VERSION,  # asked when the library is loaded
}

#: What the functions of handles are called that are no methods of that name. `workspace_info` is made by `__init__`.
METHODS = {"create": "__init__", "workspace": "__init__", "destroy": "close"}


def handle_of(function):
    return next((one.type.removesuffix(" *") for one in function.parameters if one.name == "handle"), None)


def test_generated_files_are_those_of_the_header():
    package = Path(folio.__file__).parent
    done = subprocess.run([sys.executable, "-m", "generator", "--check"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    for path in (ROOT / "src" / "folio").rglob("*.py"):
        installed = package / path.relative_to(ROOT / "src" / "folio")
        assert installed.read_text() == path.read_text(), f"{installed} is not this checkout's"


@pytest.mark.parametrize("name", HEADER.functions)
def test_every_function_of_the_header_is_there(name):
    from folio._library import lib

    assert getattr(lib, name)
    if name in BY_HAND:
        return
    function = HEADER.functions[name]
    kind = next((one.type.removesuffix(" *") for one in function.parameters if one.type.endswith("_desc *")), None)
    owner = handle_of(function) or (kind or "").removesuffix("_desc")
    if owner:
        method = name.removeprefix(owner + "_")
        cls = getattr(folio, camel(owner))
        assert hasattr(cls, METHODS.get(method, method))
    else:
        assert inspect.isfunction(getattr(folio, name.removeprefix("folio_")))


def parameters(function):
    return [name for name in inspect.signature(function).parameters if name not in ("self", "ctx", "chunk", "stream")]


@pytest.mark.parametrize("name", [name for name in HEADER.structs if name.endswith(("_args", "_desc"))])
def test_signatures_have_the_fields_of_the_structs(name):
    """By the parsed header and by cffi's view of the declarations, which knows nothing of the generator's tables."""
    from folio._generated.ffi import ffi

    fields = {field for field, _ in ffi.typeof(name).fields} - {"struct_size", "reserved"}
    if name == "folio_context_desc":
        said = set(parameters(folio.Context)) - {"backend"}
        assert said == fields - {"device_type", "log_user"}
        return
    owner = name.removesuffix("_args").removesuffix("_desc")
    if name == "folio_attention_args":
        functions = [folio.Decode.run, folio.Prefill.run, folio.Cascade.run]
    elif f"{owner}_plan" in HEADER.functions:
        functions = [
            getattr(folio, camel(owner)).__init__ if name.endswith("_desc") else getattr(folio, camel(owner)).run
        ]
    else:
        functions = [getattr(folio, owner.removeprefix("folio_"))]
    left_out = {field.name for field in FIELDS.of(HEADER.structs[name])} - {
        field.name for field in FIELDS.arguments(HEADER.structs[name])
    }
    for function in functions:
        assert set(parameters(function)) == fields - left_out
    # Only counts, results and flags without a meaning are left out.
    kinds = {
        field: FIELDS.kind(HEADER.structs[name], next(f for f in HEADER.structs[name].fields if f.name == field))
        for field in left_out
    }
    assert all(kind.startswith(("Same", "Room")) or kind in ("RESULT", "UNUSED") for kind in kinds.values())


def test_every_constant_has_its_class():
    for constant in HEADER.constants:
        if constant.name.startswith("FOLIO_ABI_"):
            assert getattr(folio, constant.name.removeprefix("FOLIO_")) == constant.value


def test_plans_take_a_batch():
    batch = {field for field in folio.Batch.__annotations__}
    for handle in (folio.Decode, folio.Prefill, folio.Mla, folio.MlaContext):
        assert set(parameters(handle.plan)) == batch | {"workspace"}
    assert set(parameters(folio.Cascade.plan)) == batch | {"workspace", "prefixes"}
