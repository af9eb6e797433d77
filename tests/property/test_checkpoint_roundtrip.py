from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch
from checkpoint_bytes import any_bits, data_files, flip, manifest_file, same, save_parts, step_dir
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.checkpoint import (
    Shard,
    load,
    load_box,
    load_newest,
    newest_intact,
    steps,
    take,
    verify,
    write,
    write_tensors,
)
from holdfast.checkpoint.format import DTYPES, flatten
from holdfast.checkpoint.save import remove
from holdfast.errors import CheckpointCorrupt

_texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
_keys = st.one_of(_texts, st.integers(), st.booleans(), st.none(), st.floats(allow_nan=False, allow_infinity=False))
_scalars = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), _texts)


@st.composite
def tensors(draw):
    dtype = draw(st.sampled_from(list(DTYPES.values())))
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    tensor = any_bits(dtype, shape, draw(st.integers(0, 2**31)))
    how = draw(st.sampled_from(("as it is", "transposed", "strided", "conjugate", "negative", "expanded", "parameter")))
    if how == "transposed" and tensor.ndim >= 2:
        return tensor.transpose(0, 1)
    if how == "strided" and tensor.ndim:
        return tensor[::2]
    if how == "conjugate" and dtype.is_complex:
        return tensor.conj()
    if how == "negative" and dtype in (torch.float64, torch.float32, torch.int32):
        return torch._neg_view(tensor)
    if how == "expanded":
        return tensor.expand(2, *tensor.shape)
    if how == "parameter" and dtype.is_floating_point and dtype.itemsize > 1:
        return torch.nn.Parameter(tensor)
    return tensor


states = st.recursive(
    _scalars | tensors(),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.lists(inner, max_size=4).map(tuple), st.dictionaries(_keys, inner, max_size=4)
    ),
    max_leaves=12,
)


@settings(max_examples=50)
@given(states)
def test_what_is_loaded_is_what_was_saved(state):
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)

        write_tensors(root, 1, state, {}).commit(0)

        assert same(state, load(root, 1).state)


@settings(max_examples=40)
@given(states, st.integers(1, 5), st.data())
def test_what_several_writers_share_is_loaded_as_one_whoever_commits(state, parts, data):
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)

        save_parts(root, 1, [state] * parts, {"seed": 1}, committer=data.draw(st.integers(0, parts - 1)))

        assert same(state, load(root, 1).state)
        assert load(root, 1).info == {"seed": 1}


@settings(max_examples=50)
@given(states, st.integers(1, 3))
def test_a_tensor_in_several_places_comes_back_in_each(state, times):
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        repeated = {"all": [state] * times, "again": state}

        write_tensors(root, 1, repeated, {}).commit(0)
        back = load(root, 1).state

        assert same(repeated, back)
        once = {path: leaf for path, leaf in flatten(state)[0].items() if leaf.numel()}
        assert len([leaf for leaf in flatten(back)[0].values() if leaf.numel()]) == len(once)


@settings(max_examples=40)
@given(states, states)
def test_loading_into_any_memory_changes_nothing_of_what_is_loaded(state, given_state):
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        write_tensors(root, 1, state, {}).commit(0)

        assert same(state, load(root, 1, into=given_state).state)


@st.composite
def _cut(draw, size, at_most=4):
    cuts = sorted(draw(st.sets(st.integers(1, max(1, size - 1)), max_size=at_most))) if size > 1 else []
    return list(zip([0, *cuts], [*cuts, size], strict=True))


@settings(max_examples=40)
@given(st.data())
def test_a_tensor_saved_in_any_boxes_is_loaded_whole_and_in_any_other_box(data):
    shape = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
    dtype = data.draw(st.sampled_from(list(DTYPES.values())))
    whole = any_bits(dtype, shape, data.draw(st.integers(0, 99)))
    boxes = [()]
    for size in shape:
        boxes = [(*box, piece) for box in boxes for piece in data.draw(_cut(size, 2))]
    shards = [
        Shard(whole[tuple(slice(a, b) for a, b in box)], tuple(a for a, _ in box), tuple(shape))
        for box in data.draw(st.permutations(boxes))
    ]
    ranges = [sorted(data.draw(st.tuples(st.integers(0, size), st.integers(0, size)))) for size in shape]
    with tempfile.TemporaryDirectory() as folder:
        save_parts(folder, 1, [{"w": shard, "x": torch.ones(3)} for shard in shards])

        assert same(load(folder, 1).state, {"w": whole, "x": torch.ones(3)})
        box = load_box(folder, 1, "w", tuple(a for a, _ in ranges), tuple(b - a for a, b in ranges))
        assert same(box, whole[tuple(slice(a, b) for a, b in ranges)])


