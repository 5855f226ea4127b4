"""Lightning: modules with several optimizers, and what is refused; the rest is in
test_integration_conformance.py.
"""

from unittest import mock

import pytest
import torch
from _frameworks import FRAMEWORKS, batches, loss_of, net, same, weights_of
from _ranks import each_rank
from torch.nn.parallel import DistributedDataParallel

import gradcomp
from gradcomp.engine import guard

pytestmark = pytest.mark.extras


def optimizers_of(model):
    """Return one optimizer for the first layer, another for the rest."""
    first, *rest = model.children()
    return [
        torch.optim.SGD(first.parameters(), lr=0.1, momentum=0.9),
        torch.optim.AdamW([p for layer in rest for p in layer.parameters()], lr=1e-3),
    ]


def of_plain_ddp(epochs):
    model = net()
    optimizers = optimizers_of(model)
    model = DistributedDataParallel(model)
    with gradcomp.ddp.register(model, "auto", optimizer=optimizers) as state:
        for batch in [*batches()] * epochs:
            loss_of(model, *batch).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    return weights_of(model), state


@each_rank(2)
def test_a_module_with_two_optimizers_trains_as_in_plain_ddp(tmp_path):
    """Manual optimization: Lightning has no other way to step two optimizers."""
    import lightning

    from gradcomp.integrations.lightning import CompressedDDPStrategy

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net, self.automatic_optimization = net(), False

        def training_step(self, batch, index):
            self.manual_backward(loss_of(self.net, *batch))
            for optimizer in self.optimizers():
                optimizer.step()
                optimizer.zero_grad()

        def configure_optimizers(self):
            return optimizers_of(self.net)

    with mock.patch.object(guard, "perf_counter", return_value=0.0):  # which decides by seconds
        wanted, theirs = of_plain_ddp(2)
        with FRAMEWORKS["lightning"].cluster():
            strategy = CompressedDDPStrategy("auto")
            trainer = lightning.Trainer(
                accelerator="cpu",
                devices=2,
                strategy=strategy,
                max_epochs=2,
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
                use_distributed_sampler=False,
                default_root_dir=tmp_path,
            )
            module = Module()
            trainer.fit(module, batches())
    assert same(weights_of(module), wanted)
    assert strategy.compression.describe() == theirs.describe()
    assert strategy.compression.stats.bytes_sent == theirs.stats.bytes_sent > 0


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
