"""A kernel set for a device that has none: it does what the CPU's does, on copies.

Copies are queued on the current stream and waited for there, as kernels of a device would be: on
the lazy device they have the values of another stream only if that was waited for.
"""

import inspect
import threading

import numpy as np
import torch
from torch.utils._pytree import tree_map

from gradcomp.kernels import Kernels
from gradcomp.kernels.native import NativeKernels
from gradcomp.kernels.rules import NO_RULE, TARGET
from gradcomp.kernels.weights import FIELDS, TorchWeights

WRITTEN = [name for name in FIELDS if name != "gradient"]  # of a target


class HostedKernels(Kernels):
    """The CPU's kernels on copies of the values of `device`."""

    def __init__(self, device):
        self.device, self._native = device, NativeKernels()
        # whole tensors are copied back, so slices of one must not be at work meanwhile
        self._lock = threading.Lock()

    def empty(self, numel, dtype=torch.float32):
        return torch.empty(numel, dtype=dtype, device=self.device)

    def scratch(self, groups, free=None):
        return self._native.scratch(groups)

    def targets(self, **tensors):
        return TorchWeights(self.device).targets(**tensors)  # the tensors, not their addresses

    def update(self, table, targets, rules, payloads=None, norms=None):
        with self._lock:
            has_rule = targets["rule"] != NO_RULE
            ruled, given = targets[has_rule], np.zeros(len(targets), TARGET)
            here = {name: [_copied(one) for one in ruled[name]] for name in FIELDS}
            given[has_rule] = self._native.targets(**here)
            given["rule"] = targets["rule"]
            bad = self._native.update(table, given, rules, payloads, norms)
            for name in WRITTEN:
                for there, one in zip(ruled[name], here[name], strict=True):
                    if one is not None:
                        there.copy_(one)
        return bad

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


def _copied(tensor):
    return None if tensor is None else tensor.to("cpu", copy=True)


def _kernel(name):
    signature = inspect.signature(getattr(Kernels, name))

    def method(self, *args, **kwargs):
        given = signature.bind(self, *args, **kwargs).arguments
        return self._call(name, {key: value for key, value in given.items() if key != "self"})

    return method


for _name in ("scales", "encode", "sum_decode", "are_finite", "divide", "multiply", "follow"):
    setattr(HostedKernels, _name, _kernel(_name))
for _name in ("rotate", "unbias", "rescale", "split", "join"):
    setattr(HostedKernels, _name, _kernel(_name))
