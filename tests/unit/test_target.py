"""What `holdfast run` is asked to run: a script, a module, or a command of Python."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from holdfast.cli.run import our_name
from holdfast.errors import ConfigError
from holdfast.launch.target import Target, find_target


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Be in a directory with a package, whose import would fail."""
    for name in ("__init__", "train", "main/__init__", "main/__main__"):
        path = tmp_path / "package" / f"{name}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text("raise AssertionError('imported')")
    (tmp_path / "space").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_script_with_arguments():
    assert find_target("train.py", ["-x", "--", "1"]) == Target(Path("train.py"), ("-x", "--", "1"))


def test_a_module_is_found_without_being_imported(folder):
    train = Target(folder / "package/train.py", ("1",), "package.train")

    assert find_target("package.train", ["1"], is_module=True) == train
    assert find_target(sys.executable, ["-u", "-m", "package.train", "1"]) == train
    assert find_target("package.main", [], is_module=True).script == folder / "package/main/__main__.py"
    assert find_target("json.tool", [], is_module=True).script.name == "tool.py"


def test_a_command_of_this_python():
    assert find_target(sys.executable, ["train.py", "-m"]) == Target(Path("train.py"), ("-m",))


@pytest.mark.parametrize("name", ["package.no", "no", "no.train", "package.train.more", ""])
def test_a_missing_module_is_named(name):
    with pytest.raises(ConfigError, match=f"there is no module '{name}'"):
        find_target(name, [], is_module=True)


@pytest.mark.parametrize(
    ("name", "why"), [("package", "without __main__"), ("space", "without __main__"), ("sys", "not in")]
)
def test_a_module_that_cannot_be_run(name, why):
    with pytest.raises(ConfigError, match=why):
        find_target(name, [], is_module=True)


@pytest.mark.parametrize("args", [[], ["-c", "1"], ["-m"], ["-O", "train.py"]])
def test_other_commands_of_python_are_refused(args):
    with pytest.raises(ConfigError, match="a command must be"):
        find_target(sys.executable, args)


def test_another_python_is_refused(folder, monkeypatch):
    other = folder / "python3"
    other.write_text("#!/bin/sh\n")
    other.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))

    with pytest.raises(ConfigError, match=f"python3 is {other}, and holdfast runs workers with"):
        find_target("python3", ["train.py"])
    with pytest.raises(ConfigError, match=r"there is no command 'python3\.1'"):
        find_target("python3.1", ["train.py"])


def test_names_of_torchrun():
    theirs = ["nproc_per_node", "nproc-per-node", "rdzv_endpoint", "node_rank", "max_restarts", "n"]

    assert list(map(our_name, theirs)) == ["workers", "workers", "rdzv", "node-rank", "max-restarts", "n"]
