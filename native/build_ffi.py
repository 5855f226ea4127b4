"""Describe the extension module gradcomp._gc to cffi: declarations, sources and flags.

setup.py names this file in ``cffi_modules``. One plain compile of every C file builds every tier,
since tiers are enabled by function attributes and never by flags.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from cffi import FFI

NATIVE = Path(os.path.abspath(__file__)).parent
ROOT = NATIVE.parent

# -ffp-contract=off: a fused multiply-add would round once where the contract rounds twice, on some
# compilers only. -fno-math-errno: a root is an instruction, of vectors too; nobody reads errno.
FLAGS = [
    "-O3",
    "-std=c11",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fvisibility=hidden",
    "-Wall",
    "-Wextra",
]


def _below_root(pattern: str) -> list[str]:
    """Return the matching files relative to setup.py, as setuptools wants them, in an order that
    never changes.
    """
    return sorted(path.relative_to(ROOT).as_posix() for path in NATIVE.glob(pattern))


def declarations(header: str) -> str:
    """Return a header without comments and preprocessor lines: what cffi reads."""
    text = re.sub(r"/\*.*?\*/", "", header, flags=re.DOTALL)
    return "\n".join(
        line for line in text.splitlines() if line.strip() and not line.startswith("#")
    )


ffibuilder = FFI()
ffibuilder.cdef(declarations((NATIVE / "include/gradcomp.h").read_text(encoding="utf-8")))
ffibuilder.set_source(
    "gradcomp._gc",
    '#include "gradcomp.h"\n',
    sources=_below_root("src/**/*.c"),
    include_dirs=["native/include", "native/src"],
    depends=_below_root("**/*.h"),
    extra_compile_args=FLAGS,
    libraries=["m"],
    py_limited_api=True,
)
