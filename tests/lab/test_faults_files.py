"""Altering files: of every writer and layout exactly the drawn values change, and nothing else."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import h5py
import numpy as np
import pytest
import safetensors.torch
import torch
from checkpoint_bytes import save_parts

from holdfast.checkpoint import FORMATS as CHECKPOINT_FORMATS
from holdfast.checkpoint import load, verify, write_tensors
from holdfast.errors import CheckpointCorrupt, CheckpointError, ConfigError
from holdfast.faults.alteration import Alteration
from holdfast.faults.formats import FORMATS
from holdfast_lab.inject.files import InjectionTarget, find, opened
from holdfast_lab.inject.files.replay import lines, parse_record
from holdfast_lab.inject.inject import InjectionReplay, inject
from holdfast_lab.inject.record import entries

SHAPE = (37, 11)
VALUES = np.random.default_rng(1).standard_normal(SHAPE)


def layouts(h5, dtype):
    """Every way in which HDF5 can keep an array, each written by h5py."""
    data = VALUES.astype(dtype)
    return {
        "contiguous": h5.create_dataset("a/contiguous", data=data),
        "chunked": h5.create_dataset("a/chunked", data=data, chunks=(8, 4)),
        "resizable": h5.create_dataset("a/resizable", data=data, chunks=(5, 11), maxshape=(None, 11)),
        "deflate": h5.create_dataset("a/deflate", data=data, chunks=(8, 4), compression=4, shuffle=True),
        "lzf": h5.create_dataset("a/lzf", data=data, chunks=(10, 3), compression="lzf", fletcher32=True),
        "row": h5.create_dataset("a/row", data=data[0]),
        "scalar": h5.create_dataset("a/scalar", data=data[3, 4]),
    }


@pytest.mark.parametrize("dtype", ["<f4", ">f4", "<f2", ">f8", "<i4", ">i2", "u1"])
@pytest.mark.parametrize("libver", ["earliest", "latest"])
@pytest.mark.parametrize("userblock", [0, 512])
def test_hdf5_in_every_layout(tmp_path, dtype, libver, userblock):
    path, out = tmp_path / "a.h5", tmp_path / "b.h5"
    with h5py.File(path, "w", libver=libver, userblock_size=userblock) as h5:
        for dataset in layouts(h5, dtype).values():
            dataset.attrs["note"] = "kept"
        h5.create_dataset("empty", shape=(0, 3), dtype=dtype)
    before = digest(path)

    done = inject(InjectionTarget(path), Alteration(percent=50, seed=2), out=out)

    assert digest(path) == before
    assert {t.place.path for t in done.record.tensors} >= {
        f"a/{n}" for n in ("contiguous", "chunked", "deflate", "lzf")
    }
    assert differences(read_h5(path), read_h5(out)) == recorded(done)
    with h5py.File(out) as h5:
        assert h5["a/chunked"].attrs["note"] == "kept"


@pytest.mark.timeout(20)
def test_a_pipe_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "w.h5")
    with pytest.raises(ConfigError, match=r"w\.h5 is no file"):
        inject(InjectionTarget(tmp_path / "w.h5"), Alteration(percent=50, seed=2), out=tmp_path / "out.h5")


def test_what_hdf5_has_not_set_aside_yet_is_altered_too(tmp_path):
    path = tmp_path / "a.h5"
    with h5py.File(path, "w", userblock_size=512) as h5:
        h5.create_dataset("late", shape=SHAPE, dtype="f4", fillvalue=1.5)
        h5.create_dataset("chunks", shape=SHAPE, dtype="f4", chunks=(8, 4), fillvalue=2.5)
        h5.create_dataset("scalar", shape=(), dtype="f4")
        made = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        made.set_layout(h5py.h5d.COMPACT)
        h5py.h5d.create(h5.id, b"compact", h5py.h5t.IEEE_F32BE, h5py.h5s.create_simple((4,)), made)
    old = read_h5(path)

    done = inject(InjectionTarget(path), Alteration(percent=100), in_place=True)

    assert len(done.record.tensors) == 4
    assert differences(old, read_h5(path)) == recorded(done)


def test_data_sets_of_any_name_width_and_byte_order_are_altered_together_and_taken_back(tmp_path):
    path = tmp_path / "a.h5"
    dtypes = {
        b'z"\\': "<f4",
        b"caf\xe9": ">f4",
        "\u00fc".encode(): "<f8",
        b"b": ">f4",
        b"a": "<f4",
    }  # not by name in the file
    with h5py.File(path, "w") as h5:
        for name, dtype in dtypes.items():
            kind, space = h5py.h5t.py_create(np.dtype(dtype)), h5py.h5s.create_simple(SHAPE)
            h5py.h5d.create(h5.id, name, kind, space).write(h5py.h5s.ALL, h5py.h5s.ALL, VALUES.astype(dtype))
    before, old = digest(path), path.read_bytes()

    done = inject(InjectionTarget(path), Alteration(count=300, seed=4), in_place=True, record=tmp_path / "flips.json")

    places = {tensor.place.path.encode("utf-8", "surrogateescape") for tensor in done.record.tensors}
    assert places == set(dtypes)
    new = path.read_bytes()
    assert sum((a ^ b).bit_count() for a, b in zip(old, new, strict=True)) == 300
    with h5py.File(path) as h5:
        for tensor in done.record.tensors:
            found = h5[tensor.place.path.encode("utf-8", "surrogateescape")][()]
            assert raw_of(found)[tensor.index].tolist() == tensor.after.tolist()
    text = (tmp_path / "flips.json").read_text()
    assert json.loads(text)["flips"] == list(entries(done.record))
    inject(InjectionTarget(path), InjectionReplay(parse_record(text)), in_place=True)
    assert digest(path) == before


def test_hdf5_is_altered_where_there_is_no_torch(tmp_path):
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as h5:
        h5["w"] = VALUES
    before = digest(path)
    code = (
        "import sys; sys.modules['torch'] = None; from holdfast.cli import main;"
        f"main(['inject', {str(path)!r}, '--flips', '3', '--in-place', '--record', {str(tmp_path / 'flips.json')!r}])"
    )

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)

    assert (done.returncode, done.stderr) == (0, "")
    assert digest(path) != before


def test_a_write_that_the_disk_did_not_take_whole_is_told(tmp_path, monkeypatch):
    from holdfast_lab.inject.files import base

    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as h5:
        h5["w"] = VALUES
    monkeypatch.setattr(base.os, "pwrite", lambda _file, data, _offset: len(data) - 1)

    with pytest.raises(
        CheckpointError, match="took 7 of 8 bytes that were to be altered; check whether the disk is full"
    ):
        inject(InjectionTarget(path), Alteration(), in_place=True)


def test_only_flipped_bytes_of_values_that_are_not_packed_change(tmp_path):
    path, out = tmp_path / "a.h5", tmp_path / "b.h5"
    with h5py.File(path, "w") as h5:
        h5.create_dataset("plain", data=VALUES)
        h5.create_dataset("chunked", data=VALUES, chunks=(8, 4))

    inject(InjectionTarget(path), Alteration(count=20), out=out)

    old, new = (np.frombuffer(file.read_bytes(), np.uint8) for file in (path, out))
    assert len(old) == len(new)
    assert sum(int(value).bit_count() for value in old ^ new) == 20


def test_layouts_of_keras_and_chainer(tmp_path):
    """As their own savers lay files out: names with a colon and doubled, bfloat16 as bytes, counters, texts, no values."""
    path, out = tmp_path / "weights.h5", tmp_path / "b.h5"
    with h5py.File(path, "w") as h5:
        h5.attrs["layer_names"] = np.array([b"conv", b"dense"])
        h5.create_dataset("model_weights/conv/conv/kernel:0", data=VALUES.reshape(1, 1, *SHAPE).astype("f4"))
        opaque = h5.create_dataset("layers/dense/vars/0", data=np.arange(6, dtype="u2").view("V2"))
        opaque.attrs["dtype"] = "bfloat16"
        h5.create_dataset("optimizer/iterations", data=np.int64(782))
        h5.create_dataset("updater/iteration", data=782)  # Chainer from here on
        h5.create_dataset("updater/model:main/predictor/l1/W", data=VALUES.astype("f4"), compression=4)
        h5.create_dataset("updater/model:main/predictor/l1/b", data=h5py.Empty("f4"))
        h5.create_dataset("rng", data=np.bytes_(b"state"))
        h5.create_dataset("flag", data=np.bool_(True))
        h5.create_dataset("pair", data=np.zeros(3, [("a", "f4"), ("b", "i4")]))
        h5["alias"] = h5py.SoftLink("/model_weights")
        h5["away"] = h5py.ExternalLink("other.h5", "/x")

    done = inject(InjectionTarget(path), Alteration(percent=100, law="values"), out=out)

    assert {t.place.path: t.place.format.name for t in done.record.tensors} == {
        "model_weights/conv/conv/kernel:0": "float32",
        "layers/dense/vars/0": "bfloat16",
        "optimizer/iterations": "int64",
        "updater/iteration": "int64",
        "updater/model:main/predictor/l1/W": "float32",
    }
    assert {s.path: s.why for s in done.skipped} == {
        "updater/model:main/predictor/l1/b": "has no values",
        "rng": "is of texts",
        "flag": "is of a bool or another enumeration",
        "pair": "is of a compound type",
    }
    assert differences(read_h5(path), read_h5(out)) == recorded(done)


def test_filters_that_lose_bits_and_values_in_other_files_are_left_alone(tmp_path):
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as h5:
        h5.create_dataset("lossy", data=VALUES, chunks=(8, 4), scaleoffset=3)
        h5.create_dataset("external", data=VALUES, external=[(str(tmp_path / "raw"), 0, h5py.h5f.UNLIMITED)])

    with pytest.raises(ConfigError, match="holds nothing that can be altered: external has its values in another file"):
        inject(InjectionTarget(path), Alteration(), in_place=True)


# --------------------------------------------------------------------------------------------- ours


def state(seed=0):
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randn(40, 30, generator=generator)
    return {
        "model": {
            "w": weights,
            "half": weights.bfloat16(),
            "byte": weights.to(torch.float8_e5m2),
            "step": torch.tensor(7),
        },
        "optimizer": {
            "m": weights.double(),
            "empty": torch.empty(0, 3),
            "mask": weights > 0,
            "z": torch.zeros(2).cfloat(),
        },
        "lr": 0.1,
    }


@pytest.mark.parametrize("format", CHECKPOINT_FORMATS)
def test_our_checkpoints_load_as_if_the_error_had_been_before_saving(tmp_path, format):
    write_tensors(tmp_path / "a", 20, state(), {"k": 1}, format=format).commit(0)

    done = inject(find(str(tmp_path / "a")), Alteration(count=200, seed=1), out=tmp_path / "b")

    assert done.kind == format
    assert [s.path for s in done.skipped] == ["optimizer/mask", "optimizer/z"]
    assert verify(tmp_path / "b", 20).info == {"k": 1}
    assert differences(read_ours(tmp_path / "a"), read_ours(tmp_path / "b")) == recorded(done)
    (file,) = [f for f in (tmp_path / "b" / "step-00000020").glob("data-*/*") if not f.name.startswith(".")]
    if format == "npz":
        with zipfile.ZipFile(file) as archive:
            assert archive.testzip() is None
    if format == "hdf5":
        with h5py.File(file) as h5:
            assert h5["model/w"].shape == (40, 30)


@pytest.mark.parametrize("format", CHECKPOINT_FORMATS)
def test_with_its_digests_kept_an_alteration_is_found(tmp_path, format):
    write_tensors(tmp_path, 20, state(), {}, format=format).commit(0)

    inject(find(str(tmp_path)), Alteration(), in_place=True, keep_digests=True)

    with pytest.raises(CheckpointCorrupt):
        load(tmp_path, 20)


def test_a_checkpoint_of_several_writers_is_one(tmp_path):
    save_parts(tmp_path / "a", 5, [state()] * 3)
    write_tensors(tmp_path / "whole", 5, state(), {}).commit(0)

    parts = inject(find(str(tmp_path / "a")), Alteration(count=300, seed=4), out=tmp_path / "b")
    whole = inject(find(str(tmp_path / "whole")), Alteration(count=300, seed=4), dry_run=True)

    assert differences(read_ours(tmp_path / "a", 5), read_ours(tmp_path / "b", 5)) == recorded(parts) == recorded(whole)


def test_what_fails_leaves_no_copy_and_an_untouched_checkpoint(tmp_path):
    write_tensors(tmp_path / "a", 20, state(), {}).commit(0)
    (tmp_path / "m.h5").write_bytes(b"\x89HDF\r\n\x1a\nno more")

    with pytest.raises(ConfigError, match="count of flips must be at most"):
        inject(find(str(tmp_path / "a")), Alteration(count=10**9), out=tmp_path / "b")
    with pytest.raises(CheckpointCorrupt, match="cannot be read or altered as HDF5"):
        inject(find(str(tmp_path / "m.h5")), Alteration(), out=tmp_path / "n.h5")

    assert not (tmp_path / "b" / "step-00000020").exists()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b", "m.h5"]
    assert verify(tmp_path / "a", 20)


# --------------------------------------------------------------------------------------------- others


def test_files_of_torch(tmp_path):
    """Views, permuted axes, tied tensors, parameters and numbers, as a training script saves them."""
    base, weights = torch.arange(12.0), torch.randn(4, 3, 2, 2).contiguous(memory_format=torch.channels_last)
    model = {"conv": weights, "tied": weights, "head": base[2:6], "bias": torch.nn.Parameter(torch.ones(5).bfloat16())}
    torch.save({"model": model, "whole": base, "epoch": 3, "sizes": weights.shape}, tmp_path / "a.pt")

    done = inject(InjectionTarget(tmp_path / "a.pt"), Alteration(percent=40, seed=5), out=tmp_path / "b.pt")

    read = [torch.load(tmp_path / name, weights_only=True) for name in ("a.pt", "b.pt")]
    arrays = [
        {
            **{f"model/{name}": bits_of(state["model"][name]) for name in ("conv", "bias")},
            "whole": bits_of(state["whole"]),
        }
        for state in read
    ]
    assert differences(*arrays) == recorded(done)
    assert [(s.path, s.why) for s in done.skipped] == [("model/head", "shares values with another tensor")]
    np.testing.assert_array_equal(*(bits_of(read[1]["model"][name]) for name in ("conv", "tied")))
    with zipfile.ZipFile(tmp_path / "b.pt") as archive:
        assert archive.testzip() is None


def test_safetensors_and_npz_of_others(tmp_path):
    w = torch.randn(20, 3)
    safetensors.torch.save_file({"w": w, "h": w.half(), "flag": w > 0}, tmp_path / "a.safetensors")
    np.savez(tmp_path / "a.npz", w=VALUES.astype(">f4"), f=np.asfortranarray(VALUES), n=np.arange(9))

    tensors = inject(InjectionTarget(tmp_path / "a.safetensors"), Alteration(count=50), out=tmp_path / "b.safetensors")
    arrays = inject(InjectionTarget(tmp_path / "a.npz"), Alteration(count=50), out=tmp_path / "b.npz")

    read = [safetensors.torch.load_file(tmp_path / f"{n}.safetensors") for n in "ab"]
    assert differences(*({k: bits_of(t) for k, t in state.items()} for state in read)) == recorded(tensors)
    with np.load(tmp_path / "a.npz") as old, np.load(tmp_path / "b.npz") as new:
        assert differences(*({k: raw_of(s[k]) for k in s} for s in (old, new))) == recorded(arrays)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda d: np.savez_compressed(d / "a.npz", w=VALUES), "has the compressed array 'w'"),
        (lambda d: torch.save({"w": torch.ones(2)}, d / "a.pt", _use_new_zipfile_serialization=False), "before 1.6"),
        (lambda d: torch.save({"w": Path("x")}, d / "a.pt"), "asks to run"),
    ],
)
def test_what_lies_nowhere_or_would_have_to_be_run_is_refused(tmp_path, make, said):
    make(tmp_path)
    (path,) = tmp_path.iterdir()

    with pytest.raises(CheckpointError, match=said):
        inject(InjectionTarget(path), Alteration(), dry_run=True)


# --------------------------------------------------------------------------------------------- again


@pytest.mark.parametrize("kind", ["h5", "pt", "ours"])
@pytest.mark.parametrize("options", [{"count": 30}, {"percent": 5.0, "burst": 3}, {"percent": 5.0, "scale": -2.5}])
def test_replayed_on_an_equal_file_the_bytes_are_equal(tmp_path, kind, options):
    made = {"h5": tmp_path / "a.h5", "pt": tmp_path / "a.pt", "ours": tmp_path / "a"}[kind]
    if kind == "h5":
        with h5py.File(made, "w") as h5:
            layouts(h5, "f4")
    elif kind == "pt":
        torch.save(state(), made)
    else:
        write_tensors(made, 20, state(), {}).commit(0)
    copy = tmp_path / f"copy{made.suffix}"
    shutil.copytree(made, copy) if made.is_dir() else shutil.copy(made, copy)

    inject(find(str(made)), Alteration(**options), in_place=True, record=tmp_path / "flips.json")
    record = parse_record((tmp_path / "flips.json").read_text())
    again = inject(find(str(copy)), InjectionReplay(record), in_place=True)

    assert digest(copy) == digest(made)
    assert "".join(lines(again.record)) == (tmp_path / "flips.json").read_text()
    assert again.others == 0
    if "scale" not in options:
        inject(find(str(made)), InjectionReplay(record), in_place=True)  # bits that are flipped twice are as they were
        assert inject(find(str(made)), InjectionReplay(record), dry_run=True).others == 0


def test_cost_grows_with_the_flips_and_not_with_the_file(tmp_path, monkeypatch):
    """Of a file with a hole of 8 GB, which nobody could read in the time of a test, a few kilobytes are read."""
    from holdfast_lab.inject.files import base

    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as h5:
        made = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        made.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
        made.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
        space = h5py.h5s.create_simple((1 << 31,))
        h5py.h5d.create(h5.id, b"w", h5py.h5t.IEEE_F32LE, space, made)
    read = []
    get, pread = base.FileBytes.get, os.pread
    monkeypatch.setattr(base.FileBytes, "get", lambda self, offset, size: read.append(size) or get(self, offset, size))
    monkeypatch.setattr(base.os, "pread", lambda file, size, offset: read.append(size) or pread(file, size, offset))

    done = inject(InjectionTarget(path), Alteration(count=1000), in_place=True)

    assert sum(len(t.index) for t in done.record.tensors) == 1000
    assert 4000 <= sum(read) < 100_000
    with opened(InjectionTarget(path), write=False) as values:
        (tensor,) = done.record.tensors
        np.testing.assert_array_equal(values.read([(0, tensor.index)])[0], tensor.after)


# --------------------------------------------------------------------------------------------- support


def digest(path):
    files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def raw_of(array):
    """An array's bits in the order of its indices, whatever the order in memory."""
    plain = np.ascontiguousarray(array).reshape(-1)
    return plain.view(f"{plain.dtype.str[0] if plain.dtype.str[0] in '<>' else '<'}u{plain.itemsize}").astype(np.uint64)


