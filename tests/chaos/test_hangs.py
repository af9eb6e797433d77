"""Workers that are there and get no further, for real: found from outside, ended, and the bits are those of a quiet run.

Each job holds several faults, so that few processes are started.
"""

import functools
import signal
from pathlib import Path

import pytest
import reference
import train_paced
from jobs import exit_codes, inject, of_kind, run_report
from running_job import Running

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(300)]

SUPPORT = Path(__file__).parents[1] / "support"
EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPT = SUPPORT / "train_reference.py"
PACED = SUPPORT / "train_paced.py"
reference_hash = functools.cache(reference.train)
paced_hash = functools.cache(lambda epochs: train_paced.train(epochs, fabric="virtual"))


@pytest.mark.parametrize(
    ("fabric", "stuck"),
    [
        (
            "ulfm",
            {
                1: ("hang", 2, "forward"),
                2: ("gil", 4, "allreduce"),
                3: ("spin", 6, "allreduce"),
                4: ("deadlock", 8, "forward"),
            },
        ),
        (
            "gloo",
            {
                1: ("hang", 2, "allreduce"),
                2: ("gil", 4, "forward"),
                3: ("spin", 6, "forward"),
                4: ("deadlock", 8, "allreduce"),
            },
        ),
    ],
)
def test_workers_that_get_stuck_are_found_ended_and_done_without(fabric, stuck, tmp_path):
    ends = {5: ("segfault", 10, "forward", -11), 6: ("oom", 12, "allreduce", -9)}
    faults = {rank: fault[:3] for rank, fault in (stuck | ends).items()}

    report = run_report(
        tmp_path,
        *("-n", 7, "--fabric", fabric, "--hang-timeout", 1, "--max-restarts", 0),
        *inject(*(f"{kind}:rank={r},step={step},phase={phase}" for r, (kind, step, phase) in faults.items())),
        *(SCRIPT, "mlp", "sgd"),
    )

    assert {e["rank"]: (e["kind"], e["step"], e["phase"]) for e in of_kind(report, "FaultFired")} == faults
    assert {e["rank"]: e["step"] for e in of_kind(report, "WorkerFenced")} == {r: f[1] for r, f in stuck.items()}
    assert all(e["silent_s"] >= 1 for e in of_kind(report, "WorkerFenced"))
    seen = {e["rank"]: e["stack"] for e in of_kind(report, "WorkerFenced")}
    assert any("train_reference.py" in seen[rank] for rank in (2, 3, 4)), "each had 50 ms to write its stacks"
    assert exit_codes(report) == {0: 0, 5: -11, 6: -9} | dict.fromkeys(stuck, -9)
    assert {f["rank"]: f["kind"] for f in report["failures"]} == {r: kind for r, (kind, *_) in faults.items()}
    assert report["replicas"]["state_sha256"] == reference_hash("mlp", "sgd")
    assert report["samples"] == {"planned": 406, "committed": 406, "lost": 0, "repeated": 0}


def test_who_waited_for_one_that_is_stuck_in_a_checkpoint_longer_than_a_stall_takes_goes_on_without_it(tmp_path):
    report = run_report(
        tmp_path,
        *("-n", 3, "--fabric", "gloo", "--hang-timeout", 0.5, "--stall-timeout", 10, "--max-restarts", 0),
        *("--checkpoint-dir", tmp_path / "checkpoints", "--checkpoint-every", 2),
        *inject("spin:rank=0,step=4,phase=checkpoint"),
        *(SCRIPT, "mlp", "sgd"),
    )

    (fenced,) = of_kind(report, "WorkerFenced")
    assert fenced["rank"] == 0
    assert fenced["silent_s"] >= 15
    assert "in checkpoint of step" in fenced["reason"]
    assert exit_codes(report) == {0: -9, 1: 0, 2: 0}
    assert report["replicas"]["state_sha256"] == reference_hash("mlp", "sgd")
    assert report["samples"] == {"planned": 406, "committed": 406, "lost": 0, "repeated": 0}


def test_ranks_of_an_unmodified_ddp_script_that_stop_or_keep_pythons_lock_or_come_to_no_sum_are_done_without(tmp_path):
    report = run_report(
        tmp_path,
        *("-n", 4, "--fabric", "gloo", "--hang-timeout", 2, "--max-restarts", 0),
        *inject("hang:rank=1,step=2", "gil:rank=2,step=5,phase=allreduce", "deadlock:rank=3,step=8,phase=backward"),
        EXAMPLES / "06_unmodified_ddp.py",
    )

    fenced = {e["rank"]: e["reason"] for e in of_kind(report, "WorkerFenced")}
    assert sorted(fenced) == [1, 2, 3]
    assert "no progress" in fenced[3]
    assert exit_codes(report) == {0: 0, 1: -9, 2: -9, 3: -9}
    assert {f["rank"]: f["kind"] for f in report["failures"]} == {1: "hang", 2: "gil", 3: "deadlock"}


