"""The generated files: declarations for cffi, constants, the table of structs, operators and handles."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

import cffi

from generator.docs import ENUMS, PLAIN, Prose, camel, enum_of, is_handle, member, wrapped
from generator.header import HEADER, Field, Function, Header, Struct

FOLDER = Path(__file__).resolve().parents[1] / "src" / "folio" / "_generated"

_NOTE = "Generated from {} by `python -m generator`; do not edit."

#: A tensor's description with its extents and strides, in one piece of memory.
_DESCRIBED = """
typedef struct { folio_tensor tensor; int64_t shape[5]; int64_t strides[5]; } folio_described_tensor;
"""

#: Structs that the package fills in by hand, because Python has something of its own for them.
_BY_HAND = ("folio_error", "folio_dtype", "folio_tensor", "folio_workspace", "folio_workspace_info", "folio_context_desc")

#: How many numbers arrays have: `Same` of inputs, `Room` of outputs.
_COUNTS: dict[str, dict[str, str]] = {
    "folio_shared_prefixes": {"num_prefixes": 'Same("request_begin", "request_end", "kv_len")'},
    "folio_find_shared_prefixes_args": {
        "capacity": 'Room(None, {"request_begin": (0, 1), "request_end": (0, 1), "kv_len": (0, 1)})'
    },
    "folio_cp_local_lengths_args": {"num_lengths": 'Same("lengths")', "capacity": 'Room(None, {"out": (0, 1)})'},
    "folio_mla_context_chunks_args": {
        "num_requests": 'Same("context_lens")',
        "max_num_chunks": (
            'Room("num_requests", {"seq_starts": (1, 0), "cu_seq_lens": (1, 1), "cu_padded_lens": (1, 1),'
            ' "max_lens": (0, 1)})'
        ),
    },
    "folio_flashmla_metadata_args": {
        "batch_size": 'Same("seq_lens")',
        "metadata_capacity": 'Room(None, {"tile_scheduler_metadata": (0, 1)})',
        "num_splits_capacity": 'Room(None, {"num_splits": (0, 1)})',
    },
    "folio_num_kv_splits_args": {
        "num_requests": 'Same("kv_lens")',
        "capacity": 'Room(None, {"out": (0, 1), "keys_per_split": (0, 1)})',
    },
    "folio_split_decodes_and_prefills_args": {
        "num_requests": 'Same("query_lens")',
        "capacity": 'Room(None, {"out": (0, 1)})',
    },
    "folio_balanced_kv_splits_args": {"num_requests": 'Same("seq_lens")', "capacity": 'Room(None, {"out": (0, 1)})'},
    "folio_use_cascade_args": {"num_requests": 'Same("query_lens")'},
    "folio_reorder_batch_args": {
        "num_requests": 'Same("query_lens", "context_lens")',
        "order_capacity": 'Room(None, {"order": (0, 1)})',
        "swaps_capacity": 'Room(None, {"swaps": (0, 1)})',
    },
}

#: Inputs that are outputs where another field is NULL.
_IN_PLACE = {
    ("folio_rope_append_args", "q"): "q_out",
    ("folio_mla_append_args", "q_rope"): "q_rope_out",
}

#: Whether a field may be left out, where the rule of `_optional` does not find it.
_OPTIONAL = {
    ("folio_attention_args", "attention_chunk_look_back"): True,
    ("folio_mla_args", "sm_scale"): False,
    ("folio_find_shared_prefixes_args", "batch"): False,
    ("folio_mla_context_args", "context_rope"): True,
    ("folio_mla_context_args", "context_k_nope"): True,
    ("folio_mla_context_args", "context_v"): True,
    ("folio_rope_append_args", "high_freq_factor"): True,
    ("folio_rope_append_args", "old_context_len"): True,
}


class _Emitter:
    def __init__(self, header: Header):
        self.header = header
        self.prose = Prose(header)

    # --- Fields ---

    def fields(self, struct: Struct) -> list[Field]:
        """Those that mean something to a caller."""
        return [field for field in struct.fields if field.name not in ("struct_size", "reserved")]

    def arguments(self, struct: Struct) -> list[Field]:
        """Those that a caller gives: neither counts of arrays nor results, nor flags that have no constants."""
        counts = _COUNTS.get(struct.name, {})
        return [
            field
            for field in self.fields(struct)
            if field.name not in counts and self.kind(struct, field) not in ("RESULT", "UNUSED")
        ]

    def enums(self, field: Field) -> list[str]:
        """Classes of the constants that a field's documentation names."""
        found = re.findall(r"FOLIO_[A-Z0-9_]+(?:_…)?", field.doc)
        names = [
            next(name for name, (prefix, _, _) in ENUMS.items() if prefix == constant.removesuffix("…"))
            if constant.endswith("…")
            else enum_of(constant)
            for constant in found
        ]
        return list(dict.fromkeys(names))

    def kind(self, struct: Struct, field: Field) -> str:
        """What puts a value into a field: an expression of `folio._binding`."""
        name, type_ = field.name, field.type
        count = _COUNTS.get(struct.name, {}).get(name)
        if count:
            return count
        if type_ == "folio_tensor *":
            if (struct.name, name) in _IN_PLACE:
                return f'InPlace(unless="{_IN_PLACE[struct.name, name]}")'
            return "OUTPUT" if re.search(r"\bOutput\b", field.doc) else "INPUT"
        if type_ == "folio_dtype":
            return "DTYPE"
        if type_ == "int32_t *":
            return "ARRAY_INPUT" if field.const else "ARRAY_OUTPUT"
        if type_ == "uint32_t *":
            return "RESULT"
        if type_.startswith("folio_") and type_.endswith(" *"):
            return f"Nested({_constant_name(type_.removesuffix(' *'))})"
        if name == "flags":
            enums = self.enums(field)
            return f"Flags({', '.join(enums)})" if enums else "UNUSED"
        if type_ == "int32_t" and self._is_enum(struct, field):
            return f"OneOf({self._enum(struct, field)})"
        if type_ in ("uint32_t", "int32_t", "uint64_t", "float"):
            return "NUMBER"
        raise ValueError(f"{struct.name}.{name} is of type {type_}, which the generator does not know")

    def _resolved(self, struct: Struct, field: Field) -> Field:
        """The field that this one's documentation points to, or itself."""
        found = re.match(r"[Aa]s in (folio_\w+_args)", field.doc)
        if found:
            other = self.header.structs[found[1]]
            return next((one for one in other.fields if one.name == field.name), field)
        return field

    def _is_enum(self, struct: Struct, field: Field) -> bool:
        return field.name in ("kv_layout", "kv_storage", "mask_mode", "cache_format", "slot_layout")

    def _enum(self, struct: Struct, field: Field) -> str:
        return self.enums(self._resolved(struct, field))[0]

    def optional(self, struct: Struct, field: Field) -> bool:
        """Whether a caller may leave a field out. It only makes signatures say more: the library has the last word."""
        said = _OPTIONAL.get((struct.name, field.name))
        if said is not None:
            return said
        kind = self.kind(struct, field)
        doc = self._resolved(struct, field).doc
        if struct.name in ("folio_batch", "folio_shared_prefixes"):
            return True
        if kind.startswith(("Flags", "OneOf")) or field.type == "float":
            return True
        if kind in ("INPUT", "OUTPUT", "ARRAY_INPUT", "ARRAY_OUTPUT") or kind.startswith("InPlace"):
            return bool(re.search(r"NULL", doc)) or doc.startswith("As in") and "NULL" in doc
        if kind == "DTYPE":
            return "all zero" in doc
        return bool(re.search(r"\b0\b", doc)) or "Needs FOLIO_" in doc

    def annotation(self, struct: Struct, field: Field) -> str:
        """The type of an argument."""
        kind = self.kind(struct, field)
        none = " | None" if self.optional(struct, field) else ""
        if kind in ("INPUT", "OUTPUT") or kind.startswith("InPlace"):
            return "TensorLike" + none
        if kind == "ARRAY_INPUT":
            return "TensorLike | Sequence[int]" + none
        if kind == "ARRAY_OUTPUT":
            return "TensorLike" + none
        if kind == "DTYPE":
            return "DtypeLike" + none
        if kind.startswith("Nested"):
            return camel(field.type.removesuffix(" *")) + none
        if kind.startswith("OneOf"):
            return f"{self._enum(struct, field)} | str"
        if kind.startswith("Flags"):
            return f"{' | '.join(self.enums(field))} | int | str | Iterable[str]"
        return "float" if field.type == "float" else "int"

    def default(self, struct: Struct, field: Field) -> str:
        """The default of an argument, as source; empty for none."""
        if not self.optional(struct, field):
            return ""
        kind = self.kind(struct, field)
        if kind.startswith("OneOf"):
            enum = self._enum(struct, field)
            zero = next(one for one in self.header.constants if enum_of_or_none(one.name) == enum and one.value == 0)
            return f" = {enum}.{member(zero.name)}"
        return " = 0" if kind.startswith("Flags") or kind == "NUMBER" else " = None"

    def parameter(self, struct: Struct, field: Field) -> str:
        """An argument, as source."""
        return f"{field.name}: {self.annotation(struct, field)}{self.default(struct, field)}"

    # --- Documentation ---

    def documented(self, struct: Struct, indent: int) -> str:
        """An `Args:` section."""
        lines = []
        for field in self.arguments(struct):
            doc = self.prose.field(struct, field)
            lines.append(wrapped(f"{field.name}: {doc}", indent, 4))
        return "\n".join(lines)

    def results(self, struct: Struct) -> list[Field]:
        """Fields that a call returns."""
        return [field for field in self.fields(struct) if self.kind(struct, field) == "RESULT"]


