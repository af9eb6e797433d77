"""``holdfast debug-bundle``: one archive with what is known about a run, to attach to a bug report."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

if TYPE_CHECKING:
    from holdfast.launch.control import RunningJob
    from holdfast.tools.debug.bundle import BundleSource


def debug_bundle(
    directory: Annotated[
        Path | None, Argument(metavar="[DIR]", help="The report directory of a run.", show_default=False)
    ] = None,
    *,
    job: Annotated[
        int | None, Option(metavar="NUMBER", help="A running job: the process number of its launcher.")
    ] = None,
    out: Annotated[
        Path | None, Option(metavar="FILE", help="The archive  [holdfast-debug-NAME-TIME.tar.gz in this directory]")
    ] = None,
) -> None:
    """Collect what helps to find out why a run recovered, hung or failed, in one archive without secrets.

    Contains report, records, output, versions, and the environment variables that are known to help. Of a running job
    also each worker's position, its stack if py-spy is installed, and the flight recorder of torch if the job was
    started with --debug-handlers. No worker is paused. What looks like a secret is replaced by <redacted>: look through
    the archive before you publish it.

    Example: holdfast debug-bundle out
    """
    from holdfast.errors import ConfigError
    from holdfast.tools.debug.bundle import write_bundle

    if directory is not None and job is not None:
        raise ConfigError("give a report directory or --job NUMBER, not both")
    running = _running(directory, job)
    source = _finished(directory) if running is None else _live(running)
    name = f"job-{running.pid}" if running is not None else _name(directory)
    out = out or Path(f"holdfast-debug-{name}-{time.strftime('%Y%m%d-%H%M%S')}.tar.gz")
    if out.is_dir():
        raise ConfigError(f"--out must be a file, and {out} is a directory")
    files = write_bundle(source, out)
    print(f"{out}  ({len(files)} files)")


def _running(directory: Path | None, number: int | None) -> RunningJob | None:
    """Return the running job that is meant, None if the directory is of a run that is over."""
    from holdfast.launch.control import find, writing_to

    return find(number) if directory is None else writing_to(directory)


def _live(running: RunningJob) -> BundleSource:
    from holdfast.tools.debug.running import live_source

    return live_source(running)


def _finished(directory: Path | None) -> BundleSource:
    from holdfast.errors import ConfigError
    from holdfast.tools.debug.bundle import BundleSource

    assert directory is not None
    if not (directory / "report.json").is_file():
        raise ConfigError(
            f"there is no report.json in {directory}, and no running job of yours writes to it; "
            f"`holdfast run --report {directory} ...` writes one"
        )
    notes = [
        "the run is over: environment.json is that of the command that made this bundle",
        "the run is over: there are no stacks; those of workers that hung are in events.jsonl and report.json",
    ]
    return BundleSource(report_dir=directory, log_dir=directory / "logs", environment=dict(os.environ), notes=notes)


def _name(directory: Path | None) -> str:
    assert directory is not None
    return directory.resolve().name or "run"
