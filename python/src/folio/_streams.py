"""CUDA streams of other libraries."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Callable, Optional

from folio._generated import errors
from folio._generated.constants import Device

if TYPE_CHECKING:
    from folio._tensors import Tensor


def _torch_stream(device_id: int) -> int:
    # torch's streams never end.
    return sys.modules["torch"].cuda.current_stream(device_id).cuda_stream


def _paddle_stream(device_id: int) -> Any:
    return sys.modules["paddle"].device.cuda.current_stream(device_id)


def _cupy_stream(device_id: int) -> Any:
    cupy = sys.modules["cupy"]
    with cupy.cuda.Device(device_id):
        return cupy.cuda.get_current_stream()


#: The current stream of a device, a number or the framework's object, by framework.
_CURRENT_STREAM: dict[Optional[str], Callable[[int], Any]] = {
    "torch": _torch_stream,
    "paddle": _paddle_stream,
    "cupy": _cupy_stream,
}


def stream_number(stream: Any) -> int:
    """The CUstream of a number, or of a stream of torch, Paddle or CuPy."""
    if isinstance(stream, int):
        return stream
    for attribute in ("cuda_stream", "ptr"):
        # A paddle.device.Stream has a CUDAStream in it.
        number = getattr(getattr(stream, "stream_base", stream), attribute, None)
        if isinstance(number, int):
            return number
    if hasattr(stream, "__cuda_stream__"):
        protocol = stream.__cuda_stream__
        return (protocol() if callable(protocol) else protocol)[1]
    raise errors.InvalidArgumentError(
        f"stream is {stream!r}; the number of a CUstream, or a stream of torch, Paddle or CuPy, is accepted"
    )


def current_stream(tensors: Iterable[Tensor], device_id: int) -> Any:
    """The current stream of the framework that the tensors are of, those on a CUDA device first."""
    for tensor in sorted(tensors, key=lambda tensor: tensor.device_type != Device.CUDA):
        current = _CURRENT_STREAM.get(tensor.framework)
        if current is not None:
            return current(device_id)
    raise errors.InvalidArgumentError(
        "stream is None, and no tensor is of a library that tells its current stream (torch, Paddle, CuPy); the number"
        " of a CUstream is accepted, 0 for the legacy default stream"
    )
