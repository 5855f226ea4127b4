"""The connection of a site with its coordinator (`gradcomp.local.coordinator`)."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Mapping
from typing import Any

from gradcomp.errors import PeerLost, PeerMismatch
from gradcomp.local.coordinator import ALIVE_S, LINE_NBYTES, SILENT_S, TICK_S, VERSION
from gradcomp.waits import waiting

LEAVE_S = 2.0  # longest wait for the coordinator in `Client.leave`


class Client:
    """The connection of a site with the coordinator, during one sync.

    Args:
        address: "HOST:PORT" of the coordinator.
        timeout_s: how long to try to reach it, in seconds.

    Raises:
        ValueError: `address` has another form.
    """

    def __init__(self, address: str, timeout_s: float) -> None:
        host, _, port = address.rpartition(":") if isinstance(address, str) else ("", "", "")
        if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
            raise ValueError(
                f"coordinator must be 'HOST:PORT' of python -m gradcomp.local, got {address!r}"
            )
        self.host, self._port, self._address = host.strip("[]"), int(port), address
        self._timeout_s = timeout_s
        self._socket: socket.socket | None = None
        self._lines: Any = None
        self._sending = threading.Lock()
        self._end = threading.Event()

    def arrive(self, arrival: Mapping[str, object]) -> dict[str, Any]:
        """Arrive for a sync; return the plan when it begins.

        Raises:
            PeerMismatch: this site has other settings than the run.
            PeerLost: the coordinator does not answer, or too few sites came.
        """
        return self._ask({"kind": "arrive", **arrival}, "plan", "sites to sync")

    def vote(
        self, sync: str, site: str, syncs: int, why: str = "", lost: int | None = None
    ) -> tuple[bool, str]:
        """Vote for a sync, or against it if there is a reason `why`; return whether it counts, and
        why not.

        Args:
            sync: key of the sync in its plan.
            syncs: number of syncs that this site's anchors will have if it counts.
            lost: rank of the site that was lost, if it is known.
        """
        vote = {"sync": sync, "site": site, "why": why[:500], "lost": lost, "syncs": syncs}
        verdict = self._ask({"kind": "vote", **vote}, "verdict", "the other sites' votes")
        return bool(verdict["counts"]), str(verdict["why"])

    def leave(self, site: str) -> None:
        """Tell the coordinator not to wait for this site any more, if it can be reached."""
        with contextlib.suppress(OSError):
            self._write({"kind": "leave", "site": site}, LEAVE_S)

    def close(self) -> None:
        """Close the connection."""
        self._end.set()
        if self._socket is not None:
            self._lines.close()
            self._socket.close()
            self._socket = None

    def _ask(self, message: Mapping[str, object], wanted: str, what: str) -> dict[str, Any]:
        with waiting("sync", f"the coordinator at {self._address} and {what}") as wait:
            heard = time.monotonic()
            while True:
                try:
                    self._write(message)
                    while (reply := self._read())["kind"] == "alive":
                        heard = time.monotonic()
                    break
                except (OSError, ValueError, KeyError, TypeError) as error:
                    self.close()
                    if time.monotonic() - heard > self._timeout_s:
                        why = f"the coordinator at {self._address} does not answer: {error}"
                        raise PeerLost("sync", -1, wait.seconds(), why) from error
                    time.sleep(TICK_S)
            if reply["kind"] == "error" and reply["error"] == "mismatch":
                raise PeerMismatch(reply["field"], 0, reply["site"], reply["run"], first=None)
            if reply["kind"] != wanted:
                raise PeerLost("sync", -1, wait.seconds(), str(reply.get("why", reply))[:500])
        return dict(reply)

    def _write(self, message: Mapping[str, object], silent_s: float = SILENT_S) -> None:
        if self._socket is None:
            self._socket = socket.create_connection((self.host, self._port), silent_s)
            self._lines, self._end = self._socket.makefile("rb"), threading.Event()
            parts = self._socket, self._sending, self._end
            threading.Thread(target=_show_life, args=parts, daemon=True).start()
        with self._sending:
            self._socket.sendall(_line(message))

    def _read(self) -> Any:
        line = self._lines.readline(LINE_NBYTES)
        if not line.endswith(b"\n"):
            raise ConnectionError("it has closed the connection")
        return json.loads(line)


def _line(message: Mapping[str, object]) -> bytes:
    return json.dumps({**message, "version": VERSION}).encode() + b"\n"


def _show_life(connection: socket.socket, sending: threading.Lock, end: threading.Event) -> None:
    """Send a sign of life every ALIVE_S, until the connection is closed."""
    with contextlib.suppress(OSError):
        while not end.wait(ALIVE_S):
            with sending:
                connection.sendall(_line({"kind": "alive"}))
