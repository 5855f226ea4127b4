"""Record what a training exchanges and what it ends with, as digests: messages, averages, weights
and states. `tests/entry/test_golden.py` has the trainings, `tests/vectors/golden.json` the digests.

Messages of a run are a sorted multiset: ranks are threads or processes, and a run with several
communicators may start their collectives in another order. What ranks agree on before they exchange
values (`Communicator.all_gather_bytes`, `Channel.CONTROL`) is left out.
"""

import contextlib
import hashlib
import threading
from itertools import accumulate, pairwise

import torch

from gradcomp.comm.base import Channel, Communicator


def digest_of(*parts):
    found = hashlib.blake2b(digest_size=12)
    for part in parts:
        found.update(part if isinstance(part, bytes) else str(part).encode())
    return found.hexdigest()


def bytes_of(tensor):
    tensor = getattr(tensor, "to_local", lambda: tensor)().detach().cpu().contiguous()
    return tensor.view(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def tensors_in(value):
    """Return the digests of all tensors of a nested state, whatever the keys they are under."""
    if isinstance(value, torch.Tensor):
        return [digest_of(value.dtype, value.numel(), bytes_of(value))]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (list, tuple)):
        return []
    return sorted(one for part in value for one in tensors_in(part))


class Recorder(contextlib.ContextDecorator):
    """Record the payloads that communicators of this process send, while a ``with`` block runs."""

    def __enter__(self):
        self.sent, self._lock, self._here = [], threading.Lock(), threading.local()
        names = ("start_max", "start_all_to_all", "start_all_gather", "all_gather_bytes")
        self._plain = {name: getattr(Communicator, name) for name in names}
        for name in names:
            setattr(Communicator, name, self._wrapped(name))
        return self

    def __exit__(self, *exception):
        for name, plain in self._plain.items():
            setattr(Communicator, name, plain)

    def _wrapped(self, name):
        plain, here = self._plain[name], self._here

        def agreeing(comm, *args, **options):
            here.agrees = True
            try:
                return plain(comm, *args, **options)
            finally:
                here.agrees = False

        def recorded(comm, send, *args):
            if args[-1] is not Channel.CONTROL and not getattr(here, "agrees", False):
                self._record(name, send, args[0] if name == "start_all_to_all" else None)
            return plain(comm, send, *args)

        return agreeing if name == "all_gather_bytes" else recorded

    def _record(self, kind, send, counts):
        data = bytes_of(send)
        ends = [0, *accumulate(counts)] if counts is not None else [0, len(data)]
        with self._lock:
            self.sent += [(kind, data[a:b]) for a, b in pairwise(ends)]

    def found(self):
        """Return [(digest, bytes)] of every message, sorted."""
        return sorted((digest_of(kind, data), len(data)) for kind, data in self.sent)
