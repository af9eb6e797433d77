"""A session that another launcher starts: the processes join each other and end with the bits of `holdfast run`.

When one is killed, the others continue, if the launcher leaves them alone. Otherwise all end, and resume from the newest
checkpoint where the launcher starts them again.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time

import pytest
from jobs import ROOT, clean_env, run_report
from netns import make_hosts
from warm import WARM

from holdfast.checkpoint import steps, verify
from holdfast.launch.supervise.processes import children_of, value_of

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(150)]

EXAMPLE = ROOT / "examples" / "01_survive_a_kill.py"
DEADLINE_S = 120.0

SMALL = """
import sys, time
import torch, holdfast
from torch.utils.data import TensorDataset

model = torch.nn.Linear(2, 1)
session = holdfast.Session(model, torch.optim.SGD(model.parameters(), lr=0.1))
for step in session.steps(TensorDataset(torch.ones(8, 2)), 4, epochs=50):
    if session.step == 3 and session.rank == 1:
        print("at step 3", flush=True)
        {deed}
    for (x,) in step:
        step.backward(model(x).sum())
"""


FORK_AND_WAIT = "import os; os.fork() or (os.closerange(0, 3), time.sleep(20), os._exit(0)); time.sleep(60)"
"""The child inherits all connections, and must not keep them open when its parent is killed."""


def start_torchrun(folder, processes, script, *options, **env):
    """Start torchrun on this machine."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    return start([*torchrun, *options, str(script)], folder, **env)


