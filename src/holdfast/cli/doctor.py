"""``holdfast doctor``: what breaks bits on this machine, or in a script's model, and what to do about it."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from holdfast.cli.signals import sigterm_as_interrupt
from holdfast.config import MOST_WORKERS

_BREAKS = 1
_STOPPED = 4


def doctor(
    script: Annotated[
        Path | None,
        Argument(
            metavar="[SCRIPT]", help="Look at this script's model instead of the usual layers.", show_default=False
        ),
    ] = None,
    args: Annotated[list[str] | None, Argument(metavar="[ARGS]...", help="Handed on to the script.")] = None,
    *,
    workers: Annotated[
        int,
        Option(
            "--workers",
            "-n",
            metavar="N",
            min=1,
            max=MOST_WORKERS,
            help="Of the job that it is for: slices are so large.",
        ),
    ] = 4,
    timeout: Annotated[float, Option(metavar="SECONDS", help="For all of it.")] = 600.0,
    as_json: Annotated[bool, Option("--json", help="Print all that was found as JSON.")] = False,
) -> int:
    """Find out on this machine what breaks bits, of the usual layers or of SCRIPT's model, and say what to set.

    The script runs up to its first step, which is computed again and again, in two processes; nothing is trained. Ends with 1 if
    something breaks bits that Holdfast does not hold by itself.

    Example: holdfast doctor train.py --epochs 3
    """
    from holdfast.cli.tables import say
    from holdfast.doctor.report import checks_of, is_exact, lines_of
    from holdfast.doctor.subprocesses import ask

    try:
        with sigterm_as_interrupt():
            said = ask(script, args or (), workers=workers, timeout_s=timeout)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return _STOPPED
    checks = checks_of(said["full"], said["brief"])
    if as_json:
        found = {"exact": is_exact(checks), "checks": [dataclasses.asdict(check) for check in checks], **said["full"]}
        print(json.dumps(found, indent=1))
    else:
        for line in lines_of(checks):
            say(line)
    return 0 if is_exact(checks) else _BREAKS
