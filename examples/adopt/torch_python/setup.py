# SPDX-License-Identifier: BSL-1.0
"""Builds the Python module gradsync_torch for the PyTorch that is installed. It needs g++ 12 or clang 14 and Python's headers.

    pip install torch setuptools wheel
    pip install --no-build-isolation ./examples/adopt/torch_python

Debian's PyTorch needs the packages python3-torch, python3-dev and pybind11-dev, and python3 -m venv --system-site-packages. CFLAGS replaces
the module's -O2.
"""

import os
import pathlib
import re
import sys

from setuptools import setup

try:
    from torch.utils.cpp_extension import BuildExtension, CppExtension
except ImportError as error:
    sys.exit(f"gradsync_torch is built for the PyTorch that is installed, and there is none here ({error}).\n"
             "Run 'pip install torch setuptools wheel', then 'pip install --no-build-isolation' with this folder.")

include = pathlib.Path(__file__).resolve().parents[3] / "include"
version = re.findall(r"#define GRADSYNC_VERSION_(?:MAJOR|MINOR|PATCH) (\d+)", (include / "gradsync/core/version.hpp").read_text())
flags = ["-std=c++20", "-fvisibility=hidden", "-g0", *os.environ.get("CFLAGS", "-O2").split()]
module = CppExtension("gradsync_torch", ["gradsync_torch.cpp"], include_dirs=[str(include)], extra_compile_args=flags)
setup(name="gradsync_torch", version=".".join(version), description="gradsync for torch.nn.Module, on CPUs", license="BSL-1.0",
      py_modules=[], ext_modules=[module], cmdclass={"build_ext": BuildExtension})
