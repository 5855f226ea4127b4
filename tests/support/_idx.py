"""IDX files as MNIST's, for tests of what reads them."""

import gzip
import struct

import numpy as np

from gradcomp.bench.data import TEST_FILES, TRAIN_FILES


def idx(dims, body, magic=b"\0\0\x08"):
    return magic + bytes([len(dims)]) + struct.pack(f">{len(dims)}I", *dims) + body


def images_bytes(count):
    return np.random.default_rng(0).integers(0, 256, count * 28 * 28, dtype=np.uint8).tobytes()


def write_folder(folder, *, train=6, test=3, compress=()):
    """Write four valid files; names in `compress` get .gz."""
    for (images, labels), count in ((TRAIN_FILES, train), (TEST_FILES, test)):
        for name, raw in (
            (images, idx((count, 28, 28), images_bytes(count))),
            (labels, idx((count,), bytes(i % 10 for i in range(count)))),
        ):
            if name in compress:
                (folder / f"{name}.gz").write_bytes(gzip.compress(raw))
            else:
                (folder / name).write_bytes(raw)
    return folder
