"""``holdfast plan``: recommends a strategy and a checkpoint interval for a number of workers and a failure rate."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from holdfast.base.formatting import clean
from holdfast.cli.progress import progress
from holdfast.cli.tables import say, table
from holdfast.errors import ConfigError
from holdfast_lab.commands.simulate import check_out, settings_of, show_rows, write

if TYPE_CHECKING:
    from holdfast_lab.simulate.logs.fitted import FittedLog

_TIMES = (
    *("mtbf", "mtbf_node", "mtbf_worker", "repair_s", "step_s", "save_s", "save_background_s", "load_s", "restart_s", "detect_s"),
    *("regroup_s", "rejoin_s", "rebuild_s", "rehome_s", "work_s"),
)  # fmt: skip
_SPEEDS = ("write_bytes_per_s", "read_bytes_per_s", "snapshot_bytes_per_s")
_RATES = ("mtbf", "mtbf_node", "mtbf_worker")


def plan(
    *,
    workers: Annotated[int | None, typer.Option(metavar="N", help="Active workers [those of --from-report].")] = None,
    mtbf: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Mean time between failures of the whole job, or a log of such times."),
    ] = None,
    mtbf_node: Annotated[
        str | None, typer.Option(metavar="TIME|LOG", help="Mean time between failures of one node, or a log of nodes.")
    ] = None,
    mtbf_worker: Annotated[
        str | None,
        typer.Option(metavar="TIME|LOG", help="Mean time between failures of one worker, or a log of workers."),
    ] = None,
    log: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="How to read the log, such as unit=h or nodes=400; may be repeated."),
    ] = None,
    fit: Annotated[
        str, typer.Option(metavar="best|exponential|weibull|bathtub", help="Distribution to fit to the log.")
    ] = "best",
    workers_per_node: Annotated[
        int | None,
        typer.Option(metavar="W", help="Workers per node, which fail together [8; fewer than 16 workers: 1]."),
    ] = None,
    spares: Annotated[
        int | None, typer.Option(metavar="K", help="Spare workers beside N [those that give most work per hour].")
    ] = None,
    step_s: Annotated[
        str | None, typer.Option(metavar="TIME", help="Duration of a step with all workers [5s].")
    ] = None,
    state_bytes: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Size of a checkpoint [1GB per worker, at most 1TB].")
    ] = None,
    write_bytes_per_s: Annotated[
        str | None, typer.Option(metavar="SPEED", help="Write speed, all together [1GB/s per node, at most 100GB/s].")
    ] = None,
    read_bytes_per_s: Annotated[
        str | None, typer.Option(metavar="SPEED", help="Read speed, all together [the write speed].")
    ] = None,
    snapshot_bytes_per_s: Annotated[
        str | None,
        typer.Option(metavar="SPEED", help="Training is held only for a copy at this speed [for the whole write]."),
    ] = None,
    save_s: Annotated[
        str | None, typer.Option(metavar="TIME", help="How long a checkpoint holds training [by size and speed].")
    ] = None,
    save_background_s: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="How long it is then written in the background [by size and speed]."),
    ] = None,
    load_s: Annotated[
        str | None, typer.Option(metavar="TIME", help="Time for all to load a checkpoint [by size and speed].")
    ] = None,
    restart_s: Annotated[
        str | None, typer.Option(metavar="TIME", help="Time for the launcher to start the job [5min].")
    ] = None,
    detect_s: Annotated[
        str | None, typer.Option(metavar="TIME", help="Time until survivors detect a failure [10s].")
    ] = None,
    regroup_s: Annotated[
        str | None, typer.Option(metavar="TIME", help="Time until survivors have agreed [1s].")
    ] = None,
    rejoin_s: Annotated[
        str | None, typer.Option(metavar="TIME", help="How long newcomers hold training [10s].")
    ] = None,
    rebuild_s: Annotated[
        str | None, typer.Option(metavar="TIME", help="Time for reinit to rebuild the application [1min].")
    ] = None,
    rehome_s: Annotated[
        str | None, typer.Option(metavar="TIME", help="Time to move parts of a split model to other workers [10s].")
    ] = None,
    mirror_every: Annotated[
        int | None,
        typer.Option(metavar="STEPS", help="partial: interval of full copies of a split model's parts [16]."),
    ] = None,
    stale_iterations: Annotated[
        float | None, typer.Option(metavar="X", help="partial: further steps that a failure costs [0.25 x STEPS].")
    ] = None,
    repair_s: Annotated[str | None, typer.Option(metavar="TIME", help="Mean time to repair a node [6h].")] = None,
    whole_job_share: Annotated[
        float | None, typer.Option(metavar="X", help="Share of failures that end the whole job [0.15].")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="replicated|mirrored|split",
            help="Copies of the model: on all workers, several, or one [by its size].",
        ),
    ] = None,
    split: Annotated[
        str | None, typer.Option(metavar="slices|even", help="How survivors share a failed worker's slices [slices].")
    ] = None,
    work_s: Annotated[
        str | None, typer.Option(metavar="TIME", help="Duration of the undisturbed training [30d].")
    ] = None,
    from_report: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Use costs measured in a run: its --report DIR.")
    ] = None,
    with_map: Annotated[
        bool,
        typer.Option("--map/--no-map", help="Also compute the best strategy for other numbers of workers and nodes."),
    ] = True,
    repetitions: Annotated[int, typer.Option(metavar="R", min=2, help="Histories per strategy.")] = 100,
    seed: Annotated[int, typer.Option(metavar="S", min=0, help="Seed of everything random.")] = 0,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write results.json and a page, index.html, to DIR.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print results.json instead of the answer.")] = False,
) -> None:
    """Recommend a strategy, a checkpoint interval and a number of spares, and explain why.

    Times are numbers of seconds or such as 250ms, 30s, 6h, 90d, 5y; sizes such as 140GB; speeds such as 2GiB/s. Values
    that are not given are assumed, and the answer lists them. The simulation runs the strategies of production.

    Example: holdfast plan --workers 16384 --mtbf-node 264d --step-s 6s --state-bytes 5.7TB --write-bytes-per-s 500GB/s
    """
    asked = {name: value for name, value in locals().items() if name not in _NOT_ASKED}
    check_out(out)
    fitted = _fitted(asked, log or (), fit)
    given = _parsed({name: value for name, value in asked.items() if name not in fitted})
    from holdfast_lab.pages.advice import headline
    from holdfast_lab.simulate.assuming import FittedRate, ask
    from holdfast_lab.simulate.measured import read_measured
    from holdfast_lab.simulate.planning import plan as answer_of

    rate = next((FittedRate(f"{name}_s", one.chosen.distribution, one.why) for name, one in fitted.items()), None)
    question, known = ask(given, None if from_report is None else read_measured(from_report), rate)
    with progress("planning", quiet=as_json) as now:
        answer = answer_of(question, repetitions=repetitions, seed=seed, with_map=with_map, now=now)
    results = {
        "simulated": "plan",
        "title": f"{question.workers:,} workers",
        **answer,
        "known": [dataclasses.asdict(one) for one in known],
        "settings": settings_of(seed, repetitions),
        "logs": [one.as_dict() for one in fitted.values()],
    }
    results["advice"] = headline(results)
    if as_json:
        print(json.dumps(results, indent=1))
    else:
        _show(results)
    if out is not None:
        write(results, out)


_NOT_ASKED = ("log", "fit", "from_report", "with_map", "repetitions", "seed", "out", "as_json")


def _fitted(options: Mapping[str, Any], words: Sequence[str], fit: str) -> dict[str, FittedLog]:
    """Return the log that is given in place of a mean, by the option's name, and print what it was taken for.

    Raises:
        ConfigError: if it cannot be read or fitted, or there are several.
    """
    from holdfast_lab.simulate.logs.reading import is_log

    given = {name: str(options[name]) for name in _RATES if options[name] is not None}
    found = [name for name, value in given.items() if is_log(value, "--" + name.replace("_", "-"))]
    if not found:
        if words or fit != "best":
            raise ConfigError(
                "--log and --fit say how to read a log: give one as --mtbf-node FILE or --mtbf-worker FILE"
            )
        return {}
    from holdfast_lab.simulate.logs.fitted import fit_log
    from holdfast_lab.simulate.logs.options import parse_words

    name = found[0]
    reading = dataclasses.replace(parse_words(words), is_of_job=name == "mtbf")
    fitted = fit_log(options[name], reading, fit)
    if name == "mtbf" and fitted.log.form not in ("lifetimes", "failures"):
        raise ConfigError(
            f"--mtbf is of the whole job, and {fitted.log.name} is of single machines ({fitted.log.form}): give it as "
            "--mtbf-node or --mtbf-worker, or with --log as=failures if each row is a failure that interrupts the job"
        )
    for line in fitted.lines():
        print(line, file=sys.stderr)
    return {name: fitted}


def _parsed(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the given values, in seconds and bytes.

    Raises:
        ConfigError: if a unit is missing or wrong.
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
    """Print the answer, its reasons and its assumptions."""
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
        "back": "loads one every",
        "young": "Young",
        "daly": "Daly",
        "exact": "exact",
        "simulated": "simulated",
        "range": "equally good",
    }
    table(list(columns.values()), [[line[key] for key in columns] for line in interval_lines(results)])
    print()
    if results["map"]:
        heads, fields = map_table(results["map"])
        table(["node fails every", *(f"{head} workers" for head in heads)], fields)
        print(MAP_NOTE)
        print()
    table(["based on", "", "", ""], assumption_lines(results["known"]))
