"""The generated files: declarations for cffi, constants, the table of structs, operators and handles."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

import cffi

from generator.docs import ENUMS, PLAIN, Prose, camel, error_name, is_handle, member, wrapped
from generator.fields import BY_HAND, Fields, enum_of_or_none, table_name
from generator.header import Function, Header, Struct

FOLDER = Path(__file__).resolve().parents[1] / "src" / "folio" / "_generated"

_NOTE = "Generated from {} by `python -m generator`; do not edit."

#: A tensor's description with its extents and strides, in one piece of memory.
_DESCRIBED = """
typedef struct { folio_tensor tensor; int64_t shape[5]; int64_t strides[5]; } folio_described_tensor;
"""

#: Structs that methods take beside `args`, by the name of the parameter.
NESTED = {"append": "folio_rope_append_args"}

#: What the table of structs is written in.
_KINDS = [
    *("ARRAY_INPUT", "ARRAY_OUTPUT", "DTYPE", "INPUT", "NUMBER", "OUTPUT", "RESULT"),
    *("Flags", "InPlace", "Nested", "OneOf", "Room", "Same", "Struct"),
]


def _listed(names: list[str], before: str, after: str) -> str:
    """`before a, b, c after` in one line, or in several where it is too long."""
    line = f"{before}{', '.join(names)}{after}"
    if len(line) <= 120:
        return line
    return before + "\n" + "".join(f"    {name},\n" for name in names) + after


# --- The files -----------------------------------------------------------------------------------


def _ffi(header: Header) -> str:
    builder = cffi.FFI()
    builder.cdef(header.declarations + _DESCRIBED)
    builder.set_source("folio._generated.ffi", None)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(builder.compile(tmpdir=folder))
        return path.read_text()


def _constants(header: Header) -> str:
    plain = [name.removeprefix("FOLIO_") for name in PLAIN]
    out = [
        f'"""The header\'s constants. {_NOTE.format("folio.h")}"""\n\nfrom enum import IntEnum, IntFlag\n',
        _listed([f'"{name}"' for name in (*plain, *ENUMS)], "__all__ = [", "]\n"),
    ]
    prose = Prose(header)
    for constant in header.constants:
        if constant.name in PLAIN:
            out.append(
                f"#: {' '.join(prose.text(constant.doc).split())}\n"
                f"{constant.name.removeprefix('FOLIO_')} = {constant.value}\n"
            )
    for name, (_, base, doc) in ENUMS.items():
        members = [constant for constant in header.constants if enum_of_or_none(constant.name) == name]
        lines = [f'\nclass {name}({base}):\n    """{doc}"""\n']
        for constant in members:
            text = wrapped(prose.text(constant.doc), 4, 0).strip()
            lines.append(f'    {member(constant.name)} = {constant.value}\n    """{text}"""\n')
        out.append("\n".join(lines))
    return "\n".join(out)


def _errors(header: Header) -> str:
    prose = Prose(header)
    statuses = [one for one in header.constants if one.name.startswith("FOLIO_ERR_")]
    names = [error_name(member(status.name).removeprefix("ERR_")) for status in statuses]
    out = [
        f'"""The exception of every status. {_NOTE.format("folio.h")}"""\n',
        "from folio._errors import Error\nfrom folio._generated.constants import Status\n",
        _listed([f'"{name}"' for name in names], "__all__ = [", "]\n"),
    ]
    for name, status in zip(names, statuses):
        doc = wrapped(prose.text(status.doc), 4).strip()
        out.append(f'\nclass {name}(Error):\n    """{doc}"""\n\n    status = Status.{member(status.name)}\n')
    return "\n".join(out)


