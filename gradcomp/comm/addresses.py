"""The address at which this process listens for peers: that of the network interface which the
group uses, never all interfaces.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

INTERFACE_VARIABLE = "GLOO_SOCKET_IFNAME"
SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface
LINK_LOCAL = "20"  # scope in /proc/net/if_inet6 of addresses that other hosts cannot use
LOOPBACKS = ("127.0.0.1", "::1")


def host_identity() -> str:
    """Return a name that is equal for processes that can reach each other over the loopback, and
    different for all others.
    """
    boot, namespace = "", ""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        namespace = os.readlink("/proc/self/ns/net")
    except OSError:
        pass  # not Linux: use the host name only
    return f"{socket.gethostname()} {boot} {namespace}"


def listen(one_host: bool, backlog: int) -> socket.socket:
    """Return a socket that listens on a free port of an address at which peers reach this process.

    The address is that of the interface GLOO_SOCKET_IFNAME, if it is set. Otherwise it is the
    loopback if `one_host`, that is, all ranks are on this host; else the first address that the
    host name resolves to, as in gloo; else the source address of packets to MASTER_ADDR.

    Raises:
        OSError: there is no such address; the message names the variable to set.
    """
    refused = []
    for address in _candidates(one_host):
        try:
            return listen_at(address, backlog)
        except OSError as error:
            refused.append(f"{address}: {error}")
    tried = "; ".join(refused)
    if name := os.environ.get(INTERFACE_VARIABLE, ""):
        raise OSError(f"{INTERFACE_VARIABLE}={name}: no such interface with an address ({tried})")
    raise OSError(
        f"the host name {socket.gethostname()!r} resolves to no address of this host but the"
        f" loopback ({tried}): set {INTERFACE_VARIABLE} to the interface that leads to the others"
    )


def listen_at(address: str, backlog: int) -> socket.socket:
    """Return a socket that listens on a free port of an address; OSError if that fails."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, 0), family=family, backlog=backlog)


def _candidates(one_host: bool) -> Iterator[str]:
    name = os.environ.get(INTERFACE_VARIABLE, "").split(",")[0].strip()
    if name:
        yield from of_interface(name)
    elif one_host:
        yield from LOOPBACKS
    else:
        yield from _resolved(socket.gethostname())
        if master := os.environ.get("MASTER_ADDR"):
            yield from _on_the_way_to(master)


def of_interface(name: str) -> Iterator[str]:
    """Yield the IPv4 and IPv6 addresses of an interface that other hosts can use."""
    with contextlib.suppress(OSError):  # no such interface, or it has no IPv4 address
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            found = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        yield socket.inet_ntoa(found[20:24])
    with contextlib.suppress(OSError):  # this host has no IPv6
        for row in Path("/proc/net/if_inet6").read_text(encoding="ascii").splitlines():
            address, _index, _prefix, scope, _flags, interface = row.split()
            if interface == name and scope != LINK_LOCAL:
                yield socket.inet_ntop(socket.AF_INET6, bytes.fromhex(address))


def _resolved(host: str) -> Iterator[str]:
    with contextlib.suppress(OSError):
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        yield from filter(_is_public, (str(address) for *_, (address, *_) in found))


def _on_the_way_to(host: str) -> Iterator[str]:
    """Yield the source addresses of datagrams to a host. Sends nothing."""
    with contextlib.suppress(OSError):
        found = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
        for family, kind, protocol, _, address in found:
            with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
                probe.connect(address)
                if _is_public(own := probe.getsockname()[0]):
                    yield own


def _is_public(address: str) -> bool:
    """Return whether another host can use an address: not loopback or IPv6 link-local."""
    return not (address.startswith(("127.", "fe80:")) or address == "::1")
