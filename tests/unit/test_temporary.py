"""Temporary folders: what belongs to the user stays, and what a living process uses."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile

import pytest
from small_disk import fill, small_disk

from holdfast.base.temporary import MARKER, TemporaryFolder, sweep
from holdfast.checkpoint.storage.remote import StagingDirectory
from holdfast.errors import ConfigError
from holdfast.launch.run_paths import RunPaths

HOLD = """
import sys, time
from pathlib import Path
from holdfast.base.temporary import TemporaryFolder
folder = TemporaryFolder.make("holdfast-", Path(sys.argv[1]))
print(folder.path, flush=True)
time.sleep(120)
"""
HOLD_BY_A_CHILD = """
import subprocess, sys
from pathlib import Path
from holdfast.base.temporary import TemporaryFolder
folder = TemporaryFolder.make("holdfast-", Path(sys.argv[1]))
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(120)"], pass_fds=[folder.lock])
print(folder.path, child.pid, flush=True)
"""
SWEEP = """
import sys
from pathlib import Path
from holdfast.launch.run_paths import RunPaths
import tempfile
tempfile.tempdir = sys.argv[1]
RunPaths.make(None).clear()
"""


def start(code, *words):
    """A process that made a folder, and the words that it printed about it."""
    process = subprocess.Popen([sys.executable, "-c", code, *map(str, words)], stdout=subprocess.PIPE, text=True)
    return process, process.stdout.readline().split()


def end(process):
    process.kill()
    process.wait(30)
    process.stdout.close()


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize(
    "name", ["holdfast-20261124-results", "holdfast-2026-run1", "holdfast-upload-2026", "holdfast-999999999-abc"]
)
def test_a_users_folder_with_such_a_name_stays(monkeypatch, tmp_path, name):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / name).mkdir(mode=0o700)
    (tmp_path / name / "results.csv").write_text("1,2\n")

    RunPaths.make(None).clear()
    StagingDirectory().close()

    assert (tmp_path / name / "results.csv").read_text() == "1,2\n"
    assert names(tmp_path) == [name]


def test_a_users_link_with_such_a_name_stays(monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / "data").mkdir()
    (tmp_path / "holdfast-20261124-run").symlink_to(tmp_path / "data")

    RunPaths.make(None).clear()

    assert names(tmp_path) == ["data", "holdfast-20261124-run"]


def test_the_folder_of_a_process_that_was_killed_is_removed(tmp_path):
    process, (path,) = start(HOLD, tmp_path)

    sweep("holdfast-", tmp_path)
    assert os.path.isdir(path), "its process is alive"
    end(process)
    sweep("holdfast-", tmp_path)

    assert names(tmp_path) == []


def test_a_folder_stays_while_a_child_process_is_alive_that_inherited_its_lock(tmp_path):
    process, (path, child) = start(HOLD_BY_A_CHILD, tmp_path)
    process.wait(30)

    sweep("holdfast-", tmp_path)
    assert os.path.isdir(path)
    handle = os.pidfd_open(int(child))
    signal.pidfd_send_signal(handle, signal.SIGKILL)
    os.close(handle)
    process.stdout.read()  # ends when the child has ended
    process.stdout.close()
    sweep("holdfast-", tmp_path)

    assert names(tmp_path) == []


def test_a_job_in_another_pid_namespace_keeps_its_folder(tmp_path):
    isolate = ["unshare", "--pid", "--fork", "--mount-proc"]
    if shutil.which("unshare") is None or subprocess.run([*isolate, "true"], check=False).returncode:
        pytest.skip("no PID namespace can be made here")
    process, (path,) = start(HOLD, tmp_path)

    subprocess.run([*isolate, sys.executable, "-c", SWEEP, str(tmp_path)], check=True, timeout=60)

    assert os.path.isdir(path), "in there its process cannot be seen"
    end(process)


@pytest.mark.parametrize("change", ["of another boot", "no JSON", "not private", "of a process that is alive"])
def test_a_folder_whose_marker_does_not_prove_that_it_is_ours_stays(tmp_path, change):
    process, (path,) = start(HOLD, tmp_path)
    end(process)
    marker = tmp_path / path / MARKER
    made_by = json.loads(marker.read_text())
    match change:
        case "of another boot":
            marker.write_text(json.dumps(made_by | {"boot": "e0f5b3c0-0000-4000-8000-000000000000"}))
        case "no JSON":
            marker.write_text("[" * 100_000)
        case "not private":
            os.chmod(path, 0o755)  # noqa: S103
        case "of a process that is alive":
            ours = TemporaryFolder.make("other-", tmp_path)
            marker.write_text((ours.path / MARKER).read_text())
            ours.remove()

    sweep("holdfast-", tmp_path)

    assert os.path.isdir(path)


def test_a_folder_that_was_removed_or_replaced_is_gone(tmp_path):
    folder = TemporaryFolder.make("holdfast-", tmp_path)

    assert not folder.was_removed()
    folder.path.rename(tmp_path / "elsewhere")
    assert folder.was_removed()
    folder.path.mkdir()
    assert folder.was_removed()
    folder.remove()

    assert folder.path.is_dir(), "it is not ours"


def test_a_temporary_directory_that_is_full_is_one_clear_line_and_nothing_is_left(monkeypatch, tmp_path):
    with small_disk(tmp_path / "disk") as disk:
        monkeypatch.setattr("tempfile.tempdir", str(disk))
        fill(disk)

        with pytest.raises(ConfigError, match=r"cannot create a directory for the run in .*No space left.*set TMPDIR"):
            RunPaths.make(None)

        assert names(disk) == ["filler"]


def test_the_group_of_a_shared_directory_does_not_keep_folders_from_being_removed(tmp_path):
    tmp_path.chmod(0o2700)
    process, (path,) = start(HOLD, tmp_path)
    end(process)
    assert os.stat(path).st_mode & 0o2000, "it inherits the bit"

    sweep("holdfast-", tmp_path)

    assert names(tmp_path) == []


RUN_IN_A_SHARED_FOLDER = """
import sys, time
from pathlib import Path
from holdfast.launch.run_paths import RunPaths
print(RunPaths.make(None, Path(sys.argv[1])).run_dir, flush=True)
time.sleep(120)
"""


def test_the_next_start_removes_the_run_directory_of_a_killed_launcher_from_a_shared_folder_and_no_other(
    tmp_path, monkeypatch
):
    shared, temporary = tmp_path / "shared", tmp_path / "tmp"
    shared.mkdir()
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    killed, (its_dir,) = start(RUN_IN_A_SHARED_FOLDER, shared)
    alive, (kept,) = start(RUN_IN_A_SHARED_FOLDER, shared)
    (shared / "checkpoint").mkdir()
    end(killed)
    assert os.path.isdir(its_dir)

    subprocess.run([sys.executable, "-c", SWEEP, str(temporary)], check=True, timeout=30)

    try:
        assert sorted(path.name for path in shared.iterdir()) == sorted([os.path.basename(kept), "checkpoint"])
    finally:
        end(alive)


def test_a_folder_is_removed_even_if_this_process_may_open_one_file_more(tmp_path):
    code = """
