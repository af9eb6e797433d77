"""Whether the faults of a node can be made to happen, before anything is started; and what a worker asks for."""

import threading

import planned
import pytest

from holdfast.config import Settings
from holdfast.errors import ConfigError
from holdfast.faults.process import ask_launcher
from holdfast.launch.fleet.node_faults import check_node_faults
from holdfast.launch.job import Job
from holdfast.launch.job_rules import check_plan
from holdfast.records.paths import strike_path

CUT = "partition:node=1,step=2"


@pytest.fixture
def make_job(tmp_path):
    def make(*specs, rdzv="holdfast://127.0.0.1:29400", nnodes=2, node=1, fabric="gloo"):
        settings = Settings(fabric=fabric, workers=2, faults=planned.faults(*specs))
        return Job(script=tmp_path / "train.py", settings=settings, nnodes=nnodes, node_rank=node, rdzv=rdzv)

    return make


@pytest.mark.parametrize(
    "url", ["holdfast://127.0.0.1:29400", "holdfast://localhost:29400", "etcd://me@127.0.0.1:2379,localhost:2379/job"]
)
@pytest.mark.parametrize("node", [0, 1])
def test_where_all_nodes_are_one_machine_there_is_no_network_to_cut(make_job, url, node):
    with pytest.raises(ConfigError) as refused:
        check_node_faults(make_job(CUT, rdzv=url, node=node))

    assert str(refused.value) == (
        f"--inject {CUT}: the rendezvous {url} is on this machine's loopback interface: there is no network to disable"
    )
    check_node_faults(make_job("nodeloss:node=1,step=2", "kill:rank=1,step=2", rdzv=url, node=node))


def test_a_network_that_nobody_knows_cannot_be_cut(make_job):
    with pytest.raises(ConfigError, match=r"the network that leads to nowhere.invalid:29400 \(--rdzv\) is unknown: "):
        check_node_faults(make_job(CUT, rdzv="holdfast://nowhere.invalid:29400"))


def test_who_cuts_needs_the_command_for_it_and_the_others_do_not(make_job, monkeypatch, tmp_path):
    monkeypatch.setattr("holdfast.launch.fleet.node_faults._own_addresses", lambda job, fault: ["10.1.2.3"])
    monkeypatch.setenv("PATH", str(tmp_path))

    check_node_faults(make_job(CUT, node=0))
    with pytest.raises(ConfigError, match=r"needs the command ip \(of iproute2\), which is not on PATH"):
        check_node_faults(make_job(CUT, node=1))


@pytest.mark.parametrize("fabric", ["ulfm", "virtual", "gloo"])
def test_a_job_with_one_launcher_has_no_nodes_to_lose(make_job, fabric):
    job = make_job("nodeloss:node=0,step=2", nnodes=1, node=0, rdzv="", fabric=fabric)

    with pytest.raises(ConfigError, match="it needs --fabric gloo and --nnodes 2 or more"):
        check_plan(job)


def test_a_worker_waits_until_its_launcher_has_struck(tmp_path):
    request = strike_path(tmp_path, 3)
    worker = threading.Thread(target=ask_launcher, args=(request, 17), daemon=True)
    worker.start()
    while not request.exists():
        assert worker.is_alive()
    assert request.read_text() == "17"

    worker.join(0.05)
    assert worker.is_alive()
    request.unlink()
    worker.join(20.0)
    assert not worker.is_alive()
