"""``holdfast doctor``: what changes bits on this machine, or in a script's model, and how to avoid it."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from holdfast.cli.signals import sigterm_as_interrupt
from holdfast.config import MOST_WORKERS
from holdfast.errors import STOPPED, ConfigError

_BREAKS = 1


def doctor(
    script: Annotated[
        Path | None,
        Argument(metavar="[SCRIPT]", help="Check this script's model instead of common layers.", show_default=False),
    ] = None,
    args: Annotated[list[str] | None, Argument(metavar="[ARGS]...", help="Arguments of the script.")] = None,
    *,
    workers: Annotated[
        int,
        Option(
            "--workers",
            "-n",
            metavar="N",
            min=1,
            max=MOST_WORKERS,
            help="Number of workers of the job, which determines the size of a slice.",
        ),
    ] = 4,
    device: Annotated[
        str, Option(metavar="DEVICE", help="Device of the common layers; a script's model is where the script puts it.")
    ] = "cpu",
    timeout: Annotated[float, Option(metavar="SECONDS", help="Limit for the whole check.")] = 600.0,
    as_json: Annotated[bool, Option("--json", help="Print all findings as JSON.")] = False,
) -> int:
    """Check what changes bits on this machine, in common layers or in SCRIPT's model, and recommend settings.

    The script runs up to its first step, which is computed several times, in two processes; nothing is trained. Exits
    with 1 if something changes bits that Holdfast does not control.

    Example: holdfast doctor train.py --epochs 3
    """
    if script is not None and device != "cpu":
        raise ConfigError(
            f"--device {device} is for common layers: a script's model is on the device that the script chooses"
        )
    from holdfast.tools.doctor.subprocesses import inspect

    try:
        with sigterm_as_interrupt():
            findings = inspect(script, args or (), workers=workers, timeout_s=timeout, device=device)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return STOPPED
    return _show(findings, as_json=as_json)


def _show(findings: dict[str, Any], *, as_json: bool) -> int:
    """Print the findings; return the exit code."""
    from holdfast.cli.tables import say
    from holdfast.tools.doctor.report import checks_of, is_exact, lines_of

    checks = checks_of(findings["full"], findings["brief"])
    if as_json:
        output = {
            "exact": is_exact(checks),
            "checks": [dataclasses.asdict(check) for check in checks],
            **findings["full"],
        }
        print(json.dumps(output, indent=1))
    else:
        for line in lines_of(checks):
            say(line)
    return 0 if is_exact(checks) else _BREAKS
