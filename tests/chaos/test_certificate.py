"""The certificates of real jobs: compared, and checked by doing their steps again."""

import json
import shutil

import pytest
from jobs import ROOT, assert_landed, holdfast, run_report

from holdfast.cli import main
from holdfast.faults.kinds import OF_WORKERS
from holdfast.records.files import load_events
from holdfast.tools.certificate import CertifiedSteps

pytestmark = pytest.mark.chaos
REFERENCE = ROOT / "tests" / "support" / "train_reference.py"
SPLIT = ROOT / "tests" / "support" / "train_split.py"
FLIPPED = ROOT / "tests" / "support" / "train_flip.py"


@pytest.fixture(scope="module")
def quiet(tmp_path_factory):
    """The report folder of an undisturbed run, with checkpoints."""
    folder = tmp_path_factory.mktemp("quiet")
    saving = ("--checkpoint-dir", folder / "saved", "--checkpoint-every", 5)
    run_report(folder, "-n", 3, "--slices", 4, "--fabric", "virtual", "--no-page", *saving, REFERENCE, "cnn", "adam")
    return folder / "report"


def test_a_run_with_faults_is_the_same_to_the_last_step_and_a_replay_agrees(tmp_path, quiet):
    kills = ("--inject", "kill:rank=0,step=3,phase=allreduce,bucket=1", "--inject", "kill:rank=2,step=7")
    disturbed = run_report(
        tmp_path, "-n", 3, "--slices", 4, "--fabric", "gloo", "--respawn", "--no-page", *kills, REFERENCE, "cnn", "adam",
        "--pause", 0.1,
    )  # fmt: skip
    saved = sorted(path.name for path in quiet.parent.joinpath("saved").iterdir())
    done = holdfast("diff-runs", quiet, tmp_path / "report")
    again = holdfast("verify", quiet, "--from", 6, "--to", 8)

    assert_landed(disturbed, 0, 2)
    assert CertifiedSteps(load_events(tmp_path / "report"), "it").check_workers() == [], "newcomers, too"
    assert (done.returncode, done.stdout.splitlines()[-1]) == (
        0,
        f"identical to the last step (14 steps, sha256 {disturbed['replicas']['sha256']})",
    )
    assert (again.returncode, again.stdout.splitlines()[-1]) == (
        0,
        "verified steps 5 to 8, replayed from the checkpoint before step 5",
    )
    assert sorted(path.name for path in quiet.parent.joinpath("saved").iterdir()) == saved, "nothing was written there"


def test_a_bit_that_flipped_in_one_worker_does_not_come_out_again(tmp_path):
    """The links hold, because that is how it was; the replay computes what should have been."""
    flip = ("--guard", "off", "--inject", "flip:rank=1,step=9,target=weights,seed=3")
    run_report(tmp_path, "-n", 2, "--slices", 4, "--fabric", "gloo", "--no-page", *flip, FLIPPED, exit_code=1)

    done = holdfast("verify", tmp_path / "report", "--to", 12)

    assert done.returncode == 3, done.stderr
    assert "the hash chain of steps 0 to 27 is valid\nworker 1 had a state that differs from the records" in done.stdout
    assert "step 9 is not reproduced: its metrics; replayed from the beginning\n" in done.stdout


def test_of_a_split_model_too_a_replay_agrees_after_a_kill_and_not_after_a_flip(tmp_path):
    """What flips is in a mirror, with which nobody computes: no metric tells. Each fourth step hashes a window of stage 2."""
    kill = ("--inject", "kill:rank=1,step=3,phase=allreduce")
    flip = ("--guard", "off", "--inject", "flip:rank=3,step=7,target=weights,at=2.2.weight,bits=0")
    report = run_report(
        tmp_path, "-n", 4, "--fabric", "gloo", "--no-page", *kill, *flip, SPLIT, "pipeline", exit_code=1
    )

    done = holdfast("verify", tmp_path / "report")

    assert_landed(report, 1)
    assert done.returncode == 3, done.stderr
    assert (
        "the hash chain of steps 0 to 13 is valid\nbefore step 14 workers 2, 3, which hold part 2, had different"
        in done.stdout
    )
    assert "step 10 is not reproduced: the state before it; replayed from the beginning\n" in done.stdout
    assert "it was last correct before step 6, and was altered in between" in done.stdout
    assert "\n  before step 14 worker 3 had other values in 2.2.weight\n" in done.stdout


