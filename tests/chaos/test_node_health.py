"""An unfit node stays out of the job; the others train without it, and it joins once it is fit."""

import pytest
from clusters import Cluster, assert_complete, of_kind

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(600)]


def test_an_unfit_node_stays_out_and_the_others_train_with_the_same_bits(tmp_path):
    with Cluster(tmp_path, 3, "--node-timeout", "4", pause=0.02, workers=1) as cluster:
        for node in (0, 1):
            cluster.launchers[node] = cluster.start(node)
        cluster.launchers[2] = cluster.start(2, "--health-check", "disk=0.001ms")
        codes = cluster.wait()

        assert codes == {0: 0, 1: 0, 2: 1}, cluster.said()
        said = cluster.output(2).strip().splitlines()[-1]
        assert said.startswith("error: node 2 stays out of the job, because it is unfit: disk "), said
        assert "a synced write of 1 MiB took" in said
        report = cluster.report(cluster.launchers[0])
        assert {event["rank"] for event in of_kind(report, "RunStarted")} == {0, 1}
        assert_complete(report)


def test_an_unfit_single_node_starts_nothing(tmp_path):
    with Cluster(tmp_path, 1, "--health-check", "memory=900000GB", workers=2) as cluster:
        cluster.launchers[0] = cluster.start(0)

        assert cluster.wait() == {0: 1}
        assert "memory: " in cluster.output(0)
        assert "committed" not in cluster.output(0)
