"""Workers of the gloo fabric on several hosts: the store listens on the network, and Gloo connects them over it."""

import subprocess
from pathlib import Path

import gloo
import pytest
import reference
from exact import SCRIPT
from host_sums import expected, sha256
from jobs import clean_env
from netns import make_hosts
from train_reference import train

from holdfast.comm.allreduce.adding import groups
from holdfast.faults.plan import FaultPlan, parse
from holdfast.records.files import read_run
from holdfast.records.types import Finished, WorkerEnded

pytestmark = pytest.mark.chaos

WORKER = Path(__file__).with_name("hosts_worker.py")


@pytest.fixture(scope="module")
def hosts():
    made = make_hosts(4, net="10.203.0")
    yield made
    made.remove()


def run(launcher, before=(), **env):
    """Run what starts workers; return what each of them said, by rank, a list of lines, and all that was said."""
    done = subprocess.run(
        [*before, *launcher], env=clean_env(**env), capture_output=True, text=True, timeout=100, check=False
    )
    said = {}
    for line in done.stdout.splitlines():
        if line.startswith("says "):
            _, rank, *words = line.split()
            said.setdefault(int(rank), []).append(words)
    return said, done.stdout + done.stderr


def run_on(hosts, workers, *command, **env):
    """Start so many workers on each host; the store is on the first one."""
    places = [number for number, count in enumerate(workers, 1) for _ in range(count)]
    commands = [[*hosts.inside(place), *gloo.command(*command)] for place in places]
    return run(gloo.launcher(commands, hosts.address(1)), hosts.inside(1), **env)


def ended(run_dir):
    return {r.rank: r.exit_code for r in read_run(run_dir) if isinstance(r, WorkerEnded)}


def test_the_contract_holds_between_hosts_and_every_bit_is_that_of_one_process(hosts, tmp_path):
    victims = (3, 1)

    said, output = run_on(hosts, (2, 2), WORKER, "contract", *victims, HOLDFAST_RUN_DIR=str(tmp_path))

    assert sorted(said) == [0, 2], output
    state = {order: sha256(expected(order)) for order in ("fold", "tree")}
    assert state["fold"] != state["tree"], "the order shows"
    for lines in said.values():
        assert [line[:3] for line in lines] == [
            ["fold", "AllToAllReduce", state["fold"]],
            ["tree", "HierarchicalReduce", state["tree"]],
        ]
    assert ended(tmp_path) == {0: 0, 1: -9, 2: 0, 3: -9}


def test_a_worker_that_dies_anywhere_in_a_sum_leaves_the_others_going_on_with_right_sums(hosts, tmp_path):
    plan = {1: 3, 2: 4, 4: 1}  # who dies at which of the points of a sum
    words = [f"{rank}:{at}" for rank, at in plan.items()]

    said, output = run_on(hosts, (2, 2, 2), WORKER, "deaths", *words, HOLDFAST_RUN_DIR=str(tmp_path))

    survivors = {rank: lines for rank, lines in said.items() if rank not in plan}
    assert sorted(survivors) == [0, 3, 5], output
    for lines in survivors.values():
        assert lines == [["without", str(victim), "HierarchicalReduce", "True", "failed"] for victim in plan], output
    assert ended(tmp_path) == {rank: -9 if rank in plan else 0 for rank in range(6)}


def sends(of_process):
    """What each host sends for the sum of ``hosts_worker.py``, in vectors, given the host of each process."""
    hosts = max(of_process) + 1
    owners = {n: of_process[n * len(of_process) // 7] for n in range(7)}
    held = [sum(owners[group[0]] == host for group in groups(owners)) for host in range(hosts)]
    return [(count + 1) * (hosts - 1) / hosts for count in held]


@pytest.mark.parametrize(
    ("workers", "victim"),
    [((1, 1), -1), ((1, 1, 1, 1), -1), ((2, 1, 1), 0)],
    ids=["2-hosts", "4-hosts", "the-first-worker-less"],
)
def test_no_byte_more_leaves_a_host_than_its_groups_and_results_have(hosts, workers, victim):
    said, output = run_on(hosts, workers, WORKER, "traffic", "tree", 10, victim)

    survivors = [rank for rank in range(sum(workers)) if rank != victim]
    assert sorted(said) == survivors, output
    assert {said[rank][0][0] for rank in survivors} == {"HierarchicalReduce"}
    found = [float(said[rank][0][1]) for rank in survivors]
    for vectors, least in zip(found, sends(range(len(survivors))), strict=True):
        assert least < vectors < 1.1 * least, f"in vectors a sum and host: {found}"


def test_training_between_hosts_ends_with_the_bits_of_virtual_workers_though_a_worker_dies(hosts, tmp_path):
    faults = FaultPlan((parse("kill:rank=2,step=4,phase=allreduce,bucket=0"),)).to_json()
    settings = {"FAULTS": faults, "RUN_DIR": str(tmp_path)}
    env = {f"HOLDFAST_{name}": value for name, value in settings.items()}

    _, output = run_on(hosts, (2, 1, 1), SCRIPT, "mlp", "adam", **env)

    _, state = train("mlp", "adam", workers=4, order="tree")
    assert f"state {state}" in output
    assert state != reference.train("mlp", "adam"), "the order shows"
    assert sorted(r.rank for r in read_run(tmp_path) if isinstance(r, Finished)) == [0, 1, 3]
    assert ended(tmp_path) == {0: 0, 1: 0, 2: -9, 3: 0}
