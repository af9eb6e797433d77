"""One brain: virtual workers and the simulator's model of the protocol decide the same for the same failures."""

import functools
import json

import pytest
from decided_again import replay
from oracle import simulator
from train_reference import train

from holdfast.comm import VirtualCommunicator
from holdfast.errors import ConfigError
from holdfast.faults.plan import FaultPlan, parse
from holdfast.records.encoding import record_from_dict
from holdfast.records.types import Recovered
from holdfast_lab.simulate import Cluster, Costs, FailureTrace, Scenario, SimulatedJob
from holdfast_lab.simulate.reading import OutageSpan

WORKERS, EVERY = 5, 3
# Who dies in which step, and how far into it: a step computes for 0.5 s, and then its two buckets and the closing sum follow.
SCRIPT = [
    ("kill:rank=1,step=3,phase=backward", 3, 0.25),
    ("kill:rank=3,step=5,phase=allreduce,bucket=0", 5, 0.7),
    ("kill:rank=0,step=8,phase=allreduce,bucket=1", 8, 0.9),
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Let virtual workers train under the script; return the records. Each strategy trains once."""

    @functools.cache
    def records(strategy):
        folder = tmp_path_factory.mktemp(strategy)
        plan = FaultPlan(tuple(parse(fault) for fault, _, _ in SCRIPT)).to_json()
        places = {"run_dir": str(folder), "checkpoint_dir": str(folder / "saved"), "checkpoint_every": EVERY}
        train("mlp", "sgd", comm=VirtualCommunicator(WORKERS), strategy=strategy, faults=plan, **places)
        lines = (folder / "records-0.jsonl").read_text().splitlines()
        return [record_from_dict(json.loads(line)) for line in lines]

    return records


def scripted(strategy, steps, spells):
    trace = FailureTrace(tuple(spells), WORKERS, 1e4, "worker", replayed=True)
    costs = Costs(slice_s=0.5, sum_s=0.5, detect_s=0.01, regroup_s=0.02, load_s=0.1, rebuild_s=0.1, spawn_s=1e4)
    job = SimulatedJob(
        strategy=strategy, steps=steps, save_every=EVERY, buckets=2, horizon_s=1e3, slices=WORKERS, split="even"
    )
    return simulator.simulate(Scenario(Cluster(workers=WORKERS), job, costs, trace))


@pytest.mark.parametrize("strategy", ["rollback", "forward", "restart"])
def test_the_oracle_decides_as_virtual_workers_do(trained, strategy):
    records = trained(strategy)

    spells = []
    for rank, (_, step, into_s) in enumerate(SCRIPT):
        paces = WORKERS / (WORKERS - rank) * 0.5
        begins_s = scripted(strategy, step, spells).total_ns / 1e9  # when the step is begun, with the deaths before it
        at_s = begins_s + (into_s / 0.5 * paces if into_s < 0.5 else paces + into_s - 0.5)
        spells.append(OutageSpan(rank, at_s, at_s))
    simulated = scripted(strategy, 11, spells)
    said = {record.generation: record for record in records if isinstance(record, Recovered)}
    assert len(said) == len(SCRIPT)
    assert [(step, decision, orders) for step, decision, orders in simulated.decisions] == [
        (record.step, record.decision, dict(record.orders)) for record in said.values()
    ]


@pytest.mark.parametrize("strategy", ["rollback", "forward", "restart"])
def test_a_run_is_decided_again_from_its_records(trained, strategy):
    replayed = replay(trained(strategy))

    assert [one.lost for one in replayed] == [(1,), (3,), (0,)]
    assert [one.again for one in replayed] == [
        {"rollback": "redo", "forward": "continue", "restart": "load"}[strategy]
    ] * 3
    assert all(one.agrees and one.orders_were == one.orders_again for one in replayed)


def test_another_strategy_would_have_decided_otherwise(trained):
    changed = [
        record_from_dict(vars_of(record) | {"strategy": "restart"}) if "strategy" in vars_of(record) else record
        for record in trained("rollback")
    ]

    assert not any(one.agrees for one in replay(changed))


def vars_of(record):
    from holdfast.records.encoding import record_to_dict

    return record_to_dict(record)


def test_records_without_a_start_are_refused():
    lost = Recovered(t_s=1, rank=0, step=3, lost=(1,), survivors=(0,), decision="redo", redone_steps=1, generation=1)

    with pytest.raises(ConfigError, match="the records have no start of a worker"):
        replay([lost])
