"""Newcomers take the seats of ranks that were really killed, in a DDP script that owns its loop."""

import json

import pytest
from jobs import ROOT, assert_landed, exit_codes, holdfast, run_report
from train_seats import EPOCHS, STEPS_EPOCH, samples_of

pytestmark = pytest.mark.chaos

SCRIPT = ROOT / "tests" / "support" / "train_seats.py"
STEPS = EPOCHS * STEPS_EPOCH
JOB_S = 150
RESPAWN = ("gloo", "--respawn")
SPARE = ("--spares", 1)


def train(folder, *options, kills=(1,), newcomers=1, strike=""):
    """Run a job of three ranks of which some are killed in step 3; return its report, and what each rank noted."""
    noted = folder / "noted"
    noted.mkdir()
    faults = [word for rank in kills for word in ("--inject", f"kill:rank={rank},step=3,phase=allreduce")]
    more = ("--strike", strike) if strike else ()
    report = run_report(
        folder,
        "-n", 3, "--fabric", *options, *faults, SCRIPT, noted, "--newcomers", newcomers, *more,
        timeout=JOB_S,
    )  # fmt: skip
    ended = [json.loads(path.read_text()) for path in noted.glob("ended-*.json")]
    return report, {each["seat"]: each for each in ended}


def assert_all_trained(ended, *, new, old):
    """All seats are taken, by newcomers where said; each trained its share, and all ended with equal weights."""
    assert {seat: each["is_new"] for seat, each in ended.items()} == {s: s in new for s in (*new, *old)}
    assert sorted(ended) == [0, 1, 2]
    assert {tuple(each["alive"]) for each in ended.values()} == {(0, 1, 2)}
    assert {each["size"] for each in ended.values()} == {3}
    assert len({each["weights"] for each in ended.values()}) == 1
    assert len({tuple(each["rate"]) for each in ended.values()}) == 1
    for seat, each in ended.items():
        steps = list(map(int, each["steps"]))
        assert steps == list(range(steps[0], STEPS)), "a step is missing, or was made twice"
        assert {int(step): drawn for step, drawn in each["steps"].items()} == {s: samples_of(seat, s) for s in steps}
        assert (steps[0] > 3) == (seat in new)


def seats_taken(report):
    return {(taken["worker"], taken["seat"]) for taken in report["seats_taken"]}


@pytest.mark.parametrize(
    ("options", "killed"), [(RESPAWN, 1), (("ulfm", *SPARE), 0)], ids=["gloo-respawn", "ulfm-spare"]
)
def test_a_newcomer_takes_the_seat_of_a_killed_rank(tmp_path, options, killed):
    report, ended = train(tmp_path, *options, kills=(killed,))

    assert_landed(report, killed)
    assert exit_codes(report) == {0: 0, 1: 0, 2: 0, 3: 0} | {killed: -9}
    assert_all_trained(ended, new=(killed,), old={0, 1, 2} - {killed})
    assert seats_taken(report) == {(3, killed)}
    assert report["steps"] == STEPS
    (taken,) = report["seats_taken"]
    assert taken["step"] == min(map(int, ended[killed]["steps"]))
    assert f"rank 3 takes the place of rank {killed} from step {taken['step']} on\n" in report["_stderr"]


def test_without_newcomers_the_seat_stays_empty(tmp_path):
    report, ended = train(tmp_path, "gloo", newcomers=0)

    assert_landed(report, 1)
    assert sorted(ended) == [0, 2]
    assert {tuple(each["alive"]) for each in ended.values()} == {(0, 2)}
    assert report["seats_taken"] == []


def test_two_newcomers_take_two_seats(tmp_path):
    report, ended = train(tmp_path, "gloo", "--spares", 2, kills=(0, 1), newcomers=2)

    assert_landed(report, 0, 1)
    assert_all_trained(ended, new=(0, 1), old=(2,))
    assert seats_taken(report) in ({(3, 0), (4, 1)}, {(3, 1), (4, 0)})


