"""A worker freezes in each phase of a job, by a signal or in a sleep: the job goes on within the limit of the phase."""

import functools
import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest
import train_frozen
from clusters import free_port
from jobs import clean_env, exit_codes, run_report

from holdfast.base.phases import Phase

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(240)]

SCRIPT = Path(__file__).parents[1] / "support" / "train_frozen.py"
HANG_S, START_S = 0.5, 5.0
LIMITS = {"--hang-timeout": HANG_S, "--start-timeout": START_S}
SLOWER, LATE_S = 4.0, 60.0
"""What a busy machine may add to a limit, which rises to three times what other workers took."""
expected_hash = functools.cache(lambda: train_frozen.train(fabric="virtual"))

FROZEN = {
    Phase.IMPORTS: "imports",
    Phase.CONNECTING: "connect",
    Phase.LOADING: "start",
    Phase.TRAINING: "allreduce",
    Phase.RECOVERY: "recovery",
    Phase.GROUP: "group",
    Phase.SCRIPT: "evaluation",
    Phase.SAVING: "checkpoint",
    Phase.GATE: "gate",
}
"""Where the script freezes, for each phase in which a worker that freezes is ended from outside."""
QUICK = "gloo", Phase.GATE, "sleep"
"""The case of every run of the tests."""


def run(tmp_path, fabric, *frozen, exit_code=0):
    """Run the script with workers that freeze; return the report."""
    words = [word for each in frozen for word in ("--freeze", each)]
    options = [word for option in LIMITS.items() for word in option]
    is_after_failure = any(name in each for each in frozen for name in (":recovery:", ":group:"))
    kill = ("--inject", "kill:rank=2,step=3,phase=allreduce") if is_after_failure else ()
    words += ["--messages"] if any(":group:" in each for each in frozen) else []
    saves = ("--checkpoint-dir", tmp_path / "saved", "--checkpoint-every", 2)
    report = run_report(
        tmp_path,
        *("-n", 3, "--fabric", fabric, *options, *kill, *saves),
        *(SCRIPT, "--notes", tmp_path, *words),
        exit_code=exit_code,
        timeout=220,
    )
    assert report["replicas"]["state_sha256"] == expected_hash()
    for each in frozen:
        rank, phase, _ = each.split(":")
        assert (tmp_path / f"frozen-{rank}-{phase}").exists(), "it has frozen there"
    return report


def fenced(report):
    return [event for event in report["_events"] if event["event"] == "WorkerFenced"]


CASES = [
    pytest.param(fabric, phase, how, id=f"{phase.name}-{how}-{fabric}", marks=() if each == QUICK else pytest.mark.soak)
    for each in itertools.product(("gloo", "ulfm"), FROZEN, ("stop", "sleep"))
    for fabric, phase, how in [each]
    if each != ("ulfm", Phase.CONNECTING, "sleep")  # over Open MPI that is no different from waiting: see below
    and each != ("gloo", Phase.GROUP, "sleep")  # where only the thread hangs that connects: see below
]


@pytest.mark.parametrize(("fabric", "phase", "how"), CASES)
def test_a_worker_that_freezes_in_a_phase_is_ended_within_its_limit(fabric, phase, how, tmp_path):
    report = run(tmp_path, fabric, f"1:{FROZEN[phase]}:{how}")

    found = next(each for each in fenced(report) if each["rank"] == 1)  # a busy machine may stop others for as long
    assert found["silent_s"] <= SLOWER * phase.limit_s(LIMITS) + LATE_S
    assert exit_codes(report)[1] == -9
    assert exit_codes(report)[0] == 0


@pytest.mark.soak
def test_workers_that_wait_for_the_address_of_a_member_that_waits_as_well_are_started_again(tmp_path):
    """Only the thread hangs that connects: the member itself waits for it, as the others do."""
    report = run(tmp_path, "gloo", "1:group:sleep")

    assert fenced(report) == []
    (restart,) = [event for event in report["_events"] if event["event"] == "JobRestarted"]
    assert "all of them waiting for each other" in restart["reason"]


@pytest.mark.soak
def test_workers_of_which_none_is_connected_are_started_again(tmp_path):
    report = run(tmp_path, "ulfm", "1:connect:sleep")

    (restart,) = [event for event in report["_events"] if event["event"] == "JobRestarted"]
    assert "not connected within" in restart["reason"]
    assert fenced(report) == []


@pytest.mark.soak  # the same without a job: tests/unit/test_exit_handlers.py
def test_exit_handlers_that_do_not_end_are_left(tmp_path):
    report = run(tmp_path, "gloo", "1:exit:sleep", exit_code=1)  # what they were to do is not done

    assert exit_codes(report) == {0: 0, 1: 1, 2: 0}
    assert fenced(report) == []
    assert f"exit handlers have not ended within {Phase.FINALIZING.limit_s(LIMITS):g} s" in report["_stdout"]


@pytest.mark.soak
@pytest.mark.parametrize("fabric", ["gloo", "ulfm"])
def test_a_worker_that_is_stopped_in_its_exit_handlers_is_ended(tmp_path, fabric):
    report = run(tmp_path, fabric, "1:exit:stop", exit_code=1)  # what they were to do is not done

    (found,) = fenced(report)
    assert found["rank"] == 1
    assert "no heartbeat" in found["reason"]
    assert exit_codes(report) == {0: 0, 1: -9, 2: 0}


@pytest.mark.soak
def test_a_worker_that_hangs_while_it_loads_alone_on_its_node_is_ended_for_the_other_node(tmp_path):
    url = f"holdfast://127.0.0.1:{free_port()}"
    launchers = [
        subprocess.Popen(
            [
                *(sys.executable, "-m", "holdfast", "run", "--fabric", "gloo", "-n", "1", "--nnodes", "2"),
                *("--node-rank", str(node), "--rdzv", url, "--hang-timeout", str(HANG_S)),
                *(
                    "--no-page",
                    "--report",
                    tmp_path / str(node),
                    SCRIPT,
                    "--notes",
                    tmp_path,
                    "--freeze",
                    "1:start:sleep",
                ),
            ],
            env=clean_env(),
        )
        for node in range(2)
    ]

    assert [launcher.wait(timeout=220) for launcher in launchers] == [0, 0]

    assert (tmp_path / "frozen-1-start").exists(), "it has frozen there"
    events = [json.loads(line) for line in (tmp_path / "1" / "events.jsonl").read_text().splitlines()]
    assert [event["rank"] for event in events if event["event"] == "WorkerFenced"] == [1]
    assert {event["rank"]: event["exit_code"] for event in events if event["event"] == "WorkerEnded"} == {0: 0, 1: -9}


def test_every_phase_of_a_worker_is_frozen_here_or_above():
    """The checks of a node: test_launch_node_health.py. The others: test_frozen.py."""
    start = {Phase.PROCESS_START, Phase.FORK, Phase.SILENT_IMPORT}
    groups = {Phase.LAUNCHERS, Phase.TORCH_GROUP, Phase.MPI_GROUP, Phase.JOINING}
    ends = {Phase.STALL, Phase.FINALIZING, Phase.STOPPING, Phase.TEAR_DOWN}
    assert FROZEN.keys() | {Phase.NODE_CHECK} | start | groups | ends == set(Phase)
