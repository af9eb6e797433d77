"""What every format of tensor files promises: values to the bit, files that other programs read, no damage unseen."""

from __future__ import annotations

import random
import resource
import subprocess
import sys
import tempfile
import time
import warnings
import zipfile
from pathlib import Path
from urllib.parse import unquote

import h5py
import numpy as np
import pytest
import safetensors.torch
import torch
from checkpoint_bytes import any_bits, flip
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.checkpoint import FORMATS, flatten, load, read_manifest, take, verify, write, write_tensors
from holdfast.checkpoint.format import DTYPES, tensor_bytes
from holdfast.errors import CheckpointCorrupt, CheckpointError
from holdfast.tools.formats import dcp, npz
from holdfast.tools.formats.base import STAND_INS, numpy_dtype

SHARED = [name for name in FORMATS if name != "dcp"]
"""The formats that several writers can write, and that hold no clock, path or chance."""

ATTEMPT = "0"

SHAPES = [(), (3,), (0,), (2, 0, 3), (2, 3, 5), (1, 70)]


def each_dtype(shapes=SHAPES):
    return {
        name: {str(i): any_bits(dtype, shape, i) for i, shape in enumerate(shapes)} for name, dtype in DTYPES.items()
    }


def save(root, state, kind, parts=1):
    """Save step 1; return the folder of its files and its manifest."""
    pending = [
        write(root, 1, take(state, part, parts), {}, format=kind, token=ATTEMPT) for part in reversed(range(parts))
    ]
    pending[-1].commit(0)
    return root / "step-00000001" / f"data-{ATTEMPT}", read_manifest(root, 1)


def bits(tensors):
    return {path: (t.dtype, tuple(t.shape), bytes(tensor_bytes(t.contiguous()))) for path, t in tensors.items()}


def state_bits(state):
    return bits(flatten(state)[0])


def as_numpy(tensor):
    """Return the array that a library without torch's dtypes should read."""
    name = str(tensor.dtype).removeprefix("torch.")
    return tensor.contiguous().view(getattr(torch, STAND_INS.get(name, name))).numpy()


def read_safetensors(folder):
    found = {}
    for file in folder.glob("*.safetensors"):
        found |= safetensors.torch.load_file(file)
    return found


def read_hdf5(folder):
    found = {}

    def take_data_set(name, item):
        if isinstance(item, h5py.Dataset):
            if len(name.split("/")[-1]) > 1:
                name = name.removesuffix("%")
            path = "/".join("" if part == "%" else unquote(part) for part in name.split("/"))
            assert path not in found
            found[path] = item[...]

    for path in sorted(folder.glob("*.h5")):
        with h5py.File(path) as file:
            file.visititems(take_data_set)
    return found


def read_npz(folder):
    found = {}
    for path in sorted(folder.glob("*.npz")):
        with np.load(path, allow_pickle=False) as file:
            found |= {unquote(name): file[name] for name in file.files}
    return found


def read_dcp(folder, like):
    import torch.distributed.checkpoint as torch_dcp

    found = {path: torch.zeros_like(tensor) for path, tensor in like.items()}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        torch_dcp.load(found, storage_reader=torch_dcp.FileSystemReader(folder), no_dist=True)
    return found


def assert_others_read(kind, folder, tensors):
    """Make sure that the library of the format reads the same values, dtypes and names."""
    if kind == "dcp":
        assert bits(read_dcp(folder, tensors)) == bits(tensors)
    elif kind == "safetensors":
        found = read_safetensors(folder)
        for path, tensor in tensors.items():
            if tensor.dtype is torch.complex128:  # the format has no name for it
                found[path] = torch.view_as_complex(found[path])
        assert bits(found) == bits(tensors)
    else:
        found = (read_hdf5 if kind == "hdf5" else read_npz)(folder)
        assert found.keys() == tensors.keys()
        for path, tensor in tensors.items():
            assert (found[path].dtype, found[path].shape) == (numpy_dtype(tensor.dtype), tuple(tensor.shape)), path
            assert found[path].tobytes() == as_numpy(tensor).tobytes(), path


