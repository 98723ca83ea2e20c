"""Failures of the library as exceptions. `folio._generated.errors` has a class for every status."""

from __future__ import annotations

import threading

from folio._generated.constants import Status
from folio._generated.ffi import ffi

#: The exception of every status but OK.
CLASSES: dict[int, type[Error]] = {}


class Error(Exception):
    """A call that failed. Nothing was written, unless the status says otherwise.

    Attributes:
        status: what the library answered, a `Status`, or its number where this package does not know it.
        message: one sentence: field, value, and what would be accepted.
    """

    status: Status | int = Status.ERR_INTERNAL

    def __init__(self, message: str, status: Status | int | None = None):
        super().__init__(message)
        self.message = message
        if status is not None:
            self.status = status

    def __init_subclass__(cls) -> None:
        CLASSES[cls.status] = cls

    def __reduce__(self):
        return type(self), (self.message, self.status)


class _Report(threading.local):
    """Where the library writes what went wrong; one per thread, since calls of several threads run at once."""

    def __init__(self):
        self.pointer = ffi.new("folio_error *")
        self.pointer.struct_size = ffi.sizeof("folio_error")


report = _Report()


def failure(status: int, error) -> Error:
    """The exception for what a call answered, and what it wrote to its report."""
    message = ffi.string(error.message).decode(errors="replace")
    return CLASSES.get(status, Error)(message, None if status in CLASSES else status)
