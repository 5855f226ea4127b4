"""``python -m gradcomp.bench plan`` is ``python -m gradcomp.plan``."""

from gradcomp.plan.cli import build_parser, main

__all__ = ["build_parser", "main"]
