"""The package on a GPU with the arrays of one framework: run by test_gpu_frameworks.py in a process of its own.

    python framework_on_a_gpu.py cupy

No other framework is loaded, torch above all: the workspaces of torch's programs are torch's. Everything is on a stream
that is not the default one, and is computed from arrays that this stream fills a while after the call. Until then they
are NaN (-1 for integers), so that work on another stream shows.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
import traceback

import ml_dtypes
import numpy as np
from batches import Batch, batch
from oracle import attend

import folio
from folio._driver_memory import DriverMemory

PAGE, HEADS, KV_HEADS, DIM = 16, 8, 2, 128
#: How far an output of about 1 may be from the formula.
TOLERANCE = {"float16": 4e-3, "bfloat16": 1.6e-2}


class Driver:
    """Streams of our own, and work on any stream that takes its time."""

    def __init__(self):
        self._library = ctypes.CDLL("libcuda.so.1")
        self._sleep = ctypes.cast(ctypes.CDLL(None).usleep, ctypes.c_void_p)
        self._context = ctypes.c_void_p()
        self._call("cuInit", 0)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), 0)

    def _call(self, name, *arguments):
        code = getattr(self._library, name)(*arguments)
        assert code == 0, f"{name} returned {code}"

    def call(self, name, *arguments):
        """Calls a function in the context that all share, which may not be the thread's. Numbers are addresses."""
        self._call("cuCtxPushCurrent_v2", self._context)
        try:
            self._call(name, *(ctypes.c_void_p(one) if isinstance(one, int) else one for one in arguments))
        finally:
            self._call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def stream(self):
        made = ctypes.c_void_p()
        self.call("cuStreamCreate", ctypes.byref(made), 1)  # the default stream does not wait for it
        return made.value

    def synchronize(self):
        self.call("cuCtxSynchronize")

    def sleep(self, stream, milliseconds):
        """Lets the stream wait: the C library's usleep is a host function as the driver wants it."""
        self.call("cuLaunchHostFunc", stream, self._sleep, milliseconds * 1000)

    def copy_late(self, target, source, size, stream):
        self.call("cuMemsetD8_v2", target, 0xFF, size)
        self.synchronize()
        self.sleep(stream, 20)
        self.call("cuMemcpyDtoDAsync_v2", target, source, size, stream)


