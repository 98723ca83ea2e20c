"""Reads folio.h: its constants, structs and functions, each with its documentation.

The header is generated too, so its form is known: every item has one block comment before it, and every struct field
as well. What does not have that form stops the generator.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

HEADER = Path(__file__).resolve().parents[2] / "include" / "folio" / "folio.h"


@dataclass(frozen=True)
class Constant:
    """`#define FOLIO_… number`"""

    name: str
    value: int
    doc: str


@dataclass(frozen=True)
class Field:
    """A field of a struct. `type` is C's, without const: `folio_tensor *`, `uint32_t`, …"""

    name: str
    type: str
    const: bool
    doc: str


@dataclass(frozen=True)
class Struct:
    """A struct with fields; `fields` has all of them."""

    name: str
    fields: tuple[Field, ...]
    doc: str


@dataclass(frozen=True)
class Parameter:
    """A parameter of a function, as a field has it."""

    name: str
    type: str


@dataclass(frozen=True)
class Function:
    """A function of the library."""

    name: str
    result: str
    parameters: tuple[Parameter, ...]
    doc: str


@dataclass(frozen=True)
class Header:
    """All of folio.h."""

    constants: tuple[Constant, ...]
    structs: dict[str, Struct]
    opaque: dict[str, str]
    functions: dict[str, Function]
    declarations: str


_DOC = r"/\*\*(?P<doc>(?:(?!\*/).)*)\*/\s*"
_CONSTANT = re.compile(_DOC + r"#define (?P<name>FOLIO_\w+) (?P<value>-?\d+)\n", re.S)
_STRUCT = re.compile(_DOC + r"typedef struct (?P<name>\w+) \{\n(?P<body>.*?)\n\} (?P=name);", re.S)
_OPAQUE = re.compile(_DOC + r"typedef struct (?P<name>\w+) (?P=name);", re.S)
_FUNCTION = re.compile(_DOC + r"(?P<result>[a-z][\w ]*?[ *]+)(?P<name>folio_\w+)\((?P<parameters>[^;{}]*)\);", re.S)
_FIELD = re.compile(_DOC + r"(?P<declaration>[^;]*);", re.S)
_DECLARATION = re.compile(r"^(?P<const>const )?(?P<type>\w+ \**)(?P<name>\w+)(?P<array>\[\d+\])?$")


def _text(comment: str) -> str:
    """The text of a block comment, without the stars at its lines' beginnings."""
    return "\n".join(re.sub(r"^\s*\* ?", "", line).rstrip() for line in comment.strip("\n").split("\n")).strip()


def _declaration(text: str) -> tuple[str, str, bool]:
    found = _DECLARATION.match(" ".join(text.split()))
    if not found:
        raise ValueError(f"folio.h declares {text!r}, which the generator does not know")
    return found["name"], found["type"].strip() + (found["array"] or ""), bool(found["const"])


def _fields(body: str) -> tuple[Field, ...]:
    fields = []
    for found in _FIELD.finditer(body):
        name, type_, const = _declaration(found["declaration"])
        fields.append(Field(name, type_, const, _text(found["doc"])))
    return tuple(fields)


def _parameters(text: str) -> tuple[Parameter, ...]:
    if text.strip() == "void":
        return ()
    return tuple(Parameter(*_declaration(part)[:2]) for part in text.split(","))


def _declarations(source: str) -> str:
    """What cffi is given: the header without comments, preprocessor and the table of functions."""
    text = re.sub(r"/\*.*?\*/", "", source, flags=re.S)
    text = re.sub(r'#ifdef __cplusplus\n(?:extern "C" \{|\} )\s*#endif', "", text)
    text = re.sub(r"#ifdef __cplusplus.*?#endif", "", text, flags=re.S)
    text = re.sub(r"^#.*$", "", text, flags=re.M)
    text = re.sub(
        r"typedef struct folio_api \{.*?\n\} folio_api;", "typedef struct folio_api folio_api;", text, flags=re.S
    )
    return re.sub(r"\n\s*\n+", "\n", text).strip() + "\n"


def read(path: Path = HEADER) -> Header:
    """Reads a header."""
    source = path.read_text()
    structs = {
        found["name"]: Struct(found["name"], _fields(found["body"]), _text(found["doc"]))
        for found in _STRUCT.finditer(source)
        if found["name"] != "folio_api"
    }
    functions = {
        found["name"]: Function(
            found["name"], found["result"].strip(), _parameters(found["parameters"]), _text(found["doc"])
        )
        for found in _FUNCTION.finditer(source)
    }
    return Header(
        constants=tuple(
            Constant(found["name"], int(found["value"]), _text(found["doc"])) for found in _CONSTANT.finditer(source)
        ),
        structs=structs,
        opaque={found["name"]: _text(found["doc"]) for found in _OPAQUE.finditer(source)},
        functions=functions,
        declarations=_declarations(source),
    )