def _structs(fields: Fields) -> str:
    unused = ("Status", "Device", "ContextFlag", "LogLevel", "RowKind")
    out = [
        f'"""Every struct\'s fields, and what puts a value into each. {_NOTE.format("folio.h")}"""\n',
        _listed(_KINDS, "from folio._binding import (", ")"),
        _listed(sorted(set(ENUMS) - set(unused)), "from folio._generated.constants import (", ")\n"),
    ]
    for struct in fields.header.structs.values():
        if struct.name in BY_HAND:
            continue
        lines = [f"{table_name(struct.name)} = Struct(", f'    "{struct.name}",', "    {"]
        for field in fields.of(struct):
            kind = fields.kind(struct, field)
            if kind != "UNUSED":
                lines.append(f'        "{field.name}": {kind},')
        lines += ["    },", ")\n"]
        out.append("\n".join(lines))
    return "\n".join(out)


def _types(fields: Fields) -> str:
    out = [
        f'"""Mappings that stand for nested structs. {_NOTE.format("folio.h")}"""\n',
        "from __future__ import annotations\n",
        "from collections.abc import Iterable, Sequence\nfrom typing import TypedDict\n",
    ]
    body = []
    for name in ("folio_batch", "folio_shared_prefixes", *NESTED.values()):
        struct = fields.header.structs[name]
        body.append(f"\nclass {camel(name)}(TypedDict, total=False):")
        body.append(f'    """{wrapped(fields.prose.text(struct.doc), 4).strip()}\n    """\n')
        for field in fields.arguments(struct):
            body.append(f"    {field.name}: {fields.annotation(struct, field)}")
            body.append(f'    """{wrapped(fields.prose.field(struct, field), 4).strip()}"""\n')
    text = "\n".join(body)
    return "\n".join([*out, _used_enums(text), "from folio._tensors import DtypeLike, TensorLike\n", text])


_IMPORTS = """from __future__ import annotations

from collections.abc import Iterable, Sequence

from folio._calls import {calls}
from folio._context import Context
from folio._generated import structs
{enums}
{more}from folio._tensors import DtypeLike, StreamLike, TensorLike
"""

_STREAM_DOC = "stream: CUDA stream; None: the current one of the tensors' framework. It is None on the CPU."


def _used_enums(text: str) -> str:
    """The import of the classes of constants that signatures name."""
    used = [name for name in ENUMS if re.search(rf": [^\n]*\b{name} \|", text)]
    return _listed(sorted(used), "from folio._generated.constants import (", ")")


def _returned(fields: Fields, struct: Struct) -> tuple[str, str]:
    """Annotation and documentation of what a function returns."""
    results = fields.results(struct)
    if not results:
        return "None", ""
    said = "; ".join(f"{field.name}: {fields.prose.field(struct, field).removeprefix('Output: ')}" for field in results)
    annotation = "int" if len(results) == 1 else f"tuple[{', '.join(['int'] * len(results))}]"
    return annotation, "\n\n    Returns:\n" + wrapped(said, 8)


def _args_of(fields: Fields, function: Function) -> Struct:
    """The struct that a function takes as `args`."""
    type_ = next(one.type for one in function.parameters if one.name == "args")
    return fields.header.structs[type_.removesuffix(" *")]


def _raises(fields: Fields, function: Function, indent: int) -> str:
    """A `Raises:` section; on failure nothing was written."""
    raised = fields.prose.raised(function.doc)
    if not raised:
        return ""
    return "\n" + " " * indent + "Raises:\n" + wrapped(raised, indent + 4) + "\n"


def _signature(fields: Fields, struct: Struct, first: list[str], last: list[str]) -> str:
    parameters = first + ["*"] + [fields.parameter(struct, field) for field in fields.arguments(struct)] + last
    return "".join(f"    {parameter},\n" for parameter in parameters)


