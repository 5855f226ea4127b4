"""Hierarchical exchanges: which ranks share a host, the communicators inside a node and across
nodes, and the exchange of a bucket over both.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor

from gradcomp.codecs import Codec
from gradcomp.comm.base import Communicator
from gradcomp.errors import PeerMismatch
from gradcomp.exchange.agree import EXCHANGE_FIELDS, Shown, agree, codec_fields
from gradcomp.exchange.averages import Averages
from gradcomp.exchange.bucket import BucketExchange

HOST_VARIABLE = "GRADCOMP_HOST_ID"


def find_nodes(
    comm: Communicator,
    nodes: Sequence[Sequence[int]] | None,
    timeout_s: float,
    codec: Codec | None = None,
) -> tuple[tuple[int, ...], ...]:
    """Return the ranks of every node: `nodes`, or those with equal GRADCOMP_HOST_ID or else equal
    host name.

    Collective. What goes round is a fingerprint, so that a rank that does something else meanwhile
    is a mismatch.

    Args:
        codec: must not differ either.

    Raises:
        ValueError: nodes that are not all of one size, or `nodes` that are not a partition of the
            ranks.
        PeerMismatch: other `nodes` or settings on some rank, or another exchange.
        PeerLost: a rank did not answer.
    """
    given = (
        None
        if nodes is None
        else tuple(sorted(tuple(sorted(int(rank) for rank in node)) for node in nodes))
    )
    host = os.environ.get(HOST_VARIABLE) or socket.gethostname()
    values = {
        **(codec_fields(codec) if codec is not None else {}),
        "exchange": "hierarchical",
        "layout": Shown(given, repr(nodes)),
        "world_size": comm.world_size,
        "bucket": host,
    }
    try:
        with comm.lease("the search for nodes") as lease:  # on the channel of all fingerprints
            everyone = agree(
                lease,
                values,
                timeout_s,
                called="register, or make its averager",
                fields=EXCHANGE_FIELDS,
                ignored="bucket",
                phase="setup",
            )
    except PeerMismatch as error:
        if error.field != "layout":
            raise
        raise PeerMismatch("nodes", error.rank, error.expected, error.got, error.first) from None
    if given is None:  # records are alike but for the host
        found = tuple(
            tuple(r for r, theirs in enumerate(everyone) if theirs == one)
            for one in dict.fromkeys(everyone)
        )
    else:
        found = given
    if sorted(rank for node in found for rank in node) != list(range(comm.world_size)):
        raise ValueError(f"nodes must hold every rank below {comm.world_size} once, got {nodes!r}")
    if len({len(node) for node in found}) > 1:
        raise ValueError(
            "a hierarchical exchange needs nodes with equally many ranks, got"
            f" {[len(node) for node in found]} ({found}); give nodes=, set {HOST_VARIABLE}, or take"
            " another exchange"
        )
    return found


def join_nodes(
    comm: Communicator, found: tuple[tuple[int, ...], ...], timeout_s: float
) -> tuple[Communicator, Communicator]:
    """Return the communicators of this rank's node, and of the ranks that have its position on
    their nodes. Collective.
    """
    home = next(node for node in found if comm.rank in node)
    position = home.index(comm.rank)
    inside = comm.node_subset(home, timeout_s)
    try:
        return inside, comm.subset([node[position] for node in found], timeout_s)
    except BaseException:
        inside.close()
        raise


class HierarchicalExchange:
    """One bucket's exchange inside the node and, between its two phases, that of the owned means
    across nodes.
    """

    def __init__(self, inside: BucketExchange, across: BucketExchange) -> None:
        self._inside, self._across = inside, across

    @property
    def flagged(self) -> bool:
        """Whether some rank's bucket, or the average, is not finite."""
        return self._inside.flagged

    @property
    def averages(self) -> Averages | None:
        """The averages, where they are kept packed."""
        return self._inside.averages

    @property
    def slices(self) -> tuple[tuple[Callable[[], None], ...], ...]:
        """The steps of every slice that goes across nodes; the exchange inside begins with the
        first and ends with the last.
        """
        across = self._across.slices
        steps = [[_nothing, _nothing, *rest, _nothing] for _, *rest in across]
        steps[0][:2] = self._inside.encode, self._begin_across
        steps[-1][4:] = partial(self._end_across, len(across) - 1), self._inside.finish
        return tuple(tuple(one) for one in steps)

    def begin(self, buffer: Tensor, step: int, bucket: int) -> None:
        """Take the bucket to average."""
        self._step, self._bucket = step, bucket
        self._inside.begin(buffer, step, bucket)

    def unpack(self) -> None:
        """Write averages that are kept packed into the bucket after all."""
        self._inside.unpack()

    def commit(self) -> None:
        """Make the residuals and moments that this step wrote current."""
        self._across.commit()
        self._inside.commit()

    def _begin_across(self) -> None:
        self._inside.average_shard()
        self._across.begin(
            self._inside.shard, self._step, self._bucket, flagged=self._inside.flagged
        )
        self._across.measure()

    def _end_across(self, last: int) -> None:
        """Every node learns of a value that is not finite; on the node where it arose nobody
        waits for a second phase.
        """
        self._across.finish(last)
        self._inside.publish_shard(flagged=self._across.flagged)


def _nothing() -> None:
    """A step of a slice in which nothing is left to do."""
