"""What becomes of a struct's field in Python: who gives its value, of which type, and whether it may be left out."""

from __future__ import annotations

import re

from generator.docs import ENUMS, PLAIN, Prose, camel, enum_of, member, wrapped
from generator.header import Field, Header, Struct

#: Structs that the package fills in by hand, because Python has something of its own for them.
BY_HAND = (
    "folio_error",
    "folio_dtype",
    "folio_tensor",
    "folio_workspace",
    "folio_workspace_info",
    "folio_context_desc",
)

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
_IN_PLACE = {("folio_rope_append_args", "q"): "q_out", ("folio_mla_append_args", "q_rope"): "q_rope_out"}

#: Whether a field may be left out, where the rule of `optional` does not find it.
_OPTIONAL = {
    **{
        (f"folio_{operator}_args", name): True
        for operator in ("kv_gather", "mla_gather")
        for name in ("block_table", "kv_indptr", "kv_indices")
    },
    **{
        ("folio_tree_mask_args", name): True
        for name in ("mask_bytes", "mask_bits", "tree_mask", "tree_bits", "positions", "next_token", "next_sibling")
    },
    ("folio_rope_append_args", "k_norm_weight"): True,
    ("folio_mla_append_args", "positions"): True,
    ("folio_batch_lengths_args", "encoder_len"): True,
    ("folio_attention_args", "attention_chunk_look_back"): True,
    ("folio_mla_args", "sm_scale"): False,
    ("folio_find_shared_prefixes_args", "batch"): False,
    ("folio_mla_context_args", "context_rope"): True,
    ("folio_mla_context_args", "context_k_nope"): True,
    ("folio_mla_context_args", "context_v"): True,
    ("folio_rope_append_args", "high_freq_factor"): True,
    ("folio_rope_append_args", "old_context_len"): True,
}


#: Fields that hold a constant of an IntEnum.
_ENUM_FIELDS = ("kv_layout", "kv_format", "kv_storage", "mask_mode", "cache_format", "slot_layout")


class Fields:
    """The fields of a header's structs."""

    def __init__(self, header: Header):
        self.header = header
        self.prose = Prose(header)

    def of(self, struct: Struct) -> list[Field]:
        """Those that mean something to a caller."""
        return [field for field in struct.fields if field.name not in ("struct_size", "reserved")]

    def arguments(self, struct: Struct) -> list[Field]:
        """Those that a caller gives: neither counts of arrays nor results, nor flags that have no constants."""
        counts = _COUNTS.get(struct.name, {})
        return [
            field
            for field in self.of(struct)
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
            return f"Nested({table_name(type_.removesuffix(' *'))})"
        if name == "flags":
            enums = self.enums(field)
            return f"Flags({', '.join(enums)})" if enums else "UNUSED"
        if name in _ENUM_FIELDS:
            return f"OneOf({self._enum(struct, field)})"
        if type_ in ("uint32_t", "int32_t", "int64_t", "uint64_t", "float"):
            return "NUMBER"
        raise ValueError(f"{struct.name}.{name} is of type {type_}, which the generator does not know")

    def _resolved(self, struct: Struct, field: Field) -> Field:
        """The field that this one's documentation points to, or itself."""
        found = re.match(r"[Aa]s in (folio_\w+_args)", field.doc)
        if found:
            other = self.header.structs[found[1]]
            return next((one for one in other.fields if one.name == field.name), field)
        return field

    def _enum(self, struct: Struct, field: Field) -> str:
        return self.enums(self._resolved(struct, field))[0]

    def optional(self, struct: Struct, field: Field) -> bool:
        """Whether a caller may leave a field out. It only makes signatures say more: the library has the last word."""
        said = _OPTIONAL.get((struct.name, field.name))
        if said is not None:
            return said
        kind = self.kind(struct, field)
        doc = self._resolved(struct, field).doc
        beside = re.match(r"As (\w+), for", doc)
        if beside:
            return self.optional(struct, next(one for one in struct.fields if one.name == beside[1]))
        if struct.name in ("folio_batch", "folio_shared_prefixes"):
            return True
        if kind.startswith(("Flags", "OneOf")) or field.type == "float":
            return True
        if kind in ("INPUT", "OUTPUT", "ARRAY_INPUT", "ARRAY_OUTPUT") or kind.startswith("InPlace"):
            return "NULL" in doc
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

    def documented(self, struct: Struct, indent: int) -> str:
        """An `Args:` section."""
        lines = []
        for field in self.arguments(struct):
            doc = self.prose.field(struct, field)
            lines.append(wrapped(f"{field.name}: {doc}", indent, 4))
        return "\n".join(lines)

    def results(self, struct: Struct) -> list[Field]:
        """Fields that a call returns."""
        return [field for field in self.of(struct) if self.kind(struct, field) == "RESULT"]


def enum_of_or_none(constant: str) -> str | None:
    """The class of a constant, None for those of no class."""
    return None if constant in PLAIN else enum_of(constant)


def table_name(struct: str) -> str:
    """The name of a struct in the table of structs: `folio_mla_args` → `MLA_ARGS`"""
    return struct.removeprefix("folio_").upper()