def _operators(fields: Fields) -> str:
    body = []
    names = []
    for function in fields.header.functions.values():
        parameters = [parameter.name for parameter in function.parameters]
        if function.result != "folio_status" or "handle" in parameters or "args" not in parameters:
            continue
        on_context = "ctx" in parameters
        struct = _args_of(fields, function)
        name = function.name.removeprefix("folio_")
        names.append(name)
        returns, returned = _returned(fields, struct)
        signature = _signature(
            fields,
            struct,
            ["ctx: Context"] if on_context else [],
            ["stream: StreamLike | None = None"] if on_context else [],
        )
        doc = fields.prose.text(function.doc) + "\n\n" + fields.prose.text(struct.doc)
        args = fields.documented(struct, 8)
        if on_context:
            args = "        ctx: the device.\n" + args + "\n" + wrapped(_STREAM_DOC, 8, 4)
        call = (
            f'context_call("{function.name}", ctx, structs.{table_name(struct.name)}, locals())'
            if on_context
            else f'Figure("{function.name}", structs.{table_name(struct.name)}, locals())'
        )
        kind = "Call" if on_context else f"Figure[{returns}]"
        body.append(
            f"\n@operator\ndef {name}(\n{signature}) -> {kind}:\n"
            f'    """{wrapped(doc, 4).strip()}\n\n    Args:\n{args}{returned}\n{_raises(fields, function, 4)}    """\n'
            f"    return {call}\n"
        )
    text = "\n".join(body)
    head = f'"""Operators and figures of the library, one function each. {_NOTE.format("folio.h")}"""\n\n'
    head += _IMPORTS.format(
        calls="Call, Figure, context_call, operator",
        enums=_used_enums(text),
        more="from folio._generated.types import Batch\n",
    )
    return head + "\n" + _listed([f'"{name}"' for name in names], "__all__ = [", "]\n\n") + text


def _handles(fields: Fields) -> str:
    header = fields.header
    body = []
    names = []
    for opaque in header.opaque:
        if not is_handle(header, opaque):
            continue
        names.append(camel(opaque))
        body.append(_handle(fields, opaque))
    text = "\n".join(body)
    mappings = sorted(["SharedPrefixes", *map(camel, NESTED.values())])
    head = f'"""Attention handles, a class each. {_NOTE.format("folio.h")}"""\n\n'
    head += _IMPORTS.format(
        calls="Call, operator, prepared",
        enums=_used_enums(text),
        more=f"from folio._generated.types import {', '.join(mappings)}\nfrom folio._handle import Handle, Workspace\n",
    )
    return head + "\n" + _listed([f'"{name}"' for name in names], "__all__ = [", "]\n\n") + text


def _indented(text: str) -> str:
    return "".join("    " + line if line.strip() else line for line in text.splitlines(keepends=True))


def _handle(fields: Fields, opaque: str) -> str:
    header = fields.header
    desc = header.structs[f"{opaque}_desc"]
    short = opaque.removeprefix("folio_")
    class_doc = fields.prose.text(header.opaque[opaque]) + "\n\n" + fields.prose.text(desc.doc)
    out = [
        f"\nclass {camel(opaque)}(Handle):\n"
        f'    """{wrapped(class_doc, 4).strip()}\n\n    Args:\n        ctx: the device.\n'
        f'{fields.documented(desc, 8)}\n    """\n\n'
        f'    _name = "{short}"\n',
        "    def __init__(\n"
        + _indented(_signature(fields, desc, ["self", "ctx: Context"], []))
        + f"    ) -> None:\n        super().__init__(ctx, structs.{table_name(desc.name)}, locals())\n",
    ]
    for function in header.functions.values():
        name = function.name.removeprefix(opaque + "_")
        if not any(one.name == "handle" and one.type == f"{opaque} *" for one in function.parameters):
            continue
        if name == "plan":
            out.append(_plan(fields, function))
        elif any(parameter.name == "args" for parameter in function.parameters):
            out.append(_method(fields, function, name))
        elif any(parameter.name == "out" and parameter.type == "uint32_t *" for parameter in function.parameters):
            out.append(_getter(fields, function, name))
        elif name not in ("create", "workspace", "kernel", "destroy"):
            raise ValueError(f"{function.name} is a method that the generator does not know")
    return "\n".join(out)


