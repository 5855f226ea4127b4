"""Workloads: data, model, loss of a minibatch, held-out measure, and usual fp32 learning rates."""

from __future__ import annotations

import io
import itertools
import math
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from gradcomp.bench.data import ImageData, load, read_plain
from gradcomp.bench.models import ByteGPT, LeNet, SmallResNet

HELD_OUT_SHARE = 20  # one of every 20 blocks of a text is held out, spread over the whole text
BLOCK = 1 << 15  # bytes
CONTEXT = 128  # context length of a GPT, in bytes
Tick = Callable[[], None]


def cosine(done: float) -> float:
    """Return the factor of a cosine schedule, from 1 to 0.1; `done` is the share of steps done."""
    return 0.1 + 0.45 * (1 + math.cos(math.pi * done))


def square_root(done: float) -> float:
    """Return the factor of a schedule of power 0.5, from 1 to 0 (TernGrad's LeNet)."""
    return math.sqrt(max(0.0, 1.0 - done))


@dataclass(frozen=True)
class Settings:
    """Training settings of a workload."""

    steps: int  # steps of a whole run
    batch: int  # samples of one worker's minibatch
    clip: float | None  # largest global norm of the averaged gradient; None does not clip
    warm_up: float  # share of the steps in which the learning rate rises from zero
    rates: dict[str, float]  # usual fp32 learning rates by optimizer; the first is the default
    shared: bool = False  # `batch` is the number of samples of all workers together
    # factor on the learning rate, of the share of steps done since the warm-up
    decay: Callable[[float], float] = cosine

    def batch_of(self, workers: int) -> int:
        """Return the samples of a worker's minibatch; ValueError if workers cannot share one."""
        if self.shared and self.batch % workers:
            raise ValueError(
                f"{workers} workers cannot share a batch of {self.batch}: not a multiple"
            )
        return self.batch // workers if self.shared else self.batch

    def rate_at(self, step: int, steps: int) -> float:
        """Return the factor on the learning rate at a step: linear warm-up, then `decay`."""
        rising = round(steps * self.warm_up)
        if step < rising:
            return (step + 1) / rising
        return self.decay((step - rising) / (steps - rising))


@dataclass
class Workload:
    """Model and data to train; subclasses define what `test` measures."""

    name: str
    settings: Settings
    model: Callable[[], nn.Module]  # weights are drawn from torch's default generator

    measure: ClassVar[str] = ""  # name and unit of the result of `test`, "" for none
    lower_is_better: ClassVar[bool] = True

    def check(self, optimizer: str, workers: int) -> None:
        """Raise ValueError if the optimizer has no rate, or workers cannot share a batch."""
        rates = self.settings.rates
        if optimizer not in rates:
            raise ValueError(f"{self.name} has no rate for {optimizer}; it has {', '.join(rates)}")
        self.settings.batch_of(workers)

    def data_crc(self) -> str:
        """Return a checksum of the data, 8 hexadecimal digits."""
        crc = 0
        for name in ("train_set", "test_set"):
            data = getattr(self, name, ())
            for tensor in (data,) if isinstance(data, Tensor) else data:
                crc = zlib.crc32(tensor.contiguous().numpy().data, crc)
        return f"{crc:08x}"

    def minibatch(self, generator: torch.Generator, count: int) -> Any:
        """Return `count` samples drawn by `generator`."""
        raise NotImplementedError

    def minibatches(self, seed: int, rank: int, world_size: int, count: int) -> Iterator[Any]:
        """Yield a rank's minibatches of `count` samples, without end."""
        generator = torch.Generator().manual_seed(1 + 1000 * seed + rank)
        while True:
            yield self.minibatch(generator, count)

    def loss(self, model: nn.Module, minibatch: Any) -> Tensor:
        """Return the mean loss of a minibatch, which is on the model's device."""
        raise NotImplementedError

    def test(self, model: nn.Module, *, quick: bool = False, tick: Tick = lambda: None) -> float:
        """Return the measure on held-out data, `quick` on a part; `tick` is a heartbeat."""
        return math.nan


