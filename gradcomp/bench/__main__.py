"""Dispatch ``python -m gradcomp.bench NAME ...`` to ``gradcomp.bench.NAME.main(argv)``; only that
benchmark is imported. ``plan`` runs the planner.
"""

from __future__ import annotations

import sys

from gradcomp import interrupt
from gradcomp.arguments import suggestion

BENCHMARKS = {
    "demo": "train LeNet with 2 ranks once per codec: accuracy, bytes, step time at 1 Gbit/s",
    "codec": "GB/s of every kernel compared with memcpy, terngrad with torch operations",
    "accuracy": "accuracy per method, optimizer and workload, compared with fp32 and bf16",
    "paper": "papers' tables again: TernGrad's LeNet, 1 bit with and without error feedback",
    "train": "step time, bytes sent and accuracy per method, over links of a given rate",
    "report": "one HTML or Markdown page from the JSON files of train and accuracy",
    "optim": "split optimizers compared with torch's: milliseconds a step, bytes a weight",
    "ratio": "bytes per step for real models, every codec and exchange, 2 to 64 ranks",
    "plan": "does compression pay, and on how many nodes (python -m gradcomp.plan)",
}
GONE = {"allreduce": "it is gone: bench train measures exchanges, over gloo and --over mpi"}
NAMES = "\n".join(f"  {name:<10}{text}" for name, text in BENCHMARKS.items())
HELP = f"""usage: python -m gradcomp.bench NAME [options]      (NAME --help lists its options)

{NAMES}

example:
  python -m gradcomp.bench demo --short

All of them take --json FILE or write one, and need: pip install 'gradcomp[bench]'"""


def main(argv: list[str]) -> int:
    """Run the benchmark ``argv[0]`` with the other arguments; return the exit status: 0, 1 if a
    check failed, 2 for wrong usage or a missing package, 130 after Ctrl-C.
    """
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(HELP)
        return 0 if argv else 2
    name, rest = argv[0], argv[1:]
    if name not in BENCHMARKS:
        there = GONE.get(name, f"there are {', '.join(BENCHMARKS)}{suggestion(name, BENCHMARKS)}")
        print(f"gradcomp.bench: no benchmark named {name!r}; {there}", file=sys.stderr)
        return 2
    where = "gradcomp.plan.cli" if name == "plan" else f"gradcomp.bench.{name}"
    return interrupt.run(f"gradcomp.bench {name}", where, rest)


if __name__ == "__main__":
    interrupt.leave(main(sys.argv[1:]))