def _plan(fields: Fields, function: Function) -> str:
    batch = fields.header.structs["folio_batch"]
    shared = any(parameter.name == "prefixes" for parameter in function.parameters)
    last = ["prefixes: SharedPrefixes | None = None"] if shared else []
    last += ["workspace: Workspace | None = None", "stream: StreamLike | None = None"]
    signature = _indented(_signature(fields, batch, ["self"], last))
    doc = fields.prose.text(function.doc)
    if "@copydetails folio_decode_plan" in function.doc:
        doc += "\n\nThe page table comes in the forms of `Batch`. On failure the previous plan stays in force."
    args = fields.documented(batch, 12)
    if shared:
        args += "\n" + wrapped("prefixes: what requests share; None: nothing.", 12, 4)
    args += "\n" + wrapped(
        "workspace: memory as workspace_info asks; None: that of the last plan, or at the first plan memory that the"
        " handle allocates.",
        12,
        4,
    )
    args += "\n" + wrapped(
        "stream: CUDA stream that later runs use or wait for; None: the current one of the tensors' framework. It is"
        " None on the CPU.",
        12,
        4,
    )
    call = "self._plan(structs.BATCH, locals()"
    call += ", structs.SHARED_PREFIXES)" if shared else ")"
    return (
        f'    def plan(\n{signature}    ) -> None:\n        """{wrapped(doc, 8).strip()}\n\n        Args:\n{args}\n'
        f'{_raises(fields, function, 8)}        """\n        {call}\n'
    )


def _method(fields: Fields, function: Function, name: str) -> str:
    struct = _args_of(fields, function)
    taken = [one.name for one in function.parameters]
    nested = {name: nested for name, nested in NESTED.items() if name in taken}
    first = ["self"] + (["chunk: int"] if "chunk" in taken else [])
    first += [f"{name}: {camel(nested)}" for name, nested in nested.items()]
    signature = _indented(_signature(fields, struct, first, ["stream: StreamLike | None = None"]))
    doc = fields.prose.text(function.doc)
    if name in ("run", "append_run", "new_tokens"):
        doc += "\n\n" + fields.prose.text(struct.doc)
    args = ""
    if "chunk" in taken:
        args = "            chunk: the chunk's number, below that of num_chunks.\n"
    for one in nested:
        args += f"            {one}: what `rope_append` takes, as a mapping.\n"
    args += fields.documented(struct, 12) + "\n" + wrapped(_STREAM_DOC, 12, 4)
    more = ", chunk" if "chunk" in taken else ""
    more += "".join(f", {one}=structs.{table_name(struct)}" for one, struct in nested.items())
    return (
        f'    @operator\n    def {name}(\n{signature}    ) -> Call:\n        """{wrapped(doc, 8).strip()}\n\n'
        f'        Args:\n{args}\n{_raises(fields, function, 8)}        """\n'
        f'        return self._call("{name}", structs.{table_name(struct.name)}, locals(){more})\n\n'
        f"    #: `{name}` without the call: its result makes it, any number of times.\n"
        f"    prepare_{name} = prepared({name})\n"
    )


def _getter(fields: Fields, function: Function, name: str) -> str:
    chunk = any(parameter.name == "chunk" for parameter in function.parameters)
    parameters, values = ("self, chunk: int", ", chunk") if chunk else ("self", "")
    doc = wrapped(fields.prose.text(function.doc), 8).strip()
    return f'    def {name}({parameters}) -> int:\n        """{doc}"""\n        return self._number("{name}"{values})\n'


def files(header: Header) -> dict[str, str]:
    """Names and texts of all generated files."""
    fields = Fields(header)
    return {
        "__init__.py": f'"""What follows from folio.h. {_NOTE.format("folio.h")}"""\n',
        "ffi.py": _ffi(header),
        "constants.py": _constants(header),
        "errors.py": _errors(header),
        "structs.py": _structs(fields),
        "types.py": _types(fields),
        "operators.py": _operators(fields),
        "handles.py": _handles(fields),
    }
