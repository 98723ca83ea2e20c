"""The header's sentences in Python's terms."""

from __future__ import annotations

import re
import textwrap

from generator.header import Field, Header, Struct

#: Classes of constants: the prefix of their names in the header, the base class, and what they are.
ENUMS: dict[str, tuple[str, str, str]] = {
    "Status": ("FOLIO_", "IntEnum", "What a call answers: 0 is success."),
    "Device": ("FOLIO_DEVICE_", "IntEnum", "Where memory is."),
    "ContextFlag": ("FOLIO_CONTEXT_", "IntFlag", "Flags of a context."),
    "LogLevel": ("FOLIO_LOG_", "IntEnum", "Levels of messages."),
    "KvLayout": ("FOLIO_LAYOUT_", "IntEnum", "The order of a paged cache's dimensions."),
    "KvStorage": ("FOLIO_KV_", "IntEnum", "How keys and values lie in memory."),
    "KvFormat": ("FOLIO_KV_FORMAT_", "IntEnum", "How rows of a cache are stored."),
    "PlanFlag": ("FOLIO_PLAN_", "IntFlag", "Flags of handles."),
    "BatchFlag": ("FOLIO_BATCH_", "IntFlag", "Flags of batches."),
    "RunFlag": ("FOLIO_RUN_", "IntFlag", "Flags of attention calls."),
    "MaskMode": ("FOLIO_MASK_", "IntEnum", "Which keys a row sees."),
    "MlaCacheFormat": ("FOLIO_MLA_CACHE_", "IntEnum", "Records of a cache of latent rows."),
    "MlaContextFlag": ("FOLIO_MLA_CONTEXT_", "IntFlag", "Flags of MLA context handles."),
    "MlaRopeFlag": ("FOLIO_MLA_ROPE_", "IntFlag", "Flags of `mla_append`."),
    "RopeFlag": ("FOLIO_ROPE_", "IntFlag", "Flags of `rope_append`."),
    "MergeFlag": ("FOLIO_MERGE_", "IntFlag", "Flags of merges."),
    "CpFlag": ("FOLIO_CP_", "IntFlag", "Flags of `cp_correct`."),
    "RowKind": ("FOLIO_ROW_", "IntEnum", "Kinds of requests in a step."),
    "SlotLayout": ("FOLIO_DRAFT_", "IntEnum", "Where drafted tokens stand in a row of slots."),
    "SplitFlag": ("FOLIO_SPLIT_", "IntFlag", "Flags of `split_decodes_and_prefills`."),
    "BalancedKvSplitsFlag": ("FOLIO_BALANCED_KV_SPLITS_", "IntFlag", "Flags of `balanced_kv_splits`."),
    "UseCascadeFlag": ("FOLIO_USE_CASCADE_", "IntFlag", "Flags of `use_cascade`: each rules a cascade out."),
}

#: Constants that belong to no class.
PLAIN = ("FOLIO_ABI_MAJOR", "FOLIO_ABI_MINOR", "FOLIO_ABI_VERSION")


def enum_of(constant: str) -> str:
    """The class of a constant: that of the longest prefix."""
    if constant == "FOLIO_OK" or constant.startswith("FOLIO_ERR_"):
        return "Status"
    fitting = [name for name, (prefix, _, _) in ENUMS.items() if name != "Status" and constant.startswith(prefix)]
    if not fitting:
        raise ValueError(f"{constant} belongs to no class of constants; say which in generator/docs.py")
    return max(fitting, key=lambda name: len(ENUMS[name][0]))


def member(constant: str) -> str:
    """The name of a constant within its class."""
    enum = enum_of(constant)
    return constant[len(ENUMS[enum][0]) :]


def camel(name: str) -> str:
    """`folio_mla_context` → `MlaContext`"""
    return "".join(part.title() for part in name.removeprefix("folio_").split("_"))


def error_name(status: str) -> str:
    """`INVALID_ARGUMENT` → `InvalidArgumentError`"""
    return status.title().replace("_", "") + "Error"


def is_handle(header: Header, name: str) -> bool:
    """Whether an opaque type is one that is planned and run."""
    return f"{name}_plan" in header.functions


