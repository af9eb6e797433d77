"""``holdfast scale`` and ``holdfast set``: change a job while it runs."""

from __future__ import annotations

import sys
from typing import Annotated, Any

from typer import Argument, Option

_Job = Annotated[
    int | None,
    Option(
        "--job",
        metavar="NUMBER",
        help="Process number of its launcher, if several jobs run, or it was started in another folder.",
    ),
]


def scale(
    workers: Annotated[int, Argument(metavar="WORKERS", help="How many are to share the work.")], *, job: _Job = None
) -> int:
    """Let a running job go on with more or fewer workers.

    New workers join, and those that are too many leave, between two steps; nothing is lost or done again. It returns at
    once: the job's own output says when it has happened.

    Example: holdfast scale 6
    """
    return _ask(job, workers=workers)


def set_(
    *,
    job: _Job = None,
    lr: Annotated[float | None, Option(metavar="RATE", help="Learning rate, of all parameter groups.")] = None,
    batch_size: Annotated[int | None, Option(metavar="N", help="Samples of a step, over all workers.")] = None,
    strategy: Annotated[str | None, Option(metavar="NAME", help="What survivors do.")] = None,
    checkpoint_every: Annotated[
        int | None, Option(metavar="STEPS", help="Steps between checkpoints; 0 takes no more.")
    ] = None,
) -> int:
    """Let a running job go on with other settings, from the same step on at all workers.

    Example: holdfast set --lr 0.01
    """
    given = {"lr": lr, "batch_size": batch_size, "strategy": strategy, "checkpoint_every": checkpoint_every}
    return _ask(job, **{name: value for name, value in given.items() if value is not None})


def _ask(pid: int | None, **changes: Any) -> int:
    from holdfast.launch.control import advice, ask, check_values, find

    check_values(changes)
    job = find(pid)
    ask(job, **changes)
    print(f"asked job {job.pid} ({job.script}): {', '.join(f'{name}={value}' for name, value in changes.items())}")
    if note := advice(job, changes):
        print(f"note: {note}", file=sys.stderr)
    return 0
