"""Each op is called by both of its ways in: the function that pybind11 binds, and the registered op."""

import os
import warnings

os.environ.setdefault("FOLIO_NUM_THREADS", "2")
warnings.filterwarnings("ignore")

import paddle
import pytest

paddle.set_device("cpu")

import folio_paddle_ops


@pytest.fixture(params=["function", "registered"])
def op(request):
    """op("append_attention")(...), which returns a list."""
    if request.param == "function":
        return lambda name: getattr(folio_paddle_ops, "folio_" + name)
    return lambda name: lambda *args: paddle._C_ops._run_custom_op("static_op_folio_" + name, *args)
