"""Network interfaces of this host, and gloo's choice among them (Linux only)."""

from __future__ import annotations

import fcntl
import os
import re
import socket
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from gradcomp.comm.addresses import INTERFACE_VARIABLE, of_interface

SIOCGIFFLAGS = 0x8913  # Linux: ioctl that returns the flags of an interface
IFF_UP, IFF_LOOPBACK, IFF_RUNNING = 0x1, 0x8, 0x40
SYS = Path("/sys/class/net")
INFINIBAND = "32"  # ARPHRD_INFINIBAND in /sys/class/net/NAME/type
# interface names of container engines and hypervisors that the kernel does not report as bridges
BRIDGES = re.compile(
    r"docker\d|br-[0-9a-f]+$|virbr|cni|flannel|cali|lxc|lxd|podman|vmnet|vboxnet|kube"
)


class Interface(NamedTuple):
    """Network interface; `kind` is "loopback", "bridge" (of containers or virtual machines),
    "virtual", "infiniband" or "ethernet".
    """

    name: str  # as in GLOO_SOCKET_IFNAME
    kind: str
    is_up: bool  # enabled, with a carrier
    mbit: int | None  # speed that the kernel reports, in Mbit/s; None if unknown
    addresses: tuple[str, ...]  # IP addresses that other hosts may be able to reach

    @property
    def carries(self) -> bool:
        """Whether other hosts may be reachable through it."""
        return self.is_up and bool(self.addresses) and self.kind not in ("loopback", "bridge")


class Choice(NamedTuple):
    """gloo's choice of interfaces."""

    variable: str  # GLOO_SOCKET_IFNAME; "" if it is not set
    names: tuple[str, ...]  # names of the interfaces; empty if gloo finds none
    why: str  # how gloo chooses them, as text
    problem: str = ""  # why gloo cannot start; "" if it can


def interfaces() -> list[Interface]:
    """Return the interfaces of this host, or of this container."""
    return [_interface(name) for _, name in sorted(socket.if_nameindex())]


def gloo_takes(found: Sequence[Interface]) -> Choice:
    """Return the interfaces of this host that gloo would use, without starting gloo."""
    text = os.environ.get(INTERFACE_VARIABLE, "")
    if not text:
        return _by_host_name(found)
    names, known = tuple(text.split(",")), {one.name: one for one in found}
    why = f"{INTERFACE_VARIABLE}={text}"
    usable = ", ".join(one.name for one in found if one.is_up and one.addresses) or "none"
    for name in names:
        if "^" in name:
            problem = f"{text!r} is NCCL's way to leave interfaces out, and gloo takes names only"
        elif name not in known:
            problem = f"there is no interface {name!r} here"
        elif not known[name].is_up:
            problem = f"{name} is down"
        elif not known[name].addresses:
            problem = f"{name} has no address"
        else:
            continue
        return Choice(text, (), why, f"{problem}; these could be taken: {usable}")
    return Choice(text, names, why)


def _by_host_name(found: Sequence[Interface]) -> Choice:
    """Return gloo's choice without the variable: by the host name's address, else the loopback."""
    host = socket.gethostname()
    names = tuple(one.name for one in found if one.kind == "loopback" and one.is_up)[:1]
    why = "no address of this host, so gloo falls back to the loopback"
    for address in _resolve(host):
        taken = tuple(one.name for one in found if address in one.addresses and one.is_up)[:1]
        is_loopback = address.startswith("127.") or address == "::1"
        if taken or is_loopback:
            names, why = names if is_loopback else taken, address
            break
    problem = "" if names else "no interface is up, the loopback neither"
    return Choice("", names, f"host name {host} resolves to {why}", problem)


def _resolve(host: str) -> list[str]:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        return [str(address[0]) for *_, address in found]
    except OSError:
        return []


def _interface(name: str) -> Interface:
    flags, folder = _flags(name), SYS / name
    if flags & IFF_LOOPBACK:
        kind = "loopback"
    elif (folder / "bridge").exists() or BRIDGES.match(name):
        kind = "bridge"
    elif _read(folder / "type") == INFINIBAND:
        kind = "infiniband"
    elif "/devices/virtual/" in os.path.realpath(folder):
        kind = "virtual"
    else:
        kind = "ethernet"
    speed = _read(folder / "speed")
    mbit = int(speed) if speed.lstrip("-").isdecimal() and int(speed) > 0 else None
    is_up = flags & IFF_UP > 0 and flags & IFF_RUNNING > 0
    return Interface(name, kind, is_up, mbit, tuple(of_interface(name)))


def _flags(name: str) -> int:
    """Return an interface's flags in this network namespace; /sys may belong to another one."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            found = fcntl.ioctl(probe, SIOCGIFFLAGS, struct.pack("256s", name.encode()[:15]))
    except OSError:
        return 0
    return int(struct.unpack_from("H", found, 16)[0])


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError:  # no such file, or the driver does not know the value
        return ""
