"""``holdfast scale`` and ``holdfast set``: change a running job."""

from __future__ import annotations

import sys
from typing import Annotated, Any

from typer import Argument, Option

_Job = Annotated[
    int | None,
    Option(
        "--job",
        metavar="NUMBER",
        help="PID of its launcher, if several jobs run, or it was started in another directory.",
    ),
]


def scale(
    workers: Annotated[int, Argument(metavar="WORKERS", help="Number of workers that share the work.")],
    *,
    job: _Job = None,
) -> int:
    """Change the number of workers of a running job.

    Workers join or leave between two steps; no work is lost or repeated. The job's output reports the change.

    Example: holdfast scale 6
    """
    return _request(job, workers=workers)


def set_(
    *,
    job: _Job = None,
    lr: Annotated[float | None, Option(metavar="RATE", help="Learning rate of all parameter groups.")] = None,
    batch_size: Annotated[int | None, Option(metavar="N", help="Samples per step, over all workers.")] = None,
    strategy: Annotated[str | None, Option(metavar="NAME", help="How survivors recover from a failure.")] = None,
    checkpoint_every: Annotated[
        int | None, Option(metavar="STEPS", help="Steps between checkpoints; 0 for none.")
    ] = None,
) -> int:
    """Change settings of a running job, from the same step on at all workers.

    Example: holdfast set --lr 0.01
    """
    settings = {"lr": lr, "batch_size": batch_size, "strategy": strategy, "checkpoint_every": checkpoint_every}
    return _request(job, **{name: value for name, value in settings.items() if value is not None})


def _request(pid: int | None, **changes: Any) -> int:
    from holdfast.launch.control import advice, check_values, find, request_changes

    check_values(changes)
    job = find(pid)
    request_changes(job, **changes)
    print(
        f"requested of job {job.pid} ({job.script}): {', '.join(f'{name}={value}' for name, value in changes.items())}"
    )
    if note := advice(job, changes):
        print(f"note: {note}", file=sys.stderr)
    return 0
