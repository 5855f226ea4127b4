"""Lightning: what is refused; the rest is in test_integration_conformance.py."""

import pytest
from _ranks import each_rank

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
    # Lightning's own words, where there is none
    with pytest.raises(MisconfigurationException, match="gpu"):
        Trainer(accelerator="gpu", devices=1, strategy=CompressedDDPStrategy("terngrad"))
