"""``holdfast study``: repeat a published experiment on this code."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from holdfast.cli.progress import progress
from holdfast.cli.signals import sigterm_as_interrupt
from holdfast.errors import ConfigError
from holdfast.observe.page.html import check_folder

_FAILED = 1
_STOPPED = 4


def study(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the study; --list names them.")] = "",
    *,
    listing: Annotated[bool, typer.Option("--list", help="List the studies and the papers they repeat.")] = False,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Directory for the results  [study-NAME]")] = None,
    data: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Directory of datasets that are read from files.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Finish within a minute, and list what was left out.")] = False,
    seed: Annotated[int, typer.Option(metavar="S", min=0, help="Seed of everything random.")] = 0,
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Measure only this framework, parallelism or program; repeatable."),
    ] = None,
    network: Annotated[str, typer.Option(metavar="NAME", help="Measure only this network.")] = "",
    repetitions: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Number of repetitions of each measurement.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print results.json instead of the verdicts.")] = False,
) -> int:
    """Repeat a published experiment on this code: measure, check its claims against the results, write a page.

    Writes DIR/results.json and DIR/index.html. An interrupted study resumes when it is started again. A part that fails
    is named, the exit code is then 1, and the next start measures it again.

    Example: holdfast study checkpoint-cost --quick --out study-out
    """
    from holdfast_lab.studies import STUDIES, carry_out
    from holdfast_lab.studies.base import Options

    if listing:
        _list(as_json=as_json)
        return 0
    if name not in STUDIES:
        raise ConfigError(
            f"the study must be one of {', '.join(STUDIES)}, got {name!r}; holdfast study --list describes them"
        )
    out = out or Path(f"study-{name}")
    if out.exists() and not out.is_dir():
        raise ConfigError(f"--out must be a directory or a new path, got {str(out)!r}, which is a file")
    check_folder(out)
    options = Options(
        out=out, data=data, quick=quick, seed=seed, only=tuple(only or ()), repetitions=repetitions, model=network
    )
    try:
        with sigterm_as_interrupt(), progress(f"preparing {name}", quiet=as_json or not sys.stderr.isatty()) as now:
            results = carry_out(STUDIES[name], options, now.print_line, now.at_task)
    except KeyboardInterrupt:
        print(_stopped(options.out), file=sys.stderr)
        return _STOPPED
    _show(results, options.out, as_json=as_json)
    return _FAILED if results["failed"] else 0


def _stopped(out: Path) -> str:
    from holdfast.observe.page.html import write_page

    if not (out / "results.json").is_file():  # stopped before its first results, or again while it collected them
        return f"stopped; the same command resumes, {out} has the measurements so far"
    return f"stopped; {write_page(out)} shows the measurements so far, and the same command resumes"


def _list(*, as_json: bool) -> None:
    from holdfast_lab.studies import STUDIES

    if as_json:
        print(json.dumps([{"name": s.name, "title": s.title, "paper": s.paper} for s in STUDIES.values()], indent=1))
        return
    for known in STUDIES.values():
        print(f"{known.name}  {known.title}\n    {known.paper}")


def _show(results: dict[str, Any], out: Path, *, as_json: bool) -> None:
    from holdfast.observe.page.html import write_page
    from holdfast_lab.pages.study import claim_lines

    page = write_page(out)
    if as_json:
        print(json.dumps(results, indent=1))
    else:
        print("\n".join(claim_lines(results)))
    for sentence in results["left_out"]:
        print(f"left out: {sentence}", file=sys.stderr)
    for part in results["failed"]:
        print(f"failed: {part['task']}: {part['why']}; the same command measures it again", file=sys.stderr)
    print(f"page: {page}", file=sys.stderr)
