"""Write the tables of options in the manual from what the options declare: ``python -m holdfast.cli.reference docs/reference/cli.md``."""

from __future__ import annotations

import sys
from pathlib import Path

from holdfast.cli.run import OPTIONS
from holdfast.options import Declared

_BEGIN = "<!-- options of holdfast run: written by python -m holdfast.cli.reference -->"
_END = "<!-- end of options -->"


def table(options: list[Declared]) -> str:
    """Return the options as a table in Markdown."""
    rows = [(_cell(each), each.manual, each.usual) for each in options]
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    head = ["| option | meaning | default |", "|---|---|---|"]
    return "\n".join([*head, *(line.replace("|  |", "| |") for line in lines)])


def _cell(declared: Declared) -> str:
    names = [name for flag in sorted(declared.flags, key=len) for name in flag.split("/")]
    value = "" if declared.kind is bool else f" {declared.metavar}"
    return ", ".join(f"`{name}`" for name in names[:-1]) + (", " if names[1:] else "") + f"`{names[-1]}{value}`"


def rewritten(page: str) -> str:
    """Return the page with the table between its two markers made anew; raise a ValueError if one is missing."""
    before, behind = page[: page.index(_BEGIN)], page[page.index(_END) :]
    return f"{before}{_BEGIN}\n\n{table(OPTIONS)}\n\n{behind}"


if __name__ == "__main__":
    manual = Path(sys.argv[1])
    manual.write_text(rewritten(manual.read_text()))
