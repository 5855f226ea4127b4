"""The models of the benchmarks: LeNet to train, and the real parameter lists of five models to count bytes for.

A list is ``[(name, shape), ...]`` in the order of the published implementation's ``named_parameters()``, because the
position of a parameter is part of gradcomp's random numbers and its shape decides scale groups and shards. The lists are
built here so that counting bytes needs neither torchvision nor transformers nor gigabytes of weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import Tensor, nn

ParameterList = list[tuple[str, tuple[int, ...]]]


class LeNet(nn.Module):
    """The LeNet of the TernGrad paper: conv5x5(20)-pool2-conv5x5(50)-pool2-fc500-fc10, SAME padding, ReLU.

    1,256,080 parameters. The paper's dropout is left out: the noise of the codes regularises already (its section 4).

    References:
        Wen et al. 2017, TernGrad, section 5.1.
    """

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 20, 5, padding=2)
        self.conv2 = nn.Conv2d(20, 50, 5, padding=2)
        self.fc1 = nn.Linear(7 * 7 * 50, 500)
        self.fc2 = nn.Linear(500, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Return class scores.

        Args:
            images: `(batch, 1, 28, 28)` float32.

        Returns:
            `(batch, 10)` float32, not normalised.
        """
        x = nn.functional.max_pool2d(self.conv1(images).relu(), 2)
        x = nn.functional.max_pool2d(self.conv2(x).relu(), 2)
        scores: Tensor = self.fc2(self.fc1(x.flatten(1)).relu())
        return scores


def lenet() -> ParameterList:
    """Return the parameters of :class:`LeNet`: 1,256,080 values."""
    return [
        *_dense("conv1", 20, 1, 5, 5),
        *_dense("conv2", 50, 20, 5, 5),
        *_dense("fc1", 500, 2450),
        *_dense("fc2", 10, 500),
    ]


def resnet50() -> ParameterList:
    """Return the parameters of torchvision's ``resnet50``: 25,557,032 values (He et al. 2015)."""
    out: ParameterList = [("conv1.weight", (64, 3, 7, 7)), *_norm("bn1", 64)]
    channels = 64
    for stage, (blocks, width) in enumerate(((3, 64), (4, 128), (6, 256), (3, 512)), start=1):
        for block in range(blocks):
            prefix = f"layer{stage}.{block}"
            expanded = 4 * width
            shapes = ((width, channels, 1, 1), (width, width, 3, 3), (expanded, width, 1, 1))
            for index, shape in enumerate(shapes, start=1):
                out += [(f"{prefix}.conv{index}.weight", shape), *_norm(f"{prefix}.bn{index}", shape[0])]
            if block == 0:
                out += [(f"{prefix}.downsample.0.weight", (expanded, channels, 1, 1))]
                out += _norm(f"{prefix}.downsample.1", expanded)
            channels = expanded
    return out + _dense("fc", 1000, 2048)


def vgg16() -> ParameterList:
    """Return the parameters of torchvision's ``vgg16``: 138,357,544 values (Simonyan and Zisserman 2014)."""
    out: ParameterList = []
    channels = 3
    indices = (0, 2, 5, 7, 10, 12, 14, 17, 19, 21, 24, 26, 28)
    widths = (64, 64, 128, 128, 256, 256, 256, 512, 512, 512, 512, 512, 512)
    for index, width in zip(indices, widths, strict=True):
        out += _dense(f"features.{index}", width, channels, 3, 3)
        channels = width
    for index, (rows, columns) in ((0, (4096, 25088)), (3, (4096, 4096)), (6, (1000, 4096))):
        out += _dense(f"classifier.{index}", rows, columns)
    return out


def bert_base() -> ParameterList:
    """Return the parameters of transformers' ``BertModel`` for bert-base-uncased, pooler included: 109,482,240 values."""
    hidden, inner = 768, 3072
    out: ParameterList = [
        ("embeddings.word_embeddings.weight", (30522, hidden)),
        ("embeddings.position_embeddings.weight", (512, hidden)),
        ("embeddings.token_type_embeddings.weight", (2, hidden)),
        *_norm("embeddings.LayerNorm", hidden),
    ]
    for layer in range(12):
        prefix = f"encoder.layer.{layer}"
        for part in ("query", "key", "value"):
            out += _dense(f"{prefix}.attention.self.{part}", hidden, hidden)
        out += _dense(f"{prefix}.attention.output.dense", hidden, hidden)
        out += _norm(f"{prefix}.attention.output.LayerNorm", hidden)
        out += _dense(f"{prefix}.intermediate.dense", inner, hidden)
        out += _dense(f"{prefix}.output.dense", hidden, inner)
        out += _norm(f"{prefix}.output.LayerNorm", hidden)
    return out + _dense("pooler.dense", hidden, hidden)


def gpt2_small() -> ParameterList:
    """Return the parameters of transformers' ``GPT2LMHeadModel`` for gpt2, tied head counted once: 124,439,808 values.

    Its linear layers keep their weights as (inputs, outputs), as the published checkpoint does.
    """
    hidden = 768
    out: ParameterList = [("wte.weight", (50257, hidden)), ("wpe.weight", (1024, hidden))]
    for layer in range(12):
        prefix = f"h.{layer}"
        out += _norm(f"{prefix}.ln_1", hidden)
        out += _transposed(f"{prefix}.attn.c_attn", hidden, 3 * hidden)
        out += _transposed(f"{prefix}.attn.c_proj", hidden, hidden)
        out += _norm(f"{prefix}.ln_2", hidden)
        out += _transposed(f"{prefix}.mlp.c_fc", hidden, 4 * hidden)
        out += _transposed(f"{prefix}.mlp.c_proj", 4 * hidden, hidden)
    return out + _norm("ln_f", hidden)


MODELS: dict[str, Callable[[], ParameterList]] = {
    "LeNet": lenet,
    "ResNet-50": resnet50,
    "VGG-16": vgg16,
    "BERT-base": bert_base,
    "GPT-2 small": gpt2_small,
}


def total_numel(parameters: ParameterList) -> int:
    """Return the number of values in a parameter list."""
    return sum(math.prod(shape) for _, shape in parameters)


def _dense(name: str, *shape: int) -> ParameterList:
    """A weight of ``shape`` and a bias of its first dimension (linear layers and convolutions)."""
    return [(f"{name}.weight", shape), (f"{name}.bias", shape[:1])]


def _transposed(name: str, inputs: int, outputs: int) -> ParameterList:
    return [(f"{name}.weight", (inputs, outputs)), (f"{name}.bias", (outputs,))]


def _norm(name: str, width: int) -> ParameterList:
    return [(f"{name}.weight", (width,)), (f"{name}.bias", (width,))]