# --------------------------------------------------------------------------------------------- values


@pytest.mark.parametrize("kind", FORMATS)
def test_every_dtype_comes_back_to_the_bit_and_other_programs_read_it(tmp_path, kind):
    state = each_dtype()

    folder, manifest = save(tmp_path, state, kind)

    assert manifest.format == kind
    assert state_bits(load(tmp_path, 1).state) == state_bits(state)
    tensors = flatten(state)[0]
    assert_others_read(kind, folder, tensors)
    for path, entry in manifest.tensors.items():
        (piece,) = entry.pieces
        data = (folder / piece.file).read_bytes()[piece.offset : piece.offset + piece.size_bytes]
        assert data == bytes(tensor_bytes(tensors[path])), f"{path} is where the manifest says"
        # HDF5 aligns what fills a cache line; DCP aligns nothing
        can_be_mapped = piece.offset % DTYPES[entry.dtype].itemsize == 0
        assert can_be_mapped or kind == "dcp" or (kind == "hdf5" and piece.size_bytes < 64)


def test_the_same_state_gives_the_same_files(tmp_path):
    state = each_dtype() | {"deep": {"a": {"b": [torch.ones(4)] * 3}}}
    first = [save(tmp_path / "first" / kind, state, kind)[0] for kind in SHARED]
    time.sleep(1.1)  # HDF5 and ZIP can hold times, in seconds

    second = [save(tmp_path / "second" / kind, state, kind)[0] for kind in SHARED]

    for one, other in zip(first, second, strict=True):
        (file,) = one.iterdir()
        assert file.read_bytes() == (other / file.name).read_bytes()


@pytest.mark.parametrize("kind", FORMATS)
def test_a_part_of_larger_memory_is_saved_without_the_rest(tmp_path, kind):
    memory = torch.arange(1 << 20, dtype=torch.int32)
    state = {"a": memory[5:9], "b": memory.view(1024, 1024)[:2, 3:5]}

    folder, _ = save(tmp_path, state, kind)

    assert sum(file.stat().st_size for file in folder.iterdir()) < 100_000
    assert state_bits(load(tmp_path, 1).state) == state_bits(state)


@pytest.mark.parametrize("kind", FORMATS)
def test_hundreds_of_small_tensors(tmp_path, kind):
    state = {f"{i}": {"w": torch.full((i % 7,), i, dtype=torch.bfloat16), "n": torch.tensor(i)} for i in range(400)}

    folder, _ = save(tmp_path, state, kind)

    assert state_bits(load(tmp_path, 1).state) == state_bits(state)
    assert_others_read(kind, folder, flatten(state)[0])


@pytest.mark.parametrize("kind", FORMATS)
def test_a_tensor_of_several_blocks(tmp_path, kind):
    state = {"large": any_bits(torch.float32, (5_000_000,)), "small": any_bits(torch.int8, (5,))}

    folder, manifest = save(tmp_path, state, kind)

    assert len(manifest.tensors["large"].pieces[0].blocks) == 2
    assert state_bits(load(tmp_path, 1).state) == state_bits(state)
    assert_others_read(kind, folder, flatten(state)[0])


@pytest.mark.parametrize("kind", SHARED)
def test_several_writers_share_a_checkpoint(tmp_path, kind):
    state, parts = each_dtype() | {"large": torch.arange(4000.0).reshape(100, 40)}, 3

    folder, manifest = save(tmp_path, state, kind, parts)

    assert len(list(folder.iterdir())) == parts
    assert state_bits(load(tmp_path, 1).state) == state_bits(state)
    written = {box.key: box.tensor for part in range(parts) for box in take(state, part, parts).boxes}
    assert len(written) > len(manifest.tensors), "no tensor was cut"
    assert_others_read(kind, folder, written)


