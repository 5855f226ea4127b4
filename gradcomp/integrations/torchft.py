"""Compressed averages between the replica groups of a torchft `Manager`: groups leave and join
while the others go on training::

    averager = gradcomp.integrations.torchft.ManagedAverager(
        manager, model, "auto", optimizer=optimizer)
    optimizer = torchft.OptimizerWrapper(manager, optimizer)
    ...
    optimizer.zero_grad()  # starts a quorum
    loss.backward()
    averager.average()
    optimizer.step()  # if the step is committed
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial, wraps
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import torch
from torch import nn

from gradcomp.averager import GradientAverager
from gradcomp.codecs import Codec
from gradcomp.comm.base import Communicator
from gradcomp.comm.local import LocalCommunicator
from gradcomp.comm.torchdist import TorchCommunicator
from gradcomp.engine.optimizers import listed
from gradcomp.engine.options import Advanced, CommonOptions, takes
from gradcomp.engine.state import Accepted
from gradcomp.engine.step import Step
from gradcomp.errors import CorruptPayload, GradcompError, PeerLost, PeerMismatch
from gradcomp.exchange.agree import Shown, shorten
from gradcomp.integrations.versions import imported
from gradcomp.integrations.watch import Watch

with imported("torchft"):
    from torchft import local_sgd
    from torchft.local_sgd import extract_local_tensor
    from torchft.manager import Manager
    from torchft.optim import OptimizerWrapper
    from torchft.process_group import create_store_client

if TYPE_CHECKING:
    from typing_extensions import Unpack

logger = logging.getLogger("gradcomp")

KEY = "gradcomp"  # prefix of the averagers' keys in a manager's state dicts
# mismatches after which a group that has never trained takes its own settings for the wrong ones
PATIENCE = 3
PROBE_S = 5.0  # longest wait for a connection to the lighthouse, after it gave no quorum


class Averaging:
    """Averages in progress, returned by `ManagedAverager.start`.

    Args:
        averager: the averager that started them.
        begun: their step; None if the manager already had an error.
    """

    def __init__(self, averager: ManagedAverager, begun: Step | None) -> None:
        self._averager, self._begun = averager, begun

    def wait(self) -> None:
        """Wait for the averages and write them to ``p.grad``; a second call does nothing. Raises
        the errors of `ManagedAverager.average`.
        """
        begun, self._begun = self._begun, None
        self._averager._finish(begun)


class ManagedAverager(GradientAverager):
    """A `gradcomp.GradientAverager` whose ranks are the replica groups of a torchft manager.

    Call `average` in every step, between ``loss.backward()`` and ``optimizer.step()`` of torchft's
    `OptimizerWrapper`. If the manager does not commit a step (``manager.should_commit()``), neither
    weights nor residuals change. A group that stays keeps its residuals. A group that joins gets
    the others' second moments (`precondition`) with the model, and starts with zero residuals. The
    residuals of a lost group are lost.

    If a replica group has several ranks, each of them makes an averager, which averages with the
    same rank of the other groups. Of a sharded model (FSDP2) it averages the local shards.

    Args:
        manager: a torchft manager that has not started a quorum yet.
        named_parameters, codec, bucket_cap_mb, advanced, common: see `gradcomp.GradientAverager`.
            The default of ``timeout_s`` is the manager's timeout, that of ``atomic_steps`` is True.
        optimizer: the optimizer of these parameters, or a list of several; each may be in
            torchft's wrapper.
        name: distinguishes several averagers of one manager.

    Raises:
        ValueError: an option that needs the same ranks in every step: `grad_scaler`,
            ``exchange="hierarchical"``, `nodes`, a transform such as
            `gradcomp.onebit_sgd.AggregateAdagrad`; a manager that has had a quorum, or has an
            averager of this name.
    """

    @takes(CommonOptions)
    def __init__(
        self,
        manager: Manager,
        named_parameters: nn.Module | Iterable[tuple[str, nn.Parameter]],
        codec: Codec | str = "auto",
        *,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
        bucket_cap_mb: float = 25.0,
        name: str = "",
        advanced: Advanced | None = None,
        **common: Unpack[CommonOptions],
    ) -> None:
        self._key = f"{KEY} {name}".strip()
        if manager._quorum_future is not None:
            raise ValueError("this manager has had a quorum: make the averager before the first")
        if self._key in manager._user_state_dicts:
            raise ValueError(f"this manager has an averager {name!r} already: give it a name")
        self._manager = manager
        self._optimizers = [
            one.optim if isinstance(one, OptimizerWrapper) else one for one in listed(optimizer)
        ]
        if common.get("timeout_s") is None:
            common["timeout_s"] = manager._timeout.total_seconds()
        common.setdefault("atomic_steps", True)  # a group that is behind copies the whole model
        super().__init__(
            named_parameters,
            codec,
            optimizer=self._optimizers or None,
            comm=LocalCommunicator.group(1)[0],  # until the first quorum
            bucket_cap_mb=bucket_cap_mb,
            advanced=advanced,
            **common,
        )
        try:
            self._refuse_fixed_ranks()
        except ValueError:
            super().close()
            raise
        self._compared = True  # no comparison: a new group's weights are replaced later in the step
        self._quorum: Communicator | None = None  # of a new quorum, until its first step
        self._is_uncommitted = False  # whether the last `average` is of a step that does not count
        self._has_trained = self._has_healed = False
        self._refused: PeerMismatch | None = None  # a mismatch with other groups in `_connect`
        self._is_odd, self._mismatches, self._calls = True, 0, 0
        manager._pg.configure = _configure(weakref.ref(self), manager._pg.configure)
        manager.should_commit = _noted(weakref.ref(self), manager.should_commit)
        if "_async_quorum" not in vars(manager):  # by another averager
            manager._async_quorum = _explained(manager._async_quorum)
        heal, healthy = weakref.WeakMethod(self._heal), weakref.WeakMethod(self._healthy)
        manager.register_state_dict_fn(
            self._key, lambda state: (heal() or bool)(state), lambda: (healthy() or dict)()
        )
        self._forget = weakref.finalize(self, _forget, manager, self._key)
        self._watch = Watch(
            (p for _, p in self._named),
            lambda: self._calls,
            lambda: "call averager.average() after loss.backward(), in every step",
        )

    def average(self) -> None:
        """Replace every ``p.grad`` by its average over the groups of the quorum.

        A lost group or a corrupt message makes every ``p.grad`` NaN and is reported to the manager.
        The step is then not committed (``manager.should_commit()`` is False), and the next quorum
        excludes the lost group. If the manager has an error already, nothing is averaged.

        Raises:
            PeerMismatch: this group is new, and its settings or its model differ from the others',
                which go on.
            UnsupportedTensor, GradcompError: see `GradientAverager.average`.
            TimeoutError: the lighthouse gave no quorum. What waits for the quorum first raises it,
                often ``zero_grad()`` of torchft's optimizer.
        """
        self.start().wait()

    def start(self) -> Averaging:
        """Start to average; ``wait()`` of the result finishes. Raises the errors of `average`."""
        manager, begun = self._manager, None
        self._calls += 1
        manager.wait_quorum()
        number, error = manager.current_step(), manager.errored()
        self._roll_back_uncommitted()
        with self._reports(number):
            if self._refused is not None:
                raise self._refused
            if error is not None:  # abort, so that other groups do not wait for this one
                (self._quorum or self._engine.comm).abort(str(error.original_exception)[:200])
            else:
                self._join_quorum()
                self._heal_early()
                self._engine.step = number
                self._share()
                begun = self._begin()
        return Averaging(self, begun)

    def _finish(self, begun: Step | None) -> None:
        if begun is not None:
            with self._reports(begun.number):
                self._end(begun)
                self._is_uncommitted = self._has_trained = True

    @contextlib.contextmanager
    def _reports(self, step: int) -> Iterator[None]:
        """Report errors in the block to the manager.

        PeerLost, PeerMismatch and CorruptPayload are then logged, since the step is repeated. A
        PeerMismatch is raised if this group is new and its settings are the odd ones. Other errors
        are raised.
        """
        try:
            yield
        except (PeerLost, PeerMismatch, CorruptPayload) as error:
            self._manager.report_error(error)
            self._mismatches += isinstance(error, PeerMismatch)
            is_at_fault = self._is_odd or self._mismatches >= PATIENCE
            if isinstance(error, PeerMismatch) and not self._has_trained and is_at_fault:
                raise
            logger.warning("gradcomp: step %d does not count and is made again: %s", step, error)
        except Exception as error:
            self._manager.report_error(error)
            raise

    def average_delayed(self) -> bool:
        """Raise GradcompError: the average would belong to a step that is committed already."""
        raise GradcompError("average_delayed() and steps that may not count exclude each other")

    def state_dict(self) -> dict[str, Any]:
        """Return the state as `Controls.state_dict` does; roll back an uncommitted step first."""
        if self._is_uncommitted:
            self._roll_back_uncommitted()
            self._engine.step = self._manager.current_step()
        return super().state_dict()

    def _take(self, accepted: Accepted) -> None:
        super()._take(accepted)
        self._is_uncommitted = False
        self._engine.replicas.is_due = False  # the manager replaces weights

    def close(self) -> None:
        """Stop the threads and close the connections; the manager stays open."""
        with contextlib.suppress(Exception):  # errors of the manager's thread
            self._manager.wait_quorum()
        self._watch.close()
        self._forget()
        if self._quorum is not None:
            self._quorum.close()
            self._quorum = None
        super().close()

    # ---- quorums ---------------------------------------------------------------------------------

    def _connect(self, address: str, rank: int, world_size: int) -> None:
        """Connect to the groups of a new quorum. Called on the manager's thread, between steps."""
        self._refused = None
        if self._quorum is not None:
            self._quorum.close()
            self._quorum = None
        if world_size == 1:
            self._quorum = LocalCommunicator.group(1)[0]
            return
        timeout_s = self._engine.timeout_s
        store = create_store_client(f"{address}/{self._key}", self._manager._connect_timeout)
        mine = self._settings()
        store.set(f"settings {rank}", json.dumps([self._has_trained, mine]))
        try:
            self._quorum = TorchCommunicator.over(store, rank, world_size, timeout_s=timeout_s)
        except PeerMismatch as error:
            self._refused = error
            raise
        finally:
            if self._quorum is not None or self._refused is not None:  # all groups have connected
                found = [json.loads(store.get(f"settings {r}")) for r in range(world_size)]
                old = {r: theirs for r, (has_trained, theirs) in enumerate(found) if has_trained}
                self._is_odd = mine not in old.values()
        if self._is_odd and old and not self._has_trained:
            # torchft would give the model of another group to this one, which does not fit
            other, theirs = next(iter(old.items()))
            field = next(name for name in mine if mine[name] != theirs.get(name))
            texts = shorten(mine[field], theirs.get(field, "none"))
            self._refused = PeerMismatch(field, other, *texts, first=rank)
            comm, self._quorum = self._quorum, None
            comm.abort(str(self._refused))
            comm.close()
            raise self._refused

    def _settings(self) -> dict[str, str]:
        """Return the settings that must be equal in all groups, as text."""
        engine = self._engine
        sources = [(s.name, tuple(s.like.shape), s.like.dtype, s.trained) for s in engine.sources]
        settings = {
            "codec": engine.codec,
            **engine.options.compared(),
            "parameters": sources,
            "timeout_s": engine.timeout_s,
        }
        return {
            name: str(value.text) if isinstance(value, Shown) else repr(value)
            for name, value in settings.items()
        }

    def _join_quorum(self) -> None:
        """Move the engine to the communicator of the latest quorum, if that is new."""
        if self._quorum is None:
            return
        comm, self._quorum = self._quorum, None
        self._engine.move(comm)
        self._engine.scale_lr_of(self._optimizers)
        if comm.rank == 0:
            logger.info(self.describe())

    def _share(self) -> None:
        """Scale gradients in place, so that the mean over all groups is the mean over participating
        ones, torchft's ``num_participants()``. Other groups, such as spares, send zeros.
        """
        manager, world_size = self._manager, self._engine.comm.world_size
        takes_part = manager.is_participating()
        factor = world_size / max(1, manager.num_participants()) if takes_part else 0.0
        for _, parameter in self._named:
            if parameter.grad is not None and factor != 1.0:
                parameter.grad.mul_(factor) if factor else parameter.grad.zero_()

    # ---- states ----------------------------------------------------------------------------------

    def _roll_back_uncommitted(self) -> None:
        """Roll back residuals and second moments if the last averaged step was not committed. The
        manager's step does not tell: a group that heals takes the step of another one.
        """
        if self._is_uncommitted:
            self._engine.discard_step()
        self._is_uncommitted = False

    def _healthy(self) -> dict[str, Any]:
        """Return the state for a joining group. Called on the manager's thread, between steps."""
        self._roll_back_uncommitted()
        return self._engine.shared_state()

    def _heal(self, state: dict[str, Any]) -> None:
        """Load the state of a healthy group, unless `_heal_early` has loaded it."""
        if self._has_healed:
            self._has_healed = False
            return
        self._roll_back_uncommitted()
        self._engine.take_shared(state, keeps_residuals=self._has_trained)

    def _heal_early(self) -> None:
        """Load a healthy group's state before the step. With ``use_async_quorum=True`` the manager
        loads it after the step, but the step encodes in units of second moments.
        """
        manager = self._manager
        if manager._healing and manager._pending_state_dict is not None:
            self._heal(manager._pending_state_dict["user"][self._key])
            self._has_healed = True

    # ---- parts of the averager -------------------------------------------------------------------

    def _refuse_fixed_ranks(self) -> None:
        options = self._engine.options
        given = {
            "grad_scaler": options.grad_scaler is not None,
            "exchange='hierarchical'": options.exchange == "hierarchical",
            "advanced nodes": options.advanced.nodes is not None,
            "a transform (AdaGrad on averages)": options.advanced.transform is not None,
        }
        for name, found in given.items():
            if found:
                raise ValueError(f"{name} needs the same ranks in every step: not with torchft")

    def _expected_ranks(self, comm: Communicator | None) -> int:
        return max(2, int(self._manager._min_replica_size))

    def _warn_if_alone(self) -> None:
        """Do not warn: every averager is alone until its first quorum."""

    def _advise(self, chosen: str, optimizer: Any) -> None:
        """Log nothing yet: the first quorum decides which rank logs."""


