"""Every layout from tiny files; the real sets where HOLDFAST_DATA names a directory with them."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import pickle
import struct
import subprocess
import sys
import tarfile
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

import holdfast
from holdfast_lab.workloads.data import (
    DATASETS,
    DataMissing,
    digits,
    fashion_mnist,
    generated_documents,
    generated_ratings,
    load_dataset,
    load_first,
    read_idx,
    resize,
)
from holdfast_lab.workloads.data.base import held_out

REAL = os.environ.get("HOLDFAST_DATA")


def write_idx(path: Path, array: np.ndarray, *, kind: int = 8, cut: int = 0) -> Path:
    """Write ``array`` as an idx file that lacks its last ``cut`` bytes, packed if the name ends with .gz."""
    head = bytes((0, 0, kind, array.ndim)) + struct.pack(f">{array.ndim}I", *array.shape)
    content = (head + array.tobytes())[: len(head) + array.nbytes - cut]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def write_mnist(folder: Path, ending: str = ".gz") -> Path:
    rng = np.random.default_rng(0)
    for part, count in (("train", 5), ("t10k", 3)):
        images = rng.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        images[0, 0, :2] = 0, 255
        write_idx(folder / f"{part}-images-idx3-ubyte{ending}", images)
        write_idx(folder / f"{part}-labels-idx1-ubyte{ending}", np.arange(count, dtype=np.uint8))
    return folder


def write_cifar(folder: Path, classes: int, records: int = 3) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    train = [f"data_batch_{n}.bin" for n in range(1, 6)] if classes == 10 else ["train.bin"]
    test = "test_batch.bin" if classes == 10 else "test.bin"
    for number, name in enumerate([*train, test]):
        table = np.full((records, 3072 + (classes == 100)), number * 10, np.uint8)
        labels = np.zeros((records, 1), np.uint8) + (number if classes == 10 else 99)
        (folder / name).write_bytes(np.concatenate([table[:, :-3072], labels, table[:, -3072:]], axis=1).tobytes())
    return folder


def write_imagenet(folder: Path) -> Path:
    from PIL import Image

    for part, count in (("train", 3), ("val", 2)):
        for shade, name in ((0, "n01440764"), (255, "n01443537")):
            place = folder / part / name
            place.mkdir(parents=True)
            for number in range(count):
                Image.new("L" if number else "RGB", (40, 30 + number), shade if number else (shade,) * 3).save(
                    place / f"{name}_{number}.JPEG"
                )
    return folder


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode("latin-1"))
    return path


def covertype_rows(count: int) -> str:
    rng = np.random.default_rng(0)
    rows = np.concatenate([rng.integers(0, 3000, (count, 10)), rng.integers(0, 2, (count, 44))], axis=1)
    return "".join(",".join(map(str, [*row, 1 + number % 7])) + "\n" for number, row in enumerate(rows))


SGML = """<!DOCTYPE lewis SYSTEM "lewis.dtd">
<REUTERS TOPICS="YES" LEWISSPLIT="{part}" CGISPLIT="TRAINING-SET" OLDID="1" NEWID="{n}">
<DATE>26-FEB-1987</DATE>
<TOPICS>{topics}</TOPICS>
<PLACES><D>usa</D></PLACES>
<TEXT>&#2;
<TITLE>Heading{letter}</TITLE>
<DATELINE>    PLACE{letter}, March 1 - </DATELINE><BODY>{body} &lt;AT&amp;T> said.
 Reuter