class Prose:
    """Turns the header's documentation into that of the package."""

    def __init__(self, header: Header):
        self._header = header

    def text(self, doc: str) -> str:
        """A piece of documentation, with Python's names for C's."""
        doc = doc.split("\n@param")[0].split("\n# Safety")[0].split("\n@copydetails")[0].strip()
        doc = re.sub(r"```text\n(.*?)\n```", lambda found: textwrap.indent(found[1], "    "), doc, flags=re.S)
        doc = re.sub(r"@ref (\w+)", r"\1", doc)
        doc = re.sub(r"(?<![_`])\b(CAPTURE|UNSUPPORTED)\b", lambda found: f"`{found[1].title()}Error`", doc)
        doc = re.sub(r"\ball zero\b", "None", doc, flags=re.I).replace("NULL", "None")
        doc = re.sub(r"FOLIO_([A-Z0-9_]+?)_…", lambda found: f"`{self._class(found[1])}`", doc)
        doc = re.sub(r"FOLIO_[A-Z0-9_]+", lambda found: self._constant(found[0]), doc)
        doc = re.sub(r"folio_[a-z0-9_]+", lambda found: self._name(found[0]), doc)
        return doc.replace("``", "`")

    def raised(self, doc: str) -> str:
        """The exceptions that a function's documentation lists."""
        doc = re.sub(r"@copydetails (\w+)", lambda found: self._header.functions[found[1]].doc, doc)
        doc = re.sub(r"@copydetails (\w+)", lambda found: self._header.functions[found[1]].doc, doc)
        said = doc.partition("@return")[2].partition("# Safety")[0]
        known = {member(one.name).removeprefix("ERR_") for one in self._header.constants if "FOLIO_ERR_" in one.name}
        # The package fills in struct_size by itself.
        words = dict.fromkeys(
            word for word in re.findall(r"\b[A-Z_]+\b", said) if word in known - {"INVALID_STRUCT_SIZE"}
        )
        return ", ".join(map(error_name, words))

    def _class(self, prefix: str) -> str:
        return next(name for name, (known, _, _) in ENUMS.items() if known == f"FOLIO_{prefix}_")

    def _constant(self, name: str) -> str:
        if name in ("FOLIO_INIT", "FOLIO_API_HAS", *PLAIN):
            return name
        enum, rest = enum_of(name), member(name)
        return f"`{enum}.{rest}`"

    def _name(self, name: str) -> str:
        header = self._header
        for suffix in ("_args", "_desc"):
            name = name.removesuffix(suffix)
        if name in ("folio_attention", "folio_context"):
            return "`Decode.run`" if name == "folio_attention" else "`Context`"
        if name in header.opaque or name in header.structs:
            return f"`{camel(name)}`"
        if name in ("folio_mla_context_args", "folio_mla_args"):
            return f"`{camel(name)}.run`"
        for handle in sorted(header.opaque, key=len, reverse=True):
            if name.startswith(handle + "_") and name in header.functions and is_handle(header, handle):
                method = name.removeprefix(handle + "_")
                if any(one.type == f"{handle} *" for one in header.functions[name].parameters):
                    return f"`{camel(handle)}.{method}`"
        return f"`{name.removeprefix('folio_')}`"

    def field(self, struct: Struct, field: Field) -> str:
        """The documentation of a field; one that points to the same field of another struct is that one's."""
        doc = field.doc
        found = re.fullmatch(r"(?P<output>Output: )?[Aa]s in (?P<struct>folio_\w+?_args)[.;]?.*", doc, re.S)
        if found and found["struct"] in self._header.structs:
            other = self._header.structs[found["struct"]]
            for candidate in other.fields:
                if candidate.name == field.name and candidate.type == field.type:
                    rest = doc[found.end("struct") :].lstrip(".; ").strip()
                    return self.field(other, candidate) + (f" {rest}" if rest else "")
        found = re.fullmatch(r"[Aa]s (?P<field>\w+)\. 0: 1\.", doc)
        return self.text(doc)


def wrapped(text: str, indent: int, hang: int = 0, width: int = 116) -> str:
    """Paragraphs at a line width; indented paragraphs and tables stay as they are."""
    out = []
    for number, paragraph in enumerate(re.split(r"\n\n", text)):
        lines = paragraph.split("\n")
        if any(line.startswith(("    ", "|", "- ", "1.", "2.")) for line in lines):
            out.append(textwrap.indent(paragraph, " " * indent))
            continue
        out.append(
            textwrap.fill(
                " ".join(lines),
                width,
                initial_indent=" " * (indent if number == 0 else indent + hang),
                subsequent_indent=" " * (indent + hang),
                break_long_words=False,
                break_on_hyphens=False,
            )
        )
    return "\n\n".join(out)
