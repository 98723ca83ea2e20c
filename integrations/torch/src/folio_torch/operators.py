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
from collections.abc import Callable, Iterable
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
    "cp_reorder": ("dst",),
    "cp_correct": ("o_out", "lse_out"),
    "tree_mask": ("mask_bytes", "mask_bits", "tree_mask", "tree_bits", "positions", "next_token", "next_sibling"),
    "batch_lengths": ("qo_indptr", "kv_len", "kv_indptr", "row_kind"),
    "kv_indices": ("kv_indptr", "kv_indices", "last_page_len"),
    "block_table": ("block_table",),
    "slot_mapping": ("slot_mapping", "positions"),
    "draft_kv_indices": ("kv_indptr", "kv_indices"),
}

#: Methods of handles that are operators, and the tensors that they write.
RUNS: dict[str, tuple[type, str, tuple[str, ...]]] = {
    "decode": (folio.Decode, "run", ("o", "lse")),
    "prefill": (folio.Prefill, "run", ("o", "lse")),
    "cascade": (folio.Cascade, "run", ("o", "lse")),
    "mla": (folio.Mla, "run", ("o", "lse")),
    "mla_context": (folio.MlaContext, "run", ("o", "lse")),
    # The steps of such a run. All of them take o, which keeps them in their order when they are compiled.
    "mla_context_new_tokens": (folio.MlaContext, "new_tokens", ("o", "lse")),
    "mla_context_gather": (folio.MlaContext, "gather", ("context_latent", "context_rope")),
    "mla_context_attend": (folio.MlaContext, "attend", ("o", "lse")),
}

#: What the append's arguments of `decode_append_run` begin with.
_APPEND = "append_"

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


def _parameters(function: Callable, *others: str) -> list[inspect.Parameter]:
    """Those of a function that are an operator's too: all but what tensors say, and `others`."""
    left_out = ("self", "ctx", "stream", *others)
    return [p for p in inspect.signature(function).parameters.values() if p.name not in left_out]


def _define(
    name: str, parameters: Iterable[inspect.Parameter], outputs: tuple[str, ...], first: str, kernel: Callable
) -> None:
    """Registers an operator."""
    aliases = {output: f"a{number}" for number, output in enumerate(outputs)}
    keywords = ", ".join(_parameter(p, aliases.get(p.name)) for p in parameters)
    # Inputs keep their strides under torch.compile: a cache's are its layout.
    _library.define(f"{name}({first}*, {keywords}) -> ()", tags=(torch.Tag.needs_fixed_stride_order,))
    _library.impl(name, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"folio::{name}", lambda *args, **kwargs: None, lib=_library)


def _device_of(tensors: Iterable[Any]) -> torch.device:
    """The GPU that a call has tensors on, or else the CPU: lists of pages may be on the host of a GPU."""
    devices = [tensor.device for tensor in tensors if isinstance(tensor, torch.Tensor)]
    return max(devices, key=lambda device: device.type == "cuda")


def _define_operator(name: str, outputs: tuple[str, ...]) -> None:
    function = getattr(folio, name)

    def kernel(**arguments):
        function(context_of(_device_of(arguments.values())), **arguments)

    _define(name, _parameters(function), outputs, "", kernel)


def _define_run(name: str, kind: type, method: str, outputs: tuple[str, ...]) -> None:
    function = getattr(kind, method)

    def kernel(handle, **arguments):
        function(_handle(handle, kind), **arguments)

    _define(name, _parameters(function), outputs, "int handle, ", kernel)


def _define_append_run() -> None:
    """`decode_append_run`: arguments of the append have its prefix. The run's q, k and v are none: they are the append's,
    and a tensor that a compiled function passes twice, written once, would become two.
    """
    appends = [p.replace(name=_APPEND + p.name) for p in _parameters(folio.rope_append)]
    runs = _parameters(folio.Decode.append_run, "append", "q", "k", "v")

    def kernel(handle, **arguments):
        append = {n.removeprefix(_APPEND): arguments.pop(n) for n in list(arguments) if n.startswith(_APPEND)}
        # A compiled function leaves out what is None.
        q_out = append.get("q_out")
        shared = {"q": append.get("q") if q_out is None else q_out, "k": append["k_cache"], "v": append["v_cache"]}
        _handle(handle, folio.Decode).append_run(append, **shared, **arguments)

    outputs = (*(_APPEND + output for output in OPERATORS["rope_append"]), *RUNS["decode"][2])
    _define("decode_append_run", [*appends, *runs], outputs, "int handle, ", kernel)


for _name, _outputs in OPERATORS.items():
    _define_operator(_name, _outputs)
for _name, _run in RUNS.items():
    _define_run(_name, *_run)
_define_append_run()
