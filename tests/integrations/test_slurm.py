"""A real Slurm of two nodes: what it does to processes, jobs and nodes, and how training goes on.

``make integrations ONLY=slurm`` runs these tests. Slurm's packages are installed if they are missing, which needs root.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys

import pytest
from jobs import run_report
from slurm import Slurm

pytestmark = [pytest.mark.slurm, pytest.mark.soak, pytest.mark.timeout(180)]

SCRIPT = """
import os, sys, time
from pathlib import Path
if os.environ.get("DIES_AT_START", "-") == os.environ.get("SLURM_PROCID"):
    os.kill(os.getpid(), 9)
import torch, holdfast
from torch.utils.data import TensorDataset

pace_s = float(os.environ.get("PACE_S", "0"))
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
session = holdfast.Session(model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), slices=4)
data = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
for step in session.steps(TensorDataset(data), 16, epochs=30):
    time.sleep(pace_s)
    for (x,) in step:
        step.backward(model(x).square().mean())
"""
STEPS, SAMPLES = 120, 1920
SAVE_EVERY = 5
IN_TIME_S = 100.0
JOB = """#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=1 --cpus-per-task=2 --no-kill --requeue
export HOLDFAST_TOKEN=a-secret-of-this-test OMP_NUM_THREADS=1 PACE_S={pace_s}
[ "$SLURM_RESTART_COUNT" ] && export PACE_S=0
srun --kill-on-bad-exit=0 --no-kill bash -c 'trap : TERM
{python} -m holdfast run -n 1 --grace 20 --no-page --report report --checkpoint-dir saved \\
    --checkpoint-every {every} --resume {options} train.py
code=$?; echo $code > code-$SLURM_NODEID; exit $code'
code=$?
[ $code = 4 ] && [ "{requeues}" ] && scontrol requeue $SLURM_JOB_ID
exit $code
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with Slurm(tmp_path_factory.mktemp("slurm")) as slurm:
        yield slurm


@pytest.fixture(scope="module")
def bits(tmp_path_factory):
    """The sha256 of the undisturbed run, without Slurm."""
    folder = tmp_path_factory.mktemp("reference")
    (folder / "train.py").write_text(SCRIPT)
    return run_report(folder, "-n", 2, "--fabric", "gloo", folder / "train.py")["replicas"]["sha256"]


@pytest.fixture(autouse=True)
def script(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)


class Job:
    """A batch job with ``holdfast run`` on both nodes."""

    def __init__(self, cluster, folder, *options, pace_s=0.0, requeues="", run=""):
        self.cluster, self.folder = cluster, folder
        text = JOB.format(python=sys.executable, pace_s=pace_s, every=SAVE_EVERY, options=run, requeues=requeues)
        self.number = cluster.submit(text, *options, folder=folder)

    def wait_for_step(self, step):
        """Wait for the checkpoint of a step, while the job trains."""
        there = self.folder / "saved" / f"step-{step:08}" / "manifest.json"
        self.cluster.wait_for(there.exists, f"step {step} was saved", IN_TIME_S, self.output)

    def output(self):
        return self.cluster.output(self.number)

    def finish(self):
        """Return exit code and output of the job."""
        _, code, said = self.cluster.finish(self.number, IN_TIME_S)
        return code, said

    @property
    def codes(self):
        """The exit code of ``holdfast run`` on each node that has one."""
        return {int(path.name[5:]): int(path.read_text()) for path in self.folder.glob("code-*")}

    @property
    def report(self):
        return json.loads((self.folder / "report" / "report.json").read_text())


def check_end(job, bits):
    """The job has ended with the bits of the undisturbed run; return its output."""
    code, said = job.finish()
    assert code == 0, said[-4000:]
    assert job.report["samples"]["committed"] == SAMPLES, said[-4000:]
    assert job.report["replicas"]["sha256"] == bits
    return said


