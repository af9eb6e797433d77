"""``holdfast simulate``: simulates the cost of each strategy, without hardware."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from holdfast.cli.progress import progress
from holdfast.cli.tables import table
from holdfast.errors import ConfigError


def simulate(
    scenario: Annotated[
        Path,
        typer.Argument(metavar="SCENARIO.toml", help="Cluster, job, costs, failures, strategies.", show_default=False),
    ],
    *,
    repetitions: Annotated[
        int | None, typer.Option(metavar="N", help="Histories per strategy [the file's, or 100].")
    ] = None,
    seed: Annotated[
        int | None, typer.Option(metavar="S", min=0, help="Seed of everything random [the file's, or 0].")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write results.json and a page, index.html, to DIR.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print results.json instead of the table.")] = False,
) -> None:
    """Simulate a job under failures, once for each strategy, with the same failures for all.

    The strategies are the production code, with costs in place of tensors. Goodput is the time that the work would have
    taken undisturbed with all workers, divided by the time that it took. Intervals are 95 % intervals of the mean.

    Example: holdfast simulate examples/scenarios/spot.toml --out out
    """
    from holdfast_lab.simulate.toml import read_scenario

    file = read_scenario(scenario)
    for line in file.said:
        print(line, file=sys.stderr)
    if repetitions is not None and repetitions < 2:
        raise ConfigError(f"--repetitions must be at least 2, because one history gives no interval; got {repetitions}")
    repetitions = repetitions or file.repetitions
    seed = file.seed if seed is None else seed
    check_out(out)
    from holdfast_lab.simulate.comparing import compare

    with progress("simulating", quiet=as_json) as now:
        found = compare(file.settings, repetitions, seed=seed, now=now, tell=now.at)
    results: dict[str, Any] = {
        "simulated": "scenario",
        "title": file.title or scenario.stem,
        "rows": [one.row() for one in found],
        "settings": settings_of(seed, repetitions) | {"scenario": str(scenario)},
        "logs": [log.as_dict() for log in file.logs],
    }
    if as_json:
        print(json.dumps(results, indent=1))
    else:
        show_rows(results)
    if out is not None:
        write(results, out)


def settings_of(seed: int, repetitions: int) -> dict[str, Any]:
    """Return what a repetition of the result needs: versions, seed, the command."""
    import platform

    import numpy as np

    from holdfast import __version__

    return {
        "command": shlex.join(["holdfast", *sys.argv[1:]]),
        "seed": seed,
        "repetitions": repetitions,
        "versions": f"holdfast {__version__}, Python {platform.python_version()}, numpy {np.__version__}",
        "hardware": "none: simulated",
    }


def show_rows(results: dict[str, Any]) -> None:
    """Print the strategies side by side."""
    from holdfast_lab.pages.simulated import columns, price_lines, shown_cells

    shown, rows = columns(results), [shown_cells(row) for row in results["rows"]]
    table(
        ["strategy", *(heading for _, heading in shown)],
        [[row["name"], *(row[key] for key, _ in shown)] for row in rows],
    )
    print()
    table(["strategy", "rest of the time"], [[row["name"], row["where"] or "nowhere"] for row in rows])
    for line in price_lines(results):
        print(line)


def check_out(out: Path | None) -> None:
    """Check that results can be written to ``--out``, before they are computed.

    Raises:
        ConfigError: if not.
    """
    from holdfast.observe.page.html import check_folder

    if out is not None:
        check_folder(out)


def write(results: dict[str, Any], out: Path) -> None:
    """Write the files, and print the location of the page to stderr."""
    from holdfast.observe.page.html import write_page
    from holdfast.summary.files import write_results

    write_results(results, out)
    print(f"page: {write_page(out)}", file=sys.stderr)
