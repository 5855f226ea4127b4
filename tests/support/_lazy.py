"""A device for tests, ``torch.device("lazy")`` (lazy_device.cpp), and a process group for it.

Importing this makes it the accelerator of the process, for good: it belongs into ranks that the
fixture `accelerator` starts.
"""

import contextlib
import ctypes
import types

import torch
from _device_group import SharedGroup, register_group
from _lazy_build import build


@contextlib.contextmanager
def stream(one):
    before = torch.accelerator.current_stream()
    torch.accelerator.set_stream(one if one is not None else before)
    try:
        yield
    finally:
        torch.accelerator.set_stream(before)


def register():
    ctypes.CDLL(str(build()), mode=ctypes.RTLD_GLOBAL)
    torch.utils.rename_privateuse1_backend("lazy")
    module, accelerator = types.ModuleType("torch.lazy"), torch.accelerator
    module.is_available = module.is_initialized = lambda: True
    module._is_in_bad_fork = lambda: False
    module.manual_seed_all = lambda seed: None
    generators = [torch.Generator(), torch.Generator()]
    module.get_rng_state = lambda device: generators[torch.device(device).index].get_state()
    module.set_rng_state = lambda state, device: generators[device.index].set_state(state)
    module.device_count = lambda: 2
    module.current_device = accelerator.current_device_index
    module.set_device = accelerator.set_device_index
    module.synchronize = accelerator.synchronize
    module.get_device_name = lambda device=None: "device for tests"
    module.current_stream, module.set_stream = accelerator.current_stream, accelerator.set_stream
    module.Stream = lambda device=None, priority=0: torch.Stream(device or "lazy")
    module.Event = lambda **_: torch.Event("lazy")
    module.stream = stream
    torch._register_device_module("lazy", module)
    torch.utils.generate_methods_for_privateuse1_backend()
    register_group(__name__, "lazy")
    register_group("_lazy_shared", "lazy", SharedGroup)


register()