@pytest.mark.parametrize("kind", FORMATS)
def test_a_full_disk_is_told_and_leaves_nothing(tmp_path, kind):
    file = {"safetensors": "part-00000.safetensors", "hdf5": "part-00000.h5", "npz": "part-00000.npz"}.get(kind)
    folder = tmp_path / "step-00000001" / f"data-{ATTEMPT}"
    folder.mkdir(parents=True)
    (folder / (file or "__0_0.distcp")).symlink_to("/dev/full")

    with pytest.raises(
        CheckpointError, match=r"cannot write the checkpoint of step 1 to .*(No space|Invalid)"
    ) as caught:
        write_tensors(tmp_path, 1, {"w": torch.ones(100_000)}, {}, format=kind, token=ATTEMPT)

    assert "\n" not in str(caught.value)
    assert not folder.exists()


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("limit", [0, 2_000, 60_000])
def test_a_file_that_cannot_grow_is_told_and_leaves_nothing(tmp_path, kind, limit):
    state = {str(i): torch.full((9,), i, dtype=torch.bfloat16) for i in range(1000)}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        with pytest.raises(CheckpointError, match=r"cannot write .*step-00000001.*: File too large") as caught:
            save(tmp_path, state, kind)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


# --------------------------------------------------------------------------------------------- damage


def find_flips(root, manifest, folder, number, chance):
    """Flip one bit after the other, half of them in values, and make sure that each is found and told rightly."""
    files = sorted([*folder.iterdir(), folder.parent / "manifest.json"])
    pieces = [(path, piece) for path, entry in manifest.tensors.items() for piece in entry.pieces]
    filled = [piece for _, piece in pieces if piece.size_bytes]
    for _ in range(number):
        if chance.random() < 0.5:
            file = chance.choice(files)
            position = chance.randrange(file.stat().st_size)
        else:
            piece = chance.choice(filled)
            file, position = folder / piece.file, piece.offset + chance.randrange(piece.size_bytes)
        mask = 1 << chance.randrange(8)

        flip(file, position, mask)
        with pytest.raises(CheckpointCorrupt) as caught:
            verify(root, 1)
        flip(file, position, mask)

        hit = [path for path, p in pieces if p.file == file.name and 0 <= position - p.offset < p.size_bytes]
        named = [path for path in manifest.tensors if f"tensor {path!r} " in str(caught.value)]
        assert named == hit, (file.name, position, mask)
        assert file.name in str(caught.value) or file.name == "manifest.json"
    verify(root, 1)


@pytest.mark.parametrize(("kind", "parts"), [*((kind, 1) for kind in FORMATS), *((kind, 3) for kind in SHARED)])
def test_any_flipped_bit_is_found_and_its_tensor_named(tmp_path, kind, parts):
    folder, manifest = save(tmp_path, each_dtype([(), (0,), (7, 3)]), kind, parts)

    find_flips(tmp_path, manifest, folder, 100 if parts == 1 else 30, random.Random(parts))


# --------------------------------------------------------------------------------------------- names

_ODD = {
    "": torch.ones(1),
    ".": torch.ones(2),
    "..": torch.ones(3),
    "a\0b": torch.ones(4),
    "100%": torch.ones(5),
    1: torch.ones(6),
    "1": {"b": torch.ones(7), "": {"": torch.ones(8), ".": torch.ones(9)}},
    "x": torch.ones(10),
    "x.npy": torch.ones(11),
    "größe": torch.ones(12),
    "a/b": torch.ones(13),
    "l" * 60_000: torch.ones(14),
    " \n\\": torch.ones(15),
}


@pytest.mark.parametrize("kind", FORMATS)
def test_odd_names_are_held(tmp_path, kind):
    folder, _ = save(tmp_path, {"odd": _ODD}, kind)

    assert state_bits(load(tmp_path, 1).state) == state_bits({"odd": _ODD})
    assert_others_read(kind, folder, flatten({"odd": _ODD})[0])


