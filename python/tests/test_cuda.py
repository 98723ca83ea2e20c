"""The package on a CUDA device, against the driver of Folio's own tests: it computes nothing, and needs no GPU."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
STUBS = TESTS.parents[1] / "tests" / "stub_driver"


def build(source: str, library: Path) -> None:
    flags = ["-std=gnu11", "-fvisibility=hidden", "-shared", "-fPIC", f"-Wl,-soname,{library.name}"]
    subprocess.run(["cc", *flags, str(STUBS / source), "-o", str(library)], check=True)


@pytest.mark.skipif(shutil.which("cc") is None, reason="the stub of the CUDA driver needs a C compiler")
def test_a_device_that_computes_nothing(tmp_path):
    build("stub.c", tmp_path / "libcuda.so.1")
    build("nvrtc.c", tmp_path / "libnvrtc.so.13")
    environment = {
        **os.environ,
        "LD_LIBRARY_PATH": str(tmp_path),
        "FOLIO_NVRTC": str(tmp_path / "libnvrtc.so.13"),
        "FOLIO_CACHE_DIR": "",
        "FOLIO_STUB": "ok",
    }
    script = [sys.executable, str(TESTS / "cuda_on_a_stub.py")]
    done = subprocess.run(script, env=environment, capture_output=True, text=True)
    if done.returncode == 0 and "CUDA backend" in done.stdout:
        pytest.skip(done.stdout.strip())
    assert done.stdout == "as it should be\n", done.stderr[-3000:]
