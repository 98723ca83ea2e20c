"""Keyword arguments to C structs: one `Struct` for each struct of the header, with a kind for every field.

`folio._generated.structs` has the table. A kind puts one Python value into one field, and hands what has to stay alive
during the call to the `Borrowed` list.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import IntEnum, IntFlag
from typing import Any, Optional

from folio._generated import errors
from folio._generated.constants import Device
from folio._generated.ffi import ffi
from folio._tensors import Tensor, dtype_code

#: The number that stands for every field's default; told by its identity, since tensors have an == of their own.
_DEFAULT = 0


class Borrowed:
    """What a call reads and writes: kept alive with it. Also its numbers of outputs, and its results."""

    __slots__ = ("arrays", "lengths", "results", "stream", "tensors")

    def __init__(self, stream: Any = None):
        self.stream = stream
        self.tensors: list[Tensor] = []
        self.arrays: list[Any] = []
        self.lengths: dict[str, int] = {}
        self.results: list[Any] = []


class Struct:
    """A struct of the header: `bind` makes one from values by name."""

    __slots__ = ("_fields", "_pointer", "_size", "name")

    def __init__(self, name: str, fields: dict[str, Any]):
        self.name = name
        self._pointer = ffi.typeof(name + " *")
        self._size = ffi.sizeof(name)
        # Counts follow from arrays, so they come behind them.
        self._fields = sorted(fields.items(), key=lambda field: isinstance(field[1], Count))

    def bind(self, values: Mapping[str, Any], borrowed: Borrowed) -> Any:
        """A struct with these values; None and 0 are the default of every field."""
        struct = ffi.new(self._pointer)
        struct.struct_size = self._size
        for name, kind in self._fields:
            value = values.get(name)
            if kind.follows_from_others or (value is not None and value is not _DEFAULT):
                kind.put(struct, name, value, borrowed, values)
        return struct

    def bind_mapping(self, name: str, values: Mapping[str, Any], borrowed: Borrowed) -> Any:
        """As `bind`, for a mapping of the caller's: names are checked."""
        accepted = [field for field, kind in self._fields if not kind.follows_from_others]
        for key in values:
            if key not in accepted:
                raise TypeError(f"{name} has no key {key!r}; {', '.join(accepted)} are accepted")
        return self.bind(values, borrowed)


class _Kind:
    """How the fields of one kind get their value."""

    #: Whether the caller gives no value of its own.
    follows_from_others = False

    def put(self, struct, name: str, value: Any, borrowed: Borrowed, values: Mapping[str, Any]) -> None:
        raise NotImplementedError


class _Number(_Kind):
    def put(self, struct, name, value, borrowed, values):
        try:
            setattr(struct, name, value)
        except (TypeError, OverflowError) as error:
            raise errors.InvalidArgumentError(f"{name} is {value!r}: {error}") from None


class _Dtype(_Kind):
    def put(self, struct, name, value, borrowed, values):
        try:
            setattr(struct, name, (*dtype_code(value), 1))
        except errors.DtypeError as error:
            raise errors.DtypeError(f"{name}: {error.message}") from None


class _Input(_Kind):
    def put(self, struct, name, value, borrowed, values):
        tensor = Tensor.of(value, name, borrowed.stream)
        borrowed.tensors.append(tensor)
        setattr(struct, name, tensor.c)


class _Output(_Kind):
    def put(self, struct, name, value, borrowed, values):
        tensor = Tensor.of(value, name, borrowed.stream)
        if not tensor.writable:
            raise errors.InvalidArgumentError(f"{name} is read-only; an output has to be writable")
        borrowed.tensors.append(tensor)
        setattr(struct, name, tensor.c)


class InPlace(_Kind):
    """An input that is the output as well, where another argument is None."""

    def __init__(self, unless: str):
        self._unless = unless

    def put(self, struct, name, value, borrowed, values):
        kind = OUTPUT if values.get(self._unless) is None else INPUT
        kind.put(struct, name, value, borrowed, values)


def _number_of(name: str, value: Any, enums: Sequence[type[IntEnum] | type[IntFlag]]) -> int:
    """The number of a constant that is given as one, or by its name in lower case."""
    if isinstance(value, str):
        for enum in enums:
            if value.upper() in enum.__members__:
                return enum[value.upper()].value
        names = ", ".join(f'"{member.lower()}"' for enum in enums for member in enum.__members__)
        raise errors.InvalidArgumentError(f'{name} is "{value}"; {names} are accepted')
    try:
        return int(value)
    except (TypeError, ValueError):
        known = " or ".join(enum.__name__ for enum in enums)
        raise errors.InvalidArgumentError(f"{name} is {value!r}; {known}, a number or a name is accepted") from None