SLEEPS = """
import time
import torch
import torch.distributed as dist

dist.init_process_group("holdfast")
for step in range(6):
    if (step, dist.get_rank()) in ((1, 2), (3, 1)):
        time.sleep({1: 5, 3: 1000}[step])
    value = torch.ones(1)
    try:
        dist.all_reduce(value)
    except RuntimeError as error:
        print("failed", error)
print("done", value.item())
"""


def test_a_rank_that_sleeps_between_two_collectives_may_do_so_60_times_as_long(tmp_path):
    script = tmp_path / "sleeps.py"
    script.write_text(SLEEPS)

    report = run_report(
        tmp_path,
        *("-n", 3, "--fabric", "gloo", "--hang-timeout", 0.4, "--stall-timeout", 2, "--max-restarts", 0),
        script,
    )

    assert exit_codes(report) == {0: 0, 1: -9, 2: 0}
    (fenced,) = of_kind(report, "WorkerFenced")
    assert fenced["rank"] == 1
    assert "in the script, outside training, while other workers wait for it" in fenced["reason"]


def test_without_a_timeout_nobody_is_ended_and_the_job_is_started_again(tmp_path):
    report = run_report(
        tmp_path,
        *("-n", 2, "--fabric", "gloo", "--hang-timeout", 0, "--stall-timeout", 3),
        *inject("deadlock:rank=1,step=4,phase=allreduce"),
        *(SCRIPT, "mlp", "sgd"),
    )

    assert of_kind(report, "WorkerFenced") == []
    assert [e["rank"] for e in of_kind(report, "FaultFired")] == [1]
    (restart,) = of_kind(report, "JobRestarted")
    assert "waiting for each other" in restart["reason"]
    assert report["replicas"]["state_sha256"] == reference_hash("mlp", "sgd")


def test_what_takes_long_by_nature_is_no_hang(tmp_path):
    report = run_report(
        tmp_path,
        *("-n", 2, "--fabric", "gloo", "--hang-timeout", 1),
        *inject("slow:rank=0,step=0,seconds=3", "hang:rank=0,step=5,seconds=0.4", "gil:rank=1,step=6,seconds=0.4"),
        PACED,
        *("--nap", 1, 3, 3.0, "busy"),
        *("--nap", 1, 8, 0.8, "quiet", "--nap", 1, 9, 1.6, "quiet"),
    )

    assert of_kind(report, "WorkerFenced") == []
    assert len(of_kind(report, "FaultFired")) == 3
    assert exit_codes(report) == {0: 0, 1: 0}
    assert report["failures"] == []
    assert report["replicas"]["state_sha256"] == paced_hash(2)


def test_a_stopped_watcher_and_then_everybody_stopped_at_once(tmp_path):
    """The watcher is woken to tell of its worker; where all are stopped all are ended, and the job is started again."""
    running = Running(
        tmp_path,
        *("-n", 3, "--fabric", "gloo", "--hang-timeout", 1, PACED),
        *(word for rank in range(3) for word in ("--nap", rank, "all", 0.05, "quiet")),
    )
    pairs = [running.pair_at_step(rank, 1) for rank in range(3)]
    assert pairs[1].watcher.send(signal.SIGSTOP)
    assert pairs[1].worker.send(signal.SIGKILL)
    assert running.pair_at_step(0, 4) == pairs[0]
    for rank in (0, 2):
        assert pairs[rank].worker.send(signal.SIGSTOP)

    report, ended = running.end()

    assert sorted(event["rank"] for event in of_kind(report, "WorkerFenced")) == [0, 2]
    assert [ended[pair.worker.pid] for pair in pairs] == [-9, -9, -9]
    assert report["restarts"] == 1
    assert report["replicas"]["state_sha256"] == paced_hash(2)
    assert not any(process.is_alive() for pair in pairs for process in (pair.worker, pair.watcher))


