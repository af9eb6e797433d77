"""Records with the usual fields, for tests that are about a few of them."""

from holdfast.records.types import Finished, Recovered, RunStarted, StepCommitted

DDP = {"fabric": "ulfm", "strategy": "forward", "batch": "local"} | dict.fromkeys(
    ("steps_planned", "samples_planned", "num_buckets", "parameters"), 0
)
"""Fields of the start of a script that speaks to torch.distributed, which knows less."""


def started(rank=0, **fields):
    usual = {
        "t_s": 0.0, "step": 0, "fabric": "gloo", "strategy": "rollback", "seed": 0, "workers": 3, "slices": 4,
        "order": "fold", "split": "slices", "batch": "global", "rescale": "survivors", "steps_planned": 9,
        "samples_planned": 9, "num_buckets": 1, "parameters": 1,
    }  # fmt: skip
    return RunStarted(rank=rank, **usual | fields)


def committed(step, **fields):
    usual = {"t_s": float(step), "rank": 0, "epoch": 0, "samples": 1, "workers": 3, "metrics": {}}
    return StepCommitted(step=step, **usual | fields)


def recovered(rank=0, **fields):
    usual = {"t_s": 1.0, "step": 5, "lost": (), "survivors": (0, 2), "decision": "redo", "redone_steps": 0}
    return Recovered(rank=rank, **usual | {"generation": 1} | fields)


def finished(rank=0, **fields):
    usual = {
        "t_s": 9.0, "step": 9, "outcome": "done", "sha256": "", "state_sha256": "", "planned": 9, "committed": 9,
        "lost": 0, "repeated": 0, "metrics": {}, "checkpoint": "",
    }  # fmt: skip
    return Finished(rank=rank, **usual | fields)
