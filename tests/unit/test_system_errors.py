"""What the system refuses is said in one line, with the limit that may be the cause."""

import errno
import os
import resource
import runpy
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest
from clusters import until
from jobs import holdfast as run_command

from holdfast.base.system_errors import error_of_a_new_file, refusal, refusal_to_torch
from holdfast.base.temporary import TemporaryFolder
from holdfast.config import Settings
from holdfast.errors import ConfigError, HoldfastError
from holdfast.launch.run_paths import RunPaths
from holdfast.launch.supervise import fork_server, processes, script_failure, worker


def refused(number, name=None):
    return refusal(OSError(number, os.strerror(number), name))


def test_a_cause_is_named_with_its_file_or_its_limit_and_what_to_do():
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    assert refused(errno.EMFILE) == (
        f"Too many open files: this process may open only {limit} files; raise the limit (ulimit -n)"
    )
    assert refused(errno.ENOSPC, "/tmp/x") == "No space left on device (/tmp/x)"
    assert refused(errno.EACCES, "/tmp/x") == "Permission denied (/tmp/x)"
    closed = "Bad file descriptor: a file or socket of Holdfast was closed by other code, such as the script"
    assert refused(errno.EBADF) == closed


def test_without_a_limit_only_the_cause_is_named(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert refused(errno.EMFILE) == "Too many open files"
    assert refusal(MemoryError()) == "Cannot allocate memory"
    assert refusal(RuntimeError("can't start new thread")) == "Cannot start a thread"
    assert refusal(LookupError("unknown encoding: idna")) == "Cannot load Python's encoding idna"
    numpys = ImportError(
        "\n\nImporting the numpy C-extensions failed. Original error was: x.so: failed to map segment from"
    )
    assert refusal(numpys) == "Cannot allocate memory"
    assert refusal(ImportError("libx.so: failed to map segment from shared object")) == "Cannot allocate memory"


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("DataLoader worker (pid 7) is killed by signal: Killed. ", errno.ENOMEM),
        ("DataLoader worker (pid(s) 7, 8) exited unexpectedly", errno.ENOMEM),
        ("unable to allocate shared memory(shm) for file </torch_7>: No space left on device (28)", errno.ENOSPC),
        ("DataLoader worker (pid 7) is killed by signal: Bus error. It is possible that", errno.ENOSPC),
    ],
)
def test_what_the_system_refused_to_torch_is_no_error_of_the_script(text, number):
    refused = refusal_to_torch(RuntimeError(text))

    assert refused.errno == number
    assert "num_workers" in refusal(RuntimeError(text))
    assert not script_failure.is_bug(RuntimeError(text))
    assert script_failure.describe(RuntimeError(text), Path("train.py")).traceback == ""


def test_other_errors_of_torch_are_the_scripts():
    raised = RuntimeError("DataLoader worker (pid(s) 7) exited unexpectedly")
    raised.__cause__ = RuntimeError("DataLoader worker (pid 7) exited unexpectedly with exit code 1. Details are lost")
    assert refusal_to_torch(raised) is None
    assert script_failure.is_bug(raised)
    assert refusal_to_torch(RuntimeError("mat1 and mat2 shapes cannot be multiplied (28)")) is None
    assert refusal_to_torch(OSError("DataLoader worker (pid 7) is killed by signal: Killed. ")) is None
    assert script_failure.is_bug(RuntimeError("DataLoader worker (pid 7) raised"))


@pytest.mark.parametrize("text", ["error return without exception set", "NULL result without error in PyObject_Call"])
def test_an_error_that_python_lost_is_for_want_of_memory_only_under_a_limit(monkeypatch, text):
    assert refusal(SystemError(text)) == ""
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (1 << 20, 1 << 20))
    assert refusal(SystemError(text)).startswith("Cannot allocate memory: this process may use only 1048576 bytes")
    assert refusal(SystemError("bad argument to internal function")) == ""


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOENT, "gone"), RuntimeError("a defect"), ValueError("x"), ConnectionResetError()]
)
def test_other_errors_are_none_of_these(error):
    assert refusal(error) == ""


