"""Each op is called by both of its ways in: the function that pybind11 binds, and the registered op. Every test runs on both
devices."""

import os
import sys
import warnings

os.environ.setdefault("FOLIO_NUM_THREADS", "2")
warnings.filterwarnings("ignore")
sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "testing"))

import paddle
import pytest

paddle.set_device("cpu")

import folio_paddle_ops
import paddle_devices


@pytest.fixture(autouse=True, params=["cpu", "cuda"])
def device(request):
    """The device of the test's tensors."""
    yield from paddle_devices.one_after_the_other(request.param)


@pytest.fixture(params=["function", "registered"])
def op(request):
    """op("append_attention")(...), which returns a list."""
    if request.param == "function":
        return lambda name: getattr(folio_paddle_ops, "folio_" + name)
    return lambda name: lambda *args: paddle._C_ops._run_custom_op("static_op_folio_" + name, *args)
