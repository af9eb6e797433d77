"""The simulator and the records of the same run say the same of where its time went."""

import pytest

from holdfast.records.types import (
    CheckpointSaved,
    FailureSeen,
    FaultFired,
    JobRestarted,
    Recovered,
    RunStarted,
    StepCommitted,
)
from holdfast.summary.goodput import goodput_of
from holdfast_lab.simulate import Cluster, Costs, FailureTrace, Scenario, SimulatedJob, simulate
from holdfast_lab.simulate.outcome import PARTS
from holdfast_lab.simulate.reading import OutageSpan

STEP_S, BUCKET_S = 10.0, 2.0  # 6 s computing, and 4 s for two all-reduces: spares keep the pace when a worker dies
SAVE_S, DETECT_S, REGROUP_S, LOAD_S, REBUILD_S, RESTART_S = 5.0, 1.0, 2.0, 30.0, 20.0, 60.0
COSTS = Costs(
    slice_s=6, sum_s=4, detect_s=DETECT_S, regroup_s=REGROUP_S, save_s=SAVE_S, load_s=LOAD_S, restart_s=RESTART_S,
    rebuild_s=REBUILD_S, rejoin_s=3, spawn_s=1e5,
)  # fmt: skip
DEATH_S, BEGUN_S = 133.0, 125.0
"""Worker 0 dies between the all-reduces of step 12, which began at 125 s: ten steps, a checkpoint, two steps."""
START = {
    "fabric": "gloo", "seed": 0, "workers": 3, "slices": 3, "order": "fold", "split": "slices", "batch": "global",
    "rescale": "survivors", "steps_planned": 20, "samples_planned": 60, "num_buckets": 1, "parameters": 9,
}  # fmt: skip
MOVES = {"LoadCheckpoint": LOAD_S}
ANSWERS = {
    "rollback": ("redo", 12, 1, {}),
    "forward": ("continue", 12, 0, {}),
    "restart": ("load", 10, 3, MOVES),
    "reinit": ("reinit", 12, 1, MOVES | {"Reinitialise": REBUILD_S}),
}

CAUSES_OF_PARTS = {
    ("useful",): ("useful", "straggler_wait"),
    ("lost",): ("step_redone",),
    ("save",): ("checkpoint_held",),
    ("detect",): ("detection",),
    ("regroup",): ("agreement",),
    ("load", "restart", "rejoin"): ("start_up", "rebuild", "state_transfer", "restart"),
    ("wait",): ("idle",),
}
"""Parts of a simulation, and the uses of time in the report of a real run that are the same together.

The report has ``useful`` work and the causes of :mod:`holdfast.summary.goodput`. Records do not tell loading from starting
if the launcher restarts the job. Hangs are not simulated (``stall``); slow workers are, as work at a lower pace.
"""


def commits(first, begin_s, last=19, saves=True):
    """Steps that nothing disturbs, with a checkpoint after the tenth; and when they are over."""
    records, t_s = [], begin_s
    for step in range(first, last + 1):
        t_s += STEP_S
        records.append(StepCommitted(t_s=t_s, rank=1, step=step, epoch=0, samples=3, workers=3, metrics={}))
        if step == 9 and saves:
            t_s += SAVE_S
            records.append(CheckpointSaved(t_s=t_s, rank=1, step=10, path="", size_bytes=0, seconds=SAVE_S))
    return records, t_s


def run_of(strategy):
    """The records of a run with one death, as workers write them; and when it ended."""
    records = [RunStarted(t_s=0.0, rank=rank, step=0, strategy=strategy, **START) for rank in range(5)]
    before, _ = commits(0, 0.0, last=11)
    records += [*before, FaultFired(t_s=DEATH_S, rank=0, step=12, fault=0, kind="kill", phase="allreduce")]
    if strategy == "relaunch":  # all workers are ended
        known_s = DEATH_S + DETECT_S
        records.append(JobRestarted(t_s=known_s, rank=-1, step=11, restart=1, workers=(1, 2, 3), reason=""))
        begin_s = known_s + RESTART_S + LOAD_S
        records.append(RunStarted(t_s=begin_s, rank=1, step=10, strategy=strategy, **START))
        after, end_s = commits(10, begin_s, saves=False)
        return [*records, *after], end_s
    decision, step, redone_steps, moves = ANSWERS[strategy]
    seen_s = DEATH_S + DETECT_S
    decided_s = seen_s + REGROUP_S + sum(moves.values())
    how = {"lost": (0,), "survivors": (1, 2, 3, 4), "decision": decision, "redone_steps": redone_steps, "generation": 2}
    for rank in range(1, 5):
        records.append(FailureSeen(t_s=seen_s, rank=rank, step=12, phase="allreduce"))
        records.append(Recovered(t_s=decided_s, rank=rank, step=step, times_s={"Agree": 2.0} | moves, **how))
    done_s = BUCKET_S + 6 if decision == "continue" else 0.0  # of step 12
    after, end_s = commits(step, decided_s - done_s, saves=False)
    return [*records, *after], end_s


def simulated(strategy):
    job = SimulatedJob(strategy=strategy, steps=20, save_every=10, horizon_s=1e5)
    death = FailureTrace((OutageSpan(0, DEATH_S, DEATH_S),), 5, 1e6, "worker", replayed=True)
    return simulate(Scenario(Cluster(workers=3, spares=2), job, COSTS, death))


@pytest.mark.parametrize("strategy", [*ANSWERS, "relaunch"])
def test_causes_of_badput_are_the_parts_of_a_simulation(strategy):
    outcome = simulated(strategy)
    records, end_s = run_of(strategy)
    spent = goodput_of(records, end_s)
    uses = {"useful": spent.useful_s} | dict(spent.badput_s)

    assert end_s == outcome.total_ns / 1e9
    for parts, causes in CAUSES_OF_PARTS.items():
        assert sum(uses[cause] for cause in causes) == pytest.approx(
            sum(outcome.parts_ns[part] for part in parts) / 1e9
        ), parts
    assert spent.badput_s["step_redone"] > 0 or strategy == "forward"


def test_each_part_and_each_cause_is_mapped_once():
    parts = [part for parts in CAUSES_OF_PARTS for part in parts]
    causes = [cause for causes in CAUSES_OF_PARTS.values() for cause in causes]

    assert sorted(parts) == sorted(PARTS)
    assert len(causes) == len(set(causes))