@dataclass
class Text(Workload):
    """Text for a byte GPT; `train_set` and `test_set` are `(n, BLOCK)` uint8."""

    train_set: Tensor
    test_set: Tensor

    measure, lower_is_better = "held-out loss, nats a byte", True

    def minibatch(self, generator: torch.Generator, count: int) -> Tensor:
        length = CONTEXT + 1
        rows = torch.randint(len(self.train_set), (count,), generator=generator)
        starts = torch.randint(BLOCK - length + 1, (count, 1), generator=generator)
        return self.train_set[rows[:, None], starts + torch.arange(length)].long()

    def loss(self, model: nn.Module, minibatch: Tensor) -> Tensor:
        return cross_entropy(model(minibatch[:, :-1]).flatten(0, 1), minibatch[:, 1:].flatten())

    def test(self, model: nn.Module, *, quick: bool = False, tick: Tick = lambda: None) -> float:
        length, total = CONTEXT + 1, 0.0
        device = next(model.parameters(), self.test_set).device
        windows = self.test_set[:, : BLOCK // length * length].reshape(-1, length)
        windows = windows[:: 32 if quick else 4]
        for part in torch.split(windows, 64):
            tick()
            total += float(self.loss(model, part.long().to(device))) * len(part)
        return total / len(windows)


@dataclass
class Images(Workload):
    """Image classification; sets are pairs of images, `(n, channels, height, width)` float32, and
    labels, `(n,)` int64. `flips` mirrors and shifts training images by up to 4 pixels.
    """

    train_set: tuple[Tensor, Tensor]
    test_set: tuple[Tensor, Tensor]
    flips: bool = False

    measure, lower_is_better = "test accuracy, %", False

    def minibatch(self, generator: torch.Generator, count: int) -> tuple[Tensor, Tensor]:
        images, labels = self.train_set
        chosen = torch.randint(len(labels), (count,), generator=generator)
        x, y = images[chosen], labels[chosen]
        if self.flips:
            mirrored = torch.rand(count, generator=generator) < 0.5
            x = torch.where(mirrored[:, None, None, None], x.flip(3), x)
            across, down = torch.randint(-4, 5, (2,), generator=generator).tolist()
            x = torch.roll(x, (across, down), (2, 3))
        return x, y

    def loss(self, model: nn.Module, minibatch: tuple[Tensor, Tensor]) -> Tensor:
        return cross_entropy(model(minibatch[0]), minibatch[1])

    def test(self, model: nn.Module, *, quick: bool = False, tick: Tick = lambda: None) -> float:
        (x, y), right = self.test_set, 0.0
        device = next(model.parameters(), x).device
        if quick:  # chosen at random, because the classes of some files alternate
            order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
            some = order[: max(1000, len(y) // 10)]
            x, y = x[some], y[some]
        for images, labels in zip(torch.split(x, 100), torch.split(y, 100), strict=True):
            tick()
            right += float((model(images.to(device)).argmax(1).cpu() == labels).sum())
        return 100.0 * right / len(y)


class Epochs(Images):
    """Images in epochs: all ranks together use each image once, in an order given by the seed; the
    last incomplete minibatch is dropped. Images have the memory format channels_last, with which
    CPUs take a third less time for LeNet's convolutions.
    """

    def minibatches(
        self, seed: int, rank: int, world_size: int, count: int
    ) -> Iterator[tuple[Tensor, Tensor]]:
        images, labels = self.train_set
        batch = count * world_size
        if len(labels) < batch:
            raise ValueError(
                f"batch {batch} is larger than the training set of {len(labels)} images"
            )
        generator = torch.Generator().manual_seed(seed)
        while True:
            order = torch.randperm(len(labels), generator=generator)
            for chosen in torch.split(order[: len(order) - len(order) % batch], batch):
                mine = chosen[rank::world_size]
                yield images[mine].to(memory_format=torch.channels_last), labels[mine]


@dataclass
class Noise(Workload):
    """Model on random inputs of a `shape`, to measure time and bytes without a task."""

    shape: tuple[int, ...]

    def minibatch(self, generator: torch.Generator, count: int) -> Tensor:
        return torch.randn(count, *self.shape, generator=generator)

    def loss(self, model: nn.Module, minibatch: Any) -> Tensor:
        out: Tensor = model(minibatch)
        return out.square().mean()


def mlp() -> nn.Module:
    """Return an MLP of 25,214,986 values, 16.8 million of them in one tensor."""
    return nn.Sequential(
        nn.Linear(2048, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 10)
    )


def random(numel: int) -> nn.Module:
    """Return layers of 1024 x 1024, the last one smaller, with about `numel` values."""
    side = 1024
    layers = [nn.Linear(side, side, bias=False) for _ in range(numel // side**2)]
    rest = numel % side**2 // side
    return nn.Sequential(*layers, *([nn.Linear(side, rest, bias=False)] if rest else []))


def _gpt(folder: Path, name: str, steps: int, rate: float, **shape: int) -> Workload:
    files = [folder / name for name in ("prose.txt.gz", "prose.txt")]
    file = next((file for file in files if file.exists()), None)
    if file is None:
        raise FileNotFoundError(
            f"--data {folder}: no prose.txt or prose.txt.gz there: any English text of 5 MB or more"
        )
    rates = {"adamw": rate, "lamb": 1e-2, "sgd": 0.3, "adagrad": 1e-2, "muon": 2e-2}
    make = partial(ByteGPT, context=CONTEXT, **shape)
    raw = read_plain(file)
    whole = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
    blocks = whole[: len(raw) // BLOCK * BLOCK].view(-1, BLOCK)
    held = torch.arange(len(blocks)) % HELD_OUT_SHARE == HELD_OUT_SHARE - 1
    if not held.any():
        least = HELD_OUT_SHARE * BLOCK
        raise ValueError(f"{file}: {len(raw)} bytes are too few: at least {least} are needed")
    settings = Settings(steps, 4, 1.0, 0.05, rates)
    return Text(name, settings, make, blocks[~held], blocks[held])


def _lenet(folder: Path, name: str, settings: Settings, part: str) -> Workload:
    """Return LeNet on the images in ``folder/part``."""
    return Images(name, settings, LeNet, *_sets(load(folder / part)))


def _lenet_demo(folder: Path | None, name: str) -> Workload:
    """Return LeNet with weights in channels_last, on images of a folder (None: digits)."""
    make = lambda: LeNet().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return Epochs(name, DEMO, make, *_sets(load(folder)))


def _sets(data: ImageData) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    train, test = (data.train_images, data.train_labels), (data.test_images, data.test_labels)
    return train, test


def _resnet(folder: Path, name: str, width: int) -> Workload:
    file = folder / "cifar10_jpeg.npz"
    if not file.exists():
        raise FileNotFoundError(f"--data {folder}: no cifar10_jpeg.npz there")
    rates = {"sgd": 0.1, "adamw": 2e-3, "lamb": 1e-2, "adagrad": 1e-2, "muon": 2e-2}
    settings = Settings(2000, 32, None, 0.05, rates)
    try:
        with np.load(file) as stored:
            (x, y), test = (_jpegs(stored, part) for part in ("train", "test"))
    except (zipfile.BadZipFile, zlib.error, EOFError, KeyError, ValueError, OSError) as error:
        raise ValueError(f"{file}: not a whole file of CIFAR-10's images ({error})") from error
    mean, deviation = x.mean((0, 2, 3), keepdim=True), x.std((0, 2, 3), keepdim=True)
    train, test = ((x - mean) / deviation, y), ((test[0] - mean) / deviation, test[1])
    return Images(name, settings, lambda: SmallResNet(width), train, test, flips=True)


def _jpegs(stored: Any, part: str) -> tuple[Tensor, Tensor]:
    """Return images, `(n, 3, 32, 32)` float32 in 0..1, and labels, `(n,)` int64."""
    from PIL import Image

    raw, offsets = stored[f"{part}_jpeg"].tobytes(), stored[f"{part}_offset"]
    pictures = [
        np.asarray(Image.open(io.BytesIO(raw[a:b]))) for a, b in itertools.pairwise(offsets)
    ]
    x = torch.from_numpy(np.stack(pictures)).permute(0, 3, 1, 2).float() / 255
    return x, torch.from_numpy(stored[f"{part}_label"].astype(np.int64))


LENET = Settings(
    1000, 32, None, 0.0, {"sgd": 0.02, "adamw": 1e-3, "lamb": 1e-2, "adagrad": 1e-2, "muon": 1e-2}
)
# settings of `bench demo`
DEMO = Settings(250, 64, None, 0.0, {"sgd": 0.03}, shared=True, decay=square_root)
# settings of TernGrad's paper
TERNGRAD = Settings(10_000, 64, None, 0.0, {"sgd": 0.01}, shared=True, decay=square_root)
NOISE = Settings(30, 16, None, 0.0, {"sgd": 1e-3, "adamw": 1e-4})
# functions of the data folder and the name that return a workload
WORKLOADS: dict[str, Callable[[Any, str], Workload]] = {
    "lenet": partial(_lenet, settings=LENET, part="fashion-mnist"),
    "lenet-demo": _lenet_demo,
    "lenet-terngrad": partial(_lenet, settings=TERNGRAD, part="mnist"),
    "lenet-noise": lambda _, name: Noise(name, replace(NOISE, batch=64), LeNet, (1, 28, 28)),
    "resnet": partial(_resnet, width=16),
    "resnet-11m": partial(_resnet, width=64),
    "gpt-1m": partial(_gpt, steps=2000, rate=2e-3, width=128, layers=4, heads=4),
    "gpt-6m": partial(_gpt, steps=1000, rate=1e-3, width=256, layers=8, heads=8),
    "gpt-25m": partial(_gpt, steps=300, rate=6e-4, width=512, layers=8, heads=8),
    "mlp": lambda _, name: Noise(name, NOISE, mlp, (2048,)),
}


def find(name: str, folder: Path | None, batch: int = 0) -> Workload:
    """Return the workload `name`, or ``random:N`` (N values without a task).

    `batch`: samples of a rank's minibatch; 0: the workload's own number.

    Raises:
        ValueError: the name is unknown, or N is too small.
        FileNotFoundError: the data is not in the folder.
    """
    word, _, count = name.partition(":")
    if word == "random":
        if not count.isdigit() or int(count) < 1024:
            raise ValueError(f"random:N takes a number of values of at least 1024, got {name!r}")
        settings = replace(NOISE, rates=dict(reversed(NOISE.rates.items())))  # AdamW's by default
        found: Workload = Noise(name, settings, lambda: random(int(count)), (1024,))
    elif name in WORKLOADS:
        found = WORKLOADS[name](folder, name)
    else:
        raise ValueError(
            f"no workload named {name!r}; there are {', '.join(WORKLOADS)} and random:N"
        )
    if batch:
        found.settings = replace(found.settings, batch=batch, shared=False)
    return found
