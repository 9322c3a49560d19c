# SPDX-License-Identifier: BSL-1.0
"""Conan 2 recipe, of the tree that it lies in:  conan create packaging/conan"""

import pathlib
import re

from conan import ConanFile
from conan.tools.build import check_min_cppstd
from conan.tools.cmake import CMake, CMakeToolchain
from conan.tools.files import copy


class Gradsync(ConanFile):
    name = "gradsync"
    description = "Gradient synchronisation for data-parallel training, as C++20 templates"
    license = "BSL-1.0"
    topics = ("data-parallel", "training", "all-reduce", "mpi", "header-only")
    package_type = "header-library"
    settings = "os", "compiler", "build_type", "arch"
    no_copy_source = True

    @property
    def root(self):
        return pathlib.Path(self.recipe_folder).parent.parent

    def set_version(self):
        text = (self.root / "include/gradsync/core/version.hpp").read_text()
        self.version = ".".join(re.search(rf"GRADSYNC_VERSION_{part} (\d+)", text)[1] for part in ("MAJOR", "MINOR", "PATCH"))

    def export_sources(self):
        for pattern in ("CMakeLists.txt", "LICENSE", "cmake/*", "include/*"):
            copy(self, pattern, self.root, self.export_sources_folder)

    def validate(self):
        if self.settings.get_safe("compiler.cppstd"):
            check_min_cppstd(self, 20)

    def generate(self):
        toolchain = CMakeToolchain(self)
        for part in ("TESTS", "EXAMPLES", "BENCHMARKS"):
            toolchain.cache_variables[f"GRADSYNC_BUILD_{part}"] = False
        toolchain.generate()

    def build(self):
        CMake(self).configure()

    def package(self):
        copy(self, "LICENSE", self.source_folder, f"{self.package_folder}/licenses")
        CMake(self).install()

    def package_id(self):
        self.info.clear()

    def package_info(self):
        # The package's own files for find_package(gradsync COMPONENTS ...), which look for MPI and Boost.MPI where they are used.
        self.cpp_info.set_property("cmake_find_mode", "none")
        self.cpp_info.builddirs.append("share/cmake/gradsync")
        self.cpp_info.bindirs = []
        self.cpp_info.libdirs = []