@settings(max_examples=50)
@given(st.lists(st.lists(st.integers(0, 9), max_size=3), max_size=6), st.integers(1, 6))
def test_writers_cut_a_state_into_parts_that_are_all_of_it_once(shapes, parts):
    state = [torch.ones(shape) for shape in shapes]

    boxes = [box for part in range(parts) for box in take(state, part, parts).boxes]

    for i, tensor in enumerate(state):
        mine = sorted((box.start, box.tensor.shape) for box in boxes if box.path == str(i))
        assert sum(shape.numel() for _, shape in mine) == tensor.numel()
        assert len(mine) == len({start for start, _ in mine}) >= 1


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory):
    """A root with the steps 10 and 20 of two writers, and the files of step 20."""
    root = tmp_path_factory.mktemp("two")
    for step in (10, 20):
        state = {
            "w": torch.arange(40.0).reshape(5, 8) + step,
            "b": torch.tensor(step),
            "e": torch.ones(0, 2),
            "lr": 0.1,
        }
        save_parts(root, step, [state] * 2, {"seed": 1})
    return root, [manifest_file(root, 20), *data_files(root, 20)]


def _alter(root, file, altered):
    """Put ``altered`` in the place of ``file`` and return what is loaded then, and what was told."""
    whole = file.read_bytes()
    told = []
    try:
        file.write_bytes(altered)
        with pytest.raises(CheckpointCorrupt):
            verify(root, 20)
        newest = newest_intact(root, lambda step, _: told.append(step))
        assert load_newest(root).step == newest
        return newest, told
    finally:
        file.write_bytes(whole)


@settings(max_examples=100)
@given(st.data())
def test_an_altered_byte_anywhere_is_found_and_the_step_before_is_taken(two_steps, data):
    root, files = two_steps
    file = data.draw(st.sampled_from(files))
    altered = bytearray(file.read_bytes())
    altered[data.draw(st.integers(0, len(altered) - 1))] ^= data.draw(st.integers(1, 255))

    assert _alter(root, file, altered) == (10, [20])


@settings(max_examples=50)
@given(st.data())
def test_a_file_cut_anywhere_is_found(two_steps, data):
    root, files = two_steps
    file = data.draw(st.sampled_from(files))
    whole = file.read_bytes()

    assert _alter(root, file, whole[: data.draw(st.integers(0, len(whole) - 1))]) == (10, [20])


def is_intact(root, step):
    try:
        return verify(root, step).step == step
    except CheckpointCorrupt:
        return False


def test_every_single_bit_of_a_small_checkpoint_counts(tmp_path):
    write_tensors(tmp_path, 1, [torch.tensor(7)], {}).commit(0)

    missed = []
    for file in (manifest_file(tmp_path, 1), *data_files(tmp_path, 1)):
        for bit in range(8 * file.stat().st_size):
            flip(file, bit // 8, 1 << bit % 8)
            if is_intact(tmp_path, 1):
                missed.append((file.name, bit))
            flip(file, bit // 8, 1 << bit % 8)

    assert missed == []
    assert is_intact(tmp_path, 1)


_acts = st.lists(
    st.tuples(
        st.sampled_from(("save", "save", "write", "abandon", "damage", "remove")),
        st.integers(0, 3),
        st.integers(0, 99),
        st.integers(1, 3),
    ),
    max_size=10,
)


@settings(max_examples=30)
@given(_acts)
def test_after_any_history_the_newest_intact_step_is_the_one_that_a_list_would_say(acts):
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        model: dict[int, int | None] = {}
        for number, (act, step, value, parts) in enumerate(acts):
            if act == "damage":
                if step in model:
                    _damage(root, step)
                    model[step] = None
                continue
            if act == "remove":
                remove(root, step)
                model.pop(step, None)
                continue
            content = [take({"w": torch.full((5,), value)}, part, parts) for part in range(parts)]
            pending = [write(root, step, part, {}, token=f"t{number}") for part in content]
            if act == "save":
                pending[number % parts].commit(0, wait_s=0)
                model[step] = value
            if act == "abandon":
                pending[0].abandon()

        whole = {step: value for step, value in model.items() if value is not None}
        newest = newest_intact(root)

        assert steps(root) == sorted(model)
        assert newest == max(whole, default=None)
        assert newest is None or load(root, newest).state["w"].tolist() == [whole[newest]] * 5


def _damage(root, step):
    # Not a flipped byte: flipping it a second time would heal it.
    for file in step_dir(root, step).glob("data-*/*"):
        file.write_bytes(b"damaged")