def enum_of_or_none(constant: str) -> str | None:
    """The class of a constant, None for those of no class."""
    return None if constant in PLAIN else enum_of(constant)


def _constant_name(struct: str) -> str:
    return struct.removeprefix("folio_").upper()


# --- The files -----------------------------------------------------------------------------------


def _ffi(header: Header) -> str:
    builder = cffi.FFI()
    builder.cdef(header.declarations + _DESCRIBED)
    builder.set_source("folio._generated.ffi", None)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(builder.compile(tmpdir=folder))
        return path.read_text()


def _constants(header: Header) -> str:
    out = [f'"""The header\'s constants. {_NOTE.format("folio.h")}"""\n\nfrom enum import IntEnum, IntFlag\n']
    prose = Prose(header)
    for constant in header.constants:
        if constant.name in PLAIN:
            out.append(f"#: {' '.join(prose.text(constant.doc).split())}\n{constant.name.removeprefix('FOLIO_')} = {constant.value}\n")
    for name, (_, base, doc) in ENUMS.items():
        members = [constant for constant in header.constants if enum_of_or_none(constant.name) == name]
        lines = [f'\nclass {name}({base}):\n    """{doc}"""\n']
        for constant in members:
            text = wrapped(prose.text(constant.doc), 4, 0).strip()
            lines.append(f'    {member(constant.name)} = {constant.value}\n    """{text}"""\n')
        out.append("\n".join(lines))
    return "\n".join(out)