@pytest.mark.parametrize(
    ("number", "kind", "said"),
    [
        (errno.ENOSPC, ConfigError, "No space left on device; free space there, or set TMPDIR to another directory"),
        (errno.ENOMEM, OSError, "Cannot allocate memory"),
        (errno.EMFILE, OSError, "Too many open files"),
    ],
)
def test_a_folder_of_a_run_blames_space_only_where_a_limit_is_not_the_cause(monkeypatch, number, kind, said):
    def refuse(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(TemporaryFolder, "make", refuse)
    with pytest.raises(kind) as raised:
        RunPaths.make(None)
    assert str(raised.value).endswith(said)


@pytest.mark.parametrize(
    ("number", "code", "said"),
    [
        (errno.ENOSPC, 2, "free space there, or set TMPDIR to another directory"),
        (errno.ENOMEM, 1, "Cannot allocate memory"),
    ],
)
def test_a_worker_blames_space_only_where_a_limit_is_not_the_cause(monkeypatch, number, code, said):
    def refuse(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(worker, "note_pair", refuse)
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    with pytest.raises(HoldfastError) as raised:
        worker._show_life(Settings(run_dir="/run"), 0)

    failed = script_failure.describe(raised.value, Path("train.py"))
    assert failed.message == f"cannot write to /run: {os.strerror(number)}" + (f"; {said}" if code == 2 else "")
    assert failed.message.endswith(said)
    assert (failed.exit_code, failed.traceback, failed.is_bug) == (code, "", False)


REFUSED = """
import os, resource
from {module} import call

resource.setrlimit(resource.RLIMIT_NOFILE, (0, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
call(lambda: {act})
"""


@pytest.mark.parametrize(
    ("module", "act", "said"),
    [
        ("holdfast_calls", "os.open('/', 0)", ""),  # the script's own statement: its traceback helps
        ("holdfast_calls", "None", "Too many open files (/dev/null)"),
        ("theirs_calls", "None", ""),
    ],
)
def test_what_is_refused_to_holdfast_itself_is_one_line_and_what_is_refused_to_the_script_has_its_traceback(
    tmp_path, monkeypatch, module, act, said
):
    folder = tmp_path / "holdfast" if module.startswith("holdfast") else tmp_path / "theirs"
    folder.mkdir()
    (folder / f"{module}.py").write_text("def call(act):\n    act()\n    open('/dev/null')\n")
    monkeypatch.syspath_prepend(folder)
    sys.modules.pop(module, None)
    monkeypatch.setattr(script_failure, "_PACKAGE", f"{tmp_path}/holdfast/")
    script = tmp_path / "script.py"
    script.write_text(REFUSED.format(module=module, act=act))
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        runpy.run_path(str(script))
    except OSError as error:
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)
        failed = script_failure.describe(error, script)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)

    assert failed.message.startswith(said or "OSError: [Errno 24] Too many open files")
    assert bool(failed.traceback) == (not said)
    assert not failed.is_bug


def test_a_failure_whose_record_cannot_be_written_is_still_said(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(worker, "worker_name", lambda: (Settings(run_dir=str(tmp_path / "gone")), 3))

    code = worker._report_failure(HoldfastError("the cause"), tmp_path / "script.py")

    said = capsys.readouterr().err
    assert (code, said.splitlines()[-1]) == (1, "the cause")
    assert said.startswith("holdfast: cannot write records to ")
    assert "Traceback" not in said


def test_a_worker_for_which_the_system_refuses_a_process_says_so_in_one_line(monkeypatch):
    def refuse():
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(os, "fork", refuse)
    monkeypatch.setattr(worker, "adopt_orphans", lambda: None)
    with pytest.raises(SystemExit, match=r"^holdfast: a worker cannot begin: Resource temporarily unavailable"):
        worker.run_watched(["script.py"], None)

    assert fork_server._is_child() is False, "the server goes on"


def test_a_command_that_may_open_no_file_ends_with_one_line(tmp_path, monkeypatch):
    (tmp_path / "script.py").write_text("import holdfast\n")
    monkeypatch.setattr("sys.executable", _limited(tmp_path))

    ended = run_command("run", "-n", 2, "--fabric", "virtual", tmp_path / "script.py")

    assert ended.returncode == 1
    why = "Too many open files: this process may open only 8 files; raise the limit (ulimit -n)"
    assert ended.stderr in (f"error: {why}\n", f"error: the workers cannot be started: {why}\n")
    assert "Traceback" not in ended.stderr


def _limited(folder):
    """A Python that may open eight files."""
    path = folder / "python"
    path.write_text(f'#!/bin/sh\nulimit -n 8\nexec {sys.executable} "$@"\n')
    path.chmod(0o755)
    return str(path)


def test_a_launcher_that_may_open_no_file_still_ends_what_it_has_started(tmp_path):
    """It cannot look at a process, nor open a handle of it."""
    log = tmp_path / "log"
    started = processes.start(["sh", "-c", "sleep 60 & echo $!; wait"], dict(os.environ), log)
    while not log.read_text().strip():
        time.sleep(0.01)
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limit[1]))
    try:
        error = error_of_a_new_file()
        processes.end_without_files([started])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)

    assert error is not None
    assert error.errno == errno.EMFILE
    assert started.returncode == -signal.SIGKILL
    child = int(log.read_text())
    until(lambda: processes.Process.of(child) is None)


def test_output_goes_on_after_its_folder_was_removed(tmp_path):
    path = tmp_path / "report" / "logs" / "rank-0.log"
    for _ in range(2):
        os.close(processes.open_log(path))
        assert path.stat().st_mode & 0o777 == 0o600
        assert path.parent.stat().st_mode & 0o777 == 0o700
        shutil.rmtree(tmp_path / "report")
