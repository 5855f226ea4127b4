"""Training with infrequent communication: H local steps, then one compressed exchange of the change
of the weights.

References:
    Douillard et al. 2023, "DiLoCo: Distributed Low-Communication Training of Language Models"
    (arXiv 2311.08105). Douillard et al. 2025, "Streaming DiLoCo with overlapping communication"
    (arXiv 2501.18512). Stich 2019, "Local SGD converges fast and communicates little" (arXiv
    1805.09767).
"""

from gradcomp.local.coordinator import Coordinator
from gradcomp.local.elastic import ElasticDiLoCo
from gradcomp.local.steps import DiLoCo, LocalSGD

__all__ = ["Coordinator", "DiLoCo", "ElasticDiLoCo", "LocalSGD"]