EXAMPLE = ROOT / "examples" / "01_survive_a_kill.py"
TAKEN = (
    "kill:rank=1,step=10",
    "kill:rank=0,step=22,phase=allreduce",
    "oom:rank=3,step=35,phase=backward",
    "segfault:rank=2,step=48",
    "kill:rank=4,step=60,phase=optimizer",
    "hang:rank=5,step=72",
    "spin:rank=6,step=84",
    "leave:rank=7,step=96",
    "kill:rank=8,step=108,phase=allreduce,bucket=0",
    "deadlock:rank=9,step=119",
    "gil:rank=10,step=130",
)
"""Eleven faults that each take a worker, of every kind that does; as docs/explanation/exactness.md has them."""
SLOW = "slow:rank=11,step=20,seconds=0.5"


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_eleven_faults_that_leave_one_worker_of_twelve_change_nothing_up_to_the_last_step(tmp_path):
    job = ("-n", 12, "--fabric", "gloo", "--hang-timeout", 4, "--no-page")
    faults = [word for spec in (*TAKEN, SLOW) for word in ("--inject", spec)]
    quiet, loud, wrong = (tmp_path / name for name in ("quiet", "loud", "wrong"))
    flip = ("--guard", "off", "--inject", "flip:rank=0,step=40,target=weights,bits=30,seed=1")
    run_report(quiet, "-n", 12, "--fabric", "virtual", "--no-page", EXAMPLE, timeout=300)
    run_report(wrong, "-n", 12, "--fabric", "virtual", "--no-page", *flip, EXAMPLE, timeout=300, exit_code=1)

    report = run_report(loud, *job, *faults, EXAMPLE, timeout=500)
    same = holdfast("diff-runs", quiet / "report", loud / "report")
    again = holdfast("verify", loud / "report")
    other = holdfast("diff-runs", quiet / "report", wrong / "report")

    fired = {event["rank"] for event in report["_events"] if event["event"] == "FaultFired"}
    assert fired == set(range(12)), "each landed"
    assert {kind.partition(":")[0] for kind in (*TAKEN, SLOW)} == set(OF_WORKERS), "of every kind"
    assert {event["rank"] for event in report["_events"] if event["event"] == "Finished"} == {11}
    assert report["samples"]["lost"] == report["samples"]["repeated"] == 0
    assert (same.returncode, same.stdout.splitlines()[-1]) == (
        0,
        f"identical to the last step (144 steps, sha256 {report['replicas']['sha256']})",
    )
    assert (again.returncode, again.stdout.splitlines()[-1]) == (
        0,
        "verified steps 0 to 143, and the final state, replayed from the beginning",
    )
    assert other.returncode == 1, "a bit that flips is told from none"
    assert "identical to step 39" in other.stdout


@pytest.mark.parametrize(
    ("alter", "message"),
    [
        ({"script": ROOT / "examples" / "01_survive_a_kill.py"}, "was changed since the run"),
        ({"strategy": "forward"}, "forward continued without samples"),
        ({"job": None}, "its report does not describe the job"),
    ],
    ids=["script", "forward", "old"],
)
def test_what_cannot_be_done_again_is_refused_with_why(tmp_path, quiet, capsys, alter, message):
    folder = tmp_path / "report"
    shutil.copytree(quiet, folder)
    report = json.loads((folder / "report.json").read_text())
    if "script" in alter:
        report["job"]["path"] = str(alter["script"])
    elif "strategy" in alter:
        report["lost"] = [{"step": 3, "epoch": 0, "ids": [1], "buckets": [0]}]
    else:
        report |= alter
    (folder / "report.json").write_text(json.dumps(report))

    with pytest.raises(SystemExit) as ended:
        main(["verify", str(folder)])

    said = capsys.readouterr().err
    assert (ended.value.code, message in said, said.count("\n")) == (2, True, 1), said
