"""The devices that Paddle's tests run on: every test on the CPU, and once more on a GPU where Paddle finds one."""

import paddle
import pytest

#: For tests of what no tensor's place changes, or what a process of its own does.
cpu_only = pytest.mark.parametrize("device", ["cpu"], indirect=True)
gpu_only = pytest.mark.parametrize("device", ["cuda"], indirect=True)


def one_after_the_other(device):
    """Makes a device Paddle's own for a test. On a GPU the stream is Paddle's: `Tensor.numpy` waits for no other."""
    if device == "cuda" and not (paddle.is_compiled_with_cuda() and paddle.device.cuda.device_count()):
        pytest.skip("no GPU")
    paddle.set_device("gpu:0" if device == "cuda" else "cpu")
    try:
        yield device
        if device == "cuda":
            paddle.device.cuda.synchronize()
    finally:
        paddle.set_device("cpu")


def on_gpu():
    """Whether this test's tensors are on a GPU."""
    return paddle.device.get_device() != "cpu"


def narrow_on_gpu():
    """The type of tests that need no particular one, where CUDA has no code for float32: MLA, and caches of int8 and int4."""
    return "float16" if on_gpu() else "float32"