def test_a_task_that_dies_at_its_start_is_named_and_the_others_end_or_begin_without_it(cluster, bits, tmp_path):
    srun = ("srun", "--no-kill", "--kill-on-bad-exit=0", "--wait=0", "-N2")
    env = cluster.env | {"DIES_AT_START": "1", "HOLDFAST_START_TIMEOUT_S": "14"}
    jobs = {
        what: subprocess.Popen(
            [*srun, tasks, sys.executable, "train.py"],
            cwd=tmp_path, env=env | least, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        )
        for what, tasks, least in (("ends", "-n2", {}), ("begins", "-n4", {"HOLDFAST_MIN_WORKERS": "2"}))
    }  # fmt: skip
    said = {what: job.communicate(timeout=IN_TIME_S)[1] for what, job in jobs.items()}

    for what, job in jobs.items():
        assert job.returncode, "srun ends with the code of the task that died"
        assert "task 1: Killed" in said[what], "the fault landed"
        line = r"^holdfast: for 1\d s rank 0 waits for rank 1 of \d processes of srun; after 14 s "
        assert re.search(line, said[what], re.M), said[what]
        assert "Traceback" not in said[what]
    assert "holdfast: rank 0 ends: rank 1 of 2 processes of srun did not join within 14 s" in said["ends"]
    assert "done before step" not in said["ends"]
    assert "rank 1 did not join in time; training begins with ranks 0, 2, 3" in said["begins"]
    assert re.findall(rf"done before step {STEPS}, sha256 (\w+)", said["begins"]) == [bits]


def test_a_batch_job_of_two_nodes_loses_a_worker_and_no_bit(cluster, bits, tmp_path):
    quiet, struck = (
        Job(cluster, folder, run=run) for folder, run in jobs_in(tmp_path, "", "--inject kill:rank=1,step=40")
    )

    said = check_end(quiet, bits)
    assert said.count(f"{STEPS} steps in ") == 1, "one launcher prints the summary"
    assert said.count("checkpoint of step") <= STEPS / SAVE_EVERY, "and each event"
    said = check_end(struck, bits)
    assert [failure["rank"] for failure in struck.report["failures"]] == [1]
    assert said.count("lost rank 1; step 40 is computed again with rank 0") == 1
    assert quiet.codes == {0: 0, 1: 0}


def jobs_in(tmp_path, *options):
    for place, each in enumerate(options):
        folder = tmp_path / str(place)
        folder.mkdir()
        (folder / "train.py").write_text(SCRIPT)
        yield folder, each


def test_scancel_saves_and_the_job_is_resumed(cluster, bits, tmp_path):
    job = Job(cluster, tmp_path, pace_s=0.5)
    job.wait_for_step(SAVE_EVERY)
    cluster.cancel(job.number)
    job.finish()

    assert job.codes == {0: 4, 1: 4}, job.output()[-4000:]
    assert job.report["outcome"] == "stopped"
    assert SAVE_EVERY <= job.report["steps"] < STEPS
    check_end(Job(cluster, tmp_path), bits)


def test_the_time_limit_saves_and_the_job_is_resumed(cluster, bits, tmp_path):
    job = Job(cluster, tmp_path, "--time=1", "--signal=TERM@20", pace_s=0.6)  # Slurm looks every 30 s
    code, said = job.finish()

    assert (code, job.codes) == (4, {0: 4, 1: 4}), said[-4000:]
    assert 0 < job.report["steps"] < STEPS
    check_end(Job(cluster, tmp_path), bits)


def test_a_node_that_is_lost_with_its_daemon_costs_no_bit(cluster, bits, tmp_path):
    job = Job(cluster, tmp_path, pace_s=0.1, run="--node-timeout 4")
    job.wait_for_step(SAVE_EVERY)
    cluster.lose("n2")
    try:
        cluster.wait_for((tmp_path / "code-0").exists, "node 0 has finished", IN_TIME_S, job.output)
    finally:
        cluster.back("n2")

    assert job.codes == {0: 0}, job.output()[-4000:]
    assert job.report["replicas"]["sha256"] == bits
    assert job.report["steps"] == STEPS
    assert "node 1 is lost, with rank 1" in job.output()
    cluster.cancel(job.number, "--signal=KILL", "--full")
    cluster.wait_for(lambda: set(cluster.states().values()) == {"idle"}, "both nodes are idle", 60)


def test_a_job_that_is_requeued_resumes(cluster, bits, tmp_path):
    job = Job(cluster, tmp_path, pace_s=0.5, requeues="yes")
    job.wait_for_step(SAVE_EVERY)
    cluster.cancel(job.number, f"--signal={int(signal.SIGTERM)}")  # of the steps, as a preemption sends it
    cluster.start_again(job.number, 60)
    check_end(job, bits)
    stopped_at = int(re.findall(r"stopped on request before step (\d+)", job.output())[0])
    assert 0 < stopped_at < STEPS
    assert job.report["steps"] == STEPS - stopped_at, "it resumed there"
