"""Which ranks share a host, and the communicators inside a node and across nodes."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from gradcomp.codecs import Codec
from gradcomp.comm.base import Communicator
from gradcomp.errors import PeerMismatch
from gradcomp.exchange.agree import agree
from gradcomp.payload import wire
from gradcomp.payload.fingerprint import Record

HOST_VARIABLE = "GRADCOMP_HOST_ID"


@dataclass(frozen=True)
class Nodes:
    """The ranks of a communicator, node by node.

    Attributes:
        ranks: of every node, ascending; nodes in the order of their first ranks.
        inside: the ranks of this node.
        across: the ranks that have this rank's position on their nodes.
    """

    ranks: tuple[tuple[int, ...], ...]
    inside: Communicator
    across: Communicator

    def abort(self, reason: str = "") -> None:
        """Tell the peers of both that this rank takes part no more, and why."""
        self.inside.abort(reason)
        self.across.abort(reason)

    def close(self) -> None:
        """Give both communicators back."""
        self.inside.close()
        self.across.close()


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
        "wire_version": wire.VERSION,
        "codec": codec and codec.name,
        "codec_options": codec and codec.options(),
        "exchange": "hierarchical",
        "layout": given,
        "world_size": comm.world_size,
    }
    mine = Record(
        {**values, "bucket": host},
        {"codec": repr(codec), "codec_options": repr(codec), "layout": repr(nodes)},
    )
    called = "register, or make its averager"
    try:
        with comm.lease("the search for nodes") as lease:  # on the channel of all fingerprints
            everyone = agree(lease, mine, timeout_s, phase="setup", called=called, ignored="bucket")
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


def join_nodes(comm: Communicator, found: tuple[tuple[int, ...], ...], timeout_s: float) -> Nodes:
    """Return the communicators of this rank inside and across `found`. Collective."""
    home = next(node for node in found if comm.rank in node)
    position = home.index(comm.rank)
    inside = comm.node_subset(home, timeout_s)
    try:
        return Nodes(found, inside, comm.subset([node[position] for node in found], timeout_s))
    except BaseException:
        inside.close()
        raise
