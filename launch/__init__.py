"""Start N ranks of a program under an MPI or torchrun, with torchrun's environment variables.

``python -m gradcomp.launch -n 4 train.py`` starts the ranks. `environment` is for programs that
were started by another launcher.
"""

from __future__ import annotations

from .variables import environment, export_environment

__all__ = ["environment", "export_environment"]
