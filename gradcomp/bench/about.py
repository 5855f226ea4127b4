"""What results are written with: on which machine, with which versions."""

from __future__ import annotations

import contextlib
import os
import platform
from pathlib import Path

import torch

from gradcomp.version import __version__


def about() -> dict[str, object]:
    """Return ``{"gradcomp": version, "machine": {...}}`` for the head of a file of results."""
    machine = {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    return {"gradcomp": __version__, "machine": machine}


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()
