"""Checkpoints of all ranks of a run, written so that a complete one is always left.

There is one folder per step and one file per rank. A file is written under a temporary name, synced
to disk and renamed. A run that is killed while saving resumes from the previous step.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from gradcomp.comm import Communicator
from gradcomp.comm.base import Channel
from gradcomp.comm.torchdist import default_or_alone
from gradcomp.engine.step import Engine
from gradcomp.errors import GradcompError, PeerMismatch
from gradcomp.exchange.agree import DIGEST_NBYTES, agree_on_tensors, digests, gather
from gradcomp.files import of_ranks, read_saved, write_saved

logger = logging.getLogger("gradcomp")
SHARED = "shared.pt"
CALLED = "save or load of its Checkpoints"
_STEP = re.compile(r"step-(\d+)")
_MESSAGE = struct.Struct("<q?")  # step and flag that each rank sends


class Checkpoints:
    """Saves and resumes a run. Every rank creates one; `save` and `load` are collective.

    Args:
        folder: folder of the checkpoints: shared by all ranks, or local with `every_rank`.
        state: gradcomp's state: the result of `register`, a `GradientAverager` or a `DiLoCo`. Each
            rank saves its own.
        keep: number of checkpoints to keep, the newest ones.
        every_rank: every rank writes `shared`, because the folder is not shared by all ranks.
        comm: communicator of all ranks. None: torch.distributed's default group, or a single rank
            if torch.distributed is not in use.
        timeout_s: longest wait for the other ranks, in seconds.
        shared: other objects with `state_dict` and `load_state_dict` by name: model, optimizer,
            scheduler. Rank 0 saves them. With a `DiLoCo`, whose ranks have different weights
            between syncs, every rank saves its own, too.

    Raises:
        ValueError: `keep` is below 1.
        TypeError: an object lacks one of these two methods.
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
        self._given_comm = comm
        self._timeout_s = timeout_s
        self._writes_shared = every_rank or self._comm.rank == 0
        self._has_own_weights = getattr(state, "own_weights", False)
        self._own = f"rank-{self._comm.rank}-of-{self._comm.world_size}.pt"

    def save(self, step: int) -> None:
        """Save a checkpoint for `step`. Once every rank has saved, remove the oldest ones beyond
        `keep`. Collective.

        Raises:
            PeerMismatch: another rank saves another step; nothing was written.
            PeerLost: a rank does not save; earlier checkpoints are unchanged.
            OSError: a file cannot be written, on this or another rank; earlier checkpoints are
                unchanged.
            TypeError: `load` could not read a value of one of the objects.
        """
        folder = self._folder_of(step)
        if self._agree(step, folder.exists()):
            # left by a run that resumed from an earlier step: do not mix the files of two runs
            with self._together(step, f"remove their files of an earlier step {step}"):
                self._remove(folder)
        try:
            with self._together(step, f"write their files of step {step}"):
                self._write(folder)
            with contextlib.suppress(OSError):  # all ranks have written theirs
                (folder / _unfinished(self._own)).unlink()
        except GradcompError:
            raise  # for ranks that have got all answers this checkpoint is complete
        except Exception:
            with contextlib.suppress(OSError):
                self._remove(folder)  # an incomplete one would take the place of one to keep
            raise
        # another rank may have started to save a later step
        until_now = [one for one in self._steps() if one <= step]
        for old in until_now[self._keep :]:
            self._remove(self._folder_of(old))

    def load(self) -> int | None:
        """Load the newest checkpoint that every rank can read. Collective.

        A checkpoint of another number of ranks can be read if all its files are in the folder.

        Until all ranks have loaded all of it, the present states are kept in addition. Then ranks
        compare the trained parameters, second moments, and the optimizers' state of each parameter.

        Returns:
            The step, or None if no save was ever completed; then nothing has changed.

        Raises:
            ValueError: there are checkpoints, but none that every rank can read; or one of the
                objects refuses its state (of another codec, model or optimizer), on this or another
                rank. Then nothing has changed.
            PeerMismatch: ranks have loaded different weights, second moments or states of an
                optimizer. Then nothing has changed.
            PeerLost: a rank does not load.
        """
        bound, bad = None, dict[int, str]()
        while True:
            step, found = self._newest(bound, bad)
            everyone = self._gather(step, any(map(self._was_complete, self._steps())))
            steps = {peer_step for peer_step, _ in everyone}
            if len(steps) == 1:
                break
            bound = min(steps)
        if found is None:
            if not any(was_complete for _, was_complete in everyone):
                if self._steps():
                    logger.warning("gradcomp: no save to %s was ever completed", self._folder)
                return None
            why = "; ".join(bad.values()) or "another rank has none, or cannot read its own"
            raise ValueError(f"no checkpoint in {self._folder} can be read by every rank: {why}")
        shared, own = found
        of_others = isinstance(own, list)  # states of all ranks of a run with another world size
        if self._has_own_weights and of_others:
            own = [one.get("state", one) for one in own]
        elif self._has_own_weights and SHARED in own:
            own, shared = own["state"], own[SHARED]
        found_by = {"state": (self._state, own)}
        found_by |= {name: (one, shared[name]) for name, one in self._shared.items()}
        before, name = list[tuple[str, Any, Any]](), ""
        try:
            with self._together(step, f"load the checkpoint of step {step}", ValueError):
                try:
                    for name, (one, _) in found_by.items():
                        before.append((name, one, copy.deepcopy(one.state_dict())))
                    for name, (one, its_state) in found_by.items():
                        one.load_state_dict(its_state)
                    if self._has_own_weights and of_others:
                        self._state.restore()  # replace rank 0's weights by the anchors
                except GradcompError:
                    raise
                except Exception as error:
                    raise ValueError(
                        f"the checkpoint of step {step} does not fit {name}: {error}"
                    ) from error
            self._compare(step)
        except Exception:
            _put_back(before)
            raise
        return step

    # ---- parts -----------------------------------------------------------------------------------

    @property
    def _comm(self) -> Communicator:
        """The communicator: a new default one after a failure."""
        return self._given_comm or default_or_alone()

    def _compare(self, step: int) -> None:
        """Compare what ranks have loaded: trained parameters, second moments and other replicated
        state of gradcomp, and the state of optimizers. Collective.

        Nothing is compared if `state` has own weights, local shards, or averages over other ranks
        than these.

        Raises:
            PeerMismatch: names the first value that differs.
        """
        comm, engine = self._comm, getattr(self._state, "_engine", None)
        is_replicated = (
            isinstance(engine, Engine)
            and not self._has_own_weights
            and (engine.comm.rank, engine.comm.world_size) == (comm.rank, comm.world_size)
            and all(source.shard is None for source in engine.sources)
        )
        everyone = self._gather(step, is_replicated)
        if not isinstance(engine, Engine) or not all(flag for _, flag in everyone):
            return
        agree_on_tensors(
            comm,
            engine.replicas.named(frozen=False),
            self._timeout_s,
            called=CALLED,
            phase="checkpoint",
            channel=Channel.CONTROL,
        )
        trained = [(source.name, source.like) for source in engine.sources if source.trained]
        for name, one in self._shared.items():
            if isinstance(one, torch.optim.Optimizer):
                own = b"".join(_digest(one.state.get(p, {})) for _, p in trained)
                theirs = gather(comm, own, "checkpoint", self._timeout_s, called=CALLED)
                _check_equal([f"{name} of {parameter}" for parameter, _ in trained], theirs)

    def _write(self, folder: Path) -> None:
        """Write this rank's files."""
        own = self._state.state_dict()  # before the model's: it may apply a pending update
        shared = {}
        if self._writes_shared or self._has_own_weights:
            shared = {name: one.state_dict() for name, one in self._shared.items()}
        folder.mkdir(parents=True, exist_ok=True)
        (folder / _unfinished(self._own)).touch()  # until all ranks have written theirs
        if self._writes_shared:
            write_saved(folder / SHARED, shared)
        own = {"state": own, SHARED: shared} if self._has_own_weights else own
        write_saved(folder / self._own, own)

    def _newest(self, bound: int | None, bad: dict[int, str]) -> tuple[int, tuple[Any, Any] | None]:
        """Return the newest step up to `bound` that this rank can read, with its contents; (-1,
        None) if there is none. Adds unreadable steps to `bad`, with the reason.
        """
        for step in self._steps():
            if step not in bad and (bound is None or step <= bound):
                try:
                    return step, self._read(self._folder_of(step))
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

    def _was_complete(self, step: int) -> bool:
        """Return whether a save of this step was ever completed: not if the file of every rank in
        its folder is marked, or if there are only parts of such files.
        """
        try:
            names = {file.name for file in self._folder_of(step).iterdir()}
        except OSError:
            return True
        whole = {name for name in names if not name.endswith(".part")}
        whole -= {SHARED} if whole < names else set()
        return any(_unfinished(name) not in names for name in whole)

    def _steps(self) -> list[int]:
        """Return the steps in the folder, newest first."""
        with contextlib.suppress(FileNotFoundError):
            found = (_STEP.fullmatch(one.name) for one in self._folder.iterdir())
            return sorted((int(one[1]) for one in found if one), reverse=True)
        return []

    def _remove(self, folder: Path) -> None:
        """Remove this rank's files of a step; rank 0 removes those of runs of other sizes, too."""
        own = [self._own, *([SHARED] if self._writes_shared else [])]
        unwanted = [file for name in own for file in folder.glob(f"{name}*")]  # includes .part
        if self._comm.rank == 0:
            ours = f"-of-{self._comm.world_size}.pt"
            unwanted += [f for f in folder.glob("rank-*-of-*.pt*") if ours not in f.name]
        for file in sorted(unwanted, key=lambda file: file.suffix == ".part"):  # marks last
            file.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # other ranks' files are still there
            folder.rmdir()

    def _folder_of(self, step: int) -> Path:
        return self._folder / f"step-{step:012d}"

    def _agree(self, step: int, flag: bool = False) -> list[int]:
        """Wait until all ranks save this step; return the ranks that have set the flag."""
        answers = self._gather(step, flag)
        for rank, (peer_step, _) in enumerate(answers):
            if peer_step != step:
                raise PeerMismatch("step", rank, step, peer_step, first=self._comm.rank)
        return [rank for rank, (_, peer_flag) in enumerate(answers) if peer_flag]

    @contextlib.contextmanager
    def _together(self, step: int, what: str, error: type[Exception] = OSError) -> Iterator[None]:
        """Do this rank's part in the body; an exception in it raises `error` on the others, which
        wait for this rank.
        """
        try:
            yield
        except Exception:
            with contextlib.suppress(GradcompError):
                self._agree(step, True)
            raise
        failed = self._agree(step)
        if failed:
            raise error(f"ranks {failed} could not {what}: see there")

    def _gather(self, step: int, flag: bool) -> list[tuple[int, bool]]:
        message = _MESSAGE.pack(step, flag)
        everyone = gather(self._comm, message, "checkpoint", self._timeout_s, called=CALLED)
        return [_MESSAGE.unpack(data) for data in everyone]