class OneOf(_Kind):
    """A constant of an IntEnum."""

    def __init__(self, enum: type[IntEnum]):
        self._enums = (enum,)

    def put(self, struct, name, value, borrowed, values):
        NUMBER.put(struct, name, _number_of(name, value, self._enums), borrowed, values)


class Flags(_Kind):
    """Constants of IntFlags: a number, a name, or several names."""

    def __init__(self, *enums: type[IntFlag]):
        self._enums = enums

    def put(self, struct, name, value, borrowed, values):
        parts = value if isinstance(value, Iterable) and not isinstance(value, str) else (value,)
        number = 0
        for part in parts:
            number |= _number_of(name, part, self._enums)
        NUMBER.put(struct, name, number, borrowed, values)


class _Array(_Kind):
    """`int32_t *`: compact numbers on the host. `borrowed.lengths` gets how many there are."""

    def _tensor(self, struct, name, value, borrowed):
        tensor = Tensor.of(value, name)
        view = tensor.c
        if tensor.device_type == Device.CUDA or (view.dtype.code, view.dtype.bits) != (0, 32):
            raise errors.DtypeError(f"{name} is {tensor!r}; int32 on the host is accepted")
        shape = tensor.shape
        count = 1
        for extent, stride in zip(reversed(shape), reversed(tensor.strides)):
            if extent > 1 and stride != count:
                raise errors.ShapeError(f"{name} has the strides {list(tensor.strides)}; compact arrays are accepted")
            count *= extent
        borrowed.arrays.append(tensor)
        borrowed.lengths[name] = count
        setattr(struct, name, ffi.cast("int32_t *", view.data))
        return tensor


class _ArrayInput(_Array):
    """May be any sequence of numbers, too: it is only read during the call."""

    def put(self, struct, name, value, borrowed, values):
        if isinstance(value, (list, tuple, range)):
            try:
                numbers = ffi.new("int32_t[]", list(value) or [0])
            except (TypeError, OverflowError) as error:
                raise errors.InvalidArgumentError(f"{name}: {error}") from None
            borrowed.arrays.append(numbers)
            borrowed.lengths[name] = len(value)
            setattr(struct, name, numbers)
        else:
            self._tensor(struct, name, value, borrowed)


class _ArrayOutput(_Array):
    def put(self, struct, name, value, borrowed, values):
        if not self._tensor(struct, name, value, borrowed).writable:
            raise errors.InvalidArgumentError(f"{name} is read-only; an output has to be writable")


class Count(_Kind):
    """How many numbers, or rows of `width` numbers, some arrays have."""

    follows_from_others = True


class Same(Count):
    """All of these arrays have as many numbers."""

    def __init__(self, *arrays: str):
        self._arrays = arrays

    def put(self, struct, name, value, borrowed, values):
        found = {array: borrowed.lengths[array] for array in self._arrays if array in borrowed.lengths}
        if len(set(found.values())) > 1:
            said = ", ".join(f"{array} has {count}" for array, count in found.items())
            raise errors.ShapeError(f"{said} numbers; as many of each are accepted")
        setattr(struct, name, next(iter(found.values()), 0))


class Room(Count):
    """The smallest of these arrays has room for so many rows.

    Args:
        per: the field that widths depend on; None where they do not.
        widths: of each array's rows, as (a, b): a numbers for each of `per`, and b more.
    """

    def __init__(self, per: Optional[str], widths: dict[str, tuple[int, int]]):
        self._per, self._widths = per, widths

    def put(self, struct, name, value, borrowed, values):
        per = getattr(struct, self._per) if self._per else 0
        rooms = [
            borrowed.lengths[array] // max(a * per + b, 1)
            for array, (a, b) in self._widths.items()
            if array in borrowed.lengths
        ]
        setattr(struct, name, min(rooms, default=0))


class _Result(_Kind):
    """`uint32_t *`: a number that the call returns."""

    follows_from_others = True

    def put(self, struct, name, value, borrowed, values):
        result = ffi.new("uint32_t *")
        borrowed.results.append(result)
        setattr(struct, name, result)


class Nested(_Kind):
    """A pointer to another struct: a mapping of its fields."""

    def __init__(self, struct: Struct):
        self._struct = struct

    def put(self, struct, name, value, borrowed, values):
        if not isinstance(value, Mapping):
            raise TypeError(f"{name} is a {type(value).__name__}; a mapping is accepted")
        nested = self._struct.bind_mapping(name, value, borrowed)
        borrowed.arrays.append(nested)
        setattr(struct, name, nested)


NUMBER, DTYPE, INPUT, OUTPUT = _Number(), _Dtype(), _Input(), _Output()
ARRAY_INPUT, ARRAY_OUTPUT, RESULT = _ArrayInput(), _ArrayOutput(), _Result()
