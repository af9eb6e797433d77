"""What is done about slow workers: real positions of workers that do not run, and what they and others are told."""

from __future__ import annotations

import signal
from pathlib import Path
from types import SimpleNamespace

import pytest

from holdfast.config import Settings
from holdfast.launch.health.monitor import HealthMonitor
from holdfast.launch.job import Job
from holdfast.launch.population import WorkerPopulation
from holdfast.records.beacon import BeaconPosition

SLOW = {1: 0.4, 2: 0.5}


def looked_for(stragglers, there, newcomers, settings):
    """Look where five workers are through 21 steps; return what was noted, who was told to leave, and who is planned."""
    job = Job(script=Path("s"), settings=Settings(workers=5, fabric="gloo", **settings), stragglers=stragglers)
    noted, told, births = [], [], WorkerPopulation(newcomers, 9)
    judge = SimpleNamespace(workers_alive=lambda: there)
    lookout = HealthMonitor(
        SimpleNamespace(job=job, state=judge, population=births, paths=SimpleNamespace(run_dir=Path())),
        SimpleNamespace(note=lambda record: noted.append((record.rank, record.policy))),
    )
    attempt = SimpleNamespace(send=lambda rank, number: told.append((rank, number)))
    for step in range(22):
        positions = {
            rank: BeaconPosition(
                beats=1, step=step, slice=0, phase="forward", pid=1, samples=(), compute_s=SLOW.get(rank, 0.1)
            )
            for rank in range(5)
        }
        lookout._check_stragglers(attempt, positions, float(step))
    return noted, told, births.due(99.0)


@pytest.mark.parametrize(("spares", "newcomers", "due"), [(1, 0, []), (0, 3, [9])])
def test_the_slowest_is_replaced_by_a_spare_or_a_newcomer_and_the_next_one_only_named(spares, newcomers, due):
    found = looked_for("replace", range(5 + spares), newcomers, {"spares": spares})

    assert found == ([(1, "warn"), (2, "replace")], [(2, signal.SIGTERM)], due)


@pytest.mark.parametrize("spares", [0, 1])
def test_where_nobody_is_left_to_take_the_place_a_slow_worker_stays(spares):
    found = looked_for("replace", range(5), 0, {"spares": spares})

    assert found == ([(1, "warn"), (2, "warn")], [], [])
