from __future__ import annotations

import json

import pytest
import torch
import xxhash

from holdfast.checkpoint import write_tensors
from holdfast.checkpoint.manifest import check_info, dump, parse
from holdfast.errors import CheckpointCorrupt, CheckpointError


@pytest.fixture
def fields(tmp_path):
    """A right manifest as JSON, to be made wrong."""
    saved = write_tensors(tmp_path, 1, {"w": torch.ones(2, 3), "n": float("nan")}, {"seed": 0}).commit(2)
    return json.loads((saved.path / "manifest.json").read_bytes())


def sealed(text):
    """``text`` with the digest that makes it whole, so that only what it says can be wrong."""
    body = text.rstrip().removesuffix("}").rstrip().encode() + b",\n"
    return body + f'"xxh3": "{xxhash.xxh3_64_hexdigest(body)}"\n}}\n'.encode()


def seal(fields):
    return sealed(json.dumps({name: value for name, value in fields.items() if name != "xxh3"}))


def test_a_manifest_is_read_as_it_was_written(tmp_path):
    manifest = write_tensors(tmp_path, 1, {"w": torch.ones(2, 3)}, {"seed": 0}).manifest

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


def _drop(name):
    return lambda fields: fields.pop(name)


@pytest.mark.parametrize(
    ("change", "place"),
    [
        (_set("schema", 2), "schema"),
        (_set("schema", True), "schema"),
        (_drop("schema"), "schema"),
        (_drop("step"), "step"),
        (_set("more", 1), "more"),
        (_set("step", -1), "step"),
        (_set("step", "1"), "step"),
        (_set("step", True), "step"),
        (_set("step", 1.0), "step"),
        (_set("generation", None), "generation"),
        (_set("file", "../../etc/passwd"), "file"),
        (_set("file", "/etc/passwd"), "file"),
        (_set("file", "a/b"), "file"),
        (_set("file", ".."), "file"),
        (_set("file", "a\x00b"), "file"),
        (_set("file", "tensors\n"), "file"),
        (_set("file", "manifest.json"), "file"),
        (_set("file", ""), "file"),
        (_set("file_bytes", 1), "file_bytes"),
        (_set("header_bytes", 1 << 70), "file_bytes"),
        (_set("header_xxh3", "0" * 15), "header_xxh3"),
        (_set("info", []), "info"),
        (_set("versions", "torch", 2), "versions"),
        (_set("tensors", []), "tensors"),
        (_set("tensors", "w", []), "tensors/w"),
        (_set("tensors", "w", "more", 1), "tensors/w"),
        (_set("tensors", "w", "dtype", "object"), "tensors/w/dtype"),
        (_set("tensors", "w", "dtype", 3), "tensors/w/dtype"),
        (_set("tensors", "w", "shape", [2, -3]), "tensors/w/shape"),
        (_set("tensors", "w", "shape", [2, 3.0]), "tensors/w/shape"),
        (_set("tensors", "w", "shape", [True, 6]), "tensors/w/shape"),
        (_set("tensors", "w", "shape", [1 << 40, 1 << 40]), "tensors/w/shape"),
        (_set("tensors", "w", "shape", [0, 1 << 40, 1 << 40]), "tensors/w/shape"),
        (_set("tensors", "w", "shape", [1] * 65), "tensors/w/shape"),
        (_set("tensors", "w", "shape", [2, 4]), "tensors/w/bytes"),
        (_set("tensors", "w", "bytes", 23), "tensors/w/bytes"),
        (_set("tensors", "w", "xxh3", "0123456789ABCDEF"), "tensors/w/xxh3"),
        (_set("tensors", "w", "xxh3", None), "tensors/w/xxh3"),
    ],
)
def test_a_manifest_that_says_something_impossible_is_damaged_and_the_place_is_named(fields, change, place):
    change(fields)

    with pytest.raises(CheckpointCorrupt) as refused:
        parse(seal(fields))

    assert place in str(refused.value)


@pytest.mark.parametrize(
    "text",
    [
        '{"schema": 1, "schema": 1}',
        '{"schema": NaN}',
        '{"schema": -Infinity}',
        '{"schema": 1e999}',
        '{"schema": ' + "9" * 5000 + "}",
        '{"schema": ' + "[" * 100_000 + "}",
        '{"schema" 1}',
        '{"schema": "\\ud8}',
    ],
)
def test_json_that_python_would_let_pass_is_damaged(text):
    with pytest.raises(CheckpointCorrupt, match="manifest, JSON: "):
        parse(sealed(text))


@pytest.mark.parametrize("data", [b"", b"{}", b"null", b"\xff\xfe", b'"xxh3": "0000000000000000"\n}\n'])
def test_bytes_that_are_no_manifest_are_damaged(data):
    with pytest.raises(CheckpointCorrupt, match="manifest, "):
        parse(data)


def test_a_manifest_that_was_cut_or_grew_is_damaged(fields):
    data = seal(fields)

    for wrong in (data[:-1], data[1:], data + b"\n", data + data, data[: len(data) // 2]):
        with pytest.raises(CheckpointCorrupt):
            parse(wrong)


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
