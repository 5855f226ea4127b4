"""Run the doctor on all ranks: meet, exchange cards, measure; rank 0 collects the results.

The ranks communicate through a store, so a silent rank is identified by its number and does not
block the others. The result on rank 0 is one dictionary with values that JSON supports.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import math
import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gradcomp.comm.base import Channel, Communicator, first_line
from gradcomp.comm.mpi import RANK_VARIABLES, MpiCommunicator, describe_mpi, load
from gradcomp.comm.torch_private import store_below
from gradcomp.comm.torchdist import TorchCommunicator, open_group, open_store
from gradcomp.doctor import advise, judge
from gradcomp.doctor.card import PROTOCOL, card, start_lookup, timeouts
from gradcomp.doctor.judge import NO_ADDRESS, SET_ADDRESS, ranks_text
from gradcomp.doctor.options import agreed
from gradcomp.doctor.pairs import measure_all
from gradcomp.doctor.words import Words
from gradcomp.errors import GradcompError, peers_answer
from gradcomp.plan.rates import Rates
from gradcomp.version import __version__

CONNECT_S = 8.0  # longest time for ranks that have all arrived to connect
TIMEOUT_S = 30.0  # timeout of the communicator; its users have shorter ones
PAIRS_SHARE = 0.4  # share of the time for measuring pairs
PROBE_S = 3.0  # seconds that a probe takes
SETUP_S = 6.0  # longest wait for the members of a probe to connect
LATE_S = 5.0  # longest wait for results after the ranks' time is over
BESIDE_S = 60.0  # added to the other limits: seconds after which a rank that hangs ends itself
TROUBLE = (RuntimeError, OSError, GradcompError)  # of a transport that fails

Found = dict[str, Any]


@dataclass
class Me:
    """Rank, transport and store of this process."""

    rank: int
    world_size: int
    over: str  # transport: "gloo" or "mpi"
    mpi: str | None = None  # library and thread level of the MPI
    # address of the store; None with one rank, or if ranks of an MPI do not know it
    address: tuple[str, int] | None = None
    doing: str = "starting"  # current activity, for the message of `end_after`

    @staticmethod
    def find(over: str, variables: Mapping[str, str] | None = None) -> Me:
        """Determine rank and transport from the launcher's variables (default: `os.environ`).

        Raises:
            ValueError: the variables are incomplete or contradict each other.
            ImportError, RuntimeError: MPI is requested and not available.
        """
        given = os.environ if variables is None else variables
        found = importlib.import_module("gradcomp.launch").environment(given)
        if over == "auto":  # mpi if an MPI that mpi4py can use started this process, not torchrun
            of_mpi = any(rank in given for rank, _ in RANK_VARIABLES if rank != "RANK")
            has_mpi = of_mpi and "TORCHELASTIC_RUN_ID" not in given
            over = "mpi" if has_mpi and importlib.util.find_spec("mpi4py") else "gloo"
        me = Me(int(found["RANK"]), int(found["WORLD_SIZE"]), over)
        if over == "mpi":
            me.mpi, world = describe_mpi(), load().COMM_WORLD
            me.rank, me.world_size = world.Get_rank(), world.Get_size()
        if me.world_size > 1 and found.get("MASTER_ADDR"):
            if not found["MASTER_PORT"].isdecimal():
                raise ValueError(f"MASTER_PORT={found['MASTER_PORT']!r} is not a number")
            me.address = found["MASTER_ADDR"], int(found["MASTER_PORT"])
        elif me.world_size > 1 and over == "gloo":
            raise ValueError(f"{NO_ADDRESS}: {SET_ADDRESS}, or --over mpi")
        return me

    def meet(self, wait_s: float) -> Words:
        """Return the channel to other ranks through a store; ConnectionError after `wait_s`."""
        assert self.address is not None
        host, port = self.address
        by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # torchrun serves it
        serves, who = self.rank == 0 and not by_agent, "torchrun" if by_agent else "rank 0"
        try:
            store = open_store(host, port, serves=serves, timeout_s=wait_s)
        except ConnectionError as error:
            what = "cannot serve the ranks' store" if serves else f"does not reach {who}"
            raise ConnectionError(
                f"rank {self.rank} {what} at {host}:{port} ({error}): is {who} running, and"
                " MASTER_ADDR and MASTER_PORT its address on a network that all ranks have? Is"
                " the port free?"
            ) from error
        restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self._store = store_below(store, f"gradcomp.doctor/{restart}")
        return Words(self._store, self.rank)

    def connect(self) -> Communicator:
        """Return a communicator of all ranks, or raise one of TROUBLE. Collective."""
        if self.over == "mpi":
            return MpiCommunicator(timeout_s=CONNECT_S)
        open_group(store_below(self._store, "group"), self.rank, self.world_size, CONNECT_S)
        return TorchCommunicator(timeout_s=TIMEOUT_S)

    def end_after(self, seconds: float) -> None:
        """End this process after `seconds`, from a daemon thread, in case that a call hangs."""

        def give_up() -> None:
            say(
                f"rank {self.rank} gave up after {seconds:g} s of {self.doing}: a call did not"
                " return. A rank is stuck, the network drops everything, or this machine is"
                " overloaded"
            )
            os._exit(1)

        timer = threading.Timer(seconds, give_up)
        timer.daemon = True
        timer.start()


def say(text: str) -> None:
    """Print to standard error."""
    print(f"gradcomp.doctor: {text}", file=sys.stderr, flush=True)


def examine(me: Me, options: argparse.Namespace) -> Found | None:
    """Run all checks; return the results on rank 0 and None on the other ranks.

    Raises:
        ConnectionError: the store of the ranks cannot be reached.
        SystemExit: rank 0 did not answer this rank in time.
    """
    begun = time.monotonic()
    mine = card(me.rank, agreed(options), me.mpi)
    if me.address is None:
        return None if me.rank else _conclude([mine], options, me, begun, {}, 0.0)
    me.end_after(2 * options.wait + options.seconds + BESIDE_S)
    me.doing, lookup_s = "meeting the other ranks", start_lookup(me.address[0])
    words = me.meet(options.wait)
    mine["lookup_s"] = lookup_s()
    if me.rank == 0:
        return _ask(me, words, mine, options, begun)
    words.post(0, "card", mine)
    go = words.collect([0], "go", 2 * options.wait).get(0)
    if go is None:
        say(
            f"rank {me.rank}: rank 0 did not answer within {2 * options.wait:g} s, so there is no"
            " report: is it running, and not stopped?"
        )
        raise SystemExit(1)
    words.post(0, "seen", _measure(me, words, go) if go["measure"] else {})
    return None


def _ask(me: Me, words: Words, mine: Found, options: argparse.Namespace, begun: float) -> Found:
    """Collect the cards of all ranks, let every rank measure, and return the results; on rank 0."""
    others, cards = range(1, me.world_size), {0: mine}
    first_at = last_at = time.monotonic()  # from now on other ranks can connect
    while len(cards) < me.world_size and time.monotonic() - first_at < options.wait:
        news = words.collect([rank for rank in others if rank not in cards], "card", 0.2)
        cards |= news
        last_at = time.monotonic() if news else last_at
    here = [cards[rank] for rank in sorted(cards)]
    silent = [rank for rank in others if rank not in cards]
    is_alike = all(one["protocol"] == PROTOCOL for one in here)
    is_stuck = me.over == "gloo" and judge.cannot_connect(here)
    go = {
        "measure": is_alike and not silent and not is_stuck,
        "seconds": options.seconds,
        "members": members_of([one["identity"] for one in here]),
    }
    for rank in sorted(cards)[1:]:
        words.post(rank, "go", go)
    if not go["measure"]:  # wait for answers: this rank's store must outlive the others' reads
        words.collect(sorted(cards)[1:], "seen", LATE_S)
        return _conclude(here, options, me, begun, {}, last_at - first_at, silent)
    started = time.monotonic()
    seen = {0: _measure(me, words, go)}
    # ranks that cannot connect, or wait for a silent rank, may use up the whole time
    is_short = seen[0]["failed"] or any(pair["failed"] for pair in seen[0]["pairs"])
    left_s = max(0.0, started + options.seconds - time.monotonic()) if is_short else 0.0
    seen |= words.collect(others, "seen", LATE_S + left_s)
    silent = [rank for rank in others if rank not in seen]
    me.doing = "predicting"
    return _conclude(here, options, me, started, seen, last_at - first_at, silent)


def _measure(me: Me, words: Words, go: Found) -> Found:
    """Measure pairs and a lost peer on this rank; return the results, or why there are none."""
    seen: Found = {"pairs": [], "probe": {}, "failed": ""}
    begun, members = time.monotonic(), go["members"]
    me.doing = "connecting"
    try:
        comm = me.connect()
    except TROUBLE as error:
        seen["failed"] = (
            f"rank {me.rank} is not connected to all others after {time.monotonic() - begun:.1f} s"
            f" (longest {CONNECT_S:g} s): {first_line(error)}"
        )
        return seen
    try:
        me.doing = "measuring pairs"
        seen["pairs"] = measure_all(comm, words, begun + PAIRS_SHARE * go["seconds"])
        me.doing = "losing a peer"
        if me.rank in members:
            left_s = go["seconds"] - (time.monotonic() - begun)
            seen["probe"] = _probe(comm, members, left_s, words)
    finally:
        comm.close()
    return seen


def members_of(hosts: Sequence[str]) -> list[int]:
    """Return the members of a probe: a rank on each of up to three hosts, or up to three ranks."""
    firsts = [hosts.index(host) for host in dict.fromkeys(hosts)]
    others = [rank for rank in range(len(hosts)) if rank not in firsts]
    return sorted((firsts + (others if len(firsts) == 1 else []))[:3])


def _probe(comm: Communicator, members: Sequence[int], left_s: float, words: Words) -> Found:
    """Take part in a probe of `members`, if all have time for it: they create a communicator, and
    its last rank stays silent until the others have given up.

    Return `lost` on the silent rank, `silent` with the error on others, or `skipped` or `failed`.
    """
    others = [rank for rank in members if rank != comm.rank]
    for rank in others:
        words.post(rank, "probe", left_s > PROBE_S)
    answers = words.collect(others, "probe", PROBE_S)
    if missing := [rank for rank in others if rank not in answers]:
        return {"skipped": f"{ranks_text(missing)} did not answer"}
    if left_s <= PROBE_S or not all(answers.values()):
        return {"skipped": "there was no time left for it (--seconds gives more)"}
    try:
        inner = comm.subset(members, SETUP_S)
        try:
            inner.all_gather_bytes(b"ready", SETUP_S, Channel.FIRST)
            if comm.rank != members[-1]:
                return {"silent": _wait_for_silent(inner, words, members[-1])}
            words.collect(members[:-1], "gave up", judge.PATIENCE_S + judge.LATE_S)
            with contextlib.suppress(ConnectionError, TimeoutError):  # complete their collective
                inner.all_gather_bytes(bytes(8), SETUP_S, Channel.FIRST)
            return {"lost": True}
        finally:
            inner.close()
    except TROUBLE as error:
        return {"failed": f"{type(error).__name__}: {first_line(error)}"}


def _wait_for_silent(comm: Communicator, words: Words, silent: int) -> Found:
    """Return the error that the silence of a rank causes on this rank, and its seconds."""
    begun, work, name, text = time.perf_counter(), None, "", "it ended without that member"
    send, recv = (torch.zeros(8 * n, dtype=torch.uint8) for n in (1, comm.world_size))
    try:
        with peers_answer("probe"):
            work = comm.start_all_gather(send, recv, Channel.FIRST)
            work.wait(judge.PATIENCE_S)
    except GradcompError as error:
        name, text = type(error).__name__, str(error)
    seen = {"error": name, "seconds": time.perf_counter() - begun, "text": text}
    words.post(silent, "gave up", None)
    deadline = time.monotonic() + SETUP_S
    while work is not None and not work.is_done() and time.monotonic() < deadline:
        time.sleep(0.01)  # MPI cannot finalize while a collective is running
    return seen


def _conclude(
    cards: Sequence[Found],
    options: argparse.Namespace,
    me: Me,
    started: float,
    seen: Mapping[int, Found],
    apart_s: float,
    silent: Sequence[int] = (),
) -> Found:
    """Return all results; `apart_s`: seconds between the first and the last rank's arrival."""
    pairs = _merged([pair for one in seen.values() for pair in one["pairs"]])
    advice, rates, link = None, Rates(), advise.link_of([one["identity"] for one in cards], pairs)
    if link is not None:
        here = [one for one in cards if one["identity"] == cards[0]["identity"]]
        left_s = options.seconds - (time.monotonic() - started)
        one, cores = cards[0].get("accelerator"), judge.usable(here) / len(here)
        device = torch.device(one["device"] if one is not None and not one["failed"] else "cpu")
        advice, rates = advise.recommend(*link, vars(options), cores, left_s, device)
    found = {
        "gradcomp": __version__,
        "over": me.over,
        "ranks": list(cards),
        "world_size": me.world_size,
        "silent": list(silent),
        "not_connected": next((one["failed"] for one in seen.values() if one["failed"]), ""),
        "pairs": pairs,
        "pairs_not_measured": math.comb(me.world_size, 2) - len(pairs) if seen else 0,
        "measured": bool(seen),
        "timeouts": timeouts(me.over, options.timeout, options.torch_timeout, apart_s),
        "lost_peer": _probes({rank: one["probe"] for rank, one in seen.items() if one["probe"]}),
        "recommendation": advice,
        "rates": rates.to_dict(),
        "budget_s": options.seconds,
    }
    findings = judge.findings(found)
    return found | {
        "findings": findings,
        "status": int(any(finding["level"] == "wrong" for finding in findings)),
        "seconds": time.monotonic() - started,
    }


def _merged(pairs: Sequence[Found]) -> list[Found]:
    """Return one of the two measurements of each pair, a successful one if there is one."""
    found = {tuple(pair["ranks"]): pair for pair in sorted(pairs, key=lambda p: not p["failed"])}
    return [found[ranks] for ranks in sorted(found)]


def _probes(seen: Mapping[int, Found]) -> Found:
    """Return the results of a probe on the other members, by rank, and which rank was silent."""
    skipped = next((one["skipped"] for one in seen.values() if "skipped" in one), "")
    lost = next((rank for rank, one in seen.items() if "lost" in one), None)
    left = {str(rank): one for rank, one in seen.items() if not {"lost", "skipped"} & set(one)}
    return {"seen": {} if skipped else left, "skipped": skipped, "lost": lost}