def start(command, folder, **env):
    return subprocess.Popen(
        command, cwd=folder, env=clean_env(**env), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def finish(job):
    """Return exit code and both outputs of a job, which has a deadline."""
    try:
        out, err = job.communicate(timeout=DEADLINE_S)
    finally:
        job.kill()
    return job.returncode, out, err


def sha256_in(said):
    return re.findall(r"done before step \d+, sha256 ([0-9a-f]{64})", said)


def wait_until(is_so, job):
    ends_s = time.monotonic() + DEADLINE_S
    while not is_so():
        assert job.poll() is None, job.communicate()
        assert time.monotonic() < ends_s
        time.sleep(0.01)


@pytest.fixture(scope="module")
def bits(tmp_path_factory):
    """The sha256 of the example under `holdfast run`, by the number of workers."""
    found = {}

    def of(workers):
        if workers not in found:
            folder = tmp_path_factory.mktemp("reference")
            found[workers] = run_report(folder, "--fabric", "gloo", "--no-page", "-n", workers, EXAMPLE)
        return found[workers]["replicas"]["sha256"]

    return of


def test_processes_of_torchrun_end_with_the_bits_of_holdfast_run(tmp_path, bits):
    code, out, err = finish(start_torchrun(tmp_path, 2, EXAMPLE))

    assert code == 0, err
    assert out.count("144 steps") == 1, "one of them leads"
    assert "2 processes of torchrun have joined; when one fails, all end" in err
    assert "start from the beginning, because there is no checkpoint directory" in err
    if "PYTHONHASHSEED" not in os.environ:  # torchrun leaves it to each process
        assert err.count("at all workers, nor after --resume: export PYTHONHASHSEED=0 before they start") == 1
    assert sha256_in(err) == [bits(2)]


LARGE = """
import torch, holdfast
from torch.utils.data import TensorDataset

model = torch.nn.Linear(1024, 1200)  # more than 4 MiB are written by several threads
session = holdfast.Session(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
for step in session.steps(TensorDataset(torch.ones(8, 1024)), 4):
    for (x,) in step:
        step.backward(model(x).square().mean())
"""


@pytest.mark.parametrize("launcher", ["torchrun", "python"])
def test_the_end_of_training_is_saved_at_the_end_of_the_process(tmp_path, launcher):
    (tmp_path / "train.py").write_text(LARGE)
    saved = {"HOLDFAST_CHECKPOINT_DIR": str(tmp_path / "saved")}
    if launcher == "torchrun":
        job = start_torchrun(tmp_path, 2, "train.py", **saved)
    else:
        job = start([sys.executable, "train.py"], tmp_path, **saved, **{WARM: ""})

    code, _, err = finish(job)

    assert (code, "Traceback" in err) == (0, False), err
    assert steps(tmp_path / "saved") == [2]
    verify(tmp_path / "saved", 2)


def test_torchrun_restarts_all_when_one_is_killed_and_no_bit_changes(tmp_path, bits):
    saved = {"HOLDFAST_CHECKPOINT_DIR": str(tmp_path / "saved"), "HOLDFAST_CHECKPOINT_EVERY": "20"}
    job = start_torchrun(tmp_path, 2, EXAMPLE, "--max-restarts", "1", **saved)
    wait_until((tmp_path / "saved" / "step-00000020" / "manifest.json").exists, job)
    (victim,) = [pid for pid in children_of(job.pid) if value_of(pid, "RANK") == "1"]
    os.kill(victim, signal.SIGKILL)

    code, _, err = finish(job)

    assert code == 0, err
    assert f"exitcode: -9) local_rank: 1 (pid: {victim})" in err, "the fault landed"
    assert "holdfast: rank 0 ends: rank 1 has failed, for torchrun to restart all" in err
    assert [int(step) >= 20 for step in re.findall(r"training resumes at step (\d+)", err)] == [True]
    assert sha256_in(err) == [bits(2)]


def test_each_survivor_ends_when_a_process_raises_or_leaves_training(tmp_path):
    """Without restarts: training of the others must not go on, or wait."""
    for deed in ("raise ValueError('a bug')", "sys.exit(0)"):
        (tmp_path / "train.py").write_text(SMALL.format(deed=deed))

        code, out, err = finish(start_torchrun(tmp_path, 2, "train.py"))

        assert code == 1, err
        assert "at step 3" in out
        assert "holdfast: rank 0 ends: rank 1 has failed" in err
        assert "a bug" in err or "rank 1 ends: training was left at step 3 before its end" in err
        assert sha256_in(err) == []


def start_tasks(count, folder, script, **env):
    """Start tasks with the environment of a step of srun, which restarts none of them."""
    step = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_NODES": "1"}
    step |= {"SLURM_STEP_NUM_TASKS": str(count), "SLURM_STEP_NODELIST": "localhost"} | env
    command = [sys.executable, str(script)]
    return [start(command, folder, **step, SLURM_PROCID=str(task), **{WARM: ""}) for task in range(count)]


@pytest.mark.timeout(400)
def test_tasks_of_srun_continue_when_one_dies_also_the_one_that_led_the_store(tmp_path, bits):
    count, victims = 4, [3, 0]
    saved = {"HOLDFAST_CHECKPOINT_DIR": str(tmp_path / "saved"), "HOLDFAST_CHECKPOINT_EVERY": "20"}
    tasks = start_tasks(count, tmp_path, EXAMPLE, **saved)
    try:
        for turn, victim in enumerate(victims):
            at = tmp_path / "saved" / f"step-{20 + 40 * turn:08}" / "manifest.json"
            wait_until(at.exists, tasks[victim])
            tasks[victim].send_signal(signal.SIGKILL)
        ended = [finish(task) for task in tasks]
    finally:
        for task in tasks:
            task.kill()

    said = "".join(err for _, _, err in ended)
    assert [code for code, _, _ in ended] == [-9 if rank in victims else 0 for rank in range(count)], said
    assert (
        f"{count} processes of srun have joined; when one dies, the others continue, if srun leaves them alone" in said
    )
    assert "holdfast: rank 0 has died; the others continue: 1, 2\n" in said
    assert sha256_in(said) == [bits(count)]


DIES_AT_START = """
import os, signal
if os.environ["SLURM_PROCID"] == "1":
    os.kill(os.getpid(), signal.SIGKILL)
import runpy
runpy.run_path({script!r}, run_name="__main__")
"""


@pytest.mark.parametrize("least", ["", "2"], ids=["ends", "begins without it"])
def test_a_task_of_srun_that_dies_at_its_start_is_named_and_the_others_end_or_begin_without_it(tmp_path, bits, least):
    (tmp_path / "train.py").write_text(DIES_AT_START.format(script=str(EXAMPLE)))
    limits = {"HOLDFAST_START_TIMEOUT_S": "12"} | ({"HOLDFAST_MIN_WORKERS": least} if least else {})
    tasks = start_tasks(4 if least else 2, tmp_path, "train.py", **limits)
    try:
        ended = [finish(task) for task in tasks]
    finally:
        for task in tasks:
            task.kill()

    said = "".join(err for _, _, err in ended)
    assert ended[1][0] == -9
    assert {code for rank, (code, _, _) in enumerate(ended) if rank != 1} == {0 if least else 1}, said
    assert re.search(r"^holdfast: for 10 s rank 0 waits for rank 1 of \d processes of srun; after 12 s ", said, re.M)
    assert "Traceback" not in said
    if least:
        assert (
            "holdfast: rank 1 did not join in time; training begins with ranks 0, 2, 3 (HOLDFAST_MIN_WORKERS=2)" in said
        )
        assert sha256_in(said) == [bits(4)]
    else:
        ends = (
            "holdfast: rank 0 ends: rank 1 of 2 processes of srun did not join within 12 s (HOLDFAST_START_TIMEOUT_S);"
        )
        assert (
            f"{ends} HOLDFAST_MIN_WORKERS=N begins without those that are missing, if N processes are there\n" in said
        )


@pytest.mark.soak
@pytest.mark.parametrize("victim", [0, 1])
def test_of_two_tasks_the_one_that_hosts_the_store_continues_and_the_other_ends(tmp_path, victim):
    script = SMALL.replace("session.rank == 1", f"session.rank == {victim}").format(deed="time.sleep(60)")
    (tmp_path / "train.py").write_text(script)
    tasks = start_tasks(2, tmp_path, "train.py")
    try:
        assert tasks[victim].stdout.readline() == "at step 3\n"
        tasks[victim].send_signal(signal.SIGKILL)
        ended = [finish(task) for task in tasks]
    finally:
        for task in tasks:
            task.kill()

    code, _, err = ended[1 - victim]
    assert ended[victim][0] == -9
    assert "without rank 0, which hosts the membership store, all end" in ended[0][2]
    if victim == 1:
        assert code == 0, err
        assert len(sha256_in(err)) == 1
    else:
        assert code in (1, -9), err
        assert sha256_in(err) == []


@pytest.mark.soak
def test_on_machines_of_their_own_the_majority_continues_without_rank_0_which_ends_itself(tmp_path, bits):
    made = make_hosts(3, net="10.205.0")
    group = {"WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": made.address(1), "MASTER_PORT": "29500"}
    group |= {"HOLDFAST_CHECKPOINT_DIR": str(tmp_path / "saved"), "HOLDFAST_CHECKPOINT_EVERY": "20"}
    group |= {"HOLDFAST_ORDER": "fold"}  # as on one machine
    command = [sys.executable, str(EXAMPLE)]
    tasks = [start([*made.inside(rank + 1), *command], tmp_path, **group, RANK=str(rank)) for rank in range(3)]
    try:
        wait_until((tmp_path / "saved" / "step-00000020" / "manifest.json").exists, tasks[0])
        made.cut_off(1)
        ended = [finish(task) for task in tasks]
    finally:
        for task in tasks:
            task.kill()
        made.remove()

    said = "".join(err for _, _, err in ended)
    assert [code == 0 for code, _, _ in ended] == [False, True, True], said
    assert "holdfast: rank 0 has died; the others continue: 1, 2\n" in said
    assert sha256_in(said) == [bits(3)]


JOIN_ONLY = """
import time
from holdfast.comm import joining, surviving
joining.LEASE_S = surviving.LEASE_S = 3.0
from holdfast.comm.launchers import own_group
group = surviving.SurvivingGroup(own_group())
print("joined", flush=True)
time.sleep(100)
"""


@pytest.mark.soak
def test_a_process_that_is_cut_off_from_the_others_ends_itself(tmp_path):
    (tmp_path / "train.py").write_text(JOIN_ONLY)
    tasks = start_tasks(3, tmp_path, "train.py")
    try:
        assert [task.stdout.readline() for task in tasks] == ["joined\n"] * 3
        tasks[1].send_signal(signal.SIGSTOP)
        said = iter(tasks[0].stderr.readline, "")
        assert any(line == "holdfast: rank 1 has died; the others continue: 0, 2\n" for line in said)
        tasks[1].send_signal(signal.SIGCONT)
        code, _, err = finish(tasks[1])
        assert code == 1
        assert "holdfast: rank 1 ends: " in err

        tasks[0].send_signal(signal.SIGKILL)  # of the two, the one that leads: the other cannot know that it is dead
        code, _, err = finish(tasks[2])
        assert code == 1
        assert "holdfast: rank 2 ends: it is cut off from the others: " in err
        assert finish(tasks[0])[0] == -9
    finally:
        for task in tasks:
            task.kill()


def test_tasks_of_srun_join_where_their_step_begins_and_end_with_the_first_that_fails(tmp_path):
    """Where srun ends all of them, they say how to go on."""
    (tmp_path / "train.py").write_text(SMALL.format(deed="time.sleep(60)"))
    tasks = start_tasks(2, tmp_path, "train.py", SLURM_KILL_BAD_EXIT="1")
    try:
        assert tasks[1].stdout.readline() == "at step 3\n"
        tasks[1].send_signal(signal.SIGKILL)
        killed_s = time.monotonic()
        ended = [finish(task) for task in tasks]
    finally:
        for task in tasks:
            task.kill()

    assert time.monotonic() - killed_s < 10
    assert [code for code, _, _ in ended] == [1, -9]
    assert "2 processes of srun have joined" in ended[0][2]
    assert "started again with HOLDFAST_RESUME=1" in ended[0][2]
    assert "holdfast: rank 0 ends: rank 1 has failed\n" in ended[0][2]


def test_when_rank_0_is_killed_the_store_goes_with_it_and_all_end(tmp_path):
    script = SMALL.replace(" and session.rank == 1", "").format(deed=FORK_AND_WAIT)
    (tmp_path / "train.py").write_text(script)
    mpi = {"PMI_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(20000 + os.getpid() % 12000)}
    first, second = (
        start([sys.executable, "train.py"], tmp_path, **mpi, PMI_RANK=str(rank), **{WARM: ""}) for rank in range(2)
    )
    try:
        assert second.stdout.readline() == "at step 3\n"
        first.send_signal(signal.SIGKILL)
        killed_s = time.monotonic()
        code, _, err = finish(second)
        took_s = time.monotonic() - killed_s
    finally:
        second.kill()
        first_code, _, _ = finish(first)

    assert (first_code, code) == (-9, 1)
    assert took_s < 10
    assert "holdfast: rank 1 ends: rank 0 has failed: " in err


def test_one_process_that_is_killed_resumes_too(tmp_path):
    """An elastic torchrun may start one where there were several."""
    (tmp_path / "train.py").write_text(
        SMALL.replace("== 3 and session.rank == 1", "== 50").format(deed="time.sleep(2)")
    )
    saved = {"HOLDFAST_CHECKPOINT_DIR": str(tmp_path / "saved"), "HOLDFAST_CHECKPOINT_EVERY": "20"}
    job = start_torchrun(tmp_path, 1, "train.py", "--max-restarts", "1", **saved)
    wait_until((tmp_path / "saved" / "step-00000040" / "manifest.json").exists, job)
    (victim,) = [pid for pid in children_of(job.pid) if value_of(pid, "RANK") == "0"]
    os.kill(victim, signal.SIGKILL)

    code, _, err = finish(job)

    assert code == 0, err
    assert f"exitcode: -9) local_rank: 0 (pid: {victim})" in err
    assert "training resumes at step 40" in err
    assert len(sha256_in(err)) == 1


def test_they_resume_on_another_number_of_processes_with_the_same_bits(tmp_path, bits):
    saved = {"HOLDFAST_CHECKPOINT_DIR": str(tmp_path / "saved"), "HOLDFAST_CHECKPOINT_EVERY": "20"}
    job = start_torchrun(tmp_path, 2, EXAMPLE, **saved)
    wait_until((tmp_path / "saved" / "step-00000040" / "manifest.json").exists, job)
    job.send_signal(signal.SIGTERM)
    code, _, err = finish(job)
    assert code != 0, err
    assert "stopped before step" in err

    code, _, err = finish(start_torchrun(tmp_path, 3, EXAMPLE, HOLDFAST_RESUME="1", **saved))

    assert code == 0, err
    assert "training resumes at step" in err
    assert sha256_in(err) == [bits(2)]
