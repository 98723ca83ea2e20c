"""Failures of the library as exceptions: one class per status, each with the library's sentence."""

from __future__ import annotations

import threading

from folio._generated.constants import Status
from folio._generated.ffi import ffi


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

    def __reduce__(self):
        return type(self), (self.message, self.status)


def _class_name(status: Status) -> str:
    words = status.name[len("ERR_") :].title().replace("_", "")
    return words if words.endswith("Error") else words + "Error"


def _subclass(status: Status) -> type[Error]:
    body = {"__doc__": f"Status {status.name}.", "__module__": "folio", "status": status}
    return type(_class_name(status), (Error,), body)


#: The exception of every status but OK.
CLASSES: dict[int, type[Error]] = {status: _subclass(status) for status in Status if status}

InvalidArgumentError = CLASSES[Status.ERR_INVALID_ARGUMENT]
InvalidStructSizeError = CLASSES[Status.ERR_INVALID_STRUCT_SIZE]
UnknownFieldError = CLASSES[Status.ERR_UNKNOWN_FIELD]
ShapeError = CLASSES[Status.ERR_SHAPE]
DtypeError = CLASSES[Status.ERR_DTYPE]
DeviceMismatchError = CLASSES[Status.ERR_DEVICE_MISMATCH]
WorkspaceTooSmallError = CLASSES[Status.ERR_WORKSPACE_TOO_SMALL]
NotPlannedError = CLASSES[Status.ERR_NOT_PLANNED]
CaptureError = CLASSES[Status.ERR_CAPTURE]
UnsupportedError = CLASSES[Status.ERR_UNSUPPORTED]
NoDeviceError = CLASSES[Status.ERR_NO_DEVICE]
NoDriverError = CLASSES[Status.ERR_NO_DRIVER]
DriverTooOldError = CLASSES[Status.ERR_DRIVER_TOO_OLD]
CompileError = CLASSES[Status.ERR_COMPILE]
OutOfMemoryError = CLASSES[Status.ERR_OUT_OF_MEMORY]
DriverError = CLASSES[Status.ERR_DRIVER]
InternalError = CLASSES[Status.ERR_INTERNAL]


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

__all__ = ["Error", *(kind.__name__ for kind in CLASSES.values())]
