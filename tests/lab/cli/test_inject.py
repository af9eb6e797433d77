"""``holdfast inject``: what it prints, and how it ends."""

from __future__ import annotations

import json
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch

from holdfast.checkpoint import write_tensors
from holdfast.cli import main


@pytest.fixture
def holdfast(tmp_path, monkeypatch, capsys):
    """Return a function that runs a command in a directory with ``m.h5`` and ``runs``: its exit code, what it said."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    with h5py.File("m.h5", "w") as h5:
        h5["conv/kernel"] = rng.standard_normal((3, 3, 4, 8)).astype("f4")
        h5["conv/bias"] = np.ones(8, "f4")
        h5["conv2/kernel"] = rng.standard_normal((3, 3, 8, 8)).astype("f4")
        h5["name"] = "cnn"
    weights = {"fc.weight": torch.randn(20, 30), "fc.bias": torch.ones(20).half()}
    write_tensors("runs", 10, {"model": weights}, {}).commit(0)
    write_tensors("runs", 20, {"model": weights, "lr": 0.1}, {}).commit(0)

    def call(*words):
        with pytest.raises(SystemExit) as caught:
            main([*map(str, words)])
        said = capsys.readouterr()
        return caught.value.code, said.out, said.err

    return call


def test_it_says_how_much_where_and_the_record(holdfast):
    code, out, err = holdfast("inject", "m.h5", "--flips", 3, "--at", "conv/bias", "--bits", "critical",
                              "-o", "n.h5", "--record", "flips.json")  # fmt: skip

    head, columns, row, skipped, record = out.splitlines()
    assert (code, err) == (0, "")
    assert head == "n.h5: altered 3 bits of 3 values in 1 of 3 tensors"
    assert columns.split() == ["tensor", "dtype", "shape", "values", "bits", "infinite", "or", "NaN"]
    assert row.split() == ["conv/bias", "float32", "8", "3", "3", "3"]
    assert skipped == "cannot be altered: name (is of texts)"
    assert record == "record   flips.json"
    assert [flip["after"] for flip in json.loads(Path("flips.json").read_text())["flips"]] == ["0x7f800000"] * 3


def test_json_is_the_record_and_what_became_of_it(holdfast):
    _, out, _ = holdfast("inject", "m.h5", "--percent", 1, "--in-place", "--record", "flips.json", "--json")

    found = json.loads(out)
    record = json.loads(Path("flips.json").read_text())
    assert {name: found.pop(name) for name in record} == record
    assert found == {"written": "m.h5", "kind": "hdf5", "others": 0, "missing": [],
                     "skipped": [{"path": "name", "why": "is of texts"}]}  # fmt: skip


def test_a_dry_run_alters_nothing_and_draws_what_the_run_would(holdfast):
    before = Path("m.h5").read_bytes()

    _, dry, _ = holdfast("inject", "m.h5", "--flips", 5, "--dry-run", "--json")
    assert Path("m.h5").read_bytes() == before
    _, wet, _ = holdfast("inject", "m.h5", "--flips", 5, "--in-place", "--json")

    assert json.loads(dry)["flips"] == json.loads(wet)["flips"]
    assert json.loads(dry)["written"] is None


@pytest.mark.parametrize("path", ["runs", "runs/step-00000020", "runs/step-00000020/manifest.json"])
def test_diff_shows_exactly_the_recorded_flips(holdfast, path):
    code, _, _ = holdfast("inject", path, "--percent", 2, "-o", "other", "--record", "flips.json")
    flips = json.loads(Path("flips.json").read_text())["flips"]
    _, out, _ = holdfast("ckpt", "diff", "runs/step-00000020", "other", "--json")

    values = {(flip["path"], flip["index"]) for flip in flips}
    differ = {t["path"]: t["differ"] for t in json.loads(out)["tensors"] if t["differ"]}
    assert code == 0
    assert len(values) == 12
    assert differ == {path: sum(p == path for p, _ in values) for path in {p for p, _ in values}}
    assert holdfast("ckpt", "verify", "other")[0] == 0


def test_kept_digests_make_verify_find_it(holdfast):
    holdfast("inject", "runs", "--in-place", "--keep-digests")

    assert holdfast("ckpt", "verify", "runs/step-00000020")[0] == 3
    assert holdfast("ckpt", "verify", "runs/step-00000010")[0] == 0


def test_equivalent_injection_by_a_map_into_a_file_that_holds_a_part(holdfast):
    with h5py.File("m.h5") as h5:
        np.savez("stage.npz", **{"0.weight": h5["conv/kernel"][()].transpose(3, 2, 0, 1)})
    paths = {"conv/kernel": {"path": "0.weight", "axes": [3, 2, 0, 1]}}
    Path("map.json").write_text(json.dumps({"schema": 1, "paths": paths}))
    holdfast("inject", "m.h5", "--percent", 50, "--in-place", "--record", "flips.json")

    replay = ("inject", "stage.npz", "--replay", "flips.json", "--map", "map.json", "-o", "out.npz")
    refused = holdfast(*replay)
    code, out, _ = holdfast(*replay, "--partly")

    assert refused[0] == 2
    assert (
        "tensors of the record are not in the file: conv/bias, conv2/kernel; map their names with --map" in refused[2]
    )
    assert code == 0
    assert "left out, because they are not in the file: conv/bias, conv2/kernel" in out
    with h5py.File("m.h5") as h5, np.load("out.npz") as npz:
        altered = h5["conv/kernel"][()].transpose(3, 2, 0, 1)
        np.testing.assert_array_equal(np.ascontiguousarray(altered).view("u4"), npz["0.weight"].view("u4"))


def test_a_copy_leaves_other_files_beside_it_alone(holdfast):
    Path("out.h5.tmp").write_text("somebody's")

    code, _, _ = holdfast("inject", "m.h5", "--flips", 1, "-o", "out.h5")

    assert code == 0
    assert Path("out.h5.tmp").read_text() == "somebody's"
    assert sorted(path.name for path in Path().glob("out.h5*")) == ["out.h5", "out.h5.tmp"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["m.h5"], "no destination is given: use -o OUT for an altered copy, or --in-place to alter m.h5 itself"),
        (["m.h5", "-o", "n.h5", "--in-place"], "an altered copy (-o) and --in-place exclude each other"),
        (["m.h5", "-o", "m.h5"], "m.h5 already exists; name a new file, or remove it"),
        (["m.h5", "-o", "no/where/n.h5", "--flips", "0"], "--flips must be at least 1, got 0"),
        (["m.h5", "--in-place", "--record", "m.h5"], "m.h5 already exists, and may be needed to undo an alteration"),
        (["m.h5", "--in-place", "--record", "no/r.json"], "cannot write the record no/r.json: No such file or directory"),
        (["m.h5", "--in-place", "--at", "dense"], "--at must equal, prefix or match one of conv/bias, conv/kernel, conv2/kernel, got 'dense'"),
        (["m.h5", "--in-place", "--flips", "x"], "--flips must be a whole number, got 'x'"),
        (["m.h5", "--in-place", "--bits", "31:30"], "--bits must be one of all, sign, exponent, mantissa, critical, a number from 0"),
        (["m.h5", "--in-place", "--mask", "1{0}"], "--mask must be zeros and ones with a one among them, as 1011, got '1{0}'"),
        (["m.h5", "--in-place", "--flips", "1", "--rate", "0.1"], "give only one of --flips, --percent and --rate, got more"),
        (["m.h5", "--in-place", "--burst", "2", "--mask", "11"], "--burst and --mask cannot be given together; choose one"),
        (["m.h5", "--in-place", "--scale", "2", "--keep-sign"], "--scale multiplies whole values and cannot be combined with --bits or --keep-sign"),
        (["m.h5", "--in-place", "--flips", "999999"], "--flips must be at most 27904, the bits that may be altered, got 999999"),
        (["m.h5", "--in-place", "--map", "map.json"], "--map is only for --replay; add --replay RECORD, or leave it out"),
        (["m.h5", "--in-place", "--replay", "m.h5"], "m.h5 is not UTF-8 text; give a file that --record wrote"),
        (["m.h5", "--in-place", "--replay", "r.json"], "cannot read r.json: No such file or directory"),
        (["m.h5", "--in-place", "--replay", "r.json", "--seed", "3"], "--replay repeats a record, and --seed would draw"),
        (["gone.h5", "--in-place"], "there is no 'gone.h5'; name a checkpoint, a directory of checkpoints, or a file"),
        (["s3://bucket/m.h5", "--in-place"], "s3://bucket/m.h5 must be on this machine to be altered; fetch it first"),
        (["empty", "--in-place"], "there is no complete checkpoint in empty; name a directory that has one, or a file"),
        (["dcp", "--in-place"], "its index is a pickle, which is not read: save it as .safetensors"),
        (["text.txt", "--in-place"], "text.txt is not a file that can be altered; it must be HDF5, or its name must end with one of .pt"),
        (["runs", "-o", "runs"], "already exists; name another directory, or remove it"),
    ],
)  # fmt: skip
def test_wrong_usage_is_told_in_one_line_and_alters_nothing(holdfast, tmp_path, words, said):
    (tmp_path / "empty").mkdir()
    (tmp_path / "dcp").mkdir()
    (tmp_path / "dcp" / ".metadata").touch()
    (tmp_path / "text.txt").write_text("hello")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}

    code, out, err = holdfast("inject", *words)

    assert (code, out) == (2, "")
    assert said in err
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_a_damaged_file_ends_with_3(holdfast, tmp_path):
    (tmp_path / "bad.h5").write_bytes(b"\x89HDF\r\n\x1a\n" + bytes(100))

    code, _, err = holdfast("inject", "bad.h5", "--in-place")

    assert code == 3
    assert err.startswith("error: bad.h5 cannot be read or altered as HDF5: ")
    assert err.count("\n") == 1
