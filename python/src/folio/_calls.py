"""Calls of the library: prepared once, made any number of times.

Every operator is written as a function that prepares a `Call`. `@operator` makes of it the one that also makes the
call, and `prepare` gives the prepared one back.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Callable, Generic, TypeVar, cast, overload

from folio._binding import Borrowed, Struct
from folio._errors import call, failure, report
from folio._generated.ffi import ffi
from folio._library import function
from folio._streams import current_stream, stream_number

if TYPE_CHECKING:
    from typing_extensions import ParamSpec

    from folio._context import Context

    P = ParamSpec("P")

R = TypeVar("R")


class Call:
    """A call whose arguments are bound: calling it costs little more than the C call.

    It keeps its tensors alive, and reads and writes the memory that they had when it was prepared. It runs on the
    stream that was current then, or that was given.
    """

    __slots__ = ("_arguments", "_borrowed", "_function", "_object")

    def __init__(self, function: Any, owner: Any, arguments: tuple[Any, ...], borrowed: Borrowed):
        self._function, self._object, self._arguments, self._borrowed = function, owner, arguments, borrowed

    def __call__(self) -> None:
        error = report.pointer
        status = self._function(self._object.c, *self._arguments, error)
        if status:
            raise failure(status, error)


class Figure(Generic[R]):
    """A prepared call of a function that needs no context, and returns numbers."""

    __slots__ = ("_borrowed", "_function", "_struct")

    def __init__(self, name: str, struct: Struct, values: Mapping[str, Any]):
        self._borrowed = Borrowed()
        self._struct = struct.bind(values, self._borrowed)
        self._function = function(name)

    def __call__(self) -> R:
        call(self._function, self._struct)
        numbers = tuple(result[0] for result in self._borrowed.results)
        returned: Any = numbers if len(numbers) > 1 else numbers[0] if numbers else None
        return returned


def stream_pointer(context: Context, stream: Any, borrowed: Borrowed) -> Any:
    """The stream of a call: the one that was given, or the current one of the tensors' framework."""
    if stream is None:
        if not context.on_cuda:
            return ffi.NULL
        # With the call lives the framework's stream, which may be nobody else's.
        stream = borrowed.stream = current_stream(borrowed.tensors, context.device_id)
    return ffi.cast("void *", stream_number(stream))


def context_call(name: str, context: Context, struct: Struct, values: Mapping[str, Any]) -> Call:
    """A call of an operator that takes a context, a struct and a stream."""
    return object_call(function(name), context, context, struct, values)


def object_call(
    called: Any,
    owner: Any,
    context: Context,
    struct: Struct,
    values: Mapping[str, Any],
    *first: Any,
    **mappings: Struct,
) -> Call:
    """A call of a function that takes an object, some numbers, structs that callers give as mappings, a struct and a
    stream.
    """
    stream = values["stream"]
    borrowed = Borrowed(stream)
    bound = [one.bind_mapping(name, values[name], borrowed) for name, one in mappings.items()]
    bound.append(struct.bind(values, borrowed))
    return Call(called, owner, (*first, *bound, stream_pointer(context, stream, borrowed)), borrowed)


@overload
def operator(prepares: Callable[P, Call]) -> Callable[P, None]: ...
@overload
def operator(prepares: Callable[P, Figure[R]]) -> Callable[P, R]: ...
def operator(prepares: Any) -> Any:
    """Makes a function that prepares a call one that makes it."""

    @functools.wraps(prepares)
    def calls(*args, **kwargs):
        return prepares(*args, **kwargs)()

    # Where the one returns a `Call` or a `Figure[int]`, the other returns None or int.
    returned = prepares.__annotations__["return"].partition("[")[2].removesuffix("]") or "None"
    calls.__annotations__ = {**prepares.__annotations__, "return": returned}
    calls.__signature__ = inspect.signature(prepares).replace(return_annotation=returned)  # type: ignore[attr-defined]
    return calls


def prepare(function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Callable[[], R]:
    """Binds the arguments of an operator, or of a handle's `run`, without calling it.

        append = folio.prepare(folio.kv_append, ctx, key=key, value=value, ...)
        append()

    Calling the result does the call, with what the tensors hold then. Arguments are checked by the library at each
    call. Calls that were prepared for a handle serve all its plans.
    """
    prepares = cast(Any, function).__wrapped__
    handle = getattr(function, "__self__", None)
    return prepares(*args, **kwargs) if handle is None else prepares(handle, *args, **kwargs)


def prepared(function: Callable[P, R]) -> Callable[P, Callable[[], R]]:
    """The function that prepares the calls of an operator."""
    return cast(Any, function).__wrapped__
