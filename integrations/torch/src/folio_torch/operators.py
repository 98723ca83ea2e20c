"""`torch.ops.folio.*`, made from the signatures of the package folio: the same names and the same arguments.

| of folio | of a schema |
|---|---|
| a tensor, an output | `Tensor`, `Tensor(a!)` |
| an optional one | `Tensor?`, `Tensor(a!)?` |
| a number | `int`, `float` |
| a constant, by its name in lower case | `str` |
| flags, by their names | `str[]?` |
| an element type | `ScalarType?` |
| a handle | `int`: its `number_of` |
| a context, a stream | nothing: those of the tensors |

Operators write their outputs and return nothing, so their meta kernels do nothing, and torch.compile and torch.export
take them. They neither allocate nor synchronise, so CUDA graphs may capture them; `folio.PlanFlag.GRAPH` says what
else a capture needs. A plan is not a part of a compiled function: runs compute the plan in force, as captured ones do.
"""

import inspect
import itertools
import weakref
from collections.abc import Callable
from typing import Any

import folio
import torch

from folio_torch.devices import context_of

#: Operators of a context, and the tensors that they write.
OPERATORS: dict[str, tuple[str, ...]] = {
    "kv_append": ("k_cache", "v_cache"),
    "kv_copy": ("k_dst", "v_dst"),
    "kv_gather": ("key", "value"),
    "rope_append": ("q", "q_out", "key_out", "k_cache", "v_cache"),
    "merge_state": ("v_out", "s_out"),
    "merge_states": ("v_out", "s_out"),
    "merge_varlen": ("v_out", "s_out"),
    "mla_append": ("kv", "kv_rope", "rope_out", "q_rope", "q_rope_out"),
    "mla_gather": ("dst", "dst_rope"),
    "mla_absorb_weights": ("w_uk", "w_uv"),
    "mla_absorb_q": ("q_latent",),
    "mla_project_o": ("out",),
    "mla_up_project": ("k_nope", "v"),
}

#: Handles whose `run` is an operator, and the tensors that it writes.
HANDLES: dict[str, tuple[type, tuple[str, ...]]] = {
    "decode": (folio.Decode, ("o", "lse")),
    "prefill": (folio.Prefill, ("o", "lse")),
    "cascade": (folio.Cascade, ("o", "lse")),
    "mla": (folio.Mla, ("o", "lse")),
    "mla_context": (folio.MlaContext, ("o", "lse")),
}

_library = torch.library.Library("folio", "DEF")
_numbers = itertools.count(1)
_handles: "weakref.WeakValueDictionary[int, Any]" = weakref.WeakValueDictionary()


def number_of(handle: Any) -> int:
    """The number by which operators find a handle: one each, valid as long as the caller keeps the handle."""
    number = getattr(handle, "_torch_number", None)
    if number is None:
        number = handle._torch_number = next(_numbers)
        _handles[number] = handle
    return number


def _handle(number: int, kind: type) -> Any:
    handle = _handles.get(number)
    if type(handle) is not kind:
        found = "no handle" if handle is None else f"a {type(handle).__name__}"
        raise ValueError(f"handle is {number}, which is {found}; the number_of a living {kind.__name__} is accepted")
    return handle


def _parameter(parameter: inspect.Parameter, mutated: str | None) -> str:
    """A parameter in a schema; `mutated` is its alias where it is written."""
    kind, default = parameter.annotation, parameter.default
    optional = "?" if default is None else ""
    if kind.startswith("TensorLike"):
        text = f"Tensor({mutated}!){optional}" if mutated else f"Tensor{optional}"
    elif kind.startswith("DtypeLike"):
        text = f"ScalarType{optional}"
    elif "Iterable" in kind:
        return f"str[]? {parameter.name}=None"
    elif kind in ("int", "float"):
        text = kind
    elif kind.endswith("| str"):
        text = "str"
        default = default if default is inspect.Parameter.empty else default.name.lower()
    else:
        raise TypeError(f"{parameter.name}: {kind} has no type in a schema")
    if default is inspect.Parameter.empty:
        return f"{text} {parameter.name}"
    if isinstance(default, str):
        return f'{text} {parameter.name}="{default}"'
    return f"{text} {parameter.name}={default}"


def _define(name: str, function: Callable, outputs: tuple[str, ...], first: str, kernel: Callable) -> None:
    """Registers an operator whose arguments are those of `function`."""
    parameters = [p for p in inspect.signature(function).parameters.values() if p.name not in ("self", "ctx", "stream")]
    aliases = {output: f"a{number}" for number, output in enumerate(outputs)}
    keywords = ", ".join(_parameter(p, aliases.get(p.name)) for p in parameters)
    # Inputs keep their strides under torch.compile: a cache's are its layout.
    _library.define(f"{name}({first}*, {keywords}) -> ()", tags=(torch.Tag.needs_fixed_stride_order,))
    _library.impl(name, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"folio::{name}", lambda *args, **kwargs: None, lib=_library)


def _define_operator(name: str, outputs: tuple[str, ...]) -> None:
    function = getattr(folio, name)

    def kernel(**arguments):
        written = next(arguments[output] for output in outputs if arguments.get(output) is not None)
        function(context_of(written.device), **arguments)

    _define(name, function, outputs, "", kernel)


def _define_run(name: str, kind: type, outputs: tuple[str, ...]) -> None:
    def kernel(handle, **arguments):
        kind.run(_handle(handle, kind), **arguments)

    _define(name, kind.run, outputs, "int handle, ", kernel)


for _name, _outputs in OPERATORS.items():
    _define_operator(_name, _outputs)
for _name, (_kind, _outputs) in HANDLES.items():
    _define_run(_name, _kind, _outputs)
