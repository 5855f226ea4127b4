"""What a parameter server remembers, as a file: settings, values of asynchronous keys, and
residuals of averages.

A client gathers one record of every key, or of every shard of one, and writes all of them into one
file; servers of any number read it, each its own keys. The file is a zip archive without
compression and without pickle; each record is a member with a checksum, named by key and shard. A
record is::

    steps u64 | settings_nbytes u32 | 0 u32 | settings and values (`pack_spec`) | residual, fp32
"""

from __future__ import annotations

import os
import struct
import zipfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple
from urllib.parse import quote, unquote

import torch
from torch import Tensor

from gradcomp.files import replaced
from gradcomp.server.messages import as_bytes
from gradcomp.server.spec import Spec, pack_spec, parse_spec

FORMAT = b"gradcomp parameter server, version 2, %d records"  # the archive's comment
_OLD = b"GCPSTATE"  # how files of version 1 begin
_OLD_TEXT = (
    "is a checkpoint of a parameter server in format 1, which this gradcomp does not read: serve it"
    " with the gradcomp that wrote it, pull its asynchronous keys there, and start here without"
    " checkpoint= and with these as value="
)
_RECORD = struct.Struct("<QII")


class State(NamedTuple):
    """What a server remembers of one key, or of one shard."""

    steps: int  # rounds that are complete, or pushes that were applied
    spec: Spec
    value: Tensor | None = None  # of an asynchronous key, (numel,) float32
    residual: Tensor | None = None  # what encoded averages have left out, (numel,) float32


def pack_state(state: State) -> Tensor:
    """Return a record, ``(nbytes,)`` uint8."""
    settings = pack_spec(state.spec, state.value)
    head = as_bytes(_RECORD.pack(state.steps, settings.numel(), 0))
    residual = [] if state.residual is None else [state.residual.view(torch.uint8)]
    return torch.cat([head, settings, *residual])


def parse_state(record: Tensor) -> State:
    """Return what a record holds, as views of it; ValueError for bytes that are not a record."""
    if record.numel() < _RECORD.size:
        raise ValueError(f"a record of {record.numel()} bytes")
    steps, nbytes, zero = _RECORD.unpack(record[: _RECORD.size].numpy().tobytes())
    settings, rest = record[_RECORD.size :][:nbytes], record[_RECORD.size + nbytes :]
    if zero or settings.numel() < nbytes or nbytes % 4 or rest.numel() % 4:
        raise ValueError(f"a record of {record.numel()} bytes with settings of {nbytes}")
    spec, value = parse_spec(settings)
    return State(steps, spec, value, rest.view(torch.float32) if rest.numel() else None)


def write_states(path: str | os.PathLike[str], records: Iterable[tuple[str, int, Tensor]]) -> None:
    """Write records of (key, shard, ``(nbytes,)`` uint8) into a file that appears when complete."""
    count = 0
    with replaced(path) as file, zipfile.ZipFile(file, "w") as archive:
        for key, shard, record in records:
            archive.writestr(f"{shard}/{quote(key, safe='')}", record.numpy().tobytes())
            count += 1
        archive.comment = FORMAT % count


def read_states(
    path: str | os.PathLike[str], mine: Callable[[str, int], bool]
) -> list[tuple[str, int, State]]:
    """Return (key, shard, state) of the records for whose key and shard `mine` is true, after
    checking the whole file.

    Raises:
        ValueError: not a file of `write_states`, not all of it, or one of an older gradcomp.
        OSError: it cannot be read.
    """
    with Path(path).open("rb") as file:
        if file.read(len(_OLD)) == _OLD:
            raise ValueError(f"{os.fspath(path)} {_OLD_TEXT}")
        try:
            return list(_read(file, mine))
        except Exception as error:
            text = f"{os.fspath(path)} is not a checkpoint of a parameter server: {error}"
            raise ValueError(text) from error


def _read(file: BinaryIO, mine: Callable[[str, int], bool]) -> Iterator[tuple[str, int, State]]:
    with zipfile.ZipFile(file) as archive:
        names = archive.namelist()
        end = FORMAT % len(names)
        file.seek(-len(end), os.SEEK_END)
        found = file.read()
        if found != end:
            raise ValueError(f"it ends with {found!r}, {end!r} expected")
        for name in names:
            record = archive.read(name)  # checks the checksum
            number, _, quoted = name.partition("/")
            key, shard = unquote(quoted, errors="strict"), int(number)
            if mine(key, shard):
                state = parse_state(as_bytes(record))
                nbytes = state.spec.part_nbytes
                if bool(shard) != bool(nbytes):
                    raise ValueError(f"shard {shard} of key {key!r} has {nbytes} bytes")
                yield key, shard, state
