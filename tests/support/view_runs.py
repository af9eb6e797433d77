"""Records of made-up runs for tests of live displays."""

from __future__ import annotations

import usual_records as usual

from holdfast.records.types import FailureSeen, WorkerEnded

PLAN = {"slices": 6, "steps_planned": 40, "samples_planned": 160, "parameters": 9}
END = {"sha256": "a", "state_sha256": "b", "planned": 160, "committed": 160}


def begun(t_s, ranks, step=0, **more):
    return [usual.started(rank, t_s=t_s + rank / 100, step=step, **PLAN | more) for rank in ranks]


def steps(first, last, begin_s, rank=0):
    """Steps of 0.1 s."""
    return [
        usual.committed(
            step, t_s=begin_s + 0.1 * (step - first + 1), rank=rank, samples=4, metrics={"loss": 1.0 / (step + 1)},
            link=f"link{step}",
        )
        for step in range(first, last + 1)
    ]  # fmt: skip


def recovery(t_s, step, lost, survivors, generation=1, decision="redo", redone=1, **more):
    died = [WorkerEnded(t_s=t_s, rank=rank, step=step, exit_code=-9, pid=100 + rank) for rank in lost]
    seen = [FailureSeen(t_s=t_s + 0.02, rank=rank, step=step, phase="allreduce") for rank in survivors]
    how = {"lost": lost, "survivors": survivors, "decision": decision, "redone_steps": redone, "generation": generation}
    said = [usual.recovered(rank, t_s=t_s + 0.05 + rank / 1000, step=step, **how, **more) for rank in survivors]
    return [*died, *seen, *said]


def finished(t_s, ranks, step=40):
    ends = [usual.finished(rank, t_s=t_s, step=step, **END) for rank in ranks]
    return ends + [WorkerEnded(t_s=t_s + 0.1, rank=rank, step=-1, exit_code=0, pid=100 + rank) for rank in ranks]


def a_kill():
    """Three workers and a spare; worker 1 dies in step 10, and the spare takes over."""
    first = [*begun(1.0, range(4)), *steps(0, 9, 1.1), *recovery(2.2, 10, (1,), (0, 2, 3))]
    return [*first, *steps(10, 39, 2.4), *finished(5.5, (0, 2, 3))]
