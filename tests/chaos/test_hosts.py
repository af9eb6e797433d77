"""Workers on several hosts under mpirun: memory is shared inside a host only, and what goes over the wire; see ``netns.py``."""

import subprocess
import sys
from pathlib import Path

import pytest
import reference
from host_sums import expected, sha256
from jobs import MPIRUN, ROOT, clean_env
from netns import make_hosts
from train_reference import train

from holdfast.faults.plan import FaultPlan, parse
from holdfast.records.files import read_run
from holdfast.records.types import Finished, WorkerEnded

pytestmark = pytest.mark.chaos

WORKER = Path(__file__).with_name("hosts_worker.py")


class Jobs:
    """Starts workers on hosts."""

    def __init__(self, made, agent):
        self.made = made
        self._agent = agent
        made.write_agent(agent)

    def run(self, workers, *command, timeout=100, **env):
        """Start ``holdfast.launch.supervise.worker COMMAND`` on so many workers a host; mpirun runs on the first one."""
        net = f"{self.made.net}.0/24"
        # With --oversubscribe Open MPI would put all workers on the first host. It takes the cores of these hosts for
        # different ones, and so does not see that there are too few: idle workers must be told to yield.
        where = ["--map-by", "slot:OVERSUBSCRIBE", "--bind-to", "none", "--mca", "mpi_yield_when_idle", "1"]
        where += ["-n", str(sum(workers))]
        where += ["--host", ",".join(f"{self.made.address(i)}:{n}" for i, n in enumerate(workers, 1))]
        nets = ["--prtemca", "prte_if_include", net, "--mca", "btl_tcp_if_include", net]
        agent = ["--prtemca", "plm_ssh_agent", str(self._agent)]
        mpirun = [word for word in MPIRUN if word != "--oversubscribe"]
        return subprocess.run(
            [
                *self.made.inside(1),
                *mpirun,
                *agent,
                *nets,
                *where,
                sys.executable,
                "-m",
                "holdfast.launch.supervise.worker",
                *map(str, command),
            ],
            env=clean_env(**env),
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    made = make_hosts(3)
    yield Jobs(made, tmp_path_factory.mktemp("hosts") / "agent.sh")
    made.remove()


def said(done):
    """What each worker reported, by rank, a list of lines."""
    found = {}
    for line in done.stdout.splitlines():
        if line.startswith("says "):
            _, rank, *words = line.split()
            found.setdefault(int(rank), []).append(words)
    assert found, done.stdout + done.stderr
    return found


@pytest.mark.parametrize(
    ("workers", "victims", "left"),
    [((2, 2), (3, 1), (0, 2)), ((2, 2), (0, 1), (2, 3))],
    ids=["a-worker-of-each", "a-whole-host"],
)
def test_the_contract_holds_between_hosts_and_every_bit_is_that_of_one_process(hosts, tmp_path, workers, victims, left):
    done = hosts.run(workers, WORKER, "contract", *victims, HOLDFAST_RUN_DIR=str(tmp_path))

    found = said(done)
    assert tuple(sorted(found)) == left, done.stdout + done.stderr
    state = {order: sha256(expected(order)) for order in ("fold", "tree")}
    still = left == (2, 3)  # both on the second host: there they share memory
    ways = {
        "fold": "SharedMemoryReduce" if still else "AllToAllReduce",
        "tree": "SharedMemoryReduce" if still else "HierarchicalReduce",
    }
    for lines in found.values():
        assert [line[:3] for line in lines] == [[order, ways[order], state[order]] for order in ways]
        assert [line[3] for line in lines] == [
            "in-place" if way != "AllToAllReduce" else "copied" for way in ways.values()
        ]
    assert state["fold"] != state["tree"], "the order shows"
    assert "slower" not in done.stderr, "to be on several hosts is nothing to warn of"
    ended = {record.rank: record.exit_code for record in read_run(tmp_path) if isinstance(record, WorkerEnded)}
    assert ended == {rank: -9 if rank in victims else 0 for rank in range(sum(workers))}


@pytest.mark.parametrize("plan", [("5:0", "2:1", "0:2"), ("0:4", "1:2", "2:3")], ids=["back", "front"])
def test_a_worker_that_dies_anywhere_in_a_sum_leaves_the_others_going_on_with_right_sums(hosts, plan):
    victims = [int(entry.split(":")[0]) for entry in plan]

    done = hosts.run((2, 2, 2), WORKER, "deaths", *plan)

    found = {rank: lines for rank, lines in said(done).items() if rank not in victims}
    assert len(found) == 3, done.stdout + done.stderr
    for lines in found.values():
        assert [line[:4] for line in lines] == [
            ["without", str(victim), "HierarchicalReduce", "True"] for victim in victims
        ]
    for i in range(len(plan)):
        assert {lines[i][4] for lines in found.values()} == {"failed"}, (
            "nobody's sum is whole without everybody's share"
        )


def test_each_chunk_crosses_once_from_host_to_host(hosts):
    """Two hosts of two workers: each sends half of the sum of its slices, and half of the result; in a fold one all of each."""
    tree, fold = (said(hosts.run((2, 2), WORKER, "traffic", order, 20)) for order in ("tree", "fold"))

    assert {lines[0][0] for lines in tree.values()} == {"HierarchicalReduce"}
    assert {lines[0][0] for lines in fold.values()} == {"ChainReduce"}
    assert set(tree[0][0][2:]) == {"sendrecv=80"}, "two rounds of barriers, sums, results"
    sent = {name: [float(lines[0][1]) for lines in found.values()] for name, found in (("tree", tree), ("fold", fold))}
    for name, vectors in sent.items():
        assert 1.0 < min(vectors) <= max(vectors) < 1.1, f"in vectors a sum and host, {name}: {sent}"


def test_training_between_hosts_ends_with_the_bits_of_virtual_workers_though_a_worker_dies(hosts, tmp_path):
    faults = FaultPlan((parse("kill:rank=2,step=4,phase=allreduce,bucket=0"),)).to_json()
    script = ROOT / "tests" / "support" / "train_reference.py"

    done = hosts.run((2, 2), script, "mlp", "adam", HOLDFAST_FAULTS=faults, HOLDFAST_RUN_DIR=str(tmp_path))

    _, state = train("mlp", "adam", workers=4, order="tree")
    assert f"state {state}" in done.stdout, done.stdout + done.stderr
    assert state != reference.train("mlp", "adam"), "the order shows"
    records = list(read_run(tmp_path))
    assert sorted(record.rank for record in records if isinstance(record, Finished)) == [0, 1, 3]
    assert {r.rank: r.exit_code for r in records if isinstance(r, WorkerEnded)} == {0: 0, 1: 0, 2: -9, 3: 0}