def _put_back(before: list[tuple[str, Any, Any]]) -> None:
    """Load the states of before a load that failed: (name, object, state) each."""
    for name, one, state in before:
        try:
            one.load_state_dict(state)
        except Exception:
            logger.exception(
                "gradcomp: %s has parts of a checkpoint that could not be loaded", name
            )


def _unfinished(name: str) -> str:
    """Return the name of the mark that a rank's file has until all ranks have written theirs."""
    return f"{name}.part"


def _digest(state: Mapping[str, Any]) -> bytes:
    """Return a digest of an optimizer's state of one parameter, zeros if it has no plain tensor."""
    keys = sorted((key for key in state if type(state[key]) is torch.Tensor), key=str)
    values = [(str(key), state[key]) for key in keys]
    return digests([("", digests(values))]) if values else bytes(DIGEST_NBYTES)


def _check_equal(names: Sequence[str], everyone: Sequence[bytes]) -> None:
    """Raise PeerMismatch if digests of the same value differ over the ranks.

    Ranks without a value are left out: some optimizers divide the parameters among the ranks.
    """
    for number, name in enumerate(names):
        part = slice(DIGEST_NBYTES * number, DIGEST_NBYTES * (number + 1))
        held = [(rank, data[part].hex()) for rank, data in enumerate(everyone) if any(data[part])]
        for rank, digest in held:
            if digest != held[0][1]:
                first, expected = held[0]
                texts = f"state with digest {expected}", f"state with digest {digest}"
                raise PeerMismatch(name, rank, *texts, first=first)
