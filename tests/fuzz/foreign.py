"""Parsers of files that other programs wrote: tensors to import, failure logs, datasets."""

import contextlib
import io
import math
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from fuzz.base import Parser, folder
from holdfast.errors import CheckpointError, ConfigError
from holdfast.tools.formats.hdf5 import import_h5py
from holdfast.tools.formats.kinds import open_imported
from holdfast_lab.simulate.logs.reading import read_log
from holdfast_lab.simulate.reading import READERS
from holdfast_lab.workloads.data import load_dataset

_MOST_BYTES = 1 << 24
"""Tensors that a file declares are read up to this size, so that a fuzzer does not only fill memory."""


def _import(name: str, data: bytes) -> bool:
    """Read a file of tensors as ``holdfast ckpt`` does."""
    path = folder() / name
    path.write_bytes(data)
    with contextlib.suppress(CheckpointError, ConfigError), open_imported(path) as source:
        if sum(info.size_bytes for info in source.tensors.values()) <= _MOST_BYTES:
            source.load()
        return True
    return False


def _archive(**members: bytes) -> bytes:
    """Return an uncompressed ZIP archive: its checksums are right, so that what is inside is looked at."""
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        for name, content in members.items():
            archive.writestr(zipfile.ZipInfo(name), content)
    return made.getvalue()


def read_npz(data: bytes) -> bool:
    """An archive of ``numpy.savez``, and one whose only array is this."""
    return _import("tensors.npz", data) | _import("tensors.npz", _archive(**{"w.npy": data}))


def read_torch(data: bytes) -> bool:
    """A file of ``torch.save``, and one whose pickle is this."""
    inside = {"archive/data.pkl": data, "archive/version": b"3\n", "archive/data/0": bytes(16)}
    return _import("tensors.pt", data) | _import("tensors.pt", _archive(**inside))


def read_hdf5(data: bytes) -> bool:
    """An HDF5 file."""
    return _import("tensors.h5", data)


def _trace(data: bytes) -> bool:
    """A published trace of failures: the first byte chooses the form."""
    kinds = list(READERS)
    kind = kinds[data[0] % len(kinds)] if data else kinds[0]
    read, options = READERS[kind]
    path = folder() / "trace.csv"
    path.write_bytes(data[1:])
    with contextlib.suppress(ConfigError):
        found = read(path, **({"span_s": 1e9} if "span_s" in options else {}))
        assert all(math.isfinite(spell.start_s) for spell in found.spells)
        return True
    return False


def _log(data: bytes) -> bool:
    """A log of failures in a form that is to be recognised."""
    path = folder() / "failures.log"
    path.write_bytes(data)
    with contextlib.suppress(ConfigError):
        read_log(path)
        return True
    return False


