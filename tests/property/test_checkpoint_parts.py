"""However a state is split over writers, and whatever of it a reader wants: it comes back as if it had been one."""

from __future__ import annotations

import json
import tempfile

import torch
from checkpoint_bytes import any_bits, fields_of, same
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.checkpoint import all_but, load, take, verify, write, write_tensors
from holdfast.checkpoint.format import DTYPES, tensor_path
from holdfast.checkpoint.parts import pick

few = settings(max_examples=25)
_texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=4)
_keys = st.one_of(_texts, st.integers(0, 30), st.sampled_from(["0", "1", "10", "~2", "a/b", "parts"]))


@st.composite
def _tensors(draw):
    dtype = draw(st.sampled_from(list(DTYPES.values())))
    return any_bits(dtype, draw(st.lists(st.integers(0, 3), max_size=3)), draw(st.integers(0, 2**31)))


_values = st.one_of(st.none(), st.integers(), st.floats(), _texts, _tensors(), st.lists(_tensors(), max_size=2))
_states = st.recursive(
    st.dictionaries(_keys, _values, max_size=4), lambda inner: st.dictionaries(_keys, inner | _values, max_size=4)
)


def _split(draw, value, writers):
    """Give each entry of a dict to one of the writers, or divide it among them; return what each has."""
    given = [{} for _ in writers]
    for key, inner in value.items():
        if isinstance(inner, dict) and draw(st.booleans()):
            for mine, part in zip(given, _split(draw, inner, writers), strict=True):
                if part or draw(st.booleans()):
                    mine[key] = part
            if not any(key in mine for mine in given):
                given[0][key] = {}
        else:
            given[draw(st.sampled_from(writers))][key] = inner
    return given


def _sorted(value):
    """A state whose dicts are in one order, to compare those that were joined from several."""
    if not isinstance(value, dict):
        return value
    return {key: _sorted(value[key]) for key in sorted(value, key=lambda key: (str(key), str(type(key))))}


def _save_split(root, given, committer=0):
    parts = len(given)
    pending = [write(root, 1, take(mine, i, parts, distinct=True), {}, token="p") for i, mine in enumerate(given)]  # noqa: S106 - no password
    pending[committer].commit(0, wait_s=0)


@few
@given(_states, st.integers(1, 4), st.data())
def test_what_is_split_over_writers_in_any_way_is_loaded_as_one(state, parts, data):
    given = _split(data.draw, state, range(parts))
    with tempfile.TemporaryDirectory() as root:
        _save_split(root, given, data.draw(st.integers(0, parts - 1)))
        verify(root, 1)

        assert same(_sorted(load(root, 1).state), _sorted(state))


@few
@given(st.integers(0, 12), st.integers(1, 5), st.data())
def test_stages_held_by_anybody_are_described_as_if_one_had_held_them(stages, parts, data):
    def stage(number):
        weight = torch.full((2, 3), float(number))
        return {"model": {"w": weight, "tied": weight}, "optimizer": {"state": {0: {"m": -weight}}, "lr": 0.5**number}}

    state = {"replica": {"parts": {str(n): stage(n) for n in range(stages)}, "seen": torch.ones(2)}, "loop": 1}
    homes = data.draw(st.lists(st.integers(0, parts - 1), min_size=stages, max_size=stages))
    held = [{n: part for n, part in state["replica"]["parts"].items() if homes[int(n)] == i} for i in range(parts)]
    given = [{"replica": {"parts": mine}} for mine in held]
    given[0] = state | {"replica": state["replica"] | {"parts": held[0]}}
    with tempfile.TemporaryDirectory() as root, tempfile.TemporaryDirectory() as alone:
        _save_split(root, given)
        write_tensors(alone, 1, state, {}).commit(0)

        many, one = fields_of(root, 1), fields_of(alone, 1)
        assert json.dumps(many["skeleton"]) == json.dumps(one["skeleton"])
        assert list(many["tensors"]) == list(one["tensors"])
        assert same(load(root, 1).state, state)


@few
@given(_states, st.data())
def test_what_is_read_of_a_checkpoint_is_what_would_be_picked_from_the_whole(state, data):
    places = list(_places(state, ()))
    place = data.draw(st.sampled_from(places))
    kept = data.draw(st.lists(st.sampled_from(places), max_size=3))
    only = all_but(place, *kept)
    with tempfile.TemporaryDirectory() as root:
        write_tensors(root, 1, state, {}).commit(0)

        assert same(load(root, 1, only=only).state, pick(load(root, 1).state, only))


def _places(value, where):
    yield tensor_path(where)
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _places(inner, (*where, key))
