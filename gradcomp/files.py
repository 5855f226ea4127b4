"""Files that are complete or not there, checked before they are used, and one for each rank."""

from __future__ import annotations

import contextlib
import os
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO


@contextlib.contextmanager
def replaced(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Within it, write a file that takes the place of `path` once it is complete and on the disk;
    after an error everything is as before.
    """
    path = Path(path)
    beside = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        with beside.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
        _sync(path.parent)
    finally:
        beside.unlink(missing_ok=True)


def _sync(folder: Path) -> None:
    """Bring the names in a folder to the disk, where its file system can."""
    with contextlib.suppress(OSError):
        number = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)


def write_saved(path: str | os.PathLike[str], values: Any) -> None:
    """Write what `read_saved` reads, as `replaced` does."""
    import torch

    with replaced(path) as file:
        torch.save(values, file)


def read_saved(path: str | os.PathLike[str]) -> Any:
    """Return what ``torch.save`` has written, in host memory, after a look at every byte's
    checksum.

    Raises:
        ValueError: damaged, cut off, or something else.
        OSError: it cannot be read.
    """
    import torch

    try:
        with zipfile.ZipFile(path) as archive:
            wrong = archive.testzip()
        if wrong is not None:
            raise ValueError(f"{wrong} in it does not fit its checksum")
        return torch.load(path, weights_only=True, map_location="cpu")
    except OSError:
        raise
    except Exception as error:
        raise ValueError(f"{os.fspath(path)} is damaged, or no checkpoint: {error}") from error


def of_ranks(folder: Path, name: str) -> dict[int, list[Path]]:
    """Return the files NAME-RANK-of-RANKS.pt in a folder, by the number of ranks of their run."""
    out: dict[int, list[Path]] = {}
    for file in sorted(folder.glob(f"{name}-*-of-*.pt")):
        found = re.fullmatch(rf"{name}-\d+-of-(\d+)\.pt", file.name)
        if found:
            out.setdefault(int(found[1]), []).append(file)
    return out
