"""Ctrl-C before a job begins: one line and exit code 130, at every moment of the command."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.cli import INTERRUPTED, NO_JOB

ROOT = Path(__file__).parents[2]
IN_IMPORT = """
import importlib.abc, os, signal, sys
class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == {name!r}:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder())
from holdfast.cli import main
main({words!r})
"""
IN_LAUNCH = """
import os, signal
from holdfast.cli import main
from holdfast.launch import {module}
real = {module}.{name}
def interrupted(*args, **more):
    os.kill(os.getpid(), signal.{number})
    return real(*args, **more)
{module}.{name} = interrupted
main({words!r})
"""


@pytest.fixture
def words(tmp_path):
    (tmp_path / "train.py").write_text("raise SystemExit('it was started')\n")
    return ["run", "-n", "1", "--fabric", "gloo", "--no-page", str(tmp_path / "train.py")]


def run(tmp_path, code, **more):
    (tmp_path / "t").mkdir()
    env = os.environ | {"PYTHONPATH": str(ROOT / "src"), "TMPDIR": str(tmp_path / "t")}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60, check=False, **more
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("name", ["holdfast.cli.app", "typer", "holdfast.launch.launcher"])
def test_ctrl_c_while_the_command_is_loaded_is_one_line(tmp_path, words, name):
    assert run(tmp_path, IN_IMPORT.format(name=name, words=words)) == (INTERRUPTED, "", f"{NO_JOB}\n")


@pytest.mark.parametrize(
    ("number", "code", "line"),
    [("SIGINT", INTERRUPTED, NO_JOB), ("SIGTERM", 1, "holdfast: stopped before the job began")],
)
def test_a_signal_before_the_job_begins_leaves_nothing(tmp_path, words, number, code, line):
    program = IN_LAUNCH.format(module="launcher", name="announce", number=number, words=words)

    assert run(tmp_path, program) == (code, "", f"{line}\n")
    assert list((tmp_path / "t").iterdir()) == []


def test_ctrl_c_while_a_job_is_cleaned_up_changes_nothing(tmp_path, words):
    (tmp_path / "train.py").write_text("print('trained nothing')\n")
    program = IN_LAUNCH.format(module="launcher", name="close_all", number="SIGINT", words=words)
    code, _, said = run(tmp_path, program)

    assert code == 93, said
    assert NO_JOB not in said
    assert list((tmp_path / "t").iterdir()) == []


def test_another_command_ends_with_the_same_code(tmp_path):
    program = IN_IMPORT.format(name="holdfast.cli.app", words=["status"])
    assert run(tmp_path, program) == (INTERRUPTED, "", "holdfast: interrupted\n")


def test_a_command_that_has_begun_ends_with_the_same_code(tmp_path):
    assert run(tmp_path, IN_IMPORT.format(name="holdfast_lab.commands.plan", words=["plan"]))[0] == INTERRUPTED


def test_a_command_whose_ctrl_c_is_ignored_goes_on(tmp_path):
    program = IN_IMPORT.format(name="holdfast.cli.app", words=["status"])
    code, _, said = run(tmp_path, program, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN))

    assert code == 1, said  # no job runs