class DiLoCo(local_sgd.DiLoCo):  # type: ignore[misc]
    """torchft's `DiLoCo` with compressed pseudo-gradients and residuals.

    The manager needs ``use_async_quorum=False``.

    Args:
        manager, model_fragments, inner_optimizer, outer_optimizer, sync_every, more: see torchft's
            `DiLoCo`.
        codec: codec or name; "auto" is `Block(8)`.
        options: keyword arguments of `ManagedAverager`.

    Attributes:
        averagers: one `ManagedAverager` per fragment, with ``stats``.

    Raises:
        TypeError: `should_quantize`, `use_bucketization` or ``bucket_cap_mb``, which belong to
            torchft's own exchange.
        ValueError: see torchft's `DiLoCo` and `ManagedAverager`.
    """

    def __init__(
        self,
        manager: Manager,
        model_fragments: list[nn.Module],
        inner_optimizer: torch.optim.Optimizer,
        outer_optimizer: torch.optim.Optimizer | list[torch.optim.Optimizer],
        sync_every: int,
        *,
        codec: Codec | str,
        options: Mapping[str, Any] | None = None,
        **more: Any,
    ) -> None:
        for name in ("should_quantize", "use_bucketization", "bucket_cap_mb"):
            if name in more:
                raise TypeError(
                    f"{name} is not supported: gradcomp replaces torchft's all_reduce; use codec="
                )
        super().__init__(
            manager, model_fragments, inner_optimizer, outer_optimizer, sync_every, **more
        )
        self.averagers: list[ManagedAverager] = []
        for number, fragment in enumerate(self._fragments):
            changed = [
                (name, nn.Parameter(torch.empty_like(extract_local_tensor(p.data))))
                for name, p in fragment._model_fragment.named_parameters()
            ]
            self.averagers.append(
                ManagedAverager(
                    manager, changed, codec, name=f"fragment {number}", **(options or {})
                )
            )
            fragment._average_grads = partial(_average, fragment, changed, self.averagers[-1])

    def close(self) -> None:
        """Close the averagers."""
        for averager in self.averagers:
            averager.close()


