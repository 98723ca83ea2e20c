"""What all handles have in common: creation, workspace, plan, end."""

from __future__ import annotations

import mmap
import sys
import weakref
from collections.abc import Mapping
from typing import Any, NamedTuple, Optional, TypeVar

from folio._binding import Borrowed, Struct
from folio._calls import Call, object_call, stream_pointer
from folio._context import Context
from folio._driver_memory import DriverMemory
from folio._errors import call
from folio._generated import errors
from folio._generated.constants import Device
from folio._generated.ffi import ffi
from folio._library import function
from folio._streams import stream_number
from folio._tensors import Tensor, TensorLike, compact_strides

H = TypeVar("H", bound="Handle")


class WorkspaceInfo(NamedTuple):
    """Memory that a handle needs for any batch within its desc; nothing has to be zeroed.

    Attributes:
        device_bytes: bytes of device memory; 0 on the CPU.
        host_bytes: bytes of host memory, which should be page-locked for CUDA.
        alignment: alignment of both addresses, in bytes.
    """

    device_bytes: int
    host_bytes: int
    alignment: int


class Workspace:
    """Memory for the plans of one handle. It belongs to the handle from plan until the next plan.

    Args:
        device: compact tensor on the device, of any type; None where device_bytes is 0.
        host: compact tensor on the host, page-locked for CUDA; None where host_bytes is 0.
    """

    __slots__ = ("__weakref__", "_driver_memory", "_kept", "c")

    def __init__(self, device: Optional[TensorLike] = None, host: Optional[TensorLike] = None):
        self.c = ffi.new("folio_workspace *")
        self.c.struct_size = ffi.sizeof("folio_workspace")
        self._kept: list[Any] = []
        self._driver_memory: Optional[DriverMemory] = None
        for name, array in (("device", device), ("host", host)):
            if array is not None:
                tensor = Tensor.of(array, name)
                if (tensor.device_type == Device.CUDA) != (name == "device") or not tensor.writable:
                    raise errors.DeviceMismatchError(f"{name} is {tensor!r}; writable memory of the {name} is accepted")
                if tensor.c.strides != ffi.NULL and tensor.strides != compact_strides(tensor.shape):
                    raise errors.ShapeError(
                        f"{name} has the strides {list(tensor.strides)}; compact memory is accepted"
                    )
                self._take(name, tensor.c.data, tensor.nbytes, tensor)

    def _take(self, name: str, address: Any, size: int, owner: Any) -> None:
        setattr(self.c, name, address)
        setattr(self.c, name + "_bytes", size)
        self._kept.append(owner)

    @classmethod
    def allocate(cls, info: WorkspaceInfo, context: Context, stream: Any) -> Workspace:
        """Memory for plans on a stream: of the process for the CPU, of torch or the driver for a CUDA device."""
        if not context.on_cuda:
            return cls._of_process(info)
        torch = sys.modules.get("torch")
        # torch keeps what it frees, so where it uses the GPU the driver may have none left. A torch without CUDA, or
        # one that is there for the CPU, has none to give.
        if torch is not None and torch.cuda.is_initialized():
            return cls._of_torch(torch, info, f"cuda:{context.device_id}", stream_number(stream))
        return cls._of_driver(info, context.device_id, stream)

    @classmethod
    def _of_process(cls, info: WorkspaceInfo) -> Workspace:
        workspace = cls()
        if info.host_bytes:
            # Pages that are never touched take no memory, and nothing is zeroed twice.
            memory = ffi.from_buffer(mmap.mmap(-1, info.host_bytes))
            workspace._take("host", memory, info.host_bytes, memory)
        return workspace

    @classmethod
    def _of_torch(cls, torch: Any, info: WorkspaceInfo, device: str, stream: int) -> Workspace:
        """torch gives memory again in the order of the stream that it was allocated on, so that is the plan's."""
        used_on = torch.cuda.ExternalStream(stream, device=device)
        with torch.cuda.stream(used_on):
            memory = torch.empty(info.device_bytes, dtype=torch.uint8, device=device)
        # Whatever torch's default device is.
        host = torch.empty(info.host_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)
        workspace = cls(memory, host)
        weakref.finalize(workspace, _retire, torch.cuda, host, used_on).atexit = False
        return workspace

    @classmethod
    def _of_driver(cls, info: WorkspaceInfo, device_id: int, stream: Any) -> Workspace:
        memory = DriverMemory(device_id, info.device_bytes, info.host_bytes, stream)
        workspace = cls()
        workspace._driver_memory = memory
        workspace._take("device", ffi.cast("void *", memory.device), info.device_bytes, memory)
        workspace._take("host", ffi.cast("void *", memory.host), info.host_bytes, memory)
        weakref.finalize(workspace, memory.end).atexit = False
        return workspace

    def planned_on(self, stream: Any) -> None:
        """Tells on which stream the last plan is. It is kept until the workspace ends, which the device tells there."""
        if self._driver_memory is not None:
            self._driver_memory.stream = stream


