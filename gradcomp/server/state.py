"""What a parameter server remembers, as a file: settings, values of asynchronous keys, what
averages have left over.

A client gathers one record of every key, or shard of one, and writes them into one file; servers of
any number read it, each its own keys. No pickle, and a file that is cut short or damaged is refused
whole.

::

    "GCPSTATE" | version u32 | records u32 | { key_nbytes u16 | 0 u16 | shard u32 | nbytes u64 | key
    | record } ... | CRC-32 u32 record:  steps u64 | settings_nbytes u32 | 0 u32 | settings and
    values (`pack_spec`) | residual, fp32
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from gradcomp.server.messages import MAX_KEY_NBYTES
from gradcomp.server.spec import Spec, pack_spec, parse_spec

if TYPE_CHECKING:
    from typing_extensions import Self

MAGIC, VERSION = b"GCPSTATE", 1
_HEAD = struct.Struct("<8sII")
_ENTRY = struct.Struct("<HHIQ")
_RECORD = struct.Struct("<QII")
_CRC = struct.Struct("<I")
_BLOCK_NBYTES = 1 << 24  # read at once


class State(NamedTuple):
    """What a server remembers of one key, or shard of one.

    Attributes:
        steps: rounds that are complete, or pushes that were applied.
        spec: its settings.
        value: of an asynchronous key, ``(numel,)`` float32.
        residual: what averages that were packed again have left over, ``(numel,)`` float32.
    """

    steps: int
    spec: Spec
    value: Tensor | None = None
    residual: Tensor | None = None


def pack_state(state: State) -> Tensor:
    """Return a record, ``(nbytes,)`` uint8."""
    settings = pack_spec(state.spec, state.value)
    head = _RECORD.pack(state.steps, settings.numel(), 0)
    parts = [torch.frombuffer(bytearray(head), dtype=torch.uint8), settings]
    return torch.cat(
        [*parts, *([] if state.residual is None else [state.residual.view(torch.uint8)])]
    )


def parse_state(record: Tensor) -> State:
    """Return what a record says; values and residual are views of it.

    Raises:
        ValueError: bytes that are no record.
    """
    if record.numel() < _RECORD.size:
        raise ValueError(f"a record of {record.numel()} bytes")
    steps, nbytes, zero = _RECORD.unpack(record[: _RECORD.size].numpy().tobytes())
    rest = record[_RECORD.size + nbytes :]
    if zero or record.numel() < _RECORD.size + nbytes or nbytes % 4 or rest.numel() % 4:
        raise ValueError(f"a record of {record.numel()} bytes with settings of {nbytes}")
    spec, value = parse_spec(record[_RECORD.size : _RECORD.size + nbytes])
    return State(steps, spec, value, rest.view(torch.float32) if rest.numel() else None)


def with_steps(record: Tensor, steps: int) -> Tensor:
    """Return a copy of a record with another number of steps."""
    return pack_state(parse_state(record)._replace(steps=steps))


def steps_of(record: Tensor) -> int:
    """Return the steps of a record."""
    return int(_RECORD.unpack(record[: _RECORD.size].numpy().tobytes())[0])


class StateFile:
    """Writes a file of records; it appears under its name when it is complete, and not at all
    after an error.
    """

    def __init__(self, path: str | os.PathLike[str], count: int) -> None:
        self._path = Path(path)
        self._beside = self._path.with_name(f"{self._path.name}.{os.getpid()}.part")
        self._file = self._beside.open("wb")
        self._crc = 0
        self._write(_HEAD.pack(MAGIC, VERSION, count))

    def add(self, key: str, shard: int, record: Tensor) -> None:
        """Write a record, ``(nbytes,)`` uint8."""
        name = key.encode()
        self._write(_ENTRY.pack(len(name), 0, shard, record.numel()) + name)
        self._write(record.numpy().data)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        complete = False
        try:
            if error is None:
                self._file.write(_CRC.pack(self._crc))
                self._file.flush()
                os.fsync(self._file.fileno())
                complete = True
        finally:
            self._file.close()
            if complete:
                self._beside.replace(self._path)
            else:
                self._beside.unlink(missing_ok=True)

    def _write(self, data: bytes | memoryview) -> None:
        self._crc = zlib.crc32(data, self._crc)
        self._file.write(data)


def read_states(
    path: str | os.PathLike[str], mine: Callable[[str, int], bool]
) -> list[tuple[str, int, State]]:
    """Return (key, shard, state) of the records for whose key and shard `mine` is true, after
    checking the whole file.

    Raises:
        ValueError: not a file that `StateFile` has written, or not all of it.
        OSError: it cannot be read.
    """
    try:
        states = [
            (key, shard, parse_state(record)) for key, shard, record in _read(Path(path), mine)
        ]
        for key, shard, state in states:
            if bool(shard) != bool(state.spec.part_nbytes):
                raise ValueError(f"shard {shard} of key {key!r} has {state.spec.part_nbytes} bytes")
    except ValueError as error:
        raise ValueError(
            f"{os.fspath(path)} is no checkpoint of a parameter server: {error}"
        ) from error
    return states


def _read(path: Path, mine: Callable[[str, int], bool]) -> Iterator[tuple[str, int, Tensor]]:
    size = path.stat().st_size
    if size < _HEAD.size + _CRC.size:
        raise ValueError(f"it has {size} bytes")
    data = np.memmap(path, np.uint8, "r")
    magic, version, count = _HEAD.unpack(data[: _HEAD.size].tobytes())
    if magic != MAGIC or version != VERSION:
        raise ValueError(
            f"it begins with {magic!r}, version {version}; {MAGIC!r}, version {VERSION} expected"
        )
    crc, end = 0, size - _CRC.size
    for begin in range(0, end, _BLOCK_NBYTES):
        crc = zlib.crc32(data[begin : min(end, begin + _BLOCK_NBYTES)].data, crc)
    if data[end:].tobytes() != _CRC.pack(crc):
        raise ValueError("its checksum is wrong: it was cut short or damaged")
    at = _HEAD.size
    for _ in range(count):
        if at + _ENTRY.size > end:
            raise ValueError(f"it ends in the middle of {count} records")
        key_nbytes, zero, shard, nbytes = _ENTRY.unpack(data[at : at + _ENTRY.size].tobytes())
        at += _ENTRY.size + key_nbytes
        if zero or not 1 <= key_nbytes <= MAX_KEY_NBYTES or at + nbytes > end:
            raise ValueError(f"a record of {nbytes} bytes with a key of {key_nbytes}")
        key = data[at - key_nbytes : at].tobytes().decode()
        if mine(key, shard):
            yield key, shard, torch.from_numpy(data[at : at + nbytes].copy())
        at += nbytes
    if at != end:
        raise ValueError(f"{end - at} bytes follow its records")
