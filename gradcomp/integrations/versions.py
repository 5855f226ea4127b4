"""With which releases of a framework gradcomp was tried, and the warning about others."""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Iterator
from importlib.metadata import version

# oldest and newest release; pyproject.toml has them as extras, docs/howto those in between
TRIED = {
    "lightning": ((2, 4), (2, 6)),
    "accelerate": ((1, 6), (1, 15)),
    "transformers": ((5, 18), (5, 23)),
    "ray": ((2, 50), (2, 60)),
    "torchft": ((0, 2), (0, 2)),
}


@contextlib.contextmanager
def imported(framework: str) -> Iterator[None]:
    """Name the extra to install if the imports in this block fail, and warn about a release outside
    of `TRIED` if they do not.
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
    """Warn if a release, `found`, is outside of `TRIED`."""
    numbers = re.match(r"(\d+)\.(\d+)", found)
    oldest, newest = TRIED[framework]
    if not numbers or not oldest <= (int(numbers[1]), int(numbers[2])) <= newest:
        tried = " to ".join(f"{major}.{minor}" for major, minor in dict.fromkeys((oldest, newest)))
        warnings.warn(
            f"gradcomp.integrations.{framework} was tried with {framework} {tried}, this is"
            f" {found}: it may work, but nobody has looked; pip install 'gradcomp[{framework}]'"
            " takes one that was tried",
            stacklevel=5,  # the import of the integration
        )