def _structs(emit: _Emitter) -> str:
    enums = ", ".join(name for name in ENUMS if name not in ("Status", "Device", "ContextFlag", "LogLevel", "RowKind"))
    out = [
        f'"""Every struct\'s fields, and what puts a value into each. {_NOTE.format("folio.h")}"""\n',
        "from folio._binding import (\n    ARRAY_INPUT,\n    ARRAY_OUTPUT,\n    DTYPE,\n    INPUT,\n    NUMBER,\n    OUTPUT,\n"
        "    RESULT,\n    Flags,\n    InPlace,\n    Nested,\n    OneOf,\n    Room,\n    Same,\n    Struct,\n)",
        f"from folio._generated.constants import {enums}\n",
    ]
    for struct in emit.header.structs.values():
        if struct.name in _BY_HAND:
            continue
        lines = [f"{_constant_name(struct.name)} = Struct(", f'    "{struct.name}",', "    {"]
        for field in emit.fields(struct):
            kind = emit.kind(struct, field)
            if kind != "UNUSED":
                lines.append(f'        "{field.name}": {kind},')
        lines += ["    },", ")\n"]
        out.append("\n".join(lines))
    return "\n".join(out)


def _types(emit: _Emitter) -> str:
    out = [
        f'"""Mappings that stand for nested structs. {_NOTE.format("folio.h")}"""\n',
        "from __future__ import annotations\n\nfrom collections.abc import Sequence\nfrom typing import TypedDict\n",
        "from folio._tensors import TensorLike\n",
    ]
    for name in ("folio_batch", "folio_shared_prefixes"):
        struct = emit.header.structs[name]
        out.append(f"\nclass {camel(name)}(TypedDict, total=False):")
        out.append(f'    """{wrapped(emit.prose.text(struct.doc), 4).strip()}\n    """\n')
        for field in emit.arguments(struct):
            out.append(f"    {field.name}: {emit.annotation(struct, field)}")
            out.append(f'    """{wrapped(emit.prose.field(struct, field), 4).strip()}"""\n')
    return "\n".join(out)


_IMPORTS = """from __future__ import annotations

from collections.abc import Iterable, Sequence

from folio._calls import {calls}
from folio._context import Context
from folio._generated import structs
from folio._generated.constants import {enums}
from folio._generated.types import Batch, SharedPrefixes
{more}from folio._tensors import DtypeLike, StreamLike, TensorLike
"""

