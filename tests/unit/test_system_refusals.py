"""What the system refuses is said in one line: it is no bug."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys

import pytest

from holdfast.cli import app as commands

OUT_OF_FILES = OSError(errno.EMFILE, os.strerror(errno.EMFILE), "/tmp/there")


def _execute_child(error):
    """Named like the function of ``subprocess`` that starts a process."""
    raise error


def raises(error, by=None):
    def command(*_, **__):
        if by is not None:
            by(error)
        raise error

    return command


@pytest.mark.parametrize(
    ("error", "by", "said"),
    [
        (OUT_OF_FILES, None, "open another file: Too many open files; raise the limit of open files: ulimit -n"),
        (RuntimeError("can't start new thread"), None, "start another thread: raise the limit of processes: ulimit -u"),
        (BlockingIOError(errno.EAGAIN, "again"), _execute_child, "start another process: Resource temporarily"),
        (OSError(errno.ENOMEM, "no"), None, "the system refused memory: Cannot allocate memory; give the job more"),
        (MemoryError(), None, "there is no memory left: give the job more memory, or start fewer workers"),
    ],
)
def test_a_limit_of_the_system_is_said_in_one_line(monkeypatch, capsys, error, by, said):
    monkeypatch.setattr(commands, "app", raises(error, by))

    with pytest.raises(SystemExit) as caught:
        commands.main(["run", "script.py"])

    assert caught.value.code == 1
    found = capsys.readouterr().err
    assert found.startswith("error: ")
    assert said in found
    assert found.count("\n") == 1


@pytest.mark.parametrize(
    "error",
    [RuntimeError("a bug"), FileNotFoundError(errno.ENOENT, "no such file"), BlockingIOError(errno.EAGAIN, "again")],
)
def test_other_errors_show_where_they_were_raised(monkeypatch, error):
    monkeypatch.setattr(commands, "app", raises(error))

    with pytest.raises(type(error)):
        commands.main(["run", "script.py"])


def test_debug_shows_where_the_system_refused(monkeypatch):
    monkeypatch.setattr(commands, "app", raises(OUT_OF_FILES))

    with pytest.raises(OSError, match="Too many open files"):
        commands.main(["--debug", "run", "script.py"])


WATCH = "import os; from holdfast.launch.watcher import watch; watch(os.getpid(), None)"


def test_a_watcher_that_cannot_write_says_so_in_one_line(tmp_path):
    env = os.environ | {"HOLDFAST_RUN_DIR": str(tmp_path / "removed"), "HOLDFAST_RANK": "1"}
    done = subprocess.run([sys.executable, "-c", WATCH], env=env, capture_output=True, text=True, check=False)

    assert done.returncode == -signal.SIGKILL
    assert done.stderr == (
        f"holdfast: the watcher of a worker ends, and the worker with it: cannot write to {tmp_path / 'removed'}: "
        "No such file or directory\n"
    )