#: Page-locked memory of workspaces that ended, and the event behind the last copy out of it; None: it stays.
_retired: list[tuple[Any, Any]] = []


def _retire(cuda: Any, host: Any, stream: Any) -> None:
    """Keeps page-locked memory until the device has read it: torch would give it to the next who asks."""
    if cuda.is_current_stream_capturing():
        # A capture may neither ask events nor, on another stream, record them.
        _retired.append((None, host))
        return
    _retired[:] = [(event, memory) for event, memory in _retired if event is None or not event.query()]
    event = cuda.Event()
    event.record(stream)
    _retired.append((event, host))


class Handle:
    """Attention for one problem: made once, planned once per step, run once per layer.

    One thread plans; runs may be concurrent, with different outputs. A handle is a context manager, whose end is
    `close`.
    """

    _name = ""

    def __init__(self, context: Context, struct: Struct, values: Mapping[str, Any]):
        self.c = ffi.NULL
        self.context = context
        desc = struct.bind(values, Borrowed())
        out = ffi.new(f"folio_{self._name} **")
        call(self._function("create"), context.c, desc, out)
        self.c = ffi.gc(out[0], self._function("destroy"))
        info = ffi.new("folio_workspace_info *")
        info.struct_size = ffi.sizeof("folio_workspace_info")
        call(self._function("workspace"), self.c, info)
        self.workspace_info = WorkspaceInfo(info.device_bytes, info.host_bytes, info.alignment)
        self._workspace: Optional[Workspace] = None
        self._planned: Optional[Borrowed] = None

    @property
    def kernel(self) -> str:
        """Name of the kernel that was picked, such as "cpu/avx512"."""
        name = self._function("kernel")(self.c)
        if name == ffi.NULL:
            raise errors.InvalidArgumentError("the handle is closed")
        return ffi.string(name).decode()

    def close(self) -> None:
        """Ends the handle, without waiting for the device. No call of it may be running on the host."""
        ended, self.c = self.c, ffi.NULL
        if ended != ffi.NULL:
            ffi.release(ended)
        self._workspace = self._planned = None

    def __enter__(self: H) -> H:
        return self

    def __exit__(self, *exception: Any) -> None:
        self.close()

    def _plan(self, batch: Struct, values: Mapping[str, Any], prefixes: Optional[Struct] = None) -> None:
        borrowed = Borrowed(values["stream"])
        bound = [batch.bind(values, borrowed)]
        if prefixes is not None:
            shared = values["prefixes"]
            bound.append(ffi.NULL if shared is None else prefixes.bind_mapping("prefixes", shared, borrowed))
        stream = stream_pointer(self.context, values["stream"], borrowed)
        workspace = values["workspace"] or self._workspace
        if workspace is None:
            workspace = Workspace.allocate(self.workspace_info, self.context, borrowed.stream)
        call(self._function("plan"), self.c, *bound, workspace.c, stream)
        workspace.planned_on(borrowed.stream)
        # Page ids on a device, and the workspace, are read until the next plan.
        self._workspace, self._planned = workspace, borrowed

    def _function(self, name: str) -> Any:
        """The C function of that name, of this kind of handle."""
        return function(f"folio_{self._name}_{name}")

    def _call(self, name: str, struct: Struct, values: Mapping[str, Any], *first: int, **mappings: Struct) -> Call:
        return object_call(self._function(name), self, self.context, struct, values, *first, **mappings)

    def _number(self, name: str, *first: int) -> int:
        out = ffi.new("uint32_t *")
        call(self._function(name), self.c, *first, out)
        return out[0]
