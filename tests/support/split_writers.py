"""Workers of a split model, each a process that writes its own part of one checkpoint and is killed meanwhile."""

import torch
from checkpoint_writers import die_at

from holdfast.config import Settings
from holdfast.state.manager import CheckpointManager

NUM_STAGES = 4


def stage(number, value):
    weight = torch.full((50, 3), float(value))
    return {"model": {"w": weight, "number": torch.tensor(number)}, "optimizer": {"lr": value / 10, "m": weight * 2}}


def state_of(value, stages=range(NUM_STAGES)):
    """Return the state that the first writer gives: the common part, and these stages."""
    parts = {str(number): stage(number, value) for number in stages}
    return {"replica": {"parts": parts, "registered.mean": torch.full((9,), float(value))}, "value": value}


def save_part(root, step, value, rank, holders, pipe, point="", nth=1):
    """Write a part of a checkpoint and, as the first worker, complete it; exit with the reason if that fails.

    Args:
        root: Folder of checkpoints.
        step: The step.
        value: Value of the state.
        rank: Rank of this worker.
        holders: For each worker, the stages that it writes.
        pipe: Receives the surviving ranks, when all victims have died.
        point: Die at this crash point.
        nth: Die when it is passed for the n-th time.
    """
    die_at(point, nth)
    keeper = CheckpointManager(Settings(checkpoint_dir=root, keep_last=3), background=True)
    keeper.start_over(value, 0)
    state = state_of(value, holders[rank])
    state = state if rank == 0 else {"replica": {"parts": state["replica"]["parts"]}}
    writers = [(number,) for number in range(len(holders))]
    keeper.begin(step, state, {"value": value}, writers, (rank,), 0, distinct=True)
    keeper.publish(step - 1, 0, is_lead=rank == 0)
    keeper.note_alive(pipe.recv())
    why = [str(outcome.error) for outcome in keeper.finish() if outcome.error is not None]
    if why:
        raise SystemExit("; ".join(why))
