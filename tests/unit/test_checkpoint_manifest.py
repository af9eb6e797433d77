from __future__ import annotations

import copy
import json
import tracemalloc

import pytest
import torch
from checkpoint_bytes import fields_of, manifest_file, save_parts, seal, sealed
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from holdfast.checkpoint import Shard, write_tensors
from holdfast.checkpoint.manifest import MAX_BYTES, check_info, dump, parse
from holdfast.errors import CheckpointCorrupt, CheckpointError

# A machine that is busy with something else is no reason to fail.
UNHURRIED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
W = ("tensors", "w")
P0 = (*W, "pieces", 0)
FILE = ("files", "part-00000.safetensors")


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A right manifest as JSON: w (4 x 3) comes from two writers, v and n from one."""
    root = tmp_path_factory.mktemp("written")
    states = [{"w": Shard(torch.ones(2, 3), (2 * i, 0), (4, 3)), "v": torch.ones(2), "n": 0.5} for i in range(2)]
    save_parts(root, 1, states, {"seed": 0}, generation=2)
    return fields_of(root, 1)


@pytest.fixture
def fields(written):
    """The same, to be made wrong."""
    return copy.deepcopy(written)


def test_a_manifest_is_read_as_it_was_written(tmp_path):
    state = {"w": torch.ones(2, 3), "z": torch.ones(0), "s": torch.tensor(1), "tied": None}
    state["tied"] = state["w"]

    manifest = write_tensors(tmp_path, 1, state, {"seed": 0, "deep": [{"a": [None, True, 1.5, "x"]}]}).manifest

    assert parse(dump(manifest)) == manifest


def test_the_helper_makes_a_manifest_whole(fields):
    assert parse(seal(fields)).generation == 2


def _set(*path_and_value):
    *path, value = path_and_value

    def change(fields):
        for key in path[:-1]:
            fields = fields[key]
        fields[path[-1]] = value

    return change


def _drop(*path):
    def change(fields):
        for key in path[:-1]:
            fields = fields[key]
        del fields[path[-1]]

    return change


def _all(*changes):
    def change(fields):
        for one in changes:
            one(fields)

    return change


@pytest.mark.parametrize(
    ("change", "place"),
    [
        (_set("schema", 1), "schema: must be 2 or 3, is 1"),
        (_set("schema", 2.0), "schema: "),
        (_drop("schema"), "schema: "),
        (_drop("step"), "keys: step "),
        (_drop("skeleton"), "keys: skeleton "),
        (_set("more", 1), "keys: more "),
        (_set("step", -1), "step: must be at least 0"),
        (_set("step", "1"), "step: must be of type int"),
        (_set("step", 1 << 63), "step: must be at least 0 and at most 9223372036854775807"),
        (_set("generation", -1), "generation: "),
        (_set("format", 7), "format: must be of type str"),
        (_set("folder", "data-../../etc"), "folder: "),
        (_set("folder", "data-"), "folder: "),
        (_set("folder", "data-A"), "folder: "),
        (_set("folder", "data-0\n"), "folder: "),
        (_set("folder", "data-" + "0" * 65), "folder: "),
        (_set("files", []), "files: must be of type dict"),
        (_set("files", {}), "tensors/"),
        (_set("files", "../x", {"bytes": 1, "rest_xxh3": "0" * 16}), "files/../x: must be the plain name of a file"),
        (_set("files", "a" * 129, {"bytes": 1, "rest_xxh3": "0" * 16}), "files/aaa"),
        (_set(*FILE, []), "files/part-00000.safetensors/: must be an object"),
        (_set(*FILE, "more", 0), "files/part-00000.safetensors/keys: more "),
        (_set(*FILE, "bytes", 1), "ends beyond the end of part-00000.safetensors"),
        (_set(*FILE, "bytes", 10**4000), "files/part-00000.safetensors/bytes: "),
        (_set(*FILE, "rest_xxh3", "0" * 15), "files/part-00000.safetensors/rest_xxh3: "),
        (_set(*FILE, "rest_xxh3", "0123456789ABCDEF"), "files/part-00000.safetensors/rest_xxh3: "),
        (_set("info", []), "info: "),
        (_set("info", {"a": json.loads("[" * 70 + "]" * 70)}), "info: "),
        (_set("versions", "torch", 2), "versions: "),
        (_set("tensors", []), "tensors: "),
        (_set(*W, []), "tensors/w/: must be an object"),
        (_set(*W, "more", 1), "tensors/w/keys: more "),
        (_set(*W, "dtype", "object"), "tensors/w/dtype: must be one of float64"),
        (_set(*W, "shape", [2, -3]), "tensors/w/shape: "),
        (_set(*W, "shape", [True, 6]), "tensors/w/shape: "),
        (_set(*W, "shape", [1 << 40, 1 << 40]), "tensors/w/shape: must be at most 4611686018427387904 elements"),
        (_set(*W, "shape", [0, 1 << 40, 1 << 40]), "tensors/w/shape: "),
        (_set(*W, "shape", [10**4000] * 64), "tensors/w/shape: "),
        (_set(*W, "shape", [1] * 65), "tensors/w/shape: "),
        (_set(*W, "shape", [5, 3]), "tensors/w: has 15 values, its 2 pieces hold 12"),
        (_set(*W, "shape", [3, 3]), "tensors/w/pieces/1/shape: must lie inside [3, 3]"),
        (_set(*W, "shape", [12]), "tensors/w/pieces/0/start: "),
        (_set(*W, "pieces", {}), "tensors/w/pieces: "),
        (_set(*W, "pieces", []), "tensors/w: has 12 values, its 0 pieces hold 0"),
        (_set(*P0, "more", 1), "tensors/w/pieces/0/keys: more "),
        (_drop(*P0, "offset"), "tensors/w/pieces/0/keys: offset "),
        (_set(*P0, "file", "part-00007.safetensors"), "tensors/w/pieces: name the file 'part-00007.safetensors'"),
        (_set(*P0, "offset", -1), "tensors/w/pieces/0/offset: "),
        (_set(*P0, "offset", 1 << 62), "tensors/w: ends beyond the end of part-00000.safetensors"),
        (_set(*P0, "offset", 10**4299 * 9), "tensors/w/pieces/0/offset: "),
        (_set(*P0, "start", [0]), "tensors/w/pieces/0/start: must be 2 whole numbers"),
        (_set(*P0, "start", [-1, 0]), "tensors/w/pieces/0/start: "),
        (_set(*P0, "start", [3, 0]), "tensors/w/pieces/0/shape: must lie inside"),
        (_set(*P0, "start", [1, 0]), "tensors/w: has pieces that overlap"),
        (_set(*P0, "shape", [2]), "tensors/w/pieces/0/shape: "),
        (_set(*P0, "shape", [2, 4]), "tensors/w/pieces/0/shape: must lie inside"),
        (_set(*P0, "shape", [1, 3]), "tensors/w/pieces/0/bytes: is 24, but its shape and dtype need 12"),
        (_all(_set(*P0, "shape", [1, 3]), _set(*P0, "bytes", 12)), "tensors/w: has 12 values, its 2 pieces hold 9"),
        (_set(*P0, "bytes", 23), "tensors/w/pieces/0/bytes: "),
        (_set(*P0, "blocks", []), "tensors/w/pieces/0/blocks: must be 1 digests, are 0"),
        (_set(*P0, "blocks", ["0123456789ABCDEF"]), "tensors/w/pieces/0/blocks: "),
        (_set(*P0, "blocks", [None]), "tensors/w/pieces/0/blocks: "),
        (_set("skeleton", None), "skeleton does not say where tensor 'v' belongs"),
        (_set("skeleton", {"eval": "os.abort()"}), "skeleton is damaged"),
    ],
)
def test_a_manifest_that_says_something_impossible_is_damaged_and_the_place_is_named(fields, change, place):
    change(fields)

    with pytest.raises(CheckpointCorrupt) as refused:
        parse(seal(fields))

    assert place in str(refused.value)
    assert len(str(refused.value)) < 1000


def test_two_tensors_at_the_same_bytes_are_damage(fields):
    fields["tensors"]["v"]["pieces"][0] |= {"offset": fields["tensors"]["w"]["pieces"][0]["offset"] + 4}

    with pytest.raises(CheckpointCorrupt, match=r"tensors/[vw]: overlaps another tensor at byte \d+ of part-00000"):
        parse(seal(fields))


def test_a_scalar_has_room_for_one_piece(tmp_path):
    write_tensors(tmp_path, 1, {"s": torch.tensor(1.0)}, {}).commit(0)
    fields = fields_of(tmp_path, 1)
    fields["tensors"]["s"]["pieces"] *= 2

    with pytest.raises(CheckpointCorrupt, match="tensors/s: has 1 values, its 2 pieces hold 2"):
        parse(seal(fields))


@pytest.mark.parametrize("cuts", ["rows", "columns", "grid"])
def test_many_pieces_are_checked_in_little_time_whichever_way_they_are_cut(tmp_path, cuts):
    fields, n = _pieces_of(tmp_path, cuts)

    whole = parse(seal(fields))
    fields["tensors"]["w"]["pieces"][n // 2] |= {"start": [0, 0]}

    assert len(whole.tensors["w"].pieces) == n
    with pytest.raises(CheckpointCorrupt, match="has pieces that overlap"):
        parse(seal(fields))


def _pieces_of(root, cuts):
    """A manifest with one tensor of many pieces of one value each."""
    high, wide = {"rows": (2500, 1), "columns": (1, 2500), "grid": (50, 50)}[cuts]
    write_tensors(root, 1, {"w": torch.ones(high, wide)}, {}).commit(0)
    fields = fields_of(root, 1)
    (piece,) = fields["tensors"]["w"]["pieces"]
    fields["tensors"]["w"]["pieces"] = [
        piece | {"offset": piece["offset"] + 4 * (wide * i + j), "start": [i, j], "shape": [1, 1], "bytes": 4}
        for i in range(high)
        for j in range(wide)
    ]
    return fields, high * wide


@pytest.mark.parametrize(
    "text",
    [
        '{"schema": 2, "schema": 2}',
        '{"schema": 2, "info": {"a": {"b": 1, "b": 1}}}',
        '{"schema": NaN}',
        '{"schema": -Infinity}',
        '{"schema": 1e999}',
        '{"schema": ' + "9" * 5000 + "}",
        '{"schema": ' + "[" * 100_000 + "}",
        '{"schema": ' + '{"a":' * 100_000 + "}",
        '{"schema" 2}',
        '{"schema": "\\ud8}',
        '{"schema": "\ud800"}',
    ],
    ids=range(11),
)
def test_json_that_python_would_let_pass_is_damaged(text):
    with pytest.raises(CheckpointCorrupt, match="manifest, JSON: ") as refused:
        parse(sealed(text))

    assert len(str(refused.value)) < 1000


@pytest.mark.parametrize(
    "data", [b"", b"{}", b"null", b"\xff\xfe", b'"xxh3": "0000000000000000"\n}\n', b'\n"xxh3": "2d06800538d394c2"\n}\n']
)
def test_bytes_that_are_no_manifest_are_damaged(data):
    with pytest.raises(CheckpointCorrupt, match="manifest, "):
        parse(data)


def test_a_manifest_too_large_for_memory_is_not_read():
    with pytest.raises(CheckpointCorrupt, match=f"manifest, size: it has {MAX_BYTES + 1} bytes"):
        parse(bytes(MAX_BYTES + 1))


def test_the_manifest_of_one_of_several_writers_is_no_manifest(tmp_path):
    state = {"a": torch.ones(4), "b": torch.ones(2)}
    save_parts(tmp_path, 1, [state, state])
    fields = fields_of(tmp_path, 1)
    fields["tensors"]["a"]["pieces"].pop()

    assert parse(seal(fields), is_part=True).tensors["a"].shape == (4,)
    with pytest.raises(CheckpointCorrupt, match="tensors/a: has 4 values"):
        parse(seal(fields))


def test_a_name_cannot_speak_to_the_terminal_through_an_error(fields):
    fields["tensors"]["\x1b[2J"] = []

    with pytest.raises(CheckpointCorrupt) as refused:
        parse(seal(fields))

    assert str(refused.value).isprintable()


@pytest.mark.parametrize(
    ("info", "place"),
    [
        ({"a": float("nan")}, "info/a"),
        ({"a": [0, (1,)]}, "info/a/1"),
        ({"a": {1: 2}}, "info/a"),
        ({"a": torch.ones(1)}, "info/a"),
        ([], "info"),
    ],
)
def test_info_that_json_would_change_is_refused_with_its_place(info, place):
    with pytest.raises(CheckpointError, match=f"^{place} must be "):
        check_info(info)


def test_info_that_contains_itself_is_refused():
    info = {}
    info["self"] = info

    with pytest.raises(CheckpointError, match="nested deeper than 64 levels"):
        check_info(info)


# ------------------------------------------------------------------------------ anything at all


_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(2**60, 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5)
    | st.sampled_from(["../x", "data-0", "0" * 16, "float64", "bool", "w", "v", "part-00000.safetensors"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


def _places(node, path=()):
    """Every place in a JSON value."""
    yield path
    for key, child in node.items() if type(node) is dict else enumerate(node) if type(node) is list else ():
        yield from _places(child, (*path, key))


def _mutate(data, fields):
    path = data.draw(st.sampled_from([p for p in _places(fields) if p and p != ("xxh3",)]))
    parent = fields
    for key in path[:-1]:
        parent = parent[key]
    act = data.draw(st.sampled_from(["set", "drop", "swap", "add", "nudge"]))
    if act == "drop":
        del parent[path[-1]]
    elif act == "swap":  # what stands somewhere else
        other = fields
        for key in data.draw(st.sampled_from(list(_places(fields)))):
            other = other[key]
        parent[path[-1]] = copy.deepcopy(other)
    elif act == "add" and type(parent) is dict:
        parent[data.draw(st.text(max_size=5))] = data.draw(_values)
    elif act == "nudge" and type(parent[path[-1]]) is int:
        parent[path[-1]] += data.draw(st.sampled_from([-1, 1, 4, 1 << 31, 1 << 62]))
    else:
        parent[path[-1]] = data.draw(_values)


@pytest.fixture(scope="module")
def module_fields(tmp_path_factory):
    root = tmp_path_factory.mktemp("manifest")
    tied = torch.ones(2)
    states = [
        {"w": Shard(torch.ones(2, 3), (2 * i, 0), (4, 3)), "v": tied, "t": tied, "n": 0.5, "z": torch.ones(0, 2)}
        for i in range(2)
    ]
    save_parts(root, 1, states, {"seed": 0})
    return manifest_file(root, 1).read_bytes()


@settings(UNHURRIED, max_examples=150)
@given(st.data())
def test_whatever_is_altered_is_refused_as_damage_or_harmless(module_fields, data):
    fields = json.loads(module_fields)
    for _ in range(data.draw(st.integers(1, 3))):
        _mutate(data, fields)
    altered = seal(fields)

    tracemalloc.start()
    try:
        manifest = parse(altered)
    except CheckpointCorrupt:
        manifest = None
    finally:
        peak_bytes = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()

    assert manifest is None or parse(dump(manifest)) == manifest
    assert peak_bytes < 4 << 20


@settings(UNHURRIED, max_examples=100)
@given(st.binary(max_size=200))
def test_any_bytes_under_a_right_seal_are_refused(text):
    with pytest.raises(CheckpointCorrupt):
        parse(sealed(text.decode("latin-1")))
