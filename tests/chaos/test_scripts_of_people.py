"""A DDP script as people write it, whose ranks are killed from outside wherever a rank can be.

Exit code 0 means that the model is there, with the weights of the survivors, and that the log is complete and right. Where
something is missing, the exit code is 1 and the last line says what and why.
"""

import hashlib
import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from jobs import ROOT, clean_env, exit_codes, of_kind, read_report
from train_as_people_do import EPOCHS

pytestmark = pytest.mark.chaos

SCRIPT = ROOT / "tests" / "support" / "train_as_people_do.py"
JOB_S = 150
RANKS = 3
MISSING = 'what the script does under "rank == 0" (saving, logging)'


class Trained:
    """A job of the script that has ended, and what it left behind."""

    def __init__(self, folder, *words, strike=""):
        folder.mkdir()
        command = [sys.executable, "-m", "holdfast", "run", "-n", RANKS, "--fabric", "gloo", "--no-page", "--report"]
        more = ["--strike", strike] if strike else []
        job = subprocess.Popen(
            [*map(str, [*command, folder / "report", SCRIPT, folder, *words, *more])],
            env=clean_env(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        if strike:
            _kill_where_it_says(folder / "here", job)
        self.out, self.err = job.communicate(timeout=JOB_S)
        self.exit_code = job.returncode
        self.folder = folder
        self.report = read_report(folder / "report")
        self.codes = exit_codes(self.report)
        self.ends = {path.name: path.read_text() for path in folder.glob("end-*")}

    @property
    def log(self):
        """Lines of the log, by epoch."""
        lines = map(json.loads, (self.folder / "log.jsonl").read_text().splitlines())
        return {line["epoch"]: line for line in lines}

    def own(self, rank):
        """What a rank has measured on its own part of the data, by epoch."""
        path = self.folder / f"own-{rank}.json"
        return {int(epoch): told for epoch, told in json.loads(path.read_text()).items()} if path.exists() else {}

    def saved(self):
        """The epoch of the saved model, and the hash of its weights."""
        found = torch.load(self.folder / "model.pt")
        weights = b"".join(tensor.numpy().tobytes() for tensor in found["model"].values())
        return found["epoch"], hashlib.sha256(weights).hexdigest()


def _kill_where_it_says(here, job):
    ends_s = time.monotonic() + JOB_S
    while not (here.exists() and here.read_text()):
        assert job.poll() is None, job.communicate()
        assert time.monotonic() < ends_s, "the rank did not come to its place"
        time.sleep(0.01)
    os.kill(int(here.read_text()), signal.SIGKILL)


def assert_complete(job, killed=()):
    """The model is that of the survivors' end, the log has each epoch, and its metrics are means over ranks alive."""
    survivors = sorted(set(range(RANKS)) - set(killed))
    assert sorted(job.ends) == [f"end-{rank}" for rank in survivors]
    assert len(set(job.ends.values())) == 1, "replicas differ"
    assert job.saved() == (EPOCHS - 1, next(iter(job.ends.values())))
    assert sorted(job.log) == list(range(EPOCHS))
    for epoch, line in job.log.items():
        for name in ("loss", "accuracy"):
            means = [
                sum(job.own(rank)[epoch][name] for rank in ranks) / len(ranks)
                for ranks in (range(RANKS), survivors)
                if all(name in job.own(rank).get(epoch, ()) for rank in ranks)
            ]
            assert any(abs(line[name] - mean) < 1e-5 for mean in means), (epoch, name, line, means)


@pytest.mark.parametrize("place", ["train", "save", "metric"])
def test_with_is_lead_the_next_rank_saves_and_logs_when_rank_0_dies(tmp_path, place):
    job = Trained(tmp_path / "job", "--lead", strike=f"0:{place}:1")

    assert job.codes == {0: -9, 1: 0, 2: 0}, job.err
    assert job.exit_code == 0, job.err
    if place == "save":  # the others had passed the line at which they might have saved this epoch
        assert sorted(job.log) == [0, 2, 3]
        assert job.saved() == (EPOCHS - 1, job.ends["end-1"])
    else:
        assert_complete(job, killed=[0])
        assert job.log[EPOCHS - 1]["by"] == 1
    assert MISSING not in job.err


def test_as_it_is_the_death_of_rank_0_is_said_at_once_and_the_job_is_not_done(tmp_path):
    job = Trained(tmp_path / "job", strike="0:train:1")

    assert job.codes == {0: -9, 1: 0, 2: 0}, job.err
    assert job.exit_code == 1, job.err
    assert job.saved()[0] == 0  # what it had saved is intact
    assert job.err.count(f"rank 0 is lost: {MISSING} no longer happens; use holdfast.distributed.is_lead()") == 1
    assert f"rank 0 was lost: {MISSING} has not happened since" in job.err.splitlines()[-1]
    assert (job.report["outcome"], job.report["workers"]["finished"]) == ("failed", 2)
    assert [e["rank"] for e in of_kind(job.report, "LeadLost")] == [1]


def test_the_death_of_another_rank_costs_neither_model_nor_log(tmp_path):
    job = Trained(tmp_path / "job", strike="2:save:1")

    assert job.codes == {0: 0, 1: 0, 2: -9}, job.err
    assert job.exit_code == 0, job.err
    assert_complete(job, killed=[2])


def test_a_lead_that_dies_while_it_saves_the_last_time_leaves_a_job_that_is_not_done(tmp_path):
    """The survivors have been told before that it would save."""
    job = Trained(tmp_path / "job", "--lead", strike=f"0:save:{EPOCHS - 1}")

    assert job.codes == {0: -9, 1: 0, 2: 0}, job.err
    assert job.exit_code == 1, job.err
    assert job.saved()[0] == EPOCHS - 2
    assert "what the script writes last may be missing" in job.err.splitlines()[-1]
