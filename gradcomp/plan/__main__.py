"""``python -m gradcomp.plan``: does compression pay, and on how many nodes."""

import sys

from gradcomp import interrupt


def run(argv: list[str]) -> int:
    """Run the planner's command line and return the exit status."""
    try:
        from gradcomp.plan.cli import main
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] == "gradcomp":
            raise
        print(f"gradcomp.plan needs {error.name}: pip install 'gradcomp[bench]'", file=sys.stderr)
        return 2
    interrupt.imported()
    try:
        return main(argv)
    except KeyboardInterrupt:
        return interrupt.report()


if __name__ == "__main__":
    interrupt.leave(run(sys.argv[1:]))
