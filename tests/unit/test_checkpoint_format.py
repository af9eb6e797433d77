from __future__ import annotations

import math
from collections import Counter, OrderedDict, defaultdict

import numpy as np
import pytest
import torch

from holdfast.checkpoint import Shard, flatten, unflatten
from holdfast.errors import CheckpointCorrupt, CheckpointError


def test_tensors_have_paths_that_a_person_can_read():
    model = torch.nn.Sequential(OrderedDict(conv1=torch.nn.Conv2d(1, 2, 3), norm=torch.nn.BatchNorm2d(2)))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 1, 4, 4)).sum().backward()
    optimizer.step()

    tensors, _ = flatten({"model": model.state_dict(), "optimizer": optimizer.state_dict()})

    assert {"model/conv1.weight", "model/norm.running_var", "optimizer/state/0/exp_avg"} <= tensors.keys()


def test_a_state_dict_comes_back_with_its_numbers_as_keys_and_its_tuples():
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.8, 0.9))
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()

    state = unflatten(*flatten(optimizer.state_dict()))

    assert list(state["state"]) == [0, 1]
    assert state["param_groups"][0]["betas"] == (0.8, 0.9)
    torch.optim.AdamW(model.parameters()).load_state_dict(state)


def test_kinds_that_are_equal_in_python_stay_apart():
    state = [
        1,
        1.0,
        True,
        "1",
        None,
        [],
        (),
        {},
        OrderedDict(),
        Counter("aab"),
        {1: "a", "1": "b", None: "c"},
        {False: 0},
    ]

    back = unflatten(*flatten(state))

    assert back == state
    assert list(map(type, back)) == list(map(type, state))
    assert list(map(type, back[10])) == [int, str, type(None)]


def test_paths_never_clash():
    one, two, three, four, five, six, seven = (torch.tensor(float(i)) for i in range(7))
    state = {"a/b": one, "a": {"b": two}, 0: three, "0": four, "__metadata__": five, "~": six, "": seven}

    tensors, skeleton = flatten(state)
    back = unflatten(tensors, skeleton)

    assert list(tensors) == ["a~1b", "a/b", "0", "0~2", "__metadata__~2", "~0", "~2"]
    assert all(back[key] is state[key] for key in ("a/b", 0, "0", "__metadata__", "~", ""))
    assert back["a"]["b"] is two


def test_a_tensor_in_several_places_is_tied_and_comes_back_as_one():
    weight = torch.nn.Parameter(torch.arange(6.0).reshape(2, 3))
    state = {"embedding": weight, "head": weight.data, "again": [weight.view(2, 3)]}

    tensors, skeleton = flatten(state)
    back = unflatten(tensors, skeleton)

    assert list(tensors) == ["embedding"]
    assert back["head"] is back["embedding"]
    assert back["again"][0] is back["embedding"]


_BASE = torch.arange(12.0).reshape(3, 4)


@pytest.mark.parametrize(
    "other",
    [
        _BASE[:2],
        _BASE[0],
        _BASE.t(),
        _BASE.reshape(4, 3),
        _BASE.reshape(12),
        _BASE[:, :3],
        _BASE.view(torch.int32),
        _BASE[1:],
        _BASE.clone(),
        torch._neg_view(_BASE),
        Shard(_BASE, (0, 0), (3, 4)),
    ],
    ids=["rows", "row", "transposed", "4x3", "flat", "columns", "integers", "tail", "copy", "negative", "shard"],
)
def test_a_view_that_is_not_all_of_the_other_is_not_tied(other):
    tensors, _ = flatten([_BASE, other])

    assert list(tensors) == ["0", "1"]


def test_a_conjugate_is_not_tied_to_what_it_is_the_conjugate_of():
    numbers = torch.ones(2, dtype=torch.complex64)

    assert list(flatten([numbers, numbers.conj()])[0]) == ["0", "1"]


def test_tensors_without_elements_are_never_tied():
    nothing = torch.empty(0)

    assert list(flatten([nothing, nothing])[0]) == ["0", "1"]


@pytest.mark.parametrize(
    "shard",
    [
        Shard(torch.ones(2), (3,), (4,)),
        Shard(torch.ones(2), (-1,), (4,)),
        Shard(torch.ones(2), (0, 0), (4,)),
        Shard(torch.ones(2), (0,), (4, 1)),
        Shard(torch.ones(2, 2), (0,), (4,)),
    ],
)
def test_a_shard_outside_its_tensor_is_refused(shard):
    with pytest.raises(CheckpointError, match=r"a is a shard of shape .*it must lie inside the whole"):
        flatten({"a": shard})