_STREAM_DOC = (
    "stream: CUDA stream; None: the current one of the tensors' framework. It is None on the CPU."
)


def _used_enums(text: str) -> str:
    return ", ".join(name for name in ENUMS if re.search(rf"\b{name}\b(?!`)(?=[ .,|])", text))


def _returned(emit: _Emitter, struct: Struct) -> tuple[str, str]:
    """Annotation and documentation of what a function returns."""
    results = emit.results(struct)
    if not results:
        return "None", ""
    said = "; ".join(f"{field.name}: {emit.prose.field(struct, field).removeprefix('Output: ')}" for field in results)
    annotation = "int" if len(results) == 1 else f"tuple[{', '.join(['int'] * len(results))}]"
    return annotation, "\n\n    Returns:\n" + wrapped(said, 8)


def _signature(emit: _Emitter, struct: Struct, first: list[str], last: list[str]) -> str:
    fields = emit.arguments(struct)
    parameters = first + ["*"] + [emit.parameter(struct, field) for field in fields] + last
    return "".join(f"    {parameter},\n" for parameter in parameters)


def _operators(emit: _Emitter) -> str:
    body = []
    names = []
    for function in emit.header.functions.values():
        parameters = [parameter.name for parameter in function.parameters]
        if function.result != "folio_status" or "handle" in parameters or "args" not in parameters:
            continue
        on_context = "ctx" in parameters
        struct_type = next(one.type for one in function.parameters if one.name == "args").removesuffix(" *")
        struct = emit.header.structs[struct_type]
        name = function.name.removeprefix("folio_")
        names.append(name)
        returns, returned = _returned(emit, struct)
        signature = _signature(
            emit, struct, ["ctx: Context"] if on_context else [], ["stream: StreamLike | None = None"] if on_context else []
        )
        doc = emit.prose.text(function.doc) + "\n\n" + emit.prose.text(struct.doc)
        args = emit.documented(struct, 8)
        if on_context:
            args = "        ctx: the device.\n" + args + "\n" + wrapped(_STREAM_DOC, 8, 4)
        call = (
            f'context_call("{function.name}", ctx, structs.{_constant_name(struct.name)}, locals())'
            if on_context
            else f'Figure("{function.name}", structs.{_constant_name(struct.name)}, locals())'
        )
        kind = f"Call[{returns}]" if on_context else f"Figure[{returns}]"
        body.append(
            f"\n@operator\ndef {name}(\n{signature}) -> {kind}:\n"
            f'    """{wrapped(doc, 4).strip()}\n\n    Args:\n{args}{returned}\n    """\n    return {call}\n'
        )
    text = "\n".join(body)
    head = f'"""Operators and figures of the library, one function each. {_NOTE.format("folio.h")}"""\n\n'
    head += _IMPORTS.format(calls="Call, Figure, context_call, operator", enums=_used_enums(text), more="")
    everything = ", ".join(f'"{name}"' for name in names)
    return head + f"\n__all__ = [{everything}]\n\n" + text


def _handles(emit: _Emitter) -> str:
    header = emit.header
    body = []
    names = []
    for opaque in header.opaque:
        if not is_handle(header, opaque):
            continue
        names.append(camel(opaque))
        body.append(_handle(emit, opaque))
    text = "\n".join(body)
    head = f'"""Attention handles, a class each. {_NOTE.format("folio.h")}"""\n\n'
    head += _IMPORTS.format(
        calls="Call, operator, prepared",
        enums=_used_enums(text),
        more="from folio._handle import Handle, Workspace\n",
    )
    everything = ", ".join(f'"{name}"' for name in names)
    return head + f"\n__all__ = [{everything}]\n\n" + text


def _indented(text: str) -> str:
    return "".join("    " + line if line.strip() else line for line in text.splitlines(keepends=True))


