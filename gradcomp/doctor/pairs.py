"""Latency, bandwidth and the difference of clocks of two ranks, over a communicator of the two.

Latency is what an exchange of a few bytes takes, in which both send at once; rates are those of
each direction by itself, and of both; clocks are compared by the time stamps in these: what a stamp
seems to have been under way is the delay plus the difference of the clocks, on the other rank minus
it.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from gradcomp.comm.base import Channel, Communicator
from gradcomp.comm.notices import Notices

_STAMP = struct.Struct("<qB")  # time_ns, whether this rank has seen enough
_NUMBER = struct.Struct("<d")
TURNS, FEWEST_TURNS, TURNS_S = (
    40,
    5,
    0.25,
)  # exchanges of a few bytes, and seconds after which fewer of them do
FIRST_NBYTES, MOST_NBYTES = 1 << 16, 1 << 25
GROWTH = 8  # of messages, at most
SLOWEST_NBYTES_PER_S = 1e5  # a link that is slower counts as one that does not answer
WARM_UP = 2  # turns that connect
SILENT_S = 3.0  # a rank that says nothing for so long is named


@dataclass
class Pair:
    """What two ranks have measured.

    Attributes:
        ranks: both, the lower one first.
        latency_s: of a few bytes, one way.
        bits_per_s: of one direction by itself, the slower one.
        both_bits_per_s: of each direction, both at once: less where acknowledgements wait behind
            data, or both share something.
        nbytes: that this was measured with.
        second_ahead_s, within_s: by how much the second rank's clock is ahead of the first one's,
            and how far off that may be.
        round: in which it was measured, beside all others of this round.
        failed: what went wrong; "" for nothing.
    """

    ranks: tuple[int, int]
    latency_s: float = 0.0
    bits_per_s: float = 0.0
    both_bits_per_s: float = 0.0
    nbytes: int = 0
    second_ahead_s: float = 0.0
    within_s: float = 0.0
    round: int = 0
    failed: str = ""


def rounds(world_size: int) -> list[list[tuple[int, int]]]:
    """Return all pairs of ranks in rounds of pairs without a rank in common: as few as there can
    be.
    """
    seats = [*range(world_size), *([-1] if world_size % 2 else [])]
    out = []
    for _ in range(len(seats) - 1):
        facing = zip(seats[: len(seats) // 2], reversed(seats[len(seats) // 2 :]), strict=True)
        out.append([(min(pair), max(pair)) for pair in facing if min(pair) >= 0])
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return out


def measure_all(comm: Communicator, notices: Notices, deadline: float) -> list[dict[str, Any]]:
    """Return what this rank has measured with each other one before `deadline` (`time.monotonic`),
    as dictionaries of `Pair`.

    Every rank calls it. A pair begins only if both have said that there is time left, so a silent
    rank keeps nobody for long.
    """
    found: list[dict[str, Any]] = []
    all_rounds = rounds(comm.world_size)
    for number, pairs in enumerate(all_rounds):
        mine = next((pair for pair in pairs if comm.rank in pair), None)
        if mine is None:
            continue
        left, peer = deadline - time.monotonic(), sum(mine) - comm.rank
        share_s = left / (len(all_rounds) - number)
        goes = left > 0.1 or not found
        notices.post(peer, f"round {number}", bytes([goes]))
        patience_s = SILENT_S * (
            number + 1
        )  # the peer may have waited for a silent one in each round before
        word = notices.take(peer, f"round {number}", max(SILENT_S, min(left, patience_s)))
        if word is None:
            found.append(
                asdict(
                    Pair(mine, round=number, failed=f"rank {peer} did not answer rank {comm.rank}")
                )
            )
        elif goes and word[0]:
            found.append(asdict(_measure(comm, mine, number, share_s)))
    return found


def _measure(comm: Communicator, ranks: tuple[int, int], number: int, share_s: float) -> Pair:
    pair: Communicator | None = None
    try:
        pair = comm.subset(ranks, SILENT_S)
        found = measure_pair(pair, ranks, min(0.25, max(0.02, 0.08 * share_s)))
        found.round = number
        return found
    except Exception as error:  # noqa: BLE001 - whatever a transport has to say is what was asked for
        first = (str(error) or type(error).__name__).splitlines()[0]
        return Pair(ranks, round=number, failed=f"rank {comm.rank}: {first}")
    finally:
        if pair is not None:
            pair.close()


def measure_pair(
    comm: Communicator,
    ranks: Sequence[int] = (0, 1),
    message_s: float = 0.1,
    clock: Callable[[], int] = time.time_ns,
) -> Pair:
    """Return what the two ranks of `comm` measure with each other; both call it and both get the
    same.

    Args:
        comm: of two ranks.
        ranks: how they are called in the result.
        message_s: about what the longest message takes; the shorter one of both counts.
        clock: nanoseconds of this rank's clock.

    Raises:
        TimeoutError, ConnectionError: as `Work.wait`.
    """
    _turn(comm, bytes(_STAMP.size), WARM_UP)
    seconds, leads, begun = [], [], time.perf_counter()
    for turn in range(TURNS):
        enough = turn + 1 >= FEWEST_TURNS and time.perf_counter() - begun > TURNS_S
        started = time.perf_counter()
        told = _turn(comm, _STAMP.pack(clock(), enough))
        now = clock()
        seconds.append(time.perf_counter() - started)
        leads.append((now - _STAMP.unpack(told[1 - comm.rank])[0]) * 1e-9)
        if any(_STAMP.unpack(stamp)[1] for stamp in told):
            break
    own_s = sorted(seconds)[len(seconds) // 2]
    latency_s = sum(_numbers(comm, own_s)) / 2
    first_lead, second_lead = _numbers(comm, min(leads))
    nbytes, rate, both_rate = _bandwidth(
        comm, latency_s, min(_numbers(comm, message_s))
    )  # both send alike: the sizes follow from this
    ahead_s = (
        second_lead - first_lead
    ) / 2  # where a clock is ahead the other's stamps seem to take longer
    within_s = max(0.0, (first_lead + second_lead) / 2)
    return Pair((ranks[0], ranks[1]), latency_s, rate, both_rate, nbytes, ahead_s, within_s)


def _bandwidth(comm: Communicator, latency_s: float, message_s: float) -> tuple[int, float, float]:
    """Return the bytes of the longest message, the bits a second of the slower direction, and of
    both at once; the best of several.
    """
    nbytes = FIRST_NBYTES
    while True:
        seconds = [_message_s(comm, nbytes, senders) for senders in ((0,), (1,))]
        if max(seconds) > message_s / 2 or nbytes == MOST_NBYTES:
            break
        nbytes = min(
            GROWTH * nbytes, MOST_NBYTES, max(2 * nbytes, int(nbytes * message_s / max(seconds)))
        )
    again = [_message_s(comm, nbytes, senders) for senders in ((0,), (1,))]
    one_way_s = max(min(times) for times in zip(seconds, again, strict=True))
    both_s = min(_message_s(comm, nbytes, (0, 1)) for _ in range(2))
    rates = [8 * nbytes / max(took - latency_s, 0.1 * took, 1e-9) for took in (one_way_s, both_s)]
    return nbytes, rates[0], rates[1]


def _message_s(comm: Communicator, nbytes: int, senders: Sequence[int]) -> float:
    """Return the seconds until a message has come from each of `senders`, the same on both
    ranks.
    """
    sent, received = [0, 0], [0, 0]
    sent[1 - comm.rank] = nbytes * (comm.rank in senders)
    received[1 - comm.rank] = nbytes * (1 - comm.rank in senders)
    send, recv = (torch.zeros(sum(counts), dtype=torch.uint8) for counts in (sent, received))
    _numbers(comm, 0.0)  # so that both begin at once
    begun = time.perf_counter()
    comm.start_all_to_all(send, sent, recv, received, Channel.FIRST).wait(_patience(nbytes))
    return max(_numbers(comm, time.perf_counter() - begun))


def _patience(nbytes: int) -> float:
    return SILENT_S + nbytes / SLOWEST_NBYTES_PER_S


def _numbers(comm: Communicator, number: float) -> list[float]:
    return [_NUMBER.unpack(word)[0] for word in _turn(comm, _NUMBER.pack(number))]


def _turn(comm: Communicator, data: bytes, times: int = 1) -> list[bytes]:
    """Return what both have sent."""
    for _ in range(times):
        found = comm.all_gather_bytes(data, SILENT_S, Channel.FIRST)
    return found
