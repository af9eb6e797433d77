"""Records of made-up runs for tests of live displays."""

from __future__ import annotations

from holdfast.records.types import FailureSeen, Finished, Recovered, RunStarted, StepCommitted, WorkerEnded

START = {
    "fabric": "gloo", "strategy": "rollback", "seed": 0, "workers": 3, "slices": 6, "order": "fold", "split": "slices",
    "batch": "global", "rescale": "survivors", "steps_planned": 40, "samples_planned": 160, "num_buckets": 1,
    "parameters": 9,
}  # fmt: skip
END = {"sha256": "a", "state_sha256": "b", "planned": 160, "committed": 160, "lost": 0, "repeated": 0, "checkpoint": ""}


def begun(t_s, ranks, step=0, **more):
    return [RunStarted(t_s=t_s + rank / 100, rank=rank, step=step, **START | more) for rank in ranks]


def steps(first, last, begin_s, rank=0):
    return [
        StepCommitted(t_s=begin_s + 0.1 * (step - first + 1), rank=rank, step=step, epoch=0, samples=4, workers=3,
                      metrics={"loss": 1.0 / (step + 1)}, link=f"link{step}")
        for step in range(first, last + 1)
    ]  # fmt: skip


def recovery(t_s, step, lost, survivors, generation=1, decision="redo", redone=1, **more):
    died = [WorkerEnded(t_s=t_s, rank=rank, step=step, exit_code=-9, pid=100 + rank) for rank in lost]
    seen = [FailureSeen(t_s=t_s + 0.02, rank=rank, step=step, phase="allreduce") for rank in survivors]
    how = {"lost": lost, "survivors": survivors, "decision": decision, "redone_steps": redone, "generation": generation}
    said = [Recovered(t_s=t_s + 0.05 + rank / 1000, rank=rank, step=step, **how, **more) for rank in survivors]
    return [*died, *seen, *said]


def finished(t_s, ranks, step=40):
    ends = [Finished(t_s=t_s, rank=rank, step=step, outcome="done", metrics={}, **END) for rank in ranks]
    return ends + [WorkerEnded(t_s=t_s + 0.1, rank=rank, step=-1, exit_code=0, pid=100 + rank) for rank in ranks]


def a_kill():
    """Three workers and a spare; worker 1 dies in step 10, and the spare takes over."""
    first = [*begun(1.0, range(4)), *steps(0, 9, 1.1), *recovery(2.2, 10, (1,), (0, 2, 3))]
    return [*first, *steps(10, 39, 2.4), *finished(5.5, (0, 2, 3))]
