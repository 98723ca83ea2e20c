"""Memory of other libraries as folio_tensor: torch, NumPy, Paddle, CuPy, and whatever has DLPack or an array interface.

Nothing is copied. torch, Paddle and NumPy are asked directly: that is faster than DLPack, and covers types that their
exports lack (fp8, ml_dtypes). All others are asked for `__cuda_array_interface__`, `__dlpack__` or
`__array_interface__`, in this order.
"""

from __future__ import annotations

import ctypes
import math
import sys
from collections.abc import Iterable
from typing import Any, Callable, NamedTuple, Optional, Protocol, Union

from folio import _errors
from folio._generated.constants import Device
from folio._generated.ffi import ffi

#: Element types by name: DLPack's code, and bits.
DTYPES: dict[str, tuple[int, int]] = {
    **{f"int{bits}": (0, bits) for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": (1, bits) for bits in (8, 16, 32, 64)},
    **{f"float{bits}": (2, bits) for bits in (16, 32, 64)},
    "bfloat16": (4, 16),
    "bool": (6, 8),
    "float8_e4m3fn": (10, 8),
    "float8_e4m3": (10, 8),
    "float8_e5m2": (12, 8),
}

_CPU, _CUDA = int(Device.CPU), int(Device.CUDA)
_LARGEST_RANK = 5


def dtype_code(dtype: Any) -> tuple[int, int]:
    """Code and bits of "bfloat16", torch.bfloat16, np.float16, np.dtype("float16"), …, or of a pair (code, bits)."""
    if isinstance(dtype, tuple):
        return dtype
    name = dtype if isinstance(dtype, str) else getattr(dtype, "name", None) or getattr(dtype, "__name__", str(dtype))
    try:
        return DTYPES[name.rsplit(".", 1)[-1].lower()]
    except KeyError:
        raise _errors.DtypeError(f"dtype is {dtype!r}; {', '.join(DTYPES)} are known") from None


class _Memory(NamedTuple):
    """What a tensor is; strides in elements, None for compact row-major."""

    address: int
    device: tuple[int, int]
    dtype: tuple[int, int]
    shape: tuple[int, ...]
    strides: Optional[tuple[int, ...]]
    writable: bool
    export: Any = None


class _Refusal(Exception):
    """Why a tensor cannot be described: half a sentence."""


class Tensor:
    """A description of memory that someone else owns, and keeps alive for as long as the description lives.

    Wherever a tensor is wanted, a `Tensor` may stand for it. It is worth making for what is passed again and again, as
    the caches of a layer (0.1 µs instead of 1 to 2 µs for each use), and where memory is to be read as another type
    (fp8 pages in a uint8 array) or another device.

    Args:
        array: torch.Tensor, numpy.ndarray, paddle.Tensor, or any object with `__dlpack__`,
            `__cuda_array_interface__` or `__array_interface__`.
        dtype: type of the elements, of as many bits as those of the array; None: the array's.
        device: "cpu", "cuda" or "cuda_host" (page-locked host memory, for `kv_copy`); None: the array's.
        stream: CUDA stream on which the memory will be used, for producers that are asked through DLPack: they make
            it wait for the array.
    """

    __slots__ = ("_described", "_export", "_owner", "c", "device_id", "device_type", "framework", "writable")

    def __init__(self, array: Any, dtype: Any = None, device: Any = None, stream: Any = None):
        self._describe(array, "array", stream, dtype, device)

    @classmethod
    def of(cls, array: Any, name: str, stream: Any = None) -> Tensor:
        """The description of the argument of that name."""
        if type(array) is cls:
            return array
        tensor = cls.__new__(cls)
        tensor._describe(array, name, stream)
        return tensor

    def _describe(self, array: Any, name: str, stream: Any, dtype: Any = None, device: Any = None) -> None:
        if type(array) is Tensor:
            array = array._owner
        kind = type(array)
        known = _KINDS.get(kind) or _learn(array, name)
        try:
            memory = known.describe(array, stream)
        except _Refusal as why:
            raise _errors.InvalidArgumentError(f"{name} {why}") from None
        address, (device_type, device_id), code, shape, strides, self.writable, self._export = memory
        if dtype is not None:
            wanted = dtype_code(dtype)
            if wanted[1] != code[1]:
                raise _errors.DtypeError(f"dtype is {dtype}, of {wanted[1]} bits; {name} has elements of {code[1]} bits")
            code = wanted
        if device is not None:
            device_type = int(Device[device.upper()] if isinstance(device, str) else Device(device))
        if len(shape) > _LARGEST_RANK:
            raise _errors.ShapeError(f"{name} has {len(shape)} dimensions; at most {_LARGEST_RANK} are accepted")
        described = ffi.new(
            _DESCRIBED,
            (
                (ffi.cast("void *", address), device_type, device_id, len(shape), (*code, 1)),
                shape,
                () if strides is None else strides,
            ),
        )
        tensor = described.tensor
        tensor.shape = described.shape
        if strides is not None:
            tensor.strides = described.strides
        self._described, self._owner, self.framework = described, array, known.framework
        self.c = ffi.cast(_TENSOR, described)
        self.device_type, self.device_id = device_type, device_id

    @property
    def shape(self) -> tuple[int, ...]:
        """Extents."""
        return tuple(self._described.shape[0 : self._described.tensor.ndim])

    @property
    def strides(self) -> tuple[int, ...]:
        """Strides, in elements."""
        tensor = self._described.tensor
        if tensor.strides != ffi.NULL:
            return tuple(tensor.strides[0 : tensor.ndim])
        return compact_strides(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
        return math.prod(self.shape) * self._described.tensor.dtype.bits // 8

    @property
    def dtype(self) -> str:
        """Name of the type of the elements."""
        dtype = self._described.tensor.dtype
        return next(name for name, code in DTYPES.items() if code == (dtype.code, dtype.bits))

    @property
    def array(self) -> Any:
        """What is described."""
        return self._owner

    def __repr__(self) -> str:
        device = Device(self.device_type).name.lower()
        return f"folio.Tensor({list(self.shape)}, {self.dtype}, {device}:{self.device_id})"


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


#: What is accepted as a tensor.
TensorLike = Union[Tensor, SupportsDlpack, SupportsCudaArrayInterface, SupportsArrayInterface]

#: An element type by name, as torch, NumPy or Paddle have it, or as DLPack's code and bits.
DtypeLike = Any

#: The number of a CUstream, or a stream of torch, Paddle or CuPy.
StreamLike = Any

_DESCRIBED = ffi.typeof("folio_described_tensor *")
_TENSOR = ffi.typeof("folio_tensor *")


def compact_strides(shape: Iterable[int]) -> tuple[int, ...]:
    """Strides of a row-major tensor without gaps, in elements."""
    strides: list[int] = []
    count = 1
    for extent in reversed(tuple(shape)):
        strides.insert(0, count)
        count *= extent
    return tuple(strides)


def _code(name: str) -> tuple[int, int]:
    try:
        return DTYPES[name]
    except KeyError:
        raise _Refusal(f"has elements of type {name}; {', '.join(DTYPES)} are known") from None


# --- torch ---------------------------------------------------------------------------------------


class _Torch:
    """torch.Tensor and its subclasses."""

    framework = "torch"

    def __init__(self, torch):
        self._torch = torch
        self._codes = {getattr(torch, name): code for name, code in DTYPES.items() if hasattr(torch, name)}

    def describe(self, array, stream) -> _Memory:
        torch = self._torch
        if array.layout is not torch.strided:
            raise _Refusal(f"has the layout {array.layout}; tensors with strides are accepted")
        if array.requires_grad and torch.is_grad_enabled():
            raise _Refusal("requires grad, and Folio computes no gradients; use torch.no_grad() or pass .detach()")
        if array.is_neg():
            raise _Refusal("is a view whose numbers have to be negated; pass .resolve_neg()")
        device = array.device
        if device.type == "cpu":
            place = (_CPU, 0)
        elif device.type == "cuda":
            place = (_CUDA, device.index)
        else:
            raise _Refusal(f"is on {device}; tensors on cpu and cuda are accepted")
        code = self._codes.get(array.dtype) or _code(str(array.dtype))
        return _Memory(array.data_ptr(), place, code, array.shape, array.stride(), True)


# --- NumPy ---------------------------------------------------------------------------------------


class _Numpy:
    """numpy.ndarray."""

    framework = None

    def __init__(self):
        self._codes: dict[Any, tuple[int, int]] = {}

    def _code(self, dtype) -> tuple[int, int]:
        if not dtype.isnative:
            raise _Refusal(f"has elements of type {dtype}, in foreign byte order; the machine's own is accepted")
        code = self._codes[dtype] = _code(dtype.name)
        return code

    def describe(self, array, stream) -> _Memory:
        dtype = array.dtype
        code = self._codes.get(dtype) or self._code(dtype)
        flags = array.flags
        strides = None if flags.c_contiguous else _in_elements(array.strides, array.shape, dtype.itemsize)
        return _Memory(
            array.__array_interface__["data"][0], (_CPU, 0), code, array.shape, strides, flags.writeable
        )


def _in_elements(strides, shape, itemsize: int) -> tuple[int, ...]:
    if any(stride % itemsize for stride in strides):
        raise _Refusal(f"has strides of {strides} bytes; multiples of the element's {itemsize} are accepted")
    return tuple(stride // itemsize for stride in strides)


# --- Paddle --------------------------------------------------------------------------------------


class _Paddle:
    """paddle.Tensor."""

    framework = "paddle"

    def describe(self, array, stream) -> _Memory:
        if not array.is_dense():
            raise _Refusal("is no dense tensor; dense tensors are accepted")
        place = array.place
        if place.is_gpu_place():
            device = (_CUDA, place.gpu_device_id())
        elif place.is_cpu_place() or place.is_cuda_pinned_place():
            device = (_CPU, 0)
        else:
            raise _Refusal(f"is on {place}; tensors on the CPU and on CUDA devices are accepted")
        code = _code(str(array.dtype).rsplit(".", 1)[-1])
        return _Memory(array.data_ptr(), device, code, tuple(array.shape), tuple(array.strides), True)


# --- Protocols -----------------------------------------------------------------------------------


class _ArrayInterface:
    """Objects with `__cuda_array_interface__` or `__array_interface__`, versions 2 and 3."""

    _KINDS = {"f": "float", "i": "int", "u": "uint", "b": "bool"}

    def __init__(self, attribute: str, framework: Optional[str]):
        self._attribute, self.framework = attribute, framework

    def describe(self, array, stream) -> _Memory:
        interface = getattr(array, self._attribute)
        typestr = interface["typestr"]
        order, kind, size = typestr[0], typestr[1], int(typestr[2:])
        if kind not in self._KINDS or order == (">" if sys.byteorder == "little" else "<"):
            raise _Refusal(
                f"has elements of type {typestr!r}; numbers in the machine's byte order are accepted. Say dtype to"
                " folio.Tensor, of unsigned integers, where the interface has no name for the type"
            )
        code = _code("bool" if kind == "b" else f"{self._KINDS[kind]}{8 * size}")
        address, read_only = interface["data"]
        strides = interface.get("strides")
        if strides is not None:
            strides = _in_elements(strides, interface["shape"], size)
        on_device = self._attribute == "__cuda_array_interface__"
        device = (_CUDA, _device_id(array)) if on_device else (_CPU, 0)
        return _Memory(address or 0, device, code, interface["shape"], strides, not read_only)


def _device_id(array) -> int:
    """The ordinal of the device that the array is on, which the interface does not say."""
    device = getattr(array, "device", None)
    found = getattr(device, "id", device)
    if isinstance(found, int):
        return found
    if hasattr(array, "__dlpack_device__"):
        return array.__dlpack_device__()[1]
    raise _Refusal("does not say which device it is on; tensors with a `device` or `__dlpack_device__` are accepted")


class _Dlpack:
    """Objects with `__dlpack__`. The capsule is not consumed: it ends the export when it is collected."""

    def __init__(self, framework: Optional[str], immutable: bool):
        self.framework, self._immutable = framework, immutable

    def describe(self, array, stream) -> _Memory:
        place = array.__dlpack_device__()
        place = (int(place[0]), int(place[1]))
        # DLPack calls the legacy default stream 1, and forbids 0.
        options = {"stream": (stream_number(stream) or 1)} if place[0] == _CUDA and stream is not None else {}
        try:
            capsule = array.__dlpack__(**options)
        except (BufferError, ValueError, TypeError) as error:
            raise _Refusal(f"cannot be exported through DLPack without a copy: {error}") from error
        view = ffi.cast("folio_tensor *", _capsule_pointer(capsule, b"dltensor"))
        if view.dtype.lanes != 1:
            raise _Refusal(f"has elements of {view.dtype.lanes} lanes; 1 is accepted")
        shape = tuple(view.shape[0 : view.ndim])
        strides = None if view.strides == ffi.NULL else tuple(view.strides[0 : view.ndim])
        address = int(ffi.cast("uintptr_t", view.data)) + view.byte_offset
        code = (view.dtype.code, view.dtype.bits)
        return _Memory(address, place, code, shape, strides, not self._immutable, capsule)


_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype = ctypes.c_void_p
_capsule_pointer.argtypes = (ctypes.py_object, ctypes.c_char_p)


# --- Which is which ------------------------------------------------------------------------------

#: How arrays of a type are described; filled as types are met.
_KINDS: dict[type, Any] = {}


def _learn(array: Any, name: str) -> Any:
    """Finds out how arrays of a new type are described."""
    known = _KINDS[type(array)] = _recognise(array, name)
    return known


def _recognise(array: Any, name: str) -> Any:
    libraries = {base.__module__.partition(".")[0] for base in type(array).__mro__}
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if torch is not None and isinstance(array, torch.Tensor):
        return _Torch(torch)
    if numpy is not None and isinstance(array, numpy.ndarray):
        return _Numpy()
    if "paddle" in libraries and hasattr(array, "data_ptr"):
        return _Paddle()
    framework = next((library for library in ("cupy", "torch", "paddle") if library in libraries), None)
    if hasattr(array, "__cuda_array_interface__"):
        return _ArrayInterface("__cuda_array_interface__", framework)
    if hasattr(array, "__dlpack__"):
        return _Dlpack(framework, immutable=bool(libraries & {"jax", "jaxlib"}))
    if hasattr(array, "__array_interface__"):
        return _ArrayInterface("__array_interface__", None)
    raise _errors.InvalidArgumentError(
        f"{name} is a {type(array).__name__}; tensors with __dlpack__, __cuda_array_interface__ or __array_interface__"
        " are accepted"
    )


# --- Streams -------------------------------------------------------------------------------------


def _torch_stream(device_id: int) -> int:
    return sys.modules["torch"].cuda.current_stream(device_id).cuda_stream


def _paddle_stream(device_id: int) -> int:
    return sys.modules["paddle"].device.cuda.current_stream(device_id).cuda_stream


def _cupy_stream(device_id: int) -> int:
    cupy = sys.modules["cupy"]
    with cupy.cuda.Device(device_id):
        return cupy.cuda.get_current_stream().ptr


_CURRENT_STREAM: dict[Optional[str], Callable[[int], int]] = {
    "torch": _torch_stream,
    "paddle": _paddle_stream,
    "cupy": _cupy_stream,
}


def stream_number(stream: Any) -> int:
    """The CUstream of a number, or of a stream of torch, Paddle or CuPy."""
    if isinstance(stream, int):
        return stream
    for attribute in ("cuda_stream", "ptr"):
        number = getattr(stream, attribute, None)
        if isinstance(number, int):
            return number
    if hasattr(stream, "__cuda_stream__"):
        protocol = stream.__cuda_stream__
        return (protocol() if callable(protocol) else protocol)[1]
    raise _errors.InvalidArgumentError(
        f"stream is {stream!r}; the number of a CUstream, or a stream of torch, Paddle or CuPy, is accepted"
    )


def current_stream(tensors: list[Tensor], device_id: int) -> int:
    """The current stream of the framework that the tensors are of, those on a CUDA device first."""
    for tensor in sorted(tensors, key=lambda tensor: tensor.device_type != _CUDA):
        current = _CURRENT_STREAM.get(tensor.framework)
        if current is not None:
            return current(device_id)
    raise _errors.InvalidArgumentError(
        "stream is None, and no tensor is of a library that tells its current stream (torch, Paddle, CuPy); the number"
        " of a CUstream is accepted, 0 for the legacy default stream"
    )
