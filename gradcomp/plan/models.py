"""Parameter lists and forward FLOPs of published models, by arithmetic: no torchvision, no
transformers, no weights.

A list is ``[(name, shape), ...]`` in the order of the published implementation's
``named_parameters()``, because the position of a parameter is part of gradcomp's random numbers and
its shape decides scale groups and shards.

FLOPs are two a multiply-add. A weight matrix or convolution of n values costs 2 n at every position
it is applied to (an output pixel, a token), attention 4 S H a token and layer for S tokens of width
H; biases, normalisation, activations and embedding look-ups are left out, and a backward pass costs
two forwards.
"""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

ParameterList = list[tuple[str, tuple[int, ...]]]

BERT_TOKENS = (
    128  # of a sample: the length of most of BERT's pre-training (Devlin et al. 2018, appendix A.2)
)
GPT2_TOKENS = 1024
HIDDEN = 768  # of both


def lenet() -> ParameterList:
    """Return the parameters of `gradcomp.bench.models.LeNet`: 1,256,080 values (Wen et al.
    2017).
    """
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
                out += [
                    (f"{prefix}.conv{index}.weight", shape),
                    *_norm(f"{prefix}.bn{index}", shape[0]),
                ]
            if block == 0:
                out += [(f"{prefix}.downsample.0.weight", (expanded, channels, 1, 1))]
                out += _norm(f"{prefix}.downsample.1", expanded)
            channels = expanded
    return out + _dense("fc", 1000, 2048)


def vgg16() -> ParameterList:
    """Return the parameters of torchvision's ``vgg16``: 138,357,544 values (Simonyan and
    Zisserman 2014).
    """
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
    """Return the parameters of transformers' ``BertModel`` for bert-base-uncased, pooler
    included: 109,482,240 values.
    """
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
    """Return the parameters of transformers' ``GPT2LMHeadModel`` for gpt2, tied head counted once:
    124,439,808 values.

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


@dataclass(frozen=True)
class Model:
    """What the planner knows of a model.

    Attributes:
        name: for tables.
        parameters: (name, shape) in the order of ``named_parameters()``.
        flops: of a forward pass of one sample, by parameter.
        sample: what a sample is.
    """

    name: str
    parameters: tuple[tuple[str, tuple[int, ...]], ...]
    flops: tuple[float, ...]
    sample: str

    @property
    def numel(self) -> int:
        """Number of values."""
        return total_numel(self.parameters)

    @property
    def forward_flops(self) -> float:
        """FLOPs of a forward pass of one sample."""
        return sum(self.flops)


def find_model(name: str) -> Model:
    """Return a published model; case, spaces, dots and dashes in its name do not matter, nor does a
    missing end.

    Raises:
        ValueError: no such model, or several.
    """
    wanted = _plain(name)
    hits = [n for n in MODELS if _plain(n) == wanted] or [
        n for n in MODELS if wanted and _plain(n).startswith(wanted)
    ]
    if len(hits) != 1:
        near = difflib.get_close_matches(wanted, [_plain(n) for n in MODELS], n=1)
        hint = "".join(f"; did you mean {n}?" for n in MODELS if _plain(n) in near)
        raise ValueError(f"unknown model {name!r}; there are {', '.join(MODELS)}{hint}")
    parameters = MODELS[hits[0]]()
    positions, sample = _WORK[hits[0]]
    flops = tuple(positions(n) * 2.0 * math.prod(s) if len(s) > 1 else 0.0 for n, s in parameters)
    extra = _ATTENTION.get(hits[0])
    if extra is not None:
        ending, each = extra
        flops = tuple(
            f + each * n.endswith(ending) for f, (n, _) in zip(flops, parameters, strict=True)
        )
    return Model(hits[0], tuple(parameters), flops, sample)


def own_model(
    name: str, parameters: Sequence[tuple[str, Sequence[int]]], forward_flops: float | None = None
) -> Model:
    """Return a model of one's own.

    Args:
        name: for tables.
        parameters: (name, shape) in the order of ``named_parameters()``.
        forward_flops: of one sample; None: two a value. Shared out in proportion to the values of a
            parameter.

    Raises:
        ValueError: no parameters, an entry that is no (name, shape), a dimension that is no
            positive integer, FLOPs that are not positive.
    """
    listed: ParameterList = []
    for entry in parameters:
        if not (isinstance(entry, (list, tuple)) and len(entry) == 2 and isinstance(entry[0], str)):
            raise ValueError(f"shapes must be a list of [name, [dimensions]], got {entry!r}")
        shape = entry[1]
        if not isinstance(shape, (list, tuple)) or not all(type(d) is int and d > 0 for d in shape):
            raise ValueError(
                f"the shape of {entry[0]!r} must be a list of positive integers, got {shape!r}"
            )
        listed.append((entry[0], tuple(shape)))
    if not listed:
        raise ValueError("shapes must name at least one parameter, got none")
    numel = total_numel(listed)
    flops = 2.0 * numel if forward_flops is None else forward_flops
    if not 0 < flops < math.inf:
        raise ValueError(f"forward_flops must be positive and finite, got {forward_flops!r}")
    return Model(
        name, tuple(listed), tuple(flops * math.prod(s) / numel for _, s in listed), "sample"
    )


def load_shapes(path: Path) -> Model:
    """Return the model that a JSON file describes: ``[["fc.weight", [500, 2450]], ...]``.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not JSON, or not such a list.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(found, list):
        raise ValueError(  # noqa: TRY004
            f"{path} must hold a list of [name, [dimensions]], got {type(found).__name__}"
        )
    return own_model(path.stem, found)


