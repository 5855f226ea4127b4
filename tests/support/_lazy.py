"""A device for tests, ``torch.device("lazy")``: lazy_device.cpp, built at first use, and a process
group for its tensors and no others, as NCCL is for CUDA's.

Importing this makes it the accelerator of the process, for good: it belongs into ranks that the
fixture `lazy` starts.
"""

import contextlib
import ctypes
import fcntl
import hashlib
import subprocess
import types
from pathlib import Path

import torch
import torch.distributed as dist

HERE = Path(__file__).parent
SOURCE = HERE / "lazy_device.cpp"


def build():
    """Return the library, compiled unless it has been for this source and torch."""
    what = SOURCE.read_bytes() + torch.__version__.encode()
    path = HERE.parents[1] / "build" / f"lazy_device-{hashlib.sha256(what).hexdigest()[:16]}.so"
    path.parent.mkdir(exist_ok=True)
    with open(path.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            root, made = Path(torch.__file__).parent, path.with_suffix(".new")
            folders = [root / "include", root / "include/torch/csrc/api/include"]
            subprocess.run(
                ["g++", "-O0", "-std=c++20", "-shared", "-fPIC"]
                + [f"-I{folder}" for folder in folders]
                + [str(SOURCE), "-o", str(made), f"-L{root / 'lib'}", "-lc10", "-ltorch_cpu"],
                check=True,
            )
            made.rename(path)
    return path


@contextlib.contextmanager
def stream(one):
    before = torch.accelerator.current_stream()
    torch.accelerator.set_stream(one if one is not None else before)
    try:
        yield
    finally:
        torch.accelerator.set_stream(before)


class DeviceGroup(dist.ProcessGroup):
    """Collectives of the device's tensors, of copies over gloo; CPU tensors are refused."""

    def __init__(self, options, _=None):
        super().__init__(options.group_rank, options.group_size)
        store, self._name = options.store, options.group_id
        self._gloo = dist.ProcessGroupGloo(store, self.rank(), self.size(), options.timeout)

    def getGroupName(self):
        return self._name

    def _run(self, call, outputs, inputs):
        assert all(one.device.type == "lazy" for one in outputs + inputs), "not for CPU tensors"
        there, given = [one.cpu() for one in outputs], [one.cpu() for one in inputs]
        call(there, given).wait()
        for output, host in zip(outputs, there, strict=True):
            output.copy_(host)
        future = torch.futures.Future()
        future.set_result(outputs)
        return torch._C._distributed_c10d._create_work_from_future(future)

    def broadcast(self, tensors, options):
        return self._run(lambda out, _: self._gloo.broadcast(out, options), tensors, [])

    def allreduce(self, tensors, options):
        return self._run(lambda out, _: self._gloo.allreduce(out, options), tensors, [])

    def allgather(self, outputs, inputs, options=None):
        return self._run(lambda out, given: self._gloo.allgather([out], given), *outputs, inputs)

    def all_gather_single(self, output, given, options=None):
        return self._run(
            lambda out, one: self._gloo._allgather_base(out[0], one[0]), [output], [given]
        )

    def reduce_scatter_single(self, output, given, options):
        return self._run(
            lambda out, one: self._gloo._reduce_scatter_base(out[0], one[0], options),
            [output],
            [given],
        )

    _allgather_base, _reduce_scatter_base = all_gather_single, reduce_scatter_single


def register():
    ctypes.CDLL(str(build()), mode=ctypes.RTLD_GLOBAL)
    torch.utils.rename_privateuse1_backend("lazy")
    module, accelerator = types.ModuleType("torch.lazy"), torch.accelerator
    module.is_available = module.is_initialized = lambda: True
    module._is_in_bad_fork = lambda: False
    module.manual_seed_all = lambda seed: None
    module.device_count = lambda: 2
    module.current_device = accelerator.current_device_index
    module.set_device = accelerator.set_device_index
    module.synchronize = accelerator.synchronize
    module.current_stream, module.set_stream = accelerator.current_stream, accelerator.set_stream
    module.Stream = lambda device=None, priority=0: torch.Stream(device or "lazy")
    module.Event = lambda **_: torch.Event("lazy")
    module.stream = stream
    torch._register_device_module("lazy", module)
    torch.utils.generate_methods_for_privateuse1_backend()
    dist.Backend.register_backend(__name__, DeviceGroup, extended_api=True, devices=["lazy"])


register()
