"""Records of alterations: strict reading, and the same alterations in another program's tensors."""

from __future__ import annotations

import json

import numpy as np
import pytest

from holdfast.errors import ConfigError
from holdfast.faults.alteration import Alteration, ValuePosition, apply, draw
from holdfast.faults.formats import FORMATS
from holdfast_lab.inject.files.replay import lines, parse_map, parse_record, replay
from holdfast_lab.inject.record import record_of


class Arrays:
    """Values in arrays."""

    def __init__(self, arrays):
        self.arrays = {path: np.ascontiguousarray(array) for path, array in arrays.items()}
        self.places = [
            ValuePosition(path, FORMATS[array.dtype.name], array.shape) for path, array in self.arrays.items()
        ]

    def raw(self, place):
        return list(self.arrays.values())[place].reshape(-1).view(self.places[place].format.raw)

    def read(self, wanted):
        assert all(np.all(np.diff(index) > 0) for _, index in wanted), "indices must rise"
        return [self.raw(place)[index] for place, index in wanted]

    def write(self, changes):
        for change in changes:
            self.raw(change.place)[change.index] = change.after


def keras(seed=0):
    rng = np.random.default_rng(seed)
    return Arrays(
        {
            "conv/kernel:0": rng.standard_normal((3, 3, 4, 8)).astype("f4"),  # HWIO
            "block/dense/kernel:0": rng.standard_normal((6, 5)).astype("f4"),
            "block/dense/bias:0": rng.standard_normal(5).astype("f4"),
        }
    )


def in_torch(values):
    """The same weights, named and laid out as torch does."""
    arrays = values.arrays
    return Arrays(
        {
            "fc/dense/bias:0": arrays["block/dense/bias:0"].copy(),
            "conv.weight": arrays["conv/kernel:0"].transpose(3, 2, 0, 1).copy(),
            "fc.weight": arrays["block/dense/kernel:0"].T.copy(),
        }
    )


MAP = {
    "schema": 1,
    "paths": {
        "conv/kernel:0": {"path": "conv.weight", "axes": [3, 2, 0, 1]},
        "block": "fc",
        "block/dense/kernel:0": {"path": "fc.weight", "axes": [1, 0]},
    },
}


def recorded(values, **options):
    alteration = Alteration(**options)
    changes = draw(values, alteration)
    return changes, "".join(lines(record_of(values.places, changes, alteration.scale)))


@pytest.mark.parametrize("options", [{"count": 60}, {"percent": 20, "scale": 1e3}])
def test_a_map_alters_the_same_weights_in_another_framework(options):
    one = keras()
    other = in_torch(one)
    changes, text = recorded(one, **options)

    found = replay(other, parse_record(text), parse_map(json.dumps(MAP)))
    apply(one, changes)
    apply(other, found.changes)

    assert (found.missing, found.others) == ((), 0)
    for path, array in in_torch(one).arrays.items():
        np.testing.assert_array_equal(array.view("u4"), other.arrays[path].view("u4"))


def test_a_stage_takes_its_part_and_the_rest_is_named():
    _, text = recorded(keras(), percent=100)
    stage = Arrays({"conv/kernel:0": np.zeros((3, 3, 4, 8), "f4")})

    found = replay(stage, parse_record(text))

    assert found.missing == ("block/dense/kernel:0", "block/dense/bias:0")
    assert (len(found.changes), len(found.changes[0]), found.others) == (1, 288, 288)


def test_a_record_is_json_and_comes_back_to_the_bit_whatever_the_values_are():
    odd = np.array([0x7FC00001, 0xFF800000, 0x80000000, 0x00000001, 0x7F7FFFFF], "u4").view("f4")
    values = Arrays({"w": odd, "n": np.array([2**63 - 1, -(2**63), 5]), "u": np.array([2**64 - 1], "u8")})
    changes, text = recorded(values, percent=100)

    record = parse_record(text)

    json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert "".join(lines(record)) == text
    for tensor, change in zip(record.tensors, changes, strict=True):
        np.testing.assert_array_equal(tensor.before, change.before)
        np.testing.assert_array_equal(tensor.after, change.after)


