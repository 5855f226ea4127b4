"""The package's version, from the installed metadata."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("gradcomp")
except PackageNotFoundError:  # imported from a source tree that was never installed
    __version__ = "0+unknown"
