"""Hosts on one machine: network namespaces connected by a bridge, with links of a given rate.

Every run creates its own namespaces, one of them for the bridge, and removes them at the end. Their
names contain the id of the process that created them, so the next run can remove those of a killed
process. Where a latency or losses are wanted and the kernel has no netem, a program in user space
takes the place of the bridge (`gradcomp.bench.relay`).
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shutil
import subprocess
import sys

from gradcomp.bench import relay
from gradcomp.plan.links import Link

PREFIX = "gradcomp-bench"
INTERFACE = "eth0"
# burst of an idle link: the larger of both, about the smallest with which a link reaches its rate
BURST_S, BURST_NBYTES = 2e-3, 32 << 10
QUEUE_S = 0.4  # longest time that a packet waits in a link's queue before it is dropped


class NoHosts(Exception):
    """Hosts cannot be created here; the message has the reason and a remedy."""


def unavailable() -> str:
    """Return why hosts cannot be created here, "" if they can."""
    instead = "or measure on loopback with --hosts 0"
    if os.geteuid() != 0:
        return f"only root can make network namespaces: run as root, {instead}"
    missing = [tool for tool in ("ip", "tc", "unshare") if shutil.which(tool) is None]
    if missing:
        return f"{', '.join(missing)} not found: install iproute2 and util-linux, {instead}"
    probe = f"{PREFIX}-{os.getpid()}-probe"
    try:
        _run(f"ip netns add {probe}")
    except NoHosts as error:
        return f"no network namespaces here ({error}): allow them, {instead}"
    _run(f"ip netns delete {probe}", check=False)
    return ""


class Hosts(contextlib.ExitStack):
    """`count` hosts that exist during a ``with`` block, each with a link; an infinite rate is not
    shaped. `loss` is the share of packets that are lost.

    Raises (on entry):
        NoHosts: hosts cannot be created here.
        ValueError: tc refuses the rate of the link.
    """

    def __init__(self, count: int, link: Link, loss: float = 0.0) -> None:
        super().__init__()
        self.count, self.link, self.loss = count, link, loss

    def __enter__(self) -> Hosts:  # noqa: PYI034 - Self is of Python 3.11
        if why := unavailable():
            raise NoHosts(why)
        sweep()
        try:
            self._switch = self._add("switch")
            _run(f"ip -n {self._switch} link add bridge type bridge")
            _run(f"ip -n {self._switch} link set bridge up")
            delays = self.link.latency_s > 0 or self.loss > 0
            if delays and not self._has_netem():
                self._relay()
            else:
                for number in range(self.count):
                    self._join(number)
        except BaseException:
            self.close()
            raise
        return self

    def command(self, number: int) -> list[str]:
        """Return the command prefix that runs a program on a host, with the host's own name."""
        name = self.namespace(number)
        named = 'echo "$0" > /proc/sys/kernel/hostname && exec "$@"'
        return ["ip", "netns", "exec", name, "unshare", "--uts", "sh", "-c", named, name]

    def namespace(self, number: int) -> str:
        """Return the name of a host's network namespace."""
        return f"{PREFIX}-{os.getpid()}-host{number}"

    def address(self, number: int) -> str:
        """Return a host's IP address."""
        return f"10.77.{number // 250}.{number % 250 + 1}"

    def _join(self, number: int) -> None:
        name, port, switch = self._add(f"host{number}"), f"port{number}", self._switch
        _run(f"ip link add {INTERFACE} netns {name} type veth peer name {port} netns {switch}")
        _run(f"ip -n {switch} link set {port} master bridge up")
        self._bring_up(number)
        self._shape(name, INTERFACE, self.loss)
        self._shape(switch, port)

    def _bring_up(self, number: int) -> None:
        name = self.namespace(number)
        _run(f"ip -n {name} addr add {self.address(number)}/16 dev {INTERFACE}")
        _run(f"ip -n {name} link set {INTERFACE} up")
        _run(f"ip -n {name} link set lo up")

    def _shape(self, namespace: str, interface: str, loss: float = 0.0) -> None:
        """Limit the rate of leaving packets; delay them by half the latency, once at each end."""
        parent, add = "root", f"tc -n {namespace} qdisc add dev {interface}"
        if not math.isinf(self.link.bits_per_s):
            rate = round(self.link.bits_per_s)
            burst = max(BURST_NBYTES, round(rate / 8 * BURST_S))
            shape = f"tbf rate {rate}bit burst {burst} latency {QUEUE_S * 1e3:.0f}ms"
            try:
                _run(f"{add} root handle 1: {shape}")
            except NoHosts as error:
                raise ValueError(f"tc refuses a link of {rate} bit/s: {error}") from None
            parent = "parent 1:1"
        if self.link.latency_s or loss:
            delay = f"delay {self.link.latency_s * 5e5:.0f}us loss {100 * loss:g}%"
            _run(f"{add} {parent} netem {delay} limit 100000")

    def _has_netem(self) -> bool:
        try:
            _run(f"tc -n {self._switch} qdisc add dev bridge root netem")
        except NoHosts:
            return False
        return True

    def _relay(self) -> None:
        """Connect the hosts by a program in user space."""
        devices = {}
        for number in range(self.count):
            name, device = self._add(f"host{number}"), f"gc{os.getpid()}-{number}"
            try:
                devices[self.address(number)] = relay.open_tun(device)
            except OSError as error:
                raise NoHosts(
                    "latency and losses need a kernel with netem, or /dev/net/tun"
                    f" ({error}): allow one of them, or leave --latency and --loss out"
                ) from None
            self.callback(os.close, devices[self.address(number)])
            _run(f"ip link set {device} netns {name}")
            _run(f"ip -n {name} link set {device} name {INTERFACE} txqueuelen 10000")
            self._bring_up(number)
        given = {"hosts": devices, "bits_per_s": self.link.bits_per_s, "loss": self.loss}
        given |= {"latency_s": self.link.latency_s, "queue_s": QUEUE_S}
        program = subprocess.Popen(
            [sys.executable, "-S", relay.__file__, json.dumps(given)],
            stdin=subprocess.PIPE,
            pass_fds=list(devices.values()),
        )
        self.callback(program.communicate)  # ends its standard input, and so the program

    def _add(self, what: str) -> str:
        name = f"{PREFIX}-{os.getpid()}-{what}"
        _run(f"ip netns add {name}")
        self.callback(_run, f"ip netns delete {name}", check=False)
        return name


def sweep() -> None:
    """Remove the namespaces of benchmark processes that no longer exist."""
    made = _run("ip netns list", check=False)
    for name, pid in re.findall(rf"^({PREFIX}-(\d+)-\w+)", made, re.MULTILINE):
        if not os.path.exists(f"/proc/{pid}"):
            _run(f"ip netns delete {name}", check=False)


def _run(command: str, *, check: bool = True) -> str:
    """Run a command (split at spaces); return its output, or raise `NoHosts` if `check`."""
    found = subprocess.run(command.split(), capture_output=True, text=True, check=False)
    if check and found.returncode:
        raise NoHosts(f"{command}: {found.stderr.strip()}")
    return found.stdout
