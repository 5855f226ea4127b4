"""Parameters and forward FLOPs of published models, computed without torchvision, transformers or
weights.

Parameters have the order of the published implementation's ``named_parameters()``, because
gradcomp's random numbers depend on the index of a parameter, and scale groups and shards on its
shape.

A multiply-add counts as two FLOPs. A weight matrix or convolution of n values costs 2 n at every
position to which it is applied (an output pixel, a token). Attention costs 4 S H per token and
layer, for S tokens of width H. Biases, normalisation, activations and embedding look-ups are not
counted. A backward pass costs as much as two forward passes.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from gradcomp.arguments import suggestion

Tensors = list[tuple[str, tuple[int, ...], float]]  # name, shape, forward FLOPs of one sample

BERT_TOKENS = 128  # per sample: most of BERT's pre-training (Devlin et al. 2018, appendix A.2)
GPT2_TOKENS = 1024
HIDDEN = 768  # hidden size of BERT-base and GPT-2 small

# ---- published models ----------------------------------------------------------------------------


def _layer(
    name: str, *shape: int, at: int = 1, more: float = 0.0, bias: int | None = None
) -> Tensors:
    """Return weight and bias (`bias` long; None: the first dimension) of a layer that is applied at
    `at` positions of a sample; `more` FLOPs are added.
    """
    flops = at * 2.0 * math.prod(shape) + more
    return [(f"{name}.weight", shape, flops), (f"{name}.bias", (bias or shape[0],), 0.0)]


def _norm(name: str, width: int) -> Tensors:
    return [(f"{name}.weight", (width,), 0.0), (f"{name}.bias", (width,), 0.0)]


def _lenet() -> Tensors:
    """`gradcomp.bench.models.LeNet`: 1,256,080 values (Wen et al. 2017)."""
    return [
        *_layer("conv1", 20, 1, 5, 5, at=28 * 28),
        *_layer("conv2", 50, 20, 5, 5, at=14 * 14),
        *_layer("fc1", 500, 2450),
        *_layer("fc2", 10, 500),
    ]


def _resnet50() -> Tensors:
    """torchvision's ``resnet50``: 25,557,032 values (He et al. 2015). The 3x3 convolution of a
    stage's first block halves the resolution.
    """
    out, channels = [*_layer("conv1", 64, 3, 7, 7, at=112 * 112)[:1], *_norm("bn1", 64)], 64
    for stage, (blocks, width) in enumerate(((3, 64), (4, 128), (6, 256), (3, 512)), start=1):
        expanded, side = 4 * width, 56 >> (stage - 1)
        for block in range(blocks):
            prefix = f"layer{stage}.{block}"
            before = 2 * side if block == 0 and stage > 1 else side
            rows = (before, width, channels, 1), (side, width, width, 3), (side, expanded, width, 1)
            for index, (sides, wide, inputs, size) in enumerate(rows, start=1):
                weight, _ = _layer(f"{prefix}.conv{index}", wide, inputs, size, size, at=sides**2)
                out += [weight, *_norm(f"{prefix}.bn{index}", wide)]
            if block == 0:
                out += _layer(f"{prefix}.downsample.0", expanded, channels, 1, 1, at=side**2)[:1]
                out += _norm(f"{prefix}.downsample.1", expanded)
            channels = expanded
    return out + _layer("fc", 1000, 2048)


def _vgg16() -> Tensors:
    """torchvision's ``vgg16``: 138,357,544 values (Simonyan and Zisserman 2014). Pooling halves the
    resolution, 224 x 224 at first, after each group of convolutions.
    """
    out, channels, index = Tensors(), 3, 0
    for pools, widths in enumerate(((64,) * 2, (128,) * 2, (256,) * 3, (512,) * 3, (512,) * 3)):
        for width in widths:
            out += _layer(f"features.{index}", width, channels, 3, 3, at=(224 >> pools) ** 2)
            channels, index = width, index + 2  # a ReLU follows
        index += 1  # a pool follows
    for index, rows, columns in ((0, 4096, 25088), (3, 4096, 4096), (6, 1000, 4096)):
        out += _layer(f"classifier.{index}", rows, columns)
    return out


def _bert_base() -> Tensors:
    """transformers' ``BertModel`` for bert-base-uncased, pooler included: 109,482,240 values."""
    inner, tokens = 4 * HIDDEN, BERT_TOKENS
    out: Tensors = [
        ("embeddings.word_embeddings.weight", (30522, HIDDEN), 0.0),
        ("embeddings.position_embeddings.weight", (512, HIDDEN), 0.0),
        ("embeddings.token_type_embeddings.weight", (2, HIDDEN), 0.0),
        *_norm("embeddings.LayerNorm", HIDDEN),
    ]
    attention = 4.0 * tokens**2 * HIDDEN  # scores and their product with the values
    for layer in range(12):
        prefix = f"encoder.layer.{layer}"
        for part in ("query", "key", "value"):
            out += _layer(f"{prefix}.attention.self.{part}", HIDDEN, HIDDEN, at=tokens)
        name = f"{prefix}.attention.output"
        out += _layer(f"{name}.dense", HIDDEN, HIDDEN, at=tokens, more=attention)
        out += _norm(f"{name}.LayerNorm", HIDDEN)
        out += _layer(f"{prefix}.intermediate.dense", inner, HIDDEN, at=tokens)
        out += _layer(f"{prefix}.output.dense", HIDDEN, inner, at=tokens)
        out += _norm(f"{prefix}.output.LayerNorm", HIDDEN)
    return out + _layer("pooler.dense", HIDDEN, HIDDEN)


