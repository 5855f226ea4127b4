"""Two workers and a parameter server, one of which dies or freezes in the middle of a round;
started by test_faults.py.

Usage: _serve.py STORE RANK WHO FAULT TIMEOUT_S. WHO ("worker" or "server") does FAULT ("die" or
"freeze") when worker 0 waits for worker 1's second push; worker 0 prints what it caught, after how
many seconds, and what is still served.
"""

import os
import signal
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

import gradcomp
from gradcomp.server import ParameterClient, serve

SERVER = 2


def strike(fault):
    os.kill(os.getpid(), signal.SIGKILL if fault == "die" else signal.SIGSTOP)


def strike_at(signal_file, fault):
    """Strike when worker 0 has begun its second push, and is waiting."""
    while not Path(signal_file).exists():
        time.sleep(0.02)
    time.sleep(0.3)
    strike(fault)


def work(comm, who, fault, timeout_s, signal_file):
    client = ParameterClient(comm, [SERVER], timeout_s=timeout_s)
    for key in ("x", "other"):
        client.init_parameter(key, (4,), "float32")
        client.push_parameter(key, torch.full((4,), 1.0 + comm.rank))
        assert client.pull_parameter(key, "sum").tolist() == [3.0] * 4
    if comm.rank == 1:
        if who == "worker":
            strike(fault)
        time.sleep(60)  # silent, until the test ends it
        return
    Path(signal_file).touch()
    begun = time.monotonic()
    try:
        client.push_parameter("x", torch.ones(4))
        client.pull_parameter("x", "sum")
    except gradcomp.PeerLost as error:
        print(f"PeerLost seconds={time.monotonic() - begun:.1f} {error}", flush=True)
    if who == "worker":
        print("still", client.pull_parameter("other", "sum").tolist(), flush=True)


def main(store, rank, who, fault, timeout_s):
    torch.set_num_threads(1)
    signal_file = f"{store}.second"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=3)
    comm = gradcomp.comm.TorchCommunicator(timeout_s=20)
    if rank == SERVER:
        if who == "server":
            threading.Thread(target=strike_at, args=(signal_file, fault), daemon=True).start()
        serve(comm, [SERVER])
    else:
        work(comm, who, fault, timeout_s, signal_file)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4], float(sys.argv[5]))
