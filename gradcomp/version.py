"""The package's version, from the installed metadata, and the tested range of torch versions."""

from __future__ import annotations

import re
import warnings
from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("gradcomp")
except PackageNotFoundError:  # imported from a source tree that was never installed
    __version__ = "0+unknown"

# oldest and newest tested release; docs/reference/torch-versions.md has the results
TRIED_TORCH = ((2, 8), (2, 15))


def warn_about_torch(torch_version: str) -> None:
    """Warn, once per process, if a torch version is outside the tested range.

    Args:
        torch_version: ``torch.__version__``.
    """
    match = re.match(r"(\d+)\.(\d+)", torch_version)
    oldest, newest = TRIED_TORCH
    if match and oldest <= (int(match[1]), int(match[2])) <= newest:
        return
    tried = f"{oldest[0]}.{oldest[1]} to {newest[0]}.{newest[1]}"
    warnings.warn(
        f"gradcomp was tried with torch {tried}, this is torch {torch_version}: it may work, but"
        " nobody has looked (make test-torch TORCH=... in a clone runs its tests)",
        stacklevel=3,
    )