def _gpt2_small() -> Tensors:
    """transformers' ``GPT2LMHeadModel`` for gpt2, head tied: 124,439,808 values. Weights have the
    shape (inputs, outputs), as in the checkpoint.
    """
    tokens, attention = GPT2_TOKENS, 4.0 * GPT2_TOKENS**2 * HIDDEN
    head = _layer("wte", 50257, HIDDEN, at=tokens)[:1]
    out: Tensors = [*head, ("wpe.weight", (1024, HIDDEN), 0.0)]
    for layer in range(12):
        prefix = f"h.{layer}"
        out += _norm(f"{prefix}.ln_1", HIDDEN)
        for name, inputs, outputs, more in (
            ("attn.c_attn", HIDDEN, 3 * HIDDEN, 0.0),
            ("attn.c_proj", HIDDEN, HIDDEN, attention),
            ("mlp.c_fc", HIDDEN, 4 * HIDDEN, 0.0),
            ("mlp.c_proj", 4 * HIDDEN, HIDDEN, 0.0),
        ):
            out += _norm(f"{prefix}.ln_2", HIDDEN) if name == "mlp.c_fc" else []
            out += _layer(f"{prefix}.{name}", inputs, outputs, at=tokens, more=more, bias=outputs)
    return out + _norm("ln_f", HIDDEN)


MODELS: dict[str, tuple[Callable[[], Tensors], str]] = {  # tensors, and a sample in words
    "LeNet": (_lenet, "image of 28 x 28"),
    "ResNet-50": (_resnet50, "image of 224 x 224"),
    "VGG-16": (_vgg16, "image of 224 x 224"),
    "BERT-base": (_bert_base, f"sequence of {BERT_TOKENS} tokens"),
    "GPT-2 small": (_gpt2_small, f"sequence of {GPT2_TOKENS} tokens"),
}

# ---- models by name, shapes or file --------------------------------------------------------------


@dataclass(frozen=True)
class Model:
    """Parameters and FLOPs of a model.

    Attributes:
        name: name in tables.
        parameters: (name, shape) of every parameter, in the order of ``named_parameters()``.
        flops: FLOPs of a forward pass of one sample, for each parameter.
        sample: a sample in words, such as "image of 28 x 28".
    """

    name: str
    parameters: tuple[tuple[str, tuple[int, ...]], ...]
    flops: tuple[float, ...]
    sample: str

    @property
    def numel(self) -> int:
        """Number of values of all parameters."""
        return sum(math.prod(shape) for _, shape in self.parameters)

    @property
    def forward_flops(self) -> float:
        """FLOPs of a forward pass of one sample."""
        return sum(self.flops)


def find_model(name: str) -> Model:
    """Return a published model by its name or the beginning of it, which does not end within a
    number; only letters (in any case) and digits are compared.

    Raises:
        ValueError: no model, or more than one, has this name.
    """
    plain = {re.sub(r"[^a-z0-9]", "", known.lower()): known for known in MODELS}
    wanted = re.sub(r"[^a-z0-9]", "", name.lower())
    begins = re.compile(rf"{wanted}(?!(?<=\d)\d)").match if wanted else lambda _: None
    hits = [wanted] if wanted in plain else [k for k in plain if begins(k)]
    if len(hits) != 1:
        names = f"{', '.join(MODELS)}{suggestion(name, MODELS)}"
        raise ValueError(f"unknown model {name!r}; there are {names}")
    known = plain[hits[0]]
    make, sample = MODELS[known]
    tensors = make()
    parameters = tuple((name, shape) for name, shape, _ in tensors)
    return Model(known, parameters, tuple(flops for *_, flops in tensors), sample)


def own_model(name: str, parameters: Sequence[tuple[str, Sequence[int]]]) -> Model:
    """Return a model with these parameters; a forward pass takes two FLOPs per value and sample.

    Args:
        name: name in tables.
        parameters: (name, shape) of every parameter, in the order of ``named_parameters()``.

    Raises:
        ValueError: there are no parameters, an entry is not (name, shape), or a dimension is not a
            positive integer.
    """
    listed: list[tuple[str, tuple[int, ...]]] = []
    for entry in parameters:
        if not (isinstance(entry, (list, tuple)) and len(entry) == 2 and isinstance(entry[0], str)):
            raise ValueError(f"shapes must be a list of [name, [dimensions]], got {entry!r}")
        key, shape = entry
        if not isinstance(shape, (list, tuple)) or not all(type(d) is int and d > 0 for d in shape):
            raise ValueError(
                f"the shape of {key!r} must be a list of positive integers, got {shape!r}"
            )
        listed.append((key, tuple(shape)))
    if not listed:
        raise ValueError("shapes must name at least one parameter, got none")
    return Model(name, tuple(listed), tuple(2.0 * math.prod(s) for _, s in listed), "sample")


def load_shapes(path: Path) -> Model:
    """Return the model described by a JSON file such as ``[["fc.weight", [500, 2450]], ...]``.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is not JSON, or does not contain such a list.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(found, list):
        kind = type(found).__name__
        text = f"{path} must hold a list of [name, [dimensions]], got {kind}"
        raise ValueError(text)  # noqa: TRY004
    return own_model(path.stem, found)
