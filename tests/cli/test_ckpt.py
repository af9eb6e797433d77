"""``holdfast ckpt``: what it prints, and how it ends."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch
import typer

from holdfast.checkpoint import read_manifest, steps, storage, write_tensors
from holdfast.cli import app, main

ROOT = Path(__file__).parents[2]
COMMANDS = typer.main.get_command(app).commands["ckpt"].commands
WEIGHTS = torch.arange(12.0).reshape(3, 4)


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """Go to a directory with three checkpoints in ``runs/a``, and one attempt before and one after the newest."""
    monkeypatch.chdir(tmp_path)
    for step in (10, 20, 30):
        state = {"model": {"w": WEIGHTS + step, "b": torch.ones(2).bfloat16()}, "lr": 1 / step, "head": None}
        write_tensors("runs/a", step, state, {"workers": 4, "seed": 7}).commit(2)
    write_tensors("runs/a", 25, {"w": WEIGHTS}, {})
    write_tensors("runs/a", 40, {"w": WEIGHTS}, {})
    return tmp_path / "runs" / "a"


def flip(root, step, offset=-1):
    (path,) = (root / storage.step_folder(step)).glob("data-*/*")
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


@pytest.fixture
def ckpt(capsys):
    """Return a function that runs a command, and returns its exit code and what it said."""

    def call(*words):
        with pytest.raises(SystemExit) as caught:
            main(["ckpt", *map(str, words)])
        said = capsys.readouterr()
        return caught.value.code, said.out, said.err

    return call


@pytest.fixture
def printed(ckpt):
    def call(*words):
        code, out, err = ckpt(*words)
        assert (code, err) == (0, "")
        assert "\x1b" not in out
        assert [line for line in out.splitlines() if line != line.rstrip()] == []
        return out

    return call


# --------------------------------------------------------------------------------------------- ls


def test_ls_says_of_every_checkpoint_what_it_is(runs, printed):
    out = printed("ls", "runs/a")

    head, *rows, first, second = out.splitlines()
    assert head.split() == ["step", "size", "tensors", "workers", "format", "written", "state"]
    assert [re.sub(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", "T", row).split() for row in rows] == [
        [str(step), f"{read_manifest(runs, step).size_bytes}", "B", "2", "4", "safetensors", "T", "intact"]
        for step in (10, 20, 30)
    ]
    assert "incomplete: step-00000025" in first
    assert "incomplete: step-00000040" in second


def test_ls_reads_every_byte_unless_it_is_to_be_fast(runs, ckpt, printed):
    flip(runs, 20)

    code, out, _ = ckpt("ls", "runs/a")
    fast = printed("ls", "--fast", "runs/a")

    assert code == 3
    assert [line.split()[-1] for line in out.splitlines()[1:4]] == ["intact", "place)", "intact"]
    assert "DAMAGED (1 place)" in out
    assert "holdfast ckpt verify runs/a" in out
    assert fast.count("not read") == 3
    assert "DAMAGED" not in fast


def test_ls_of_a_damaged_manifest_still_lists_the_others(runs, ckpt):
    manifest = runs / "step-00000010" / "manifest.json"
    manifest.write_bytes(manifest.read_bytes()[:-40])

    code, out, _ = ckpt("ls", "--fast", "runs/a", "--json")

    found = json.loads(out)
    assert code == 3
    assert [(row["step"], row["intact"]) for row in found["checkpoints"]] == [(10, False), (20, None), (30, None)]
    assert [attempt["step"] for attempt in found["attempts"]] == [25, 40]


def test_ls_of_an_empty_directory_says_so(runs, printed):
    (runs / "empty").mkdir()

    assert printed("ls", "runs/a/empty") == "no checkpoints in runs/a/empty\n"


# --------------------------------------------------------------------------------------------- show


def test_show_of_a_directory_shows_the_newest_intact_checkpoint_and_says_which(runs, ckpt):
    flip(runs, 30)

    code, out, err = ckpt("show", "runs/a")

    assert code == 0
    assert "runs/a/step-00000020" in out
    assert err.startswith("warning: the checkpoint of step 30")


@pytest.mark.parametrize(
    "words", [["runs/a", "--step", "20"], ["runs/a/step-00000020"], ["runs/a/step-00000020/manifest.json"]]
)
def test_show_names_every_tensor(runs, printed, words):
    out = printed("show", *words)

    digests = {path: entry.xxh3 for path, entry in read_manifest(runs, 20).tensors.items()}
    lines = [line.split() for line in out.splitlines()]
    assert ["model/w", "float32", "3x4", "48", "B", digests["model/w"]] in lines
    assert ["model/b", "bfloat16", "2", "4", "B", digests["model/b"]] in lines
    assert ["info", "workers:", "4"] in lines
    assert ["2", "tensors,", "52", "B"] in lines


def test_show_cuts_long_lists_unless_all_is_asked_for(runs, printed):
    write_tensors("long", 1, {f"w{n}": torch.ones(n) for n in range(100)}, {"ids": list(range(500))}).commit(0)

    short, long = printed("show", "long"), printed("show", "long", "--all")

    assert "... and 65 more tensors; --all prints them" in short
    assert "w99" not in short
    assert "w99" in long
    assert max(map(len, short.splitlines())) < 150
    assert "499]" in long


def test_show_as_json_holds_everything(runs, printed):
    found = json.loads(printed("show", "runs/a", "--json"))

    assert (found["step"], found["generation"], found["info"]) == (30, 2, {"workers": 4, "seed": 7})
    assert [tensor["path"] for tensor in found["tensors"]] == ["model/w", "model/b"]
    assert found["bytes"] == 52


def test_show_of_a_file_of_another_program_computes_the_digests(runs, printed):
    safetensors.torch.save_file({"model/w": WEIGHTS + 20}, "a.safetensors")

    assert read_manifest(runs, 20).tensors["model/w"].xxh3 in printed("show", "a.safetensors")


def test_what_a_terminal_would_obey_is_printed_as_text(runs, printed, ckpt):
    evil = "w\x1b]0;owned\x07\x1b[2J\n[red]"
    safetensors.torch.save_file({evil: WEIGHTS}, "a.safetensors")
    write_tensors("evil", 1, {evil: WEIGHTS}, {evil: evil}).commit(0)
    flip(Path("evil"), 1)

    shown = printed("show", "a.safetensors")
    code, out, err = ckpt("verify", "evil")
    _, _, refused = ckpt("show", "evil")

    assert r"w\x1b]0;owned\x07\x1b[2J\n[red]" in shown
    assert code == 3
    for text in (out, err, refused):
        assert "\x1b" not in text


# --------------------------------------------------------------------------------------------- verify


def test_verify_reads_all_of_a_directory_or_one_checkpoint(runs, printed):
    assert re.findall(r"step (\d+): intact", printed("verify", "runs/a")) == ["10", "20", "30"]
    assert re.findall(r"step (\d+): intact", printed("verify", "runs/a/step-00000020")) == ["20"]


def test_verify_names_everything_that_is_damaged(runs, ckpt):
    entries = read_manifest(runs, 20).tensors
    for entry in entries.values():
        flip(runs, 20, entry.pieces[0].offset)

    code, out, _ = ckpt("verify", "runs/a")
    _, as_json, _ = ckpt("verify", "runs/a/step-00000020", "--json")

    assert code == 3
    assert "step 20: DAMAGED, 2 places" in out
    lines = [line.split() for line in out.splitlines()]
    for path, entry in entries.items():
        first = entry.pieces[0]
        assert [path, str(first.offset), str(first.offset + first.size_bytes), first.file] in lines
    assert {damage["tensor"] for damage in json.loads(as_json)["checkpoints"][0]["damage"]} == set(entries)


@pytest.mark.parametrize("harm", ["header", "cut", "gone", "manifest"])
def test_verify_finds_damage_of_every_kind(runs, ckpt, harm):
    folder = runs / "step-00000020"
    (path,) = folder.glob("data-*/*")
    if harm == "header":
        flip(runs, 20, 20)
    elif harm == "cut":
        path.write_bytes(path.read_bytes()[:-1])
    elif harm == "gone":
        path.unlink()
    else:
        (folder / "manifest.json").write_bytes(
            (folder / "manifest.json").read_bytes().replace(b'"seed": 7', b'"seed": 8')
        )

    code, out, _ = ckpt("verify", "runs/a")

    assert code == 3
    assert "step 20: DAMAGED" in out
    assert "step 30: intact" in out


# --------------------------------------------------------------------------------------------- diff


def test_diff_of_equal_things_says_identical(runs, printed):
    torch.save({"model": {"w": WEIGHTS + 30, "b": torch.ones(2).bfloat16()}, "lr": 1 / 30, "head": None}, "a.pt")

    assert "identical: 2 tensors\n" in printed("diff", "runs/a", "a.pt")
    assert json.loads(printed("diff", "a.pt", "runs/a/step-00000030", "--json"))["identical"] is True


def test_diff_says_how_far_two_checkpoints_are_from_each_other(runs, printed):
    out = printed("diff", "runs/a/step-00000010", "runs/a/step-00000020")

    lines = [line.split() for line in out.splitlines()]
    assert ["model/w", "12", "12", "10", "0.5", "34.6"] in lines  # sqrt(12 * 10**2), 10 of 20
    assert ["lr", "0.1", "0.05"] in lines
    assert "1 tensor identical, 1 different, 0 in one only" in out
    assert "model/b" not in out


def test_diff_tells_names_shapes_dtypes_and_nans(runs, printed):
    def nans():
        return torch.tensor([float("nan"), 1.0])

    first = {"w": WEIGHTS, "n": nans(), "t": nans(), "a": nans()}
    second = {"w": WEIGHTS.t().contiguous(), "n": nans().double() * 2, "t": nans(), "b": nans()}
    safetensors.torch.save_file(first, "a.safetensors")
    safetensors.torch.save_file(second, "b.safetensors")

    out = printed("diff", "a.safetensors", "b.safetensors")
    found = json.loads(printed("diff", "a.safetensors", "b.safetensors", "--json"))

    assert "shape 3x4 / 4x3" in out
    assert "float32 / float64, 1 / 1 NaNs" in out
    assert "only in a:\n  a\n" in out
    assert "only in b:\n  b\n" in out
    assert {tensor["path"]: tensor["differ"] for tensor in found["tensors"]} == {"w": 0, "n": 1, "t": 0}


def test_diff_prints_infinity_as_text_in_json(runs, printed):
    safetensors.torch.save_file({"w": torch.tensor([float("inf")])}, "a.safetensors")
    safetensors.torch.save_file({"w": torch.tensor([1.0])}, "b.safetensors")

    out = printed("diff", "a.safetensors", "b.safetensors", "--json")

    assert json.loads(out, parse_constant=pytest.fail)["tensors"][0]["max_abs"] == "inf"


def test_diff_of_a_damaged_checkpoint_is_no_result(runs, ckpt):
    flip(runs, 20)

    code, out, err = ckpt("diff", "runs/a/step-00000020", "runs/a/step-00000030")

    assert (code, out) == (3, "")
    assert "step 20" in err


# --------------------------------------------------------------------------------------------- convert


@pytest.mark.parametrize("format", ["hdf5", "safetensors", "npz", "dcp"])
def test_convert_writes_the_same_step_with_the_same_digests(runs, printed, format):
    out = printed("convert", "runs/a/step-00000020", "b", "--to", format)

    assert out.startswith(f"b/step-00000020: {format}, 2 tensors, ")
    assert read_manifest("b", 20).format == format
    assert "identical" in printed("diff", "runs/a/step-00000020", "b")


def test_convert_of_a_file_makes_a_checkpoint(runs, printed):
    safetensors.torch.save_file({"model/w": WEIGHTS}, "a.safetensors")

    found = json.loads(printed("convert", "a.safetensors", "b", "--to", "npz", "--json"))

    assert (found["step"], found["tensors"]) == (0, 1)
    assert "identical" in printed("diff", "a.safetensors", "b")


# --------------------------------------------------------------------------------------------- prune


def test_prune_removes_what_is_old_or_was_given_up(runs, printed):
    before = sorted(runs.iterdir())
    dry = printed("prune", "runs/a", "--keep-last", "2", "--dry-run")
    assert sorted(runs.iterdir()) == before

    out = printed("prune", "runs/a", "--keep-last", "2")

    assert dry == out.replace("removed", "would remove").replace("freed", "would free")
    assert "removed step 10\n" in out
    assert "removed step-00000025, " in out
    assert [path.name for path in sorted(runs.iterdir())] == ["step-00000020", "step-00000030", "step-00000040"]
    assert printed("prune", "runs/a", "--keep-last", "2") == "nothing to remove; 2 checkpoints kept\n"


def test_prune_keeps_steps_that_are_divided_and_the_newest_intact_one(runs, ckpt):
    flip(runs, 30)
    flip(runs, 20)

    code, out, err = ckpt("prune", "runs/a", "--keep-last", "2")

    assert code == 3
    assert steps(runs) == [10, 20, 30]
    assert "step 30" in err
    assert "removed step " not in out


def test_prune_as_json(runs, printed):
    found = json.loads(printed("prune", "runs/a", "--keep-last", "2", "--keep-every", "10", "--json"))

    assert (found["steps"], found["kept"]) == ([], [10, 20, 30])
    assert [attempt["folder"] for attempt in found["attempts"]] == ["step-00000025"]


# --------------------------------------------------------------------------------------------- URLs


def test_every_command_takes_an_url(runs, printed):
    url = f"memory://{runs.parent.parent.name}"
    for step in (10, 20, 30):
        write_tensors(f"{url}/a", step, {"w": WEIGHTS + step}, {}).commit(0)
    write_tensors(f"{url}/a", 25, {"w": WEIGHTS}, {})

    assert printed("ls", f"{url}/a").count("intact") == 3
    assert "step-00000020" in printed("show", f"{url}/a/step-00000020")
    assert printed("verify", f"{url}/a").count("intact") == 3
    assert printed("convert", f"{url}/a", f"{url}/b", "--to", "hdf5").startswith(f"{url}/b/step-00000030: hdf5")
    assert "identical" in printed("diff", f"{url}/a", f"{url}/b")
    assert "removed step-00000025" in printed("prune", f"{url}/a", "--keep-last", "2")
    assert steps(f"{url}/a") == [20, 30]


# --------------------------------------------------------------------------------------------- wrong usage


BAD = {
    "ls nowhere": "there is no 'nowhere'",
    "ls a.pt": "a.pt is a file; name a directory",
    "ls runs/a/step-00000020": "is a single checkpoint; name its directory: runs/a",
    "show nowhere.pt": "there is no 'nowhere.pt'",
    "show notes.txt": "must end with one of .pt, .pth",
    "show runs/a --step 21": "there is no complete checkpoint of step 21 in runs/a, there are steps 10, 20, 30; choose",
    "show runs/a --step many": "--step must be a whole number, got 'many'",
    "show memory://a/b.pt": "must be on this machine",
    "show a.pt --step 3": "a.pt is one file",
    "show runs/a/step-00000010 --step 20": "--step selects one of several checkpoints",
    "show runs/a/step-00000025": "there is no complete checkpoint of step 25",
    "show copied": "is not named after its step",
    "show empty": "there is no complete checkpoint in empty",
    "verify empty": "there is no complete checkpoint in empty",
    "verify a.pt": "a.pt is a file of another program, which has no digests",
    "diff runs/a": "Missing argument 'B'",
    "diff runs/a nowhere": "there is no 'nowhere'",
    "convert runs/a b": "Missing option '--to'",
    "convert runs/a b --to zip": "the format must be one of safetensors, hdf5, npz, dcp, got 'zip'",
    "convert runs/a runs/a --to npz": "a checkpoint of step 30 already exists in runs/a",
    "convert runs/a notes.txt --to npz": "notes.txt is a file",
    "prune runs/a": "Missing option '--keep-last'",
    "prune runs/a --keep-last 1": "--keep-last must be at least 2, got 1",
    "prune runs/a --keep-last 0": "--keep-last must be at least 2, got 0",
    "prune runs/a --keep-last 2 --keep-every -1": "--keep-every must be at least 0, got -1",
    "prune nowhere --keep-last 2": "there is no 'nowhere'",
    "burn runs/a": "No such command 'burn'",
}


@pytest.mark.parametrize("words", BAD)
def test_wrong_usage_is_refused_in_one_line(runs, ckpt, words):
    torch.save({"w": WEIGHTS}, "a.pt")
    Path("notes.txt").write_text("x")
    Path("empty").mkdir()
    (runs / "step-00000020").rename("copied")
    write_tensors("runs/a", 20, {"w": WEIGHTS}, {}).commit(0)

    code, out, err = ckpt(*words.split())

    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert BAD[words] in err
    assert steps("runs/a") == [10, 20, 30]


def test_a_folder_of_dcp_is_read_only_beside_a_manifest(runs, ckpt, printed):
    printed("convert", "runs/a", "b", "--to", "dcp")
    (folder,) = Path("b").glob("step-*/data-*")

    assert "b/step-00000030" in printed("show", folder)
    folder.rename("alone")
    code, _, err = ckpt("show", "alone")

    assert code == 1
    assert ".metadata is a pickle" in err


# --------------------------------------------------------------------------------------------- help, terminals


def test_the_commands_are_listed(printed):
    out = printed("--help")

    assert all(f"\n  {name} " in out for name in COMMANDS)
    assert "..." not in out.split("Commands:")[1]


@pytest.mark.parametrize("group", [[], ["ckpt"]])
def test_a_group_without_a_command_is_wrong_usage_and_shows_which_there_are(capsys, group):
    said = []
    for words, code in ((group, 2), ([*group, "--help"], 0)):
        with pytest.raises(SystemExit) as caught:
            main(words)
        assert caught.value.code == code
        said.append(capsys.readouterr())

    helped, named = said[0].err, " ".join(["holdfast", *group])
    assert said[0].out == ""
    assert helped == f"{said[1].out}error: {named} needs a command; the commands are listed above\n"


def test_of_many_steps_the_first_and_the_last_are_named(ckpt, tmp_path):
    for step in range(1, 12):
        write_tensors(tmp_path / "many", step, {}, {}).commit(0)

    _, _, err = ckpt("show", tmp_path / "many", "--step", 77)

    assert "there are steps 1, 2, 3, 4, ..., 8, 9, 10, 11; choose one that exists" in err


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_an_example_and_is_documented(name):
    page = (ROOT / "docs" / "reference" / "cli.md").read_text()
    section = page[page.index("## holdfast ckpt") :].split("\n## ")[0]
    options = {flag for param in COMMANDS[name].params for flag in param.opts if flag.startswith("-")} - {"--help"}

    assert re.search(rf"Example: holdfast ckpt {name} ", COMMANDS[name].help)
    assert f"holdfast ckpt {name} " in section
    assert [option for option in options if f"`{option}" not in section] == []


def test_a_terminal_gets_colours_and_a_line_that_says_what_is_being_read(runs):
    flip(runs, 20)
    ours, theirs = pty.openpty()
    env = os.environ | {"TERM": "xterm-256color", "COLUMNS": "100"}
    process = subprocess.Popen(
        [sys.executable, "-m", "holdfast", "ckpt", "ls", "runs/a"], stdout=theirs, stderr=theirs, env=env
    )
    os.close(theirs)
    out = b""
    try:
        while data := os.read(ours, 4096):
            out += data
    except OSError:  # the other side is closed
        pass
    os.close(ours)

    assert process.wait(60) == 3
    assert b"\x1b[1;31mDAMAGED" in out
    assert b"\x1b[32mintact" in out
    assert b"reading step" in out
