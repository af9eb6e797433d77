"""``holdfast rehearse``: finds the standby options of a split model with which failures cost the least."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.cli.signals import sigterm_as_interrupt

if TYPE_CHECKING:
    from holdfast_lab.studies.rehearsal import RehearsalResult

_STOPPED = 4


def rehearse(
    script: Annotated[Path, typer.Argument(metavar="SCRIPT", help="The training script.", show_default=False)],
    args: Annotated[list[str] | None, typer.Argument(metavar="[ARGS]...", help="Arguments of the script.")] = None,
    *,
    workers: Annotated[int, typer.Option("--workers", "-n", metavar="N", min=2, help="Virtual workers.")] = 4,
    mirror_every: Annotated[int, typer.Option(metavar="STEPS", help="Steps over which a whole copy is sent.")] = 16,
    mirror_fraction: Annotated[
        float, typer.Option(metavar="R", help="Share of a copy that is sent at a time.")
    ] = 0.125,
    failures: Annotated[
        int, typer.Option(metavar="F", min=1, help="Failures per predictor and codec, each in its own run.")
    ] = 3,
    seed: Annotated[int, typer.Option(metavar="S", min=0, help="Seed of the job and of the failures.")] = 0,
    metric: Annotated[str, typer.Option(metavar="NAME", help="Name of the loss in the log.")] = "loss",
    run_timeout: Annotated[float, typer.Option(metavar="SECONDS", help="Time limit of one run.")] = 3600.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON.")] = False,
) -> int:
    """Kill workers in rehearsals of SCRIPT with each predictor and codec; print the options that cost the fewest steps.

    The model must be split, and its loss logged in every step. One process runs all workers, one run after the other.
    The last line of the output has the options for holdfast run.

    Example: holdfast rehearse -n 4 train.py --epochs 3
    """
    from holdfast_lab.studies.rehearsal import Rehearsal
    from holdfast_lab.studies.rehearsal import rehearse as tried_by

    this = Rehearsal(
        script=script,
        args=tuple(args or ()),
        workers=workers,
        every=mirror_every,
        fraction=mirror_fraction,
        failures=failures,
        seed=seed,
        metric=metric,
        limit_s=run_timeout,
    )
    try:
        with sigterm_as_interrupt():
            tried = tried_by(this, lambda line: print(f"rehearsal: {line}", file=sys.stderr, flush=True))
    except KeyboardInterrupt:
        print("stopped; the results of this rehearsal are not kept", file=sys.stderr)
        return _STOPPED
    _show(tried, as_json=as_json)
    return 0


def _show(tried: list[RehearsalResult], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps([dataclasses.asdict(one) | {"cost": one.cost} for one in tried], indent=1))
        return
    from holdfast.cli.tables import table

    rows = [
        (
            one.options[-3],
            one.options[-1],
            f"{one.cost:.2f}",
            one.censored,
            " ".join(f"{cost:.2f}" for cost in one.costs),
        )
        for one in tried
    ]
    table(("predictor", "codec", "cost in steps>", "levels never reached>", "of each failure"), rows)
    print(" ".join(tried[0].options))
