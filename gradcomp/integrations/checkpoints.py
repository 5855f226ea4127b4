"""Every rank's state inside a framework's checkpoint: gathered for one that is a file, a file a
rank in one that is a folder.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import pickle
import re
import struct
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from gradcomp.comm.base import Communicator
from gradcomp.errors import peers_answer
from gradcomp.exchange.agree import gather

logger = logging.getLogger("gradcomp")
CALLED = "the framework's own save or load of a checkpoint"
_SIZE = struct.Struct("<Q")
NOTHING, OWN, OTHERS, BROKEN = range(4)  # what a rank has found in a folder


class Stateful(Protocol):
    """What a checkpoint carries of each rank."""

    def state_dict(self) -> dict[str, Any]:
        """Return what this rank needs to go on bit for bit."""

    def load_state_dict(self, state: dict[str, Any] | Sequence[dict[str, Any]]) -> None:
        """Go on from a state of this rank, or from those of all ranks of a run of another size."""


def gather_states(state: Stateful, comm: Communicator) -> list[dict[str, Any]] | None:
    """Return the states of all ranks on rank 0, None on the others. Collective.

    Raises:
        PeerLost: "checkpoint"; a rank did not call this.
    """
    file = io.BytesIO()
    torch.save(state.state_dict(), file)
    mine = torch.frombuffer(file.getbuffer(), dtype=torch.uint8)
    size = _SIZE.pack(mine.numel())
    sizes = gather(comm, size, "checkpoint", comm.timeout_s, called=CALLED)
    with peers_answer("checkpoint", called=CALLED):
        if comm.rank:
            comm.start_send(mine, 0).wait(comm.timeout_s)
            return None
        everyone = [mine]
        for rank in range(1, comm.world_size):
            (nbytes,) = _SIZE.unpack(sizes[rank])
            everyone.append(comm.receive(comm.timeout_s, rank, max_nbytes=nbytes)[1])
    return [torch.load(io.BytesIO(one.numpy().tobytes()), weights_only=True) for one in everyone]


def restore(
    state: Stateful,
    comm: Communicator,
    states: Sequence[dict[str, Any]] | None,
    where: str,
    remedy: str,
) -> bool:
    """Load the states of all ranks of a run; return whether there were any. All ranks call it with
    the same ones.

    Args:
        where: the checkpoint, for messages.
        remedy: how to go on without them.

    Raises:
        ValueError: states of another codec, exchange or model.
    """
    if not states:
        if comm.rank == 0:
            warnings.warn(
                f"{where} has no gradcomp state: residuals begin at zero, and a warm start"
                " (start_step) anew. Nothing to do if it was made without gradcomp",
                stacklevel=3,
            )
        return False
    _load(state, states[comm.rank] if len(states) == comm.world_size else states, where, remedy)
    return True


def _load(state: Stateful, found: Any, where: str, remedy: str) -> None:
    try:
        state.load_state_dict(found)
    except ValueError as error:
        raise ValueError(
            f"the gradcomp state in {where} does not fit: {error}. To begin with fresh residuals,"
            f" {remedy}"
        ) from error


# ---- folders
# --------------------------------------------------------------------------------------------------


def write(
    state: Stateful, comm: Communicator, folder: str | os.PathLike[str], name: str = "gradcomp"
) -> None:
    """Write this rank's state to a file of its own in a checkpoint's folder, whole or not at
    all.
    """
    path = Path(folder) / f"{name}-{comm.rank}-of-{comm.world_size}.pt"
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(state.state_dict(), path.with_suffix(".new"))
    path.with_suffix(".new").replace(path)
    if comm.rank == 0:
        for world, files in _runs(path.parent, name).items():
            if world != comm.world_size:  # of a run that wrote to this folder before
                for stale in files:
                    stale.unlink(missing_ok=True)


def read(
    state: Stateful,
    comm: Communicator,
    folder: str | os.PathLike[str],
    name: str = "gradcomp",
    *,
    needed: bool = False,
) -> bool:
    """Load what `write` wrote, with as many ranks or others; return whether there was something on
    all ranks. Collective.

    Args:
        needed: whether it is an error if there is nothing.

    Raises:
        ValueError: a file that cannot be read, on every rank; states of another codec, exchange or
            model.
        PeerLost: "checkpoint"; a rank did not call this.
    """
    found, error = None, None
    runs, files = _runs(Path(folder), name), f"{name}-*.pt"
    own = Path(folder) / f"{name}-{comm.rank}-of-{comm.world_size}.pt"
    kind = (
        OWN
        if own.exists()
        else OTHERS
        if len(runs) == 1 and comm.world_size not in runs
        else NOTHING
    )
    try:
        if kind == OWN:
            found = torch.load(own, weights_only=True)
        elif kind == OTHERS:
            found = [torch.load(file, weights_only=True) for file in next(iter(runs.values()))]
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as broken:
        kind, error = BROKEN, broken
    votes = [
        vote[0] for vote in gather(comm, bytes([kind]), "checkpoint", comm.timeout_s, called=CALLED)
    ]
    if BROKEN in votes:
        raise ValueError(
            f"rank {votes.index(BROKEN)} cannot read its {files} in {folder}"
            + (f": {error}" if error else "")
        ) from error
    if len(set(votes)) > 1:
        without = [rank for rank, vote in enumerate(votes) if vote != max(votes)]
        text = (
            f"ranks {without} have no {files} in {folder}, others have: copy those of all ranks"
            " there"
        )
        if needed:
            raise ValueError(text)
        warnings.warn(text, stacklevel=3)
        found = None
    elif found is None and needed:
        raise ValueError(
            f"{folder} has no {files}: it was not saved with local steps; load model and optimizer"
            " yourself before you begin them"
        )
    remedy = f"delete {files} from {folder}"
    if found is None:
        return restore(state, comm, None, str(folder), remedy)
    _load(state, found, str(folder), remedy)
    return True


def _runs(folder: Path, name: str) -> dict[int, list[Path]]:
    """Return the files of ranks in a folder, by the number of ranks of their run."""
    out: dict[int, list[Path]] = {}
    with contextlib.suppress(FileNotFoundError):
        for file in sorted(folder.iterdir()):
            found = re.fullmatch(rf"{name}-\d+-of-(\d+)\.pt", file.name)
            if found:
                out.setdefault(int(found[1]), []).append(file)
    return out
