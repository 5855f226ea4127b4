"""Checkpoints of a parameter server: settings, values of asynchronous keys, residuals of averages.

A client fetches one record for every key, or every shard of a cut key, and writes all records to
one file. Any number of servers can read it, each the keys that it owns. The file is a zip archive
without compression or pickle. Each record is a member with a checksum, named by key and shard, and
consists of::

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

FORMAT = b"gradcomp parameter server, version 3, %d records"  # the archive's comment
_FORMAT_1 = b"GCPSTATE"  # first bytes of a file
_FORMAT_2 = b"gradcomp parameter server, version 2, "
_OLDER = (
    "it has format %d: serve it with the gradcomp that wrote it, pull its asynchronous keys there,"
    " and start here without checkpoint= and with these as value="
)
_RECORD = struct.Struct("<QII")


class State(NamedTuple):
    """State of one key, or of one shard, on a server."""

    steps: int  # complete rounds, or pushes applied to an asynchronous key
    spec: Spec
    value: Tensor | None = None  # of an asynchronous key, (numel,) float32
    residual: Tensor | None = None  # of encoded averages, (numel,) float32


def pack_state(state: State) -> Tensor:
    """Return the record of a state, ``(nbytes,)`` uint8."""
    settings = pack_spec(state.spec, state.value)
    head = as_bytes(_RECORD.pack(state.steps, settings.numel(), 0))
    residual = [] if state.residual is None else [state.residual.view(torch.uint8)]
    return torch.cat([head, settings, *residual])


def parse_state(record: Tensor) -> State:
    """Return the state in a record, with views of it; ValueError if it is not a valid record."""
    if record.numel() < _RECORD.size:
        raise ValueError(f"a record of {record.numel()} bytes")
    steps, nbytes, zero = _RECORD.unpack(record[: _RECORD.size].numpy().tobytes())
    settings, rest = record[_RECORD.size :][:nbytes], record[_RECORD.size + nbytes :]
    if zero or settings.numel() < nbytes or nbytes % 4 or rest.numel() % 4:
        raise ValueError(f"a record of {record.numel()} bytes with settings of {nbytes}")
    spec, value = parse_spec(settings)
    return State(steps, spec, value, rest.view(torch.float32) if rest.numel() else None)


def write_states(path: str | os.PathLike[str], records: Iterable[tuple[str, int, Tensor]]) -> None:
    """Write (key, shard, bytes) records to a file, which replaces an older one when complete."""
    count = 0
    with replaced(path) as file, zipfile.ZipFile(file, "w") as archive:
        for key, shard, record in records:
            archive.writestr(f"{shard}/{quote(key, safe='')}", record.numpy().tobytes())
            count += 1
        archive.comment = FORMAT % count


def read_states(
    path: str | os.PathLike[str], mine: Callable[[str, int], bool]
) -> list[tuple[str, int, State]]:
    """Check a whole file of `write_states`; return (key, shard, state) where ``mine(key, shard)``.

    Raises:
        ValueError: the file is not a checkpoint, is damaged, or has an older format.
        OSError: the file cannot be read.
    """
    with Path(path).open("rb") as file:
        try:
            return list(_read(file, mine))
        except Exception as error:
            text = "is not a checkpoint of a parameter server that this gradcomp reads"
            raise ValueError(f"{os.fspath(path)} {text}: {error}") from error


def _read(file: BinaryIO, mine: Callable[[str, int], bool]) -> Iterator[tuple[str, int, State]]:
    if file.read(len(_FORMAT_1)) == _FORMAT_1:
        raise ValueError(_OLDER % 1)
    with zipfile.ZipFile(file) as archive:
        if archive.comment.startswith(_FORMAT_2):
            raise ValueError(_OLDER % 2)
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