DATASETS = (
    (
        "mnist",
        ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
    ),
    ("cifar10", (*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin")),
    ("covertype", ("covtype.data",)),
    ("movielens", ("u.data",)),
    ("movielens", ("ratings.csv",)),
    ("movielens", ("ratings.dat",)),
    ("jester", ("jester_ratings.dat",)),
    ("jester", ("jester-data-1.csv",)),
    ("jester", ("jester.zip",)),
    ("newsgroups", ("20news-bydate-train/sci.med/1", "20news-bydate-test/sci.med/1")),
    ("reuters", ("reut2-000.sgm",)),
    ("shakespeare", ("input.txt",)),
    ("imagenet", ("train/n01/1.JPEG", "train/n01/2.JPEG", "val/n01/1.JPEG")),
)
"""The datasets that are read from files, and their files."""


def _dataset(data: bytes) -> bool:
    """The folder of a dataset: the first byte chooses the dataset, a line of four dashes ends each file but the last."""
    name, files = DATASETS[data[0] % len(DATASETS)] if data else DATASETS[0]
    contents = data[1:].split(b"\n----\n")
    with tempfile.TemporaryDirectory(dir=folder()) as made, contextlib.suppress(ConfigError):
        for number, file in enumerate(files):
            path = Path(made, file)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(contents[min(number, len(contents) - 1)])
        train, test = load_dataset(name, Path(made), size=8 if name == "imagenet" else None)
        for part in (train, test):
            if len(part):
                part[0]
        return True
    return False


def _saved(save: Callable[[io.BytesIO], object]) -> bytes:
    made = io.BytesIO()
    save(made)
    return made.getvalue()


def _hdf5() -> bytes:
    h5py = import_h5py(ConfigError("the fuzzer of HDF5 files needs h5py"))

    def save(made: io.BytesIO) -> None:
        with h5py.File(made, "w", libver="earliest") as file:
            file["model/w"] = np.ones((2, 3), np.float32)

    return _saved(save)


_NPY = _saved(lambda made: np.lib.format.write_array(made, np.ones((2, 3), np.float32)))
_PT = _saved(lambda made: torch.save({"w": torch.ones(2, 2), "step": 3}, made))
_IDX = (
    b"\0\0\x08\x03" + b"\0\0\0\2" * 3 + bytes(8),
    b"\0\0\x08\x01\0\0\0\2" + bytes([1, 9]),
)
PARSERS = {
    "npz": Parser(read_npz, (_NPY, _archive(**{"w.npy": _NPY}))),
    "torch-file": Parser(read_torch, (_PT, zipfile.ZipFile(io.BytesIO(_PT)).read("archive/data.pkl"))),
    "hdf5": Parser(read_hdf5, (_hdf5(),)),
    "trace": Parser(
        _trace,
        (
            b'\0[{"node_id": "a", "event_time": 1, "event_type": "fault_start", "fault_type": "x"}]',
            b"\1System,nodes,nodenumz,node decom,Prob Started,Prob Fixed\n20,4,1,current,1/2/2003 4:05,1/2/2003 5:05\n",
            b"\0021,add,a\n5,add,b\n9,remove,a\n",
            b"\0032024-01-02, 03:04:05, 3\n2024-01-02, 03:05:05, 2\n",
            b"\4failure_time,node_id,rack_id,machine_room_id\n2024-01-02 03:04:05,1,2,3\n",
            b"\5unit,start_s,end_s\na,1,2\nb,3,4.5\n",
        ),
    ),
    "log": Parser(
        _log,
        (
            b"node,down,up\nn1,2024-01-02 03:04:05,2024-01-02 04:04:05\nn2,2024-01-03 03:04:05,2024-01-03 04:04:05\n",
            b"time machine event\n2024-01-02T03:04:05Z n1 failed\n2024-01-02T04:04:05Z n1 repaired\n",
            b'[{"time": "2024-01-02T03:04:05Z", "node": "n1", "event": "failed"}]',
            b"lifetime_h,censored\n1.5,0\n2.5,1\n3.5,0\n",
        ),
    ),
    "dataset": Parser(
        _dataset,
        (
            b"\0" + b"\n----\n".join(_IDX * 2),
            b"\1" + bytes(3073),
            b"\2" + b"".join(b",".join([b"%d" % (row % 5)] * 54) + b",1\n" for row in range(10)),
            b"\3" + b"".join(b"%d\t%d\t3\t0\n" % (row % 3 + 1, row % 4 + 1) for row in range(12)),
            b"\4userId,movieId,rating,timestamp\n" + b"".join(b"%d,%d,3.5,0\n" % (row, row) for row in range(12)),
            b"\6" + b"".join(b"%d\t%d\t-3.5\n" % (row, row) for row in range(12)),
            b"\7" + b"2,1.5,-9,99\n" * 12,
            b"\10" + _archive(**{"jester.csv": b"2,1.5,-9,99\n" * 12}),
            b"\11From: a\n\nsome words and more words\n",
            b'\12<REUTERS TOPICS="YES" LEWISSPLIT="TRAIN"><TOPICS><D>a</D></TOPICS><TEXT>some words</TEXT></REUTERS>'
            b'<REUTERS TOPICS="YES" LEWISSPLIT="TEST"><TOPICS><D>a</D></TOPICS><TEXT>more words</TEXT></REUTERS>',
            b"\13" + b"to be or not to be, that is the question\n" * 100,
        ),
    ),
}