def bits_of(tensor):
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return raw_of(tensor.detach().contiguous().view(whole).numpy())


def read_h5(path):
    found = {}
    with h5py.File(path) as h5:
        h5.visititems(lambda name, d: found.update({name: raw_of(d[()])}) if is_number(d) else None)
    return found


def is_number(thing):
    return isinstance(thing, h5py.Dataset) and thing.shape is not None and thing.dtype.str[1:2] + str(thing.dtype.itemsize) in (
        "f2", "f4", "f8", "i2", "i4", "i8", "u1", "V2",
    )  # fmt: skip


def read_ours(root, step=20):
    tensors = {}

    def take(value, path):
        for key, item in value.items():
            if isinstance(item, dict):
                take(item, f"{path}{key}/")
            elif isinstance(item, torch.Tensor) and not item.is_complex() and item.numel():
                tensors[f"{path}{key}"] = bits_of(item)

    take(load(root, step).state, "")
    return tensors


def differences(old, new):
    """What differs between two sets of arrays: path, index, bits."""
    assert old.keys() == new.keys()
    return {
        (path, int(i), int(old[path][i] ^ new[path][i])) for path in old for i in np.flatnonzero(old[path] != new[path])
    }


def recorded(done):
    """The same of a record, by way of its file."""
    flips = {}
    for flip in json.loads("".join(lines(done.record)))["flips"]:
        key = (flip["path"], flip["index"])
        flips[key] = flips.get(key, 0) | 1 << flip["bit"]
    assert all(t.place.format in FORMATS.values() for t in done.record.tensors)
    return {(*key, bits) for key, bits in flips.items()}
