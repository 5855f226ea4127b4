"""Links in user space: packets travel between TUN devices, with a rate, a latency and losses.

For kernels without netem. `gradcomp.bench.hosts` runs it as a program with the standard library
alone; it ends when its standard input does.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import random
import select
import socket
import struct
import sys
import time
from collections import deque

_TUNSETIFF, _TUN_WITHOUT_HEADERS = 0x400454CA, 0x1001  # linux/if_tun.h: IFF_TUN | IFF_NO_PI
_AT_A_TIME = 64  # packets that are read of one host before the next one's


def open_tun(name: str) -> int:
    """Create a TUN device and return its file descriptor; OSError without permission."""
    number = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        fcntl.ioctl(number, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _TUN_WITHOUT_HEADERS))
    except OSError:
        os.close(number)
        raise
    return number


def relay(
    hosts: dict[str, int], bits_per_s: float, latency_s: float, loss: float, queue_s: float
) -> None:
    """Forward IPv4 packets between hosts, TUN devices by address, until standard input ends.

    `loss` is a share of packets, drawn at random. A packet that would wait longer than `queue_s`
    for a link is dropped.
    """
    devices = {socket.inet_aton(address): number for address, number in hosts.items()}
    sends_from = dict.fromkeys(devices.values(), 0.0)  # when that direction of a link is free
    receives_from = dict.fromkeys(devices.values(), 0.0)
    arriving: dict[int, deque[tuple[float, bytes]]] = {n: deque() for n in devices.values()}
    draw, poll = random.Random(0).random, select.epoll()  # noqa: S311 - no secret
    for number in (*devices.values(), 0):
        poll.register(number, select.EPOLLIN)
    while True:
        due = min((queue[0][0] for queue in arriving.values() if queue), default=None)
        wait = -1.0 if due is None else max(0.0, due - time.monotonic())
        for number, _ in poll.poll(wait):
            if number == 0:
                return
            with contextlib.suppress(OSError):  # no more packets, or a device that is down
                for _ in range(_AT_A_TIME):
                    packet = os.read(number, 65535)
                    to = devices.get(packet[16:20])  # the destination of IPv4
                    if to is None or draw() < loss:
                        continue
                    now, seconds = time.monotonic(), 8 * len(packet) / bits_per_s
                    sent = max(now, sends_from[number]) + seconds
                    got = max(sent + latency_s, receives_from[to]) + seconds
                    if got - now > 2 * queue_s + latency_s:
                        continue
                    sends_from[number], receives_from[to] = sent, got
                    arriving[to].append((got, packet))
        now = time.monotonic()
        for to, queue in arriving.items():
            while queue and queue[0][0] <= now:
                with contextlib.suppress(OSError):  # the same of the receiver: the packet is lost
                    os.write(to, queue[0][1])
                queue.popleft()


if __name__ == "__main__":
    relay(**json.loads(sys.argv[1]))
