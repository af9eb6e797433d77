"""``holdfast dashboard``: serves a page about runs that other launchers started."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from holdfast.cli.signals import sigterm_as_interrupt


def dashboard(
    directories: Annotated[
        list[Path] | None,
        Argument(metavar="[DIR]...", help="Report directories of runs; without any, the jobs that run here."),
    ] = None,
    *,
    port: Annotated[
        str, Option(metavar="[HOST:]PORT", help="Where to serve; without HOST only to this machine.")
    ] = "8265",
) -> int:
    """Serve a page about finished or running jobs, several side by side, until Ctrl-C.

    A file that grows is followed. The URL, with the token that actions need, is printed once.

    Example: holdfast dashboard out-1 out-2
    """
    from holdfast.observe.monitor.dashboards import serve_runs

    with contextlib.suppress(KeyboardInterrupt), sigterm_as_interrupt():  # the file with the token is removed
        serve_runs(directories or [], port, lambda line: print(f"holdfast: {line}", file=sys.stderr, flush=True))
    return 0
