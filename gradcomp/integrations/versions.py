"""The framework releases that gradcomp was tested with, and the warning about other releases."""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Iterator
from importlib.metadata import version

# oldest and newest release; they are also extras in pyproject.toml and listed in docs/howto
TRIED = {
    "lightning": ((2, 4), (2, 6)),
    "accelerate": ((1, 6), (1, 15)),
    "transformers": ((5, 18), (5, 23)),
    "ray": ((2, 50), (2, 60)),
    "torchft": ((0, 2), (0, 2)),
}


@contextlib.contextmanager
def imported(framework: str) -> Iterator[None]:
    """Run a block of imports of a framework; warn if its release is outside of `TRIED`.

    Raises:
        ImportError: an import failed; the message names the extra to install.
    """
    try:
        yield
    except ImportError as error:
        raise ImportError(
            f"gradcomp.integrations.{framework} needs {framework}: pip install"
            f" 'gradcomp[{framework}]' ({error})",
            name=framework,
        ) from error
    warn_unless_tried(framework, version(framework))


def warn_unless_tried(framework: str, found: str) -> None:
    """Warn if `found`, the installed version of a framework, is outside of `TRIED`."""
    numbers = re.match(r"(\d+)\.(\d+)", found)
    oldest, newest = TRIED[framework]
    if not numbers or not oldest <= (int(numbers[1]), int(numbers[2])) <= newest:
        tried = " to ".join(f"{major}.{minor}" for major, minor in dict.fromkeys((oldest, newest)))
        warnings.warn(
            f"gradcomp.integrations.{framework} was tried with {framework} {tried}, this is"
            f" {found}: it may work, but nobody has looked; pip install 'gradcomp[{framework}]'"
            " takes one that was tried",
            stacklevel=5,  # the line that imports the integration
        )
