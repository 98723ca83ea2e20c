"""Arrays of other libraries: how each says where its memory is, and what is in it. Nothing is copied.

torch, Paddle and NumPy are asked directly: that is faster than DLPack, and covers types that their exports lack (fp8,
ml_dtypes). All others are asked for `__cuda_array_interface__`, `__dlpack__` or `__array_interface__`, in this order.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from typing import Any, Optional, Protocol

from folio._driver_memory import device_of
from folio._generated import errors
from folio._generated.constants import Device
from folio._generated.ffi import ffi
from folio._streams import stream_number

#: Element types by name: DLPack's code, and bits.
DTYPES: dict[str, tuple[int, int]] = {
    **{f"int{bits}": (0, bits) for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": (1, bits) for bits in (8, 16, 32, 64)},
    **{f"float{bits}": (2, bits) for bits in (16, 32, 64)},
    "bfloat16": (4, 16),
    "bool": (6, 8),
    "float8_e4m3fn": (10, 8),
    "float8_e5m2": (12, 8),
}

_CUDA = int(Device.CUDA)
_HOST = (int(Device.CPU), 0)


class SupportsDlpack(Protocol):
    """Arrays of torch, NumPy, Paddle, JAX, CuPy, …"""

    def __dlpack__(self, *, stream: Any = ...) -> Any: ...


class SupportsCudaArrayInterface(Protocol):
    """Arrays of CuPy, Numba, …"""

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]: ...


class SupportsArrayInterface(Protocol):
    """Arrays of NumPy, and of what imitates it."""

    @property
    def __array_interface__(self) -> dict[str, Any]: ...


#: What a tensor is: its address, a number or a buffer; device; element type; extents; strides in elements, None for
#: compact row-major; whether it may be written; what keeps an export alive. A plain tuple: it is made for every tensor
#: of every call.
Memory = tuple[Any, tuple[int, int], tuple[int, int], Sequence[int], Optional[Sequence[int]], bool, Any]


class Refusal(Exception):
    """Why a tensor cannot be described: half a sentence."""


def _code(name: str) -> tuple[int, int]:
    try:
        return DTYPES[name]
    except KeyError:
        raise Refusal(f"has elements of type {name}; {', '.join(DTYPES)} are known") from None


# --- torch ---------------------------------------------------------------------------------------


class _Torch:
    """torch.Tensor and its subclasses."""

    framework = "torch"

    def __init__(self, torch):
        self._torch = torch
        self._codes = {getattr(torch, name): code for name, code in DTYPES.items() if hasattr(torch, name)}

    def describe(self, array, stream) -> Memory:
        torch = self._torch
        if array.layout is not torch.strided:
            raise Refusal(f"has the layout {array.layout}; tensors with strides are accepted")
        if array.requires_grad and torch.is_grad_enabled():
            raise Refusal("requires grad, and Folio computes no gradients; use torch.no_grad() or pass .detach()")
        if array.is_neg():
            raise Refusal("is a view whose numbers have to be negated; pass .resolve_neg()")
        device = array.device
        if device.type == "cpu":
            place = _HOST
        elif device.type == "cuda":
            place = (_CUDA, device.index)
        else:
            raise Refusal(f"is on {device}; tensors on cpu and cuda are accepted")
        code = self._codes.get(array.dtype) or _code(str(array.dtype))
        return array.data_ptr(), place, code, array.shape, array.stride(), True, None


# --- NumPy ---------------------------------------------------------------------------------------


class _Numpy:
    """numpy.ndarray."""

    framework = None

    def __init__(self):
        self._codes = {}  # of dtypes that were met

    def _code(self, dtype) -> tuple[int, int]:
        if not dtype.isnative:
            raise Refusal(f"has elements of type {dtype}, in foreign byte order; the machine's own is accepted")
        code = self._codes[dtype] = _code(dtype.name)
        return code

    def describe(self, array, stream) -> Memory:
        dtype = array.dtype
        code = self._codes.get(dtype) or self._code(dtype)
        flags = array.flags
        if flags.c_contiguous:
            # 0.1 µs, where the array interface takes 1.2.
            buffer = ffi.from_buffer(array)
            return buffer, _HOST, code, array.shape, None, flags.writeable, buffer
        strides = _in_elements(array.strides, array.shape, dtype.itemsize)
        return array.__array_interface__["data"][0], _HOST, code, array.shape, strides, flags.writeable, None


def _in_elements(strides: Sequence[int], shape: Sequence[int], itemsize: int) -> tuple[int, ...]:
    if any(stride % itemsize for stride in strides):
        raise Refusal(f"has strides of {strides} bytes; multiples of the element's {itemsize} are accepted")
    return tuple(stride // itemsize for stride in strides)


# --- Paddle --------------------------------------------------------------------------------------


class _Paddle:
    """paddle.Tensor."""

    framework = "paddle"

    def describe(self, array, stream) -> Memory:
        if not array.is_dense():
            raise Refusal("is no dense tensor; dense tensors are accepted")
        place = array.place
        if place.is_gpu_place():
            device = (_CUDA, place.gpu_device_id())
        elif place.is_cpu_place() or place.is_cuda_pinned_place():
            device = _HOST
        else:
            raise Refusal(f"is on {place}; tensors on the CPU and on CUDA devices are accepted")
        code = _code(str(array.dtype).rsplit(".", 1)[-1])
        return array.data_ptr(), device, code, array.shape, array.strides, True, None


# --- Protocols -----------------------------------------------------------------------------------


class _ArrayInterface:
    """Objects with `__cuda_array_interface__` or `__array_interface__`, versions 2 and 3."""

    _KINDS = {"f": "float", "i": "int", "u": "uint", "b": "bool"}

    def __init__(self, attribute: str, framework: Optional[str]):
        self._attribute, self.framework = attribute, framework

    def describe(self, array, stream) -> Memory:
        interface = getattr(array, self._attribute)
        typestr = interface["typestr"]
        order, kind, size = typestr[0], typestr[1], int(typestr[2:])
        if kind not in self._KINDS or order == (">" if sys.byteorder == "little" else "<"):
            raise Refusal(
                f"has elements of type {typestr!r}; numbers in the machine's byte order are accepted. Say dtype to"
                " folio.Tensor, of unsigned integers, where the interface has no name for the type"
            )
        code = _code("bool" if kind == "b" else f"{self._KINDS[kind]}{8 * size}")
        address, read_only = interface["data"]
        strides = interface.get("strides")
        if strides is not None:
            strides = _in_elements(strides, interface["shape"], size)
        on_device = self._attribute == "__cuda_array_interface__"
        device = (_CUDA, _device_id(array, address)) if on_device else _HOST
        return address or 0, device, code, interface["shape"], strides, not read_only, None


def _device_id(array, address) -> int:
    """The ordinal of the device that the array is on, which the interface does not say."""
    device = getattr(array, "device", None)
    found = getattr(device, "id", device)
    if isinstance(found, int):
        return found
    if hasattr(array, "__dlpack_device__"):
        return array.__dlpack_device__()[1]
    try:
        return device_of(address)
    except (OSError, errors.Error) as error:
        raise Refusal(
            f"does not say which device it is on, nor does the CUDA driver ({error}); tensors with a `device` or"
            " `__dlpack_device__`, or in memory that the driver knows, are accepted"
        ) from error


class _Dlpack:
    """Objects with `__dlpack__`. The capsule is not consumed: it ends the export when it is collected."""

    def __init__(self, framework: Optional[str], immutable: bool):
        self.framework, self._immutable = framework, immutable

    def describe(self, array, stream) -> Memory:
        place = array.__dlpack_device__()
        place = (int(place[0]), int(place[1]))
        # DLPack calls the legacy default stream 1, and forbids 0.
        options = {"stream": (stream_number(stream) or 1)} if place[0] == _CUDA and stream is not None else {}
        try:
            capsule = array.__dlpack__(**options)
        except (BufferError, ValueError, TypeError) as error:
            raise Refusal(f"cannot be exported through DLPack without a copy: {error}") from error
        view = ffi.cast("folio_tensor *", _capsule_pointer(capsule, b"dltensor"))
        if view.dtype.lanes != 1:
            raise Refusal(f"has elements of {view.dtype.lanes} lanes; 1 is accepted")
        shape = tuple(view.shape[0 : view.ndim])
        strides = None if view.strides == ffi.NULL else tuple(view.strides[0 : view.ndim])
        address = int(ffi.cast("uintptr_t", view.data)) + view.byte_offset
        code = (view.dtype.code, view.dtype.bits)
        return address, place, code, shape, strides, not self._immutable, capsule


_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype = ctypes.c_void_p
_capsule_pointer.argtypes = (ctypes.py_object, ctypes.c_char_p)


# --- Which is which ------------------------------------------------------------------------------

#: How arrays of a type are described; filled as types are met.
_KINDS: dict[type, Any] = {}


def kind_of(array: Any, name: str) -> Any:
    """What describes arrays of this type: an object with `describe(array, stream)` and `framework`."""
    known = _KINDS.get(type(array))
    if known is None:
        known = _KINDS[type(array)] = _recognise(array, name)
    return known


def _recognise(array: Any, name: str) -> Any:
    libraries = {base.__module__.partition(".")[0] for base in type(array).__mro__}
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if torch is not None and isinstance(array, torch.Tensor):
        return _Torch(torch)
    if numpy is not None and isinstance(array, numpy.ndarray):
        if isinstance(array, numpy.ma.MaskedArray):
            raise errors.InvalidArgumentError(f"{name} is a masked array, whose mask would be ignored; pass .data")
        return _Numpy()
    if "paddle" in libraries and hasattr(array, "data_ptr"):
        return _Paddle()
    if libraries & {"jax", "jaxlib"}:
        # One type for the CPU, without a CUDA interface, and for devices.
        return _Dlpack(None, immutable=True)
    framework = next((library for library in ("cupy", "torch", "paddle") if library in libraries), None)
    if hasattr(array, "__cuda_array_interface__"):
        return _ArrayInterface("__cuda_array_interface__", framework)
    if hasattr(array, "__dlpack__"):
        return _Dlpack(framework, immutable=False)
    if hasattr(array, "__array_interface__"):
        return _ArrayInterface("__array_interface__", None)
    raise errors.InvalidArgumentError(
        f"{name} is a {type(array).__name__}; tensors with __dlpack__, __cuda_array_interface__ or __array_interface__"
        " are accepted"
    )
