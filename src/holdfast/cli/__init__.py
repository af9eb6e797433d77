"""The command line.

What needs no command, as ``holdfast --help``, is answered here, without importing any: that would take most of the time.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

from holdfast.base import system_errors
from holdfast.base.lazy import lazy

if TYPE_CHECKING:
    from holdfast.cli.app import app, exit_code_of

INTERRUPTED = 130
"""Exit code of a command that Ctrl-C ended, as shells report it: 128 and the number of SIGINT."""

NO_JOB = "holdfast: interrupted before the job began"
"""Printed when Ctrl-C ends ``holdfast run`` before there is a job to stop."""

_WHERE = {"app": "holdfast.cli.app", "exit_code_of": "holdfast.cli.app"}

__all__ = ["app", "exit_code_of", "main"]


def main(args: Sequence[str] | None = None) -> NoReturn:
    """Run a command and exit: 0 done, 1 failed, 2 wrong usage, 3 damaged data, 4 stopped with its state saved, 93 failed for good, 130 interrupted."""
    words = list(sys.argv[1:] if args is None else args)
    _open_standard_files()
    if words[:1] == ["--version"] or words[:2] == ["--debug", "--version"]:
        from holdfast import __version__

        _answer(__version__)
    if words == ["--help"] and _columns() >= 80:
        from holdfast.cli.help_text import HELP

        _answer(HELP)
    is_run = words[: 2 if words[:1] == ["--debug"] else 1][-1:] == ["run"]
    line = NO_JOB if is_run else "holdfast: interrupted"
    try:
        from holdfast.cli.signals import ended_by_interrupt
    except KeyboardInterrupt:
        print(line, file=sys.stderr, flush=True)
        os._exit(INTERRUPTED)
    with ended_by_interrupt(line):
        try:
            from holdfast.cli.app import main as run_command
        except system_errors.KINDS as error:
            if not (refused := system_errors.refusal(error)):
                raise
            print(f"error: {refused}", file=sys.stderr)
            sys.exit(1)
        run_command(words)


def _open_standard_files() -> None:
    """Open those of stdin, stdout and stderr that are closed, as some daemons start commands: another file would get the number."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest number that is free
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "w" if number else "r", closefd=False))  # noqa: SIM115 - for the whole process


def _answer(text: str) -> NoReturn:
    """Print the text and exit: 0, or 1 if stdout does not take it."""
    try:
        print(text, flush=True)
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Python writes what is left when it ends
        if not isinstance(error, BrokenPipeError):
            print(f"error: cannot write to stdout: {error.strerror}; send it elsewhere", file=sys.stderr)
        sys.exit(1)
    sys.exit(0)


def _columns() -> int:
    """Return the width of the terminal; 80 where there is none."""
    columns = os.environ.get("COLUMNS", "")
    if columns.isdecimal() and int(columns) > 0:
        return int(columns)
    try:
        return os.get_terminal_size(1).columns or 80
    except OSError:
        return 80


__getattr__ = lazy(__name__, _WHERE)
