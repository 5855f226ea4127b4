"""Every rank's state in a framework's checkpoint: gathered on rank 0 if the checkpoint is a file,
one file per rank if it is a folder.
"""

from __future__ import annotations

import contextlib
import io
import os
import struct
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from gradcomp.comm.base import Communicator
from gradcomp.engine.step import Engine
from gradcomp.errors import GradcompError
from gradcomp.exchange.agree import gather
from gradcomp.files import of_ranks, read_saved, write_saved

CALLED = "the framework's own save or load of a checkpoint"
# a rank's findings in a folder: no states, its own, those of another world size, an unreadable file
NOTHING, OWN, OTHERS, BROKEN = range(4)
PARTS_NBYTES = 8 << 20  # of the states of all ranks, in one collective
_SIZE = struct.Struct("<Q")


class Stateful(Protocol):
    """An object whose state dict of each rank is saved in a checkpoint."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state that this rank needs to resume bit for bit."""

    def load_state_dict(self, state: dict[str, Any] | Sequence[dict[str, Any]]) -> None:
        """Load a state of this rank, or those of all ranks of a run with another world size."""


def gather_states(state: Stateful, comm: Communicator) -> list[dict[str, Any]] | None:
    """Return the states of all ranks on rank 0, None on other ranks. Collective.

    They travel as ``torch.save`` writes them, and are read with ``weights_only=True``, in parts, so
    that a rank holds little more than its own state at a time.

    Raises:
        PeerLost: "checkpoint"; a rank did not call this, or was lost.
    """
    file = io.BytesIO()
    torch.save(state.state_dict(), file)
    mine = file.getvalue()
    size = _SIZE.pack(len(mine))
    found = gather(comm, size, "checkpoint", comm.timeout_s, called=CALLED)
    sizes = [_SIZE.unpack(data)[0] for data in found]
    files = [bytearray() for _ in sizes if comm.rank == 0]
    length = max(1 << 16, PARTS_NBYTES // comm.world_size)
    for first in range(0, max(sizes), length):
        part = mine[first : first + length].ljust(min(length, max(sizes) - first), b"\0")
        parts = gather(comm, part, "checkpoint", comm.timeout_s, called=CALLED)
        for whole, more in zip(files, parts, strict=False):
            whole += more
    if comm.rank:
        return None
    return [
        torch.load(io.BytesIO(whole[:size]), weights_only=True, map_location="cpu")
        for whole, size in zip(files, sizes, strict=True)
    ]


def restore(state: Stateful, comm: Communicator, found: Any, where: str, remedy: str) -> bool:
    """Load the state that was found in a checkpoint; return whether there was one. Without a state,
    rank 0 warns.

    `found` is this rank's state, a list of all ranks' states, or None, of the same kind on all
    ranks; `where` and `remedy` (how to resume without it) are for messages.

    Raises:
        ValueError: states of another codec, exchange or model.
    """
    if not found:
        if comm.rank == 0:
            warnings.warn(
                f"{where} has no gradcomp state: residuals begin at zero, and the warm-up"
                " (warmup_steps) begins again. Nothing to do if it was made without gradcomp",
                stacklevel=3,
            )
        return False
    if not isinstance(found, dict) and len(found) == comm.world_size:
        found = found[comm.rank]
    try:
        state.load_state_dict(found)
    except ValueError as error:
        raise ValueError(
            f"the gradcomp state in {where} does not fit: {error}. To begin with fresh residuals,"
            f" {remedy}"
        ) from error
    return True


# ---- folders -------------------------------------------------------------------------------------


def write(
    state: Stateful, engine: Engine, folder: str | os.PathLike[str], name: str = "gradcomp"
) -> None:
    """Write this rank's state to its own file in a checkpoint's folder, which is created if it does
    not exist. Rank 0 deletes files of other world sizes. Collective, unless `engine` has failed or
    is closed.

    Raises:
        OSError: on every rank: a rank could not write its file. It has left none; others have
            theirs.
        PeerLost: "checkpoint"; a rank did not call this.
    """
    comm = engine.comm
    path = Path(folder) / f"{name}-{comm.rank}-of-{comm.world_size}.pt"

    def failed(own: bool) -> list[int]:
        if engine.error is not None:  # peers may not answer
            return []
        votes = gather(comm, bytes([own]), "checkpoint", comm.timeout_s, called=CALLED)
        return [rank for rank, vote in enumerate(votes) if vote[0]]

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_saved(path, state.state_dict())
        if comm.rank == 0:
            for world, files in of_ranks(path.parent, name).items():
                if world != comm.world_size:  # an earlier run wrote to this folder
                    for stale in files:
                        stale.unlink(missing_ok=True)
    except Exception:
        with contextlib.suppress(GradcompError):
            failed(True)  # the others wait for it
        raise
    if ranks := failed(False):
        raise OSError(f"ranks {ranks} could not write their {name}-*.pt to {folder}: see there")


def read(
    state: Stateful,
    comm: Communicator,
    folder: str | os.PathLike[str],
    name: str = "gradcomp",
    *,
    needed: bool = False,
) -> bool:
    """Load the files of `write`, also those of another world size; return whether all ranks found
    them. Collective.

    Raises:
        ValueError: on every rank: a file cannot be read, or files are `needed` and a rank found
            none; states of another codec, exchange or model.
        PeerLost: "checkpoint"; a rank did not call this.
    """
    kind, found, error = NOTHING, None, None
    runs, files = of_ranks(Path(folder), name), f"{name}-*.pt"
    own = Path(folder) / f"{name}-{comm.rank}-of-{comm.world_size}.pt"
    try:
        if own.exists():
            kind, found = OWN, read_saved(own)
        elif len(runs) == 1 and comm.world_size not in runs:
            (others,) = runs.values()
            kind, found = OTHERS, [read_saved(file) for file in others]
    except (OSError, ValueError) as broken:
        kind, error = BROKEN, broken
    everyone = gather(comm, bytes([kind]), "checkpoint", comm.timeout_s, called=CALLED)
    votes = [vote[0] for vote in everyone]
    if BROKEN in votes:
        why = f": {error}" if error else ""
        text = f"rank {votes.index(BROKEN)} cannot read its {files} in {folder}{why}"
        raise ValueError(text) from error
    if len(set(votes)) > 1:
        without = [rank for rank, vote in enumerate(votes) if vote != max(votes)]
        missing = f"ranks {without} have no {files} in {folder}"
        text = f"{missing}, others have: copy those of all ranks there"
        if needed:
            raise ValueError(text)
        warnings.warn(text, stacklevel=3)
        found = None
    elif found is None and needed:
        raise ValueError(
            f"{folder} has no {files}: it was not saved with local steps; load model and optimizer"
            " yourself before you begin them"
        )
    return restore(state, comm, found, str(folder), f"delete {files} from {folder}")
