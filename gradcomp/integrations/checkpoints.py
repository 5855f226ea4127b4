"""Every rank's state inside a framework's checkpoint: gathered for one that is a file, a file a
rank in one that is a folder.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from gradcomp.comm.base import Communicator
from gradcomp.comm.torchdist import gather_object
from gradcomp.exchange.agree import gather
from gradcomp.files import of_ranks, read_saved, write_saved

CALLED = "the framework's own save or load of a checkpoint"
NOTHING, OWN, OTHERS, BROKEN = range(4)  # what a rank has found in a folder


class Stateful(Protocol):
    """What a checkpoint carries of each rank."""

    def state_dict(self) -> dict[str, Any]:
        """Return what this rank needs to go on bit for bit."""

    def load_state_dict(self, state: dict[str, Any] | Sequence[dict[str, Any]]) -> None:
        """Go on from a state of this rank, or from those of all ranks of a run of another size."""


def gather_states(state: Stateful, comm: Communicator) -> list[dict[str, Any]] | None:
    """Return the states of all ranks on rank 0, None on the others. Collective over the default
    process group, whose ranks `comm` has.

    Raises:
        PeerLost: "checkpoint"; a rank did not call this.
        RuntimeError: a rank was lost while it sent its state.
    """
    mine = state.state_dict()
    gather(comm, b"", "checkpoint", comm.timeout_s, called=CALLED)  # names a rank that is missing
    return gather_object(mine)


def restore(state: Stateful, comm: Communicator, found: Any, where: str, remedy: str) -> bool:
    """Load `found`, this rank's state or a list of those of all ranks of a run; return whether it
    had any. All ranks call it with the same kind. `where` is the checkpoint and `remedy` how to go
    on without it, for messages.

    Raises:
        ValueError: states of another codec, exchange or model.
    """
    if not found:
        if comm.rank == 0:
            warnings.warn(
                f"{where} has no gradcomp state: residuals begin at zero, and a warm start"
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
    state: Stateful, comm: Communicator, folder: str | os.PathLike[str], name: str = "gradcomp"
) -> None:
    """Write this rank's state to a file of its own in a checkpoint's folder; after an error there
    is no such file.
    """
    path = Path(folder) / f"{name}-{comm.rank}-of-{comm.world_size}.pt"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_saved(path, state.state_dict())
    if comm.rank == 0:
        for world, files in of_ranks(path.parent, name).items():
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

    Raises:
        ValueError: a file that cannot be read, on every rank; states of another codec, exchange or
            model; nothing where something is `needed`.
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
    text = (
        f"{folder} has no {files}: it was not saved with local steps; load model and optimizer"
        " yourself before you begin them"
    )
    if len(set(votes)) > 1:
        without = [rank for rank, vote in enumerate(votes) if vote != max(votes)]
        missing = f"ranks {without} have no {files} in {folder}"
        text = f"{missing}, others have: copy those of all ranks there"
        if not needed:
            warnings.warn(text, stacklevel=3)
        found = None
    if found is None and needed:
        raise ValueError(text)
    return restore(state, comm, found, str(folder), f"delete {files} from {folder}")
