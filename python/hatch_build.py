"""Puts the C library into the wheel, and says by the wheel's tag where it runs.

The library is the one that FOLIO_WHEEL_LIBRARY names, for instance of a cross compiler; otherwise the crate is built
here with `cargo build --release`, without the CUDA backend where FOLIO_CUDA is OFF. The tag follows from the library
itself: its machine, and the newest version of glibc that it asks for. It says nothing of Python but its major version,
since cffi loads the library by itself.
"""

from __future__ import annotations

import os
import re
import struct
import subprocess
from pathlib import Path

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_ROOT = Path(__file__).resolve().parent.parent

#: e_machine of ELF: x86-64 and AArch64.
_MACHINES = {62: "x86_64", 183: "aarch64"}


def _library() -> Path:
    """The library that goes into the wheel."""
    named = os.environ.get("FOLIO_WHEEL_LIBRARY")
    if named:
        return Path(named).resolve()
    features = ["--no-default-features"] if os.environ.get("FOLIO_CUDA") == "OFF" else []
    subprocess.run(["cargo", "build", "--release", "--lib", "--locked", *features], cwd=_ROOT, check=True)
    return Path(os.environ.get("CARGO_TARGET_DIR", _ROOT / "target")) / "release" / "libfolio.so"


def _platform(library: Path) -> str:
    """The platform that a library runs on, as PEP 600 names it: `manylinux_2_28_x86_64`."""
    content = library.read_bytes()
    if content[:4] != b"\x7fELF":
        raise ValueError(f"{library} is no ELF library; Linux on x86-64 and AArch64 is supported")
    machine = _MACHINES.get(struct.unpack_from("<H", content, 18)[0])
    if machine is None:
        raise ValueError(f"{library} is for another machine than x86-64 and AArch64")
    # Versions of glibc's symbols are strings of their own in the library.
    versions = {(int(major), int(minor)) for major, minor in re.findall(rb"\0GLIBC_(\d+)\.(\d+)(?=[.\d]*\0)", content)}
    major, minor = max(versions, default=(2, 17))
    return f"manylinux_{major}_{max(minor, 17)}_{machine}"


class LibraryHook(BuildHookInterface):
    """Adds libfolio.so beside the package's modules."""

    def initialize(self, version: str, build_data: dict) -> None:
        """Called by hatchling before it writes the wheel."""
        if version == "editable":
            return  # FOLIO_LIBRARY says which library a checkout uses
        library = _library()
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{_platform(library)}"
        build_data["force_include"][str(library)] = "folio/libfolio.so"
        # An installed library has the licences of what is linked into it beside it.
        licences = library.parent.parent / "share" / "licenses" / "folio"
        if licences.is_dir():
            build_data["force_include"][str(licences)] = "folio/licenses"
