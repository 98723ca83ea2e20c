"""Compiles csrc/openmp.c into the wheel, where there is a C compiler: by it Folio computes on PyTorch's OpenMP threads.

Without a compiler the wheel has no library, and Folio computes on threads of its own.
"""

import os
import shlex
import shutil
import subprocess
import sysconfig
import tempfile
from pathlib import Path

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class OpenMPHook(BuildHookInterface):
    """Adds libfolio_openmp.so beside the package's modules."""

    def initialize(self, version: str, build_data: dict) -> None:
        """Called by hatchling before it writes the wheel."""
        compiler = shlex.split(os.environ.get("CC", "cc"))
        if version == "editable" or shutil.which(compiler[0]) is None:
            return
        self._folder = tempfile.TemporaryDirectory()
        library = Path(self._folder.name) / "libfolio_openmp.so"
        source = Path(self.root) / "csrc" / "openmp.c"
        options = ["-std=c11", "-O2", "-fPIC", "-shared", "-fvisibility=hidden"]
        subprocess.run([*compiler, *options, str(source), "-o", str(library)], check=True)
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"
        build_data["force_include"][str(library)] = "folio_torch/libfolio_openmp.so"
