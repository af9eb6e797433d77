"""Saving the state between two training loops and after the last one, where workers make no agreements.

All workers have passed the gate of the last loop with the same state, so any of them can save it alone. The two lowest
ranks hold a copy. On one node they take turns, and the second one finds the checkpoint of the first; on other nodes,
where there is no lock, only the lowest rank writes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from holdfast.checkpoint import WritePlan
from holdfast.checkpoint.writer import WriteResult
from holdfast.errors import CheckpointCorrupt, CheckpointError
from holdfast.state.context import JobContext, LoopEnd
from holdfast.state.run_log import RunLog
from holdfast.state.store_loss import turn

_LOCK = "loop-end.lock"
_MARKS = ("ended", "stopped")
"""What the metadata of a checkpoint say about the end of a loop."""


def keepers(job: JobContext) -> tuple[int, ...]:
    """Return the ranks that keep a copy: either of two may die before it is needed."""
    is_one_node = int(os.environ.get("LOCAL_WORLD_SIZE", "0")) >= len(job.first_members) - job.settings.spares
    return job.comm.members[: 2 if is_one_node and job.settings.run_dir else 1]


def lone_attempt(job: JobContext) -> int:
    """Return a number for a checkpoint that this worker writes alone: others may have failed during theirs."""
    return job.comm.generation + 1 + job.comm.local_ranks[0]


def check_saved(step: int, outcomes: Sequence[WriteResult]) -> None:
    """Make sure that training does not stop before the state it stops with has been saved.

    Raises:
        CheckpointError: if no outcome is of a complete checkpoint of ``step``.
    """
    if any(outcome.saved is not None and outcome.step == step for outcome in outcomes):
        return
    errors = [str(outcome.error) for outcome in outcomes if outcome.step == step and outcome.error is not None]
    why = errors[0] if errors else "no worker wrote it"
    raise CheckpointError(f"training stops before step {step}, but its state could not be saved: {why}")


def is_saved(job: JobContext, step: int, info: Mapping[str, Any]) -> bool:
    """Return whether there is a checkpoint of ``step`` which says the same of the end of a loop, or one of a later step."""
    with contextlib.suppress(CheckpointError, CheckpointCorrupt):  # of storage that cannot be read; writing says why
        newest = job.checkpoints.last()
        if newest != step:
            return newest > step
        saved = job.checkpoints.info(step)
        return all(saved.get(mark, False) == info.get(mark, False) for mark in _MARKS)
    return False


def save_end(job: JobContext) -> None:
    """Save the state at the end of the last loop, unless another worker does or has; afterwards no copy is held.

    Raises:
        CheckpointError: if it could not be saved.
    """
    loops, end = job.loops, job.loops.at_end
    if end is None:
        return
    try:
        loops.is_saving_end = True
        if end.content is not None:
            _save(job, end, end.content)
    finally:
        loops.at_end = dataclasses.replace(end, content=None, info={})
        loops.is_saving_end = False  # last: from here on SIGTERM looks at at_end


def stop_at_end(job: JobContext) -> None:
    """Save the state at the end of the last loop, with which training has stopped, and record that.

    Raises:
        CheckpointError: if it could not be saved.
    """
    end = job.loops.at_end
    save_end(job)
    for record in () if end is None else end.finished:
        job.log.write(
            dataclasses.replace(record, t_s=job.clock.now_s(), outcome="stopped", checkpoint=str(job.checkpoints.url))
        )


def _save(job: JobContext, end: LoopEnd, content: WritePlan) -> None:
    run_dir = job.settings.run_dir
    alone: AbstractContextManager[None] = turn(Path(run_dir, _LOCK)) if run_dir else contextlib.nullcontext()
    with alone:
        if is_saved(job, end.step, end.info):
            return
        log = RunLog(job)
        log.mark("checkpoint")
        outcome = job.checkpoints.save_alone(end.step, content, end.info, lone_attempt(job))
        log.saved(outcome)
        log.mark("script")
    if outcome.saved is None:
        raise CheckpointError(
            f"the state before step {end.step}, at the end of training, could not be saved: {outcome.error}"
        )
