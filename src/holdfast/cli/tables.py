"""What commands print: aligned tables, sizes for people, colours where there is a terminal.

Where there is none, lines are as long as they need to be, and hold nothing but text.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

import typer

from holdfast.report.formatting import clean

if TYPE_CHECKING:
    from rich.console import Console

_PIPE_WIDTH = 100_000
"""Nothing is cut or folded where no terminal has a width."""

_STYLES = {"intact": "green", "DAMAGED": "bold red", "identical": "green", "not read": "dim"}


def in_json(value: Any) -> str:
    """Return a value as JSON that every reader takes: dataclasses as objects, what JSON has no number for as ``"inf"`` or ``"nan"``."""
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
    """Return a time since 1970 as local date and time; ``-`` if it is not known."""
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

    A column whose head ends with ``>`` is of numbers, which end in one column. Empty heads: no line of heads.
    """
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    console = _console()
    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold", show_header=any(columns))
    for place, head in enumerate(columns):
        is_number = head.endswith(">")
        # The last column may be long; the others are short, or names that one wants to copy.
        folds = place in (0, len(columns) - 1) and not is_number
        side: Literal["right", "left"] = "right" if is_number else "left"
        made.add_column(head.removesuffix(">"), justify=side, no_wrap=not folds, overflow="fold")
    for row in rows:
        made.add_row(*(Text(text := clean(cell), style=_STYLES.get(text.split(" (")[0], "")) for cell in row))
    _print(console, Padding(made, (0, 0, 0, indent)))


def print_json(value: Any) -> None:
    """Print a value as :func:`in_json` has it."""
    print(in_json(value))


def warn(text: str) -> None:
    """Print a line on stderr."""
    print(clean(text), file=sys.stderr)


def warn_of(step: int, error: Exception) -> None:
    """Warn of a checkpoint that is passed over because it is damaged."""
    warn(f"warning: {error}")


def need_command(context: typer.Context) -> None:
    """Show the help of a group of commands on stderr where none of them is named, and exit as for other wrong usage."""
    if context.invoked_subcommand is None:
        print(context.get_help(), file=sys.stderr)
        print(f"error: {context.command_path} needs a command; those there are stand above", file=sys.stderr)
        raise typer.Exit(2)


@contextmanager
def progress(text: str) -> Iterator[Callable[[str], None]]:
    """Show on stderr what is being done, if that is a terminal, and yield what says more; it is gone when it is done."""
    if not sys.stderr.isatty():
        yield lambda text: None
        return
    from rich.console import Console
    from rich.markup import escape

    with Console(file=sys.stderr).status(clean(text)) as status:
        yield lambda text: status.update(escape(clean(text)))


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
