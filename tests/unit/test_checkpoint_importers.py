from __future__ import annotations

import dataclasses
import math

import h5py
import numpy as np
import pytest
import safetensors.torch
import torch
from checkpoint_bytes import data_files, flip, same

from holdfast.checkpoint import FORMATS, load, open_storage, read_manifest, steps, write_tensors
from holdfast.checkpoint.format import DTYPES
from holdfast.errors import CheckpointCorrupt, CheckpointError, ConfigError
from holdfast.tools.checkpoints.compare import compare
from holdfast.tools.checkpoints.convert import convert
from holdfast.tools.checkpoints.listing import attempts, examine, prune
from holdfast.tools.checkpoints.source import saved_source, tensor_digest
from holdfast.tools.formats.base import TensorInfo, TensorSource
from holdfast.tools.formats.kinds import open_imported

WHOLE = torch.arange(24.0).reshape(4, 6)


def of(**tensors):
    """Return a source of tensors in memory."""
    return TensorSource(
        name="memory",
        kind="memory",
        tensors={name: TensorInfo(tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()},
        read=lambda name: tensors[name],
        load=lambda: dict(tensors),
    )


def only_diff(a, b):
    (found,) = compare(of(w=torch.as_tensor(a)), of(w=torch.as_tensor(b))).tensors
    return found


# --------------------------------------------------------------------------------------------- reading


def test_a_file_of_torch_is_read_with_all_that_is_in_it(tmp_path):
    tied = torch.nn.Parameter(torch.randn(3, 2))
    state = {"model": {"a": tied, "b": tied}, "view": WHOLE.t(), "lr": 0.1, "shape": torch.Size([2, 3]), "step": 70}
    torch.save(state, tmp_path / "a.pt")

    with open_imported(tmp_path / "a.pt") as source:
        assert source.tensors.keys() == {"model/a", "model/b", "view"}
        assert source.ties == {"model/b": "model/a"}
        assert source.step == 70
        assert source.scalars == {"lr": 0.1, "shape/0": 2, "shape/1": 3, "step": 70}
        assert torch.equal(source.read("model/b"), tied)
        assert torch.equal(source.read("view"), WHOLE.t())
        assert source.read("view").is_contiguous()


def test_a_bare_tensor_is_a_state(tmp_path):
    torch.save(WHOLE, tmp_path / "a.pth")

    with open_imported(tmp_path / "a.pth") as source:
        (path,) = source.tensors
        assert torch.equal(source.read(path), WHOLE)


@pytest.mark.parametrize("name", [n for n in DTYPES if n != "complex128"])
def test_every_dtype_of_safetensors_is_read_to_the_bit(tmp_path, name):
    tensor = torch.randint(0, 255, (4, 16), dtype=torch.uint8).view(DTYPES[name]) if name != "bool" else WHOLE > 7
    safetensors.torch.save_file({"w": tensor}, tmp_path / "a.safetensors")

    with open_imported(tmp_path / "a.safetensors") as source:
        assert source.tensors["w"] == TensorInfo(tensor.dtype, tuple(tensor.shape))
        assert same(source.read("w"), tensor)


ARRAYS = {
    "plain": np.arange(6, dtype=np.float32).reshape(2, 3),
    "fortran": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    "swapped": np.arange(6, dtype=">i4"),
    "scalar": np.array(7, np.int64),
    "empty": np.zeros((3, 0), np.uint16),
    "complex": np.array([1 + 2j]),
    "bool": np.array([True, False]),
    "half": np.array([1.5], np.float16),
}


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_arrays_of_numpy_are_read(tmp_path, save):
    save(tmp_path / "a.npz", **ARRAYS)

    with open_imported(tmp_path / "a.npz") as source:
        assert_arrays(source.load())


def assert_arrays(state):
    for name, array in ARRAYS.items():
        plain = np.ascontiguousarray(array, array.dtype.newbyteorder("=")).reshape(array.shape)
        assert same(state[name], torch.from_numpy(plain))


@pytest.mark.parametrize(
    "options", [{}, {"chunks": True}, {"compression": "gzip", "shuffle": True}, {"compression": "lzf"}]
)
def test_data_sets_of_hdf5_are_read(tmp_path, options):
    with h5py.File(tmp_path / "a.weights.h5", "w") as file:
        for name, array in ARRAYS.items():
            file.create_dataset(f"layers/{name}", data=array, **(options if array.ndim and array.size else {}))

    with open_imported(tmp_path / "a.weights.h5") as source:
        assert_arrays(source.load()["layers"])


def test_names_become_nested_dicts_unless_one_is_both_a_tensor_and_a_dict(tmp_path):
    safetensors.torch.save_file({"a/b": WHOLE, "c": WHOLE + 1}, tmp_path / "a.safetensors")
    safetensors.torch.save_file({"a/b": WHOLE, "a": WHOLE + 1}, tmp_path / "b.safetensors")

    with open_imported(tmp_path / "a.safetensors") as a, open_imported(tmp_path / "b.safetensors") as b:
        assert a.load().keys() == {"a", "c"}
        assert a.load()["a"].keys() == {"b"}
        assert b.load().keys() == {"a", "a/b"}


@pytest.mark.parametrize("state", [{"a": {1, 2}}, {"a": torch.ones(2).to_sparse()}, {"a": torch.float32}])
def test_what_a_checkpoint_cannot_hold_is_refused_by_its_path(tmp_path, state):
    torch.save(state, tmp_path / "a.pt")

    with (
        pytest.raises(CheckpointError, match=r"a\.pt (cannot be read: a |asks to run)"),
        open_imported(tmp_path / "a.pt"),
    ):
        pass


@pytest.mark.parametrize(("name", "text"), [("a.txt", "must end with one of"), ("none.pt", "there is no file")])
def test_a_file_that_is_no_file_of_a_known_kind_is_wrong_usage(tmp_path, name, text):
    (tmp_path / "a.txt").write_text("")

    with pytest.raises(ConfigError, match=text), open_imported(tmp_path / name):
        pass


def test_a_digest_of_a_tensor_is_the_one_of_the_manifest(tmp_path):
    state = {"small": WHOLE, "large": torch.randint(0, 255, (17 << 20,), dtype=torch.uint8), "empty": torch.ones(0)}
    write_tensors(tmp_path, 1, state, {}).commit(0)

    found = {path: entry.xxh3 for path, entry in read_manifest(tmp_path, 1).tensors.items()}

    assert found == {path: tensor_digest(tensor) for path, tensor in state.items()}


# --------------------------------------------------------------------------------------------- comparing


def test_equal_tensors_are_identical_and_everything_is_said_of_others():
    a, b = torch.tensor([1.0, 2.0, 4.0]), torch.tensor([1.0, 2.5, 3.0])

    found = only_diff(a, b)

    assert only_diff(a, a.clone()).is_same
    assert (found.values, found.differ, found.max_abs, found.max_rel) == (3, 2, 1.0, 0.25)
    assert found.distance == pytest.approx(math.hypot(0.5, 1.0))


def test_a_nan_is_itself_and_no_other():
    quiet = torch.tensor([0x7FC00000, 0x7FC00000, 0], dtype=torch.int32).view(torch.float32)
    other = torch.tensor([0x7FC00000, 0x7FC00001, 0], dtype=torch.int32).view(torch.float32)

    assert only_diff(quiet, quiet).is_same
    assert only_diff(quiet, quiet).nans == (2, 2)
    assert (only_diff(quiet, other).differ, only_diff(quiet, other).max_abs) == (1, 0.0)
    assert only_diff(quiet, torch.zeros(3)).nans == (2, 0)


def test_the_sign_of_zero_is_a_difference_of_nothing():
    found = only_diff([0.0], [-0.0])

    assert (found.differ, found.max_abs, found.max_rel, found.distance) == (1, 0.0, 0.0, 0.0)


def test_infinities():
    infinite = float("inf")

    assert only_diff([infinite, -infinite], [infinite, -infinite]).is_same
    assert only_diff([infinite], [1.0]).max_abs == infinite
    assert only_diff([infinite], [1.0]).max_rel == 1.0
    assert only_diff([infinite], [-infinite]).distance == infinite


@pytest.mark.parametrize(
    ("dtype", "a", "b", "error"),
    [
        (torch.int64, [2**63 - 1], [-(2**63)], 2.0**64),
        (torch.int64, [2**53], [2**53 + 1], 1.0),
        (torch.uint64, [0], [2**64 - 1], 2.0**64),
        (torch.uint8, [0, 3], [255, 3], 255.0),
        (torch.int8, [-128], [127], 255.0),
        (torch.bool, [True, False], [False, False], 1.0),
    ],
)
def test_integers_and_bools_differ_by_value(dtype, a, b, error):
    found = only_diff(torch.tensor(a, dtype=dtype), torch.tensor(b, dtype=dtype))

    assert (found.differ, found.max_abs) == (1, error)


def test_a_bool_is_true_whatever_its_byte_is():
    one, two = (torch.tensor([byte], dtype=torch.uint8).view(torch.bool) for byte in (1, 2))

    assert only_diff(one, two).is_same


@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_is_compared_with_itself_and_with_float64(name):
    dtype = DTYPES[name]
    a = torch.tensor([0.0, 1.0, 1.0]).to(dtype)
    b = torch.tensor([0.0, 1.0, 0.0]).to(dtype)

    assert only_diff(a, a.clone()).is_same
    assert (only_diff(a, b).differ, only_diff(a, b).max_abs, only_diff(a, b).max_rel) == (1, 1.0, 1.0)
    across = only_diff(a, torch.tensor([0.0, 1.0, 0.5], dtype=torch.float64))
    assert (across.differ, across.max_abs) == (1, 0.5)
    assert across.is_same is False


def test_integers_of_different_widths_are_compared_by_value():
    largest, *five = (
        torch.tensor([n], dtype=kind)
        for n, kind in ((2**64 - 1, torch.uint64), (5, torch.uint64), (5, torch.int8), (5, torch.uint8))
    )

    assert only_diff(torch.tensor([-1]), largest).differ == 1
    assert only_diff(torch.tensor([5]), five[0]).differ == only_diff(five[1], five[2]).differ == 0


def test_more_values_than_are_compared_at_a_time():
    a = torch.zeros((1 << 20) + 5)
    b = a.clone()
    b[3], b[-1] = 3.0, 4.0

    found = only_diff(a, b)

    assert (found.differ, found.max_abs, found.distance) == (2, 4.0, 5.0)


def test_shapes_and_names_that_differ_are_told():
    found = compare(of(w=WHOLE, a=WHOLE), of(w=WHOLE.t(), b=WHOLE))

    assert (found.only_first, found.only_second) == (("a",), ("b",))
    assert found.tensors[0].shapes == ((4, 6), (6, 4))
    assert not found.is_identical


def test_the_bits_of_bfloat16_in_a_file_of_numpy_are_bfloat16():
    tensor = torch.randn(5).bfloat16()

    assert only_diff(tensor, tensor.view(torch.uint16)).is_same
    assert only_diff(tensor.view(torch.uint16), tensor + 1).dtypes == ("bfloat16", "bfloat16")


def test_values_beside_the_tensors_are_compared_and_nan_is_itself(tmp_path):
    for step, lr in ((1, 0.1), (2, 0.2)):
        state = {"w": WHOLE, "lr": lr, "odd": float("nan"), "flags": (True, None), "none": [], str(step): 1}
        write_tensors(tmp_path, step, state, {}).commit(0)
    a, b = (saved_source(open_storage(tmp_path), step) for step in (1, 2))

    assert compare(a, a).is_identical
    assert compare(a, b).scalars == {"lr": ("0.1", "0.2"), "1": ("1", ""), "2": ("", "1")}


# --------------------------------------------------------------------------------------------- converting


def rich_state():
    tied = torch.randn(3, 5)
    return {
        "model": {"w": tied, "head": tied, "half": torch.randn(7).bfloat16(), "odd/name.~": torch.randn(2)},
        "counts": (torch.arange(5), torch.tensor(3, dtype=torch.uint8)),
        "empty": torch.ones(0, 4),
        "lr": 0.1,
    }


@pytest.mark.parametrize("format", FORMATS)
def test_a_checkpoint_is_the_same_in_every_format(tmp_path, format):
    write_tensors(tmp_path / "a", 20, rich_state(), {"workers": 4}).commit(3)

    convert(saved_source(open_storage(tmp_path / "a"), 20), open_storage(tmp_path / "b"), format)
    convert(saved_source(open_storage(tmp_path / "b"), 20), open_storage(tmp_path / "c"), "safetensors")
    first, last = read_manifest(tmp_path / "a", 20), read_manifest(tmp_path / "c", 20)

    assert read_manifest(tmp_path / "b", 20).format == format
    assert (last.info, last.generation, last.skeleton) == (first.info, first.generation, first.skeleton)
    assert {p: e.xxh3 for p, e in last.tensors.items()} == {p: e.xxh3 for p, e in first.tensors.items()}
    assert compare(*(saved_source(open_storage(tmp_path / name), 20) for name in "ac")).is_identical


def test_a_file_of_another_program_becomes_a_checkpoint(tmp_path):
    safetensors.torch.save_file({"model/w": WHOLE}, tmp_path / "a.safetensors", metadata={"step": "12"})

    with open_imported(tmp_path / "a.safetensors") as source:
        saved = convert(source, open_storage(tmp_path / "b"), "npz")

    assert saved.step == 12
    assert torch.equal(load(tmp_path / "b", 12).state["model"]["w"], WHOLE)


def test_a_step_that_is_there_is_not_overwritten(tmp_path):
    write_tensors(tmp_path, 20, {"w": WHOLE}, {}).commit(0)

    with pytest.raises(ConfigError, match=r"step 20 already exists in "):
        convert(saved_source(open_storage(tmp_path), 20), open_storage(tmp_path), "npz")


def test_a_converted_checkpoint_that_is_not_the_same_does_not_stay(tmp_path):
    """Memory that changes between the digest and the write, as bad memory does."""
    write_tensors(tmp_path / "a", 20, {"w": WHOLE.clone()}, {}).commit(0)
    source = saved_source(open_storage(tmp_path / "a"), 20)
    wrong = dataclasses.replace(source, tensors={}, load=lambda: {"w": WHOLE + 1})

    with pytest.raises(CheckpointCorrupt, match="the tensor 'w' has the digest"):
        convert(wrong, open_storage(tmp_path / "b"), "npz")

    assert steps(tmp_path / "b") == []
    assert list((tmp_path / "b").rglob("*.npz")) == []


# --------------------------------------------------------------------------------------------- what is there


def saved(root, *numbers):
    for step in numbers:
        write_tensors(root, step, {"w": torch.full((300,), float(step))}, {"workers": 2}).commit(0)


def test_attempts_are_found_beside_complete_checkpoints_and_in_them(tmp_path):
    saved(tmp_path, 20)
    again = write_tensors(tmp_path, 20, {"w": WHOLE}, {}).manifest.folder
    write_tensors(tmp_path, 30, {"w": WHOLE}, {})

    found = attempts(open_storage(tmp_path))

    assert [(a.step, a.folder) for a in found] == [(20, f"step-00000020/{again}"), (30, "step-00000030")]
    assert all(a.size_bytes >= WHOLE.nbytes for a in found)


def test_a_file_that_is_gone_is_damage_like_any_other(tmp_path):
    saved(tmp_path, 20)
    next(tmp_path.glob("*/data-*/*")).unlink()

    found = examine(open_storage(tmp_path), 20)

    assert {damage.tensor for damage in found.damage} == {"", "w"}
    assert found.manifest is not None


def test_pruning_keeps_the_newest_the_chosen_and_the_newest_intact(tmp_path):
    saved(tmp_path, 10, 20, 30, 40, 50)
    flip(*data_files(tmp_path, 50), -1)
    flip(*data_files(tmp_path, 40), -1)
    write_tensors(tmp_path, 5, {"w": WHOLE}, {})
    write_tensors(tmp_path, 60, {"w": WHOLE}, {})

    plan = prune(open_storage(tmp_path), 2, 20, dry_run=True)
    before = steps(tmp_path)
    done = prune(open_storage(tmp_path), 2, 20)

    assert plan == done
    assert before == [10, 20, 30, 40, 50]
    assert steps(tmp_path) == [20, 30, 40, 50]
    assert (done.steps, done.damaged, [a.step for a in done.attempts]) == ((10,), (40, 50), [5])
    assert done.freed_bytes > 1200 + WHOLE.nbytes
    assert sorted(p.name for p in tmp_path.iterdir()) == [f"step-000000{n}" for n in (20, 30, 40, 50, 60)]


def test_nothing_is_removed_where_nothing_is_intact(tmp_path):
    saved(tmp_path, 10, 20, 30)
    for step in (10, 20, 30):
        flip(*data_files(tmp_path, step), -1)

    with pytest.raises(CheckpointCorrupt, match=r"none of the 3 checkpoints .* is intact; none was removed"):
        prune(open_storage(tmp_path), 2)

    assert steps(tmp_path) == [10, 20, 30]
