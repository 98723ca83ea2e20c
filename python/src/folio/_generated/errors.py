"""The exception of every status. Generated from folio.h by `python -m generator`; do not edit."""

from folio._errors import Error
from folio._generated.constants import Status

__all__ = [
    "InvalidArgumentError",
    "InvalidStructSizeError",
    "UnknownFieldError",
    "ShapeError",
    "DtypeError",
    "DeviceMismatchError",
    "WorkspaceTooSmallError",
    "NotPlannedError",
    "CaptureError",
    "UnsupportedError",
    "NoDeviceError",
    "NoDriverError",
    "DriverTooOldError",
    "CompileError",
    "OutOfMemoryError",
    "DriverError",
    "InternalError",
]


class InvalidArgumentError(Error):
    """A value is outside what the field accepts."""

    status = Status.ERR_INVALID_ARGUMENT


class InvalidStructSizeError(Error):
    """struct_size is smaller than the struct's first version, not a multiple of its alignment, or not plausible."""

    status = Status.ERR_INVALID_STRUCT_SIZE


class UnknownFieldError(Error):
    """A flag or a field beyond what this library knows is not zero."""

    status = Status.ERR_UNKNOWN_FIELD


class ShapeError(Error):
    """A tensor's rank, extents, strides or alignment do not fit."""

    status = Status.ERR_SHAPE


class DtypeError(Error):
    """A tensor's element type does not fit."""

    status = Status.ERR_DTYPE


class DeviceMismatchError(Error):
    """A tensor or a stream belongs to another device or to another CUDA context."""

    status = Status.ERR_DEVICE_MISMATCH


class WorkspaceTooSmallError(Error):
    """The workspace is missing, misaligned or smaller than needed."""

    status = Status.ERR_WORKSPACE_TOO_SMALL


class NotPlannedError(Error):
    """run before a successful plan."""

    status = Status.ERR_NOT_PLANNED


class CaptureError(Error):
    """The call may not be captured in a CUDA graph."""

    status = Status.ERR_CAPTURE


class UnsupportedError(Error):
    """Legal, but this library, build or device has no code for it."""

    status = Status.ERR_UNSUPPORTED


class NoDeviceError(Error):
    """There is no such device."""

    status = Status.ERR_NO_DEVICE


class NoDriverError(Error):
    """The CUDA driver library is missing, incomplete or a stub."""

    status = Status.ERR_NO_DRIVER


class DriverTooOldError(Error):
    """The CUDA driver is older than this library needs."""

    status = Status.ERR_DRIVER_TOO_OLD


class CompileError(Error):
    """A kernel variant could not be compiled."""

    status = Status.ERR_COMPILE


class OutOfMemoryError(Error):
    """Host or device memory ran out."""

    status = Status.ERR_OUT_OF_MEMORY


class DriverError(Error):
    """The CUDA driver reported a failure, perhaps that of an earlier kernel."""

    status = Status.ERR_DRIVER


class InternalError(Error):
    """A bug in Folio. The object of the call is unusable afterwards and can still be destroyed; outputs may have been
    written. Where the bug was a panic, its message is on stderr too."""

    status = Status.ERR_INTERNAL
