"""A watcher whose run directory cannot be written says so: it is no bug."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

WATCH = "import os; from holdfast.launch.watcher import watch; watch(os.getpid(), None)"


def test_a_watcher_that_cannot_write_says_so_in_one_line(tmp_path):
    env = os.environ | {"HOLDFAST_RUN_DIR": str(tmp_path / "removed"), "HOLDFAST_RANK": "1"}
    done = subprocess.run([sys.executable, "-c", WATCH], env=env, capture_output=True, text=True, check=False)

    assert done.returncode == -signal.SIGKILL
    assert done.stderr == (
        f"holdfast: the watcher of a worker ends, and the worker with it: cannot write to {tmp_path / 'removed'}: "
        "No such file or directory\n"
    )
