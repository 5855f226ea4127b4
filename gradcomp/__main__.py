"""python -m gradcomp: print versions, and the features that are usable on this machine."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import platform
import subprocess
import sys
from typing import Any


def report() -> dict[str, Any]:
    """Return versions, kernel tier, threads and usable features by name, without starting MPI or
    torch.distributed.
    """
    import cffi
    import numpy
    import torch
    import torch.distributed

    import gradcomp
    from gradcomp.kernels import native

    has_dist = torch.distributed.is_available()
    return {
        "gradcomp": gradcomp.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "cffi": cffi.__version__,
        "tier": native.tier(),
        "tiers": native.tiers(),
        "threads": native.thread_count(),
        "torch.distributed (gloo)": (
            "usable" if has_dist and torch.distributed.is_gloo_available() else "not built in"
        ),
        "accelerator": _accelerator(),
        "never run on a GPU": _never_run(),
        "MPI": _mpi(),
        "bench extra": _extra(("rich", "matplotlib", "sklearn"), "bench"),
    }


def _tier(name: str, names: list[str]) -> str:
    """Return a text of the tier in use, with the reason if it is not the fastest one."""
    if name != names[-1]:
        return f"{name} tier ({names[-1]} is switched off by GRADCOMP_DISABLE_CPU_FEATURES)"
    if name == "portable":
        return (
            "portable tier: plain C, several times slower; this CPU has no vector instructions that"
            " gradcomp knows"
        )
    return f"{name} tier"


def _accelerator() -> str:
    """Return a text of how gradients on this machine's accelerator are encoded."""
    import torch

    from gradcomp.kernels import CPU, USES_CUDA, encoding_device

    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return "none"
    there = torch.device(accelerator.type, torch.accelerator.current_device_index())
    how = (
        "copied to the host and encoded there"
        if encoding_device(there) == CPU
        else f"encoded, {USES_CUDA}=1"
    )
    return f"{accelerator.type}: gradients are {how}"


def _never_run() -> str:
    """Return the names of the kernels that have never run on a GPU."""
    from gradcomp.kernels.check import CODES, OTHERS

    return f"{', '.join((*CODES, *OTHERS))} (compared under Triton's interpreter only)"


def _mpi() -> str:
    """Return a text of the MPI library and its thread level, or why MPI is not usable. Runs in
    another process, so that this one never starts MPI.
    """
    if importlib.util.find_spec("mpi4py") is None:
        return "not usable: mpi4py is not installed (pip install 'gradcomp[mpi]')"
    ask = "from gradcomp.comm.mpi import describe_mpi; print(describe_mpi())"
    try:
        answer = subprocess.run(
            [sys.executable, "-c", ask], capture_output=True, text=True, timeout=60, check=True
        )
    except (subprocess.SubprocessError, OSError) as error:
        last = (getattr(error, "stderr", None) or str(error)).strip().splitlines()[-1:]
        return f"not usable: mpi4py is installed, but {''.join(last)}"
    return f"{answer.stdout.strip()}, mpi4py {importlib.metadata.version('mpi4py')}"


def _extra(modules: tuple[str, ...], extra: str) -> str:
    missing = [m for m in modules if importlib.util.find_spec(m) is None]
    return (
        f"not usable: {missing[0]} is missing (pip install 'gradcomp[{extra}]')"
        if missing
        else "usable"
    )


def main(argv: list[str] | None = None) -> int:
    """Print the report as a table or, with --json, as JSON."""
    parser = argparse.ArgumentParser(
        prog="python -m gradcomp",
        description=(
            "Print versions, kernel tier, threads and what gradcomp can use on this machine."
        ),
        epilog=(
            "GRADCOMP_DISABLE_CPU_FEATURES=avx2 switches kernel tiers off. Benchmarks: python -m"
            " gradcomp.bench --help"
        ),
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    args = parser.parse_args(argv)
    values = report()
    if args.json:
        print(json.dumps(values, indent=2))
    else:
        width = max(len(k) for k in values)
        values["tier"] = _tier(values["tier"], values["tiers"])
        for key, value in values.items():
            print(f"{key:<{width}}  {', '.join(value) if isinstance(value, list) else value}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
