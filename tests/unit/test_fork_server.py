"""A fork server that answers late: the mpirun of the request may have ended, and its job been started again."""

from __future__ import annotations

import subprocess
import sys

import pytest

ASK = """
import json, os, pathlib, socket, subprocess, sys
import holdfast.distributed
from holdfast.launch.fork_protocol import FORK_SERVER, GO, READY
from holdfast.launch.fork_server import _become_watcher

folder, variables = sys.argv[1], json.loads(sys.argv[2])
ended = subprocess.Popen(["true"])
ended.wait()
script = pathlib.Path(folder, "script.py")
script.write_text(f"open({folder + '/ran'!r}, 'w')")
request = {
    "words": [str(script)], "env": dict(os.environ) | {FORK_SERVER: "here"} | variables, "folder": folder,
    "parent": ended.pid, "group": os.getpgrp(), "cores": sorted(os.sched_getaffinity(0)), "limits": {},
}
ours, theirs = socket.socketpair()
pid = os.fork()
if pid == 0:
    ours.close()
    _become_watcher(theirs, request, [])
theirs.close()
assert ours.recv(1) == READY
ours.sendall(GO)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


@pytest.mark.parametrize(("variables", "runs"), [('{"OMPI_COMM_WORLD_SIZE": "2"}', False), ("{}", True)])
def test_no_worker_begins_for_an_mpirun_that_has_ended(tmp_path, variables, runs):
    words = [sys.executable, "-c", ASK, str(tmp_path), variables]
    done = subprocess.run(words, capture_output=True, text=True, timeout=200, check=False)

    assert done.returncode == 0, done.stderr
    assert (tmp_path / "ran").exists() is runs, done.stderr
    assert done.stdout.split()[-1] == ("0" if runs else "1")
