"""What the system refuses is said in one line, with the limit that may be the cause."""

import errno
import os
import resource
import sys

import pytest
from jobs import holdfast as run_command

from holdfast.cli.system_errors import refusal


def refused(number, name=None):
    return refusal(OSError(number, os.strerror(number), name))


def test_a_limit_is_named_with_what_to_do():
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    assert refused(errno.EMFILE) == (
        f"Too many open files: this process may open only {limit} files; raise the limit (ulimit -n)"
    )


def test_without_a_limit_only_the_cause_is_named(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert refused(errno.EMFILE) == "Too many open files"
    assert refusal(MemoryError()) == "Cannot allocate memory"
    assert refusal(RuntimeError("can't start new thread")) == "Cannot start a thread"


def test_a_full_disk_is_named_with_its_file():
    assert refused(errno.ENOSPC, "/tmp/x") == "No space left on device (/tmp/x)"


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOENT, "gone"), RuntimeError("a defect"), ValueError("x"), ConnectionResetError()]
)
def test_other_errors_are_none_of_these(error):
    assert refusal(error) == ""


def test_a_command_that_may_open_no_file_ends_with_one_line(tmp_path, monkeypatch):
    (tmp_path / "script.py").write_text("import holdfast\n")
    monkeypatch.setattr("sys.executable", _limited(tmp_path))

    ended = run_command("run", "-n", 2, "--fabric", "virtual", tmp_path / "script.py")

    assert ended.returncode == 1
    assert ended.stderr.startswith("error: Too many open files: this process may open only 8 files; raise the limit")
    assert "Traceback" not in ended.stderr


def _limited(folder):
    """A Python that may open eight files."""
    path = folder / "python"
    path.write_text(f'#!/bin/sh\nulimit -n 8\nexec {sys.executable} "$@"\n')
    path.chmod(0o755)
    return str(path)
