"""A local rehearsal of deploy/kubernetes/indexed-job.yaml: pods are killed and drained, and come back by their index."""

from __future__ import annotations

import json
import os
import signal

import pytest
from clusters import is_connected, until
from indexed_job import KILLED, VOLUME, IndexedJob, go_on, stopped
from jobs import ROOT, run_report
from netns import make_hosts

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(400)]

EXAMPLE = ROOT / "examples" / "01_survive_a_kill.py"
# Rank 0 is stopped twice, so that what the test does happens between the same steps on any machine.
STOPS = ("--inject=hang:rank=0,step=10", "--inject=hang:rank=0,step=20", "--hang-timeout=0", "--stall-timeout=600")


@pytest.fixture
def hosts():
    made = make_hosts(4, net="10.207.0")
    yield made
    made.remove()


@pytest.mark.parametrize("drained", [(), (2,)], ids=["killed", "killed-and-drained"])
def test_pods_come_back_by_their_index_and_no_bit_changes(hosts, tmp_path, drained):
    away, count = (1, *drained), 2 + len(drained)
    with IndexedJob(tmp_path, hosts, count, (EXAMPLE,), (*STOPS, "--node-timeout=4")) as job:
        at_rest = job.await_that(lambda: stopped(hosts.pids(1)), "rank 0 stops at step 10")
        assert job.newest(0).confinement() == (0, False), "as the manifest says"
        os.kill(job.newest(1).launcher, signal.SIGKILL)
        for index in drained:
            os.kill(job.newest(index).launcher, signal.SIGTERM)
            said = job.newest(index).output
            job.await_that(lambda said=said: "the workers of this node leave" in said(), "the drained pod leaves")
        go_on(at_rest)
        job.await_that(lambda: all(job.exit_codes(index)[0] for index in away), "the pods have ended")
        again = job.await_that(lambda: stopped(hosts.pids(1)), "rank 0 stops at step 20")
        job.await_that(lambda: all(is_back(job.newest(index)) for index in away), "the pods are back")
        go_on(again)
        job.await_that(job.poll, "all pods have ended")

        assert job.state == "complete", job.said()
        ended = [job.exit_codes(index) for index in range(count)]
        assert ended == [[0], [KILLED, 0], *([4, 0] for _ in drained)], job.said()
        report = json.loads((job.newest(0).place / "report" / "report.json").read_text())
        lines = (job.newest(0).place / "report" / "events.jsonl").read_text().splitlines()

    joined = {rank for line in lines for rank in json.loads(line).get("joined", ())}
    plain = run_report(tmp_path / "plain", "--fabric", "virtual", "-n", count, "--order", "tree", EXAMPLE)
    assert report["replicas"]["state_sha256"] == plain["replicas"]["state_sha256"]
    assert report["replicas"]["identical"] is True
    assert joined == set(range(count, count + len(away))), "each comes back as a new worker"
    for index in away:
        assert f"--node-rank {index} (JOB_COMPLETION_INDEX={index})" in job.newest(index).output()


def is_back(pod):
    """Whether the worker of a pod that was started again waits to join."""
    return pod.number == 1 and any(map(is_connected, pod.place.glob("tmp/holdfast-*/beacon-[2-4]")))


def test_a_failure_that_would_come_again_is_not_tried_again(hosts, tmp_path):
    (tmp_path / "wrong.py").write_text("raise ValueError('a bug')\n")
    with IndexedJob(tmp_path, hosts, 2, (VOLUME / "wrong.py",)) as job:
        until(job.poll, "both pods have ended", every_s=0.2)

        assert job.state == "failed"
        assert [job.exit_codes(index) for index in range(2)] == [[93], [93]], job.said()
