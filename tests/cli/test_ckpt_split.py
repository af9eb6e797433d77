"""The ``ckpt`` commands see no difference between a checkpoint of many writers with a part each and that of one."""

from __future__ import annotations

import json

import pytest
import torch
from checkpoint_bytes import data_dir, flip, same

from holdfast.checkpoint import load, take, verify, write, write_tensors
from holdfast.cli import main


def state(step):
    return {
        "replica": {"parts": {str(n): {"model": {"w": torch.full((4, 3), float(n + step))}} for n in range(3)}},
        "lr": 1 / step,
    }


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """Go to a directory with steps 10 and 20 of three writers in ``many``, and step 20 of one writer in ``one``."""
    monkeypatch.chdir(tmp_path)
    for step in (10, 20):
        whole = state(step)
        given = [{"replica": {"parts": {n: part}}} for n, part in whole["replica"]["parts"].items()]
        given[0]["lr"] = whole["lr"]
        pending = [
            write("many", step, take(mine, i, 3, distinct=True), {"workers": 3}, token="t")  # noqa: S106 - no password
            for i, mine in enumerate(given)
        ]
        pending[0].commit(1, wait_s=0)
    write_tensors("one", 20, state(20), {"workers": 3}).commit(1)
    return tmp_path


def ckpt(capsys, *words):
    """Run a command; return its exit code and what it printed."""
    with pytest.raises(SystemExit) as caught:
        main(["ckpt", *words])
    return caught.value.code, capsys.readouterr().out


def test_the_commands_read_a_checkpoint_of_distinct_parts(runs, capsys):
    code, listed = ckpt(capsys, "ls", "many", "--json")
    shown = [ckpt(capsys, "show", where, "--json") for where in ("many", "one")]
    equal = ckpt(capsys, "diff", "many/step-00000020", "one/step-00000020", "--json")[1]
    other = ckpt(capsys, "diff", "many/step-00000010", "one/step-00000020", "--json")[1]

    assert code == 0
    assert [(row["step"], row["intact"]) for row in json.loads(listed)["checkpoints"]] == [(10, True), (20, True)]
    (many, one) = (json.loads(out) for _, out in shown)
    assert many["tensors"] == one["tensors"]
    assert json.loads(equal)["identical"]
    assert [tensor["differ"] for tensor in json.loads(other)["tensors"]] == [12, 12, 12]
    assert list(json.loads(other)["scalars"]) == ["lr"]


def test_a_checkpoint_of_distinct_parts_is_converted_and_its_damage_is_named(runs, capsys):
    converted = ckpt(capsys, "convert", "many/step-00000020", "npz", "--to", "dcp")
    intact = ckpt(capsys, "verify", "many")
    flip(data_dir(runs / "many", 20) / "part-00001.safetensors", -1)
    code, said = ckpt(capsys, "verify", "many")

    assert (converted[0], intact[0], code) == (0, 0, 3)
    verify("npz", 20)
    assert same(load("npz", 20).state, state(20))
    assert "replica/parts/1/model/w" in said
