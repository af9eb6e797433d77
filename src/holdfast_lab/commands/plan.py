"""``holdfast plan``: which strategy, and how often a checkpoint, for so many workers that fail so often."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from holdfast.cli.tables import progress, say, table
from holdfast.report.formatting import clean
from holdfast_lab.commands.simulate import settings_of, show_rows, write

_TIMES = (
    *("mtbf", "mtbf_node", "mtbf_worker", "repair_s", "step_s", "save_s", "save_background_s", "load_s", "restart_s", "detect_s"),
    *("regroup_s", "rejoin_s", "rebuild_s", "rehome_s", "work_s"),
)  # fmt: skip
_SPEEDS = ("write_bytes_per_s", "read_bytes_per_s", "snapshot_bytes_per_s")
_RATES = ("mtbf", "mtbf_node", "mtbf_worker")


def plan(
    *,
    workers: Annotated[int | None, typer.Option(metavar="N", help="That compute [those of --from-report].")] = None,
    mtbf: Annotated[str | None, typer.Option(metavar="TIME", help="Between two failures of the whole job.")] = None,
    mtbf_node: Annotated[str | None, typer.Option(metavar="TIME", help="Between two failures of one machine.")] = None,
    mtbf_worker: Annotated[str | None, typer.Option(metavar="TIME", help="Between two failures of one worker.")] = None,
    workers_per_node: Annotated[
        int | None, typer.Option(metavar="W", help="They fail together [8; fewer than 16 workers: 1].")
    ] = None,
    spares: Annotated[
        int | None, typer.Option(metavar="K", help="Workers beside N [enough for 99 % of the time].")
    ] = None,
    step_s: Annotated[str | None, typer.Option(metavar="TIME", help="A step with all workers [5s].")] = None,
    state_bytes: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Of a checkpoint [1GB a worker, at most 1TB].")
    ] = None,
    write_bytes_per_s: Annotated[
        str | None, typer.Option(metavar="SPEED", help="All together [1GB/s a machine, at most 100GB/s].")
    ] = None,
    read_bytes_per_s: Annotated[str | None, typer.Option(metavar="SPEED", help="All together [as written].")] = None,
    snapshot_bytes_per_s: Annotated[
        str | None,
        typer.Option(metavar="SPEED", help="Training is held only for a copy of this speed [for the writing]."),
    ] = None,
    save_s: Annotated[
        str | None, typer.Option(metavar="TIME", help="Training is held for a checkpoint [by size and speed].")
    ] = None,
    save_background_s: Annotated[
        str | None, typer.Option(metavar="TIME", help="It is written for so long beside training [by size and speed].")
    ] = None,
    load_s: Annotated[
        str | None, typer.Option(metavar="TIME", help="All load a checkpoint [by size and speed].")
    ] = None,
    restart_s: Annotated[str | None, typer.Option(metavar="TIME", help="The launcher starts the job [5min].")] = None,
    detect_s: Annotated[
        str | None, typer.Option(metavar="TIME", help="Until survivors know of a failure [10s].")
    ] = None,
    regroup_s: Annotated[str | None, typer.Option(metavar="TIME", help="Until they have agreed [1s].")] = None,
    rejoin_s: Annotated[str | None, typer.Option(metavar="TIME", help="All are held for newcomers [10s].")] = None,
    rebuild_s: Annotated[str | None, typer.Option(metavar="TIME", help="reinit builds the application [1min].")] = None,
    rehome_s: Annotated[
        str | None, typer.Option(metavar="TIME", help="Parts of a split model are given to others [10s].")
    ] = None,
    repair_s: Annotated[str | None, typer.Option(metavar="TIME", help="A machine is away, on average [6h].")] = None,
    whole_job_share: Annotated[
        float | None, typer.Option(metavar="X", help="Failures that end the whole job, of all [0.15].")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(metavar="replicated|mirrored|split", help="Who holds it: all, some, or one each [by its size]."),
    ] = None,
    split: Annotated[
        str | None, typer.Option(metavar="slices|even", help="How survivors share the work of the dead [slices].")
    ] = None,
    work_s: Annotated[str | None, typer.Option(metavar="TIME", help="Training, undisturbed [30d].")] = None,
    from_report: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Take what a run measured: its --report DIR.")
    ] = None,
    with_map: Annotated[
        bool,
        typer.Option("--map/--no-map", help="Also say who wins with other numbers of workers, and other machines."),
    ] = True,
    repetitions: Annotated[int, typer.Option(metavar="R", min=2, help="Histories of each strategy.")] = 100,
    seed: Annotated[int, typer.Option(metavar="S", min=0, help="Of all that is drawn.")] = 0,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write results.json and a page, index.html, there.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print results.json instead of the answer.")] = False,
) -> None:
    """Say which strategy to use, how often to save, how many spares to keep, and why.

    Times are numbers of seconds or such as 250ms, 30s, 6h, 90d, 5y; sizes 140GB; speeds 2GiB/s. What is not given is assumed, and the
    answer says so. Simulated, with the strategies that run in production.

    Example: holdfast plan --workers 16384 --mtbf-node 264d --step-s 6s --state-bytes 5.7TB --write-bytes-per-s 500GB/s
    """
    given = _parsed({name: value for name, value in locals().items() if name not in _NOT_ASKED})
    from holdfast_lab.pages.advice import headline
    from holdfast_lab.simulate.assuming import ask
    from holdfast_lab.simulate.measured import read_measured
    from holdfast_lab.simulate.planning import plan as answer_of

    question, known = ask(given, None if from_report is None else read_measured(from_report))
    with progress("planning") as now:
        answer = answer_of(question, repetitions=repetitions, seed=seed, with_map=with_map, now=now)
    results = {
        "simulated": "plan",
        "title": f"{question.workers:,} workers",
        **answer,
        "known": [dataclasses.asdict(one) for one in known],
        "settings": settings_of(seed, repetitions),
    }
    results["advice"] = headline(results)
    if as_json:
        print(json.dumps(results, indent=1))
    else:
        _show(results)
    if out is not None:
        write(results, out)


_NOT_ASKED = ("from_report", "with_map", "repetitions", "seed", "out", "as_json")


def _parsed(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return what was given, in seconds and bytes.

    Raises:
        ConfigError: if something has no unit, or that of something else.
    """
    from holdfast_lab.simulate.units import parse_bytes, parse_seconds, parse_speed

    parsed: dict[str, Any] = {}
    for name, value in options.items():
        option = "--" + name.replace("_", "-")
        if value is None:
            continue
        if name in _TIMES:
            parsed[f"{name}_s" if name in _RATES else name] = parse_seconds(value, option)
        elif name in _SPEEDS:
            parsed[name] = parse_speed(value, option)
        elif name == "state_bytes":
            parsed[name] = parse_bytes(value, option)
        else:
            parsed[name] = value
    return parsed


def _show(results: dict[str, Any]) -> None:
    """Print the answer: what to do, why, and what it stands on."""
    from holdfast_lab.pages.advice import assumption_lines, command, headline, interval_lines, reasons
    from holdfast_lab.pages.simulated import MAP_NOTE, map_table

    say(headline(results), "bold")
    if line := command(results):
        print(f"  {clean(line)}")
    print()
    for reason in reasons(results):
        print(f"- {clean(reason)}")
    print()
    show_rows(results)
    print()
    columns = {
        "strategies": "checkpoints of",
        "back": "back to one every",
        "young": "Young",
        "daly": "Daly",
        "exact": "exact",
        "simulated": "simulated",
        "range": "as good as",
    }
    table(list(columns.values()), [[line[key] for key in columns] for line in interval_lines(results)])
    print()
    if results["map"]:
        heads, fields = map_table(results["map"])
        table(["machine fails every", *(f"{head} workers" for head in heads)], fields)
        print(MAP_NOTE)
        print()
    table(["it stands on", "", "", ""], assumption_lines(results["known"]))
