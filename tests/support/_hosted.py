"""A kernel set for a device that has none: it does what the CPU's does, on copies.

Copies are queued on the current stream and waited for there, as kernels of a device would be: on
the lazy device they have the values of another stream only if that was waited for.
"""

import inspect
import threading

import torch
from torch.utils._pytree import tree_map

from gradcomp.kernels import Kernels
from gradcomp.kernels.native import NativeKernels
from gradcomp.kernels.weights import TorchWeights


class HostedKernels(TorchWeights, Kernels):
    """The CPU's kernels on copies of the values of `device`; weights are updated in torch
    operations.
    """

    def __init__(self, device):
        super().__init__(device)
        self._native = NativeKernels()
        # whole tensors are copied back, so slices of one must not be at work meanwhile
        self._lock = threading.Lock()

    def empty(self, numel, dtype=torch.float32):
        return torch.empty(numel, dtype=dtype, device=self.device)

    def scratch(self, groups, free=None):
        return self._native.scratch(groups)

    def _call(self, name, given):
        there = []

        def here(value):
            if not isinstance(value, torch.Tensor) or value.device.type != self.device.type:
                return value
            there.append((value, value.detach().to("cpu", copy=True)))
            return there[-1][1]

        with self._lock:
            given = {key: tree_map(here, value) for key, value in given.items()}
            found = getattr(self._native, name)(**given)
            for value, copy in there:
                value.detach().copy_(copy)
        return found


def _kernel(name):
    signature = inspect.signature(getattr(Kernels, name))

    def method(self, *args, **kwargs):
        given = signature.bind(self, *args, **kwargs).arguments
        return self._call(name, {key: value for key, value in given.items() if key != "self"})

    return method


for _name in ("scales", "encode", "sum_decode", "are_finite", "divide", "multiply", "follow"):
    setattr(HostedKernels, _name, _kernel(_name))
for _name in ("rotate", "unbias", "rescale"):
    setattr(HostedKernels, _name, _kernel(_name))
