"""What a test starts from a process that has imported torch is what a shell would start; see tests/support/warm.py."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from jobs import clean_env
from warm import WARM

SCRIPT = """
import os, pathlib, sys, time  # torch
print("torch" in sys.modules, os.environ["MARK"], sys.argv, os.getcwd() == sys.argv[1])
for pid in (os.getpid(), os.getppid()):
    print(b"MARK=it" in open(f"/proc/{pid}/environ", "rb").read().split(bytes(1)), flush=True)
pathlib.Path("at-" + os.environ["RANK"]).touch()
ends_s = time.monotonic() + 30
while not all(pathlib.Path(f"at-{rank}").exists() for rank in range(2)) and time.monotonic() < ends_s:
    time.sleep(0.01)  # the job ends with its first worker, and would cut off the other one's output
"""


def started(folder):
    """Return a job's exit code and output, and whether its launcher is a child of this process that shows its command."""
    (folder / "script.py").write_text(SCRIPT)
    for mark in folder.glob("at-*"):
        mark.unlink()
    words = ["-m", "holdfast", "run", "-n", "2", "--no-page", "--fabric", "gloo", "script.py", str(folder)]
    job = subprocess.Popen(
        [sys.executable, *words], cwd=folder, env=clean_env(MARK="it"), stdout=subprocess.PIPE, text=True
    )
    is_child = f"\nPPid:\t{os.getpid()}\n" in Path(f"/proc/{job.pid}/status").read_text()
    output, _ = job.communicate(timeout=100)
    return job.returncode, sorted(output.splitlines()), is_child


def test_a_job_from_the_stock_is_like_one_that_starts_from_nothing_also_after_a_request_that_was_cut_off(
    tmp_path, warm_start
):
    from_stock = started(tmp_path)
    if warm_start.stock is None:
        pytest.skip("no job starts from the stock: with --cold-start, or without OMP_NUM_THREADS=1")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stranger:
        stranger.connect(warm_start.stock.address)
        socket.send_fds(stranger, [(1000).to_bytes(4, "big")], [0, 1, 2])

    assert started(tmp_path) == from_stock
    assert from_stock[2]
    warm_start.is_on = False
    assert started(tmp_path) == from_stock


ALONE = """
import atexit, os, sys
import torch
atexit.register(lambda: print("left", END))
END = 3
print(sys.argv, sys.path[0], __name__, __file__, os.getcwd(), os.environ.get("MARK"), flush=True)
sys.exit(END)
"""


def test_a_script_from_the_stock_is_like_one_that_starts_from_nothing(tmp_path, warm_start):
    (tmp_path / "alone.py").write_text(ALONE)

    def done(**env):
        command = [sys.executable, "alone.py", "a", "b"]
        done = subprocess.run(
            command, cwd=tmp_path, env=clean_env(MARK="it", **env), capture_output=True, text=True, check=False
        )
        return done.returncode, done.stdout, done.stderr

    from_stock = done(**{WARM: ""})
    assert from_stock == done()
    assert from_stock[0] == 3
    assert from_stock[1].endswith("\nleft 3\n")
