"""Memory of the CUDA driver: workspaces of programs in which torch does not use the GPU, and whose an address is.

This is no allocator. A workspace is two allocations of the driver, on the device and page-locked on the host, and only
they are known here; frameworks have their own. The driver is that of the process, loaded by the first use. It is called
through ctypes, which costs no parser at import, in the device's primary context, where Folio and all frameworks work.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import functools
from collections.abc import Iterator
from typing import Any

from folio._generated import errors
from folio._streams import stream_number

_NUMBER, _SIZE, _ADDRESS = ctypes.c_int, ctypes.c_size_t, ctypes.c_void_p

#: The driver's functions that are called, by the types of their arguments. They answer a number, 0 for success.
_FUNCTIONS = {
    "cuCtxPopCurrent_v2": (_ADDRESS,),
    "cuCtxPushCurrent_v2": (_ADDRESS,),
    "cuDeviceGet": (_ADDRESS, _NUMBER),
    "cuDeviceGetAttribute": (_ADDRESS, _NUMBER, _NUMBER),
    "cuDevicePrimaryCtxRelease_v2": (_NUMBER,),
    "cuDevicePrimaryCtxRetain": (_ADDRESS, _NUMBER),
    "cuEventCreate": (_ADDRESS, _NUMBER),
    "cuEventDestroy_v2": (_ADDRESS,),
    "cuEventQuery": (_ADDRESS,),
    "cuEventRecord": (_ADDRESS, _ADDRESS),
    "cuGetErrorName": (_NUMBER, _ADDRESS),
    "cuMemAllocAsync": (_ADDRESS, _SIZE, _ADDRESS),
    "cuMemAlloc_v2": (_ADDRESS, _SIZE),
    "cuMemFreeAsync": (_ADDRESS, _ADDRESS),
    "cuMemFreeHost": (_ADDRESS,),
    "cuMemFree_v2": (_ADDRESS,),
    "cuMemHostAlloc": (_ADDRESS, _SIZE, _NUMBER),
    "cuPointerGetAttribute": (_ADDRESS, _NUMBER, _ADDRESS),
    "cuStreamIsCapturing": (_ADDRESS, _ADDRESS),
    "cuThreadExchangeStreamCaptureMode": (_ADDRESS,),
}

# Numbers of cuda.h.
_OUT_OF_MEMORY = 2
_POINTER_DEVICE_ORDINAL = 9
_DEVICE_MEMORY_POOLS_SUPPORTED = 115
_EVENT_DISABLE_TIMING = 2
_CAPTURE_MODE_RELAXED = 2
_LEGACY_STREAM = 1


@functools.cache
def _driver() -> Any:
    library = ctypes.CDLL("libcuda.so.1")
    for name, arguments in _FUNCTIONS.items():
        getattr(library, name).argtypes = arguments
    return library


def _call(name: str, *arguments: Any) -> None:
    code = getattr(_driver(), name)(*arguments)
    if code:
        text = ctypes.c_char_p()
        _driver().cuGetErrorName(code, ctypes.byref(text))
        kind = errors.OutOfMemoryError if code == _OUT_OF_MEMORY else errors.DriverError
        raise kind(f"{name} returned {code} ({(text.value or b'no name').decode()})")


def _ask(kind: Any, name: str, *arguments: Any) -> Any:
    """What a function writes through its first argument."""
    answer = kind()
    _call(name, ctypes.byref(answer), *arguments)
    return answer.value


def _is_capturing(stream: int) -> bool:
    # The legacy default stream never is, and may not be asked while another one is.
    if stream <= _LEGACY_STREAM:
        return False
    status = _NUMBER()
    _call("cuStreamIsCapturing", stream, ctypes.byref(status))
    return status.value != 0


def device_of(address: int) -> int:
    """The ordinal of the device that the memory at an address is on."""
    return _ask(_NUMBER, "cuPointerGetAttribute", _POINTER_DEVICE_ORDINAL, address)


#: Memory of workspaces that ended, until it is freed. A deque, since workspaces may end on every thread.
_ended: collections.deque[DriverMemory] = collections.deque()


def _free_ended() -> None:
    """Frees what the device is through with. Giving page-locked memory back may wait for the device, so that is left to
    those who make a workspace.
    """
    for _ in range(len(_ended)):
        try:
            memory = _ended.popleft()
        except IndexError:
            return  # another thread was first
        with contextlib.suppress(errors.Error):
            if memory._free():
                continue
        _ended.append(memory)


class DriverMemory:
    """The memory of one workspace.

    Attributes:
        device, host: addresses; 0 where no bytes were asked for.
        stream: on which the memory was last used: a number, or the stream of a framework, which is kept alive by it.
    """

    __slots__ = ("_context", "_event", "_ordinal", "_pooled", "device", "host", "stream")

    def __init__(self, ordinal: int, device_bytes: int, host_bytes: int, stream: Any):
        self.device = self.host = 0
        self.stream = stream
        self._event = None
        self._ordinal = _ask(_NUMBER, "cuDeviceGet", ordinal)
        self._pooled = bool(_ask(_NUMBER, "cuDeviceGetAttribute", _DEVICE_MEMORY_POOLS_SUPPORTED, self._ordinal))
        # It stays while the memory does, whoever else gives it up.
        self._context = _ask(_ADDRESS, "cuDevicePrimaryCtxRetain", self._ordinal)
        try:
            with self._current():
                self._allocate(device_bytes, host_bytes, stream_number(stream))
        except errors.Error:
            self.end()
            raise

    def _allocate(self, device_bytes: int, host_bytes: int, stream: int) -> None:
        if _is_capturing(stream):
            # The memory would belong to the graph.
            raise errors.CaptureError(
                "workspace is None, and no memory is allocated while the stream is being captured; a plan before the"
                " capture, or a folio.Workspace, is accepted"
            )
        _free_ended()
        if device_bytes and self._pooled:
            self.device = _ask(_SIZE, "cuMemAllocAsync", device_bytes, stream)
        elif device_bytes:
            self.device = _ask(_SIZE, "cuMemAlloc_v2", device_bytes)
        if host_bytes:
            self.host = _ask(_SIZE, "cuMemHostAlloc", host_bytes, 0)

    @contextlib.contextmanager
    def _current(self) -> Iterator[None]:
        """Makes the context the thread's for a while. What is called there may not break a capture of another stream:
        the driver forbids even harmless calls during one, unless the thread says that it knows.
        """
        _call("cuCtxPushCurrent_v2", self._context)
        mode = _NUMBER(_CAPTURE_MODE_RELAXED)
        try:
            _call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
            try:
                yield
            finally:
                _call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
        finally:
            _ask(_ADDRESS, "cuCtxPopCurrent_v2")

    def end(self) -> None:
        """Gives the memory back without waiting: the device's in the order of the stream, the host's later, when the
        device has read it and another workspace is made.
        """
        with contextlib.suppress(errors.Error):
            self._leave_stream()
        _ended.append(self)

    def _leave_stream(self) -> None:
        """Puts an event behind what the stream has been given. A capture has to end first."""
        stream = stream_number(self.stream)
        with self._current():
            if _is_capturing(stream):
                return
            if self.device and self._pooled:
                _call("cuMemFreeAsync", self.device, stream)
                self.device = 0
            event = _ask(_ADDRESS, "cuEventCreate", _EVENT_DISABLE_TIMING)
            _call("cuEventRecord", event, stream)
            self._event, self.stream = event, 0

    def _free(self) -> bool:
        """Frees what is left, if the device is past the event."""
        if self._event is None:
            self._leave_stream()
        with self._current():
            if self._event is None or _driver().cuEventQuery(self._event):
                return False
            if self.device:
                _call("cuMemFree_v2", self.device)
            if self.host:
                _call("cuMemFreeHost", self.host)
            _call("cuEventDestroy_v2", self._event)
        _call("cuDevicePrimaryCtxRelease_v2", self._ordinal)
        return True
