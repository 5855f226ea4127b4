"""The accelerator of a rank: name, driver, kernels, and measured rates of copies."""

from __future__ import annotations

import re
import statistics
import timeit
from pathlib import Path
from typing import Any

import torch

from gradcomp.comm.base import first_line
from gradcomp.kernels import encoding_device, triton_version
from gradcomp.kernels.check import refusals
from gradcomp.plan.rates import COPIED, COPY_STAGES, copying

DRIVER = Path("/proc/driver/nvidia/version")
NBYTES = 4 * COPIED[-1]  # of a copy: those of a bucket of DDP
REPEATS = 5


def name_of(device: torch.device) -> str:
    """Return the name of a device, such as "NVIDIA H200"; its type if torch knows no other."""
    name = None
    if device.type != "cpu":
        name = getattr(torch.get_device_module(device), "get_device_name", None)
    return device.type if name is None else str(name(device))


def accelerator(rank: int) -> dict[str, Any] | None:
    """Return a report on this rank's accelerator, with values that JSON supports; None without one.

    The first use of an accelerator's own kernels compiles and checks them, which may take minutes.
    """
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None:
        return None
    device = torch.device(found.type, rank % torch.accelerator.device_count())
    report: dict[str, Any] = {
        "device": str(device),
        "name": found.type,
        "driver": driver(),
        "platform": platform(),
    }
    try:
        triton, can_check = f"Triton {triton_version()}", True
    except ImportError as error:
        triton, can_check = str(error), False
    try:
        with torch.accelerator.device_index(device.index):
            is_own = encoding_device(device) == device
            report |= {"name": name_of(device), **copy_rates(device)}
    except RuntimeError as error:  # no memory left, or a driver that fails
        return report | {"failed": first_line(error)}
    refused = refusals.get(device, "")
    return report | {
        "triton": triton,  # its version, or why it cannot be used
        "encodes_on": "device" if is_own else "host",
        # of the accelerator's own kernels against the CPU's
        "self_check": "passed" if is_own else "failed" if refused and can_check else "not run",
        "refused": refused,  # why they are not used although asked for, "" otherwise
        "failed": "",  # the error of an accelerator that cannot be used
    }


def driver() -> str:
    """Return the version of NVIDIA's driver, "" if there is none."""
    try:
        text = DRIVER.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
    version = re.search(r"Kernel Module.*?\s(\d+\.[\d.]+)", text)
    return version[1] if version else ""


def platform() -> str:
    """Return the platform and its version that torch was built for, such as "CUDA 12.8"."""
    built = {"CUDA": torch.version.cuda, "ROCm": torch.version.hip}
    return next((f"{name} {version}" for name, version in built.items() if version), "")


def copy_rates(device: torch.device) -> dict[str, float]:
    """Return the bytes per second of copies to and from page-locked host memory."""
    rates = {}
    for stage in COPY_STAGES:
        seconds = timeit.repeat(copying(device, stage, NBYTES // 4), number=1, repeat=REPEATS + 1)
        rates[f"{stage.replace(' ', '_')}_bytes_per_s"] = NBYTES / statistics.median(seconds[1:])
    return rates
