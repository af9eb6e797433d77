"""What a worker has started ends with it, however it ends, and holds nobody up."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from jobs import assert_landed, clean_env, exit_codes, run_report
from train_saving import undisturbed

from holdfast.launch.supervise.processes import Process

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(170)]

SCRIPT = Path(__file__).parents[1] / "support" / "train_children.py"
DEADLINE_S = 60.0


def children(folder, rank):
    """The numbers of what a worker had started: two of a data loader, one executed, one of a thread, one forked."""
    numbers = [int(number) for number in (folder / f"children-{rank}").read_text().split()]
    assert len(numbers) == 5
    return numbers


def are_gone(numbers):
    """Whether they are, soon."""
    ends_s = time.monotonic() + DEADLINE_S
    while any(Path("/proc", str(number)).exists() for number in numbers):
        if time.monotonic() > ends_s:
            return False
        time.sleep(0.01)
    return True


def test_children_die_with_a_worker_that_is_killed_and_training_goes_on_to_the_same_bits(tmp_path):
    given = ("-n", 3, "--fabric", "gloo", "--slices", 3)

    report = run_report(tmp_path, *given, SCRIPT, tmp_path, "--deed", "die:7:1", "--await-end-of", 1)

    assert_landed(report, 1)
    assert exit_codes(report) == {0: 0, 1: -9, 2: 0}
    assert (tmp_path / "ended").exists()  # while the others trained
    assert report["replicas"]["state_sha256"] == undisturbed()
    assert are_gone(children(tmp_path, 0) + children(tmp_path, 2))


def test_children_die_with_workers_whose_launcher_is_killed(tmp_path):
    command = [sys.executable, "-m", "holdfast", "run", "-n", "2", "--fabric", "ulfm", SCRIPT, tmp_path]
    deeds = ["--deed", "kill-launcher-and-die:7:1"]

    launcher = subprocess.run(
        [*map(str, command), *deeds],
        env=clean_env(TMPDIR=str(tmp_path)),
        cwd=tmp_path,
        capture_output=True,
        timeout=DEADLINE_S,
        check=False,
    )

    assert launcher.returncode == -signal.SIGKILL
    assert are_gone(children(tmp_path, 0) + children(tmp_path, 1))


OUTLIVE = """
import os, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"], stdout=-3, stderr=-3)
print(child.pid, flush=True)
os.kill(os.getpid(), 9)
"""


def test_negative_control_a_child_of_a_process_that_nobody_watches_outlives_it():
    parent = subprocess.run([sys.executable, "-c", OUTLIVE], capture_output=True, text=True, timeout=60, check=False)

    assert parent.returncode == -signal.SIGKILL
    child = Process.of(int(parent.stdout))
    assert child is not None
    assert child.send(signal.SIGKILL)


FORKING = """
import os, sys
import torch
import holdfast

ENDS = {0: None, 3: SystemExit(3), 1: SystemExit("said by a fork"), 7: SystemExit(7)}
data = torch.utils.data.TensorDataset(torch.ones(64, 2), torch.ones(64, 1))
model = torch.nn.Linear(2, 1)
session = holdfast.Session(model, torch.optim.SGD(model.parameters(), lr=0.1))
for step in session.steps(data, batch_size=16, epochs=1):
    for x, y in step:
        step.backward(torch.nn.functional.mse_loss(model(x), y))
    code, end = list(ENDS.items())[session.step]
    forked = os.fork()
    if forked == 0 and end is None:
        break
    if forked == 0:
        raise end
    assert os.waitstatus_to_exitcode(os.waitpid(forked, 0)[1]) == code
"""


def test_the_end_of_a_process_that_the_script_forks_is_not_that_of_the_worker(tmp_path):
    script = tmp_path / "forking.py"
    script.write_text(FORKING)

    report = run_report(tmp_path, "-n", 2, "--fabric", "gloo", script)

    assert exit_codes(report) == {0: 0, 1: 0}
    assert report["steps"] == 4
    assert "said by a fork" in report["_stdout"] + report["_stderr"]
