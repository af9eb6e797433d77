from __future__ import annotations

import struct
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.checkpoint import load, newest_intact, steps, verify, write_tensors
from holdfast.checkpoint.format import DTYPES, tensor_bytes
from holdfast.errors import CheckpointCorrupt

_texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
_keys = st.one_of(_texts, st.integers(), st.booleans(), st.none(), st.floats(allow_nan=False, allow_infinity=False))
_scalars = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), _texts)


@st.composite
def tensors(draw):
    dtype = draw(st.sampled_from(list(DTYPES.values())))
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    # Any bits at all, NaNs with a payload among them; but a bool has only two values.
    raw = torch.randint(0, 256, (*shape, dtype.itemsize), dtype=torch.uint8, generator=generator)
    tensor = raw[..., 0] > 127 if dtype is torch.bool else raw.view(dtype).reshape(shape)
    how = draw(st.sampled_from(("as it is", "transposed", "strided")))
    if how == "transposed" and tensor.ndim >= 2:
        return tensor.transpose(0, 1)
    if how == "strided" and tensor.ndim:
        return tensor[::2]
    return tensor


states = st.recursive(
    _scalars | tensors(),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.lists(inner, max_size=4).map(tuple), st.dictionaries(_keys, inner, max_size=4)
    ),
    max_leaves=12,
)


def same(a, b):
    """Equal to the bit, kinds included."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        alike = a.dtype == b.dtype and a.shape == b.shape
        return alike and bytes(tensor_bytes(a.contiguous())) == bytes(tensor_bytes(b))
    if isinstance(a, float):
        return struct.pack(">d", a) == struct.pack(">d", b)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return same(list(a.items()), list(b.items()))
    return bool(a == b)


@settings(deadline=None)
@given(states)
def test_what_is_loaded_is_what_was_saved(state):
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)

        write_tensors(root, 1, state, {}).commit(0)

        assert same(state, load(root, 1).state)


@settings(deadline=None)
@given(states, st.integers(1, 3))
def test_a_tensor_in_several_places_comes_back_in_each(state, times):
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        repeated = {"all": [state] * times, "again": state}

        write_tensors(root, 1, repeated, {}).commit(0)

        assert same(repeated, load(root, 1).state)


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory):
    """A root with the steps 10 and 20, and the files of step 20."""
    root = tmp_path_factory.mktemp("two")
    for step in (10, 20):
        state = {
            "w": torch.arange(40.0).reshape(5, 8) + step,
            "b": torch.tensor(step),
            "e": torch.ones(0, 2),
            "lr": 0.1,
        }
        write_tensors(root, step, state, {"seed": 1}).commit(0)
    return root, sorted((root / "step-00000020").iterdir())


def _alter(root, file, altered):
    """Put ``altered`` in the place of ``file`` and return what is loaded then, and what was told."""
    whole = file.read_bytes()
    told = []
    try:
        file.write_bytes(altered)
        with pytest.raises(CheckpointCorrupt):
            verify(root, 20)
        return newest_intact(root, lambda step, _: told.append(step)), told
    finally:
        file.write_bytes(whole)


@settings(deadline=None, max_examples=300)
@given(st.data())
def test_an_altered_byte_anywhere_is_found_and_the_step_before_is_taken(two_steps, data):
    root, files = two_steps
    file = data.draw(st.sampled_from(files))
    altered = bytearray(file.read_bytes())
    altered[data.draw(st.integers(0, len(altered) - 1))] ^= data.draw(st.integers(1, 255))

    assert _alter(root, file, altered) == (10, [20])


@settings(deadline=None)
@given(st.data())
def test_a_file_cut_anywhere_is_found(two_steps, data):
    root, files = two_steps
    file = data.draw(st.sampled_from(files))
    whole = file.read_bytes()

    assert _alter(root, file, whole[: data.draw(st.integers(0, len(whole) - 1))]) == (10, [20])


def test_every_single_bit_of_a_small_checkpoint_counts(tmp_path):
    for step in (1, 2):
        write_tensors(tmp_path, step, [torch.tensor(step)], {}).commit(0)

    missed = []
    for file in (tmp_path / "step-00000002").iterdir():
        whole = file.read_bytes()
        for bit in range(8 * len(whole)):
            altered = bytearray(whole)
            altered[bit // 8] ^= 1 << bit % 8
            file.write_bytes(altered)
            if newest_intact(tmp_path) != 1:
                missed.append((file.name, bit))
        file.write_bytes(whole)

    assert missed == []
    assert newest_intact(tmp_path) == 2


_acts = st.lists(
    st.tuples(st.sampled_from(("save", "write", "abandon", "damage")), st.integers(0, 3), st.integers(0, 99)),
    max_size=8,
)


@settings(deadline=None, max_examples=40)
@given(_acts)
def test_after_any_history_the_newest_intact_step_is_the_one_that_a_list_would_say(acts):
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        model: dict[int, int | None] = {}
        for act, step, value in acts:
            if act == "damage":
                if step in model:
                    _damage(root, step)
                    model[step] = None
                continue
            pending = write_tensors(root, step, {"w": torch.tensor([value])}, {})
            if act == "save":
                pending.commit(0)
                model[step] = value
            if act == "abandon":
                pending.abandon()

        whole = {step: value for step, value in model.items() if value is not None}
        newest = newest_intact(root)

        assert steps(root) == sorted(model)
        assert newest == max(whole, default=None)
        assert newest is None or load(root, newest).state["w"].tolist() == [whole[newest]]


def _damage(root, step):
    (file,) = (root / f"step-{step:08d}").glob("tensors-*")
    # Not a flipped byte: flipping it a second time would heal it.
    file.write_bytes(b"damaged")
