"""Builds folio_paddle_ops, the Paddle ops on Folio, with the Paddle that is installed.

Folio's headers and the path of its library come from pkg-config (folio.pc); set PKG_CONFIG_PATH for a Folio that is not
in a usual place. The ops load the library when they first run: FOLIO_LIBRARY, the loader's path, or where it is now.
"""

import os
import subprocess

import paddle
from paddle.utils.cpp_extension import CppExtension, CUDAExtension, setup

here = os.path.dirname(os.path.abspath(__file__))


def pkg_config(*query):
    return subprocess.run(["pkg-config", *query, "folio"], check=True, capture_output=True, text=True).stdout.split()


installed = pkg_config("--variable=plugin")[0]
on_cuda = paddle.is_compiled_with_cuda()
extension = CUDAExtension if on_cuda else CppExtension
# Paddle defines it for extensions that have a source for nvcc, of which there is none here. Without it ops would know
# neither streams nor captures.
cuda_flags = ["-DPADDLE_WITH_CUDA"] if on_cuda else []
setup(
    name="folio_paddle_ops",
    version="0.1.0",
    description="FastDeploy's attention ops on Folio",
    ext_modules=extension(
        sources=[f"{here}/csrc/{name}.cc"
                 for name in ("session", "rows", "grouped", "mla", "step", "append", "decode", "ragged", "module")],
        include_dirs=[f"{here}/csrc", f"{here}/../fastdeploy"],
        extra_compile_args={
            "cxx": ["-std=c++17", "-O2", "-Wall", "-Wextra", *cuda_flags, *pkg_config("--cflags"),
                    f'-DFOLIO_INSTALLED="{installed}"'],
            "nvcc": [],
        },
        extra_link_args=["-ldl"],
    ),
)