def test_a_lone_tensor_is_a_state():
    tensor = torch.ones(2)

    assert unflatten(*flatten(tensor)) is tensor


class _Custom:
    pass


class _Marked(torch.Tensor):
    pass


def _endless():
    state: list[object] = []
    state.append(state)
    return state


@pytest.mark.parametrize(
    ("state", "place", "what"),
    [
        ({"a": {"b": [0, _Custom()]}}, "a/b/1", "_Custom"),
        ({"a": {1, 2}}, "a", "has type set"),
        ({"a": b"bytes"}, "a", "has type bytes"),
        ({"a": np.float64(1)}, "a", "has type numpy.float64"),
        ({"a": np.ones(2)}, "a", "has type numpy.ndarray"),
        ({"a": torch.Size([1])}, "a", "has type torch.Size"),
        ({"a": defaultdict(list)}, "a", "has type collections.defaultdict"),
        ({"a": lambda: 0}, "a", "has type function"),
        ({"a": {(1, 2): 0}}, "a", "has the key (1, 2) of type tuple"),
        ({"a": {math.nan: 0}}, "a", "has the key nan"),
        ({"a": torch.ones(2).to_sparse()}, "a", "is a tensor of layout torch.sparse_coo"),
        ({"a": torch.ones(2, device="meta")}, "a", "on meta"),
        ({"a": torch.empty(2, dtype=torch.float8_e8m0fnu)}, "a", "is a tensor of torch.float8_e8m0fnu"),
        ({"a": {"\udc00": 0}}, "a", "not valid Unicode"),
        ({"a": torch.ones(2).as_subclass(_Marked)}, "a", "_Marked"),
        ({"a": "\ud800"}, "a", "not valid Unicode"),
        ({"a": 1 << 5000}, "a", "is an integer of 5001 bits"),
        (_Custom(), "the state itself", "_Custom"),
    ],
)
def test_what_is_not_data_is_refused_with_its_place(state, place, what):
    with pytest.raises(CheckpointError) as refused:
        flatten(state)

    message = str(refused.value)
    assert message.startswith(f"the state cannot be saved: {place} ")
    assert what in message
    assert "allowed are dict, list, tuple, tensor, int, float, bool, str and None" in message


def test_a_state_that_contains_itself_is_refused():
    with pytest.raises(CheckpointError, match="nested deeper than 64 levels"):
        flatten(_endless())


@pytest.mark.parametrize(
    "skeleton",
    [
        {},
        {"tensor": "a", "tuple": []},
        {"tensor": "b"},
        {"tensor": ["a"]},
        [{"tensor": "a"}, {"tensor": "a"}],
        [],
        [{"tied": "a"}],
        [{"tied": "a"}, {"tensor": "a"}],
        [{"tensor": "a"}, {"tied": "b"}],
        [{"tensor": "a"}, {"tied": ["a"]}],
        [{"tensor": "a"}, 1 << 4097],
        [{"tensor": "a"}, {"dict": [[-1 << 4097, 1]]}],
        [{"tensor": "a"}, "\ud800"],
        [{"tensor": "a"}, {"dict": [["\ud800", 1]]}],
        [{"tensor": "a"}, {"float": "zz"}],
        [{"tensor": "a"}, {"float": 1.0}],
        [{"tensor": "a"}, {"float": "00"}],
        [{"tensor": "a"}, {"tuple": {}}],
        [{"tensor": "a"}, {"object": []}],
        [{"tensor": "a"}, {"dict": [["k"]]}],
        [{"tensor": "a"}, {"dict": [[[1], 2]]}],
        [{"tensor": "a"}, {"dict": [[1, 2], [True, 3]]}],
        [{"tensor": "a"}, {"dict": {"k": 1}}],
    ],
)
def test_a_skeleton_that_breaks_its_grammar_is_damaged(skeleton):
    with pytest.raises(CheckpointCorrupt, match="skeleton"):
        unflatten({"a": torch.ones(1)}, skeleton)


def test_a_skeleton_without_end_is_damaged():
    skeleton: list[object] = []
    for _ in range(200):
        skeleton = [skeleton]

    with pytest.raises(CheckpointCorrupt, match="nested deeper"):
        unflatten({}, skeleton)


def test_a_name_cannot_speak_to_the_terminal_through_an_error():
    with pytest.raises(CheckpointCorrupt) as damaged:
        unflatten({}, {"dict": [["\x1b[2J\n", {"tensor": "gone"}]]})

    assert str(damaged.value).isprintable()
    assert "\\x1b[2J\\n" in str(damaged.value)