&#3;</BODY></TEXT>
</REUTERS>
"""


def sgml(*documents: tuple[str, str, str]) -> str:
    return "".join(
        SGML.format(
            part=part, n=n, letter="abcdefgh"[n], body=body, topics="".join(f"<D>{t}</D>" for t in topics.split())
        )
        for n, (part, topics, body) in enumerate(documents)
    )


REUTERS = sgml(
    ("TRAIN", "earn", "profit profit share"),
    ("TRAIN", "grain", "wheat"),
    ("TRAIN", "earn grain", "twotopics"),
    ("TRAIN", "tin", "onlytraining"),
    ("TRAIN", "", "notopic"),
    ("TEST", "earn", "profit unseen"),
    ("TEST", "grain", "wheat"),
    ("NOT-USED", "earn", "unused"),
)


def words_of(documents, number):
    """Return the words of a document and how often each occurs."""
    row = documents[number][0]
    return {documents.vocabulary[place]: int(row[place]) for place in row.nonzero().flatten().tolist()}


# Images


def test_digits_are_scaled_images_of_every_class():
    train, test = digits()

    assert (len(train), len(test)) == (1497, 300)
    x, y = train.tensors
    assert x.shape == (1497, 1, 8, 8)
    assert (x.dtype, y.dtype) == (torch.float32, torch.int64)
    assert (x.min(), x.max()) == (0, 1)
    assert set(y.tolist()) == set(test.tensors[1].tolist()) == set(range(10))


def test_digits_are_held_out_in_proportion():
    train, test = digits()

    share = test.tensors[1].bincount() / (train.tensors[1].bincount() + test.tensors[1].bincount())

    assert (share - 1 / 6).abs().max() < 0.005


def test_the_digits_that_jobs_of_tests_load_quickly_are_those_of_scikit_learn():
    script = (
        "import hashlib, sys; from sklearn.datasets import load_digits; d, (x, y) = load_digits(), load_digits(return_X_y=True)\n"
        "print('scipy' in sys.modules, *(hashlib.sha256(a.tobytes()).hexdigest() for a in (d.images, d.target, x, y)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)

    real, (images, labels) = load_digits(), load_digits(return_X_y=True)
    arrays = (real.images, real.target, images, labels)
    assert done.stdout.split() == ["False", *(hashlib.sha256(array.tobytes()).hexdigest() for array in arrays)]


def test_every_digit_is_in_one_set_and_they_are_those_of_scikit_learn():
    images, labels = load_digits(return_X_y=True)
    ours = [torch.cat([x.flatten(1) * 16, y.unsqueeze(1)], dim=1) for x, y in (part.tensors for part in digits())]

    expected = np.column_stack([images, labels])

    assert sorted(map(tuple, torch.cat(ours).tolist())) == sorted(map(tuple, expected.tolist()))


def test_digits_are_the_same_if_scikit_learn_moves_its_file(monkeypatch):
    usual = digits()
    monkeypatch.setattr(Path, "is_file", lambda _: False)

    for one, other in zip(usual, digits(), strict=True):
        assert torch.equal(one.tensors[0], other.tensors[0])
        assert torch.equal(one.tensors[1], other.tensors[1])


def test_digits_without_scikit_learn_say_how_to_get_them(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)

    with pytest.raises(holdfast.ConfigError, match=r"pip install 'holdfast\[lab\]'"):
        digits()


@pytest.mark.parametrize(("name", "folder"), [("fashion", "fashion-mnist"), ("mnist", "MNIST/raw"), ("mnist", ".")])
@pytest.mark.parametrize("ending", ["", ".gz"])
def test_idx_files_are_found_packed_or_not_there_or_below(tmp_path, name, folder, ending):
    write_mnist(tmp_path / folder, ending)

    dataset = load_dataset(name, tmp_path)

    assert dataset.train.tensors[0].shape == (5, 1, 28, 28)
    assert (dataset.train.tensors[0].min(), dataset.train.tensors[0].max()) == (0, 1)
    assert dataset.test.tensors[1].tolist() == [0, 1, 2]
    assert (dataset.shape, dataset.num_classes, dataset.split) == ((1, 28, 28), 10, "published split")


@pytest.mark.parametrize("name", ["a", "a.gz"])
def test_idx_keeps_every_byte(tmp_path, name):
    array = np.arange(24, dtype=np.uint8).reshape(2, 3, 4)

    assert np.array_equal(read_idx(write_idx(tmp_path / name, array), dimensions=3), array)


@pytest.mark.timeout(20)
def test_a_pipe_in_the_place_of_a_file_is_refused(tmp_path):
    for number in range(1, 6):
        os.mkfifo(tmp_path / f"data_batch_{number}.bin")
    with pytest.raises(holdfast.ConfigError, match=r"data_batch_1\.bin: it is no file"):
        load_dataset("cifar10", tmp_path)


def test_a_file_of_another_kind_is_refused(tmp_path):
    path = write_idx(tmp_path / "a.gz", np.zeros((2, 2), np.uint8), kind=13)

    with pytest.raises(
        holdfast.ConfigError, match=r"a\.gz is not an idx file: it starts with 00 00 0d 02, expected 00 00 08 02"
    ):
        read_idx(path, dimensions=2)


@pytest.mark.parametrize(("cut", "held"), [(3, "7"), (-2, "more than 10")])
def test_too_little_or_too_much_data_is_refused(tmp_path, cut, held):
    path = write_idx(tmp_path / "a", np.zeros((2, 5), np.uint8), cut=max(cut, 0))
    path.write_bytes(path.read_bytes() + bytes(max(-cut, 0)))

    with pytest.raises(holdfast.ConfigError, match=rf"a has {held} bytes of data, expected 10 for shape \(2, 5\)"):
        read_idx(path, dimensions=2)


def test_a_header_without_its_sizes_is_refused(tmp_path):
    (tmp_path / "a.gz").write_bytes(gzip.compress(bytes((0, 0, 8, 1, 0))))

    with pytest.raises(holdfast.ConfigError, match="its header has 5 bytes, expected 8"):
        read_idx(tmp_path / "a.gz", dimensions=1)


@pytest.mark.parametrize("name", ["a", "a.gz"])
def test_what_a_hostile_header_promises_is_not_allocated(tmp_path, name):
    content = bytes((0, 0, 8, 3)) + struct.pack(">3I", 0xFFFFFFFF, 28, 28) + bytes(1000)
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    tracemalloc.start()

    try:
        with pytest.raises(holdfast.ConfigError, match="has 1000 bytes of data, expected 3367254359280"):
            read_idx(tmp_path / name, dimensions=3)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()

    assert peak < 8 << 20


def test_what_unpacks_to_more_than_its_header_says_is_not_unpacked(tmp_path):
    (tmp_path / "a.gz").write_bytes(gzip.compress(bytes((0, 0, 8, 1, 0, 0, 0, 10)) + bytes(64 << 20), 1))
    tracemalloc.start()

    try:
        with pytest.raises(holdfast.ConfigError, match="has more than 10 bytes"):
            read_idx(tmp_path / "a.gz", dimensions=1)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()

    assert peak < 8 << 20


@pytest.mark.parametrize("keep", [0, 1, 12, -20, -9, -4])
def test_a_file_cut_anywhere_is_refused(tmp_path, keep):
    path = write_idx(tmp_path / "a.gz", np.arange(200, dtype=np.uint8))
    path.write_bytes(path.read_bytes()[:keep])

    with pytest.raises(holdfast.ConfigError, match=r"a\.gz"):
        read_idx(path, dimensions=1)


def test_a_file_that_is_not_compressed_is_refused(tmp_path):
    (tmp_path / "a.gz").write_bytes(b"not a gzip file")

    with pytest.raises(holdfast.ConfigError, match=r"cannot read .*a\.gz as a gzip file"):
        read_idx(tmp_path / "a.gz", dimensions=1)


def test_a_flipped_bit_in_the_compressed_data_is_found(tmp_path):
    path = write_idx(tmp_path / "a.gz", np.random.default_rng(0).integers(0, 256, 1000, dtype=np.uint8))
    damaged = bytearray(path.read_bytes())
    damaged[500] ^= 1
    path.write_bytes(damaged)

    with pytest.raises(holdfast.ConfigError, match=r"a\.gz"):
        read_idx(path, dimensions=1)


def test_images_without_labels_of_their_own_are_refused(tmp_path):
    write_idx(write_mnist(tmp_path) / "t10k-labels-idx1-ubyte.gz", np.zeros(4, np.uint8))

    with pytest.raises(holdfast.ConfigError, match=r"has 3 images, but .* has 4 labels"):
        fashion_mnist(tmp_path)


@pytest.mark.parametrize(("name", "folder"), [("cifar10", "cifar-10-batches-bin"), ("cifar100", "cifar-100-binary")])
def test_cifar_is_read_from_its_binary_version(tmp_path, name, folder):
    classes = int(name[5:])
    write_cifar(tmp_path / folder, classes)

    dataset = load_dataset(name, tmp_path)

    x, y = dataset.train.tensors
    assert x.shape == ((15, 3, 32, 32) if classes == 10 else (3, 3, 32, 32))
    assert y.tolist() == ([0] * 3 + [1] * 3 + [2] * 3 + [3] * 3 + [4] * 3 if classes == 10 else [99] * 3)  # fine ones
    assert x[-1, 0, 0, 0] == pytest.approx((40 if classes == 10 else 0) / 255)
    assert len(dataset.test) == 3


def test_the_channels_of_cifar_are_planes(tmp_path):
    write_cifar(tmp_path, 100)
    (tmp_path / "test.bin").write_bytes(bytes((0, 7)) + bytes([51]) * 1024 + bytes([102]) * 1024 + bytes([255]) * 1024)

    image, label = load_dataset("cifar100", tmp_path).test[0]

    assert image.mean((1, 2)).tolist() == pytest.approx([0.2, 0.4, 1.0])
    assert label == 7


class Trap:
    """Runs when it is unpickled."""

    def __reduce__(self):
        return Path.touch, (Path(os.environ["TRAP"]),)


@pytest.mark.parametrize(
    ("name", "file"), [("cifar10", "cifar-10-batches-py/data_batch_1"), ("cifar100", "cifar-100-python/train")]
)
@pytest.mark.parametrize("above", [True, False])
def test_the_pickled_cifar_is_refused_and_not_unpickled(tmp_path, monkeypatch, name, file, above):
    monkeypatch.setenv("TRAP", str(tmp_path / "sprung"))
    path = tmp_path / file
    path.parent.mkdir()
    path.write_bytes(pickle.dumps(Trap()))

    with pytest.raises(
        holdfast.ConfigError, match=rf"which is not read for safety: .*cifar-{name[5:]}-binary\.tar\.gz"
    ):
        load_dataset(name, tmp_path if above else path.parent)

    assert not (tmp_path / "sprung").exists()


def test_a_cifar_file_that_is_cut_or_of_another_set_is_refused(tmp_path):
    path = write_cifar(tmp_path, 10) / "data_batch_3.bin"
    whole = path.read_bytes()

    for damaged, message in (
        (whole[:-1], "has 9218 bytes, expected whole records of 3073"),
        (b"", "has 0 bytes"),
        (bytes([200]) + whole[1:], "a label must be from 0 to 9, row 1 has 200"),
    ):
        path.write_bytes(damaged)
        with pytest.raises(holdfast.ConfigError, match=rf"data_batch_3\.bin.*{message}"):
            load_dataset("cifar10", tmp_path)
    path.unlink()
    with pytest.raises(DataMissing, match=r"data_batch_3\.bin does not exist.*cifar-10-binary"):
        load_dataset("cifar10", tmp_path)


def test_imagenet_decodes_when_an_image_is_asked_for(tmp_path):
    dataset = load_dataset("imagenet", write_imagenet(tmp_path / "imagenet").parent, size=16, limit=5)

    images, labels = dataset.train[:]
    assert (images.shape, images.dtype, labels.dtype) == ((5, 3, 16, 16), torch.float32, torch.int64)
    assert torch.equal(images.amax((1, 2, 3)).round().long(), labels)  # the second class is white
    assert torch.equal(dataset.train[[3, 1]][0], images[[3, 1]])
    assert torch.equal(dataset.train[3][0], images[3])
    assert (len(dataset.train), len(dataset.test), dataset.num_classes) == (5, 4, 2)
    assert set(dataset.train[:3][1].tolist()) == {0, 1}  # not sorted by class


def test_imagenet_scales_the_middle_of_an_image(tmp_path):
    from PIL import Image

    write_imagenet(tmp_path)
    picture = np.zeros((64, 128), np.uint8)
    picture[:, 36:92] = 255  # the middle 7/8 of the middle square
    picture[:4] = picture[-4:] = 0
    for path in (tmp_path / "val").glob("*/*"):
        path.unlink()
        Image.fromarray(picture).save(path.with_suffix(".png"))

    image = load_dataset("imagenet", tmp_path, size=28).test[0][0]

    assert image[:, 1:-1, 1:-1].min() == 1  # at the edge the filter looks a pixel further
    assert image.min() > 0.5


def test_imagenet_without_pillow_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)

    with pytest.raises(holdfast.ConfigError, match=r"Pillow, which is not installed: pip install 'holdfast\[lab\]'"):
        load_dataset("imagenet", tmp_path)


def test_an_image_that_is_damaged_or_too_large_is_named(tmp_path):
    dataset = load_dataset("imagenet", write_imagenet(tmp_path))
    paths = sorted((tmp_path / "train").glob("*/*"))
    whole = paths[0].read_bytes()
    size = whole.index(b"\xff\xc0") + 5
    huge = whole[:size] + struct.pack(">HH", 60000, 60000) + whole[size + 4 :]

    for content, message in (
        (b"", r"cannot decode .*n0144\d+_\d\.JPEG: cannot identify"),
        (whole[: len(whole) // 2], r"cannot decode .*n0144\d+_\d\.JPEG: .*[Tt]runcated"),
        (huge, r"cannot decode .*n0144\d+_\d\.JPEG: .*exceeds limit"),
    ):
        for path in paths:
            path.write_bytes(content)
        with pytest.raises(holdfast.ConfigError, match=message):
            dataset.train[0]


def test_validation_images_in_one_folder_are_refused(tmp_path):
    write_imagenet(tmp_path)
    for path in sorted((tmp_path / "val").glob("*/*")):
        path.rename(tmp_path / "val" / path.name)
    for place in (tmp_path / "val").glob("n*"):
        if place.is_dir():
            place.rmdir()

    with pytest.raises(
        holdfast.ConfigError,
        match=r"must have the same 2 class directories as train.*sort them into their classes first",
    ):
        load_dataset("imagenet", tmp_path)


@pytest.mark.parametrize("size", [28, 32, 5])
def test_images_are_scaled_and_keep_their_range(size):
    dataset = load_dataset("digits", size=size, channels=3, limit=7, test_limit=4)

    x, y = dataset.train[:]
    assert x.shape == (7, *dataset.shape) == (7, 3, size, size)
    assert dataset.test[:][0].shape == (4, 3, size, size)
    assert torch.equal(x[:, 0], x[:, 2])
    assert 0 <= x.min() < x.max() <= 1
    assert torch.equal(y, load_dataset("digits", limit=7).train[:][1])


def test_the_nearest_pixel_is_a_copy():
    part = load_dataset("digits", limit=3).train

    larger = resize(part, 32, mode="nearest")

    assert torch.equal(larger[:][0], part[:][0].repeat_interleave(4, 2).repeat_interleave(4, 3))


# Tables and ratings


@pytest.mark.parametrize("name", ["covtype.data", "covtype.data.gz", "covtype.20k.data.gz", "covtype.100k.csv.gz"])
def test_covertype_is_scaled_by_its_training_rows(tmp_path, name):
    path = write(tmp_path / "covtype" / name, covertype_rows(50))

    dataset = load_dataset("covertype", tmp_path)

    (x, y), (test_x, _) = dataset.train[:], dataset.test[:]
    assert (x.shape, x.dtype, y.dtype, len(test_x)) == ((40, 54), torch.float32, torch.int64, 10)
    assert torch.allclose(x[:, :10].mean(0), torch.zeros(10), atol=1e-5)
    assert torch.allclose(x[:, :10].std(0, correction=0), torch.ones(10), atol=1e-5)
    assert set(x[:, 10:].flatten().tolist()) == {0, 1}
    assert set(y.tolist()) | set(dataset.test[:][1].tolist()) == set(range(7))
    assert torch.equal(load_dataset("covertype", path).train[:][0], x)
    assert not torch.equal(load_dataset("covertype", path, seed=1).train[:][0], x)


def test_the_whole_of_covertype_is_divided_as_its_authors_did(tmp_path, monkeypatch):
    monkeypatch.setattr("holdfast_lab.workloads.data.tables._ALL_ROWS", 20)
    monkeypatch.setattr("holdfast_lab.workloads.data.tables._TRAINING_ROWS", 14)
    write(tmp_path / "covtype.data", covertype_rows(20))

    dataset = load_dataset("covertype", tmp_path)

    assert (len(dataset.train), len(dataset.test), dataset.split) == (14, 6, "published split")
    assert dataset.train[:][1].tolist() == [*range(7), *range(7)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no row of numbers"),
        ("1,2,3\n", "has 3 columns, expected 54 features and the class"),
        (covertype_rows(1), "has 1 samples, but at least 2"),
        (covertype_rows(3).replace(",3\n", ",9\n"), "a class must be from 1 to 7, row 3 has 9"),
        (covertype_rows(3) + "1,2", "is not the expected table"),
        ("hello\n", "is not the expected table: could not convert"),
    ],
)
def test_a_wrong_table_is_refused(tmp_path, text, message):
    write(tmp_path / "covtype.data", text)

    with pytest.raises(holdfast.ConfigError, match=rf"covtype\.data.*{message}"):
        load_dataset("covertype", tmp_path)


MOVIELENS = {
    "ml-100k/u.data": "196\t242\t3\t881250949\n7\t242\t5\t891717742\n7\t10\t1\t878887116\n",
    "ml-1m/ratings.dat": "196::242::3::978300760\n7::242::5::978302109\n7::10::1::978301968\n",
    "ml-latest-small/ratings.csv": "userId,movieId,rating,timestamp\r\n196,242,3.0,1\r\n7,242,5.0,2\r\n7,10,1.0,3\r\n",
    "movielens-latest-small/ratings.csv.gz": "userId,movieId,rating,timestamp\n196,242,3,1\n7,242,5,2\n7,10,1,3\n",
}


def triples(dataset):
    return sorted(tuple(row) for part in dataset for row in zip(*(column.tolist() for column in part[:]), strict=True))


@pytest.mark.parametrize("name", MOVIELENS)
def test_movielens_is_read_in_all_its_layouts(tmp_path, name):
    write(tmp_path / name, MOVIELENS[name])

    dataset = load_dataset("movielens", tmp_path)

    assert triples(dataset) == [(0, 0, 1.0), (0, 1, 5.0), (1, 1, 3.0)]
    assert [column.dtype for column in dataset.train[:]] == [torch.int64, torch.int64, torch.float32]
    assert (dataset.shape, len(dataset.train), dataset.num_classes) == ((2, 2), 2, 0)


def test_movielens_100k_is_divided_as_published(tmp_path):
    rows = MOVIELENS["ml-100k/u.data"].splitlines(keepends=True)
    write(tmp_path / "u.data", "".join(rows))
    write(tmp_path / "u1.base", "".join(rows[:2]))
    write(tmp_path / "u1.test", rows[2])

    dataset = load_dataset("movielens", tmp_path)

    assert dataset.split == "published split u1"
    assert dataset.test[0] == (0, 0, 1.0)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("ratings.csv", "user,film\n1,2\n", "must start with the line userId,movieId,rating"),
        ("ratings.dat", "1::2::9::3\n", "a rating must be from 0.5 to 5, row 1 has 9"),
        ("ratings.dat", "1::2::3\n1::2\n", "is not the expected table"),
        ("u.data", "1 2 nan 4\n", "a rating must be from 0.5 to 5, row 1 has nan"),
        ("u.data", "-1 2 3 4\n", "the number of a user must be from 0"),
    ],
)
def test_wrong_ratings_are_refused(tmp_path, name, text, message):
    write(tmp_path / name, text)

    with pytest.raises(holdfast.ConfigError, match=rf"{name}.*{message}"):
        load_dataset("movielens", tmp_path)


JESTER_TABLE = "2,-7.82,99,8.79\n1,99,99,-9.85\n3,0,1,2\n"
JESTER_RATINGS = [(0, 0, -7.82), (0, 2, 8.79), (1, 2, -9.85), (2, 0, 0.0), (2, 1, 1.0), (2, 2, 2.0)]


def zipped(path: Path, name: str, content: bytes) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr(name, content)


def test_jester_is_read_as_tables_as_triples_and_from_a_zip(tmp_path):
    text = "".join(f"{user + 1}\t\t{item + 5}\t\t{value}\n" for user, item, value in JESTER_RATINGS)
    write(tmp_path / "csv" / "jester-data-1.csv", JESTER_TABLE)
    write(tmp_path / "dat" / "jester_ratings.dat", text)
    for name, content in (("jester-data-1.csv", JESTER_TABLE), ("jester_ratings.dat", text)):
        (tmp_path / name[-3:] / "zip").mkdir()
        zipped(tmp_path / name[-3:] / "zip" / "jester_dataset_1_1.zip", f"x/{name}", content.encode())

    for folder in ("csv", "dat", "csv/zip", "dat/zip"):
        dataset = load_dataset("jester", tmp_path / folder)
        assert [(u, i, round(v, 2)) for u, i, v in triples(dataset)] == JESTER_RATINGS
        assert dataset.shape == (3, 3)


def test_the_users_of_several_jester_tables_follow_each_other(tmp_path):
    for number in (1, 2):
        write(tmp_path / f"jester-data-{number}.csv", JESTER_TABLE)

    dataset = load_dataset("jester", tmp_path)

    assert dataset.shape == (6, 3)
    assert len({(user, item) for user, item, _ in triples(dataset)}) == 12


@pytest.mark.parametrize("packed", [True, False])
def test_jester_as_an_excel_file_is_refused_with_what_to_do(tmp_path, packed):
    if packed:
        zipped(tmp_path / "jester_dataset_1_1.zip", "jester-data-1.xls", b"\xd0\xcf\x11\xe0")
    else:
        (tmp_path / "jester-data-1.xls").write_bytes(b"\xd0\xcf\x11\xe0")

    with pytest.raises(holdfast.ConfigError, match=r"jester-data-1\.xls is an Excel file.*save it as CSV"):
        load_dataset("jester", tmp_path)


def test_a_wrong_jester_file_is_refused(tmp_path):
    for text, message in (
        (JESTER_TABLE.replace("3,0", "2,0"), "row 3 says that 2 jokes were rated, but has 3 values"),
        (JESTER_TABLE.replace("8.79", "88"), "a rating must be from -10 to 10, row 1 has 88"),
    ):
        write(tmp_path / "jester-data-1.csv", text)
        with pytest.raises(holdfast.ConfigError, match=rf"jester-data-1\.csv.*{message}"):
            load_dataset("jester", tmp_path)
    write(tmp_path / "cut" / "jester_dataset_1_1.zip", "PK and no more")
    with pytest.raises(holdfast.ConfigError, match=r"cannot read .*1_1\.zip as a zip file"):
        load_dataset("jester", tmp_path / "cut")
    (tmp_path / "name").mkdir()
    zipped(tmp_path / "name" / "jester_dataset_1_1.zip", "x/\xfc.csv", b"")
    damaged = tmp_path / "name" / "jester_dataset_1_1.zip"
    damaged.write_bytes(damaged.read_bytes().replace("\xfc".encode(), b"\xeb{"))
    with pytest.raises(holdfast.ConfigError, match=r"cannot read .*1_1\.zip as a zip file.*codec can't decode"):
        load_dataset("jester", tmp_path / "name")


def test_made_up_ratings_are_of_low_rank_but_for_their_noise():
    exact = generated_ratings(users=40, items=30, rank=3, density=1, noise=0, seed=5)
    matrix = np.zeros((40, 30))
    for user, item, value in triples(exact):
        matrix[user, item] = value

    noisy = generated_ratings(users=40, items=30, rank=3, density=1, noise=0.5, seed=5)

    assert np.linalg.matrix_rank(matrix, tol=1e-4) == 3
    assert matrix.std() == pytest.approx(1, abs=0.3)
    difference = np.array(triples(noisy))[:, 2] - np.array(triples(exact))[:, 2]
    assert difference.std() == pytest.approx(0.5, abs=0.05)
    assert len({(user, item) for user, item, _ in triples(noisy)}) == 1200


# Documents and text


def test_newsgroups_are_counted_without_their_heads(tmp_path):
    root = tmp_path / "20news-bydate"
    for part in ("train", "test"):
        for group in ("alt.atheism", "sci.space"):
            text = f"From: someone@{group}\nSubject: secret\n\nThe {group[-5:]} {group[-5:]} of it, to\xe9."
            write(root / f"20news-bydate-{part}" / group / "51060", text)
            write(root / f"20news-bydate-{part}" / group / "51061", text + " the end")

    dataset = load_dataset("newsgroups", tmp_path)

    assert (len(dataset.train), len(dataset.test), dataset.num_classes) == (4, 4, 2)
    assert dataset.train.vocabulary == ("end", "heism", "space")  # "the" is in all, "of" is too short
    place = dataset.train.labels.tolist().index(1)
    assert words_of(dataset.train, place)["space"] == 2


def test_newsgroups_of_different_groups_are_refused(tmp_path):
    write(tmp_path / "20news-bydate-train" / "a" / "1", "h\n\nwords")
    write(tmp_path / "20news-bydate-test" / "b" / "1", "h\n\nwords")

    with pytest.raises(holdfast.ConfigError, match="must have posts of the same groups, but a is only in one"):
        load_dataset("newsgroups", tmp_path)


@pytest.mark.parametrize("layout", ["sgm", "gz", "xz"])
def test_reuters_keeps_documents_with_one_topic_that_both_parts_have(tmp_path, layout):
    if layout == "sgm":
        write(tmp_path / "reut2-000.sgm", REUTERS)
    else:
        with tarfile.open(tmp_path / f"reuters21578.tar.{layout}", f"w:{layout}") as archive:
            for name, content in (("README.txt", b"no"), ("reut2-000.sgm", REUTERS.encode())):
                member = tarfile.TarInfo(f"./reuters21578/{name}")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))

    dataset = load_dataset("reuters", tmp_path)

    assert (len(dataset.train), len(dataset.test), dataset.num_classes) == (2, 2, 2)
    assert dataset.train.labels.tolist() == dataset.test.labels.tolist() == [0, 1]
    assert words_of(dataset.train, 0) == {"profit": 2, "share": 1, "headinga": 1}
    assert words_of(dataset.test, 0) == {"profit": 1}  # what training has not is not counted


def test_reuters_that_is_cut_short_is_refused(tmp_path):
    write(tmp_path / "sgm" / "reut2-000.sgm", REUTERS[: len(REUTERS) - 300])
    with pytest.raises(holdfast.ConfigError, match=r"reut2-000\.sgm begins 8 documents, but only 7 are complete"):
        load_dataset("reuters", tmp_path / "sgm")

    with tarfile.open(tmp_path / "reuters21578.tar.xz", "w:xz") as archive:
        archive.add(tmp_path / "sgm" / "reut2-000.sgm", "reut2-000.sgm")
    whole = (tmp_path / "reuters21578.tar.xz").read_bytes()
    (tmp_path / "reuters21578.tar.xz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(holdfast.ConfigError, match=r"cannot read .*tar\.xz as a compressed archive"):
        load_dataset("reuters", tmp_path)


def test_the_vocabulary_is_of_the_words_in_the_most_documents(tmp_path):
    bodies = ("wheat rye", "wheat", "oats", "barley barley barley")  # what all texts hold is in more than half of them
    documents = [("TRAIN", "grain", body) for body in bodies]
    write(tmp_path / "reut2-000.sgm", sgml(*documents, ("TEST", "grain", "corn")))

    assert load_dataset("reuters", tmp_path, vocabulary=2).train.vocabulary == ("wheat", "barley")


def test_made_up_documents_can_be_told_apart_by_their_words():
    dataset = generated_documents(documents=120, topics=3, vocabulary=200, topic_spread=0.01, seed=2)
    (counts, labels), (test_counts, test_labels) = dataset.train[:], dataset.test[:]

    centres = torch.stack([counts[labels == topic].mean(0) for topic in range(3)])
    guessed = (test_counts @ torch.nn.functional.normalize(centres, dim=1).T).argmax(1)

    assert (len(labels), len(test_labels)) == (100, 20)
    assert counts.sum(1).mean() == pytest.approx(80, abs=4)
    assert (guessed == test_labels).float().mean() > 0.9


def test_documents_are_the_same_by_row_by_slice_and_by_token():
    part = generated_documents(documents=12, vocabulary=30, seed=1).train

    rows, labels = part[:]
    documents, words = part.tokens()

    again = torch.zeros_like(rows).index_put_((documents, words), torch.ones(len(words)), accumulate=True)
    assert torch.equal(again, rows)
    assert torch.equal(part[[4, 2]][0], rows[[4, 2]])
    assert (part[3][0].shape, part[3][1].shape) == ((30,), ())
    assert torch.equal(part.first(4)[:][0], rows[:4])
    assert torch.equal(part.first(4)[:][1], labels[:4])


def test_a_text_is_cut_into_blocks_that_predict_their_next_character(tmp_path):
    path = write(tmp_path / "tinyshakespeare" / "input.txt", "abcde" * 20)

    dataset = load_dataset("shakespeare", tmp_path, block=4)

    inputs, targets = dataset.train[:]
    assert (inputs.shape, inputs.dtype, dataset.num_classes) == ((22, 4), torch.int64, 5)
    assert inputs.flatten().tolist() == ([*range(5)] * 20)[:88]
    assert torch.equal(targets, (inputs + 1) % 5)
    assert len(dataset.test) == 2  # nine characters can be predicted, two blocks of four
    assert len(load_dataset("shakespeare", path, block=4).train) == 22


@pytest.mark.parametrize(
    ("content", "message"), [(b"\xff\xfe\x00", "is not UTF-8 text"), (b"short", "has 5 characters"), (b"", "has 0")]
)
def test_a_wrong_text_is_refused(tmp_path, content, message):
    (tmp_path / "input.txt").write_bytes(content)

    with pytest.raises(holdfast.ConfigError, match=rf"input\.txt.*{message}"):
        load_dataset("shakespeare", tmp_path)


# By name


@pytest.mark.parametrize("name", [name for name in DATASETS if name not in ("digits", "ratings", "documents")])
def test_missing_files_are_named_with_where_they_are_to_be_had(tmp_path, name):
    with pytest.raises(DataMissing, match="read from files: give their directory"):
        load_dataset(name)
    with pytest.raises(DataMissing, match=rf"is not in {tmp_path}: expected .* It is at http") as empty:
        load_dataset(name, tmp_path)
    with pytest.raises(DataMissing, match=r"cannot be read from .*nowhere, which is not a directory"):
        load_dataset(name, tmp_path / "nowhere")

    assert "\n" not in str(empty.value)


@pytest.mark.parametrize("name", ["digits", "ratings", "documents"])
def test_what_needs_no_files_is_the_same_each_time(name):
    one, same = (load_dataset(name, limit=40) for _ in range(2))

    assert len(one.train) == 40
    for a, b in zip((*one.train[:], *one.test[:]), (*same.train[:], *same.test[:]), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", ["ratings", "documents"])
def test_another_seed_makes_other_data(name):
    one, other = (load_dataset(name, seed=seed, limit=40).train[:][-1] for seed in (0, 1))

    assert not torch.equal(one, other)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: load_dataset("coco"), "dataset must be one of digits, fashion, .*, got 'coco'"),
        (lambda: load_dataset("digits", limit=0), "limit must be at least 1, got 0"),
        (lambda: load_dataset("digits", block=4), "block is for text, but the dataset digits is images: leave it out"),
        (lambda: load_dataset("ratings", size=4), "size is for images, but the dataset ratings is ratings"),
        (lambda: generated_ratings(density=0), "density above 0"),
        (lambda: generated_documents(topics=0), "at least 2 documents, 1 topic"),
        (lambda: resize(digits().train, 8, mode="cubic"), "mode must be bilinear or nearest, got 'cubic'"),
        (
            lambda: resize(resize(digits().train, channels=2), channels=3),
            "channels must be 2, as in the images, got 3",
        ),
    ],
)
def test_a_wrong_argument_is_answered_with_what_is_allowed(call, message):
    with pytest.raises(holdfast.ConfigError, match=message):
        call()


def test_a_stand_in_is_taken_for_what_is_missing_and_says_so(tmp_path):
    names = ("cifar10", "fashion", "digits")
    last = load_first(names, tmp_path, instead_of="CIFAR-10", limit=2)
    write_mnist(tmp_path / "fashion-mnist")
    second = load_first(names, tmp_path, instead_of="CIFAR-10", limit=2)
    write_cifar(tmp_path / "cifar-10-batches-bin", 10)
    wanted = load_first(names, tmp_path, instead_of="CIFAR-10", limit=2)

    assert last.describe().startswith(
        "scikit-learn's digits instead of CIFAR-10: 2 images of 1 x 8 x 8 for training, 300"
    )
    assert second.describe() == (
        "Fashion-MNIST instead of CIFAR-10: 2 images of 1 x 28 x 28 for training, 3 for testing, 10 classes; "
        f"published split; read from {tmp_path / 'fashion-mnist'}"
    )
    assert wanted.describe().startswith("CIFAR-10: 2 images of 3 x 32 x 32")


def test_no_stand_in_is_taken_for_what_is_damaged(tmp_path):
    (write_cifar(tmp_path, 10) / "test_batch.bin").write_bytes(b"short")

    with pytest.raises(holdfast.ConfigError, match=r"test_batch\.bin has 5 bytes"):
        load_first(("cifar10", "digits"), tmp_path, instead_of="CIFAR-10")


def test_a_random_split_loses_and_doubles_nothing():
    train, test = held_out(50, 0.2, 3, "here")

    assert len(test) == 10
    assert sorted([*train.tolist(), *test.tolist()]) == list(range(50))


@pytest.mark.parametrize("kind", ["documents", "imagenet"])
def test_a_session_trains_on_what_is_no_table_of_tensors(tmp_path, kind):
    if kind == "imagenet":
        dataset = load_dataset(kind, write_imagenet(tmp_path), size=8)
    else:
        dataset = load_dataset(kind, limit=30)
    inputs = int(np.prod(dataset.shape))
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(inputs, dataset.num_classes))
    session = holdfast.Session(model, torch.optim.SGD(model.parameters(), lr=0.1))

    seen = 0
    for step in session.steps(dataset.train, batch_size=5, epochs=1):
        for x, y in step:
            seen += len(y)
            step.backward(torch.nn.functional.cross_entropy(model(x), y))

    assert seen == len(dataset.train)


# The real sets


@pytest.mark.parametrize(
    ("name", "train", "test", "classes", "shape"),
    [
        ("fashion", 60000, 10000, 10, (1, 28, 28)),
        ("mnist", 60000, 10000, 10, (1, 28, 28)),
        ("cifar10", 50000, 10000, 10, (3, 32, 32)),
        ("cifar100", 50000, 10000, 100, (3, 32, 32)),
        ("imagenet", 1281167, 50000, 1000, (3, 224, 224)),
        ("covertype", (15120, 80000, 16000), (565892, 20000, 4000), 7, (54,)),
        ("movielens", None, None, 0, None),
        ("jester", None, None, 0, None),
        ("newsgroups", 11314, 7532, 20, (5000,)),
        ("reuters", 6532, 2568, 52, (5000,)),
        ("shakespeare", 7842, 871, 65, (128,)),
    ],
)
def test_a_real_set_has_its_published_size(name, train, test, classes, shape):
    if REAL is None:
        pytest.skip("HOLDFAST_DATA names no directory with datasets")
    try:
        dataset = load_dataset(name, Path(REAL))
    except DataMissing as missing:
        pytest.skip(str(missing))

    if name == "movielens":
        users, items = dataset.shape
        total = len(dataset.train) + len(dataset.test)
        assert (total, users, items) in {(100000, 943, 1682), (1000209, 6040, 3706), (100836, 610, 9724)}
    elif name == "jester":
        assert dataset.shape[1] in (100, 140, 150)
    else:
        sizes = (
            (train, test)
            if isinstance(train, int)
            else next(s for s in zip(train, test, strict=True) if s[0] == len(dataset.train))
        )
        assert (len(dataset.train), len(dataset.test), dataset.shape) == (*sizes, shape)
        labels = torch.cat([part[:][1].flatten() for part in dataset]) if name != "imagenet" else None
        assert labels is None or labels.unique().tolist() == list(range(classes))
    assert dataset.num_classes == classes
