"""Checkpoints of all ranks of a run, of which the last good one stays.

One folder a step, in which every rank has a file of its own, written beside its place, brought to
the disk and renamed. A run that is killed while it saves resumes from the step before.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import struct
from pathlib import Path
from typing import Any

from gradcomp.comm import Communicator
from gradcomp.comm.torchdist import default_or_alone
from gradcomp.errors import PeerMismatch
from gradcomp.exchange.agree import gather
from gradcomp.files import of_ranks, read_saved, write_saved

logger = logging.getLogger("gradcomp")
SHARED = "shared.pt"
CALLED = "save or load of its Checkpoints"
_STEP = re.compile(r"step-(\d+)")
_MINE = struct.Struct("<q?")  # a step and a flag of each rank


class Checkpoints:
    """Save and resume a run; every rank makes one, and calls its methods with the others.

    Args:
        folder: the same one for all ranks, or one on each machine with `every_rank`.
        state: of gradcomp: what `register` returned, a `GradientAverager`, a `DiLoCo`; each rank
            saves its own.
        keep: steps that stay, the newest ones.
        every_rank: every rank writes `shared`, too, because ranks do not see one folder.
        comm: to agree with the other ranks; when None one of torch.distributed's default group, or
            of this rank alone where that is not in use.
        timeout_s: seconds to wait for the other ranks.
        shared: what else the run needs, by name: model, optimizer, scheduler, whatever has
            `state_dict` and `load_state_dict`. Rank 0 writes it; with a `DiLoCo`, between whose
            syncs ranks have weights of their own, every rank writes its own, too.

    Raises:
        ValueError: `keep` below 1.
        TypeError: an object without these two methods.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        state: Any,
        *,
        keep: int = 2,
        every_rank: bool = False,
        comm: Communicator | None = None,
        timeout_s: float = 300.0,
        **shared: Any,
    ) -> None:
        if keep < 1:
            raise ValueError(f"keep must be at least 1, got {keep}")
        for name, one in {"state": state, **shared}.items():
            if not (hasattr(one, "state_dict") and hasattr(one, "load_state_dict")):
                kind = type(one).__name__
                raise TypeError(f"{name} must have state_dict and load_state_dict, got {kind}")
        self._folder, self._state, self._shared, self._keep = Path(folder), state, shared, keep
        self._comm = comm or default_or_alone()
        self._timeout_s = timeout_s
        self._writes_shared = every_rank or self._comm.rank == 0
        self._apart = getattr(state, "own_weights", False)
        self._own = f"rank-{self._comm.rank}-of-{self._comm.world_size}.pt"

    def save(self, step: int) -> None:
        """Save all of it as `step`, and remove steps that are not kept once every rank has saved.

        Raises:
            PeerMismatch: another rank saves another step; nothing was written.
            PeerLost: a rank does not save; the checkpoints of before are as they were.
            OSError: it cannot be written; the checkpoints of before are as they were.
        """
        own = self._state.state_dict()  # first: it may apply an update that is under way
        shared = {}
        if self._writes_shared or self._apart:
            shared = {name: one.state_dict() for name, one in self._shared.items()}
        folder = self._at(step)
        if self._agree(step, folder.exists()):
            # of a run that went on from an earlier step: files of two must not make a checkpoint
            self._remove(folder)
            self._agree(step)
        folder.mkdir(parents=True, exist_ok=True)
        if self._writes_shared:
            write_saved(folder / SHARED, shared)
        write_saved(folder / self._own, {"state": own, SHARED: shared} if self._apart else own)
        self._agree(step)
        # another rank may have begun to save the next one
        until_now = [one for one in self._steps() if one <= step]
        for old in until_now[self._keep :]:
            self._remove(self._at(old))

    def load(self) -> int | None:
        """Load the newest step that every rank can read, and return it; None: there is none, and
        nothing has changed.

        A step with another number of ranks is read where all its files are in the folder.

        Raises:
            ValueError: there are checkpoints, but none that every rank can read; a state of another
                codec or model.
            PeerLost: a rank does not load.
        """
        bound, bad = None, dict[int, str]()
        while True:
            step, found = self._newest(bound, bad)
            everyone = self._gather(step, bool(self._steps()))
            steps = {theirs for theirs, _ in everyone}
            if len(steps) == 1:
                break
            bound = min(steps)
        if found is None:
            if not any(has_some for _, has_some in everyone):
                return None
            why = "; ".join(bad.values()) or "another rank has none, or cannot read its own"
            raise ValueError(f"no checkpoint in {self._folder} can be read by every rank: {why}")
        shared, own = found
        of_others = isinstance(own, list)  # of another number of ranks
        if self._apart and of_others:
            own = [one.get("state", one) for one in own]
        elif self._apart and SHARED in own:
            own, shared = own["state"], own[SHARED]
        self._state.load_state_dict(own)  # which looks before it changes anything
        for name, one in self._shared.items():
            one.load_state_dict(shared[name])
        if self._apart and of_others:
            self._state.restore()  # from rank 0's weights to those that all ranks agreed on
        return step

    # ---- parts -----------------------------------------------------------------------------------

    def _newest(self, bound: int | None, bad: dict[int, str]) -> tuple[int, tuple[Any, Any] | None]:
        """Return the newest step, of at most `bound`, that this rank can read, and what is in it;
        (-1, None) for none. Why steps cannot be read is added to `bad`.
        """
        for step in self._steps():
            if step not in bad and (bound is None or step <= bound):
                try:
                    return step, self._read(self._at(step))
                except (OSError, ValueError) as error:
                    logger.warning("gradcomp: checkpoint of step %d is left out: %s", step, error)
                    bad[step] = str(error)
        return -1, None

    def _read(self, folder: Path) -> tuple[Any, Any]:
        shared = read_saved(folder / SHARED)
        missing = sorted(self._shared.keys() - shared.keys())
        if missing:
            raise ValueError(f"{folder / SHARED} has no {', '.join(missing)}")
        own = folder / self._own
        if own.exists():
            return shared, read_saved(own)
        worlds = of_ranks(folder, "rank")
        for world, files in worlds.items():
            if len(files) == world:
                return shared, [read_saved(file) for file in files]
        raise ValueError(f"{folder} is incomplete: it has no {own.name}")

    def _steps(self) -> list[int]:
        """Return the steps in the folder, the newest first."""
        with contextlib.suppress(FileNotFoundError):
            found = (_STEP.fullmatch(one.name) for one in self._folder.iterdir())
            return sorted((int(one[1]) for one in found if one), reverse=True)
        return []

    def _remove(self, folder: Path) -> None:
        """Remove what this rank has written, or on rank 0 a run of another size."""
        own = [self._own, *([SHARED] if self._writes_shared else [])]
        unwanted = [file for name in own for file in folder.glob(f"{name}*")]  # .part, too
        if self._comm.rank == 0:
            others = of_ranks(folder, "rank").items()
            unwanted += [f for world, fs in others if world != self._comm.world_size for f in fs]
        for file in unwanted:
            file.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # other ranks' files are still there
            folder.rmdir()

    def _at(self, step: int) -> Path:
        return self._folder / f"step-{step:012d}"

    def _agree(self, step: int, flag: bool = False) -> bool:
        """Wait for the other ranks to save this step, too; return whether any has the flag."""
        everyone = self._gather(step, flag)
        for rank, (theirs, _) in enumerate(everyone):
            if theirs != step:
                raise PeerMismatch("step", rank, step, theirs, first=self._comm.rank)
        return any(theirs for _, theirs in everyone)

    def _gather(self, step: int, flag: bool) -> list[tuple[int, bool]]:
        mine = _MINE.pack(step, flag)
        everyone = gather(self._comm, mine, "checkpoint", self._timeout_s, called=CALLED)
        return [_MINE.unpack(theirs) for theirs in everyone]
