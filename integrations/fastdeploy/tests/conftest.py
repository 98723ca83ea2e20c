"""The plugin and a stand-in for FastDeploy, both imported afresh for each test. Every test runs on both devices."""

import importlib
import os
import sys
import warnings

here = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [os.path.join(here, "stub"), os.path.dirname(here), os.path.join(here, "..", "..", "paddle", "tests"),
                os.path.join(here, "..", "..", "testing")]
os.environ.setdefault("FOLIO_NUM_THREADS", "2")
warnings.filterwarnings("ignore")

import paddle
import pytest

paddle.set_device("cpu")

import paddle_devices


@pytest.fixture(autouse=True, params=["cpu", "cuda"])
def device(request):
    """The device of the test's tensors."""
    yield from paddle_devices.one_after_the_other(request.param)


@pytest.fixture
def load(monkeypatch):
    """load(FD_ATTENTION_BACKEND="…", …): FastDeploy's runner as a process with these variables has it, Folio registered."""

    def fresh(**environment):
        for name in ("FD_ATTENTION_BACKEND", "FD_FOLIO_PREFER", "FD_FOLIO_BACKEND"):
            # Set first, so that the test's end takes back what the plugin sets.
            monkeypatch.setenv(name, environment.get(name, ""))
            if name not in environment:
                monkeypatch.delenv(name)
        for name in [name for name in sys.modules if name.partition(".")[0] in ("fastdeploy", "folio_fastdeploy")]:
            monkeypatch.delitem(sys.modules, name)
        runner = importlib.import_module("fastdeploy.worker.gpu_model_runner")
        importlib.import_module("folio_fastdeploy").register()
        return runner

    return fresh
