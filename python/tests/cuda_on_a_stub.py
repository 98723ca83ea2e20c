"""The package on a CUDA device, with a driver that computes nothing: run by test_cuda.py in a process of its own.

The driver (tests/stub_driver/stub.c) knows 0x1000 as a stream of the device, 0x2000 as one of another CUDA context,
0x3000 as one that is being captured. torch is a stand-in too, which has what the package asks of it: memory at
addresses that nobody reads, and a current stream. Before it is loaded, workspaces are the driver's.
"""

import contextlib
import ctypes
import gc
import os
import sys
import types
import weakref

import numpy as np

OURS, FOREIGN, CAPTURED = 0x1000, 0x2000, 0x3000
_next_address = 1 << 40


class Tensor:
    """torch.Tensor: compact memory on the device, or on the host where it has an array."""

    layout, requires_grad = "strided", False

    def __init__(self, shape, dtype, host=None):
        global _next_address
        self.shape, self.dtype, self._host = tuple(shape), dtype, host
        self._address, _next_address = _next_address, _next_address + (1 << 24)

    @property
    def device(self):
        return types.SimpleNamespace(type="cuda" if self._host is None else "cpu", index=0)

    def data_ptr(self):
        return self._address if self._host is None else self._host.ctypes.data

    def stride(self):
        return tuple(int(np.prod(self.shape[axis + 1 :])) for axis in range(len(self.shape)))

    def is_neg(self):
        return False


allocated = []


def empty(size, dtype, device=None, pin_memory=False):
    """torch.empty of bytes; page-locked memory is a block of the process."""
    host = np.zeros(size + 256, np.uint8) if pin_memory else None
    if pin_memory:
        host = host[-host.ctypes.data % 256 :][:size]
    allocated.append(("pinned" if pin_memory else device, size))
    return Tensor((size,), dtype, host)


stream = types.SimpleNamespace(cuda_stream=OURS)
torch = types.ModuleType("torch")
torch.Tensor, torch.strided, torch.empty = Tensor, "strided", empty
torch.uint8, torch.int32, torch.bfloat16, torch.float8_e4m3fn = "uint8", "int32", "bfloat16", "float8_e4m3fn"
entered, recorded = [], []


class Event:
    """torch.cuda.Event, behind which the device never gets."""

    def record(self, stream):
        recorded.append(stream)

    def query(self):
        return False


torch.cuda = types.SimpleNamespace(
    current_stream=lambda device_id: stream,
    ExternalStream=lambda number, device: (number, device),
    Event=Event,
    is_current_stream_capturing=lambda: False,
    is_initialized=lambda: True,
    stream=lambda external: contextlib.nullcontext(entered.append(external)),
)

import folio  # noqa: E402

driver = ctypes.CDLL("libcuda.so.1")


class Launch(ctypes.Structure):
    """`struct launch` of stub.c."""

    _fields_ = [
        ("name", ctypes.c_char * 64),
        ("numbers", ctypes.c_uint * 10),
        ("stream", ctypes.c_uint64),
        ("bytes", ctypes.c_uint64),
        ("params", ctypes.c_ubyte * 4096),
        ("maps", ctypes.c_uint64 * 64),
    ]


driver.folio_stub_launches.restype = ctypes.POINTER(Launch)
driver.folio_stub_calls.restype = ctypes.c_char_p
driver.folio_stub_current.restype = ctypes.c_void_p


def streams(call):
    """The streams of a call's launches."""
    driver.folio_stub_forget()
    call()
    count = ctypes.c_uint()
    launches = driver.folio_stub_launches(ctypes.byref(count))
    return [launches[number].stream for number in range(count.value)]


def refused(kind, sentence, call):
    """Whether a call is refused by this class, with this in its message."""
    try:
        call()
    except kind as error:
        assert sentence in str(error), error
    else:
        raise AssertionError(f"{sentence!r} was not refused")


def called(call, *names):
    """The driver's calls of these names during a call, with what is noted of them."""
    driver.folio_stub_forget()
    call()
    # Nobody's context, and none of our rights in captures, stay with the thread.
    assert driver.folio_stub_current() is None and driver.folio_stub_strictness() == 0
    return [line for line in driver.folio_stub_calls().decode().splitlines() if line.startswith(names)]


class OnDevice:
    """An array of Numba's kind: its interface does not say which device it is on."""

    def __init__(self, shape, typestr="<i4", address=1 << 42):
        self.__cuda_array_interface__ = dict(shape=shape, typestr=typestr, data=(address, False), version=3)


def decode_handle(ctx, **more):
    sizes = dict(num_qo_heads=8, num_kv_heads=1, head_dim_qk=64, page_size=16, max_batch_size=2, max_kv_len=64)
    return folio.Decode(ctx, q_dtype="bfloat16", **sizes, **more)