def plain(**changed):
    flip = {"path": "w", "index": 1, "bit": 30, "before": 2.0, "after": 0.0}
    fields = {"schema": 1, "scale": None, "places": [{"path": "w", "dtype": "float32", "shape": [3]}], "flips": [flip]}
    for name, value in changed.items():
        if name in flip:
            flip[name] = value
        else:
            fields[name] = value
    return json.dumps(fields)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "the record is not JSON"),
        ("[]", "the record must be a JSON object, got []"),
        ('{"schema": 1, "schema": 1}', "a key occurs twice in one object of the record"),
        ('{"schema": NaN}', "NaN in the record is not a JSON number"),
        ('{"schema": 1}', "the record must have the keys schema, scale, places, flips; wrong or missing: flips, places, scale"),
        (plain(schema=2), "schema of the record must be 1, got 2; another version of holdfast may read it"),
        (plain(schema=True), "schema of the record must be 1, got True"),
        (plain(scale="2"), "scale of the record must be a number or null, got '2'"),
        (plain(places=[{"path": "w", "dtype": "complex64", "shape": [3]}]), "a place of the record must have a path and one of"),
        (plain(places=[{"path": "w", "dtype": "float32", "shape": [-3]}]), "shape of 'w' in the record must be a list of whole"),
        (plain(places=[{"path": "w", "dtype": "float32", "shape": [3]}] * 2), "places of the record must have different paths"),
        (plain(path="v"), "flip 0 of the record names 'v', which is none of its places"),
        (plain(index=3), "an index of 'w' in the record must be from 0 to 2, got 3"),
        (plain(index=1.0), "an index of 'w' in the record must be from 0 to 2, got 1.0"),
        (plain(bit=32), "the value 1 of 'w' in the record must have different bits from 0 to 31, got [32]"),
        (plain(bit=None), "the value 1 of 'w' in the record must have different bits from 0 to 31, got [None]"),
        (plain(bit=29), "the value 1 of 'w' in the record differs before and after in other bits than [29]"),
        (plain(scale=2.0), "the value 1 of 'w' in the record must occur once, with bit null, because scale is given"),
        (plain(before="inf"), "a value of 'w' in the record must be one of float32, got 'inf'"),
        (plain(before="0x7F800000"), "a value of 'w' in the record must be one of float32, got '0x7F800000'"),
        (plain(before=True), "a value of 'w' in the record must be one of float32, got True"),
        (plain().replace("2.0", "1e999"), "a value of 'w' in the record must be one of float32, got inf"),
    ],
)  # fmt: skip
def test_a_record_that_is_not_exactly_right_is_refused_in_one_line(text, said):
    with pytest.raises(ConfigError) as caught:
        parse_record(text)

    assert str(caught.value).startswith(said)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("paths", "said"),
    [
        ({"w": {"path": "v", "axes": [0, 0]}}, "axes of 'v' must be the numbers 0 to 1 in some order, got [0, 0]"),
        ({"w": {"path": "v", "axes": [1, 0]}}, "'v' has shape [2, 3], the record [2, 3] with axes [1, 0]"),
        ({"w": {"path": "h", "axes": [0, 1]}}, "'h' is of float16, the record of float32: their bits differ"),
        ({"w": "v", "x": "v"}, "the map leads two tensors of the record to 'v'; map each to its own tensor"),
        ({"w": 3}, "paths/w of the map must be a JSON object, got 3"),
        ({"w": {"path": "v"}}, "paths/w of the map must have the keys path, axes; wrong or missing: axes"),
    ],
)
def test_a_map_that_does_not_fit_is_refused_in_one_line(paths, said):
    _, text = recorded(Arrays({"w": np.ones((2, 3), "f4"), "x": np.ones((2, 3), "f4")}), percent=100)
    target = Arrays({"v": np.ones((2, 3), "f4"), "h": np.ones((2, 3), "f2")})

    with pytest.raises(ConfigError) as caught:
        replay(target, parse_record(text), parse_map(json.dumps({"schema": 1, "paths": paths})))

    assert str(caught.value).startswith(said)