def test_a_slow_worker_is_given_less_to_do(tmp_path):
    report = run_report(
        tmp_path,
        *("-n", 2, "--slices", train_paced.SLICES, "--fabric", "gloo"),
        *("--stragglers", "rebalance", "--straggler-factor", 1.5),
        *(PACED, "--epochs", 5, "--nap", 1, "all", 0.04, "quiet"),
    )

    (seen,) = of_kind(report, "StragglerSeen")
    assert (seen["rank"], seen["policy"]) == (1, "rebalance")
    assert {e["name"] for e in of_kind(report, "SettingChanged")} == {"speeds"}
    first, last = next(line for line in report["_stdout"].splitlines() if line.startswith("[1] slices")).split()[2:]
    assert int(first) == 4
    assert int(last) < int(first)
    assert report["replicas"]["state_sha256"] == paced_hash(5)


def test_a_slow_worker_is_replaced_by_a_spare(tmp_path):
    report = run_report(
        tmp_path,
        *("-n", 2, "--spares", 1, "--fabric", "gloo", "--stragglers", "replace", "--straggler-factor", 1.5),
        *(PACED, "--epochs", 5, "--nap", 1, "all", 0.04, "quiet"),
    )

    assert [(e["rank"], e["policy"]) for e in of_kind(report, "StragglerSeen")] == [(1, "replace")]
    assert [e["rank"] for e in of_kind(report, "Left")] == [1]
    assert exit_codes(report) == {0: 0, 1: 0, 2: 0}
    assert "[2] slices 0 4" in report["_stdout"], "the spare has taken its place"
    assert report["failures"] == []
    assert report["replicas"]["state_sha256"] == paced_hash(5)


EARLY_MESSAGES = """
import time
import torch
import torch.distributed as dist

dist.init_process_group("holdfast")
value = torch.ones(300_000)
dist.all_reduce(value)
me = dist.get_rank()
begun = [dist.irecv(torch.ones(1), 1 - me, tag=1), {early}]
if me in {sleep}:
    time.sleep({seconds})
for work in {last}:
    work.wait()
print("done")
"""
SENDS_EARLY = "dist.isend(value, 1) if me == 0 else None"


@pytest.mark.parametrize(
    ("script", "ends"),
    [
        ({"sleep": (0, 1), "seconds": 30, "last": "[begun[1] or dist.irecv(value, 0)]"}, {0: 0, 1: 0}),
        ({"sleep": (1,), "seconds": 1000, "last": "begun[:1]"}, {0: 1, 1: -9}),
    ],
    ids=["all compute", "one hangs"],
)
def test_a_message_that_was_begun_early_is_waited_for_once_the_script_waits(tmp_path, script, ends):
    path = tmp_path / "early_messages.py"
    path.write_text(EARLY_MESSAGES.format(early=SENDS_EARLY, **script))

    report = run_report(
        tmp_path, *("-n", 2, "--fabric", "gloo", "--hang-timeout", 0.4, "--max-restarts", 0), path, exit_code=ends[0]
    )

    assert exit_codes(report).items() <= ends.items()  # that of a rank that raises may not be heard of any more
    assert [event["rank"] for event in of_kind(report, "WorkerFenced")] == [r for r, end in ends.items() if end == -9]


LONG_IMPORT = """
import sys
from pathlib import Path
import torch, holdfast
from holdfast.records import beacon

def raises():
    Path({note!r} + str(holdfast.__name__)).touch()
    raise RuntimeError("dictionary changed size during iteration")

beacon.current_activity = raises  # the heartbeat asks for it every half second at most, before the first step
sys.path.insert(0, {folder!r})
import slow_to_import

model = torch.nn.Linear(2, 1)
session = holdfast.Session(model, torch.optim.SGD(model.parameters(), lr=0.1))
for step in session.steps(torch.utils.data.TensorDataset(torch.ones(16, 2)), 4, epochs=1):
    for (x,) in step:
        if session.step == 2:
            slow_to_import.wait()  # all workers do: only their heartbeats tell them from hung ones
        step.backward(model(x).sum())
"""
WAIT_S = 3.0


def test_no_worker_is_ended_whose_search_for_the_module_being_imported_fails(tmp_path):
    script, note = tmp_path / "train.py", tmp_path / "asked-"
    (tmp_path / "slow_to_import.py").write_text(f"import time\n\ndef wait():\n    time.sleep({WAIT_S})\n\nwait()\n")
    script.write_text(LONG_IMPORT.format(note=str(note), folder=str(tmp_path)))

    report = run_report(tmp_path, "-n", 2, "--fabric", "gloo", "--hang-timeout", 0.5, script)

    assert list(tmp_path.glob("asked-*")), "the fault landed"
    assert report["_stdout"].count("RuntimeError: dictionary changed size during iteration") == 2, "once a worker"
    assert of_kind(report, "WorkerFenced") == []
    assert exit_codes(report) == {0: 0, 1: 0}
