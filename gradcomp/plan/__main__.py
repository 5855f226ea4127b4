"""Entry point of ``python -m gradcomp.plan``: does compression pay, and on how many nodes."""

import sys

from gradcomp import interrupt

if __name__ == "__main__":
    interrupt.leave(interrupt.run("gradcomp.plan", "gradcomp.plan.cli", sys.argv[1:]))