def test_a_newcomer_that_dies_before_it_registers_is_replaced(tmp_path):
    report, ended = train(tmp_path, *RESPAWN, strike="newcomer")

    assert exit_codes(report) == {0: 0, 1: -9, 2: 0, 3: -9, 4: 0}
    assert_all_trained(ended, new=(1,), old=(0, 2))
    assert seats_taken(report) == {(4, 1)}


def test_a_death_of_the_rank_that_gives_the_state_is_survived(tmp_path):
    report, ended = train(tmp_path, *RESPAWN, strike="giver")

    assert_landed(report, 0, 1)
    assert {1, 2} <= ended.keys()
    assert len({each["weights"] for each in ended.values()}) == 1
    assert (3, 1) in seats_taken(report)
    assert sorted(map(int, ended[2]["steps"])) == list(range(STEPS))


def test_training_that_ends_before_a_newcomer_is_ready_does_not_wait_for_it(tmp_path):
    report, ended = train(tmp_path, "ulfm", *SPARE, newcomers=0, strike="late")

    assert "[3] holdfast: rank 3 ends: the others ended before it could take a seat\n" in report["_stdout"]
    assert exit_codes(report) == {0: 0, 1: -9, 2: 0, 3: 0}
    assert sorted(ended) == [0, 2]
    assert report["seats_taken"] == []
    assert report["steps"] == STEPS


UNREGISTERED = """
import os, pathlib, sys, time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
is_new = int(os.environ["RANK"]) >= int(os.environ["WORLD_SIZE"])
dist.init_process_group("holdfast")
is_there = pathlib.Path(sys.argv[1])
model = DistributedDataParallel(torch.nn.Linear(4, 4))
if is_new:
    is_there.touch()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
left, end = 15, time.monotonic() + 60
while left and time.monotonic() < end:
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    time.sleep(0.1)
    left -= is_there.exists()
print("rank", dist.get_rank(), "ends")
"""


def test_a_script_that_does_not_register_goes_on_without_the_newcomer_which_says_why(tmp_path):
    script, is_there = tmp_path / "unregistered.py", tmp_path / "there"
    script.write_text(UNREGISTERED)

    report = run_report(
        tmp_path,
        "-n", 2, "--fabric", *RESPAWN, "--inject", "kill:rank=1,step=1,phase=backward", script, is_there,
        timeout=JOB_S,
    )  # fmt: skip

    assert exit_codes(report) == {0: 0, 1: -9, 2: 0}
    said = [line for line in (report["_stdout"] + report["_stderr"]).splitlines() if line.startswith("[2]")]
    assert said == [
        "[2] holdfast: rank 2 cannot take the seat of a failed rank, because the script does not call"
        " holdfast.distributed.register(model=..., optimizer=..., position=...) before its first step"
    ]
    assert report["seats_taken"] == []


BOTH = """
import sys, time, torch, holdfast
import torch.distributed as dist
if sys.argv[1] == "group-first":
    dist.init_process_group(sys.argv[2])
model = torch.nn.Linear(3, 1)
holdfast.Session(model, torch.optim.SGD(model.parameters(), lr=0.1))
if not dist.is_initialized():
    dist.init_process_group(sys.argv[2])
time.sleep(60)  # the spare, which may be the last to begin, ends the job
"""


@pytest.mark.parametrize(
    ("args", "why"),
    [
        (
            ("group-first", "holdfast"),
            '--spares cannot be used, because the script has a session and init_process_group("holdfast")',
        ),
        (("session-first", "holdfast"), "a group of a script with a session takes no spares"),
        (("group-first", "gloo"), "a group of the backend gloo takes no spares"),
    ],
    ids=["group-first", "session-first", "gloo"],
)
def test_spares_of_a_session_have_no_rank_in_a_group(tmp_path, args, why):
    script = tmp_path / "both.py"
    script.write_text(BOTH)

    done = holdfast("run", "-n", 2, "--fabric", "gloo", *SPARE, script, *args, timeout=JOB_S)

    assert done.returncode == 2
    assert f"error: {why}: start without" in done.stderr
