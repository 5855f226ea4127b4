"""Start N ranks of a program under an MPI or torchrun, and tell every rank who it is.

``python -m gradcomp.launch -n 4 train.py`` starts them; `environment` is for programs that
something else has started.
"""

from __future__ import annotations

from .variables import environment, export_environment

__all__ = ["environment", "export_environment"]