def end(handle):
    handle.close()
    gc.collect()


def memory_of_the_driver(ctx, batch):
    """Workspaces where no torch is."""
    memory = "cuMemAlloc", "cuMemFree", "cuMemHostAlloc"
    retained = driver.folio_stub_retained()
    handle = decode_handle(ctx)
    info = handle.workspace_info
    asked = [f"cuMemAllocAsync {info.device_bytes} stream 0x1000", f"cuMemHostAlloc {info.host_bytes} stream 0"]
    assert called(lambda: handle.plan(**batch, stream=OURS), *memory) == asked
    assert called(lambda: handle.plan(**batch, stream=OURS), *memory) == []
    driver.folio_stub_upload.restype = ctypes.c_void_p
    target, size = ctypes.c_uint64(), ctypes.c_uint64()
    assert driver.folio_stub_upload(0, ctypes.byref(target), ctypes.byref(size))
    assert 0 <= target.value - (1 << 42) < info.device_bytes

    # The memory ends on the stream of the last plan. The host's stays until the device is past that.
    handle.plan(**batch, stream=0)
    freed = [f"cuMemFreeAsync {1 << 42} stream 0", "cuEventCreate", "cuEventRecord"]
    assert called(lambda: end(handle), *memory, "cuEventCreate", "cuEventRecord") == freed
    assert driver.folio_stub_retained() == retained + 1
    other = decode_handle(ctx)
    assert called(lambda: other.plan(**batch, stream=OURS), *memory) == asked
    end(other)
    driver.folio_stub_finish()
    other = decode_handle(ctx)
    assert called(lambda: other.plan(**batch, stream=OURS), *memory) == ["cuMemFreeHost"] * 2 + asked
    assert driver.folio_stub_retained() == retained + 1
    end(other)

    # A stream that a framework made lives as long as the memory does.
    mine = type("Stream", (), {"cuda_stream": OURS})()
    seen = weakref.ref(mine)
    handle = decode_handle(ctx)
    handle.plan(**batch, stream=mine)
    del mine
    gc.collect()
    assert seen() is not None
    end(handle)
    assert seen() is None

    # A capture gets no memory, and memory that was last used in one stays.
    handle = decode_handle(ctx, flags="graph")
    sentence = "workspace is None, and no memory is allocated while the stream is being captured"
    plan = lambda: refused(folio.CaptureError, sentence, lambda: handle.plan(**batch, stream=CAPTURED))  # noqa: E731
    assert called(plan, *memory, "cuLaunchKernelEx") == []
    handle.plan(kv_len=OnDevice((2,)), block_table=OnDevice((2, 2)), stream=OURS)
    handle.plan(kv_len=OnDevice((2,)), block_table=OnDevice((2, 2)), stream=CAPTURED)
    assert called(lambda: end(handle), *memory, "cuEventCreate", "cuEventRecord") == []

    # Half a workspace is given back.
    handle = decode_handle(ctx)
    driver.folio_stub_fail(b"cuMemHostAlloc")
    sentence = "cuMemHostAlloc returned 2 (CUDA_ERROR_OUT_OF_MEMORY)"
    plan = lambda: refused(folio.OutOfMemoryError, sentence, lambda: handle.plan(**batch, stream=OURS))  # noqa: E731
    driver.folio_stub_finish()
    assert [line.split()[0] for line in called(plan, *memory)][-3:] == [
        "cuMemAllocAsync",
        "cuMemHostAlloc",
        "cuMemFreeAsync",
    ]

    # A device without memory pools has its memory until another workspace is made.
    os.environ["FOLIO_STUB"] = "no_pools"
    asked = [f"cuMemAlloc {info.device_bytes} stream 0", f"cuMemHostAlloc {info.host_bytes} stream 0"]
    assert called(lambda: handle.plan(**batch, stream=OURS), *memory)[-2:] == asked
    assert called(lambda: end(handle), *memory) == []
    driver.folio_stub_finish()
    os.environ["FOLIO_STUB"] = "ok"
    handle = decode_handle(ctx)
    freed = called(lambda: handle.plan(**batch, stream=OURS), *memory)[:2]
    assert [line.split()[0] for line in freed] == ["cuMemFree", "cuMemFreeHost"]

    # A torch that does not use the GPU is not asked.
    handle = decode_handle(ctx)
    sys.modules["torch"] = types.SimpleNamespace(
        Tensor=Tensor, cuda=types.SimpleNamespace(is_initialized=lambda: False)
    )
    assert called(lambda: handle.plan(**batch, stream=OURS), "cuMemAllocAsync")
    del sys.modules["torch"]