def total_numel(parameters: Sequence[tuple[str, tuple[int, ...]]]) -> int:
    """Return the number of values in a parameter list."""
    return sum(math.prod(shape) for _, shape in parameters)


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


# ---- positions a sample: how often a weight is applied -------------------------------------------


def _lenet_positions(name: str) -> int:
    return {"conv1.weight": 28 * 28, "conv2.weight": 14 * 14}.get(name, 1)


def _resnet50_positions(name: str) -> int:
    """224 x 224 images; torchvision halves the resolution in the 3x3 convolution of a stage's
    first block.
    """
    if name == "conv1.weight":
        return 112 * 112
    found = re.match(r"layer(\d)\.(\d)\.(conv1)?", name)
    if found is None:
        return 1
    stage, block, first = int(found[1]), int(found[2]), found[3] is not None
    side = 56 >> (stage - 1)
    return (2 * side) ** 2 if first and block == 0 and stage > 1 else side**2


def _vgg16_positions(name: str) -> int:
    """224 x 224 images, halved by a pool after features 2, 7, 14, 21 and 28."""
    found = re.match(r"features\.(\d+)", name)
    return (224 >> sum(int(found[1]) > pool for pool in (2, 7, 14, 21))) ** 2 if found else 1


def _bert_positions(name: str) -> int:
    return 1 if name.startswith("pooler") else BERT_TOKENS * name.startswith("encoder")


def _gpt2_positions(name: str) -> int:
    return 0 if name == "wpe.weight" else GPT2_TOKENS  # wte is the head too


_WORK: dict[str, tuple[Callable[[str], int], str]] = {
    "LeNet": (_lenet_positions, "image of 28 x 28"),
    "ResNet-50": (_resnet50_positions, "image of 224 x 224"),
    "VGG-16": (_vgg16_positions, "image of 224 x 224"),
    "BERT-base": (_bert_positions, f"sequence of {BERT_TOKENS} tokens"),
    "GPT-2 small": (_gpt2_positions, f"sequence of {GPT2_TOKENS} tokens"),
}
_ATTENTION = {  # scores and their product with the values, on the weights that follow them
    "BERT-base": ("attention.output.dense.weight", 4.0 * BERT_TOKENS**2 * HIDDEN),
    "GPT-2 small": ("attn.c_proj.weight", 4.0 * GPT2_TOKENS**2 * HIDDEN),
}

# ---- pieces of the lists -------------------------------------------------------------------------


def _dense(name: str, *shape: int) -> ParameterList:
    """A weight of ``shape`` and a bias of its first dimension (linear layers and convolutions)."""
    return [(f"{name}.weight", shape), (f"{name}.bias", shape[:1])]


def _transposed(name: str, inputs: int, outputs: int) -> ParameterList:
    return [(f"{name}.weight", (inputs, outputs)), (f"{name}.bias", (outputs,))]


def _norm(name: str, width: int) -> ParameterList:
    return [(f"{name}.weight", (width,)), (f"{name}.bias", (width,))]
