"""A watcher whose run directory cannot be written says so, and one of another machine ends a worker that was given up."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

WATCH = "import os; from holdfast.launch.supervise.watcher import watch; watch(os.getpid(), None)"


def test_a_watcher_that_cannot_write_says_so_in_one_line(tmp_path):
    env = os.environ | {"HOLDFAST_RUN_DIR": str(tmp_path / "removed"), "HOLDFAST_RANK": "1"}
    done = subprocess.run([sys.executable, "-c", WATCH], env=env, capture_output=True, text=True, check=False)

    assert done.returncode == -signal.SIGKILL
    assert done.stderr == (
        f"holdfast: the watcher of a worker ends, and the worker with it: cannot write to {tmp_path / 'removed'}: "
        "No such file or directory\n"
    )


SLEEPER = """
import os, time
from holdfast.launch.supervise.watcher import watch
if (pid := os.fork()) == 0:
    time.sleep(60)
    os._exit(0)
watch(pid, None)
"""


def test_a_worker_that_the_launcher_of_another_machine_has_given_up_is_ended(tmp_path):
    env = os.environ | {
        "HOLDFAST_RUN_DIR": str(tmp_path),
        "HOLDFAST_RANK": "1",
        "HOLDFAST_LAUNCHER_NODE": "another-machine 0.0",
    }
    watcher = subprocess.Popen([sys.executable, "-c", SLEEPER], env=env)
    noted, ends_s = tmp_path / "process-1", time.monotonic() + 60
    try:
        while not noted.exists():
            assert time.monotonic() < ends_s
            time.sleep(0.02)
        time.sleep(1.5)
        assert watcher.poll() is None, "it looks once a second, and ends nothing while the file is there"

        noted.unlink()

        assert watcher.wait(timeout=30) == -signal.SIGKILL
        said = [json.loads(line) for line in (tmp_path / "records-watch-1.jsonl").read_text().splitlines()]
        assert [record["exit_code"] for record in said if record["event"] == "WorkerEnded"] == [-signal.SIGKILL]
    finally:
        watcher.kill()
        watcher.wait()
