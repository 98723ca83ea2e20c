"""The package on a GPU with the arrays of CuPy, JAX, Paddle, Numba and torch, each in a process without the others."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

import folio

TESTS = Path(__file__).resolve().parent
#: JAX's arrays cannot be written, so its outputs are CuPy's.
NEEDS = {"cupy": ["cupy"], "jax": ["jax", "cupy"], "numba": ["numba"], "paddle": ["paddle"], "torch": ["torch"]}

pytestmark = pytest.mark.skipif(folio.device_count("cuda") == 0, reason="no GPU")


@pytest.mark.parametrize("framework", NEEDS)
def test_framework(framework):
    for needed in [*NEEDS[framework], "ml_dtypes"]:
        if importlib.util.find_spec(needed) is None:
            pytest.skip(f"no {needed}")
    # JAX would take three quarters of the memory.
    environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    script = [sys.executable, "-u", "-X", "faulthandler", str(TESTS / "framework_on_a_gpu.py"), framework]
    try:
        done = subprocess.run(script, env=environment, capture_output=True, text=True, timeout=200)
    except subprocess.TimeoutExpired as late:
        pytest.fail(f"{late}: {late.stdout}")
    print(done.stdout)  # pytest -rP shows it
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-3000:]}"
