"""torch.distributed (gloo) as a communicator: one process group a channel.

The groups are made with `use_local_synchronization=True`: without it, groups made by each data-parallel row of a mesh
gave wrong sums. Every communicator has groups of its own: two pipelines on one group would start their collectives in an
order that differs between ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor

from gradcomp.comm.base import Channel, Communicator, Work


class _TorchWork(Work):
    def __init__(self, work: Any, buffers: tuple[Tensor, ...]) -> None:
        self._work, self._buffers = work, buffers  # the collective reads them until it is done

    def wait(self, timeout_s: float) -> None:
        try:
            self._work.wait(timedelta(seconds=timeout_s))
        except RuntimeError as error:
            text = str(error).splitlines()[0] if str(error) else type(error).__name__
            if "imed out" in text or "imeout" in text:
                raise TimeoutError(text) from error
            raise ConnectionError(text) from error


class TorchCommunicator(Communicator):
    """The ranks of a torch.distributed process group, over gloo groups of their own.

    Args:
        process_group: the ranks to speak with; the default group when None.
        timeout_s: seconds after which a collective that a peer does not answer fails.

    Raises:
        RuntimeError: torch.distributed is not initialised.
        ValueError: this process is not in `process_group`.
    """

    def __init__(self, process_group: dist.ProcessGroup | None = None, *, timeout_s: float = 300.0) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise RuntimeError(
                "torch.distributed is not initialised: call torch.distributed.init_process_group('gloo') first, "
                "for instance in a script started by torchrun"
            )
        parent = process_group if process_group is not None else dist.group.WORLD
        self.rank = dist.get_rank(parent)
        if parent is None or self.rank < 0:
            raise ValueError("this process is not a member of the process group")
        self.world_size = dist.get_world_size(parent)
        ranks = dist.get_process_group_ranks(parent)
        self._groups: dict[Channel, dist.ProcessGroup] = {}
        for channel in Channel:
            self._groups[channel] = dist.new_group(
                ranks,
                backend="gloo",
                timeout=timedelta(seconds=timeout_s),
                use_local_synchronization=True,
                group_desc=f"gradcomp {channel.name.lower()}",
            )

    def start_max(self, values: Tensor, channel: Channel) -> Work:
        group = self._group(channel)
        return self._start((values,), dist.all_reduce(values, dist.ReduceOp.MAX, group=group, async_op=True))

    def start_all_to_all(
        self, send: Tensor, send_nbytes: Sequence[int], recv: Tensor, recv_nbytes: Sequence[int], channel: Channel
    ) -> Work:
        group = self._group(channel)
        work = dist.all_to_all_single(recv, send, list(recv_nbytes), list(send_nbytes), group=group, async_op=True)
        return self._start((send, recv), work)

    def start_all_gather(self, send: Tensor, recv: Tensor, channel: Channel) -> Work:
        group = self._group(channel)
        return self._start((send, recv), dist.all_gather_single(recv, send, group=group, async_op=True))

    def close(self) -> None:
        """Tear down the channels; the process group they were made from stays."""
        groups, self._groups = self._groups, {}
        if dist.is_initialized():
            for group in groups.values():
                dist.destroy_process_group(group)

    def _group(self, channel: Channel) -> dist.ProcessGroup:
        if not self._groups:
            raise RuntimeError("this communicator is closed")
        return self._groups[channel]

    @staticmethod
    def _start(buffers: tuple[Tensor, ...], work: Any) -> Work:
        return _TorchWork(work, buffers)


_default: tuple[Any, TorchCommunicator] | None = None


def default_communicator() -> TorchCommunicator:
    """Return the communicator over the default process group, made at the first call (a collective one) and kept.

    Raises:
        RuntimeError: torch.distributed is not initialised.
    """
    global _default
    world = dist.group.WORLD if dist.is_initialized() else None
    if _default is None or _default[0] is not world or world is None:
        _default = (world, TorchCommunicator())
    return _default[1]