def devices_of_addresses():
    """Arrays that do not say where they are: the driver knows, if anybody."""
    assert "[2, 4], float16, cuda:0" in repr(folio.Tensor(OnDevice((2, 4), "<f2")))
    sentence = "array does not say which device it is on, nor does the CUDA driver (cuPointerGetAttribute returned 1"
    refused(folio.InvalidArgumentError, sentence, lambda: folio.Tensor(OnDevice((2,), address=4096)))


def append_arguments(make):
    return {
        "key": make((2, 1, 64), "bfloat16"),
        "value": make((2, 1, 64), "bfloat16"),
        "k_cache": make((4, 16, 1, 64), "float8_e4m3fn"),
        "v_cache": make((4, 16, 1, 64), "float8_e4m3fn"),
        "slot_mapping": make((2,), "int32"),
    }


def main():
    try:
        ctx = folio.Context("cuda")
    except folio.UnsupportedError as error:
        print(error)
        return
    assert folio.device_count("cuda") == 1
    lengths = np.array([3, 17], np.int32)
    table = np.array([[0, 0], [1, 2]], np.int32)

    batch = {"kv_len": lengths, "block_table": table}
    devices_of_addresses()
    memory_of_the_driver(ctx, batch)

    # Where torch uses the GPU, it gives the memory. NumPy has no stream.
    sys.modules["torch"] = torch
    decode = decode_handle(ctx)
    refused(folio.InvalidArgumentError, "stream is None, and no tensor is of a library", lambda: decode.plan(**batch))
    info = decode.workspace_info
    allocated.clear()
    decode.plan(**batch, stream=OURS)
    assert allocated == [("cuda:0", info.device_bytes), ("pinned", info.host_bytes)]
    assert entered == [(OURS, "cuda:0")]
    assert b"cuMemcpyHtoDAsync" in driver.folio_stub_calls()

    # The current stream of the tensors' library, unless one is given.
    make = Tensor
    run = {"q": make((2, 8, 64), "bfloat16"), "o": make((2, 8, 64), "bfloat16")}
    run["k"], run["v"] = make((4, 16, 1, 64), "bfloat16"), make((4, 16, 1, 64), "bfloat16")
    launched = streams(lambda: decode.run(**run))
    assert launched and set(launched) == {OURS}, launched
    stream.cuda_stream = FOREIGN
    refused(folio.DeviceMismatchError, "stream", lambda: decode.run(**run))
    for given, used in ((OURS, OURS), (0, 0), (types.SimpleNamespace(cuda_stream=OURS), OURS)):
        assert set(streams(lambda given=given: decode.run(**run, stream=given))) == {used}

    # A prepared call stays on the stream that was current then.
    stream.cuda_stream = OURS
    prepared = decode.prepare_run(**run)
    stream.cuda_stream = FOREIGN
    assert set(streams(prepared)) == {OURS}
    stream.cuda_stream = OURS

    # Device lengths are kept by the handle until the next plan; a plan that fails keeps those of the one before.
    on_device = {"kv_len": make((2,), "int32"), "block_table": make((2, 2), "int32")}
    assert set(streams(lambda: decode.plan(**on_device))) == {OURS}
    kept = sys.getrefcount(on_device["block_table"])
    refused(folio.Error, "kv_len", lambda: decode.plan(kv_len=make((2,), "uint8"), block_table=make((2, 2), "int32")))
    gc.collect()
    assert sys.getrefcount(on_device["block_table"]) == kept
    decode.plan(**batch, stream=OURS)
    gc.collect()
    assert sys.getrefcount(on_device["block_table"]) < kept

    # Operators: fp8 of torch, and what a capture answers to the first call.
    refused(folio.CaptureError, "captur", lambda: folio.kv_append(ctx, **append_arguments(make), stream=CAPTURED))
    assert streams(lambda: folio.kv_append(ctx, **append_arguments(make))) == [OURS]
    assert streams(lambda: folio.kv_append(ctx, **append_arguments(make), stream=CAPTURED)) == [CAPTURED]
    wrong = {**append_arguments(make), "key": np.zeros((2, 1, 64), np.float16)}
    refused(folio.DeviceMismatchError, "key", lambda: folio.kv_append(ctx, **wrong))

    # Page-locked memory, which only its owner knows of.
    pinned = folio.Tensor(empty(4 * 1024, "uint8", pin_memory=True), device="cuda_host")
    assert "cuda_host:0" in repr(pinned)

    # The page-locked memory of a workspace outlives it, until the device is past its last copy.
    assert not recorded
    decode.close()
    gc.collect()
    assert recorded == [(OURS, "cuda:0")]
    ctx.close()
    print("as it should be")


main()
