"""What one training loop of a session needs: the plan of its samples, and where they come from."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.base.orders import is_tree
from holdfast.base.side_work import say
from holdfast.data.assignment import choose_slices
from holdfast.data.loader import DataSource
from holdfast.data.plan import SamplePlan
from holdfast.data.source import OpenedSource
from holdfast.engine.loop import TrainingLoop
from holdfast.state.context import JobContext


@dataclass(slots=True)
class OpenedLoop:
    """What one training loop needs, and the loop itself once it has begun."""

    job: JobContext
    plan: SamplePlan
    source: DataSource
    run: TrainingLoop | None = None
    is_over: bool = False  # the next loop begins with the next epoch


def choose_job_slices(job: JobContext, batch_size: int) -> int:
    """Return the number of slices unless a checkpoint fixes it: one per worker, or enough for some losses."""
    settings = job.settings
    workers = len(job.first_members) - settings.spares
    if settings.auto_slices < 0:
        return workers
    choice = choose_slices(workers, settings.auto_slices, batch_size)
    if job.comm.members and job.is_lead and not settings.resume:
        say(choice.line)
    return choice.slices


def plan_of(job: JobContext, opened: OpenedSource, epochs: int) -> SamplePlan:
    """Return the plan of a loop of ``epochs`` epochs over this data."""
    settings = job.settings
    return SamplePlan(
        num_samples=opened.num_samples,
        batch_size=opened.batch_size,
        first_epoch=job.loops.epoch,
        first_offset=job.loops.offset,
        epochs=epochs,
        seed=settings.seed,
        shuffle=opened.shuffle,
        drop_last=opened.drop_last,
        slices=job.loops.slices,
        members=job.first_members[: len(job.first_members) - settings.spares],
        split=settings.split,
        batch=settings.batch,
        in_tree=is_tree(job.loops.order),
        sampler=opened.sampler,
        stream=opened.stream,
    )
