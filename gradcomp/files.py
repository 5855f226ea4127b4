"""Atomically written files with checksums, and names of files that belong to ranks."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO


@contextlib.contextmanager
def replaced(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Context manager that yields a file to write, which replaces `path` once it is complete and
    synced to disk. After an error `path` is unchanged.
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
    """Sync a folder's entries to disk, if its file system supports that."""
    with contextlib.suppress(OSError):
        number = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)


def write_saved(path: str | os.PathLike[str], values: Any) -> None:
    """Write values atomically with ``torch.save``, for `read_saved`.

    Raises:
        TypeError: `read_saved` would refuse a value; nothing is written then.
        OSError: the file cannot be written.
    """
    import torch

    with replaced(path) as file:
        torch.save(values, file)
        file.flush()
        refused = torch.serialization.get_unsafe_globals_in_checkpoint(file.name)
        if refused:
            raise TypeError(
                f"{os.fspath(path)} would have values that torch.load(weights_only=True) refuses"
                f" ({', '.join(sorted(refused))}): save tensors, numbers and strings (float(x) of a"
                " NumPy number), or call torch.serialization.add_safe_globals"
            )


def read_saved(path: str | os.PathLike[str]) -> Any:
    """Return the values of a ``torch.save`` file, in host memory, after checking all checksums.

    Raises:
        ValueError: the file is damaged, truncated, or of another kind.
        OSError: the file cannot be read.
    """
    import torch

    try:
        with zipfile.ZipFile(path) as archive:
            wrong = archive.testzip()
        if wrong is not None:
            raise ValueError(f"{wrong} in it does not fit its checksum")
        return torch.load(path, weights_only=True, map_location="cpu")
    except Exception as error:
        # a damaged archive may name a place before its own beginning
        if isinstance(error, OSError) and error.errno != errno.EINVAL:
            raise
        raise ValueError(f"{os.fspath(path)} is damaged, or no checkpoint: {error}") from error


def of_ranks(folder: Path, name: str) -> dict[int, list[Path]]:
    """Return the files NAME-RANK-of-RANKS.pt in a folder, by number of ranks (RANKS)."""
    out: dict[int, list[Path]] = {}
    for file in sorted(folder.glob(f"{name}-*-of-*.pt")):
        match = re.fullmatch(rf"{name}-\d+-of-(\d+)\.pt", file.name)
        if match:
            out.setdefault(int(match[1]), []).append(file)
    return out