import os, resource, sys
from pathlib import Path
from holdfast.base.temporary import TemporaryFolder
folder = TemporaryFolder.make("holdfast-", Path(sys.argv[1]))
(folder.path / "a" / "b").mkdir(parents=True)
(folder.path / "a" / "b" / "file").touch()
(folder.path / "link").symlink_to(sys.argv[2])
resource.setrlimit(resource.RLIMIT_NOFILE, (folder.lock + 1, folder.lock + 1))
folder.remove()
"""
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "file").touch()
    (tmp_path / "t").mkdir()

    subprocess.run([sys.executable, "-c", code, tmp_path / "t", tmp_path / "kept"], check=True, timeout=60)

    assert names(tmp_path / "t") == []
    assert names(tmp_path / "kept") == ["file"]


def test_files_of_a_run_are_made_to_look_new(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    paths = RunPaths.make(None)
    (paths.run_dir / "ompi").mkdir()
    (paths.run_dir / "gone").symlink_to("nothing")
    files = [paths.run_dir, paths.run_dir / MARKER, paths.run_dir / "ompi" / "0", paths.run_dir / "gone"]
    files[2].touch()
    for file in files:
        os.utime(file, (1, 1), follow_symlinks=False)

    paths.touch()

    assert all(file.lstat().st_mtime > 1 and file.lstat().st_atime > 1 for file in files)
    paths.clear()
