"""Lightning: what is refused; the rest is in test_integration_conformance.py."""

import pytest
import torch
from _frameworks import FRAMEWORKS
from _ranks import each_rank

from gradcomp import UnsupportedTensor

pytestmark = pytest.mark.extras


@each_rank(2)
def test_what_is_refused():
    from lightning import Trainer
    from lightning.pytorch.utilities.exceptions import MisconfigurationException

    from gradcomp.integrations.lightning import CompressedDDPStrategy

    for error, match, arguments in (
        (ValueError, "unknown codec 'ternari'", {"codec": "ternari"}),
        (ValueError, "warmup_steps must be an integer of at least 0, got -1", {"warmup_steps": -1}),
        (
            TypeError,
            "no.* argument 'find_unused'; did you mean find_unused_parameters",
            {"find_unused": True},
        ),
        (TypeError, "no option 'options': pass its fields by keyword", {"options": {}}),
        (TypeError, "there is no option 'start_step'", {"start_step": 3}),
        (TypeError, "advanced must be a gradcomp.Advanced, got dict", {"advanced": {}}),
        (ValueError, "DDP takes one communication hook", {"ddp_comm_hook": len}),
    ):
        with pytest.raises(error, match=match):
            CompressedDDPStrategy(**arguments)
    on_gpu = CompressedDDPStrategy("terngrad", parallel_devices=[torch.device("cuda", 0)])
    with (
        FRAMEWORKS["lightning"].cluster(),
        pytest.raises(UnsupportedTensor, match="runs on cuda:0: Trainer"),
    ):
        on_gpu.cluster_environment = type("Environment", (), {"local_rank": lambda self: 0})()
        on_gpu.setup_environment()
    # Lightning's own words, where there is none
    with pytest.raises(MisconfigurationException, match="gpu"):
        Trainer(accelerator="gpu", devices=1, strategy=CompressedDDPStrategy("terngrad"))
