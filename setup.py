"""Build the C backend; everything else about the package stands in pyproject.toml."""

import os
import shutil
from multiprocessing.pool import ThreadPool
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import BaseError


class BuildNative(build_ext):
    """build_ext that compiles on every core, and says in one sentence what is missing when there is
    no C compiler.
    """

    def build_extensions(self) -> None:
        # absent on Windows, where setuptools finds the compiler
        command = getattr(self.compiler, "compiler", None)
        if command and shutil.which(command[0]) is None:
            raise SystemExit(
                f"gradcomp needs a C compiler to build its kernels and {command[0]!r} is not on"
                " PATH: install one (Debian/Ubuntu: apt install gcc libc6-dev python3-dev; Fedora:"
                " dnf install gcc python3-devel; macOS: xcode-select --install) or set CC."
            )
        compile_all = self.compiler.compile

        def on_every_core(sources: list[str], **options: object) -> list[str]:
            with ThreadPool(os.cpu_count()) as pool:
                made = pool.map(lambda source: compile_all([source], **options), sources, 1)
            return [file for files in made for file in files]

        self.compiler.compile = on_every_core
        try:
            super().build_extensions()
        except BaseError as error:
            raise SystemExit(
                "gradcomp could not compile its kernels; the compiler's message is above"
                f" ({error})."
            )


packages = find_packages(include=["gradcomp", "gradcomp.*"]) or ["gradcomp"]
package_dir = {}
if Path("launch/__init__.py").exists():
    packages.append("gradcomp.launch")
    package_dir["gradcomp.launch"] = "launch"

setup(
    packages=packages,
    package_dir=package_dir,
    package_data={"gradcomp": ["py.typed"]},
    cffi_modules=["native/build_ffi.py:ffibuilder"],
    cmdclass={"build_ext": BuildNative},
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
