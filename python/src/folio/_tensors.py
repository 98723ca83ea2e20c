"""`Tensor`: a folio_tensor over memory that someone else owns. `folio._arrays` knows the owners."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Union

from folio._arrays import DTYPES, Refusal, SupportsArrayInterface, SupportsCudaArrayInterface, SupportsDlpack, kind_of
from folio._generated import errors
from folio._generated.constants import Device
from folio._generated.ffi import ffi

_LARGEST_RANK = 5
_DESCRIBED = ffi.typeof("folio_described_tensor *")
_TENSOR = ffi.typeof("folio_tensor *")
_VOID = ffi.typeof("void *")


def dtype_code(dtype: Any) -> tuple[int, int]:
    """Code and bits of "bfloat16", torch.bfloat16, np.float16, np.dtype("float16"), …, or of a pair (code, bits)."""
    if isinstance(dtype, tuple):
        return dtype
    name: Any = (
        dtype if isinstance(dtype, str) else getattr(dtype, "name", None) or getattr(dtype, "__name__", str(dtype))
    )
    try:
        return DTYPES[name.rsplit(".", 1)[-1].lower()]
    except KeyError:
        raise errors.DtypeError(f"dtype is {dtype!r}; {', '.join(DTYPES)} are known") from None


def _device_type(device: Any) -> int:
    try:
        return int(Device[device.upper()] if isinstance(device, str) else Device(device))
    except (KeyError, ValueError):
        names = ", ".join(f'"{one.name.lower()}"' for one in Device)
        raise errors.InvalidArgumentError(f"device is {device!r}; {names} are accepted") from None


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

    _owner: Any
    device_type: int
    device_id: int

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
            dtype = array.dtype if dtype is None else dtype
            device = array.device_type if device is None else device
            array = array._owner
        known = kind_of(array, name)
        try:
            memory = known.describe(array, stream)
        except Refusal as why:
            raise errors.InvalidArgumentError(f"{name} {why}") from None
        address, (device_type, device_id), code, shape, strides, self.writable, self._export = memory
        rank = len(shape)
        if dtype is not None:
            wanted = dtype_code(dtype)
            if wanted[1] != code[1]:
                raise errors.DtypeError(f"dtype is {dtype}, of {wanted[1]} bits; {name} has elements of {code[1]} bits")
            code = wanted
        if device is not None:
            device_type = _device_type(device)
        if rank > _LARGEST_RANK:
            raise errors.ShapeError(f"{name} has {rank} dimensions; at most {_LARGEST_RANK} are accepted")
        if type(address) is int:
            address = ffi.cast(_VOID, address)
        described = ffi.new(
            _DESCRIBED, ((address, device_type, device_id, rank, (*code, 1)), shape, () if strides is None else strides)
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
        names = [name for name, code in DTYPES.items() if code == (dtype.code, dtype.bits)]
        return names[0] if names else f"({dtype.code}, {dtype.bits})"

    @property
    def array(self) -> Any:
        """What is described."""
        return self._owner

    def __repr__(self) -> str:
        device = Device(self.device_type).name.lower()
        return f"folio.Tensor({list(self.shape)}, {self.dtype}, {device}:{self.device_id})"


def compact_strides(shape: Iterable[int]) -> tuple[int, ...]:
    """Strides of a row-major tensor without gaps, in elements."""
    strides: list[int] = []
    count = 1
    for extent in reversed(tuple(shape)):
        strides.insert(0, count)
        count *= extent
    return tuple(strides)


#: What is accepted as a tensor.
TensorLike = Union[Tensor, SupportsDlpack, SupportsCudaArrayInterface, SupportsArrayInterface]

#: An element type by name, as torch, NumPy or Paddle have it, or as DLPack's code and bits.
DtypeLike = Any

#: The number of a CUstream, or a stream of torch, Paddle or CuPy.
StreamLike = Any