class Framework:
    """What the checks ask of a framework. Here is what those have in common whose arrays are writable."""

    dtypes = ("float16",)
    #: Whether it tells its current stream, so that calls need not be given one.
    tells = True

    def __init__(self):
        self.driver = Driver()
        self._sources = []

    @contextlib.contextmanager
    def stream(self):
        """A current stream that is not the default one: as calls are given it, and its number."""
        raise NotImplementedError

    def array(self, array):
        """A copy of a NumPy array on the device."""
        raise NotImplementedError

    def address(self, array):
        raise NotImplementedError

    def host(self, array):
        """A NumPy array, of what the device has computed."""
        raise NotImplementedError

    def output(self, shape, dtype):
        return self.array(np.full(shape, np.nan, dtype))

    def late(self, arrays, stream):
        """Copies on the device that the stream makes a while from now."""
        sources, targets = ([self.array(array) for array in arrays] for _ in range(2))
        self._sources.append(sources)
        self.driver.synchronize()
        for source, target, array in zip(sources, targets, arrays):
            self.driver.copy_late(self.address(target), self.address(source), array.nbytes, stream)
        return targets

    def caches(self, ctx, made, given, stream):
        """The caches of a batch, which kv_append fills with tokens that come late."""
        k, v = (self.array(np.full(made.k.shape, np.nan, made.k.dtype)) for _ in range(2))
        tokens = [(pages, np.arange(length)) for pages, length in zip(made.pages, made.kv_lens)]
        slots = np.concatenate([pages[at // PAGE] * PAGE + at % PAGE for pages, at in tokens])
        key, value = (
            np.concatenate([made.keys(cache, b) for b in range(len(made.kv_lens))]) for cache in (made.k, made.v)
        )
        key, value, slots = self.late([key, value, slots.astype(np.int64)], stream)
        folio.kv_append(ctx, key=key, value=value, k_cache=k, v_cache=v, slot_mapping=slots, **given)
        return k, v


class Torch(Framework):
    """The control: the only one whose workspaces are its own."""

    dtypes = ("float16", "bfloat16")

    def __init__(self):
        super().__init__()
        import torch

        self._torch = torch
        torch.cuda.init()

    @contextlib.contextmanager
    def stream(self):
        made = self._torch.cuda.Stream()
        with self._torch.cuda.stream(made):
            yield made, made.cuda_stream

    def array(self, array):
        if array.dtype == ml_dtypes.bfloat16:
            return self.array(array.view(np.int16)).view(self._torch.bfloat16)
        return self._torch.from_numpy(np.ascontiguousarray(array)).cuda()

    def address(self, array):
        return array.data_ptr()

    def host(self, array):
        self.driver.synchronize()
        return array.double().cpu().numpy()


class Cupy(Framework):
    def __init__(self):
        super().__init__()
        import cupy

        self._cupy = cupy

    @contextlib.contextmanager
    def stream(self):
        made = self._cupy.cuda.Stream(non_blocking=True)
        with made:
            yield made, made.ptr

    def array(self, array):
        return self._cupy.asarray(array)

    def address(self, array):
        return array.data.ptr

    def host(self, array):
        return self._cupy.asnumpy(array)


class Paddle(Framework):
    def __init__(self):
        super().__init__()
        import paddle

        self._paddle = paddle
        paddle.set_device("gpu:0")

    @contextlib.contextmanager
    def stream(self):
        cuda = self._paddle.device.cuda
        made = cuda.Stream()
        with cuda.stream_guard(made):
            yield made, getattr(made, "stream_base", made).cuda_stream

    def array(self, array):
        return self._paddle.to_tensor(np.ascontiguousarray(array))

    def address(self, array):
        return array.data_ptr()

    def host(self, array):
        self.driver.synchronize()
        return array.numpy()


class Numba(Framework):
    """Its arrays do not say which device they are on, and there is no current stream."""

    tells = False

    def __init__(self):
        super().__init__()
        from numba import cuda

        self._cuda = cuda

    @contextlib.contextmanager
    def stream(self):
        number = self.driver.stream()
        yield number, number

    def array(self, array):
        return self._cuda.to_device(np.ascontiguousarray(array))

    def address(self, array):
        return array.__cuda_array_interface__["data"][0]

    def host(self, array):
        self.driver.synchronize()
        return array.copy_to_host()


class Jax(Framework):
    """Its arrays are inputs only. Outputs are arrays of CuPy that JAX takes over by DLPack."""

    dtypes = ("float16", "bfloat16")
    tells = False

    def __init__(self):
        super().__init__()
        import jax
        import jax.dlpack

        self._jax, self._cupy = jax, Cupy()
        step = lambda _, x: jax.numpy.tanh(x @ x)  # noqa: E731
        self._work = jax.numpy.ones((4096, 4096)) / 4096
        # 0, but only the device finds out, some 20 ms later.
        self._zero = jax.jit(lambda x: jax.numpy.isnan(jax.lax.fori_loop(0, 40, step, x)).sum())
        self._add = jax.jit(lambda x, y: x + y.astype(x.dtype))

    def stream(self):
        return self._cupy.stream()

    def array(self, array):
        return self._jax.numpy.asarray(array)

    def late(self, arrays, stream):
        """JAX computes on a stream of its own. Exports make the stream of the call wait for that."""
        sources = self._jax.block_until_ready([self.array(array) for array in arrays])
        zero = self._zero(self._work)
        return [self._add(source, zero) for source in sources]

    def caches(self, ctx, made, given, stream):
        return self.late([made.k, made.v], stream)

    def output(self, shape, dtype):
        if dtype == "bfloat16":
            return folio.Tensor(self._cupy.output(shape, np.float16).view(np.uint16), dtype=dtype)
        return self._cupy.output(shape, dtype)

    def host(self, array):
        bits = self._jax.dlpack.from_dlpack(getattr(array, "array", array))
        if bits.dtype == np.uint16:
            bits = self._jax.lax.bitcast_convert_type(bits, self._jax.numpy.bfloat16)
        return np.asarray(bits)


FRAMEWORKS = {"torch": Torch, "cupy": Cupy, "jax": Jax, "paddle": Paddle, "numba": Numba}


def made_for(dtype, rows, keys):
    made = batch(np.random.default_rng(7), rows, keys, heads=HEADS, kv_heads=KV_HEADS, dim=DIM, page_size=PAGE)
    return Batch(made.qo_lens, made.kv_lens, PAGE, made.pages, *(x.astype(dtype) for x in (made.q, made.k, made.v)))


def desc(dtype):
    sizes = dict(num_qo_heads=HEADS, num_kv_heads=KV_HEADS, head_dim_qk=DIM, page_size=PAGE)
    return dict(q_dtype=dtype, max_batch_size=8, max_kv_len=512, **sizes)


def outputs(framework, made):
    return dict(o=framework.output(made.q.shape, str(made.q.dtype)), lse=framework.output(made.q.shape[:2], "float32"))


def check(framework, made, computed):
    parts = [attend(made.q[made.rows(b)], made.keys(made.k, b), made.keys(made.v, b)) for b in range(len(made.kv_lens))]
    tolerance = TOLERANCE[str(made.q.dtype)]
    for name, wanted in zip(("o", "lse"), map(np.concatenate, zip(*parts))):
        got = np.asarray(framework.host(computed[name]), dtype=np.float64)
        np.testing.assert_allclose(got, wanted, rtol=0, atol=tolerance, err_msg=name)


def decode_on_the_current_stream(framework, ctx, dtype):
    """All arrays are the framework's, the page table and the lengths too. The second time nothing is allocated."""
    made = made_for(dtype, [1] * 5, [1, 16, 37, 150, 300])
    handle = folio.Decode(ctx, **desc(dtype))
    with framework.stream() as (stream, number):
        given = {} if framework.tells else {"stream": stream}
        for _ in range(2):
            computed = outputs(framework, made)
            k, v = framework.caches(ctx, made, given, number)
            q, table, lengths = framework.late([made.q, made.block_table, made.kv_len], number)
            handle.plan(kv_len=lengths, block_table=table, **given)
            handle.run(q=q, k=k, v=v, **computed, **given)
            check(framework, made, computed)


def prefill_with_lengths_on_the_host(framework, ctx, dtype):
    """NumPy tells no stream, so plans are given the framework's. Runs have it from their arrays, JAX's from CuPy's."""
    made = made_for(dtype, [1, 20, 5, 1, 33], [40, 20, 77, 1, 300])
    handle = folio.Prefill(ctx, max_num_tokens=128, **desc(dtype))
    with framework.stream() as (stream, number):
        given = {"stream": stream} if isinstance(framework, Numba) else {}
        for _ in range(2):
            computed = outputs(framework, made)
            q, k, v = framework.late([made.q, made.k, made.v], number)
            handle.plan(qo_indptr=made.qo_indptr, kv_len=made.kv_len, block_table=made.block_table, stream=stream)
            handle.run(q=q, k=k, v=v, **computed, **given)
            check(framework, made, computed)


def plan_outlives_its_handle(framework, ctx, dtype):
    """A handle ends before its plan has begun. Others make workspaces and plan meanwhile; none gets its memory."""
    made = made_for(dtype, [1] * 4, [40, 20, 77, 300])
    lengths = dict(kv_len=made.kv_len, block_table=made.block_table)
    with framework.stream() as (stream, number):
        computed = outputs(framework, made)
        q, k, v = (framework.array(array) for array in (made.q, made.k, made.v))
        handle = folio.Decode(ctx, **desc(dtype))
        handle.plan(**lengths, stream=stream)
        handle.run(q=q, k=k, v=v, **computed, stream=stream)
        framework.driver.synchronize()
        computed = outputs(framework, made)
        framework.driver.synchronize()
        framework.driver.sleep(number, 100)
        handle.plan(**lengths, stream=stream)
        handle.run(q=q, k=k, v=v, **computed, stream=stream)
        handle.close()
        elsewhere = framework.driver.stream()
        others = [folio.Decode(ctx, **desc(dtype)) for _ in range(4)]
        for other in others:
            other.plan(kv_len=np.array([1], np.int32), block_table=np.zeros((1, 1), np.int32), stream=elsewhere)
        check(framework, made, computed)


def captures_get_no_memory(framework, ctx, dtype):
    """They are refused it, and stay whole. They also stay so when memory is made and freed beside them."""
    driver = framework.driver
    captured, other = driver.stream(), driver.stream()
    DriverMemory(0, 1 << 20, 4096, other).end()
    driver.synchronize()
    handle = folio.Decode(ctx, **desc(dtype))
    driver.call("cuStreamBeginCapture_v2", captured, 0)  # the strictest of captures
    try:
        handle.plan(kv_len=np.array([1], np.int32), block_table=np.zeros((1, 1), np.int32), stream=captured)
    except folio.CaptureError as error:
        refusal = str(error)
    else:
        refusal = ""
    DriverMemory(0, 1 << 20, 4096, other).end()
    graph = ctypes.c_void_p()
    driver.call("cuStreamEndCapture", captured, ctypes.byref(graph))
    assert graph.value and "no memory is allocated" in refusal, refusal


def outputs_of_jax_are_refused(framework, ctx, dtype):
    """They cannot be written. Nor does JAX tell its stream."""
    made = made_for(dtype, [1], [16])
    q, k, v, o, lengths, table = map(framework.array, (made.q, made.k, made.v, made.q, made.kv_len, made.block_table))
    handle = folio.Decode(ctx, **desc(dtype))
    refused("stream is None", lambda: handle.plan(kv_len=lengths, block_table=table))
    handle.plan(kv_len=lengths, block_table=table, stream=0)
    refused("o is read-only", lambda: handle.run(q=q, k=k, v=v, o=o, stream=0))


def refused(sentence, call):
    try:
        call()
    except folio.InvalidArgumentError as error:
        assert sentence in str(error), error
    else:
        raise AssertionError(f"{sentence!r} was not refused")


def checks_of(name):
    yield from (decode_on_the_current_stream, prefill_with_lengths_on_the_host, plan_outlives_its_handle)
    if name != "torch":
        yield captures_get_no_memory
    if name == "jax":
        yield outputs_of_jax_are_refused


def main(name):
    """Runs all checks, also behind one that fails."""
    framework, failures = FRAMEWORKS[name](), 0
    with folio.Context("cuda") as ctx:
        for check_of in checks_of(name):
            for dtype in framework.dtypes:
                try:
                    check_of(framework, ctx, dtype)
                    print(f"{check_of.__name__} {dtype}: as it should be")
                except Exception:
                    failures += 1
                    print(f"{check_of.__name__} {dtype}: {traceback.format_exc()}")
    assert (name == "torch") == ("torch" in sys.modules)
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main(sys.argv[1])
