"""What tests of kernels draw at random."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from reference import codec as ref

DTYPES = [ref.F32, ref.BF16, ref.F16]
SEEDS = st.integers(0, 2**32 - 1)
WORDS = st.sampled_from([0, 1, 2**31 - 1, 2**32 - 1]) | SEEDS
COUNTS = st.sampled_from([1, 1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 33])

kernel_settings = settings(database=None, suppress_health_check=list(HealthCheck))
