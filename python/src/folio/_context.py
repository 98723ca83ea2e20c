"""Contexts: a device and what belongs to it."""

from __future__ import annotations

import itertools
import weakref
from typing import Any, Callable, Optional

from folio._binding import Flags, _number_of
from folio._errors import failure, report
from folio._generated import errors
from folio._generated.constants import ContextFlag, Device, LogLevel
from folio._generated.ffi import ffi
from folio._library import lib

#: Who receives messages, by the number that the library passes back. One callback serves all contexts and is never
#: freed, so the library may log for as long as it likes.
_LISTENERS: dict[int, Callable[[LogLevel, str], None]] = {}
_numbers = itertools.count(1)


@ffi.callback("folio_log_fn")
def _log(user, level, message):
    listener = _LISTENERS.get(int(ffi.cast("uintptr_t", user)))
    if listener is not None:
        listener(LogLevel(level), ffi.string(message).decode(errors="replace"))


class Context:
    """A device and what belongs to it: threads, code, messages. Handles keep their context alive.

    Any thread may use it, and several at once. It does not survive fork().

    Args:
        backend: "cpu"; "cuda"; or "reference", the oracle in float64 on the CPU.
        device_id: ordinal of the CUDA device.
        num_threads: on the CPU, threads that compute, the caller's among them, at most 1024; 0 or 1: only the calling
            thread. The others sleep between calls. 0 for the other backends.
        flags: `ContextFlag`.
        log: called with (level, message) on the thread that called Folio. It must not call Folio.
        log_level: the most talkative level that reaches `log`: "error", "warning" or "info".

    Raises:
        UnsupportedError, NoDeviceError, NoDriverError, DriverTooOldError, …: the device cannot be opened.
    """

    def __init__(
        self,
        backend: str = "cpu",
        *,
        device_id: int = 0,
        num_threads: int = 0,
        flags: Any = 0,
        log: Optional[Callable[[LogLevel, str], None]] = None,
        log_level: LogLevel | str = LogLevel.WARNING,
    ):
        self.c = ffi.NULL
        try:
            device, implied = _BACKENDS[backend]
        except KeyError:
            raise errors.InvalidArgumentError(
                f"backend is {backend!r}; {', '.join(map(repr, _BACKENDS))} are accepted"
            ) from None
        desc = ffi.new("folio_context_desc *")
        desc.struct_size = ffi.sizeof("folio_context_desc")
        Flags(ContextFlag).put(desc, "flags", flags, None, {})
        desc.flags |= implied
        desc.device_type = device
        desc.device_id = device_id
        desc.num_threads = num_threads
        if log is not None:
            number = next(_numbers)
            _LISTENERS[number] = log
            weakref.finalize(self, _LISTENERS.pop, number)
            desc.log, desc.log_user = _log, ffi.cast("void *", number)
            desc.log_level = _number_of("log_level", log_level, (LogLevel,))
        out = ffi.new("folio_context **")
        error = report.pointer
        status = lib.folio_context_create(desc, out, error)
        if status:
            raise failure(status, error)
        self.c = ffi.gc(out[0], lib.folio_context_destroy)
        self.backend, self.device_id = backend, device_id
        self.on_cuda = device == Device.CUDA

    def close(self) -> None:
        """Ends the hold on the device. Handles that were made from it stay usable; no call takes it any more."""
        ended, self.c = self.c, ffi.NULL
        if ended != ffi.NULL:
            ffi.release(ended)

    def __enter__(self) -> Context:
        return self

    def __exit__(self, *exception: Any) -> None:
        self.close()

    def __repr__(self) -> str:
        closed = ", closed" if self.c == ffi.NULL else ""
        return f"folio.Context({self.backend!r}, device_id={self.device_id}{closed})"


_BACKENDS = {"cpu": (Device.CPU, 0), "cuda": (Device.CUDA, 0), "reference": (Device.CPU, ContextFlag.REFERENCE)}


def device_count(backend: str) -> int:
    """The number of devices: 1 for "cpu", the driver's count for "cuda", 0 where there is no driver."""
    device, _ = _BACKENDS[backend]
    return lib.folio_device_count(device)
