"""Output of commands: aligned tables, human-readable sizes, colours in a terminal.

Without a terminal, lines are as long as necessary and plain text.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import typer

from holdfast.base.formatting import clean

if TYPE_CHECKING:
    from rich.console import Console

_PIPE_WIDTH = 100_000
"""Width without a terminal, where nothing is truncated or folded."""

_STYLES = {"intact": "green", "DAMAGED": "bold red", "identical": "green", "not read": "dim"}


def in_json(value: Any) -> str:
    """Return a value as standard JSON: dataclasses as objects, non-finite numbers as ``"inf"`` or ``"nan"``."""
    return json.dumps(_plain(value), indent=1, allow_nan=False)


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _plain(dataclasses.asdict(value))
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def moment(seconds: float | None) -> str:
    """Return a Unix time as local date and time; ``-`` if it is unknown."""
    return "-" if seconds is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def count(amount: int, what: str) -> str:
    """Return ``1 tensor``, ``1,234 tensors``."""
    return f"{amount:,} {what}" + ("" if amount == 1 else "s")


def say(text: str, style: str = "") -> None:
    """Print a line on stdout."""
    from rich.text import Text

    _print(_console(), Text(clean(text), style=style))


def table(columns: Sequence[str], rows: Iterable[Sequence[object]], indent: int = 0) -> None:
    """Print a table on stdout.

    A column whose heading ends with ``>`` has numbers, which are right-aligned. Empty headings are not printed.
    """
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    console = _console()
    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold", show_header=any(columns))
    for place, head in enumerate(columns):
        is_number = head.endswith(">")
        # the last column may be long; other columns are short, or names that users copy
        folds = place in (0, len(columns) - 1) and not is_number
        side: Literal["right", "left"] = "right" if is_number else "left"
        made.add_column(head.removesuffix(">"), justify=side, no_wrap=not folds, overflow="fold")
    for row in rows:
        made.add_row(*(Text(text := clean(cell), style=_STYLES.get(text.split(" (")[0], "")) for cell in row))
    _print(console, Padding(made, (0, 0, 0, indent)))


def print_json(value: Any) -> None:
    """Print a value as :func:`in_json` formats it."""
    print(in_json(value))


def warn(text: str) -> None:
    """Print a line on stderr."""
    print(clean(text), file=sys.stderr)


def warn_of(step: int, error: Exception) -> None:
    """Warn of a checkpoint that is skipped because it is damaged."""
    warn(f"warning: {error}")


def need_command(context: typer.Context) -> None:
    """Print the help of a command group to stderr if no command is given, and exit with 2."""
    if context.invoked_subcommand is None:
        print(context.get_help(), file=sys.stderr)
        print(f"error: {context.command_path} needs a command; the commands are listed above", file=sys.stderr)
        raise typer.Exit(2)


def _console() -> Console:
    from rich.console import Console

    is_terminal = sys.stdout.isatty()
    return Console(file=sys.stdout, width=None if is_terminal else _PIPE_WIDTH, highlight=False, soft_wrap=False)


def _print(console: Console, what: object) -> None:
    if sys.stdout.isatty():
        console.print(what)
        return
    with console.capture() as captured:
        console.print(what)
    print("\n".join(line.rstrip() for line in captured.get().splitlines()))
