"""Workers of another kind, whose bits would differ: refused where bits are promised, or said what they cost."""

from __future__ import annotations

from pathlib import Path

import pytest
from jobs import exit_codes, run_report
from train_kinds import STEPS, train

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(300)]

SCRIPT = Path(__file__).parents[1] / "support" / "train_kinds.py"
OTHER = "ATEN_CPU_CAPABILITY=default"


def test_a_job_that_promises_bits_does_not_begin_with_workers_of_two_kinds(tmp_path):
    report = run_report(tmp_path, "-n", 3, "--fabric", "gloo", SCRIPT, 1, OTHER, exit_code=2)

    assert "worker 1 has CPU capability DEFAULT, the others " in report["error"]["message"]
    assert (
        "set ATEN_CPU_CAPABILITY=default everywhere, or allow it with --no-require-same-platform"
        in report["error"]["message"]
    )
    assert report["steps"] == 0


@pytest.mark.soak  # its parts are in tests/unit/test_platform.py
def test_with_any_platform_it_ends_and_says_what_was_given_up(tmp_path):
    report = run_report(tmp_path, "-n", 2, "--no-require-same-platform", SCRIPT, 1, "OMP_NUM_THREADS=2")

    assert (report["outcome"], report["steps"]) == ("done", STEPS)
    assert report["platforms"]["given_up"] == "not exact: worker 1 has number of threads 2, worker 0 1"
    assert [group["ranks"] for group in report["platforms"]["of"]] == [[0], [1]]
    assert report["_stdout"].count("holdfast: worker 0: not exact: worker 1 has number of threads 2") == 1
    assert "platform not exact: " in report["_stdout"]


def test_a_new_worker_of_another_kind_is_refused_and_the_others_end_with_the_undisturbed_bits(tmp_path):
    report = run_report(
        tmp_path, "-n", 3, "--fabric", "gloo", "--respawn", "--inject", "kill:rank=1,step=1", SCRIPT, 3, OTHER, "--wait"
    )
    undisturbed = train(fabric="virtual", workers=3)._job.loops.finished[0]

    assert exit_codes(report) == {0: 0, 1: -9, 2: 0, 3: 0}  # and nobody was started in the place of worker 3
    assert (report["outcome"], report["steps"], report["joined"]) == ("done", STEPS, [])
    (refused,) = report["platforms"]["refused"]
    assert refused["rank"] == 3
    assert refused["why"].startswith("worker 3 has CPU capability DEFAULT, the others ")
    assert report["replicas"]["identical"] is True
    assert report["replicas"]["state_sha256"] == undisturbed.state_sha256
    assert report["platforms"]["given_up"] == ""
