"""A job whose membership is kept in etcd: members of etcd and workers die."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from etcd import Cluster
from jobs import ROOT, assert_landed, run_report

TRAIN = (ROOT / "src" / "holdfast_lab" / "workloads" / "train.py", "--epochs", "3")
WAIT_S = 120


@pytest.mark.chaos
def test_a_job_goes_on_with_the_same_bits_when_a_member_of_etcd_and_a_worker_are_killed(tmp_path):
    run = ("--fabric", "gloo", "-n", "3")
    undisturbed = run_report(tmp_path / "undisturbed", *run, *TRAIN)

    with Cluster(tmp_path, 3) as cluster, ThreadPoolExecutor(1) as pool:
        faults = ("--rdzv", cluster.url("job"), "--inject", "kill:rank=1,step=25")
        running = pool.submit(run_report, tmp_path / "disturbed", *run, *faults, *TRAIN)
        _await(lambda: any("/g/0/" in key for key in cluster.keys("holdfast/job/")), running)
        assert cluster.kill(0) == -9
        report = running.result(WAIT_S)

    assert_landed(report, 1)
    assert report["replicas"] == undisturbed["replicas"]
    assert report["samples"]["lost"] == report["samples"]["repeated"] == 0


def _await(ready, running):
    ends_s = time.monotonic() + WAIT_S
    while not ready():
        assert not running.done()
        assert time.monotonic() < ends_s
        time.sleep(0.02)
