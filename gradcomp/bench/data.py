"""Read real images: MNIST-style IDX files from a folder, or scikit-learn's digits.

IDX is the file format of MNIST: two zero bytes, a type byte (0x08 = unsigned byte), the number of
dimensions, one big-endian u32 per dimension, then the values. A file with missing or extra bytes is
rejected, and no memory is allocated by a number that was read from the file.
"""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

IMAGE_SIZE = 28
NUM_CLASSES = 10
TRAIN_FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte")
TEST_FILES = ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
_UNSIGNED_BYTE = 0x08
_DIGITS_MAX = 16.0


@dataclass(frozen=True)
class ImageData:
    """Images in `(n, 1, 28, 28)` float32, standardised, and labels in `(n,)` int64."""

    name: str  # for tables
    note: str  # one sentence on where the images come from and what was done to them
    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor


def load(folder: Path | None) -> ImageData:
    """Load the four IDX files of a folder, plain or .gz, or (None) scikit-learn's digits.

    Raises:
        FileNotFoundError: the folder or one of its four files does not exist.
        ValueError: a file is not what its name says, or images and labels do not match.
    """
    if folder is None:
        return load_digits()
    if not folder.is_dir():
        raise FileNotFoundError(
            f"--data {folder}: no such folder; give the folder that holds {TRAIN_FILES[0]}[.gz]"
        )
    train, test = _read_pair(folder, TRAIN_FILES), _read_pair(folder, TEST_FILES)
    counts = f"{len(train[1])} images for training, {len(test[1])} for test"
    return _standardised(folder.resolve().name, f"IDX files in {folder}: {counts}", train, test)


def load_digits() -> ImageData:
    """Load scikit-learn's 1797 digits of 8x8 pixels, upsampled to 28x28; 450 are for test."""
    from sklearn.datasets import load_digits as sklearn_digits
    from sklearn.model_selection import train_test_split

    bunch = sklearn_digits()
    labels = torch.as_tensor(bunch.target, dtype=torch.int64)
    train, test = train_test_split(
        np.arange(len(labels)), test_size=0.25, random_state=0, stratify=bunch.target
    )
    small = torch.as_tensor(bunch.images, dtype=torch.float32).unsqueeze(1) / _DIGITS_MAX
    images = torch.nn.functional.interpolate(
        small, size=(IMAGE_SIZE, IMAGE_SIZE), mode="bilinear", align_corners=False
    )
    note = (
        f"scikit-learn digits, 8x8 images upsampled to 28x28 (bilinear): {len(train)} for training,"
        f" {len(test)} for test; --data DIR takes MNIST or Fashion-MNIST"
    )
    parts = [(images[chosen], labels[chosen]) for chosen in (train, test)]
    return _standardised("digits", note, *parts)


def read_plain(path: Path) -> bytes:
    """Return a file's bytes, unzipped if its name ends in .gz; ValueError if it is not gzip."""
    raw = path.read_bytes()
    if path.suffix != ".gz":
        return raw
    try:
        return gzip.decompress(raw)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{path}: not a whole gzip file ({error}); fetch it again") from error


def read_idx(path: Path) -> NDArray[np.uint8]:
    """Read an IDX file of unsigned bytes, plain or .gz, into an array of the header's dimensions.

    Raises:
        FileNotFoundError, ValueError: no such file; wrong type, truncated, or trailing bytes.
    """
    raw = read_plain(path)
    if len(raw) < 4 or raw[:2] != b"\0\0":
        raise ValueError(
            f"{path}: not an IDX file: it starts with {raw[:4].hex() or 'nothing'}, not with 0000"
        )
    kind, ndim = raw[2:4]
    header_nbytes = 4 + 4 * ndim
    for is_wrong, why in (
        (kind != _UNSIGNED_BYTE, f"IDX type 0x{kind:02x} is not supported, only 0x08"),
        (ndim not in (1, 3), f"{ndim} dimensions; labels have 1 and images have 3"),
        (len(raw) < header_nbytes, f"truncated inside the header of {header_nbytes} bytes"),
    ):
        if is_wrong:
            raise ValueError(f"{path}: {why}")
    dims: tuple[int, ...] = struct.unpack_from(f">{ndim}I", raw, 4)
    wanted, have = math.prod(dims), len(raw) - header_nbytes
    if have != wanted:
        what = "truncated" if have < wanted else "trailing bytes"
        raise ValueError(
            f"{path}: {what}: the header says {dims} = {wanted} bytes, the file has {have}"
        )
    return np.frombuffer(raw, dtype=np.uint8, offset=header_nbytes).reshape(dims)


def _read_pair(folder: Path, stems: tuple[str, str]) -> tuple[Tensor, Tensor]:
    paths = []
    for stem in stems:
        found = [file for file in (folder / stem, folder / f"{stem}.gz") if file.is_file()]
        if not found:
            raise FileNotFoundError(
                f"{folder} holds neither {stem} nor {stem}.gz; it must hold the four files of"
                " MNIST's names"
            )
        paths.append(found[0])
    images_path, labels_path = paths
    images, labels = read_idx(images_path), read_idx(labels_path)
    size, shape = IMAGE_SIZE, images.shape
    highest = int(labels.max(initial=0))
    counts = f"has {len(images)} images but {labels_path} has {len(labels)} labels"
    for is_wrong, path, why in (
        (shape[1:] != (size, size), images_path, f"dimensions {shape}; {size}x{size} are needed"),
        (labels.ndim != 1, labels_path, f"{labels.ndim} dimensions; labels have 1"),
        (len(images) != len(labels), images_path, counts),
        (len(labels) == 0, labels_path, "holds no samples"),
        (highest >= NUM_CLASSES, labels_path, f"label {highest} is outside 0..{NUM_CLASSES - 1}"),
    ):
        if is_wrong:
            raise ValueError(f"{path}: {why}")
    scaled = torch.from_numpy(images.astype(np.float32) / np.float32(255.0)).unsqueeze(1)
    return scaled, torch.from_numpy(labels.astype(np.int64))


def _standardised(
    name: str, note: str, train: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor]
) -> ImageData:
    mean, std = float(train[0].mean()), float(train[0].std(correction=0))
    if std == 0.0:
        raise ValueError(
            f"{name}: every pixel of the training images is {mean}; there is nothing to learn from"
        )
    train_images, test_images = ((images - mean) / std for images, _ in (train, test))
    return ImageData(name, note, train_images, train[1], test_images, test[1])