def _handle(emit: _Emitter, opaque: str) -> str:
    header = emit.header
    desc = header.structs[f"{opaque}_desc"]
    short = opaque.removeprefix("folio_")
    class_doc = emit.prose.text(header.opaque[opaque]) + "\n\n" + emit.prose.text(desc.doc)
    out = [
        f"\nclass {camel(opaque)}(Handle):\n"
        f'    """{wrapped(class_doc, 4).strip()}\n\n    Args:\n        ctx: the device.\n{emit.documented(desc, 8)}\n    """\n\n'
        f'    _name = "{short}"\n',
        "    def __init__(\n"
        + _indented(_signature(emit, desc, ["self", "ctx: Context"], []))
        + f"    ) -> None:\n        super().__init__(ctx, structs.{_constant_name(desc.name)}, locals())\n",
    ]
    for function in header.functions.values():
        name = function.name.removeprefix(opaque + "_")
        if not any(one.name == "handle" and one.type == f"{opaque} *" for one in function.parameters):
            continue
        if name == "plan":
            out.append(_plan(emit, function))
        elif any(parameter.name == "args" for parameter in function.parameters):
            out.append(_method(emit, function, name))
        elif any(parameter.name == "out" and parameter.type == "uint32_t *" for parameter in function.parameters):
            out.append(_getter(emit, function, name))
        elif name not in ("create", "workspace", "kernel", "destroy"):
            raise ValueError(f"{function.name} is a method that the generator does not know")
    return "\n".join(out)


def _plan(emit: _Emitter, function: Function) -> str:
    batch = emit.header.structs["folio_batch"]
    shared = any(parameter.name == "prefixes" for parameter in function.parameters)
    last = ["prefixes: SharedPrefixes | None = None"] if shared else []
    last += ["workspace: Workspace | None = None", "stream: StreamLike | None = None"]
    signature = _indented(_signature(emit, batch, ["self"], last))
    doc = emit.prose.text(function.doc)
    if "@copydetails folio_decode_plan" in function.doc:
        doc += "\n\nThe page table comes in the forms of `Batch`. On failure the previous plan stays in force."
    args = emit.documented(batch, 12)
    if shared:
        args += "\n" + wrapped("prefixes: what requests share; None: nothing.", 12, 4)
    args += "\n" + wrapped(
        "workspace: memory as workspace_info asks; None: that of the last plan, or at the first plan memory that the"
        " handle allocates.", 12, 4,
    )
    args += "\n" + wrapped(
        "stream: CUDA stream that later runs use or wait for; None: the current one of the tensors' framework. It is"
        " None on the CPU.", 12, 4,
    )
    call = "self._plan(structs.BATCH, locals()"
    call += ", structs.SHARED_PREFIXES)" if shared else ")"
    return (
        f'    def plan(\n{signature}    ) -> None:\n        """{wrapped(doc, 8).strip()}\n\n        Args:\n{args}\n'
        f'        """\n        {call}\n'
    )


def _method(emit: _Emitter, function: Function, name: str) -> str:
    struct = emit.header.structs[next(one.type for one in function.parameters if one.name == "args").removesuffix(" *")]
    first = ["self"] + (["chunk: int"] if any(one.name == "chunk" for one in function.parameters) else [])
    signature = _indented(_signature(emit, struct, first, ["stream: StreamLike | None = None"]))
    doc = emit.prose.text(function.doc)
    if name in ("run", "new_tokens"):
        doc += "\n\n" + emit.prose.text(struct.doc)
    args = ""
    if len(first) > 1:
        args = "            chunk: the chunk's number, below that of num_chunks.\n"
    args += emit.documented(struct, 12) + "\n" + wrapped(_STREAM_DOC, 12, 4)
    chunk = ", chunk" if len(first) > 1 else ""
    return (
        f'    @operator\n    def {name}(\n{signature}    ) -> Call[None]:\n        """{wrapped(doc, 8).strip()}\n\n'
        f'        Args:\n{args}\n        """\n'
        f'        return self._call("{function.name}", structs.{_constant_name(struct.name)}, locals(){chunk})\n\n'
        f"    #: `{name}` without the call: its result makes it, any number of times.\n"
        f"    prepare_{name} = prepared({name})\n"
    )


def _getter(emit: _Emitter, function: Function, name: str) -> str:
    chunk = any(parameter.name == "chunk" for parameter in function.parameters)
    parameters, values = ("self, chunk: int", ", chunk") if chunk else ("self", "")
    doc = wrapped(emit.prose.text(function.doc), 8).strip()
    return (
        f'    def {name}({parameters}) -> int:\n        """{doc}"""\n'
        f'        return self._number("{function.name}"{values})\n'
    )


def files(header: Header) -> dict[str, str]:
    """Names and texts of all generated files."""
    emit = _Emitter(header)
    version = re.search(r"ABI", HEADER.read_text())
    assert version, "the header names its ABI"
    return {
        "__init__.py": f'"""What follows from folio.h. {_NOTE.format("folio.h")}"""\n',
        "ffi.py": _ffi(header),
        "constants.py": _constants(header),
        "structs.py": _structs(emit),
        "types.py": _types(emit),
        "operators.py": _operators(emit),
        "handles.py": _handles(emit),
    }
