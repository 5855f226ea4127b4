"""Hierarchical exchange: the search for nodes, communicators inside a node and across nodes, and
the exchange of a bucket over both.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from functools import partial

from torch import Tensor

from gradcomp.codecs import Codec
from gradcomp.comm.base import Communicator
from gradcomp.errors import PeerMismatch
from gradcomp.exchange.agree import EXCHANGE_FIELDS, Shown, agree, codec_fields
from gradcomp.exchange.averages import Averages
from gradcomp.exchange.bucket import BucketExchange, Exchange, Steps

HOST_VARIABLE = "GRADCOMP_HOST_ID"


def find_nodes(
    comm: Communicator,
    nodes: Sequence[Sequence[int]] | None,
    timeout_s: float,
    codec: Codec | None = None,
) -> tuple[tuple[int, ...], ...]:
    """Return the ranks of every node. Collective.

    Ranks compare a fingerprint, so a rank that calls another function is a mismatch.

    Args:
        comm: communicator of all ranks.
        nodes: the ranks of every node. None: ranks with equal GRADCOMP_HOST_ID, or with equal host
            names if that is not set, form a node.
        timeout_s: longest wait for a rank, in seconds.
        codec: compared over the ranks, if given.

    Raises:
        ValueError: nodes of different sizes, or `nodes` that are not a partition of the ranks.
        PeerMismatch: a rank has other `nodes` or settings, or uses another exchange.
        PeerLost: a rank did not answer.
    """
    wanted = (
        None
        if nodes is None
        else tuple(sorted(tuple(sorted(int(rank) for rank in node)) for node in nodes))
    )
    host = os.environ.get(HOST_VARIABLE) or socket.gethostname()
    values = {
        **(codec_fields(codec) if codec is not None else {}),
        "exchange": "hierarchical",
        "layout": Shown(wanted, repr(nodes)),
        "world_size": comm.world_size,
        "bucket": host,
    }
    try:
        with comm.lease("the search for nodes") as lease:  # fingerprints share one channel
            records = agree(
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
    if wanted is None:  # equal records are from one node: only the host may differ
        result = tuple(
            tuple(r for r, record in enumerate(records) if record == one)
            for one in dict.fromkeys(records)
        )
    else:
        result = wanted
    if sorted(rank for node in result for rank in node) != list(range(comm.world_size)):
        raise ValueError(f"nodes must hold every rank below {comm.world_size} once, got {nodes!r}")
    if len({len(node) for node in result}) > 1:
        raise ValueError(
            "a hierarchical exchange needs nodes with equally many ranks, got"
            f" {[len(node) for node in result]} ({result}); give nodes=, set {HOST_VARIABLE}, or"
            " take another exchange"
        )
    return result


def join_nodes(
    comm: Communicator, nodes: tuple[tuple[int, ...], ...], timeout_s: float
) -> tuple[Communicator, Communicator]:
    """Return two communicators: one of this rank's node, and one across nodes, of the ranks with
    the same position on their nodes. Collective.
    """
    own_node = next(node for node in nodes if comm.rank in node)
    position = own_node.index(comm.rank)
    inside = comm.node_subset(own_node, timeout_s)
    try:
        return inside, comm.subset([node[position] for node in nodes], timeout_s)
    except BaseException:
        inside.close()
        raise


class HierarchicalExchange(Exchange):
    """The hierarchical exchange of one bucket. Between the two phases of the exchange inside the
    node, owners exchange their means across nodes.

    Args:
        inside: exchange of the bucket inside the node.
        across: exchange of this rank's shard across nodes.
    """

    def __init__(self, inside: BucketExchange, across: BucketExchange) -> None:
        self._inside, self._across = inside, across

    @property
    def flagged(self) -> bool:
        return self._inside.flagged

    @property
    def averages(self) -> Averages | None:
        return self._inside.averages

    @property
    def slices(self) -> tuple[Steps, ...]:
        """The steps of every slice of the exchange across nodes. The exchange inside the node
        starts with the first slice and ends with the last.
        """
        across = self._across.slices
        steps = [[_nothing, _nothing, *rest, _nothing] for _, *rest in across]
        steps[0][:2] = self._inside.encode, self._begin_across
        steps[-1][4:] = partial(self._end_across, len(across) - 1), self._inside.finish
        return tuple(tuple(one) for one in steps)

    def begin(self, buffer: Tensor, step: int, bucket: int) -> None:
        self._step, self._bucket = step, bucket
        self._inside.begin(buffer, step, bucket)

    def unpack(self) -> None:
        self._inside.unpack()

    def commit(self) -> None:
        self._across.commit()
        self._inside.commit()

    def _begin_across(self) -> None:
        self._inside.average_shard()
        self._across.begin(
            self._inside.shard, self._step, self._bucket, flagged=self._inside.flagged
        )
        self._across.measure()

    def _end_across(self, last: int) -> None:
        """End the exchange across nodes and start the second phase inside the node. All nodes get
        the non-finite flag; the node whose values are not finite skips its second phase.
        """
        self._across.finish(last)
        self._inside.publish_shard(flagged=self._across.flagged)


def _nothing() -> None:
    """Do nothing; a placeholder step of a slice."""
