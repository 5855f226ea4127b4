"""Benchmarks: ``python -m gradcomp.bench NAME``; ``--help`` lists all of them.

Importing this package imports no benchmark. Benchmarks need the extra ``bench`` (rich, matplotlib,
scikit-learn).
"""

from gradcomp import interrupt

interrupt.begin()