def test_the_names_in_hdf5_are_those_of_its_docstring(tmp_path):
    state = {"model": {"fc.weight": torch.ones(1)}, "odd": _ODD}

    folder, _ = save(tmp_path, state, "hdf5")

    with h5py.File(folder / "part-00000.h5") as file:
        assert file["model/fc.weight"].shape == (1,)
        odd = file["odd"]
        names = ("%", "%2E", "..", "a%00b", "100%25", "1%", "1/b", "1/%/%", "1/%/%2E")
        assert [odd[name].size for name in names] == list(range(1, 10))


def test_the_names_in_npz_are_those_of_its_docstring(tmp_path):
    state = {"model": {"fc.weight": torch.ones(1)}, "odd": _ODD}

    folder, _ = save(tmp_path, state, "npz")

    assert "model/fc.weight.npy" in zipfile.ZipFile(folder / "part-00000.npz").namelist()
    with np.load(folder / "part-00000.npz") as file:
        assert file["model/fc.weight"].shape == (1,)
        names = ("", ".", "..", "a%00b", "100%25", "1", "1/b", "1//", "1//.", "x", "x%2Enpy", "größe")
        assert [file[f"odd/{name}"].size for name in names] == list(range(1, 13))


_keys = st.one_of(st.text(st.sampled_from("ab./%~@\0é2E"), max_size=4), st.sampled_from([0, 1, "0", "1", "a.npy"]))
_tensors = st.builds(
    any_bits,
    st.sampled_from(list(DTYPES.values())),
    st.lists(st.integers(0, 3), max_size=4).map(tuple),
    st.integers(0, 99),
)
_states = st.recursive(_tensors, lambda inner: st.dictionaries(_keys, inner, max_size=5), max_leaves=12)


@pytest.mark.parametrize("kind", FORMATS)
@settings(deadline=None, max_examples=25)
@given(state=_states)
def test_any_state_is_held_and_read_by_others(kind, state):
    with tempfile.TemporaryDirectory() as root:
        folder, _ = save(Path(root), state, kind)

        assert state_bits(load(root, 1).state) == state_bits(state)
        assert_others_read(kind, folder, flatten(state)[0])


# --------------------------------------------------------------------------------------------- hdf5


@pytest.mark.parametrize("name", STAND_INS)
def test_hdf5_says_what_its_integers_stand_for(tmp_path, name):
    folder, _ = save(tmp_path, {"x": any_bits(DTYPES[name], (4,)), "y": torch.ones(2)}, "hdf5")

    with h5py.File(folder / "part-00000.h5") as file:
        assert file["x"].attrs["torch_dtype"] == name
        assert "torch_dtype" not in file["y"].attrs


def test_hdf5_refuses_more_dimensions_than_it_has_and_leaves_nothing(tmp_path):
    with pytest.raises(
        CheckpointError, match=r"hdf5 format cannot hold tensor 'w': it has 33 dimensions.* 32; reshape"
    ):
        save(tmp_path, {"w": torch.ones([1] * 33)}, "hdf5")

    assert list(tmp_path.iterdir()) == []


def test_hdf5_without_h5py_says_what_to_install_and_can_still_be_loaded(tmp_path, monkeypatch):
    save(tmp_path, {"w": torch.ones(3)}, "hdf5")
    monkeypatch.setitem(sys.modules, "h5py", None)

    with pytest.raises(CheckpointError, match=r"need h5py; pip install 'holdfast\[hdf5\]'"):
        save(tmp_path / "other", {"w": torch.ones(3)}, "hdf5")

    assert load(tmp_path, 1).state["w"].tolist() == [1.0] * 3


# --------------------------------------------------------------------------------------------- npz


def test_values_in_npz_begin_on_cache_lines_and_its_checksums_are_right(tmp_path):
    folder, manifest = save(tmp_path, each_dtype(), "npz")

    assert all(piece.offset % 64 == 0 for entry in manifest.tensors.values() for piece in entry.pieces)
    with zipfile.ZipFile(folder / "part-00000.npz") as file:
        assert file.testzip() is None
    flip(folder / "part-00000.npz", manifest.tensors["int64/4"].pieces[0].offset)
    with zipfile.ZipFile(folder / "part-00000.npz") as file:
        assert file.testzip() == "int64/4.npy"


