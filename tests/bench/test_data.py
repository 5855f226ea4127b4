"""IDX files are read whole or refused with the file and the reason; the default digits are the
same everywhere.
"""

import gzip

import numpy as np
import pytest
import torch
from _idx import idx, images_bytes, write_folder

from gradcomp.bench.data import TEST_FILES, TRAIN_FILES, load, read_idx


@pytest.mark.parametrize(
    "compress", [(), (TRAIN_FILES[0], TEST_FILES[1])], ids=["plain", "some .gz"]
)
def test_folder_is_read(tmp_path, compress):
    data = load(write_folder(tmp_path, compress=compress))
    assert data.train_images.shape == (6, 1, 28, 28) and data.train_images.dtype == torch.float32
    assert data.test_images.shape == (3, 1, 28, 28)
    assert data.train_labels.tolist() == [0, 1, 2, 3, 4, 5]
    assert data.train_labels.dtype == torch.int64
    pixels = np.frombuffer(images_bytes(6), dtype=np.uint8).reshape(6, 1, 28, 28) / 255.0
    expected = (pixels - pixels.mean()) / pixels.std()
    np.testing.assert_allclose(data.train_images.numpy(), expected, atol=1e-5)
    assert str(tmp_path) in data.note and "6 images" in data.note


WHOLE = idx((2, 28, 28), images_bytes(2))
BROKEN_FILES = {
    "empty": (b"", "not an IDX file"),
    "three bytes": (WHOLE[:3], "not an IDX file"),
    "other magic": (b"PK" + WHOLE[2:], "not an IDX file"),
    "float32 values": (
        idx((2, 28, 28), images_bytes(2), magic=b"\0\0\x0d"),
        "type 0x0d is not supported",
    ),
    "no dimensions": (b"\0\0\x08\0", "0 dimensions"),
    "255 dimensions": (b"\0\0\x08\xff" + bytes(2000), "255 dimensions"),
    "cut in the header": (WHOLE[:11], "truncated inside the header"),
    "one byte short": (WHOLE[:-1], "truncated: the header says"),
    "one byte long": (WHOLE + b"\0", "trailing bytes"),
    "lying count": (b"\0\0\x08\x03" + b"\xff" * 12 + bytes(100), "truncated: the header says"),
}


@pytest.mark.parametrize("compressed", [False, True], ids=["plain", "gz"])
@pytest.mark.parametrize("name", BROKEN_FILES)
def test_broken_file_is_refused(tmp_path, name, compressed):
    raw, reason = BROKEN_FILES[name]
    path = tmp_path / ("x.gz" if compressed else "x")
    path.write_bytes(gzip.compress(raw) if compressed else raw)
    with pytest.raises(ValueError, match=reason) as caught:
        read_idx(path)
    assert str(path) in str(caught.value)


def test_every_damage_of_a_gzip_file_is_refused(tmp_path):
    whole = gzip.compress(idx((3,), b"\1\2\3"), mtime=0)
    path = tmp_path / "labels.gz"
    for cut in range(len(whole)):
        path.write_bytes(whole[:cut])
        with pytest.raises(ValueError, match=str(path)):
            read_idx(path)
    # bytes 4-9 of the gzip header are a time and hints that no reader checks
    for at in range(10, len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :])
        with pytest.raises(ValueError, match=str(path)):
            read_idx(path)
    path.write_bytes(WHOLE)  # not compressed
    with pytest.raises(ValueError, match="not a whole gzip file"):
        read_idx(path)


SIX = idx((6, 28, 28), images_bytes(6))
BROKEN_FOLDERS = {
    "counts differ": (TRAIN_FILES[1], idx((5,), bytes(5)), "6 images but .* 5 labels"),
    "label 10": (TRAIN_FILES[1], idx((6,), bytes([0, 1, 2, 3, 4, 10])), r"label 10 is outside 0"),
    "labels where images belong": (TRAIN_FILES[0], idx((6,), bytes(6)), "28x28 are needed"),
    "images where labels belong": (TRAIN_FILES[1], SIX, "labels have 1"),
    "other image size": (TEST_FILES[0], idx((3, 28, 27), bytes(3 * 28 * 27)), "28x28 are needed"),
    "all pixels equal": (TRAIN_FILES[0], idx((6, 28, 28), bytes(6 * 784)), "nothing to learn from"),
}


@pytest.mark.parametrize("name", BROKEN_FOLDERS)
def test_files_that_do_not_fit_together_are_refused(tmp_path, name):
    file, raw, reason = BROKEN_FOLDERS[name]
    write_folder(tmp_path)
    (tmp_path / file).write_bytes(raw)
    with pytest.raises(ValueError, match=reason):
        load(tmp_path)


def test_empty_sets_are_refused(tmp_path):
    with pytest.raises(ValueError, match="holds no samples"):
        load(write_folder(tmp_path, test=0))


def test_missing_folder_and_file_say_what_to_give(tmp_path):
    with pytest.raises(FileNotFoundError, match="no such folder; give the folder that holds"):
        load(tmp_path / "absent")
    write_folder(tmp_path)
    (tmp_path / TEST_FILES[1]).unlink()
    with pytest.raises(
        FileNotFoundError, match=rf"neither {TEST_FILES[1]} nor {TEST_FILES[1]}\.gz"
    ):
        load(tmp_path)


@pytest.mark.slow
def test_digits_are_split_by_class_and_say_that_they_are_upsampled():
    data, again = load(None), load(None)
    assert data.name == "digits" and "upsampled to 28x28" in data.note
    train, test = data.train_images, data.test_images
    assert (train.shape, test.shape) == ((1347, 1, 28, 28), (450, 1, 28, 28))
    assert torch.bincount(data.test_labels, minlength=10).min() >= 43
    assert abs(float(train.mean())) < 1e-5 and abs(float(train.std()) - 1) < 1e-3
    seen = {image.numpy().tobytes() for image in train}
    assert not any(image.numpy().tobytes() in seen for image in test), "a digit is in both sets"
    assert (again.name, again.note) == (data.name, data.note)
    assert torch.equal(again.train_images, train)
    assert torch.equal(again.test_labels, data.test_labels)
