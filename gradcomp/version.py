"""The package's version, from the installed metadata, and the versions of torch that it was
tried with.
"""

from __future__ import annotations

import re
import warnings
from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("gradcomp")
except PackageNotFoundError:  # imported from a source tree that was never installed
    __version__ = "0+unknown"

# oldest and newest release; docs/reference/torch-versions.md has the results
TRIED_TORCH = ((2, 8), (2, 15))


def warn_about_torch(torch_version: str) -> None:
    """Warn, once a process, of a torch that is older or newer than those that gradcomp was tried
    with.

    Args:
        torch_version: as ``torch.__version__`` has it.
    """
    found = re.match(r"(\d+)\.(\d+)", torch_version)
    oldest, newest = TRIED_TORCH
    if found and oldest <= (int(found[1]), int(found[2])) <= newest:
        return
    tried = f"{oldest[0]}.{oldest[1]} to {newest[0]}.{newest[1]}"
    warnings.warn(
        f"gradcomp was tried with torch {tried}, this is torch {torch_version}: it may work, but"
        " nobody has looked (make test-torch TORCH=... in a clone runs its tests)",
        stacklevel=3,
    )