@pytest.mark.parametrize("limit", [150, 3000, 50_000])
def test_npz_uses_the_large_fields_of_zip(tmp_path, monkeypatch, limit):
    # A reader looks up what is marked as too large in the field of 64 bits, however small it is there.
    monkeypatch.setattr(npz, "_LARGE_FROM", limit)
    state = {name: any_bits(torch.int8, (size,)) for name, size in {"small": 5, "large": 70_000, "last": 6}.items()}

    folder, _ = save(tmp_path, state, "npz")

    assert_others_read("npz", folder, state)
    assert (folder / "part-00000.npz").read_bytes().count(b"PK\6\7") == 1


def test_npz_holds_more_members_than_the_small_field_counts(tmp_path):
    tensors = {str(i): torch.empty(0, dtype=torch.int8) for i in range(0xFFFF + 1)}

    npz.Npz().lay_out(tmp_path, "part-00000", tensors)

    with zipfile.ZipFile(tmp_path / "part-00000.npz") as file:
        assert len(file.namelist()) == 0xFFFF + 1


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_npz_holds_more_than_four_gigabytes(tmp_path):
    large = torch.zeros((1 << 32) + 100, dtype=torch.uint8)
    layout = npz.Npz().lay_out(tmp_path, "part-00000", {"large": large, "last": torch.zeros(3)})

    with np.load(tmp_path / "part-00000.npz") as file:
        assert file["last"].tolist() == [0.0] * 3
    with zipfile.ZipFile(tmp_path / "part-00000.npz") as file:
        assert file.getinfo("large.npy").file_size == 128 + large.nbytes
        assert file.testzip() is None
    assert layout.places["last"][1] > 1 << 32


def test_npz_refuses_a_name_that_zip_cannot_hold(tmp_path):
    with pytest.raises(CheckpointError, match="its name has 70004 bytes, and a ZIP archive allows 65535"):
        save(tmp_path, {"l" * 70_000: torch.ones(1)}, "npz")


# --------------------------------------------------------------------------------------------- dcp


def test_dcp_has_one_writer_and_the_second_is_told(tmp_path):
    content = take({"a": torch.ones(4), "b": torch.ones(4)}, part=1, parts=2)

    with pytest.raises(CheckpointError, match=r"written by one writer only, and this is part-00001.*safetensors"):
        write(tmp_path, 1, content, {}, format="dcp", token=ATTEMPT)


def test_dcp_can_be_turned_into_a_file_of_torch_save(tmp_path):
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    state = {"model": {"w": any_bits(torch.bfloat16, (4, 5))}}
    folder, _ = save(tmp_path / "checkpoints", state, "dcp")

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        dcp_to_torch_save(folder, tmp_path / "plain.pt")

    assert bits(torch.load(tmp_path / "plain.pt", weights_only=True)) == state_bits(state)


def test_dcp_does_not_trust_that_the_values_are_where_it_looks(tmp_path):
    save(tmp_path, {"w": torch.ones(4)}, "dcp")
    written = tmp_path / "step-00000001" / f"data-{ATTEMPT}" / "__0_0.distcp"

    with written.open("rb") as file, pytest.raises(CheckpointError, match="in an unknown layout"):
        dcp._find_values(file, 0, written.stat().st_size, torch.zeros(4))


# --------------------------------------------------------------------------------------------- all


def test_a_library_is_imported_only_when_its_format_writes():
    code = (
        "import sys, torch, holdfast.checkpoint as c;"
        "c.write_tensors(sys.argv[1], 1, {'w': torch.ones(2)}, {}, format='npz').commit(0); c.load(sys.argv[1], 1);"
        "sys.exit(', '.join({'h5py', 'safetensors', 'torch.distributed.checkpoint'} & set(sys.modules)) or 0)"
    )

    with tempfile.TemporaryDirectory() as root:
        done = subprocess.run(
            [sys.executable, "-c", code, root], capture_output=True, text=True, timeout=60, check=False
        )

    assert (done.returncode, done.stderr) == (0, "")
