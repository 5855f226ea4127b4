"""Latency and bandwidth of two ranks, over a communicator of the two.

Latency is what an exchange of a few bytes takes, in which both send at once; rates are those of
each direction by itself, and of both at once.
"""

from __future__ import annotations

import contextlib
import struct
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from gradcomp.comm.base import Channel, Communicator, first_line
from gradcomp.doctor.words import Words

_NUMBER = struct.Struct("<d")
# exchanges of a few bytes, and seconds after which fewer of them are enough
TURNS, FEWEST_TURNS, TURNS_S = 40, 5, 0.25
FIRST_NBYTES, MOST_NBYTES = 1 << 16, 1 << 25
GROWTH = 8  # of messages, at most
SLOWEST_NBYTES_PER_S = 1e5  # a link that is slower counts as one that does not answer
WARM_UP = 2  # turns that connect
SILENT_S = 3.0  # a rank that says nothing for so long is named


class Pair(NamedTuple):
    """What two ranks have measured."""

    ranks: tuple[int, int]  # the lower one first
    latency_s: float = 0.0  # of a few bytes, one way
    bits_per_s: float = 0.0  # of one direction by itself, the slower one
    # of each direction, both at once: less where acknowledgements wait behind data, or both share
    # something
    both_bits_per_s: float = 0.0
    nbytes: int = 0  # of the longest message that was measured
    round: int = 0  # in which it was measured, beside all others of this round
    failed: str = ""  # what went wrong; "" for nothing


def rounds(world_size: int) -> list[list[tuple[int, int]]]:
    """Return all pairs of ranks in as few rounds as possible, every rank once in a round."""
    seats = [*range(world_size), *([-1] if world_size % 2 else [])]
    out = []
    for _ in range(len(seats) - 1):
        facing = zip(seats[: len(seats) // 2], reversed(seats[len(seats) // 2 :]), strict=True)
        out.append([(min(pair), max(pair)) for pair in facing if min(pair) >= 0])
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return out


def measure_all(comm: Communicator, words: Words, deadline: float) -> list[dict[str, Any]]:
    """Return what this rank has measured with each other one before `deadline` (`time.monotonic`),
    as dictionaries of `Pair`.

    Every rank calls it. A pair begins only if both have said that there is time left, so a silent
    rank delays no other for long.
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
        # the peer may have waited for a silent one in each round before
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
    except Exception as error:  # noqa: BLE001 - whatever a transport has to say is what was asked for
        return Pair(ranks, round=number, failed=f"rank {comm.rank}: {first_line(error)}")


def measure_pair(comm: Communicator, ranks: tuple[int, int], message_s: float) -> Pair:
    """Return what the two ranks of `comm` measure with each other; both call it and both get the
    same. They are called `ranks` in the result. The longest message takes about `message_s`, of
    which the shorter one counts.

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
    # both send alike: the sizes follow from this
    rates = _bandwidth(comm, latency_s, min(_numbers(comm, message_s)))
    return Pair(ranks, latency_s, *rates)


def _bandwidth(comm: Communicator, latency_s: float, message_s: float) -> tuple[float, float, int]:
    """Return the best bits/s of the slower direction and of both at once, and a message's bytes."""
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
    """Return the seconds, alike on both ranks, until all of `senders`' messages have come."""
    sent, received = [0, 0], [0, 0]
    sent[1 - comm.rank] = nbytes * (comm.rank in senders)
    received[1 - comm.rank] = nbytes * (1 - comm.rank in senders)
    send, recv = (torch.zeros(sum(counts), dtype=torch.uint8) for counts in (sent, received))
    patience_s = SILENT_S + nbytes / SLOWEST_NBYTES_PER_S
    _numbers(comm, 0.0)  # so that both begin at once
    begun = time.perf_counter()
    comm.start_all_to_all(send, sent, recv, received, Channel.FIRST).wait(patience_s)
    return max(_numbers(comm, time.perf_counter() - begun))


def _numbers(comm: Communicator, number: float) -> list[float]:
    """Return the numbers of both ranks."""
    words = comm.all_gather_bytes(_NUMBER.pack(number), SILENT_S, Channel.FIRST)
    return [_NUMBER.unpack(word)[0] for word in words]
