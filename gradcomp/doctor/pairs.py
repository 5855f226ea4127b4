"""Measure latency and bandwidth between two ranks, over a communicator of these two.

Latency is the time of an exchange of a few bytes in which both ranks send. Rates are measured for
each direction alone and for both at the same time.
"""

from __future__ import annotations

import contextlib
import struct
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from gradcomp.comm.base import Channel, Communicator, first_line
from gradcomp.doctor.words import Words

_NUMBER = struct.Struct("<d")
# exchanges for the latency, and the seconds after which `FEWEST_TURNS` of them are enough
TURNS, FEWEST_TURNS, TURNS_S = 40, 5, 0.25
FIRST_NBYTES, MOST_NBYTES = 1 << 16, 1 << 25
GROWTH = 8  # largest factor from one message size to the next
SLOWEST_NBYTES_PER_S = 1e5  # a slower link is treated as one that does not answer
WARM_UP = 2  # exchanges before the measurement, in which the ranks connect
SILENT_S = 3.0  # timeout after which a rank is reported as silent


class Pair(NamedTuple):
    """Measurement of the link between two ranks."""

    ranks: tuple[int, int]  # the lower one first
    latency_s: float = 0.0  # seconds of a few bytes, one way
    bits_per_s: float = 0.0  # rate of the slower direction, each direction alone
    # rate of each direction while both send: lower if acknowledgements wait behind data, or if the
    # directions share a resource
    both_bits_per_s: float = 0.0
    nbytes: int = 0  # bytes of the longest message
    round: int = 0  # round of the measurement; all pairs of a round are measured at the same time
    failed: str = ""  # the error, "" for none


def rounds(world_size: int) -> list[list[tuple[int, int]]]:
    """Return all pairs of ranks in the fewest rounds, with each rank at most once in a round."""
    seats = [*range(world_size), *([-1] if world_size % 2 else [])]
    out = []
    for _ in range(len(seats) - 1):
        facing = zip(seats[: len(seats) // 2], reversed(seats[len(seats) // 2 :]), strict=True)
        out.append([(min(pair), max(pair)) for pair in facing if min(pair) >= 0])
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return out


def measured(
    pairs: Sequence[Mapping[str, Any]], hosts: Sequence[str]
) -> tuple[list[Mapping[str, Any]], list[Mapping[str, Any]]]:
    """Return the successful measurements between hosts, and inside one; `hosts` are identities."""
    good = [pair for pair in pairs if not pair["failed"]]
    between = [pair for pair in good if len({hosts[rank] for rank in pair["ranks"]}) == 2]
    return between, [pair for pair in good if pair not in between]


def measure_all(comm: Communicator, words: Words, deadline: float) -> list[dict[str, Any]]:
    """Measure the links of this rank to all others before `deadline` (`time.monotonic`); return
    them as dictionaries of `Pair`. Collective.

    A pair measures only after both ranks have announced that they have time left, so a silent rank
    does not delay others for long.
    """
    found: list[Pair] = []
    all_rounds = rounds(comm.world_size)
    for number, pairs in enumerate(all_rounds):
        mine = next((pair for pair in pairs if comm.rank in pair), None)
        if mine is None:
            continue
        left, peer, key = deadline - time.monotonic(), sum(mine) - comm.rank, f"round {number}"
        goes = left > 0.1 or not found
        words.post(peer, key, goes)
        # the peer may have waited for a silent rank in each earlier round
        patience_s = max(SILENT_S, min(left, SILENT_S * (number + 1)))
        said = words.collect([peer], key, patience_s)
        if not said:
            text = f"rank {peer} did not answer rank {comm.rank}"
            found.append(Pair(mine, round=number, failed=text))
        elif goes and said[peer]:
            found.append(_measure(comm, mine, number, left / (len(all_rounds) - number)))
    return [pair._asdict() for pair in found]


def _measure(comm: Communicator, ranks: tuple[int, int], number: int, share_s: float) -> Pair:
    try:
        with contextlib.closing(comm.subset(ranks, SILENT_S)) as pair:
            found = measure_pair(pair, ranks, min(0.25, max(0.02, 0.08 * share_s)))
        return found._replace(round=number)
    except Exception as error:  # noqa: BLE001 - any error of a transport is a result
        return Pair(ranks, round=number, failed=f"rank {comm.rank}: {first_line(error)}")


def measure_pair(comm: Communicator, ranks: tuple[int, int], message_s: float) -> Pair:
    """Measure the link of the two ranks of `comm`; both get the same result. Collective.

    `message_s`: seconds that the longest message should take; the smaller value counts.

    Raises:
        TimeoutError, ConnectionError: as `Work.wait`.
    """
    for _ in range(WARM_UP):
        _numbers(comm, 0.0)
    seconds, begun = list[float](), time.perf_counter()
    for turn in range(TURNS):
        enough = turn + 1 >= FEWEST_TURNS and time.perf_counter() - begun > TURNS_S
        started = time.perf_counter()
        said = _numbers(comm, enough)
        seconds.append(time.perf_counter() - started)
        if any(said):
            break
    latency_s = sum(_numbers(comm, sorted(seconds)[len(seconds) // 2])) / 2
    # use the same value on both ranks, because the message sizes depend on it
    rates = _bandwidth(comm, latency_s, min(_numbers(comm, message_s)))
    return Pair(ranks, latency_s, *rates)


def _bandwidth(comm: Communicator, latency_s: float, message_s: float) -> tuple[float, float, int]:
    """Return the best bits/s of the slower direction, of both at once, and the longest message."""
    nbytes = FIRST_NBYTES
    while True:
        seconds = [_message_s(comm, nbytes, senders) for senders in ((0,), (1,))]
        if max(seconds) > message_s / 2 or nbytes == MOST_NBYTES:
            break
        wanted = max(2 * nbytes, int(nbytes * message_s / max(seconds)))
        nbytes = min(GROWTH * nbytes, MOST_NBYTES, wanted)
    again = [_message_s(comm, nbytes, senders) for senders in ((0,), (1,))]
    one_way_s = max(min(times) for times in zip(seconds, again, strict=True))
    both_s = min(_message_s(comm, nbytes, (0, 1)) for _ in range(2))
    rates = [8 * nbytes / max(took - latency_s, 0.1 * took, 1e-9) for took in (one_way_s, both_s)]
    return rates[0], rates[1], nbytes


def _message_s(comm: Communicator, nbytes: int, senders: Sequence[int]) -> float:
    """Return the seconds until the messages of all `senders` have arrived, equal on both ranks."""
    sent, received = [0, 0], [0, 0]
    sent[1 - comm.rank] = nbytes * (comm.rank in senders)
    received[1 - comm.rank] = nbytes * (1 - comm.rank in senders)
    send, recv = (torch.zeros(sum(counts), dtype=torch.uint8) for counts in (sent, received))
    patience_s = SILENT_S + nbytes / SLOWEST_NBYTES_PER_S
    _numbers(comm, 0.0)  # a barrier
    begun = time.perf_counter()
    comm.start_all_to_all(send, sent, recv, received, Channel.FIRST).wait(patience_s)
    return max(_numbers(comm, time.perf_counter() - begun))


def _numbers(comm: Communicator, number: float) -> list[float]:
    """Exchange a number; return those of both ranks, by rank."""
    words = comm.all_gather_bytes(_NUMBER.pack(number), SILENT_S, Channel.FIRST)
    return [_NUMBER.unpack(word)[0] for word in words]