def _average(
    fragment: Any, changed: list[tuple[str, nn.Parameter]], averager: ManagedAverager
) -> None:
    """Start to average a fragment's pseudo-gradients."""
    for name, parameter in changed:
        parameter.grad = fragment._grads[name]
    fragment._allreduce_work.append(averager.start())


def _forget(manager: Manager, key: str) -> None:
    """Remove an averager's state functions from a manager."""
    for registered in (manager._user_state_dicts, manager._load_state_dict_fns):
        registered.pop(key, None)


def _configure(owner: weakref.ref[ManagedAverager], configure: Any) -> Any:
    """Return a `ProcessGroup.configure` that also connects an averager, until that is closed."""

    def wrapped(address: str, replica_id: str, rank: int, world_size: int, *more: Any) -> None:
        configure(address, replica_id, rank, world_size, *more)
        averager = owner()
        if averager is not None and not averager._engine.closed:
            averager._connect(address, rank, world_size)

    return wrapped


def _noted(owner: weakref.ref[ManagedAverager], should_commit: Any) -> Any:
    """Return a manager's `should_commit` that also notes for an averager that its step counts."""

    @wraps(should_commit)
    def wrapped(*args: Any, **options: Any) -> bool:
        counts: bool = should_commit(*args, **options)
        averager = owner()
        if averager is not None and counts:
            averager._is_uncommitted = False
        return counts

    return wrapped


def _explained(quorum: Any) -> Any:
    """Return a manager's `_async_quorum` whose TimeoutError says what is wrong and what to do."""

    @wraps(quorum)
    def wrapped(**options: Any) -> None:
        try:
            quorum(**options)
        except TimeoutError as error:
            raise TimeoutError(f"{_about_lighthouse()} (torchft: {error})") from error

    return wrapped


def _about_lighthouse() -> str:
    """Return what a missing quorum says about the lighthouse, and what to do."""
    address = os.environ.get("TORCHFT_LIGHTHOUSE", "")
    again = "start the groups' programs again from the last checkpoint"
    few = "fewer groups than its --min_replicas may be there, or it was started again meanwhile"
    if not address:
        return (
            "the lighthouse gave no quorum: if it has ended, start it at the same address and "
            f"{again}; otherwise {few}"
        )
    place = urlsplit(address)
    try:
        socket.create_connection((place.hostname, place.port or 80), PROBE_S).close()
    except OSError as error:
        return (
            f"the lighthouse at {address} does not answer ({error}): start it again at this "
            f"address, and {again}"
        )
    return f"the lighthouse at {address} answers, but gave no quorum: {few}; then {again}"
